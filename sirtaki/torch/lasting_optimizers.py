"""Base class of distributed optimizers, and their attachment to the generations of an elastic job."""

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
    """Base class of distributed optimizers.

    Attributes:
        _wrapped: the user's optimizer, to which a scheduler may still refer.
        _detached: reason why the optimizer is not attached to ranks. Empty if it is attached.
        _of_training: True if the function that `elastic.run` repeats created the optimizer.
        _closed: True after `close`.
    """

    _wrapped: torch.optim.Optimizer
    _detached = ""
    _of_training = False
    _closed = False

    @property
    def _signature(self) -> str:
        """Return a key that is equal for corresponding optimizers of different ranks."""
        raise NotImplementedError

    def _attach(self, current: Job) -> None:
        """Attach the optimizer to the ranks of `current`. Collective over its process set.

        Raises:
            ConfigError: the optimizer does not fit these ranks.
            NotImplementedError: Adasum does not support this number of ranks.
        """
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. The wrapped optimizer shares the new groups and state, because a scheduler may refer to it."""
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
        """Detach the optimizer from its ranks and discard the gradients of an unfinished iteration. Not collective."""
        self._detached = why
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def require_plain(optimizer: torch.optim.Optimizer) -> None:
    """Reject a distributed optimizer.

    Raises:
        ConfigError: `optimizer` is a distributed optimizer.
    """
    if isinstance(optimizer, Distributed):
        name = type(optimizer._wrapped).__name__
        raise ConfigError(
            f"this {name} is a DistributedOptimizer already, and cannot be wrapped again: create a new "
            f"torch.optim.{name} of the model's parameters and wrap it"
        )


def derive(mixin: type[Mixin], optimizer: torch.optim.Optimizer) -> Mixin:
    """Return a copy of the optimizer whose class derives from `mixin` and from the optimizer's class."""
    base = type(optimizer)
    derived: Mixin = object.__new__(type(base.__name__, (mixin, base), {}))
    derived._wrapped = optimizer
    # Without `step`: a scheduler replaces `step` of the wrapped instance, which would hide the mixin's method.
    derived.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return derived


def _bare(base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an instance without state. The caller sets the state."""
    return object.__new__(base)


def _warn_of_copy(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Warn that a copy is a plain optimizer. Step pre-hook of copies."""
    if not isinstance(optimizer, Distributed):
        _warn_once(type(optimizer).__name__)


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning(
        "step() of a copy of a DistributedOptimizer, which is a plain %s, does not reduce gradients over ranks: wrap "
        "the copy, hvd.DistributedOptimizer(copy, …), to reduce them",
        name,
    )


_kept: list[weakref.ref[Distributed]] = []

WAITING = (
    "this DistributedOptimizer was created before hvd.elastic.run, and not all ranks have a corresponding one: a rank "
    "that has joined a running job can reduce gradients inside hvd.elastic.run only"
)

LEFT = (
    "this DistributedOptimizer belongs to a generation of ranks that has ended, and not all ranks of the current one "
    "have it: create it outside of the function that hvd.elastic.run repeats, or in each call of this function"
)


def keep(optimizer: Distributed, current: job.Job) -> None:
    """Attach a new optimizer to the ranks of the job. Collective, except before `elastic.run` in an elastic job.

    An optimizer that is created before `elastic.run` is attached by `elastic.run` or by its first step. So the loss of
    a rank before that does not raise an error on the other ranks.
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
    """Attach an optimizer that was created before `elastic.run` and is stepped outside of it. Collective in this case.

    Raises:
        NotInitializedError: the optimizer is not attached to ranks.
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
    """Detach all optimizers, because the generation ends. Not collective."""
    for optimizer in _alive():
        optimizer._detach(LEFT)


def detached() -> dict[str, Distributed]:
    """Return the optimizers that are not attached, oldest first, by a name that is equal on all ranks.

    Optimizers with equal signatures are numbered from the newest on, because older ones may be garbage on some ranks.
    """
    if any(optimizer._of_training for optimizer in _alive()):
        gc.collect()  # because the function has ended, and its optimizer may be in reference cycles
    waiting = [optimizer for optimizer in _alive() if optimizer._detached and not optimizer._closed]
    seen: Counter[str] = Counter()
    named = {}
    for optimizer in reversed(waiting):
        signature = optimizer._signature
        named[f"{signature}#{seen[signature]}"] = optimizer
        seen[signature] += 1
    return dict(reversed(named.items()))


def attach(current: job.Job, optimizers: dict[str, Distributed], names: Sequence[str]) -> None:
    """Attach the optimizers that all ranks have. Collective.

    Args:
        current: the job.
        optimizers: result of `detached`.
        names: names of the optimizers to attach, in the same order on all ranks.
    """
    for name in names:
        try:
            optimizers[name]._attach(current)
        except (ConfigError, NotImplementedError) as err:  # raised when the optimizer is used
            optimizers[name]._detached = str(err)
