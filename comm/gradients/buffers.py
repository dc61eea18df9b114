"""Flat buffers: gradients lie in one buffer a dtype while they are reduced, with the ranks' flags at its end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, is_
from typing import NamedTuple, Protocol

import torch

from sirtaki.errors import ConfigError

from ..device import Device, Event, copy_
from ..plan import GradientLayout
from ..router import Router
from ..transports.contract import FlatBuffer, ReduceOp


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
        choices = torch.cartesian_prod(*[torch.arange(2, device=elements.device)] * FLAG_COUNT).to(elements.dtype)
        self._choices = {tuple(map(bool, choice.tolist())): choice for choice in choices}
        self._reduced = torch.zeros(FLAG_COUNT, dtype=elements.dtype)
        device.pin(self._reduced)
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


class UsageFlags:
    """One element a parameter, which tells whether any rank has its gradient (`SIRTAKI_UNUSED=none`).

    Attributes:
        wanted: somebody asks.
    """

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements` of the flat buffer, `(n_params,)`; empty where nobody asks."""
        self._device, self._elements, self.wanted = device, elements, bool(elements.numel())

    def write(self, present: Sequence[int]) -> None:
        """Sets the flags of the parameters whose gradients this rank has."""
        flags = torch.zeros(self._elements.numel(), dtype=self._elements.dtype)
        flags[list(present)] = 1
        self._device.launch(self._elements.copy_, flags)

    def used(self) -> list[bool]:
        """Once they are reduced: whether any rank has the gradient, `(n_params,)`. Waits for the device."""
        return [bool(flag) for flag in (self._elements > 0).tolist()]


class HasGrad(Protocol):
    """What is needed of a parameter."""

    grad: torch.Tensor | None
    requires_grad: bool
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def numel(self) -> int:
        """Elements."""


def dense_strides(param: HasGrad) -> tuple[int, ...]:
    """The strides of a parameter's gradient: the parameter's own, without holes."""
    return torch.empty_like(param, device="meta").stride()  # type: ignore[arg-type]  # a tensor in truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What happens to every gradient: `postscale * op over ranks of (prescale * gradient)`.

    Attributes:
        wire_dtype: the type in which gradients of each dtype travel; those not named travel as they are.
    """

    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    wire_dtype: tuple[tuple[torch.dtype, torch.dtype], ...] = ()

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype on the wire of gradients of `dtype`."""
        return dict(self.wire_dtype).get(dtype, dtype)


class GradientGroup:
    """The gradients of one dtype: their flat buffer, and the place in it of each."""

    def __init__(
        self, indices: list[int], params: Sequence[HasGrad], layout: GradientLayout, buffer: FlatBuffer
    ) -> None:
        self.indices, self.layout, self.buffer = indices, layout, buffer
        # A gradient has its parameter's strides (torch's layout contract, on which fused optimizers rely).
        self.places = [
            buffer.tensor.as_strided(params[index].shape, dense_strides(params[index]), offset)
            for index, offset in zip(indices, layout.offsets, strict=False)
        ]


def _group_by_dtype(
    order: Sequence[int],
    params: Sequence[HasGrad],
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
        layout = GradientLayout(
            sizes=(*(params[index].numel() for index in indices), *flags),
            itemsize_bytes=wire.itemsize,
            dtype=str(wire).removeprefix("torch."),
            device=router.device.torch_device.type,
            names=(*(names[index] for index in indices), *("sirtaki.control_flags" for _ in flags)),
        )
        groups.append(GradientGroup(indices, params, layout, router.allocate(layout.numel, wire)))
    return groups


GRAD, VERSION = attrgetter("grad"), attrgetter("_version")
WRITTEN = -1
"""The version of a gradient that was written since it came."""


class Known(NamedTuple):
    """What is known of some parameters, one list for each thing, so that loops over them can be C's."""

    indices: list[int]
    params: list[HasGrad]
    views: list[torch.Tensor]
    places: list[torch.Tensor]
    strides: list[tuple[int, ...] | None]
    addresses: list[int]
    references: list[int]
    """To each view, while nobody but the buffers has it."""


MOST_KNOWN = 512

REFERENCES = min(map(sys.getrefcount, [object()]))
"""What Python counts, asked in this way, of what one list holds."""


class GradientBuffers:
    """The flat buffers of one optimizer in one order of its parameters, and the way of gradients in and out.

    Users get `views`, tensors of their own over the same memory as the places: `model.half()` and the like swap the
    memory behind a `.grad`, and a version counter of its own tells a user's write from ours.

    Attributes:
        order: parameters in the order in which their gradients are expected.
        position: where each parameter stands in `order`.
        groups: one a dtype.
        views: what a parameter's `.grad` is while its gradient lies in the flat buffer.
        addresses: of the places.
        outdated: a gradient came with other strides or another dtype than its place has: the parameter was changed.
    """

    def __init__(
        self,
        order: Sequence[int],
        params: Sequence[HasGrad],
        names: Sequence[str],
        *,
        reduction: Reduction,
        router: Router,
        n_flags: int,
    ) -> None:
        """Collective.

        Args:
            order: see above; the same on all ranks.
            params: their gradients are reduced.
            names: of the parameters.
            reduction: tells in which dtype gradients travel.
            router: allocates.
            n_flags: elements for control flags, at the end of the first buffer.
        """
        self._params, self._names, self._device = params, names, router.device
        self.order = list(order)
        self.position = [0] * len(order)
        for position, index in enumerate(order):
            self.position[index] = position
        self.groups = _group_by_dtype(order, params, names, reduction=reduction, router=router, n_flags=n_flags)
        first = self.groups[0]
        # Of complex flags only the real parts are written; what was in the memory before must not be reduced with them.
        self._device.launch(first.buffer.tensor[first.layout.offsets[-2] :].zero_)
        self._places = [torch.empty(0)] * len(params)
        for group in self.groups:
            for index, place in zip(group.indices, group.places, strict=True):
                self._places[index] = place
        self.views = [place.data for place in self._places]
        self._strides = [
            _strides_to_check(place, param.dtype) for place, param in zip(self._places, params, strict=True)
        ]
        self.addresses = [place.data_ptr() for place in self._places]
        self._made_for = [param.dtype for param in params]
        self._known: dict[tuple[int, int], Known] = {}  # by the first parameter, and how many there are
        self._listed = [0] * len(params)  # in how many of those each view stands
        self.outdated = False

    @property
    def layout_places(self) -> list[tuple[int, int]]:
        """Of each parameter: the number of its layout, and its place there."""
        places = {
            index: (number, place)
            for number, group in enumerate(self.groups)
            for place, index in enumerate(group.indices)
        }
        return [places[index] for index in range(len(self._params))]

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
        for index, param in enumerate(self._params):
            if param.grad is not None and param.grad is before.views[index] and before._is_intact(index):
                self._device.launch(self._places[index].copy_, before._places[index])
                param.grad = self.view(index) if self.fits(index) else param.grad.clone()

    def detach(self) -> None:
        """From now on no `.grad` is in the flat buffers."""
        for param, view in zip(self._params, self.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()

    def _is_intact(self, index: int) -> bool:
        """The view still lies in the flat buffer."""
        return self.views[index].data_ptr() == self.addresses[index]

    def view(self, index: int) -> torch.Tensor:
        """What to put into a parameter's `.grad`."""
        if not self._is_intact(index):
            self.views[index] = self._places[index].data
            self._forget_known()
        return self.views[index]

    def fits(self, index: int) -> bool:
        """The parameter's place in the flat buffer may be its gradient: same dtype, strides and device."""
        param, place = self._params[index], self._places[index]
        return (
            param.dtype is place.dtype
            and param.device == place.device
            and param.shape == place.shape
            and dense_strides(param) == place.stride()
        )

    def clear(self, index: int) -> torch.Tensor:
        """Puts zeros in a parameter's place; returns its view."""
        self._part_with([index])
        self._device.launch(self._places[index].zero_)
        return self.views[index]

    def copy_in(self, indices: list[int], gradients: list[torch.Tensor], versions: list[int], first: int) -> None:
        """Copies gradients into their places, all at once; where they fit, `.grad` is the view from then on.

        The hot path, with the hooks.

        Args:
            indices: parameters whose gradients have come.
            gradients: for each, what was its `.grad` then; afterwards, what is in `.grad` now unless somebody else has
                put something there.
            versions: of these tensors, when they came; afterwards, as they are now, `WRITTEN` if they were written.
            first: where the gradients begin that have come since the last time.

        Raises:
            ConfigError: a parameter was moved to another device, or has another shape.
        """
        # The usual case is that every gradient fits its place; then the loops are C's.
        part = slice(first, len(indices))
        own, fresh = indices[part], gradients[part]
        _, params, views, places, strides, _, references = self.known(own)
        if list(map(sys.getrefcount, views)) != references:
            self._part_with(
                [index for index, gradient in zip(own, fresh, strict=True) if self.views[index] is not gradient]
            )
            _, params, views, places, strides, _, _ = self.known(own)
        if not (
            all(map(is_, map(GRAD, params), fresh))
            and not any(map(is_, views, fresh))
            and list(map(VERSION, fresh)) == versions[part]
            and [gradient.stride() if wanted else () for gradient, wanted in zip(fresh, strides, strict=True)]
            == strides
        ):
            self._copy_one_by_one(indices, gradients, versions, first)
            return
        self._copy(places, fresh)
        try:
            for param, view in zip(params, views, strict=True):
                param.grad = view
        except (RuntimeError, TypeError):  # the parameter has another dtype now, or another shape or device
            for param, gradient in zip(params, fresh, strict=True):
                if param.grad is not gradient:
                    param.grad = gradient
            self._copy_one_by_one(indices, gradients, versions, first)
            return
        gradients[part], versions[part] = views, map(VERSION, views)

    def known(self, indices: list[int]) -> Known:
        """What is known of these parameters, in this order; looked up once where the order stays the same."""
        key = (indices[0], len(indices))
        found = self._known.get(key)
        if found is None or found.indices != indices:
            if len(self._known) >= MOST_KNOWN:  # many plans have been tried
                self._forget_known()
            elif found is not None:
                self._list(found.indices, -1)
            found = self._known[key] = Known(
                list(indices),
                [self._params[index] for index in indices],
                [self.views[index] for index in indices],
                [self._places[index] for index in indices],
                [self._strides[index] for index in indices],
                [self.addresses[index] for index in indices],
                [],
            )
            self._list(indices, 1)
            for known in self._known.values():
                known.references.clear()
        if not found.references:
            found.references.extend(REFERENCES + self._listed[index] for index in indices)
        return found

    def _list(self, indices: Sequence[int], more: int) -> None:
        for index in indices:
            self._listed[index] += more

    def _forget_known(self) -> None:
        if self._known:
            self._known.clear()
            self._listed = [0] * len(self._params)

    def _part_with(self, indices: Sequence[int]) -> None:
        """Gives views that somebody has kept, and that are no gradients now, memory of their own.

        So a gradient that the user keeps over `zero_grad()` stays what it was. Other tensors over its memory, such as
        `param.grad.detach()`, do not count.
        """
        kept = [i for i in indices if sys.getrefcount(self.views[i]) > REFERENCES + self._listed[i]]
        for index in filter(self._is_intact, kept):
            view = self.views[index]
            view.data = view.detach().clone()
            self.view(index)

    def _copy_one_by_one(
        self, indices: list[int], gradients: list[torch.Tensor], versions: list[int], first: int
    ) -> None:
        targets, sources, misfits = list[torch.Tensor](), list[torch.Tensor](), list[int]()
        for number in range(first, len(indices)):
            index, gradient = indices[number], gradients[number]
            view, wanted, param = self.views[index], self._strides[index], self._params[index]
            intact = view.data_ptr() == self.addresses[index]
            if gradient is view and intact:
                continue
            targets.append(self._places[index])
            sources.append(gradient)
            if not intact or wanted is None or (wanted and gradient.stride() != wanted):
                misfits.append(number)
            elif param.grad is gradient:
                try:
                    param.grad = view
                except (RuntimeError, TypeError):
                    misfits.append(number)
                else:
                    _take(view, number, gradients, versions)
        if targets:
            self._copy(targets, sources)
        for number in misfits:
            self._hold_misfit(number, indices, gradients, versions)

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        try:
            # Gradients made with create_graph=True have a graph, the reduced ones have none.
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._device.launch(torch._foreach_copy_, targets, sources)
            else:
                self._device.launch(torch._foreach_copy_, targets, sources)
        except RuntimeError:
            for target, gradient in zip(targets, sources, strict=True):
                self._require_same_place(target, gradient)
            raise
        if self._device.streams:
            self._device.keep(sources)

    def _require_same_place(self, place: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.device != place.device or gradient.shape != place.shape:
            name = next(name for name, own in zip(self._names, self._places, strict=True) if own is place)
            raise ConfigError(
                f"the gradient of {name} is {tuple(gradient.shape)} on {gradient.device}, and was "
                f"{tuple(place.shape)} on {place.device} when its DistributedOptimizer was made: move or resize the "
                "model first, then make the optimizer"
            )

    def _hold_misfit(self, number: int, indices: list[int], gradients: list[torch.Tensor], versions: list[int]) -> None:
        """A gradient in another form than its place, or one whose view's memory was swapped."""
        index, gradient = indices[number], gradients[number]
        place, param = self._places[index], self._params[index]
        self._require_same_place(place, gradient)
        if gradient.dtype is place.dtype and gradient.stride() == place.stride():
            view = self.view(index)
            if param.grad is gradient:
                param.grad = view
                _take(view, number, gradients, versions)
        elif gradient.dtype is place.dtype or gradient.dtype is not self._made_for[index]:
            self.outdated = True  # else it travels in another dtype, as was asked for

    def copy_out(self, pairs: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copies reduced gradients from their places into tensors of another dtype or other strides."""
        if pairs:
            with torch.no_grad():  # a gradient made with create_graph=True has a graph
                targets, sources = [target for _, target in pairs], [self._places[index] for index, _ in pairs]
                self._device.launch(torch._foreach_copy_, targets, sources)


def _take(view: torch.Tensor, number: int, gradients: list[torch.Tensor], versions: list[int]) -> None:
    """The view stands for a gradient from now on; that it was written before is not forgotten."""
    versions[number] = view._version if gradients[number]._version == versions[number] else WRITTEN
    gradients[number] = view


def _strides_to_check(place: torch.Tensor, dtype: torch.dtype) -> tuple[int, ...] | None:
    """What the strides of a gradient must be if its place may be `.grad`; empty = any, None = it never may."""
    if place.dtype is not dtype:
        return None
    return place.stride() if place.dim() > 1 else ()  # of one dimension there is one way to be dense


class Arrivals:
    """What has come so far in this iteration.

    The tensors are kept as they came: a gradient that the user sets to None afterwards has been computed all the
    same, and counts for the other ranks.

    Attributes:
        indices: of the parameters, in the order in which their gradients came.
        gradients: what was their `.grad` then, in the same order; the flat buffer's view once it is that.
        versions: of those tensors; `buffers.WRITTEN` = written since they came.
        own: how many came from this rank's backward pass; the others were put in for it.
        lost_replaced: parameters whose `.grad` was another tensor when the reduced gradient was handed out, which has
            taken its place.
        lost_written: parameters whose gradients were written in place before that, while they were reduced perhaps.
    """

    def __init__(self, params: Sequence[HasGrad], buffers: GradientBuffers) -> None:
        self._params, self._buffers = params, buffers
        # Three lists, as a tuple for each gradient would be one more object to make and to collect.
        self.indices: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.versions: list[int] = []
        self._copied = 0
        self.own = 0
        self.lost_replaced: list[int] = []
        self.lost_written: list[int] = []
        self._handed_out: set[int] = set()

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
        if param.grad is self._buffers.view(index):
            param.grad = param.grad.clone()
        view = self._buffers.clear(index)
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

    def hand_out(self, unused: Sequence[int] = ()) -> None:
        """After the reduction: every `.grad` that the user has not set to None holds the reduced gradient.

        Args:
            unused: parameters that keep None because no rank computed their gradients.
        """
        if self.indices and self.own == len(self.indices) and not self._handed_out:
            # The usual case is that every `.grad` is the flat buffer's view, and was not written; the loops are C's.
            known, gradients = self._buffers.known(self.indices), self.gradients
            if (
                all(map(is_, map(GRAD, known.params), gradients))
                and list(map(VERSION, gradients)) == self.versions
                and list(map(torch.Tensor.data_ptr, gradients)) == known.addresses
            ):
                return
        rest = [number for number, index in enumerate(self.indices) if index not in self._handed_out]
        self._hand_out(rest, frozenset(unused))

    def hand_out_some(self, indices: Sequence[int]) -> None:
        """As `hand_out`, of these parameters, which are reduced already; once each."""
        wanted = set(indices) - self._handed_out
        self._handed_out |= wanted
        self._hand_out([number for number, index in enumerate(self.indices) if index in wanted], frozenset())

    def _hand_out(self, numbers: Sequence[int], left_alone: frozenset[int]) -> None:
        params, addresses = self._params, self._buffers.addresses
        copies = list[tuple[int, torch.Tensor]]()
        for number in numbers:
            index, gradient, version = self.indices[number], self.gradients[number], self.versions[number]
            current = params[index].grad
            if current is gradient:
                if current._version != version:
                    self.lost_written.append(index)
                if current.data_ptr() != addresses[index]:
                    copies.append((index, current))
                    self._buffers.view(index)  # one whose memory was swapped is not used again
            elif number >= self.own:  # put in, so the reduced one is for this rank, too
                if params[index].requires_grad and index not in left_alone:
                    self._give(index, copies)
            elif current is not None:  # None: the user has set it so
                self.lost_replaced.append(index)
                self._give(index, copies)
        self._buffers.copy_out(copies)

    def _give(self, index: int, copies: list[tuple[int, torch.Tensor]]) -> None:
        """Puts the reduced gradient into `.grad`, whatever is there: its place if that fits, else a copy."""
        if self._buffers.fits(index):
            self._params[index].grad = self._buffers.view(index)
        else:
            fresh = torch.empty_like(self._params[index])  # type: ignore[arg-type]  # a tensor in truth
            self._params[index].grad = fresh
            copies.append((index, fresh))


logger = logging.getLogger(__name__)

REMEDY = (
    "call optimizer.synchronize() before you change gradients, and optimizer.step() inside `with "
    "optimizer.skip_synchronize():`"
)


class LostEdits:
    """Tells what the user did to gradients too early."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` of the parameters."""
        self._names = names
        self._warned = self._told = False

    def look(self, arrivals: Arrivals, said: Said) -> str:
        """All gradients of an iteration are reduced: what makes them undefined, in words; empty if all is well.

        Args:
            arrivals: this rank's gradients, which have been handed out.
            said: by all ranks in this iteration; nothing on a device with streams.
        """
        problem, differ = "", said.replaced and said.complete
        if arrivals.lost_written:
            problem = f"the gradient of {self._names[arrivals.lost_written[0]]} was written before it was reduced"
        elif said.written:
            return f"another rank has written a gradient before it was reduced; {REMEDY}"
        elif arrivals.lost_replaced:
            name = self._names[arrivals.lost_replaced[0]]
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
        own = set(arrivals.indices[: arrivals.own])
        late = next((name for index, name in enumerate(self._names) if index not in own), "")
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
