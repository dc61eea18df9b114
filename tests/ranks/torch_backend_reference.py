"""Run random sequences of collectives over the backend "sirtaki" and over Gloo. Results must be bit-identical.

All ranks draw the same operations. Each rank chooses its own layouts, waits and reads. Sums are exact, and Gloo gets
contiguous copies. Arguments: number of sequences, and seed. Started by test_process_group.py.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import hypothesis
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks.collectives_reference import DTYPES, FLOATS, INTEGERS
from ranks.torch_backend import all_gather_single, reduce_scatter_single
from torch._C._distributed_c10d import _make_nccl_premul_sum

import sirtaki.torch.distributed  # noqa: F401
from sirtaki.torch.distributed.process_group import KEEPS_WORKS, LARGE_BYTES

Op = dist.ReduceOp
Tensors = list[torch.Tensor]
Waitable = dist.Work | None

REDUCING = ("all_reduce", "coalesced", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_uneven")
MOVING = (
    *("broadcast", "all_gather", "all_gather_single", "all_gather_coalesced", "gather", "scatter"),
    *("all_to_all", "all_to_all_single", "exchange", "batch", "barrier"),
)
COMPILED = ("compiled_all_reduce", "compiled_reduce_scatter", "compiled_all_gather", "compiled_all_to_all")
FACTORS = {"scaled": 0.5, "scaled by a tensor": 3.0}
"""Factors of sums whose terms are scaled before."""
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", *FACTORS)
LAYOUTS = ("plain", "offset", "strided", "transposed", "parameter")
BETWEEN_TWO = ("exchange", "batch")
"""Operations that need contiguous tensors and have no futures. Gloo never reports their completion."""
WAITS = ("wait", "poll", "future", "then", "result", "wait twice")


@dataclass(frozen=True)
class Case:
    """One operation of a sequence.

    Attributes:
        shape: shape of one part.
        root: number of a member.
        asynchronous: whether to start it only, and wait for it after the whole sequence.
    """

    kind: str
    dtype: torch.dtype
    op: str
    shape: tuple[int, ...]
    members: tuple[int, ...]
    root: int
    asynchronous: bool
    seed: int

    @property
    def reduces(self) -> bool:
        return "reduce" in self.kind or self.kind == "coalesced"

    def splits(self, number: int) -> list[int]:
        """Return the number of rows that a member sends to each member."""
        return [(number + 2 * other + self.seed) % 3 for other in range(len(self.members))]

    def values(self, number: int, part: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of a member."""
        draw = torch.Generator().manual_seed(10_007 * self.seed + 101 * number + part)
        if not self.reduces and self.dtype is not torch.bool:  # any bits
            count = math.prod(shape) * self.dtype.itemsize
            return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=draw).view(self.dtype).view(shape)
        if self.dtype in INTEGERS:
            span = torch.iinfo(self.dtype)
            wide = torch.randint(span.min // 2, span.max // 2, shape, dtype=torch.int64, generator=draw)
            return (2 * wide).to(self.dtype)
        small = torch.randint(0, 4, shape, generator=draw)
        if self.op == "PRODUCT" and self.dtype in FLOATS:
            return (2.0**small).to(self.dtype)
        if self.dtype in FLOATS:
            return (small + torch.randint(1, 8, shape, generator=draw) / 8).to(self.dtype)
        if self.dtype.is_complex:
            return torch.complex(small.float(), small.flip(0).float() if shape else small.float()).to(self.dtype)
        return (small > 1).to(self.dtype)


def tensor_shapes(case: Case, me: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes of the inputs and of the outputs of member `me`."""
    count, shape = len(case.members), case.shape
    rows = shape or (1,)
    whole = (count * rows[0], *rows[1:])
    uneven = [(rows[0] + other, *rows[1:]) for other in range(count)]
    at_root = me == case.root
    received = [case.splits(other)[me] for other in range(count)]
    match case.kind.removeprefix("compiled_"):
        case "all_reduce" | "reduce" | "broadcast":
            return [shape], []
        case "coalesced":
            return [shape, rows, (3,)], []
        case "reduce_scatter" if case.kind == "reduce_scatter":
            return [shape] * count, [shape]
        case "reduce_scatter_uneven":
            return uneven, [uneven[me]]
        case "reduce_scatter_single" | "reduce_scatter":
            return [whole], [rows]
        case "all_gather" if case.kind == "all_gather":
            return [shape], [shape] * count
        case "all_gather_single" | "all_gather":
            return [rows], [whole]
        case "all_gather_coalesced":
            return [shape, rows], [shape, rows] * count
        case "gather":
            return [shape], [shape] * count if at_root else []
        case "scatter":
            return [shape] * count if at_root else [], [shape]
        case "all_to_all" if case.kind == "all_to_all":
            return [(n, *rows[1:]) for n in case.splits(me)], [(n, *rows[1:]) for n in received]
        case "all_to_all_single" | "all_to_all":
            return [(sum(case.splits(me)), *rows[1:])], [(sum(received), *rows[1:])]
        case "exchange" | "batch":
            return ([shape], [shape]) if count > 1 else ([], [])
    return [], []


@functools.cache
def gloo_averages() -> bool:
    """Return whether Gloo supports averages, which PyTorch 2.4's does not."""
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    options = dist.AllreduceOptions()
    options.reduceOp = Op(Op.AVG)
    try:
        alone.allreduce([torch.ones(1)], options).wait()
    except RuntimeError:
        return False
    return True


def reduction(case: Case, group: dist.ProcessGroup) -> tuple[Op, Callable[[torch.Tensor], None] | None]:
    """Return the group's operation, and a function that turns its result into the requested one.

    Gloo does not scale, and rejects averages of integers.
    """
    is_ours = dist.get_backend(group) == "sirtaki"
    if case.op in FACTORS:
        factor = FACTORS[case.op]
        if not is_ours:
            return Op(Op.SUM), None
        return _make_nccl_premul_sum(torch.tensor([factor]) if "tensor" in case.op else factor), None
    if case.op == "AVG" and not is_ours and (case.dtype in INTEGERS or not gloo_averages()):
        rounding = "trunc" if case.dtype in INTEGERS else None
        return Op(Op.SUM), lambda tensor: tensor.div_(len(case.members), rounding_mode=rounding)
    return Op(getattr(Op, case.op)), None


@dataclass
class Started:
    """An operation in flight, and its outputs."""

    case: Case
    works: Sequence[Waitable]
    results: Tensors
    finish: Callable[[torch.Tensor], None] | None = None
    returned: list[object] = field(default_factory=list)

    def wait(self, how: str) -> None:
        """Wait for the results. Values of futures and works are in `returned`."""
        for work in self.works:
            match how:
                case _ if work is None:
                    pass
                case "poll":
                    while not work.is_completed():
                        time.sleep(0.0)
                    if not work.is_success():
                        raise work.exception()
                case "future":
                    self.returned.append(work.get_future().wait())
                case "then":
                    self.returned.append(work.get_future().then(lambda ended: ended.value()).wait())
                case "result":
                    work.wait()
                    self.returned.append(work.result())
                case _:
                    for _ in range(1 + (how == "wait twice")):
                        assert work.wait()
        if self.case.kind in COMPILED:
            self.results = [functional.wait_tensor(result) for result in self.results]
        if self.finish is not None:
            for tensor in self.results:
                self.finish(tensor)


def start(case: Case, group: dist.ProcessGroup, me: int, given: Tensors, got: Tensors) -> Started:
    """Start the operation of member `me` on its inputs and outputs."""
    options: dict[str, object] = {"group": group, "async_op": case.asynchronous}
    root, count = case.members[case.root], len(case.members)
    op, finish = reduction(case, group)
    is_ours = dist.get_backend(group) == "sirtaki"
    if case.op in FACTORS and case.reduces and not is_ours:
        for tensor in given:
            tensor.mul_(FACTORS[case.op])
    peers = case.members[(me + 1) % count], case.members[(me - 1) % count]
    splits = {"input_split_sizes": case.splits(me), "output_split_sizes": [case.splits(n)[me] for n in range(count)]}
    work: Waitable = None
    if "reduce_scatter" in case.kind and not is_ours and not KEEPS_WORKS:
        # PyTorch 2.4's Gloo rejects lists, and ignores the requested operation.
        if case.dtype.is_complex and case.op != "SUM":
            raise RuntimeError("complex numbers are added only")
        whole = torch.cat([part.reshape(-1) for part in given])
        dist.all_reduce(whole, op, group=group)
        sizes = [part.numel() for part in given] if len(given) == count else [whole.numel() // count] * count
        return Started(case, [], [whole.split(sizes)[me].view(got[0].shape)], finish)
    match case.kind:
        case "all_reduce":
            work, got = dist.all_reduce(given[0], op, **options), given
        case "coalesced":
            coalesced = dist.AllreduceCoalescedOptions()
            coalesced.reduceOp = op
            work, got = group.allreduce_coalesced(given, coalesced), given
            if not case.asynchronous:
                work.wait()
        case "reduce":
            work = dist.reduce(given[0], root, op, **options)
            got = given if me == case.root else []
        case "broadcast":
            work, got = dist.broadcast(given[0], root, **options), given
        case "reduce_scatter" | "reduce_scatter_uneven":
            work = dist.reduce_scatter(got[0], given, op, **options)
        case "reduce_scatter_single":
            work = reduce_scatter_single(got[0], given[0], op, **options)
        case "all_gather":
            work = dist.all_gather(got, given[0], **options)
        case "all_gather_single":
            work = all_gather_single(got[0], given[0], **options)
        case "all_gather_coalesced":
            rows = [got[2 * number : 2 * number + 2] for number in range(count)]
            future = dist.all_gather_coalesced(rows, given, **options)
            if future is not None:
                future.wait()
        case "gather":
            work = dist.gather(given[0], got if me == case.root else None, root, **options)
        case "scatter":
            work = dist.scatter(got[0], given if me == case.root else None, root, **options)
        case "all_to_all":
            work = dist.all_to_all(got, given, **options)
        case "all_to_all_single":
            work = dist.all_to_all_single(got[0], given[0], **splits, **options)
        case "barrier":
            work = dist.barrier(**options)
        case "exchange" | "batch" if count == 1:
            pass
        case "exchange":
            sent = dist.isend(given[0], peers[0], group=group, tag=case.seed)
            work = dist.irecv(got[0], peers[1], group=group, tag=case.seed)
            return Started(case, [sent, work], got)
        case "batch":
            both = [dist.P2POp(dist.irecv, got[0], peers[1], group), dist.P2POp(dist.isend, given[0], peers[0], group)]
            return Started(case, dist.batch_isend_irecv(both), got)
        case "compiled_all_reduce":
            got = [functional.all_reduce(given[0], case.op.lower(), group)]
        case "compiled_reduce_scatter":
            got = [functional.reduce_scatter_tensor(given[0], case.op.lower(), 0, group)]
        case "compiled_all_gather":
            got = [functional.all_gather_tensor(given[0], 0, group)]
        case "compiled_all_to_all":
            got = [functional.all_to_all_single(given[0], *reversed(splits.values()), group)]
    return Started(case, [work], got, finish if case.reduces else None)


@st.composite
def cases(draw: st.DrawFn, subsets: list[tuple[int, ...]]) -> Case:
    kind = draw(st.sampled_from((*REDUCING, *REDUCING, *MOVING, *COMPILED)))
    members = draw(st.sampled_from(subsets))
    dtype = draw(st.sampled_from(DTYPES))
    fit = (*OPS[:5], *FACTORS) if dtype in FLOATS else OPS[:8] if dtype in INTEGERS else ("SUM", "MIN", "BOR")
    op = draw(st.sampled_from(("SUM", "MIN", "MAX") if "compiled" in kind else fit))
    small = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    edge = LARGE_BYTES // dtype.itemsize
    large = st.sampled_from([(edge - 1,), (edge,), (3, edge // 2 + 1), (edge // 64, 32, 2), (1_300_001,)])
    return Case(
        kind=kind,
        dtype=dtype,
        op=op,
        shape=draw(st.one_of(small, small, large)),
        members=members,
        root=draw(st.integers(0, len(members) - 1)),
        asynchronous=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def laid_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in a tensor with this memory layout, and the underlying memory."""
    axes = range(values.dim()) if layout == "transposed" else reversed(range(values.dim()))
    strides, step = [0] * values.dim(), 2 if layout == "strided" else 1
    for axis in axes:
        strides[axis], step = step, step * max(values.shape[axis], 1)
    memory = torch.ones(step + 3, dtype=values.dtype)
    view = memory.as_strided(values.shape, strides, 3 if layout == "offset" else 0)
    view.copy_(values)
    differentiable = values.is_floating_point() or values.is_complex()
    return view.requires_grad_(layout == "parameter" and differentiable), memory


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor. A bool is a non-zero byte, as Gloo sums it."""
    found = torch.cat([tensor.detach().reshape(-1)]).view(torch.uint8)
    return found != 0 if tensor.dtype is torch.bool else found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and torch.equal(bits(one), bits(other))


def flat(returned: object) -> Tensors:
    """Return the tensors in the result of a future or a work, from nested lists. Complex tensors become pairs."""
    if isinstance(returned, torch.Tensor):
        return [torch.view_as_real(returned) if returned.is_complex() else returned]
    return [tensor for each in returned for tensor in flat(each)] if isinstance(returned, list | tuple) else []


def by_gloo(case: Case, group: dist.ProcessGroup, me: int, given: Tensors, got: Tensors) -> Started | Exception:
    """Start the operation over Gloo, or return its exception."""
    try:
        started = start(case, group, me, given, got)
        started.wait("wait")
        if case.kind not in BETWEEN_TWO:
            with suppress(NotImplementedError, RuntimeError):  # reduce_scatter's work has no future
                started.returned = [work.get_future().wait() for work in started.works if work is not None]
    except (RuntimeError, ValueError, TypeError) as err:
        return err
    return started


class Course:
    """One operation over both backends: completed over Gloo, and started over Sirtaki."""

    def __init__(self, case: Case, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], own: random.Random) -> None:
        self._case, self._own = case, own
        me = case.members.index(dist.get_rank())
        shapes = tensor_shapes(case, me)
        given = [case.values(me, part, shape) for part, shape in enumerate(shapes[0])]
        got = [torch.ones(shape, dtype=case.dtype) for shape in shapes[1]]
        self._values = [*given, *got]
        views = [laid_out(values, self._layout()) for values in self._values]
        self._views, self._memory = [view for view, _ in views], [memory.clone() for _, memory in views]
        self._bases = [memory for _, memory in views]
        self._wanted = by_gloo(case, groups[1], me, [each.clone() for each in given], [each.clone() for each in got])
        self._started: Started | None = None
        try:
            self._started = start(case, groups[0], me, self._views[: len(given)], self._views[len(given) :])
        except (RuntimeError, ValueError, TypeError) as err:
            self._refused(err)

    def _layout(self) -> str:
        kind, layouts = self._case.kind, LAYOUTS
        # PyTorch 2.4 asserts that it is not awaited like this.
        if kind in BETWEEN_TWO or (kind == "compiled_all_gather" and not KEEPS_WORKS):
            layouts = ("plain", "offset")
        elif "gather" in kind and not KEEPS_WORKS:  # Gloo fills no tensor that requires gradients, and warns
            layouts = LAYOUTS[:-1]
        return self._own.choice(layouts)

    def _refused(self, err: Exception) -> None:
        assert isinstance(self._wanted, Exception), f"{self._case} was refused, though Gloo does it: {err!r}"

    @property
    def is_refused(self) -> bool:
        """Return whether Gloo rejects the operation."""
        return isinstance(self._wanted, Exception)

    def end(self) -> None:
        """Wait for the operation, and compare."""
        if self._started is None:
            return
        started, how = self._started, self._own.choice(WAITS)
        if self._case.kind in BETWEEN_TWO or self.is_refused:
            how = "wait"  # for some rejected operations, Gloo does not report completion
        try:
            started.wait(how)
        except (RuntimeError, ValueError, TypeError) as err:
            self._refused(err)
            return
        assert not isinstance(self._wanted, Exception), f"{self._case} was done, though Gloo says {self._wanted!r}"
        wanted = self._wanted.results
        assert len(started.results) == len(wanted)
        for found, right in zip(started.results, wanted, strict=True):
            assert same(found, right), (self._case, how, found, right)
        for returned in started.returned if wanted else ():
            right = flat(self._wanted.returned) or flat(wanted)
            assert len(flat(returned)) == len(right), (self._case, how, returned, right)
            assert all(map(same, flat(returned), right)), (self._case, how, returned, right)
        filled = {id(tensor) for tensor in started.results}
        for view, memory, base, values in zip(self._views, self._memory, self._bases, self._values, strict=True):
            is_scratch = self._case.kind == "reduce" and not wanted  # Gloo may overwrite other ranks' tensors
            if id(view) in filled or is_scratch:
                memory.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(view.detach())
            assert torch.equal(bits(memory), bits(base)), (
                self._case,
                how,
                values.shape,
                "memory beside it was written",
            )


def drawn(count: int, seed: int, subsets: list[tuple[int, ...]]) -> list[list[Case]]:
    """Draw all sequences before any is run, so that a failing example is not run again on one rank only."""
    sequences: list[list[Case]] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(cases(subsets), min_size=1, max_size=6))
    def collect(sequence: list[Case]) -> None:
        sequences.append(sequence)

    collect()
    return sequences


def main(count: int, seed: int) -> None:
    dist.init_process_group("sirtaki")
    warnings.simplefilter("ignore", FutureWarning)  # of names before torch 2.13
    rank, everybody = dist.get_rank(), tuple(range(dist.get_world_size()))
    subsets = sorted({everybody, everybody[:-1], everybody[-1:], everybody[::2], everybody[1:]} - {()})
    groups = {
        members: (dist.new_group(members, backend="sirtaki"), dist.new_group(members, backend="gloo"))
        for members in subsets
    }
    for number, sequence in enumerate(drawn(count, seed, subsets)):
        own = random.Random(1000 * number + rank)
        under_way = []
        with torch.no_grad():
            for case in sequence:
                if rank in case.members:
                    course = Course(case, groups[case.members], own)
                    if case.asynchronous and not course.is_refused:  # Gloo's barriers would raise it, too
                        under_way.append(course)
                    else:
                        course.end()
            own.shuffle(under_way)
            for course in under_way:
                course.end()
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: {count} sequences agree")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
