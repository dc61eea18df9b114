"""Sums of sparse tensors: entries at one position are added, for any numbers of entries."""

import pytest
import torch
from fakes.meshes import among

from sirtaki.comm.collectives.engine import EagerEngine, SparseSum
from sirtaki.comm.control.communicator import Communicator
from sirtaki.errors import MismatchError

SIZE = 3


def entries(*places: tuple[int, float], size: tuple[int, ...] = (5,)) -> torch.Tensor:
    indices = torch.tensor([[place for place, _ in places]], dtype=torch.int64).reshape(1, -1)
    values = torch.tensor([value for _, value in places])
    rows = values.reshape(-1, *(1 for _ in size[1:])).expand(-1, *size[1:])
    return torch.sparse_coo_tensor(indices, rows, size, check_invariants=True)


def summed(tensors: list[torch.Tensor], name: str | None = "x") -> list[torch.Tensor]:
    def act(comm: Communicator) -> torch.Tensor:
        engine = EagerEngine(comm, comm.failures)
        try:
            return SparseSum(engine, tensors[comm.rank], name).result()
        finally:
            engine.close()

    return among(len(tensors), act)


def test_rows_of_several_dimensions_keep_their_form() -> None:
    tensors = [entries((rank, 1.0 + rank), size=(4, 2, 3)) for rank in range(SIZE)]
    wanted = sum(tensor.to_dense() for tensor in tensors)
    for found in summed(tensors):
        assert found.shape == (4, 2, 3)
        assert found.sparse_dim() == 1
        assert torch.equal(found.to_dense(), wanted)


def test_several_sparse_dimensions_and_another_dtype() -> None:
    dense = torch.tensor([[0, 2], [3, 0]], dtype=torch.int64)
    for found in summed([dense.to_sparse()] * 2):
        assert found.dtype is torch.int64
        assert torch.equal(found.to_dense(), 2 * dense)


def test_where_no_rank_has_entries_the_sum_has_none() -> None:
    for found in summed([entries()] * 2):
        assert found._nnz() == 0
        assert found.shape == (5,)


def test_two_parts_under_one_name_are_distinguished_and_a_disagreement_is_an_error_on_all() -> None:
    def act(comm: Communicator) -> None:
        engine = EagerEngine(comm, comm.failures)
        try:
            mine = entries((0, 1.0)) if comm.rank else entries((0, 1.0), size=(5, 2))
            with pytest.raises(MismatchError, match="shape"):
                SparseSum(engine, mine, "x").result()
            assert SparseSum(engine, entries((0, 1.0)), "y").wait(None)
        finally:
            engine.close()

    among(2, act)


def test_an_interrupted_wait_can_be_continued() -> None:
    def act(comm: Communicator) -> list[float]:
        engine = EagerEngine(comm, comm.failures)
        try:
            if comm.rank == 0:
                sum_ = SparseSum(engine, entries((1, 1.0)), "x")
                assert not sum_.wait(lambda: True)
                comm.send(torch.zeros(1).numpy(), 1)()
            else:
                ready = comm.receive(torch.zeros(1).numpy(), 0)
                while not ready():
                    pass
                sum_ = SparseSum(engine, entries((1, 1.0)), "x")
            values: list[float] = sum_.result().to_dense().tolist()
            return values
        finally:
            engine.close()

    assert among(2, act) == [[0.0, 2.0, 0.0, 0.0, 0.0]] * 2
