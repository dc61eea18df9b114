"""Checkpoints of an elastic job: files, and reading them back."""

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
"""Of the files' format; those of 0.1 do not name theirs, which is 1."""

_PREFIX, _UNFINISHED = "checkpoint-", "writing-"
_DAMAGED, _SUPERSEDED = "damaged", "superseded"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole.

    Attributes:
        number: of the commit.
        path: its folder.
    """

    number: int
    path: Path

    @property
    def version(self) -> int:
        """Of its format."""
        return int(json.loads((self.path / MANIFEST).read_text()).get("version", 1))

    def load(self) -> dict[str, Any]:
        """What was written (Any: whatever pickles).

        Where it holds objects of the script's own classes, unpickling runs their code, as `torch.load` does; tensors,
        numbers, strings and their containers are read without.
        """
        tree: dict[str, Any]
        try:
            tree = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as err:
            logger.info("%s holds more than tensors and plain values: %s", self.path, str(err).splitlines()[0])
            tree = torch.load(self.path / STATE, map_location="cpu", weights_only=False)
        return tree


class Pace:
    """How fast a thread writes beside training: it rests after each slice, and most of the time is in nobody's way.

    What is written and read back goes through the memory and the caches that a step needs, on whichever processor.
    """

    def __init__(self, rests: float = 0.0, at_most_s: float = 0.0) -> None:
        """Of one thread, which need not be the one that calls this.

        Args:
            rests: seconds to rest for each that the thread's processor has worked.
            at_most_s: to rest in all.
        """
        self._rests, self._left_s = rests, at_most_s
        self._hurry = threading.Event()
        self._since_s: float | None = None

    def rest(self) -> None:
        """After a slice, by the thread that writes."""
        worked_s = 0.0 if self._since_s is None else time.thread_time() - self._since_s
        rest_s = min(self._left_s, self._rests * worked_s, LONGEST_REST_S)
        if rest_s > 0.0 and threading.main_thread().is_alive():  # else the process waits for this thread to end
            self._hurry.wait(rest_s)
            self._left_s -= rest_s
        self._since_s = time.thread_time()

    def hurry(self) -> None:
        """By any thread: somebody waits, so there is no rest any more."""
        self._hurry.set()


class _Written:
    """A file that is written in slices, as `torch.save` wants one; knows its size and digest."""

    def __init__(self, file: BinaryIO, pace: Pace) -> None:
        self._file, self._pace = file, pace
        self.size, self.sha256 = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        for part in _slices(memoryview(data).cast("B")):
            self.sha256.update(part)
            self._file.write(part)
            self._pace.rest()
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


SLICE_BYTES, LONGEST_REST_S = 1 << 20, 0.1
"""What is written or read back at a time, and how long the rest after it is at most."""


def _slices(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + SLICE_BYTES] for start in range(0, len(data), SLICE_BYTES))


class CheckpointFolder:
    """Where the checkpoints of one job lie."""

    def __init__(self, path: Path) -> None:
        """The folder need not be there."""
        self.path = path

    def write(self, number: int, tree: Mapping[str, Any], pace: Pace | None = None) -> None:
        """Writes one beside the others, has it appear at once, and reads it back; then the oldest go.

        Those with larger numbers are of a line that this job did not go on from: they are put aside, so that what is
        written last is what a later job finds.

        Args:
            number: of the commit.
            tree: what is written.
            pace: of the thread that calls this; None = as fast as can be.

        Raises:
            OSError: it could not be written or is not what was written; the others are as they were.
        """
        pace = pace or Pace()
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_UNFINISHED}*"):  # by a writer that is gone
            shutil.rmtree(left, ignore_errors=True)
        unfinished, final = self.path / f"{_UNFINISHED}{os.getpid()}", self._place(number)
        try:
            unfinished.mkdir()
            state = unfinished / STATE
            with state.open("wb") as file:
                written = _Written(file, pace)
                torch.save(dict(tree), cast(IO[bytes], written))
            told = {"bytes": written.size, "sha256": written.sha256.hexdigest(), "at": time.time()}
            manifest = {"version": VERSION, "number": number, **told}
            (unfinished / MANIFEST).write_text(json.dumps(manifest) + "\n")
            for place in (state, unfinished / MANIFEST, unfinished):
                _sync(place)
            if problem := _problem(unfinished, pace):
                raise OSError(f"read back, {problem}")
            shutil.rmtree(final, ignore_errors=True)  # of a job that went on from an older one
            unfinished.rename(final)
            _sync(self.path)
        except RuntimeError as err:  # PyTorch's, where the disk is full
            raise OSError(str(err).splitlines()[0]) from err
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        there = self._there()
        for path in there[there.index(final) + 1 :]:
            logger.warning(
                "%s is put aside as %s: this job did not go on from it", path, self._put_aside(path, _SUPERSEDED)
            )
        for path in self._there()[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> Checkpoint | None:
        """The newest one that is whole; None if there is none.

        Damaged ones that are newer are put aside, by name; what this process may not read is passed over.
        """
        for path in reversed(self._there()):
            try:
                problem = _problem(path)
            except PermissionError as err:  # it may be whole: its owner, or the user once that is mended, can use it
                logger.warning("the checkpoint %s is passed over, since it may not be read: %s", path, err)
                continue
            if not problem:
                return Checkpoint(_number(path), path)
            aside = self._put_aside(path, _DAMAGED)
            logger.warning("the checkpoint %s is not used, and put aside as %s: %s", path, aside, problem)
        return None

    def _put_aside(self, path: Path, why: str) -> str:
        """Gives it a name that is no checkpoint's, and returns that; its own where it can't be renamed."""
        number = 1
        while (aside := path.with_name(f"{why}-{number}-{path.name}")).exists():
            number += 1
        try:
            path.rename(aside)
        except OSError:  # another host has just done it, or the folder may not be written
            return path.name
        return aside.name

    def _place(self, number: int) -> Path:
        return self.path / f"{_PREFIX}{number:08}"

    def _there(self) -> list[Path]:
        """The oldest first."""
        found = [path for path in self.path.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
        return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _problem(path: Path, pace: Pace | None = None) -> str:
    """Why it cannot be used; empty if it can.

    Raises:
        PermissionError: this process may not read it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        size, digest = manifest["bytes"], manifest["sha256"]
        if (path / STATE).stat().st_size != size:
            return f"{STATE} has {(path / STATE).stat().st_size} bytes, not {size}"
        if _digest(path / STATE, pace or Pace()) != digest:
            return f"{STATE} is not what was written"
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as err:
        return f"{type(err).__name__}: {err}"
    return ""


def _digest(path: Path, pace: Pace) -> str:
    found, part = hashlib.sha256(), memoryview(bytearray(SLICE_BYTES))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # as it lies on the disk, where it does already
        while count := file.readinto(part):
            found.update(part[:count])
            pace.rest()
    return found.hexdigest()


def _sync(path: Path) -> None:
    """Has the disk hold it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # not every file system can do that with folders
            raise
    finally:
        os.close(descriptor)


GENERATORS = "generators"
"""Of a checkpoint: the states of all ranks' random generators, by rank."""

YIELDING = 10
"""The niceness of the thread that writes."""

RESTS, RESTING = 2.0, 0.25
"""So much longer than it works it rests, and for that share of the time between two checkpoints at most."""

TERMINATED = 128 + signal.SIGTERM

AGAIN_S = 2.0
"""What comes so soon says the same once more: batch systems tell a rank, and its launcher, which tells it, too."""

_LAUNCHERS = "sirtaki.run.rank_channel"

Tree = Mapping[str, Any]  # whatever pickles


class Checkpoints:
    """Those that this process writes.

    Attributes:
        leaving: this rank was told to end.
    """

    def __init__(
        self, folder: CheckpointFolder, *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Writes nothing.

        Args:
            folder: where.
            every_s: seconds between two at least.
            clock: tells the time in seconds.
        """
        self.folder, self.leaving = folder, False
        self._every_s, self._clock = every_s, clock
        self._last_s = clock()
        self._writing: threading.Thread | None = None
        self._pace = Pace()
        self._told_s: float | None = None

    @property
    def due(self) -> bool:
        """It is time for the next one, and the one before is written."""
        writing = self._writing is not None and self._writing.is_alive()
        return not writing and self._clock() - self._last_s >= self._every_s

    def write(self, number: int, tree: Tree) -> None:
        """Has a thread write it; `tree` is nobody else's. What goes wrong is told, and the ones before stay."""
        self._last_s, self._pace = self._clock(), Pace(RESTS, RESTING * self._every_s)
        self._writing = threading.Thread(target=self._write, args=(number, tree, self._pace), name="sirtaki-checkpoint")
        self._writing.start()

    def _write(self, number: int, tree: Tree, pace: Pace) -> None:
        begin_s = self._clock()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELDING)  # of this thread: training comes first
        try:
            self.folder.write(number, tree, pace)
        except Exception as err:  # what cannot be pickled, too; training goes on
            logger.warning(
                "commit %d could not be written to %s, the one before stays: %s", number, self.folder.path, err
            )
        else:
            logger.info("commit %d written to %s in %.1f s", number, self.folder.path, self._clock() - begin_s)

    def wait(self) -> None:
        """Until what is being written is on disk, which is soon: it rests no more."""
        self._pace.hurry()
        if self._writing is not None:
            self._writing.join()

    def listen(self) -> None:
        """From now on SIGTERM and SIGUSR1 have the next commit written; a later SIGTERM ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        # The launcher's own handler only says where a rank was; one of the script's is left alone.
        if before == signal.SIG_DFL or getattr(before, "__module__", "") == _LAUNCHERS:
            _handle(signal.SIGTERM, self._leave, before)
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            _handle(signal.SIGUSR1, self._leave, signal.SIG_IGN)

    def _leave(self) -> bool:
        """Whether this is news, or comes so soon that it says the same."""
        now_s = self._clock()
        if self._told_s is None:
            self.leaving, self._told_s = True, now_s
        return now_s - self._told_s <= AGAIN_S


def _handle(number: signal.Signals, is_news: Callable[[], bool], before: Any) -> None:  # Any: what signal.signal takes
    """Has a signal call `is_news`, and do as before once that is false. Processes that the script forks end by it."""

    def answer(number: int, frame: FrameType | None) -> None:
        if not is_news():
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    handle_signal(number, answer)
