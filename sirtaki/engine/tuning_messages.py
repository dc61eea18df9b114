"""What the log says of a warm-up: where it is, and what it has found."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.assignment import SessionResult
from sirtaki.autotune.meta.session import WarmupSession
from sirtaki.gain import faster, faster_than

from .step_times import StepTime


def describe_progress(session: WarmupSession, usual: StepTime | None) -> str:
    """How long the warm-up may still take, what it has gained, and what runs now, in one line.

    Args:
        session: of the warm-up.
        usual: what steps take besides, None = unknown.
    """
    result, now = session.result, session.assignment
    default_s, best_s = result.default_span_s, result.best_span_s
    known = math.isfinite(default_s) and math.isfinite(best_s)
    line = f"warm-up, iteration {result.iterations_used} of at most {session.iterations_at_most}"
    if known and usual is not None:
        left_s = (session.iterations_at_most - result.iterations_used) * usual.step_s(best_s)
        line += f", {_seconds(left_s)} more"
    gained = ""
    if known and not result.tuned:
        gained = f"nothing gained on the default yet{_a_step(usual, default_s)}; "
    elif known:
        gained = f"{1e3 * (default_s - best_s):.3g} ms a step gained so far{_a_step(usual, default_s, best_s)}; "
    return f"{line}: {gained}now {now.purpose.description}: {now.knobs.describe()}"


def _a_step(usual: StepTime | None, *spans_s: float) -> str:
    """What a step takes with the default, and with the best, in brackets; empty where that is unknown."""
    if usual is None:
        return ""
    return " (" + " → ".join(f"{1e3 * usual.step_s(span_s):.3g} ms" for span_s in spans_s) + ")"


def _seconds(at_most_s: float) -> str:
    if at_most_s < 1.0:
        return "less than 1 s"
    return f"at most {at_most_s:.0f} s" if at_most_s < 100.0 else f"at most {at_most_s / 60.0:.0f} minutes"


def describe_result(result: SessionResult, usual: StepTime | None, who: str) -> str:
    """What the warm-up has found, in one line.

    Args:
        result: of the session.
        usual: what steps take besides, None = unknown.
        who: has proposed what is kept.
    """
    found = f"{result.knobs.describe()}, proposed by {who}" if result.tuned else "the default stays"
    gain = ""
    if result.tuned and math.isfinite(result.default_span_s) and result.default_span_s > 0:
        before_s, after_s = result.default_span_s, result.best_span_s
        gain = f"communication {faster_than(before_s, after_s, other='with the default')}"
        if usual is not None:
            before, after = usual.step_s(before_s), usual.step_s(after_s)
            gain = (
                f"steps take {1e3 * after:.3g} ms instead of {1e3 * before:.3g} ({faster(before, after)}); "
                f"communication that the backward pass does not hide takes {1e3 * usual.exposed_s(after_s):.3g} ms "
                f"instead of {1e3 * usual.exposed_s(before_s):.3g}"
            )
        gain += "; "
    trials = f"{result.n_trials} setting{'s' if result.n_trials != 1 else ''}"
    return f"tuned in {result.iterations_used} iterations with {trials}: {gain}{found} ({result.reason})"


def describe_change(ratio: float, iterations: int) -> str:
    """Why a re-tune of at most so many iterations begins, in one line.

    Args:
        ratio: how many times as long communication takes as it did; not a number = unknown.
        iterations: that it may take.
    """
    takes = (
        f"communication takes {ratio:.2g} times as long as when"
        if math.isfinite(ratio)
        else "communication no longer takes as long as when"
    )
    return f"{takes} this setting was chosen: trying others for at most {iterations} iterations"


def describe_retune(result: SessionResult, *, default: Knobs, earlier: Sequence[Knobs], proposer: str) -> str:
    """What a re-tune has found, in one line.

    Args:
        result: of the session.
        default: what runs untuned.
        earlier: what was kept before in this job.
        proposer: who has proposed what is kept now.
    """
    if not result.tuned:
        return f"nothing better found in {result.iterations_used} iterations: the setting stays ({result.reason})"
    whence = f"proposed by {proposer}"
    if result.knobs == default:
        whence = "the untuned default"
    elif result.knobs in earlier:
        whence = "as earlier in this job"
    return (
        f"tuned again in {result.iterations_used} iterations: communication "
        f"{faster(result.default_span_s, result.best_span_s)} than with the setting that ran; "
        f"{result.knobs.describe()}, {whence} ({result.reason})"
    )
