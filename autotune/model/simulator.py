"""Replays one iteration under a plan: computation beside n streams, exact event by event.

The planners' objective and the tests' environment; it knows no running system.

What is modelled (docs/explanation/planners.md). Units are issued in plan order as soon as all their gradients are
ready. Each stream works through its units in turn: a start-up of α, which takes no throughput, then the transmission.
While n streams transmit, each moves at G(n) / n. At the same time the unit needs the host's processor, which all
units share; it is over when link and processor are both done with it. With a contention model the transmission rate
depends on the unit's threads and on whether computation still runs (LIBRA's p and q), and computation slows down with
the threads of all running units (LIBRA's g). All rates are piecewise constant, so the event times are exact.

Equal shares allow one clock for all transmissions, which advances by the share G(n) / (n G(1)) a second: a unit that
would need w seconds alone ends when that clock has gone w further, whatever starts or ends in between. The processor
has a clock of its own in the same way, at 1 / n a second.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import CommPlan, TransportKind
from sirtaki.errors import TuningError
from sirtaki.link_model import LinkModel

from ..knobs import Cut, Knobs
from .contention import ContentionModel
from .profile import Profile


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
    ) -> None:
        profile.check_fits(layout)
        self.layout = layout
        self.profile = profile
        self.link = link
        self.contention = contention
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
        offsets = self.layout.offsets
        needed_s = [self.issuable_s[bisect_left(offsets, unit.stop) - 1] for unit in plan.units]
        works_s, residual_factors, threads = self._transmissions(plan)
        alone = self.link.throughput[0]
        times = _replay(
            needed_s=needed_s,
            streams=[unit.stream for unit in plan.units],
            n_streams=plan.streams,
            works_s=works_s,
            residual_factors=residual_factors,
            threads=threads,
            alpha_s=self.link.alpha_s,
            host_s=self.link.host_s,
            shares=[math.inf, *(self.link.total_bytes_per_s(n) / (n * alone) for n in range(1, plan.streams + 1))],
            compute_s=self.profile.compute_s,
            contention=self.contention,
        )
        return SimulatedIteration(
            issue_s=tuple(times.issue_s),
            start_s=tuple(times.start_s),
            stop_s=tuple(times.stop_s),
            first_ready_s=min(self.profile.ready_s),
            compute_end_s=times.compute_end_s,
            forward_s=self.profile.forward_s,
        )

    def _transmissions(self, plan: CommPlan) -> tuple[list[float], list[float], list[int]]:
        """Of each unit: seconds alone beside computation, factor on that without computation, and threads."""
        sizes = [(unit.stop - unit.start) * self.layout.itemsize_bytes for unit in plan.units]
        model = self.contention
        if model is None:
            beta = self.link.beta_s_per_byte
            return [size * beta for size in sizes], [], []
        threads = [unit.threads or model.default_threads for unit in plan.units]
        overlapped = {r: model.overlapped.bytes_per_s(r) for r in set(threads)}
        factor = {r: overlapped[r] / model.alone.bytes_per_s(r) for r in overlapped}
        works_s = [size / overlapped[r] for size, r in zip(sizes, threads, strict=True)]
        return works_s, [factor[r] for r in threads], threads


@dataclass(slots=True)
class _Times:
    issue_s: list[float]
    start_s: list[float]
    stop_s: list[float]
    compute_end_s: float


def _replay(
    *,
    needed_s: list[float],
    streams: list[int],
    n_streams: int,
    works_s: list[float],
    residual_factors: list[float],
    threads: list[int],
    alpha_s: float,
    host_s: float,
    shares: list[float],
    compute_s: float,
    contention: ContentionModel | None,
) -> _Times:
    """The event loop.

    `now` is wall time, `computed` the compute work done, `clock` the shared transmission clock, `host_clock` the shared
    processor's.
    """
    n_units = len(needed_s)
    times = _Times([0.0] * n_units, [0.0] * n_units, [0.0] * n_units, compute_s)
    waiting: list[deque[int]] = [deque() for _ in range(n_streams)]
    busy = [False] * n_streams
    starting: deque[tuple[float, int]] = deque()  # (end of start-up, unit); α is one constant, so it is in order
    sending: list[tuple[float, int]] = []  # heap of (clock at which it ends, unit)
    processing: deque[tuple[float, int]] = deque()  # (host clock at which it ends, unit); equal work, so in order
    half_done: set[int] = set()  # units that link or processor is done with
    now = computed = clock = host_clock = 0.0
    issued = done = running_threads = 0
    speed = 1.0
    computing = contention is not None
    while done < n_units or computing:
        share = shares[len(sending)]
        at_finish = now + (sending[0][0] - clock) / share if sending else math.inf
        at_processed = now + (processing[0][0] - host_clock) * len(processing) if processing else math.inf
        at_sending = starting[0][0] if starting else math.inf
        at_issue = now + (needed_s[issued] - computed) / speed if issued < n_units else math.inf
        at_end = now + (compute_s - computed) / speed if computing else math.inf
        before = now
        now = max(now, min(at_finish, at_processed, at_sending, at_issue, at_end))
        computed += (now - before) * speed
        if sending:
            clock += (now - before) * share
        if processing:
            host_clock += (now - before) / len(processing)
        freed = -1
        if at_finish <= now or at_processed <= now:
            if at_finish <= now:
                clock, unit = heappop(sending)
            else:
                host_clock, unit = processing.popleft()
            if host_s > 0 and unit not in half_done:
                half_done.add(unit)
                continue
            times.stop_s[unit] = now
            done += 1
            freed = streams[unit]
            busy[freed] = False
            if contention is not None:
                running_threads -= threads[unit]
        elif at_sending <= now:
            _, unit = starting.popleft()
            work_s = works_s[unit]
            if contention is not None and not computing:
                work_s *= residual_factors[unit]
            heappush(sending, (clock + work_s, unit))
            if host_s > 0:
                processing.append((host_clock + host_s, unit))
        elif at_issue <= now:
            freed = streams[issued]
            computed = max(computed, needed_s[issued])
            times.issue_s[issued] = now
            waiting[freed].append(issued)
            issued += 1
        else:
            computing = False
            times.compute_end_s = now
            computed = compute_s
            sending = [(clock + (end - clock) * residual_factors[unit], unit) for end, unit in sending]
            heapify(sending)
        if freed >= 0 and not busy[freed] and waiting[freed]:
            unit = waiting[freed].popleft()
            busy[freed] = True
            times.start_s[unit] = now
            starting.append((now + alpha_s, unit))
            if contention is not None:
                running_threads += threads[unit]
        if contention is not None:
            speed = contention.compute_speed(running_threads) if running_threads else 1.0
    return times
