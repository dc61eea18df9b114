"""An autograd function whose backward pass raises."""

import torch


class Raises(torch.autograd.Function):
    """Identity whose backward pass raises `ValueError("half-way")`."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        """Raise `ValueError`."""
        raise ValueError("half-way")
