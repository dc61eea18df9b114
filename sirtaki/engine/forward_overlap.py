"""What ranks agree on before iterations may end in the next forward pass.

Two iterations prepare it, once nothing is tuned or profiled any more. In the first, each rank learns in which order its
forward pass reads parameters; at the end of the second all ranks agree on one order, on when gradients come, and on how
fast they are reduced, so that units can leave in the order in which they are needed. Where the job is tuned, a few
settings are tried then (`overlap_trials`), and it is kept only if iterations are faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.model.forward_span import put_off_iteration_s
from sirtaki.comm.gradients.overtaking import IterationPace

from .knob_choices import plans_for
from .overlap_trials import OverlapChoice, OverlapTrials

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.comm.gradients.iteration_report import IterationReport
    from sirtaki.comm.gradients.synchroniser import Synchroniser
    from sirtaki.link_model import LinkModel

logger = logging.getLogger(__name__)

PREPARING = 2
"""Iterations that end with `step()` before one may be put off."""

SKIPPED, TIMED = 2, 7
"""Of a trial: iterations that do not count, and those that do; in one more, ranks agree."""


class ForwardOverlap:
    """Of one synchroniser.

    Attributes:
        wanted: iterations are to be put off; the same on all ranks.
        reads: parameters, by index, in the order in which this rank's forward pass reads them; empty = not known.
        trials: that are under way, or have been; None where nothing is to be tried, or not yet.
    """

    def __init__(self, control: ControlPlane, *, wanted: bool, tries: bool = False) -> None:
        """Collective: rank 0 says whether it is wanted, and whether settings for it are tried."""
        self._control = control
        self.wanted: bool
        self._tries: bool
        self.wanted, self._tries = control.broadcast((wanted, tries))
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
        if not self.wanted or self._prepared < PREPARING:
            return False
        if self.trials is None:
            return not self._tries
        return self.trials.now.puts_off and not self._agrees

    @property
    def _agrees(self) -> bool:
        """Ranks will agree at the end of this iteration, which so needs `step()`."""
        return self.trying and len(self._ends_s) >= SKIPPED + TIMED

    @property
    def learning(self) -> bool:
        """It is the first of the iterations that prepare it; the same on all ranks."""
        return self.wanted and self._prepared == 1

    def note(
        self,
        report: IterationReport,
        synchroniser: Synchroniser,
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
        if not self.wanted:
            return None
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
        mean_s, span_s = self._agree(synchroniser, joined=joined)
        if trials.now == trials.first and self._pace is not None and not trials.informed:
            trials.expect(self._expected(trials, synchroniser, self._pace, forward_s=mean_s - span_s, link=link))
        trials.note(mean_s)
        self._ends_s.clear()
        self._spans_s.clear()
        if trials.over and self._control.rank == 0:
            logger.info("%s", trials.describe())
        return trials.now.knobs

    def order(self, synchroniser: Synchroniser) -> None:
        """Units of a plan that was installed leave in the order that ranks have agreed on."""
        if self._pace is None:
            return
        if self.trials is None:
            if not self._tries:
                synchroniser.overtake(self._pace)
        elif self.trials.now.puts_off:  # again as it was tried, if it was
            synchroniser.overtake(self._paces.setdefault(self.trials.now, self._pace))

    def _expected(
        self,
        trials: OverlapTrials,
        synchroniser: Synchroniser,
        pace: IterationPace,
        *,
        forward_s: float,
        link: LinkModel | None,
    ) -> list[Knobs]:
        """Collective: what rank 0 finds by replaying iterations; nothing where it does not know the link."""

        def expected_s(knobs: Knobs) -> float:
            assert link is not None
            units, come_s = synchroniser.overtaken(plans_for(knobs, synchroniser.layouts), pace)
            return put_off_iteration_s(units, come_s, pace, forward_s=max(0.0, forward_s), link=link)

        decides = self._control.rank == 0 and link is not None
        promising: list[Knobs] = self._control.broadcast(trials.promising(expected_s) if decides else [])
        return promising

    def _agree(self, synchroniser: Synchroniser, *, joined: bool) -> tuple[float, float]:
        """Collective: what an iteration of this trial took, and reducing in it in the middle; the mean over ranks."""
        taken_s = (self._ends_s[-1] - self._ends_s[SKIPPED - 1]) / (len(self._ends_s) - SKIPPED)
        total = self._control.total(np.array([0.0] * 3 if joined else [taken_s, median(self._spans_s), 1.0]))
        mean_s: float
        mean_s, span_s = self._control.broadcast(tuple(map(float, total[:2] / max(total[2], 1.0))))
        if self._pace is not None:
            self._pace = replace(self._pace, s_per_byte=span_s / _bytes_of(synchroniser))
        return mean_s, span_s

    def _prepare(
        self, report: IterationReport, synchroniser: Synchroniser, *, profiled: IterationReport | None, joined: bool
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


def _bytes_of(synchroniser: Synchroniser) -> int:
    return sum(layout.total_bytes for layout in synchroniser.layouts)
