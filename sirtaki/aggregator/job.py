"""A job at an aggregator: its ranks, and the registers of the two steps that they may be in.

Ranks are never more than a step apart: whoever begins step t + 1 has all sums of t, so all ranks have sent their parts
of t, and whoever sent those had all sums of t - 1. Two sets of registers are enough, as in SwitchML.

All sums of a *session* are made by one aggregator from parts that were sent to it in that session. When a rank comes
anew, because it thinks that the aggregator is gone or was elsewhere, a new session begins and all ranks come anew;
each of them then sends, for each packet, either the sum that it has from before or its part. As no sum is made without
all parts, no packet is ever summed twice with two results.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sirtaki.host_port import Address

from .packets import Registration
from .step_registers import StepRegisters

STEPS = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """A rank that has come.

    Attributes:
        number: drawn by the rank each time it comes.
        address: where it is.
        step: the one that it works on.
    """

    number: int
    address: Address
    step: int


class Job:
    """One job; it exists from the first rank that comes until all have left, or nothing was heard for long."""

    def __init__(self, first: Registration, now_s: float) -> None:
        self.agreed, self.key = first.agreed, first.job
        self.ranks, self.floats, self.packets = first.ranks, first.floats, first.packets
        sizes = {"ranks": first.ranks, "packets": first.packets, "floats": first.floats}
        self._steps = tuple(StepRegisters(**sizes, summation=first.summation) for _ in range(STEPS))
        self.entries: dict[int, Entry] = {}
        self.left: set[int] = set()
        self.heard_s = now_s
        self._draw_session()

    @staticmethod
    def bytes_for(registration: Registration) -> int:
        """What a job would take."""
        each = {"ranks": registration.ranks, "packets": registration.packets, "floats": registration.floats}
        return STEPS * StepRegisters.bytes_for(**each)

    def _draw_session(self) -> None:
        self.session = secrets.randbits(63) | 1
        self.first_step = -1

    @property
    def is_open(self) -> bool:
        """All ranks have come."""
        return self.first_step >= 0

    def enter(self, rank: int, entry: Entry) -> bool:
        """A rank has come, or says once more that it has.

        Returns:
            Whether a session was ended by it.
        """
        ended = self.is_open and self.entries[rank].number != entry.number
        if ended:
            self.entries.clear()
            self._draw_session()
        if not self.is_open:
            self.entries[rank] = entry
            self.left.discard(rank)
            if len(self.entries) == self.ranks:
                self._open()
        return ended

    def _open(self) -> None:
        steps = [entry.step for entry in self.entries.values()]
        self.first_step = min(steps)
        for step in range(self.first_step, self.first_step + STEPS):
            self._steps[step % STEPS].begin(step, session=self.session)

    @property
    def is_torn(self) -> bool:
        """Ranks are further apart than is possible, so they do not train together."""
        steps = [entry.step for entry in self.entries.values()]
        return max(steps) - min(steps) >= STEPS

    def registers(self, step: int) -> StepRegisters | None:
        """Those of a step; the older step's are taken for the next one, once the one between is complete."""
        found = self._steps[step % STEPS]
        if found.step == step:
            return found
        between = self._steps[(step + 1) % STEPS]
        if step == found.step + STEPS and between.step == step - 1 and between.is_complete:
            found.begin(step, session=self.session)
            return found
        return None

    def is_at(self, rank: int, address: Address) -> bool:
        """Whether that is the rank's address."""
        entry = self.entries.get(rank)
        return entry is not None and entry.address == address
