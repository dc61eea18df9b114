"""The gradients that have come in one iteration, and what the user did to them before they were reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch

from .buffers import GRAD, VERSION, GradientBuffers, HasGrad


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
        gradients: what was their `.grad` then, in the same order; the flat buffer's view once it is that.
        versions: of those tensors; `buffers.WRITTEN` = written since they came.
        own: how many came from this rank's backward pass; the others were put in for it.
    """

    def __init__(self, params: Sequence[HasGrad], buffers: GradientBuffers) -> None:
        self._params, self._buffers = params, buffers
        # Three lists, as a tuple for each gradient would be one more object to make and to collect.
        self.indices: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.versions: list[int] = []
        self._copied = 0
        self.own = 0
        self._handed_out: set[int] = set()

    @property
    def own_indices(self) -> list[int]:
        """Of the parameters whose gradients came from this rank's backward pass."""
        return self.indices[: self.own]

    @property
    def present(self) -> list[int]:
        """Of the parameters whose gradients have come, or are in `.grad` from before: all that will count."""
        if len(self.indices) == len(self._params):
            return self.indices
        arrived = set(self.indices)
        return [index for index, param in enumerate(self._params) if index in arrived or param.grad is not None]

    def add(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """The gradient of a parameter is complete, and had this version when it came."""
        self.indices.append(index)
        self.gradients.append(gradient)
        self.versions.append(version)

    def copy_in(self) -> int:
        """Copies what has come since the last time into the flat buffers; returns how many gradients that were."""
        first, self._copied = self._copied, len(self.indices)
        if first < self._copied:
            self._buffers.copy_in(self.indices, self.gradients, self.versions, first)
        return self._copied - first

    def put_in(self, index: int) -> None:
        """Stands in for a gradient that did not come: what is in `.grad` counts as it is, nothing counts as zeros.

        A frozen parameter is left alone.
        """
        param = self._params[index]
        if param.grad is not None and param.requires_grad:
            self.add(index, param.grad, param.grad._version)
            return
        view = self._buffers.view(index)
        if param.grad is view:
            param.grad = view.clone()
        self._buffers.clear(index)
        self.add(index, view, view._version)

    @property
    def written(self) -> list[int]:
        """Parameters whose gradients were written in place after they came, and are not reduced yet."""
        return [
            index
            for index, gradient, version in zip(self.indices, self.gradients, self.versions, strict=True)
            if gradient._version != version and self._params[index].grad is gradient
        ]

    @property
    def replaced(self) -> bool:
        """The user has put another tensor into some `.grad` since its gradient came, which is not reduced yet."""
        return any(
            (current := self._params[index].grad) is not gradient and current is not None
            for index, gradient in zip(self.indices, self.gradients, strict=True)
        )

    def hand_out(self, unused: Sequence[int] = ()) -> Interference:
        """After the reduction: every `.grad` that the user has not set to None holds the reduced gradient.

        Args:
            unused: parameters that keep None because no rank computed their gradients.
        """
        if self.own == len(self.indices) and not self._handed_out and self._is_untouched():
            return Interference((), ())
        rest = [number for number, index in enumerate(self.indices) if index not in self._handed_out]
        return self._hand_out(rest, frozenset(unused))

    def hand_out_some(self, indices: Sequence[int]) -> Interference:
        """As `hand_out`, of these parameters, which are reduced already; once each."""
        wanted = set(indices) - self._handed_out
        self._handed_out |= wanted
        return self._hand_out([number for number, index in enumerate(self.indices) if index in wanted], frozenset())

    def _hand_out(self, numbers: Sequence[int], left_alone: frozenset[int]) -> Interference:
        params, addresses = self._params, self._buffers.addresses
        replaced, written, copies = [], [], list[tuple[int, torch.Tensor]]()
        for number in numbers:
            index, gradient, version = self.indices[number], self.gradients[number], self.versions[number]
            current = params[index].grad
            if current is gradient:
                if current._version != version:
                    written.append(index)
                if current.data_ptr() != addresses[index]:
                    copies.append((index, current))
                    self._buffers.view(index)  # one whose memory was swapped is not used again
            elif number >= self.own:  # put in, so the reduced one is for this rank, too
                if params[index].requires_grad and index not in left_alone:
                    self._give(index, copies)
            elif current is not None:  # None: the user has set it so
                replaced.append(index)
                self._give(index, copies)
        self._buffers.copy_out(copies)
        return Interference(tuple(replaced), tuple(written))

    def _is_untouched(self) -> bool:
        """Every `.grad` is the flat buffer's view, and was not written. The usual case; the loops are C's."""
        if not self.indices:
            return True
        known, gradients = self._buffers.known(self.indices), self.gradients
        return (
            all(map(is_, map(GRAD, known.params), gradients))
            and list(map(VERSION, gradients)) == self.versions
            and list(map(torch.Tensor.data_ptr, gradients)) == known.addresses
        )

    def _give(self, index: int, copies: list[tuple[int, torch.Tensor]]) -> None:
        """Puts the reduced gradient into `.grad`, whatever is there: its place if that fits, else a copy."""
        if self._buffers.fits(index):
            self._params[index].grad = self._buffers.view(index)
        else:
            fresh = torch.empty_like(self._params[index])  # type: ignore[arg-type]  # a tensor in truth
            self._params[index].grad = fresh
            copies.append((index, fresh))
