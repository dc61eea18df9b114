"""`sirtaki report`: a recording or a log of trials as a page.

Turns a log of trials into a few lines on the terminal and one self-contained page: what was tried, by whom, what it
gained, what had been predicted, what was chosen.

No scripts, no files beside the page; plots are inline SVG. The page of a recording is `job_page`'s.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path

from sirtaki.autotune.arms.planners import OUR_PLANNERS
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.assignment import DEFAULT_ARM
from sirtaki.autotune.model.simulator import Simulator
from sirtaki.engine.trial_log_reader import Measurement, TrialLog, read_log
from sirtaki.errors import ConfigError
from sirtaki.profiler.folder import REPORT_FILE

from .report_sparse import rows_in_words, sparse
from .report_trust import predictions, trust
from .report_words import fastest, in_order, in_words, ms, searching, summary, who_was_trusted, why_not_the_fastest
from .svg import COLORS, DEFAULT_COLOR, WIDTH, Plot, framed, legend, log_ms, log_ms_ticks, page, swatch

TITLES = ("time", "predicted", "setting", "proposed by", "iteration")
WHO = (
    "<i>default</i> is what runs untuned, <i>registry</i> what earlier jobs have left. "
    f"{', '.join(f'<i>{planner.name}</i>' for planner in OUR_PLANNERS)} are planners, which compute a setting "
    "from a model of the job. All others are search techniques. Together they are called arms."
)
NOTHING_DENSE = "No settings were tried: this optimizer's gradients are all sparse."

BEST_COLOR, BOUND_COLOR, COMPUTE_COLOR = "#d62728", "currentColor", "#c8ccd0"


def configure(parser: ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "log",
        type=Path,
        metavar="DIR_OR_LOG",
        help="what `sirtaki profile` has recorded, or what a job wrote to SIRTAKI_TRIAL_LOG",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page (default: DIR/report.html, or LOG with .html)"
    )


def main(options: Namespace) -> int:
    """Writes the page and says where."""
    if options.log.is_dir():
        return _report_recording(options.log, options.output or options.log / REPORT_FILE)
    path: Path = options.output or options.log.with_suffix(".html")
    try:
        log = write_report(options.log, path)
    except OSError as err:
        raise ConfigError(f"the report cannot be written: {err}") from err
    _print(log)
    print(f"wrote {path}")
    return 0


def _report_recording(folder: Path, path: Path) -> int:
    from .job_page.findings import findings
    from .job_page.page import render
    from .job_page.sentences import heading, problems, sentences

    found = findings(folder)
    try:
        path.write_text(render(found), encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"the report cannot be written: {err}") from err
    for words in (heading(found), *problems(found), *sentences(found)):
        print(words)
    print(f"wrote {path}")
    return 0


def write_report(log_path: Path, html_path: Path) -> TrialLog:
    """Reads a log and writes the page.

    Returns:
        The log.

    Raises:
        ConfigError: the log cannot be read or is no log of trials.
        OSError: the page cannot be written.
    """
    log = read_log(log_path)
    html_path.write_text(render(log), encoding="utf-8")
    return log


def render(log: TrialLog) -> str:
    """The page."""
    if not log.measurements:
        return page("Tuning report", [f"<p>{NOTHING_DENSE}</p>", *sparse(log)])
    arms = dict.fromkeys(trial.arm for trial in log.measurements if trial.arm != DEFAULT_ARM)
    colors = {DEFAULT_ARM: DEFAULT_COLOR, **dict(zip(arms, cycle(COLORS), strict=False))}
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
            *(f"<p>{escape(words)}</p>" for words in why_not_the_fastest(log)),
            framed(_table(log, colors)),
            *sparse(log),
            *_timelines(log),
        ],
    )


def _summary(log: TrialLog) -> str:
    return (
        f"<p>{escape(' '.join(summary(log)))}</p>\n<p>{escape(in_words(log.outcome.knobs))}</p>\n"
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
            title = f"{ms(trial.span_s)}: {title}"
            color = colors[trial.arm]
            plot.dot(trial.iteration, log_ms(trial.span_s), color=color, title=title, large=trial.was_best)
        else:
            plot.cross(trial.iteration, color=colors[trial.arm], title=f"failed: {title}")
    return plot.render(y_ticks=log_ms_ticks(low - 0.05, high + 0.05))


def _best_so_far(measured: Sequence[Measurement]) -> Iterator[tuple[float, float]]:
    """Iteration and logarithm of the span of each new best; the session's word counts, not luck."""
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


def _table(log: TrialLog, colors: Mapping[str, str], *, rows: int = 10) -> str:
    cells = "".join(
        f'<tr><td class="number">{ms(trial.span_s)}</td><td class="number">{_predicted(trial)}</td>'
        f"<td>{escape(trial.knobs.describe())}</td><td>{swatch(colors[trial.arm])}{escape(trial.arm)}</td>"
        f'<td class="number">{trial.iteration}</td></tr>'
        for trial in fastest(log)[:rows]
    )
    titles = "".join(f"<th>{title}</th>" for title in TITLES)
    return f"<table><tr>{titles}</tr>{cells}</table>"


def _print(log: TrialLog, *, rows: int = 5) -> None:
    """The page in a few lines, for the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=100)
    said: list[str | Table] = [NOTHING_DENSE]
    if log.measurements:
        table = Table(*TITLES, box=None, pad_edge=False)
        for trial in fastest(log)[:rows]:
            cells = (ms(trial.span_s), _predicted(trial), trial.knobs.describe(), trial.arm, str(trial.iteration))
            table.add_row(*map(Text, cells))  # as text: names from elsewhere may look like markup
        said = [*summary(log), "", table, "", *why_not_the_fastest(log), *in_order(log), *who_was_trusted(log)]
    for words in (*said, *rows_in_words(log)):
        console.print(words, markup=False, highlight=False) if isinstance(words, str) else console.print(words)


def _predicted(trial: Measurement) -> str:
    return "" if trial.predicted_s is None else ms(trial.predicted_s)


def _timelines(log: TrialLog) -> Iterator[str]:
    """Default and winner as the simulator sees them, where the log has the job's model of their routes."""
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
        f"<div><p>{name}: {escape(knobs.describe())}, {ms(simulators[name].run_knobs(knobs).span_s)}</p>"
        f"{_timeline_plot(simulators[name], knobs, end_ms=end_ms)}</div>"
        for name, knobs in shown.items()
    )
    yield f'<div class="pair">{"".join(plots)}</div>'


def _timeline_plot(simulator: Simulator, knobs: Knobs, *, end_ms: float) -> str:
    plan = knobs.to_plan(simulator.layout)
    timeline = simulator.run(plan)
    rows = plan.streams + 1
    plot = Plot(x=(0, end_ms), y=(0, rows), x_label="ms", y_label="", height=60 + 22 * rows, width=WIDTH // 2)
    plot.box((0, 1e3 * timeline.compute_end_s), (rows - 0.9, rows - 0.1), color=COMPUTE_COLOR, title="backward pass")
    itemsize = simulator.layout.itemsize_bytes
    for index, unit in enumerate(plan.units):
        start_ms, stop_ms = 1e3 * timeline.start_s[index], 1e3 * timeline.stop_s[index]
        row = rows - 2 - unit.stream
        title = f"unit {index}: {unit.numel * itemsize} bytes, {start_ms:.2f} to {stop_ms:.2f} ms"
        color = COLORS[0] if index % 2 else COLORS[5]
        plot.box((start_ms, stop_ms), (row + 0.1, row + 0.9), color=color, title=title)
    ticks = [(rows - 0.5, "compute"), *((rows - 1.5 - s, f"stream {s}") for s in range(plan.streams))]
    return plot.render(y_ticks=ticks)
