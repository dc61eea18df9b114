"""Flat buffers and the plans that fit them, what moves along when they are replaced, and what a refusal leaves."""

import pytest
import torch
from fakes.gradients import LonelyRouter, come, make_planned, parameters, plan_of

from sirtaki.comm.gradients.buffers import FLAG_COUNT, Said
from sirtaki.comm.gradients.schedule import IterationPace, Schedule, ScheduledUnit
from sirtaki.comm.plan import CommPlan
from sirtaki.errors import PlanError, TransportError


def all_come(schedule: Schedule) -> list[ScheduledUnit]:
    """All gradients come, one after the other; what leaves then."""
    return [unit for index in range(len(schedule.units_of)) for unit in come(schedule, index)]


def test_the_first_buffer_ends_with_the_flags_and_every_layout_has_its_default_plan() -> None:
    params = [*parameters((3,)), *parameters((2,), dtype=torch.float64)]
    router = LonelyRouter()
    planned = make_planned(params, 2, router=router)
    assert [plan.numel for plan in planned.plans] == [3 + FLAG_COUNT, 2]
    assert router.opened == list(planned.plans)
    assert planned.buffers.flags.numel() == FLAG_COUNT
    assert not planned.usage.wanted
    assert [(unit.start, unit.stop) for unit in planned.schedule.units] == [(0, 2), (0, 2), (2, 3 + FLAG_COUNT)]


def test_where_unused_gradients_stay_none_each_parameter_has_a_flag_and_the_unit_with_them_leaves_last() -> None:
    params = parameters((3,), (2,))
    planned = make_planned(params, 4, 5 + FLAG_COUNT, unused_as_none=True)
    assert planned.plans[0].numel == 5 + FLAG_COUNT + 2
    assert planned.usage.wanted
    planned.flags.write(Said(reprofile=True))
    planned.usage.write([1])
    assert planned.buffers.flags[0] == 1.0
    assert planned.buffers.flags[FLAG_COUNT:].tolist() == [0.0, 1.0]
    schedule = planned.schedule
    left = all_come(schedule)
    assert [(unit.start, unit.stop) for unit in left] == [(0, 4)]  # the next holds control flags, and is held back
    assert [unit.stop for unit in schedule.take_all()] == [5 + FLAG_COUNT, 5 + FLAG_COUNT + 2]


def test_without_them_nothing_is_held_back() -> None:
    params = parameters((3,), (2,))
    schedule = make_planned(params, 4).schedule
    assert [unit.stop for unit in all_come(schedule)] == [4, 5 + FLAG_COUNT]


def test_gradients_in_the_buffers_that_are_replaced_move_along_and_others_stay_where_they_are() -> None:
    params = parameters((2,), (3,), (1,))
    before = make_planned(params)
    params[0].grad, params[1].grad = before.buffers.view(0), before.buffers.view(1)
    params[0].grad.copy_(torch.tensor([5.0, 6.0]))
    params[1].grad.copy_(torch.tensor([1.0, 2.0, 3.0]))
    own = params[2].grad
    after = make_planned(params, order=[2, 1, 0], before=before)
    assert params[0].grad is after.buffers.view(0)
    assert params[2].grad is own
    assert after.buffers.groups[0].buffer.tensor[1:6].tolist() == [1, 2, 3, 5, 6]


def test_the_device_is_done_before_new_buffers_are_made() -> None:
    log: list[str] = []
    router = LonelyRouter()
    router.device.synchronise = lambda: log.append("synchronised")  # type: ignore[method-assign]
    allocate = router.allocate
    router.allocate = lambda *args: log.append("allocated") or allocate(*args)  # type: ignore[assignment, func-returns-value, method-assign]
    make_planned(parameters((2,)), router=router)
    assert log == ["synchronised", "allocated"]


def test_new_plans_take_effect_together_with_their_schedule() -> None:
    router = LonelyRouter()
    planned = make_planned(parameters((6,)), router=router)
    numel = 6 + FLAG_COUNT
    planned.install([plan_of(numel, 2, 4, streams=3)])
    assert [unit.stream for unit in planned.schedule.units] == [0, 1, 2]
    assert planned.plans == (plan_of(numel, 2, 4, streams=3),)
    assert router.opened[-1] == planned.plans[0]


@pytest.mark.parametrize(
    ("plans", "what"),
    [
        ([], "0 plans for 1 layouts"),
        ([plan_of(6 + FLAG_COUNT)] * 2, "2 plans for 1 layouts"),
        ([plan_of(6)], f"a plan of 6 elements for a layout of {6 + FLAG_COUNT}"),
    ],
)
def test_plans_that_do_not_fit_are_refused_and_the_old_ones_stay(plans: list[CommPlan], what: str) -> None:
    router = LonelyRouter()
    planned = make_planned(parameters((6,)), 3, router=router)
    before, schedule = planned.plans, planned.schedule
    with pytest.raises(PlanError, match=what):
        planned.install(plans)
    assert (planned.plans, planned.schedule) == (before, schedule)
    assert len(router.opened) == 1


def test_streams_that_cannot_be_opened_leave_the_old_plans() -> None:
    router = LonelyRouter()
    planned = make_planned(parameters((6,)), 3, router=router)
    before, schedule = planned.plans, planned.schedule

    def fail(plan: CommPlan) -> None:
        raise TransportError("no descriptors")

    router.open_plan = fail  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="no descriptors"):
        planned.install([plan_of(6 + FLAG_COUNT, 1)])
    assert (planned.plans, planned.schedule) == (before, schedule)


def test_units_that_overtake_leave_with_the_flags_once_all_is_known_until_there_is_another_plan() -> None:
    planned = make_planned(parameters((4,), (4,)))
    numel = 8 + FLAG_COUNT
    planned.install([plan_of(numel, 4)])
    usual = [unit.start for unit in planned.schedule.units]
    planned.overtake(IterationPace(needed=[1.0, 0.0], ready_s=[0.0, 1.0], backward_s=1.0, s_per_byte=1.0))
    flags = next(unit for unit in planned.schedule.units if unit.stop == numel)
    assert flags not in all_come(planned.schedule)
    assert flags in list(planned.schedule.take_all())
    planned.install([plan_of(numel, 4)])
    assert [unit.start for unit in planned.schedule.units] == usual
