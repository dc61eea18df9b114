"""Configuration for Ray Train: `TorchTrainer(loop, torch_config=SirtakiConfig(), …)`.

Ray starts and restarts the ranks, and keeps checkpoints. `hvd.init()` in the training loop connects the ranks.
PyTorch's process group, which Ray's `prepare_model` uses, has Sirtaki's backend.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.train.torch import TorchConfig

from sirtaki.torch_backend import NAME, register

from .ranks import leave_job

_TorchBackend: Any = TorchConfig().backend_cls


@dataclass
class SirtakiConfig(TorchConfig):  # type: ignore[misc]
    """Ray Train's `TorchConfig`, whose process group has the backend "sirtaki" by default.

    Attributes:
        backend: backend of PyTorch's process group: "sirtaki", "gloo" or "nccl". `hvd.init()` works with each of them.
    """

    backend: str | None = NAME

    @property
    def backend_cls(self) -> type[Any]:
        """Return the class whose methods Ray Train calls before and after the training loop."""
        return SirtakiBackend


class SirtakiBackend(_TorchBackend):  # type: ignore[misc]
    """Actions of Ray Train's controller on the workers, before and after the training loop."""

    def on_start(self, worker_group: Any, backend_config: SirtakiConfig) -> None:
        """Create PyTorch's process group on all workers, before the training loop."""
        secret = os.environ.get("SIRTAKI_SECRET") or secrets.token_hex(32)
        worker_group.execute(_prepare, {"SIRTAKI_SECRET": secret, "SIRTAKI_CONTROL": "mesh"})
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: SirtakiConfig) -> None:
        """End Sirtaki's job on all workers, if the training loop has not ended it."""
        worker_group.execute(leave_job, "the loop has ended")
        super().on_shutdown(worker_group, backend_config)


def _prepare(variables: Mapping[str, str]) -> None:
    """Set environment variables, and register the backend "sirtaki" in PyTorch. Runs on each worker."""
    os.environ.update(variables)
    register()
