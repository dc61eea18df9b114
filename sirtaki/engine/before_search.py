"""What is measured before a search begins, and what follows from it: what may be chosen, and the planners' model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.model.link_probe import LinkProbe
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.shared_host import SharedHost
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Route
from sirtaki.errors import PlanError, TransportError, TuningError
from sirtaki.machine import allowed_processors, cpu_quota

from .contention_probe import ThreadProbe, probe_threads, threads_matter
from .opening import still_possible
from .probes import narrowed, planning_model, probe_routes

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.comm.router import Router

logger = logging.getLogger(__name__)

PROBE_S, SPANS, MOST_PROBING_S = 0.2, 3, 5.0
"""What probing may take, besides so many times the time that synchronising takes, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found.

    Attributes:
        space: what may be chosen.
        promising: the space without what probes have shown to be hopeless, as long as probes are believed.
        links: probes of each route; none where planners do not take part.
        threads: what thread allowances do; empty where they make no difference.
        host: see `PlanningModel`.
    """

    space: KnobSpace
    promising: KnobSpace
    links: Mapping[Route, list[LinkProbe]] = field(default_factory=dict)
    threads: Sequence[ThreadProbe] = ()
    host: SharedHost | None = None

    def with_routes(self, routes: Sequence[Route], *, promising: Sequence[Route]) -> Measured:
        """The same, if these may be chosen, whether or not they were probed, and only some of them promise something.

        What was slow on an idle network costs too much to be tried again while probes are believed.
        """
        narrow = replace(self.promising, routes=tuple(route for route in routes if route in promising))
        return replace(self, space=replace(self.space, routes=tuple(routes)), promising=narrow)

    def model(
        self, layout: GradientLayout, ready_s: Sequence[float], backward_s: float, between_s: float
    ) -> PlanningModel | None:
        """The planners' model; None where there are no planners.

        Args:
            layout: gradients in the order in which they become ready.
            ready_s: when each did, `(n_gradients,)`, in the layout's order.
            backward_s: when the backward pass ended.
            between_s: from the last reduced gradient to the first ready one; not a number = unknown.
        """
        if not self.links:
            return None
        forward_s = between_s if math.isfinite(between_s) else 0.0
        return planning_model(
            layout,
            ready_s,
            backward_s,
            dict(self.links),
            forward_s=forward_s,
            threads=list(self.threads),
            host=self.host,
        )


def without_planners(space: KnobSpace) -> Measured:
    """Nothing is measured; nobody tunes threads without knowing what they do."""
    space = replace(space, threads=space.threads[:1])
    return Measured(space=space, promising=space)


def measure(control: ControlPlane, router: Router, space: KnobSpace, *, default: Knobs, span_s: float) -> Measured:
    """Collective: probes the routes of a space.

    Args:
        control: the ranks.
        router: carries the probes.
        space: what may be chosen as far as is known.
        default: what runs untuned, which stays in the space.
        span_s: what synchronising takes, by which probing may take longer.
    """
    budget_s = min(PROBE_S + SPANS * span_s, MOST_PROBING_S)
    try:
        links = probe_routes(control, router, space.routes, max_streams=space.streams[-1], budget_s=budget_s)
        space = still_possible(space, router)
        threads = probe_threads(control, router, space.routes[0]) if len(space.threads) > 1 else []
    except (PlanError, TransportError, TuningError) as err:  # on all ranks alike: plans and times are agreed
        logger.warning("tuning goes on without planners, as the network could not be probed: %s", err)
        return without_planners(space)
    if not threads or not threads_matter(threads):
        threads, space = [], replace(space, threads=space.threads[:1])
    return Measured(
        space=space,
        promising=narrowed(space, links, default=default),
        links=links,
        threads=threads,
        host=_shared_host(control) if control.one_node and not router.device.streams else None,
    )


def _shared_host(control: ControlPlane) -> SharedHost:
    """Collective: what all ranks may use together."""
    told: list[tuple[tuple[int, ...], float | None, int]] = control.all_gather(
        (allowed_processors(), cpu_quota(), torch.get_num_threads())
    )
    processors = float(len({number for allowed, _, _ in told for number in allowed}))
    quotas = [processors if quota is None else quota for _, quota, _ in told]
    return SharedHost(
        ranks=control.size, processors=min(processors, *quotas), threads=min(threads for _, _, threads in told)
    )
