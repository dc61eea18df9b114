"""Reduce-scatter: each rank its rows of the reduction, and gradients gathered back."""

from typing import Any

import pytest
import torch
from fakes.jobs import on_jobs

from sirtaki.errors import MismatchError
from sirtaki.torch.collectives import (
    Adasum,
    Average,
    Max,
    Sum,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from sirtaki.torch.compression import Compression

SIZE = 3


def own(rank: int, rows: int = 4) -> torch.Tensor:
    return torch.arange(float(rows)) + rank


@pytest.mark.parametrize(("op", "factor"), [(Average, 1.0), (Sum, 3.0)])
def test_every_form_gives_this_ranks_rows_and_the_first_one_more(op: int, factor: float) -> None:
    whole = factor * (torch.arange(4.0) + 1.0)

    def act(rank: int) -> None:
        wanted = [whole[:2], whole[2:3], whole[3:]][rank]
        for found in (
            reducescatter(own(rank), op=op),
            synchronize(reducescatter_async(own(rank), op=op)),
            grouped_reducescatter([own(rank)], op=op)[0],
            synchronize(grouped_reducescatter_async([own(rank)], op=op))[0],
        ):
            torch.testing.assert_close(found, wanted)

    on_jobs(SIZE, act)


def test_the_average_is_the_usual_and_factors_multiply() -> None:
    def act(rank: int) -> None:
        assert reducescatter(torch.ones(3)).tolist() == pytest.approx([1.0])
        found = reducescatter(torch.ones(3), op=Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert found.tolist() == [3.0]
        fine = torch.full((3,), 1.0 + 2**-12)
        assert reducescatter(fine, compression=Compression.fp16).tolist() == [1.0]
        both = grouped_reducescatter([fine, torch.ones(3)], compression=Compression.fp16, op=Sum)
        assert [each.dtype for each in both] == [torch.float32] * 2

    on_jobs(SIZE, act)


@pytest.mark.parametrize(("op", "factor"), [(Average, 1.0), (Sum, 3.0)])
def test_gradients_are_gathered_and_scaled(op: int, factor: float) -> None:
    def act(rank: int) -> None:
        mine = own(rank).requires_grad_()
        (reducescatter(mine, op=op, prescale_factor=2.0, postscale_factor=5.0) * (rank + 1.0)).sum().backward()
        assert mine.grad is not None
        assert mine.grad.tolist() == pytest.approx([10.0 * factor * rows for rows in (1.0, 1.0, 2.0, 3.0)])

    on_jobs(SIZE, act)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"op": Adasum}, NotImplementedError, "Adasum is for allreduce only"),
        ({"op": Max}, ValueError, "reducescatter takes op=Average or op=Sum, not 4"),
        ({"tensor": torch.tensor(1.0)}, ValueError, "a tensor without dimensions has none"),
        ({"tensor": torch.zeros(3, dtype=torch.bool)}, ValueError, "torch.bool cannot be reduced"),
    ],
)
def test_what_cannot_be_scattered_is_refused_and_the_others_hear_of_it(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    def act(rank: int) -> None:
        if rank == 0:
            with pytest.raises(error, match=words):
                reducescatter(**{"tensor": torch.zeros(3), "name": "x", **arguments})
        else:
            with pytest.raises(MismatchError, match="Rank 0 cannot take part in REDUCESCATTER"):
                reducescatter(torch.zeros(3), name="x")

    on_jobs(SIZE, act)
