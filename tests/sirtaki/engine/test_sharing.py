"""Optimizers that share parameters reduce them once, and stop asking each other when one of them is left."""

import gc

import numpy as np
import pytest

from sirtaki.engine.participants import Progress, Stage
from sirtaki.engine.reducing.reducer import Sharing


class Optimizer:
    def use_part(self, part: object, *, of: object) -> None:
        """Nothing is split here."""

    def fail(self) -> None:
        """Nothing fails here."""


class Ranks:
    """This rank, and another one that says `other`."""

    def __init__(self, *other: float) -> None:
        self.other, self.progress = np.array(other), Progress()
        self.waited_for: list[Stage] = []

    def maximum(self, mine: np.ndarray) -> np.ndarray:
        assert self.progress.waiting is not None
        self.waited_for.append(self.progress.waiting[0])
        return np.maximum(mine, self.other)


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_reduction_is_due_on_all_ranks_if_it_is_on_any(here: bool, there: bool) -> None:
    ranks = Ranks(there, 2.0)
    sharing = Sharing(ranks, ranks.progress)  # type: ignore[arg-type]
    assert sharing.is_due(here=here) is (here or there)
    assert ranks.waited_for == [Stage.ASK]
    assert ranks.progress.waiting is None


def test_it_ends_when_every_rank_has_one_user_left_and_not_before() -> None:
    users = [Optimizer(), Optimizer()]
    ranks = Ranks(0.0, 1.0)
    sharing = Sharing(ranks, ranks.progress)  # type: ignore[arg-type]
    sharing.active = True
    for user in users:
        sharing.users.add(user)
    sharing.is_due(here=True)
    assert sharing.active
    del user, users[0]
    gc.collect()
    sharing.is_due(here=True)
    assert not sharing.active
