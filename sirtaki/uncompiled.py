"""Prevent `torch.compile` from compiling Sirtaki's own code.

Dynamo reaches code in two ways. First, it compiles each Python frame that is called while compiled code runs. If a
compiled function calls `backward()`, autograd calls gradient hooks in such frames. Second, Dynamo inlines each function
that a traced function calls. Neither may happen to Sirtaki's functions, because they communicate with other ranks: a
trace of the tuner takes minutes, and its graph would be wrong in the next step.

`torch.compiler.disable` prevents both, but it is too slow: its wrapper costs a microsecond for each gradient hook, and
it loads Dynamo, which takes more than a second. This module sets two marks instead, which load nothing and cost nothing
in jobs without compilation:

- A code object's strategy (`set_code_exec_strategy`) excludes its frames, and all frames that they call.
- A function's attribute `_torchdynamo_disable` excludes it from inlining. `torch.compiler.disable` sets it, too.

A function that is created at run time lacks this attribute. That is intended for the hook of `GradientHooks`.
Compiled autograd inlines the hook, so the graph of a pass breaks only at the first and the last gradient. A marked hook
would break the graph at every gradient.

Both marks are private to PyTorch, and only this module uses them. They were checked with PyTorch 2.13. With PyTorch
versions before 2.7, Sirtaki's frames are excluded one by one (`skip_code`). The packages that Sirtaki calls are
excluded as a whole (`trace_rules.add`). This was not checked in a compiled job. With a version that has neither
function, Dynamo also compiles Sirtaki's frames.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch

PACKAGE = "sirtaki"

CALLED = ("optuna", "skopt", "sklearn", "scipy", "networkx", "sqlalchemy", "msgspec", "rich", "psutil")
"""Packages that Sirtaki calls. They are excluded explicitly only with PyTorch versions that exclude frames one by one.
Newer versions also exclude all frames that an excluded frame calls."""

REASON = "it communicates with other ranks"

_excluded = set[str]()
"""Names of the Sirtaki modules whose functions are excluded from compilation."""


def exclude_from_compilation() -> None:
    """Exclude all functions of all Sirtaki modules loaded so far. Idempotent. Not collective.

    Must be called before Dynamo can trace a hook that Sirtaki registers.
    """
    for name in [name for name in list(sys.modules) if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        if name not in _excluded and (module := sys.modules.get(name)) is not None:
            _excluded.add(name)
            for function in _functions(module):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
                _exclude_frames(function.__code__)
    if _exclude_each is _skip_code and "torch._dynamo" in sys.modules and CALLED[0] not in _excluded:
        from torch._dynamo import trace_rules

        for name in CALLED:
            _excluded.add(name)
            with suppress(ImportError, AttributeError):
                trace_rules.add(name)


def unless_traced(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a module hook so that the hook does nothing while Dynamo traces the module's call.

    A hook that is excluded from compilation would break the graph, which `fullgraph=True` forbids. Before PyTorch 2.7,
    Dynamo cannot guard global module hooks. With these versions, the hook is excluded and breaks the graph.
    """
    if _exclude_each is _skip_code:
        excluded: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        return excluded

    def call(*args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args, **kwargs)

    return call


def something_is_compiled() -> bool:
    """Return whether Dynamo has compiled a function in this process.

    All of Dynamo's counters are checked, because with `fullgraph=True` Dynamo increments only the counters of graphs.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and any(dynamo.counters.values())


def in_compiled_autograd() -> bool:
    """Return whether the current backward pass was compiled by compiled autograd.

    Such a pass calls hooks, but drops the callbacks that hooks queue for the pass's end.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def _functions(namespace: ModuleType | type) -> Iterator[FunctionType]:
    """Yield the functions defined in a module: module functions, methods, and functions inside decorators' closures."""
    module = namespace.__name__ if isinstance(namespace, ModuleType) else namespace.__module__
    for found in list(vars(namespace).values()):
        kind = type(found)
        if kind is FunctionType and found.__closure__ is None and not found.__dict__:  # most values are plain functions
            if found.__module__ == module:
                yield found
            continue
        if kind in _WITHOUT_FUNCTIONS:
            continue
        if isinstance(found, type):
            if found.__module__ == module and found is not namespace:
                yield from _functions(found)
            continue
        pending = list[Any](_unwrap(found))
        while pending:
            function = pending.pop()
            if getattr(function, "__module__", None) != module:
                continue
            pending.append(getattr(function, "__wrapped__", None))
            if isinstance(function, FunctionType):
                yield function
                with suppress(ValueError):  # An empty cell raises ValueError.
                    pending += [cell.cell_contents for cell in function.__closure__ or ()]


_WITHOUT_FUNCTIONS = frozenset(
    {str, int, float, bool, bytes, tuple, list, dict, set, frozenset, type(None), ModuleType, MemberDescriptorType}
)
"""Types of most other values in modules and classes. No function is found through them."""


def _unwrap(found: Any) -> tuple[Any, ...]:
    """Return the functions inside a descriptor, such as a property; return any other value unchanged, in a tuple."""
    if isinstance(found, property):
        return found.fget, found.fset, found.fdel
    if isinstance(found, staticmethod | classmethod):
        return (found.__func__,)
    return (found.func,) if isinstance(found, cached_property) else (found,)


def _exclude_frames(code: CodeType) -> None:
    """Exclude the frames of a code object and of its nested code objects."""
    _exclude_each(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _exclude_frames(constant)


def _nothing(code: CodeType) -> None:
    """Do nothing, because this version of PyTorch cannot exclude frames."""


def _how_to_exclude() -> tuple[Callable[[CodeType], None], Callable[[CodeType], None]]:
    """Return two functions that exclude a code object's frames from compilation.

    The first one also excludes the frames that they call, if this PyTorch version can do that. The second one is
    `skip_code`, which excludes only the frames themselves.
    """
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return _nothing, _nothing
    older: Callable[[CodeType], None] = getattr(eval_frame, "skip_code", _nothing)
    try:
        skipped = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        set_strategy = eval_frame.set_code_exec_strategy
    except AttributeError:
        return older, older
    return lambda code: set_strategy(code, skipped), older


_exclude_each, _skip_code = _how_to_exclude()
