"""What a job begins with: the default's streams are opened, and what cannot be opened is left out by all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.comm.plan import CommPlan, Unit
from sirtaki.errors import TransportError

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.comm.router import Router

logger = logging.getLogger(__name__)


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
