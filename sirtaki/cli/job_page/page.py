"""The page that a person opens first: where a step's time goes, one iteration, what holds it up, what would help."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from ..quantities import ms
from ..svg import Plot, framed, legend, page
from .drawn_path import drawn_path
from .exposure import RankExposure, exposures, late_units
from .findings import Findings
from .kinds import COLORS, Kind
from .memory import memory_section
from .sentences import WITHOUT_OPERATORS, gain, heading, kind_words, percent, problems, sentences, signed_ms
from .step_parts import StepParts, step_parts
from .tables import share_bar, table
from .timeline import Timeline, timeline

MOST_RANKS = 128
"""As many are drawn."""

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
    """Those that have most to do, by their number; all if they are few."""
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
            one.name,
            f"{one.n_bytes:,}",
            one.lane,
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


def _shown(some: Sequence[object], all_: Sequence[object], what: str) -> Iterator[str]:
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
        bar = share_bar(one.gain if sure else 0.0, "less")
        change = gain(one) if sure else f"{gain(one)}, which is within the error"
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
