"""Write and read the checkpoints of an elastic job."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, BinaryIO, cast

import torch

from sirtaki.machine import handle_signal

logger = logging.getLogger(__name__)

KEPT = 3
STATE, MANIFEST = "state.pt", "manifest.json"
VERSION = 1
"""Format of the files. Release 0.1 did not write the version, which is 1."""

_PREFIX, _UNFINISHED = "checkpoint-", "writing-"
_DAMAGED, _SUPERSEDED = "damaged", "superseded"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        number: number of the commit.
        path: folder of the checkpoint.
    """

    number: int
    path: Path

    @property
    def version(self) -> int:
        """Return the version of the checkpoint's format."""
        return int(json.loads((self.path / MANIFEST).read_text()).get("version", 1))

    def load(self) -> dict[str, Any]:
        """Return the content of the checkpoint (Any: any picklable object).

        If it contains objects of user classes, unpickling runs their code, as `torch.load` does. Tensors, numbers,
        strings
        and their containers are read without running code.
        """
        tree: dict[str, Any]
        try:
            tree = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as err:
            logger.info("%s contains more than tensors and plain values: %s", self.path, str(err).splitlines()[0])
            tree = torch.load(self.path / STATE, map_location="cpu", weights_only=False)
        return tree


class WriteThrottle:
    """Limits the load of a thread that writes during training: the thread pauses after each slice.

    Writing and reading back use memory bandwidth and caches that a training step needs, on any core.
    """

    def __init__(self, rests: float = 0.0, at_most_s: float = 0.0) -> None:
        """Create a throttle for one thread.

        Args:
            rests: seconds to pause per second of the thread's processor time.
            at_most_s: total seconds to pause.
        """
        self._rests, self._left_s = rests, at_most_s
        self._hurry = threading.Event()
        self._since_s: float | None = None

    def rest(self) -> None:
        """Pause. Called by the writing thread after each slice."""
        worked_s = 0.0 if self._since_s is None else time.thread_time() - self._since_s
        rest_s = min(self._left_s, self._rests * worked_s, LONGEST_REST_S)
        # otherwise the exiting process would wait for this thread
        if rest_s > 0.0 and threading.main_thread().is_alive():
            self._hurry.wait(rest_s)
            self._left_s -= rest_s
        self._since_s = time.thread_time()

    def hurry(self) -> None:
        """End all pauses, because another thread waits for the checkpoint. Thread-safe."""
        self._hurry.set()


class _ThrottledFile:
    """A file that is written in throttled slices by `torch.save`, and that records size and digest."""

    def __init__(self, file: BinaryIO, throttle: WriteThrottle) -> None:
        self._file, self._throttle = file, throttle
        self.size, self.sha256 = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        for part in _slices(memoryview(data).cast("B")):
            self.sha256.update(part)
            self._file.write(part)
            self._throttle.rest()
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


SLICE_BYTES, LONGEST_REST_S = 1 << 20, 0.1
"""Size of a slice, and the longest pause after it."""


def _slices(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + SLICE_BYTES] for start in range(0, len(data), SLICE_BYTES))


class CheckpointFolder:
    """Folder with the checkpoints of one job."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist."""
        self.path = path

    def write(self, number: int, tree: Mapping[str, Any], throttle: WriteThrottle | None = None) -> None:
        """Write a checkpoint, verify it, and publish it atomically. Then remove the oldest checkpoints.

        Checkpoints with larger numbers were written by a job that this job did not continue. They are renamed, so that
        a later job finds the checkpoint written last.

        Args:
            number: number of the commit.
            tree: content.
            throttle: throttle of the calling thread. None for no limit.

        Raises:
            OSError: writing failed, or the file does not have the written content. Other checkpoints are unchanged.
        """
        throttle = throttle or WriteThrottle()
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_UNFINISHED}*"):  # left by a writer that was killed
            shutil.rmtree(left, ignore_errors=True)
        unfinished, final = self.path / f"{_UNFINISHED}{os.getpid()}", self._place(number)
        try:
            unfinished.mkdir()
            state = unfinished / STATE
            with state.open("wb") as file:
                written = _ThrottledFile(file, throttle)
                torch.save(dict(tree), cast(IO[bytes], written))
            facts = {"bytes": written.size, "sha256": written.sha256.hexdigest(), "at": time.time()}
            manifest = {"version": VERSION, "number": number, **facts}
            (unfinished / MANIFEST).write_text(json.dumps(manifest) + "\n")
            for place in (state, unfinished / MANIFEST, unfinished):
                _sync(place)
            if problem := _problem(unfinished, throttle):
                raise OSError(f"verification failed: {problem}")
            shutil.rmtree(final, ignore_errors=True)  # written by a job that continued from an older checkpoint
            unfinished.rename(final)
            _sync(self.path)
        except RuntimeError as err:  # raised by PyTorch if the disk is full
            raise OSError(str(err).splitlines()[0]) from err
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        there = self._there()
        for path in there[there.index(final) + 1 :]:
            logger.warning(
                "%s is renamed to %s: this job did not continue from it", path, self._put_aside(path, _SUPERSEDED)
            )
        for path in self._there()[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None.

        Newer checkpoints that are damaged are renamed. Checkpoints that this process may not read are skipped.
        """
        for path in reversed(self._there()):
            try:
                problem = _problem(path)
            except PermissionError as err:  # it may be complete, so it is not renamed
                logger.warning("skipping the checkpoint %s, which cannot be read: %s", path, err)
                continue
            if not problem:
                return Checkpoint(_number(path), path)
            aside = self._put_aside(path, _DAMAGED)
            logger.warning("the checkpoint %s is damaged and is renamed to %s: %s", path, aside, problem)
        return None

    def _put_aside(self, path: Path, why: str) -> str:
        """Rename a folder, so that it is not a checkpoint, and return its name. Keep the name if renaming fails."""
        number = 1
        while (aside := path.with_name(f"{why}-{number}-{path.name}")).exists():
            number += 1
        try:
            path.rename(aside)
        except OSError:  # another host has renamed it, or the folder is read-only
            return path.name
        return aside.name

    def _place(self, number: int) -> Path:
        return self.path / f"{_PREFIX}{number:08}"

    def _there(self) -> list[Path]:
        """Return the folders of all checkpoints, oldest first."""
        found = [path for path in self.path.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
        return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _problem(path: Path, throttle: WriteThrottle | None = None) -> str:
    """Return why the checkpoint cannot be used. "" if it can.

    Raises:
        PermissionError: this process may not read it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        size, digest = manifest["bytes"], manifest["sha256"]
        if (path / STATE).stat().st_size != size:
            return f"{STATE} has {(path / STATE).stat().st_size} bytes, not {size}"
        if _digest(path / STATE, throttle or WriteThrottle()) != digest:
            return f"{STATE} does not have the written content"
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as err:
        return f"{type(err).__name__}: {err}"
    return ""


def _digest(path: Path, throttle: WriteThrottle) -> str:
    found, part = hashlib.sha256(), memoryview(bytearray(SLICE_BYTES))
    with path.open("rb", buffering=0) as file:
        # to verify the data on disk, not in the page cache
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(part):
            found.update(part[:count])
            throttle.rest()
    return found.hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


GENERATORS = "generators"
"""Key in a checkpoint: states of the random generators, in rank order."""

YIELDING = 10
"""Niceness of the writing thread."""

RESTS, RESTING = 2.0, 0.25
"""Pause in seconds per second of work, and its maximum as a share of the time between two checkpoints."""

TERMINATED = 128 + signal.SIGTERM

AGAIN_S = 2.0
"""Seconds within which a repeated signal is ignored: batch systems signal a rank and its launcher, which forwards
it."""

_LAUNCHERS = "sirtaki.run.rank_channel"

Tree = Mapping[str, Any]  # any picklable values


class Checkpoints:
    """Writes checkpoints in a background thread.

    Attributes:
        leaving: this rank has received SIGTERM or SIGUSR1 and must exit.
    """

    def __init__(
        self, folder: CheckpointFolder, *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin without writing.

        Args:
            folder: folder of the checkpoints.
            every_s: minimum seconds between two checkpoints.
            clock: returns the time in seconds.
        """
        self.folder, self.leaving = folder, False
        self._every_s, self._clock = every_s, clock
        self._last_s = clock()
        self._writing: threading.Thread | None = None
        self._throttle = WriteThrottle()
        self._signalled_s: float | None = None

    @property
    def due(self) -> bool:
        """Return whether the interval has passed and the last checkpoint is written."""
        writing = self._writing is not None and self._writing.is_alive()
        return not writing and self._clock() - self._last_s >= self._every_s

    def write(self, number: int, tree: Tree) -> None:
        """Write a checkpoint in a thread, which owns `tree`. Errors are logged, and earlier checkpoints are kept."""
        self._last_s, self._throttle = self._clock(), WriteThrottle(RESTS, RESTING * self._every_s)
        self._writing = threading.Thread(
            target=self._write, args=(number, tree, self._throttle), name="sirtaki-checkpoint"
        )
        self._writing.start()

    def _write(self, number: int, tree: Tree, throttle: WriteThrottle) -> None:
        begin_s = self._clock()
        # of this thread only, so that training has priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELDING)
        try:
            self.folder.write(number, tree, throttle)
        except Exception as err:  # also if `tree` cannot be pickled; training continues
            logger.warning("cannot write commit %d to %s, keeping the one before: %s", number, self.folder.path, err)
        else:
            logger.info("commit %d written to %s in %.1f s", number, self.folder.path, self._clock() - begin_s)

    def wait(self) -> None:
        """Wait until the current checkpoint is on disk. Ends its pauses."""
        self._throttle.hurry()
        if self._writing is not None:
            self._writing.join()

    def listen(self) -> None:
        """Let SIGTERM and SIGUSR1 request a checkpoint at the next commit. A later SIGTERM ends the process."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        # The launcher's handler, which only reports the rank's position, is replaced. A handler of the script is kept.
        if before == signal.SIG_DFL or getattr(before, "__module__", "") == _LAUNCHERS:
            _handle(signal.SIGTERM, self._leave, before)
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            _handle(signal.SIGUSR1, self._leave, signal.SIG_IGN)

    def _leave(self) -> bool:
        """Return whether the signal is the first, or repeats the first within `AGAIN_S`."""
        now_s = self._clock()
        if self._signalled_s is None:
            self.leaving, self._signalled_s = True, now_s
        return now_s - self._signalled_s <= AGAIN_S


def _handle(number: signal.Signals, accepts: Callable[[], bool], before: Any) -> None:  # Any: as in signal.signal
    """Call `accepts` for each signal. Once it returns False, restore the previous handler and send the signal again.

    The signal ends forked children.
    """

    def answer(number: int, frame: FrameType | None) -> None:
        if not accepts():
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    handle_signal(number, answer)
