"""Ray Train: `TorchTrainer(loop, torch_config=SirtakiConfig(), …)`.

Ray starts and restarts the ranks, and keeps checkpoints. `hvd.init()` in the loop connects them, and PyTorch's process
group, which `prepare_model` uses, has Sirtaki's backend.
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
    """Ray Train's `TorchConfig` with Sirtaki's process group.

    Attributes:
        backend: backend of PyTorch's process group. "gloo" and "nccl" are PyTorch's own. `hvd.init()` works with all.
    """

    backend: str | None = NAME

    @property
    def backend_cls(self) -> type[Any]:
        """Return the backend class for Ray Train."""
        return SirtakiBackend


class SirtakiBackend(_TorchBackend):  # type: ignore[misc]
    """Actions of Ray Train's controller on the workers before and after the loop."""

    def on_start(self, worker_group: Any, backend_config: SirtakiConfig) -> None:
        """Create the process group."""
        secret = os.environ.get("SIRTAKI_SECRET") or secrets.token_hex(32)
        worker_group.execute(_prepare, {"SIRTAKI_SECRET": secret, "SIRTAKI_CONTROL": "mesh"})
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: SirtakiConfig) -> None:
        """End the job if the loop has not ended it."""
        worker_group.execute(leave_job, "the loop has ended")
        super().on_shutdown(worker_group, backend_config)


def _prepare(variables: Mapping[str, str]) -> None:
    """Set the variables and register the backend, on each worker."""
    os.environ.update(variables)
    register()
