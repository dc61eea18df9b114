"""The simulator: how long an iteration takes with a plan."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit
from sirtaki.comm.plan import CommPlan, GradientLayout, TransportKind, Unit
from sirtaki.errors import TuningError
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
    """The backward pass of one iteration without any communication.

    Attributes:
        ready_s: when each gradient is ready, `(n_gradients,)`, in the layout's order, counted from the beginning of
            the backward pass. It need not ascend: the layout is ordered by the average position over ranks.
        compute_s: when the backward pass ends; not before the last gradient is ready.
        forward_s: length of the forward pass before it; it matters to iteration times only, never to plans.

    Raises:
        TuningError: there is no gradient, or a time is negative, not finite or after the end of the pass.
    """

    ready_s: tuple[float, ...]
    compute_s: float
    forward_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.ready_s:
            raise TuningError("a profile needs at least one gradient")
        if not all(math.isfinite(time_s) and time_s >= 0 for time_s in (*self.ready_s, self.compute_s, self.forward_s)):
            raise TuningError(
                f"profiled times must be finite and not negative: ready from {min(self.ready_s)} s to "
                f"{max(self.ready_s)} s, backward {self.compute_s} s, forward {self.forward_s} s"
            )
        if max(self.ready_s) > self.compute_s:
            raise TuningError(
                f"a gradient is ready at {max(self.ready_s)} s, after the backward pass ended at {self.compute_s} s"
            )

    @classmethod
    def from_durations(cls, durations_s: Sequence[float], *, forward_s: float = 0.0) -> Profile:
        """The profile of gradients computed one behind the other, `(n_gradients,)` durations in seconds.

        Raises:
            TuningError: a duration is negative or not finite, or there is none.
        """
        if not all(math.isfinite(duration_s) and duration_s >= 0 for duration_s in durations_s):
            raise TuningError(f"durations must be finite and not negative, the smallest is {min(durations_s)} s")
        ready_s = tuple(accumulate(durations_s))
        return cls(ready_s=ready_s, compute_s=ready_s[-1] if ready_s else 0.0, forward_s=forward_s)

    def times(self, factor: float) -> Profile:
        """The same pass, so many times as long."""
        return replace(
            self, ready_s=tuple(factor * time_s for time_s in self.ready_s), compute_s=factor * self.compute_s
        )

    @property
    def issuable_s(self) -> tuple[float, ...]:
        """When each gradient *and all before it* are ready, `(n_gradients,)`: units are issued in a fixed order."""
        return tuple(accumulate(self.ready_s, max))

    @property
    def durations_s(self) -> tuple[float, ...]:
        """Compute time up to each gradient's issue since the one before it, `(n_gradients,)` (LIBRA's b_i).

        What the pass still does after the last gradient counts for that one, so the sum is `compute_s`.
        """
        issuable_s = self.issuable_s
        steps = [after - before for before, after in zip((0.0, *issuable_s[:-1]), issuable_s, strict=True)]
        steps[-1] += self.compute_s - issuable_s[-1]
        return tuple(steps)

    def check_fits(self, layout: GradientLayout) -> None:
        """Does nothing if there is one time for each gradient of `layout`.

        Raises:
            TuningError: the numbers differ.
        """
        if len(self.ready_s) != len(layout.sizes):
            raise TuningError(f"a profile of {len(self.ready_s)} gradients for a layout of {len(layout.sizes)}")


LINK, MESSAGES, PROCESSORS = range(3)
"""Places of servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedIteration:
    """One simulated iteration; times count from the beginning of the backward pass.

    Attributes:
        issue_s: when each unit was handed to its stream, `(n_units,)`.
        start_s: when its stream took it up, `(n_units,)`.
        stop_s: when it was reduced, `(n_units,)`.
        first_ready_s: when the first gradient was ready.
        compute_end_s: when the backward pass ended.
        forward_s: the forward pass before it.
    """

    issue_s: tuple[float, ...]
    start_s: tuple[float, ...]
    stop_s: tuple[float, ...]
    first_ready_s: float
    compute_end_s: float
    forward_s: float

    @property
    def end_s(self) -> float:
        """When both the backward pass and the last unit were done."""
        return max(self.compute_end_s, max(self.stop_s, default=0.0))

    @property
    def span_s(self) -> float:
        """From the first ready gradient to the last reduced one: what trials measure."""
        return max(0.0, max(self.stop_s, default=0.0) - self.first_ready_s)

    @property
    def iteration_s(self) -> float:
        """Forward and backward pass with what communication remains visible."""
        return self.forward_s + self.end_s


def link_servers(link: LinkModel) -> list[SharedResource]:
    """What units share of a link: its throughput, and what hands messages to it; at `LINK` and `MESSAGES`."""
    rates = link.throughput
    shared = SharedResource(name="link", totals=tuple(rate / rates[0] for rate in rates), is_link=True)
    return [shared, SharedResource(name="messages", totals=(1.0,))]


class Simulator:
    """Replays plans of one layout on one link.

    Attributes:
        issuable_s: when each gradient and all before it are ready without communication, `(n_gradients,)`.

    Raises:
        TuningError: profile and layout are of different models.
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
        """The timeline of what these knobs expand to."""
        return self.run(knobs.to_plan(self.layout))

    def run_cuts(self, cuts: Sequence[Cut]) -> SimulatedIteration:
        """The timeline of explicit units on as many streams as they use."""
        streams = 1 + max((cut.stream for cut in cuts), default=0)
        transport = TransportKind.GLOO  # any: the link says what it costs
        return self.run_knobs(Knobs(unit_bytes=1, streams=streams, transport=transport, cuts=tuple(cuts)))

    def run(self, plan: CommPlan) -> SimulatedIteration:
        """The timeline of `plan`.

        Raises:
            TuningError: the plan is of another layout.
        """
        if plan.numel != self.layout.numel:
            raise TuningError(f"a plan of {plan.numel} elements for a layout of {self.layout.numel}")
        played = replay(self._graph(plan))
        n_pieces = len(played.graph.nodes) - len(plan.units)
        return SimulatedIteration(
            issue_s=played.ready_s[n_pieces:],
            start_s=played.start_s[n_pieces:],
            stop_s=played.end_s[n_pieces:],
            first_ready_s=min(self.profile.ready_s),
            compute_end_s=played.end_s[n_pieces - 1],
            forward_s=self.profile.forward_s,
        )

    def _graph(self, plan: CommPlan) -> ReplayGraph:
        """Pieces of the backward pass between moments at which units can be issued, and behind them the units."""
        offsets = self.layout.offsets
        needed_s = [self.issuable_s[bisect_left(offsets, unit.stop) - 1] for unit in plan.units]
        moments_s = sorted({*needed_s, self.profile.compute_s})
        pieces = [self._piece(end_s - begin_s) for begin_s, end_s in zip((0.0, *moments_s), moments_s, strict=False)]
        place_of = {moment_s: place for place, moment_s in enumerate(moments_s)}
        edges: list[Edge] = [(place - 1, place, 0.0) for place in range(1, len(pieces))]
        edges += [(place_of[moment_s], len(pieces) + number, 0.0) for number, moment_s in enumerate(needed_s)]
        units = self._units(plan, last_piece=len(pieces) - 1)
        lanes = ["computation", *(f"stream {stream}" for stream in range(plan.streams))]
        return ReplayGraph(nodes=[*pieces, *units], edges=edges, lanes=lanes, servers=self._servers())

    def _servers(self) -> list[SharedResource]:
        """What computation and units share: the link, what hands messages to it, and the processors."""
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

    def _units(self, plan: CommPlan, *, last_piece: int) -> list[ReplayNode]:
        nodes = []
        for unit in plan.units:
            fixed_s, works, loads = self._unit(unit, last_piece)
            nodes.append(
                ReplayNode(
                    lane=1 + unit.stream,
                    activity=Activity.UNIT,
                    phase=Phase.OTHER,
                    rank=ALL_RANKS,
                    iteration=0,
                    fixed_s=fixed_s,
                    works=works,
                    loads=loads,
                )
            )
        return nodes

    def _unit(self, unit: Unit, last_piece: int) -> tuple[float, tuple[ResourceDemand, ...], tuple[Load, ...]]:
        """Start-up, and what it needs of servers and does to them."""
        link, model = self.link, self.contention
        n_bytes = unit.numel * self.layout.itemsize_bytes
        if self.host is not None:
            moving_s = n_bytes * link.beta_s_per_byte
            processing = self.host.unit(PROCESSORS, link.alpha_s + link.host_s + moving_s, link.busy)
            return 0.0, (ResourceDemand(server=LINK, seconds=moving_s), processing), ()
        messages = (ResourceDemand(server=MESSAGES, seconds=link.host_s),) if link.host_s > 0 else ()
        if model is None:
            return link.alpha_s, (ResourceDemand(server=LINK, seconds=n_bytes * link.beta_s_per_byte), *messages), ()
        threads = unit.threads or model.default_threads
        overlapped = model.overlapped.bytes_per_s(threads)
        sending = ResourceDemand(
            server=LINK,
            seconds=n_bytes / overlapped,
            relieved_by=last_piece,
            relief=overlapped / model.alone.bytes_per_s(threads),
        )
        return link.alpha_s, (sending, *messages), (Load(server=PROCESSORS, amount=threads),)


ITERATIONS = 5
"""That are replayed; the last two count."""


def put_off_iteration_s(
    units: Sequence[ScheduledUnit],
    come_s: Sequence[float],
    pace: IterationPace,
    *,
    forward_s: float,
    link: LinkModel,
) -> float:
    """How long an iteration takes, in seconds, if each parameter is updated when the next forward pass reads it.

    Args:
        units: in the order in which they leave, each behind the one before it on its stream.
        come_s: when each has all its gradients, after the first one has come, `(n_units,)`.
        pace: of the iteration.
        forward_s: from the end of a backward pass to the first gradient of the next, where nothing is waited for.
        link: that all units take.
    """
    cycle, read_s = _Cycle(units, link), [_read_s(unit, pace, forward_s) for unit in units]
    for iteration in range(ITERATIONS):
        cycle.forward(iteration, read_s, forward_s)
        cycle.backward(iteration, come_s, pace.backward_s)
    played = replay(cycle.graph)
    return (played.end_s[cycle.ends[-1]] - played.end_s[cycle.ends[-3]]) / 2


def _read_s(unit: ScheduledUnit, pace: IterationPace, forward_s: float) -> float:
    """When the forward pass first reads what a unit updates."""
    last_s = max((pace.ready_s[index] for index in unit.members), default=0.0)
    return forward_s * (1.0 - min(1.0, last_s / pace.backward_s)) if pace.backward_s > 0.0 else 0.0


class _Cycle:
    """The graph of several iterations, as it is made.

    Attributes:
        ends: place of the node with which each backward pass ends.
    """

    def __init__(self, units: Sequence[ScheduledUnit], link: LinkModel) -> None:
        self._units, self._link = units, link
        streams = dict.fromkeys((unit.route, unit.stream) for unit in units)
        self._lane_of = {stream: place for place, stream in enumerate(streams, start=1)}
        self._nodes, self._edges = list[ReplayNode](), list[Edge]()
        self._computed: int | None = None  # the last piece
        self._under_way: list[int] = []  # the units of the iteration before
        self.ends: list[int] = []

    @property
    def graph(self) -> ReplayGraph:
        lanes = ["computation", *(f"stream {lane}" for lane in self._lane_of.values())]
        return ReplayGraph(nodes=self._nodes, edges=self._edges, lanes=lanes, servers=link_servers(self._link))

    def forward(self, iteration: int, read_s: Sequence[float], forward_s: float) -> None:
        """Pieces between the moments in which units of the iteration before are waited for."""
        moments_s = sorted({0.0, *read_s})
        for begin_s, end_s in pairwise([*moments_s, max(forward_s, moments_s[-1])]):
            place = self._compute(iteration, Phase.FORWARD, end_s - begin_s)
            awaited = [unit for unit, moment_s in zip(self._under_way, read_s, strict=False) if moment_s == begin_s]
            self._edges += [(unit, place, 0.0) for unit in awaited]

    def backward(self, iteration: int, come_s: Sequence[float], backward_s: float) -> None:
        """Pieces between the moments in which units have their gradients, and these units."""
        moments_s = sorted({*come_s, backward_s})
        piece_of = {
            end_s: self._compute(iteration, Phase.BACKWARD, end_s - begin_s)
            for begin_s, end_s in pairwise([0.0, *moments_s])
        }
        self.ends.append(piece_of[moments_s[-1]])
        under_way, last = list[int](), dict[int, int]()
        for unit, moment_s in zip(self._units, come_s, strict=True):
            place, lane = len(self._nodes), self._lane_of[unit.route, unit.stream]
            self._nodes.append(self._sent(iteration, unit, lane))
            self._edges.append((piece_of[moment_s], place, 0.0))
            if lane in last:
                self._edges.append((last[lane], place, 0.0))
            last[lane] = place
            under_way.append(place)
        self._under_way = under_way

    def _compute(self, iteration: int, phase: Phase, seconds: float) -> int:
        place = len(self._nodes)
        self._nodes.append(
            ReplayNode(lane=0, activity=Activity.COMPUTE, phase=phase, rank=0, iteration=iteration, fixed_s=seconds)
        )
        if self._computed is not None:
            self._edges.append((self._computed, place, 0.0))
        self._computed = place
        return place

    def _sent(self, iteration: int, unit: ScheduledUnit, lane: int) -> ReplayNode:
        link = self._link
        works = [ResourceDemand(server=LINK, seconds=unit.n_bytes * link.beta_s_per_byte)]
        if link.host_s > 0.0:
            works.append(ResourceDemand(server=MESSAGES, seconds=link.host_s))
        return ReplayNode(
            lane=lane,
            activity=Activity.UNIT,
            phase=Phase.OTHER,
            rank=ALL_RANKS,
            iteration=iteration,
            fixed_s=link.alpha_s,
            works=tuple(works),
        )
