"""The end of a rank's process: a rank that fails ends the job, one that has done its work waits for the others."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.mpi import skip_finalize
from sirtaki.errors import CommError, MismatchError, PeerLostError

VICTIM_S = 2.0
"""How long a rank whose communication failed waits before it ends the job: the cause should be heard first."""

LOST_S = 15.0
"""The same over MPI where another rank is about to end, or has: it ends the job, and its exit code is to be kept."""

EXIT_S = 5.0
"""How long a rank that ends with an exit code waits for the others; they must hear of it soon."""

_AGAIN_S = 60.0  # how long to wait for the others at a time, where there is no hurry


class Endable(Protocol):
    """What ends with the process: the job, as far as this module knows it."""

    @property
    def rank(self) -> int:
        """Of this process among all."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def backend(self) -> Backend:
        """What carries the control plane."""
        ...

    @property
    def failure(self) -> CommError | None:
        """Why the job is lost, None while all is well."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Collective: waits for the other ranks; may be called again where they did not come."""
        ...

    def abort(self, reason: str) -> None:
        """Ends the job on all ranks, at once."""
        ...

    @property
    def elastic(self) -> object | None:
        """Where ranks come and go: the others go on without this one."""
        ...

    def give_up(self, reason: str) -> None:
        """Where ranks come and go: tells the others that this one leaves."""
        ...

    def describe(self) -> str:
        """What this rank does and how far it is, in words."""
        ...

    def interrupt(self) -> list[str]:
        """Keeps what can be kept, and says where this rank is, in words."""
        ...


_job: Endable | None = None
_at_success: list[Callable[[], None]] = []
_leave_process: Callable[[int], object] = os._exit
_exit_code: int | None = None
_raised = False
_pid: int | None = None


def watch(job: Endable) -> None:
    """From now on the end of this process is the end of `job`, until `forget`."""
    global _job, _pid
    _job = job
    if _pid is None:
        _pid = os.getpid()
        _install_hooks()


def forget() -> None:
    """The job has been closed on all ranks."""
    global _job
    _job = None


def at_success(act: Callable[[], None]) -> None:
    """From now on `act` is called when the script has come to its end without an error."""
    _at_success.append(act)


def leave_by(leave: Callable[[int], object]) -> None:
    """From now on this process, where it leaves others behind or fails, ends by `leave(exit_code)`, not `os._exit`."""
    global _leave_process
    _leave_process = leave


def describe() -> str:
    """What this rank does, in words; "" without a job."""
    return "" if _job is None else _job.describe()


def end_now(reason: str) -> NoReturn:
    """Says why this rank ends the job, and ends the process without waiting for anything."""
    if _job is not None:
        _report(_job, reason, _interrupted(_job))
    _leave(1)


def finish() -> None:
    """The script has come to its end without an error, in a process that goes on."""
    global _job
    job, _job = _job, None
    for act in _at_success:
        act()
    if job is not None and not job.close(EXIT_S):
        job.give_up(f"rank {job.rank} has ended its script")


def _install_hooks() -> None:
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _job, _raised
        job = _job if os.getpid() == _pid else None
        _raised = True
        where = _interrupted(job) if job is not None and job.size > 1 else []
        if where and _started_by_sirtakirun():  # which says itself who raised what
            error.add_note(f"This rank {'; '.join(where)}.")
        over_mesh = job is not None and job.backend is Backend.MESH
        told_elsewhere = job is not None and (
            (job.rank > 0 and isinstance(error, MismatchError))
            or (over_mesh and job.size > 1 and isinstance(error, PeerLostError))
        )
        if not told_elsewhere or _started_by_sirtakirun():
            # torch.distributed catches what its inner hooks print, and would print it only after the job has ended.
            with contextlib.redirect_stderr(sys.__stderr__):
                previous_hook(kind, error, trace)
        if job is None or job.size == 1:
            if _leave_process is not os._exit:
                _leave(1)
            return
        _job = None  # nothing is left to wait for at the exit
        what = f"raised {kind.__name__}" + (f": {error}" if told_elsewhere else "")  # elsewhere it stands above
        if over_mesh and isinstance(error, PeerLostError):
            what = f"ends, since {error}"
        # The launcher, or another rank to which the same has happened, may end this process while it waits.
        at_once = over_mesh or (told_elsewhere and not _started_by_sirtakirun())
        if at_once:
            _report(job, what, where)
        if isinstance(error, CommError) and job.elastic is None:
            time.sleep(LOST_S if isinstance(error, PeerLostError) and not over_mesh else VICTIM_S)
        if not _started_by_sirtakirun():
            if not at_once:
                _report(job, what, where)
            _flush()
            job.abort(f"rank {job.rank} raised {kind.__name__}: {error}")
            _leave(1)

    def on_exit(status: Any = None) -> NoReturn:  # Any: as sys.exit
        global _exit_code
        _exit_code = status if isinstance(status, int) else int(status is not None)
        previous_exit(status)

    sys.excepthook, sys.exit = on_exception, on_exit
    atexit.register(_at_exit)


def _at_exit() -> None:
    """A rank whose script has ended: waits for the others, and does not hide a failure from mpiexec."""
    global _job
    job, _job = _job, None
    if os.getpid() != _pid:  # a process that the script forked; MPI is not its own
        if not skip_finalize():
            _flush()
            os._exit(_exit_code or 0)
        return
    code = _exit_code or 0
    if code == 0 and not _raised:
        for act in _at_success:
            act()
    if job is None or job.size == 1 or job.close(EXIT_S):
        if code != 0 and _leave_process is not os._exit:
            _leave(code)
        return
    if code == 0 and job.elastic is not None:
        job.give_up(f"rank {job.rank} has ended its script")
        if _leave_process is not os._exit:  # `raise SystemExit(9)` passes by `sys.exit`
            _leave(0)
        return
    while job.failure is None and code == 0:
        if job.close(_AGAIN_S):
            return
    where = _interrupted(job)
    if code != 0:
        reason = f"has ended with exit code {code} while others are at work"
        _report(job, reason, where)
        if job.backend is Backend.MESH:  # MPI would take its own exit code
            job.abort(f"rank {job.rank} {reason}")
        _leave(code)
    _report(job, f"ends after {job.failure}", where)
    # `raise SystemExit(9)` passes by `sys.exit`: Python knows the exit code, and nobody else. Unless it is 0 mpiexec
    # takes it for the job's; without MPI_Finalize, which would wait for the others, it comes at once.
    if not skip_finalize():
        _leave(1)


def _interrupted(job: Endable) -> list[str]:
    try:
        return job.interrupt()
    except Exception as err:  # whatever goes wrong here must not keep the job from ending
        return [f"could not keep its state: {err}"]


def _report(job: Endable, reason: str, where: list[str]) -> None:
    """Says who ends the job and where that rank was; sirtakirun says the former itself."""
    if where or not _started_by_sirtakirun():
        place = "".join(f"; it {text}" for text in where)
        then = "the job ends" if job.elastic is None else "it leaves the job"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed, full or None
            print(f"sirtaki: rank {job.rank} {reason}{place}; {then}", file=sys.__stderr__, flush=True)


def _started_by_sirtakirun() -> bool:
    """Its wrapper runs the script in this process, and ends the other ranks when this one fails."""
    return "sirtaki.run.rank_channel" in sys.modules


def _leave(exit_code: int) -> NoReturn:
    """Without MPI_Finalize, so that mpiexec sees a failure and ends the other ranks."""
    _flush()
    _leave_process(exit_code)
    raise AssertionError("this process has ended")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
