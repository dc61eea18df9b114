"""Functions that ranks on Ray run in tests. Each has its own imports, as in a process of Ray."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def weights_after(steps: int, rank: int, size: int, wrap: Any = None) -> list[float]:
    """Trains on every `size`-th of 8 examples from `rank` on; `wrap` makes an optimizer that averages over ranks."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrap is not None:
        optimizer = wrap(optimizer, named_parameters=model.named_parameters())
    examples = torch.arange(32, dtype=torch.float32).reshape(8, 4)[rank::size] / 32
    for _ in range(steps):
        optimizer.zero_grad()
        (model(examples) - examples.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


class Counter:
    """An object of each rank."""

    def __init__(self, first: int, *, step: int) -> None:
        self.value, self._step = first, step

    def count(self) -> int:
        self.value += self._step
        return self.value


def who_am_i(*words: str, **named: int) -> dict[str, Any]:
    import importlib
    import os

    import torch

    import sirtaki.torch as hvd
    from sirtaki.ray import ray_logger

    hvd.init()
    ray_logger.log({"from": hvd.rank()})
    return {
        "given": (words, named),
        "place": (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        "told": tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        "sum": float(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)),
        "mpi": hvd.mpi_enabled(),
        "extra": os.environ["EXTRA"],
        "as_horovod": importlib.import_module("horovod.torch") is hvd,
    }


def train_over(steps: int) -> list[float]:
    import sirtaki.torch as hvd

    hvd.init()
    return weights_after(steps, hvd.rank(), hvd.size(), hvd.DistributedOptimizer)


def raise_on(rank: int) -> None:
    import torch

    import sirtaki.torch as hvd

    hvd.init()
    if hvd.rank() == rank:
        raise LookupError(f"rank {rank} has found nothing")
    while True:
        hvd.allreduce(torch.ones(3))


def train_elastically(stop: str, records: str) -> tuple[int, int]:
    """Until the file `stop` is there; each rank notes its generations in a file in `records`."""
    import os

    import torch

    import sirtaki.torch as hvd

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while True:
            stops = torch.tensor([float(Path(stop).exists())])
            if hvd.allreduce(stops, op=hvd.Max, name="stop").item():
                return
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            record = f"{time.time()} {hvd.rank()} {hvd.size()} {state.step}\n"
            with open(Path(records, str(os.getpid())), "a") as file:
                file.write(record)
            time.sleep(0.02)

    loop(state)
    return hvd.rank(), state.step


def newest(folder: Path) -> Sequence[tuple[float, int, int, int]]:
    """Return time, rank, size and step of each rank's last record."""
    found = []
    for path in folder.iterdir():
        lines = path.read_text().splitlines(keepends=True)
        if whole := [line for line in lines if line.endswith("\n")]:
            at_s, rank, size, step = whole[-1].split()
            found.append((float(at_s), int(rank), int(size), int(step)))
    return found
