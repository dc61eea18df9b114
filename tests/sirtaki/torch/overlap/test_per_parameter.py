"""Optimizers whose updates depend on more than one parameter are told from all others."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sirtaki.torch.overlap import refusal, refusal_by_trial


class Own(torch.optim.Optimizer):
    """Decays towards the gradient's sign."""

    def __init__(self, params: Any, act: Callable[..., None] = lambda *_: None) -> None:
        self.act, self.steps = act, 0
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for param in params:
            state = self.state[param]
            state["count"] = state.get("count", 0) + 1
            param.sub_(param.grad.sign(), alpha=0.1)
        self.act(self, params)


def counts(own: Own, _: object) -> None:
    own.steps += 1


def notes_in_group(own: Own, _: object) -> None:
    own.param_groups[0]["k"] = own.param_groups[0].get("k", 0) + 1


def by_all(_: object, params: list[torch.Tensor]) -> None:
    total = torch.stack([param.grad.norm() for param in params]).norm()  # type: ignore[union-attr]
    for param in params:
        param.sub_(param.grad / total)  # type: ignore[operator]


def clips_by_all(_: object, params: list[torch.Tensor]) -> None:
    """As timm's Lamb: only where the norm is large."""
    total = torch.stack([param.grad.norm() for param in params]).norm()  # type: ignore[union-attr]
    for param in params:
        param.sub_(param.grad / (total / 100.0).clamp(min=1.0))  # type: ignore[operator]


def counts_in_state(own: Own, _: object) -> None:
    own.state["all"]["steps"] = own.state["all"].get("steps", 0) + 1


def trusts_a_group(own: Own, _: object) -> None:
    for group in own.param_groups:
        ratio = sum(param.norm() for param in group["params"])
        for param in group["params"]:
            param.add_(ratio, alpha=0.01)


def at_random(_: object, params: list[torch.Tensor]) -> None:
    for param in params:
        param.add_(torch.randn_like(param))


def by_place(own: Own, _: object) -> None:
    own.param_groups[0]["params"][1].mul_(2.0)


def made(act: Callable[..., None] = lambda *_: None) -> tuple[list[torch.Tensor], Own]:
    params = [torch.nn.Parameter(torch.full((size,), float(size))) for size in (3, 2, 4, 1)]
    for param in params:
        param.grad = torch.arange(float(param.numel())) + 1
    return list(params), Own([{"params": params[:2]}, {"params": params[2:]}], act)


def test_one_that_updates_each_by_itself_is_taken_and_left_as_it_was() -> None:
    params, own = made()
    own.step()
    before, state = copy.deepcopy(params), copy.deepcopy(list(own.state.values()))
    rng = torch.get_rng_state()
    assert refusal_by_trial(own, Own) == ""
    assert all(map(torch.equal, params, before))
    assert list(own.state.values()) == state
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (counts, "its attribute steps"),
        (notes_in_group, "its option k"),
        (by_all, "by what belongs to others"),
        (clips_by_all, "by what belongs to others"),
        (trusts_a_group, "by what belongs to others"),
        (counts_in_state, "its state all"),
        (at_random, "by what belongs to others|random"),
        (by_place, "cannot be tried with a few parameters"),
    ],
)
def test_one_that_does_not_is_refused_by_name(act: Callable[..., None], why: str) -> None:
    params, own = made(act)
    before = copy.deepcopy(params)
    found = refusal_by_trial(own, Own)
    assert found.startswith("Own")
    assert re.search(why, found), found
    assert all(map(torch.equal, params, before))


def test_gradients_that_are_not_finite_are_no_reason() -> None:
    params, own = made()
    params[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
    params[0].data.fill_(float("nan"))
    assert refusal_by_trial(own, Own) == ""


def test_what_the_class_says_is_heard_at_once() -> None:
    params, own = made()
    assert refusal(own, Own) == ""
    assert "LBFGS" in refusal(torch.optim.LBFGS(params), torch.optim.LBFGS)
    assert "differentiable" in refusal(torch.optim.Adam(params, differentiable=True), torch.optim.Adam)
    assert refusal_by_trial(torch.optim.Adam(params), torch.optim.Adam) == ""
