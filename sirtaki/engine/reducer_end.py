"""The end of a gradient reducer on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .hooked_parameters import HookedParameters
from .participants import Key
from .reducer_watch import ReducerWatch
from .sparse_carrier import SparseCarrier

if TYPE_CHECKING:
    from .job import Job


def let_go(
    job: Job,
    key: Key,
    watch: ReducerWatch | None,
    parameters: HookedParameters | None,
    carrier: SparseCarrier | None,
) -> None:
    """Takes away and closes what belongs to one reducer on this rank."""
    job.joining.forget(key)
    if watch is not None:
        job.watchdog.forget(watch.current_wait, watch.progress)
    if parameters is not None:
        parameters.close()
    if carrier is not None:
        carrier.close()
