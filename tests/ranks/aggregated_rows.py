"""Trains embeddings whose hot rows an aggregator sums; it may be killed meanwhile.

    aggregated_rows.py STEPS [PID STEP DELAY_S]

Process PID is killed DELAY_S after the begin of that step, in which ranks are in the middle of a sum, or between two.
Each rank prints how its rows have travelled.
"""

import copy
import os
import signal
import sys
import threading

import torch
from conformance.training import assert_equal_on_all_ranks, joined
from torch import nn

import sirtaki.torch as hvd
from sirtaki.engine.job import current
from sirtaki.engine.reducing.optimizer_gradients import reducers_of

ROWS, WIDTH = 3000, 24


def looked_up(rank: int, iteration: int, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * iteration + 10 * rank + salt)
    return (torch.rand(400, generator=generator) ** 4 * ROWS).long()


class Model(nn.Module):
    """Two embeddings of float32, which an aggregator adds, and one of float64, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(3))
        self.tables[2].double()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, rank: int, iteration: int) -> torch.Tensor:
        found = [table(looked_up(rank, iteration, salt)).mean(0) for salt, table in enumerate(self.tables)]
        dtype = self.head.weight.dtype
        return self.head(sum(rows.to(dtype) for rows in found)).square().mean()


def loss_of(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    return model(rank, iteration)


def main() -> None:
    steps = int(sys.argv[1])
    pid, kill_at, delay_s = [*map(float, sys.argv[2:]), -1.0, -1.0, 0.0][:3]
    hvd.init()
    model = Model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    alone = copy.deepcopy(model).double()
    ours = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    theirs = torch.optim.SGD(alone.parameters(), lr=0.5)
    for iteration in range(steps):
        if iteration == kill_at and hvd.rank() == 0:
            threading.Timer(delay_s, os.kill, [int(pid), signal.SIGKILL]).start()
        ours.zero_grad()
        loss_of(model, hvd.rank(), iteration).backward()
        ours.step()
        theirs.zero_grad()
        joined(loss_of, alone, iteration).backward()
        theirs.step()
        for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)
        assert_equal_on_all_ranks(model)
    (reducer,) = reducers_of(current())
    carrier = reducer.sparse.carrier
    hot = carrier._means.aggregator
    is_open = hot is not None and hot.is_open
    ways = [
        f"{plan.path.value} {'there' if plan.aggregated and is_open else 'here'}" for plan in carrier.plans.values()
    ]
    print(f"rows went {', '.join(ways[::-1])}")
    ours.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()
