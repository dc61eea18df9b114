"""Sirtaki on Ray: ranks as Ray's actors (`RayExecutor`, as Horovod's), and a configuration for Ray Train.

Importing this needs no Ray; what it loads does.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from sirtaki.integrations.ray import ray_logger

if TYPE_CHECKING:
    from sirtaki.integrations.ray.executor import RayExecutor
    from sirtaki.integrations.ray.train import SirtakiConfig

__all__ = ["RayExecutor", "SirtakiConfig", "ray_logger"]

NEEDED = "sirtaki.ray needs Ray: pip install 'sirtaki[ray]'"

_MODULES = {
    "RayExecutor": "sirtaki.integrations.ray.executor",
    "SirtakiConfig": "sirtaki.integrations.ray.train",
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for: Ray Train is large, and `RayExecutor` does without it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError(NEEDED, name="ray")
    return getattr(importlib.import_module(_MODULES[name]), name)
