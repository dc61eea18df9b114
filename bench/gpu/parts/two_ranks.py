"""Check results of two ranks that share the GPU, with NCCL over loopback between them. Nothing is timed."""

from __future__ import annotations

import torch
from conformance.on_streams import Streams, conform, train, train_two, ways

import sirtaki.torch as hvd
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
    with run.check("eager operations take the GPU's tensors"):
        eager(run, place.torch_device)
    with run.check("two optimizers use NCCL in one order") as found:
        found["iterations"] = train_two(nccl, 4 if dry else 30, run.until(0.25))
        assert found["iterations"] >= 4
    with run.check("a job tunes, and trains as one process") as found:
        found |= tuned(run, 45, run.until(0.4))
    with run.check("gradients through host memory equal the mean") as found:
        found["routes"] = [] if dry else conform(staged)
        found["iterations"] = train(staged, 6 if dry else 30, run.until(0.4))
        assert found["iterations"] >= 10
    with run.check("sums are right in whatever way NCCL is told to reduce") as found:
        found |= ways(nccl)


def same(there: torch.Tensor, here: torch.Tensor) -> None:
    torch.testing.assert_close(there.cpu(), here)


def eager(run: RankRun, place: torch.device) -> None:
    """Compare every eager collective of every dtype on GPU tensors with the same on host tensors."""
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
        batch = torch.randn(4 * run.size, 64, generator=torch.Generator().manual_seed(done), dtype=torch.float64)
        batch = batch.to(place)
        optimizer.zero_grad()
        model(batch[4 * run.rank : 4 * run.rank + 4]).square().mean().backward()
        optimizer.step()
        run.place.next_iteration()
        plain.zero_grad()
        reference(batch).square().mean().backward()
        plain.step()
        for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param, wanted, rtol=1e-10, atol=1e-12)
        tried.add(sync.knobs.describe())
        done += 1
    ended = not sync.tuning
    optimizer.close()  # type: ignore[attr-defined]  # a DistributedOptimizer's
    assert done >= 5
    assert ended or len(tried) > 1, f"after {done} steps only {tried} was tried"  # probes may leave nothing to try
    settings = {"default": before.describe(), "last": sync.knobs.describe()}
    return {"iterations": done, "settings": len(tried), "ended": ended, **settings}
