"""Bayesian optimisation: a Gaussian process over the lattice, expected improvement found exactly.

The lattice has some hundred settings, so that all can be looked at and those already known left out
(docs/decisions/0010).
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..knobs import Knobs, KnobSpace
from ..lattice import FloatArray, KnobLattice
from ..trial import Proposal, Trial, TrialStatus
from .gaussian_process import GaussianProcess

MAX_FITTED_TRIALS = 60  # the fit is cubic in this; 60 take some 20 ms
MAX_CANDIDATES = 2000


class _Belief(NamedTuple):
    """What the surrogate expects of the settings nobody has tried; logarithms of seconds."""

    candidates: list[int]  # indices into the lattice
    improvement: FloatArray  # expected improvement over the best setting, (n_candidates,)
    believed_s: dict[Knobs, float]  # seconds that the measured settings truly take


class BayesianArm:
    """Proposes the settings with the largest expected improvement; learns from every arm's trials.

    The first proposals, while fewer than `n_initial` settings are known, are random. Spans are fitted as
    logarithms, since noise and gains are shares of the span. The bar to improve on is the fitted mean at the best
    setting and not the luckiest measurement.
    """

    def __init__(
        self,
        space: KnobSpace,
        *,
        rng: np.random.Generator,
        name: str = "bayesian",
        n_initial: int = 4,
    ) -> None:
        self.name = name
        self._lattice = KnobLattice(space)
        self._design = rng.permutation(len(self._lattice)).tolist()
        self._seed = int(rng.integers(2**31))
        self._n_initial = n_initial
        self._known: dict[Knobs, Trial] = {}  # the latest trial of a setting holds all its measurements
        self._belief: _Belief | None = None

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Up to `n` settings not yet measured, the most promising first."""
        if len(self._finite()) < self._n_initial:
            fresh = (self._lattice.points[i] for i in self._design if self._lattice.points[i] not in self._known)
            return [Proposal(arm=self.name, knobs=knobs, reason="initial design") for knobs in islice(fresh, n)]
        belief = self._believe()
        order = np.argsort(-belief.improvement, kind="stable")[:n]
        return [
            Proposal(
                arm=self.name,
                knobs=self._lattice.points[belief.candidates[i]],
                reason=f"expected improvement {100 * belief.improvement[i]:.2g} %",
            )
            for i in order
        ]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Takes the trials in; explicit cuts have no place on the lattice and are skipped."""
        for trial in trials:
            if self._lattice.index_of(trial.knobs) is not None:
                self._known[trial.knobs] = trial
                self._belief = None

    def expected_improvement(self) -> float | None:
        """Largest share of the best span that an untried setting is expected to save; None = too early to say."""
        if len(self._finite()) < 2 * self._n_initial:
            return None
        improvement = self._believe().improvement
        return float(improvement.max()) if len(improvement) else 0.0

    def expected_span_s(self, knobs: Knobs) -> float | None:
        """What a measured setting truly takes by the surrogate; None for others, and while it is too early to say."""
        if len(self._finite()) < 2 * self._n_initial:
            return None
        return self._believe().believed_s.get(knobs)

    def _finite(self) -> list[Trial]:
        return [trial for trial in self._known.values() if math.isfinite(trial.span_s)]

    def _believe(self) -> _Belief:
        """Fits the surrogate; kept until the next `tell`, so asking twice gives the same answer."""
        if self._belief is None:
            process, believed_s = self._fit()
            y_best = math.log(min(believed_s.values()))
            candidates = [i for i, knobs in enumerate(self._lattice.points) if knobs not in self._known]
            if len(candidates) > MAX_CANDIDATES:
                draw = np.random.default_rng(self._seed + len(self._known))
                candidates = sorted(draw.choice(candidates, MAX_CANDIDATES, replace=False).tolist())
            improvement = np.empty(0)
            if candidates:
                improvement = process.expected_improvement(self._lattice.coordinates[candidates], y_best)
            self._belief = _Belief(candidates, improvement, believed_s)
        return self._belief

    def _fit(self) -> tuple[GaussianProcess, dict[Knobs, float]]:
        """The fitted process, and its mean at the measured settings in seconds."""
        trials = sorted(self._finite(), key=lambda trial: trial.span_s)[:MAX_FITTED_TRIALS]
        worst = math.log(trials[-1].span_s)
        x: list[FloatArray] = []
        y: list[float] = []
        for trial in trials:
            x.append(self._place(trial))
            y.append(math.log(trial.span_s))
        for trial in self._known.values():
            if trial.status is TrialStatus.FAILED and len(x) < MAX_FITTED_TRIALS:
                x.append(self._place(trial))
                y.append(worst)  # as bad as the worst that ran: keeps away without bending the fit
        x_ND = np.array(x)
        process = GaussianProcess.fit(x_ND, np.array(y))
        mean_N, _ = process.predict(x_ND[: len(trials)])
        return process, {trial.knobs: math.exp(mean) for trial, mean in zip(trials, mean_N.tolist(), strict=True)}

    def _place(self, trial: Trial) -> FloatArray:
        place = self._lattice.place(trial.knobs)
        assert place is not None, "tell() keeps only what lies on the lattice"
        return place
