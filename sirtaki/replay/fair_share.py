"""A server that its jobs share equally, exact event by event.

Equal shares allow one clock for all jobs, which advances by each job's share a second: a job that would need w seconds
alone ends when that clock has gone w further, whatever comes or goes in between.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from .graph import Server

_ROUNDING = 1e-12
"""Of moments, relative to what the clocks show; what ends that much later ends now."""


class FairShare:
    """One server at work.

    Attributes:
        next_s: when its next job ends, as things are; infinite if it has none.
    """

    __slots__ = ("_at_s", "_clock", "_ends", "_jobs", "_server", "_share", "next_s")

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ends: list[tuple[float, int, int]] = []  # heap of (clock at which it ends, job, as how many it counts)
        self._jobs, self._share = 0, 1.0
        self._at_s = self._clock = 0.0
        self.next_s = math.inf

    def begin(self, now_s: float, job: int, seconds: float, jobs: int) -> None:
        """A job comes that would take `seconds` alone, and counts as `jobs`."""
        self._advance(now_s)
        heappush(self._ends, (self._clock + seconds, job, jobs))
        self._count(self._jobs + jobs)

    def take_ended(self, now_s: float) -> list[int]:
        """The jobs that have ended, which leave."""
        self._advance(now_s)
        ended, ends, jobs = [], self._ends, self._jobs
        limit = self._clock + _ROUNDING * max(1.0, now_s)
        while ends and ends[0][0] <= limit:
            _, job, count = heappop(ends)
            jobs -= count
            ended.append(job)
        self._count(jobs)
        return ended

    def _advance(self, now_s: float) -> None:
        if self._jobs:
            self._clock += (now_s - self._at_s) * self._share
        self._at_s = now_s

    def _count(self, jobs: int) -> None:
        self._jobs = jobs
        if jobs:
            self._share = self._server.share(jobs)
            self.next_s = self._at_s + max(0.0, self._ends[0][0] - self._clock) / self._share
        else:
            self.next_s = math.inf
