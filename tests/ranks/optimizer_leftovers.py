"""Optimizers that are dropped, jobs that begin and end: nothing of them is left."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from conformance.training import main, sgd
from ranks.optimizer_lifetimes import mlp, train
from torch import nn

import sirtaki.torch as hvd
from sirtaki.engine import job
from sirtaki.errors import NotInitializedError

SETTLING_S = 20.0


def in_use() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "reducers": len(list(job.current().participants)) if hvd.is_initialized() else 0,
    }


def stays_flat(what: Callable[[], None], times: int) -> None:
    """Collective."""
    what()  # opens what a job needs once
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
        optimizer.zero_grad()  # which takes nobody else
        assert all(param.grad is None for param in model.parameters())
        hvd.init()

    if hvd.size() > 1:
        stays_flat(cycle, times)


def memory_is_returned() -> None:
    """Of the model, and of the flat buffers of all ranks of the node."""

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
    """Mapped in this process of the memory that ranks of a node share."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "memfd:sirtaki" in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


CASES = [
    dropped_optimizers_leave_nothing,
    optimizers_in_reference_cycles_are_collected,
    added_parameter_groups_leave_nothing,
    starting_and_ending_leaves_nothing,
    memory_is_returned,
]


def many_dropped_optimizers_leave_nothing() -> None:
    dropped_optimizers_leave_nothing(50)


def many_added_parameter_groups_leave_nothing() -> None:
    added_parameter_groups_leave_nothing(50)


def starting_and_ending_many_times_leaves_nothing() -> None:
    starting_and_ending_leaves_nothing(50)


MANY = [
    many_dropped_optimizers_leave_nothing,
    many_added_parameter_groups_leave_nothing,
    starting_and_ending_many_times_leaves_nothing,
]

if __name__ == "__main__":
    main([*CASES, *MANY])
