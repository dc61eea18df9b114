"""Start mpiexec, process the messages of its ranks, and ensure that all ranks end.

mpiexec alone does not ensure that all ranks end. Open MPI 5.0 may hang if a rank dies while another rank connects.
Hydra (MPICH) waits forever if the remaining ranks wait for an exited rank.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from sirtaki.errors import LaunchError
from sirtaki.machine import explained, is_alive, is_stopped, thread_limits

from .leftovers import (
    Janitor,
    kill,
    makes_way_for_mpiexec,
    mapped_segments,
    remove_segments,
    remove_session_folder,
    session_members,
)
from .output import Ending, NoticeFilter, OutputOptions, RankOutput, killed, standard_consoles
from .rank_channel import ChannelLine, RankEvent, end_with_parent

FAILURE_GRACE_S = 3.0
"""Seconds to wait after the failure of a rank, in which other ranks may report and mpiexec may end all ranks itself."""

VANISHED_GRACE_S = 10.0
"""Seconds to wait for mpiexec to end the other ranks after the process of a rank has disappeared (was killed)."""

TERMINATE_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL for ranks that must end."""

START_REPORT_S = 10.0
"""Interval in seconds at which the launcher prints how many ranks have started, until all ranks have started."""

_NAMED = 8  # Maximum number of ranks or hosts that a message to the user lists.

_OF_OTHERS = ("PeerLostError: ", "StallError: ")
"""Prefixes of the failure reason of a rank if another rank caused the failure."""

_STOPPED = "it is stopped, by SIGSTOP or a debugger"

STOPPED_S = 10.0
"""Seconds for which a rank must have been stopped (SIGSTOP) before the launcher reports it."""

_POLL_S = 1.0
"""Seconds between two checks for disappeared ranks, passed time limits and a killed mpiexec."""


class Supervisor:
    """Supervisor of one mpiexec job from start to end. Each instance runs one job.

    Attributes:
        ranks: number of ranks that must start.
        start_timeout_s: maximum time without progress during the start, in seconds.
    """

    def __init__(self, *, ranks: int, start_timeout_s: float, output: OutputOptions, hosts: Sequence[str] = ()) -> None:
        """Create the supervisor. mpiexec is started by `run`.

        Args:
            ranks: number of ranks that must start.
            start_timeout_s: maximum time without progress during the start, in seconds.
            output: format of the output.
            hosts: hosts of the job other than this one.
        """
        self.ranks = ranks
        self.start_timeout_s = start_timeout_s
        self._hosts = tuple(hosts)
        self._output = output
        self._lock = threading.Lock()
        self._started: dict[int, ChannelLine] = {}
        self._ended: set[int] = set()
        self._failure: Ending | None = None
        self._doing: dict[int, str] = {}  # {rank: what it was doing when mpiexec ended it}
        self._unreached: list[str] = []
        self._verdict = ""
        # {rank: time at which it was found stopped (SIGSTOP)}; infinite after the rank was reported
        self._stopped_at: dict[int, float] = {}
        self._signal: int | None = None
        self._changed = threading.Event()
        self._open_streams = 0
        self._consoles = standard_consoles()

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run `command`, a command line of mpiexec, to its end. Afterwards, no process of the job is left.

        Returns:
            0, the exit code of the rank that failed first, or 128 + the signal that ended the launcher.

        Raises:
            LaunchError: mpiexec cannot be run, or ranks did not start in time.
        """
        with handling_signals(self._remember):
            try:
                mpiexec = subprocess.Popen(
                    command,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # Give mpiexec its own session. Ctrl-C then reaches only the launcher, which can end the whole
                    # session.
                    start_new_session=True,
                    preexec_fn=_before_mpiexec(),
                )
            except OSError as err:
                raise LaunchError(
                    f"the command {command[0]}, which starts the ranks, could not be started: {explained(err)}"
                ) from err
            self._janitor = Janitor(mpiexec.pid)
            pumps = self._start_pumps(mpiexec)
            try:
                self._wait(mpiexec)
            finally:
                self._consoles["stderr"].show_bar("")  # Remove the progress bar of a job that ended during tuning.
                self._end_all(mpiexec)
                self._janitor.dismiss()
            for pump in pumps:
                pump.join(timeout=TERMINATE_GRACE_S)
            if self._verdict:  # Print the cause of a failure last, where users look first.
                self._consoles["stderr"].say(self._verdict)
        if self._signal is not None:
            return 128 + self._signal
        if self._failure is not None:
            return self._failure.exit_code
        if mpiexec.returncode != 0 and not self._started:
            raise LaunchError(self._why_nothing_started(mpiexec.returncode))
        return _exit_code(mpiexec.returncode)

    def _start_pumps(self, mpiexec: subprocess.Popen[bytes]) -> list[threading.Thread]:
        pumps = []
        for name, stream in (("stdout", mpiexec.stdout), ("stderr", mpiexec.stderr)):
            assert stream is not None  # This is never None, because stdout and stderr are pipes.
            self._open_streams += 1
            output = RankOutput(
                name,
                console=self._consoles[name],
                on_message=self._process_message,
                notices=NoticeFilter(self._fail, self._unreached.append),
                options=self._output,
            )
            pumps.append(threading.Thread(target=self._pump, args=[output, stream], name=f"pump-{name}", daemon=True))
            pumps[-1].start()
        return pumps

    def _pump(self, output: RankOutput, stream: IO[bytes]) -> None:
        with stream:
            output.pump(stream)
        output.finish()
        self._open_streams -= 1
        self._changed.set()

    def _process_message(self, message: ChannelLine) -> None:
        if message.event is RankEvent.PROGRESS:
            self._consoles["stderr"].show_bar(message.reason)
            return
        with self._lock:
            if message.event in (RankEvent.STARTED, RankEvent.HANDED_OVER):
                self._started[message.rank] = message
            # After RAISES, the rank has not ended yet. It sends FAILED later.
            if message.event not in (RankEvent.STARTED, RankEvent.RAISES):
                self._ended.add(message.rank)
            if message.event is RankEvent.TERMINATED:
                self._doing[message.rank] = message.reason
        if message.event is RankEvent.STARTED and message.host == socket.gethostname():
            self._janitor.watch(message.pid)
        if message.event is RankEvent.FAILED:
            self._fail(Ending(rank=message.rank, host=message.host, exit_code=message.exit_code, reason=message.reason))
        self._changed.set()

    def _cause_of(self, ending: Ending) -> Ending:
        """Return the failed rank that caused the failure `ending` of a rank, if it is on this host. Otherwise return
        `ending`.
        """
        if not ending.reason.startswith(_OF_OTHERS):
            return ending
        with self._lock:
            running = [message for rank, message in sorted(self._started.items()) if rank not in self._ended]
        here = [message for message in running if message.host == socket.gethostname()]
        if gone := next((message for message in here if not is_alive(message.pid)), None):
            return killed(gone.rank, gone.host, signal.SIGKILL)
        if stopped := next((message for message in here if is_stopped(message.pid)), None):
            reason = f"{_STOPPED}; on rank {ending.rank}: {ending.reason}"
            return replace(ending, rank=stopped.rank, host=stopped.host, reason=reason)
        return ending

    def _fail(self, ending: Ending) -> None:
        """Store the first failed rank for the final message. Later failures are ignored, because the first one caused
        them.
        """
        ending = self._cause_of(ending)
        with self._lock:
            first, self._failure = self._failure is None and self._signal is None, self._failure or ending
            started = next((message for message in self._started.values() if _is_of(ending, message)), None)
        if first:
            host = ending.host or (started.host if started is not None else "")
            rank = ending.rank if started is None else started.rank
            who = "a rank" if rank is None else f"rank {rank}"
            where = f" on {host}" if host else ""
            self._verdict = f"{who}{where} failed ({ending.reason}){self._others(rank)}; ending all ranks"
        self._changed.set()

    def _others(self, failed: int | None) -> str:
        """Describe what another rank was doing, such as waiting, when mpiexec ended it."""
        doing = {rank: text for rank, text in sorted(self._doing.items()) if text and rank != failed}
        waiting = [rank for rank, text in doing.items() if text.startswith("waits")]
        return "".join(f"; rank {rank} {doing[rank]}" for rank in [*waiting, *doing][:1])

    def _why_nothing_started(self, returncode: int) -> str:
        if self._unreached:
            hosts = ", ".join(dict.fromkeys(self._unreached))
            return (
                f"{hosts} cannot be used: mpiexec could not start there. Try `ssh {self._unreached[0]} true`: it must "
                "work without a password, and the same Python environment must exist at the same path"
            )
        limits = thread_limits()
        hint = f"; if it lacks processes or threads, raise the limit: {limits}" if "pids.max" in limits else ""
        return f"no rank has started: mpiexec ended with exit code {_exit_code(returncode)}{hint}"

    def _wait(self, mpiexec: subprocess.Popen[bytes]) -> None:
        """Wait until mpiexec has ended, or until a failure, a signal or a time limit requires to end it."""
        start = _Start(mpiexec.pid, self.start_timeout_s, self._hosts)
        report_at = time.monotonic() + START_REPORT_S
        give_up_at: float | None = None
        while mpiexec.poll() is None and self._signal is None:
            now = time.monotonic()
            with self._lock:
                missing = sorted(set(range(self.ranks)) - set(self._started))
                failed = self._failure is not None
                vanished = [rank for rank in self._started if rank not in self._ended and self._has_vanished(rank)]
            if missing and not failed and start.is_over(self.ranks - len(missing), now):
                named = ", ".join(map(str, missing[:_NAMED])) + (", …" if len(missing) > _NAMED else "")
                raise LaunchError(
                    f"{len(missing)} of {self.ranks} ranks did not start within {start.limit_s:g} s (missing ranks: "
                    f"{named}); {start.advice(now)}, or wait longer with --start-timeout"
                )
            self._name_stopped(now)
            if missing and not failed and now > report_at:
                report_at = now + START_REPORT_S
                self._consoles["stderr"].say(f"{self.ranks - len(missing)} of {self.ranks} ranks have started")
            if not (failed or vanished):
                give_up_at = None  # The job continues, because the disappeared rank had reported its end before.
            elif give_up_at is None:
                give_up_at = now + (FAILURE_GRACE_S if failed else VANISHED_GRACE_S)
            elif now > give_up_at:
                if not failed:
                    self._fail(killed(vanished[0], self._started[vanished[0]].host, signal.SIGKILL))
                return
            self._changed.wait(_POLL_S if self._open_streams else _POLL_S / 20)
            self._changed.clear()

    def _name_stopped(self, now: float) -> None:
        """Report once each rank on this host that has been stopped (SIGSTOP) for `STOPPED_S`."""
        with self._lock:
            running = [message for rank, message in self._started.items() if rank not in self._ended]
        for message in running:
            if message.host != socket.gethostname() or not is_stopped(message.pid):
                self._stopped_at.pop(message.rank, None)
            elif now - self._stopped_at.setdefault(message.rank, now) > STOPPED_S:
                self._stopped_at[message.rank] = float("inf")
                self._consoles["stderr"].say(
                    f"rank {message.rank} on {message.host} waits: {_STOPPED}; `kill -CONT {message.pid}` resumes it"
                )

    def _has_vanished(self, rank: int) -> bool:
        message = self._started[rank]
        return message.host == socket.gethostname() and not is_alive(message.pid)

    def _end_all(self, mpiexec: subprocess.Popen[bytes]) -> None:
        """Ask mpiexec to end its ranks on all hosts. Then kill the processes of the job that remain on this host."""
        if mpiexec.poll() is None:
            mpiexec.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                mpiexec.wait(timeout=TERMINATE_GRACE_S)
        stuck = mpiexec.poll() is None
        mpiexec.kill()
        mpiexec.wait()
        with self._lock:
            own = {message.pid for message in self._started.values() if message.host == socket.gethostname()}
        left = session_members({mpiexec.pid, *own})
        segments = set[Path]().union(*map(mapped_segments, left))
        kill(left)
        remove_segments(segments)
        if stuck or mpiexec.returncode < 0:
            remove_session_folder(mpiexec.pid)

    def _remember(self, number: int) -> None:
        self._signal = number
        self._changed.set()


START_PROGRESS = 0.05
"""Processor time that counts as progress of a starting job, as a fraction of the start's time limit.

It is the sum over all processes of the job on this host.
"""

START_MOST = 10
"""Maximum duration of the start of a job whose ranks make progress, as a multiple of the start's time limit."""


class _Start:
    """Start phase of a job. The time limit is extended while ranks report, or while their processes on this host
    compute.

    Attributes:
        limit_s: maximum time without progress, in seconds.
    """

    def __init__(self, mpiexec: int, limit_s: float, hosts: Sequence[str]) -> None:
        self._mpiexec, self.limit_s, self._hosts = mpiexec, limit_s, hosts
        self._begun_s = self._moved_s = time.monotonic()
        self._there, self._computed_s, self._looked_s = 0, 0.0, 0.0

    def is_over(self, there: int, now: float) -> bool:
        """Return whether the start has failed, given that `there` ranks have started by `now`."""
        if there > self._there:
            self._there, self._moved_s = there, now
        if now - self._looked_s > self.limit_s / 20:
            self._looked_s, (computed_s, _) = now, self._processes()
            if computed_s - self._computed_s > START_PROGRESS * self.limit_s:
                self._computed_s, self._moved_s = computed_s, now
        return now > min(self._moved_s + self.limit_s, self._begun_s + START_MOST * self.limit_s)

    def _processes(self) -> tuple[float, int]:
        """Return (processor time, number) of the processes that mpiexec has started on this host."""
        import psutil  # Imported only here, because psutil takes time to load.

        computed_s, number = 0.0, 0
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._mpiexec).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    computed_s, number = computed_s + times.user + times.system, number + 1
        return computed_s, number

    def advice(self, now: float) -> str:
        """Return advice on what to do about a slow start, as a clause."""
        if self._hosts:
            return (
                f"check that {', '.join(self._hosts[:_NAMED])} can be reached by ssh without a password and have the "
                "same Python environment"
            )
        if now - self._begun_s > START_MOST * self.limit_s:
            return "they still compute, so start fewer ranks if there are too many for this machine"
        return (
            f"the {self._processes()[1]} processes that mpiexec has started on this host make no progress, so check "
            "what they wait for, such as a slow disk"
        )


@contextlib.contextmanager
def handling_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Call `on_signal` for Ctrl-C, SIGTERM and SIGHUP. Does nothing outside the main thread, because Python allows
    signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, lambda number, _: on_signal(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _before_mpiexec() -> Callable[[], None]:
    """Return the function that the child process calls before it becomes mpiexec."""
    make_way = makes_way_for_mpiexec()
    end_with_us = end_with_parent(signal.SIGTERM) if sys.platform == "linux" else None

    def begin() -> None:
        make_way()
        if end_with_us is not None:
            end_with_us()

    return begin


def _is_of(ending: Ending, message: ChannelLine) -> bool:
    if ending.rank is not None:
        return message.rank == ending.rank
    return message.pid == ending.pid if ending.pid else message.host == ending.host


def _exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
