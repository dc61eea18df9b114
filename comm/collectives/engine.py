"""Operations that each rank may submit in its own order: agreed by name, then performed in the same order everywhere.

A rank joins a *round* only while it has something pending. A round is one small message of each rank: a digest of all
that it has pending, and a bit for each name that is known already (AIACC § V-A). If the digests of all ranks are
equal, which is the rule, everything may run. Otherwise what all have set may run; and if any rank has something that
the bits cannot say (a new name, a name whose tensor has changed, a join), everybody's pending operations are exchanged.
That is also where disagreements are found, by all ranks at once.

In a small job the messages of all ranks are gathered, and carry the tensors of small operations, which then take no
message of their own; in a large one they are reduced (AND).

Rounds are run by the thread that waits for a result, so that nobody needs to be woken; where nobody waits, by a thread
of the engine, which sleeps while nothing is pending.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from sirtaki.comm import recorder, timeline
from sirtaki.comm.collectives.operations import (
    ALIGNED_BYTES,
    DIGEST_BYTES,
    CollectiveKind,
    OpenLanes,
    PendingReport,
    Progress,
    Ranks,
    RoundMessage,
    Signature,
    Slot,
    batches,
    mismatch,
    perform,
    result_of,
    zeros_for,
)
from sirtaki.comm.control.communicator import Communicator, Op
from sirtaki.comm.control.failure import FailureBoard, caused
from sirtaki.comm.control.plane import ControlPlane, gather
from sirtaki.comm.control.waiting import WAIT_SLICE_S, wait_for, wait_for_work
from sirtaki.comm.control.watchdog import PendingWait, Watchdog
from sirtaki.comm.device import cuda_device
from sirtaki.comm.modes import outside_modes
from sirtaki.comm.recorder import TracedOperation
from sirtaki.comm.transports.contract import ThreadWork
from sirtaki.errors import CommError, ConfigError, MismatchError
from sirtaki.machine import free_in_forked_children


class EagerWork(ThreadWork):
    """An eager operation under way."""

    def __init__(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.signature, self.tensors = signature, tensors
        self.submitted_s = time.monotonic()
        self.results: list[torch.Tensor] = []
        # The point of this thread's CUDA stream at which the tensors have their values.
        self.written: torch.cuda.Event | None = None
        if signature.device == "cuda":
            self.written = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self.written.record(torch.cuda.current_stream(tensors[0].device))


def tell_of_operations(signatures: Sequence[Signature], works: Sequence[EagerWork | None], begin_s: float) -> None:
    """Tells timeline and recorder of operations that were performed together; a work is None where this rank joined.

    Args:
        signatures: of all of them.
        works: this rank's.
        begin_s: when they were agreed upon (`time.perf_counter`).
    """
    trace, recording = timeline.current, recorder.current
    if trace is None and recording is None:
        return
    end_s = time.perf_counter()
    ages_s = time.monotonic() - end_s  # of one clock against the other
    if trace is not None:
        names = ", ".join(signature.name for signature in signatures)
        trace.span("eager", signatures[0].kind.value, begin_s, end_s, names=names)
    for signature, work in zip(signatures, works, strict=True):
        kind, submitted_s = signature.kind.value, begin_s if work is None else work.submitted_s - ages_s
        if trace is not None:
            trace.span("eager", signature.name, begin_s, end_s)
            if work is not None:
                trace.overlapping(f"NEGOTIATE_{kind}", submitted_s, begin_s, operation=signature.name)
        if recording is not None and work is not None:
            recording.operation(
                TracedOperation(
                    name=signature.name,
                    kind=kind,
                    submitted_s=submitted_s,
                    agreed_s=begin_s,
                    done_s=end_s,
                    n_bytes=work.signature.size_bytes,
                )
            )


CAPACITY = 1024
"""Names that have a bit at the same time."""


class NameSlots:
    """Known names in the order of their last use, each with a bit, and its operation as it was last time."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._slots: OrderedDict[str, tuple[int, Signature]] = OrderedDict()  # bit, operation
        self._free = list(range(capacity))

    def bit(self, work: EagerWork) -> int | None:
        """The bit of the work's name, if it has one and the operation is as it was."""
        slot = self._slots.get(work.signature.name)
        return slot[0] if slot is not None and slot[1].digest == work.signature.digest else None

    def chosen(self, bits: int) -> dict[str, Signature]:
        """Names and operations whose bits are set."""
        return {name: signature for name, (bit, signature) in self._slots.items() if bits >> bit & 1}

    def by_all(self) -> int:
        """The bits of operations that ranks which have joined submit, too."""
        return sum(1 << bit for bit, signature in self._slots.values() if signature.by_all)

    def remember(self, signature: Signature) -> None:
        """Gives the name a bit, or replaces what is known of it; names that come only once are not worth one."""
        name = signature.name
        if (slot := self._slots.get(name)) is not None:
            if slot[1] is not signature:
                self._slots[name] = slot[0], signature
        elif not signature.once:
            if not self._free:
                self.forget(next(iter(self._slots)))
            self._slots[name] = heapq.heappop(self._free), signature

    def touch(self, name: str) -> None:
        """The name has been used just now."""
        if name in self._slots:
            self._slots.move_to_end(name)

    def forget(self, name: str) -> None:
        """Takes the name's bit away."""
        if (slot := self._slots.pop(name, None)) is not None:
            heapq.heappush(self._free, slot[0])


class Pending:
    """Operations of this rank under way.

    Attributes:
        where: names the set of ranks in messages, empty for all ranks.
        moved_s: when anything got on (`time.monotonic()`).
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.moved_s = time.monotonic()
        self._lock = free_in_forked_children(threading.Lock())
        self._changed = threading.Condition(self._lock)
        self._works: dict[str, EagerWork] = {}
        self._owed: dict[str, deque[str]] = {}  # failed operations that this rank has yet to submit: why they failed
        self._join: ThreadWork | None = None
        self._progress: Progress = ()
        self._unnamed = 0
        self._closing = False

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, name: object) -> bool:
        return name in self._works

    def next_name(self, prefix: str) -> str:
        """A name for the next operation without one: the same on all ranks that submit these in the same order."""
        with self._lock:
            self._unnamed += 1
            return f"{prefix}.noname.{self._unnamed}"

    def add(self, work: EagerWork, *, wake: bool) -> None:
        """From now on it is under way, unless it has failed already.

        Args:
            work: of an operation.
            wake: the thread that runs rounds.

        Raises:
            ValueError: an operation of this name is under way on this rank.
            CommError: this rank takes its leave.
        """
        name = work.signature.name
        with self._lock:
            if self._closing:
                raise CommError("operation submitted during shutdown")
            if name in self._works:
                raise ValueError(
                    f"Requested to {work.signature.kind.value.lower()} a tensor with the same name as another tensor "
                    f"that is currently being processed: {name!r}; give it another name= or synchronize() first"
                )
            if (owed := self._owed.get(name)) is not None:
                work.finish(MismatchError(owed.popleft()))
                if not owed:
                    del self._owed[name]
                return
            self._works[name] = work
            if wake:
                self._changed.notify()

    def join(self, progress: Progress) -> ThreadWork:
        """This rank has no more data."""
        with self._changed:
            self._join, self._progress = ThreadWork(), progress
            self.moved_s = time.monotonic()
            self._changed.notify()
            return self._join

    def oldest_wait(self) -> PendingWait | None:
        """What has been pending the longest."""
        works = [work for work in list(self._works.values()) if not work.signature.problem]
        if works:
            oldest = min(works, key=lambda work: work.submitted_s)
            return PendingWait(what=f"operation {oldest.signature.name!r}{self.where}", since_s=oldest.submitted_s)
        if self._join is not None:
            return PendingWait(what=f"join(){self.where}", since_s=self.moved_s)
        return None

    def describe(self) -> str:
        """The names, for the watchdog."""
        names = list(self._works)
        return f"has submitted {', '.join(names[:5])}{' …' if len(names) > 5 else ''}{self.where}" if names else ""

    # ── for the thread that runs rounds ──────────────────────────────────────────────────────────────────────────

    def _has_business(self) -> bool:
        return bool(self._works) or self._join is not None or self._closing

    def wait_for_business(self) -> None:
        """Blocks until there is something to do."""
        with self._changed:
            self._changed.wait_for(self._has_business)

    def wake_if_any(self) -> None:
        """Wakes the thread that waits for business, if there is any."""
        if self._works:
            with self._lock:
                self._changed.notify()

    def snapshot(self, pause_s: float = 0.0) -> tuple[dict[str, EagerWork], PendingReport] | None:
        """After a pause, which anything new ends, what there is by name, and what to say of it; None if nothing is."""
        with self._lock:
            if pause_s:
                self._changed.wait(pause_s)
            if not self._has_business():
                return None
            joined = None if self._join is None else self._progress
            return self._works.copy(), PendingReport(joined=joined, closing=self._closing, unnamed=self._unnamed)

    def remove(self, works: Sequence[EagerWork]) -> None:
        """These have been performed."""
        with self._lock:
            for work in works:
                self._works.pop(work.signature.name, None)

    def refuse(self, name: str, problem: str) -> None:
        """This operation fails, also if it is submitted later."""
        with self._lock:
            # Not a snapshot: the operation may have been submitted since.
            work = self._works.pop(name, None)
            if work is None and self._join is None and not self._closing:
                self._owed.setdefault(name, deque()).append(problem)
        if work is not None:
            work.finish(MismatchError(problem))

    def end_join(self, unnamed: int) -> None:
        """All ranks have joined; `unnamed` is the largest number of operations without a name on any of them."""
        with self._lock:
            # Ranks that joined early have submitted fewer; the next unnamed operation must be the same one on all.
            self._unnamed = unnamed
            self._owed.clear()
            join, self._join = self._join, None
        if join is not None:
            join.finish()

    def fail(self, error: CommError) -> None:
        """Everything fails."""
        with self._lock:
            for work in (*self._works.values(), *([self._join] if self._join else [])):
                work.finish(error)
            self._works.clear()

    def close(self) -> None:
        """This rank takes its leave; what is pending fails. Why it cannot take part in something it tells before."""
        with self._changed:
            self._closing = True
            for name, work in list(self._works.items()):
                if not work.signature.problem:
                    work.finish(CommError("shut down while the operation was pending"))
                    del self._works[name]
            self._changed.notify_all()


_DIGEST_BITS = 8 * DIGEST_BYTES
_ALL_ONES = (1 << _DIGEST_BITS) - 1
_HEAD_BYTES = 2 * DIGEST_BYTES + CAPACITY // 8 + ALIGNED_BYTES

GATHERED_RANKS = 32
"""Up to so many ranks gather the messages of a round, which carry small tensors then; more of them reduce them."""


class Rounds:
    """Runs rounds, one at a time; what it remembers is the same on all ranks.

    Attributes:
        last_joined: the rank that joined last.
        concluded: how many operations have been performed or refused: each has the same number on all ranks.
        ended: all ranks have taken their leave.
    """

    def __init__(
        self,
        comm: Communicator,
        failures: FailureBoard,
        pending: Pending,
        open_lanes: OpenLanes | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Collective over `comm`, of which two duplicates are kept; see `EagerEngine`."""
        self._messages, self._data, self._failures = comm.duplicate(), comm.duplicate(), failures
        self._ranks, self._size = Ranks(self._data, failures, open_lanes), comm.size
        self._pending, self._members = pending, members or range(comm.size)
        self.last_joined = -1
        self.concluded = 0
        self.ended = False
        self._names = NameSlots()
        self._joined: dict[int, int] = {}  # rank → its number of unnamed operations
        self._join_told = False  # the other ranks know that this one has joined
        self._message = RoundMessage(self._size, _HEAD_BYTES) if self._size <= GATHERED_RANKS else None

    def run(self, works: Mapping[str, EagerWork], mine: PendingReport) -> bool:
        """Collective: one round; True if anything was performed or refused.

        Args:
            works: what this rank has pending.
            mine: what it says of itself.
        """
        digest = self._digest(works.values(), mine)
        own = [works[name] for name in sorted(works)] if digest else []
        carried = None
        if own and self._message is not None:
            carried = self._message.load([(work.signature, work.tensors) for work in own])
        all_equal, bits = self._agree(digest, self._bits(works, mine))
        if all_equal:
            for work in own:
                self._names.remember(work.signature)
            if carried is not None:
                for work, slots in zip(own, carried, strict=True):
                    self._conclude([work.signature], [work], slots)
                return True
            ready = {work.signature.name: work.signature for work in own}
        elif bits & 1:
            ready = self._names.chosen(bits >> 1)
        else:
            ready = self._exchange(works, mine)
        for together in batches(ready):
            self._conclude([ready[name] for name in together], [works.get(name) for name in together])
        return self._end_join(mine) or bool(ready)

    # ── the message of a round ───────────────────────────────────────────────────────────────────────────────────

    def _digest(self, works: Iterable[EagerWork], mine: PendingReport) -> int:
        """Of all that is pending; 0 = it must not be taken for any other rank's."""
        if mine.joined is not None or mine.closing:
            return 0
        digest = 0
        for work in works:
            if work.signature.problem:
                return 0
            digest += work.signature.digest
        return digest & _ALL_ONES

    def _bits(self, works: Mapping[str, EagerWork], mine: PendingReport) -> int:
        """Return one bit for each known name, above a lowest bit that is set if this rank sends nothing else."""
        bits, known = 0, not mine.closing
        for work in works.values():
            if (bit := self._names.bit(work)) is None:
                known = False
            else:
                bits |= 2 << bit
            # While a rank has joined, its bits say nothing about operations that it cannot take part in.
            if self._joined and mine.joined is None and work.signature.needs_data:
                known = False
        if mine.joined is not None:
            bits |= (2 << CAPACITY) - 2 & ~(self._names.by_all() << 1)
            known = known and self._join_told
        return bits | known

    def _agree(self, digest: int, bits: int) -> tuple[bool, int]:
        """Collective: whether all ranks have this digest (0 = it equals none), and which bits all have set.

        Next to the digest goes its complement: the AND of both is what one rank sent only if all sent the same.
        """
        number = bits << 2 * _DIGEST_BITS | (digest ^ _ALL_ONES if digest else 0) << _DIGEST_BITS | digest
        head = number.to_bytes(_HEAD_BYTES, "little")
        if self._message is not None:
            mine, everybody = self._message.mine, self._message.everybody
            self._message.head[:] = head
            wait_for(self._messages.all_gather(mine, everybody), failures=self._failures)
            heads = everybody[:, :_HEAD_BYTES]
            if digest and heads.tobytes() == head * self._size:
                return True, bits
            found = np.bitwise_and.reduce(heads, axis=0)
        else:
            found = np.frombuffer(bytearray(head), dtype=np.uint8)
            wait_for(self._messages.all_reduce(found, Op.AND), failures=self._failures)
        common = int.from_bytes(found.tobytes(), "little")
        same = (1 << 2 * _DIGEST_BITS) - 1
        return bool(digest) and common & same == number & same, common >> 2 * _DIGEST_BITS

    def _exchange(self, works: Mapping[str, EagerWork], mine: PendingReport) -> dict[str, Signature]:
        """Collective: everybody's pending operations; the ones that are pending everywhere and agree."""
        self._join_told = mine.joined is not None
        signatures = [work.signature for work in works.values()]
        gathered: list[PendingReport] = gather(
            msgspec.structs.replace(mine, signatures=signatures), comm=self._messages
        )
        self.ended = all(presence.closing for presence in gathered)
        everybody = dict(zip(self._members, gathered, strict=True))
        newly_joined = [
            (presence.joined, rank)
            for rank, presence in everybody.items()
            if presence.joined is not None and rank not in self._joined
        ]
        if newly_joined:
            self._joined |= {rank: everybody[rank].unnamed for _, rank in newly_joined}
            self.last_joined = max(newly_joined)[1]
        by_name: dict[str, dict[int, Signature]] = {}
        for rank, presence in everybody.items():
            for signature in presence.signatures:
                by_name.setdefault(signature.name, {})[rank] = signature
        ready = {}
        for name, by_rank in sorted(by_name.items()):
            some = next(iter(by_rank.values()))
            problem = mismatch(by_rank)
            if problem is None and self._joined and some.needs_data:
                problem = f"{some.kind.value.capitalize()} is not supported with Join at this time."
            if problem is not None:
                self.concluded += 1
                self._names.forget(name)
                self._pending.refuse(name, problem)  # the same error on all ranks
                continue
            self._names.remember(some)
            absent = 0 if some.by_all else len(self._joined.keys() - by_rank.keys())
            if len(by_rank) == self._size - absent:
                ready[name] = some
        return ready

    # ── what was agreed upon ─────────────────────────────────────────────────────────────────────────────────────

    def _conclude(
        self,
        signatures: list[Signature],
        works: Sequence[EagerWork | None],
        carried: Sequence[Slot] | None = None,
    ) -> None:
        """Performs agreed operations together; collective, unless messages have carried all.

        Args:
            signatures: of the operations.
            works: of this rank; None where it has joined.
            carried: where the tensors of a single operation lie, which all ranks have sent along.
        """
        begin_s = time.perf_counter()
        mine = [work for work in works if work is not None]
        error: CommError | None = None
        try:
            for signature, work in zip(signatures, works, strict=True):
                self._names.touch(signature.name)
                if work is not None and work.written is not None:
                    gpu = cuda_device(work.tensors[0].device.index)
                    gpu.enter_thread()
                    gpu.order_after(work.written)
            if carried is not None:
                mine[0].results = result_of(signatures[0], mine[0].tensors, carried)
            else:
                batch = [
                    (signature, zeros_for(signature)) if work is None else (work.signature, work.tensors)
                    for signature, work in zip(signatures, works, strict=True)
                ]
                for work, result in zip(works, perform(batch, self._ranks), strict=True):
                    if work is not None:
                        work.results = result
        except CommError as err:
            error = err
        except Exception as err:
            names = ", ".join(repr(signature.name) for signature in signatures)
            error = CommError(f"{signatures[0].kind.value.lower()} {names} failed: {err!r}")
        tell_of_operations(signatures, works, begin_s)
        self.concluded += len(signatures)
        self._pending.remove(mine)
        for work in mine:
            work.finish(error)

    def _end_join(self, mine: PendingReport) -> bool:
        """If all ranks have joined, they all know it from the same exchange, and start anew together."""
        if mine.joined is None or len(self._joined) < self._size:
            return False
        unnamed = max(self._joined.values())
        self._joined.clear()
        self._join_told = False
        self._pending.end_join(unnamed)
        return True

    def close(self, *, together: bool = True) -> None:
        """Ends the lanes; frees the communicators, too, if all ranks do it `together`."""
        if self._ranks.lanes is not None:
            self._ranks.lanes.close(together=together)
        if together:
            self._messages.free()
            self._data.free()


LONGEST_PAUSE_S = 2e-3
"""Between rounds that bring nothing: the ranks wait for different things."""

SHORTEST_PAUSE_S = 50e-6


class EagerEngine:
    """Eager operations over one set of ranks.

    Attributes:
        pending: operations of this rank under way.
        rounds: in which the ranks agree, and what they have agreed upon.
        known: signatures of operations that were submitted before, by whatever their submitter tells them apart by.
        awaited: the operation that a thread of the user's waits for, and since when (`time.monotonic()`).
    """

    def __init__(
        self,
        comm: Communicator,
        failures: FailureBoard,
        *,
        where: str = "",
        open_lanes: OpenLanes | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Collective over `comm`, of which the engine gets two duplicates.

        Args:
            comm: the ranks that take part.
            failures: where a lost job is reported.
            where: names the set of ranks in messages, empty for all ranks.
            open_lanes: opens what carries large all-reduces; None = the communicator does.
            members: by which numbers messages name the ranks; None = those of `comm`.
        """
        self.pending = Pending(where)
        self.rounds = Rounds(comm, failures, self.pending, open_lanes, members)
        self._failures = failures
        self.rank, self.size = comm.rank, comm.size
        self._number = comm.rank if members is None else members[comm.rank]
        self.known: dict[Hashable, Signature] = {}
        self.awaited: tuple[str, float] | None = None
        self._turn = free_in_forked_children(threading.Lock())  # of whoever runs rounds
        self._pause_s = 0.0
        self._thread = threading.Thread(target=self._run, name="sirtaki-eager", daemon=True)
        self._thread.start()

    # ── for submitting threads ───────────────────────────────────────────────────────────────────────────────────

    def submit(self, signature: Signature, tensors: Sequence[torch.Tensor], *, wake: bool = True) -> EagerWork:
        """Starts an operation.

        Args:
            signature: of this rank.
            tensors: left alone by the caller until the work is done.
            wake: False = the caller calls `finish` next, which runs the rounds itself.

        Raises:
            ValueError: an operation of this name is under way on this rank.
            CommError: the job has failed.
        """
        self._failures.check()
        work = EagerWork(signature, tensors)
        self.pending.add(work, wake=wake)
        return work

    def finish(self, work: ThreadWork, interrupted: Callable[[], bool] | None = None) -> bool:
        """Blocks until `work` is done; runs the rounds if nobody else does, which saves two hand-overs.

        Args:
            work: of this engine.
            interrupted: asked now and then whether to stop waiting. Who may be interrupted runs no rounds, since they
                wait for others.

        Returns:
            The work is done; False only if it was interrupted.

        Raises:
            CommError: the operation or the job failed.
        """
        if interrupted is not None:
            return wait_for_work([work], failures=self._failures, interrupted=interrupted, blame_s=None)
        if isinstance(work, EagerWork):
            self.awaited = work.signature.name, time.monotonic()
        try:
            while not work.is_done():
                if self._turn.acquire(blocking=False):
                    try:
                        self._step()
                    finally:
                        self._turn.release()
                else:
                    work.wait(WAIT_SLICE_S)
                if not work.is_done():  # what is done counts, though the job may have failed since
                    self._failures.check()
        finally:
            self.awaited = None
        self.pending.wake_if_any()
        return work.wait(0.0)

    def join(self, progress: Progress) -> ThreadWork:
        """This rank has no more data: it takes part in the others' all-reduces with zeros until all have joined."""
        self._failures.check()
        return self.pending.join(progress)

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        """The engine's thread."""
        while not self.rounds.ended and self._failures.error is None:
            self.pending.wait_for_business()
            with self._turn:
                try:
                    self._step()
                except CommError:
                    return  # those who wait have heard of it

    @outside_modes
    def _step(self) -> None:
        """With `_turn`, collective with the other ranks that have something to do: one round."""
        there = self.pending.snapshot(self._pause_s)
        if there is None or self.rounds.ended:
            return
        if (trace := timeline.current) is not None and trace.mark_cycles:
            trace.instant("eager", "CYCLE_START", time.perf_counter())
        try:
            brought = self.rounds.run(*there)
        except BaseException as err:  # also an interrupt: a round cannot be left half done
            what = f"eager operations failed on rank {self._number} ({', '.join(there[0]):.200})"
            error = err if isinstance(err, CommError) else caused(CommError(f"{what}: {err!r}"), err)
            self._failures.report(error)
            self.pending.fail(error)
            if isinstance(err, Exception):
                raise error from error.__cause__
            raise
        if brought:
            self._pause_s, self.pending.moved_s = 0.0, time.monotonic()
        else:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or SHORTEST_PAUSE_S)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Collective: ends the thread after a last round with all ranks; what is pending fails.

        Waits for them, since nobody may call MPI_Finalize while the thread is in MPI.

        Args:
            timeout_s: how long the thread may take to end if the job has failed.

        Returns:
            False if the job has failed before the other ranks came; the communicators are kept then.
        """
        self.pending.close()
        while self._thread.is_alive() and self._failures.error is None:
            self._thread.join(0.1)
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive() and self.rounds.ended
        self.rounds.close(together=ended)
        return ended


class SparseSum:
    """The sum of a sparse COO tensor over the engine's ranks, under way."""

    def __init__(self, engine: EagerEngine, tensor: torch.Tensor, name: str | None, *, by_all: bool = False) -> None:
        """Collective: starts it.

        Args:
            engine: of the ranks that take part.
            tensor: of the same dense shape and dtype on all ranks; it may have any number of entries.
            name: pairs the operation across ranks; None = by the order of unnamed operations.
            by_all: ranks that have joined call this, too; otherwise it is an error while some have.
        """
        coalesced = tensor.coalesce()
        parts = {"indices": coalesced.indices().t().contiguous(), "values": coalesced.values()}
        self._engine, self._size = engine, tensor.size()
        self._works = []
        for part, entries in parts.items():
            full = engine.pending.next_name("allgather") if name is None else f"allgather.{name}.{part}"
            signature = Signature.of(
                [entries], name=full, kind=CollectiveKind.ALLGATHER, once=name is None, by_all=by_all
            )
            self._works.append(engine.submit(signature, [entries]))

    def wait(self, interrupted: Callable[[], bool] | None) -> bool:
        """Blocks until it is done; False if `interrupted`, which is asked now and then, says so.

        Raises:
            CommError: the operation or the job failed.
        """
        return all(self._engine.finish(work, interrupted) for work in self._works)

    def result(self) -> torch.Tensor:
        """Blocks until it is there: a sparse tensor, not coalesced."""
        self.wait(None)
        (indices,), (values,) = (work.results for work in self._works)
        return torch.sparse_coo_tensor(indices.t(), values, self._size, device=values.device, check_invariants=False)


# ── subsets of the ranks, each with an engine for eager operations of its own; set 0 is all ranks ─────────────────────
#
# Making and ending a set is collective over *all* ranks, members or not, and all of them come to the same verdict about
# it.

GLOBAL = 0
"""The number of the set of all ranks."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankSet:
    """One set.

    Attributes:
        number: its own, the same on all ranks.
        ranks: its members, ascending, by their rank among all.
        comm: over the members, for collective use by their main threads; None on other ranks.
        engine: for eager operations; None on other ranks.
        control: the control plane of the members; None on other ranks, and until `RankSets.members` was called.
    """

    number: int
    ranks: tuple[int, ...]
    comm: Communicator | None
    engine: EagerEngine | None
    control: ControlPlane | None = None


class RankSets:
    """All sets of one job by number. The methods that change them are collective over all ranks."""

    def __init__(self, control: ControlPlane, watchdog: Watchdog, open_lanes: OpenLanes | None = None) -> None:
        """Collective: opens set 0; keeps all, without owning them. `open_lanes` as for `EagerEngine`."""
        self._control, self._watchdog, self._open_lanes = control, watchdog, open_lanes
        self._sets: dict[int, RankSet] = {}
        self._last = 0
        self._open(GLOBAL, tuple(range(control.size)), control.comm)
        self._sets[GLOBAL].control = control

    def __getitem__(self, number: int) -> RankSet:
        return self._sets[number]

    def __contains__(self, number: object) -> bool:
        return number in self._sets

    def engines(self) -> list[tuple[int, EagerEngine]]:
        """The engines of the sets that this rank is in, with the sets' numbers."""
        return [(number, there.engine) for number, there in list(self._sets.items()) if there.engine is not None]

    def members(self, number: int) -> RankSet:
        """Collective over the set, of which this rank is a member: the set, with its control plane."""
        there = self._sets[number]
        if there.control is None:
            assert there.comm is not None
            there.control = self._control.of_subset(there.comm)
        return there

    def add(self, ranks: Sequence[int]) -> int:
        """Collective over all ranks: opens a set of some of them and gives its number.

        Raises:
            ConfigError: on all ranks, if on any of them the set is empty, names a rank that does not exist or one
                twice, or is there already.
            MismatchError: on all ranks, if they name different sets.
        """
        members = tuple(sorted(ranks))
        said = self._control.all_gather((members, self._problem(members)))
        if problems := [problem for _, problem in said if problem]:
            raise ConfigError(problems[0])
        if odd := [rank for rank, (others, _) in enumerate(said) if others != said[0][0]]:
            raise MismatchError(
                f"the ranks disagree about a process set: rank 0 names {list(said[0][0])}, "
                f"rank {odd[0]} names {list(said[odd[0]][0])}"
            )
        self._last += 1
        comm = None
        if self._control.rank in members:
            comm = self._control.comm.subset(members)
        self._open(self._last, members, comm)
        return self._last

    def _problem(self, members: tuple[int, ...]) -> str:
        size = self._control.size
        if not members or len(set(members)) < len(members) or not all(0 <= rank < size for rank in members):
            return f"a process set names some of the ranks 0 … {size - 1}, each once, not {list(members)}"
        for number, there in self._sets.items():
            if there.ranks == members:
                return f"A process set with ranks {list(members)} has been added already (id {number})"
        return ""

    def remove(self, number: int | None, before: Callable[[int], None] = lambda _: None) -> bool:
        """Collective over all ranks: ends a set; False if there is none of that number or it is set 0.

        Args:
            number: of the set.
            before: called with it just before it ends, on all ranks, to end what uses it.

        Raises:
            MismatchError: on all ranks, if they name different sets.
            CommError: on all ranks, if a member has operations under way.
        """
        there = self._sets.get(number) if number else None
        pending = len(there.engine.pending) if there is not None and there.engine is not None else 0
        said = self._control.all_gather((number, pending))
        if any(other != number for other, _ in said):
            raise MismatchError(f"the ranks remove different process sets: {[other for other, _ in said]}")
        if there is None:
            return False
        assert number is not None
        if busy := [rank for rank, (_, count) in enumerate(said) if count]:
            raise CommError(f"process set {number} has operations under way on rank {busy[0]}; synchronize() them")
        before(number)
        self._close(number)
        return True

    def _open(self, number: int, ranks: tuple[int, ...], comm: Communicator | None) -> None:
        engine = None
        if comm is not None:
            where = f" of process set {number} (ranks {', '.join(map(str, ranks))})" if number else ""
            failures = self._control.failures
            engine = EagerEngine(comm, failures, where=where, open_lanes=self._open_lanes, members=ranks)
            self._watchdog.watch(engine.pending.oldest_wait, engine.pending.describe)
        self._sets[number] = RankSet(number=number, ranks=ranks, comm=comm, engine=engine)

    def _close(self, number: int) -> None:
        there = self._sets.pop(number)
        if there.engine is None or there.comm is None:
            return
        self._watchdog.unwatch(there.engine.pending.oldest_wait, there.engine.pending.describe)
        if there.engine.close() and number:
            if there.control is not None:
                there.control.close()
            there.comm.free()

    def close(self) -> None:
        """Collective over all ranks: ends all sets."""
        for number in sorted(self._sets, reverse=True):
            self._close(number)
