"""Units leave in one order, or in one on each stream, each when all its gradients are there."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fakes.gradients import make_buffers, parameters, plan_of

from sirtaki.comm.gradients.buffers import FlatBuffers
from sirtaki.comm.gradients.schedule import (
    DISORDERLY_ITERATIONS,
    PATIENCE_ITERATIONS,
    IterationPace,
    LaunchSchedule,
    OrderProfiling,
    ScheduledUnit,
    agree_on_order,
    reorder_units,
    schedule,
)


def units_of(
    shapes: Sequence[tuple[int, ...]], *bounds: int, order: list[int] | None = None, streams: int = 1
) -> list[ScheduledUnit]:
    buffers = make_buffers(parameters(*shapes), order)
    (group,) = buffers.groups
    return schedule([group], [plan_of(group.layout.numel, *bounds, streams=streams)], buffers.position)


def test_a_unit_waits_for_every_gradient_of_which_it_has_elements() -> None:
    units = units_of([(4,), (6,), (2,)], 3, 5, 11)
    assert [unit.members for unit in units] == [(0,), (0, 1), (1, 2), (2,)]


def test_members_are_named_by_parameter_though_the_buffer_has_another_order() -> None:
    units = units_of([(4,), (6,), (2,)], 7, order=[2, 1, 0])
    assert [unit.members for unit in units] == [(2, 1), (1, 0)]


def test_the_unit_with_the_flags_leaves_last_and_waits_for_parameters_without_elements() -> None:
    units = units_of([(0,), (3,), (0,)], 2)
    assert units[-1].stop == 5
    assert set(units[-1].members) == {0, 1, 2}


def test_units_of_two_dtypes_are_merged_by_the_readiness_of_their_last_gradient() -> None:
    dtypes = torch.float32, torch.float32, torch.float64, torch.float32
    buffers = make_buffers([parameters((4,), dtype=dtype)[0] for dtype in dtypes])
    plans = [plan_of(group.layout.numel, 4, 8) for group in buffers.groups]
    assert [unit.members for unit in schedule(buffers.groups, plans, buffers.position)] == [(0,), (1,), (2,), (3,)]


def test_parameters_are_together_that_share_all_their_units() -> None:
    units = units_of([(4,), (4,), (4,)], 6)
    plan = LaunchSchedule(units, range(3), held=lambda unit: False)
    assert plan.reduced_with(0) == [0]
    assert plan.reduced_with(2) == [2]
    assert plan.reduced_with(1) == [0, 1, 2]  # it lies in both


ITEM_BYTES = 4


def order_of(
    units: list[ScheduledUnit], needed: list[float], ready_s: list[float], *, s_per_element: float
) -> list[int]:
    """First elements of the units, in the order in which they leave; the last one is held."""
    pace = IterationPace(
        needed=needed, ready_s=ready_s, backward_s=ready_s[-1] + 0.5, s_per_byte=s_per_element / ITEM_BYTES
    )
    return [unit.start for unit in reorder_units(units, pace, held=lambda unit: unit is units[-1])]


FORWARD = [3.0, 2.0, 1.0, 0.0]  # the last gradient is that of the first layer
COMES_S = [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("s_per_element", "starts"),
    [
        (0.01, [0, 4, 8, 12]),  # each is reduced before the next one comes
        (0.6, [0, 8, 12, 4]),  # while the first is under way two come, of which the second is needed first
        (5.0, [0, 12, 8, 4]),  # all come meanwhile
    ],
)
def test_of_ready_units_the_stream_takes_the_one_that_forward_reads_first(
    s_per_element: float, starts: list[int]
) -> None:
    units = units_of([(4,), (4,), (4,), (4,)], 4, 8, 12)
    assert order_of(units, FORWARD, COMES_S, s_per_element=s_per_element) == starts


def test_a_unit_is_as_urgent_as_the_first_of_its_parameters() -> None:
    units = units_of([(4,), (4,), (4,), (4,), (4,)], 4, 12)
    come_s = [0.0, 1.0, 1.0, 1.0, 1.0]
    assert order_of(units, [9.0, 0.0, 9.0, 5.0, 6.0], come_s, s_per_element=9.0) == [0, 4, 12]
    assert order_of(units, [9.0, 9.0, 7.0, 5.0, 6.0], come_s, s_per_element=9.0) == [0, 12, 4]


def test_streams_share_the_network_and_take_the_next_unit() -> None:
    units = units_of([(8,), (4,), (4,), (4,)], 8, 12, 16, streams=2)
    pace = IterationPace(needed=FORWARD, ready_s=[0.0] * 4, backward_s=0.0, s_per_byte=1.0)
    played = reorder_units(units, pace, held=lambda unit: False)
    assert [(unit.start, unit.stream) for unit in played] == [(16, 0), (12, 1), (8, 1), (0, 0)]


@pytest.mark.parametrize("seed", range(30))
def test_in_every_order_of_readiness_each_unit_is_launched_once_on_its_kind_of_stream(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(rng.randrange(0, 9),) for _ in range(rng.randrange(1, 9))]
    numel = sum(shape[0] for shape in shapes) + 2
    units = units_of(shapes, *sorted(rng.sample(range(1, numel), min(numel - 1, rng.randrange(0, 6)))), streams=3)
    for unit in units:
        unit.threads = rng.choice([None, 512])
    kinds = {(unit.threads, unit.stream) for unit in units}
    ready_s = [rng.random() for _ in shapes]
    pace = IterationPace(
        needed=[rng.random() for _ in shapes], ready_s=ready_s, backward_s=1.0, s_per_byte=rng.choice([0.0, 0.1, 9.0])
    )
    played = reorder_units(units, pace, held=lambda unit: unit is units[-1])
    assert sorted(unit.start for unit in played) == sorted(unit.start for unit in units)
    assert {(unit.threads, unit.stream) for unit in played} <= kinds


class SumOf:
    """A control plane whose peers have sent their positions already."""

    def __init__(self, *others: list[int]) -> None:
        self._others = others

    def total(self, places: np.ndarray) -> np.ndarray:
        return places + sum((np.argsort(order) for order in self._others), np.zeros(len(places)))


def test_no_rank_rules_the_order() -> None:
    ranks = ([0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 3, 1])
    found = [
        agree_on_order(own, SumOf(*(other for other in ranks if other is not own)), counts=True)  # type: ignore[arg-type]
        for own in ranks
    ]
    assert found[0] == found[1] == found[2] == [0, 2, 1, 3]


def test_a_rank_without_gradients_does_not_affect_the_order() -> None:
    assert agree_on_order([0, 1, 2], SumOf([2, 1, 0]), counts=False) == [2, 1, 0]  # type: ignore[arg-type]


def settled(n_params: int = 40) -> tuple[OrderProfiling, FlatBuffers]:
    """Return the profiling of `n_params` parameters' order after iterations 0 and 1."""
    profiling = OrderProfiling()
    assert [profiling.ends_with(iteration) for iteration in (0, 1)] == [False, True]
    assert not profiling.active
    return profiling, make_buffers(parameters(*[(1,)] * n_params))


def test_an_order_that_changed_for_good_is_profiled_again_but_not_chased() -> None:
    profiling, buffers = settled()
    asked = []
    for iteration in range(2, 2000):
        profiling.watch(iteration, list(range(40))[::-1], buffers)
        if profiling.asks:
            asked.append(iteration)
            profiling.begin(iteration + 1)
            assert not profiling.ends_with(iteration + 1)
            assert profiling.ends_with(iteration + 2)
    assert asked[0] == max(1 + DISORDERLY_ITERATIONS, 2 * PATIENCE_ITERATIONS + 3)
    assert len(asked) <= 2000 // (2 * PATIENCE_ITERATIONS) + 1


def test_a_few_gradients_out_of_place_and_single_iterations_are_nothing() -> None:
    profiling, buffers = settled()
    neighbours, backwards = [index ^ 1 for index in range(40)], list(range(40))[::-1]
    for iteration in range(500, 560):
        profiling.watch(iteration, backwards if iteration % 3 == 0 else neighbours, buffers)
        assert not profiling.asks


def test_an_order_is_profiled_on_request_or_if_a_gradient_does_not_fit_its_place() -> None:
    profiling, buffers = settled(3)
    profiling.watch(2, [0, 1, 2], buffers)
    assert not profiling.asks
    profiling.requested = True
    profiling.watch(3, [0, 1, 2], buffers)
    assert profiling.asks
    profiling.begin(5)
    assert profiling.active
    assert not profiling.asks
    assert not profiling.requested
    assert [profiling.ends_with(iteration) for iteration in (5, 6)] == [False, True]
    buffers.outdated = True
    profiling.watch(7, [0, 1, 2], buffers)
    assert profiling.asks
