"""Record the training steps of a running job, on every rank."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import sirtaki
from sirtaki.autotune.model.replayer import Phase
from sirtaki.comm import recorder
from sirtaki.comm.control.plane import ClockOffset, ControlPlane, compare_clocks
from sirtaki.comm.plan import Route
from sirtaki.comm.recorder import TracedIteration, TracedOperation
from sirtaki.engine.job import Job, current, is_initialized
from sirtaki.engine.reducing.gradient_hooks import GradientHooks
from sirtaki.engine.settings import ProfileRequest, variables_set
from sirtaki.engine.tuning.pipeline_target import PipelineTarget
from sirtaki.engine.tuning.plans import fitted_links, probe_routes
from sirtaki.errors import ConfigError, RecordingError, require
from sirtaki.machine import (
    allowed_processors,
    at_exit,
    cpu_quota,
    free_in_forked_children,
    handle_signal,
    in_forked_children,
    processor_time_beside_s,
)
from sirtaki.measures import LinkModel

from .operators import (
    Interval,
    Moments,
    ProfilerTrace,
    StepOperators,
    StepWatch,
    StepWindow,
    borrowed,
    memory_of_step,
    operators_of,
)
from .recording import (
    Buffer,
    Collective,
    Copy,
    Detail,
    JobInfo,
    PhaseSpan,
    Placement,
    RankRecording,
    ReadyGradient,
    RecordedIteration,
    RecordedUnit,
    clear,
    write_job,
    write_rank,
)

logger = logging.getLogger(__name__)

Reducer = tuple[int, int]
"""Key of a reducer, the object that all-reduces the gradients of an optimizer: (id of the process set, id of the
reducer in this set)."""

PROBING_S, PROBED_STREAMS = 0.5, 8
"""Time limit in seconds, and largest number of streams, for measuring latency and bandwidth of a route (transport and
algorithm) that were not measured when the job was tuned."""

WITH_OPERATORS = 3
"""Maximum number of iterations that are recorded with torch.profiler, which slows them down.

Later iterations run without torch.profiler. They get copies of the recorded operators, moved to their own times.
"""

NOTHING_RECORDED = "nothing was recorded: no gradients were reduced between ranks after the warm-up"


# ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Draft:
    """Events of one step of this rank, collected while the step runs.

    Attributes:
        begin_s, end_s: first and last moment of the step.
        slowed: True if torch.profiler recorded the step, which slows it.
        traced: (key of the reducer, events), for each reduction of an optimizer's gradients that ended in this step.
        operations: collective operations other than all-reduces of units (buckets). The thread of the transport appends
            to the list.
        updates: intervals in which an optimizer updated parameters.
        number: number of optimizer steps before this step; equal on all ranks.
        beside_s: processor time of this process outside the training thread; None = not recorded.
    """

    begin_s: float
    slowed: bool = False
    traced: list[tuple[Reducer, TracedIteration]] = field(default_factory=list)
    operations: list[TracedOperation] = field(default_factory=list)
    updates: list[Interval] = field(default_factory=list)
    number: int = -1
    end_s: float = 0.0
    beside_s: float = 0.0

    @property
    def profiling(self) -> bool:
        """Return whether the ranks agreed on the order of gradients in this step. Such a step is unusually slow."""
        return any(traced.profiling for _, traced in self.traced)

    @property
    def moments(self) -> Moments:
        """Return {key of an event, such as a ready gradient: time of the event}.

        A key denotes the same event in all steps.
        """
        found: dict[tuple[object, ...], float] = {("begin",): self.begin_s, ("end",): self.end_s}
        for number, update in enumerate(self.updates):
            found["update", number], found["updated", number] = update
        copied: Counter[Reducer] = Counter()
        for reducer, traced in self.traced:
            found["backward", reducer] = traced.backward_ended_s
            found["reduced", reducer] = traced.end_s
            found.update({("ready", reducer, one.layout, one.place): one.ready_s for one in traced.ready})
            for copy in traced.copies:
                found["copy", reducer, copied[reducer]] = copy.begin_s
                copied[reducer] += copy.n_gradients
                found["copied", reducer, copied[reducer]] = copy.end_s
        return found

    @property
    def step(self) -> StepWindow:
        """Return begin and end of this step, its optimizer updates, and the intervals in which the thread copied
        gradients or waited for them. These intervals are cut out of operators.
        """
        copies = [(copy.begin_s, copy.end_s) for _, traced in self.traced for copy in traced.copies]
        waits = [(traced.backward_ended_s, traced.end_s) for _, traced in self.traced]
        cuts = tuple(sorted(copies + waits))
        return StepWindow(begin_s=self.begin_s, end_s=self.end_s, updates=tuple(self.updates), cuts=cuts)


def operators_of_drafts(
    drafts: Sequence[Draft], seen: ProfilerTrace | None
) -> tuple[list[StepOperators | None], tuple[str, ...]]:
    """Return (operators of each step, names of the lanes). Lanes are the threads and device streams that run operators.

    A step without torch.profiler gets the operators of a step with torch.profiler, moved to the times of its own
    events.

    Args:
        drafts: events of all steps. Steps with torch.profiler come first.
        seen: events that torch.profiler recorded; None = torch.profiler was not used.
    """
    watched = [draft for draft in drafts if draft.slowed]
    if seen is None or not watched:
        return [None] * len(drafts), ()
    found, lanes = operators_of(seen, [draft.step for draft in watched])
    pairs = list(zip(found, watched, strict=True))
    turns = cycle([pair for pair in pairs if not pair[1].profiling] or pairs)
    unwatched = zip(drafts[len(watched) :], turns, strict=False)
    return [*found, *(borrowed(own, source.moments, one.moments) for one, (own, source) in unwatched)], lanes


def recorded(draft: Draft, operators: StepOperators | None) -> RecordedIteration:
    """Build the recording of one step from its events. Without operators, the phases (such as backward) are only
    approximate.
    """
    if operators is None:
        backward = [PhaseSpan(Phase.BACKWARD, one.first_ready_s, one.backward_ended_s) for _, one in draft.traced]
        updates = [PhaseSpan(Phase.UPDATE, begin_s, end_s) for begin_s, end_s in draft.updates]
        spans = tuple(sorted([*backward, *updates], key=lambda span: span.begin_s))
        operators = StepOperators(operators=(), spans=spans)
    ready = [
        ReadyGradient(buffer_number(reducer, one.layout), one.place, one.ready_s)
        for reducer, traced in draft.traced
        for one in traced.ready
    ]
    units = [
        RecordedUnit(traced.number, buffer_number(reducer, unit.layout_number), unit.start, unit.stop, unit.route,
                     unit.stream, unit.issued_s, unit.began_s, unit.done_s)
        for reducer, traced in draft.traced
        for unit in traced.units
    ]  # fmt: skip
    collectives = [
        Collective(one.name, one.kind, one.submitted_s, one.agreed_s, one.done_s, one.n_bytes)
        for one in sorted(draft.operations, key=lambda one: one.submitted_s)
    ]
    copies = [Copy(*copy) for _, traced in draft.traced for copy in traced.copies]
    return RecordedIteration(
        number=draft.number,
        begin_s=draft.begin_s,
        end_s=draft.end_s,
        profiling=draft.profiling,
        slowed=draft.slowed,
        spans=operators.spans,
        operators=operators.operators,
        ready=tuple(sorted(ready, key=lambda one: one.ready_s)),
        copies=tuple(copies),
        units=tuple(units),
        collectives=tuple(collectives),
        exposed_s=sum(max(0.0, traced.end_s - traced.backward_ended_s) for _, traced in draft.traced),
        beside_s=draft.beside_s,
    )


# ── properties of a rank and its job ─────────────────────────────────────────────────────────────────────────────────


def buffer_number(reducer: Reducer, layout: int) -> int:
    """Return the id of a flat buffer (of contiguous gradients) in the job.

    The id depends only on the arguments, so that ranks agree on it even if some ranks lack some buffers.
    """
    process_set, serial = reducer
    return process_set << 20 | serial << 8 | layout


def model_digest(buffers: Iterable[Buffer]) -> str:
    """Return a digest of the gradient layouts, which is equal on ranks that train the same model."""
    common = [(buffer.number, buffer.layout) for buffer in buffers if buffer.reducer[0] == 0]
    return hashlib.sha256(repr(sorted(common, key=lambda item: item[0])).encode()).hexdigest()[:16]


def clock_identity() -> str:
    """Return a string that is equal for all processes whose `time.perf_counter` reads the same clock.

    The string identifies the boot of the machine and the Linux time namespace, which together determine the clock.
    """
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Use only the host name if /proc is not mounted.
        found = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        found.append(os.readlink("/proc/self/ns/time"))
    return " ".join(found)


def own_placement(control: ControlPlane) -> Placement:
    """Return the host, node, clock and processors of this rank."""
    rank = control.rank
    return Placement(
        rank=rank,
        host=control.hosts[rank],
        node=control.node_ranks[0],
        host_name=control.host_names[rank],
        clock=clock_identity(),
        processors=allowed_processors(),
        host_processors=os.cpu_count() or 1,
        quota=cpu_quota(),
        threads=torch.get_num_threads(),
    )


def _tuned(job: Job) -> Sequence[tuple[Reducer, PipelineTarget]]:
    """Return the gradient pipelines of this rank whose settings Sirtaki tunes, one per optimizer, each with the key of
    the reducer (object that all-reduces the optimizer's gradients).
    """
    return [
        (there.key, there.tuning)
        for there in job.participants
        if isinstance(there, GradientHooks) and there.tuning is not None
    ]


def _of_all_ranks(job: Job) -> list[PipelineTarget]:
    """Return the gradient pipelines (one per optimizer) that all ranks use, not only a process set.

    The recorder numbers iterations by the count of the first of these pipelines, which is equal on all ranks.
    """
    return [tuned for (process_set, _), tuned in _tuned(job) if process_set == 0]


def _links(job: Job, known: Mapping[Route, LinkModel]) -> dict[Route, LinkModel]:
    """Return latency and bandwidth of all routes (transport and algorithm) in use. Collective. Those that were measured
    when the job was tuned (`known`) are not measured again.
    """
    links = dict(known)
    for tuned in _of_all_ranks(job):
        if tuned.knobs.route not in links:
            route = [tuned.knobs.route]
            probes = probe_routes(job.control, tuned.router, route, max_streams=PROBED_STREAMS, budget_s=PROBING_S)
            links |= fitted_links(probes)
    return links


def _buffers(job: Job) -> list[Buffer]:
    """Return descriptions of this rank's flat buffers (of contiguous gradients), with their communication plans."""
    ranks = {there.key: tuple(there.ranks) for there in job.participants}
    return [
        Buffer(
            number=buffer_number(key, number),
            reducer=key,
            ranks=ranks[key],
            layout=layout,
            plan=plan,
            knobs=tuned.knobs,
        )
        for key, tuned in _tuned(job)
        for number, (layout, plan) in enumerate(zip(tuned.synchroniser.layouts, tuned.synchroniser.plans, strict=True))
    ]


# ── the recorder ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Stage(Enum):
    """Progress of a recording of the job's training steps."""

    WAITING = auto()  # The warm-up, in which the job is tuned, has not ended.
    STARTING = auto()  # The current iteration is discarded, because it includes the start or stop of torch.profiler.
    RECORDING = auto()
    ENDED = auto()


class JobRecorder:
    """Recorder of the training steps of this rank. Implements `recorder.Recorder`, by which the communication layer
    reports its events.

    When a job ends early, launchers stop ranks with SIGTERM. The recorder then writes its file before the process ends,
    unless the user's script has its own SIGTERM handler.

    Attributes:
        stage: progress of the recording.
    """

    def __init__(self, wanted: ProfileRequest) -> None:
        """Register optimizer hooks, which notice each step. Recording begins later, when the warm-up (in which the job
        is tuned) has ended.
        """
        self._wanted, self._folder, self.stage = wanted, Path(wanted.folder), Stage.WAITING
        self._update_begin_s: float | None = None
        self._finished = -1
        self._draft = Draft(0.0)
        self._drafts: list[Draft] = []
        self._watch: StepWatch | None = None  # None while torch.profiler is off.
        self._seen: ProfilerTrace | None = None
        self._job: JobInfo | None = None
        self._rank, self._clock = 0, ClockOffset(0.0, 0.0)
        # A reentrant lock, because a signal handler may need it while the interrupted thread holds it.
        self._ending = free_in_forked_children(threading.RLock())
        self._terminable = self._writing = self._terminated = False
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        in_forked_children(self, JobRecorder._leave_in_child)

    def _leave_in_child(self) -> None:
        self.stage, self._terminable = Stage.ENDED, False

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _before_update(self, *_: Any) -> None:  # Any, because torch's hooks have no common type.
        self._update_begin_s = time.perf_counter()

    def _after_update(self, *_: Any) -> None:  # Any, because torch's hooks have no common type.
        now_s = time.perf_counter()
        if self.stage is Stage.ENDED or not is_initialized():
            return
        if self._update_begin_s is not None:
            reduced_s = max((traced.end_s for _, traced in self._draft.traced), default=0.0)
            self._draft.updates.append((max(self._update_begin_s, reduced_s), now_s))
            self._update_begin_s = None
        leader = next(iter(_of_all_ranks(current())), None)
        if leader is not None and leader.synchroniser.iteration != self._finished:
            self._finished = leader.synchroniser.iteration
            self._end_step(now_s, leader)

    def _end_step(self, now_s: float, leader: PipelineTarget) -> None:
        if self.stage is Stage.WAITING:
            job = current()
            tuning = any(tuned.tuning for tuned in _of_all_ranks(job))
            # Decide only by facts that are equal on all ranks, because `_begin` is collective.
            if not (tuning or leader.synchroniser.profiling or job.joining.any_joined):
                self._begin(job)
        elif self.stage is Stage.STARTING:
            self.stage = Stage.RECORDING
            self._next_draft()
        elif self.stage is Stage.RECORDING:
            self._draft.number, self._draft.end_s = self._finished - 1, now_s
            self._draft.beside_s += processor_time_beside_s()
            self._drafts.append(self._draft)
            if self._count(slowed=self._draft.slowed) >= self._enough(slowed=self._draft.slowed):
                if not self._draft.slowed:
                    self.end()
                    return
                self._stop_watching()
                self.stage = Stage.STARTING
            self._next_draft()

    def _count(self, *, slowed: bool) -> int:
        """Return how many iterations were recorded with torch.profiler if `slowed`, otherwise without it."""
        return sum(draft.slowed is slowed for draft in self._drafts)

    def _enough(self, *, slowed: bool) -> int:
        return min(WITH_OPERATORS, self._wanted.iterations) if slowed else self._wanted.iterations

    def _next_draft(self) -> None:
        if self._watch is not None:
            self._watch.next_step()
        self._draft = Draft(time.perf_counter(), slowed=self._watch is not None, beside_s=-processor_time_beside_s())

    def iteration(self, traced: TracedIteration) -> None:
        """Add the events of one optimizer's gradient reduction to the current step."""
        reducer = next((key for key, tuned in _tuned(current()) if tuned.synchroniser is traced.source), None)
        if reducer is not None:
            self._draft.traced.append((reducer, traced))

    def operation(self, traced: TracedOperation) -> None:
        """Add a collective operation to the current step. Called by the thread of the transport."""
        self._draft.operations.append(traced)

    # ── begin and end ────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, job: Job) -> None:
        """Gather the hosts, processors and flat buffers (of contiguous gradients) of all ranks, measure clock offsets,
        and start recording steps. Collective.
        """
        control = job.control
        self._rank, host_leads = control.rank, control.hosts[control.rank] == control.rank
        if host_leads:
            with suppress(OSError):  # Ignore errors: writing the file at the end fails again, and reports them.
                self._folder.mkdir(parents=True, exist_ok=True)
                clear(self._folder)
        gathered: list[tuple[Placement, list[Buffer]]] = control.all_gather((own_placement(control), _buffers(job)))
        # Collect the flat buffers (of contiguous gradients) of all ranks, because a rank may lack some of them.
        known = {buffer.number: buffer for _, buffers in gathered for buffer in buffers}
        self._clock = compare_clocks(control)
        model = next((tuned.model for _, tuned in _tuned(job) if tuned.model is not None), None)
        self._job = JobInfo(
            job=job.job,
            n_iterations=self._wanted.iterations,
            placement=tuple(place for place, _ in gathered),
            buffers=tuple(known[number] for number in sorted(known)),
            links=_links(job, control.broadcast({} if model is None else dict(model.links))),
            contention=control.broadcast(None if model is None else model.contention),
            settings=variables_set(),
            versions={
                "sirtaki": sirtaki.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )
        if host_leads:  # Write a file now, because this rank may be killed before the recording ends.
            with suppress(OSError):
                write_job(self._folder, self._job)
        if self._wanted.operators:
            try:
                self._watch = StepWatch(edges=self._wanted.edges)
            except RecordingError as err:
                logger.warning("%s", err)
        recorder.start(self)
        self.stage = Stage.STARTING
        self.handle_termination()
        if self._rank == 0:
            logger.info(
                "this job now records %d training iterations to the folder %s",
                self._wanted.iterations,
                self._folder,
            )

    def end(self) -> None:
        """Stop recording and write this rank's file. The method is thread-safe. Calls after the first do nothing."""
        with self._ending:
            stage, self.stage = self.stage, Stage.ENDED
            if stage is Stage.ENDED:
                return
            recorder.stop()
            for hook in self._hooks:
                hook.remove()
            if stage is Stage.WAITING:
                logger.warning("%s", NOTHING_RECORDED)
                return
            self._writing = True
            try:
                self._write()
            finally:
                self._writing = False
                self._allow_termination()

    def handle_termination(self) -> None:
        """Install a SIGTERM handler that writes this rank's file before the process ends, unless the user's script has
        its own handler.
        """
        here = threading.current_thread() is threading.main_thread()  # Only the main thread can set signal handlers.
        if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            handle_signal(signal.SIGTERM, self._on_terminate)
            self._terminable = True

    def _on_terminate(self, *_: Any) -> None:  # Any, because signal handlers have no common type.
        self._terminated = True
        if not self._writing:  # During writing, do nothing: `end` raises the signal again afterwards.
            self.end()
            self._allow_termination()

    def _allow_termination(self) -> None:
        """Restore the default action of SIGTERM after this rank's file was written. Raise SIGTERM again if it arrived
        during writing.
        """
        if self._terminable and threading.current_thread() is threading.main_thread():
            self._terminable = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._terminated:
                os.kill(os.getpid(), signal.SIGTERM)

    def _write(self) -> None:
        assert self._job is not None
        self._stop_watching()
        seen, memory = self._seen, None
        operators, lanes = operators_of_drafts(self._drafts, seen)
        if seen is not None and self._drafts and operators[0] is not None:
            first, spans = self._drafts[0], operators[0].spans
            memory = memory_of_step(seen, number=first.number, begin_s=first.begin_s, end_s=first.end_s, spans=spans)
        recording = RankRecording(
            rank=self._rank,
            job=self._job.job,
            model=model_digest(self._job.buffers),
            detail=Detail.UNITS if seen is None else Detail.OPERATORS,
            offset_s=self._clock.offset_s,
            round_trip_s=self._clock.round_trip_s,
            clock_error_s=0.0 if seen is None else seen.clock.error_s,
            lanes=lanes,
            complete=self._count(slowed=False) >= self._wanted.iterations,
            iterations=tuple(map(recorded, self._drafts, operators)),
            modules=() if seen is None or seen.calls is None else seen.calls.modules()[0],
            memory=memory,
        )
        try:
            write_rank(self._folder, recording)
        except OSError as err:
            logger.warning(
                "the recording of this job lacks rank %d, because this rank's file cannot be written: %s",
                self._rank,
                err,
            )
            return
        if self._rank == 0:
            words = (
                "this job recorded %d training iterations to the folder %s; print them with: sirtaki profile --show %s"
            )
            logger.info(words, len(self._drafts), self._folder, self._folder)

    def _stop_watching(self) -> None:
        """Stop torch.profiler if it is running."""
        watch, self._watch = self._watch, None
        if watch is not None:
            try:
                self._seen = watch.stop()
            except RecordingError as err:
                logger.warning(
                    "the recording of this job has no PyTorch operators (profiler events) of rank %d, because %s",
                    self._rank,
                    err,
                )


# ── entry points ─────────────────────────────────────────────────────────────────────────────────────────────────────

_from_environment: JobRecorder | None = None


def begin_as_set() -> None:
    """Prepare to record training steps if `SIRTAKI_PROFILE` is set on rank 0. Called on all ranks after `init()`. Calls
    after the first recording of a process do nothing.
    """
    global _from_environment
    asked = current().settings.profile
    if asked is None or _from_environment is not None:
        return
    _from_environment = JobRecorder(asked)
    at_exit(_from_environment.end)


@contextmanager
def profile(
    folder: str | Path, *, iterations: int = 10, operators: bool = True, edges: bool = False
) -> Iterator[JobRecorder]:
    """Record training iterations inside the `with` block. Recording begins when Sirtaki has finished tuning.
    Collective.

    Every rank must enter and leave the block between the same steps. Recording stops after `iterations` steps, or at
    the end of a block with fewer steps. Then each rank writes its file, which briefly delays the training step that
    follows.

    Args:
        folder: output folder; an existing recording there is overwritten.
        iterations: number of iterations to record.
        operators: also record operators with torch.profiler. This takes up to three additional iterations at the
            beginning, which torch.profiler slows down.
        edges: also record the data dependencies between operators, for `sirtaki trace --chakra`.

    Raises:
        NotInitializedError: `init()` was not called.
        ConfigError: `iterations` is less than 1, or `SIRTAKI_PROFILE` already records this job.
    """
    current()
    require(iterations >= 1, "iterations of profile()", "at least 1", iterations)
    if _from_environment is not None and _from_environment.stage is not Stage.ENDED:
        raise ConfigError(
            "profile() cannot record, because the environment variable SIRTAKI_PROFILE already records this job; unset "
            "it, or do not call profile()"
        )
    asked = ProfileRequest(folder=str(Path(folder).absolute()), iterations=iterations, operators=operators, edges=edges)
    recorder = JobRecorder(asked)
    try:
        yield recorder
    finally:
        recorder.end()
