"""Eager operations: their signatures (kind, shapes, dtypes, …), the check that these match, and their execution.

Operations run over the control plane (communicators for small collectives), in the thread that runs the engine's round
(an agreement of the ranks on operations to run). They poll non-blocking requests, so that a failure of the job ends
their waits. Tensors on GPUs are reduced over NCCL (`on_gpu`), or copied to the CPU and back.

If all ranks have the same few small all-reduces and broadcasts pending, the messages of the round contain the tensors,
and each rank computes the results from all messages. The control plane is built for small messages. So an all-reduce of
at least 1 MiB is split into units (buckets) by a `UnitPipeline`, like gradients, and uses several streams (parallel
connections). All ranks have agreed on its size and dtype, so they make the same choice, and open the streams together
at the first such tensor. Other operations always use the control plane, because they are rare.

Adasum combines gradients by the angle between them (Maleki et al., "Scaling Distributed Training with Adaptive
Summation", MLSys 2021): orthogonal gradients are added, parallel ones are averaged, with a smooth transition (eq. 3 of
that paper). More than two gradients are combined pairwise in a balanced tree, by recursive doubling: after ranks have
exchanged vectors at distance d, groups of 2d ranks hold the same vector.
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
"""Largest total size, in bytes, of small all-reduces that are fused into one."""
FUSIBLE_BYTES = 256 * 1024
"""Size in bytes of the largest tensor whose all-reduce is fused with others. For larger ones, fusing saves no time."""


class CollectiveKind(Enum):
    """Kind of an eager operation (collective on the user's tensors)."""

    ALLREDUCE = "ALLREDUCE"
    ALLGATHER = "ALLGATHER"
    BROADCAST = "BROADCAST"
    ALLTOALL = "ALLTOALL"
    REDUCESCATTER = "REDUCESCATTER"
    BARRIER = "BARRIER"


RAGGED = (CollectiveKind.ALLGATHER, CollectiveKind.ALLTOALL)
"""Operations whose tensors may have different first dimensions on different ranks."""

ADASUM = "adasum"
"""Name of the Adasum reduction. It is not element-wise, so the all-reduces of several tensors cannot be fused."""


class Signature(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Description of one rank's part in an operation on one or several tensors.

    Attributes:
        name: name by which ranks find the same operation.
        kind: kind of the operation.
        shapes: shape of each tensor.
        dtypes: dtype of each tensor, such as "float32".
        op: reduction. "" = none.
        root: source rank of a broadcast. -1 = none.
        factors: (prescale, postscale), by which tensors are multiplied before and after the reduction.
        device: type of the tensors' device, such as "cpu" or "cuda". "mixed" = tensors on devices of several types,
            which are reduced in host memory.
        once: True if the name is used only once. It then gets no bit in the messages by which ranks agree on
            operations to run.
        by_all: True if ranks submit the operation even after `join()`. Otherwise joined ranks contribute zeros if it is
            an all-reduce, and any other operation fails.
        problem: reason why this rank cannot take part. The operation then fails on all ranks. "" = none.
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
        """Return the signature of an operation on these tensors. `rest` are further fields of the signature.

        Raises:
            ConfigError: a tensor is a DTensor.
        """
        if any(map(is_dtensor, tensors)):
            raise ConfigError(
                f"operation {name} got a DTensor, which is sharded over ranks; pass its .to_local() or .full_tensor()"
            )
        # Ignore the second tensor of an all-to-all: the numbers of rows, which are always on the CPU.
        places = {tensor.device.type for tensor in (tensors[:1] if kind is CollectiveKind.ALLTOALL else tensors)}
        return cls(
            name=name,
            kind=kind,
            shapes=tuple([tuple(tensor.shape) for tensor in tensors]),
            dtypes=tuple([_dtype_name(tensor.dtype) for tensor in tensors]),
            device="mixed" if len(places) > 1 else places.pop() if places else "cpu",
            **rest,
        )

    @cached_property
    def digest(self) -> int:
        """Return a 128-bit hash of all fields that must be equal on all ranks.

        Two signatures have equal digests if `mismatch` finds no difference. If it finds one, their digests are equal
        with probability 2**-128.
        """
        name = hashlib.blake2b(self.name.encode(), key=self._fields_digest, digest_size=DIGEST_BYTES)
        return int.from_bytes(name.digest(), "big")

    @cached_property
    def _fields_digest(self) -> bytes:
        """Return a digest of all fields that must be equal on all ranks, except the name."""
        return _digest_of(*[side(self) for side in AGREED_FIELDS.values()], self.problem)

    def renamed(self, name: str) -> Signature:
        """Return a copy with another name. The copy keeps cached properties that do not depend on the name."""
        other = msgspec.structs.replace(self, name=name)
        known = self.__dict__
        other.__dict__.update({what: known[what] for what in _NAME_INDEPENDENT if what in known})
        return other

    def fixed_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors, with -1 for each dimension that may differ between ranks."""
        if self.kind not in RAGGED:
            return self.shapes
        return tuple([(-1, *shape[1:]) if shape else shape for shape in self.shapes])

    @property
    def needs_data(self) -> bool:
        """Return whether the operation fails while a rank is in `join()`, because it needs data from all ranks."""
        return self.kind is not CollectiveKind.ALLREDUCE and not self.by_all

    @cached_property
    def may_be_carried(self) -> bool:
        """Return whether each rank can compute the result from the messages by which ranks agree on the operation.

        These messages then contain the tensors of all ranks.
        """
        kinds = (CollectiveKind.ALLREDUCE, CollectiveKind.BROADCAST, CollectiveKind.BARRIER)
        return self.kind in kinds and self.op != ADASUM and self.device == "cpu" and self.size_bytes <= CARRIED_BYTES

    @cached_property
    def size_bytes(self) -> int:
        """Return the total size of all tensors in bytes."""
        return sum(
            math.prod(shape) * getattr(torch, dtype).itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


@lru_cache(maxsize=4096)
def _digest_of(*sides: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(sides), digest_size=DIGEST_BYTES).digest()


_NAME_INDEPENDENT = ("_fields_digest", "size_bytes", "may_be_carried")
"""Cached properties of a `Signature` that do not depend on the operation's name."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing `torch.distributed`, which takes time."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh")


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


AGREED_FIELDS: dict[str, Callable[[Signature], object]] = {
    "collective operations": lambda side: side.kind.value,
    "{} CPU/GPU device selection": lambda side: side.device,
    "data types": lambda side: side.dtypes,
    "{} reduce operations": lambda side: side.op,
    "prescale and/or postscale factors": lambda side: side.factors,
    "{} root ranks": lambda side: side.root,
    "{} tensor shapes": Signature.fixed_shapes,
}
"""Fields of a `Signature` that must be equal on all ranks. Maps a description for messages, in which {} stands for the
kind of the operation, to a function that returns the field."""


def mismatch(by_rank: Mapping[int, Signature]) -> str | None:
    """Describe how the descriptions of an operation on different ranks contradict each other. None if they match."""
    for rank, side in sorted(by_rank.items(), key=lambda item: item[0]):
        if side.problem:
            return f"Rank {rank} cannot take part in {side.kind.value}: {side.problem}"
    some = next(iter(by_rank.values()))
    for what, of in AGREED_FIELDS.items():
        ranks: dict[object, list[int]] = {}
        for rank in sorted(by_rank):
            ranks.setdefault(of(by_rank[rank]), []).append(rank)
        if len(ranks) > 1:
            shown = (lambda side: side.shapes) if of is AGREED_FIELDS["{} tensor shapes"] else of
            sides = [f"{_ranks_have(same)} {_format(shown(by_rank[same[0]]))}" for same in ranks.values()]
            return f"Mismatched {what.format(some.kind.value)} of {some.name!r}: {', '.join(sides)}."
    return None


def _ranks_have(ranks: Sequence[int]) -> str:
    """Return the subject and verb of a message about ranks: `rank 3 has` or `ranks 0, 1, 2 and 5 more have`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} have"


def _format(value: object) -> str:
    """Format a field of a `Signature` for a message: `((3, 4),)` becomes `[3, 4]`, and `("float32",)` becomes
    `float32`.
    """
    parts = value if isinstance(value, tuple) else (value,)
    return ", ".join(str(list(part)) if isinstance(part, tuple) else str(part) for part in parts) or "none"


Progress = tuple[int, ...]
"""Position in training. If several ranks call `join()` at the same time, the one with the highest position counts as
last."""


class PendingReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank, sent when the ranks exchange their pending operations.

    Attributes:
        joined: position in the training at which the rank called `join()`. None = it has not called it.
        closing: True if the rank is shutting down.
        unnamed: number of unnamed operations that the rank has submitted.
        signatures: signatures of the rank's pending operations.
    """

    joined: Progress | None
    closing: bool
    unnamed: int
    signatures: list[Signature] = []


def batches(ready: Mapping[str, Signature]) -> Iterator[list[str]]:
    """Yield lists of operation names. The operations of a list are performed together. Equal on all ranks.

    Small all-reduces with the same reduction and scale factors share a list. Every other operation is performed alone.
    """
    open_batches: dict[object, list[str]] = {}
    filled_bytes: dict[object, int] = {}
    for name in sorted(ready):
        signature = ready[name]
        size_bytes = signature.size_bytes
        if signature.kind is not CollectiveKind.ALLREDUCE or signature.op == ADASUM or size_bytes > FUSIBLE_BYTES:
            yield [name]
            continue
        key = (signature.op, signature.factors, signature.device)
        if filled_bytes.get(key, 0) + size_bytes > FUSED_BYTES:
            yield open_batches.pop(key)
            filled_bytes[key] = 0
        open_batches.setdefault(key, []).append(name)
        filled_bytes[key] = filled_bytes.get(key, 0) + size_bytes
    yield from open_batches.values()


def combine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return Adasum's `(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`. If one vector is zero, return the sum."""
    a, b = one.double(), other.double()
    product, a_square, b_square = a @ b, a @ a, b @ b
    # Keep the two factors as tensors, because reading their values would make the host wait for a GPU.
    a_share = torch.where(a_square != 0, 1.0 - product / (2 * a_square), 1.0)
    b_share = torch.where(b_square != 0, 1.0 - product / (2 * b_square), 1.0)
    return (a_share * a + b_share * b).to(one.dtype)


def adasum_(vector: torch.Tensor, ranks: Ranks) -> None:
    """Replace a contiguous 1-d vector by its Adasum over all ranks. Collective. Needs 2ⁿ ranks."""
    distance = 1
    while distance < ranks.size:
        partner = ranks.rank ^ distance
        theirs = ranks.exchange(vector, partner)
        # Order the operands by rank, so that both partners get bitwise equal results.
        low, high = (vector, theirs) if ranks.rank < partner else (theirs, vector)
        vector.copy_(combine(low, high))
        distance *= 2


Tensors = list[torch.Tensor]

SPIN_S = 3e-3
"""Seconds for which a thread that waits for an operation polls it without sleeping. Most operations complete within
this time, because all ranks start them together."""

SLEEP_S = 50e-6
"""Seconds of sleep between two polls of an operation that takes longer than `SPIN_S`. It is short, because an operation
makes progress only while it is polled."""

TESTS_PER_YIELD = 8


LANE_BYTES = 1 << 20
"""Size in bytes from which all-reduces use lanes (parallel connections of a `UnitPipeline`). The lanes are opened at
the first such all-reduce."""

LANE_DTYPES = frozenset((torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64))
"""Dtypes of tensors whose large all-reduces use lanes (parallel connections), because every transport can reduce them.
Half precision is converted to float32 first."""

OpenLanes = Callable[[Communicator], UnitPipeline]
"""Function that opens lanes (parallel connections for large all-reduces) between the ranks of a communicator.
Collective. No operation may use the communicator during the call."""


class Ranks:
    """Participating ranks: their communicator, and their lanes (parallel connections) for large all-reduces.

    Tensors travel in host memory. `NcclRanks` overrides the methods that move tensors.
    """

    def __init__(self, comm: Communicator, failures: FailureBoard, open_lanes: OpenLanes | None = None) -> None:
        """Store `comm`, which no other object may use. Without `open_lanes`, large all-reduces use `comm`, too."""
        self.comm, self.failures, self._open_lanes = comm, failures, open_lanes
        self.rank, self.size = comm.rank, comm.size
        self.lanes: UnitPipeline | None = None

    def all_reduce_(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce a contiguous 1-d CPU tensor in place. Bools are reduced as bytes 0 and 1. Collective."""
        if not tensor.numel():
            return
        if tensor.dtype in LANE_DTYPES and tensor.numel() * tensor.itemsize >= LANE_BYTES and self._open_lanes_once():
            assert self.lanes is not None
            self.lanes.reduce_(tensor, ReduceOp(op))
        else:
            self.wait(self.comm.all_reduce(_reducible(tensor), Op(op)))

    def _open_lanes_once(self) -> bool:
        """Open the lanes (parallel connections for large all-reduces) at the first call, which is collective.

        Returns False on all ranks if they cannot be opened.
        """
        if self._open_lanes is not None:
            open_lanes, self._open_lanes = self._open_lanes, None
            try:
                self.lanes = open_lanes(self.comm)
            except (ConfigError, PlanError, TransportError) as err:
                if self.rank == 0:
                    logger.info(
                        "collectives that the script calls itself, such as hvd.allreduce(), use one slow TCP or MPI "
                        "connection, because Sirtaki cannot open parallel connections: %s",
                        err,
                    )
        return self.lanes is not None

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor with the values of `tensor`, in host memory, from which tensors are sent."""
        tensor = resolved(tensor)
        return (tensor if tensor.is_cpu else tensor.cpu()).contiguous()

    def deliver(self, tensors: Sequence[torch.Tensor], results: Tensors) -> Tensors:
        """Return the results on the devices of the input `tensors`."""
        moved = [result.to(tensor.device) for tensor, result in zip(tensors, results, strict=True)]
        for device in {tensor.device for tensor in moved if tensor.is_cuda}:
            # Wait for the copies, because the thread that waits for the result uses another CUDA stream.
            torch.cuda.current_stream(device).synchronize()
        return moved

    def broadcast_(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite a contiguous tensor with that of the rank `root`. Collective."""
        self.wait(self.comm.broadcast(_array(tensor), root))

    def all_gather(self, tensor: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> None:
        """Write the tensors of all ranks to `gathered`, in rank order. `counts` are bytes by rank. Collective."""
        self.wait(self.comm.all_gather(_array(tensor), _array(gathered), counts))

    def all_to_all(
        self, tensor: torch.Tensor, received: torch.Tensor, to: Sequence[int], source: Sequence[int]
    ) -> None:
        """Send `to[rank]` bytes of `tensor` to each rank, and receive `source[rank]` bytes from it. Collective."""
        self.wait(self.comm.all_to_all(_array(tensor), _array(received), (to, source)))

    def exchange(self, vector: torch.Tensor, partner: int) -> torch.Tensor:
        """Send a contiguous vector to `partner`, and return the partner's vector. Collective."""
        theirs = torch.empty_like(vector)
        receiving = self.comm.receive(theirs.numpy(), partner)
        self.wait(self.comm.send(vector.numpy(), partner))
        self.wait(receiving)
        return theirs

    def reduce_scatter(self, tensor: torch.Tensor, part: torch.Tensor, counts: Sequence[int], op: str) -> None:
        """Reduce a contiguous 1-d tensor, and write this rank's elements to `part`. Collective.

        `counts` are elements by rank.
        """
        if tensor.numel():
            self.wait(self.comm.reduce_scatter(_reducible(tensor), _reducible(part), counts, Op(op)))

    def wait(self, test: Test) -> None:
        """Wait until an operation is complete.

        Raises:
            CommError: the job has failed.
        """
        if test():
            return
        give_up_spinning = time.perf_counter() + SPIN_S
        while time.perf_counter() < give_up_spinning:
            for _ in range(TESTS_PER_YIELD):
                if test():
                    return
            os.sched_yield()
        while not test():
            self.failures.check()
            time.sleep(SLEEP_S)


Batch = Sequence[tuple[Signature, Sequence[torch.Tensor]]]
"""Operations to perform together: the signature and this rank's tensors of each operation."""


def perform(batch: Batch, ranks: Ranks) -> list[Tensors]:
    """Perform one operation, or several all-reduces that `batches` has grouped. Inputs are not changed. Collective.

    Returns:
        For each operation, new contiguous tensors on the device of its inputs.
    """
    signature = batch[0][0]
    inputs = [[ranks.place(tensor) for tensor in tensors] for _, tensors in batch]
    if len(batch) == 1:
        results = [PERFORMERS[signature.kind](signature, inputs[0], ranks)]
    else:
        everything = iter(_all_reduce(signature, list(chain.from_iterable(inputs)), ranks))
        results = [list(islice(everything, len(tensors))) for tensors in inputs]
    return [ranks.deliver(tensors, result) for (_, tensors), result in zip(batch, results, strict=True)]


def zeros_for(signature: Signature) -> Tensors:
    """Return the zeros that this rank contributes to an operation after `join()`."""
    return [
        torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu")
        for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
    ]


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor with plain values.

    A lazily conjugated or negated tensor is copied, because its memory holds other values.
    """
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _all_reduce(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """All-reduce tensors. Tensors of one dtype are concatenated and reduced together."""
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
            # Clone this part of the fused result, because a view would keep the memory of all tensors alive.
            results[number] = part.clone().view(inputs[number].shape)
    return results


def _reduced(flat: torch.Tensor, signature: Signature, ranks: Ranks) -> torch.Tensor:
    """Multiply a 1-d tensor by the prescale factor, all-reduce it, and apply the postscale factor. Collective."""
    received = _work_copy(flat, signature.factors[0])
    ranks.all_reduce_(received, signature.op)
    scale_(received, signature.factors[1])
    return received.to(flat.dtype)


def _work_copy(flat: torch.Tensor, prescale: float) -> torch.Tensor:
    """Return a copy, multiplied by the scale factor.

    Half precision becomes float32, because the control plane cannot reduce half precision.
    """
    copy = flat.float() if flat.dtype in HALF_DTYPES else flat.clone()
    scale_(copy, prescale)
    return copy


def _reducible(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the memory of a tensor as a NumPy array for a reduction. Bools become bytes 0 and 1."""
    array: npt.NDArray[Any] = (tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor).numpy()
    return array


def _adasum(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Apply Adasum to each tensor separately, because it depends on the angle between the tensors of two ranks."""
    results = []
    for tensor in inputs:
        flat = _work_copy(tensor.reshape(-1), signature.factors[0])
        adasum_(flat, ranks)
        scale_(flat, signature.factors[1])
        results.append(flat.to(tensor.dtype).view(tensor.shape))
    return results


def _broadcast(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    results = [tensor.clone() for tensor in inputs]
    for result in results:
        ranks.broadcast_(result, signature.root)
    return results


def _barrier(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    ranks.wait(ranks.comm.barrier())
    return []


def _all_gather(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """All-gather tensors and concatenate them along dimension 0, whose length may differ between ranks."""
    own = np.array([tensor.shape[0] for tensor in inputs], dtype=np.int64)
    rows = np.empty((ranks.size, own.size), dtype=np.int64)
    ranks.wait(ranks.comm.all_gather(own, rows))
    results = []
    for tensor, rows_of in zip(inputs, rows.T, strict=True):
        result = tensor.new_empty((int(rows_of.sum()), *tensor.shape[1:]))
        counts = (rows_of * _row_bytes(tensor)).tolist()
        ranks.all_gather(tensor, result, counts)
        results.append(result)
    return results


def _all_to_all(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Send rows of a tensor to each rank, and receive rows from each rank.

    Inputs are the tensor and the number of rows for each rank (int32). Results are the received rows and the number of
    rows from each rank.
    """
    tensor, splits = inputs
    sent = splits.numpy().astype(np.int64)
    received = np.empty_like(sent)
    ranks.wait(ranks.comm.all_to_all(sent, received))
    result = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    row_bytes = _row_bytes(tensor)
    ranks.all_to_all(tensor, result, (sent * row_bytes).tolist(), (received * row_bytes).tolist())
    return [result, torch.from_numpy(received.astype(np.int32))]


def _reduce_scatter(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Reduce-scatter tensors by rows. If the rows cannot be divided equally, the first ranks get one row more."""
    results = []
    for tensor in inputs:
        bounds = row_bounds(tensor.shape[0], ranks.size)
        row_numel = tensor.shape[1:].numel()
        counts = [(stop - start) * row_numel for start, stop in pairwise(bounds)]
        sent = _work_copy(tensor.reshape(-1), signature.factors[0])
        part = sent.new_empty(counts[ranks.rank])
        ranks.reduce_scatter(sent, part, counts, signature.op)
        scale_(part, signature.factors[1])
        own_rows = bounds[ranks.rank + 1] - bounds[ranks.rank]
        results.append(part.to(tensor.dtype).view(own_rows, *tensor.shape[1:]))
    return results


# ── small operations, whose tensors are part of the round's messages ──────────────────────────────────────────────────

CARRIED_BYTES = 1024
"""Space in bytes for small tensors in a message by which ranks agree on operations to run."""

ALIGNED_BYTES = 16
"""Alignment in bytes of small tensors in a message by which ranks agree on operations. It suffices for every dtype."""

MAX_SLOTS = 1024
"""Largest number of cached `Slot` objects (places of tensors in messages)."""

_WIRE_DTYPES = {**dict.fromkeys(HALF_DTYPES, torch.float32), torch.bool: torch.uint8}
"""Dtypes that change in a message of a round: dtype of the tensor → dtype in the message. Must match the conversions of
`_work_copy` and `_reducible`."""

_COMBINATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Slot(NamedTuple):
    """Place of a small tensor in the messages by which ranks agree on operations (one round).

    Views have the shape of the tensor, and the dtype in which it is sent.

    Attributes:
        sent: view into the message of this rank.
        gathered: views into the messages of all ranks, by rank.
        end: offset of the first free byte behind the tensor in a message.
    """

    sent: torch.Tensor
    gathered: tuple[torch.Tensor, ...]
    end: int


class RoundMessage:
    """Buffers for the messages of all ranks in a round (an agreement on operations to run).

    A message has a head (digest and bits of the pending operations), followed by small tensors.

    Attributes:
        own: bytes of this rank's message, `(n,)`.
        head: view of the head of `own`.
        gathered: bytes of all ranks' messages, `(size, n)`.
    """

    def __init__(self, size: int, head_bytes: int) -> None:
        """Allocate buffers for `size` ranks. `head_bytes` must be a multiple of `ALIGNED_BYTES`."""
        self.own: npt.NDArray[np.uint8] = np.zeros(head_bytes + CARRIED_BYTES, dtype=np.uint8)
        self.gathered: npt.NDArray[np.uint8] = np.empty((size, self.own.size), dtype=np.uint8)
        self._rows = [torch.from_numpy(row) for row in (self.own, *self.gathered)]
        self.head = memoryview(self.own)[:head_bytes]  # type: ignore[arg-type]  # NumPy's stub of 3.11
        self._head_bytes = head_bytes
        self._slots: dict[tuple[int, torch.Size, torch.dtype], Slot] = {}

    def load(self, works: Sequence[tuple[Signature, Sequence[torch.Tensor]]]) -> list[list[Slot]] | None:
        """Multiply the tensors of all operations by their prescale factors, and copy them into this rank's message.

        Returns:
            For each operation, the places of its tensors in the message. None if not all tensors fit.
            Whether they fit depends only on the signatures (kinds, shapes, dtypes, …), so ranks with equal operations
            get the same answer.
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
        """Create and cache the place of a tensor that begins at byte `begin` of a message. None if it does not fit."""
        used = begin + shape.numel() * dtype.itemsize
        if used > self.own.size:
            return None
        mine, *everybody = [row[begin:used].view(dtype).view(shape) for row in self._rows]
        if len(self._slots) >= MAX_SLOTS:
            self._slots.clear()
        slot = Slot(mine, tuple(everybody), -(-used // ALIGNED_BYTES) * ALIGNED_BYTES)
        self._slots[begin, shape, dtype] = slot
        return slot


def result_of(signature: Signature, inputs: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Tensors:
    """Compute the results of an operation from the tensors in all ranks' messages, as new tensors.

    Args:
        signature: description of the operation.
        inputs: tensors of this rank, whose shapes, dtypes and device the results get.
        slots: place of each tensor in the messages.
    """
    results = []
    for tensor, slot in zip(inputs, slots, strict=True):
        if signature.kind is CollectiveKind.BROADCAST:
            results.append(slot.gathered[signature.root].clone())
            continue
        combine, first, rest = _COMBINATIONS[signature.op], slot.gathered[0], slot.gathered[1:]
        result = combine(first, rest[0]) if rest else first.clone()
        # Combine in rank order, so that results are bitwise equal on all ranks.
        for row in rest[1:]:
            combine(result, row, out=result)
        scale_(result, signature.factors[1])
        results.append(result if result.dtype is tensor.dtype else result.to(tensor.dtype))
    return results


def row_bounds(rows: int, size: int) -> list[int]:
    """Divide `rows` among `size` ranks. Return the first row of each rank's part, then `rows`: `(size + 1,)`."""
    return [rank * (rows // size) + min(rank, rows % size) for rank in range(size + 1)]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.dtype.itemsize


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, `(n,)`."""
    # Use as_strided, because reshape(-1) keeps the arbitrary stride of a dimension of length 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _array(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a contiguous CPU tensor as bytes."""
    array: npt.NDArray[np.uint8] = bytes_of(tensor).numpy()
    return array


PERFORMERS: dict[CollectiveKind, Callable[[Signature, Tensors, Ranks], Tensors]] = {
    CollectiveKind.ALLREDUCE: _all_reduce,
    CollectiveKind.BROADCAST: _broadcast,
    CollectiveKind.BARRIER: _barrier,
    CollectiveKind.ALLGATHER: _all_gather,
    CollectiveKind.ALLTOALL: _all_to_all,
    CollectiveKind.REDUCESCATTER: _reduce_scatter,
}
