"""Base class of distributed optimizers, and their attachment to the ranks of an elastic job.

In an elastic job, a *generation* is the time between two changes of the set of ranks. When it ends, all optimizers are
*detached* from its ranks. When the next generation begins, they are *attached* to the new ranks: they build their
reducers for these ranks.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from sirtaki.engine import job
from sirtaki.engine.job import Job
from sirtaki.errors import ConfigError, NotInitializedError

logger = logging.getLogger(__name__)

Mixin = TypeVar("Mixin", bound="Distributed")


class ReducedForScaler(NamedTuple):
    """Gradients that a `GradScaler` has reduced over the ranks.

    Attributes:
        scaler: the `GradScaler`.
        state: its state of the optimizer when it reduced them.
        gradients: `.grad` of each parameter after the reduction.
    """

    scaler: torch.amp.GradScaler
    state: dict[str, Any]
    gradients: Sequence[torch.Tensor | None]


class Distributed(torch.optim.Optimizer):
    """Base class of distributed optimizers.

    Attributes:
        _wrapped: the user's original optimizer, which a learning rate scheduler may still use.
        _detached: reason why the optimizer cannot reduce gradients over the ranks now. Empty if it can.
        _of_training: whether the optimizer was created inside the training function that `elastic.run` repeats.
        _closed: whether `close` was called.
        _reduced_for: gradients that a `GradScaler` has reduced since the last step. None if there are none.
    """

    _wrapped: torch.optim.Optimizer
    _detached = ""
    _of_training = False
    _closed = False
    _reduced_for: ReducedForScaler | None = None

    @property
    def _is_reduced(self) -> bool:
        """Return whether a `GradScaler` has already reduced the gradients of this iteration.

        An iteration ends with the optimizer's step, or with the scaler's `update()` if user code has skipped the step.
        `update()` is detected because it replaces the scaler's state of each optimizer.
        """
        if self._reduced_for is None:
            return False
        return self._reduced_for.scaler._per_optimizer_states.get(id(self)) is self._reduced_for.state

    @property
    def _signature(self) -> str:
        """Return a string that identifies the optimizer by its parameters and options.

        An optimizer has the same string on all ranks.
        """
        raise NotImplementedError

    def _attach(self, current: Job) -> None:
        """Attach the optimizer to the ranks of the job: build the objects that reduce gradients over these ranks.

        Collective over the optimizer's process set.

        Raises:
            ConfigError: the optimizer does not fit these ranks.
            NotImplementedError: Adasum does not support this number of ranks.
        """
        raise NotImplementedError

    def _reduce_for_scaler(self) -> bool:
        """Make infinite gradients of any rank visible on all ranks. Collective.

        `GradScaler` calls this before it unscales gradients and checks whether they are finite.

        Returns:
            True if this need not be repeated before the scaler's `update()`.
        """
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into this optimizer and into the wrapped one.

        A learning rate scheduler may still use the wrapped optimizer, so both share the loaded state.
        """
        super().load_state_dict(state_dict)
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state

    def __reduce__(self) -> tuple[Any, ...]:
        # Make a copied or unpickled optimizer a plain optimizer of the wrapped class, which does not reduce gradients
        # over ranks.
        return _bare, (type(self._wrapped),), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        memo[id(self)] = copied = _bare(type(self._wrapped))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if job.is_initialized() and job.current().size > 1:
            copied.register_step_pre_hook(_warn_of_copy)
        return copied

    def _detach(self, why: str) -> None:
        """Detach the optimizer from its ranks, which change.

        It reduces no gradients until it is attached to new ranks.

        Discard the gradients of an unfinished iteration. Not collective.

        Args:
            why: reason for the error message if the optimizer is used while it is detached.
        """
        self._detached = why
        if self._reduced_for is not None:
            # The scaler may have unscaled gradients that are dropped here. Reset it, so that it unscales the next
            # gradients, too.
            self._reduced_for.scaler._per_optimizer_states.pop(id(self), None)
            self._reduced_for = None
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
            f"the optimizer {name} is a DistributedOptimizer already and cannot be wrapped again; create a new "
            f"torch.optim.{name} of the model's parameters, and wrap this new optimizer"
        )


def derive(mixin: type[Mixin], optimizer: torch.optim.Optimizer) -> Mixin:
    """Return an optimizer that shares the state of `optimizer`.

    Its class derives from `mixin` and from the class of `optimizer`.
    """
    base = type(optimizer)
    derived: Mixin = object.__new__(type(base.__name__, (mixin, base), {}))
    derived._wrapped = optimizer
    # Do not copy the attribute `step`, which a scheduler has set on `optimizer`, because it would hide the mixin's
    # method.
    derived.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return derived


def _bare(base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Create an optimizer without calling its `__init__`. Used for unpickling, which sets the attributes afterwards."""
    return object.__new__(base)


def _warn_of_copy(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Warn that `step()` of a copied optimizer does not reduce gradients over ranks.

    Step pre-hook of each copy of a distributed optimizer.
    """
    if not isinstance(optimizer, Distributed):
        _warn_once(type(optimizer).__name__)


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning(
        "step() was called on a copy of a DistributedOptimizer, but the copy is a plain %s, which does not reduce "
        "gradients over ranks; to reduce them, wrap the copy in hvd.DistributedOptimizer",
        name,
    )


_kept: list[weakref.ref[Distributed]] = []

WAITING = (
    "this DistributedOptimizer was created before hvd.elastic.run, and not all ranks have created it yet: a rank that "
    "has joined a running job can reduce gradients only inside hvd.elastic.run"
)

LEFT = (
    "this DistributedOptimizer belongs to an earlier set of ranks of the elastic job, and not all current ranks have "
    "it: create it outside of the function that hvd.elastic.run repeats, or in each call of this function"
)


def keep(optimizer: Distributed, current: job.Job) -> None:
    """Register a new optimizer and attach it to the ranks of the job, so that it reduces gradients over them.

    Collective.

    Before `elastic.run` in an elastic job, this only registers the optimizer, and is not collective. `elastic.run` or
    the first step attaches it later, so that the loss of a rank before then raises no error on the other ranks.
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
    """Check that an optimizer is attached: it can reduce gradients over the job's current ranks.

    Called before it is used.

    Attach an optimizer that was created before `elastic.run` and is used outside of `elastic.run`. Only in this case,
    the call is collective.

    Raises:
        NotInitializedError: the optimizer is not attached, and cannot be attached now.
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
    """Detach all optimizers from the job's ranks, because the set of ranks changes: they reduce no gradients until they
    are attached to the new ranks.

    Not collective.
    """
    for optimizer in _alive():
        optimizer._detach(LEFT)


def detached() -> dict[str, Distributed]:
    """Return the optimizers that are not attached to the job's ranks, by a name that is equal on all ranks.

    Oldest first.

    The name consists of the optimizer's parameters and options, and of a number if several optimizers have the same.
    The newest optimizer gets number 0, because older ones may be garbage that only some ranks have collected.
    """
    if any(optimizer._of_training for optimizer in _alive()):
        gc.collect()  # Free optimizers that the ended training function has left in reference cycles.
    waiting = [optimizer for optimizer in _alive() if optimizer._detached and not optimizer._closed]
    seen: Counter[str] = Counter()
    named = {}
    for optimizer in reversed(waiting):
        signature = optimizer._signature
        named[f"{signature}#{seen[signature]}"] = optimizer
        seen[signature] += 1
    return dict(reversed(named.items()))


def attach(current: job.Job, optimizers: dict[str, Distributed], names: Sequence[str]) -> None:
    """Attach optimizers to the job's current ranks, so that they reduce gradients over these ranks. Collective.

    Args:
        current: the job, whose ranks the optimizers are attached to.
        optimizers: optimizers that are not attached, by name (result of `detached`).
        names: names of the optimizers to attach, in the same order on all ranks.
    """
    for name in names:
        try:
            optimizers[name]._attach(current)
        except (ConfigError, NotImplementedError) as err:
            # Store the error instead of raising it. It is raised when the optimizer is used.
            optimizers[name]._detached = str(err)
