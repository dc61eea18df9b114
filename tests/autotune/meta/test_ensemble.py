"""The bandit over all arms: planners first, then techniques, each with randomness of its own."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.warmup_job import DEFAULT, SPACE, ListArm

from sirtaki.autotune.arms.planners import Planner
from sirtaki.autotune.arms.techniques import OUR_ARMS
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.meta import bandit as ensemble
from sirtaki.autotune.meta.bandit import BanditArm, default_arms, window_for
from sirtaki.errors import TuningError


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


def test_planners_come_first_as_given_then_ours_then_others(made: list[Drawn]) -> None:
    bandit = arms(planners=[Named("p"), Named("q")])
    assert names(bandit) == ["p", "q", *OUR_ARMS, "theirs"]
    assert [arm.space for arm in made] == [SPACE] * len(made)


def test_named_techniques_only(made: list[Drawn]) -> None:
    assert names(arms(names=["b", "a"])) == ["b", "a"]


def test_draws_of_one_arm_do_not_depend_on_another(made: list[Drawn]) -> None:
    arms(names=["a", "b"])
    arms(names=["greedy", "b"])
    first, second, _, again = made
    assert first.draw != second.draw
    assert again.draw == second.draw
    arms(seed=1, names=["a"])
    assert made[-1].draw != first.draw


def test_what_cannot_be_built_is_left_out_with_a_warning_unless_it_was_named(
    made: list[Drawn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ensemble, "OUR_ARMS", ("a", "broken", "b"))
    with caplog.at_level(logging.WARNING):
        assert names(arms()) == ["a", "b", "theirs"]
    assert caplog.messages == ["the broken arm needs something; it is left out"]
    with pytest.raises(TuningError, match="needs something"):
        arms(names=["a", "broken"])


@pytest.mark.parametrize("planners", [[], [Named("a")]])
def test_of_two_of_one_name_the_second_is_left_out(
    planners: Sequence[Named], made: list[Drawn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ensemble, "OUR_ARMS", ("twin", "a"))
    with caplog.at_level(logging.WARNING):
        assert names(arms(planners=planners)) == ["a", "theirs"]
    assert "there are two search techniques called 'a'; it is left out" in caplog.messages
    with pytest.raises(TuningError, match="two search techniques called 'a'"):
        arms(names=["a", "twin"], planners=[])


def test_no_arm_at_all_is_an_error() -> None:
    with pytest.raises(TuningError):
        arms(names=[])


@pytest.mark.parametrize("budget", [30, 300])
def test_the_window_grows_with_the_trials_that_the_budget_pays(
    budget: int, made: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(ensemble, "BanditArm", lambda arms, **options: given.update(options, arms=arms))
    arms(names=["a", "b"], budget_iterations=budget, exploration=0.7)
    assert given["window"] == window_for(budget // 3, 2)
    assert given["exploration"] == 0.7
    assert given["wider"] is None
    assert not given["doubted"]()


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
