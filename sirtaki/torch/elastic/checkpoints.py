"""Commits that outlive the job: rank 0 writes one to disk now and then, and the same command goes on from the newest.

Beside training: what is written is copied first, which takes as long as a commit, and a thread does the rest. SIGTERM,
by which preemptible machines are announced to go, or SIGUSR1, which batch systems send, has the next commit written at
once, and then ends the rank.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from sirtaki.engine import job
from sirtaki.errors import ConfigError

from ..functions import allgather_object, broadcast_object
from .checkpoint_folder import Checkpoint, CheckpointFolder
from .random_state import RandomState

logger = logging.getLogger(__name__)

GENERATORS = "generators"
"""Of a checkpoint: the states of all ranks' random generators, by rank."""

YIELDING = 10
"""The niceness of the thread that writes."""

TERMINATED = 128 + signal.SIGTERM

AGAIN_S = 2.0
"""What comes so soon says the same once more: batch systems tell a rank, and its launcher, which tells it, too."""

_LAUNCHERS = "sirtaki.run.termination"

Tree = Mapping[str, Any]  # whatever pickles


class Resumable(Protocol):
    """A state that can go on from a checkpoint."""

    def _load(self, tree: Tree) -> None:
        """Takes over what was written."""
        ...

    def _count_from(self, number: int) -> None:
        """What is saved next has that number."""
        ...


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
        self._told_s: float | None = None

    @property
    def due(self) -> bool:
        """It is time for the next one, and the one before is written."""
        writing = self._writing is not None and self._writing.is_alive()
        return not writing and self._clock() - self._last_s >= self._every_s

    def write(self, number: int, tree: Tree) -> None:
        """Has a thread write it; `tree` is nobody else's. What goes wrong is told, and the ones before stay."""
        self._last_s = self._clock()
        self._writing = threading.Thread(target=self._write, args=(number, tree), name="sirtaki-checkpoint")
        self._writing.start()

    def _write(self, number: int, tree: Tree) -> None:
        begin_s = self._clock()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELDING)  # of this thread: training comes first
        try:
            self.folder.write(number, tree)
        except Exception as err:  # what cannot be pickled, too; training goes on
            logger.warning(
                "commit %d could not be written to %s, the one before stays: %s", number, self.folder.path, err
            )
        else:
            logger.info("commit %d written to %s in %.1f s", number, self.folder.path, self._clock() - begin_s)

    def wait(self) -> None:
        """Until what is being written is on disk."""
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

    def forget() -> None:
        if signal.getsignal(number) is answer:
            signal.signal(number, signal.SIG_DFL)

    signal.signal(number, answer)
    os.register_at_fork(after_in_child=forget)


_of_process: Checkpoints | None = None


def of_this_process() -> Checkpoints | None:
    """Those of the job; None if it has no folder for them."""
    global _of_process
    settings = job.current().settings
    if settings.checkpoint_dir is None:
        return None
    if _of_process is None:
        _of_process = Checkpoints(CheckpointFolder(Path(settings.checkpoint_dir)), every_s=settings.checkpoint_s)
        _of_process.listen()
    return _of_process


def resume(state: Resumable, *, has_state: bool) -> None:
    """Collective: goes on from the newest checkpoint that some host sees, if no rank has a state of this job.

    Args:
        state: takes it over.
        has_state: this rank has one.

    Raises:
        ConfigError: on all ranks, it is of another script.
    """
    checkpoints = of_this_process()
    if checkpoints is None:
        return
    looks = not has_state and job.current().control.local_rank == 0
    found: Checkpoint | None = checkpoints.folder.newest() if looks else None
    said = allgather_object((has_state, -1 if found is None else found.number))
    newest = max(number for _, number in said)
    if newest < 0 or any(there for there, _ in said):
        return
    holder = said.index((False, newest))
    mine = found is not None and job.current().rank == holder
    tree = broadcast_object(found.load() if mine and found is not None else None, holder)
    try:
        state._load(tree)
    except Exception as err:
        raise ConfigError(
            f"the checkpoint in {checkpoints.folder.path} does not fit this script ({err}): is it another one's? Give "
            "each job a SIRTAKI_CHECKPOINT_DIR of its own, or remove what lies there to begin anew"
        ) from err
    generators = tree.get(GENERATORS, [])
    if len(generators) == job.current().size and generators[job.current().rank] is not None:
        RandomState(**generators[job.current().rank]).put_back()
    state._count_from(newest + 1)
    if job.current().rank == 0:
        logger.info("going on from the checkpoint of commit %d in %s", newest, checkpoints.folder.path)
