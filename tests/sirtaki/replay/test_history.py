"""Stretches, waits and pieces of one rank's iteration."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sirtaki.analysis.job_model import Marks, Stretch, Wait, pieces, stretches, with_waits
from sirtaki.analysis.recording import Copy, Operator, PhaseSpan, RecordedIteration
from sirtaki.autotune.model.replayer import Activity, Phase

UNIT = (0, 0, 100)


def same(moment_s: float) -> float:
    return moment_s


def operator(name: str, begin_s: float, end_s: float, phase: Phase = Phase.BACKWARD, lane: int = 0) -> Operator:
    return Operator(name=name, lane=lane, begin_s=begin_s, end_s=end_s, phase=phase)


def iteration(*operators: Operator, copies: tuple[Copy, ...] = ()) -> RecordedIteration:
    spans = (
        PhaseSpan(phase=Phase.DATA, begin_s=0.0, end_s=1.0),
        PhaseSpan(phase=Phase.BACKWARD, begin_s=2.0, end_s=8.0),
    )
    return RecordedIteration(number=0, begin_s=0.0, end_s=10.0, spans=spans, operators=operators, copies=copies)


def test_time_without_operators_is_its_phases() -> None:
    full = stretches(iteration(operator("mm", 3.0, 4.0)), same)
    assert [(one.begin_s, one.end_s, one.phase, one.name) for one in full] == [
        (0.0, 1.0, Phase.DATA, ""),
        (1.0, 2.0, Phase.OTHER, ""),
        (2.0, 3.0, Phase.BACKWARD, ""),
        (3.0, 4.0, Phase.BACKWARD, "mm"),
        (4.0, 8.0, Phase.BACKWARD, ""),
        (8.0, 10.0, Phase.OTHER, ""),
    ]
    assert [one.computes for one in full] == [False, True, True, True, True, True]


def test_neighbours_that_seem_to_overlap_and_other_lanes_leave_no_hole() -> None:
    full = stretches(
        iteration(
            operator("mm", 3.0, 4.0),
            operator("add", 3.9, 5.0),
            operator("inside", 4.1, 4.2),
            operator("elsewhere", 0.0, 9.0, lane=1),
            copies=(Copy(begin_s=4.95, end_s=5.5, n_gradients=1),),
        ),
        same,
    )
    assert all(before.end_s == after.begin_s for before, after in pairwise(full))
    assert (full[0].begin_s, full[-1].end_s) == (0.0, 10.0)
    assert [one.name for one in full if one.name] == ["mm", "add", "copy gradients"]
    copied = next(one for one in full if one.activity is Activity.COPY)
    assert (copied.begin_s, copied.end_s, copied.phase) == (5.0, 5.5, Phase.BACKWARD)


def test_a_gap_in_which_a_result_comes_is_waiting_until_then() -> None:
    full = stretches(iteration(operator("mm", 3.0, 4.0)), same)
    wait = Wait(begin_s=4.5, end_s=7.0, keys=(UNIT,), until_backward_ends=True)
    found = [(one.begin_s, one.end_s) for one in with_waits(full, [wait]) if one.waits]
    assert found == [(4.5, 7.0)]
    outside = Wait(begin_s=8.5, end_s=9.0, keys=(UNIT,), until_backward_ends=True)
    assert [one.phase for one in with_waits(full, [outside]) if one.waits] == [Phase.BACKWARD]
    assert sum(one.end_s - one.begin_s for one in with_waits(full, [wait])) == pytest.approx(10.0)


def test_a_result_that_comes_while_something_is_done_is_needed_when_backward_returns() -> None:
    full = stretches(iteration(operator("mm", 3.0, 4.0), operator("add", 5.0, 7.0)), same)
    for end_s in (3.5, 4.5, 6.0):
        found = with_waits(full, [Wait(begin_s=3.2, end_s=end_s, keys=(UNIT,), until_backward_ends=True)])
        (seen,) = (one for one in found if one.waits)
        assert seen.begin_s == seen.end_s == 7.0


def test_pieces_are_cut_where_something_depends_on_them() -> None:
    full = [
        Stretch(begin_s=0.0, end_s=4.0, activity=Activity.COMPUTE, phase=Phase.BACKWARD, name="mm"),
        Stretch(begin_s=4.0, end_s=6.0, activity=Activity.COMPUTE, phase=Phase.BACKWARD, waits=(UNIT,)),
        Stretch(begin_s=6.0, end_s=7.0, activity=Activity.COMPUTE, phase=Phase.UPDATE, name="step"),
    ]
    marks = Marks(ready=[(1.0, (0, 0)), (3.0, (0, 1))], issued=[(3.0, UNIT)], seen={UNIT: 0.25})
    found = pieces(full, marks, lambda begin_s, end_s: (end_s - begin_s) / 2)
    assert [(one.seconds, one.ready, one.issues, one.waits) for one in found] == [
        (0.5, ((0, 0),), (), ()),
        (1.0, ((0, 1),), (UNIT,), ()),
        (0.5, (), (), ()),
        (0.0, (), (), ((UNIT, 0.25),)),
        (0.5, (), (), ()),
    ]


def test_marks_beyond_the_iteration_are_at_its_edges() -> None:
    full = [Stretch(begin_s=1.0, end_s=2.0, activity=Activity.COMPUTE, phase=Phase.BACKWARD)]
    marks = Marks(ready=[(0.5, (0, 0)), (2.5, (0, 1))], issued=[], seen={})
    found = pieces(full, marks, lambda begin_s, end_s: end_s - begin_s)
    assert [(one.seconds, one.ready) for one in found] == [(0.0, ((0, 0),)), (1.0, ((0, 1),))]
