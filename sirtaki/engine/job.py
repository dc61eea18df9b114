"""The state of a job on one rank, from `init()` to `shutdown()`, and how the job ends if the script ends or fails."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from sirtaki import watch
from sirtaki.comm import recorder, timeline
from sirtaki.comm.collectives.engine import EagerEngine, RankSets
from sirtaki.comm.control.communicator import Backend, Communicator
from sirtaki.comm.control.failure import FORKED
from sirtaki.comm.control.mpi import skip_finalize
from sirtaki.comm.control.plane import ControlPlane, align_clocks
from sirtaki.comm.control.waiting import Deadline, Poll, leave_together, wait_for
from sirtaki.comm.control.watchdog import MessageBoard, Watchdog
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.modes import outside_modes
from sirtaki.comm.transports.contract import raise_descriptor_limit
from sirtaki.engine.console import start_logging
from sirtaki.engine.settings import NEVER_S, REGISTRY_OFF, Settings
from sirtaki.errors import CommError, ConfigError, MismatchError, NotInitializedError, PeerLostError, SirtakiError
from sirtaki.machine import at_exit, in_forked_children
from sirtaki.registry.opening import load_ahead
from sirtaki.uncompiled import exclude_from_compilation
from sirtaki.watch import watchers
from sirtaki.watch.watchers import JobBeacon, Totals

from . import generations
from .generations import Generations, of_this_process
from .lanes import open_lanes
from .membership import Dismissed
from .participants import ActiveReducers, BlockedRanks, JoinProtocol, Tuning
from .ranks import open_beside, open_ranks, settings_beside
from .tuning.plans import part_bytes_of

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    from sirtaki.watch.prometheus import MetricsServer


logger = logging.getLogger(__name__)

CLOSING_S = 10.0
"""Maximum seconds to wait for the end of a thread or a queue that is being closed."""


class Disposal:
    """Queue of functions that close resources. A background thread calls them in order."""

    def __init__(self) -> None:
        """Create the queue. `start` starts the thread that calls the functions."""
        # A SimpleQueue is used because a destructor may call `put` while `put` is running in the same thread.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the background thread if it is not running. Call before the first `put`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sirtaki-disposal", daemon=True)
            self._thread.start()

    def put(self, close: Callable[[], None]) -> None:
        """Queue `close` for the background thread. Non-blocking. May be called from destructors."""
        self._queue.put(close)

    def drain(self) -> None:
        """Wait until all functions queued before this call have returned."""
        if self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._queue.put(done.set)
            done.wait(CLOSING_S)

    def _run(self) -> None:
        while (close := self._queue.get()) is not None:
            try:
                close()
            except Exception:  # logged only, because the remaining functions must be called after any error
                logger.warning(
                    "Sirtaki could not remove all its hooks and buffers of a DistributedOptimizer that the script has "
                    "deleted, because of an error; training continues",
                    exc_info=True,
                )
            # Delete the reference, because the function references the closed object, which could not be freed.
            del close

    def stop(self) -> None:
        """Run the queued functions, and end the background thread."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSING_S)


class JobObservers:
    """Monitoring of a job: detection of missing ranks, the metrics server, and `sirtaki top`. Its errors never reach
    training.
    """

    def __init__(self, job: Job, *, local_rank: int, generation: int) -> None:
        self._job, self._generation, self._began_s = job, generation, time.time()
        self._totals: Totals | None = None
        self._server: MetricsServer | None = None
        self._presence: JobBeacon | None = None
        settings = job.settings
        watchers.begin(watch.GenerationBegun(number=generation, rank=job.rank, size=job.size))
        if settings.metrics is not None:
            host, port = settings.metrics
            self._server = self._serve(host, port + local_rank)
        if local_rank == 0:
            try:
                self._presence = JobBeacon(self._describe)
            except OSError as err:
                logger.debug(
                    "the command `sirtaki top` will not list this job, because its socket could not be opened: %s", err
                )

    def _serve(self, host: str, port: int) -> MetricsServer | None:
        from sirtaki.watch.prometheus import MetricsServer  # imported late, because it needs prometheus_client

        try:
            return MetricsServer(self._count(), host=host, port=port, rank=self._job.rank, size=self._job.size)
        except (OSError, OverflowError) as err:
            logger.warning(
                "this rank cannot serve metrics at %s:%d (SIRTAKI_METRICS_PORT); training continues without them: %s",
                host,
                port,
                err,
            )
            return None

    def _count(self) -> Totals:
        """Return totals of this rank's iterations since the first call of this method, such as bytes and seconds."""
        if self._totals is None:
            self._totals = Totals()
            watchers.add(self._totals)
        return self._totals

    def _describe(self) -> dict[str, Any]:
        """Return the values that `sirtaki top` shows. Totals are those since the first call of this method."""
        totals, job = self._count(), self._job
        gain = totals.gain
        return {
            "job": job.job,
            "pid": os.getpid(),
            "script": os.path.basename(sys.argv[0]) if sys.argv else "",
            "rank": job.rank,
            "ranks": job.size,
            "generation": self._generation,
            "began_s": self._began_s,
            "iteration": max((pipeline.iteration for pipeline in job.pipelines), default=0),
            "tuning": any(tuning.tuning for tuning in job.tunings),
            "setting": "; ".join(dict.fromkeys(tuning.knobs.describe() for tuning in job.tunings)),
            "trials": totals.trials,
            "gain": gain if gain == gain else None,
            **totals.recent_means(),
        }

    def close(self, *, for_good: bool) -> None:
        """End monitoring. `for_good` is True if the job ends, and False if it restarts with other ranks."""
        if self._presence is not None:
            self._presence.close()
        if self._server is not None:
            self._server.close()
        if self._totals is not None:
            watchers.remove(self._totals)
        watchers.end(for_good=for_good)


SHUTDOWN_S = 30.0
"""Seconds that `shutdown()` waits until all ranks have called it."""

LEAVE_S = 5.0
"""Maximum seconds that ranks wait for each other before an elastic restart on which all have agreed."""

DEVICE_S = 5.0
"""Seconds that a failed job waits for its GPU. If the GPU still waits for other ranks then, this process is ended."""


class Job:
    """Sirtaki's state in one process, from `init()` to `shutdown()`, or to the next restart of an elastic job.

    Attributes:
        elastic: object by which this process joins the ranks after an elastic restart. None if the job is not elastic,
            so that the loss of a rank ends it.
        settled: True if the script may communicate. False until new and old ranks have synchronised in `elastic.run`.
        training: True while the user's training function runs, which `elastic.run` calls again after each restart.
        observed: monitoring of the job, such as its metrics server. None before the job is open and after it is closed.
        part_bytes: bytes of gradients after which the user's plan cuts a compiled graph (`GivenPlan.part_bytes`). None
            without such a plan.
    """

    def __init__(self, settings: Settings, comm: Communicator, elastic: Generations | None = None) -> None:
        """Open the job over `comm`, and take ownership of `comm`. Collective.

        Args:
            settings: values of this process's environment variables.
            comm: communicator of all ranks of the job.
            elastic: object by which this process joins the ranks after an elastic restart. None if the job is not
                elastic.
        """
        self.settings, self._ranks, self.elastic = settings, comm, elastic
        self.settled, self.training = elastic is None or elastic.in_step, False
        self.observed: JobObservers | None = None
        # Run the collective steps first, because they fail if another rank fails. Steps before them would have to be
        # undone.
        self.control = ControlPlane(comm, local_size=settings.local_size, interface=settings.gloo_interface)
        asked = settings.profile and replace(settings.profile, folder=os.path.abspath(settings.profile.folder))
        part_bytes = part_bytes_of(settings.plan) if self.control.rank == 0 else None
        self.job: str
        self.part_bytes: int | None
        self.job, profile, self.part_bytes = self.control.broadcast(
            (f"{time.time_ns()}.{os.getpid()}", asked, part_bytes)
        )
        # All ranks use rank 0's profile options, because recording a profile needs collective operations.
        self.settings = settings = replace(settings, profile=profile)
        self.clock_offset_s = align_clocks(self.control) if settings.timeline is not None else None
        start_logging(settings, self.control.rank)
        self.courier = MessageBoard(self.control.duplicate())
        self.watchdog = Watchdog(
            self.courier,
            self.control.failures,
            warning_s=settings.stall_warning_s if settings.stall_check else NEVER_S,
            shutdown=lambda: settings.missing_ranks_limit_s,
        )
        self.rank_sets = RankSets(
            self.control,
            self.watchdog,
            partial(open_lanes, settings=settings, timeout_s=settings.transport_timeout_s),
        )
        # Number the optimizers of each process set (subset of ranks), so that an optimizer has the same number on all
        # ranks.
        self.serials: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self.disposal = Disposal()
        self.participants = ActiveReducers()
        self.joining = JoinProtocol(self.participants, self.rank_sets, self.courier, self.watchdog)
        self.blocked = BlockedRanks(self.participants, self.rank_sets, self.courier, self.joining)
        self.control.failures.listen(self._on_failure)
        self.control.failures.set_wait_callback(self._attend)

    @property
    def engine(self) -> EagerEngine:
        """The engine of eager operations (`hvd.allreduce` and similar) over all ranks."""
        engine = self.rank_sets[0].engine
        assert engine is not None
        return engine

    def _attend(self) -> None:
        """Announce this rank's iterations to ranks in `join()`, and report long waits to all ranks. Called repeatedly
        while this rank waits.
        """
        self.joining.poll()
        self.blocked.poll()

    def _on_failure(self) -> None:
        if any(pipeline.device.streams for pipeline in self.pipelines):
            threading.Thread(target=self._end_if_a_device_waits, name="sirtaki-end", daemon=True).start()

    @property
    def pipelines(self) -> list[GradientPipeline]:
        """The pipelines that all-reduce dense gradients, one per distributed optimizer or DDP model. Thread-safe."""
        found = (participant.pipeline for participant in self.participants)
        return [pipeline for pipeline in found if pipeline is not None]

    @property
    def tunings(self) -> list[Tuning]:
        """The tuning state of each distributed optimizer or DDP model whose gradients Sirtaki reduces. Thread-safe."""
        return [tuning for participant in self.participants if (tuning := participant.tuning) is not None]

    def _end_if_a_device_waits(self) -> None:
        """End the process if a GPU waits for other ranks of the failed job.

        A waiting GPU kernel, and the work queued after it, cannot be cancelled. The main thread may hang in CUDA
        forever. If it went on, it would update parameters with gradients that were never reduced. If no GPU waits, the
        main thread raises the error itself.
        """

        def ends() -> bool:
            return _job is not self or any(pipeline.in_flight.stalled() for pipeline in self.pipelines)

        wait_for(ends, Deadline.after(DEVICE_S), Poll.SLOW)
        if _job is self:
            end_now(f"the job has failed while its GPU waits for other ranks: {self.failure}")

    @property
    def rank(self) -> int:
        """The rank of this process in the job."""
        return self.control.rank

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return self.control.size

    @property
    def backend(self) -> Backend:
        """The backend (MPI or TCP) of the control plane, which carries all messages except gradients."""
        return self.control.backend

    @property
    def failure(self) -> CommError | None:
        """The cause of the job's failure. None while the job has not failed."""
        return self.control.failures.error

    def interrupt(self) -> list[str]:
        """Store the tuning results of an unfinished warm-up. Return texts that describe what this rank is doing."""
        where = self.watchdog.progress()
        timeline.stop()
        recorder.end()
        for tuning in self.tunings:
            tuning.remember()
        return where

    def close_participants(self, number: int) -> None:
        """Close the gradient reducers of process set `number` (a subset of ranks), which is being removed. Not
        collective.
        """
        for participant in reversed(list(self.participants)):
            if participant.key[0] == number:
                participant.close("when its process set was removed")

    def close(self, timeout_s: float) -> bool:
        """Wait until all ranks have called `close`. Then end all threads and free all communicators. Collective.

        Returns:
            True if the job is closed. False if a rank did not call `close` within `timeout_s`. In this case no
            communicator is freed, and `close` may be called again.
        """
        self._hide(for_good=True)
        self.control.failures.set_wait_callback(None)
        all_ranks = self.control.failures.error is None and self.watchdog.leave(timeout_s)
        for participant in reversed(list(self.participants)):
            participant.close("by shutdown()")
        self.disposal.stop()
        timeline.stop()
        recorder.end()
        if all_ranks:
            self.rank_sets.close()
            self.watchdog.close()
            self.control.close()
            self._ranks.free()
        return all_ranks

    def _hide(self, *, for_good: bool) -> None:
        observed, self.observed = self.observed, None
        if observed is not None:
            observed.close(for_good=for_good)

    # ── leaving a generation of an elastic job ───────────────────────────────────────────────────────────────────

    def give_up(self, reason: str) -> None:
        """Tell all ranks that, and why, this rank leaves them for an elastic restart. Not collective, non-blocking."""
        self.control.failures.report(PeerLostError(reason))
        self._ranks.abort(reason)

    def wait_for_leave(self) -> None:
        """Wait until all ranks know that every rank has stopped for an elastic restart. Collective.

        Call after all ranks have agreed to restart.
        """
        together = False
        with contextlib.suppress(CommError):
            together = leave_together(self.control.comm, LEAVE_S)
        if not together:
            self.give_up(f"rank {self.rank} leaves, but other ranks do not")
        self.control.failures.report(PeerLostError("this rank has left the generation"))

    def abandon(self) -> None:
        """Close this rank's part of the job, after `give_up` or `wait_for_leave`, before an elastic restart. Not
        collective.
        """
        self._hide(for_good=self.elastic is None)
        self.control.failures.set_wait_callback(None)
        if self.elastic is not None:
            self.elastic.tuning.going_on = True
        when = "when the job was left" if self.elastic is None else f"at the end of generation {self.elastic.number}"
        for participant in reversed(list(self.participants)):
            participant.close(when)
        if self.elastic is not None:
            self.elastic.tuning.going_on = False
        self.disposal.stop()
        timeline.stop()
        recorder.end()
        self.rank_sets.close()
        self.watchdog.close()
        self.control.abandon()
        self._ranks.free()


_job: Job | None = None
_ending: Job | None = None
"""Job that must be closed when this process exits. None if there is no job, or if it is closed or being closed."""


def current() -> Job:
    """Return the job of this process.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    if _job is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _job


def is_initialized() -> bool:
    """Return whether `init()` has been called, and `shutdown()` has not been called since."""
    return _job is not None


@outside_modes  # leaves inference mode, because memory allocated in it cannot be written outside of it
def init(comm: Sequence[int] | MPI.Comm | None = None, *, beside: ProcessGroup | None = None) -> None:
    """Start Sirtaki on all ranks. Collective. Idempotent.

    Args:
        comm: ranks of the job. None for all ranks that the launcher started. Otherwise an mpi4py communicator, or a
            list of ranks. Only the listed ranks may call `init`.
        beside: PyTorch process group whose ranks become the ranks of the job. `comm` must be None.

    Raises:
        ConfigError: an environment variable is invalid or needs a missing package, this rank is not in `comm`, or the
            launcher started more ranks than MPI has.
        LaunchError: the job is elastic, and this rank cannot become a member of it.
        CommError: there is no usable MPI library, or a rank cannot be reached.
    """
    global _job, _ending, _has_hooks
    if _job is not None:
        return
    if _is_child:
        raise ConfigError(FORKED)
    settings = Settings.from_environ() if beside is None else settings_beside(beside)
    if settings.metrics is not None and importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "SIRTAKI_METRICS_PORT is set, but the package prometheus_client is missing: "
            "pip install 'sirtaki[prometheus]'"
        )
    raise_descriptor_limit()
    elastic = of_this_process(settings)
    if elastic is None:
        _job = Job(settings, open_ranks(settings, comm) if beside is None else open_beside(settings, beside))
    else:
        if comm is not None or beside is not None:
            raise ConfigError(
                "init() must be called without comm in an elastic job, because the launcher chooses the ranks"
            )
        _job = _next_generation(settings, elastic)
    control = _job.control
    if control.rank == 0 and control.size > 1 and settings.tunes and settings.registry != REGISTRY_OFF:
        # Import the registry's modules now, because all ranks would wait for a later import.
        load_ahead(settings.registry)
    # Set these environment variables, because scripts written for horovodrun read them.
    for name, value in (
        ("RANK", control.rank),
        ("SIZE", control.size),
        ("LOCAL_RANK", control.local_rank),
        ("LOCAL_SIZE", control.local_size),
        ("CROSS_RANK", control.cross_rank),
        ("CROSS_SIZE", control.cross_size),
        *([("ELASTIC", 1)] if elastic is not None else []),
    ):
        os.environ[f"HOROVOD_{name}"] = str(value)
    # Keep an existing value, because the launcher of an elastic job sets its own host names.
    os.environ.setdefault("HOROVOD_HOSTNAME", control.host_names[control.rank])
    _ending = _job
    if not _has_hooks:
        _has_hooks = True
        _install_hooks()
    exclude_from_compilation()
    _job.observed = JobObservers(
        _job, local_rank=control.local_rank, generation=0 if elastic is None else elastic.number
    )


def _next_generation(settings: Settings, elastic: Generations) -> Job:
    """Join an elastic job, and open it on this rank. Join again whenever a rank is lost before all have opened it.

    Collective over the ranks that join together (a generation).

    Raises:
        SystemExit: the job does not need this rank any more. The exit code is 0.
        LaunchError: there is no next generation.
    """
    while True:
        try:
            ranks = elastic.join_next(settings)
        except Dismissed as err:
            logger.warning("this rank leaves the elastic job and exits with code 0: %s", err)
            raise SystemExit(0) from None
        try:
            return Job(settings, ranks, elastic)
        except BaseException as err:
            ranks.abort(f"rank {ranks.rank} could not open generation {elastic.number}: {err}")
            ranks.free()
            if not isinstance(err, CommError):
                raise
            logger.info(
                "elastic job: generation (set of ranks) %d lost a rank during init(): %s; this rank waits for the next "
                "generation",
                elastic.number,
                err,
            )


def leave(*, together: bool, reason: str = "") -> None:
    """End this rank's part in the current job. Idempotent.

    In an elastic job, a later `init()` joins the ranks after the next restart.

    Args:
        together: all ranks have agreed to leave. In this case the function is collective.
        reason: why this rank leaves. Sent to all ranks if `together` is False.
    """
    global _job, _ending
    if _job is None:
        return
    job, _job, _ending = _job, None, None
    if _is_child:
        return
    if together:
        job.wait_for_leave()
    else:
        job.give_up(reason)
    job.abandon()


def shutdown() -> None:
    """End Sirtaki on all ranks. Collective. `init()` may be called again. Does nothing without a job."""
    global _job, _ending
    if _job is None:
        return
    if _is_child:
        _job = None
        return
    # Ignore the error, because the script gets it where it uses the missing gradients.
    with contextlib.suppress(SirtakiError):
        _job.participants.drain()
    job, _job = _job, None
    if job.close(SHUTDOWN_S):
        _ending = None
    elif job.elastic is not None:
        _ending = None
        job.give_up(f"rank {job.rank} has shut down")
        job.abandon()
    else:
        logger.warning(
            "not all ranks called shutdown() within %.0f s; this rank's connections stay open until it exits",
            SHUTDOWN_S,
        )


# ── end of the process: a failed rank ends the job, a rank that has completed its work waits for the others ───────────

VICTIM_S = 2.0
"""Seconds that a rank whose communication failed waits before it ends the job, so that the cause is printed first."""

LOST_S = 15.0
"""Seconds that a rank whose communication failed waits in an MPI job if another rank has exited or is exiting.

That other rank ends the job, and its exit code must become the job's.
"""

EXIT_S = 5.0
"""Seconds that a rank with a nonzero exit code waits in `Job.close`, before it reports the failure to all ranks."""

_AGAIN_S = 60.0  # maximum seconds of one attempt to close the job; failed attempts are repeated

_exit_code: int | None = None
_raised = False
_has_hooks = False
_is_child = False
"""True in a process that was forked from a rank. It may only query properties such as the rank."""


def describe() -> str:
    """Return a description of what this rank is doing, such as the operation for which it waits. "" without a job."""
    return "" if _ending is None else _ending.watchdog.describe()


def end_now(reason: str) -> NoReturn:
    """Print why this rank ends the job, and end the process without waiting. `reason` is a full clause."""
    if _ending is not None:
        _report(_ending, reason, _interrupted(_ending))
    _leave(1)


def finish() -> None:
    """Report that the script has completed without an error, although the process goes on (as a Ray actor does)."""
    global _ending
    job, _ending = _ending, None
    if (elastic := generations.of_process) is not None:
        elastic.finished()
    if job is not None and not job.close(EXIT_S):
        job.give_up(f"rank {job.rank} has ended its script")


def _install_hooks() -> None:
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _ending, _raised
        job, _raised = _ending, True
        where = _interrupted(job) if job is not None and job.size > 1 else []
        # Add what this rank was doing to the error, because sirtakirun's wrapper prints the error.
        if where and _started_by_sirtakirun():
            error.add_note(f"This rank {'; '.join(where)}.")
        over_mesh = job is not None and job.backend is Backend.MESH
        printed_elsewhere = job is not None and (
            (job.rank > 0 and isinstance(error, MismatchError))
            or (over_mesh and job.size > 1 and isinstance(error, PeerLostError))
        )
        if not printed_elsewhere or _started_by_sirtakirun():
            # Print to the original stderr, because torch.distributed captures stderr and prints it only after the
            # job's end.
            with contextlib.redirect_stderr(sys.__stderr__):
                previous_hook(kind, error, trace)
        if job is None or job.size == 1:
            if _outlives_others():
                _leave(1)
            return
        _ending = None  # unset, because the exit of this failed rank must not wait for other ranks
        # Omit the error's text if the hook that was `sys.excepthook` before has printed it already.
        what = f"it raised {kind.__name__}" + (f": {error}" if printed_elsewhere else "")
        if over_mesh and isinstance(error, PeerLostError):
            what = str(error)
        # Report before waiting if the launcher, or another rank with the same error, may end this process while it
        # waits.
        at_once = over_mesh or (printed_elsewhere and not _started_by_sirtakirun())
        if at_once:
            _report(job, what, where)
        if isinstance(error, CommError) and job.elastic is None:
            time.sleep(LOST_S if isinstance(error, PeerLostError) and not over_mesh else VICTIM_S)
        if not _started_by_sirtakirun():
            if not at_once:
                _report(job, what, where)
            _flush()
            job._ranks.abort(f"rank {job.rank} raised {kind.__name__}: {error}")
            _leave(1)

    def on_exit(status: Any = None) -> NoReturn:  # `status` is Any, because sys.exit accepts any object
        global _exit_code
        _exit_code = status if isinstance(status, int) else int(status is not None)
        previous_exit(status)

    sys.excepthook, sys.exit = on_exception, on_exit
    at_exit(_at_exit)
    in_forked_children(on_exit, _become_child)
    os.register_at_fork(before=_finish_updates)


def _become_child(_: object) -> None:
    """Detach a forked child from the job, so that it exits without notifying any rank."""
    global _ending, _is_child
    _is_child = _is_child or _job is not None or generations.of_process is not None
    _ending = None
    # Keep the exit handler if the process was forked before `init()`, because it may still become a rank.
    if not _is_child:
        at_exit(_at_exit)
    if not skip_finalize():
        atexit.register(_leave_before_mpi)


def _finish_updates() -> None:
    """Complete deferred parameter updates before a fork, because the child has no threads that could complete them."""
    if _job is not None and not _is_child and threading.current_thread() is threading.main_thread():
        with contextlib.suppress(SirtakiError):  # ignored, because the optimizer's next step raises the same error
            _job.participants.drain()


def _leave_before_mpi() -> None:
    """End a forked child before MPI_Finalize runs in it, if the script has loaded MPI."""
    atexit.unregister(_leave_before_mpi)
    atexit._run_exitfuncs()
    _flush()
    os._exit(int(_raised) if _exit_code is None else _exit_code)


def _at_exit() -> None:
    """Close the job when the script has ended: wait for all ranks, and keep the exit code of a failure for mpiexec."""
    global _ending
    job, _ending = _ending, None
    code = _exit_code or 0
    if code == 0 and not _raised and (elastic := generations.of_process) is not None:
        elastic.finished()
    if job is None or job.size == 1 or job.close(EXIT_S):
        if code != 0 and _outlives_others():
            _leave(code)
        return
    if code == 0 and job.elastic is not None:
        job.give_up(f"rank {job.rank} has ended its script")
        # Leave also with exit code 0, because `raise SystemExit(9)` bypasses `sys.exit`, so that `code` may be wrong.
        if _outlives_others():
            _leave(0)
        return
    while job.failure is None and code == 0:
        if job.close(_AGAIN_S):
            return
    where = _interrupted(job)
    if code != 0:
        reason = f"has ended with exit code {code} while other ranks are running"
        _report(job, f"its script {reason}", where)
        if job.backend is Backend.MESH:  # not over MPI, whose abort would replace the exit code
            job._ranks.abort(f"rank {job.rank} {reason}")
        _leave(code)
    _report(job, f"the job has failed: {job.failure}", where)
    # `raise SystemExit(9)` bypasses `sys.exit`, so only the interpreter knows the exit code. If it is not 0, mpiexec
    # uses it for the job. MPI_Finalize is skipped, because it would wait for all ranks.
    if not skip_finalize():
        _leave(1)


def _interrupted(job: Job) -> list[str]:
    try:
        return job.interrupt()
    except Exception as err:  # any error, because it must not prevent the end of the job
        return [f"could not save its training state: {err}"]


def _report(job: Job, reason: str, where: list[str]) -> None:
    """Print which rank ends the job, why (`reason`, a clause), and what it was doing.

    Under sirtakirun, print nothing if `where`, which describes what it was doing, is empty.
    """
    if where or not _started_by_sirtakirun():
        place = "".join(f"; it {text}" for text in where)
        # Ignored, because stderr may be closed, full or None.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if job.elastic is None:
                print(
                    f"sirtaki: rank {job.rank} ends the job, because {reason}{place}", file=sys.__stderr__, flush=True
                )
            else:
                print(
                    f"sirtaki: rank {job.rank} leaves the elastic job, because {reason}{place}",
                    file=sys.__stderr__,
                    flush=True,
                )


def _started_by_sirtakirun() -> bool:
    """Return whether the wrapper of sirtakirun runs the script. It ends all ranks when this one fails."""
    return "sirtaki.run.rank_channel" in sys.modules


def _outlives_others() -> bool:
    """Return whether other ranks may outlive this process, so that they must be able to detect its exit."""
    elastic = generations.of_process
    return not _is_child and elastic is not None and elastic.leave is not os._exit


def _leave(exit_code: int) -> NoReturn:
    """Exit without MPI_Finalize, so that mpiexec detects the failure and ends the job."""
    _flush()
    (os._exit if generations.of_process is None else generations.of_process.leave)(exit_code)
    raise AssertionError(
        "os._exit returned instead of ending this process; remove code that replaces os._exit, such as a mock"
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
