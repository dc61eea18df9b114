"""Two gradients at right angles are added, parallel ones averaged, and all ranks get the same bits."""

import math

import pytest
import torch
from fakes.meshes import among

from sirtaki.comm.collectives.operations import adasum_, combine
from sirtaki.comm.control.communicator import Communicator, Test
from sirtaki.comm.control.failure import poll_until


def tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Adasum of all, neighbours first (Maleki et al., fig. 2)."""
    if len(vectors) == 1:
        return vectors[0]
    return combine(tree(vectors[: len(vectors) // 2]), tree(vectors[len(vectors) // 2 :]))


def over(vectors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank finds in its vector's place."""

    def act(comm: Communicator) -> torch.Tensor:
        mine, waits = vectors[comm.rank].clone(), list[Test]()

        def wait(test: Test) -> None:
            waits.append(test)
            poll_until(test, failures=comm.failures)

        adasum_(mine, comm=comm, wait=wait)
        assert len(waits) == 2 * math.log2(comm.size)  # sent and received once a round
        return mine

    return among(len(vectors), act)


def test_vectors_at_right_angles_are_added() -> None:
    assert combine(torch.tensor([2.0, 0.0]), torch.tensor([0.0, -3.0])).tolist() == [2.0, -3.0]


@pytest.mark.parametrize("factor", [1.0, 0.25, 7.0])
def test_parallel_vectors_are_averaged(factor: float) -> None:
    one = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(combine(one, factor * one), one * (1 + factor) / 2)


def test_opposite_vectors_keep_their_difference_larger() -> None:
    # a·b = -|a|², so each counts one and a half times: the sum is what the equation says, and not nothing.
    one = torch.tensor([2.0, 0.0])
    assert combine(one, -2 * one).tolist() == [2 * 2.0 - 1.25 * 4.0, 0.0]


def test_zeros_leave_the_other_as_it_is() -> None:
    vector, zeros = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert combine(zeros, vector).tolist() == [1.0, 2.0]
    assert combine(vector, zeros).tolist() == [1.0, 2.0]
    assert combine(zeros, zeros).tolist() == [0.0, 0.0]


def test_squares_that_a_float32_cannot_hold_are_no_trouble() -> None:
    large = torch.tensor([1e30, 0.0])
    assert combine(large, torch.tensor([0.0, 1e30])).tolist() == pytest.approx([1e30, 1e30])
    small = torch.tensor([1e-30, 0.0])
    assert (combine(small, small) / small[0]).tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_has_the_dtype_and_the_inputs_stay(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1.0, 1.0], dtype=dtype), torch.tensor([0.5, 0.0], dtype=dtype)
    assert combine(one, other).dtype is dtype
    assert one.tolist() == [1.0, 1.0]


def test_vectors_without_elements_stay_so() -> None:
    assert combine(torch.empty(0), torch.empty(0)).numel() == 0


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_combine_in_a_balanced_tree_and_have_the_same_bits(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    vectors = [torch.randn(33, generator=generator) for _ in range(size)]
    found = over(vectors)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], tree(vectors))


def test_ranks_that_have_the_same_keep_it_and_ranks_at_right_angles_add_up() -> None:
    same = torch.tensor([3.0, -1.0])
    assert over([same] * 4)[0].tolist() == pytest.approx(same.tolist())
    assert over(list(torch.eye(4)))[3].tolist() == [1.0] * 4
