"""The order in which gradients come: profiled, agreed by all ranks, and watched for changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

    from .buffers import GradientBuffers

PROFILING_ITERATIONS = 2
"""The first iteration runs with cold caches; its order is kept only if the second one cannot be had."""

DISORDERLY_ITERATIONS = 3
"""So many in a row before a rank asks for a new profile of the order."""

PATIENCE_ITERATIONS = 50
"""Each new profile doubles the time to the next one, beginning here: an order that never settles is not chased."""


def agree_on_order(arrived: Sequence[int], control: ControlPlane, *, counts: bool) -> list[int]:
    """Collective: parameters by their average place over ranks, so that no rank rules.

    Args:
        arrived: all parameters in the order in which this rank's gradients came.
        control: the ranks.
        counts: this rank has computed gradients; False on one that takes part with zeros.
    """
    places = np.zeros(len(arrived))
    if counts:
        places[list(arrived)] = np.arange(len(arrived))
    return [int(index) for index in np.argsort(control.total(places), kind="stable")]


class OrderWatch:
    """Notices that gradients come in another order than they did when it was profiled."""

    def __init__(self) -> None:
        self._profiled_from = 0
        self._not_before = 0
        self._disorderly = 0

    def profiling_begins(self, iteration: int) -> None:
        """The order is profiled from this iteration on."""
        self._profiled_from, self._disorderly = iteration, 0

    def profiled(self, iteration: int) -> None:
        """The order is known since this iteration."""
        self._not_before = iteration + 2 * (iteration - self._profiled_from + PATIENCE_ITERATIONS)

    def as_expected(self) -> None:
        """In this iteration gradients came in the order that was profiled."""
        self._disorderly = 0

    def wants_reprofile(self, iteration: int, arrived: Sequence[int], position: Sequence[int]) -> bool:
        """Whether to ask for a new profile, at the end of an iteration.

        Args:
            iteration: its number.
            arrived: parameters in the order in which their gradients came, those that came.
            position: where each parameter was expected.
        """
        limit = max(8, len(position) // 8)
        late = max((place - position[index] for place, index in enumerate(arrived)), default=0)
        self._disorderly = self._disorderly + 1 if late > limit else 0
        return self._disorderly >= DISORDERLY_ITERATIONS and iteration >= self._not_before


class OrderProfiling:
    """Whether the order is profiled in the current iteration, and whether this rank asks for that.

    Attributes:
        active: it is profiled; the same on all ranks.
        since: the iteration in which that began, the last time.
        requested: somebody wants it to be profiled again; True until that begins.
        asks: this rank asks the others for it, with a control flag of the current iteration.
    """

    def __init__(self) -> None:
        self.active, self.since = True, 0
        self.requested = self.asks = False
        self._watch = OrderWatch()

    def ends_with(self, iteration: int) -> bool:
        """Whether this is the last iteration in which it is profiled."""
        return self.active and iteration + 1 - self.since >= PROFILING_ITERATIONS

    def end(self, iteration: int) -> None:
        """The order is known since this iteration."""
        self.active = False
        self._watch.profiled(iteration)

    def begin(self, iteration: int) -> None:
        """It is profiled from this iteration on."""
        self.active, self.since = True, iteration
        self._watch.profiling_begins(iteration)
        self.requested = self.asks = False

    def watch(self, iteration: int, arrived: Sequence[int], buffers: GradientBuffers) -> None:
        """At the end of an iteration in which it was not profiled: decides whether this rank asks for it.

        Args:
            iteration: its number.
            arrived: parameters in the order in which this rank's gradients came.
            buffers: have the expected order.
        """
        late = False
        if arrived == buffers.order:
            self._watch.as_expected()
        else:
            late = self._watch.wants_reprofile(iteration, arrived, buffers.position)
        self.asks = late or buffers.outdated or self.requested
