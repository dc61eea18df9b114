"""Handles: each is awaited once, by any thread, and a rank that cannot take part does not block its peers."""

import pytest
import torch
from fakes.jobs import on_jobs
from fakes.meshes import until

from sirtaki.errors import MismatchError
from sirtaki.torch import collectives
from sirtaki.torch.collectives import (
    allreduce,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
    synchronize_all,
)
from sirtaki.torch.process_sets import add_process_set, engine_of, global_process_set

SIZE = 2


def test_a_handle_gives_the_result_once() -> None:
    def act(rank: int) -> None:
        handle = allreduce_async(torch.ones(2), average=None, op=collectives.Sum)
        assert synchronize(handle).tolist() == [2.0, 2.0]
        assert synchronize(handle) is None
        assert synchronize(-1) is None
        targets = [torch.full((2,), 5.0, requires_grad=True), torch.full((3,), 5.0)]
        found = synchronize(grouped_allreduce_async_(targets, op=collectives.Average))
        assert [one is other for one, other in zip(found, targets, strict=True)] == [True, True]
        assert targets[0].requires_grad

    on_jobs(SIZE, act)


def test_results_can_be_polled_without_a_wait() -> None:
    def act(rank: int) -> None:
        assert poll(-1)
        if rank == 0:
            handle = allreduce_async(torch.ones(1), name="x", op=collectives.Sum)
            assert not poll(handle)
            allreduce_async(torch.ones(1), name="go")
        else:
            allreduce(torch.ones(1), name="go")
            handle = allreduce_async(torch.ones(1), name="x", op=collectives.Sum)
        until(lambda: poll(handle))
        assert synchronize(handle).item() == 2.0
        assert poll(handle)

    on_jobs(SIZE, act)


@pytest.mark.parametrize(
    ("name", "grouped", "full"),
    [("x", False, "allreduce.x"), ("x", True, "grouped_allreduce.x"), (None, False, "allreduce.noname.1")],
)
def test_names_contain_the_kind_and_unnamed_operations_are_counted(name: str | None, grouped: bool, full: str) -> None:
    def start() -> int:
        if grouped:
            return grouped_allreduce_async_([torch.ones(1)], name=name)
        return allreduce_async(torch.ones(1), name=name)

    def act(rank: int) -> None:
        if rank == 0:
            handle = start()
            assert full in engine_of(global_process_set).pending
            allreduce_async(torch.ones(1), name="go")
        else:
            allreduce(torch.ones(1), name="go")
            handle = start()
        synchronize(handle)

    on_jobs(SIZE, act)


def test_of_several_all_end_before_the_first_error_is_raised() -> None:
    def act(rank: int) -> None:
        fine = torch.zeros(1)
        started = [
            allreduce_async(torch.ones(1 + rank), name="a"),  # shapes differ
            allreduce_async_(fine.fill_(1.0), name="b", op=collectives.Sum),
            allreduce_async(torch.ones(1), name="c", op=collectives.Sum if rank else collectives.Max),
        ]
        with pytest.raises(MismatchError, match=r"tensor shapes of 'allreduce.a': rank 0 has \[1\], rank 1 has \[2\]"):
            synchronize_all(started)
        assert fine.item() == SIZE
        assert [synchronize(handle) for handle in started] == [None] * 3
        assert synchronize_all([]) == []

    on_jobs(SIZE, act)


@pytest.mark.parametrize("wrong", ["list", "sparse", "root"])
def test_a_rank_that_rejects_an_operation_sends_its_peers_the_reason(wrong: str) -> None:
    tensor = {"list": [1.0], "sparse": torch.eye(2).to_sparse(), "root": torch.ones(1)}[wrong]
    why = {"list": "not list", "sparse": "see sparse_allreduce_async", "root": "root_rank 7 is not one of"}[wrong]

    def act(rank: int) -> None:
        if rank == 0:
            with pytest.raises(ValueError, match=why):
                broadcast_async(tensor, 7 if wrong == "root" else 0, name="x")  # type: ignore[arg-type]
        else:
            with pytest.raises(MismatchError, match=f"Rank 0 cannot take part in BROADCAST: .*{why}"):
                synchronize(broadcast_async(torch.ones(1), 0, name="x"))

    on_jobs(SIZE, act)


def test_an_operation_in_place_leaves_the_tensor_alone_until_it_is_synchronised() -> None:
    def act(rank: int) -> None:
        tensor = torch.full((2,), rank + 1.0)
        handle = allreduce_async_(tensor, op=collectives.Sum, name="x")
        assert tensor.tolist() == [rank + 1.0] * 2
        synchronize(handle)
        assert tensor.tolist() == [3.0, 3.0]

    on_jobs(SIZE, act)


def test_ranks_of_a_process_set_are_named_by_their_rank_among_all() -> None:
    def act(rank: int) -> None:
        some = add_process_set([1, 2])
        if rank:
            with pytest.raises(MismatchError, match=r"data types .*: rank 1 has float32, rank 2 has int64"):
                broadcast(torch.zeros(1, dtype=torch.int64 if rank == 2 else torch.float32), 1, process_set=some)

    on_jobs(3, act)
