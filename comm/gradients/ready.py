"""Ready gradients of one iteration on this rank: copy them into the flat buffers, and back to `.grad` when reduced."""

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
"""Substitute for the version counter of a gradient to which user code wrote after it became ready."""

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

LARGE_ELEMENTS = 1 << 18
"""Number of elements in a piece of a large gradient. Large gradients are copied into the flat buffer piece by piece, so
that a unit (bucket) waits only for the pieces with its own elements.
"""


class DeferredCopies:
    """Copies of gradients into the flat buffers in the CPU's memory, which transport threads run.

    The training thread adds copies. Any thread may run them, in the order in which they were added.

    Attributes:
        count: number of copies added in this iteration. A large gradient is copied in several pieces.
        copied: number of copies that have been run.
        cut: for each gradient that is copied in pieces, the number of copies before its first piece, by the gradient's
            position (its index in the expected order of gradients).
    """

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._copying = free_in_forked_children(threading.Lock())
        self.cut: dict[int, int] = {}
        self.count = self.copied = 0

    def clear(self) -> None:
        """Forget all copies. Call between iterations, when no transport thread runs copies."""
        self._targets.clear()
        self._sources.clear()
        self.cut.clear()
        self.count = self.copied = 0

    def add(self, positions: Sequence[int], places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Add copies of gradients into their places in the flat buffers, which have the same shapes and strides."""
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
        """Run those of the first `until` copies that have not been run yet. Thread-safe."""
        with self._copying, torch.no_grad():  # record no graph, even if gradients have one (create_graph=True)
            part = slice(self.copied, until)
            if not (targets := self._targets[part]):
                return
            sources = self._sources[part]
            self._sources[part] = [_NOTHING] * len(sources)  # drop the references, so that memory is freed
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
    """Copy a large tensor in the calling thread only, where PyTorch would use several threads."""
    if target.dtype is source.dtype and target.stride() == source.stride() and not target.is_complex():
        numel = target.numel()
        to, bits = (tensor.detach().as_strided((numel,), (1,)).view(torch.uint8).numpy() for tensor in (target, source))
        np.copyto(to, bits)
    else:
        pieces, of_source = _cut(target, source, CHUNK_ELEMENTS)
        torch._foreach_copy_(list(pieces), list(of_source))


def _cut(
    place: torch.Tensor, gradient: torch.Tensor, elements: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Split a gradient and its place in the flat buffer into pieces of `elements` elements each, in memory order.

    Keep both whole if they are smaller than a piece or if their strides differ.
    """
    if place.numel() < elements or place.stride() != gradient.stride():
        return (place,), (gradient,)
    flat = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in (place, gradient)]
    pieces, of_gradient = (torch.split(tensor, elements) for tensor in flat)
    return pieces, of_gradient


class ReadyGradients:
    """Ready gradients of this iteration, in the order in which they became ready.

    References to the gradients are kept, because a gradient is still reduced if user code sets `.grad` to None after it
    became ready. A position is an index in the expected order of the gradients, which is the order of the flat buffers.

    Attributes:
        buffers: flat buffers.
        copies: copies into the flat buffers that transport threads run.
        positions: positions of the parameters.
        gradients: the tensor in `.grad` of each parameter; the view of the flat buffer once the view is `.grad`.
        versions: version counter of each tensor in `gradients` when it became ready; `WRITTEN` = user code wrote to it
            since.
        own: number of gradients that this rank has computed. `fill_missing` has added the rest.
        lost_replaced: positions where user code replaced `.grad` too early: the reduced gradient took its place.
        lost_written: positions where user code wrote to the gradient too early: the reduced gradient is undefined.
    """

    def __init__(self, buffers: FlatBuffers) -> None:
        self.buffers = buffers
        # Use three lists, because a list of tuples would cost one more object for each gradient.
        self.positions: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.copies = DeferredCopies()
        self.begin()

    def begin(self, *, defers: bool = False) -> None:
        """Begin an iteration.

        Args:
            defers: True if transport threads run the copies of gradients that are ready in the expected order.
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
        """Positions of parameters that have a ready gradient, or whose `.grad` is not None."""
        ready = set(self.positions)
        return [
            position
            for position, param in enumerate(self.buffers.params)
            if position in ready or param.grad is not None
        ]

    def add(self, position: int, gradient: torch.Tensor, version: int) -> None:
        """Add one ready gradient. `version` is its version counter when it became ready."""
        self.positions.append(position)
        self.gradients.append(gradient)
        self.versions.append(version)

    def add_in_order(self, params: Sequence[torch.Tensor]) -> bool:
        """Add the dense gradients of these parameters if they are the next ones in the expected order.

        This is a hot path: loops over gradients use `map`, so that they run in C.

        Returns:
            False if another gradient was expected, or a gradient is sparse or None. Then nothing is added.
        """
        buffers, first = self.buffers, len(self.positions)
        expected = slice(first, first + len(params))
        if first + len(params) > len(buffers.params) or not all(map(is_, params, buffers.params[expected])):
            return False
        gradients = list(map(GRAD, params))
        try:
            if any(map(IS_SPARSE, gradients)):
                return False
        except AttributeError:  # a gradient is None: autograd called the hook without computing a gradient
            return False
        self.positions += buffers.numbers[expected]
        self.gradients += gradients
        self.versions += map(VERSION, gradients)
        return True

    def copy_in(self, since: int | None = None) -> int:
        """Copy the gradients that were added since the last call into the flat buffers.

        If a gradient has the dtype, shape and strides of its place in a flat buffer, `.grad` becomes the view of that
        place, even if a transport thread runs the copy later.

        Args:
            since: number of gradients that were added before the last call of `add_in_order`, if no user code has run
                since that call. The gradients that `add_in_order` added are then not checked for changes by user code.
                None = check all gradients.

        Returns:
            The number of gradients added since the last call.

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
        elif all(map(is_, views, fresh)):  # autograd has accumulated into the views
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
            except (RuntimeError, TypeError):  # the dtype, shape or device of a parameter has changed
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
                buffers.preserve([position])
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
                    self._replace_by_view(number, view)
        if copied:
            buffers.fill(copied, sources)
        for number in misfits:
            position, gradient = self.positions[number], self.gradients[number]
            fitting = buffers.view_for_misfit(position, gradient)
            if fitting is not None and buffers.params[position].grad is gradient:
                buffers.params[position].grad = fitting
                self._replace_by_view(number, fitting)

    def _replace_by_view(self, number: int, view: torch.Tensor) -> None:
        """Store the view of the flat buffer in `gradients` instead of the gradient that was copied into it.

        If user code has written to the gradient before, the version becomes `WRITTEN`, so that the write is
        still detected.
        """
        unwritten = self.gradients[number]._version == self.versions[number]
        self.gradients[number], self.versions[number] = view, view._version if unwritten else WRITTEN

    def fill_missing(self, position: int) -> None:
        """Add a substitute for a gradient that this rank has not computed: the current `.grad`, or zeros if it is None.

        If the parameter no longer requires a gradient, zeros are added and its `.grad` keeps its value.
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
        """Positions of gradients that user code wrote to after they became ready. Valid before the reduction."""
        params = self.buffers.params
        return [
            position
            for position, gradient, version in zip(self.positions, self.gradients, self.versions, strict=True)
            if params[position].grad is gradient and gradient._version != version
        ]

    @property
    def replaced(self) -> bool:
        """True if user code replaced a `.grad` after its gradient became ready. Valid before the reduction."""
        params = self.buffers.params
        return any(
            (current := params[position].grad) is not gradient and current is not None
            for position, gradient in zip(self.positions, self.gradients, strict=True)
        )

    def assign_all(self, unused: Sequence[int] = ()) -> None:
        """Assign the reduced gradients to every `.grad` that user code has not set to None. Call after the reduction.

        Args:
            unused: positions of parameters whose `.grad` stays None, because no rank has computed their gradients.
        """
        buffers, self._all_assigned = self.buffers, True
        if (  # the usual case: every `.grad` is its view, to which user code has not written
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
        """Assign the reduced gradients of some parameters to `.grad`, before all gradients are reduced. Idempotent.

        Has no effect after `assign_all`, because user code may change every `.grad` from then on.
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
                    buffers.view(position)  # makes a new view, because user code has replaced the view's memory
                continue
            if number >= self.own:  # added by `fill_missing`
                if not param.requires_grad or position in unused:
                    continue
            elif current is None:  # user code has set it to None
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
            buffers.restore([self.positions[number] for number in numbers])
