"""Operators that were seen in one step lie in another where the same things happen."""

import pytest

from sirtaki.analysis.operators import StepOperators, borrowed
from sirtaki.analysis.recording import Operator, PhaseSpan
from sirtaki.autotune.model.replayer import Phase

THERE = {("begin",): 10.0, ("ready", 1): 14.0, ("ready", 0): 16.0, ("end",): 20.0}


def seen(*spans_s: tuple[float, float]) -> StepOperators:
    return StepOperators(
        operators=tuple(
            Operator(name=f"op{number}", lane=0, begin_s=begin_s, end_s=end_s, phase=Phase.FORWARD, sequence=number)
            for number, (begin_s, end_s) in enumerate(spans_s)
        ),
        spans=(PhaseSpan(phase=Phase.FORWARD, begin_s=spans_s[0][0], end_s=spans_s[-1][1]),),
    )


def times(found: StepOperators) -> list[tuple[float, float]]:
    return [(one.begin_s, one.end_s) for one in found.operators]


def test_a_step_like_the_one_that_was_seen_has_its_operators() -> None:
    own = seen((10.5, 12.0), (13.0, 15.0), (19.0, 20.0))
    assert borrowed(own, THERE, THERE) == own


def test_each_part_between_two_moments_is_stretched_by_itself() -> None:
    here = {("begin",): 100.0, ("ready", 1): 102.0, ("ready", 0): 105.0, ("end",): 105.5}
    found = borrowed(seen((10.0, 12.0), (14.0, 16.0), (18.0, 20.0)), THERE, here)
    assert times(found) == [pytest.approx(pair) for pair in ((100.0, 101.0), (102.0, 105.0), (105.25, 105.5))]
    assert [one.name for one in found.operators] == ["op0", "op1", "op2"]
    assert (found.spans[0].begin_s, found.spans[0].end_s) == pytest.approx((100.0, 105.5))


def test_one_over_several_parts_is_stretched_by_each() -> None:
    here = {**THERE, ("ready", 1): 11.0}
    assert times(borrowed(seen((12.0, 15.0)), THERE, here)) == [pytest.approx((10.5, 13.5))]


def test_what_only_one_of_them_has_does_not_count() -> None:
    here = {("begin",): 0.0, ("ready", 7): 0.1, ("end",): 10.0}
    assert times(borrowed(seen((12.0, 15.0)), THERE, here)) == [pytest.approx((2.0, 5.0))]


def test_what_happened_in_another_order_is_no_common_moment() -> None:
    here = {("begin",): 0.0, ("ready", 1): 6.0, ("ready", 0): 5.0, ("end",): 10.0}
    found = times(borrowed(seen((10.0, 14.0), (15.0, 16.0), (16.0, 20.0)), THERE, here))
    assert found[0] == pytest.approx((0.0, 6.0))
    assert found[2] == (pytest.approx(6 + 4 * 2 / 6), 10.0)
    assert all(begin_s <= end_s for begin_s, end_s in found)


def test_nothing_lies_outside_of_the_step() -> None:
    assert times(borrowed(seen((9.0, 21.0)), THERE, THERE)) == [(10.0, 20.0)]
