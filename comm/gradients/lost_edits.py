"""Notices gradients that were changed before they were reduced, and says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .control_flags import Said

if TYPE_CHECKING:
    from .arrivals import Arrivals, Interference

logger = logging.getLogger(__name__)

REMEDY = (
    "call optimizer.synchronize() before you change gradients, and optimizer.step() inside `with "
    "optimizer.skip_synchronize():`"
)


class LostEdits:
    """What the user did to gradients too early.

    Attributes:
        problem: what makes the gradients of this iteration undefined, in words; empty if all is well.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names` of the parameters."""
        self._names = names
        self.problem = ""
        self._warned = self._told = False

    def begin(self) -> None:
        """The gradients of an iteration leave; nothing is known against them."""
        self.problem = ""

    def look(self, done: Interference, arrivals: Arrivals, said: Said) -> None:
        """All gradients are reduced.

        Args:
            done: to this rank's gradients.
            arrivals: this rank's gradients.
            said: by all ranks in this iteration.
        """
        if done.written:
            name, why = self._names[done.written[0]], self._why_late(arrivals)
            self.problem = f"the gradient of {name} was written before it was reduced{why}; {REMEDY}"
        elif said.written:
            self.problem = f"another rank has written a gradient before it was reduced; {REMEDY}"
        elif said.edits_differ and done.replaced:
            name, why = self._names[done.replaced[0]], self._why_late(arrivals)
            self.problem = f"the gradient of {name} was replaced before it was reduced{why}; {REMEDY}"
        elif said.edits_differ:
            self.problem = f"another rank has replaced a gradient before it was reduced; {REMEDY}"
        elif done.replaced and not self._warned:
            self._warned = True
            logger.warning(
                "the gradient of %s was replaced before it was reduced, and the reduced one is used; %s",
                self._names[done.replaced[0]],
                REMEDY,
            )

    def hear_late(self, before: Said) -> None:
        """An iteration ends on a device with streams, where it is heard only now what was said in the one before.

        What a rank knows of itself has been said then.
        """
        if (before.written or before.edits_differ) and not self._told and not self.problem:
            self.problem = f"another rank has changed a gradient too early in the iteration before this one; {REMEDY}"
        self._told = bool(self.problem)

    def _why_late(self, arrivals: Arrivals) -> str:
        own = set(arrivals.own_indices)
        late = next((name for index, name in enumerate(self._names) if index not in own), "")
        return f", which ends with step() because {late} had no gradient in this backward pass" if late else ""
