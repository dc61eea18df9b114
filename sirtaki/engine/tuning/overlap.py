"""Deferred updates: the end of an iteration moves into the next forward pass, if that makes steps faster."""

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
"""Maximum number of settings with deferred updates to try, including the tuner's own."""

UNITS = 16
"""Approximate number of units of the first setting besides the tuner's own, if nothing can be predicted."""

COUNTS = (4, 6, 8, 12, 16, 24)
"""Approximate numbers of units of the settings whose iterations are predicted."""

MOST_EXPECTED = 4
"""Maximum number of settings to try because of a prediction."""

NEAR, NOT_FAR = 1.02, 1.1
"""Factors on the shortest predicted iteration, up to which more units, and fewer streams, are preferred."""

WORTHWHILE = 0.01
"""Minimum gain of deferred updates, as a share of the iteration time."""

SKIPPED, TIMED = 1, 2
"""Iterations of one measurement before the timed ones, and timed ones.

In one more iteration, which ends with `step()`, the ranks agree on the time.
"""

BUDGET = 60
"""Maximum measurements of a search, including the uncounted ones after a change of setting."""

PREPARING = 2
"""Iterations that end with `step()` before one may be deferred."""


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """A setting of one iteration.

    Attributes:
        knobs: how gradients are cut into units.
        is_deferred: the end of the iteration is deferred into the next forward pass.
    """

    knobs: Knobs
    is_deferred: bool

    def describe(self) -> str:
        """Return the setting in words."""
        return f"{self.knobs.describe()}, updates {'deferred' if self.is_deferred else 'in step()'}"


class OverlapArm:
    """Proposes settings with deferred updates: the tuned knobs, predicted ones, then neighbours of the fastest."""

    name = "overlap"

    def __init__(self, tuned: Knobs, space: KnobSpace, layouts: Sequence[GradientLayout]) -> None:
        """Begin with the tuned knobs.

        Args:
            tuned: knobs that the tuner has chosen.
            space: knobs that may be chosen.
            layouts: layouts of the flat buffers.
        """
        self._tuned, self._space, self._first_layout = tuned, space, layouts[0]
        self._total_bytes = sum(layout.total_bytes for layout in layouts)
        self._expected: Sequence[Knobs] = ()
        self._taken_s: dict[OverlapChoice, float] = {}

    def expect(self, expected_s: Callable[[Knobs], float]) -> None:
        """Choose the settings to propose first by their predicted iteration time.

        Choose at most one for each number of streams, because the cost of streams is hard to predict.
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
        """Propose the next setting. None after `MOST_TRIED` settings."""
        untried = (choice for choice in self._candidates() if choice not in self._taken_s)
        choice = next(untried, None) if len(self._taken_s) < MOST_TRIED else None
        return [] if choice is None else [Proposal(arm=self.name, knobs=choice)]

    def tell(self, trials: Sequence[Trial[OverlapChoice]]) -> None:
        """Learn iteration times."""
        self._taken_s.update((trial.knobs, trial.span_s) for trial in trials if trial.knobs.is_deferred)

    def _candidates(self) -> Iterator[OverlapChoice]:
        """Yield settings in the order in which to try them, including tried ones."""
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
        """Yield one setting, or none if the user's settings or the number of streams forbid it."""
        low, high = self._space.unit_bytes
        tuned = self._tuned
        if 1 <= streams <= max(2, tuned.streams):
            knobs = tuned.but(unit_bytes=min(max(unit_bytes, low), high), streams=streams, cuts=None)
            if knobs in self._space:
                yield OverlapChoice(knobs if low == high else tapered(knobs, self._first_layout), is_deferred=True)


def session_of(arm: OverlapArm, default: OverlapChoice) -> TuningSession[OverlapChoice]:
    """Begin a search for the fastest setting with deferred updates, against the tuned knobs without."""
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
    """Cut the layout into about equal units, except for the last two, which are a half and a quarter as large."""
    unit = knobs.unit_bytes // layout.itemsize_bytes
    half, quarter = unit // 2, unit // 4
    equal = layout.numel - half - quarter
    if quarter < 1 or equal < unit:
        return knobs
    count = round(equal / unit)
    stops = [*(equal * number // count for number in range(1, count + 1)), equal + half, layout.numel]
    return knobs.but(cuts=tuple(Cut(stop=stop, stream=number % knobs.streams) for number, stop in enumerate(stops)))


class Deferrable(Protocol):
    """Part of `PipelineTarget` that deferred updates use."""

    controller: TuningController
    synchroniser: GradientPipeline
    knobs: Knobs
    space: KnobSpace

    @property
    def link_and_forward_s(self) -> tuple[LinkModel | None, float]:
        """Return the model of the link, None if unknown, and the time between communications in seconds."""
        ...

    def apply(self, knobs: Knobs) -> None:
        """Run these knobs from the next iteration on. Collective."""
        ...

    def keep_overlap(self) -> None:
        """Handle the end of the search for deferred updates. Collective."""
        ...


class ForwardOverlap(TunableTarget[OverlapChoice]):
    """Deferred updates of one gradient pipeline, as a target of tuning in iteration times.

    Attributes:
        reads: indices of the parameters in the order in which this rank's forward pass reads them. Empty if unknown.
    """

    slowest = True
    iterations = SKIPPED + TIMED + 1

    def __init__(self, control: ControlPlane, pipeline: Deferrable, *, tries: bool = False) -> None:
        """Begin without deferred updates.

        Args:
            control: control plane of the job.
            pipeline: the gradient pipeline.
            tries: deferred updates are used only if they are proved faster. Equal on all ranks.
        """
        self._control, self._pipeline, self._tries = control, pipeline, tries
        self.reads: Sequence[int] = ()
        self.default = OverlapChoice(pipeline.knobs, is_deferred=False)
        self._kept: OverlapChoice | None = None  # result of the last completed search
        self._now = self.default
        self._pace: IterationPace | None = None
        self._ends_s: deque[float] = deque(maxlen=TIMED + 2)
        self._joined = False
        self.begin()

    def begin(self) -> None:
        """Restart the preparation and a search in progress, because the plan or order changes. Call on all ranks."""
        self._prepared = 0
        self._pipeline.controller.abandon(self)

    def forget(self) -> None:
        """Drop the result of the search, because the job is tuned again. Call on all ranks."""
        self._kept = None
        self.begin()

    @property
    def trying(self) -> bool:
        """Return whether a search is in progress. Equal on all ranks."""
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
        """Return whether to learn the order of reads in this iteration. Equal on all ranks."""
        return self._prepared == 1

    def iteration_ended(
        self, report: IterationReport, synchroniser: GradientPipeline, *, profiled: IterationReport | None, joined: bool
    ) -> None:
        """Count an iteration without tuning or profiling of the pipeline. Collective at the last one that prepares.

        Args:
            report: measurements of the iteration.
            synchroniser: the pipeline.
            profiled: measurements of the last order-profiling iteration. None if there was none.
            joined: this rank has called `join()`, so its measurements do not count.
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
        """Agree on when gradients become ready and parameters are read. Collective."""
        count = synchroniser.n_params
        own = np.zeros(2 * count + 3)
        if not joined and len(self.reads) > 0 and profiled is not None:
            own[:count] = count  # parameters that are never read come last
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
        """Launch units in the order in which the next forward pass reads their parameters. Equal on all ranks."""
        if self._pace is not None:
            self._pipeline.synchroniser.reorder_units(self._pace)

    # ── as a target of the controller ────────────────────────────────────────────────────────────────────────────

    def search(self, session: TuningSession[OverlapChoice] | None) -> TuningSession[OverlapChoice]:
        """Begin a search. On rank 0."""
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
        """Run a setting from the next iteration on. Collective."""
        self._pipeline.apply(choice.knobs)
        self._now = choice
        if choice.is_deferred:
            self._reorder()

    def measured_s(self) -> float:
        """Return the mean time of the timed iterations. 0 on a rank in `join()`, because it does not compute."""
        return 0.0 if self._joined else (self._ends_s[-2] - self._ends_s[-2 - TIMED]) / TIMED

    def keep(self) -> None:
        """Keep the current setting. Collective."""
        self._kept = self._now
        self._pipeline.keep_overlap()

    def report(self, session: TuningSession[OverlapChoice]) -> None:
        """Log the result. On rank 0."""
        logger.info("%s", describe_overlap(session, self.default.knobs))
