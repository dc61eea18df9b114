"""Build the HTML page about a recorded job: first findings in words, then plots of time and memory."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from sirtaki.autotune.knobs import MIB, format_bytes
from sirtaki.autotune.model.replayer import Replay
from sirtaki.errors import PlanError, RecordingError, ReplayError

from .alignment import align, headlines
from .global_graph import STRAGGLER_EXCESS, MeanStepTimes, ms, path_lines, percent, play, recorded
from .html import details, page, paragraph, plot, share_bar, table
from .html import heading as title
from .job_model import Histories, histories, job_model
from .memory import Fitting, MemoryReplay, Peak, fit, highest_rank, peak_words, phase_of
from .recording import Detail, Holds, RankRecording, Recording, of_ranks, read_folder
from .step_parts import (
    COLORS,
    MIN_LATE_S,
    UNDIVIDED,
    ExposureCause,
    RankExposure,
    StepParts,
    TimeKind,
    exposures,
    late_units,
    step_parts,
)
from .what_if import MIN_GAIN, Answer, Baseline, limitations

BUDGETS = (0.75, 0.5)
"""Memory budgets, as fractions of the recorded peak. For each, the page lists changes that lower the peak to it."""

MAX_ERROR = 0.05
"""Largest relative difference between replayed (simulated) and recorded step time with which the page shows
predictions.
"""

EXPOSED_SHARE = 0.02
"""If exposed communication (waits for gradients) is a smaller fraction of the step, the page states that training does
not wait.
"""

MIN_SPREAD_S = 1e-6
"""Largest standard deviation of step times, in seconds, that the page omits as negligible."""

MAX_RANKS, MAX_ROWS, MAX_MEMORY_ROWS = 128, 12, 10
MAX_MOMENTS = 700
"""Number of intervals of a plot of memory use over time. The highest value of each interval is drawn."""

WITHOUT_OPERATORS = f"Operators were not recorded, so some kinds of time are one: {UNDIVIDED}."

MEMORY_COLORS = {
    Holds.PARAMETERS: "#0072b2",
    Holds.MODULE_BUFFERS: "#7b3294",
    Holds.OPTIMIZER: "#009e73",
    Holds.FLAT_BUFFERS: "#9a78c2",
    Holds.GRADIENTS: "#d1366b",
    Holds.ACTIVATIONS: "#e69f00",
    Holds.OTHER: "#8b9096",
}
"""Colours of the purposes of memory, in the order in which their areas are stacked, from bottom to top."""

# ── findings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results of a recording and of its replay (simulation), from which the page is built.

    Attributes:
        folder: folder of the recording.
        lines: summary of the recording and of the clock alignment.
        problems: one sentence for each defect of the recording.
        histories: timelines of the iterations that the page shows.
        times: recorded step times.
        exposures: waits of each rank's training thread for reduced gradients, by cause.
        base: replayed step times, to which predictions are compared; None if the replay failed, for a reason in
            `problems`.
        replay: replay of all iterations, with the begin and end of each piece of work; None if the replay failed.
        answers: predicted step time for each single change; empty if the replay is too inaccurate (`is_far`).
        notes: one sentence for each assumption and limitation of the replay.
        fittings: changes that lower the memory peak, for each of `BUDGETS`; empty if memory was not recorded.
    """

    folder: Path
    lines: tuple[str, ...]
    problems: tuple[str, ...]
    histories: Histories
    times: MeanStepTimes
    exposures: tuple[RankExposure, ...]
    base: Baseline | None = None
    replay: Replay | None = None
    answers: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = ()
    fittings: tuple[Fitting, ...] = ()

    @property
    def has_operators(self) -> bool:
        """Return whether every rank recorded operators."""
        return all(rank.detail is Detail.OPERATORS for rank in self.histories.recording.ranks.values())

    @property
    def exposed_s(self) -> float:
        """Return the seconds per step in which the training thread waits for reduced gradients, as a mean over
        ranks.
        """
        return statistics.fmean(one.exposed_s for one in self.exposures)

    @property
    def error(self) -> float:
        """Return the relative error of the replayed (simulated) step time, compared with the recorded one; 0 if there
        is no replay.
        """
        return self.base.times.iteration_s / self.times.iteration_s - 1 if self.base is not None else 0.0

    @property
    def is_far(self) -> bool:
        """Return whether the replay (simulation) differs too much from the recording to be used for predictions."""
        return abs(self.error) > MAX_ERROR

    @property
    def best(self) -> Answer | None:
        """Return the change with the largest predicted gain that is significant; None = there is none."""
        return next((one for one in self.answers if one.is_worth_reporting and one.is_sure), None)


def findings(folder: Path) -> Findings:
    """Read a recording, replay (simulate) it, and predict the effect of changes, for the page.

    Raises:
        RecordingError: the recording has no iterations.
    """
    recording = read_folder(folder)
    shown, problems = _comparable(recording)
    past = histories(shown)
    found = Findings(
        folder=folder,
        lines=headlines(recording, align(recording)),
        problems=(*recording.problems, *problems),
        histories=past,
        times=recorded(past),
        exposures=exposures(past),
    )
    try:
        job = job_model(past)
        base = Baseline.of(job, found.times)
        found = replace(found, base=base, replay=play(job), notes=(*job.notes, *limitations(job)))
        if found.is_far:
            return found
        return replace(found, answers=base.single_remedies(), fittings=_fittings(shown, base))
    except (PlanError, ReplayError) as err:
        reason = f"the recording cannot be replayed: {err}"
        return replace(found, base=None, replay=None, problems=(*found.problems, reason))


def _fittings(recording: Recording, base: Baseline) -> tuple[Fitting, ...]:
    try:
        most = highest_rank(recording)[1].peak().n_bytes
    except RecordingError:
        return ()
    return tuple(fit(recording, base, budget_bytes=round(share * most)) for share in BUDGETS)


def _comparable(recording: Recording) -> tuple[Recording, list[str]]:
    """Return (recording without some ranks, sentences about the omitted ranks). The largest set of ranks that
    recorded the same ordinary iteration is kept.

    Raises:
        RecordingError: no rank recorded an ordinary iteration, whose duration is representative.
    """
    usual = {
        number: {one.number for one in rank.iterations if one.is_usual} for number, rank in recording.ranks.items()
    }
    count = Counter(number for numbers in usual.values() for number in numbers)
    if not count:
        raise RecordingError(
            "the recording contains no iteration, because the job ended too soon after the warm-up (tuning phase); "
            "record the job again with more training steps"
        )
    best = min(count, key=lambda number: (-count[number], number))
    others = [number for number in usual if best not in usual[number]]
    if not others:
        return recording, []
    has, is_ = ("has", "is") if len(others) == 1 else ("have", "are")
    kept = {number: rank for number, rank in recording.ranks.items() if number not in others}
    omitted = f"{of_ranks(others)} {has} no iteration in common with most ranks, and {is_} omitted"
    return replace(recording, ranks=kept), [omitted]


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def heading(found: Findings) -> str:
    """Return the heading of the page: name and size of the recording, and the communication setting."""
    buffers = found.histories.recording.job.buffers
    plan = f"; {buffers[0].knobs.describe()}" if buffers else ""
    return f"{found.folder.resolve().name}: {found.lines[0]}{plan}."


def problems(found: Findings) -> Iterator[str]:
    """Yield one sentence for each defect of the recording, such as missing ranks."""
    return (f"{problem[:1].upper()}{problem[1:].rstrip('.')}." for problem in found.problems)


def sentences(found: Findings) -> Iterator[str]:
    """Yield the findings as sentences: whether training waits for communication, which change would save most time, the
    step time, and the largest part of the critical path.
    """
    times = found.times
    share = found.exposed_s / times.iteration_s if times.iteration_s > 0 else 0.0
    if share > EXPOSED_SHARE:
        causes = exposure_causes(found)
        waits = f"Training waits for {causes[0][0]}: {ms(found.exposed_s)} of a step, {percent(share)}, are not hidden"
        if len(causes) > 1:
            waits += " (" + ", ".join(f"{ms(seconds)} for {words}" for words, seconds in causes) + ")"
    else:
        waits = f"Training does not wait for {_communication(found)} ({percent(share)} of a step)"
    if found.base is None or found.is_far:
        yield f"{waits}; there are no predictions, because the replay does not match the recording."
    elif found.best is None:
        yield f"{waits}; none of the simulated changes is sure to help."
    else:
        yield f"{waits}; the largest gain is predicted if {found.best.words}: {found.best.describe()}."
    spread = f" (± {ms(times.spread_s)} from step to step)" if times.spread_s > MIN_SPREAD_S else ""
    yield f"A step takes {ms(times.iteration_s)}{spread}."
    if found.replay is not None and not found.is_far and (path := path_lines(found.replay)):
        yield f"The largest part of the critical path: {path[0].describe()}."
        if not found.has_operators:
            yield WITHOUT_OPERATORS


NOTABLE_CAUSE, ONE_RANK = 0.05, 0.7
"""A cause is named if exposed communication (waits for gradients) is at least the first fraction of the step.

One rank is named as the cause of waits for slower ranks if it causes at least the second fraction of them.
"""


def exposure_causes(found: Findings) -> list[tuple[str, float]]:
    """Return the causes of exposed communication in words, with their seconds per step as a mean over ranks, the
    largest first.
    """
    means_s = {cause: statistics.fmean(one.seconds[cause] for one in found.exposures) for cause in ExposureCause}
    slower_s = Counter[int]()
    for one in found.exposures:
        slower_s.update(one.slower_s)
    slowest, its_s = slower_s.most_common(1)[0] if slower_s else (0, 0.0)
    one_rank = its_s >= ONE_RANK * sum(slower_s.values())
    # A rank that only begins its step later than others is late, but it does not compute longer.
    own_s = {one.rank: one.own_s for one in step_parts(found.histories)}
    longer = own_s[slowest] > (1 + STRAGGLER_EXCESS) * statistics.median_low(own_s.values()) if slower_s else False
    slow = f"rank {slowest}, which {'computes longer' if longer else 'is behind the others'}"
    words = {
        slow if one_rank else "slower ranks, not always the same": means_s[ExposureCause.SLOW_RANK],
        _communication(found): means_s[ExposureCause.TRANSFER] + means_s[ExposureCause.QUEUE],
        "copies of gradients": means_s[ExposureCause.COPY],
        "results that arrive later on some ranks": means_s[ExposureCause.RECEIPT],
    }
    ordered = sorted(words.items(), key=lambda item: -item[1])
    return [(cause, seconds) for cause, seconds in ordered if seconds >= NOTABLE_CAUSE * found.exposed_s]


def _communication(found: Findings) -> str:
    return "the network" if len(set(found.histories.hosts.values())) > 1 else "communication on one host"


def kind_words(kind: TimeKind, found: Findings) -> str:
    """Return the name of a kind of time in a step, such as "forward".

    If no operators were recorded, kinds that cannot be distinguished share one name.
    """
    return UNDIVIDED if kind is TimeKind.OTHER and not found.has_operators else kind.value


def signed_ms(seconds: float) -> str:
    """Return a duration as text in milliseconds with its sign, such as `+1.2 ms`."""
    return f"{1e3 * seconds:+.3g} ms"


# ── page ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(found: Findings) -> str:
    """Return the HTML page about a recorded job. Names from the recording are escaped.

    Raises:
        ConfigError: the package Plotly is not installed.
    """
    return page(
        "Where a step’s time goes",
        [
            paragraph(heading(found)),
            *(paragraph(problem, "note") for problem in problems(found)),
            paragraph(" ".join(sentences(found))),
            *_bars(found),
            *_path(found),
            *_exposure(found),
            *_what_if(found),
            *memory_section(found),
            *_rest(found),
        ],
    )


def _bars(found: Findings) -> Iterator[str]:
    all_parts = step_parts(found.histories)
    busiest = sorted(all_parts, key=lambda one: one.seconds.get(TimeKind.EXPOSED, 0.0) - one.step_s)[:MAX_RANKS]
    shown = sorted(busiest, key=lambda one: one.rank)
    kinds = [kind for kind in TimeKind if any(kind in one.seconds for one in shown)]
    yield title("Where each rank’s time goes")
    yield paragraph("Means of the recorded iterations. The parts add up to the step.")
    if len(shown) < len(all_parts):
        yield paragraph(f"The plot shows the {len(shown)} busiest of {len(all_parts)} ranks.")
    yield plot(
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": kind_words(kind, found),
                "x": [1e3 * one.seconds.get(kind, 0.0) for one in shown],
                "y": [f"rank {one.rank}" for one in shown],
                "marker": {"color": COLORS[kind]},
                "hovertext": [_part_words(one, kind, found) for one in shown],
            }
            for kind in kinds
        ],
        x="ms",
        height=140 + (28 if len(shown) <= 16 else 12) * len(shown),
        barmode="stack",
        yaxis={"type": "category", "autorange": "reversed"},
    )
    titles = ["rank", "step", *(kind_words(kind, found) for kind in kinds)]
    rows = [[str(one.rank), ms(one.step_s), *(ms(one.seconds.get(kind, 0.0)) for kind in kinds)] for one in shown]
    yield details("Numbers of the plot", table(titles, rows))
    command = Markup("<code>sirtaki trace {}</code>").format(shlex.quote(str(found.folder)))
    yield paragraph(
        Markup(
            "{} writes a timeline of all ranks on one clock: phases, operators, copies, each stream’s units, and the "
            "critical path. Open its <code>trace.json</code> in Perfetto (ui.perfetto.dev), or without a network in "
            "<code>chrome://tracing</code>."
        ).format(command)
    )


def _part_words(one: StepParts, kind: TimeKind, found: Findings) -> str:
    seconds = one.seconds.get(kind, 0.0)
    return f"rank {one.rank}, {kind_words(kind, found)}: {ms(seconds)}, {percent(seconds / one.step_s)}"


def _path(found: Findings) -> Iterator[str]:
    path = path_lines(found.replay) if found.replay is not None else ()
    if not path:
        return
    yield title("The critical path")
    yield paragraph(
        "The chain of causes over all ranks, from the end of the last operation back to the first begin: a step gets "
        "shorter only if something on this path does. The shares are of a mean step, and add up to it."
    )
    if found.is_far:
        yield _no_predictions(found)
        return
    if not found.has_operators:
        yield paragraph(WITHOUT_OPERATORS)
    rows = [[share_bar(one.share), f"{100 * one.share:.1f} %", ms(one.seconds), one.words] for one in path]
    total_s, total = sum(one.seconds for one in path), sum(one.share for one in path)
    sums = ["", f"{100 * total:.1f} %", ms(total_s), "is the step"]
    yield table(["", "share", "of a step", ""], rows, text=(0, 3), last=sums)


def _no_predictions(found: Findings) -> str:
    more = "more" if found.error > 0 else "less"
    return paragraph(
        f"The replay takes {percent(abs(found.error))} {more} than the recorded steps. The limit is "
        f"{percent(MAX_ERROR)}, so there are no predictions here.",
        "note",
    )


def _exposure(found: Findings) -> Iterator[str]:
    exposed = found.exposures
    yield title("Exposed communication")
    if not any(one.units for rank in found.histories.recording.ranks.values() for one in rank.iterations):
        yield paragraph("No gradients were exchanged.")
        return
    if not any(one.exposed_s for one in exposed):
        yield paragraph("None: no rank waits for gradients.")
        return
    yield paragraph(
        "Time that ranks wait for gradients after their backward pass, divided by what the last gradient waits for. If "
        "a slower rank computes, faster communication does not help: make the ranks equally fast. If units are queued "
        "or in flight, faster communication, more streams or other units would shorten it."
    )
    worst = sorted(exposed, key=lambda one: -one.exposed_s)[:MAX_ROWS]
    causes = [cause for cause in ExposureCause if any(one.seconds[cause] > MIN_LATE_S for one in exposed)]
    rows = [
        [str(one.rank), ms(one.exposed_s), *(ms(one.seconds[cause]) for cause in causes)]
        for one in sorted(worst, key=lambda one: one.rank)
    ]
    yield table(["rank", "exposed", *(cause.value for cause in causes)], rows)
    yield from _shown(worst, exposed, "ranks that wait longest")
    late, count = late_units(found.histories), len(found.histories.steps)
    if late:
        yield paragraph("Units that end after the backward pass. Times are means, relative to its end:")
        latest = sorted(late, key=lambda one: -one.late_s)[:MAX_ROWS]
        unit_rows = [
            [
                one.unit.name,
                f"{one.unit.n_bytes:,}",
                one.unit.lane,
                *map(signed_ms, (one.issue_s, one.begin_s, one.done_s)),
                f"{one.times} of {count}",
            ]
            for one in sorted(latest, key=lambda one: one.done_s)
        ]
        titles = ["unit", "bytes", "stream", "issued", "begins", "ends", "late in iterations"]
        yield table(titles, unit_rows, text=(0, 2))
        yield from _shown(latest, late, "units that are latest")


def _shown(some: Sized, all_: Sized, what: str) -> Iterator[str]:
    if len(some) < len(all_):
        yield paragraph(f"Shown are the {len(some)} {what}, of {len(all_)}.", "quiet")


def _what_if(found: Findings) -> Iterator[str]:
    if found.base is None:
        return
    yield title("What would help")
    if found.is_far:
        yield _no_predictions(found)
        return
    yield paragraph(
        f"Predictions of each change by itself. The replay of the recorded job differs from the recording by "
        f"{100 * found.error:+.1f} %. The measured time lies in the interval in nine of ten cases. Grey rows are not "
        "significant. Try the first rows, and measure."
    )
    yield from (paragraph(f"{note[:1].upper()}{note[1:]}.", "note") for note in found.notes)
    if not found.answers:
        yield paragraph("There is no change to predict.")
        return
    rows = [
        [
            share_bar(one.gain if one.is_precise else 0.0),
            f"if {one.words}",
            ms(one.times.iteration_s) if one.is_precise else "",
            one.interval,
            _change(one),
        ]
        for one in found.answers
    ]
    unsure = [place for place, one in enumerate(found.answers) if not one.is_sure]
    yield table(["", "remedy", "step", "90 %, ms", "change"], rows, text=(0, 1, 4), unsure=unsure)
    words = "<code>sirtaki replay</code> answers other questions, several changes at once. "
    yield paragraph(Markup(words + "<code>sirtaki optimize</code> looks for a better plan."), "quiet")


def _change(one: Answer) -> str:
    """Return the predicted change of the step time as text, such as `12 % less`."""
    if not one.is_precise:
        side = "less" if one.gain > 0 else "longer"
        return f"{side}, only a trial can show how much" if one.is_sure else "only a trial can show"
    change = f"{percent(abs(one.gain))} {'less' if one.gain > 0 else 'longer'}"
    if abs(one.gain) < MIN_GAIN:
        change = "as long"
    return change if one.is_sure else f"{change}, within its error"


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def memory_section(found: Findings) -> Iterator[str]:
    """Yield the HTML of the section about memory; nothing if memory was not recorded."""
    recording = found.histories.recording
    if not any(rank.memory is not None for rank in recording.ranks.values()):
        return
    rank, replay = highest_rank(recording)
    peak = replay.peak()
    yield title("Memory in one iteration")
    yield paragraph(peak_words(rank, replay, peak))
    yield paragraph(
        "Memory of tensors on the device that the rank trains on, according to the allocator and to Python. Mapped "
        "files and memory that libraries allocate themselves are not counted.",
        "quiet",
    )
    yield _stacked(replay)
    known = [one for one in recording.ranks.values() if one.memory is not None][:MAX_RANKS]
    if len(known) > 1:
        rows = []
        for one in known:
            assert one.memory is not None
            own = MemoryReplay(one.memory).peak()
            into_s, phase = own.at_s - one.memory.begin_s, phase_of(one, own.at_s)
            rows.append([str(one.rank), format_bytes(own.n_bytes), ms(into_s), phase.value])
        inside = table(["rank", "peak", "into the step", "phase"], rows, text=(3,))
        yield details("The peak of each rank", inside)
    yield from _at_the_peak(rank, replay, peak)
    yield from _lower(found)


def _stacked(replay: MemoryReplay) -> Markup:
    """Return a plot of memory use over time, with one stacked area for each purpose of memory."""
    memory = replay.memory
    width_s = (memory.end_s - memory.begin_s) / MAX_MOMENTS or 1.0
    highest: dict[int, Any] = {}  # {interval of the plot: moment of the highest memory use in it}
    for moment in replay.curve():
        place = int((moment.at_s - memory.begin_s) / width_s)
        if place not in highest or moment.total_bytes >= highest[place].total_bytes:
            highest[place] = moment
    moments = list(highest.values())
    areas = [
        {
            "type": "scatter",
            "name": holds.value,
            "stackgroup": "memory",
            "x": [1e3 * (moment.at_s - memory.begin_s) for moment in moments],
            "y": [moment.n_bytes.get(holds, 0) / MIB for moment in moments],
            "line": {"shape": "hv", "width": 0, "color": color},
            "fillcolor": color,
        }
        for holds, color in MEMORY_COLORS.items()
        if any(moment.n_bytes.get(holds) for moment in moments)
    ]
    return plot(areas, x="ms", y="MiB", hovermode="x unified", hoverlabel={"bgcolor": "#333"})


def _at_the_peak(rank: RankRecording, replay: MemoryReplay, peak: Peak) -> Iterator[str]:
    held = Counter[tuple[str, str]]()
    for place, n_bytes in peak.held.items():
        one = replay.memory.allocations[place]
        block = _block(rank.modules[replay.memory.calls[one.call].module].name) if one.call >= 0 else ""
        held[one.holds.value, block] += n_bytes
    rows = [
        [share_bar(n_bytes / peak.n_bytes), format_bytes(n_bytes), holds, block]
        for (holds, block), n_bytes in held.most_common(MAX_MEMORY_ROWS)
    ]
    yield paragraph("Memory at the peak, by purpose and module:")
    yield table(["", "bytes", "for", "made in module"], rows, text=(0, 2, 3))
    yield from _shown(rows, held, "largest")


def _block(name: str) -> str:
    """Return the name of the block of layers that contains a module: the module's name up to its first number, such as
    `layers.0` for `layers.0.linear`.
    """
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: first + 1]) or "the model itself"


def _lower(found: Findings) -> Iterator[str]:
    remedies = [one.remedy for fitting in found.fittings for one in fitting.remedies]
    rows = {one.words: [one.words, format_bytes(one.peak_bytes)] for one in remedies}
    if rows:
        yield paragraph("Remedies that lower the peak, by replay. Only a trial shows the step time with a remedy.")
        yield table(["remedy", "peak"], rows.values(), text=(0,))
        words = "<code>sirtaki optimize --memory-budget</code> chooses for a budget, and prints the lines of code."
        yield paragraph(Markup(words), "quiet")


def _rest(found: Findings) -> Iterator[str]:
    missing = []
    if not any(rank.memory is not None for rank in found.histories.recording.ranks.values()):
        missing.append("Memory was not recorded.")
    if not found.has_operators:
        missing.append("Operators were not recorded on every rank, so phases are less exact there.")
    yield title("Data of this page")
    yield paragraph(" ".join([*(f"{line[:1].upper()}{line[1:]}." for line in found.lines[1:]), *missing]), "quiet")
