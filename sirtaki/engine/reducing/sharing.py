"""Gradients of one optimizer, whose parameters other optimizers may have, too."""

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
"""What one rank knows of the parameters of a new optimizer. First, the serial number of the `GradientHooks` of each
parameter, None if no hooks of these ranks have it. Second, why parameters cannot be shared, by serial number; -1 stands
for hooks of other ranks. Third, the serial numbers of hooks with gradients in flight."""


class OptimizerGradients:
    """The `GradientHooks` that one optimizer uses.

    Every parameter belongs to one `GradientHooks`. If a new optimizer has some of the parameters of an older one, these
    are split off into hooks that both use. The optimizer that steps first finishes the iteration of the shared hooks,
    and the other finds the reduced gradients in place.

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
        self._seen: dict[GradientHooks, int] = {}
        self._claim(named)

    # ── which reducers ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def reducers(self) -> list[GradientHooks]:
        """The hooks in use, in the order in which they finish; the same on all ranks."""
        return list(self._seen)

    def _use(self, reducer: GradientHooks, seen: int) -> None:
        reducer.users.add(self)
        self._seen = dict(sorted([*self._seen.items(), (reducer, seen)], key=lambda item: item[0].key[1]))

    def use_part(self, part: GradientHooks, *, of: GradientHooks) -> None:
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
            reducer = GradientHooks(job, members, free, passes=self._passes, options=self._options)
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
        """Return the local knowledge of this rank about these parameters."""
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

    def _difference(self, owner: GradientHooks, dtype: torch.dtype) -> str:
        """Describe an option of `owner` that excludes sharing a parameter with it; "" if there is none."""
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
        """Drop the ready gradients, because a backward pass that computed gradients of this optimizer has raised."""
        for reducer in self._seen:
            reducer.fail()

    def drop(self) -> bool:
        """Drop gradients that were not used by a step. Call before gradients are zeroed.

        Collective where a backward pass has raised, or where `step()` was left out.

        Returns:
            False if gradients are being reduced, since some did not come in the backward pass.
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


def reducers_of(job: Job) -> list[GradientHooks]:
    """Return the hooks of a job that are in use or not yet garbage-collected, the oldest first."""
    return [participant for participant in job.participants if isinstance(participant, GradientHooks)]


def _agreed(said: Sequence[Sequence[int | None]], names: Sequence[str]) -> tuple[list[int | None], set[int]]:
    """Agree on each parameter's owner (None = free), and on owners that no longer exist on some rank. Collective.

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


def _split(job: Job, lender: GradientHooks, wanted: set[int]) -> GradientHooks:
    """Collective: gives these parameters of `lender`, by id, to a new reducer that all its users use, too."""
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
