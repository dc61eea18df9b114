"""What the log says of a warm-up, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace
from sirtaki.autotune.meta.session import WarmupSession
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.tuning.coordinator import describe_change, describe_progress, describe_result
from sirtaki.engine.tuning.trial_log import StepTime

USUAL = StepTime(backward_s=0.04, between_s=0.1)
SPACE = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),), streams=(1, 2, 4))


def streams(count: int) -> Knobs:
    return Knobs(unit_bytes=32 * MIB, streams=count, transport=TransportKind.GLOO)


class TwoProposals:
    """Proposes two settings."""

    name = "two"

    def __init__(self) -> None:
        self._left = [streams(2), streams(4)]

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return [Proposal(arm=self.name, knobs=self._left.pop(0))] if self._left else []

    def tell(self, trials: Sequence[Trial]) -> None:
        pass


def session(*spans_s: float) -> WarmupSession:
    """After so many assignments: the default, then measurements of the first proposal."""
    job = WarmupSession(space=SPACE, default=streams(1), arm=TwoProposals(), rng=np.random.default_rng(0))
    for span_s in spans_s:
        job.record([span_s] * job.assignment.measured_iterations)
    return job


def test_before_the_default_is_measured_nothing_is_promised() -> None:
    assert describe_progress(session(), None) == (
        "warm-up, iteration 0 of at most 100: now measuring the default: gloo flat, 32 MiB units, 1 stream"
    )


def test_while_nothing_beats_the_default_that_is_said() -> None:
    assert describe_progress(session(0.2), USUAL) == (
        "warm-up, iteration 3 of at most 100, at most 29 s more: nothing gained on the default yet (300 ms); "
        "now trying: gloo flat, 32 MiB units, 2 streams"
    )


def test_the_gain_is_told_in_milliseconds_a_step() -> None:
    assert describe_progress(session(0.2, 0.15, 0.15), USUAL).startswith(
        "warm-up, iteration 6 of at most 100, at most 24 s more: 50 ms a step gained so far (300 ms → 250 ms); now"
    )


def test_without_the_times_of_steps_the_gain_is_told_all_the_same() -> None:
    assert describe_progress(session(0.2, 0.15, 0.15), None).startswith(
        "warm-up, iteration 6 of at most 100: 50 ms a step gained so far; now"
    )


def test_a_long_warm_up_is_told_in_minutes() -> None:
    slow = StepTime(backward_s=0.0, between_s=9.8)
    assert "at most 16 minutes more" in describe_progress(session(0.2), slow)


def test_the_result_says_what_steps_gain() -> None:
    said = describe_result(session(0.2, 0.15, 0.15).result, USUAL, "the search technique two")
    assert "steps take 250 ms instead of 300 (1.20× faster)" in said
    assert "takes 110 ms instead of 160" in said
    assert "2 streams, proposed by the search technique two" in said


def test_why_a_re_tune_begins_is_told_also_where_the_ratio_is_unknown() -> None:
    assert describe_change(2.34, 20).startswith("communication takes 2.3 times as long as when this setting was chosen")
    assert describe_change(math.nan, 20).startswith(
        "communication no longer takes as long as when this setting was chosen"
    )
