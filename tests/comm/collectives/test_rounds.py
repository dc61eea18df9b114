"""One round after the other: what all have pending is performed, what they disagree about is refused on all alike."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fakes.meshes import among

from sirtaki.comm.collectives import engine
from sirtaki.comm.collectives.engine import CAPACITY, EagerWork, NameSlots, Pending, Rounds, agree
from sirtaki.comm.collectives.operations import Kind, Signature
from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.transports.contract import ThreadWork
from sirtaki.errors import CommError, MismatchError

SIZE = 3


class Rank:
    """One rank's pending operations, and rounds over them."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.pending = Pending("")
        self.rounds = Rounds(comm, comm.failures, self.pending)
        self.exchanges = 0
        exchange = self.rounds._exchange

        def counting(mine: Any) -> Any:
            self.exchanges += 1
            return exchange(mine)

        self.rounds._exchange = counting  # type: ignore[method-assign]

    def submit(self, name: str, value: float = 1.0, *, kind: Kind = Kind.ALLREDUCE, **rest: Any) -> EagerWork:
        tensors = [] if kind is Kind.BARRIER else [torch.full((2,), value, dtype=rest.pop("dtype", torch.float32))]
        op = {"op": "sum"} if kind is Kind.ALLREDUCE else {}
        work = EagerWork(Signature.of(tensors, name=name, kind=kind, **{**op, **rest}), tensors)
        self.pending.add(work, wake=False)
        return work

    def round(self) -> bool:
        mine = self.pending.snapshot(0.0)
        assert mine is not None
        return self.rounds.run(mine)


def on_ranks(act: Callable[[Rank], Any], *, size: int = SIZE) -> list[Any]:
    def run(comm: Communicator) -> Any:
        rank = Rank(comm)
        result = act(rank)
        rank.rounds.close()
        return result

    return among(size, run)


def value(work: EagerWork) -> float:
    assert work.wait(0.0)
    return float(work.results[0][0])


def test_what_all_have_pending_is_performed_in_one_round_and_without_an_exchange() -> None:
    def act(rank: Rank) -> None:
        names = ["b", "a"] if rank.rank else ["a", "b"]
        works = {name: rank.submit(name, rank.rank + 1.0) for name in names}
        assert rank.round()
        assert [value(works[name]) for name in "ab"] == [6.0, 6.0]
        assert rank.exchanges == 0
        assert len(rank.pending) == 0
        assert rank.rounds.concluded == 2

    on_ranks(act)


def test_what_only_some_have_pending_waits_for_the_others() -> None:
    def act(rank: Rank) -> None:
        first = rank.submit("first")
        second = rank.submit("second") if rank.rank == 1 else None
        assert rank.round()
        assert value(first) == SIZE
        if second is None:
            second = rank.submit("second")
        else:
            assert not second.is_done()
        assert rank.round()
        assert value(second) == SIZE

    on_ranks(act)


def test_names_that_all_ranks_know_are_agreed_by_bits() -> None:
    def act(rank: Rank) -> None:
        for name in "abc":  # learnt together
            rank.submit(name)
        rank.round()
        # In all three rounds the ranks have different things pending, and no message tells what.
        works = [rank.submit("abc"[rank.rank])]
        assert not rank.round()
        works.append(rank.submit("abc"[(rank.rank + 1) % SIZE]))
        assert not rank.round()
        works.append(rank.submit("abc"[(rank.rank + 2) % SIZE]))
        assert rank.round()
        assert [value(work) for work in works] == [SIZE] * 3
        assert rank.exchanges == 0

    on_ranks(act)


def test_names_that_were_exchanged_are_known_from_then_on() -> None:
    def act(rank: Rank) -> None:
        rank.submit("a")
        left = rank.submit("b") if rank.rank else None
        rank.round()
        assert rank.exchanges == 1
        again = rank.submit("a")
        rank.round()
        assert value(again) == SIZE
        assert left is None or not left.is_done()
        assert rank.exchanges == 1

    on_ranks(act)


def test_names_in_use_stay_known_where_there_are_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CAPACITY", 3)
    monkeypatch.setattr(engine, "NameSlots", lambda: NameSlots(3))

    def act(rank: Rank) -> None:
        for names in ("abc", "a", "d"):
            for name in names:
                rank.submit(name)
            rank.round()
        for name in "ac" if rank.rank else "a":  # so that only bits can tell
            rank.submit(name)
        rank.round()
        assert rank.exchanges == 0

    on_ranks(act)


def test_equal_digests_are_told_from_those_of_which_one_has_all_bits_of_the_other() -> None:
    def act(comm: Communicator) -> None:
        for digests, equal in (((1, 3), False), ((3, 1), False), ((3, 3), True), ((0, 0), False), ((0, 3), False)):
            bits = np.array([True, comm.rank == 0, False] * 4)
            found, common = agree(digests[comm.rank], bits, comm=comm, failures=comm.failures)
            assert found == equal
            assert common.tolist() == [True, False, False] * 4

    among(2, act)


def test_a_name_whose_tensor_has_changed_is_exchanged_again_and_learnt_anew() -> None:
    def act(rank: Rank) -> None:
        rank.submit("a")
        rank.round()
        changed = rank.submit("a", 2.0, dtype=torch.float64)
        extra = rank.submit("b") if rank.rank == 0 else None
        rank.round()
        assert value(changed) == 2.0 * SIZE
        assert rank.exchanges == 1
        again = rank.submit("a", 3.0, dtype=torch.float64)
        if extra is None:
            rank.submit("c")
        rank.round()
        assert value(again) == 3.0 * SIZE

    on_ranks(act)


def test_a_disagreement_is_the_same_error_on_all_ranks_and_the_rest_goes_on() -> None:
    def act(rank: Rank) -> str:
        odd = rank.submit("odd", dtype=torch.float32 if rank.rank else torch.int64)
        fine = rank.submit("fine")
        assert rank.round()
        assert value(fine) == SIZE
        with pytest.raises(MismatchError, match="Mismatched data types") as caught:
            odd.wait(0.0)
        assert rank.rounds.concluded == 2
        assert len(rank.pending) == 0
        return str(caught.value)

    assert len(set(on_ranks(act))) == 1


def test_a_rank_that_submits_a_refused_operation_later_gets_the_same_error() -> None:
    def act(rank: Rank) -> None:
        if rank.rank < 2:
            odd = rank.submit("odd", root=rank.rank, kind=Kind.BROADCAST)
        else:
            rank.submit("other")
        assert not rank.round()
        if rank.rank == 2:
            odd = rank.submit("odd", root=0, kind=Kind.BROADCAST)
            assert "odd" not in rank.pending
        with pytest.raises(MismatchError, match="root ranks"):
            odd.wait(0.0)

    on_ranks(act)


@pytest.mark.parametrize("unable", [{1}, {1, 2}, {0, 1, 2}])
def test_an_operation_that_cannot_be_taken_part_in_fails_everywhere_with_the_reason(unable: set[int]) -> None:
    def act(rank: Rank) -> None:
        work = rank.submit("a", problem="its tensor is on a GPU that is not there" if rank.rank in unable else "")
        rank.round()
        with pytest.raises(MismatchError, match=f"Rank {min(unable)} cannot take part in ALLREDUCE: its tensor"):
            work.wait(0.0)

    on_ranks(act)


def test_an_operation_that_fails_while_it_runs_is_named_and_the_next_one_runs() -> None:
    def act(rank: Rank) -> None:
        work = rank.submit("a", op="no such op")
        rank.round()
        with pytest.raises(CommError, match=r"^allreduce 'a' failed: ValueError"):
            work.wait(0.0)
        fine = rank.submit("b")
        rank.round()
        assert value(fine) == SIZE

    on_ranks(act)


def test_a_rank_that_has_joined_takes_part_in_all_reduces_with_zeros_until_all_have() -> None:
    def act(rank: Rank) -> None:
        join: ThreadWork | None = None
        for name in ("a", "b", "a"):
            if rank.rank:
                work = rank.submit(name, 1.0)
                while not work.is_done():
                    rank.round()
                assert value(work) == SIZE - 1
            else:
                join = join or rank.pending.join((0,))
                while not rank.round():
                    pass
        if join is None:
            join = rank.pending.join((rank.rank,))
        while not join.is_done():
            rank.round()
        assert rank.rounds.last_joined == 2
        works = [rank.submit("a", 5.0), rank.submit(f"of {rank.rank}")]  # all begin anew
        rank.round()
        assert value(works[0]) == 5.0 * SIZE
        assert not works[1].is_done()

    on_ranks(act)


def test_of_ranks_that_join_in_one_round_the_one_that_got_farthest_joined_last() -> None:
    def act(rank: Rank) -> int:
        join = rank.pending.join([(2, 0), (3, 1), (3, 0)][rank.rank])
        assert rank.round()
        assert join.wait(0.0)
        return rank.rounds.last_joined

    assert on_ranks(act) == [1, 1, 1]


def test_who_joined_in_an_earlier_round_did_not_join_last_however_far_it_got() -> None:
    def act(rank: Rank) -> int:
        if rank.rank == 0:
            join = rank.pending.join((9,))
        else:
            rank.submit("a")
        rank.round()
        if rank.rank:
            join = rank.pending.join((rank.rank,))
        rank.round()
        assert join.wait(0.0)
        return rank.rounds.last_joined

    assert on_ranks(act) == [2, 2, 2]


def test_after_all_have_joined_unnamed_operations_have_the_same_names_again() -> None:
    def act(rank: Rank) -> str:
        for _ in range(rank.rank):
            rank.pending.next_name("allreduce")
        rank.pending.join((0,))
        rank.round()
        return rank.pending.next_name("allreduce")

    assert on_ranks(act) == ["allreduce.noname.3"] * 3


@pytest.mark.parametrize("known", [False, True])
def test_while_a_rank_has_joined_what_needs_its_data_is_refused(known: bool) -> None:
    def act(rank: Rank) -> None:
        if known:
            rank.submit("a", kind=Kind.ALLGATHER)
            rank.round()
        if rank.rank == 0:
            rank.pending.join((0,))
        else:
            other = rank.submit("b")
        assert rank.round()  # all know that it has joined
        if rank.rank:
            assert value(other) == SIZE - 1
        work = rank.submit("a", kind=Kind.ALLGATHER) if rank.rank else None
        rank.round()
        if work is not None:
            with pytest.raises(MismatchError, match="Allgather is not supported with Join"):
                work.wait(0.0)

    on_ranks(act)


@pytest.mark.parametrize("known", [False, True])
def test_what_joined_ranks_submit_too_waits_for_them(known: bool) -> None:
    def act(rank: Rank) -> None:
        if known:
            rank.submit("a", by_all=True)
            rank.round()
        if rank.rank == 0:
            rank.pending.join((0,))
        else:
            other = rank.submit("b")
        assert rank.round()  # all know that it has joined
        if rank.rank:
            assert value(other) == SIZE - 1
        works = [rank.submit("a", by_all=True)] if rank.rank else []
        rank.round()
        assert not any(work.is_done() for work in works)
        if not rank.rank:
            works = [rank.submit("a", by_all=True)]
        rank.round()
        assert [value(work) for work in works] == [SIZE]

    on_ranks(act)


def test_who_takes_leave_ends_nothing_before_all_have() -> None:
    def act(rank: Rank) -> None:
        rank.submit("a")
        if rank.rank == 0:
            rank.pending.close()
        rank.round()
        assert not rank.rounds.ended
        rank.pending.close()
        rank.round()
        assert rank.rounds.ended

    on_ranks(act)


def test_more_names_than_there_are_bits_are_agreed_all_the_same() -> None:
    def act(rank: Rank) -> None:
        for begin in range(0, CAPACITY + 40, 200):
            works = [rank.submit(f"n{number}") for number in range(begin, begin + 200)]
            rank.round()
            assert all(work.is_done() for work in works)
        again = [rank.submit("n0"), rank.submit(f"only {rank.rank}")]
        rank.round()
        assert [work.is_done() for work in again] == [True, False]

    on_ranks(act, size=2)


def signature(name: str, *, once: bool = False, by_all: bool = False, op: str = "sum") -> Signature:
    return Signature(
        name=name, kind=Kind.ALLREDUCE, shapes=((1,),), dtypes=("float32",), op=op, once=once, by_all=by_all
    )


def slots(capacity: int, *names: str) -> NameSlots:
    made = NameSlots(capacity)
    for name in names:
        made.remember(signature(name), signature(name).digest())
    return made


def test_a_name_that_comes_once_is_not_worth_a_bit_unless_it_has_one() -> None:
    made = slots(2, "a")
    made.remember(signature("once", once=True), 1)
    assert made.slot("once") is None
    made.remember(signature("a", once=True), 7)
    assert made.digest("a") == 7


def test_the_name_that_was_not_used_for_longest_loses_its_bit_to_a_new_one() -> None:
    made = slots(3, "a", "b", "c")
    made.touch("a")
    made.touch("unknown")
    made.remember(signature("d"), 1)
    assert (made.slot("b"), made.slot("d")) == (None, 1)
    assert made.digest("b") is None
    made.remember(signature("e"), 1)
    assert (made.slot("c"), made.slot("e")) == (None, 2)
    assert made.slot("a") == 0


def test_the_bits_of_what_joined_ranks_submit_too_are_told() -> None:
    made = slots(4, "a", "b")
    made.remember(signature("c", by_all=True), 1)
    made.remember(signature("a", by_all=True), 1)
    assert sorted(made.by_all()) == [0, 2]
    made.forget("c")
    assert made.by_all() == [0]


def test_two_ranks_that_make_the_same_calls_agree_whatever_they_are() -> None:
    one, other, rng = NameSlots(5), NameSlots(5), random.Random(0)
    for _ in range(500):
        name = rng.choice("abcdefghij")
        call = rng.choice(["remember", "touch", "forget"])
        for each in (one, other):
            if call == "remember":
                each.remember(signature(name, once=name == "j"), 1)
            else:
                getattr(each, call)(name)
        bits = [one.slot(name) for name in "abcdefghij"]
        assert bits == [other.slot(name) for name in "abcdefghij"]
        taken = [bit for bit in bits if bit is not None]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(range(5))
        assert one.known(range(5)).keys() == {
            name for name, bit in zip("abcdefghij", bits, strict=True) if bit is not None
        }
