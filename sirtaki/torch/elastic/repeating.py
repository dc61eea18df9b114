"""`elastic.run`: repeats the training function when ranks have come or gone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

from sirtaki.engine import job
from sirtaki.errors import ConfigError, MismatchError

from .. import lasting_optimizers, process_sets
from ..basics import init_again, let_go
from ..exceptions import HorovodInternalError, HostsUpdatedInterrupt
from ..functions import allgather_object, broadcast_object
from . import checkpoints
from .checkpoints import Checkpoint, RandomState, Tree
from .state import ObjectState, Standing, State

_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What one rank brings.

    Attributes:
        has_state: it holds the job's state, of a generation before.
        restored: it has gone back to a commit.
        standing: which commits it holds.
        wants_sync: it does not know that all ranks have the same state.
        process_sets: by their ranks, those that are to be open.
        optimizers: by name, those that are to be attached.
    """

    has_state: bool
    restored: bool
    standing: Standing
    wants_sync: bool
    process_sets: tuple[tuple[int, ...], ...]
    optimizers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What follows for one rank from what all have brought.

    Attributes:
        back_to: number of the commit to go back to; None = it stays where it is.
        count_from: number of the next commit.
        out_of_step: the state is to be synchronised.
    """

    back_to: int | None
    count_from: int
    out_of_step: bool


def agreed(everybody: Sequence[Brought], mine: Brought) -> Settlement:
    """From where all go on.

    Args:
        everybody: what each has brought, by rank; all ranks have the same.
        mine: this rank's.
    """
    holders = [each for each in everybody if each.has_state]
    goes_back = mine.has_state and any(each.restored for each in holders)
    return Settlement(
        # Of two commits the one that has returned on some rank is held by all; the newer one may not be.
        back_to=max(each.standing.completed for each in holders) if goes_back else None,
        count_from=1 + max(each.standing.written for each in everybody),
        out_of_step=any(each.wants_sync for each in everybody) or len(holders) < len(everybody),
    )


def settle(state: State, *, restored: bool, wants_sync: bool) -> bool:
    """Collective: attaches what all ranks have, and goes back to the newest commit that all hold.

    Args:
        state: that of the script.
        restored: see `Brought`.
        wants_sync: see `Brought`.

    Returns:
        The state is to be synchronised.

    Raises:
        HorovodInternalError: a rank is lost.
    """
    current = job.current()
    elastic = current.elastic
    assert elastic is not None
    sets, optimizers = process_sets.lasting(), lasting_optimizers.detached()
    mine = Brought(
        has_state=elastic.has_state,
        restored=restored,
        standing=state._standing(),
        wants_sync=wants_sync,
        process_sets=tuple(sets),
        optimizers=tuple(optimizers),
    )
    everybody: list[Brought] = current.control.all_gather(mine)
    process_sets.open_again([sets[ranks] for ranks in _common([each.process_sets for each in everybody])])
    lasting_optimizers.attach(current, optimizers, _common([each.optimizers for each in everybody]))
    current.settled = True
    settlement = agreed(everybody, mine)
    if settlement.back_to is not None:
        if not restored:
            state.restore()
        state._go_back(settlement.back_to)
    state._count_from(settlement.count_from)
    return settlement.out_of_step


def share(state: State) -> None:
    """Collective: all ranks have rank 0's state, and know that all have.

    Raises:
        HorovodInternalError: a rank is lost.
    """
    current = job.current()
    assert current.elastic is not None
    if isinstance(state, ObjectState):
        resume(state, has_state=current.elastic.has_state)
    state.sync()
    current.control.barrier()
    state._complete([])
    current.elastic.has_state = True


def resume(state: ObjectState, *, has_state: bool) -> None:
    """Collective: goes on from the newest checkpoint that some host sees, if no rank has a state of this job.

    Args:
        state: takes it over.
        has_state: this rank has one.

    Raises:
        ConfigError: on all ranks, it is of another script, or names classes that this one lacks.
    """
    kept = checkpoints.of_this_process()
    if kept is None:
        return
    looks = not has_state and job.current().control.local_rank == 0
    found: Checkpoint | None = kept.folder.newest() if looks else None
    found_by = allgather_object((has_state, -1 if found is None else found.number))
    newest = max(number for _, number in found_by)
    if newest < 0 or any(there for there, _ in found_by):
        return
    holder = found_by.index((False, newest))
    mine = found is not None and job.current().rank == holder
    tree, problem = broadcast_object(_loaded(found) if mine and found is not None else None, holder)
    if problem:
        raise ConfigError(problem)
    try:
        state._load(tree)
    except Exception as err:
        raise ConfigError(
            f"the checkpoint in {kept.folder.path} does not fit this script ({err}): is it another one's? Give "
            "each job a SIRTAKI_CHECKPOINT_DIR of its own, or remove what lies there to begin anew"
        ) from err
    generators = tree.get(checkpoints.GENERATORS, [])
    if len(generators) == job.current().size and generators[job.current().rank] is not None:
        RandomState(**generators[job.current().rank]).put_back()
    state._count_from(newest + 1)
    if job.current().rank == 0:
        logger.info("going on from the checkpoint of commit %d in %s", newest, kept.folder.path)


def _loaded(checkpoint: Checkpoint) -> tuple[Tree | None, str]:
    """What was written, or why that cannot be loaded and what to do; for all ranks, of which one reads."""
    if checkpoint.version > checkpoints.VERSION:
        return None, (
            f"the checkpoint {checkpoint.path} has format {checkpoint.version}, and this release reads formats up to "
            f"{checkpoints.VERSION}: go on with the release that wrote it, or name another SIRTAKI_CHECKPOINT_DIR"
        )
    try:
        return checkpoint.load(), ""
    except Exception as err:  # whatever unpickling somebody's classes raises
        return None, (
            f"the checkpoint {checkpoint.path} cannot be loaded ({type(err).__name__}: {err}). Its file is whole, so "
            "the script has changed since it was written: bring back what is missing, or move the checkpoint away to "
            "begin with the one before it"
        )


def _common(lists: Sequence[Sequence[_Name]]) -> list[_Name]:
    """What stands in all of them, in the order of the first."""
    everywhere = reduce(set.intersection, map(set, lists))
    return [each for each in lists[0] if each in everywhere]


logger = logging.getLogger(__name__)

Training = Callable[..., Any]  # of the state and whatever else the script gives


def run(func: Training) -> Training:
    """Decorates `func(state, …)`: the state is synchronised before each call, and restored before a repeated one.

    Where ranks come and go, `func` is called again by all that are there when a rank is lost (from the last commit) and
    when hosts have come or gone (from where it is); new ranks take the state of those that were there.

    Where ranks stay, it is called again after a disagreement between ranks, which all of them survive; other failures
    of communication mean that a rank is lost, and end the job.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """Like `run`, with a function that is called before each repetition."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        train = functools.partial(func, state, *args, **kwargs)
        repeat = _on_ranks_that_stay if job.current().elastic is None else _on_ranks_that_come_and_go
        return repeat(train, state, reset)

    return wrapper


def _on_ranks_that_stay(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    skip_sync = False
    if isinstance(state, ObjectState):
        resume(state, has_state=False)
    while True:
        if not skip_sync:
            state.sync()
        try:
            return train()
        except MismatchError as err:
            logger.warning("%s; going back to the last commit", err)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        reset()
        state.on_reset()


def _on_ranks_that_come_and_go(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    repeated, restored, wants_sync = False, False, True
    while True:
        try:
            if not job.is_initialized():
                init_again()
            out_of_step = settle(state, restored=restored, wants_sync=wants_sync)
            if repeated:
                settled_in = job.current()
                reset()
                if job.current() is not settled_in:  # which it has ended, and begun another
                    out_of_step = settle(state, restored=False, wants_sync=out_of_step)
                state.on_reset()
            if out_of_step:
                share(state)
            restored = False
            return _call(train)
        except HostsUpdatedInterrupt as interrupt:
            logger.info("hosts have come or gone")
            wants_sync = not interrupt.skip_sync
            _part(together=True)
        except HorovodInternalError as err:
            logger.info("%s; going back to the last commit", err)
            if job.is_initialized():
                job.current().give_up(f"rank {job.current().rank} has given up: {err}")
            state.restore()
            restored = wants_sync = True
            _part(reason=str(err))
        repeated = True


def _call(train: Callable[[], Any]) -> Any:
    current = job.current()
    current.training = True
    try:
        return train()
    finally:
        current.training = False


def _part(*, together: bool = False, reason: str = "") -> None:
    """Ends this rank's generation, see `job.leave`; what the script holds of it belongs to no ranks until the next."""
    job.leave(together=together, reason=reason)
    let_go()
