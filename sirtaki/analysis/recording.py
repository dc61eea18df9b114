"""Data classes of a recording (operators, gradients, network, memory), and functions that read and write a recording
folder.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.fits import ContentionModel
from sirtaki.autotune.model.replayer import Phase
from sirtaki.comm.plan import CommPlan, GradientLayout, Route
from sirtaki.errors import RecordingError
from sirtaki.measures import LinkModel, counted

ModuleKey = tuple[int, str]
"""Key of a module: (index of its outermost module, qualified name inside the outermost module)."""


class Holds(Enum):
    """Purpose for which a block of memory is used."""

    PARAMETERS = "parameters"
    MODULE_BUFFERS = "buffers of modules"
    OPTIMIZER = "optimizer state"
    FLAT_BUFFERS = "flat buffers"  # Buffers of contiguous gradients, which are all-reduced.
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"  # Tensors that the forward pass saves for the backward pass, including inputs.
    OTHER = "other"  # Temporary tensors, and other tensors of the user's script.


class Allocation(NamedTuple):
    """One block of memory that existed at any time of the recorded step.

    Attributes:
        device: index in `StepMemory.devices`.
        n_bytes: size of the block.
        holds: purpose of the block.
        phase: phase of the step in which the block was allocated; OTHER if it existed before the step.
        begin_s: time at which the block was allocated; None if it was allocated before the step.
        end_s: time at which the block was released; None if it was not released within the step.
        added_s: for a gradient, the time at which autograd had added it to `.grad`.
        call: index in `StepMemory.calls` of the innermost module call whose forward or backward pass allocated the
            block; -1 = none.
        operator: operator that allocated the block; "" = unknown.
    """

    device: int
    n_bytes: int
    holds: Holds
    phase: Phase = Phase.OTHER
    begin_s: float | None = None
    end_s: float | None = None
    added_s: float | None = None
    call: int = -1
    operator: str = ""


class Module(NamedTuple):
    """One module of the trained model.

    Attributes:
        name: qualified name inside the outermost module, such as "layers.0"; "" = the outermost module itself.
        kind: name of the class of the module.
        root: index of the outermost module that contains this module.
    """

    name: str
    kind: str
    root: int

    @property
    def key(self) -> ModuleKey:
        """Return the key of the module, which is equal on all ranks that train the same model."""
        return self.root, self.name


class ModuleCall(NamedTuple):
    """One forward pass of one module, and the backward pass that belongs to it.

    Attributes:
        module: index in `RankRecording.modules`.
        parent: index of the module call inside which this call ran; -1 = none.
        begin_s, end_s: first and last moment of the forward pass.
        backward_begin_s, backward_end_s: first and last moment of the backward pass of this call; None = there was no
            backward pass.
        inputs, outputs: indices in `StepMemory.allocations` of the blocks that contain inputs and outputs.
    """

    module: int
    parent: int
    begin_s: float
    end_s: float
    backward_begin_s: float | None = None
    backward_end_s: float | None = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory use of one rank in one iteration.

    Attributes:
        iteration: number of the iteration.
        begin_s, end_s: first and last moment of the iteration.
        devices: device names, such as "cpu" and "cuda:0".
        batch: number of samples: size of the first dimension of the first module's first input; 0 = unknown.
        allocations: blocks of memory that existed at any time in the iteration.
        calls: forward passes of modules, in the order in which they began.
    """

    iteration: int
    begin_s: float
    end_s: float
    devices: tuple[str, ...]
    batch: int
    allocations: tuple[Allocation, ...]
    calls: tuple[ModuleCall, ...]


class Detail(Enum):
    """Level of detail at which a rank was recorded."""

    UNITS = "units"  # Times at which gradients were ready and copied, and units (buckets) all-reduced.
    OPERATORS = "operators"  # Everything of `UNITS`, and the events of torch.profiler.


# ── one rank ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Operator(NamedTuple):
    """One top-level operator of a step. Operators of one lane (thread or device stream) never overlap.

    If the thread copies gradients or waits for them while an operator runs, this interval is cut out, and the operator
    becomes two entries.

    Attributes:
        name: name of the operator, such as "aten::addmm" or, in the backward pass, "AddmmBackward0".
        lane: index of the thread or device stream that runs the operator; 0 is the training thread.
        begin_s, end_s: first and last moment of the operator.
        phase: phase of the step, such as forward or backward.
        sequence: autograd's sequence number, shared by a forward operator and its backward operator; -1 = none.
        after: indices in `RecordedIteration.operators` of the operators that produced the inputs; empty if data
            dependencies were not recorded.
        module: index in `RankRecording.modules` of the innermost module whose forward or backward pass contains the
            operator; -1 = none.
    """

    name: str
    lane: int
    begin_s: float
    end_s: float
    phase: Phase
    sequence: int = -1
    after: tuple[int, ...] = ()
    module: int = -1


class PhaseSpan(NamedTuple):
    """Begin and end of one phase, such as forward, of one step. A phase may occur several times per step, because of
    gradient accumulation or several models.

    If no operators were recorded, BACKWARD begins when the first gradient is ready, and other phases than BACKWARD and
    UPDATE are omitted.
    """

    phase: Phase
    begin_s: float
    end_s: float


def phase_at(spans: Iterable[PhaseSpan], moment_s: float) -> Phase:
    """Return the phase (such as forward) that contains a moment; OTHER if none of `spans` contains it."""
    return next((span.phase for span in spans if span.begin_s <= moment_s <= span.end_s), Phase.OTHER)


class ReadyGradient(NamedTuple):
    """Time at which one gradient was ready.

    The gradient has index `place` in flat buffer number `buffer` (of contiguous gradients).
    """

    buffer: int
    place: int
    ready_s: float


class Copy(NamedTuple):
    """One copy of gradients into flat buffers (of contiguous gradients). It runs on the training thread or, for
    gradients on a GPU, on the CUDA stream of this thread.
    """

    begin_s: float
    end_s: float
    n_gradients: int


class UnitId(NamedTuple):
    """Identity of a unit (bucket: a range of a flat buffer of contiguous gradients, reduced by one all-reduce). It is
    equal on all participating ranks.

    Attributes:
        iteration: number of the gradient reduction of this optimizer (`GradientPipeline.iteration`).
        buffer: number of the flat buffer (`Buffer.number`).
        start, stop: range of elements in the flat buffer.
        route: transport and algorithm.
        stream: index of the communicator (stream) on which the unit is all-reduced.
    """

    iteration: int
    buffer: int
    start: int
    stop: int
    route: Route
    stream: int


class RecordedUnit(NamedTuple):
    """Times of the all-reduce of one unit (bucket) on one rank.

    Attributes:
        iteration, buffer, start, stop, route, stream: identity of the unit: the fields of its `UnitId`.
        issue_s: time at which this rank issued the all-reduce, after all gradients of the unit were copied into the
            flat buffer (of contiguous gradients). No rank completes the all-reduce before all ranks have issued it.
        begin_s: time at which the transport started the all-reduce; None if the transport does not report it.
        done_s: time at which the reduced gradients were available on this rank.
    """

    iteration: int
    buffer: int
    start: int
    stop: int
    route: Route
    stream: int
    issue_s: float
    begin_s: float | None
    done_s: float

    @property
    def unit(self) -> UnitId:
        """Return the identity of the unit (bucket), which is equal on all ranks."""
        return UnitId(*self[:6])


class Collective(NamedTuple):
    """One collective operation other than the all-reduce of a unit (bucket): for rows of sparse gradients, for metrics,
    or called by the user's script.

    Attributes:
        name: name of the operation, equal on all ranks.
        kind: kind of the operation, such as "allreduce".
        begin_s: time at which this rank requested the operation.
        agreed_s: time at which all ranks had requested the operation.
        end_s: time at which the result was available on this rank.
        n_bytes: size of this rank's input in bytes.
    """

    name: str
    kind: str
    begin_s: float
    agreed_s: float
    end_s: float
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedIteration:
    """One training step of one rank.

    Attributes:
        number: number of optimizer steps before this iteration; equal on all ranks.
        begin_s: end of the previous step; for the first recorded iteration, begin of the recording.
        end_s: end of the optimizer step.
        profiling: True if ranks agreed on the order of gradients in this iteration, as at the start of a job. Then its
            duration is not that of an ordinary step.
        slowed: True if torch.profiler was on and added its overhead. Iterations without torch.profiler get the
            operators of such an iteration, moved to their own times.
        spans, operators, ready, copies, units, collectives: events of the iteration by kind; each list is sorted by
            begin.
        exposed_s: time for which this rank waited for units (buckets) after its last gradient was ready.
        beside_s: processor time of all threads of this rank except the training thread; None = not recorded. If
            operators use a single thread, all of it is communication.
    """

    number: int
    begin_s: float
    end_s: float
    profiling: bool = False
    slowed: bool = False
    spans: tuple[PhaseSpan, ...] = ()
    operators: tuple[Operator, ...] = ()
    ready: tuple[ReadyGradient, ...] = ()
    copies: tuple[Copy, ...] = ()
    units: tuple[RecordedUnit, ...] = ()
    collectives: tuple[Collective, ...] = ()
    exposed_s: float = 0.0
    beside_s: float | None = None

    @property
    def joined(self) -> bool:
        """Return whether this rank had called `join()`, because it had no more training data.

        After `join()`, a rank takes part in the other ranks' all-reduces, but makes no steps of its own.
        """
        iterations = {(one.buffer, one.iteration) for one in self.units}
        return len(iterations) > len({buffer for buffer, _ in iterations})

    @property
    def is_usual(self) -> bool:
        """Return whether the iteration is an ordinary step, whose duration is representative. An iteration that
        torch.profiler slowed down (`slowed`) counts as ordinary, too.
        """
        return not (self.profiling or self.joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecording:
    """Recording of one rank.

    Attributes:
        rank: global rank.
        job: id of the job. Recordings of different jobs cannot be read together.
        model: digest of the gradient layouts, equal on ranks that train the same model.
        detail: level of detail at which the rank was recorded.
        offset_s: seconds to add to this rank's clock to get rank 0's clock, measured when the recording began (by
            Cristian's method, from round trips of messages).
        round_trip_s: shortest round trip of the messages that measured `offset_s`, whose error is at most half of it. 0
            on rank 0.
        clock_error_s: largest error of operator times, from their conversion from torch.profiler's clock.
        lanes: names of the lanes (threads and device streams) that run operators, by index.
        complete: True if all requested iterations were recorded.
        iterations: recorded iterations, in order.
        modules: modules that ran while torch.profiler was on; empty if the model is compiled.
        memory: memory use of one iteration; None = not recorded.
    """

    rank: int
    job: str
    model: str
    detail: Detail
    offset_s: float
    round_trip_s: float
    clock_error_s: float = 0.0
    lanes: tuple[str, ...] = ()
    complete: bool = True
    iterations: tuple[RecordedIteration, ...] = ()
    modules: tuple[Module, ...] = ()
    memory: StepMemory | None = None


# ── the job ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Host, node, clock and processors of one rank.

    Attributes:
        rank: global rank.
        host: id of the host, which is the lowest rank on the host.
        node: id of the node, which is the lowest rank on the node. `SIRTAKI_LOCAL_SIZE` can split a host into several
            nodes. Communication between nodes does not use shared memory.
        host_name: host name, for display.
        clock: identifier of the clock; equal for ranks that read the same clock.
        processors: ids of the processors that the rank may use.
        host_processors: number of processors of the host.
        quota: number of processors to which a cgroup limits the container of the rank; None = no limit.
        threads: number of threads per operator (`torch.get_num_threads`).
    """

    rank: int
    host: int
    node: int
    host_name: str
    clock: str
    processors: tuple[int, ...]
    host_processors: int
    quota: float | None
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One flat buffer (contiguous gradients) of one optimizer, and its communication plan when the recording began.

    Attributes:
        number: id of the buffer in the job; equal on all ranks.
        reducer: (id of the process set, id of the reducer in this set) of the reducer, the object that all-reduces the
            optimizer's gradients.
        ranks: ranks that all-reduce the buffer.
        layout: sizes and names of the gradients in the buffer, in order. The last entry of an optimizer's first buffer
            is not a gradient. It holds control flags, by which ranks exchange, for example, that communication has
            become slower.
        plan: division of the buffer into units (buckets), with transport, algorithm and stream of each.
        knobs: knobs (tuned settings) from which the plan was built.
    """

    number: int
    reducer: tuple[int, int]
    ranks: tuple[int, ...]
    layout: GradientLayout
    plan: CommPlan
    knobs: Knobs

    @property
    def is_cut_evenly(self) -> bool:
        """Return whether all units (buckets) of the buffer have the size that the knobs (tuned settings) request."""
        size = max(1, self.knobs.unit_bytes // self.layout.itemsize_bytes)
        return self.knobs.cuts is None and self.plan.units[0].numel == min(size, self.layout.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """Properties that all ranks of a job share.

    Attributes:
        job: id of the job.
        n_iterations: number of iterations that the user wanted to record.
        placement: host, node, clock and processors of each rank, in rank order.
        buffers: flat buffers (of contiguous gradients) of all ranks.
        links: latency and bandwidth that Sirtaki measured while it tuned the job, by route (transport and algorithm);
            empty if none was measured.
        contention: measured slowdown of communication and computation while both run at the same time; None = not
            measured.
        settings: Sirtaki's environment variables whose values differ from their defaults.
        versions: versions of Sirtaki, PyTorch and Python.
    """

    job: str
    n_iterations: int
    placement: tuple[Placement, ...]
    buffers: tuple[Buffer, ...] = ()
    links: Mapping[Route, LinkModel] = field(default_factory=dict)
    contention: ContentionModel | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def n_ranks(self) -> int:
        """Return the number of ranks of the whole job."""
        return len(self.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Contents of one recording folder.

    Attributes:
        job: properties that all ranks share.
        ranks: recording of each rank, by rank; ranks without a recording are omitted.
        problems: one sentence for each defect of the recording: missing ranks, iterations that only some ranks
            recorded, ranks that trained another model.
    """

    job: JobInfo
    ranks: Mapping[int, RankRecording]
    problems: tuple[str, ...] = ()

    @property
    def common_iterations(self) -> tuple[int, ...]:
        """Return the numbers of the iterations that all ranks of the recording have recorded."""
        numbers = [{iteration.number for iteration in rank.iterations} for rank in self.ranks.values()]
        return tuple(sorted(set.intersection(*numbers))) if numbers else ()

    @property
    def usual_iterations(self) -> tuple[int, ...]:
        """Return the numbers of the iterations to analyse: the longest run of ordinary steps that all ranks recorded.

        A run has consecutive numbers. Iterations slowed by torch.profiler are used only if there are no other
        iterations.
        """
        iterations = [one for rank in self.ranks.values() for one in rank.iterations]
        slowed = {one.number for one in iterations if one.slowed}
        others = {one.number for one in iterations if not one.is_usual}
        usual = [number for number in self.common_iterations if number not in others]
        return _longest_run([number for number in usual if number not in slowed] or usual)


def _longest_run(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the longest run of consecutive numbers. Of equally long runs, return the last."""
    runs: list[list[int]] = [[]]
    for number in numbers:
        if runs[-1] and number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    longest = max(len(run) for run in runs)
    return tuple(next(run for run in reversed(runs) if len(run) == longest))


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

FORMAT_VERSION = 3
READABLE_VERSIONS = (2, 3)
"""Versions of the format of recording folders that can be read. Version 2 has neither modules nor memory use."""

JOB_FILE, TRACE_FILE, REPORT_FILE = "job.json", "trace.json", "report.html"
_RANK_FILE = re.compile(r"rank-(\d+)\.json\.gz")

Json = dict[str, Any]
_T = TypeVar("_T")

DIGITS = 9
"""Number of decimals of stored times in seconds. Nine are enough, because clocks resolve nanoseconds."""


def job_to_json(job: JobInfo) -> Json:
    """Convert the properties of a job to a dict for JSON. `job_from_json` is the inverse."""
    return {
        "format": FORMAT_VERSION,
        **asdict(job),
        "buffers": [{**asdict(one), "plan": one.plan.to_json(), "knobs": one.knobs.to_json()} for one in job.buffers],
        "links": [
            {"route": [part.value for part in route], "link": link.to_json()} for route, link in job.links.items()
        ],
    }


def job_from_json(data: Json) -> JobInfo:
    """Convert a dict that `job_to_json` has returned to a `JobInfo`.

    Raises:
        KeyError, TypeError, ValueError: `data` has another structure.
    """
    buffers = [{**one, "knobs": Knobs.from_json(one["knobs"])} for one in data["buffers"]]
    links = {msgspec.convert(one["route"], Route): LinkModel.from_json(one["link"]) for one in data["links"]}
    return msgspec.convert({**data, "buffers": buffers, "links": links}, JobInfo)


def rank_to_json(rank: RankRecording) -> Json:
    """Convert the recording of a rank to a dict for JSON. `rank_from_json` is the inverse.

    Named tuples become lists. Operator names become indices into the list `operator_names`, because names repeat often.
    """
    found: Json = _rounded(msgspec.to_builtins(rank))
    names: dict[str, int] = {}
    for iteration in found["iterations"]:
        for row in iteration["operators"]:
            row[0] = names.setdefault(row[0], len(names))
    if memory := found["memory"]:
        asked_by: dict[str, int] = {}
        for row in memory["allocations"]:
            row[-1] = asked_by.setdefault(row[-1], len(asked_by))
        memory["operators"] = list(asked_by)
    return {"format": FORMAT_VERSION, **found, "operator_names": list(names)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return list(map(_rounded, value)) if isinstance(value, (list, tuple)) else value


def rank_from_json(data: Json) -> RankRecording:
    """Convert a dict that `rank_to_json` has returned to a `RankRecording`. Modifies `data`: indices become operator
    names.

    Raises:
        KeyError, IndexError, TypeError, ValueError: `data` has another structure.
    """
    for iteration in data["iterations"]:
        for row in iteration["operators"]:
            row[0] = data["operator_names"][row[0]]
    if memory := data.get("memory"):
        for row in memory["allocations"]:
            row[-1] = memory["operators"][row[-1]]
    return msgspec.convert(data, RankRecording)


def rank_path(folder: Path, rank: int) -> Path:
    """Return the path of the file in which the recording of a rank is stored."""
    return folder / f"rank-{rank:04d}.json.gz"


def holds_recording(folder: Path) -> bool:
    """Return whether the folder contains at least one file of a recording."""
    return folder.is_dir() and any(name == JOB_FILE or _RANK_FILE.fullmatch(name) for name in os.listdir(folder))


def clear(folder: Path) -> None:
    """Delete a recording and the reports made from it. Other files in the folder stay.

    Raises:
        OSError: a file cannot be deleted.
    """
    for path in folder.iterdir():
        if path.name in (JOB_FILE, TRACE_FILE, REPORT_FILE) or _RANK_FILE.fullmatch(path.name):
            path.unlink()


def write_job(folder: Path, job: JobInfo) -> None:
    """Write the file with the properties that all ranks share. Several hosts may write the same file, because its
    content is equal.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(folder / JOB_FILE, json.dumps(job_to_json(job), indent=1).encode())


def write_rank(folder: Path, rank: RankRecording) -> None:
    """Write the recording of one rank.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(rank_to_json(rank), separators=(",", ":"))
    write_whole(rank_path(folder, rank.rank), gzip.compress(text.encode(), compresslevel=1))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, so that readers never see an incomplete file.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read_folder(folder: str | Path) -> Recording:
    """Read a recording folder. Files of ranks that cannot be read are skipped and reported in `Recording.problems`.

    Raises:
        RecordingError: the folder does not exist, contains no recording or one of another version, or has no readable
            recording of any rank.
    """
    folder = Path(folder)
    if folder.is_file():
        raise RecordingError(
            f"{folder} is a file, but a recording is a folder; pass the folder into which `sirtaki profile` has "
            "recorded a job. A trial log (SIRTAKI_TRIAL_LOG) is for `sirtaki report` and `sirtaki plan`"
        )
    if not folder.is_dir():
        raise RecordingError(
            f"there is no folder {folder}; give the name of a folder into which `sirtaki profile` has recorded a job"
        )
    names = sorted(os.listdir(folder))
    files = {int(found[1]): folder / name for name in names if (found := _RANK_FILE.fullmatch(name))}
    if JOB_FILE not in names:
        what = (
            f"it contains files of {counted(len(files), 'rank')}, but no file {JOB_FILE}"
            if files
            else f"it is not a recording (it has no {JOB_FILE}); pass a folder into which `sirtaki profile` has "
            "recorded a job"
        )
        raise RecordingError(f"the folder {folder} cannot be read as a recording: {what}")
    job = _parsed(folder / JOB_FILE, bytes, job_from_json)
    ranks, problems = dict[int, RankRecording](), list[str]()
    for number, path in files.items():
        try:
            rank = _parsed(path, gzip.decompress, rank_from_json)
        except RecordingError as err:
            problems.append(str(err))
            continue
        if rank.job != job.job or rank.rank != number or number >= job.n_ranks:
            problems.append(f"the file {path.name} belongs to another job and is ignored")
        else:
            ranks[number] = rank
    if not ranks:
        raise RecordingError("; ".join([f"the recording in {folder} has no readable file of any rank", *problems]))
    if missing := [rank for rank in range(job.n_ranks) if rank not in ranks]:
        problems.append(f"{of_ranks(missing)} of {job.n_ranks} {'is' if len(missing) == 1 else 'are'} missing")
    usual, _ = Counter(rank.model for rank in ranks.values()).most_common(1)[0]
    if others := [number for number, rank in ranks.items() if rank.model != usual]:
        ranks = {number: rank for number, rank in ranks.items() if rank.model == usual}
        problems.append(
            f"{of_ranks(others)} trained another model than the other ranks and {'is' if len(others) == 1 else 'are'} "
            "ignored"
        )
    if short := [number for number, rank in ranks.items() if not rank.complete]:
        least = min(len(ranks[number].iterations) for number in short)
        problems.append(
            f"{of_ranks(short)} recorded fewer iterations than the {job.n_iterations} wanted ({least} at least)"
        )
    if not any(iteration.units for rank in ranks.values() for iteration in rank.iterations):
        problems.append(
            "no gradients were exchanged while this was recorded, so the clocks of hosts are aligned only by the "
            "offsets measured at the start"
        )
    return Recording(job=job, ranks=ranks, problems=tuple(problems))


def _parsed(path: Path, unpack: Callable[[bytes], bytes], build: Callable[[Json], _T]) -> _T:
    try:
        data = json.loads(unpack(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error) as err:
        raise RecordingError(
            f"the file {path} of the recorded job (written under `sirtaki profile`) cannot be read: {err}; check its "
            "permissions, or record the job again"
        ) from err
    version = data.get("format") if isinstance(data, dict) else None
    if version not in READABLE_VERSIONS:
        found = version if isinstance(version, int) else "none"
        known = " or ".join(map(str, READABLE_VERSIONS))
        raise RecordingError(
            f"the format version of the recording's file {path} must be {known}, found {found}; record the job again "
            "with this release of Sirtaki"
        )
    try:
        return build(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as err:
        raise RecordingError(f"the file {path} of the recording is damaged ({err!r}); record the job again") from err


def of_ranks(numbers: Sequence[int]) -> str:
    """Return a list of ranks in words: `rank 3`, `ranks 0, 1 and 2`, `ranks 0, 1, 2, … (64)`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(map(str, numbers[:3]))}, … ({len(numbers)})"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
