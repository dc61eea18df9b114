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

from .agent_crew import AgentCrew, AgentStart, DriverEndpoint, ElasticJob
from .driver import Driver, ElasticOutput, ask_script
from .job_members import HostPool, JobMembers, OnFailure, Policy


def successor_config_of(
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
    config = told["successor_config"]
    values = config["policy"]
    cooldown_s = None if values["cooldown_s"] is None else tuple(values["cooldown_s"])
    policy = Policy(**{**values, "on_failure": OnFailure(values["on_failure"]), "cooldown_s": cooldown_s})
    job = ElasticJob(
        command=tuple(config["command"]),
        script=config["rank_script"],
        environ={**os.environ, **told["environ"]},
        carried=config["carried"],
        interface=config["interface"],
        one_host=config["one_host"],
        agents=AgentStart(
            template=config["template"],
            slurm_hosts=frozenset(config["slurm_hosts"]),
            ssh=tuple(config["ssh"]),
        ),
        agent_start_s=config["agent_start_s"],
        successor_config=config,
    )
    members = JobMembers(policy, HostPool(policy, random.Random(time.time_ns())))
    shown = config["output"]
    output = ElasticOutput(
        prefix=shown["prefix"],
        timestamps=shown["timestamps"],
        folder=Path(shown["folder"]) if shown["folder"] else None,
        label=members.member_list.label,
        place=members.member_list.place,
    )
    endpoint = DriverEndpoint(
        name=told["job"],
        secret=told["secret"],
        listeners=tuple(socket.socket(fileno=descriptor) for descriptor in told["listeners"]),
        agents=tuple(told["agents"]),
        numbers=told["numbers"],
    )
    ask = functools.partial(ask_script, config["script"], config["slots"]) if config["script"] else None
    return Driver(AgentCrew(job, endpoint, output.pump), members, output).take_over(config["hosts"], ask)


if __name__ == "__main__":
    sys.exit(main())
