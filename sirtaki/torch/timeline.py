"""`start_timeline` and `stop_timeline`: the trace of `comm.timeline`, switched by the user."""

from __future__ import annotations

import logging
from pathlib import Path

from sirtaki.comm import timeline
from sirtaki.engine import job
from sirtaki.errors import ConfigError

logger = logging.getLogger(__name__)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Records what this rank does in a Chrome trace from now on; ranks of one host write to the same file.

    Args:
        file_path: of the trace; one that another job has left is overwritten.
        mark_cycles: record the rounds of eager operations, too.

    Raises:
        ValueError: before `init()`, without `HOROVOD_TIMELINE` set then (to `DYNAMIC`, if no trace is wanted at
            first), or if the file cannot be written.
    """
    current = job.current()
    if current.clock_offset_s is None:
        raise ConfigError("start_timeline() wants HOROVOD_TIMELINE to be set when init() is called; DYNAMIC will do")
    control = current.control
    number = sorted(set(control.hosts)).index(control.hosts[control.rank])
    path = timeline.path_on_host(Path(file_path), number)
    writer = timeline.Writer(
        job=current.job,
        rank=control.rank,
        host=control.host_names[control.rank],
        clock_offset_s=current.clock_offset_s,
    )
    try:
        timeline.start(timeline.Timeline(path, writer, mark_cycles=mark_cycles))
    except OSError as err:
        raise ConfigError(f"the timeline {path} cannot be written: {err}") from err


def stop_timeline() -> None:
    """Ends the trace; the file is complete when this returns.

    Raises:
        ValueError: before `init()`.
    """
    job.current()
    timeline.stop()
