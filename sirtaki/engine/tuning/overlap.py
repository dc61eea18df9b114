"""Deferred updates: reduction and update of an iteration end in the next forward pass, if that makes steps faster."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sirtaki.autotune.knobs import Cut, Knobs, KnobSpace
from sirtaki.autotune.meta.session import TuningSession
from sirtaki.autotune.model.simulator import deferred_iteration_s
from sirtaki.autotune.trial import Everything, Proposal, Trial
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.gradients.schedule import IterationPace
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.plan import GradientLayout
from sirtaki.measures import LinkModel

from .controller import TuningController
from .plans import plans_for
from .report import describe_overlap
from .target import TunableTarget

logger = logging.getLogger(__name__)

MOST_TRIED = 8
"""Maximum number of settings with deferred updates to try, including the setting that the tuner has chosen."""

UNITS = 16
"""Approximate number of units (buckets) of the setting that is tried second, after the tuned one.

Used if times cannot be predicted.
"""

COUNTS = (4, 6, 8, 12, 16, 24)
"""Approximate numbers of units (buckets) of the settings that are considered. Their iteration times are predicted, and
those with short times are tried."""

MOST_EXPECTED = 4
"""Maximum number of settings that are tried for their short predicted iteration time."""

NEAR, NOT_FAR = 1.02, 1.1
"""Limits for the choice of settings to try, as multiples of the shortest predicted iteration time.

For each number of streams, the setting with the fewest units (buckets) whose time is within `NEAR` is chosen. Of these
settings, those whose times are within `NOT_FAR` are tried."""

WORTHWHILE = 0.01
"""Minimum gain for which deferred updates are used, as a fraction of the iteration time."""

SKIPPED, TIMED = 1, 2
"""Numbers of iterations in one measurement of a setting: first untimed, then timed. In one more iteration, the update
is made in `step()`, and the ranks agree on the measured time."""

BUDGET = 60
"""Maximum number of measurements in a search for deferred updates. Discarded measurements count, too."""

PREPARING = 2
"""Number of iterations whose updates must be made in `step()` before updates may be deferred."""


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """A setting to try: the communication setting, and whether updates are deferred.

    Attributes:
        knobs: communication setting, including how gradients are cut into units (buckets).
        is_deferred: True if the optimizer update is deferred into the next forward pass.
    """

    knobs: Knobs
    is_deferred: bool

    def describe(self) -> str:
        """Return a description of the setting, for the log."""
        return f"{self.knobs.describe()}, updates {'deferred' if self.is_deferred else 'in step()'}"


class OverlapArm:
    """Search method (arm) that proposes settings with deferred updates.

    The first proposal is the setting that the tuner has chosen. Then follow settings with short predicted times, and
    settings similar to the fastest one.
    """

    name = "overlap"

    def __init__(self, tuned: Knobs, space: KnobSpace, layouts: Sequence[GradientLayout]) -> None:
        """Create the search method. Its first proposal is the tuned setting.

        Args:
            tuned: communication setting (knobs) that the tuner has chosen.
            space: communication settings that may be chosen.
            layouts: layouts of the flat buffers.
        """
        self._tuned, self._space, self._first_layout = tuned, space, layouts[0]
        self._total_bytes = sum(layout.total_bytes for layout in layouts)
        self._expected: Sequence[Knobs] = ()
        self._taken_s: dict[OverlapChoice, float] = {}

    def expect(self, expected_s: Callable[[Knobs], float]) -> None:
        """Choose which settings to propose once the tuned setting was measured, and store them.

        For each number of streams, the setting with the shortest predicted iteration time `expected_s` is considered.
        Predictions for different numbers of streams are less exact, so several of them may be chosen.
        """
        best: list[tuple[float, Knobs]] = []
        for streams in self._space.streams:
            sizes = [self._total_bytes // count for count in COUNTS]
            together = [choice.knobs for size in sizes for choice in self._allowed(size, streams)]
            expected = [(expected_s(knobs), knobs) for knobs in dict.fromkeys(together)]
            best += [each for each in expected if each[0] <= NEAR * min(seconds for seconds, _ in expected)][:1]
        near = [knobs for seconds, knobs in best if seconds <= NOT_FAR * min(seconds for seconds, _ in best)]
        self._expected = near[:MOST_EXPECTED]

    def ask(self, n: int = 1) -> Sequence[Proposal[OverlapChoice]]:
        """Return the next setting to try. Return no proposal after `MOST_TRIED` settings."""
        untried = (choice for choice in self._candidates() if choice not in self._taken_s)
        choice = next(untried, None) if len(self._taken_s) < MOST_TRIED else None
        return [] if choice is None else [Proposal(arm=self.name, knobs=choice)]

    def tell(self, trials: Sequence[Trial[OverlapChoice]]) -> None:
        """Record the measured iteration times of `trials`."""
        self._taken_s.update((trial.knobs, trial.span_s) for trial in trials if trial.knobs.is_deferred)

    def _candidates(self) -> Iterator[OverlapChoice]:
        """Yield all settings to try, in order. Settings that were tried already are included."""
        yield OverlapChoice(self._tuned, is_deferred=True)
        if self._expected:
            yield from (OverlapChoice(knobs, is_deferred=True) for knobs in self._expected)
        else:
            smaller = min(self._total_bytes // UNITS, self._tuned.unit_bytes // 2)
            for streams in dict.fromkeys((self._tuned.streams, max(1, self._tuned.streams // 2))):
                yield from self._allowed(smaller, streams)
        best = min(self._taken_s, key=self._taken_s.__getitem__).knobs
        yield from self._allowed(best.unit_bytes // 2, best.streams)
        yield from self._allowed(best.unit_bytes, best.streams // 2)
        yield from self._allowed(best.unit_bytes * 2, best.streams)
        yield from self._allowed(best.unit_bytes, best.streams * 2)

    def _allowed(self, unit_bytes: int, streams: int) -> Iterator[OverlapChoice]:
        """Yield the tuned setting with this size of units (buckets) and this number of streams.

        The size is first limited to the allowed range. Yield nothing if the user's settings or the limit on streams
        forbid the setting.
        """
        low, high = self._space.unit_bytes
        tuned = self._tuned
        if 1 <= streams <= max(2, tuned.streams):
            knobs = tuned.but(unit_bytes=min(max(unit_bytes, low), high), streams=streams, cuts=None)
            if knobs in self._space:
                yield OverlapChoice(knobs if low == high else tapered(knobs, self._first_layout), is_deferred=True)


def session_of(arm: OverlapArm, default: OverlapChoice) -> TuningSession[OverlapChoice]:
    """Begin a search for the fastest setting, and return its session.

    The search method `arm` proposes settings with deferred updates. They are compared with `default`, the setting
    without deferred updates.
    """
    return TuningSession(
        space=Everything(),
        default=default,
        arm=arm,
        rng=np.random.default_rng(0),
        budget_iterations=BUDGET,
        measured_iterations=1,
        least_gain=WORTHWHILE,
    )


def tapered(knobs: Knobs, layout: GradientLayout) -> Knobs:
    """Cut the layout into units (buckets) of about equal size. The last two are a half and a quarter as large."""
    unit = knobs.unit_bytes // layout.itemsize_bytes
    half, quarter = unit // 2, unit // 4
    equal = layout.numel - half - quarter
    if quarter < 1 or equal < unit:
        return knobs
    count = round(equal / unit)
    stops = [*(equal * number // count for number in range(1, count + 1)), equal + half, layout.numel]
    return knobs.but(cuts=tuple(Cut(stop=stop, stream=number % knobs.streams) for number, stop in enumerate(stops)))


class Deferrable(Protocol):
    """Interface to a gradient pipeline for `ForwardOverlap`, implemented by `PipelineTarget`."""

    controller: TuningController
    synchroniser: GradientPipeline
    knobs: Knobs
    space: KnobSpace

    @property
    def link_and_forward_s(self) -> tuple[LinkModel | None, float]:
        """Return the model of latency and bandwidth between hosts (None if unknown), and the forward time in seconds.

        The forward time is the usual time from the last reduced gradient of a step to the first ready gradient of the
        next step.
        """
        ...

    def apply(self, knobs: Knobs) -> None:
        """Use the setting `knobs` from the next iteration on. Collective."""
        ...

    def keep_overlap(self) -> None:
        """Free what only the search for deferred updates has used. Collective."""
        ...


class ForwardOverlap(TunableTarget[OverlapChoice]):
    """Tuning target that decides, by iteration times, whether one gradient pipeline defers optimizer updates.

    Attributes:
        reads: indices of the parameters in the order in which this rank's forward pass reads them. Empty if unknown.
    """

    slowest = True
    iterations = SKIPPED + TIMED + 1

    def __init__(self, control: ControlPlane, pipeline: Deferrable, *, tries: bool = False) -> None:
        """Create the target. Updates are not deferred at first.

        Args:
            control: control plane of the job.
            pipeline: gradient pipeline whose updates may be deferred.
            tries: True to use deferred updates only if a search proves that they are faster. Equal on all ranks.
        """
        self._control, self._pipeline, self._tries = control, pipeline, tries
        self.reads: Sequence[int] = ()
        self.default = OverlapChoice(pipeline.knobs, is_deferred=False)
        self._kept: OverlapChoice | None = None  # Choice of the last completed search for deferred updates.
        self._now = self.default
        self._pace: IterationPace | None = None
        self._ends_s: deque[float] = deque(maxlen=TIMED + 2)
        self._joined = False
        self.begin()

    def begin(self) -> None:
        """Stop deferring updates and end any search in progress. Begin a new preparation (`PREPARING` iterations).

        Call on all ranks before the units (buckets) or their launch order change.
        """
        self._prepared = 0
        self._pipeline.controller.abandon(self)

    def forget(self) -> None:
        """Forget whether deferred updates were faster. Call on all ranks when the job is tuned again."""
        self._kept = None
        self.begin()

    @property
    def trying(self) -> bool:
        """Return whether a search over deferred updates is in progress. Equal on all ranks."""
        return self._pipeline.controller.tries(self)

    @property
    def ready(self) -> bool:
        """Return whether updates may be deferred. Equal on all ranks."""
        if self._prepared < PREPARING:
            return False
        if self.trying:
            return self._now.is_deferred and not self._pipeline.controller.agrees
        return not self._tries if self._kept is None else self._kept.is_deferred

    @property
    def learning(self) -> bool:
        """Return whether the order in which the forward pass reads parameters must be recorded in this iteration.

        Equal on all ranks.
        """
        return self._prepared == 1

    def iteration_ended(
        self, report: IterationReport, synchroniser: GradientPipeline, *, profiled: IterationReport | None, joined: bool
    ) -> None:
        """Count an iteration in which the gradient pipeline was neither tuned nor profiled, and advance the search.

        Collective in the last iteration of the preparation (`PREPARING`).

        Args:
            report: measurements of the iteration.
            synchroniser: the pipeline that reduced the iteration's gradients.
            profiled: measurements of the last iteration in which the order of gradients was profiled. None if there
                was none.
            joined: True if this rank has called `join()`, so that its measurements do not count.
        """
        self._ends_s.append(time.perf_counter())
        self._joined = joined
        if self._prepared >= PREPARING:
            return
        self._prepared += 1
        if self._prepared < PREPARING:
            return
        self._agree_on_pace(report, synchroniser, profiled=profiled, joined=joined)
        if not self._tries or (self._kept is not None and self._kept.is_deferred):
            self._reorder()
        if self._tries and self._kept is None:
            self.default = OverlapChoice(self._pipeline.knobs, is_deferred=False)
            self._pipeline.controller.begin(self, recalls=False)

    def _agree_on_pace(
        self, report: IterationReport, synchroniser: GradientPipeline, *, profiled: IterationReport | None, joined: bool
    ) -> None:
        """Agree on the times at which gradients become ready, and on the order in which parameters are read.

        Collective.
        """
        count = synchroniser.n_params
        own = np.zeros(2 * count + 3)
        if not joined and len(self.reads) > 0 and profiled is not None:
            # Default position of a parameter in the order of reads, so that parameters that are never read come last.
            own[:count] = count
            own[list(self.reads)] = np.arange(len(self.reads))
            stretch = report.backward_s / profiled.backward_s if profiled.backward_s > 0.0 else 1.0
            own[count:-3] = stretch * np.array(profiled.ready_s)
            own[-3:] = report.backward_s, report.span_s, 1.0
        total = self._control.total(own)
        if total[-1] > 0.0:
            mean = self._control.broadcast(total / total[-1])
            self._pace = IterationPace(
                needed=mean[:count].tolist(),
                ready_s=mean[count:-3].tolist(),
                backward_s=float(mean[-3]),
                s_per_byte=float(mean[-2]) / sum(layout.total_bytes for layout in synchroniser.layouts),
            )

    def _reorder(self) -> None:
        """Launch units (buckets) in the order in which the next forward pass reads their parameters, on all ranks."""
        if self._pace is not None:
            self._pipeline.synchroniser.reorder_units(self._pace)

    # ── as a target of the controller ────────────────────────────────────────────────────────────────────────────

    def search(self, session: TuningSession[OverlapChoice] | None) -> TuningSession[OverlapChoice]:
        """Begin a search for the fastest setting with deferred updates. Called on rank 0 only."""
        pipeline, pace = self._pipeline, self._pace
        sync, arm = pipeline.synchroniser, OverlapArm(self.default.knobs, pipeline.space, pipeline.synchroniser.layouts)
        link, forward_s = pipeline.link_and_forward_s
        if pace is not None and link is not None:
            known: tuple[IterationPace, LinkModel] = (pace, link)

            def expected_s(knobs: Knobs) -> float:
                units, ready_s = sync.reordered_units(plans_for(knobs, sync.layouts), known[0])
                return deferred_iteration_s(units, ready_s, known[0], forward_s=forward_s, link=known[1])

            arm.expect(expected_s)
        return session_of(arm, self.default)

    def apply(self, choice: OverlapChoice) -> None:
        """Use the setting `choice` from the next iteration on. Collective."""
        self._pipeline.apply(choice.knobs)
        self._now = choice
        if choice.is_deferred:
            self._reorder()

    def measured_s(self) -> float:
        """Return the mean duration of the timed iterations, in seconds; 0 on a rank without more data (`join()`)."""
        return 0.0 if self._joined else (self._ends_s[-2] - self._ends_s[-2 - TIMED]) / TIMED

    def keep(self) -> None:
        """End the search for deferred updates, and keep the current setting. Collective."""
        self._kept = self._now
        self._pipeline.keep_overlap()

    def report(self, session: TuningSession[OverlapChoice]) -> None:
        """Log the result of the search. Called on rank 0 only."""
        logger.info("%s", describe_overlap(session, self.default.knobs))
