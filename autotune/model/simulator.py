"""Simulator of a training iteration in which a given plan divides the gradients into units (buckets)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit
from sirtaki.comm.plan import CommPlan, GradientLayout, TransportKind, Unit
from sirtaki.errors import TuningError, require
from sirtaki.measures import LinkModel

from ..knobs import Cut, Knobs
from .fits import ContentionModel
from .replayer import (
    ALL_RANKS,
    Activity,
    Edge,
    Load,
    Phase,
    ReplayGraph,
    ReplayNode,
    ResourceDemand,
    SharedHost,
    SharedResource,
    replay,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times of one iteration's backward pass without communication, relative to the pass's start.

    Attributes:
        ready_s: time at which each gradient is ready, `(n_gradients,)`, in the layout's order. Times may not ascend,
            because the layout orders gradients by their average position over ranks.
        compute_s: end of the backward pass, when all gradients are ready.
        forward_s: duration of the forward pass. Only the predicted iteration time depends on it.

    Raises:
        TuningError: there is no gradient, or a time is negative, not finite or after the end of the pass.
    """

    ready_s: tuple[float, ...]
    compute_s: float
    forward_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.ready_s, "ready_s", "the times of at least one gradient", "none", TuningError)
        finite = all(
            math.isfinite(time_s) and time_s >= 0 for time_s in (*self.ready_s, self.compute_s, self.forward_s)
        )
        rule = "finite times of at least 0 s, with all gradients ready before the end of the backward pass (compute_s)"
        require(finite and max(self.ready_s) <= self.compute_s, "Profile", rule, self, TuningError)

    @classmethod
    def from_durations(cls, durations_s: Sequence[float], *, forward_s: float = 0.0) -> Profile:
        """Create the profile of a backward pass that computes one gradient after the other.

        Args:
            durations_s: computation time of each gradient, `(n_gradients,)`.
            forward_s: duration of the forward pass.

        Raises:
            TuningError: a duration is negative or not finite, or there is no gradient.
        """
        valid = all(math.isfinite(duration_s) and duration_s >= 0 for duration_s in durations_s)
        require(valid, "durations_s", "finite times of at least 0 s", durations_s, TuningError)
        ready_s = tuple(accumulate(durations_s))
        return cls(ready_s=ready_s, compute_s=ready_s[-1] if ready_s else 0.0, forward_s=forward_s)

    def times(self, factor: float) -> Profile:
        """Return a copy of the profile with the times of the backward pass multiplied by `factor`."""
        return replace(
            self, ready_s=tuple(factor * time_s for time_s in self.ready_s), compute_s=factor * self.compute_s
        )

    @property
    def issuable_s(self) -> tuple[float, ...]:
        """Return the time at which each gradient and all gradients before it are ready, `(n_gradients,)`.

        A unit (bucket) must wait for all earlier gradients, because units are launched in the same order on all ranks.
        """
        return tuple(accumulate(self.ready_s, max))

    @property
    def durations_s(self) -> tuple[float, ...]:
        """Return the computation time before each gradient, `(n_gradients,)` (LIBRA's b_i). The sum is `compute_s`.

        Gradients are in the order in which they may be sent. The last entry includes the computation after the last
        gradient.
        """
        issuable_s = self.issuable_s
        steps = [after - before for before, after in zip((0.0, *issuable_s[:-1]), issuable_s, strict=True)]
        steps[-1] += self.compute_s - issuable_s[-1]
        return tuple(steps)

    def check_fits(self, layout: GradientLayout) -> None:
        """Check that the profile has one time for each gradient of `layout`.

        Raises:
            TuningError: the numbers of gradients differ.
        """
        if len(self.ready_s) != len(layout.sizes):
            raise TuningError(
                f"the measured times (profile) are for {len(self.ready_s)} gradients, but this job has "
                f"{len(layout.sizes)} gradients; pass a profile that was measured on this job"
            )


LINK, MESSAGES, PROCESSORS = range(3)
"""Indices of the resources that a simulated iteration shares (`ReplayGraph.servers`).

They are the network link, the processor that sends messages, and the processors that compute.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedIteration:
    """Times of one simulated iteration, relative to the start of the backward pass.

    Attributes:
        issue_s: time at which each unit (bucket) was launched on its stream (parallel connection on CPUs, CUDA stream
            on GPUs), `(n_units,)`.
        start_s: time at which the stream started each unit's all-reduce, `(n_units,)`.
        stop_s: time at which each unit's all-reduce ended, `(n_units,)`.
        first_ready_s: time at which the first gradient was ready.
        compute_end_s: end of the backward pass.
        forward_s: duration of the forward pass.
    """

    issue_s: tuple[float, ...]
    start_s: tuple[float, ...]
    stop_s: tuple[float, ...]
    first_ready_s: float
    compute_end_s: float
    forward_s: float

    @property
    def end_s(self) -> float:
        """Return the time at which both the backward pass and the all-reduces of all units (buckets) have ended."""
        return max(self.compute_end_s, max(self.stop_s, default=0.0))

    @property
    def span_s(self) -> float:
        """Return the communication time that trials measure: from the first ready to the last reduced gradient."""
        return max(0.0, max(self.stop_s, default=0.0) - self.first_ready_s)

    @property
    def iteration_s(self) -> float:
        """Return the iteration's duration: forward pass, backward pass, and the communication after it."""
        return self.forward_s + self.end_s


def link_servers(link: LinkModel) -> list[SharedResource]:
    """Return the resources that all-reduces of units (buckets) share: the link, and the processor that sends."""
    rates = link.throughput
    shared = SharedResource(name="link", totals=tuple(rate / rates[0] for rate in rates), is_link=True)
    return [shared, SharedResource(name="messages", totals=(1.0,))]


def _link_works(link: LinkModel, n_bytes: int) -> tuple[ResourceDemand, ...]:
    messages = (ResourceDemand(server=MESSAGES, seconds=link.host_s),) if link.host_s > 0 else ()
    return ResourceDemand(server=LINK, seconds=n_bytes * link.beta_s_per_byte), *messages


def _unit_node(
    lane: int, fixed_s: float, works: tuple[ResourceDemand, ...], loads: tuple[Load, ...] = (), *, iteration: int = 0
) -> ReplayNode:
    return ReplayNode(
        lane=lane,
        activity=Activity.UNIT,
        phase=Phase.OTHER,
        rank=ALL_RANKS,
        iteration=iteration,
        fixed_s=fixed_s,
        works=works,
        loads=loads,
    )


class Simulator:
    """Simulator of a job's training iterations with different plans, on one link.

    A plan divides the gradients into units (buckets), and assigns these to streams.

    Attributes:
        layout: the job's gradients.
        profile: compute times without communication.
        link: latency and bandwidth model of the link.
        contention: LIBRA's model of how much computation and communication slow each other down; None = they do not.
        host: host on whose processors all ranks compute and communicate; None = other processors communicate.
        issuable_s: time at which each gradient and all gradients before it are ready without communication,
            `(n_gradients,)`.

    Raises:
        TuningError: `profile` and `layout` have different numbers of gradients.
    """

    def __init__(
        self,
        *,
        layout: GradientLayout,
        profile: Profile,
        link: LinkModel,
        contention: ContentionModel | None = None,
        host: SharedHost | None = None,
    ) -> None:
        profile.check_fits(layout)
        self.layout = layout
        self.profile = profile
        self.link = link
        self.contention = contention
        self.host = host
        self.issuable_s = profile.issuable_s

    def run_knobs(self, knobs: Knobs) -> SimulatedIteration:
        """Simulate a training iteration in which these knobs divide the gradients into units (buckets)."""
        return self.run(knobs.to_plan(self.layout))

    def run_cuts(self, cuts: Sequence[Cut]) -> SimulatedIteration:
        """Simulate an iteration with these units (buckets), on as many streams as the units use."""
        streams = 1 + max((cut.stream for cut in cuts), default=0)
        transport = TransportKind.GLOO  # An arbitrary transport, because the times depend only on the link model.
        return self.run_knobs(Knobs(unit_bytes=1, streams=streams, transport=transport, cuts=tuple(cuts)))

    def run(self, plan: CommPlan) -> SimulatedIteration:
        """Simulate a training iteration with a plan, which divides the gradients into units (buckets).

        Raises:
            TuningError: the plan and the job's gradients have different numbers of elements.
        """
        if plan.numel != self.layout.numel:
            raise TuningError(
                f"the communication plan is for {plan.numel} gradient elements, but this job has "
                f"{self.layout.numel}; pass a plan that was made for this job"
            )
        simulated = replay(self._graph(plan))
        n_pieces = len(simulated.graph.nodes) - len(plan.units)
        return SimulatedIteration(
            issue_s=simulated.ready_s[n_pieces:],
            start_s=simulated.start_s[n_pieces:],
            stop_s=simulated.end_s[n_pieces:],
            first_ready_s=min(self.profile.ready_s),
            compute_end_s=simulated.end_s[n_pieces - 1],
            forward_s=self.profile.forward_s,
        )

    def _graph(self, plan: CommPlan) -> ReplayGraph:
        """Create a graph of the operations of the backward pass and the units' (buckets') all-reduces.

        The backward pass is divided at each time at which a unit becomes ready to launch. Each part is one node. These
        nodes precede the units' nodes in the graph.
        """
        offsets = self.layout.offsets
        needed_s = [self.issuable_s[bisect_left(offsets, unit.stop) - 1] for unit in plan.units]
        moments_s = sorted({*needed_s, self.profile.compute_s})
        pieces = [self._piece(end_s - begin_s) for begin_s, end_s in zip((0.0, *moments_s), moments_s, strict=False)]
        place_of = {moment_s: place for place, moment_s in enumerate(moments_s)}
        edges: list[Edge] = [(place - 1, place, 0.0) for place in range(1, len(pieces))]
        edges += [(place_of[moment_s], len(pieces) + number, 0.0) for number, moment_s in enumerate(needed_s)]
        units = [_unit_node(1 + unit.stream, *self._unit(unit, last_piece=len(pieces) - 1)) for unit in plan.units]
        lanes = ["computation", *(f"stream {stream}" for stream in range(plan.streams))]
        return ReplayGraph(nodes=[*pieces, *units], edges=edges, lanes=lanes, servers=self._servers())

    def _servers(self) -> list[SharedResource]:
        """Return the resources for which operations compete: the network link, and the processors.

        On one host, its processors send the messages, too. Between hosts, processors only compute.
        """
        if self.host is not None:
            return [*link_servers(self.link), self.host.server]
        speed = None if self.contention is None else self.contention.compute_speed
        return [*link_servers(self.link), SharedResource(name="processors", totals=(1.0,), speed=speed)]

    def _piece(self, seconds: float) -> ReplayNode:
        works: tuple[ResourceDemand, ...] = ()
        if self.host is not None:
            works = (self.host.computation(PROCESSORS, seconds),)
        elif self.contention is not None:
            works = (ResourceDemand(server=PROCESSORS, seconds=seconds),)
        return ReplayNode(
            lane=0,
            activity=Activity.COMPUTE,
            phase=Phase.BACKWARD,
            rank=0,
            iteration=0,
            fixed_s=0.0 if works else seconds,
            works=works,
        )

    def _unit(self, unit: Unit, last_piece: int) -> tuple[float, tuple[ResourceDemand, ...], tuple[Load, ...]]:
        """Return the costs of the all-reduce of a unit (bucket): a constant time, work on shared resources, and loads.

        A load slows down other operations on a shared resource.
        """
        link, model = self.link, self.contention
        n_bytes = unit.numel * self.layout.itemsize_bytes
        if self.host is not None:
            moving_s = n_bytes * link.beta_s_per_byte
            processing = self.host.unit(PROCESSORS, link.alpha_s + link.host_s + moving_s, link.busy)
            return 0.0, (ResourceDemand(server=LINK, seconds=moving_s), processing), ()
        if model is None:
            return link.alpha_s, _link_works(link, n_bytes), ()
        threads = unit.threads or model.default_threads
        overlapped = model.overlapped.bytes_per_s(threads)
        sending = ResourceDemand(
            server=LINK,
            seconds=n_bytes / overlapped,
            relieved_by=last_piece,
            relief=overlapped / model.alone.bytes_per_s(threads),
        )
        _, *messages = _link_works(link, n_bytes)
        return link.alpha_s, (sending, *messages), (Load(server=PROCESSORS, amount=threads),)


ITERATIONS = 5
"""Number of iterations that `deferred_iteration_s` simulates. The mean time of the last two is its result."""


def deferred_iteration_s(
    units: Sequence[ScheduledUnit],
    complete_s: Sequence[float],
    pace: IterationPace,
    *,
    forward_s: float,
    link: LinkModel,
) -> float:
    """Predict the time of an iteration with deferred updates: a parameter is updated when the forward pass reads it.

    Args:
        units: units (buckets) in the order of their launch. A stream runs its units one after the other.
        complete_s: time from the first ready gradient until all gradients of each unit are ready, `(n_units,)`.
        pace: measured times of the backward pass.
        forward_s: time from the end of a backward pass to the first gradient of the next backward pass, without waiting
            for units.
        link: latency and bandwidth model of the link that reduces all units.
    """
    cycle, read_s = _Cycle(units, link), [_read_s(unit, pace, forward_s) for unit in units]
    for iteration in range(ITERATIONS):
        cycle.forward(iteration, read_s, forward_s)
        cycle.backward(iteration, complete_s, pace.backward_s)
    simulated = replay(cycle.graph)
    return (simulated.end_s[cycle.ends[-1]] - simulated.end_s[cycle.ends[-3]]) / 2


def _read_s(unit: ScheduledUnit, pace: IterationPace, forward_s: float) -> float:
    """Return the time at which the forward pass first reads a parameter whose gradient is in the bucket.

    Modules are assumed to run in the reverse order of the backward pass.
    """
    last_s = max((pace.ready_s[index] for index in unit.members), default=0.0)
    return forward_s * (1.0 - min(1.0, last_s / pace.backward_s)) if pace.backward_s > 0.0 else 0.0


class _Cycle:
    """Builder of a graph of the operations of several successive training iterations.

    Attributes:
        ends: index of the last node of each backward pass.
    """

    def __init__(self, units: Sequence[ScheduledUnit], link: LinkModel) -> None:
        self._units, self._link = units, link
        streams = dict.fromkeys((unit.route, unit.stream) for unit in units)
        self._lane_of = {stream: place for place, stream in enumerate(streams, start=1)}
        self._nodes, self._edges = list[ReplayNode](), list[Edge]()
        self._last_compute: int | None = None  # Index of the last node of computation.
        self._previous_units: list[int] = []  # Indices of the nodes of the previous iteration's units.
        self.ends: list[int] = []

    @property
    def graph(self) -> ReplayGraph:
        lanes = ["computation", *(f"stream {lane}" for lane in self._lane_of.values())]
        return ReplayGraph(nodes=self._nodes, edges=self._edges, lanes=lanes, servers=link_servers(self._link))

    def forward(self, iteration: int, read_s: Sequence[float], forward_s: float) -> None:
        """Add a forward pass to the graph.

        Before it reads parameters, it waits for the unit (bucket) that reduced their gradients in the previous
        iteration. Each wait starts a new node.
        """
        moments_s = sorted({0.0, *read_s})
        for begin_s, end_s in pairwise([*moments_s, max(forward_s, moments_s[-1])]):
            place = self._compute(iteration, Phase.FORWARD, end_s - begin_s)
            awaited = [
                unit for unit, moment_s in zip(self._previous_units, read_s, strict=False) if moment_s == begin_s
            ]
            self._edges += [(unit, place, 0.0) for unit in awaited]

    def backward(self, iteration: int, complete_s: Sequence[float], backward_s: float) -> None:
        """Add a backward pass and its units (buckets) to the graph.

        When all gradients of a unit are ready, a new node of the backward pass starts, and the unit may start, too.
        """
        moments_s = sorted({*complete_s, backward_s})
        piece_of = {
            end_s: self._compute(iteration, Phase.BACKWARD, end_s - begin_s)
            for begin_s, end_s in pairwise([0.0, *moments_s])
        }
        self.ends.append(piece_of[moments_s[-1]])
        new_units, last = list[int](), dict[int, int]()
        for unit, moment_s in zip(self._units, complete_s, strict=True):
            place, lane = len(self._nodes), self._lane_of[unit.route, unit.stream]
            works = _link_works(self._link, unit.n_bytes)
            self._nodes.append(_unit_node(lane, self._link.alpha_s, works, iteration=iteration))
            self._edges.append((piece_of[moment_s], place, 0.0))
            if lane in last:
                self._edges.append((last[lane], place, 0.0))
            last[lane] = place
            new_units.append(place)
        self._previous_units = new_units

    def _compute(self, iteration: int, phase: Phase, seconds: float) -> int:
        place = len(self._nodes)
        self._nodes.append(
            ReplayNode(lane=0, activity=Activity.COMPUTE, phase=phase, rank=0, iteration=iteration, fixed_s=seconds)
        )
        if self._last_compute is not None:
            self._edges.append((self._last_compute, place, 0.0))
        self._last_compute = place
        return place
