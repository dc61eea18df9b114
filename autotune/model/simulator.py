"""One iteration under a plan, replayed: computation beside n streams, exact event by event.

The planners' objective and the tests' environment; it knows no running system.

What is modelled (docs/explanation/planners.md). Units are issued in plan order as soon as all their gradients are
ready. Each stream works through its units in turn: a start-up of α, which takes no throughput, then the transmission.
While n streams transmit, each moves at G(n) / n. At the same time the unit needs the host's processor, which all
units share; it is over when link and processor are both done with it. With a contention model the transmission rate
depends on the unit's threads and on whether computation still runs (LIBRA's p and q), and computation slows down with
the threads of all running units (LIBRA's g). Where all ranks are on one host a unit's start-up and transmission are
work for the processors that compute, too.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import CommPlan, TransportKind, Unit
from sirtaki.errors import TuningError
from sirtaki.link_model import LinkModel

from ..knobs import Cut, Knobs
from .contention import ContentionModel
from .graph import ALL_RANKS, Activity, Edge, Graph, Load, Node, Phase, Server, Work
from .profile import Profile
from .replayer import replay
from .shared_host import SharedHost

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


def link_servers(link: LinkModel) -> list[Server]:
    """What units share of a link: its throughput, and what hands messages to it; at `LINK` and `MESSAGES`."""
    rates = link.throughput
    shared = Server(name="link", totals=tuple(rate / rates[0] for rate in rates), is_link=True)
    return [shared, Server(name="messages", totals=(1.0,))]


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

    def _graph(self, plan: CommPlan) -> Graph:
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
        return Graph(nodes=[*pieces, *units], edges=edges, lanes=lanes, servers=self._servers())

    def _servers(self) -> list[Server]:
        """What computation and units share: the link, what hands messages to it, and the processors."""
        if self.host is not None:
            return [*link_servers(self.link), self.host.server]
        speed = None if self.contention is None else self.contention.compute_speed
        return [*link_servers(self.link), Server(name="processors", totals=(1.0,), speed=speed)]

    def _piece(self, seconds: float) -> Node:
        works: tuple[Work, ...] = ()
        if self.host is not None:
            works = (self.host.computation(PROCESSORS, seconds),)
        elif self.contention is not None:
            works = (Work(server=PROCESSORS, seconds=seconds),)
        return Node(
            lane=0,
            activity=Activity.COMPUTE,
            phase=Phase.BACKWARD,
            rank=0,
            iteration=0,
            fixed_s=0.0 if works else seconds,
            works=works,
        )

    def _units(self, plan: CommPlan, *, last_piece: int) -> list[Node]:
        nodes = []
        for unit in plan.units:
            fixed_s, works, loads = self._unit(unit, last_piece)
            nodes.append(
                Node(
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

    def _unit(self, unit: Unit, last_piece: int) -> tuple[float, tuple[Work, ...], tuple[Load, ...]]:
        """Start-up, and what it needs of servers and does to them."""
        link, model = self.link, self.contention
        n_bytes = unit.numel * self.layout.itemsize_bytes
        if self.host is not None:
            moving_s = n_bytes * link.beta_s_per_byte
            processing = self.host.unit(PROCESSORS, link.alpha_s + moving_s, link.busy)
            return 0.0, (Work(server=LINK, seconds=moving_s), processing), ()
        messages = (Work(server=MESSAGES, seconds=link.host_s),) if link.host_s > 0 else ()
        if model is None:
            return link.alpha_s, (Work(server=LINK, seconds=n_bytes * link.beta_s_per_byte), *messages), ()
        threads = unit.threads or model.default_threads
        overlapped = model.overlapped.bytes_per_s(threads)
        sending = Work(
            server=LINK,
            seconds=n_bytes / overlapped,
            relieved_by=last_piece,
            relief=overlapped / model.alone.bytes_per_s(threads),
        )
        return link.alpha_s, (sending, *messages), (Load(server=PROCESSORS, amount=threads),)
