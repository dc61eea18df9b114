"""Optimizers that outlive generations of a job, and the class that wraps a user's."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from sirtaki.engine import job
from sirtaki.engine.job import Job
from sirtaki.errors import ConfigError, NotInitializedError

logger = logging.getLogger(__name__)

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's, which stays the same as this one: a scheduler may hold it."""
        super().load_state_dict(state_dict)
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are plain optimizers of the wrapped class.
        return _bare, (type(self._wrapped),), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        memo[id(self)] = copied = _bare(type(self._wrapped))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if job.is_initialized() and job.current().size > 1:
            copied.register_step_pre_hook(_warn_of_copy)
        return copied

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


def _bare(base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An instance to which a state is given next."""
    return object.__new__(base)


def _warn_of_copy(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A step pre-hook of copies."""
    if not isinstance(optimizer, Distributed):
        _warn_once(type(optimizer).__name__)


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning(
        "a copy of a DistributedOptimizer is stepped, which is a plain %s: what it trains is not kept equal over the "
        "ranks; wrap the copy, hvd.DistributedOptimizer(copy, …), if it should be",
        name,
    )


_kept: list[weakref.ref[Distributed]] = []

WAITING = (
    "this DistributedOptimizer was made before hvd.elastic.run, and not all ranks have one like it; a rank that has "
    "come to a job under way reduces gradients inside hvd.elastic.run only"
)

LEFT = (
    "this DistributedOptimizer belongs to a generation of ranks that has ended, and not all ranks of this one have it: "
    "make it outside of the function that hvd.elastic.run repeats, or anew in each call of it"
)


def keep(optimizer: Distributed, current: job.Job) -> None:
    """Attaches a new optimizer to the ranks there are: collective, but for one made before `elastic.run`.

    Where ranks come and go it waits for that, or for its first step: a rank that is lost meanwhile should not end the
    scripts of the others.
    """
    if current.elastic is None:
        optimizer._attach(current)
        return
    if current.training:
        optimizer._attach(current)
    else:
        optimizer._detached = WAITING
    optimizer._of_training = current.training
    _kept[:] = [weakref.ref(there) for there in (*_alive(), optimizer)]


def require_attached(optimizer: Distributed) -> None:
    """Collective if it waits for its first step.

    Raises:
        NotInitializedError: it belongs to no ranks.
    """
    if optimizer._detached == WAITING:
        current = job.current()
        if current.settled and not current.training:
            optimizer._attach(current)
    if optimizer._detached:
        raise NotInitializedError(optimizer._detached)


def _alive() -> list[Distributed]:
    return [optimizer for reference in _kept if (optimizer := reference()) is not None]


def detach_all() -> None:
    """Not collective: the generation ends, and with it what is left of gradients."""
    for optimizer in _alive():
        optimizer._detach(LEFT)


def detached() -> dict[str, Distributed]:
    """Those that are attached to no ranks, the oldest first, by a name that they have on all ranks.

    Of several alike the newest are taken for each other: those before may be garbage on some rank.
    """
    if any(optimizer._of_training for optimizer in _alive()):
        gc.collect()  # that function has ended, and has left its optimizer in reference cycles
    waiting = [optimizer for optimizer in _alive() if optimizer._detached and not optimizer._closed]
    seen: Counter[str] = Counter()
    named = {}
    for optimizer in reversed(waiting):
        signature = optimizer._signature
        named[f"{signature}#{seen[signature]}"] = optimizer
        seen[signature] += 1
    return dict(reversed(named.items()))


def attach(current: job.Job, optimizers: dict[str, Distributed], names: Sequence[str]) -> None:
    """Collective: attaches those that all ranks have.

    Args:
        current: the job.
        optimizers: as `detached` gives them.
        names: of those, in an order that is the same on all ranks.
    """
    for name in names:
        try:
            optimizers[name]._attach(current)
        except (ConfigError, NotImplementedError) as err:  # it does not fit these ranks, of which its use will tell
            optimizers[name]._detached = str(err)
