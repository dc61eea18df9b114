"""Check results of two ranks that share the GPU, with NCCL over loopback between them. Nothing is timed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from conformance.compressed_units import check_units
from conformance.on_streams import Streams, conform, train, train_two, ways
from conformance.sharded import is_tuned_while_the_host_runs_ahead, trains_under_every_setting

import sirtaki.torch as hvd
import sirtaki.torch.ddp as ddp
from bench.gpu.contenders import open_group
from bench.gpu.place import Place
from bench.gpu.runner import RankRun

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)


def run(run: RankRun) -> None:
    """Run the checks, the most important first, because each has a share of the remaining time."""
    place, control = run.place, run.control
    dry, opener = place.dry, place.opener(control)
    nccl, staged = Streams(control, place.device, opener), Streams(control, place.device, None)
    with run.check("NCCL passes the conformance suite") as found:
        found["routes"] = conform(nccl)
    with run.check("gradients over NCCL equal the mean under changing plans") as found:
        found["iterations"] = train(nccl, 6 if dry else 60, run.until(0.3))
        assert found["iterations"] >= 10
    with (
        run.check("compressed units equal those on the host, and the host never waits") as found,
        watched(place) as watch,
    ):
        router = nccl.router()
        found["compressors"] = check_units(control, router, watch, dtypes=DTYPES[2::-1], exact=dry)
        router.close()
    with (
        run.check("rows of sparse gradients are those of one process, and the host never waits") as found,
        watched(place) as watch,
    ):
        found["algorithms"] = rows(run, watch)
    with run.check("eager operations take the GPU's tensors"):
        eager(run, place.torch_device)
    with run.check("two optimizers use NCCL in one order") as found:
        found["iterations"] = train_two(nccl, 4 if dry else 30, run.until(0.25))
        assert found["iterations"] >= 4
    with run.check("a job tunes, and trains as one process") as found:
        found |= tuned(run, 45, run.until(0.4))
    with run.check("a sharded model trains as PyTorch's under every setting, and the host never waits") as found:
        open_group(place, run.rank, run.size)
        with watched(place) as watch:
            found["more_bytes"] = trains_under_every_setting(place.torch_device, watch)
    with run.check("a sharded model is tuned by the GPU's clock, and the host never waits") as found:
        with watched(place) as watch:
            found["settings"] = is_tuned_while_the_host_runs_ahead(place.torch_device, watch)
        assert len(set(found["settings"])) > 1, found
    with run.check("all ranks skip the same steps with GradScaler"):
        scaled(run)
    with run.check("gradients in the memory of CUDA graphs equal the mean"):
        graphs(run)
    with run.check("gradients through host memory equal the mean") as found:
        found["routes"] = [] if dry else conform(staged)
        found["iterations"] = train(staged, 6 if dry else 30, run.until(0.4))
        assert found["iterations"] >= 10
    with run.check("sums are right in whatever way NCCL is told to reduce") as found:
        found |= ways(nccl)


@contextmanager
def watched(place: Place) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Yield a function that returns a context manager for a training step. Fail if a step made the host wait."""
    calls = list[str]()

    @contextmanager
    def step() -> Iterator[None]:
        with place.synchronisations() as found:
            yield
        calls.extend(found)
        place.next_iteration()

    yield step
    assert not calls, calls


def same(there: torch.Tensor, here: torch.Tensor) -> None:
    torch.testing.assert_close(there.cpu(), here)


def rows(run: RankRun, step: Callable[[], AbstractContextManager[None]]) -> list[str]:
    """Train embeddings on all GPUs, and on this host with all ranks' batches. Return each table's algorithm.

    The tables are in the order of their sizes.
    """

    def batch(rank: int, number: int) -> torch.Tensor:
        count = 0 if (number + rank) % 4 == 0 else 150 * (1 + rank)  # many more than 20, with duplicates
        return torch.randint(0, 20, (count,), generator=torch.Generator().manual_seed(10 * number + rank))

    def loss(model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(indices).square().sum() for table in model.children()]).sum()

    torch.manual_seed(0)
    alone = torch.nn.ModuleList(torch.nn.Embedding(n, 16, sparse=True) for n in (20, 5000)).double()
    model = copy.deepcopy(alone).to(run.place.torch_device)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for number in range(12):
        reference.zero_grad()
        torch.stack([loss(alone, batch(rank, number)) for rank in range(run.size)]).mean().backward()
        reference.step()
        optimizer.zero_grad()
        indices = batch(run.rank, number).to(run.place.torch_device)
        with step() if number > 5 else nullcontext():  # in the first steps, ranks agree on what is sparse
            loss(model, indices).backward()
            optimizer.synchronize()  # type: ignore[attr-defined]  # a DistributedOptimizer's
        with optimizer.skip_synchronize():  # type: ignore[attr-defined]  # a DistributedOptimizer's
            optimizer.step()
        run.place.next_iteration()
    for mine, theirs in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs.cpu(), mine, rtol=1e-9, atol=1e-9)
    summaries = [summary.plan for summary in hvd.sparse_gradients() if summary.n_rows in (20, 5000)]
    optimizer.close()  # type: ignore[attr-defined]  # a DistributedOptimizer's
    return summaries


def eager(run: RankRun, place: torch.device) -> None:
    """Compare each eager collective of every dtype on GPU tensors with the same collective on host tensors."""
    rank, size = run.rank, run.size
    for dtype in DTYPES:
        for numel in (7,) if run.place.dry else (1, 1021):
            here = (torch.arange(numel * size) % 5 + rank + 1).to(dtype).view(size, numel)
            there, key = here.to(place), f"{dtype} {numel}"
            for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                same(
                    hvd.allreduce(there, op=op, name=f"g {key} {op}"), hvd.allreduce(here, op=op, name=f"h {key} {op}")
                )
            same(hvd.allgather(there, name=f"ga {key}"), hvd.allgather(here, name=f"ha {key}"))
            same(
                hvd.broadcast(there, root_rank=size - 1, name=f"gb {key}"),
                hvd.broadcast(here, root_rank=size - 1, name=f"hb {key}"),
            )
            same(
                hvd.reducescatter(there, op=hvd.Sum, name=f"gr {key}"),
                hvd.reducescatter(here, op=hvd.Sum, name=f"hr {key}"),
            )
            same(hvd.alltoall(there, name=f"gt {key}"), hvd.alltoall(here, name=f"ht {key}"))
        in_place = torch.full((33,), rank + 1, device=place).to(dtype)
        hvd.allreduce_(in_place, op=hvd.Sum, name=f"in place {dtype}")
        assert in_place.cpu().eq(sum(range(1, size + 1))).all()
    many = [torch.full((index,), float(rank), device=place) for index in range(1, 20)]
    for reduced in hvd.grouped_allreduce(many, op=hvd.Average, name="grouped"):
        torch.testing.assert_close(reduced, torch.full_like(reduced, (size - 1) / 2))
    model = torch.nn.Linear(64, 64).to(place)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sums = hvd.allgather(torch.stack([param.sum() for param in model.parameters()]).detach().view(1, -1))
    assert all(torch.equal(row, sums[0]) for row in sums)


def network() -> torch.nn.Module:
    """Make a small network in float64, so that the order of sums does not matter."""
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers).double()


def trains_alike(
    run: RankRun,
    ours: tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor], torch.optim.Optimizer],
    theirs: tuple[torch.nn.Module, torch.optim.Optimizer],
    step: int,
) -> None:
    """Train a step, and compare with one process that has the batches of all ranks.

    Args:
        run: this rank's run.
        ours: model, function that computes its forward pass, and optimizer.
        theirs: model and optimizer of the one process.
        step: number of the step, from which the batch is drawn.
    """
    (model, forward, optimizer), (alone, plain) = ours, theirs
    batch = torch.randn(4 * run.size, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    batch = batch.to(run.place.torch_device)
    optimizer.zero_grad()
    forward(batch[4 * run.rank : 4 * run.rank + 4]).square().mean().backward()
    optimizer.step()
    run.place.next_iteration()
    plain.zero_grad()
    alone(batch).square().mean().backward()
    plain.step()
    for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-10, atol=1e-12)


def tuned(run: RankRun, iterations: int, goes_on: object) -> dict[str, object]:
    """Train while the tuner tries settings, and compare with one process that has the batches of all ranks."""
    place = run.place.torch_device
    torch.manual_seed(0)
    model, reference = network().to(place), network().to(place)
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    )
    sync = optimizer._gradients.reducers[0].tuning  # type: ignore[attr-defined]  # a DistributedOptimizer's
    before, tried, done = sync.knobs, set[str](), 0
    while done < iterations and goes_on():  # type: ignore[operator]  # a function without arguments
        trains_alike(run, (model, model, optimizer), (reference, plain), done)
        tried.add(sync.knobs.describe())
        done += 1
    ended = not sync.tuning
    optimizer.close()  # type: ignore[attr-defined]  # a DistributedOptimizer's
    assert done >= 5
    # Probes may leave only one setting, so that there is nothing to try.
    assert ended or len(tried) > 1, f"after {done} steps only {tried} was tried"
    settings = {"default": before.describe(), "last": sync.knobs.describe()}
    return {"iterations": done, "settings": len(tried), "ended": ended, **settings}


def scaled(run: RankRun) -> None:
    """Train with scaled losses, of which one overflows on the last rank, while a layer gets no gradient."""
    place = run.place.torch_device
    torch.manual_seed(0)
    model, unused = network().float().to(place), torch.nn.Linear(4, 4).to(place)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam([*model.parameters(), *unused.parameters()], lr=0.01, fused=True)
    )
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 64, device=place)).float().square().mean()
        bad = float("inf") if step == 2 and run.rank == run.size - 1 else 1.0
        scaler.scale(loss * bad).backward()
        scaler.step(optimizer)
        scaler.update()
        run.place.next_iteration()
    assert scaler.get_scale() == 512.0
    sums = hvd.allgather(torch.stack([param.detach().sum() for param in model.parameters()]).view(1, -1))
    assert sums.isfinite().all()
    assert all(torch.equal(row, sums[0]) for row in sums)
    optimizer.close()  # type: ignore[attr-defined]  # a DistributedOptimizer's


def graphs(run: RankRun) -> None:
    """Train modules whose passes are CUDA graphs, and compare with one process.

    A module that is compiled in parts has several graphs, and gradients are sent between their replays.
    """
    place = run.place.torch_device

    def in_parts(module: torch.nn.Module, sample: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        first, second = (run.place.compiled(part, sample) for part in (module[:2], module[2:]))  # type: ignore[index]
        return lambda inputs: second(first(inputs))

    def attached(module: torch.nn.Module, sample: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        wrapped = torch.nn.parallel.DistributedDataParallel(module)
        ddp.attach(wrapped)
        return run.place.compiled(wrapped, sample)

    open_group(run.place, run.rank, run.size)
    for capture in (run.place.graphed, run.place.compiled, in_parts, attached):
        torch.manual_seed(0)
        model = network().to(place)
        alone = copy.deepcopy(model)
        plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (alone, model))
        forward = capture(model, torch.zeros(4, 64, dtype=torch.float64, device=place))
        if capture is not attached:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for step in range(8):
            trains_alike(run, (model, forward, optimizer), (alone, plain), step)
        if capture is not attached:
            optimizer.close()  # type: ignore[attr-defined]  # a DistributedOptimizer's
