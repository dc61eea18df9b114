"""Training with updates deferred into the next forward pass is bit-identical to training where `step()` waits."""

import copy
import gc
import os
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conformance.put_off import adam, assert_same, numbers, plain_step
from conformance.put_off_models import FIVE_MODELS, Perceptron, Signs, square
from conformance.training import main
from rank_jobs import cases
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError, StaleReadError
from sirtaki.torch import overlap as awaited

# ── what scripts do between steps ────────────────────────────────────────────────────────────────────────────────


def options_are_those_of_the_step() -> None:
    def after(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group["betas"] = (0.8, 0.9)

    assert_same(Perceptron(), square, after=after)
    schedulers: dict[int, Any] = {}

    def schedule(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if id(optimizer) not in schedulers:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        else:
            schedulers[id(optimizer)].step()

    assert_same(Perceptron(), square, lambda params: torch.optim.SGD(params, lr=0.1), after=schedule)


def averages_copies_and_vectors() -> None:
    kept: dict[int, list[Any]] = {}

    def after(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        params = kept.setdefault(id(model), list(model.parameters()))  # as an average of weights holds them
        mean = kept.setdefault(-id(model), [torch.zeros_like(param) for param in params])
        if number % 5 == 1:
            torch._foreach_lerp_(mean, params, 0.1)
        elif number % 5 == 2:
            twin = copy.deepcopy(model)
            assert all(type(param) is nn.Parameter for param in twin.parameters())
            model.load_state_dict(twin.state_dict())
        elif number % 5 == 3:
            with torch.no_grad():
                params[0].mul_(1.01)
                params[1].data.add_(0.01)
        elif number % 5 == 4:
            vector = nn.utils.parameters_to_vector(params)
            nn.utils.vector_to_parameters(vector * 0.99, params)
        else:
            assert all(type(value) is torch.Tensor for value in model.state_dict().values())

    assert_same(Perceptron(), square, after=after)


def evaluation_and_other_forwards() -> None:
    def after(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        seen = numbers(number, 2, 8)
        if number % 4 == 1:
            with torch.inference_mode():
                model(seen)
        elif number % 4 == 2:
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                model(seen)
        elif number % 4 == 3:
            model.eval()
            torch.func.functional_call(model, dict(model.named_parameters()), (seen,))
            model.train()
        elif number % 8 == 4:
            torch.func.jacrev(model)(seen[0])
        elif number % 8 == 0:
            torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))(seen)

    assert_same(Perceptron(), square, after=after)
    assert_same(Perceptron(), square, Signs_with_state_made_late, after=after)


def Signs_with_state_made_late(params: Any) -> torch.optim.Optimizer:
    return Signs(params, lr=1e-3)


def checkpointed_normed_and_frozen() -> None:
    from torch.utils.checkpoint import checkpoint

    class Odd(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.weight_norm(self.layers[2])

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.layers[:3], inputs, use_reentrant=False)
            return self.layers[3:](hidden) * self.scale

    def after(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model.layers[0].requires_grad_(number % 6 < 3)

    assert_same(Odd(), square)
    assert_same(Perceptron(), square, after=after)


def a_look_on_one_rank_only() -> None:
    def after(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if hvd.rank() == number % hvd.size():
            copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        hvd.allreduce(torch.ones(3), name="between")

    assert_same(Perceptron(), square, after=after)


# ── what reads past Python, and what is refused ──────────────────────────────────────────────────────────────────


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self._traced: list[Any] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self._traced:
            self._traced.append(torch.jit.trace(self.first, torch.zeros(1, 8)))
        return self.last(self._traced[0](inputs))


def reads_past_python_are_waited_for() -> None:
    import warnings

    class Aliased(Perceptron):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "alias"):
                self.alias = [self.layers[0].weight.data]  # shares the parameter's memory
            penalty = self.alias[0].abs().sum()
            return super().forward(inputs) * (1 + penalty)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(Scripted(), square)
    assert_same(Aliased(), square)


def memory_that_parameters_share_is_never_stale() -> None:
    """Read the memory after the iteration in which reads are learned, and before the parameters are read."""

    class Wide(Perceptron):
        """A model of several units."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 2))

    class Flat(Wide):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "flat"):
                own = list(self.parameters())
                self.flat, self.count = [torch.cat([param.detach().view(-1) for param in own])], 0
                for param, part in zip(own, self.flat[0].split([param.numel() for param in own]), strict=True):
                    param.data = part.view_as(param)
            self.count += 1
            norm = self.flat[0].norm() if self.count > 12 else 0.0  # before a parameter's update is awaited
            return super().forward(inputs) * (1 + norm)

    class Sliced(Wide):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "count"):
                self.count, self.kept = 0, [self.layers[2].weight.detach()[:2]]
            self.count += 1
            mean = self.kept[0].abs().mean() if self.count > 12 else 0.0
            return super().forward(inputs) * (1 + mean)

    assert_same(Flat(), square)
    assert_same(Sliced(), square)

    def keeps_state(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if not number:
            model.kept = [model.state_dict()]
        elif number > 12:
            mean = model.kept[0]["layers.0.weight"].abs().mean()
            with torch.no_grad():
                model.scale.mul_(1.0 + mean)

    assert_same(Wide(), square, after=keeps_state)


def a_read_that_was_not_learned_is_found_by_the_check() -> None:
    checks = os.environ.get("SIRTAKI_OVERLAP_FORWARD") == "check"
    model = Perceptron()
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters(), overlap_forward=True)
    for number in range(8):
        plain_step(optimizer, lambda now=number: square(model, now))
    found = pytest.raises(StaleReadError, match=r"layers\.2\.weight") if checks else nullcontext()
    with torch._C.DisableTorchFunctionSubclass(), found:
        model.layers[2].weight.detach()
    assert awaited.is_held(model.layers[2].weight)
    optimizer.finish()
    assert not awaited.is_held(model.layers[2].weight)
    with torch._C.DisableTorchFunctionSubclass():
        model.layers[2].weight.detach()


def optimizers_that_look_at_all_parameters_are_refused() -> None:
    class Global(Signs):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
            total = torch.stack([param.grad.norm() for param in params]).norm()
            for param in params:
                param.sub_(param.grad / total, alpha=0.01)

    model = Perceptron()
    with pytest.raises(ConfigError, match="LBFGS reads all parameters"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), overlap_forward=True)
    optimizer = hvd.DistributedOptimizer(Global(model.parameters(), lr=0.1), overlap_forward=True)
    square(model, 0).backward()
    if hvd.size() > 1:
        with pytest.raises(ConfigError, match="uses other parameters"):
            optimizer.step()
    optimizer.close()
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), overlap_forward=True)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: square(model, 0))
    optimizer.close()


def compiled_models_wait() -> None:
    hvd.shutdown()  # because modules may still have hooks of optimizers of earlier cases
    hvd.init()
    compiled = torch.compile(Perceptron(), backend="eager")
    compiled(torch.zeros(1, 8))
    assert_same(Perceptron(), square, puts_off=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def a_dropped_optimizer_makes_its_updates_and_is_gone() -> None:
    model = Perceptron()
    alone = copy.deepcopy(model)
    optimizers = []
    gc.disable()
    try:
        for each, overlaps in ((model, True), (alone, False)):
            optimizer = hvd.DistributedOptimizer(
                adam(each.parameters()), each.named_parameters(), overlap_forward=overlaps
            )
            for number in range(8):
                plain_step(optimizer, lambda each=each, now=number: square(each, now))
            optimizers.append(weakref.ref(optimizer))
            del optimizer
        torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))
        square(model, 9).backward()  # ends a deferred iteration first
        assert not any(optimizer() for optimizer in optimizers)
    finally:
        gc.enable()


def the_end_comes_with_updates_put_off() -> None:
    """Run last, because it ends the job."""
    model = Perceptron()
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters(), overlap_forward=True)
    for number in range(8):
        plain_step(optimizer, lambda now=number: square(model, now))
    before = model.scale.detach().clone()
    for _ in range(1):
        plain_step(optimizer, lambda: square(model, 9))
    hvd.shutdown()
    assert not _has_any_global_hook()
    assert not awaited.is_held(model.scale)
    assert not torch.equal(before, model.scale)
    hvd.init()


CASES = [*FIVE_MODELS, *cases(globals())]

if __name__ == "__main__":
    if os.environ.get("SIRTAKI_TEST_DOUBLE"):  # so that rounding is far smaller than the effect of a stale read
        torch.set_default_dtype(torch.float64)
    if device := os.environ.get("TEST_DEVICE"):
        torch.set_default_device(device)
        os.environ["NCCL_HOSTID"] = os.environ["OMPI_COMM_WORLD_RANK"]  # because ranks of a test may share a GPU
    main(CASES)
