"""A synchroniser that tunes itself: where `comm`, `autotune` and `registry` meet.

Every rank runs the same iterations; rank 0 holds the warm-up session and decides, from spans of which all ranks have
taken the minimum, and the others do what it broadcasts. After the warm-up nothing of this costs anything.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.autotune.arms.base import Arm
from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace
from sirtaki.autotune.meta.auc_bandit import window_for
from sirtaki.autotune.meta.bandit_arm import BanditArm
from sirtaki.autotune.meta.ensemble import default_arms
from sirtaki.autotune.meta.session import Assignment, Purpose, SessionResult, WarmupSession
from sirtaki.autotune.model.link import LinkModel
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.in_flight import InFlight
from sirtaki.comm.gradients.synchroniser import IterationReport, Synchroniser
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, CommPlan, Route, TransportKind
from sirtaki.comm.router import Router
from sirtaki.errors import ConfigError, PlanError, TransportError
from sirtaki.settings import Settings

from .contention_probe import ThreadProbe, probe_threads, threads_matter
from .devices import open_router
from .opening import open_default, still_possible
from .probes import narrowed, planning_model, probe_routes
from .trial_log import TrialLogWriter
from .tuning_cache import CacheHit, Hardware, TuningCache

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

DEFAULT_UNITS = 16
DEFAULT_UNIT_BYTES = (512 * KIB, 4 * MIB)
DEFAULT_UNIT_BYTES_NCCL = (4 * MIB, 32 * MIB)
"""Untuned, a model is sent in about so many units of a size between these: enough to overlap, few to start up.

Between GPUs, which are faster against the start-up, they are about as large as DDP's buckets of 25 MiB.
"""

DEFAULT_STREAMS_ONE_NODE = 1
DEFAULT_STREAMS = 4
"""Between nodes one flow may be capped; four fill most links and cost little on those that one fills."""

STREAM_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
PROGRESS_EVERY_S = 5.0
PROBE_S = 0.5
"""What probing may take, besides twice the time that synchronising takes."""

TRIAL_ITERATIONS = 3  # discarded and measured, for the bandit's window


def knob_space(router: Router, settings: Settings, total_bytes: int) -> KnobSpace:
    """What may be tuned here: what the router can do, less what the user has fixed.

    Raises:
        ConfigError: the user has fixed something that this job cannot do.
    """
    routes = tuple(
        (kind, algorithm)
        for kind, algorithm in router.routes
        if settings.transport in (None, kind) and settings.algorithm in (None, algorithm)
    )
    if not routes:
        possible = ", ".join(f"{kind.value} {algorithm.value}" for kind, algorithm in router.routes)
        raise ConfigError(f"the transport and algorithm asked for are not possible here; possible: {possible}")
    limit = router.max_streams(routes)
    if settings.streams is not None and settings.streams > limit:
        raise ConfigError(
            f"SIRTAKI_STREAMS={settings.streams} is more than the {limit} possible here: {router.why_not_more(routes)}"
        )
    largest = min(LARGEST_UNIT_BYTES, max(SMALLEST_UNIT_BYTES, 1 << (total_bytes - 1).bit_length()))
    return KnobSpace(
        routes=routes,
        threads=(settings.threads,) if settings.threads and router.threads() else (None, *router.threads()),
        unit_bytes=(settings.unit_bytes,) * 2 if settings.unit_bytes else (SMALLEST_UNIT_BYTES, largest),
        streams=(settings.streams,) if settings.streams else tuple(n for n in STREAM_COUNTS if n <= limit),
    )


def default_knobs(space: KnobSpace, *, total_bytes: int, one_node: bool) -> Knobs:
    """What runs untuned: the best guess that lies in the space."""
    low, high = space.unit_bytes
    transport, algorithm = space.routes[0]
    smallest, largest = DEFAULT_UNIT_BYTES_NCCL if transport is TransportKind.NCCL else DEFAULT_UNIT_BYTES
    wanted = 1 << max(0, total_bytes // DEFAULT_UNITS - 1).bit_length()
    unit_bytes = min(max(wanted, smallest), largest)
    streams = DEFAULT_STREAMS_ONE_NODE if one_node else DEFAULT_STREAMS
    return Knobs(
        unit_bytes=min(max(unit_bytes, low), high),
        streams=max((n for n in space.streams if n <= streams), default=space.streams[0]),
        transport=transport,
        algorithm=algorithm,
        threads=space.threads[0],
    )


def plans_for(knobs: Knobs, layouts: Sequence[GradientLayout]) -> list[CommPlan]:
    """One plan a layout; explicit cuts belong to the first, the others are cut uniformly."""
    return [
        (knobs if number == 0 else replace(knobs, cuts=None)).to_plan(layout) for number, layout in enumerate(layouts)
    ]


class TunedSynchroniser:
    """Reduces gradients, and in the first iterations finds out how."""

    def __init__(
        self,
        control: ControlPlane,
        settings: Settings,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        reduction: Reduction,
        arms: Sequence[Arm] | None,
    ) -> None:
        """Collective.

        Args:
            control: the ranks that take part.
            settings: of the job.
            params: parameters whose gradients are reduced, the same on all ranks.
            names: of the parameters.
            reduction: what is done to every gradient.
            arms: search techniques, None = the usual ones.
        """
        self._control, self._settings = control, settings
        self._router = open_router(control, settings, params)
        total_bytes = sum(param.numel() * reduction.travels_as(param.dtype).itemsize for param in params)
        self._choose = partial(default_knobs, total_bytes=total_bytes, one_node=control.one_node)
        space = knob_space(self._router, settings, total_bytes)
        self._space, self._default = open_default(space, control, self._router, self._choose)
        self._sync = Synchroniser(
            params,
            names,
            control=control,
            router=self._router,
            reduction=reduction,
            default_plan=self._default_plan,
            unused_as_none=settings.unused_as_none,
        )
        self._knobs = self._default
        self.ready, self.reduce = self._sync.ready, self._sync.reduce
        self.contribute_zeros = self._sync.contribute_zeros
        self._arms = arms
        self._decides = control.rank == 0
        self._tuning = settings.tune and settings.warmup_iterations > 0
        self._assignment: Assignment | None = None
        self._to_discard = 0
        self._spans_s: list[float] = []
        self._cache: TuningCache | None = None
        self._bandit: BanditArm | None = None
        self._session: WarmupSession | None = None
        self._model: PlanningModel | None = None
        kinds = control.all_gather(Hardware.here(params[0].device)) if self._tuning and params else []
        if self._decides and self._tuning:
            # Nodes simulated by a setting count as hosts, so that their results are not taken for one node's.
            simulated = control.local_size if settings.local_size else control.size
            hosts = [f"{host}/{rank // simulated}" for rank, host in enumerate(control.hosts)]
            self._cache = TuningCache(settings, params, hosts, kinds)
            self._log = TrialLogWriter(settings.trial_log)
        self._told_s = -math.inf
        self._finished_s = math.nan
        self._between_s = math.nan

    def _default_plan(self, layout: GradientLayout) -> CommPlan:
        """Collective: the untuned plan of a new layout, for which there may not be shared memory any more."""
        if (self._default.transport, self._default.algorithm) not in self._router.routes:
            space = still_possible(self._space, self._router)
            self._space, self._default = open_default(space, self._control, self._router, self._choose)
        return replace(self._default, cuts=None).to_plan(layout)

    @property
    def iteration(self) -> int:
        """Iterations finished so far."""
        return self._sync.iteration

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""
        return self._sync.pending

    @property
    def knobs(self) -> Knobs:
        """What runs now."""
        return self._knobs

    @property
    def tuning(self) -> bool:
        """The warm-up is not over."""
        return self._tuning

    @property
    def on_streams(self) -> bool:
        """Gradients are on a device on which things happen later than they are called."""
        return self._router.device.streams

    @property
    def in_flight(self) -> InFlight:
        """What the device may still be busy with."""
        return self._sync.in_flight

    def check(self) -> None:
        """Raises what a transport has found out by itself; any thread may ask."""
        self._router.check()

    def missing_names(self) -> list[str]:
        """Parameters whose gradients have not come in this iteration."""
        return self._sync.missing_names()

    @property
    def can_reduce(self) -> bool:
        """Every gradient of this iteration has come; see `Synchroniser.reduce`."""
        return self._sync.can_reduce

    @property
    def profiling(self) -> bool:
        """The order of the gradients is profiled in this iteration; the same on all ranks."""
        return self._sync.profiling

    def finish(self, *, joined: bool = False) -> None:
        """Collective: blocks until all gradients are reduced, and decides what the next iteration runs.

        Args:
            joined: this rank has no data any more and takes part with zeros.
        """
        report = self._sync.finish(joined=joined)
        if report.ready_s:
            finished_s = time.perf_counter()
            self._between_s, self._finished_s = finished_s - report.span_s - self._finished_s, finished_s
        if report.profiled:
            self._after_profiling(report)
        elif self._assignment is not None and not report.ready_s:
            self._after_iteration(math.nan if joined else report.span_s)

    # ── the warm-up ──────────────────────────────────────────────────────────────────────────────────────────────

    def _after_profiling(self, report: IterationReport) -> None:
        """Collective: the order is known. The first time, the warm-up begins; later, its present knobs go on."""
        if self._tuning and self._assignment is None:
            hit = self._recall()
            self._bandit = self._make_bandit(report, probe=hit.exact is None)
            if self._bandit is not None:
                self._session = self._make_session(self._bandit, hit)
            self._next_assignment()
        elif self._knobs != self._default:
            try:
                self._apply(self._knobs)
            except (PlanError, TransportError) as err:
                logger.info("%s cannot be run any more: %s", self._knobs.describe(), err)
                self._knobs = self._default

    def _recall(self) -> CacheHit:
        """Collective: what an earlier job has left."""
        hit = self._cache.recall(self._sync.layouts[0], self._space) if self._cache is not None else None
        if hit is not None and hit.message:
            logger.info("%s", hit.message)
        known: CacheHit = self._control.broadcast(hit)
        return known

    def _make_bandit(self, report: IterationReport, *, probe: bool) -> BanditArm | None:
        """Collective: the bandit on the deciding rank, None on the others; `probe` = measure for the planners."""
        settings, layouts = self._settings, self._sync.layouts
        planners: list[Arm] = []
        threads: list[ThreadProbe] = []
        # Planners plan one flat buffer; of several, each would have to know what the others do.
        if probe and self._arms is None and len(layouts) == 1:
            probes = probe_routes(
                self._control,
                self._router,
                self._space.routes,
                max_streams=self._space.streams[-1],
                budget_s=PROBE_S + 2 * report.span_s,
            )
            self._space = narrowed(still_possible(self._space, self._router), probes, default=self._default)
            threads = self._probe_threads()
            ready_s = [*self._sync.in_layout_order(report.ready_s), report.backward_s]  # the flags are there at the end
            forward_s = self._between_s if math.isfinite(self._between_s) else 0.0
            if self._decides and (
                model := planning_model(
                    layouts[0], ready_s, report.backward_s, probes, forward_s=forward_s, threads=threads
                )
            ):
                self._model = model
                self._log.knows(model)
                planners = list(make_planners(space=self._space, model=model))
        if probe and not threads:
            self._space = replace(self._space, threads=self._space.threads[:1])
        if not self._decides:
            return None
        rng = np.random.default_rng(settings.seed)
        if self._arms is not None:
            window = window_for(settings.warmup_iterations // TRIAL_ITERATIONS, len(self._arms))
            return BanditArm(self._arms, rng=rng, window=window)
        return default_arms(space=self._space, rng=rng, budget_iterations=settings.warmup_iterations, planners=planners)

    def _probe_threads(self) -> list[ThreadProbe]:
        """Collective: what thread allowances do on the default's route; empty where they make no difference."""
        if len(self._space.threads) == 1:
            return []
        found = probe_threads(self._control, self._router, self._space.routes[0])
        return found if threads_matter(found) else []

    def _make_session(self, arm: Arm, hit: CacheHit) -> WarmupSession:
        layouts = self._sync.layouts

        def identity(knobs: Knobs) -> Hashable:
            return tuple(plan.fingerprint() for plan in plans_for(knobs, layouts))

        settings = self._settings
        assert self._cache is not None
        proposals = self._cache.first_proposals(self._space, self._model)
        for proposal in proposals:
            logger.info("%s", proposal.message)
        return WarmupSession(
            space=self._space,
            default=self._default,
            arm=arm,
            rng=np.random.default_rng(settings.seed),
            budget_iterations=settings.warmup_iterations,
            # On a device with streams the first report after a change is of the iteration before it.
            discarded_iterations=2 if self._router.device.streams else 1,
            exact=hit.exact,
            seeds=[proposal.knobs for proposal in proposals],
            history=hit.history,
            identity=identity,
        )

    def _after_iteration(self, span_s: float) -> None:
        """Collective: counts this iteration for the present assignment, and takes the next one if it is complete.

        `span_s` of a rank that has joined is not a number: nothing overlaps then, and the iteration shows nothing.
        """
        if self._to_discard > 0:
            self._to_discard -= 1
            return
        assert self._assignment is not None
        # The last rank to arrive sets the pace; the others' spans hold its lateness.
        shortest_s = float(self._control.minimum(np.array([-1.0 if math.isnan(span_s) else span_s]))[0])
        if shortest_s < 0.0:
            return
        self._spans_s.append(shortest_s)
        if len(self._spans_s) >= self._assignment.measured_iterations:
            self._record(self._spans_s)
            self._next_assignment()

    def _record(self, spans_s: list[float]) -> None:
        """On the deciding rank: tells the session what the present assignment has measured."""
        if self._session is None or self._bandit is None or self._assignment is None:
            return
        assignment = self._assignment
        self._session.record(spans_s)
        self._log.ran(
            assignment,
            spans_s,
            iteration=self._sync.iteration,
            best_span_s=self._session.result.best_span_s,
            credits=self._bandit.credits,
        )
        if time.monotonic() - self._told_s > PROGRESS_EVERY_S:
            self._told_s = time.monotonic()
            logger.info("%s", self._session.progress())

    def _next_assignment(self) -> None:
        """Collective: the deciding rank's next assignment, on all ranks; ends the warm-up if it is the last."""
        control = self._control
        while True:
            now: Assignment = control.broadcast(self._session.assignment if self._session else None)
            self._assignment, self._to_discard, self._spans_s = now, now.discarded_iterations, []
            try:
                self._apply(now.knobs)
            except (PlanError, TransportError) as err:  # on all ranks alike
                if now.purpose is Purpose.FINAL:
                    raise
                logger.info("%s cannot be run: %s", now.knobs.describe(), err)
                self._record([math.inf])
                continue
            break
        if now.purpose is Purpose.FINAL:
            self._end()

    def _apply(self, knobs: Knobs) -> None:
        """Collective."""
        self._sync.set_plans(plans_for(knobs, self._sync.layouts))
        self._knobs = knobs

    @property
    def _links(self) -> Mapping[Route, LinkModel]:
        """What probes have shown of each route."""
        return self._model.links if self._model is not None else {}

    def _end(self) -> None:
        self._tuning, self._assignment = False, None
        self._router.keep_only(plans_for(self._knobs, self._sync.layouts))
        if self._session is not None:
            assert self._cache is not None
            result = self._session.result
            stored = self._cache.keep(result, self._session.trials, complete=True, links=self._links)
            logger.info("%s%s", describe_result(result), "; stored in the registry" if stored else "")
            self._log.ended(result, iteration=self._sync.iteration)
            self._log.close()
            self._session = None

    def remember(self) -> None:
        """Stores what an unfinished warm-up has found, so that the next job goes on from it. Idempotent."""
        session, self._session = self._session, None
        if session is None or self._cache is None:
            return
        result = session.result
        if self._cache.keep(result, session.trials, complete=False, links=self._links):
            logger.info(
                "the job ends before its warm-up: best so far %s; stored in the registry, the next job goes on",
                describe_result(result),
            )
        self._log.close()

    def close(self) -> None:
        """Ends all threads; what an unfinished warm-up has found is stored."""
        self.remember()
        self._sync.close()
        self._router.close()


def describe_result(result: SessionResult) -> str:
    """What the warm-up has found, in one line."""
    found = f"{result.knobs.describe()}, found by {result.arm}" if result.tuned else "the default"
    spans = ""
    if math.isfinite(result.default_span_s) and result.default_span_s > 0:
        change = 100 * (result.best_span_s / result.default_span_s - 1)
        spans = (
            f"{1e3 * result.best_span_s:.3g} ms to synchronise against {1e3 * result.default_span_s:.3g} ms by default "
            f"({change:+.0f} %), "
        )
    return (
        f"tuned in {result.iterations_used} iterations and {result.n_trials} trials: {spans}{found} ({result.reason})"
    )
