"""Who takes the place of a driver that is lost: agents agree on it without asking each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CONNECT_S = 20.0
"""How long to try to reach a driver that is there, or is about to be."""

CANDIDATE_S = 6.0
"""How long to try to reach an agent that may be the next driver."""

Place = tuple[str, int]
Agents = Sequence[tuple[int, list[Place]]]
"""Number and places of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Where the next driver may be.

    Attributes:
        number: of the agent there.
        places: of it.
        is_own: it is for this agent to start the driver.
        timeout_s: how long to try to reach it.
    """

    number: int
    places: Sequence[Place]
    is_own: bool
    timeout_s: float


def candidates(agents: Agents, own: int) -> Iterator[Candidate]:
    """Those that an agent tries, one after the other, until it reaches a driver.

    Args:
        agents: as the lost driver has told last.
        own: number of this agent.
    """
    for number, places in sorted(agents):
        timeout_s = CONNECT_S if number == own else CANDIDATE_S
        yield Candidate(number=number, places=places, is_own=number == own, timeout_s=timeout_s)


def inherited(agents: Agents, own: int) -> dict[str, Any]:
    """What a driver is told of agents that this one starts: who may come to it, and which numbers have been given."""
    return {
        "agents": [number for number, _ in agents if number >= own],
        "numbers": max(number for number, _ in agents),
    }
