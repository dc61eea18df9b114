"""Train embeddings successively with one registry, and compare with the sum of all ranks' rows in float64.

    sparse_memory.py SKEW…

For each training ("even" or "popular"), rank 0 prints the number of iterations until an algorithm was kept, whether the
network was probed for it, and the algorithm. Both trainings touch as many rows, each by one rank.
"""

import sys

import torch
from torch import nn

import sirtaki.torch as hvd
from sirtaki.autotune.sparse import LEARNING_ITERATIONS, TRIAL_BUDGET
from sirtaki.engine import sparse_gradients
from sirtaki.engine.job import current
from sirtaki.engine.reducing.sharing import reducers_of

ROWS, WIDTH, TOUCHED = 6000, 64, 300
STEPS = 1 + LEARNING_ITERATIONS + 2 * TRIAL_BUDGET + 5
SKEWS = {"even": 0, "popular": TOUCHED // 2}


def looked_up(rank: int, iteration: int, popular: int) -> torch.Tensor:
    """Return `TOUCHED` rows that only this rank touches: popular ones, and random ones."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    drawn = popular + torch.randperm(ROWS // hvd.size() - popular, generator=generator)[: TOUCHED - popular]
    return torch.cat([torch.arange(popular), drawn]) * hvd.size() + rank


def weights(rank: int, iteration: int) -> torch.Tensor:
    return torch.randn(TOUCHED, WIDTH, generator=torch.Generator().manual_seed(7000 + 1000 * iteration + rank))


def train(popular: int) -> str:
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    plain = torch.optim.SGD(table.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=table.named_parameters(), op=hvd.Sum)
    probed, kept_after = [], 0
    measure = sparse_gradients.measure
    sparse_gradients.measure = lambda *args, **options: (probed.append(True), measure(*args, **options))[1]
    for iteration in range(STEPS):
        optimizer.zero_grad()
        rows = looked_up(hvd.rank(), iteration, popular)
        (table(rows) * weights(hvd.rank(), iteration)).sum().backward()
        optimizer.step()
        wanted = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        for rank in range(hvd.size()):
            wanted.index_add_(0, looked_up(rank, iteration, popular), weights(rank, iteration).double())
        found = table.weight.grad.to_dense()
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(hvd.broadcast(found, 0, name=f"found.{iteration}"), found)
        (reducer,) = reducers_of(current())
        targets = {} if reducer.sparse.rows is None else reducer.sparse.rows.targets
        if not kept_after and targets and targets["weight"].kept:
            kept_after = iteration
    sparse_gradients.measure = measure
    assert reducer.sparse.rows is not None
    plan = reducer.sparse.rows.plans["weight"]
    optimizer.close()
    return f"kept after {kept_after}, {'probed' if probed else 'not probed'}, {plan.path.value}"


def main() -> None:
    hvd.init()
    for skew in sys.argv[1:]:
        told = train(SKEWS[skew])
        if hvd.rank() == 0:
            print(f"{skew}: {told}", flush=True)
            print(f"trained: {skew}", file=sys.stderr, flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
