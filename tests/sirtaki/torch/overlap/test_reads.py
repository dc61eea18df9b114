"""Reads that pass Python by are seen by the dispatcher, and those of modules of one's own are waited for."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from sirtaki.errors import StaleReadError
from sirtaki.torch import overlap as awaited
from sirtaki.torch.overlap import CheckedReads, LearnedReads, hold_their_own, wait_for_own


def traced(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, torch.ones(1, 3))


def test_what_python_reads_is_learned_in_order_and_is_covered() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = list(module.parameters())
    learning = LearnedReads(params[::-1])
    assert learning.begin()
    module(torch.ones(1, 3))
    learning.end()
    assert [id(param) for param in learning.order] == [id(param) for param in params]
    assert learning.uncovered == set()
    assert learning.modules[0] is module
    assert not _get_current_dispatch_mode_stack()
    assert not any(map(awaited.is_held, params))


def test_what_torchscript_functorch_and_aliases_read_is_not_covered() -> None:
    script, plain, functional = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    alias, run = plain.weight.data, traced(script)
    params = [*script.parameters(), *plain.parameters(), *functional.parameters()]
    learning = LearnedReads(params)
    assert learning.begin()
    run(torch.ones(1, 3))
    alias.sum()
    torch.func.grad(lambda weight: (weight * 2).sum())(functional.weight)
    plain(torch.ones(1, 3))
    learning.end()
    assert learning.uncovered == {id(param) for param in (*script.parameters(), plain.weight, functional.weight)}


def test_a_stale_read_is_an_error_that_names_parameter_and_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.alias = [self.inner.weight.data]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs @ self.alias[0]

    class Waits:
        def arrive(self, tensor: torch.Tensor) -> None:
            awaited.let_go(tensor)

        def settle(self) -> None:
            raise AssertionError

    net = Net()
    params = list(net.parameters())
    checking = CheckedReads(params, {id(params[0]): "inner.weight"})
    awaited.hold(params, Waits())
    checking.begin()
    with pytest.raises(StaleReadError, match=r"reads inner\.weight in Net before its update"):
        net(torch.ones(1, 3))
    assert net.inner(torch.ones(1, 3)).shape == (1, 3)  # by Python, which has waited
    net(torch.ones(1, 3))
    checking.end()
    checking.end()
    assert not _get_current_dispatch_mode_stack()
    for param in params:
        awaited.let_go(param)


def test_modes_of_the_script_go_on_whatever_begins_and_ends_within() -> None:
    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    learning = LearnedReads([nn.Parameter(torch.ones(1))])
    assert learning.begin()
    with Counts() as counts:  # entered before, left after the end
        learning.end()
        torch.ones(1).add(1)
        assert counts.seen
        assert not LearnedReads([nn.Parameter(torch.ones(1))]).begin()
    assert not _get_current_dispatch_mode_stack()


def test_modules_of_ones_own_wait_for_what_they_hold() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(1)), nn.Linear(3, 3)
            self.more = nn.ParameterList([torch.ones(1)])

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs

    class Notes:
        def __init__(self) -> None:
            self.arrived: list[torch.Tensor] = []

        def arrive(self, tensor: torch.Tensor) -> None:
            awaited.let_go(tensor)
            self.arrived.append(tensor)

        def settle(self) -> None:
            raise AssertionError

    own = Own()
    outer = nn.Sequential(own, nn.Linear(3, 3))
    params = list(outer.parameters())
    assert hold_their_own([outer], params)
    assert not hold_their_own([outer], list(own.inner.parameters()))
    notes = Notes()
    handle = register_module_forward_pre_hook(wait_for_own)
    awaited.hold(params, notes)
    own(torch.ones(1, 3))
    handle.remove()
    assert [id(param) for param in notes.arrived] == [id(own.scale), id(own.more[0])]
    for param in params:
        awaited.let_go(param)
