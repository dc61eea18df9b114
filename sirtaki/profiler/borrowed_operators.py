"""Operators for a step that torch.profiler did not see, from one that it saw: what it slowed is not believed.

torch.profiler takes about a microsecond for each operator, which is much where operators are small. So steps are
recorded twice, with it and without. Both have the same moments that Sirtaki notes by itself (gradients, copies, waits,
updates), and between two of them the operators of the one are stretched or shrunk to fit the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .operators import StepOperators
from .recording import Operator, PhaseSpan

Moments = Mapping[tuple[object, ...], float]
"""Of one step, by what happened then; what has the same name is the same in every step."""

FloatArray = NDArray[np.float64]

_Span = TypeVar("_Span", Operator, PhaseSpan)


def borrowed(seen: StepOperators, there: Moments, here: Moments) -> StepOperators:
    """What was seen in one step, as it would have been seen in another.

    Args:
        seen: of the step of `there`.
        there: when things happened in it.
        here: when they happened in the other one; what only one of them has does not count.
    """
    clock = _Map.between(there, here)
    return StepOperators(
        operators=tuple(clock.moved(one) for one in seen.operators), spans=tuple(clock.moved(one) for one in seen.spans)
    )


@dataclass(frozen=True, slots=True)
class _Map:
    """From moments of one step to those of the other: straight between those that both have."""

    there_s: FloatArray
    here_s: FloatArray

    @classmethod
    def between(cls, there: Moments, here: Moments) -> _Map:
        pairs = sorted((there[key], here[key]) for key in there.keys() & here.keys())
        kept = pairs[:1]
        for there_s, here_s in pairs[1:]:
            # What happened in another order, such as gradients of two threads, is no common moment.
            if there_s > kept[-1][0] and here_s >= kept[-1][1]:
                kept.append((there_s, here_s))
        return cls(*np.array(kept).T)

    def moved(self, one: _Span) -> _Span:
        begin_s, end_s = np.interp([one.begin_s, one.end_s], self.there_s, self.here_s)
        return replace(one, begin_s=float(begin_s), end_s=float(end_s))
