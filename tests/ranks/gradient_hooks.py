"""Hooks that change local gradients before averaging, compared with the same hooks under plain DDP in float64.

Started by test_gradient_hooks.py. Each case trains a model with each of Sirtaki's interfaces, and a copy under DDP over
Gloo, and compares their parameters after each step.
"""

import copy
import functools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from conformance.ddp import STEPS, assert_same, attached, batch, dense_loss, dense_model, sgd
from conformance.training import main, raises
from rank_jobs import cases
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError, GradientError
from sirtaki.torch import fsdp
from sirtaki.torch.ddp import IdleReducer

SHARDS: list[Callable[[nn.Module], object]] = []
"""`fully_shard` and `replicate`; empty with older versions of PyTorch."""

with suppress(ImportError):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    SHARDS += [fully_shard, replicate]

Hook = Callable[[nn.Module], list[object]]
"""Function that registers hooks, and returns their handles and objects that must be kept."""

Trained = tuple[nn.Module, torch.optim.Optimizer]
"""The callable model, and the optimizer of its parameters."""

CLIP = 0.01


@functools.cache
def backend() -> dist.ProcessGroup:
    """Return a process group over Gloo. Collective."""
    return dist.new_group(backend="sirtaki")


def by_attach(model: nn.Module) -> Trained:
    return attached(model), sgd(model)


def by_backend(model: nn.Module) -> Trained:
    return DistributedDataParallel(model, process_group=backend()), sgd(model)


def by_optimizer(model: nn.Module) -> Trained:
    return model, hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())


def by_ddp(model: nn.Module) -> Trained:
    return DistributedDataParallel(model), sgd(model)


WAYS = (by_attach, by_backend, by_optimizer)


def trains_as_ddp(
    hook: Hook,
    *,
    early: tuple[bool, ...] = (True, False),
    make: Callable[[], nn.Module] = dense_model,
    steps: range = range(STEPS),
    to_none: bool = True,
) -> None:
    """Compare all interfaces with DDP. Collective.

    Args:
        hook: registers the hooks.
        early: whether hooks are registered before the model is wrapped.
        make: creates the model.
        steps: steps in which the hooks are registered, of `STEPS`.
        to_none: how gradients are zeroed.
    """
    for way in WAYS:
        for before in early:
            models, trained = [make(), make()], list[Trained]()
            kept: list[object] = []
            for each, wrap in zip(models, (way, by_ddp), strict=True):
                handles = hook(each) if before else []
                trained.append(wrap(each))
                kept += handles
            for step in range(STEPS):
                if step == steps.start and not before:
                    kept = [handle for each in models for handle in hook(each)]
                if step == steps.stop:
                    for handle in kept:
                        if hasattr(handle, "remove"):
                            handle.remove()
                for call, optimizer in trained:
                    optimizer.zero_grad(set_to_none=to_none)
                    dense_loss(call, dist.get_rank(), step).backward()
                    optimizer.step()
                assert_same(*models, f"{way.__name__}, hooks {'before' if before else 'after'}, step {step}")
            if hasattr(trained[0][1], "close"):
                trained[0][1].close()


def of_each(hook: Callable[[torch.Tensor], None]) -> Hook:
    """Register the same post-accumulate-grad hook on all parameters."""
    return lambda model: [param.register_post_accumulate_grad_hook(hook) for param in model.parameters()]


def replace(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad.clamp(-CLIP, CLIP)


def write(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-CLIP, CLIP)


def half(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def gradients_may_be_replaced_in_hooks() -> None:
    trains_as_ddp(of_each(replace))
    trains_as_ddp(of_each(replace), to_none=False)


def gradients_may_be_written_in_hooks() -> None:
    trains_as_ddp(of_each(write))
    trains_as_ddp(of_each(write), to_none=False)


def hooks_may_come_and_go_while_a_model_is_trained() -> None:
    for hook in (replace, write):
        trains_as_ddp(of_each(hook), early=(False,), steps=range(3, 6))
        trains_as_ddp(of_each(hook), early=(True,), steps=range(4))


def hooks_may_be_on_parameters_that_are_thawed_while_a_model_is_trained() -> None:
    model = dense_model()
    alone = copy.deepcopy(model)
    for each in (model, alone):
        each[0].requires_grad_(False)
    call, optimizer = by_optimizer(model)
    reference = sgd(alone)
    for step in range(STEPS):
        if step == 2:
            for each in (model, alone):
                each[0].requires_grad_(True)
        if step == 5:
            of_each(half)(model)
            of_each(half)(alone)
        for each in (optimizer, reference):
            each.zero_grad()
        loss = dense_loss(call, dist.get_rank(), step)  # its graph is alive when unfrozen parameters get their hooks
        loss.backward()
        optimizer.step()
        size = dist.get_world_size()
        sum(dense_loss(alone, rank, step) for rank in range(size)).div(size).backward()  # type: ignore[union-attr]
        reference.step()
        assert_same(model, alone, f"step {step}")
    optimizer.close()  # type: ignore[attr-defined]


def hooks_may_be_of_some_ranks_and_parameters_only() -> None:
    def some(model: nn.Module) -> list[object]:
        params = list(model.parameters())
        mine = params[:: 2 + dist.get_rank()]
        return [param.register_post_accumulate_grad_hook(write) for param in mine]

    trains_as_ddp(some)


def several_hooks_run_in_their_order() -> None:
    def twice(model: nn.Module) -> list[object]:
        return [*of_each(replace)(model), *of_each(half)(model)]

    trains_as_ddp(twice)


def a_hook_may_register_another_one() -> None:
    def grows(model: nn.Module) -> list[object]:
        param = next(model.parameters())
        last = list(model.parameters())[-1]
        handles: list[object] = []

        def register(_: torch.Tensor) -> None:
            if not handles:
                handles.append(param.register_post_accumulate_grad_hook(write))

        return [last.register_post_accumulate_grad_hook(register)]

    trains_as_ddp(grows)


def hooks_of_tensors_and_modules_count() -> None:
    def of_tensors(model: nn.Module) -> list[object]:
        return [param.register_hook(lambda gradient: gradient.clamp(-CLIP, CLIP)) for param in model.parameters()]

    def of_modules(model: nn.Module) -> list[object]:
        def halve(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(gradient / 2 for gradient in gradients)

        return [
            model[1].register_full_backward_hook(lambda _, given, __: halve(given)),
            model[2].register_full_backward_pre_hook(lambda _, given: halve(halve(given))),
        ]

    trains_as_ddp(of_tensors)
    trains_as_ddp(of_modules)


def hooks_on_the_nodes_that_accumulate_count_if_they_were_there_before() -> None:
    def on_nodes(model: nn.Module) -> list[object]:
        found: list[object] = []
        for param in model.parameters():
            node = get_gradient_edge(param).node
            found += [node, node.register_hook(lambda _, __, param=param: write(param))]
        return found

    trains_as_ddp(on_nodes, early=(True,))
    trains_as_ddp(lambda model: [*on_nodes(model), *of_each(replace)(model)], early=(True,))


def a_gradient_that_a_hook_sets_to_none_counts_as_zeros() -> None:
    def dropped(ranks: tuple[int, ...]) -> Hook:
        def drop(param: torch.Tensor) -> None:
            if dist.get_rank() in ranks and param.dim() == 1:
                param.grad = None

        return of_each(drop)

    trains_as_ddp(dropped((0,)))
    trains_as_ddp(dropped(tuple(range(dist.get_world_size()))))


def a_gradient_that_comes_to_nothing_counts_as_zeros() -> None:
    """Autograd reaches a bias and computes no gradient for it, as in a double backward."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return gradient, None

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.bias = dense_model(), nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return Nothing.apply(self.inner(inputs), self.bias)  # type: ignore[no-any-return,no-untyped-call]

    trains_as_ddp(lambda model: [], make=Biased, early=(True,))


@contextmanager
def warnings_of_sirtaki() -> Iterator[list[str]]:
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sirtaki").addHandler(listener)
    yield said
    logging.getLogger("sirtaki").removeHandler(listener)


def hooks_may_change_parameters_and_are_warned_of() -> None:
    def bound(param: torch.Tensor) -> None:
        with torch.no_grad():
            param.clamp_(-0.2, 0.2)

    with warnings_of_sirtaki() as said:
        trains_as_ddp(of_each(bound))
    assert len(said) <= 1
    assert any("a hook changes " in each for each in said), said


def an_optimizer_that_steps_in_hooks_is_refused() -> None:
    for way in (by_attach, by_optimizer):
        for before in (True, False):
            model = dense_model()
            inside = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

            def step(param: torch.Tensor, inside: dict[torch.Tensor, torch.optim.SGD] = inside) -> None:
                inside[param].step()
                inside[param].zero_grad()

            if before:
                of_each(step)(model)
            call, optimizer = way(model)
            if not before:
                of_each(step)(model)
            raises(GradientError, "must not step in a hook", dense_loss(call, dist.get_rank(), 0).backward)
            if hasattr(optimizer, "close"):
                optimizer.close()


def hooks_stay_right_where_parameters_change_their_form() -> None:
    """When the dtype of a parameter changes, the hook on its node is lost, and its gradient is still averaged."""
    for before in (True, False):
        results = []
        for way in (by_attach, by_ddp):
            model = dense_model()
            kept = of_each(write)(model) if before else []
            call, optimizer = way(model)
            kept = kept or of_each(write)(model)
            for step in range(4):
                if way is by_attach and step == 2:
                    for param in model.parameters():
                        param.data = param.data.float()
                        param.data = param.data.double()
                optimizer.zero_grad()
                dense_loss(call, dist.get_rank(), step).backward()
                optimizer.step()
            results.append(model)
        for one, other in zip(*(model.parameters() for model in results), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def hooks_count_where_a_gradient_comes_several_times() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(17)
            self.first, self.shared = nn.Linear(6, 8).double(), nn.Linear(8, 8).double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(inputs))
            for _ in range(2):
                hidden = checkpoint(self.shared, torch.tanh(hidden), use_reentrant=True)
            return hidden

    model = Shared()
    alone = copy.deepcopy(model)
    call, optimizer = attached(model, static_graph=True), sgd(model)
    of_each(half)(model)
    of_each(half)(alone)
    reference = sgd(alone)
    for step in range(STEPS):
        optimizer.zero_grad()
        dense_loss(call, dist.get_rank(), step).backward()
        optimizer.step()
        total = [torch.zeros_like(param) for param in alone.parameters()]
        for rank in range(dist.get_world_size()):
            alone.zero_grad()
            dense_loss(alone, rank, step).backward()
            for each, param in zip(total, alone.parameters(), strict=True):
                each += param.grad / dist.get_world_size()  # type: ignore[operator]
        for each, param in zip(total, alone.parameters(), strict=True):
            param.grad = each
        reference.step()
        assert_same(model, alone, f"step {step}")


def hooks_of_sharded_models_do_what_they_do_without_sirtaki() -> None:
    def double(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad * 2

    for hook in (half, double) if SHARDS else ():
        models = [dense_model().float(), dense_model().float()]
        for model in models:
            for layer in (model[0], model[2]):
                fully_shard(layer)
            fully_shard(model)
        fsdp.attach(models[0])
        optimizers = [sgd(model) for model in models]
        for step in range(STEPS):
            if step == 3:
                for model in models:
                    of_each(hook)(model)
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(batch(dist.get_rank(), step, 5, 6).float()).square().mean().backward()
                optimizer.step()
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-5, atol=1e-5)


def hooks_on_the_copies_that_replicated_models_compute_with_count() -> None:
    """In a forward pass under FSDP2's `replicate()`, a module's parameter is the copy whose gradient is reduced."""

    class Watched(nn.Linear):
        late, hooked = False, False

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.late and not self.hooked:
                self.hooked = True
                self.weight.register_post_accumulate_grad_hook(write)
            return super().forward(inputs)

    if not SHARDS:
        return
    models = []
    for sirtaki in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(Watched(6, 8), nn.Tanh(), Watched(8, 3))
        for layer in (model[0], model[2]):
            replicate(layer)
        replicate(model)
        if sirtaki:
            fsdp.attach(model)
        models.append(model)
    optimizers = [sgd(model) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            model[0].late = model[2].late = step >= 2
            optimizer.zero_grad()
            model(batch(dist.get_rank(), step, 5, 6).float()).square().mean().backward()
            optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-5, atol=1e-6)


# ── torch.distributed.autograd ───────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def start_rpc() -> None:
    """Initialise PyTorch's RPC. Collective."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # because PyTorch warns of its own code
        rpc.init_rpc(
            f"rank{dist.get_rank()}",
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder[0]}/rpc"),
        )


def distributed_gradients(call: nn.Module, model: nn.Module, step: int) -> list[torch.Tensor | None]:
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [dense_loss(call, dist.get_rank(), step)])
        found = dist_autograd.get_gradients(context)
        return [found.get(param) for param in model.parameters()]


def distributed_autograd_is_averaged_as_by_ddp() -> None:
    start_rpc()

    def backend_again(model: nn.Module, **options: object) -> nn.Module:
        return DistributedDataParallel(model, process_group=backend(), **options)  # type: ignore[arg-type]

    for wrap in (attached, backend_again):
        for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
            model = dense_model()
            plain = copy.deepcopy(model)
            call, reference = wrap(model, **options), DistributedDataParallel(plain, **options)
            for step in range(6):
                if step in (2, 3):  # changes `.grad` between passes
                    for each, wrapped in ((model, call), (plain, reference)):
                        each.zero_grad()
                        dense_loss(wrapped, dist.get_rank(), step).backward()
                    pairs = zip(model.parameters(), plain.parameters(), strict=True)
                    for found, wanted in ((one.grad, other.grad) for one, other in pairs):
                        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
                    continue
                ours = distributed_gradients(call, model, step)
                theirs = distributed_gradients(reference, plain, step)
                for found, wanted in zip(ours, theirs, strict=True):
                    assert (found is None) == (wanted is None)
                    if found is not None:
                        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
            assert isinstance(call.reducer, IdleReducer)


def distributed_autograd_that_cannot_be_averaged_is_refused() -> None:
    start_rpc()

    def backward(loss: torch.Tensor) -> None:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss])

    model = attached(dense_model())
    with warnings_of_sirtaki() as said:
        raises(RuntimeError, "python_error", partial(backward, dense_loss(model, 0, 0)))
    assert any("outside of that context" in each for each in said), said
    static = attached(dense_model(), static_graph=True)
    with dist_autograd.context():
        raises(ConfigError, "static_graph=True", lambda: dense_loss(static, 0, 0))
    plain, optimizer = by_optimizer(dense_model())
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [dense_loss(plain, dist.get_rank(), 0)])
        raises(GradientError, "copy gradients", optimizer.step)
    optimizer.close()
    for shard in SHARDS:
        sharded = nn.Linear(6, 3)
        shard(sharded)
        fsdp.attach(sharded)
        with dist_autograd.context():
            raises(ConfigError, "do not average gradients", lambda: sharded(torch.ones(2, 6)))  # noqa: B023


CASES = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    attached(dense_model())  # the first attach initialises the job
    main(CASES)
    if start_rpc.cache_info().currsize:
        rpc.shutdown()
    dist.destroy_process_group()
