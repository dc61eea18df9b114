"""Keep Sirtaki's own code out of what `torch.compile` compiles.

Dynamo reaches code in two ways. It evaluates each Python frame that is called while compiled code runs: autograd calls
gradient hooks in such frames when a compiled function calls `backward()`. And it inlines each function that a traced
function calls. Sirtaki's functions talk to other ranks, so neither may happen: a trace of the tuner takes minutes, and
its graph would be wrong in the next step.

`torch.compiler.disable` prevents both, but its wrapper costs about a microsecond a call, and gradient hooks are
called once per gradient. The marks set here cost nothing where nothing is compiled:

- A code object says that its frames, and all frames below them, are not evaluated (`set_code_exec_strategy`).
- A function's attribute `_torchdynamo_disable` says that it is not inlined; `torch.compiler.disable` sets it, too.
- The directory of Sirtaki is skipped (`trace_rules.add`), for functions that are made at run time.

All three are private to PyTorch and are used in this module only. Checked with PyTorch 2.13. Where a version lacks one,
frames are compiled that need not be; results stay the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any

PACKAGE = "sirtaki"

_excluded = set[str]()
"""Names of modules whose functions are marked, and "" once the directory is skipped."""


def exclude_from_compilation() -> None:
    """Exclude all functions of the modules of Sirtaki that are loaded by now. Idempotent; not collective.

    Call it before Dynamo can meet hooks that Sirtaki registers.
    """
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        if name not in _excluded and (module := sys.modules.get(name)) is not None:
            _excluded.add(name)
            for function in _functions(module):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                _skip(function.__code__)
    if "" not in _excluded and "torch._dynamo" in sys.modules:  # not loaded for this: that takes more than a second
        _excluded.add("")
        with suppress(ImportError, AttributeError):
            from torch._dynamo import trace_rules

            trace_rules.add(PACKAGE)


def _functions(namespace: ModuleType | type) -> Iterator[FunctionType]:
    """Yield the functions defined in a module: its own, those of its classes, and those that their decorators hold."""
    module = namespace.__name__ if isinstance(namespace, ModuleType) else namespace.__module__
    for found in list(vars(namespace).values()):
        if isinstance(found, type):
            if found.__module__ == module and found is not namespace:
                yield from _functions(found)
            continue
        for function in _behind(found):
            while function is not None and getattr(function, "__module__", None) == module:
                if isinstance(function, FunctionType):
                    yield function
                function = getattr(function, "__wrapped__", None)


def _behind(found: Any) -> tuple[Any, ...]:
    """Return what a name of a module or class holds, without the descriptor around it."""
    if isinstance(found, property):
        return found.fget, found.fset, found.fdel
    if isinstance(found, staticmethod | classmethod):
        return (found.__func__,)
    return (found.func,) if isinstance(found, cached_property) else (found,)


def _skip(code: CodeType) -> None:
    """Exclude the frames of a code object and of those nested in it, with all that they call."""
    _set_strategy(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip(constant)


try:
    from torch._C._dynamo import eval_frame as _eval_frame

    _SKIPPED = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)

    def _set_strategy(code: CodeType) -> None:
        _eval_frame.set_code_exec_strategy(code, _SKIPPED)

except (ImportError, AttributeError):  # before PyTorch 2.7: the directory is skipped, but not what its functions call

    def _set_strategy(code: CodeType) -> None:
        pass
