"""What may be tuned in a job, what runs untuned, and whether given knobs can be run in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import CommPlan, TransportKind
from sirtaki.comm.router import Router
from sirtaki.errors import ConfigError, PlanError
from sirtaki.settings import Settings
from sirtaki.unit_sizes import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES

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
        threads=(settings.threads,) if settings.threads and router.threads() else (None, *allowances),
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
        "threads": settings.threads,
        "transport": settings.transport.value if settings.transport else None,
        "algorithm": settings.algorithm.value if settings.algorithm else None,
    }
    return {name: str(value) for name, value in fixed.items() if value is not None}
