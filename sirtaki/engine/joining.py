"""`join()` for optimizers: a rank without data takes part in the others' iterations with zeros.

Scheduled iterations send no control messages, so a rank that has joined tells the others, once, and from then on each
of them tells it what it takes part in: which iteration of which optimizer. The joined rank takes part in an iteration
when all members of the optimizer's process set that train have said so: then none of them does anything else first, and
no pattern in which optimizers are stepped needs to be known.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sirtaki.comm.collectives.rank_sets import GLOBAL, RankSets
from sirtaki.comm.control.courier import Courier, Tag
from sirtaki.comm.control.watchdog import Watchdog
from sirtaki.errors import CommError

from .participants import Key, Participant, Participants, Reached, Stage

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
        self._lock = threading.Lock()
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
        with self._lock:
            mine = self._current(participant.key)
            if mine is None:
                self._taking_part.append(_TakingPart(participant.key, participant.ranks, reached))
            else:
                mine.reached = reached
                mine.told.clear()
            if self._joined:
                self._tell()

    def _current(self, key: Key) -> _TakingPart | None:
        """The iteration of this optimizer that has not ended."""
        for mine in self._taking_part:
            if mine.key == key and not mine.ended:
                return mine
        return None

    def ends(self, participant: Participant) -> None:
        """An iteration of this optimizer has ended, whether or not this rank has joined."""
        self._finished[participant.key[0]] += 1
        with self._lock:
            mine = self._current(participant.key)
            if mine is not None:
                mine.ended = True
            self._let_go()

    def forget(self, key: Key) -> None:
        """This optimizer is dropped; what was begun is not ended. Any thread, at any time: takes no lock."""
        for mine in self._taking_part:
            if mine.key == key:
                mine.ended = True

    def _let_go(self) -> None:
        """What has ended on the device, too: the others may drop that optimizer."""
        if any(mine.ended for mine in self._taking_part):
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
        self._let_go()
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
        while any(map(_is_busy, self._participants)):  # may wait for one that has joined
            self._watchdog.failures.check()
            self.attend()
            time.sleep(SHORTEST_PAUSE_S)
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
                    engine.note_progress()
        finally:
            substitute.close()
        substitute.wait()
        for participant in self._participants:
            participant.drop_accumulated()
        with self._lock:
            self._round += 1
            self._joined = {rank: number for rank, number in self._joined.items() if number >= self._round}
        engine.finish(all_have_joined)
        return engine.last_joined


def _is_busy(participant: Participant) -> bool:
    """A device is not done with iterations that have ended on the host."""
    return (in_flight := participant.in_flight) is not None and in_flight.busy


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
        self._tasks[number].put(participant.contribute_zeros if stage is Stage.REDUCE else participant.finish_joined)

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
        for thread in self._threads:
            while thread.is_alive():
                self._watchdog.failures.check()
                thread.join(0.01)
        if self._error is not None:
            raise self._error
