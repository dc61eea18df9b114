"""Units that are put off leave as an iteration that is played has them leave."""

import random

import pytest
from fakes.gradients import make_buffers, parameters, plan_of

from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit, overtaking, schedule

ITEM_BYTES = 4


def units_of(shapes: list[tuple[int, ...]], *bounds: int, streams: int = 1) -> list[ScheduledUnit]:
    buffers = make_buffers(parameters(*shapes), None)
    (group,) = buffers.groups
    units = schedule([group], [plan_of(group.layout.numel, *bounds)], buffers.position)
    for number, unit in enumerate(units):
        unit.stream = number % streams
    return units


def order_of(
    units: list[ScheduledUnit], needed: list[float], ready_s: list[float], *, s_per_element: float
) -> list[int]:
    """First elements of the units, in the order in which they leave; the last one is held."""
    pace = IterationPace(
        needed=needed, ready_s=ready_s, backward_s=ready_s[-1] + 0.5, s_per_byte=s_per_element / ITEM_BYTES
    )
    return [unit.start for unit in overtaking(units, pace, held=lambda unit: unit is units[-1])]


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
def test_of_what_has_come_the_stream_takes_what_forward_reads_first(s_per_element: float, starts: list[int]) -> None:
    units = units_of([(4,), (4,), (4,), (4,)], 4, 8, 12)
    assert order_of(units, FORWARD, COMES_S, s_per_element=s_per_element) == starts


def test_a_unit_is_as_urgent_as_the_first_of_its_parameters() -> None:
    units = units_of([(4,), (4,), (4,), (4,), (4,)], 4, 12)
    come_s = [0.0, 1.0, 1.0, 1.0, 1.0]
    assert order_of(units, [9.0, 0.0, 9.0, 5.0, 6.0], come_s, s_per_element=9.0) == [0, 4, 12]
    assert order_of(units, [9.0, 9.0, 7.0, 5.0, 6.0], come_s, s_per_element=9.0) == [0, 12, 4]


def test_streams_share_the_network_and_take_whatever_is_next() -> None:
    units = units_of([(8,), (4,), (4,), (4,)], 8, 12, 16, streams=2)
    pace = IterationPace(needed=FORWARD, ready_s=[0.0] * 4, backward_s=0.0, s_per_byte=1.0)
    played = overtaking(units, pace, held=lambda unit: False)
    assert [(unit.start, unit.stream) for unit in played] == [(16, 0), (12, 1), (8, 1), (0, 0)]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_whenever_every_unit_leaves_once_on_a_stream_of_its_kind(seed: int) -> None:
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
    played = overtaking(units, pace, held=lambda unit: unit is units[-1])
    assert sorted(unit.start for unit in played) == sorted(unit.start for unit in units)
    assert {(unit.threads, unit.stream) for unit in played} <= kinds
