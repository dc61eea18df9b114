"""scikit-optimize's optimiser behind the arms' interface."""

import math

import numpy as np
from conformance.arm import WIDE, span_of, trial_of

from sirtaki.autotune.arms.techniques import N_INITIAL, ScikitOptimizeArm
from sirtaki.autotune.trial import Proposal, Trial, TrialStatus


def test_it_asks_for_what_nobody_has_measured_and_finds_what_is_fast() -> None:
    arm = ScikitOptimizeArm(WIDE, rng=np.random.default_rng(1))
    asked: list[Proposal] = []
    for _ in range(N_INITIAL + 4):
        asked += arm.ask()
        arm.tell([trial_of(asked[-1])])
    assert len({proposal.knobs for proposal in asked}) == len(asked)
    spans_s = [span_of(proposal.knobs) for proposal in asked]
    assert min(spans_s[N_INITIAL:]) < min(spans_s[:N_INITIAL])


def test_where_nothing_has_run_yet_it_asks_on() -> None:
    arm = ScikitOptimizeArm(WIDE, rng=np.random.default_rng(1))
    for _ in range(3):
        (proposal,) = arm.ask()
        arm.tell([Trial(arm=arm.name, knobs=proposal.knobs, iterations=1, span_s=math.inf, status=TrialStatus.FAILED)])
