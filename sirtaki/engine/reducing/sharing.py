"""Gradients of one optimizer, which may share parameters with other optimizers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import torch

from sirtaki.comm.collectives.engine import RankSet
from sirtaki.comm.gradients.state import IterationState
from sirtaki.errors import ConfigError, GradientError, MismatchError, NotInitializedError

from ..job import Job
from .checks import Named
from .gradient_hooks import GradientHooks, ReducerOptions

IN_FLIGHT = "add_param_group() between backward() and step(): call step() or synchronize() first"

CLOSED = "this DistributedOptimizer was closed {reason}; make a new one: hvd.DistributedOptimizer(…)"

_Owners = tuple[list[int | None], dict[int, str], list[int]]
"""The `GradientHooks` that already reduce a new optimizer's parameters, as one rank sees them. A triple:

- for each parameter, the serial number of its hooks in this process set; None = it has none;
- {serial number: why these hooks cannot be shared}. The key -1 stands for all hooks of other process sets;
- serial numbers of the hooks whose iteration has begun."""


class OptimizerGradients:
    """The `GradientHooks` that one optimizer uses. They reduce the gradients of some parameters each.

    Every parameter belongs to one `GradientHooks`. If a new optimizer has some parameters of an older one, the
    constructor moves these parameters into new hooks that both optimizers use. The optimizer that steps first finishes
    the iteration of the shared hooks. The second optimizer then finds the reduced gradients in `.grad`.

    Python collects an optimizer at different times on different ranks. If a parameter's hooks exist on some ranks only,
    these ranks close the hooks when a new optimizer claims the parameter.
    """

    def __init__(
        self, job: Job, members: RankSet, named: Sequence[Named], *, passes: int, options: ReducerOptions
    ) -> None:
        """Register which of the job's gradient hooks reduce the parameters of a new optimizer. Collective.

        Args:
            job: job of this process.
            members: ranks over which the optimizer averages, and their communicator for small messages.
            named: all parameters of the optimizer with their names, frozen ones too, the same on all ranks.
            passes: backward passes whose gradients are accumulated before the reduction.
            options: options of the reduction.

        Raises:
            ConfigError: a parameter belongs to another optimizer with different options. Raised on all ranks.
            MismatchError: the ranks' models differ. Raised on all ranks.
        """
        self._job, self._members, self._passes, self._options = job, members, passes, options
        # For each `GradientHooks` in use, the value of `n_reduced` when this optimizer last called `finish` on it.
        # Sorted in the order of these calls.
        self._seen: dict[GradientHooks, int] = {}
        self._claim(named)

    # ── which hooks ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def reducers(self) -> list[GradientHooks]:
        """The hooks that this optimizer uses, in the order in which they finish an iteration; the same on all ranks."""
        return list(self._seen)

    def _use(self, reducer: GradientHooks, seen: int) -> None:
        reducer.users.add(self)
        self._seen = dict(sorted([*self._seen.items(), (reducer, seen)], key=lambda item: item[0].key[1]))

    def use_part(self, part: GradientHooks, *, of: GradientHooks) -> None:
        """Add `part` to the hooks that this optimizer uses. `part` has taken over some parameters of the hooks `of`."""
        self._use(part, self._seen[of])

    def _claim(self, named: Sequence[Named]) -> None:
        """Share the existing hooks of these parameters, and make hooks for parameters that have none. Collective."""
        job, members = self._job, self._members
        assert members.control is not None
        job.participants.drain()
        if reducers_of(job):
            # Free deleted optimizers. Only the garbage collector can free them, because they are in reference cycles.
            gc.collect()
        job.disposal.drain()
        members.control.reclaim()
        owners, in_flight = self._agree_on_owners(named)
        lenders = {reducer.key[1]: reducer for reducer in reducers_of(job) if reducer.members is members}
        for serial in sorted({owner for owner in owners if owner is not None}):
            lender = lenders[serial]
            if serial in in_flight:
                lender.finish()
                # Mark the hooks as shared now. Otherwise the older optimizer's next call of `finish` would reduce the
                # gradients of this iteration again.
                lender.shared = True
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
            reducer = GradientHooks(job, members, free, passes=self._passes, options=self._options)
            self._use(reducer, reducer.n_reduced)

    def _agree_on_owners(self, named: Sequence[Named]) -> tuple[list[int | None], set[int]]:
        """Agree on the owner (`GradientHooks`) of each parameter. Collective.

        Close hooks of this rank that do not exist on another rank any more.

        Returns:
            Two items. The first is the serial number of each parameter's hooks (None = the parameter has none). The
            second is the set of serial numbers of hooks that have begun an iteration on any rank.
        """
        members = self._members
        assert members.control is not None
        by_rank: list[_Owners] = members.control.all_gather(self._owners(named))
        owners, gone = _agreed([serials for serials, _, _ in by_rank], [name for name, _ in named])
        for reducer in reducers_of(self._job):
            if reducer.members is members and reducer.key[1] in gone:
                reducer.close("since another rank has dropped it, and a new one takes its parameters")
        for _, conflicts, _ in by_rank:
            for serial, conflict in conflicts.items():
                if serial not in gone:
                    raise ConfigError(conflict)
        return owners, {serial for _, _, in_flight in by_rank for serial in in_flight}

    def _owners(self, named: Sequence[Named]) -> _Owners:
        """Return the current owners of these parameters on this rank."""
        reducers = reducers_of(self._job)
        owner_of = {id(param): reducer for reducer in reducers for _, param in reducer.named}
        serials: list[int | None] = []
        conflicts: dict[int, str] = {}
        for name, param in named:
            owner = owner_of.get(id(param))
            serials.append(owner.key[1] if owner is not None and owner.members is self._members else None)
            if owner is not None and (difference := self._difference(owner, param.dtype)):
                # Report hooks of another process set as -1, because serial numbers are unique within one process set
                # only.
                serial = owner.key[1] if owner.members is self._members else -1
                conflicts.setdefault(
                    serial,
                    f"the parameter {name} belongs to another DistributedOptimizer, which has {difference}: give both "
                    "the same options, or close() the other one before this one is made",
                )
        in_flight = [reducer.key[1] for reducer in reducers if reducer.members is self._members and reducer.begun]
        return serials, conflicts, in_flight

    def _difference(self, owner: GradientHooks, dtype: torch.dtype) -> str:
        """Describe an option that differs between `owner` and this optimizer, although it must be equal.

        "" if there is none.
        """
        if owner.members is not self._members:
            return f"a process set of ranks {list(owner.members.ranks)} (here: {list(self._members.ranks)})"
        if owner.passes != self._passes:
            return f"backward_passes_per_step={owner.passes} (here: {self._passes})"
        own, other = self._options, owner.options
        if own.sparse_as_dense != other.sparse_as_dense:
            return f"sparse_as_dense={other.sparse_as_dense} (here: {own.sparse_as_dense})"
        if (
            own.reduction.wire_dtype_for(dtype) != other.reduction.wire_dtype_for(dtype)
            or own.reduction.compression != other.reduction.compression
        ):
            return "another compression"
        if replace(own.reduction, wire_dtype=()) != replace(other.reduction, wire_dtype=()):
            return "another op or gradient_predivide_factor"
        return ""

    def extend(self, named: Sequence[Named]) -> None:
        """Add parameters to the optimizer. Collective.

        Raises:
            RuntimeError: gradients are being reduced.
            ConfigError: a parameter belongs to another optimizer with different options. Raised on all ranks.
            MismatchError: the ranks' models differ. Raised on all ranks.
        """
        if self.pending:
            raise RuntimeError(IN_FLIGHT)
        self._require_open()
        self._claim(named)

    # ── iterations ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> bool:
        """Return whether gradients are being reduced."""
        return any(reducer.pending for reducer in self._seen)

    @property
    def begun(self) -> bool:
        """Return whether this rank has gradients of the current iteration, accumulated ones included."""
        return any(reducer.begun for reducer in self._seen)

    def fail(self) -> None:
        """Drop the ready gradients, because a backward pass that computed gradients of this optimizer has raised."""
        for reducer in self._seen:
            reducer.fail()

    def drop(self) -> bool:
        """Drop the gradients that were computed since the last `finish`. Call before user code zeroes gradients.

        Collective if a backward pass has raised, or if gradients were reduced and `finish` was not called yet.

        Returns:
            False if the reduction of ready gradients has not ended. Nothing is dropped in this case.
        """
        failed = reduced = unreduced = False
        for reducer in self._seen:
            failed |= reducer.state is IterationState.FAILED
            if reducer.pending:
                reduced |= reducer.state is IterationState.REDUCED
                unreduced |= reducer.state is not IterationState.REDUCED
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
        """Accumulate the gradients of `passes` backward passes before the reduction, from the next iteration on.

        For parameters that other optimizers share, this changes the number of passes of those optimizers, too.
        """
        self._passes = passes
        for reducer in self._seen:
            reducer.set_passes(passes)

    def finish(self) -> None:
        """Block until every `.grad` holds the reduced gradient, and end the iteration. Collective.

        Raises:
            NotInitializedError: the optimizer is closed.
            GradientError: user code has changed a gradient before it was reduced. The iteration has ended on all ranks.
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
        """Stop reducing this optimizer's gradients. Close hooks that no optimizer uses any more. Idempotent."""
        seen, self._seen = self._seen, {}
        for reducer in seen:
            reducer.users.discard(self)
            if not reducer.users:
                reducer.close("by close()")


def reducers_of(job: Job) -> list[GradientHooks]:
    """Return all `GradientHooks` of a job that are not closed, the oldest first."""
    return [participant for participant in job.participants if isinstance(participant, GradientHooks)]


def _agreed(by_rank: Sequence[Sequence[int | None]], names: Sequence[str]) -> tuple[list[int | None], set[int]]:
    """Find out from all ranks' answers which `GradientHooks` already reduce each parameter.

    Args:
        by_rank: for each rank and parameter, the serial number of the parameter's hooks, or None.
        names: names of the parameters.

    Returns:
        For each parameter, the serial number of its hooks, or None; and the serial numbers of hooks that at least one
        rank has closed, although others have not.

    Raises:
        MismatchError: the ranks wrap different parameters of other optimizers.
    """
    # If the ranks' models differ, continue, because the constructor of `GradientHooks` raises an error for this case.
    if len({len(serials) for serials in by_rank}) > 1:
        return [None] * len(names), set()
    by_param = [set(owners) for owners in zip(*by_rank, strict=True)]
    for name, owners in zip(names, by_param, strict=True):
        if len(owners - {None}) > 1:
            raise MismatchError(
                f"the parameter {name} belongs to different optimizers on different ranks; each DistributedOptimizer "
                "must wrap the same parameters on all ranks"
            )
    gone = {owner for owners in by_param if None in owners for owner in owners if owner is not None}
    agreed = [next(iter(owners)) if len(owners) == 1 else None for owners in by_param]
    return [None if owner in gone else owner for owner in agreed], gone


def _split(job: Job, lender: GradientHooks, wanted: set[int]) -> GradientHooks:
    """Move the parameters with these Python ids from `lender` to new hooks. Return the new hooks. Collective.

    The optimizers that use `lender` then use the new hooks, too.
    """
    lent = [(name, param) for name, param in lender.named if id(param) in wanted]
    lender.attach([(name, param) for name, param in lender.named if id(param) not in wanted])
    reducer = GradientHooks(
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
