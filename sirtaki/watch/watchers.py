"""Watchers, which receive events of a job; totals of the events; the socket by which `sirtaki top` finds jobs."""

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
    """End of a training iteration of one optimizer on this rank.

    Attributes:
        number: number of the iteration, from 1.
        step_s: seconds since the end of the previous iteration. NaN for the first iteration, and after a trial
            that changed a setting.
        communication_s: seconds from the first ready gradient to the last reduced one. On GPUs, it is the previous
            iteration's.
        exposed_s: part of `communication_s` that the backward pass did not hide.
        n_bytes: size of the gradients as sent.
        tuning: True if the iteration ran in a trial of the tuner.
    """

    number: int
    step_s: float
    communication_s: float
    exposed_s: float
    n_bytes: int
    tuning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """End of a trial of the tuner. Sent on rank 0.

    Attributes:
        iteration: iteration in which the trial ended.
        arm: search method of the tuner that proposed the setting.
        setting: the setting in words.
        knobs: the setting as a mapping, in the format of the trial log.
        communication_s: shortest measured communication time. Infinite if the setting could not run.
        best_s: shortest communication time of all trials.
    """

    iteration: int
    arm: str
    setting: str
    knobs: Mapping[str, Any]
    communication_s: float
    best_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The tuner's choice of a setting. Sent on rank 0.

    Attributes:
        iteration: last iteration before the setting takes effect.
        arm: search method of the tuner that proposed the chosen setting.
        setting: the chosen setting in words.
        knobs: the chosen setting as a mapping, in the format of the trial log.
        default_s: communication time of the untuned default. NaN if it was not measured.
        best_s: communication time of the chosen setting.
        n_trials: number of trials before this decision.
        retune: True if the decision ends a re-tune, a repeated search during training.
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
    """Start of a generation (set of ranks of an elastic job), when all its ranks are connected.

    Attributes:
        number: number of the generation, from 1. 0 = the ranks of this job never change.
        rank: rank of this process.
        size: number of ranks.
    """

    number: int
    rank: int
    size: int


class Watcher:
    """Base class of watchers, which receive a job's events. Each method does nothing by default.

    The training thread calls the methods, so they must be fast. A watcher that raises is removed with a warning.
    """

    def iteration(self, event: IterationEnded) -> None:
        """Handle the end of a training iteration."""

    def trial(self, event: TrialEnded) -> None:
        """Handle the end of a trial. Called on rank 0."""

    def decision(self, event: Decision) -> None:
        """Handle the tuner's choice of a setting. Called on rank 0."""

    def generation(self, event: GenerationBegun) -> None:
        """Handle the start of a generation (set of ranks of an elastic job)."""

    def close(self) -> None:
        """Handle the end of the job or of the script. No other method is called afterwards."""


logger = logging.getLogger(__name__)

watching: list[Watcher] = []
"""All watchers of this process. Read-only for other modules."""

_generation: GenerationBegun | None = None


def add(watcher: Watcher) -> None:
    """Send all further events of this process to `watcher` until the job ends. May be called before `hvd.init()`."""
    if not watching:
        # Close watchers at exit, because a script may not call `shutdown()`. A second call has no effect.
        at_exit(partial(end, for_good=True))
    watching.append(watcher)
    if (generation := _generation) is not None:
        notify(lambda watcher: watcher.generation(generation), [watcher])


def remove(watcher: Watcher) -> None:
    """Stop sending events to `watcher`. Does nothing if it was not added."""
    if watcher in watching:
        watching.remove(watcher)


def notify(
    call: Callable[[Watcher], None], watchers: Sequence[Watcher] | None = None, *, iteration: int | None = None
) -> None:
    """Call `call` with each watcher, and remove a watcher that raises.

    Args:
        call: sends an event to a watcher.
        watchers: watchers to notify. None = all.
        iteration: number of the iteration, for the warning. None = unknown.
    """
    for watcher in tuple(watching if watchers is None else watchers):
        try:
            call(watcher)
        except Exception as err:
            remove(watcher)
            when = "" if iteration is None else f" in iteration {iteration}"
            name = type(watcher).__name__
            logger.warning(
                "the watcher %s (object with callbacks for a job's events) raised an error%s; Sirtaki removed this "
                "watcher, and training continues: %s",
                name,
                when,
                in_a_line(err),
            )
            logger.debug(
                "a callback of the watcher %s (object that receives a job's events) raised the following error; "
                "correct this callback:",
                name,
                exc_info=True,
            )


def begin(event: GenerationBegun) -> None:
    """Notify all watchers, and those added later, of the start of a generation (set of ranks of an elastic job)."""
    global _generation
    _generation = event
    notify(lambda watcher: watcher.generation(event))


def end(*, for_good: bool) -> None:
    """End the current generation (set of ranks of an elastic job), so that watchers added later are not notified of it.

    If the job will not start again (`for_good`), close and remove all watchers.
    """
    global _generation
    _generation = None
    if for_good:
        notify(lambda watcher: watcher.close())
        watching.clear()


RECENT = 50
"""Number of iterations over which `Totals.recent_means` averages."""


class Totals(Watcher):
    """Totals of a job's events. Any thread may read them.

    Attributes:
        iterations: number of iterations of all optimizers.
        step_s, communication_s, exposed_s: total seconds.
        n_bytes: total size of gradients as sent.
        trials, decisions: number of trials and decisions.
        generation_number: number of the current generation (set of ranks of an elastic job). 0 before the first one.
        setting: setting chosen last, in words. "" = none.
        gain: speedup of communication by the last decision. NaN before the first one.
    """

    def __init__(self) -> None:
        self.iterations = self.n_bytes = self.trials = self.decisions = self.generation_number = 0
        self.step_s = self.communication_s = self.exposed_s = 0.0
        self.setting, self.gain = "", math.nan
        self._recent: deque[IterationEnded] = deque(maxlen=RECENT)

    def iteration(self, event: IterationEnded) -> None:
        """Add the iteration's times and bytes."""
        self.iterations += 1
        self.step_s += 0.0 if math.isnan(event.step_s) else event.step_s
        self.communication_s += 0.0 if math.isnan(event.communication_s) else event.communication_s
        self.exposed_s += 0.0 if math.isnan(event.exposed_s) else event.exposed_s
        self.n_bytes += event.n_bytes
        self._recent.append(event)

    def trial(self, event: TrialEnded) -> None:
        """Count a trial."""
        self.trials += 1

    def decision(self, event: Decision) -> None:
        """Count a decision, and store its setting and gain."""
        self.decisions += 1
        self.setting = event.setting
        self.gain = event.default_s / event.best_s if event.best_s > 0.0 else math.nan

    def generation(self, event: GenerationBegun) -> None:
        """Store the number of the generation (set of ranks of an elastic job)."""
        self.generation_number = event.number

    def recent_means(self) -> dict[str, float]:
        """Return the mean times of recent iterations, in seconds. Times without any measurement are omitted."""
        recent = list(self._recent)
        means = {}
        for name in ("step_s", "communication_s", "exposed_s"):
            values = [value for event in recent if not math.isnan(value := getattr(event, name))]
            if values:
                means[name] = sum(values) / len(values)
        return means


# ── TensorBoard ───────────────────────────────────────────────────────────────────────────────────────────────────────


class TensorBoard(Watcher):
    """Watcher that writes events to a TensorBoard `SummaryWriter`."""

    def __init__(self, log_dir: str | None = None, *, writer: Any = None, every: int = 1) -> None:
        """Open PyTorch's `SummaryWriter`, unless a writer is given. Usually on rank 0 only.

        Args:
            log_dir: folder of PyTorch's writer. None = its default.
            writer: object with `add_scalar(tag, value, step)` and `add_text(tag, text, step)`. None = PyTorch's writer.
            every: number of iterations after which one iteration is written. 1 = write each.

        Raises:
            ConfigError: no writer is given, and TensorBoard is not installed.
        """
        self._own = writer is None
        if writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as err:
                raise ConfigError(
                    "sirtaki.watch.TensorBoard needs the package tensorboard, which is not installed: "
                    "pip install tensorboard"
                ) from err
            writer = SummaryWriter(log_dir)
        self._writer, self._every = writer, every

    def iteration(self, event: IterationEnded) -> None:
        """Write the iteration's times, if its number is a multiple of `every`."""
        if event.number % self._every == 0:
            for name in ("step_s", "communication_s", "exposed_s"):
                self._scalar(name, getattr(event, name), event.number)

    def trial(self, event: TrialEnded) -> None:
        """Write the communication time of the trial and the best one."""
        self._scalar("trial/communication_s", event.communication_s, event.iteration)
        self._scalar("trial/best_s", event.best_s, event.iteration)

    def decision(self, event: Decision) -> None:
        """Write the chosen setting and its communication time."""
        self._scalar("decision/communication_s", event.best_s, event.iteration)
        self._writer.add_text("sirtaki/setting", f"{event.setting} (proposed by {event.arm})", event.iteration)

    def generation(self, event: GenerationBegun) -> None:
        """Write the number of ranks."""
        self._scalar("ranks", event.size, event.number)

    def close(self) -> None:
        """Close PyTorch's writer. A given writer stays open."""
        if self._own:
            self._writer.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._writer.add_scalar(f"sirtaki/{name}", value, step)


# ── discovery of jobs on this machine for `sirtaki top`: one socket per job in the user's run folder ──────────────────

# A killed process leaves its socket file behind. `running_jobs` removes the file, because connections to it are
# refused. In a running job, the socket's thread sleeps between requests.

ANSWER_S = 1.0
"""Seconds in which a job must answer a request."""

Answer = dict[str, Any]
"""State of a job, as a JSON-ready dict."""


def run_folder() -> Path:
    """Return the folder with the sockets of this user's jobs."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if given and os.access(given, os.W_OK):
        return Path(given) / "sirtaki"
    return Path(tempfile.gettempdir()) / f"sirtaki-{os.getuid()}"


class JobBeacon:
    """Socket at which this process sends the state of its job to each client. `sirtaki top` is such a client."""

    def __init__(self, answer: Callable[[], Answer], *, folder: Path | None = None) -> None:
        """Create the socket, and answer requests in a new thread.

        Args:
            answer: returns the job's state. Called in the socket's thread.
            folder: folder of the socket. None = `run_folder()`.

        Raises:
            OSError: the socket cannot be created.
        """
        folder = run_folder() if folder is None else folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(
                f"the folder {folder}, for the sockets of `sirtaki top`, belongs to another user; remove it, or set "
                "XDG_RUNTIME_DIR to a folder of yours"
            )
        self._answer, self._pid = answer, os.getpid()
        self._path = folder / f"{self._pid}.{secrets.token_hex(4)}"
        # Hide the socket's file until the socket listens, because `running_jobs` removes files that refuse connections.
        hidden = folder / f".{self._path.name}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(hidden))
            self._socket.listen(4)
            hidden.rename(self._path)
        except OSError:
            self._socket.close()
            raise
        # Close the socket in forked children, which would otherwise keep it open without answering.
        in_forked_children(self, lambda presence: presence._socket.close())
        self._thread = threading.Thread(target=self._serve, name="sirtaki-presence", daemon=True)
        self._thread.start()
        at_exit(self.close)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_S)
                try:
                    answer = json.dumps(self._answer())
                except Exception:
                    # Send no answer: there is no state while the job starts or ends.
                    logger.debug(
                        "`sirtaki top` got no answer from this job, because the job is starting or ending; run it "
                        "again after a few seconds",
                        exc_info=True,
                    )
                    continue
                connection.sendall(answer.encode())

    def close(self) -> None:
        """Remove the job's socket, and stop answering. Does nothing in a forked child."""
        forget_at_exit(self.close)
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            # Shut down the socket, so that `accept` in the socket's thread returns.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(ANSWER_S)


def running_jobs(folder: Path | None = None) -> Iterator[Answer]:
    """Yield the state of each job of this user on this machine. Removes sockets of killed processes."""
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(path))
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    answer = json.loads(b"".join(parts))
    if not isinstance(answer, dict):
        raise ValueError(answer)
    return answer
