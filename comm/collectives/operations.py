"""Eager operations: what each rank asks for, whether that fits together, and how it is performed.

They run over the control plane, in the thread that agreed on them. Requests are non-blocking and tested in a loop, so
that a lost job ends the wait. Tensors on other devices than the CPU are copied to it and back.

Where all ranks have the same few small all-reduces and broadcasts pending, the message in which they agree carries the
tensors, too, and each rank computes the results from what all have sent. The control plane is made for decisions of a
few bytes: an all-reduce of 1 MiB or more is cut into units over streams instead, by the same `UnitPipeline` as
gradients. All have agreed on its size and dtype by then, so all choose alike, and open the streams together for the
first such tensor. Gathers, broadcasts and exchanges stay: they are rare, and not reductions.

Adasum combines gradients by how far they point the same way (Maleki et al., "Scaling Distributed Training with Adaptive
Summation", MLSys 2021): two at right angles are added, two parallel ones averaged, and everything between goes smoothly
(eq. (3) there); more than two are combined pairwise in a balanced tree. Recursive doubling does that: after the round
of distance d, groups of 2d ranks hold the same vector.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, cached_property, lru_cache
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sirtaki.comm.control.communicator import Communicator, Op, Test
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.transports.contract import HALF_DTYPES, ReduceOp, scale_
from sirtaki.comm.units import UnitPipeline
from sirtaki.errors import ConfigError, PlanError, TransportError

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
FUSED_BYTES = 8 * 1024**2
"""All-reduces that one round brings travel together up to this size."""
FUSIBLE_BYTES = 256 * 1024
"""A tensor larger than this gains nothing from company."""


class CollectiveKind(Enum):
    """Eager operations."""

    ALLREDUCE = "ALLREDUCE"
    ALLGATHER = "ALLGATHER"
    BROADCAST = "BROADCAST"
    ALLTOALL = "ALLTOALL"
    REDUCESCATTER = "REDUCESCATTER"
    BARRIER = "BARRIER"


RAGGED = (CollectiveKind.ALLGATHER, CollectiveKind.ALLTOALL)
"""Operations whose tensors may differ between ranks in their first dimension."""

ADASUM = "adasum"
"""The `op` that is no element-wise reduction, so tensors cannot travel joined together."""


class Signature(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One rank's side of an operation. Several tensors under one name are a group: all or none.

    Attributes:
        name: pairs the operation across ranks.
        shapes: of each tensor.
        dtypes: of each tensor.
        op: reduction, empty where there is none.
        root: source of a broadcast, -1 where there is none.
        factors: (prescale, postscale).
        device: "cpu" or "cuda".
        once: the name will not come again, so it is not worth a bit of its own.
        by_all: ranks that have joined submit it, too; of other operations they take part in all-reduces, with zeros.
        problem: why this rank cannot take part; the operation then fails on all ranks.
    """

    name: str
    kind: CollectiveKind
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    op: str = ""
    root: int = -1
    factors: tuple[float, float] = (1.0, 1.0)
    device: str = "cpu"
    once: bool = False
    by_all: bool = False
    problem: str = ""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, name: str, kind: CollectiveKind, **rest: Any) -> Signature:
        """This rank's side of an operation on these tensors; `rest` are further fields (hence Any).

        Raises:
            ConfigError: one is a DTensor.
        """
        if any(map(is_dtensor, tensors)):
            raise ConfigError(f"{name} is a DTensor, of which each rank has a part: give .to_local() or .full_tensor()")
        return cls(
            name=name,
            kind=kind,
            shapes=tuple([tuple(tensor.shape) for tensor in tensors]),
            dtypes=tuple([_dtype_name(tensor.dtype) for tensor in tensors]),
            device=tensors[0].device.type if tensors else "cpu",
            **rest,
        )

    @cached_property
    def digest(self) -> int:
        """Equal on two ranks if and only if `mismatch` finds nothing between them (up to a chance of 2**-128)."""
        name = hashlib.blake2b(self.name.encode(), key=self._sides, digest_size=DIGEST_BYTES)
        return int.from_bytes(name.digest(), "big")

    @cached_property
    def _sides(self) -> bytes:
        """A digest of all that ranks must agree about but the name."""
        return _digest_of(*[side(self) for side in SIDES.values()], self.problem)

    def renamed(self, name: str) -> Signature:
        """The same of an operation of another name; what has been computed of this one need not be again."""
        other = msgspec.structs.replace(self, name=name)
        known = self.__dict__
        other.__dict__.update({what: known[what] for what in _NAMELESS if what in known})
        return other

    def fixed_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The parts of the shapes that must be the same on all ranks; -1 = any number of rows."""
        if self.kind not in RAGGED:
            return self.shapes
        return tuple([(-1, *shape[1:]) if shape else shape for shape in self.shapes])

    @property
    def needs_data(self) -> bool:
        """A rank that has joined cannot take part."""
        return self.kind is not CollectiveKind.ALLREDUCE and not self.by_all

    @cached_property
    def may_be_carried(self) -> bool:
        """The tensors are small, and what all ranks send is enough to compute the result."""
        kinds = (CollectiveKind.ALLREDUCE, CollectiveKind.BROADCAST, CollectiveKind.BARRIER)
        return self.kind in kinds and self.op != ADASUM and self.device == "cpu" and self.size_bytes <= CARRIED_BYTES

    @cached_property
    def size_bytes(self) -> int:
        """Of all tensors together."""
        return sum(
            math.prod(shape) * getattr(torch, dtype).itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


@lru_cache(maxsize=4096)
def _digest_of(*sides: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(sides), digest_size=DIGEST_BYTES).digest()


_NAMELESS = ("_sides", "size_bytes", "may_be_carried")
"""What is computed of a signature once, and does not depend on its name."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether it is one of torch.distributed's, which takes time to import and need not be."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh")


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` → `float32`."""
    return str(dtype).removeprefix("torch.")


SIDES: dict[str, Callable[[Signature], object]] = {
    "collective operations": lambda side: side.kind.value,
    "{} CPU/GPU device selection": lambda side: side.device,
    "data types": lambda side: side.dtypes,
    "{} reduce operations": lambda side: side.op,
    "prescale and/or postscale factors": lambda side: side.factors,
    "{} root ranks": lambda side: side.root,
    "{} tensor shapes": Signature.fixed_shapes,
}
"""What the ranks must agree about, in words ({} = the kind of operation), and where it is in a signature."""


def mismatch(by_rank: Mapping[int, Signature]) -> str | None:
    """What differs between the ranks' sides of one operation, in words; None if they fit together."""
    for rank, side in sorted(by_rank.items(), key=lambda item: item[0]):
        if side.problem:
            return f"Rank {rank} cannot take part in {side.kind.value}: {side.problem}"
    some = next(iter(by_rank.values()))
    for what, of in SIDES.items():
        ranks: dict[object, list[int]] = {}
        for rank in sorted(by_rank):
            ranks.setdefault(of(by_rank[rank]), []).append(rank)
        if len(ranks) > 1:
            shown = (lambda side: side.shapes) if of is SIDES["{} tensor shapes"] else of
            sides = [f"{_ranks_have(same)} {_words(shown(by_rank[same[0]]))}" for same in ranks.values()]
            return f"Mismatched {what.format(some.kind.value)} of {some.name!r}: {', '.join(sides)}."
    return None


def _ranks_have(ranks: Sequence[int]) -> str:
    """`rank 3 has`, `ranks 0, 1, 2 and 5 more have`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} have"


def _words(value: object) -> str:
    """`((3, 4),)` → `[3, 4]`, `("float32",)` → `float32`."""
    parts = value if isinstance(value, tuple) else (value,)
    return ", ".join(str(list(part)) if isinstance(part, tuple) else str(part) for part in parts) or "none"


Progress = tuple[int, ...]
"""How far a rank has got; of those that join between the same two rounds, the one that has got farthest joins last."""


class PendingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of itself when the ranks exchange what they have pending.

    Attributes:
        joined: it has no more data since it has got so far; None = it has data.
        closing: it shuts down.
        unnamed: how many unnamed operations it has submitted.
        signatures: of its pending operations, where they are exchanged.
    """

    joined: Progress | None
    closing: bool
    unnamed: int
    signatures: list[Signature] = []


def batches(ready: Mapping[str, Signature]) -> Iterator[list[str]]:
    """Names that go in one message, in the order in which to perform them; the same on all ranks.

    Small all-reduces with the same operation and factors share a message; anything else goes alone.
    """
    open_batches: dict[object, list[str]] = {}
    filled_bytes: dict[object, int] = {}
    for name in sorted(ready):
        signature = ready[name]
        size_bytes = (
            signature.size_bytes if signature.kind is CollectiveKind.ALLREDUCE and signature.op != ADASUM else None
        )
        if size_bytes is None or size_bytes > FUSIBLE_BYTES:
            yield [name]
            continue
        key = (signature.op, signature.factors)
        if filled_bytes.get(key, 0) + size_bytes > FUSED_BYTES:
            yield open_batches.pop(key)
            filled_bytes[key] = 0
        open_batches.setdefault(key, []).append(name)
        filled_bytes[key] = filled_bytes.get(key, 0) + size_bytes
    yield from open_batches.values()


def combine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b` of two vectors; one that is zero leaves the other as it is."""
    a, b = one.double(), other.double()
    product, a_square, b_square = float(a @ b), float(a @ a), float(b @ b)
    a_share = 1.0 - product / (2 * a_square) if a_square else 1.0
    b_share = 1.0 - product / (2 * b_square) if b_square else 1.0
    return (a_share * a + b_share * b).to(one.dtype)


def adasum_(vector: torch.Tensor, *, comm: Communicator, wait: Callable[[Test], None]) -> None:
    """Collective: replaces a contiguous 1-d CPU vector by the Adasum of all ranks'; their number is a power of two."""
    distance = 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        theirs = torch.empty_like(vector)
        receiving = comm.receive(theirs.numpy(), partner)
        wait(comm.send(vector.numpy(), partner))
        wait(receiving)
        # Both partners compute the same expression in the same order, so they get the same bits.
        low, high = (vector, theirs) if comm.rank < partner else (theirs, vector)
        vector.copy_(combine(low, high))
        distance *= 2


Tensors = list[torch.Tensor]

SPIN_S = 3e-3
"""All ranks are here when a transfer begins, so most end within this."""

NAP_S = 50e-6
"""Between tests of a longer one: it moves only while it is tested, so naps are short."""

TESTS_A_YIELD = 8


LANE_BYTES = 1 << 20
"""All-reduces of at least so much travel over lanes, which are opened for the first of them."""

LANE_DTYPES = frozenset((torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64))
"""Those that every transport adds up as the control plane does; halves are made float32 before."""

OpenLanes = Callable[[Communicator], UnitPipeline]
"""Collective: opens lanes between the ranks of a communicator that nothing else uses meanwhile."""


class Ranks:
    """The ranks that take part, how to wait for them, and the lanes between them."""

    def __init__(self, comm: Communicator, failures: FailureBoard, open_lanes: OpenLanes | None = None) -> None:
        """Keeps `comm`, which nobody else uses at the same time; without `open_lanes` all goes over that."""
        self.comm, self._failures, self._open_lanes = comm, failures, open_lanes
        self.rank, self.size = comm.rank, comm.size
        self.lanes: UnitPipeline | None = None

    def all_reduce_(self, tensor: torch.Tensor, op: str) -> None:
        """Collective: reduces a contiguous 1-d CPU tensor in place; a bool as the bytes 0 and 1."""
        if not tensor.numel():
            return
        if tensor.dtype in LANE_DTYPES and tensor.numel() * tensor.itemsize >= LANE_BYTES and self._have_lanes():
            assert self.lanes is not None
            self.lanes.reduce_(tensor, ReduceOp(op))
        else:
            self.wait(self.comm.all_reduce(_reducible(tensor), Op(op)))

    def _have_lanes(self) -> bool:
        """Collective at the first call: opens them; where that cannot be done, all ranks do without."""
        if self._open_lanes is not None:
            open_lanes, self._open_lanes = self._open_lanes, None
            try:
                self.lanes = open_lanes(self.comm)
            except (ConfigError, PlanError, TransportError) as err:
                if self.rank == 0:
                    logger.info("large eager operations travel over the control plane: %s", err)
        return self.lanes is not None

    def wait(self, test: Test) -> None:
        """Returns once the operation is complete.

        Raises:
            CommError: the job failed meanwhile.
        """
        if test():
            return
        give_up_spinning = time.perf_counter() + SPIN_S
        while time.perf_counter() < give_up_spinning:
            for _ in range(TESTS_A_YIELD):
                if test():
                    return
            os.sched_yield()
        while not test():
            self._failures.check()
            time.sleep(NAP_S)

    def all_gather(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Collective: the small arrays of all ranks, `(size, *values.shape)`."""
        gathered = np.empty((self.size, *values.shape), dtype=np.int64)
        self.wait(self.comm.all_gather(values, gathered))
        return gathered


Batch = Sequence[tuple[Signature, Sequence[torch.Tensor]]]
"""Operations of this rank, with tensors in the signatures' shapes."""


def perform(batch: Batch, ranks: Ranks) -> list[Tensors]:
    """Collective: runs one operation, or several all-reduces (as `requests.batches` joins them) in one message.

    The inputs are not changed.

    Returns:
        For each operation, new tensors on the inputs' device, contiguous.
    """
    signature = batch[0][0]
    inputs = [[_on_host(tensor) for tensor in tensors] for _, tensors in batch]
    if len(batch) == 1:
        results = [PERFORMERS[signature.kind](signature, inputs[0], ranks)]
    else:
        everything = iter(_all_reduce(signature, list(chain.from_iterable(inputs)), ranks))
        results = [list(islice(everything, len(tensors))) for tensors in inputs]
    return [_on_device_of(tensors, result) for (_, tensors), result in zip(batch, results, strict=True)]


def zeros_for(signature: Signature) -> Tensors:
    """What a rank that has joined contributes."""
    return [
        torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu")
        for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
    ]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return (tensor if tensor.is_cpu else tensor.cpu()).contiguous()


def _on_device_of(tensors: Sequence[torch.Tensor], results: Tensors) -> Tensors:
    if not tensors or tensors[0].device.type == "cpu":
        return results
    device = tensors[0].device
    moved = [result.to(device) for result in results]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the waiting thread uses another stream
    return moved


def _all_reduce(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """All tensors of one dtype travel in one message."""
    if signature.op == ADASUM:
        return _adasum(signature, inputs, ranks)
    if len(inputs) == 1:
        return [_reduced(inputs[0].reshape(-1), signature, ranks).view(inputs[0].shape)]
    results: Tensors = list(inputs)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(inputs):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    for numbers in by_dtype.values():
        flat = _reduced(torch.cat([inputs[number].reshape(-1) for number in numbers]), signature, ranks)
        sizes = [inputs[number].numel() for number in numbers]
        for number, part in zip(numbers, torch.split(flat, sizes), strict=True):
            # Members of a group get memory of their own: one that is kept must not keep all.
            results[number] = part.clone().view(inputs[number].shape)
    return results


def _reduced(flat: torch.Tensor, signature: Signature, ranks: Ranks) -> torch.Tensor:
    """Collective: a 1-d tensor, scaled, reduced and scaled."""
    received = _work_copy(flat, signature.factors[0])
    ranks.all_reduce_(received, signature.op)
    scale_(received, signature.factors[1])
    return received.to(flat.dtype)


def _work_copy(flat: torch.Tensor, prescale: float) -> torch.Tensor:
    """A scaled copy in a dtype that every backend knows: halves as float32."""
    copy = flat.float() if flat.dtype in HALF_DTYPES else flat.clone()
    scale_(copy, prescale)
    return copy


def _reducible(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor as it is reduced: bool as the bytes 0 and 1."""
    array: npt.NDArray[Any] = (tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor).numpy()
    return array


def _adasum(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Each tensor by itself: its direction decides how it is combined."""
    results = []
    for tensor in inputs:
        flat = _work_copy(tensor.reshape(-1), signature.factors[0])
        adasum_(flat, comm=ranks.comm, wait=ranks.wait)
        scale_(flat, signature.factors[1])
        results.append(flat.to(tensor.dtype).view(tensor.shape))
    return results


def _broadcast(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    results = [tensor.clone() for tensor in inputs]
    for result in results:
        ranks.wait(ranks.comm.broadcast(_bytes(result), signature.root))
    return results


def _barrier(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    ranks.wait(ranks.comm.barrier())
    return []


def _all_gather(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Dimension 0 may differ between ranks."""
    rows = ranks.all_gather(np.array([tensor.shape[0] for tensor in inputs], dtype=np.int64))
    results = []
    for tensor, rows_of in zip(inputs, rows.T, strict=True):
        result = tensor.new_empty((int(rows_of.sum()), *tensor.shape[1:]))
        counts = (rows_of * _row_bytes(tensor)).tolist()
        ranks.wait(ranks.comm.all_gather(_bytes(tensor), _bytes(result), counts))
        results.append(result)
    return results


def _all_to_all(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Inputs: the tensor, and how many of its rows go to each rank (int32); the results are of the same form."""
    tensor, splits = inputs
    sent = splits.numpy().astype(np.int64)
    received = np.empty_like(sent)
    ranks.wait(ranks.comm.all_to_all(sent, received))
    result = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    row_bytes = _row_bytes(tensor)
    counts = (sent * row_bytes).tolist(), (received * row_bytes).tolist()
    ranks.wait(ranks.comm.all_to_all(_bytes(tensor), _bytes(result), counts))
    return [result, torch.from_numpy(received.astype(np.int32))]


def _reduce_scatter(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Rows over ranks; the first `rows % size` ranks get one more."""
    results = []
    for tensor in inputs:
        bounds = row_bounds(tensor.shape[0], ranks.size)
        row_numel = tensor.shape[1:].numel()
        counts = [(stop - start) * row_numel for start, stop in pairwise(bounds)]
        sent = _work_copy(tensor.reshape(-1), signature.factors[0])
        part = sent.new_empty(counts[ranks.rank])
        if sent.numel():
            ranks.wait(ranks.comm.reduce_scatter(_reducible(sent), _reducible(part), counts, Op(signature.op)))
        scale_(part, signature.factors[1])
        own_rows = bounds[ranks.rank + 1] - bounds[ranks.rank]
        results.append(part.to(tensor.dtype).view(own_rows, *tensor.shape[1:]))
    return results


# ── small operations, whose tensors travel in the message in which the ranks agree on them ────────────────────────────

CARRIED_BYTES = 1024
"""What a rank may send along."""

ALIGNED_BYTES = 16
"""Tensors of any dtype may begin there."""

KEPT_SLOTS = 1024
"""Of so many places and forms of tensors in messages the views are kept."""

_WIRE_DTYPES = {**dict.fromkeys(HALF_DTYPES, torch.float32), torch.bool: torch.uint8}
"""In which dtype all-reduced tensors travel, where it is not their own: as `_work_copy` and `_reducible` have it."""

_COMBINATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Slot(NamedTuple):
    """Where a tensor lies in the messages of a round, in its own shape and the dtype in which it travels.

    Attributes:
        sent: in the message of this rank.
        gathered: in those of all ranks, by rank.
        end: the byte of a message behind it.
    """

    sent: torch.Tensor
    gathered: tuple[torch.Tensor, ...]
    end: int


class RoundMessage:
    """What each rank sends in a round: a head, and tensors behind it.

    Attributes:
        mine: this rank's, bytes.
        head: of it.
        everybody: as it is gathered, bytes, `(size, n)`.
    """

    def __init__(self, size: int, head_bytes: int) -> None:
        """Of so many ranks; heads of so many bytes, a multiple of `ALIGNED_BYTES`."""
        self.mine: npt.NDArray[np.uint8] = np.zeros(head_bytes + CARRIED_BYTES, dtype=np.uint8)
        self.everybody: npt.NDArray[np.uint8] = np.empty((size, self.mine.size), dtype=np.uint8)
        self._rows = [torch.from_numpy(row) for row in (self.mine, *self.everybody)]
        self.head = memoryview(self.mine)[:head_bytes]  # type: ignore[arg-type]  # NumPy's stub of 3.11
        self._head_bytes = head_bytes
        self._slots: dict[tuple[int, torch.Size, torch.dtype], Slot] = {}

    def load(self, works: Sequence[tuple[Signature, Sequence[torch.Tensor]]]) -> list[list[Slot]] | None:
        """Puts the tensors of operations into this rank's message, scaled, if there is room for all.

        Returns:
            For each operation and tensor where it lies; None if they do not travel along, which depends on nothing but
            the operations.
        """
        found, begin = [], self._head_bytes
        for signature, tensors in works:
            if not signature.may_be_carried:
                return None
            slots = []
            for tensor in tensors:
                dtype = tensor.dtype
                if signature.kind is CollectiveKind.ALLREDUCE:
                    dtype = _WIRE_DTYPES.get(dtype, dtype)
                slot = self._slots.get((begin, tensor.shape, dtype)) or self._slot(begin, tensor.shape, dtype)
                if slot is None:
                    return None
                slot.sent.copy_(tensor.detach())
                scale_(slot.sent, signature.factors[0])
                slots.append(slot)
                begin = slot.end
            found.append(slots)
        return found

    def _slot(self, begin: int, shape: torch.Size, dtype: torch.dtype) -> Slot | None:
        """A slot from this byte on, which is kept for the next time; None if it does not fit."""
        used = begin + shape.numel() * dtype.itemsize
        if used > self.mine.size:
            return None
        mine, *everybody = [row[begin:used].view(dtype).view(shape) for row in self._rows]
        if len(self._slots) >= KEPT_SLOTS:
            self._slots.clear()
        slot = Slot(mine, tuple(everybody), -(-used // ALIGNED_BYTES) * ALIGNED_BYTES)
        self._slots[begin, shape, dtype] = slot
        return slot


def result_of(signature: Signature, inputs: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Tensors:
    """The result of an operation of which all ranks have sent everything along: new tensors like the inputs.

    Args:
        signature: of the operation.
        inputs: of this rank.
        slots: where each of them lies in the messages.
    """
    results = []
    for tensor, slot in zip(inputs, slots, strict=True):
        if signature.kind is CollectiveKind.BROADCAST:
            results.append(slot.gathered[signature.root].clone())
            continue
        combine, first, rest = _COMBINATIONS[signature.op], slot.gathered[0], slot.gathered[1:]
        result = combine(first, rest[0]) if rest else first.clone()
        for row in rest[1:]:  # in the order of ranks, so that all get the same bits
            combine(result, row, out=result)
        scale_(result, signature.factors[1])
        results.append(result if result.dtype is tensor.dtype else result.to(tensor.dtype))
    return results


def row_bounds(rows: int, size: int) -> list[int]:
    """First row of each rank's part and, last, the number of rows: `(size + 1,)`."""
    return [rank * (rows // size) + min(rank, rows % size) for rank in range(size + 1)]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous CPU tensor, as it travels, whatever its dtype."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    # Not reshape(-1): dimensions of length 1 may have any stride, and the result would inherit it.
    array: npt.NDArray[np.uint8] = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return array


PERFORMERS: dict[CollectiveKind, Callable[[Signature, Tensors, Ranks], Tensors]] = {
    CollectiveKind.ALLREDUCE: _all_reduce,
    CollectiveKind.BROADCAST: _broadcast,
    CollectiveKind.BARRIER: _barrier,
    CollectiveKind.ALLGATHER: _all_gather,
    CollectiveKind.ALLTOALL: _all_to_all,
    CollectiveKind.REDUCESCATTER: _reduce_scatter,
}
