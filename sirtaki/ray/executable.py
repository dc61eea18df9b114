"""The user's class, of which each rank makes an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Executable:
    """A class and what it is called with."""

    cls: type[Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def make(self) -> Any:
        """An object of it."""
        return self.cls(*self.args, **self.kwargs)
