"""Starts a job from parsed options: hosts, ranks, environment, command line, supervision."""

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sirtaki.console import is_terminal
from sirtaki.errors import ConfigError, LaunchError
from sirtaki.launchers import BAR
from sirtaki.machine import usable_cores
from sirtaki.mpi_library import Launcher, find_mpi_library, find_mpiexec
from sirtaki.settings import Settings

from .host_check import Need, finding_here, interface_problem, versions_here
from .hosts import OPTIONS, Host, given_hosts, is_by_ssh, look_at, shared_networks, ssh_arguments
from .output import OutputOptions, output_folder, say
from .rank_command import (
    RENDEZVOUS,
    Job,
    RankCommand,
    begin_environ,
    carried_variables,
    complete_environ,
    mpiexec_command,
    rank_command,
    ssh_variables,
    ssh_words,
)
from .supervisor import Supervisor

START_TIMEOUT_S = 60.0
"""Besides a second for each rank that a core gets."""


def launch(options: argparse.Namespace) -> int:
    """Runs the job that `options` (of `parse`) describe to its end.

    Returns:
        The exit code for the launcher.

    Raises:
        ConfigError: an option is invalid; nothing was started.
        LaunchError: the ranks could not be started.
    """
    environ, exported = begin_environ(options)
    hosts = given_hosts(options.hosts, options.hostfile, environ)
    slots = sum(host.slots for host in hosts)
    if options.ranks is None and not hosts:
        raise ConfigError("how many ranks? Give -np N, or hosts with slots (-H, --hostfile, a Slurm allocation)")
    if options.ranks is not None and hosts and options.ranks > slots:
        raise ConfigError(
            f"-np {options.ranks}, but the hosts have {slots} slots; name more hosts or slots, or fewer ranks"
        )
    ranks = slots if options.ranks is None else options.ranks
    here = all(host.is_local for host in hosts)
    command = rank_command(options.command, as_horovod=options.as_horovod, check_files=here)
    library = find_mpi_library(command.python)
    mpiexec = find_mpiexec(library)
    environ.update(_rendezvous(environ, hosts))
    local_ranks = max((min(ranks, host.slots) for host in hosts), default=ranks)
    complete_environ(environ, options, local_ranks=local_ranks, beside=library.horovod or "")
    environ.pop(BAR, None)
    if is_terminal(sys.stderr):
        environ[BAR] = "1"
    job = Job(
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
    supervisor = Supervisor(ranks=ranks, start_timeout_s=start_timeout_s, output=output)
    return supervisor.run(words, {**environ, **ssh_variables(job, environ)})


def _checked(job: Job, command: RankCommand, environ: Mapping[str, str], options: argparse.Namespace) -> Job:
    """The job, without networks that join no hosts, once its hosts have said that they have what it needs.

    Raises:
        ConfigError: this host lacks the network interface.
        LaunchError: another one cannot be used.
    """
    if problem := interface_problem(job.interfaces):
        raise ConfigError(f"--network-interfaces {options.interfaces}: on this host {problem}")
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
    is_said = any("btl_tcp_if" in text for text in (options.mpi_args, *environ))
    shared = shared_networks([finding_here(need), *found.values()])
    return job if is_said else replace(job, left_out=shared)


def _rendezvous(environ: Mapping[str, str], hosts: tuple[Host, ...]) -> dict[str, str]:
    """Where an unchanged DDP script's `init_process_group()` meets; what the user has set stays."""
    first = "127.0.0.1" if all(host.is_local for host in hosts) else hosts[0].name
    if len(hosts) > 1 and hosts[0].is_local:
        first = socket.gethostname()
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    return {name: environ.get(name, value) for name, value in zip(RENDEZVOUS, (first, port), strict=True)}
