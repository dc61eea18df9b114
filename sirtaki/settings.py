"""What a user may set from outside: environment variables → one frozen `Settings`.

The only module that reads settings from the environment, so that whoever looks for a switch looks here (what launchers
write there, such as a rank's place, are facts and no settings). Sirtaki's own names win over Horovod's. An invalid
value is refused at once; a Horovod variable that has no meaning here is accepted with a note.
"""

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.errors import ConfigError
from sirtaki.host_port import parse_address
from sirtaki.launchers import AGENT
from sirtaki.measures import SMALLEST_UNIT_BYTES

REGISTRY_OFF = "off"
TIMELINE_DYNAMIC = "DYNAMIC"


NEVER_S = 7 * 24 * 3600.0
"""What "no time limit" means to libraries that need a number."""

TRANSPORT_GRACE_S = 60.0


class Overlap(Enum):
    """Whether communication is hidden behind the next forward pass, too."""

    OFF = "0"
    ON = "1"
    CHECK = "check"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What is to be recorded of a job; its text is that of `SIRTAKI_PROFILE`: `FOLDER?iterations=20&operators=0`.

    Attributes:
        folder: where to.
        iterations: how many are recorded.
        operators: record operators, too; without them gradients and units only, which costs less.
        edges: of operators also what they read, for Chakra traces; one more iteration takes longer.
    """

    folder: str
    iterations: int = 10
    operators: bool = True
    edges: bool = False

    def __str__(self) -> str:
        return f"{self.folder}?iterations={self.iterations}&operators={self.operators:d}&edges={self.edges:d}"

    @classmethod
    def parse(cls, text: str) -> "ProfileRequest":
        """What such a text asks for; ValueError if it is none."""
        folder, _, options = text.partition("?")
        given = dict(parse_qsl(options, strict_parsing=True))
        readers = {"iterations": _integer(1), "operators": _one_of(_FLAGS), "edges": _one_of(_FLAGS)}
        if not folder or not given.keys() <= readers.keys():
            raise ValueError(text)
        return cls(folder=folder, **{name: readers[name](value) for name, value in given.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one process; None = not set, so free to be tuned or chosen.

    Attributes:
        tune: search for a better setting in the first iterations; off = the default, and what is fixed by others.
        warmup_iterations: training iterations in which trials may run.
        plan: file that `sirtaki optimize` has written, or its folder: the warm-up tries that plan first; without tuning
            it is what runs. Rank 0's holds for all.
        unit_bytes: fixes the size of a unit.
        streams: fixes how many communicators run at the same time.
        transport: fixes what carries the units.
        algorithm: fixes flat or hierarchical reduction.
        sparse: the way of rows of sparse gradients; None, set by `auto`: the fastest is found; rank 0's holds for all.
        local_size: pretend that this many consecutive ranks share a node, to try hierarchies on one machine.
        gloo_interface: network interface, or several with commas, that Gloo connects through.
        control: what carries the control plane; None, set by `auto`: what the launcher's environment asks for.
        secret: of the job, which ranks of a mesh prove to know; launchers set it. None = rank 0 makes one.
        heartbeat_s: a rank of a mesh that is silent for so long is given up; None, set by 0: never.
        start_timeout_s: how long the ranks of a mesh wait for each other at the start.
        elastic_timeout_s: how long a rank of an elastic job waits for enough others.
        checkpoint_dir: folder for checkpoints of `hvd.elastic` states, from which the same command goes on; all hosts
            should see it. None, not set: there are none.
        checkpoint_s: seconds between two checkpoints at least.
        stall_check: watch for ranks that do not come.
        stall_warning_s: seconds after which missing ranks are named in a warning.
        stall_shutdown_s: seconds after which missing ranks are an error; None, set by 0: never.
        trial_log: file for one machine-readable line a trial.
        metrics: address and port of local rank 0 for Prometheus; the port of the next rank is one higher.
        registry: where results are remembered: a database URL, a file, or "off"; None, not set: the user's cache.
        unused_as_none: gradients that no rank has are None (PyTorch's rule) instead of zeros (Horovod's).
        overlap_forward: distributed optimizers update parameters in the next forward pass, each before it is read;
            "check" = and every read is verified.
        fsdp_memory: bytes that tuned sharded training may use above the peak of the untuned one.
        check_nan: name the rank, parameter and iteration that first bring a NaN or an infinity.
        timeline: file for a Chrome trace; "DYNAMIC" = none yet, but `start_timeline` may open one.
        timeline_mark_cycles: mark the negotiation rounds in the trace.
        profile: folder into which a few iterations after the warm-up are recorded, and how; rank 0's holds for all.
        log_level: level of the `sirtaki` logger, as in `logging`.
        log_time: log lines begin with the time.
        notes: one line for each of Horovod's variables that was accepted but has no effect here.
        warnings: one line for each variable that earlier releases had, with what takes its place.
    """

    tune: bool = True
    warmup_iterations: int = 100
    plan: str | None = None
    unit_bytes: int | None = None
    streams: int | None = None
    transport: TransportKind | None = None
    algorithm: Algorithm | None = None
    sparse: SparsePath | None = None
    local_size: int | None = None
    gloo_interface: str | None = None
    control: Backend | None = None
    secret: str | None = field(default=None, repr=False)
    heartbeat_s: float | None = 30.0
    start_timeout_s: float = 120.0
    elastic_timeout_s: float = 600.0
    checkpoint_dir: str | None = None
    checkpoint_s: float = 60.0
    stall_check: bool = True
    stall_warning_s: float = 60.0
    stall_shutdown_s: float | None = 600.0
    trial_log: str | None = None
    metrics: tuple[str, int] | None = None
    registry: str | None = None
    unused_as_none: bool = False
    overlap_forward: Overlap = Overlap.OFF
    fsdp_memory: int = 0
    check_nan: bool = False
    timeline: str | None = None
    timeline_mark_cycles: bool = False
    profile: ProfileRequest | None = None
    log_level: int = logging.INFO
    log_time: bool = True
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def missing_ranks_limit_s(self) -> float | None:
        """Seconds after which missing ranks are an error; None = never."""
        return self.stall_shutdown_s if self.stall_check else None

    @property
    def transport_timeout_s(self) -> float:
        """How long transports wait: longer than the watchdog, which can say who is missing."""
        limit_s = self.missing_ranks_limit_s
        return limit_s + TRANSPORT_GRACE_S if limit_s else NEVER_S

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """The settings in `environ` (default: this process's); an empty value counts as not set.

        Raises:
            ConfigError: a value is invalid, or a `SIRTAKI_…` variable does not exist.
        """
        environ = os.environ if environ is None else environ
        present = {name: value.strip() for name, value in environ.items() if value.strip()}
        _refuse_unknown(present)
        values = {
            variable.field: variable.read(present[variable.name]) for variable in VARIABLES if variable.name in present
        }
        notes = tuple(f"{name} has no effect here: {why}" for name, why in WITHOUT_EFFECT.items() if name in present)
        warnings = tuple(f"{name} is no setting any more: {use}" for name, use in REMOVED.items() if name in present)
        return cls(**values, notes=notes, warnings=warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable that sets one field of `Settings`.

    Attributes:
        parse: its text → the field's value, ValueError if it is invalid.
        accepts: what `parse` takes, for messages and documents.
    """

    name: str
    field: str
    parse: Callable[[str], Any]  # Any: the type of the field that it sets
    accepts: str

    def read(self, text: str) -> Any:  # Any: as `parse`
        """The field's value.

        Raises:
            ConfigError: naming the variable, what was found and what is accepted.
        """
        try:
            return self.parse(text)
        except ValueError as err:
            raise ConfigError(f"{self.name}={text!r} is invalid; accepted: {self.accepts}") from err


def _one_of(choices: Mapping[str, Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text.lower() not in choices:
            raise ValueError(text)
        return choices[text.lower()]

    return parse


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if (value := int(text)) < least:
            raise ValueError(text)
        return value

    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _seconds_or_never(text: str) -> float | None:
    return _seconds(text) if float(text) != 0 else None


def _size(text: str) -> int:
    """`262144`, `256 KiB`, `1.5MiB` → bytes."""
    number, scale = text.lower(), 1
    for suffix, factor in (("kib", 1024), ("mib", 1024**2), ("gib", 1024**3)):
        if number.endswith(suffix):
            number, scale = number.removesuffix(suffix), factor
    value = float(number) * scale
    if value < 1 or not value.is_integer():
        raise ValueError(text)
    return int(value)


def _fusion_threshold(text: str) -> int:
    """Horovod's 0 means "do not fuse"; the smallest unit comes nearest."""
    return _integer(0)(text) or SMALLEST_UNIT_BYTES


def _port(text: str) -> tuple[str, int]:
    """`9400` is loopback's; `0.0.0.0:9400`."""
    if ":" in text:
        return parse_address(text)
    return "127.0.0.1", _integer(1)(text)


_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

# Parser and what it accepts, for each kind of value.
_FLAG = {"parse": _one_of(_FLAGS), "accepts": "1 or 0 (true, false, yes, no, on, off)"}
_NOT_FLAG = {**_FLAG, "parse": _one_of({text: not value for text, value in _FLAGS.items()})}
_COUNT = {"parse": _integer(1), "accepts": "a whole number from 1"}
_FROM_ZERO = {"parse": _integer(0), "accepts": "a whole number from 0"}
_SIZE = {"parse": _size, "accepts": "bytes, or with a unit such as 256 KiB or 4 MiB"}
_SECONDS = {"parse": _seconds, "accepts": "seconds above 0"}
_LIMIT = {"parse": _seconds_or_never, "accepts": "seconds above 0, or 0 for never"}
_TEXT = {"parse": str, "accepts": "any text"}


def _enum(kind: type[Enum]) -> dict[str, Any]:
    return {"parse": _one_of({member.value: member for member in kind}), "accepts": ", ".join(m.value for m in kind)}


def _variable(name: str, field: str, kind: Mapping[str, Any]) -> Variable:
    return Variable(name=name, field=field, **kind)


# Of several variables for one field the last one that is set wins, so Sirtaki's own name comes last.
VARIABLES: tuple[Variable, ...] = (
    _variable("HOROVOD_AUTOTUNE", "tune", _FLAG),
    _variable("SIRTAKI_TUNE", "tune", _FLAG),
    _variable("SIRTAKI_WARMUP_ITERATIONS", "warmup_iterations", _FROM_ZERO),
    _variable("SIRTAKI_PLAN", "plan", _TEXT),
    _variable(
        "HOROVOD_FUSION_THRESHOLD",
        "unit_bytes",
        {"parse": _fusion_threshold, "accepts": "bytes, or 0 for the smallest units"},
    ),
    _variable("SIRTAKI_UNIT_BYTES", "unit_bytes", _SIZE),
    _variable("HOROVOD_NUM_NCCL_STREAMS", "streams", _COUNT),
    _variable("SIRTAKI_STREAMS", "streams", _COUNT),
    _variable("SIRTAKI_TRANSPORT", "transport", _enum(TransportKind)),
    _variable(
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "algorithm",
        {
            **_FLAG,
            "parse": _one_of({t: Algorithm.HIERARCHICAL if on else Algorithm.FLAT for t, on in _FLAGS.items()}),
        },
    ),
    _variable("SIRTAKI_ALGORITHM", "algorithm", _enum(Algorithm)),
    _variable(
        "SIRTAKI_SPARSE",
        "sparse",
        {
            "parse": _one_of({"auto": None} | {path.value: path for path in SparsePath}),
            "accepts": f"auto (the fastest is found out), {', '.join(path.value for path in SparsePath)}",
        },
    ),
    _variable("SIRTAKI_LOCAL_SIZE", "local_size", _COUNT),
    _variable("GLOO_SOCKET_IFNAME", "gloo_interface", _TEXT),
    _variable("HOROVOD_GLOO_IFACE", "gloo_interface", _TEXT),
    _variable("SIRTAKI_GLOO_IFACE", "gloo_interface", _TEXT),
    _variable(
        "SIRTAKI_CONTROL",
        "control",
        {
            "parse": _one_of({"auto": None} | {backend.value: backend for backend in Backend}),
            "accepts": "auto (as the launcher's environment says), mpi or mesh",
        },
    ),
    _variable("SIRTAKI_SECRET", "secret", _TEXT),
    _variable("SIRTAKI_HEARTBEAT_S", "heartbeat_s", _LIMIT),
    _variable("SIRTAKI_START_TIMEOUT_S", "start_timeout_s", _SECONDS),
    _variable("HOROVOD_ELASTIC_TIMEOUT", "elastic_timeout_s", _SECONDS),
    _variable("SIRTAKI_CHECKPOINT_DIR", "checkpoint_dir", _TEXT),
    _variable("SIRTAKI_CHECKPOINT_S", "checkpoint_s", _SECONDS),
    _variable("HOROVOD_STALL_CHECK_DISABLE", "stall_check", _NOT_FLAG),
    _variable("HOROVOD_STALL_CHECK_TIME_SECONDS", "stall_warning_s", _SECONDS),
    _variable("SIRTAKI_STALL_WARNING_S", "stall_warning_s", _SECONDS),
    _variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall_shutdown_s", _LIMIT),
    _variable("SIRTAKI_STALL_SHUTDOWN_S", "stall_shutdown_s", _LIMIT),
    _variable("HOROVOD_AUTOTUNE_LOG", "trial_log", _TEXT),
    _variable("SIRTAKI_TRIAL_LOG", "trial_log", _TEXT),
    _variable("SIRTAKI_METRICS_PORT", "metrics", {"parse": _port, "accepts": "a port of 127.0.0.1, or ADDRESS:PORT"}),
    _variable("SIRTAKI_REGISTRY", "registry", _TEXT),
    _variable("SIRTAKI_FSDP_MEMORY", "fsdp_memory", _SIZE),
    _variable("SIRTAKI_CHECK_NAN", "check_nan", _FLAG),
    _variable(
        "SIRTAKI_UNUSED",
        "unused_as_none",
        {"parse": _one_of({"zeros": False, "none": True}), "accepts": "zeros (as Horovod) or none (as PyTorch)"},
    ),
    _variable(
        "SIRTAKI_OVERLAP_FORWARD",
        "overlap_forward",
        {
            "parse": _one_of(
                {text: Overlap.ON if on else Overlap.OFF for text, on in _FLAGS.items()} | {"check": Overlap.CHECK}
            ),
            "accepts": "1, 0 or check",
        },
    ),
    _variable("HOROVOD_TIMELINE", "timeline", _TEXT),
    _variable("SIRTAKI_TIMELINE", "timeline", _TEXT),
    _variable("HOROVOD_TIMELINE_MARK_CYCLES", "timeline_mark_cycles", _FLAG),
    _variable(
        "SIRTAKI_PROFILE",
        "profile",
        {"parse": ProfileRequest.parse, "accepts": "FOLDER, or FOLDER?iterations=10&operators=1&edges=0"},
    ),
    _variable("HOROVOD_LOG_LEVEL", "log_level", {"parse": _one_of(_LEVELS), "accepts": ", ".join(_LEVELS)}),
    _variable("SIRTAKI_LOG_LEVEL", "log_level", {"parse": _one_of(_LEVELS), "accepts": ", ".join(_LEVELS)}),
    _variable("HOROVOD_LOG_HIDE_TIME", "log_time", _NOT_FLAG),
)

# Horovod's variables that a script may set without harm, and why nothing follows from them.
WITHOUT_EFFECT: Mapping[str, str] = {
    "HOROVOD_CYCLE_TIME": "units leave as soon as they are ready, there is no cycle",
    "HOROVOD_CACHE_CAPACITY": "the schedule replaces the response cache",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "an all-gather has one algorithm",
    "HOROVOD_TORUS_ALLREDUCE": "use SIRTAKI_ALGORITHM",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "use SIRTAKI_WARMUP_ITERATIONS",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "the noise decides how long a trial runs",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "use SIRTAKI_WARMUP_ITERATIONS",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "the noise is measured",
    "HOROVOD_THREAD_AFFINITY": "use the launcher's --binding-args",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "use SIRTAKI_STALL_SHUTDOWN_S",
    "HOROVOD_CPU_OPERATIONS": "transports are tuned; use SIRTAKI_TRANSPORT to fix one",
    "HOROVOD_CONTROLLER": "use SIRTAKI_CONTROL",
    "HOROVOD_MPI_THREADS_DISABLE": "the thread level is what the MPI library offers",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets may always be added and removed after init()",
}

# What earlier releases read, and what takes its place.
REMOVED: Mapping[str, str] = {
    "SIRTAKI_RETUNE": "SIRTAKI_PLAN with SIRTAKI_TUNE=0 keeps one setting",
    "SIRTAKI_AGGREGATOR": "ranks sum hot rows themselves, which was faster in every job that was measured",
    "SIRTAKI_THREADS": "the tuner chooses them; SIRTAKI_PLAN with SIRTAKI_TUNE=0 keeps a plan's",
    "SIRTAKI_ELASTIC_TIMEOUT_S": "use HOROVOD_ELASTIC_TIMEOUT, or sirtakirun --elastic-timeout",
    "SIRTAKI_STALL_CHECK": "use HOROVOD_STALL_CHECK_DISABLE=1, or sirtakirun --no-stall-check",
    "SIRTAKI_METRICS_HOST": "use SIRTAKI_METRICS_PORT=ADDRESS:PORT",
    "SIRTAKI_SEED": "the tuner always draws from the same seed",
    "SIRTAKI_PROFILE_ITERATIONS": "use SIRTAKI_PROFILE=FOLDER?iterations=N",
    "SIRTAKI_PROFILE_OPERATORS": "use SIRTAKI_PROFILE=FOLDER?operators=0",
    "SIRTAKI_PROFILE_EDGES": "use SIRTAKI_PROFILE=FOLDER?edges=1",
}


def variables_set() -> dict[str, str]:
    """Those of our variables that are set, as they are, but for what only the job's own processes may know."""
    names = (variable.name for variable in VARIABLES if variable.field != "secret")
    return {name: os.environ[name] for name in names if os.environ.get(name, "").strip()}


def _refuse_unknown(present: Mapping[str, str]) -> None:
    """A misspelt switch must not be overlooked; names below `SIRTAKI_TEST_` are the tests' own."""
    ours = [variable.name for variable in VARIABLES if variable.name.startswith("SIRTAKI_")]
    for name in present:
        if (
            name.startswith("SIRTAKI_")
            and not name.startswith("SIRTAKI_TEST_")
            and name not in (*ours, *REMOVED, AGENT)
        ):
            near = difflib.get_close_matches(name, ours, n=1, cutoff=0)[0]
            raise ConfigError(f"{name} is not a setting; the nearest one is {near} (all: {', '.join(ours)})")
