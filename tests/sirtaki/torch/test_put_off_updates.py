"""Deferred updates run when a parameter is needed, together with all updates of their unit, and never twice."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.comm.gradients.state import IterationState
from sirtaki.torch import overlap as awaited
from sirtaki.torch.overlap import PartialStep, PutOffUpdates, Zeroing


class Late:
    """Gradients in units of two parameters. An awaited unit is ready at once, and doubled."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self._params = params
        self.hooked = [(str(number), param) for number, param in enumerate(params)]
        self.log: list[Any] = []
        self.can_defer, self.needed_elsewhere, self.state = True, False, IterationState.COLLECTING
        self.written, self.pipeline = False, self

    def defer(self) -> None:
        self.log.append("step")
        self.state = IterationState.DEFERRED

    def wait_for(self, number: int) -> list[int]:
        self.log.append(number)
        first = number - number % 2
        if self.needed_elsewhere:
            self.state = IterationState.COLLECTING
        return [] if self.needed_elsewhere else [first, first + 1]

    def reduce(self) -> None:
        self.state = IterationState.REDUCED
        self.log.append("reduce")

    def assign_gradients(self, numbers: list[int]) -> None:
        for number in numbers:
            param = self._params[number]
            param.grad = torch.zeros(1) if param.grad is None else 2 * param.grad


class Made:
    def __init__(self) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
        self.optimizer = torch.optim.SGD(self.params, lr=1.0)
        self.late, self.finished, self.seen, self.allowed = Late(self.params), 0, 0, True
        gradients: Any = SimpleNamespace(reducers=[self.late], finish=self._finish)
        self.updates = PutOffUpdates(
            gradients,
            PartialStep(self.optimizer, torch.optim.SGD),
            allowed=lambda: self.allowed,
            seen=self._see,
            closed=lambda: None,
        )
        self.updates.use()
        for param in self.params:
            param.grad = torch.ones(1)

    def _finish(self) -> None:
        self.finished += 1
        self.late.state = IterationState.COLLECTING

    def _see(self) -> None:
        self.seen += 1

    @property
    def held(self) -> list[bool]:
        return [awaited.is_held(param) for param in self.params]

    def keep(self) -> bool:
        kept = self.updates.keep()
        self.late.state = IterationState.LAUNCHED if kept else IterationState.COLLECTING
        return kept

    def backward_and_step(self) -> None:
        assert self.keep()
        assert self.updates.step()


@pytest.fixture
def made() -> Any:
    made = Made()
    yield made
    made.updates.drop()


def test_where_this_rank_is_needed_elsewhere_results_equal_those_without_deferral(made: Made) -> None:
    made.late.needed_elsewhere = True
    assert made.keep()
    gradient = made.params[0].grad
    assert gradient is not None
    assert gradient.item() == 1.0
    assert made.late.log == [0]
    assert made.held == [False] * 4
    assert made.updates.state is IterationState.COLLECTING


def test_gradients_zeroed_meanwhile_are_zeroed_after_the_update(made: Made) -> None:
    made.backward_and_step()
    made.params[2].detach()
    assert made.updates.zero(made.params[0], Zeroing.NONE)
    assert made.updates.zero(made.params[1], Zeroing.ZEROS)
    assert not made.updates.zero(made.params[2], Zeroing.NONE)
    made.updates.drain()
    assert made.finished == 1
    assert made.params[0].grad is None
    assert made.params[1].grad is not None
    assert made.params[1].grad.item() == 0.0
    assert [param.item() for param in made.params] == [-2.0] * 4


def test_a_gradient_of_another_pass_is_added_to_the_reduced_one(made: Made) -> None:
    made.backward_and_step()
    with torch._C.DisableTorchFunctionSubclass():  # as autograd does it
        assert made.params[0].grad is None
        made.params[0].grad = torch.full((1,), 5.0)
    made.updates.drain()
    assert made.params[0].item() == -2.0
    assert made.params[0].grad is not None
    assert made.params[0].grad.item() == 7.0


def test_parameters_read_outside_of_python_are_updated_by_step(made: Made) -> None:
    made.updates.uncovered = frozenset([id(made.params[1])])
    made.backward_and_step()
    assert made.held == [False, False, True, True]


def test_parameters_with_external_memory_are_updated_by_step(made: Made) -> None:
    alias = made.params[1].data
    made.backward_and_step()
    assert made.held == [False, False, True, True]
    assert alias.item() == -2.0


def test_a_graph_from_before_the_step_detects_the_changed_parameter(made: Made) -> None:
    loss = (made.params[0] * made.params[0]).sum()
    made.backward_and_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_with_missing_gradients_is_deferred_too(made: Made) -> None:
    assert made.updates.step()
    assert made.held == [True] * 4
    made.allowed = False
    made.updates.drain()
    assert not made.updates.step()
    assert not made.keep()


def test_where_the_ranks_have_exited_parameters_stay_unchanged(made: Made) -> None:
    made.backward_and_step()
    made.updates.drop()
    assert made.held == [False] * 4
    assert [param.item() for param in made.params] == [0.0] * 4
