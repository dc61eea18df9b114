"""Operations give what one process would compute; what may differ between ranks, and what travels together."""

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.meshes import among
from msgspec.structs import replace

from sirtaki.comm.collectives.operations import (
    ADASUM,
    FUSED_BYTES,
    FUSIBLE_BYTES,
    LANE_BYTES,
    CollectiveKind,
    Ranks,
    Signature,
    adasum_,
    batches,
    combine,
    mismatch,
    perform,
)
from sirtaki.comm.control.communicator import Communicator, Op, Test
from sirtaki.comm.control.waiting import wait_for
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.errors import TransportError

SIZE = 3

Tensors = list[torch.Tensor]


def run(kind: CollectiveKind, tensors_of: Any, *, size: int = SIZE, **rest: Any) -> list[Tensors]:
    """Run one operation to which rank r contributes `tensors_of(r)`. Return the results by rank. Checks the inputs."""

    def act(comm: Communicator) -> Tensors:
        tensors: Sequence[torch.Tensor] = tensors_of(comm.rank)
        before = [tensor.clone() for tensor in tensors]
        signature = Signature.of(tensors, name="x", kind=kind, **rest)
        (results,) = perform([(signature, tensors)], Ranks(comm, comm.failures))
        assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
        assert all(result.is_contiguous() for result in results)
        return results

    return among(size, act)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("opens", [True, False])
def test_large_all_reduces_take_lanes_that_are_opened_once_and_do_without_where_none_can_be(opens: bool) -> None:
    def act(comm: Communicator) -> list[int]:
        travelled: list[int] = []

        def reduce_(tensor: torch.Tensor, op: ReduceOp) -> None:
            travelled.append(tensor.numel())
            wait_for(comm.all_reduce(tensor.numpy(), Op(op.value)), failures=comm.failures)

        def open_lanes(ranks: Communicator) -> Any:
            assert ranks is comm
            travelled.append(-1)
            if not opens:
                raise TransportError("no descriptors")
            return SimpleNamespace(reduce_=reduce_)

        ranks = Ranks(comm, comm.failures, open_lanes)
        for numel, dtype in (
            (5, torch.float32),
            (1 << 18, torch.float32),
            (1 << 18, torch.float16),
            (1 << 20, torch.bool),
        ):
            tensor = torch.ones(numel).to(dtype)
            signature = Signature.of(
                [tensor], name="x", kind=CollectiveKind.ALLREDUCE, op="max" if dtype is torch.bool else "sum"
            )
            ((result,),) = perform([(signature, [tensor])], ranks)
            assert bool((result == (1 if dtype is torch.bool else SIZE)).all())
        return travelled

    assert among(SIZE, act) == [[-1, LANE_BYTES // 4, LANE_BYTES // 4] if opens else [-1]] * SIZE


def test_halves_are_added_in_more_digits_and_rounded_once() -> None:
    # 2048 + 1 is 2048 in float16, and so is 2048 + 1 + 1 if each sum is rounded.
    for (result,) in run(
        CollectiveKind.ALLREDUCE, lambda rank: [torch.tensor([2048.0 if not rank else 1.0]).half()], op="sum"
    ):
        assert result.tolist() == [2050.0]


def test_tensors_need_not_be_contiguous_nor_resolved_nor_without_a_graph() -> None:
    def tensors_of(rank: int) -> Tensors:
        whole = torch.arange(12.0).reshape(3, 4) * (rank + 1)
        return [whole.t(), whole[:, 1], whole[0:1, ::2], whole.clone().requires_grad_()]

    wanted = [6 * tensor for tensor in tensors_of(0)]
    for results in run(CollectiveKind.ALLREDUCE, tensors_of, op="sum"):
        assert all(torch.equal(one, other) for one, other in zip(results, wanted, strict=True))
        assert not any(result.requires_grad for result in results)
    conjugated = torch.tensor([1 + 2j, 3 - 1j])
    for (result,) in run(CollectiveKind.BROADCAST, lambda rank: [rank * conjugated.conj()], root=1):
        assert torch.equal(result, torch.tensor([1 - 2j, 3 + 1j]))


def test_a_group_of_several_dtypes_is_returned_in_its_order_with_its_own_memory() -> None:
    dtypes = [torch.float32, torch.int64, torch.float32, torch.bfloat16, torch.int64]

    def tensors_of(rank: int) -> Tensors:
        return [values(rank + 10 * number, (number, 2), dtype) for number, dtype in enumerate(dtypes)]

    wanted = [torch.stack(each).double().sum(0) for each in zip(*map(tensors_of, range(SIZE)), strict=True)]
    for results in run(CollectiveKind.ALLREDUCE, tensors_of, op="sum"):
        assert [result.dtype for result in results] == dtypes
        assert all(torch.equal(one.double(), other) for one, other in zip(results, wanted, strict=True))
        storages = [result.untyped_storage() for result in results]
        assert all(each.nbytes() == one.nbytes for each, one in zip(storages, results, strict=True))


def test_operations_in_one_message_give_each_its_own_tensors() -> None:
    def act(comm: Communicator) -> list[Tensors]:
        batch = []
        for name, numels in (("a", [2]), ("b", [1, 3]), ("c", []), ("d", [0, 1])):
            tensors = [torch.full((numel,), float(comm.rank + numel)) for numel in numels]
            batch.append((Signature.of(tensors, name=name, kind=CollectiveKind.ALLREDUCE, op="sum"), tensors))
        return perform(batch, Ranks(comm, comm.failures))

    for results in among(SIZE, act):
        assert [[tensor.tolist() for tensor in each] for each in results] == [
            [[9.0, 9.0]],
            [[6.0], [12.0, 12.0, 12.0]],
            [],
            [[], [6.0]],
        ]


def test_adasum_combines_each_tensor_of_a_group_by_itself() -> None:
    def tensors_of(rank: int) -> Tensors:
        return [torch.eye(2)[rank], torch.tensor([[2.0, 2.0]]), torch.eye(2)[rank].half()]

    for right_angled, parallel, half in run(
        CollectiveKind.ALLREDUCE, tensors_of, size=2, op=ADASUM, factors=(1.0, 3.0)
    ):
        assert right_angled.tolist() == [3.0, 3.0]
        assert parallel.tolist() == [[6.0, 6.0]]
        assert half.dtype is torch.float16
        assert half.tolist() == [3.0, 3.0]


def test_a_dimension_of_one_row_with_a_stride_of_its_own_travels_right() -> None:
    for (result,) in run(CollectiveKind.ALLGATHER, lambda rank: [torch.arange(8.0).reshape(4, 2)[rank : rank + 1, :]]):
        assert torch.equal(result, torch.arange(6.0).reshape(3, 2))


REDUCE = Signature(name="a", kind=CollectiveKind.ALLREDUCE, shapes=((3, 4),), dtypes=("float32",), op="sum")
GATHER = Signature(name="a", kind=CollectiveKind.ALLGATHER, shapes=((3, 4),), dtypes=("float32",))


def floats(name: str, numel: int, **rest: Any) -> Signature:
    fields = {"shapes": ((numel,),), "dtypes": ("float32",), "op": "sum", **rest}
    return Signature(name=name, kind=CollectiveKind.ALLREDUCE, **fields)


DIFFERENT = {
    "kind": (
        {"kind": CollectiveKind.BROADCAST},
        "collective operations of 'a': ranks 0, 1 have ALLREDUCE, rank 2 has BROADCAST",
    ),
    "device": ({"device": "cuda"}, "CPU/GPU device selection of 'a': ranks 0, 1 have cpu, rank 2 has cuda"),
    "dtypes": ({"dtypes": ("int64",)}, "data types of 'a': ranks 0, 1 have float32, rank 2 has int64"),
    "op": ({"op": "max"}, "ALLREDUCE reduce operations of 'a': ranks 0, 1 have sum, rank 2 has max"),
    "factors": ({"factors": (1.0, 0.5)}, "factors of 'a': ranks 0, 1 have 1.0, 1.0, rank 2 has 1.0, 0.5"),
    "root": ({"root": 1}, "root ranks of 'a': ranks 0, 1 have -1, rank 2 has 1"),
    "rows": ({"shapes": ((2, 4),)}, r"shapes of 'a': ranks 0, 1 have \[3, 4\], rank 2 has \[2, 4\]"),
    "rank": ({"shapes": ((12,),)}, r"shapes of 'a': ranks 0, 1 have \[3, 4\], rank 2 has \[12\]"),
    "count": ({"shapes": ((3, 4), (1,)), "dtypes": ("float32", "int8")}, "have float32, rank 2 has float32, int8"),
}


@pytest.mark.parametrize(("change", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_difference_is_named_and_changes_the_digest(change: dict[str, Any], words: str) -> None:
    other = replace(REDUCE, **change)
    assert re.search(words, mismatch({0: REDUCE, 1: REDUCE, 2: other}) or "nothing")
    assert other.digest != REDUCE.digest


@pytest.mark.parametrize("change", [{"once": True}, {"by_all": True}])
def test_local_details_are_no_difference(change: dict[str, Any]) -> None:
    other = replace(REDUCE, **change)
    assert mismatch({0: REDUCE, 1: other}) is None
    assert other.digest == REDUCE.digest


@pytest.mark.parametrize("kind", [CollectiveKind.ALLGATHER, CollectiveKind.ALLTOALL])
def test_where_each_rank_may_have_its_own_number_of_rows_only_the_rest_must_be_the_same(kind: CollectiveKind) -> None:
    one = replace(GATHER, kind=kind)
    rows, columns, scalar = (replace(one, shapes=(shape,)) for shape in ((0, 4), (3, 5), ()))
    assert mismatch({0: one, 1: rows}) is None
    assert one.digest == rows.digest
    assert "shape" in str(mismatch({0: one, 1: columns}))
    assert one.digest != columns.digest
    assert "shape" in str(mismatch({0: one, 1: scalar}))


def test_a_problem_of_one_rank_is_reported_by_its_number_before_any_difference() -> None:
    fine, other, unable = REDUCE, replace(REDUCE, op="max"), replace(GATHER, problem="it has no such rows")
    assert mismatch({4: unable, 2: fine, 0: other}) == "Rank 4 cannot take part in ALLGATHER: it has no such rows"
    assert unable.digest != GATHER.digest


def names_of(*signatures: Signature) -> list[list[str]]:
    return list(batches({signature.name: signature for signature in signatures}))


def test_small_all_reduces_of_one_kind_share_a_message_in_the_order_of_their_names() -> None:
    assert names_of(floats("c", 2), floats("a", 3), floats("b", 1)) == [["a", "b", "c"]]
    assert names_of() == []


def test_dtypes_may_share_a_message_but_operations_and_factors_may_not() -> None:
    found = names_of(
        floats("a", 2),
        floats("b", 2, op="max"),
        floats("c", 2, factors=(1.0, 0.5)),
        floats("d", 2, dtypes=("int8",)),
        floats("e", 2, op="max"),
    )
    assert sorted(found) == [["a", "d"], ["b", "e"], ["c"]]


def test_large_and_non_elementwise_operations_run_separately() -> None:
    found = names_of(
        floats("a", 1),
        floats("b", FUSIBLE_BYTES // 4),
        floats("c", FUSIBLE_BYTES // 4 + 1),
        floats("d", 1, op=ADASUM),
        replace(GATHER, name="e"),
        Signature(name="f", kind=CollectiveKind.BARRIER),
        floats("g", 1, op=ADASUM),
    )
    assert sorted(found) == [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"]]


def test_a_message_is_full_at_its_size_and_the_next_one_begins() -> None:
    each, count = FUSIBLE_BYTES, FUSED_BYTES // FUSIBLE_BYTES
    assert count * each == FUSED_BYTES
    found = names_of(*(floats(f"{number:03d}", each // 4) for number in range(2 * count + 1)))
    assert [len(names) for names in found] == [count, count, 1]
    assert [names[0] for names in found] == ["000", f"{count:03d}", f"{2 * count:03d}"]


def tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Adasum of all, neighbours first (Maleki et al., fig. 2)."""
    if len(vectors) == 1:
        return vectors[0]
    return combine(tree(vectors[: len(vectors) // 2]), tree(vectors[len(vectors) // 2 :]))


def over(vectors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result on each rank, in place of its vector."""

    def act(comm: Communicator) -> torch.Tensor:
        mine, waits, ranks = vectors[comm.rank].clone(), list[Test](), Ranks(comm, comm.failures)

        def wait(test: Test) -> None:
            waits.append(test)
            wait_for(test, failures=comm.failures)

        ranks.wait = wait  # type: ignore[method-assign]
        adasum_(mine, ranks)
        assert len(waits) == 2 * math.log2(comm.size)  # sent and received once a round
        return mine

    return among(len(vectors), act)


def test_vectors_at_right_angles_are_added() -> None:
    assert combine(torch.tensor([2.0, 0.0]), torch.tensor([0.0, -3.0])).tolist() == [2.0, -3.0]


@pytest.mark.parametrize("factor", [1.0, 0.25, 7.0])
def test_parallel_vectors_are_averaged(factor: float) -> None:
    one = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(combine(one, factor * one), one * (1 + factor) / 2)


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


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_combine_in_a_balanced_tree_and_have_the_same_bits(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    vectors = [torch.randn(33, generator=generator) for _ in range(size)]
    found = over(vectors)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], tree(vectors))
