"""A synchroniser that tunes itself: where `comm`, `autotune` and `registry` meet.

Every rank runs the same iterations; on rank 0 a coordinator decides, from spans of which all ranks have taken the
minimum, and the others do what it broadcasts. After the warm-up each rank watches its own spans; if all of them say,
by flags that travel with the gradients, that communication takes longer or less long than it did, there is a re-tune.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from sirtaki.autotune.arms.base import Arm
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.assignment import Assignment, Purpose
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.iteration_report import IterationReport
from sirtaki.comm.gradients.pace import Pace
from sirtaki.comm.gradients.synchroniser import Synchroniser
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import CommPlan, Route
from sirtaki.errors import PlanError, TransportError
from sirtaki.settings import Settings

from .assignment_under_way import AssignmentUnderWay
from .before_search import measure, without_planners
from .carried_tuning import CarriedTuning, Carrying
from .coordinator import TuningCoordinator
from .devices import open_router
from .drift import DriftWatch
from .forward_overlap import ForwardOverlap
from .given_plan import given_to_all
from .knob_choices import default_knobs, knob_space, plans_for
from .opening import open_default, still_possible
from .telling import IterationTeller
from .tuning_cache import Hardware, TuningCache, hosts_by_rank

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

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
        self._carrying = Carrying(carried, names, params, control.hosts)
        self.router = open_router(control, settings, params)
        total_bytes = sum(param.numel() * reduction.travels_as(param.dtype).itemsize for param in params)
        self._choose = partial(default_knobs, total_bytes=total_bytes, one_node=control.one_node)
        space = knob_space(self.router, settings, total_bytes)
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
        self._teller = IterationTeller(total_bytes)
        self._arms = arms
        self.tuning = settings.tune and settings.warmup_iterations > 0
        self.overlap = ForwardOverlap(control, wanted=overlaps, tries=self.tuning)
        self._assignment: AssignmentUnderWay | None = None
        self._profiled: IterationReport | None = None
        self._promising: Sequence[Route] = ()  # by the probes of the warm-up
        self._coordinator: TuningCoordinator | None = None
        self._drift: DriftWatch | None = None
        if self.tuning:
            if settings.retune and control.size > 1 and self._space.has_choices:
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
        self._teller.tell(report, number=self._sync.iteration, tuning=self.tuning)
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
                if not self.tuning:
                    self._note_overlap(report, joined=joined)

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
                remembered = self._coordinator.recall(self._sync.layouts, self._space, self._carrying)
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
            must_run = not self.tuning and self._carrying.ranks_stay
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
        self.tuning, self._assignment, self._carrying.kept = False, None, self.knobs
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
        if self._carrying.going_on:
            self._carrying.leave(None if self._assignment is None else self.knobs, self._coordinator)
        if self._coordinator is not None:
            self._coordinator.close()
        if all([self._sync.close(), self.router.release()]):
            self._control.release(self.router.close)
