"""What a plan is: the layout of gradients, the units that it is cut into, their streams, threads and algorithm."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any

from sirtaki.errors import ConfigError, PlanError

SMALL_GRADIENT = 16 * 1024
"""Elements from which on a gradient counts as large."""


class UnitClass(Enum):
    """What most elements of a unit belong to."""

    LARGE = "large"  # gradients of many elements
    EMBEDDINGS = "embeddings"  # matrices most rows of which are zero in a step
    SMALL = "small"  # gradients of fewer than `SMALL_GRADIENT` elements


COMPRESSORS = "fp16, bf16, int8, fp8, topk:RATIO and powersgd:RANK"


def compressor_name(text: str) -> str:
    """A compressor as plans and knobs name it: `TopK:.1` → `topk:0.1`, `powersgd` → `powersgd:4`.

    Raises:
        ConfigError: there is none of that name, or not with that number.
    """
    kind, colon, number = text.strip().lower().partition(":")
    try:
        if kind in ("fp16", "bf16", "int8", "fp8") and not colon:
            return kind
        if kind == "topk" and 0.0 < (ratio := float(number if colon else 0.01)) <= 1.0:
            return f"topk:{ratio:g}"
        if kind == "powersgd" and (rank := int(number if colon else 4)) >= 1:
            return f"powersgd:{rank}"
    except ValueError:
        pass
    raise ConfigError(f"{text.strip()!r} is no compressor; there are {COMPRESSORS}")


FLAGS = "sirtaki.control_flags"
"""In a layout's names: what travels behind the gradients and is none."""


CUDA_ALIGNMENT_BYTES = 256
"""What cudaMalloc aligns to. NCCL and foreach kernels leave their vectorised paths below 16 bytes."""


def alignment(device: str, itemsize_bytes: int) -> int:
    """Return the elements at whose multiples gradients and units start in flat buffers on this type of device."""
    return max(1, CUDA_ALIGNMENT_BYTES // itemsize_bytes) if device == "cuda" else 1


@dataclass(frozen=True, kw_only=True)
class GradientLayout:
    """Gradients one behind the other, in the order in which they are expected to become ready.

    Attributes:
        sizes: elements of each gradient, rounded up to its `alignment`, `(n_gradients,)`; zero is allowed.
        itemsize_bytes: bytes of one element as it travels.
        dtype: name of the element type as it travels, such as "float32".
        device: "cpu" or "cuda".
        names: parameter names, `(n_gradients,)`, for messages and traces; empty if unknown.
        embeddings: names of those whose rows are mostly zero in a step; only known where that matters.
    """

    sizes: tuple[int, ...]
    itemsize_bytes: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    names: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.sizes):
            raise PlanError(f"gradient sizes must not be negative: {min(self.sizes)}")
        if self.itemsize_bytes <= 0:
            raise PlanError(f"itemsize_bytes must be positive, not {self.itemsize_bytes}")
        if self.names and len(self.names) != len(self.sizes):
            raise PlanError(f"{len(self.names)} names for {len(self.sizes)} gradients")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each gradient and, last, the total: `(n_gradients + 1,)`."""
        return (0, *accumulate(self.sizes))

    @property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return self.offsets[-1]

    @property
    def total_bytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.numel * self.itemsize_bytes

    def describe(self, start: int, stop: int) -> str:
        """The gradients with elements in `[start, stop)`, in words; needs names."""
        first = bisect_right(self.offsets, start) - 1
        last = max(first, bisect_left(self.offsets, stop) - 1)
        last -= last > first and self.names[last] == FLAGS
        if first == last:
            return self.names[first]
        return f"{self.names[first]} … {self.names[last]} ({last - first + 1})"

    def class_of(self, start: int, stop: int) -> UnitClass:
        """What most of the elements `[start, stop)` belong to."""
        elements: Counter[UnitClass] = Counter()
        place = bisect_right(self.offsets, start) - 1
        while place < len(self.sizes) and self.offsets[place] < stop:
            kind = UnitClass.LARGE if self.sizes[place] >= SMALL_GRADIENT else UnitClass.SMALL
            if self.names and self.names[place] in self.embeddings:
                kind = UnitClass.EMBEDDINGS
            elements[kind] += min(stop, self.offsets[place + 1]) - max(start, self.offsets[place])
            place += 1
        return max(UnitClass, key=lambda kind: elements[kind])

    def reordered(self, order: Sequence[int]) -> GradientLayout:
        """The layout whose i-th gradient is this one's `order[i]`-th."""
        if sorted(order) != list(range(len(self.sizes))):
            raise PlanError(f"an order of {len(self.sizes)} gradients must name each of them once")
        return GradientLayout(
            sizes=tuple(self.sizes[i] for i in order),
            itemsize_bytes=self.itemsize_bytes,
            dtype=self.dtype,
            device=self.device,
            names=tuple(self.names[i] for i in order) if self.names else (),
            embeddings=self.embeddings,
        )


class Algorithm(Enum):
    """How one unit is reduced over all ranks."""

    FLAT = "flat"  # all ranks alike
    HIERARCHICAL = "hierarchical"  # inside the node first, then across nodes (AIACC's "tree")


class TransportKind(Enum):
    """What carries a unit between ranks (between nodes, where the algorithm is hierarchical)."""

    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    MPI = "mpi"
    NCCL = "nccl"
    STAGED = "staged"


Route = tuple[TransportKind, Algorithm]
"""The way of a unit: by which transport, and how the ranks go about it."""


def goes_through_sockets(route: Route) -> bool:
    """Return whether units on it may be compressed: what ranks send to each other there are bytes."""
    return route[0] in (TransportKind.GLOO, TransportKind.MPI) and route[1] is Algorithm.FLAT


class NcclWay(Enum):
    """By which of NCCL's algorithms, and in which of its protocols, an all-reduce runs."""

    RING_LL = "ring/ll"
    RING_LL128 = "ring/ll128"
    RING_SIMPLE = "ring/simple"
    TREE_LL = "tree/ll"
    TREE_LL128 = "tree/ll128"
    TREE_SIMPLE = "tree/simple"

    @property
    def algorithm(self) -> str:
        """As `NCCL_ALGO` has it."""
        return self.value.split("/")[0].capitalize()

    @property
    def protocol(self) -> str:
        """As `NCCL_PROTO` has it."""
        name = self.value.split("/")[1]
        return "Simple" if name == "simple" else name.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One all-reduce: elements `[start, stop)` of the flat buffer.

    Attributes:
        stream: index of the communicator that carries it.
        threads: GPU threads (LIBRA's r), None = the transport's default.
        algorithm: flat or hierarchical.
        compressor: what it is made smaller by (`compressor_name`); empty = it travels as it is.
        nccl: how NCCL reduces it, None = as NCCL decides, or something else carries it.
    """

    start: int
    stop: int
    stream: int = 0
    threads: int | None = None
    algorithm: Algorithm = Algorithm.FLAT
    compressor: str = ""
    nccl: NcclWay | None = None

    @property
    def numel(self) -> int:
        """Elements in this unit."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class CommPlan:
    """All units of one flat buffer in the order in which they are issued.

    Raises:
        PlanError: units overlap, leave a gap, are empty or name a stream that does not exist.
    """

    numel: int
    units: tuple[Unit, ...]
    streams: int
    transport: TransportKind

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise PlanError(f"a plan needs at least one stream, not {self.streams}")
        position = 0
        for index, unit in enumerate(self.units):
            if unit.start != position or unit.stop <= unit.start:
                raise PlanError(
                    f"unit {index} covers [{unit.start}, {unit.stop}) but element {position} is next: "
                    "units must cover each element once, in order, and not be empty"
                )
            if not 0 <= unit.stream < self.streams:
                raise PlanError(f"unit {index} is on stream {unit.stream} of a plan with {self.streams} streams")
            if unit.threads is not None and unit.threads < 1:
                raise PlanError(f"unit {index} has {unit.threads} threads")
            position = unit.stop
        if position != self.numel:
            raise PlanError(f"the units end at element {position} of {self.numel}")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` is its inverse."""
        return {
            "numel": self.numel,
            "streams": self.streams,
            "transport": self.transport.value,
            "units": [_unit_json(unit) for unit in self.units],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CommPlan:
        """The plan that `to_json` described."""
        return cls(
            numel=data["numel"],
            streams=data["streams"],
            transport=TransportKind(data["transport"]),
            units=tuple(_unit_of(unit) for unit in data["units"]),
        )

    def on_fewest_streams(self) -> CommPlan:
        """The same units on as few streams as they use, numbered as they are first used: what is run is the same."""
        numbers = {stream: number for number, stream in enumerate(dict.fromkeys(unit.stream for unit in self.units))}
        units = tuple(replace(unit, stream=numbers[unit.stream]) for unit in self.units)
        return replace(self, units=units, streams=max(1, len(numbers)))

    def fingerprint(self) -> str:
        """A digest that is equal on two ranks exactly if their plans are."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unit_json(unit: Unit) -> dict[str, Any]:
    """Without what most units have not, so that their plans keep their fingerprints."""
    data = {**asdict(unit), "algorithm": unit.algorithm.value}
    if not unit.compressor:
        del data["compressor"]
    if unit.nccl is None:
        del data["nccl"]
    else:
        data["nccl"] = unit.nccl.value
    return data


def _unit_of(data: Mapping[str, Any]) -> Unit:
    ways = {"nccl": NcclWay(data["nccl"])} if "nccl" in data else {}
    return Unit(**{**data, "algorithm": Algorithm(data["algorithm"]), **ways})
