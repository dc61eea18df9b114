"""Flat buffers: contiguous memory for all gradients of one dtype, in which they are reduced."""

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
    """Return the strides of a parameter's gradient: those of the parameter, made dense."""
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
        feedback: error-feedback residuals of the compression.
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
        buffer: the memory.
        places: tensors over the memory of each gradient, in the same order.
    """

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
) -> list[FlatGroup]:
    """Allocate a flat buffer for each dtype, and for the flags at the end of the first buffer. Collective."""
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
            # Rounded up so that each gradient starts at an aligned address. The padding stays zero.
            sizes=(*(-(-params[index].numel() // piece) * piece for index in indices), *flags),
            itemsize_bytes=wire.itemsize,
            dtype=str(wire).removeprefix("torch."),
            device=device,
            names=(*(names[index] for index in indices), *(FLAGS for _ in flags)),
        )
        groups.append(FlatGroup(indices, params, layout, router.allocate(layout.numel, wire)))
    return groups


REFERENCES = max(map(sys.getrefcount, [object()])) + 1
"""Reference count of a view to which only `FlatBuffers.views` and a slice of it refer: user code does not."""

_USERS = count_storage_users or (lambda storage: 0)
_STRIDE = torch.Tensor.stride
_EMPTY_STORAGE = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()


class FlatBuffers:
    """The flat buffers of one optimizer, for one order of its parameters.

    A *position* is an index in the expected order of the gradients. All lists are in this order, unless stated.

    Sirtaki writes to `places`. User code gets `views`, separate tensors over the same memory, for two reasons:
    `model.half()` and similar calls replace the memory of the tensor in `.grad`, and a view has a version counter that
    changes only if user code writes.

    User code may keep a reduced gradient after its place is used for the next one. A kept view gets memory of its own.
    If another tensor shares the memory of a place (`p.grad.detach()`, `p.grad[0]`), the old value is saved, and copied
    back once the reduced gradient has been copied out.

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
        lent: saved values that must be copied back into their places, by position.
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
            router: allocates the memory.
            n_flags: elements for control flags, at the end of the first buffer.
        """
        self._device, self.order, self.numbers = router.device, list(order), list(range(len(order)))
        self.position = [0] * len(order)
        for position, index in enumerate(order):
            self.position[index] = position
        self.params, self.names = [params[index] for index in order], [names[index] for index in order]
        self.groups = _group_by_dtype(order, params, names, reduction=reduction, router=router, n_flags=n_flags)
        first = self.groups[0]
        # Only the real parts of complex flags are written. The memory may hold other values, which must not be reduced.
        self._device.launch(first.buffer.tensor[first.layout.offsets[-2] :].zero_)
        place_of = {i: place for group in self.groups for i, place in zip(group.indices, group.places, strict=True)}
        self.places = [place_of[index] for index in order]
        self.lent: dict[int, torch.Tensor] = {}
        self.views = list(map(self._make_view, self.places))
        # Each view has its own storage, whose users PyTorch counts. The storages are kept so that their ids stay valid.
        self._storages = list(map(self._storage_of, self.views))
        self._storage_ids = [storage._cdata for storage in self._storages]
        self._users = list(map(_USERS, self._storage_ids))
        self.addresses = [place.data_ptr() for place in self.places]
        self._dtypes = [param.dtype for param in self.params]
        # A place of another dtype never becomes `.grad`. With one dimension, dense strides need no check.
        pairs = zip(self.places, self.params, strict=True)
        self._other_dtype = [place.dtype is not param.dtype for place, param in pairs]
        self._strides = [place.stride() if place.dim() > 1 else () for place in self.places]
        self.outdated = False

    @property
    def layout_places(self) -> list[tuple[int, int]]:
        """Number of the layout, and number within the layout, of each parameter, by index."""
        places = {
            index: (number, place)
            for number, group in enumerate(self.groups)
            for place, index in enumerate(group.indices)
        }
        return [places[index] for index in range(len(self.params))]

    @property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """Layouts, one for each dtype. The first has one more entry, the control flags."""
        return tuple(group.layout for group in self.groups)

    @property
    def flags(self) -> torch.Tensor:
        """Elements of the control flags, `(n_flags,)`. In a complex buffer, their real parts."""
        first = self.groups[0]
        elements = first.buffer.tensor[first.layout.offsets[-2] :]
        return torch.view_as_real(elements)[:, 0] if elements.is_complex() else elements

    def has_flags(self, group: FlatGroup, stop: int) -> bool:
        """Return whether a unit that ends at element `stop` of a group's buffer contains control flags."""
        return group is self.groups[0] and stop > group.layout.offsets[-2]

    def move_from(self, before: FlatBuffers) -> None:
        """Move every `.grad` that is a view of the previous buffers into these buffers."""
        for position, param in enumerate(self.params):
            old = before.position[self.order[position]]
            if param.grad is not None and param.grad is before.views[old] and before.is_intact(old):
                self._device.launch(self.places[position].copy_, before.places[old])
                param.grad = self.view(position) if self.fits(position) else param.grad.clone()

    def detach(self) -> None:
        """Replace every `.grad` that is a view by a copy with memory of its own."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()

    def _make_view(self, place: torch.Tensor) -> torch.Tensor:
        # Through a capsule, because from_dlpack(tensor) also synchronises CUDA streams.
        return from_dlpack(torch.to_dlpack(place)) if place.numel() else place.data  # type: ignore[attr-defined]  # torch has it

    def _storage_of(self, view: torch.Tensor) -> torch.UntypedStorage:
        return view.untyped_storage() if view.numel() else _EMPTY_STORAGE

    def accept(self, part: slice, gradients: Sequence[torch.Tensor]) -> bool:
        """Return whether the views at these positions may replace the gradients as `.grad`.

        False if another tensor shares the memory of a view, or if a gradient and its place differ in dtype or strides.
        Differences in shape or device are not checked, because `.grad = view` raises then.
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
        """Return whether a place may be the gradient of its parameter: same dtype, shape, strides and device."""
        param, place = self.params[position], self.places[position]
        return (
            param.dtype is place.dtype
            and param.device == place.device
            and param.shape == place.shape
            and dense_strides(param) == place.stride()
        )

    def fill(self, positions: Sequence[int], gradients: list[torch.Tensor]) -> None:
        """Copy gradients into their places in one call.

        Raises:
            ConfigError: a parameter was moved to another device, or has another shape.
        """
        targets = list(map(self.places.__getitem__, positions))
        try:
            # no_grad, because gradients computed with create_graph=True have a graph.
            with torch.no_grad():
                self._device.launch(torch._foreach_copy_, targets, gradients)
        except RuntimeError:
            for position, gradient in zip(positions, gradients, strict=True):
                self._require_same_place(position, gradient)
            raise
        if self._device.streams:
            self._device.keep(gradients)

    def clear(self, position: int) -> torch.Tensor:
        """Zero a place, and return its view."""
        self.preserve([position])
        self._device.launch(self.places[position].zero_)
        return self.views[position]

    def preserve(self, positions: Sequence[int]) -> None:
        """Save the gradients in these places that user code still refers to, before the places are overwritten.

        The copies are made on the user's stream, so that user code may read them at once.
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
        """Return whether user code refers to the view itself."""
        return max(map(sys.getrefcount, self.views[position : position + 1])) > REFERENCES

    def view_for_misfit(self, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the view for a gradient that `accept` has refused; None if its dtype or strides are not its place's.

        Set `outdated` if the parameter was changed after the buffers were made.

        Raises:
            ConfigError: a parameter was moved to another device, or has another shape.
        """
        place = self.places[position]
        self._require_same_place(position, gradient)
        if gradient.dtype is place.dtype and gradient.stride() == place.stride():
            return self.view(position)
        if gradient.dtype is place.dtype or gradient.dtype is not self._dtypes[position]:
            self.outdated = True  # otherwise `Reduction.wire_dtype` requests the dtype of the place
        return None

    def _require_same_place(self, position: int, gradient: torch.Tensor) -> None:
        place = self.places[position]
        if gradient.device != place.device or gradient.shape != place.shape:
            raise ConfigError(
                f"the gradient of {self.names[position]} is {tuple(gradient.shape)} on {gradient.device}, and was "
                f"{tuple(place.shape)} on {place.device} when its DistributedOptimizer was made: move or resize the "
                "model first, then make the optimizer"
            )

    def copy_out(self, pairs: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy reduced gradients from their places into other tensors."""
        if pairs:
            with torch.no_grad():  # because gradients computed with create_graph=True have a graph
                targets, sources = [target for _, target in pairs], [self.places[position] for position, _ in pairs]
                self._device.launch(torch._foreach_copy_, targets, sources)

    def restore(self, positions: Sequence[int]) -> None:
        """Copy saved values back into these places, after the reduced gradients have been copied out."""
        for position in self.lent.keys() & set(positions):
            saved = self.lent.pop(position)
            self._device.launch(self.places[position].copy_, saved)
            if self._device.streams:
                self._device.keep([saved])
