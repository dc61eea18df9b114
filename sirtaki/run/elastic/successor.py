"""A driver in the place of one that is lost: `python -m sirtaki.run.elastic.successor`, started by an agent.

What the lost one has left to all agents comes on standard input.
"""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .agent_crew import AgentCrew
from .agent_start import AgentStart
from .discovery import ask_script
from .driver import Driver
from .elastic_job import ElasticJob, Inheritance
from .elastic_output import ElasticOutput
from .host_pool import HostPool
from .job_members import JobMembers
from .policy import OnFailure, Policy


def estate_of(
    job: ElasticJob,
    policy: Policy,
    *,
    script: str | None,
    slots: int,
    hosts: Mapping[str, int],
    prefix: bool = True,
    timestamps: bool = True,
    folder: Path | None = None,
) -> dict[str, Any]:
    """What a driver leaves behind, as JSON has it.

    Args:
        job: that it runs.
        policy: of it.
        script: for discovery; None = hosts stay.
        slots: of a host that the script gives no number for.
        hosts: those that stay.
        prefix: see `ElasticOutput`; for ranks of agents that the next driver starts, as the next two.
        timestamps: see there.
        folder: see there.
    """
    return {
        "command": job.command,
        "rank_script": job.script,
        "carried": dict(job.carried),
        "interface": job.interface,
        "one_host": job.one_host,
        "agent_start_s": job.agent_start_s,
        "template": job.agents.template,
        "slurm_hosts": sorted(job.agents.slurm_hosts),
        "ssh": job.agents.ssh,
        "policy": {**asdict(policy), "on_failure": policy.on_failure.value},
        "script": script,
        "slots": slots,
        "hosts": dict(hosts),
        "output": {"prefix": prefix, "timestamps": timestamps, "folder": folder and str(folder.resolve())},
    }


def main() -> int:
    """Runs the job to its end; the exit code of the job."""
    told = json.load(sys.stdin)
    estate = told["estate"]
    values = estate["policy"]
    cooldown_s = None if values["cooldown_s"] is None else tuple(values["cooldown_s"])
    policy = Policy(**{**values, "on_failure": OnFailure(values["on_failure"]), "cooldown_s": cooldown_s})
    job = ElasticJob(
        command=tuple(estate["command"]),
        script=estate["rank_script"],
        environ={**os.environ, **told["environ"]},
        carried=estate["carried"],
        interface=estate["interface"],
        one_host=estate["one_host"],
        agents=AgentStart(
            template=estate["template"], slurm_hosts=frozenset(estate["slurm_hosts"]), ssh=tuple(estate["ssh"])
        ),
        agent_start_s=estate["agent_start_s"],
        estate=estate,
    )
    members = JobMembers(policy, HostPool(policy, random.Random(time.time_ns())))
    shown = estate["output"]
    output = ElasticOutput(
        prefix=shown["prefix"],
        timestamps=shown["timestamps"],
        folder=Path(shown["folder"]) if shown["folder"] else None,
        label=members.roll.label,
        place=members.roll.place,
    )
    inheritance = Inheritance(
        name=told["job"],
        secret=told["secret"],
        listeners=tuple(socket.socket(fileno=descriptor) for descriptor in told["listeners"]),
        agents=tuple(told["agents"]),
        numbers=told["numbers"],
    )
    ask = functools.partial(ask_script, estate["script"], estate["slots"]) if estate["script"] else None
    return Driver(AgentCrew(job, inheritance, output.pump), members, output).take_over(estate["hosts"], ask)


if __name__ == "__main__":
    sys.exit(main())
