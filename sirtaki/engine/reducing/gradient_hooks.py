"""Reduce the gradients of one set of parameters. Layer between autograd and `GradientPipeline`.

`GradientHooks` registers a hook on each parameter, and gives ready gradients to the pipeline. The pipeline sends the
gradients in units (buckets). `GradientHooks` waits for the reduction when autograd ends the backward pass, or in
`finish()`. `GradientHooks.state` is the state of an iteration, sparse gradients included:

    COLLECTING ─ end_backward(), all gradients are ready ─┬─▶ REDUCED ─ finish() ─▶ the next iteration
      │ │ ◀─ another collective needs this rank ──────────┤
      │ │                                                 └─▶ LAUNCHED, if a forward gate holds the parameters
      │ │                                                       │ defer()
      │ ├─ defer(): missing gradients are filled in ──────────▶ DEFERRED ─ wait_for(), finish() ─▶ the next iteration
      │ └─ finish(): missing gradients are filled in, and the training thread waits ────────────▶ the next iteration
      └─── fail_backward(), from any state ─▶ FAILED ─ drop(), finish() ─▶ the next iteration

An iteration can become REDUCED before `finish()`, because the units to launch no longer depend on user code once all
gradients are ready. If some are missing, a second backward pass may still compute them, so the wait happens in
`finish()`. A pass that computes no gradient of these parameters, such as `torch.autograd.grad`, changes nothing.

In the states LAUNCHED and DEFERRED, ranks need not exchange further messages to complete the units. This rank has
launched all its units, and every other rank launches its units at the latest in its `step()`. So a wait for a unit does
not depend on anything that a rank does after `step()`.

An iteration is FAILED if a backward pass has raised. Its gradients are not used, and `.grad` keeps its value. All ranks
end the iteration together, in the next backward pass or in `finish()`. If user code calls `step()` and has not changed
`.grad` since, the iteration ends as usual, and `.grad` holds reduced gradients.

The pipeline reduces dense gradients only. `SparseReductions` reduces sparse ones. The first gradient of a parameter
that was unfrozen during training is reduced by a collective of its own. Then the parameter gets a hook.
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

from sirtaki.autotune.arms.techniques import ArmChoice, check_choices
from sirtaki.comm.collectives.engine import RankSet
from sirtaki.comm.collectives.operations import CollectiveKind, Signature
from sirtaki.comm.control.watchdog import PendingWait
from sirtaki.comm.device import refuse_capture
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.pipeline import EVERY, GradientPipeline
from sirtaki.comm.gradients.state import IterationState
from sirtaki.comm.modes import outside_changes
from sirtaki.comm.sparse.on_gpu import GpuRows
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
from .hooks import prepare_frozen, register_last
from .sparse_names import KnownSparse

TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)

IN_CHECKPOINTS = (
    "a parameter has got a gradient twice in one backward pass, since reentrant checkpoints share it, each of which "
    "has a backward pass of its own: checkpoint(use_reentrant=False) avoids it, backward_passes_per_step does not"
)

CLOSED_EARLY = (
    "overlap_forward has deferred the update of this parameter, and its optimizer or the job was closed before its "
    "gradient was reduced; call optimizer.finish() or hvd.shutdown() first"
)


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """Options of the reduction that do not depend on the model.

    Attributes:
        reduction: operation, scaling and compression of every gradient.
        sparse_as_dense: True to convert sparse gradients to dense ones.
        groups: groups of parameters. The gradients of a group are launched together.
        unused_as_none: True to set `.grad` to None where no rank has computed a gradient. If False, the job's setting
            decides.
        arms: search methods for tuning (arms); None = the default ones.
        overlaps: True if an iteration's reduction and update may end in the next forward pass.
    """

    reduction: Reduction
    sparse_as_dense: bool = False
    groups: Sequence[Sequence[torch.Tensor]] = ()
    unused_as_none: bool = False
    arms: Sequence[ArmChoice] | None = None
    overlaps: bool = False

    def __post_init__(self) -> None:
        if self.arms is not None:
            check_choices(self.arms)


class ForwardGate(Protocol):
    """Gate that blocks access to parameters and `.grad` until the gradients are reduced. No method is collective."""

    def keep(self) -> bool:
        """Block user code's access to all parameters until their gradients are reduced.

        Return False if that is not possible, so that the training thread must wait for the reduction.
        """
        ...

    def drain(self) -> None:
        """Wait for the gradients of an iteration whose end was deferred into the next forward pass, and end it."""
        ...

    def close(self) -> None:
        """Stop deferring updates into the next forward pass."""
        ...


class GradientUser(Protocol):
    """Optimizer that uses one or several `GradientHooks`."""

    def fail(self) -> None:
        """Drop the gradients that a backward pass computed before it raised."""
        ...

    def use_part(self, part: GradientHooks, *, of: GradientHooks) -> None:
        """Let this optimizer use the hooks `part`, too, to which some parameters of its hooks `of` have moved."""
        ...


class PassEnd:
    """Callback at the end of the current backward pass.

    Autograd deletes the callback without calling it if the pass raises an error. So its destructor detects the error.
    """

    def __init__(self, hooks: GradientHooks) -> None:
        self._hooks, self._ended = weakref.ref(hooks), False
        when_backward_ends(self)

    @outside_changes
    def __call__(self) -> None:
        """End the pass. Called by autograd."""
        self._ended = True
        if (hooks := self._hooks()) is not None:
            hooks.end_backward()

    def __del__(self) -> None:
        if not self._ended and (hooks := self._hooks()) is not None:
            hooks.fail_backward()


class GradientHooks:
    """Hooks on some parameters, whose gradients are reduced over some of the ranks.

    The object lives as long as an optimizer refers to it. The autograd hooks, the job and the watchdog hold weak
    references only.

    Attributes:
        key: number of the process set of these ranks, and serial number of the hooks in this set; the same on all of
            these ranks.
        members: participating ranks, with their control plane.
        ranks: participating ranks, by their rank in the job.
        options: options of the reduction.
        named: parameters with their names, frozen ones too; empty after `close`.
        hooked: parameters that required a gradient when the hooks were made, with their names.
        passes: number of backward passes whose gradients are accumulated before the reduction: one number for all
            parameters, or one for each.
        pipeline: reduces the dense gradients; None if there are none.
        tuning: tunes the pipeline, and ends its iterations; None if there are no dense gradients.
        sparse: parameters with sparse gradients, and their reductions.
        state: state of the iteration.
        failed_in: number of the backward pass that raised in this iteration, by `ActiveReducers.n_begun`; None = no
            pass raised.
        progress: number of finished iterations, and the operation for which this rank waits.
        shared: True if several optimizers may use these hooks; the same on all ranks.
        users: optimizers of this rank that use these hooks.
        n_reduced: iterations in which gradients were reduced. With shared hooks, an iteration may reduce nothing.
        gate: object that blocks access to parameters whose updates are deferred; None = updates are never deferred.
        closed: why the hooks are closed; empty while they are open.
    """

    may_begin_apart = True
    """True if parameter values may differ between ranks, so that the first iteration compares them."""
    nodes_are_kept = False
    """True if PyTorch itself keeps the AccumulateGrad nodes of the parameters alive."""
    undefined_are_zeros = False
    """True if this rank contributes zeros for a parameter whose hook is called without a gradient (`.grad` is None)."""
    failed_in: int | None
    _ends_itself = False
    """True under compiled autograd, which does not call `PassEnd`. Then the last gradient ends the backward pass."""

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
            passes: number of backward passes whose gradients are accumulated: one for all parameters, or one for each.
            options: options of the reduction.
            known_sparse: names of parameters that all ranks treat as sparse.
        """
        assert members.control is not None
        assert members.engine is not None
        self.closed, self._job, self._open, self._hooks = "", job, ExitStack(), ExitStack()
        self._process_lock, self._n_processed = free_in_forked_children(threading.RLock()), 0
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
        # The cleanup functions in `_open` must not refer to this object, because another thread calls them after
        # `__del__`.
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

    # ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────

    @outside_changes
    def attach(self, named: Sequence[Named]) -> None:
        """Replace the parameters, frozen ones included. Collective. Call between iterations."""
        self._unhook()
        self._control.reclaim()
        try:
            self._hook(named)
        except Exception:
            self.close("because a change of its parameters failed")
            raise
        self._begin_iteration()

    def _unhook(self) -> None:
        self._hooks.close()
        self.named, self.hooked, self._frozen = list[Named](), list[Named](), list[torch.Tensor]()
        self._number_of = dict[int, int]()
        self.tuning: PipelineTarget | None = None
        self.pipeline: GradientPipeline | None = None
        # Object that reduces sparse gradients. None if no hooked parameter has sparse gradients.
        self._rows: SparseReductions | None = None
        self._dense_index = dict[int, int]()
        self._group_sizes, self._group_of = list[int](), dict[int, int]()
        # Ready gradients of the user's groups of parameters whose other gradients are not ready yet.
        self._waiting: list[list[tuple[int, torch.Tensor, int]]] = []
        self._ready, self._launch_points = list[torch.Tensor](), list[Container[int]]([EVERY])

    def _hook(self, named: Sequence[Named]) -> None:
        """Make the hooks and the pipeline. Collective. If this raises, call `close`, which closes what is open."""
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
                stragglers=self._job.stragglers,
            )
            self._hooks.callback(self.tuning.close)
            self.pipeline = self.tuning.synchroniser
        elif self._rows is not None and (gpu := self._rows.device).streams:
            gpu.users += 1  # like a pipeline

            def leave() -> None:
                gpu.users -= 1

            self._hooks.callback(leave)
        self._dense_index = dict(zip(dense, range(len(dense)), strict=True))
        self._number_of = number_of = {id(param): number for number, (_, param) in enumerate(self.hooked)}
        groups = [[number_of[id(param)] for param in group if id(param) in number_of] for group in self.options.groups]
        self._group_sizes, self._waiting = [len(group) for group in groups], [[] for _ in groups]
        self._group_of = {number: place for place, group in enumerate(groups) for number in group}
        # With groups, NaN checks or sparse gradients, count the backward passes of each parameter. Otherwise, pass
        # gradients that become ready in the expected order to the pipeline together, which is faster.
        self._counts_each = bool(groups) or self._nan_check is not None or not self.all_dense or not dense
        hook = self._make_hook()
        for param in self._frozen:
            prepare_frozen(param)
        for name, param in self.hooked:
            self._hooks.callback(register_last(name, param, hook, nodes_are_kept=self.nodes_are_kept))

    @property
    def all_dense(self) -> bool:
        """True if the pipeline reduces all gradients, because the ranks treat no parameter as sparse."""
        return len(self._dense_index) == len(self.hooked)

    @property
    def _unfrozen(self) -> list[torch.Tensor]:
        """Parameters that require a gradient but have no hook yet, because they were frozen before."""
        return [param for param in self._frozen if param.requires_grad]

    def set_passes(self, passes: int | Sequence[int]) -> None:
        """Accumulate the gradients of `passes` backward passes before the reduction, from the next iteration on."""
        self.passes = passes
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        """Reset the counts of backward passes and gradients for the next iteration."""
        # Number of remaining backward passes of each parameter. None means `_passes_left_of_all` for every parameter
        # whose gradient the pipeline does not have yet.
        self._passes_left = None if isinstance(self.passes, int) else list(self.passes)
        self._passes_left_of_all = self.passes if isinstance(self.passes, int) else 0
        for waiting in self._waiting:
            waiting.clear()
        self._ready.clear()
        self.state, self.failed_in = IterationState.COLLECTING, None

    # ── a backward pass ──────────────────────────────────────────────────────────────────────────────────────────

    def _make_hook(self) -> Callable[[torch.Tensor], None]:
        # Hold only a weak reference to this object, because the garbage collector cannot follow references from C++.
        weak_hooks, ready, launch_points = weakref.ref(self), self._ready, self._launch_points
        device = None if self._rows is None else self._rows.device
        device = device if self.pipeline is None else self.pipeline.device

        def hook(param: torch.Tensor) -> None:
            """Record a ready gradient. A hot path.

            Notify `GradientHooks` of the first gradient of a backward pass, and of each gradient after which a unit
            (bucket) can be launched.
            """
            if ready:
                ready.append(param)
                if len(ready) in launch_points[0] and (hooks := weak_hooks()) is not None:
                    hooks._process_ready()
            elif (hooks := weak_hooks()) is not None:
                hooks._begin_pass(param)

        if device is None or not device.streams:
            return hook

        def hook_on_streams(param: torch.Tensor) -> None:
            """Record the current CUDA stream, because autograd may write gradients on several, then call `hook`."""
            device.notice_stream()
            hook(param)

        return hook_on_streams

    def _begin_pass(self, param: torch.Tensor) -> None:
        """Begin a backward pass. Called when its first gradient is ready."""
        if self.closed or not self.begin_backward():
            return
        if id(param) in self._number_of:
            # The parameter is unknown if `begin_backward` has replaced the parameters by `attach`.
            points: Container[int] = EVERY
            self._n_processed = 0
            if self._passes_left is None and self._passes_left_of_all > 1:
                # Process no gradient before the pass ends, because accumulated gradients are counted only then.
                points = ()
            elif self._passes_left is None and not self._counts_each:
                assert self.pipeline is not None
                points = self.pipeline.begin_pass()
            self._launch_points[0] = points = (len(self.hooked),) if self._ends_itself else points
            self._ready.append(param)
            if 1 in points:
                self._process_ready()

    @outside_changes
    def _process_ready(self) -> None:
        """Pass newly ready gradients (since this method's last call) to the pipeline, or count their backward passes.

        Under compiled autograd, the last gradient also ends the backward pass, because compiled autograd does not call
        `PassEnd`.
        """
        with self._process_lock:  # Take the lock, because autograd calls hooks in one thread for each device.
            new, self._n_processed = self._ready[self._n_processed :], len(self._ready)
            if self._passes_left is None and self._passes_left_of_all > 1:
                if len(new) == len(self.hooked) and set(map(id, new)) == self._number_of.keys():
                    self._passes_left_of_all -= 1
                    new = []
            elif self._passes_left is None and not self._counts_each and self.pipeline is not None:
                new = [] if self.pipeline.ready_in_order(new) else new
            if new:
                self._passes_left = self._remaining_passes()
                for param in new:
                    self._count(self._number_of[id(param)], self._passes_left)
        if self._ends_itself and len(self._ready) >= len(self.hooked):
            self._ends_itself = False
            self.end_backward()

    @property
    def too_often(self) -> str:
        """Error message if a gradient is computed in more backward passes than are accumulated before the reduction."""
        return IN_CHECKPOINTS if _in_reentrant_checkpoint() else TOO_OFTEN

    def _remaining_passes(self) -> list[int]:
        """Return, for each parameter, the number of backward passes before its gradient is reduced."""
        if self._passes_left is not None:
            return self._passes_left
        left = [self._passes_left_of_all] * len(self.hooked)
        if self.pipeline is not None and self.pipeline.pending:
            left = [0] * len(self.hooked)
            # The pipeline's indices are those in `hooked`, because all parameters are dense here.
            for number in self.pipeline.missing:
                left[number] = self._passes_left_of_all
        return left

    def _count(self, number: int, left: list[int]) -> None:
        """Count one backward pass of a parameter. After the last pass, give the parameter's gradient to a reduction.

        If the user has assigned the parameter to a group, do so once the gradients of the whole group are ready.
        """
        if left[number] != 1:
            if left[number] < 1:
                raise AssertionError(self.too_often)
            left[number] -= 1
            return
        name, param = self.hooked[number]
        gradient = param.grad
        if gradient is None:
            # The gradient was not computed (for example of a bias in a double backward), or a user's hook has set it to
            # None.
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
            self._pass_on(waiting)

    def begin_backward(self) -> bool:
        """Begin a backward pass. Collective if the previous pass has raised.

        Returns:
            False if the hooks have been removed from all parameters, so that the gradients of this pass are ignored.

        Raises:
            ConfigError: a CUDA graph captures this pass.
        """
        refuse_capture("backward()")
        if self.state is not IterationState.COLLECTING:
            self.drain()
            if self.failed_in is not None:
                self._job.participants.drop_failed(self.failed_in)
        self._job.participants.n_begun += 1
        self._ends_itself = in_compiled_autograd()
        if not self._ends_itself:
            PassEnd(self)
        return bool(self.named)

    def _pass_on(self, ready: list[tuple[int, torch.Tensor, int]]) -> None:
        """Pass ready gradients on: dense ones to the pipeline, and sparse ones to the sparse reductions."""
        for number, gradient, version in ready:
            if (index := self._dense_index.get(number)) is None:
                assert self._rows is not None
                self._rows.start(self.hooked[number][0], gradient, version)
            else:
                assert self.pipeline is not None
                self.pipeline.ready(index, gradient, version)
        ready.clear()

    def _to_wire_format(self, name: str) -> torch.Tensor:
        """Return a sparse gradient in the form in which it is sent: dense or sparse.

        It is sent dense until all ranks have agreed that the parameter has sparse gradients. They agree at the end of a
        profile of the order of gradients. If they have not agreed yet, request a new profile.
        """
        if self.pipeline is not None and self.sparse.is_unagreed(name) and not self.pipeline.profiling:
            # `KnownSparse.agree` is called in the last iteration of a profile, so request a profile.
            self.pipeline.profile_again()
        return self.sparse.to_wire_format(name)

    def _pass_on_incomplete(self) -> None:
        """Pass the ready gradients of incomplete groups to the reductions. A group is the user's list of parameters.

        Also convert each sparse `.grad` that only an earlier iteration has computed to the form in which it is sent.
        """
        for waiting in self._waiting:
            self._pass_on(waiting)
        for left, (name, param) in zip(self._remaining_passes(), self.hooked, strict=True):
            if left and param.grad is not None and param.grad.is_sparse and param.requires_grad:
                self._to_wire_format(name)

    def end_backward(self) -> None:
        """End a backward pass: reduce the dense gradients if all are ready, then the sparse ones."""
        try:
            self._process_ready()
        except BaseException:
            self.fail_backward()
            raise
        self._ready.clear()
        pipeline, rows = self.pipeline, self._rows
        if not ((pipeline is not None and pipeline.can_reduce) or (rows is not None and self._can_reduce_sparse(rows))):
            if pipeline is not None:
                pipeline.run_copies()
            return
        # Launch the units of other optimizers before this thread blocks, because other ranks may wait for those units
        # first.
        for other in self._job.participants:
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
            self.finish()  # `finish` ends the failed iteration on all ranks, and raises the error.

    def _can_reduce_sparse(self, rows: SparseReductions) -> bool:
        """Return whether all dense gradients of this iteration are reduced, and all sparse ones are ready."""
        done = self.pipeline is None or self.pipeline.state is IterationState.REDUCED
        waits = rows.missing or rows.must_wait_for_step or self.state is IterationState.REDUCED
        return rows.pending and done and not waits

    def reduce(self) -> None:
        """Block until the ready gradients are reduced.

        Return early if other ranks wait for this rank in another collective.

        Raises:
            CommError: a reduction or the job has failed. The gradients are undefined.
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
        """End a backward pass that has raised an error, in these hooks or anywhere else in the autograd graph."""
        self._ready.clear()
        self.fail()
        for user in self.users:
            # Fail all hooks of each optimizer, because an optimizer drops all its gradients together.
            user.fail()

    def fail(self) -> None:
        """Enter the state FAILED. Replace every `.grad` that is a view of a flat buffer by a copy.

        So a reduction that is still running does not change `.grad`.
        """
        if self.closed:
            return
        if self.state is not IterationState.FAILED:
            self.state = IterationState.FAILED
            if self.pipeline is not None:
                self.pipeline.detach()
            self._failed_with = [(param, param.grad, _version(param.grad)) for _, param in self.hooked]
        self.failed_in = self._job.participants.n_begun

    def drop_failed(self) -> None:
        """If a backward pass has raised, end the iteration without changing `.grad`. Collective in this case."""
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
        """True if this iteration's end may be deferred into the next forward pass.

        This requires that the iteration needs no communication after all units (buckets) are launched.
        """
        tuning = self.tuning
        if tuning is None or self.shared or not self.all_dense or self.sparse.found:
            return False
        if self.state is IterationState.FAILED or not tuning.can_defer:
            return False
        return self._compared_values and self._nan_check is None and not self._unfrozen

    @outside_changes
    def defer(self) -> None:
        """Launch all units (buckets), and enter the state DEFERRED. Non-blocking. Requires `can_defer`.

        The reduction then ends in the next forward pass.
        """
        assert self.pipeline is not None
        self.state = IterationState.DEFERRED
        self._job.joining.announce(self, WaitStage.FINISH)
        self._pass_on_incomplete()
        self.pipeline.flush()

    @outside_changes
    def wait_for(self, number: int) -> list[int]:
        """Block until the gradient of one parameter is reduced. Its units (buckets) must be launched.

        Returns:
            Indices in `hooked` of this parameter and of the parameters whose gradients are reduced together with it.
            Empty if other ranks wait for this rank in another collective before `step()`. In this case the gate must no
            longer block access to any parameter.

        Raises:
            CommError: the reduction or the job has failed.
        """
        if self.pipeline is None:
            raise CommError(CLOSED_EARLY)
        late = self.state is IterationState.DEFERRED
        with self.progress.waits(WaitStage.FINISH if late else WaitStage.REDUCE):
            numbers = self.pipeline.wait_for_one(
                number, None if late else partial(self._job.blocked.must_stop_waiting, self)
            )
        if not numbers:
            self.state = IterationState.COLLECTING
        return numbers

    def drain(self) -> None:
        """If the end of an iteration was deferred into the next forward pass, wait for it. Not collective."""
        if self.gate is not None and (gate := self.gate()) is not None:
            gate.drain()

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @outside_changes
    def finish(self, *, due: bool = True, joined: bool = False) -> None:
        """Block until `.grad` holds the reduced gradients, and end the iteration. Collective.

        Args:
            due: False if another optimizer that shares these hooks has called `finish` since this optimizer's last
                call. Then `.grad` already holds reduced gradients. If `due` is False on all ranks, and no rank has a
                ready gradient, nothing is reduced.
            joined: True if this rank has no more data and contributes zeros.

        Raises:
            GradientError: user code has changed a gradient before it was reduced. The iteration has ended on all ranks.
        """
        if not joined:
            if not (self.hooked or self._unfrozen):
                return
            if self.state is IterationState.FAILED and any(
                param.grad is not gradient or _version(gradient) != version
                for param, gradient, version in self._failed_with
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
        """Reduce zeros in an iteration that other ranks have begun. Called on a rank without more data (`join()`)."""
        if self.closed:
            return
        if self._rows is not None:
            self._rows.fill_missing(joined=True)
        if self.pipeline is not None:
            self.pipeline.contribute_zeros()
        if self._rows is not None:
            self._rows.launch_soon()

    def _is_due(self, *, here: bool) -> bool:
        """Return whether any rank has gradients to reduce. Collective.

        Also set `shared` to whether several optimizers of any rank use these hooks.

        Args:
            here: True if this rank has gradients to reduce, or must assume that other ranks have.
        """
        with self.progress.waits(WaitStage.ASK):
            anywhere, n_users = self._control.maximum(np.array([float(here), float(len(self.users))]))
        self.shared = bool(n_users > 1)
        return bool(anywhere > 0)

    def _reduce_all(self, *, joined: bool, late: bool) -> str:
        """Reduce all gradients, and begin the next iteration. Collective.

        Args:
            joined: True if this rank has no more data and contributes zeros.
            late: True if the end of the iteration was deferred into the next forward pass. Parameters that were
                unfrozen since then belong to the next iteration.

        Returns:
            Why the reduced gradients are undefined; empty if they are right.
        """
        pipeline, rows = self.pipeline, self._rows
        unfrozen = self._unfrozen if self._frozen and not late else []
        if self._nan_check is not None:
            self._nan_check.finish(self._remaining_passes(), self.hooked)
        if pipeline is None or self._counts_each or (pipeline.state is not IterationState.REDUCED and pipeline.missing):
            self._pass_on_incomplete()
        if rows is not None and self.state is not IterationState.REDUCED:
            rows.fill_missing(joined=joined)
            # Launch everything before tuning may wait for this GPU, because other ranks' GPUs then wait for this rank.
            if pipeline is not None and rows.device.streams:
                pipeline.contribute_zeros() if joined else pipeline.flush()
            rows.launch(None)
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
        if not self._compared_values:
            # Compare parameter values of ranks in the first iteration, before any parameter is updated.
            wanting = [item for item in self.named if item[1].requires_grad]
            self._compared_values = bool(wanting)
            warn_of_different_values(self._control, wanting)
        if joined:
            for param in [*(param for _, param in self.hooked), *unfrozen]:
                # Clear `.grad`, because autograd would add later gradients of this rank to the reduced ones.
                param.grad = None
        problem = "" if pipeline is None else pipeline.problem
        if found_sparse or unfrozen:
            self.attach(self.named)  # Make hooks for the new set of dense, sparse and unfrozen parameters.
        else:
            self._begin_iteration()
        return problem

    @torch.no_grad()
    def _reduce_unfrozen(self, params: Sequence[torch.Tensor]) -> None:
        """Reduce the gradients of parameters that have no hook yet. Sparse ones become dense. Collective."""
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
        """Drop gradients that were accumulated for this iteration but not reduced: set `.grad` to None.

        Only gradients to which a backward pass of this iteration has added something are dropped.
        """
        if self._passes_left is None and self._passes_left_of_all == self.passes:
            return
        if self._accumulated and not self.pending:
            for (_, param), wanted, left in zip(self.hooked, self._wanted, self._remaining_passes(), strict=True):
                if left != wanted:
                    param.grad = None
            self._begin_iteration()

    @property
    def _wanted(self) -> list[int]:
        return [self.passes] * len(self.hooked) if isinstance(self.passes, int) else list(self.passes)

    @property
    def _accumulated(self) -> bool:
        """True if a backward pass of this iteration was counted for any parameter."""
        return (
            self._passes_left_of_all != self.passes if self._passes_left is None else self._passes_left != self._wanted
        )

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def gpu_rows(self) -> GpuRows | None:
        """Object that reduces the sparse gradients over NCCL. None if NCCL reduces none."""
        return None if (rows := self.sparse.rows) is None else rows.gpu

    @property
    def pending(self) -> bool:
        """True if a reduction has received gradients of this iteration."""
        pipeline, rows = self.pipeline, self._rows
        return (pipeline is not None and pipeline.pending) or (rows is not None and rows.pending)

    @property
    def begun(self) -> bool:
        """True if this rank has gradients of the current iteration, accumulated ones included."""
        return self.pending or self._accumulated or any(param.grad is not None for param in self._unfrozen)

    @property
    def given(self) -> int:
        """Number of iterations to which this rank has contributed all its gradients, the current one included."""
        pipeline, rows = self.pipeline, self._rows
        missing = (pipeline is not None and bool(pipeline.missing)) or (rows is not None and bool(rows.missing))
        return self.progress.given(missing=missing)

    def flush(self) -> None:
        """Launch the remaining units (buckets) if all dense gradients of this iteration are ready. Non-blocking."""
        if self.pipeline is not None and self.pipeline.can_reduce:
            self.pipeline.flush()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self, reason: str) -> None:
        """Remove the hooks and end the pipeline. Error messages contain `reason`. Not collective. Idempotent."""
        if not self.closed:
            self.closed = reason
            if self.gate is not None and (gate := self.gate()) is not None:
                gate.close()
            self._job.participants.remove(self)
            self._open.close()
            self._unhook()
            self._passes_left, self._waiting = [], []

    def _leave_in_child(self) -> None:
        """Mark the hooks as closed in a forked child process. There backward computes local gradients only.

        `step()` raises an error there.
        """
        self.closed = "in this process, which was forked from a rank of the job and is none itself"
        self._ready.clear()

    def __del__(self) -> None:
        # Let the disposal thread close the hooks, because the garbage collector runs this in any thread at any time.
        if not self.closed:
            self._job.disposal.put(self._open.close)


def _in_reentrant_checkpoint() -> bool:
    """Return whether the current backward pass runs inside a reentrant checkpoint's backward."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.utils.checkpoint.CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _current_wait(this: weakref.ref[GradientHooks]) -> PendingWait | None:
    """Return the operation of these hooks for which this rank waits. None = it waits for none.

    Called by the watchdog's thread.

    Raises:
        CommError: a transport has detected that the operation cannot complete.
    """
    if (hooks := this()) is None:
        return None
    # Read each attribute of the hooks once, because the training thread may replace it meanwhile.
    waiting, iteration, pipeline, tuning = hooks.progress.waiting, 0, hooks.pipeline, hooks.tuning
    since_s = None if waiting is None else waiting[1]
    if (rows := hooks.gpu_rows) is not None:
        rows.check()
    if pipeline is not None and tuning is not None:
        tuning.router.check()
        iteration = pipeline.iteration
        if since_s is None and (stalled := pipeline.in_flight.stalled()):
            iteration, since_s = stalled
    if since_s is not None:
        return PendingWait(what=f"the gradients of iteration {iteration}", since_s=since_s)
    return None if rows is None else rows.stalled()


def _progress_of(this: weakref.ref[GradientHooks], participants: ActiveReducers) -> str:
    """Describe the progress of this rank to the other ranks' watchdogs; empty if the hooks are not in use."""
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
