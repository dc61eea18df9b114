"""Launch a job from parsed options: find hosts, build environment and command line, and supervise mpiexec."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sirtaki.engine.console import is_terminal
from sirtaki.engine.launchers import AGENT, BAR, TORCH_NAMES
from sirtaki.engine.mpi_library import Launcher, MpiLibrary, find_mpi_library, find_mpiexec
from sirtaki.engine.settings import REMOVED, Settings
from sirtaki.errors import ConfigError, LaunchError
from sirtaki.machine import ReservedPorts, usable_cores
from sirtaki.run.as_horovod import SHIM
from sirtaki.run.host_check import Need, finding_here, interface_problem, versions_here
from sirtaki.run.hosts import OPTIONS, Host, given_hosts, is_by_ssh, look_at, shared_networks, ssh_arguments
from sirtaki.run.output import OutputOptions, output_folder, say
from sirtaki.run.supervisor import Supervisor

# ── command line and environment of ranks ─────────────────────────────────────────────────────────────────────────────

# Prefixes of environment variables that an outer MPI job leaves in the environment. They are removed, because mpiexec
# would act as a rank of that job.
_OUTER_JOB = (
    "PMIX_",
    "PMI_",
    "OMPI_COMM_WORLD",
    "OMPI_UNIVERSE",
    "PRTE_LAUNCHED",
    "HYDI_",
    "MPI_LOCAL",
    "TORCHELASTIC_",
)
OUTER_RANK = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
"""Names (without the prefix `HOROVOD_`) of environment variables that describe a job, and that the launcher may have
inherited from an outer job. They are removed from the environment of the ranks.
"""
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Environment variables with the address at which ranks meet.

`init_process_group()` of an unchanged DDP script reads these variables.
"""

CROWD = 4
"""With more ranks per core, the launcher prints how much time and memory the start will need."""

_RANK_START_S, _RANK_GB = 2.5, 0.25  # Seconds of one core, and GB of memory, that each rank needs to import PyTorch.

# Settings that keep freed memory in the process, as PyTorch's caching allocator does on GPUs. By default, glibc returns
# freed memory to the system and requests it again for the gradients of the next step. On CPUs, this may take longer
# than reducing the gradients.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def rank_environ(environ: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's environment, without the variables of an outer MPI job, and with the variables `added`."""
    outer = {f"HOROVOD_{name}" for name in OUTER_RANK} | {*TORCH_NAMES.values(), AGENT, "HOROVOD_ELASTIC"}
    # If this process is itself a rank of an outer job, remove the rendezvous address: the outer job uses it.
    if "RANK" in environ:
        outer.update(RENDEZVOUS)
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTER_JOB) and name not in outer}
    return {**kept, **added}


def begin_environ(options: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment of the ranks as set by the user, and the variables that `-x` exports.

    `-x NAME=value` sets a variable, `-x NAME` takes the launcher's value. Prints which options and variables have no
    effect. Removes variables that only earlier releases read.

    Raises:
        ConfigError: a variable to export is not set, or a variable has an invalid value.
    """
    exported = {}
    for word in options.exported:
        name, given, value = word.partition("=")
        if not name or (not given and name not in os.environ):
            raise ConfigError(
                f"the option -x {word} exports an environment variable that is not set; set the variable first, or "
                "write -x NAME=value"
            )
        exported[name] = value if given else os.environ[name]
    environ = rank_environ(os.environ, {**options.rank_variables, **exported})
    settings = Settings.from_environ(environ)
    for note in (*options.notes, *settings.notes, *settings.warnings):
        say(note)
    for name in REMOVED:
        environ.pop(name, None)
    return environ, exported


def complete_environ(
    environ: dict[str, str], options: argparse.Namespace, *, local_ranks: int, beside: str = ""
) -> None:
    """Add defaults to the environment of the ranks, and print a note if there are many ranks per core.

    Args:
        environ: environment of the ranks, changed in place.
        options: options of the command line.
        local_ranks: ranks on the host with most slots. Hosts are assumed to have as many cores as this one.
        beside: version of the installed Horovod. "" if Horovod is not installed.
    """
    cores = usable_cores()
    if options.as_horovod:
        environ["PYTHONPATH"] = os.pathsep.join([str(SHIM), *filter(None, [environ.get("PYTHONPATH")])])
        say(f"`import horovod` imports Sirtaki{f' instead of the installed Horovod {beside}' if beside else ''}")
    if local_ranks > CROWD * cores:
        start_s, memory_gb = local_ranks * _RANK_START_S / cores, local_ranks * _RANK_GB
        start = f"{start_s:.0f} s" if start_s < 100 else f"{start_s / 60:.0f} minutes"
        say(
            f"{local_ranks} ranks share {cores} cores: importing PyTorch alone takes about {start} and "
            f"{memory_gb:.0f} GB"
        )
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // local_ranks)), **KEEP_FREED_MEMORY}
    environ.update({name: value for name, value in defaults.items() if name not in environ})
    environ.pop(BAR, None)
    if is_terminal(sys.stderr):
        environ[BAR] = "1"
    # Open MPI may give ranks a pseudo-terminal even if the output is no terminal. Without this variable, programs would
    # colour their output.
    if not is_terminal(sys.stdout):
        environ["TERM"] = "dumb"
    if options.interfaces:
        environ.update(dict.fromkeys(("SIRTAKI_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), options.interfaces))


RUN_RANK = "import sys; sys.flags.safe_path or sys.path.pop(0); from sirtaki.run.rank import main; main()"
"""Code for `python -c` that runs the user's script as a rank, with the installed package.

`-m` would search the current folder first. `-P` would skip the current folder, but the script and its child processes
would inherit `-P`.
"""

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_COLON = re.compile(r"\\*:")  # Words to escape: every mpiexec treats a word `:` as a separator of programs.
_OPTIONS_WITH_ARGUMENT = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """Command line of a rank.

    Attributes:
        python: interpreter whose MPI library is used. For a Python script, the interpreter of the script; for other
            programs, the interpreter of the launcher.
        words: complete command line.
        script: path of the Python script. "" if the rank runs a module, code, or another program.
    """

    python: str
    words: tuple[str, ...]
    script: str = ""


def rank_command(command: Sequence[str], *, as_horovod: bool, check_files: bool) -> RankCommand:
    """Wrap the user's command: `python -u train.py --lr 1` becomes `python -u -c RUN_RANK -- train.py --lr 1`.

    Args:
        command: command line of the user, without the launcher and its options.
        as_horovod: True if `import horovod` must import Sirtaki.
        check_files: True to check that program and script exist on this machine, because all ranks run here.

    Raises:
        ConfigError: the command is empty, or its program or script does not exist.
    """
    if not command:
        raise ConfigError("the command to run is missing; write it last, as in: sirtakirun -np 4 python train.py")
    command = _with_interpreter(list(command))
    program = shutil.which(command[0])
    if program is None and check_files:
        hint = f"; if it is a Python script, write: python {command[0]}" if Path(command[0]).is_file() else ""
        raise ConfigError(f"the program {command[0]!r} was not found on PATH{hint}")
    program = program or command[0]
    flags = ("--as-horovod",) if as_horovod else ()
    split = _script_position(command)
    if split is None:
        words = (sys.executable, "-c", RUN_RANK, *flags, "--exec", "--", *map(_escape, command))
        return RankCommand(python=sys.executable, words=words)
    script = command[split:]
    if script[0].startswith(("-m", "-c")) and len(script[0]) > 2:  # Split `-mtrain`, which means `-m train`.
        script = [script[0][:2], script[0][2:], *script[1:]]
    if check_files and not script[0].startswith("-") and not Path(script[0]).exists():
        raise ConfigError(f"the script {script[0]!r} was not found in the folder {Path.cwd()}")
    words = (program, *command[1:split], "-c", RUN_RANK, *flags, "--", *map(_escape, script))
    return RankCommand(python=program, words=words, script="" if script[0].startswith("-") else script[0])


def unescape(word: str) -> str:
    """Restore a word that the launcher has escaped for mpiexec. Called in the rank's process."""
    return word[1:] if _COLON.fullmatch(word) and word != ":" else word


def _escape(word: str) -> str:
    return f"\\{word}" if _COLON.fullmatch(word) else word


def _with_interpreter(command: list[str]) -> list[str]:
    """Prepend the interpreter to the command if it is an executable Python script (`./train.py`, a console script).

    The script's first line names the interpreter.
    """
    program = shutil.which(command[0])
    if program is None:
        return command
    with open(program, "rb") as file:
        first = file.readline(256).decode(errors="replace")
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        del words[0]
    if words and _PYTHON.fullmatch(Path(words[0]).name):
        return [*words, program, *command[1:]]
    return command


def _script_position(command: Sequence[str]) -> int | None:
    """Return the index of the script, `-m` or `-c` in a Python command line. None if `command` does not run Python."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    index = 1
    while index < len(command) and command[index].startswith("-") and command[index] != "-":
        if command[index].startswith(("-m", "-c")):
            return index if len(command[index]) > 2 or index + 1 < len(command) else None
        index += 2 if command[index] in _OPTIONS_WITH_ARGUMENT else 1
    return index if index < len(command) and command[index] != "-" else None


# Prefixes of environment variables that ranks on other hosts need. Ranks on this host inherit the whole environment.
_CARRIED_PREFIXES = (
    "SIRTAKI_", "HOROVOD_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "TORCH", "UCX_", "FI_", "PYTHON", "XDG_CACHE_",
    "MASTER_",
)  # fmt: skip
_SSH_VARIABLES = ("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args", "HYDRA_LAUNCHER_EXTRA_ARGS")

_CARRIED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HF_HOME", "TZ", "LANG")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """A job to launch with mpiexec.

    Attributes:
        ranks: number of ranks.
        hosts: hosts with their slots. Empty if all ranks run on this host.
        command: command line of each rank.
        exported: names of environment variables for ranks on other hosts. mpiexec transfers the values, so that the
            values do not appear in process lists.
        oversubscribed: True if a host has more ranks than cores, so that waiting ranks must yield their core.
        as_root: True if the user who launches is root, which Open MPI must be told.
        binding: mpiexec arguments that place ranks and bind them to cores. Empty if ranks are not bound.
        extra: mpiexec arguments that the user has added.
        interfaces: network interfaces for communication. Empty if any may be used.
        left_out: networks that are not used if `interfaces` is empty, because they do not connect the hosts with each
            other.
        tcp: True if ranks on different hosts may use only TCP.
        ssh: ssh arguments for the user's port and identity file. May be empty.
        silent_s: seconds without an answer after which mpiexec treats a host as lost. None for mpiexec's default.
    """

    ranks: int
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    exported: tuple[str, ...]
    oversubscribed: bool
    as_root: bool = False
    binding: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    tcp: bool = False
    ssh: tuple[str, ...] = ()
    silent_s: float | None = None


def mpiexec_command(job: LaunchSpec, mpiexec: Path, library: MpiLibrary) -> list[str]:
    """Return the mpiexec command line. Its options include those that tag each output line with the rank."""
    family = _open_mpi if library.launcher is Launcher.OPEN_MPI else _hydra
    return [str(mpiexec), *family(job, library), *job.extra, *job.command]


def ssh_variables(job: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables in which mpiexec finds its ssh arguments. Each MPI family reads its own
    variable.

    Values that the user has set are appended, because ssh uses the first of two values of an option.
    """
    own = shlex.join(job.ssh)
    return {name: " ".join(filter(None, [own, environ.get(name)])) for name in _SSH_VARIABLES if job.ssh}


def ssh_words(job: LaunchSpec, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ssh arguments that mpiexec must use."""
    given = next(filter(None, map(environ.get, _SSH_VARIABLES)), "")
    return (*job.ssh, *shlex.split(given))


def carried_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables in `environ` that ranks on other hosts need."""
    return tuple(name for name in environ if name in _CARRIED or name.startswith(_CARRIED_PREFIXES))


def _open_mpi(job: LaunchSpec, library: MpiLibrary) -> list[str]:
    has_prrte = library.version >= (5,)
    words = ["--allow-run-as-root"] if job.as_root else []
    words += ["-np", str(job.ranks)]
    if job.hosts:
        words += ["--host", _host_list(job.hosts)]
    # Allow more ranks than slots in any case, because mpiexec counts only physical cores as slots.
    words += job.binding or ("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none")
    words += ["--output", "tag"] if has_prrte else ["--tag-output"]
    if job.oversubscribed:
        words += ["--mca", "mpi_yield_when_idle", "1"]
    if job.tcp:
        words += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp" if has_prrte else "self,vader,tcp"]
    # Disable the UCX component for one-sided communication: it prints warnings about several windows.
    words += ["--mca", "osc", "^ucx"]
    runtime = "--prtemca" if has_prrte else "--mca"
    if job.hosts and job.silent_s is not None:
        # Shorten the keep-alive times, because by default a lost host is detected only after eight minutes.
        pause_s = max(1, round(job.silent_s / 6))
        for name, value in (("time", 2 * pause_s), ("intvl", pause_s), ("probes", 4)):
            words += [runtime, f"oob_tcp_keepalive_{name}", str(value)]
    if job.interfaces:
        names = ",".join(job.interfaces)
        words += ["--mca", "btl_tcp_if_include", names]
        words += [runtime, "prte_if_include" if has_prrte else "oob_tcp_if_include", names]
    elif job.left_out:
        words += ["--mca", "btl_tcp_if_exclude", ",".join(("127.0.0.0/8", *job.left_out))]
    for name in job.exported:
        words += ["-x", name]
    return words


def _hydra(job: LaunchSpec, library: MpiLibrary) -> list[str]:
    # The library's version is not needed, because all versions of Hydra (MPICH's mpiexec) have the same options.
    del library
    # Export no variables explicitly, because Hydra (MPICH's mpiexec) exports the whole environment.
    words = ["-np", str(job.ranks), "-prepend-rank"]
    if job.hosts:
        words += ["-hosts", _host_list(job.hosts)]
    words += job.binding
    if job.interfaces:
        words += ["-iface", job.interfaces[0]]
    if job.tcp:
        words += ["-genv", "FI_PROVIDER", "tcp", "-genv", "UCX_TLS", "tcp,sm,self"]
    return words


def _host_list(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


# ── launch from parsed options ────────────────────────────────────────────────────────────────────────────────────────

START_TIMEOUT_S = 60.0
"""Default time limit in seconds for the start of all ranks. It grows by the number of ranks per core."""


def launch(options: argparse.Namespace) -> int:
    """Run the job described by `options` (from `parse`) to its end.

    Returns:
        The exit code for the launcher.

    Raises:
        ConfigError: an option is invalid. Nothing was started.
        LaunchError: the ranks could not be started.
    """
    with ReservedPorts(host="") as reserved:
        return _launch(options, port=reserved.first)


def _launch(options: argparse.Namespace, *, port: int) -> int:
    environ, exported = begin_environ(options)
    hosts = given_hosts(options.hosts, options.hostfile, environ)
    slots = sum(host.slots for host in hosts)
    if options.ranks is None and not hosts:
        raise ConfigError(
            "the number of ranks is missing; pass -np N, or name hosts with slots (by -H, --hostfile or a Slurm "
            "allocation)"
        )
    if options.ranks is not None and hosts and options.ranks > slots:
        raise ConfigError(
            f"the option -np {options.ranks} requires more ranks than the hosts have slots ({slots}); name more hosts "
            "or slots, or start fewer ranks"
        )
    ranks = slots if options.ranks is None else options.ranks
    here = all(host.is_local for host in hosts)
    command = rank_command(options.command, as_horovod=options.as_horovod, check_files=here)
    library = find_mpi_library(command.python)
    mpiexec = find_mpiexec(library)
    environ.update(_rendezvous(environ, hosts, port))
    local_ranks = max((min(ranks, host.slots) for host in hosts), default=ranks)
    complete_environ(environ, options, local_ranks=local_ranks, beside=library.horovod or "")
    job = LaunchSpec(
        ranks=ranks,
        hosts=() if here else hosts,
        command=command.words,
        exported=() if here else tuple(dict.fromkeys([*carried_variables(environ), *exported])),
        oversubscribed=local_ranks > usable_cores(),
        as_root=os.geteuid() == 0,
        binding=tuple(shlex.split(options.binding_args)),
        extra=tuple(shlex.split(options.mpi_args)),
        interfaces=tuple(filter(None, options.interfaces.split(","))),
        tcp=options.tcp,
        ssh=() if here else (*OPTIONS, *ssh_arguments(options.ssh_port, options.ssh_identity_file)),
        silent_s=Settings.from_environ(environ).heartbeat_s,
    )
    job = _checked(job, command, environ, options)
    words = mpiexec_command(job, mpiexec, library)
    if options.verbose:
        say(f"MPI library: {library.describe()}, mpi4py {library.mpi4py}")
        say(f"hosts: {', '.join(f'{host.name} ({host.slots} slots)' for host in hosts) or 'this one'}")
        say(f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}, {usable_cores()} cores here")
        say(f"starts: {shlex.join(words)}")
    output = OutputOptions(
        hydra=library.launcher is Launcher.HYDRA,
        prefix=options.prefix and ranks > 1,
        timestamps=options.timestamps,
        folder=output_folder(options.output_filename) if options.output_filename else None,
    )
    start_timeout_s = options.start_timeout or START_TIMEOUT_S + local_ranks / usable_cores()
    others = [host.name for host in job.hosts if not host.is_local]
    supervisor = Supervisor(ranks=ranks, start_timeout_s=start_timeout_s, output=output, hosts=others)
    return supervisor.run(words, {**environ, **ssh_variables(job, environ)})


def _checked(
    job: LaunchSpec, command: RankCommand, environ: Mapping[str, str], options: argparse.Namespace
) -> LaunchSpec:
    """Check by ssh whether ranks can start on all hosts. Return the job, without networks that do not connect hosts.

    Raises:
        ConfigError: this host does not have the requested network interface.
        LaunchError: ranks cannot start on another host.
    """
    if problem := interface_problem(job.interfaces):
        raise ConfigError(f"--network-interfaces {options.interfaces} cannot be used on this host: {problem}")
    others = [host for host in job.hosts if not host.is_local]
    listed = options.hosts or options.hostfile
    if not (others and listed and is_by_ssh(environ, options.mpi_args)):
        return job
    same_python = Path(command.python).parent == Path(sys.executable).parent
    need = Need(
        folder=os.getcwd(),
        script=command.script,
        interfaces=job.interfaces,
        versions=versions_here() if same_python else {},
    )
    found = look_at(others, need, python=command.python, ssh=ssh_words(job, environ), environ=environ)
    problems = [f"host {host} cannot be used: {each.problem}" for host, each in found.items() if each.problem]
    for problem in problems[1:]:
        say(problem)
    if problems:
        raise LaunchError(problems[0])
    is_chosen = any("btl_tcp_if" in text for text in (options.mpi_args, *environ))
    shared = shared_networks([finding_here(need), *found.values()])
    return job if is_chosen else replace(job, left_out=shared)


def _rendezvous(environ: Mapping[str, str], hosts: tuple[Host, ...], port: int) -> dict[str, str]:
    """Return `MASTER_ADDR` and `MASTER_PORT` for an unchanged DDP script. Values that the user has set are kept."""
    first = "127.0.0.1" if all(host.is_local for host in hosts) else hosts[0].name
    if len(hosts) > 1 and hosts[0].is_local:
        first = socket.gethostname()
    return {name: environ.get(name, value) for name, value in zip(RENDEZVOUS, (first, str(port)), strict=True)}
