"""The gradient reducers of a job (one per distributed optimizer or DDP model), `join()`, and detection of deadlocks."""

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
from sirtaki.comm.control.waiting import Poll, start_thread, wait_for
from sirtaki.comm.control.watchdog import MessageBoard, Tag, Watchdog
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.sparse.on_gpu import GpuRows
from sirtaki.errors import CommError
from sirtaki.machine import free_in_forked_children

Key = tuple[int, int]
"""Id of a gradient reducer: the number of its process set (subset of ranks), and its serial number there. The id is
equal on all ranks of the set.
"""


class WaitStage(IntEnum):
    """Stages of one iteration of a gradient reducer, in which a rank may wait for other ranks."""

    ASK = 0
    """Ranks ask each other whether any of them has gradients of parameters that several optimizers share."""
    REDUCE = 1
    """All gradients of the rank are ready, and the rank waits until they are reduced."""
    FINISH = 2
    """The rank ends the iteration."""


Reached = tuple[int, WaitStage]
"""Progress of a rank with a gradient reducer: number of the iteration since the reducer's creation, and the stage
within it."""


class IterationCounter:
    """Counts the iterations of one gradient reducer on this rank. Any thread may read the counts.

    Attributes:
        finished: number of completed iterations, including failed ones.
        waiting: stage in which this rank waits, and time when the wait began (`time.monotonic()`). None if the rank
            does not wait.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.waiting: tuple[WaitStage, float] | None = None

    @contextmanager
    def waits(self, stage: WaitStage) -> Iterator[None]:
        """Mark this rank as waiting in `stage` of the iteration while the `with` body runs.

        Long waits are reported to all ranks.
        """
        self.waiting = stage, time.monotonic()
        try:
            yield
        finally:
            self.waiting = None

    def given(self, *, missing: bool) -> int:
        """Return the number of iterations to which this rank has contributed all its gradients.

        Args:
            missing: True if some gradients of the current iteration are not ready.
        """
        waiting = self.waiting
        return self.finished + (not missing or (waiting is not None and waiting[0] is not WaitStage.ASK))


class Tuning(Protocol):
    """Tuning of the gradient communication of one distributed optimizer or DDP model.

    Attributes:
        knobs: setting (such as unit, or bucket, size) that is in use now.
        tuning: True while settings are tried.
    """

    knobs: Knobs
    tuning: bool

    def remember(self) -> None:
        """Store the measured settings of an unfinished warm-up, so that a later job can continue from them.

        Idempotent.
        """


class ActiveReducer(Protocol):
    """A gradient reducer: reduces the gradients of one optimizer or model. Each of its iterations ends collectively.

    Attributes:
        key: id of the reducer, equal on all ranks that use it.
        ranks: ranks that use the reducer, as ranks of the whole job.
        progress: counter of the iterations that this rank has completed.
    """

    key: Key
    ranks: tuple[int, ...]
    progress: IterationCounter

    @property
    def failed_in(self) -> int | None:
        """Return the number (see `ActiveReducers.n_begun`) of the backward pass that raised an error in this iteration.

        None if no backward pass raised one.
        """

    @property
    def given(self) -> int:
        """Return the number of iterations to which this rank has contributed all its gradients."""

    @property
    def pending(self) -> bool:
        """Return whether gradients are being reduced."""

    @property
    def pipeline(self) -> GradientPipeline | None:
        """Return the pipeline that reduces the dense gradients. None if there are no dense gradients. Thread-safe."""

    @property
    def gpu_rows(self) -> GpuRows | None:
        """Return the object that reduces the sparse gradients over NCCL. None if NCCL reduces none. Thread-safe."""

    @property
    def tuning(self) -> Tuning | None:
        """Return the tuning of dense gradients. None if there are no dense gradients. Thread-safe."""

    def contribute_zeros(self) -> None:
        """Contribute zeros to the current iteration of the ranks that still train, before they end it. Called on ranks
        in `join()`.
        """

    def finish(self, *, joined: bool = False) -> None:
        """End the current iteration: wait until its gradients are reduced. Collective.

        Args:
            joined: True if this rank has called `join()`, and so contributes zeros instead of gradients.
        """

    def drain(self) -> None:
        """Wait until deferred updates of earlier iterations are complete. Not collective."""

    def flush(self) -> None:
        """Launch the remaining units (buckets) if all gradients of this iteration are ready. Non-blocking."""

    def drop_failed(self) -> None:
        """If a backward pass failed in this iteration, end the iteration without changing `.grad`. Collective in this
        case.
        """

    def drop_accumulated(self) -> None:
        """Discard gradients of an incomplete accumulation: fewer passes than `backward_passes_per_step` have run."""

    def close(self, reason: str) -> None:
        """Close the reducer because of `reason`, so that it reduces no more gradients. Not collective. Idempotent."""


def _is_busy(participant: ActiveReducer) -> bool:
    """Return whether a GPU is still reducing gradients of iterations that the CPU has ended. Thread-safe."""
    return participant.pipeline is not None and participant.pipeline.in_flight.busy


class ActiveReducers:
    """The gradient reducers of one job that are not closed, oldest first, held by weak references.

    Attributes:
        n_begun: number of backward passes begun on this rank. A pass counts from its first gradient on. The number
            identifies the pass, so that all reducers that fail in one pass can be found.
        last_finished: reducer whose iteration ended last on this rank.
    """

    def __init__(self) -> None:
        self.n_begun = 0
        self.last_finished: weakref.ref[ActiveReducer] | None = None
        self._all: list[weakref.ref[ActiveReducer]] = []

    def __iter__(self) -> Iterator[ActiveReducer]:
        for reference in self._all:
            if (participant := reference()) is not None:
                yield participant

    def add(self, participant: ActiveReducer) -> None:
        """Add a gradient reducer, by weak reference."""
        self._all = [weakref.ref(there) for there in (*self, participant)]

    def remove(self, participant: ActiveReducer) -> None:
        """Remove a closed gradient reducer."""
        self._all = [weakref.ref(there) for there in self if there is not participant]

    def drop_failed(self, number: int) -> None:
        """Drop the gradients of backward pass `number`, which raised an error. Collective.

        Processes reducers in the order of their keys, which is equal on all ranks. Does not drop gradients of earlier
        failed passes: another rank may have destroyed the reducers of such a pass, or may drop its gradients later, so
        that the call would not be collective.

        Args:
            number: number of the pass, as returned by `ActiveReducer.failed_in`.
        """
        if sum(participant.failed_in == number for participant in self) > 1:
            # Collect reducers to which the script has dropped all references, so that all ranks have the same reducers.
            gc.collect()
        for participant in sorted(self, key=lambda participant: participant.key):
            if participant.failed_in == number:
                participant.drop_failed()

    def drain(self) -> None:
        """Wait until the deferred parameter updates of all gradient reducers are complete. Not collective."""
        for participant in self:
            participant.drain()

    @property
    def in_use(self) -> list[ActiveReducer]:
        """Return the gradient reducer that was created last, and the one whose iteration ended last."""
        last = None if self.last_finished is None else self.last_finished()
        return [*list(self)[-1:], *([] if last is None else [last])]


SHORTEST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 2e-3
PAUSE = 0.05
"""Interval at which a rank in `join()` polls for messages, as a fraction of the time since the last message."""


@dataclass(slots=True)
class _Participation:
    """Progress of this rank in the current iteration of one gradient reducer, and the ranks that know this progress.

    Attributes:
        reached: iteration and stage that this rank has reached.
        announced_to: ranks in `join()` that have received `reached`.
        ended: True if the CPU has ended the iteration. A GPU may still wait for a rank that has called `join()`
            meanwhile.
    """

    key: Key
    ranks: tuple[int, ...]
    reached: Reached
    announced_to: set[int] = field(default_factory=set)
    ended: bool = False


class JoinProtocol:
    """Protocol of `join()`: training ranks announce their iterations to joined ranks, which contribute zeros."""

    def __init__(
        self, participants: ActiveReducers, rank_sets: RankSets, courier: MessageBoard, watchdog: Watchdog
    ) -> None:
        self._participants, self._rank_sets = participants, rank_sets
        self._courier, self._watchdog = courier, watchdog
        self._lock = free_in_forked_children(threading.Lock())
        self._round = 0  # Number of times that all ranks have completed `join()`.
        self._joined: dict[int, int] = {}  # For each rank in `join()`, the value of `_round` when it called `join()`.
        # The current iteration of each gradient reducer, in the order in which this rank began them.
        self._participations: list[_Participation] = []
        self._finished: Counter[int] = Counter()  # Number of ended iterations, by process set (subset of ranks).

    # ── called on ranks that train ───────────────────────────────────────────────────────────────────────────────

    @property
    def any_joined(self) -> bool:
        """Return whether any rank is in `join()`.

        The training ranks may learn of it at different times. After an iteration to which the rank in `join()` has
        contributed zeros, all of them know.
        """
        return any(number >= self._round for number in self._joined.values())

    def announce(self, participant: ActiveReducer, stage: WaitStage) -> None:
        """Record that this rank has reached `stage` in `participant`'s iteration, and announce it to ranks in `join()`.

        Does not read messages of other ranks, because that takes time and usually no rank is in `join()`. Messages are
        read while this rank waits.
        """
        reached = participant.progress.finished, stage
        if stage is WaitStage.FINISH:
            self._participants.last_finished = weakref.ref(participant)
        with self._lock:
            for participation in self._participations:
                if participation.key == participant.key and not participation.ended:
                    participation.reached = reached
                    participation.announced_to.clear()
                    break
            else:
                self._participations.append(_Participation(participant.key, participant.ranks, reached))
            if self._joined:
                self._announce_all()

    def iteration_ended(self, participant: ActiveReducer) -> None:
        """Record that an iteration of `participant` has ended. Called on all ranks, also in `join()`."""
        self._finished[participant.key[0]] += 1
        with self._lock:
            for participation in self._participations.copy():
                if participation.key == participant.key:
                    participation.ended = True
                if participation.ended and not _is_busy(participant):
                    self._participations.remove(participation)

    def forget(self, key: Key) -> None:
        """Mark the current iteration of the gradient reducer with id `key` as ended. Thread-safe; takes no lock."""
        for participation in self._participations:
            if participation.key == key:
                participation.ended = True

    def _forget_ended(self) -> None:
        """Stop announcing, to ranks in `join()`, iterations that have ended on the CPU and on the GPU."""
        busy = {participant.key for participant in self._participants if _is_busy(participant)}
        self._participations = [each for each in self._participations if not each.ended or each.key in busy]

    def poll(self) -> None:
        """Announce the current iterations to ranks that have newly called `join()`. Thread-safe, non-blocking.

        Called while this rank waits.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._announce_all()
            finally:
                self._lock.release()

    def _announce_all(self) -> None:
        self._joined |= dict(self._courier.receive(Tag.JOINED))
        self._forget_ended()
        for participation in self._participations:
            for rank in participation.ranks:
                if self._joined.get(rank) == self._round and rank not in participation.announced_to:
                    participation.announced_to.add(rank)
                    self._courier.send(rank, Tag.ITERATION, (participation.key, participation.reached))

    # ── called on ranks in `join()` ───────────────────────────────────────────────────────────────────────────────

    def join(self) -> int:
        """Contribute zeros to the iterations of training ranks until all ranks call `join()`. Collective.

        Returns:
            The rank that called `join()` last.

        Raises:
            CommError: the job failed, or this rank has dropped an optimizer that training ranks step.
        """
        engine = self._rank_sets[GLOBAL].engine
        assert engine is not None
        self._participants.drain()
        failures = self._watchdog.failures
        # First wait until this rank's GPU has reduced all gradients. The reductions may need zeros of a rank in
        # `join()`. That rank contributes zeros once this rank has announced the iteration, which it does while it waits
        # here.
        wait_for(lambda: not any(_is_busy(participant) for participant in self._participants), failures=failures)
        all_have_joined = engine.join((self._finished[GLOBAL], self._finished.total()))
        with self._lock:
            self._participations.clear()
        self._courier.send_all(Tag.JOINED, self._round)
        substitute = _Substitute(self._participants, self._courier, self._watchdog)
        joined = {self._courier.rank}
        try:
            moved_s = time.monotonic()
            # End the loop when all ranks have joined. No iteration is missed, because a rank announces all its
            # iterations before it calls `join()`.
            while not all_have_joined.wait(_pause_s(moved_s)) or len(joined) < self._courier.size:
                self._watchdog.failures.check()
                with self._lock:
                    self._joined |= dict(self._courier.receive(Tag.JOINED))
                    joined |= {rank for rank, number in self._joined.items() if number >= self._round}
                if substitute.poll(joined):
                    moved_s = time.monotonic()
                    engine.pending.last_progress_s = time.monotonic()
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
    """Contributes zeros to the iterations of training ranks, on a rank in `join()`.

    Iterations of one process set have the same order on all its ranks. Iterations of different process sets do not.
    Therefore each process set has its own thread.
    """

    def __init__(self, participants: ActiveReducers, courier: MessageBoard, watchdog: Watchdog) -> None:
        self._participants, self._courier, self._watchdog = participants, courier, watchdog
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's
        # For each gradient reducer, the iteration and stage that each rank has reached.
        self._reached: defaultdict[Key, dict[int, Reached]] = defaultdict(dict)
        # Iterations that some training rank has announced (begun), and that not all training ranks have begun yet.
        self._announced: list[tuple[Key, Reached]] = []
        self._begun: dict[Key, Reached] = {}
        self._tasks: dict[int, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def poll(self, joined: set[int]) -> bool:
        """Read announcements, and contribute zeros to iterations that all training ranks have reached.

        Args:
            joined: ranks that have called `join()`.

        Returns:
            True if an announcement was received.

        Raises:
            CommError: an iteration failed.
        """
        if self._error is not None:
            raise self._error
        messages = self._courier.receive(Tag.ITERATION)
        for rank, (key, reached) in messages:
            self._reached[key][rank] = reached
            if (key, reached) not in self._announced:
                self._announced.append((key, reached))
        # Process iterations in the order of announcement, because GPUs of training ranks wait for them in this order.
        for announced in list(self._announced):
            key, (number, stage) = announced
            participant, by_rank = self._participant(key), self._reached[key]
            training = [rank for rank in participant.ranks if rank not in joined]
            if not training:
                self._catch_up(participant, (number if stage is WaitStage.FINISH else number - 1, WaitStage.FINISH))
            elif all(rank in by_rank and by_rank[rank] >= announced[1] for rank in training):
                self._catch_up(participant, announced[1])
            else:
                continue
            self._announced.remove(announced)
        return bool(messages)

    def _catch_up(self, participant: ActiveReducer, target: Reached) -> None:
        """Contribute zeros to the iterations of the reducer `participant`, up to the iteration and stage `target`.

        This rank runs iterations in between, too, although the training ranks may have announced only the last one.
        """
        iteration, stage = self._begun.get(participant.key, (participant.progress.finished - 1, WaitStage.FINISH))
        while (iteration, stage) < target:
            if stage is WaitStage.REDUCE:
                stage = WaitStage.FINISH
            else:
                iteration += 1
                stage = target[1] if iteration == target[0] else WaitStage.FINISH
            self._begun[participant.key] = iteration, stage
            self._do(participant, stage)

    def _participant(self, key: Key) -> ActiveReducer:
        for participant in self._participants:
            if participant.key == key:
                return participant
        error = CommError(
            f"rank {self._courier.rank} has called join(), but has dropped an optimizer that other ranks step: keep "
            "DistributedOptimizers until join() has returned"
        )
        self._watchdog.fail(error)
        raise error

    def _do(self, participant: ActiveReducer, stage: WaitStage) -> None:
        number = participant.key[0]
        if number not in self._tasks:
            tasks = self._tasks[number] = queue.SimpleQueue()
            name = f"sirtaki-join-{number}"
            self._threads.append(threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True))
            start_thread(self._threads[-1])
        zeros = stage is WaitStage.REDUCE
        self._tasks[number].put(participant.contribute_zeros if zeros else partial(participant.finish, joined=True))

    def _work(self, tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while (task := tasks.get()) is not None:
            try:
                task()
            except BaseException as err:  # Store any error of the thread, so that the main thread can raise it.
                self._error = err
                return

    def close(self) -> None:
        """End the threads after their queued tasks are completed. Accept no more tasks."""
        for tasks in self._tasks.values():
            tasks.put(None)

    def wait(self) -> None:
        """Wait until all queued tasks are completed.

        Raises:
            CommError: an iteration failed.
        """
        failures = self._watchdog.failures
        wait_for(lambda: not any(thread.is_alive() for thread in self._threads), poll=Poll.SLICES, failures=failures)
        if self._error is not None:
            raise self._error


REPORT_S = 0.05
"""Seconds of waiting after which a rank reports the wait to all ranks, so that they can detect a deadlock.

Applies to a rank that has gradients of an incomplete iteration, because such an iteration may be part of a deadlock.
"""

REPORT_ANYWAY_S = 1.0
"""Seconds of waiting after which a rank without gradients of an incomplete iteration reports the wait to all ranks.

Once a deadlock was detected, the shorter `REPORT_S` applies to this rank, too."""


class _AwaitedOperation(NamedTuple):
    """An eager operation (such as `hvd.allreduce`) for which a rank waits. `concluded` counts the operations that were
    completed or launched before it.
    """

    process_set: int
    name: str
    concluded: int


class _AwaitedIteration(NamedTuple):
    """An iteration of a gradient reducer in which a rank waits, and the stage that the rank has reached in it."""

    key: Key
    reached: Reached


@dataclass(frozen=True, slots=True)
class _Blocked:
    """Report of one rank to all ranks about its longest wait. Picklable.

    Attributes:
        waits_for: operation or iteration in which the rank waits.
        given: for each gradient reducer, the number of iterations to which the rank has contributed all its gradients.
    """

    waits_for: _AwaitedOperation | _AwaitedIteration
    given: dict[Key, int]


class BlockedRanks:
    """Exchanges reports of long waits between ranks, and detects ranks that wait for each other (deadlocks).

    In a deadlock, `must_stop_waiting` tells this rank to give up its wait for an iteration that cannot complete.
    """

    def __init__(
        self, participants: ActiveReducers, rank_sets: RankSets, courier: MessageBoard, joining: JoinProtocol
    ) -> None:
        self._participants, self._rank_sets, self._courier, self._joining = participants, rank_sets, courier, joining
        self._lock = free_in_forked_children(threading.Lock())
        self._sent: _Blocked | None = None
        self._received: dict[int, _Blocked | None] = {}
        self._report_anyway_s = REPORT_ANYWAY_S

    def poll(self) -> None:
        """If this rank waits for an operation or iteration that it has not reported, report it to all ranks.
        Thread-safe, non-blocking.

        Called while this rank waits.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._read()
                blocked = self._own_report()
                if blocked != self._sent:
                    self._sent = blocked
                    self._courier.send_all(Tag.BLOCKED, blocked)
            finally:
                self._lock.release()

    def must_stop_waiting(self, participant: ActiveReducer) -> bool:
        """Return whether this rank must end its wait for the reduction of `participant`'s current iteration.

        True in a deadlock, that is, if two conditions hold. First, some rank waits for an operation or iteration that
        this rank has not begun. Second, the current iteration cannot complete: a waiting rank has not computed all its
        gradients of this iteration, or a rank is in `join()` and contributes zeros only after all training ranks have
        reached the iteration.
        """
        with self._lock:
            self._read()
            reports = [blocked for blocked in self._received.values() if blocked is not None]
        is_incomplete = self._joining.any_joined or any(
            blocked.given.get(participant.key, math.inf) <= participant.progress.finished for blocked in reports
        )
        if not (is_incomplete and any(self._is_missing(blocked.waits_for, participant) for blocked in reports)):
            return False
        # Report waits earlier from now on, because the script probably causes the same deadlock again.
        self._report_anyway_s = REPORT_S
        return True

    def _read(self) -> None:
        self._received |= dict(self._courier.receive(Tag.BLOCKED))

    def _own_report(self) -> _Blocked | None:
        """Return the report of this rank's longest wait. None if the wait is too short to report."""
        now_s = time.monotonic()
        participants = list(self._participants)
        waits: list[tuple[float, _AwaitedOperation | _AwaitedIteration]] = [
            (waiting[1], _AwaitedIteration(participant.key, (participant.progress.finished, waiting[0])))
            for participant in participants
            if (waiting := participant.progress.waiting) is not None
        ]
        # Report an eager operation only if no gradient reducer waits. A reducer may itself wait for an eager operation.
        # In this case the reducer's iteration must be reported.
        if not waits:
            waits = [
                (awaited[1], _AwaitedOperation(number, awaited[0], engine.rounds.completed))
                for number, engine in self._rank_sets.engines()
                if (awaited := engine.awaited) is not None
            ]
        since_s, waits_for = min(waits, key=lambda wait: wait[0], default=(now_s, None))
        if waits_for is None or now_s - since_s < REPORT_S:
            return None
        given = {participant.key: participant.given for participant in participants}
        asks = isinstance(waits_for, _AwaitedIteration) and waits_for.reached[1] is WaitStage.ASK
        if (
            now_s - since_s < self._report_anyway_s
            and not asks
            and not any(
                participant.pending and given[participant.key] == participant.progress.finished
                for participant in participants
            )
        ):
            return None
        return _Blocked(waits_for, given)

    def _is_missing(self, waited_for: _AwaitedOperation | _AwaitedIteration, participant: ActiveReducer) -> bool:
        """Return whether this rank has not begun `waited_for`, for which another rank waits.

        This rank waits for an iteration of `participant`.
        """
        if isinstance(waited_for, _AwaitedOperation):
            if waited_for.process_set not in self._rank_sets:
                return False
            engine = self._rank_sets[waited_for.process_set].engine
            return (
                engine is not None
                and engine.rounds.completed == waited_for.concluded
                and waited_for.name not in engine.pending
            )
        iteration, stage = waited_for.reached
        return any(
            (each.given if stage is WaitStage.REDUCE else each.progress.finished) <= iteration
            for each in self._participants
            if each.key == waited_for.key and (each is not participant or stage is WaitStage.ASK)
        )
