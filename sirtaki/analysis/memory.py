"""Replay (simulate) the memory use of a training step, and choose a change of the script that lowers the peak to a
budget.

Such changes are recomputation of activations and gradient accumulation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from textwrap import fill

from sirtaki.autotune.knobs import format_bytes
from sirtaki.autotune.model.replayer import Activity, Phase
from sirtaki.errors import RecordingError

from .global_graph import ms, play, replayed
from .job_model import JobModel, Program, ThreadInterval
from .recording import Allocation, Holds, Module, ModuleCall, ModuleKey, RankRecording, Recording, StepMemory, phase_at
from .what_if import Baseline

_OF_SAMPLES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
_LAST = 1 << 30

_Event = tuple[float, int, int, int]
"""Allocation or release of a block of memory: (moment, order among events of the same moment, +1 for an allocation or
-1 for a release, index of the block in `StepMemory.allocations`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment of a step with the highest memory use.

    Attributes:
        n_bytes: bytes in use at the moment.
        at_s: time of the moment.
        held: bytes of each block of memory in use at the moment, by index in `StepMemory.allocations`.
    """

    n_bytes: int
    at_s: float
    held: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Memory in use, by purpose, from one moment until the next `Moment` of a curve of memory use over time."""

    at_s: float
    n_bytes: Mapping[Holds, int]

    @property
    def total_bytes(self) -> int:
        """Return the bytes in use for all purposes."""
        return sum(self.n_bytes.values())


class MemoryReplay:
    """Replay (simulation) of one device's memory use in one step, as recorded or with a change that lowers the peak.

    Attributes:
        memory: recorded memory use of the step.
        device: index of the device; by default the first device that is not a CPU, or the CPU if there is no other.
    """

    def __init__(self, memory: StepMemory, device: int | None = None) -> None:
        if device is None:
            device = next((place for place, name in enumerate(memory.devices) if not name.startswith("cpu")), 0)
        self.memory, self.device = memory, device
        own = [(place, one) for place, one in enumerate(memory.allocations) if one.device == device]
        self._initial = [place for place, one in own if one.begin_s is None]
        self._allocated = sorted((one.begin_s, place) for place, one in own if one.begin_s is not None)
        self._released = [(one.end_s, place) for place, one in own if one.end_s is not None]
        self._gradients = [place for _, place in self._allocated if memory.allocations[place].holds is Holds.GRADIENTS]

    def saved(self, number: int, *, needed: Collection[int] = ()) -> list[int]:
        """Return the indices of the blocks of memory that a module call saves only for its own backward pass.

        Args:
            number: index of the module call.
            needed: indices of the blocks of memory that other module calls need, which are excluded.
        """
        call = self.memory.calls[number]
        begin_s, end_s = call.backward_begin_s, call.backward_end_s
        if begin_s is None or end_s is None:
            return []
        kept = {*call.outputs, *needed}
        return [
            place
            for place in self._made_in(call)
            if place not in kept and begin_s <= (self.memory.allocations[place].end_s or 0.0) <= end_s
        ]

    def peak(self, recomputed: Sequence[int] = (), passes: int = 1) -> Peak:
        """Return the memory peak of the step, as recorded, or with recomputation of activations or gradient
        accumulation.

        Args:
            recomputed: indices of module calls whose forward pass is repeated in the backward pass. No call may be
                inside another.
            passes: number of forward and backward passes into which gradient accumulation divides the batch.
        """
        events = sorted(self._events(recomputed))
        if passes == 1:
            return self._highest(self._initial, events, 1)
        # In every pass but the first, count the memory of all gradients from the start of the pass: autograd adds the
        # new gradients to those of the first pass.
        there, allocations, later = [*self._initial, *self._gradients], self.memory.allocations, set(self._gradients)
        added = [(allocations[place].added_s or 0.0, _LAST, -1, place) for place in self._gradients]
        last = self._highest(there, sorted([*events, *added]), passes)
        if passes == 2:
            return last
        between = [
            event
            for event in events
            if (event[2] > 0 or event[3] not in later) and allocations[event[3]].phase is not Phase.UPDATE
        ]
        return max(self._highest(there, sorted([*between, *added]), passes), last, key=lambda one: one.n_bytes)

    def curve(self) -> list[Moment]:
        """Return the recorded memory use over time, by purpose (such as activations)."""
        held = Counter[Holds]()
        for place in self._initial:
            held[self.memory.allocations[place].holds] += self.memory.allocations[place].n_bytes
        found = [Moment(at_s=self.memory.begin_s, n_bytes=dict(held))]
        for at_s, _, sign, place in sorted(self._events(())):
            held[self.memory.allocations[place].holds] += sign * self.memory.allocations[place].n_bytes
            found.append(Moment(at_s=at_s, n_bytes=dict(held)))
        return found

    def _made_in(self, call: ModuleCall) -> list[int]:
        first, last = bisect_left(self._allocated, (call.begin_s, 0)), bisect_left(self._allocated, (call.end_s, 0))
        return [place for _, place in self._allocated[first:last]]

    def _events(self, recomputed: Sequence[int]) -> list[_Event]:
        calls = self.memory.calls
        # {block of memory: latest moment at which a repeated forward pass reads it}
        needed_s = defaultdict[int, float](float)
        for number in recomputed:
            for place in calls[number].inputs:
                needed_s[place] = max(needed_s[place], calls[number].backward_begin_s or 0.0)
        found = [(begin_s, 0, 1, place) for begin_s, place in self._allocated]
        for end_s, place in self._released:
            later_s = needed_s.get(place, 0.0)
            found.append((later_s, _LAST, -1, place) if later_s > end_s else (end_s, 0, -1, place))
        for number in recomputed:
            needed = [place for other in recomputed if other != number for place in calls[other].inputs]
            found += self._repeated(calls[number], set(self.saved(number, needed=needed)))
        return found

    def _repeated(self, call: ModuleCall, saved: Collection[int]) -> Iterator[_Event]:
        """Yield the allocations and releases of a module call whose forward pass is repeated in the backward pass.

        The blocks of memory that are saved for the backward pass (`saved`) are released after the first forward pass.
        When the forward pass is repeated, these blocks and its temporary blocks are allocated again.
        """
        if call.backward_begin_s is None:
            return
        again: list[tuple[float, int, int]] = []
        for place in self._made_in(call):
            one = self.memory.allocations[place]
            assert one.begin_s is not None
            if place in saved:
                yield call.end_s, 0, -1, place
                again.append((one.begin_s, 1, place))
            elif one.end_s is not None and one.end_s <= call.end_s:
                again += ((one.begin_s, 1, place), (one.end_s, -1, place))
        for order, (_, sign, place) in enumerate(sorted(again), start=-len(again)):
            yield call.backward_begin_s, order, sign, place

    def _highest(self, there: Sequence[int], events: Sequence[_Event], passes: int) -> Peak:
        sizes = [_size(one, passes) for one in self.memory.allocations]
        changes = [(place, sign * sizes[place]) for _, _, sign, place in events]
        totals = list(accumulate((n_bytes for _, n_bytes in changes), initial=sum(sizes[place] for place in there)))
        highest = totals.index(max(totals))
        held = Counter({place: sizes[place] for place in there})
        for place, n_bytes in changes[:highest]:
            held[place] += n_bytes
        at_s = events[highest - 1][0] if highest else self.memory.begin_s
        return Peak(n_bytes=totals[highest], at_s=at_s, held={place: held[place] for place in held if held[place]})


def _size(one: Allocation, passes: int) -> int:
    of_samples = one.begin_s is not None and one.phase in _OF_SAMPLES and one.holds is not Holds.GRADIENTS
    return one.n_bytes // passes if of_samples else one.n_bytes


CALL_S, OPERATOR_S = 1e-3, 25e-6
"""Overhead of `torch.utils.checkpoint` in seconds, measured on two CPU cores: per module call, and per operator in the
call.
"""

AGAIN = "re-computation"
ADDING = "add gradients"


def with_recomputation(job: JobModel, modules: Collection[ModuleKey]) -> JobModel:
    """Return the job in which `modules` repeat their forward pass at the begin of their backward pass (activation
    checkpointing).

    Args:
        job: recorded job, with the module of each operator.
        modules: modules whose forward pass is repeated. No module may be inside another.
    """
    return job.changed(program=lambda _, program: tuple(_again(program, modules)))


def with_accumulation(job: JobModel, passes: int) -> JobModel:
    """Return the job in which a step has several passes, each over a part of the batch (gradient accumulation). Only
    the last pass exchanges gradients.

    It is assumed that operator time is proportional to the number of samples, that Python code between operators takes
    the same time in each pass, and that adding gradients takes as long as copying them.
    """
    return job.changed(program=lambda _, program: tuple(_in_passes(program, passes)))


def _again(program: Program, modules: Collection[ModuleKey]) -> Iterator[ThreadInterval]:
    owners = [_owner(piece.module, modules) for piece in program]
    repeat_s: dict[ModuleKey, float] = {}
    last: ModuleKey | None = None
    # Time since the last operator. It counts to a module if both the last and the next operator belong to the module.
    gap_s = 0.0
    for piece, owner in zip(program, owners, strict=True):
        if piece.phase is Phase.FORWARD and not piece.name:
            gap_s += piece.seconds
        elif piece.phase is Phase.FORWARD:
            if owner is not None:
                again_s = piece.seconds + (gap_s if owner == last else 0.0)
                repeat_s[owner] = repeat_s.get(owner, CALL_S) + OPERATOR_S + again_s
            last, gap_s = owner, 0.0
        elif piece.phase is Phase.BACKWARD and owner is not None and owner in repeat_s:
            seconds = repeat_s.pop(owner)
            yield ThreadInterval(Activity.COMPUTE, Phase.BACKWARD, seconds, AGAIN, module=piece.module)
        yield piece


def _owner(module: ModuleKey | None, modules: Collection[ModuleKey]) -> ModuleKey | None:
    while module is not None and module not in modules:
        root, name = module
        module = (root, name.rpartition(".")[0]) if name else None
    return module


def _in_passes(program: Program, passes: int) -> Iterator[ThreadInterval]:
    body = [place for place, piece in enumerate(program) if piece.phase in (Phase.FORWARD, Phase.BACKWARD)]
    if not body:
        yield from program
        return
    first, last = body[0], body[-1] + 1
    yield from program[:first]
    for number in range(passes):
        is_last = number == passes - 1
        for piece in program[first:last]:
            bare = piece if is_last else replace(piece, ready=(), issues=())
            if piece.activity is Activity.COPY:
                if number:
                    yield replace(piece, activity=Activity.COMPUTE, name=ADDING, ready=(), issues=(), waits=())
                if is_last:
                    yield piece
            elif is_last or not piece.waits:
                yield replace(bare, seconds=piece.seconds / passes if piece.name else piece.seconds)
    yield from program[last:]


MAX_PASSES = 64
MAX_MODULES = 100
"""Maximum number of modules at each depth of the model that the search for recomputation considers: those whose
activations take the most memory.
"""

WITH_RUNNING_STATISTICS = ("BatchNorm", "SyncBatchNorm")
"""Prefixes of class names of modules that keep running statistics of batches, such as BatchNorm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """Input of a search for changes of the training script ("remedies") that lower the memory peak.

    Attributes:
        replay: replay (simulation) of the memory use of the rank that is examined.
        modules: modules of the model on this rank.
        budget_bytes: highest peak that is allowed.
    """

    replay: MemoryReplay
    modules: Sequence[Module]
    budget_bytes: int

    @property
    def passes(self) -> int:
        """Return the number of forward passes of the whole model in the recorded step; more than 1 with gradient
        accumulation.
        """
        calls = self.replay.memory.calls
        return max(1, sum(call.parent < 0 and call.module == calls[0].module for call in calls))

    def has_running_statistics(self, numbers: Sequence[int] | None = None) -> bool:
        """Return whether some module keeps running statistics of batches, as BatchNorm does.

        Args:
            numbers: indices of modules to examine, with all modules inside them; None = all modules.
        """
        names = [""] if numbers is None else [self.modules[number].name for number in numbers]
        return any(
            one.kind.startswith(WITH_RUNNING_STATISTICS)
            and any(not name or f"{one.name}.".startswith(f"{name}.") for name in names)
            for one in self.modules
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRemedy:
    """One change of the training script that lowers the memory peak of a step.

    Attributes:
        words: description of the change for users.
        lines: lines of code with which users make the change.
        peak_bytes: predicted memory peak with the change.
        apply: maps the model of a job to the model with the change.
        notes: one sentence for each side effect of the change.
    """

    words: str
    lines: tuple[str, ...]
    peak_bytes: int
    apply: Callable[[JobModel], JobModel]
    notes: tuple[str, ...] = ()


def recomputation(question: MemoryQuestion) -> Iterator[MemoryRemedy]:
    """Yield changes that lower the memory peak by recomputation: some modules repeat their forward pass instead of
    saving activations (Chen et al., 2016).

    For each depth of the module tree, a greedy search adds modules until the memory budget is met. It always adds the
    module that saves most bytes at the peak per second of its forward pass. At the end, it removes modules whose
    recomputation is not needed.
    """
    for numbers, peak in _smallest_sets(question, passes=1):
        yield _recomputed(question, numbers, peak)


def accumulation(question: MemoryQuestion) -> Iterator[MemoryRemedy]:
    """Yield one change that lowers the memory peak by gradient accumulation: the fewest passes over parts of the batch
    that meet the memory budget or, if no number of passes meets it, those with the lowest peak.
    """
    found: MemoryRemedy | None = None
    for passes in _passes(question):
        remedy = _accumulated(question, passes, question.replay.peak(passes=passes).n_bytes)
        if found is None or remedy.peak_bytes < found.peak_bytes:
            found = remedy
        if found.peak_bytes <= question.budget_bytes:
            break
    if found is not None:
        yield found


def both(question: MemoryQuestion) -> Iterator[MemoryRemedy]:
    """Yield changes that lower the memory peak by gradient accumulation together with recomputation of activations.

    All have the fewest passes over parts of the batch with which the memory budget can be met. They differ in the depth
    of the module tree at which modules are recomputed. If the budget cannot be met, only the change with the lowest
    peak is yielded.
    """

    def of(passes: int) -> list[MemoryRemedy]:
        """Return changes with this number of passes, one per depth of the module tree, by ascending memory peak."""
        smallest_sets = sorted(_smallest_sets(question, passes=passes), key=lambda one: one[1].n_bytes)
        return [_both(question, passes, numbers, peak) for numbers, peak in smallest_sets]

    def fits(found: Sequence[MemoryRemedy]) -> bool:
        return any(one.peak_bytes <= question.budget_bytes for one in found)

    counts = list(_passes(question))
    most = of(counts[-1]) if counts else []
    if not fits(most):
        yield from most[:1]  # The change with the lowest peak, because fewer passes have a higher peak.
        return
    yield from next(filter(fits, map(of, counts[:-1])), most)


PASSES: tuple[Mapping[str, Callable[[MemoryQuestion], Iterator[MemoryRemedy]]], ...] = (
    {"re-computation": recomputation, "accumulation": accumulation},
    {"both": both},
)
"""Searches for changes ("remedies") that lower the memory peak, by name, in stages.

A stage runs only if no change found in the previous stage meets the memory budget. Each search yields the changes that
meet the budget with the least overhead. If none meets it, the search yields the change with the lowest peak.
"""


def _both(question: MemoryQuestion, passes: int, numbers: Sequence[int], peak: Peak) -> MemoryRemedy:
    one, other = _recomputed(question, numbers, peak), _accumulated(question, passes, peak.n_bytes)
    return MemoryRemedy(
        words=f"{one.words}, and {other.words}",
        lines=(*one.lines, *other.lines),
        peak_bytes=peak.n_bytes,
        apply=lambda job: other.apply(one.apply(job)),
        notes=(*one.notes, *other.notes),
    )


# ── accumulation ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _passes(question: MemoryQuestion) -> Iterator[int]:
    """Yield numbers of passes to try: gradient accumulation would replace each recorded pass by so many smaller ones.

    Each number divides the batch, so that the smaller batches are equal. If the batch is unknown, yield powers of two.
    """
    batch = question.replay.memory.batch
    for passes in range(2, MAX_PASSES + 1):
        if batch % passes == 0 if batch else passes & (passes - 1) == 0:
            yield passes


def _accumulated(question: MemoryQuestion, passes: int, peak_bytes: int) -> MemoryRemedy:
    batch, all_passes = question.replay.memory.batch, passes * question.passes
    part = f"{batch // passes} samples instead of {batch}" if batch else f"1/{passes} of the samples"
    instead = f" instead of {question.passes}" if question.passes > 1 else ""
    note = "modules with running statistics (BatchNorm) see parts of a batch, so training differs a little"
    return MemoryRemedy(
        words=f"{all_passes} passes over parts of the batch before each step{instead}",
        lines=(
            f"optimizer = hvd.DistributedOptimizer(optimizer, ..., backward_passes_per_step={all_passes})",
            f"# batches of {part}; for each step {all_passes} times: (loss(model(part)) / {all_passes}).backward()",
        ),
        peak_bytes=peak_bytes,
        apply=partial(with_accumulation, passes=passes),
        notes=(note,) if question.has_running_statistics() else (),
    )


# ── re-computation ────────────────────────────────────────────────────────────────────────────────────────────────────


def _recomputed(question: MemoryQuestion, numbers: Sequence[int], peak: Peak) -> MemoryRemedy:
    chosen = [question.modules[number] for number in numbers]
    names = ", ".join(f'"{one.name}"' for one in chosen) + ("," if len(chosen) == 1 else "")
    kinds = "/".join(dict.fromkeys(one.kind for one in chosen))
    note = "modules with running statistics (BatchNorm) count each batch twice in them"
    return MemoryRemedy(
        words=f"re-computation of {len(chosen)} {'module' if len(chosen) == 1 else 'modules'} ({kinds})",
        lines=(
            "import functools",
            "from torch.utils.checkpoint import checkpoint",
            *fill(f"for name in ({names}):", width=110, subsequent_indent=" " * 8).splitlines(),
            "    block = model.get_submodule(name)",
            "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)",
        ),
        peak_bytes=peak.n_bytes,
        apply=partial(with_recomputation, modules=frozenset(one.key for one in chosen)),
        notes=(note,) if question.has_running_statistics(numbers) else (),
    )


def _smallest_sets(question: MemoryQuestion, *, passes: int) -> Iterator[tuple[list[int], Peak]]:
    """Yield (indices of modules, memory peak) for each depth of the module tree: the smallest set of modules whose
    recomputation meets the memory budget or, if no set meets it, the set with the lowest peak.
    """
    seen: set[frozenset[int]] = set()
    for blocks in _depths(question):
        chosen, peak = _chosen(question, blocks, passes)
        if chosen and frozenset(chosen) not in seen:
            seen.add(frozenset(chosen))
            yield sorted(chosen), peak


def _depths(question: MemoryQuestion) -> Iterator[dict[int, list[int]]]:
    """Yield for each depth of the module tree a set of modules that may be recomputed, with the calls of each module.

    The set consists of the modules at the depth, and of shallower modules without submodules, so that no module of the
    set contains another. Modules that save no memory, or that cannot be recomputed, are omitted.
    """
    memory = question.replay.memory
    depths = list[int]()
    for call in memory.calls:
        depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
    parents = {call.parent for call in memory.calls}
    for depth in range(1, max(depths, default=0) + 1):
        found: dict[int, list[int]] = {}
        for place, call in enumerate(memory.calls):
            is_leaf = place not in parents
            if depths[place] == depth or (is_leaf and 0 < depths[place] < depth):
                found.setdefault(call.module, []).append(place)
        # Exclude modules that are called at several depths, because a module of the set could then contain another.
        usable = {
            module: calls
            for module, calls in found.items()
            if all((memory.calls[place].backward_begin_s or 0.0) >= memory.calls[place].end_s for place in calls)
            and not question.modules[module].name.startswith("(")
            and len(calls) == sum(call.module == module for call in memory.calls)
        }
        left = {
            module: sum(memory.allocations[place].n_bytes for call in calls for place in question.replay.saved(call))
            for module, calls in usable.items()
        }
        most = sorted((module for module in usable if left[module]), key=lambda module: -left[module])[:MAX_MODULES]
        if most:
            yield {module: usable[module] for module in most}


def _chosen(question: MemoryQuestion, blocks: dict[int, list[int]], passes: int) -> tuple[list[int], Peak]:
    replay = question.replay
    calls = replay.memory.calls
    calls_s = [call.end_s - call.begin_s for call in calls]
    forward_s = {module: sum(calls_s[place] for place in own) for module, own in blocks.items()}
    left = {module: {place for call in own for place in replay.saved(call)} for module, own in blocks.items()}

    def peak_of(modules: Sequence[int]) -> Peak:
        return replay.peak([call for module in modules for call in blocks[module]], passes)

    chosen = list[int]()
    peak = best = peak_of(chosen)
    best_of = 0
    while peak.n_bytes > question.budget_bytes:
        worth = {
            module: sum(peak.held.get(place, 0) for place in left[module]) / max(forward_s[module], 1e-9)
            for module in blocks
            if module not in chosen
        }
        module = max(worth, key=lambda module: worth[module], default=-1)
        if module < 0 or not worth[module]:
            break
        chosen.append(module)
        peak = peak_of(chosen)
        if peak.n_bytes < best.n_bytes:
            best, best_of = peak, len(chosen)
    chosen = chosen[:best_of]
    limit = max(question.budget_bytes, best.n_bytes)
    for module in sorted(chosen, key=lambda module: -forward_s[module]):
        fewer = [other for other in chosen if other != module]
        without = peak_of(fewer)
        if without.n_bytes <= limit:
            chosen, best = fewer, without
    return chosen, best


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRemedy:
    """A change of the training script that lowers the memory peak, with its predicted step time.

    Attributes:
        by: name of the search that found the change.
        remedy: the change.
        step_s: predicted step time with the change and the recorded communication plan. It only ranks changes. Users do
            not see it, because measured times differed from it by up to 30 %.
    """

    by: str
    remedy: MemoryRemedy
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Result of the search for changes of the training script that fit a job into a memory budget.

    Attributes:
        rank: rank with the highest memory peak. Only this rank was examined.
        device: name of the device on which this rank trains.
        budget_bytes: memory budget of the device.
        peak_bytes: recorded memory peak of the device.
        before: replay (simulation) of the recorded job.
        remedies: changes that meet the budget, the fastest first, then changes that do not meet it.
        chosen: fastest change that meets the budget; None if no change is needed, or if none meets it (see `is_met`).
    """

    rank: int
    device: str
    budget_bytes: int
    peak_bytes: int
    before: Baseline
    remedies: tuple[RankedRemedy, ...]
    chosen: RankedRemedy | None

    @property
    def is_met(self) -> bool:
        """Return whether the job meets the memory budget, as recorded or with the chosen change."""
        return self.chosen is not None or self.peak_bytes <= self.budget_bytes

    @property
    def after(self) -> Baseline:
        """Return the replay (simulation) of the job with the chosen change, or without change if none was chosen."""
        if self.chosen is None:
            return self.before
        return Baseline.of(self.chosen.remedy.apply(self.before.job), error=self.before.error)


def highest_rank(recording: Recording) -> tuple[RankRecording, MemoryReplay]:
    """Return the rank with the highest memory peak, and the replay (simulation) of the memory use of its device.

    Raises:
        RecordingError: no rank recorded its memory use.
    """
    known = [(rank, MemoryReplay(rank.memory)) for rank in recording.ranks.values() if rank.memory is not None]
    if not known:
        raise RecordingError(
            "the recording contains no memory use, because an older version of Sirtaki made it, or because operators "
            "were not recorded; run `sirtaki profile` again, without --units-only"
        )
    return max(known, key=lambda one: one[1].peak().n_bytes)


def fit(recording: Recording, before: Baseline, *, budget_bytes: int) -> Fitting:
    """Search for the fastest change of the training script (recomputation of activations, gradient accumulation, or
    both) with which a job meets a memory budget.

    Args:
        recording: recording that includes memory use.
        before: replay (simulation) of the same recording, without changes.
        budget_bytes: memory budget of the device on which each rank trains.

    Raises:
        RecordingError: no rank recorded its memory use.
    """
    rank, replay = highest_rank(recording)
    question = MemoryQuestion(replay=replay, modules=rank.modules, budget_bytes=budget_bytes)
    peak_bytes = replay.peak().n_bytes
    found: list[RankedRemedy] = []
    for passes in PASSES:
        if peak_bytes > budget_bytes and not any(one.remedy.peak_bytes <= budget_bytes for one in found):
            for name, remedies in passes.items():
                found += _best(name, list(remedies(question)), budget_bytes, before)
    fitting = [one for one in found if one.remedy.peak_bytes <= budget_bytes]
    fitting.sort(key=lambda one: one.step_s)
    return Fitting(
        rank=rank.rank,
        device=replay.memory.devices[replay.device],
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        before=before,
        remedies=(*fitting, *(one for one in found if one not in fitting)),
        chosen=fitting[0] if fitting else None,
    )


def _best(name: str, remedies: Sequence[MemoryRemedy], budget_bytes: int, before: Baseline) -> Iterator[RankedRemedy]:
    """Yield the fastest of those changes (`remedies`) that meet the memory budget or, if none meets it, the change with
    the lowest memory peak.
    """
    fitting = [remedy for remedy in remedies if remedy.peak_bytes <= budget_bytes]
    timed = [
        RankedRemedy(by=name, remedy=remedy, step_s=replayed(play(remedy.apply(before.job))).iteration_s)
        for remedy in fitting or sorted(remedies, key=lambda one: one.peak_bytes)[:1]
    ]
    if timed:
        yield min(timed, key=lambda one: one.step_s)


def peak_words(rank: RankRecording, replay: MemoryReplay, peak: Peak) -> str:
    """Return a sentence about the memory peak: when it occurs, how large it is, and what uses the memory."""
    memory = replay.memory
    kinds = Counter[Holds]()
    for place, n_bytes in peak.held.items():
        kinds[memory.allocations[place].holds] += n_bytes
    parts = ", ".join(f"{format_bytes(n_bytes)} {holds.value}" for holds, n_bytes in kinds.most_common(4) if n_bytes)
    when = f"{ms(peak.at_s - memory.begin_s)} into the step"
    return (
        f"At its peak rank {rank.rank} holds {format_bytes(peak.n_bytes)} of {memory.devices[replay.device]}, {when} "
        f"({phase_of(rank, peak.at_s).value}): {parts}."
    )


def phase_of(rank: RankRecording, at_s: float) -> Phase:
    """Return the phase (such as forward) that contains a moment of the recorded step."""
    assert rank.memory is not None
    number = rank.memory.iteration
    return phase_at(next((one.spans for one in rank.iterations if one.number == number), ()), at_s)
