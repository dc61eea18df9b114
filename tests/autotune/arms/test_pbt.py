"""The population climbs, copies its better members and takes in others' good trials."""

import numpy as np
from conformance.arm import GPU, ONLY_STREAMS, WIDE, converse, span_of, trial_of

from sirtaki.autotune.arms.pbt import PBTArm
from sirtaki.autotune.lattice import KnobLattice
from sirtaki.autotune.trial import Proposal


def test_it_comes_close_to_the_optimum_in_most_runs() -> None:
    best = min(map(span_of, KnobLattice(GPU).points))
    found = []
    for seed in range(10):
        arm = PBTArm(GPU, rng=np.random.default_rng(seed))
        found.append(min(span_of(proposal.knobs) for proposal in converse(arm, 40)))
    assert np.median(found) <= 1.05 * best


def test_it_proposes_nothing_twice_and_ends_with_the_space() -> None:
    arm = PBTArm(ONLY_STREAMS, rng=np.random.default_rng(0))
    proposals = converse(arm, 10)
    assert {proposal.knobs.streams for proposal in proposals} == {1, 3, 5}
    assert len(proposals) == 3
    assert arm.ask() == []


def test_the_children_of_good_immigrants_are_better_than_random() -> None:
    good = sorted(KnobLattice(WIDE).points, key=span_of)[:6]
    arm = PBTArm(WIDE, rng=np.random.default_rng(0))
    arm.tell([trial_of(Proposal(arm="somebody else", knobs=knobs)) for knobs in good])
    children = [span_of(proposal.knobs) for proposal in arm.ask(20)]
    everybody = [span_of(knobs) for knobs in KnobLattice(WIDE).points]
    assert np.median(children) < np.quantile(everybody, 0.25)


def test_several_proposals_at_once_differ() -> None:
    arm = PBTArm(WIDE, rng=np.random.default_rng(0))
    proposals = arm.ask(12)
    assert len({proposal.knobs for proposal in proposals}) == 12
