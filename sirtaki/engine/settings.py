"""Read the settings of a process from environment variables into one frozen `Settings`.

Only this module reads settings from the environment. Variables that launchers set, such as a rank, are no settings.
Sirtaki's variables override Horovod's. An invalid value is an error. A Horovod variable without an equivalent is
accepted with a note.
"""

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.failure import Timeout
from sirtaki.comm.plan import COMPRESSORS, Algorithm, TransportKind, compressor_name
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.engine.launchers import AGENT, BAR
from sirtaki.errors import ConfigError
from sirtaki.machine import parse_address
from sirtaki.measures import SMALLEST_UNIT_BYTES

# ruff: noqa: RUF009  # disables the rule against calls as defaults, because `_set_by` returns a dataclass field

TRACE = 5
"""Log level below `logging.DEBUG`, at which each training step is logged."""

REGISTRY_OFF = "off"
TIMELINE_DYNAMIC = "DYNAMIC"


NEVER_S = 7 * 24 * 3600.0
"""Seconds to pass as "no time limit" to libraries that require a number."""

TRANSPORT_GRACE_S = 60.0


class Overlap(Enum):
    """Mode of overlapping communication with the next forward pass."""

    OFF = "0"
    ON = "1"
    CHECK = "check"


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
    """Parse `262144`, `256 KiB` or `1.5MiB` into bytes."""
    number, scale = text.lower(), 1
    for suffix, factor in (("kib", 1024), ("mib", 1024**2), ("gib", 1024**3)):
        if number.endswith(suffix):
            number, scale = number.removesuffix(suffix), factor
    value = float(number) * scale
    if value < 1 or not value.is_integer():
        raise ValueError(text)
    return int(value)


def _fusion_threshold(text: str) -> int:
    # Replace Horovod's 0 ("do not fuse tensors") by the smallest unit (bucket) size, which fuses as few as possible.
    return _integer(0)(text) or SMALLEST_UNIT_BYTES


def _compressors(text: str) -> tuple[str, ...]:
    """Parse names of compressors: `int8, PowerSGD` becomes `("int8", "powersgd:4")`."""
    return tuple(sorted({compressor_name(name) for name in text.split(",") if name.strip()}))


def _port(text: str) -> tuple[str, int]:
    """Parse an address and port, such as `0.0.0.0:9400`. For a port alone (`9400`), the address is 127.0.0.1."""
    if ":" in text:
        return parse_address(text)
    return "127.0.0.1", _integer(1)(text)


_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Request to record a profile of some iterations, parsed from `SIRTAKI_PROFILE=FOLDER?iterations=20&operators=0`.

    Attributes:
        folder: output folder.
        iterations: number of iterations to record.
        operators: True to record PyTorch's operators, too. If False, only gradients and units (buckets) are recorded,
            at a lower cost.
        edges: True to record the inputs of operators in one more iteration, for traces in the Chakra format. This
            iteration is slow.
    """

    folder: str
    iterations: int = 10
    operators: bool = True
    edges: bool = False

    def __str__(self) -> str:
        return f"{self.folder}?iterations={self.iterations}&operators={self.operators:d}&edges={self.edges:d}"

    @classmethod
    def parse(cls, text: str) -> "ProfileRequest":
        """Parse the value of `SIRTAKI_PROFILE`. Raise ValueError if it is invalid."""
        folder, _, options = text.partition("?")
        given = dict(parse_qsl(options, strict_parsing=True))
        readers = {"iterations": _integer(1), "operators": _one_of(_FLAGS), "edges": _one_of(_FLAGS)}
        if not folder or not given.keys() <= readers.keys():
            raise ValueError(text)
        return cls(folder=folder, **{name: readers[name](value) for name, value in given.items()})


_Kind = tuple[Callable[[str], Any], str]
"""A parser of an environment variable's text, and a description of the values that it accepts."""

_FLAG: _Kind = _one_of(_FLAGS), "1 or 0 (true, false, yes, no, on, off)"
_NOT_FLAG: _Kind = _one_of({text: not value for text, value in _FLAGS.items()}), _FLAG[1]
_COUNT: _Kind = _integer(1), "a whole number from 1"
_FROM_ZERO: _Kind = _integer(0), "a whole number from 0"
_SIZE: _Kind = _size, "bytes, or with a unit such as 256 KiB or 4 MiB"
_FUSION: _Kind = _fusion_threshold, "bytes, or 0 for the smallest units"
_SECONDS: _Kind = _seconds, "seconds above 0"
_LIMIT: _Kind = _seconds_or_never, "seconds above 0, or 0 for never"
_LEVEL: _Kind = _one_of(_LEVELS), ", ".join(_LEVELS)
_TEXT: _Kind = str, "any text"
_HIERARCHY: _Kind = _one_of({t: Algorithm.HIERARCHICAL if on else Algorithm.FLAT for t, on in _FLAGS.items()}), _FLAG[1]
_OVERLAP: _Kind = (
    _one_of({text: Overlap.ON if on else Overlap.OFF for text, on in _FLAGS.items()} | {"check": Overlap.CHECK}),
    "1, 0 or check",
)


def _member(kind: type[Enum]) -> _Kind:
    return _one_of({member.value: member for member in kind}), ", ".join(member.value for member in kind)


def _member_or_auto(kind: type[Enum], accepts: str) -> _Kind:
    return _one_of({"auto": None} | {member.value: member for member in kind}), accepts


# `default` and the result are Any, like those of `dataclasses.field`.
def _set_by(default: Any, *, shown: bool = True, **variables: _Kind) -> Any:
    """Make a dataclass field that any of the environment variables `variables` sets. The last one that is set wins, so
    Sirtaki's own variable must be last.
    """
    return field(default=default, repr=shown, metadata={"variables": variables})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one process. None means "not set": the value is tuned or chosen. A time limit of None never ends.

    Attributes:
        tune: search for a faster setting in the first iterations. With 0, the untuned default runs, with the values
            that other variables fix.
        warmup_iterations: number of training iterations in which settings may be tried. The comparison that proves the
            result takes as many more as it needs, at most 1.5 times this number. 0 = no tuning.
        refine_until: number of training iterations after the warm-up in which the job tries more settings, at growing
            intervals, and changes to faster ones. 0 = none. Rank 0's value applies to all ranks.
        freeze_after: training iteration from which no other setting is tried after the warm-up, not even if the network
            changes, so that gradients are summed in the same order from then on. Rank 0's value applies to all ranks.
        plan: plan file of `sirtaki optimize` (which gradients each unit has), or its folder. The warm-up tries the plan
            first. Without tuning, the plan is used. Rank 0's value applies to all ranks.
        unit_bytes: fixed size of a unit. A unit is one all-reduce (DDP's bucket, Horovod's fusion buffer). Tuned if not
            set.
        streams: fixed number of concurrent all-reduces. Each stream has its own communicator. Tuned if not set.
        transport: fixed transport of the units. Tuned if not set.
        algorithm: fixed algorithm: flat is one all-reduce over all ranks, hierarchical reduces within each node first.
            Tuned if not set.
        lossy: compressors that the tuner may try. It keeps them only if they are proved faster. Rank 0's value applies
            to all ranks.
        sparse: algorithm for the rows of sparse gradients. Not set = auto. Rank 0's value applies to all ranks.
        local_size: number of consecutive ranks per simulated node, to try hierarchical reduction on one machine.
        gloo_interface: network interface for Gloo's connections, or several, comma-separated.
        control: backend of all messages between ranks except gradients: MPI, or direct connections (mesh). Not set =
            auto.
        secret: secret of the job, with which ranks that connect without MPI authenticate. Ray sets it. Otherwise rank 0
            generates one; in elastic jobs, the launcher does.
        heartbeat_s: seconds without a message after which a rank counts as lost (over MPI: a host). A stopped process,
            or code that holds Python's interpreter lock, sends no message.
        start_timeout_s: seconds that ranks wait for each other at the start, in jobs without MPI.
        elastic_timeout_s: seconds that a rank of an elastic job waits for the minimum number of ranks.
        checkpoint_dir: folder for checkpoints of `hvd.elastic` states. The same command resumes from it. All hosts
            should share it. Without it, no checkpoints are written.
        checkpoint_s: minimum seconds between two checkpoints.
        stall_check: detect missing ranks. `HOROVOD_STALL_CHECK_DISABLE=1` turns this off.
        stall_warning_s: seconds after which a warning names missing ranks.
        stall_shutdown_s: seconds after which missing ranks are an error. If it is not set, models that are attached to
            a PyTorch process group use that group's `timeout`.
        trial_log: file for one JSON line per trial, on rank 0's host. It is not written for FSDP2 models.
        metrics: port, or address and port, of the Prometheus endpoint of local rank 0. The next local rank uses the
            next port.
        registry: store of results: a database URL, a file, or "off". Not set = `~/.cache/sirtaki/registry.db`.
        unused_as_none: with the distributed optimizer, a gradient that no rank has becomes None (as in PyTorch) instead
            of zeros (as in Horovod). With attached models, it is always None.
        overlap_forward: distributed optimizers update each parameter in the next forward pass, before it is read.
            "check" also verifies every read.
        attach: models that Sirtaki attaches without a call in the script, after their first step. auto: DDP and FSDP2
            models over any backend. 1: only DDP models over the backend "sirtaki". 0: none.
        flight_entries: capacity of PyTorch's flight recorder. If set, the recorder also has an entry for each large
            tensor over the backend "sirtaki".
        fsdp_memory: bytes per rank that tuned settings of FSDP2 may use above the peak of the untuned setting.
            Compressed gathers are not counted.
        check_nan: report the rank, parameter and iteration of the first NaN or infinity.
        timeline: file for a Chrome trace. "DYNAMIC": no trace until `start_timeline` opens one.
        timeline_mark_cycles: mark the negotiation rounds in the trace.
        profile: folder and options for recording a few iterations after the warm-up. Rank 0's value applies to all
            ranks.
        log_level: level of the `sirtaki` logger, as in `logging`. "trace" also logs each training step.
        log_time: begin log lines with the time. `HOROVOD_LOG_HIDE_TIME=1` omits it.
        notes: one line for each Horovod variable that is set but has no effect.
        warnings: one line for each removed variable that is set, with its replacement.
    """

    tune: bool = _set_by(True, HOROVOD_AUTOTUNE=_FLAG, SIRTAKI_TUNE=_FLAG)
    warmup_iterations: int = _set_by(100, SIRTAKI_WARMUP_ITERATIONS=_FROM_ZERO)
    refine_until: int = _set_by(10_000, SIRTAKI_REFINE_UNTIL=_FROM_ZERO)
    freeze_after: int | None = _set_by(None, SIRTAKI_FREEZE_AFTER=_FROM_ZERO)
    plan: str | None = _set_by(None, SIRTAKI_PLAN=_TEXT)
    unit_bytes: int | None = _set_by(None, HOROVOD_FUSION_THRESHOLD=_FUSION, SIRTAKI_UNIT_BYTES=_SIZE)
    streams: int | None = _set_by(None, HOROVOD_NUM_NCCL_STREAMS=_COUNT, SIRTAKI_STREAMS=_COUNT)
    transport: TransportKind | None = _set_by(None, SIRTAKI_TRANSPORT=_member(TransportKind))
    algorithm: Algorithm | None = _set_by(
        None, HOROVOD_HIERARCHICAL_ALLREDUCE=_HIERARCHY, SIRTAKI_ALGORITHM=_member(Algorithm)
    )
    lossy: tuple[str, ...] = _set_by((), SIRTAKI_LOSSY=(_compressors, f"a list with commas of {COMPRESSORS}"))
    sparse: SparsePath | None = _set_by(
        None, SIRTAKI_SPARSE=_member_or_auto(SparsePath, f"auto (the fastest one), {_member(SparsePath)[1]}")
    )
    local_size: int | None = _set_by(None, SIRTAKI_LOCAL_SIZE=_COUNT)
    gloo_interface: str | None = _set_by(
        None, GLOO_SOCKET_IFNAME=_TEXT, HOROVOD_GLOO_IFACE=_TEXT, SIRTAKI_GLOO_IFACE=_TEXT
    )
    control: Backend | None = _set_by(
        None, SIRTAKI_CONTROL=_member_or_auto(Backend, "auto (as the launcher's environment says), mpi or mesh")
    )
    secret: str | None = _set_by(None, SIRTAKI_SECRET=_TEXT, shown=False)
    heartbeat_s: float | None = _set_by(30.0, SIRTAKI_HEARTBEAT_S=_LIMIT)
    start_timeout_s: float = _set_by(120.0, SIRTAKI_START_TIMEOUT_S=_SECONDS)
    elastic_timeout_s: float = _set_by(600.0, HOROVOD_ELASTIC_TIMEOUT=_SECONDS)
    checkpoint_dir: str | None = _set_by(None, SIRTAKI_CHECKPOINT_DIR=_TEXT)
    checkpoint_s: float = _set_by(60.0, SIRTAKI_CHECKPOINT_S=_SECONDS)
    stall_check: bool = _set_by(True, HOROVOD_STALL_CHECK_DISABLE=_NOT_FLAG)
    stall_warning_s: float = _set_by(60.0, HOROVOD_STALL_CHECK_TIME_SECONDS=_SECONDS)
    stall_shutdown_s: float | Timeout | None = _set_by(600.0, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=_LIMIT)
    trial_log: str | None = _set_by(None, HOROVOD_AUTOTUNE_LOG=_TEXT, SIRTAKI_TRIAL_LOG=_TEXT)
    metrics: tuple[str, int] | None = _set_by(
        None, SIRTAKI_METRICS_PORT=(_port, "a port of 127.0.0.1, or ADDRESS:PORT")
    )
    registry: str | None = _set_by(None, SIRTAKI_REGISTRY=_TEXT)
    unused_as_none: bool = _set_by(
        False, SIRTAKI_UNUSED=(_one_of({"zeros": False, "none": True}), "zeros (as Horovod) or none (as PyTorch)")
    )
    overlap_forward: Overlap = _set_by(Overlap.OFF, SIRTAKI_OVERLAP_FORWARD=_OVERLAP)
    # True for auto, too, because `sirtaki.attach` reads that value itself.
    attach: bool = _set_by(True, SIRTAKI_ATTACH=(_one_of(_FLAGS | {"auto": True}), "auto, 1 or 0"))
    flight_entries: int = _set_by(0, TORCH_NCCL_TRACE_BUFFER_SIZE=_FROM_ZERO, TORCH_FR_BUFFER_SIZE=_FROM_ZERO)
    fsdp_memory: int = _set_by(0, SIRTAKI_FSDP_MEMORY=_SIZE)
    check_nan: bool = _set_by(False, SIRTAKI_CHECK_NAN=_FLAG)
    timeline: str | None = _set_by(None, HOROVOD_TIMELINE=_TEXT)
    timeline_mark_cycles: bool = _set_by(False, HOROVOD_TIMELINE_MARK_CYCLES=_FLAG)
    profile: ProfileRequest | None = _set_by(
        None, SIRTAKI_PROFILE=(ProfileRequest.parse, "FOLDER, or FOLDER?iterations=10&operators=1&edges=0")
    )
    log_level: int = _set_by(logging.INFO, HOROVOD_LOG_LEVEL=_LEVEL, SIRTAKI_LOG_LEVEL=_LEVEL, SIRTAKI_LOG=_LEVEL)
    log_time: bool = _set_by(True, HOROVOD_LOG_HIDE_TIME=_NOT_FLAG)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def tunes(self) -> bool:
        """Return whether the job may try settings to find a faster one."""
        return self.tune and self.warmup_iterations > 0

    @property
    def missing_ranks_limit_s(self) -> float | None:
        """Return the seconds after which missing ranks are an error. None for no limit."""
        limit = self.stall_shutdown_s if self.stall_check else None
        return limit() if callable(limit) else limit

    @property
    def transport_timeout_s(self) -> float:
        """Return the seconds that transports wait for a rank.

        The watchdog has a shorter limit, so that it reports missing ranks first. Return `NEVER_S` (no time limit) if
        the watchdog's limit is given as a function, because the function's value may grow.
        """
        limit_s = None if callable(self.stall_shutdown_s) else self.missing_ranks_limit_s
        return limit_s + TRANSPORT_GRACE_S if limit_s else NEVER_S

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None, **instead: Any) -> "Settings":
        """Return the settings in `environ`. An empty value counts as not set.

        Args:
            environ: environment variables. None for those of this process.
            instead: defaults that replace those of the class, by field name. Typed as Any, because fields have
                different types.

        Raises:
            ConfigError: a value is invalid, or a variable `SIRTAKI_…` does not exist.
        """
        environ = os.environ if environ is None else environ
        present = {name: value.strip() for name, value in environ.items() if value.strip()}
        _refuse_unknown(present)
        values = instead | {
            variable.field: variable.read(present[variable.name]) for variable in VARIABLES if variable.name in present
        }
        notes = tuple(f"{name} has no effect here: {why}" for name, why in WITHOUT_EFFECT.items() if name in present)
        warnings = tuple(f"{name} is no setting any more: {use}" for name, use in REMOVED.items() if name in present)
        return cls(**values, notes=notes, warnings=warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable that sets one field of `Settings`.

    Attributes:
        parse: function that converts the variable's text to the field's value. Raises ValueError if the text is
            invalid.
        accepts: description of valid values, for messages and documents.
    """

    name: str
    field: str
    parse: Callable[[str], Any]  # The parser returns Any, because the fields of `Settings` have different types.
    accepts: str

    def read(self, text: str) -> Any:  # The return type is Any, because the fields of `Settings` have different types.
        """Convert the variable's text to the field's value.

        Raises:
            ConfigError: the text is invalid. The message contains the variable, the text and the valid values.
        """
        try:
            return self.parse(text)
        except ValueError as err:
            raise ConfigError(f"the setting {self.name}={text!r} is invalid; accepted values: {self.accepts}") from err


VARIABLES: tuple[Variable, ...] = tuple(
    Variable(name=name, field=each.name, parse=parse, accepts=accepts)
    for each in fields(Settings)
    for name, (parse, accepts) in each.metadata.get("variables", {}).items()
)

# Horovod's environment variables that have no effect in Sirtaki, with the reason or the replacement.
WITHOUT_EFFECT: Mapping[str, str] = {
    "HOROVOD_CYCLE_TIME": "units are launched as soon as they are ready, there is no cycle",
    "HOROVOD_CACHE_CAPACITY": "the schedule replaces the response cache",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "an all-gather has one algorithm",
    "HOROVOD_TORUS_ALLREDUCE": "use SIRTAKI_ALGORITHM",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "use SIRTAKI_WARMUP_ITERATIONS",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "the noise decides how long a trial runs",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "use SIRTAKI_WARMUP_ITERATIONS",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "the noise is measured",
    "HOROVOD_THREAD_AFFINITY": "use the launcher's --binding-args",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "use HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_CPU_OPERATIONS": "transports are tuned; use SIRTAKI_TRANSPORT to fix one",
    "HOROVOD_CONTROLLER": "use SIRTAKI_CONTROL",
    "HOROVOD_MPI_THREADS_DISABLE": "the thread level is what the MPI library offers",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets may always be added and removed after init()",
}

# Environment variables of earlier releases of Sirtaki, and their replacements.
REMOVED: Mapping[str, str] = {
    "SIRTAKI_RETUNE": "SIRTAKI_PLAN with SIRTAKI_TUNE=0 keeps one setting",
    "SIRTAKI_AGGREGATOR": "ranks sum hot rows themselves, which was faster in every job that was measured",
    "SIRTAKI_THREADS": "the tuner chooses them; SIRTAKI_PLAN with SIRTAKI_TUNE=0 keeps a plan's",
    "SIRTAKI_ELASTIC_TIMEOUT_S": "use HOROVOD_ELASTIC_TIMEOUT, or sirtakirun --elastic-timeout",
    "SIRTAKI_STALL_CHECK": "use HOROVOD_STALL_CHECK_DISABLE=1, or sirtakirun --no-stall-check",
    "SIRTAKI_STALL_WARNING_S": "use HOROVOD_STALL_CHECK_TIME_SECONDS",
    "SIRTAKI_STALL_SHUTDOWN_S": "use HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "SIRTAKI_TIMELINE": "use HOROVOD_TIMELINE, or sirtakirun --timeline-filename",
    "SIRTAKI_METRICS_HOST": "use SIRTAKI_METRICS_PORT=ADDRESS:PORT",
    "SIRTAKI_SEED": "the tuner always draws from the same seed",
    "SIRTAKI_PROFILE_ITERATIONS": "use SIRTAKI_PROFILE=FOLDER?iterations=N",
    "SIRTAKI_PROFILE_OPERATORS": "use SIRTAKI_PROFILE=FOLDER?operators=0",
    "SIRTAKI_PROFILE_EDGES": "use SIRTAKI_PROFILE=FOLDER?edges=1",
}


def variables_set() -> dict[str, str]:
    """Return Sirtaki's and Horovod's environment variables that are set, with their text.

    The job's secret is left out.
    """
    names = (variable.name for variable in VARIABLES if variable.field != "secret")
    return {name: os.environ[name] for name in names if os.environ.get(name, "").strip()}


def _refuse_unknown(present: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable `SIRTAKI_…` does not exist, because it is probably misspelt. Tests may set any
    `SIRTAKI_TEST_…`.
    """
    ours = [variable.name for variable in VARIABLES if variable.name.startswith("SIRTAKI_")]
    for name in present:
        if (
            name.startswith("SIRTAKI_")
            and not name.startswith("SIRTAKI_TEST_")
            and name not in (*ours, *REMOVED, AGENT, BAR)
        ):
            near = difflib.get_close_matches(name, ours, n=1, cutoff=0)[0]
            raise ConfigError(
                f"the environment variable {name} is not a setting of Sirtaki; the most similar setting is {near}. All "
                f"settings: {', '.join(ours)}"
            )
