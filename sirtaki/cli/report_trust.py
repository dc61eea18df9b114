"""The report's two pictures of trust: which arm had the bandit's, and whether the planners' model deserved it."""

from collections.abc import Iterator, Mapping
from html import escape

from sirtaki.autotune.arms.planners import OUR_PLANNERS
from sirtaki.engine.trial_log_reader import TrialLog

from .report_words import in_order, ms, searching
from .svg import DEFAULT_COLOR, Plot, framed, log_ms, log_ms_ticks

PLANNERS = {planner.name for planner in OUR_PLANNERS}
FAINTEST = 0.08
"""Opacity of an arm without credit."""


def trust(log: TrialLog, colors: Mapping[str, str]) -> Iterator[str]:
    """A row for each arm: its credit over time as the bandit wrote it down, and its trials."""
    told = [trial for trial in log.measurements if trial.credits]
    if not told:
        return
    yield (
        "<h2>Which arm was trusted when</h2>"
        "<p>A row is as strong in colour as the arm's credit: full after it has found a new best (large dot), fading "
        "with each trial that was none (small dot). More credit gets more trials; arms without any take turns. "
        "Where a row is empty, planners were not asked: trials had spoken against their model.</p>"
    )
    if not any(credit for trial in told for credit in trial.credits.values()):
        yield "<p>None has found a setting that is clearly better than all before, so all have had equal turns.</p>"
    arms = list(dict.fromkeys(arm for trial in told for arm in trial.credits))
    place = {arm: len(arms) - 1 - row for row, arm in enumerate(arms)}
    last = log.last_iteration
    plot = Plot(x=(0, last), y=(0, len(arms)), x_label="training iteration", y_label="", height=52 + 20 * len(arms))
    ends = [*(trial.iteration for trial in told[1:]), last]
    for trial, end in zip(told, ends, strict=True):
        for arm, credit in trial.credits.items():
            if trial.believed is False and arm in PLANNERS:
                continue
            plot.box(
                (trial.iteration, end),
                (place[arm] + 0.1, place[arm] + 0.9),
                color=colors.get(arm, DEFAULT_COLOR),
                title=f"{arm}: credit {credit:.2g}",
                opacity=FAINTEST + (1.0 - FAINTEST) * min(max(credit, 0.0), 1.0),
            )
    for trial in searching(log):
        if trial.arm in place and trial.succeeded:
            title = f"{ms(trial.span_s)}: {trial.arm}, {trial.knobs.describe()}"
            plot.dot(trial.iteration, place[trial.arm] + 0.5, color="currentColor", title=title, large=trial.was_best)
    yield framed(plot.render(y_ticks=[(place[arm] + 0.5, arm) for arm in arms]))


def predictions(log: TrialLog, colors: Mapping[str, str]) -> Iterator[str]:
    """What the planners' model had predicted against what was measured."""
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
        title = f"predicted {ms(predicted_s)}, measured {ms(trial.span_s)}: {trial.arm}, {trial.knobs.describe()}"
        plot.dot(log_ms(predicted_s), log_ms(trial.span_s), color=colors[trial.arm], title=title)
    ticks = log_ms_ticks(low, high)
    yield framed(plot.render(x_ticks=ticks, y_ticks=ticks))
