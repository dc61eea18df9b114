"""Record the operators, their data dependencies, and the memory use of training steps, with torch.profiler and module
hooks.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import tempfile
import threading
import time
import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch._C._profiler import _EventType
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, record_function
from torch.utils._pytree import tree_leaves

from sirtaki.autotune.model.replayer import Phase
from sirtaki.errors import RecordingError
from sirtaki.uncompiled import something_is_compiled

from .recording import Allocation, Holds, Module, ModuleCall, Operator, PhaseSpan, StepMemory, phase_at

logger = logging.getLogger(__name__)

BACKWARD = "autograd::engine::evaluate_function: "
ACCUMULATING = "torch::autograd::AccumulateGrad"
LOADER = "enumerate(DataLoader)#"
ZEROING = "Optimizer.zero_grad#"

Interval = tuple[float, float]
"""Interval of time: (begin, end) in seconds."""


def _own_name(name: str) -> str:
    return name.removeprefix(BACKWARD).removeprefix("torch::autograd::")


# ── clocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Mark(NamedTuple):
    """One event that was timed by two clocks, for the conversion of times between the clocks.

    Attributes:
        before_s, after_s: readings of `time.perf_counter` immediately before and after the event.
        start_ns, duration_ns: begin and duration of the event by torch.profiler's clock.
    """

    before_s: float
    after_s: float
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMap:
    """Conversion of times from torch.profiler's clock to `time.perf_counter`.

    Attributes:
        origin_ns: a reading of torch.profiler's clock.
        origin_s: the reading of `time.perf_counter` at the same moment.
        error_s: largest possible error of a converted time.
    """

    origin_ns: int
    origin_s: float
    error_s: float

    def at(self, moment_ns: int) -> float:
        """Convert a reading of torch.profiler's clock to a reading of `time.perf_counter`."""
        return self.origin_s + (moment_ns - self.origin_ns) * 1e-9


def map_clock(marks: Sequence[Mark]) -> ClockMap:
    """Fit a conversion from torch.profiler's clock to `time.perf_counter` to marks (events timed by both clocks).

    The conversion agrees with all marks, or disagrees as little as possible.
    """
    origin_ns = marks[0].start_ns
    since_s = [(mark.start_ns - origin_ns) * 1e-9 for mark in marks]
    earliest_s = max(mark.before_s - at_s for mark, at_s in zip(marks, since_s, strict=True))
    latest_s = min(mark.after_s - mark.duration_ns * 1e-9 - at_s for mark, at_s in zip(marks, since_s, strict=True))
    return ClockMap(origin_ns=origin_ns, origin_s=(earliest_s + latest_s) / 2, error_s=abs(latest_s - earliest_s) / 2)


# ── data dependencies ────────────────────────────────────────────────────────────────────────────────────────────────

Node = Mapping[str, Any]  # Any, because values of JSON have no common type.
Tensor = tuple[int, int, int, int, int, str]
"""Tensor in an execution trace: (tensor id, storage id, offset, number of elements, bytes per element, device)."""

Storage = tuple[int, int]
"""Storage in an execution trace: (storage id, bytes per element)."""

_USER_SCOPE = 7
"""Value of an execution trace's field `scope` for `record_function` annotations, which are not operators."""

_MUTABLE = re.compile(r"\(\w+!\)")


class Reader(NamedTuple):
    """One operator of a step (`name`), with the indices of the operators that produced its inputs (`after`)."""

    name: str
    after: tuple[int, ...]


class TensorWatch:
    """Recorder of the data dependencies between the operators of one step. It uses PyTorch's `ExecutionTraceObserver`.

    The constructor starts the recording. The recorded step takes about three times as long.
    """

    def __init__(self) -> None:
        number, self._path = tempfile.mkstemp(prefix="sirtaki-", suffix=".json")
        os.close(number)
        self._observer = ExecutionTraceObserver()
        self._observer.register_callback(self._path)
        self._observer.start()

    def stop(self) -> None:
        """Stop recording data dependencies, at the end of the step."""
        self._observer.stop()
        self._observer.unregister_callback()

    def readers(self) -> tuple[Reader, ...]:
        """Return the operators of the recorded step with their data dependencies, and delete the trace file. May be
        called only once.

        Takes about a second for 5,000 operators, nested operators included.
        """
        try:
            with open(self._path, encoding="utf-8") as file:
                return readers(json.load(file)["nodes"])
        except (OSError, ValueError, KeyError, TypeError, IndexError) as err:
            logger.warning(
                "data dependencies between operators are missing in the recording, because PyTorch's execution trace "
                "could not be read: %r; Chakra traces (`sirtaki trace --chakra`) will lack them, too; to get them, "
                "record the job again",
                err,
            )
            return ()
        finally:
            os.unlink(self._path)


def readers(nodes: Sequence[Node]) -> tuple[Reader, ...]:
    """Return the operators in an execution trace with their data dependencies, in the order in which they began. Only
    the thread that ran most operators is considered.

    Raises:
        KeyError, TypeError, IndexError: the execution trace has an unexpected format.
    """
    attributes = {node["id"]: {each["name"]: each["value"] for each in node["attrs"]} for node in nodes}
    outermost: dict[int, int] = {}  # {node of the trace: id of the top-level operator that contains it}
    threads = defaultdict[int, list[Node]](list)
    for node in sorted(nodes, key=lambda node: node["id"]):
        number = int(node["id"])
        if attributes[number]["scope"] != _USER_SCOPE:
            outermost[number] = outermost.get(node["ctrl_deps"], number)
            threads[attributes[node["id"]]["tid"]].append(node)
    # Store the operator that produced each tensor (`made`), and the last operator that wrote to each storage
    # (`changed`).
    made: dict[Tensor, int] = {}
    changed: dict[Storage, int] = {}
    names: dict[int, str] = {}
    reads: dict[int, set[int]] = {}
    for node in max(threads.values(), key=len, default=[]):
        operator, inputs = outermost[node["id"]], node["inputs"]["values"]
        if node["id"] == operator:
            names[operator], reads[operator] = _own_name(node["name"]), set()
        taken = list(_tensors_in(inputs))
        makers = {maker for one in taken for maker in (made.get(one, operator), changed.get(_storage(one), operator))}
        reads[operator] |= makers - {operator}
        known = set(map(_storage, taken))
        for tensor in _tensors_in(node["outputs"]["values"]):
            if tensor not in taken:
                made[tensor] = operator
            if _storage(tensor) not in known:
                changed[_storage(tensor)] = operator
        schema = str(attributes[node["id"]].get("op_schema", ""))
        arguments = schema[schema.find("(") + 1 : schema.rfind(" -> ")].split(", ")
        for argument, value in zip(arguments, inputs, strict=False):
            if _MUTABLE.search(argument):  # The schema says that the operator writes into this argument.
                changed.update((_storage(tensor), operator) for tensor in _tensors_in([value]))
    places = {operator: place for place, operator in enumerate(names)}
    return tuple(
        Reader(name, tuple(sorted(places[one] for one in reads[operator]))) for operator, name in names.items()
    )


def _tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:  # Any, because values of JSON have no common type.
    """Yield the tensors among the JSON values of an execution trace, including those in nested lists."""
    for value in values:
        if isinstance(value, list):
            if len(value) == 6 and isinstance(value[5], str):
                if value[0] and value[1]:  # Skip undefined tensors, whose ids are 0.
                    yield value[0], value[1], value[2], value[3], value[4], value[5]
            else:
                yield from _tensors_in(value)


def _storage(tensor: Tensor) -> Storage:
    return tensor[1], tensor[4]


def with_edges(pieces: Sequence[tuple[int, Operator]], found: Sequence[Reader]) -> tuple[Operator, ...]:
    """Return the operators of one step, with the data dependencies that were recorded in another step.

    Args:
        pieces: (id of the operator, part of the operator), sorted by begin. An operator that was split has several
            parts. Ids ascend within a lane (thread or stream).
        found: operators of the other step, with their data dependencies. They are matched by name and order. An
            operator without a match gets no dependencies.
    """
    operators = [piece for _, piece in pieces]
    first, last = dict[int, int](), dict[int, int]()
    for place, (operator, piece) in enumerate(pieces):
        if piece.lane == 0:
            first.setdefault(operator, place)
            last[operator] = place
    own = sorted(first)
    watched, names = [one.name for one in found], [operators[first[operator]].name for operator in own]
    blocks = SequenceMatcher(None, watched, names, autojunk=False).get_matching_blocks() if found else []
    pairs = {block.a + count: own[block.b + count] for block in blocks for count in range(block.size)}
    for place, operator in pairs.items():
        after = tuple(last[pairs[maker]] for maker in found[place].after if maker in pairs)
        operators[first[operator]] = operators[first[operator]]._replace(after=after)
    return tuple(operators)


# ── live storages, and module calls ──────────────────────────────────────────────────────────────────────────────────

Address = tuple[str, int]
"""Location of a storage in memory: (device, address)."""

UNLISTED = 0
"""Address that stands for all memory of a device that belongs to no Python tensor. Only its total size is known."""

LARGEST_NODE = 1 << 62
"""Number above all sequence numbers of autograd nodes. Larger numbers come from nodes without a sequence number."""


class LiveStorage(NamedTuple):
    """One tensor storage that existed when the first recorded step began."""

    device: str
    address: int
    n_bytes: int
    holds: Holds


Extent = tuple[str, int, int]
"""Memory that a tensor storage occupies: (device, address, bytes)."""


def _extent(tensor: object) -> Extent | None:
    """Return (device, address, bytes) of the storage of a tensor.

    Returns None for sparse, fake and meta tensors, because they have no storage of their own.
    """
    if not isinstance(tensor, torch.Tensor):
        return None
    try:
        storage = tensor.untyped_storage()
        found = str(storage.device), storage.data_ptr(), storage.nbytes()
    except Exception:  # Catch all exceptions, because tensor subclasses may raise any.
        return None
    return found if found[2] and found[0] != "meta" else None


def address_of(tensor: torch.Tensor) -> Address | None:
    """Return (device, address) of a tensor's storage; None if the tensor has no storage of its own."""
    extent = _extent(tensor)
    return None if extent is None else extent[:2]


def live_storages() -> list[LiveStorage]:
    """Return all tensor storages in use, with the purpose of each (such as parameters). A storage with several purposes
    gets the first of them, in the order of `kinds` below.

    For each CUDA device, the memory that no Python tensor uses is returned as one storage. Memory-mapped files are
    omitted.
    """
    things: dict[type, list[Any]] = {torch.Tensor: [], nn.Module: [], torch.optim.Optimizer: []}
    for thing in gc.get_objects():
        for kind, kept in things.items():
            if issubclass(type(thing), kind):  # `isinstance` is not used, because it may run code of proxy objects.
                kept.append(thing)
    tensors, modules, optimizers = things.values()
    parameters = [one for one in tensors if issubclass(type(one), nn.Parameter)]
    states = [state for each in optimizers for state in vars(each).get("state", {}).values()]
    kinds: dict[Holds, Iterable[Any]] = {
        Holds.PARAMETERS: parameters,
        Holds.GRADIENTS: [one.grad for one in parameters],
        Holds.MODULE_BUFFERS: [one for each in modules for one in (vars(each).get("_buffers") or {}).values()],
        Holds.OPTIMIZER: [one for state in states if isinstance(state, dict) for one in state.values()],
        Holds.OTHER: tensors,
    }
    extents = {id(one): extent for some in kinds.values() for one in some if (extent := _extent(one)) is not None}
    enclosing = _enclosing(set(extents.values()))
    found: dict[Address, LiveStorage] = {}
    for holds, one in ((holds, one) for holds, some in kinds.items() for one in some if id(one) in extents):
        extent = extents[id(one)]
        device, address, n_bytes = whole = enclosing.get(extent, extent)
        if holds is Holds.OTHER and (whole != extent or getattr(one.untyped_storage(), "filename", None) is not None):
            continue  # Skip mapped storages, because they are files, or shared memory that another rank may count.

        # The storage is a view into a larger buffer of gradients.
        if holds is Holds.GRADIENTS and n_bytes > one.nbytes:
            holds = Holds.FLAT_BUFFERS
        found.setdefault((device, address), LiveStorage(device, address, n_bytes, holds))
    for number in range(torch.cuda.device_count()):
        device = f"cuda:{number}"
        left = torch.cuda.memory_allocated(number) - sum(one.n_bytes for one in found.values() if one.device == device)
        if left > 0:
            found[device, UNLISTED] = LiveStorage(device, UNLISTED, left, Holds.OTHER)
    return list(found.values())


def _enclosing(extents: Iterable[Extent]) -> dict[Extent, Extent]:
    """Map each storage that is part of a larger storage to the larger one, such as a gradient to its flat buffer (of
    contiguous gradients).
    """
    found: dict[Extent, Extent] = {}
    whole: Extent = ("", 0, 0)
    for extent in sorted(extents, key=lambda one: (one[0], one[1], -one[2])):
        if extent[0] == whole[0] and extent[1] + extent[2] <= whole[1] + whole[2]:
            found[extent] = whole
        else:
            whole = extent
    return found


@dataclass(slots=True)
class SeenCall:
    """A recorded forward pass of a module.

    Attributes:
        module: module that was called.
        parent: index of the module call inside which this call ran; -1 = none.
        begin_s, end_s: first and last moment of the forward pass.
        inputs, outputs: addresses of the input and output tensors; empty unless `ModuleCalls.with_tensors` was set.
        batch: size of the first dimension of the first input; 0 unless `ModuleCalls.with_tensors` was set.
    """

    module: nn.Module
    parent: int
    begin_s: float
    end_s: float
    inputs: tuple[Address, ...] = ()
    outputs: tuple[Address, ...] = ()
    batch: int = 0


class ModuleCalls:
    """Recorder of the forward passes of modules, by global module hooks. The constructor starts it. It records only the
    thread that constructed it.

    Attributes:
        calls: recorded module calls, in the order in which they began. A call in progress has `end_s == begin_s`.
        with_tensors: True to record also the addresses of each call's inputs and outputs.
    """

    def __init__(self) -> None:
        self.calls: list[SeenCall] = []
        self.with_tensors = False
        self._stack: list[int] = []
        # (moment, next autograd sequence number, innermost call from then on), at each begin and end of a call.
        self._changes: list[tuple[float, int, int]] = []
        self._thread = threading.get_ident()
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def stop(self) -> None:
        """Remove the module hooks, so that no more module calls are recorded."""
        for hook in self._hooks:
            hook.remove()

    def at(self, moment_s: float) -> int:
        """Return the index of the innermost module call that ran at a moment; -1 = none."""
        place = bisect_right(self._changes, moment_s, key=lambda change: change[0])
        return self._changes[place - 1][2] if place else -1

    def of_node(self, number: int) -> int:
        """Return the index of the innermost module call that created the autograd node with this sequence number; -1 =
        none.
        """
        place = bisect_right(self._changes, number, key=lambda change: change[1])
        return self._changes[place - 1][2] if place and 0 <= number < LARGEST_NODE else -1

    def modules(self) -> tuple[tuple[Module, ...], list[int]]:
        """Return (all modules that were called, index of the module of each recorded call)."""
        places: dict[int, int] = {}
        found: list[Module] = []
        names: dict[int, dict[int, str]] = {}
        roots = list[int]()
        for call in self.calls:
            roots.append(roots[call.parent] if call.parent >= 0 else len(roots))
            root = self.calls[roots[-1]].module
            if id(call.module) not in places:
                known = names.setdefault(id(root), {id(module): name for name, module in root.named_modules()})
                places[id(call.module)] = len(found)
                # Use the class name of a module that is not registered as a submodule.
                name = known.get(id(call.module), f"({type(call.module).__name__})")
                found.append(Module(name=name, kind=type(call.module).__name__, root=places[id(root)]))
        return tuple(found), [places[id(call.module)] for call in self.calls]

    def _before(self, module: nn.Module, _: Any) -> None:  # Any, because torch's hooks have no common type.
        if threading.get_ident() == self._thread:
            place, now_s = len(self.calls), time.perf_counter()
            self.calls.append(SeenCall(module, self._stack[-1] if self._stack else -1, now_s, now_s))
            self._stack.append(place)
            self._changes.append((now_s, _next_node(), place))

    # Any, because torch's hooks have no common type.
    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Record the end of a module call.

        Args:
            module: module that was called.
            args: positional arguments of the call.
            rest: (keyword arguments, output). PyTorch omits the keyword arguments if the module raised.
        """
        if threading.get_ident() != self._thread or not self._stack:
            return
        call = self.calls[self._stack.pop()]
        call.end_s = time.perf_counter()
        self._changes.append((call.end_s, _next_node(), call.parent))
        if self.with_tensors:
            inputs = [one for one in tree_leaves((args, rest[:-1])) if isinstance(one, torch.Tensor)]
            outputs = [one for one in tree_leaves(rest[-1]) if isinstance(one, torch.Tensor)]
            call.inputs, call.outputs = (tuple(filter(None, map(address_of, some))) for some in (inputs, outputs))
            call.batch = next((one.shape[0] for one in inputs if one.dim()), 0)


def _next_node() -> int:
    return int(torch._C._autograd._get_sequence_nr())


# ── torch.profiler ───────────────────────────────────────────────────────────────────────────────────────────────────

MARK = "sirtaki.mark"
MEMORY = "[memory]"
MARKS_AT_ONCE = 5
"""Number of marks (events timed by two clocks) that each call of `mark` records.

One is not enough: the first mark after a pause is slow, and fast marks bound the offset between the clocks best.
"""


@dataclass(frozen=True, slots=True)
class ProfilerEvent:
    """One event that torch.profiler recorded.

    Attributes:
        name: name of the operator, kernel or annotation.
        thread: id of the thread that ran the event; for device events, id of the stream.
        begin_s, end_s: first and last moment of the event.
        on_device: True if the event is a kernel or a copy on a device.
        annotation: True if the event is a `record_function` annotation, not an operator.
        sequence: autograd's sequence number, which a forward operator shares with its backward operator; -1 = none.
        launch: correlation id that an operator shares with the device work it launched; 0 = none.
    """

    name: str
    thread: int
    begin_s: float
    end_s: float
    on_device: bool = False
    annotation: bool = False
    sequence: int = -1
    launch: int = 0

    @property
    def lane(self) -> tuple[bool, int]:
        """Return the key of the thread or device stream that ran the event: (True if it is a stream, id)."""
        return self.on_device, self.thread

    @property
    def is_backward(self) -> bool:
        """Return whether the event is the evaluation of an autograd node in a backward pass."""
        return self.name.startswith(BACKWARD)


class MemoryEvent(NamedTuple):
    """One allocation or release of a block of memory.

    Attributes:
        at_s: moment of the event.
        device: name of the device, such as "cpu" or "cuda:0".
        address: address of the block.
        n_bytes: size of the block; negative for a release.
        operator: innermost operator that ran when the block was allocated or released; "" = none.
        accumulating: True if autograd was adding a gradient to `.grad`, or was running hooks of this addition.
    """

    at_s: float
    device: str
    address: int
    n_bytes: int
    operator: str
    accumulating: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerTrace:
    """All events that `StepWatch` recorded in one or more steps.

    Attributes:
        events: operators, kernels and annotations, unordered.
        thread: id of the training thread.
        clock: conversion from torch.profiler's clock to `time.perf_counter`, which was applied to all times.
        memory: allocations and releases of memory, by time.
        readers: data dependencies between operators of one step; empty if they were not requested.
        calls: forward passes of modules; None = not recorded.
        storages: tensor storages that existed when the first step began.
    """

    events: Sequence[ProfilerEvent]
    thread: int
    clock: ClockMap
    memory: Sequence[MemoryEvent] = ()
    readers: Sequence[Reader] = ()
    calls: ModuleCalls | None = None
    storages: Sequence[LiveStorage] = ()


class StepWatch:
    """Recorder of consecutive steps by torch.profiler and module hooks. A process can have only one recorder at a
    time.
    """

    def __init__(self, *, edges: bool = False) -> None:
        """Start torch.profiler.

        Args:
            edges: True to also record the data dependencies between operators. They are recorded for the first step
                only, that is, until `mark` is called.

        Raises:
            RecordingError: torch.profiler is already running in this process.
        """
        if torch._C._autograd._profiler_enabled():
            raise RecordingError(
                "the training script itself runs torch.profiler, so Sirtaki records only gradients and their "
                "communication; to record operators, too, remove torch.profiler from the script"
            )
        # Silence Kineto, the library of torch.profiler, because it prints its start and stop to standard error.

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._thread = threading.get_ident()
        self._brackets: list[Interval] = []
        self._tensors: TensorWatch | None = None
        self._tensors_watched = False
        self._storages: Sequence[LiveStorage] | None = None
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.start()
        # Record no module calls of compiled models, because a module hook would make Dynamo recompile, or would run
        # twice.
        self._calls = None if something_is_compiled() else ModuleCalls()
        self.mark()
        if edges:
            self._tensors = TensorWatch()

    def next_step(self) -> None:
        """Begin a step. Only in the first step, also record the existing tensor storages, and the inputs and outputs of
        modules.
        """
        if self._calls is not None:
            self._calls.with_tensors = self._storages is None
        if self._storages is None:
            self._storages = live_storages()
        self.mark()

    def mark(self) -> None:
        """Record events whose times are known both by torch.profiler's clock and by `time.perf_counter`, to convert
        between the two. Called between steps.
        """
        if self._tensors is not None and not self._tensors_watched:
            self._tensors.stop()
            self._tensors_watched = True
        for _ in range(MARKS_AT_ONCE):
            before_s = time.perf_counter()
            with record_function(MARK):
                pass
            self._brackets.append((before_s, time.perf_counter()))

    def stop(self) -> ProfilerTrace | None:
        """Stop the profiler and return its events.

        Returns None if another thread started torch.profiler, because only that thread can stop it.

        Raises:
            RecordingError: torch.profiler did not record all events of `mark`, so that event times cannot be converted.
        """
        if self._calls is not None:
            self._calls.stop()
        if threading.get_ident() != self._thread:
            return None
        self.mark()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.stop()
        results: Any = getattr(self._profiler.profiler, "kineto_results", None)
        found = [] if results is None else results.events()
        made = sorted((event for event in found if event.name() == MARK), key=lambda event: event.start_ns())
        if len(made) != len(self._brackets):
            raise RecordingError(
                f"torch.profiler recorded only {len(made)} of the {len(self._brackets)} events that Sirtaki needs to "
                "align the times of operators with its own clock; to get operators, record the job again"
            )
        pairs = zip(self._brackets, made, strict=True)
        clock = map_clock([Mark(*bracket, event.start_ns(), event.duration_ns()) for bracket, event in pairs])
        return ProfilerTrace(
            events=list(_events(found, clock)),
            thread=made[0].start_thread_id(),
            clock=clock,
            memory=sorted(_memory(results.experimental_event_tree(), clock), key=lambda event: event.at_s),
            readers=() if self._tensors is None else self._tensors.readers(),
            calls=self._calls,
            storages=self._storages or (),
        )


# Any, because Kineto's events have no types.
def _events(found: Sequence[Any], clock: ClockMap) -> Iterator[ProfilerEvent]:
    for event in found:
        if event.name() not in (MARK, MEMORY):
            begin_ns, on_device = event.start_ns(), event.device_type() != DeviceType.CPU
            yield ProfilerEvent(
                event.name(),
                event.device_resource_id() if on_device else event.start_thread_id(),
                clock.at(begin_ns),
                clock.at(begin_ns + event.duration_ns()),
                on_device,
                event.is_user_annotation(),
                event.sequence_nr(),
                event.linked_correlation_id() if on_device else event.correlation_id(),
            )


# Any, because Kineto's events have no types.
def _memory(tree: Sequence[Any], clock: ClockMap) -> Iterator[MemoryEvent]:
    left = [(event, "", False) for event in tree]
    while left:
        event, operator, accumulating = left.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            at_s = clock.at(event.start_time_ns)
            yield MemoryEvent(at_s, str(fields.device), fields.ptr, fields.alloc_size, operator, accumulating)
            continue
        if event.tag == _EventType.TorchOp:
            operator, accumulating = event.name, accumulating or event.name.endswith(ACCUMULATING)
        left += [(inside, operator, accumulating) for inside in event.children]


# ── operators of steps ───────────────────────────────────────────────────────────────────────────────────────────────

MIN_DURATION_S = 1e-9
"""Shorter intervals are dropped. The value is the resolution of the clock, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Begin and end of one step, and intervals within the step that belong neither to the forward nor to the backward
    pass.

    Attributes:
        begin_s, end_s: first and last moment of the step.
        updates: intervals in which the optimizer updated parameters.
        cuts: intervals in which the training thread copied gradients or waited for them. Operators are split there.
    """

    begin_s: float
    end_s: float
    updates: tuple[Interval, ...]
    cuts: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperators:
    """Operators and phases (such as forward) of one step of one rank."""

    operators: tuple[Operator, ...]
    spans: tuple[PhaseSpan, ...]


def operators_of(seen: ProfilerTrace, steps: Sequence[StepWindow]) -> tuple[list[StepOperators], tuple[str, ...]]:
    """Return (operators of each step, names of the lanes). A lane is a thread or a device stream that runs operators;
    the first one is the training thread.
    """
    keys = sorted({event.lane for event in seen.events} - {(False, seen.thread)})
    names = [f"stream {thread} of the device" if on_device else f"thread {thread}" for on_device, thread in keys]
    lanes = {key: number for number, key in enumerate([(False, seen.thread), *keys])}
    module_of_call = [] if seen.calls is None else seen.calls.modules()[1]

    def operator(event: ProfilerEvent, phase: Phase) -> Operator:
        call = -1
        if seen.calls is not None and not event.on_device:
            call = seen.calls.of_node(event.sequence) if event.is_backward else seen.calls.at(event.begin_s)
        name, lane, module = _own_name(event.name), lanes[event.lane], module_of_call[call] if call >= 0 else -1
        return Operator(name, lane, event.begin_s, event.end_s, phase, event.sequence, module=module)

    ordered = sorted(seen.events, key=lambda event: (event.begin_s, -event.end_s))
    begins = [event.begin_s for event in ordered]
    found = []
    for step in steps:
        events = ordered[bisect_right(begins, step.begin_s) : bisect_right(begins, step.end_s)]
        phases = _phases(step, events)
        whole = (operator(event, phase) for event, phase in phases)
        cut = ((place, (one,) if one.lane else _cut(one, step.cuts)) for place, one in enumerate(whole))
        pieces = sorted(((place, piece) for place, parts in cut for piece in parts), key=lambda pair: pair[1].begin_s)
        spans = [
            *(PhaseSpan(Phase.DATA, *interval) for interval in _annotated(events, LOADER)),
            *_pass_spans([one for _, one in pieces if one.lane == 0]),
            *(PhaseSpan(Phase.UPDATE, *interval) for interval in step.updates),
        ]
        ordered_spans = tuple(sorted(spans, key=lambda span: span.begin_s))
        found.append(StepOperators(operators=with_edges(pieces, seen.readers), spans=ordered_spans))
    return found, ("training thread", *names)


def _annotated(events: Iterable[ProfilerEvent], prefix: str) -> list[Interval]:
    return [(one.begin_s, one.end_s) for one in events if one.annotation and one.name.startswith(prefix)]


def _phases(step: StepWindow, events: Sequence[ProfilerEvent]) -> list[tuple[ProfilerEvent, Phase]]:
    """Return the top-level operators of a step, each with its phase (such as forward). Events on devices come last."""
    ends_s, top = dict[tuple[bool, int], float](), list[ProfilerEvent]()
    for event in events:  # Sort outer events before the events inside them.
        if not event.annotation and event.begin_s >= ends_s.get(event.lane, 0.0):
            ends_s[event.lane] = event.end_s
            top.append(event)
    on_host = [event for event in top if not event.on_device]
    backward = [event for event in on_host if event.is_backward]
    loading = _annotated(events, LOADER)
    intervals = ((Phase.UPDATE, step.updates), (Phase.DATA, loading), (Phase.OTHER, _annotated(events, ZEROING)))
    # The forward pass begins after the batch was loaded, because earlier operators may compute metrics of the previous
    # step. An earlier operator belongs to the forward pass only if it has a backward operator. A backward operator's
    # forward operator is the last one with the same sequence number, because operators that create no autograd node
    # have the number of the next node.
    made = {event.sequence: event.begin_s for event in on_host if not event.is_backward}
    first_s = min((made[one.sequence] for one in backward if one.sequence in made and one.sequence >= 0), default=0.0)
    forward_s = next((end_s for _, end_s in loading if end_s <= first_s), step.begin_s)
    last_backward_s = max((event.begin_s for event in backward), default=step.begin_s)

    def phase_of(event: ProfilerEvent) -> Phase:
        if event.is_backward:
            return Phase.BACKWARD
        for phase, spans in intervals:
            if any(begin_s <= event.begin_s < end_s for begin_s, end_s in spans):
                return phase
        return Phase.FORWARD if forward_s <= event.begin_s < last_backward_s else Phase.OTHER

    found = [(event, phase_of(event)) for event in on_host]
    launched: dict[int, Phase] = {}  # {correlation id of device work: phase of the operator that launched it}
    begins = [event.begin_s for event in on_host]
    for event in events if len(on_host) < len(top) else ():
        place = bisect_right(begins, event.begin_s) - 1
        if event.launch and not event.on_device and place >= 0:
            launched[event.launch] = found[place][1]
    return [*found, *((one, launched.get(one.launch, Phase.OTHER)) for one in top if one.on_device)]


def _cut(operator: Operator, cuts: Sequence[Interval]) -> Iterator[Operator]:
    """Yield the parts of an operator that are outside the intervals `cuts`, which are sorted and disjoint."""
    begin_s = operator.begin_s
    for cut_begin_s, cut_end_s in cuts:
        if cut_end_s > begin_s and cut_begin_s < operator.end_s:
            if cut_begin_s - begin_s > MIN_DURATION_S:
                yield operator._replace(begin_s=begin_s, end_s=cut_begin_s)
            begin_s = cut_end_s
    if operator.end_s - begin_s > MIN_DURATION_S:
        yield operator._replace(begin_s=begin_s)


def _pass_spans(operators: Sequence[Operator]) -> list[PhaseSpan]:
    """Return begin and end of each forward and backward pass. A pass lasts from its first to its last operator, even if
    operators of other phases (such as data loading) run in between.
    """
    found: list[PhaseSpan] = []
    for one in operators:
        if one.phase in (Phase.FORWARD, Phase.BACKWARD):
            if found and found[-1].phase is one.phase:
                found[-1] = found[-1]._replace(end_s=max(found[-1].end_s, one.end_s))
            else:
                found.append(PhaseSpan(one.phase, one.begin_s, one.end_s))
    return found


Moments = Mapping[tuple[object, ...], float]
"""Times of the events of one step, by a key that denotes the same event in every step."""

_Span = TypeVar("_Span", Operator, PhaseSpan)


def borrowed(seen: StepOperators, there: Moments, here: Moments) -> StepOperators:
    """Return one step's operators and phases, moved to the times of another step, which ran without torch.profiler.

    Args:
        seen: operators and phases of the step that torch.profiler recorded.
        there: times of events, such as ready gradients, in the step that torch.profiler recorded.
        here: times of the same events in the other step. Events that only one of the two steps has are ignored.
    """
    pairs = sorted((there[key], here[key]) for key in there.keys() & here.keys())
    kept = pairs[:1]
    for there_s, here_s in pairs[1:]:
        # Skip events whose order differs between the two steps, such as gradients that two threads produce.
        if there_s > kept[-1][0] and here_s >= kept[-1][1]:
            kept.append((there_s, here_s))
    from_s, to_s = np.array(kept).T

    def moved(one: _Span) -> _Span:
        """Move an operator or phase to the times of the other step, by linear interpolation between the events of both
        steps.
        """
        begin_s, end_s = np.interp([one.begin_s, one.end_s], from_s, to_s)
        return one._replace(begin_s=float(begin_s), end_s=float(end_s))

    return StepOperators(operators=tuple(map(moved, seen.operators)), spans=tuple(map(moved, seen.spans)))


# ── memory of a step ─────────────────────────────────────────────────────────────────────────────────────────────────


def memory_of_step(
    seen: ProfilerTrace, *, number: int, begin_s: float, end_s: float, spans: Iterable[PhaseSpan]
) -> StepMemory:
    """Return the memory use of the first recorded step: all blocks of memory, and the module calls that allocated them.

    Args:
        seen: events of the step, and events before it since torch.profiler was started.
        number: number of the iteration.
        begin_s: first moment of the step.
        end_s: last moment of the step.
        spans: phases of the step.
    """
    found = _MemoryBuilder(seen, begin_s, end_s, spans)
    return StepMemory(
        iteration=number,
        begin_s=begin_s,
        end_s=end_s,
        devices=tuple(found.devices),
        batch=found.called[0][1].batch if found.called else 0,
        allocations=tuple(found.with_purpose(place, one) for place, one in enumerate(found.allocations)),
        calls=tuple(found.module_calls()),
    )


class _MemoryBuilder:
    """Builder of the memory use of a step (`StepMemory`), from allocations, releases, and the storages that existed
    before.
    """

    def __init__(self, seen: ProfilerTrace, begin_s: float, end_s: float, spans: Iterable[PhaseSpan]) -> None:
        self._end_s, self._calls = end_s, seen.calls
        # Use the backward events of all threads: autograd has one thread per device.
        inside = [one for one in seen.events if one.is_backward and begin_s <= one.begin_s <= end_s]
        self._backward = sorted(inside, key=lambda event: event.begin_s)
        self._added_s = [(one.begin_s, one.end_s) for one in self._backward if one.name.endswith(ACCUMULATING)]
        self._spans = sorted(spans, key=lambda span: span.begin_s)
        self.called = [
            (place, call)
            for place, call in enumerate([] if seen.calls is None else seen.calls.calls)
            if begin_s <= call.begin_s and call.end_s <= end_s
        ]
        self._places = {place: number for number, (place, _) in enumerate(self.called)}
        self.devices: dict[str, int] = {}
        self.allocations: list[Allocation] = []
        self._at_address = defaultdict[Address, list[int]](list)
        # Find the blocks (by index) that were allocated before autograd added a gradient to `.grad`, and released
        # during the addition.
        self._accumulated: set[int] = set()
        self._add_live_storages(seen, begin_s)
        live = {address: places[-1] for address, places in self._at_address.items()}
        short_lived: set[int] = set()  # Blocks that were allocated while a gradient was added to `.grad`.
        for event in seen.memory:
            address = event.device, event.address
            if not begin_s <= event.at_s <= end_s:
                continue
            # Let a block end at the latest when its address is reused, because torch.profiler misses releases by some
            # threads. Ignore releases of blocks that are not in `live`: they belong to the UNLISTED memory of a device.
            if (place := live.pop(address, None)) is not None:
                self.allocations[place] = self.allocations[place]._replace(end_s=event.at_s)
                if event.n_bytes < 0 and event.accumulating and place not in short_lived:
                    self._accumulated.add(place)
            if event.n_bytes > 0:
                call = -1 if seen.calls is None else self._call_at(seen.calls, event.at_s)
                phase = phase_at(self._spans, event.at_s)
                self._add(address, event.n_bytes, begin_s=event.at_s, phase=phase, call=call, operator=event.operator)
                live[address] = len(self.allocations) - 1
                if event.accumulating:
                    short_lived.add(live[address])

    def _add_live_storages(self, seen: ProfilerTrace, begin_s: float) -> None:
        # Find the blocks that were allocated between the start of torch.profiler and the begin of the step.
        before: dict[Address, int] = {}
        for event in seen.memory:
            if event.at_s < begin_s:
                if event.n_bytes > 0:
                    before[event.device, event.address] = event.n_bytes
                else:
                    before.pop((event.device, event.address), None)
        for storage in seen.storages:
            before.pop((storage.device, storage.address), None)
        for address, n_bytes in before.items():
            self._add(address, n_bytes)
        for storage in seen.storages:
            n_bytes = storage.n_bytes
            if storage.address == UNLISTED:
                n_bytes -= sum(size for (device, _), size in before.items() if device == storage.device)
            if n_bytes > 0:
                self._add((storage.device, storage.address), n_bytes, storage.holds)

    def _add(self, address: Address, n_bytes: int, holds: Holds = Holds.OTHER, **fields: Any) -> None:
        device = self.devices.setdefault(address[0], len(self.devices))
        self._at_address[address].append(len(self.allocations))
        self.allocations.append(Allocation(device=device, n_bytes=n_bytes, holds=holds, **fields))

    def with_purpose(self, place: int, one: Allocation) -> Allocation:
        if one.begin_s is None:
            return one
        end_s = one.end_s if one.end_s is not None else float("inf")
        outlives = end_s > self._end_s
        if one.phase is Phase.BACKWARD and (outlives or place in self._accumulated):
            at = bisect_left(self._added_s, (one.begin_s, 0.0))
            added_s = self._added_s[at][1] if at < len(self._added_s) else one.begin_s
            return one._replace(holds=Holds.GRADIENTS, added_s=max(added_s, one.begin_s))
        if one.phase is Phase.UPDATE and outlives:
            return one._replace(holds=Holds.OPTIMIZER)
        backward = any(span.phase is Phase.BACKWARD and one.begin_s < span.begin_s < end_s for span in self._spans)
        if one.phase in (Phase.DATA, Phase.FORWARD) and backward:
            return one._replace(holds=Holds.ACTIVATIONS)
        return one

    def _call_at(self, calls: ModuleCalls, moment_s: float) -> int:
        place = calls.at(moment_s)
        if place < 0:
            at = bisect_right(self._backward, moment_s, key=lambda event: event.begin_s) - 1
            if at >= 0 and moment_s <= self._backward[at].end_s:
                place = calls.of_node(self._backward[at].sequence)
        return self._places.get(place, -1)

    def module_calls(self) -> Iterator[ModuleCall]:
        if self._calls is None:
            return
        backward = defaultdict[int, list[float]](list)
        for event in self._backward:
            place = self._calls.of_node(event.sequence)
            while place >= 0:
                backward[place] += (event.begin_s, event.end_s)
                place = self._calls.calls[place].parent
        _, modules = self._calls.modules()
        for place, call in self.called:
            passed_s = min(backward[place], default=None), max(backward[place], default=None)
            tensors = (tuple(self._allocations_at(some, call.end_s)) for some in (call.inputs, call.outputs))
            parent = self._places.get(call.parent, -1)
            yield ModuleCall(modules[place], parent, call.begin_s, call.end_s, *passed_s, *tensors)

    def _allocations_at(self, addresses: Sequence[Address], moment_s: float) -> Iterator[int]:
        for address in dict.fromkeys(addresses):
            for place in reversed(self._at_address[address]):
                one = self.allocations[place]
                if one.begin_s is None or one.begin_s <= moment_s:
                    if one.end_s is None or one.end_s >= moment_s:
                        yield place
                    break
