"""Children that a rank forks during training, as data loaders and checkpoint writers do, take no part in the job.

Started by test_forked_children.py.
"""

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from conformance.training import main
from rank_jobs import cases
from torch import nn
from torch.distributed.fsdp import fully_shard

import sirtaki.torch as hvd
from sirtaki.errors import CommError, NotInitializedError
from sirtaki.torch import ddp, fsdp

LIMIT_S = 20.0
"""Time limit of a child in seconds."""

RATE = 0.5


def _in_child(act: Callable[[], object]) -> None:
    """Call `act` in a forked child that leaves by `sys.exit`. Fail if `act` raises."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        act()
        sys.exit(7)
    deadline_s, ended = time.monotonic() + LIMIT_S, (0, 0)
    while ended[0] == 0 and time.monotonic() < deadline_s:
        time.sleep(0.01)
        ended = os.waitpid(child, os.WNOHANG)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0], "the child hangs"
    assert os.waitstatus_to_exitcode(ended[1]) == 7


def _raises(kind: type[Exception], words: str, act: Callable[[], object]) -> None:
    try:
        act()
    except kind as err:
        assert words in str(err), err
    else:
        raise AssertionError(f"no {kind.__name__}")


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(_batch(rank, step)).square().mean()


class Alone:
    """Training of all ranks' batches in one process."""

    def __init__(self, size: int) -> None:
        self.model, self._size = _model(), size
        self._sgd = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def step(self, number: int) -> None:
        self._sgd.zero_grad()
        for rank in range(self._size):
            (_loss(self.model, rank, number) / self._size).backward()
        self._sgd.step()

    def compare(self, model: nn.Module) -> None:
        for one, other in zip(model.parameters(), self.model.parameters(), strict=True):
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            torch.testing.assert_close(whole.detach(), other.detach())


def a_child_knows_its_rank_and_can_neither_communicate_nor_begin_anew(rank: int, size: int) -> None:
    def act() -> None:
        assert (hvd.rank(), hvd.size()) == (rank, size)
        hvd.init()  # does nothing in an initialised rank, either
        for name in ("allreduce", "allgather"):
            _raises(CommError, "forked", lambda name=name: getattr(hvd, name)(torch.ones(2), name="in a child"))
        _raises(CommError, "forked", lambda: hvd.broadcast_object({}, 0))
        _raises(CommError, "forked", lambda: hvd.barrier())
        hvd.shutdown()
        _raises(ValueError, "forked", hvd.init)

    _in_child(act)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]


def what_a_child_does_to_models_and_gradients_reaches_no_rank(rank: int, size: int) -> None:
    model, alone = _model(), Alone(size)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model.named_parameters())

    def act() -> None:
        assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())
        for param in model.parameters():
            param.grad.fill_(torch.nan)  # memory that the ranks share
        own = [torch.autograd.grad(_loss(model, rank, 77), param)[0] for param in model.parameters()]
        for param in model.parameters():
            param.grad = None
        _loss(model, rank, 77).backward()
        for param, gradient in zip(model.parameters(), own, strict=True):
            torch.testing.assert_close(param.grad, gradient)  # unaffected, because the child has a copy
        _raises(NotInitializedError, "forked", optimizer.step)

    for step in range(6):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        if step % 2:
            _in_child(act)
        optimizer.step()
        alone.step(step)
        alone.compare(model)


def a_child_sees_updates_that_were_put_off(rank: int, size: int) -> None:
    model, alone = _model(), Alone(size)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE), model.named_parameters(), overlap_forward=True
    )
    for step in range(6):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
        alone.step(step)
        if step > 2:
            _in_child(lambda: alone.compare(model))
    alone.compare(model)


def workers_of_multiprocessing_and_data_loaders_end_well(rank: int, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # because Python warns of forks with threads
        process = multiprocessing.get_context("fork").Process(target=hvd.rank)
        process.start()
        process.join(LIMIT_S)
        assert process.exitcode == 0
        data = torch.utils.data.TensorDataset(torch.arange(6.0))
        loader = torch.utils.data.DataLoader(
            data, num_workers=2, multiprocessing_context="fork", worker_init_fn=lambda _: hvd.rank()
        )
        assert sum(float(batch) for (batch,) in loader) == 15.0
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


HVD_CASES = cases(globals(), "rank", "size")


def models_under_fully_shard_train_on(rank: int, size: int) -> None:
    model, alone = _model(), Alone(size)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    fsdp.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(6):
        optimizer.zero_grad()
        loss = _loss(model, rank, step)
        if step == 2:  # while layers are being gathered
            _in_child(lambda: None)
        loss.backward()
        if step == 4:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # because PyTorch warns of a second error
                _in_child(lambda: _raises(CommError, "forked", lambda: _loss(model, rank, 0)))
        optimizer.step()
        alone.step(step)
        alone.compare(model)


def attached_models_under_ddp_train_on(rank: int, size: int) -> None:
    model, alone = _model(), Alone(size)
    wrapped = nn.parallel.DistributedDataParallel(model)
    ddp.attach(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(6):
        optimizer.zero_grad()
        _loss(wrapped, rank, step).backward()
        if step % 2:
            _in_child(lambda: [param.grad.fill_(torch.nan) for param in model.parameters()])
        optimizer.step()
        alone.step(step)
        alone.compare(model)


def process_groups_serve_no_child(rank: int, size: int) -> None:
    group = dist.new_group(backend="sirtaki")
    large = torch.ones(1 << 16)
    dist.all_reduce(large, group=group)
    _in_child(lambda: _raises(RuntimeError, "forked", lambda: dist.all_reduce(torch.ones(1 << 16), group=group)))
    dist.all_reduce(large, group=group)
    assert large.unique().tolist() == [size**2]


CASES = cases(globals(), "rank", "size")

if __name__ == "__main__":
    if os.environ.get("MASTER_ADDR") and "RANK" in os.environ and not os.environ.get("OMPI_COMM_WORLD_SIZE"):
        dist.init_process_group("gloo")
    main([*HVD_CASES, *CASES])
