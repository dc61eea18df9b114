"""What is made of torch.profiler's events: lanes without overlaps, and phases."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sirtaki.analysis.operators import (
    BACKWARD,
    LOADER,
    ZEROING,
    ClockMap,
    Event,
    Seen,
    Step,
    StepOperators,
    operators_of,
)
from sirtaki.autotune.model.replayer import Phase

TRAINS, ENGINE = 1, 7
CLOCK = ClockMap(origin_ns=0, origin_s=0.0, error_s=0.0)


def event(name: str, begin_s: float, end_s: float, *, thread: int = TRAINS, **more: object) -> Event:
    return Event(name, thread, begin_s, end_s, **more)  # type: ignore[arg-type]


def named(name: str, begin_s: float, end_s: float) -> Event:
    return event(name, begin_s, end_s, annotation=True)


STEP = Step(begin_s=0.0, end_s=10.0, updates=((8.0, 9.0),), cuts=())

USUAL = [
    named(LOADER + "_next", 0.5, 1.0),
    event("aten::stack", 0.6, 0.9),
    named(ZEROING + "SGD", 1.1, 1.2),
    event("aten::zero_", 1.15, 1.18),
    event("aten::linear", 2.0, 3.0, sequence=5),
    event("aten::addmm", 2.1, 2.9, sequence=6),
    event("aten::sum", 3.0, 3.5, sequence=7),
    event(BACKWARD + "SumBackward0", 4.0, 4.5, sequence=7),
    event("SumBackward0", 4.1, 4.4, sequence=7),
    event(BACKWARD + "torch::autograd::AccumulateGrad", 4.5, 6.0),
    event("aten::copy_", 7.0, 7.1),
    event("aten::add_", 8.2, 8.3),
]


def only(events: list[Event], step: Step = STEP) -> StepOperators:
    (found,), _ = operators_of(Seen(events=events, thread=TRAINS, clock=CLOCK), [step])
    return found


def test_operators_that_others_have_called_are_left_out_and_phases_are_told_by_pytorchs_names() -> None:
    assert [(one.name, one.phase) for one in only(USUAL).operators] == [
        ("aten::stack", Phase.DATA),
        ("aten::zero_", Phase.OTHER),
        ("aten::linear", Phase.FORWARD),
        ("aten::sum", Phase.FORWARD),
        ("SumBackward0", Phase.BACKWARD),
        ("AccumulateGrad", Phase.BACKWARD),
        ("aten::copy_", Phase.OTHER),
        ("aten::add_", Phase.UPDATE),
    ]


def test_phases_last_from_their_first_operator_to_their_last() -> None:
    assert [(span.phase, span.begin_s, span.end_s) for span in only(USUAL).spans] == [
        (Phase.DATA, 0.5, 1.0),
        (Phase.FORWARD, 2.0, 3.5),
        (Phase.BACKWARD, 4.0, 6.0),
        (Phase.UPDATE, 8.0, 9.0),
    ]


def test_passes_that_are_accumulated_are_several_spans() -> None:
    again = [event("aten::linear", 6.2, 6.5, sequence=9), event(BACKWARD + "AddmmBackward0", 6.6, 6.9, sequence=9)]
    assert [span.phase for span in only([*USUAL, *again]).spans].count(Phase.BACKWARD) == 2


def test_what_comes_before_the_data_is_not_forward() -> None:
    metric = event("aten::mul_", 0.1, 0.2, sequence=5)  # the number of the node that is made next
    operators = only([metric, *USUAL]).operators
    assert operators[0].phase is Phase.OTHER
    assert next(one for one in operators if one.name == "aten::linear").phase is Phase.FORWARD


def test_data_that_is_fetched_between_the_passes_leaves_the_forward_pass_before_it() -> None:
    late = [one for one in USUAL if LOADER not in one.name and one.name != "aten::stack"]
    fetched = [named(LOADER + "_next", 3.6, 3.8), event("aten::stack", 3.65, 3.7)]
    phases = {one.name: one.phase for one in only([*late, *fetched]).operators}
    assert phases["aten::linear"] is Phase.FORWARD
    assert phases["aten::stack"] is Phase.DATA


def test_an_operator_is_cut_around_copies() -> None:
    step = Step(begin_s=0.0, end_s=10.0, updates=(), cuts=((4.6, 4.7), (5.0, 5.5), (5.9, 7.0)))
    pieces = [(one.begin_s, one.end_s) for one in only(USUAL, step).operators if one.name == "AccumulateGrad"]
    assert pieces == [(4.5, 4.6), (4.7, 5.0), (5.5, 5.9)]


def test_an_operator_belongs_to_the_step_in_which_it_begins() -> None:
    steps = [Step(begin_s=0.0, end_s=4.2, updates=(), cuts=()), Step(begin_s=4.2, end_s=10.0, updates=(), cuts=())]
    found, _ = operators_of(Seen(events=USUAL, thread=TRAINS, clock=CLOCK), steps)
    assert [one.name for one in found[1].operators] == ["AccumulateGrad", "aten::copy_", "aten::add_"]


def test_threads_and_streams_are_lanes_and_kernels_have_the_phase_of_who_launched_them() -> None:
    events = [
        *USUAL,
        event(BACKWARD + "MulBackward0", 5.0, 5.2, thread=ENGINE, sequence=3),
        event("cudaLaunchKernel", 2.2, 2.3, launch=42),
        event("gemm", 2.5, 6.5, thread=20, on_device=True, launch=42),
        event("memset", 6.6, 6.7, thread=20, on_device=True, launch=43),
    ]
    found, lanes = operators_of(Seen(events=events, thread=TRAINS, clock=CLOCK), [STEP])
    assert lanes == ("training thread", "thread 7", "stream 20 of the device")
    by_name = {one.name: one for one in found[0].operators}
    assert (by_name["MulBackward0"].lane, by_name["MulBackward0"].phase) == (1, Phase.BACKWARD)
    assert (by_name["gemm"].lane, by_name["gemm"].phase) == (2, Phase.FORWARD)
    assert by_name["memset"].phase is Phase.OTHER
    assert "cudaLaunchKernel" not in by_name  # aten::linear has called it


MOMENTS = st.floats(0.01, 9.9, allow_nan=False)


@given(
    spans=st.lists(st.tuples(MOMENTS, MOMENTS).map(sorted), max_size=20),
    cuts=st.lists(MOMENTS, max_size=8).map(sorted),
)
def test_no_lane_ever_overlaps(spans: list[list[float]], cuts: list[float]) -> None:
    nested = [event(f"op{number}", begin_s, end_s) for number, (begin_s, end_s) in enumerate(spans)]
    step = Step(begin_s=0.0, end_s=10.0, updates=(), cuts=tuple(zip(cuts[::2], cuts[1::2], strict=False)))
    operators = only(nested, step).operators
    assert all(before.end_s <= after.begin_s for before, after in pairwise(operators))
    for one in operators:
        assert one.begin_s < one.end_s
        assert all(one.end_s <= begin_s or end_s <= one.begin_s for begin_s, end_s in step.cuts)


def test_an_operator_is_of_the_module_that_it_is_said_to_be_of() -> None:
    seen = Seen(events=USUAL, thread=TRAINS, clock=CLOCK)
    (found,), _ = operators_of(seen, [STEP], lambda event: event.sequence)
    assert [one.module for one in found.operators] == [one.sequence for one in found.operators]
