"""Reduces the gradients of some parameters, and of optimizers: what stands between autograd and the synchroniser.

An iteration of a reducer is in one of these phases; methods lead from one to another:

    ─ attach() ─▶ COMING ◀─ hooks note what comes, and look at it where a unit may be complete: then it leaves
                   │ │ │
                   │ │ └─ end_backward(), all have come ─┬─▶ REDUCED ─ finish() ──────────────────────▶ the next one
                   │ │ ◀─ this rank is needed elsewhere ─┤                                                    ▲
                   │ │                                   └─▶ GATED, by a forward gate: nobody has waited      │
                   │ │                                         │ put_off()                                    │
                   │ ├─ put_off(): zeros for what is missing ─▶ STEPPED ─ wait_for(), hand_out(), finish() ───┤
                   │ └─ finish(): zeros for what is missing, waits for the rest ──────────────────────────────┤
                   └─── fail_backward(), from any phase ─▶ FAILED ─ drop_failed(), finish() ──────────────────┘

COMING becomes REDUCED once every gradient has come: then nothing need be known of what the script does next. Otherwise
nobody knows whether the rest will come, and finish() waits. So a pass that brings no gradient of these parameters, as
`torch.autograd.grad`, changes nothing.

FAILED: a backward pass has raised. What has come does not count, and `.grad` stays as the script has it, unless the
script steps without having touched it. The iteration ends on all ranks alike, in the next pass or `finish`.

GATED and STEPPED need no message: all units have left on this rank, the other ranks' leave when they come to their
`step()`, and so whoever waits for one waits for nothing that a rank does after that.

The synchroniser knows only dense gradients that are ready or not; sparse ones go beside it, and what is thawed in
mid-training is reduced by itself once, until there is a hook on it.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import FrameType
from typing import Protocol

import numpy as np
import torch
import torch.utils.checkpoint

from sirtaki.autotune.sparse import SparseSummary
from sirtaki.autotune.trial import Arm
from sirtaki.comm.collectives.engine import RankSet
from sirtaki.comm.collectives.operations import Kind, Signature
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.watchdog import Wait
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.iteration import InFlight
from sirtaki.comm.gradients.synchroniser import EVERY, Synchroniser
from sirtaki.comm.modes import outside_changes
from sirtaki.engine.autograd import when_backward_ends
from sirtaki.errors import CommError, ConfigError, GradientError, MismatchError, NotInitializedError
from sirtaki.machine import free_in_forked_children, in_forked_children
from sirtaki.uncompiled import exclude_from_compilation, in_compiled_autograd

from ..job import Job
from ..participants import ActiveReducers, CurrentSetting, IterationCounter, WaitStage
from ..sparse_gradients import SparseReductions
from ..tuning.pipeline_target import PipelineTarget
from . import distributed_autograd
from .checks import Named, NanCheck, require_same_model, warn_of_different_values
from .hooks import expect, register_last

TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)

IN_CHECKPOINTS = (
    "a parameter has got a gradient twice in one backward pass, since reentrant checkpoints share it, each of which "
    "has a backward pass of its own: checkpoint(use_reentrant=False) avoids it, backward_passes_per_step does not"
)

NEVER_CAME = (
    "the update of this parameter was put off by overlap_forward, and its ranks parted before its gradient had come; "
    "call optimizer.finish() or hvd.shutdown() first"
)


IN_FLIGHT = "add_param_group() between backward() and step(): call step() or synchronize() first"

CLOSED = "this DistributedOptimizer was closed {reason}; make a new one: hvd.DistributedOptimizer(…)"


class Phase(Enum):
    """Where an iteration is; the drawing above shows what leads from one to another."""

    COMING = "some gradients may still come; units leave as they are full"
    GATED = "all have left in the backward pass, and whoever looks at a parameter waits"
    STEPPED = "step() has returned, and whoever looks at a parameter waits, and has it updated"
    REDUCED = "every .grad holds the reduced gradient"
    FAILED = "a backward pass has raised"


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """How gradients are reduced, whatever the model.

    Attributes:
        reduction: what is done to every gradient.
        sparse_as_dense: sparse gradients are made dense.
        groups: parameters that go together: none of a group leaves before all are there.
        unused_as_none: gradients that no rank has are None, whatever the settings say.
        arms: search techniques to tune with, None = the usual ones.
        overlaps: iterations may end in the next forward pass.
    """

    reduction: Reduction
    sparse_as_dense: bool = False
    groups: Sequence[Sequence[torch.Tensor]] = ()
    unused_as_none: bool = False
    arms: Sequence[Arm] | None = None
    overlaps: bool = False


class ForwardGate(Protocol):
    """Keeps everybody from gradients that are under way, and from parameters that wait for them."""

    def keep(self) -> bool:
        """All gradients have left in the backward pass; True if it keeps them, so that nobody waits there."""
        ...

    def settle(self) -> None:
        """Blocks until nothing is put off any more; not collective."""
        ...

    def close(self) -> None:
        """Nothing will be put off any more; not collective."""
        ...


class PassEnd:
    """Tells a reducer that the backward pass is over in which this was made, or has raised; keeps nothing alive."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer, self._over = weakref.ref(reducer), False
        when_backward_ends(self)

    @outside_changes
    def __call__(self) -> None:
        """Autograd's call."""
        self._over = True
        if (reducer := self._reducer()) is not None:
            reducer.end_backward()

    def __del__(self) -> None:
        if not self._over and (reducer := self._reducer()) is not None:
            reducer.fail_backward()


class KnownSparse:
    """Which gradients of one reducer are sparse, as far as all ranks know it: the others travel dense.

    Nobody knows it before the first backward pass, and a rank whose batch did not touch an embedding does not know it
    even then.

    Attributes:
        known: parameters of which all ranks know it, whether or not they are watched now.
        names: those that are watched.
        found: parameters of which this rank has seen it, and all ranks have not yet agreed.
        rows: what reduces sparse gradients; None as long as none is known.
    """

    def __init__(
        self,
        control: ControlPlane,
        open_rows: Callable[[], SparseReductions],
        *,
        known: Iterable[str] = (),
        as_dense: bool = False,
    ) -> None:
        """Starts nothing.

        Args:
            control: the ranks that take part.
            open_rows: collective; makes `rows`.
            known: see above.
            as_dense: sparse gradients are made dense.
        """
        self._control, self._open_rows, self._as_dense = control, open_rows, as_dense
        self.known, self.found, self.names = set(known), set[str](), set[str]()
        self.rows: SparseReductions | None = None
        self._params: Mapping[str, torch.Tensor] = {}

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        """Collective, between iterations: from now on, these parameters get gradients, by name."""
        self._params = params
        self.names = self.known & params.keys()
        self.found.clear()
        if self.names and self.rows is None:
            self.rows = self._open_rows()
        if self.rows is not None:
            self.rows.watch({name: param for name, param in params.items() if name in self.names})

    def looks_new(self, name: str) -> bool:
        """Whether it would be news to other ranks that the gradient of this parameter is sparse."""
        return not self._as_dense and name not in self.names

    def as_it_travels(self, name: str) -> torch.Tensor:
        """The sparse gradient of a parameter, made dense, in `.grad`, too, unless all ranks expect a sparse one."""
        param = self._params[name]
        assert param.grad is not None
        if name in self.names:
            return param.grad
        if self.looks_new(name):
            self.found.add(name)
        param.grad = param.grad.to_dense()
        return param.grad

    def make_sparse(self, names: Iterable[str]) -> None:
        """Gradients of these parameters that have travelled dense are what the backward pass made them."""
        for name in names:
            param = self._params[name]
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)

    def agree(self) -> bool:
        """Collective: parameters whose gradient was sparse on any rank are known as such to all; True if any were."""
        names = list(self._params)
        anywhere = self._control.total(np.array([float(name in self.found) for name in names])) > 0
        fresh = {name for name, sparse in zip(names, anywhere, strict=True) if sparse}
        self.make_sparse(fresh)
        self.known |= fresh
        return bool(fresh)

    @property
    def summaries(self) -> list[SparseSummary]:
        """How the gradients travel whose way is decided; see `SparseReductions`."""
        return [] if self.rows is None else self.rows.summaries

    def close(self) -> None:
        """Not collective: ends all threads. Idempotent."""
        if self.rows is not None:
            self.rows.close()


class GradientReducer:
    """Keeps the gradients of some parameters equal on some of the ranks.

    It lives as long as an optimizer that uses it; hooks, job and watchdog know it by weak references.

    Attributes:
        key: the number of the ranks' process set and its own there, the same on all of these ranks.
        members: the ranks that take part, with their control plane.
        ranks: the same, by their rank among all.
        options: how gradients are reduced.
        named: its parameters with their names, frozen ones too; none once it is closed.
        hooked: those that wanted a gradient when hooks were made.
        passes: backward passes whose gradients are added up before they are reduced, of all parameters or of each.
        tuned: what has the dense gradients reduced; None if there are none.
        sparse: which of its gradients are sparse, and what reduces these.
        phase: where its iteration is.
        failed_in: the backward pass that has raised, by `ActiveReducers.n_begun`; None = none has in this iteration.
        progress: how far this rank is in its iterations.
        shared: several optimizers may use it; the same on all ranks.
        users: those optimizers of this rank that do.
        n_reduced: iterations in which gradients were reduced; a shared reducer may find nothing to reduce.
        gate: who may have the end of an iteration put off.
        closed: why it is closed; empty while it is open.
    """

    may_begin_apart = True
    """Whether nobody has made the parameters equal on all ranks, so that the first iteration compares them."""
    nodes_are_kept = False
    """Whether PyTorch itself keeps the AccumulateGrad nodes of the parameters."""
    undefined_are_zeros = False
    """Whether a gradient counts as computed that is None after the backward pass has led to its parameter, as zeros."""
    failed_in: int | None
    _ends_itself = False  # whether compiled autograd runs this pass

    def __init__(
        self,
        job: Job,
        members: RankSet,
        named: Sequence[Named],
        *,
        passes: int | Sequence[int],
        options: ReducerOptions,
        known_sparse: Iterable[str] = (),
    ) -> None:
        """Collective.

        Args:
            job: of this process.
            members: see above.
            named: the parameters with their names, frozen ones too, the same on all ranks.
            passes: see above.
            options: see above.
            known_sparse: parameters of which all ranks know that their gradients are sparse.
        """
        assert members.control is not None
        assert members.engine is not None
        self.closed, self._job, self._open, self._hooks = "", job, ExitStack(), ExitStack()
        self._looking, self._looked = free_in_forked_children(threading.RLock()), 0
        self._control, self._engine = members.control, members.engine
        self.members, self.ranks, self.passes, self.options = members, members.ranks, passes, options
        self.key = (members.number, next(job.serials[members.number]))
        self.progress = IterationCounter()
        self.shared, self.n_reduced = False, 0
        self.users: weakref.WeakSet[OptimizerGradients] = weakref.WeakSet()
        self.gate: weakref.ref[ForwardGate] | None = None
        settings = job.settings
        self._settings = replace(settings, unused_as_none=options.unused_as_none or settings.unused_as_none)
        self.sparse = KnownSparse(
            members.control,
            partial(
                SparseReductions,
                members.control,
                self._settings,
                options.reduction,
                prefix=f"optimizer.{self.key[1]}.",
            ),
            known=known_sparse,
            as_dense=options.sparse_as_dense,
        )
        self._nan_check = NanCheck(members.control) if settings.check_nan else None
        self._compared_values = not self.may_begin_apart
        # What belongs to it without leading back to it, since `__del__` hands it to another thread to be closed.
        self._open.callback(self.sparse.close)
        self._open.callback(self._hooks.close)
        job.disposal.start()
        exclude_from_compilation()
        self.attach(named)
        this = weakref.ref(self)
        wait, progress = partial(_current_wait, this), partial(_progress_of, this, job.participants)
        job.watchdog.watch(wait, progress)
        self._open.callback(job.watchdog.forget, wait, progress)
        self._open.callback(job.joining.forget, self.key)
        job.participants.add(self)
        in_forked_children(self, GradientReducer._leave_in_child)

    # ── its parameters ───────────────────────────────────────────────────────────────────────────────────────────

    @outside_changes
    def attach(self, named: Sequence[Named]) -> None:
        """Collective, between iterations: from now on, these are its parameters, frozen ones too."""
        self._unhook()
        self._control.reclaim()
        try:
            self._hook(named)
        except Exception:
            self.close("when its parameters changed, which failed")
            raise
        self._begin_iteration()

    def _unhook(self) -> None:
        self._hooks.close()
        self.named, self.hooked, self._frozen = list[Named](), list[Named](), list[torch.Tensor]()
        self._number_of = dict[int, int]()
        self.tuned: PipelineTarget | None = None
        self._sync: Synchroniser | None = None
        self._rows: SparseReductions | None = None  # where some of them have sparse gradients
        self._dense_index = dict[int, int]()
        self._group_sizes, self._group_of = list[int](), dict[int, int]()
        self._waiting: list[list[tuple[int, torch.Tensor, int]]] = []  # gradients of each group
        self._come, self._at_once = list[torch.Tensor](), list[Container[int]]([EVERY])

    def _hook(self, named: Sequence[Named]) -> None:
        """Collective; what it makes before it raises is closed with the reducer."""
        self.named, self.hooked = list(named), [item for item in named if item[1].requires_grad]
        self._frozen = [param for _, param in named if not param.requires_grad]
        require_same_model(self._control, self.hooked)
        self.sparse.watch(dict(self.hooked))
        self._rows = self.sparse.rows if self.sparse.names else None
        dense = [number for number, (name, _) in enumerate(self.hooked) if name not in self.sparse.names]
        if dense:
            self.tuned = PipelineTarget(
                self._control,
                self._settings,
                [self.hooked[number][1] for number in dense],
                [self.hooked[number][0] for number in dense],
                reduction=self.options.reduction,
                arms=self.options.arms,
                carried=None if self._job.elastic is None else self._job.elastic.tuning,
                overlaps=self.options.overlaps,
                rank=self._job.rank,
            )
            self._hooks.callback(self.tuned.close)
            self._sync = self.tuned.synchroniser
        self._dense_index = dict(zip(dense, range(len(dense)), strict=True))
        self._number_of = number_of = {id(param): number for number, (_, param) in enumerate(self.hooked)}
        groups = [[number_of[id(param)] for param in group if id(param) in number_of] for group in self.options.groups]
        self._group_sizes, self._waiting = [len(group) for group in groups], [[] for _ in groups]
        self._group_of = {number: place for place, group in enumerate(groups) for number in group}
        # Else gradients that come in the expected order can go to the synchroniser as they come.
        self._looks_at_each = bool(groups) or self._nan_check is not None or not self.all_dense or not dense
        hook = self._make_hook()
        for param in self._frozen:
            expect(param)
        for name, param in self.hooked:
            self._hooks.callback(register_last(name, param, hook, nodes_are_kept=self.nodes_are_kept))

    @property
    def all_dense(self) -> bool:
        """No parameter is known to have sparse gradients."""
        return len(self._dense_index) == len(self.hooked)

    @property
    def thawed(self) -> list[torch.Tensor]:
        """Parameters that want a gradient now, and have no hook yet."""
        return [param for param in self._frozen if param.requires_grad]

    def set_passes(self, passes: int | Sequence[int]) -> None:
        """From the next iteration on, gradients of `passes` backward passes are added up before they are reduced."""
        self.passes = passes
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        """Nothing has come."""
        # How many passes a gradient is wanted of still: of each, or of each that the synchroniser has not got yet.
        self._passes_left = None if isinstance(self.passes, int) else list(self.passes)
        self._passes_left_of_all = self.passes if isinstance(self.passes, int) else 0
        for waiting in self._waiting:
            waiting.clear()
        self._come.clear()
        self.phase, self.failed_in = Phase.COMING, None

    # ── a backward pass ──────────────────────────────────────────────────────────────────────────────────────────

    def _make_hook(self) -> Callable[[torch.Tensor], None]:
        # Garbage collection does not see what a hook holds, so it holds nothing that leads back to it.
        this, come, at_once = weakref.ref(self), self._come, self._at_once
        device = None if self._sync is None else self._sync.device

        def hook(param: torch.Tensor) -> None:
            """The hot path: most gradients are noted, and no more."""
            if come:
                come.append(param)
                if len(come) in at_once[0] and (reducer := this()) is not None:
                    reducer._look()
            elif (reducer := this()) is not None:
                reducer._begin_pass(param)

        if device is None or not device.streams:
            return hook

        def hook_on_streams(param: torch.Tensor) -> None:
            """As `hook`, for a device on which autograd may write each gradient on another stream."""
            device.notice_stream()
            hook(param)

        return hook_on_streams

    def _begin_pass(self, param: torch.Tensor) -> None:
        """The first gradient of a backward pass has come, of `param`."""
        if self.closed or not self.begin_backward():
            return
        if id(param) in self._number_of:  # hooks may have been made anew meanwhile, with other parameters
            at_once: Container[int] = EVERY
            self._looked = 0
            if self._passes_left is None and self._passes_left_of_all > 1:
                at_once = ()
            elif self._passes_left is None and not self._looks_at_each:
                assert self._sync is not None
                at_once = self._sync.begin_pass()
            self._at_once[0] = at_once = (len(self.hooked),) if self._ends_itself else at_once
            self._come.append(param)
            if 1 in at_once:
                self._look()

    @outside_changes
    def _look(self) -> None:
        """Launch units that are complete. Compiled autograd calls nothing at the end of a pass, so end it here."""
        self._process_ready()
        if self._ends_itself and len(self._come) >= len(self.hooked):
            self._ends_itself = False
            self.end_backward()

    def _process_ready(self) -> None:
        """Launch units that the gradients since the last call complete, or count these gradients."""
        with self._looking:  # autograd computes the gradients of several devices in a thread for each
            new, self._looked = self._come[self._looked :], len(self._come)
            if self._passes_left is None:
                if self._passes_left_of_all > 1:
                    if len(new) == len(self.hooked) and set(map(id, new)) == self._number_of.keys():
                        self._passes_left_of_all -= 1
                        return
                elif not self._looks_at_each and self._sync is not None and self._sync.come(new):
                    return
                self._passes_left = self._counted()
            for param in new:
                self._count(self._number_of[id(param)], self._passes_left)

    @property
    def too_often(self) -> str:
        """What is wrong where a gradient comes that is not wanted any more."""
        return IN_CHECKPOINTS if _in_reentrant_checkpoint() else TOO_OFTEN

    def _counted(self) -> list[int]:
        """Of how many backward passes a gradient of each parameter is wanted still."""
        if self._passes_left is not None:
            return self._passes_left
        left = [self._passes_left_of_all] * len(self.hooked)
        if self._sync is not None and self._sync.pending:
            left = [0] * len(self.hooked)
            for number in self._sync.missing:  # no parameter has sparse gradients, so that both count alike
                left[number] = self._passes_left_of_all
        return left

    def _count(self, number: int, left: list[int]) -> None:
        """A gradient has come: of the last pass that is wanted it leaves."""
        if left[number] != 1:
            if left[number] < 1:
                raise AssertionError(self.too_often)
            left[number] -= 1
            return
        name, param = self.hooked[number]
        gradient = param.grad
        if gradient is None:  # a double backward computes none for a bias, or a hook of the user's has set it to None
            if not self.undefined_are_zeros or number not in self._dense_index:
                return
            param.grad = gradient = torch.zeros_like(param)
        left[number] = 0
        if self._nan_check is not None:
            self._nan_check.look(name, gradient)
        if gradient.is_sparse:
            gradient = self._as_it_travels(name)
        place = self._group_of.get(number)
        waiting = [] if place is None else self._waiting[place]
        waiting.append((number, gradient, gradient._version))
        if place is None or len(waiting) == self._group_sizes[place]:
            self._leave(waiting)

    def begin_backward(self) -> bool:
        """A backward pass begins; False if its gradients do not count. Collective if the one before has raised."""
        if self.phase is not Phase.COMING:
            self.drain()
            if self.failed_in is not None:
                self._job.participants.drop_failed(self.failed_in)
        self._job.participants.n_begun += 1
        self._ends_itself = in_compiled_autograd()
        if not self._ends_itself:
            PassEnd(self)
        return bool(self.named)

    def _leave(self, come: list[tuple[int, torch.Tensor, int]]) -> None:
        for number, gradient, version in come:
            if (index := self._dense_index.get(number)) is None:
                assert self._rows is not None
                self._rows.start(self.hooked[number][0], gradient, version)
            else:
                assert self._sync is not None
                self._sync.ready(index, gradient, version)
        come.clear()

    def _as_it_travels(self, name: str) -> torch.Tensor:
        """The sparse gradient of a parameter, made dense, in `.grad`, too, unless all ranks expect a sparse one."""
        if self._sync is not None and self.sparse.looks_new(name) and not self._sync.profiling:
            self._sync.profile_again()  # the ranks agree on it then
        return self.sparse.as_it_travels(name)

    def _put_in_missing(self) -> None:
        """Gradients leave whose group will not be complete; those that did not come are made what they travel as."""
        for waiting in self._waiting:
            self._leave(waiting)
        for left, (name, param) in zip(self._counted(), self.hooked, strict=True):
            if left and param.grad is not None and param.grad.is_sparse and param.requires_grad:
                self._as_it_travels(name)

    def end_backward(self) -> None:
        """A backward pass is over: dense gradients that have all come are reduced now, then sparse ones."""
        try:
            self._process_ready()
        except BaseException:
            self.fail_backward()
            raise
        self._come.clear()
        dense_come, rows = self._sync is not None and self._sync.can_reduce, self._rows
        if not (dense_come or (rows is not None and self._can_reduce_sparse(rows))):
            if self._sync is not None:
                self._sync.catch_up()
            return
        for other in self._job.participants:  # for which other ranks may wait first
            if other is not self:
                other.flush()
        self._job.joining.announce(self, WaitStage.REDUCE)
        if self.gate is not None and self.can_put_off and (gate := self.gate()) is not None:
            self.flush()
            if gate.keep():
                self.phase = Phase.GATED
                return
        self.reduce()
        if self._sync is not None and self._sync.problem:
            self.finish()  # which raises: what comes next is the next iteration, as on the other ranks

    def _can_reduce_sparse(self, rows: SparseReductions) -> bool:
        """All dense gradients of this iteration were reduced before, and all sparse ones have come."""
        done = self._sync is None or self._sync.complete
        return rows.pending and done and not (rows.missing or self.phase is Phase.REDUCED)

    def reduce(self) -> None:
        """Blocks until what has come is reduced, unless this rank is needed elsewhere.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        sync, rows, interrupted = self._sync, self._rows, partial(self._job.blocked.must_stop_waiting, self)
        with self.progress.waits(WaitStage.REDUCE):
            if self.phase is Phase.GATED:
                self.phase = Phase.COMING
            if sync is not None and not sync.complete and not sync.reduce(interrupted):
                return
            if rows is None or (not rows.missing and rows.reduce(interrupted)):
                self.phase = Phase.REDUCED
            if sync is not None and sync.profiling:
                self.sparse.make_sparse(self.sparse.found)

    def fail_backward(self) -> None:
        """A backward pass has raised, wherever that was."""
        self._come.clear()
        self.fail()
        for user in self.users:  # whose other parts may have gradients of passes before this one
            user.fail()

    def fail(self) -> None:
        """What has come does not count; `.grad` leaves the buffers, in which gradients are on their way."""
        if self.closed:
            return
        if self.phase is not Phase.FAILED:
            self.phase = Phase.FAILED
            self._detach()
            self._failed_with = [(param, param.grad, _version(param.grad)) for _, param in self.hooked]
        self.failed_in = self._job.participants.n_begun

    def _detach(self) -> None:
        if self._sync is not None:
            self._sync.detach()

    def drop_failed(self) -> None:
        """Collective if a pass has raised in this iteration: ends it, and leaves `.grad` as it is."""
        if self.phase is not Phase.FAILED:
            return
        self.phase, self.failed_in = Phase.COMING, None
        self._detach()
        kept = [(param, param.grad) for param, _, _ in self._failed_with]
        for param, _ in kept:
            param.grad = None
        self.finish()
        for param, gradient in kept:
            param.grad = gradient

    # ── the end of an iteration that comes late ──────────────────────────────────────────────────────────────────

    @property
    def can_put_off(self) -> bool:
        """Nothing in the end of this iteration needs the other ranks, once all gradients have left."""
        tuned = self.tuned
        if tuned is None or self.shared or self.phase is Phase.FAILED or not self.all_dense or self.sparse.found:
            return False
        return tuned.can_put_off and self._compared_values and self._nan_check is None and not self.thawed

    @property
    def written(self) -> bool:
        """This rank has written gradients in place before they are reduced, so that `finish` will raise."""
        return self._sync is not None and self._sync.written

    @outside_changes
    def put_off(self) -> None:
        """If it `can_put_off`: this rank takes part in the end of the iteration, and waits for nobody."""
        assert self._sync is not None
        self.phase = Phase.STEPPED
        self._job.joining.announce(self, WaitStage.FINISH)
        self._put_in_missing()
        self._sync.flush()

    @outside_changes
    def wait_for(self, number: int) -> list[int]:
        """Blocks until the gradient of a parameter is reduced that has left.

        Returns:
            All parameters that are with it, by number among those that are hooked; none if this rank is needed
            elsewhere, before `step()`: nothing is kept any more then.

        Raises:
            CommError: the reduction failed, or the job did.
        """
        if self._sync is None:
            raise CommError(NEVER_CAME)
        late = self.phase is Phase.STEPPED
        with self.progress.waits(WaitStage.FINISH if late else WaitStage.REDUCE):
            numbers = self._sync.wait_for(number, None if late else partial(self._job.blocked.must_stop_waiting, self))
        if not numbers:
            self.phase = Phase.COMING
        return numbers

    def hand_out(self, numbers: Sequence[int]) -> None:
        """What `wait_for` has returned: each `.grad` holds the reduced gradient from now on."""
        assert self._sync is not None
        self._sync.hand_out_some(numbers)

    def drain(self) -> None:
        """Blocks until no end of an iteration is put off any more; not collective."""
        if self.gate is not None and (gate := self.gate()) is not None:
            gate.settle()

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @outside_changes
    def finish(self, *, due: bool = True, joined: bool = False) -> None:
        """Collective: blocks until all gradients are reduced; afterwards `.grad` holds the result.

        Args:
            due: of a shared one: no other optimizer has had gradients reduced since this one last had. If it is not
                due on any rank, and no gradients have come, the reduced gradients are in place.
            joined: this rank has no data any more and takes part with zeros.

        Raises:
            GradientError: a gradient was written while it was being reduced; the iteration has ended all the same.
        """
        if not joined:
            if not (self.hooked or self.thawed):
                return
            if self.phase is Phase.FAILED and any(
                param.grad is not left or _version(left) != version for param, left, version in self._failed_with
            ):
                self.drop_failed()
            if not self.begun:
                distributed_autograd.require_gradients_outside(self.hooked)
            self._job.joining.announce(self, WaitStage.FINISH)
        late, problem = self.phase is Phase.STEPPED, ""
        if late:
            self.phase = Phase.COMING
        if not self.shared or self._is_due(here=self.begun or (due and not joined)):
            with self.progress.waits(WaitStage.FINISH):
                changed = self._reduce_all(joined=joined, late=late)
                problem = "" if self._sync is None else self._sync.problem
                if changed:
                    self.attach(self.named)
                else:
                    self._begin_iteration()
            self.n_reduced += 1
        self.progress.finished += 1
        self._job.joining.iteration_ended(self)
        if problem:
            raise GradientError(problem)

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that the other ranks have not begun to end."""
        if self.closed:
            return
        if self._rows is not None:
            self._rows.put_in_missing(joined=True)
        if self._sync is not None:
            self._sync.contribute_zeros()

    def _is_due(self, *, here: bool) -> bool:
        """Collective, while it is shared: whether any rank has something to reduce; ends that if one user is left.

        Args:
            here: this rank has, or cannot know.
        """
        with self.progress.waits(WaitStage.ASK):
            anywhere, n_users = self._control.maximum(np.array([float(here), float(len(self.users))]))
        self.shared = bool(n_users > 1)
        return bool(anywhere > 0)

    def _reduce_all(self, *, joined: bool, late: bool) -> bool:
        """Collective: True if hooks are to be made anew after this iteration.

        Args:
            joined: this rank has no data any more and takes part with zeros.
            late: it was put off, and what was thawed since belongs to the next iteration.
        """
        control, sync, rows = self._control, self._sync, self._rows
        thawed = self.thawed if self._frozen and not late else []
        if self._nan_check is not None:
            self._nan_check.finish(self._counted(), self.hooked)
        if sync is None or self._looks_at_each or (not sync.complete and sync.missing):
            self._put_in_missing()
        if rows is not None and self.phase is not Phase.REDUCED:
            rows.put_in_missing(joined=joined)
        profiling = sync is not None and sync.profiling
        if self.tuned is not None:
            self.tuned.finish(joined=joined)
        if rows is not None:
            rows.reduce(None)
        found_sparse = profiling and self.sparse.agree()
        if rows is not None:
            rows.end_iteration()
        if thawed:
            self._reduce_thawed(thawed)
        if not self._compared_values:  # and nothing is updated
            wanting = [item for item in self.named if item[1].requires_grad]
            self._compared_values = bool(wanting)
            warn_of_different_values(control, wanting)
        if joined:
            for param in [*(param for _, param in self.hooked), *thawed]:
                param.grad = None  # the others' gradients must not add to the next ones of this rank
        return found_sparse or bool(thawed)

    @torch.no_grad()
    def _reduce_thawed(self, params: Sequence[torch.Tensor]) -> None:
        """Collective: reduces gradients of parameters that have no hook yet; afterwards they are dense."""
        prefix = f"optimizer.{self.key[1]}.thawed"
        computed = torch.tensor([param.grad is not None for param in params], dtype=torch.float32, device="cpu")
        wanted = self._sum(computed, f"{prefix}.computed", Reduction()).tolist()
        for number, (param, anywhere) in enumerate(zip(params, wanted, strict=True)):
            if not anywhere and self._settings.unused_as_none:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            elif param.grad.is_sparse:
                param.grad = param.grad.to_dense()
            param.grad.copy_(self._sum(param.grad, f"{prefix}.{number}", self.options.reduction))

    def _sum(self, tensor: torch.Tensor, name: str, reduction: Reduction) -> torch.Tensor:
        signature = Signature.of(
            [tensor],
            name=name,
            kind=Kind.ALLREDUCE,
            op=reduction.op.value,
            factors=(reduction.prescale, reduction.postscale),
            by_all=True,
        )
        work = self._engine.submit(signature, [tensor])
        self._engine.finish(work)
        return work.results[0]

    def drop_accumulated(self) -> None:
        """Gradients of fewer backward passes than are added up before they are reduced do not count."""
        if self._passes_left is None and self._passes_left_of_all == self.passes:
            return
        if self._accumulated and not self.pending:
            for (_, param), wanted, left in zip(self.hooked, self._wanted, self._counted(), strict=True):
                if left != wanted:
                    param.grad = None
            self._begin_iteration()

    @property
    def _wanted(self) -> list[int]:
        return [self.passes] * len(self.hooked) if isinstance(self.passes, int) else list(self.passes)

    @property
    def _accumulated(self) -> bool:
        """Some gradient has come of some backward pass of this iteration."""
        return (
            self._passes_left_of_all != self.passes if self._passes_left is None else self._passes_left != self._wanted
        )

    # ── what others ask ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""
        return (self._sync is not None and self._sync.pending) or (self._rows is not None and self._rows.pending)

    @property
    def begun(self) -> bool:
        """Gradients have come on this rank that no finished iteration has reduced."""
        return self.pending or self._accumulated or any(param.grad is not None for param in self.thawed)

    @property
    def in_flight(self) -> InFlight | None:
        """What a device may still be busy with; None where nothing is reduced."""
        return None if self._sync is None else self._sync.in_flight

    @property
    def busy(self) -> bool:
        """A device is not done with iterations that have ended on the host."""
        return self._sync is not None and self._sync.in_flight.busy

    @property
    def running(self) -> CurrentSetting | None:
        """Which iteration and setting its dense gradients are at; None without any."""
        if (tuned := self.tuned) is None:
            return None
        return CurrentSetting(
            iteration=tuned.synchroniser.iteration, setting=tuned.knobs.describe(), tuning=tuned.tuning
        )

    @property
    def given(self) -> int:
        """Iterations to which this rank has given all its gradients."""
        missing = self._sync is not None and bool(self._sync.missing_names())
        return self.progress.given(missing=missing or (self._rows is not None and bool(self._rows.missing)))

    def flush(self) -> None:
        """Sends what has not left if all dense gradients of this iteration have come; waits for nobody."""
        if self._sync is not None and self._sync.can_reduce:
            self._sync.flush()

    def remember(self) -> None:
        """Stores what an unfinished warm-up has found."""
        if (tuned := self.tuned) is not None:
            tuned.remember()

    # ── its own end ──────────────────────────────────────────────────────────────────────────────────────────────

    def close(self, reason: str) -> None:
        """Not collective: gradients are not reduced any more, because of `reason`. Idempotent."""
        if not self.closed:
            self.closed = reason
            if self.gate is not None and (gate := self.gate()) is not None:
                gate.close()
            self._job.participants.remove(self)
            self._open.close()
            self._unhook()
            self._passes_left, self._waiting = [], []

    def _leave_in_child(self) -> None:
        """In a forked child: backward passes compute local gradients, and a step of the optimizer raises."""
        self.closed = "in this process, which was forked from a rank of the job and is none itself"
        self._come.clear()

    def __del__(self) -> None:
        # In any thread, at any time: what must be closed is handed over.
        if not self.closed:
            self._job.disposal.put(self._open.close)


def _in_reentrant_checkpoint() -> bool:
    """The backward pass that calls this is one that a checkpoint runs within another."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.utils.checkpoint.CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _current_wait(this: weakref.ref[GradientReducer]) -> Wait | None:
    """For the watchdog's thread: what this rank waits for.

    Raises:
        CommError: a transport has found out by itself that it will never come.
    """
    if (reducer := this()) is None:
        return None
    waiting, iteration, tuned = reducer.progress.waiting, 0, reducer.tuned
    since_s = None if waiting is None else waiting[1]
    if tuned is not None:
        tuned.check()
        iteration = tuned.synchroniser.iteration
        if since_s is None and (stalled := tuned.synchroniser.in_flight.stalled()):
            iteration, since_s = stalled
    return None if since_s is None else Wait(what=f"the gradients of iteration {iteration}", since_s=since_s)


def _progress_of(this: weakref.ref[GradientReducer], participants: ActiveReducers) -> str:
    """For the other ranks' watchdogs: how far this rank is; nothing if a later optimizer has taken over."""
    reducer = this()
    tuned = None if reducer is None else reducer.tuned
    if reducer is None or tuned is None:
        return ""
    sync = tuned.synchroniser
    if not (reducer.pending or reducer.progress.waiting or reducer in participants.in_use):
        return ""
    missing = sync.missing_names()
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    waiting = sync.in_flight.unreduced_unit()
    return "".join(
        [
            f"is in iteration {sync.iteration}",
            f", has not computed {shown}" if missing else "",
            f", its GPU waits for {waiting}" if waiting else "",
        ]
    )


_Owners = tuple[list[int | None], dict[int, str], list[int]]
"""What one rank knows of the parameters of a new optimizer: the serial of the reducer that each belongs to, None = to
none of this set of ranks that is alive; why one cannot be shared, by the serial of its reducer, -1 = of another set of
ranks; and the serials of reducers with gradients under way."""


class OptimizerGradients:
    """Keeps the gradients of one optimizer equal on some of the ranks; others may have some of its parameters, too.

    Every parameter belongs to one reducer. An optimizer uses as many reducers as it takes to cover its parameters: when
    a new optimizer has some of the parameters of an older one, these are split off into a reducer that both use.
    Whichever steps first finishes its iteration, and the other finds the reduced gradients in place.

    Optimizers are garbage-collected at different times on different ranks. What is gone on one rank can't be used by a
    new optimizer on the others, and is closed there when the new one is made.
    """

    def __init__(
        self, job: Job, members: RankSet, named: Sequence[Named], *, passes: int, options: ReducerOptions
    ) -> None:
        """Collective over the members.

        Args:
            job: of this process.
            members: the ranks that take part, with their control plane.
            named: all parameters of the optimizer with their names, frozen ones too, the same on all ranks.
            passes: backward passes whose gradients are added up before they are reduced.
            options: how to reduce.

        Raises:
            ConfigError: on all ranks, if a parameter belongs to another optimizer whose options differ.
            MismatchError: on all ranks, if their models differ.
        """
        self._job, self._members, self._passes, self._options = job, members, passes, options
        # Reducers in use, in the order in which they finish, each with its `n_reduced` when this last used the result.
        self._seen: dict[GradientReducer, int] = {}
        self._claim(named)

    # ── which reducers ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def reducers(self) -> list[GradientReducer]:
        """Those in use, in the order in which they finish; the same on all ranks."""
        return list(self._seen)

    def _use(self, reducer: GradientReducer, seen: int) -> None:
        reducer.users.add(self)
        self._seen = dict(sorted([*self._seen.items(), (reducer, seen)], key=lambda item: item[0].key[1]))

    def use_part(self, part: GradientReducer, *, of: GradientReducer) -> None:
        """Some of the parameters of a reducer that this one uses belong to `part` from now on."""
        self._use(part, self._seen[of])

    def _claim(self, named: Sequence[Named]) -> None:
        """Collective: from now on, these parameters too."""
        job, members = self._job, self._members
        assert members.control is not None
        job.participants.drain()
        if reducers_of(job):
            gc.collect()  # torch's optimizers are parts of reference cycles, so that they are collected some time later
        job.disposal.drain()
        members.control.reclaim()
        owners, in_flight = self._agree_on_owners(named)
        lenders = {reducer.key[1]: reducer for reducer in reducers_of(job) if reducer.members is members}
        for serial in sorted({owner for owner in owners if owner is not None}):
            lender = lenders[serial]
            if serial in in_flight:
                lender.finish()
                lender.shared = True  # until its optimizer has seen that this iteration is finished
            wanted = {id(param) for (_, param), owner in zip(named, owners, strict=True) if owner == serial}
            if len(wanted) < len(lender.named):
                lender = _split(job, lender, wanted)
            lender.shared = True
            self._use(lender, lender.n_reduced)
        free = [item for item, owner in zip(named, owners, strict=True) if owner is None]
        home = next((reducer for reducer in self.reducers if not reducer.shared), None)
        if free and home is not None:
            home.attach([*home.named, *free])
        elif free or not self._seen:
            reducer = GradientReducer(job, members, free, passes=self._passes, options=self._options)
            self._use(reducer, reducer.n_reduced)

    def _agree_on_owners(self, named: Sequence[Named]) -> tuple[list[int | None], set[int]]:
        """Collective: the serial of the reducer that each parameter belongs to, None = it is free.

        And the serials of reducers with gradients under way on some rank.
        """
        members = self._members
        assert members.control is not None
        said: list[_Owners] = members.control.all_gather(self._owners(named))
        owners, gone = _agreed([serials for serials, _, _ in said], [name for name, _ in named])
        for reducer in reducers_of(self._job):
            if reducer.members is members and reducer.key[1] in gone:
                reducer.close("since another rank has dropped it, and a new one takes its parameters")
        for _, conflicts, _ in said:
            for serial, conflict in conflicts.items():
                if serial not in gone:
                    raise ConfigError(conflict)
        return owners, {serial for _, _, in_flight in said for serial in in_flight}

    def _owners(self, named: Sequence[Named]) -> _Owners:
        """What this rank knows of these parameters."""
        reducers = reducers_of(self._job)
        owner_of = {id(param): reducer for reducer in reducers for _, param in reducer.named}
        serials: list[int | None] = []
        conflicts: dict[int, str] = {}
        for name, param in named:
            owner = owner_of.get(id(param))
            serials.append(owner.key[1] if owner is not None and owner.members is self._members else None)
            if owner is not None and (difference := self._difference(owner, param.dtype)):
                # Serials count within a set of ranks; what belongs to another set is always in the way.
                serial = owner.key[1] if owner.members is self._members else -1
                conflicts.setdefault(
                    serial,
                    f"{name} belongs to another DistributedOptimizer, which has {difference}: give both the same "
                    "options, or close() the other one before this one is made",
                )
        in_flight = [reducer.key[1] for reducer in reducers if reducer.members is self._members and reducer.begun]
        return serials, conflicts, in_flight

    def _difference(self, owner: GradientReducer, dtype: torch.dtype) -> str:
        """What of another reducer's options a parameter that is in both can't have; empty if nothing."""
        if owner.members is not self._members:
            return f"a process set of ranks {list(owner.members.ranks)} (here: {list(self._members.ranks)})"
        if owner.passes != self._passes:
            return f"backward_passes_per_step={owner.passes} (here: {self._passes})"
        mine, other = self._options, owner.options
        if mine.sparse_as_dense != other.sparse_as_dense:
            return f"sparse_as_dense={other.sparse_as_dense} (here: {mine.sparse_as_dense})"
        if (
            mine.reduction.travels_as(dtype) != other.reduction.travels_as(dtype)
            or mine.reduction.compression != other.reduction.compression
        ):
            return "another compression"
        if replace(mine.reduction, wire_dtype=()) != replace(other.reduction, wire_dtype=()):
            return "another op or gradient_predivide_factor"
        return ""

    def extend(self, named: Sequence[Named]) -> None:
        """Collective: from now on, these parameters too.

        Raises:
            RuntimeError: gradients are being reduced.
        """
        if self.pending:
            raise RuntimeError(IN_FLIGHT)
        self._require_open()
        self._claim(named)

    # ── iterations ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""
        return any(reducer.pending for reducer in self._seen)

    def fail(self) -> None:
        """A backward pass has raised that computed gradients of this optimizer: what has come does not count."""
        for reducer in self._seen:
            reducer.fail()

    def drop(self) -> bool:
        """Before gradients are zeroed: what was not stepped does not count.

        Collective where a backward pass has raised, or where `step()` was left out.

        Returns:
            False if gradients are being reduced, since some did not come in the backward pass.
        """
        failed = reduced = unreduced = False
        for reducer in self._seen:
            failed |= reducer.phase is Phase.FAILED
            if reducer.pending:
                reduced |= reducer.phase is Phase.REDUCED
                unreduced |= reducer.phase is not Phase.REDUCED
        if failed:
            for reducer in self._seen:
                reducer.drop_failed()
                self._seen[reducer] = reducer.n_reduced
        elif unreduced:
            return False
        elif reduced:
            self.finish()
        for reducer in self._seen:
            reducer.drop_accumulated()
        return True

    def set_passes(self, passes: int) -> None:
        """From the next iteration on, gradients of `passes` backward passes are added up before they are reduced.

        Those of parameters that other optimizers have, too, are so for these as well.
        """
        self._passes = passes
        for reducer in self._seen:
            reducer.set_passes(passes)

    def finish(self) -> None:
        """Collective: blocks until all gradients are reduced; afterwards `.grad` holds the result.

        Raises:
            NotInitializedError: it is closed.
            GradientError: a gradient was written while it was being reduced; the iteration has ended all the same.
        """
        self._require_open()
        problem: GradientError | None = None
        for reducer, seen in self._seen.items():
            try:
                reducer.finish(due=reducer.n_reduced == seen)
            except GradientError as err:
                problem = err
            self._seen[reducer] = reducer.n_reduced
        if problem is not None:
            raise problem

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _require_open(self) -> None:
        for reducer in self._seen:
            if reducer.closed:
                raise NotInitializedError(CLOSED.format(reason=reducer.closed))

    def close(self) -> None:
        """Not collective: this optimizer's gradients are not reduced any more. Idempotent."""
        seen, self._seen = self._seen, {}
        for reducer in seen:
            reducer.users.discard(self)
            if not reducer.users:
                reducer.close("by close()")


def reducers_of(job: Job) -> list[GradientReducer]:
    """Those of a job that are in use or not collected yet, the oldest first."""
    return [participant for participant in job.participants if isinstance(participant, GradientReducer)]


def _agreed(said: Sequence[Sequence[int | None]], names: Sequence[str]) -> tuple[list[int | None], set[int]]:
    """What holds on all ranks: each parameter's owner, None = it is free; and the owners that are gone on some rank.

    Raises:
        MismatchError: the ranks wrap different parameters of other optimizers.
    """
    if len({len(serials) for serials in said}) > 1:  # different models, which the new reducer finds out
        return [None] * len(names), set()
    by_param = [set(owners) for owners in zip(*said, strict=True)]
    for name, owners in zip(names, by_param, strict=True):
        if len(owners - {None}) > 1:
            raise MismatchError(f"{name} belongs to different optimizers on different ranks: wrap the same parameters")
    gone = {owner for owners in by_param if None in owners for owner in owners if owner is not None}
    agreed = [next(iter(owners)) if len(owners) == 1 else None for owners in by_param]
    return [None if owner in gone else owner for owner in agreed], gone


def _split(job: Job, lender: GradientReducer, wanted: set[int]) -> GradientReducer:
    """Collective: gives these parameters of `lender`, by id, to a new reducer that all its users use, too."""
    lent = [(name, param) for name, param in lender.named if id(param) in wanted]
    lender.attach([(name, param) for name, param in lender.named if id(param) not in wanted])
    reducer = GradientReducer(
        job,
        lender.members,
        lent,
        passes=lender.passes,
        options=lender.options,
        known_sparse=lender.sparse.known,
    )
    reducer.n_reduced = lender.n_reduced
    for user in list(lender.users):
        user.use_part(reducer, of=lender)
    return reducer
