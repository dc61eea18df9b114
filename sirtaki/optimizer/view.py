"""The job as the search replays it, and the accelerations of section 5.3, each of which can be left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from sirtaki.autotune.model.graph import Activity
from sirtaki.autotune.model.replayer import Replay, replay
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Route
from sirtaki.engine.knob_choices import plans_for
from sirtaki.errors import ReplayError
from sirtaki.profiler.recording import Buffer
from sirtaki.replay.coarsening import coarse, mean_iteration, symmetric
from sirtaki.replay.global_graph import global_graph
from sirtaki.replay.job_model import Iteration, JobModel, Operation
from sirtaki.replay.other_plan import with_plans
from sirtaki.replay.unit_costs import UnitCost, unit_cost

from .change import Candidate
from .schedule import Schedule

FEW_RANKS = 8
TOLERANCES = (0.02, 0.05, 0.1, 0.2)
"""How much ranks that count as alike may differ, more of it where too many would be left."""


class Acceleration(Enum):
    """What makes the search quicker."""

    COARSENING = "coarsening"  # chains are one piece, and gradients that come together start as one tensor
    PARTIAL_REPLAY = "partial-replay"  # what a tensor takes is told by a replay of its units alone
    SYMMETRY = "symmetry"  # ranks that are alike are replayed once, changes that are alike are tried at once


EVERY = frozenset(Acceleration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The gradients whose plan is sought: those of one optimizer.

    Attributes:
        buffers: theirs; the first one's is planned unit by unit.
    """

    buffers: tuple[Buffer, ...]

    @classmethod
    def of(cls, job: JobModel) -> Subject:
        """The optimizer with the most gradients.

        Raises:
            ReplayError: no gradients were exchanged.
        """
        if not job.buffers:
            raise ReplayError("no gradients were exchanged, so there is no plan to improve")
        total: dict[tuple[int, int], int] = {}
        for buffer in job.buffers:
            total[buffer.reducer] = total.get(buffer.reducer, 0) + buffer.layout.total_bytes
        largest = max(total, key=lambda reducer: total[reducer])
        return cls(buffers=tuple(buffer for buffer in job.buffers if buffer.reducer == largest))

    @property
    def layout(self) -> GradientLayout:
        """Of the buffer that is planned unit by unit."""
        return self.buffers[0].layout

    @property
    def recorded(self) -> Schedule:
        """How that one travelled."""
        return Schedule.recorded(self.buffers[0])

    def planned(self, job: JobModel, candidate: Candidate, costs: Mapping[Route, UnitCost] | None = None) -> JobModel:
        """The job with a candidate's units, and whatever else that changes.

        Raises:
            ReplayError: nothing is known of its route.
        """
        layouts = [buffer.layout for buffer in self.buffers]
        plans = plans_for(candidate.schedule.knobs(self.layout), layouts)
        numbers = [buffer.number for buffer in self.buffers]
        job = with_plans(job, dict(zip(numbers, plans, strict=True)), costs=costs)
        for extra in candidate.extras:
            job = extra.apply(job)
        return job


class View:
    """A smaller job that is replayed for each candidate.

    Attributes:
        subject: what is planned.
        accelerations: that are in force.
        replays: how many graphs have been played, parts of them included.
    """

    def __init__(self, job: JobModel, subject: Subject, accelerations: frozenset[Acceleration] = EVERY) -> None:
        self.subject, self.accelerations, self.replays = subject, accelerations, 0
        self._job, self._costs = job, dict[Route, UnitCost]()
        small = mean_iteration(job)
        if Acceleration.COARSENING in accelerations:
            small = coarse(small, settled=False)
        if Acceleration.SYMMETRY in accelerations:
            small = _few(small)
        self._small = small
        self._sync_s: dict[tuple[Route, int, int, int], float] = {}

    @property
    def n_ranks(self) -> int:
        """That are replayed."""
        return len(self._small.ranks)

    @property
    def job(self) -> JobModel:
        """With the units that were recorded."""
        return self._small

    @property
    def startup_s(self) -> float:
        """Of a unit on the route that was recorded."""
        return self._cost(self.subject.recorded.route).startup_s

    def planned(self, candidate: Candidate) -> JobModel:
        """See `Subject.planned`."""
        return self.subject.planned(
            self._small, candidate, {candidate.schedule.route: self._cost(candidate.schedule.route)}
        )

    def play(self, job: JobModel) -> Replay:
        """Replays it."""
        self.replays += 1
        return replay(global_graph(coarse(job) if Acceleration.COARSENING in self.accelerations else job))

    def sync_s(self, candidate: Candidate, n_bytes: int, parts: int) -> float:
        """t_sync(s, k): what a tensor takes as so many units, from when they leave until the last one is there."""
        schedule = candidate.schedule
        units = [self._probe(candidate, -(-n_bytes // parts), number) for number in range(parts)]
        if Acceleration.PARTIAL_REPLAY not in self.accelerations:
            return self._among_all_s(candidate, units)
        key = (schedule.route, schedule.streams, n_bytes, parts)
        if key not in self._sync_s:
            alone = Iteration(programs=dict.fromkeys(self._small.ranks, ()), operations=tuple(units))
            job = replace(self._small, iterations=(alone,), begin_s={})
            self.replays += 1
            self._sync_s[key] = replay(global_graph(job)).total_s
        return self._sync_s[key]

    def _among_all_s(self, candidate: Candidate, units: list[Operation]) -> float:
        """The same by a replay of everything, in which nobody waits for these units."""
        job = self.planned(candidate)
        (iteration,) = job.iterations
        played = self.play(
            replace(job, iterations=(replace(iteration, operations=(*iteration.operations, *units)),), begin_s={})
        )
        first = len(job.ranks) + len(iteration.operations)
        return max(played.end_s[first : first + len(units)])

    def _probe(self, candidate: Candidate, n_bytes: int, number: int) -> Operation:
        buffer = self.subject.buffers[0]
        bare = Operation(
            key=(-2, number, number + 1),
            activity=Activity.UNIT,
            lane=f"probe {number % candidate.schedule.streams}",
            ranks=tuple(rank for rank in buffer.ranks if rank in self._small.ranks),
            n_bytes=n_bytes,
            route=candidate.schedule.route,
        )
        return self._cost(candidate.schedule.route).applied_to(bare)

    def _cost(self, route: Route) -> UnitCost:
        if route not in self._costs:
            self._costs[route] = unit_cost(self._job, route, self._job.ranks)
        return self._costs[route]


def _few(job: JobModel) -> JobModel:
    small = job
    for tolerance in TOLERANCES:
        small = symmetric(job, tolerance=tolerance)
        if len(small.ranks) <= FEW_RANKS:
            break
    return small
