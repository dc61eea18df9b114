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
from concurrent.futures import ThreadPoolExecutor
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
from sirtaki.comm.control.stragglers import StragglerWatch
from sirtaki.comm.control.waiting import WAIT_SLICE_S, Deadline, Poll, leave_together, start_thread, wait_for
from sirtaki.comm.control.watchdog import MessageBoard, Watchdog
from sirtaki.comm.device import nccl_owners
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.modes import outside_modes
from sirtaki.comm.sparse.on_gpu import GpuRows
from sirtaki.comm.transports.contract import raise_descriptor_limit
from sirtaki.engine.autograd import in_backward
from sirtaki.engine.console import start_logging
from sirtaki.engine.settings import NEVER_S, Settings
from sirtaki.errors import (
    CommError,
    ConfigError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ResourceLimitError,
    SirtakiError,
)
from sirtaki.machine import at_exit, forget_at_exit, in_forked_children
from sirtaki.measures import counted
from sirtaki.uncompiled import exclude_from_compilation
from sirtaki.watch import watchers
from sirtaki.watch.watchers import JobBeacon, Totals

from . import generations
from .generations import Generations, of_this_process
from .lanes import open_lanes, open_nccl
from .membership import Dismissed
from .participants import ActiveReducers, BlockedRanks, JoinProtocol, Tuning
from .ranks import open_beside, open_ranks, settings_beside
from .tuning.plans import part_bytes_of

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from sirtaki.comm.collectives.on_gpu import NcclRanks
    from sirtaki.watch.prometheus import MetricsServer


logger = logging.getLogger(__name__)

CLOSING_S = 10.0
"""Maximum seconds to wait for the end of a thread or a queue that is being closed."""


class Disposal:
    """Queue of functions that close resources. A background thread calls them in order."""

    def __init__(self) -> None:
        """Create the queue. `start` starts the thread that calls the functions."""
        # Use a SimpleQueue, because a destructor may call `put` while `put` is running in the same thread.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the background thread if it is not running. Call before the first `put`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sirtaki-disposal", daemon=True)
            start_thread(self._thread)

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
            except Exception:
                # Only log an error of a queued function, because the remaining functions must still be called.
                logger.warning(
                    "the script has deleted a DistributedOptimizer, and an error stopped Sirtaki from removing all its "
                    "hooks and buffers; training continues",
                    exc_info=True,
                )
            # Delete this reference to the function. Otherwise it would keep the closed object alive until the next
            # function is queued.
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
        from sirtaki.watch.prometheus import MetricsServer  # Import late, because the module needs prometheus_client.

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
            "setting": "; ".join(
                filter(None, [*dict.fromkeys(each.knobs.describe() for each in job.tunings), job.stragglers.describe()])
            ),
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

LEAVE_DEVICE_S = 60.0
"""Maximum seconds from the failure of an elastic job until the training thread calls Sirtaki. After this time, the
process is ended, even if its GPU does not wait for other ranks."""

DEVICE_S = 5.0
"""Seconds after the job's failure in which the GPU may wait for other ranks. After this time, the process is ended.

In an elastic job, the NCCL communicators are aborted, and the same time is allowed once more, from the abort on."""


class Job:
    """Sirtaki's state in one process, from `init()` to `shutdown()`, or to the next restart of an elastic job.

    Attributes:
        elastic: object by which this process joins the ranks after an elastic restart. None if the job is not elastic,
            so that the loss of a rank ends it.
        settled: True if the script may communicate. False after an elastic restart with new ranks, until new and old
            ranks have synchronised the training state in `elastic.run`.
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
        self._gpus_stopped = False  # True once `stop_gpus` has ended this rank's work on GPUs.
        self.settled, self.training = elastic is None or elastic.in_step, False
        self.observed: JobObservers | None = None
        # Run the collective steps before the local ones. A collective step fails if another rank fails, and earlier
        # local steps would then have to be undone.
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
        self.stragglers = StragglerWatch(self.courier, self.control.host_names)
        self.watchdog = Watchdog(
            self.courier,
            self.control.failures,
            also=self.stragglers.check,
            warning_s=settings.stall_warning_s if settings.stall_check else NEVER_S,
            shutdown=lambda: settings.missing_ranks_limit_s,
        )
        make_engine = partial(
            EagerEngine,
            open_lanes=partial(open_lanes, settings=settings, timeout_s=settings.transport_timeout_s),
            open_nccl=partial(open_nccl, settings=settings),
            in_backward=in_backward,
        )
        self.rank_sets = RankSets(self.control, self.watchdog, make_engine)
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
        if nccl_owners() or self._on_gpus:
            threading.Thread(target=self._end_gpu_waits, name="sirtaki-end", daemon=True).start()

    @property
    def _on_gpus(self) -> list[NcclRanks | GradientPipeline | GpuRows]:
        eager = [engine.rounds.nccl for _, engine in self.rank_sets.engines()]
        dense = [pipeline for pipeline in self.pipelines if pipeline.device.streams]
        rows = [participant.gpu_rows for participant in self.participants]
        return [*filter(None, eager), *dense, *filter(None, rows)]

    @property
    def pipelines(self) -> list[GradientPipeline]:
        """The pipelines that all-reduce dense gradients, one per distributed optimizer or DDP model. Thread-safe."""
        found = (participant.pipeline for participant in self.participants)
        return [pipeline for pipeline in found if pipeline is not None]

    @property
    def tunings(self) -> list[Tuning]:
        """The tuning state of each distributed optimizer or DDP model whose gradients Sirtaki reduces. Thread-safe."""
        return [tuning for participant in self.participants if (tuning := participant.tuning) is not None]

    def _end_gpu_waits(self) -> None:
        """End the waits of this rank's GPU for other ranks, once the job has failed. Runs in a thread of its own.

        Do nothing while no GPU waits, because the training thread then raises the failure itself. In an elastic job,
        abort the NCCL communicators once the training thread waits for the GPU in a function of Sirtaki. This function
        raises the failure after the wait, so that the script restores the last commit. In all other cases, end the
        process after a time limit: the training thread may hang in CUDA forever, and after an abort it would use
        gradients that were never reduced.
        """

        def over() -> bool:
            return _job is not self or self._gpus_stopped

        def waits() -> bool:
            return any(each.stalled() for each in self._on_gpus)

        if self.elastic is None:
            wait_for(lambda: over() or waits(), Deadline.after(DEVICE_S), Poll.SLOW)
        else:
            aborts, waiting, ends = False, Deadline.after(DEVICE_S), Deadline.after(LEAVE_DEVICE_S)
            while not (over() or waiting.passed or ends.passed):
                if not aborts and self.control.failures.raises_next:
                    # Abort in another thread, because an abort itself may hang.
                    threading.Thread(target=self._abort, name="sirtaki-abort", daemon=True).start()
                    aborts, waiting = True, Deadline.after(DEVICE_S)
                elif not aborts and not waits():
                    waiting = Deadline.after(DEVICE_S)
                time.sleep(WAIT_SLICE_S)
        if not over():
            end_now(f"the job has failed while its GPU waits for other ranks: {self.failure}")

    def _abort(self) -> None:
        owners = nccl_owners()
        # Abort all communicators at the same time, because aborting one may wait until an operation of another one has
        # ended.
        with ThreadPoolExecutor(max(1, len(owners)), thread_name_prefix="sirtaki-abort") as threads:
            count = sum(threads.map(lambda owner: owner.abort(), owners))
        if count and self.failure is not None:
            logger.info(
                "elastic restart: rank %d has aborted %s, so that its GPU does not wait for lost ranks",
                self.rank,
                counted(count, "NCCL communicator"),
            )

    def wait_for_gpus(self) -> None:
        """Block until this rank's GPUs have done all queued work. Not collective.

        Raises:
            CommError: the job has failed. All CUDA tensors that were computed since the last commit are undefined.
        """
        for each in self._on_gpus:
            each.wait_for_device()

    def stop_gpus(self) -> None:
        """End this rank's GPU work and NCCL communicators before an elastic restart. Not collective. Idempotent."""
        for each in self._on_gpus:
            with contextlib.suppress(CommError, RuntimeError):
                # Ignore the error: the caller already knows of the job's failure, or of the CUDA error.
                each.wait_for_device()
        self._abort()
        self._gpus_stopped = True

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
        """Store the tuning results of an unfinished warm-up, and end profiles. Call before the process is ended.

        Returns:
            Texts that describe what this rank is doing.
        """
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
        """Report to all ranks that this rank leaves the job for an elastic restart, because of `reason`.

        Not collective, non-blocking.
        """
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


@outside_modes  # Leave inference mode, because tensors allocated in this mode cannot be written in other modes.
def init(
    comm: Sequence[int] | MPI.Comm | None = None, *, beside: ProcessGroup | None = None, store: Store | None = None
) -> None:
    """Start Sirtaki on all ranks. Collective. Idempotent.

    Args:
        comm: ranks of the job. None for all ranks that the launcher started. Otherwise an mpi4py communicator, or a
            list of ranks. Only the listed ranks may call `init`.
        beside: PyTorch process group whose ranks become the ranks of the job. `comm` must be None.
        store: key-value store by which the ranks of `beside` exchange addresses. See `open_beside`.

    Raises:
        ConfigError: an environment variable is invalid or needs a missing package, this rank is not in `comm`, or the
            launcher started more ranks than MPI has.
        LaunchError: the job is elastic, and this rank cannot become a member of it.
        CommError: there is no usable MPI library, or a rank cannot be reached.
    """
    global _job, _ending, _remove_hooks
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
        _job = Job(settings, open_ranks(settings, comm)) if beside is None else _open_beside(settings, beside, store)
    else:
        if comm is not None or beside is not None:
            raise ConfigError(
                "init() must be called without comm in an elastic job, because the launcher chooses the ranks"
            )
        _job = _next_generation(settings, elastic)
    control = _job.control
    # Set these environment variables, because scripts written for horovodrun read them.
    given = set(os.environ)
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
    _added_variables.update(set(os.environ) - given)
    _ending = _job
    if _remove_hooks is None:
        _remove_hooks = _install_hooks()
    exclude_from_compilation()
    _job.observed = JobObservers(
        _job, local_rank=control.local_rank, generation=0 if elastic is None else elastic.number
    )


def _open_beside(settings: Settings, group: ProcessGroup, store: Store | None) -> Job:
    """Open a job over the ranks of a PyTorch process group. Collective. If an error occurs, report it to all ranks."""
    ranks = open_beside(settings, group, store)
    try:
        return Job(settings, ranks)
    except BaseException as err:
        if not isinstance(err, MismatchError):  # A MismatchError is raised on all ranks, so it need not be reported.
            ranks.abort(f"rank {ranks.rank} could not open the job: {err}")
        ranks.free()
        raise


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
            if isinstance(err, ResourceLimitError) or not isinstance(err, CommError):
                raise
            logger.info(
                "elastic job: a rank was lost while generation %d (set of ranks) ran init() (%s); this rank waits "
                "for the next generation",
                elastic.number,
                err,
            )


def leave(*, together: bool, reason: str = "") -> None:
    """End this rank's part in the current job. Idempotent.

    In an elastic job, a later `init()` joins the ranks after the next restart.

    Args:
        together: True if all ranks have agreed to leave. In this case the function is collective.
        reason: why this rank leaves. Sent to all ranks if `together` is False.
    """
    global _job, _ending
    if _job is None:
        return
    job = _job
    if not _is_child and job.elastic is not None:
        if not together:
            job.give_up(reason)
        job.stop_gpus()
    _job = _ending = None
    if _is_child:
        return
    if together:
        job.wait_for_leave()
    elif job.elastic is None:
        job.give_up(reason)
    job.abandon()


def undo_init(reason: str) -> None:
    """Undo `init()`: leave the job, and remove its exit handler, exception handler and environment variables.

    Not collective. For a job in which another rank could not connect.

    Args:
        reason: why this rank leaves. Sent to all ranks.
    """
    global _remove_hooks
    leave(together=False, reason=reason)
    if _remove_hooks is not None:
        _remove_hooks()
        _remove_hooks = None
    while _added_variables:
        os.environ.pop(_added_variables.pop(), None)


def shutdown() -> None:
    """End Sirtaki on all ranks. Collective. `init()` may be called again. Does nothing without a job."""
    global _job, _ending
    if _job is None:
        return
    if _is_child:
        _job = None
        return
    # Ignore an error of the deferred updates. Sirtaki raises it again where the script uses the gradients.
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
"""Seconds that a rank whose communication failed waits before it ends the job.

In this time, the rank that caused the failure prints its error."""

LOST_S = 15.0
"""Seconds that a rank whose communication failed waits in an MPI job if another rank has exited or is exiting.

The other rank ends the job within this time. So mpiexec returns the exit code of that rank, which has the cause.
"""

EXIT_S = 5.0
"""Seconds that a rank with a nonzero exit code waits in `Job.close`, before it reports the failure to all ranks."""

_AGAIN_S = 60.0  # Maximum seconds of one attempt to close the job. A failed attempt is repeated.

_exit_code: int | None = None
_raised = False
_remove_hooks: Callable[[], None] | None = None
"""Function that removes the exit handler and the exception handler of `init()`. None if they are not installed."""

_added_variables = set[str]()
"""Names of the environment variables that `init()` has added."""

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


def _install_hooks() -> Callable[[], None]:
    """Install the exit handler and the exception handler of the job. Return a function that removes them."""
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _ending, _raised
        job, _raised = _ending, True
        where = _interrupted(job) if job is not None and job.size > 1 else []
        # Add what this rank was doing to the error. The wrapper of sirtakirun prints it.
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
        # Remove the exit handler, because the exit of this failed rank must not wait for other ranks.
        _ending = None

        # Omit the error's text if the hook that was `sys.excepthook` before has printed it already.
        what = f"it raised {kind.__name__}" + (f": {error}" if printed_elsewhere else "")
        if over_mesh and isinstance(error, PeerLostError):
            what = str(error)
        # Print the report before this rank waits if the launcher, or another rank with the same error, may end this
        # process during the wait.
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

    def on_exit(status: Any = None) -> NoReturn:  # `status` is Any, because `sys.exit` accepts any object.
        global _exit_code
        _exit_code = status if isinstance(status, int) else int(status is not None)
        previous_exit(status)

    sys.excepthook, sys.exit = on_exception, on_exit
    at_exit(_at_exit)
    in_forked_children(on_exit, _become_child)
    os.register_at_fork(before=_finish_updates)

    def remove() -> None:
        # Remove a handler only if the script has not replaced it since, because the script's handler may call it.
        if sys.excepthook is on_exception:
            sys.excepthook = previous_hook
        if sys.exit is on_exit:
            sys.exit = previous_exit
        forget_at_exit(_at_exit)

    return remove


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
    """Complete deferred parameter updates before a fork, because the child lacks the threads that complete them."""
    if _job is not None and not _is_child and threading.current_thread() is threading.main_thread():
        with contextlib.suppress(SirtakiError):  # Ignore the error, because the optimizer's next step raises it again.
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
        # `code` is 0 here, but the real exit code may differ: `raise SystemExit(9)` bypasses `sys.exit`, from which
        # `code` is known. So end this process in any case.
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
        if job.backend is Backend.MESH:  # Do not abort over MPI, because MPI_Abort would replace this rank's exit code.
            job._ranks.abort(f"rank {job.rank} {reason}")
        _leave(code)
    _report(job, f"the job has failed: {job.failure}", where)
    # Skip MPI_Finalize, because it would wait for all ranks. Do not choose an exit code: only the interpreter knows it,
    # because `raise SystemExit(9)` bypasses `sys.exit`. If the exit code is not 0, mpiexec uses it for the job.
    if not skip_finalize():
        _leave(1)


def _interrupted(job: Job) -> list[str]:
    try:
        return job.interrupt()
    except Exception as err:  # Log every error instead of raising it, because no error may prevent the end of the job.
        return [f"could not save its training state: {err}"]


def _report(job: Job, reason: str, where: list[str]) -> None:
    """Print that this rank ends the job, or leaves an elastic job, and the reason.

    Args:
        job: the job.
        reason: why this rank ends the job, as a clause.
        where: descriptions of what this rank was doing. If empty, nothing is printed under sirtakirun.
    """
    if where or not _started_by_sirtakirun():
        place = "".join(f"; it {text}" for text in where)
        # Ignore these errors, because stderr may be closed, full or None.
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
    """Return whether sirtakirun's wrapper runs the script. The wrapper ends all ranks when this one fails."""
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
