"""scikit-optimize's own optimiser as an arm, for whoever asks for it by name.

Its Gaussian process is fitted by maximum likelihood, and a portfolio of acquisition functions bids for the next point
(Brochu, Hoffman, de Freitas, Portfolio Allocation for Bayesian Optimization, 2011). On a continuous space it needs no
lattice. It is not among the arms that tune by default: with a dozen noisy measurements it knows too surely, and it
takes a second and a half to load.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..knobs import Knobs, KnobSpace
from ..trial import Proposal, Trial
from .base import import_late, require

N_INITIAL = 8
"""Points of a Sobol sequence before the process is asked."""

ATTEMPTS = 4
"""To get a setting that has not been measured."""


class ScikitOptimizeArm:
    """A `skopt.Optimizer` over the logarithm of the unit size, streams, threads and route.

    Args:
        space: what may be chosen.
        rng: seeds it.

    Raises:
        TuningError: scikit-optimize is not installed.
    """

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator, name: str = "scikit_optimize") -> None:
        require(name, "skopt", "scikit-optimize")
        self.name = name
        self._space = space
        self._seed = int(rng.integers(2**31))
        self._optimizer: Any = None  # of a library that is loaded late
        self._untold: list[Trial] = []
        self._worst_log_s: float | None = None  # of what has run
        self._known: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """One setting that nobody has measured; none if the optimiser knows none."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # length scales at their bounds are usual with ten points
            optimizer = self._told()
            for _ in range(ATTEMPTS):
                point = optimizer.ask()
                knobs = self._at(point)
                if knobs not in self._known:
                    return [Proposal(arm=self.name, knobs=knobs)]
                optimizer.tell(point, self._hopeless)  # else it would ask for the same again
        return []

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learns from the trials of all arms; plans with explicit cuts have no place in its space."""
        self._untold += [trial for trial in trials if trial.knobs.cuts is None and trial.knobs in self._space]
        self._known |= {trial.knobs for trial in trials}

    def _told(self) -> Any:
        """The optimiser, which knows all that was told."""
        if self._optimizer is None:
            (skopt,) = import_late("skopt")
            streams, threads, routes = map(len, self._choices())
            self._optimizer = skopt.Optimizer(
                [_axis(*self._space.unit_bytes_log2), _axis(0, streams - 1), _axis(0, threads - 1), [*range(routes)]],
                "GP",
                n_initial_points=N_INITIAL,
                initial_point_generator="sobol",
                random_state=self._seed,
            )
        told, self._untold = self._untold, []
        ran = [math.log(trial.span_s) for trial in told if math.isfinite(trial.span_s)]
        if ran:
            self._worst_log_s = max(ran) if self._worst_log_s is None else max(self._worst_log_s, *ran)
        if told:
            values = [math.log(trial.span_s) if math.isfinite(trial.span_s) else self._hopeless for trial in told]
            self._optimizer.tell([self._point(trial.knobs) for trial in told], values)
        return self._optimizer

    @property
    def _hopeless(self) -> float:
        """What is not to be asked for again is as bad as the worst that ran; a second, if nothing has."""
        return 0.0 if self._worst_log_s is None else self._worst_log_s

    def _choices(self) -> tuple[Sequence[object], Sequence[object], Sequence[object]]:
        return self._space.streams, self._space.threads, self._space.routes

    def _at(self, point: Sequence[Any]) -> Knobs:
        log2_bytes, streams, threads, route = point
        low, high = self._space.unit_bytes
        transport, algorithm = self._space.routes[route]
        offered = self._space.streams_on((transport, algorithm))
        return Knobs(
            unit_bytes=min(max(self._space.whole_unit_bytes(2.0**log2_bytes), low), high),
            streams=offered[min(streams, len(offered) - 1)],
            threads=self._space.threads[threads],
            transport=transport,
            algorithm=algorithm,
        )

    def _point(self, knobs: Knobs) -> list[Any]:
        values = (knobs.streams, knobs.threads, knobs.route)
        places = [choice.index(value) for choice, value in zip(self._choices(), values, strict=True)]
        low, high = self._space.unit_bytes_log2
        return [min(max(math.log2(knobs.unit_bytes), low), high), *places]


def _axis(low: float, high: float) -> Any:
    """Numbers between, or the only one that there is."""
    return (low, high) if low < high else [low]
