"""`join()` for optimizers: a rank without data takes part in the others' iterations with zeros.

Scheduled iterations send no control messages, so a rank that has joined cannot be told that another one begins: it
takes part in the next one anyway. That one is complete when some rank trains on, or when all have joined; the votes
that are reduced along with the gradients tell which (`Synchroniser.finish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gradient_reducer import GradientReducer
    from .job import Job


def present_cycle(
    finished: Sequence[GradientReducer], all_reducers: Sequence[GradientReducer]
) -> list[GradientReducer]:
    """The optimizers in the order in which the other ranks will step them next.

    That is what has come since the last one was stepped the last time but one: a script with one optimizer repeats
    it, one that plays two against each other alternates, or repeats some pattern.
    """
    if not finished:
        return list(all_reducers)
    last, earlier = finished[-1], list(finished[:-1])
    for distance, reducer in enumerate(reversed(earlier)):
        if reducer is last:
            return list(finished[len(finished) - 1 - distance :])
    return list(finished)


def serve_until_all_joined(current: Job) -> None:
    """Collective: takes part in the others' iterations with zeros until every rank has called this."""
    cycle = present_cycle(tuple(current.finished), current.reducers)
    alive = bool(cycle)
    while alive:
        alive = False
        for reducer in cycle:  # all of them, whatever the first one says
            alive |= reducer.finish(joined=True)
    current.finished.clear()
