"""Starts a job whose ranks come and go, from parsed options."""

from __future__ import annotations

import argparse
import functools
import os
import random
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from sirtaki.errors import ConfigError
from sirtaki.launchers import node_names
from sirtaki.machine import usable_cores
from sirtaki.settings import Settings

from ..console import say
from ..hosts import Host, given_hosts, ssh_arguments
from ..output import output_folder
from ..rank_command import (
    add_defaults,
    carried_variables,
    crowd_note,
    exported_variables,
    put_shim_first,
    rank_command,
    rank_environ,
    say_notes,
)
from .agent_crew import AgentCrew, AgentStart, ElasticJob, new_endpoint
from .driver import Driver, ElasticOutput, Hosts, ask_script, first_answer
from .job_members import COOLDOWN_S, HostPool, JobMembers, OnFailure, Policy
from .successor import successor_config_of

_LATER_S = 30.0
"""How much longer than the launcher a rank waits for others: the launcher can say who is missing."""


def launch_elastic(options: argparse.Namespace) -> int:
    """Runs the job that `options` (of `parse`) describe to its end.

    Returns:
        The exit code for the launcher.

    Raises:
        ConfigError: options that is invalid; nothing was started.
        LaunchError: the launcher cannot listen.
    """
    exported = exported_variables(options.exported, os.environ)
    environ = rank_environ(os.environ, {**options.rank_variables, **exported})
    say_notes(tuple(options.notes), environ)
    for option, name in (("mpi_args", "--mpi-args"), ("binding_args", "--binding-args"), ("tcp", "--tcp")):
        if getattr(options, option):
            say(f"{name} has no effect here: no mpiexec starts ranks that come and go")
    ask, fixed = _hosts(options, environ)
    hosts = first_answer(ask) if ask is not None else fixed
    policy = policy_of(
        options, hosts, timeout_s=options.elastic_timeout or Settings.from_environ(environ).elastic_timeout_s
    )
    agents = _agents(options, environ)
    one_host = ask is None and len(hosts) == 1 and all(agents.is_child(host) for host in hosts)
    here = ask is None and all(agents.is_child(host) for host in hosts)
    command = rank_command(options.command, as_horovod=options.as_horovod, check_files=here)
    if options.as_horovod:
        put_shim_first(environ, "")
    local_ranks = min(max([1, *hosts.values()]), policy.max_ranks or 2**31)
    if note := crowd_note(local_ranks, usable_cores()):
        say(note)
    environ["HOROVOD_ELASTIC_TIMEOUT"] = f"{policy.timeout_s + _LATER_S:g}"
    add_defaults(environ, local_ranks=local_ranks, cores=usable_cores(), interfaces=options.interfaces)
    job = ElasticJob(
        command=command.words,
        script=command.script,
        environ=environ,
        carried={name: environ[name] for name in dict.fromkeys([*carried_variables(environ), *exported])},
        interface=Settings.from_environ(environ).gloo_interface,
        one_host=one_host,
        agents=agents,
        agent_start_s=options.start_timeout or 60.0,
    )
    folder = output_folder(options.output_filename) if options.output_filename else None
    if options.on_driver_loss == "go-on":
        successor_config = successor_config_of(
            job,
            policy,
            script=_absolute(options.host_discovery_script),
            slots=options.slots_per_host or 1,
            hosts=fixed,
            prefix=options.prefix,
            timestamps=options.timestamps,
            folder=folder,
        )
        job = replace(job, successor_config=successor_config)
    if options.verbose:
        _describe(policy, hosts, job)
    members = JobMembers(policy, HostPool(policy, random.Random(time.time_ns())))
    output = ElasticOutput(
        prefix=options.prefix,
        timestamps=options.timestamps,
        folder=folder,
        label=members.member_list.label,
        place=members.member_list.place,
    )
    return Driver(AgentCrew(job, new_endpoint(job), output.pump), members, output).run(hosts, ask)


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


def _hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Callable[[], Hosts] | None, Hosts]:
    """Who is asked for hosts, or the ones that stay."""
    if script := options.host_discovery_script:
        return functools.partial(ask_script, script, options.slots_per_host or 1), {}
    listed = options.hosts
    if listed and options.slots_per_host:
        listed = ",".join(part if ":" in part else f"{part}:{options.slots_per_host}" for part in listed.split(","))
    hosts = given_hosts(listed, options.hostfile, environ)
    if not hosts:
        slots = options.max_ranks or options.ranks or options.min_ranks
        hosts = (Host(name="localhost", slots=slots),)
    return None, {host.name: host.slots for host in hosts}


def _agents(options: argparse.Namespace, environ: Mapping[str, str]) -> AgentStart:
    agents = AgentStart(
        template=options.agent_command,
        slurm_hosts=frozenset(node_names(environ.get("SLURM_JOB_NODELIST", ""))),
        ssh=ssh_arguments(options.ssh_port, options.ssh_identity_file),
    )
    if agents.template:
        agents.words("host")  # which refuses what cannot work
    return agents


def _absolute(script: str | None) -> str | None:
    """A file's whole path; a command stays as it is."""
    return str(Path(script).resolve()) if script and Path(script).exists() else script


def _describe(policy: Policy, hosts: Hosts, job: ElasticJob) -> None:
    say(f"hosts: {', '.join(f'{host} ({slots} slots)' for host, slots in hosts.items()) or 'none yet'}")
    say(
        f"at least {policy.min_ranks} ranks, at most {policy.max_ranks or 'as many as there are slots'}; a failure: "
        f"{policy.on_failure.value}"
    )
    say(f"each rank runs: {shlex.join(job.command)}")
