"""Operations that each rank may submit in its own order: agreed by name, then performed in the same order everywhere.

A rank joins a *round* only while it has something pending. A round is one small all-reduce (AND) of a digest of all
that this rank has pending, and a bit for each name that is known already (AIACC § V-A). If the digests of all ranks are
equal, which is the rule, everything may run. Otherwise what all have set may run; and if any rank has something that
the bits cannot say (a new name, a name whose tensor has changed, a join), everybody's pending operations are exchanged.
That is also where disagreements are found, by all ranks at once.

Rounds are run by a thread of the engine, or by a thread that waits for a result: then nobody needs to be woken.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sirtaki.comm import recorder, timeline
from sirtaki.comm.control.communicator import Communicator, Op
from sirtaki.comm.control.failure import WAIT_SLICE_S, FailureBoard, poll_until
from sirtaki.comm.control.plane import gather
from sirtaki.comm.control.watchdog import Wait
from sirtaki.comm.recorder import TracedOperation
from sirtaki.comm.transports.contract import ThreadWork
from sirtaki.errors import CommError, MismatchError

from .operations import (
    DIGEST_BYTES,
    Kind,
    OpenLanes,
    Presence,
    Progress,
    Ranks,
    Signature,
    batches,
    mismatch,
    perform,
    zeros_for,
)


class EagerWork(ThreadWork):
    """An eager operation under way."""

    def __init__(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.signature, self.tensors = signature, tensors
        self.digest = signature.digest()
        self.submitted_s = time.monotonic()
        self.results: list[torch.Tensor] = []
        # The point of this thread's CUDA stream at which the tensors have their values.
        self.written: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self.written = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self.written.record(torch.cuda.current_stream(tensors[0].device))


def tell_of_operations(signatures: Sequence[Signature], works: Sequence[EagerWork | None], begin_s: float) -> None:
    """Tells timeline and recorder of operations that were performed together; a work is None where this rank joined.

    Args:
        signatures: of all of them.
        works: this rank's.
        begin_s: when they were agreed upon (`time.perf_counter`).
    """
    end_s = time.perf_counter()
    ages_s = time.monotonic() - end_s  # of one clock against the other
    if (trace := timeline.current) is not None:
        names = ", ".join(signature.name for signature in signatures)
        trace.span("eager", signatures[0].kind.value, begin_s, end_s, names=names)
    for signature, work in zip(signatures, works, strict=True):
        submitted_s = begin_s if work is None else work.submitted_s - ages_s
        if trace is not None:
            trace.span("eager", signature.name, begin_s, end_s)
            if work is not None:
                negotiating = f"NEGOTIATE_{signature.kind.value}"
                trace.overlapping(negotiating, submitted_s, begin_s, operation=signature.name)
        if (recording := recorder.current) is not None and work is not None:
            recording.operation(
                TracedOperation(
                    name=signature.name,
                    kind=signature.kind.value,
                    submitted_s=submitted_s,
                    agreed_s=begin_s,
                    done_s=end_s,
                    n_bytes=sum(tensor.numel() * tensor.element_size() for tensor in work.tensors),
                )
            )


CAPACITY = 1024
"""Names that have a bit at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    bit: int
    signature: Signature
    digest: int


class NameSlots:
    """Known names in the order of their last use."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._by_bit: dict[int, str] = {}
        self._free = list(range(capacity))

    def slot(self, name: str) -> int | None:
        """The bit of a name, None if it has none."""
        slot = self._slots.get(name)
        return None if slot is None else slot.bit

    def digest(self, name: str) -> int | None:
        """Of the operation as it was when it was remembered."""
        slot = self._slots.get(name)
        return None if slot is None else slot.digest

    def known(self, bits: Sequence[int]) -> dict[str, Signature]:
        """Names and operations of those bits that have a name."""
        names = [self._by_bit[bit] for bit in bits if bit in self._by_bit]
        return {name: self._slots[name].signature for name in names}

    def by_all(self) -> list[int]:
        """The bits of operations that ranks which have joined submit, too."""
        return [slot.bit for slot in self._slots.values() if slot.signature.by_all]

    def remember(self, signature: Signature, digest: int) -> None:
        """Gives the name a bit, or replaces what is known of it; names that come only once are not worth one."""
        name = signature.name
        if name in self._slots:
            bit = self._slots[name].bit
        elif signature.once:
            return
        else:
            if not self._free:
                self.forget(next(iter(self._slots)))
            bit = heapq.heappop(self._free)
        self._slots[name] = _Slot(bit=bit, signature=signature, digest=digest)
        self._by_bit[bit] = name

    def touch(self, name: str) -> None:
        """The name has been used just now."""
        if name in self._slots:
            self._slots.move_to_end(name)

    def forget(self, name: str) -> None:
        """Takes the name's bit away."""
        if (slot := self._slots.pop(name, None)) is not None:
            del self._by_bit[slot.bit]
            heapq.heappush(self._free, slot.bit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What there was when a round began.

    Attributes:
        works: operations by name.
        join: under way if this rank has joined.
        progress: with which it has joined.
        closing: this rank takes its leave.
        unnamed: how many operations without a name it has submitted.
    """

    works: Mapping[str, EagerWork]
    join: ThreadWork | None
    progress: Progress
    closing: bool
    unnamed: int

    def presence(self) -> Presence:
        """All of it, for the other ranks."""
        return Presence(
            signatures=[work.signature for work in self.works.values()],
            joined=None if self.join is None else self.progress,
            closing=self.closing,
            unnamed=self.unnamed,
        )


class Pending:
    """Operations of this rank under way.

    Attributes:
        where: names the set of ranks in messages, empty for all ranks.
        join_told: the other ranks know that this one has joined.
        moved_s: when anything got on (`time.monotonic()`).
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.join_told = False
        self.moved_s = time.monotonic()
        self._changed = threading.Condition()
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
        with self._changed:
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
        signature = work.signature
        with self._changed:
            if self._closing:
                raise CommError("operation submitted during shutdown")
            if signature.name in self._works:
                raise ValueError(
                    f"Requested to {signature.kind.value.lower()} a tensor with the same name as another tensor that "
                    f"is currently being processed: {signature.name!r}; give it another name= or synchronize() first"
                )
            if (owed := self._owed.get(signature.name)) is not None:
                work.finish(MismatchError(owed.popleft()))
                if not owed:
                    del self._owed[signature.name]
                return
            self._works[signature.name] = work
            if wake:
                self._changed.notify()

    def join(self, progress: Progress) -> ThreadWork:
        """This rank has no more data."""
        with self._changed:
            self._join, self._progress, self.join_told = ThreadWork(), progress, False
            self.moved_s = time.monotonic()
            self._changed.notify()
            return self._join

    def oldest_wait(self) -> Wait | None:
        """What has been pending the longest."""
        works = [work for work in list(self._works.values()) if not work.signature.problem]
        if works:
            oldest = min(works, key=lambda work: work.submitted_s)
            return Wait(what=f"operation {oldest.signature.name!r}{self.where}", since_s=oldest.submitted_s)
        if self._join is not None:
            return Wait(what=f"join(){self.where}", since_s=self.moved_s)
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
        with self._changed:
            if self._works:
                self._changed.notify()

    def snapshot(self, pause_s: float) -> Snapshot | None:
        """After a pause, which anything new ends, what there is; None if that is nothing."""
        with self._changed:
            if pause_s:
                self._changed.wait(pause_s)
            if not self._has_business():
                return None
            return Snapshot(
                works=dict(self._works),
                join=self._join,
                progress=self._progress,
                closing=self._closing,
                unnamed=self._unnamed,
            )

    def remove(self, works: Sequence[EagerWork]) -> None:
        """These have been performed."""
        with self._changed:
            for work in works:
                self._works.pop(work.signature.name, None)

    def refuse(self, name: str, problem: str) -> None:
        """This operation fails, also if it is submitted later."""
        with self._changed:
            # Not a snapshot: the operation may have been submitted since.
            work = self._works.pop(name, None)
            if work is None and self._join is None and not self._closing:
                self._owed.setdefault(name, deque()).append(problem)
        if work is not None:
            work.finish(MismatchError(problem))

    def end_join(self, unnamed: int) -> None:
        """All ranks have joined; `unnamed` is the largest number of operations without a name on any of them."""
        with self._changed:
            # Ranks that joined early have submitted fewer; the next unnamed operation must be the same one on all.
            self._unnamed = unnamed
            self._owed.clear()
            self._join = None

    def fail(self, error: CommError) -> None:
        """Everything fails."""
        with self._changed:
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


_ALL_BITS = (1 << 8 * DIGEST_BYTES) - 1

Bits = npt.NDArray[np.bool_]


def agree(digest: int, bits: Bits, *, comm: Communicator, failures: FailureBoard) -> tuple[bool, Bits]:
    """Collective: whether all ranks have this digest (0 = it equals none), and which bits all have set.

    Next to the digest goes its complement: the AND of both is what one rank sent only if all sent the same.
    """
    complement = digest ^ _ALL_BITS if digest else 0
    mine = digest.to_bytes(DIGEST_BYTES, "big") + complement.to_bytes(DIGEST_BYTES, "big")
    sent = np.concatenate([np.frombuffer(mine, dtype=np.uint8), np.packbits(bits)])
    poll_until(comm.all_reduce(sent, Op.AND), failures=failures)
    all_equal = bool(digest) and sent[: 2 * DIGEST_BYTES].tobytes() == mine
    return all_equal, np.unpackbits(sent[2 * DIGEST_BYTES :], count=bits.size).view(np.bool_)


class Rounds:
    """Runs rounds, one at a time; what it remembers is the same on all ranks.

    Attributes:
        last_joined: the rank that joined last.
        concluded: how many operations have been performed or refused: each has the same number on all ranks.
        ended: all ranks have taken their leave.
    """

    def __init__(
        self, comm: Communicator, failures: FailureBoard, pending: Pending, open_lanes: OpenLanes | None = None
    ) -> None:
        """Collective over `comm`, of which two duplicates are kept."""
        self._messages, self._data, self._failures = comm.duplicate(), comm.duplicate(), failures
        self._ranks, self._size = Ranks(self._data, failures, open_lanes), comm.size
        self._pending = pending
        self.last_joined = -1
        self.concluded = 0
        self.ended = False
        self._names = NameSlots()
        self._joined: dict[int, int] = {}  # rank → its number of unnamed operations

    def run(self, mine: Snapshot) -> bool:
        """Collective: one round; True if anything was performed or refused."""
        all_equal, result = agree(self._digest(mine), self._bits(mine), comm=self._messages, failures=self._failures)
        if all_equal:
            ready = {name: work.signature for name, work in mine.works.items()}
            for name in sorted(ready):
                self._names.remember(ready[name], mine.works[name].digest)
        elif result[0]:
            ready = self._names.known(np.flatnonzero(result[1:]).tolist())
        else:
            ready = self._exchange(mine.presence())
        for names in batches(ready):
            self._run_batch([ready[name] for name in names], [mine.works.get(name) for name in names])
        return self._end_join(mine.join) or bool(ready)

    @staticmethod
    def _digest(mine: Snapshot) -> int:
        """Of all that is pending; 0 = it must not be taken for any other rank's."""
        works = mine.works.values()
        if mine.join is not None or mine.closing or any(work.signature.problem for work in works):
            return 0
        return sum(work.digest for work in works) & _ALL_BITS

    def _bits(self, mine: Snapshot) -> Bits:
        """Whether bits say all that this rank has to say, and one for each name that is known."""
        known = all(self._names.digest(name) == work.digest for name, work in mine.works.items())
        bits = np.zeros(1 + CAPACITY, dtype=np.bool_)
        if mine.join is not None:
            bits[1:] = True
            bits[[1 + bit for bit in self._names.by_all()]] = False
            bits[0] = known and self._pending.join_told and not mine.closing
        else:
            # While a rank has joined, its bits say nothing about operations that it cannot take part in.
            refused = self._joined and any(work.signature.needs_data for work in mine.works.values())
            bits[0] = known and not refused and not mine.closing
        for name in mine.works:
            if (slot := self._names.slot(name)) is not None:
                bits[1 + slot] = True
        return bits

    def _exchange(self, mine: Presence) -> dict[str, Signature]:
        """Collective: everybody's pending operations; the ones that are pending everywhere and agree."""
        self._pending.join_told = mine.joined is not None
        everybody: list[Presence] = gather(mine, comm=self._messages)
        self.ended = all(presence.closing for presence in everybody)
        newly_joined = [
            (presence.joined, rank)
            for rank, presence in enumerate(everybody)
            if presence.joined is not None and rank not in self._joined
        ]
        if newly_joined:
            self._joined |= {rank: everybody[rank].unnamed for _, rank in newly_joined}
            self.last_joined = max(newly_joined)[1]
        by_name: dict[str, dict[int, Signature]] = {}
        for rank, presence in enumerate(everybody):
            for signature in presence.signatures:
                by_name.setdefault(signature.name, {})[rank] = signature
        ready = {}
        for name in sorted(by_name):
            by_rank = by_name[name]
            problem = mismatch(by_rank) or self._join_problem(by_rank)
            if problem is not None:
                self.concluded += 1
                self._names.forget(name)
                self._pending.refuse(name, problem)  # the same error on all ranks
                continue
            some = next(iter(by_rank.values()))
            self._names.remember(some, some.digest())
            absent = 0 if some.by_all else len(self._joined.keys() - by_rank.keys())
            if len(by_rank) == self._size - absent:
                ready[name] = some
        return ready

    def _join_problem(self, by_rank: dict[int, Signature]) -> str | None:
        some = next(iter(by_rank.values()))
        if self._joined and some.needs_data:
            return f"{some.kind.value.capitalize()} is not supported with Join at this time."
        return None

    def _run_batch(self, signatures: list[Signature], works: list[EagerWork | None]) -> None:
        """Collective: performs agreed operations; a work is None where this rank has joined."""
        batch = []
        begin_s = time.perf_counter()
        error: CommError | None = None
        try:
            for signature, work in zip(signatures, works, strict=True):
                self._names.touch(signature.name)
                if work is not None and work.written is not None:
                    torch.cuda.current_stream(work.tensors[0].device).wait_event(work.written)
                batch.append((signature, zeros_for(signature)) if work is None else (work.signature, work.tensors))
            results = perform(batch, self._ranks)
            for work, result in zip(works, results, strict=True):
                if work is not None:
                    work.results = result
        except CommError as err:
            error = err
        except Exception as err:
            names = ", ".join(repr(signature.name) for signature in signatures)
            error = CommError(f"{signatures[0].kind.value.lower()} {names} failed: {err!r}")
        tell_of_operations(signatures, works, begin_s)
        self.concluded += len(signatures)
        mine = [work for work in works if work is not None]
        self._pending.remove(mine)
        for work in mine:
            work.finish(error)

    def _end_join(self, join: ThreadWork | None) -> bool:
        """If all ranks have joined, they all know it from the same exchange, and start anew together."""
        if join is None or len(self._joined) < self._size:
            return False
        self._pending.end_join(max(self._joined.values()))
        self._joined.clear()
        join.finish()
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
        awaited: the operation that a thread of the user's waits for, and since when (`time.monotonic()`).
    """

    def __init__(
        self,
        comm: Communicator,
        failures: FailureBoard,
        *,
        where: str = "",
        open_lanes: OpenLanes | None = None,
    ) -> None:
        """Collective over `comm`, of which the engine gets two duplicates.

        Args:
            comm: the ranks that take part.
            failures: where a lost job is reported.
            where: names the set of ranks in messages, empty for all ranks.
            open_lanes: opens what carries large all-reduces; None = the communicator does.
        """
        self.pending = Pending(where)
        self.rounds = Rounds(comm, failures, self.pending, open_lanes)
        self._failures = failures
        self.rank, self.size = comm.rank, comm.size
        self.awaited: tuple[str, float] | None = None
        self._turn = threading.Lock()  # of whoever runs rounds
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
            while not work.wait(WAIT_SLICE_S):
                self._failures.check()
                if interrupted():
                    return False
            return True
        if isinstance(work, EagerWork):
            self.awaited = work.signature.name, time.monotonic()
        try:
            while not work.wait(0.0):
                self._failures.check()
                if self._turn.acquire(blocking=False):
                    try:
                        self._step()
                    finally:
                        self._turn.release()
                else:
                    work.wait(WAIT_SLICE_S)
        finally:
            self.awaited = None
        self.pending.wake_if_any()
        return True

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

    def _step(self) -> None:
        """With `_turn`, collective with the other ranks that have something to do: one round."""
        mine = self.pending.snapshot(self._pause_s)
        if mine is None or self.rounds.ended:
            return
        if (trace := timeline.current) is not None and trace.mark_cycles:
            trace.instant("eager", "CYCLE_START", time.perf_counter())
        try:
            brought = self.rounds.run(mine)
        except BaseException as err:  # also an interrupt: a round cannot be left half done
            error = err if isinstance(err, CommError) else CommError(f"eager operations failed: {err!r}")
            self._failures.report(error)
            self.pending.fail(error)
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
            signature = Signature.of([entries], name=full, kind=Kind.ALLGATHER, once=name is None, by_all=by_all)
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
        return torch.sparse_coo_tensor(indices.t(), values, self._size, check_invariants=False)
