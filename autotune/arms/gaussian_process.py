"""A Gaussian process for a few dozen points, and the improvement that it expects: the surrogate of the Bayesian arm.

Matérn 5/2 with a length scale for each dimension, and noise (Rasmussen & Williams, Gaussian Processes for Machine
Learning, eq. 2.25-2.26, 4.17, 5.8). It needs numpy alone: libraries that offer this take one to two seconds to import,
which a job that has just begun would wait for (docs/decisions/0087).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..lattice import FloatArray

LENGTHS = np.geomspace(0.15, 5.0, 9)
"""Length scales that are considered, in units of the cube that all points lie in."""

NOISES = np.geomspace(1e-4, 1.0, 7)
"""Variances of the noise that are considered, as shares of the function's variance."""

VARIANCES = (0.05, 20.0)
"""Bounds of the function's variance, as shares of the variance of what was observed."""

SWEEPS = 2
JITTER = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianProcess:
    """What is believed of a function after some noisy observations.

    Attributes:
        x: where it was observed, `(n, d)`.
        lengths: length scale of each dimension, `(d,)`.
        noise: variance of the noise as a share of the function's.
        variance: of the function, in squares of `scale`.
        weights: C⁻¹ y of the normalised observations, `(n,)`.
        factor: inverse of the lower Cholesky factor of C = R + noise · I, `(n, n)`; R are the correlations.
        mean: of the observations.
        scale: their standard deviation.
    """

    x: FloatArray
    lengths: FloatArray
    noise: float
    variance: float
    weights: FloatArray
    factor: FloatArray
    mean: float
    scale: float

    @classmethod
    def fit(cls, x: FloatArray, y: FloatArray) -> GaussianProcess:
        """The process with the likeliest parameters: a search over a grid, at first with one length scale for all.

        Args:
            x: `(n, d)`, in the unit cube, at least one.
            y: what was observed there, `(n,)`.
        """
        mean, scale = float(y.mean()), float(y.std()) or 1.0
        normal = (y - mean) / scale
        squares = np.square(x[:, None, :] - x[None, :, :])
        n_dimensions = x.shape[1]
        pairs = [(length, noise) for length in LENGTHS for noise in NOISES]
        candidates = np.array([[length] * n_dimensions + [noise] for length, noise in pairs])
        best = _likeliest(candidates, squares, normal)
        for _ in range(SWEEPS if n_dimensions > 1 else 0):
            for dimension in range(n_dimensions + 1):
                values = LENGTHS if dimension < n_dimensions else NOISES
                candidates = np.tile(best, (len(values), 1))
                candidates[:, dimension] = values
                best = _likeliest(candidates, squares, normal)
        lengths, noise = best[:-1], float(best[-1])
        factor = np.linalg.inv(np.linalg.cholesky(_covariances(best[None], squares)[0]))
        whitened = factor @ normal
        return cls(
            x=x,
            lengths=lengths,
            noise=noise,
            variance=float(np.clip(whitened @ whitened / len(y), *VARIANCES)),
            weights=factor.T @ whitened,
            factor=factor,
            mean=mean,
            scale=scale,
        )

    def predict(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of the function, without the noise, each `(n_points,)`."""
        across = _correlations(np.square(x[:, None, :] - self.x[None, :, :]) @ self.lengths**-2.0)
        explained = np.square(across @ self.factor.T).sum(axis=1)
        deviation = np.sqrt(self.variance * np.maximum(1.0 - explained, 0.0))
        return self.mean + self.scale * (across @ self.weights), self.scale * deviation

    def expected_improvement(self, x: FloatArray, best: float) -> FloatArray:
        """By how much the function is expected to lie below `best`, where it does; `(n_points,)`."""
        mean, deviation = self.predict(x)
        gain = best - mean
        certain = np.maximum(gain, 0.0)
        z = np.divide(gain, deviation, out=np.zeros_like(gain), where=deviation > 0)
        below = np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in z])
        density = np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
        return np.where(deviation > 0, gain * below + deviation * density, certain)


def _correlations(squares: FloatArray) -> FloatArray:
    """Matérn 5/2 of squared distances."""
    distance = np.sqrt(5.0 * squares)
    return np.asarray((1.0 + distance + distance**2 / 3.0) * np.exp(-distance))


def _covariances(candidates: FloatArray, squares: FloatArray) -> FloatArray:
    """C of each candidate `(lengths …, noise)`, `(n_candidates, n, n)`, from squared differences `(n, n, d)`."""
    scaled = np.einsum("ijd,cd->cij", squares, candidates[:, :-1] ** -2.0)
    noise = (candidates[:, -1] + JITTER)[:, None, None] * np.eye(squares.shape[0])
    return np.asarray(_correlations(scaled) + noise)


def _likeliest(candidates: FloatArray, squares: FloatArray, y: FloatArray) -> FloatArray:
    """The candidate with the largest marginal likelihood, each with its own best variance."""
    lower = np.linalg.cholesky(_covariances(candidates, squares))
    whitened = np.linalg.solve(lower, np.broadcast_to(y[:, None], (len(candidates), len(y), 1)))[..., 0]
    misfit = np.square(whitened).sum(axis=1)
    variance = np.clip(misfit / len(y), *VARIANCES)
    half_log_determinant = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
    log_likelihood = -0.5 * (len(y) * np.log(variance) + misfit / variance) - half_log_determinant
    return np.asarray(candidates[int(np.argmax(log_likelihood))])
