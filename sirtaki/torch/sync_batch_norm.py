"""Batch normalisation over the batches of all ranks, on GPUs and on the CPU.

Each rank computes the count, the mean and the sum of squared deviations of each channel. These statistics of all ranks
are combined by the parallel algorithm of Chan, Golub and LeVeque (1979), which is more accurate than a difference of
squares. The batches of ranks may have different sizes, and may be empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .mpi_ops import Sum, allgather, allreduce, size


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` over the combined batch of all ranks, for inputs with two or more dimensions."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the input with the statistics of all ranks. Collective during training with more than one rank.

        Args:
            input: `(n, channels, …)`. `n` may differ between ranks.
        """
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats or self.running_mean is None
        if not uses_batch or size() == 1:
            return super().forward(input)
        running_mean, running_var, momentum = None, None, 0.0
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            running_mean, running_var = self.running_mean, self.running_var
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        result: torch.Tensor = _SyncBatchNormFunction.apply(  # type: ignore[no-untyped-call]  # untyped in PyTorch
            input, self.weight, self.bias, running_mean, running_var, self.eps, momentum
        )
        return result


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape one value per channel, `(channels,)`, to `(1, channels, 1, …)`, which broadcasts over `like`."""
    return values.view(1, -1, *(1 for _ in range(like.dim() - 2)))


class _SyncBatchNormFunction(torch.autograd.Function):
    """Autograd function that normalises over the batches of all ranks. It computes statistics in float32 or float64."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        momentum: float,
    ) -> torch.Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        over = [0, *range(2, input.dim())]
        channels = input.shape[1]
        own_count = float(input.numel() // max(channels, 1))
        own_mean = wide.mean(over) if own_count else wide.new_zeros(channels)
        own_squares = (wide - _per_channel(own_mean, wide)).square().sum(over)
        own = torch.cat([own_mean, own_squares, wide.new_full((1,), own_count)])
        ranks = allgather(own.unsqueeze(0))
        means, squares, counts = ranks[:, :channels], ranks[:, channels:-1], ranks[:, -1:]
        count = counts.sum()
        # Compare `count` only if this rank has at most one value, because the comparison makes the host wait for a GPU.
        if own_count <= 1 and count <= 1:
            raise ValueError(
                f"SyncBatchNorm expected more than 1 value per channel when training, got {int(count)} over all ranks; "
                "increase the batch size"
            )
        mean = (means * counts).sum(0) / count
        deviations = squares.sum(0) + (counts * (means - mean).square()).sum(0)
        scale = torch.rsqrt(deviations / count + eps)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((deviations / (count - 1)).to(running_var.dtype), momentum)
        ctx.save_for_backward(input, weight, mean, scale, count)
        ctx.has_bias = bias is not None
        normal = (wide - _per_channel(mean, wide)) * _per_channel(scale, wide)
        if weight is not None:
            normal = normal * _per_channel(weight, wide)
        if bias is not None:
            normal = normal + _per_channel(bias, wide)
        return normal.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, scale, count = ctx.saved_tensors
        wide = input.to(mean.dtype)
        outer = grads[0].to(mean.dtype)
        over = [0, *range(2, input.dim())]
        normal = (wide - _per_channel(mean, wide)) * _per_channel(scale, wide)
        # Gradients of weight and bias are not reduced here, because the optimizer reduces them.
        own = torch.stack([outer.sum(over), (outer * normal).sum(over)])
        grad_input = None
        if ctx.needs_input_grad[0]:
            outer_mean, product_mean = (allreduce(own, op=Sum) / count).unbind()
            inner = outer - _per_channel(outer_mean, wide) - normal * _per_channel(product_mean, wide)
            factor = scale if weight is None else scale * weight
            grad_input = (inner * _per_channel(factor, wide)).to(input.dtype)
        grad_weight = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = own[0].to(weight.dtype if weight is not None else mean.dtype) if ctx.has_bias else None
        return grad_input, grad_weight, grad_bias, None, None, None, None
