"""Flat buffers: contiguous memory for all gradients of one dtype, in which the ranks all-reduce them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import eq

import torch
from torch.utils.dlpack import from_dlpack

from sirtaki.errors import ConfigError

from ..compress import Feedback, Scheme
from ..device import count_storage_users
from ..plan import FLAGS, GradientLayout, alignment
from ..router import Router
from ..transports.contract import FlatBuffer, ReduceOp


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient in autograd: dense, with the parameter's order of dimensions."""
    return torch.empty_like(param, device="meta").stride()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Operation on every gradient: `postscale * op over ranks of (prescale * gradient)`.

    Attributes:
        op: operation over the ranks.
        prescale: factor before the reduction.
        postscale: factor after the reduction.
        wire_dtype: pairs of a gradient's dtype and the dtype in which it is sent. Other dtypes are sent unchanged.
        compression: lossy compression of the gradients in their wire dtype; None = none.
        feedback: residuals of error feedback: the part of each gradient that compression has lost. It is added to the
            parameter's next gradient.
    """

    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    wire_dtype: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    compression: Scheme | None = None
    feedback: Feedback = field(default_factory=Feedback, compare=False)

    def wire_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` are sent."""
        return dict(self.wire_dtype).get(dtype, dtype)


class FlatGroup:
    """Gradients of one dtype in a flat buffer.

    Attributes:
        indices: indices of the parameters, in the order of the buffer.
        layout: sizes and names of the gradients in the buffer.
        buffer: the flat buffer.
        places: for each gradient, a tensor of its shape over its part of the buffer, in the same order.
    """

    def __init__(
        self, indices: list[int], params: Sequence[torch.Tensor], layout: GradientLayout, buffer: FlatBuffer
    ) -> None:
        self.indices, self.layout, self.buffer = indices, layout, buffer
        # Give each place the strides of an autograd gradient, because fused optimizers expect these strides.
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
) -> list[FlatGroup]:
    """Allocate a flat buffer for the gradients of each dtype. Collective.

    The first buffer ends with `n_flags` control flags (messages between ranks, reduced with the gradients).
    """
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index in order:
        dtype = params[index].dtype
        by_dtype.setdefault((reduction.wire_dtype_for(dtype), dtype), []).append(index)
    groups: list[FlatGroup] = []
    for (wire, _), indices in by_dtype.items():
        flags = () if groups else (n_flags,)
        device = router.device.torch_device.type
        piece = alignment(device, wire.itemsize)
        layout = GradientLayout(
            # Round sizes up, so that each gradient starts at an aligned address. The padding stays zero.
            sizes=(*(-(-params[index].numel() // piece) * piece for index in indices), *flags),
            itemsize_bytes=wire.itemsize,
            dtype=str(wire).removeprefix("torch."),
            device=device,
            names=(*(names[index] for index in indices), *(FLAGS for _ in flags)),
        )
        groups.append(FlatGroup(indices, params, layout, router.allocate(layout.numel, wire)))
    return groups


REFERENCES = max(map(sys.getrefcount, [object()])) + 1
"""Reference count of a view (tensor over a gradient's part of a flat buffer) to which user code does not refer.

`sys.getrefcount` then counts only the references from the list `FlatBuffers.views` and from the slice of it that is
checked.
"""

_USERS = count_storage_users or (lambda storage: 0)
_STRIDE = torch.Tensor.stride
_EMPTY_STORAGE = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()


class FlatBuffers:
    """The flat buffers of one optimizer, for one order of its parameters.

    A *position* is an index in the expected order of the gradients. All lists are in this order, unless stated.

    Sirtaki writes to `places`. User code gets `views`, other tensors over the same memory, as `.grad`, for two reasons:
    `model.half()` and similar calls replace the memory of the tensor in `.grad`, and a view has a version counter that
    changes only if user code writes.

    User code may keep an earlier `.grad` while the next iteration writes to the same place. If it keeps the view, the
    view first gets memory of its own. If it keeps another tensor over the memory of the place (`p.grad.detach()`,
    `p.grad[0]`), the old value of the place is saved. After the reduction, the reduced gradient is copied out of the
    place, and the old value back into it.

    Attributes:
        order: index of the parameter at each position.
        position: position of each parameter, by index.
        groups: flat buffers, one for each dtype.
        names: names of the parameters.
        params: the parameters.
        numbers: the positions: 0, 1, 2, …
        places: tensors over the memory of each gradient in the flat buffers.
        addresses: memory addresses of the places.
        views: tensors that become `.grad` when a gradient is copied into its place.
        lent: by position, old values of places that a tensor of user code shares; `restore` copies them back.
        outdated: True if a gradient had another dtype or other strides than its place, because its parameter changed.
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
        """Allocate the flat buffers. Collective.

        Args:
            order: indices of the parameters in the expected order of their gradients; the same on all ranks.
            params: parameters whose gradients are reduced, by index.
            names: names of the parameters, by index.
            reduction: determines the dtype in which gradients are sent.
            router: object that sends parts of the buffers over the transports, and allocates their memory.
            n_flags: number of control flags (messages between ranks, reduced with the gradients), one element each, at
                the end of the first buffer.
        """
        self._device, self.order, self.numbers = router.device, list(order), list(range(len(order)))
        self.position = [0] * len(order)
        for position, index in enumerate(order):
            self.position[index] = position
        self.params, self.names = [params[index] for index in order], [names[index] for index in order]
        self.groups = _group_by_dtype(order, params, names, reduction=reduction, router=router, n_flags=n_flags)
        first = self.groups[0]
        # Zero the control flags, because new memory may hold any values, and only real parts of complex flags are
        # written later.
        self._device.launch(first.buffer.tensor[first.layout.offsets[-2] :].zero_)
        place_of = {i: place for group in self.groups for i, place in zip(group.indices, group.places, strict=True)}
        self.places = [place_of[index] for index in order]
        self.lent: dict[int, torch.Tensor] = {}
        self.views = list(map(self._make_view, self.places))
        # Store for each view how many tensors use its storage. A larger number later means that user code has made
        # another tensor over this memory. Keep the storage objects, too, because `_cdata` is valid only while they
        # exist.
        self._storages = list(map(self._storage_of, self.views))
        self._storage_ids = [storage._cdata for storage in self._storages]
        self._users = list(map(_USERS, self._storage_ids))
        self.addresses = [place.data_ptr() for place in self.places]
        self._dtypes = [param.dtype for param in self.params]
        # For `accept`: True for each place that cannot become `.grad`, because its dtype is not the parameter's. Also
        # the strides of each place, or () with one dimension, because all dense strides are equal then.
        pairs = zip(self.places, self.params, strict=True)
        self._other_dtype = [place.dtype is not param.dtype for place, param in pairs]
        self._strides = [place.stride() if place.dim() > 1 else () for place in self.places]
        self.outdated = False

    @property
    def layout_places(self) -> list[tuple[int, int]]:
        """Position of each parameter's gradient, by parameter index, as (index in `layouts`, index in that layout)."""
        places = {
            index: (number, place)
            for number, group in enumerate(self.groups)
            for place, index in enumerate(group.indices)
        }
        return [places[index] for index in range(len(self.params))]

    @property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """Layouts (sizes and names of the gradients in a flat buffer), one for each dtype.

        The first layout has one more entry, the control flags (messages between ranks, reduced with the gradients).
        """
        return tuple(group.layout for group in self.groups)

    @property
    def flags(self) -> torch.Tensor:
        """Elements of the control flags (messages between ranks) in the first buffer, `(n_flags,)`.

        In a complex buffer, the real parts of these elements.
        """
        first = self.groups[0]
        elements = first.buffer.tensor[first.layout.offsets[-2] :]
        return torch.view_as_real(elements)[:, 0] if elements.is_complex() else elements

    def has_flags(self, group: FlatGroup, stop: int) -> bool:
        """Return whether a unit (bucket) that ends at element `stop` of a group's buffer contains control flags."""
        return group is self.groups[0] and stop > group.layout.offsets[-2]

    def move_from(self, before: FlatBuffers) -> None:
        """Move every `.grad` that is a view of the older flat buffers `before` into these buffers."""
        for position, param in enumerate(self.params):
            old = before.position[self.order[position]]
            if param.grad is not None and param.grad is before.views[old] and before.is_intact(old):
                self._device.launch(self.places[position].copy_, before.places[old])
                param.grad = self.view(position) if self.fits(position) else param.grad.clone()

    def detach(self) -> None:
        """Replace every `.grad` that is a view of a flat buffer by a copy with memory of its own."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()

    def _make_view(self, place: torch.Tensor) -> torch.Tensor:
        # Pass a DLPack capsule, because from_dlpack(tensor) would also synchronise CUDA streams.
        return from_dlpack(torch.to_dlpack(place)) if place.numel() else place.data  # type: ignore[attr-defined]  # torch has it

    def _storage_of(self, view: torch.Tensor) -> torch.UntypedStorage:
        return view.untyped_storage() if view.numel() else _EMPTY_STORAGE

    def accept(self, part: slice, gradients: Sequence[torch.Tensor]) -> bool:
        """Return whether the views of the flat buffer at the positions `part` may replace `gradients` as `.grad`.

        False if another tensor shares the memory of a view, or if a gradient and its place differ in dtype or strides.
        Differences in shape or device are not checked, because PyTorch raises an error for them at `.grad = view`.
        """
        if list(map(_USERS, self._storage_ids[part])) != self._users[part] or any(self._other_dtype[part]):
            return False
        strides = self._strides[part]
        return all(map(eq, map(_STRIDE, compress(gradients, strides)), compress(strides, strides)))

    def is_intact(self, position: int) -> bool:
        """Return whether the view at a position still uses the memory of the flat buffer."""
        return self.views[position].data_ptr() == self.addresses[position]

    def view(self, position: int) -> torch.Tensor:
        """Return the view at a position. Make a new one if user code has replaced the memory of the old one."""
        if not self.is_intact(position):
            self.views[position] = view = self._make_view(self.places[position])
            self._storages[position] = self._storage_of(view)
            self._storage_ids[position] = self._storages[position]._cdata
        return self.views[position]

    def fits(self, position: int) -> bool:
        """Return whether a place may be its parameter's `.grad`: dtype, shape, strides and device are the same."""
        param, place = self.params[position], self.places[position]
        return (
            param.dtype is place.dtype
            and param.device == place.device
            and param.shape == place.shape
            and dense_strides(param) == place.stride()
        )

    def fill(self, positions: Sequence[int], gradients: list[torch.Tensor]) -> None:
        """Copy gradients into their places in the flat buffers, with one call of PyTorch.

        Raises:
            ConfigError: a parameter was moved to another device, or has another shape.
        """
        targets = list(map(self.places.__getitem__, positions))
        try:
            # Copy under no_grad, because gradients computed with create_graph=True have a graph.
            with torch.no_grad():
                self._device.launch(torch._foreach_copy_, targets, gradients)
        except RuntimeError:
            for position, gradient in zip(positions, gradients, strict=True):
                self._require_same_place(position, gradient)
            raise
        if self._device.streams:
            self._device.keep(gradients)

    def clear(self, position: int) -> torch.Tensor:
        """Zero the place of one gradient in the flat buffer, and return the view over it."""
        self.preserve([position])
        self._device.launch(self.places[position].zero_)
        return self.views[position]

    def preserve(self, positions: Sequence[int]) -> None:
        """Copy earlier gradients to which user code still refers, before the places of these gradients are overwritten.

        The copies are made on the CUDA stream of user code, so that user code may read them without waiting.
        """
        for position in positions:
            if position in self.lent:
                continue
            if _USERS(self._storage_ids[position]) != self._users[position]:
                with self._device.before_packing():
                    self.lent[position] = self.places[position].clone()
            elif self.is_intact(position) and self._is_kept(position):
                view = self.views[position]
                with self._device.before_packing():
                    view.data = view.detach().clone()
                self.view(position)

    def _is_kept(self, position: int) -> bool:
        """Return whether user code holds a reference to the view at a position."""
        return max(map(sys.getrefcount, self.views[position : position + 1])) > REFERENCES

    def view_for_misfit(self, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the view that may replace a gradient as `.grad`, although `accept` has returned False for it.

        Return None if the gradient and its place in the flat buffer differ in dtype or strides. If the reason is that
        the parameter was changed after the buffers were made, also set `outdated`.

        Raises:
            ConfigError: a parameter was moved to another device, or has another shape.
        """
        place = self.places[position]
        self._require_same_place(position, gradient)
        if gradient.dtype is place.dtype and gradient.stride() == place.stride():
            return self.view(position)
        if gradient.dtype is place.dtype or gradient.dtype is not self._dtypes[position]:
            self.outdated = True  # else the dtypes differ only because of `Reduction.wire_dtype`
        return None

    def _require_same_place(self, position: int, gradient: torch.Tensor) -> None:
        place = self.places[position]
        if gradient.device != place.device or gradient.shape != place.shape:
            raise ConfigError(
                f"the gradient of parameter {self.names[position]} has the shape {tuple(gradient.shape)} on device "
                f"{gradient.device}, but the shape {tuple(place.shape)} on device {place.device} was expected; move "
                "or resize the model before you call DistributedOptimizer()"
            )

    def copy_out(self, pairs: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy reduced gradients from their places in the flat buffers into other tensors: pairs (position, target)."""
        if pairs:
            with torch.no_grad():  # record no graph, even if gradients computed with create_graph=True have one
                targets, sources = [target for _, target in pairs], [self.places[position] for position, _ in pairs]
                self._device.launch(torch._foreach_copy_, targets, sources)

    def restore(self, positions: Sequence[int]) -> None:
        """Copy the values saved by `preserve` into their places again. Call after `copy_out` of reduced gradients."""
        for position in self.lent.keys() & set(positions):
            saved = self.lent.pop(position)
            self._device.launch(self.places[position].copy_, saved)
            if self._device.streams:
                self._device.keep([saved])
