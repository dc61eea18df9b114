"""Who is there, who would be a member, who may go."""

from sirtaki.run.elastic.job_members import MemberList, Phase, Worker


def waiting(
    member_list: MemberList, host: str, slot: int, *, has_state: bool = False, is_leaving: bool = False
) -> Worker:
    worker = member_list.add(host, slot, 0.0)
    worker.has_state, worker.is_leaving = has_state, is_leaving
    worker.enter(Phase.WAITING, 0.0)
    return worker


def numbers(workers: list[Worker]) -> list[int]:
    return [worker.number for worker in workers]


def test_processes_are_called_by_their_rank_once_they_have_one_and_after_their_end() -> None:
    member_list = MemberList()
    worker = member_list.add("a", 1, 0.0)
    assert (member_list.label(worker.number), member_list.place(worker.number)) == ("a:1", "a.1")
    member_list.begin([worker], 0.0)
    del member_list.workers[worker.number]
    assert member_list.label(worker.number) == "0"


def test_who_is_to_leave_stays_while_nobody_else_has_the_state() -> None:
    member_list = MemberList()
    old = waiting(member_list, "a", 0, has_state=True, is_leaving=True)
    new = waiting(member_list, "b", 0)
    assert numbers(member_list.candidates(None)) == [new.number, old.number]
    assert list(member_list.dismissible()) == []
    new.has_state = True
    assert numbers(member_list.candidates(None)) == [new.number]
    assert list(member_list.dismissible()) == [old]


def test_one_who_hands_the_state_over_finds_room_where_there_is_a_limit() -> None:
    member_list = MemberList()
    old = [waiting(member_list, "a", slot, has_state=True, is_leaving=True) for slot in range(2)]
    member_list.begin(old, 0.0)
    for worker in old:
        worker.enter(Phase.WAITING, 0.0)
    new = [waiting(member_list, "b", slot) for slot in range(2)]
    assert numbers(member_list.candidates(2)) == [new[0].number, old[0].number]


def test_the_youngest_leave_where_there_are_too_many() -> None:
    member_list = MemberList()
    first = [waiting(member_list, "a", slot, has_state=True) for slot in range(2)]
    member_list.begin(first, 0.0)
    waiting(member_list, "b", 0)
    member_list.mark_leaving({"a": 2, "b": 1}, 2)
    assert [worker.is_leaving for worker in member_list.workers.values()] == [False, False, True]
    member_list.mark_leaving({"a": 1, "b": 1}, 2)
    assert [worker.is_leaving for worker in member_list.workers.values()] == [False, True, False]


def test_places_are_free_until_the_process_has_ended() -> None:
    member_list = MemberList()
    worker = member_list.add("a", 1, 0.0)
    worker.enter(Phase.DISMISSED, 0.0)
    assert member_list.free_slots("a", 3) == [0, 2]
    del member_list.workers[worker.number]
    assert member_list.free_slots("a", 3) == [0, 1, 2]


def test_members_that_have_not_been_told_of_a_generation_make_it_a_diminished_one() -> None:
    member_list = MemberList()
    told = [Worker(number=n, host="a", slot=n, phase=Phase.MEMBER, generation=5, rank=n - 3) for n in (3, 4)]
    untold = Worker(number=5, host="b", slot=0, phase=Phase.WAITING, generation=4, rank=2)
    member_list.take_over([*told, untold], 5, (3, 4, 5))
    assert member_list.is_diminished
    assert untold.rank == 2
    assert member_list.add("b", 1, 0.0).number == 6
