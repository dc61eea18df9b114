"""Who watches a job, from within and from outside, what they are told, and totals of it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sirtaki.errors import ConfigError, in_a_line
from sirtaki.machine import at_exit, forget_at_exit, in_forked_children


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationEnded:
    """A training iteration of one optimizer has ended on this rank.

    Attributes:
        number: of the iteration, from 1.
        step_s: since the one before ended; not a number for the first, and after a trial that changed something.
        communication_s: from the first gradient that was ready to the last one that was reduced; on GPUs, of the
            iteration before.
        exposed_s: what of that the backward pass did not hide.
        n_bytes: of the gradients as they travel.
        tuning: the setting that ran was a trial's.
    """

    number: int
    step_s: float
    communication_s: float
    exposed_s: float
    n_bytes: int
    tuning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """The tuner has tried a setting; rank 0 is told.

    Attributes:
        iteration: at which it ended.
        arm: who proposed it.
        setting: in words.
        knobs: as in the trial log.
        communication_s: the shortest measured; infinite if it could not be run.
        best_s: of the best setting so far.
    """

    iteration: int
    arm: str
    setting: str
    knobs: Mapping[str, Any]
    communication_s: float
    best_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The tuner has decided what runs from now on; rank 0 is told.

    Attributes:
        iteration: after which.
        arm: who proposed it.
        setting: in words.
        knobs: as in the trial log.
        default_s: communication time of the untuned default; not a number if it was not measured.
        best_s: of what was decided for.
        n_trials: that were run.
        retune: it is the end of a re-tune.
    """

    iteration: int
    arm: str
    setting: str
    knobs: Mapping[str, Any]
    default_s: float
    best_s: float
    n_trials: int
    retune: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBegun:
    """The ranks of the job are together, for the first time or anew.

    Attributes:
        number: of the generation, from 1; 0 where ranks stay.
        rank: this process's.
        size: how many there are.
    """

    number: int
    rank: int
    size: int


class Watcher:
    """Base class of watchers; each method does nothing by itself.

    Methods are called in the thread that trains, so they should be quick. A watcher that raises is removed, and the log
    says so.
    """

    def iteration(self, event: IterationEnded) -> None:
        """A training iteration has ended."""

    def trial(self, event: TrialEnded) -> None:
        """A setting was tried; on rank 0."""

    def decision(self, event: Decision) -> None:
        """It is decided what runs; on rank 0."""

    def generation(self, event: GenerationBegun) -> None:
        """The ranks are together."""

    def close(self) -> None:
        """The job, or the script, has ended; nothing more is told."""


logger = logging.getLogger(__name__)

watching: list[Watcher] = []
"""All watchers of this process; only to be read."""

_generation: GenerationBegun | None = None


def add(watcher: Watcher) -> None:
    """Tells the watcher of everything in this process from now on until the job ends; also before `hvd.init()`."""
    if not watching:
        at_exit(partial(end, for_good=True))  # for scripts that do not call `shutdown()`; a second call is harmless
    watching.append(watcher)
    if (begun := _generation) is not None:
        tell_all(lambda watcher: watcher.generation(begun), [watcher])


def remove(watcher: Watcher) -> None:
    """Tells the watcher nothing more. Harmless if it was not there."""
    if watcher in watching:
        watching.remove(watcher)


def tell_all(
    say: Callable[[Watcher], None], watchers: Sequence[Watcher] | None = None, *, iteration: int | None = None
) -> None:
    """Calls `say` with each of the watchers, None = all, and removes one that raises; the log names the `iteration`."""
    for watcher in tuple(watching if watchers is None else watchers):
        try:
            say(watcher)
        except Exception as err:
            remove(watcher)
            when = "" if iteration is None else f" in iteration {iteration}"
            words = "%s has failed%s and watches no more: %s"
            logger.warning(words, type(watcher).__name__, when, in_a_line(err))
            logger.debug("where it failed", exc_info=True)


def begin(event: GenerationBegun) -> None:
    """Tells all watchers, and those that come later, that the ranks are together."""
    global _generation
    _generation = event
    tell_all(lambda watcher: watcher.generation(event))


def end(*, for_good: bool) -> None:
    """Forgets that the ranks were together; `for_good`: the job has ended, and all watchers are closed."""
    global _generation
    _generation = None
    if for_good:
        tell_all(lambda watcher: watcher.close())
        watching.clear()


RECENT = 50
"""Iterations whose times are shown as what they take now."""


class Totals(Watcher):
    """Adds up what the job does; any thread may read.

    Attributes:
        iterations: that have ended, of all optimizers.
        step_s, communication_s, exposed_s: seconds in all.
        n_bytes: of gradients in all.
        trials, decisions: counts.
        generation_number: 0 at first.
        setting: what was decided for, in words; empty before.
        gain: how many times faster communication became by the last decision; not a number before.
    """

    def __init__(self) -> None:
        self.iterations = self.n_bytes = self.trials = self.decisions = self.generation_number = 0
        self.step_s = self.communication_s = self.exposed_s = 0.0
        self.setting, self.gain = "", math.nan
        self._recent: deque[IterationEnded] = deque(maxlen=RECENT)

    def iteration(self, event: IterationEnded) -> None:
        """Adds up the iteration's times, and keeps it among the last ones."""
        self.iterations += 1
        self.step_s += 0.0 if math.isnan(event.step_s) else event.step_s
        self.communication_s += 0.0 if math.isnan(event.communication_s) else event.communication_s
        self.exposed_s += 0.0 if math.isnan(event.exposed_s) else event.exposed_s
        self.n_bytes += event.n_bytes
        self._recent.append(event)

    def trial(self, event: TrialEnded) -> None:
        """Counts the trial."""
        self.trials += 1

    def decision(self, event: Decision) -> None:
        """Counts the decision, and keeps the setting and what it gains."""
        self.decisions += 1
        self.setting = event.setting
        self.gain = event.default_s / event.best_s if event.best_s > 0.0 else math.nan

    def generation(self, event: GenerationBegun) -> None:
        """Keeps the generation's number."""
        self.generation_number = event.number

    def now(self) -> dict[str, float]:
        """What the last iterations took on average, in seconds; what is not known is left out."""
        recent = list(self._recent)
        means = {}
        for name in ("step_s", "communication_s", "exposed_s"):
            known = [value for event in recent if not math.isnan(value := getattr(event, name))]
            if known:
                means[name] = sum(known) / len(known)
        return means


# ── iterations, trials and decisions as TensorBoard shows them ────────────────────────────────────────────────────────


class TensorBoard(Watcher):
    """Writes what happens to a `SummaryWriter`, PyTorch's if none is given."""

    def __init__(self, log_dir: str | None = None, *, writer: Any = None, every: int = 1) -> None:
        """Opens PyTorch's writer if none is given; to be made on rank 0, as a rule.

        Args:
            log_dir: folder of PyTorch's writer; None = its own choice.
            writer: has `add_scalar(tag, value, step)` and `add_text(tag, text, step)`; None = PyTorch's is made.
            every: iterations between two that are written.

        Raises:
            ConfigError: PyTorch's writer is wanted, and TensorBoard is not installed.
        """
        self._own = writer is None
        if writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as err:
                raise ConfigError("TensorBoard is not installed: pip install tensorboard") from err
            writer = SummaryWriter(log_dir)
        self._writer, self._every = writer, every

    def iteration(self, event: IterationEnded) -> None:
        """Writes what the iteration took, if it is one of every so many."""
        if event.number % self._every == 0:
            for name in ("step_s", "communication_s", "exposed_s"):
                self._scalar(name, getattr(event, name), event.number)

    def trial(self, event: TrialEnded) -> None:
        """Writes what the trial took, and the best one so far."""
        self._scalar("trial/communication_s", event.communication_s, event.iteration)
        self._scalar("trial/best_s", event.best_s, event.iteration)

    def decision(self, event: Decision) -> None:
        """Writes which setting runs, with its time."""
        self._scalar("decision/communication_s", event.best_s, event.iteration)
        self._writer.add_text("sirtaki/setting", f"{event.setting} (proposed by {event.arm})", event.iteration)

    def generation(self, event: GenerationBegun) -> None:
        """Writes how many ranks are together."""
        self._scalar("ranks", event.size, event.number)

    def close(self) -> None:
        """Closes PyTorch's writer; one that was given is its owner's."""
        if self._own:
            self._writer.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._writer.add_scalar(f"sirtaki/{name}", value, step)


# ── how jobs of this machine are found by `sirtaki top`: a socket of each in the user's run folder ────────────────────

# The system refuses connections to what a killed process has left. Only who asks connects: a job that nobody looks at
# pays for a thread that sleeps.

ANSWER_S = 1.0
"""How long a job that is asked may take to answer."""

Answer = dict[str, Any]
"""What a job says of itself, as JSON."""


def run_folder() -> Path:
    """The folder with the sockets of this user's jobs."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if given and os.access(given, os.W_OK):
        return Path(given) / "sirtaki"
    return Path(tempfile.gettempdir()) / f"sirtaki-{os.getuid()}"


class JobBeacon:
    """A socket that answers with what a job says of itself."""

    def __init__(self, answer: Callable[[], Answer], *, folder: Path | None = None) -> None:
        """Begins to listen.

        Args:
            answer: says it; called in another thread.
            folder: of the socket; None = the run folder.

        Raises:
            OSError: no socket can be made there.
        """
        folder = run_folder() if folder is None else folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        self._answer, self._pid = answer, os.getpid()
        self._path = folder / f"{self._pid}.{secrets.token_hex(4)}"
        hidden = folder / f".{self._path.name}"  # until it listens: `look` would remove what refuses
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(hidden))
            self._socket.listen(4)
            hidden.rename(self._path)
        except OSError:
            self._socket.close()
            raise
        in_forked_children(self, lambda presence: presence._socket.close())  # they would keep it open, and never answer
        self._thread = threading.Thread(target=self._serve, name="sirtaki-presence", daemon=True)
        self._thread.start()
        at_exit(self.close)

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._socket.accept()
            except OSError:
                return
            with asking, contextlib.suppress(OSError):
                asking.settimeout(ANSWER_S)
                try:
                    said = json.dumps(self._answer())
                except Exception:  # the job is at its end, or just beginning
                    logger.debug("nothing could be told", exc_info=True)
                    continue
                asking.sendall(said.encode())

    def close(self) -> None:
        """Removes the socket; does nothing in a child that was forked."""
        forget_at_exit(self.close)
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
        self._thread.join(ANSWER_S)


def look(folder: Path | None = None) -> Iterator[Answer]:
    """Yields what each job of this user on this machine says of itself; removes what dead ones have left."""
    folder = run_folder() if folder is None else folder
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("[!.]*")):
        with contextlib.suppress(OSError, ValueError):
            try:
                yield _ask(path)
            except ConnectionRefusedError:
                path.unlink()


def _ask(path: Path) -> Answer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_S)
        asking.connect(str(path))
        parts = []
        while part := asking.recv(65536):
            parts.append(part)
    said = json.loads(b"".join(parts))
    if not isinstance(said, dict):
        raise ValueError(said)
    return said
