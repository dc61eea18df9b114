"""Which hosts may be used, and how many ranks each takes: what discovery finds, less what has failed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .policy import Policy


@dataclass(slots=True)
class _Record:
    """What is remembered of a host."""

    strikes: int = 0
    drops: int = 0
    until_s: float = 0.0
    is_dropped: bool = False


class HostPool:
    """Hosts in the order in which they were first found."""

    def __init__(self, policy: Policy, rng: random.Random) -> None:
        self._policy, self._rng = policy, rng
        self._found: dict[str, int] = {}
        self._records: dict[str, _Record] = {}

    def find(self, hosts: Mapping[str, int]) -> None:
        """What discovery says now, by host its slots; hosts keep their order, however it is told."""
        kept = {host: hosts[host] for host in self._found if host in hosts}
        self._found = kept | {host: slots for host, slots in hosts.items() if host not in kept}

    @property
    def usable(self) -> dict[str, int]:
        """Slots by host."""
        return {host: slots for host, slots in self._found.items() if not self._record(host).is_dropped}

    @property
    def known(self) -> dict[str, int]:
        """Slots by host, dropped ones too."""
        return dict(self._found)

    def strike(self, host: str) -> bool:
        """A rank has failed there before it had done much; whether that was once too often."""
        record = self._record(host)
        record.strikes += 1
        return record.strikes >= self._policy.strikes

    def clear(self, host: str) -> None:
        """A rank has done well there."""
        self._record(host).strikes = 0

    def drop(self, host: str, now_s: float) -> float | None:
        """Leaves the host out.

        Returns:
            For how many seconds: twice as long each time, and up to a tenth more or less; None = for good.
        """
        record = self._record(host)
        record.is_dropped, record.strikes = True, 0
        record.drops += 1
        if self._policy.cooldown_s is None:
            record.until_s = float("inf")
            return None
        shortest_s, longest_s = self._policy.cooldown_s
        wanted_s = shortest_s * 2.0 ** min(record.drops - 1, 30) * self._rng.uniform(0.9, 1.1)
        cooldown_s = min(longest_s, max(shortest_s, wanted_s))
        record.until_s = now_s + cooldown_s
        return cooldown_s

    def take_back(self, now_s: float) -> list[str]:
        """Hosts that have been left out for long enough, and from now on are not any more."""
        back = [host for host in self._found if self._record(host).is_dropped and now_s >= self._record(host).until_s]
        for host in back:
            self._record(host).is_dropped = False
        return back

    def left_out(self, now_s: float) -> dict[str, list[float | None]]:
        """By host how often it has been dropped, and for how many seconds it is left out; None = for good."""
        return {
            host: [record.drops, None if record.until_s == float("inf") else max(0.0, record.until_s - now_s)]
            for host, record in self._records.items()
            if record.is_dropped
        }

    def remember(self, left_out: Mapping[str, Sequence[float | None]], now_s: float) -> None:
        """What `left_out` of another driver has said."""
        for host, (drops, left_s) in left_out.items():
            record = self._record(host)
            record.is_dropped, record.drops = True, int(drops or 1)
            record.until_s = float("inf") if left_s is None else now_s + left_s

    def _record(self, host: str) -> _Record:
        return self._records.setdefault(host, _Record())
