"""Training with a DistributedOptimizer equals training in one process, in many situations."""

import copy
import gc
import io
import os
import pickle
import random
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch
from conformance.ddp import dense_model
from conformance.gradient_losses import LOSSES
from conformance.training import (
    assert_equal_on_all_ranks,
    assert_same_parameters,
    assert_same_training,
    batch,
    joined,
    main,
    sgd,
)
from fakes.backward import Raises
from rank_jobs import cases
from torch import nn

import sirtaki
import sirtaki.torch as hvd
from sirtaki.engine import job
from sirtaki.errors import NotInitializedError


def mlp(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3)).to(dtype)


def mean_square(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(rank, iteration, 5, 24, dtype=dtype)).square().mean()


def an_ordinary_loop() -> None:
    assert_same_training(mlp(), mean_square)


FUNCTIONS_OF_A_PASS, FUNCTIONS_OF_A_STEP = 47, 30
"""Limits on the number of Sirtaki's functions in the training thread: of a pass in the known order, and of `step()`."""


def functions_called(act: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the functions of Sirtaki, by file and name, that run in this thread during `act`."""
    root, called = Path(sirtaki.__file__).parent.resolve(), set[tuple[str, str]]()
    roots = tuple(str((root / part).resolve()) for part in (".", "comm", "autotune", "registry"))

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and os.path.realpath(code.co_filename).startswith(roots):
            called.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return called


def few_functions_run_in_the_training_thread() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(plain_sgd(model))
    gradients = optimizer._gradients  # type: ignore[attr-defined]
    if gradients is None or gradients.reducers[0].tuning.tuning:
        return
    passes, steps = list[set[tuple[str, str]]](), list[set[tuple[str, str]]]()
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 256)).sum()
        passes.append(functions_called(loss.backward))
        steps.append(functions_called(optimizer.step))
    # The order is fixed from the third iteration on. Functions that only some passes call are called while they wait.
    for found, most in ((passes, FUNCTIONS_OF_A_PASS), (steps, FUNCTIONS_OF_A_STEP)):
        called = set.intersection(*found[4:])
        assert 10 < len(called) <= most, (len(called), sorted(name for _, name in called))


def large_gradients_in_many_units_on_several_streams() -> None:
    """Gradients larger than a unit, with small ones between them, and one in another memory format."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 128, 1),
        nn.Conv2d(128, 256, 3),
        nn.Flatten(),
        nn.Linear(256, 1100),
        nn.Tanh(),
        nn.Linear(1100, 300),
    ).to(torch.float64)
    model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        return model(batch(rank, iteration, 2, 9, dtype=torch.float64).view(2, 1, 3, 3)).square().mean()

    current = job.current()
    usual = current.settings
    for streams, unit_bytes in ((1, 1_500_000), (3, 1_500_000), (2, 200_000)):
        current.settings = replace(usual, tune=False, unit_bytes=unit_bytes, streams=streams)
        try:
            assert_same_training(copy.deepcopy(model), loss, gradient_predivide_factor=2.0)
        finally:
            current.settings = usual


def gradients_may_be_read_between_passes_that_bring_some_each() -> None:
    """After each pass `.grad` is the computed or the averaged gradient, and never an older value."""
    torch.manual_seed(0)
    layers = [[nn.Linear(300, 300, bias=False) for _ in range(4)] for _ in range(2)]
    halves = nn.ModuleList(nn.Sequential(*half) for half in layers).to(torch.float64)
    current = job.current()
    usual = current.settings
    current.settings = replace(usual, tune=False, unit_bytes=1_000_000)
    try:
        optimizer = hvd.DistributedOptimizer(sgd(halves), named_parameters=halves.named_parameters())
    finally:
        current.settings = usual

    def loss(half: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        return half(batch(rank, iteration, 4, 300)).mean()

    for iteration in range(30):
        optimizer.zero_grad()
        for half in reversed(halves):
            params = list(half.parameters())
            each = [torch.autograd.grad(loss(half, rank, iteration), params) for rank in range(hvd.size())]
            loss(half, hvd.rank(), iteration).backward()
            for param, own, *of_ranks in zip(params, each[hvd.rank()], *each, strict=True):
                found, mean = param.grad.clone(), sum(of_ranks) / hvd.size()
                known = torch.isclose(found, own, atol=1e-12) | torch.isclose(found, mean, atol=1e-12)
                assert bool(known.all()), f"iteration {iteration}: {known.double().mean()} are known"
        optimizer.step()


def gradients_that_are_never_zeroed() -> None:
    """Gradients accumulate: the reduced gradient is the old mean plus the new gradient, on every rank."""

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        optimizer.step()

    assert_same_training(mlp(), mean_square, step=step)


class Heads(nn.Module):
    """Independent heads. The order of their forward passes is the order of their gradients."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, 9) for _ in range(count))

    def forward(self, inputs: torch.Tensor, order: list[int]) -> torch.Tensor:
        outputs = {number: self.heads[number](inputs).square().mean() for number in order}
        return torch.stack([outputs[number] for number in sorted(outputs)]).sum()


def an_order_that_differs_between_ranks_and_iterations() -> None:
    """After the first iterations some heads are skipped, too."""

    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        drawn = random.Random(100 * rank + iteration)
        order = drawn.sample(range(20), 20 if iteration < 4 else drawn.randint(1, 20))
        return model(batch(rank, iteration, 5, 6), order)

    assert_same_training(Heads(20).double(), loss, steps=24, make_optimizer=plain_sgd)  # zeros do not change it


def an_order_that_changes_for_good_is_learned_anew() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        # Only the last rank has another order. Its flag must suffice.
        turned = iteration >= 60 and rank == hvd.size() - 1
        return model(batch(rank, iteration, 2, 6), list(range(20))[:: -1 if turned else 1])

    optimizer = assert_same_training(Heads(20).double(), loss, steps=120, tolerance=1e-9)
    if hvd.size() > 1:
        assert optimizer._gradients.reducers[0].pipeline._order.since > 100


def plans_that_change_in_mid_training() -> None:
    seen: set[str] = set()

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad(set_to_none=len(seen) % 2 == 0)
        loss().backward()
        optimizer.step()
        if hvd.size() > 1 and hasattr(optimizer, "synchronize"):
            seen.add(optimizer._gradients.reducers[0].tuning.knobs.describe())

    warmup = int(os.environ["SIRTAKI_WARMUP_ITERATIONS"])
    assert_same_training(mlp(), mean_square, step=step, steps=min(warmup, 100) + 10, tolerance=1e-10)
    assert len(seen) > 2 or warmup < 40 or hvd.size() == 1


def a_compiled_model() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        return torch.compile(model, backend="aot_eager")(batch(rank, iteration, 5, 24)).square().mean()

    assert_same_training(mlp(), loss)
    torch.compiler.reset()


def a_model_compiled_in_parts() -> None:
    backend = hvd.early_gradients("aot_eager", part_bytes=1000)

    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        return torch.compile(model, backend=backend)(batch(rank, iteration, 5, 24)).square().mean()

    assert_same_training(mlp(), loss)
    torch.compiler.reset()


def gradients_with_a_graph_of_their_own() -> None:
    """`create_graph=True` for penalties. The reduced gradients have no graph."""

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss().backward(create_graph=True)
        optimizer.step()

    model = mlp()
    assert_same_training(model, mean_square, step=step)
    if hvd.size() > 1:
        assert not any(param.grad.requires_grad for param in model.parameters())


def schedulers_made_before_or_after_wrapping() -> None:
    for before in (True, False):
        model = mlp()
        alone = copy.deepcopy(model)
        plain, reference = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone))
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=2, gamma=0.3)
            optimizer = hvd.DistributedOptimizer(plain)
        else:
            optimizer = hvd.DistributedOptimizer(plain)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
        reference_scheduler = torch.optim.lr_scheduler.StepLR(reference, step_size=2, gamma=0.3)
        for iteration in range(8):
            if iteration == 4:  # loads a checkpoint; the scheduler must still affect the optimizer
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            mean_square(model, hvd.rank(), iteration).backward()
            optimizer.step()
            scheduler.step()
            reference.zero_grad()
            joined(mean_square, alone, iteration).backward()
            reference.step()
            reference_scheduler.step()
            assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        assert_same_parameters(model, alone, 1e-12)


def gradients_may_be_asked_for_through_the_output() -> None:
    """`torch.autograd.grad` is no backward pass. The next pass reduces the gradients that it returned."""

    def thrice(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            loss().backward()
        optimizer.step()

    for loss in LOSSES:
        assert_same_training(dense_model(), partial(loss, batch))
        assert_same_training(dense_model(), partial(loss, batch), step=thrice, backward_passes_per_step=3, steps=3)


TRAINING = cases(globals())


# ── Training with a DistributedOptimizer equals training in one process, whatever the types and strides ──────────────


def bfloat16_autocast() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_square(model, rank, iteration)

    assert_same_training(mlp(torch.float32), loss, tolerance=2e-3)


def smaller_types_on_the_wire() -> None:
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 1e-2)):
        for clears in (True, False):

            def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], clears: bool = clears) -> None:
                optimizer.zero_grad(set_to_none=clears)
                loss().backward()
                optimizer.step()

            model = mlp(torch.float32)
            assert_same_training(model, mean_square, step=step, compression=compression, tolerance=tolerance)
            assert_equal_on_all_ranks(model)
            assert all(param.grad.dtype == torch.float32 for param in model.parameters())


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.single = nn.Linear(24, 50).double(), nn.Linear(50, 50).float()
        self.small = nn.Linear(50, 10).bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.single(torch.tanh(self.wide(inputs)).float())
        return self.small(torch.tanh(hidden).bfloat16()).double()


def several_dtypes_in_one_model() -> None:
    model = MixedTypes()
    assert_same_training(model, mean_square, tolerance=3e-2)
    assert_equal_on_all_ranks(model)
    model = MixedTypes()
    assert_same_training(model, mean_square, compression=hvd.Compression.bf16, tolerance=3e-2)


class ComplexTypes(nn.Module):
    """A model whose first ready gradient is complex, in the unit with the control flags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.real, self.plane = nn.Linear(24, 12).double(), nn.Linear(6, 5, dtype=torch.complex128)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.plane(torch.view_as_complex(self.real(inputs).view(-1, 6, 2))).abs()


def complex_parameters() -> None:
    model = ComplexTypes()
    assert_same_training(model, mean_square, tolerance=1e-8)
    assert_equal_on_all_ranks(model)


TYPES = cases(globals())


# ── What a DistributedOptimizer offers besides ordinary training: sparse gradients, groups, process sets ─────────────


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parameters_have_names() -> None:
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert optimizer._parameter_names == {model.weight: "weight", model.bias: "bias"}
    later = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [later]})
    assert optimizer._parameter_names[later] == "group.1.0"


def groups_of_parameters() -> None:
    assert_same_training(mlp(), mean_square, groups=2)
    assert_same_training(mlp(), mean_square, groups=100)
    model = mlp()
    first = list(model[0].parameters())
    assert_same_training(model, mean_square, groups=[first, [model[4].bias, model[2].weight]])
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(plain_sgd(mlp()), num_groups=2)


def a_group_leaves_as_one() -> None:
    model = mlp()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model), groups=[[model[4].bias, model[0].weight]])
    if hvd.size() == 1:
        return
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(model, hvd.rank(), 0).backward()
        optimizer.step()
    arrived: list[bool] = []
    model[2].weight.register_post_accumulate_grad_hook(
        lambda _: arrived.append(optimizer._gradients.reducers[0].pipeline.pending)
    )
    optimizer.zero_grad()
    mean_square(model, hvd.rank(), 0).backward()
    # The last layer's weight is ready before the middle one. Its bias waits for the first layer's weight.
    sync = optimizer._gradients.reducers[0].pipeline
    order = [sync._buffers.names[position] for position in sync._ready.positions]
    assert order.index("parameter.5") > order.index("parameter.2")
    assert abs(order.index("parameter.5") - order.index("parameter.0")) == 1
    optimizer.step()


def adasum_of_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return Adasum of two vectors by the textbook formula."""
    product = float(a.flatten() @ b.flatten())
    return (1 - product / (2 * float(a.norm() ** 2))) * a + (1 - product / (2 * float(b.norm() ** 2))) * b


def adasum_combines_updates() -> None:
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(NotImplementedError):
            hvd.DistributedOptimizer(plain_sgd(mlp()), op=hvd.Adasum)
        return
    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), op=hvd.Adasum)
    replicas = [mlp() for _ in range(hvd.size())]
    theirs = [torch.optim.Adam(replica.parameters(), lr=0.01) for replica in replicas]
    for iteration in range(4):
        optimizer.zero_grad()
        mean_square(model, hvd.rank(), iteration).backward()
        optimizer.step()
        starts = [param.detach().clone() for param in replicas[0].parameters()]
        for rank, (replica, each) in enumerate(zip(replicas, theirs, strict=True)):
            each.zero_grad()
            mean_square(replica, rank, iteration).backward()
            each.step()
        for number, start in enumerate(starts):
            params = [list(replica.parameters())[number] for replica in replicas]
            updates = [param.detach() - start for param in params]
            while len(updates) > 1:
                updates = [adasum_of_two(a, b) for a, b in zip(updates[::2], updates[1::2], strict=True)]
            for param in params:
                param.data.copy_(start + updates[0])
        assert_same_parameters(model, replicas[0], 1e-9)
    optimizer.synchronize()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="Skipping synchronization"), optimizer.skip_synchronize():
            pass


def a_process_set_that_is_removed_closes_its_optimizers() -> None:
    if hvd.size() < 3:
        return
    evens, odds = (hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1))
    mine, model = evens if evens.included() else odds, mlp()
    both = hvd.DistributedOptimizer(plain_sgd(model), process_set=mine)
    train(model, both, 2)
    hvd.barrier()
    assert_same_training(mlp(), mean_square)
    assert hvd.remove_process_set(evens)
    removed = mine is evens
    if removed:
        with pytest.raises(NotInitializedError, match=r"closed when its process set was removed; make a new one"):
            both.step()
    # Hooks are removed on ranks outside the set; the remaining ranks continue.
    mean_square(model, hvd.rank(), 0).backward()
    if not removed:
        both.step()
    assert_same_training(mlp(), mean_square)
    unopened = hvd.ProcessSet([0])
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.DistributedOptimizer(plain_sgd(mlp()), process_set=unopened)


def copies_and_pickles_are_plain_optimizers() -> None:
    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.03))
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    mean_square(model, hvd.rank(), 0).backward()
    optimizer.step()
    restored = pickle.loads(pickle.dumps(optimizer))
    assert type(restored) is torch.optim.Adam
    assert restored.param_groups[0]["lr"] == 0.03
    assert type(copy.deepcopy(optimizer)) is torch.optim.Adam
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    again = mlp()
    again.load_state_dict(loaded["model"])
    other = hvd.DistributedOptimizer(torch.optim.Adam(again.parameters(), lr=0.5))
    other.load_state_dict(loaded["optimizer"])
    for net, each in ((model, optimizer), (again, other)):
        each.zero_grad()
        mean_square(net, hvd.rank(), 1).backward()
        each.step()
    assert_same_parameters(model, again, 0.0)


def gradients_that_are_missing_are_told() -> None:
    if hvd.size() == 1:
        return
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(plain_sgd(model), model.named_parameters())

    def told() -> str:
        return next(text for text in job.current().watchdog.progress() if "has not computed" in text)

    model[3](torch.ones(1, 4)).sum().backward()
    assert re.fullmatch(r"is in iteration \d+, has not computed (\d\.\w+, ){4}\d\.\w+ and 1 more", told()), told()
    model[2](torch.ones(1, 4)).sum().backward()
    assert re.fullmatch(r"is in iteration \d+, has not computed (\d\.\w+, ){3}\d\.\w+", told()), told()
    optimizer.step()
    optimizer.zero_grad()


def mistakes_are_named() -> None:
    model = mlp()
    plain = plain_sgd(model)
    named = list(model.named_parameters())
    for message, options in {
        "must be > 0": {"backward_passes_per_step": 0},
        "gradient_predivide_factor not supported": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "must be unique": {"named_parameters": [*named, named[0]]},
        "sequence of tuples": {"named_parameters": model.parameters()},
        "were not named": {"named_parameters": named[1:]},
        "op=Average": {"op": hvd.Max},
        "groups should be": {"groups": -1},
        "list of list": {"groups": [model[0].weight]},
        "only appear once": {"groups": [[model[0].weight], [model[0].weight]]},
    }.items():
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(plain, **options)
    optimizer = hvd.DistributedOptimizer(plain)
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.set_backward_passes_per_step(0)
    if hvd.size() == 1:
        return
    mean_square(model, 0, 0).backward(inputs=list(model[0].parameters()))
    with pytest.raises(AssertionError, match="race condition"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        mean_square(model, 0, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match="disagree about the model"):
        hvd.DistributedOptimizer(plain_sgd(nn.Linear(3, 3 + (hvd.rank() == 1))))
    with pytest.raises(hvd.HorovodInternalError, match="disagree about the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3 + hvd.rank()))]})
    optimizer.zero_grad()
    mean_square(model, 0, 0).backward()
    with pytest.raises(NotInitializedError, match="closed because a change of its parameters failed; make a new one"):
        optimizer.step()
    inner = (2 * torch.ones(3, requires_grad=True)).requires_grad_()
    inner.retain_grad()
    with pytest.raises(RuntimeError, match="non-leaf"):
        hvd.DistributedOptimizer(torch.optim.SGD([inner], lr=0.1))
    assert_same_training(mlp(), mean_square)


FEATURES = cases(globals())


# ── Optimizers that come, go and share parameters: wrapped again, dropped, closed, one encoder in severa ─────────────


class Trunk(nn.Module):
    """Two layers that all heads share, and three heads."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.low, self.high = nn.Linear(width, width), nn.Linear(width, width)
        self.heads = nn.ModuleList(nn.Linear(width, 3) for _ in range(3))
        self.double()

    def parts(self, *names: str) -> list[nn.Parameter]:
        modules = dict(self.named_modules())
        return [param for name in names for param in modules[name].parameters()]


SETS = (("low", "high", "heads.0"), ("low", "high", "heads.1"), ("high", "heads.2", "heads.0"))
"""Parameters of three optimizers: the second one shares the trunk with the first, the third one has parts of both."""


def loss_of(number: int) -> Callable[[nn.Module, int, int], torch.Tensor]:
    """Return the loss of optimizer `number`, which reaches all its parameters."""

    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        hidden = batch(rank, 10 * iteration + number, 4, 12)
        low = torch.tanh(model.low(hidden))
        hidden = torch.tanh(model.high(low.detach() if number == 2 else low))
        total = model.heads[number](hidden).square().mean()
        return total + model.heads[0](hidden).square().mean() if number == 2 else total

    return loss


def make(model: Trunk, count: int, *, momentum: float = 0.0) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parts(*names), lr=0.05, momentum=momentum) for names in SETS[:count]]


def turn(optimizers: Sequence[torch.optim.Optimizer], loss: torch.Tensor, order: Sequence[int]) -> None:
    for number in order:
        optimizers[number].zero_grad()
    loss.backward()
    for number in order:
        optimizers[number].step()


def shared_with_other_options_is_an_error_on_all_ranks() -> None:
    if hvd.size() == 1:  # one rank reduces nothing
        return
    model = Trunk()
    first = hvd.DistributedOptimizer(make(model, 2)[0])
    for options, words in (
        ({"backward_passes_per_step": 2}, "backward_passes_per_step=1"),
        ({"op": hvd.Sum}, "op or gradient_predivide_factor"),
        ({"compression": hvd.Compression.bf16}, "compression"),
        ({"sparse_as_dense": True}, "sparse_as_dense"),
    ):
        with pytest.raises(ValueError, match=rf"low\.weight.*{words}.*close\(\)"):
            hvd.DistributedOptimizer(make(model, 2)[1], named_parameters=model.named_parameters(), **options)
    first.close()
    hvd.DistributedOptimizer(make(model, 2)[1], backward_passes_per_step=2)


def wrapping_twice_is_an_error() -> None:
    optimizer = hvd.DistributedOptimizer(sgd(Trunk()))
    with pytest.raises(ValueError, match=r"SGD is a DistributedOptimizer already.*torch\.optim\.SGD"):
        hvd.DistributedOptimizer(optimizer)
    if hvd.size() & (hvd.size() - 1) == 0:
        with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(Trunk()), op=hvd.Adasum))


def a_closed_optimizer_says_so() -> None:
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    train(model, optimizer, 2)
    optimizer.close()
    optimizer.close()
    for use in (optimizer.step, optimizer.synchronize, lambda: optimizer.add_param_group({"params": []})):
        with pytest.raises(NotInitializedError, match=r"closed by close\(\).*make a new one"):
            use()
    mean_square(model, 0, 0).backward()  # hooks are removed, so that nothing waits or is counted
    mean_square(model, 0, 0).backward()
    optimizer.zero_grad()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for iteration in range(steps):
        optimizer.zero_grad()
        mean_square(model, hvd.rank(), iteration).backward()
        optimizer.step()


def the_borrower_trains_on_when_the_owner_is_gone() -> None:
    for closes in (True, False):
        model = Trunk()
        alone = copy.deepcopy(model)
        theirs = make(alone, 2)
        owner, borrower = [hvd.DistributedOptimizer(each) for each in make(model, 2)]
        if closes:
            owner.close()
        del owner
        gc.collect()
        for iteration in range(5):
            turn([borrower], loss_of(1)(model, hvd.rank(), iteration), [0])
            turn(theirs, joined(loss_of(1), alone, iteration), [1])
            assert_same_parameters(model, alone, 1e-11, f"after step {iteration}")
        if hvd.size() > 1:
            assert not any(reducer.shared for reducer in borrower._gradients.reducers)


def dropped_on_one_rank_only() -> None:
    """Garbage collection runs at different times. An optimizer that one rank has dropped cannot be used on any rank."""
    model = Trunk()
    kept = [hvd.DistributedOptimizer(make(model, 1)[0])]
    if hvd.rank() == 0:
        kept.clear()
    gc.collect()
    alone = copy.deepcopy(model)
    optimizer, reference = hvd.DistributedOptimizer(make(model, 2)[1]), make(alone, 2)[1]
    for iteration in range(4):
        turn([optimizer], loss_of(1)(model, hvd.rank(), iteration), [0])
        turn([reference], joined(loss_of(1), alone, iteration), [0])
        assert_same_parameters(model, alone, 1e-11, f"after step {iteration}")
    if kept and hvd.size() > 1:
        with pytest.raises(NotInitializedError, match="another rank has dropped it"):
            kept[0].step()
        kept[0].zero_grad()
        assert all(param.grad is None for group in kept[0].param_groups for param in group["params"])


def dropped_between_backward_and_step() -> None:
    """In the first iteration ranks negotiate; in the fourth they may have launched units. Rank 0 computed nothing."""
    for steps in (0, 3):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model))
        train(model, optimizer, steps)
        if hvd.rank() > 0:
            # Computes some of the gradients, on some ranks.
            model[4](torch.ones(1, 160, dtype=torch.float64)).sum().backward()
        del optimizer
        gc.collect()
        model = mlp(seed=1)
        assert_same_training(model, mean_square, steps=3)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    model[4](batch(hvd.rank(), 0, 1, 160)).sum().backward()
    optimizer = hvd.DistributedOptimizer(sgd(model))  # takes over gradients in flight
    optimizer.step()
    assert_equal_on_all_ranks(model)


def fail(model: Trunk, *heads: int) -> None:
    """Run a backward pass that raises after it has passed these heads and the upper layer."""
    hidden = model.high(Raises.apply(model.low(batch(hvd.rank(), 0, 4, 12))))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="half-way"):
        sum((model.heads[head](hidden).sum() for head in heads), torch.zeros(())).backward()


def goes_on_alone(model: Trunk, optimizer: torch.optim.Optimizer, number: int) -> None:
    """After a failed pass, train with this optimizer only, and with a plain one in one process."""
    model.zero_grad()
    alone = copy.deepcopy(model)
    reference = make(alone, number + 1)[number]
    for iteration in range(3):
        loss_of(number)(model, hvd.rank(), iteration).backward()
        optimizer.step()
        model.zero_grad()
        turn([reference], joined(loss_of(number), alone, iteration), [0])
        assert_same_parameters(model, alone, 1e-11, f"after step {iteration}")


def one_that_has_failed_is_dropped_on_one_rank_only_before_another_fails() -> None:
    models = [Trunk() for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(make(model, 1)[0]) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        goes_on_alone(model, optimizer, 0)
    fail(models[0], 0)
    if hvd.rank() == 0:
        del optimizers[0], optimizer
        gc.collect()
    fail(models[1], 0)
    goes_on_alone(models[1], optimizers[-1], 0)


def of_two_that_fail_in_one_pass_one_is_dropped_and_collected_on_one_rank_only() -> None:
    models = [Trunk() for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(make(model, 1)[0]) for model in models]
    hidden = Raises.apply(models[0].low(batch(hvd.rank(), 0, 4, 12)))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="half-way"):
        sum((model.heads[0](model.high(hidden)).sum() for model in models), torch.zeros(())).backward()
    trainer: dict[str, object] = {"optimizer": optimizers.pop(0)}
    trainer["callback"] = trainer  # a reference cycle, which only the garbage collector ends
    gc.disable()
    try:
        del trainer
        if hvd.rank() == 0:
            gc.collect()
        goes_on_alone(models[1], optimizers[0], 0)
    finally:
        gc.enable()


def one_that_has_failed_waits_while_another_goes_on() -> None:
    models = [Trunk() for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(make(model, 1)[0]) for model in models]
    for number in (0, 1):
        fail(models[number], 0)
    for number in (1, 0, 1):
        goes_on_alone(models[number], optimizers[number], 0)


LIFETIMES = cases(globals())


# ── Optimizers that are dropped, jobs that begin and end: nothing of them is left ────────────────────────────────────

SETTLING_S = 20.0


def in_use() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "reducers": len(list(job.current().participants)) if hvd.is_initialized() else 0,
    }


def stays_flat(what: Callable[[], None], times: int) -> None:
    """Check that `what` does not use more and more memory or descriptors. Collective."""
    what()  # opens resources that a job needs once
    what()
    gc.collect()
    job.current().disposal.drain()
    before = in_use()
    for _ in range(times):
        what()
    deadline = time.monotonic() + SETTLING_S
    while (more := {name for name, count in in_use().items() if count > before[name]}) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert not more, f"{before} became {in_use()}"


def dropped_optimizers_leave_nothing(times: int = 4) -> None:
    def make_and_drop() -> None:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model))
        train(model, optimizer, 4)

    stays_flat(make_and_drop, times)


def optimizers_in_reference_cycles_are_collected() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.optimizer = hvd.DistributedOptimizer(sgd(self.model))
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
            self.model.trainer = [self]
            for param in self.model.parameters():
                param.register_hook(lambda grad: self.seen(grad))

        def seen(self, grad: torch.Tensor) -> torch.Tensor:
            return grad

    def once() -> weakref.ref[nn.Module]:
        trainer = Trainer()
        train(trainer.model, trainer.optimizer, 3)
        trainer.scheduler.step()
        return weakref.ref(trainer.model)

    def make_and_drop() -> None:
        model = once()
        deadline = time.monotonic() + SETTLING_S
        while model() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.02)
        assert model() is None

    stays_flat(make_and_drop, 2)


def added_parameter_groups_leave_nothing(times: int = 4) -> None:
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model))

    def add() -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float64))]})
        train(model, optimizer, 3)

    stays_flat(add, times)


def starting_and_ending_leaves_nothing(times: int = 3) -> None:
    def cycle() -> None:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model))
        train(model, optimizer, 3)
        hvd.shutdown()
        with pytest.raises(NotInitializedError, match=r"closed by shutdown\(\)"):
            optimizer.step()
        optimizer.zero_grad()  # does not affect the other optimizers
        assert all(param.grad is None for param in model.parameters())
        hvd.init()

    if hvd.size() > 1:
        stays_flat(cycle, times)


def memory_is_returned() -> None:
    """Memory of the model, and of the flat buffers of all ranks of the node."""

    def make_and_drop() -> weakref.ref[nn.Module]:
        model = nn.Linear(512, 1024).double()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 512, dtype=torch.float64)).sum().backward()
            optimizer.step()
        return weakref.ref(model)

    before = shared_bytes()
    model = make_and_drop()
    deadline = time.monotonic() + SETTLING_S
    while (model() is not None or shared_bytes() > before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert model() is None
    assert shared_bytes() <= before


def shared_bytes() -> int:
    """Return the bytes of shared memory that this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "memfd:sirtaki" in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


LEFTOVERS = cases(globals())


def many_dropped_optimizers_leave_nothing() -> None:
    dropped_optimizers_leave_nothing(50)


def many_added_parameter_groups_leave_nothing() -> None:
    added_parameter_groups_leave_nothing(50)


def starting_and_ending_many_times_leaves_nothing() -> None:
    starting_and_ending_leaves_nothing(50)


MANY_LEFTOVERS = cases(globals())


if __name__ == "__main__":
    main([*TRAINING, *TYPES, *FEATURES, *LIFETIMES, *LEFTOVERS, *MANY_LEFTOVERS])
