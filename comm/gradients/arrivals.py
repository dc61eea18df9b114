"""The gradients that have come in one iteration, and what the user did to them before they were reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .buffers import GradientBuffers, HasGrad

WRITTEN = -1
"""Instead of a version: the gradient was written before it was copied."""


@dataclass(frozen=True, slots=True)
class Interference:
    """What was done to gradients between their hooks and the end of their reduction, by parameter index.

    Attributes:
        replaced: `.grad` is another tensor; the reduced gradient has taken its place.
        written: written in place, while it was being reduced perhaps.
    """

    replaced: tuple[int, ...]
    written: tuple[int, ...]


class Arrivals:
    """What has come so far in this iteration.

    The tensors are kept as they came: a gradient that the user sets to None afterwards has been computed all the
    same, and counts for the other ranks.

    Attributes:
        indices: of the parameters, in the order in which their gradients came.
        own: how many came from this rank's backward pass; the others were put in for it.
    """

    def __init__(self, params: Sequence[HasGrad], buffers: GradientBuffers) -> None:
        self._params, self._buffers = params, buffers
        self.indices: list[int] = []
        self._gradients: list[torch.Tensor] = []
        self._versions: list[int] = []  # of what is in `.grad`: the gradient, and its place once it was copied there
        self._copied = 0
        self.own = 0

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of a parameter is complete."""
        self.indices.append(index)
        self._gradients.append(gradient)
        self._versions.append(gradient._version)

    def copy_in(self) -> int:
        """Copies what has come since the last time into the flat buffers; returns how many gradients that were."""
        first, self._copied = self._copied, len(self.indices)
        fresh, gradients = self.indices[first:], self._gradients[first:]
        if fresh:
            self._buffers.copy_in(fresh, gradients)
            params, views = self._params, self._buffers.views
            for place, index in enumerate(fresh, first):
                view, gradient = views[index], self._gradients[place]
                if gradient is not view and params[index].grad is view:
                    if gradient._version == self._versions[place]:
                        self._versions[place] = view._version
                    else:
                        self._versions[place] = WRITTEN
                    self._gradients[place] = view
        return len(fresh)

    def put_in(self, index: int) -> None:
        """Stands in for a gradient that did not come: what is in `.grad` counts as it is, nothing counts as zeros.

        A frozen parameter is left alone.
        """
        param = self._params[index]
        if param.grad is not None and param.requires_grad:
            self.add(index, param.grad)
            return
        view = self._buffers.view(index)
        if param.grad is view:
            param.grad = view.clone()
        self._buffers.clear(index)
        self.add(index, view)

    def hand_out(self, unused: Sequence[int] = ()) -> Interference:
        """After the reduction: every `.grad` that the user has not set to None holds the reduced gradient.

        Args:
            unused: parameters that keep None because no rank computed their gradients.
        """
        params, addresses = self._params, self._buffers.addresses
        replaced, written, copies = [], [], list[tuple[int, torch.Tensor]]()
        left_alone = set(unused)
        for place, index in enumerate(self.indices):
            param = params[index]
            current, gradient = param.grad, self._gradients[place]
            if place >= self.own and (current is None or not param.requires_grad):
                if param.requires_grad and index not in left_alone:
                    self._give(index, copies)
            elif current is None:
                continue  # the user has set it to None
            elif current is not gradient:
                replaced.append(index)
                self._give(index, copies)
            else:
                if current._version != self._versions[place]:
                    written.append(index)
                if current.data_ptr() != addresses[index]:
                    copies.append((index, current))
        self._buffers.copy_out(copies)
        return Interference(tuple(replaced), tuple(written))

    def _give(self, index: int, copies: list[tuple[int, torch.Tensor]]) -> None:
        """Puts the reduced gradient into `.grad`, whatever is there: its place if that fits, else a copy."""
        if self._buffers.fits(index):
            self._params[index].grad = self._buffers.view(index)
        else:
            fresh = torch.empty_like(self._params[index])  # type: ignore[arg-type]  # a tensor in truth
            self._params[index].grad = fresh
            copies.append((index, fresh))
