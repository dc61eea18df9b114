"""Which passes make a job fit a memory budget, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import fill
from typing import Protocol, cast

from sirtaki.errors import RecordingError

from .global_graph import StepTimes, play, replayed
from .job_model import JobModel
from .memory import MemoryReplay, Peak, main_device, with_accumulation, with_recomputation
from .plan_search import others
from .recording import Module, ModuleCall, RankRecording, Recording

ENTRY_POINT_GROUP = "sirtaki.optimizer_memory_passes"
MOST_PASSES = 64
MOST_MODULES = 100
"""Of one depth; those that leave most."""

RUNNING = ("BatchNorm", "SyncBatchNorm")
"""Modules that keep statistics of batches, by the beginning of their class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """What is asked of a pass.

    Attributes:
        replay: of the memory of one rank.
        modules: of that rank.
        budget_bytes: that must do.
    """

    replay: MemoryReplay
    modules: Sequence[Module]
    budget_bytes: int

    @property
    def passes(self) -> int:
        """Over parts of a batch that a step has already: forward passes of the outermost module."""
        calls = self.replay.memory.calls
        return max(1, sum(call.parent < 0 and call.module == calls[0].module for call in calls))

    def has_running_statistics(self, numbers: Sequence[int] | None = None) -> bool:
        """Modules with these numbers or within them (None: any) keep statistics of batches."""
        names = [""] if numbers is None else [self.modules[number].name for number in numbers]
        return any(
            one.kind.startswith(RUNNING) and any(_within(one.name, name) for name in names) for one in self.modules
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRemedy:
    """One answer.

    Attributes:
        words: what is done.
        lines: of code that do it.
        peak_bytes: then.
        apply: the job with it.
        notes: what else it changes, a sentence each.
    """

    words: str
    lines: tuple[str, ...]
    peak_bytes: int
    apply: Callable[[JobModel], JobModel]
    notes: tuple[str, ...] = ()


class MemoryPass(Protocol):
    """One way to hold less.

    Attributes:
        name: of it.
        last_resort: it is only asked where no other pass can do it.
    """

    name: str
    last_resort: bool

    def remedies(self, question: MemoryQuestion) -> Iterator[MemoryRemedy]:
        """Those that fit, of each kind the gentlest; where none of a kind fits, the one that needs least."""
        ...


class Recomputation:
    """Modules do their forward pass again instead of keeping what it leaves (Chen et al., 2016).

    For each depth of the model, the module that holds most at the peak for the time that it takes is next, until the
    budget does; then those go that are not needed.
    """

    name = "re-computation"
    last_resort = False

    def remedies(self, question: MemoryQuestion) -> Iterator[MemoryRemedy]:
        """See `MemoryPass`."""
        for numbers, peak in _gentlest(question, passes=1):
            yield _recomputed(question, numbers, peak)


class Accumulation:
    """A step is several passes over parts of the batch."""

    name = "accumulation"
    last_resort = False

    def remedies(self, question: MemoryQuestion) -> Iterator[MemoryRemedy]:
        """See `MemoryPass`."""
        found: MemoryRemedy | None = None
        for passes in _passes(question):
            remedy = _accumulated(question, passes, question.replay.peak(passes=passes).n_bytes)
            if found is None or remedy.peak_bytes < found.peak_bytes:
                found = remedy
            if found.peak_bytes <= question.budget_bytes:
                break
        if found is not None:
            yield found


class Both:
    """Several passes, in which modules do their forward pass again."""

    name = "both"
    last_resort = True

    def remedies(self, question: MemoryQuestion) -> Iterator[MemoryRemedy]:
        """See `MemoryPass`."""
        counts = list(_passes(question))
        most = list(_both(question, counts[-1])) if counts else []
        if not _any_fits(most, question):
            yield from most[:1]  # fewer passes hold more
            return
        for passes in counts[:-1]:
            found = list(_both(question, passes))
            if _any_fits(found, question):
                yield from found
                return
        yield from most


def _any_fits(found: Sequence[MemoryRemedy], question: MemoryQuestion) -> bool:
    return any(one.peak_bytes <= question.budget_bytes for one in found)


OUR_MEMORY_PASSES = (Recomputation, Accumulation, Both)


def memory_passes() -> tuple[MemoryPass, ...]:
    """All of them, others' behind ours.

    Raises:
        ConfigError: one that another package brings is none.
    """
    ours: list[MemoryPass] = [make() for make in OUR_MEMORY_PASSES]
    return (*ours, *cast(list[MemoryPass], others(ENTRY_POINT_GROUP, ("name", "last_resort", "remedies"))))


def _both(question: MemoryQuestion, passes: int) -> Iterator[MemoryRemedy]:
    """For each depth of the model, the one that needs least first."""
    for numbers, peak in sorted(_gentlest(question, passes=passes), key=lambda one: one[1].n_bytes):
        one, other = _recomputed(question, numbers, peak), _accumulated(question, passes, peak.n_bytes)
        yield MemoryRemedy(
            words=f"{one.words}, and {other.words}",
            lines=(*one.lines, *other.lines),
            peak_bytes=peak.n_bytes,
            apply=partial(_one_by_one, changes=(one.apply, other.apply)),
            notes=(*one.notes, *other.notes),
        )


def _one_by_one(job: JobModel, *, changes: Sequence[Callable[[JobModel], JobModel]]) -> JobModel:
    for change in changes:
        job = change(job)
    return job


# ── accumulation ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _passes(question: MemoryQuestion) -> Iterator[int]:
    """Into how many equal parts each pass can be divided."""
    batch = question.replay.memory.batch
    for passes in range(2, MOST_PASSES + 1):
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


def _gentlest(question: MemoryQuestion, *, passes: int) -> Iterator[tuple[list[int], Peak]]:
    """For each depth, modules by their numbers that are enough, or as good as they can be, and the peak."""
    seen: set[frozenset[int]] = set()
    for blocks in _depths(question):
        chosen, peak = _chosen(question, blocks, passes)
        if chosen and frozenset(chosen) not in seen:
            seen.add(frozenset(chosen))
            yield sorted(chosen), peak


def _depths(question: MemoryQuestion) -> Iterator[dict[int, list[int]]]:
    """Calls by module: of each depth, and modules above it that have none inside. None is within another."""
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
        # A module that is called at several depths might lie within another one of these.
        usable = {
            module: calls
            for module, calls in found.items()
            if all(_is_usable(call) for call in map(memory.calls.__getitem__, calls))
            and not question.modules[module].name.startswith("(")
            and len(calls) == sum(call.module == module for call in memory.calls)
        }
        left = {module: sum(_bytes(question, calls)) for module, calls in usable.items()}
        most = sorted((module for module in usable if left[module]), key=lambda module: -left[module])[:MOST_MODULES]
        if most:
            yield {module: usable[module] for module in most}


def _is_usable(call: ModuleCall) -> bool:
    return call.backward_begin_s is not None and call.backward_begin_s >= call.end_s


def _bytes(question: MemoryQuestion, calls: Sequence[int]) -> Iterator[int]:
    for call in calls:
        for place in question.replay.saved(call):
            yield question.replay.memory.allocations[place].n_bytes


def _chosen(question: MemoryQuestion, blocks: dict[int, list[int]], passes: int) -> tuple[list[int], Peak]:
    replay = question.replay
    calls = replay.memory.calls
    took_s = {module: sum(calls[place].end_s - calls[place].begin_s for place in own) for module, own in blocks.items()}
    left = {module: {place for call in own for place in replay.saved(call)} for module, own in blocks.items()}

    def peak_of(modules: Sequence[int]) -> Peak:
        return replay.peak([call for module in modules for call in blocks[module]], passes)

    chosen = list[int]()
    peak = best = peak_of(chosen)
    best_of = 0
    while peak.n_bytes > question.budget_bytes:
        worth = {
            module: sum(peak.held.get(place, 0) for place in left[module]) / max(took_s[module], 1e-9)
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
    for module in sorted(chosen, key=lambda module: -took_s[module]):
        fewer = [other for other in chosen if other != module]
        without = peak_of(fewer)
        if without.n_bytes <= limit:
            chosen, best = fewer, without
    return chosen, best


def _within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRemedy:
    """A remedy, and what a step takes with it.

    Attributes:
        by: the pass that found it.
        remedy: what is done.
        times: of a step then, with the units that were recorded.
    """

    by: str
    remedy: MemoryRemedy
    times: StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """What is known of a job and its budget.

    Attributes:
        rank: that holds most, and was looked at.
        device: of it.
        budget_bytes: of the device.
        peak_bytes: as it was recorded.
        times: of a step then.
        remedies: the fastest of each pass that fits, the one that needs least of one that does not; the fastest first.
        chosen: None = nothing is needed, or nothing is enough.
    """

    rank: int
    device: str
    budget_bytes: int
    peak_bytes: int
    times: StepTimes
    remedies: tuple[TimedRemedy, ...]
    chosen: TimedRemedy | None

    @property
    def is_met(self) -> bool:
        """By the chosen remedy, or without one."""
        return self.chosen is not None or self.peak_bytes <= self.budget_bytes

    @property
    def least_bytes(self) -> int:
        """The lowest peak of all that was found."""
        return min([self.peak_bytes, *(one.remedy.peak_bytes for one in self.remedies)])

    def applied_to(self, job: JobModel) -> JobModel:
        """The job with what was chosen."""
        return job if self.chosen is None else self.chosen.remedy.apply(job)


def highest_rank(recording: Recording) -> RankRecording:
    """The rank that holds most memory.

    Raises:
        RecordingError: memory was not recorded.
    """
    with_memory = [rank for rank in recording.ranks.values() if rank.memory is not None]
    if not with_memory:
        raise RecordingError(
            "memory is not in this recording, which was made by an older version of Sirtaki or without operators: "
            "record the job anew"
        )
    return max(with_memory, key=lambda rank: memory_replay(rank).peak().n_bytes)


def memory_replay(rank: RankRecording) -> MemoryReplay:
    """Of the device that the rank trains on; its memory is known."""
    assert rank.memory is not None
    return MemoryReplay(rank.memory, main_device(rank.memory))


def fit(recording: Recording, job: JobModel, passes: Sequence[MemoryPass], *, budget_bytes: int) -> Fitting:
    """Looks for the fastest remedy that fits.

    Args:
        recording: memory in it.
        job: the same as it is replayed.
        passes: to be asked; those of last resort where the others do not fit.
        budget_bytes: of the device that ranks train on.

    Raises:
        RecordingError: memory was not recorded.
    """
    rank = highest_rank(recording)
    replay = memory_replay(rank)
    question = MemoryQuestion(replay=replay, modules=rank.modules, budget_bytes=budget_bytes)
    peak_bytes = replay.peak().n_bytes
    found: list[TimedRemedy] = []
    for last_resort in (False, True):
        if peak_bytes > budget_bytes and not _fitting(found, budget_bytes):
            for one in passes:
                if one.last_resort is last_resort:
                    found += _best(one, question, job)
    fitting = sorted(_fitting(found, budget_bytes), key=lambda one: one.times.iteration_s)
    return Fitting(
        rank=rank.rank,
        device=replay.memory.devices[replay.device],
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        times=replayed(play(job)),
        remedies=(*fitting, *(one for one in found if one not in fitting)),
        chosen=fitting[0] if fitting else None,
    )


def _fitting(found: Sequence[TimedRemedy], budget_bytes: int) -> list[TimedRemedy]:
    return [one for one in found if one.remedy.peak_bytes <= budget_bytes]


def _best(one: MemoryPass, question: MemoryQuestion, job: JobModel) -> Iterator[TimedRemedy]:
    """The fastest that fits; where none does, the one that needs least."""
    answers = list(one.remedies(question))
    fitting = [remedy for remedy in answers if remedy.peak_bytes <= question.budget_bytes]
    least = sorted(answers, key=lambda remedy: remedy.peak_bytes)[:1]
    timed = [
        TimedRemedy(by=one.name, remedy=remedy, times=replayed(play(remedy.apply(job)))) for remedy in fitting or least
    ]
    if timed:
        yield min(timed, key=lambda one: one.times.iteration_s)
