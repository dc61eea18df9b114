"""What an iteration takes whose updates are put off, against sums by hand and a recurrence for one stream."""

import random

import pytest

from sirtaki.autotune.model.simulator import put_off_iteration_s
from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel


class Group:
    layout = GradientLayout(sizes=(1,), itemsize_bytes=1)


def unit(n_bytes: int, *members: int, stream: int = 0) -> ScheduledUnit:
    route = (TransportKind.GLOO, Algorithm.FLAT)
    return ScheduledUnit(Group(), 0, n_bytes, stream, route, members=members)  # type: ignore[arg-type]


def pace(*ready_s: float) -> IterationPace:
    return IterationPace(needed=[0.0] * len(ready_s), ready_s=ready_s, backward_s=ready_s[-1], s_per_byte=1.0)


LINK = LinkModel(alpha_s=0.0, throughput=(1.0,))


def test_what_is_reduced_at_once_takes_the_computation_alone() -> None:
    fast = LinkModel(alpha_s=0.0, throughput=(1e9,))
    taken_s = put_off_iteration_s([unit(4, 0), unit(4, 1)], [1.0, 2.0], pace(1.0, 2.0), forward_s=1.5, link=fast)
    assert taken_s == pytest.approx(3.5)


def test_one_unit_of_all_gradients_hides_nothing() -> None:
    taken_s = put_off_iteration_s([unit(4, 0, 1)], [2.0], pace(1.0, 2.0), forward_s=1.5, link=LINK)
    assert taken_s == pytest.approx(2.0 + 4.0 + 1.5)


@pytest.mark.parametrize(
    ("numbers", "seconds"),
    [
        # 1.5 s are sent behind 1 s of backward, and forward waits for what takes as long behind that.
        ([0, 1], 2.0 + 2.0 + 1.0),
        # Forward begins when the first layer has come; half of it later it waits for the second until both have.
        ([1, 0], 2.0 + 3.0 + 0.5),
    ],
)
def test_the_order_tells_what_is_waited_for(numbers: list[int], seconds: float) -> None:
    units, comes_s = [unit(3, 0), unit(3, 1)], [1.0, 2.0]
    taken_s = put_off_iteration_s(
        [units[number] for number in numbers],
        [comes_s[number] for number in numbers],
        pace(1.0, 2.0),
        forward_s=1.0,
        link=LinkModel(alpha_s=0.0, throughput=(2.0,)),
    )
    assert taken_s == pytest.approx(seconds)


def test_streams_share_what_the_link_carries_and_each_unit_costs_its_start() -> None:
    link = LinkModel(alpha_s=0.25, throughput=(1.0, 1.5))
    units = [unit(3, 0), unit(3, 0, stream=1)]
    taken_s = put_off_iteration_s(units, [1.0, 1.0], pace(1.0), forward_s=0.5, link=link)
    assert taken_s == pytest.approx(1.0 + 0.25 + 6 / 1.5 + 0.5)


def test_more_messages_than_a_host_gets_through_are_waited_for() -> None:
    link = LinkModel(alpha_s=0.0, throughput=(100.0,), host_s=2.0)
    taken_s = put_off_iteration_s([unit(1, 0), unit(1, 0, stream=1)], [1.0, 1.0], pace(1.0), forward_s=0.5, link=link)
    assert taken_s == pytest.approx(1.0 + 4.0 + 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_any_units_on_one_stream_take_what_a_recurrence_says(seed: int) -> None:
    rng = random.Random(seed)
    count, forward_s, alpha_s, rate = rng.randint(1, 9), rng.uniform(0.0, 3.0), rng.uniform(0.0, 0.3), rng.uniform(1, 9)
    ready_s = sorted(rng.uniform(0.0, 4.0) for _ in range(count))
    sizes = [rng.randint(1, 9) for _ in range(count)]
    order = rng.sample(range(count), count)
    taken_s = put_off_iteration_s(
        [unit(sizes[number], number) for number in order],
        [ready_s[number] for number in order],
        pace(*ready_s),
        forward_s=forward_s,
        link=LinkModel(alpha_s=alpha_s, throughput=(rate,)),
    )
    done_s, now_s, free_s, ends_s = [0.0] * count, 0.0, 0.0, []
    for _ in range(9):
        begun_s = 0.0
        for number in reversed(range(count)):  # as forward reads them
            read_s = forward_s * (1 - ready_s[number] / ready_s[-1])
            now_s = max(now_s + read_s - begun_s, done_s[number])
            begun_s = read_s
        now_s += forward_s - begun_s
        for number in order:
            free_s = max(free_s, now_s + ready_s[number]) + alpha_s + sizes[number] / rate
            done_s[number] = free_s
        now_s += ready_s[-1]
        ends_s.append(now_s)
    assert taken_s == pytest.approx((ends_s[4] - ends_s[2]) / 2)
