"""Operators of a step, taken from torch.profiler's events, with the tensors that join them."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import threading
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, TypeVar

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _EventType
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, record_function

from sirtaki.autotune.model.replayer import Phase
from sirtaki.errors import RecordingError

from .recording import Operator, PhaseSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One mark in both clocks.

    Attributes:
        before_s, after_s: of `time.perf_counter`, around it.
        start_ns, duration_ns: of the other clock.
    """

    before_s: float
    after_s: float
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMap:
    """Translates moments of torch.profiler's clock into ours.

    Attributes:
        origin_ns: a moment of that clock.
        origin_s: the same of ours.
        error_s: by which it may be wrong.
    """

    origin_ns: int
    origin_s: float
    error_s: float

    def at(self, moment_ns: int) -> float:
        """The moment in seconds of our clock."""
        return self.origin_s + (moment_ns - self.origin_ns) * 1e-9


def map_clock(marks: Sequence[Mark]) -> ClockMap:
    """Find the clock that all marks allow, or that contradicts them least.

    Raises:
        RecordingError: there is no mark.
    """
    if not marks:
        raise RecordingError("torch.profiler has recorded none of our marks, so its times cannot be told")
    origin_ns = marks[0].start_ns
    earliest_s, latest_s = float("-inf"), float("inf")
    for mark in marks:
        since_s = (mark.start_ns - origin_ns) * 1e-9
        earliest_s = max(earliest_s, mark.before_s - since_s)
        latest_s = min(latest_s, mark.after_s - mark.duration_ns * 1e-9 - since_s)
    return ClockMap(origin_ns=origin_ns, origin_s=(earliest_s + latest_s) / 2, error_s=abs(latest_s - earliest_s) / 2)


logger = logging.getLogger(__name__)

Node = Mapping[str, Any]  # Any: JSON
Tensor = tuple[int, int, int, int, int, str]
"""Its number, its storage's, offset, elements, bytes of one, device."""

Storage = tuple[int, int]
"""Its number, and bytes of an element."""

_USER_SCOPE = 7
"""Of what somebody has named: no operator."""

_BACKWARD = "autograd::engine::evaluate_function: "
_MUTABLE = re.compile(r"\(\w+!\)")


@dataclass(frozen=True, slots=True)
class Reader:
    """One operator, and the places of those whose results it reads."""

    name: str
    after: tuple[int, ...]


class TensorWatch:
    """Watches one step of the calling process."""

    def __init__(self) -> None:
        """Watch from now on; a step takes about three times as long."""
        number, self._path = tempfile.mkstemp(prefix="sirtaki-", suffix=".json")
        os.close(number)
        self._observer = ExecutionTraceObserver()
        self._observer.register_callback(self._path)
        self._observer.start()

    def stop(self) -> None:
        """The step has ended."""
        self._observer.stop()
        self._observer.unregister_callback()

    def readers(self) -> tuple[Reader, ...]:
        """What it has seen; takes a second for 5,000 operators, those inside others counted. Once only."""
        try:
            with open(self._path, encoding="utf-8") as file:
                return readers(json.load(file)["nodes"])
        except (OSError, ValueError, KeyError, TypeError, IndexError) as err:
            logger.warning("what operators read cannot be told: %r", err)
            return ()
        finally:
            os.unlink(self._path)


def readers(nodes: Sequence[Node]) -> tuple[Reader, ...]:
    """Return the operators of the thread with the most of them, in the order in which they began.

    Raises:
        KeyError, TypeError, IndexError: an execution trace looks otherwise.
    """
    ordered = sorted(nodes, key=lambda node: node["id"])
    attributes = {node["id"]: {each["name"]: each["value"] for each in node["attrs"]} for node in ordered}
    outermost: dict[int, int] = {}  # by number of a node, that of the operator which nobody but the script has called
    threads: dict[int, list[Node]] = {}
    for node in ordered:
        own = attributes[node["id"]]
        if own["scope"] == _USER_SCOPE:
            continue
        number = int(node["id"])
        outermost[number] = outermost.get(node["ctrl_deps"], number)
        threads.setdefault(own["tid"], []).append(node)
    # Who has made what, and who has made or written into a storage last; operators by their number in the trace.
    made: dict[Tensor, int] = {}
    changed: dict[Storage, int] = {}
    names: dict[int, str] = {}
    reads: dict[int, set[int]] = {}
    for node in max(threads.values(), key=len, default=[]):
        operator, inputs = outermost[node["id"]], node["inputs"]["values"]
        if node["id"] == operator:
            names[operator] = node["name"].removeprefix(_BACKWARD).removeprefix("torch::autograd::")
            reads[operator] = set()
        taken = list(_tensors(inputs))
        for tensor in taken:
            makers = {made.get(tensor), changed.get(_storage(tensor))}
            reads[operator] |= {maker for maker in makers if maker is not None and maker != operator}
        known = {_storage(tensor) for tensor in taken}
        for tensor in _tensors(node["outputs"]["values"]):
            if tensor not in taken:
                made[tensor] = operator
            if _storage(tensor) not in known:
                changed[_storage(tensor)] = operator
        schema = str(attributes[node["id"]].get("op_schema", ""))
        changed |= dict.fromkeys(_written(inputs, schema), operator)
    places = {operator: place for place, operator in enumerate(names)}
    return tuple(
        Reader(name, tuple(sorted(places[one] for one in reads[operator]))) for operator, name in names.items()
    )


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:  # Any: JSON
    """Yield the tensors among values, those in lists too."""
    for value in values:
        if isinstance(value, list):
            if len(value) == 6 and isinstance(value[5], str):
                if value[0] and value[1]:  # one that is not there has 0
                    yield value[0], value[1], value[2], value[3], value[4], value[5]
            else:
                yield from _tensors(value)


def _storage(tensor: Tensor) -> Storage:
    return tensor[1], tensor[4]


def _written(values: Sequence[Any], schema: str) -> Iterator[Storage]:
    """Storages of arguments that an operator writes into, by its schema."""
    inside = schema[schema.find("(") + 1 : schema.rfind(" -> ")]
    for place, argument in enumerate(inside.split(", ")):
        if _MUTABLE.search(argument) and place < len(values):
            yield from map(_storage, _tensors([values[place]]))


def with_edges(pieces: Sequence[tuple[int, Operator]], found: Sequence[Reader]) -> tuple[Operator, ...]:
    """Operators of a step with what they read, as far as it was seen in the step that was watched.

    Args:
        pieces: by their begin; where an operator is cut its parts have one number, and these ascend in a lane.
        found: of the step that was watched; what another one does otherwise reads nothing.
    """
    first, last = dict[int, int](), dict[int, int]()
    for place, (operator, piece) in enumerate(pieces):
        if piece.lane == 0:
            first.setdefault(operator, place)
            last[operator] = place
    operators = [piece for _, piece in pieces]
    own = sorted(first)
    pairs = _pairs([one.name for one in found], [operators[first[operator]].name for operator in own]) if found else {}
    for place, other in pairs.items():
        reader = first[own[other]]
        after = tuple(last[own[pairs[maker]]] for maker in found[place].after if maker in pairs)
        operators[reader] = replace(operators[reader], after=after)
    return tuple(operators)


def _pairs(watched: Sequence[str], names: Sequence[str]) -> dict[int, int]:
    """Map places in the one list to those in the other; mostly, lists are equal."""
    if watched == names:
        return {place: place for place in range(len(names))}
    blocks = SequenceMatcher(None, watched, names, autojunk=False).get_matching_blocks()
    return {block.a + count: block.b + count for block in blocks for count in range(block.size)}


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
    """All that torch.profiler has seen.

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
        """Make the clocks comparable; called between two steps."""
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


BACKWARD = "autograd::engine::evaluate_function: "
LOADER = "enumerate(DataLoader)#"
ZEROING = "Optimizer.zero_grad#"

Interval = tuple[float, float]
"""(begin_s, end_s)."""

LEAST_S = 1e-9
"""What is shorter than a clock can tell is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, as the recorder knows it.

    Attributes:
        updates: of its optimizers.
        cuts: when gradients were copied, or waited for, by the thread that trains; no operator lies there.
    """

    begin_s: float
    end_s: float
    updates: tuple[Interval, ...]
    cuts: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperators:
    """A step's operators and phases."""

    operators: tuple[Operator, ...]
    spans: tuple[PhaseSpan, ...]


ModuleOf = Callable[[Event], int]
"""The place of the module that an operator on the training thread belongs to; -1 = none."""


def _of_none(_: Event) -> int:
    return -1


def operators_of(
    seen: Seen, steps: Sequence[Step], module_of: ModuleOf = _of_none
) -> tuple[list[StepOperators], tuple[str, ...]]:
    """Return the operators of each step, and the names of the lanes."""
    lanes, names = _lanes(seen)
    ordered = sorted(seen.events, key=lambda event: (event.begin_s, -event.end_s))
    begins = [event.begin_s for event in ordered]
    found = []
    for step in steps:
        events = ordered[bisect_right(begins, step.begin_s) : bisect_right(begins, step.end_s)]
        found.append(_of_step(step, events, lanes, module_of, seen.readers))
    return found, names


def _lanes(seen: Seen) -> tuple[dict[tuple[bool, int], int], tuple[str, ...]]:
    """Numbers of threads and of devices' streams, the training thread's being 0, and what they are."""
    keys = sorted({(event.on_device, event.thread) for event in seen.events} - {(False, seen.thread)})
    names = [f"stream {thread} of the device" if on_device else f"thread {thread}" for on_device, thread in keys]
    return {key: number for number, key in enumerate([(False, seen.thread), *keys])}, ("training thread", *names)


def _of_step(
    step: Step,
    events: Sequence[Event],
    lanes: Mapping[tuple[bool, int], int],
    module_of: ModuleOf,
    readers: Sequence[Reader],
) -> StepOperators:
    loading = [(event.begin_s, event.end_s) for event in events if event.annotation and event.name.startswith(LOADER)]
    zeroing = [(event.begin_s, event.end_s) for event in events if event.annotation and event.name.startswith(ZEROING)]
    top = list(_top_level([event for event in events if not event.annotation]))
    on_host = [event for event in top if not event.on_device]
    backward = [event for event in on_host if event.name.startswith(BACKWARD)]
    forward_s = _forward_from(step, on_host, backward, loading)
    last_backward_s = max((event.begin_s for event in backward), default=step.begin_s)

    def phase_of(event: Event) -> Phase:
        if event.name.startswith(BACKWARD):
            return Phase.BACKWARD
        for phase, spans in ((Phase.UPDATE, step.updates), (Phase.DATA, loading), (Phase.OTHER, zeroing)):
            if any(begin_s <= event.begin_s < end_s for begin_s, end_s in spans):
                return phase
        return Phase.FORWARD if forward_s <= event.begin_s < last_backward_s else Phase.OTHER

    phases = [phase_of(event) for event in on_host]
    launched = _launched(events, on_host, phases)
    operators = [
        *(_operator(event, phase, lanes, module_of(event)) for event, phase in zip(on_host, phases, strict=True)),
        *(_operator(event, launched.get(event.launch, Phase.OTHER), lanes, -1) for event in top if event.on_device),
    ]
    pieces = [
        (place, piece)
        for place, one in enumerate(operators)
        for piece in (_cut(one, step.cuts) if one.lane == 0 else (one,))
    ]
    pieces.sort(key=lambda pair: pair[1].begin_s)
    spans = [
        *(PhaseSpan(phase=Phase.DATA, begin_s=begin_s, end_s=end_s) for begin_s, end_s in loading),
        *_runs([one for _, one in pieces if one.lane == 0]),
        *(PhaseSpan(phase=Phase.UPDATE, begin_s=begin_s, end_s=end_s) for begin_s, end_s in step.updates),
    ]
    return StepOperators(
        operators=with_edges(pieces, readers),
        spans=tuple(sorted(spans, key=lambda span: span.begin_s)),
    )


def _forward_from(
    step: Step, on_host: Sequence[Event], backward: Sequence[Event], loading: Sequence[Interval]
) -> float:
    """What comes before the data is not forward, such as metrics of the step before; unless it has a backward."""
    numbers = {event.sequence for event in backward if event.sequence >= 0}
    # What makes no node of the graph bears the number of the next one, too: the last of a number has made it.
    made = {event.sequence: event.begin_s for event in on_host if not event.name.startswith(BACKWARD)}
    first_s = min((made[number] for number in numbers & made.keys()), default=0.0)
    return next((end_s for _, end_s in loading if end_s <= first_s), step.begin_s)


def _top_level(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events that lie in no other one of their lane; `events` by their begin, the longest first."""
    ends_s: dict[tuple[bool, int], float] = {}
    for event in events:
        key = event.on_device, event.thread
        if event.begin_s >= ends_s.get(key, 0.0):
            ends_s[key] = event.end_s
            yield event


def _launched(events: Sequence[Event], on_host: Sequence[Event], phases: Sequence[Phase]) -> dict[int, Phase]:
    """Map launch numbers to the phase of the operator that has put something on a device."""
    begins = [event.begin_s for event in on_host]
    found: dict[int, Phase] = {}
    if any(event.on_device for event in events):
        for event in events:
            place = bisect_right(begins, event.begin_s) - 1
            if event.launch and not event.on_device and place >= 0:
                found[event.launch] = phases[place]
    return found


def _operator(event: Event, phase: Phase, lanes: Mapping[tuple[bool, int], int], module: int) -> Operator:
    return Operator(
        name=event.name.removeprefix(BACKWARD).removeprefix("torch::autograd::"),
        lane=lanes[event.on_device, event.thread],
        begin_s=event.begin_s,
        end_s=event.end_s,
        phase=phase,
        sequence=event.sequence,
        module=module,
    )


def _cut(operator: Operator, cuts: Sequence[Interval]) -> Iterator[Operator]:
    """Yield what is left of an operator outside of these intervals, which follow each other."""
    begin_s = operator.begin_s
    for cut_begin_s, cut_end_s in cuts:
        if cut_end_s > begin_s and cut_begin_s < operator.end_s:
            if cut_begin_s - begin_s > LEAST_S:
                yield replace(operator, begin_s=begin_s, end_s=cut_begin_s)
            begin_s = cut_end_s
    if operator.end_s - begin_s > LEAST_S:
        yield replace(operator, begin_s=begin_s)


def _runs(operators: Sequence[Operator]) -> Iterator[PhaseSpan]:
    """Forward and backward passes: neighbours of one phase, whatever other phases have in between."""
    run: PhaseSpan | None = None
    for one in sorted(operators, key=lambda one: one.begin_s):
        if one.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        if run is not None and run.phase is one.phase:
            run = replace(run, end_s=max(run.end_s, one.end_s))
            continue
        if run is not None:
            yield run
        run = PhaseSpan(phase=one.phase, begin_s=one.begin_s, end_s=one.end_s)
    if run is not None:
        yield run


Moments = Mapping[tuple[object, ...], float]
"""Of one step, by what happened then; what has the same name is the same in every step."""

_Span = TypeVar("_Span", Operator, PhaseSpan)


def borrowed(seen: StepOperators, there: Moments, here: Moments) -> StepOperators:
    """Return what was seen in one step as it would have been seen in another.

    Args:
        seen: of the step of `there`.
        there: when things happened in it.
        here: when they happened in the other one; what only one of them has does not count.
    """
    pairs = sorted((there[key], here[key]) for key in there.keys() & here.keys())
    kept = pairs[:1]
    for there_s, here_s in pairs[1:]:
        # What happened in another order, such as gradients of two threads, is no common moment.
        if there_s > kept[-1][0] and here_s >= kept[-1][1]:
            kept.append((there_s, here_s))
    theirs_s, ours_s = np.array(kept).T

    def moved(one: _Span) -> _Span:
        """Straight between moments that both have."""
        begin_s, end_s = np.interp([one.begin_s, one.end_s], theirs_s, ours_s)
        return replace(one, begin_s=float(begin_s), end_s=float(end_s))

    return StepOperators(operators=tuple(map(moved, seen.operators)), spans=tuple(map(moved, seen.spans)))
