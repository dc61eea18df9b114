"""Data classes of a recording (operators, units, links, memory), and the folder of files that stores one."""

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
from sirtaki.measures import LinkModel

ModuleKey = tuple[int, str]
"""(index of the outermost module, name inside it)."""


class Holds(Enum):
    """Purpose of an allocation."""

    PARAMETERS = "parameters"
    MODULE_BUFFERS = "buffers of modules"
    OPTIMIZER = "optimizer state"
    FLAT_BUFFERS = "flat buffers"  # units are ranges of these
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"  # saved by the forward pass for the backward pass, inputs included
    OTHER = "other"  # temporaries, and other tensors of the user's script


class Allocation(NamedTuple):
    """One block of memory.

    Attributes:
        device: index in `StepMemory.devices`.
        n_bytes: size of the block.
        holds: purpose of the block.
        phase: phase of the step in which the block was allocated; OTHER if it existed before the step.
        begin_s: time of allocation; None = before the step.
        end_s: time of release; None = after the step.
        added_s: for a gradient, the time at which autograd had added it to `.grad`.
        call: index in `StepMemory.calls` of the module call whose forward or backward pass allocated the block; -1 =
            none.
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
    """One module.

    Attributes:
        name: qualified name inside the outermost module, such as "layers.0"; "" = the outermost module itself.
        kind: class name.
        root: index of the outermost module among all outermost modules.
    """

    name: str
    kind: str
    root: int

    @property
    def key(self) -> ModuleKey:
        """Return a key that is equal on all ranks that train the same model."""
        return self.root, self.name


class ModuleCall(NamedTuple):
    """One forward pass of one module.

    Attributes:
        module: index in `RankRecording.modules`.
        parent: index of the enclosing call; -1 = none.
        begin_s, end_s: first and last moment of the forward pass.
        backward_begin_s, backward_end_s: the same for the backward pass of this call; None = there was no backward
        pass.
        inputs, outputs: indices in `StepMemory.allocations`.
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
    """Memory use of one iteration.

    Attributes:
        iteration: number of the iteration.
        begin_s, end_s: first and last moment of the iteration.
        devices: device names, such as "cpu" and "cuda:0".
        batch: first dimension of the first module's first input; 0 = unknown.
        allocations: blocks that existed at any time in the iteration.
        calls: module calls, in the order in which they began.
    """

    iteration: int
    begin_s: float
    end_s: float
    devices: tuple[str, ...]
    batch: int
    allocations: tuple[Allocation, ...]
    calls: tuple[ModuleCall, ...]


class Detail(Enum):
    """Level of detail of a recording."""

    UNITS = "units"  # gradients, copies and units
    OPERATORS = "operators"  # and events of torch.profiler


# ── one rank ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Operator(NamedTuple):
    """One top-level operator. Operators of one lane never overlap.

    The recorder splits an operator in two where gradients are copied or waited for inside it.

    Attributes:
        name: such as "aten::addmm" or, in the backward pass, "AddmmBackward0".
        lane: index of the thread or device stream that runs the operator; 0 is the training thread.
        begin_s, end_s: first and last moment of the operator.
        phase: phase of the step.
        sequence: autograd's sequence number, shared by a forward operator and its backward operator; -1 = none.
        after: indices in the iteration's `operators` of the producers of its inputs; empty if dependencies were not
            recorded.
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
    """One phase of one step. A phase may occur several times, because of gradient accumulation or several models.

    Without recorded operators, BACKWARD begins with its first ready gradient, and undetectable phases are omitted.
    """

    phase: Phase
    begin_s: float
    end_s: float


def phase_at(spans: Iterable[PhaseSpan], moment_s: float) -> Phase:
    """Return the first phase that includes this moment; OTHER if no phase does."""
    return next((span.phase for span in spans if span.begin_s <= moment_s <= span.end_s), Phase.OTHER)


class ReadyGradient(NamedTuple):
    """Time at which autograd produced the gradient with index `place` in a buffer's layout."""

    buffer: int
    place: int
    ready_s: float


class Copy(NamedTuple):
    """One copy of gradients into flat buffers, made by the training thread or, on a GPU, by its stream."""

    begin_s: float
    end_s: float
    n_gradients: int


class UnitId(NamedTuple):
    """Identity of a unit, equal on all participating ranks.

    Attributes:
        iteration: iteration of the optimizer (`GradientPipeline.iteration`), not of the recording.
        buffer: `Buffer.number`.
        start, stop: range of elements in the flat buffer.
        route: transport and algorithm.
        stream: index of the communicator.
    """

    iteration: int
    buffer: int
    start: int
    stop: int
    route: Route
    stream: int


class RecordedUnit(NamedTuple):
    """One unit on one rank.

    Attributes:
        iteration, buffer, start, stop, route, stream: see `UnitId`.
        issue_s: time at which the unit, with all its gradients copied, was passed to the transport. No rank completes
            the unit before all ranks have issued it.
        begin_s: time at which the transport started the unit; None if the transport does not report it.
        done_s: time at which the result was available.
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
        """Return the identity shared by all ranks."""
        return UnitId(*self[:6])


class Collective(NamedTuple):
    """One collective operation other than a unit: sparse rows, metrics, or a call by the user's script.

    Attributes:
        name: name of the operation, equal on all ranks.
        kind: such as "allreduce".
        begin_s: time of this rank's request.
        agreed_s: time at which all ranks had requested the operation.
        end_s: time at which the result was available.
        n_bytes: size of this rank's input.
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
        number: count of optimizer iterations before this one; equal on all ranks.
        begin_s: end of the previous step; for the first recorded iteration, begin of the recording.
        end_s: end of the optimizer step.
        profiling: ranks negotiated the gradient order in this iteration, so its duration is not representative.
        slowed: torch.profiler was on and added its own overhead. Operators of other iterations are taken from such an
            iteration.
        spans, operators, ready, copies, units, collectives: events of the iteration, each sorted by begin.
        exposed_s: time that this rank waited for units after its last gradient was ready.
        beside_s: processor time of this process outside the training thread. All of it is communication if operators
            use a single thread. None = not recorded.
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
        """Return whether this rank had called `join()`, so that it also reduced gradients without steps of its own."""
        iterations = {(one.buffer, one.iteration) for one in self.units}
        return len(iterations) > len({buffer for buffer, _ in iterations})

    @property
    def is_usual(self) -> bool:
        """Return whether the duration represents an ordinary step. Profiler overhead is ignored here (`slowed`)."""
        return not (self.profiling or self.joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecording:
    """Recording of one rank.

    Attributes:
        rank: global rank.
        job: `JobInfo.job`; readers reject recordings of different jobs.
        model: digest of the gradient layouts, equal on ranks that train the same model.
        detail: level of detail.
        offset_s: offset from this rank's clock to rank 0's when the job began (Cristian's method).
        round_trip_s: shortest round trip of the offset measurement. The offset is wrong by at most half of it. 0 on
            rank 0.
        clock_error_s: error bound of operator times, because torch.profiler uses another clock.
        lanes: names of the operator lanes, by index.
        complete: all requested iterations were recorded.
        iterations: iterations, in order.
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
    """Location of one rank.

    Attributes:
        rank: global rank.
        host: lowest rank on the same host, so that it identifies the host.
        node: lowest rank on the same node, where `SIRTAKI_LOCAL_SIZE` splits a host into several nodes. Units between
            nodes do not use shared memory.
        host_name: host name, for display.
        clock: identifier of the clock; equal for ranks that read the same clock.
        processors: ids of the processors that the rank may use.
        host_processors: number of processors of the host.
        quota: number of processors that a cgroup limit allows the rank's container; None = all.
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
    """One flat buffer of one optimizer, and its plan when the recording began.

    Attributes:
        number: id of the buffer in the job; equal on all ranks.
        reducer: id of the process set, and id of the reducer in that process set.
        ranks: ranks that reduce the buffer.
        layout: gradients, in order; the control flags are the last entry of an optimizer's first buffer.
        plan: units of the buffer.
        knobs: knobs that the plan was built from.
    """

    number: int
    reducer: tuple[int, int]
    ranks: tuple[int, ...]
    layout: GradientLayout
    plan: CommPlan
    knobs: Knobs

    @property
    def is_cut_evenly(self) -> bool:
        """Return whether all units have the size that the knobs request."""
        size = max(1, self.knobs.unit_bytes // self.layout.itemsize_bytes)
        return self.knobs.cuts is None and self.plan.units[0].numel == min(size, self.layout.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """Properties that all ranks of a job share.

    Attributes:
        job: id of the job.
        n_iterations: requested number of iterations.
        placement: location of each rank, by rank.
        buffers: flat buffers, by number.
        links: link models that the warm-up's probes measured, by route; empty if nothing was probed.
        contention: measured slowdown of communication and computation by each other.
        settings: environment variables in force that differ from their defaults.
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
        ranks: recordings, by rank; ranks without a recording are omitted.
        problems: one sentence for each defect: missing ranks, iterations that only some ranks recorded, ranks that
            trained another model.
    """

    job: JobInfo
    ranks: Mapping[int, RankRecording]
    problems: tuple[str, ...] = ()

    @property
    def common_iterations(self) -> tuple[int, ...]:
        """Return the numbers of the iterations that every recorded rank has."""
        numbers = [{iteration.number for iteration in rank.iterations} for rank in self.ranks.values()]
        return tuple(sorted(set.intersection(*numbers))) if numbers else ()

    @property
    def usual_iterations(self) -> tuple[int, ...]:
        """Return the longest run of consecutive common iterations whose duration is representative.

        Iterations slowed by torch.profiler are used only if there are no others.
        """
        iterations = [one for rank in self.ranks.values() for one in rank.iterations]
        slowed = {one.number for one in iterations if one.slowed}
        others = {one.number for one in iterations if not one.is_usual}
        usual = [number for number in self.common_iterations if number not in others]
        return _longest_run([number for number in usual if number not in slowed] or usual)


def _longest_run(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the longest run of consecutive numbers; of equally long runs, the last."""
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
"""Folder formats that can be read. Version 2 has neither modules nor memory."""

JOB_FILE, TRACE_FILE, REPORT_FILE = "job.json", "trace.json", "report.html"
_RANK_FILE = re.compile(r"rank-(\d+)\.json\.gz")

Json = dict[str, Any]
_T = TypeVar("_T")

DIGITS = 9
"""Decimal digits of stored seconds, because clocks resolve nanoseconds."""


def job_to_json(job: JobInfo) -> Json:
    """Return a JSON-ready dict. `job_from_json` is the inverse."""
    return {
        "format": FORMAT_VERSION,
        **asdict(job),
        "buffers": [{**asdict(one), "plan": one.plan.to_json(), "knobs": one.knobs.to_json()} for one in job.buffers],
        "links": [
            {"route": [part.value for part in route], "link": link.to_json()} for route, link in job.links.items()
        ],
    }


def job_from_json(data: Json) -> JobInfo:
    """Build the job from the output of `job_to_json`.

    Raises:
        KeyError, TypeError, ValueError: `data` has another structure.
    """
    buffers = [{**one, "knobs": Knobs.from_json(one["knobs"])} for one in data["buffers"]]
    links = {msgspec.convert(one["route"], Route): LinkModel.from_json(one["link"]) for one in data["links"]}
    return msgspec.convert({**data, "buffers": buffers, "links": links}, JobInfo)


def rank_to_json(rank: RankRecording) -> Json:
    """Return a JSON-ready dict. `rank_from_json` is the inverse.

    Named tuples become rows, and operator names become indices into `operator_names`, because names repeat often.
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
    """Build the recording from the output of `rank_to_json`. Modifies `data`: indices become operator names.

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
    """Return the path of a rank's file."""
    return folder / f"rank-{rank:04d}.json.gz"


def holds_recording(folder: Path) -> bool:
    """Return whether the folder contains a recording or a part of one."""
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
    """Write the properties that all ranks share. Several hosts may write the same file, because the content is equal.

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
    """Write a file atomically, so that readers never see a part of it.

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
    """Read a recording folder. Unreadable files of single ranks are skipped and reported in `Recording.problems`.

    Raises:
        RecordingError: the folder does not exist, contains no recording or one of another version, or has no readable
            recording of any rank.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordingError(f"{folder} is no folder: give the one that `sirtaki profile` has written")
    names = sorted(os.listdir(folder))
    files = {int(found[1]): folder / name for name in names if (found := _RANK_FILE.fullmatch(name))}
    if JOB_FILE not in names:
        what = f"it has recordings of {len(files)} ranks, but no {JOB_FILE}" if files else "it holds no recording"
        raise RecordingError(f"{folder} cannot be read: {what}")
    job = _parsed(folder / JOB_FILE, bytes, job_from_json)
    ranks, problems = dict[int, RankRecording](), list[str]()
    for number, path in files.items():
        try:
            rank = _parsed(path, gzip.decompress, rank_from_json)
        except RecordingError as err:
            problems.append(str(err))
            continue
        if rank.job != job.job or rank.rank != number or number >= job.n_ranks:
            problems.append(f"{path.name} is of another job, and is left out")
        else:
            ranks[number] = rank
    if not ranks:
        raise RecordingError("; ".join([f"{folder} has nothing of any rank", *problems]))
    if missing := [rank for rank in range(job.n_ranks) if rank not in ranks]:
        problems.append(f"{of_ranks(missing)} of {job.n_ranks} {'is' if len(missing) == 1 else 'are'} missing")
    usual, _ = Counter(rank.model for rank in ranks.values()).most_common(1)[0]
    if others := [number for number, rank in ranks.items() if rank.model != usual]:
        ranks = {number: rank for number, rank in ranks.items() if rank.model == usual}
        problems.append(f"{of_ranks(others)} trained another model, and what they recorded is left out")
    if short := [number for number, rank in ranks.items() if not rank.complete]:
        least = min(len(ranks[number].iterations) for number in short)
        problems.append(
            f"{of_ranks(short)} recorded fewer iterations than the {job.n_iterations} wanted ({least} at least)"
        )
    if not any(iteration.units for rank in ranks.values() for iteration in rank.iterations):
        problems.append(
            "no gradients were exchanged while this was recorded, so clocks of hosts are as far apart as at the start"
        )
    return Recording(job=job, ranks=ranks, problems=tuple(problems))


def _parsed(path: Path, unpack: Callable[[bytes], bytes], build: Callable[[Json], _T]) -> _T:
    try:
        data = json.loads(unpack(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error) as err:
        raise RecordingError(f"{path} cannot be read: {err}") from err
    version = data.get("format") if isinstance(data, dict) else None
    if version not in READABLE_VERSIONS:
        found = f"format {version}" if isinstance(version, int) else "no recording"
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise RecordingError(f"{path} has {found}; this version of Sirtaki reads formats {known}: record the job anew")
    try:
        return build(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as err:
        raise RecordingError(f"{path} is damaged: {err!r}") from err


def counted(number: int, what: str) -> str:
    """Return a number with its noun: `1 rank`, `3 ranks`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def of_ranks(numbers: Sequence[int]) -> str:
    """Return a list of ranks in words: `rank 3`, `ranks 0, 1 and 2`, `ranks 0, 1, 2, … (64)`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(map(str, numbers[:3]))}, … ({len(numbers)})"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
