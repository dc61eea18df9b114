"""Names the rank, parameter and iteration that first brought a NaN or an infinity (`SIRTAKI_CHECK_NAN=1`).

It looks at gradients *before* they are reduced, which is the only moment in which it can be told who made them:
afterwards all ranks have the same NaN. Each gradient is read once more (its sum tells); a closer look is taken only
where the sum is not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

SHOWN = 5


class NanCheck:
    """Watches the gradients of one optimizer on one rank."""

    def __init__(self, control: ControlPlane) -> None:
        """`control`: the ranks that take part."""
        self._control = control
        self.names: list[str] = []
        self._found: list[str] = []
        self._iteration = 0
        self._was_clean = True

    def look(self, number: int, gradient: torch.Tensor) -> None:
        """Looks at one gradient that is complete on this rank and not reduced yet."""
        values = gradient._values() if gradient.is_sparse else gradient
        if bool(values.sum().isfinite()) or bool((finite := values.isfinite()).all()):
            return
        nans, others = int(values.isnan().sum()), int((~finite).sum())
        parts = [f"{nans} NaN" if nans else "", f"{others - nans} infinite" if others > nans else ""]
        self._found.append(f"{self.names[number]} ({' and '.join(filter(None, parts))} of {values.numel()} elements)")

    def finish(self, passes_left: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Collective: all gradients of this iteration are in; says on the first rank what was found on which.

        An iteration that comes after another bad one is passed over: its parameters are already spoiled.

        Args:
            passes_left: 0 for gradients that have been looked at, `(n_parameters,)`.
            gradients: of all parameters.
        """
        for number, (left, gradient) in enumerate(zip(passes_left, gradients, strict=True)):
            if left and gradient is not None:
                self.look(number, gradient)
        found = self._control.all_gather(self._found)
        if any(found) and self._was_clean and self._control.rank == 0:
            lines = [
                f"  rank {rank}: {', '.join(names[:SHOWN])}"
                + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
                for rank, names in enumerate(found)
                if names
            ]
            logger.error(
                "gradients that are not finite came first in iteration %d, before they were reduced:\n%s",
                self._iteration,
                "\n".join(lines),
            )
        self._was_clean = not any(found)
        self._found.clear()
        self._iteration += 1
