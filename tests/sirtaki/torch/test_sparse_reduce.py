"""Sparse all-reduce as scripts call it."""

import pytest
import torch
from fakes.jobs import on_jobs

from sirtaki.torch.collectives import Average, Max, Sum, sparse_allreduce_async
from sirtaki.torch.process_sets import ProcessSet, add_process_set, global_process_set

SIZE = 3


def entries(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rank r has ones in places 0 … r."""
    places = torch.arange(rank + 1).reshape(1, -1)
    return torch.sparse_coo_tensor(places, torch.ones(rank + 1, dtype=dtype), (4,), check_invariants=True)


def test_averages_of_integers_are_truncated_entry_by_entry() -> None:
    def act(rank: int) -> None:
        found = sparse_allreduce_async(-7 * entries(rank, torch.int64), "x", Average)()
        assert found.dtype is torch.int64
        assert found.to_dense().tolist() == [-6, -4, -2, 0]  # -7 / 3 = -2 for each entry

    on_jobs(SIZE, act)


def test_a_process_set_averages_over_its_own_ranks() -> None:
    def act(rank: int) -> None:
        there = add_process_set(ProcessSet([0, 2]))
        if rank != 1:
            found = sparse_allreduce_async(entries(rank), "x", Average, there)()
            assert found.to_dense().tolist() == [1.0, 0.5, 0.5, 0.0]

    on_jobs(SIZE, act)


def test_dense_tensors_and_other_ops_are_refused() -> None:
    with pytest.raises(ValueError, match=r"requires a sparse COO tensor, not torch\.strided; use allreduce"):
        sparse_allreduce_async(torch.ones(2), "x", Sum, global_process_set)
    with pytest.raises(ValueError, match="requires op=Average or op=Sum, not 4"):
        sparse_allreduce_async(entries(0), "x", Max)
