"""dPRO's algorithm 1: walk the critical path, try what passes propose there, keep what the replay says is faster.

It begins anew from the fastest of each kind of start: even cuts, gradients one by one, and gradients as they come (the
coarsened view), on each route and number of streams; the recorded plan counts among each. Theorems only choose what is
tried. A beginning has been followed when a walk finds nothing, or five walks have changed little.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from sirtaki.autotune.model.replayer import Replay
from sirtaki.errors import PlanError, ReplayError
from sirtaki.replay.job_model import JobModel
from sirtaki.replay.step_times import replayed

from .change import Candidate, Change, Choices, Pass
from .schedule import Schedule, Tensor
from .spot import Spot
from .view import Acceleration, View

FEW_WALKS, LITTLE = 5, 0.002
"""When so many walks have made the step shorter by less than that share, the search ends."""

SURELY = 1e-6
"""Share of the step; what is less is rounding."""

OCTAVE = 2

FEW_GRADIENTS = 32
"""With so few, what accelerations leave out is looked at, too: it costs little."""

MOST_UNITS = 256
"""Of even cuts that the search begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has come to.

    Attributes:
        candidate: the fastest.
        step_s: with it, in the view.
        recorded_s: with the units that were recorded, cut and priced in the same way, in the view.
        changes: how often each kind of change was kept, after the start.
        walks: along critical paths.
        replays: of graphs and parts of them.
        in_time: it ended by itself.
    """

    candidate: Candidate
    step_s: float
    recorded_s: float
    changes: Counter[str] = field(default_factory=Counter)
    walks: int
    replays: int
    in_time: bool


class Search:
    """One search over one view."""

    def __init__(
        self,
        view: View,
        passes: Sequence[Pass],
        choices: Choices,
        *,
        limit_s: float = float("inf"),
        indifference: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to count time.

        Args:
            view: of the job.
            passes: propose changes.
            choices: what the job can run.
            limit_s: after it what has been found until then is the result.
            indifference: share of the step that the result may be longer if it is simpler: on fewer streams, in even
                units, in fewer of them.
            clock: shows seconds.
        """
        self._view, self._passes, self._choices, self._clock = view, passes, choices, clock
        self._until_s, self._indifference = clock() + limit_s, indifference
        self._step_s: dict[Candidate, float] = {}

    def run(self) -> Found:
        """The fastest candidate."""
        recorded = Candidate(schedule=self._view.subject.recorded)
        recorded_s = self._judged(recorded)
        fastest: dict[str, Candidate] = {}
        for kind, candidate in self._starts():
            if self._late:
                break
            fastest[kind] = self._faster(candidate, fastest.get(kind, recorded))
        best, changes, walks = recorded, Counter[str](), 0
        for start in sorted(dict.fromkeys(fastest.values()) or [recorded], key=self._judged):
            for together in self._manners():
                found, kept, took = self._refined(start, together=together)
                walks += took
                if self._faster(found, best) is found:
                    best, changes = found, kept
        best = self._simplest(best)
        return Found(
            candidate=best,
            step_s=self._judged(best),
            recorded_s=recorded_s,
            changes=changes,
            walks=walks,
            replays=self._view.replays,
            in_time=not self._late,
        )

    def _refined(self, start: Candidate, *, together: bool) -> tuple[Candidate, Counter[str], int]:
        """Walks from there on; the changes that were kept, and how many walks it took."""
        best, kept, lengths_s = start, Counter[str](), [self._judged(start)]
        while not self._late:
            best = self._walk(best, kept, together=together)
            lengths_s.append(self._judged(best))
            if lengths_s[-1] == lengths_s[-2]:
                break
            if len(lengths_s) > FEW_WALKS and lengths_s[-1] > (1 - LITTLE) * lengths_s[-1 - FEW_WALKS]:
                break
        return best, kept, len(lengths_s) - 1

    def _simplest(self, best: Candidate) -> Candidate:
        """Of all that were replayed, with as much changed besides, and are about as fast."""
        near = [
            candidate
            for candidate, step_s in self._step_s.items()
            if step_s <= (1 + self._indifference) * self._judged(best) and candidate.extras == best.extras
        ]
        layout = self._view.subject.layout

        def complexity(candidate: Candidate) -> tuple[int, bool, int, float]:
            schedule = candidate.schedule
            units = sum(min(tensor.parts, tensor.stop) for tensor in schedule.tensors_of(layout))
            return schedule.streams, schedule.tensors is not None, units, self._judged(candidate)

        return min(near, key=complexity) if self._indifference else best

    @property
    def _late(self) -> bool:
        return self._clock() > self._until_s

    # ── where it begins ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_small(self) -> bool:
        return len(self._view.subject.layout.sizes) <= FEW_GRADIENTS

    def _manners(self) -> Sequence[bool]:
        """Whether walks try changes that are alike together."""
        if Acceleration.SYMMETRY not in self._view.accelerations:
            return (False,)
        return (True, False) if self._is_small else (True,)

    def _starts(self) -> Iterator[tuple[str, Candidate]]:
        """Of each kind some, of which the fastest is a beginning."""
        layout = self._view.subject.layout
        coarse = Acceleration.COARSENING in self._view.accelerations
        for route in self._choices.routes:
            for streams in self._choices.streams:
                unit_bytes = max(self._choices.least_bytes, 1 << (layout.total_bytes // MOST_UNITS).bit_length())
                while unit_bytes < OCTAVE * layout.total_bytes:
                    yield "even", Candidate(schedule=Schedule(route=route, streams=streams, unit_bytes=unit_bytes))
                    unit_bytes *= OCTAVE
                ends = {"gradients": list(range(len(layout.sizes)))} if not coarse or self._is_small else {}
                if coarse:
                    ends["coarsened"] = _groups(self._view, streams)
                for kind, indices in ends.items():
                    stops = {layout.offsets[index + 1] for index in indices} - {0} | {layout.numel}
                    tensors = tuple(Tensor(stop=stop) for stop in sorted(stops))
                    schedule = Schedule(route=route, streams=streams, unit_bytes=unit_bytes, tensors=tensors)
                    yield kind, Candidate(schedule=schedule)

    # ── walks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _walk(self, best: Candidate, kept: Counter[str], *, together: bool) -> Candidate:
        """Once along the critical path; what helps is kept at once."""
        job, played = self._played(best)
        spot = Spot(self._view, self._choices, best, job, played)
        proposed: list[Change] = []
        for tensor in spot.critical:
            if not self._late:
                proposed += [change for each in self._passes for change in each.changes(spot, tensor)]
        for changes in _tries(proposed, together=together):
            if self._late:
                break
            tried: Candidate | None = best
            applied = 0
            for change in changes:
                after = None if tried is None else change.apply(tried)
                if after is not None:
                    tried, applied = after, applied + 1
            if not applied or tried is None or tried == best:
                continue
            faster = self._faster(tried, best)
            if faster is not best:
                best = faster
                kept[changes[0].words] += applied
        return best

    # ── the judge ────────────────────────────────────────────────────────────────────────────────────────────────

    def _faster(self, candidate: Candidate, best: Candidate) -> Candidate:
        return candidate if self._judged(candidate) < (1 - SURELY) * self._judged(best) else best

    def _judged(self, candidate: Candidate) -> float:
        if candidate not in self._step_s:
            try:
                _, played = self._played(candidate)
                self._step_s[candidate] = replayed(played).iteration_s
            except (PlanError, ReplayError):  # it does not fit, or nothing is known of its route
                self._step_s[candidate] = float("inf")
        return self._step_s[candidate]

    def _played(self, candidate: Candidate) -> tuple[JobModel, Replay]:
        job = self._view.planned(candidate)
        return job, self._view.play(job)


def _tries(proposed: Sequence[Change], *, together: bool) -> Iterator[Sequence[Change]]:
    """Each change; before that, if asked for, those that are alike together."""
    groups: dict[Hashable, list[Change]] = defaultdict(list)
    for change in proposed if together else ():
        if change.alike is not None:
            groups[change.words, change.alike].append(change)
    yield from (group for group in groups.values() if len(group) > 1)
    yield from ([change] for change in proposed)


def _groups(view: View, streams: int) -> list[int]:
    """Numbers of the gradients behind which a tensor ends: gradients come together if they do within a start-up time.

    Those of one operation never come at one moment, since hooks run one after the other. Start-ups on several streams
    overlap, so one counts for less there.
    """
    number, startup_s = view.subject.buffers[0].number, view.startup_s / streams
    come_s: dict[int, float] = {}
    for program in view.job.iterations[0].programs.values():
        now_s = 0.0
        for piece in program:
            now_s += piece.seconds
            for buffer, index in piece.ready:
                if buffer == number:
                    come_s[index] = max(now_s, come_s.get(index, 0.0))
    ends, first_s = [], None
    for index in sorted(come_s):
        if first_s is not None and come_s[index] - first_s > startup_s:
            ends.append(index - 1)
            first_s = None
        first_s = come_s[index] if first_s is None else first_s
    return ends
