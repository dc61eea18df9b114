"""Starts a job whose ranks come and go, from parsed options; and, in the place of a driver that is lost, another one.

An agent starts that one, as `python -m sirtaki.run.elastic.launch`.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from sirtaki.console import is_terminal
from sirtaki.errors import ConfigError, LaunchError
from sirtaki.launchers import BAR, node_names
from sirtaki.settings import Settings

from ..hosts import Host, given_hosts, ssh_arguments
from ..output import Bar, Console, OutputOptions, RankOutput, output_folder, say
from ..rank_channel import Event, Message
from ..rank_command import begin_environ, carried_variables, complete_environ, rank_command
from .agent import DriverEndpoint, ElasticJob, Inheritance
from .agent_crew import AgentCrew, agent_words, is_child, new_endpoint
from .driver import Hosts, ask_script, run_job, take_over
from .job_members import COOLDOWN_S, JobMembers, OnFailure, Policy

_LATER_S = 30.0
"""How much longer than the launcher a rank waits for others: the launcher can say who is missing."""


def drive(job: ElasticJob, endpoint: DriverEndpoint, environ: Mapping[str, str], hosts: Hosts | None) -> int:
    """Runs a job to its end.

    Args:
        job: of which this process is the driver.
        endpoint: where agents reach it.
        environ: of the agents and ranks of this machine.
        hosts: with which to begin; None = another driver is lost, whose agents come.

    Returns:
        The exit code for the launcher.
    """
    options = OutputOptions(
        hydra=True,
        prefix=job.prefix,
        timestamps=job.timestamps,
        folder=Path(job.folder) if job.folder else None,
        label=lambda worker: members.member_list.label(worker),
        place=lambda worker: members.member_list.place(worker),
    )
    bar = Bar()
    consoles = {name: Console(getattr(sys, name), name, bar) for name in ("stdout", "stderr")}

    def hear(message: Message) -> None:
        if message.event is Event.PROGRESS:
            consoles["stderr"].show_bar(message.reason)

    def say(line: str) -> None:
        consoles["stderr"].show_bar("")  # its rank may be gone; one that tunes draws it again
        consoles["stderr"].say(line)

    outputs = {
        name: RankOutput(name, console=console, options=options, on_message=hear) for name, console in consoles.items()
    }

    def finish_output() -> None:
        for output in outputs.values():
            output.finish()
        consoles["stderr"].show_bar("")

    crew = AgentCrew(job, endpoint, lambda name, stream: outputs[name].pump(stream), environ)
    members = JobMembers(job.policy, crew, say, random.Random(time.time_ns()))
    if hosts is None:
        if (found := take_over(crew, members, say)) is None:
            return 1
        hosts = found if job.discovery else job.hosts
    ask = functools.partial(ask_script, job.discovery, job.slots) if job.discovery else None
    return run_job(crew, members, say, hosts, ask, finish_output=finish_output)


def launch_elastic(options: argparse.Namespace) -> int:
    """Runs the job that `options` (of `parse`) describe to its end.

    Returns:
        The exit code for the launcher.

    Raises:
        ConfigError: options that is invalid; nothing was started.
        LaunchError: the launcher cannot listen.
    """
    environ, exported = begin_environ(options)
    for option, name in (("mpi_args", "--mpi-args"), ("binding_args", "--binding-args"), ("tcp", "--tcp")):
        if getattr(options, option):
            say(f"{name} has no effect here: no mpiexec starts ranks that come and go")
    script, slots = options.host_discovery_script, options.slots_per_host or 1
    fixed: Hosts = {} if script else _fixed_hosts(options, environ)
    try:
        hosts = ask_script(script, slots) if script else fixed
    except LaunchError as err:
        raise ConfigError(f"host discovery script: {err}") from err
    policy = policy_of(
        options, hosts, timeout_s=options.elastic_timeout or Settings.from_environ(environ).elastic_timeout_s
    )
    if options.as_horovod and not script and not options.on_failure:
        say(
            "with --as-horovod a rank that fails takes its whole host out, as under horovodrun, and without discovery "
            "no host comes in its place: give --host-discovery-script FILE, or --on-failure replace-rank"
        )
    job = ElasticJob(
        command=(),
        policy=policy,
        agent_command=options.agent_command,
        slurm_hosts=frozenset(node_names(environ.get("SLURM_JOB_NODELIST", ""))),
        ssh=ssh_arguments(options.ssh_port, options.ssh_identity_file),
        agent_start_s=options.start_timeout or 60.0,
        discovery=str(Path(script).resolve()) if script and Path(script).exists() else script or "",
        slots=slots,
        hosts=fixed,
        prefix=options.prefix,
        timestamps=options.timestamps,
        folder=str(output_folder(options.output_filename).resolve()) if options.output_filename else None,
    )
    if job.agent_command:
        agent_words(job, "host")  # which refuses what cannot work
    here = not script and all(is_child(job, host) for host in hosts)
    command = rank_command(options.command, as_horovod=options.as_horovod, check_files=here)
    environ["HOROVOD_ELASTIC_TIMEOUT"] = f"{policy.timeout_s + _LATER_S:g}"
    complete_environ(environ, options, local_ranks=min(max([1, *hosts.values()]), policy.max_ranks or 2**31))
    environ.pop(BAR, None)
    if is_terminal(sys.stderr):
        environ[BAR] = "1"
    job = replace(
        job,
        command=command.words,
        script=command.script,
        carried={name: environ[name] for name in dict.fromkeys([*carried_variables(environ), *exported])},
        interface=Settings.from_environ(environ).gloo_interface,
        one_host=here and len(hosts) == 1,
    )
    if options.verbose:
        say(f"hosts: {', '.join(f'{host} ({slots} slots)' for host, slots in hosts.items()) or 'none yet'}")
        most = policy.max_ranks or "as many as there are slots"
        say(f"at least {policy.min_ranks} ranks, at most {most}; a failure: {policy.on_failure.value}")
        say(f"each rank runs: {shlex.join(job.command)}")
    return drive(job, new_endpoint(job.addresses), environ, hosts)


def policy_of(options: argparse.Namespace, hosts: Hosts, *, timeout_s: float) -> Policy:
    """What the options say about ranks that come and go.

    Raises:
        ConfigError: numbers that contradict each other.
    """
    start, least, most = options.ranks, options.min_ranks, options.max_ranks
    least = least or start or 1
    start = start or least
    if not least <= start <= (most or start):
        raise ConfigError(
            f"--min-np {least}, -np {start}{f', --max-np {most}' if most else ''}: each must be at least the one before"
        )
    on_failure = OnFailure(options.on_failure) if options.on_failure else None
    if on_failure is None:
        on_failure = OnFailure.DROP_HOST if options.as_horovod else OnFailure.REPLACE_RANK
    cooldown_s = tuple(options.blacklist_cooldown_range or ())
    if cooldown_s and cooldown_s[0] > cooldown_s[1]:
        raise ConfigError(
            f"--blacklist-cooldown-range {cooldown_s[0]:g} {cooldown_s[1]:g}: the first is the shorter one"
        )
    if options.reset_limit is not None and options.reset_limit < 0:
        raise ConfigError(f"--reset-limit {options.reset_limit}: give a number from 0")
    if not options.host_discovery_script and (slots := sum(hosts.values())) < start:
        what = f"--min-np {least}" if slots < least else f"-np {start}"
        raise ConfigError(f"{what}, but the hosts have {slots} slots and will not get more")
    default_s = None if on_failure is OnFailure.DROP_HOST else COOLDOWN_S
    return Policy(
        start_ranks=start,
        min_ranks=least,
        max_ranks=most,
        timeout_s=timeout_s,
        reset_limit=options.reset_limit,
        on_failure=on_failure,
        cooldown_s=(cooldown_s[0], cooldown_s[1]) if cooldown_s else default_s,
        has_successors=options.on_driver_loss == "go-on",
        hosts_stay=not options.host_discovery_script,
    )


def _fixed_hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> Hosts:
    listed = options.hosts
    if listed and options.slots_per_host:
        listed = ",".join(part if ":" in part else f"{part}:{options.slots_per_host}" for part in listed.split(","))
    hosts = given_hosts(listed, options.hostfile, environ)
    if not hosts:
        slots = options.max_ranks or options.ranks or options.min_ranks
        hosts = (Host(name="localhost", slots=slots),)
    return {host.name: host.slots for host in hosts}


def inherit() -> int:
    """Runs the job of a driver that is lost to its end; standard input says what that has left behind.

    Returns:
        The exit code of the job.
    """
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=Inheritance)
    return drive(told.job, told.endpoint, {**os.environ, **told.environ}, None)


if __name__ == "__main__":
    sys.exit(inherit())
