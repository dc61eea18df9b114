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
from collections.abc import Callable, Sequence

import torch

from sirtaki.comm import timeline
from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import WAIT_SLICE_S, FailureBoard
from sirtaki.comm.control.watchdog import Wait
from sirtaki.comm.transports.mpi import ThreadWork
from sirtaki.errors import CommError

from .eager_work import EagerWork
from .pending import Pending
from .requests import Progress, Signature
from .rounds import Rounds

LONGEST_PAUSE_S = 2e-3
"""Between rounds that bring nothing: the ranks wait for different things."""

SHORTEST_PAUSE_S = 50e-6


class EagerEngine:
    """Eager operations over one set of ranks.

    Attributes:
        awaited: the operation that a thread of the user's waits for, and since when (`time.monotonic()`).
    """

    def __init__(self, comm: Communicator, failures: FailureBoard, *, where: str = "") -> None:
        """Collective over `comm`, of which the engine gets two duplicates.

        Args:
            comm: the ranks that take part.
            failures: where a lost job is reported.
            where: names the set of ranks in messages, empty for all ranks.
        """
        self._pending = Pending(where)
        self._rounds = Rounds(comm, failures, self._pending)
        self._failures = failures
        self.rank, self.size = comm.rank, comm.size
        self.awaited: tuple[str, float] | None = None
        self._turn = threading.Lock()  # of whoever runs rounds
        self._pause_s = 0.0
        self._thread = threading.Thread(target=self._run, name="sirtaki-eager", daemon=True)
        self._thread.start()

    # ── for submitting threads ───────────────────────────────────────────────────────────────────────────────────

    def unnamed(self, prefix: str) -> str:
        """A name for the next operation without one: the same on all ranks that submit these in the same order."""
        return self._pending.next_name(prefix)

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
        self._pending.add(work, wake=wake)
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
        self._pending.wake_if_any()
        return True

    def join(self, progress: Progress) -> ThreadWork:
        """This rank has no more data: it takes part in the others' all-reduces with zeros until all have joined."""
        self._failures.check()
        return self._pending.join(progress)

    @property
    def last_joined(self) -> int:
        """The rank that joined last."""
        return self._rounds.last_joined

    @property
    def concluded(self) -> int:
        """How many operations have been performed or refused: each has the same number on all ranks."""
        return self._rounds.concluded

    def note_progress(self) -> None:
        """The ranks that have not joined get on."""
        self._pending.moved_s = time.monotonic()

    def oldest_wait(self) -> Wait | None:
        """What has been pending the longest."""
        return self._pending.oldest_wait()

    def progress(self) -> str:
        """Pending names, for the watchdog."""
        return self._pending.describe()

    @property
    def pending(self) -> int:
        """Operations of this rank under way."""
        return len(self._pending)

    def has_submitted(self, name: str) -> bool:
        """An operation of this name is under way on this rank."""
        return name in self._pending

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        """The engine's thread."""
        while not self._rounds.ended and self._failures.error is None:
            self._pending.wait_for_business()
            with self._turn:
                try:
                    self._step()
                except CommError:
                    return  # those who wait have heard of it

    def _step(self) -> None:
        """With `_turn`, collective with the other ranks that have something to do: one round."""
        mine = self._pending.snapshot(self._pause_s)
        if mine is None or self._rounds.ended:
            return
        if (trace := timeline.active()) is not None and trace.mark_cycles:
            trace.instant("eager", "CYCLE_START", time.perf_counter())
        try:
            brought = self._rounds.run(mine)
        except BaseException as err:  # also an interrupt: a round cannot be left half done
            error = err if isinstance(err, CommError) else CommError(f"eager operations failed: {err!r}")
            self._failures.report(error)
            self._pending.fail(error)
            raise
        if brought:
            self._pause_s, self._pending.moved_s = 0.0, time.monotonic()
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
        self._pending.close()
        while self._thread.is_alive() and self._failures.error is None:
            self._thread.join(0.1)
        self._thread.join(timeout_s)
        if self._thread.is_alive() or not self._rounds.ended:
            return False
        self._rounds.close()
        return True
