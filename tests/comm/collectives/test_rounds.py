"""Rounds: operations pending on all ranks run, and a disagreement is an error on all of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.meshes import among

from sirtaki.comm.collectives import engine
from sirtaki.comm.collectives.engine import CAPACITY, EagerWork, NameSlots, Pending, Rounds
from sirtaki.comm.collectives.operations import CARRIED_BYTES, CollectiveKind, Signature
from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.transports.contract import ThreadWork
from sirtaki.errors import CommError, MismatchError

SIZE = 3


@pytest.fixture(autouse=True, params=[engine.GATHERED_RANKS, 0], ids=["gathered", "reduced"])
def few_or_many_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a round are gathered where ranks are few, and reduced where they are many."""
    monkeypatch.setattr(engine, "GATHERED_RANKS", request.param)


class Rank:
    """One rank's pending operations, and rounds over them."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.pending = Pending("")
        self.rounds = Rounds(comm, comm.failures, self.pending)
        self.exchanges = 0
        exchange = self.rounds._exchange

        def counting(*args: Any) -> Any:
            self.exchanges += 1
            return exchange(*args)

        self.rounds._exchange = counting  # type: ignore[method-assign]

    def submit(
        self, name: str, value: float = 1.0, *, kind: CollectiveKind = CollectiveKind.ALLREDUCE, **rest: Any
    ) -> EagerWork:
        tensors = (
            [] if kind is CollectiveKind.BARRIER else [torch.full((2,), value, dtype=rest.pop("dtype", torch.float32))]
        )
        op = {"op": "sum"} if kind is CollectiveKind.ALLREDUCE else {}
        work = EagerWork(Signature.of(tensors, name=name, kind=kind, **{**op, **rest}), tensors)
        self.pending.add(work, wake=False)
        return work

    def round(self) -> bool:
        there = self.pending.snapshot()
        assert there is not None
        return self.rounds.run(*there)


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


def test_operations_pending_on_all_ranks_run_in_one_round_without_an_exchange() -> None:
    def act(rank: Rank) -> None:
        names = ["b", "a"] if rank.rank else ["a", "b"]
        works = {name: rank.submit(name, rank.rank + 1.0) for name in names}
        assert rank.round()
        assert [value(works[name]) for name in "ab"] == [6.0, 6.0]
        assert rank.exchanges == 0
        assert len(rank.pending) == 0
        assert rank.rounds.completed == 2

    on_ranks(act)


DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex128)


@pytest.mark.lengthy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 2), (1, 1, 1), (5, 3)])
def test_small_operations_take_no_message_of_their_own_where_ranks_are_few(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    performed: list[str] = []
    perform = engine.perform

    def noting(batch: Any, ranks: Any) -> Any:
        performed.extend(signature.name for signature, _ in batch)
        return perform(batch, ranks)

    monkeypatch.setattr(engine, "perform", noting)
    tensors = [(torch.arange(math.prod(shape)).reshape(shape) + rank).to(dtype) for rank in range(SIZE)]
    strided = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in tensors]
    op, factors = ("max", (1.0, 1.0)) if dtype is torch.bool else ("sum", (2.0, 0.5))
    exact = torch.complex128 if dtype.is_complex else torch.float64
    wanted = torch.stack(tensors).to(exact)
    wanted = wanted.amax(0) if dtype is torch.bool else wanted.sum(0)

    def act(rank: Rank) -> None:
        def submit(name: str, kind: CollectiveKind, **rest: Any) -> EagerWork:
            mine = [] if kind is CollectiveKind.BARRIER else [strided[rank.rank]]
            work = EagerWork(Signature.of(mine, name=name, kind=kind, **rest), mine)
            rank.pending.add(work, wake=False)
            return work

        reduced = submit("reduced", CollectiveKind.ALLREDUCE, op=op, factors=factors)
        copied = submit("copied", CollectiveKind.BROADCAST, root=1)
        met = submit("met", CollectiveKind.BARRIER)
        assert rank.round()
        assert met.wait(0.0)
        for work, value in ((reduced, wanted), (copied, tensors[1].to(exact))):
            assert work.wait(0.0)
            (result,) = work.results
            assert (result.dtype, result.shape, result.is_contiguous()) == (dtype, torch.Size(shape), True)
            assert torch.equal(result.to(exact), value)

    on_ranks(act)
    assert sorted(performed) == ([] if engine.GATHERED_RANKS else sorted(["copied", "met", "reduced"] * SIZE))


def test_operations_beyond_the_messages_size_run_with_the_others() -> None:
    def act(rank: Rank) -> None:
        tensors = [torch.full((CARRIED_BYTES // 4,), float(rank.rank))]
        large = EagerWork(Signature.of(tensors, name="large", kind=CollectiveKind.ALLREDUCE, op="sum"), tensors)
        rank.pending.add(large, wake=False)
        small = rank.submit("small")
        halves = rank.submit("halves", dtype=torch.bfloat16)
        assert rank.round()
        assert large.wait(0.0)
        assert torch.equal(large.results[0], torch.full((CARRIED_BYTES // 4,), 3.0))
        assert (value(small), value(halves)) == (SIZE, SIZE)

    on_ranks(act)


def test_operations_pending_on_some_ranks_wait_for_the_others() -> None:
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


def test_names_learnt_by_all_ranks_are_agreed_by_bits() -> None:
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


def test_exchanged_names_are_learnt() -> None:
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


def test_names_in_use_stay_learnt_if_there_are_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_name_with_a_changed_tensor_is_exchanged_and_learnt_again() -> None:
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


def test_a_disagreement_is_the_same_error_on_all_ranks_and_other_operations_run() -> None:
    def act(rank: Rank) -> str:
        odd = rank.submit("odd", dtype=torch.float32 if rank.rank else torch.int64)
        fine = rank.submit("fine")
        assert rank.round()
        assert value(fine) == SIZE
        with pytest.raises(MismatchError, match="Mismatched data types") as caught:
            odd.wait(0.0)
        assert rank.rounds.completed == 2
        assert len(rank.pending) == 0
        return str(caught.value)

    assert len(set(on_ranks(act))) == 1


def test_a_rank_that_submits_a_refused_operation_later_gets_the_same_error() -> None:
    def act(rank: Rank) -> None:
        if rank.rank < 2:
            odd = rank.submit("odd", root=rank.rank, kind=CollectiveKind.BROADCAST)
        else:
            rank.submit("other")
        assert not rank.round()
        if rank.rank == 2:
            odd = rank.submit("odd", root=0, kind=CollectiveKind.BROADCAST)
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
        with pytest.raises(CommError, match=r"^allreduce 'a' failed: (Value|Key)Error"):
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


def test_a_rank_that_joined_in_an_earlier_round_is_not_the_last_to_join() -> None:
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
def test_while_a_rank_has_joined_operations_that_need_its_data_are_rejected(known: bool) -> None:
    def act(rank: Rank) -> None:
        if known:
            rank.submit("a", kind=CollectiveKind.ALLGATHER)
            rank.round()
        if rank.rank == 0:
            rank.pending.join((0,))
        else:
            other = rank.submit("b")
        assert rank.round()  # all know that it has joined
        if rank.rank:
            assert value(other) == SIZE - 1
        work = rank.submit("a", kind=CollectiveKind.ALLGATHER) if rank.rank else None
        rank.round()
        if work is not None:
            with pytest.raises(MismatchError, match="Allgather is not supported with Join"):
                work.wait(0.0)

    on_ranks(act)


@pytest.mark.parametrize("known", [False, True])
def test_operations_that_joined_ranks_submit_too_wait_for_them(known: bool) -> None:
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


def test_a_rank_that_leaves_ends_no_operation_before_all_leave() -> None:
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
