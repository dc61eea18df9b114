"""Ranks that share the processors of one host: there communication is work for what computes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sirtaki.errors import TuningError

from .graph import Server, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedHost:
    """All ranks of a job, on one host.

    Attributes:
        ranks: that compute at the same time, all alike.
        processors: that they may keep busy together.
        threads: that each of them computes with.

    Raises:
        TuningError: one of them is not positive.
    """

    ranks: int
    processors: float
    threads: int = 1

    def __post_init__(self) -> None:
        if not (self.ranks >= 1 and self.processors > 0 and self.threads >= 1):
            raise TuningError(f"a host needs ranks, processors and threads, not {self}")

    @property
    def server(self) -> Server:
        """N jobs get n processors' work done, until there are no more."""
        whole = int(self.processors)
        totals = tuple(float(count) for count in range(1, whole + 1))
        return Server(name="processors", totals=totals if self.processors == whole else (*totals, self.processors))

    def computation(self, server: int, seconds: float) -> Work:
        """Of each rank, what took that long while all ranks computed."""
        jobs = self.ranks * self.threads
        return Work(server=server, seconds=seconds * self.server.share(jobs), jobs=jobs)

    def unit(self, server: int, seconds: float, busy: float) -> Work:
        """What takes that long by itself, while each rank keeps so many processors busy."""
        # What is probed alone has had to share already where ranks are busier than there are processors.
        jobs = self.ranks * busy
        return Work(server=server, seconds=seconds * self.server.share(max(1.0, jobs)), jobs=jobs)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "SharedHost":
        """The host that `to_json` described."""
        return cls(**data)
