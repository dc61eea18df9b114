"""Watches gradients and has them reduced: what stands between autograd and the synchroniser.

Everything that depends on how a gradient comes is here: hooks, accumulation over several
backward passes, groups, sparse gradients, parameters that are thawed in mid-training. The synchroniser knows only
dense gradients that are ready or not, the optimizer only that they are reduced in the end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from sirtaki.comm.collectives.requests import Kind, Signature
from sirtaki.errors import GradientError

from .nan_check import NanCheck
from .participants import Key, Stage
from .reducer_options import ReducerOptions
from .reducer_watch import ReducerWatch
from .same_model import StartCheck, require_same_model
from .sparse_gradients import SparseReductions
from .warmup import TunedSynchroniser

if TYPE_CHECKING:
    from sirtaki.comm.collectives.rank_sets import RankSet

    from .job import Job

TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)

Named = tuple[str, torch.Tensor]
Arrive = Callable[[torch.Tensor], None]
"""What is done with a gradient that is complete."""


class User(Protocol):
    """One that uses a reducer's gradients: those of an optimizer."""

    def use_part(self, part: GradientReducer, *, of: GradientReducer) -> None:
        """Some of the parameters of a reducer that this one uses belong to `part` from now on."""
        ...


class GradientReducer:
    """Keeps the gradients of some parameters equal on some of the ranks.

    It lives as long as an optimizer that uses it; hooks, job and watchdog know it by weak references.

    Attributes:
        key: the number of the ranks' process set and its own there, the same on all of these ranks.
        members: the ranks that take part.
        ranks: the same, by their rank among all.
        passes: backward passes whose gradients are added up before they are reduced.
        options: how gradients are reduced.
        finished: iterations that have ended, whatever became of the parameters since.
        waiting: what this rank waits for in the current iteration, and since when (`time.monotonic()`).
        n_reduced: those of them in which gradients were reduced; a shared one may find nothing to reduce.
        shared: several optimizers may use it; the same on all ranks.
        users: those optimizers of this rank that do.
        closed: why it is closed; empty while it is open.
    """

    def __init__(
        self, job: Job, members: RankSet, named: Sequence[Named], *, passes: int, options: ReducerOptions
    ) -> None:
        """Collective.

        Args:
            job: of this process.
            members: the ranks that take part, with their control plane.
            named: the parameters with their names, frozen ones too, the same on all ranks.
            passes: backward passes whose gradients are added up before they are reduced.
            options: how to reduce.
        """
        assert members.control is not None
        assert members.engine is not None
        self._job, self._control, self._engine = job, members.control, members.engine
        self._sync: TunedSynchroniser | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._watch: ReducerWatch | None = None
        self.closed = ""
        self.passes, self.options = passes, options
        self.members, self.ranks = members, members.ranks
        self.key = (members.number, next(job.serials[members.number]))
        self.finished = self.n_reduced = 0
        self.shared = False
        self.users: weakref.WeakSet[User] = weakref.WeakSet()
        self.waiting: tuple[Stage, float] | None = None
        self._prefix = f"optimizer.{self.key[1]}"
        self._sparse = SparseReductions(self._prefix, options.reduction, members.engine)
        self._nan_check = NanCheck(members.control) if job.settings.check_nan else None
        self._in_backward = False
        self._start_check = StartCheck()
        job.disposal.start()
        self._attach(named)
        self._watch = ReducerWatch(job.participants, self)
        job.watchdog.watch(self._watch.current_wait, self._watch.progress)
        job.participants.add(self)

    # ── which parameters ─────────────────────────────────────────────────────────────────────────────────────────

    def _attach(self, named: Sequence[Named]) -> None:
        """Collective: hooks on all parameters that want a gradient; those that there were before are removed."""
        self._detach()
        self._control.reclaim()
        self._all = list(named)
        self._named = [(name, param) for name, param in named if param.requires_grad]
        self._by_name = dict(self._named)
        self._frozen = [(name, param) for name, param in named if not param.requires_grad]
        require_same_model(self._control, self._named)
        dense = [number for number, (name, _) in enumerate(self._named) if name not in self._sparse.names]
        if dense:
            self._sync = TunedSynchroniser(
                self._control,
                self._job.settings,
                [self._named[number][1] for number in dense],
                [self._named[number][0] for number in dense],
                reduction=self.options.reduction,
                arms=self.options.arms,
            )
        arrive: dict[int, Arrive] = dict.fromkeys(range(len(self._named)), self._nothing)
        for index, number in enumerate(dense):
            arrive[number] = self._arrival(index)
        self._gather_groups(arrive)
        self._arrive = arrive
        if self._nan_check is not None:
            self._nan_check.names = [name for name, _ in self._named]
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._make_hook(number))  # type: ignore[no-untyped-call]  # torch's
            for number, (_, param) in enumerate(self._named)
        ]
        self._begin_iteration()

    def _arrival(self, index: int) -> Arrive:
        assert self._sync is not None
        return partial(self._sync.ready, index)

    @staticmethod
    def _nothing(gradient: torch.Tensor) -> None:
        """What a gradient does that is known to be sparse: it is reduced by itself."""

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    @property
    def named(self) -> list[Named]:
        """Its parameters with their names, frozen ones too."""
        return list(self._all)

    def extend(self, named: Sequence[Named]) -> None:
        """Collective, between iterations: from now on, these parameters too."""
        self._attach([*self._all, *named])

    def keep_only(self, named: Sequence[Named]) -> None:
        """Collective, between iterations: from now on, these of its parameters only."""
        self._attach(named)

    def _gather_groups(self, arrive: dict[int, Arrive]) -> None:
        """Members of a group wait for the last of them, so that the group leaves as one."""
        number_of = {id(param): number for number, (_, param) in enumerate(self._named)}
        self._group_sizes: list[int] = []
        for group in self.options.groups:
            members = [number_of[id(param)] for param in group if id(param) in number_of]
            place = len(self._group_sizes)
            self._group_sizes.append(len(members))
            for number in members:
                arrive[number] = partial(self._arrive_in_group, weakref.ref(self), place, arrive[number])

    @staticmethod
    def _arrive_in_group(this: weakref.ref[GradientReducer], place: int, leave: Arrive, gradient: torch.Tensor) -> None:
        self = this()
        assert self is not None  # or else its hook would not have called this
        waiting = self._groups_waiting[place]
        waiting.append(partial(leave, gradient))
        if len(waiting) == self._group_sizes[place]:
            for each in waiting:
                each()

    # ── the way of one gradient ──────────────────────────────────────────────────────────────────────────────────

    def _make_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        # Garbage collection does not see what such a hook holds, so it holds nothing.
        this, nan_check = weakref.ref(self), self._nan_check

        def hook(param: torch.Tensor) -> None:
            self = this()
            if self is None:
                return
            passes_left = self._passes_left  # replaced by each finish()
            left = passes_left[number]
            if left > 1:
                passes_left[number] = left - 1
                return
            if left < 1:
                raise AssertionError(TOO_OFTEN)
            passes_left[number] = 0
            if not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            gradient = param.grad
            assert gradient is not None
            if nan_check is not None:
                nan_check.look(number, gradient)
            if not gradient.is_sparse or self._makes_dense(number, param):
                self._arrive[number](param.grad)  # type: ignore[arg-type]  # it is there

        return hook

    def _end_backward(self) -> None:
        """Called by autograd when a backward pass is over, but not if it raised."""
        self._in_backward = False
        if self._sync is not None and self._sync.can_reduce:
            self._job.joining.begins(self, Stage.REDUCE)
            with self.waits(Stage.REDUCE):
                self._sync.reduce(partial(self._job.blocked.need, self))

    @property
    def backward_aborted(self) -> bool:
        """A backward pass has raised in its midst, and gradients that came before that are on their way."""
        return self._in_backward and self.pending

    def _makes_dense(self, number: int, param: torch.Tensor) -> bool:
        """Whether a sparse gradient has been made dense; else its reduction as a sparse one has begun."""
        assert param.grad is not None
        name = self._named[number][0]
        # Which parameters have sparse gradients is agreed while the order is profiled; later ones are made dense.
        agreed_later = self._sync is not None and self._sync.profiling
        if self.options.sparse_as_dense or (name not in self._sparse.names and not agreed_later):
            param.grad = param.grad.to_dense()
            return True
        self._sparse.start(name, param.grad)
        return False

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""
        return (self._sync is not None and self._sync.pending) or self._sparse.pending

    @property
    def begun(self) -> bool:
        """Gradients have come on this rank that no finished iteration has reduced."""
        return (
            self.pending
            or any(left != self.passes for left in self._passes_left)
            or any(param.requires_grad for _, param in self._frozen)
        )

    @property
    def iteration(self) -> int:
        """Iterations finished so far with the current parameters."""
        return 0 if self._sync is None else self._sync.iteration

    @property
    def tuned(self) -> TunedSynchroniser | None:
        """What reduces the dense gradients; None if there are none."""
        return self._sync

    @property
    def on_streams(self) -> bool:
        """See `Participant`."""
        return self._sync is not None and self._sync.on_streams

    def stalled(self) -> tuple[int, float] | None:
        """See `Participant`."""
        return None if self._sync is None else self._sync.in_flight.stalled()

    def remember(self) -> None:
        """See `Participant`."""
        if self._sync is not None:
            self._sync.remember()

    def set_passes(self, passes: int) -> None:
        """From the next iteration on, gradients of `passes` backward passes are added up before they are reduced."""
        self.passes = passes
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._passes_left = [self.passes] * len(self._named)
        self._groups_waiting: list[list[Callable[[], None]]] = [[] for _ in self._group_sizes]
        self._in_backward = False

    def finish(self, *, due: bool = True) -> None:
        """Collective: blocks until all gradients are reduced; afterwards `.grad` holds the result.

        Args:
            due: of a shared one: no other optimizer has had gradients reduced since this one last had. If it is not
                due on any rank, and no gradients have come, the reduced gradients are in place.
        """
        if not self._named and not any(param.requires_grad for _, param in self._frozen):
            return
        self._job.joining.begins(self, Stage.FINISH)
        self._job.participants.note_finished(self)
        self._finish(due=due)

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that the other ranks have not begun to end."""
        if self._sync is not None:
            self._sync.contribute_zeros()

    def finish_joined(self) -> None:
        """Collective: what `finish` is on a rank that has joined."""
        self._finish(joined=True)

    def _finish(self, *, joined: bool = False, due: bool = False) -> None:
        problem: GradientError | None = None
        if not self.shared or self._is_due(due):
            with self.waits(Stage.FINISH):
                try:
                    self._end_iteration(joined)
                except GradientError as err:  # the iteration is over all the same
                    self._begin_iteration()
                    problem = err
                self._start_check.look(self._control, self._named)  # nothing has been updated yet
            self.n_reduced += 1
        self.finished += 1
        self._job.joining.ends(self)
        if problem is not None:
            raise problem

    @contextmanager
    def waits(self, stage: Stage) -> Iterator[None]:
        """Inside, this rank waits for others; the watchdog and the other ranks hear of it if that lasts."""
        self.waiting = stage, time.monotonic()
        try:
            yield
        finally:
            self.waiting = None

    @property
    def given(self) -> int:
        """Iterations to which this rank has given all its gradients."""
        waits_for_gradients = self.waiting is not None and self.waiting[0] is not Stage.ASK
        complete = waits_for_gradients or not (
            (self._sync is not None and self._sync.missing_names()) or self._sparse.missing
        )
        return self.finished + complete

    def _is_due(self, due: bool) -> bool:
        """Collective: whether any rank has gradients to reduce; ends the sharing when one user is left."""
        mine = np.array([float(due or self.begun), float(len(self.users))])
        with self.waits(Stage.ASK):
            anywhere, n_users = self._control.maximum(mine)
        self.shared = bool(n_users > 1)
        return bool(anywhere > 0)

    def _end_iteration(self, joined: bool) -> None:
        if self._nan_check is not None:
            self._nan_check.finish(self._passes_left, [param.grad for _, param in self._named])
        thawed = [param for _, param in self._frozen if param.requires_grad]
        if joined and not self._sparse.pending:
            for name in self._sparse.names:
                self._by_name[name].grad = None
        held = self._sparse.hold_back(self._by_name) if self._sparse.pending else set()
        profiling = self._sync is not None and self._sync.profiling
        if self._sync is not None:
            self._sync.finish(joined=joined)
        agreed_now = self._agree_on_sparse(held) if profiling else set()
        if self._sparse.names:
            self._sparse.finish(self._by_name, agreed_now)
        if thawed:
            self._reduce_thawed(thawed)
        if thawed or agreed_now:
            self._attach(self._all)
        if joined:
            for _, param in self._named:
                param.grad = None  # the others' gradients must not add to the next ones of this rank
        self._begin_iteration()

    def drop_accumulated(self) -> None:
        """Gradients of fewer backward passes than are added up before they are reduced do not count."""
        if self.pending:
            return
        for (_, param), left in zip(self._named, self._passes_left, strict=True):
            if left < self.passes:
                param.grad = None
        self._begin_iteration()

    def _agree_on_sparse(self, found: set[str]) -> set[str]:
        """Collective: parameters whose gradient was sparse on any rank count as such on all; returns the new ones."""
        mine = np.array([float(name in found) for name, _ in self._named])
        anywhere = self._control.total(mine) > 0
        fresh = {name for (name, _), sparse in zip(self._named, anywhere, strict=True) if sparse} - self._sparse.names
        self._sparse.names |= fresh
        return fresh

    @torch.no_grad()
    def _reduce_thawed(self, params: list[torch.Tensor]) -> None:
        """Collective: gradients of parameters that had no hook yet in this iteration."""
        reduction = self.options.reduction
        for number, param in enumerate(params):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            signature = Signature.of(
                [param.grad],
                name=f"{self._prefix}.thawed.{number}",
                kind=Kind.ALLREDUCE,
                op=reduction.op.value,
                factors=(reduction.prescale, reduction.postscale),
                by_all=True,
            )
            work = self._engine.submit(signature, [param.grad])
            self._engine.finish(work)
            param.grad.copy_(work.results[0])

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self, reason: str) -> None:
        """Not collective: gradients are not reduced any more, because of `reason`. Idempotent."""
        if not self.closed:
            self.closed = reason
            self._job.participants.remove(self)
            _let_go(self._job, self.key, self._watch, self._hooks, self._sync)
            self._hooks, self._sync = [], None

    def __del__(self) -> None:
        # In any thread, at any time: what must be closed is handed over.
        if not self.closed:
            self._job.disposal.put(partial(_let_go, self._job, self.key, self._watch, self._hooks, self._sync))


def _let_go(
    job: Job,
    key: Key,
    watch: ReducerWatch | None,
    hooks: Sequence[torch.utils.hooks.RemovableHandle],
    sync: TunedSynchroniser | None,
) -> None:
    """Takes away and closes what belongs to one reducer on this rank."""
    job.joining.forget(key)
    if watch is not None:
        job.watchdog.forget(watch.current_wait, watch.progress)
    for hook in hooks:
        hook.remove()
    if sync is not None:
        sync.close()
