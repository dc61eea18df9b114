"""Units leave in one order, or in one on each stream, each when all its gradients are there."""

import random
from dataclasses import replace

import pytest
import torch
from fakes.gradients import come, make_buffers, parameters, plan_of

from sirtaki.comm.gradients.schedule import Schedule, ScheduledUnit, schedule


def units_of(shapes: list[tuple[int, ...]], *bounds: int, order: list[int] | None = None) -> list[ScheduledUnit]:
    buffers = make_buffers(parameters(*shapes), order)
    (group,) = buffers.groups
    return schedule([group], [plan_of(group.layout.numel, *bounds)], buffers.position)


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


def test_units_of_two_dtypes_are_merged_by_when_their_last_gradient_comes() -> None:
    params = [parameters((4,), dtype=dtype)[0] for dtype in (torch.float32, torch.float64, torch.float32)]
    buffers = make_buffers(params, [0, 1, 2])
    plans = [plan_of(group.layout.numel, *([4] if group.layout.numel > 4 else [])) for group in buffers.groups]
    assert [unit.members for unit in schedule(buffers.groups, plans, buffers.position)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("one_order", [True, False])
@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_order_of_arrival_units_leave_in_theirs_and_never_too_early(seed: int, one_order: bool) -> None:
    rng = random.Random(seed)
    shapes = [(rng.randrange(0, 6),) for _ in range(rng.randrange(1, 9))]
    numel = sum(shape[0] for shape in shapes) + 2
    bounds = sorted(rng.sample(range(1, numel), min(numel - 1, rng.randrange(0, 5))))
    units = [replace(unit, stream=rng.randrange(3)) for unit in units_of(shapes, *bounds)]
    plan = Schedule(units, len(shapes), held=lambda unit: not one_order and unit.stop > numel - 2, one_order=one_order)
    for _ in range(2):  # iterations
        plan.begin()
        left: list[ScheduledUnit] = []
        arrived: set[int] = set()
        for index in rng.sample(range(len(shapes)), len(shapes)):
            arrived.add(index)
            left += come(plan, index)
            assert all(set(unit.members) <= arrived for unit in left)
            for lane in {None if one_order else unit.stream for unit in units}:
                behind = [unit for unit in units if lane in (None, unit.stream) and unit not in left]
                assert (
                    not behind
                    or not set(behind[0].members) <= arrived
                    or (not one_order and behind[0].stop > numel - 2)
                ), "a unit that is complete has not left"
        if one_order:
            assert left == units
        left += plan.take_all()
        assert [units[number] for number in plan.left] == left
        assert sorted(plan.left) == list(range(len(units)))
        for stream in range(3):
            own = [unit for unit in units if unit.stream == stream]
            assert [unit for unit in left if unit.stream == stream] == own


def test_held_units_leave_with_the_rest() -> None:
    units = units_of([(4,), (6,)], 4)
    plan = Schedule(units, 2, held=lambda unit: unit is units[1])
    assert come(plan, 0) + come(plan, 1) == units[:1]
    assert list(plan.take_all()) == units[1:]
    assert list(plan.take_all()) == []


def test_a_unit_whose_gradients_are_late_holds_up_its_own_stream_only_where_streams_need_no_one_order() -> None:
    units = [
        replace(unit, stream=number % 2) for number, unit in enumerate(units_of([(4,), (4,), (4,), (4,)], 4, 8, 12))
    ]
    for one_order, left in ((True, [[], [], [], [0, 1, 2, 3]]), (False, [[1], [], [3], [0, 2]])):
        plan = Schedule(units, 4, held=lambda unit: False, one_order=one_order)
        assert [[units.index(unit) for unit in come(plan, index)] for index in (1, 2, 3, 0)] == left


def test_parameters_are_together_that_share_all_their_units() -> None:
    units = units_of([(4,), (4,), (4,)], 6)
    plan = Schedule(units, 3, held=lambda unit: False)
    assert plan.together(0) == [0]
    assert plan.together(2) == [2]
    assert plan.together(1) == [0, 1, 2]  # it lies in both
