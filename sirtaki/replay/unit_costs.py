"""What units cost that nobody has run: from those that were recorded, and from probes where there are any.

Probes say how the cost depends on size; recorded units, which ran in training and not on an idle machine, say how much
it is. Without probes, start-up and rate are fitted to the recorded units; of a single size only a rate is known.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sirtaki.autotune.model.fits import nonnegative_least_squares
from sirtaki.autotune.model.graph import Activity
from sirtaki.comm.plan import Route
from sirtaki.errors import ReplayError

from .job_model import JobModel, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """Cost of a unit by its size on one route, with everything to itself.

    Attributes:
        startup_s: before anything moves; on one host, processor time that does not depend on the size.
        s_per_byte: of the link, or of the processor of each rank where all are on one host.
        host_s: of what hands messages to the link.
        busy: see `Operation`.
        lag_s: how much later than the first the last rank is done.
        across: the link is needed.
    """

    startup_s: float
    s_per_byte: float
    host_s: float
    busy: float
    lag_s: float
    across: bool

    def applied_to(self, unit: Operation) -> Operation:
        """The unit at this cost."""
        moving_s = unit.n_bytes * self.s_per_byte
        return Operation(
            key=unit.key,
            activity=unit.activity,
            lane=unit.lane,
            ranks=unit.ranks,
            n_bytes=unit.n_bytes,
            name=unit.name,
            route=unit.route,
            fixed_s=self.startup_s if self.across else 0.0,
            link_s=moving_s if self.across else 0.0,
            host_s=self.host_s,
            processor_s=0.0 if self.across else self.startup_s + moving_s,
            busy=self.busy,
            lag_s=self.lag_s,
        )


def unit_cost(job: JobModel, route: Route, ranks: tuple[int, ...]) -> UnitCost:
    """What units of these ranks cost on that route.

    Raises:
        ReplayError: neither units of that route were recorded nor was it probed.
    """
    units = _recorded(job, route)
    probed = job.links.get(route)
    across = job.crosses_hosts(ranks)
    if not units and probed is None:
        known = sorted({f"{one[0].value} {one[1].value}" for one in job.links} | _routes(job))
        raise ReplayError(
            f"nothing is known of {route[0].value} {route[1].value}: neither was it probed nor did units use it "
            f"(known: {', '.join(known) or 'none'})"
        )
    lag_s = statistics.fmean([one.lag_s for one in units]) if units else 0.0
    busy = statistics.fmean([one.busy for one in units]) if units else 1.0 if probed is None else probed.busy
    if probed is None:
        startup_s, s_per_byte = _fitted(units)
        return UnitCost(startup_s=startup_s, s_per_byte=s_per_byte, host_s=0.0, busy=busy, lag_s=lag_s, across=across)
    startup_s, s_per_byte = probed.alpha_s, probed.beta_s_per_byte
    host_s = probed.host_s if across else 0.0
    if units and across:
        # Start-up is the probes'; how long the link takes is the recording's.
        s_per_byte = sum(one.link_s for one in units) / sum(one.n_bytes for one in units)
    elif units:
        recorded_s = sum(one.processor_s for one in units)
        s_probed = sum(startup_s + one.n_bytes * s_per_byte for one in units)
        startup_s, s_per_byte = startup_s * recorded_s / s_probed, s_per_byte * recorded_s / s_probed
    return UnitCost(startup_s=startup_s, s_per_byte=s_per_byte, host_s=host_s, busy=busy, lag_s=lag_s, across=across)


def _recorded(job: JobModel, route: Route) -> list[Operation]:
    return [
        one
        for each in job.iterations
        for one in each.operations
        if one.activity is Activity.UNIT and one.route == route
    ]


def _routes(job: JobModel) -> set[str]:
    routes = {one.route for each in job.iterations for one in each.operations if one.route is not None}
    return {f"{transport.value} {algorithm.value}" for transport, algorithm in routes}


def _fitted(units: Sequence[Operation]) -> tuple[float, float]:
    """Start-up and seconds a byte that miss the mean of each size least, in relation to it."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for one in units:
        by_size[one.n_bytes].append(one.fixed_s + one.link_s + one.processor_s)
    sizes = np.array([float(size) for size in by_size])
    means_s = np.array([max(1e-9, statistics.fmean(seconds)) for seconds in by_size.values()])
    if len(sizes) == 1:
        return 0.0, float(means_s[0] / sizes[0])
    scale = float(sizes.max())
    rows = np.column_stack([1 / means_s, sizes / scale / means_s])
    startup_s, moving_s = nonnegative_least_squares(rows, np.ones(len(sizes))).tolist()
    return startup_s, moving_s / scale
