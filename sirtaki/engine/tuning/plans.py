"""Settings that a job may use, plans given from outside, and tuning carried over to the next generation."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import CommPlan, GradientLayout, TransportKind, Unit
from sirtaki.comm.router import Router
from sirtaki.errors import ConfigError, PlanError, TransportError
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES
from sirtaki.settings import Settings

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a generation's tuning has found for one set of parameters.

    Attributes:
        knobs: what ran last, or was best until then.
        settled: the warm-up had come to its end.
        place: of each rank the first one on its host; what was measured in another place does not compare.
        trials: of a warm-up that was cut short; on the rank that decided only.
    """

    knobs: Knobs
    settled: bool
    place: tuple[int, ...]
    trials: tuple[Trial, ...] = ()


@dataclass(slots=True)
class CarriedTuning:
    """What tuning has found until now, on every rank: any of them may be the one that decides in the next generation.

    Attributes:
        going_on: another generation follows, so that what an unfinished warm-up has found belongs here.
        known: by parameters (`key_of`).
    """

    going_on: bool = False
    known: dict[str, Carried] = field(default_factory=dict)


def key_of(names: Sequence[str], params: Sequence[torch.Tensor]) -> str:
    """The same for the same parameters, in every generation and on every rank."""
    said = ";".join(f"{name}{tuple(param.shape)}{param.dtype}" for name, param in zip(names, params, strict=True))
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


DEFAULT_UNITS = 16
DEFAULT_UNIT_BYTES = (512 * KIB, 4 * MIB)
DEFAULT_UNIT_BYTES_NCCL = (4 * MIB, 32 * MIB)
"""Untuned, a model is sent in about so many units of a size between these: enough to overlap, few to start up.

Between GPUs, which are faster against the start-up, they are about as large as DDP's buckets of 25 MiB.
"""

DEFAULT_STREAMS_ONE_NODE = 1
DEFAULT_STREAMS = 4
"""Between nodes one flow may be capped; four fill most links and cost little on those that one fills."""

STREAM_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
MOST_UNITS = 4096
"""Of one plan, if it has not more gradients than that: more would start up for longer than they could gain."""


def knob_space(router: Router, settings: Settings, total_bytes: int) -> KnobSpace:
    """What may be tuned here: what the router can do, less what the user has fixed.

    Raises:
        ConfigError: the user has fixed something that this job cannot do.
    """
    routes = tuple(
        (kind, algorithm)
        for kind, algorithm in router.routes
        if settings.transport in (None, kind) and settings.algorithm in (None, algorithm)
    )
    if not routes:
        possible = ", ".join(f"{kind.value} {algorithm.value}" for kind, algorithm in router.routes)
        raise ConfigError(f"the transport and algorithm asked for are not possible here; possible: {possible}")
    # No route is offered more streams than the best guess takes: a longer list costs trials.
    limits = {route: router.max_streams([route]) for route in routes}
    limit = limits[routes[0]]
    if settings.streams is not None:
        if settings.streams > limit:
            raise ConfigError(
                f"SIRTAKI_STREAMS={settings.streams} is more than the {limit} possible here: "
                f"{router.why_not_more(routes)}"
            )
        routes = tuple(route for route in routes if limits[route] >= settings.streams)
    # Each allowance takes a communicator of its own, and where there is one stream only communicators must not overlap.
    allowances = router.threads() if limit > 1 else ()
    largest = min(LARGEST_UNIT_BYTES, max(SMALLEST_UNIT_BYTES, 1 << (total_bytes - 1).bit_length()))
    return KnobSpace(
        routes=routes,
        threads=(None, *allowances),
        unit_bytes=(settings.unit_bytes,) * 2 if settings.unit_bytes else (SMALLEST_UNIT_BYTES, largest),
        streams=(settings.streams,) if settings.streams else tuple(n for n in STREAM_COUNTS if n <= limit),
        most_streams=tuple((route, limits[route]) for route in routes if limits[route] < limit),
    )


def default_knobs(space: KnobSpace, *, total_bytes: int, one_node: bool) -> Knobs:
    """What runs untuned: the best guess that lies in the space."""
    low, high = space.unit_bytes
    transport, algorithm = space.routes[0]
    smallest, largest = DEFAULT_UNIT_BYTES_NCCL if transport is TransportKind.NCCL else DEFAULT_UNIT_BYTES
    wanted = 1 << max(0, total_bytes // DEFAULT_UNITS - 1).bit_length()
    unit_bytes = min(max(wanted, smallest), largest)
    streams = DEFAULT_STREAMS_ONE_NODE if one_node else DEFAULT_STREAMS
    return Knobs(
        unit_bytes=min(max(unit_bytes, low), high),
        streams=max((n for n in space.streams_on(space.routes[0]) if n <= streams), default=space.streams[0]),
        transport=transport,
        algorithm=algorithm,
        threads=space.threads[0],
    )


def plans_for(knobs: Knobs, layouts: Sequence[GradientLayout]) -> list[CommPlan]:
    """One plan a layout; explicit cuts belong to the first, the others are cut uniformly."""
    return [
        (knobs if number == 0 else replace(knobs, cuts=None)).to_plan(layout) for number, layout in enumerate(layouts)
    ]


def checked_plans(knobs: Knobs, layouts: Sequence[GradientLayout]) -> list[CommPlan]:
    """The plans of knobs that come from elsewhere: from the registry, or from an arm.

    Raises:
        PlanError: explicit cuts do not fit the layout, or there are absurdly many.
    """
    most = max(MOST_UNITS, STREAM_COUNTS[-1] * len(layouts[0].sizes))
    if len(knobs.cuts or ()) > most:
        raise PlanError(f"{len(knobs.cuts or ())} units are more than the {most} that are possible here")
    return plans_for(knobs, layouts)


def traffic(knobs: Knobs, layouts: Sequence[GradientLayout]) -> Hashable:
    """Equal where the same units travel in the same order on as many streams.

    Raises:
        PlanError: see `checked_plans`.
    """
    return tuple(plan.on_fewest_streams().fingerprint() for plan in checked_plans(knobs, layouts))


def fixed_knobs(settings: Settings) -> dict[str, str]:
    """The knobs that the user has fixed, and their values in words."""
    fixed = {
        "unit_bytes": settings.unit_bytes,
        "streams": settings.streams,
        "transport": settings.transport.value if settings.transport else None,
        "algorithm": settings.algorithm.value if settings.algorithm else None,
    }
    return {name: str(value) for name, value in fixed.items() if value is not None}


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


def still_possible(space: KnobSpace, router: Router) -> KnobSpace:
    """The space without the routes and numbers of streams that have turned out not to open; the same on all ranks.

    Raises:
        TransportError: nothing is left.
    """
    routes = tuple(
        route for route in space.routes if route in router.routes and router.max_streams([route]) >= space.streams[0]
    )
    if not routes:
        raise TransportError(
            "nothing that may carry gradients here can be opened: see the warnings above, `sirtaki doctor`, and what "
            "SIRTAKI_TRANSPORT, SIRTAKI_ALGORITHM and SIRTAKI_STREAMS allow"
        )
    limits = {route: router.max_streams([route]) for route in routes}
    limit = limits[routes[0]]
    return replace(
        space,
        routes=routes,
        streams=tuple(n for n in space.streams if n <= limit),
        most_streams=tuple((route, most) for route, most in limits.items() if most < limit),
    )


def open_default(
    space: KnobSpace, control: ControlPlane, router: Router, choose: Callable[[KnobSpace], Knobs]
) -> tuple[KnobSpace, Knobs]:
    """Collective: opens the streams of what runs untuned, or of the next best.

    Args:
        space: what may be tuned.
        control: the ranks.
        router: opens the streams.
        choose: the best guess in a space.

    Returns:
        What of the space is possible, and the default in it.

    Raises:
        TransportError: on all ranks, nothing can be opened.
    """
    problem = ""
    while True:
        default = choose(space)
        try:
            router.open_plan(one_element_a_stream(default))
        except TransportError as err:
            problem = problem or str(err)
            space = still_possible(space, router)
            continue
        if problem and control.rank == 0:
            logger.warning("%s; gradients are reduced with %s instead", problem, default.describe())
        return space, default


def one_element_a_stream(knobs: Knobs) -> CommPlan:
    """A plan that uses all streams of these knobs."""
    return CommPlan(
        numel=knobs.streams,
        streams=knobs.streams,
        transport=knobs.transport,
        units=tuple(
            Unit(start=number, stop=number + 1, stream=number, threads=knobs.threads, algorithm=knobs.algorithm)
            for number in range(knobs.streams)
        ),
    )
