"""Flat buffers: gradients lie in one buffer a dtype while they are reduced, with the ranks' flags at its end."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from sirtaki.errors import ConfigError
from sirtaki.machine import free_in_forked_children

from ..compress import Feedback, Scheme
from ..device import Device, Event, copy_, count_storage_users
from ..plan import FLAGS, GradientLayout, alignment
from ..router import Router
from ..transports.contract import FlatBuffer, ReduceOp
from ..transports.shared_memory import CHUNK_ELEMENTS


class Pace(Enum):
    """What a rank says, or what all ranks say."""

    USUAL = "usual"
    """As then; or the ranks do not agree."""
    SLOWER = "slower"
    """Clearly longer, for a while now."""
    FASTER = "faster"
    """Clearly less long, for a while now."""


class Said(NamedTuple):
    """What at least one rank says.

    Attributes:
        reprofile: the order of the gradients should be profiled again.
        written: a gradient was written before it was reduced.
        replaced: `.grad` was replaced before it was reduced; it gives way to what is reduced.
        complete: all gradients came in the backward pass, so it ended with their reduction; what is done to them
            afterwards holds.
        not_slower: reductions do not take clearly longer than they did. Said in the negative: if nobody says so, all
            ranks find them slower.
        not_faster: nor do they take clearly less long.
    """

    reprofile: bool = False
    written: bool = False
    replaced: bool = False
    complete: bool = False
    not_slower: bool = False
    not_faster: bool = False

    @property
    def pace(self) -> Pace:
        """What all ranks find; as usual where they differ, or where nothing was said."""
        if self.not_slower == self.not_faster:
            return Pace.USUAL
        return Pace.SLOWER if self.not_faster else Pace.FASTER


FLAG_COUNT = len(Said._fields)


class ControlFlags:
    """The flags of one flat buffer.

    Attributes:
        pace: what this rank finds of reductions, which it says along with all else.
    """

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements` are those of the flat buffer that hold the flags, `(FLAG_COUNT,)`."""
        self._device, self._elements = device, elements
        # All that a rank may say, where the flags are, and what was reduced, on the host.
        choices = torch.cartesian_prod(*[torch.arange(2, device="cpu")] * FLAG_COUNT)
        there = choices.to(device=device.torch_device, dtype=elements.dtype)
        self._choices = {tuple(map(bool, choice)): row for choice, row in zip(choices.tolist(), there, strict=True)}
        self._reduced = device.pinned(FLAG_COUNT, elements.dtype)
        self._read: Event | None = None
        self.pace = Pace.USUAL

    def write(self, said: Said) -> None:
        """Sets this rank's flags, before the elements are reduced; those of its pace are added."""
        choice = self._choices[(*said[:-2], self.pace is not Pace.SLOWER, self.pace is not Pace.FASTER)]
        self._device.launch(self._elements.copy_, choice)

    def read(self) -> Said:
        """What was said in this iteration, which is reduced; on a device with streams, what was in the one before.

        There the host would have to wait; this iteration's flags are on their way to it afterwards. Once an iteration.
        """
        if not self._device.streams:
            return Said(*map(bool, self._elements.tolist()))
        before = Said()
        if self._read is not None:
            self._device.wait_for(self._read)
            before = Said(*map(bool, self._reduced.tolist()))
        self._device.launch(copy_, self._reduced, self._elements)
        self._read = self._device.record_event()
        return before

    def forget(self) -> None:
        """What is on its way to the host does not matter any more."""
        self._read = None


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """The strides of a parameter's gradient: the parameter's own, without holes."""
    return torch.empty_like(param, device="meta").stride()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What happens to every gradient: `postscale * op over ranks of (prescale * gradient)`.

    Attributes:
        wire_dtype: the type in which gradients of each dtype travel; those not named travel as they are.
        compression: how they travel in fewer bytes than that; None = they do not.
        feedback: what compression owes.
    """

    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    wire_dtype: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    compression: Scheme | None = None
    feedback: Feedback = field(default_factory=Feedback, compare=False)

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype on the wire of gradients of `dtype`."""
        return dict(self.wire_dtype).get(dtype, dtype)


class GradientGroup:
    """The gradients of one dtype: their flat buffer, and the place in it of each."""

    def __init__(
        self, indices: list[int], params: Sequence[torch.Tensor], layout: GradientLayout, buffer: FlatBuffer
    ) -> None:
        self.indices, self.layout, self.buffer = indices, layout, buffer
        # A gradient has its parameter's strides (torch's layout contract, on which fused optimizers rely).
        self.places = [
            buffer.tensor.as_strided(params[index].shape, dense_strides(params[index]), offset)
            for index, offset in zip(indices, layout.offsets, strict=False)
        ]


def _group_by_dtype(
    order: Sequence[int],
    params: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    reduction: Reduction,
    router: Router,
    n_flags: int,
) -> list[GradientGroup]:
    """Collective: flat buffers for all gradients in the given order, one a dtype; the first has the flags, too."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index in order:
        dtype = params[index].dtype
        by_dtype.setdefault((reduction.travels_as(dtype), dtype), []).append(index)
    groups: list[GradientGroup] = []
    for (wire, _), indices in by_dtype.items():
        flags = () if groups else (n_flags,)
        device = router.device.torch_device.type
        piece = alignment(device, wire.itemsize)
        layout = GradientLayout(
            # Rounded up, so that each gradient starts where it is aligned. What is behind it stays zero.
            sizes=(*(-(-params[index].numel() // piece) * piece for index in indices), *flags),
            itemsize_bytes=wire.itemsize,
            dtype=str(wire).removeprefix("torch."),
            device=device,
            names=(*(names[index] for index in indices), *(FLAGS for _ in flags)),
        )
        groups.append(GradientGroup(indices, params, layout, router.allocate(layout.numel, wire)))
    return groups


GRAD, VERSION, IS_SPARSE = attrgetter("grad"), attrgetter("_version"), attrgetter("is_sparse")
WRITTEN = -1
"""The version of a gradient that was written since it came."""

REFERENCES = max(map(sys.getrefcount, [object()])) + 1
"""What Python counts of a view that is in `GradientBuffers.views` and in a part of that list, and nowhere else."""

_USERS = count_storage_users or (lambda storage: 0)
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_NOBODYS = _NOTHING.untyped_storage()


class GradientBuffers:
    """The flat buffers of one optimizer in one order of its parameters.

    Users get `views`, tensors of their own over the same memory as the places: `model.half()` and the like swap the
    memory behind a `.grad`, and a version counter of its own tells a user's write from ours. What the user keeps of
    them keeps its value: a view that is kept gets memory of its own; and where another tensor of the user's shares a
    place's memory (`p.grad.detach()`, `p.grad[0]`), the old value is put back after the place was used.

    All lists are in the order in which gradients are expected, and a *position* is a number in that order.

    Attributes:
        order: parameters, by index.
        position: where each parameter stands in `order`, by index.
        groups: one a dtype.
        names, params: of the parameters.
        numbers: the positions themselves.
        places: where gradients lie in the flat buffers.
        addresses: of the places.
        views: what a parameter's `.grad` is while its gradient lies in the flat buffer.
        lent: what is to be put back into places, by position.
        outdated: a gradient came with other strides or another dtype than its place has: the parameter was changed.
    """

    def __init__(
        self,
        order: Sequence[int],
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        reduction: Reduction,
        router: Router,
        n_flags: int,
    ) -> None:
        """Collective.

        Args:
            order: see above; the same on all ranks.
            params: their gradients are reduced; by index.
            names: of the parameters, by index.
            reduction: tells in which dtype gradients travel.
            router: allocates.
            n_flags: elements for control flags, at the end of the first buffer.
        """
        self._device, self.order, self.numbers = router.device, list(order), list(range(len(order)))
        self.position = [0] * len(order)
        for position, index in enumerate(order):
            self.position[index] = position
        self.params, self.names = [params[index] for index in order], [names[index] for index in order]
        self.groups = _group_by_dtype(order, params, names, reduction=reduction, router=router, n_flags=n_flags)
        first = self.groups[0]
        # Of complex flags only the real parts are written; what was in the memory before must not be reduced with them.
        self._device.launch(first.buffer.tensor[first.layout.offsets[-2] :].zero_)
        place_of = {i: place for group in self.groups for i, place in zip(group.indices, group.places, strict=True)}
        self.places = [place_of[index] for index in order]
        self.lent: dict[int, torch.Tensor] = {}
        self.views = list(map(self._make_view, self.places))
        # Each view has a storage of its own, whose users PyTorch counts; it is kept, so that its number stays valid.
        self._storages = list(map(self._storage_of, self.views))
        self._storage_ids = [storage._cdata for storage in self._storages]
        self._users = list(map(_USERS, self._storage_ids))
        self.addresses = [place.data_ptr() for place in self.places]
        self._dtypes = [param.dtype for param in self.params]
        # A place of another dtype never is `.grad`; of one dimension there is one way to be dense.
        pairs = zip(self.places, self.params, strict=True)
        self._other_dtype = [place.dtype is not param.dtype for place, param in pairs]
        self._strides = [place.stride() if place.dim() > 1 else () for place in self.places]
        self.outdated = False

    @property
    def layout_places(self) -> list[tuple[int, int]]:
        """Of each parameter, by index: the number of its layout, and its place there."""
        places = {
            index: (number, place)
            for number, group in enumerate(self.groups)
            for place, index in enumerate(group.indices)
        }
        return [places[index] for index in range(len(self.params))]

    @property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """One a dtype; the first has one element more, the control flags."""
        return tuple(group.layout for group in self.groups)

    @property
    def flags(self) -> torch.Tensor:
        """The elements of the control flags, `(n_flags,)`; in a complex buffer their real parts."""
        first = self.groups[0]
        elements = first.buffer.tensor[first.layout.offsets[-2] :]
        return torch.view_as_real(elements)[:, 0] if elements.is_complex() else elements

    def has_flags(self, group: GradientGroup, stop: int) -> bool:
        """A unit that ends at element `stop` of a group's buffer has control flags among its elements."""
        return group is self.groups[0] and stop > group.layout.offsets[-2]

    def take_over(self, before: GradientBuffers) -> None:
        """Gradients that lie in the buffers that were there before move into these."""
        for position, param in enumerate(self.params):
            old = before.position[self.order[position]]
            if param.grad is not None and param.grad is before.views[old] and before.is_intact(old):
                self._device.launch(self.places[position].copy_, before.places[old])
                param.grad = self.view(position) if self.fits(position) else param.grad.clone()

    def detach(self) -> None:
        """From now on no `.grad` is in the flat buffers."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()

    def _make_view(self, place: torch.Tensor) -> torch.Tensor:
        # By a capsule, because from_dlpack(tensor) would also order CUDA streams.
        return from_dlpack(torch.to_dlpack(place)) if place.numel() else place.data  # type: ignore[attr-defined]  # torch has it

    def _storage_of(self, view: torch.Tensor) -> torch.UntypedStorage:
        return view.untyped_storage() if view.numel() else _NOBODYS

    def has_users(self, part: slice) -> bool:
        """Somebody has another tensor over the memory of some of these views."""
        return list(map(_USERS, self._storage_ids[part])) != self._users[part]

    def is_intact(self, position: int) -> bool:
        """The view still lies in the flat buffer."""
        return self.views[position].data_ptr() == self.addresses[position]

    def view(self, position: int) -> torch.Tensor:
        """What to put into a parameter's `.grad`."""
        if not self.is_intact(position):
            self.views[position] = view = self._make_view(self.places[position])
            self._storages[position] = self._storage_of(view)
            self._storage_ids[position] = self._storages[position]._cdata
        return self.views[position]

    def fits(self, position: int) -> bool:
        """The parameter's place in the flat buffer may be its gradient: same dtype, strides and device."""
        param, place = self.params[position], self.places[position]
        return (
            param.dtype is place.dtype
            and param.device == place.device
            and param.shape == place.shape
            and dense_strides(param) == place.stride()
        )

    def fill(self, positions: Sequence[int], gradients: list[torch.Tensor]) -> None:
        """Copies gradients into their places, all at once.

        Raises:
            ConfigError: a parameter was moved to another device, or has another shape.
        """
        targets = list(map(self.places.__getitem__, positions))
        try:
            # Gradients made with create_graph=True have a graph, the reduced ones have none.
            with torch.no_grad():
                self._device.launch(torch._foreach_copy_, targets, gradients)
        except RuntimeError:
            for position, gradient in zip(positions, gradients, strict=True):
                self._require_same_place(position, gradient)
            raise
        if self._device.streams:
            self._device.keep(gradients)

    def clear(self, position: int) -> torch.Tensor:
        """Puts zeros in a parameter's place; returns its view."""
        self.part_with([position])
        self._device.launch(self.places[position].zero_)
        return self.views[position]

    def part_with(self, positions: Sequence[int]) -> None:
        """Save what the user keeps of the gradients in these places, before the places are used for others.

        The copies are made on the user's stream, where the user may read them at once.
        """
        for position in positions:
            if position in self.lent:
                continue
            if self.has_users(slice(position, position + 1)):
                with self._device.before_packing():
                    self.lent[position] = self.places[position].clone()
            elif self.is_intact(position) and self._is_kept(position):
                view = self.views[position]
                with self._device.before_packing():
                    view.data = view.detach().clone()
                self.view(position)

    def _is_kept(self, position: int) -> bool:
        """Return whether user code refers to the view itself."""
        return max(map(sys.getrefcount, self.views[position : position + 1])) > REFERENCES

    def take_misfit(self, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """A gradient has another form than its place, or its view's memory was swapped: the view if that will do now.

        Raises:
            ConfigError: as `fill`.
        """
        place = self.places[position]
        self._require_same_place(position, gradient)
        if gradient.dtype is place.dtype and gradient.stride() == place.stride():
            return self.view(position)
        if gradient.dtype is place.dtype or gradient.dtype is not self._dtypes[position]:
            self.outdated = True  # else it travels in another dtype, as was asked for
        return None

    def _require_same_place(self, position: int, gradient: torch.Tensor) -> None:
        place = self.places[position]
        if gradient.device != place.device or gradient.shape != place.shape:
            raise ConfigError(
                f"the gradient of {self.names[position]} is {tuple(gradient.shape)} on {gradient.device}, and was "
                f"{tuple(place.shape)} on {place.device} when its DistributedOptimizer was made: move or resize the "
                "model first, then make the optimizer"
            )

    def have_form(self, part: slice, gradients: Sequence[torch.Tensor]) -> bool:
        """These gradients have the dtypes and strides of their places, as far as `.grad = view` does not tell."""
        strides = self._strides[part]
        return not any(self._other_dtype[part]) and all(
            gradient.stride() == wanted for gradient, wanted in zip(gradients, strides, strict=True) if wanted
        )

    def copy_out(self, pairs: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copies reduced gradients from their places into tensors that do not lie there; puts back what does."""
        if pairs:
            with torch.no_grad():  # a gradient made with create_graph=True has a graph
                targets, sources = [target for _, target in pairs], [self.places[position] for position, _ in pairs]
                self._device.launch(torch._foreach_copy_, targets, sources)

    def put_back(self, positions: Sequence[int]) -> None:
        """Reduced gradients are out of these places: what somebody keeps of earlier ones goes back there."""
        for position in self.lent.keys() & set(positions):
            saved = self.lent.pop(position)
            self._device.launch(self.places[position].copy_, saved)
            if self._device.streams:
                self._device.keep([saved])


LARGE_ELEMENTS = 1 << 18
"""From this size on a gradient is copied in pieces of it, so that a unit need not wait for all of the gradient."""


class Copies:
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


class Arrivals:
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

    def __init__(self, buffers: GradientBuffers, *, beside: bool = False) -> None:
        """Args: `beside`: threads that carry units copy what `add_in_order` has noted, which takes no time here."""
        self._buffers = buffers
        # Three lists, as a tuple for each gradient would be one more object to make and to collect.
        self.positions: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.versions: list[int] = []
        self._copied = 0
        self.copies = Copies() if beside else None
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


logger = logging.getLogger(__name__)

REMEDY = (
    "call optimizer.synchronize() before you change gradients, and optimizer.step() inside `with "
    "optimizer.skip_synchronize():`"
)


class LostEdits:
    """Tells what the user did to gradients too early."""

    def __init__(self) -> None:
        self._warned = self._told = False

    def look(self, arrivals: Arrivals, names: Sequence[str], said: Said) -> str:
        """All gradients of an iteration are reduced: what makes them undefined, in words; empty if all is well.

        Args:
            arrivals: this rank's gradients, which have been handed out.
            names: of the parameters, by position.
            said: by all ranks in this iteration; nothing on a device with streams.
        """
        problem, differ = "", said.replaced and said.complete
        if arrivals.lost_written:
            problem = f"the gradient of {names[arrivals.lost_written[0]]} was written before it was reduced"
        elif said.written:
            return f"another rank has written a gradient before it was reduced; {REMEDY}"
        elif arrivals.lost_replaced:
            name = names[arrivals.lost_replaced[0]]
            if differ:
                problem = f"the gradient of {name} was replaced before it was reduced"
            elif not self._warned:
                self._warned = True
                logger.warning(
                    "the gradient of %s was replaced before it was reduced, and the reduced one is used; %s",
                    name,
                    REMEDY,
                )
        elif differ:
            return f"another rank has replaced a gradient before it was reduced; {REMEDY}"
        if not problem:
            return ""
        own = set(arrivals.positions[: arrivals.own])
        late = next((name for position, name in enumerate(names) if position not in own), "")
        why = f", which ends with step() because {late} had no gradient in this backward pass" if late else ""
        return f"{problem}{why}; {REMEDY}"

    def hear_late(self, problem: str, before: Said) -> str:
        """An iteration ends on a device with streams, where it is heard only now what was said in the one before.

        What a rank knows of itself has been said then. Returns the problem of this iteration, `problem` if it is known.
        """
        if (before.written or (before.replaced and before.complete)) and not self._told and not problem:
            problem = f"another rank has changed a gradient too early in the iteration before this one; {REMEDY}"
        self._told = bool(problem)
        return problem
