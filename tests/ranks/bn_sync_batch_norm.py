"""SyncBatchNorm on several ranks equals torch's BatchNorm on the joined batch in one process."""

from typing import Any

import pytest
import torch
from conformance.training import assert_same_parameters, batch, main
from rank_jobs import cases
from torch import nn

import sirtaki.torch as hvd

CHANNELS = 5


def rows_of(rank: int, *, uneven: bool) -> int:
    return 2 + 3 * rank if uneven else 4


def share(rank: int, iteration: int, shape: tuple[int, ...], *, uneven: bool) -> torch.Tensor:
    return 3.0 + 2.0 * batch(rank, iteration, rows_of(rank, uneven=uneven), *shape)


def compare(
    make_joined: type[nn.Module], shape: tuple[int, ...], *, uneven: bool, tolerance: float = 1e-11, **options: Any
) -> None:
    torch.manual_seed(0)
    ours, theirs = hvd.SyncBatchNorm(CHANNELS, **options).double(), make_joined(CHANNELS, **options).double()
    if ours.affine:
        with torch.no_grad():
            ours.weight.copy_(torch.rand(CHANNELS) + 0.5)
            ours.bias.copy_(torch.randn(CHANNELS))
    theirs.load_state_dict(ours.state_dict())
    for iteration in range(3):
        parts = [share(rank, iteration, shape, uneven=uneven) for rank in range(hvd.size())]
        weights = [torch.randn(part.shape, generator=torch.Generator().manual_seed(r)) for r, part in enumerate(parts)]
        mine = parts[hvd.rank()].clone().requires_grad_()
        whole = torch.cat(parts).requires_grad_()
        for module in (ours, theirs):
            module.zero_grad()
        output, expected = ours(mine), theirs(whole)
        (output * weights[hvd.rank()]).sum().backward()
        (expected * torch.cat(weights)).sum().backward()
        before = sum(len(part) for part in parts[: hvd.rank()])
        own = slice(before, before + len(mine))
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(output, expected[own], **close)
        torch.testing.assert_close(mine.grad, whole.grad[own], **close)
        for (name, buffer), (_, wanted) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
            torch.testing.assert_close(buffer, wanted, **close, msg=lambda text, n=name: f"{n}: {text}")
        for (name, param), (_, wanted) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            total = hvd.allreduce(param.grad, op=hvd.Sum)
            torch.testing.assert_close(total, wanted.grad, **close, msg=lambda text, n=name: f"{n}: {text}")
    for module in (ours, theirs):
        module.eval()
    if ours.track_running_stats:
        torch.testing.assert_close(ours(parts[hvd.rank()]), theirs(parts[hvd.rank()]), **close)


def any_number_of_dimensions() -> None:
    for uneven in (False, True):
        compare(nn.BatchNorm1d, (CHANNELS,), uneven=uneven)
        compare(nn.BatchNorm1d, (CHANNELS, 7), uneven=uneven)
        compare(nn.BatchNorm2d, (CHANNELS, 3, 4), uneven=uneven)
        compare(nn.BatchNorm3d, (CHANNELS, 2, 3, 2), uneven=uneven)


def every_option() -> None:
    compare(nn.BatchNorm2d, (CHANNELS, 3, 4), uneven=True, affine=False)
    compare(nn.BatchNorm2d, (CHANNELS, 3, 4), uneven=True, track_running_stats=False)
    compare(nn.BatchNorm2d, (CHANNELS, 3, 4), uneven=True, momentum=None)
    compare(nn.BatchNorm2d, (CHANNELS, 3, 4), uneven=True, momentum=0.7, eps=0.3)


def large_means_lose_no_digits() -> None:
    """Check the variance of values with a mean of ten thousand, which a difference of sums of squares would lose."""
    module = hvd.SyncBatchNorm(1)
    output = module(1e4 + batch(hvd.rank(), 0, 64, 1, dtype=torch.float32))
    whole = torch.cat([1e4 + batch(rank, 0, 64, 1, dtype=torch.float32) for rank in range(hvd.size())]).double()
    exact = (whole - whole.mean()) / (whole.var(correction=0) + module.eps).sqrt()
    own = exact[64 * hvd.rank() : 64 * (hvd.rank() + 1)]
    torch.testing.assert_close(output.double(), own, rtol=1e-3, atol=1e-3)


def a_rank_without_rows_takes_part() -> None:
    if hvd.size() == 1:
        return
    module = hvd.SyncBatchNorm(CHANNELS).double()
    rows = 0 if hvd.rank() == 0 else 6
    mine = batch(hvd.rank(), 0, rows, CHANNELS).requires_grad_()
    output = module(mine)
    output.square().sum().backward()
    assert output.shape == mine.shape
    whole = torch.cat([batch(rank, 0, 6, CHANNELS) for rank in range(1, hvd.size())])
    torch.testing.assert_close(module.running_mean, 0.1 * whole.mean(0))


def half_precision_inputs() -> None:
    module = hvd.SyncBatchNorm(CHANNELS)
    mine = batch(hvd.rank(), 0, 8, CHANNELS).bfloat16().requires_grad_()
    output = module(mine)
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    assert mine.grad is not None
    assert mine.grad.dtype == torch.bfloat16


def too_little_to_normalise_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 2D"):
        hvd.SyncBatchNorm(CHANNELS)(torch.zeros(CHANNELS))
    rows = 1 if hvd.rank() == 0 else 0
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        hvd.SyncBatchNorm(CHANNELS)(torch.zeros(rows, CHANNELS))


def training_with_a_distributed_optimizer() -> None:
    def net(norm: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 6, 3), norm(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)).double()

    model, alone = net(hvd.SyncBatchNorm), net(nn.BatchNorm2d)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for iteration in range(5):
        parts = [batch(rank, iteration, 4, 2, 6, 6) for rank in range(hvd.size())]
        for each, inputs, net_ in ((optimizer, parts[hvd.rank()], model), (reference, torch.cat(parts), alone)):
            each.zero_grad()
            (net_(inputs) - 1.0).square().mean().backward()
            each.step()
        assert_same_parameters(model, alone, 1e-10)


CASES = cases(globals())

if __name__ == "__main__":
    main(CASES)
