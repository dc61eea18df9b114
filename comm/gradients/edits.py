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
    """Checks in each iteration whether user code on any rank has changed gradients before they were reduced."""

    def __init__(self) -> None:
        self._warned = self._had_problem = False

    def problem(self, ready: ReadyGradients, names: Sequence[str], all_flags: RankFlags) -> str:
        """Return why reduced gradients are undefined; empty if they are right. Call after they are assigned to `.grad`.

        A gradient is undefined if user code has written to it in place before the reduction. If user code has replaced
        `.grad`, the gradient is undefined only if another rank has reduced its gradients in `backward()`. User code on
        that rank has then replaced the reduced gradient, but user code on this rank the unreduced one.

        Args:
            ready: this rank's gradients.
            names: names of the parameters, by position.
            all_flags: control flags of all ranks, reduced with the gradients of this iteration. On a GPU none is set,
                because the host reads them one iteration later.
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
                    "user code replaced the gradient of %s during backward(); Sirtaki overwrites the new tensor "
                    "with the reduced gradient; to keep your tensor, %s",
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
        """Return why reduced gradients are undefined, on a GPU, where control flags are read one iteration later.

        Args:
            problem: result of the method `problem` on this rank in this iteration.
            previous: control flags of all ranks in the previous iteration, ignored if this method has returned a
                problem for that iteration.
        """
        if not (problem or self._had_problem) and (previous.written or (previous.replaced and previous.complete)):
            problem = f"another rank has changed a gradient too early in the iteration before this one; {REMEDY}"
        self._had_problem = bool(problem)
        return problem
