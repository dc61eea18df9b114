"""What the warm-up knows of training steps besides communication."""

import time

import pytest

from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.gradients.iteration import IterationReport
from sirtaki.engine.tuning.trial_log import StepTime, StepTimes

USUAL = StepTime(backward_s=0.02, between_s=0.03)


def test_a_step_is_what_lies_between_and_the_communication_time() -> None:
    assert USUAL.step_s(0.05) == pytest.approx(0.08)
    assert USUAL.exposed_s(0.05) == pytest.approx(0.03)
    assert USUAL.exposed_s(0.01) == 0.0


def test_a_cold_profile_keeps_its_shape_at_the_pace_of_warm_iterations() -> None:
    warm = USUAL.at_this_pace(Profile(ready_s=(0.0, 0.03, 0.06), compute_s=0.08, forward_s=0.5))
    assert warm.ready_s == pytest.approx((0.0, 0.0075, 0.015))
    assert (warm.compute_s, warm.forward_s) == (0.02, 0.03)


def test_a_profile_that_is_quicker_already_stays() -> None:
    quick = Profile(ready_s=(0.0, 0.01), compute_s=0.01, forward_s=0.01)
    assert USUAL.at_this_pace(quick) == quick


def test_only_scheduled_iterations_that_follow_on_another_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 11.0, 21.0, 22.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = StepTimes()
    times.note(IterationReport(span_s=0.5, backward_s=9.0, ready_s=(0.0,)))
    times.note(IterationReport(span_s=0.5, backward_s=9.0, ready_s=(0.0,)))
    assert times.usual is None
    assert times.cold_between_s == pytest.approx(9.5)
    times.note(IterationReport(span_s=0.75, backward_s=0.25))
    times.pause()  # the next one holds ten seconds of tuning
    times.note(IterationReport(span_s=0.75, backward_s=5.0))
    times.note(IterationReport(span_s=0.75, backward_s=0.25))
    assert times.usual == StepTime(backward_s=0.25, between_s=0.25)
