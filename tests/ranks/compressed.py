"""Compressed gradients: the applied gradients and the residual add up to all gradients.

Started by test_compressed.py.
"""

import copy
import math
from typing import Any

import torch
from conformance.training import assert_equal_on_all_ranks, batch, main, raises
from rank_jobs import cases
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError
from sirtaki.torch import ddp


class Halves:
    """A user's codec that sends float16."""

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        return values.half().view(torch.uint8)

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        return packed.clone().view(torch.float16).float()


SCHEMES: dict[str, Any] = {
    "int8": hvd.Compression.int8,
    "fp8": hvd.Compression.fp8,
    "topk": hvd.Compression.topk(0.05),
    "powersgd": hvd.Compression.powersgd(2),
    "own": Halves(),
}


class Given(nn.Module):
    """A module whose gradients are the values of `batch`."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = [(7,), (64, 50), (33, 31), (0, 4), (16, 3, 5, 5), (5001,), (), (40, 1)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)
        self.turned = nn.Parameter(torch.zeros(60, 40, dtype=dtype).t())

    def gradient(self, place: int, rank: int, step: int) -> torch.Tensor:
        """Return gradients of different sizes, with some rows that are always large."""
        shape = list(self.parameters())[place].shape
        values = batch(rank, 100 * step + place, *(shape or (1,))).view(shape)
        return values * 10.0 ** (place % 3 - 1) + (rank + 1 if place == 1 else 0)

    def forward(self, rank: int, step: int) -> torch.Tensor:
        parts = (
            (param * self.gradient(place, rank, step).to(param.dtype)).sum()
            for place, param in enumerate(self.parameters())
        )
        return sum(parts, torch.zeros(()))


def owed_by(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    owed: dict[str, torch.Tensor] = optimizer.state_dict()["sirtaki_compression"]["owed"]
    return owed


def what_is_applied_and_owed_is_the_sum_of_the_gradients() -> None:
    for name, scheme in SCHEMES.items():
        for passes in (1, 2):
            model = Given()
            named = list(model.named_parameters())
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), named, scheme, backward_passes_per_step=passes
            )
            compressed_something = False
            for step in range(12):
                for turn in range(passes):
                    model(hvd.rank(), passes * step + turn).backward()
                optimizer.step()
                optimizer.zero_grad()
                compressed_something |= any(bool(owed.any()) for owed in owed_by(optimizer).values())
            assert compressed_something or hvd.size() == 1, name
            for place, (key, param) in enumerate(named):
                truth = sum(
                    (model.gradient(place, rank, step) for rank in range(hvd.size()) for step in range(12 * passes)),
                    torch.zeros(param.shape, dtype=torch.float64),
                )
                mine = owed_by(optimizer).get(key, torch.zeros(param.numel()))
                owed = hvd.allreduce(mine.double(), op=hvd.Sum, name=f"owed.{name}.{passes}.{key}")
                owed = torch.empty_strided(param.shape, param.stride(), dtype=torch.float64).copy_(
                    torch.as_strided(owed, param.shape, param.stride()) if param.numel() else owed.view(param.shape)
                )
                applied = -param.detach().double() * hvd.size()
                torch.testing.assert_close(
                    applied + owed, truth, rtol=1e-4, atol=1e-3, msg=lambda t, n=name, k=key: f"{n} {k}: {t}"
                )
            assert_equal_on_all_ranks(model)
            optimizer.close()


LIMITS = {"int8": 0.03, "fp8": 0.15, "own": 2e-3}


def one_step_is_off_by_what_is_stated() -> None:
    for name, limit in LIMITS.items():
        model = Given()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), SCHEMES[name]
        )
        for step in range(3):  # the first iterations are profiled and uncompressed
            optimizer.zero_grad()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            before = {key: there.clone() for key, there in owed_by(optimizer).items()}
            model(hvd.rank(), step).backward()
            optimizer.step()
        lost = total = 0.0
        for place, (key, param) in enumerate(model.named_parameters()):
            if not param.is_contiguous() or not param.numel() or hvd.size() == 1:
                continue
            exact = sum((model.gradient(place, rank, 2) for rank in range(hvd.size())), torch.zeros(param.shape))
            exact += hvd.allreduce(before[key].double(), op=hvd.Sum, name=f"before.{name}.{key}").view_as(exact)
            lost += float((-param.detach().double() * hvd.size() - exact).square().sum())
            total += float(exact.square().sum())
        assert math.sqrt(lost) <= limit * math.sqrt(total), (name, lost, total)
        optimizer.close()


def numbers_that_are_not_finite_are_seen_by_all_and_forgotten() -> None:
    for name, scheme in SCHEMES.items():
        for value in (math.inf, math.nan, -math.inf):
            model = nn.Linear(90, 70)
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), scheme
            )
            for step in range(6):
                optimizer.zero_grad()
                loss = model(batch(hvd.rank(), step, 4, 90, dtype=torch.float32)).square().mean()
                if step == 4 and hvd.rank() == hvd.size() - 1:
                    loss = loss + model.weight[3, 5] * value
                loss.backward()
                optimizer.synchronize()
                seen = not all(bool(param.grad.isfinite().all()) for param in model.parameters())
                assert seen == (step == 4), (name, value, step)
                if step == 4:
                    assert not model.weight.grad[3, 5].isfinite()
                if not seen:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                assert all(bool(owed.isfinite().all()) for owed in owed_by(optimizer).values()), (name, value)
            optimizer.close()


def a_state_that_is_loaded_owes_the_same() -> None:
    for name, scheme in SCHEMES.items():
        if name == "powersgd":  # because its factors belong to units, which may change
            continue

        def make(scheme: Any = scheme) -> tuple[Given, torch.optim.Optimizer]:
            model = Given()
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return model, hvd.DistributedOptimizer(plain, model.named_parameters(), scheme)

        def train(model: Given, optimizer: torch.optim.Optimizer, steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                model(hvd.rank(), step).backward()
                optimizer.step()

        model, optimizer = make()
        train(model, optimizer, range(6))
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        other, again = make()
        train(other, again, range(3))  # after the profiled iterations, with another residual
        other.load_state_dict(kept[0])
        again.load_state_dict(kept[1])
        train(model, optimizer, range(6, 10))
        train(other, again, range(6, 10))
        for key, param in model.named_parameters():
            close = {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(
                dict(other.named_parameters())[key], param, **close, msg=lambda t, n=name, k=key: f"{n} {k} {t}"
            )
        optimizer.close()
        again.close()


def all_dtypes_train() -> None:
    for name, scheme in SCHEMES.items():
        # Their residuals are applied so late that only small steps do not overshoot.
        rough = name in ("topk", "powersgd")
        for dtype in (torch.float64,) if rough else (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
            torch.manual_seed(0)
            weight = nn.Parameter(torch.randn(60, 50).to(dtype))
            target = torch.randn(60, 50)
            sgd = torch.optim.SGD([weight], lr=0.02 if rough else 0.1)
            optimizer = hvd.DistributedOptimizer(sgd, [("w", weight)], scheme)
            for _ in range(300 if rough else 80):
                optimizer.zero_grad()
                (weight - target * (2 * hvd.rank() + 1) / hvd.size()).abs().square().sum().mul(0.5).backward()
                optimizer.step()
            off = float((weight.detach().to(torch.complex64) - target).abs().max())
            assert off < 0.15, (name, dtype, off)
            assert torch.equal(hvd.broadcast(weight.detach(), 0), weight)
            optimizer.close()


def sets_of_ranks_sparse_rows_and_joined_ranks_go_along() -> None:
    torch.manual_seed(0)
    embedding, dense = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 300)
    params = [*embedding.named_parameters(prefix="e"), *dense.named_parameters(prefix="d")]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param for _, param in params], lr=0.01), params, hvd.Compression.int8
    )
    before = embedding.weight.detach().clone()
    for _ in range(4 + hvd.rank()):
        optimizer.zero_grad()
        rows = torch.tensor([1, 3 + hvd.rank()])
        dense(embedding(rows)).square().mean().backward()
        optimizer.step()
    hvd.join()
    untouched = [row for row in range(50) if row not in (1, *(3 + rank for rank in range(hvd.size())))]
    assert torch.equal(embedding.weight.detach()[untouched], before[untouched])
    optimizer.close()
    if hvd.size() > 2:
        pair = hvd.add_process_set([0, 1])
        if hvd.rank() < 2:
            model = Given()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0),
                model.named_parameters(),
                hvd.Compression.topk(0.1),
                process_set=pair,
            )
            for step in range(5):
                optimizer.zero_grad()
                model(hvd.rank(), step).backward()
                optimizer.step()
            optimizer.close()
        hvd.remove_process_set(pair)


def gradients_of_ddp_are_compressed_too() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size == 1:  # because nothing is attached
        return
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = hvd.broadcast_object(store.port if store else None)
    store = store or TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(80, 60))
    ddp.attach(model, compression=hvd.Compression.int8)
    applied, truth = torch.zeros(60, 80), torch.zeros(60, 80)
    for step in range(8):
        model.zero_grad()
        inputs = batch(rank, step, 4, 80, dtype=torch.float32)
        model(inputs).sum().backward()
        exact = inputs.sum(0).expand(60, 80).contiguous()
        truth += hvd.allreduce(exact, name="exact")
        applied += model.module.weight.grad
        if step == 7:
            lost = float((applied - truth).norm() / truth.norm())
            assert 0.0 < lost < 0.01, lost  # after eight steps, only the last residual is missing
    assert_equal_on_all_ranks(model)
    dist.destroy_process_group()


def what_cannot_be_compressed_is_told() -> None:
    weight = nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([weight], lr=0.1)
    raises(ConfigError, "an object with the methods pack", lambda: hvd.DistributedOptimizer(sgd, compression=object()))
    raises(
        ConfigError,
        "it requires DistributedOptimizer",
        lambda: hvd.allreduce(torch.ones(2), compression=hvd.Compression.int8),
    )
    raises(ConfigError, "above 0 and at most 1", lambda: hvd.Compression.topk(0.0))
    raises(ConfigError, "at least 1", lambda: hvd.Compression.powersgd(0))
    if hvd.size() == 2:
        raises(
            ConfigError,
            "op=Adasum supports only",
            lambda: hvd.DistributedOptimizer(sgd, compression=hvd.Compression.int8, op=hvd.Adasum),
        )
        first = hvd.DistributedOptimizer(sgd, [("w", weight)], hvd.Compression.int8)
        other = torch.optim.SGD([weight], lr=0.1)
        raises(ConfigError, "another compression", lambda: hvd.DistributedOptimizer(other, [("w", weight)]))
        first.close()


CASES = cases(globals())

if __name__ == "__main__":
    main(CASES)
