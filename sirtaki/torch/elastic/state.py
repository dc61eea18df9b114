"""What a training script commits, restores and shares: models, optimizers, samplers and plain values."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .sampler import ElasticSampler

SYNC_ROOT = 0
"""Whose state all ranks take: no rank is older than another."""


class State(ABC):
    """Something that can be saved in memory, restored, and made equal on all ranks."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call before training is repeated, for example to adapt the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Training is about to be repeated."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, and looks whether hosts have changed."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:  # noqa: B027  # part of the interface
        """Does nothing: the ranks of a job do not change."""

    def reset(self) -> None:  # noqa: B027  # sub-classes may do something
        """Called by `on_reset`; for sub-classes."""

    @abstractmethod
    def save(self) -> None:
        """Keeps the current state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Goes back to what was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Collective: takes over rank 0's state, and saves it."""


class ObjectState(State):
    """Plain picklable values, kept as attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = list(values)
        for name, value in values.items():
            setattr(self, name, value)
        self._saved = self._values()

    def _values(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def save(self) -> None:
        """See `State`."""
        self._saved = self._values()

    def restore(self) -> None:
        """See `State`."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """See `State`."""
        self._saved = broadcast_object(self._values(), SYNC_ROOT)
        self.restore()


class TorchState(ObjectState):
    """A model and an optimizer, and anything else by keyword: further models, optimizers, samplers, plain values."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        stateful = {name: value for name, value in given.items() if isinstance(value, _STATEFUL)}
        self._stateful = stateful
        for name, value in stateful.items():
            setattr(self, name, value)
        self._saved_states = self._states()
        super().__init__(**{name: value for name, value in given.items() if name in kwargs and name not in stateful})

    def _states(self) -> dict[str, Any]:
        return {name: copy.deepcopy(value.state_dict()) for name, value in self._stateful.items()}

    def save(self) -> None:
        """See `State`."""
        self._saved_states = self._states()
        super().save()

    def restore(self) -> None:
        """See `State`."""
        for name, value in self._stateful.items():
            value.load_state_dict(copy.deepcopy(self._saved_states[name]))
        super().restore()

    def reset(self) -> None:
        """Deals out anew what the samplers have left."""
        for value in self._stateful.values():
            if isinstance(value, ElasticSampler):
                value.reset()

    def sync(self) -> None:
        """See `State`; what the ranks' samplers have processed is put together."""
        for value in self._stateful.values():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), SYNC_ROOT)
            elif isinstance(value, ElasticSampler):
                states = allgather_object(value.state_dict())
                processed = set().union(*(state["processed_indices"] for state in states))
                value.load_state_dict({"epoch": states[SYNC_ROOT]["epoch"], "processed_indices": processed})
            elif not isinstance(value, torch.optim.LBFGS):
                broadcast_optimizer_state(value, SYNC_ROOT)
        self._saved_states = self._states()
        super().sync()


_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
