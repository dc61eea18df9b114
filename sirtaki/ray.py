"""Sirtaki on Ray: `RayExecutor` (ranks are Ray actors, as in Horovod) and `SirtakiConfig` for Ray Train.

Ray must be installed to use either class, but not to import this module.
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
    """Import a class when it is first accessed, because Ray Train is large and `RayExecutor` does not need it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError(NEEDED, name="ray")
    return getattr(importlib.import_module(_MODULES[name]), name)
