"""Losses that ask for gradients themselves: `torch.autograd.grad` through what a model returns is no backward pass."""

from collections.abc import Callable

import torch
from torch import nn

Batch = Callable[..., torch.Tensor]
"""(rank, step, *shape) → inputs in float64."""


def _inputs(batch: Batch, rank: int, step: int) -> torch.Tensor:
    return batch(rank, step, 5, 6).requires_grad_()


def penalty(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """As WGAN-GP: the gradient at mixed inputs is to have the norm 1."""
    real, fake = batch(rank, step, 5, 6), batch(rank, 100 + step, 5, 6)
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return model(fake).mean() - model(real).mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def lazy_penalty(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """As R1, in every other step, through the very output that the loss is of."""
    inputs = _inputs(batch, rank, step)
    output = model(inputs)
    if step % 2:
        return output.square().mean()
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return output.square().mean() + 0.1 * slope.square().sum(1).mean()


def forces(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss is of the gradient only: the last bias has none."""
    inputs = _inputs(batch, rank, step)
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return (slope + inputs.detach()).square().mean()


def adaptive_weights(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Two losses are weighted by the norms of their gradients at the last layer, which differ between ranks."""
    output, last = model(batch(rank, step, 5, 6)), list(model.parameters())[-2]
    losses = output[:, 0].square().mean(), output[:, 1:].abs().mean()
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm().item() for loss in losses]
    return losses[0] + losses[1] * norms[0] / norms[1]


def logged(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Gradients are looked at before the backward pass, on all ranks."""
    inputs = _inputs(batch, rank, step)
    loss = model(inputs).square().mean()
    torch.autograd.grad(loss, [inputs, *model.parameters()], retain_graph=True)
    return loss


def logged_on_one(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The same on one rank alone."""
    return (logged if rank == 1 else plain)(batch, model, rank, step)


def plain(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """No gradient is asked for."""
    return model(batch(rank, step, 5, 6)).square().mean()


def chosen_inputs(batch: Batch, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Between forward and backward, a pass adds to the inputs' `.grad` only."""
    inputs = _inputs(batch, rank, step)
    loss = model(inputs).square().mean()
    loss.backward(inputs=[inputs], retain_graph=True)
    return loss + 0.0 * inputs.grad.sum()


LOSSES = (penalty, lazy_penalty, forces, adaptive_weights, logged, logged_on_one, chosen_inputs)
