"""Run every collective on random tensors and compare the results with NumPy. Started by test_collectives.py.

All ranks draw the same cases, and every rank can compute its peers' tensors. Arguments: number of cases.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sirtaki.torch as hvd

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*INTEGERS, *FLOATS, torch.bool, torch.complex64)
TOLERANCE = {
    torch.float16: 4e-3,
    torch.bfloat16: 4e-2,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
    torch.complex64: 1e-5,
}
REDUCTIONS = {
    hvd.Sum: lambda parts: parts.sum(0),
    hvd.Average: lambda parts: parts.sum(0),
    hvd.Min: lambda parts: parts.min(0),
    hvd.Max: lambda parts: parts.max(0),
    hvd.Product: lambda parts: parts.prod(0),
}


@dataclass(frozen=True)
class Case:
    kind: str
    form: str
    dtype: torch.dtype
    op: int
    shapes: tuple[tuple[int, ...], ...]
    factors: tuple[float, float]
    members: tuple[int, ...]
    root: int
    strided: bool
    seed: int

    def rows(self, rank: int, shape: tuple[int, ...]) -> int:
        """Return the number of rows of a rank, which differs between ranks for ragged operations."""
        return (shape[0] + 3 * rank + self.seed) % 5

    def splits(self, rank: int) -> list[int]:
        return [(rank + 2 * other + self.seed) % 3 for other in range(len(self.members))]

    def values(self, rank: int) -> list[np.ndarray]:
        """Return the tensors that a member contributes, in a dtype that NumPy supports."""
        rng = np.random.default_rng([self.seed, rank])
        arrays = []
        for shape in self.shapes:
            if self.kind == "allgather":
                shape = (self.rows(rank, shape), *shape[1:])
            elif self.kind == "alltoall":
                shape = (sum(self.splits(rank)), *shape[1:])
            array = rng.integers(0, 4, shape)
            if self.dtype in FLOATS:
                array = array + rng.integers(1, 8, shape) / 8  # exact in every floating dtype
            if self.dtype is torch.complex64:
                array = array + 1j * rng.integers(0, 3, shape)
            arrays.append(array.astype(numpy_dtype(self.dtype)))
        return arrays


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    if dtype in (torch.float16, torch.bfloat16):
        return np.dtype(np.float64)
    return torch.empty(0, dtype=dtype).numpy().dtype


@st.composite
def cases(draw: st.DrawFn, subsets: list[tuple[int, ...]]) -> Case:
    kind = draw(st.sampled_from(["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]))
    members = draw(st.sampled_from(subsets))
    op = hvd.Sum
    dtypes = DTYPES
    if kind in ("allreduce", "reducescatter"):
        op = draw(st.sampled_from(sorted(REDUCTIONS) if kind == "allreduce" else [hvd.Sum, hvd.Average]))
        dtypes = tuple(dtype for dtype in DTYPES if dtype in hvd_dtypes(op))
    dtype = draw(st.sampled_from(dtypes))
    reduces = kind in ("allreduce", "reducescatter") and dtype not in (torch.int8, torch.uint8, torch.bool)
    forms = {
        "allreduce": ["sync", "async", "in place", "async in place", "grouped", "grouped async", "grouped in place"],
        "allgather": ["sync", "async", "grouped", "grouped async"],
        "broadcast": ["sync", "async", "in place", "async in place"],
        "alltoall": ["sync", "async"],
        "reducescatter": ["sync", "async", "grouped", "grouped async"],
    }
    form = draw(st.sampled_from(forms[kind]))
    least = 0 if kind in ("allreduce", "broadcast") else 1
    shape = st.lists(st.integers(0, 5), min_size=least, max_size=3).map(tuple)
    factor = st.sampled_from([0.5, 1.0, 2.0, 3.0]) if reduces else st.just(1.0)
    return Case(
        kind=kind,
        form=form,
        dtype=dtype,
        op=op,
        shapes=tuple(draw(st.lists(shape, min_size=1, max_size=4 if "grouped" in form else 1))),
        factors=(draw(factor), draw(factor)),
        members=members,
        root=draw(st.sampled_from(members)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def hvd_dtypes(op: int) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a reduction accepts, written independently of the product."""
    numbers = (*INTEGERS, *FLOATS)
    return {
        hvd.Min: (*numbers, torch.bool),
        hvd.Max: (*numbers, torch.bool),
        hvd.Product: (*numbers, torch.bool, torch.complex64),
    }.get(op, (*numbers, torch.complex64))


def expected(case: Case, me: int) -> list[np.ndarray]:
    """Return the results of member `me`, by the definition of each collective."""
    count = len(case.members)
    everybody = [case.values(rank) for rank in range(count)]
    results = []
    for number in range(len(case.shapes)):
        parts = [values[number] for values in everybody]
        if case.kind == "allgather":
            results.append(np.concatenate(parts))
        elif case.kind == "broadcast":
            results.append(parts[case.members.index(case.root)])
        elif case.kind == "alltoall":
            cuts = [np.cumsum([0, *case.splits(rank)]) for rank in range(count)]
            results.append(np.concatenate([part[cut[me] : cut[me + 1]] for part, cut in zip(parts, cuts, strict=True)]))
        else:
            reduced = reduce(case, parts)
            if case.kind == "reducescatter":
                rows, more = divmod(reduced.shape[0], count)
                begin = me * rows + min(me, more)
                reduced = reduced[begin : begin + rows + (me < more)]
            results.append(reduced)
    return results


def reduce(case: Case, parts: list[np.ndarray]) -> np.ndarray:
    before, after = case.factors
    if case.op == hvd.Average:
        after /= len(parts)
    dtype = parts[0].dtype
    scaled = np.stack([scale(part, before) for part in parts])
    return scale(np.asarray(REDUCTIONS[case.op](scaled), dtype=dtype), after)


def scale(array: np.ndarray, factor: float) -> np.ndarray:
    if factor == 1.0:
        return array
    if array.dtype.kind in "iu":
        return np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    return (array * factor).astype(array.dtype)


def run(case: Case, tensors: list[torch.Tensor], process_set: hvd.ProcessSet) -> list[torch.Tensor]:
    """Run the collective in the case's variant."""
    options: dict[str, object] = {"process_set": process_set}
    if case.kind in ("allreduce", "reducescatter"):
        options |= {"op": case.op, "prescale_factor": case.factors[0], "postscale_factor": case.factors[1]}
    if case.kind == "broadcast":
        options["root_rank"] = case.root
    if case.kind == "alltoall":
        options["splits"] = case.splits(case.members.index(hvd.rank()))
    grouped = "grouped" in case.form
    name = (
        ("grouped_" if grouped else "")
        + case.kind
        + ("_async" if "async" in case.form else "")
        + ("_" if "in place" in case.form else "")
    )
    before = [tensor.clone() for tensor in tensors]
    result = getattr(hvd, name)(tensors if grouped else tensors[0], **options)
    if "async" in case.form:
        handle, result = result, hvd.synchronize(result)
        assert hvd.poll(handle)
        assert hvd.synchronize(handle) is None
    if case.kind == "alltoall":
        me = case.members.index(hvd.rank())
        result, received = result
        assert received.dtype is torch.int32
        assert received.tolist() == [case.splits(rank)[me] for rank in range(len(case.members))]
    results = list(result) if grouped else [result]
    for tensor, old, new in zip(tensors, before, results, strict=True):
        if "in place" in case.form:
            assert new is tensor
        else:
            assert torch.equal(tensor, old), "the input was changed"
    return results


def as_tensor(array: np.ndarray, dtype: torch.dtype, *, strided: bool) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)).to(dtype)
    if strided and tensor.dim():
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor


def check(case: Case, found: list[torch.Tensor], wanted: list[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is case.dtype
        assert tuple(one.shape) == other.shape, f"{tuple(one.shape)} instead of {other.shape}: {case}"
        tolerance = 0.0 if case.kind not in ("allreduce", "reducescatter") else TOLERANCE.get(case.dtype, 0.0)
        array = (one.double() if case.dtype in (torch.float16, torch.bfloat16) else one).numpy()
        np.testing.assert_allclose(array, other, rtol=tolerance, atol=tolerance, err_msg=repr(case))


def main(count: int) -> None:
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    everybody = tuple(range(size))
    named = {everybody, everybody[:-1], everybody[-1:], everybody[::2], everybody[1:]} - {()}
    subsets = sorted(named)
    sets = {
        members: hvd.global_process_set if members == everybody else hvd.add_process_set(members) for members in subsets
    }

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(subsets))
    def compare(case: Case) -> None:
        assert len({repr(other) for other in hvd.allgather_object(case.seed)}) == 1, "the ranks draw different cases"
        if rank not in case.members:
            return
        me = case.members.index(rank)
        tensors = [as_tensor(array, case.dtype, strided=case.strided) for array in case.values(me)]
        check(case, run(case, tensors, sets[case.members]), expected(case, me))

    compare()
    hvd.shutdown()
    print(f"rank {rank}: {count} cases agree")


if __name__ == "__main__":
    main(int(sys.argv[1]))
