"""What ranks agree on before iterations may end in the next forward pass.

Two iterations prepare it, once nothing is tuned or profiled any more. In the first, each rank learns in which order its
forward pass reads parameters; at the end of the second all ranks agree on one order, and on how much of the gradients
the backward pass hides, so that units can leave in the order in which they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.comm.gradients.iteration_report import IterationReport
    from sirtaki.comm.gradients.synchroniser import Synchroniser

PREPARING = 2
"""Iterations that end with `step()` before one may be put off."""


class ForwardOverlap:
    """Of one synchroniser.

    Attributes:
        wanted: iterations are to be put off; the same on all ranks.
        reads: parameters, by index, in the order in which this rank's forward pass reads them; empty = not known.
    """

    def __init__(self, control: ControlPlane, *, wanted: bool) -> None:
        """Collective: rank 0 says whether it is wanted."""
        self._control = control
        self.wanted: bool = control.broadcast(wanted)
        self.reads: Sequence[int] = ()
        self.begin()

    def begin(self) -> None:
        """Another plan or order runs from now on; the same on all ranks."""
        self._prepared, self._hidden = 0, np.zeros(2)

    @property
    def ready(self) -> bool:
        """Iterations may be put off; the same on all ranks."""
        return self.wanted and self._prepared >= PREPARING

    @property
    def learning(self) -> bool:
        """It is the first of the iterations that prepare it; the same on all ranks."""
        return self.wanted and self._prepared == 1

    def note(self, report: IterationReport, synchroniser: Synchroniser, *, joined: bool) -> None:
        """An iteration has ended in which nothing was tuned or profiled. Collective when it is the last that prepares.

        Args:
            report: what it has measured.
            synchroniser: whose units leave in another order then.
            joined: this rank has no data any more, and knows nothing.
        """
        if not self.wanted or self.ready:
            return
        self._prepared += 1
        if self.ready:
            knows = not joined and len(self.reads) > 0
            if not joined:
                self._hidden += report.backward_s, report.span_s
            places = np.zeros(synchroniser.n_params)
            if knows:
                places[:] = len(places)  # what is never read is last
                places[list(self.reads)] = np.arange(len(self.reads))
            total = self._control.total(np.array([*places, *self._hidden, float(knows)]))
            if total[-1] > 0.0:
                synchroniser.overtake(list(total[:-3]), float(total[-3] / total[-2]) if total[-2] > 0.0 else 1.0)
