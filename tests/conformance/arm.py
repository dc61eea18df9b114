"""Checks of the contract that every arm must meet. Each check gets a function that creates a fresh arm.

Use: `@pytest.mark.parametrize("check", ARM_CHECKS)` and call `check(make)`.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from rank_jobs import cases

from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace
from sirtaki.autotune.meta.bandit import opinion
from sirtaki.autotune.trial import Arm, Proposal, Trial, TrialStatus
from sirtaki.comm.plan import Algorithm, TransportKind

MakeArm = Callable[[KnobSpace, np.random.Generator], Arm]

ROUTES = (
    (TransportKind.GLOO, Algorithm.FLAT),
    (TransportKind.GLOO, Algorithm.HIERARCHICAL),
    (TransportKind.MPI, Algorithm.FLAT),
)
WIDE = KnobSpace(routes=ROUTES)
GPU = KnobSpace(
    routes=((TransportKind.NCCL, Algorithm.FLAT),),
    unit_bytes=(MIB, 64 * MIB),
    streams=(1, 2, 4),
    threads=(512, 1024, 2048),
)
FIXED = KnobSpace(routes=ROUTES[:1], unit_bytes=(4 * MIB, 4 * MIB), streams=(2,))
ONLY_STREAMS = KnobSpace(routes=ROUTES[:1], unit_bytes=(3 * MIB + 1, 3 * MIB + 1), streams=(1, 3, 5))
SPACES = (WIDE, GPU, FIXED, ONLY_STREAMS)

FOREIGN = Knobs(unit_bytes=25 * MIB, streams=1, transport=TransportKind.GLOO)
PLANNED = Knobs(
    unit_bytes=MIB, streams=2, transport=TransportKind.GLOO, cuts=(Cut(stop=10), Cut(stop=300, stream=1, threads=512))
)


def span_of(knobs: Knobs) -> float:
    """Return the time of a setting on a smooth landscape, whose optimum is in every space above."""
    octaves_off = math.log2(knobs.unit_bytes / (4 * MIB))
    streams_off = math.log2(knobs.streams / 3)
    routes = list(TransportKind).index(knobs.transport)
    return 0.01 * (1.0 + 0.1 * octaves_off**2 + 0.2 * streams_off**2 + 0.1 * routes)


def trial_of(proposal: Proposal, span_s: float | None = None, *, was_best: bool = False) -> Trial:
    span_s = span_of(proposal.knobs) if span_s is None else span_s
    status = TrialStatus.COMPLETE if math.isfinite(span_s) else TrialStatus.FAILED
    return Trial(
        arm=proposal.arm,
        knobs=proposal.knobs,
        iterations=proposal.iterations or 2,
        span_s=span_s,
        status=status,
        was_best=was_best,
    )


def converse(arm: Arm, turns: int) -> list[Proposal]:
    """Ask the arm and tell it results for some turns. Return its proposals."""
    proposals: list[Proposal] = []
    best = math.inf
    for _ in range(turns):
        asked = arm.ask()
        proposals.extend(asked)
        for proposal in asked:
            trial = trial_of(proposal, was_best=span_of(proposal.knobs) < best)
            best = min(best, trial.span_s)
            arm.tell([trial])
    return proposals


def _make(make: MakeArm, space: KnobSpace, seed: int = 0) -> Arm:
    return make(space, np.random.default_rng(seed))


def _assert_inside(proposals: Sequence[Proposal], space: KnobSpace) -> None:
    for proposal in proposals:
        assert proposal.knobs in space, f"{proposal.arm} proposed {proposal.knobs} outside {space}"


def proposals_lie_inside_the_space_and_respect_what_is_fixed(make: MakeArm) -> None:
    for space in SPACES:
        _assert_inside(converse(_make(make, space), 12), space)


def asking_twice_without_telling_stays_inside_the_space(make: MakeArm) -> None:
    for space in SPACES:
        arm = _make(make, space)
        for _ in range(3):
            _assert_inside(arm.ask(), space)
        converse(arm, 6)
        for _ in range(3):
            _assert_inside(arm.ask(), space)


def asking_for_several_gives_at_most_that_many(make: MakeArm) -> None:
    for space in SPACES:
        arm = _make(make, space)
        for n in (1, 3, 7):
            proposals = arm.ask(n)
            assert len(proposals) <= n
            _assert_inside(proposals, space)
        arm.tell([trial_of(proposal) for proposal in arm.ask(8)])
        assert len(arm.ask(5)) <= 5


def the_same_seed_gives_the_same_proposals(make: MakeArm) -> None:
    for space in SPACES:
        assert converse(_make(make, space, seed=3), 12) == converse(_make(make, space, seed=3), 12)


def trials_of_others_are_taken_in(make: MakeArm) -> None:
    arm = _make(make, WIDE)
    for knobs in (FOREIGN, PLANNED, FOREIGN):
        arm.tell([trial_of(Proposal(arm="somebody else", knobs=knobs), 0.02)])
        _assert_inside(arm.ask(), WIDE)
    outside = Knobs(unit_bytes=KIB, streams=999, transport=TransportKind.SHARED_MEMORY)
    arm.tell([trial_of(Proposal(arm="somebody else", knobs=outside), 0.001)])
    _assert_inside(converse(arm, 8), WIDE)


def failed_trials_are_taken_in(make: MakeArm) -> None:
    for space in SPACES:
        arm = _make(make, space)
        for _ in range(10):
            arm.tell([trial_of(proposal, math.inf) for proposal in arm.ask(2)])
        _assert_inside(converse(arm, 5), space)


def pruned_trials_are_taken_in(make: MakeArm) -> None:
    arm = _make(make, WIDE)
    for _ in range(6):
        for proposal in arm.ask():
            span_s = span_of(proposal.knobs)
            pruned = Trial(
                arm=proposal.arm, knobs=proposal.knobs, iterations=1, span_s=span_s, status=TrialStatus.PRUNED
            )
            arm.tell([pruned])
    _assert_inside(converse(arm, 5), WIDE)


def telling_nothing_is_harmless(make: MakeArm) -> None:
    arm = _make(make, WIDE)
    arm.tell([])
    _assert_inside(converse(arm, 4), WIDE)
    arm.tell([])


def the_same_trial_may_be_told_again(make: MakeArm) -> None:
    arm = _make(make, WIDE)
    for _ in range(6):
        for proposal in arm.ask():
            arm.tell([trial_of(proposal)])
            arm.tell([trial_of(proposal)])
    _assert_inside(arm.ask(), WIDE)


def the_name_is_stable(make: MakeArm) -> None:
    arm = _make(make, WIDE)
    name = arm.name
    assert isinstance(name, str)
    assert name
    converse(arm, 4)
    assert arm.name == name == _make(make, WIDE, seed=1).name


def what_is_left_to_gain_is_a_share_or_unknown(make: MakeArm) -> None:
    arm = _make(make, WIDE)
    for _ in range(12):
        expected = opinion(arm, "expected_improvement")
        assert expected is None or expected >= 0.0
        converse(arm, 1)


ARM_CHECKS = cases(globals(), "make")
