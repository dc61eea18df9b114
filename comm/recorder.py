"""Who is told what travels between ranks, for a recording; nobody, as a rule.

Whoever records is above this layer and gives itself to `start`. While nobody does, `current` is None, which is all
that an iteration asks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from . import timeline
from .plan import GradientLayout, Route


class ReadyMoment(NamedTuple):
    """The gradient at that place of the synchroniser's layout of that number has come."""

    layout: int
    place: int
    ready_s: float


class CopySpan(NamedTuple):
    """So many gradients have been copied into the flat buffers."""

    begin_s: float
    end_s: float
    n_gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedUnit:
    """A unit's way.

    Attributes:
        layout_number: of its layout among the synchroniser's.
        start, stop: elements of the flat buffer.
        issued_s: it was handed to its transport.
        began_s: the transport took it up; None where it does not tell.
        done_s: it was reduced.
    """

    layout_number: int
    layout: GradientLayout
    start: int
    stop: int
    stream: int
    route: Route
    issued_s: float
    began_s: float | None
    done_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedIteration:
    """One iteration of a synchroniser; moments as of `time.perf_counter`.

    Attributes:
        source: the synchroniser.
        number: iterations of that one before it.
        profiling: the order of gradients was profiled in it.
        end_s: all gradients were reduced.
        ready: empty unless somebody records.
    """

    source: object
    number: int
    profiling: bool
    first_ready_s: float
    backward_ended_s: float
    end_s: float
    ready: tuple[ReadyMoment, ...]
    copies: tuple[CopySpan, ...]
    units: tuple[TracedUnit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperation:
    """An eager operation of this rank: asked for, agreed upon, done."""

    name: str
    kind: str
    submitted_s: float
    agreed_s: float
    done_s: float
    n_bytes: int


class Recorder(Protocol):
    """Is told, quickly: nothing goes on meanwhile."""

    def iteration(self, traced: TracedIteration) -> None:
        """All gradients of an iteration are reduced; in the thread that trains."""

    def operation(self, traced: TracedOperation) -> None:
        """An eager operation is done; in another thread."""

    def end(self) -> None:
        """The job ends, or this rank's part in it; any thread, and more than once perhaps."""


current: Recorder | None = None
"""Who records now; None = nobody."""


def times_wanted() -> bool:
    """Transports are to note when units end."""
    return current is not None or timeline.current is not None


def start(recorder: Recorder) -> None:
    """From now on it is told; of an iteration only if it has not begun."""
    global current
    current = recorder


def stop() -> None:
    """Nobody is told any more."""
    global current
    current = None


os.register_at_fork(after_in_child=stop)


def end() -> None:
    """The job ends: so does the recording, if there is one."""
    recorder = current
    stop()
    if recorder is not None:
        recorder.end()
