"""Layouts and plans: validity and equality."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, NcclWay, TransportKind, Unit, UnitClass
from sirtaki.errors import PlanError


@st.composite
def plans(draw: st.DrawFn) -> CommPlan:
    streams = draw(st.integers(1, 8))
    stops = sorted(draw(st.sets(st.integers(1, 10_000), max_size=12)))
    units = tuple(
        Unit(
            start=start,
            stop=stop,
            stream=draw(st.integers(0, streams - 1)),
            threads=draw(st.none() | st.integers(1, 4096)),
            algorithm=draw(st.sampled_from(Algorithm)),
            compressor=draw(st.sampled_from(["", "int8"])),
            nccl=draw(st.none() | st.sampled_from(NcclWay)),
        )
        for start, stop in zip([0, *stops], stops, strict=False)
    )
    numel = stops[-1] if stops else 0
    return CommPlan(numel=numel, units=units, streams=streams, transport=draw(st.sampled_from(TransportKind)))


def plan(*bounds: tuple[int, int], numel: int = 10, streams: int = 1, stream: int = 0) -> CommPlan:
    units = tuple(Unit(start=start, stop=stop, stream=stream) for start, stop in bounds)
    return CommPlan(numel=numel, units=units, streams=streams, transport=TransportKind.GLOO)


@given(plan=plans())
def test_every_element_is_in_exactly_one_unit(plan: CommPlan) -> None:
    assert [element for unit in plan.units for element in range(unit.start, unit.stop)] == list(range(plan.numel))
    assert sum(unit.numel for unit in plan.units) == plan.numel


@given(plan=plans())
def test_a_plan_survives_json_with_its_fingerprint(plan: CommPlan) -> None:
    again = CommPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()


@given(first=plans(), second=plans())
def test_fingerprints_are_equal_exactly_if_plans_are(first: CommPlan, second: CommPlan) -> None:
    assert (first == second) == (first.fingerprint() == second.fingerprint())


@given(drawn=plans(), data=st.data())
def test_a_change_to_any_unit_changes_the_fingerprint(drawn: CommPlan, data: st.DataObject) -> None:
    if not drawn.units:
        return
    index = data.draw(st.integers(0, len(drawn.units) - 1))
    changed = replace(drawn.units[index], threads=(drawn.units[index].threads or 0) + 1)
    units = (*drawn.units[:index], changed, *drawn.units[index + 1 :])
    assert replace(drawn, units=units).fingerprint() != drawn.fingerprint()


@pytest.mark.parametrize(
    "bounds",
    [
        ((0, 4), (3, 10)),  # overlap
        ((0, 4), (5, 10)),  # gap
        ((0, 4), (4, 4), (4, 10)),  # empty unit
        ((4, 10), (0, 4)),  # out of order
        ((1, 10),),  # starts late
        ((0, 9),),  # ends early
        ((0, 11),),  # ends late
        (),  # nothing at all
    ],
)
def test_units_that_do_not_cover_each_element_once_are_refused(bounds: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError):
        plan(*bounds)


@pytest.mark.parametrize("stream", [-1, 2, 7])
def test_a_stream_that_does_not_exist_is_refused(stream: int) -> None:
    with pytest.raises(PlanError, match=f"stream={stream}"):
        plan((0, 10), streams=2, stream=stream)


def test_a_plan_needs_a_stream() -> None:
    with pytest.raises(PlanError, match="streams: expected at least 1"):
        plan(numel=0, streams=0)


def test_a_unit_needs_a_thread_if_it_names_threads() -> None:
    with pytest.raises(PlanError, match=r"threads >= 1, found .*threads=0"):
        CommPlan(numel=1, units=(Unit(start=0, stop=1, threads=0),), streams=1, transport=TransportKind.NCCL)


@given(plan=plans())
def test_on_the_fewest_streams_the_same_units_share_streams(plan: CommPlan) -> None:
    fewest = plan.on_fewest_streams()
    used = {unit.stream for unit in fewest.units}
    assert used == set(range(len(used)))
    assert fewest.streams == max(1, len(used))
    pairs = {(before.stream, after.stream) for before, after in zip(plan.units, fewest.units, strict=True)}
    assert len(pairs) == len(used)
    assert [replace(unit, stream=0) for unit in fewest.units] == [replace(unit, stream=0) for unit in plan.units]
    assert fewest.on_fewest_streams() == fewest


def test_one_unit_is_the_same_on_however_many_streams() -> None:
    assert len({plan((0, 10), streams=n, stream=n - 1).on_fewest_streams() for n in (1, 2, 24)}) == 1


sizes = st.lists(st.integers(0, 10**9), max_size=30).map(tuple)


@given(sizes=sizes, itemsize_bytes=st.sampled_from([1, 2, 4, 8]))
def test_gradients_are_contiguous(sizes: tuple[int, ...], itemsize_bytes: int) -> None:
    layout = GradientLayout(sizes=sizes, itemsize_bytes=itemsize_bytes)
    assert layout.offsets[0] == 0
    assert tuple(stop - start for start, stop in pairwise(layout.offsets)) == sizes
    assert layout.numel == sum(sizes)
    assert layout.total_bytes == layout.numel * itemsize_bytes


@given(sizes=sizes, data=st.data())
def test_reordering_moves_sizes_and_names_together_and_can_be_undone(
    sizes: tuple[int, ...], data: st.DataObject
) -> None:
    names = tuple(f"p{i}" for i in range(len(sizes)))
    layout = GradientLayout(sizes=sizes, names=names, dtype="float16", itemsize_bytes=2, device="cuda")
    order = data.draw(st.permutations(range(len(sizes))))
    moved = layout.reordered(order)
    assert moved.sizes == tuple(sizes[i] for i in order)
    assert moved.names == tuple(names[i] for i in order)
    back = [order.index(i) for i in range(len(sizes))]
    assert moved.reordered(back) == layout


@pytest.mark.parametrize("order", [(), (0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 2)])
def test_an_order_must_name_each_gradient_once(order: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="expected each of 0 … 2 once"):
        GradientLayout(sizes=(1, 2, 3)).reordered(order)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(PlanError, match="sizes: expected at least 0"):
        GradientLayout(sizes=(3, -1))
    with pytest.raises(PlanError, match="itemsize_bytes"):
        GradientLayout(sizes=(3,), itemsize_bytes=0)
    with pytest.raises(PlanError, match="expected 2 names, one for each gradient, found 1"):
        GradientLayout(sizes=(1, 2), names=("a",))


def test_a_range_is_described_by_the_names_of_its_gradients() -> None:
    layout = GradientLayout(sizes=(10, 0, 5, 3), names=("a", "b", "c", "d"))
    assert layout.describe(0, 4) == "a"
    assert layout.describe(0, 18) == "a … d (4)"
    assert layout.describe(10, 15) == "c"
    assert layout.describe(12, 16) == "c … d (2)"


def test_a_unit_is_of_the_class_of_most_of_its_elements() -> None:
    layout = GradientLayout(
        sizes=(100, 20_000, 200, 50_000), names=("bias", "weight", "norm", "table"), embeddings=("table",)
    )
    classes = {(0, 150): "small", (0, 500): "large", (20_000, 20_300): "small", (15_000, 70_300): "embeddings"}
    assert {span: layout.class_of(*span).value for span in classes} == classes
    assert layout.reordered([3, 2, 1, 0]).class_of(0, 50_000) is UnitClass.EMBEDDINGS
    assert replace(layout, embeddings=()).class_of(21_000, 70_300) is UnitClass.LARGE
