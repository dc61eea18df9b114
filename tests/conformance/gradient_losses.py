"""Losses that compute gradients by `torch.autograd.grad` through the model's output, which is no backward pass."""

from collections.abc import Callable

import torch
from torch import nn

Batch = Callable[..., torch.Tensor]
"""Function (rank, step, *shape) that returns inputs in float64."""


def _inputs(batch: Batch, rank: int, step: int) -> torch.Tensor:
    return batch(rank, step, 5, 6).requires_grad_()


def penalty(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Gradient penalty of WGAN-GP: the gradient at mixed inputs should have norm 1."""
    real, fake = batch(rank, step, 5, 6), batch(rank, 100 + step, 5, 6)
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return model(fake).mean() - model(real).mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def lazy_penalty(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Penalty of R1 in every other step, through the same output as the loss."""
    inputs = _inputs(batch, rank, step)
    output = model(inputs)
    if step % 2:
        return output.square().mean()
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return output.square().mean() + 0.1 * slope.square().sum(1).mean()


def forces(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Loss of the gradient only. The last bias has no gradient."""
    inputs = _inputs(batch, rank, step)
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return (slope + inputs.detach()).square().mean()


def adaptive_weights(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Two losses weighted by the norms of their gradients at the last layer. The norms differ between ranks."""
    output, last = model(batch(rank, step, 5, 6)), list(model.parameters())[-2]
    losses = output[:, 0].square().mean(), output[:, 1:].abs().mean()
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm().item() for loss in losses]
    return losses[0] + losses[1] * norms[0] / norms[1]


def logged(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Loss with gradients that all ranks compute before the backward pass, for logging."""
    inputs = _inputs(batch, rank, step)
    loss = model(inputs).square().mean()
    torch.autograd.grad(loss, [inputs, *model.parameters()], retain_graph=True)
    return loss


def logged_on_one(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Loss with gradients that only one rank computes, for logging."""
    return (logged if rank == 1 else plain)(batch, model, rank, step)


def plain(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Loss without gradients of its own."""
    return model(batch(rank, step, 5, 6)).square().mean()


def chosen_inputs(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Loss with a pass between forward and backward that adds to the inputs' `.grad` only."""
    inputs = _inputs(batch, rank, step)
    loss = model(inputs).square().mean()
    loss.backward(inputs=[inputs], retain_graph=True)
    return loss + 0.0 * inputs.grad.sum()


LOSSES = (penalty, lazy_penalty, forces, adaptive_weights, logged, logged_on_one, chosen_inputs)
