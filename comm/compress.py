"""Gradient compression with error feedback: the part of a gradient that compression loses is added in the next step.

A unit (bucket) is compressed when its all-reduce is launched, so that gradient hooks, gradient accumulation and tuning
need no code for compression. Each stream processes a unit in these steps:

    all_reduce ─▶ queue of the stream ─▶ add the residual ─▶ `Scheme.reduce` ─▶ keep the new residual

On the host, a stream is a connection with a thread. On a GPU, it is the unit's CUDA stream, and the host does not wait.

The residual of a gradient is the part that compression has lost. `Feedback` stores residuals by parameter name, so that
they outlive communication plans, flat buffers, and restarts of an elastic job with other ranks. Over several steps, the
sum of the applied gradients and the last residuals equals the sum of the true gradients, whatever a compression scheme
omits. Gradients that are infinite or NaN stay so on all ranks, as a loss scaler expects, and leave no residual.

Units are compressed only if ranks exchange bytes over TCP or NCCL. They are not compressed over shared memory, and in
iterations in which the order of gradients is profiled. Control flags (numbers of Sirtaki at the end of a
buffer) are never compressed.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, Protocol, TypedDict, runtime_checkable

import numpy as np
import torch

from sirtaki.errors import ConfigError, require
from sirtaki.measures import ring_bytes

from .plan import (
    FLAGS,
    Algorithm,
    CommPlan,
    GradientLayout,
    NcclWay,
    Route,
    TransportKind,
    compressor_name,
    goes_through_sockets,
)
from .router import Router
from .transports.contract import FlatBuffer, Parcels, ReduceOp, StreamSpec, ThreadWork, Work, Worker, join_workers

logger = logging.getLogger(__name__)

FEWEST = 1024
"""Smallest number of elements of a unit (bucket) of gradients, or of a shard, that is compressed."""


@runtime_checkable
class Codec(Hashable, Protocol):
    """A lossy encoding of float32 values in fewer bytes. Users may implement one. All ranks must use equal codecs."""

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return the encoding, `(m,)` uint8, of `values`, `(n,)` float32.

        m must depend on n only. Infinite values and NaN must not be finite after decoding.
        """
        ...

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """Return the decoded values, `(count,)` float32, of an encoding that `pack` has returned."""
        ...


@dataclass(frozen=True, slots=True)
class Blockwise:
    """Codec with one byte per value, and one float32 scale per block of values.

    The scale maps the largest absolute value of the block to the largest value of `dtype`. `pack` and `unpack` also
    take several rows at once, as matrices.

    Attributes:
        dtype: dtype of the encoded values, int8 or a float8 type.
        block: number of consecutive values with a common scale.
    """

    dtype: torch.dtype = torch.int8
    block: int = 256

    @property
    def _largest(self) -> float:
        return float(torch.finfo(self.dtype).max if self.dtype.is_floating_point else torch.iinfo(self.dtype).max)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return the encoding of `values` as bytes: the scales of all blocks, followed by the scaled values."""
        *rows, count = values.shape
        padded = torch.nn.functional.pad(values, (0, -count % self.block)).view(*rows, -1, self.block)
        scales = padded.abs().amax(-1).div_(self._largest)
        # Encode a block as zeros if its scale is too small to divide by. Its values are not lost, because error
        # feedback adds them in the next step.
        shares = padded * torch.where(scales < 1e-37, 0.0, 1.0 / scales)[..., None]
        if not self.dtype.is_floating_point:
            shares.round_()
        return torch.cat(
            [scales.view(torch.uint8), shares.to(self.dtype).view(torch.uint8).flatten(-2)[..., :count]], -1
        )

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """Return the decoded values, `(count,)` float32: the encoded ones, each times the scale of its block."""
        n_blocks = -(-count // self.block)
        scales = _aligned(packed[..., : 4 * n_blocks]).view(torch.float32)
        numbers = packed[..., 4 * n_blocks :].view(self.dtype).float()
        padded = torch.nn.functional.pad(numbers, (0, -count % self.block))
        return padded.reshape(*packed.shape[:-1], n_blocks, self.block).mul_(scales[..., None]).flatten(-2)[..., :count]


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codec that rounds values to a 16-bit float type. Finite values beyond the type's range are clamped to the range.

    `pack` and `unpack` also take several rows at once, as matrices.

    Attributes:
        dtype: dtype of the encoded values, float16 or bfloat16.
    """

    dtype: torch.dtype

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values rounded to `dtype`, as bytes. Infinite values stay infinite."""
        largest = torch.finfo(self.dtype).max
        within = torch.where(values.isinf(), values, values.clamp(-largest, largest))
        return within.to(self.dtype).view(torch.uint8)

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """Return the rounded values in `packed` as float32, `(count,)`."""
        return _aligned(packed).view(self.dtype)[..., :count].float()


def _aligned(packed: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of encoded values, because `Tensor.view` cannot read other dtypes at any address."""
    return packed.clone(memory_format=torch.contiguous_format)


class Scheme(Protocol):
    """Compression scheme: an algorithm that sums gradients over ranks approximately, and sends fewer bytes."""

    def reduce(self, unit: CompressionInput, result: torch.Tensor, scale: float) -> None:
        """Write the approximate sum of `unit.values` over ranks, times `scale`, into `result`. Collective.

        The result must be bitwise equal on all ranks. The scheme overwrites `unit.values` with the residual of this
        rank, the part of its values that the sum lacks. The residuals of all ranks must add up to the exact sum minus
        the approximate sum, except for rounding.
        """
        ...


class Lane(TypedDict):
    """Arguments of `Router.all_reduce` and `Router.exchange` that state where a unit (bucket) is sent."""

    route: Route
    stream: int
    threads: int | None
    nccl: NcclWay | None


@dataclass(slots=True, eq=False)
class CompressionInput:
    """A unit (bucket) that a compression scheme must sum over ranks. Its methods are collectives without compression.

    Attributes:
        values: summand of this rank, `(n,)` float32.
        pieces: slices of the unit that are whole rows of parameter matrices. Only PowerSGD uses them.
        factors: right one of the two narrow matrices of PowerSGD from the previous step, by `MatrixSlice.key`.
        starts: right matrices with which PowerSGD starts, by `MatrixSlice.key`.
        rank: rank of this process.
        size: number of ranks.
        sent_bytes: number of bytes that this rank has sent for the unit.
    """

    values: torch.Tensor
    pieces: Sequence[MatrixSlice]
    factors: dict[str, torch.Tensor]
    starts: dict[str, torch.Tensor]
    rank: int
    size: int
    _router: Router
    _lane: Lane
    sent_bytes: float = 0.0

    def record_use(self, tensor: torch.Tensor) -> None:
        """On a GPU, keep the memory of `tensor` from being used again before the unit's CUDA stream has read it."""
        self._router.device.record_use(tensor)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce a contiguous vector in place, without compression, and return it. Collective.

        Block until the sum is in the vector. On a GPU, only the current CUDA stream waits for it.
        """
        if tensor.numel():
            self.sent_bytes += ring_bytes(tensor.nbytes, self.size)
            buffer = FlatBuffer(tensor)
            work = self._router.all_reduce(buffer, 0, tensor.numel(), **self._lane)
            self._router.wait_for([work])
        return tensor

    def exchange(self, parcels: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Send different bytes to each peer, and return the bytes received, by sender (an all-to-all). Collective.

        This rank receives an empty tensor from itself.

        Args:
            parcels: bytes that this rank sends, uint8, by receiver without this rank.
            lengths: number of bytes that each rank receives from every one of its peers, by receiver.
        """
        by_sender = np.tile(np.array(lengths, dtype=np.int64), (self.size, 1))
        np.fill_diagonal(by_sender, 0)
        return self._exchange_parcels(torch.cat(list(parcels)), Parcels(by_sender))

    def gather(self, parcel: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """All-gather bytes: return `parcel` of each rank, by rank. `lengths` are their sizes in bytes. Collective."""
        return self._exchange_parcels(parcel, Parcels.to_all(lengths))

    def _exchange_parcels(self, outgoing: torch.Tensor, parcels: Parcels) -> list[torch.Tensor]:
        self.sent_bytes += float(parcels.lengths[self.rank].sum() - parcels.lengths[self.rank, self.rank])
        received = parcels.received_by(self.rank)
        incoming = outgoing.new_empty(sum(received))
        work = self._router.exchange(FlatBuffer(outgoing), parcels, incoming, **self._lane)
        self._router.wait_for([work])
        return list(torch.split(incoming, received))


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """Elements `[start, stop)` of a unit (bucket) that form whole rows of one parameter, seen as a matrix.

    The outermost dimension of the parameter counts the rows. The other dimensions are flattened to columns.

    Attributes:
        key: name of the parameter, and index of the slice's first row within the parameter.
        columns: number of elements of a row.
    """

    key: str
    start: int
    stop: int
    columns: int


@lru_cache(maxsize=4096)
def packed_bytes(codec: Codec, count: int) -> int:
    """Return the number of bytes into which `codec` packs (encodes) `count` float32 values."""
    return codec.pack(torch.zeros(count, dtype=torch.float32, device="cpu")).numel()


@dataclass(frozen=True, slots=True)
class Quantised:
    """Compression scheme that sends values packed by a codec.

    Each rank receives the packed summands of one part of a unit (bucket) from all ranks, unpacks them, and sums them in
    float32. It then sends the packed sum to all ranks. Packing rounds summands and sums. The rounding errors become
    residuals (added in the next step) of the rank that has packed them.

    Attributes:
        codec: encodes values in fewer bytes.
    """

    codec: Codec = field(default_factory=Blockwise)

    def reduce(self, unit: CompressionInput, result: torch.Tensor, scale: float) -> None:
        """Sum `unit.values` over ranks into `result`, times `scale`, with packed messages. Collective.

        `unit.values` receives the residual: what packing on this rank has lost by rounding.
        """
        codec, me, size = self.codec, unit.rank, unit.size
        edges = [result.numel() * number // size for number in range(size + 1)]
        counts = [stop - start for start, stop in pairwise(edges)]
        parts, sums = torch.split(unit.values, counts), torch.split(result, counts)
        lengths = [packed_bytes(codec, count) for count in counts]
        peers = [rank for rank in range(size) if rank != me]
        packed = list(self._pack([parts[peer] for peer in peers]))
        received = unit.exchange(packed, lengths)
        sent = self._unpack(packed, [counts[peer] for peer in peers])
        arrived = self._unpack([received[peer] for peer in peers], [counts[me]] * len(peers))
        for peer, lost, summand in zip(peers, sent, arrived, strict=True):
            parts[peer].sub_(lost)
            parts[me].add_(summand)
        unpacked = self._unpack(unit.gather(codec.pack(parts[me]), lengths), counts)
        for owner, (numbers, total) in enumerate(zip(unpacked, sums, strict=True)):
            if owner == me:
                parts[me].sub_(numbers)
            torch.mul(numbers, scale, out=total)

    def _pack(self, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        return self._each(lambda part, _: self.codec.pack(part), parts, [part.numel() for part in parts])

    def _unpack(self, parcels: Sequence[torch.Tensor], counts: Sequence[int]) -> Iterator[torch.Tensor]:
        return self._each(self.codec.unpack, parcels, counts)

    def _each(
        self, act: Callable[[torch.Tensor, int], torch.Tensor], rows: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """Yield `act(row, count)` for each row, and the number of values that it encodes.

        On a GPU, call `act` once for all rows with the same count, because each call launches several kernels.
        """
        # The user's subclasses may pack vectors only.
        if not (rows[0].is_cuda and type(self.codec) in (Blockwise, Rounded)):
            yield from map(act, rows, counts)
            return
        results = {
            count: iter(act(torch.stack([row for row, own in zip(rows, counts, strict=True) if own == count]), count))
            for count in set(counts)
        }
        for count in counts:
            yield next(results[count])


@dataclass(frozen=True, slots=True)
class TopK:
    """Compression scheme in which each rank sends its values of largest magnitude, with their indices, to all ranks.

    A rank receives more bytes the more ranks there are.

    Attributes:
        ratio: fraction of the values of a unit (bucket) that a rank sends.
    """

    ratio: float

    def __post_init__(self) -> None:
        require(0.0 < self.ratio <= 1.0, "ratio of the compressor topk", "above 0 and at most 1", self.ratio)

    def reduce(self, unit: CompressionInput, result: torch.Tensor, scale: float) -> None:
        """Sum the values that the ranks send, times `scale`, into `result`. Collective.

        `unit.values` receives the residual: the values that this rank does not send.
        """
        values = unit.values
        count = max(1, math.ceil(self.ratio * values.numel()))
        if count * unit.size >= values.numel():  # the bytes of an exact all-reduce are not more
            unit.sum_(result.copy_(values)).mul_(scale)
            values.zero_()
            return
        indices = torch.topk(values.abs(), count, sorted=False).indices
        parcel = torch.cat([indices.int().view(torch.uint8), values[indices].view(torch.uint8)])
        result.zero_()
        for sent in unit.gather(parcel, [parcel.numel()] * unit.size):
            where, numbers = torch.split(sent.clone().view(torch.int32), count)
            result.index_add_(0, where, numbers.view(torch.float32), alpha=scale)
        values.index_fill_(0, indices, 0.0)


@dataclass(frozen=True, slots=True)
class PowerSgd:
    """Low-rank compression scheme (Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1 with warm start).

    Each gradient matrix (`MatrixSlice`) is approximated by the product of two narrow matrices, which are sent instead.
    Matrices that are too small to save bytes, and elements that are in no matrix, are summed exactly.

    Attributes:
        rank: number of columns of the narrow matrices.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank of the compressor powersgd", "at least 1", self.rank)

    def reduce(self, unit: CompressionInput, result: torch.Tensor, scale: float) -> None:
        """Write the sum of the unit (bucket), times `scale`, into `result`. Collective.

        The sums of matrices are approximated by one power iteration.

        The residual of a matrix is this rank's matrix minus the mean of the approximate sum over ranks.
        """
        values, plain, end = unit.values, list[tuple[int, int]](), 0
        blocks: list[tuple[MatrixSlice, torch.Tensor, torch.Tensor]] = []
        for piece in unit.pieces:
            matrix = values[piece.start : piece.stop].view(-1, piece.columns)
            rows, columns = matrix.shape
            if rows * columns > 2 * self.rank * (rows + columns):
                plain.append((end, piece.start))
                end = piece.stop
                blocks.append((piece, matrix, self._factor(unit, piece)))
        plain.append((end, values.numel()))
        lefts = [_orthonormal(left) for left in _summed(unit, [matrix @ factor for _, matrix, factor in blocks])]
        rights = [matrix.T @ left for (_, matrix, _), left in zip(blocks, lefts, strict=True)]
        sums = _summed(unit, [*rights, *(values[start:stop] for start, stop in plain)])
        for (piece, matrix, _), left, right in zip(blocks, lefts, sums, strict=False):
            unit.factors[piece.key] = right.clone()
            product = result[piece.start : piece.stop].view(-1, piece.columns)
            torch.mm(left, right.T, out=product)
            matrix.sub_(product, alpha=1.0 / unit.size)
            product.mul_(scale)
        for (start, stop), exact in zip(plain, sums[len(blocks) :], strict=True):
            torch.mul(exact, scale, out=result[start:stop])
            values[start:stop] = 0.0

    def _factor(self, unit: CompressionInput, piece: MatrixSlice) -> torch.Tensor:
        """Return the right narrow matrix of the previous step. None yet = random numbers, equal on all ranks."""
        shape, device = (piece.columns, self.rank), unit.values.device
        start = unit.starts.get(piece.key)
        if start is None:
            generator = torch.Generator("cpu").manual_seed(zlib.crc32(piece.key.encode()))
            start = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)
            unit.starts[piece.key] = start
        known = unit.factors.get(piece.key)
        if known is None or known.shape != shape:
            return start
        known = known.to(device)  # because a loaded state may be on another device
        unit.record_use(known)  # because it was loaded on another CUDA stream
        return torch.where(known.isfinite().all() & known.any(), known, start)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with orthonormal columns that span those of `matrix`. The host does not wait for a GPU.

    A matrix with infinite values or NaN is returned unchanged, because its QR decomposition might not terminate. The
    sums of such matrices are then infinite or NaN, as they must be.
    """
    is_finite = matrix.isfinite().all()
    return torch.where(is_finite, torch.linalg.qr(torch.where(is_finite, matrix, 0.0)).Q, matrix)


@lru_cache(maxsize=64)
def scheme_of(name: str) -> Scheme:
    """Return the compression scheme for the name of a compressor, such as `topk:0.1`.

    Raises:
        ConfigError: there is no compressor of this name.
    """
    kind, _, number = compressor_name(name).partition(":")
    if kind == "topk":
        return TopK(float(number))
    if kind == "powersgd":
        return PowerSgd(int(number))
    codecs: dict[str, Callable[[], Codec]] = {
        "int8": Blockwise,
        "fp8": lambda: Blockwise(torch.float8_e4m3fn),
        "fp16": lambda: Rounded(torch.float16),
        "bf16": lambda: Rounded(torch.bfloat16),
    }
    return Quantised(codecs[kind]())


def codec_of(name: str) -> Codec | None:
    """Return the codec (encoding in fewer bytes) for the name of a compressor. None = top-k or PowerSGD, without codec.

    Raises:
        ConfigError: there is no compressor of this name.
    """
    scheme = scheme_of(name)
    return scheme.codec if isinstance(scheme, Quantised) else None


def _summed(unit: CompressionInput, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sum several tensors over ranks in one all-reduce, and return the sums. Collective."""
    if not tensors:
        return []
    flat = unit.sum_(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@dataclass(eq=False)
class Feedback:
    """State of error feedback on this rank: residuals, which are parts of gradients that compression has lost.

    The residuals outlive communication plans and flat buffers.

    Attributes:
        residuals: residuals by parameter name, `(n,)` float32, in the memory order of the parameter.
        factors: right one of the two narrow matrices of PowerSGD from the previous step, by `MatrixSlice.key`.
        loaded: True if `load_state_dict` was called, and `CompressedUnits` has not yet adopted the loaded residuals.
    """

    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    loaded: bool = False

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of the residuals (key "owed") and of PowerSGD's right narrow matrices (key "factors")."""
        return {
            "owed": {name: residual.clone() for name, residual in self.residuals.items()},
            "factors": {name: factor.clone() for name, factor in self.factors.items()},
        }

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Load a state that `state_dict` has returned. Residuals of parameters that are not in `state` become zero."""
        for name, residual in self.residuals.items():
            stored = state["owed"].get(name)
            if stored is None or stored.shape != residual.shape:
                residual.zero_()
            else:
                residual.copy_(stored)
        self.residuals |= {name: each.clone() for name, each in state["owed"].items() if name not in self.residuals}
        self.loaded = True
        self.factors.clear()
        self.factors |= {name: factor.clone() for name, factor in state["factors"].items()}


class CompressibleGroup(Protocol):
    """Type with the attributes of `FlatGroup` (gradients in one flat buffer) that compression uses."""

    layout: GradientLayout
    buffer: FlatBuffer
    places: list[torch.Tensor]


class Cost(NamedTuple):
    """Precision lost and bytes saved by compression, on one rank.

    Attributes:
        residual_squares: sum of squares of the residuals of compressed units (buckets).
        gradient_squares: sum of squares of the gradients of compressed units.
        sent_bytes: bytes that all units have sent.
        whole_bytes: bytes that all units would send without compression.
    """

    residual_squares: float = 0.0
    gradient_squares: float = 0.0
    sent_bytes: float = 0.0
    whole_bytes: float = 0.0


class CompressedUnits:
    """All-reduces units (buckets), with compression if ranks exchange them over TCP or NCCL, else without compression.

    Attributes:
        measures: True if `all_reduce` must measure the `Cost` of compression.
    """

    def __init__(self, router: Router, scheme: Scheme | None, feedback: Feedback, *, rank: int, size: int) -> None:
        """Create the object without starting a thread. Rank 0 logs if `scheme` has no effect, as on GPUs without NCCL.

        Args:
            router: sends units (buckets) and packed values over transports. The caller must close this object before
                the router.
            scheme: compression scheme of units for which the plan names no compressor. None = these units are not
                compressed.
            feedback: residuals of this rank (what compression has lost of gradients).
            rank: rank of this process.
            size: number of ranks.

        Raises:
            ConfigError: the gradients are on a GPU, and the user's codec does not compute there.
        """
        device = router.device
        if device.streams and isinstance(scheme, Quantised):
            _require_on_device(scheme.codec, device.torch_device)
        if device.streams and scheme and not rank and not any(_can_compress(route) for route in router.routes):
            logger.warning(
                "compression= has no effect: gradients on these GPUs are sent through host memory, and only NCCL can "
                "send them compressed"
            )
        self._router, self._scheme, self._feedback, self._rank, self._size = router, scheme, feedback, rank, size
        self._workers: dict[int, Worker] = {}  # one thread per stream, by stream number
        self._residuals: dict[int, torch.Tensor] = {}
        self._groups: dict[int, CompressibleGroup] = {}
        self._plans: list[CommPlan] = []
        # Scheme and matrix slices of each compressed unit, by buffer and start.
        self._schemes: dict[tuple[int, int], tuple[Scheme, list[MatrixSlice]]] = {}
        self._starts: dict[str, torch.Tensor] = {}  # see `CompressionInput.starts`
        self._uncompressed: set[tuple[int, int]] = set()  # uncompressed units with a residual to add
        self.measures = False
        self._costs: dict[int, Cost] = {}  # costs since the last call of `cost`, by stream

    def lay_out(self, groups: Sequence[CompressibleGroup], plans: Sequence[CommPlan]) -> None:
        """Set the flat buffers and communication plans of later iterations. No unit (bucket) may be in flight.

        Args:
            groups: groups of gradients, each with its flat buffer.
            plans: communication plan of each group.
        """
        self._feedback.factors.clear()  # because units now contain other rows of matrices
        self._starts.clear()
        self._groups, self._plans = {id(group.buffer): group for group in groups}, list(plans)
        self._schemes = {}
        for group, plan in zip(groups, plans, strict=True):
            if not group.buffer.tensor.is_floating_point():
                continue
            for unit in plan.units:
                scheme = scheme_of(unit.compressor) if unit.compressor else self._scheme
                if (
                    scheme is not None
                    and self._size > 1
                    and _can_compress((plan.transport, unit.algorithm))
                    and (stop := self._end(group, unit.stop)) - unit.start >= FEWEST
                ):
                    pieces = self._pieces(group, unit.start, stop) if isinstance(scheme, PowerSgd) else []
                    self._schemes[id(group.buffer), unit.start] = scheme, pieces
        self._copy_residuals()

    def _copy_residuals(self) -> None:
        """Copy the residuals (what compression has lost) into one tensor per flat buffer, in the gradients' layout.

        A flat buffer that has neither residuals nor compressed units (buckets) gets no tensor for residuals. Wait for a
        GPU before and after, because units use the residuals on their own CUDA streams.
        """
        feedback, device = self._feedback, self._router.device
        self._router.wait_for_device()
        feedback.loaded, self._residuals, self._uncompressed = False, {}, set()
        for (key, group), plan in zip(self._groups.items(), self._plans, strict=True):
            spans = _spans(group.layout)
            has_residuals = any(
                bool(feedback.residuals[name].any()) for name, *_ in spans if name in feedback.residuals
            )
            if not group.buffer.tensor.is_floating_point() or not (self._schemes or has_residuals):
                for name, *_ in spans:
                    feedback.residuals.pop(name, None)
                continue
            residual = self._residuals[key] = torch.zeros(
                group.layout.numel, dtype=torch.float32, device=device.torch_device
            )
            for name, start, stop in spans:
                before = feedback.residuals.get(name)
                if before is not None and before.numel() == stop - start:
                    residual[start:stop] = before
                feedback.residuals[name] = residual[start:stop]
            self._uncompressed |= {
                (key, unit.start)
                for unit in plan.units
                if has_residuals and (key, unit.start) not in self._schemes and residual[unit.start : unit.stop].any()
            }
        self._router.wait_for_device()

    def all_reduce(
        self,
        buffer: FlatBuffer,
        start: int,
        stop: int,
        *,
        route: Route,
        stream: int,
        threads: int | None = None,
        nccl: NcclWay | None = None,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
    ) -> Work:
        """Launch the all-reduce of a unit (bucket), compressed if possible. Collective, non-blocking.

        The arguments are those of `Router.all_reduce`. Either all units of a plan must be launched by this method, or
        none.
        """
        if self._feedback.loaded:
            self._copy_residuals()
        key = id(buffer), start
        if key in self._uncompressed:
            self._uncompressed.remove(key)
            self._add_residual(buffer.tensor[start:stop], self._residuals[id(buffer)][start:stop])
            if not (self._schemes or self._uncompressed):
                self._copy_residuals()  # frees the residuals, which are all zero now
                self._uncompressed.clear()
        if not self._schemes or op is not ReduceOp.SUM:
            return self._router.all_reduce(
                buffer, start, stop, route=route, stream=stream, threads=threads, nccl=nccl, op=op, scale=scale
            )
        lane: Lane = {"route": route, "stream": stream, "threads": threads, "nccl": nccl}
        if self._router.device.streams and key not in self._schemes:
            return self._router.all_reduce(buffer, start, stop, scale=scale, **lane)

        def reduce() -> None:
            scheme, pieces = self._schemes.get(key, (None, []))
            end = start if scheme is None else self._end(self._groups[id(buffer)], stop)
            rest = self._router.all_reduce(buffer, end, stop, scale=scale, **lane)
            if scheme is not None:
                self._reduce(scheme, pieces, buffer, start, end, lane, scale)
            self._router.wait_for([rest])
            if self.measures:
                sent_bytes = ring_bytes((stop - end) * buffer.tensor.itemsize, self._size)
                self._add(stream, Cost(sent_bytes=sent_bytes, whole_bytes=sent_bytes))

        if self._router.device.streams:
            return self._router.transports[route].run(reduce, stream=StreamSpec(stream))
        if stream not in self._workers:
            self._workers[stream] = Worker(f"sirtaki-compress-{stream}")
        work = ThreadWork()
        what = f"elements [{start}, {stop}) of a gradient could not be compressed"
        self._workers[stream].put(partial(work.run, reduce, what))
        return work

    def cost(self) -> Cost:
        """Return the precision lost and bytes saved by compression since the last call of this method."""
        costs, self._costs = self._costs, {}
        return Cost(*(sum(values) for values in zip(Cost(), *costs.values(), strict=True)))

    def _add(self, stream: int, cost: Cost) -> None:
        before = self._costs.get(stream, Cost())
        self._costs[stream] = Cost(*(old + new for old, new in zip(before, cost, strict=True)))

    def _end(self, group: CompressibleGroup, stop: int) -> int:
        """Return the end of the gradients in a unit (bucket) that ends at `stop`.

        After the gradients, a unit may contain control flags (numbers of Sirtaki), which are not compressed.
        """
        layout = group.layout
        return min(stop, layout.offsets[-2]) if layout.names[-1:] == (FLAGS,) else stop

    @torch.no_grad()
    def _add_residual(self, target: torch.Tensor, residual: torch.Tensor) -> None:
        """Add `residual`, which compression has left, to `target`, a unit (bucket) that is no longer compressed.

        `residual` receives the rounding error of this addition.
        """
        before = target.clone() if target.itemsize < residual.itemsize else None
        target.add_(residual)
        if before is None:
            residual.zero_()
        else:
            residual.sub_(target.float() - before).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    @torch.no_grad()
    def _reduce(
        self,
        scheme: Scheme,
        pieces: Sequence[MatrixSlice],
        buffer: FlatBuffer,
        start: int,
        stop: int,
        lane: Lane,
        scale: float,
    ) -> None:
        target, residual = buffer.tensor[start:stop], self._residuals[id(buffer)][start:stop]
        whole = float(torch.linalg.vector_norm(target, dtype=torch.float64)) if self.measures else math.nan
        residual.add_(target)
        unit = CompressionInput(
            residual, pieces, self._feedback.factors, self._starts, self._rank, self._size, self._router, lane
        )
        result = target if target.dtype is residual.dtype else torch.empty_like(residual)
        with torch.autocast(residual.device.type, enabled=False):  # because `backward` may run under autocast
            scheme.reduce(unit, result, scale)
        if residual.is_cuda or not bool(residual.sum().isfinite()):  # the host must not wait for a GPU to test this
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if math.isfinite(whole):
            left = float(torch.linalg.vector_norm(residual, dtype=torch.float64))
            self._add(lane["stream"], Cost(left**2, whole**2, unit.sent_bytes, ring_bytes(target.nbytes, self._size)))
        if result is not target:
            target.copy_(result)

    def _pieces(self, group: CompressibleGroup, start: int, stop: int) -> list[MatrixSlice]:
        """Return the slices of parameter matrices that are whole rows within elements `[start, stop)` of the buffer."""
        pieces = list[MatrixSlice]()
        for (name, first, end), place in zip(_spans(group.layout), group.places, strict=True):
            end = min(end, first + place.numel())  # without the padding before the next gradient on a GPU
            if end <= start or first >= stop or first == end or place.dim() < 2:
                continue
            outermost = max(range(place.dim()), key=lambda dim: (place.shape[dim] > 1, place.stride(dim)))
            columns = (end - first) // place.shape[outermost]
            low = first + -(-max(0, start - first) // columns) * columns
            high = first + (min(end, stop) - first) // columns * columns
            if low < high:
                pieces.append(MatrixSlice(f"{name}[{(low - first) // columns}:]", low - start, high - start, columns))
        return pieces

    def close(self) -> bool:
        """End the threads after they have reduced the queued units (buckets).

        Return False if a thread still waits for a peer.
        """
        return join_workers(list(self._workers.values()), within_s=1.0)


def _spans(layout: GradientLayout) -> list[tuple[str, int, int]]:
    """Return the name, first element and end of each parameter's gradient in the flat buffer."""
    ranges = zip(layout.names, layout.offsets, layout.offsets[1:], strict=False)
    return [(name, start, stop) for name, start, stop in ranges if name != FLAGS]


def _can_compress(route: Route) -> bool:
    """Return whether units (buckets) on a route are compressed: over TCP or NCCL, with the flat algorithm."""
    return goes_through_sockets(route) or route == (TransportKind.NCCL, Algorithm.FLAT)


def _require_on_device(codec: Codec, device: torch.device) -> None:
    """Check that a codec packs and unpacks values of a GPU on this GPU.

    Raises:
        ConfigError: the codec raises an error, or returns a tensor that is not on the GPU.
    """
    try:
        packed = codec.pack(torch.ones(FEWEST, dtype=torch.float32, device=device))
        places = {str(packed.device), str(codec.unpack(packed, FEWEST).device)} - {str(device)}
        problem = f"it returned a tensor on {places.pop()}" if places else ""
    except Exception as err:  # the codec is code of the user
        problem = repr(err)
    if problem:
        raise ConfigError(
            f"the codec {codec!r} (compression=) cannot compress gradients on {device}: {problem}; pack() and unpack() "
            "must compute on the device of their argument"
        )
