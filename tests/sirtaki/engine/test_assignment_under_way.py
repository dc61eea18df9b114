"""An assignment is over when as many iterations as it wants were measured on all ranks."""

import math

import numpy as np
import pytest

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.meta.session import Assignment, Purpose
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.tuning.warmup import AssignmentUnderWay

KNOBS = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO)


class OtherRank:
    """The control plane with another rank, whose iterations take so long; not a number: it has joined."""

    def __init__(self, *spans_s: float) -> None:
        self._spans_s = list(spans_s)

    def minimum(self, values: np.ndarray) -> np.ndarray:
        other_s = self._spans_s.pop(0)
        return np.minimum(values, -1.0 if math.isnan(other_s) else other_s)


def under_way(*, discarded: int, measured: int) -> AssignmentUnderWay:
    return AssignmentUnderWay(
        Assignment(
            knobs=KNOBS,
            discarded_iterations=discarded,
            measured_iterations=measured,
            arm="grid",
            purpose=Purpose.TRIAL,
        )
    )


def test_the_shortest_of_all_ranks_counts_after_those_that_do_not() -> None:
    own, other = under_way(discarded=2, measured=2), OtherRank(0.3, 0.1)
    assert [own.note(span_s, other) for span_s in (9.0, 9.0, 0.2, 0.2)] == [False, False, False, True]
    assert own.spans_s == [0.2, 0.1]


@pytest.mark.parametrize(("here_s", "there_s"), [(math.nan, 0.2), (0.2, math.nan), (math.nan, math.nan)])
def test_an_iteration_in_which_a_rank_had_joined_shows_nothing(here_s: float, there_s: float) -> None:
    own = under_way(discarded=0, measured=1)
    assert not own.note(here_s, OtherRank(there_s))
    assert own.spans_s == []
    assert own.note(0.2, OtherRank(0.4))
