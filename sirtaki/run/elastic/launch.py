"""Starts a job whose ranks come and go, from parsed options; and, in the place of a driver that is lost, another one.

An agent starts that one, as `python -m sirtaki.run.elastic.launch`.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from sirtaki.errors import ConfigError, LaunchError
from sirtaki.launchers import node_names
from sirtaki.settings import Settings

from ..hosts import Host, given_hosts, ssh_arguments
from ..output import Console, OutputOptions, RankOutput, output_folder, say
from ..rank_command import begin_environ, carried_variables, complete_environ, rank_command
from .agent import Inheritance
from .agent_crew import AgentCrew, AgentStart, DriverEndpoint, ElasticJob, new_endpoint
from .driver import Driver, Hosts, ask_script
from .job_members import COOLDOWN_S, HostPool, JobMembers, OnFailure, Policy

_LATER_S = 30.0
"""How much longer than the launcher a rank waits for others: the launcher can say who is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPlan:
    """What a driver needs, and leaves behind for the one that takes its place.

    Attributes:
        job: that it runs.
        policy: of it.
        script: for discovery; None = hosts stay.
        slots: of a host that the script gives no number for.
        hosts: those that stay.
        prefix: console lines begin with the rank.
        timestamps: and with the time.
        folder: also write one file a place and stream below it; None = console only.
    """

    job: ElasticJob
    policy: Policy
    script: str | None
    slots: int
    hosts: Hosts
    prefix: bool
    timestamps: bool
    folder: str | None

    @property
    def ask(self) -> Callable[[], Hosts] | None:
        """Asks for all hosts; None = they stay."""
        return functools.partial(ask_script, self.script, self.slots) if self.script else None

    def driver(self, endpoint: DriverEndpoint, environ: Mapping[str, str]) -> Driver:
        """A driver that agents reach there, and that starts agents of this machine with this environment."""
        members = JobMembers(self.policy, HostPool(self.policy, random.Random(time.time_ns())))
        output = ElasticOutput(
            OutputOptions(
                hydra=True,
                prefix=self.prefix,
                timestamps=self.timestamps,
                folder=Path(self.folder) if self.folder else None,
                label=members.member_list.label,
                place=members.member_list.place,
            )
        )
        left_behind = msgspec.json.encode(self).decode() if self.policy.has_successors else ""
        crew = AgentCrew(self.job, endpoint, output.pump, environ=environ, plan=left_behind)
        return Driver(crew, members, output.say, finish_output=output.finish)


class ElasticOutput:
    """Standard output and error of a job whose lines are marked with the numbers of workers."""

    def __init__(self, options: OutputOptions) -> None:
        """Shows nothing yet."""
        self._consoles = {"stdout": Console(sys.stdout, "stdout"), "stderr": Console(sys.stderr, "stderr")}
        self._locks = {name: threading.Lock() for name in self._consoles}
        self._outputs = {
            name: RankOutput(name, console=console, options=options) for name, console in self._consoles.items()
        }

    def pump(self, name: str, stream: IO[bytes]) -> None:
        """Reads an agent's "stdout" or "stderr" to its end."""
        with stream as lines:
            for line in lines:
                with self._locks[name]:
                    self._outputs[name].write(line)

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._consoles["stderr"].say(text)

    def finish(self) -> None:
        """Nothing more comes."""
        for name, output in self._outputs.items():
            with self._locks[name]:
                output.finish()


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
    agents = AgentStart(
        template=options.agent_command,
        slurm_hosts=frozenset(node_names(environ.get("SLURM_JOB_NODELIST", ""))),
        ssh=ssh_arguments(options.ssh_port, options.ssh_identity_file),
    )
    if agents.template:
        agents.words("host")  # which refuses what cannot work
    here = not script and all(agents.is_child(host) for host in hosts)
    command = rank_command(options.command, as_horovod=options.as_horovod, check_files=here)
    environ["HOROVOD_ELASTIC_TIMEOUT"] = f"{policy.timeout_s + _LATER_S:g}"
    complete_environ(environ, options, local_ranks=min(max([1, *hosts.values()]), policy.max_ranks or 2**31))
    job = ElasticJob(
        command=command.words,
        script=command.script,
        carried={name: environ[name] for name in dict.fromkeys([*carried_variables(environ), *exported])},
        interface=Settings.from_environ(environ).gloo_interface,
        one_host=here and len(hosts) == 1,
        agents=agents,
        agent_start_s=options.start_timeout or 60.0,
    )
    plan = DriverPlan(
        job=job,
        policy=policy,
        script=str(Path(script).resolve()) if script and Path(script).exists() else script,
        slots=slots,
        hosts=fixed,
        prefix=options.prefix,
        timestamps=options.timestamps,
        folder=str(output_folder(options.output_filename).resolve()) if options.output_filename else None,
    )
    if options.verbose:
        say(f"hosts: {', '.join(f'{host} ({slots} slots)' for host, slots in hosts.items()) or 'none yet'}")
        most = policy.max_ranks or "as many as there are slots"
        say(f"at least {policy.min_ranks} ranks, at most {most}; a failure: {policy.on_failure.value}")
        say(f"each rank runs: {shlex.join(job.command)}")
    endpoint = new_endpoint(job.interface, one_host=job.one_host)
    return plan.driver(endpoint, environ).run(hosts, plan.ask)


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
    if not options.host_discovery_script and sum(hosts.values()) < least:
        raise ConfigError(f"--min-np {least}, but the hosts have {sum(hosts.values())} slots and will not get more")
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


def take_over() -> int:
    """Runs the job of a driver that is lost to its end; standard input says what that has left behind.

    Returns:
        The exit code of the job.
    """
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=Inheritance)
    plan = msgspec.json.decode(told.plan, type=DriverPlan)
    endpoint = DriverEndpoint(
        proof=told.proof,
        listeners=tuple(socket.socket(fileno=descriptor) for descriptor in told.listeners),
        agents=told.agents,
        numbers=told.numbers,
    )
    return plan.driver(endpoint, {**os.environ, **told.environ}).take_over(plan.hosts, plan.ask)


if __name__ == "__main__":
    sys.exit(take_over())
