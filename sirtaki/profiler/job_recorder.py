"""Records a job from within one of its ranks: when it begins, what it keeps, when it ends.

It begins when the warm-up is over, which all ranks know at the same step; there they meet, tell each other where they
run, and compare clocks. Iterations with torch.profiler come first, and then as many without it, which show what a step
takes when nobody looks; one iteration is left out before each. A step ends when an optimizer has updated parameters
whose gradients all ranks have reduced; that it has is told by PyTorch's own hooks on optimizers.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import sirtaki
from sirtaki.comm import recorder
from sirtaki.comm.control.clocks import ClockOffset, compare_clocks
from sirtaki.comm.plan import Route
from sirtaki.comm.recorder import TracedIteration, TracedOperation
from sirtaki.engine.gradient_reducer import GradientReducer
from sirtaki.engine.job import Job, current, is_initialized
from sirtaki.engine.probes import fitted_links, probe_routes
from sirtaki.engine.warmup import TunedSynchroniser
from sirtaki.errors import RecordingError
from sirtaki.link_model import LinkModel
from sirtaki.machine import processor_time_beside_s
from sirtaki.settings import variables_set

from . import folder as folders
from .kineto import Kineto, Seen
from .live_tensors import LiveStorage, live_storages
from .memory_of_step import WatchedStep, memory_of_step
from .module_calls import ModuleCalls, model_is_compiled
from .operators import StepOperators
from .own_recording import Draft, Reducer, all_buffers, buffer_number, model_digest, operators_of_drafts, recorded
from .placement import own_placement
from .recording import Buffer, Detail, JobRecord, Placement, RankRecording
from .step_memory import StepMemory
from .termination import Termination

logger = logging.getLogger(__name__)


PROBING_S, PROBED_STREAMS = 0.5, 8
"""For each route of which a warm-up has told nothing."""

NOTHING = "nothing was recorded: no gradients of several ranks were reduced once the warm-up was over"


class Stage(Enum):
    """How far it is."""

    WAITING = auto()  # for the end of the warm-up
    STARTING = auto()  # an iteration that is not kept: torch.profiler has been switched on, or off
    RECORDING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be recorded.

    Attributes:
        folder: where to.
        n_iterations: how many, and if torch.profiler is used as many again.
        operators: torch.profiler is used.
        edges: what operators read is found out, too.
    """

    folder: Path
    n_iterations: int = 10
    operators: bool = True
    edges: bool = False


class JobRecorder:
    """One recording of this rank; `recorder.Recorder` while it lasts.

    Attributes:
        stage: how far it is.
    """

    def __init__(self, wanted: Wanted) -> None:
        """Waits for its time from now on."""
        self._wanted, self.stage = wanted, Stage.WAITING
        self._update_begin_s: float | None = None
        self._finished = -1
        self._draft = Draft(0.0)
        self._drafts: list[Draft] = []
        self._kineto: Kineto | None = None  # while it is on
        self._seen: Seen | None = None
        self._calls: ModuleCalls | None = None
        self._storages: Sequence[LiveStorage] = ()
        self._job: JobRecord | None = None
        self._rank, self._clock = 0, ClockOffset(0.0, 0.0)
        self._ending = threading.RLock()  # a signal may come while it is held
        self._termination = Termination(self.end)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _before_update(self, *_: Any) -> None:  # Any: torch's hook
        self._update_begin_s = time.perf_counter()

    def _after_update(self, *_: Any) -> None:  # Any: torch's hook
        now_s = time.perf_counter()
        if self.stage is Stage.ENDED or not is_initialized():
            return
        if self._update_begin_s is not None:
            reduced_s = max((traced.end_s for _, traced in self._draft.traced), default=0.0)
            self._draft.updates.append((max(self._update_begin_s, reduced_s), now_s))
            self._update_begin_s = None
        leader = _leader(current())
        if leader is None or leader.synchroniser.iteration == self._finished:
            return
        self._finished = leader.synchroniser.iteration
        self._end_step(now_s, leader)

    def _end_step(self, now_s: float, leader: TunedSynchroniser) -> None:
        if self.stage is Stage.WAITING:
            job = current()
            if not (_is_tuning(job) or leader.synchroniser.profiling or job.joining.somebody):  # as on all ranks
                self._begin(job)
        elif self.stage is Stage.STARTING:
            self.stage = Stage.RECORDING
            self._next_draft()
        elif self.stage is Stage.RECORDING:
            self._draft.number, self._draft.end_s = self._finished - 1, now_s
            self._draft.beside_s += processor_time_beside_s()
            self._drafts.append(self._draft)
            if self._count(slowed=self._draft.slowed) >= self._wanted.n_iterations:
                if not self._draft.slowed:
                    self.end()
                    return
                self._look_no_more()
                self.stage = Stage.STARTING
            self._next_draft()

    def _count(self, *, slowed: bool) -> int:
        """How many have been recorded with torch.profiler, or without it."""
        return sum(draft.slowed is slowed for draft in self._drafts)

    def _next_draft(self) -> None:
        """Memory is looked at in the first step."""
        if self._kineto is not None:
            if not self._drafts:
                self._storages = live_storages()
            if self._calls is not None:
                self._calls.with_tensors = not self._drafts
            self._kineto.mark()
        self._draft = Draft(time.perf_counter(), slowed=self._kineto is not None, beside_s=-processor_time_beside_s())

    # ── what is told meanwhile ───────────────────────────────────────────────────────────────────────────────────

    def iteration(self, traced: TracedIteration) -> None:
        """See `Recorder`."""
        reducer = next((key for key, tuned in _tuned(current()) if tuned.synchroniser is traced.source), None)
        if reducer is not None:
            self._draft.traced.append((reducer, traced))

    def operation(self, traced: TracedOperation) -> None:
        """See `Recorder`."""
        self._draft.operations.append(traced)

    # ── begin and end ────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, job: Job) -> None:
        """Collective."""
        control = job.control
        self._rank, host_leads = control.rank, control.hosts[control.rank] == control.rank
        if host_leads:
            with suppress(OSError):  # which is told at the end
                self._wanted.folder.mkdir(parents=True, exist_ok=True)
                folders.clear(self._wanted.folder)
        told: list[tuple[Placement, list[Buffer]]] = control.all_gather((own_placement(control), _buffers(job)))
        self._clock = compare_clocks(control)
        model = next((tuned.model for _, tuned in _tuned(job) if tuned.model is not None), None)
        self._job = JobRecord(
            job=job.job,
            n_iterations=self._wanted.n_iterations,
            placement=tuple(place for place, _ in told),
            buffers=all_buffers([buffers for _, buffers in told]),
            links=_links(job, control.broadcast({} if model is None else dict(model.links))),
            contention=control.broadcast(None if model is None else model.contention),
            settings=variables_set(),
            versions={
                "sirtaki": sirtaki.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )
        if host_leads:  # now, as this rank may be the one that is killed
            with suppress(OSError):
                folders.write_job(self._wanted.folder, self._job)
        if self._wanted.operators:
            try:
                self._kineto = Kineto(edges=self._wanted.edges)
            except RecordingError as err:
                logger.warning("%s", err)
            else:
                self._calls = None if model_is_compiled() else ModuleCalls()
        recorder.start(self)
        self.stage = Stage.STARTING
        self._termination.watch()
        if self._rank == 0:
            logger.info("recording %d iterations in %s", self._wanted.n_iterations, self._wanted.folder)

    def end(self) -> None:
        """Writes what there is; any thread, and more than once perhaps."""
        with self._ending:
            stage, self.stage = self.stage, Stage.ENDED
            if stage is Stage.ENDED:
                return
            recorder.stop()
            for hook in self._hooks:
                hook.remove()
            if stage is Stage.WAITING:
                logger.warning("%s", NOTHING)
            else:
                with self._termination.put_off():
                    self._write()

    def _write(self) -> None:
        assert self._job is not None
        self._look_no_more()
        operators, lanes = operators_of_drafts(self._drafts, self._seen, self._calls)
        recording = RankRecording(
            rank=self._rank,
            job=self._job.job,
            model=model_digest(self._job.buffers),
            detail=Detail.UNITS if self._seen is None else Detail.OPERATORS,
            offset_s=self._clock.offset_s,
            round_trip_s=self._clock.round_trip_s,
            clock_error_s=0.0 if self._seen is None else self._seen.clock.error_s,
            lanes=lanes,
            complete=self._count(slowed=self._seen is not None) >= self._wanted.n_iterations,
            iterations=tuple(map(recorded, self._drafts, operators)),
            modules=() if self._calls is None else self._calls.modules()[0],
            memory=self._memory(operators),
        )
        try:
            folders.write_rank(self._wanted.folder, recording)
        except OSError as err:
            logger.warning("what was recorded cannot be written: %s", err)
            return
        if self._rank == 0:
            logger.info(
                "%d iterations are recorded in %s: sirtaki profile --show %s",
                len(self._drafts),
                self._wanted.folder,
                self._wanted.folder,
            )

    def _memory(self, operators: Sequence[StepOperators | None]) -> StepMemory | None:
        """Of the first step; None where torch.profiler did not see it."""
        if self._seen is None or not self._drafts or operators[0] is None:
            return None
        first = self._drafts[0]
        step = WatchedStep(
            number=first.number,
            begin_s=first.begin_s,
            end_s=first.end_s,
            spans=operators[0].spans,
            storages=self._storages,
        )
        return memory_of_step(self._seen, step, self._calls)

    def _look_no_more(self) -> None:
        """Switches torch.profiler off, where it is on."""
        if self._calls is not None:
            self._calls.stop()
        kineto, self._kineto = self._kineto, None
        if kineto is not None and kineto.here:
            try:
                self._seen = kineto.stop()
            except RecordingError as err:
                logger.warning("%s; no operators are recorded", err)


def _tuned(job: Job) -> Sequence[tuple[Reducer, TunedSynchroniser]]:
    """What reduces gradients on this rank, each with its key."""
    return [
        (there.key, there.tuned)
        for there in job.participants
        if isinstance(there, GradientReducer) and there.tuned is not None
    ]


def _of_all_ranks(job: Job) -> list[TunedSynchroniser]:
    return [tuned for (process_set, _), tuned in _tuned(job) if process_set == 0]


def _leader(job: Job) -> TunedSynchroniser | None:
    """The one whose iterations are counted; the same on all ranks. None: gradients are not reduced over all ranks."""
    return next(iter(_of_all_ranks(job)), None)


def _links(job: Job, known: Mapping[Route, LinkModel]) -> dict[Route, LinkModel]:
    """Collective: what all-reduces cost, also on routes in use that no warm-up has probed."""
    links = dict(known)
    for tuned in _of_all_ranks(job):
        if tuned.knobs.route not in links:
            route = [tuned.knobs.route]
            probes = probe_routes(job.control, tuned.router, route, max_streams=PROBED_STREAMS, budget_s=PROBING_S)
            links |= fitted_links(probes)
    return links


def _is_tuning(job: Job) -> bool:
    return any(tuned.tuning for tuned in _of_all_ranks(job))


def _buffers(job: Job) -> list[Buffer]:
    """Those of this rank."""
    keys = {there.key: there.ranks for there in job.participants}
    return [
        Buffer(
            number=buffer_number(key, number),
            reducer=key,
            ranks=tuple(keys[key]),
            layout=layout,
            plan=plan,
            knobs=tuned.knobs,
        )
        for key, tuned in _tuned(job)
        for number, (layout, plan) in enumerate(zip(tuned.synchroniser.layouts, tuned.synchroniser.plans, strict=True))
    ]
