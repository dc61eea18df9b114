"""All-gather: rows by rank, as many as each has, and gradients back to those who gave them."""

import pytest
import torch
from fakes.jobs import on_jobs

from sirtaki.errors import MismatchError
from sirtaki.torch.collectives import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
    synchronize,
)
from sirtaki.torch.process_sets import ProcessSet, add_process_set

SIZE = 3


def rows(rank: int, *rest: int) -> torch.Tensor:
    return torch.full((rank, *rest), float(rank))


def test_every_form_gives_the_rows_of_all_ranks() -> None:
    wanted = torch.cat([rows(rank, 2) for rank in range(SIZE)])

    def act(rank: int) -> None:
        for found in (
            allgather(rows(rank, 2)),
            synchronize(allgather_async(rows(rank, 2))),
            grouped_allgather([rows(rank, 2)])[0],
            synchronize(grouped_allgather_async([rows(rank, 2)]))[0],
        ):
            assert torch.equal(found, wanted)

    on_jobs(SIZE, act)


def test_members_of_a_group_may_differ() -> None:
    def act(rank: int) -> None:
        one, other = grouped_allgather([rows(rank), torch.tensor([[rank]])])
        assert one.tolist() == [1.0, 2.0, 2.0]
        assert other.tolist() == [[0], [1], [2]]
        assert other.dtype is torch.int64

    on_jobs(SIZE, act)


def test_gradients_are_averaged_and_go_back_to_whose_rows_they_are_of() -> None:
    weights = torch.arange(1.0, 4.0)

    def act(rank: int) -> None:
        mine = rows(rank).requires_grad_()
        (allgather(mine) * weights * (rank + 1.0)).sum().backward()
        assert mine.grad is not None
        expected = {0: [], 1: [2.0], 2: [4.0, 6.0]}[rank]  # of ranks 1, 2 and 3 times the weights: twice on average
        assert mine.grad.tolist() == pytest.approx(expected)
        with torch.no_grad():
            assert not allgather(mine).requires_grad

    on_jobs(SIZE, act)


def test_within_a_set_rows_are_those_of_its_ranks() -> None:
    def act(rank: int) -> None:
        there = add_process_set(ProcessSet([0, 2]))
        if rank != 1:
            mine = torch.full((1,), float(rank), requires_grad=True)
            found = allgather(mine, process_set=there)
            assert found.tolist() == [0.0, 2.0]
            (found * torch.tensor([5.0, 7.0])).sum().backward()
            assert mine.grad.tolist() == [5.0 if rank == 0 else 7.0]  # type: ignore[union-attr]

    on_jobs(SIZE, act)


def test_what_has_no_rows_is_refused_and_the_others_hear_of_it() -> None:
    def act(rank: int) -> None:
        if rank == 0:
            with pytest.raises(IndexError, match="along their first dimension"):
                allgather(torch.tensor(1.0), name="x")
        else:
            with pytest.raises(MismatchError, match="Rank 0 cannot take part in ALLGATHER"):
                allgather(torch.ones(1), name="x")

    on_jobs(SIZE, act)
