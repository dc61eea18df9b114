"""Operations that each rank may submit in its own order: agreed by name, then performed in the same order everywhere.

One thread for each set of ranks. A rank joins a *round* only while it has something pending. In a round each rank
sets the bits of the known names that it has pending, and the AND of the vectors tells all ranks what may run
(AIACC § V-A). If any rank has something that the bits cannot say (a new name, a name whose tensor has changed, a join),
the round is followed by an exchange of everybody's pending operations; that is also where disagreements are found, by
all ranks at once.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.errors import CommError, MismatchError

from .failure import FailureBoard, poll_until
from .mpi_lanes import ThreadWork
from .negotiation import agree
from .requests import Kind, Signature, mismatch
from .watchdog import Wait

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

CACHE_CAPACITY = 1024
"""Names that have a bit; beyond that the longest unused one loses it."""

LONGEST_PAUSE_S = 2e-3
"""Between rounds that bring nothing: the ranks wait for different things."""

Perform = Callable[[Signature, "Sequence[torch.Tensor] | None", "MPI.Comm"], "list[torch.Tensor]"]
"""Runs an agreed operation; tensors are None on a rank that has joined and takes part with zeros."""


class EagerWork(ThreadWork):
    """An eager operation under way."""

    def __init__(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.signature, self.tensors = signature, tensors
        self.submitted_s = time.monotonic()
        self.results: list[torch.Tensor] = []

    @property
    def is_done(self) -> bool:
        """The result, or the error, is there."""
        return self._done.is_set()


class EagerEngine:
    """Eager operations over one set of ranks."""

    def __init__(self, comm: MPI.Comm, failures: FailureBoard, perform: Perform) -> None:
        """Collective over `comm`, of which the engine's thread gets two duplicates.

        Args:
            comm: the ranks that take part.
            failures: where a lost job is reported.
            perform: runs agreed operations, in the engine's thread.
        """
        self._votes, self._data = comm.Dup(), comm.Dup()
        self._failures, self._perform = failures, perform
        self._wake = threading.Condition()
        self._pending: dict[str, EagerWork] = {}
        self._disputed: dict[str, str] = {}  # names on which others disagree and that this rank has not submitted yet
        self._slots: OrderedDict[str, int] = OrderedDict()  # name → bit; in order of last use
        self._known: dict[str, Signature] = {}
        self._join: ThreadWork | None = None
        self._joined: set[int] = set()
        self._join_announced = False
        self.last_joined = -1
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sirtaki-eager", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return int(self._votes.size)

    def submit(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> EagerWork:
        """Starts an operation.

        Raises:
            ValueError: an operation of this name is under way on this rank.
            CommError: the job has failed.
        """
        self._failures.check()
        work = EagerWork(signature, tensors)
        with self._wake:
            if signature.name in self._pending:
                raise ValueError(
                    f"Requested to {signature.kind.value.lower()} a tensor with the same name as another tensor that "
                    f"is currently being processed: {signature.name!r}; give it another name= or synchronize() first"
                )
            if (dispute := self._disputed.pop(signature.name, None)) is not None:
                work.finish(MismatchError(dispute))
                return work
            self._pending[signature.name] = work
            self._wake.notify()
        return work

    def join(self) -> ThreadWork:
        """This rank has no more data: it takes part in the others' all-reduces with zeros until all have joined."""
        with self._wake:
            self._join, self._join_announced = ThreadWork(), False
            self._wake.notify()
        return self._join

    def oldest_wait(self) -> Wait | None:
        """What has been pending the longest."""
        works = list(self._pending.values())
        if not works:
            return None
        oldest = min(works, key=lambda work: work.submitted_s)
        return Wait(what=f"operation {oldest.signature.name!r}", since_s=oldest.submitted_s)

    def progress(self) -> str:
        """Pending names, for the watchdog."""
        names = list(self._pending)
        return f"has submitted {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" if names else ""

    # ── the engine's thread ──────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while True:
                with self._wake:
                    if pause_s:
                        self._wake.wait(pause_s)
                    self._wake.wait_for(lambda: self._closing or self._pending or self._join is not None)
                    if self._closing:
                        return
                    pending = dict(self._pending)
                pause_s = 0.0 if self._round(pending) else min(LONGEST_PAUSE_S, 2 * pause_s or 50e-6)
        except Exception as err:  # whatever it is, those who wait must hear of it
            error = err if isinstance(err, CommError) else CommError(f"eager operations failed: {err!r}")
            self._failures.report(error)
            with self._wake:
                for work in (*self._pending.values(), *([self._join] if self._join else [])):
                    work.finish(error)
                self._pending.clear()
            if not isinstance(err, CommError):
                raise

    def _round(self, pending: dict[str, EagerWork]) -> bool:
        """Collective: one round; True if anything was performed or settled."""
        joined = self._join is not None
        settled = all(self._known.get(name) == work.signature for name, work in pending.items())
        announces = not settled or (joined and not self._join_announced)
        bits = np.zeros(1 + CACHE_CAPACITY, dtype=np.bool_)
        bits[0] = not announces
        if joined:
            bits[1:] = True
        bits[[1 + self._slots[name] for name in pending if name in self._slots]] = True
        result = agree(bits, comm=self._votes, failures=self._failures)
        if result[0]:
            slots = set(np.flatnonzero(result[1:]).tolist())
            ready = [name for name, slot in self._slots.items() if slot in slots]
            signatures = {name: self._known[name] for name in ready}
        else:
            signatures = self._exchange(pending, joined)
        for name in sorted(signatures):
            self._run_one(signatures[name], pending.get(name))
        return bool(signatures) or self._settle_join()

    def _exchange(self, pending: dict[str, EagerWork], joined: bool) -> dict[str, Signature]:
        """Collective: everybody's pending operations; the ones that are pending everywhere and agree."""
        self._join_announced = joined
        mine = ([work.signature for work in pending.values()], joined)
        everybody = self._gather(pickle.dumps(mine))
        newly_joined = {rank for rank, (_, has_joined) in enumerate(everybody) if has_joined} - self._joined
        if newly_joined:
            self._joined |= newly_joined
            self.last_joined = max(newly_joined)
        by_name: dict[str, dict[int, Signature]] = {}
        for rank, (signatures, _) in enumerate(everybody):
            for signature in signatures:
                by_name.setdefault(signature.name, {})[rank] = signature
        ready = {}
        for name in sorted(by_name):
            by_rank = by_name[name]
            problem = mismatch(by_rank) or self._join_problem(by_rank)
            if problem is not None:
                self._dispute(name, problem, submitted=name in pending)
                continue
            some = next(iter(by_rank.values()))
            if not some.once:
                self._remember(by_rank.get(self._votes.rank, some))
            if len(by_rank) == self.size - len(self._joined - by_rank.keys()):
                ready[name] = some
        return ready

    def _join_problem(self, by_rank: dict[int, Signature]) -> str | None:
        kind = next(iter(by_rank.values())).kind
        if self._joined and kind is not Kind.ALLREDUCE:
            return f"{kind.value.capitalize()} is not supported with Join at this time."
        return None

    def _dispute(self, name: str, problem: str, *, submitted: bool) -> None:
        """The same error everywhere, also on ranks that submit the name later."""
        self._forget(name)
        with self._wake:
            if submitted:
                self._pending.pop(name).finish(MismatchError(problem))
            elif self._join is None:
                self._disputed[name] = problem

    def _remember(self, signature: Signature) -> None:
        """Gives the name a bit; deterministic, so that all ranks give it the same one."""
        self._known[signature.name] = signature
        if signature.name in self._slots:
            return
        if len(self._slots) == CACHE_CAPACITY:
            evicted, slot = self._slots.popitem(last=False)
            del self._known[evicted]
        else:
            slot = min(set(range(len(self._slots) + 1)) - set(self._slots.values()))
        self._slots[signature.name] = slot

    def _forget(self, name: str) -> None:
        if self._slots.pop(name, None) is not None:
            del self._known[name]

    def _run_one(self, signature: Signature, work: EagerWork | None) -> None:
        """Collective: performs one agreed operation; `work` is None on a rank that has joined."""
        name = signature.name
        if name in self._slots:
            self._slots.move_to_end(name)
        error: CommError | None = None
        try:
            own = work.signature if work is not None else signature
            results = self._perform(own, work.tensors if work is not None else None, self._data)
            if work is not None:
                work.results = results
        except CommError as err:
            error = err
        except Exception as err:
            error = CommError(f"{signature.kind.value.lower()} {name!r} failed: {err!r}")
        if work is not None:
            with self._wake:
                del self._pending[name]
            work.finish(error)

    def _settle_join(self) -> bool:
        """If all ranks have joined, they all know it from the same exchange."""
        if self._join is None or len(self._joined) < self.size:
            return False
        self._joined.clear()
        with self._wake:
            join, self._join = self._join, None
        join.finish()
        return True

    def _gather(self, data: bytes) -> list[tuple[list[Signature], bool]]:
        """Collective: `data` of all ranks, unpickled; polls, so that a lost job is noticed."""
        own = np.frombuffer(data, dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        request = self._votes.Iallgather(np.array([own.size], dtype=np.int64), lengths)
        poll_until(request.Test, failures=self._failures)
        gathered = np.empty(int(lengths.sum()), dtype=np.uint8)
        request = self._votes.Iallgatherv(own, [gathered, lengths.tolist()])
        poll_until(request.Test, failures=self._failures)
        ends = np.cumsum(lengths)
        return [pickle.loads(gathered[end - n : end].tobytes()) for end, n in zip(ends, lengths, strict=True)]

    def close(self) -> None:
        """Ends the thread; what is pending fails."""
        with self._wake:
            self._closing = True
            self._wake.notify()
            for work in self._pending.values():
                work.finish(CommError("shut down while the operation was pending"))
            self._pending.clear()
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._votes.Free()
            self._data.Free()
