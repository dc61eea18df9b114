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
from typing import NamedTuple

from sirtaki.comm.collectives.rank_sets import RankSets
from sirtaki.comm.control.courier import Courier, Tag

from .joining import Joining
from .participants import Key, Participant, Participants, Reached, Stage

TELL_S = 0.05
"""A wait longer than this is told if gradients have come of an iteration that is not complete on this rank."""

TELL_ANYWAY_S = 1.0
"""The same if no such gradients have come; on a rank that has been needed elsewhere once, it is as soon as above."""


class _Operation(NamedTuple):
    """An eager operation, of which `concluded` others came before it or are under way."""

    process_set: int
    name: str
    concluded: int


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

    def __init__(self, participants: Participants, rank_sets: RankSets, courier: Courier, joining: Joining) -> None:
        self._participants, self._rank_sets, self._courier, self._joining = participants, rank_sets, courier, joining
        self._lock = threading.Lock()
        self._told: _Blocked | None = None
        self._others: dict[int, _Blocked | None] = {}
        self._tell_anyway_s = TELL_ANYWAY_S

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

    def need(self, participant: Participant) -> bool:
        """Whether this rank must not go on waiting for the current iteration of this optimizer to be reduced.

        That is so if some rank waits for this one in a place where it has not been yet, and some rank that waits has
        not got all its gradients of the iteration; or some rank has joined, which gives zeros to the iteration once all
        others have come to it.
        """
        with self._lock:
            self._read()
            others = [blocked for blocked in self._others.values() if blocked is not None]
        is_incomplete = self._joining.somebody or any(
            blocked.given.get(participant.key, math.inf) <= participant.progress.finished for blocked in others
        )
        if not (is_incomplete and any(self._is_missing(blocked.waits_for, participant) for blocked in others)):
            return False
        self._tell_anyway_s = TELL_S  # a script in which ranks wait for each other goes on doing so
        return True

    def _read(self) -> None:
        self._others |= dict(self._courier.receive(Tag.BLOCKED))

    def _look(self) -> _Blocked | None:
        """What this rank waits for, if that has lasted."""
        now_s = time.monotonic()
        participants = list(self._participants)
        waits: list[tuple[float, _Operation | _Iteration]] = [
            (waiting[1], _Iteration(participant.key, (participant.progress.finished, waiting[0])))
            for participant in participants
            if (waiting := participant.progress.waiting) is not None
        ]
        if not waits:  # participants perform operations of their own
            waits = [
                (awaited[1], _Operation(number, awaited[0], engine.concluded))
                for number, engine in self._rank_sets.engines()
                if (awaited := engine.awaited) is not None
            ]
        since_s, waits_for = min(waits, key=lambda wait: wait[0], default=(now_s, None))
        if waits_for is None or now_s - since_s < TELL_S:
            return None
        given = {participant.key: participant.given for participant in participants}
        asks = isinstance(waits_for, _Iteration) and waits_for.reached[1] is Stage.ASK
        if (
            now_s - since_s < self._tell_anyway_s
            and not asks
            and not any(
                participant.pending and given[participant.key] == participant.progress.finished
                for participant in participants
            )
        ):
            return None
        return _Blocked(waits_for, given)

    def _is_missing(self, waited_for: _Operation | _Iteration, participant: Participant) -> bool:
        """Whether this rank, which waits for an iteration of `participant`, has not come to what another waits for."""
        if isinstance(waited_for, _Operation):
            if waited_for.process_set not in self._rank_sets:
                return False
            engine = self._rank_sets[waited_for.process_set].engine
            return (
                engine is not None
                and engine.concluded == waited_for.concluded
                and not engine.has_submitted(waited_for.name)
            )
        iteration, stage = waited_for.reached
        return any(
            (each.given if stage is Stage.REDUCE else each.progress.finished) <= iteration
            for each in self._participants
            if each.key == waited_for.key and (each is not participant or stage is Stage.ASK)
        )
