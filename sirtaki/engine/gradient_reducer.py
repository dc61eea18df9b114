"""Watches gradients and has them reduced: what stands between autograd and the synchroniser.

Everything that depends on how a gradient comes is here: hooks, accumulation over several
backward passes, groups, sparse gradients, parameters that are thawed in mid-training. The synchroniser knows only
dense gradients that are ready or not, the optimizer only that they are reduced in the end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from sirtaki.errors import GradientError

from .backward_end import BackwardEnd, LeftBehind
from .gradient_hooks import GradientHooks
from .nan_check import NanCheck
from .participants import Stage
from .reducer_end import let_go
from .reducer_options import ReducerOptions
from .reducer_watch import ReducerWatch
from .reductions import Reductions
from .same_model import Named, StartCheck, require_same_model
from .sparse_gradients import SparseReductions
from .thawed import reduce_thawed
from .warmup import TunedSynchroniser

if TYPE_CHECKING:
    from sirtaki.comm.collectives.rank_sets import RankSet

    from .job import Job


class User(Protocol):
    """One that uses a reducer's gradients: those of an optimizer."""

    def use_part(self, part: GradientReducer, *, of: GradientReducer) -> None:
        """Some of the parameters of a reducer that this one uses belong to `part` from now on."""
        ...

    def fail(self) -> None:
        """A backward pass has raised that computed gradients of this optimizer."""
        ...


class Waiting:
    """While a reducer waits for other ranks. `contextlib.contextmanager` costs several times as much."""

    def __init__(self, reducer: GradientReducer, stage: Stage) -> None:
        self._reducer, self._stage = reducer, stage

    def __enter__(self) -> None:
        self._reducer.waiting = self._stage, time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._reducer.waiting = None


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
        n_reduced: iterations in which gradients were reduced; a shared one may find nothing to reduce.
        shared: several optimizers may use it; the same on all ranks.
        users: those optimizers of this rank that do.
        closed: why it is closed; empty while it is open.
        sparse: its sparse gradients.
        failed: a backward pass has raised in this iteration.
    """

    def __init__(
        self,
        job: Job,
        members: RankSet,
        named: Sequence[Named],
        *,
        passes: int,
        options: ReducerOptions,
        known_sparse: Iterable[str] = (),
    ) -> None:
        """Collective.

        Args:
            job: of this process.
            members: the ranks that take part, with their control plane.
            named: the parameters with their names, frozen ones too, the same on all ranks.
            passes: backward passes whose gradients are added up before they are reduced.
            options: how to reduce.
            known_sparse: parameters of which all ranks know that their gradients are sparse.
        """
        assert members.control is not None
        assert members.engine is not None
        self._job, self._control, self._engine = job, members.control, members.engine
        self._reductions: Reductions | None = None
        self._hooks: GradientHooks | None = None
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
        self.sparse = SparseReductions(
            self._prefix,
            options.reduction,
            members.engine,
            known_sparse,
            as_dense=options.sparse_as_dense,
            unused_as_none=job.settings.unused_as_none,
        )
        self.failed = False
        self._left_behind: LeftBehind | None = None
        self._nan_check = NanCheck(members.control) if job.settings.check_nan else None
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
        self._frozen = [(name, param) for name, param in named if not param.requires_grad]
        require_same_model(self._control, self._named)
        self._reductions = Reductions(self._named, self.sparse, self._make_tuned)
        if self._nan_check is not None:
            self._nan_check.names = [name for name, _ in self._named]
        self._hooks = GradientHooks(
            [param for _, param in self._named],
            self._reductions.arrive,
            self.options.groups,
            passes=self.passes,
            owner=self,
            nan_check=self._nan_check,
        )
        self._begin_iteration()

    def _make_tuned(self, dense: Sequence[Named]) -> TunedSynchroniser:
        return TunedSynchroniser(
            self._control,
            self._job.settings,
            [param for _, param in dense],
            [name for name, _ in dense],
            reduction=self.options.reduction,
            arms=self.options.arms,
        )

    def _detach(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        if self._reductions is not None:
            self._reductions.close()
        self._hooks = self._reductions = None

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

    # ── the way of one gradient ──────────────────────────────────────────────────────────────────────────────────

    def begin_backward(self) -> GradientHooks | None:
        """See `Owner`. Collective if the pass before has raised: what it has left is dropped."""
        if self.failed:
            for participant in sorted(self._job.participants, key=lambda participant: participant.key):
                participant.drop_failed()
        BackwardEnd(self._end_backward, self._fail_backward)
        return self._hooks

    def _fail_backward(self) -> None:
        """A backward pass has raised, wherever that was."""
        if self._hooks is not None:
            self._hooks.in_backward = False
        self.fail()
        for user in self.users:  # whose other parts may have gradients of passes before this one
            user.fail()

    def fail(self) -> None:
        """What has come in this iteration does not count."""
        if self.failed:
            return
        self.failed = True
        if self._reductions is not None:
            self._reductions.detach()  # what is on its way must not come into what the script does with .grad
        self._left_behind = LeftBehind(param for _, param in self._named)

    def drop_failed(self) -> None:
        """Collective if a backward pass has raised in this iteration: ends it, and leaves `.grad` as it is."""
        if not self.failed:
            return
        if self._reductions is not None:
            self._reductions.detach()
        kept = [(param, param.grad) for _, param in self._named]
        for param, _ in kept:
            param.grad = None
        self.failed, self._left_behind = False, None
        self.finish()
        for param, gradient in kept:
            param.grad = gradient

    def _end_backward(self) -> None:
        """A backward pass is over: dense gradients that have all come are reduced now, then sparse ones."""
        if self._hooks is None or self._reductions is None:
            return
        self._hooks.in_backward = False
        if not self._reductions.can_reduce:
            return
        for participant in self._job.participants:  # other ranks may wait for those first
            participant.flush()
        self._job.joining.begins(self, Stage.REDUCE)
        with self.waits(Stage.REDUCE):
            self._reductions.reduce(partial(self._job.blocked.need, self))
        if self._reductions.problem:
            self.finish()  # which raises: what comes next is the next iteration, as on the other ranks

    def flush(self) -> None:
        """Sends what has not left if all gradients of this iteration have come; waits for nobody."""
        if self._reductions is not None:
            self._reductions.flush()

    def as_it_travels(self, number: int) -> torch.Tensor:
        """See `Owner`: made dense unless all ranks expect a sparse one."""
        assert self._reductions is not None
        return self._reductions.as_it_travels(number)

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""
        return self._reductions is not None and self._reductions.pending

    @property
    def complete(self) -> bool:
        """All gradients of this iteration are reduced and in `.grad`, and it has not ended."""
        return self._reductions is not None and self._reductions.complete

    @property
    def _passes_left(self) -> list[int]:
        return [] if self._hooks is None else self._hooks.passes_left

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
        return 0 if self._reductions is None else self._reductions.iteration

    @property
    def tuned(self) -> TunedSynchroniser | None:
        """What has the dense gradients reduced; None if there are none."""
        return None if self._reductions is None else self._reductions.tuned

    @property
    def on_streams(self) -> bool:
        """See `Participant`."""
        return self.tuned is not None and self.tuned.on_streams

    def stalled(self) -> tuple[int, float] | None:
        """See `Participant`."""
        return None if self.tuned is None else self.tuned.synchroniser.in_flight.stalled()

    def remember(self) -> None:
        """See `Participant`."""
        if self.tuned is not None:
            self.tuned.remember()

    def set_passes(self, passes: int) -> None:
        """From the next iteration on, gradients of `passes` backward passes are added up before they are reduced."""
        self.passes = passes
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        if self._hooks is not None and self._reductions is not None:
            self._hooks.begin(self.passes)
            self._reductions.complete = False
        self.failed, self._left_behind = False, None

    def finish(self, *, due: bool = True) -> None:
        """Collective: blocks until all gradients are reduced; afterwards `.grad` holds the result.

        Args:
            due: of a shared one: no other optimizer has had gradients reduced since this one last had. If it is not
                due on any rank, and no gradients have come, the reduced gradients are in place.
        """
        if not self._named and not any(param.requires_grad for _, param in self._frozen):
            return
        if self._left_behind is not None and self._left_behind.touched:
            self.drop_failed()
        self._job.joining.begins(self, Stage.FINISH)
        self._job.participants.note_finished(self)
        self._finish(due=due)

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that the other ranks have not begun to end."""
        if self._reductions is not None:
            self._reductions.contribute_zeros()

    def finish_joined(self) -> None:
        """Collective: what `finish` is on a rank that has joined."""
        self._finish(joined=True)

    def _finish(self, *, joined: bool = False, due: bool = False) -> None:
        problem = ""
        if not self.shared or self._is_due(due):
            with self.waits(Stage.FINISH):
                problem = self._end_iteration(joined)
                self._start_check.look(self._control, self._named)  # nothing has been updated yet
            self.n_reduced += 1
        self.finished += 1
        self._job.joining.ends(self)
        if problem:
            raise GradientError(problem)

    def waits(self, stage: Stage) -> Waiting:
        """Inside, this rank waits for others; the watchdog and the other ranks hear of it if that lasts."""
        return Waiting(self, stage)

    @property
    def given(self) -> int:
        """Iterations to which this rank has given all its gradients."""
        waits_for_gradients = self.waiting is not None and self.waiting[0] is not Stage.ASK
        missing = self._reductions is not None and self._reductions.missing
        return self.finished + (waits_for_gradients or not missing)

    def _is_due(self, due: bool) -> bool:
        """Collective: whether any rank has gradients to reduce; ends the sharing when one user is left."""
        mine = np.array([float(due or self.begun), float(len(self.users))])
        with self.waits(Stage.ASK):
            anywhere, n_users = self._control.maximum(mine)
        self.shared = bool(n_users > 1)
        return bool(anywhere > 0)

    def _end_iteration(self, joined: bool) -> str:
        """Collective: returns what makes the gradients undefined, empty if all is well."""
        assert self._hooks is not None
        assert self._reductions is not None
        if self._nan_check is not None:
            self._nan_check.finish(self._passes_left, [param.grad for _, param in self._named])
        thawed = [param for _, param in self._frozen if param.requires_grad]
        self._hooks.release()
        if any(self._passes_left):
            self._reductions.note_sparse(self._passes_left)
        changed = self._reductions.finish(self._control, joined=joined)
        if thawed:
            reduce_thawed(
                thawed,
                prefix=f"{self._prefix}.thawed",
                reduction=self.options.reduction,
                engine=self._engine,
                unused_as_none=self._job.settings.unused_as_none,
            )
        problem = self._reductions.problem
        if thawed or changed:
            self._attach(self._all)
        if joined:
            for _, param in self._named:
                param.grad = None  # the others' gradients must not add to the next ones of this rank
        self._begin_iteration()
        return problem

    def drop_accumulated(self) -> None:
        """Gradients of fewer backward passes than are added up before they are reduced do not count."""
        if self.pending:
            return
        for (_, param), left in zip(self._named, self._passes_left, strict=True):
            if left < self.passes:
                param.grad = None
        self._begin_iteration()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self, reason: str) -> None:
        """Not collective: gradients are not reduced any more, because of `reason`. Idempotent."""
        if not self.closed:
            self.closed = reason
            self._job.participants.remove(self)
            let_go(self._job, self.key, self._watch, self._hooks, self._reductions)
            self._hooks = self._reductions = None

    def __del__(self) -> None:
        # In any thread, at any time: what must be closed is handed over.
        if not self.closed:
            self._job.disposal.put(partial(let_go, self._job, self.key, self._watch, self._hooks, self._reductions))
