"""Read recordings, trial logs and timelines as tables for a notebook. A table is a list of flat records, from which
pandas builds a `DataFrame`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sirtaki.engine.tuning.trial_log import read_log
from sirtaki.errors import ConfigError

from .alignment import align
from .recording import RankRecording, Recording, read_folder

Record = dict[str, Any]
"""One row of a table, by column. Values are numbers, strings, booleans or None."""


def read(path: str | Path) -> dict[str, list[Record]]:
    """Read a file or folder that a job has written, as tables. Each table is a list of flat records.

    >>> import pandas, sirtaki.analysis
    >>> units = pandas.DataFrame(sirtaki.analysis.read("recorded")["units"])  # doctest: +SKIP

    Args:
        path: a folder that `sirtaki profile` has written, a log of the settings that tuning tried
            (`SIRTAKI_TRIAL_LOG`), or a timeline (`HOROVOD_TIMELINE`).

    Returns:
        The tables by name. A recording has "iterations", "phases", "operators", "gradients", "units" (buckets of
        gradients), "collectives" and "memory". Their rows have a `rank`, and times in seconds since the first recorded
        iteration, on one clock for all ranks. A trial log has the table "trials", a timeline has the table "events".

    Raises:
        RecordingError: the folder contains no readable recording.
        ConfigError: the file is neither a trial log nor a timeline.
    """
    path = Path(path)
    if path.is_dir():
        return _of_recording(read_folder(path))
    try:
        is_timeline = path.read_bytes().startswith(b"[")
    except OSError as err:
        raise ConfigError(
            f"the file {path} cannot be read ({err}); pass the path of a trial log or of a timeline"
        ) from err
    return {"events": list(_events(path))} if is_timeline else {"trials": list(_trials(path))}


def _of_recording(recording: Recording) -> dict[str, list[Record]]:
    alignment = align(recording)
    firsts = [(number, rank.iterations[0]) for number, rank in recording.ranks.items() if rank.iterations]
    origin_s = min((alignment.at(number, one.begin_s) for number, one in firsts), default=0.0)
    names = ("iterations", "phases", "operators", "gradients", "units", "collectives", "memory")
    tables: dict[str, list[Record]] = {name: [] for name in names}
    for number, rank in sorted(recording.ranks.items()):
        for table, row in _of_rank(recording, rank):
            moments = {
                name: None if value is None else alignment.at(number, value) - origin_s
                for name, value in row.items()
                if name in ("begin_s", "end_s", "ready_s", "issue_s", "done_s", "agreed_s")
            }
            tables[table].append({"rank": number, **row, **moments})
    return tables


def _of_rank(recording: Recording, rank: RankRecording) -> Iterator[tuple[str, Record]]:
    """Yield (name of the table, row) for each recorded event of a rank. Times are readings of the rank's own clock."""
    layouts = {buffer.number: buffer.layout for buffer in recording.job.buffers}
    usual = set(recording.usual_iterations)
    for one in rank.iterations:
        key, row = {"iteration": one.number}, Record()
        lasts = {"begin_s": one.begin_s, "end_s": one.end_s, "step_s": one.end_s - one.begin_s}
        is_usual = one.number in usual
        yield "iterations", {**key, **lasts, "exposed_s": one.exposed_s, "slowed": one.slowed, "usual": is_usual}
        for span in one.spans:
            yield "phases", {**key, "phase": span.phase.value, "begin_s": span.begin_s, "end_s": span.end_s}
        for operator in one.operators:
            module = rank.modules[operator.module].name if operator.module >= 0 else None
            lane = rank.lanes[operator.lane] if operator.lane < len(rank.lanes) else str(operator.lane)
            row = {"name": operator.name, "phase": operator.phase.value, "lane": lane, "module": module}
            yield "operators", {**key, **row, "begin_s": operator.begin_s, "end_s": operator.end_s}
        for gradient in one.ready:
            names = layouts[gradient.buffer].names
            name = names[gradient.place] if names else None
            yield "gradients", {**key, "buffer": gradient.buffer, "name": name, "ready_s": gradient.ready_s}
        for done in one.units:
            layout = layouts[done.buffer]
            name = layout.describe(done.start, done.stop) if layout.names else None
            row = {"buffer": done.buffer, "name": name, "bytes": (done.stop - done.start) * layout.itemsize_bytes}
            row |= {"transport": done.route[0].value, "algorithm": done.route[1].value, "stream": done.stream}
            yield "units", {**key, **row, "issue_s": done.issue_s, "begin_s": done.begin_s, "done_s": done.done_s}
        for call in one.collectives:
            row = {"name": call.name, "kind": call.kind, "bytes": call.n_bytes, "begin_s": call.begin_s}
            yield "collectives", {**key, **row, "agreed_s": call.agreed_s, "end_s": call.end_s}
    memory = rank.memory
    if memory is None:
        return
    for block in memory.allocations:
        module = rank.modules[memory.calls[block.call].module].name if block.call >= 0 else None
        row = {"device": memory.devices[block.device], "bytes": block.n_bytes, "holds": block.holds.value}
        row |= {"phase": block.phase.value, "operator": block.operator or None, "module": module}
        yield "memory", {"iteration": memory.iteration, **row, "begin_s": block.begin_s, "end_s": block.end_s}


def _trials(path: Path) -> Iterator[Record]:
    """Yield a row for each measurement of the last job in a trial log, from its warm-up and from later tuning."""
    log = read_log(path)
    searches = [("warm-up", log.measurements), *(("re-tune", retune.measurements) for retune in log.retunes)]
    for search, one in ((search, one) for search, measurements in searches for one in measurements):
        knobs, row = one.knobs, {"iteration": one.iteration, "arm": one.arm, "purpose": one.purpose}
        yield {
            "search": search,
            **row,
            "setting": knobs.describe(),
            "transport": knobs.transport.value,
            "algorithm": knobs.algorithm.value,
            "unit_bytes": knobs.unit_bytes,
            "streams": knobs.streams,
            "planned_units": None if knobs.cuts is None else len(knobs.cuts),
            "span_s": one.span_s if one.succeeded else None,
            "predicted_s": one.predicted_s,
            "was_best": one.was_best,
        }


def _events(path: Path) -> Iterator[Record]:
    """Yield a row for each event of a timeline (Chrome trace format). Arguments of the event become columns."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        tracks: dict[tuple[int, int], str] = {}
        for one in found:
            if one["ph"] == "M" and one["name"] == "thread_name":
                tracks[one["pid"], one["tid"]] = one["args"]["name"]
        for one in found:
            if one["ph"] != "M":
                begin_s = one["ts"] / 1e6
                known = {"rank": one["pid"], "track": tracks.get((one["pid"], one.get("tid", 0))), "name": one["name"]}
                times = {"begin_s": begin_s, "end_s": begin_s + one.get("dur", 0) / 1e6}
                yield {**one.get("args", {}), **known, **times}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"the file {path} is not a timeline (a trace that HOROVOD_TIMELINE writes): {err!r}") from err
