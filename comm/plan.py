"""Communication plans: how the gradients in a flat buffer are all-reduced, unit (bucket) by unit.

A plan states for each unit its range of the flat buffer, and the stream (connection or CUDA stream), number of GPU
threads and all-reduce algorithm that reduce it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any

from sirtaki.errors import ConfigError, PlanError, require

SMALL_GRADIENT = 16 * 1024
"""Smallest number of elements of a gradient that counts as large. Smaller gradients count as small (`UnitClass`)."""


class UnitClass(Enum):
    """Class of a unit (bucket): the kind of gradient to which most of its elements belong."""

    LARGE = "large"  # Gradients of at least `SMALL_GRADIENT` elements.
    EMBEDDINGS = "embeddings"  # Gradients of embedding matrices, with mostly zero rows.
    SMALL = "small"  # Gradients of fewer than `SMALL_GRADIENT` elements.


COMPRESSORS = "fp16, bf16, int8, fp8, topk:RATIO and powersgd:RANK"


def compressor_name(text: str) -> str:
    """Return the canonical name of a compressor: `TopK:.1` → `topk:0.1`, `powersgd` → `powersgd:4`.

    Raises:
        ConfigError: there is no compressor of this name, or the number after the colon is out of range.
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
    raise ConfigError(f"the compressor must be one of {COMPRESSORS}, found {text.strip()!r}")


FLAGS = "sirtaki.control_flags"
"""Entry of `GradientLayout.names` for the control flags: a few numbers after the gradients in a flat buffer."""


CUDA_ALIGNMENT_BYTES = 256
"""Alignment of gradients in flat buffers on GPUs: that of memory from `cudaMalloc`. Vectorised kernels of NCCL and of
`torch._foreach_*` require at least 16 bytes."""


def alignment(device: str, itemsize_bytes: int) -> int:
    """Return the alignment, in elements, of gradients and units (buckets) in flat buffers on "cpu" or "cuda"."""
    return max(1, CUDA_ALIGNMENT_BYTES // itemsize_bytes) if device == "cuda" else 1


@dataclass(frozen=True, kw_only=True)
class GradientLayout:
    """Order and sizes of the gradients in a flat buffer.

    The gradients are in the order in which the backward pass is expected to compute them.

    Attributes:
        sizes: number of elements of each gradient, rounded up to `alignment`, `(n_gradients,)`. Zero is allowed.
        itemsize_bytes: bytes of one element of the flat buffer.
        dtype: name of the dtype of the flat buffer, such as "float32".
        device: type of the device that holds the flat buffer, "cpu" or "cuda".
        names: names of the gradients' parameters, `(n_gradients,)`, for messages and traces. Empty = unknown.
        embeddings: names of parameters whose gradients have mostly zero rows. Empty = unknown.
    """

    sizes: tuple[int, ...]
    itemsize_bytes: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    names: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(min(self.sizes, default=0) >= 0, "sizes", "at least 0", self.sizes, PlanError)
        require(self.itemsize_bytes >= 1, "itemsize_bytes", "at least 1", self.itemsize_bytes, PlanError)
        valid = len(self.names) in (0, len(self.sizes))
        require(valid, "names", f"{len(self.sizes)} names, one for each gradient", len(self.names), PlanError)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Index in the flat buffer of each gradient's first element, followed by `numel`: `(n_gradients + 1,)`."""
        return (0, *accumulate(self.sizes))

    @property
    def numel(self) -> int:
        """Number of elements of the flat buffer."""
        return self.offsets[-1]

    @property
    def total_bytes(self) -> int:
        """Size of the flat buffer in bytes."""
        return self.numel * self.itemsize_bytes

    def describe(self, start: int, stop: int) -> str:
        """Return a text that names the gradients with elements in `[start, stop)`, for messages. Requires `names`."""
        first = bisect_right(self.offsets, start) - 1
        last = max(first, bisect_left(self.offsets, stop) - 1)
        last -= last > first and self.names[last] == FLAGS
        if first == last:
            return self.names[first]
        return f"{self.names[first]} … {self.names[last]} ({last - first + 1})"

    def class_of(self, start: int, stop: int) -> UnitClass:
        """Return the class of gradients (large, embeddings, small) to which most elements in `[start, stop)` belong."""
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
        """Return the layout of the gradients in another order: its gradient i is gradient `order[i]` of this layout."""
        n_gradients = len(self.sizes)
        require(
            sorted(order) == list(range(n_gradients)), "order", f"each of 0 … {n_gradients - 1} once", order, PlanError
        )
        return GradientLayout(
            sizes=tuple(self.sizes[i] for i in order),
            itemsize_bytes=self.itemsize_bytes,
            dtype=self.dtype,
            device=self.device,
            names=tuple(self.names[i] for i in order) if self.names else (),
            embeddings=self.embeddings,
        )


class Algorithm(Enum):
    """All-reduce algorithm of a unit (bucket)."""

    FLAT = "flat"  # One all-reduce over all ranks.
    HIERARCHICAL = "hierarchical"  # Reduce within each node first, then between nodes (AIACC's "tree").


class TransportKind(Enum):
    """Transport that reduces a unit (bucket) over ranks. In the hierarchical algorithm, it connects the nodes."""

    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    MPI = "mpi"
    NCCL = "nccl"
    STAGED = "staged"


Route = tuple[TransportKind, Algorithm]
"""Transport and all-reduce algorithm of a unit (bucket)."""


def goes_through_sockets(route: Route) -> bool:
    """Return whether a route (transport and algorithm) sends bytes through sockets.

    Only units (buckets) on such routes may be compressed.
    """
    return route[0] in (TransportKind.GLOO, TransportKind.MPI) and route[1] is Algorithm.FLAT


class NcclWay(Enum):
    """Algorithm and protocol that NCCL uses for an all-reduce."""

    RING_LL = "ring/ll"
    RING_LL128 = "ring/ll128"
    RING_SIMPLE = "ring/simple"
    TREE_LL = "tree/ll"
    TREE_LL128 = "tree/ll128"
    TREE_SIMPLE = "tree/simple"

    @property
    def algorithm(self) -> str:
        """The NCCL algorithm, as a value of the environment variable `NCCL_ALGO`."""
        return self.value.split("/")[0].capitalize()

    @property
    def protocol(self) -> str:
        """The NCCL protocol, as a value of the environment variable `NCCL_PROTO`."""
        name = self.value.split("/")[1]
        return "Simple" if name == "simple" else name.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A communication unit (bucket): elements `[start, stop)` of the flat buffer, reduced by one all-reduce.

    Attributes:
        start: index of the unit's first element in the flat buffer.
        stop: end of the unit's elements.
        stream: number of the stream (connection or CUDA stream) that reduces the unit.
        threads: number of GPU threads that reduce the unit (LIBRA's r). None = the transport's default.
        algorithm: flat or hierarchical all-reduce.
        compressor: canonical name of the compressor, such as `topk:0.1`. Empty = the unit is not compressed.
        nccl: NCCL algorithm and protocol. None = NCCL decides, or the transport is not NCCL.
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
        """Number of elements in this unit (bucket)."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class CommPlan:
    """Communication plan of one flat buffer: its units (buckets), in the order in which they are launched.

    Attributes:
        numel: number of elements of the flat buffer.
        units: units, sorted by `start`, which cover each element once.
        streams: number of streams (connections or CUDA streams) over which the units are distributed.
        transport: transport that reduces all units.

    Raises:
        PlanError: units overlap, leave a gap or are empty, or a unit's stream number is not below `streams`.
    """

    numel: int
    units: tuple[Unit, ...]
    streams: int
    transport: TransportKind

    def __post_init__(self) -> None:
        require(self.streams >= 1, "streams", "at least 1", self.streams, PlanError)
        position = 0
        for index, unit in enumerate(self.units):
            follows = unit.start == position < unit.stop
            if not (follows and 0 <= unit.stream < self.streams and (unit.threads is None or unit.threads >= 1)):
                rule = f"start={position}, stop > start, 0 <= stream < {self.streams} and threads >= 1"
                require(False, f"bucket {index} of the communication plan", rule, unit, PlanError)

            position = unit.stop
        if position != self.numel:
            raise PlanError(
                f"the communication plan is for {position} gradient elements, but the model has {self.numel}; make a "
                "new plan with `sirtaki optimize`"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a dict that can be stored as JSON. `from_json` is the inverse."""
        return {
            "numel": self.numel,
            "streams": self.streams,
            "transport": self.transport.value,
            "units": [_unit_json(unit) for unit in self.units],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CommPlan:
        """Create a plan from a dict that `to_json` has returned."""
        return cls(
            numel=data["numel"],
            streams=data["streams"],
            transport=TransportKind(data["transport"]),
            units=tuple(_unit_of(unit) for unit in data["units"]),
        )

    def on_fewest_streams(self) -> CommPlan:
        """Return this plan without unused streams. Streams are numbered in the order in which units first use them."""
        numbers = {stream: number for number, stream in enumerate(dict.fromkeys(unit.stream for unit in self.units))}
        if all(stream == number for stream, number in numbers.items()) and self.streams == max(1, len(numbers)):
            return self
        units = tuple(replace(unit, stream=numbers[unit.stream]) for unit in self.units)
        return replace(self, units=units, streams=max(1, len(numbers)))

    def fingerprint(self) -> str:
        """Return a hash of the communication plan. Two plans with equal hashes are equal."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_UNIT_FIELDS = [each.name for each in fields(Unit)]


def _unit_json(unit: Unit) -> dict[str, Any]:
    """Return a unit (bucket) as a dict for JSON.

    The dict omits default values of `compressor` and `nccl`, attributes that older versions lack. So the fingerprint
    (hash) of a plan is the same in older versions.
    """
    data = {name: getattr(unit, name) for name in _UNIT_FIELDS}  # `asdict` takes five times as long
    data["algorithm"] = unit.algorithm.value
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
