"""All-reduce in all its forms: new or in place, alone or in groups, now or later, with gradients."""

from typing import Any

import pytest
import torch
from fakes.jobs import on_jobs

from sirtaki.errors import MismatchError
from sirtaki.torch.collectives import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    synchronize,
)
from sirtaki.torch.compression import Compression
from sirtaki.torch.process_sets import ProcessSet, add_process_set

SIZE = 3


def own(rank: int) -> torch.Tensor:
    return torch.tensor([rank + 1.0, 4.0 - rank])


OPS = [
    (None, [2.0, 3.0]),
    (Average, [2.0, 3.0]),
    (Sum, [6.0, 9.0]),
    (Min, [1.0, 2.0]),
    (Max, [3.0, 4.0]),
    (Product, [6.0, 24.0]),
]


@pytest.mark.parametrize(("op", "wanted"), OPS)
def test_every_form_gives_the_same(op: int | None, wanted: list[float]) -> None:
    def act(rank: int) -> None:
        tensor = own(rank)
        new = [
            allreduce(tensor, op=op),
            synchronize(allreduce_async(tensor, op=op)),
            *grouped_allreduce([tensor], op=op),
            *synchronize(grouped_allreduce_async([tensor], op=op)),
        ]
        assert torch.equal(tensor, own(rank))
        assert [each.tolist() for each in new] == [wanted] * 4
        for form in (allreduce_, lambda it, op: synchronize(allreduce_async_(it, op=op))):
            tensor = own(rank)
            assert form(tensor, op=op) is tensor
            assert tensor.tolist() == wanted
        for group in (grouped_allreduce_, lambda them, op: synchronize(grouped_allreduce_async_(them, op=op))):
            tensors = [own(rank), 2 * own(rank)]
            found = group(tensors, op=op)
            assert [one is other for one, other in zip(found, tensors, strict=True)] == [True, True]
            assert tensors[0].tolist() == wanted

    on_jobs(SIZE, act)


def test_factors_and_averages_multiply() -> None:
    def act(rank: int) -> None:
        found = allreduce(torch.ones(1), prescale_factor=2.0, postscale_factor=5.0)
        assert found.item() == pytest.approx(10.0)
        found = allreduce(torch.ones(1), op=Sum, prescale_factor=2.0, postscale_factor=5.0)
        assert found.item() == 30.0

    on_jobs(SIZE, act)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_averages_of_integers_are_truncated(dtype: torch.dtype) -> None:
    def act(rank: int) -> None:
        assert allreduce(torch.tensor([rank + 1, 0, 5], dtype=dtype)).tolist() == [2, 0, 5]
        assert allreduce(torch.tensor([rank], dtype=dtype)).dtype is dtype

    on_jobs(SIZE, act)


def test_what_is_compressed_comes_back_in_its_dtype() -> None:
    def act(rank: int) -> None:
        fine = torch.tensor([1.0 + 2**-12])
        assert allreduce(fine).item() == 1.0 + 2**-12
        assert allreduce(fine, compression=Compression.fp16).item() == 1.0
        one, other = grouped_allreduce([fine, torch.tensor([3])], compression=Compression.fp16, op=Sum)
        assert (one.dtype, one.item(), other.dtype, other.item()) == (torch.float32, 3.0, torch.int64, 9)

    on_jobs(SIZE, act)


@pytest.mark.parametrize("op", [Average, Sum])
def test_the_gradient_is_reduced_like_the_values(op: int) -> None:
    def act(rank: int) -> None:
        tensor = own(rank).requires_grad_()
        (allreduce(tensor, op=op, prescale_factor=2.0) * (rank + 1.0)).sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.tolist() == pytest.approx([2.0 * (2.0 if op == Average else 6.0)] * 2)
        pair = [own(rank).requires_grad_(), own(rank)]
        results = grouped_allreduce(pair, op=op)
        (results[0] * 3.0).sum().backward()
        assert pair[0].grad.tolist() == pytest.approx([3.0 if op == Average else 9.0] * 2)  # type: ignore[union-attr]
        with torch.no_grad():
            assert not allreduce(tensor, op=op).requires_grad

    on_jobs(SIZE, act)


def test_a_process_set_averages_over_its_own_ranks() -> None:
    def act(rank: int) -> None:
        there = add_process_set(ProcessSet([0, 2]))
        if rank != 1:
            assert allreduce(own(rank), process_set=there).tolist() == [2.0, 3.0]
            assert allreduce(own(rank), op=Sum, process_set=there).tolist() == [4.0, 6.0]
        else:
            with pytest.raises(ValueError, match="rank 1 is not in the process set"):
                allreduce(own(rank), process_set=there)

    on_jobs(SIZE, act)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"op": 17}, "op= takes Average, Sum, Adasum, Min, Max or Product, not 17"),
        ({"op": Min, "tensor": torch.zeros(2, dtype=torch.complex64)}, "torch.complex64 cannot be reduced"),
        ({"tensor": torch.eye(2).to_sparse()}, "a dense tensor is wanted"),
        ({"tensor": 3.0}, "a torch.Tensor is wanted, not float"),
    ],
)
def test_what_one_rank_may_not_ask_is_its_error_and_known_to_the_others(arguments: dict[str, Any], words: str) -> None:
    def act(rank: int) -> None:
        if rank == 0:
            with pytest.raises(ValueError, match=words):
                allreduce(**{"tensor": torch.zeros(2), "name": "x", **arguments})
        else:
            with pytest.raises(MismatchError, match="Rank 0 cannot take part in ALLREDUCE"):
                allreduce(torch.zeros(2), name="x")
        assert allreduce(torch.ones(1), name="next", op=Sum).item() == SIZE

    on_jobs(SIZE, act)


def test_an_operation_in_place_leaves_the_tensor_alone_until_it_is_synchronised() -> None:
    def act(rank: int) -> None:
        tensor = own(rank)
        handle = allreduce_async_(tensor, op=Sum, name="x")
        assert torch.equal(tensor, own(rank))
        synchronize(handle)
        assert tensor.tolist() == [6.0, 9.0]

    on_jobs(SIZE, act)
