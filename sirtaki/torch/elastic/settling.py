"""The ranks of a new generation find out what each of them has brought, and go on from one state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from sirtaki.engine import job

from .. import lasting_optimizers, process_sets
from .checkpoints import resume
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


def _common(lists: Sequence[Sequence[_Name]]) -> list[_Name]:
    """What stands in all of them, in the order of the first."""
    everywhere = reduce(set.intersection, map(set, lists))
    return [each for each in lists[0] if each in everywhere]
