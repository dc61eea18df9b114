"""What the job and what serves it know of an optimizer's gradients: that they take part in iterations of some ranks."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from sirtaki.comm.gradients.in_flight import InFlight

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

    def waits(self, stage: Stage) -> Waiting:
        """Inside, this rank waits for others; the watchdog and the other ranks hear of it if that lasts."""
        return Waiting(self, stage)

    def given(self, *, missing: bool) -> int:
        """Iterations to which this rank has given all its gradients; `missing`: some of the current one's."""
        waiting = self.waiting
        return self.finished + (not missing or (waiting is not None and waiting[0] is not Stage.ASK))


class Waiting:
    """While this rank waits for others. `contextlib.contextmanager` costs several times as much."""

    def __init__(self, progress: Progress, stage: Stage) -> None:
        self._progress, self._stage = progress, stage

    def __enter__(self) -> None:
        self._progress.waiting = self._stage, time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._progress.waiting = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a participant's iterations run now.

    Attributes:
        iteration: the number of the current one.
        setting: in words.
        tuning: it may be a trial's.
    """

    iteration: int
    setting: str
    tuning: bool


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
        ...

    @property
    def given(self) -> int:
        """Iterations to which this rank has given all its gradients."""
        ...

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""
        ...

    @property
    def in_flight(self) -> InFlight | None:
        """What a device may still be busy with; None where nothing is reduced. Any thread."""
        ...

    @property
    def running(self) -> Running | None:
        """What its iterations run; None where nothing is reduced. Any thread."""
        ...

    def remember(self) -> None:
        """Stores what an unfinished warm-up has found. Idempotent."""
        ...

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that the other ranks have not begun to end."""
        ...

    def finish_joined(self) -> None:
        """Collective: ends an iteration on a rank that has joined."""
        ...

    def settle(self) -> None:
        """Blocks until no end of an iteration is put off any more; not collective."""
        ...

    def flush(self) -> None:
        """Sends what has not left if all gradients of this iteration have come; waits for nobody."""
        ...

    def drop_failed(self) -> None:
        """Collective if a backward pass has raised in this iteration: ends it, and leaves gradients as they are."""
        ...

    def drop_accumulated(self) -> None:
        """Gradients of fewer backward passes than are added up before they are reduced do not count."""
        ...

    def close(self, reason: str) -> None:
        """Not collective: gradients are not reduced any more, because of `reason`. Idempotent."""
        ...


class Participants:
    """Those of one job that are in use or not collected yet, the oldest first: they live as long as users keep them.

    Attributes:
        n_begun: how often a participant's first gradient of a backward pass has come on this rank. It is the same for
            all that fail in one pass, and another in the next.
    """

    def __init__(self) -> None:
        self.n_begun = 0
        self._all: list[weakref.ref[Participant]] = []
        self._last_finished: weakref.ref[Participant] | None = None

    def __iter__(self) -> Iterator[Participant]:
        return iter([participant for reference in self._all if (participant := reference()) is not None])

    def add(self, participant: Participant) -> None:
        """Keeps a weak reference to it."""
        self._all = [weakref.ref(there) for there in (*self, participant)]

    def remove(self, participant: Participant) -> None:
        """It is closed."""
        self._all = [weakref.ref(there) for there in self if there is not participant]

    def begin_backward(self, participant: Participant) -> None:
        """Its first gradient of a backward pass has come. Collective if the pass before has raised."""
        if participant.failed_in is not None:
            self._drop_failed(participant.failed_in)
        self.n_begun += 1

    def _drop_failed(self, number: int) -> None:
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

    def flush(self) -> None:
        """Sends what has not left of iterations whose gradients have all come; waits for nobody."""
        for participant in self:
            participant.flush()

    def note_finished(self, participant: Participant) -> None:
        """This rank ends an iteration of it."""
        self._last_finished = weakref.ref(participant)

    @property
    def in_use(self) -> list[Participant]:
        """The newest one, and the one that was stepped last."""
        last = None if self._last_finished is None else self._last_finished()
        return [*list(self)[-1:], *([] if last is None else [last])]
