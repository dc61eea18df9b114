"""Grid search: a coarse log-spaced grid in an order that covers the space early.

The order is that of the Halton sequence (radical inverses in coprime bases), snapped to the grid: any prefix
of it is spread over the whole space, so a budget that ends early has not seen one corner only.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ..knobs import KnobLattice, Knobs, KnobSpace
from ..trial import Proposal, Trial

_BASES = (2, 3, 5, 7)  # one a lattice axis


def radical_inverse(number: int, base: int) -> float:
    """The digits of `number` in `base` mirrored at the point: 6 in base 2 (110) is 0.011 = 0.375."""
    result, scale = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        result += digit * scale
        scale /= base
    return result


def halton(lattice: KnobLattice) -> Iterator[Knobs]:
    """Every point of the lattice once, in the order in which the Halton sequence meets them."""
    seen: set[Knobs] = set()
    for number in range(1, 8 * len(lattice)):
        knobs = lattice.snap(np.array([radical_inverse(number, base) for base in _BASES]))
        if knobs not in seen:
            seen.add(knobs)
            yield knobs
    yield from (knobs for knobs in lattice.points if knobs not in seen)


class GridArm:
    """Walks a coarse grid once; leaves out what has been measured already, whoever asked for it."""

    def __init__(self, space: KnobSpace, *, name: str = "grid") -> None:
        self.name = name
        self._left = list(halton(KnobLattice(_coarse(space), steps_per_octave=1)))
        self._known: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """The next `n` points of the grid; empty at its end."""
        fresh = (knobs for knobs in self._left if knobs not in self._known)
        return [Proposal(arm=self.name, knobs=knobs) for knobs, _ in zip(fresh, range(n), strict=False)]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Strikes the measured points from the grid."""
        self._known.update(trial.knobs for trial in trials)


def _coarse(space: KnobSpace) -> KnobSpace:
    """Every other stream count and thread allowance, so that the grid has some hundred points at most."""
    return KnobSpace(
        routes=space.routes,
        unit_bytes=space.unit_bytes,
        streams=space.streams[:: 2 if len(space.streams) > 4 else 1],
        threads=space.threads[:: 2 if len(space.threads) > 4 else 1],
    )
