"""The bandit as an arm: who is asked, who is told, who is credited, and what a faulty arm can do."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.meta.bandit import BanditArm
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.plan import TransportKind


def knobs(streams: int) -> Knobs:
    return Knobs(unit_bytes=MIB, streams=streams, transport=TransportKind.GLOO)


class ListArm:
    """Proposes the given stream counts in turn and remembers what it was told."""

    def __init__(self, name: str, streams: Sequence[int], *, expected: float | None = None) -> None:
        self.name = name
        self.left = list(streams)
        self.told: list[Trial] = []
        self._expected = expected

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return [Proposal(arm=self.name, knobs=knobs(streams)) for streams in self.left[:n]]

    def tell(self, trials: Sequence[Trial]) -> None:
        self.told.extend(trials)
        self.left = [streams for streams in self.left if all(trial.knobs.streams != streams for trial in trials)]

    def expected_improvement(self) -> float | None:
        return self._expected

    def expected_span_s(self, knobs: Knobs) -> float | None:
        return None if self._expected is None else self._expected * knobs.streams


class FaultyArm(ListArm):
    """Raises in the method named."""

    def __init__(self, name: str, fault: str) -> None:
        super().__init__(name, range(1, 9))
        self._fault = fault

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        if self._fault == "ask":
            raise ZeroDivisionError(self.name)
        return super().ask(n)

    def tell(self, trials: Sequence[Trial]) -> None:
        if self._fault == "tell":
            raise ZeroDivisionError(self.name)
        super().tell(trials)

    def expected_improvement(self) -> float | None:
        if self._fault == "expected_improvement":
            raise ZeroDivisionError(self.name)
        return None


def trial(arm: str, streams: int, *, was_best: bool = False) -> Trial:
    return Trial(arm=arm, knobs=knobs(streams), iterations=2, span_s=1.0 / streams, was_best=was_best)


def bandit(*arms: ListArm, seed: int = 0) -> BanditArm:
    return BanditArm(arms, rng=np.random.default_rng(seed), window=12)


def test_every_arm_is_told_every_trial_whoever_asked() -> None:
    arms = ListArm("a", [1]), ListArm("b", [2])
    both = bandit(*arms)
    trials = [trial("a", 1), trial("b", 2), trial("default", 7)]
    both.tell(trials)
    assert arms[0].told == arms[1].told == trials


def test_credit_goes_to_the_arm_that_asked_and_to_no_one_for_the_default() -> None:
    both = bandit(ListArm("a", [1]), ListArm("b", [2]))
    both.tell([trial("default", 1, was_best=True), trial("b", 2, was_best=True), trial("a", 3)])
    assert both.bandit.auc("b") == 1.0
    assert both.bandit.auc("a") == 0.0
    assert both.bandit.uses("a") == both.bandit.uses("b") == 1
    assert both.leader == "b"
    assert both.credits == {"a": both.bandit.auc("a"), "b": both.bandit.auc("b")}


def test_an_arm_that_finds_new_bests_is_asked_more_often() -> None:
    lucky, idle = ListArm("lucky", range(100, 200)), ListArm("idle", range(1, 100))
    both = bandit(lucky, idle)
    uses = {"lucky": 0, "idle": 0}
    for _ in range(40):
        (proposal,) = both.ask()
        uses[proposal.arm] += 1
        both.tell([trial(proposal.arm, proposal.knobs.streams, was_best=proposal.arm == "lucky")])
    assert uses["lucky"] > 2 * uses["idle"] > 0


def test_an_arm_with_nothing_to_propose_is_passed_over_and_not_counted() -> None:
    both = bandit(ListArm("dry", []), ListArm("full", [1, 2, 3]))
    for _ in range(3):
        (proposal,) = both.ask()
        assert proposal.arm == "full"
        both.tell([trial("full", proposal.knobs.streams)])
    assert both.bandit.uses("dry") == 0
    assert not both.ask()


def test_asking_for_several_goes_round_the_arms() -> None:
    both = bandit(ListArm("a", [1, 2, 3]), ListArm("b", [4]))
    assert sorted(proposal.arm for proposal in both.ask(3)) == ["a", "a", "b"]
    assert len(both.ask(9)) == 4


def test_asking_counts_as_no_use() -> None:
    both = bandit(ListArm("a", [1]), ListArm("b", [2]))
    both.ask()
    both.ask(2)
    assert both.bandit.uses("a") == both.bandit.uses("b") == 0


@pytest.mark.parametrize("fault", ["ask", "tell", "expected_improvement"])
def test_an_arm_that_raises_is_left_out_and_the_others_go_on(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    good = ListArm("good", range(1, 9), expected=0.2)
    both = bandit(FaultyArm("faulty", fault), good)
    for _ in range(8):
        (proposal,) = both.ask()
        both.tell([trial(proposal.arm, proposal.knobs.streams)])
        assert both.expected_improvement() in (None, 0.2)
    assert both.expected_improvement() == 0.2
    assert "'faulty' failed and is left out" in caplog.text
    assert caplog.text.count("left out") == 1
    assert len(good.told) == 8


def test_what_is_left_to_gain_is_the_most_that_any_arm_expects() -> None:
    none = bandit(ListArm("a", []), ListArm("b", []))
    some = bandit(ListArm("a", [], expected=0.1), ListArm("b", [], expected=0.3), ListArm("c", []))
    assert not none.ask()
    assert not some.ask()
    assert none.expected_improvement() is None
    assert some.expected_improvement() == 0.3


def test_nobody_says_what_is_left_to_gain_before_all_arms_have_had_their_turn() -> None:
    arms = bandit(ListArm("a", [1, 2], expected=0.1), ListArm("b", [3], expected=0.1))
    for expected in (None, 0.1):
        (proposal,) = arms.ask()
        arms.tell([trial(proposal.arm, proposal.knobs.streams)])
        assert arms.expected_improvement() == expected


def test_the_same_seed_asks_in_the_same_order() -> None:
    def course(seed: int) -> list[str]:
        both = bandit(*(ListArm(name, range(1, 20)) for name in "abcd"), seed=seed)
        order = []
        for _ in range(12):
            (proposal,) = both.ask()
            order.append(proposal.arm)
            both.tell([trial(proposal.arm, proposal.knobs.streams)])
        return order

    assert course(1) == course(1)
    assert len({tuple(course(seed)) for seed in range(8)}) > 1


def test_the_first_arm_with_an_opinion_is_believed() -> None:
    assert bandit(ListArm("a", [])).expected_span_s(knobs(3)) is None
    both = bandit(ListArm("a", []), ListArm("b", [], expected=0.5))
    assert both.expected_span_s(knobs(3)) == 1.5


@pytest.mark.parametrize(
    "answer",
    [
        None,
        5,
        [None],
        ["knobs"],
        [Proposal(arm="mad", knobs=None)],
        [Proposal(arm="mad", knobs=knobs(1), iterations=0)],
    ],  # type: ignore[arg-type]
)
def test_an_arm_that_answers_nonsense_is_left_out(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    mad = ListArm("mad", [1])
    mad.ask = lambda n=1: answer  # type: ignore[method-assign,assignment,return-value]
    both = bandit(mad, ListArm("sane", [2]))
    for _ in range(3):
        assert [proposal.arm for proposal in both.ask()] == ["sane"] or not both.ask()
    assert caplog.text.count("left out") == 1


def test_an_arm_answers_no_more_than_it_is_asked_for_and_under_its_own_name() -> None:
    endless = ListArm("endless", [1])
    endless.ask = lambda n=1: (Proposal(arm="default", knobs=knobs(7)) for _ in count())  # type: ignore[method-assign,assignment,return-value,misc]
    assert bandit(endless).ask(3) == [Proposal(arm="endless", knobs=knobs(7))] * 3


@pytest.mark.parametrize("answer", ["much", float("nan"), object()])
def test_an_arm_that_expects_no_number_is_left_out(answer: object) -> None:
    mad = ListArm("mad", [1])
    mad.expected_improvement = lambda: answer  # type: ignore[method-assign,assignment,return-value]
    mad.expected_span_s = lambda knobs: answer  # type: ignore[attr-defined]
    both = bandit(mad, ListArm("sane", [2]))
    assert both.expected_improvement() is None
    assert both.expected_span_s(knobs(1)) is None
    assert [proposal.arm for proposal in both.ask(2)] == ["sane"]


class Judge(ListArm):
    """Its surrogate promises what it is told to, by the number of streams."""

    def __init__(self, name: str, promises: dict[int, float]) -> None:
        super().__init__(name, [])
        self._promises = promises

    def promise(self, candidates: Sequence[Knobs]) -> list[float]:
        return [self._promises[candidate.streams] for candidate in candidates]


def test_the_surrogate_picks_among_what_an_arm_proposes() -> None:
    arm = bandit(ListArm("one", [1, 2, 3]), Judge("judge", {1: 0.01, 2: 0.2, 3: 0.0}))
    (proposal,) = arm.ask()
    assert (proposal.arm, proposal.knobs.streams) == ("one", 2)


def test_an_arm_whose_every_proposal_is_hopeless_is_passed_over() -> None:
    hopeless, good = ListArm("hopeless", [1, 2]), ListArm("good", [3])
    arm = bandit(hopeless, good, Judge("judge", {1: 0.0, 2: 0.0005, 3: 0.01}))
    assert {arm.ask()[0].arm for _ in range(20)} == {"good"}


def test_a_plan_of_which_the_surrogate_knows_nothing_passes() -> None:
    arm = bandit(ListArm("planner", [1]), Judge("judge", {1: float("inf")}))
    assert arm.ask()[0].arm == "planner"


def test_arms_of_the_whole_space_take_over_once_and_know_all_trials() -> None:
    narrow, wide = ListArm("one", [1]), ListArm("one", [7])
    doubts = iter([False, True, True])
    arm = BanditArm(
        [narrow], rng=np.random.default_rng(0), window=20, doubted=lambda: next(doubts), wider=lambda: [wide]
    )
    arm.tell([trial("one", 1)])
    assert not wide.told
    arm.tell([trial("one", 2)])
    assert [each.knobs.streams for each in wide.told] == [1, 2]
    arm.tell([trial("one", 3)])
    assert [each.knobs.streams for each in wide.told] == [1, 2, 3]
    assert len(narrow.told) == 2
    assert arm.ask()[0].knobs.streams == 7
