"""Training whose updates are put off into the next forward pass equals training where `step()` waits, bit by bit."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conformance.training import main
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError, StaleReadError
from sirtaki.torch.overlap import awaited
from sirtaki.torch.overlap.put_off_updates import PutOffUpdates

Loss = Callable[[nn.Module, int], torch.Tensor]
"""(model, number of the step) → what this rank minimises."""
After = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""What the script does after a step."""

STEPS = int(os.environ.get("SIRTAKI_TEST_STEPS", "24"))
CHECKED_EVERY = 8


@contextmanager
def counted_put_off() -> Iterator[list[bool]]:
    """Whether each step inside was put off."""
    was, results = PutOffUpdates.step, []

    def step(self: PutOffUpdates) -> bool:
        results.append(was(self))
        return results[-1]

    PutOffUpdates.step = step  # type: ignore[method-assign]
    try:
        yield results
    finally:
        PutOffUpdates.step = was  # type: ignore[method-assign]


def numbers(step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * step + hvd.rank())
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def words(step: int, *shape: int, count: int = 50) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * step + hvd.rank())
    return torch.randint(count, shape, generator=generator, device="cpu").to(torch.get_default_device())


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def plain_step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    pass


def assert_same(
    model: nn.Module,
    loss: Loss,
    make: Callable[[Any], torch.optim.Optimizer] = adam,
    *,
    steps: int = STEPS,
    after: After = nothing,
    step: Callable[..., None] = plain_step,
    puts_off: bool = True,
    **options: Any,
) -> torch.optim.Optimizer:
    """Collective: trains two copies, with and without; looks at them now and then only, since a look waits."""
    trained = []
    with counted_put_off() as results:
        for overlaps in (False, True):
            copied = copy.deepcopy(model)
            optimizer = hvd.DistributedOptimizer(
                make(copied.parameters()),
                named_parameters=list(copied.named_parameters()),
                overlap_forward=overlaps,
                **options,
            )
            seen = []
            for number in range(steps):
                torch.manual_seed(number)
                step(optimizer, lambda now=number, own=copied: loss(own, now))
                after(copied, optimizer, number)
                if number % CHECKED_EVERY == CHECKED_EVERY - 1:
                    seen.append(copy.deepcopy(copied.state_dict()))
            seen.append(copy.deepcopy(copied.state_dict()))
            trained.append((seen, copy.deepcopy(optimizer.state_dict())))
            if not overlaps:
                optimizer.close()
    (wanted, wanted_state), (found, found_state) = trained
    for place, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for name, value in one.items():
            assert same(value, other[name]), f"{name} differs at look {place}"
    assert_equal_states(wanted_state, found_state)
    assert any(results) is puts_off, results
    return optimizer


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit on hosts; what three ranks and more add up depends, in its last bits, on where units are cut."""
    if (hvd.size() <= 2 and one.device.type == "cpu") or not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-8, atol=1e-10, equal_nan=True)


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        for name, value in state.items():
            assert same(torch.as_tensor(value), torch.as_tensor(other["state"][number][name])), name


# ── five models ──────────────────────────────────────────────────────────────────────────────────────────────────


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


def convolutional() -> None:
    assert_same(
        Convolutions(),
        lambda model, number: F.cross_entropy(model(numbers(number, 4, 3, 12, 12)), words(number, 4, count=10)),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    )


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.place = nn.Parameter(torch.randn(6, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens) + self.place)
        return F.linear(hidden, self.embedding.weight)


def transformer_loss(model: nn.Module, number: int) -> torch.Tensor:
    tokens = words(number, 3, 6)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def transformer_with_tied_embeddings() -> None:
    assert_same(TiedTransformer(), transformer_loss, lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lstm, self.out = nn.Embedding(50, 12), nn.LSTM(12, 16, 2), nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embedding(tokens))[0])


def lstm() -> None:
    assert_same(Recurrent(), transformer_loss, lambda params: torch.optim.RMSprop(params, lr=1e-3))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        chosen = self.experts[(number + hvd.rank()) % 4]  # the last one never
        return self.last(chosen(hidden))


def experts_of_which_some_are_unused() -> None:
    assert_same(
        Experts(),
        lambda model, number: model(numbers(number, 4, 8), number).square().mean(),
        lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
    )


class Signs(torch.optim.Optimizer):
    """One of the user's own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.1)
                    param.add_(mean.sign(), alpha=-group["lr"])


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs) * self.scale


def square(model: nn.Module, number: int) -> torch.Tensor:
    return model(numbers(number, 4, 8)).square().mean()


def custom_optimizer() -> None:
    assert_same(Perceptron(), square, lambda params: Signs(params, lr=1e-3))


FIVE_MODELS = (
    convolutional,
    transformer_with_tied_embeddings,
    lstm,
    experts_of_which_some_are_unused,
    custom_optimizer,
)

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


def zeroing_in_every_way() -> None:
    def at_the_end(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def before_backward(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    def by_hand(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None
        loss().backward()
        optimizer.step()

    def never(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        optimizer.step()

    for step in (at_the_end, before_backward, by_hand, never):
        assert_same(Perceptron(), square, step=step)


def gradients_between_backward_and_step() -> None:
    def editing(edit: Callable[[list[torch.Tensor]], object]) -> Callable[..., None]:
        def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
            optimizer.zero_grad()
            loss().backward()
            edit([param for group in optimizer.param_groups for param in group["params"]])
            optimizer.step()

        return step

    def first_only(params: list[torch.Tensor]) -> None:
        params[0].grad.mul_(0.5)

    def dropped(params: list[torch.Tensor]) -> None:
        params[1].grad = None

    edits = (
        lambda params: nn.utils.clip_grad_norm_(params, 1e-3),
        lambda params: nn.utils.clip_grad_value_(params, 1e-3),
        first_only,
        dropped,
    )
    for edit in edits:
        assert_same(Perceptron(), square, step=editing(edit))

    def synchronized(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 1e-3)
        with optimizer.skip_synchronize():
            optimizer.step()

    assert_same(Perceptron(), square, step=synchronized, puts_off=False)


def a_step_that_does_not_synchronize_takes_what_backward_has_reduced() -> None:
    def step(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss().backward()
        with optimizer.skip_synchronize():
            optimizer.step()

    turn = iter(range(10_000))

    def now_and_then(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
        (step if next(turn) % 3 == 2 else plain_step)(optimizer, loss)

    turn_of_both = STEPS - STEPS % 3  # both trainings take the same turns
    assert_same(Perceptron(), square, step=now_and_then, steps=turn_of_both)


def steps_that_are_left_out() -> None:
    turn = iter(range(10_000))

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss().backward()
        if next(turn) % 3:
            optimizer.step()

    assert_same(Perceptron(), square, step=step)


def averages_copies_and_vectors() -> None:
    kept: dict[int, list[Any]] = {}

    def after(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        params = kept.setdefault(id(model), list(model.parameters()))  # as an EMA holds them
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


def what_raises_in_between() -> None:
    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        value = loss()
        try:
            raise_in_backward(value).backward()
        except ZeroDivisionError:
            optimizer.zero_grad()
            loss().backward()
        optimizer.step()

    count = iter(range(10_000))

    def raise_in_backward(value: torch.Tensor) -> torch.Tensor:
        if next(count) % 5 == 4:
            value.register_hook(lambda _: 1 // 0)
        return value

    assert_same(Perceptron(), square, step=step)


def passes_compression_and_sums() -> None:
    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            loss().backward()
        optimizer.step()

    assert_same(Perceptron(), square, step=step, backward_passes_per_step=2)
    assert_same(Perceptron(), square, compression=hvd.Compression.fp16)
    assert_same(Perceptron(), square, op=hvd.Sum, groups=2)


def several_optimizers() -> None:
    def train(overlaps: bool) -> list[torch.Tensor]:
        parts = [Perceptron(), Perceptron()]
        optimizers = [
            hvd.DistributedOptimizer(adam(part.parameters()), part.named_parameters(), overlap_forward=overlaps)
            for part in parts
        ]
        for number in range(12):
            for part, optimizer in zip(parts, optimizers, strict=True):
                plain_step(optimizer, lambda own=part, now=number: square(own, now) + parts[0].scale.detach().sum())
        return [value.clone() for part in parts for value in part.state_dict().values()]

    for one, other in zip(train(False), train(True), strict=True):
        assert torch.equal(one, other)


def sparse_gradients_are_waited_for() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embedding(tokens))

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return model(words(number, 5)).square().mean()

    assert_same(Sparse(), loss, lambda params: torch.optim.SGD(params, lr=0.1), puts_off=False)


def ranks_that_have_joined() -> None:
    model = Perceptron()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)  # the states of others would differ afterwards
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), overlap_forward=True)
    for number in range(8 + hvd.rank()):
        plain_step(optimizer, lambda now=number: square(model, now))
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    for number in range(4):
        plain_step(optimizer, lambda now=number: square(model, now))
    for name, value in model.state_dict().items():
        assert torch.equal(hvd.broadcast(value, 0, name=f"joined.{name}"), value), name


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
                self.alias = [self.layers[0].weight.data]  # the same memory
            penalty = self.alias[0].abs().sum()
            return super().forward(inputs) * (1 + penalty)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(Scripted(), square)
    assert_same(Aliased(), square)


def a_read_that_was_not_learned_is_found_by_the_check() -> None:
    checks = os.environ.get("SIRTAKI_OVERLAP_FORWARD") == "check"
    model = Perceptron()
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters(), overlap_forward=True)
    alias = model.layers[2].weight.data
    for number in range(8):
        plain_step(optimizer, lambda now=number: square(model, now))
    assert awaited.is_held(model.layers[2].weight)
    if checks:
        with pytest.raises(StaleReadError, match=r"layers\.2\.weight"):
            alias.sum()
    optimizer.finish()
    assert not awaited.is_held(model.layers[2].weight)
    alias.sum()


def optimizers_that_look_at_all_parameters_are_refused() -> None:
    class Global(Signs):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
            total = torch.stack([param.grad.norm() for param in params]).norm()
            for param in params:
                param.sub_(param.grad / total, alpha=0.01)

    class Counting(Signs):
        def step(self, closure: None = None) -> None:
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
            super().step()

    model = Perceptron()
    with pytest.raises(ConfigError, match="LBFGS looks at all parameters"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), overlap_forward=True)
    for kind, why in ((Global, "by what belongs to others"), (Counting, "its option count")):
        optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), overlap_forward=True)
        square(model, 0).backward()
        if hvd.size() > 1:
            with pytest.raises(ConfigError, match=why):
                optimizer.step()
        optimizer.close()
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), overlap_forward=True)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: square(model, 0))
    optimizer.close()


def compiled_models_wait() -> None:
    hvd.shutdown()  # with the hooks of all modules that optimizers of other cases may still have
    hvd.init()
    compiled = torch.compile(Perceptron(), backend="eager")
    compiled(torch.zeros(1, 8))
    assert_same(Perceptron(), square, puts_off=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def the_end_comes_with_updates_put_off() -> None:
    """Last, since it ends the job."""
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


CASES = (
    *FIVE_MODELS,
    options_are_those_of_the_step,
    zeroing_in_every_way,
    gradients_between_backward_and_step,
    a_step_that_does_not_synchronize_takes_what_backward_has_reduced,
    steps_that_are_left_out,
    averages_copies_and_vectors,
    evaluation_and_other_forwards,
    checkpointed_normed_and_frozen,
    what_raises_in_between,
    passes_compression_and_sums,
    several_optimizers,
    sparse_gradients_are_waited_for,
    ranks_that_have_joined,
    a_look_on_one_rank_only,
    reads_past_python_are_waited_for,
    a_read_that_was_not_learned_is_found_by_the_check,
    optimizers_that_look_at_all_parameters_are_refused,
    compiled_models_wait,
    the_end_comes_with_updates_put_off,
)

if __name__ == "__main__":
    if os.environ.get("SIRTAKI_TEST_DOUBLE"):  # so that last bits are far from what a stale read would change
        torch.set_default_dtype(torch.float64)
    if device := os.environ.get("TEST_DEVICE"):
        torch.set_default_device(device)
        os.environ["NCCL_HOSTID"] = os.environ["OMPI_COMM_WORLD_RANK"]  # ranks of a test may share a GPU
    main(CASES)
