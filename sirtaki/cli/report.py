"""`sirtaki report`: write a page about a job's trials, its sparse gradients, or its recording."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from sirtaki.analysis.recording import REPORT_FILE
from sirtaki.analysis.svg import (
    COLORS,
    DEFAULT_COLOR,
    WIDTH,
    Plot,
    framed,
    legend,
    log_ms,
    log_ms_ticks,
    page,
    paragraph,
    swatch,
    table,
)
from sirtaki.autotune.arms.planners import OUR_PLANNERS
from sirtaki.autotune.knobs import Knobs, format_bytes
from sirtaki.autotune.meta.session import DEFAULT_ARM, Purpose
from sirtaki.autotune.model.simulator import Simulator
from sirtaki.autotune.sparse import MB, SparseSummary, Way
from sirtaki.comm.plan import Algorithm
from sirtaki.engine.tuning.trial_log import Measurement, Outcome, Retune, TrialLog, read_log
from sirtaki.measures import faster, in_ms

from .output import add_formats, print_table, printed, write_file

# the last three are in logs of older releases
FINALS = (Purpose.FINALS.value, "verify", "guard_winner", "guard_default")


def summary(log: TrialLog) -> Iterator[str]:
    """Describe the kept setting, its gain, the lower bound, and why tuning ended."""
    kept = log.outcome
    yield f"{len(log.measurements)} measurements in {log.last_iteration} training iterations."
    if kept.arm == DEFAULT_ARM:
        yield f"Kept: the default, {kept.knobs.describe()}."
    else:
        yield f"Kept: {kept.knobs.describe()}, proposed by {kept.arm}."
    yield from _gain(kept)
    yield from _bound(log)
    if kept.reason:
        yield f"Why: {kept.reason}."
    yield from map(_retune, log.retunes)


def _retune(retune: Retune) -> str:
    """Describe the cause and the result of a re-tune, in one sentence."""
    took = "was not what it had been" if retune.ratio is None else f"took {retune.ratio:.2g} times as long as before"
    begin = f"After iteration {retune.iteration} communication {took}:"
    found = retune.result
    if found is None:
        return f"{begin} the log ends before another setting was chosen."
    if found.knobs == retune.running:
        return f"{begin} nothing better was found."
    gain = ""
    if found.gain is not None:
        gain = f", which is {found.gain.describe()}, than what ran"
    elif found.default_span_s is not None:
        gain = f", {faster(found.default_span_s, found.span_s)} than what ran"
    return f"{begin} from then on {found.knobs.describe()}{gain}."


def _gain(kept: Outcome) -> Iterator[str]:
    """Describe the gain from tuning."""
    before_s, after_s, usual = kept.default_span_s, kept.span_s, kept.usual
    if before_s is None or kept.arm == DEFAULT_ARM:
        yield f"Communication takes {in_ms(after_s)}."
        if usual is not None:
            yield (
                f"A step takes {in_ms(usual.step_s(after_s))}; the backward pass does not hide "
                f"{in_ms(usual.exposed_s(after_s))} of its communication."
            )
        return
    gain = faster(before_s, after_s) if kept.gain is None else f"{kept.gain.describe()}, in paired turns"
    yield f"Communication takes {in_ms(after_s)}, {in_ms(before_s)} by default ({gain})."
    if usual is not None:
        yield (
            f"A step takes {in_ms(usual.step_s(after_s))}, {in_ms(usual.step_s(before_s))} by default "
            f"({faster(usual.step_s(before_s), usual.step_s(after_s))}); the backward pass does not hide "
            f"{in_ms(usual.exposed_s(after_s))} of its communication, {in_ms(usual.exposed_s(before_s))} by default."
        )


def _bound(log: TrialLog) -> Iterator[str]:
    """Describe the lower bound of the communication time, if it is known."""
    if log.model is None or log.bound_s is None:
        return
    if log.bound_s < log.model.bound_s:
        yield (
            f"The probes alone would have said that no plan can take less than {in_ms(log.model.bound_s)}, but "
            "gradients have travelled faster since, so the bound is drawn at the fastest setting, "
            f"{in_ms(log.bound_s)}."
        )
    else:
        yield (
            f"No plan can take less than {in_ms(log.bound_s)}: the backward pass from its first gradient on, or all "
            "bytes at the best rate that was measured."
        )


def in_words(knobs: Knobs) -> str:
    """Describe the knobs without the terms units and streams."""
    if knobs.cuts is not None:
        sizes = (
            f"in {len(knobs.cuts)} units whose sizes a planner chose, {format_bytes(knobs.unit_bytes)} in the middle"
        )
    else:
        sizes = f"in units of {format_bytes(knobs.unit_bytes)}: smaller gradients are packed, larger ones cut"
    at_once = "one at a time" if knobs.streams == 1 else f"up to {knobs.streams} at the same time, on as many streams"
    way = (
        "first inside each node, then between nodes" if knobs.algorithm is Algorithm.HIERARCHICAL else "all ranks alike"
    )
    threads = "" if knobs.threads is None else f", with {knobs.threads} GPU threads each"
    nccl = f", by NCCL's {knobs.nccl.describe()}" if knobs.nccl else ""
    lossy = f", compressed by {knobs.compressors}" if knobs.lossy else ""
    over = knobs.transport.value.replace("_", " ")
    return f"Gradients travel {sizes}; {at_once}, over {over}, {way}{threads}{nccl}{lossy}."


def why_not_the_fastest(log: TrialLog) -> Iterator[str]:
    """Explain why the setting with the shortest measurement was not kept, if this is the case."""
    if log.result is None or fastest(log)[0].knobs == log.result.knobs:
        return
    compared: dict[Knobs, list[float]] = {}
    for trial in log.measurements:
        if trial.succeeded and trial.purpose in FINALS:
            compared.setdefault(trial.knobs, []).append(trial.span_s)
    words = "The first row is not what was kept: of many measurements, one is short by luck."
    if compared:
        times = sorted((median(spans_s), knobs.describe()) for knobs, spans_s in compared.items())
        words += " Therefore the fastest settings and the default ran in turns at the end, and took: "
        words += ", ".join(f"{name} {in_ms(span_s)}" for span_s, name in times) + "."
    yield words


def fastest(log: TrialLog) -> list[Measurement]:
    """Return the shortest measurement of each setting, fastest first."""
    shortest = sorted((trial for trial in log.measurements if trial.succeeded), key=lambda trial: trial.span_s)
    unique = {trial.knobs: trial for trial in reversed(shortest)}
    return sorted(unique.values(), key=lambda trial: trial.span_s)


def in_order(log: TrialLog) -> Iterator[str]:
    """Describe how well the planners' model predicted the measurements, if it made predictions."""
    predicted = [trial for trial in log.measurements if trial.succeeded and trial.predicted_s is not None]
    if not predicted or predicted[-1].agreement is None or len({trial.knobs for trial in predicted}) < 2:
        return
    times = median(trial.span_s / trial.predicted_s for trial in predicted if trial.predicted_s is not None)
    yield (
        f"Of two settings that ran, the faster one was the one that the planners' model had predicted to be faster in "
        f"{_right(predicted[-1].agreement):.0f} % of the cases (the more they differ the more they count; 50 % is "
        f"guessing). In the median, measured times were {times:.2g} times the predicted ones."
    )
    first_doubted = next((trial for trial in log.measurements if trial.believed is False), None)
    if first_doubted is not None:
        again = "" if log.measurements[-1].believed is False else " until it had ranked more of them right"
        yield (
            f"From iteration {first_doubted.iteration} on that was too little to believe it, so planners were not "
            f"asked{again}."
        )


def _right(agreement: float) -> float:
    """Return the percentage of pairs in the predicted order."""
    return 50.0 * (1.0 + agreement)


def who_was_trusted(log: TrialLog) -> Iterator[str]:
    """Describe how many settings each arm proposed, and how many were the best so far."""
    asked = Counter(trial.arm for trial in searching(log))
    found = Counter(trial.arm for trial in searching(log) if trial.was_best)
    each = ", ".join(f"{arm} {count} ({found[arm]})" for arm, count in asked.most_common() if arm != DEFAULT_ARM)
    if each:
        yield f"Settings proposed by each, and how many of them were the best so far: {each}."


def searching(log: TrialLog) -> list[Measurement]:
    """Return the trials that arms proposed, each once. Without any, return all measurements."""
    trials = [trial for trial in log.measurements if trial.purpose == Purpose.TRIAL.value] or log.measurements
    first: dict[tuple[str, Knobs], Measurement] = {}
    for trial in trials:
        before = first.setdefault((trial.arm, trial.knobs), trial)
        if trial.was_best and not before.was_best:
            first[trial.arm, trial.knobs] = trial
    return list(first.values())


PLANNERS = {planner.name for planner in OUR_PLANNERS}
FAINTEST = 0.08
"""Opacity of an arm without credit."""


def trust(log: TrialLog, colors: Mapping[str, str]) -> Iterator[str]:
    """Draw a row for each arm: its credit over time, and its trials."""
    told = [trial for trial in log.measurements if trial.credits]
    if not told:
        return
    yield (
        "<h2>Which arm was trusted when</h2>"
        "<p>A row is as strong in colour as the arm's credit: full after it has found a new best (large dot), fading "
        "with each trial that was none (small dot). More credit gets more trials; arms without any take turns. "
        "Where a row is empty, planners were not asked: trials had not borne their model out.</p>"
    )
    if not any(credit for trial in told for credit in trial.credits.values()):
        yield "<p>None has found a setting that is clearly better than all before, so all have had equal turns.</p>"
    arms = list(dict.fromkeys(arm for trial in told for arm in trial.credits))
    last = log.last_iteration
    plot = Plot.of_rows(len(arms), x=(0, last), x_label="training iteration", height=52 + 20 * len(arms))
    ends = [*(trial.iteration for trial in told[1:]), last]
    for trial, end in zip(told, ends, strict=True):
        for arm, credit in trial.credits.items():
            if trial.believed is False and arm in PLANNERS:
                continue
            color, opacity = colors.get(arm, DEFAULT_COLOR), FAINTEST + (1.0 - FAINTEST) * min(max(credit, 0.0), 1.0)
            title = f"{arm}: credit {credit:.2g}"
            plot.bar((trial.iteration, end), arms.index(arm), color=color, title=title, opacity=opacity)
    for trial in searching(log):
        if trial.arm in arms and trial.succeeded:
            title, y = f"{in_ms(trial.span_s)}: {trial.arm}, {trial.knobs.describe()}", plot.row(arms.index(trial.arm))
            plot.dot(trial.iteration, y, color="currentColor", title=title, large=trial.was_best)
    yield framed(plot.render(y_ticks=[(plot.row(row), arm) for row, arm in enumerate(arms)]))


def predictions(log: TrialLog, colors: Mapping[str, str]) -> Iterator[str]:
    """Draw predictions of the planners' model against measurements."""
    predicted = [
        (trial, trial.predicted_s) for trial in log.measurements if trial.succeeded and trial.predicted_s is not None
    ]
    if not predicted:
        return
    yield "<h2>Predicted and measured</h2>"
    words = "A dot on the line was predicted exactly; what counts is the order, on which planners rely."
    yield f"<p>{words} {escape(' '.join(in_order(log)))}</p>"
    times_s = [seconds for trial, predicted_s in predicted for seconds in (trial.span_s, predicted_s)]
    low, high = log_ms(min(times_s)) - 0.05, log_ms(max(times_s)) + 0.05
    plot = Plot(x=(low, high), y=(low, high), x_label="predicted, ms (log)", y_label="measured, ms (log)")
    plot.line([(low, low), (high, high)], color=DEFAULT_COLOR, dashed=True)
    for trial, predicted_s in predicted:
        title = f"predicted {in_ms(predicted_s)}, measured {in_ms(trial.span_s)}: {trial.arm}, {trial.knobs.describe()}"
        plot.dot(log_ms(predicted_s), log_ms(trial.span_s), color=colors[trial.arm], title=title)
    ticks = log_ms_ticks(low, high)
    yield framed(plot.render(x_ticks=ticks, y_ticks=ticks))


SPARSE_TITLES = (
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
    """Describe the bytes saved by sparse gradients, with a line for each parameter."""
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
    """Return a table of parameters, with the access shares of their most frequent rows."""
    told = list(log.sparse.values())
    if not told:
        return
    colors = dict(zip(log.sparse, cycle(COLORS), strict=False))
    yield "<h2>Sparse gradients</h2>"
    yield paragraph(next(rows_in_words(log)))
    rows = [
        [
            swatch(colors[one.name], one.name),
            f"{one.n_rows} × {one.width}",
            f"{one.density:.2%}",
            f"{one.popular_rows}: {one.popular_share:.0%}" if one.curve else "",
            one.plan,
            "; ".join(map(_way, one.ways)) if len(one.ways) > 1 else "",
            *(_mb(number) for number in (one.n_bytes, one.dense_bytes, one.horovod_bytes)),
        ]
        for one in told
    ]
    yield table(SPARSE_TITLES, rows, text=(0, 4, 5))
    yield f"<p>{HOW_TO_READ}</p>"
    if curved := [summary for summary in told if len(summary.curve) > 1]:
        yield legend({summary.name: colors[summary.name] for summary in curved})
        yield framed(_curves(curved, [colors[summary.name] for summary in curved]))


def _way(way: Way) -> str:
    time = "" if way.measured_s is None else f" {in_ms(way.measured_s)},"
    predicted = "" if way.predicted_s is None else f" (predicted {in_ms(way.predicted_s)})"
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


TITLES = ("time", "predicted", "setting", "proposed by", "iteration")
WHO = (
    "<i>default</i> is what runs untuned, <i>registry</i> what earlier jobs have left. "
    f"{', '.join(f'<i>{planner.name}</i>' for planner in OUR_PLANNERS)} are planners, which compute a setting "
    "from a model of the job. All others are search techniques. Together they are called arms."
)
NOTHING_DENSE = "No settings were tried: this optimizer's gradients are all sparse."

BEST_COLOR, BOUND_COLOR, COMPUTE_COLOR = "#d62728", "currentColor", "#c8ccd0"


def configure(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "log",
        type=Path,
        metavar="DIR_OR_LOG",
        help="what `sirtaki profile` has recorded, or what a job wrote to SIRTAKI_TRIAL_LOG",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page (default: DIR/report.html, or LOG with .html)"
    )
    add_formats(parser)


def main(options: Namespace) -> int:
    """Write the page, and print a summary and the path."""
    if options.log.is_dir():
        from sirtaki.analysis.page import findings, heading, problems, sentences
        from sirtaki.analysis.page import render as render_recording

        path: Path = options.output or options.log / REPORT_FILE
        found = findings(options.log)
        write_file(path, render_recording(found), "the report")
        words = [heading(found), *problems(found), *sentences(found)]
        rows = [one.row() for one in found.answers]
        if not printed(options, {"page": str(path), "words": words, "what_if": rows}, rows):
            print("\n".join([*words, f"wrote {path}"]))
        return 0
    path = options.output or options.log.with_suffix(".html")
    log = write_report(options.log, path)
    rows = _settings(log)
    words = (
        [*summary(log), *why_not_the_fastest(log), *in_order(log), *who_was_trusted(log)] if rows else [NOTHING_DENSE]
    )
    words += rows_in_words(log)
    if printed(options, {"page": str(path), "words": words, "fastest": rows}, rows):
        return 0
    if rows:
        print("\n".join(summary(log)), end="\n\n")
        print_table(TITLES, _cells(log, most=5))
        print()
        words = words[len(list(summary(log))) :]
    print("\n".join([*words, f"wrote {path}"]))
    return 0


def write_report(log_path: Path, html_path: Path) -> TrialLog:
    """Read a log, and write the page.

    Returns:
        The log.

    Raises:
        ConfigError: the log cannot be read or is not a log of trials, or the page cannot be written.
    """
    log = read_log(log_path)
    write_file(html_path, render(log), "the report")
    return log


def render(log: TrialLog) -> str:
    """Return the page."""
    if not log.measurements:
        return page("Tuning report", [f"<p>{NOTHING_DENSE}</p>", *sparse(log)])
    arms = dict.fromkeys(trial.arm for trial in log.measurements if trial.arm != DEFAULT_ARM)
    colors = {DEFAULT_ARM: DEFAULT_COLOR, **dict(zip(arms, cycle(COLORS), strict=False))}
    settings = [(*cells[:3], swatch(colors[cells[3]], cells[3]), cells[4]) for cells in _cells(log, most=10)]
    lines = {"best so far": BEST_COLOR} | ({"bound": BOUND_COLOR} if log.bound_s is not None else {})
    return page(
        "Tuning report",
        [
            _summary(log),
            "<h2>Trials</h2>",
            legend(colors | lines),
            framed(_trials_plot(log, colors)),
            "<h2>Who proposed what ran</h2>",
            f"<p>{WHO}</p>",
            framed(_shares_plot(log, colors)),
            *trust(log, colors),
            *predictions(log, colors),
            "<h2>Fastest settings</h2>",
            *map(paragraph, why_not_the_fastest(log)),
            table(TITLES, settings, text=(2, 3)),
            *sparse(log),
            *_timelines(log),
        ],
    )


def _summary(log: TrialLog) -> str:
    return (
        f"{paragraph(' '.join(summary(log)))}\n{paragraph(in_words(log.outcome.knobs))}\n"
        "<p>Times are <i>communication times</i>: from the first gradient that is ready to the last one that is "
        "reduced. The backward pass runs in the same time.</p>"
    )


def _trials_plot(log: TrialLog, colors: Mapping[str, str]) -> str:
    measured = [trial for trial in log.measurements if trial.succeeded]
    bound_s = [] if log.bound_s is None else [log.bound_s]
    low, high = (log_ms(edge([*bound_s, *(trial.span_s for trial in measured)])) for edge in (min, max))
    last = log.last_iteration
    plot = Plot(
        x=(0, last), y=(low - 0.05, high + 0.05), x_label="training iteration", y_label="communication time, ms (log)"
    )
    if log.default is not None:
        level = log_ms(log.default.span_s)
        plot.line([(0, level), (last, level)], color=DEFAULT_COLOR, dashed=True)
    for level in map(log_ms, bound_s):
        plot.line([(0, level), (last, level)], color=BOUND_COLOR, dashed=True)
    plot.steps(list(_best_so_far(measured)), color=BEST_COLOR)
    for trial in log.measurements:
        title = f"{trial.arm}, {trial.knobs.describe()}"
        if trial.succeeded:
            title = f"{in_ms(trial.span_s)}: {title}"
            color = colors[trial.arm]
            plot.dot(trial.iteration, log_ms(trial.span_s), color=color, title=title, large=trial.was_best)
        else:
            plot.cross(trial.iteration, color=colors[trial.arm], title=f"failed: {title}")
    return plot.render(y_ticks=log_ms_ticks(low - 0.05, high + 0.05))


def _best_so_far(measured: Sequence[Measurement]) -> Iterator[tuple[float, float]]:
    """Yield iteration and logarithm of the time of each new best setting, as decided by the session."""
    first = measured[0]
    yield first.iteration, log_ms(first.span_s)
    for trial in measured[1:]:
        if trial.was_best:
            yield trial.iteration, log_ms(trial.span_s)


def _shares_plot(log: TrialLog, colors: Mapping[str, str]) -> str:
    plot = Plot(x=(0, log.last_iteration), y=(0, 100), x_label="training iteration", y_label="share, %", height=200)
    counts: Counter[str] = Counter()
    trials = searching(log)
    ends = [*(trial.iteration for trial in trials[1:]), log.last_iteration]
    for total, (trial, end) in enumerate(zip(trials, ends, strict=True), start=1):
        counts[trial.arm] += 1
        below = 0.0
        for arm, color in colors.items():
            share = 100 * counts[arm] / total
            if share:
                title = f"{arm}: {counts[arm]} of {total}"
                plot.box((trial.iteration, end), (below, below + share), color=color, title=title)
            below += share
    return plot.render()


def _cells(log: TrialLog, most: int) -> list[tuple[str, str, str, str, str]]:
    """Return the fastest settings, in the columns of `TITLES`."""
    shown = fastest(log)[:most]
    told = ["" if trial.predicted_s is None else in_ms(trial.predicted_s) for trial in shown]
    return [
        (in_ms(trial.span_s), predicted, trial.knobs.describe(), trial.arm, str(trial.iteration))
        for trial, predicted in zip(shown, told, strict=True)
    ]


def _settings(log: TrialLog) -> list[dict[str, Any]]:
    """Return all settings that ran, fastest first, for machine-readable output."""
    return [
        {
            "setting": trial.knobs.describe(),
            "span_s": trial.span_s,
            "predicted_s": trial.predicted_s,
            "proposed_by": trial.arm,
            "iteration": trial.iteration,
            "knobs": trial.knobs.to_json(),
        }
        for trial in fastest(log)
    ]


def _timelines(log: TrialLog) -> Iterator[str]:
    """Draw default and kept setting as simulated, if the log contains the job's model of their routes."""
    shown = {"kept": log.outcome.knobs}
    if log.default is not None:
        default = log.default.knobs
        kept_default = default == log.outcome.knobs
        shown = {"untuned default, kept": default} if kept_default else {"untuned default": default, **shown}
    model = log.model
    if model is None:
        return
    yield "<h2>One iteration, simulated from the profile</h2>"
    unknown = [k for k in shown.values() if k.route not in model.links]
    if unknown:
        yield f"<p>No timeline: that job's probes did not show what {escape(unknown[0].describe())} would cost.</p>"
        return
    simulators = {name: model.simulator(knobs.route) for name, knobs in shown.items()}
    end_ms = max(1e3 * simulators[name].run_knobs(knobs).end_s for name, knobs in shown.items())
    plots = (
        f"<div><p>{name}: {escape(knobs.describe())}, {in_ms(simulators[name].run_knobs(knobs).span_s)}</p>"
        f"{_timeline_plot(simulators[name], knobs, end_ms=end_ms)}</div>"
        for name, knobs in shown.items()
    )
    yield f'<div class="pair">{"".join(plots)}</div>'


def _timeline_plot(simulator: Simulator, knobs: Knobs, *, end_ms: float) -> str:
    plan = knobs.to_plan(simulator.layout)
    timeline = simulator.run(plan)
    rows = ["compute", *(f"stream {number}" for number in range(plan.streams))]
    plot = Plot.of_rows(len(rows), x=(0, end_ms), x_label="ms", height=60 + 22 * len(rows), width=WIDTH // 2)
    plot.bar((0, 1e3 * timeline.compute_end_s), 0, color=COMPUTE_COLOR, title="backward pass")
    for index, unit in enumerate(plan.units):
        start_ms, stop_ms = 1e3 * timeline.start_s[index], 1e3 * timeline.stop_s[index]
        n_bytes = unit.numel * simulator.layout.itemsize_bytes
        title = f"unit {index}: {n_bytes} bytes, {start_ms:.2f} to {stop_ms:.2f} ms"
        plot.bar((start_ms, stop_ms), 1 + unit.stream, color=COLORS[0] if index % 2 else COLORS[5], title=title)
    return plot.render(y_ticks=[(plot.row(row), name) for row, name in enumerate(rows)])
