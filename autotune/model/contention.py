"""How communication and computation slow each other down on one GPU: LIBRA's g(b, r), p(c, r) and q(c, r).

The functional forms are LIBRA's (eq. 5-6); on other hardware they may be others.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sirtaki.errors import TuningError

GAMMA_4 = 0.6  # LIBRA, below eq. (6): an empirical value, not fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Bytes per second as a function of the threads r, with diminishing returns (LIBRA eq. 6).

    The bytes are gradient bytes: the ring's factor 2 (N − 1) / N in ĉ is part of the rate.
    """

    gamma_1: float
    gamma_2: float
    gamma_3: float

    def __post_init__(self) -> None:
        if self.gamma_1 <= 0 or not 0 <= self.gamma_2 <= self.gamma_1 or self.gamma_3 < 0:
            raise TuningError(f"a rate curve needs γ1 > 0, 0 ≤ γ2 ≤ γ1 and γ3 ≥ 0, not {self}")

    def bytes_per_s(self, threads: int) -> float:
        """The denominator of eq. (6)."""
        return self.gamma_1 - self.gamma_2 * math.exp(-self.gamma_3 * threads**GAMMA_4)

    def seconds(self, unit_bytes: float, threads: int) -> float:
        """p(c, r) or q(c, r), eq. (6)."""
        return unit_bytes / self.bytes_per_s(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionModel:
    """Communication with r threads beside computation.

    Attributes:
        alpha_1: eq. (5), the share of compute speed left as r → 0.
        alpha_2: eq. (5), the share lost with each thread.
        overlapped: p, the transmission rate beside computation.
        alone: q, the transmission rate with nothing beside it.
        default_threads: r of a unit that names none.
        residual: relative error (root mean square) of the fit it came from; 0.0 for a description.
    """

    alpha_1: float
    alpha_2: float
    overlapped: RateCurve
    alone: RateCurve
    default_threads: int = 512
    residual: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha_1 <= 1.2 or self.alpha_2 < 0:
            raise TuningError(f"contention needs 0 < α1 ≤ 1.2 and α2 ≥ 0, not {self.alpha_1} and {self.alpha_2}")

    def compute_speed(self, threads: float) -> float:
        """Share b / g(b, r) of the undisturbed speed, eq. (5), never below a twentieth.

        The straight line of eq. (5) would reach zero, which no GPU scheduler does.
        """
        return max(self.alpha_1 - self.alpha_2 * threads, 0.05)

    def overlapped_compute_s(self, compute_s: float, threads: int) -> float:
        """g(b, r), eq. (5)."""
        return compute_s / self.compute_speed(threads)

    def rescaled(self, *, from_ranks: int, to_ranks: int) -> "ContentionModel":
        """The same GPUs in a ring of another size: ĉ ∝ (N − 1) / N (eq. 4); the computation does not notice."""
        if min(from_ranks, to_ranks) < 2:
            raise TuningError(f"a ring has at least two ranks: cannot go from {from_ranks} to {to_ranks}")
        volume = (to_ranks - 1) / (from_ranks - 1) * from_ranks / to_ranks
        overlapped, alone = (
            RateCurve(gamma_1=curve.gamma_1 / volume, gamma_2=curve.gamma_2 / volume, gamma_3=curve.gamma_3)
            for curve in (self.overlapped, self.alone)
        )
        return ContentionModel(
            alpha_1=self.alpha_1,
            alpha_2=self.alpha_2,
            overlapped=overlapped,
            alone=alone,
            default_threads=self.default_threads,
            residual=self.residual,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ContentionModel":
        """The model that `to_json` described."""
        curves = {name: RateCurve(**data[name]) for name in ("overlapped", "alone")}
        return cls(**{**data, **curves})
