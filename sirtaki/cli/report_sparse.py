"""The report's part on sparse gradients: how much is touched, by which way rows go, and what that saves."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import cycle

from sirtaki.autotune.sparse.summary import MB, SparseSummary, Way
from sirtaki.engine.trial_log_reader import TrialLog

from .report_words import ms
from .svg import COLORS, Plot, framed, legend, swatch

TITLES = (
    "parameter",
    "rows",
    "touched",
    "popular rows",
    "way",
    "tried: time, MB",
    "MB",
    "if dense",
    "Horovod's rule",
)
HOW_TO_READ = (
    "<i>Touched</i> are the rows that any rank has in an iteration. <i>Popular rows</i> are the hot ones where they "
    "travel dense, else those before the knee of the curve below, with their part of all touches. MB are what a rank "
    "receives in an iteration, computed from the rows that were touched, not counted on the wire; the fastest way need "
    "not be the one with the fewest. <i>If dense</i> is an all-reduce of the whole gradient, <i>Horovod's rule</i> two "
    "all-gathers of what the backward pass leaves, in which nothing was added up before."
)


def rows_in_words(log: TrialLog) -> Iterator[str]:
    """What sparse gradients save, and a line for each; nothing where there are none."""
    told = list(log.sparse.values())
    if not told:
        return
    n_bytes, dense, horovod = (
        sum(getattr(summary, name) for summary in told) for name in ("n_bytes", "dense_bytes", "horovod_bytes")
    )
    yield (
        f"Sparse gradients: a rank receives {_mb(n_bytes)} MB in an iteration; dense it would be {_mb(dense)} MB"
        f"{_saved(n_bytes, dense)}, by Horovod's rule {_mb(horovod)} MB{_saved(n_bytes, horovod)}."
    )
    yield from (summary.describe() for summary in told)


def sparse(log: TrialLog) -> Iterator[str]:
    """A table of the parameters, and how much of what is touched the most touched rows are."""
    told = list(log.sparse.values())
    if not told:
        return
    colors = dict(zip(log.sparse, cycle(COLORS), strict=False))
    yield "<h2>Sparse gradients</h2>"
    yield f"<p>{escape(next(rows_in_words(log)))}</p>"
    titles = "".join(f"<th>{title}</th>" for title in TITLES)
    lines = "".join(_line(summary, colors[summary.name]) for summary in told)
    yield framed(f"<table><tr>{titles}</tr>{lines}</table>")
    yield f"<p>{HOW_TO_READ}</p>"
    if curved := [summary for summary in told if len(summary.curve) > 1]:
        yield legend({summary.name: colors[summary.name] for summary in curved})
        yield framed(_curves(curved, [colors[summary.name] for summary in curved]))


def _line(summary: SparseSummary, color: str) -> str:
    popular = f"{summary.popular_rows}: {summary.popular_share:.0%}" if summary.curve else ""
    tried = "; ".join(map(_way, summary.ways)) if len(summary.ways) > 1 else ""
    numbers = (summary.n_bytes, summary.dense_bytes, summary.horovod_bytes)
    return (
        f"<tr><td>{swatch(color)}{escape(summary.name)}</td>"
        f'<td class="number">{summary.n_rows} × {summary.width}</td><td class="number">{summary.density:.2%}</td>'
        f'<td class="number">{popular}</td><td>{escape(summary.plan)}</td><td>{escape(tried)}</td>'
        + "".join(f'<td class="number">{_mb(number)}</td>' for number in numbers)
        + "</tr>"
    )


def _way(way: Way) -> str:
    time = "" if way.measured_s is None else f" {ms(way.measured_s)},"
    predicted = "" if way.predicted_s is None else f" (predicted {ms(way.predicted_s)})"
    return f"{way.plan}{time} {_mb(way.n_bytes)}{predicted}"


def _curves(told: Sequence[SparseSummary], colors: Sequence[str]) -> str:
    most = max(summary.curve[-1][0] for summary in told)
    plot = Plot(
        x=(0, math.log10(most)), y=(0, 100), x_label="most touched rows (log)", y_label="of all touches, %", height=220
    )
    for summary, color in zip(told, colors, strict=True):
        plot.line([(math.log10(rows), 100 * part) for rows, part in summary.curve], color=color)
        if summary.popular_rows:
            title = f"{summary.name}: {summary.popular_rows} rows are {summary.popular_share:.0%} of touches"
            plot.dot(math.log10(summary.popular_rows), 100 * summary.popular_share, color=color, title=title)
    return plot.render(x_ticks=[(power, f"{10**power}") for power in range(int(math.log10(most)) + 1)])


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / MB:.3g}"


def _saved(n_bytes: float, other: float) -> str:
    return f" ({other / n_bytes:.2g} times as much)" if n_bytes > 0 else ""
