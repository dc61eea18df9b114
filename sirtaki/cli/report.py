"""`sirtaki report`: write an HTML page about how a job was tuned (trials of settings, sparse gradients), or about the
recording of a job.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup, escape

from sirtaki.analysis.html import COLORS, DEFAULT_COLOR, LOG, dots, heading, line, page, paragraph, plot, swatch, table
from sirtaki.analysis.recording import REPORT_FILE
from sirtaki.autotune.arms.planners import OUR_PLANNERS
from sirtaki.autotune.knobs import Knobs, format_bytes
from sirtaki.autotune.meta.session import DEFAULT_ARM, Purpose
from sirtaki.autotune.model.simulator import Simulator
from sirtaki.autotune.sparse import MB, SparseAlternative, SparseSummary
from sirtaki.comm.plan import Algorithm
from sirtaki.engine.tuning.trial_log import LoggedResult, Measurement, Retune, TrialLog, read_log
from sirtaki.measures import counted, faster, in_ms

from .output import add_formats, print_table, printed, write_file

# Purposes of measurements in a trial log that compare the best settings with the default at the end of tuning. The
# second to the fourth purpose occur only in logs of older releases.
FINALS = (Purpose.FINALS.value, "verify", "guard_winner", "guard_default")


def summary(log: TrialLog) -> Iterator[str]:
    """Describe the setting that tuning has chosen, how much faster it is than the default, the lower bound of the
    communication time, and the reason for the choice.
    """
    kept = log.outcome
    yield f"{counted(len(log.measurements), 'measurement')} in {counted(log.last_iteration, 'training iteration')}."
    if log.result is None:
        yield "The log ends before the tuning phase does, so no setting was kept."
        proposer = "" if kept.arm == DEFAULT_ARM else f", proposed by {kept.arm}; it was not proved to be faster"
        yield f"The best setting so far: {kept.knobs.describe()}{proposer}."
        default = "" if kept.default_span_s is None else f", and {in_ms(kept.default_span_s)} with the default"
        yield f"Communication took {in_ms(kept.span_s)} with it{default}."
        yield from _bound(log)
        return
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
    """Describe in one sentence why the job tuned again after its warm-up, and with which result."""
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


def _gain(kept: LoggedResult) -> Iterator[str]:
    """Describe how much faster the setting that tuning has chosen is than the default."""
    before_s, after_s, usual = kept.default_span_s, kept.span_s, kept.usual
    if before_s is None or kept.arm == DEFAULT_ARM:
        yield f"Communication takes {in_ms(after_s)}."
        if usual is not None:
            yield (
                f"A step takes {in_ms(usual.step_s(after_s))}; the backward pass does not hide "
                f"{in_ms(usual.exposed_s(after_s))} of its communication."
            )
        return
    gain = faster(before_s, after_s) if kept.gain is None else f"{kept.gain.describe()}, in paired rounds"
    yield f"Communication takes {in_ms(after_s)}, {in_ms(before_s)} by default ({gain})."
    if usual is not None:
        yield (
            f"A step takes {in_ms(usual.step_s(after_s))}, {in_ms(usual.step_s(before_s))} by default "
            f"({faster(usual.step_s(before_s), usual.step_s(after_s))}); the backward pass does not hide "
            f"{in_ms(usual.exposed_s(after_s))} of its communication, {in_ms(usual.exposed_s(before_s))} by default."
        )


def _bound(log: TrialLog) -> Iterator[str]:
    """Describe the lower bound of the communication time of all settings, if it is known."""
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
    """Describe the knobs (tuned settings) in a sentence for users that explains its terms."""
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
    """Explain why tuning did not choose the setting with the shortest measured time. Yield nothing if it did."""
    if log.result is None or fastest(log)[0].knobs == log.result.knobs:
        return
    compared: dict[Knobs, list[float]] = {}
    for trial in log.measurements:
        if trial.succeeded and trial.purpose in FINALS:
            compared.setdefault(trial.knobs, []).append(trial.span_s)
    words = "The first row is not what was kept: of many measurements, one is short by luck."
    if compared:
        times = sorted((median(spans_s), knobs.describe()) for knobs, spans_s in compared.items())
        words += (
            " Therefore the fastest settings and the default ran in turns at the end, with communication times of: "
        )
        words += ", ".join(f"{name} {in_ms(span_s)}" for span_s, name in times) + "."
    yield words


def fastest(log: TrialLog) -> list[Measurement]:
    """Return the measurement with the shortest communication time of each setting, the fastest setting first."""
    shortest = sorted((trial for trial in log.measurements if trial.succeeded), key=lambda trial: trial.span_s)
    unique = {trial.knobs: trial for trial in reversed(shortest)}
    return sorted(unique.values(), key=lambda trial: trial.span_s)


def in_order(log: TrialLog) -> Iterator[str]:
    """Describe how often the planners' model predicted correctly which of two settings is faster.

    Planners are algorithms that compute a setting. Yield nothing if there are no predictions.
    """
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
    """Return the percentage of pairs of settings for which the predicted order was right.

    `agreement` is Kendall's rank correlation, from -1 to 1, with pairs weighted by the difference of their times.
    """
    return 50.0 * (1.0 + agreement)


def who_was_trusted(log: TrialLog) -> Iterator[str]:
    """Describe how many settings each arm (search method) proposed, and how many of these were the best so far when
    they were measured.
    """
    asked = Counter(trial.arm for trial in searching(log))
    found = Counter(trial.arm for trial in searching(log) if trial.was_best)
    each = ", ".join(f"{arm} {count} ({found[arm]})" for arm, count in asked.most_common() if arm != DEFAULT_ARM)
    if each:
        yield f"Settings proposed by each, and how many of them were the best so far: {each}."


def searching(log: TrialLog) -> list[Measurement]:
    """Return the trials of settings that arms (search methods) proposed, one per arm and setting. If the log does not
    say which measurements are such trials, use all measurements.
    """
    trials = [trial for trial in log.measurements if trial.purpose == Purpose.TRIAL.value] or log.measurements
    first: dict[tuple[str, Knobs], Measurement] = {}
    for trial in trials:
        before = first.setdefault((trial.arm, trial.knobs), trial)
        if trial.was_best and not before.was_best:
            first[trial.arm, trial.knobs] = trial
    return list(first.values())


PLANNERS = {planner.name for planner in OUR_PLANNERS}


def trust(log: TrialLog) -> Iterator[str]:
    """Yield the HTML of a plot with a row for each arm (search method).

    The row shows the settings that the arm proposed, and its credit over time. An arm with more credit gets more
    trials.
    """
    told = [trial for trial in log.measurements if trial.credits]
    if not told:
        return
    yield heading("Which arm was trusted when")
    yield paragraph(
        "A row is as strong in colour as the arm's credit: full after it has found a new best (large dot), fading with "
        "each trial that was none (small dot). More credit gets more trials; arms without any take turns. Where a row "
        "is empty, planners were not asked: trials had not borne their model out."
    )
    if not any(credit for trial in told for credit in trial.credits.values()):
        yield paragraph("None has found a setting that is clearly better than all before, so all have had equal turns.")
    tried = [trial for trial in searching(log) if trial.succeeded]
    proposing = {trial.arm for trial in tried}
    # Leave out arms that proposed nothing and had no credit, because their rows would be empty.
    arms = [
        arm
        for arm in dict.fromkeys(arm for trial in told for arm in trial.credits)
        if arm in proposing or any(trial.credits.get(arm) for trial in told)
    ]
    if not arms:
        return
    credits = [
        [None if trial.believed is False and arm in PLANNERS else trial.credits.get(arm) for trial in told]
        for arm in arms
    ]
    rows = {
        "type": "heatmap",
        "name": "",
        "x": [*(trial.iteration for trial in told), max(log.last_iteration, told[-1].iteration + 1)],
        "y": list(range(len(arms))),
        "z": credits,
        "zmin": 0.0,
        "zmax": 1.0,
        "colorscale": [[0.0, "rgba(0,114,178,0.08)"], [1.0, "rgba(0,114,178,1)"]],
        "colorbar": {"title": {"text": "credit"}},
        "ygap": 3,
        "hoverongaps": False,
        "hovertemplate": "credit %{z:.2g}",
    }
    shown = [trial for trial in tried if trial.arm in arms]
    marks = [(trial.iteration, arms.index(trial.arm), _measured(trial)) for trial in shown]
    sizes = [_size(trial) for trial in shown]
    trials = [dots("trials", marks, BOUND_COLOR, marker={"size": sizes}, showlegend=False)] if marks else []
    ticks = {"tickvals": list(range(len(arms))), "ticktext": [str(escape(arm)) for arm in arms]}
    yield plot(
        [rows, *trials],
        x="training iteration",
        height=110 + 24 * len(arms),
        yaxis={**ticks, "autorange": "reversed"},
    )


def _measured(trial: Measurement) -> str:
    return f"{in_ms(trial.span_s)}: {trial.arm}, {trial.knobs.describe()}"


def _size(trial: Measurement) -> int:
    """Return the diameter in pixels of a trial's dot in a plot. It is larger if the setting was the best so far."""
    return 11 if trial.was_best else 7


def predictions(log: TrialLog, colors: Mapping[str, str]) -> Iterator[str]:
    """Yield the HTML of a plot of predicted against measured communication times."""
    predicted = [
        (trial, trial.predicted_s) for trial in log.measurements if trial.succeeded and trial.predicted_s is not None
    ]
    if not predicted:
        return
    yield heading("Predicted and measured")
    words = "A dot on the line was predicted exactly; what counts is the order, on which planners rely."
    yield paragraph(" ".join([words, *in_order(log)]))
    times_ms = [1e3 * seconds for trial, predicted_s in predicted for seconds in (trial.span_s, predicted_s)]
    ends = [min(times_ms), max(times_ms)]
    points: dict[str, list[tuple[float, float, str]]] = {}
    for trial, seconds in predicted:
        words = f"predicted {in_ms(seconds)}, measured {_measured(trial)}"
        points.setdefault(trial.arm, []).append((1e3 * seconds, 1e3 * trial.span_s, words))
    half = {"opacity": 0.6}  # Dots are transparent, so that a dot under another one is seen.
    yield plot(
        [
            line("predicted exactly", ends, ends, DEFAULT_COLOR, dash="dash"),
            *(dots(arm, mine, colors[arm], marker=half) for arm, mine in points.items()),
        ],
        x="predicted, ms (log)",
        y="measured, ms (log)",
        xaxis=LOG,
        yaxis=LOG,
        height=420,
    )


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
HOW_TO_READ = Markup(
    "<i>Touched</i> are the rows that any rank has in an iteration. <i>Popular rows</i> are the hot ones where they "
    "travel dense, else those before the knee of the curve below, with their part of all touches. MB are what a rank "
    "receives in an iteration, computed from the rows that were touched, not counted on the wire; the fastest way need "
    "not be the one with the fewest. <i>If dense</i> is an all-reduce of the whole gradient, <i>Horovod's rule</i> two "
    "all-gathers of what the backward pass leaves, in which nothing was added up before."
)


def rows_in_words(log: TrialLog) -> Iterator[str]:
    """Describe how many bytes ranks receive for sparse gradients, compared with dense gradients, in total and for each
    parameter.
    """
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
    """Yield the HTML of a table of the parameters with sparse gradients, and of a plot of how unevenly their rows are
    used.
    """
    told = list(log.sparse.values())
    if not told:
        return
    colors = dict(zip(log.sparse, cycle(COLORS), strict=False))
    yield heading("Sparse gradients")
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
    yield paragraph(HOW_TO_READ)
    if curved := [summary for summary in told if len(summary.curve) > 1]:
        yield _curves(curved, colors)


def _way(way: SparseAlternative) -> str:
    time = "" if way.measured_s is None else f" {in_ms(way.measured_s)},"
    predicted = "" if way.predicted_s is None else f" (predicted {in_ms(way.predicted_s)})"
    return f"{way.plan}{time} {_mb(way.n_bytes)}{predicted}"


def _curves(told: Sequence[SparseSummary], colors: Mapping[str, str]) -> Markup:
    traces = []
    for one in told:
        rows, parts = zip(*one.curve, strict=True)
        traces.append(line(one.name, rows, [100 * part for part in parts], colors[one.name]))
        if one.popular_rows:
            words = f"{one.name}: {one.popular_rows} rows are {one.popular_share:.0%} of touches"
            point = (one.popular_rows, 100 * one.popular_share, words)
            traces.append(dots(one.name, [point], colors[one.name], showlegend=False))
    x, y = "most touched rows (log)", "of all touches, %"
    return plot(traces, x=x, y=y, height=280, xaxis=LOG, showlegend=True)


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / MB:.3g}"


def _saved(n_bytes: float, other: float) -> str:
    return f" ({other / n_bytes:.2g} times as much)" if n_bytes > 0 else ""


TITLES = ("communication", "predicted", "setting", "proposed by", "iteration")
WHO = Markup(
    "<i>default</i> is what runs untuned, <i>registry</i> what earlier jobs have left. "
    f"{', '.join(f'<i>{planner.name}</i>' for planner in OUR_PLANNERS)} are planners, which compute a setting "
    "from a model of the job. All others are search techniques. Together they are called arms."
)
NOTHING_DENSE = "No settings were tried: this optimizer's gradients are all sparse."

BEST_COLOR, BOUND_COLOR, COMPUTE_COLOR = "#d62728", "#999999", "#c8ccd0"


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki report` to the parser."""
    parser.add_argument(
        "log",
        type=Path,
        metavar="DIR_OR_LOG",
        help="folder of `sirtaki profile`, or trial log of a tuned job (the file in SIRTAKI_TRIAL_LOG)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="HTML page to write (default: DIR/report.html, or LOG with .html)",
    )
    add_formats(parser)


def main(options: Namespace) -> int:
    """Write the HTML page about a recording or a trial log, and print a summary and the path of the page."""
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
    """Read a trial log (the settings that tuning tried, with their times), and write the HTML page about it.

    Returns:
        The content of the log.

    Raises:
        ConfigError: the log cannot be read or is not a log of trials, or the page cannot be written.
    """
    log = read_log(log_path)
    write_file(html_path, render(log), "the report")
    return log


def render(log: TrialLog) -> str:
    """Return the HTML page about a trial log (the settings that tuning tried, with their times).

    Raises:
        ConfigError: the package Plotly is not installed.
    """
    if not log.measurements:
        return page("Tuning report", [paragraph(NOTHING_DENSE), *sparse(log)])
    arms = dict.fromkeys(trial.arm for trial in log.measurements if trial.arm != DEFAULT_ARM)
    colors = {DEFAULT_ARM: DEFAULT_COLOR, **dict(zip(arms, cycle(COLORS), strict=False))}
    settings = [(*cells[:3], swatch(colors[cells[3]], cells[3]), cells[4]) for cells in _cells(log, most=10)]
    return page(
        "Tuning report",
        [
            paragraph(" ".join(summary(log))),
            paragraph(in_words(log.outcome.knobs)),
            paragraph(TIMES),
            heading("Trials"),
            _trials_plot(log, colors),
            heading("Who proposed what ran"),
            paragraph(WHO),
            _shares_plot(log, colors),
            *trust(log),
            *predictions(log, colors),
            heading("Fastest settings"),
            *map(paragraph, why_not_the_fastest(log)),
            table(TITLES, settings, text=(2, 3)),
            *sparse(log),
            *_timelines(log),
        ],
    )


TIMES = Markup(
    "Times are <i>communication times</i>: from the first gradient that is ready to the last one that is reduced. The "
    "backward pass runs in the same time."
)


def _trials_plot(log: TrialLog, colors: Mapping[str, str]) -> Markup:
    measured = [trial for trial in log.measurements if trial.succeeded]
    last = log.last_iteration
    # Draw only trials that the tuner judged to be the best so far: other short measurements may be luck.
    best = [measured[0], *(trial for trial in measured[1:] if trial.was_best)]
    steps_ms = [1e3 * trial.span_s for trial in (*best, best[-1])]
    traces = [line("best so far", [*(trial.iteration for trial in best), last], steps_ms, BEST_COLOR, shape="hv")]
    default_s = None if log.default is None else log.default.span_s
    for name, level_s, color, dash in (
        ("untuned", default_s, DEFAULT_COLOR, "dash"),
        ("bound", log.bound_s, BOUND_COLOR, "dot"),
    ):
        if level_s is not None:
            traces.append(line(name, [0, last], [1e3 * level_s] * 2, color, dash=dash))
    highest_ms = 1e3 * max(trial.span_s for trial in measured)
    for arm, color in colors.items():
        mine = [trial for trial in log.measurements if trial.arm == arm]
        points = [
            (trial.iteration, 1e3 * trial.span_s, _measured(trial))
            if trial.succeeded
            else (trial.iteration, highest_ms, f"failed: {arm}, {trial.knobs.describe()}")
            for trial in mine
        ]
        if points:
            symbols = ["circle" if trial.succeeded else "x-thin-open" for trial in mine]
            traces.append(dots(arm, points, color, marker={"symbol": symbols, "size": [*map(_size, mine)]}))
    return plot(traces, x="training iteration", y="communication time, ms (log)", height=420, yaxis=LOG)


def _shares_plot(log: TrialLog, colors: Mapping[str, str]) -> Markup:
    trials = searching(log)
    ends = [*(trial.iteration for trial in trials), log.last_iteration]
    shares = []
    for arm, color in colors.items():
        counts = list(accumulate(int(trial.arm == arm) for trial in trials))
        if not counts[-1]:
            continue
        area = line(arm, ends, [*counts, counts[-1]], color, shape="hv", width=0)
        words = [f"{arm}: {count} of {total}" for total, count in enumerate(counts, start=1)]
        more = {"stackgroup": "share", "groupnorm": "percent", "fillcolor": color}
        shares.append({**area, **more, "hovertext": [*words, words[-1]]})
    return plot(shares, x="training iteration", y="share, %", height=280, showlegend=True)


def _cells(log: TrialLog, most: int) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of a table of the fastest settings, at most `most` of them. The columns are those of `TITLES`."""
    shown = fastest(log)[:most]
    told = ["" if trial.predicted_s is None else in_ms(trial.predicted_s) for trial in shown]
    return [
        (in_ms(trial.span_s), predicted, trial.knobs.describe(), trial.arm, str(trial.iteration))
        for trial, predicted in zip(shown, told, strict=True)
    ]


def _settings(log: TrialLog) -> list[dict[str, Any]]:
    """Return a row for `--json` and `--csv` for each setting that was measured, the fastest first."""
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
    """Yield the HTML of simulated timelines of one iteration: with the default setting, and with the tuned setting.

    Yield nothing if the log contains no cost model of communication.
    """
    shown = {"kept": log.outcome.knobs}
    if log.default is not None:
        default = log.default.knobs
        kept_default = default == log.outcome.knobs
        shown = {"untuned default, kept": default} if kept_default else {"untuned default": default, **shown}
    model = log.model
    if model is None:
        return
    yield heading("One iteration, simulated from the profile")
    unknown = [k for k in shown.values() if k.route not in model.links]
    if unknown:
        words = f"No timeline: that job's probes did not show what {unknown[0].describe()} would cost."
        yield paragraph(words)
        return
    simulators = {name: model.simulator(knobs.route) for name, knobs in shown.items()}
    end_ms = max(1e3 * simulators[name].run_knobs(knobs).end_s for name, knobs in shown.items())
    for name, knobs in shown.items():
        yield paragraph(f"{name}: {knobs.describe()}, {in_ms(simulators[name].run_knobs(knobs).span_s)}")
        yield _timeline_plot(simulators[name], knobs, end_ms=end_ms)


def _timeline_plot(simulator: Simulator, knobs: Knobs, *, end_ms: float) -> Markup:
    plan = knobs.to_plan(simulator.layout)
    timeline = simulator.run(plan)
    boxes = [("compute", 0.0, 1e3 * timeline.compute_end_s, COMPUTE_COLOR, "backward pass")]
    for index, unit in enumerate(plan.units):
        begin_ms, end_of_unit_ms = 1e3 * timeline.start_s[index], 1e3 * timeline.stop_s[index]
        n_bytes = unit.numel * simulator.layout.itemsize_bytes
        words = f"unit {index}: {n_bytes} bytes, {begin_ms:.2f} to {end_of_unit_ms:.2f} ms"
        color = COLORS[0] if index % 2 else COLORS[5]
        boxes.append((f"stream {unit.stream}", begin_ms, end_of_unit_ms - begin_ms, color, words))
    rows, begins, lengths, shades, texts = zip(*boxes, strict=True)
    bars = {"type": "bar", "orientation": "h", "base": begins, "x": lengths, "y": rows, "hovertext": texts}
    return plot(
        [{**bars, "marker": {"color": shades}}],
        x="ms",
        height=110 + 24 * len(set(rows)),
        barmode="overlay",
        xaxis={"range": [0, 1.01 * end_ms]},
        # Label every row, and order rows by stream number. Plotly would order them by the launch of their units
        # (buckets).
        yaxis={
            "type": "category",
            "autorange": "reversed",
            "dtick": 1,
            "ticksuffix": " ",
            "categoryarray": ["compute", *(f"stream {number}" for number in range(plan.streams))],
        },
    )
