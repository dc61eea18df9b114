"""Write and read the checkpoints of an elastic job.

A *commit* is a copy of the training state in memory. A checkpoint is a commit on disk.
"""

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
"""Version of the checkpoint format.

Checkpoints without a version number, which release 0.1 has written, count as version 1.
"""

_PREFIX, _UNFINISHED = "checkpoint-", "writing-"
_DAMAGED, _SUPERSEDED = "damaged", "superseded"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        number: number of the commit (copy of the training state) that the checkpoint contains.
        path: folder that contains the checkpoint's files.
    """

    number: int
    path: Path

    @property
    def version(self) -> int:
        """Return the version of the checkpoint's format."""
        return int(json.loads((self.path / MANIFEST).read_text()).get("version", 1))

    def load(self) -> dict[str, Any]:
        """Return the content of the checkpoint (any picklable object).

        If the checkpoint contains objects of user classes, unpickling runs their code, like `torch.load`. Tensors,
        numbers, strings and containers of these are read without running code.
        """
        tree: dict[str, Any]
        try:
            tree = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as err:
            logger.info(
                "the checkpoint %s contains objects of Python classes, so Sirtaki loads it with weights_only=False, "
                "which may run code of the checkpoint; use only checkpoints that you trust: %s",
                self.path,
                str(err).splitlines()[0],
            )
            tree = torch.load(self.path / STATE, map_location="cpu", weights_only=False)
        return tree


class WriteThrottle:
    """Limit on the load of a thread that writes a checkpoint during training.

    The thread pauses after each slice of data. Otherwise writing a checkpoint and reading it back would slow down
    training, because they use memory bandwidth and caches.
    """

    def __init__(self, rests: float = 0.0, at_most_s: float = 0.0) -> None:
        """Create a throttle for one thread that writes a checkpoint.

        Args:
            rests: seconds to pause for each second of the thread's processor time.
            at_most_s: maximum sum of all pauses in seconds.
        """
        self._rests, self._left_s = rests, at_most_s
        self._hurry = threading.Event()
        self._since_s: float | None = None

    def rest(self) -> None:
        """Pause the calling thread. Called by the thread that writes a checkpoint, after each slice of data."""
        worked_s = 0.0 if self._since_s is None else time.thread_time() - self._since_s
        rest_s = min(self._left_s, self._rests * worked_s, LONGEST_REST_S)
        # Do not pause if the main thread has ended: the process exits, and waits for this thread.
        if rest_s > 0.0 and threading.main_thread().is_alive():
            self._hurry.wait(rest_s)
            self._left_s -= rest_s
        self._since_s = time.thread_time()

    def hurry(self) -> None:
        """End the current pause and skip later ones, because a thread waits for the checkpoint. Thread-safe."""
        self._hurry.set()


class _ThrottledFile:
    """File object for `torch.save`.

    It writes slices of data with pauses, and computes the size and the digest of the file.
    """

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
"""Bytes that a thread writes at once, if it must pause between writes, and the maximum length of a pause in seconds."""


def _slices(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + SLICE_BYTES] for start in range(0, len(data), SLICE_BYTES))


class CheckpointFolder:
    """The folder that contains the checkpoints of one job."""

    def __init__(self, path: Path) -> None:
        """Store the path of the folder, which need not exist yet."""
        self.path = path

    def write(self, number: int, tree: Mapping[str, Any], throttle: WriteThrottle | None = None) -> None:
        """Write a checkpoint, verify it, and make it visible by an atomic rename.

        Then remove the oldest checkpoints.

        Rename existing checkpoints with larger numbers, so that a later job continues from the checkpoint that was
        written last. These checkpoints are from an earlier job, and this job did not continue from them but from an
        older commit (copy of the training state).

        Args:
            number: number of the commit that is written.
            tree: content of the commit, in nested dictionaries.
            throttle: limit on the load of the calling thread. None for no limit.

        Raises:
            OSError: writing failed, or the file on disk differs from the written content. Other checkpoints are
                unchanged.
        """
        throttle = throttle or WriteThrottle()
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_UNFINISHED}*"):
            # Remove folders that a process has left because it was killed while writing.
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
            shutil.rmtree(final, ignore_errors=True)  # exists if this job continues from an older checkpoint
            unfinished.rename(final)
            _sync(self.path)
        except RuntimeError as err:  # PyTorch raises RuntimeError if the disk is full.
            raise OSError(str(err).splitlines()[0]) from err
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        there = self._there()
        for path in there[there.index(final) + 1 :]:
            logger.warning(
                "the checkpoint %s has been renamed to %s, because this job did not continue from it",
                path,
                self._put_aside(path, _SUPERSEDED),
            )
        for path in self._there()[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint. None if there is none.

        Rename damaged checkpoints, so that they are not found again. Skip checkpoints that this process may not read.
        """
        for path in reversed(self._there()):
            try:
                problem = _problem(path)
            except PermissionError as err:  # Do not rename the checkpoint, because it may be complete.
                logger.warning(
                    "Sirtaki lacks permission to read the checkpoint %s (%s) and uses the previous checkpoint "
                    "instead; to use the newer one, correct its permissions and restart the job",
                    path,
                    err,
                )
                continue
            if not problem:
                return Checkpoint(_number(path), path)
            aside = self._put_aside(path, _DAMAGED)
            logger.warning(
                "the checkpoint %s is damaged (%s) and has been renamed to %s; Sirtaki uses the previous checkpoint "
                "instead",
                path,
                problem,
                aside,
            )
        return None

    def _put_aside(self, path: Path, why: str) -> str:
        """Rename the folder of a damaged checkpoint, so that it is no longer found as a checkpoint.

        Log the reason `why`.

        Returns:
            The new name of the folder. The old name if renaming has failed.
        """
        number = 1
        while (aside := path.with_name(f"{why}-{number}-{path.name}")).exists():
            number += 1
        try:
            path.rename(aside)
        except OSError:  # Renaming fails if another host has renamed the folder before, or if it is read-only.
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
    """Return the reason why a checkpoint is damaged or incomplete. An empty string if it can be used.

    Args:
        path: folder of the checkpoint.
        throttle: limit on the load of the calling thread. None for no limit.

    Raises:
        PermissionError: this process may not read the checkpoint.
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
        # Drop the page cache of the file, so that the following read verifies the data on disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(part):
            found.update(part[:count])
            throttle.rest()
    return found.hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # Ignore the error for a folder, because some file systems cannot sync folders.
            raise
    finally:
        os.close(descriptor)


GENERATORS = "generators"
"""Key in a checkpoint under which the states of all ranks' random generators are stored, in rank order."""

YIELDING = 10
"""Niceness (operating system priority) of the thread that writes checkpoints, so that training has priority."""

RESTS, RESTING = 2.0, 0.25
"""Seconds for which the thread that writes checkpoints pauses per second of work, and the maximum sum of its pauses as
a fraction of the time between two checkpoints.
"""

TERMINATED = 128 + signal.SIGTERM

AGAIN_S = 2.0
"""Seconds within which a repeated SIGTERM or SIGUSR1 is ignored.

A rank may get a signal twice, because a batch system sends it to the rank and to the launcher, which forwards it to the
rank.
"""

_LAUNCHERS = "sirtaki.run.rank_channel"

Tree = Mapping[str, Any]


class Checkpoints:
    """Writer of an elastic job's checkpoints on disk, in a background thread.

    Attributes:
        leaving: whether this rank has received SIGTERM or SIGUSR1. It must then exit once a checkpoint is on disk.
    """

    def __init__(
        self, folder: CheckpointFolder, *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Store the arguments. No checkpoint is written before `write` is called.

        Args:
            folder: folder to which checkpoints are written.
            every_s: minimum time between two checkpoints in seconds.
            clock: function that returns the current time in seconds.
        """
        self.folder, self.leaving = folder, False
        self._every_s, self._clock = every_s, clock
        self._last_s = clock()
        self._writing: threading.Thread | None = None
        self._throttle = WriteThrottle()
        self._signalled_s: float | None = None

    @property
    def due(self) -> bool:
        """Return whether a checkpoint must be written: `every_s` seconds have passed, and the last one is on disk."""
        writing = self._writing is not None and self._writing.is_alive()
        return not writing and self._clock() - self._last_s >= self._every_s

    def write(self, number: int, tree: Tree) -> None:
        """Write a checkpoint in a background thread. If writing fails, log the error and keep earlier checkpoints.

        Args:
            number: number of the commit (copy of the training state) to write.
            tree: content of the commit, which the caller must not change afterwards.
        """
        self._last_s, self._throttle = self._clock(), WriteThrottle(RESTS, RESTING * self._every_s)
        self._writing = threading.Thread(
            target=self._write, args=(number, tree, self._throttle), name="sirtaki-checkpoint"
        )
        self._writing.start()

    def _write(self, number: int, tree: Tree, throttle: WriteThrottle) -> None:
        begin_s = self._clock()
        # Lower the priority of this thread, so that training has priority. The other threads keep theirs.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELDING)
        try:
            self.folder.write(number, tree, throttle)
        except Exception as err:  # Log every error, for example of pickling, because training must continue.
            logger.warning(
                "Sirtaki cannot write the checkpoint of state.commit() number %d to the folder %s, so the previous "
                "checkpoint stays the newest. Training continues; correct this error: %s",
                number,
                self.folder.path,
                err,
            )
        else:
            elapsed_s = self._clock() - begin_s
            logger.info(
                "the checkpoint of state.commit() number %d was written to the folder %s in %.1f s",
                number,
                self.folder.path,
                elapsed_s,
            )

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on disk. The writing thread no longer pauses."""
        self._throttle.hurry()
        if self._writing is not None:
            self._writing.join()

    def listen(self) -> None:
        """Install handlers, so that SIGTERM and SIGUSR1 request a checkpoint at the next commit.

        A repeated SIGTERM ends the process.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        # Replace only the launcher's signal handler, which reports where the rank is. Never replace a handler of the
        # script.
        if before == signal.SIG_DFL or getattr(before, "__module__", "") == _LAUNCHERS:
            _handle(signal.SIGTERM, self._leave, before)
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            _handle(signal.SIGUSR1, self._leave, signal.SIG_IGN)

    def _leave(self) -> bool:
        """Request a checkpoint, after which this rank exits. Handler of SIGTERM and SIGUSR1.

        Returns:
            Whether the signal is handled. False if it arrives more than `AGAIN_S` seconds after the first one: it must
            end the process.
        """
        now_s = self._clock()
        if self._signalled_s is None:
            self.leaving, self._signalled_s = True, now_s
        return now_s - self._signalled_s <= AGAIN_S


def _handle(number: signal.Signals, accepts: Callable[[], bool], before: Any) -> None:
    """Handle a signal by calling `accepts`.

    If that returns False, restore the handler `before` and send the signal to this process again.

    Forked children do not call `accepts`, so that the signal ends them.
    """

    def answer(number: int, frame: FrameType | None) -> None:
        if not accepts():
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    handle_signal(number, answer)
