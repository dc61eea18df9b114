"""Sparse gradients on fake GPUs that check the order of streams: sums equal those on the host, which never waits.

See fakes/cuda.py. Started by tests/comm/sparse/test_on_gpu.py.
"""

import itertools
import os
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from conformance.training import main
from fakes.cuda import FakeCuda, OnStream
from rank_jobs import cases
from torch import nn

import sirtaki.torch as hvd
from sirtaki.autotune.sparse import LEARNING_ITERATIONS
from sirtaki.comm.transports.contract import HALF_DTYPES
from sirtaki.engine.job import current
from sirtaki.engine.reducing.sharing import reducers_of
from sirtaki.engine.tuning import plans
from sirtaki.errors import ConfigError

plans.MATRIX, plans.UNIT_BYTES = 64, (1 << 14, 1 << 16)  # small probes, because there is no GPU to fill
CUDA = FakeCuda(index=1)
ROWS, WIDTH = 60, 5
STEPS, WARM_UP = 2 * LEARNING_ITERATIONS, 5
TUNED = os.environ.get("SIRTAKI_WARMUP_ITERATIONS") != "0"
"""Whether settings are tried. The host waits for the GPU when a setting replaces another one."""

FIXED = os.environ.get("SIRTAKI_SPARSE")
OVER_NCCL = FIXED in (None, "gather", "dense") and os.environ.get("SIRTAKI_TRANSPORT") != "staged"
"""Whether rows are summed on the GPU, and not on the host."""

EXACT = FIXED == "gather"
"""Whether rows are added in the order of ranks, so that sums on GPU and host are bitwise equal."""

Batch = Sequence[torch.Tensor]


def looked_up(rank: int, step: int, salt: int = 0) -> torch.Tensor:
    """Return the rows that a rank looks up: low ones more often, most several times, and sometimes none or very many.

    In step 9, no rank looks up any.
    """
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + salt)
    count = int(torch.randint(1, 200 if step % 5 == 3 else 20, (1,), generator=generator))
    if step == 9 or (step + rank + salt) % 4 == 0:
        count = 0
    return (torch.rand(count, generator=generator) ** 3 * ROWS).long()


class Model(nn.Module):
    """Embeddings with sparse gradients, and perhaps a dense layer."""

    def __init__(self, n_embeddings: int = 2, *, dense: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS - 7 * i, WIDTH + i, sparse=True) for i in range(n_embeddings))
        self.head = nn.Linear(WIDTH, 3) if dense else None

    def forward(self, batch: Batch, weights: Batch) -> torch.Tensor:
        found = [
            (table(rows % table.num_embeddings) * weight[:, None]).sum(0)
            for table, rows, weight in zip(self.tables, batch, weights, strict=True)
        ]
        total = sum((each * (1.0 + torch.arange(len(each), device=each.device))).sum() for each in found)
        return total if self.head is None else total + self.head(found[0]).sum()


def batch_of(rank: int, step: int, n: int, dtype: torch.dtype, place: str) -> tuple[Batch, Batch]:
    rows = [looked_up(rank, step, salt) for salt in range(n)]
    weights = [torch.linspace(-1.0, 2.0, len(each) + rank + 1)[: len(each)].to(dtype) for each in rows]
    return [each.to(place) for each in rows], [each.to(place) for each in weights]


def summed(param: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a coalesced tensor on the CPU."""
    assert param.grad is not None
    found: torch.Tensor = param.grad.coalesce().cpu() if param.grad.is_sparse else param.grad.cpu()
    return found


def compare(here: nn.Module, there: nn.Module, dtype: torch.dtype, step: int) -> None:
    """Compare the gradients of a model on the host with those of a model on the GPU."""
    for (name, param), other in zip(here.named_parameters(), there.parameters(), strict=True):
        what = f"{name} in step {step} of {dtype}"
        assert (param.grad is None) == (other.grad is None), what
        if param.grad is None:
            continue
        assert param.grad.is_sparse == other.grad.is_sparse, what
        assert other.grad.is_cuda, what
        mine, theirs = summed(param), summed(other)
        if mine.is_sparse:
            assert torch.equal(mine.indices(), theirs.indices()), what
            mine, theirs = mine.values(), theirs.values()
            if EXACT:
                assert torch.equal(mine, theirs), what
        tolerance = 2e-2 if dtype in HALF_DTYPES else 1e-5
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=10 * tolerance, msg=what)


def trains_as_on_the_host(
    here: nn.Module,
    there: nn.Module,
    dtype: torch.dtype,
    forward: Callable[[Batch, Batch], torch.Tensor],
    *,
    options: Callable[[nn.Module], dict[str, object]] = lambda _: {},
) -> None:
    """Train equal models on the host and the GPU. After the first steps, the host never waits for the GPU."""
    for model in (here, there):
        model.to(dtype)
    there.to("cuda")
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.0), each.named_parameters(), **options(each))
        for each in (here, there)
    ]
    n = len(here.tables)
    for step in range(STEPS):
        optimizers[0].zero_grad()
        here(*batch_of(hvd.rank(), step, n, dtype, "cpu")).backward()
        optimizers[0].step()
        inputs = batch_of(hvd.rank(), step, n, dtype, "cuda")
        CUDA.steady = step >= WARM_UP and not TUNED and OVER_NCCL
        optimizers[1].zero_grad()
        forward(*inputs).backward()
        optimizers[1].step()
        CUDA.steady = False
        CUDA.next_iteration()
        if step > 2:
            compare(here, there, dtype, step)
    CUDA.check()
    launches = [what for _, what, _ in CUDA.nccl.launches]
    assert not OVER_NCCL or FIXED == "dense" or "all-gather" in launches
    for optimizer in optimizers:
        optimizer.close()


def sums_equal_those_on_the_host() -> None:
    for dtype in (torch.float32, torch.float64, *HALF_DTYPES):
        here, there = Model(), Model()
        trains_as_on_the_host(here, there, dtype, there)


def a_model_without_dense_gradients_trains() -> None:
    here, there = Model(1, dense=False), Model(1, dense=False)
    trains_as_on_the_host(here, there, torch.float32, there)


def gradients_may_be_computed_on_several_streams() -> None:
    here, there = Model(), Model()
    stream = CUDA.make_stream()

    def forward(batch: Batch, weights: Batch) -> torch.Tensor:
        return OnStream.ends_with_pass(OnStream.apply(there(batch, weights), CUDA, stream), CUDA)

    trains_as_on_the_host(here, there, torch.float32, forward)


def prescaled_sums_over_two_passes_equal_those_on_the_host() -> None:
    here, there = Model(), Model()
    trains_as_on_the_host(
        here, there, torch.float32, there, options=lambda _: {"op": hvd.Sum, "gradient_predivide_factor": 1.0}
    )


def several_optimizers_train() -> None:
    """They launch in `step()`, because all ranks need one order."""
    models = [Model(), Model(1, dense=False), Model()]
    alone = [Model(), Model(1, dense=False), Model()]
    for each in models:
        each.to("cuda")
    ours = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.0)) for each in models]
    theirs = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.0)) for each in alone]
    for step in range(STEPS):
        for place, nets, optimizers in (("cpu", alone, theirs), ("cuda", models, ours)):
            inputs = [batch_of(hvd.rank(), step, len(net.tables), torch.float32, place) for net in nets]
            for each in optimizers:
                each.zero_grad()
            sum(net(*batch) for net, batch in zip(nets, inputs, strict=True)).backward()
            for each in optimizers:
                each.step()
        CUDA.next_iteration()
        if step > 2:
            for mine, other in zip(alone, models, strict=True):
                compare(mine, other, torch.float32, step)
    CUDA.check()
    for each in (*ours, *theirs):
        each.close()


def lazy_optimizers_get_the_same_rows() -> None:
    for make in (torch.optim.SparseAdam, torch.optim.Adagrad):
        here, there = (nn.Embedding(ROWS, WIDTH, sparse=True).double() for _ in range(2))
        hvd.broadcast_parameters(here.state_dict(), root_rank=0)
        there.load_state_dict(here.state_dict())
        there.to("cuda")
        optimizers = [hvd.DistributedOptimizer(make(list(each.parameters()), lr=0.05)) for each in (here, there)]
        for step, (place, model, optimizer) in itertools.product(
            range(STEPS), zip(("cpu", "cuda"), (here, there), optimizers, strict=True)
        ):
            optimizer.zero_grad()
            rows = torch.cat([looked_up(hvd.rank(), step), torch.tensor([hvd.rank()])]).to(place)
            model(rows).square().sum().backward()
            with torch.sparse.check_sparse_tensor_invariants(False):  # because Adagrad does not declare it
                optimizer.step()
            CUDA.next_iteration()
        torch.testing.assert_close(there.weight.data.cpu(), here.weight.data, rtol=1e-9, atol=1e-9)
        for optimizer in optimizers:
            optimizer.close()
    CUDA.check()


def ranks_join_at_different_steps() -> None:
    """The host waits for the GPU after each backward pass, which a rank in `join()` must not delay.

    The models have no dense gradients, because a launch on the fake GPU waits for the other ranks.
    """
    for waits in (False, True):
        here, there = Model(dense=False), Model(dense=False)
        there.to("cuda")
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in (here, there)]
        for place, model, optimizer in zip(("cpu", "cuda"), (here, there), optimizers, strict=True):
            for step in range(8 + 3 * hvd.rank()):
                optimizer.zero_grad()
                loss = model(*batch_of(hvd.rank(), step, 2, torch.float32, place))
                loss.backward()
                if waits:
                    loss.item()
                optimizer.step()
                CUDA.next_iteration()
            hvd.join()
        for param, other in zip(here.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(param.data, other.data.cpu(), rtol=1e-4, atol=1e-4)
        CUDA.check()
        for optimizer in optimizers:
            optimizer.close()


def a_parameter_may_not_be_moved() -> None:
    if not OVER_NCCL:
        return
    model = Model(1, dense=False).to("cuda")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(6):
        if step == 5:
            model.to("cpu")
        optimizer.zero_grad()
        rows = torch.tensor([hvd.rank(), step]).to("cuda" if step < 5 else "cpu")
        loss = model.tables[0](rows).sum()
        if step < 5:
            loss.backward()
            optimizer.step()
        else:
            with pytest.raises(
                ConfigError, match=r"parameter tables\.0\.weight with sparse gradients is on device cpu"
            ):
                loss.backward()
        CUDA.next_iteration()
    optimizer.close()


def all_ranks_reopen_their_rows_if_one_has_moved_its_parameters() -> None:
    model = Model(1, dense=False).to("cuda")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    (reducer,) = (each for each in reducers_of(current()) if not each.closed)
    for step in range(8):
        if step == 4:
            before = reducer.sparse.rows
            assert before is not None
            if hvd.rank() == 1:
                before.place = torch.device("cuda", 0)  # as if the parameters had been on another GPU
            reducer.attach(reducer.named)
            assert reducer.sparse.rows is not before
        optimizer.zero_grad()
        model.tables[0](torch.tensor([hvd.rank(), step + 10], device="cuda")).sum().backward()
        optimizer.step()
        CUDA.next_iteration()
        gradient = summed(model.tables[0].weight).to_dense()
        assert gradient[:, 0].nonzero()[:, 0].tolist() == [*range(hvd.size()), step + 10]
        assert gradient[step + 10, 0] == hvd.size()
    CUDA.check()
    optimizer.close()


def the_job_knows_sums_in_flight() -> None:
    """An elastic job waits for them in `commit()`, and its watchdog reports that the GPU waits for other ranks."""
    if not OVER_NCCL:
        return
    # With two optimizers on a GPU, sums are launched in `step()`.
    models = [Model(1, dense=False).to("cuda") for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(*batch_of(hvd.rank(), step, 1, torch.float32, "cuda")).backward()
        torch.cuda.synchronize()
        for optimizer in optimizers:
            optimizer.step()
        CUDA.next_iteration()
    assert not current().pipelines
    rows = next(each.gpu_rows for each in reducers_of(current()))
    waits = rows.stalled()
    assert waits is not None
    assert rows.stalled() == waits
    end = torch.cuda.Event()
    end.record()
    assert not end.query()
    current().wait_for_gpus()
    assert end.query()
    assert rows.stalled() is None
    CUDA.check()
    for optimizer in optimizers:
        optimizer.close()


def rows_and_algorithm_are_reported() -> None:
    model = Model(1).to("cuda")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    counted: list[list[torch.Tensor]] = []
    for step in range(3 * LEARNING_ITERATIONS):
        (reducer,) = reducers_of(current())
        by_rank = [looked_up(rank, step) for rank in range(hvd.size())]
        if reducer.sparse.names and any(map(len, by_rank)):
            counted.append(by_rank)
        optimizer.zero_grad()
        model(*batch_of(hvd.rank(), step, 1, torch.float32, "cuda")).backward()
        optimizer.step()
        CUDA.next_iteration()
    if OVER_NCCL:
        (summary,) = hvd.sparse_gradients()
        assert summary.plan == FIXED or (FIXED is None and summary.plan in ("gather", "dense"))
        counted = counted[:LEARNING_ITERATIONS]
        touched, union, n = (
            sum(count(by_rank) for by_rank in counted) / LEARNING_ITERATIONS
            for count in (
                lambda by_rank: sum(len(rows.unique()) for rows in by_rank),
                lambda by_rank: len(torch.cat(by_rank).unique()),
                lambda by_rank: len(torch.cat(by_rank)) / hvd.size(),
            )
        )
        assert (summary.touched, summary.union, summary.looked_up) == (touched, union, n)
    CUDA.check()
    optimizer.close()


CASES = cases(globals())

if __name__ == "__main__":
    with CUDA:
        dist.init_process_group("gloo")
        main(CASES)
        dist.destroy_process_group()
