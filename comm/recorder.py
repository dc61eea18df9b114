"""Interface through which the communication layer reports the times of iterations and operations to a recorder.

A higher layer creates the recorder, and passes it to `start`. If nothing is recorded, `current` is None, and the only
cost per iteration is this check.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from . import timeline
from .plan import GradientLayout, Route


class ReadyMoment(NamedTuple):
    """Time `ready_s` at which the backward pass computed gradient number `place` of gradient layout number `layout`."""

    layout: int
    place: int
    ready_s: float


class CopySpan(NamedTuple):
    """Times by `time.perf_counter` at which a copy of `n_gradients` gradients into flat buffers began and ended."""

    begin_s: float
    end_s: float
    n_gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedUnit:
    """Times of the all-reduce of one unit (bucket, a range of a flat buffer), by `time.perf_counter`.

    Attributes:
        layout_number: index of `layout` among the layouts of the gradient pipeline.
        layout: layout of the gradients in the unit's flat buffer.
        start: first element of the unit in the flat buffer.
        stop: end of the unit's elements.
        stream: number of the stream (connection or CUDA stream) that reduced the unit.
        route: transport and algorithm that reduced the unit.
        issued_s: time at which the all-reduce was launched.
        began_s: time at which the transport started the all-reduce. None = unknown.
        done_s: time at which the all-reduce ended.
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
    """Times of one training iteration of a gradient pipeline, by `time.perf_counter`.

    Attributes:
        source: the gradient pipeline.
        number: number of earlier iterations of this pipeline.
        profiling: True if the iteration was used to profile the order in which the backward pass computes gradients.
        first_ready_s: time at which the backward pass had computed its first gradient.
        backward_ended_s: time at which the backward pass ended.
        end_s: time at which all gradients were reduced.
        ready: times at which the backward pass had computed each gradient. Empty without a recorder.
        copies: times of copies of gradients into flat buffers.
        units: times of the units (buckets) that were reduced in the iteration.
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
    """Times of one eager operation: its submission on this rank, the agreement of all ranks to run it, and its end."""

    name: str
    kind: str
    submitted_s: float
    agreed_s: float
    done_s: float
    n_bytes: int


class Recorder(Protocol):
    """Receiver of the times of training iterations and eager operations.

    Its methods must be fast, because they block the calling thread.
    """

    def iteration(self, traced: TracedIteration) -> None:
        """Record a training iteration. Called by the training thread, after all its gradients are reduced."""

    def operation(self, traced: TracedOperation) -> None:
        """Record an eager operation. Called after its end, by the thread that runs eager operations."""

    def end(self) -> None:
        """End the recording, because the job or this rank ends. Thread-safe. May be called several times."""


current: Recorder | None = None
"""The recorder that receives times of iterations and operations. None = nothing is recorded."""


def times_wanted() -> bool:
    """Return whether transports must measure when the all-reduce of a unit (bucket) starts and ends."""
    return current is not None or timeline.current is not None


def start(recorder: Recorder) -> None:
    """Make `recorder` receive the times of all later iterations and operations, but not of the current iteration."""
    global current
    current = recorder


def stop() -> None:
    """Stop recording, without calling `Recorder.end`."""
    global current
    current = None


os.register_at_fork(after_in_child=stop)


def end() -> None:
    """Stop recording, and call `end` of the recorder, if there is one. Called when the job or this rank ends."""
    recorder = current
    stop()
    if recorder is not None:
        recorder.end()
