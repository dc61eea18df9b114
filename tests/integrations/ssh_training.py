"""A rank of a small, possibly elastic job on several hosts: `ssh_training.py FOLDER STEPS [PAUSE_S]`.

Each rank writes its current step to FOLDER/at.HOST. At its end it writes FOLDER/end.HOST: the number of ranks in each
step, and the sum of the parameters.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch

import sirtaki.torch as hvd


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4, dtype=torch.float64)


def optimizer_of(linear: torch.nn.Linear) -> torch.optim.SGD:
    return torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)


def loss(linear: torch.nn.Linear, step: int, rank: int) -> torch.Tensor:
    return linear(torch.full((2, 8), 1.0 + rank + step % 5, dtype=torch.float64).sin_()).square().mean()


def total(linear: torch.nn.Linear) -> float:
    return sum(float(parameter.detach().sum()) for parameter in linear.parameters())


def in_one_process(sizes: list[int]) -> float:
    """Return the sum of the parameters after training in one process that simulates the ranks of each step."""
    linear = model()
    optimizer = optimizer_of(linear)
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        sum(loss(linear, step, rank) for rank in range(size)).div(size).backward()  # type: ignore[union-attr]
        optimizer.step()
    return total(linear)


def main(folder: Path, steps: int, pause_s: float) -> None:
    hvd.init()
    linear = model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(linear), linear.named_parameters())

    def train(state: hvd.elastic.TorchState) -> None:
        while len(state.sizes) < steps:
            step = len(state.sizes)
            optimizer.zero_grad()
            loss(linear, step, hvd.rank()).backward()
            optimizer.step()
            state.sizes = [*state.sizes, hvd.size()]
            (folder / f"at.{socket.gethostname()}").write_text(str(step))
            time.sleep(pause_s)
            state.commit()

    state = hvd.elastic.TorchState(linear, optimizer, sizes=[])
    if "HOROVOD_ELASTIC" in os.environ:
        hvd.elastic.run(train)(state)
    else:
        train(state)
    end = {"sizes": state.sizes, "total": total(linear), "data": os.environ.get("DATA"), "user": os.environ.get("USER")}
    (folder / f"end.{socket.gethostname()}").write_text(json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
