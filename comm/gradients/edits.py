"""Checks that user code has not changed gradients before they were reduced."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .flags import RankFlags
from .ready import ReadyGradients

logger = logging.getLogger(__name__)

REMEDY = (
    "call optimizer.synchronize() before you change gradients, and optimizer.step() inside `with "
    "optimizer.skip_synchronize():`"
)


class EditCheck:
    """A check of each iteration: has user code changed gradients before they were reduced?"""

    def __init__(self) -> None:
        self._warned = self._told = False

    def look(self, arrivals: ReadyGradients, names: Sequence[str], said: RankFlags) -> str:
        """Return why the reduced gradients are undefined; empty if all is well. Call after they are assigned.

        Args:
            arrivals: this rank's gradients.
            names: names of the parameters, by position.
            said: flags of all ranks of this iteration; none on a device with streams.
        """
        problem, differ = "", said.replaced and said.complete
        if arrivals.lost_written:
            problem = f"the gradient of {names[arrivals.lost_written[0]]} was written before it was reduced"
        elif said.written:
            return f"another rank has written a gradient before it was reduced; {REMEDY}"
        elif arrivals.lost_replaced:
            name = names[arrivals.lost_replaced[0]]
            if differ:
                problem = f"the gradient of {name} was replaced before it was reduced"
            elif not self._warned:
                self._warned = True
                logger.warning(
                    "the gradient of %s was replaced before it was reduced, and the reduced one is used; %s",
                    name,
                    REMEDY,
                )
        elif differ:
            return f"another rank has replaced a gradient before it was reduced; {REMEDY}"
        if not problem:
            return ""
        own = set(arrivals.positions[: arrivals.own])
        late = next((name for position, name in enumerate(names) if position not in own), "")
        why = f", which ends with step() because {late} had no gradient in this backward pass" if late else ""
        return f"{problem}{why}; {REMEDY}"

    def hear_late(self, problem: str, before: RankFlags) -> str:
        """Return the problem of an iteration on a device with streams, where flags arrive one iteration late.

        Args:
            problem: the problem that this rank has found itself.
            before: flags of all ranks of the iteration before. This rank has reported its own problem then.
        """
        if (before.written or (before.replaced and before.complete)) and not self._told and not problem:
            problem = f"another rank has changed a gradient too early in the iteration before this one; {REMEDY}"
        self._told = bool(problem)
        return problem
