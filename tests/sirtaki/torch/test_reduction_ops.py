"""What `op=` and `average=` mean, and which tensors and ranks go with it."""

from typing import Any

import pytest
import torch
from fakes.jobs import on_jobs

from sirtaki.torch.collectives import DTYPES, OP_NAMES, Adasum, Average, Max, Min, Product, Sum, reduction, unfit
from sirtaki.torch.process_sets import ProcessSet, global_process_set


def test_the_usual_is_the_average() -> None:
    assert reduction(None, None) == Average
    for op in OP_NAMES:
        assert reduction(op, None) == op


@pytest.mark.parametrize(("average", "op"), [(True, Average), (False, Sum)])
def test_the_old_argument_is_taken_with_a_warning(average: bool, op: int) -> None:
    with pytest.warns(DeprecationWarning, match="`average` has been replaced with `op`"):
        assert reduction(None, average) == op


def test_both_together_are_refused() -> None:
    for average in (False, True):
        with pytest.raises(ValueError, match="op parameter supersedes average"):
            reduction(Average, average)


@pytest.mark.parametrize(
    ("op", "refused"),
    [
        (Average, {torch.bool}),
        (Sum, {torch.bool}),
        (Min, {torch.complex64, torch.complex128}),
        (Max, {torch.complex64, torch.complex128}),
        (Product, set()),
        (
            Adasum,
            {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
            | {torch.complex64, torch.complex128},
        ),
    ],
)
def test_every_op_takes_the_dtypes_that_it_can_reduce(op: int, refused: set[torch.dtype]) -> None:
    def act(rank: int) -> None:
        for dtype in (*DTYPES[Product], torch.bool):
            error = unfit(op, [torch.zeros(2), torch.zeros(2, dtype=dtype)], global_process_set)
            assert (error is not None) == (dtype in refused)
            if error is not None:
                assert isinstance(error, ValueError)
                assert f"{dtype} cannot be reduced with this op; it takes torch." in str(error)

    on_jobs(1, act)


@pytest.mark.parametrize("op", [6, -1, "sum", None])
def test_what_is_no_op_is_named(op: Any) -> None:
    error = unfit(op, [], global_process_set)
    assert isinstance(error, ValueError)
    assert f"not {op!r}" in str(error)


@pytest.mark.parametrize(("size", "possible"), [(1, True), (2, True), (3, False), (4, True)])
def test_adasum_wants_a_power_of_two(size: int, possible: bool) -> None:
    def act(rank: int) -> None:
        error = unfit(Adasum, [torch.zeros(2)], global_process_set)
        assert (error is None) == possible
        if error is not None:
            assert isinstance(error, NotImplementedError)
            assert str(error).endswith("not 3")
        assert unfit(Sum, [torch.zeros(2)], global_process_set) is None

    on_jobs(size, act)


def test_adasum_is_for_all_ranks_only() -> None:
    def act(rank: int) -> None:
        from sirtaki.torch.process_sets import add_process_set

        there = add_process_set(ProcessSet([0, 1]))
        if rank < 2:
            assert "not on a process set" in str(unfit(Adasum, [], there))

    on_jobs(3, act)
