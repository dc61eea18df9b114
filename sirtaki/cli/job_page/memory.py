"""The page's part on memory: who holds how much in one iteration, what the peak is made of, what would lower it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from sirtaki.autotune.knobs import MIB, format_bytes
from sirtaki.optimizer.budget import highest_rank, memory_replay
from sirtaki.profiler.recording import RankRecording
from sirtaki.profiler.step_memory import Holds
from sirtaki.replay.memory import MemoryReplay, Moment, Peak

from ..memory_words import peak_words, phase_at
from ..quantities import ms
from ..svg import Plot, framed, legend
from .findings import Findings
from .tables import share_bar, table

MOST_MOMENTS = 700
"""As many are drawn; of those that lie together the highest."""

MOST_RANKS = 128
MOST_ROWS = 10

COLORS = {
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
        {one.value: color for one, color in COLORS.items() if any(moment.n_bytes.get(one) for moment in moments)}
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
    for holds, color in COLORS.items():
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
        rows.append(
            [
                str(rank.rank),
                format_bytes(peak.n_bytes),
                ms(peak.at_s - replay.memory.begin_s),
                phase_at(rank, peak.at_s).value,
            ]
        )
    inside = framed(table(["rank", "peak", "into the step", "phase"], rows, text=(3,)))
    yield f"<details><summary>The peak of each rank</summary>{inside}</details>"


def _at_the_peak(rank: RankRecording, replay: MemoryReplay, peak: Peak) -> Iterator[str]:
    memory = replay.memory
    held = Counter[tuple[str, str]]()
    for place, n_bytes in peak.held.items():
        one = memory.allocations[place]
        block = _block(rank.modules[memory.calls[one.call].module].name) if one.call >= 0 else ""
        held[one.holds.value, block] += n_bytes
    rows = [
        [share_bar(n_bytes / peak.n_bytes), format_bytes(n_bytes), holds, block]
        for (holds, block), n_bytes in held.most_common(MOST_ROWS)
    ]
    yield "<p>What holds it at the peak:</p>"
    yield framed(table(["", "bytes", "for", "made in module"], rows, text=(0, 2, 3)))
    if len(held) > MOST_ROWS:
        yield f'<p class="quiet">Shown are the {MOST_ROWS} largest, of {len(held)}.</p>'


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
