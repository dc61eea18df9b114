"""How far this rank's clock is from rank 0's, so that events of all ranks can stand on one time axis.

Each rank asks rank 0 for the time a few times, and believes the answer that came quickest: it was made about half way
(Cristian 1989), and is wrong by half of the time for the round trip at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from .failure import poll_until
from .plane import ControlPlane

QUESTIONS = 16


class ClockOffset(NamedTuple):
    """What must be added to this rank's clock to get rank 0's, and the quickest round trip that showed it."""

    offset_s: float
    round_trip_s: float


def offset_from(answers: Sequence[tuple[float, float, float]]) -> float:
    """What must be added to this clock to get the other one.

    Args:
        answers: (asked_s, answer_s, received_s): this clock, the other clock, this clock.
    """
    asked_s, answer_s, received_s = min(answers, key=lambda answer: answer[2] - answer[0])
    offset_s = answer_s - (asked_s + received_s) / 2
    # Processes of one host have one clock; what cannot be told from no difference is none.
    return 0.0 if abs(offset_s) <= (received_s - asked_s) / 2 else offset_s


def compare_clocks(control: ControlPlane, *, now_s: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Collective: how far this rank's clock is from rank 0's.

    Args:
        control: the ranks.
        now_s: this rank's clock.
    """
    answers = []
    comm, question, answer = control.comm, np.zeros(1), np.zeros(1)
    wait = partial(poll_until, failures=control.failures)
    for rank in range(1, control.size):
        for _ in range(QUESTIONS):
            if control.rank == 0:
                wait(comm.receive(question, rank))
                answer[0] = now_s()
                wait(comm.send(answer, rank))
            elif control.rank == rank:
                asked_s = now_s()
                wait(comm.send(question, 0))
                wait(comm.receive(answer, 0))
                answers.append((asked_s, float(answer[0]), now_s()))
    if not answers:
        return ClockOffset(0.0, 0.0)
    quickest_s = min(received_s - asked_s for asked_s, _, received_s in answers)
    return ClockOffset(offset_from(answers), quickest_s)


def align_clocks(control: ControlPlane) -> float:
    """Collective: what must be added to this rank's clock to get rank 0's, which begins at zero here."""
    offset_s = compare_clocks(control).offset_s
    origin_s: float = control.broadcast(time.perf_counter() if control.rank == 0 else None)
    return offset_s - origin_s
