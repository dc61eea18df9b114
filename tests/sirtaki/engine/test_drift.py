"""When a rank finds that communication has changed, and when it takes it for noise."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from sirtaki.comm.gradients.buffers import Pace
from sirtaki.engine.tuning.warmup import COOL_DOWN, LONG, REFERENCE, SKIPPED, DriftWatch

Noise = Callable[[np.random.Generator, int], np.ndarray]


def gaussian(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(0.1 * rng.standard_normal(n))


def heavy_tailed(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(0.1 * rng.standard_t(2, n))


def with_hiccups(rng: np.random.Generator, n: int) -> np.ndarray:
    return gaussian(rng, n) * np.where(rng.random(n) < 0.05, 5.0, 1.0)


def with_two_kinds_of_steps(rng: np.random.Generator, n: int) -> np.ndarray:
    return gaussian(rng, n) * np.where(rng.random(n) < 0.3, 3.0, 1.0)


def noisy(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(0.4 * rng.standard_normal(n))


def warmed_up(rng: np.random.Generator, noise: Noise = gaussian) -> DriftWatch:
    watch = DriftWatch()
    for span_s in noise(rng, SKIPPED + REFERENCE):
        watch.note(float(span_s))
    return watch


def iterations_until(watch: DriftWatch, spans_s: np.ndarray) -> int | None:
    """After how many of these iterations the watch first finds something."""
    for number, span_s in enumerate(spans_s.tolist(), start=1):
        watch.note(span_s)
        if watch.pace is not Pace.USUAL:
            return number
    return None


@pytest.mark.parametrize("noise", [gaussian, heavy_tailed, with_hiccups, with_two_kinds_of_steps, noisy])
def test_a_hundred_thousand_iterations_of_noise_are_no_change(noise: Noise) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        assert iterations_until(warmed_up(rng, noise), noise(rng, 25_000)) is None


@pytest.mark.parametrize(("factor", "pace"), [(1.5, Pace.SLOWER), (1 / 1.5, Pace.FASTER)])
def test_a_change_by_half_is_found_within_fifteen_iterations_as_a_rule(factor: float, pace: Pace) -> None:
    rng, took = np.random.default_rng(0), []
    for _ in range(200):
        watch = warmed_up(rng)
        took.append(iterations_until(watch, factor * gaussian(rng, 200)))
        assert watch.pace is pace
        assert watch.ratio == pytest.approx(factor, rel=0.3)
    assert sorted(took, key=lambda n: n or 999)[180] <= 15


@pytest.mark.parametrize(("factor", "pace"), [(4.0, Pace.SLOWER), (0.25, Pace.FASTER)])
def test_a_large_change_is_found_at_once_but_a_few_iterations_are_no_change(factor: float, pace: Pace) -> None:
    watch = warmed_up(np.random.default_rng(0))
    assert iterations_until(watch, np.full(5, factor)) is None
    assert iterations_until(watch, np.ones(200)) is None
    assert iterations_until(watch, np.full(10, factor)) == 6
    assert watch.pace is pace


def test_a_slow_decline_is_found_against_the_first_iterations() -> None:
    rng = np.random.default_rng(0)
    found = iterations_until(warmed_up(rng), gaussian(rng, 5000) * 1.0005 ** np.arange(5000))
    assert found is not None
    assert 1.15 < 1.0005**found < 1.5


def test_what_has_passed_is_forgotten() -> None:
    watch = warmed_up(np.random.default_rng(0))
    assert iterations_until(watch, np.full(10, 2.0)) is not None
    watch.note(1.0)
    assert watch.pace is Pace.USUAL


def test_after_a_re_tune_the_new_times_are_the_reference() -> None:
    rng = np.random.default_rng(0)
    watch = warmed_up(rng)
    assert iterations_until(watch, 2 * gaussian(rng, 20)) is not None
    watch.retuned()
    assert iterations_until(watch, 2 * gaussian(rng, 5000)) is None
    assert iterations_until(watch, gaussian(rng, 30)) is not None
    assert watch.pace is Pace.FASTER


def test_re_tunes_in_quick_succession_come_half_as_often_each_time_until_it_is_quiet_for_long() -> None:
    watch, spans_s, waited = DriftWatch(), 1.0, []
    for quiet in (0, 0, 0, 0, LONG * 8 * COOL_DOWN, 0):
        for _ in range(quiet):
            watch.note(spans_s)
        waited.append(0)
        while watch.pace is Pace.USUAL:
            # An oscillation that is always there again when there might be a re-tune.
            watch.note(spans_s if watch._iterations < SKIPPED + REFERENCE else 3 * spans_s)
            waited[-1] += 1
        watch.retuned()
    assert waited[1:4] == [COOL_DOWN, 2 * COOL_DOWN, 4 * COOL_DOWN]
    assert waited[5] == COOL_DOWN


def test_all_ranks_count_alike_whether_or_not_they_have_joined() -> None:
    watch = DriftWatch()
    for _ in range(SKIPPED + REFERENCE):
        assert not watch.due
        watch.note(math.nan)
    assert watch.due
    assert math.isnan(watch.ratio)
    watch.note(1.0)
    assert watch.pace is Pace.USUAL


def test_another_order_of_the_gradients_is_no_change_of_communication() -> None:
    watch = warmed_up(np.random.default_rng(0))
    watch.reordered()
    assert iterations_until(watch, np.full(200, 3.0)) is None
