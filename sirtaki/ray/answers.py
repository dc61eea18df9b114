"""What the ranks return; where some fail, the error that the others have failed of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from sirtaki.errors import CommError

GRACE_S = 10.0
"""How long the others may take to notice that a rank has failed."""


class Unanswered(Exception):
    """Ranks have failed.

    Attributes:
        cause: as Ray raises it.
        stuck: whether some of the others go on nevertheless.
    """

    def __init__(self, cause: BaseException, *, stuck: bool) -> None:
        super().__init__(str(cause))
        self.cause, self.stuck = cause, stuck


def wait_for_all(references: Sequence[Any], *, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
    """Blocks until all have answered, or soon after one has failed.

    Args:
        references: of results, by rank.
        meanwhile: called now and then.

    Returns:
        The results, by rank.

    Raises:
        Unanswered: a rank has failed.
    """
    pending, failed_s = list(references), float("inf")
    found: dict[Any, Any] = {}
    errors: list[BaseException] = []
    while pending and time.monotonic() < failed_s + GRACE_S:
        done, pending = ray.wait(pending, timeout=0.2)
        for reference in done:
            try:
                found[reference] = ray.get(reference)
            except Exception as err:  # as many kinds as users have, and Ray's own
                errors.append(err)
                failed_s = min(failed_s, time.monotonic())
        meanwhile()
    if errors:
        raise Unanswered(cause_of(errors), stuck=bool(pending))
    return [found[reference] for reference in references]


def cause_of(errors: Sequence[BaseException]) -> BaseException:
    """That which says more than that another rank has failed; of several, the first."""
    return next((err for err in errors if not isinstance(err, CommError)), errors[0])
