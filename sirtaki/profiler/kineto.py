"""torch.profiler (Kineto), switched on and off between two steps, and what it has seen as plain records."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, record_function

from sirtaki.errors import RecordingError

from .clock_map import ClockMap, Mark, map_clock
from .tensor_edges import Reader, TensorWatch

logger = logging.getLogger(__name__)

MARK = "sirtaki.mark"
MEMORY = "[memory]"
ACCUMULATING = "torch::autograd::AccumulateGrad"
MARKS_AT_ONCE = 5
"""The quickest of them bounds the clock best; the first one after a pause is slow."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that it has seen.

    Attributes:
        thread: that it ran on; of a device, its stream.
        on_device: a kernel or copy of a device.
        annotation: not an operator, but somebody's name for a part of the program.
        sequence: autograd's number; -1 = none.
        launch: joins an operator with what it has put on a device; 0 = nothing.
    """

    name: str
    thread: int
    begin_s: float
    end_s: float
    on_device: bool = False
    annotation: bool = False
    sequence: int = -1
    launch: int = 0


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Memory was asked for, or given back.

    Attributes:
        device: such as "cpu" or "cuda:0".
        n_bytes: more; negative if it was given back.
        operator: the innermost one that was running; "" = none.
        accumulating: autograd was adding a gradient to `.grad`, hooks included.
    """

    at_s: float
    device: str
    address: int
    n_bytes: int
    operator: str
    accumulating: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All of it.

    Attributes:
        events: in no order.
        memory: in its order.
        thread: the one that has made the marks, which is the one that trains.
        clock: by which their times were told.
        readers: what operators of a step read; empty if it was not asked for.
    """

    events: Sequence[Event]
    thread: int
    clock: ClockMap
    memory: Sequence[MemoryEvent] = field(default=())
    readers: Sequence[Reader] = ()


class Kineto:
    """One use of torch.profiler, of which a process has one at a time."""

    def __init__(self, *, edges: bool = False) -> None:
        """Switches it on.

        Args:
            edges: until the next mark, what operators read is watched, too.

        Raises:
            RecordingError: somebody else uses it.
        """
        if torch._C._autograd._profiler_enabled():
            raise RecordingError("torch.profiler is in use by the script, so no operators are recorded")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell of its start and stop on the standard error
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._thread = threading.get_ident()
        self._brackets: list[tuple[float, float]] = []
        self._watch: TensorWatch | None = None
        self._watching = False
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.start()
        self.mark()
        if edges:
            self._watch, self._watching = TensorWatch(), True

    @property
    def here(self) -> bool:
        """The calling thread is the one that has switched it on, and may switch it off."""
        return threading.get_ident() == self._thread

    def mark(self) -> None:
        """Between two steps: makes the clocks comparable."""
        self._watch_no_more()
        for _ in range(MARKS_AT_ONCE):
            before_s = time.perf_counter()
            with record_function(MARK):
                pass
            self._brackets.append((before_s, time.perf_counter()))

    def _watch_no_more(self) -> None:
        if self._watch is not None and self._watching:
            self._watch.stop()
            self._watching = False

    def stop(self) -> Seen:
        """Switches it off.

        Raises:
            RecordingError: nothing can be told of what it has seen.
        """
        self.mark()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.stop()
        results: Any = getattr(self._profiler.profiler, "kineto_results", None)
        found = [] if results is None else results.events()
        made = sorted((event for event in found if event.name() == MARK), key=lambda event: event.start_ns())
        if len(made) != len(self._brackets):
            raise RecordingError(f"torch.profiler has recorded {len(made)} of our {len(self._brackets)} marks")
        clock = map_clock(
            [
                Mark(before_s=before_s, after_s=after_s, start_ns=event.start_ns(), duration_ns=event.duration_ns())
                for (before_s, after_s), event in zip(self._brackets, made, strict=True)
            ]
        )
        return Seen(
            events=list(_records(found, clock)),
            thread=made[0].start_thread_id(),
            clock=clock,
            memory=sorted(_memory(results.experimental_event_tree(), clock), key=lambda event: event.at_s),
            readers=() if self._watch is None else self._watch.readers(),
        )


def _records(found: Sequence[Any], clock: ClockMap) -> Iterator[Event]:  # Any: Kineto's events have no types
    for event in found:
        name = event.name()
        if name in (MARK, MEMORY):
            continue
        begin_ns, on_device = event.start_ns(), event.device_type() != DeviceType.CPU
        yield Event(
            name,
            event.device_resource_id() if on_device else event.start_thread_id(),
            clock.at(begin_ns),
            clock.at(begin_ns + event.duration_ns()),
            on_device,
            event.is_user_annotation(),
            event.sequence_nr(),
            event.linked_correlation_id() if on_device else event.correlation_id(),
        )


def _memory(tree: Sequence[Any], clock: ClockMap) -> Iterator[MemoryEvent]:  # Any: Kineto's events have no types
    left = [(event, "", False) for event in tree]
    while left:
        event, operator, accumulating = left.pop()
        if event.tag == _EventType.Allocation:
            told = event.extra_fields
            yield MemoryEvent(
                clock.at(event.start_time_ns), str(told.device), told.ptr, told.alloc_size, operator, accumulating
            )
            continue
        if event.tag == _EventType.TorchOp:
            operator, accumulating = event.name, accumulating or event.name.endswith(ACCUMULATING)
        left += [(inside, operator, accumulating) for inside in event.children]
