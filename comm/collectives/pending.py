"""What this rank has submitted and waits for, shared by the threads that submit and the one that runs rounds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sirtaki.comm.control.watchdog import Wait
from sirtaki.comm.transports.mpi import ThreadWork
from sirtaki.errors import CommError, MismatchError

from .eager_work import EagerWork
from .requests import Presence, Progress


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
