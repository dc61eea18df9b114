"""Sparse gradients by every algorithm: sums are exact, equal on all ranks, and contain exactly the touched rows."""

import copy
import functools
import os
from collections.abc import Callable, Sequence

import torch
from conformance.training import assert_equal_on_all_ranks, assert_same_parameters, assert_same_training, joined, main
from torch import nn

import sirtaki.torch as hvd
from sirtaki.comm.sparse.plan import SparsePath, SparsePlan
from sirtaki.engine.job import current
from sirtaki.engine.reducing.sharing import reducers_of

ROWS, WIDTH = 60, 5
STEPS = 36 if os.environ.get("SIRTAKI_WARMUP_ITERATIONS") != "0" else 6
"""Number of steps. With tuning, it exceeds the trials."""

PLANS = (
    SparsePlan(path=SparsePath.GATHER),
    SparsePlan(path=SparsePath.OWNER),
    SparsePlan(path=SparsePath.DENSE),
    SparsePlan(path=SparsePath.BLOCKS),
    SparsePlan(path=SparsePath.BLOCKS, block_rows=7),
    SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(0, 1, 2, 5, ROWS - 1)),
    SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(0, 3), cold=SparsePath.OWNER),
)


def looked_up(rank: int, iteration: int, salt: int = 0) -> torch.Tensor:
    """Return the rows that a rank looks up: low ones more often, some several times, and sometimes none."""
    generator = torch.Generator().manual_seed(1000 * iteration + 10 * rank + salt)
    count = 0 if (iteration + rank + salt) % 4 == 0 else int(torch.randint(1, 30, (1,), generator=generator))
    return (torch.rand(count, generator=generator) ** 3 * ROWS).long()


class Model(nn.Module):
    """Embeddings and a dense layer. A step may not touch an embedding."""

    def __init__(self, n_embeddings: int = 1, *, tied: bool = False, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.ModuleList(nn.Embedding(ROWS, WIDTH, sparse=sparse) for _ in range(n_embeddings))
        self.head = nn.Linear(WIDTH, 3)
        if tied:
            for other in self.embeddings[1:]:
                other.weight = self.embeddings[0].weight

    def forward(self, rank: int, iteration: int) -> torch.Tensor:
        dtype = self.head.weight.dtype
        total = torch.ones(WIDTH, dtype=dtype)
        for salt, embedding in enumerate(self.embeddings):
            rows = looked_up(rank, iteration, salt)
            if len(rows):
                total = total + embedding(rows).mean(0)
        return self.head(total).square().mean()


def loss_of(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    return model(rank, iteration)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def use(plan: SparsePlan) -> None:
    """Use a plan for all sparse gradients from the next iteration on."""
    for reducer in reducers_of(current()):
        if (rows := reducer.sparse.rows) is not None:
            for target in rows.targets.values():
                target.decision.plan = plan


def several_embeddings() -> None:
    model = Model(4).double()
    assert_same_training(model, loss_of, make_optimizer=plain_sgd, steps=STEPS)
    assert_equal_on_all_ranks(model)


def tied_embeddings() -> None:
    assert_same_training(Model(3, tied=True).double(), loss_of, make_optimizer=plain_sgd, steps=STEPS)


def embeddings_tied_to_a_dense_layer() -> None:
    class Tied(Model):
        def forward(self, rank: int, iteration: int) -> torch.Tensor:
            weight = self.embeddings[0].weight
            found = self.embeddings[0](torch.cat([looked_up(rank, iteration), torch.tensor([rank % ROWS])])).mean(0)
            return self.head(found).square().mean() + (found @ weight.T).square().mean() / ROWS

    assert_same_training(Tied().double(), loss_of, make_optimizer=plain_sgd, steps=STEPS)


def every_plan_in_turn() -> None:
    model, alone = Model(2).double(), Model(2).double()
    ours, theirs = hvd.DistributedOptimizer(plain_sgd(model)), plain_sgd(alone)
    for iteration in range(4 * len(PLANS)):
        if iteration > 1:
            use(PLANS[iteration % len(PLANS)])
        for net, optimizer, loss in (
            (model, ours, loss_of(model, hvd.rank(), iteration)),
            (alone, theirs, joined(loss_of, alone, iteration)),
        ):
            optimizer.zero_grad()
            loss.backward()
            del net
            optimizer.step()
        assert_same_parameters(model, alone, 1e-12, f"after step {iteration} by {PLANS[iteration % 7].describe()}")
    assert_equal_on_all_ranks(model)


def rows_are_exactly_those_that_some_rank_has() -> None:
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.0))
    for iteration in range(3 * len(PLANS)):
        if iteration > 1:
            use(PLANS[iteration % len(PLANS)])
        optimizer.zero_grad()
        rows = torch.cat([looked_up(hvd.rank(), iteration), torch.tensor([hvd.rank() + 3])])
        factor = 0.0 if iteration % 3 else 1.0  # rows of zeros are kept
        (table(rows).sum() * factor).backward()
        optimizer.step()
        everybody = [looked_up(rank, iteration) for rank in range(hvd.size())]
        extra = torch.arange(hvd.size()) + 3
        wanted = torch.unique(torch.cat([*everybody, extra]))
        if iteration > 1:
            assert table.weight.grad.is_sparse
            assert torch.equal(table.weight.grad.coalesce().indices()[0], wanted), PLANS[iteration % 7].describe()


def lazy_optimizers_get_the_same_rows() -> None:
    makers: Sequence[Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = (
        lambda params: torch.optim.SparseAdam(params, lr=0.01),
        lambda params: torch.optim.Adagrad(params, lr=0.05),
    )
    for make in makers:
        model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        alone = copy.deepcopy(model)
        ours, theirs = hvd.DistributedOptimizer(make(list(model.parameters()))), make(list(alone.parameters()))

        def loss(net: nn.Module, rank: int, iteration: int) -> torch.Tensor:
            return net(torch.cat([looked_up(rank, iteration), torch.tensor([rank])])).square().sum()

        for iteration in range(2 * len(PLANS) + 2):
            if iteration > 1:
                use(PLANS[iteration % len(PLANS)])
            ours.zero_grad()
            loss(model, hvd.rank(), iteration).backward()
            ours.step()
            theirs.zero_grad()
            joined(loss, alone, iteration).backward()
            theirs.step()
            assert_same_parameters(model, alone, 1e-9, f"after step {iteration}")


def invariants_checked(case: Callable[[], None]) -> Callable[[], None]:
    """Declare whether invariants of sparse tensors are checked, because Adagrad does not, and PyTorch warns."""

    @functools.wraps(case)
    def checked() -> None:
        with torch.sparse.check_sparse_tensor_invariants(True):
            case()

    return checked


def halves_are_added_up_as_dense_ones() -> None:
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        table = nn.Embedding(ROWS, WIDTH, sparse=True).to(dtype)
        hvd.broadcast_parameters(table.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.0))
        for iteration in range(len(PLANS) + 2):
            if iteration > 1:
                use(PLANS[iteration % len(PLANS)])
            gradients = []
            for rank in range(hvd.size()):
                rows = torch.cat([looked_up(rank, iteration), torch.tensor([rank])])
                weights = torch.rand(len(rows), WIDTH, generator=torch.Generator().manual_seed(rank + iteration))
                gradients.append((rows, weights.to(dtype)))
            rows, weights = gradients[hvd.rank()]
            optimizer.zero_grad()
            (table(rows) * weights).sum().backward()
            optimizer.step()
            wanted = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
            for rows, weights in gradients:
                wanted.index_add_(0, rows, weights.double() / hvd.size())
            found = table.weight.grad.to_dense().double()
            torch.testing.assert_close(found, wanted, rtol=tolerance * hvd.size(), atol=tolerance * hvd.size())
            everybody = hvd.allgather(found[None], name=f"found.{dtype}.{iteration}")
            assert torch.equal(everybody, found.expand_as(everybody)), PLANS[iteration % 7].describe()


def a_rank_without_rows_and_one_that_has_joined_hold_nobody_up() -> None:
    """One rank waits for one optimizer's rows, another rank for another optimizer's dense gradients."""
    table, dense = nn.Embedding(ROWS, WIDTH, sparse=True).double(), nn.Parameter(torch.zeros(3).double())
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(part, lr=0.0)) for part in ([table.weight], [dense])]
    steps, last = 12, hvd.size() - 1
    full = 4 if hvd.size() > 1 else steps  # one rank alone reduces nothing, so that a missing gradient stays None
    for iteration in range(steps - 6 * (hvd.rank() == last)):
        without = hvd.rank() == 0 and iteration >= full
        parts = [lambda: dense.sum(), lambda: table(torch.tensor([1, hvd.rank()])).sum()][: 1 if without else 2]
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(part() for part in parts[:: 1 if iteration % 2 else -1]).backward()
        for optimizer in optimizers:
            optimizer.step()
        there = [rank for rank in range(hvd.size()) if iteration < steps - 6 * (rank == last)]
        rows = [row for rank in there if rank or iteration < full for row in (1, rank)]
        wanted = torch.bincount(torch.tensor(rows, dtype=torch.int64), minlength=ROWS).double() / hvd.size()
        assert torch.allclose(table.weight.grad.to_dense()[:, 0], wanted), f"iteration {iteration}"
        assert torch.allclose(dense.grad, torch.full((3,), len(there) / hvd.size()).double()), f"iteration {iteration}"
    hvd.join()


def a_thousand_random_steps() -> None:
    """Random sizes, dtypes, look-ups and plans, equal on all ranks except for the looked-up rows."""
    drawn = torch.Generator().manual_seed(5)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=drawn))

    steps = 0
    while steps < 1000:
        n_rows, width = draw(1, 3000), draw(1, 40)
        dtype = (torch.float32, torch.float64)[draw(0, 1)]
        tables = [nn.Embedding(n_rows, width, sparse=True).to(dtype) for _ in range(draw(1, 3))]
        for table in tables:
            hvd.broadcast_parameters(table.state_dict(), root_rank=0)
        params = [table.weight for table in tables]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))
        for step in range(draw(5, 60)):
            if step > 1:
                hot = torch.randperm(n_rows, generator=drawn)[: draw(1, n_rows)].sort().values.tolist()
                cold = (SparsePath.GATHER, SparsePath.OWNER)[draw(0, 1)]
                plans = [
                    *PLANS[:4],
                    SparsePlan(path=SparsePath.BLOCKS, block_rows=draw(1, 70)),
                    SparsePlan(path=SparsePath.HOT_COLD, hot_rows=tuple(hot), cold=cold),
                ]
                use(plans[draw(0, 5)])
            wanted = [torch.zeros(n_rows, width, dtype=torch.float64) for _ in tables]
            present = [torch.zeros(n_rows, dtype=torch.bool) for _ in tables]
            optimizer.zero_grad()
            losses = []
            for number, table in enumerate(tables):
                for rank in range(hvd.size()):
                    count = draw(0, 200) * draw(0, 2)
                    rows = torch.randint(0, draw(1, n_rows), (count,), generator=drawn)
                    weights = torch.randn(count, width, generator=drawn, dtype=torch.float64).to(dtype)
                    wanted[number].index_add_(0, rows, weights.double() / hvd.size())
                    present[number][rows] = True
                    if rank == hvd.rank() and count:
                        losses.append((table(rows) * weights).sum())
            if losses:
                sum(losses).backward()
            optimizer.step()
            tolerance = 1e-4 if dtype is torch.float32 else 1e-11
            for param, dense, there in zip(params, wanted, present, strict=True):
                found = param.grad.to_dense().double()
                torch.testing.assert_close(found, dense, rtol=tolerance, atol=tolerance)
                if param.grad.is_sparse and step > 1:
                    assert torch.equal(param.grad.coalesce().indices()[0], there.nonzero()[:, 0])
            steps += 1
        optimizer.close()


CASES = [
    several_embeddings,
    tied_embeddings,
    embeddings_tied_to_a_dense_layer,
    a_rank_without_rows_and_one_that_has_joined_hold_nobody_up,
]
ANY_PATH = [
    every_plan_in_turn,
    rows_are_exactly_those_that_some_rank_has,
    invariants_checked(lazy_optimizers_get_the_same_rows),
    halves_are_added_up_as_dense_ones,
]
MANY = [a_thousand_random_steps]

if __name__ == "__main__":
    main([*CASES, *ANY_PATH, *MANY])
