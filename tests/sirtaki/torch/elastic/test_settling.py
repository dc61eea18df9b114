"""What each rank brings into a generation decides for all of them from where they go on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sirtaki.engine import job
from sirtaki.torch.elastic import repeating as settling
from sirtaki.torch.elastic.repeating import Brought, Settlement, agreed, settle
from sirtaki.torch.elastic.state import Standing, State

FOUR = Standing(written=4, completed=4)


class Kept(State):
    """Says what was done to it."""

    def __init__(self, standing: Standing) -> None:
        super().__init__()
        self.standing, self.done = standing, list[object]()

    def save(self) -> None:
        raise AssertionError

    def sync(self) -> None:
        raise AssertionError

    def restore(self) -> None:
        self.done.append("restore")

    def _standing(self) -> Standing:
        return self.standing

    def _go_back(self, number: int) -> None:
        self.done.append(number)

    def _count_from(self, number: int) -> None:
        self.counts_from = number


def brought(
    *, has_state: bool = True, restored: bool = False, standing: Standing = FOUR, wants_sync: bool = False
) -> Brought:
    return Brought(
        has_state=has_state,
        restored=restored,
        standing=standing,
        wants_sync=wants_sync,
        process_sets=((0, 1),),
        optimizers=("a", "b"),
    )


class Play:
    """One rank among others, who bring what they are given to bring."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attached, self.opened = list[str](), list[object]()
        lasting = SimpleNamespace(
            detached=lambda: {"b": None, "c": None, "a": None},
            attach=lambda current, optimizers, names: self.attached.extend(names),
        )
        sets = SimpleNamespace(lasting=lambda: {(0, 1): "pair"}, open_again=self.opened.extend)
        monkeypatch.setattr(settling, "lasting_optimizers", lasting)
        monkeypatch.setattr(settling, "process_sets", sets)
        self._monkeypatch = monkeypatch

    def __call__(
        self, *others: Brought, restored: bool = False, wants_sync: bool = False, mine: Standing = FOUR
    ) -> tuple[Kept, bool]:
        current = SimpleNamespace(
            elastic=SimpleNamespace(has_state=True),
            control=SimpleNamespace(all_gather=lambda said: [*others, said]),
            settled=False,
        )
        self._monkeypatch.setattr(job, "current", lambda: current)
        state = Kept(mine)
        out_of_step = settle(state, restored=restored, wants_sync=wants_sync)
        assert current.settled
        return state, out_of_step


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(monkeypatch)


def test_the_newest_commit_that_anyone_knows_to_be_complete_is_gone_back_to(play: Play) -> None:
    state, out_of_step = play(brought(restored=True, standing=Standing(5, 5)), restored=True, wants_sync=True)
    assert (state.done, out_of_step) == ([5], True)
    state, _ = play(brought(restored=True, standing=Standing(5, 4)), restored=True, mine=Standing(5, 4))
    assert state.done == [4]
    assert state.counts_from == 6


def test_who_would_have_gone_on_goes_back_if_another_one_does(play: Play) -> None:
    state, _ = play(brought(restored=True))
    assert state.done == ["restore", 4]


def test_nobody_goes_back_for_the_sake_of_who_has_no_state(play: Play) -> None:
    state, out_of_step = play(brought(has_state=False, restored=True, standing=Standing(9, -1)))
    assert (state.done, out_of_step) == ([], True)
    assert state.counts_from == 10


def test_where_ranks_have_only_left_nothing_is_to_be_done(play: Play) -> None:
    state, out_of_step = play(brought())
    assert (state.done, out_of_step) == ([], False)


def test_what_all_have_is_attached_and_opened_in_one_order(play: Play) -> None:
    play(brought())
    assert play.attached == ["a", "b"]
    assert play.opened == ["pair"]


def test_all_go_back_to_what_any_knows_to_be_complete_and_count_on_alike() -> None:
    ahead = brought(standing=Standing(written=6, completed=5))
    behind = brought(restored=True, standing=Standing(written=5, completed=4))
    new = brought(has_state=False, standing=Standing(written=7, completed=-1))
    everybody = [ahead, behind, new]
    assert agreed(everybody, ahead) == Settlement(back_to=5, count_from=8, out_of_step=True)
    assert agreed(everybody, new) == Settlement(back_to=None, count_from=8, out_of_step=True)
    assert agreed([ahead, ahead], ahead) == Settlement(back_to=None, count_from=7, out_of_step=False)
