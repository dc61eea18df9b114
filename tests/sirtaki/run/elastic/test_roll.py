"""Who is there, who would be a member, who may go."""

from sirtaki.run.elastic.roll import Roll
from sirtaki.run.elastic.workers import Phase, Worker


def waiting(roll: Roll, host: str, slot: int, *, has_state: bool = False, is_leaving: bool = False) -> Worker:
    worker = roll.add(host, slot, 0.0)
    worker.has_state, worker.is_leaving = has_state, is_leaving
    worker.enter(Phase.WAITING, 0.0)
    return worker


def numbers(workers: list[Worker]) -> list[int]:
    return [worker.number for worker in workers]


def test_processes_are_called_by_their_rank_once_they_have_one_and_after_their_end() -> None:
    roll = Roll()
    worker = roll.add("a", 1, 0.0)
    assert (roll.label(worker.number), roll.place(worker.number)) == ("a:1", "a.1")
    roll.begin([worker], 0.0)
    del roll.workers[worker.number]
    assert roll.label(worker.number) == "0"


def test_who_is_to_leave_stays_while_nobody_else_has_the_state() -> None:
    roll = Roll()
    old = waiting(roll, "a", 0, has_state=True, is_leaving=True)
    new = waiting(roll, "b", 0)
    assert numbers(roll.candidates(None)) == [new.number, old.number]
    assert list(roll.dismissible()) == []
    new.has_state = True
    assert numbers(roll.candidates(None)) == [new.number]
    assert list(roll.dismissible()) == [old]


def test_one_who_hands_the_state_over_finds_room_where_there_is_a_limit() -> None:
    roll = Roll()
    old = [waiting(roll, "a", slot, has_state=True, is_leaving=True) for slot in range(2)]
    roll.begin(old, 0.0)
    for worker in old:
        worker.enter(Phase.WAITING, 0.0)
    new = [waiting(roll, "b", slot) for slot in range(2)]
    assert numbers(roll.candidates(2)) == [new[0].number, old[0].number]


def test_the_youngest_leave_where_there_are_too_many() -> None:
    roll = Roll()
    first = [waiting(roll, "a", slot, has_state=True) for slot in range(2)]
    roll.begin(first, 0.0)
    waiting(roll, "b", 0)
    roll.mark_leaving({"a": 2, "b": 1}, 2)
    assert [worker.is_leaving for worker in roll.workers.values()] == [False, False, True]
    roll.mark_leaving({"a": 1, "b": 1}, 2)
    assert [worker.is_leaving for worker in roll.workers.values()] == [False, True, False]


def test_places_are_free_until_the_process_has_ended() -> None:
    roll = Roll()
    worker = roll.add("a", 1, 0.0)
    worker.enter(Phase.DISMISSED, 0.0)
    assert roll.free_slots("a", 3) == [0, 2]
    del roll.workers[worker.number]
    assert roll.free_slots("a", 3) == [0, 1, 2]


def test_members_that_have_not_been_told_of_a_generation_make_it_a_diminished_one() -> None:
    roll = Roll()
    told = [Worker(number=n, host="a", slot=n, phase=Phase.MEMBER, generation=5, rank=n - 3) for n in (3, 4)]
    untold = Worker(number=5, host="b", slot=0, phase=Phase.WAITING, generation=4, rank=2)
    roll.take_over([*told, untold], 5, (3, 4, 5))
    assert roll.is_diminished
    assert untold.rank == 2
    assert roll.add("b", 1, 0.0).number == 6
