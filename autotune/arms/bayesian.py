"""Bayesian optimisation: a search method (arm) that proposes settings by a Gaussian process and expected improvement.

Suffixes of arrays name their axes: S = all sets of hyperparameters, K = the sets used for predictions, N = fitted
points, M = other points, D = dimensions.
"""

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
"""Number of sets of hyperparameters of the Gaussian process that are drawn from their prior."""

KEPT = 8
"""Number of sets of hyperparameters over which predictions are averaged: those with the largest evidence.

Evidence is the marginal likelihood of the fitted points.
"""

LENGTH, LENGTH_SPREAD = 0.7, 0.9
"""Log-normal prior of the kernel's length scales: median, and standard deviation of the logarithm.

Coordinates range from 0 to 1.
"""

LEVEL = 0.5
"""Standard deviation of the offset that the Gaussian process has for each route (transport and algorithm).

It is relative to the standard deviation of the kernel's Matérn part. The offset models that one route is faster than
another at all points.
"""

SCALE, SCALE_SPREAD = 1.0, 0.5
"""Log-normal prior of the Gaussian process's standard deviation: median, and standard deviation of the logarithm."""

NOISE, NOISE_SPREAD = 0.05, 0.8
"""Log-normal prior of the relative noise of one measurement: median, and standard deviation of the logarithm."""

JITTER = 1e-4
"""Variance added to each point of the Gaussian process.

Without it, the kernel matrix may not be positive definite in single precision.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hyperparameters:
    """Sets of hyperparameters of the Gaussian process, over which predictions are averaged.

    Attributes:
        inverse_squares_SD: inverse squares of the length scales, `(S, D)`.
        shared_S: correlation of the Matérn part between two routes (pairs of transport and algorithm), `(S,)`.
        variance_S: variance of the process, `(S,)`.
        noise_S: relative noise of one measurement, `(S,)`.
    """

    inverse_squares_SD: FloatArray
    shared_S: FloatArray
    variance_S: FloatArray
    noise_S: FloatArray

    def only(self, sets_K: IntArray) -> _Hyperparameters:
        """Return the sets of hyperparameters with the indices `sets_K`, `(K,)`."""
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
    """Gaussian process with a Matérn 5/2 kernel, fitted to points in the unit cube.

    Predictions are averaged over the `KEPT` sets of hyperparameters with the largest evidence (marginal likelihood).

    Attributes:
        weights: weights of the `KEPT` sets of hyperparameters, `(K,)`. Their sum is 1.

    Args:
        x_ND: coordinates of the fitted points.
        routes_N: index of the route (transport and algorithm) of each point.
        y_N: measured value of each point: the logarithm of seconds.
        measured_N: number of measurements from which each value was computed.
        noise: relative standard deviation of one measurement, estimated from repeated measurements.
        repetitions: number of repeated measurements from which `noise` was estimated.
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
        for i, z in enumerate(z_N):  # Solve `lower · white = z` for `white`, by forward substitution.
            white_SN[:, i] = (z - (lower_SNN[:, i, :i] * white_SN[:, :i]).sum(1)) / lower_SNN[:, i, i]
        log_evidence_S = -0.5 * (white_SN**2).sum(1) - np.log(lower_SNN[:, diagonal, diagonal]).sum(1)
        log_evidence_S -= repetitions * (np.log(every.noise_S) + 0.5 * (noise / every.noise_S) ** 2)
        kept_K = np.argsort(-log_evidence_S)[:KEPT]
        weights = np.exp(log_evidence_S[kept_K] - log_evidence_S[kept_K[0]])
        self.weights: FloatArray = weights / weights.sum()
        self._kept = every.only(kept_K)
        self._inverse_KNN = np.linalg.inv(lower_SNN[kept_K])
        self._white_KN = white_SN[kept_K]

    def _kernel(self, sets: _Hyperparameters, x_MD: FloatArray, routes_M: IntArray) -> FloatArray:
        squares_DMN = (x_MD.T[:, :, None] - self._x_ND.T[:, None, :]) ** 2
        m, n = squares_DMN.shape[1:]
        scaled_SMN = (sets.inverse_squares_SD @ squares_DMN.reshape(-1, m * n)).reshape(-1, m, n)
        root = np.sqrt(
            5.0 * scaled_SMN.astype(np.float32)
        )  # Use float32: it needs half the time of float64, and 6 digits suffice.
        matern_SMN = (1.0 + root + root**2 / 3.0) * np.exp(-root)
        same_MN = (routes_M[:, None] == self._routes_N[None, :]).astype(np.float32)
        shared_S11 = sets.shared_S[:, None, None].astype(np.float32)
        matern_SMN *= same_MN + (1.0 - same_MN) * shared_S11
        matern_SMN += LEVEL**2 * same_MN
        kernel_SMN: FloatArray = sets.variance_S[:, None, None] * matern_SMN
        return kernel_SMN

    def predict(self, x_MD: FloatArray, routes_M: IntArray) -> tuple[FloatArray, FloatArray]:
        """Predict the values of points: return their means, and their standard deviations without measurement noise.

        Both results have the shape `(K, M)`, with one row per set of hyperparameters.
        """
        cross_KMN = self._kernel(self._kept, x_MD, routes_M)
        half_KMN = cross_KMN @ self._inverse_KNN.transpose(0, 2, 1)
        mean_KM = (half_KMN @ self._white_KN[:, :, None])[..., 0]
        prior_K = self._kept.variance_S * (1.0 + LEVEL**2)
        variance_KM = np.maximum(prior_K[:, None] - (half_KMN**2).sum(2), 1e-12)
        return self._mean + self._unit * mean_KM, self._unit * np.sqrt(variance_KM)


# Maximum number of trials in a fit. A fit of 60 takes about 20 ms, and its time grows with the cube of the number.
MAX_FITTED_TRIALS = 60
MAX_CANDIDATES = 2000  # Maximum number of grid settings for which the expected improvement is computed.
# Times are clipped to this multiple of the shortest time, because very slow settings would distort the fit.
HOPELESS = 2.5
REFINED = 4  # Number of best settings around which bucket sizes between those of the grid are candidates, too.
# For each of the `REFINED` best settings: number of finer bucket sizes on each side, and per factor of 2.
FINE_STEPS, FINE_STEPS_PER_OCTAVE = 8, 8


class _Surrogate(NamedTuple):
    """Gaussian process fitted to the measured settings, with its predictions for other settings.

    Attributes:
        model: the fitted process. Its values are logarithms of seconds.
        best: measured setting with the smallest fitted mean.
        fitted_s: fitted mean of each measured setting, in seconds.
        candidates: unmeasured settings.
        promises: expected gain of each candidate, divided by the relative time of its trial, `(n_candidates,)`.
    """

    model: GaussianProcess
    best: Knobs
    fitted_s: dict[Knobs, float]
    candidates: list[Knobs]
    promises: FloatArray


class BayesianArm:
    """Search method (arm) that proposes the setting with the largest expected improvement per second of its trial.

    It uses the trials of all arms.

    A setting's "promise" is its expected improvement divided by the relative time of its trial (Snoek et al., Practical
    Bayesian Optimization, 2012). The relative time is the setting's expected communication time divided by the best
    setting's, at least 1. The arm first proposes an initial design: few and many streams on each route (transport and
    algorithm). The fit starts when 2 + 2 · (number of routes) settings are measured. The Gaussian process fits
    logarithms of communication times, because noise and gains are proportional to the time. The improvement is relative
    to the fitted mean of the best setting, because the shortest measured time is partly luck.
    """

    name = "bayesian"

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator) -> None:
        self._lattice = KnobLattice(space)
        self._design = _design(self._lattice, rng)
        self._seed = int(rng.integers(2**31))
        self._n_initial = 2 + 2 * len(space.routes)
        # Keep only the latest trial of each setting, because it includes all measurements of the setting.
        self._trials: dict[Knobs, Trial] = {}
        self._surrogate: _Surrogate | None = None
        self._cached_places: dict[Knobs, FloatArray] = dict(
            zip(self._lattice.points, self._lattice.coordinates, strict=True)
        )

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return up to `n` unmeasured settings, those with the largest expected improvement first."""
        if len(self._finite()) < self._n_initial:
            unmeasured = (knobs for knobs in self._design if knobs not in self._trials)
            return [Proposal(arm=self.name, knobs=knobs, reason="initial design") for knobs in islice(unmeasured, n)]
        fitted = self._fitted()
        order = np.argsort(-fitted.promises, kind="stable")[:n]
        return [
            Proposal(
                arm=self.name,
                knobs=fitted.candidates[i],
                reason=f"promises {100 * fitted.promises[i]:.2g} %",
            )
            for i in order
        ]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Add trials to the data of the next fit of the Gaussian process.

        Trials with `cuts`, compressors or NCCL algorithms are skipped, because `KnobLattice` does not contain them.
        """
        for trial in trials:
            if self._lattice.index_of(trial.knobs) is not None:
                self._trials[trial.knobs] = trial
                self._surrogate = None

    def expected_improvement(self) -> float | None:
        """Return the largest promise of an unmeasured setting (see `BayesianArm`).

        The promise is a fraction of the communication time. It is None until enough settings have been measured for a
        fit.
        """
        if len(self._finite()) < self._n_initial:
            return None
        promises = self._fitted().promises
        return float(promises.max()) if len(promises) else 0.0

    def expected_span_s(self, knobs: Knobs) -> float | None:
        """Return the Gaussian process's estimate of a measured setting's communication time, in seconds.

        None for an unmeasured setting, and until enough settings have been measured for a fit (the initial design).
        """
        if len(self._finite()) < self._n_initial:
            return None
        return self._fitted().fitted_s.get(knobs)

    def promise(self, candidates: Sequence[Knobs]) -> list[float] | None:
        """Return the promise of each candidate: its expected improvement divided by the relative time of its trial.

        The improvement is a fraction of the best setting's communication time. The promise is infinite for candidates
        outside the grid `KnobLattice`, for which the Gaussian process has no data. Return None until enough settings
        have been measured for a fit (the initial design).
        """
        if len(self._finite()) < self._n_initial:
            return None
        fitted, places = self._fitted(), [self._lattice.place(knobs) for knobs in candidates]
        on_lattice = [knobs for knobs, place in zip(candidates, places, strict=True) if place is not None]
        values = iter(self._promises(fitted.model, fitted.best, on_lattice).tolist() if on_lattice else [])
        return [math.inf if place is None else next(values) for place in places]

    def _finite(self) -> list[Trial]:
        return [trial for trial in self._trials.values() if math.isfinite(trial.span_s)]

    def _fitted(self) -> _Surrogate:
        """Return the Gaussian process fitted to all trials so far, with its predictions for unmeasured settings."""
        if self._surrogate is None:
            model, fitted_s = self._fit()
            best = min(fitted_s, key=lambda knobs: fitted_s[knobs])
            candidates = self._candidates(fitted_s)
            promises = self._promises(model, best, candidates) if candidates else np.empty(0)
            self._surrogate = _Surrogate(model, best, fitted_s, candidates, promises)
        return self._surrogate

    def _promises(self, model: GaussianProcess, best: Knobs, candidates: Sequence[Knobs]) -> FloatArray:
        mean_KM, deviation_KM = model.predict(*self._places([best, *candidates]))
        lead_KM = (mean_KM[:, :1] - mean_KM[:, 1:]) / deviation_KM[:, 1:]
        improvement_KM = deviation_KM[:, 1:] * (lead_KM * _cdf(lead_KM) + _pdf(lead_KM))
        cost_M = np.exp(np.maximum(model.weights @ (mean_KM[:, 1:] - mean_KM[:, :1]), 0.0))
        return np.asarray(model.weights @ improvement_KM / cost_M)

    def _places(self, settings: Sequence[Knobs]) -> tuple[FloatArray, IntArray]:
        """Return the coordinates of settings in the unit cube, and the index of each setting's route.

        The coordinates have the shape `(n, n_dimensions)`, the indices `(n,)`. A route is a pair of transport and
        algorithm.
        """
        n_routes = self._lattice.shape[3]
        places = np.array([self._place(knobs) for knobs in settings])
        routes = [self._lattice.space.routes.index(knobs.route) for knobs in settings]
        return places[:, : places.shape[1] - n_routes] if n_routes > 1 else places, np.array(routes)

    def _place(self, knobs: Knobs) -> FloatArray:
        place = self._cached_places.get(knobs)
        if place is None:
            place = self._lattice.place(knobs)
            assert place is not None, "the setting must be on the lattice"
            self._cached_places[knobs] = place
        return place

    def _candidates(self, fitted_s: Mapping[Knobs, float]) -> list[Knobs]:
        """Return the unmeasured settings from which the next proposal is chosen.

        They are up to `MAX_CANDIDATES` random settings of the grid, and bucket sizes between those of the grid near the
        best settings.
        """
        lattice = self._lattice.points
        if len(lattice) > MAX_CANDIDATES:
            draw = np.random.default_rng(self._seed + len(self._trials))
            lattice = tuple(lattice[i] for i in sorted(draw.choice(len(lattice), MAX_CANDIDATES, replace=False)))
        space = self._lattice.space
        around: list[Knobs] = []
        for knobs in sorted(fitted_s, key=lambda one: fitted_s[one])[:REFINED]:
            for streams in space.streams_around(knobs.streams):
                middle = round(FINE_STEPS_PER_OCTAVE * math.log2(knobs.unit_bytes))
                for step in range(middle - FINE_STEPS, middle + FINE_STEPS + 1):
                    size = space.nearest_unit_bytes(2 ** (step / FINE_STEPS_PER_OCTAVE))
                    around.append(knobs.but(unit_bytes=size, streams=streams))
        return [knobs for knobs in dict.fromkeys((*lattice, *around)) if knobs not in self._trials]

    def _fit(self) -> tuple[GaussianProcess, dict[Knobs, float]]:
        """Return the fitted Gaussian process, and {measured setting: fitted mean in seconds}."""
        trials = sorted(self._finite(), key=lambda trial: trial.span_s)[:MAX_FITTED_TRIALS]
        worst = math.log(min(trials[-1].span_s, HOPELESS * trials[0].span_s))
        settings = [trial.knobs for trial in trials]
        y = [min(math.log(trial.span_s), worst) for trial in trials]
        measured = [max(1, trial.iterations) for trial in trials]
        for trial in self._trials.values():
            if trial.status is TrialStatus.FAILED and len(settings) < MAX_FITTED_TRIALS:
                settings.append(trial.knobs)
                # Use the longest finite time for a failed setting, because its infinite time would distort the fit.
                y.append(worst)
                measured.append(1)
        places, routes = self._places(settings)
        model = GaussianProcess(places, routes, np.array(y), np.array(measured, dtype=float), **_scatter(trials))
        mean_KN, _ = model.predict(places[: len(trials)], routes[: len(trials)])
        fitted_s = np.exp(model.weights @ mean_KN).tolist()
        return model, dict(zip(settings, fitted_s, strict=False))


def _scatter(trials: Sequence[Trial]) -> dict[str, float]:
    """Estimate the relative noise of a measurement from repeated measurements of settings, with outliers clipped.

    Return the noise and the number of repetitions, as keyword arguments of `GaussianProcess`.
    """
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
    """Return the settings of the grid in the order in which the initial design proposes them.

    The first settings have few and many streams on each route (transport and algorithm), and units (buckets) of random
    medium size. The order of all further settings is random.
    """
    n_sizes, n_streams, n_threads, n_routes = lattice.shape
    first = []
    for repeat in range(2):
        for route in range(n_routes):
            few, half = bool((repeat + route) % 2), n_streams // 2
            streams = int(rng.integers(max(1, half)) if few else rng.integers(half, n_streams))
            size = int(rng.integers(n_sizes // 4, max(n_sizes // 4 + 1, 3 * n_sizes // 4)))
            first.append(lattice.at((size, streams, int(rng.integers(n_threads)), route)))
    return list(dict.fromkeys([*first, *(lattice.points[i] for i in rng.permutation(len(lattice)).tolist())]))
