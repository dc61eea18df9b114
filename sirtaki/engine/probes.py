"""Measures what all-reduces cost on each route, before the first trial: what the analytical planners plan with."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace
from sirtaki.autotune.model.link_probe import LinkProbe
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.profile import Profile
from sirtaki.autotune.model.shared_host import SharedHost
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import CommPlan, Unit
from sirtaki.errors import PlanError, TransportError, TuningError
from sirtaki.link_model import LinkModel
from sirtaki.machine import processor_time_beside_s

from .contention_probe import ThreadProbe, contention_model
from .probe_budget import PASSES, SMALL_BYTES, SOUNDING_BYTES, STREAM_BYTES, ProbeBudget, ProbeSize

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.comm.plan import Route
    from sirtaki.comm.router import Router
    from sirtaki.comm.transports.contract import FlatBuffer

logger = logging.getLogger(__name__)

SHORT_S = 0.02
MOST_REPEATS = 3
"""A probe is repeated until it has taken so long or been taken so often: hiccups outlast short ones."""

SHAPES = (
    (64 * KIB, 1),
    (MIB, 1),
    (MIB, 4),
    (MIB, 16),
    (64 * KIB, 4),
    (MIB, 8),
    (64 * KIB, 8),
    (MIB, 2),
    (256 * KIB, 1),
)
"""Bytes of a unit where there is time, and streams; what a small budget should know comes first."""

NEEDED_FIRST, NEEDED, ENOUGH = 3, 2, 3
"""So many shapes are measured on the first route and on every other, and on the others at most so many."""


def probe_routes(
    control: ControlPlane, router: Router, routes: Sequence[Route], *, max_streams: int, budget_s: float
) -> dict[Route, list[LinkProbe]]:
    """Collective: times a few all-reduces on each route, the first ones first, for about `budget_s` in all.

    Where the link is slow, probes carry less (`ProbeBudget`), and only the needed shapes may exceed the budget.

    Args:
        control: the ranks.
        router: carries the units.
        routes: to measure, the most important first: where there is time, it is measured in more ways than the others.
        max_streams: no more are opened.
        budget_s: by the clock, opening of connections included. The smallest of all ranks' counts.
    """
    # Every rank must go through the same shapes: neither its own budget nor its own clock may decide.
    budget_s = float(control.minimum(np.array([budget_s]))[0])
    buffer = router.allocate(max_streams * STREAM_BYTES // 4, torch.float32)
    found: dict[Route, list[LinkProbe]] = {route: [] for route in routes}
    needed_after = NEEDED_FIRST + NEEDED * (len(routes) - 1)
    begin_s = time.perf_counter()
    for route in routes:
        shapes, needed = (SHAPES, NEEDED_FIRST) if route == routes[0] else (SHAPES[:ENOUGH], NEEDED)
        try:
            soundings_s = tuple(_sounding_s(control, router, route, buffer, size) for size in SOUNDING_BYTES)
        except (PlanError, TransportError) as err:  # on all ranks alike
            logger.info("not probed: %s", err)
            needed_after -= needed
            continue
        mine_s = [*soundings_s, time.perf_counter() - begin_s]
        small_s, large_s, spent_s = control.maximum(np.array(mine_s)).tolist()
        budget = ProbeBudget((small_s, large_s))
        seen: set[tuple[int, int]] = set()
        most = min(max_streams, router.max_streams([route]))
        for number, (unit_bytes, streams) in enumerate(shapes):
            needed_more = needed_after - number if number < needed else 0
            size = budget.size(unit_bytes, streams, left_s=budget_s - spent_s, needed_more=needed_more)
            # What is not known to be slow would have to be tried.
            if streams > most or size is None or (size.unit_bytes, streams) in seen:
                continue
            plan = _probe_plan(route, size, streams)
            try:
                router.open_plan(plan)
            except (PlanError, TransportError) as err:  # on all ranks alike
                logger.info("not probed: %s", err)
                continue
            seen.add((size.unit_bytes, streams))
            probed_s = 0.0
            for repeat in range(MOST_REPEATS):
                own_s, own_busy = _probe_s(control, router, plan, buffer, is_first=repeat == 0)
                mine = [own_s, time.perf_counter() - begin_s, own_busy]
                seconds, spent_s, busy = control.maximum(np.array(mine)).tolist()
                probe = LinkProbe(
                    unit_bytes=size.unit_bytes,
                    streams=streams,
                    seconds=seconds,
                    rounds=PASSES * size.rounds,
                    busy=busy,
                )
                found[route].append(probe)
                budget.learn(streams=streams, unit_bytes=size.unit_bytes, round_s=probe.round_s)
                probed_s += seconds
                if probed_s > SHORT_S or spent_s > budget_s:
                    break
        needed_after -= needed
    return found


def narrowed(space: KnobSpace, probes: Mapping[Route, Sequence[LinkProbe]], *, default: Knobs) -> KnobSpace:
    """The space without what probes have shown to be hopeless: a trial of it would cost many times a good one.

    Routes that carry less than a third of the fastest one's throughput, and numbers of streams that carry less than
    half of what the default's route carries at best, are left out; the default stays.
    """
    rates = {
        route: _rates([probe for probe in measured if probe.unit_bytes > SMALL_BYTES])
        for route, measured in probes.items()
    }
    best = {route: max(by_streams.values()) for route, by_streams in rates.items() if by_streams}
    if not best:
        return space
    default_route = default.route
    routes = tuple(
        route for route in space.routes if route == default_route or 3 * best.get(route, math.inf) >= max(best.values())
    )
    curve = rates.get(default_route, {})
    streams = tuple(
        n for n in space.streams if n == default.streams or 2 * curve.get(n, math.inf) >= best.get(default_route, 0.0)
    )
    return replace(space, routes=routes, streams=streams)


def _rates(probes: Sequence[LinkProbe]) -> dict[int, float]:
    """Bytes a second by number of streams, of the faster of repeated probes."""
    rates: dict[int, float] = {}
    for probe in probes:
        rate = probe.streams * probe.unit_bytes / probe.round_s
        rates[probe.streams] = max(rate, rates.get(probe.streams, 0.0))
    return rates


def _probe_plan(route: Route, size: ProbeSize, streams: int) -> CommPlan:
    """So many rounds on each stream, in units that take the streams in turn."""
    transport, algorithm = route
    numel = size.unit_bytes // 4
    units = tuple(
        Unit(start=number * numel, stop=(number + 1) * numel, stream=number % streams, algorithm=algorithm)
        for number in range(streams * size.rounds)
    )
    return CommPlan(numel=len(units) * numel, units=units, streams=streams, transport=transport)


def _sounding_s(control: ControlPlane, router: Router, route: Route, buffer: FlatBuffer, unit_bytes: int) -> float:
    """Collective: seconds that one all-reduce takes, roughly, on this rank; the second one, on open connections.

    Raises:
        PlanError | TransportError: on all ranks, the route cannot be opened.
    """
    plan = _probe_plan(route, ProbeSize(unit_bytes=unit_bytes, rounds=1), 1)
    router.open_plan(plan)
    seconds, _ = _probe_s(control, router, plan, buffer, is_first=True)
    return seconds / PASSES


def _probe_s(
    control: ControlPlane, router: Router, plan: CommPlan, buffer: FlatBuffer, *, is_first: bool
) -> tuple[float, float]:
    """Collective: seconds that the plan's units take `PASSES` times in a row, and processors that they keep busy.

    Both are this rank's.

    At first a pass goes before that opens connections, touches memory, lets congestion windows grow, and uses up what
    shapers grant a link that was idle; so the timed ones follow without a pause, not even that of a barrier.
    """
    control.barrier()
    if is_first:
        _pass(router, plan, buffer, times=1)
    device = router.device
    used_s = processor_time_beside_s()
    begin = device.record_event()
    _pass(router, plan, buffer, times=PASSES)
    end = device.record_event()
    device.wait_for(end)
    seconds = device.elapsed_s(begin, end)
    return seconds, (processor_time_beside_s() - used_s) / seconds


def _pass(router: Router, plan: CommPlan, buffer: FlatBuffer, *, times: int) -> None:
    """Collective: submits all units so many times, then waits for all of them."""
    router.wait_for([work for _ in range(times) for work in router.all_reduce_plan(buffer, plan, scale=0.0)])


def planning_model(
    layout: GradientLayout,
    ready_s: Sequence[float],
    compute_s: float,
    probes: dict[Route, list[LinkProbe]],
    *,
    forward_s: float = 0.0,
    threads: list[ThreadProbe] | None = None,
    host: SharedHost | None = None,
) -> PlanningModel | None:
    """What the planners need to know, or None if no route could be fitted; says why in the log.

    Args:
        layout: gradients in the order in which they become ready.
        ready_s: when each did, `(n_gradients,)`, in the layout's order.
        compute_s: when the backward pass ended.
        probes: of each route.
        forward_s: what else an iteration takes, from the last reduced gradient to the first ready one.
        threads: what thread allowances have done on the first route; None or empty = there are none that matter.
        host: that all ranks share; else None.
    """
    links = fitted_links(probes)
    if not links or not all(math.isfinite(moment) for moment in ready_s):
        return None
    profile = Profile(ready_s=tuple(ready_s), compute_s=max(compute_s, *ready_s), forward_s=max(0.0, forward_s))
    contention = contention_model(threads, alpha_s=next(iter(links.values())).alpha_s) if threads else None
    return PlanningModel(layout=layout, profile=profile, links=links, contention=contention, host=host)


def fitted_links(probes: Mapping[Route, Sequence[LinkProbe]]) -> dict[Route, LinkModel]:
    """What all-reduces cost on each route; those that follow no simple rule are left out, which the log says."""
    from sirtaki.autotune.model.fits import fit_link  # imports scipy, which only a rank that plans should wait for

    links: dict[Route, LinkModel] = {}
    unfit: list[str] = []
    for route, measured in probes.items():
        name = f"{route[0].value} {route[1].value}"
        try:
            links[route] = link = fit_link(measured)
        except TuningError as err:
            unfit.append(name)
            logger.debug("%s: %s", name, err)
            continue
        curve = " ".join(f"{rate / 1e6:.4g}" for rate in link.throughput)
        logger.debug("%s: α = %.3g ms, o = %.3g ms, G = %s MB/s", name, 1e3 * link.alpha_s, 1e3 * link.host_s, curve)
    if unfit:
        logger.info(
            "no plans for %s, whose times follow no simple rule here; search techniques try it all the same",
            ", ".join(unfit),
        )
    return links
