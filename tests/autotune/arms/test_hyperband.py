"""Settings start with one iteration; the better ones are promoted to more, the others dropped."""

import logging

import numpy as np
import pytest
from conformance.arm import WIDE, span_of, trial_of

from sirtaki.autotune.arms.techniques import HyperbandArm
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.trial import Trial, TrialStatus


def hyperband(seed: int = 0, max_iterations: int = 4) -> HyperbandArm:
    return HyperbandArm(WIDE, rng=np.random.default_rng(seed), max_iterations=max_iterations)


def course(arm: HyperbandArm, turns: int) -> dict[Knobs, list[int]]:
    """The iterations asked for, setting by setting."""
    asked: dict[Knobs, list[int]] = {}
    for _ in range(turns):
        (proposal,) = arm.ask()
        assert proposal.iterations is not None
        asked.setdefault(proposal.knobs, []).append(proposal.iterations)
        arm.tell([trial_of(proposal)])
    return asked


def test_iterations_double_from_one_up_to_the_most() -> None:
    for resources in course(hyperband(max_iterations=5), 60).values():
        assert resources == [1, 2, 4, 5][: len(resources)]


def test_some_settings_end_early_and_the_promoted_are_the_better_ones() -> None:
    asked = course(hyperband(), 120)
    finished = [span_of(knobs) for knobs, resources in asked.items() if resources[-1] == 4]
    dropped = [span_of(knobs) for knobs, resources in asked.items() if resources[-1] < 4]
    assert len(dropped) >= 10
    assert np.median(finished) < np.median(dropped)


@pytest.mark.parametrize("status", [TrialStatus.PRUNED, TrialStatus.FAILED])
def test_a_setting_given_up_by_the_session_is_not_promoted(status: TrialStatus) -> None:
    arm = hyperband()
    (proposal,) = arm.ask()
    span_s = float("inf") if status is TrialStatus.FAILED else 1.0
    arm.tell([Trial(arm=arm.name, knobs=proposal.knobs, iterations=1, span_s=span_s, status=status)])
    assert arm.ask()[0].knobs != proposal.knobs


def test_a_setting_that_got_fewer_iterations_than_asked_still_waits() -> None:
    arm = hyperband()
    while (proposal := arm.ask()[0]).iterations == 1:
        arm.tell([trial_of(proposal)])
    assert proposal.iterations == 2
    arm.tell([Trial(arm=arm.name, knobs=proposal.knobs, iterations=1, span_s=0.1)])
    assert arm.ask()[0] == proposal


def test_building_it_says_nothing_and_leaves_optunas_logging_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    import optuna

    before = optuna.logging.get_verbosity()
    course(hyperband(), 5)
    assert optuna.logging.get_verbosity() == before == logging.INFO
    assert capfd.readouterr() == ("", "")
