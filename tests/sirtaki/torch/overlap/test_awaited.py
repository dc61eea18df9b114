"""Whatever Python does with a parameter that is held waits for it first, and nothing else does."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sirtaki.torch import overlap as awaited


class Notes:
    """Lets go of what is waited for, and notes it."""

    def __init__(self) -> None:
        self.arrived: list[torch.Tensor] = []

    def arrive(self, tensor: torch.Tensor) -> None:
        awaited.let_go(tensor)
        self.arrived.append(tensor)

    def settle(self) -> None:
        raise AssertionError


def held(module: nn.Module) -> tuple[Notes, list[nn.Parameter]]:
    notes, params = Notes(), list(module.parameters())
    awaited.hold(params, notes)
    return notes, params


@pytest.mark.parametrize(
    ("module", "use"),
    [
        (nn.Linear(3, 4), lambda m: m(torch.ones(1, 3))),
        (nn.Embedding(5, 3), lambda m: F.linear(torch.ones(1, 3), m.weight)),
        (nn.LSTM(3, 4, 2), lambda m: m(torch.ones(2, 1, 3))),
        (nn.GRUCell(3, 4), lambda m: m(torch.ones(1, 3))),
        (nn.MultiheadAttention(4, 2), lambda m: m(*[torch.ones(2, 1, 4)] * 3)),
        (nn.BatchNorm1d(3), lambda m: m(torch.ones(2, 3))),
        (nn.Conv2d(1, 2, 2), lambda m: m(torch.ones(1, 1, 3, 3))),
        (nn.Linear(3, 4), lambda m: m.state_dict()),
        (nn.Linear(3, 4), lambda m: torch.save(m, io.BytesIO())),
        (nn.Linear(3, 4), lambda m: torch._foreach_norm(list(m.parameters()))),
        (nn.Linear(3, 4), lambda m: [p.grad for p in m.parameters()]),
        (nn.Linear(3, 4), lambda m: [p.data for p in m.parameters()]),
        (nn.Linear(3, 4), lambda m: m.requires_grad_(False)),
        (nn.Linear(3, 4), lambda m: m.half()),
        (nn.Linear(3, 4), lambda m: nn.utils.parameters_to_vector(m.parameters())),
        (nn.Linear(3, 4), lambda m: [nn.init.zeros_(p) for p in m.parameters()]),
        (nn.Linear(3, 4), lambda m: torch.func.functional_call(m, dict(m.named_parameters()), torch.ones(1, 3))),
        (nn.Linear(3, 4), lambda m: [repr(p) for p in m.parameters()]),
    ],
)
def test_every_parameter_that_is_used_is_waited_for_once(module: nn.Module, use: Callable[[Any], object]) -> None:
    notes, params = held(module)
    use(module)
    assert {id(param) for param in notes.arrived} >= {id(param) for param in params}
    assert len(notes.arrived) == len(params)
    assert all(type(param) is nn.Parameter for param in params)


def test_what_says_nothing_of_values_does_not_wait() -> None:
    notes, (weight, bias) = held(nn.Linear(3, 4))
    assert (weight.shape, weight.dtype, weight.device.type, weight.numel(), bias.dim()) == (
        torch.Size([4, 3]),
        torch.float32,
        "cpu",
        12,
        1,
    )
    assert weight.requires_grad
    assert isinstance(weight, nn.Parameter)
    assert {weight: 1}[weight] == 1
    assert notes.arrived == []
    for param in (weight, bias):
        awaited.let_go(param)
        awaited.let_go(param)


def test_copies_and_pickles_are_plain() -> None:
    for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        module = nn.Linear(3, 4)
        notes, params = held(module)
        twin = copied(module)
        assert [type(param) for param in twin.parameters()] == [nn.Parameter, nn.Parameter]
        assert len(notes.arrived) == len(params)


def test_leaves_that_are_no_parameters_are_held_too_and_subclasses_cannot_be() -> None:
    class Own(nn.Parameter):
        pass

    leaf, notes = torch.ones(2, requires_grad=True), Notes()
    assert awaited.can_be_held(leaf)
    assert not awaited.can_be_held(Own(torch.ones(2)))
    awaited.hold([leaf], notes)
    assert awaited.is_held(leaf)
    assert (leaf + 1).tolist() == [2, 2]
    assert type(leaf) is torch.Tensor


def test_all_can_be_settled_at_once() -> None:
    class Settles(Notes):
        settled = 0

        def settle(self) -> None:
            self.settled += 1

    notes, params = Settles(), [nn.Parameter(torch.ones(1)) for _ in range(3)]
    awaited.hold(params, notes)
    awaited.settle_all()
    assert notes.settled == 1
    for param in params:
        awaited.let_go(param)
    awaited.settle_all()
    assert notes.settled == 1
