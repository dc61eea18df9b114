"""How much a job got done on a shared server from one moment to another, from who is known to have used it when."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from sirtaki.autotune.model.graph import Server

Use = tuple[float, float, float]
"""(begin_s, end_s, as how many jobs it counts)."""


class ShareClock:
    """The clock of a server's jobs: it runs at each one's share, and at 1 while there is none or one."""

    def __init__(self, server: Server, uses: Iterable[Use]) -> None:
        changes: dict[float, float] = defaultdict(float)
        for begin_s, end_s, jobs in uses:
            if end_s > begin_s:
                changes[begin_s] += jobs
                changes[end_s] -= jobs
        self._moments_s, self._shown_s, self._speeds = [0.0], [0.0], [1.0]
        jobs = 0.0
        for moment_s in sorted(changes):
            shown_s = self.at(moment_s)
            jobs += changes[moment_s]
            self._moments_s.append(moment_s)
            self._shown_s.append(shown_s)
            self._speeds.append(server.share(max(1.0, jobs)))

    def at(self, moment_s: float) -> float:
        """What it shows."""
        place = max(0, bisect_right(self._moments_s, moment_s) - 1)
        return self._shown_s[place] + (moment_s - self._moments_s[place]) * self._speeds[place]

    def between(self, begin_s: float, end_s: float) -> float:
        """What a job got done, in seconds of a server of its own."""
        return max(0.0, self.at(end_s) - self.at(begin_s))
