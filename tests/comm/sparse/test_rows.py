"""Rows: added up where they meet, and as they travel."""

import pytest
import torch

from sirtaki.comm.sparse.worker import ALIGNMENT_BYTES, RowFormat, Rows, coalesced, disjoint, merged


def sparse(indices: list[int], values: list[float], *, rows: int = 9, width: int = 2) -> torch.Tensor:
    spread = torch.tensor(values)[:, None].expand(-1, width)
    return torch.sparse_coo_tensor(torch.tensor([indices]).long(), spread, (rows, width), check_invariants=True)


def test_rows_that_are_there_several_times_are_added_up() -> None:
    rows = coalesced(sparse([4, 1, 4, 0], [1.0, 2.0, 3.0, 0.0]))
    assert rows.indices.tolist() == [0, 1, 4]
    assert rows.values.tolist() == [[0.0] * 2, [2.0] * 2, [4.0] * 2]


def test_a_coalesced_gradient_is_copied_and_one_without_columns_has_one() -> None:
    gradient = sparse([1, 3], [1.0, 2.0]).coalesce()
    rows = coalesced(gradient)
    gradient.values().mul_(9.0)
    assert rows.values[:, 0].tolist() == [1.0, 2.0]
    flat = torch.sparse_coo_tensor([[5, 5]], torch.tensor([1.0, 2.0]), (9,), check_invariants=True)
    assert coalesced(flat).values.tolist() == [[3.0]]


def test_halves_are_added_up_in_more_than_halves() -> None:
    many = torch.full((4000, 1), 1.0, dtype=torch.float16)
    gradient = torch.sparse_coo_tensor(torch.zeros(1, 4000).long(), many, (2, 1), check_invariants=True)
    assert coalesced(gradient).values.item() == 4000.0
    parts = [Rows(torch.tensor([0]), torch.full((1, 1), 1.0, dtype=torch.bfloat16))] * 300
    assert merged(parts).values.item() == 300.0


def test_rows_of_ranks_are_merged_and_put_beside_each_other() -> None:
    one, other = coalesced(sparse([4, 1], [1.0, 2.0])), coalesced(sparse([4, 7], [8.0, 16.0]))
    total = merged([one, other, coalesced(sparse([], []))])
    assert total.indices.tolist() == [1, 4, 7]
    assert total.values[:, 0].tolist() == [2.0, 9.0, 16.0]
    apart = disjoint([coalesced(sparse([8, 2], [1.0, 2.0])), one])
    assert apart.indices.tolist() == [1, 2, 4, 8]
    assert apart.values[:, 0].tolist() == [2.0, 2.0, 1.0, 1.0]
    assert apart.of(torch.tensor([1, 3])).indices.tolist() == [2, 8]


@pytest.mark.parametrize("n_rows", [9, 2**31, 2**31 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64])
def test_what_travels_arrives(n_rows: int, dtype: torch.dtype) -> None:
    form = RowFormat(n_rows, 3, dtype)
    rows = Rows(torch.tensor([0, 5, n_rows - 1]), torch.arange(9).view(3, 3).to(dtype))
    parcel = form.pack(rows)
    assert len(parcel) == form.parcel_bytes(3)
    assert len(parcel) % ALIGNMENT_BYTES == 0
    found = form.unpack(parcel, 3)
    assert found.indices.tolist() == rows.indices.tolist()
    assert torch.equal(found.values, rows.values)
    assert form.index_dtype.itemsize == (4 if n_rows <= 2**31 else 8)
    assert len(form.unpack(form.pack(rows.of(torch.tensor([], dtype=torch.int64))), 0)) == 0
