"""The options of `sirtakirun`, on the command line and in a configuration file."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

import sirtaki
from sirtaki.engine.settings import WITHOUT_EFFECT
from sirtaki.errors import ConfigError
from sirtaki.measures import SMALLEST_UNIT_BYTES

from .elastic.job_members import OnFailure

# {key of Horovod's configuration files: name of the option}, for keys that differ from option names.
_RENAMED = {"logging-level": "log-level", "logging-hide-timestamp": "log-without-timestamp"}


def arguments_from_file(path: Path, options: Mapping[str, bool]) -> list[str]:
    """Return the content of a configuration file as command-line words.

    Args:
        path: a `.json` or `.toml` file. Other files are read as YAML.
        options: names of all options; the value is True if the option takes an argument.

    Raises:
        ConfigError: the file cannot be read, or names an unknown option.
    """
    words: list[str] = []
    for key, value in _entries(_load(path)):
        words += _words(key, value, options, path)
    return words


def _load(path: Path) -> Mapping[str, Any]:
    decoders: dict[str, Callable[[bytes], Any]] = {".json": msgspec.json.decode, ".toml": msgspec.toml.decode}
    try:
        content = decoders.get(path.suffix, msgspec.yaml.decode)(path.read_bytes())
    except ImportError as err:
        raise ConfigError(
            f"the file {path} given with --config-file is in YAML, which needs the package pyyaml; run `pip install "
            "pyyaml`, or use a .toml or .json file"
        ) from err
    except (OSError, ValueError) as err:
        raise ConfigError(f"the file {path} given with --config-file cannot be read: {err}") from err
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"the file {path} given with --config-file must contain a mapping of options to values, found "
            f"{type(content).__name__}"
        )
    return content


def _entries(content: Mapping[str, Any], section: str = "") -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in content.items():
        key = str(name).replace("_", "-")
        if isinstance(value, Mapping):
            yield from _entries(value, key)
        elif value is not None:
            yield (section, key), value


def _words(place: tuple[str, str], value: Any, options: Mapping[str, bool], path: Path) -> list[str]:
    section, key = place
    whole = f"{section}-{key}"
    names = (section,) if key == "enabled" else (_RENAMED.get(whole, whole), key)
    if value is False:
        # The value `false` selects the option with prefix `no-` if it exists. Otherwise the option is omitted.
        negative = next((f"no-{name}" for name in names if f"no-{name}" in options), None)
        if negative is not None:
            return [f"--{negative}"]
    name = next((name for name in names if name in options), None)
    if name is None and f"no-{names[0]}" in options:
        return []
    if name is None:
        near = difflib.get_close_matches(key, options, n=1, cutoff=0)[0]
        raise ConfigError(
            f"the file {path} given with --config-file contains {key!r}, which is not an option; did you mean {near!r}?"
        )
    if options[name]:
        return [f"--{name}", str(value)]
    return [f"--{name}"] if value else []


_USUAL = """examples:
  sirtakirun -np 4 python train.py --lr 0.1       four ranks on this machine
  sirtakirun -H node1:4,node2:4 python train.py   eight on two machines
  sirtakirun --as-horovod -np 4 python train.py   `import horovod` is Sirtaki
  sirtakirun -np 4 --min-np 2 python train.py     goes on when ranks are killed
"""

_ELSEWHERE = {
    "--nproc-per-node": "-np", "--nproc_per_node": "-np", "--nproc": "-np", "--n": "-np", "--nnodes": "-H",
    "--host": "-H", "--env": "-x",
}  # fmt: skip
"""Options of torchrun and mpiexec, with the corresponding options of sirtakirun."""


class RankSetting(NamedTuple):
    """An option that sets an environment variable of the ranks.

    Attributes:
        flag: option on the command line.
        variable: variable to set, or a variable of Horovod that has no effect.
        help: one line for `--help`. argparse.SUPPRESS if the option has no effect.
        constant: value of the variable if the option takes no argument. None if the option takes an argument.
        metavar: placeholder of the argument in `--help`.
    """

    flag: str
    variable: str
    help: str = argparse.SUPPRESS
    constant: str | None = None
    metavar: str = "VALUE"


RANK_SETTINGS = (
    RankSetting("--autotune", "SIRTAKI_TUNE", "tune (the default)", "1"),
    RankSetting("--no-autotune", "SIRTAKI_TUNE", "do not tune", "0"),
    RankSetting("--attach", "SIRTAKI_ATTACH", "attach the DDP and FSDP2 models of an unmodified script", "auto"),
    RankSetting("--no-attach", "SIRTAKI_ATTACH", 'attach no model, also over the backend "sirtaki"', "0"),
    RankSetting("--autotune-log-file", "SIRTAKI_TRIAL_LOG", "file for one line per trial", metavar="FILE"),
    RankSetting("--fusion-threshold-mb", "SIRTAKI_UNIT_BYTES", "fix the size of a unit (bucket)", metavar="MB"),
    RankSetting("--num-nccl-streams", "SIRTAKI_STREAMS", "fix the number of streams", metavar="N"),
    RankSetting(
        "--hierarchical-allreduce",
        "SIRTAKI_ALGORITHM",
        "reduce within each node first, then between nodes",
        "hierarchical",
    ),
    RankSetting("--no-hierarchical-allreduce", "SIRTAKI_ALGORITHM", "one all-reduce over all ranks", "flat"),
    RankSetting("--timeline-filename", "HOROVOD_TIMELINE", "Chrome trace of all ranks", metavar="FILE"),
    RankSetting("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "mark negotiation rounds in the trace", "1"),
    RankSetting("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "do not report missing ranks", "1"),
    RankSetting(
        "--stall-check-warning-time-seconds",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "seconds after which a warning names missing ranks (60)",
        metavar="S",
    ),
    RankSetting(
        "--stall-check-shutdown-time-seconds",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "seconds after which missing ranks are an error (600; 0 = never)",
        metavar="S",
    ),
    RankSetting(
        "--log-level",
        "SIRTAKI_LOG_LEVEL",
        "level of the log: trace, debug, info, warning, error or fatal",
        metavar="LEVEL",
    ),
    RankSetting("--log-without-timestamp", "HOROVOD_LOG_HIDE_TIME", "omit the time from log lines", "1"),
    RankSetting("--cycle-time-ms", "HOROVOD_CYCLE_TIME"),
    RankSetting("--cache-capacity", "HOROVOD_CACHE_CAPACITY"),
    RankSetting("--hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", constant="1"),
    RankSetting("--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", constant="0"),
    RankSetting("--torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", constant="1"),
    RankSetting("--no-torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", constant="0"),
    RankSetting("--autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"),
    RankSetting("--autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"),
    RankSetting("--autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"),
    RankSetting("--autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"),
    RankSetting("--mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", constant="1"),
    RankSetting("--thread-affinity", "HOROVOD_THREAD_AFFINITY"),
    RankSetting("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    RankSetting("--gloo", "HOROVOD_CONTROLLER", constant="gloo"),
)


def _value(setting: RankSetting, given: str) -> str:
    """Convert the argument of an option to the value of the environment variable.

    Raises:
        ValueError: the argument is invalid.
    """
    if setting.flag != "--fusion-threshold-mb":
        return given
    if (size := float(given)) < 0:
        raise ValueError(given)
    # Replace 0, which disables fusion in Horovod, by the smallest unit (bucket) size, which fuses the fewest gradients.
    return str(int(size * 2**20) or SMALLEST_UNIT_BYTES)


class _SetForRanks(argparse.Action):
    """Argparse action that sets an environment variable of the ranks, or adds a note that the option has no effect."""

    # Any, because these are arguments of argparse's class.
    def __init__(self, *args: Any, setting: RankSetting, **kwargs: Any) -> None:
        kwargs["nargs"] = 0 if setting.constant is not None else None
        super().__init__(*args, **kwargs)
        self.setting = setting

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        variable = self.setting.variable
        if variable in WITHOUT_EFFECT:
            namespace.notes.append(f"{option} has no effect here: {WITHOUT_EFFECT[variable]}")
            return
        try:
            text = self.setting.constant if self.setting.constant is not None else _value(self.setting, values)
        except ValueError:
            parser.error(f"the value of the option {option} must be a number of at least 0, found {values!r}")
        namespace.rank_variables[variable] = text


class _Parser(argparse.ArgumentParser):
    """Parser whose error message for an unknown option suggests the closest known option."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0]
            name = word.partition("=")[0]
            shown = [
                flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings
            ]
            longer = [flag for flag in shown if flag.startswith(name)]
            near = _ELSEWHERE.get(name) or next(iter(longer or difflib.get_close_matches(name, shown, n=1)), None)
            hint = (
                f"did you mean {near}?"
                if near
                else "see sirtakirun --help; options of the script must follow the script"
            )
            message = f"{name} is not an option; {hint}"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `sirtakirun`'s options. Checks that argparse does not support are in `parse`."""
    without_effect = [setting.flag for setting in RANK_SETTINGS if setting.help == argparse.SUPPRESS]
    accepted = f"accepted from horovodrun, without effect: {', '.join([*without_effect, '--disable-cache', '--mpi'])}"
    parser = _Parser(
        prog="sirtakirun",
        usage="sirtakirun [options] -np N python train.py …",
        description="Starts a script on N ranks, with the mpiexec of this Python's MPI library.\n\n" + _USUAL,
        epilog=textwrap.fill(accepted, 79, subsequent_indent="  ", break_on_hyphens=False),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=f"sirtakirun {sirtaki.__version__}")
    add("-cb", "--check-build", action="store_true", help="check the installation (as `sirtaki doctor`) and exit")
    add("-np", "--num-proc", dest="ranks", type=_positive, metavar="N", help="number of ranks")
    add("--as-horovod", action="store_true", help="`import horovod` imports Sirtaki in the ranks")
    add(
        "-x",
        action="append",
        default=[],
        dest="exported",
        metavar="VAR[=VALUE]",
        help="pass an environment variable to all ranks",
    )
    add("--config-file", metavar="FILE", help="options from a YAML, TOML or JSON file; the command line has priority")
    add(
        "--start-timeout",
        type=_seconds,
        metavar="S",
        help="seconds without progress after which the start fails (60, more with many ranks per core)",
    )
    add = parser.add_argument_group("hosts and network").add_argument
    add("-H", "--hosts", metavar="LIST", help="hosts and their slots: host1:slots,host2:slots")
    add("-hostfile", "--hostfile", metavar="FILE", help="file with one host per line: name slots=4")
    add(
        "--network-interfaces",
        "--network-interface",
        dest="interfaces",
        default="",
        metavar="LIST",
        help="network interfaces to use, such as eth0,eth1",
    )
    add("--tcp", action="store_true", help="let MPI use only TCP between hosts")
    add("-p", "--ssh-port", type=_positive, metavar="PORT", help="port of the hosts' ssh servers")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    add("--mpi-args", default="", metavar="ARGS", help="further arguments for mpiexec, as one quoted word")
    add("--binding-args", default="", metavar="ARGS", help="mpiexec arguments that place and bind ranks")
    add = parser.add_argument_group("output").add_argument
    add("--output-filename", metavar="FOLDER", help="also write FOLDER/rank.N/stdout and stderr")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamps",
        action="store_true",
        help="output lines begin with the time",
    )
    add("--no-prefix", dest="prefix", action="store_false", help="output lines do not begin with the rank")
    add("--verbose", action="store_true", help="print hosts, MPI library and command")
    add = parser.add_argument
    add("--disable-cache", action="store_true", help=argparse.SUPPRESS)
    add("--mpi", action="store_true", help=argparse.SUPPRESS)
    add("--jsrun", action="store_true", help=argparse.SUPPRESS)
    settings = parser.add_argument_group("settings of the ranks (also environment variables)")
    for setting in RANK_SETTINGS:
        settings.add_argument(
            setting.flag, action=_SetForRanks, setting=setting, dest=argparse.SUPPRESS, help=setting.help,
            metavar=setting.metavar,
        )  # fmt: skip
    _add_elastic(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    """Add the options of elastic jobs, such as `--min-np`, to the parser."""
    group = parser.add_argument_group(
        "elastic jobs",
        "for scripts with hvd.elastic:\n  sirtakirun --min-np 2 --host-discovery-script ./hosts.sh python train.py",
    )
    add = group.add_argument
    add(
        "--min-np",
        "--min-num-proc",
        dest="min_ranks",
        type=_positive,
        metavar="N",
        help="minimum number of ranks to continue with (default: the value of -np)",
    )
    add("--max-np", "--max-num-proc", dest="max_ranks", type=_positive, metavar="N", help="maximum number of ranks")
    add(
        "--host-discovery-script",
        metavar="FILE",
        help="program that prints the available hosts, one per line, as name or name:slots; run every second",
    )
    add("--slots-per-host", type=_positive, metavar="N", help="number of slots of hosts for which none is given (1)")
    add("--elastic-timeout", type=_seconds, metavar="S", help="seconds to wait for enough ranks (600)")
    add("--reset-limit", type=int, metavar="N", help="end the job instead of resetting it more than N times")
    add(
        "--on-failure",
        choices=[choice.value for choice in OnFailure],
        metavar="|".join(choice.value for choice in OnFailure),
        help="after the failure of a rank: start another one in its place (the default), or exclude its whole host "
        "(the default with --as-horovod)",
    )
    add(
        "--blacklist-cooldown-range",
        nargs=2,
        type=_seconds,
        metavar=("LOW", "HIGH"),
        help="seconds for which a failed host is excluded, doubled each time (30 600; with drop-host: permanently)",
    )
    add(
        "--on-driver-loss",
        choices=["end", "go-on"],
        metavar="end|go-on",
        help="if sirtakirun itself is killed or lost: end the job (the default), or let an agent take its place",
    )
    add(
        "--agent-command",
        default="",
        metavar="COMMAND",
        help="command that starts the agent on a host, instead of ssh or srun: 'kubectl exec -i {host} -- {command}'",
    )


def is_elastic(options: argparse.Namespace) -> bool:
    """Return whether the options describe an elastic job."""
    return bool(options.min_ranks or options.max_ranks or options.host_discovery_script)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check options. Adds `rank_variables` (name → text), `notes` (lines) and `command` (words)."""
    parser = build_parser()
    start = argparse.Namespace(rank_variables={}, notes=[])
    options = parser.parse_args(arguments, namespace=start)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.jsrun:
        parser.error(
            "--jsrun is not supported, because Sirtaki cannot start ranks with LSF's jsrun; name the hosts with -H or "
            "--hostfile"
        )
    if options.hosts and options.hostfile:
        parser.error("-H and --hostfile cannot be used together; remove one of the two options")
    if options.host_discovery_script and (options.hosts or options.hostfile):
        parser.error(
            "--host-discovery-script cannot be used together with -H or --hostfile; remove one of these options"
        )
    for flag in (
        "slots_per_host",
        "elastic_timeout",
        "reset_limit",
        "on_failure",
        "blacklist_cooldown_range",
        "on_driver_loss",
    ):
        if getattr(options, flag) is not None and not is_elastic(options):
            name = f"--{flag.replace('_', '-')}"
            parser.error(f"the option {name} requires an elastic job; add --min-np")
    if options.disable_cache:
        options.notes.append("--disable-cache has no effect here: nothing is cached")
    return options


def option_names() -> Mapping[str, bool]:
    """Return the names of all long options, without dashes; the value is True if the option takes an argument. Used for
    the configuration file.
    """
    return {
        flag.removeprefix("--"): action.nargs != 0
        for action in build_parser()._actions
        for flag in action.option_strings
        if flag.startswith("--")
    }


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the value of this option must be an integer of at least 1, found {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(
        f"the value of this option must be a number of seconds greater than 0, found {text!r}"
    )
