"""The folder of a recording: `job.json`, and a file for each rank, `rank-0003.json.gz`.

A file is there as a whole or not at all. A folder may be read while ranks are missing, since they were killed, or
their hosts have written elsewhere: what is there is shown, with a sentence about what is not.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sirtaki.errors import RecordingError

from .recording import READABLE_VERSIONS, JobRecord, RankRecording, Recording
from .recording_json import job_from_json, job_to_json, rank_from_json, rank_to_json

JOB_FILE, TRACE_FILE, REPORT_FILE = "job.json", "trace.json", "report.html"
_RANK_FILE = re.compile(r"rank-(\d+)\.json\.gz")
_T = TypeVar("_T")


def rank_path(folder: Path, rank: int) -> Path:
    """Where a rank's recording is."""
    return folder / f"rank-{rank:04d}.json.gz"


def holds_recording(folder: Path) -> bool:
    """A recording, or a part of one, is there."""
    return folder.is_dir() and any(name == JOB_FILE or _RANK_FILE.fullmatch(name) for name in os.listdir(folder))


def clear(folder: Path) -> None:
    """Removes a recording that is there, what was made of it in the folder, and nothing else.

    Raises:
        OSError: it cannot be removed.
    """
    for path in folder.iterdir():
        if path.name in (JOB_FILE, TRACE_FILE, REPORT_FILE) or _RANK_FILE.fullmatch(path.name):
            path.unlink()


def write_job(folder: Path, job: JobRecord) -> None:
    """Writes what all ranks have in common; several hosts may do so, all the same.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / JOB_FILE, json.dumps(job_to_json(job), indent=1).encode())


def write_rank(folder: Path, rank: RankRecording) -> None:
    """Writes what one rank has recorded.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(rank_to_json(rank), separators=(",", ":"))
    write_whole(rank_path(folder, rank.rank), gzip.compress(text.encode(), compresslevel=1))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that nobody sees before it is whole.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read(folder: str | Path) -> Recording:
    """What a folder holds, as far as it can be read.

    Raises:
        RecordingError: there is nothing to show: no such folder, no recording in it, one of another version, or
            nothing of any rank.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordingError(f"{folder} is no folder: give the one that `sirtaki profile` has written")
    names = sorted(os.listdir(folder))
    files = {int(found[1]): folder / name for name in names if (found := _RANK_FILE.fullmatch(name))}
    if JOB_FILE not in names:
        what = f"it has recordings of {len(files)} ranks, but no {JOB_FILE}" if files else "it holds no recording"
        raise RecordingError(f"{folder} cannot be read: {what}")
    job = _parsed(folder / JOB_FILE, json.loads, job_from_json)
    ranks, problems = dict[int, RankRecording](), list[str]()
    for number, path in files.items():
        try:
            rank = _parsed(path, _unpacked, rank_from_json)
        except RecordingError as err:
            problems.append(str(err))
            continue
        if rank.job != job.job or rank.rank != number or number >= job.n_ranks:
            problems.append(f"{path.name} is of another job, and is left out")
        else:
            ranks[number] = rank
    if not ranks:
        raise RecordingError("; ".join([f"{folder} has nothing of any rank", *problems]))
    problems += _missing(job, ranks)
    ranks, different = _of_one_model(ranks)
    return Recording(job=job, ranks=ranks, problems=(*problems, *different, *_incomplete(job, ranks)))


def _parsed(path: Path, load: Callable[[bytes], Any], build: Callable[[Mapping[str, Any]], _T]) -> _T:
    try:
        data = load(path.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error) as err:
        raise RecordingError(f"{path} cannot be read: {err}") from err
    version = data.get("format") if isinstance(data, dict) else None
    if version not in READABLE_VERSIONS:
        found = f"format {version}" if isinstance(version, int) else "no recording"
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise RecordingError(f"{path} has {found}; this version of Sirtaki reads formats {known}: record the job anew")
    try:
        return build(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as err:
        raise RecordingError(f"{path} is damaged: {err!r}") from err


def _unpacked(content: bytes) -> Any:
    return json.loads(gzip.decompress(content))


def _missing(job: JobRecord, ranks: Mapping[int, RankRecording]) -> Iterator[str]:
    missing = [rank for rank in range(job.n_ranks) if rank not in ranks]
    if missing:
        yield f"{of_ranks(missing)} of {job.n_ranks} {'is' if len(missing) == 1 else 'are'} missing"


def _of_one_model(ranks: Mapping[int, RankRecording]) -> tuple[dict[int, RankRecording], list[str]]:
    """Those that train what most do."""
    usual, _ = Counter(rank.model for rank in ranks.values()).most_common(1)[0]
    others = [number for number, rank in ranks.items() if rank.model != usual]
    kept = {number: rank for number, rank in ranks.items() if rank.model == usual}
    return kept, [f"{of_ranks(others)} trained another model, and what they recorded is left out"] if others else []


def _incomplete(job: JobRecord, ranks: Mapping[int, RankRecording]) -> Iterator[str]:
    short = [number for number, rank in ranks.items() if not rank.complete]
    if short:
        least = min(len(ranks[number].iterations) for number in short)
        yield f"{of_ranks(short)} recorded fewer iterations than the {job.n_iterations} wanted ({least} at least)"
    if not any(iteration.units for rank in ranks.values() for iteration in rank.iterations):
        yield "no gradients were exchanged while this was recorded, so clocks of hosts are as far apart as at the start"


def of_ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`, `ranks 0, 1, 2, … (64)`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(map(str, numbers[:3]))}, … ({len(numbers)})"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
