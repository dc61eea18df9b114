"""Predict the step time of a recorded job after a change, such as another communication plan or a faster network."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist
from typing import Any

import numpy as np

from sirtaki.autotune.knobs import MIB, Knobs, format_bytes
from sirtaki.autotune.model.fits import nonnegative_least_squares
from sirtaki.autotune.model.replayer import Activity, Phase
from sirtaki.comm.plan import CommPlan, GradientLayout, Route, TransportKind
from sirtaki.errors import PlanError, ReplayError, require
from sirtaki.measures import LinkModel, milliseconds, ring_bytes

from .global_graph import MeanStepTimes, coarse, computation_s, mean_iteration, ms, play, replayed
from .job_model import (
    GradientKey,
    Histories,
    Iteration,
    JobModel,
    JobOperation,
    OperationKey,
    Program,
    ThreadInterval,
    unit_fields,
)
from .recording import Buffer


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Cost to all-reduce a unit (bucket) on one route (transport and algorithm) while nothing else runs, as a function
    of the size.

    Attributes:
        startup_s: seconds that do not depend on the size. On one host, this is processor time.
        s_per_byte: seconds per byte on the network link between hosts, or on each rank's processor if all ranks are on
            one host.
        host_s: processor seconds to pass messages to the link.
        busy: number of processors that each rank occupies during the reduction.
        lag_s: delay between the first and the last rank's completion of the all-reduce.
        across: True if units use the link between hosts.
    """

    startup_s: float
    s_per_byte: float
    host_s: float
    busy: float
    lag_s: float
    across: bool


def unit_cost(job: JobModel, route: Route, ranks: tuple[int, ...]) -> UnitCost:
    """Return the cost to all-reduce units (buckets) between `ranks` on a route (transport and algorithm).

    Raises:
        ReplayError: no recorded unit used the route, and no probe (test transfer before training is tuned) measured its
            cost.
    """
    units = [one for one in job.units if one.route == route]
    probed = job.links.get(route)
    across = job.crosses_hosts(ranks)
    if not units and probed is None:
        known = {*job.links, *(one.route for one in job.units if one.route is not None)}
        words = sorted(f"{transport.value} {algorithm.value}" for transport, algorithm in known)
        raise ReplayError(
            f"the cost of transport {route[0].value} with algorithm {route[1].value} is unknown, because the "
            f"recording has no times of this pair; it has times of: {', '.join(words) or 'none'}"
        )
    lag_s = statistics.fmean(one.lag_s for one in units) if units else 0.0
    busy = statistics.fmean(one.busy for one in units) if units else 1.0 if probed is None else probed.busy
    if probed is None:
        return UnitCost(*_fitted(units), host_s=0.0, busy=busy, lag_s=lag_s, across=across)
    # On one host, messages are passed on the processors that compute, so their time is a part of the start-up time.
    startup_s = probed.alpha_s + (0.0 if across else probed.host_s)
    s_per_byte = probed.beta_s_per_byte
    if across:
        # Keep the start-up time that probes (test transfers) measured, but take the time per byte from the recorded
        # units (buckets), unless the clocks of the recording are too inaccurate.
        moved_s = sum(one.link_s for one in units)
        s_per_byte = moved_s / sum(one.n_bytes for one in units) if moved_s > 0 else s_per_byte
    elif units:
        scale = sum(one.processor_s for one in units) / sum(startup_s + one.n_bytes * s_per_byte for one in units)
        startup_s, s_per_byte = startup_s * scale, s_per_byte * scale
    host_s = probed.host_s if across else 0.0
    return UnitCost(startup_s, s_per_byte, host_s=host_s, busy=busy, lag_s=lag_s, across=across)


def _fitted(units: Sequence[JobOperation]) -> tuple[float, float]:
    """Return (start-up time, seconds per byte) of units (buckets), fitted to recorded units.

    The fit minimises the relative errors of the mean duration of each size.
    """
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


def with_knobs(job: JobModel, knobs: Knobs) -> JobModel:
    """Return the job with all flat buffers (of contiguous gradients) divided into units (buckets) as the knobs (tuned
    settings) say.

    Raises:
        PlanError: the boundaries of units in the knobs do not fit a buffer.
        ReplayError: the cost of the route (transport, algorithm) is unknown, or the recording lacks the times at which
            gradients were ready.
    """
    return with_plans(job, {buffer.number: knobs.to_plan(buffer.layout) for buffer in job.buffers})


def with_plans(
    job: JobModel, plans: Mapping[int, CommPlan], *, costs: Mapping[Route, UnitCost] | None = None
) -> JobModel:
    """Return the job in which flat buffers (of contiguous gradients) are all-reduced by other communication plans.

    Args:
        job: recorded job, or a smaller job in which one rank represents several equal ranks (`symmetric`).
        plans: new plans, by number of the flat buffer. Buffers without an entry keep their plans.
        costs: cost of units (buckets), by route (transport, algorithm). None = derived from the job, which is possible
            only if the job was recorded with all its ranks (not for `symmetric`).

    Raises:
        ReplayError: a plan has another number of elements than its buffer, the cost of its route is unknown, or the
            recording lacks the times at which gradients were ready.
    """
    buffers = tuple(
        replace(buffer, plan=plans[buffer.number]) if buffer.number in plans else buffer for buffer in job.buffers
    )
    for buffer in buffers:
        if buffer.plan.numel != buffer.layout.numel:
            raise ReplayError(
                f"the communication plan does not fit: it sends {buffer.plan.numel} gradient elements, but the job has "
                f"{buffer.layout.numel}; pass a plan that was made for this job"
            )
    changed = [buffer for buffer in buffers if buffer.number in plans]
    routes = {(buffer.plan.transport, unit.algorithm) for buffer in changed for unit in buffer.plan.units}
    if costs is None:
        costs = {route: unit_cost(job, route, job.ranks) for route in routes}
    units = {one.key: one for buffer in changed for one in _units(buffer, costs)}
    iterations = tuple(
        Iteration(
            programs={rank: _Reissue(program, changed, units).program() for rank, program in each.programs.items()},
            operations=(*(one for one in each.operations if one.key[0] not in plans), *units.values()),
        )
        for each in job.iterations
    )
    return replace(job, buffers=buffers, iterations=iterations)


def _units(buffer: Buffer, costs: Mapping[Route, UnitCost]) -> Iterator[JobOperation]:
    layout = buffer.layout
    for unit in buffer.plan.units:
        route = (buffer.plan.transport, unit.algorithm)
        cost = costs[route]
        moving_s = unit.numel * layout.itemsize_bytes * cost.s_per_byte
        key = (buffer.number, unit.start, unit.stop)
        yield JobOperation(
            **unit_fields(key, layout, route, unit.stream),
            ranks=buffer.ranks,
            fixed_s=cost.startup_s if cost.across else 0.0,
            link_s=moving_s if cost.across else 0.0,
            host_s=cost.host_s,
            processor_s=0.0 if cost.across else cost.startup_s + moving_s,
            busy=cost.busy,
            lag_s=cost.lag_s,
        )


class _Reissue:
    """Rewriter of one rank's program (its sequence of work in a step).

    In the new program, the rank issues the units (buckets) of new communication plans instead of the recorded units.
    """

    def __init__(self, program: Program, buffers: Sequence[Buffer], units: Mapping[OperationKey, JobOperation]) -> None:
        self._program, self._units = program, units
        self._missing: dict[OperationKey, int] = {}  # {unit (bucket): number of its gradients that are not ready}
        self._of: dict[GradientKey, list[OperationKey]] = defaultdict(list)
        self._pending: dict[int, int] = {}  # {buffer of gradients: number of its gradients that are not ready}
        self._queues: dict[int, list[OperationKey]] = {}
        ready = {gradient for piece in program for gradient in piece.ready}
        for buffer in buffers:
            present = {index for number, index in ready if number == buffer.number}
            if not present:
                raise ReplayError(
                    "the job cannot be simulated, because a rank did not record when its gradients became ready; "
                    "record the job again"
                )
            offsets, queue = buffer.layout.offsets, list[OperationKey]()
            for unit in buffer.plan.units:
                queue.append((buffer.number, unit.start, unit.stop))
                first, last = bisect_right(offsets, unit.start) - 1, bisect_left(offsets, unit.stop)
                mine = [index for index in range(first, last) if index in present]
                self._missing[queue[-1]] = len(mine)
                for index in mine:
                    self._of[buffer.number, index].append(queue[-1])
            self._pending[buffer.number], self._queues[buffer.number] = len(present), queue
        self._without_gradients = {key for key, missing in self._missing.items() if not missing}
        self._copies = [piece for piece in program if piece.activity is Activity.COPY]
        copied = sum(buffer.layout.total_bytes for buffer in buffers)
        self._copy_s_per_byte = sum(piece.seconds for piece in self._copies) / copied

    def program(self) -> Program:
        return tuple(new for piece in self._program for new in self._replaced(piece))

    def _replaced(self, piece: ThreadInterval) -> Iterator[ThreadInterval]:
        issues = tuple(key for key in piece.issues if key[0] not in self._queues)
        seconds = 0.0 if piece.activity is Activity.COPY else piece.seconds
        bare = replace(piece, waits=self._waits(piece), issues=issues, seconds=seconds)
        complete = [key for gradient in piece.ready for key in self._mark_ready(gradient)]
        if complete or bare.seconds or bare.ready or bare.waits or bare.issues:
            yield bare
        if complete:
            yield ThreadInterval(
                activity=Activity.COPY,
                phase=self._copies[0].phase if self._copies else piece.phase,
                name="copy gradients",
                seconds=self._copy_s_per_byte * sum(self._units[key].n_bytes for key in complete),
                issues=tuple(complete),
            )

    def _waits(self, piece: ThreadInterval) -> tuple[tuple[OperationKey, float], ...]:
        """Return the new waits of a piece (interval of the training thread). If it waited for removed units (buckets),
        it waits for the last new unit of each lane (queue of a transport) instead.
        """
        lag_s: dict[int, float] = {}
        for (number, _, _), late_s in piece.waits:
            if number in self._queues:
                lag_s[number] = max(lag_s.get(number, 0.0), late_s)
        last = {one.lane: key for key, one in self._units.items() if key[0] in lag_s}
        others = [(key, late_s) for key, late_s in piece.waits if key[0] not in self._queues]
        return (*others, *((key, lag_s[key[0]]) for key in last.values()))

    def _mark_ready(self, gradient: GradientKey) -> list[OperationKey]:
        """Mark a gradient as ready, and return the units (buckets) that the rank can issue now, in plan order, because
        all their gradients are ready.

        With the last gradient of a buffer, all remaining units are returned.
        """
        number = gradient[0]
        if number not in self._queues:
            return []
        for key in self._of[gradient]:
            self._missing[key] -= 1
        self._pending[number] -= 1
        queue = self._queues[number]
        count = next((place for place, key in enumerate(queue) if self._missing[key] > 0), len(queue))
        while self._pending[number] and count and queue[count - 1] in self._without_gradients:
            count -= 1  # Hold back units (buckets) without gradients until the last gradient is ready.
        complete, self._queues[number] = queue[:count], queue[count:]
        return complete


PAYLOAD = 0.95
"""Fraction of a network link's nominal bit rate that is left for gradients after packet headers."""

SATURATED = 0.9
"""A single unit (bucket) counts as saturating a network link above this fraction of the link's highest rate."""


def link_rate(job: JobModel) -> float | None:
    """Return the highest rate of the network link between hosts, in bytes of gradients per second; None = no unit
    (bucket) uses this link.
    """
    alone = _rate_of_one_unit(job)
    return None if job.link is None or alone is None else max(job.link.totals) * alone


def nominal_link_rate(job: JobModel) -> float | None:
    """Return the nominal rate of the recorded network link between hosts, in bytes per second, packet headers included;
    None = no unit (bucket) uses this link. With this rate, `with_link` changes nothing.
    """
    rate = link_rate(job)
    return None if rate is None else rate * ring_bytes(1.0, len(job.ranks)) / PAYLOAD


def with_link(job: JobModel, link_bytes_per_s: float) -> JobModel:
    """Return the job with a faster or slower network link between hosts.

    A slower link caps the total rate of the units (buckets) that are sent concurrently. A faster link speeds up a
    single unit only if that unit saturated the recorded link. Otherwise a single unit keeps its rate, and only more
    concurrent units make use of the faster link.

    Args:
        job: recorded job.
        link_bytes_per_s: nominal rate of the link, packet headers included.

    Raises:
        ReplayError: all ranks are on one host, or the rate is not positive.
    """
    alone = _rate_of_one_unit(job)
    if job.link is None or alone is None:
        raise ReplayError(
            "a different network bandwidth cannot be simulated, because all recorded ranks ran on one host; record a "
            "job on several hosts, or use `sirtaki plan LOG --ranks N --link-gbit G` with a trial log"
        )
    valid = math.isfinite(link_bytes_per_s) and link_bytes_per_s > 0
    require(valid, "the network bandwidth (bytes/s)", "a positive, finite number", link_bytes_per_s, ReplayError)
    wanted = PAYLOAD * link_bytes_per_s / ring_bytes(1.0, len(job.ranks))
    totals = job.link.totals
    rate = max(totals) * alone
    if alone >= SATURATED * rate:
        rates = [wanted / rate * alone * total for total in totals]
    # Tolerate small differences, because unit conversion may round the recorded rate up.
    elif wanted <= rate * (1 + 1e-9):
        rates = [min(alone * total, wanted) for total in totals]
    else:
        filling = math.ceil(wanted / alone)
        rates = [min(alone * count, wanted) for count in range(1, max(filling, len(totals)) + 1)]
    link = replace(job.link, totals=tuple(one / rates[0] for one in rates))
    slower = _with_units(job, lambda one: replace(one, link_s=one.link_s * alone / rates[0]))
    return replace(slower, link=link)


def _rate_of_one_unit(job: JobModel) -> float | None:
    """Return the bytes per second of a single unit (bucket) between hosts, on the route (transport, algorithm) that
    most units use; None = no unit is sent between hosts.
    """
    routes = [one.route for one in job.units if one.route is not None and job.crosses_hosts(one.ranks)]
    return 1 / unit_cost(job, statistics.mode(routes), job.ranks).s_per_byte if routes else None


def with_ranks(job: JobModel, ranks: int) -> JobModel:
    """Return the job with another number of ranks that behave like the recorded ranks, on proportionally many hosts.

    The cost of units (buckets) is scaled as for a ring all-reduce of N ranks: start-up time and number of messages are
    proportional to N − 1, bytes to (N − 1) / N. In shared memory, a rank moves the same bytes for any N. If the
    recorded nodes were emulated on one machine, the additional nodes share the processors of this machine.

    Raises:
        ReplayError: the old or the new number of ranks is below 2, or a subset of the ranks (process set) averages some
            gradients.
    """
    found = len(job.ranks), ranks
    require(min(found) >= 2, "numbers of ranks (recorded, simulated)", "at least 2", found, ReplayError)
    if any(len(buffer.ranks) != len(job.ranks) for buffer in job.buffers):
        raise ReplayError(
            "the step time on another number of ranks cannot be predicted, because the job averages some gradients "
            "only in a process set (a subset of the ranks)"
        )
    like = {rank: job.ranks[rank % len(job.ranks)] for rank in range(ranks)}
    everyone = tuple(like)
    hops = (ranks - 1) / (len(job.ranks) - 1)
    volume = hops * len(job.ranks) / ranks
    # Give each copy of the recorded ranks its own hosts and machines, unless the recorded job has only one host or
    # machine.
    one_host, one_machine = len(set(job.hosts.values())) == 1, len(job.processors) == 1
    group_of = {rank: place for place, group in enumerate(job.processors) for rank in group.ranks}
    hosts: dict[int, int] = {}
    machines: dict[tuple[int, int], list[int]] = defaultdict(list)
    first_of: dict[tuple[int, int], int] = {}
    for rank, other in like.items():
        turn = rank // len(job.ranks)
        hosts[rank] = 0 if one_host else first_of.setdefault((turn, job.hosts[other]), rank)
        machines[0 if one_machine else turn, group_of[other]].append(rank)

    def rescaled(one: JobOperation) -> JobOperation:
        in_memory = one.route is not None and one.route[0] is TransportKind.SHARED_MEMORY
        return replace(
            one,
            ranks=everyone,
            fixed_s=one.fixed_s * hops,
            host_s=one.host_s * hops,
            link_s=one.link_s * volume,
            processor_s=one.processor_s * (1.0 if in_memory else volume),
        )

    return replace(
        job,
        ranks=everyone,
        hosts=hosts,
        processors=tuple(replace(job.processors[place], ranks=tuple(mine)) for (_, place), mine in machines.items()),
        buffers=tuple(replace(buffer, ranks=everyone) for buffer in job.buffers),
        iterations=tuple(
            Iteration(
                programs={rank: each.programs[other] for rank, other in like.items()},
                operations=tuple(map(rescaled, each.operations)),
            )
            for each in job.iterations
        ),
        begin_s={rank: job.begin_s.get(other, 0.0) for rank, other in like.items()},
        alike={},
    )


def without_stragglers(job: JobModel) -> JobModel:
    """Return the job without slow ranks.

    In the sum over all iterations, no rank takes longer for a phase (such as forward) than the median rank. The
    durations of each rank still vary between iterations.
    """
    own_s: dict[Phase, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for each in job.iterations:
        for rank, program in each.programs.items():
            for piece in program:
                own_s[piece.phase][rank] += piece.seconds
    usual_s = {
        phase: statistics.median_low([mine.get(rank, 0.0) for rank in job.ranks]) for phase, mine in own_s.items()
    }

    def factor(rank: int, piece: ThreadInterval) -> float:
        mine_s = own_s[piece.phase].get(rank, 0.0)
        return min(1.0, usual_s[piece.phase] / mine_s) if mine_s > 0 else 1.0

    return _with_durations(job, factor)


def with_faster_loader(job: JobModel, factor: float) -> JobModel:
    """Return the job in which the waits for training data are shorter by `factor`; infinity = no waits for data.

    Raises:
        ReplayError: `factor` is not positive.
    """
    require(factor > 0, "the factor of the data loader's speed", "a positive number", factor, ReplayError)
    return _with_durations(job, lambda _, piece: 1 / factor if piece.activity is Activity.DATA else 1.0)


def with_batches(job: JobModel, factor: float) -> JobModel:
    """Return the job with batches `factor` times as large on each rank.

    The durations of data loading, forward and backward passes are multiplied by `factor`. Optimizer steps, other Python
    code and communication keep their duration. This is approximate, because a recording with one batch size cannot show
    which share of a pass does not depend on the batch size.

    Raises:
        ReplayError: `factor` is not positive.
    """
    require(factor > 0, "the factor of the batch size", "a positive number", factor, ReplayError)
    activities, phases = (Activity.COMPUTE, Activity.DATA), (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)

    def grown(_: int, piece: ThreadInterval) -> float:
        return factor if piece.activity in activities and piece.phase in phases else 1.0

    return _with_durations(job, grown)


def with_less_traffic(job: JobModel, factor: float) -> JobModel:
    """Return the job with the bytes of units (buckets) multiplied by `factor`, as if gradients were compressed. The
    time to compress them is not included.

    Raises:
        ReplayError: `factor` is not positive.
    """
    require(factor > 0, "the factor of the bytes to send", "a positive number", factor, ReplayError)

    def smaller(one: JobOperation) -> JobOperation:
        return replace(
            one,
            n_bytes=round(one.n_bytes * factor),
            link_s=one.link_s * factor,
            processor_s=one.processor_s * factor,
        )

    return _with_units(job, smaller)


def _with_durations(job: JobModel, factor: Callable[[int, ThreadInterval], float]) -> JobModel:
    def timed(rank: int, program: Program) -> Program:
        return tuple(replace(piece, seconds=piece.seconds * factor(rank, piece)) for piece in program)

    return job.changed(program=timed)


def _with_units(job: JobModel, changed: Callable[[JobOperation], JobOperation]) -> JobModel:
    return job.changed(operation=lambda one: changed(one) if one.activity is Activity.UNIT else one)


COMPILED = "CompiledFunctionBackward"
"""Name of the autograd node that runs the backward pass of a graph compiled by `torch.compile`."""

COST_S, COST_SHARE = 2e-4, 0.004
"""Cost of each additional part into which a compiled backward pass is divided: seconds for the additional call, and a
fraction of the duration of the whole pass, because less is fused."""

WORTH_A_LINE = 0.02
"""Users are asked to change their script only for a predicted gain of at least this fraction of the step time."""

INDIFFERENCE = 0.01
"""A division of a compiled model into fewer parts is chosen if it is slower than the fastest division by at most this
fraction of the step time, because a replay (simulation) cannot predict such small differences.
"""

WHOLE = 1 << 62
"""Part size in bytes that is larger than any model, so that a compiled model is not divided."""

COUNTS = (2, 3, 4, 6, 8, 12, 16)
"""Numbers of parts that are tried for the division of a compiled model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBackward:
    """One operator that runs the whole backward pass of a graph compiled by `torch.compile`.

    Attributes:
        n_bytes: size of each gradient that becomes ready at the end of the operator, in the order in which a backward
            pass divided into parts would produce them (`backward_order`).
        seconds: duration of the operator, as a mean over ranks and iterations.
    """

    n_bytes: Mapping[GradientKey, int]
    seconds: float

    def parts(self, part_bytes: int) -> list[tuple[GradientKey, ...]]:
        """Divide this compiled backward pass (one operator) into parts, as PyTorch's `DDPOptimizer` does.

        A part ends once its gradients have `part_bytes`. Return the gradients of each part.
        """
        found: list[list[GradientKey]] = [[]]
        so_far = 0
        for key, size in self.n_bytes.items():
            if so_far >= part_bytes:
                found.append([])
                so_far = 0
            found[-1].append(key)
            so_far += size
        return [tuple(part) for part in found]

    @property
    def cost_s(self) -> float:
        """Return the seconds that each additional part of the compiled backward pass costs."""
        return COST_S + COST_SHARE * self.seconds


def compiled_backwards(job: JobModel) -> tuple[CompiledBackward, ...]:
    """Return the operators of a step that run compiled backward passes, in order. Return none if iterations or ranks
    differ in these operators.
    """
    seen: list[list[tuple[frozenset[GradientKey], float]]] = []
    for each in job.iterations:
        for program in each.programs.values():
            blocks = [block for block in _blocks(program) if isinstance(block, _OperatorBlock)]
            seen.append([(frozenset(block.gradients), block.seconds) for block in blocks])
    if not seen or not seen[0] or any([keys for keys, _ in one] != [keys for keys, _ in seen[0]] for one in seen):
        return ()
    layouts = {buffer.number: buffer.layout for buffer in job.buffers}
    found = []
    for place, (keys, _) in enumerate(seen[0]):
        if any(number not in layouts for number, _ in keys):
            return ()
        n_bytes = {
            (number, index): layout.sizes[index] * layout.itemsize_bytes
            for number, layout in layouts.items()
            for index in backward_order(layout, sorted(index for other, index in keys if other == number))
        }
        found.append(CompiledBackward(n_bytes=n_bytes, seconds=statistics.fmean(one[place][1] for one in seen)))
    return tuple(found)


def backward_order(layout: GradientLayout, indices: Sequence[int]) -> list[int]:
    """Estimate the order in which a compiled backward pass would produce its gradients if it were divided into parts.
    An undivided pass produces all gradients at its end. Autograd then accumulates them in reverse order of the forward
    pass, except for a few that its queue moves to the front. This function moves these few back to the gradients of the
    same block of layers, which it recognises by parameter name.

    Args:
        layout: names and sizes of contiguous gradients.
        indices: indices of the gradients in the layout, in the recorded order.

    Returns:
        The same indices, in the estimated order.
    """
    if not layout.names:
        return list(indices)
    places: dict[str, list[int]] = {}
    for place, index in enumerate(indices):
        places.setdefault(_block_name(layout.names[index]), []).append(place)
    of_block = {name: statistics.median_high(mine) for name, mine in places.items()}
    order = sorted(range(len(indices)), key=lambda place: (of_block[_block_name(layout.names[indices[place]])], place))
    return [indices[place] for place in order]


def _block_name(name: str) -> str:
    """Return the part of a parameter name that names its block of layers: the name up to the first number
    (`encoder.layer.3`), or the name of the module if there is no number.
    """
    words = name.split(".")
    number = next((place for place, word in enumerate(words) if word.isdecimal()), None)
    return ".".join(words[:-1] if number is None else words[: number + 1])


def sizes_worth_trying(job: JobModel) -> tuple[int, ...]:
    """Return the sizes at which dividing a compiled backward pass may pay, in bytes of gradients, ascending.

    A backward pass is divided into parts of this size, so that gradients of earlier parts are sent earlier. Return none
    if no compiled backward pass is large enough.

    By theorem 1 of dPRO (Hu et al., 2022), two operators should be fused if sending the gradients of the first takes no
    longer than the time that fusion saves. Hence a size is tried only if sending the gradients of a part on an idle
    network takes longer than the additional part costs.
    """
    found = compiled_backwards(job)
    if not found:
        return ()
    largest = max(found, key=lambda one: one.seconds * (len(one.n_bytes) > 1))
    total = sum(largest.n_bytes.values())
    sizes = {-(-total // count) for count in COUNTS}
    return tuple(
        size for size in sorted(sizes) if _alone_s(job, size) > largest.cost_s and len(largest.parts(size)) > 1
    )


def best_part_bytes(job: JobModel) -> int | None:
    """Return the best part size of a compiled model under the job's communication plan, in bytes of gradients.

    It has the shortest predicted step time, or is larger and about as fast.

    Returns None if no compiled backward pass was recorded, or if dividing it shortens the step by less than
    `WORTH_A_LINE`.
    """
    mean = mean_iteration(job)
    try:
        sizes = sizes_worth_trying(mean)
        whole_s = replayed(play(in_parts(mean, WHOLE))).iteration_s if sizes else 0.0
        steps_s = {size: replayed(play(in_parts(mean, size))).iteration_s for size in sizes}
    except ReplayError:  # The recording lacks the times of ready gradients, or the costs of units.
        return None
    if not steps_s or min(steps_s.values()) > (1 - WORTH_A_LINE) * whole_s:
        return None
    return max(size for size, step_s in steps_s.items() if step_s <= (1 + INDIFFERENCE) * min(steps_s.values()))


def in_words(job: JobModel, part_bytes: int) -> str:
    """Describe a division of the compiled model as a clause, such as "the model was compiled in 4 parts"."""
    count = sum(len(one.parts(part_bytes)) for one in compiled_backwards(job))
    return f"the model was compiled in {count} parts"


def line_of_code(part_bytes: int) -> str:
    """Return the line of code with which users compile a model in parts of `part_bytes`."""
    return f"torch.compile(model, backend=hvd.early_gradients(part_bytes={part_bytes}))"


def _alone_s(job: JobModel, n_bytes: int) -> float:
    """Return the shortest time in which a unit (bucket) of this size can be all-reduced on the recorded route
    (transport, algorithm).
    """
    buffer = job.buffers[0]
    cost = unit_cost(job, (buffer.plan.transport, buffer.plan.units[0].algorithm), buffer.ranks)
    fastest = max(job.link.totals) if cost.across and job.link is not None else 1.0
    return cost.startup_s + n_bytes * cost.s_per_byte / fastest


def in_parts(job: JobModel, part_bytes: int) -> JobModel:
    """Return the job with its compiled backward passes divided into parts. The communication plan stays the same.

    Args:
        job: job in which every rank produces all gradients of each buffer.
        part_bytes: a part ends once it has this many bytes of gradients.

    Raises:
        ReplayError: no compiled backward pass was recorded, or the recording lacks the cost of units (buckets) or the
            times at which gradients were ready.
    """
    found = compiled_backwards(job)
    if not found:
        raise ReplayError(
            "the recording has no backward pass of torch.compile, so splitting it into parts cannot be simulated; "
            "record a job that uses torch.compile"
        )
    moved: dict[GradientKey, int] = {}
    layouts = {}
    for buffer in job.buffers:
        order = list(range(len(buffer.layout.sizes)))
        for one in found:
            mine = [index for number, index in one.n_bytes if number == buffer.number]
            for place, index in zip(sorted(mine), mine, strict=True):
                order[place] = index
        layouts[buffer.number] = buffer.layout.reordered(order)
        moved |= {(buffer.number, index): place for place, index in enumerate(order)}

    def cut(_: int, program: Program) -> Program:
        compiled, pieces = iter(found), list[ThreadInterval]()
        for block in _blocks(program):
            pieces += _in_parts(block, next(compiled), part_bytes) if isinstance(block, _OperatorBlock) else [block]
        return tuple(replace(one, ready=tuple((key[0], moved[key]) for key in one.ready)) for one in pieces)

    buffers = tuple(replace(buffer, layout=layouts[buffer.number]) for buffer in job.buffers)
    changed = replace(job.changed(program=cut), buffers=buffers)
    return with_plans(changed, changed.plans)


@dataclass(slots=True)
class _OperatorBlock:
    """Intervals of the training thread in which one compiled backward pass runs (`compute`), and the following
    intervals in which its gradients are accumulated (`behind`).
    """

    compute: list[ThreadInterval]
    behind: list[ThreadInterval]

    @property
    def gradients(self) -> Iterator[GradientKey]:
        return (key for piece in (*self.compute, *self.behind) for key in piece.ready)

    @property
    def seconds(self) -> float:
        return sum(piece.seconds for piece in self.compute)


def _blocks(program: Program) -> Iterator[_OperatorBlock | ThreadInterval]:
    """Yield the pieces (intervals of the training thread) of a rank's step. The pieces of a compiled backward pass and
    of its gradients are grouped into one object.
    """
    block: _OperatorBlock | None = None
    waiting: list[ThreadInterval] = []  # Pieces since the last gradient of the compiled backward pass.
    for piece in program:
        if piece.name == COMPILED:
            if block is not None and (block.behind or any(block.gradients)):
                yield block
                yield from waiting
                block, waiting = None, []
            block = block or _OperatorBlock([], [])
            block.compute.append(piece)
        elif block is None:
            yield piece
        # End the block of operators at a wait or a collective operation.
        elif piece.waits or any(number < 0 for number, _, _ in piece.issues):
            yield block
            yield from (*waiting, piece)
            block, waiting = None, []
        else:
            waiting.append(piece)
            if piece.ready:
                block.behind += waiting
                waiting = []
    if block is not None:
        yield block
    yield from waiting


def _in_parts(block: _OperatorBlock, compiled: CompiledBackward, part_bytes: int) -> Iterator[ThreadInterval]:
    parts = compiled.parts(part_bytes)
    if len(parts) == 1:
        yield from (*block.compute, *block.behind)
        return
    total = sum(compiled.n_bytes.values())
    first = block.compute[0]
    accumulate_s = sum(piece.seconds for piece in block.behind if piece.activity is not Activity.COPY)
    # Assign the time of all copies of gradients to one piece, because `with_plans` derives the cost per byte from this
    # time.
    copied_s = sum(piece.seconds for piece in block.behind if piece.activity is Activity.COPY)
    waits = tuple(wait for piece in block.compute for wait in piece.waits)
    for number, part in enumerate(parts):
        share = sum(compiled.n_bytes[key] for key in part) / total
        yield replace(
            first,
            seconds=block.seconds * share + (compiled.cost_s if number else 0.0),
            waits=() if number else waits,
            ready=(),
            issues=(),
        )
        behind_s = accumulate_s * len(part) / len(compiled.n_bytes)
        for key in part:
            yield replace(first, name="AccumulateGrad", seconds=behind_s / len(part), waits=(), ready=(key,), issues=())
    if copied_s:
        copy = next(piece for piece in block.behind if piece.activity is Activity.COPY)
        yield replace(copy, seconds=copied_s, ready=(), issues=())


def daydream(histories: Histories, job: JobModel) -> MeanStepTimes:
    """Return the step time that the method of Daydream (Zhu et al., 2020) predicts, as a mean over ranks and
    iterations.

    Daydream assumes that gradients are sent one after another at a constant bandwidth.

    Raises:
        ReplayError: no units (buckets) were recorded, so the bandwidth is unknown.
    """
    rate = bandwidth(job)
    sizes = {buffer.number: (buffer.layout.sizes, buffer.layout.itemsize_bytes) for buffer in job.buffers}
    times_s: list[tuple[float, float, float]] = []
    for step in histories.steps:
        for rank, stretches in step.stretches.items():
            # `shown_s` is the time from the begin of the step to the begin of each interval, without waits.
            computes_s = [0.0 if one.waits else one.end_s - one.begin_s for one in stretches]
            shown_s = list(accumulate(computes_s, initial=0.0))
            begins_s = [one.begin_s for one in stretches]
            sent_s = 0.0
            for moment_s, (number, index) in sorted(step.marks[rank].ready):
                place = max(0, bisect_right(begins_s, moment_s) - 1)
                ready_s = shown_s[place] + min(moment_s - begins_s[place], computes_s[place])
                elements, itemsize_bytes = sizes[number]
                sent_s = max(sent_s, ready_s) + elements[index] * itemsize_bytes / rate
            in_phase_s: dict[Phase, float] = defaultdict(float)
            backward_end_s = whole_s = shown_s[-1]
            for one, seconds, end_s in zip(stretches, computes_s, shown_s[1:], strict=True):
                in_phase_s[one.phase] += seconds
                backward_end_s = end_s if one.phase is Phase.BACKWARD else backward_end_s
            exposed_s = max(0.0, sent_s - backward_end_s)
            passes_s = in_phase_s[Phase.FORWARD], in_phase_s[Phase.BACKWARD] + exposed_s
            times_s.append((whole_s + exposed_s, *passes_s))
    iteration_s, forward_s, backward_s = (statistics.fmean(times) for times in zip(*times_s, strict=True))
    phases_s = {Phase.FORWARD: forward_s, Phase.BACKWARD: backward_s}
    return MeanStepTimes(iteration_s=iteration_s, phases_s=phases_s, spread_s=0.0, iterations=len(histories.steps))


def bandwidth(job: JobModel) -> float:
    """Return the bandwidth for gradients in bytes per second: the highest rate of the network link between hosts or, on
    one host, the rate of the fastest recorded unit (bucket).
    """
    rate = link_rate(job)
    if rate is not None:
        return rate
    rates = [one.n_bytes / one.processor_s for one in job.units if one.processor_s > 0]
    if not rates:
        raise ReplayError(
            "the network bandwidth is unknown, because the recording contains no all-reduce of gradients; record more "
            "iterations of a job with at least two ranks"
        )
    return max(rates)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

UNIT_BYTES = tuple(MIB * mib for mib in (1, 4, 16, 64))
STREAMS = (1, 2, 4, 8)
MIN_GAIN = 0.01
"""Minimum predicted gain of a change that is reported to users, as a fraction of the step time."""

CONFIDENCE = 0.9
"""Confidence level of the intervals of predicted step times."""

MAX_INTERVAL_RATIO = 1.15**2
"""Wider confidence intervals are not reported: predictions claim an accuracy of 15 %.

The value is the ratio of the upper to the lower end.
"""


def half_width(deviation: float, count: int) -> float:
    """Return the half width of the confidence interval of the mean iteration time, as a fraction of the mean.

    Args:
        deviation: standard deviation of the iteration times, as a fraction of the mean.
        count: number of iterations.
    """
    # Widen the interval for few iterations, by the standard deviation of Student's t distribution.
    few = math.sqrt((count - 1) / max(1, count - 3))
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation * few / math.sqrt(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelError:
    """Error model of predicted step times: the bound of |log(true / predicted)| for 90 % of predictions, a sum of three
    terms.

    Attributes:
        any_question: constant term, for any change of the job.
        step: term for each factor of e by which the predicted step time differs from the recorded one.
        units: term for each factor of e by which the number of units (buckets) differs from the recorded one.
    """

    any_question: float
    step: float
    units: float


BETWEEN_HOSTS = ModelError(any_question=0.053, step=0.0, units=0.031)
ON_ONE_HOST = ModelError(any_question=0.014, step=0.607, units=0.009)
"""Error model of predicted step times for jobs on one host. `python -m bench.replay --errors` fitted the coefficients
to stored measurements."""

MAX_UNIT_RATIO_UNPROBED, MAX_UNIT_RATIO_ON_ONE_HOST = 8.0, 1.35
"""Largest factor by which a change may increase the number of units (buckets) if its step time is predicted: for
several hosts whose network was not probed, and for one host.
"""

MAX_HANDLING_RATIO = 0.6
"""Step times are predicted only if the time to pass units (buckets) to the network link is at most this multiple of the
time to send their bytes. Above it, processors limit the step instead of the link, and predictions were wrong by up to
25 %.
"""

MAX_FIT_ERROR = 0.05
"""Step times are predicted only if the curve fitted to the probes (test transfers) of a network link has at most this
relative error (root mean square). With an error of 13 %, predictions were wrong by 14 % on average; with 0 to 4 %, by 2
%.
"""


SMALLER_UNITS = "the recording does not show the cost of so much smaller units (buckets)"


def refusal(
    before: Sequence[CommPlan],
    after: Sequence[CommPlan],
    *,
    layouts: Sequence[GradientLayout],
    links: Mapping[Route, LinkModel],
    across: bool,
    crowded: bool,
) -> str | None:
    """Return the reason why the step time with other units (buckets) cannot be predicted; None = it can be predicted.

    Args:
        before: recorded communication plans.
        after: requested communication plans.
        layouts: sizes of the gradients that each plan divides.
        links: measured latency and bandwidth, by route (transport, algorithm).
        across: True if units are sent between hosts.
        crowded: True if the ranks of a host have more compute threads than processors.
    """
    if tuple(before) == tuple(after):
        return None
    more = sum(len(plan.units) for plan in after) / max(1, sum(len(plan.units) for plan in before))
    if across:
        shares = [handling_ratio(plans, layouts, links) for plans in (before, after)]
        if any(share is not None and share > MAX_HANDLING_RATIO for share in shares):
            return (
                "units (buckets) this small take processor time from computation, which the simulation does not model"
            )
        used = {(plan.transport, unit.algorithm) for plan in (*before, *after) for unit in plan.units}
        if any(links[route].residual > MAX_FIT_ERROR for route in used & links.keys()):
            return "the measurements of the network between hosts contradict each other"
        unknown = None in shares and more > MAX_UNIT_RATIO_UNPROBED
        return SMALLER_UNITS if unknown else None
    if more > MAX_UNIT_RATIO_ON_ONE_HOST:
        return SMALLER_UNITS
    if crowded:
        return "the ranks of a host have more compute threads than processors"
    transports = {plan.transport for plan in (*before, *after)}
    if len(transports) > 1:
        return "the recording does not show the cost of another transport on one host"
    if transports != {TransportKind.SHARED_MEMORY}:
        return "on one host, the cost of messages can be predicted only through shared memory"
    return None


def handling_ratio(
    plans: Sequence[CommPlan], layouts: Sequence[GradientLayout], links: Mapping[Route, LinkModel]
) -> float | None:
    """Return (time to pass all units (buckets) to the network link) / (time to send their bytes).

    Returns None if a route (transport, algorithm) was not probed, so that these times are unknown.
    """
    handling_s = moving_s = 0.0
    for plan, layout in zip(plans, layouts, strict=True):
        for unit in plan.units:
            link = links.get((plan.transport, unit.algorithm))
            if link is None:
                return None
            handling_s += link.host_s
            moving_s += unit.numel * layout.itemsize_bytes / max(link.throughput)
    return handling_s / moving_s if moving_s else 0.0


def plan_refusal(job: JobModel, plans: Mapping[int, CommPlan]) -> str | None:
    """Return the reason why the step time with new communication plans cannot be predicted; None = it can be predicted.

    Args:
        job: recorded job.
        plans: new plans, by number of the flat buffer (of contiguous gradients). Buffers without an entry keep their
            plans.
    """
    return refusal(
        [buffer.plan for buffer in job.buffers],
        [plans.get(buffer.number, buffer.plan) for buffer in job.buffers],
        layouts=[buffer.layout for buffer in job.buffers],
        links=job.links,
        across=job.link is not None,
        crowded=any(group.capacity < len(group.ranks) * group.threads for group in job.processors),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Predicted step time of a recorded job after one change.

    Attributes:
        words: description of the change.
        times: predicted step time, in total and by phase.
        gain: fraction of the step time that the change saves; negative if the step becomes longer.
        low_s, high_s: confidence interval of the step time, at level `CONFIDENCE`.
        is_sure: True if the confidence interval excludes the current step time.
    """

    words: str
    times: MeanStepTimes
    gain: float
    low_s: float
    high_s: float
    is_sure: bool

    @property
    def is_worth_reporting(self) -> bool:
        """Return whether to report the gain to users: it is large enough, and its prediction is precise or certain."""
        return self.gain > MIN_GAIN and (self.is_precise or self.is_sure)

    @property
    def is_open(self) -> bool:
        """Return whether only a trial can show if the change is a gain. The predicted gain is large enough, but the
        confidence interval of the step time is too wide and contains the current step time.
        """
        return self.gain > MIN_GAIN and not self.is_worth_reporting

    @property
    def is_precise(self) -> bool:
        """Return whether the confidence interval is narrow enough to be reported as a prediction."""
        return self.high_s <= MAX_INTERVAL_RATIO * self.low_s

    def overlaps(self, other: Answer) -> bool:
        """Return whether the confidence intervals of two predicted step times overlap. Then the two step times do not
        differ significantly.
        """
        return self.low_s <= other.high_s and other.low_s <= self.high_s

    def describe(self) -> str:
        """Return the prediction as text, such as `320 ms a step (298 to 344), 22 % less`."""
        if not self.is_precise and self.is_sure:
            side = "shorter" if self.gain > 0 else "longer"
            return f"{self.interval} ms a step: {side} than now, but only a trial can show by how much"
        if not self.is_precise:
            return f"{self.interval} ms a step: too uncertain to predict, only a trial can show it"
        change = f"{abs(self.gain):.0%} {'less' if self.gain >= 0 else 'more'}".replace("%", " %")
        doubt = "" if self.is_sure else ", which is within the error"
        return f"{ms(self.times.iteration_s)} a step ({self.interval}), {change}{doubt}"

    def row(self) -> dict[str, Any]:
        """Return the prediction as a dict for JSON."""
        numbers = {"gain": self.gain, "low_s": self.low_s, "high_s": self.high_s}
        numbers |= {"told": self.is_precise, "sure": self.is_sure}
        return {"words": self.words, "iteration_s": self.times.iteration_s, **numbers}

    @property
    def interval(self) -> str:
        """Return the confidence interval of the step time as text in milliseconds, such as `298 to 344`."""
        return f"{milliseconds(self.low_s)} to {milliseconds(self.high_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Replay (simulation) of a job before any change, with which predictions are compared.

    Attributes:
        job: model of the recorded job.
        times: replayed step time of this job.
        priced_s: replayed step time with the recorded communication plan, but with predicted instead of recorded costs
            of units (buckets); None = other plans cannot be predicted.
        error: part of the error |log(true / predicted)| that all predictions share: from the variation between the
            recorded iterations, and from the deviation of the replay from the recording.
    """

    job: JobModel
    times: MeanStepTimes
    priced_s: float | None
    error: float

    @classmethod
    def of(cls, job: JobModel, recorded: MeanStepTimes | None = None, *, error: float = 0.0) -> Baseline:
        """Replay (simulate) a job, as the baseline with which predictions are compared.

        Args:
            job: recorded job, or a changed job.
            recorded: recorded step times; None = the job was changed, so no step times were recorded.
            error: `Baseline.error` of the recorded job. Used only if `recorded` is None.
        """
        times = replayed(play(job))
        priced_s = None
        if job.buffers and not limitations(job):
            with suppress(ReplayError):
                same = with_plans(job, job.plans)
                priced_s = replayed(play(same)).iteration_s
        if recorded is not None and recorded.iteration_s > 0:
            scatter = half_width(recorded.spread_s / recorded.iteration_s, recorded.iterations)
            error = math.hypot(scatter, math.log(times.iteration_s / recorded.iteration_s))
        return cls(job=job, times=times, priced_s=priced_s, error=error)

    def answer(self, words: str, changed: JobModel, *, replanned: bool = False) -> Answer:
        """Replay (simulate) a changed job, and return its predicted step time, compared with this baseline.

        Args:
            words: description of the change.
            changed: model of the changed job.
            replanned: True if the change has replaced the recorded costs of all units (buckets) by predicted costs.
                Then the step time is compared with `priced_s`.
        """
        replay_result, before_s = play(changed), self.times.iteration_s
        times, error = replayed(replay_result), self.error
        if replanned and self.priced_s:
            times = times.scaled(before_s / self.priced_s)
            error = math.hypot(error, math.log(before_s / self.priced_s))
        step_s = times.iteration_s
        if not (before_s > 0 and step_s > 0):
            return Answer(words=words, times=times, gain=0.0, low_s=step_s, high_s=step_s, is_sure=False)
        width = math.hypot(error, self._model_error(changed, math.log(step_s / before_s)))
        low_s, high_s = step_s * math.exp(-width), step_s * math.exp(width)
        # Limit the interval by the computation time. On one host, computation may get faster, too, so there is no
        # limit.
        if changed.link is not None:
            low_s = min(step_s, max(low_s, computation_s(replay_result.graph) / max(1, times.iterations)))
        gain = 1 - step_s / before_s
        return Answer(
            words=words, times=times, gain=gain, low_s=low_s, high_s=high_s, is_sure=not low_s <= before_s <= high_s
        )

    def _model_error(self, changed: JobModel, change: float) -> float:
        before, after = ([buffer.plan for buffer in job.buffers] for job in (self.job, changed))
        count, other = (sum(len(plan.units) for plan in plans) or 1 for plans in (before, after))
        known = BETWEEN_HOSTS if changed.link is not None else ON_ONE_HOST
        return known.any_question + known.step * abs(change) + known.units * abs(math.log(other / count))

    def single_remedies(self) -> tuple[Answer, ...]:
        """Return a predicted step time for each single change that is considered, by decreasing gain. The gain of a
        change may be zero or negative.
        """
        job = self.job
        found = [self.answer(words, changed) for words, changed in _remedies(job)]
        if self.priced_s is not None:
            if (size := best_part_bytes(job)) is not None:
                words = f"{in_words(job, size)}: {line_of_code(size)}"
                found.append(self.answer(words, in_parts(job, size), replanned=True))
            found += [self.answer(words, with_knobs(job, knobs), replanned=True) for words, knobs in _other_cuts(job)]
        return tuple(sorted(found, key=lambda one: -one.gain))


def limitations(job: JobModel) -> tuple[str, ...]:
    """Return one sentence for each kind of change for which the step time of this job cannot be predicted."""
    numbers = {buffer.number for buffer in job.buffers}
    for each in job.iterations:
        for program in each.programs.values():
            if numbers - {number for piece in program for number, _ in piece.ready}:
                return (
                    "the effect of other units cannot be predicted: in at least one iteration a rank had no "
                    "gradients of its own",
                )
    return ()


def _remedies(job: JobModel) -> Iterator[tuple[str, JobModel]]:
    """Yield (description, changed job) for each considered change that does not concern the communication plan."""
    if len(job.ranks) > 1:
        yield "no rank were slower than most", without_stragglers(job)
    if any(
        piece.activity is Activity.DATA for each in job.iterations for mine in each.programs.values() for piece in mine
    ):
        yield "no rank waited for data", with_faster_loader(job, math.inf)
    if (nominal := nominal_link_rate(job)) is not None:
        words = f"the links were twice as fast ({16e-9 * nominal:.3g} Gbit/s)"
        yield words, with_link(job, 2 * nominal)
    if job.units:
        yield "gradients travelled in half as many bytes (bf16 for float32)", with_less_traffic(job, 0.5)


def _other_cuts(job: JobModel) -> Iterator[tuple[str, Knobs]]:
    """Yield (description, knobs or tuned settings) for communication plans with another unit (bucket) size, another
    number of streams (parallel communicators), or both.
    """
    now, layout, plan = job.buffers[0].knobs, job.buffers[0].layout, job.buffers[0].plan
    cut = {plan.units}
    others: list[tuple[str, Knobs | None]] = []
    if job.buffers[0].is_cut_evenly:
        # Vary the size of units (buckets) and the number of streams separately only if the units have equal sizes.
        # Otherwise the settings list each unit with its stream, so that neither can be changed alone.
        streams = best_knobs(job, unit_bytes=(now.unit_bytes,), streams=[n for n in STREAMS if n > now.streams])
        size = best_knobs(job, unit_bytes=[n for n in UNIT_BYTES if n != now.unit_bytes], streams=(now.streams,))
        others = [
            ("" if streams is None else f"there were {streams.streams} streams", streams),
            ("" if size is None else f"units were of {format_bytes(size.unit_bytes)}", size),
        ]
    best = best_knobs(job)
    for words, knobs in [*others, ("" if best is None else f"units were cut otherwise ({best.describe()})", best)]:
        if knobs is not None and (units := knobs.to_plan(layout).units) not in cut:
            cut.add(units)
            yield words, knobs


def best_knobs(
    job: JobModel, *, unit_bytes: Sequence[int] = UNIT_BYTES, streams: Sequence[int] = STREAMS
) -> Knobs | None:
    """Return the knobs (tuned settings) with the shortest predicted step among a few unit (bucket) sizes and numbers of
    streams. The recorded route (transport and algorithm) is kept.

    Returns None if the step time can be predicted for no combination.
    """
    if not job.buffers:
        return None
    now = job.buffers[0].knobs
    mean = coarse(mean_iteration(job), plan_is_fixed=False)
    found: dict[Knobs, float] = {}
    for size in unit_bytes:
        for count in streams:
            knobs = now.but(unit_bytes=size, streams=count, cuts=None)
            try:
                changed = with_knobs(mean, knobs)
                if plan_refusal(job, changed.plans) is None:
                    found[knobs] = replayed(play(changed)).iteration_s
            except (PlanError, ReplayError):
                return None
    return min(found, key=lambda knobs: found[knobs], default=None)


def knobs_of(
    job: JobModel, *, unit_bytes: int | None = None, streams: int | None = None, transport: TransportKind | None = None
) -> Knobs:
    """Return the knobs (tuned settings) of the recorded job, with the given values replaced.

    Raises:
        ReplayError: no gradients were exchanged.
        PlanError: a number is not positive.
    """
    if not job.buffers:
        raise ReplayError(
            "the ranks exchanged no gradients while the job was recorded, so there is no communication plan "
            "(buckets and transport) to change; record a job of at least two ranks whose gradients Sirtaki reduces"
        )
    now = job.buffers[0].knobs
    return now.but(
        unit_bytes=unit_bytes or now.unit_bytes,
        streams=streams or now.streams,
        transport=transport or now.transport,
        cuts=None if unit_bytes or streams else now.cuts,
    )
