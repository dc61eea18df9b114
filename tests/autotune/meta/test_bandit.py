"""The bandit over arms: credit by the papers' formula, turns, faults of arms, and participation."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any

import numpy as np
import pytest
from fakes.warmup_job import DEFAULT, SPACE, ListArm
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.autotune.arms.planners import Planner
from sirtaki.autotune.arms.techniques import OUR_ARMS
from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace
from sirtaki.autotune.meta import bandit as ensemble
from sirtaki.autotune.meta.bandit import AUCBandit, BanditArm, default_arms, window_for
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import TuningError

ARMS = ("grid", "pbt", "bayesian", "hyperband")


histories = st.lists(st.tuples(st.sampled_from(ARMS), st.booleans()), max_size=60)


windows = st.integers(min_value=1, max_value=25)


def textbook_auc(arm: str, window: Sequence[tuple[str, bool]]) -> float:
    """AIACC § VI: under a curve that goes up with each win of the arm, over that under one that always goes up."""
    wins = [won for user, won in window if user == arm]
    return sum(accumulate(wins)) / sum(accumulate([True] * len(wins))) if wins else 0.0


def textbook_score(arm: str, window: Sequence[tuple[str, bool]], exploration: float) -> float:
    uses = sum(user == arm for user, _ in window)
    if uses == 0:
        return math.inf
    return textbook_auc(arm, window) + exploration * math.sqrt(2.0 * math.log2(len(window)) / uses)


@given(history=histories, window=windows)
def test_the_running_sums_agree_with_the_formula_at_every_step(history: list[tuple[str, bool]], window: int) -> None:
    bandit = AUCBandit(ARMS, window=window)
    for step, (arm, was_best) in enumerate(history, start=1):
        bandit.push(arm, was_best=was_best)
        inside = history[max(0, step - window) : step]
        for name in ARMS:
            assert bandit.auc(name) == pytest.approx(textbook_auc(name, inside))
            assert bandit.score(name) == pytest.approx(textbook_score(name, inside, 0.2))


def test_ties_are_broken_by_the_given_generator_alone() -> None:
    bandit = AUCBandit(ARMS, window=5)
    orders = {tuple(bandit.ranking(np.random.default_rng(seed))) for seed in range(30)}
    assert len(orders) > 5
    assert bandit.ranking(np.random.default_rng(4)) == bandit.ranking(np.random.default_rng(4))


def test_the_window_slides_within_the_budget_and_has_room_for_every_arm() -> None:
    assert window_for(100, 4) == 50
    assert window_for(33, 10) == 16
    assert window_for(10, 8) == 8


@pytest.mark.parametrize(
    ("arms", "window", "words"),
    [((), 3, "no name twice"), (("grid",) * 2, 3, "no name twice"), (ARMS, 0, "window: expected at least 1")],
)
def test_arms_without_a_name_of_their_own_and_an_empty_window_are_refused(
    arms: tuple[str, ...], window: int, words: str
) -> None:
    with pytest.raises(TuningError, match=words):
        AUCBandit(arms, window=window)


def test_the_arms_can_open_in_the_order_given_and_score_decides_afterwards() -> None:
    bandit = AUCBandit(ARMS, window=10)
    rng = np.random.default_rng(0)
    opened = []
    for _ in ARMS:
        opened.append(bandit.ranking(rng, as_given=True)[0])
        bandit.push(opened[-1], was_best=opened[-1] == "bayesian")
    assert opened == list(ARMS)
    assert bandit.ranking(rng, as_given=True)[0] == "bayesian"


def knobs(streams: int) -> Knobs:
    return Knobs(unit_bytes=MIB, streams=streams, transport=TransportKind.GLOO)


class ListListArm:
    """An arm that proposes given numbers of streams in turn and records results."""

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


class FaultyArm(ListListArm):
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


def bandit(*arms: ListListArm, seed: int = 0) -> BanditArm:
    return BanditArm(arms, rng=np.random.default_rng(seed), window=12)


def test_credit_goes_to_the_arm_that_proposed_and_to_none_for_the_default() -> None:
    both = bandit(ListListArm("a", [1]), ListListArm("b", [2]))
    both.tell([trial("default", 1, was_best=True), trial("b", 2, was_best=True), trial("a", 3)])
    assert both.bandit.auc("b") == 1.0
    assert both.bandit.auc("a") == 0.0
    assert both.bandit.uses("a") == both.bandit.uses("b") == 1
    assert both.credits == {"a": both.bandit.auc("a"), "b": both.bandit.auc("b")}


def test_an_arm_that_finds_new_bests_is_asked_more_often() -> None:
    lucky, idle = ListListArm("lucky", range(100, 200)), ListListArm("idle", range(1, 100))
    both = bandit(lucky, idle)
    uses = {"lucky": 0, "idle": 0}
    for _ in range(40):
        (proposal,) = both.ask()
        uses[proposal.arm] += 1
        both.tell([trial(proposal.arm, proposal.knobs.streams, was_best=proposal.arm == "lucky")])
    assert uses["lucky"] > 2 * uses["idle"] > 0


def test_an_arm_with_nothing_to_propose_is_skipped_and_not_counted() -> None:
    both = bandit(ListListArm("dry", []), ListListArm("full", [1, 2, 3]))
    for _ in range(3):
        (proposal,) = both.ask()
        assert proposal.arm == "full"
        both.tell([trial("full", proposal.knobs.streams)])
    assert both.bandit.uses("dry") == 0
    assert not both.ask()


@pytest.mark.parametrize("fault", ["ask", "tell", "expected_improvement"])
def test_an_arm_that_raises_is_removed_and_the_others_continue(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    good = ListListArm("good", range(1, 9), expected=0.2)
    both = bandit(FaultyArm("faulty", fault), good)
    for _ in range(8):
        (proposal,) = both.ask()
        both.tell([trial(proposal.arm, proposal.knobs.streams)])
        assert both.expected_improvement() in (None, 0.2)
    assert both.expected_improvement() == 0.2
    assert "'faulty' failed after" in caplog.text
    assert caplog.text.count("is not used any more") == 1
    assert len(good.told) == 8


def test_the_expected_improvement_is_the_largest_of_all_arms() -> None:
    none = bandit(ListListArm("a", []), ListListArm("b", []))
    some = bandit(ListListArm("a", [], expected=0.1), ListListArm("b", [], expected=0.3), ListListArm("c", []))
    assert not none.ask()
    assert not some.ask()
    assert none.expected_improvement() is None
    assert some.expected_improvement() == 0.3


def test_no_expected_improvement_is_reported_before_all_arms_had_a_turn() -> None:
    arms = bandit(ListListArm("a", [1, 2], expected=0.1), ListListArm("b", [3], expected=0.1))
    for expected in (None, 0.1):
        (proposal,) = arms.ask()
        arms.tell([trial(proposal.arm, proposal.knobs.streams)])
        assert arms.expected_improvement() == expected


def test_the_first_arm_with_an_opinion_is_believed() -> None:
    assert bandit(ListListArm("a", [])).expected_span_s(knobs(3)) is None
    both = bandit(ListListArm("a", []), ListListArm("b", [], expected=0.5))
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
    mad = ListListArm("mad", [1])
    mad.ask = lambda n=1: answer  # type: ignore[method-assign,assignment,return-value]
    both = bandit(mad, ListListArm("sane", [2]))
    for _ in range(3):
        assert [proposal.arm for proposal in both.ask()] == ["sane"] or not both.ask()
    assert caplog.text.count("is not used any more") == 1


def test_an_arm_answers_no_more_than_it_is_asked_for_and_under_its_own_name() -> None:
    endless = ListListArm("endless", [1])
    endless.ask = lambda n=1: (Proposal(arm="default", knobs=knobs(7)) for _ in count())  # type: ignore[method-assign,assignment,return-value,misc]
    assert bandit(endless).ask(3) == [Proposal(arm="endless", knobs=knobs(7))] * 3


@pytest.mark.parametrize("at_once", [1, 3, 20])
def test_no_proposal_of_an_arm_that_takes_them_from_a_queue_is_lost(at_once: int) -> None:
    queue = ListListArm("queue", [])
    waiting = [Proposal(arm="queue", knobs=knobs(streams)) for streams in range(1, 13)]

    def take(n: int = 1) -> list[Proposal]:
        taken, waiting[:] = waiting[:at_once], waiting[at_once:]
        return taken

    queue.ask = take  # type: ignore[method-assign,assignment]
    arm, ran = bandit(queue), list[int]()
    while asked := arm.ask():
        ran.append(asked[0].knobs.streams)
        arm.tell([Trial(arm="queue", knobs=asked[0].knobs, iterations=1, span_s=1.0)])
    assert sorted(ran) == list(range(1, 13))


class Judge(ListListArm):
    """An arm whose surrogate predicts given times by number of streams."""

    def __init__(self, name: str, promises: dict[int, float]) -> None:
        super().__init__(name, [])
        self._promises = promises

    def promise(self, candidates: Sequence[Knobs]) -> list[float]:
        return [self._promises[candidate.streams] for candidate in candidates]


def test_the_surrogate_selects_among_an_arms_proposals() -> None:
    arm = bandit(ListListArm("one", [1, 2, 3]), Judge("judge", {1: 0.01, 2: 0.2, 3: 0.0}))
    (proposal,) = arm.ask()
    assert (proposal.arm, proposal.knobs.streams) == ("one", 2)


def test_an_arm_with_only_hopeless_proposals_is_skipped() -> None:
    hopeless, good = ListListArm("hopeless", [1, 2]), ListListArm("good", [3])
    arm = bandit(hopeless, good, Judge("judge", {1: 0.0, 2: 0.0005, 3: 0.01}))
    assert {arm.ask()[0].arm for _ in range(20)} == {"good"}


def test_a_plan_that_the_surrogate_cannot_predict_passes() -> None:
    arm = bandit(ListListArm("planner", [1]), Judge("judge", {1: float("inf")}))
    assert arm.ask()[0].arm == "planner"


def test_arms_of_the_whole_space_replace_the_others_once_and_get_all_trials() -> None:
    narrow, wide = ListListArm("one", [1]), ListListArm("one", [7])
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


class Named(ListArm):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Drawn(Named):
    """Remembers what it was made with."""

    def __init__(self, name: str, space: KnobSpace, rng: np.random.Generator) -> None:
        super().__init__(name)
        if name == "greedy":
            rng.random(100)
        self.space, self.draw = space, float(rng.random())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Drawn]:
    """Arms in the order in which they were made; `twin` is called like `a`, `broken` cannot be built."""
    found: list[Drawn] = []

    def make_arm(name: str, *, space: KnobSpace, rng: np.random.Generator) -> Drawn:
        if name == "broken":
            raise TuningError("the broken arm needs something")
        found.append(Drawn("a" if name == "twin" else name, space, rng))
        return found[-1]

    monkeypatch.setattr(ensemble, "make_arm", make_arm)
    monkeypatch.setattr(ensemble, "third_party_arms", lambda: ("theirs",))
    return found


def arms(seed: int = 0, **more: Any) -> BanditArm:
    return default_arms(space=SPACE, rng=np.random.default_rng(seed), **more)


def names(bandit: BanditArm) -> list[str]:
    return list(bandit._arms)


def test_planners_are_first_as_given_then_our_arms_then_others(made: list[Drawn]) -> None:
    bandit = arms(planners=[Named("p"), Named("q")])
    assert names(bandit) == ["p", "q", *OUR_ARMS, "theirs"]
    assert [arm.space for arm in made] == [SPACE] * len(made)


def test_draws_of_one_arm_do_not_depend_on_another(made: list[Drawn]) -> None:
    arms(names=["a", "b"])
    arms(names=["greedy", "b"])
    first, second, _, again = made
    assert first.draw != second.draw
    assert again.draw == second.draw
    arms(seed=1, names=["a"])
    assert made[-1].draw != first.draw


@pytest.mark.parametrize("planners", [[], [Named("a")]])
def test_of_two_of_one_name_the_second_is_left_out(
    planners: Sequence[Named], made: list[Drawn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ensemble, "OUR_ARMS", ("twin", "a"))
    with caplog.at_level(logging.WARNING):
        assert names(arms(planners=planners)) == ["a", "theirs"]
    why = "two search techniques have the name 'a'; rename or remove one of them"
    assert f"Sirtaki does not use the search technique 'a' for tuning: {why}" in caplog.messages
    with pytest.raises(TuningError, match=why):
        arms(names=["a", "twin"], planners=[])


def test_no_arm_at_all_is_an_error() -> None:
    with pytest.raises(TuningError):
        arms(names=[])


def test_once_planners_are_doubted_techniques_get_the_whole_space_with_draws_of_their_own(
    made: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(ensemble, "BanditArm", lambda arms, **options: given.update(options, arms=arms))

    class Doubtful(Planner):
        name = "p"
        doubted = False  # type: ignore[assignment]

        def __init__(self) -> None:
            pass

        def cuts(self, *args: Any) -> Any:
            raise AssertionError

    planner, whole = Doubtful(), replace(SPACE, streams=(*SPACE.streams, 16))
    arms(names=["a"], planners=[planner, Named("q")], whole_space=whole)
    assert not given["doubted"]()
    planner.doubted = True
    assert given["doubted"]()
    (wider,) = given["wider"]()
    assert wider.space == whole
    arms(names=["a"], whole_space=SPACE)
    assert given["wider"] is None
    assert DEFAULT.streams == 1
