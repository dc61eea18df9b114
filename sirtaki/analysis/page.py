"""The page of a recorded job: findings first, then figures, timeline and memory."""

from __future__ import annotations

import base64
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from sirtaki.autotune.knobs import MIB, format_bytes
from sirtaki.autotune.model.replayer import Replay
from sirtaki.errors import ConfigError, PlanError, RecordingError, ReplayError

from .alignment import align, summary
from .global_graph import Part, StepTimes, ms, parts, play, recorded, replayed
from .job_model import Histories, JobModel, histories, job_model
from .memory import (
    Fitting,
    MemoryReplay,
    Moment,
    Peak,
    fit,
    highest_rank,
    memory_passes,
    memory_replay,
    peak_words,
    phase_at,
)
from .recording import Detail, Holds, RankRecording, Recording
from .recording_files import of_ranks, read
from .svg import Plot, framed, legend, page, share_bar, table
from .timeline_plot import (
    COLORS,
    NOT_TOLD_APART,
    Kind,
    RankExposure,
    StepParts,
    Timeline,
    drawn_path,
    exposures,
    late_units,
    step_parts,
    timeline,
)
from .what_if import WORTH_SAYING, Answer, price_error, price_notes, single_remedies, unanswered

BUDGETS = (0.75, 0.5)
"""Of the peak of memory."""

FAR = 0.05
"""A replay that is further from the recording is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The recorded iterations, replayed.

    Attributes:
        replay: of all of them.
        times: of a step in it.
        parts: of its critical path.
        answers: what each single remedy would bring; empty where the replay is not believed.
        price_error: by which share of a step what is said of other units may be wrong.
        notes: what it takes for granted, and what it cannot answer, a sentence each.
        fittings: what would lower the peak of memory to shares of it; empty where it is not recorded.
    """

    replay: Replay
    times: StepTimes
    parts: tuple[Part, ...]
    answers: tuple[Answer, ...]
    price_error: float
    notes: tuple[str, ...]
    fittings: tuple[Fitting, ...] = ()

    def is_sure(self, one: Answer) -> bool:
        """It would change more than it may be wrong by, as far as that is known."""
        return not one.is_priced or abs(one.gain) > abs(self.price_error)

    @property
    def best(self) -> Answer | None:
        """The remedy that brings most and is sure to; None = none brings anything."""
        return next((one for one in self.answers if one.is_worth_saying and self.is_sure(one)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a recording shows, and its replay.

    Attributes:
        folder: that it comes from.
        lines: what was recorded, and of whom, how clocks were aligned.
        problems: what is missing or wrong, a sentence each.
        histories: of the iterations that are shown.
        times: of a step as it was recorded.
        played: None where it cannot be replayed; then `problems` says why.
    """

    folder: Path
    lines: tuple[str, ...]
    problems: tuple[str, ...]
    histories: Histories
    times: StepTimes
    played: Played | None

    @property
    def has_operators(self) -> bool:
        """Operators were recorded on every rank."""
        return all(rank.detail is Detail.OPERATORS for rank in self.histories.recording.ranks.values())

    @property
    def error(self) -> float:
        """How much longer than the recorded step the replayed one is, as a share of it; 0 where there is none."""
        return self.played.times.iteration_s / self.times.iteration_s - 1 if self.played is not None else 0.0

    @property
    def is_far(self) -> bool:
        """The replay is too far from the recording to be believed."""
        return abs(self.error) > FAR


def findings(folder: Path) -> Findings:
    """Reads a recording and replays it.

    Raises:
        RecordingError: there is nothing to show.
    """
    recording = read(folder)
    lines = tuple(line.strip() for line in takewhile(bool, summary(recording, align(recording))))
    shown, problems = _comparable(recording)
    found = histories(shown)
    times = recorded(found)
    played = None
    try:
        played = _played(found, times)
    except (ConfigError, PlanError, ReplayError) as err:
        problems.append(f"what is here cannot be replayed: {err}")
    return Findings(
        folder=folder,
        lines=tuple(line for line in lines if not line.startswith("but: ")),
        problems=(*recording.problems, *problems),
        histories=found,
        times=times,
        played=played,
    )


def _played(found: Histories, was: StepTimes) -> Played:
    job = job_model(found)
    replay = play(job)
    now = replayed(replay)
    error = price_error(job, before_s=now.iteration_s)
    believed = abs(now.iteration_s - was.iteration_s) <= FAR * was.iteration_s
    return Played(
        replay=replay,
        times=now,
        parts=parts(replay),
        answers=single_remedies(job, before_s=now.iteration_s) if believed else (),
        price_error=error,
        notes=(*job.notes, *unanswered(job), *price_notes(error)),
        fittings=_fittings(found, job) if believed else (),
    )


def _fittings(histories: Histories, job: JobModel) -> tuple[Fitting, ...]:
    try:
        most = memory_replay(highest_rank(histories.recording)).peak().n_bytes
    except RecordingError:
        return ()
    recording, passes = histories.recording, memory_passes()
    return tuple(fit(recording, job, passes, budget_bytes=round(share * most)) for share in BUDGETS)


def _comparable(recording: Recording) -> tuple[Recording, list[str]]:
    """The ranks that have an iteration in common, as many as there are, and what is left out.

    Raises:
        RecordingError: there is no iteration.
    """
    usual = {
        number: {one.number for one in rank.iterations if one.is_usual} for number, rank in recording.ranks.items()
    }
    count = Counter(number for numbers in usual.values() for number in numbers)
    if not count:
        raise RecordingError(
            "no iteration was recorded, so there is nothing to show: the job has ended too soon after its warm-up"
        )
    best = min(count, key=lambda number: (-count[number], number))
    others = [number for number in usual if best not in usual[number]]
    kept = {number: rank for number, rank in recording.ranks.items() if number not in others}
    left_out = []
    if others:
        has, is_ = ("has", "is") if len(others) == 1 else ("have", "are")
        left_out = [f"{of_ranks(others)} {has} no iteration that most others have recorded, and {is_} left out"]
    return replace(recording, ranks=kept), left_out


LEAST_SPREAD_S = 1e-6
"""What steps differ by less is not worth saying."""

WITHOUT_OPERATORS = f"What the script does besides is: {NOT_TOLD_APART}."


def heading(found: Findings) -> str:
    """Which recording it is."""
    buffers = found.histories.recording.job.buffers
    plan = f"; {buffers[0].knobs.describe()}" if buffers else ""
    return f"{found.folder.resolve().name}: {found.lines[0]}{plan}."


def problems(found: Findings) -> Iterator[str]:
    """What is missing or wrong, a sentence each."""
    return (f"{problem[:1].upper()}{problem[1:].rstrip('.')}." for problem in found.problems)


def sentences(found: Findings) -> Iterator[str]:
    """How long a step takes, what most of it is, and what would help most."""
    times, played = found.times, found.played
    spread = f" (± {ms(times.spread_s)} from step to step)" if times.spread_s > LEAST_SPREAD_S else ""
    yield f"A step takes {ms(times.iteration_s)}{spread}."
    exposed_s = statistics.fmean(one.exposed_s for one in exposures(found.histories))
    if exposed_s > 0:
        yield f"{ms(exposed_s)} of it is communication that no computation hides (mean of ranks)."
    if played is None or found.is_far:
        return
    if played.parts:
        yield f"The largest part of the critical path: {played.parts[0].describe()}."
        if not found.has_operators:
            yield WITHOUT_OPERATORS
    if played.best is not None:
        yield f"What would help most: if {played.best.words}, a step would take {gain(played.best)}."


def kind_words(kind: Kind, found: Findings) -> str:
    """Name a kind of time, as far as it was recorded."""
    return NOT_TOLD_APART if kind is Kind.OTHER and not found.has_operators else kind.value


def gain(one: Answer) -> str:
    """`12 % less`; what is too little to be said brings nothing."""
    if abs(one.gain) < WORTH_SAYING:
        return "as long"
    return f"{percent(abs(one.gain))} {'less' if one.gain > 0 else 'longer'}"


def signed_ms(seconds: float) -> str:
    """`+1.2 ms`."""
    return f"{1e3 * seconds:+.3g} ms"


def percent(share: float) -> str:
    """`12 %`, `3.4 %`."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


MOST_MOMENTS = 700
"""As many are drawn; of those that lie together the highest."""

MOST_RANKS = 128
MOST_MEMORY_ROWS = 10

MEMORY_COLORS = {
    Holds.PARAMETERS: "#0072b2",
    Holds.MODULE_BUFFERS: "#7b3294",
    Holds.OPTIMIZER: "#009e73",
    Holds.FLAT_BUFFERS: "#9a78c2",
    Holds.GRADIENTS: "#d1366b",
    Holds.ACTIVATIONS: "#e69f00",
    Holds.OTHER: "#8b9096",
}
"""From below upwards."""


def memory_section(found: Findings) -> Iterator[str]:
    """Nothing where memory was not recorded."""
    recording = found.histories.recording
    if not any(rank.memory is not None for rank in recording.ranks.values()):
        return
    rank = highest_rank(recording)
    replay = memory_replay(rank)
    peak = replay.peak()
    yield "<h2>Memory in one iteration</h2>"
    yield f"<p>{escape(peak_words(rank, replay, peak))}</p>"
    yield (
        '<p class="quiet">What tensors hold, by the allocator and by what Python knows, of the device that the rank '
        "trains on; files that are mapped and what libraries hold for themselves are not counted.</p>"
    )
    moments = _drawn(replay.curve(), replay.memory.end_s)
    yield legend(
        {one.value: color for one, color in MEMORY_COLORS.items() if any(moment.n_bytes.get(one) for moment in moments)}
    )
    yield framed(_stacked(replay, moments))
    yield from _other_ranks(recording.ranks.values())
    yield from _at_the_peak(rank, replay, peak)
    yield from _lower(found)


def _drawn(moments: Sequence[Moment], end_s: float) -> list[Moment]:
    """Few enough to be drawn, by their time."""
    begin_s = moments[0].at_s
    width_s = (end_s - begin_s) / MOST_MOMENTS or 1.0
    found: dict[int, Moment] = {}
    for moment in moments:
        place = int((moment.at_s - begin_s) / width_s)
        if place not in found or moment.total_bytes >= found[place].total_bytes:
            found[place] = moment
    return list(found.values())


def _stacked(replay: MemoryReplay, moments: Sequence[Moment]) -> str:
    memory = replay.memory
    plot = Plot(
        x=(0.0, 1e3 * (memory.end_s - memory.begin_s)),
        y=(0.0, 1.05 * max(moment.total_bytes for moment in moments) / MIB),
        x_label="ms",
        y_label="MiB",
    )
    below = [0.0] * len(moments)
    times = [1e3 * (moment.at_s - memory.begin_s) for moment in moments]
    for holds, color in MEMORY_COLORS.items():
        above = [low + moment.n_bytes.get(holds, 0) / MIB for low, moment in zip(below, moments, strict=True)]
        if above != below:
            plot.band(list(zip(times, below, above, strict=True)), color=color, title=holds.value)
        below = above
    return plot.render()


def _other_ranks(ranks: Iterable[RankRecording]) -> Iterator[str]:
    known = [rank for rank in ranks if rank.memory is not None][:MOST_RANKS]
    if len(known) < 2:
        return
    rows = []
    for rank in known:
        replay = memory_replay(rank)
        peak = replay.peak()
        into_s, phase = peak.at_s - replay.memory.begin_s, phase_at(rank, peak.at_s)
        rows.append([str(rank.rank), format_bytes(peak.n_bytes), ms(into_s), phase.value])
    inside = framed(table(["rank", "peak", "into the step", "phase"], rows, text=(3,)))
    yield f"<details><summary>The peak of each rank</summary>{inside}</details>"


def _at_the_peak(rank: RankRecording, replay: MemoryReplay, peak: Peak) -> Iterator[str]:
    held = Counter[tuple[str, str]]()
    for place, n_bytes in peak.held.items():
        one = replay.memory.allocations[place]
        block = _block(rank.modules[replay.memory.calls[one.call].module].name) if one.call >= 0 else ""
        held[one.holds.value, block] += n_bytes
    rows = [
        [share_bar(n_bytes / peak.n_bytes), format_bytes(n_bytes), holds, block]
        for (holds, block), n_bytes in held.most_common(MOST_MEMORY_ROWS)
    ]
    yield "<p>What holds it at the peak:</p>"
    yield framed(table(["", "bytes", "for", "made in module"], rows, text=(0, 2, 3)))
    yield from _shown(rows, held, "largest")


def _block(name: str) -> str:
    """A module as far as its number: `layers.0` of `layers.0.linear`."""
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: first + 1]) or "the model itself"


def _lower(found: Findings) -> Iterator[str]:
    if found.played is None or found.is_far or not found.played.fittings:
        return
    rows: dict[str, list[str]] = {}
    for fitting in found.played.fittings:
        for one in fitting.remedies:
            longer = one.times.iteration_s / fitting.times.iteration_s - 1
            peak = format_bytes(one.remedy.peak_bytes)
            rows[one.remedy.words] = [one.remedy.words, peak, ms(one.times.iteration_s), f"{100 * longer:+.0f} %"]
    if rows:
        yield "<p>What would lower it, by replay:</p>"
        yield framed(table(["remedy", "peak", "step", "change"], rows.values(), text=(0,)))
        yield (
            '<p class="quiet"><code>sirtaki optimize --memory-budget</code> chooses for a budget, and prints the lines '
            "of code.</p>"
        )


MOST_ROWS = 12
LEAST_SHARE = 0.005
"""Of the step; smaller parts of the path are shown as one."""

STYLE = """
body { max-width: 1120px; }
.note { border-left: 3px solid #d1366b; padding: .1em .9em; margin: 1em 0; }
.quiet { opacity: .75; font-size: .92em; }
.share { display: inline-block; height: .75em; background: #0072b2; border-radius: 1px; vertical-align: baseline; }
.share.less { background: #009e73; } th.number { text-align: right; }
tr.sum td { border-top: 1px solid currentColor; }
#timeline { position: relative; max-height: 75vh; overflow-x: hidden; overflow-y: auto; border: 1px solid #8886; }
#timeline canvas { position: sticky; top: 0; left: 0; display: block; cursor: grab; touch-action: pan-y; }
#timeline canvas:active { cursor: grabbing; } #timeline canvas:focus-visible { outline: 2px solid #0072b2; }
#timeline-tip { position: fixed; z-index: 2; white-space: pre; pointer-events: none; font-size: 12px; }
#timeline-tip { padding: .4em .6em; background: #fffffff2; color: #222; border: 1px solid #999; border-radius: 3px; }
#timeline-tip { max-width: 90vw; }
.controls { display: flex; flex-wrap: wrap; gap: .4em 1em; align-items: center; margin: .6em 0; }
.controls button { font: inherit; min-width: 2.2em; } .controls select { font: inherit; }
.line { display: inline-block; width: 1.4em; height: 0; border-top: 2.5px solid currentColor; vertical-align: middle; }
@media (prefers-color-scheme: dark) { #timeline-tip { background: #23272cf5; color: #ddd; border-color: #555; } }
"""


def render(found: Findings) -> str:
    """The page; whatever comes from the recording is escaped."""
    histories = found.histories
    parts = step_parts(histories)
    shown = _busiest(parts)
    exposed = exposures(histories)
    paths = drawn_path(histories, found.played.replay) if found.played is not None and not found.is_far else {}
    drawn = timeline(
        histories, [one.rank for one in shown], paths, kind_names={kind: kind_words(kind, found) for kind in Kind}
    )
    script = files(__package__).joinpath("timeline.js").read_text(encoding="utf-8")
    return page(
        "Where a step’s time goes",
        [
            *_summary(found),
            *_bars(found, parts, shown),
            *_timeline(drawn, script, with_path=bool(paths)),
            *_path(found),
            *_exposure(found, exposed),
            *_what_if(found),
            *memory_section(found),
            *_rest(found),
        ],
        head=_policy(script) + f"<style>{STYLE}</style>",
    )


def _policy(script: str) -> str:
    """Nothing is fetched, and no other script than this one runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}">'


def _busiest(parts: Sequence[StepParts]) -> list[StepParts]:
    """Return the ranks that have most to do, by their number; all if they are few."""
    busiest = sorted(parts, key=lambda one: one.seconds.get(Kind.EXPOSED, 0.0) - one.step_s)[:MOST_RANKS]
    return sorted(busiest, key=lambda one: one.rank)


# ── what was found, in a few sentences ────────────────────────────────────────────────────────────────────────────────


def _summary(found: Findings) -> Iterator[str]:
    yield f"<p>{escape(heading(found))}</p>"
    yield from (f'<p class="note">{escape(problem)}</p>' for problem in problems(found))
    yield f"<p>{escape(' '.join(sentences(found)))}</p>"


# ── a bar for each rank ───────────────────────────────────────────────────────────────────────────────────────────────


def _bars(found: Findings, parts: Sequence[StepParts], shown: Sequence[StepParts]) -> Iterator[str]:
    kinds = [kind for kind in Kind if any(kind in one.seconds for one in parts)]
    tall = 24 if len(shown) <= 16 else 14 if len(shown) <= 64 else 9
    longest_ms = 1e3 * max(one.step_s for one in parts)
    plot = Plot(x=(0, longest_ms), y=(0, len(shown)), x_label="ms", y_label="", height=52 + tall * len(shown))
    for row, one in enumerate(shown):
        left_ms, y = 0.0, len(shown) - 1 - row
        for kind, seconds in one.seconds.items():
            right_ms = left_ms + 1e3 * seconds
            title = f"rank {one.rank}, {kind_words(kind, found)}: {ms(seconds)}, {percent(seconds / one.step_s)}"
            plot.box((left_ms, right_ms), (y + 0.1, y + 0.9), color=COLORS[kind], title=title)
            left_ms = right_ms
    every = 1 if tall * len(shown) <= 1000 else 4
    ticks = [(len(shown) - 0.5 - row, f"rank {one.rank}") for row, one in enumerate(shown) if row % every == 0]
    yield "<h2>Where each rank’s time goes</h2>"
    yield "<p>Means of the recorded iterations; the parts add up to the step.</p>"
    if len(shown) < len(parts):
        yield f"<p>The {len(shown)} ranks with most to do are drawn, of {len(parts)}.</p>"
    yield legend({kind_words(kind, found): COLORS[kind] for kind in kinds})
    yield framed(plot.render(y_ticks=ticks))
    titles = ["rank", "step", *(kind_words(kind, found) for kind in kinds)]
    rows = [[str(one.rank), ms(one.step_s), *(ms(one.seconds.get(kind, 0.0)) for kind in kinds)] for one in shown]
    yield f"<details><summary>The same in numbers</summary>{framed(table(titles, rows))}</details>"


# ── one iteration ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _timeline(drawn: Timeline, script: str, *, with_path: bool) -> Iterator[str]:
    iterations = drawn.data["iterations"]
    options = "".join(
        f'<option value="{place}">{one["number"]}: {one["ms"]:.4g} ms{" (median)" if place == 0 else ""}</option>'
        for place, one in enumerate(iterations)
    )
    used = {
        kind
        for each in iterations
        for lane in each["lanes"]
        for flat, stride in ((lane["under"], 4), (lane.get("boxes", []), 4), (lane.get("units", []), 6))
        for kind in flat[2::stride]
    }
    path = '<label><input type="checkbox" id="timeline-path" checked> critical path <span class="line"></span></label>'
    buttons = (
        ("left", "←", "earlier"), ("right", "→", "later"), ("in", "+", "zoom in"), ("out", "−", "zoom out"),
        ("whole", "whole", "the whole iteration"),
    )  # fmt: skip
    yield "<h2>One iteration</h2>"
    yield (
        "<p>All ranks on one clock. Pale is a phase between its operators; the thin line before a unit is how long it "
        "waited for other ranks or its stream.</p>"
    )
    yield "".join(f"<p>{escape(note)}</p>" for note in drawn.notes)
    yield legend({name: color for place, (name, color) in enumerate(drawn.data["kinds"]) if place in used})
    yield (
        '<div class="controls">'
        + "".join(
            (
                f'<label>iteration <select id="timeline-iteration">{options}</select></label><span>',
                *(
                    f'<button type="button" data-timeline="{name}" title="{title}">{sign}</button> '
                    for name, sign, title in buttons
                ),
                "</span>",
                path if with_path else "",
            )
        )
        + "</div>"
    )
    yield (
        '<div id="timeline"><div class="room"><canvas tabindex="0" role="img" '
        'aria-label="Timeline of one iteration; what it shows is told in the other sections"></canvas></div></div>'
        '<div id="timeline-tip" hidden></div>'
        '<noscript><p class="note">The timeline is drawn by a script, and scripts are off.</p></noscript>'
        '<p class="quiet">Drag to move; double-click, Ctrl and the wheel, or + and − zoom; arrow keys or A and D '
        "move, 0 shows the whole iteration.</p>"
    )
    yield f'<script type="application/json" id="timeline-data">{_inline(drawn)}</script>'
    yield f"<script>{script}</script>"


def _inline(drawn: Timeline) -> str:
    """JSON that may stand in HTML: no name can end the element."""
    text = json.dumps(drawn.data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ── the critical path ─────────────────────────────────────────────────────────────────────────────────────────────────


def _path(found: Findings) -> Iterator[str]:
    if found.played is None or not found.played.parts:
        return
    yield "<h2>The critical path</h2>"
    yield (
        "<p>What let what begin, over all ranks, from the last thing that ended back to the first: only what is on "
        "this path holds the step up. Shares of a mean step, which add up to it.</p>"
    )
    if found.is_far:
        yield _too_far(found)
        return
    if not found.has_operators:
        yield f"<p>{WITHOUT_OPERATORS}</p>"
    shown = [(part.words, part.seconds, part.share) for part in found.played.parts if part.share >= LEAST_SHARE]
    rest = [part for part in found.played.parts if part.share < LEAST_SHARE]
    if rest:
        shown.append(("is all else", sum(part.seconds for part in rest), sum(part.share for part in rest)))
    rows = [[share_bar(share), f"{100 * share:.1f} %", ms(seconds), words] for words, seconds, share in shown]
    total_s, total = sum(seconds for _, seconds, _ in shown), sum(share for _, _, share in shown)
    yield framed(
        table(
            ["", "share", "of a step", ""],
            rows,
            text=(0, 3),
            last=["", f"{100 * total:.1f} %", ms(total_s), "is the step"],
        )
    )


def _too_far(found: Findings) -> str:
    return (
        f'<p class="note">The replay takes {percent(abs(found.error))} '
        f"{'more' if found.error > 0 else 'less'} than the recorded steps, too much to be believed, so nothing is "
        "said here.</p>"
    )


# ── exposed communication ─────────────────────────────────────────────────────────────────────────────────────────────


def _exposure(found: Findings, exposed: Sequence[RankExposure]) -> Iterator[str]:
    yield "<h2>Exposed communication</h2>"
    if not any(one.units for rank in found.histories.recording.ranks.values() for one in rank.iterations):
        yield "<p>No gradients were exchanged.</p>"
        return
    if not any(one.exposed_s for one in exposed):
        yield "<p>None: no rank waits for gradients.</p>"
        return
    yield (
        "<p>How long ranks wait for gradients after their backward pass: while units are under way, which faster or "
        "better cut communication would shorten, and while none is, since another rank has not come so far.</p>"
    )
    worst = sorted(exposed, key=lambda one: -one.exposed_s)[:MOST_ROWS]
    rows = [
        [str(one.rank), ms(one.exposed_s), ms(one.moving_s), ms(one.held_s)]
        for one in sorted(worst, key=lambda one: one.rank)
    ]
    yield framed(table(["rank", "exposed", "units under way", "held up by other ranks"], rows))
    yield from _shown(worst, exposed, "ranks that wait longest")
    yield from _late_units(found)


def _late_units(found: Findings) -> Iterator[str]:
    late = late_units(found.histories)
    count = len(found.histories.steps)
    if not late:
        return
    yield "<p>Units that end after the backward pass; moments are means, counted from its end:</p>"
    worst = sorted(late, key=lambda one: -one.late_s)[:MOST_ROWS]
    rows = [
        [
            one.unit.name,
            f"{one.unit.n_bytes:,}",
            one.unit.lane,
            signed_ms(one.issue_s),
            signed_ms(one.begin_s),
            signed_ms(one.done_s),
            f"{one.times} of {count}",
        ]
        for one in sorted(worst, key=lambda one: one.done_s)
    ]
    titles = ["unit", "bytes", "stream", "issued", "begins", "ends", "late in iterations"]
    yield framed(table(titles, rows, text=(0, 2)))
    yield from _shown(worst, late, "units that are latest")


def _shown(some: Sized, all_: Sized, what: str) -> Iterator[str]:
    if len(some) < len(all_):
        yield f'<p class="quiet">Shown are the {len(some)} {what}, of {len(all_)}.</p>'


# ── what if ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _what_if(found: Findings) -> Iterator[str]:
    if found.played is None:
        return
    yield "<h2>What would help</h2>"
    if found.is_far:
        yield _too_far(found)
        return
    yield (
        f"<p>Each single remedy by itself, replayed. The replay of the recorded job is {100 * found.error:+.1f} % off "
        "the recording. These are predictions: try the first ones, and measure.</p>"
    )
    for note in found.played.notes:
        yield f'<p class="note">{escape(note[:1].upper() + note[1:])}.</p>'
    if not found.played.answers:
        yield "<p>There is nothing to ask for.</p>"
        return
    rows = []
    for one in found.played.answers:
        sure = found.played.is_sure(one)
        change = gain(one) + ("" if sure else ", which is within the error")
        bar = share_bar(one.gain if sure else 0.0, "less")
        rows.append([bar, f"if {one.words}", ms(one.times.iteration_s), change])
    yield framed(table(["", "remedy", "step", "change"], rows, text=(0, 1, 3)))
    yield (
        '<p class="quiet"><code>sirtaki replay</code> answers other questions, several changes at once; '
        "<code>sirtaki optimize</code> looks for a better plan.</p>"
    )


def _rest(found: Findings) -> Iterator[str]:
    missing = []
    if not any(rank.memory is not None for rank in found.histories.recording.ranks.values()):
        missing.append("Memory was not recorded.")
    if not found.has_operators:
        missing.append("Operators were not recorded on every rank, so phases are told less exactly there.")
    words = [*(f"{line[:1].upper()}{line[1:]}." for line in found.lines[1:]), *missing]
    yield "<h2>What this rests on</h2>"
    yield f'<p class="quiet">{escape(" ".join(words))}</p>'
