"""`SIRTAKI_PROFILE`: the job is recorded, if it is to be. Else nothing of the profiler is loaded."""

from __future__ import annotations

from sirtaki.engine import job


def record_if_wanted() -> None:
    """After `init()`, on all ranks."""
    if job.current().settings.profile is not None:
        from sirtaki.profiler.profiling import begin_as_set

        begin_as_set()
