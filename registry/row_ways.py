"""Which way rows of a sparse gradient went fastest, and how skewed they were: where a later job starts.

A way is found again by what is known before (`RowsKey`), and used where rows are touched alike (`Skew`). Rows
themselves are not remembered: which ones are hot depends on the data.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sirtaki.errors import RegistryError

from .checked import (
    checked_choice,
    checked_fields,
    checked_flag,
    checked_list,
    checked_number,
    checked_pairs,
    checked_text,
    checked_whole,
)
from .digest import canonical_json, digest
from .entry import MAX_AHEAD_S, STALE_AFTER_S
from .topology import MAX_RANKS

LIKE = 1.25
"""Rows are touched alike where numbers of them differ by this factor at most."""

LIKE_COVERAGE = 0.1
"""And parts of all touches by this at most: so much may hot rows lose until they are ranked anew."""

HOT_COLD, BLOCKS = "hot_cold", "blocks"
PATHS = ("gather", "owner", HOT_COLD, BLOCKS, "dense")
COLD_PATHS = ("gather", "owner")

MAX_POINTS = 1000
MAX_ROWS = 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How rows of one parameter are touched.

    Attributes:
        touched: in an iteration by all ranks together, one that several ranks touch counted for each; mean.
        union: by any rank, mean.
        curve: which part of all touches the most touched rows have: `(rows, part)`, both ascending, from one row on.

    Raises:
        RegistryError: there is no curve, or it does not ascend.
    """

    touched: float
    union: float
    curve: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not (self.touched > 0 and self.union > 0 and self.curve):
            raise RegistryError("skew: nothing was touched")
        if any(rows >= more or part > larger for (rows, part), (more, larger) in pairwise(self.curve)):
            raise RegistryError("skew.curve: must ascend")

    def covered(self, rows: int) -> float:
        """Which part of all touches that many rows have; between points by the logarithm of the rows."""
        if rows >= self.curve[-1][0]:
            return 1.0
        below, part = self.curve[0]
        for above, larger in self.curve:
            if rows < above:
                between = math.log(rows / below) / math.log(above / below) if rows > below else 0.0
                return part + between * (larger - part)
            below, part = above, larger
        return 1.0

    def distance(self, other: "Skew") -> float:
        """0 = the same, up to 1 = alike."""
        counts = (
            abs(math.log(here / there)) / math.log(LIKE)
            for here, there in ((self.touched, other.touched), (self.union, other.union))
        )
        sizes = {rows for rows, _ in (*self.curve, *other.curve)}
        coverage = max(abs(self.covered(rows) - other.covered(rows)) for rows in sizes)
        return max(*counts, coverage / LIKE_COVERAGE)

    def bucket(self) -> list[int]:
        """Equal or next to each other for skews that are alike."""
        middle = max(1, round(math.sqrt(self.curve[-1][0])))
        counts = (round(math.log(count) / math.log(LIKE)) for count in (self.touched, self.union))
        return [*counts, round(self.covered(middle) / LIKE_COVERAGE)]


_KEY_FIELDS = ("topology", "ranks", "n_rows", "row_bytes", "dtype", "aggregator")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsKey:
    """What must be equal for a way to be looked at.

    Attributes:
        topology: fingerprint of the topology.
        ranks: that add up rows.
        n_rows: of the parameter.
        row_bytes: of one.
        dtype: name of the element type.
        aggregator: one is there that may sum hot rows.
        versions: library versions that matter, as pairs sorted by name.
        fixed: knobs that the user has fixed and their values, as pairs sorted by name.
    """

    topology: str
    ranks: int
    n_rows: int
    row_bytes: int
    dtype: str
    aggregator: bool = False
    versions: tuple[tuple[str, str], ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()

    def digest(self) -> str:
        """A digest that is equal exactly for equal keys."""
        return digest("rows", canonical_json(self.to_json()))[:32]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            **{name: getattr(self, name) for name in _KEY_FIELDS},
            "versions": dict(self.versions),
            "fixed": dict(self.fixed),
        }


_WAY_FIELDS = ("name", "path", "cold", "aggregated", "block_rows", "n_hot", "span_s", "created_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWay:
    """The way of one parameter's rows that was the fastest of those that a job tried; a plan without its hot rows.

    Attributes:
        key: where it is found again.
        name: of the parameter.
        skew: how its rows were touched.
        path: the way, one of `PATHS`.
        cold: that of rows that are not hot, one of `COLD_PATHS`.
        aggregated: an aggregator summed the hot rows.
        block_rows: consecutive rows in a block.
        n_hot: how many rows were hot.
        span_s: how long a reduction took, the median of trials.
        created_s: seconds since the epoch.
    """

    key: RowsKey
    name: str
    skew: Skew
    path: str
    cold: str
    block_rows: int
    n_hot: int
    span_s: float
    aggregated: bool = False
    created_s: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        """One way is kept for each: parameter, and kind of skew."""
        return digest("row way", self.key.digest(), self.name, canonical_json(self.skew.bucket()))[:32]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `way_from_json` is its inverse."""
        return {
            "key": self.key.to_json(),
            "skew": {
                "touched": self.skew.touched,
                "union": self.skew.union,
                "curve": [list(point) for point in self.skew.curve],
            },
            **{name: getattr(self, name) for name in _WAY_FIELDS},
        }


def way_from_json(data: object) -> RowWay:
    """The way that `RowWay.to_json` described.

    Raises:
        RegistryError: a field is missing, unknown or has an invalid value, or no job can have found this;
            the message names it.
    """
    fields = checked_fields("way", data, ("key", "skew", *_WAY_FIELDS))
    key = _key(fields["key"])
    hot = fields["path"] == HOT_COLD
    aggregated = checked_flag("aggregated", fields["aggregated"])
    if aggregated and not (hot and key.aggregator):
        raise RegistryError(f"aggregated: only of {HOT_COLD} where the key has an aggregator")
    created_s = checked_number("created_s", fields["created_s"])
    if created_s > time.time() + MAX_AHEAD_S:
        raise RegistryError(f"created_s: {created_s:.0f} is in the future")
    return RowWay(
        key=key,
        name=checked_text("name", fields["name"]),
        skew=_skew(fields["skew"], most=key.n_rows),
        path=checked_choice("path", fields["path"], PATHS),
        cold=checked_choice("cold", fields["cold"], COLD_PATHS),
        aggregated=aggregated,
        block_rows=checked_whole("block_rows", fields["block_rows"], low=1, high=MAX_ROWS),
        n_hot=checked_whole("n_hot", fields["n_hot"], low=int(hot), high=key.n_rows if hot else 0),
        span_s=checked_number("span_s", fields["span_s"]),
        created_s=created_s,
    )


def nearest_way(found: Iterable[RowWay], skew: Skew, *, name: str) -> RowWay | None:
    """Of parameters whose rows are touched like that, and not too old: of this name first, else the nearest."""
    since_s = time.time() - STALE_AFTER_S
    alike = [
        (way.name != name, distance, way)
        for way in found
        if way.created_s >= since_s and (distance := way.skew.distance(skew)) <= 1.0
    ]
    return min(alike, key=lambda ranked: ranked[:2])[2] if alike else None


def _key(data: object) -> RowsKey:
    fields = checked_fields("key", data, (*_KEY_FIELDS, "versions", "fixed"))
    return RowsKey(
        topology=checked_text("key.topology", fields["topology"]),
        ranks=checked_whole("key.ranks", fields["ranks"], low=1, high=MAX_RANKS),
        n_rows=checked_whole("key.n_rows", fields["n_rows"], low=1, high=MAX_ROWS),
        row_bytes=checked_whole("key.row_bytes", fields["row_bytes"], high=MAX_ROWS),
        dtype=checked_text("key.dtype", fields["dtype"]),
        aggregator=checked_flag("key.aggregator", fields["aggregator"]),
        versions=checked_pairs("key.versions", fields["versions"]),
        fixed=checked_pairs("key.fixed", fields["fixed"]),
    )


def _skew(data: object, *, most: int) -> Skew:
    """`most`: rows that there are."""
    fields = checked_fields("skew", data, ("touched", "union", "curve"))
    points = [checked_list("skew.curve", point, 2) for point in checked_list("skew.curve", fields["curve"], MAX_POINTS)]
    if any(len(point) != 2 for point in points):
        raise RegistryError("skew.curve: a point has rows and a part")
    return Skew(
        touched=checked_number("skew.touched", fields["touched"], low=1.0),
        union=checked_number("skew.union", fields["union"], low=1.0, high=most),
        curve=tuple(
            (
                checked_whole("skew.curve", rows, low=1, high=most),
                checked_number("skew.curve", part, high=1.0),
            )
            for rows, part in points
        ),
    )
