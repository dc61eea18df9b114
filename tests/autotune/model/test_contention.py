"""LIBRA's equations (5) and (6): computation slows down with threads, rates rise with them and level off."""

import json
import math
from dataclasses import replace

import pytest

from sirtaki.autotune.model.fits import GAMMA_4, ContentionModel, RateCurve
from sirtaki.errors import TuningError

CURVE = RateCurve(gamma_1=4e8, gamma_2=3e8, gamma_3=0.02)
MODEL = ContentionModel(
    alpha_1=0.98,
    alpha_2=1e-4,
    overlapped=CURVE,
    alone=RateCurve(gamma_1=5e8, gamma_2=3e8, gamma_3=0.03),
    default_threads=1024,
    residual=0.1,
)


def test_a_rate_rises_with_threads_and_levels_off_at_gamma_1() -> None:
    rates = [CURVE.bytes_per_s(threads) for threads in (0, 1, 512, 1024, 10**9)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1e8)
    assert rates[1] == pytest.approx(4e8 - 3e8 * math.exp(-0.02))
    assert rates[2] == pytest.approx(4e8 - 3e8 * math.exp(-0.02 * 512**GAMMA_4))
    assert rates[-1] == pytest.approx(4e8)
    assert CURVE.seconds(1e6, 512) == pytest.approx(1e6 / rates[2])
    assert RateCurve(gamma_1=2.0, gamma_2=0.0, gamma_3=0.0).bytes_per_s(7) == 2.0


@pytest.mark.parametrize(
    "gammas", [(0.0, 0.0, 0.0), (-1.0, 0.0, 0.0), (1.0, 1.1, 0.0), (1.0, -0.1, 0.0), (1.0, 0.5, -0.1)]
)
def test_curves_that_fall_or_go_below_zero_are_refused(gammas: tuple[float, float, float]) -> None:
    with pytest.raises(TuningError, match="a rate curve needs γ1 > 0"):
        RateCurve(gamma_1=gammas[0], gamma_2=gammas[1], gamma_3=gammas[2])


def test_computation_loses_a_share_with_each_thread_but_never_stops() -> None:
    assert MODEL.compute_speed(0) == 0.98
    assert MODEL.compute_speed(1000) == pytest.approx(0.88)
    assert MODEL.compute_speed(10**6) == 0.05


@pytest.mark.parametrize("alphas", [(0.0, 0.1), (1.3, 0.1), (-0.1, 0.1), (0.9, -1e-9)])
def test_speeds_that_cannot_be_are_refused(alphas: tuple[float, float]) -> None:
    with pytest.raises(TuningError, match=r"contention needs 0 < α1 ≤ 1.2 and α2 ≥ 0"):
        replace(MODEL, alpha_1=alphas[0], alpha_2=alphas[1])


def test_a_larger_ring_carries_each_byte_more_often_and_leaves_computation_alone() -> None:
    larger = MODEL.rescaled(from_ranks=2, to_ranks=8)
    factor = (7 / 8) / (1 / 2)
    for before, after in ((MODEL.overlapped, larger.overlapped), (MODEL.alone, larger.alone)):
        assert after.seconds(1e6, 512) == pytest.approx(factor * before.seconds(1e6, 512))
    assert (larger.alpha_1, larger.alpha_2, larger.default_threads, larger.residual) == (0.98, 1e-4, 1024, 0.1)
    assert MODEL.rescaled(from_ranks=4, to_ranks=4) == MODEL
    back = larger.rescaled(from_ranks=8, to_ranks=2)
    assert back.alone.gamma_1 == pytest.approx(MODEL.alone.gamma_1)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (0, 4)])
def test_one_rank_is_no_ring(before: int, after: int) -> None:
    with pytest.raises(TuningError, match=f"cannot go from {before} to {after}"):
        MODEL.rescaled(from_ranks=before, to_ranks=after)


def test_json_goes_both_ways() -> None:
    assert ContentionModel.from_json(json.loads(json.dumps(MODEL.to_json()))) == MODEL
