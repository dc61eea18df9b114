"""Gradients of one iteration that are ready on this rank: copied into the flat buffers, and assigned back."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_

import numpy as np
import torch

from sirtaki.machine import free_in_forked_children

from ..transports.shared_memory import CHUNK_ELEMENTS
from .buffers import REFERENCES, FlatBuffers

GRAD, VERSION, IS_SPARSE = attrgetter("grad"), attrgetter("_version"), attrgetter("is_sparse")
WRITTEN = -1
"""Version of a gradient that was written after it became ready."""

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

LARGE_ELEMENTS = 1 << 18
"""From this size on a gradient is copied in pieces of it, so that a unit need not wait for all of the gradient."""


class DeferredCopies:
    """Copies of gradients into the flat buffers of the host, which transport threads run.

    The training thread adds copies. Any thread may run them, in the order in which they were added.

    Attributes:
        count: copies that were added in this iteration; a large gradient is copied in several pieces.
        copied: how many of them have been run.
        cut: number of copies before those of a gradient in pieces of `LARGE_ELEMENTS`, by its position.
    """

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._copying = free_in_forked_children(threading.Lock())
        self.cut: dict[int, int] = {}
        self.count = self.copied = 0

    def clear(self) -> None:
        """Forget all copies. Call between iterations, when no transport thread runs any."""
        self._targets.clear()
        self._sources.clear()
        self.cut.clear()
        self.count = self.copied = 0

    def add(self, positions: Sequence[int], places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Add copies of gradients to their places, which have the same shapes and strides."""
        if max(map(torch.Tensor.numel, places)) < LARGE_ELEMENTS:
            self._targets += places
            self._sources += gradients
        else:
            for position, place, gradient in zip(positions, places, gradients, strict=True):
                pieces, of_gradient = _cut(place, gradient, LARGE_ELEMENTS)
                if pieces[0] is not place:
                    self.cut[position] = len(self._targets)
                self._targets += pieces
                self._sources += of_gradient
        self.count = len(self._targets)

    def copy(self, until: int) -> None:
        """Run those of the first `until` copies that have not been run. Thread-safe."""
        with self._copying, torch.no_grad():  # gradients made with create_graph=True have a graph
            part = slice(self.copied, until)
            if not (targets := self._targets[part]):
                return
            sources = self._sources[part]
            self._sources[part] = [_NOTHING] * len(sources)  # their memory is free from now on
            if max(map(torch.Tensor.numel, targets)) > CHUNK_ELEMENTS:
                pairs, targets, sources = zip(targets, sources, strict=True), [], []
                for target, source in pairs:
                    if target.numel() > CHUNK_ELEMENTS:
                        _copy_alone(target, source)
                    else:
                        targets.append(target)
                        sources.append(source)
            if targets:
                torch._foreach_copy_(targets, sources)
            self.copied = until


def _copy_alone(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies in this thread alone, where torch would take several."""
    if target.dtype is source.dtype and target.stride() == source.stride() and not target.is_complex():
        numel = target.numel()
        to, came = (tensor.detach().as_strided((numel,), (1,)).view(torch.uint8).numpy() for tensor in (target, source))
        np.copyto(to, came)
    else:
        pieces, of_source = _cut(target, source, CHUNK_ELEMENTS)
        torch._foreach_copy_(list(pieces), list(of_source))


def _cut(
    place: torch.Tensor, gradient: torch.Tensor, elements: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Both in pieces of so many elements, as they lie in memory; whole if they are smaller or lie there differently."""
    if place.numel() < elements or place.stride() != gradient.stride():
        return (place,), (gradient,)
    flat = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in (place, gradient)]
    pieces, of_gradient = (torch.split(tensor, elements) for tensor in flat)
    return pieces, of_gradient


class ReadyGradients:
    """The gradients that are ready in this iteration, on their way into the flat buffers and back to `.grad`.

    It keeps each tensor that was in `.grad`. A gradient that user code sets to None afterwards has been computed all
    the same, and counts on the other ranks. Positions are those of `FlatBuffers`.

    Attributes:
        buffers: flat buffers.
        copies: the copies that transport threads run.
        positions: of the parameters, in the order in which their gradients became ready.
        gradients: their `.grad` at that time, in the same order; the view of the flat buffer once `.grad` is that.
        versions: of those tensors; `WRITTEN` = written after the gradient became ready.
        own: how many gradients this rank has computed; the others were filled in.
        lost_replaced: parameters whose `.grad` was another tensor when the reduced gradient was assigned, and was lost.
        lost_written: parameters whose gradients were written in place before that, perhaps during the reduction.
    """

    def __init__(self, buffers: FlatBuffers) -> None:
        self.buffers = buffers
        # Three lists, because a tuple for each gradient is one more object to make and to collect.
        self.positions: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.copies = DeferredCopies()
        self.begin()

    def begin(self, *, defers: bool = False) -> None:
        """Begin an iteration.

        Args:
            defers: transport threads run the copies of gradients that come in the expected order.
        """
        for each in (self.positions, self.gradients, self.versions):
            each.clear()
        self._copied, self.own, self._defers = 0, 0, defers
        if self.copies.count:
            self.copies.clear()
        self.lost_replaced: list[int] = []
        self.lost_written: list[int] = []
        self._assigned: set[int] = set()
        self._all_assigned = False

    @property
    def present(self) -> list[int]:
        """Positions of the gradients that count for the other ranks: those that are ready or in `.grad` from before."""
        arrived = set(self.positions)
        return [
            position
            for position, param in enumerate(self.buffers.params)
            if position in arrived or param.grad is not None
        ]

    def add(self, position: int, gradient: torch.Tensor, version: int) -> None:
        """Add one gradient, which had this version when it became ready."""
        self.positions.append(position)
        self.gradients.append(gradient)
        self.versions.append(version)

    def add_in_order(self, params: Sequence[torch.Tensor]) -> bool:
        """Add the dense gradients of these parameters if they are the next ones in the expected order.

        With `copy_in` and `assign_all` this is what a gradient costs, so their loops run in C.

        Returns:
            False, and nothing is added, if another gradient was expected, or one of them is sparse or None.
        """
        buffers, first = self.buffers, len(self.positions)
        expected = slice(first, first + len(params))
        if first + len(params) > len(buffers.params) or not all(map(is_, params, buffers.params[expected])):
            return False
        gradients = list(map(GRAD, params))
        try:
            if any(map(IS_SPARSE, gradients)):
                return False
        except AttributeError:  # a gradient is None: the pass has led to the parameter, but computed nothing
            return False
        self.positions += buffers.numbers[expected]
        self.gradients += gradients
        self.versions += map(VERSION, gradients)
        return True

    def copy_in(self, since: int | None = None) -> int:
        """Copy the gradients that were added since the last call into the flat buffers, all at once.

        Where a gradient fits its place, `.grad` is the view from then on, also if the copy is deferred.

        Args:
            since: `add_in_order` has just added the gradients from this number on, so that user code cannot have
                changed them; None = user code may have changed any of them.

        Returns:
            The number of gradients.

        Raises:
            ConfigError: a parameter was moved to another device, or has another shape.
        """
        first, self._copied = self._copied, len(self.positions)
        if first == self._copied:
            return 0
        buffers, own, fresh = self.buffers, self.positions[first:], self.gradients[first:]
        part = slice(own[0], own[-1] + 1)
        views, params = buffers.views[part], buffers.params[part]
        unchanged = since is not None and first >= since
        if not unchanged and (
            own != buffers.numbers[part]
            or list(map(VERSION, fresh)) != self.versions[first:]
            or not all(map(is_, map(GRAD, params), fresh))
        ):
            self._copy_one_by_one(first)
        elif all(map(is_, views, fresh)):  # autograd has added to what is there
            if list(map(torch.Tensor.data_ptr, views)) != buffers.addresses[part]:
                self._copy_one_by_one(first)
        elif max(map(sys.getrefcount, views)) > REFERENCES or not buffers.accept(part, fresh):
            self._copy_one_by_one(first)
        else:
            deferred = self._defers and unchanged
            if not deferred:
                buffers.fill(own, fresh)
            try:
                deque(map(setattr, params, repeat("grad"), views), maxlen=0)
            except (RuntimeError, TypeError):  # the parameter has another dtype now, or another shape or device
                for param, gradient in zip(params, fresh, strict=True):
                    if param.grad is not gradient:
                        param.grad = gradient
                self._copy_one_by_one(first)
            else:
                if deferred:
                    self.copies.add(own, buffers.places[part], fresh)
                self.gradients[first:], self.versions[first:] = views, map(VERSION, views)
        return self._copied - first

    def _copy_one_by_one(self, first: int) -> None:
        buffers, copied, sources, misfits = self.buffers, list[int](), list[torch.Tensor](), list[int]()
        for number in range(first, len(self.positions)):
            position, gradient = self.positions[number], self.gradients[number]
            if gradient is not buffers.views[position]:
                buffers.part_with([position])
            elif buffers.is_intact(position):
                continue
            copied.append(position)
            sources.append(gradient)
            param, view = buffers.params[position], buffers.views[position]
            if position in buffers.lent:
                continue
            if not buffers.is_intact(position) or not buffers.accept(slice(position, position + 1), [gradient]):
                misfits.append(number)
            elif param.grad is gradient:
                try:
                    param.grad = view
                except (RuntimeError, TypeError):
                    misfits.append(number)
                else:
                    self._take(number, view)
        if copied:
            buffers.fill(copied, sources)
        for number in misfits:
            position, gradient = self.positions[number], self.gradients[number]
            fitting = buffers.take_misfit(position, gradient)
            if fitting is not None and buffers.params[position].grad is gradient:
                buffers.params[position].grad = fitting
                self._take(number, fitting)

    def _take(self, number: int, view: torch.Tensor) -> None:
        """The view stands for a gradient from now on; that it was written before is not forgotten."""
        unwritten = self.gradients[number]._version == self.versions[number]
        self.gradients[number], self.versions[number] = view, view._version if unwritten else WRITTEN

    def fill_missing(self, position: int) -> None:
        """Add what stands in for a gradient that is not ready: the value of `.grad`, or zeros if it is None.

        A parameter that is frozen now keeps its `.grad`, and counts as zeros.
        """
        param = self.buffers.params[position]
        if param.grad is not None and param.requires_grad:
            self.add(position, param.grad, param.grad._version)
            return
        if param.grad is self.buffers.view(position):
            param.grad = param.grad.clone()
        view = self.buffers.clear(position)
        self.add(position, view, view._version)

    @property
    def written(self) -> list[int]:
        """Positions of the gradients that were written in place after they became ready. Call before the reduction."""
        params = self.buffers.params
        return [
            position
            for position, gradient, version in zip(self.positions, self.gradients, self.versions, strict=True)
            if params[position].grad is gradient and gradient._version != version
        ]

    @property
    def replaced(self) -> bool:
        """True if user code has put another tensor into the `.grad` of a ready gradient. Call before the reduction."""
        params = self.buffers.params
        return any(
            (current := params[position].grad) is not gradient and current is not None
            for position, gradient in zip(self.positions, self.gradients, strict=True)
        )

    def assign_all(self, unused: Sequence[int] = ()) -> None:
        """Assign the reduced gradients to every `.grad` that user code has not set to None. Call after the reduction.

        Args:
            unused: positions of parameters that keep None, because no rank has computed their gradients.
        """
        buffers, self._all_assigned = self.buffers, True
        if (  # the usual case: every `.grad` is the flat buffer's view, and was not written
            self.own == len(buffers.params)
            and not self._assigned
            and self.positions == buffers.numbers
            and all(map(is_, map(GRAD, buffers.params), buffers.views))
            and list(map(VERSION, buffers.views)) == self.versions
            and list(map(torch.Tensor.data_ptr, buffers.views)) == buffers.addresses
        ):
            return
        rest = [number for number, position in enumerate(self.positions) if position not in self._assigned]
        self._assign(rest, frozenset(unused))

    def assign(self, positions: Sequence[int]) -> None:
        """Assign the reduced gradients of some parameters, once each, before all are reduced.

        After `assign_all` nothing is assigned: places may hold other gradients again, and user code owns `.grad`.
        """
        if self._all_assigned:
            return
        wanted = set(positions) - self._assigned
        self._assigned |= wanted
        self._assign([number for number, position in enumerate(self.positions) if position in wanted], frozenset())

    def _assign(self, numbers: Sequence[int], unused: frozenset[int]) -> None:
        buffers, copies = self.buffers, list[tuple[int, torch.Tensor]]()
        for number in numbers:
            position, gradient, version = self.positions[number], self.gradients[number], self.versions[number]
            param, current = buffers.params[position], buffers.params[position].grad
            if current is gradient:
                if current._version != version:
                    self.lost_written.append(position)
                if current.data_ptr() != buffers.addresses[position]:
                    copies.append((position, current))
                    buffers.view(position)  # one whose memory was swapped is not used again
                continue
            if number >= self.own:  # filled in, so the reduced one is for this rank, too
                if not param.requires_grad or position in unused:
                    continue
            elif current is None:  # the user has set it so
                continue
            else:
                self.lost_replaced.append(position)
            if buffers.fits(position) and position not in buffers.lent:
                param.grad = buffers.view(position)
            else:
                param.grad = torch.empty_like(param)
                copies.append((position, param.grad))
        buffers.copy_out(copies)
        if buffers.lent:
            buffers.put_back([self.positions[number] for number in numbers])
