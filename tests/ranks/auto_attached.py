"""Models of scripts that know nothing of Sirtaki, with SIRTAKI_ATTACH=auto. Started by test_auto_attach.py.

A model with a communication hook stays DDP's own. Each case trains one such model beside the attached one.
"""

import copy
import logging
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from conformance.ddp import dense_loss, dense_model, ranks
from conformance.training import main
from rank_jobs import cases
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from sirtaki.torch_backend import register

register()  # as `import torch` does, which the server of the tests has done without the environment variable

from sirtaki.torch import ddp, fsdp  # noqa: E402  # imported here, because a script imports them after torch

Play = Callable[[nn.Module, torch.optim.Optimizer], None]


class Said(logging.Handler):
    """The log lines of Sirtaki while a `with` block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("sirtaki").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("sirtaki").removeHandler(self)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1, momentum=0.9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, n: int = 5) -> None:
    for step in range(first, first + n):
        optimizer.zero_grad()
        with model.no_sync() if step % 3 == 1 else nullcontext():
            dense_loss(model, dist.get_rank(), step).backward()
        if step % 3 == 1:
            dense_loss(model, dist.get_rank(), 100 + step).backward()
        optimizer.step()


def step_beside(model: nn.Module, alone: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
    """Train a step of a distributed model, and of `alone`, which gets the batches of all ranks."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    dense_loss(model, dist.get_rank(), step).backward()
    sum(dense_loss(alone, rank, step) for rank in ranks()).div(len(ranks())).backward()
    for optimizer in optimizers:
        optimizer.step()


def beside_ddp(play: Play, make: Callable[[], nn.Module] = dense_model, **options: object) -> DistributedDataParallel:
    """Train one model that is attached, and one that stays DDP's own. Compare them, and return the first one."""
    watched, own = (DistributedDataParallel(make(), **options) for _ in range(2))
    own.register_comm_hook(None, allreduce_hook)
    for model in (own, watched):
        play(model, sgd(model))
    for found, wanted in zip(watched.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    assert not ddp.is_attached(own)
    return watched


def ddp_models_are_attached_after_their_first_step() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        assert ddp.is_attached(beside_ddp(steps, **options))


def one_rank_may_evaluate_the_model_first() -> None:
    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if dist.get_rank() == 0:
            dense_loss(model.module, 0, 0)
        with torch.no_grad():
            dense_loss(model, dist.get_rank(), 0)
        assert not ddp.is_attached(model)
        steps(model, optimizer)

    assert ddp.is_attached(beside_ddp(play))


def gradients_accumulate_by_an_attribute_of_ddp_and_rank_0_alone_evaluates() -> None:
    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # as nanoGPT does
        for step in range(5):
            if dist.get_rank() == 0:
                with torch.no_grad():
                    dense_loss(model, 0, 50)
            for micro_step in range(3):
                model.require_backward_grad_sync = micro_step == 2
                dense_loss(model, dist.get_rank(), 10 * step + micro_step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    assert ddp.is_attached(beside_ddp(play))


def models_are_attached_at_the_end_of_a_join() -> None:
    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for first in (0, 20):
            with model.join():
                for step in range(first, first + 1 + dist.get_rank()):
                    optimizer.zero_grad()
                    dense_loss(model, dist.get_rank(), step).backward()
                    optimizer.step()
            for param in model.parameters():
                dist.broadcast(param.data, dist.get_world_size() - 1)
            optimizer.state.clear()

    assert ddp.is_attached(beside_ddp(play))


def two_models_train_in_turns_as_in_a_gan() -> None:
    made: list[DistributedDataParallel] = []

    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        other = DistributedDataParallel(dense_model())
        if not made:
            other.register_comm_hook(None, allreduce_hook)
        made.append(other)
        against = sgd(other)
        for step in range(4):
            against.zero_grad()
            # Adds to the gradients of both models, but only one of them steps.
            (dense_loss(other, dist.get_rank(), step) + dense_loss(model, dist.get_rank(), step)).backward()
            against.step()
            optimizer.zero_grad()
            dense_loss(model, dist.get_rank(), step).backward()
            optimizer.step()

    assert ddp.is_attached(beside_ddp(play))
    assert [ddp.is_attached(other) for other in made] == [False, True]
    for found, wanted in zip(*(other.parameters() for other in made), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def a_model_may_train_in_another_thread() -> None:
    """Backward passes of GPUs end in a thread of autograd."""

    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        thread = threading.Thread(target=steps, args=(model, optimizer))
        thread.start()
        thread.join()

    assert ddp.is_attached(beside_ddp(play))


def parameters_may_be_frozen_before_the_first_step() -> None:
    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(5):
            next(model.parameters()).requires_grad_(step >= 2)
            optimizer.zero_grad()
            dense_loss(model, dist.get_rank(), step).backward()
            optimizer.step()

    assert ddp.is_attached(beside_ddp(play, find_unused_parameters=True))


def parameters_may_be_renamed_before_the_first_step() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        model.module = nn.Sequential(model.module)  # as a wrapper of torch.compile or of checkpoints does
        steps(model, optimizer)

    assert ddp.is_attached(beside_ddp(play))


def a_model_that_was_given_back_before_its_first_step_stays_ddps() -> None:
    model = DistributedDataParallel(dense_model())
    assert not ddp.detach(model)
    steps(model, sgd(model), n=2)
    assert not ddp.is_attached(model)
    ddp.attach(model)
    steps(model, sgd(model), n=2)


def copies_stay_pytorchs() -> None:
    model = DistributedDataParallel(dense_model())
    steps(model, sgd(model), n=1)
    assert ddp.is_attached(model)
    for twin in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        dense_loss(twin, dist.get_rank(), 0).backward()
        assert not isinstance(getattr(twin, "reducer", None), ddp.IdleReducer)
    again = DistributedDataParallel(model.module)
    steps(again, sgd(again))
    assert ddp.is_attached(again)


def a_child_process_trains_by_itself() -> None:
    """A forked child has a model of its own, and a script may start it before the first step."""
    for attached_first in (False, True):
        model = DistributedDataParallel(dense_model())
        if attached_first:
            steps(model, sgd(model))
        if (child := os.fork()) == 0:
            failed = 1
            try:
                own = dense_model()
                dense_loss(own, 0, 0).backward()
                failed = 0
            finally:
                os._exit(failed)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        steps(model, sgd(model))
        assert ddp.is_attached(model)


def activations_may_be_computed_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = dense_model(), reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)

    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(5):
            optimizer.zero_grad()
            dense_loss(model, dist.get_rank(), step).backward()
            optimizer.step()

    for reentrant in (False, True):
        assert ddp.is_attached(beside_ddp(play, lambda reentrant=reentrant: Checkpointed(reentrant)))


def models_may_be_compiled_before_or_after_wrapping() -> None:
    def compiles(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(4):
            optimizer.zero_grad()
            dense_loss(compiled, dist.get_rank(), step).backward()
            optimizer.step()

    assert ddp.is_attached(beside_ddp(compiles))
    assert ddp.is_attached(beside_ddp(steps, lambda: torch.compile(dense_model(), backend="aot_eager")))


def parameters_may_be_frozen_in_the_middle() -> None:
    """DDP itself raises an error in the next step. An attached model trains its other parameters."""
    model, alone = dense_model(), dense_model()
    wrapped = DistributedDataParallel(model)
    optimizers = sgd(model), sgd(alone)
    for step in range(6):
        for each in (model, alone):
            next(each.parameters()).requires_grad_(step < 3)
        step_beside(wrapped, alone, optimizers, step)
        assert next(model.parameters()).grad is None or step < 3
    assert ddp.is_attached(wrapped)
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def data_may_come_from_forked_or_spawned_workers() -> None:
    rows = torch.arange(96.0).double().view(16, 6).sin()

    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for method in ("fork", "spawn"):
            loader = DataLoader(TensorDataset(rows + dist.get_rank()), 4, num_workers=1, multiprocessing_context=method)
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    assert ddp.is_attached(beside_ddp(play))


def hybrid_shards_are_attached() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if len(ranks()) != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    alone, model = dense_model(), dense_model()
    fully_shard(model, mesh=mesh)
    optimizers = sgd(model), sgd(alone)
    for step in range(4):
        step_beside(model, alone, optimizers, step)
    assert fsdp.is_attached(model)
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-11, atol=1e-11)


def models_that_ddp_reduces_in_its_own_way_stay_ddps() -> None:
    with Said() as lines:
        model = dense_model().float()
        late, shown = next(iter(model.named_parameters())), list(model.parameters())[-1]
        delayed = DistributedDataParallel(model, delay_all_reduce_named_params=[late], param_to_hook_all_reduce=shown)
        for _ in range(2):
            delayed(torch.ones(3, 6)).sum().backward()
        assert not ddp.is_attached(delayed)
        alone = [dist.new_group([rank]) for rank in ranks()][dist.get_rank()]
        own = DistributedDataParallel(dense_model(), process_group=alone)
        steps(own, sgd(own), n=2)
        assert not ddp.is_attached(own)
        if len(ranks()) > 2:
            pair = dist.new_group([0, 1])
            if dist.get_rank() < 2:
                half = DistributedDataParallel(dense_model(), process_group=pair)
                steps(half, sgd(half), n=2)
                assert not ddp.is_attached(half)
    if dist.get_rank() == 0:
        assert sum("delay_all_reduce" in line for line in lines) == 1
        assert sum("process group has 2 of the" in line for line in lines) == (len(ranks()) > 2)


def a_model_is_given_back_and_attached_again() -> None:
    def play(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        steps(model, optimizer)
        was = ddp.detach(model)
        steps(model, optimizer, first=10)
        if was:
            ddp.attach(model)
        steps(model, optimizer, first=20)

    assert ddp.is_attached(beside_ddp(play))


def composable_replicas_are_attached() -> None:
    from torch.distributed._composable.replicate import replicate

    def train(model: nn.Module, call: nn.Module) -> None:
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            dense_loss(call, dist.get_rank(), step).backward()
            optimizer.step()

    own, model = dense_model(), dense_model()
    wrapped = DistributedDataParallel(own)
    wrapped.register_comm_hook(None, allreduce_hook)
    train(own, wrapped)
    train(model, replicate(model))
    for found, wanted in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    assert ddp.detach(model)


def fsdp2_models_are_attached_and_given_back() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    makers = [fully_shard]
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        makers.append(replicate)
    except ImportError:  # before PyTorch 2.10
        pass
    mesh = init_device_mesh("cpu", (len(ranks()),))
    for make in makers:
        alone, model = dense_model(), dense_model()
        for layer in model:
            if isinstance(layer, nn.Linear):
                make(layer, mesh=mesh)
        make(model, mesh=mesh)
        optimizers = sgd(model), sgd(alone)
        for step in range(12):
            step_beside(model, alone, optimizers, step)
            for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-11, atol=1e-11)
            assert fsdp.is_attached(model) == (step <= 4 or step > 8), (make, step)
            if step == 4:
                assert fsdp.detach(model)
                assert not fsdp.detach(model)
            elif step == 8:
                fsdp.attach(model)


def fsdp2_models_in_mixed_precision_train_as_pytorchs() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (len(ranks()),))
    for reduce_dtype in (None, torch.float32):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        models = [dense_model().float() for _ in range(2)]
        for model in models:
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizers = [sgd(model) for model in models]
        for step in range(5):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                dense_loss(model, dist.get_rank(), step).backward()
                optimizer.step()
            if step == 0:
                assert all(map(fsdp.is_attached, models))
                fsdp.detach(models[1])
        for found, wanted in zip(*(model.parameters() for model in models), strict=True):
            tolerance = 0.0 if len(ranks()) == 2 else 1e-2  # sums of more than two bfloat16 depend on their order
            torch.testing.assert_close(found.to_local(), wanted.to_local(), rtol=tolerance, atol=tolerance)


def ddp_models_in_mixed_precision_stay_ddps() -> None:
    """Gradients are not compared, because PyTorch trains such models on GPUs only. On CPUs, they become NaN."""
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    # PyTorch orders the CUDA streams of its copies by these. On the CPU, it has neither.
    streams = mock.patch.object(torch, "Event", mock.MagicMock), mock.patch.object(torch.accelerator, "current_stream")
    with streams[0], streams[1], Said() as lines:
        model = DistributedDataParallel(dense_model().float(), mixed_precision=precision)
        for step in range(3):
            model.zero_grad()
            dense_loss(model, dist.get_rank(), step).float().backward()
    assert not ddp.is_attached(model)
    assert sum("DDP(mixed_precision=...)" in line for line in lines) == (dist.get_rank() == 0), lines


def fsdp1_models_stay_pytorchs() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with Said() as lines:
        for _ in range(2):
            alone = dense_model()
            model = FullyShardedDataParallel(dense_model(), device_id=torch.device("cpu"), use_orig_params=True)
            optimizers = sgd(model), sgd(alone)
            for step in range(3):
                step_beside(model, alone, optimizers, step)
            with FullyShardedDataParallel.summon_full_params(model):
                for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    assert sum("FSDP1" in line for line in lines) == (dist.get_rank() == 0), lines


CASES = cases(globals())


if __name__ == "__main__":
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if os.environ.get("STORE") == "prefix":
        store = dist.PrefixStore("job/7", next(rendezvous("env://"))[0])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    elif os.environ.get("STORE") == "file":
        place = Path(os.environ["XDG_CACHE_HOME"], f"store-{os.environ['MASTER_PORT']}")  # the test's own folder
        dist.init_process_group("gloo", store=dist.FileStore(str(place), size), rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo")
    main(CASES)
    dist.destroy_process_group()
