"""A backward pass that goes wrong."""

import torch


class Raises(torch.autograd.Function):
    """Goes through its own backward pass with a ValueError, "half-way"."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        """The same values."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        """See above."""
        raise ValueError("half-way")
