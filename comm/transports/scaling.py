"""Multiplying a tensor in place by a factor as Horovod does, whatever its dtype."""

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """`tensor *= factor` in place; halves go through float32, integers through float64 and are truncated."""
    if factor == 1.0 or tensor.numel() == 0:
        return
    if tensor.dtype in HALF_DTYPES:
        tensor.copy_(tensor.float().mul_(factor))
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())
