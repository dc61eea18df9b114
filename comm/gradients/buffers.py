"""Flat buffers: where the gradients of one optimizer lie while they are reduced, one buffer a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import NamedTuple, Protocol

import torch

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp
from sirtaki.errors import ConfigError


class HasGrad(Protocol):
    """What is needed of a parameter."""

    grad: torch.Tensor | None
    requires_grad: bool
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def numel(self) -> int:
        """Elements."""
        ...


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
            self._known.clear()
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

    def clear(self, index: int) -> None:
        """Zeros in a parameter's place."""
        self._device.launch(self._places[index].zero_)

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
        if not self._copy_as_usual(indices, gradients, versions, first):
            self._copy_one_by_one(indices, gradients, versions, first)

    def _copy_as_usual(
        self, indices: list[int], gradients: list[torch.Tensor], versions: list[int], first: int
    ) -> bool:
        """`copy_in` if every gradient fits its place: the loops are C's. False, and nothing done, if one does not."""
        part = slice(first, len(indices))
        own, fresh = indices[part], gradients[part]
        _, params, views, places, strides, _ = self.known(own)
        if not (
            all(map(is_, map(GRAD, params), fresh))
            and not any(map(is_, views, fresh))
            and list(map(VERSION, fresh)) == versions[part]
            and [gradient.stride() if wanted else () for gradient, wanted in zip(fresh, strides, strict=True)]
            == strides
        ):
            return False
        self._copy(places, fresh)
        try:
            for param, view in zip(params, views, strict=True):
                param.grad = view
        except (RuntimeError, TypeError):  # the parameter has another dtype now, or another shape or device
            for param, gradient in zip(params, fresh, strict=True):
                if param.grad is not gradient:
                    param.grad = gradient
            return False
        gradients[part], versions[part] = views, map(VERSION, views)
        return True

    def known(self, indices: list[int]) -> Known:
        """What is known of these parameters, in this order; looked up once where the order stays the same."""
        key = (indices[0], len(indices))
        found = self._known.get(key)
        if found is None or found.indices != indices:
            found = self._known[key] = Known(
                list(indices),
                [self._params[index] for index in indices],
                [self.views[index] for index in indices],
                [self._places[index] for index in indices],
                [self._strides[index] for index in indices],
                [self.addresses[index] for index in indices],
            )
        return found

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
