"""Arms by name, our own and those of other packages, and what is said about broken ones."""

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from conformance.arm import WIDE

from sirtaki.autotune.arms import techniques
from sirtaki.autotune.arms.techniques import FURTHER_ARMS, OUR_ARMS, make_arm
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.meta.bandit import default_arms
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.errors import TuningError


class Mine:
    name = "mine"

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return []

    def tell(self, trials: Sequence[Trial]) -> None:
        pass


def make_mine(space: KnobSpace, rng: np.random.Generator) -> Mine:
    return Mine()


def make_nothing(space: KnobSpace, rng: np.random.Generator) -> object:
    return object()


def make_trouble(space: KnobSpace, rng: np.random.Generator) -> object:
    raise ZeroDivisionError("no")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that a package brings entry points `name = tests' function`."""

    def install(**makers: Any) -> None:
        points = [
            importlib.metadata.EntryPoint(name=name, value=f"{__name__}:{make.__name__}", group="sirtaki.arms")
            for name, make in makers.items()
        ]
        monkeypatch.setattr(techniques, "entry_points", lambda group: [p for p in points if p.group == group])
        monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(**globals()))

    return install


@pytest.mark.parametrize("name", [*OUR_ARMS, *FURTHER_ARMS])
def test_our_arms_are_built_by_name(name: str) -> None:
    assert make_arm(name, space=WIDE, rng=np.random.default_rng(0)).name == name


def test_a_package_can_bring_an_arm(installed: Callable[..., None]) -> None:
    installed(mine=make_mine)
    assert make_arm("mine", space=WIDE, rng=np.random.default_rng(0)).name == "mine"
    assert "mine" in default_arms(space=WIDE, rng=np.random.default_rng(0)).bandit.arms


def test_a_package_cannot_replace_one_of_ours(installed: Callable[..., None]) -> None:
    installed(grid=make_mine)
    assert make_arm("grid", space=WIDE, rng=np.random.default_rng(0)).name == "grid"


def test_an_unknown_name_is_refused_with_the_names_there_are(installed: Callable[..., None]) -> None:
    installed(mine=make_mine)
    with pytest.raises(TuningError, match="'gird'; there are grid, pbt, bayesian, hyperband, scikit_optimize, mine"):
        make_arm("gird", space=WIDE, rng=np.random.default_rng(0))


@pytest.mark.parametrize(("make", "complaint"), [(make_trouble, "ZeroDivisionError"), (make_nothing, "no name, ask")])
def test_a_broken_arm_is_an_error_if_named_and_a_warning_if_not(
    make: Callable[..., object], complaint: str, installed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    installed(broken=make)
    rng = np.random.default_rng(0)
    with pytest.raises(TuningError, match=complaint):
        default_arms(space=WIDE, rng=rng, names=["grid", "broken"])
    assert default_arms(space=WIDE, rng=rng).bandit.arms == tuple(OUR_ARMS)
    assert complaint in caplog.text
    assert "left out" in caplog.text


def test_planners_stand_beside_the_search_techniques() -> None:
    bandit = default_arms(space=WIDE, rng=np.random.default_rng(0), names=["grid"], planners=[Mine()])
    assert bandit.bandit.arms == ("mine", "grid")


def test_no_arm_at_all_is_refused() -> None:
    with pytest.raises(TuningError, match="needs arms"):
        default_arms(space=WIDE, rng=np.random.default_rng(0), names=[])
