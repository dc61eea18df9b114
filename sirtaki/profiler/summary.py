"""What a recording shows, in a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from sirtaki.autotune.model.graph import Phase

from .alignment import Alignment, Known
from .recording import Detail, RankRecording, Recording

COLUMNS = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
MOST_RANKS = 16
"""As many are shown one by one."""


def summary(recording: Recording, alignment: Alignment) -> Iterator[str]:
    """Its lines."""
    hosts = {recording.job.placement[rank].host for rank in recording.ranks}
    usual = recording.usual_iterations
    details = {rank.detail for rank in recording.ranks.values()}
    what = "with operators" if details == {Detail.OPERATORS} else "units only"
    if len(details) > 1:
        what = "of some ranks with operators"
    yield (
        f"{_count(len(usual), 'iteration')} of {_count(len(recording.ranks), 'rank')} "
        f"on {_count(len(hosts), 'host')}, {what}"
    )
    for problem in recording.problems:
        yield f"  but: {problem}"
    yield _clocks(recording, alignment)
    yield ""
    yield f"{'rank':>6}{'step':>10}" + "".join(f"{phase.value:>10}" for phase in COLUMNS) + f"{'exposed':>10}"
    shown = sorted(recording.ranks.items())
    for number, rank in shown[:MOST_RANKS]:
        yield f"{number:>6}" + "".join(f"{_ms(value):>10}" for value in _row(rank, usual))
    if len(shown) > MOST_RANKS:
        yield f"   and {len(shown) - MOST_RANKS} more"
    yield "means, in ms; exposed is the communication that no computation hides"


def _clocks(recording: Recording, alignment: Alignment) -> str:
    known = {line.known for line in alignment.lines.values()}
    operators_us = 1e6 * max(rank.clock_error_s for rank in recording.ranks.values())
    told = f"; times of operators within {operators_us:.1f} µs" if operators_us else ""
    if known == {Known.REFERENCE}:
        return f"one clock{told}"
    how = "the units" if Known.START not in known else "the units, of some as asked for at the start"
    if Known.UNITS not in known:
        how = "what was asked for at the start"
    return f"clocks are aligned by {how}, within {1e6 * alignment.error_s:.0f} µs{told}"


def _row(rank: RankRecording, usual: Sequence[int]) -> Iterator[float | None]:
    """Mean times: of the step, of each phase, and of exposed communication."""
    steps = [iteration for iteration in rank.iterations if iteration.number in usual]
    if not steps:
        yield from [None] * (len(COLUMNS) + 2)
        return
    yield mean(step.end_s - step.begin_s for step in steps)
    for phase in COLUMNS:
        spans = [
            sum(span.end_s - span.begin_s for span in step.spans if span.phase is phase)
            for step in steps
            if any(span.phase is phase for span in step.spans)
        ]
        yield sum(spans) / len(steps) if spans else None
    yield mean(step.exposed_s for step in steps)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
