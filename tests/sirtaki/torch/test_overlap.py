"""Users of deferred parameters wait for them, and a step in parts equals the whole step."""

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from sirtaki.errors import StaleReadError
from sirtaki.torch import overlap as awaited
from sirtaki.torch.overlap import (
    CheckedReads,
    LearnedReads,
    PartialStep,
    custom_modules_hold,
    refusal,
    refusal_by_trial,
    wait_for_own,
)


class Notes:
    """Records waits, and releases the awaited parameters."""

    def __init__(self) -> None:
        self.arrived: list[torch.Tensor] = []

    def on_read(self, tensor: torch.Tensor) -> None:
        awaited.release(tensor)
        self.arrived.append(tensor)

    def drain(self) -> None:
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
def test_every_used_parameter_is_awaited_once(module: nn.Module, use: Callable[[Any], object]) -> None:
    notes, params = held(module)
    use(module)
    assert {id(param) for param in notes.arrived} >= {id(param) for param in params}
    assert len(notes.arrived) == len(params)
    assert all(type(param) is nn.Parameter for param in params)


def test_reads_of_metadata_do_not_wait() -> None:
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
        awaited.release(param)
        awaited.release(param)


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


# ── reads ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_reads_are_learned_in_order_and_those_of_torchscript_functorch_and_aliases_are_not_covered() -> None:
    script, plain, functional = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alias, run = plain.weight.data, torch.jit.trace(script, torch.ones(1, 3))
    params = [*script.parameters(), *plain.parameters(), *functional.parameters()]
    learning = LearnedReads(params)
    assert learning.begin()
    run(torch.ones(1, 3))
    alias.sum()
    torch.func.grad(lambda weight: (weight * 2).sum())(functional.weight)
    plain(torch.ones(1, 3))
    learning.end()
    order = [*script.parameters(), plain.weight, functional.weight, plain.bias]
    assert [id(param) for param in learning.order] == [id(param) for param in order]
    assert learning.modules[-1] is plain
    assert not any(map(awaited.is_held, params))
    assert learning.uncovered == {id(param) for param in (*script.parameters(), plain.weight, functional.weight)}


def test_a_stale_read_is_an_error_that_names_parameter_and_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.alias = [self.inner.weight.data]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs @ self.alias[0]

    net = Net()
    params = list(net.parameters())
    checking = CheckedReads(params, {id(params[0]): "inner.weight"})
    awaited.hold(params, Notes())
    checking.begin()
    with pytest.raises(
        StaleReadError, match=r"reads the parameter inner\.weight \(in Net\) before its deferred update"
    ):
        net(torch.ones(1, 3))
    assert net.inner(torch.ones(1, 3)).shape == (1, 3)  # by Python, which has waited
    net(torch.ones(1, 3))
    checking.end()
    checking.end()
    assert not _get_current_dispatch_mode_stack()
    for param in params:
        awaited.release(param)


def test_watching_neither_begins_nor_ends_in_inference_mode() -> None:
    watched = nn.Linear(1, 1)
    learning = LearnedReads([watched.weight])
    with torch.inference_mode():
        assert not learning.begin()
    assert learning.begin()
    with torch.inference_mode():
        learning.end()
    torch.from_numpy(np.ones(1))  # PyTorch asks a mode, which must be on its stack
    watched(torch.ones(1))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python)


def test_modes_of_the_script_survive_everything_that_begins_and_ends_within() -> None:
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


def test_custom_modules_wait_for_the_parameters_that_they_hold() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(1)), nn.Linear(3, 3)
            self.more = nn.ParameterList([torch.ones(1)])

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs

    own = Own()
    outer = nn.Sequential(own, nn.Linear(3, 3))
    params = list(outer.parameters())
    assert custom_modules_hold([outer], params)
    assert not custom_modules_hold([outer], list(own.inner.parameters()))
    notes = Notes()
    handle = register_module_forward_pre_hook(wait_for_own)
    awaited.hold(params, notes)
    own(torch.ones(1, 3))
    handle.remove()
    assert [id(param) for param in notes.arrived] == [id(own.scale), id(own.more[0])]
    for param in params:
        awaited.release(param)


# ── steps in parts ───────────────────────────────────────────────────────────────────────────────────────────────────


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
def test_parameters_updated_one_by_one_equal_a_joint_update(
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


def test_an_update_has_the_options_of_its_step() -> None:
    param, rate = nn.Parameter(torch.zeros(1)), torch.tensor(1.0)
    optimizer = torch.optim.SGD([param], lr=rate, foreach=False)
    partial = PartialStep(optimizer, torch.optim.SGD)
    partial.begin()
    rate.fill_(5.0)  # as a scheduler does
    param.grad = torch.ones(1)
    partial.update([param])
    assert param.item() == -1.0


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


class SignDescent(torch.optim.Optimizer):
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


def counts(own: SignDescent, _: object) -> None:
    own.steps += 1


def notes_in_group(own: SignDescent, _: object) -> None:
    own.param_groups[0]["k"] = own.param_groups[0].get("k", 0) + 1


def by_all(_: object, params: list[torch.Tensor]) -> None:
    total = torch.stack([param.grad.norm() for param in params]).norm()  # type: ignore[union-attr]
    for param in params:
        param.sub_(param.grad / total)  # type: ignore[operator]


def clips_by_all(_: object, params: list[torch.Tensor]) -> None:
    """Clip only large norms, like timm's Lamb."""
    total = torch.stack([param.grad.norm() for param in params]).norm()  # type: ignore[union-attr]
    for param in params:
        param.sub_(param.grad / (total / 100.0).clamp(min=1.0))  # type: ignore[operator]


def counts_in_state(own: SignDescent, _: object) -> None:
    own.state["all"]["steps"] = own.state["all"].get("steps", 0) + 1


def trusts_a_group(own: SignDescent, _: object) -> None:
    for group in own.param_groups:
        ratio = sum(param.norm() for param in group["params"])
        for param in group["params"]:
            param.add_(ratio, alpha=0.01)


def at_random(_: object, params: list[torch.Tensor]) -> None:
    for param in params:
        param.add_(torch.randn_like(param))


def by_place(own: SignDescent, _: object) -> None:
    own.param_groups[0]["params"][1].mul_(2.0)


def made(act: Callable[..., None] = lambda *_: None) -> tuple[list[torch.Tensor], SignDescent]:
    params = [torch.nn.Parameter(torch.full((size,), float(size))) for size in (3, 2, 4, 1)]
    for param in params:
        param.grad = torch.arange(float(param.numel())) + 1
    return list(params), SignDescent([{"params": params[:2]}, {"params": params[2:]}], act)


def test_one_that_updates_each_by_itself_is_taken_and_left_as_it_was() -> None:
    params, own = made()
    own.step()
    before, state = copy.deepcopy(params), copy.deepcopy(list(own.state.values()))
    rng = torch.get_rng_state()
    assert refusal_by_trial(own, SignDescent) == ""
    assert all(map(torch.equal, params, before))
    assert list(own.state.values()) == state
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (counts, "its attribute steps"),
        (notes_in_group, "its option k"),
        (by_all, "uses other parameters"),
        (clips_by_all, "uses other parameters"),
        (trusts_a_group, "uses other parameters"),
        (counts_in_state, "its state all"),
        (at_random, "uses other parameters|random"),
        (by_place, "failed in a trial step"),
    ],
)
def test_one_that_does_not_is_refused_by_name(act: Callable[..., None], why: str) -> None:
    params, own = made(act)
    before = copy.deepcopy(params)
    found = refusal_by_trial(own, SignDescent)
    assert found.startswith("SignDescent")
    assert re.search(why, found), found
    assert all(map(torch.equal, params, before))


def test_gradients_that_are_not_finite_are_no_reason() -> None:
    params, own = made()
    params[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
    params[0].data.fill_(float("nan"))
    assert refusal_by_trial(own, SignDescent) == ""


def test_a_changed_class_takes_effect_at_once() -> None:
    params, own = made()
    assert refusal(own, SignDescent) == ""
    assert "LBFGS" in refusal(torch.optim.LBFGS(params), torch.optim.LBFGS)
    assert "differentiable" in refusal(torch.optim.Adam(params, differentiable=True), torch.optim.Adam)
    assert refusal_by_trial(torch.optim.Adam(params), torch.optim.Adam) == ""
