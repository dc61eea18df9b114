"""All-to-all: rows dealt out evenly or as told, and gradients back the way they came."""

from typing import Any

import pytest
import torch
from fakes.jobs import on_jobs

from sirtaki.errors import MismatchError
from sirtaki.torch.collectives import alltoall, alltoall_async, synchronize

SIZE = 3


def test_without_splits_everybody_gets_as_much_and_nothing_else_is_told() -> None:
    def act(rank: int) -> None:
        tensor = torch.arange(6.0) + 10 * rank
        wanted = [10.0 * sender + 2 * rank + number for sender in range(SIZE) for number in range(2)]
        assert alltoall(tensor).tolist() == wanted
        assert synchronize(alltoall_async(tensor)).tolist() == wanted
        assert alltoall(torch.empty(0, 4)).shape == (0, 4)

    on_jobs(SIZE, act)


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, lambda counts: torch.tensor(counts, dtype=torch.int8)])
def test_with_splits_it_is_told_how_many_came_from_whom(form: Any) -> None:
    def act(rank: int) -> None:
        tensor = torch.full((rank + 2, 2), float(rank))  # rank 0: two rows, …
        received, counts = alltoall(tensor, splits=form([rank, 0, 1]))
        assert counts.dtype is torch.int32
        assert counts.tolist() == ([0, 1, 2] if rank == 0 else [0] * 3 if rank == 1 else [1, 1, 1])
        wanted = {0: [1.0, 2.0, 2.0], 1: [], 2: [0.0, 1.0, 2.0]}[rank]
        assert received[:, 0].tolist() == wanted
        assert received.shape == (len(wanted), 2)

    on_jobs(SIZE, act)


def test_gradients_go_back_and_rows_that_went_nowhere_get_zeros() -> None:
    def act(rank: int) -> None:
        tensor = torch.ones(3, 2, requires_grad=True)
        received, _ = alltoall(tensor, splits=[1, 1, 0])
        (received * (rank + 1.0)).sum().backward()
        assert tensor.grad is not None
        assert tensor.grad[:, 0].tolist() == [1.0, 2.0, 0.0]
        even = torch.ones(SIZE, requires_grad=True)
        (alltoall(even) * (rank + 1.0)).sum().backward()
        assert even.grad.tolist() == [1.0, 2.0, 3.0]  # type: ignore[union-attr]

    on_jobs(SIZE, act)


@pytest.mark.parametrize(
    ("rows", "splits", "words"),
    [
        (4, None, "4 rows cannot be dealt out evenly to 3 ranks"),
        (None, None, "a tensor without dimensions has none"),
        (4, [1, 1], r"splits takes 3 numbers of rows, one for each rank, not \[1, 1\]"),
        (4, [1, -1, 1], "splits takes 3 numbers"),
        (4, [[1, 1, 1]], "splits takes 3 numbers"),
        (4, [1.0, 1.0, 1.0], "splits takes whole numbers of rows"),
        (4, [True, True, True], "splits takes whole numbers of rows"),
        (4, "abc", "splits takes whole numbers of rows"),
        (4, [2, 2, 1], r"Sum of splits entries is greater than the first dimension of tensor: \[2, 2, 1\] of 4 rows"),
    ],
)
def test_splits_that_do_not_fit_are_refused_and_the_others_hear_of_it(
    rows: int | None, splits: Any, words: str
) -> None:
    def act(rank: int) -> None:
        if rank == 0:
            with pytest.raises(ValueError, match=words):
                alltoall(torch.tensor(1.0) if rows is None else torch.ones(rows), splits=splits, name="x")
        else:
            with pytest.raises(MismatchError, match="Rank 0 cannot take part in ALLTOALL"):
                alltoall(torch.ones(3), name="x")

    on_jobs(SIZE, act)
