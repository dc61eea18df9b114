"""The process follows what was measured, doubts what it has not seen, and takes noise for noise."""

import numpy as np

from sirtaki.autotune.arms.bayesian import GaussianProcess, IntArray
from sirtaki.autotune.knobs import FloatArray

ROUTES = 2


def bowl(x_ND: FloatArray, routes_N: IntArray) -> FloatArray:
    """Both routes have their optimum at (0.6, 0.3); the second is slower by a third."""
    values: FloatArray = ((x_ND - np.array([0.6, 0.3])) ** 2).sum(1) + routes_N / 3.0
    return values


def fitted(
    n: int, *, noise: float = 0.0, measured: int = 1, repetitions: float = 0.0
) -> tuple[GaussianProcess, FloatArray, IntArray]:
    """The process after `n` random points, and the points."""
    rng = np.random.default_rng(1)
    x_ND, routes_N = rng.random((n, 2)), rng.integers(ROUTES, size=n)
    y_N = bowl(x_ND, routes_N) + noise / np.sqrt(measured) * rng.standard_normal(n)
    process = GaussianProcess(
        x_ND, routes_N, y_N, np.full(n, float(measured)), noise=noise or 1.0, repetitions=repetitions
    )
    return process, x_ND, routes_N


def mean_and_deviation(process: GaussianProcess, x_MD: FloatArray, routes_M: IntArray) -> tuple[FloatArray, ...]:
    """Averaged over the hyperparameters."""
    mean_KM, deviation_KM = process.predict(x_MD, routes_M)
    return process.weights @ mean_KM, process.weights @ deviation_KM


def test_it_predicts_between_the_points() -> None:
    process, *_ = fitted(40)
    rng = np.random.default_rng(2)
    x_MD, routes_M = rng.uniform(0.1, 0.9, (50, 2)), rng.integers(ROUTES, size=50)
    mean_M, _ = mean_and_deviation(process, x_MD, routes_M)
    assert np.abs(mean_M - bowl(x_MD, routes_M)).max() < 0.05


def test_it_is_sure_of_what_it_knows_and_not_of_what_is_far_away() -> None:
    x_ND = np.array([[0.1, 0.1], [0.15, 0.1], [0.1, 0.2], [0.2, 0.2]])
    routes_N = np.zeros(4, dtype=int)
    process = GaussianProcess(x_ND, routes_N, bowl(x_ND, routes_N), np.ones(4), noise=1.0, repetitions=0.0)
    _, (near, far, elsewhere) = mean_and_deviation(
        process, np.array([[0.12, 0.12], [0.9, 0.9], [0.12, 0.12]]), np.array([0, 0, 1])
    )
    assert near < far
    assert near < elsewhere


def test_another_route_is_expected_to_have_the_same_shape_where_it_has_shown_it() -> None:
    """Of the second route only one half is known; the other half rises as it does on the first."""
    grid = np.linspace(0.0, 1.0, 9)
    x_ND = np.array([[x, 0.5] for x in (*grid, *grid[:5])])
    routes_N = np.array([0] * 9 + [1] * 5)
    y_N = np.abs(x_ND[:, 0] - 0.5) + routes_N / 3.0
    process = GaussianProcess(x_ND, routes_N, y_N, np.ones(14), noise=0.01, repetitions=20.0)
    mean_M, _ = mean_and_deviation(process, np.array([[0.5, 0.5], [0.9, 0.5]]), np.array([1, 1]))
    assert mean_M[1] - mean_M[0] > 0.15


def test_repetitions_say_how_much_is_noise() -> None:
    """The same scatter around a bowl: luck if repetitions scatter as much, a rough landscape if they agree."""
    rng = np.random.default_rng(3)
    x_ND, routes_N = rng.random((30, 2)), np.zeros(30, dtype=int)
    y_N = bowl(x_ND, routes_N) + 0.1 * rng.standard_normal(30)

    def follows(noise: float) -> float:
        process = GaussianProcess(x_ND, routes_N, y_N, np.ones(30), noise=noise, repetitions=30.0)
        mean_N, _ = mean_and_deviation(process, x_ND, routes_N)
        return float(np.abs(mean_N - y_N).mean())

    assert follows(noise=0.01) < 0.5 * follows(noise=0.1)


def test_what_was_measured_often_counts_for_more() -> None:
    x_ND, routes_N = np.array([[0.5, 0.5], [0.52, 0.5]]), np.zeros(2, dtype=int)
    process = GaussianProcess(x_ND, routes_N, np.array([0.0, 0.3]), np.array([20.0, 1.0]), noise=0.15, repetitions=20.0)
    (often, once), _ = mean_and_deviation(process, x_ND, routes_N)
    assert abs(often - 0.0) < abs(once - 0.3)


def test_where_only_routes_differ_there_are_no_coordinates() -> None:
    routes_N = np.array([0, 1, 0, 1])
    process = GaussianProcess(
        np.empty((4, 0)), routes_N, np.array([0.0, 0.4, 0.02, 0.41]), np.ones(4), noise=1.0, repetitions=0.0
    )
    mean_M, _ = mean_and_deviation(process, np.empty((2, 0)), np.array([0, 1]))
    assert mean_M[0] < mean_M[1]


def test_points_that_all_take_the_same_are_no_trouble() -> None:
    x_ND = np.random.default_rng(0).random((60, 3))
    process = GaussianProcess(
        x_ND, np.zeros(60, dtype=int), np.full(60, -3.0), np.full(60, 20.0), noise=1e-9, repetitions=1e3
    )
    mean_N, deviation_N = mean_and_deviation(process, x_ND, np.zeros(60, dtype=int))
    assert np.allclose(mean_N, -3.0, atol=0.01)
    assert np.isfinite(deviation_N).all()
