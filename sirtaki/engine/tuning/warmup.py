"""The course of a tuning phase inside training, and of what follows when communication has changed."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.session import Assignment, Purpose
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.trial import Arm
from sirtaki.comm.compress import PowerSgd
from sirtaki.comm.gradients.buffers import Pace, Reduction
from sirtaki.comm.gradients.iteration import IterationReport
from sirtaki.comm.gradients.synchroniser import Synchroniser
from sirtaki.comm.plan import CommPlan, GradientLayout, Route, TransportKind
from sirtaki.comm.router import Router
from sirtaki.errors import PlanError, TransportError
from sirtaki.settings import Settings
from sirtaki.watch import watchers
from sirtaki.watch.watchers import IterationEnded

from .cache import Hardware, TuningCache, hosts_by_rank
from .coordinator import TuningCoordinator
from .overlap import ForwardOverlap
from .plans import (
    Carried,
    CarriedTuning,
    default_knobs,
    given_to_all,
    key_of,
    knob_space,
    open_default,
    plans_for,
    still_possible,
)
from .probes import measure, without_planners

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane


class AssignmentUnderWay:
    """An assignment and the spans of its iterations so far.

    Attributes:
        assignment: which.
        spans_s: of the iterations that count, each the shortest of all ranks.
    """

    def __init__(self, assignment: Assignment) -> None:
        """Nothing has run of it."""
        self.assignment, self.spans_s = assignment, list[float]()
        self._to_discard = assignment.discarded_iterations

    def note(self, span_s: float, control: ControlPlane) -> bool:
        """Collective: counts an iteration; whether it was the last one.

        `span_s` of a rank that has joined is not a number: nothing overlaps then, and the iteration shows nothing.
        """
        if self._to_discard > 0:
            self._to_discard -= 1
            return False
        # The last rank to arrive sets the pace; the others' spans hold its lateness.
        shortest_s = float(control.minimum(np.array([-1.0 if math.isnan(span_s) else span_s]))[0])
        if shortest_s < 0.0:
            return False
        self.spans_s.append(shortest_s)
        return len(self.spans_s) >= self.assignment.measured_iterations


SKIPPED = 2
"""Iterations after a change of the setting that are not like later ones."""

REFERENCE = 24
"""Iterations whose median is the reference, and whose spread is the noise."""

ALLOWANCE = math.log(1.25)
LIMIT = 0.3
ENOUGH = 1.8
"""Of the logarithm of a span: what does not count, what one iteration may add, and what the sum must reach."""

USUAL_NOISE = 0.12
"""Where logarithms of spans scatter more than this (standard deviation), the three above grow alike."""

COOL_DOWN = 50
"""Iterations after a first re-tune in which there is no second one; doubled by each that follows soon."""

LONG = 10
"""What comes later than so many cool-downs is like the first again."""

_DEVIATIONS_BETWEEN_TENTHS = 2.56


class DriftWatch:
    """Compares the iterations of one setting with its first ones.

    Attributes:
        pace: what this rank finds.
    """

    def __init__(self) -> None:
        self.pace = Pace.USUAL
        self._cool_down = 0
        self._forget()

    def _forget(self) -> None:
        self.pace = Pace.USUAL
        self._iterations = 0
        self._reference: list[float] = []
        self._usual, self._scale = math.nan, 1.0
        self._slower = self._faster = 0.0
        self._recent: deque[float] = deque(maxlen=7)

    def retuned(self) -> None:
        """A setting was chosen anew because of what this watch has found."""
        soon = self._cool_down > 0 and self._iterations < LONG * self._cool_down
        self._cool_down = 2 * self._cool_down if soon else COOL_DOWN
        self._forget()

    def reordered(self) -> None:
        """Gradients travel in another order from now on, which takes its own time."""
        self._forget()

    @property
    def due(self) -> bool:
        """There may be a re-tune now; the same on all ranks."""
        return self._iterations >= max(SKIPPED + REFERENCE, self._cool_down)

    @property
    def ratio(self) -> float:
        """How many times as long communication takes now; not a number where this rank does not know."""
        return math.exp(median(self._recent) - self._usual) if self._recent else math.nan

    def note(self, span_s: float) -> None:
        """An iteration has ended; its span is not a number on a rank that has joined."""
        self._iterations += 1
        if self._iterations <= SKIPPED or not span_s > 0.0:
            return
        moment = math.log(span_s)
        if len(self._reference) < REFERENCE:
            self._reference.append(moment)
            if len(self._reference) == REFERENCE:
                self._learn()
            return
        self._recent.append(moment)
        excess = (moment - self._usual) / self._scale
        self._slower = min(max(0.0, self._slower + min(excess - ALLOWANCE, LIMIT)), ENOUGH)
        self._faster = min(max(0.0, self._faster + min(-excess - ALLOWANCE, LIMIT)), ENOUGH)
        self.pace = Pace.USUAL
        if self.due and max(self._slower, self._faster) >= ENOUGH:
            self.pace = Pace.SLOWER if self._slower >= ENOUGH else Pace.FASTER

    def _learn(self) -> None:
        ordered = sorted(self._reference)
        tenth = REFERENCE // 10
        noise = (ordered[-1 - tenth] - ordered[tenth]) / _DEVIATIONS_BETWEEN_TENTHS
        self._usual, self._scale = median(ordered), max(1.0, noise / USUAL_NOISE)


logger = logging.getLogger(__name__)


def open_router(control: ControlPlane, settings: Settings, params: Sequence[torch.Tensor]) -> Router:
    """Collective: the router for the gradients of `params`, on whose first GPU they are reduced if any are on one.

    NCCL carries what is on GPUs, unless it is not there, ranks share a GPU, or `SIRTAKI_TRANSPORT=staged`.
    """
    others = {param.device.type for param in params} - {"cpu", "cuda"}
    if others:
        logger.warning("gradients on %s travel through host memory", ", ".join(sorted(others)))
    on_gpus = [param.device for param in params if param.device.type == "cuda"]
    if not on_gpus:
        return Router(control, timeout_s=settings.transport_timeout_s)
    from sirtaki.comm.device import cuda_device
    from sirtaki.comm.nccl_streams.process_group import find_nccl

    index = on_gpus[0].index
    device = cuda_device(torch.cuda.current_device() if index is None else index)
    wanted = settings.transport
    if wanted is TransportKind.STAGED:
        return Router(control, timeout_s=settings.transport_timeout_s, device=device)
    nccl = find_nccl(control, device, forced=wanted is TransportKind.NCCL, timeout_s=settings.transport_timeout_s)
    return Router(control, timeout_s=settings.transport_timeout_s, device=device, nccl=nccl)


NO_LOG = "; no trial log is written"


def without_tuning(settings: Settings, default: Knobs) -> str:
    """What runs in a job that is not tuned, in one line."""
    why = "SIRTAKI_TUNE=0" if not settings.tune else "SIRTAKI_WARMUP_ITERATIONS=0"
    return f"tuning is off ({why}): gradients are reduced by {default.describe()}{NO_LOG if settings.trial_log else ''}"


def _coordinator(
    settings: Settings,
    control: ControlPlane,
    params: Sequence[torch.Tensor],
    *,
    default: Knobs,
    arms: Sequence[Arm] | None,
    on_streams: bool,
) -> TuningCoordinator | None:
    """Collective: on rank 0, None elsewhere."""
    kinds = control.all_gather(Hardware.here(params[0].device)) if params else []
    if control.rank != 0:
        return None
    return TuningCoordinator(
        settings,
        TuningCache(settings, params, hosts_by_rank(control, settings), kinds),
        default=default,
        arms=arms,
        # On a device with streams the first report after a change is of the iteration before it.
        discarded_iterations=2 if on_streams else 1,
        # The ranks of one host communicate on the processors that compute, which no probe has shown.
        presumed=on_streams or not control.one_node,
    )


class TunedSynchroniser:
    """Has gradients reduced, and in the first iterations finds out how.

    Attributes:
        synchroniser: what reduces them; only its iterations are ended here, by `finish`.
        knobs: what runs now.
        router: carries units.
        tuning: the warm-up is not over.
        overlap: whether iterations may end in the next forward pass.
    """

    def __init__(
        self,
        control: ControlPlane,
        settings: Settings,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        reduction: Reduction,
        arms: Sequence[Arm] | None = None,
        carried: CarriedTuning | None = None,
        overlaps: bool = False,
    ) -> None:
        """Collective.

        Args:
            control: the ranks that take part.
            settings: of the job.
            params: parameters whose gradients are reduced, the same on all ranks.
            names: of the parameters.
            reduction: what is done to every gradient.
            arms: search techniques, None = the usual ones.
            carried: of the generations of this job; None where ranks stay.
            overlaps: iterations are to end in the next forward pass; rank 0's holds for all.

        Raises:
            ConfigError: on all ranks; the user's plan cannot be read, and ranks stay.
        """
        self._control = control = control.scope()
        self._given = given_to_all(control, settings.plan, ranks_stay=carried is None)
        self._carried = carried  # None where ranks stay, and nothing is brought nor left
        self._key = "" if carried is None else key_of(names, params)
        self._kept: Knobs | None = None  # by the last warm-up or re-tune of this generation
        self.router = open_router(control, settings, params)
        self.router.between_nodes = reduction.compression is not None
        total_bytes = sum(param.numel() * reduction.travels_as(param.dtype).itemsize for param in params)
        self._choose = partial(default_knobs, total_bytes=total_bytes, one_node=control.one_node)
        space = knob_space(self.router, settings, total_bytes)
        if isinstance(reduction.compression, PowerSgd) and settings.unit_bytes is None:
            # Whole matrices compress more, and a unit takes two rounds however little is left of it.
            low, high = space.unit_bytes
            space = replace(space, unit_bytes=(max(low, high // 4), high))
        self._space, self._default = open_default(space, control, self.router, self._choose)
        self.synchroniser = self._sync = Synchroniser(
            params,
            names,
            control=control,
            router=self.router,
            reduction=reduction,
            default_plan=self._default_plan,
            unused_as_none=settings.unused_as_none,
        )
        self.knobs = self._default
        self._total_bytes, self._told_s = total_bytes, math.nan
        self._arms = arms
        self.tuning = settings.tune and settings.warmup_iterations > 0
        self.overlap = ForwardOverlap(control, wanted=overlaps, tries=self.tuning)
        self._assignment: AssignmentUnderWay | None = None
        self._profiled: IterationReport | None = None
        self._promising: Sequence[Route] = ()  # by the probes of the warm-up
        self._coordinator: TuningCoordinator | None = None
        self._drift: DriftWatch | None = None
        if self.tuning:
            if control.size > 1 and self._space.has_choices:
                self._drift = DriftWatch()
            self._coordinator = _coordinator(
                settings, control, params, default=self._default, arms=arms, on_streams=self.on_streams
            )
        elif control.rank == 0:
            logger.info("%s", without_tuning(settings, self._default))

    def _default_plan(self, layout: GradientLayout) -> CommPlan:
        """Collective: the untuned plan of a new layout, for which there may not be shared memory any more."""
        if self._default.route not in self.router.routes:
            space = still_possible(self._space, self.router)
            self._space, self._default = open_default(space, self._control, self.router, self._choose)
        return replace(self._default, cuts=None).to_plan(layout)

    @property
    def model(self) -> PlanningModel | None:
        """What planners know; on rank 0, None elsewhere and where nothing was probed."""
        return None if self._coordinator is None else self._coordinator.model

    @property
    def on_streams(self) -> bool:
        """Gradients are on a device on which things happen later than they are called."""
        return self.router.device.streams

    @property
    def can_put_off(self) -> bool:
        """The end of this iteration needs no other rank, once all gradients have left."""
        return self.overlap.ready and not self.tuning and self._sync.can_put_off

    def check(self) -> None:
        """Raises what a transport has found out by itself; any thread may ask."""
        self.router.check()

    def finish(self, *, joined: bool = False) -> None:
        """Collective: blocks until all gradients are reduced, and decides what the next iteration runs.

        Args:
            joined: this rank has no data any more and takes part with zeros.
        """
        report = self._sync.finish(joined=joined)
        if watchers.watching:
            self._tell(report)
        if self.tuning and self._coordinator is not None:
            self._coordinator.times.note(report)
        if report.profiled:
            self._after_profiling(report)
        elif not report.ready_s:
            span_s = math.nan if joined else report.span_s
            if self._assignment is not None:
                if self._assignment.note(span_s, self._control):
                    self._record(self._assignment.spans_s)
                    self._next_assignment()
            else:
                if self._drift is not None and not self.overlap.trying:
                    self._watch(self._drift, span_s, self._sync.pace)
                if self.overlap.wanted and not self.tuning:
                    self._note_overlap(report, joined=joined)

    def _tell(self, report: IterationReport) -> None:
        """Tells watchers of an iteration; its step took as long as it is since the one before was told of."""
        before_s, self._told_s = self._told_s, time.perf_counter()
        event = IterationEnded(
            number=self._sync.iteration,
            step_s=self._told_s - before_s,
            communication_s=report.span_s,
            exposed_s=max(0.0, report.span_s - report.backward_s),
            n_bytes=self._total_bytes,
            tuning=self.tuning,
        )
        watchers.tell_all(lambda watcher: watcher.iteration(event))

    # ── the warm-up ──────────────────────────────────────────────────────────────────────────────────────────────

    def _after_profiling(self, report: IterationReport) -> None:
        """Collective: the order is known. The first time, the warm-up begins; later, its current knobs go on."""
        if self.overlap.trials is not None and self.overlap.trying:
            self.knobs = self.overlap.trials.first.knobs
        self.overlap.begin()
        self._profiled = report
        if self._drift is not None:
            self._drift.reordered()
            self._sync.say_pace(Pace.USUAL)
        self._take_given()
        if self.tuning and self._assignment is None:
            remembered = False
            if self._coordinator is not None:
                self._coordinator.default = self._default
                before = None if self._carried is None else self._carried.known.get(self._key)
                remembered = self._coordinator.recall(
                    self._sync.layouts, self._space, before, place=self._control.hosts
                )
            if not self._control.broadcast(remembered):
                self._search()
            self._next_assignment()
        elif self.knobs != self._default:
            try:
                self._apply(self.knobs)
            except (PlanError, TransportError) as err:
                logger.info("%s cannot be run any more: %s", self.knobs.describe(), err)
                self.knobs = self._default

    def _take_given(self) -> None:
        """What the user has given is tried first; where nothing is tuned, it runs. Once."""
        given, self._given = self._given, None
        if given is not None:
            must_run = not self.tuning and self._carried is None
            knobs = given.accepted(self._sync.layouts, self._control, self._space, must_run=must_run)
            if self._coordinator is not None:
                self._coordinator.given = knobs
            elif not self.tuning:
                self.knobs = knobs or self.knobs

    def _search(self, routes: Sequence[Route] = (), *, span_s: float = math.nan) -> None:
        """Collective: measures what a search needs (links of `routes` only, if given), and has it begin.

        `span_s` is what synchronising takes now on this rank; not a number = as when the order was profiled.
        """
        report, layouts = self._profiled, self._sync.layouts
        assert report is not None
        # Planners plan one flat buffer; of several, each would have to know what the others do.
        if self._arms is None and len(layouts) == 1:
            probed = replace(self._space, routes=tuple(routes) or self._space.routes)
            now_s = span_s if span_s > 0.0 else report.span_s
            found = measure(self._control, self.router, probed, default=self._default, span_s=now_s)
            if routes:
                found = found.with_routes(self._space.routes, promising=[*routes, *self._promising])
            else:
                self._promising = found.promising.routes
        else:
            found = without_planners(self._space)
        self._space = found.space
        if self._coordinator is not None:
            ready_s = [*self._sync.in_layout_order(report.ready_s), report.backward_s]  # the flags are there at the end
            between_s = self._coordinator.times.cold_between_s
            self._coordinator.search(
                found.space, found.promising, lambda: found.model(layouts[0], ready_s, report.backward_s, between_s)
            )

    def _record(self, spans_s: list[float]) -> None:
        if self._coordinator is not None:
            self._coordinator.record(spans_s, iteration=self._sync.iteration)
            self._coordinator.times.pause()

    def _next_assignment(self) -> None:
        """Collective: the coordinator's next assignment, on all ranks; ends the warm-up if it is the last."""
        while True:
            now: Assignment = self._control.broadcast(self._coordinator.assignment if self._coordinator else None)
            if now.purpose is Purpose.SEARCH:
                self._search()
                continue
            self._assignment = AssignmentUnderWay(now)
            try:
                self._apply(now.knobs)
            except (PlanError, TransportError) as err:  # on all ranks alike
                if now.knobs == self._default and now.purpose is Purpose.KEPT:
                    raise  # nothing is left
                logger.info("%s cannot be run: %s", now.knobs.describe(), err)
                self._record([math.inf])
                continue
            break
        if now.purpose is Purpose.KEPT:
            self._end()

    def _apply(self, knobs: Knobs) -> None:
        """Collective."""
        self._sync.set_plans(plans_for(knobs, self._sync.layouts))
        self.knobs = knobs

    def _end(self) -> None:
        self.tuning, self._assignment, self._kept = False, None, self.knobs
        self.router.keep_only(plans_for(self.knobs, self._sync.layouts))
        if self._coordinator is not None:
            self._coordinator.end(iteration=self._sync.iteration)

    # ── after the warm-up ────────────────────────────────────────────────────────────────────────────────────────

    def _note_overlap(self, report: IterationReport, *, joined: bool) -> None:
        """Collective now and then: see `ForwardOverlap`."""
        knobs = self.overlap.note(
            report,
            self._sync,
            self.knobs,
            self._space,
            profiled=self._profiled,
            joined=joined,
            link=None if self.model is None else self.model.link_between_hosts(self.knobs.route),
        )
        if knobs is not None:
            self._sync.set_plans(plans_for(knobs, self._sync.layouts))
            self.knobs = knobs
            self.overlap.order(self._sync)
            if self.overlap.trying:
                return
            self.router.keep_only(self._sync.plans)
            if self._drift is not None:
                self._drift.reordered()

    def _watch(self, drift: DriftWatch, span_s: float, agreed: Pace) -> None:
        """Collective if all ranks have agreed that communication has changed; else nothing but arithmetic."""
        if agreed is not Pace.USUAL and drift.due:
            if self.overlap.ready:
                self.overlap.begin()  # a re-tune needs all ranks, who may be anywhere when this iteration ends
            else:
                self._retune(drift, span_s)
            return
        drift.note(span_s)
        if self._coordinator is None or not self._coordinator.failed:
            self._sync.say_pace(drift.pace)

    def _retune(self, drift: DriftWatch, span_s: float) -> None:
        """Collective: a short search begins with what runs now."""
        if self._coordinator is not None:
            self._coordinator.retune(self.knobs, self._sync.layouts, ratio=drift.ratio, iteration=self._sync.iteration)
        drift.retuned()
        self.overlap.forget()
        self._sync.say_pace(Pace.USUAL)
        self.tuning = True
        self._search([route for route in self._space.routes if route == self.knobs.route], span_s=span_s)
        self._next_assignment()

    def remember(self) -> None:
        """Stores what an unfinished warm-up has found, so that the next job goes on from it. Idempotent."""
        if self._coordinator is not None:
            self._coordinator.remember()

    def close(self) -> None:
        """Ends all threads; what an unfinished warm-up has found is stored. Not collective, once.

        What only all ranks together can close is left to the control plane's `reclaim`.
        """
        if self._carried is not None and self._carried.going_on and (self._kept or self._assignment is not None):
            self._carried.known[self._key] = self._left_behind()
        if self._coordinator is not None:
            self._coordinator.close()
        if all([self._sync.close(), self.router.release()]):
            self._control.release(self.router.close)

    def _left_behind(self) -> Carried:
        """For the next generation: what was kept, or how far an unfinished warm-up has come."""
        found = None
        if self._kept is None and self._coordinator is not None:
            found = self._coordinator.hand_over()
        knobs, trials = found or (self._kept or self.knobs, ())
        return Carried(knobs=knobs, settled=self._kept is not None, place=tuple(self._control.hosts), trials=trials)
