"""How a recording is asked for: by a variable, or from within the script."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sirtaki.engine.job import current
from sirtaki.errors import ConfigError

from .job_recorder import JobRecorder, Stage, Wanted

_from_environment: JobRecorder | None = None


def begin_as_set() -> None:
    """After `init()`, on all ranks: records this job if `SIRTAKI_PROFILE` is set on rank 0; once in a process."""
    global _from_environment
    settings = current().settings
    if settings.profile is None or _from_environment is not None:
        return
    _from_environment = JobRecorder(
        Wanted(
            folder=Path(settings.profile),
            n_iterations=settings.profile_iterations,
            operators=settings.profile_operators,
            edges=settings.profile_edges,
        )
    )
    atexit.register(_from_environment.end)


@contextmanager
def profile(
    folder: str | Path, *, iterations: int = 10, operators: bool = True, edges: bool = False
) -> Iterator[JobRecorder]:
    """Collective: records training iterations of what runs inside, once the tuner has done its work.

    Every rank enters and leaves it between the same steps. Recording stops by itself after `iterations` of them, and
    each rank writes a file then, which takes a moment; what runs on is not recorded. If there are fewer inside, those
    are written.

    Args:
        folder: where to; a recording that is there is overwritten.
        iterations: how many.
        operators: record operators by torch.profiler, too, and behind these iterations as many that it does not slow.
        edges: of operators also what they read, for `sirtaki trace --chakra`.

    Raises:
        NotInitializedError: before `init()`.
        ConfigError: `iterations` is less than 1, or `SIRTAKI_PROFILE` is set, which records the job already.
    """
    current()
    if iterations < 1:
        raise ConfigError(f"profile() records at least one iteration, not {iterations}")
    if _from_environment is not None and _from_environment.stage is not Stage.ENDED:
        raise ConfigError("SIRTAKI_PROFILE is set, so this job is being recorded already: leave one of the two out")
    recorder = JobRecorder(
        Wanted(folder=Path(folder).absolute(), n_iterations=iterations, operators=operators, edges=edges)
    )
    try:
        yield recorder
    finally:
        recorder.end()
