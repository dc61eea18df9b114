"""Detect gradients that user code has changed before they were reduced."""

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
    """Check of each iteration for gradients that user code has changed before they were reduced, on any rank."""

    def __init__(self) -> None:
        self._warned = self._had_problem = False

    def problem(self, ready: ReadyGradients, names: Sequence[str], all_flags: RankFlags) -> str:
        """Return why the reduced gradients are undefined; empty if they are right. Call after they are assigned.

        A gradient that user code has written in place is undefined. A replaced gradient is undefined if only some ranks
        have waited in the backward pass: their later changes apply to the reduced gradient.

        Args:
            ready: this rank's gradients.
            names: names of the parameters, by position.
            all_flags: flags of all ranks of this iteration; none set on a device with streams.
        """
        problem, differ = "", all_flags.replaced and all_flags.complete
        if ready.lost_written:
            problem = f"the gradient of {names[ready.lost_written[0]]} was written before it was reduced"
        elif all_flags.written:
            return f"another rank has written a gradient before it was reduced; {REMEDY}"
        elif ready.lost_replaced:
            name = names[ready.lost_replaced[0]]
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
        own = set(ready.positions[: ready.own])
        late = next((name for position, name in enumerate(names) if position not in own), "")
        why = f", which ends with step() because {late} had no gradient in this backward pass" if late else ""
        return f"{problem}{why}; {REMEDY}"

    def delayed_problem(self, problem: str, previous: RankFlags) -> str:
        """Return the problem of an iteration on a device with streams, where flags are read one iteration later.

        Args:
            problem: the problem that this rank has found in this iteration.
            previous: flags of all ranks of the previous iteration, in which this rank may have had a problem.
        """
        if not (problem or self._had_problem) and (previous.written or (previous.replaced and previous.complete)):
            problem = f"another rank has changed a gradient too early in the iteration before this one; {REMEDY}"
        self._had_problem = bool(problem)
        return problem
