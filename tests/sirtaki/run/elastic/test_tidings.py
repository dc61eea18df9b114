"""Members hear of each change once a generation, and of the first death how it happened."""

from sirtaki.engine.membership import Change
from sirtaki.run.elastic.actions import Tell
from sirtaki.run.elastic.roll import Roll
from sirtaki.run.elastic.tidings import Tidings
from sirtaki.run.elastic.workers import Phase


def begun(ranks: int = 3) -> Roll:
    roll = Roll()
    roll.begin([roll.add("a", slot, 0.0) for slot in range(ranks)], 0.0)
    return roll


def test_a_newcomer_is_told_of_once() -> None:
    roll, tidings = begun(), Tidings()
    assert tidings.news(roll) is None
    roll.add("b", 0, 1.0).enter(Phase.WAITING, 2.0)
    assert tidings.news(roll) == Tell(workers=(1, 2, 3), change=Change.ADDED)
    assert tidings.news(roll) is None


def test_a_death_is_told_though_it_was_told_that_somebody_leaves() -> None:
    roll, tidings = begun(), Tidings()
    roll.workers[3].is_leaving = True
    assert tidings.news(roll) == Tell(workers=(1, 2, 3), change=Change.REMOVED)
    del roll.workers[2]
    tidings.lose("rank 1 was killed")
    tidings.lose("rank 2 failed")
    assert tidings.news(roll) == Tell(workers=(1, 3), change=Change(0), lost="rank 1 was killed")
    assert tidings.news(roll) is None
    tidings.begin()
    assert tidings.news(begun()) is None


def test_nobody_is_disturbed_once_a_member_has_done_its_work() -> None:
    roll, tidings = begun(), Tidings()
    roll.has_succeeded = True
    del roll.workers[2]
    assert tidings.news(roll) is None
