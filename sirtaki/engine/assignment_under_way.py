"""What the warm-up runs now, and for how long yet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sirtaki.autotune.meta.assignment import Assignment

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane


class AssignmentUnderWay:
    """An assignment and the spans of its iterations so far.

    Attributes:
        assignment: which.
        spans_s: of the iterations that count, each the shortest of all ranks.
    """

    def __init__(self, assignment: Assignment) -> None:
        """Nothing has run of it."""
        self.assignment, self.spans_s = assignment, list[float]()
        self._to_discard = assignment.discarded_iterations

    def note(self, span_s: float, control: ControlPlane) -> bool:
        """Collective: counts an iteration; whether it was the last one.

        `span_s` of a rank that has joined is not a number: nothing overlaps then, and the iteration shows nothing.
        """
        if self._to_discard > 0:
            self._to_discard -= 1
            return False
        # The last rank to arrive sets the pace; the others' spans hold its lateness.
        shortest_s = float(control.minimum(np.array([-1.0 if math.isnan(span_s) else span_s]))[0])
        if shortest_s < 0.0:
            return False
        self.spans_s.append(shortest_s)
        return len(self.spans_s) >= self.assignment.measured_iterations
