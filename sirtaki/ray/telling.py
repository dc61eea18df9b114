"""A function of the user's in an actor, whose process goes on when the function fails: the other ranks must hear of it.

A script's process ends then, which they notice by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def call_telling_others(fn: Callable[[], _T]) -> _T:
    """Calls it; where it raises this rank leaves the job, and the others' collectives fail with the reason."""
    try:
        return fn()
    except BaseException as err:
        leave_job(f"a rank raised {type(err).__name__}: {err}")
        raise


def leave_job(reason: str) -> None:
    """Not collective: ends this rank's part in the job. Harmless where there is none.

    Args:
        reason: what the others are told.
    """
    if "sirtaki.torch" not in sys.modules:  # then nobody has called init(), and it takes seconds to load
        return
    from sirtaki.engine import job
    from sirtaki.torch.basics import let_go

    job.leave(together=False, reason=reason)
    let_go()
