"""A step made in parts is the step that was asked for."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from sirtaki.torch.overlap import PartialStep


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def optimizer_of(kind: type[torch.optim.Optimizer], module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": list(module[0].parameters()), "lr": 0.1}, {"params": list(module[1].parameters()), "lr": 0.2}]  # type: ignore[index]
    return kind(groups, **options)


def put_gradients(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for param in module.parameters():
        param.grad = torch.randn_like(param)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
    ],
)
def test_parameters_one_by_one_become_what_they_do_together(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    whole, parts = net(), net()
    together, apart = optimizer_of(kind, whole, **options), optimizer_of(kind, parts, **options)
    partial = PartialStep(apart, kind)
    for seed in range(3):
        put_gradients(whole, seed)
        put_gradients(parts, seed)
        together.step()
        partial.begin()
        for param in reversed(list(parts.parameters())):
            partial.update([param])
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(apart.param_groups[0]["params"]) == 2


def test_what_is_written_into_groups_afterwards_is_for_the_next_step() -> None:
    whole, parts = net(), net()
    together, apart = optimizer_of(torch.optim.SGD, whole), optimizer_of(torch.optim.SGD, parts)
    apart.param_groups[0]["lr"] = torch.tensor(0.1)
    partial = PartialStep(apart, torch.optim.SGD)
    put_gradients(whole, 1)
    put_gradients(parts, 1)
    together.step()
    partial.begin()
    apart.param_groups[0]["lr"].fill_(100.0)
    apart.param_groups[1]["lr"] = 100.0
    partial.update(list(parts.parameters()))
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_within_inference_and_autocast_is_like_any_other() -> None:
    whole, parts = net(), net()
    together, apart = optimizer_of(torch.optim.Adam, whole), optimizer_of(torch.optim.Adam, parts)
    partial = PartialStep(apart, torch.optim.Adam)
    for seed in range(2):
        put_gradients(whole, seed)
        put_gradients(parts, seed)
        together.step()
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            partial.begin()
            partial.update(list(parts.parameters()))
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not any(value.is_inference() for state in apart.state.values() for value in state.values())


def test_parameters_without_gradients_or_of_others_are_left_alone() -> None:
    module = net()
    optimizer = optimizer_of(torch.optim.SGD, module)
    partial = PartialStep(optimizer, torch.optim.SGD)
    before = copy.deepcopy(module.state_dict())
    stranger = nn.Parameter(torch.ones(2))
    stranger.grad = torch.ones(2)
    partial.begin()
    partial.update([*module.parameters(), stranger])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert stranger.tolist() == [1, 1]
    assert len(partial.others(list(module.parameters())[:3])) == 1
    assert not partial.running


def test_groups_are_whole_again_where_the_step_raises() -> None:
    class Raises(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError

    module = net()
    optimizer = optimizer_of(Raises, module)
    partial = PartialStep(optimizer, Raises)
    put_gradients(module, 0)
    partial.begin()
    with pytest.raises(ZeroDivisionError):
        partial.update(list(module.parameters())[:1])
    assert len(optimizer.param_groups) == 2
    assert not partial.running
