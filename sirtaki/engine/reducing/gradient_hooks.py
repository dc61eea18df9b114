"""Hooks on parameters that have their gradients reduced: the autograd side of `GradientPipeline`.

`GradientHooks.state` is the state of an iteration, sparse gradients included:

    COLLECTING ─ end_backward(), all gradients are ready ─┬─▶ REDUCED ─ finish() ─▶ the next iteration
      │ │ ◀─ this rank is needed elsewhere ───────────────┤
      │ │                                                 └─▶ LAUNCHED, if a forward gate holds the parameters
      │ │                                                       │ defer()
      │ ├─ defer(): missing gradients are filled in ──────────▶ DEFERRED ─ wait_for(), finish() ─▶ the next iteration
      │ └─ finish(): missing gradients are filled in, and the training thread waits ────────────▶ the next iteration
      └─── fail_backward(), from any state ─▶ FAILED ─ drop(), finish() ─▶ the next iteration

An iteration becomes REDUCED when every gradient is ready: then what the script does next does not matter. Otherwise
nothing tells whether the other gradients will come, and `finish` waits. So a pass that computes no gradient of these
parameters, such as `torch.autograd.grad`, changes nothing.

If a backward pass raises, its gradients do not count, and `.grad` stays as the script has it, unless the script steps
without having changed it. The iteration ends on all ranks alike, in the next pass or in `finish`.

LAUNCHED and DEFERRED need no message. All units are launched on this rank, and on the other ranks at the latest in
their `step()`. So a wait for a unit depends on nothing that another rank does after that.

The pipeline knows dense gradients only. Sparse gradients are reduced beside it. The gradient of a parameter that was
unfrozen in mid-training is reduced by itself once, until the parameter has a hook.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Protocol

import numpy as np
import torch
import torch.utils.checkpoint

from sirtaki.autotune.trial import Arm
from sirtaki.comm.collectives.engine import RankSet
from sirtaki.comm.collectives.operations import CollectiveKind, Signature
from sirtaki.comm.control.watchdog import PendingWait
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.pipeline import EVERY, GradientPipeline
from sirtaki.comm.gradients.state import IterationState
from sirtaki.comm.modes import outside_changes
from sirtaki.engine.autograd import when_backward_ends
from sirtaki.errors import CommError, GradientError
from sirtaki.machine import free_in_forked_children, in_forked_children
from sirtaki.uncompiled import exclude_from_compilation, in_compiled_autograd

from ..job import Job
from ..participants import ActiveReducers, IterationCounter, WaitStage
from ..sparse_gradients import SparseReductions
from ..tuning.pipeline_target import PipelineTarget
from . import distributed_autograd
from .checks import Named, NanCheck, require_same_model, warn_of_different_values
from .hooks import expect, register_last
from .sparse_names import KnownSparse

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


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """Options of the reduction that do not depend on the model.

    Attributes:
        reduction: what is done to every gradient.
        sparse_as_dense: sparse gradients are made dense.
        groups: parameters whose gradients are launched together, once all of a group are ready.
        unused_as_none: gradients that no rank has computed are None, whatever the settings say.
        arms: search techniques for tuning, None = the usual ones.
        overlaps: iterations may end in the next forward pass.
    """

    reduction: Reduction
    sparse_as_dense: bool = False
    groups: Sequence[Sequence[torch.Tensor]] = ()
    unused_as_none: bool = False
    arms: Sequence[Arm] | None = None
    overlaps: bool = False


class ForwardGate(Protocol):
    """Holds parameters and gradients until their units are reduced. None of its methods is collective."""

    def keep(self) -> bool:
        """Hold all parameters, once all units are launched; False if the training thread must wait instead."""
        ...

    def drain(self) -> None:
        """Block until no end of an iteration is deferred any more."""
        ...

    def close(self) -> None:
        """Defer nothing any more."""
        ...


class GradientUser(Protocol):
    """An optimizer, which may use several `GradientHooks`."""

    def fail(self) -> None:
        """Drop the gradients of a backward pass that has raised."""
        ...

    def use_part(self, part: GradientHooks, *, of: GradientHooks) -> None:
        """Use `part`, too, which has taken over some of the parameters of `of`."""
        ...


class PassEnd:
    """A callback at the end of the backward pass in which it is made, which also notices if the pass raises."""

    def __init__(self, hooks: GradientHooks) -> None:
        self._hooks, self._over = weakref.ref(hooks), False
        when_backward_ends(self)

    @outside_changes
    def __call__(self) -> None:
        """End the pass. Autograd calls this."""
        self._over = True
        if (hooks := self._hooks()) is not None:
            hooks.end_backward()

    def __del__(self) -> None:
        if not self._over and (hooks := self._hooks()) is not None:
            hooks.fail_backward()


class GradientHooks:
    """Hooks on some parameters, whose gradients become equal on some of the ranks.

    It lives as long as an optimizer that uses it. Hooks, job and watchdog have weak references to it.

    Attributes:
        key: number of the ranks' process set, and serial number in it; the same on all of these ranks.
        members: the participating ranks, with their control plane.
        ranks: the participating ranks, by their rank in the job.
        options: how gradients are reduced.
        named: the parameters with their names, frozen ones too; none once it is closed.
        hooked: those that required a gradient when the hooks were made.
        passes: backward passes whose gradients are accumulated before the reduction, of all parameters or of each.
        pipeline: reduces the dense gradients; None if there are none.
        tuning: tunes the pipeline, and ends its iterations; None if there are no dense gradients.
        sparse: which gradients are sparse, and what reduces them.
        state: state of the iteration.
        failed_in: the backward pass that has raised, by `ActiveReducers.n_begun`; None = none has in this iteration.
        progress: finished iterations, and what this rank waits for.
        shared: True if several optimizers may use these hooks; the same on all ranks.
        users: the optimizers of this rank that use these hooks.
        n_reduced: iterations in which gradients were reduced; a shared one may find nothing to reduce.
        gate: may have the end of an iteration deferred.
        closed: why it is closed; empty while it is open.
    """

    may_begin_apart = True
    """True if the parameters may differ between ranks, so that the first iteration compares them."""
    nodes_are_kept = False
    """True if PyTorch itself keeps the AccumulateGrad nodes of the parameters."""
    undefined_are_zeros = False
    """True if a gradient counts as zeros that is None after the backward pass has led to its parameter."""
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
        """Make the hooks and open the pipeline. Collective.

        Args:
            job: job of this process.
            members: participating ranks.
            named: parameters with their names, frozen ones too, the same on all ranks.
            passes: backward passes whose gradients are accumulated.
            options: how gradients are reduced.
            known_sparse: names of parameters whose gradients are sparse, as all ranks know.
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
        self.users: weakref.WeakSet[GradientUser] = weakref.WeakSet()
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
        # Closed by another thread after `__del__`, so that nothing in it may refer to these hooks.
        self._open.callback(self.sparse.close)
        self._open.callback(self._hooks.close)
        job.disposal.start()
        exclude_from_compilation()
        self.attach(named)
        this = weakref.ref(self)
        wait, progress = partial(_current_wait, this), partial(_progress_of, this, job.participants)
        job.watchdog.watch(wait, progress)
        self._open.callback(job.watchdog.unwatch, wait, progress)
        self._open.callback(job.joining.forget, self.key)
        job.participants.add(self)
        in_forked_children(self, GradientHooks._leave_in_child)

    # ── its parameters ───────────────────────────────────────────────────────────────────────────────────────────

    @outside_changes
    def attach(self, named: Sequence[Named]) -> None:
        """Replace the parameters, frozen ones included. Collective, between iterations."""
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
        self.tuning: PipelineTarget | None = None
        self.pipeline: GradientPipeline | None = None
        self._rows: SparseReductions | None = None  # if some parameters have sparse gradients
        self._dense_index = dict[int, int]()
        self._group_sizes, self._group_of = list[int](), dict[int, int]()
        self._waiting: list[list[tuple[int, torch.Tensor, int]]] = []  # gradients of each group
        self._come, self._at_once = list[torch.Tensor](), list[Container[int]]([EVERY])

    def _hook(self, named: Sequence[Named]) -> None:
        """Make hooks and pipeline. Collective. What it opens before it raises is closed by `close`."""
        self.named, self.hooked = list(named), [item for item in named if item[1].requires_grad]
        self._frozen = [param for _, param in named if not param.requires_grad]
        require_same_model(self._control, self.hooked)
        self.sparse.watch(dict(self.hooked))
        self._rows = self.sparse.rows if self.sparse.names else None
        dense = [number for number, (name, _) in enumerate(self.hooked) if name not in self.sparse.names]
        if dense:
            self.tuning = PipelineTarget(
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
            self._hooks.callback(self.tuning.close)
            self.pipeline = self.tuning.synchroniser
        self._dense_index = dict(zip(dense, range(len(dense)), strict=True))
        self._number_of = number_of = {id(param): number for number, (_, param) in enumerate(self.hooked)}
        groups = [[number_of[id(param)] for param in group if id(param) in number_of] for group in self.options.groups]
        self._group_sizes, self._waiting = [len(group) for group in groups], [[] for _ in groups]
        self._group_of = {number: place for place, group in enumerate(groups) for number in group}
        # Otherwise the pipeline takes gradients in the expected order without a look at each.
        self._looks_at_each = bool(groups) or self._nan_check is not None or not self.all_dense or not dense
        hook = self._make_hook()
        for param in self._frozen:
            expect(param)
        for name, param in self.hooked:
            self._hooks.callback(register_last(name, param, hook, nodes_are_kept=self.nodes_are_kept))

    @property
    def all_dense(self) -> bool:
        """True if no parameter is known to have sparse gradients."""
        return len(self._dense_index) == len(self.hooked)

    @property
    def _unfrozen(self) -> list[torch.Tensor]:
        """Parameters that require a gradient now, and have no hook yet."""
        return [param for param in self._frozen if param.requires_grad]

    def set_passes(self, passes: int | Sequence[int]) -> None:
        """Accumulate the gradients of `passes` backward passes before the reduction, from the next iteration on."""
        self.passes = passes
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        """Prepare the next iteration."""
        # Remaining passes: of each parameter, or of each whose gradient the pipeline has not got yet.
        self._passes_left = None if isinstance(self.passes, int) else list(self.passes)
        self._passes_left_of_all = self.passes if isinstance(self.passes, int) else 0
        for waiting in self._waiting:
            waiting.clear()
        self._come.clear()
        self.state, self.failed_in = IterationState.COLLECTING, None

    # ── a backward pass ──────────────────────────────────────────────────────────────────────────────────────────

    def _make_hook(self) -> Callable[[torch.Tensor], None]:
        # Garbage collection does not see what a hook holds, so a hook must not refer to its owner.
        this, come, at_once = weakref.ref(self), self._come, self._at_once
        device = None if self.pipeline is None else self.pipeline.device

        def hook(param: torch.Tensor) -> None:
            """Note a gradient. This is the hot path: most gradients need no more."""
            if come:
                come.append(param)
                if len(come) in at_once[0] and (hooks := this()) is not None:
                    hooks._process_ready()
            elif (hooks := this()) is not None:
                hooks._begin_pass(param)

        if device is None or not device.streams:
            return hook

        def hook_on_streams(param: torch.Tensor) -> None:
            """Call `hook` on a device on which autograd may write each gradient on another stream."""
            device.notice_stream()
            hook(param)

        return hook_on_streams

    def _begin_pass(self, param: torch.Tensor) -> None:
        """Begin a backward pass with its first gradient."""
        if self.closed or not self.begin_backward():
            return
        if id(param) in self._number_of:  # hooks may have been made anew meanwhile, with other parameters
            at_once: Container[int] = EVERY
            self._looked = 0
            if self._passes_left is None and self._passes_left_of_all > 1:
                at_once = ()
            elif self._passes_left is None and not self._looks_at_each:
                assert self.pipeline is not None
                at_once = self.pipeline.begin_pass()
            self._at_once[0] = at_once = (len(self.hooked),) if self._ends_itself else at_once
            self._come.append(param)
            if 1 in at_once:
                self._process_ready()

    @outside_changes
    def _process_ready(self) -> None:
        """Launch units that the gradients since the last call complete, or count these gradients.

        Compiled autograd calls nothing at the end of a pass, so such a pass ends here.
        """
        with self._looking:  # autograd computes the gradients of several devices in a thread for each
            new, self._looked = self._come[self._looked :], len(self._come)
            if self._passes_left is None and self._passes_left_of_all > 1:
                if len(new) == len(self.hooked) and set(map(id, new)) == self._number_of.keys():
                    self._passes_left_of_all -= 1
                    new = []
            elif self._passes_left is None and not self._looks_at_each and self.pipeline is not None:
                new = [] if self.pipeline.ready_in_order(new) else new
            if new:
                self._passes_left = self._counted()
                for param in new:
                    self._count(self._number_of[id(param)], self._passes_left)
        if self._ends_itself and len(self._come) >= len(self.hooked):
            self._ends_itself = False
            self.end_backward()

    @property
    def too_often(self) -> str:
        """Error message for a gradient that is not expected any more."""
        return IN_CHECKPOINTS if _in_reentrant_checkpoint() else TOO_OFTEN

    def _counted(self) -> list[int]:
        """Return the remaining passes of each parameter."""
        if self._passes_left is not None:
            return self._passes_left
        left = [self._passes_left_of_all] * len(self.hooked)
        if self.pipeline is not None and self.pipeline.pending:
            left = [0] * len(self.hooked)
            for number in self.pipeline.missing:  # no parameter has sparse gradients, so indices are the same here
                left[number] = self._passes_left_of_all
        return left

    def _count(self, number: int, left: list[int]) -> None:
        """Count a gradient of one pass. After the last pass, hand it to the pipeline."""
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
            self._nan_check.inspect(name, gradient)
        if gradient.is_sparse:
            gradient = self._to_wire_format(name)
        place = self._group_of.get(number)
        waiting = [] if place is None else self._waiting[place]
        waiting.append((number, gradient, gradient._version))
        if place is None or len(waiting) == self._group_sizes[place]:
            self._hand_over(waiting)

    def begin_backward(self) -> bool:
        """Begin a backward pass. Collective if the one before has raised.

        Returns:
            False if the gradients of this pass do not count.
        """
        if self.state is not IterationState.COLLECTING:
            self.drain()
            if self.failed_in is not None:
                self._job.participants.drop_failed(self.failed_in)
        self._job.participants.n_begun += 1
        self._ends_itself = in_compiled_autograd()
        if not self._ends_itself:
            PassEnd(self)
        return bool(self.named)

    def _hand_over(self, ready: list[tuple[int, torch.Tensor, int]]) -> None:
        for number, gradient, version in ready:
            if (index := self._dense_index.get(number)) is None:
                assert self._rows is not None
                self._rows.start(self.hooked[number][0], gradient, version)
            else:
                assert self.pipeline is not None
                self.pipeline.ready(index, gradient, version)
        ready.clear()

    def _to_wire_format(self, name: str) -> torch.Tensor:
        """Return a sparse gradient as it is sent. If the ranks must agree on it first, request a new profile."""
        if self.pipeline is not None and self.sparse.is_unagreed(name) and not self.pipeline.profiling:
            self.pipeline.profile_again()  # its last iteration calls `KnownSparse.agree`
        return self.sparse.to_wire_format(name)

    def _hand_over_incomplete(self) -> None:
        """Hand incomplete groups to the pipeline, and make missing gradients dense that are sparse in `.grad`."""
        for waiting in self._waiting:
            self._hand_over(waiting)
        for left, (name, param) in zip(self._counted(), self.hooked, strict=True):
            if left and param.grad is not None and param.grad.is_sparse and param.requires_grad:
                self._to_wire_format(name)

    def end_backward(self) -> None:
        """End a backward pass: reduce the dense gradients if all are ready, then the sparse ones."""
        try:
            self._process_ready()
        except BaseException:
            self.fail_backward()
            raise
        self._come.clear()
        pipeline, rows = self.pipeline, self._rows
        if not ((pipeline is not None and pipeline.can_reduce) or (rows is not None and self._can_reduce_sparse(rows))):
            if pipeline is not None:
                pipeline.run_copies()
            return
        for other in self._job.participants:  # other ranks may wait for these first
            if other is not self:
                other.flush()
        self._job.joining.announce(self, WaitStage.REDUCE)
        if self.gate is not None and self.can_defer and (gate := self.gate()) is not None:
            self.flush()
            if gate.keep():
                self.state = IterationState.LAUNCHED
                return
        self.reduce()
        if pipeline is not None and pipeline.problem:
            self.finish()  # which raises: the next pass belongs to the next iteration, as on the other ranks

    def _can_reduce_sparse(self, rows: SparseReductions) -> bool:
        """Return whether all dense gradients of this iteration are reduced, and all sparse ones are ready."""
        done = self.pipeline is None or self.pipeline.state is IterationState.REDUCED
        return rows.pending and done and not (rows.missing or self.state is IterationState.REDUCED)

    def reduce(self) -> None:
        """Block until the ready gradients are reduced, unless this rank is needed elsewhere.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        pipeline, rows, interrupted = self.pipeline, self._rows, partial(self._job.blocked.must_stop_waiting, self)
        with self.progress.waits(WaitStage.REDUCE):
            if self.state is IterationState.LAUNCHED:
                self.state = IterationState.COLLECTING
            reduced = pipeline is None or pipeline.state is IterationState.REDUCED or pipeline.reduce(interrupted)
            if not reduced:
                return
            if rows is None or (not rows.missing and rows.reduce(interrupted)):
                self.state = IterationState.REDUCED
            if pipeline is not None and pipeline.profiling:
                self.sparse.make_sparse(self.sparse.found)

    def fail_backward(self) -> None:
        """End a backward pass that has raised, anywhere."""
        self._come.clear()
        self.fail()
        for user in self.users:  # its other hooks may have gradients of earlier passes
            user.fail()

    def fail(self) -> None:
        """Drop the gradients of this iteration, and move `.grad` out of the flat buffers, which are being reduced."""
        if self.closed:
            return
        if self.state is not IterationState.FAILED:
            self.state = IterationState.FAILED
            if self.pipeline is not None:
                self.pipeline.detach()
            self._failed_with = [(param, param.grad, _version(param.grad)) for _, param in self.hooked]
        self.failed_in = self._job.participants.n_begun

    def drop_failed(self) -> None:
        """End the iteration if a pass has raised in it, and leave `.grad` as it is. Collective in that case."""
        if self.state is not IterationState.FAILED:
            return
        self.state, self.failed_in = IterationState.COLLECTING, None
        if self.pipeline is not None:
            self.pipeline.detach()
        kept = [(param, param.grad) for param, _, _ in self._failed_with]
        for param, _ in kept:
            param.grad = None
        self.finish()
        for param, gradient in kept:
            param.grad = gradient

    # ── a deferred end of an iteration ───────────────────────────────────────────────────────────────────────────

    @property
    def can_defer(self) -> bool:
        """True if this iteration may end without the other ranks, once all units are launched."""
        tuning = self.tuning
        if tuning is None or self.shared or not self.all_dense or self.sparse.found:
            return False
        if self.state is IterationState.FAILED or not tuning.can_put_off:
            return False
        return self._compared_values and self._nan_check is None and not self._unfrozen

    @outside_changes
    def defer(self) -> None:
        """Launch all units, so that the iteration may end later. Non-blocking. Call if it `can_defer`."""
        assert self.pipeline is not None
        self.state = IterationState.DEFERRED
        self._job.joining.announce(self, WaitStage.FINISH)
        self._hand_over_incomplete()
        self.pipeline.flush()

    @outside_changes
    def wait_for(self, number: int) -> list[int]:
        """Block until the launched gradient of one parameter is reduced.

        Returns:
            All parameters whose gradients are reduced with it, by number in `hooked`; none if this rank is needed
            elsewhere, before `step()`. Then the gate must hold nothing any more.

        Raises:
            CommError: the reduction failed, or the job did.
        """
        if self.pipeline is None:
            raise CommError(NEVER_CAME)
        late = self.state is IterationState.DEFERRED
        with self.progress.waits(WaitStage.FINISH if late else WaitStage.REDUCE):
            numbers = self.pipeline.wait_for_one(
                number, None if late else partial(self._job.blocked.must_stop_waiting, self)
            )
        if not numbers:
            self.state = IterationState.COLLECTING
        return numbers

    def drain(self) -> None:
        """Block until no end of an iteration is deferred any more. Not collective."""
        if self.gate is not None and (gate := self.gate()) is not None:
            gate.drain()

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @outside_changes
    def finish(self, *, due: bool = True, joined: bool = False) -> None:
        """Block until `.grad` holds the reduced gradients, and end the iteration. Collective.

        Args:
            due: if shared: False if another optimizer has had the gradients reduced since the caller last had. If that
                is so on all ranks, and no gradient is ready, the reduced gradients are in place.
            joined: this rank has no data any more, and takes part with zeros.

        Raises:
            GradientError: a gradient was written while it was being reduced; the iteration has ended all the same.
        """
        if not joined:
            if not (self.hooked or self._unfrozen):
                return
            if self.state is IterationState.FAILED and any(
                param.grad is not left or _version(left) != version for param, left, version in self._failed_with
            ):
                self.drop_failed()
            if self.state is not IterationState.REDUCED and not self.begun:
                distributed_autograd.require_gradients_outside(self.hooked)
            self._job.joining.announce(self, WaitStage.FINISH)
        late, problem = self.state is IterationState.DEFERRED, ""
        if late:
            self.state = IterationState.COLLECTING
        if not self.shared or self._is_due(here=self.begun or (due and not joined)):
            with self.progress.waits(WaitStage.FINISH):
                problem = self._reduce_all(joined=joined, late=late)
            self.n_reduced += 1
        self.progress.finished += 1
        self._job.joining.iteration_ended(self)
        if problem:
            raise GradientError(problem)

    def contribute_zeros(self) -> None:
        """Launch zeros, on a rank that has joined, for an iteration that the other ranks have not begun to end."""
        if self.closed:
            return
        if self._rows is not None:
            self._rows.fill_missing(joined=True)
        if self.pipeline is not None:
            self.pipeline.contribute_zeros()

    def _is_due(self, *, here: bool) -> bool:
        """Return whether any rank has gradients to reduce. Stop sharing if one user is left. Collective while shared.

        Args:
            here: this rank has gradients, or cannot know.
        """
        with self.progress.waits(WaitStage.ASK):
            anywhere, n_users = self._control.maximum(np.array([float(here), float(len(self.users))]))
        self.shared = bool(n_users > 1)
        return bool(anywhere > 0)

    def _reduce_all(self, *, joined: bool, late: bool) -> str:
        """Reduce all gradients, and begin the next iteration. Collective.

        Args:
            joined: this rank has no data any more, and takes part with zeros.
            late: the end was deferred, so that parameters unfrozen since belong to the next iteration.

        Returns:
            Why the gradients are undefined; empty if all is well.
        """
        pipeline, rows = self.pipeline, self._rows
        unfrozen = self._unfrozen if self._frozen and not late else []
        if self._nan_check is not None:
            self._nan_check.finish(self._counted(), self.hooked)
        if (
            pipeline is None
            or self._looks_at_each
            or (pipeline.state is not IterationState.REDUCED and pipeline.missing)
        ):
            self._hand_over_incomplete()
        if rows is not None and self.state is not IterationState.REDUCED:
            rows.fill_missing(joined=joined)
        profiling = pipeline is not None and pipeline.profiling
        if self.tuning is not None:
            self.tuning.finish(joined=joined)
        if rows is not None:
            rows.reduce(None)
        found_sparse = profiling and self.sparse.agree()
        if rows is not None:
            rows.end_iteration()
        if unfrozen:
            self._reduce_unfrozen(unfrozen)
        if not self._compared_values:  # and nothing is updated
            wanting = [item for item in self.named if item[1].requires_grad]
            self._compared_values = bool(wanting)
            warn_of_different_values(self._control, wanting)
        if joined:
            for param in [*(param for _, param in self.hooked), *unfrozen]:
                param.grad = None  # the others' gradients must not add to the next ones of this rank
        problem = "" if pipeline is None else pipeline.problem
        if found_sparse or unfrozen:
            self.attach(self.named)  # with other hooks
        else:
            self._begin_iteration()
        return problem

    @torch.no_grad()
    def _reduce_unfrozen(self, params: Sequence[torch.Tensor]) -> None:
        """Reduce gradients of parameters that have no hook yet. Afterwards they are dense. Collective."""
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
            kind=CollectiveKind.ALLREDUCE,
            op=reduction.op.value,
            factors=(reduction.prescale, reduction.postscale),
            by_all=True,
        )
        work = self._engine.submit(signature, [tensor])
        self._engine.finish(work)
        return work.results[0]

    def drop_accumulated(self) -> None:
        """Drop gradients of fewer backward passes than are accumulated before the reduction."""
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
        """True if a gradient of any backward pass of this iteration was counted."""
        return (
            self._passes_left_of_all != self.passes if self._passes_left is None else self._passes_left != self._wanted
        )

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> bool:
        """True if gradients are being reduced."""
        pipeline, rows = self.pipeline, self._rows
        return (pipeline is not None and pipeline.pending) or (rows is not None and rows.pending)

    @property
    def begun(self) -> bool:
        """True if this rank has gradients that no finished iteration has reduced."""
        return self.pending or self._accumulated or any(param.grad is not None for param in self._unfrozen)

    @property
    def given(self) -> int:
        """Iterations to which this rank has given all its gradients."""
        pipeline, rows = self.pipeline, self._rows
        missing = (pipeline is not None and bool(pipeline.missing)) or (rows is not None and bool(rows.missing))
        return self.progress.given(missing=missing)

    def flush(self) -> None:
        """Launch the remaining units if all dense gradients of this iteration are ready. Non-blocking."""
        if self.pipeline is not None and self.pipeline.can_reduce:
            self.pipeline.flush()

    # ── its own end ──────────────────────────────────────────────────────────────────────────────────────────────

    def close(self, reason: str) -> None:
        """Reduce gradients no more, because of `reason`. Not collective. Idempotent."""
        if not self.closed:
            self.closed = reason
            if self.gate is not None and (gate := self.gate()) is not None:
                gate.close()
            self._job.participants.remove(self)
            self._open.close()
            self._unhook()
            self._passes_left, self._waiting = [], []

    def _leave_in_child(self) -> None:
        """Close in a forked child: backward passes compute local gradients, and a step of the optimizer raises."""
        self.closed = "in this process, which was forked from a rank of the job and is none itself"
        self._come.clear()

    def __del__(self) -> None:
        # Runs in any thread, at any time, so another thread closes what must be closed.
        if not self.closed:
            self._job.disposal.put(self._open.close)


def _in_reentrant_checkpoint() -> bool:
    """Return whether the backward pass that calls this runs within another, as a reentrant checkpoint's does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.utils.checkpoint.CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _current_wait(this: weakref.ref[GradientHooks]) -> PendingWait | None:
    """Return what this rank waits for. The watchdog's thread calls it.

    Raises:
        CommError: a transport has found out by itself that what this rank waits for will never come.
    """
    if (hooks := this()) is None:
        return None
    waiting, iteration, pipeline = hooks.progress.waiting, 0, hooks.pipeline
    since_s = None if waiting is None else waiting[1]
    if pipeline is not None and hooks.tuning is not None:
        hooks.tuning.router.check()
        iteration = pipeline.iteration
        if since_s is None and (stalled := pipeline.in_flight.stalled()):
            iteration, since_s = stalled
    return None if since_s is None else PendingWait(what=f"the gradients of iteration {iteration}", since_s=since_s)


def _progress_of(this: weakref.ref[GradientHooks], participants: ActiveReducers) -> str:
    """Describe the progress of this rank, for the watchdogs of others; empty if a later optimizer has taken over."""
    if (hooks := this()) is None or (pipeline := hooks.pipeline) is None:
        return ""
    if not (hooks.pending or hooks.progress.waiting or hooks in participants.in_use):
        return ""
    missing = [pipeline.names[index] for index in pipeline.missing]
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    waiting = pipeline.in_flight.unreduced_unit()
    return "".join(
        [
            f"is in iteration {pipeline.iteration}",
            f", has not computed {shown}" if missing else "",
            f", its GPU waits for {waiting}" if waiting else "",
        ]
    )
