"""Tensors are fused, parted and split, and what comes out covers every element once."""

from __future__ import annotations

from dataclasses import replace

from fakes.played_jobs import GLOO
from fakes.replays import SIZES, over_a_link
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.analysis.plan_search import Schedule, Tensor, place_of, units_of
from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.plan import GradientLayout

LAYOUT = GradientLayout(sizes=SIZES)
EVEN = Schedule(route=GLOO, streams=2, unit_bytes=4 * 2000)
WHOLE = replace(EVEN, tensors=(Tensor(stop=1000), Tensor(stop=4000), Tensor(stop=6500)))


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 4))
def test_units_cover_each_element_once_and_take_the_streams_in_turn(
    tensors: list[tuple[int, int]], streams: int
) -> None:
    stop, made = 0, []
    for size, parts in tensors:
        stop += size
        made.append(Tensor(stop=stop, parts=parts))
    schedule = replace(EVEN, streams=streams, tensors=tuple(made))
    plan = schedule.knobs(GradientLayout(sizes=(stop,))).to_plan(GradientLayout(sizes=(stop,)))  # checks them
    assert len(plan.units) == sum(min(size, parts) for size, parts in tensors)
    assert [unit.stream for unit in plan.units] == [number % streams for number in range(len(plan.units))]
    assert [end for _, end in units_of(made)] == [unit.stop for unit in plan.units]


def test_even_units_are_tensors_until_one_is_changed() -> None:
    assert EVEN.knobs(LAYOUT).cuts is None
    assert [tensor.stop for tensor in EVEN.tensors_of(LAYOUT)] == [2000, 4000, 6000, 6500]
    fused = EVEN.fused(LAYOUT, 2000)
    assert fused is not None
    assert [tensor.stop for tensor in fused.tensors_of(LAYOUT)] == [4000, 6000, 6500]
    assert [cut.stop for cut in fused.knobs(LAYOUT).cuts or ()] == [4000, 6000, 6500]


def test_what_does_not_fit_any_more_is_no_change() -> None:
    assert WHOLE.fused(LAYOUT, 6500) is None
    assert WHOLE.fused(LAYOUT, 2000) is None
    assert WHOLE.parted(LAYOUT, 2000, 2) is None
    assert WHOLE.parted(LAYOUT, 1000, 1) is None
    assert WHOLE.split(LAYOUT, 4000, 500) is None
    assert WHOLE.split(LAYOUT, 4000, 4000) is None


def test_splitting_undoes_fusing() -> None:
    fused = WHOLE.fused(LAYOUT, 1000)
    assert fused is not None
    assert fused.split(LAYOUT, 4000, 1000) == WHOLE
    parted = WHOLE.parted(LAYOUT, 4000, 3)
    assert parted is not None
    assert [end for _, end in units_of(parted.tensors or ())] == [1000, 2000, 3000, 4000, 6500]
    assert place_of(WHOLE.tensors or (), 4000) == 1


def test_what_was_recorded_is_taken_unit_by_unit_unless_it_is_even() -> None:
    (buffer,) = over_a_link().buffers
    assert [tensor.stop for tensor in Schedule.recorded(buffer).tensors or ()] == [1000, 4000, 6500]
    knobs = Knobs(unit_bytes=4000, streams=2, transport=GLOO[0])
    even = replace(buffer, knobs=knobs, plan=knobs.to_plan(buffer.layout))
    assert Schedule.recorded(even).tensors is None
    assert Schedule.recorded(even).knobs(buffer.layout) == knobs
    whole = replace(knobs, unit_bytes=2 * buffer.layout.total_bytes)  # one unit, smaller than its knobs say
    alone = replace(buffer, knobs=whole, plan=whole.to_plan(buffer.layout))
    assert Schedule.recorded(alone).knobs(buffer.layout) == replace(whole, streams=Schedule.recorded(alone).streams)
