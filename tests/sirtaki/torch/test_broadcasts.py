"""Broadcast: the root's values everywhere, also within a set, where the root is named by its rank among all."""

import pytest
import torch
from fakes.jobs import on_jobs

from sirtaki.errors import MismatchError
from sirtaki.torch.collectives import broadcast, broadcast_, broadcast_async, broadcast_async_, synchronize
from sirtaki.torch.process_sets import ProcessSet, add_process_set

SIZE = 3


@pytest.mark.parametrize("root", range(SIZE))
def test_every_form_gives_the_roots_values(root: int) -> None:
    def act(rank: int) -> None:
        mine = torch.full((2,), float(rank))
        for found in (broadcast(mine, root), synchronize(broadcast_async(mine, root))):
            assert found.tolist() == [root] * 2
        assert mine.tolist() == [rank] * 2
        for form in (broadcast_, lambda it, root: synchronize(broadcast_async_(it, root))):
            mine = torch.full((2,), float(rank))
            assert form(mine, root) is mine
            assert mine.tolist() == [root] * 2

    on_jobs(SIZE, act)


def test_gradients_are_averaged_for_the_root_and_zeros_elsewhere() -> None:
    def act(rank: int) -> None:
        mine = torch.ones(2, requires_grad=True)
        (broadcast(mine, 1) * (rank + 1.0)).sum().backward()
        assert mine.grad is not None
        assert mine.grad.tolist() == ([2.0, 2.0] if rank == 1 else [0.0, 0.0])
        with torch.no_grad():
            assert not broadcast(mine, 1).requires_grad

    on_jobs(SIZE, act)


def test_within_a_set_the_root_is_named_as_everywhere() -> None:
    def act(rank: int) -> None:
        there = add_process_set(ProcessSet([0, 2]))
        if rank == 1:
            with pytest.raises(ValueError, match="rank 1 is not in the process set"):
                broadcast(torch.zeros(1), 0, process_set=there)
            return
        mine = torch.full((1,), float(rank), requires_grad=True)
        found = broadcast(mine, 2, process_set=there)
        assert found.item() == 2.0
        found.sum().backward()
        assert mine.grad.item() == (1.0 if rank == 2 else 0.0)  # type: ignore[union-attr]
        with pytest.raises((ValueError, MismatchError), match=r"root_rank 1 is not one of the ranks \[0, 2\]"):
            broadcast(torch.zeros(1), 1, process_set=there)

    on_jobs(SIZE, act)


def test_ranks_that_name_different_roots_all_hear_of_it() -> None:
    def act(rank: int) -> None:
        with pytest.raises(MismatchError, match=r"root ranks .*: rank 0 has 0, ranks 1, 2 have 1"):
            broadcast(torch.zeros(1), min(rank, 1), name="x")

    on_jobs(SIZE, act)


def test_ranks_of_a_process_set_are_named_by_their_rank_among_all() -> None:
    def act(rank: int) -> None:
        some = add_process_set([1, 2])
        if rank:
            with pytest.raises(MismatchError, match=r"data types .*: rank 1 has float32, rank 2 has int64"):
                broadcast(torch.zeros(1, dtype=torch.int64 if rank == 2 else torch.float32), 1, process_set=some)

    on_jobs(3, act)
