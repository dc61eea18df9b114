"""Tuning targets without a pipeline. The test determines all times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.meta.session import Assignment, TuningSession
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.comm.plan import GradientLayout
from sirtaki.engine.tuning.controller import TuningController
from sirtaki.engine.tuning.knob_search import KnobSearch
from sirtaki.engine.tuning.plans import Carried
from sirtaki.engine.tuning.target import TunableTarget
from sirtaki.errors import PlanError


class OneRank:
    """The control plane of a job with one rank."""

    rank, size = 0, 1

    def broadcast(self, value: Any) -> Any:
        return value

    def minimum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return values.copy()

    def total(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return values.copy()


class KnobJob(TunableTarget[Knobs]):
    """A tuning target on one rank with simulated times.

    Attributes:
        search_of_knobs: the search under test.
        assignments: finished assignments, each with its measurements.
        running: knobs of the current iteration.
        iterations_run: number of finished iterations.
        broken: knobs that cannot be applied.
    """

    def __init__(
        self,
        search: KnobSearch,
        layouts: Sequence[GradientLayout],
        space: KnobSpace,
        *,
        make_model: Callable[[], PlanningModel | None] = lambda: None,
        before: Sequence[Carried] = (),
        place: Sequence[int] = (),
        where: Callable[[], str] = str,
    ) -> None:
        self.search_of_knobs, self._layouts, self._space, self._make_model = search, layouts, space, make_model
        self._before, self._place = before, place
        self.controller = TuningController(OneRank(), where=where)  # type: ignore[arg-type]
        self.default, self.running = search.default, search.default
        self.assignments: list[tuple[Assignment, Sequence[float]]] = []
        self.broken: set[Knobs] = set()
        self.iterations_run, self.searched, self.kept = 0, False, False
        self._span_s: Callable[[Knobs], float] = lambda knobs: 1.0

    @property
    def stays(self) -> Knobs | None:
        return self.search_of_knobs.stays

    @stays.setter
    def stays(self, knobs: Knobs | None) -> None:
        self.search_of_knobs.stays = knobs

    def begin(self, *, recalls: bool = True) -> None:
        """Begin a search."""
        self.kept = False
        self.controller.begin(self, recalls=recalls)

    def run(self, span_s: Callable[[Knobs], float], *, at_most: int = 10_000) -> int:
        """Run iterations until a setting is kept. Return their number.

        Args:
            span_s: function from knobs to the communication time in seconds.
            at_most: maximum number of iterations.
        """
        self._span_s, begun = span_s, self.iterations_run
        while self.controller.tries(self) and self.iterations_run - begun < at_most:
            self.iterations_run += 1
            self.controller.iteration_ended()
        return self.iterations_run - begun

    def train(self, iterations: int, span_s: Callable[[Knobs], float]) -> None:
        """Run iterations, with refinements of the kept setting (see `run`)."""
        self._span_s = span_s
        for _ in range(iterations):
            self.iterations_run += 1
            if self.controller.searching:
                self.controller.iteration_ended()
            else:
                self.controller.refine(self)

    def recall(self) -> TuningSession | None:
        return self.search_of_knobs.recall(self._layouts, self._space, self._before, place=self._place)

    def prepare(self) -> None:
        self.searched = True

    def search(self, session: TuningSession | None) -> TuningSession:
        return self.search_of_knobs.search(session, self._space, self._space, self._make_model)

    def refine(self, session: TuningSession, iterations_left: int) -> bool:
        return self.search_of_knobs.refine(session, iterations_left, self._space)

    def apply(self, knobs: Knobs) -> None:
        if knobs in self.broken:
            raise PlanError("it is broken")
        self.running = knobs

    def measured_s(self) -> float:
        return self._span_s(self.running)

    def record(self, session: TuningSession, spans_s: Sequence[float]) -> None:
        self.assignments.append((session.assignment, spans_s))
        self.search_of_knobs.record(session, spans_s, iteration=self.iterations_run)

    def keep(self) -> None:
        self.kept = True

    def report(self, session: TuningSession) -> None:
        self.search_of_knobs.report(session, iteration=self.iterations_run)
