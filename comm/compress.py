"""Sends gradients in fewer bytes than they have, with what is lost given back in the next step (error feedback).

A unit is compressed where it leaves, so that everything before and behind it stays as it is: hooks, accumulation, plans
and their trials. Each stream has a thread, in which a unit goes through these hands:

    all_reduce ─▶ the stream's queue ─▶ what was lost before is added ─▶ a scheme's `reduce` ─▶ what is lost now is kept

What is lost is kept for each parameter by name (`Feedback`), so that it outlives plans, buffers, and generations of a
job. A scheme may leave out what it likes: the sum over steps of what is applied stays the sum of the gradients. Numbers
that are not finite come out not finite on all ranks, as a loss scaler expects, and leave no trace in the next step.

Units are compressed between hosts, over TCP; where ranks share memory, and on GPUs, they travel as they are. So do the
control flags at a buffer's end, and iterations in which the order of gradients is profiled.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from sirtaki.errors import ConfigError
from sirtaki.measures import ring_bytes

from .plan import FLAGS, CommPlan, GradientLayout, NcclWay, Route, compressor_name, goes_through_sockets
from .router import Router
from .transports.contract import FlatBuffer, Parcels, ReduceOp, ThreadWork, Work, Worker, ended

FEWEST = 1024
"""Units of fewer elements travel as they are."""


@runtime_checkable
class Codec(Hashable, Protocol):
    """How numbers become fewer bytes; a user's own may take the place of ours. Equal on all ranks."""

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Bytes, `(m,)` uint8, that stand for `(n,)` float32; m follows from n. Not finite must stay not finite."""
        ...

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """`(count,)` float32 that come close to what was packed."""
        ...


@dataclass(frozen=True, slots=True)
class Blockwise:
    """A byte a number, and a float32 for each block of them: its largest number, as the dtype's largest.

    Attributes:
        dtype: int8, or one of float8.
        block: numbers that share a scale.
    """

    dtype: torch.dtype = torch.int8
    block: int = 256

    @property
    def _largest(self) -> float:
        return float(torch.finfo(self.dtype).max if self.dtype.is_floating_point else torch.iinfo(self.dtype).max)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """The scales, then the numbers."""
        count = values.numel()
        padded = torch.nn.functional.pad(values, (0, -count % self.block)).view(-1, self.block)
        scales = padded.abs().amax(1).div_(self._largest)
        # What is too small to be divided by is left to the next step.
        shares = padded * torch.where(scales < 1e-37, 0.0, 1.0 / scales)[:, None]
        if not self.dtype.is_floating_point:
            shares.round_()
        return torch.cat([scales.view(torch.uint8), shares.to(self.dtype).view(torch.uint8).view(-1)[:count]])

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """The numbers, each times its block's scale."""
        n_blocks = -(-count // self.block)
        scales = packed[: 4 * n_blocks].clone().view(torch.float32)  # bytes of a message need not be aligned
        numbers = packed[4 * n_blocks :].view(self.dtype).float()
        padded = torch.nn.functional.pad(numbers, (0, -count % self.block)).view(n_blocks, self.block)
        return padded.mul_(scales[:, None]).view(-1)[:count]


@dataclass(frozen=True, slots=True)
class Rounded:
    """Numbers in a floating type of fewer bits; what is too large for it is sent as its largest.

    Attributes:
        dtype: float16 or bfloat16.
    """

    dtype: torch.dtype

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """The numbers in the dtype; an infinite one stays infinite."""
        largest = torch.finfo(self.dtype).max
        within = torch.where(values.isinf(), values, values.clamp(-largest, largest))
        return within.to(self.dtype).view(torch.uint8)

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """The numbers as float32."""
        return packed.clone().view(self.dtype)[:count].float()


class Scheme(Protocol):
    """A way to add up vectors of all ranks roughly."""

    def reduce(self, unit: CompressionInput, result: torch.Tensor, scale: float) -> None:
        """Collective: `result` gets the sum of `unit.values` over the ranks times `scale`, the same bits on all.

        The values become what of the sum this rank owes: all ranks together the exact sum less the rough one, but for
        rounding.
        """
        ...


@dataclass(slots=True, eq=False)
class CompressionInput:
    """A vector that is to be added up over the ranks, with the means to do so.

    Attributes:
        values: `(n,)` float32, of this rank.
        pieces: of which parameters it has elements, see `MatrixSlice`.
        factors: what PowerSGD keeps of each piece, by its key.
        sent_bytes: by this rank until now.
    """

    values: torch.Tensor
    pieces: Sequence[MatrixSlice]
    factors: dict[str, torch.Tensor]
    rank: int
    size: int
    _router: Router
    _route: Route
    _stream: int
    sent_bytes: float = 0.0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective: adds up a contiguous vector exactly, in place."""
        if tensor.numel():
            self.sent_bytes += ring_bytes(tensor.nbytes, self.size)
            buffer = FlatBuffer(tensor)
            work = self._router.all_reduce(buffer, 0, tensor.numel(), route=self._route, stream=self._stream)
            self._router.wait_for([work])
        return tensor

    def exchange(self, parcels: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Collective: sends bytes to each rank but itself, and returns what comes, by sender.

        Args:
            parcels: by receiver; the one to itself is left out.
            lengths: by receiver: of each parcel that it gets.
        """
        by_sender = np.tile(np.array(lengths, dtype=np.int64), (self.size, 1))
        np.fill_diagonal(by_sender, 0)
        others = [parcel for to, parcel in enumerate(parcels) if to != self.rank]
        return self._carry(torch.cat(others), Parcels(by_sender))

    def gather(self, parcel: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Collective: the bytes of all ranks, of these lengths."""
        return self._carry(parcel, Parcels.to_all(lengths))

    def _carry(self, outgoing: torch.Tensor, parcels: Parcels) -> list[torch.Tensor]:
        self.sent_bytes += float(parcels.lengths[self.rank].sum() - parcels.lengths[self.rank, self.rank])
        received = parcels.received_by(self.rank)
        incoming = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
        work = self._router.exchange(FlatBuffer(outgoing), parcels, incoming, route=self._route, stream=self._stream)
        self._router.wait_for([work])
        return list(torch.split(incoming, received))


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """Elements `[start, stop)` of a unit that are some rows of a parameter, as a matrix of its outermost dimension.

    Attributes:
        key: the parameter's name and the first of these rows.
        columns: of the matrix; the elements are whole rows of it.
    """

    key: str
    start: int
    stop: int
    columns: int


@lru_cache(maxsize=4096)
def packed_bytes(codec: Codec, count: int) -> int:
    """How many bytes so many numbers become."""
    return codec.pack(torch.zeros(count, dtype=torch.float32, device="cpu")).numel()


@dataclass(frozen=True, slots=True)
class Quantised:
    """Each rank adds up a part of the unit: parts are sent to it packed, and its sum to all, packed again.

    That way sums are made of float32, and both roundings are given back: that of a part by who has packed it.
    """

    codec: Codec = field(default_factory=Blockwise)

    def reduce(self, unit: CompressionInput, result: torch.Tensor, scale: float) -> None:
        """Sums of what the codec keeps of each part; the values become this rank's rounding errors."""
        codec, me, size = self.codec, unit.rank, unit.size
        edges = [result.numel() * number // size for number in range(size + 1)]
        counts = [stop - start for start, stop in pairwise(edges)]
        parts, sums = torch.split(unit.values, counts), torch.split(result, counts)
        lengths = [packed_bytes(codec, count) for count in counts]
        packed = [part.new_empty(0) if to == me else codec.pack(part) for to, part in enumerate(parts)]
        arriving = unit.exchange(packed, lengths)
        for sender, parcel in enumerate(arriving):
            if sender == me:
                continue
            parts[sender].sub_(codec.unpack(packed[sender], counts[sender]))
            parts[me].add_(codec.unpack(parcel, counts[me]))
        parcels = unit.gather(codec.pack(parts[me]), lengths)
        for owner, (parcel, total) in enumerate(zip(parcels, sums, strict=True)):
            unpacked = codec.unpack(parcel, total.numel())
            if owner == me:
                parts[me].sub_(unpacked)
            torch.mul(unpacked, scale, out=total)


@dataclass(frozen=True, slots=True)
class TopK:
    """The largest numbers of each rank, with their places, are sent to all; the bytes grow with the ranks."""

    ratio: float

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ConfigError(
                f"topk takes the part of the numbers that is sent, above 0 and at most 1, not {self.ratio}"
            )

    def reduce(self, unit: CompressionInput, result: torch.Tensor, scale: float) -> None:
        """Sums of what each rank sends; what this rank does not send stays in the values."""
        values = unit.values
        count = max(1, math.ceil(self.ratio * values.numel()))
        if count * unit.size >= values.numel():  # eight bytes for each of those, and for each number of an all-reduce
            unit.sum_(result.copy_(values)).mul_(scale)
            values.zero_()
            return
        places = torch.topk(values.abs(), count, sorted=False).indices
        parcel = torch.cat([places.int().view(torch.uint8), values[places].view(torch.uint8)])
        result.zero_()
        for sent in unit.gather(parcel, [parcel.numel()] * unit.size):
            there, numbers = torch.split(sent.clone().view(torch.int32), count)
            result.index_add_(0, there, numbers.view(torch.float32), alpha=scale)
        values[places] = 0.0


@dataclass(frozen=True, slots=True)
class PowerSgd:
    """Matrices as products of two narrow ones (Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1 with warm start).

    A parameter's outermost dimension are the rows; a unit's part of it is a matrix by itself. What is no matrix, or too
    small to gain, is added up exactly.

    Attributes:
        rank: columns of the narrow ones.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"powersgd takes a rank of at least 1, not {self.rank}")

    def reduce(self, unit: CompressionInput, result: torch.Tensor, scale: float) -> None:
        """Sums of matrices from one power iteration; the values become what this rank's matrices lack."""
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
        # What is not finite stays so, and a decomposition of it might not end.
        lefts = [
            torch.linalg.qr(left).Q if bool(left.isfinite().all()) else left
            for left in _summed(unit, [matrix @ factor for _, matrix, factor in blocks])
        ]
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
        """The right factor of the step before; where there is none, or a useless one, the same noise on all ranks."""
        shape = (piece.columns, self.rank)
        known = unit.factors.get(piece.key)
        if known is not None and known.shape == shape and bool(known.isfinite().all()) and known.any():
            return known
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(piece.key.encode()))
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=64)
def scheme_of(name: str) -> Scheme:
    """What a compressor's name stands for.

    Raises:
        ConfigError: nothing.
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
    """How a compressor's name packs a tensor by itself; None if it needs all ranks' tensors, as top-k and PowerSGD do.

    Raises:
        ConfigError: there is none of that name.
    """
    scheme = scheme_of(name)
    return scheme.codec if isinstance(scheme, Quantised) else None


def _summed(unit: CompressionInput, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Collective: several tensors, each added up over the ranks, in one message."""
    if not tensors:
        return []
    flat = unit.sum_(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@dataclass(eq=False)
class Feedback:
    """What a rank owes of each parameter's gradient; outlives whatever reduces them.

    Attributes:
        owed: by the parameter's name, `(n,)` float32 in the order of memory.
        factors: see `CompressionInput`.
        loaded: it was replaced since units were laid out.
    """

    owed: dict[str, torch.Tensor] = field(default_factory=dict)
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    loaded: bool = False

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of what this rank owes, and of PowerSGD's factors."""
        return {
            "owed": {name: owed.clone() for name, owed in self.owed.items()},
            "factors": {name: factor.clone() for name, factor in self.factors.items()},
        }

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Takes up a state; parameters that are not in it owe nothing."""
        for name, owed in self.owed.items():
            there = state["owed"].get(name)
            if there is None or there.shape != owed.shape:
                owed.zero_()
            else:
                owed.copy_(there)
        self.owed |= {name: there.clone() for name, there in state["owed"].items() if name not in self.owed}
        self.loaded = True
        self.factors.clear()
        self.factors |= {name: there.clone() for name, there in state["factors"].items()}


class CompressibleGroup(Protocol):
    """The part of `FlatGroup` that compression uses."""

    layout: GradientLayout
    buffer: FlatBuffer
    places: list[torch.Tensor]


class Cost(NamedTuple):
    """What compression has cost and saved; of units that were compressed, but for the bytes.

    Attributes:
        owed_squares, gradient_squares: sums of squares of what was left to the next step, and of the gradients.
        sent_bytes, whole_bytes: by a rank, and what they would be without compression.
    """

    owed_squares: float = 0.0
    gradient_squares: float = 0.0
    sent_bytes: float = 0.0
    whole_bytes: float = 0.0


class CompressedUnits:
    """Carries units as the router does, in fewer bytes where that is possible.

    Attributes:
        measures: adds to what `cost` gives.
    """

    def __init__(self, router: Router, scheme: Scheme | None, feedback: Feedback, *, rank: int, size: int) -> None:
        """Starts no thread yet.

        Args:
            router: carries what is left; closed by the caller, after this.
            scheme: how to compress; None = as plans say it.
            feedback: see there.
            rank: of this process.
            size: how many ranks there are.
        """
        self._router, self._scheme, self._feedback, self._rank, self._size = router, scheme, feedback, rank, size
        self._workers: dict[int, Worker] = {}  # by stream
        self._owed: dict[int, torch.Tensor] = {}
        self._laid: dict[int, CompressibleGroup] = {}
        self._plans: list[CommPlan] = []
        self._schemes: dict[tuple[int, int], Scheme] = {}  # by buffer and first element
        self._unsettled: set[tuple[int, int]] = set()  # not compressed any more, but still owed something
        self.measures = False
        self._costs: dict[int, Cost] = {}  # by stream, each written by its thread

    def lay_out(self, groups: Sequence[CompressibleGroup], plans: Sequence[CommPlan]) -> None:
        """With nothing under way: gradients lie in these buffers from now on, and leave by these plans."""
        self._feedback.factors.clear()  # they are of other pieces
        self._laid, self._plans = {id(group.buffer): group for group in groups}, list(plans)
        self._schemes = {}
        for group, plan in zip(groups, plans, strict=True):
            if not group.buffer.tensor.is_floating_point():
                continue
            for unit in plan.units:
                scheme = scheme_of(unit.compressor) if unit.compressor else self._scheme
                if (
                    scheme is not None
                    and goes_through_sockets((plan.transport, unit.algorithm))
                    and self._end(group, unit.stop) - unit.start >= FEWEST
                ):
                    self._schemes[id(group.buffer), unit.start] = scheme
        self._take_over()

    def _take_over(self) -> None:
        """What is owed lies in the order of the buffers; none where nothing is, nor will be."""
        feedback = self._feedback
        feedback.loaded, self._owed, self._unsettled = False, {}, set()
        for (key, group), plan in zip(self._laid.items(), self._plans, strict=True):
            spans = _spans(group.layout)
            there = any(bool(feedback.owed[name].any()) for name, *_ in spans if name in feedback.owed)
            if not group.buffer.tensor.is_floating_point() or not (self._schemes or there):
                for name, *_ in spans:
                    feedback.owed.pop(name, None)
                continue
            owed = self._owed[key] = torch.zeros(group.layout.numel, dtype=torch.float32, device="cpu")
            for name, start, stop in spans:
                before = feedback.owed.get(name)
                if before is not None and before.numel() == stop - start:
                    owed[start:stop] = before
                feedback.owed[name] = owed[start:stop]
            self._unsettled |= {
                (key, unit.start)
                for unit in plan.units
                if there and (key, unit.start) not in self._schemes and owed[unit.start : unit.stop].any()
            }

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
        """As `Router.all_reduce`; all units of a plan go through here, or none."""
        if self._feedback.loaded:
            self._take_over()
        key = id(buffer), start
        if key in self._unsettled:
            self._unsettled.remove(key)
            self._settle(buffer.tensor[start:stop], self._owed[id(buffer)][start:stop])
            if not (self._schemes or self._unsettled):
                self._take_over()  # which forgets what is not owed any more
                self._unsettled.clear()
        if not self._schemes or op is not ReduceOp.SUM:
            return self._router.all_reduce(
                buffer, start, stop, route=route, stream=stream, threads=threads, nccl=nccl, op=op, scale=scale
            )
        work = ThreadWork()

        def travel() -> None:
            scheme = self._schemes.get(key)
            end = start if scheme is None else self._end(self._laid[id(buffer)], stop)
            rest = self._router.all_reduce(buffer, end, stop, route=route, stream=stream, scale=scale)
            if scheme is not None:
                self._reduce(scheme, buffer, start, end, route, stream, scale)
            self._router.wait_for([rest])
            if self.measures:
                sent_bytes = ring_bytes((stop - end) * buffer.tensor.itemsize, self._size)
                self._add(stream, Cost(sent_bytes=sent_bytes, whole_bytes=sent_bytes))

        if stream not in self._workers:
            self._workers[stream] = Worker(f"sirtaki-compress-{stream}")
        what = f"elements [{start}, {stop}) of a gradient could not be compressed"
        self._workers[stream].put(partial(work.run, travel, what))
        return work

    def cost(self) -> Cost:
        """What was measured since the last call."""
        costs, self._costs = self._costs, {}
        return Cost(*(sum(values) for values in zip(Cost(), *costs.values(), strict=True)))

    def _add(self, stream: int, cost: Cost) -> None:
        before = self._costs.get(stream, Cost())
        self._costs[stream] = Cost(*(old + new for old, new in zip(before, cost, strict=True)))

    def _end(self, group: CompressibleGroup, stop: int) -> int:
        """Where a unit's gradients end: control flags travel as they are."""
        layout = group.layout
        return min(stop, layout.offsets[-2]) if layout.names[-1:] == (FLAGS,) else stop

    @torch.no_grad()
    def _settle(self, target: torch.Tensor, owed: torch.Tensor) -> None:
        """Gives back what compression owes a gradient that travels as it is now, but for what its dtype rounds off."""
        before = target.clone() if target.itemsize < owed.itemsize else None
        target.add_(owed)
        if before is None:
            owed.zero_()
        else:
            owed.sub_(target.float() - before).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    @torch.no_grad()
    def _reduce(
        self, scheme: Scheme, buffer: FlatBuffer, start: int, stop: int, route: Route, stream: int, scale: float
    ) -> None:
        target, owed = buffer.tensor[start:stop], self._owed[id(buffer)][start:stop]
        whole = float(torch.linalg.vector_norm(target, dtype=torch.float64)) if self.measures else math.nan
        owed.add_(target)
        pieces = [] if not isinstance(scheme, PowerSgd) else self._pieces(buffer, start, stop)
        unit = CompressionInput(
            owed, pieces, self._feedback.factors, self._rank, self._size, self._router, route, stream
        )
        result = target if target.dtype is owed.dtype else torch.empty_like(owed)
        scheme.reduce(unit, result, scale)
        if not bool(owed.sum().isfinite()):
            owed.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if math.isfinite(whole):
            left = float(torch.linalg.vector_norm(owed, dtype=torch.float64))
            self._add(stream, Cost(left**2, whole**2, unit.sent_bytes, ring_bytes(target.nbytes, self._size)))
        if result is not target:
            target.copy_(result)

    def _pieces(self, buffer: FlatBuffer, start: int, stop: int) -> list[MatrixSlice]:
        """The pieces of all parameters of which `[start, stop)` has whole rows."""
        group, pieces = self._laid[id(buffer)], []
        for (name, first, end), place in zip(_spans(group.layout), group.places, strict=True):
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
        """Ends the threads; what is under way ends first, or fails. False if one waits for other ranks."""
        return ended(list(self._workers.values()), within_s=1.0)


def _spans(layout: GradientLayout) -> list[tuple[str, int, int]]:
    """Names of parameters, and where they lie."""
    there = zip(layout.names, layout.offsets, layout.offsets[1:], strict=False)
    return [(name, start, stop) for name, start, stop in there if name != FLAGS]
