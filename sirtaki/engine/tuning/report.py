"""Make the log lines of tuning: progress, results, changes and compression losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sirtaki.autotune.knobs import Knobs, format_bytes
from sirtaki.autotune.meta.session import SessionResult, TuningSession, proof_iterations
from sirtaki.comm.compress import Cost
from sirtaki.comm.plan import GradientLayout
from sirtaki.engine.console import TuningProgress, at_most
from sirtaki.engine.settings import Settings
from sirtaki.measures import LinkModel, counted, faster, in_ms

from .trial_log import StepTime

WHOLE_STEPS = StepTime(backward_s=0.0, between_s=0.0)
"""Durations of step parts for searches that measure whole steps: nothing must be added to a measured time."""


def tuning_ahead(settings: Settings, *, discarded_iterations: int = 1) -> str:
    """Return a clause for a log line that announces tuning: what it does, in how many steps, and how to disable it."""
    budget = settings.warmup_iterations
    return (
        f"Sirtaki tries more settings in the first {counted(budget, 'step')}, and keeps one if at most "
        f"{proof_iterations(budget, discarded_iterations)} further steps prove that it is faster (SIRTAKI_TUNE=0 turns "
        "tuning off)"
    )


def describe_progress(session: TuningSession[Any], usual: StepTime | None) -> TuningProgress:
    """Describe the remaining time of a search, its best result, and the current setting.

    Args:
        session: the search in progress.
        usual: typical durations of the parts of a training step. None if unknown.
    """
    result, now = session.result, session.assignment
    default_s, best_s = result.default_span_s, result.best_span_s
    known = math.isfinite(default_s) and math.isfinite(best_s)
    left = seen = aside = ""
    if known and usual is not None:
        left = at_most((session.iterations_at_most - result.iterations_used) * usual.step_s(best_s))
    if known and not result.tuned:
        seen, aside = "so far no setting is faster than the default", _a_step(usual, default_s)
    elif known:
        seen = f"best so far, not yet proved: {in_ms(default_s - best_s)} less per step"
        aside = _a_step(usual, default_s, best_s)
    return TuningProgress(
        used=result.iterations_used,
        at_most=session.iterations_at_most,
        left=left,
        seen=seen,
        aside=aside,
        now=f"{now.purpose.description}: {now.knobs.describe()}",
    )


def _a_step(usual: StepTime | None, *spans_s: float) -> str:
    """Return a text in brackets for the log: the step times computed from communication times. "" if unknown.

    Args:
        usual: typical durations of the parts of a training step. None if unknown.
        spans_s: communication time with the default, and with the best setting if there is one, in seconds.
    """
    if usual is None:
        return ""
    return f" (step time {' → '.join(in_ms(usual.step_s(span_s)) for span_s in spans_s)})"


def describe_result(result: SessionResult, usual: StepTime | None, who: str) -> str:
    """Describe the result of a search that has measured communication times, in one line.

    Args:
        result: result of the search.
        usual: typical durations of the parts of a training step. None if unknown.
        who: name of the search method (arm) that proposed the kept setting.
    """
    found = f"{result.knobs.describe()}, proposed by {who}" if result.tuned else "the default stays"
    before_s, after_s, gain = result.default_span_s, result.best_span_s, result.gain
    times = ""
    if gain is not None:
        times = f"communication is {gain.describe()} ({in_ms(after_s)} instead of {in_ms(before_s)}); "
        if usual is not None:
            before, after = usual.step_s(before_s), usual.step_s(after_s)
            low, high = (before / usual.step_s(before_s / limit) for limit in (gain.low, gain.high))
            times += (
                f"steps take {in_ms(after)} instead of {in_ms(before)} ({faster(before, after)}, 95 % interval "
                f"{low:.2f} to {high:.2f}), and communication "
                f"that the backward pass does not hide {in_ms(usual.exposed_s(after_s))} "
                f"instead of {in_ms(usual.exposed_s(before_s))}; "
            )
    elif math.isfinite(before_s) and math.isfinite(after_s):
        # Without a proof, only the times of the running setting are stated, because their ratio may be noise.
        times = f"communication takes {in_ms(after_s)}"
        times += "; " if usual is None else f", a step {in_ms(usual.step_s(after_s))}; "
    unproved = "fastest measured, not yet proved: " if result.tuned and gain is None else ""
    return f"{_searched(result)}: {times}{unproved}{found} ({result.reason})"


DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES = 25 << 20, 1 << 20
"""Sizes of DDP's buckets: `bucket_cap_mb=25` and `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`."""


def describe_overhead(knobs: Knobs, layouts: Sequence[GradientLayout], link: LinkModel | None) -> str:
    """Describe how much longer than DDP's the communication of a step may take, in a clause.

    Args:
        knobs: the kept communication setting.
        layouts: layouts of the flat buffers.
        link: measured latency and bandwidth of the setting's route. None if unknown.
    """
    total_bytes = sum(layout.total_bytes for layout in layouts)
    ours = sum(len(knobs.but(cuts=None).to_plan(layout).units) for layout in layouts)
    ddps = 1 + math.ceil(max(0, total_bytes - DDP_FIRST_BUCKET_BYTES) / DDP_BUCKET_BYTES)
    most = "" if link is None else f", predicted to cost at most {in_ms(max(0, ours - ddps) * link.alpha_s)} per step"
    return f"{counted(ours, 'all-reduce')} per step instead of DDP's {ddps}{most}"


def _searched(result: SessionResult[Any]) -> str:
    steps, settings = counted(result.iterations_used, "step"), counted(result.n_trials, "setting")
    return f"tuned in {steps} with {settings}"


def describe_change(ratio: float, iterations: int) -> str:
    """Describe why the job is tuned again after a change of communication time, in one line.

    Args:
        ratio: communication time now, relative to the time before. NaN if unknown.
        iterations: maximum number of iterations of the search.
    """
    takes = "communication time has changed since"
    if math.isfinite(ratio) and ratio >= 1.0:
        takes = f"communication takes {ratio:.2g} times as long as when"
    elif math.isfinite(ratio):
        takes = f"communication is {1.0 / ratio:.2g} times as fast as when"
    return f"{takes} this setting was chosen: tuning again for at most {counted(iterations, 'step')}"


def describe_retune(result: SessionResult, *, default: Knobs, earlier: Sequence[Knobs], proposer: str) -> str:
    """Describe the result of a search that began because communication time had changed, in one line.

    Args:
        result: result of the search.
        default: the untuned setting.
        earlier: settings that earlier searches of this job chose.
        proposer: name of the search method (arm) that proposed the kept setting.
    """
    if not result.tuned:
        steps = counted(result.iterations_used, "step")
        return f"no faster setting found in {steps}: the setting stays ({result.reason})"
    whence = f"proposed by {proposer}"
    if result.knobs == default:
        whence = "the untuned default"
    elif result.knobs in earlier:
        whence = "used earlier in this job"
    gain = "" if result.gain is None else f"communication is {result.gain.describe()}, than with the setting that ran; "
    found = f"{gain}{result.knobs.describe()}, {whence}"
    return f"tuned again in {counted(result.iterations_used, 'step')}: {found} ({result.reason})"


def describe_lossy(knobs: Knobs, cost: Cost, iterations: int, whose: str) -> str:
    """Describe the bytes that the kept compressors save, and the precision that they lose, in one line.

    Args:
        knobs: the kept communication setting.
        cost: measured bytes, and losses of precision.
        iterations: number of iterations measured.
        whose: ranks whose gradients were measured.
    """
    left = math.sqrt(cost.residual_squares / cost.gradient_squares) if cost.gradient_squares else 0.0
    share = cost.sent_bytes / cost.whole_bytes if cost.whole_bytes else 1.0
    return (
        f"compressed as SIRTAKI_LOSSY allows, by {knobs.compressors}: {share:.2g} of the bytes; what is left to the "
        f"next step has {100.0 * left:.3g} % of the gradients' norm ({whose}, {iterations} iterations)"
    )


def describe_overlap(session: TuningSession[Any], tuned: Knobs) -> str:
    """Describe whether parameter updates are deferred into the next forward pass from now on, and why.

    Args:
        session: search that has measured iteration times with and without deferred updates, and has ended.
        tuned: communication setting (knobs) that runs without deferred updates.
    """
    result, knobs = session.result, session.result.knobs.knobs
    without = in_ms(result.default_span_s)
    if result.gain is None:
        best_s = min((trial.span_s for trial in session.trials if trial.knobs.is_deferred), default=math.inf)
        times = f"{without} an iteration without it" + (
            f", {in_ms(best_s)} with it at best" if best_s < math.inf else ""
        )
        return f"overlap_forward: not used, because {result.reason} ({times})"
    planned = knobs == tuned and knobs.cuts is not None
    cuts = "planned units" if planned else f"{format_bytes(knobs.unit_bytes)} units"
    times = f"{in_ms(result.best_span_s)} instead of {without}"
    streams = counted(knobs.streams, "stream")
    return f"overlap_forward: iterations are {result.gain.describe()}: {times}; {cuts} on {streams}"


def describe_steps(result: SessionResult[Any], setting: str) -> str:
    """Describe the result of a search that has measured step times, in one line.

    `setting` is the kept setting, as text.
    """
    found = "the default stays"
    if result.gain is not None:
        before, after = in_ms(result.default_span_s), in_ms(result.best_span_s)
        found = f"steps are {result.gain.describe()}: {after} instead of {before}"
    elif math.isfinite(result.default_span_s):
        found = f"steps take {in_ms(result.default_span_s)}; the default stays"
    return f"{_searched(result)}: {found}; {setting} ({result.reason})"
