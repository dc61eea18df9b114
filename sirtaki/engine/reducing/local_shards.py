"""Parameters that are DTensors, as tensor parallelism makes them: their local shards are what is reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from sirtaki.comm.collectives.operations import is_dtensor


class LocalShard(torch.Tensor):
    """This rank's shard of a DTensor, of the same memory; `.grad` is the shard of the DTensor's gradient, both ways.

    A gradient that comes with other placements than its parameter's (a sum that the ranks of the tensor-parallel
    dimension have not added up yet) is given these as it comes, so that all those ranks do it at the same point.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _whole: weakref.ref[Any]  # a DTensor, whose class need not be imported
    _seen = (0, 0)  # the DTensor's gradient, and its version, when it was last read or set

    @property
    def grad(self) -> torch.Tensor | None:
        """None if the DTensor has none."""
        whole = self._whole()
        if whole is None or (gradient := whole.grad) is None:
            return None
        local: torch.Tensor = gradient._local_tensor
        before, self._seen = self._seen, (id(gradient), gradient._version)
        if before != self._seen and before[0] == id(gradient):
            torch.autograd.graph.increment_version(local)  # what writes to a DTensor counts there only
        return local

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (whole := self._whole()) is not None:
            whole.grad = None if value is None else type(whole)(value, whole._spec, requires_grad=False)
            self._seen = (id(whole.grad), 0 if whole.grad is None else whole.grad._version)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As the DTensor, which may be frozen and thawed."""
        whole = self._whole()
        return whole is not None and bool(whole.requires_grad)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """On the DTensor; the hook is called with the shard."""

        @torch.no_grad()
        def come(whole: Any) -> None:  # Any: see `_whole`
            if (gradient := whole.grad) is not None:
                if gradient.placements != whole.placements:
                    gradient = gradient.redistribute(placements=whole.placements)
                local = gradient._local_tensor
                if hasattr(local, "trigger_wait"):  # an AsyncCollectiveTensor
                    local = local.trigger_wait()
                if local is not self.grad:
                    self.grad = local
            hook(self)

        whole: Any = self._whole()
        handle: RemovableHandle = whole.register_post_accumulate_grad_hook(come)
        return handle


_shards = WeakTensorKeyDictionary()


def local_shard(param: Any) -> torch.Tensor:  # Any: a parameter, which may be a DTensor
    """A parameter, or the one `LocalShard` of it if it is a DTensor."""
    if not is_dtensor(param):
        return param  # type: ignore[no-any-return]
    if param not in _shards:
        shard = torch.Tensor._make_subclass(LocalShard, param._local_tensor.detach(), param.requires_grad)
        shard._whole = weakref.ref(param)
        _shards[param] = shard
    found: torch.Tensor = _shards[param]
    return found
