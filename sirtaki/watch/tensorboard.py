"""Iterations, trials and decisions as TensorBoard shows them."""

from __future__ import annotations

import math
from typing import Any

from sirtaki.errors import ConfigError

from .watchers import Decision, GenerationBegun, IterationEnded, TrialEnded, Watcher


class TensorBoard(Watcher):
    """Writes to a `SummaryWriter`, of PyTorch's if none is given."""

    def __init__(self, log_dir: str | None = None, *, writer: Any = None, every: int = 1) -> None:
        """Made on rank 0, as a rule.

        Args:
            log_dir: folder of PyTorch's writer; None = its own choice.
            writer: has `add_scalar(tag, value, step)` and `add_text(tag, text, step)`; None = PyTorch's is made.
            every: iterations between two that are written.

        Raises:
            ConfigError: PyTorch's writer is wanted, and TensorBoard is not installed.
        """
        self._own = writer is None
        if writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as err:
                raise ConfigError("TensorBoard is not installed: pip install tensorboard") from err
            writer = SummaryWriter(log_dir)
        self._writer, self._every = writer, every

    def iteration(self, event: IterationEnded) -> None:
        """Writes what the iteration took, if it is one of every so many."""
        if event.number % self._every == 0:
            for name in ("step_s", "communication_s", "exposed_s"):
                self._scalar(name, getattr(event, name), event.number)

    def trial(self, event: TrialEnded) -> None:
        """Writes what the trial took, and the best one so far."""
        self._scalar("trial/communication_s", event.communication_s, event.iteration)
        self._scalar("trial/best_s", event.best_s, event.iteration)

    def decision(self, event: Decision) -> None:
        """Writes which setting runs, with its time."""
        self._scalar("decision/communication_s", event.best_s, event.iteration)
        self._writer.add_text("sirtaki/setting", f"{event.setting} (proposed by {event.arm})", event.iteration)

    def generation(self, event: GenerationBegun) -> None:
        """Writes how many ranks are together."""
        self._scalar("ranks", event.size, event.number)

    def close(self) -> None:
        """Closes its own writer; one that was given is its owner's."""
        if self._own:
            self._writer.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._writer.add_scalar(f"sirtaki/{name}", value, step)
