"""Who reads parameters, as PyTorch's dispatcher sees it: what `awaited` cannot keep anybody from.

TorchScript, functorch's transforms and tensors that share a parameter's memory reach a parameter without a word to its
class. One training iteration tells which: each parameter is held, though nothing is under way, and what the dispatcher
sees read while it is still held was read past Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from sirtaki.errors import StaleReadError

from . import awaited


class HeldReads(TorchDispatchMode):
    """Reports each operation that reads a tensor while it is held, or another that shares its memory."""

    def __init__(self, params: Sequence[torch.Tensor], found: Callable[[torch.Tensor, Any], None]) -> None:
        """`found` is called with the tensor that is held, and the operation."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._found = found
        with torch._C.DisableTorchFunctionSubclass():
            self._by_memory = {param.untyped_storage()._cdata: param for param in params}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """PyTorch's call."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                param = self._by_memory.get(_memory(tensor))
                if param is not None and awaited.is_held(param):
                    self._found(param, func)
        return func(*args, **(kwargs or {}))

    def begin(self) -> bool:
        """Sees all operations of this thread from now on; False, and sees none, inside another mode of the script's."""
        if any(not isinstance(mode, HeldReads) for mode in _get_current_dispatch_mode_stack()):
            return False
        self.__enter__()  # type: ignore[no-untyped-call]  # torch's
        return True

    def end(self) -> None:
        """Sees no more, whatever modes were entered since. Harmless if it has ended."""
        if not any(mode is self for mode in _get_current_dispatch_mode_stack()):
            return
        above = list[Any]()
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_pop_mode())
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        for mode in reversed(above):
            _push_mode(mode)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, or a transform's
            return 0


class LearnedReads:
    """One iteration in which all parameters of an optimizer are watched.

    Attributes:
        order: parameters in the order in which they were first read.
        uncovered: those that were read past Python, by id.
        modules: outermost modules that were called.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """`params`: plain ones, of which nothing is under way."""
        self._params = params
        self._mode = HeldReads(params, self._past_python)
        self.order: list[torch.Tensor] = []
        self.uncovered: set[int] = set()
        self.modules: list[nn.Module] = []
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def begin(self) -> bool:
        """Watches from now on; False if it cannot."""
        if not all(map(awaited.can_be_held, self._params)) or not self._mode.begin():
            return False
        awaited.hold(self._params, self)
        self._handle = register_module_forward_pre_hook(self._called)
        return True

    def end(self) -> None:
        """Watches no more."""
        self._mode.end()
        self.settle()
        if self._handle is not None:
            self._handle.remove()

    def arrive(self, tensor: torch.Tensor) -> None:
        """See `Awaiter`."""
        awaited.let_go(tensor)
        self.order.append(tensor)

    def settle(self) -> None:
        """See `Awaiter`."""
        for param in self._params:
            awaited.let_go(param)

    def _past_python(self, param: torch.Tensor, _: object) -> None:
        self.uncovered.add(id(param))
        self.arrive(param)

    def _called(self, module: nn.Module, _: object) -> None:
        if not any(module is known for known in self.modules):
            self.modules.append(module)


class CheckedReads:
    """Raises where a parameter is read that is not what it will be (`SIRTAKI_OVERLAP_FORWARD=check`)."""

    def __init__(self, params: Sequence[torch.Tensor], names: dict[int, str]) -> None:
        """`names`: of the parameters, by id."""
        self._names = names
        self._mode = HeldReads(params, self._raise)
        self._inside: list[str] = []
        self._handles = contextlib.ExitStack()

    def begin(self) -> None:
        """Checks from now on."""
        if self._mode.begin():
            for handle in (
                register_module_forward_pre_hook(lambda module, _: self._inside.append(type(module).__name__)),
                register_module_forward_hook(self._left, always_call=True),
            ):
                self._handles.callback(handle.remove)

    def end(self) -> None:
        """Checks no more."""
        self._mode.end()
        self._handles.close()
        self._inside.clear()

    def _left(self, *_: object) -> None:
        if self._inside:
            self._inside.pop()

    def _raise(self, param: torch.Tensor, operation: Any) -> None:
        where = f"in {self._inside[-1]}" if self._inside else "outside of all modules"
        raise StaleReadError(
            f"{operation} reads {self._names.get(id(param), 'a parameter')} {where} before its update is made, past "
            "what Python can see: call optimizer.finish() before that"
        )


def wait_for_own(module: nn.Module, _: object) -> None:
    """A forward pre-hook of all modules: those that are not PyTorch's wait for the parameters that they hold.

    What is in PyTorch reads parameters by functions that wait; others may give theirs to an extension.
    """
    if not type(module).__module__.startswith("torch."):
        for param in _own(module):
            awaited.wait_for(param)


def hold_their_own(modules: Sequence[nn.Module], params: Sequence[torch.Tensor]) -> bool:
    """Whether one of these modules, or one in them, is not PyTorch's and holds some of these parameters."""
    wanted = {id(param) for param in params}
    every = dict.fromkeys(part for module in modules for part in module.modules())
    others = [part for part in every if not type(part).__module__.startswith("torch.")]
    return any(id(param) in wanted for part in others for param in _own(part))


def _own(module: nn.Module) -> list[nn.Parameter]:
    """What it holds, also in lists."""
    lists = [part for part in module._modules.values() if isinstance(part, nn.ParameterList | nn.ParameterDict)]
    return [param for part in (module, *lists) for param in part._parameters.values() if param is not None]
