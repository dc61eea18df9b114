"""The surrogate is scikit-learn's Gaussian process with parameters that are about as likely as those it finds."""

import math
import warnings

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from sirtaki.autotune.arms.gaussian_process import GaussianProcess


def observations(n: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noisy values of a smooth function at random points, and other points."""
    rng = np.random.default_rng(seed)
    x, elsewhere = rng.random((n, d)), rng.random((50, d))
    return x, np.sin(4 * x[:, 0]) + x.sum(axis=1) + 0.05 * rng.standard_normal(n), elsewhere


def reference(process: GaussianProcess, y: np.ndarray) -> tuple[GaussianProcessRegressor, np.ndarray]:
    """scikit-learn's with the same parameters, and the normalised observations."""
    kernel = ConstantKernel(process.variance) * Matern(process.lengths, nu=2.5)
    noise = WhiteKernel(process.noise * process.variance)
    normal = (y - process.mean) / process.scale
    return GaussianProcessRegressor(kernel + noise, optimizer=None, alpha=1e-10).fit(process.x, normal), normal


@pytest.mark.parametrize(("n", "d"), [(1, 1), (5, 1), (12, 3), (60, 6)])
def test_means_and_deviations_are_scikit_learns(n: int, d: int) -> None:
    x, y, elsewhere = observations(n, d, seed=n)
    process = GaussianProcess.fit(x, y)
    theirs, _ = reference(process, y)
    mean, deviation = process.predict(elsewhere)
    their_mean, their_deviation = theirs.predict(elsewhere, return_std=True)
    of_function = np.sqrt(np.maximum(their_deviation**2 - process.noise * process.variance, 0))  # theirs has the noise
    assert mean == pytest.approx(process.mean + process.scale * their_mean, abs=1e-5)
    assert deviation == pytest.approx(process.scale * of_function, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_parameters_are_about_as_likely_as_the_best(seed: int) -> None:
    x, y, _ = observations(25, 3, seed=seed)
    theirs, normal = reference(GaussianProcess.fit(x, y), y)
    kernel = ConstantKernel(1.0, (0.05, 20.0)) * Matern([0.5] * 3, (0.15, 5.0), nu=2.5) + WhiteKernel(0.01, (1e-5, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parameters at their bounds
        best = GaussianProcessRegressor(kernel, n_restarts_optimizer=3, random_state=0).fit(x, normal)
    found = theirs.log_marginal_likelihood(theirs.kernel_.theta)
    assert found > best.log_marginal_likelihood_value_ - 4.0  # a coarse grid, chosen for speed


def test_the_improvement_is_the_mean_of_what_lies_below() -> None:
    x, y, elsewhere = observations(12, 2, seed=0)
    process = GaussianProcess.fit(x, y)
    best = float(y.mean())
    drawn = np.random.default_rng(0).standard_normal(200_000)
    mean, deviation = process.predict(elsewhere)
    sampled = [np.maximum(best - (m + s * drawn), 0).mean() for m, s in zip(mean, deviation, strict=True)]
    assert process.expected_improvement(elsewhere, best) == pytest.approx(sampled, abs=4e-3 * math.sqrt(y.var()))


@pytest.mark.parametrize("y", [[2.0, 2.0, 2.0], [2.0, 2.0, 2.1]])
def test_equal_points_and_equal_values_are_no_trouble(y: list[float]) -> None:
    process = GaussianProcess.fit(np.zeros((3, 2)), np.array(y))
    mean, deviation = process.predict(np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert np.isfinite([mean, deviation]).all()
    assert mean[0] == pytest.approx(np.mean(y), abs=0.05)
    assert (process.expected_improvement(np.zeros((1, 2)), 2.0) >= 0).all()
