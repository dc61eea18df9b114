"""Whether updates may be put off until the next forward pass, and how trials of it are judged."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sirtaki.autotune.knobs import Cut, Knobs, KnobSpace, format_bytes
from sirtaki.autotune.model.simulator import put_off_iteration_s
from sirtaki.autotune.paired import FEWEST_PAIRS, PairedComparison, Verdict
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.gradients.schedule import IterationPace
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.plan import GradientLayout
from sirtaki.measures import LinkModel, in_ms

from .plans import plans_for

MOST_TRIED = 8
"""Settings with updates put off, the tuner's own included."""

UNITS = 16
"""In about so many units gradients are sent by the first setting that is not the tuner's, where nothing is expected."""

COUNTS = (4, 6, 8, 12, 16, 24)
"""In about so many units gradients are sent by settings that are compared by what is expected of them."""

MOST_EXPECTED = 4
"""Settings that are tried because of that."""

NEAR, NOT_FAR = 1.02, 1.1
"""Of the shortest expected iteration: what more units, and what fewer streams, may cost."""

WORTHWHILE = 0.01
"""Share of an iteration that deferred updates must gain to be used."""

SKIPPED, TIMED = 2, 5
SKIPPED_OF_PAIR, TIMED_OF_PAIR = 1, 2
"""Iterations of a trial, and of one measurement of a pair: those that do not count, and those that do.

In one more iteration the ranks agree on the time.
"""

LOOKS = (FEWEST_PAIRS, 14)
"""Pairs of the final comparison. With 14, one outlier does not hide a gain."""


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """What one iteration runs.

    Attributes:
        knobs: by which units are cut.
        puts_off: its end is put off into the next forward pass.
    """

    knobs: Knobs
    puts_off: bool


class OverlapTrials:
    """Search for the fastest setting with deferred updates, for one tuned setting.

    Each promising choice runs once. Then the fastest one with deferred updates is compared in pairs with the tuned
    setting without.

    Attributes:
        first: the tuned setting, without deferred updates.
        now: choice to run; after the search, the choice to keep.
        over: the search has ended.
        skipped: first iterations with `now` that do not count.
        timed: iterations that count.
    """

    def __init__(self, tuned: Knobs, space: KnobSpace, layouts: Sequence[GradientLayout]) -> None:
        """Begin with the tuned setting.

        Args:
            tuned: setting that the tuner has chosen.
            space: settings that may be chosen.
            layouts: layouts of the flat buffers.
        """
        self._space, self._first_layout = space, layouts[0]
        self._total_bytes = sum(layout.total_bytes for layout in layouts)
        self.first = OverlapChoice(tuned, puts_off=False)
        self.over = False
        self.skipped, self.timed = SKIPPED, TIMED
        self._expected: list[Knobs] | None = None
        self._taken_s: dict[OverlapChoice, float] = {}
        self._pairs = PairedComparison(looks=LOOKS, least_gain=WORTHWHILE)
        self._script = self._search()
        self.now = next(self._script)

    @property
    def informed(self) -> bool:
        """`expect` has been called."""
        return self._expected is not None

    def promising(self, expected_s: Callable[[Knobs], float]) -> list[Knobs]:
        """Return settings that are expected to be fast: at most one for each number of streams, fewest streams first.

        There is one for each number because the expectation knows little of the cost of streams besides their links.
        """
        best: list[tuple[float, Knobs]] = []
        for streams in self._space.streams:
            sizes = [self._total_bytes // count for count in COUNTS]
            together = [choice.knobs for size in sizes for choice in self._allowed(size, streams)]
            expected = [(expected_s(knobs), knobs) for knobs in dict.fromkeys(together)]
            best += [each for each in expected if each[0] <= NEAR * min(seconds for seconds, _ in expected)][:1]
        return [knobs for seconds, knobs in best if seconds <= NOT_FAR * min(seconds for seconds, _ in best)]

    def expect(self, promising: Sequence[Knobs]) -> None:
        """Set the settings to try first. Called once, before updates are deferred for the first time."""
        self._expected = list(promising[:MOST_EXPECTED])

    def note(self, iteration_s: float) -> None:
        """Record the mean time of the timed iterations with `now`, and go on to the next choice."""
        try:
            self.now = self._script.send(iteration_s)
        except StopIteration as end:
            self.now, self.over = end.value, True

    def _search(self) -> Generator[OverlapChoice, float, OverlapChoice]:
        self._taken_s[self.first] = yield self.first
        while len(self._taken_s) <= MOST_TRIED:
            choice = next((each for each in self._promising() if each not in self._taken_s), None)
            if choice is None:
                break
            self._taken_s[choice] = yield choice
        fastest = self._fastest()
        self.skipped, self.timed = SKIPPED_OF_PAIR, TIMED_OF_PAIR
        verdict = yield from self._pairs.run(lambda: self._measure(self.first), lambda: self._measure(fastest))
        return fastest if verdict is Verdict.FASTER else self.first

    def _measure(self, choice: OverlapChoice) -> Generator[OverlapChoice, float, float]:
        return (yield choice)

    def _fastest(self) -> OverlapChoice:
        """Return the fastest choice with deferred updates that was tried."""
        return min((each for each in self._taken_s if each.puts_off), key=lambda each: self._taken_s[each])

    def _promising(self) -> Iterator[OverlapChoice]:
        """Yield choices in the order in which to try them; some may have been tried."""
        tuned = self.first.knobs
        yield OverlapChoice(tuned, puts_off=True)
        if self._expected:
            yield from (OverlapChoice(knobs, puts_off=True) for knobs in self._expected)
        else:
            yield from self._unexpected()
        best = self._fastest().knobs
        yield from self._allowed(best.unit_bytes // 2, best.streams)
        yield from self._allowed(best.unit_bytes, best.streams // 2)
        yield from self._allowed(best.unit_bytes * 2, best.streams)
        yield from self._allowed(best.unit_bytes, best.streams * 2)

    def _unexpected(self) -> Iterator[OverlapChoice]:
        tuned = self.first.knobs
        smaller = min(self._total_bytes // UNITS, tuned.unit_bytes // 2)
        few = max(1, tuned.streams // 2)
        for streams in dict.fromkeys((tuned.streams, few)):
            yield from self._allowed(smaller, streams)

    def _allowed(self, unit_bytes: int, streams: int) -> Iterator[OverlapChoice]:
        """One setting; none if the user has fixed another, or it takes more streams than the tuner's choice and two."""
        low, high = self._space.unit_bytes
        tuned = self.first.knobs
        if 1 <= streams <= max(2, tuned.streams):
            knobs = tuned.but(unit_bytes=min(max(unit_bytes, low), high), streams=streams, cuts=None)
            if knobs in self._space:
                yield OverlapChoice(knobs if low == high else tapered(knobs, self._first_layout), puts_off=True)

    def describe(self) -> str:
        """Describe the result, for the log."""
        pairs = self._pairs
        before_s, after_s = (math.exp(statistics.median(each)) for each in (pairs.baseline, pairs.candidate))
        knobs = self._fastest().knobs
        if not self.now.puts_off:
            reason = f": {pairs.doubt}" if pairs.doubt else ""
            return (
                f"overlap_forward: not used, because no gain is proved in {pairs.n_pairs} pairs "
                f"({in_ms(before_s)} an iteration without it, {in_ms(after_s)} with it at best){reason}"
            )
        planned = knobs == self.first.knobs and knobs.cuts is not None
        cuts = "planned units" if planned else f"{format_bytes(knobs.unit_bytes)} units"
        return (
            f"overlap_forward: iterations are {pairs.gain.describe()}: {in_ms(after_s)} instead of {in_ms(before_s)}; "
            f"{cuts} on {knobs.streams} stream{'' if knobs.streams == 1 else 's'}"
        )


def tapered(knobs: Knobs, layout: GradientLayout) -> Knobs:
    """About equal units, but for the last two, which are a half and a quarter as large."""
    unit = knobs.unit_bytes // layout.itemsize_bytes
    half, quarter = unit // 2, unit // 4
    equal = layout.numel - half - quarter
    if quarter < 1 or equal < unit:
        return knobs
    count = round(equal / unit)
    stops = [*(equal * number // count for number in range(1, count + 1)), equal + half, layout.numel]
    return knobs.but(cuts=tuple(Cut(stop=stop, stream=number % knobs.streams) for number, stop in enumerate(stops)))


logger = logging.getLogger(__name__)

PREPARING = 2
"""Iterations that end with `step()` before one may be put off."""


class ForwardOverlap:
    """Of one synchroniser whose iterations are to be put off, on all ranks.

    Attributes:
        reads: parameters, by index, in the order in which this rank's forward pass reads them; empty = not known.
        trials: that are under way, or have been; None where nothing is to be tried, or not yet.
    """

    def __init__(self, control: ControlPlane, *, tries: bool = False) -> None:
        """`tries`: settings for it are tried; the same on all ranks."""
        self._control, self._tries = control, tries
        self.reads: Sequence[int] = ()
        self.trials: OverlapTrials | None = None
        self._pace: IterationPace | None = None
        self._paces: dict[OverlapChoice, IterationPace] = {}
        self._ends_s: list[float] = []
        self._spans_s: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Another plan or order runs from now on; the same on all ranks. Trials that are under way begin again."""
        self._prepared = 0
        if self.trying:
            self.trials = None

    def forget(self) -> None:
        """What trials have found holds no more: the job is tuned anew."""
        self.trials = None
        self.begin()

    @property
    def trying(self) -> bool:
        """Trials are under way; the same on all ranks."""
        return self.trials is not None and not self.trials.over

    @property
    def ready(self) -> bool:
        """Iterations may be put off; the same on all ranks."""
        if self._prepared < PREPARING:
            return False
        if self.trials is None:
            return not self._tries
        return self.trials.now.puts_off and not self._agrees

    @property
    def _agrees(self) -> bool:
        """Ranks will agree at the end of this iteration, which so needs `step()`."""
        return self.trials is not None and self.trying and len(self._ends_s) >= self.trials.skipped + self.trials.timed

    @property
    def learning(self) -> bool:
        """It is the first of the iterations that prepare it; the same on all ranks."""
        return self._prepared == 1

    def note(
        self,
        report: IterationReport,
        synchroniser: GradientPipeline,
        knobs: Knobs,
        space: KnobSpace,
        *,
        profiled: IterationReport | None,
        joined: bool,
        link: LinkModel | None,
    ) -> Knobs | None:
        """An iteration has ended in which nothing was tuned or profiled. Collective when it is the last that prepares.

        And when it is the last of a trial.

        Args:
            report: what it has measured.
            synchroniser: whose units leave in another order then.
            knobs: what it ran.
            space: what may be tried.
            profiled: the iteration in which the order of gradients was profiled; None = it has not been.
            joined: this rank has no data any more, and knows nothing.
            link: what units cost by the transport and algorithm of `knobs`, on rank 0; None = not known.

        Returns:
            What is to run from now on, if anything else is: for `order` then.
        """
        if self._prepared < PREPARING:
            self._prepare(report, synchroniser, profiled=profiled, joined=joined)
            if self._prepared < PREPARING or not self._tries or self.trials is not None:
                return None
            self.trials = OverlapTrials(knobs, space, synchroniser.layouts)
            self._ends_s.clear()
            self._spans_s.clear()
            return None
        trials = self.trials
        if trials is None or trials.over:
            return None
        if not self._agrees:
            self._ends_s.append(time.perf_counter())
            self._spans_s.append(report.span_s)
            return None
        mean_s, span_s = self._agree(synchroniser, trials.skipped, joined=joined)
        if trials.now == trials.first and self._pace is not None and not trials.informed:
            trials.expect(self._expected(trials, synchroniser, self._pace, forward_s=mean_s - span_s, link=link))
        trials.note(mean_s)
        self._ends_s.clear()
        self._spans_s.clear()
        if trials.over and self._control.rank == 0:
            logger.info("%s", trials.describe())
        return trials.now.knobs

    def order(self, synchroniser: GradientPipeline) -> None:
        """Units of a plan that was installed leave in the order that ranks have agreed on."""
        if self._pace is None:
            return
        if self.trials is None:
            if not self._tries:
                synchroniser.reorder_units(self._pace)
        elif self.trials.now.puts_off:  # again as it was tried, if it was
            synchroniser.reorder_units(self._paces.setdefault(self.trials.now, self._pace))

    def _expected(
        self,
        trials: OverlapTrials,
        synchroniser: GradientPipeline,
        pace: IterationPace,
        *,
        forward_s: float,
        link: LinkModel | None,
    ) -> list[Knobs]:
        """Collective: what rank 0 finds by replaying iterations; nothing where it does not know the link."""

        def expected_s(knobs: Knobs) -> float:
            assert link is not None
            units, come_s = synchroniser.reordered_units(plans_for(knobs, synchroniser.layouts), pace)
            return put_off_iteration_s(units, come_s, pace, forward_s=max(0.0, forward_s), link=link)

        decides = self._control.rank == 0 and link is not None
        promising: list[Knobs] = self._control.broadcast(trials.promising(expected_s) if decides else [])
        return promising

    def _agree(self, synchroniser: GradientPipeline, skipped: int, *, joined: bool) -> tuple[float, float]:
        """Return the time of an iteration, and the communication time in it; means over the ranks. Collective."""
        taken_s = (self._ends_s[-1] - self._ends_s[skipped - 1]) / (len(self._ends_s) - skipped)
        total = self._control.total(np.array([0.0] * 3 if joined else [taken_s, statistics.median(self._spans_s), 1.0]))
        mean_s: float
        mean_s, span_s = self._control.broadcast(tuple(map(float, total[:2] / max(total[2], 1.0))))
        if self._pace is not None:
            self._pace = replace(self._pace, s_per_byte=span_s / _bytes_of(synchroniser))
        return mean_s, span_s

    def _prepare(
        self, report: IterationReport, synchroniser: GradientPipeline, *, profiled: IterationReport | None, joined: bool
    ) -> None:
        self._prepared += 1
        if self._prepared < PREPARING:
            return
        count = synchroniser.n_params
        said = np.zeros(2 * count + 3)
        if not joined and len(self.reads) > 0 and profiled is not None:
            said[:count] = count  # what is never read is last
            said[list(self.reads)] = np.arange(len(self.reads))
            stretch = report.backward_s / profiled.backward_s if profiled.backward_s > 0.0 else 1.0
            said[count:-3] = stretch * np.array(profiled.ready_s)
            said[-3:] = report.backward_s, report.span_s, 1.0
        total = self._control.total(said)
        if total[-1] > 0.0:
            mean = self._control.broadcast(total / total[-1])
            self._pace = IterationPace(
                needed=mean[:count].tolist(),
                ready_s=mean[count:-3].tolist(),
                backward_s=float(mean[-3]),
                s_per_byte=float(mean[-2]) / _bytes_of(synchroniser),
            )
            self._paces.clear()
            self.order(synchroniser)


def _bytes_of(synchroniser: GradientPipeline) -> int:
    return sum(layout.total_bytes for layout in synchroniser.layouts)
