"""The surrogate learns from every arm's trials, heads for the optimum, and says what is left to gain."""

import subprocess
import sys
import time

import numpy as np
import pytest
from conformance.arm import GPU, PLANNED, WIDE, converse, span_of, trial_of

from sirtaki.autotune.arms.bayesian import BayesianArm
from sirtaki.autotune.arms.techniques import GridArm
from sirtaki.autotune.knobs import KnobLattice, KnobSpace
from sirtaki.autotune.trial import Proposal


@pytest.fixture
def arm() -> BayesianArm:
    return BayesianArm(WIDE, rng=np.random.default_rng(0))


def optimum(space: KnobSpace) -> float:
    return min(map(span_of, KnobLattice(space).points))


def test_it_finds_the_best_of_hundreds_of_settings_in_a_few_dozen_trials(arm: BayesianArm) -> None:
    spans = [span_of(proposal.knobs) for proposal in converse(arm, 30)]
    assert len(KnobLattice(WIDE)) > 600
    assert min(spans) <= 1.03 * optimum(WIDE)


def test_it_starts_from_what_other_arms_have_measured(arm: BayesianArm) -> None:
    arm.tell([trial_of(proposal) for proposal in GridArm(WIDE).ask(25)])
    (first,) = arm.ask()
    assert "promises" in first.reason
    assert span_of(first.knobs) <= 1.5 * optimum(WIDE)


def test_it_proposes_nothing_that_is_known(arm: BayesianArm) -> None:
    proposals = converse(arm, 20)
    assert len({proposal.knobs for proposal in proposals}) == len(proposals)


def test_asking_twice_gives_the_same_answer(arm: BayesianArm) -> None:
    converse(arm, 8)
    assert arm.ask(3) == arm.ask(3)


def test_explicit_cuts_are_skipped(arm: BayesianArm) -> None:
    converse(arm, 8)
    before = arm.ask(3)
    arm.tell([trial_of(Proposal(arm="planner", knobs=PLANNED), 1e-6)])
    assert arm.ask(3) == before


def test_the_hope_for_more_shrinks_with_what_is_known() -> None:
    arm = BayesianArm(GPU, rng=np.random.default_rng(0))
    assert arm.expected_improvement() is None
    converse(arm, 8)
    early = arm.expected_improvement()
    converse(arm, 40)
    late = arm.expected_improvement()
    assert early is not None
    assert late is not None
    assert late < early
    assert late < 0.01


def test_a_proposal_is_ready_between_two_iterations(arm: BayesianArm) -> None:
    """Many trials, a wide space: its thread takes 30 ms here; the bound leaves room for slower machines."""
    *known, last = GridArm(WIDE).ask(100)
    arm.tell([trial_of(proposal) for proposal in known])
    arm.ask()
    arm.tell([trial_of(last)])
    begin = time.thread_time()
    arm.ask()
    assert time.thread_time() - begin < 0.4


def test_arms_that_no_one_has_asked_import_no_library_that_is_slow_to_load() -> None:
    program = """
import sys
import numpy as np
from conformance.arm import WIDE
from sirtaki.autotune.meta.bandit import default_arms
default_arms(space=WIDE, rng=np.random.default_rng(0)).ask()
print({"optuna", "scipy.optimize", "scipy.stats"} & set(sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd="tests")
    assert ended.stdout == "set()\n"


def test_it_believes_less_in_a_lucky_measurement_than_in_its_neighbours(arm: BayesianArm) -> None:
    lattice = KnobLattice(WIDE)
    rng = np.random.default_rng(0)
    around = [lattice.at((unit, streams, 0, 0)) for unit in range(4, 20) for streams in (2, 4)]
    lucky = around[14]
    for knobs in around:
        luck = 0.8 if knobs == lucky else float(np.exp(0.05 * rng.standard_normal()))
        arm.tell([trial_of(Proposal(arm="a", knobs=knobs), span_of(knobs) * luck)])
    believed = arm.expected_span_s(lucky)
    assert believed is not None
    assert believed > 0.85 * span_of(lucky)
    assert arm.expected_span_s(lattice.at((0, 0, 0, 0))) is None
