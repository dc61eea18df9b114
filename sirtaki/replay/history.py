"""What a rank's training thread did in one recorded iteration, without a gap: stretches of time, each of one kind.

Operators and copies are there as they were recorded, and what lies between them is the script's, in the phase that it
lies in. Where the thread waited for other ranks the stretch says for what.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.model.graph import Activity, Phase
from sirtaki.profiler.recording import RecordedIteration
from sirtaki.profiler.step_memory import Module, ModuleKey

from .job_model import GradientKey, OperationKey, Piece

Clock = Callable[[float], float]
"""From a rank's clock to the job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One kind of thing for a while; moments of the job's clock.

    Attributes:
        waits: the thread waits for these, and for nothing else; empty if it does something.
        module: as `Piece.module`.
    """

    begin_s: float
    end_s: float
    activity: Activity
    phase: Phase
    name: str = ""
    waits: tuple[OperationKey, ...] = ()
    module: ModuleKey | None = None

    @property
    def computes(self) -> bool:
        """Processors are used: a loader's time is its own, and who waits sleeps."""
        return not self.waits and self.activity is not Activity.DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """From when on a thread waited for operations, and when they were done; both moments may turn out to be one.

    Attributes:
        until_backward_ends: their results are not looked at before.
    """

    begin_s: float
    end_s: float
    keys: tuple[OperationKey, ...]
    until_backward_ends: bool = False

    @property
    def phase(self) -> Phase | None:
        """That the waiting belongs to; None = the one in which it is done."""
        return Phase.BACKWARD if self.until_backward_ends else None


def stretches(iteration: RecordedIteration, clock: Clock, modules: Sequence[Module] = ()) -> list[Stretch]:
    """The whole iteration, waiting not told apart yet."""
    begin_s, end_s = clock(iteration.begin_s), clock(iteration.end_s)
    known = [
        Stretch(
            begin_s=clock(one.begin_s),
            end_s=clock(one.end_s),
            activity=Activity.DATA if one.phase is Phase.DATA else Activity.COMPUTE,
            phase=one.phase,
            name=one.name,
            module=modules[one.module].key if one.module >= 0 else None,
        )
        for one in iteration.operators
        if one.lane == 0
    ]
    spans = [
        Stretch(begin_s=clock(one.begin_s), end_s=clock(one.end_s), activity=_usual(one.phase), phase=one.phase)
        for one in iteration.spans
    ]
    copies = [
        Stretch(
            begin_s=clock(one.begin_s),
            end_s=clock(one.end_s),
            activity=Activity.COPY,
            phase=_phase_at(spans, clock(one.begin_s)),
            name="copy gradients",
        )
        for one in iteration.copies
    ]
    full: list[Stretch] = []
    now_s = begin_s
    for one in sorted([*known, *copies], key=lambda one: one.begin_s):
        # Operators are told by another clock, so neighbours may seem to overlap a little.
        from_s, to_s = max(now_s, min(one.begin_s, end_s)), min(one.end_s, end_s)
        if to_s < from_s:
            continue
        full += _between(spans, now_s, from_s)
        full.append(replace(one, begin_s=from_s, end_s=to_s))
        now_s = to_s
    return [*full, *_between(spans, now_s, end_s)]


def _usual(phase: Phase) -> Activity:
    return Activity.DATA if phase is Phase.DATA else Activity.COMPUTE


def _phase_at(spans: Sequence[Stretch], moment_s: float) -> Phase:
    return next((one.phase for one in spans if one.begin_s <= moment_s < one.end_s), Phase.OTHER)


def _between(spans: Sequence[Stretch], begin_s: float, end_s: float) -> list[Stretch]:
    """Time in which nothing is recorded but, perhaps, the phase."""
    found: list[Stretch] = []
    now_s = begin_s
    for span in spans:
        if span.end_s <= now_s or span.begin_s >= end_s:
            continue
        if span.begin_s > now_s:
            found.append(_other(now_s, span.begin_s))
        now_s, from_s = min(span.end_s, end_s), max(span.begin_s, now_s)
        found.append(replace(span, begin_s=from_s, end_s=now_s))
    return [*found, _other(now_s, end_s)] if end_s > now_s else found


def _other(begin_s: float, end_s: float) -> Stretch:
    return Stretch(begin_s=begin_s, end_s=end_s, activity=Activity.COMPUTE, phase=Phase.OTHER)


def with_waits(full: Sequence[Stretch], waits: Sequence[Wait]) -> list[Stretch]:
    """Stretches, those in which the thread waited told apart; only time that nothing was recorded in is waiting."""
    found = list(full)
    for wait in sorted(waits, key=lambda wait: wait.end_s):
        found = _with_wait(found, wait)
    return found


def _with_wait(full: list[Stretch], wait: Wait) -> list[Stretch]:
    place = min(bisect_left([one.end_s for one in full], wait.end_s), len(full) - 1)
    one = full[place]
    backward_end = max(
        (at + 1 for at, each in enumerate(full) if each.name and each.phase is Phase.BACKWARD), default=0
    )
    if one.name or one.waits or (wait.until_backward_ends and place < backward_end):
        # Something was done then, so nobody waited: the result is needed later, when backward() returns at the soonest.
        place = max(place + 1, backward_end if wait.until_backward_ends else 0)
        moment_s = full[place - 1].end_s
        seen = Stretch(
            begin_s=moment_s,
            end_s=moment_s,
            activity=Activity.COMPUTE,
            phase=wait.phase or full[place - 1].phase,
            waits=wait.keys,
        )
        return [*full[:place], seen, *full[place:]]
    begin_s = min(max(one.begin_s, wait.begin_s), wait.end_s)
    end_s = min(max(begin_s, wait.end_s), one.end_s)
    parts = [
        replace(one, end_s=begin_s),
        replace(
            one,
            begin_s=begin_s,
            end_s=end_s,
            activity=Activity.COMPUTE,
            phase=wait.phase or one.phase,
            waits=wait.keys,
        ),
        replace(one, begin_s=end_s),
    ]
    return [*full[:place], *(part for part in parts if part.waits or part.end_s > part.begin_s), *full[place + 1 :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Moments on which others depend, of the job's clock.

    Attributes:
        ready: when each gradient came.
        issued: when this rank took part in each operation from.
        seen: how much later than the first rank this one saw each operation's result.
    """

    ready: Sequence[tuple[float, GradientKey]]
    issued: Sequence[tuple[float, OperationKey]]
    seen: dict[OperationKey, float]


def pieces(full: Sequence[Stretch], marks: Marks, work_s: Callable[[float, float], float]) -> tuple[Piece, ...]:
    """The program: stretches cut at marks.

    Args:
        full: of one iteration.
        marks: cut it.
        work_s: how much a thread got done from one moment to another, in seconds on a processor of its own.
    """
    at: dict[float, tuple[list[GradientKey], list[OperationKey]]] = {}
    for moment_s, gradient in marks.ready:
        at.setdefault(moment_s, ([], []))[0].append(gradient)
    for moment_s, key in marks.issued:
        at.setdefault(moment_s, ([], []))[1].append(key)
    cuts = sorted(at)
    found: list[Piece] = []
    place = 0
    last_s = full[-1].end_s
    for one in full:
        now_s = one.begin_s
        waits = tuple((key, marks.seen.get(key, 0.0)) for key in one.waits)
        while place < len(cuts) and (cuts[place] <= one.end_s or one.end_s >= last_s):
            until_s = max(now_s, min(cuts[place], one.end_s))
            ready, issued = at[cuts[place]]
            found.append(_piece(one, now_s, until_s, work_s, waits, tuple(ready), tuple(issued)))
            now_s, waits = until_s, ()
            place += 1
        if one.end_s > now_s or waits:
            found.append(_piece(one, now_s, one.end_s, work_s, waits))
    return tuple(found)


def _piece(
    one: Stretch,
    begin_s: float,
    end_s: float,
    work_s: Callable[[float, float], float],
    waits: tuple[tuple[OperationKey, float], ...],
    ready: tuple[GradientKey, ...] = (),
    issues: tuple[OperationKey, ...] = (),
) -> Piece:
    seconds = 0.0 if one.waits else work_s(begin_s, end_s) if one.computes else end_s - begin_s
    return Piece(
        activity=one.activity,
        phase=one.phase,
        name=one.name,
        seconds=seconds,
        computes=one.computes,
        waits=waits,
        ready=ready,
        issues=issues,
        module=one.module,
    )
