"""Parameters that are not what they will be: whatever Python does with one waits first.

While its gradient, or its update, is under way, a parameter is an instance of a class whose `__torch_function__` waits
for it and makes it a plain parameter again (as PyTorch's lazy modules do in the end). So `F.linear(x, emb.weight)`, an
LSTM's list of weights, `state_dict()`, `p.grad`, `p.data` and `copy.deepcopy` need no hook of their own, and nobody has
to know in advance who reads what.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn


class Awaiter(Protocol):
    """Who can wait for tensors."""

    def arrive(self, tensor: torch.Tensor) -> None:
        """Blocks until anybody may use the tensor, and lets go of it."""
        ...

    def settle(self) -> None:
        """The same for all of its tensors."""
        ...


_awaiters: dict[int, Awaiter] = {}

_FREE = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "is_cuda", "is_cpu")
) | {torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim}
"""What may be asked at any time: it says nothing of values."""


class _Awaited:
    """Mixed into the class of tensors that are waited for."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: as torch
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = list(_tensors((args, kwargs)))
        for tensor in found:
            wait_for(tensor)
        if not found:  # in a container that is not known here
            settle_all()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        tensor = cast(torch.Tensor, self)
        wait_for(tensor)
        return copy.deepcopy(tensor, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        tensor = cast(torch.Tensor, self)
        wait_for(tensor)
        return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's


class _AwaitedParameter(_Awaited, nn.Parameter):
    pass


class _AwaitedTensor(_Awaited, torch.Tensor):
    pass


_HELD: dict[type, type] = {nn.Parameter: _AwaitedParameter, torch.Tensor: _AwaitedTensor}
_PLAIN: dict[type, type] = {held: plain for plain, held in _HELD.items()}


def can_be_held(tensor: torch.Tensor) -> bool:
    """Whether it is of a class that `hold` knows, and is not held already."""
    return type(tensor) in _HELD


def is_held(tensor: torch.Tensor) -> bool:
    """Whether it is waited for."""
    return type(tensor) in _PLAIN


def hold(tensors: Iterable[torch.Tensor], awaiter: Awaiter) -> None:
    """Whoever uses one of these waits from now on, by `awaiter`, which is kept alive until then."""
    for tensor in tensors:
        _awaiters[id(tensor)] = awaiter
        tensor.__class__ = _HELD[type(tensor)]


def let_go(tensor: torch.Tensor) -> None:
    """Nobody waits for this one any more. Harmless if nobody did."""
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        del _awaiters[id(tensor)]


def wait_for(tensor: torch.Tensor) -> None:
    """Blocks until anybody may use the tensor."""
    awaiter = _awaiters.get(id(tensor))
    if awaiter is not None:
        awaiter.arrive(tensor)


def settle_all() -> None:
    """Blocks until nothing is waited for any more; not collective."""
    for awaiter in dict.fromkeys(_awaiters.values()):
        awaiter.settle()


def _tensors(found: object) -> Iterator[torch.Tensor]:
    if isinstance(found, _Awaited):
        yield cast(torch.Tensor, found)
    elif isinstance(found, list | tuple | set | frozenset):
        for item in found:
            yield from _tensors(item)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
