"""A custom search technique: a class with a name, `ask` and `tell`, tested here with an emulated job.

A package provides it to every Sirtaki job on the machine by an entry point in its pyproject.toml:

    [project.entry-points."sirtaki.arms"]
    coordinate_descent = "my_package:make_arm"

The warm-up then uses it together with the built-in techniques. A script uses it alone by its name, or without an entry
point by the function that creates it:

    optimizer = hvd.DistributedOptimizer(optimizer, arms=["coordinate_descent"])
    optimizer = hvd.DistributedOptimizer(optimizer, arms=[make_arm])
"""

import math
from collections.abc import Sequence

import numpy as np

from sirtaki.autotune import (
    Algorithm,
    Arm,
    KnobLattice,
    Knobs,
    KnobSpace,
    Proposal,
    TransportKind,
    Trial,
    TuningSession,
    default_arms,
)

MIB = 2**20


class CoordinateDescent:
    """A search technique that tries the neighbours of the best setting, one knob at a time."""

    name = "coordinate_descent"

    def __init__(self, space: KnobSpace) -> None:
        self._lattice = KnobLattice(space)
        self._spans_s: dict[tuple[int, ...], float] = {}

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return unmeasured neighbours of the best setting, or an empty list if none are left."""
        middle = tuple(length // 2 for length in self._lattice.shape)
        best = min(self._spans_s, key=self._spans_s.__getitem__, default=middle)
        around = [best] + [
            (*best[:axis], best[axis] + step, *best[axis + 1 :])
            for axis, length in enumerate(self._lattice.shape)
            for step in (-1, 1)
            if 0 <= best[axis] + step < length
        ]
        new = [index for index in around if index not in self._spans_s]
        return [Proposal(arm=self.name, knobs=self._lattice.at(index)) for index in new[:n]]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Record every trial, also those that other arms proposed."""
        for trial in trials:
            index = self._lattice.index_of(trial.knobs)
            if index is not None:
                self._spans_s[index] = trial.span_s


def make_arm(space: KnobSpace, rng: np.random.Generator) -> Arm:
    """Create the arm. The entry point names this function."""
    return CoordinateDescent(space)


def emulated_span_s(knobs: Knobs) -> float:
    """Return the communication time on an imaginary network, fastest with eight streams and units of 1 MiB."""
    octaves_off = math.log2(knobs.unit_bytes / MIB)
    streams_off = math.log2(knobs.streams / 8)
    return 0.050 * (1.0 + 0.05 * octaves_off**2 + 0.1 * streams_off**2)


def main() -> None:
    space = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),))
    default = Knobs(unit_bytes=32 * MIB, streams=1, transport=TransportKind.GLOO)
    rng = np.random.default_rng(0)
    bandit = default_arms(space=space, rng=rng, names=["grid", "bayesian"], planners=[CoordinateDescent(space)])
    session = TuningSession(space=space, default=default, arm=bandit, rng=rng)
    while not session.done:
        now = session.assignment
        noise = np.exp(0.03 * rng.standard_normal(now.measured_iterations))
        session.record((emulated_span_s(now.knobs) * noise).tolist())
    result = session.result
    print(f"default {1e3 * result.default_span_s:.1f} ms, tuned {1e3 * result.best_span_s:.1f} ms")
    print(f"{result.knobs.describe()}, found by {result.arm} in {result.iterations_used} iterations")


if __name__ == "__main__":
    main()
