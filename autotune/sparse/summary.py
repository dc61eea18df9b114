"""How one parameter's sparse gradient travels, and why: for people, and for the trial log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sirtaki.comm.sparse.plan import SparsePlan

from .choice import SparseChoice
from .coverage import TouchCounts, coverage, curve_points, knee
from .traffic import Shape, dense_bytes, horovod_bytes, traffic

MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way that rows could take.

    Attributes:
        plan: in words.
        predicted_s: how long a reduction takes by the model of volumes; None where nothing was predicted.
        measured_s: the median of its trials; None where it was not tried.
        n_bytes: that the busiest rank receives in an iteration, computed from the rows that were touched.
    """

    plan: str
    predicted_s: float | None
    measured_s: float | None
    n_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSummary:
    """Of one parameter; numbers of rows and bytes are means over the iterations in which they were counted.

    Attributes:
        name: of the parameter.
        n_rows: that it has.
        width: elements of a row.
        ranks: that add up rows.
        looked_up: rows in the gradient of one rank as its backward pass leaves it, the same one several times.
        touched: rows of all ranks in an iteration, one that several ranks have counted for each.
        union: rows that any rank has.
        plan: the way that is taken, in words.
        ways: that were compared, the taken one among them; one where there was nothing to compare.
        curve: which part of all touches the most touched rows have, `(rows, part)`; empty where that was not counted.
        popular_rows: hot rows of the plan; without those, the rows before the curve's knee.
        dense_bytes: that a rank receives in an iteration where the whole gradient is all-reduced.
        horovod_bytes: the same by Horovod's rule, two all-gathers of what was looked up.
    """

    name: str
    n_rows: int
    width: int
    ranks: int
    looked_up: float
    touched: float
    union: float
    plan: str
    ways: tuple[Way, ...]
    curve: tuple[tuple[int, float], ...] = ()
    popular_rows: int = 0
    dense_bytes: float
    horovod_bytes: float

    @property
    def density(self) -> float:
        """Which part of the rows any rank touches in an iteration."""
        return self.union / self.n_rows

    @property
    def popular_share(self) -> float:
        """Which part of all touches the popular rows have."""
        return dict(self.curve).get(self.popular_rows, 0.0)

    @property
    def n_bytes(self) -> float:
        """That the busiest rank receives in an iteration."""
        return next(way.n_bytes for way in self.ways if way.plan == self.plan)

    def describe(self) -> str:
        """In words."""
        popular = f", {self.popular_rows} of them are {self.popular_share:.0%} of touches" if self.curve else ""
        return (
            f"{self.name} ({self.n_rows} × {self.width}): {self.density:.2%} of rows in an iteration{popular}; by "
            f"{self.plan}, {self.n_bytes / MB:.3g} MB to a rank; dense {self.dense_bytes / MB:.3g} MB, "
            f"Horovod's rule {self.horovod_bytes / MB:.3g} MB"
        )

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SparseSummary:
        """What `to_json` has given; other keys are passed over.

        Raises:
            KeyError: something is missing.
            TypeError: something is of another type.
            ValueError: a number is none, or negative, or nothing is said of the way that is taken.
        """
        found = cls(
            name=str(data["name"]),
            n_rows=int(_number(data["n_rows"], least=1)),
            width=int(_number(data["width"])),
            ranks=int(_number(data["ranks"], least=1)),
            looked_up=_number(data["looked_up"]),
            touched=_number(data["touched"]),
            union=_number(data["union"]),
            plan=str(data["plan"]),
            ways=tuple(
                Way(
                    plan=str(way["plan"]),
                    predicted_s=_number_or_none(way["predicted_s"]),
                    measured_s=_number_or_none(way["measured_s"]),
                    n_bytes=_number(way["n_bytes"]),
                )
                for way in data["ways"]
            ),
            curve=tuple((int(_number(rows, least=1)), _number(part)) for rows, part in data["curve"]),
            popular_rows=int(_number(data["popular_rows"])),
            dense_bytes=_number(data["dense_bytes"]),
            horovod_bytes=_number(data["horovod_bytes"]),
        )
        if found.plan not in {way.plan for way in found.ways}:
            raise ValueError(f"{found.plan} is none of the ways")
        return found


def summarise(
    choice: SparseChoice, shape: Shape, *, name: str, width: int, ranks: int, looked_up: float, counts: TouchCounts
) -> SparseSummary:
    """Of a choice that is made.

    Args:
        choice: of the parameter.
        shape: of it.
        name: of it.
        width: elements of a row.
        ranks: how many there are.
        looked_up: see `SparseSummary`.
        counts: how much was touched; what the choice has learned counts instead where there is such a thing.
    """
    counts = choice.learned or counts
    popular = len(choice.plan.hot_rows) or knee(coverage(counts.descending()))
    plans = choice.candidates or [choice.plan]

    def way(plan: SparsePlan, number: int) -> Way:
        return Way(
            plan=plan.describe(),
            predicted_s=_at(choice.predicted_s, number),
            measured_s=_at(choice.measured_s, number),
            n_bytes=traffic(plan, shape, ranks, counts).received_bytes(ranks),
        )

    return SparseSummary(
        name=name,
        n_rows=shape.n_rows,
        width=width,
        ranks=ranks,
        looked_up=looked_up,
        touched=counts.touched,
        union=counts.union,
        plan=choice.plan.describe(),
        ways=tuple(way(plan, number) for number, plan in enumerate(plans)),
        curve=curve_points(counts, also=popular),
        popular_rows=popular,
        dense_bytes=dense_bytes(shape, ranks),
        horovod_bytes=horovod_bytes(shape, ranks, looked_up),
    )


def _at(values: Sequence[float], number: int) -> float | None:
    return values[number] if number < len(values) else None


def _number(value: Any, *, least: float = 0.0) -> float:  # Any: whatever JSON had there
    number = float(value)
    if not least <= number < float("inf"):
        raise ValueError(f"{number} where a number from {least:g} on was expected")
    return number


def _number_or_none(value: Any) -> float | None:  # Any: as above
    return None if value is None else _number(value)
