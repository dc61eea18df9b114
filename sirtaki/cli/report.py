"""Turns a log of trials into one self-contained page: what was tried, by whom, what it gained, what was chosen.

No scripts, no files beside the page; plots are inline SVG.
"""

import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from statistics import median

from sirtaki.autotune.arms.planners import OUR_PLANNERS
from sirtaki.autotune.knobs import Knobs, format_bytes
from sirtaki.autotune.meta.assignment import DEFAULT_ARM, Purpose
from sirtaki.autotune.model.simulator import Simulator
from sirtaki.comm.plan import Algorithm
from sirtaki.engine.trial_log_reader import Measurement, Outcome, TrialLog, read_log
from sirtaki.errors import ConfigError
from sirtaki.gain import faster

from .svg import COLORS, DEFAULT_COLOR, WIDTH, Plot, framed, legend, page, swatch

FINALS = (Purpose.FINALS.value, "verify", "guard_winner", "guard_default")  # the latter in logs of older releases

WHO = (
    "<i>default</i> is what runs untuned, <i>registry</i> what earlier jobs have left. "
    f"{', '.join(f'<i>{planner.name}</i>' for planner in OUR_PLANNERS)} are planners, which compute a setting "
    "from a model of the job. All others are search techniques. Together they are called arms."
)

BEST_COLOR, BOUND_COLOR, COMPUTE_COLOR = "#d62728", "currentColor", "#c8ccd0"


def configure(parser: ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("log", type=Path, metavar="LOG", help="what a job wrote to SIRTAKI_TRIAL_LOG")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: LOG with .html)")


def main(options: Namespace) -> int:
    """Writes the page and says where."""
    path: Path = options.output or options.log.with_suffix(".html")
    try:
        write_report(options.log, path)
    except OSError as err:
        raise ConfigError(f"the report cannot be written: {err}") from err
    print(f"wrote {path}")
    return 0


def write_report(log_path: Path, html_path: Path) -> None:
    """Reads a log and writes the page.

    Raises:
        ConfigError: the log cannot be read or is no log of trials.
        OSError: the page cannot be written.
    """
    html_path.write_text(render(read_log(log_path)), encoding="utf-8")


def render(log: TrialLog) -> str:
    """The page."""
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
            framed(_shares_plot(log.measurements, colors)),
            *_credits(log.measurements, colors),
            "<h2>Fastest settings</h2>",
            *_why_not_the_fastest(log),
            framed(_table(log.measurements, colors)),
            *_timelines(log),
        ],
    )


def _summary(log: TrialLog) -> str:
    kept = log.outcome
    words = (
        f"{len(log.measurements)} measurements in {_last_iteration(log.measurements)} training iterations. Kept: "
        f"<b>{escape(kept.knobs.describe())}</b>, proposed by {escape(kept.arm)}. {_gain(kept)}"
    )
    words += _bound(log)
    reason = f" Why: {escape(kept.reason)}." if kept.reason else ""
    return (
        f"<p>{words}{reason}</p>\n<p>{escape(in_words(kept.knobs))}</p>\n<p>Times are <i>communication times</i>: from "
        "the first gradient that is ready to the last one that is reduced. The backward pass runs in the same time.</p>"
    )


def _bound(log: TrialLog) -> str:
    """What can be reached at all, in a sentence; empty where that is unknown."""
    if log.model is None or log.bound_s is None:
        return ""
    if log.bound_s < log.model.bound_s:
        return (
            f" The probes alone would have said that no plan can take less than {_ms(log.model.bound_s)}, but "
            f"gradients have travelled faster since, so the bound is drawn at the fastest setting, {_ms(log.bound_s)}."
        )
    return (
        f" No plan can take less than {_ms(log.bound_s)}: the backward pass from its first gradient on, or all bytes "
        "at the best rate that was measured."
    )


def _gain(kept: Outcome) -> str:
    """What tuning has brought, in a sentence."""
    if kept.default_span_s is None:
        return f"Communication takes {_ms(kept.span_s)}."
    before_s, after_s, usual = kept.default_span_s, kept.span_s, kept.usual
    words = f"Communication takes {_ms(after_s)}, {_ms(before_s)} by default (<b>{faster(before_s, after_s)}</b>)."
    if usual is not None:
        words += (
            f" A step takes {_ms(usual.step_s(after_s))}, {_ms(usual.step_s(before_s))} by default "
            f"(<b>{faster(usual.step_s(before_s), usual.step_s(after_s))}</b>); the backward pass does not hide "
            f"{_ms(usual.exposed_s(after_s))} of its communication, {_ms(usual.exposed_s(before_s))} by default."
        )
    return words


def in_words(knobs: Knobs) -> str:
    """What the knobs mean, for people who have not read about units and streams."""
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
    return f"Gradients travel {sizes}; {at_once}, over {knobs.transport.value.replace('_', ' ')}, {way}{threads}."


def _trials_plot(log: TrialLog, colors: Mapping[str, str]) -> str:
    measured = [trial for trial in log.measurements if trial.succeeded]
    bound_s = [] if log.bound_s is None else [log.bound_s]
    low, high = (_log_ms(edge([*bound_s, *(trial.span_s for trial in measured)])) for edge in (min, max))
    last = _last_iteration(log.measurements)
    plot = Plot(
        x=(0, last), y=(low - 0.05, high + 0.05), x_label="training iteration", y_label="communication time, ms (log)"
    )
    if log.default is not None:
        level = _log_ms(log.default.span_s)
        plot.line([(0, level), (last, level)], color=DEFAULT_COLOR, dashed=True)
    for level in map(_log_ms, bound_s):
        plot.line([(0, level), (last, level)], color=BOUND_COLOR, dashed=True)
    plot.steps(list(_best_so_far(measured)), color=BEST_COLOR)
    for trial in log.measurements:
        title = f"{trial.arm}, {trial.knobs.describe()}"
        if trial.succeeded:
            title = f"{_ms(trial.span_s)}: {title}"
            color = colors[trial.arm]
            plot.dot(trial.iteration, _log_ms(trial.span_s), color=color, title=title, large=trial.was_best)
        else:
            plot.cross(trial.iteration, color=colors[trial.arm], title=f"failed: {title}")
    ticks_ms = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in (1, 1.5, 2, 3, 5, 7)]
    return plot.render(
        y_ticks=[(math.log10(tick), f"{tick:g}") for tick in ticks_ms if low - 0.05 <= math.log10(tick) <= high + 0.05]
    )


def _best_so_far(measured: Sequence[Measurement]) -> Iterator[tuple[float, float]]:
    """Iteration and logarithm of the span of each new best; the session's word counts, not luck."""
    first = measured[0]
    yield first.iteration, _log_ms(first.span_s)
    for trial in measured[1:]:
        if trial.was_best:
            yield trial.iteration, _log_ms(trial.span_s)


def _searching(trials: Sequence[Measurement]) -> list[Measurement]:
    """Trials that arms proposed; without any such, all."""
    return [trial for trial in trials if trial.purpose == "trial"] or list(trials)


def _shares_plot(trials: Sequence[Measurement], colors: Mapping[str, str]) -> str:
    plot = Plot(
        x=(0, _last_iteration(trials)), y=(0, 100), x_label="training iteration", y_label="share, %", height=200
    )
    counts: Counter[str] = Counter()
    searching = _searching(trials)
    ends = [*(trial.iteration for trial in searching[1:]), _last_iteration(trials)]
    for total, (trial, end) in enumerate(zip(searching, ends, strict=True), start=1):
        counts[trial.arm] += 1
        below = 0.0
        for arm, color in colors.items():
            share = 100 * counts[arm] / total
            if share:
                title = f"{arm}: {counts[arm]} of {total}"
                plot.box((trial.iteration, end), (below, below + share), color=color, title=title)
            below += share
    return plot.render()


def _credits(trials: Sequence[Measurement], colors: Mapping[str, str]) -> Iterator[str]:
    """The bandit's own credit of each arm after each trial, as it wrote it down."""
    told = [trial for trial in trials if trial.credits]
    if not told:
        return
    title = "<h2>Credit of each arm</h2>"
    if not any(credit for trial in told for credit in trial.credits.values()):
        yield (
            title
            + "<p>None has found a setting that is clearly better than all before, so all have had equal turns.</p>"
        )
        return
    plot = Plot(x=(0, _last_iteration(trials)), y=(0, 1), x_label="training iteration", y_label="credit", height=200)
    for arm in told[-1].credits:
        points = [(trial.iteration, trial.credits.get(arm, 0.0)) for trial in told]
        plot.steps(points, color=colors.get(arm, DEFAULT_COLOR))
    yield title + "<p>It rises when one finds a new best, and fades; more credit gets more trials.</p>"
    yield framed(plot.render())


def _why_not_the_fastest(log: TrialLog) -> Iterator[str]:
    """Says so where the first row of the table is not what was kept."""
    succeeded = [trial for trial in log.measurements if trial.succeeded]
    if log.result is None or min(succeeded, key=lambda trial: trial.span_s).knobs == log.result.knobs:
        return
    compared: dict[Knobs, list[float]] = {}
    for trial in succeeded:
        if trial.purpose in FINALS:
            compared.setdefault(trial.knobs, []).append(trial.span_s)
    words = "The first row is not what was kept: of many measurements, one is short by luck."
    if compared:
        times = sorted((median(spans_s), knobs.describe()) for knobs, spans_s in compared.items())
        words += " Therefore the fastest settings and the default ran in turns at the end, and took: " + ", ".join(
            f"{escape(name)} {_ms(span_s)}" for span_s, name in times
        )
    yield f"<p>{words}.</p>" if compared else f"<p>{words}</p>"


def _table(trials: Sequence[Measurement], colors: Mapping[str, str], *, rows: int = 10) -> str:
    shortest = sorted((trial for trial in trials if trial.succeeded), key=lambda trial: trial.span_s)
    unique = list({trial.knobs: trial for trial in reversed(shortest)}.values())[::-1]
    cells = "".join(
        f'<tr><td class="number">{_ms(trial.span_s)}</td><td>{escape(trial.knobs.describe())}</td>'
        f"<td>{swatch(colors[trial.arm])}{escape(trial.arm)}</td>"
        f'<td class="number">{trial.iteration}</td></tr>'
        for trial in sorted(unique, key=lambda trial: trial.span_s)[:rows]
    )
    return f"<table><tr><th>Time</th><th>Setting</th><th>Proposed by</th><th>Iteration</th></tr>{cells}</table>"


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
    unknown = [k for k in shown.values() if (k.transport, k.algorithm) not in model.links]
    if unknown:
        yield f"<p>No timeline: that job's probes did not show what {escape(unknown[0].describe())} would cost.</p>"
        return
    simulators = {name: model.simulator((knobs.transport, knobs.algorithm)) for name, knobs in shown.items()}
    end_ms = max(1e3 * simulators[name].run_knobs(knobs).end_s for name, knobs in shown.items())
    plots = (
        f"<div><p>{name}: {escape(knobs.describe())}, {_ms(simulators[name].run_knobs(knobs).span_s)}</p>"
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


def _last_iteration(trials: Sequence[Measurement]) -> int:
    return max(trial.iteration for trial in trials)


def _log_ms(seconds: float) -> float:
    return math.log10(1e3 * seconds)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
