from dataclasses import replace

import pytest
from fakes import recordings

from sirtaki.analysis.operators import BACKWARD, ClockMap, Event, Seen
from sirtaki.analysis.recorder import Draft, buffer_number, model_digest, operators_of_drafts, recorded
from sirtaki.autotune.model.replayer import Phase
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.recorder import CopySpan, ReadyMoment, TracedIteration, TracedOperation, TracedUnit

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


def traced(number: int = 3) -> TracedIteration:
    unit = TracedUnit(
        layout_number=1,
        layout=recordings.LAYOUT,
        start=0,
        stop=100,
        stream=2,
        route=ROUTE,
        issued_s=1.4,
        began_s=None,
        done_s=1.8,
    )
    return TracedIteration(
        source=None,
        number=number,
        profiling=False,
        first_ready_s=1.2,
        backward_ended_s=1.5,
        end_s=1.9,
        ready=(ReadyMoment(1, 0, 1.3), ReadyMoment(0, 2, 1.2)),
        copies=(CopySpan(1.35, 1.36, 2),),
        units=(unit,),
    )


def draft() -> Draft:
    made = Draft(1.0, traced=[((0, 2), traced())], updates=[(1.9, 2.0)], number=12, end_s=2.0)
    made.operations.append(
        TracedOperation(name="loss", kind="ALLREDUCE", submitted_s=1.95, agreed_s=1.96, done_s=1.97, n_bytes=4)
    )
    return made


def test_a_step_without_operators_has_what_gradients_tell() -> None:
    one = recorded(draft(), None)
    assert (one.number, one.begin_s, one.end_s, one.profiling) == (12, 1.0, 2.0, False)
    assert [(span.phase, span.begin_s, span.end_s) for span in one.spans] == [
        (Phase.BACKWARD, 1.2, 1.5),
        (Phase.UPDATE, 1.9, 2.0),
    ]
    assert abs(one.exposed_s - 0.4) < 1e-9
    assert one.collectives[0].name == "loss"
    assert one.copies[0].n_gradients == 2


def test_units_and_gradients_name_their_buffer_among_all_of_the_job() -> None:
    one = recorded(draft(), None)
    assert one.units[0].unit.buffer == buffer_number((0, 2), 1)
    assert one.units[0].unit.iteration == 3
    assert [(ready.buffer, ready.index) for ready in one.ready] == [
        (buffer_number((0, 2), 0), 2),
        (buffer_number((0, 2), 1), 0),
    ]


def test_no_operator_is_where_gradients_are_copied_or_waited_for() -> None:
    step = draft().step
    assert step.cuts == ((1.35, 1.36), (1.5, 1.9))
    assert step.updates == ((1.9, 2.0),)


def test_numbers_of_buffers_are_different_and_the_first_one_is_zero() -> None:
    numbers = [buffer_number((p, s), n) for p in range(3) for s in range(3) for n in range(3)]
    assert numbers[0] == 0
    assert len(set(numbers)) == 27


def test_ranks_that_train_something_else_have_another_digest() -> None:
    (common,) = recordings.job().buffers
    other = replace(common, layout=common.layout.reordered([1, 0, 2]))
    assert model_digest([common]) != model_digest([other])


def test_a_step_that_nobody_saw_has_the_operators_of_one_that_was_seen() -> None:
    lender, borrower = draft(), draft()
    lender.slowed = True
    borrower.begin_s = 0.0  # its forward pass took six times as long as that of the lender
    backward = Event(f"{BACKWARD}AddmmBackward0", 1, 1.15, 1.45)
    seen = Seen(
        events=[Event("aten::linear", 1, 1.02, 1.12), backward],
        thread=1,
        clock=ClockMap(origin_ns=0, origin_s=0.0, error_s=1e-6),
    )
    (own, lent), lanes = operators_of_drafts([lender, borrower], seen)
    assert lanes == ("training thread",)
    assert own is not None
    assert lent is not None
    names = [one.name for one in own.operators]
    assert names == [one.name for one in lent.operators] == ["aten::linear", *["AddmmBackward0"] * 2]  # a copy cuts it
    assert (own.operators[0].begin_s, own.operators[0].end_s) == (1.02, 1.12)
    assert (lent.operators[0].begin_s, lent.operators[0].end_s) == pytest.approx((0.12, 0.72))
    assert [span.phase for span in lent.spans] == [span.phase for span in own.spans]
    assert operators_of_drafts([lender, borrower], None) == ([None, None], ())
    assert not recorded(borrower, lent).slowed
