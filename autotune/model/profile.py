"""When each gradient of an iteration becomes ready, measured once and then used by planners and simulator.

How the times were taken (hooks, a saved file, a benchmark's layer list) does not matter to planners.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from sirtaki.comm.layout import GradientLayout
from sirtaki.errors import TuningError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The backward pass of one iteration without any communication.

    Attributes:
        ready_s: when each gradient is ready, `(n_gradients,)`, in the layout's order, counted from the beginning of
            the backward pass. It need not ascend: the layout is ordered by the average position over ranks.
        compute_s: when the backward pass ends; not before the last gradient is ready.
        forward_s: length of the forward pass before it; it matters to iteration times only, never to plans.

    Raises:
        TuningError: there is no gradient, or a time is negative, not finite or after the end of the pass.
    """

    ready_s: tuple[float, ...]
    compute_s: float
    forward_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.ready_s:
            raise TuningError("a profile needs at least one gradient")
        if not all(math.isfinite(time_s) and time_s >= 0 for time_s in (*self.ready_s, self.compute_s, self.forward_s)):
            raise TuningError(
                f"profiled times must be finite and not negative: ready from {min(self.ready_s)} s to "
                f"{max(self.ready_s)} s, backward {self.compute_s} s, forward {self.forward_s} s"
            )
        if max(self.ready_s) > self.compute_s:
            raise TuningError(
                f"a gradient is ready at {max(self.ready_s)} s, after the backward pass ended at {self.compute_s} s"
            )

    @classmethod
    def from_durations(cls, durations_s: Sequence[float], *, forward_s: float = 0.0) -> "Profile":
        """The profile of gradients computed one behind the other, `(n_gradients,)` durations in seconds.

        Raises:
            TuningError: a duration is negative or not finite, or there is none.
        """
        if not all(math.isfinite(duration_s) and duration_s >= 0 for duration_s in durations_s):
            raise TuningError(f"durations must be finite and not negative, the smallest is {min(durations_s)} s")
        ready_s = tuple(accumulate(durations_s))
        return cls(ready_s=ready_s, compute_s=ready_s[-1] if ready_s else 0.0, forward_s=forward_s)

    @property
    def issuable_s(self) -> tuple[float, ...]:
        """When each gradient *and all before it* are ready, `(n_gradients,)`: units are issued in a fixed order."""
        return tuple(accumulate(self.ready_s, max))

    @property
    def durations_s(self) -> tuple[float, ...]:
        """Compute time up to each gradient's issue since the one before it, `(n_gradients,)` (LIBRA's b_i).

        What the pass still does after the last gradient counts for that one, so the sum is `compute_s`.
        """
        issuable_s = self.issuable_s
        steps = [after - before for before, after in zip((0.0, *issuable_s[:-1]), issuable_s, strict=True)]
        steps[-1] += self.compute_s - issuable_s[-1]
        return tuple(steps)

    def check_fits(self, layout: GradientLayout) -> None:
        """Does nothing if there is one time for each gradient of `layout`.

        Raises:
            TuningError: the numbers differ.
        """
        if len(self.ready_s) != len(layout.sizes):
            raise TuningError(f"a profile of {len(self.ready_s)} gradients for a layout of {len(layout.sizes)}")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` is its inverse."""
        return {"ready_s": list(self.ready_s), "compute_s": self.compute_s, "forward_s": self.forward_s}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Profile":
        """The profile that `to_json` described."""
        return cls(ready_s=tuple(data["ready_s"]), compute_s=data["compute_s"], forward_s=data["forward_s"])
