"""What an agent is told when it is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What an agent is told on its standard input.

    Attributes:
        host: as the job calls it.
        need: what it must have, see `Need`.
        number: of the agent; no other one of the job has had it.
        places: where the driver listens.
        secret: of the job.
        job: names it.
        command: what a rank runs.
        environ: what is added to this process's environment for ranks.
        folder: where they run.
        hosts: "one" if there will never be another host, else "many".
        interface: network interface that joins the hosts; None = any.
        estate: what a new driver needs; None = the loss of the driver is the end of the job.
    """

    host: str
    number: int
    places: tuple[tuple[str, int], ...]
    secret: str = field(repr=False)
    job: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    folder: str
    hosts: str
    interface: str | None
    estate: Mapping[str, Any] | None
    need: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def decode(cls, line: bytes) -> AgentConfig:
        """From JSON; ValueError, TypeError or KeyError if it is something else."""
        values = json.loads(line)
        places = tuple((host, port) for host, port in values["places"])
        return cls(**{**values, "places": places, "command": tuple(values["command"])})
