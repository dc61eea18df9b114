"""How the ranks of a machine used its processors, and how much of one a unit keeps busy.

A unit that waits for messages leaves processors to computation for a part of its time. How large the other part is
follows from the processor time that ranks have used beside the threads that train: it is that of their units, as long
as each would have been with the processors to itself. Both depend on each other, and are found by turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from sirtaki.autotune.model.graph import Activity

from .barriers import Barrier
from .histories import Histories
from .job_model import Processors
from .share_clock import ShareClock, Use

TURNS = 20
CLOSE = 1e-4
LEAST_BUSY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """Of one machine.

    Attributes:
        clock: of what computes there.
        busy: see `Operation`; 1 where it cannot be told.
    """

    clock: ShareClock
    busy: float


def processor_use(group: Processors, histories: Histories) -> ProcessorUse:
    """What the ranks of this machine did in all recorded iterations."""
    units = [one for step in histories.steps for one in step.barriers if _is_there(one, group, histories)]
    computation = [
        (one.begin_s, one.end_s, float(group.threads))
        for step in histories.steps
        for rank in group.ranks
        for one in step.stretches[rank]
        if one.computes
    ]

    def clock(busy: float) -> ShareClock:
        uses: list[Use] = [(one.begin_s, one.end_s, busy * len(one.ranks)) for one in units]
        return ShareClock(group.server, [*computation, *uses])

    spent_s = _spent_s(group, histories) if units else None
    if spent_s is None:
        return ProcessorUse(clock=clock(1.0), busy=1.0)
    busy = 1.0
    for _ in range(TURNS):
        alone = clock(busy)
        alone_s = sum(len(one.ranks) * alone.between(one.begin_s, one.end_s) for one in units)
        before, busy = busy, min(1.0, max(LEAST_BUSY, spent_s / alone_s)) if alone_s > 0 else 1.0
        if abs(busy - before) <= CLOSE:
            break
    return ProcessorUse(clock=clock(busy), busy=busy)


def _is_there(one: Barrier, group: Processors, histories: Histories) -> bool:
    return one.activity is Activity.UNIT and one.ranks[0] in group.ranks and not histories.crosses_hosts(one)


def _spent_s(group: Processors, histories: Histories) -> float | None:
    """Processor time of communication; None = it was not recorded, or operators use other threads, too."""
    if group.threads > 1:
        return None
    numbers = {step.number for step in histories.steps}
    spent_s = [
        one.beside_s
        for rank in group.ranks
        for one in histories.recording.ranks[rank].iterations
        if one.number in numbers
    ]
    known = [seconds for seconds in spent_s if seconds is not None]
    return sum(known) if len(known) == len(spent_s) else None
