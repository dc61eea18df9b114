"""The settings next to one: what no surrogate is asked about, since it may be sure of what it has not seen.

The last word of a search, whatever the arms are: a surrogate that takes the landscape for smoother than it is never
tries the next number of streams, and nobody else does either.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..knobs import Knobs, KnobSpace

STEP_OCTAVES = 0.5
NEAR_OCTAVES = 0.3
"""Unit sizes that differ by less are neighbours that have been tried."""


def neighbours(knobs: Knobs, space: KnobSpace) -> Iterator[Knobs]:
    """Settings that differ in one knob by one step: streams, unit size, route, threads; a plan counts as uniform."""
    if knobs.cuts is not None:
        knobs = replace(knobs, cuts=None)
        yield knobs
    for streams in space.streams_around(knobs.streams):
        if streams != knobs.streams:
            yield replace(knobs, streams=streams)
    low, high = space.unit_bytes
    for step in (-STEP_OCTAVES, STEP_OCTAVES):
        size = space.whole_unit_bytes(knobs.unit_bytes * 2**step)
        if low <= size <= high:
            yield replace(knobs, unit_bytes=size)
    for transport, algorithm in space.routes:
        if (transport, algorithm) != knobs.route:
            yield replace(knobs, transport=transport, algorithm=algorithm)
    for threads in space.threads_around(knobs.threads):
        if threads != knobs.threads:
            yield replace(knobs, threads=threads)


def untried(knobs: Knobs, space: KnobSpace, tried: Iterable[Knobs]) -> Iterator[Knobs]:
    """The neighbours that no tried setting is near to."""
    known = [one for one in tried if one.cuts is None]
    near = (one for one in neighbours(knobs, space) if one in space)
    return (one for one in near if not any(_near(one, other) for other in known))


def _near(first: Knobs, second: Knobs) -> bool:
    same = replace(first, unit_bytes=second.unit_bytes) == second
    return same and abs(math.log2(first.unit_bytes / second.unit_bytes)) < NEAR_OCTAVES
