"""The passes: what may be changed on the critical path. References are to the dPRO paper.

Others can be added by an entry point in the group `sirtaki.optimizer_passes`, a callable that returns a `Pass`. Those
that change what training comes to are used only where they are allowed by name.

Theorem 1 (operator fusion) has no pass, since it is no change of the plan: see `sirtaki.optimizer.outcome`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Route
from sirtaki.errors import ConfigError
from sirtaki.replay.job_model import JobModel
from sirtaki.replay.what_if import with_less_traffic

from .change import Candidate, Change, Extra, Pass, Position
from .other_passes import others

ENTRY_POINT_GROUP = "sirtaki.optimizer_passes"


class TensorFusion:
    """Theorem 2: a tensor joins the one before it where that ends later than it takes to wait for both."""

    name = "tensor-fusion"
    changes_numbers = False

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        """See `Pass`."""
        if tensor == 0:
            return
        before, own = position.n_bytes(tensor - 1), position.n_bytes(tensor)
        parts, both_s = position.best_parts(before + own)
        _, own_s = position.best_parts(own)
        if position.end_s(tensor - 1) <= position.ready_s(tensor) + both_s - own_s:
            return
        layout, stops = position.layout, (position.tensors[tensor - 1].stop, position.tensors[tensor].stop)
        yield Change(
            words="fuse tensors", apply=partial(_fused, layout=layout, stops=stops, parts=parts), alike=(before, own)
        )


def _fused(candidate: Candidate, *, layout: GradientLayout, stops: tuple[int, int], parts: int) -> Candidate | None:
    fused = candidate.schedule.fused(layout, stops[0])
    if fused is None:
        return None
    return candidate.with_schedule(fused.parted(layout, stops[1], parts) or fused)


class TensorPartition:
    """A tensor travels as its best number of units (k*), found by grid, or as a whole."""

    name = "tensor-partition"
    changes_numbers = False

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        """See `Pass`."""
        n_bytes, now = position.n_bytes(tensor), position.tensors[tensor]
        best, _ = position.best_parts(n_bytes)
        for parts in dict.fromkeys((best, 1)):
            if parts != now.parts:
                change = partial(_parted, layout=position.layout, stop=now.stop, parts=parts)
                yield Change(words="partition tensors", apply=change, alike=(n_bytes, parts))


def _parted(candidate: Candidate, *, layout: GradientLayout, stop: int, parts: int) -> Candidate | None:
    return candidate.with_schedule(candidate.schedule.parted(layout, stop, parts))


class TensorSplit:
    """A tensor of several gradients is cut where one ends, nearest to its middle: what fusion does, undone."""

    name = "tensor-split"
    changes_numbers = False

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        """See `Pass`."""
        stop = position.tensors[tensor].stop
        start = position.tensors[tensor - 1].stop if tensor else 0
        offsets = position.layout.offsets
        inside = offsets[bisect_right(offsets, start) : bisect_left(offsets, stop)]
        if inside:
            middle = min(inside, key=lambda offset: abs(2 * offset - start - stop))
            change = partial(_split, layout=position.layout, stop=stop, at=middle)
            yield Change(words="split tensors", apply=change, alike=position.n_bytes(tensor))


def _split(candidate: Candidate, *, layout: GradientLayout, stop: int, at: int) -> Candidate | None:
    return candidate.with_schedule(candidate.schedule.split(layout, stop, at))


class Streams:
    """As many streams more, or fewer."""

    name = "streams"
    changes_numbers = False

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        """See `Pass`."""
        for streams in position.choices.streams:
            yield Change(words="use another number of streams", apply=partial(_on_streams, streams=streams))


def _on_streams(candidate: Candidate, *, streams: int) -> Candidate:
    return replace(candidate, schedule=replace(candidate.schedule, streams=streams))


class Routes:
    """Another transport or algorithm that something is known of."""

    name = "route"
    changes_numbers = False

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        """See `Pass`."""
        for route in position.choices.routes:
            yield Change(words="take another route", apply=partial(_by_route, route=route))


def _by_route(candidate: Candidate, *, route: Route) -> Candidate:
    return replace(candidate, schedule=replace(candidate.schedule, route=route))


def _in_half(job: JobModel) -> JobModel:
    return with_less_traffic(job, 0.5)


BF16 = Extra(
    words="gradients travel as bf16, in half the bytes",
    line="hvd.DistributedOptimizer(..., compression=hvd.Compression.bf16)",
    apply=_in_half,
)


class Bf16OnTheWire:
    """Float32 gradients travel in half the bytes; what converting them costs is not known and not counted."""

    name = "bf16"
    changes_numbers = True

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        """See `Pass`."""
        if position.layout.dtype == "float32":
            yield Change(words="send bf16", apply=_as_bf16)


def _as_bf16(candidate: Candidate) -> Candidate | None:
    return None if BF16 in candidate.extras else replace(candidate, extras=(*candidate.extras, BF16))


OUR_PASSES = (TensorFusion, TensorPartition, TensorSplit, Streams, Routes, Bf16OnTheWire)


def passes(allowed: Iterable[str] = ()) -> tuple[Pass, ...]:
    """Those that change no numbers, and those that are allowed; others' behind ours.

    Raises:
        ConfigError: one is allowed that does not exist, or one that another package brings is none.
    """
    ours: list[Pass] = [make() for make in OUR_PASSES]
    found = [*ours, *cast(list[Pass], others(ENTRY_POINT_GROUP, ("name", "changes_numbers", "changes")))]
    wanted = set(allowed)
    if unknown := sorted(wanted - {one.name for one in found}):
        raise ConfigError(f"there is no pass {unknown[0]!r}; there are {', '.join(one.name for one in found)}")
    return tuple(one for one in found if not one.changes_numbers or one.name in wanted)
