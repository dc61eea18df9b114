"""Sirtaki on Ray: ranks as Ray's actors (`RayExecutor`, as Horovod's), and a configuration for Ray Train.

Importing this needs no Ray; what it names does.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .executor import RayExecutor
    from .train import SirtakiConfig

__all__ = ["RayExecutor", "SirtakiConfig"]

NEEDED = "sirtaki.ray needs Ray: pip install 'sirtaki[ray]'"

_MODULES = {"RayExecutor": "executor", "SirtakiConfig": "train"}


def __getattr__(name: str) -> Any:
    """Loads what is asked for: Ray Train is large, and `RayExecutor` does without it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError(NEEDED, name="ray")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
