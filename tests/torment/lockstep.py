"""All ranks of a program in one process: their replicas and optimizers, and how gradients are added up and reduced."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch

from .features import Feature
from .program import BlockKind, OptimizerSpec, Program
from .replica import Replica
from .wrapped import Wrapped, legal

Gradients = list[dict[str, torch.Tensor]]
"""By rank, what one backward pass computes."""


LARGE = 16.0
"""Of gradients that travel as float16: they may cancel out, and are rounded to 2**-10 of their size before."""


class Lockstep:
    """What all ranks have, and what their gradients are.

    Attributes:
        n_ranks: world size.
        features: what programs may do.
        replicas: one a rank.
        names: of all parameters.
        sparse: those that have sparse gradients.
        optimizers: those of the script.
        computed: by rank, what came and is not reduced yet.
        local: parameters changed by a backward pass since they were last reduced.
        began: parameters of which something came since the last iteration in which they were reduced ended.
        reduced: how many such iterations there were, by parameter.
        divided: parameters of optimizers that have had some in common with others.
        joined: some ranks have no data any more.
    """

    def __init__(self, program: Program, features: frozenset[Feature]) -> None:
        self.features = features
        self.n_ranks = program.ranks
        self.replicas = [Replica(program, rank) for rank in range(program.ranks)]
        self.names = program.parameters
        self.sparse = {name for name in self.names if program.kind_of(name) is BlockKind.SPARSE}
        self.computed: Gradients = [{} for _ in self.replicas]
        self.local: set[str] = set()
        self.began: set[str] = set()
        self.reduced = dict.fromkeys(self.names, 0)
        self.divided: set[str] = set()
        self.joined = False
        self._unused_as_none = dict(program.environment).get("unused") == "none"
        self.optimizers: list[Wrapped] = []
        for spec in program.optimizers:
            self.optimizers.append(self.wrap(spec))

    # ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────

    def wrap(self, spec: OptimizerSpec) -> Wrapped:
        """A new optimizer, which is not one of `optimizers` yet."""
        self.share(spec, spec.parameters)
        members = spec.process_set or tuple(range(self.n_ranks))
        wrapped = Wrapped(spec, [replica.optimizer(spec) for replica in self.replicas], members)
        wrapped.seen = {name: self.reduced[name] for name in spec.parameters}
        self.attach(wrapped)
        return wrapped

    def share(self, spec: OptimizerSpec, names: Iterable[str]) -> None:
        """These parameters go to an optimizer with these options; others may have them, too."""
        for other in self.optimizers:
            shared = set(other.spec.parameters) & set(names)
            legal(not shared or other.spec.options == spec.options, "other options for a shared parameter")
        for other in self.optimizers:
            if set(other.spec.parameters) & set(names):
                self.divided |= {*other.spec.parameters, *spec.parameters}
        if set(spec.parameters) & self.divided:
            self.divided |= set(names)

    def attach(self, wrapped: Wrapped) -> None:
        """From now on, gradients of those parameters are watched that want one."""
        wrapped.hooked = {name for name in wrapped.spec.parameters if self.wanted(name)}
        wrapped.begin()

    def wanted(self, name: str) -> bool:
        """The parameter wants a gradient."""
        return self.replicas[0].parameters[name].requires_grad

    def at(self, number: int) -> Wrapped:
        """The optimizer of this number."""
        legal(number < len(self.optimizers), "no such optimizer")
        return self.optimizers[number]

    def needs(self, feature: Feature) -> None:
        """Raises IllegalError unless this feature is on."""
        legal(feature in self.features, f"{feature.value}: not yet")

    def is_idle(self, wrapped: Wrapped) -> bool:
        """None of its gradients has come since it was last stepped."""
        return not (wrapped.pending or wrapped.broken or self.local & set(wrapped.spec.parameters))

    def require_idle(self) -> None:
        """Raises IllegalError unless all are between two steps."""
        legal(all(self.is_idle(wrapped) and not wrapped.synchronized for wrapped in self.optimizers), "between steps")

    def is_defined(self, name: str) -> bool:
        """The gradient is not on its way."""
        return all(
            wrapped.complete or self.is_idle(wrapped) for wrapped in self.optimizers if name in wrapped.spec.parameters
        )

    def has_come(self, name: str, on: Sequence[int]) -> bool:
        """Completely, on all these ranks; so that nothing is to come."""
        return not any(wrapped.broken for wrapped in self.optimizers) and all(
            rank in wrapped.members and wrapped.left[rank].get(name) == 0
            for wrapped in self.optimizers
            if name in wrapped.spec.parameters
            for rank in on or range(self.n_ranks)
        )

    @property
    def watched(self) -> set[str]:
        """Parameters of some optimizer."""
        return {name for wrapped in self.optimizers for name in wrapped.spec.parameters}

    @property
    def beside_sparse(self) -> set[str]:
        """Parameters of optimizers that have sparse gradients, too: these are reduced by themselves."""
        specs = [wrapped.spec for wrapped in self.optimizers]
        return {name for spec in specs if self.sparse & set(spec.parameters) for name in spec.parameters}

    def has_all(self, wrapped: Wrapped) -> bool:
        """Every parameter has a gradient on every rank."""
        return all(replica.parameters[name].grad is not None for replica in self.replicas for name in wrapped.hooked)

    def replicas_equal(self) -> bool:
        """All ranks have the same parameters."""
        first = self.replicas[0]
        return all(
            torch.equal(param, replica.parameters[name])
            for replica in self.replicas
            for name, param in first.parameters.items()
        )

    def update(self, wrapped: Wrapped, ranks: Iterable[int]) -> None:
        """These ranks update the parameters; SparseAdam gets sparse gradients, however they travelled."""
        for rank in ranks:
            if wrapped.spec.rule == "sparse_adam" and rank in wrapped.members and len(wrapped.members) > 1:
                for param in self.replicas[rank].select(wrapped.spec.parameters):
                    if param.grad is not None and not param.grad.is_sparse:
                        param.grad = param.grad.to_sparse(1)
            wrapped.plain[rank].step()

    def copy_state(self, wrapped: Wrapped, root: int) -> None:
        """All ranks take the state of one."""
        state = wrapped.plain[root].state_dict()
        for rank, plain in enumerate(wrapped.plain):
            if rank != root:
                plain.load_state_dict(copy.deepcopy(state))

    def drop_gradients(self) -> None:
        """Every gradient is None."""
        for replica in self.replicas:
            replica.blocks.zero_grad()

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def accumulate(self, gradients: Gradients) -> None:
        """Adds gradients up, and reduces those of optimizers that have all of theirs on all ranks now."""
        for rank, mine in enumerate(gradients):
            for name, grad in mine.items():
                param = self.replicas[rank].parameters[name]
                param.grad = grad.detach().clone() if param.grad is None else param.grad + grad
        came = {name for mine in gradients for name in mine} & self.watched
        self.local |= came
        self.began |= came
        for wrapped in self.optimizers:
            if any(wrapped.hooked & mine.keys() for mine in gradients):
                wrapped.synchronized = False
            for rank, mine in enumerate(gradients):
                for name in wrapped.hooked & mine.keys():
                    wrapped.left[rank][name] -= 1
                    if wrapped.left[rank][name] == 0 and rank in wrapped.members:
                        grad = self.replicas[rank].parameters[name].grad
                        assert grad is not None
                        self.computed[rank][name] = grad.clone()
        active = [rank for rank, mine in enumerate(gradients) if mine]
        for wrapped in self.optimizers:
            if self._all_came(wrapped, gradients, [rank for rank in wrapped.members if rank in active]):
                self.reduce(wrapped)
                wrapped.complete = True

    def _all_came(self, wrapped: Wrapped, gradients: Gradients, active: Sequence[int]) -> bool:
        """Everything, and the last of it in this backward pass, on all ranks that have data."""
        if not (wrapped.hooked and active and (self.joined or len(active) == len(wrapped.members))):
            return False
        return {name for name in wrapped.spec.parameters if self.wanted(name)} == wrapped.hooked and all(
            wrapped.hooked & gradients[rank].keys() and not any(wrapped.left[rank].values()) for rank in active
        )

    # ── reduction ────────────────────────────────────────────────────────────────────────────────────────────────

    def reduce(self, wrapped: Wrapped) -> None:
        """Makes the gradients equal on all members."""
        for name in wrapped.spec.parameters:
            if self.wanted(name) and not (wrapped.came(name) and name not in self.local):
                self._reduce_one(wrapped, name)

    def finish(self, wrapped: Wrapped) -> None:
        """Ends an iteration: what is not reduced is reduced now, unless another optimizer has done so."""
        names = wrapped.spec.parameters
        shared = {name for other in self.optimizers if other is not wrapped for name in other.spec.parameters}
        there = {
            name
            for name in names
            if name in shared and name not in self.began and self.reduced[name] != wrapped.seen[name]
        }
        legal(not (there and self.began & shared & set(names)), "what is reduced together is not said")
        legal(all(wrapped.seen[name] >= 0 for name in shared.intersection(names) - self.began), "nor what has failed")
        for name in names:
            if name in there or not self.wanted(name):
                continue
            if not wrapped.complete and not (wrapped.came(name) and name not in self.local):
                self._reduce_one(wrapped, name)
        for name in set(names) - there:
            self.reduced[name] += 1
        self.began -= set(names)
        wrapped.seen = {name: self.reduced[name] for name in names}
        thawed = {name for name in names if self.wanted(name) and name not in wrapped.hooked}
        if thawed:
            self.attach(wrapped)
        for other in self.optimizers:
            for name in thawed & set(other.spec.parameters) - other.hooked:
                other.hooked.add(name)
                for left in other.left:
                    left[name] = other.spec.passes

    def _reduce_one(self, wrapped: Wrapped, name: str) -> None:
        self.local.discard(name)
        if len(wrapped.members) == 1:
            self.computed[wrapped.members[0]].pop(name, None)
            return
        params = {rank: self.replicas[rank].parameters[name] for rank in wrapped.members}
        unused = self._unused_as_none and not any(name in self.computed[rank] for rank in params)
        if unused and (name in wrapped.hooked or all(param.grad is None for param in params.values())):
            params = {rank: param for rank, param in params.items() if param.grad is not None}
            if not params:
                return
        given = [self.computed[rank].get(name, param.grad) for rank, param in params.items()]
        if wrapped.spec.fp16 and any(gradient is not None and _largest(gradient) > LARGE for gradient in given):
            raise ValueError("the sum of such gradients is not known in float16")  # the program ends before
        like = next(iter(params.values()))
        total = _total(given, like, sparse=name in self.sparse and not wrapped.spec.sparse_as_dense)
        if wrapped.spec.op == "average":
            total = total / len(wrapped.members)
        total = total.to(like.dtype)
        total = total.coalesce() if total.is_sparse else total
        for rank, param in params.items():
            computed = self.computed[rank].pop(name, None)
            if computed is None or param.grad is not None:  # else it was set to None after it came
                param.grad = torch.empty_like(param).copy_(total) if not total.is_sparse else total.clone()


def _largest(gradient: torch.Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(values.abs().max()) if values.numel() else 0.0


def _total(given: Sequence[torch.Tensor | None], like: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    """The sum of gradients, of which those that are not there are zeros; sparse if none is dense."""
    total = torch.zeros(like.shape, dtype=torch.float64)
    if sparse and all(gradient is None or gradient.is_sparse for gradient in given):
        total = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64),
            like.new_empty((0, *like.shape[1:])),
            like.shape,
            check_invariants=False,
        )
    for gradient in given:
        if gradient is not None:
            total = total + (gradient if total.is_sparse or not gradient.is_sparse else gradient.to_dense())
    return total
