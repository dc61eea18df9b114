"""Watches gradients and has them reduced: what stands between autograd and the synchroniser.

Everything that depends on how a gradient comes is here: hooks, accumulation over several
backward passes, groups, sparse gradients, parameters that are thawed in mid-training. The synchroniser knows only
dense gradients that are ready or not, the optimizer only that they are reduced in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from sirtaki.comm.gradients.in_flight import InFlight
from sirtaki.errors import GradientError

from .backward_end import BackwardEnd
from .failed_pass import FailedPass
from .gradient_hooks import TOO_OFTEN, GradientHooks
from .hooked_parameters import HookedParameters
from .late_end import LateEnd
from .participants import Progress, Running, Stage
from .reducer_end import let_go
from .reducer_options import ReducerOptions
from .reducer_resources import ReducerResources
from .reducer_watch import ReducerWatch
from .same_model import Named
from .sharing import Sharing
from .sparse_carrier import SparseCarrier
from .warmup import TunedSynchroniser

if TYPE_CHECKING:
    from sirtaki.comm.collectives.rank_sets import RankSet

    from .job import Job


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
        self.sharing: Sharing[GradientReducer] = Sharing(self._resources.control, self.progress)
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
        """See `Owner`. Collective if the pass before has raised: what it has left is dropped."""
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
        """See `Participant`."""
        return None if self._failed is None else self._failed.number

    def fail(self) -> None:
        """What has come in this iteration does not count."""
        if self._parameters is not None:
            self._failed = self._failed or FailedPass(self._parameters)
            self._failed.number = self._job.participants.n_begun

    def drop_failed(self) -> None:
        """See `Participant`."""
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
        """See `Participant`."""
        self.late.settle()

    def flush(self) -> None:
        """Sends what has not left if all gradients of this iteration have come; waits for nobody."""
        if self._parameters is not None:
            self._parameters.reductions.flush()

    def as_it_travels(self, number: int) -> torch.Tensor:
        """See `Owner`: made dense unless all ranks expect a sparse one."""
        assert self._parameters is not None
        return self._parameters.reductions.as_it_travels(number)

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @property
    def shared(self) -> bool:
        """Several optimizers may use it; the same on all ranks."""
        return self.sharing.active

    @property
    def pending(self) -> bool:
        """See `Participant`."""
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
        """See `Participant`."""
        return None if (tuned := self.tuned) is None else tuned.synchroniser.in_flight

    @property
    def running(self) -> Running | None:
        """See `Participant`."""
        if (tuned := self.tuned) is None:
            return None
        return Running(iteration=tuned.synchroniser.iteration, setting=tuned.knobs.describe(), tuning=tuned.tuning)

    def remember(self) -> None:
        """See `Participant`."""
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
        """See `Participant`."""
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
            let_go(self._job, self.key, self._watch, self._parameters, self._carrier)
            self._parameters = self._failed = None

    def __del__(self) -> None:
        # In any thread, at any time: what must be closed is handed over.
        if not self.closed:
            self._job.disposal.put(partial(let_go, self._job, self.key, self._watch, self._parameters, self._carrier))
