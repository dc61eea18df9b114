"""Ray Train: `TorchTrainer(loop, torch_config=SirtakiConfig(), …)`.

Ray starts the ranks, restarts them, and keeps checkpoints. In the loop `hvd.init()` finds them, and PyTorch's process
group, which `prepare_model` uses, is Sirtaki's.
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
        backend: of PyTorch's process group; "gloo" or "nccl" leave it to PyTorch, and `hvd.init()` works as well.
    """

    backend: str | None = NAME

    @property
    def backend_cls(self) -> type[Any]:
        """For Ray Train."""
        return SirtakiBackend


class SirtakiBackend(_TorchBackend):  # type: ignore[misc]
    """What Ray Train's controller does with the workers before and after the loop."""

    def on_start(self, worker_group: Any, backend_config: SirtakiConfig) -> None:
        """Makes the process group."""
        secret = os.environ.get("SIRTAKI_SECRET") or secrets.token_hex(32)
        worker_group.execute(_prepare, {"SIRTAKI_SECRET": secret, "SIRTAKI_CONTROL": "mesh"})
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: SirtakiConfig) -> None:
        """Ends what the loop has not ended."""
        worker_group.execute(leave_job, "the loop has ended")
        super().on_shutdown(worker_group, backend_config)


def _prepare(variables: Mapping[str, str]) -> None:
    """On each worker."""
    os.environ.update(variables)
    register()
