"""What the sparse gradients of one reducer travel by: the lanes, the thread that uses them, and the plans.

Which way rows take changes between iterations only. All ranks come to the same plans by themselves, from what every
rank has seen of all (`SparseChoice`); times are the only thing that they have to reduce.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.autotune.sparse.choice import Seen, SparseChoice, Stage, learns_hot_rows
from sirtaki.autotune.sparse.coverage import TouchCounts
from sirtaki.autotune.sparse.summary import SparseSummary
from sirtaki.autotune.sparse.volume import Pace, VolumeModel
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse.lanes import SparseLanes
from sirtaki.comm.sparse.paths import Reduced
from sirtaki.comm.sparse.plan import SparsePath, SparsePlan
from sirtaki.comm.sparse.rows import RowFormat, coalesced
from sirtaki.comm.sparse.worker import SparseTask, SparseWork, SparseWorker

from .hot_row_aggregator import HotRowAggregator
from .knob_choices import DEFAULT_STREAMS
from .sparse_memory import Learned, SparseMemory
from .sparse_probe import measure
from .sparse_telling import SparseTelling, shape_of

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.settings import Settings

logger = logging.getLogger(__name__)

HOST_KINDS = (TransportKind.SHARED_MEMORY, TransportKind.GLOO, TransportKind.MPI)


@dataclass(frozen=True, slots=True, eq=False)
class _Means:
    """What there is once rows have to travel: opened and closed together.

    Attributes:
        lanes: between the ranks.
        streams: the only number of them that may be used; None = any.
        worker: the thread that uses them.
        telling: of how rows travel.
    """

    lanes: SparseLanes
    streams: int | None
    worker: SparseWorker
    telling: SparseTelling

    def close(self) -> None:
        """Not collective, once: ends all threads."""
        self.worker.close()
        self.telling.close()


class SparseCarrier:
    """Adds up sparse gradients over the ranks; opened once there are any.

    Attributes:
        plans: of the next iteration, by name.
    """

    def __init__(self, control: ControlPlane, settings: Settings, *, prefix: str = "") -> None:
        """Starts nothing; `prefix`: of operations' names in recordings."""
        self._control, self._settings, self._prefix = control, settings, prefix
        self._means: _Means | None = None
        self._memory = SparseMemory(control, settings)
        self._closed = False
        self._order: list[str] = []
        self._forms: dict[str, RowFormat] = {}
        self._choices: dict[str, SparseChoice] = {}
        self._spans_s: dict[str, list[float]] = {}
        self._fixed: SparsePath | None = None
        self._tries = False

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        """Collective, between iterations: rows of these parameters come from now on, of all in each iteration."""
        if params and self._means is None and self._control.size > 1:
            self._means = self._open()
        # The backward pass brings them about the other way round.
        self._order = list(params)[::-1]
        for name, param in params.items():
            form = RowFormat(param.shape[0], param[:1].numel(), param.dtype)
            if self._forms.get(name) != form:
                self._forms[name] = form
                self._choices[name] = SparseChoice(fixed=self._fixed, tries=self._tries)
                self._spans_s[name] = []
                if self._means is not None:
                    self._means.telling.begin(name)
        if self._means is not None:
            self._means.worker.begin(self._order)

    def _open(self) -> _Means:
        settings = self._settings
        self._fixed, self._tries, kind, streams = self._control.broadcast(
            (
                settings.sparse,
                settings.tune and settings.warmup_iterations > 0,
                settings.transport if settings.transport in HOST_KINDS else None,
                settings.streams,
            )
        )
        if kind is TransportKind.SHARED_MEMORY and not self._control.one_node:
            kind = None  # which is for within the nodes
        lanes = SparseLanes(
            self._control, timeout_s=settings.transport_timeout_s, kind=kind, streams=streams or DEFAULT_STREAMS
        )
        with contextlib.ExitStack() as unless_joined:
            unless_joined.callback(lanes.close)
            lanes.hot_sums = HotRowAggregator.joined(
                self._control,
                settings.aggregator,
                used=learns_hot_rows(self._fixed, tries=self._tries),
                stall_s=settings.transport_timeout_s,
                check=lanes.check,
            )
            unless_joined.pop_all()
        return _Means(
            lanes,
            streams,
            SparseWorker(lanes, self._control.failures, prefix=self._prefix),
            SparseTelling(self._control, trial_log=settings.trial_log if self._tries else None),
        )

    @property
    def plans(self) -> dict[str, SparsePlan]:
        """See above."""
        return {name: self._choices[name].plan for name in self._order}

    @property
    def summaries(self) -> list[SparseSummary]:
        """How the gradients travel whose way is decided, in the order in which they leave; the same on all ranks."""
        told = {} if self._means is None else self._means.telling.summaries
        return [told[name] for name in self._order if name in told]

    def start(self, name: str, gradient: torch.Tensor) -> SparseWork:
        """The rows of a parameter on this rank are complete: a sparse COO tensor, which may be written afterwards."""
        rows, means = coalesced(gradient.cpu()), self._means
        if means is None:
            work = SparseWork()
            work.reduced = Reduced(rows, len(rows))
            work.finish()
            return work
        means.telling.look_up(name, gradient._nnz())
        form = replace(self._forms[name], dtype=rows.values.dtype)  # which may have changed since
        return means.worker.submit(SparseTask(name, rows, form, self._choices[name].plan))

    def check(self) -> None:
        """Raises the failure of the job, if there is one, and does what this rank owes to others while it waits."""
        self._control.failures.check()

    # ── between iterations ───────────────────────────────────────────────────────────────────────────────────────

    def end_iteration(self, works: Mapping[str, SparseWork]) -> None:
        """Collective where something is decided: all reductions of an iteration are done."""
        if (means := self._means) is None or not works:
            return
        before = self.plans
        for name in self._order:
            self._note(means, name, works[name])
        self._notice_a_lost_aggregator(means)
        self._decide(means)
        means.telling.end_iteration({name: self._choices[name] for name in self._order}, self._forms)
        means.lanes.grow()
        after = self.plans
        if changed := [name for name in self._order if after[name] != before[name]]:
            stages = [self._choices[name].stage for name in changed]
            if any(stage is not Stage.TRY for stage in stages):
                fingerprints = " ".join(after[name].fingerprint() for name in self._order)
                self._control.require_equal(fingerprints, "the way of sparse gradients")
        means.worker.begin(self._order)

    def _note(self, means: _Means, name: str, work: SparseWork) -> None:
        choice, reduced = self._choices[name], work.reduced
        if choice.stage is Stage.TRY:
            self._spans_s[name].append(work.span_s)
        learns = choice.stage is Stage.LEARN
        seen = Seen(
            reduced.n_touched,
            reduced.n_hot,
            len(reduced.rows),
            [indices.numpy() for indices in reduced.by_rank] if learns else (),
        )
        choice.note(seen)
        means.telling.note(name, seen, choice)

    def _notice_a_lost_aggregator(self, means: _Means) -> None:
        """It is lost for all ranks in the same iteration, or for none."""
        lanes = means.lanes
        if lanes.hot_sums is not None and not lanes.hot_sums.is_open:
            lanes.hot_sums.close()
            lanes.hot_sums = None
            for name, choice in self._choices.items():
                before = choice.plan
                choice.lose_aggregator()
                if choice.stage is Stage.KEEP and choice.plan != before:
                    means.telling.tell_again(name)

    def _decide(self, means: _Means) -> None:
        """Collective if some parameter has learned or tried enough, which all ranks see alike."""
        choices = [(name, self._choices[name]) for name in self._order]
        if tried := [(name, choice) for name, choice in choices if choice.has_tried]:
            self._settle(tried)
        if learned := {name: choice for name, choice in choices if choice.has_learned}:
            for name in learned:
                self._spans_s[name] = []
            asked = {name: choice for name, choice in learned.items() if choice.may_recall}
            recalled = self._memory.recall(
                {name: Learned(self._forms[name], choice.counts) for name, choice in asked.items()},
                aggregator=means.lanes.hot_sums is not None,
            )
            for name, plan in recalled.items():
                learned.pop(name).recall(plan)
            self._choose(means, learned)

    def _choose(self, means: _Means, learned: Mapping[str, SparseChoice]) -> None:
        """Collective where there are any: what each way would take follows from probes."""
        if learned:
            pace = measure(self._control, means.lanes, streams=means.streams)
            for name, choice in learned.items():
                choice.choose(partial(self._model, self._forms[name], pace))
                if choice.stage is Stage.KEEP:
                    self._memory.keep(name, self._forms[name], choice)
                    if self._control.rank == 0:
                        logger.info("sparse gradients of %s go by %s", name, choice.plan.describe())

    def _model(self, form: RowFormat, pace: Pace, counts: TouchCounts) -> VolumeModel:
        if form.dtype is not torch.float32:
            pace = replace(pace, aggregator=None)  # which adds nothing else
        return VolumeModel(shape_of(form), self._control.size, counts, pace)

    def _settle(self, tried: Sequence[tuple[str, SparseChoice]]) -> None:
        """Collective: the rank that comes last to a reduction has not waited for others, so the least time counts."""
        mine = np.array([span_s for name, _ in tried for span_s in self._spans_s[name]])
        least = self._control.minimum(mine).tolist()
        for name, choice in tried:
            count = len(self._spans_s[name])
            checked = choice.checks
            choice.settle(least[:count])
            least = least[count:]
            if choice.stage is Stage.KEEP and not checked:
                self._memory.keep(name, self._forms[name], choice)
            if self._control.rank == 0:
                self._say(name, choice)

    @staticmethod
    def _say(name: str, choice: SparseChoice) -> None:
        if choice.stage is not Stage.KEEP:
            logger.info("gathering rows of %s is clearly faster than %s", name, choice.candidates[0].describe())
            return
        others = ", ".join(plan.describe() for plan in choice.candidates if plan != choice.plan)
        logger.info("sparse gradients of %s go by %s; tried: %s", name, choice.plan.describe(), others)

    def close(self) -> None:
        """Not collective: ends all threads. Idempotent."""
        if not self._closed:
            self._closed = True
            self._memory.close()
            if self._means is not None:
                self._means.close()
