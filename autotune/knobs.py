"""Settings that tuning chooses from: the tuned parameters ("knobs"), the space of permitted settings, and its grid."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Annotated, Any, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, UnsetType, structs

from sirtaki.comm.plan import (
    Algorithm,
    CommPlan,
    GradientLayout,
    NcclWay,
    Route,
    TransportKind,
    Unit,
    UnitClass,
    alignment,
    compressor_name,
    goes_through_sockets,
)
from sirtaki.errors import ConfigError, PlanError, require
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, counted

_T = TypeVar("_T")

KIB = 1024
MIB = 1024 * KIB


# Number of GPU threads. The limits are checked only when msgspec reads a setting from a file or a database.
Threads = Annotated[int, Meta(ge=1, le=2**20)] | None


class Cut(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A unit (bucket) with explicit bounds: a range of the flat gradient buffer that one all-reduce sums over ranks.

    Attributes:
        stop: index of the first element after the unit. The unit starts at the `stop` of the unit before it, or at 0.
        stream: index of the stream (parallel connection on CPUs, CUDA stream on GPUs) that reduces the unit.
        threads: number of GPU threads that reduce the unit; None = `Knobs.threads`.
    """

    stop: Annotated[int, Meta(ge=1, le=2**48)]
    stream: Annotated[int, Meta(ge=0)] = 0
    threads: Threads = None


class Lossy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Names of the gradient compressors of a setting, one for each class of units (buckets).

    Attributes:
        large: compressor of units with mainly large gradients; empty = these units are not compressed.
        embeddings: compressor of units with mainly sparse embedding gradients; empty = not compressed.
        small: compressor of units with mainly small gradients; empty = not compressed.
    """

    large: str = ""
    embeddings: str = ""
    small: str = ""

    def __post_init__(self) -> None:
        for name in self.names:
            try:
                known = compressor_name(name)
            except ConfigError as err:
                raise PlanError(str(err)) from err
            require(name == known, "compressor", known, name, PlanError)

    def __bool__(self) -> bool:
        return bool(self.names)

    @classmethod
    def all_by(cls, name: str) -> Lossy:
        """Create a `Lossy` with the same compressor for all classes of units (buckets)."""
        return cls(**{kind.value: name for kind in UnitClass})

    def by(self, kind: UnitClass) -> str:
        """Return the name of the compressor of a class of units (buckets); empty = they are not compressed."""
        name: str = getattr(self, kind.value)
        return name

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the gradient compressors that any class of units (buckets) uses, without duplicates."""
        return tuple(dict.fromkeys(name for kind in UnitClass if (name := self.by(kind))))

    def describe(self) -> str:
        """Describe the gradient compressors for logs, such as `int8`, or `int8 (large), topk:0.01 (embeddings)`."""
        if len(self.names) == 1 and all(self.by(kind) for kind in UnitClass):
            return self.names[0]
        return ", ".join(f"{self.by(kind)} ({kind.value})" for kind in UnitClass if self.by(kind))


LARGE_FOR_NCCL_BYTES = MIB
"""Size of a unit (bucket) from which the NCCL algorithm and protocol for large units is used (`NcclWays.large`).

Below this size, NCCL's cost model prefers low-latency protocols.
"""


class NcclWays(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """NCCL algorithm and protocol for the units (buckets) of each size class.

    Attributes:
        small: algorithm and protocol for units smaller than `LARGE_FOR_NCCL_BYTES`; None = NCCL decides.
        large: algorithm and protocol for all other units; None = NCCL decides.
    """

    small: NcclWay | None = None
    large: NcclWay | None = None

    def __bool__(self) -> bool:
        return bool(self.by_class)

    @staticmethod
    def size_class(unit_bytes: int) -> str:
        """Return the size class of a unit (bucket) of this size: "small" or "large", which are also names of fields."""
        return "large" if unit_bytes >= LARGE_FOR_NCCL_BYTES else "small"

    def by(self, unit_bytes: int) -> NcclWay | None:
        """Return the NCCL algorithm and protocol for units (buckets) of this size; None = NCCL decides."""
        way: NcclWay | None = getattr(self, self.size_class(unit_bytes))
        return way

    @classmethod
    def of(cls, unit_bytes: int, way: NcclWay | None) -> NcclWays:
        """Create a `NcclWays` that sets algorithm and protocol for one size class of units (buckets): small or large.

        Args:
            unit_bytes: unit size that determines the size class.
            way: the NCCL algorithm and protocol; None = NCCL decides.
        """
        return cls(**{cls.size_class(unit_bytes): way})

    @property
    def by_class(self) -> dict[str, NcclWay]:
        """Return {size class of units (buckets): NCCL algorithm and protocol}, "small" first.

        Size classes for which NCCL decides are left out.
        """
        named = {"small": self.small, "large": self.large}
        return {name: way for name, way in named.items() if way is not None}

    def describe(self) -> str:
        """Describe the NCCL algorithms and protocols for logs, such as `ring/ll (small), ring/simple (large)`."""
        return ", ".join(f"{way.value} ({name})" for name, way in self.by_class.items())


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One setting of all parameters that tuning chooses ("knobs"). Hashable.

    Attributes:
        unit_bytes: size of each unit (bucket) in bytes. Without effect if `cuts` is given.
        streams: number of units that are reduced concurrently: parallel connections on CPUs, CUDA streams on GPUs.
        transport: mechanism that reduces the units: NCCL, Gloo, shared memory, …
        algorithm: flat all-reduce (over all ranks alike) or hierarchical all-reduce (first within each node).
        threads: number of GPU threads that reduce a unit (LIBRA's r; CTAs are threads / 512). None = the transport's
            default.
        cuts: bounds of units of different sizes, which fit one model's gradients only. None = all units have
            `unit_bytes` bytes.
        lossy: compressors of the units. Unset, and omitted in JSON, if units are not compressed.
        nccl: NCCL's algorithms and protocols for the units. Unset, and omitted in JSON, if NCCL decides.

    Raises:
        PlanError: a number is below 1, cuts do not ascend, or a cut's stream is not below `streams`.
    """

    unit_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    streams: Annotated[int, Meta(ge=1, le=1024)]
    transport: TransportKind
    algorithm: Algorithm = Algorithm.FLAT
    threads: Threads = None
    cuts: Annotated[tuple[Cut, ...], Meta(max_length=100_000)] | None = None
    lossy: Lossy | UnsetType = UNSET
    nccl: NcclWays | UnsetType = UNSET

    def __post_init__(self) -> None:
        for name in ("lossy", "nccl"):
            if not getattr(self, name):
                structs.force_setattr(self, name, UNSET)
        for name in ("unit_bytes", "streams"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name), PlanError)
        require(self.threads is None or self.threads >= 1, "threads", "at least 1", self.threads, PlanError)
        cuts = self.cuts or ()
        valid = all(cut.stream < self.streams for cut in cuts) and all(a.stop < b.stop for a, b in pairwise(cuts))
        require(valid, "cuts", f"ascending stops and streams below {self.streams}", cuts, PlanError)

    def __reduce__(self) -> tuple[partial[Knobs], tuple[()]]:
        """Pickle the setting without its unset fields, because pickle takes a millisecond to find `msgspec.UNSET`."""
        return partial(Knobs, **{name: one for name, one in structs.asdict(self).items() if one is not UNSET}), ()

    def but(self, **changes: Any) -> Self:
        """Return a copy of the setting with some fields changed."""
        return structs.replace(self, **changes)

    @property
    def route(self) -> Route:
        """Return the route by which all units (buckets) are reduced: the pair of transport and algorithm."""
        return self.transport, self.algorithm

    def to_plan(self, layout: GradientLayout) -> CommPlan:
        """Divide the gradients of `layout` into units (buckets), each of which one all-reduce sums over ranks.

        Without `cuts`, units have `unit_bytes` bytes and are assigned to streams round-robin. The last unit may be
        shorter. On CUDA, the ends of all units are rounded up to the device's alignment.

        Raises:
            PlanError: `cuts` do not fit the layout.
        """
        cuts, piece = self.cuts, alignment(layout.device, layout.itemsize_bytes)
        if cuts is None:
            step = -(-max(1, self.unit_bytes // layout.itemsize_bytes) // piece) * piece
            stops = (min(start + step, layout.numel) for start in range(0, layout.numel, step))
            cuts = tuple(Cut(stop=stop, stream=number % self.streams) for number, stop in enumerate(stops))
        elif piece > 1:
            cuts = _aligned(cuts, piece, layout.numel)
        units = [
            Unit(
                start=start,
                stop=cut.stop,
                stream=cut.stream,
                threads=cut.threads or self.threads,
                algorithm=self.algorithm,
                compressor=self.lossy.by(layout.class_of(start, cut.stop)) if self.lossy else "",
                nccl=self.nccl.by((cut.stop - start) * layout.itemsize_bytes) if self.nccl else None,
            )
            for start, cut in zip([0, *(cut.stop for cut in cuts)], cuts, strict=False)
        ]
        return CommPlan(numel=layout.numel, units=tuple(units), streams=self.streams, transport=self.transport)

    @property
    def compressors(self) -> str:
        """Return a description of the compressors for logs, such as `int8`; empty if gradients are not compressed."""
        return self.lossy.describe() if self.lossy else ""

    def to_json(self) -> dict[str, Any]:
        """Return the setting as a JSON-serialisable dict. `Knobs.from_json` is the inverse."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Knobs:
        """Create a setting from the dict that `Knobs.to_json` returns.

        Raises:
            PlanError: a field is missing or invalid.
        """
        try:
            return msgspec.convert(data, cls)
        except (msgspec.ValidationError, RecursionError) as err:
            raise PlanError(f"the communication setting {data!r:.500} is invalid: {err}") from err

    def describe(self) -> str:
        """Describe the setting in one line for logs, such as `shared_memory flat, 4 MiB units, 2 streams`."""
        cut = (
            counted(len(self.cuts), "planned unit")
            if self.cuts is not None
            else f"{format_bytes(self.unit_bytes)} units"
        )
        threads = "" if self.threads is None else f", {counted(self.threads, 'thread')}"
        lossy = f", compressed by {self.compressors}" if self.lossy else ""
        nccl = f", NCCL by {self.nccl.describe()}" if self.nccl else ""
        over = f"{self.transport.value} {self.algorithm.value}"
        return f"{over}, {cut}, {counted(self.streams, 'stream')}{threads}{nccl}{lossy}"


def _aligned(cuts: Sequence[Cut], piece: int, numel: int) -> tuple[Cut, ...]:
    """Round the ends of units (buckets) up to multiples of `piece` elements, and drop units that become empty."""
    stops = [max(cut.stop, min(-(-cut.stop // piece) * piece, numel)) for cut in cuts]
    rounded = [structs.replace(cut, stop=stop) for cut, stop in zip(cuts, stops, strict=True)]
    before = [(0, 0), *zip((cut.stop for cut in cuts), (cut.stop for cut in rounded), strict=True)]
    return tuple(
        new
        for cut, new, (stop, rounded_stop) in zip(cuts, rounded, before, strict=False)
        # Keep units whose ends do not ascend: they are errors, which CommPlan must reject.
        if new.stop > rounded_stop or cut.stop <= stop
    )


def format_bytes(count: int) -> str:
    """Format a number of bytes for logs: `262144` → `256 KiB`, `1500000` → `1.4 MiB`."""
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


STEP_OCTAVES = 0.5
"""Ratio of bucket sizes of neighbouring settings (`KnobSpace.around`), as logarithm to base 2."""

NEAR_OCTAVES = 0.3
"""Two settings are "close" if they differ only in the bucket size, by less than this ratio (as logarithm to base 2).

A search skips settings close to a measured one, because their communication times hardly differ.
"""

MOST_POINTS = 100
"""Maximum number of settings in a space that `KnobSpace.every` enumerates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobSpace:
    """Settings that a search may choose: what the transports support, restricted to the values that the user has set.

    Attributes:
        routes: permitted pairs of transport and algorithm, the default one first.
        unit_bytes: smallest and largest size of a unit (bucket) in bytes. Both are equal if the user has set the size.
        streams: permitted numbers of streams (parallel connections on CPUs, CUDA streams on GPUs), ascending.
        threads: permitted numbers of GPU threads, ascending. `(None,)` if the transport has no such setting.
        most_streams: (route, maximum number of streams), for each route that does not support all numbers in `streams`.
        lossy: names of the gradient compressors that the user allows. The search method `CompressorArm` tries them; the
            grid `KnobLattice` does not contain them.
        classes: classes of units (large, embeddings, small) that occur in the job's gradient layout.
        nccl: permitted NCCL algorithms and protocols. Each entry sets one size class of units. The search method
            `NcclArm` tries them; the grid `KnobLattice` does not contain them.

    Raises:
        PlanError: an attribute is empty or not in ascending order, or a route permits no number of streams.
    """

    routes: tuple[Route, ...]
    unit_bytes: tuple[int, int] = (SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES)
    streams: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    threads: tuple[int | None, ...] = (None,)
    most_streams: tuple[tuple[Route, int], ...] = ()
    lossy: tuple[str, ...] = ()
    classes: tuple[UnitClass, ...] = tuple(UnitClass)
    nccl: tuple[NcclWays, ...] = ()

    def __post_init__(self) -> None:
        low, high = self.unit_bytes
        require(1 <= low <= high, "unit_bytes", "(smallest, largest) in bytes", self.unit_bytes, PlanError)
        for name in ("routes", "streams", "threads"):
            require(getattr(self, name), name, "at least one value to try", "none", PlanError)
        ascending = list(self.streams) == sorted(set(self.streams)) and self.streams[0] >= 1
        require(ascending, "streams", "positive, ascending numbers", self.streams, PlanError)
        possible = all(self.streams_on(route) for route in self.routes)
        require(possible, "most_streams", f"at least {self.streams[0]} on each route", self.most_streams, PlanError)

    def streams_on(self, route: Route) -> tuple[int, ...]:
        """Return the permitted numbers of streams of a route (transport and algorithm), ascending."""
        most = dict(self.most_streams).get(route, self.streams[-1])
        return tuple(count for count in self.streams if count <= most)

    def at(self, unit_bytes: int, streams: int, threads: int, route: int) -> Knobs:
        """Return the setting with a unit (bucket) size, and with the permitted values at these indices.

        The number of streams is limited to the maximum of the route.

        Args:
            unit_bytes: the unit size.
            streams: index of the number of streams in the attribute `streams`.
            threads: index of the number of GPU threads in the attribute `threads`.
            route: index of the route (transport and algorithm) in the attribute `routes`.
        """
        transport, algorithm = self.routes[route]
        offered = self.streams_on((transport, algorithm))
        return Knobs(
            unit_bytes=unit_bytes,
            streams=offered[min(streams, len(offered) - 1)],
            threads=self.threads[threads],
            transport=transport,
            algorithm=algorithm,
        )

    @property
    def has_choices(self) -> bool:
        """Return whether the space has more than one setting."""
        low, high = self.unit_bytes
        several = low < high or max(len(self.routes), len(self.streams), len(self.threads)) > 1
        return several or bool(self.lossy or self.nccl)

    def __contains__(self, knobs: Knobs) -> bool:
        return (
            self.unit_bytes[0] <= knobs.unit_bytes <= self.unit_bytes[1]
            and knobs.streams in self.streams_on(knobs.route)
            and (knobs.threads in self.threads or knobs.cuts is not None)
            and all(cut.threads is None or cut.threads in self.threads for cut in knobs.cuts or ())
            and knobs.route in self.routes
            and (not knobs.lossy or (goes_through_sockets(knobs.route) and set(knobs.lossy.names) <= set(self.lossy)))
            and (not knobs.nccl or (knobs.transport is TransportKind.NCCL and self.allows_nccl(knobs.nccl)))
        )

    def loses(self, knobs: Knobs) -> bool:
        """Return whether the knobs set a lossy compressor, so that gradients lose precision."""
        return bool(knobs.lossy)

    def every(self) -> tuple[Knobs, ...]:
        """Return all settings of the space's grid (`KnobLattice`), or none if there are more than `MOST_POINTS`."""
        points = KnobLattice(self).points
        return points if len(points) <= MOST_POINTS else ()

    def around(self, knobs: Knobs, tried: Collection[Knobs]) -> Iterator[Knobs]:
        """Yield permitted settings that differ from `knobs` by one step of one knob.

        Settings that nearly equal a setting in `tried` (`NEAR_OCTAVES`) are skipped. If `knobs` has units (buckets) of
        different sizes (`cuts`), the yielded settings have equal units instead.
        """
        uniform = [one for one in tried if one.cuts is None]
        neighbours = (one for one in self._neighbours(knobs) if one in self)
        return (one for one in neighbours if not any(_is_close(one, other) for other in uniform))

    def contrasts(self, knobs: Knobs) -> list[Knobs]:
        """Return a few permitted settings that differ clearly from `knobs` in streams, unit size or GPU threads."""
        sizes = [self.whole_unit_bytes(knobs.unit_bytes * factor) for factor in (0.5, 2.0)]
        changes = [
            knobs.but(streams=2 * knobs.streams),
            knobs.but(streams=4 * knobs.streams, unit_bytes=sizes[0]),
            *(knobs.but(unit_bytes=size) for size in sizes),
            knobs.but(threads=self.threads[len(self.threads) // 2]),
        ]
        return [one for one in changes if one in self and one != knobs]

    def _neighbours(self, knobs: Knobs) -> Iterator[Knobs]:
        if knobs.cuts is not None:
            knobs = knobs.but(cuts=None)
            yield knobs
        yield from (knobs.but(streams=n) for n in self.streams_around(knobs.streams) if n != knobs.streams)
        low, high = self.unit_bytes
        sizes = (self.whole_unit_bytes(knobs.unit_bytes * 2**step) for step in (-STEP_OCTAVES, STEP_OCTAVES))
        yield from (knobs.but(unit_bytes=size) for size in sizes if low <= size <= high)
        yield from (knobs.but(transport=t, algorithm=a) for t, a in self.routes if (t, a) != knobs.route)
        yield from (knobs.but(threads=n) for n in self.threads_around(knobs.threads) if n != knobs.threads)

    def allows_nccl(self, ways: NcclWays) -> bool:
        """Return whether the NCCL algorithms and protocols in `ways` are permitted, for all size classes."""
        return all(NcclWays(**{kind: way}) in self.nccl for kind, way in ways.by_class.items())

    def nearest(self, knobs: Knobs) -> Knobs:
        """Return the permitted setting nearest to `knobs`, with the same transport and algorithm.

        Unit (bucket) size, number of streams and number of GPU threads are replaced by the permitted values that are
        nearest in ratio.
        """
        low, high = self.unit_bytes
        counts, wanted = [count for count in self.threads if count is not None], knobs.threads
        if wanted is None or not counts:
            threads = wanted if wanted in self.threads else self.threads[0]
        else:
            threads = min(counts, key=lambda count: abs(math.log(count / wanted)))
        return knobs.but(
            unit_bytes=max(low, min(high, knobs.unit_bytes)),
            streams=min(self.streams_on(knobs.route), key=lambda count: abs(math.log(count / knobs.streams))),
            threads=threads,
        )

    def streams_around(self, streams: int) -> tuple[int, ...]:
        """Return `streams`, and the next smaller and larger permitted numbers; `()` if `streams` is not permitted."""
        return _around(self.streams, streams)

    def threads_around(self, threads: int | None) -> tuple[int | None, ...]:
        """Return `threads`, and the next smaller and larger permitted numbers; `()` if `threads` is not permitted."""
        return _around(self.threads, threads)

    def whole_unit_bytes(self, size: float) -> int:
        """Round a unit (bucket) size to whole KiB, or to whole bytes if the smallest unit has less than 16 KiB."""
        grain = KIB if self.unit_bytes[0] >= 16 * KIB else 1
        return round(size / grain) * grain

    def nearest_unit_bytes(self, size: float) -> int:
        """Return the permitted unit (bucket) size nearest to `size`, rounded by `whole_unit_bytes`."""
        return min(max(self.whole_unit_bytes(size), self.unit_bytes[0]), self.unit_bytes[1])

    @property
    def unit_bytes_log2(self) -> tuple[float, float]:
        """Return log2 of the smallest and the largest permitted unit (bucket) size.

        Search methods (arms) choose unit sizes on this scale.
        """
        return math.log2(self.unit_bytes[0]), math.log2(self.unit_bytes[1])


def _is_close(first: Knobs, second: Knobs) -> bool:
    same = first.but(unit_bytes=second.unit_bytes) == second
    return same and abs(math.log2(first.unit_bytes / second.unit_bytes)) < NEAR_OCTAVES


def _around(choices: tuple[_T, ...], one: _T) -> tuple[_T, ...]:
    if one not in choices:
        return ()
    place = choices.index(one)
    return choices[max(0, place - 1) : place + 2]


FloatArray = npt.NDArray[np.float64]


class KnobLattice:
    """Grid of permitted settings whose units (buckets) have equal sizes, for search methods (arms).

    It has `steps_per_octave` unit sizes for each power of two.

    Attributes:
        points: the grid's settings, `(n_points,)`.
        coordinates: coordinates of `points`, from 0 to 1, `(n_points, n_dimensions)`. Columns: unit size (log scale),
            streams and GPU threads (by index of the permitted value). A knob with a single value has no column. If
            there are several routes (transport and algorithm), each has one column (one-hot).
        shape: number of values on each axis: unit sizes, streams, threads, routes.
    """

    def __init__(self, space: KnobSpace, *, steps_per_octave: int = 2) -> None:
        self.space = space
        self.unit_bytes = _log_spaced(space, steps_per_octave)
        self.shape = (len(self.unit_bytes), len(space.streams), len(space.threads), len(space.routes))
        indices = tuple(product(*(range(length) for length in self.shape)))
        places = {self.at(index): self._place(index) for index in indices if self._is_offered(index)}
        self.points: tuple[Knobs, ...] = tuple(places)
        self.coordinates: FloatArray = np.array(list(places.values()))

    def __len__(self) -> int:
        return len(self.points)

    def at(self, index: tuple[int, ...]) -> Knobs:
        """Return the grid's setting at four indices: of unit (bucket) size, streams, GPU threads, and route.

        A route is a pair of transport and algorithm. The number of streams is limited to the maximum of the route.
        """
        unit, streams, threads, route = index
        return self.space.at(self.unit_bytes[unit], streams, threads, route)

    def index_of(self, knobs: Knobs) -> tuple[int, ...] | None:
        """Return the index of the setting in the grid that is nearest to `knobs`.

        None for settings that are not permitted, and for settings with `cuts`, compressors or NCCL algorithms, which
        the grid does not contain.
        """
        if knobs.cuts is not None or knobs.lossy or knobs.nccl or knobs not in self.space:
            return None
        distances = [abs(np.log(value / knobs.unit_bytes)) for value in self.unit_bytes]
        return (
            int(np.argmin(distances)),
            self.space.streams.index(knobs.streams),
            self.space.threads.index(knobs.threads),
            self.space.routes.index(knobs.route),
        )

    def place(self, knobs: Knobs) -> FloatArray | None:
        """Return the coordinates of a setting in the grid's unit cube, with its exact unit (bucket) size.

        None if the grid has no setting near it (`index_of`).
        """
        index = self.index_of(knobs)
        if index is None:
            return None
        place = self._place(index)
        if self.shape[0] > 1:
            low, high = self.space.unit_bytes_log2
            place[0] = (np.log2(knobs.unit_bytes) - low) / (high - low)
        return np.array(place)

    def snap(self, cube: FloatArray) -> Knobs:
        """Return the grid's setting at four coordinates from 0 to 1: unit (bucket) size, streams, GPU threads, route.

        A route is a pair of transport and algorithm.
        """
        index = (min(int(u * length), length - 1) for u, length in zip(cube, self.shape, strict=True))
        return self.at(tuple(index))

    def _is_offered(self, index: tuple[int, ...]) -> bool:
        return index[1] < len(self.space.streams_on(self.space.routes[index[3]]))

    def _place(self, index: tuple[int, ...]) -> list[float]:
        scaled = [i / (length - 1) for i, length in zip(index[:3], self.shape[:3], strict=True) if length > 1]
        routes = self.shape[3]
        return scaled + ([float(index[3] == route) for route in range(routes)] if routes > 1 else [])


def _log_spaced(space: KnobSpace, steps_per_octave: int) -> tuple[int, ...]:
    """Return unit (bucket) sizes from the smallest to the largest, both included, in equal steps on a log scale."""
    low, high = space.unit_bytes
    n_steps = max(1, round(np.log2(high / low) * steps_per_octave))
    values = np.geomspace(low, high, n_steps + 1)
    return tuple(sorted({low, high, *map(space.nearest_unit_bytes, values)}))
