"""A plan that a user gives (`SIRTAKI_PLAN`), such as `sirtaki optimize` writes: knobs, and what they are for.

The file is a communication plan as JSON, with what else has to be known of it beside its units.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.comm.layout import GradientLayout
from sirtaki.errors import ConfigError, PlanError

from .knob_choices import checked_plans

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

PLAN_FILE = "plan.json"
FORMAT, FORMAT_VERSION = "sirtaki-plan", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPlan:
    """What to run, and for whom.

    Attributes:
        source: where it was read.
        knobs: what to run.
        ranks: of the job that it is for.
        sizes: elements of the gradients of each flat buffer, control flags among them, in the order in which they came.
        part_bytes: of gradients, at which a compiled graph is cut (`hvd.early_gradients`); 0 = it stays whole, None =
            nothing is known of compiled graphs.
    """

    source: str
    knobs: Knobs
    ranks: int
    sizes: tuple[tuple[int, ...], ...]
    part_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """What the file holds; the first buffer's plan is spelled out.

        Raises:
            PlanError: the knobs do not fit the sizes.
        """
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "ranks": self.ranks,
            "sizes": [list(sizes) for sizes in self.sizes],
            "part_bytes": self.part_bytes,
            "knobs": self.knobs.to_json(),
            **self.knobs.to_plan(GradientLayout(sizes=self.sizes[0])).to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str) -> GivenPlan:
        """What `to_json` described.

        Raises:
            ConfigError: it is of another version, or no plan of this kind.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ConfigError(f"{source} is no plan that `sirtaki optimize` has written")
        if data.get("version") != FORMAT_VERSION:
            raise ConfigError(
                f"{source} is a plan of version {data.get('version')}, and this Sirtaki reads version "
                f"{FORMAT_VERSION}: have `sirtaki optimize` write it again"
            )
        try:
            return cls(
                source=source,
                knobs=Knobs.from_json(data["knobs"]),
                ranks=int(data["ranks"]),
                sizes=tuple(tuple(int(size) for size in sizes) for sizes in data["sizes"]),
                part_bytes=None if data.get("part_bytes") is None else int(data["part_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise ConfigError(f"{source} is no whole plan: {err!r}") from err

    @classmethod
    def read(cls, path: str | Path) -> GivenPlan:
        """A file's, or that of a folder that holds a `plan.json`.

        Raises:
            ConfigError: it cannot be read, or holds no such plan.
        """
        path = Path(path)
        try:
            path = path / PLAN_FILE if path.is_dir() else path
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as err:
            raise ConfigError(f"the plan {path} cannot be read: {err.strerror or err}") from err
        except ValueError as err:
            raise ConfigError(f"{path} is no plan: it is not JSON ({err})") from err
        return cls.from_json(data, source=str(path))

    def misfit(self, layouts: Sequence[GradientLayout], ranks: int, space: KnobSpace) -> str:
        """Why a job cannot run it, in one sentence; empty if it can."""
        if self.ranks != ranks:
            return f"the plan {self.source} is for {self.ranks} ranks, and here are {ranks}"
        mine = sorted(sorted(sizes) for sizes in self.sizes)
        if mine != sorted(sorted(layout.sizes) for layout in layouts):
            theirs = [layout.sizes for layout in layouts]
            return (
                f"the plan {self.source} is for other gradients: {_described(self.sizes)}, and here are "
                f"{_described(theirs)}"
            )
        if self.knobs not in space:
            return (
                f"the plan {self.source} is not possible here, or not with what settings fix: {self.knobs.describe()}"
            )
        try:
            checked_plans(self.knobs, layouts)
        except PlanError as err:
            return f"the plan {self.source} does not fit: {err}"
        return ""

    def accepted(
        self, layouts: Sequence[GradientLayout], control: ControlPlane, space: KnobSpace, *, must_run: bool
    ) -> Knobs | None:
        """What to run of it in a job; None = nothing. The same on all ranks, without asking them; rank 0 tells.

        Args:
            layouts: that all ranks have agreed on.
            control: the ranks.
            space: what may be chosen.
            must_run: nothing else is to run.

        Raises:
            ConfigError: on all ranks; it does not fit and must.
        """
        why_not = self.misfit(layouts, control.size, space)
        if why_not and must_run:
            raise ConfigError(f"SIRTAKI_PLAN: {why_not}")
        if control.rank == 0:
            if why_not:
                logger.warning("%s; it is left alone", why_not)
            else:
                logger.info("the plan %s will run: %s", self.source, self.knobs.describe())
        return None if why_not else self.knobs


def _described(sizes: Sequence[Sequence[int]]) -> str:
    """Control flags are elements, but no gradient."""
    return f"{sum(map(len, sizes)) - 1} of {sum(map(sum, sizes))} elements in all"


def part_bytes_of(path: str | None) -> int | None:
    """What the plan there says of compiled graphs; None also where it cannot be read, which optimizers will tell."""
    if path is None:
        return None
    try:
        return GivenPlan.read(path).part_bytes
    except ConfigError:
        return None


def given_to_all(control: ControlPlane, path: str | None, *, ranks_stay: bool = True) -> GivenPlan | None:
    """Collective: what rank 0 was told to run, on every rank; None = nothing.

    Where ranks come and go another host may be rank 0's later, on which there is no such file: that ends no job.

    Raises:
        ConfigError: on all ranks, with the same words; it cannot be read, and ranks stay.
    """
    told: GivenPlan | str | None = None
    if control.rank == 0 and path is not None:
        try:
            told = GivenPlan.read(path)
        except ConfigError as err:
            told = str(err)
    told = control.broadcast(told)
    if not isinstance(told, str):
        return told
    if ranks_stay:
        raise ConfigError(f"SIRTAKI_PLAN: {told}")
    if control.rank == 0:
        logger.warning("SIRTAKI_PLAN: %s; it is left alone", told)
    return None
