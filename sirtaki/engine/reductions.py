"""What is reduced of one set of parameters: the dense gradients by a synchroniser, the sparse ones by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from .gradient_groups import Arrive
from .gradient_hooks import Dense
from .same_model import Named
from .sparse_gradients import SparseReductions
from .warmup import TunedSynchroniser

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.comm.gradients.iteration import Interrupted
    from sirtaki.comm.gradients.synchroniser import Synchroniser


class Reductions:
    """The reductions of an iteration, as one.

    Attributes:
        arrive: for each parameter, what is done with its gradient once it is complete.
        tuned: what has the dense gradients reduced; None if there are none.
        all_dense: no parameter is known to have sparse gradients.
        complete: all gradients of this iteration are reduced and in `.grad`, and it has not ended.
    """

    def __init__(
        self,
        named: Sequence[Named],
        sparse: SparseReductions,
        make_tuned: Callable[[Sequence[Named]], TunedSynchroniser],
    ) -> None:
        """Collective.

        Args:
            named: the parameters that want a gradient.
            sparse: knows which ones have sparse gradients, and reduces these; it may have reduced those of other
                parameters before.
            make_tuned: makes what reduces the dense gradients of these parameters; collective.
        """
        self._named, self._sparse = list(named), sparse
        sparse.watch(dict(named))
        dense = [number for number, (name, _) in enumerate(named) if name not in sparse.names]
        self.tuned = make_tuned([named[number] for number in dense]) if dense else None
        self._sync: Synchroniser | None = None if self.tuned is None else self.tuned.synchroniser
        self.all_dense = len(dense) == len(named)
        self.arrive: list[Arrive] = [partial(sparse.start, name) for name, _ in named]
        for index, number in enumerate(dense):
            assert self._sync is not None
            self.arrive[number] = Dense(self._sync.ready, index)
        self.complete = False

    # ── what has come ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> bool:
        """Gradients are being reduced."""
        return (self._sync is not None and self._sync.pending) or self._sparse.pending

    @property
    def missing(self) -> bool:
        """Gradients of this iteration have not come."""
        return bool((self._sync is not None and self._sync.missing_names()) or self._sparse.missing)

    def as_it_travels(self, number: int) -> torch.Tensor:
        """The sparse gradient of a parameter, made dense, in `.grad`, too, unless all ranks expect a sparse one."""
        name = self._named[number][0]
        if self._sync is not None and self._sparse.looks_new(name) and not self._sync.profiling:
            self._sync.profile_again()  # the ranks agree on it then
        return self._sparse.as_it_travels(name)

    def note_sparse(self, passes_left: Sequence[int]) -> None:
        """Sparse gradients that have not come travel as they would if they had; `passes_left`: 0 = it has come."""
        for number, (left, (_, param)) in enumerate(zip(passes_left, self._named, strict=True)):
            if left and param.grad is not None and param.grad.is_sparse and param.requires_grad:
                self.as_it_travels(number)

    def detach(self) -> None:
        """Every `.grad` is the user's alone from now on."""
        if self._sync is not None:
            self._sync.detach()

    # ── the end of a backward pass ───────────────────────────────────────────────────────────────────────────────

    @property
    def can_reduce(self) -> bool:
        """All dense gradients of this iteration have come, or were reduced before and all sparse ones have come."""
        sync, sparse = self._sync, self._sparse
        if sync is not None and sync.can_reduce:
            return True
        return sparse.pending and not (sparse.missing or self.complete) and (sync is None or sync.complete)

    def reduce(self, interrupted: Interrupted) -> None:
        """If it `can_reduce`: blocks until that is reduced, unless it is interrupted.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        sync, sparse = self._sync, self._sparse
        if sync is None or sync.complete or sync.reduce(interrupted):
            self.complete = not sparse.missing and sparse.reduce(interrupted)
            if sync is not None and sync.profiling:
                sparse.make_sparse(sparse.found)

    def flush(self) -> None:
        """Sends what has not left if all dense gradients of this iteration have come; waits for nobody."""
        if self._sync is not None and self._sync.can_reduce:
            self._sync.flush()

    # ── the end of an iteration that comes late ──────────────────────────────────────────────────────────────────

    @property
    def can_put_off(self) -> bool:
        """Gradients of this iteration may be waited for one by one, once all have left."""
        return self.all_dense and not self._sparse.found and self.tuned is not None and self.tuned.can_put_off

    def put_off(self) -> None:
        """If it `can_put_off`: sends what has not left, or zeros for what has not come; waits for nobody."""
        assert self._sync is not None
        self._sync.flush()

    def wait_for(self, number: int, interrupted: Interrupted | None) -> list[int]:
        """Blocks until the gradient of a parameter is reduced; see `CurrentIteration.wait_for`."""
        assert self._sync is not None
        return self._sync.current.wait_for(number, interrupted)

    def hand_out_some(self, numbers: Sequence[int]) -> None:
        """Once `wait_for` has returned these parameters: their `.grad` holds the reduced gradient."""
        assert self._sync is not None
        self._sync.current.hand_out_some(numbers)

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that the other ranks have not begun to end."""
        self._sparse.put_in_missing(joined=True)
        if self._sync is not None:
            self._sync.contribute_zeros()

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @property
    def problem(self) -> str:
        """What makes the gradients of this iteration undefined; empty until they are reduced, and if all is well."""
        return "" if self._sync is None else self._sync.problem

    def finish(self, control: ControlPlane, *, joined: bool) -> bool:
        """Collective: blocks until all is reduced; True if gradients were found to be sparse, so that this must change.

        Args:
            control: the ranks.
            joined: this rank has no data any more and takes part with zeros.
        """
        if not self.complete:
            self._sparse.put_in_missing(joined=joined)
        profiling = self._sync is not None and self._sync.profiling
        if self.tuned is not None:
            self.tuned.finish(joined=joined)
        self._sparse.reduce(None)
        changed = profiling and self._sparse.agree(control, [name for name, _ in self._named])
        self._sparse.end_iteration()
        return changed

    def close(self) -> None:
        """Not collective, once: nothing is reduced any more."""
        if self.tuned is not None:
            self.tuned.close()
