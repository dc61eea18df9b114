"""Which reducers take part in an iteration: sharing of parameters, `join`, and ranks that wait for each other."""

from __future__ import annotations

import gc
import math
import queue
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol

import torch

from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.collectives.engine import GLOBAL, RankSets
from sirtaki.comm.control.waiting import Poll, wait_for
from sirtaki.comm.control.watchdog import Courier, Tag, Watchdog
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.errors import CommError
from sirtaki.machine import free_in_forked_children

Key = tuple[int, int]
"""A participant: the number of its process set, and its own there; the same on all ranks of the set."""


class Stage(IntEnum):
    """How far a rank has got in an iteration."""

    ASK = 0
    """It asks whether any rank has gradients of parameters that several optimizers have."""
    REDUCE = 1
    """All its gradients are there, and it waits until they are reduced."""
    FINISH = 2
    """It ends the iteration."""


Reached = tuple[int, Stage]
"""An iteration, counted since the participant was made, and how far a rank has got in it."""


class Progress:
    """How far this rank is in the iterations of one participant; any thread may read it.

    Attributes:
        finished: iterations that have ended, whatever became of the parameters since.
        waiting: what this rank waits for in the current iteration, and since when (`time.monotonic()`).
    """

    def __init__(self) -> None:
        self.finished = 0
        self.waiting: tuple[Stage, float] | None = None

    @contextmanager
    def waits(self, stage: Stage) -> Iterator[None]:
        """Inside, this rank waits for others; the watchdog and the other ranks hear of it if that lasts."""
        self.waiting = stage, time.monotonic()
        try:
            yield
        finally:
            self.waiting = None

    def given(self, *, missing: bool) -> int:
        """Iterations to which this rank has given all its gradients; `missing`: some of the current one's."""
        waiting = self.waiting
        return self.finished + (not missing or (waiting is not None and waiting[0] is not Stage.ASK))


class Tuning(Protocol):
    """Tuning of the gradients of a participant.

    Attributes:
        knobs: the current setting.
        tuning: True while settings are tried.
    """

    knobs: Knobs
    tuning: bool

    def remember(self) -> None:
        """Store what an unfinished warm-up has found. Idempotent."""


class Participant(Protocol):
    """One that takes part in iterations with other ranks.

    Attributes:
        key: the same on all its ranks.
        ranks: those that take part, by their rank among all.
        progress: how far this rank is in them.
    """

    key: Key
    ranks: tuple[int, ...]
    progress: Progress

    @property
    def failed_in(self) -> int | None:
        """The backward pass that has raised in this iteration, by `Participants.n_begun`; None = none has."""

    @property
    def given(self) -> int:
        """Iterations to which this rank has given all its gradients."""

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""

    @property
    def pipeline(self) -> GradientPipeline | None:
        """Reduction of its dense gradients; None where nothing is reduced. Any thread."""

    @property
    def tuning(self) -> Tuning | None:
        """Tuning of its dense gradients; None where nothing is reduced. Any thread."""

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that the other ranks have not begun to end."""

    def finish(self, *, joined: bool = False) -> None:
        """Collective: ends an iteration; `joined`: with zeros, since this rank has no data any more."""

    def settle(self) -> None:
        """Blocks until no end of an iteration is put off any more; not collective."""

    def flush(self) -> None:
        """Sends what has not left if all gradients of this iteration have come; waits for nobody."""

    def drop_failed(self) -> None:
        """Collective if a backward pass has raised in this iteration: ends it, and leaves gradients as they are."""

    def drop_accumulated(self) -> None:
        """Gradients of fewer backward passes than are added up before they are reduced do not count."""

    def close(self, reason: str) -> None:
        """Not collective: gradients are not reduced any more, because of `reason`. Idempotent."""


def _is_busy(participant: Participant) -> bool:
    """Return whether a device is still working on iterations that have ended on the host. Thread-safe."""
    return participant.pipeline is not None and participant.pipeline.in_flight.busy


class Participants:
    """Those of one job that are in use or not collected yet, the oldest first: they live as long as users keep them.

    Attributes:
        n_begun: how often a participant's first gradient of a backward pass has come on this rank. It is the same for
            all that fail in one pass, and another in the next.
        last_finished: of which this rank has ended an iteration last.
    """

    def __init__(self) -> None:
        self.n_begun = 0
        self.last_finished: weakref.ref[Participant] | None = None
        self._all: list[weakref.ref[Participant]] = []

    def __iter__(self) -> Iterator[Participant]:
        for reference in self._all:
            if (participant := reference()) is not None:
                yield participant

    def add(self, participant: Participant) -> None:
        """Keeps a weak reference to it."""
        self._all = [weakref.ref(there) for there in (*self, participant)]

    def remove(self, participant: Participant) -> None:
        """It is closed."""
        self._all = [weakref.ref(there) for there in self if there is not participant]

    def drop_failed(self, number: int) -> None:
        """Collective after a backward pass that raised: what it has left is dropped, in the same order on all ranks.

        Not what another pass has left: the other ranks may have no more of whom that is, or not go on with it yet.

        Args:
            number: of the pass, see `Participant.failed_in`.
        """
        if sum(participant.failed_in == number for participant in self) > 1:
            gc.collect()  # other ranks may have collected what this one's script has dropped, too
        for participant in sorted(self, key=lambda participant: participant.key):
            if participant.failed_in == number:
                participant.drop_failed()

    def settle(self) -> None:
        """Blocks until no end of an iteration is put off any more; not collective."""
        for participant in self:
            participant.settle()

    @property
    def in_use(self) -> list[Participant]:
        """The newest one, and the one that was stepped last."""
        last = None if self.last_finished is None else self.last_finished()
        return [*list(self)[-1:], *([] if last is None else [last])]


SHORTEST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 2e-3
PAUSE = 0.05
"""A joined rank looks for messages again after this part of the time since the last one."""


@dataclass(slots=True)
class _TakingPart:
    """What this rank takes part in with one optimizer of these ranks, and which joined ranks know of it.

    `ended`: on the host; a device may still wait there for a rank that has joined meanwhile.
    """

    key: Key
    ranks: tuple[int, ...]
    reached: Reached
    told: set[int] = field(default_factory=set)
    ended: bool = False


class Joining:
    """Who has joined, what the others tell them, and what they do then."""

    def __init__(self, participants: Participants, rank_sets: RankSets, courier: Courier, watchdog: Watchdog) -> None:
        self._participants, self._rank_sets = participants, rank_sets
        self._courier, self._watchdog = courier, watchdog
        self._lock = free_in_forked_children(threading.Lock())
        self._round = 0  # of all ranks joining
        self._joined: dict[int, int] = {}  # rank → the round in which it has joined
        self._taking_part: list[_TakingPart] = []  # in the order in which it has begun
        self._finished: Counter[int] = Counter()  # iterations by process set

    # ── a rank that trains ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def somebody(self) -> bool:
        """A rank has joined; the others all know it once an iteration has ended in which that one took part."""
        return any(number >= self._round for number in self._joined.values())

    def begins(self, participant: Participant, stage: Stage) -> None:
        """This rank takes part in an iteration of this optimizer; those that have joined are told.

        Looks for no messages: that nobody has joined is the usual case, and while this rank waits, it does look.
        """
        reached = participant.progress.finished, stage
        if stage is Stage.FINISH:
            self._participants.last_finished = weakref.ref(participant)
        with self._lock:
            for mine in self._taking_part:
                if mine.key == participant.key and not mine.ended:
                    mine.reached = reached
                    mine.told.clear()
                    break
            else:
                self._taking_part.append(_TakingPart(participant.key, participant.ranks, reached))
            if self._joined:
                self._tell()

    def ends(self, participant: Participant) -> None:
        """An iteration of this optimizer has ended, whether or not this rank has joined."""
        self._finished[participant.key[0]] += 1
        with self._lock:
            for mine in self._taking_part.copy():
                if mine.key == participant.key:
                    mine.ended = True
                if mine.ended and not _is_busy(participant):
                    self._taking_part.remove(mine)

    def forget(self, key: Key) -> None:
        """Its iteration has ended, or it is dropped with what was begun. Any thread, at any time: takes no lock."""
        for mine in self._taking_part:
            if mine.key == key:
                mine.ended = True

    def _forget_ended(self) -> None:
        """What has ended on the device, too: the others may drop that optimizer."""
        busy = {participant.key for participant in self._participants if _is_busy(participant)}
        self._taking_part = [mine for mine in self._taking_part if not mine.ended or mine.key in busy]

    def attend(self) -> None:
        """Tells those that have joined meanwhile; for any thread, now and then while this rank waits."""
        if self._lock.acquire(blocking=False):
            try:
                self._tell()
            finally:
                self._lock.release()

    def _tell(self) -> None:
        self._joined |= dict(self._courier.receive(Tag.JOINED))
        self._forget_ended()
        for mine in self._taking_part:
            for rank in mine.ranks:
                if self._joined.get(rank) == self._round and rank not in mine.told:
                    mine.told.add(rank)
                    self._courier.send(rank, Tag.ITERATION, (mine.key, mine.reached))

    # ── a rank that has joined ───────────────────────────────────────────────────────────────────────────────────

    def join(self) -> int:
        """Collective: takes part in the others' iterations with zeros until all ranks have joined.

        Returns:
            The rank that joined last.

        Raises:
            CommError: the job failed, or an optimizer that others step is gone here.
        """
        engine = self._rank_sets[GLOBAL].engine
        assert engine is not None
        self._participants.settle()
        failures = self._watchdog.failures
        wait_for(lambda: not any(_is_busy(participant) for participant in self._participants), failures=failures)
        all_have_joined = engine.join((self._finished[GLOBAL], self._finished.total()))
        with self._lock:
            self._taking_part.clear()
        self._courier.send_all(Tag.JOINED, self._round)
        substitute = _Substitute(self._participants, self._courier, self._watchdog)
        joined = {self._courier.rank}
        try:
            moved_s = time.monotonic()
            # Whoever has joined has sent before that what he took part in.
            while not all_have_joined.wait(_pause_s(moved_s)) or len(joined) < self._courier.size:
                self._watchdog.failures.check()
                with self._lock:
                    self._joined |= dict(self._courier.receive(Tag.JOINED))
                    joined |= {rank for rank, number in self._joined.items() if number >= self._round}
                if substitute.look(joined):
                    moved_s = time.monotonic()
                    engine.pending.moved_s = time.monotonic()
        finally:
            substitute.close()
        substitute.wait()
        for participant in self._participants:
            participant.drop_accumulated()
        with self._lock:
            self._round += 1
            self._joined = {rank: number for rank, number in self._joined.items() if number >= self._round}
        engine.finish(all_have_joined)
        return engine.rounds.last_joined


def _pause_s(moved_s: float) -> float:
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, PAUSE * (time.monotonic() - moved_s)))


class _Substitute:
    """Does in the others' iterations what this rank would do if it had data, but with zeros.

    Iterations of one process set come in one order for all its members; those of different sets do not, so each set has
    a thread.
    """

    def __init__(self, participants: Participants, courier: Courier, watchdog: Watchdog) -> None:
        self._participants, self._courier, self._watchdog = participants, courier, watchdog
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's
        self._reached: defaultdict[Key, dict[int, Reached]] = defaultdict(dict)  # by rank
        self._announced: list[tuple[Key, Reached]] = []  # and not all ranks have reached it
        self._begun: dict[Key, Reached] = {}
        self._tasks: dict[int, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def look(self, joined: set[int]) -> bool:
        """Reads what others have said, and takes part where all are that have data; True if there was any news.

        Args:
            joined: all ranks that are known to have joined.

        Raises:
            CommError: an iteration failed.
        """
        if self._error is not None:
            raise self._error
        news = self._courier.receive(Tag.ITERATION)
        for rank, (key, reached) in news:
            self._reached[key][rank] = reached
            if (key, reached) not in self._announced:
                self._announced.append((key, reached))
        for announced in list(self._announced):  # in the order in which devices wait for it
            key, (number, stage) = announced
            participant, by_rank = self._participant(key), self._reached[key]
            training = [rank for rank in participant.ranks if rank not in joined]
            if not training:
                self._catch_up(participant, (number if stage is Stage.FINISH else number - 1, Stage.FINISH))
            elif all(rank in by_rank and by_rank[rank] >= announced[1] for rank in training):
                self._catch_up(participant, announced[1])
            else:
                continue
            self._announced.remove(announced)
        return bool(news)

    def _catch_up(self, participant: Participant, target: Reached) -> None:
        """Begins all that lies between what was begun and `target`: the others need not wait for each end."""
        iteration, stage = self._begun.get(participant.key, (participant.progress.finished - 1, Stage.FINISH))
        while (iteration, stage) < target:
            if stage is Stage.REDUCE:
                stage = Stage.FINISH
            else:
                iteration += 1
                stage = target[1] if iteration == target[0] else Stage.FINISH
            self._begun[participant.key] = iteration, stage
            self._do(participant, stage)

    def _participant(self, key: Key) -> Participant:
        for participant in self._participants:
            if participant.key == key:
                return participant
        error = CommError(
            f"rank {self._courier.rank} has joined, and other ranks step an optimizer that is gone there: keep "
            "DistributedOptimizers until join() has returned"
        )
        self._watchdog.fail(error)
        raise error

    def _do(self, participant: Participant, stage: Stage) -> None:
        number = participant.key[0]
        if number not in self._tasks:
            tasks = self._tasks[number] = queue.SimpleQueue()
            name = f"sirtaki-join-{number}"
            self._threads.append(threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True))
            self._threads[-1].start()
        zeros = stage is Stage.REDUCE
        self._tasks[number].put(participant.contribute_zeros if zeros else partial(participant.finish, joined=True))

    def _work(self, tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while (task := tasks.get()) is not None:
            try:
                task()
            except BaseException as err:  # whatever it is, the main thread raises it
                self._error = err
                return

    def close(self) -> None:
        """Nothing more will be done; what was begun goes on."""
        for tasks in self._tasks.values():
            tasks.put(None)

    def wait(self) -> None:
        """Blocks until what was begun is done.

        Raises:
            CommError: an iteration failed.
        """
        failures = self._watchdog.failures
        wait_for(lambda: not any(thread.is_alive() for thread in self._threads), poll=Poll.SLICES, failures=failures)
        if self._error is not None:
            raise self._error


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
        self._lock = free_in_forked_children(threading.Lock())
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
                (awaited[1], _Operation(number, awaited[0], engine.rounds.concluded))
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
                and engine.rounds.concluded == waited_for.concluded
                and waited_for.name not in engine.pending
            )
        iteration, stage = waited_for.reached
        return any(
            (each.given if stage is Stage.REDUCE else each.progress.finished) <= iteration
            for each in self._participants
            if each.key == waited_for.key and (each is not participant or stage is Stage.ASK)
        )
