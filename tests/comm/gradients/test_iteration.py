"""What one iteration submits, and when it is over."""

import pytest
import torch
from fakes.gradients import LonelyRouter, make_planned, parameters

from sirtaki.comm.device import HostDevice
from sirtaki.comm.gradients.buffers import Arrivals, Reduction
from sirtaki.comm.gradients.iteration import Iteration, IterationTrace
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.errors import CommError


class Launching(HostDevice):
    """Notes what goes through `launch`, as all that touches tensors must on a device with streams."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def launch(self, function, *args):
        self.launched.append(function.__name__)
        function(*args)


class Made:
    """An iteration of two gradients, all of which have come, in units of two elements."""

    def __init__(self, reduction: Reduction | None = None, *, traced: bool = False) -> None:
        self.params = parameters((3,), (1,))
        self.device = Launching()
        self.router = LonelyRouter(self.device)
        self.planned = make_planned(self.params, 2, 4, router=self.router)
        self.trace = IterationTrace(None, self.device) if traced else None  # type: ignore[arg-type]
        self.arrivals = Arrivals(self.params, self.planned.buffers)
        self.iteration = Iteration(
            self.arrivals,
            router=self.router,  # type: ignore[arg-type]
            reduction=reduction or Reduction(),
            trace=self.trace,
            ready_events=[],
        )
        for index, param in enumerate(self.params):
            self.arrivals.add(index, param.grad, param.grad._version)  # type: ignore[arg-type, union-attr]

    @property
    def values(self) -> list[float]:
        return self.planned.buffers.groups[0].buffer.tensor[:4].tolist()  # type: ignore[no-any-return]


def test_a_new_iteration_has_nothing_and_its_first_gradient_is_a_moment() -> None:
    now = Made().iteration
    assert (now.works, now.first_ready, now.backward_ended, now.reduced) == ([], None, None, None)
    assert [now.joined, now.flushed, now.complete] == [False] * 3
    now.note_first()
    assert isinstance(now.first_ready, float)


def test_a_unit_goes_to_the_router_as_it_is_planned_and_its_work_is_kept() -> None:
    made = Made(Reduction(op=ReduceOp.MAX, postscale=0.5))
    made.iteration.copy_in()
    first, second, *_ = made.planned.schedule.units
    second.threads, second.stream = 512, 3
    made.iteration.issue(second)
    made.iteration.issue(first)
    route = first.route
    assert made.router.reduced == [
        (2, 4, {"route": route, "stream": 3, "threads": 512, "op": ReduceOp.MAX, "scale": 0.5}),
        (0, 2, {"route": route, "stream": 0, "threads": None, "op": ReduceOp.MAX, "scale": 0.5}),
    ]
    assert len(made.iteration.works) == 2


def test_a_prescale_multiplies_the_unit_and_nothing_else_on_the_device() -> None:
    made = Made(Reduction(prescale=3.0))
    made.iteration.copy_in()
    made.device.launched.clear()
    made.iteration.issue(made.planned.schedule.units[1])
    assert made.values == [0.0, 1.0, 6.0, 300.0]
    assert made.device.launched == ["scale_"]


def test_without_a_prescale_nothing_is_launched() -> None:
    made = Made()
    made.iteration.copy_in()
    made.device.launched.clear()
    made.iteration.issue(made.planned.schedule.units[0])
    assert made.device.launched == []
    assert made.values == [0.0, 1.0, 2.0, 100.0]


def test_a_trace_hears_of_copies_that_copied_something_and_of_every_unit() -> None:
    made = Made(traced=True)
    assert made.trace is not None
    made.iteration.copy_in()
    made.iteration.copy_in()  # nothing new
    assert [count for _, _, count in made.trace.copies] == [2]
    begin, end, _ = made.trace.copies[0]
    assert begin <= end
    unit = made.planned.schedule.units[1]
    made.iteration.issue(unit)
    (issued,) = made.trace.units
    assert (issued.start, issued.stop, issued.stream) == (2, 4, 0)
    assert issued.route == unit.route
    assert issued.work is made.iteration.works[0]
    assert end <= issued.issued


def test_a_wait_ends_with_the_works_unless_it_is_interrupted_or_a_reduction_fails() -> None:
    made = Made()
    made.iteration.copy_in()
    made.iteration.issue(made.planned.schedule.units[0])
    assert made.iteration.wait(None)
    assert not made.iteration.wait(lambda: True)

    class Fails:
        def wait(self, timeout_s: float) -> bool:
            raise CommError("rank 1 has ended")

    made.iteration.works.append(Fails())  # type: ignore[arg-type]
    with pytest.raises(CommError, match="rank 1"):
        made.iteration.wait(None)


def test_works_are_waited_for_in_the_order_in_which_they_left() -> None:
    made, waited = Made(), list[int]()
    for number in range(3):
        made.iteration.works.append(type("W", (), {"wait": lambda self, s, number=number: not waited.append(number)})())
    assert made.iteration.wait(None)
    assert waited == [0, 1, 2]


def test_only_what_came_is_copied_though_the_buffer_is_larger() -> None:
    made = Made()
    made.arrivals.indices.pop()
    made.arrivals.gradients.pop()
    made.arrivals.versions.pop()
    made.iteration.copy_in()
    assert made.values == [0.0, 1.0, 2.0, 99.0]
    assert torch.equal(made.params[1].grad, torch.tensor([100.0]))  # type: ignore[arg-type]
