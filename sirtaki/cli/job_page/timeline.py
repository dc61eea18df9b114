"""The timeline of single iterations as the page's script reads it: short lists of whole numbers, of bounded length.

A tick is a tenth of a microsecond. A box is `[gap, length, kind, name]`: ticks since the box before it on its lane has
ended, ticks that it lasts, and places in the lists of kinds and of names; a unit is that, its bytes, and for how many
ticks it had been issued when it began.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sirtaki.replay.histories import Histories, Step

from .drawn_path import Leg
from .kinds import COLORS, Kind
from .lanes import Lane, Span, coarsened, lanes_of

TICKS_PER_S = 10_000_000
MOST_BOXES = 200_000
"""Of all iterations together: 2 to 3 MB."""

FINEST_S, COARSEST_S = 1e-6, 1.0
"""What is shorter may be put together: tried one after the other, each twice the one before."""

KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What the page shows.

    Attributes:
        data: for the script.
        notes: what of the recording is not in it, a sentence each.
    """

    data: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Names:
    """Each name once."""

    places: dict[str, int] = field(default_factory=dict)

    def place(self, name: str) -> int:
        return self.places.setdefault(name, len(self.places))


def timeline(
    histories: Histories,
    ranks: Sequence[int],
    paths: Mapping[int, Sequence[Leg]],
    *,
    kind_names: Mapping[Kind, str],
    most_boxes: int = MOST_BOXES,
) -> Timeline:
    """Of the median iteration first, and of as many others as there is room for.

    Args:
        histories: what was recorded.
        ranks: that are drawn.
        paths: the critical path of each iteration, by its number; what is on other ranks is left out.
        kind_names: what kinds of time are called.
        most_boxes: of all iterations together.
    """
    steps = _median_first(histories.steps)
    drawn = {step.number: lanes_of(histories, step, ranks) for step in steps}
    notes = []
    if sum(map(_boxes, drawn.values())) > most_boxes and len(steps) > 3:
        notes.append(f"Of {len(steps)} iterations the median, the shortest and the longest one are drawn.")
        steps = [steps[0], *sorted(steps[1:], key=_length_s)[:: len(steps) - 2]]
    left = most_boxes
    for place, step in enumerate(steps):
        # The median one may have half of all, the others share what is left.
        most = max(left // 2, left // len(steps)) if place == 0 else left // (len(steps) - place)
        drawn[step.number], least_s = _bounded(drawn[step.number], most)
        left -= _boxes(drawn[step.number])
        if least_s:
            notes.append(
                f"In iteration {step.number} neighbouring operators that are shorter than {1e6 * least_s:.0f} µs are "
                "drawn as one box."
            )
    names = _Names()
    return Timeline(
        data={
            "ticks_per_ms": TICKS_PER_S // 1000,
            "kinds": [[kind_names[kind], COLORS[kind]] for kind in KINDS],
            "hosts": {place.rank: place.host_name for place in histories.recording.job.placement},
            "iterations": [_iteration(step, drawn[step.number], paths.get(step.number, ()), names) for step in steps],
            "names": list(names.places),
        },
        notes=tuple(notes),
    )


def _length_s(step: Step) -> float:
    return statistics.fmean(mine[-1].end_s - mine[0].begin_s for mine in step.stretches.values())


def _median_first(steps: Sequence[Step]) -> list[Step]:
    middle = sorted(steps, key=_length_s)[(len(steps) - 1) // 2]
    return [middle, *(step for step in steps if step is not middle)]


def _boxes(lanes: Sequence[Lane]) -> int:
    return sum(len(lane.spans) + len(lane.under) for lane in lanes)


def _bounded(lanes: list[Lane], most_boxes: int) -> tuple[list[Lane], float]:
    """Lanes with few enough boxes, and how short those are that were put together; 0 = none."""
    found, least_s = lanes, 0.0
    while _boxes(found) > most_boxes and least_s < COARSEST_S:
        least_s = 2 * least_s or FINEST_S
        found = coarsened(lanes, least_s)
    return found, least_s


def _iteration(step: Step, lanes: Sequence[Lane], path: Sequence[Leg], names: _Names) -> dict[str, Any]:
    begin_s = min(mine[0].begin_s for mine in step.stretches.values())
    end_s = max(mine[-1].end_s for mine in step.stretches.values())
    places = {(lane.rank, lane.name): place for place, lane in enumerate(lanes)}
    return {
        "number": step.number,
        "ms": round(1e3 * _length_s(step), 3),
        "ticks": _ticks(end_s - begin_s),
        "lanes": [
            {
                "rank": lane.rank,
                "name": lane.name,
                "under": _flat(lane.under, begin_s, names),
                ("units" if _are_units(lane) else "boxes"): _flat(lane.spans, begin_s, names),
            }
            for lane in lanes
        ],
        "path": [
            [_ticks(leg.begin_s - begin_s), _ticks(leg.end_s - begin_s), places[leg.rank, leg.lane]]
            for leg in path
            if (leg.rank, leg.lane) in places
        ],
    }


def _are_units(lane: Lane) -> bool:
    return any(span.issued_s is not None for span in lane.spans)


def _flat(spans: Sequence[Span], origin_s: float, names: _Names) -> list[int]:
    """Boxes one behind the other, as the module says."""
    found: list[int] = []
    now = 0
    for span in spans:
        begin, end = _ticks(span.begin_s - origin_s), _ticks(span.end_s - origin_s)
        found += (begin - now, end - begin, KINDS.index(span.kind), names.place(span.name))
        if span.issued_s is not None:
            found += (span.n_bytes, max(0, begin - _ticks(span.issued_s - origin_s)))
        now = end
    return found


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)
