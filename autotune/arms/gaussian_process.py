"""A Gaussian process whose hyperparameters are averaged over, not fitted: a surrogate that knows how little it knows.

With ten noisy points the most likely length scales are often the wrong ones, and a process that is sure of them stops
looking. So a fixed set of hyperparameters, drawn from what is usual for such jobs, is weighed by how well each
explains what was measured (importance sampling), and what they predict is averaged (Snoek et al., Practical Bayesian
Optimization, 2012, section 3.2). No optimiser runs, nothing is loaded but numpy, and a fit of forty points takes some
five milliseconds.

Settings on different routes share the shape of what they do in part, and each route has a level of its own.

Shape suffixes: N points, D numbers of a point, S sets of hyperparameters, K those that predict, M points to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ..lattice import FloatArray

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
