"""The interface through which communication is recorded.

The recorder belongs to a higher layer, which passes it to `start`. Without a recording, `current` is None, and an
iteration only checks this.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from . import timeline
from .plan import GradientLayout, Route


class ReadyMoment(NamedTuple):
    """Time at which gradient `place` of layout `layout` of the synchroniser became ready."""

    layout: int
    place: int
    ready_s: float


class CopySpan(NamedTuple):
    """Time of copying `n_gradients` gradients into flat buffers."""

    begin_s: float
    end_s: float
    n_gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedUnit:
    """Times of one unit, by `time.perf_counter`.

    Attributes:
        layout_number: index of the unit's layout in the synchroniser.
        layout: layout of the unit's flat buffer.
        start: first element in the flat buffer.
        stop: end of the elements.
        stream: stream of the unit.
        route: transport and algorithm.
        issued_s: time of launch.
        began_s: time at which the transport started to reduce it. None = unknown.
        done_s: time at which it was reduced.
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
    """Times of one iteration of a synchroniser, by `time.perf_counter`.

    Attributes:
        source: the synchroniser.
        number: number of earlier iterations of this synchroniser.
        profiling: the order of gradients was profiled in this iteration.
        first_ready_s: time at which the first gradient was ready.
        backward_ended_s: end of the backward pass.
        end_s: time at which all gradients were reduced.
        ready: times at which gradients became ready. Empty without a recorder.
        copies: copies into flat buffers.
        units: units of the iteration.
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
    """Times of one eager operation of this rank: when it was submitted, agreed by all ranks, and done."""

    name: str
    kind: str
    submitted_s: float
    agreed_s: float
    done_s: float
    n_bytes: int


class Recorder(Protocol):
    """Consumer of recorded events. Its methods must return quickly, because the calling thread waits."""

    def iteration(self, traced: TracedIteration) -> None:
        """Record an iteration whose gradients are all reduced. Called by the training thread."""

    def operation(self, traced: TracedOperation) -> None:
        """Record an eager operation that is done. Called by the thread of eager operations."""

    def end(self) -> None:
        """End the recording, because the job or this rank ends. Thread-safe. May be called several times."""


current: Recorder | None = None
"""The recorder in use. None = no recording."""


def times_wanted() -> bool:
    """Return whether transports must record when units start and end."""
    return current is not None or timeline.current is not None


def start(recorder: Recorder) -> None:
    """Pass later events to `recorder`. The iteration in progress is not recorded."""
    global current
    current = recorder


def stop() -> None:
    """Stop recording, without calling `Recorder.end`."""
    global current
    current = None


os.register_at_fork(after_in_child=stop)


def end() -> None:
    """End the recording, if there is one, because the job ends."""
    recorder = current
    stop()
    if recorder is not None:
        recorder.end()
