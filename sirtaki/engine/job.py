"""A job on one rank: its control plane, its reducers, its watchers, and how all of it ends."""

from __future__ import annotations

import atexit
import contextlib
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
from sirtaki.comm.control.watchdog import Courier, Watchdog
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.modes import outside_modes
from sirtaki.comm.transports.contract import raise_descriptor_limit
from sirtaki.engine.console import start_logging
from sirtaki.engine.settings import NEVER_S, REGISTRY_OFF, Settings
from sirtaki.errors import CommError, ConfigError, MismatchError, NotInitializedError, PeerLostError, SirtakiError
from sirtaki.machine import at_exit, in_forked_children
from sirtaki.registry.safe_store import load_ahead
from sirtaki.uncompiled import exclude_from_compilation
from sirtaki.watch import watchers
from sirtaki.watch.watchers import Presence, Totals

from . import generations
from .generations import Generations, of_this_process
from .lanes import open_lanes
from .membership import Dismissed
from .participants import BlockedRanks, Joining, Participants, Tuning
from .ranks import open_beside, open_ranks, settings_beside
from .tuning.plans import part_bytes_of

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    from sirtaki.watch.prometheus import MetricsServer


logger = logging.getLogger(__name__)

CLOSING_S = 10.0
"""How long others wait for what is being closed; threads that do not end in that time never will."""


class Disposal:
    """Closes things one after the other."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # `put` may interrupt itself
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, if it does not run yet; before anything is left here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sirtaki-disposal", daemon=True)
            self._thread.start()

    def put(self, close: Callable[[], None]) -> None:
        """Has `close` called soon. For destructors: never waits."""
        self._queue.put(close)

    def drain(self) -> None:
        """Waits until all that was left here before is closed."""
        if self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._queue.put(done.set)
            done.wait(CLOSING_S)

    def _run(self) -> None:
        while (close := self._queue.get()) is not None:
            try:
                close()
            except Exception:  # whatever it is, the rest is closed
                logger.warning("an optimizer that was dropped could not be closed", exc_info=True)
            del close  # it holds what it closes

    def stop(self) -> None:
        """Closes what is left, and ends the thread."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSING_S)


class Observed:
    """Begins to be seen when it is made. Nothing that goes wrong here reaches training."""

    def __init__(self, job: Job, *, local_rank: int, generation: int) -> None:
        self._job, self._generation, self._began_s = job, generation, time.time()
        self._totals: Totals | None = None
        self._server: MetricsServer | None = None
        self._presence: Presence | None = None
        settings = job.settings
        watchers.begin(watch.GenerationBegun(number=generation, rank=job.rank, size=job.size))
        if settings.metrics is not None:
            host, port = settings.metrics
            self._server = self._serve(host, port + local_rank)
        if local_rank == 0:
            try:
                self._presence = Presence(self._describe)
            except OSError as err:
                logger.debug("`sirtaki top` will not see this job: %s", err)

    def _serve(self, host: str, port: int) -> MetricsServer | None:
        from sirtaki.watch.prometheus import MetricsServer  # an HTTP server, which few jobs want

        try:
            return MetricsServer(self._count(), host=host, port=port, rank=self._job.rank, size=self._job.size)
        except (OSError, OverflowError) as err:
            words = "metrics cannot be had at %s:%d, and training goes on without (SIRTAKI_METRICS_PORT): %s"
            logger.warning(words, host, port, err)
            return None

    def _count(self) -> Totals:
        """From now on iterations are added up."""
        if self._totals is None:
            self._totals = Totals()
            watchers.add(self._totals)
        return self._totals

    def _describe(self) -> dict[str, Any]:
        """What `sirtaki top` shows. Who asks for the first time has iterations added up from then on."""
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
            **totals.now(),
        }

    def close(self, *, for_good: bool) -> None:
        """Nobody sees it any more; `for_good`: the job has ended, and not only a generation of it."""
        if self._presence is not None:
            self._presence.close()
        if self._server is not None:
            self._server.close()
        if self._totals is not None:
            watchers.remove(self._totals)
        watchers.end(for_good=for_good)


SHUTDOWN_S = 30.0
"""How long `shutdown()` waits for the other ranks to call it, too."""

LEAVE_S = 5.0
"""How long ranks that agree to leave a generation wait for each other."""

DEVICE_S = 5.0
"""How long a job that has failed may go on before a device that waits ends it."""


class Job:
    """The state of one initialised process; where ranks come and go, of one generation.

    Attributes:
        elastic: see above; None where ranks stay, and the loss of one is the end.
        settled: scripts may communicate; else some ranks are new and some are not, and they have not met in
            `elastic.run`.
        training: the function that `elastic.run` repeats is running.
        observed: what others see of it; None before and after.
        part_bytes: of compiled graphs, by the user's plan (`GivenPlan.part_bytes`); None where it says nothing of them.
    """

    def __init__(self, settings: Settings, comm: Communicator, elastic: Generations | None = None) -> None:
        """Collective over `comm`, which ends with the job.

        Args:
            settings: of this process.
            comm: all ranks of the job.
            elastic: where ranks come and go: a job is one generation of it.
        """
        self.settings, self._ranks, self.elastic = settings, comm, elastic
        self.settled, self.training = elastic is None or elastic.in_step, False
        self.observed: Observed | None = None
        # What other ranks may fail comes before what would have to be ended then.
        self.control = ControlPlane(comm, local_size=settings.local_size, interface=settings.gloo_interface)
        asked = settings.profile and replace(settings.profile, folder=os.path.abspath(settings.profile.folder))
        part_bytes = part_bytes_of(settings.plan) if self.control.rank == 0 else None
        self.job: str
        self.part_bytes: int | None
        self.job, profile, self.part_bytes = self.control.broadcast(
            (f"{time.time_ns()}.{os.getpid()}", asked, part_bytes)
        )
        # A rank that does not record while others do would not come to where they meet for it.
        self.settings = settings = replace(settings, profile=profile)
        self.clock_offset_s = align_clocks(self.control) if settings.timeline is not None else None
        start_logging(settings, self.control.rank)
        self.courier = Courier(self.control.duplicate())
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
        # Numbers for optimizers, by process set: the same on all ranks of the set.
        self.serials: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self.disposal = Disposal()
        self.participants = Participants()
        self.joining = Joining(self.participants, self.rank_sets, self.courier, self.watchdog)
        self.blocked = BlockedRanks(self.participants, self.rank_sets, self.courier, self.joining)
        self.control.failures.listen(self._on_failure)
        self.control.failures.while_waiting(self._attend)

    @property
    def engine(self) -> EagerEngine:
        """Performs eager operations over all ranks."""
        engine = self.rank_sets[0].engine
        assert engine is not None
        return engine

    def _attend(self) -> None:
        """What this rank does for others while it waits."""
        self.joining.attend()
        self.blocked.attend()

    def _on_failure(self) -> None:
        if any(pipeline.device.streams for pipeline in self.pipelines):
            threading.Thread(target=self._end_if_a_device_waits, name="sirtaki-end", daemon=True).start()

    @property
    def pipelines(self) -> list[GradientPipeline]:
        """What reduces the dense gradients of the participants. Thread-safe."""
        found = (participant.pipeline for participant in self.participants)
        return [pipeline for pipeline in found if pipeline is not None]

    @property
    def tunings(self) -> list[Tuning]:
        """What tunes the pipelines. Thread-safe."""
        return [tuning for participant in self.participants if (tuning := participant.tuning) is not None]

    def _end_if_a_device_waits(self) -> None:
        """The job has failed. A GPU that waits for others can't be told, nor what is to run on it after that.

        Ends the process: the main thread may hang in CUDA for ever, and if it went on, parameters would be updated
        with gradients that were never reduced. Where no GPU is known to wait, the main thread may end it by itself.
        """

        def ends() -> bool:
            return _job is not self or any(pipeline.in_flight.stalled() for pipeline in self.pipelines)

        wait_for(ends, Deadline.after(DEVICE_S), Poll.SLOW)
        if _job is self:
            end_now(f"ends while its GPU waits: {self.failure}")

    @property
    def rank(self) -> int:
        """Of this process among all."""
        return self.control.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.control.size

    @property
    def backend(self) -> Backend:
        """What carries the control plane."""
        return self.control.backend

    @property
    def failure(self) -> CommError | None:
        """Why the job is lost, None while all is well."""
        return self.control.failures.error

    def interrupt(self) -> list[str]:
        """Keeps what the warm-up has found so far, and says where this rank is, in words."""
        where = self.watchdog.progress()
        timeline.stop()
        recorder.end()
        for tuning in self.tunings:
            tuning.remember()
        return where

    def close_participants(self, number: int) -> None:
        """Not collective: what uses this process set is closed, since that ends."""
        for participant in reversed(list(self.participants)):
            if participant.key[0] == number:
                participant.close("when its process set was removed")

    def close(self, timeout_s: float) -> bool:
        """Collective: waits until all ranks are here, then ends all threads and frees all communicators.

        Returns:
            False if other ranks did not come within `timeout_s`; no communicator is freed then, and it may be
            called again.
        """
        self._hide(for_good=True)
        self.control.failures.while_waiting(None)
        everybody = self.control.failures.error is None and self.watchdog.leave(timeout_s)
        for participant in reversed(list(self.participants)):
            participant.close("by shutdown()")
        self.disposal.stop()
        timeline.stop()
        recorder.end()
        if everybody:
            self.rank_sets.close()
            self.watchdog.close()
            self.control.close()
            self._ranks.free()
        return everybody

    def _hide(self, *, for_good: bool) -> None:
        observed, self.observed = self.observed, None
        if observed is not None:
            observed.close(for_good=for_good)

    # ── where ranks come and go ──────────────────────────────────────────────────────────────────────────────────

    def give_up(self, reason: str) -> None:
        """Not collective: this rank leaves the generation, which all others are told; waits for nobody."""
        self.control.failures.report(PeerLostError(reason))
        self._ranks.abort(reason)

    def wait_for_leave(self) -> None:
        """Collective, when all have agreed to leave: nobody leaves while another one still has to hear of it."""
        together = False
        with contextlib.suppress(CommError):
            together = leave_together(self.control.comm, LEAVE_S)
        if not together:
            self.give_up(f"rank {self.rank} leaves, and others do not")
        self.control.failures.report(PeerLostError("this rank has left the generation"))

    def abandon(self) -> None:
        """Not collective, after `give_up` or `wait_for_leave`: ends all that belongs to the job on this rank."""
        self._hide(for_good=self.elastic is None)
        self.control.failures.while_waiting(None)
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
"""What the end of this process ends; None once the job has been closed on all ranks, or is being ended."""


def current() -> Job:
    """The job of this process.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    if _job is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _job


def is_initialized() -> bool:
    """Whether `init()` has been called, and `shutdown()` not since."""
    return _job is not None


@outside_modes  # memory that is made in inference mode could not be written outside of it
def init(comm: Sequence[int] | MPI.Comm | None = None, *, beside: ProcessGroup | None = None) -> None:
    """Collective: starts Sirtaki on all ranks; harmless if it has been started.

    Args:
        comm: None = all ranks that the launcher started; an mpi4py communicator; or a list of ranks, which only
            those ranks call with.
        beside: a process group of PyTorch's, whose ranks are the job's; `comm` is left out then.

    Raises:
        ConfigError: an environment variable is invalid, this rank is not in `comm`, or the launcher has meant more
            ranks than there are.
        LaunchError: where ranks come and go: there is no generation for this rank.
        CommError: there is no usable MPI library, or ranks do not come.
    """
    global _job, _ending, _has_hooks
    if _job is not None:
        return
    if _is_child:
        raise ConfigError(FORKED)
    settings = Settings.from_environ() if beside is None else settings_beside(beside)
    raise_descriptor_limit()
    elastic = of_this_process(settings)
    if elastic is None:
        _job = Job(settings, open_ranks(settings, comm) if beside is None else open_beside(settings, beside))
    else:
        if comm is not None or beside is not None:
            raise ConfigError("ranks are named, but in an elastic job the launcher says who takes part")
        _job = _next_generation(settings, elastic)
    control = _job.control
    if control.rank == 0 and control.size > 1 and settings.tunes and settings.registry != REGISTRY_OFF:
        load_ahead(settings.registry)  # while the script builds its model, else all ranks would wait for it
    # Scripts read these, as under horovodrun.
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
    os.environ.setdefault("HOROVOD_HOSTNAME", control.host_names[control.rank])  # a launcher has its own name for it
    _ending = _job
    if not _has_hooks:
        _has_hooks = True
        _install_hooks()
    exclude_from_compilation()
    _job.observed = Observed(_job, local_rank=control.local_rank, generation=0 if elastic is None else elastic.number)


def _next_generation(settings: Settings, elastic: Generations) -> Job:
    """Collective over its members: the first of the next generations that lives to be opened.

    Raises:
        SystemExit: this rank is not wanted any more: it leaves with exit code 0.
        LaunchError: there is no next generation.
    """
    while True:
        try:
            ranks = elastic.meet_next(settings)
        except Dismissed as err:
            logger.warning("this rank is not wanted any more, and ends: %s", err)
            raise SystemExit(0) from None
        try:
            return Job(settings, ranks, elastic)
        except BaseException as err:
            ranks.abort(f"rank {ranks.rank} could not open generation {elastic.number}: {err}")
            ranks.free()
            if not isinstance(err, CommError):
                raise
            logger.info("generation %d has ended before it was open: %s", elastic.number, err)


def leave(*, together: bool, reason: str = "") -> None:
    """Ends this rank's part in the job, or its generation: `init()` may join the next. Harmless if it has ended.

    Args:
        together: collective; all ranks have agreed to.
        reason: what the others are told otherwise.
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
    """Collective: ends Sirtaki on all ranks; `init()` may be called again. Harmless if it was not started."""
    global _job, _ending
    if _job is None:
        return
    if _is_child:
        _job = None
        return
    with contextlib.suppress(SirtakiError):  # whoever needs what did not come hears of it
        _job.participants.settle()
    job, _job = _job, None
    if job.close(SHUTDOWN_S):
        _ending = None
    elif job.elastic is not None:
        _ending = None
        job.give_up(f"rank {job.rank} has shut down")
        job.abandon()
    else:
        logger.warning("shutdown: other ranks did not call it within %.0f s", SHUTDOWN_S)


# ── the end of the process: a rank that fails ends the job, one that has done its work waits for the others ──────────

VICTIM_S = 2.0
"""How long a rank whose communication failed waits before it ends the job: the cause should be heard first."""

LOST_S = 15.0
"""The same over MPI where another rank is about to end, or has: it ends the job, and its exit code is to be kept."""

EXIT_S = 5.0
"""How long a rank that ends with an exit code waits for the others; they must hear of it soon."""

_AGAIN_S = 60.0  # how long to wait for the others at a time, where there is no hurry

_exit_code: int | None = None
_raised = False
_has_hooks = False
_is_child = False
"""This process was forked from a rank. It may ask for the rank's number and the like, and nothing else."""


def describe() -> str:
    """What this rank does, in words; "" without a job."""
    return "" if _ending is None else _ending.watchdog.describe()


def end_now(reason: str) -> NoReturn:
    """Says why this rank ends the job, and ends the process without waiting for anything."""
    if _ending is not None:
        _report(_ending, reason, _interrupted(_ending))
    _leave(1)


def finish() -> None:
    """The script has come to its end without an error, in a process that goes on."""
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
            if _outlives_others():
                _leave(1)
            return
        _ending = None  # nothing is left to wait for at the exit
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
            job._ranks.abort(f"rank {job.rank} raised {kind.__name__}: {error}")
            _leave(1)

    def on_exit(status: Any = None) -> NoReturn:  # Any: as sys.exit
        global _exit_code
        _exit_code = status if isinstance(status, int) else int(status is not None)
        previous_exit(status)

    sys.excepthook, sys.exit = on_exception, on_exit
    at_exit(_at_exit)
    in_forked_children(on_exit, _become_child)
    os.register_at_fork(before=_finish_updates)


def _become_child(_: object) -> None:
    """In a forked child: a process of the script's, which ends without a word to the job."""
    global _ending, _is_child
    _is_child = _is_child or _job is not None or generations.of_process is not None
    _ending = None
    if not _is_child:  # it may become a rank
        at_exit(_at_exit)
    if not skip_finalize():
        atexit.register(_leave_before_mpi)


def _finish_updates() -> None:
    """Before a fork: complete the updates that are put off, because the child has nothing that could."""
    if _job is not None and not _is_child and threading.current_thread() is threading.main_thread():
        with contextlib.suppress(SirtakiError):  # the script's next step raises it
            _job.participants.settle()


def _leave_before_mpi() -> None:
    """End a forked child before MPI, which the script has loaded, is finalized there."""
    atexit.unregister(_leave_before_mpi)
    atexit._run_exitfuncs()
    _flush()
    os._exit(int(_raised) if _exit_code is None else _exit_code)


def _at_exit() -> None:
    """A rank whose script has ended: waits for the others, and does not hide a failure from mpiexec."""
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
        if _outlives_others():  # `raise SystemExit(9)` passes by `sys.exit`
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
            job._ranks.abort(f"rank {job.rank} {reason}")
        _leave(code)
    _report(job, f"ends after {job.failure}", where)
    # `raise SystemExit(9)` passes by `sys.exit`: Python knows the exit code, and nobody else. Unless it is 0 mpiexec
    # takes it for the job's; without MPI_Finalize, which would wait for the others, it comes at once.
    if not skip_finalize():
        _leave(1)


def _interrupted(job: Job) -> list[str]:
    try:
        return job.interrupt()
    except Exception as err:  # whatever goes wrong here must not keep the job from ending
        return [f"could not keep its state: {err}"]


def _report(job: Job, reason: str, where: list[str]) -> None:
    """Says who ends the job and where that rank was; sirtakirun says the former itself."""
    if where or not _started_by_sirtakirun():
        place = "".join(f"; it {text}" for text in where)
        then = "the job ends" if job.elastic is None else "it leaves the job"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed, full or None
            print(f"sirtaki: rank {job.rank} {reason}{place}; {then}", file=sys.__stderr__, flush=True)


def _started_by_sirtakirun() -> bool:
    """Its wrapper runs the script in this process, and ends the other ranks when this one fails."""
    return "sirtaki.run.rank_channel" in sys.modules


def _outlives_others() -> bool:
    """Whether others may go on without this process, which then must end in a way that they hear of."""
    elastic = generations.of_process
    return not _is_child and elastic is not None and elastic.leave is not os._exit


def _leave(exit_code: int) -> NoReturn:
    """Without MPI_Finalize, so that mpiexec sees a failure and ends the other ranks."""
    _flush()
    (os._exit if generations.of_process is None else generations.of_process.leave)(exit_code)
    raise AssertionError("this process has ended")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
