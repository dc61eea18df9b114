"""Members hear of each change once a generation, and of the first death how it happened."""

from sirtaki.engine.membership import Change
from sirtaki.run.elastic.job_members import ChangeNotifier, MemberList, Phase, Tell


def begun(ranks: int = 3) -> MemberList:
    member_list = MemberList()
    member_list.begin([member_list.add("a", slot, 0.0) for slot in range(ranks)], 0.0)
    return member_list


def test_a_newcomer_is_told_of_once() -> None:
    member_list, notifier = begun(), ChangeNotifier()
    assert notifier.notice(member_list) is None
    member_list.add("b", 0, 1.0).enter(Phase.WAITING, 2.0)
    assert notifier.notice(member_list) == Tell(workers=(1, 2, 3), change=Change.ADDED)
    assert notifier.notice(member_list) is None


def test_a_death_is_told_though_it_was_told_that_somebody_leaves() -> None:
    member_list, notifier = begun(), ChangeNotifier()
    member_list.workers[3].is_leaving = True
    assert notifier.notice(member_list) == Tell(workers=(1, 2, 3), change=Change.REMOVED)
    del member_list.workers[2]
    notifier.lose("rank 1 was killed")
    notifier.lose("rank 2 failed")
    assert notifier.notice(member_list) == Tell(workers=(1, 3), change=Change(0), lost="rank 1 was killed")
    assert notifier.notice(member_list) is None
    notifier.begin()
    assert notifier.notice(begun()) is None


def test_nobody_is_disturbed_once_a_member_has_done_its_work() -> None:
    member_list, notifier = begun(), ChangeNotifier()
    member_list.has_succeeded = True
    del member_list.workers[2]
    assert notifier.notice(member_list) is None
