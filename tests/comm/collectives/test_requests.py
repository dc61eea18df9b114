"""What may differ between the ranks' sides of one operation, and which operations share a message."""

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from sirtaki.comm.collectives.operations import ADASUM, FUSED_BYTES, FUSIBLE_BYTES, Kind, Signature, batches, mismatch

REDUCE = Signature(name="a", kind=Kind.ALLREDUCE, shapes=((3, 4),), dtypes=("float32",), op="sum")
GATHER = Signature(name="a", kind=Kind.ALLGATHER, shapes=((3, 4),), dtypes=("float32",))


def floats(name: str, numel: int, **rest: Any) -> Signature:
    fields = {"shapes": ((numel,),), "dtypes": ("float32",), "op": "sum", **rest}
    return Signature(name=name, kind=Kind.ALLREDUCE, **fields)


def test_a_signature_tells_shapes_dtypes_and_device_of_its_tensors() -> None:
    tensors = [torch.zeros(2, 3), torch.tensor(1, dtype=torch.bfloat16), torch.empty(0, dtype=torch.bool)]
    made = Signature.of(tensors, name="group", kind=Kind.ALLREDUCE, op="max", factors=(0.5, 2.0))
    assert made.shapes == ((2, 3), (), (0,))
    assert made.dtypes == ("float32", "bfloat16", "bool")
    assert (made.device, made.op, made.factors, made.root) == ("cpu", "max", (0.5, 2.0), -1)
    assert made.size_bytes == 6 * 4 + 2 + 0
    assert pickle.loads(pickle.dumps(made)) == made


def test_an_operation_without_tensors_is_on_the_host_and_has_no_size() -> None:
    made = Signature.of([], name="barrier", kind=Kind.BARRIER)
    assert (made.device, made.shapes, made.size_bytes) == ("cpu", (), 0)


DIFFERENT = {
    "kind": ({"kind": Kind.BROADCAST}, "One rank did an ALLREDUCE, but another rank did an BROADCAST"),
    "device": ({"device": "cuda"}, "CPU/GPU device selection: One rank uses cpu, another cuda"),
    "dtypes": ({"dtypes": ("int64",)}, "One rank had type float32, but another rank had type int64"),
    "op": ({"op": "max"}, "One rank asked for sum, another for max"),
    "factors": ({"factors": (1.0, 0.5)}, r"One rank had \(1.0, 1.0\), another \(1.0, 0.5\)"),
    "root": ({"root": 1}, "One rank named -1, another 1"),
    "rows": ({"shapes": ((2, 4),)}, r"shape \[3, 4\], but another rank sent a tensor of shape \[2, 4\]"),
    "rank": ({"shapes": ((12,),)}, r"shape \[3, 4\], but another rank sent a tensor of shape \[12\]"),
    "count": ({"shapes": ((3, 4), (1,)), "dtypes": ("float32", "int8")}, "float32, but .* type float32, int8"),
}


@pytest.mark.parametrize(("change", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_named_and_has_another_digest(change: dict[str, Any], words: str) -> None:
    other = replace(REDUCE, **change)
    assert re.search(words, mismatch({0: REDUCE, 1: REDUCE, 2: other}) or "nothing")
    assert other.digest() != REDUCE.digest()


@pytest.mark.parametrize("change", [{"once": True}, {"by_all": True}])
def test_what_only_this_rank_needs_to_know_is_no_difference(change: dict[str, Any]) -> None:
    other = replace(REDUCE, **change)
    assert mismatch({0: REDUCE, 1: other}) is None
    assert other.digest() == REDUCE.digest()


@pytest.mark.parametrize("kind", [Kind.ALLGATHER, Kind.ALLTOALL])
def test_where_each_rank_may_have_its_own_number_of_rows_only_the_rest_must_be_the_same(kind: Kind) -> None:
    one = replace(GATHER, kind=kind)
    rows, columns, scalar = (replace(one, shapes=(shape,)) for shape in ((0, 4), (3, 5), ()))
    assert mismatch({0: one, 1: rows}) is None
    assert one.digest() == rows.digest()
    assert "shape" in str(mismatch({0: one, 1: columns}))
    assert one.digest() != columns.digest()
    assert "shape" in str(mismatch({0: one, 1: scalar}))


def test_a_problem_of_one_rank_is_told_by_its_number_before_any_difference() -> None:
    fine, other, unable = REDUCE, replace(REDUCE, op="max"), replace(GATHER, problem="it has no such rows")
    assert mismatch({4: unable, 2: fine, 0: other}) == "Rank 4 cannot take part in ALLGATHER: it has no such rows"
    assert unable.digest() != GATHER.digest()


def test_one_rank_alone_agrees_with_itself() -> None:
    assert mismatch({3: REDUCE}) is None


def test_a_digest_is_of_what_was_said_not_of_the_object() -> None:
    again = pickle.loads(pickle.dumps(REDUCE))
    assert again.digest() == REDUCE.digest()
    assert 0 < REDUCE.digest() < 1 << 128
    assert replace(REDUCE, name="b").digest() != REDUCE.digest()


@pytest.mark.parametrize("kind", Kind)
def test_of_ranks_that_have_joined_only_all_reduces_and_what_all_submit_need_no_data(kind: Kind) -> None:
    assert replace(GATHER, kind=kind).needs_data == (kind is not Kind.ALLREDUCE)
    assert not replace(GATHER, kind=kind, by_all=True).needs_data


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


def test_what_is_large_or_no_element_wise_reduction_goes_alone() -> None:
    found = names_of(
        floats("a", 1),
        floats("b", FUSIBLE_BYTES // 4),
        floats("c", FUSIBLE_BYTES // 4 + 1),
        floats("d", 1, op=ADASUM),
        replace(GATHER, name="e"),
        Signature(name="f", kind=Kind.BARRIER),
        floats("g", 1, op=ADASUM),
    )
    assert sorted(found) == [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"]]


def test_a_message_is_full_at_its_size_and_the_next_one_begins() -> None:
    each, count = FUSIBLE_BYTES, FUSED_BYTES // FUSIBLE_BYTES
    assert count * each == FUSED_BYTES
    found = names_of(*(floats(f"{number:03d}", each // 4) for number in range(2 * count + 1)))
    assert [len(names) for names in found] == [count, count, 1]
    assert [names[0] for names in found] == ["000", f"{count:03d}", f"{2 * count:03d}"]


def test_all_ranks_find_the_same_batches_whatever_the_order_in_which_they_know_the_names() -> None:
    signatures = {name: floats(name, 5, op=op) for name, op in zip("abcdef", ["sum", "max"] * 3, strict=True)}
    backwards = dict(reversed(signatures.items()))
    assert list(batches(signatures)) == list(batches(backwards))
