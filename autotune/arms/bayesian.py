"""The Bayesian arm: a Gaussian process over the lattice of settings, and expected improvement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..knobs import FloatArray, KnobLattice, Knobs, KnobSpace
from ..trial import Proposal, Trial, TrialStatus

IntArray = npt.NDArray[np.intp]

SETS = 128
KEPT = 8
"""Sets that predict: the others' weights are small."""

LENGTH, LENGTH_SPREAD = 0.7, 0.9
"""Of an axis that is 1 long: the median of the drawn length scales, and the standard deviation of their logarithms."""

LEVEL = 0.5
"""Standard deviation of the routes' levels, over that of the shape."""

SCALE, SCALE_SPREAD = 1.0, 0.5
NOISE, NOISE_SPREAD = 0.05, 0.8
"""Of one measurement, as a share of it."""

JITTER = 1e-4
"""Of the variance: keeps single precision from making a matrix that has no root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hyperparameters:
    """What is averaged over, all `(S,)` or `(S, D)`."""

    inverse_squares_SD: FloatArray
    shared_S: FloatArray
    variance_S: FloatArray
    noise_S: FloatArray

    def only(self, sets_K: IntArray) -> _Hyperparameters:
        """Those sets."""
        return _Hyperparameters(
            inverse_squares_SD=self.inverse_squares_SD[sets_K],
            shared_S=self.shared_S[sets_K],
            variance_S=self.variance_S[sets_K],
            noise_S=self.noise_S[sets_K],
        )


@cache
def _drawn(n_dimensions: int) -> _Hyperparameters:
    rng = np.random.default_rng(0)
    lengths = LENGTH * np.exp(LENGTH_SPREAD * rng.standard_normal((SETS, n_dimensions)))
    return _Hyperparameters(
        inverse_squares_SD=lengths**-2.0,
        shared_S=rng.uniform(0.0, 1.0, SETS),
        variance_S=(SCALE * np.exp(SCALE_SPREAD * rng.standard_normal(SETS))) ** 2,
        noise_S=NOISE * np.exp(NOISE_SPREAD * rng.standard_normal(SETS)),
    )


class GaussianProcess:
    """Fitted to points in the unit cube.

    Attributes:
        weights: of the sets of hyperparameters that predict, `(K,)`; they add up to one.

    Args:
        x_ND: coordinates.
        routes_N: a number for the route of each point.
        y_N: values; logarithms of seconds.
        measured_N: how many measurements each value is the middle of.
        noise: of one measurement, as their repetitions show it.
        repetitions: how many there were.
    """

    def __init__(
        self,
        x_ND: FloatArray,
        routes_N: IntArray,
        y_N: FloatArray,
        measured_N: FloatArray,
        *,
        noise: float,
        repetitions: float,
    ) -> None:
        self._x_ND, self._routes_N = x_ND, routes_N
        self._mean = float(np.median(y_N))
        self._unit = max(float(np.std(y_N)), 0.05)
        z_N = (y_N - self._mean) / self._unit
        every = _drawn(x_ND.shape[1])
        kernel_SNN = self._kernel(every, x_ND, routes_N)
        diagonal = np.arange(len(y_N))
        kernel_SNN[:, diagonal, diagonal] += (every.noise_S[:, None] / self._unit) ** 2 / measured_N + JITTER
        lower_SNN = np.linalg.cholesky(kernel_SNN)
        white_SN = np.empty((SETS, len(z_N)))
        for i, z in enumerate(z_N):  # forward substitution
            white_SN[:, i] = (z - (lower_SNN[:, i, :i] * white_SN[:, :i]).sum(1)) / lower_SNN[:, i, i]
        log_evidence_S = -0.5 * (white_SN**2).sum(1) - np.log(lower_SNN[:, diagonal, diagonal]).sum(1)
        log_evidence_S -= repetitions * (np.log(every.noise_S) + 0.5 * (noise / every.noise_S) ** 2)
        kept = np.argsort(-log_evidence_S)[:KEPT]
        weights = np.exp(log_evidence_S[kept] - log_evidence_S[kept[0]])
        self.weights: FloatArray = weights / weights.sum()
        self._kept = every.only(kept)
        self._inverse_KNN = np.linalg.inv(lower_SNN[kept])
        self._white_KN = white_SN[kept]

    def _kernel(self, sets: _Hyperparameters, x_MD: FloatArray, routes_M: IntArray) -> FloatArray:
        squares_DMN = (x_MD.T[:, :, None] - self._x_ND.T[:, None, :]) ** 2
        m, n = squares_DMN.shape[1:]
        scaled_SMN = (sets.inverse_squares_SD @ squares_DMN.reshape(-1, m * n)).reshape(-1, m, n)
        root = np.sqrt(5.0 * scaled_SMN.astype(np.float32))  # half the time, and six digits are enough here
        matern_SMN = (1.0 + root + root**2 / 3.0) * np.exp(-root)
        same_MN = (routes_M[:, None] == self._routes_N[None, :]).astype(np.float32)
        shared_S11 = sets.shared_S[:, None, None].astype(np.float32)
        matern_SMN *= same_MN + (1.0 - same_MN) * shared_S11
        matern_SMN += LEVEL**2 * same_MN
        kernel_SMN: FloatArray = sets.variance_S[:, None, None] * matern_SMN
        return kernel_SMN

    def predict(self, x_MD: FloatArray, routes_M: IntArray) -> tuple[FloatArray, FloatArray]:
        """Means and standard deviations without noise, `(K, M)` each, one row a set of hyperparameters."""
        cross_KMN = self._kernel(self._kept, x_MD, routes_M)
        half_KMN = cross_KMN @ self._inverse_KNN.transpose(0, 2, 1)
        mean_KM = (half_KMN @ self._white_KN[:, :, None])[..., 0]
        prior_K = self._kept.variance_S * (1.0 + LEVEL**2)
        variance_KM = np.maximum(prior_K[:, None] - (half_KMN**2).sum(2), 1e-12)
        return self._mean + self._unit * mean_KM, self._unit * np.sqrt(variance_KM)


MAX_FITTED_TRIALS = 60  # the fit is cubic in this; 60 take some 20 ms
MAX_CANDIDATES = 2000
HOPELESS = 2.5  # times the best: how much worse something is makes no difference, but would bend the fit
REFINED = 4  # settings around which unit sizes between the lattice's are candidates, too
FINE_STEPS, FINE_STEPS_PER_OCTAVE = 8, 8


class _Belief(NamedTuple):
    """What the surrogate expects; logarithms of seconds."""

    model: GaussianProcess
    best: Knobs  # measured, and fastest by the fitted mean
    believed_s: dict[Knobs, float]  # seconds that the measured settings truly take
    candidates: list[Knobs]  # nobody has tried them
    promised: FloatArray  # see `BayesianArm`, (n_candidates,)


class BayesianArm:
    """Proposes what promises most; learns from every arm's trials, and has an opinion of what others propose.

    What promises is the expected improvement over what the trial is expected to take (Snoek et al., Practical Bayesian
    Optimization, 2012: per second). The first proposals, while fewer than two settings and two for each route are
    known, are few streams and many on each route. Spans are fitted as logarithms, since noise and gains are shares of
    the span. The bar to improve on is the fitted mean at the best setting and not the luckiest measurement.
    """

    name = "bayesian"

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator) -> None:
        self._lattice = KnobLattice(space)
        self._design = _design(self._lattice, rng)
        self._seed = int(rng.integers(2**31))
        self._n_initial = 2 + 2 * len(space.routes)
        self._known: dict[Knobs, Trial] = {}  # the latest trial of a setting holds all its measurements
        self._belief: _Belief | None = None
        self._known_places: dict[Knobs, FloatArray] = dict(
            zip(self._lattice.points, self._lattice.coordinates, strict=True)
        )

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Up to `n` settings not yet measured, the most promising first."""
        if len(self._finite()) < self._n_initial:
            fresh = (knobs for knobs in self._design if knobs not in self._known)
            return [Proposal(arm=self.name, knobs=knobs, reason="initial design") for knobs in islice(fresh, n)]
        belief = self._believe()
        order = np.argsort(-belief.promised, kind="stable")[:n]
        return [
            Proposal(
                arm=self.name,
                knobs=belief.candidates[i],
                reason=f"promises {100 * belief.promised[i]:.2g} %",
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
        if len(self._finite()) < self._n_initial:
            return None
        promised = self._believe().promised
        return float(promised.max()) if len(promised) else 0.0

    def expected_span_s(self, knobs: Knobs) -> float | None:
        """What a measured setting truly takes by the surrogate; None for others, and while it is too early to say."""
        if len(self._finite()) < self._n_initial:
            return None
        return self._believe().believed_s.get(knobs)

    def promise(self, candidates: Sequence[Knobs]) -> list[float] | None:
        """What each promises, as a share of the best span; None = too early to say.

        What has no place on the lattice promises anything.
        """
        if len(self._finite()) < self._n_initial:
            return None
        belief, places = self._believe(), [self._lattice.place(knobs) for knobs in candidates]
        known = [knobs for knobs, place in zip(candidates, places, strict=True) if place is not None]
        values = iter(self._promised(belief.model, belief.best, known).tolist() if known else [])
        return [math.inf if place is None else next(values) for place in places]

    def _finite(self) -> list[Trial]:
        return [trial for trial in self._known.values() if math.isfinite(trial.span_s)]

    def _believe(self) -> _Belief:
        """Fits the surrogate; kept until the next `tell`, so asking twice gives the same answer."""
        if self._belief is None:
            model, believed_s = self._fit()
            best = min(believed_s, key=lambda knobs: believed_s[knobs])
            candidates = self._candidates(believed_s)
            promised = self._promised(model, best, candidates) if candidates else np.empty(0)
            self._belief = _Belief(model, best, believed_s, candidates, promised)
        return self._belief

    def _promised(self, model: GaussianProcess, best: Knobs, candidates: Sequence[Knobs]) -> FloatArray:
        mean_KM, deviation_KM = model.predict(*self._places([best, *candidates]))
        ahead_KM = (mean_KM[:, :1] - mean_KM[:, 1:]) / deviation_KM[:, 1:]
        improvement_KM = deviation_KM[:, 1:] * (ahead_KM * _cdf(ahead_KM) + _pdf(ahead_KM))
        cost_M = np.exp(np.maximum(model.weights @ (mean_KM[:, 1:] - mean_KM[:, :1]), 0.0))
        return np.asarray(model.weights @ improvement_KM / cost_M)

    def _places(self, settings: Sequence[Knobs]) -> tuple[FloatArray, IntArray]:
        """Coordinates but for the route, `(n, n_dimensions)`, and the number of the route, `(n,)`."""
        n_routes = self._lattice.shape[3]
        places = np.array([self._place(knobs) for knobs in settings])
        routes = [self._lattice.space.routes.index(knobs.route) for knobs in settings]
        return places[:, : places.shape[1] - n_routes] if n_routes > 1 else places, np.array(routes)

    def _place(self, knobs: Knobs) -> FloatArray:
        place = self._known_places.get(knobs)
        if place is None:
            place = self._lattice.place(knobs)
            assert place is not None, "only what lies on the lattice is learnt and proposed"
            self._known_places[knobs] = place
        return place

    def _candidates(self, believed_s: Mapping[Knobs, float]) -> list[Knobs]:
        """The lattice, and unit sizes between its points around the best settings; without what is known."""
        lattice = self._lattice.points
        if len(lattice) > MAX_CANDIDATES:
            draw = np.random.default_rng(self._seed + len(self._known))
            lattice = tuple(lattice[i] for i in sorted(draw.choice(len(lattice), MAX_CANDIDATES, replace=False)))
        space = self._lattice.space
        low, high = space.unit_bytes
        around: list[Knobs] = []
        for knobs in sorted(believed_s, key=lambda one: believed_s[one])[:REFINED]:
            for streams in space.streams_around(knobs.streams):
                middle = round(FINE_STEPS_PER_OCTAVE * math.log2(knobs.unit_bytes))
                for step in range(middle - FINE_STEPS, middle + FINE_STEPS + 1):
                    size = space.whole_unit_bytes(2 ** (step / FINE_STEPS_PER_OCTAVE))
                    around.append(knobs.but(unit_bytes=min(max(size, low), high), streams=streams))
        return [knobs for knobs in dict.fromkeys((*lattice, *around)) if knobs not in self._known]

    def _fit(self) -> tuple[GaussianProcess, dict[Knobs, float]]:
        """The fitted process, and its mean at the measured settings in seconds."""
        trials = sorted(self._finite(), key=lambda trial: trial.span_s)[:MAX_FITTED_TRIALS]
        worst = math.log(min(trials[-1].span_s, HOPELESS * trials[0].span_s))
        settings = [trial.knobs for trial in trials]
        y = [min(math.log(trial.span_s), worst) for trial in trials]
        measured = [max(1, trial.iterations) for trial in trials]
        for trial in self._known.values():
            if trial.status is TrialStatus.FAILED and len(settings) < MAX_FITTED_TRIALS:
                settings.append(trial.knobs)
                y.append(worst)  # as bad as the worst that ran: keeps away without bending the fit
                measured.append(1)
        places, routes = self._places(settings)
        model = GaussianProcess(places, routes, np.array(y), np.array(measured, dtype=float), **_scatter(trials))
        mean_KN, _ = model.predict(places[: len(trials)], routes[: len(trials)])
        believed = np.exp(model.weights @ mean_KN).tolist()
        return model, dict(zip(settings, believed, strict=False))


def _scatter(trials: Sequence[Trial]) -> dict[str, float]:
    """Noise of one measurement from those that were repeated, outliers cut, and how many repetitions there were."""
    repeated = [(trial.noise_s / trial.span_s, trial.iterations - 1) for trial in trials if trial.noise_s > 0.0]
    if not repeated:
        return {"noise": 1.0, "repetitions": 0.0}
    deviations, counts = np.array(repeated).T
    deviations = np.minimum(math.sqrt(2.1) * deviations, 5.0 * np.median(deviations))
    return {"noise": math.sqrt(np.average(deviations**2, weights=counts)), "repetitions": float(counts.sum())}


_erf = np.frompyfunc(math.erf, 1, 1)


def _cdf(z: FloatArray) -> FloatArray:
    return 0.5 * (1.0 + np.asarray(_erf(z / math.sqrt(2.0)), dtype=np.float64))


def _pdf(z: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi))


def _design(lattice: KnobLattice, rng: np.random.Generator) -> list[Knobs]:
    """Few streams and many on each route first, with units of a size drawn from the middle; then anything."""
    n_sizes, n_streams, n_threads, n_routes = lattice.shape
    first = []
    for turn in range(2):
        for route in range(n_routes):
            few, half = bool((turn + route) % 2), n_streams // 2
            streams = int(rng.integers(max(1, half)) if few else rng.integers(half, n_streams))
            size = int(rng.integers(n_sizes // 4, max(n_sizes // 4 + 1, 3 * n_sizes // 4)))
            first.append(lattice.at((size, streams, int(rng.integers(n_threads)), route)))
    return list(dict.fromkeys([*first, *(lattice.points[i] for i in rng.permutation(len(lattice)).tolist())]))
