"""When units leave: in their order and not too early, whatever the order of the gradients and whoever computes them."""

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.gradients import LonelyRouter, make_planned, parameters

from sirtaki.comm.device import HostDevice
from sirtaki.comm.gradients.buffers import FLAG_COUNT, Arrivals, Reduction
from sirtaki.comm.gradients.iteration import (
    Interrupted,
    Issuing,
    Iteration,
    NegotiatedIssuing,
    OneAtATime,
    RecordedIssuing,
    ScheduledIssuing,
    StreamIssuing,
    issuing_of,
)


class Streams(HostDevice):
    """A device with streams, of which it notes what is asked."""

    streams = True

    def __init__(self) -> None:
        self.noticed = self.events = 0

    def notice_stream(self) -> None:
        self.noticed += 1

    def record_event(self) -> int:
        self.events += 1
        return self.events


class Negotiation:
    """Agrees on what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.ended = self.begun = 0
        self.agree: Callable[[list[int]], None] = lambda positions: None
        self.is_over = True

    def begin(self, sizes_bytes: np.ndarray, *, granularity_bytes: int, on_agreed: Callable[[list[int]], None]) -> None:
        self.begun += 1
        self.sizes_bytes, self.granularity_bytes, self.agree = sizes_bytes.tolist(), granularity_bytes, on_agreed

    def set_ready(self, position: int) -> None:
        self.ready.append(position)

    def end(self) -> None:
        self.ended += 1

    def wait(self, interrupted: Interrupted | None) -> bool:
        return self.is_over


class Made:
    """An iteration of parameters of these sizes, and the strategy to try."""

    def __init__(
        self,
        *sizes: int,
        cuts: tuple[int, ...] = (),
        order: list[int] | None = None,
        device: HostDevice | None = None,
        unused_as_none: bool = False,
        streams: int = 1,
        dtypes: tuple[torch.dtype, ...] = (),
    ) -> None:
        each = dtypes or (torch.float32,) * len(sizes)
        self.params = [parameters((size,), dtype=dtype)[0] for size, dtype in zip(sizes, each, strict=True)]
        self.router = LonelyRouter(device)
        self.planned = make_planned(
            self.params, *cuts, router=self.router, order=order, unused_as_none=unused_as_none, streams=streams
        )
        self.iteration = Iteration(
            Arrivals(self.params, self.planned.buffers),
            router=self.router,  # type: ignore[arg-type]
            reduction=Reduction(),
            trace=None,
            ready_events=[None] * len(sizes),
        )
        self.negotiation = Negotiation()

    def negotiated(self, *, flags_need_flush: bool = False) -> NegotiatedIssuing:
        return NegotiatedIssuing(
            self.iteration,
            self.negotiation,  # type: ignore[arg-type]
            self.planned.buffers,
            self.planned.plans,
            flags_need_flush=flags_need_flush,
        )

    def come(self, strategy: Issuing, *indices: int) -> None:
        for index in indices:
            gradient = self.params[index].grad
            assert gradient is not None
            strategy.ready(index, gradient, gradient._version)

    @property
    def left(self) -> list[tuple[int, int]]:
        """Elements of the units that have left, in order."""
        return [(start, stop) for start, stop, _ in self.router.reduced]


def test_units_leave_once_their_gradients_and_all_units_before_them_are_complete() -> None:
    made = Made(2, 3, 1, cuts=(2, 5))
    strategy = ScheduledIssuing(made.iteration, made.planned.schedule)
    made.come(strategy, 1)
    assert made.left == []  # complete, but not its turn
    assert made.iteration.first_ready is not None
    first = made.iteration.first_ready
    made.come(strategy, 0)
    assert made.left == [(0, 2), (2, 5)]
    assert made.planned.buffers.groups[0].buffer.tensor[:6].tolist() == [0, 1, 0, 1, 2, 99]
    made.come(strategy, 2)
    assert made.left == [(0, 2), (2, 5), (5, 6 + FLAG_COUNT)]
    assert made.iteration.first_ready == first
    strategy.flush()
    assert len(made.left) == 3
    assert strategy.wait(None)


def test_gradients_are_copied_in_together_when_their_unit_leaves() -> None:
    made = Made(1, 1, 1, 1, cuts=(1,))
    strategy = ScheduledIssuing(made.iteration, made.planned.schedule)
    made.come(strategy, 0, 1, 3)
    assert made.planned.buffers.groups[0].buffer.tensor[:4].tolist() == [0, 99, 99, 99]
    made.come(strategy, 2)
    assert len(made.left) == 2


@pytest.mark.parametrize("seed", range(30))
def test_in_any_order_of_arrival_every_element_is_copied_in_before_it_leaves_and_leaves_once(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(0, 7) for _ in range(rng.randrange(1, 9))]
    order = rng.sample(range(len(sizes)), len(sizes))
    cuts = sorted(rng.sample(range(1, 40), rng.randrange(0, 5)))
    made = Made(*sizes, cuts=tuple(cuts), order=order)
    buffer = made.planned.buffers.groups[0].buffer.tensor
    wanted = torch.cat([made.params[index].grad for index in order])  # type: ignore[misc]
    reduce = made.router.all_reduce

    def all_reduce(flat: Any, start: int, stop: int, **how: Any) -> Any:
        end = min(stop, len(wanted))  # flags are behind
        assert torch.equal(buffer[start:end], wanted[start:end])
        return reduce(flat, start, stop, **how)

    made.router.all_reduce = all_reduce  # type: ignore[method-assign]
    strategy = ScheduledIssuing(made.iteration, made.planned.schedule)
    arrival = rng.sample(range(len(sizes)), len(sizes))
    for index in arrival[: rng.randrange(len(sizes) + 1)]:
        made.come(strategy, index)
    for index in arrival[len(made.iteration.arrivals.indices) :]:
        made.iteration.arrivals.put_in(index)
    strategy.flush()
    assert [unit.start for unit in made.planned.schedule.units] == [start for start, _ in made.left]
    assert made.left[-1][1] == len(wanted) + FLAG_COUNT
    assert sum(stop - start for start, stop in made.left) == len(wanted) + FLAG_COUNT


def test_what_has_not_come_leaves_with_the_flush() -> None:
    made = Made(2, 3, cuts=(2,))
    strategy = ScheduledIssuing(made.iteration, made.planned.schedule)
    made.come(strategy, 1)
    made.iteration.arrivals.put_in(0)
    strategy.flush()
    assert made.left == [(0, 2), (2, 5 + FLAG_COUNT)]
    assert not strategy.deferred


def test_with_streams_units_leave_from_the_hook_and_every_hook_notices_its_stream() -> None:
    device = Streams()
    made = Made(2, 3, cuts=(2,), device=device)
    strategy = StreamIssuing(made.iteration, made.planned.schedule, device, profiling=False)
    assert not strategy.deferred
    made.come(strategy, 0)
    assert made.left == [(0, 2)]
    made.come(strategy, 1)
    assert device.noticed == 2
    assert len(made.left) == 2
    assert made.iteration.ready_events == [None, None]


def test_while_the_order_is_profiled_with_streams_everything_leaves_at_the_end() -> None:
    device = Streams()
    made = Made(2, 3, cuts=(2,), device=device)
    strategy = StreamIssuing(made.iteration, made.planned.schedule, device, profiling=True)
    assert strategy.deferred
    made.come(strategy, 1, 0)
    assert made.left == []
    assert made.iteration.first_ready == 1
    assert made.iteration.ready_events == [3, 2]
    strategy.flush()
    assert made.left == [(0, 2), (2, 5 + FLAG_COUNT)]


def test_where_several_share_a_device_everything_leaves_at_the_end_though_one_of_them_goes_meanwhile() -> None:
    device = Streams()
    device.users = 2
    made = Made(2, 3, cuts=(2,), device=device)
    strategy = StreamIssuing(made.iteration, made.planned.schedule, device, profiling=False)
    made.come(strategy, 0)
    assert strategy.deferred
    device.users = 1
    made.come(strategy, 1)
    assert strategy.deferred
    assert made.left == []
    assert made.iteration.first_ready is not None
    assert made.iteration.ready_events == [None, None]
    strategy.flush()
    assert len(made.left) == 2


def test_hooks_of_several_threads_come_one_at_a_time() -> None:
    inside, most = 0, 0

    class Slow:
        deferred = True

        def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            event.wait(0.005)
            inside -= 1

        def flush(self) -> None:
            pass

        def wait(self, interrupted: Interrupted | None) -> bool:
            return False

    event = threading.Event()
    strategy = OneAtATime(Slow())
    threads = [threading.Thread(target=strategy.ready, args=[0, torch.ones(1), 0]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert strategy.deferred
    assert not strategy.wait(None)


def test_what_all_ranks_have_leaves_with_its_neighbours_and_the_flags_at_last() -> None:
    made = Made(2, 3, 1, 4, order=[3, 1, 0, 2])
    strategy = made.negotiated()
    made.come(strategy, 0, 2)
    assert made.negotiation.begun == 1
    assert made.negotiation.ready == [2, 3]  # positions in the layout
    assert made.negotiation.sizes_bytes == [16, 12, 8, 4]
    assert made.left == []
    made.negotiation.agree([2, 3])
    assert made.left == [(7, 10)]
    made.come(strategy, 1, 3)
    made.negotiation.agree([0])
    made.negotiation.agree([1])
    assert made.left == [(7, 10), (0, 4), (4, 7), (10, 10 + FLAG_COUNT)]
    assert None not in made.iteration.ready_events
    strategy.flush()
    assert (made.negotiation.begun, made.negotiation.ended) == (1, 1)


def test_neighbours_join_up_to_the_largest_unit_of_the_plan_and_what_is_larger_is_cut() -> None:
    made = Made(2, 2, 7, 2, cuts=(5, 9, 13, 16))  # the largest unit has 5 elements
    strategy = made.negotiated()
    made.come(strategy, 0, 1, 2, 3)
    assert made.negotiation.granularity_bytes == 5 * 4
    made.negotiation.agree([0, 1, 2, 3])
    # The flags, at the end, go as they are.
    assert made.left == [(0, 4), (4, 9), (9, 11), (11, 13), (13, 13 + FLAG_COUNT)]


def test_units_take_the_streams_that_the_plan_uses_in_turn() -> None:
    made = Made(1, 1, 1, cuts=(1, 2), streams=3)
    plan = made.planned.plans[0]
    assert {unit.stream for unit in plan.units} == {0, 1, 2}
    strategy = made.negotiated()
    made.come(strategy, 0, 1, 2)
    for position in (0, 1, 2):
        made.negotiation.agree([position])
    assert [how["stream"] for _, _, how in made.router.reduced] == [0, 1, 2, 0]


def test_gradients_without_elements_are_agreed_on_and_send_nothing() -> None:
    made = Made(0, 2, 0)
    strategy = made.negotiated()
    made.come(strategy, 0, 2)
    made.negotiation.agree([0, 2])
    assert made.left == []
    made.come(strategy, 1)
    made.negotiation.agree([1])
    assert made.left == [(0, 2), (2, 2 + FLAG_COUNT)]


def test_each_dtype_leaves_in_its_own_buffer_and_the_flags_in_the_first() -> None:
    made = Made(2, 3, 2, dtypes=(torch.float32, torch.float64, torch.float32))
    first, second = made.planned.buffers.groups
    strategy = made.negotiated()
    made.come(strategy, 0, 1, 2)
    assert made.negotiation.sizes_bytes == [8, 24, 8]
    made.negotiation.agree([0, 1, 2])
    assert made.left == [(0, 4), (0, 3), (4, 4 + FLAG_COUNT)]
    assert first.buffer.tensor[:4].tolist() == [0, 1, 0, 1]
    assert second.buffer.tensor.tolist() == [0, 1, 2]


def test_flags_that_are_complete_at_the_end_only_have_a_bit_of_their_own() -> None:
    made = Made(2, 1, unused_as_none=True)
    strategy = made.negotiated(flags_need_flush=True)
    made.come(strategy, 0, 1)
    assert made.negotiation.sizes_bytes == [8, 4, 0]
    made.negotiation.agree([0, 1])
    assert made.left == [(0, 3)]
    strategy.flush()
    made.negotiation.agree([2])
    assert made.left == [(0, 3), (3, 3 + FLAG_COUNT + 2)]


def test_a_rank_of_which_nothing_came_takes_part_from_the_flush_on() -> None:
    made = Made(2)
    strategy = made.negotiated()
    made.iteration.arrivals.put_in(0)
    strategy.flush()
    assert (made.negotiation.begun, made.negotiation.ended) == (1, 1)
    assert made.planned.buffers.groups[0].buffer.tensor[:2].tolist() == [0, 1]


def test_a_wait_is_over_when_the_negotiation_and_the_reductions_are() -> None:
    made = Made(2)
    strategy = made.negotiated()
    made.negotiation.is_over = False
    assert not strategy.wait(None)
    made.negotiation.is_over = True
    assert strategy.wait(None)
    assert not strategy.wait(lambda: True)


@pytest.mark.parametrize(
    ("negotiates", "profiling", "kind"),
    [
        (True, True, NegotiatedIssuing),
        (True, False, ScheduledIssuing),
        (False, True, StreamIssuing),
        (False, False, StreamIssuing),
    ],
)
def test_the_strategy_follows_from_the_iteration(negotiates: bool, profiling: bool, kind: type[Issuing]) -> None:
    made = Made(2, device=None if negotiates else Streams())
    negotiation: Any = made.negotiation if negotiates else None
    found = issuing_of(made.iteration, made.planned, negotiation, profiling=profiling, several_devices=False)
    assert type(found) is kind
    assert found.deferred == (profiling and not negotiates)
    several = issuing_of(made.iteration, made.planned, negotiation, profiling=profiling, several_devices=True)
    assert type(several) is OneAtATime
    assert type(several._strategy) is kind


def test_where_somebody_records_it_is_noted_when_each_gradient_comes() -> None:
    made = Made(3, 4)
    came: list[int] = []
    trace: Any = SimpleNamespace(recorder=object(), came=came.append)
    made.iteration.trace = trace
    found = issuing_of(made.iteration, made.planned, None, profiling=False, several_devices=False)
    assert isinstance(found, RecordedIssuing)
    assert found.deferred is False
    made.iteration.trace = None  # units are not what this is about
    for index in (1, 0):
        gradient = made.params[index].grad
        assert gradient is not None
        found.ready(index, gradient, gradient._version)
    assert came == [1, 0]
    assert made.iteration.arrivals.indices == [1, 0]
