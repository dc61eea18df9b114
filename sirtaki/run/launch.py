"""Starts a job from parsed options: hosts, ranks, environment, command line, supervision."""

import argparse
import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from sirtaki.errors import ConfigError
from sirtaki.launchers import TORCH_NAMES
from sirtaki.machine import usable_cores
from sirtaki.mpi_library import Launcher, MpiLibrary, find_mpi_library, find_mpiexec
from sirtaki.settings import Settings

from .as_horovod import SHIM
from .console import say
from .hosts import Host, parse_hosts, read_hostfile, slurm_hosts
from .mpi_command import Job, carried_variables, mpiexec_command, ssh_variables
from .output import OutputOptions, output_folder
from .rank_command import RankCommand, rank_command
from .supervisor import Supervisor

# What an outer MPI job leaves in the environment; mpiexec would believe to be one of its ranks.
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
_OUTER_RANK = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")

START_TIMEOUT_S = 60.0
"""Besides a second for each rank that a core gets."""

CROWD = 4
"""Ranks a core from which on the user is told what that means."""

_RANK_START_S, _RANK_GB = 2.5, 0.25  # of a core, and of memory: what importing PyTorch takes a rank


# glibc gives freed memory back to the system and takes it again, page by page, for the next step's gradients: on CPUs
# that can cost more than reducing them. So a rank keeps what it has freed, as torch does with a GPU's memory.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def launch(options: argparse.Namespace) -> int:
    """Runs the job that `options` (of `parse`) describe to its end.

    Returns:
        The exit code for the launcher.

    Raises:
        ConfigError: options that is invalid; nothing was started.
        LaunchError: the ranks could not be started.
    """
    exported = _exported(options.exported, os.environ)
    environ = _rank_environ(os.environ, {**options.rank_variables, **exported})
    for note in (*options.notes, *Settings.from_environ(environ).notes):
        say(note)
    hosts = _hosts(options, environ)
    ranks = _ranks(options.ranks, hosts)
    here = all(host.is_local for host in hosts)
    command = rank_command(options.command, as_horovod=options.as_horovod, check_files=here)
    library = find_mpi_library(command.python)
    mpiexec = find_mpiexec(library)
    if options.as_horovod:
        environ["PYTHONPATH"] = os.pathsep.join([str(SHIM), *filter(None, [environ.get("PYTHONPATH")])])
        beside = f"; the installed Horovod {library.horovod} is set aside" if library.horovod else ""
        say(f"`import horovod` gives Sirtaki{beside}")
    local_ranks = _most_local_ranks(ranks, hosts)
    if local_ranks > CROWD * usable_cores():
        say(_crowd(local_ranks, usable_cores()))
    environ.update(_rendezvous(environ, hosts))
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // local_ranks)))
    for name, value in KEEP_FREED_MEMORY.items():
        environ.setdefault(name, value)
    if options.interfaces:
        environ.update(dict.fromkeys(("SIRTAKI_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), options.interfaces))
    job = _job(options, ranks=ranks, hosts=hosts, command=command, exported=exported, environ=environ)
    words = mpiexec_command(job, mpiexec, library)
    if options.verbose:
        _describe(library, environ, hosts, words)
    output = OutputOptions(
        hydra=library.launcher is Launcher.HYDRA,
        prefix=options.prefix and ranks > 1,
        timestamps=options.timestamps,
        folder=output_folder(options.output_filename) if options.output_filename else None,
    )
    start_timeout_s = options.start_timeout or START_TIMEOUT_S + local_ranks / usable_cores()
    supervisor = Supervisor(ranks=ranks, start_timeout_s=start_timeout_s, output=output)
    return supervisor.run(words, {**environ, **ssh_variables(job)})


def _job(
    options: argparse.Namespace,
    *,
    ranks: int,
    hosts: tuple[Host, ...],
    command: RankCommand,
    exported: Mapping[str, str],
    environ: Mapping[str, str],
) -> Job:
    here = all(host.is_local for host in hosts)
    port = ("-p", str(options.ssh_port)) if options.ssh_port else ()
    identity = ("-i", options.ssh_identity_file) if options.ssh_identity_file else ()
    return Job(
        ranks=ranks,
        hosts=() if here else hosts,
        command=command.words,
        exported=() if here else tuple(dict.fromkeys([*carried_variables(environ), *exported])),
        oversubscribed=_most_local_ranks(ranks, hosts) > usable_cores(),
        as_root=os.geteuid() == 0,
        binding=tuple(shlex.split(options.binding_args)),
        extra=tuple(shlex.split(options.mpi_args)),
        interfaces=tuple(filter(None, options.interfaces.split(","))),
        tcp=options.tcp,
        ssh=(*port, *identity),
    )


def _exported(words: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """`-x NAME=value` as it is, `-x NAME` with the launcher's value."""
    found = {}
    for word in words:
        name, given, value = word.partition("=")
        if not name or (not given and name not in environ):
            raise ConfigError(f"-x {word}: {name or 'the variable'} is not set; write -x NAME=value or set it first")
        found[name] = value if given else environ[name]
    return found


def _rank_environ(environ: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    outer = {f"HOROVOD_{name}" for name in _OUTER_RANK} | set(TORCH_NAMES.values())
    if "RANK" in environ:  # so this is a rank itself, of torchrun's or ours, and they meet elsewhere
        outer.update(_RENDEZVOUS)
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTER_JOB) and name not in outer}
    return {**kept, **added}


def _rendezvous(environ: Mapping[str, str], hosts: tuple[Host, ...]) -> dict[str, str]:
    """Where an unchanged DDP script's `init_process_group()` meets; what the user has set stays."""
    first = "127.0.0.1" if all(host.is_local for host in hosts) else hosts[0].name
    if len(hosts) > 1 and hosts[0].is_local:
        first = socket.gethostname()
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    return {name: environ.get(name, value) for name, value in zip(_RENDEZVOUS, (first, port), strict=True)}


def _crowd(ranks: int, cores: int) -> str:
    start_s, memory_gb = ranks * _RANK_START_S / cores, ranks * _RANK_GB
    start = f"{start_s:.0f} s" if start_s < 100 else f"{start_s / 60:.0f} minutes"
    return f"{ranks} ranks share {cores} cores: importing PyTorch alone takes about {start} and {memory_gb:.0f} GB"


def _hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Host, ...]:
    if options.hosts:
        return parse_hosts(options.hosts)
    if options.hostfile:
        return read_hostfile(Path(options.hostfile))
    return slurm_hosts(environ)


def _ranks(wanted: int | None, hosts: tuple[Host, ...]) -> int:
    slots = sum(host.slots for host in hosts)
    if wanted is None and not hosts:
        raise ConfigError("how many ranks? Give -np N, or hosts with slots (-H, --hostfile, a Slurm allocation)")
    if wanted is not None and hosts and wanted > slots:
        raise ConfigError(f"-np {wanted}, but the hosts have {slots} slots; name more hosts or slots, or fewer ranks")
    return slots if wanted is None else wanted


def _most_local_ranks(ranks: int, hosts: tuple[Host, ...]) -> int:
    """How many ranks the fullest host may get; other hosts are taken to have as many cores as this one."""
    return max((min(ranks, host.slots) for host in hosts), default=ranks)


def _describe(library: MpiLibrary, environ: Mapping[str, str], hosts: tuple[Host, ...], words: list[str]) -> None:
    say(f"MPI library: {library.describe()}, mpi4py {library.mpi4py}")
    say(f"hosts: {', '.join(f'{host.name} ({host.slots} slots)' for host in hosts) or 'this one'}")
    say(f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}, {usable_cores()} cores here")
    say(f"starts: {shlex.join(words)}")
