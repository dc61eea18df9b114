"""Who waits for whom: a rank that waits at the end of its backward pass learns that it is needed elsewhere.

Ranks may do different things between two steps: one waits for the reduction of gradients that another one has not got
yet, because that one waits in an operation that the first one comes to later. A rank that has waited for a while tells
the others what for, and to which iterations it has not given all its gradients yet.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sirtaki.comm.control.courier import Tag

from .joining import Key, Reached, Stage

if TYPE_CHECKING:
    from .gradient_reducer import GradientReducer
    from .job import Job

TELL_S = 0.05
"""A wait longer than this is told if gradients have come of an iteration that is not complete on this rank."""

TELL_ANYWAY_S = 1.0
"""The same if no such gradients have come."""


class _Operation(NamedTuple):
    """An eager operation, of which `settled` others came before it or are under way."""

    process_set: int
    name: str
    settled: int


class _Iteration(NamedTuple):
    """An iteration of an optimizer, and what is waited for in it."""

    key: Key
    reached: Reached


@dataclass(frozen=True, slots=True)
class _Blocked:
    """What one rank says of itself; picklable.

    Attributes:
        waits_for: the other ranks' part in this.
        given: of each optimizer, the iterations to which this rank has given all its gradients.
    """

    waits_for: _Operation | _Iteration
    given: dict[Key, int]


class BlockedRanks:
    """What this rank tells the others of its waits, and what they have told."""

    def __init__(self, job: Job) -> None:
        self._job, self._courier = job, job.courier
        self._lock = threading.Lock()
        self._told: _Blocked | None = None
        self._others: dict[int, _Blocked | None] = {}

    def attend(self) -> None:
        """Tells what has changed; for any thread, now and then while this rank waits."""
        if self._lock.acquire(blocking=False):
            try:
                self._read()
                blocked = self._look()
                if blocked != self._told:
                    self._told = blocked
                    self._courier.send_all(Tag.BLOCKED, blocked)
            finally:
                self._lock.release()

    def need(self, reducer: GradientReducer) -> bool:
        """Whether this rank must not go on waiting for the present iteration of this optimizer to be reduced.

        That is so if some rank waits for this one in a place where it has not been yet, and some rank that waits has
        not got all its gradients of the iteration.
        """
        with self._lock:
            self._read()
            others = [blocked for blocked in self._others.values() if blocked is not None]
        return any(blocked.given.get(reducer.key, math.inf) <= reducer.finished for blocked in others) and any(
            self._is_missing(blocked.waits_for, reducer) for blocked in others
        )

    def _read(self) -> None:
        self._others |= dict(self._courier.receive(Tag.BLOCKED))

    def _look(self) -> _Blocked | None:
        """What this rank waits for, if that has lasted."""
        now_s = time.monotonic()
        reducers = self._job.reducers
        waits: list[tuple[float, _Operation | _Iteration]] = [
            (since_s, _Iteration(reducer.key, (reducer.finished, stage)))
            for reducer in reducers
            if reducer.waiting is not None
            for stage, since_s in [reducer.waiting]
        ]
        if not waits:  # reducers perform operations of their own
            waits = [
                (engine.awaited[1], _Operation(number, engine.awaited[0], engine.settled))
                for number, engine in self._job.rank_sets.engines()
                if engine.awaited is not None
            ]
        since_s, waits_for = min(waits, key=lambda wait: wait[0], default=(now_s, None))
        if waits_for is None or now_s - since_s < TELL_S:
            return None
        given = {reducer.key: reducer.given for reducer in reducers}
        asks = isinstance(waits_for, _Iteration) and waits_for.reached[1] is Stage.ASK
        if (
            now_s - since_s < TELL_ANYWAY_S
            and not asks
            and not any(reducer.pending and given[reducer.key] == reducer.finished for reducer in reducers)
        ):
            return None
        return _Blocked(waits_for, given)

    def _is_missing(self, waited_for: _Operation | _Iteration, reducer: GradientReducer) -> bool:
        """Whether this rank, which waits for an iteration of `reducer`, has not come to what another waits for."""
        if isinstance(waited_for, _Operation):
            if waited_for.process_set not in self._job.rank_sets:
                return False
            engine = self._job.rank_sets[waited_for.process_set].engine
            return (
                engine is not None
                and engine.settled == waited_for.settled
                and not engine.has_submitted(waited_for.name)
            )
        iteration, stage = waited_for.reached
        return any(
            (each.given if stage is Stage.REDUCE else each.finished) <= iteration
            for each in self._job.reducers
            if each.key == waited_for.key and (each is not reducer or stage is Stage.ASK)
        )
