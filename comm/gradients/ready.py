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
    """Gradients on their way into the flat buffers of the host, which the threads that carry units copy.

    One thread adds, any may copy: what is needed first is copied first.

    Attributes:
        count: how much there is to copy, in gradients and pieces of large ones.
        copied: how much of that is copied.
        cut: of those in pieces of `LARGE_ELEMENTS`, by position: how much there is before them.
    """

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._copying = free_in_forked_children(threading.Lock())
        self.cut: dict[int, int] = {}
        self.count = self.copied = 0

    def add(self, positions: Sequence[int], places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """They are to be copied, each to its place, which has the same form."""
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
        """Copies what was not copied before, of the first so many."""
        with self._copying, torch.no_grad():  # gradients made with create_graph=True have a graph
            part = slice(self.copied, until)
            if not (targets := self._targets[part]):
                return
            sources = self._sources[part]
            self._sources[part] = [_NOTHING] * len(sources)  # nobody needs their memory any more
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
    """What has come so far in this iteration, and its way into the flat buffers and out of them.

    The tensors are kept as they came: a gradient that the user sets to None afterwards has been computed all the
    same, and counts for the other ranks. Parameters are named by their positions in the buffers' order.

    Attributes:
        copies: those that other threads do; None = none.
        positions: of the parameters, in the order in which their gradients came.
        gradients: what was their `.grad` then, in the same order; the flat buffer's view once it is that.
        versions: of those tensors; `buffers.WRITTEN` = written since they came.
        own: how many came from this rank's backward pass; the others were put in for it.
        lost_replaced: parameters whose `.grad` was another tensor when the reduced gradient was handed out, which has
            taken its place.
        lost_written: parameters whose gradients were written in place before that, while they were reduced perhaps.
    """

    def __init__(self, buffers: FlatBuffers, *, beside: bool = False) -> None:
        """Args: `beside`: threads that carry units copy what `add_in_order` has noted, which takes no time here."""
        self._buffers = buffers
        # Three lists, as a tuple for each gradient would be one more object to make and to collect.
        self.positions: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.versions: list[int] = []
        self._copied = 0
        self.copies = DeferredCopies() if beside else None
        self.own = 0
        self.lost_replaced: list[int] = []
        self.lost_written: list[int] = []
        self._handed_out: set[int] = set()
        self._all_handed_out = False

    @property
    def present(self) -> list[int]:
        """Of the parameters whose gradients have come, or are in `.grad` from before: all that will count."""
        arrived = set(self.positions)
        return [
            position
            for position, param in enumerate(self._buffers.params)
            if position in arrived or param.grad is not None
        ]

    def add(self, position: int, gradient: torch.Tensor, version: int) -> None:
        """The gradient of a parameter is complete, and had this version when it came."""
        self.positions.append(position)
        self.gradients.append(gradient)
        self.versions.append(version)

    def add_in_order(self, params: Sequence[torch.Tensor]) -> bool:
        """Dense gradients of these parameters are complete; False, and nothing is noted, unless they are the next ones.

        With `copy_in` and `hand_out` this is what a gradient costs: their loops are C's.
        """
        buffers, first = self._buffers, len(self.positions)
        expected = slice(first, first + len(params))
        if first + len(params) > len(buffers.params) or not all(map(is_, params, buffers.params[expected])):
            return False
        gradients = list(map(GRAD, params))
        try:
            if any(map(IS_SPARSE, gradients)):
                return False
        except AttributeError:  # None: a pass that leads here has come to nothing
            return False
        self.positions += buffers.numbers[expected]
        self.gradients += gradients
        self.versions += map(VERSION, gradients)
        return True

    def copy_in(self, since: int | None = None) -> int:
        """Copies what has come since the last time into the flat buffers, all at once; returns how many that were.

        Where a gradient fits its place, `.grad` is the view from then on, also where `copies` has yet to fill it.

        Args:
            since: what came from this number on was noted by `add_in_order` just now, so that nobody can have touched
                it; None = the user may have touched anything.

        Raises:
            ConfigError: a parameter was moved to another device, or has another shape.
        """
        first, self._copied = self._copied, len(self.positions)
        if first < self._copied and not self._copy_usual(first, looks=since is None or first < since):
            self._copy_one_by_one(first)
        return self._copied - first

    def _copy_usual(self, first: int, *, looks: bool) -> bool:
        """Neighbours that have come in order, whose gradients nobody has touched: copies them; else returns False."""
        buffers, own, fresh = self._buffers, self.positions[first:], self.gradients[first:]
        part = slice(own[0], own[-1] + 1)
        views, params = buffers.views[part], buffers.params[part]
        if looks and (
            own != buffers.numbers[part]
            or list(map(VERSION, fresh)) != self.versions[first:]
            or not all(map(is_, map(GRAD, params), fresh))
        ):
            return False
        if all(map(is_, views, fresh)):  # autograd has added to what is there
            return list(map(torch.Tensor.data_ptr, views)) == buffers.addresses[part]
        if max(map(sys.getrefcount, views)) > REFERENCES or buffers.has_users(part):
            return False
        if not buffers.have_form(part, fresh):
            return False
        copies = None if looks else self.copies
        if copies is None:
            buffers.fill(own, fresh)
        try:
            deque(map(setattr, params, repeat("grad"), views), maxlen=0)
        except (RuntimeError, TypeError):  # the parameter has another dtype now, or another shape or device
            for param, gradient in zip(params, fresh, strict=True):
                if param.grad is not gradient:
                    param.grad = gradient
            return False
        if copies is not None:
            copies.add(own, buffers.places[part], fresh)
        self.gradients[first:], self.versions[first:] = views, map(VERSION, views)
        return True

    def _copy_one_by_one(self, first: int) -> None:
        buffers, copied, sources, misfits = self._buffers, list[int](), list[torch.Tensor](), list[int]()
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
            if not buffers.is_intact(position) or not buffers.have_form(slice(position, position + 1), [gradient]):
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

    def put_in(self, position: int) -> None:
        """Stands in for a gradient that did not come: what is in `.grad` counts as it is, nothing counts as zeros.

        A frozen parameter is left alone.
        """
        param = self._buffers.params[position]
        if param.grad is not None and param.requires_grad:
            self.add(position, param.grad, param.grad._version)
            return
        if param.grad is self._buffers.view(position):
            param.grad = param.grad.clone()
        view = self._buffers.clear(position)
        self.add(position, view, view._version)

    @property
    def written(self) -> list[int]:
        """Parameters whose gradients were written in place after they came, and are not reduced yet."""
        params = self._buffers.params
        return [
            position
            for position, gradient, version in zip(self.positions, self.gradients, self.versions, strict=True)
            if params[position].grad is gradient and gradient._version != version
        ]

    @property
    def replaced(self) -> bool:
        """The user has put another tensor into some `.grad` since its gradient came, which is not reduced yet."""
        params = self._buffers.params
        return any(
            (current := params[position].grad) is not gradient and current is not None
            for position, gradient in zip(self.positions, self.gradients, strict=True)
        )

    def hand_out(self, unused: Sequence[int] = ()) -> None:
        """After the reduction: every `.grad` that the user has not set to None holds the reduced gradient.

        Args:
            unused: parameters that keep None because no rank computed their gradients.
        """
        buffers, self._all_handed_out = self._buffers, True
        if (  # as usual every `.grad` is the flat buffer's view, and was not written
            self.own == len(buffers.params)
            and not self._handed_out
            and self.positions == buffers.numbers
            and all(map(is_, map(GRAD, buffers.params), buffers.views))
            and list(map(VERSION, buffers.views)) == self.versions
            and list(map(torch.Tensor.data_ptr, buffers.views)) == buffers.addresses
        ):
            return
        rest = [number for number, position in enumerate(self.positions) if position not in self._handed_out]
        self._hand_out(rest, frozenset(unused))

    def hand_out_some(self, positions: Sequence[int]) -> None:
        """As `hand_out`, of these parameters, which are reduced already; once each.

        Nothing is done after `hand_out`: places may hold other gradients again, and what is done to `.grad` holds.
        """
        if self._all_handed_out:
            return
        wanted = set(positions) - self._handed_out
        self._handed_out |= wanted
        self._hand_out([number for number, position in enumerate(self.positions) if position in wanted], frozenset())

    def _hand_out(self, numbers: Sequence[int], left_alone: frozenset[int]) -> None:
        buffers, copies = self._buffers, list[tuple[int, torch.Tensor]]()
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
            if number >= self.own:  # put in, so the reduced one is for this rank, too
                if not param.requires_grad or position in left_alone:
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
