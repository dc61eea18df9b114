"""Every gradient is reduced once, whether it came or was put in, and `.grad` is the reduced one afterwards."""

from collections.abc import Sequence

import pytest
import torch
from fakes.gradients import LonelyRouter, make_planned, parameters

from sirtaki.comm.gradients.buffers import Arrivals, LostEdits, Reduction, Said
from sirtaki.comm.gradients.iteration import CurrentIteration, Interrupted, Iteration
from sirtaki.comm.gradients.schedule import OrderProfiling, PlannedBuffers

RANKS = 3


class AllAtOnce:
    """Reduces everything in the end: all ranks have the same gradients."""

    deferred = False

    def __init__(self, iteration: Iteration, planned: PlannedBuffers, interruptions: int) -> None:
        self._iteration, self._planned, self._interruptions = iteration, planned, interruptions
        self.flushed = 0

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        self._iteration.arrivals.add(index, gradient, version)

    def flush(self) -> None:
        self.flushed += 1
        self._iteration.copy_in()
        for group in self._planned.buffers.groups:
            group.buffer.tensor.mul_(RANKS)

    def wait(self, interrupted: Interrupted | None) -> bool:
        self._interruptions -= 1
        return self._interruptions < 0


class Made:
    """An iteration of these parameters, of which some gradients have come."""

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        came: Sequence[int],
        *,
        interruptions: int = 0,
        unused_as_none: bool = False,
    ) -> None:
        router = LonelyRouter()
        self.planned = make_planned(params, router=router, unused_as_none=unused_as_none)
        self.planned.flags.write(Said(complete=True))
        self.arrivals = Arrivals(params, self.planned.buffers)
        self.iteration = Iteration(
            self.arrivals,
            router=router,  # type: ignore[arg-type]
            reduction=Reduction(),
            trace=None,
            ready_events=[],
        )
        self.issuing = AllAtOnce(self.iteration, self.planned, interruptions)
        self.edits = LostEdits([f"p{index}" for index in range(len(params))])
        self.current = CurrentIteration(self.iteration, self.issuing, self.planned, OrderProfiling(), self.edits)
        for index in came:
            gradient = params[index].grad
            assert gradient is not None
            self.issuing.ready(index, gradient, gradient._version)


def grads(params: list[torch.nn.Parameter]) -> list[list[float] | None]:
    return [None if param.grad is None else param.grad.tolist() for param in params]


def test_all_that_has_come_is_reduced_and_handed_out() -> None:
    params = parameters((2,), (3,))
    expected = [(RANKS * param.grad).tolist() for param in params if param.grad is not None]
    made = Made(params, came=[1, 0])
    assert made.current.can_reduce
    assert made.current.reduce(None)
    assert grads(params) == expected
    assert not made.current.can_reduce  # it is done
    assert not made.edits.problem


def test_what_did_not_come_counts_as_it_is_or_as_zeros_and_a_frozen_parameter_is_left_alone() -> None:
    params = parameters((2,), (2,), (2,))
    params[1].grad = None
    params[2].requires_grad_(requires_grad=False)
    made = Made(params, came=[])
    assert not made.current.can_reduce  # more may come
    assert made.current.reduce(None)
    assert grads(params) == [[0.0, RANKS * 1.0], [0.0, 0.0], [200.0, 201.0]]


def test_what_no_rank_has_computed_stays_none_if_that_is_asked_for() -> None:
    params = parameters((2,), (2,))
    params[1].grad = None
    made = Made(params, came=[0], unused_as_none=True)
    assert made.current.reduce(None)
    assert grads(params) == [[0.0, RANKS * 1.0], None]


def test_an_interrupted_wait_goes_on_and_sends_nothing_twice() -> None:
    params = parameters((2,))
    made = Made(params, came=[0], interruptions=2)
    assert [made.current.reduce(None) for _ in range(3)] == [False, False, True]
    assert made.issuing.flushed == 1
    assert grads(params) == [[0.0, RANKS * 1.0]]


@pytest.mark.parametrize("came", [[0, 1], [0]])
def test_a_gradient_that_is_written_before_it_is_reduced_is_a_problem(came: list[int]) -> None:
    params = parameters((2,), (2,))
    made = Made(params, came=came)
    params[0].grad.mul_(2.0)  # type: ignore[union-attr]
    made.current.reduce(None)
    assert "the gradient of p0 was written" in made.edits.problem
