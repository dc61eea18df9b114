"""Recordings of jobs: what they hold (operators, units, links, memory), and the folder of files that they are."""

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
"""(outermost module, name in it)."""


class Holds(Enum):
    """What memory is for."""

    PARAMETERS = "parameters"
    MODULE_BUFFERS = "buffers of modules"
    OPTIMIZER = "optimizer state"
    FLAT_BUFFERS = "flat buffers"  # in which gradients travel
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"  # what the forward pass leaves for the backward pass, inputs too
    OTHER = "other"  # what is gone soon, and whatever else the script holds


class Allocation(NamedTuple):
    """A block of memory.

    Attributes:
        device: `StepMemory.devices`, by place.
        n_bytes: of it.
        holds: what it is for.
        phase: of the step in which it came; OTHER if it was there before.
        begin_s: when; None = before the step.
        end_s: when it was given back; None = after the step.
        added_s: of a gradient, when autograd had added it to `.grad`.
        call: `StepMemory.calls`, by place: the module whose forward pass made it, or whose backward pass; -1 = none.
        operator: that asked for it; "" if not known.
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
        name: by which the outermost one knows it, such as "layers.0"; "" = it is the outermost one.
        kind: its class.
        root: the outermost one, by its place among all.
    """

    name: str
    kind: str
    root: int

    @property
    def key(self) -> ModuleKey:
        """Equal on ranks that train the same."""
        return self.root, self.name


class ModuleCall(NamedTuple):
    """One forward pass of one module.

    Attributes:
        module: `RankRecording.modules`, by place.
        parent: the call that it was made in, by place; -1 = none.
        begin_s, end_s: of it.
        backward_begin_s, backward_end_s: of the backward pass of what it did; None = there was none.
        inputs, outputs: `StepMemory.allocations`, by place.
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
    """One iteration.

    Attributes:
        iteration: its number.
        begin_s, end_s: of it.
        devices: such as "cpu" and "cuda:0".
        batch: length of the first dimension of what the first module got; 0 = not known.
        allocations: that were there at some time in it.
        calls: of modules, in their order.
    """

    iteration: int
    begin_s: float
    end_s: float
    devices: tuple[str, ...]
    batch: int
    allocations: tuple[Allocation, ...]
    calls: tuple[ModuleCall, ...]


class Detail(Enum):
    """How much is recorded."""

    UNITS = "units"  # gradients, copies and units
    OPERATORS = "operators"  # and what torch.profiler sees


# ── one rank ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Operator(NamedTuple):
    """One operator that no other one has called. Those of one lane follow each other and never overlap.

    Where gradients are copied or waited for in the midst of an operator, it is cut in two around that.

    Attributes:
        name: such as "aten::addmm" or, of the backward pass, "AddmmBackward0".
        lane: what it runs on, by number: 0 is the thread that trains, others are other threads and devices' streams.
        phase: of the step that it belongs to.
        sequence: equal for an operator of the forward pass and that of the backward pass which belongs to it;
            -1 = none.
        after: places in the iteration's `operators` of those whose results it reads; empty where that is not recorded.
        module: `RankRecording.modules`, by place: the innermost one whose forward pass it is part of, or whose backward
            pass; -1 = none.
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
    """A phase of one step. The same phase may come several times (accumulation, several models).

    Where operators are not recorded, BACKWARD begins with its first ready gradient; what cannot be told is left out.
    """

    phase: Phase
    begin_s: float
    end_s: float


def phase_at(spans: Iterable[PhaseSpan], moment_s: float) -> Phase:
    """The first phase that lasts at a moment; OTHER where none does."""
    return next((span.phase for span in spans if span.begin_s <= moment_s <= span.end_s), Phase.OTHER)


class ReadyGradient(NamedTuple):
    """The gradient at that place of the layout of a buffer has come."""

    buffer: int
    place: int
    ready_s: float


class Copy(NamedTuple):
    """Gradients have been copied into flat buffers, by the thread that computes (on a GPU, by its stream)."""

    begin_s: float
    end_s: float
    n_gradients: int


class UnitId(NamedTuple):
    """What makes a unit the same thing on all ranks that take part in it.

    Attributes:
        iteration: of its optimizer (`GradientPipeline.iteration`), not of the recording.
        buffer: `Buffer.number`.
        start, stop: elements of the flat buffer.
        route: by which transport, and how the ranks go about it.
        stream: which of the communicators.
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
        issue_s: it was handed to its transport, with all its gradients in the buffer. No rank is done before all have
            issued it.
        begin_s: the transport took it up; None where it does not tell.
        done_s: its result was there.
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
        """Which."""
        return UnitId(*self[:6])


class Collective(NamedTuple):
    """Another operation between ranks: sparse rows, metrics, whatever a script asks for.

    Attributes:
        name: equal on all ranks.
        kind: such as "allreduce".
        begin_s: it was asked for.
        agreed_s: all ranks had asked for it.
        end_s: its result was there.
        n_bytes: of this rank's input.
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
        number: iterations of the optimizer before it; equal on all ranks.
        begin_s: the step before it had ended; the first recorded one begins with the recording.
        end_s: its optimizer step had ended.
        profiling: in it the order of gradients was negotiated; what it took is not usual.
        slowed: torch.profiler was on, and took time of its own. Others have their operators from these.
        spans, operators, ready, copies, units, collectives: what was in it, each by its begin.
        exposed_s: how long this rank waited for units after its gradients were all there.
        beside_s: processor time that its process used beside the thread that trains, which is communication's if
            operators use one thread only; None = not recorded.
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
        """This rank had joined the others, and reduced gradients without steps of its own in it, too."""
        iterations = {(one.buffer, one.iteration) for one in self.units}
        return len(iterations) > len({buffer for buffer, _ in iterations})

    @property
    def is_usual(self) -> bool:
        """It shows what a step takes, slowed or not."""
        return not (self.profiling or self.joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecording:
    """What one rank has recorded.

    Attributes:
        rank: among all of the job.
        job: `JobInfo.job`; recordings of several jobs do not belong together.
        model: a digest of the layouts, equal on ranks that train the same model.
        detail: how much was recorded.
        offset_s: what had to be added to this rank's clock to get rank 0's when the job began (Cristian's method).
        round_trip_s: of the quickest question that showed it: it is wrong by half of that at most. 0 on rank 0.
        clock_error_s: how far off moments of operators may be, as they are told by another clock.
        lanes: what the lanes of operators are, by number.
        complete: all iterations that were wanted are there.
        iterations: in their order.
        modules: that ran while torch.profiler was on; none where the model is compiled.
        memory: of one iteration; None where that is not recorded.
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
    """Where one rank runs.

    Attributes:
        rank: which.
        host: the lowest rank on its host; equal exactly if the host is.
        node: as `host`, where `SIRTAKI_LOCAL_SIZE` makes nodes of parts of a host; units between nodes do not share
            memory.
        host_name: for showing.
        clock: equal for ranks whose clocks are one.
        processors: those that the rank may use, by their number on the host.
        host_processors: how many the host has.
        quota: how many a limit (cgroup) leaves to the rank's container; None = all.
        threads: of one operator (`torch.get_num_threads`).
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
    """One flat buffer of one optimizer, and how it was reduced when the recording began.

    Attributes:
        number: of this buffer among all of the job; equal on all ranks.
        reducer: the number of its ranks' process set, and that of what reduces it there.
        ranks: that reduce it.
        layout: its gradients in their order; the last one of an optimizer's first buffer are the control flags.
        plan: its units.
        knobs: what the plan was made of.
    """

    number: int
    reducer: tuple[int, int]
    ranks: tuple[int, ...]
    layout: GradientLayout
    plan: CommPlan
    knobs: Knobs

    @property
    def is_cut_evenly(self) -> bool:
        """Its units are of the size that its knobs name."""
        size = max(1, self.knobs.unit_bytes // self.layout.itemsize_bytes)
        return self.knobs.cuts is None and self.plan.units[0].numel == min(size, self.layout.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """What is the same for all ranks.

    Attributes:
        job: names it.
        n_iterations: that were to be recorded.
        placement: of each rank, by rank.
        buffers: by number.
        links: what the warm-up's probes have found of each route; empty where nothing was probed.
        contention: what they have found of communication and computation slowing each other down.
        settings: variables in force that are not at their defaults.
        versions: of Sirtaki, PyTorch and Python.
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
        """How many ranks the whole job has."""
        return len(self.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All that a folder holds.

    Attributes:
        job: of all ranks.
        ranks: what was recorded, by rank; those of whom there is nothing are left out.
        problems: what is not as it should be, a sentence each: ranks that are missing, iterations that others have
            and some have not, ranks that train something else.
    """

    job: JobInfo
    ranks: Mapping[int, RankRecording]
    problems: tuple[str, ...] = ()

    @property
    def common_iterations(self) -> tuple[int, ...]:
        """Numbers of those that every rank which is there has recorded."""
        numbers = [{iteration.number for iteration in rank.iterations} for rank in self.ranks.values()]
        return tuple(sorted(set.intersection(*numbers))) if numbers else ()

    @property
    def usual_iterations(self) -> tuple[int, ...]:
        """Numbers of common iterations that show what a step takes, as many as follow each other.

        What torch.profiler has slowed only where there is nothing else.
        """
        iterations = [one for rank in self.ranks.values() for one in rank.iterations]
        slowed = {one.number for one in iterations if one.slowed}
        others = {one.number for one in iterations if not one.is_usual}
        usual = [number for number in self.common_iterations if number not in others]
        return _longest_run([number for number in usual if number not in slowed] or usual)


def _longest_run(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the longest run of numbers that follow each other; the last one of equals."""
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
"""Folders of others are not read. Version 2 knows neither modules nor memory."""

JOB_FILE, TRACE_FILE, REPORT_FILE = "job.json", "trace.json", "report.html"
_RANK_FILE = re.compile(r"rank-(\d+)\.json\.gz")

Json = dict[str, Any]
_T = TypeVar("_T")

DIGITS = 9
"""Of seconds; clocks tell nanoseconds."""


def job_to_json(job: JobInfo) -> Json:
    """A JSON-ready dict; `job_from_json` is its inverse."""
    return {
        "format": FORMAT_VERSION,
        **asdict(job),
        "buffers": [{**asdict(one), "plan": one.plan.to_json(), "knobs": one.knobs.to_json()} for one in job.buffers],
        "links": [
            {"route": [part.value for part in route], "link": link.to_json()} for route, link in job.links.items()
        ],
    }


def job_from_json(data: Json) -> JobInfo:
    """The job that `job_to_json` described.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    buffers = [{**one, "knobs": Knobs.from_json(one["knobs"])} for one in data["buffers"]]
    links = {msgspec.convert(one["route"], Route): LinkModel.from_json(one["link"]) for one in data["links"]}
    return msgspec.convert({**data, "buffers": buffers, "links": links}, JobInfo)


def rank_to_json(rank: RankRecording) -> Json:
    """A JSON-ready dict; `rank_from_json` is its inverse. Named tuples are rows, names of operators are numbers."""
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
    """What `rank_to_json` described, whose names of operators become words again in `data`.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it is something else.
    """
    for iteration in data["iterations"]:
        for row in iteration["operators"]:
            row[0] = data["operator_names"][row[0]]
    if memory := data.get("memory"):
        for row in memory["allocations"]:
            row[-1] = memory["operators"][row[-1]]
    return msgspec.convert(data, RankRecording)


def rank_path(folder: Path, rank: int) -> Path:
    """Where a rank's recording is."""
    return folder / f"rank-{rank:04d}.json.gz"


def holds_recording(folder: Path) -> bool:
    """A recording, or a part of one, is there."""
    return folder.is_dir() and any(name == JOB_FILE or _RANK_FILE.fullmatch(name) for name in os.listdir(folder))


def clear(folder: Path) -> None:
    """Removes a recording that is there, what was made of it in the folder, and nothing else.

    Raises:
        OSError: it cannot be removed.
    """
    for path in folder.iterdir():
        if path.name in (JOB_FILE, TRACE_FILE, REPORT_FILE) or _RANK_FILE.fullmatch(path.name):
            path.unlink()


def write_job(folder: Path, job: JobInfo) -> None:
    """Writes what all ranks have in common; several hosts may do so, all the same.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / JOB_FILE, json.dumps(job_to_json(job), indent=1).encode())


def write_rank(folder: Path, rank: RankRecording) -> None:
    """Writes what one rank has recorded.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(rank_to_json(rank), separators=(",", ":"))
    write_whole(rank_path(folder, rank.rank), gzip.compress(text.encode(), compresslevel=1))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that nobody sees before it is whole.

    Raises:
        OSError: it cannot be written.
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
    """What a folder holds, as far as it can be read.

    Raises:
        RecordingError: there is nothing to show: no such folder, no recording in it, one of another version, or
            nothing of any rank.
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
    """`1 rank`, `3 ranks`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def of_ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`, `ranks 0, 1, 2, … (64)`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(map(str, numbers[:3]))}, … ({len(numbers)})"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
