"""Parameters with hooks on them, and the reductions of their gradients: made anew whenever these parameters change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from sirtaki.autotune.trial import Arm
from sirtaki.comm.collectives.engine import EagerEngine
from sirtaki.comm.collectives.operations import Kind, Signature
from sirtaki.comm.gradients.buffers import Reduction

from ..sparse_carrier import SparseCarrier
from ..sparse_gradients import SparseReductions
from ..tuning.warmup import TunedSynchroniser
from .hooks import Arrive, Dense, GradientHooks, NanCheck, Owner
from .same_model import Named, StartCheck, require_same_model

if TYPE_CHECKING:
    from sirtaki.comm.collectives.rank_sets import RankSet
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.comm.gradients.iteration import Interrupted
    from sirtaki.comm.gradients.synchroniser import Synchroniser

    from ..job import Job


@torch.no_grad()
def reduce_thawed(
    params: Sequence[torch.Tensor], *, prefix: str, reduction: Reduction, engine: EagerEngine, unused_as_none: bool
) -> None:
    """Collective: reduces gradients of parameters that have no hook yet; afterwards they are dense.

    Args:
        params: the same on all ranks.
        prefix: of the operations' names.
        reduction: what is done to every gradient.
        engine: of the ranks that take part.
        unused_as_none: what no rank has computed stays None.
    """
    computed = torch.tensor([float(param.grad is not None) for param in params])
    anywhere = _sum(engine, computed, f"{prefix}.computed") if unused_as_none else torch.ones_like(computed)
    for number, (param, wanted) in enumerate(zip(params, anywhere.tolist(), strict=True)):
        if not wanted:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        elif param.grad.is_sparse:
            param.grad = param.grad.to_dense()
        param.grad.copy_(_sum(engine, param.grad, f"{prefix}.{number}", reduction))


def _sum(engine: EagerEngine, tensor: torch.Tensor, name: str, reduction: Reduction | None = None) -> torch.Tensor:
    reduction = reduction or Reduction()
    signature = Signature.of(
        [tensor],
        name=name,
        kind=Kind.ALLREDUCE,
        op=reduction.op.value,
        factors=(reduction.prescale, reduction.postscale),
        by_all=True,
    )
    work = engine.submit(signature, [tensor])
    engine.finish(work)
    return work.results[0]


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


class ReducerResources:
    """The ranks, and means to reduce dense, sparse and thawed gradients over them.

    Attributes:
        control: of the ranks that take part.
        options: how gradients are reduced.
        sparse: sparse gradients, which are known from one set of parameters to the next.
        carrier: what these travel by; closed by the caller.
        nan_check: looks at each complete gradient; None = nobody does.
        start_check: looks at the parameters before the first update.
    """

    def __init__(
        self, job: Job, members: RankSet, options: ReducerOptions, *, prefix: str, known_sparse: Iterable[str]
    ) -> None:
        """Starts nothing.

        Args:
            job: of this process.
            members: the ranks that take part, with their control plane.
            options: how to reduce.
            prefix: of the operations' names.
            known_sparse: parameters of which all ranks know that their gradients are sparse.
        """
        assert members.control is not None
        assert members.engine is not None
        self.control, self._engine = members.control, members.engine
        unused_as_none = options.unused_as_none or job.settings.unused_as_none
        settings = self._settings = replace(job.settings, unused_as_none=unused_as_none)
        self.options, self._prefix = options, prefix
        self._carried = None if job.elastic is None else job.elastic.tuning
        self.carrier = SparseCarrier(members.control, settings, prefix=f"{prefix}.")
        self.sparse = SparseReductions(
            options.reduction,
            self.carrier,
            known_sparse,
            as_dense=options.sparse_as_dense,
            unused_as_none=settings.unused_as_none,
        )
        self.nan_check = NanCheck(members.control) if settings.check_nan else None
        self.start_check = StartCheck()

    def make_tuned(self, dense: Sequence[Named]) -> TunedSynchroniser:
        """Collective: what reduces the dense gradients of these parameters; closed by the caller."""
        return TunedSynchroniser(
            self.control,
            self._settings,
            [param for _, param in dense],
            [name for name, _ in dense],
            reduction=self.options.reduction,
            arms=self.options.arms,
            carried=self._carried,
            overlaps=self.options.overlaps,
        )

    def reduce_thawed(self, params: Sequence[torch.Tensor]) -> None:
        """Collective: reduces gradients of parameters that have no hook yet, the same on all ranks."""
        reduce_thawed(
            params,
            prefix=f"{self._prefix}.thawed",
            reduction=self.options.reduction,
            engine=self._engine,
            unused_as_none=self._settings.unused_as_none,
        )


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
        self._has_sparse = bool(sparse.names)  # else nothing of `sparse` runs in an iteration
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
        return (self._sync is not None and self._sync.pending) or (self._has_sparse and self._sparse.pending)

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
        return (
            self._has_sparse
            and sparse.pending
            and not (sparse.missing or self.complete)
            and (sync is None or sync.complete)
        )

    def reduce(self, interrupted: Interrupted) -> None:
        """If it `can_reduce`: blocks until that is reduced, unless it is interrupted.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        sync, sparse = self._sync, self._sparse
        if sync is None or sync.complete or sync.reduce(interrupted):
            self.complete = not self._has_sparse or (not sparse.missing and sparse.reduce(interrupted))
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
        """Blocks until the gradient of a parameter is reduced; see `Synchroniser.wait_for`."""
        assert self._sync is not None
        return self._sync.wait_for(number, interrupted)

    def hand_out_some(self, numbers: Sequence[int]) -> None:
        """Once `wait_for` has returned these parameters: their `.grad` holds the reduced gradient."""
        assert self._sync is not None
        self._sync.hand_out_some(numbers)

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
        if self._has_sparse and not self.complete:
            self._sparse.put_in_missing(joined=joined)
        profiling = self._sync is not None and self._sync.profiling
        if self.tuned is not None:
            self.tuned.finish(joined=joined)
        if self._has_sparse:
            self._sparse.reduce(None)
        changed = profiling and self._sparse.agree(control, [name for name, _ in self._named])
        if self._has_sparse:
            self._sparse.end_iteration()
        return changed

    def close(self) -> None:
        """Not collective, once: nothing is reduced any more."""
        if self.tuned is not None:
            self.tuned.close()


class HookedParameters:
    """The parameters of a reducer, as long as they, and what is known of their gradients, stay the same.

    Attributes:
        all: with their names, frozen ones too.
        named: those that wanted a gradient when this was made.
        hooks: on these.
        reductions: of their gradients.
    """

    def __init__(
        self, named: Sequence[Named], resources: ReducerResources, *, passes: int | Sequence[int], owner: Owner
    ) -> None:
        """Collective.

        Args:
            named: all of them, the same on all ranks.
            resources: what they are reduced with.
            passes: backward passes whose gradients are added up, of all that want a gradient or of each.
            owner: see `GradientHooks`.

        Raises:
            MismatchError: on all ranks, if their parameters differ.
        """
        self.all = list(named)
        self.named = [(name, param) for name, param in named if param.requires_grad]
        self._frozen = [param for _, param in named if not param.requires_grad]
        self._resources = resources
        require_same_model(resources.control, self.named)
        self.reductions = Reductions(self.named, resources.sparse, resources.make_tuned)
        if resources.nan_check is not None:
            resources.nan_check.names = [name for name, _ in self.named]
        try:
            self.hooks = GradientHooks(
                [param for _, param in self.named],
                self.reductions.arrive,
                resources.options.groups,
                passes=passes,
                owner=owner,
                nan_check=resources.nan_check,
            )
        except RuntimeError:  # torch's, for what is no leaf
            self.reductions.close()
            raise

    def begin(self, passes: int | Sequence[int]) -> None:
        """An iteration begins: nothing has come, and `passes` backward passes are added up."""
        self.hooks.begin(passes)
        self.reductions.complete = False

    @property
    def thawed(self) -> list[torch.Tensor]:
        """Parameters that want a gradient now, and were frozen when this was made."""
        return [param for param in self._frozen if param.requires_grad]

    @property
    def empty(self) -> bool:
        """No parameter wants a gradient."""
        return not (self.named or self.thawed)

    @property
    def begun(self) -> bool:
        """Gradients have come on this rank that no finished iteration has reduced."""
        return self.reductions.pending or bool(self.hooks.counted) or bool(self.thawed)

    @property
    def can_put_off(self) -> bool:
        """Nothing in the end of this iteration needs the other ranks, once all gradients have left."""
        resources = self._resources
        asks = resources.nan_check is not None or not resources.start_check.done
        return self.reductions.can_put_off and not (asks or self.thawed)

    def put_off(self) -> None:
        """If it `can_put_off`: all gradients leave; waits for nobody."""
        self.hooks.release()
        if any(self.hooks.passes_left):
            self.reductions.note_sparse(self.hooks.passes_left)
        self.reductions.put_off()

    def finish(self, *, joined: bool, late: bool = False) -> bool:
        """Collective: blocks until all gradients are reduced; True if hooks are to be made anew after this iteration.

        Args:
            joined: this rank has no data any more and takes part with zeros.
            late: it was put off, and what was thawed since belongs to the next iteration.
        """
        resources, passes_left, thawed = self._resources, self.hooks.passes_left, [] if late else self.thawed
        if resources.nan_check is not None:
            resources.nan_check.finish(passes_left, [param.grad for _, param in self.named])
        self.hooks.release()
        if any(passes_left):
            self.reductions.note_sparse(passes_left)
        found_sparse = self.reductions.finish(resources.control, joined=joined)
        if thawed:
            resources.reduce_thawed(thawed)
        if not resources.start_check.done:  # and nothing is updated
            resources.start_check.look(resources.control, [item for item in self.all if item[1].requires_grad])
        if joined:
            for param in [*(param for _, param in self.named), *thawed]:
                param.grad = None  # the others' gradients must not add to the next ones of this rank
        return found_sparse or bool(thawed)

    def drop_accumulated(self) -> None:
        """Gradients of which some passes have come, but are not being reduced, do not count."""
        for param in self.hooks.counted:
            param.grad = None

    def close(self) -> None:
        """Not collective, once: takes the hooks away; nothing is reduced any more."""
        self.hooks.remove()
        self.reductions.close()
