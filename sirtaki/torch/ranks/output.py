"""What one rank does for all: printing, writing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sirtaki.torch.basics import is_initialized, rank

P = ParamSpec("P")
T = TypeVar("T")


class _Nobody:
    """Stands on other ranks for what only rank 0 has, a writer or a run: whatever is asked of it does nothing."""

    def __getattr__(self, name: str) -> _Nobody:
        return self

    def __call__(self, *args: object, **kwargs: object) -> _Nobody:
        return self

    def __setitem__(self, key: object, value: object) -> None: ...

    def __enter__(self) -> _Nobody:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __bool__(self) -> bool:
        return False


def on_root(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which is called on rank 0 only; elsewhere its result is an object whose methods do nothing.

    All ranks evaluate its arguments, so these may hold collective operations.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_initialized() and rank() != 0:
            return _Nobody()  # type: ignore[return-value]  # what stands for it
        return function(*args, **kwargs)

    return call
