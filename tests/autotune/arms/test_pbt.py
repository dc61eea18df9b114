"""The population climbs, copies its better members and takes in others' good trials."""

from dataclasses import replace

import numpy as np
from conformance.arm import GPU, ONLY_STREAMS, WIDE, converse, span_of, trial_of

from sirtaki.autotune.arms.techniques import PBTArm
from sirtaki.autotune.knobs import KnobLattice
from sirtaki.autotune.trial import Proposal, Trial


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


def members_of(arm: PBTArm) -> dict[int, float]:
    """Number of streams and span of each member."""
    return {WIDE.streams[member.index[1]]: member.span_s for member in arm._members}


def with_members(spans_s: dict[int, float]) -> PBTArm:
    """A population of settings that differ in their streams."""
    arm = PBTArm(WIDE, rng=np.random.default_rng(0), population=len(spans_s))
    arm.tell([measured(streams, span_s, arm="somebody else") for streams, span_s in spans_s.items()])
    return arm


def measured(streams: int, span_s: float, *, arm: str) -> Trial:
    knobs = replace(KnobLattice(WIDE).points[0], streams=streams)
    return replace(trial_of(Proposal(arm=arm, knobs=knobs)), span_s=span_s)


def test_the_worst_member_moves_and_stays_where_it_has_got_to_even_if_that_is_worse() -> None:
    arm = with_members({1: 1.0, 2: 2.0, 4: 3.0})
    arm.tell([measured(8, 9.0, arm="pbt")])
    assert members_of(arm) == {1: 1.0, 2: 2.0, 8: 9.0}
    arm.tell([measured(16, 1.5, arm="pbt")])
    assert members_of(arm) == {1: 1.0, 16: 1.5, 2: 2.0}


def test_what_others_have_found_immigrates_only_if_it_is_better_than_the_worst() -> None:
    arm = with_members({1: 1.0, 2: 2.0, 4: 3.0})
    arm.tell([measured(8, 9.0, arm="grid")])
    assert members_of(arm) == {1: 1.0, 2: 2.0, 4: 3.0}
    arm.tell([measured(8, 2.5, arm="grid")])
    assert members_of(arm) == {1: 1.0, 2: 2.0, 8: 2.5}


def test_several_proposals_at_once_differ() -> None:
    arm = PBTArm(WIDE, rng=np.random.default_rng(0))
    proposals = arm.ask(12)
    assert len({proposal.knobs for proposal in proposals}) == 12
