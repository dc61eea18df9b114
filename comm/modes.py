"""Run Sirtaki's tensor operations outside of the PyTorch modes of the training script.

A mode applies to all operations of a thread. Examples are `torch.inference_mode()`, a default device,
`torch.autocast`, and modes of the training script (`TorchFunctionMode`, `TorchDispatchMode`) that count, change or
refuse operations. They must not affect Sirtaki's operations in the training thread. Most modes do not affect the
operations of DDP's reducer either, because it runs in C++.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

without_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context manager in which PyTorch ignores `__torch_function__` of tensor subclasses."""

no_torch_function = torch._C._disabled_torch_function_impl
"""Value for `__torch_function__` of a tensor subclass. With this value, operations on the subclass return plain
tensors."""

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class _ThreadModes(threading.local):
    left_inference_mode = False


_state = _ThreadModes()


def script_is_in_inference_mode() -> bool:
    """Return whether the training script is in inference mode in this thread, even if `outside_modes` has left it.

    A `TorchDispatchMode` must not begin or end inside inference mode, because leaving inference mode restores the
    dispatch keys that the thread had on entering it. If a mode began inside, it would see no operations afterwards. If
    a mode ended inside, PyTorch would still call it afterwards.
    """
    return torch.is_inference_mode_enabled() or _state.left_inference_mode


def outside_changes(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Wrap `function` so that it runs outside of all modes of the calling thread except `TorchDispatchMode`.

    Modes are, for example, autocast and inference mode. This wrapper is for functions that run in the backward pass.
    With DDP, a `TorchDispatchMode` also sees the reducer's operations in the backward pass, so it may see those of
    `function`. `function` may exit a `TorchDispatchMode` that the training script has entered.
    """

    @functools.wraps(function)
    def outside(*args: _Given.args, **options: _Given.kwargs) -> _Result:
        core = torch._C
        if not (
            core._len_torch_function_stack() or core._is_any_autocast_enabled() or torch.is_inference_mode_enabled()
        ):
            return function(*args, **options)
        with _without_modes():
            return function(*args, **options)

    return outside


def outside_modes(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Wrap `function` so that it runs outside of all PyTorch modes of the calling thread, such as autocast.

    It also runs outside of inference mode, because other threads could not write tensors that it creates in that mode.
    """
    outside_other_modes = outside_changes(function)

    @functools.wraps(function)
    def outside(*args: _Given.args, **options: _Given.kwargs) -> _Result:
        if not torch._C._len_torch_dispatch_stack():
            return outside_other_modes(*args, **options)
        with _disable_current_modes():
            return outside_other_modes(*args, **options)

    return outside


@contextmanager
def _without_modes() -> Iterator[None]:
    """Leave inference mode, autocast (CPU and CUDA) and all `TorchFunctionMode`s while the `with` body runs.

    The modes are entered again at its end. A default device is left too, because it is a `TorchFunctionMode`. If
    inference mode was on, autograd records no operations in the body.
    """
    with ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.callback(torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack())
        if torch.is_inference_mode_enabled():
            _state.left_inference_mode = True
            stack.callback(setattr, _state, "left_inference_mode", False)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
