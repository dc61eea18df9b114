"""Distributed optimizers of a job whose ranks come and go: each generation attaches them to its own ranks."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence

from sirtaki.engine import job
from sirtaki.errors import ConfigError, NotInitializedError

from .derived_class import Distributed

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
