"""A cluster described in a few numbers instead of measured: for simulations of machines nobody has here.

Ranks, link rate and what one flow may take are what a user or a benchmark can state; the `LinkModel` that follows from
them by the ring all-reduce's formulas is what everything else needs.
"""

from dataclasses import dataclass

from sirtaki.errors import TuningError
from sirtaki.link_model import LinkModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks in a ring over equal links.

    Attributes:
        name: for tables.
        ranks: members of the ring.
        hop_s: latency of one hop (LIBRA's α in eq. 4).
        link_bytes_per_s: what a rank's link carries each way.
        flow_bytes_per_s: what a single flow, hence one stream, can carry of that.
        crowding: share of the throughput lost with each stream beyond those that fill the link.

    Raises:
        TuningError: a number that is invalid.
    """

    name: str
    ranks: int
    hop_s: float
    link_bytes_per_s: float
    flow_bytes_per_s: float
    crowding: float = 0.01

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise TuningError(f"a cluster has at least two ranks, not {self.ranks}")
        if self.hop_s < 0 or not 0 < self.flow_bytes_per_s <= self.link_bytes_per_s:
            raise TuningError(
                f"a cluster needs hop_s ≥ 0 and 0 < flow ≤ link rate, not {self.hop_s} s, "
                f"{self.flow_bytes_per_s} and {self.link_bytes_per_s} bytes/s"
            )
        if not 0 <= self.crowding < 1:
            raise TuningError(f"crowding is a share from 0 up to 1, not {self.crowding}")

    def link(self, *, max_streams: int = 24) -> LinkModel:
        """Ring all-reduce: a = 2 (N − 1) α, and 2 (N − 1) / N bytes on the wire for each gradient byte (LIBRA eq. 4).

        n flows carry n times one flow until they fill the link; each further one loses `crowding` of it.
        """
        wire_bytes_per_byte = 2 * (self.ranks - 1) / self.ranks
        filling = self.link_bytes_per_s / self.flow_bytes_per_s
        throughput = [
            min(n * self.flow_bytes_per_s, self.link_bytes_per_s)
            * (1 - self.crowding) ** max(0.0, n - filling)
            / wire_bytes_per_byte
            for n in range(1, max_streams + 1)
        ]
        return LinkModel(alpha_s=2 * (self.ranks - 1) * self.hop_s, throughput=tuple(throughput))

    def bound_s(self, gradient_bytes: int) -> float:
        """The shortest time in which the link can carry an all-reduce of that size."""
        return 2 * (self.ranks - 1) / self.ranks * gradient_bytes / self.link_bytes_per_s
