"""Making an optimizer of a class derived from another's, over the same parameter groups and state.

Both distributed optimizers are made this way.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from sirtaki.engine.job import Job
from sirtaki.errors import ConfigError

Mixin = TypeVar("Mixin", bound="Distributed")


class Distributed(torch.optim.Optimizer):
    """What all distributed optimizers are instances of.

    Attributes:
        _wrapped: the optimizer that this one was made of; a scheduler may still hold it.
        _detached: why it belongs to no ranks just now; empty if it does.
        _of_training: it was made by the function that `elastic.run` repeats.
        _closed: `close` was called.
    """

    _wrapped: torch.optim.Optimizer
    _detached = ""
    _of_training = False
    _closed = False

    @property
    def _signature(self) -> str:
        """Equal on two ranks if their optimizers may belong together."""
        raise NotImplementedError

    def _attach(self, current: Job) -> None:
        """Collective over those it trains with: from now on it belongs to these ranks.

        Raises:
            ConfigError: it cannot.
            NotImplementedError: it cannot.
        """
        raise NotImplementedError

    def _detach(self, why: str) -> None:
        """Not collective: it belongs to no ranks; gradients of an iteration that has not ended do not count."""
        self._detached = why
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def require_plain(optimizer: torch.optim.Optimizer) -> None:
    """Raises if the optimizer is a distributed one already.

    Raises:
        ConfigError: saying what to do.
    """
    if isinstance(optimizer, Distributed):
        name = type(optimizer._wrapped).__name__
        raise ConfigError(
            f"this {name} is a DistributedOptimizer already, and is wrapped once only; to begin anew, make another "
            f"torch.optim.{name} of the model's parameters and wrap that"
        )


def derive(mixin: type[Mixin], optimizer: torch.optim.Optimizer) -> Mixin:
    """An instance of a new class, named like the optimizer's and derived from `mixin` and it."""
    base = type(optimizer)
    derived: Mixin = object.__new__(type(base.__name__, (mixin, base), {}))
    derived._wrapped = optimizer
    # A learning rate scheduler patches `step` of the instance that it was given; ours must not be hidden by it.
    derived.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return derived


def plain_copy(derived: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> tuple[Any, ...]:
    """What `__reduce__` returns: copies and pickles are plain optimizers of the wrapped class (decision 0055)."""
    return _bare, (base,), derived.__getstate__()


def _bare(base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An instance to which a state is given next."""
    return object.__new__(base)
