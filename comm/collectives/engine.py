"""Operations that each rank may submit in its own order: agreed by name, then performed in the same order everywhere.

A rank joins a *round* only while it has something pending. A round is one small all-reduce (AND) of a digest
of all that this rank has pending, and a bit for each name that is known already (AIACC § V-A). If the digests of all
ranks are equal, which is the rule, everything may run. Otherwise what all have set may run; and if any rank has
something that the bits cannot say (a new name, a name whose tensor has changed, a join), everybody's pending operations
are exchanged. That is also where disagreements are found, by all ranks at once.

Rounds are run by a thread of the engine, or by a thread that waits for a result: then nobody needs to be woken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.comm import timeline
from sirtaki.comm.control.failure import WAIT_SLICE_S, FailureBoard
from sirtaki.comm.control.watchdog import Wait
from sirtaki.comm.transports.mpi import ThreadWork
from sirtaki.errors import CommError, MismatchError

from .eager_work import EagerWork, trace_operations
from .name_slots import CAPACITY, NameSlots
from .operations import Ranks, perform, zeros_for
from .requests import Presence, Progress, Signature, batches, mismatch
from .round import ALL_BITS, Round

if TYPE_CHECKING:
    from mpi4py import MPI

LONGEST_PAUSE_S = 2e-3
"""Between rounds that bring nothing: the ranks wait for different things."""

SHORTEST_PAUSE_S = 50e-6


class EagerEngine:
    """Eager operations over one set of ranks.

    Attributes:
        last_joined: the rank that joined last.
        awaited: the operation that a thread of the user's waits for, and since when (`time.monotonic()`).
        concluded: how many operations have been performed or refused: each has the same number on all ranks.
    """

    def __init__(self, comm: MPI.Comm, failures: FailureBoard, *, where: str = "") -> None:
        """Collective over `comm`, of which the engine gets two duplicates.

        Args:
            comm: the ranks that take part.
            failures: where a lost job is reported.
            where: names the set of ranks in messages, empty for all ranks.
        """
        self._rounds, self._data = Round(comm.Dup(), failures), comm.Dup()
        self._ranks = Ranks(self._data, failures)
        self._failures, self._where = failures, where
        self.rank, self.size = int(comm.rank), int(comm.size)

        # Shared by the submitting threads and the one that runs rounds, under `_wake`.
        self._wake = threading.Condition()
        self._pending: dict[str, EagerWork] = {}
        self._owed: dict[str, deque[str]] = {}  # failed operations that this rank has yet to submit: why they failed
        self._join: ThreadWork | None = None
        self._progress: Progress = ()
        self._unnamed = 0
        self._closing = False
        self.last_joined = -1
        self.awaited: tuple[str, float] | None = None
        self.concluded = 0

        # Belong to whoever runs rounds, and are the same on all ranks.
        self._turn = threading.Lock()
        self._names = NameSlots()
        self._joined: dict[int, int] = {}  # rank → its number of unnamed operations
        self._join_told = False
        self._ended = False
        self._pause_s = 0.0
        self._moved_s = time.monotonic()

        self._thread = threading.Thread(target=self._run, name="sirtaki-eager", daemon=True)
        self._thread.start()

    # ── for submitting threads ───────────────────────────────────────────────────────────────────────────────────

    def unnamed(self, prefix: str) -> str:
        """A name for the next operation without one: the same on all ranks that submit these in the same order."""
        with self._wake:
            self._unnamed += 1
            return f"{prefix}.noname.{self._unnamed}"

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
        with self._wake:
            if self._closing:
                raise CommError("operation submitted during shutdown")
            if signature.name in self._pending:
                raise ValueError(
                    f"Requested to {signature.kind.value.lower()} a tensor with the same name as another tensor that "
                    f"is currently being processed: {signature.name!r}; give it another name= or synchronize() first"
                )
            if (owed := self._owed.get(signature.name)) is not None:
                work.finish(MismatchError(owed.popleft()))
                if not owed:
                    del self._owed[signature.name]
                return work
            self._pending[signature.name] = work
            if wake:
                self._wake.notify()
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
        with self._wake:
            if self._pending:
                self._wake.notify()
        return True

    def join(self, progress: Progress) -> ThreadWork:
        """This rank has no more data: it takes part in the others' all-reduces with zeros until all have joined."""
        self._failures.check()
        with self._wake:
            self._join, self._progress, self._join_told = ThreadWork(), progress, False
            self._moved_s = time.monotonic()
            self._wake.notify()
            return self._join

    def note_progress(self) -> None:
        """The ranks that have not joined get on."""
        self._moved_s = time.monotonic()

    def oldest_wait(self) -> Wait | None:
        """What has been pending the longest."""
        works = [work for work in list(self._pending.values()) if not work.signature.problem]
        if works:
            oldest = min(works, key=lambda work: work.submitted_s)
            return Wait(what=f"operation {oldest.signature.name!r}{self._where}", since_s=oldest.submitted_s)
        if self._join is not None:
            return Wait(what=f"join(){self._where}", since_s=self._moved_s)
        return None

    def progress(self) -> str:
        """Pending names, for the watchdog."""
        names = list(self._pending)
        return f"has submitted {', '.join(names[:5])}{' …' if len(names) > 5 else ''}{self._where}" if names else ""

    @property
    def pending(self) -> int:
        """Operations of this rank under way."""
        return len(self._pending)

    def has_submitted(self, name: str) -> bool:
        """An operation of this name is under way on this rank."""
        return name in self._pending

    # ── rounds; only with `_turn` ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        """The engine's thread."""
        while not self._ended and self._failures.error is None:
            with self._wake:
                self._wake.wait_for(self._has_business)
            with self._turn:
                try:
                    self._step()
                except CommError:
                    return  # those who wait have heard of it

    def _has_business(self) -> bool:
        return bool(self._pending) or self._join is not None or self._closing

    def _step(self) -> None:
        """Collective with the other ranks that have something to do: one round; nothing if there is nothing to do."""
        with self._wake:
            if self._pause_s:
                self._wake.wait(self._pause_s)
            if not self._has_business() or self._ended:
                return
            pending, join = dict(self._pending), self._join
            closing, unnamed = self._closing, self._unnamed
        try:
            brought = self._round(pending, join, closing, unnamed)
        except BaseException as err:  # also an interrupt: a round cannot be left half done
            error = err if isinstance(err, CommError) else CommError(f"eager operations failed: {err!r}")
            self._fail(error)
            raise
        if brought:
            self._pause_s, self._moved_s = 0.0, time.monotonic()
        else:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or SHORTEST_PAUSE_S)

    def _fail(self, error: CommError) -> None:
        self._failures.report(error)
        with self._wake:
            for work in (*self._pending.values(), *([self._join] if self._join else [])):
                work.finish(error)
            self._pending.clear()

    def _round(self, pending: dict[str, EagerWork], join: ThreadWork | None, closing: bool, unnamed: int) -> bool:
        """Collective: one round; True if anything was performed or refused."""
        known = all(self._names.digest(name) == work.digest for name, work in pending.items())
        if join is not None:
            bits_suffice = known and self._join_told and not closing
        else:
            # While a rank has joined, its bits say nothing about operations that it cannot take part in.
            refused = self._joined and any(work.signature.needs_data for work in pending.values())
            bits_suffice = known and not refused and not closing
        digest = 0
        if join is None and not closing and not any(work.signature.problem for work in pending.values()):
            digest = sum(work.digest for work in pending.values()) & ALL_BITS
        bits = np.zeros(1 + CAPACITY, dtype=np.bool_)
        bits[0] = bits_suffice
        if join is not None:
            bits[1:] = True
            bits[[1 + bit for bit in self._names.by_all()]] = False
        for name in pending:
            if (slot := self._names.slot(name)) is not None:
                bits[1 + slot] = True
        if (trace := timeline.active()) is not None and trace.mark_cycles:
            trace.instant("eager", "CYCLE_START", time.perf_counter())
        all_equal, result = self._rounds.agree(digest, bits)
        if all_equal:
            ready = {name: work.signature for name, work in pending.items()}
            for name in sorted(ready):
                self._names.remember(ready[name], pending[name].digest)
        elif result[0]:
            ready = self._names.known(np.flatnonzero(result[1:]).tolist())
        else:
            presence = Presence(
                signatures=[work.signature for work in pending.values()],
                joined=None if join is None else self._progress,
                closing=closing,
                unnamed=unnamed,
            )
            ready = self._exchange(presence)
        for names in batches(ready):
            self._run_batch([ready[name] for name in names], [pending.get(name) for name in names])
        return self._settle_join(join) or bool(ready)

    def _exchange(self, mine: Presence) -> dict[str, Signature]:
        """Collective: everybody's pending operations; the ones that are pending everywhere and agree."""
        self._join_told = mine.joined is not None
        everybody = self._rounds.exchange(mine)
        self._ended = all(presence.closing for presence in everybody)
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
                self._dispute(name, problem)
                continue
            some = next(iter(by_rank.values()))
            self._names.remember(some, some.digest())
            absent = 0 if some.by_all else len(self._joined.keys() - by_rank.keys())
            if len(by_rank) == self.size - absent:
                ready[name] = some
        return ready

    def _join_problem(self, by_rank: dict[int, Signature]) -> str | None:
        some = next(iter(by_rank.values()))
        if self._joined and some.needs_data:
            return f"{some.kind.value.capitalize()} is not supported with Join at this time."
        return None

    def _dispute(self, name: str, problem: str) -> None:
        """The same error everywhere, also on ranks that submit the name later."""
        self._names.forget(name)
        with self._wake:
            # Not the snapshot of this round: the operation may have been submitted since.
            work = self._pending.pop(name, None)
            if work is None and self._join is None and not self._closing:
                self._owed.setdefault(name, deque()).append(problem)
        if work is not None:
            work.finish(MismatchError(problem))

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
        if (trace := timeline.active()) is not None:
            trace_operations(trace, signatures, works, begin_s)
        self.concluded += len(signatures)
        with self._wake:
            for work in filter(None, works):
                self._pending.pop(work.signature.name, None)
        for work in filter(None, works):
            work.finish(error)

    def _settle_join(self, join: ThreadWork | None) -> bool:
        """If all ranks have joined, they all know it from the same exchange, and start anew together."""
        if join is None or len(self._joined) < self.size:
            return False
        with self._wake:
            # Ranks that joined early have submitted fewer; the next unnamed operation must be the same one on all.
            self._unnamed = max(self._joined.values())
            self._owed.clear()
            self._join = None
        self._joined.clear()
        join.finish()
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Collective: ends the thread after a last round with all ranks; what is pending fails.

        Returns:
            False if the other ranks did not come; the communicators are kept then.
        """
        with self._wake:
            self._closing = True
            for work in self._pending.values():
                work.finish(CommError("shut down while the operation was pending"))
            self._pending.clear()
            self._wake.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive() or not self._ended:
            return False
        self._rounds.close()
        self._data.Free()
        return True
