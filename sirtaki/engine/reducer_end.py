"""The end of a gradient reducer on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .participants import Key
from .reducer_watch import ReducerWatch
from .warmup import TunedSynchroniser

if TYPE_CHECKING:
    from .job import Job


def let_go(
    job: Job,
    key: Key,
    watch: ReducerWatch | None,
    hooks: Sequence[torch.utils.hooks.RemovableHandle],
    sync: TunedSynchroniser | None,
) -> None:
    """Takes away and closes what belongs to one reducer on this rank."""
    job.joining.forget(key)
    if watch is not None:
        job.watchdog.forget(watch.current_wait, watch.progress)
    for hook in hooks:
        hook.remove()
    if sync is not None:
        sync.close()
