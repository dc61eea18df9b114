"""A server that its jobs share equally, exact event by event.

Equal shares allow one clock for all jobs, which advances by each job's share a second: a job that would need w seconds
alone ends when that clock has gone w further, whatever comes or goes in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from .graph import Server

_ROUNDING = 1e-12
"""Of moments, relative to what the clocks show; what ends that much later ends now."""


class FairShare:
    """One server at work.

    Attributes:
        next_s: when its next job ends, as things are; infinite if it has none.
    """

    __slots__ = ("_at_s", "_clock", "_ends", "_jobs", "_load", "_server", "_share", "next_s")

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ends: list[tuple[float, int, float]] = []  # heap of (clock at which it ends, job, as how many it counts)
        self._jobs, self._load, self._share = 0.0, 0.0, 1.0
        self._at_s = self._clock = 0.0
        self.next_s = math.inf

    def begin(self, now_s: float, job: int, seconds: float, jobs: float) -> None:
        """A job comes that would take `seconds` alone, and counts as `jobs`."""
        self._advance(now_s)
        heappush(self._ends, (self._clock + seconds, job, jobs))
        self._jobs += jobs
        self._settle()

    def take_ended(self, now_s: float) -> list[int]:
        """The jobs that have ended, which leave."""
        self._advance(now_s)
        ended, ends = [], self._ends
        limit = self._clock + _ROUNDING * max(1.0, now_s)
        while ends and ends[0][0] <= limit:
            _, job, count = heappop(ends)
            self._jobs -= count
            ended.append(job)
        self._settle()
        return ended

    def load(self, now_s: float, amount: float) -> None:
        """Something comes that is not served here, or with a negative amount leaves."""
        self._advance(now_s)
        self._load += amount
        self._settle()

    def relieve(self, now_s: float, factors: Mapping[int, float]) -> None:
        """What is left of these jobs becomes so many times what it is."""
        self._advance(now_s)
        clock = self._clock
        self._ends = [(clock + (end - clock) * factors.get(job, 1.0), job, count) for end, job, count in self._ends]
        heapify(self._ends)
        self._settle()

    def _advance(self, now_s: float) -> None:
        if self._ends:
            self._clock += (now_s - self._at_s) * self._share
        self._at_s = now_s

    def _settle(self) -> None:
        if self._ends:
            server = self._server
            self._share = server.share(self._jobs)
            if server.speed is not None:
                self._share *= server.speed(self._load)
            self.next_s = self._at_s + max(0.0, self._ends[0][0] - self._clock) / self._share
        else:
            self._jobs, self.next_s = 0.0, math.inf
