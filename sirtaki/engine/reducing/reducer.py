"""Reduces the gradients of some parameters: what stands between autograd and the synchroniser.

An iteration of a reducer, with what moves it on, and the attribute that tells where it is:

    begun ──── last gradient ───▶ pending ──── end of backward() ──▶ complete ─── finish() ──▶ the next one
      │  ▲     of an iteration       │    all reduced; cut short if      ▲
      │  │                           │    another rank needs this one    │
      │  └─ passes_left: more        │                                   │
      │     passes are added up      ├──── finish() ─── waits for the rest, zeros for what has not come
      │                              │
      │                              └──── late.begin() ──▶ late.put_off ── wait_for(), hand_out() ── finish()
      │                                    instead of finish(): step() returns, the next forward pass waits
      │
      └──── the pass raises ───▶ failed_in ──── next backward(), or finish() if `.grad` was touched ──▶ the next one
                                           `drop_failed`: the iteration ends, `.grad` stays as the script has it

Gradients leave while they come, as soon as a unit is full. How they come is told in `hooks`; what is done with those
that are sparse, thawed in mid-training or accumulated, in `parameters`. The synchroniser knows only dense gradients
that are ready or not, the optimizer only that they are reduced in the end.

The end of an iteration is put off only where it needs no message: all units have left on this rank, the other ranks'
leave when they come to their `step()`, and so whoever waits for one waits for nothing that a rank does after that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from sirtaki.comm.control.watchdog import Wait
from sirtaki.comm.gradients.iteration import InFlight
from sirtaki.errors import CommError, GradientError

from ..participants import Key, Participants, Progress, Running, Stage
from ..sparse_carrier import SparseCarrier
from ..tuning.warmup import TunedSynchroniser
from .hooks import TOO_OFTEN, GradientHooks
from .parameters import HookedParameters, ReducerOptions, ReducerResources
from .same_model import Named

if TYPE_CHECKING:
    from sirtaki.comm.collectives.rank_sets import RankSet
    from sirtaki.comm.control.plane import ControlPlane

    from ..job import Job


class BackwardEnd:
    """Calls one of two methods when the current backward pass is over; knows their object by weak references only."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        """To be called in a hook, in a backward pass.

        Args:
            ended: bound method, called at the end of the pass.
            failed: bound method, called when the pass has raised.
        """
        self._ended, self._failed = weakref.WeakMethod(ended), weakref.WeakMethod(failed)
        self._over = False
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """Autograd's call."""
        self._over = True
        if (ended := self._ended()) is not None:
            ended()

    def __del__(self) -> None:
        if not self._over and (failed := self._failed()) is not None:
            failed()


class FailedPass:
    """What it has left in `.grad`.

    Attributes:
        number: of the pass, see `Participant.failed_in`; of the last one, if several have raised in this iteration.
    """

    def __init__(self, parameters: HookedParameters) -> None:
        """Takes `.grad` out of the flat buffers: what is on its way must not come into what the script does with it."""
        self.number = 0
        parameters.reductions.detach()
        self._parameters = parameters
        self._left = [(param, param.grad, _version(param.grad)) for _, param in parameters.named]

    @property
    def touched(self) -> bool:
        """The script has changed or dropped some of it since."""
        return any(param.grad is not left or _version(left) != version for param, left, version in self._left)

    def drop(self, finish: Callable[[], None]) -> None:
        """Collective: ends the iteration by `finish`, without the gradients, and leaves `.grad` as it is."""
        self._parameters.reductions.detach()
        kept = [(param, param.grad) for param, _, _ in self._left]
        for param, _ in kept:
            param.grad = None
        finish()
        for param, gradient in kept:
            param.grad = gradient


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


class ReducerWatch:
    """Answers for one reducer, as long as it lives."""

    def __init__(self, participants: Participants, reducer: GradientReducer) -> None:
        self._participants, self._reducer = participants, weakref.ref(reducer)

    def current_wait(self) -> Wait | None:
        """What this rank waits for.

        Raises:
            CommError: a transport has found out by itself that it will never come.
        """
        reducer = self._reducer()
        if reducer is None:
            return None
        waiting, iteration, tuned = reducer.progress.waiting, 0, reducer.tuned
        since_s = None if waiting is None else waiting[1]
        if tuned is not None:
            tuned.check()
            iteration = tuned.synchroniser.iteration
            if since_s is None and (stalled := tuned.synchroniser.in_flight.stalled()):
                iteration, since_s = stalled
        return None if since_s is None else Wait(what=f"the gradients of iteration {iteration}", since_s=since_s)

    def progress(self) -> str:
        """For the other ranks' watchdogs: how far this rank is; nothing if a later optimizer has taken over."""
        reducer = self._reducer()
        tuned = None if reducer is None else reducer.tuned
        if reducer is None or tuned is None:
            return ""
        sync = tuned.synchroniser
        if not (reducer.pending or reducer.progress.waiting or reducer in self._participants.in_use):
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


NEVER_CAME = (
    "the update of this parameter was put off by overlap_forward, and its ranks parted before its gradient had come; "
    "call optimizer.finish() or hvd.shutdown() first"
)


class Keeper(Protocol):
    """Keeps everybody from what is not there yet: gradients that are under way, parameters that wait for them."""

    def keep(self) -> bool:
        """All gradients have left in the backward pass; True if it keeps them, so that nobody waits there."""
        ...

    def settle(self) -> None:
        """Blocks until nothing is put off any more."""
        ...

    def close(self) -> None:
        """Nothing will be put off any more; not collective."""
        ...


class LateEnd:
    """Of the iterations of one reducer.

    Attributes:
        put_off: the current iteration has been stepped, and has not ended.
    """

    def __init__(self, job: Job, reducer: GradientReducer) -> None:
        """Nothing is put off before there is a keeper."""
        self._job, self._reducer = job, weakref.ref(reducer)
        self._keeper: weakref.ref[Keeper] | None = None
        self.put_off = False

    def use(self, keeper: Keeper) -> None:
        """From now on iterations may be put off, and it is `keeper` who keeps them; a weak reference."""
        self._keeper = weakref.ref(keeper)

    def _parameters(self) -> HookedParameters:
        reducer = self._reducer()
        assert reducer is not None  # whose part this is
        assert reducer.hooked is not None
        return reducer.hooked

    @property
    def possible(self) -> bool:
        """The current iteration may be put off."""
        reducer = self._reducer()
        if reducer is None or reducer.hooked is None or reducer.hooked.empty:
            return False
        return not reducer.shared and reducer.failed_in is None and reducer.hooked.can_put_off

    def kept(self) -> bool:
        """All gradients have left in the backward pass: True if nobody need wait there."""
        keeper = None if self._keeper is None else self._keeper()
        return keeper is not None and not self.put_off and self.possible and keeper.keep()

    def settle(self) -> None:
        """Blocks until nothing is put off any more; not collective."""
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None:
            keeper.settle()

    def close(self) -> None:
        """The reducer closes; nothing is put off. Not collective."""
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None:
            keeper.close()

    def begin(self) -> None:
        """If it is `possible`: this rank takes part in the end of the iteration and waits for nobody."""
        reducer = self._reducer()
        assert reducer is not None
        self.put_off = True
        self._job.joining.begins(reducer, Stage.FINISH)
        self._job.participants.note_finished(reducer)
        self._parameters().put_off()

    def wait_for(self, number: int) -> list[int]:
        """Blocks until the gradient of a parameter is reduced.

        Returns:
            All parameters that are with it, by number among those that want a gradient; none if this rank is needed
            elsewhere, before `step()`.

        Raises:
            CommError: the reduction failed, or the job did.
        """
        reducer = self._reducer()
        if reducer is None or reducer.hooked is None:
            raise CommError(NEVER_CAME)
        interrupted = None if self.put_off else partial(self._job.blocked.need, reducer)
        with reducer.progress.waits(Stage.FINISH if self.put_off else Stage.REDUCE):
            return self._parameters().reductions.wait_for(number, interrupted)

    def reduce(self) -> None:
        """Before `step()`: waits for all gradients, unless this rank is needed elsewhere, as `backward()` does."""
        reducer = self._reducer()
        if reducer is not None and reducer.hooked is not None:
            with reducer.progress.waits(Stage.REDUCE):
                reducer.hooked.reductions.reduce(partial(self._job.blocked.need, reducer))

    def hand_out(self, numbers: Sequence[int]) -> None:
        """What `wait_for` has returned: each `.grad` holds the reduced gradient from now on."""
        self._parameters().reductions.hand_out_some(numbers)

    def ends(self) -> bool:
        """The iteration ends; True if that was put off."""
        was, self.put_off = self.put_off, False
        return was


class User(Protocol):
    """One that uses a reducer's gradients: those of an optimizer."""

    def use_part(self, part: GradientReducer, *, of: GradientReducer) -> None:
        """Some of the parameters of a reducer that this one uses belong to `part` from now on."""
        ...

    def fail(self) -> None:
        """A backward pass has raised that computed gradients of this optimizer."""
        ...


class Sharing:
    """Who uses one reducer.

    Attributes:
        active: several optimizers may use it; the same on all ranks.
        users: those optimizers of this rank that do.
        n_reduced: iterations in which gradients were reduced; a shared reducer may find nothing to reduce.
    """

    def __init__(self, control: ControlPlane, progress: Progress) -> None:
        """`control`: the ranks; `progress`: of the reducer."""
        self._control, self._progress = control, progress
        self.active = False
        self.users: weakref.WeakSet[User] = weakref.WeakSet()
        self.n_reduced = 0

    def is_due(self, *, here: bool) -> bool:
        """Collective, while it is active: whether any rank has something to reduce; ends it if one user is left.

        Args:
            here: this rank has, or cannot know.
        """
        with self._progress.waits(Stage.ASK):
            anywhere, n_users = self._control.maximum(np.array([float(here), float(len(self.users))]))
        self.active = bool(n_users > 1)
        return bool(anywhere > 0)


class GradientReducer:
    """Keeps the gradients of some parameters equal on some of the ranks.

    It lives as long as an optimizer that uses it; hooks, job and watchdog know it by weak references.

    Attributes:
        key: the number of the ranks' process set and its own there, the same on all of these ranks.
        members: the ranks that take part, with their control plane.
        ranks: the same, by their rank among all.
        passes: backward passes whose gradients are added up before they are reduced, of all parameters or of each.
        options: how gradients are reduced.
        progress: how far this rank is in its iterations.
        sharing: which optimizers use it.
        closed: why it is closed; empty while it is open.
        sparse: its sparse gradients.
        late: the end of an iteration where it is put off.
    """

    too_often = TOO_OFTEN

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
        self._job = job
        self._parameters: HookedParameters | None = None
        self._watch: ReducerWatch | None = None
        self._carrier: SparseCarrier | None = None
        self.closed = ""
        self.passes, self.options = passes, options
        self.members, self.ranks = members, members.ranks
        self.key = (members.number, next(job.serials[members.number]))
        self.progress = Progress()
        self._resources = ReducerResources(
            job, members, options, prefix=f"optimizer.{self.key[1]}", known_sparse=known_sparse
        )
        self.sparse, self._carrier = self._resources.sparse, self._resources.carrier
        self.sharing: Sharing = Sharing(self._resources.control, self.progress)
        self._failed: FailedPass | None = None
        self.late = LateEnd(job, self)
        job.disposal.start()
        self.attach(named)
        self._watch = ReducerWatch(job.participants, self)
        job.watchdog.watch(self._watch.current_wait, self._watch.progress)
        job.participants.add(self)

    def attach(self, named: Sequence[Named]) -> None:
        """Collective, between iterations: from now on, these are its parameters, frozen ones too."""
        if self._parameters is not None:
            before, self._parameters = self._parameters, None
            before.close()
        self._resources.control.reclaim()
        try:
            self._parameters = HookedParameters(named, self._resources, passes=self.passes, owner=self)
        except Exception:
            self.close("when its parameters changed, which failed")
            raise
        self._begin_iteration()

    @property
    def hooked(self) -> HookedParameters | None:
        """Those of its parameters that want a gradient; None once it is closed."""
        return self._parameters

    @property
    def named(self) -> list[Named]:
        """Its parameters with their names, frozen ones too."""
        return [] if self._parameters is None else self._parameters.all

    # ── the way of one gradient ──────────────────────────────────────────────────────────────────────────────────

    def begin_backward(self) -> GradientHooks | None:
        """The hooks for its gradients, if it has any. Collective if the pass before has raised: that one is dropped."""
        self.late.settle()
        self._job.participants.begin_backward(self)
        if torch._C._current_graph_task_id() >= 0:  # DDP's join() brings gradients without a pass
            BackwardEnd(self._end_backward, self._fail_backward)
        return None if self._parameters is None else self._parameters.hooks

    def arrive(self, number: int) -> None:
        """For gradients that autograd does not bring: that of a parameter, by its number among those that want one."""
        if self._parameters is not None:
            self._parameters.hooks.arrive(number)

    def _fail_backward(self) -> None:
        """A backward pass has raised, wherever that was."""
        if self._parameters is not None:
            self._parameters.hooks.in_backward = False
        self.fail()
        for user in self.sharing.users:  # whose other parts may have gradients of passes before this one
            user.fail()

    @property
    def failed_in(self) -> int | None:
        """The backward pass that has raised in this iteration; None = none has."""
        return None if self._failed is None else self._failed.number

    def fail(self) -> None:
        """What has come in this iteration does not count."""
        if self._parameters is not None:
            self._failed = self._failed or FailedPass(self._parameters)
            self._failed.number = self._job.participants.n_begun

    def drop_failed(self) -> None:
        """Collective if a pass has raised in this iteration: ends it, with gradients as they were."""
        failed, self._failed = self._failed, None
        if failed is not None:
            failed.drop(self.finish)

    def _end_backward(self) -> None:
        """A backward pass is over: dense gradients that have all come are reduced now, then sparse ones."""
        if self._parameters is None:
            return
        self._parameters.hooks.in_backward = False
        reductions = self._parameters.reductions
        if not reductions.can_reduce:
            return
        self._job.participants.flush()  # other ranks may wait for those of others first
        self._job.joining.begins(self, Stage.REDUCE)
        if self.late.kept():
            return
        with self.progress.waits(Stage.REDUCE):
            reductions.reduce(partial(self._job.blocked.need, self))
        if reductions.problem:
            self.finish()  # which raises: what comes next is the next iteration, as on the other ranks

    def settle(self) -> None:
        """Blocks until no end of an iteration is put off any more."""
        self.late.settle()

    def flush(self) -> None:
        """Sends what has not left if all gradients of this iteration have come; waits for nobody."""
        if self._parameters is not None:
            self._parameters.reductions.flush()

    def as_it_travels(self, number: int) -> torch.Tensor:
        """The gradient of a parameter, made dense unless all ranks expect a sparse one."""
        assert self._parameters is not None
        return self._parameters.reductions.as_it_travels(number)

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @property
    def shared(self) -> bool:
        """Several optimizers may use it; the same on all ranks."""
        return self.sharing.active

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""
        return (parameters := self._parameters) is not None and parameters.reductions.pending

    @property
    def complete(self) -> bool:
        """All gradients of this iteration are reduced and in `.grad`, and it has not ended."""
        return self._parameters is not None and self._parameters.reductions.complete

    @property
    def begun(self) -> bool:
        """Gradients have come on this rank that no finished iteration has reduced."""
        return self._parameters is not None and self._parameters.begun

    @property
    def tuned(self) -> TunedSynchroniser | None:
        """What has the dense gradients reduced; None if there are none."""
        return None if (parameters := self._parameters) is None else parameters.reductions.tuned

    @property
    def in_flight(self) -> InFlight | None:
        """What a device may still be busy with; None where nothing is reduced."""
        return None if (tuned := self.tuned) is None else tuned.synchroniser.in_flight

    @property
    def running(self) -> Running | None:
        """Which iteration and setting its dense gradients are at; None without any."""
        if (tuned := self.tuned) is None:
            return None
        return Running(iteration=tuned.synchroniser.iteration, setting=tuned.knobs.describe(), tuning=tuned.tuning)

    def remember(self) -> None:
        """Stores what an unfinished warm-up has found."""
        if (tuned := self.tuned) is not None:
            tuned.remember()

    def set_passes(self, passes: int | Sequence[int]) -> None:
        """From the next iteration on, gradients of `passes` backward passes are added up before they are reduced."""
        self.passes = passes
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        if self._parameters is not None:
            self._parameters.begin(self.passes)
        self._failed = None

    def finish(self, *, due: bool = True) -> None:
        """Collective: blocks until all gradients are reduced; afterwards `.grad` holds the result.

        Args:
            due: of a shared one: no other optimizer has had gradients reduced since this one last had. If it is not
                due on any rank, and no gradients have come, the reduced gradients are in place.
        """
        assert self._parameters is not None
        if self._parameters.empty:
            return
        if self._failed is not None and self._failed.touched:
            self.drop_failed()
        self._job.joining.begins(self, Stage.FINISH)
        self._job.participants.note_finished(self)
        self._finish(due=due)

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that the other ranks have not begun to end."""
        if self._parameters is not None:
            self._parameters.reductions.contribute_zeros()

    def finish_joined(self) -> None:
        """Collective: what `finish` is on a rank that has joined."""
        self._finish(joined=True)

    def _finish(self, *, joined: bool = False, due: bool = False) -> None:
        parameters, problem, late = self._parameters, "", self.late.ends()
        assert parameters is not None
        if not self.sharing.active or self.sharing.is_due(here=due or self.begun):
            with self.progress.waits(Stage.FINISH):
                if parameters.finish(joined=joined, late=late):
                    self.attach(parameters.all)
                self._begin_iteration()
                problem = parameters.reductions.problem
            self.sharing.n_reduced += 1
        self.progress.finished += 1
        self._job.joining.ends(self)
        if problem:
            raise GradientError(problem)

    @property
    def given(self) -> int:
        """Iterations to which this rank has given all its gradients."""
        parameters = self._parameters
        return self.progress.given(missing=parameters is not None and parameters.reductions.missing)

    def drop_accumulated(self) -> None:
        """Gradients of fewer backward passes than are added up before they are reduced do not count."""
        if self._parameters is not None and not self._parameters.reductions.pending:
            self._parameters.drop_accumulated()
            self._begin_iteration()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self, reason: str) -> None:
        """Not collective: gradients are not reduced any more, because of `reason`. Idempotent."""
        if not self.closed:
            self.closed = reason
            self.late.close()
            self._job.participants.remove(self)
            _close(self._job, self.key, self._watch, self._parameters, self._carrier)
            self._parameters = self._failed = None

    def __del__(self) -> None:
        # In any thread, at any time: what must be closed is handed over.
        if not self.closed:
            self._job.disposal.put(partial(_close, self._job, self.key, self._watch, self._parameters, self._carrier))


def _close(
    job: Job,
    key: Key,
    watch: ReducerWatch | None,
    parameters: HookedParameters | None,
    carrier: SparseCarrier | None,
) -> None:
    """Takes away and closes what belongs to one reducer on this rank, as far as it was made; it may be gone itself."""
    job.joining.forget(key)
    if watch is not None:
        job.watchdog.forget(watch.current_wait, watch.progress)
    if parameters is not None:
        parameters.close()
    if carrier is not None:
        carrier.close()
