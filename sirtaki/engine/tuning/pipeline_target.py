"""Tuning of the gradient pipeline of one optimizer: its transports, its search for settings, and its measurements."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch

from sirtaki.autotune.arms.techniques import ArmChoice
from sirtaki.autotune.drift import DriftWatch
from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.meta.session import TuningSession
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.comm.compress import Cost, PowerSgd
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.stragglers import StragglerWatch
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.flags import Drift
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.plan import (
    CommPlan,
    GradientLayout,
    Route,
    TransportKind,
    UnitClass,
    goes_through_sockets,
)
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.engine.console import NO_LOG, TuningProgress, tuning_off
from sirtaki.engine.settings import TRACE, Settings
from sirtaki.errors import ConfigError, PlanError, TransportError
from sirtaki.measures import LinkModel, counted, in_ms
from sirtaki.watch import watchers
from sirtaki.watch.watchers import IterationEnded

from .cache import Hardware, TuningCache, hosts_by_rank
from .controller import TuningController
from .knob_search import KnobSearch
from .overlap import ForwardOverlap
from .plans import (
    Carried,
    CarriedTuning,
    Measured,
    default_knobs,
    given_to_all,
    key_of,
    knob_space,
    measure,
    open_default,
    plans_for,
    still_possible,
    why_fewer_streams,
    without_planners,
)
from .report import describe_lossy, describe_progress, tuning_ahead
from .target import TunableTarget

logger = logging.getLogger(__name__)

NAN_EVERY = 10
"""Interval, in iterations, at which an averaged gradient is checked for NaN. Not every iteration need be checked,
because NaN in parameters stays."""

MEASURED_LOSS = 20
"""Number of iterations after the search in which the precision that compression loses is measured."""


def allowed_compressors(
    control: ControlPlane, settings: Settings, reduction: Reduction, space: KnobSpace, params: Sequence[torch.Tensor]
) -> tuple[str, ...]:
    """Return the compressors that the tuner may use for these gradients, by the settings of rank 0. Collective."""
    allowed: tuple[str, ...] = control.broadcast(settings.lossy)
    why = ""
    if not allowed:
        return ()
    if reduction.compression is not None or reduction.wire_dtype:
        why = "the optimizer's compression= compresses these gradients already"
    elif not settings.tunes:
        why = "tuning is off"
    elif reduction.op is not ReduceOp.SUM:
        why = "gradients are neither summed nor averaged"
    elif not any(param.is_floating_point() for param in params):
        dtypes = ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params}))
        why = f"gradients of {dtypes} cannot be compressed"
    elif not any(goes_through_sockets(route) for route in space.routes):
        why = "no route that is available here uses sockets"
    if why and control.rank == 0:
        logger.warning("SIRTAKI_LOSSY=%s has no effect, because %s", ",".join(allowed), why)
    return () if why else allowed


EMPTY_ROWS = 0.5
"""Share of zero rows in a gradient above which its parameter counts as an embedding."""


def embeddings_among(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """Return the names of the matrices whose averaged gradient consists mostly of zero rows."""

    def empty_rows(gradient: torch.Tensor) -> float:
        return 1.0 - float(gradient.any(dim=1).float().mean())

    gradients = ((name, param.grad) for name, param in named)
    return tuple(
        name
        for name, gradient in gradients
        if gradient is not None and gradient.dim() == 2 and gradient.numel() and EMPTY_ROWS < empty_rows(gradient) < 1.0
    )


def open_router(control: ControlPlane, settings: Settings, params: Sequence[torch.Tensor]) -> Router:
    """Open the router (object that sends gradients over the transports) for the gradients of `params`. Collective.

    NCCL reduces gradients on GPUs, unless it is missing, ranks share a GPU, or the user has set
    `SIRTAKI_TRANSPORT=staged` (gradients are copied to the host and reduced there).

    Raises:
        ConfigError: the parameters are on several devices, or on one that is neither the CPU nor a CUDA GPU.
    """
    places = sorted({str(param.device) for param in params})
    if len(places) > 1 or {param.device.type for param in params} - {"cpu", "cuda"}:
        raise ConfigError(
            f"the parameters are on {' and '.join(places)}; they must all be on the CPU or all on one CUDA GPU: move "
            "the model to one device, and start one process for each GPU"
        )
    if not params or params[0].device.type == "cpu":
        return Router(control, timeout_s=settings.transport_timeout_s)
    from sirtaki.comm.device import cuda_device
    from sirtaki.comm.nccl_streams.transport import find_nccl

    index = params[0].device.index
    device = cuda_device(torch.cuda.current_device() if index is None else index)
    wanted = settings.transport
    if wanted is TransportKind.STAGED:
        return Router(control, timeout_s=settings.transport_timeout_s, device=device)
    nccl = find_nccl(control, device, forced=wanted is TransportKind.NCCL, timeout_s=settings.transport_timeout_s)
    return Router(control, timeout_s=settings.transport_timeout_s, device=device, nccl=nccl)


@cache
def _log_once(text: str) -> None:
    """Log the line `text` once in this process. Log nothing if `text` is ""."""
    if text:
        logger.info("%s", text)


def without_others(settings: Settings) -> str:
    """Return the log line of a job with one rank, which says that nothing is reduced and nothing tuned."""
    return (
        f"the job has one rank, so no gradients are reduced, and nothing is tuned{NO_LOG if settings.trial_log else ''}"
    )


class PipelineTarget(TunableTarget[Knobs]):
    """The gradient pipeline of one optimizer: reduces gradients, and can run with any `Knobs` (communication setting).

    Attributes:
        synchroniser: the pipeline. Call `finish` of this target, not of the pipeline.
        controller: runs the search for the fastest setting.
        knobs: running setting.
        space: settings that may be chosen.
        router: object that sends units (buckets) over the transports.
        tuning: True until the search for the fastest setting has ended.
        overlap: decides whether updates are deferred into the next forward pass; None = the user has not asked for it.
    """

    def __init__(
        self,
        control: ControlPlane,
        settings: Settings,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        reduction: Reduction,
        arms: Sequence[ArmChoice] | None = None,
        carried: CarriedTuning | None = None,
        overlaps: bool = False,
        rank: int | None = None,
        stragglers: StragglerWatch | None = None,
    ) -> None:
        """Open the transports (router) and the gradient pipeline. Collective.

        Args:
            control: control plane of the participating ranks.
            settings: settings of the job.
            params: parameters whose gradients are reduced, the same on all ranks.
            names: names of the parameters.
            reduction: operation, scaling and compression of every gradient.
            arms: search methods (arms); None = the default ones.
            carried: tuning results from before the restarts of an elastic job; None if the job is not elastic.
            overlaps: True to defer updates into the next forward pass. The value of rank 0 is used on all ranks.
            rank: rank of this process in messages; None = its rank in `control`.
            stragglers: gets the time for which this rank waits in each iteration; None = no comparison of ranks.

        Raises:
            ConfigError: the user's plan cannot be read, and the job is not elastic. Raised on all ranks.
        """
        self._control = control = control.scope()
        self._stragglers = stragglers
        self._given = given_to_all(control, settings.plan, ranks_stay=carried is None)
        self._carried = carried  # Tuning results from before restarts. None if the job is not elastic.
        self._key = "" if carried is None else key_of(names, params)
        # Setting that the last search since the last restart of an elastic job has kept.
        self._kept: Knobs | None = None
        self.router = open_router(control, settings, params)
        self.router.compresses = reduction.compression is not None
        total_bytes = sum(param.numel() * reduction.wire_dtype_for(param.dtype).itemsize for param in params)
        self._choose = partial(default_knobs, total_bytes=total_bytes, one_node=control.one_node)
        space = knob_space(self.router, settings, total_bytes)
        if isinstance(reduction.compression, PowerSgd) and settings.unit_bytes is None:
            # Try large units (buckets) only. PowerSGD compresses whole matrices better, and needs two all-reduces for
            # each unit.
            low, high = space.unit_bytes
            space = replace(space, unit_bytes=(max(low, high // 4), high))
        self._allowed = allowed_compressors(control, settings, reduction, space, params)
        self._named, self._embeddings = list(zip(names, params, strict=True)), tuple[str, ...]()
        self._loss_iterations = 0  # Number of further iterations until the precision lost by compression is logged.
        space = replace(space, lossy=self._allowed)
        # All settings, including routes that are never tried in a search. They are used if shared memory is exhausted.
        self._possible = space
        self.space, self.default = open_default(space, control, self.router, self._choose)
        self.synchroniser = self._sync = GradientPipeline(
            params,
            names,
            control=control,
            router=self.router,
            reduction=reduction,
            default_plan=self._default_plan,
            unused_as_none=settings.unused_as_none,
            lossy=bool(self._allowed),
            rank=rank,
        )
        self.knobs = self.default
        self._total_bytes, self._reported_s = total_bytes, math.nan
        self._arms = arms
        # Read averaged gradients (to check for NaN) only on the CPU and without deferred updates. On a GPU, reading an
        # element would block the host. With deferred updates, reading `.grad` would wait for the updates.
        reads_gradients = control.rank == 0 and bool(params) and params[-1].device.type == "cpu" and not overlaps
        self._warns_of_nan = reads_gradients and not settings.check_nan
        self.tuning = settings.tunes
        wanted, tries, refine_until, self._freeze_after = control.broadcast(
            (overlaps, self.tuning, settings.refine_until, settings.freeze_after)
        )
        self.controller = TuningController(control, where=self._sync.where)
        self.overlap = ForwardOverlap(control, self, tries=tries) if wanted else None
        self._profiled: IterationReport | None = None
        self._report = IterationReport(span_s=math.nan, backward_s=math.nan)  # Measured times of the last iteration.
        # Routes that were fast when the network was measured before the first search.
        self._promising: Sequence[Route] = ()
        # Routes whose times must be measured again after a change of communication time.
        self._changed: Sequence[Route] = ()
        self._measured: Measured | None = None
        self._search: KnobSearch | None = None  # Search for the fastest setting. None on ranks other than 0.
        self._drift: DriftWatch | None = None
        if self.tuning:
            if control.size > 1 and self.space.has_choices:
                self._drift = DriftWatch()
                # Do not refine if updates may be deferred into the forward pass. Deferred updates have their own
                # search, which compares iteration times instead of communication times.
                self.refine_until = refine_until if self.overlap is None else 0
            kinds = control.all_gather(Hardware.here(params[0].device)) if params else []
            if control.rank == 0:
                self._search = KnobSearch(
                    settings,
                    TuningCache(settings, params, hosts_by_rank(control, settings), kinds),
                    default=self.default,
                    arms=arms,
                    discarded_iterations=self._discarded_iterations,
                    # Let planners propose settings at once only on GPUs or between hosts. On one host, communication
                    # and compute share the processors, which the measurements before the search do not show.
                    presumed=self.on_streams or not control.one_node,
                    # On one node, the default probably fills the links (NVLink or PCIe) with one NCCL communicator.
                    saturates=self.default.transport is TransportKind.NCCL and control.one_node,
                    where=self._sync.where,
                )
        if control.rank == 0 and self.tuning and settings.streams is None:
            _log_once(why_fewer_streams(self.router, self.default.route, ranks=control.size))
        if control.rank == 0 and not (carried is not None and carried.of(self._key)):
            logger.info(
                "gradients of %s are all-reduced between %d ranks with the setting %s",
                counted(len(params), "parameter"),
                control.size,
                self._intention(settings),
            )

    def _intention(self, settings: Settings) -> str:
        """Return text for the log at the start: the first setting, and whether the job is tuned."""
        if not self.tuning:
            no_log = NO_LOG if settings.trial_log else ""
            return f"{self.default.describe()}; {tuning_off(settings)}{no_log}"
        if not self.space.has_choices:
            return f"{self.default.describe()}; not tuned, because no other setting is possible"
        return f"{self.default.describe()}; {tuning_ahead(settings, discarded_iterations=self._discarded_iterations)}"

    def _default_plan(self, layout: GradientLayout) -> CommPlan:
        """Return the default plan (buckets and streams) for a flat buffer of a new layout. Collective.

        If shared memory is exhausted, choose another default setting first.
        """
        if self.default.route not in self.router.routes:
            space = replace(still_possible(self._possible, self.router), classes=self.space.classes)
            self.space, self.default = open_default(space, self._control, self.router, self._choose)
        return self.default.but(cuts=None).to_plan(layout)

    @property
    def model(self) -> PlanningModel | None:
        """Cost model of the job, from which planners compute settings.

        None if the network was not measured, and on all ranks but rank 0.
        """
        return None if self._search is None else self._search.model

    @property
    def on_streams(self) -> bool:
        """True if the gradients are on a device with streams (a GPU)."""
        return self.router.device.streams

    @property
    def _discarded_iterations(self) -> int:
        # Discard one more iteration on a GPU, where each iteration reports the times of the previous one.
        return 2 if self.on_streams else 1

    @property
    def can_defer(self) -> bool:
        """True if the end of this iteration may be deferred into the next forward pass.

        This requires that the iteration needs no communication after all units (buckets) are launched.
        """
        ready = self.overlap is not None and self.overlap.ready
        return ready and not self.tuning and not self._loss_iterations and self._sync.can_defer

    def finish(self, *, joined: bool = False) -> None:
        """Block until all gradients are reduced, and choose the setting of the next iteration. Collective.

        Args:
            joined: True if this rank has no more data and contributes zeros.
        """
        report = self._sync.finish(joined=joined)
        if self._stragglers is not None:
            counts = not (joined or report.ready_s or self.controller.searching)
            self._stragglers.iteration_ended(max(0.0, report.span_s - report.backward_s), counts=counts)
        if watchers.watching or logger.isEnabledFor(TRACE):
            self._report_iteration(report)
        if self._warns_of_nan and self._sync.iteration % NAN_EVERY == 0:
            self._look_for_nan()
        if self.tuning and self._search is not None:
            self._search.times.note(report)
        if report.profiled:
            self._after_profiling(report)
        elif not report.ready_s:
            self._report = replace(report, span_s=math.nan) if joined else report
            if self.controller.searching:
                if self.overlap is not None:
                    self.overlap.iteration_ended(report, self._sync, profiled=self._profiled, joined=joined)
                self.controller.iteration_ended()
            else:
                self._after_tuning(report, joined=joined)

    def _after_tuning(self, report: IterationReport, *, joined: bool) -> None:
        """Handle the end of an iteration without a search for settings. Collective.

        Detect a lasting change of the communication time, which begins a new search. Without a change, measure the
        error of compression, or prepare deferred updates.
        """
        frozen = self._freeze_after is not None and self._sync.iteration >= self._freeze_after
        if self._drift is not None and not frozen:
            self._watch(self._drift, self._report.span_s, self._sync.drift)
            self.tuning = self.tuning or self.controller.refine(self)
        if self._loss_iterations and not self.tuning:
            self._measure_loss()
        elif self.overlap is not None and not self.tuning:
            self.overlap.iteration_ended(report, self._sync, profiled=self._profiled, joined=joined)

    def _report_iteration(self, report: IterationReport) -> None:
        """Report the times of an iteration to watchers (the user's callbacks), and log them at level TRACE.

        The step time is the time since the previous report.
        """
        before_s, self._reported_s = self._reported_s, time.perf_counter()
        event = IterationEnded(
            number=self._sync.iteration,
            step_s=self._reported_s - before_s,
            communication_s=report.span_s,
            exposed_s=max(0.0, report.span_s - report.backward_s),
            n_bytes=self._total_bytes,
            tuning=self.tuning,
        )
        watchers.notify(lambda watcher: watcher.iteration(event), iteration=event.number)
        if logger.isEnabledFor(TRACE):
            logger.log(
                TRACE,
                "step %d%s: communication takes %s, of which %s after the backward pass, with the setting %s",
                event.number,
                "" if math.isnan(event.step_s) else f" took {in_ms(event.step_s)}",
                in_ms(event.communication_s),
                in_ms(event.exposed_s),
                self.knobs.describe(),
            )

    def _look_for_nan(self) -> None:
        """Warn once if the averaged gradient of the last weight matrix begins with NaN or infinity.

        The last matrix usually belongs to the output layer. Its gradient is NaN if the loss or its input is. Only one
        element is read, because reading all gradients would slow each step down.
        """
        name, param = next((one for one in reversed(self._named) if one[1].dim() > 1), self._named[-1])
        if type(param.grad) is not torch.Tensor or param.grad.layout is not torch.strided or not param.grad.numel():
            return
        if not param.grad[(0,) * param.grad.dim()].isfinite():
            self._warns_of_nan = False
            logger.warning(
                "the averaged gradient of %s has a NaN or infinite element in step %d; to find where it began, set "
                "SIRTAKI_CHECK_NAN=1 (with a gradient scaler, an occasional such step is normal)",
                name,
                self._sync.iteration,
            )

    # ── before the search ────────────────────────────────────────────────────────────────────────────────────────────

    def _after_profiling(self, report: IterationReport) -> None:
        """Handle the end of a profile of the order of gradients. Collective.

        After the first profile, begin the search for the fastest setting. After later profiles, use the chosen setting
        for the flat buffers again, because the flat buffers may have new layouts.
        """
        if self.overlap is not None:
            if self.overlap.trying:
                self.knobs = self.overlap.default.knobs
            self.overlap.begin()
        if self._allowed:
            self._learn_classes(first=self._profiled is None)
        self._profiled = report
        if self._drift is not None:
            self._drift.reordered()
            self._sync.vote_drift(Drift.USUAL)
        self._use_given()
        if self.tuning and not self.controller.tries(self):
            if self._search is not None:
                self._search.default = self.default
            self.controller.begin(self)
        elif self.knobs != self.default:
            try:
                self.apply(self.knobs)
            except (PlanError, TransportError) as err:
                logger.info(
                    "the setting %s no longer works (%s); training continues with the default setting",
                    self.knobs.describe(),
                    err,
                )
                self.knobs = self.default

    def _learn_classes(self, *, first: bool) -> None:
        """Update which classes of units (buckets) exist, such as units of embeddings. Collective.

        The tuner chooses a compressor for each class. If `first`, also detect from the gradients which parameters are
        embeddings.
        """
        if first:
            self._embeddings = self._control.broadcast(embeddings_among(self._named))
        sizes = {self.default.unit_bytes, self.space.unit_bytes[1]}
        found = {
            layout.class_of(unit.start, unit.stop)
            for layout in self._layouts
            for size in sizes
            for unit in self.default.but(unit_bytes=size).to_plan(layout).units
        }
        self.space = replace(self.space, classes=tuple(kind for kind in UnitClass if kind in found))

    @property
    def _layouts(self) -> tuple[GradientLayout, ...]:
        layouts = self._sync.layouts
        if not self._embeddings:
            return layouts
        return tuple(replace(layout, embeddings=self._embeddings) for layout in layouts)

    def _use_given(self) -> None:
        """Make the setting in the user's plan file the first one to try, or use it if nothing is tuned.

        Only the first call has an effect.
        """
        given, self._given = self._given, None
        if given is not None:
            must_run = not self.tuning and self._carried is None
            knobs = given.accepted(self._layouts, self._control, self.space, must_run=must_run)
            if self._search is not None:
                self._search.given = knobs
            elif not self.tuning:
                self.knobs = knobs or self.knobs

    # ── as a target of the controller ────────────────────────────────────────────────────────────────────────────

    @property
    def stays(self) -> Knobs | None:
        """Setting to run while the tuner tries none. None = the untuned default. Set on rank 0 only."""
        return None if self._search is None else self._search.stays

    @stays.setter
    def stays(self, knobs: Knobs | None) -> None:
        if self._search is not None:
            self._search.stays = knobs

    def recall(self) -> TuningSession | None:
        """Return a session (a search in progress) that checks an earlier job's setting. None if there is no such
        setting. Called on rank 0 only.
        """
        assert self._search is not None
        before = [] if self._carried is None else self._carried.of(self._key)
        return self._search.recall(self._layouts, self.space, before, place=self._control.hosts)

    def prepare(self) -> None:
        """Measure latency and bandwidth of each route (transport and algorithm), if planners need them. Collective."""
        assert self._profiled is not None
        # Measure only for a job with one flat buffer, because planners cannot plan several that share the network.
        if self._arms is None and len(self._layouts) == 1:
            probed = replace(self.space, routes=tuple(self._changed) or self.space.routes)
            now_s = self._report.span_s if self._changed and self._report.span_s > 0.0 else self._profiled.span_s
            found = measure(self._control, self.router, probed, default=self.default, span_s=now_s)
            if self._changed:
                found = found.with_routes(self.space.routes, promising=[*self._changed, *self._promising])
            else:
                self._promising = found.promising.routes
        else:
            found = without_planners(self.space)
        self.space, self._measured = found.space, found

    def search(self, session: TuningSession | None) -> TuningSession:
        """Begin a search for the fastest setting, and return its session. Called on rank 0, after `prepare`.

        The search uses the network's times that `prepare` has measured.

        Args:
            session: session that has checked an earlier job's setting and is continued; None = make a new one.
        """
        search, found, report, layouts = self._search, self._measured, self._profiled, self._layouts
        assert search is not None
        assert found is not None
        assert report is not None
        # Times at which gradients become ready. The last item is the time at which the control flags become ready.
        ready_s = [*self._sync.in_layout_order(report.ready_s), report.backward_s]

        def make_model() -> PlanningModel | None:
            return found.model(layouts[0], ready_s, report.backward_s, search.times.cold_between_s)

        return search.search(session, found.space, found.promising, make_model)

    def refine(self, session: TuningSession, iterations_left: int) -> bool:
        """Resume a session that has ended, to try more settings. Return False if further trials are not worthwhile.

        Called on rank 0 only.

        Args:
            session: session of the last search.
            iterations_left: number of training iterations that would profit from a faster setting.
        """
        return self._search is not None and self._search.refine(session, iterations_left, self.space)

    def apply(self, knobs: Knobs) -> None:
        """Use the communication setting `knobs` from the next iteration on. Collective."""
        self._sync.use(plans_for(knobs, self._layouts))
        self.knobs = knobs

    def measured_s(self) -> float:
        """Return the communication time of this iteration in seconds; NaN on a rank without more data (`join()`)."""
        return self._report.span_s

    def record(self, session: TuningSession, spans_s: Sequence[float]) -> None:
        """Record the times of the running setting in the search's session and in the trial log. On rank 0."""
        assert self._search is not None
        self._search.record(session, spans_s, iteration=self._sync.iteration)

    def progress(self, session: TuningSession) -> TuningProgress | None:
        """Return the progress of the first search, to be logged; None for later searches."""
        if self._search is None or self._search.retuning:
            return None
        return describe_progress(session, self._search.times.usual)

    def keep(self) -> None:
        """Handle the end of the search: close the streams (connections) that the kept setting does not use. Collective.

        If the setting compresses gradients, begin to measure the loss.
        """
        if self._drift is not None and self._kept not in (None, self.knobs):
            self._drift.reordered()
        self.tuning, self._kept = False, self.knobs
        self.router.keep_only(plans_for(self.knobs, self._layouts))
        self._loss_iterations = MEASURED_LOSS if self.knobs.lossy else 0
        if self._sync.compressed is not None:
            self._sync.compressed.cost()
            self._sync.compressed.measures = bool(self.knobs.lossy)

    def report(self, session: TuningSession) -> None:
        """Store and log the result of the search. On rank 0."""
        if self._search is not None:
            self._search.report(session, iteration=self._sync.iteration)

    # ── after the search ─────────────────────────────────────────────────────────────────────────────────────────

    def _measure_loss(self) -> None:
        """Count an iteration in which the loss of compression is measured. Collective.

        After the last one, log the loss over all ranks on rank 0.
        """
        self._loss_iterations -= 1
        compressed = self._sync.compressed
        if self._loss_iterations or compressed is None:
            return
        compressed.measures = False
        cost = Cost(*self._control.total(np.array(compressed.cost())).tolist())
        if self._control.rank == 0:
            logger.info("%s", describe_lossy(self.knobs, cost, MEASURED_LOSS, "all ranks"))

    def keep_overlap(self) -> None:
        """Close the streams (connections) that only the search for deferred updates needed. Collective."""
        self.router.keep_only(self._sync.plans)
        if self._drift is not None:
            self._drift.reordered()

    @property
    def link_and_forward_s(self) -> tuple[LinkModel | None, float]:
        """Model of the latency and bandwidth between hosts, and the usual forward time in seconds. Used on rank 0 only.

        The forward time is that from the last reduced gradient of a step to the first ready gradient of the next step.
        (None, 0.0) while these are not measured.
        """
        usual = None if self._search is None else self._search.times.usual
        if usual is None or self.model is None:
            return None, 0.0
        return self.model.link_between_hosts(self.knobs.route), usual.between_s

    def _watch(self, drift: DriftWatch, span_s: float, agreed: Drift) -> None:
        """Watch whether communication has become slower or faster than usual, from an iteration's time `span_s`.

        Report this rank's finding to the other ranks. If the ranks have `agreed` that it has changed, begin a new
        search for the fastest setting. The search is collective.
        """
        if agreed is not Drift.USUAL and drift.due:
            if self.overlap is not None and self.overlap.ready:
                # Stop deferring updates first, because a search needs all ranks at the same point.
                self.overlap.begin()
            else:
                self._retune(drift)
            return
        drift.add(span_s)
        if not self.controller.failed:
            self._sync.vote_drift(drift.drift)

    def _retune(self, drift: DriftWatch) -> None:
        """Begin a short search for a setting that is faster than the running one. Collective."""
        if (search := self._search) is not None:
            iteration = self._sync.iteration
            self.controller.attempt(
                lambda: search.retune(self.knobs, self._layouts, ratio=drift.ratio, iteration=iteration)
            )
        drift.retuned()
        if self.overlap is not None:
            self.overlap.forget()
        self._sync.vote_drift(Drift.USUAL)
        self.tuning = True
        self._changed = [route for route in self.space.routes if route == self.knobs.route]
        self.controller.begin(self, recalls=False)

    def remember(self) -> None:
        """Store the trials of an unfinished search in the registry, so that the next job continues it. Idempotent."""
        if (search := self._search) is not None:
            session = self.controller.release(self)
            self.controller.attempt(lambda: search.remember(session))

    def close(self) -> None:
        """End all threads, and store the trials of an unfinished search. Called once.

        The transports stay open until `ControlPlane.reclaim` closes them, because closing them is collective.
        """
        if self._carried is not None and self._carried.going_on and (self._kept or self.controller.tries(self)):
            self._carried.leave(self._key, self._left_behind())
        compressed, iterations = self._sync.compressed, MEASURED_LOSS - self._loss_iterations
        if self._loss_iterations and iterations and compressed is not None and self._search is not None:
            logger.info("%s", describe_lossy(self.knobs, compressed.cost(), iterations, "rank 0"))
        self.remember()
        if (search := self._search) is not None:
            self.controller.attempt(search.close)
        if all([self._sync.close(), self.router.release()]):
            self._control.release(self.router.close)

    def _left_behind(self) -> Carried:
        """Return the result and the trials of the last search, which an elastic job uses again after a restart."""
        session = self.controller.release(self)
        found = None if session is None else session.result
        knobs = self._kept or (self.knobs if found is None else found.knobs)
        return Carried(
            knobs=knobs,
            settled=self._kept is not None,
            place=tuple(self._control.hosts),
            trials=() if session is None else session.trials,
            gain=found.gain if found is not None and found.knobs == knobs else None,
        )
