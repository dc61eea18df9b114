"""Expected values of a program: one process runs all ranks in lockstep, in float64, by the documented rules.

A DistributedOptimizer is a plain optimizer here, whose gradients are averaged over all replicas, which is training on
the joined batch:

* If all gradients of an optimizer become ready in one backward pass on every rank (the last of `passes`), they are
  reduced when `backward()` returns, and later changes of `.grad` are effective.
* Otherwise `synchronize()` or `step()` reduces the computed gradients, and overwrites a replaced `.grad`.
* A `.grad` that is set to None after it was ready stays None on this rank, and still counts on the other ranks.
* A user's hooks change the gradients that are reduced. A gradient that a hook sets to None is not ready.
* A gradient that is not ready counts with its current value, or as zeros. Frozen parameters are ignored, unfrozen ones
  take part.
* A parameter of two optimizers is reduced once.
* Ranks that have joined count as zeros in the average over all ranks.

Actions that a script may not do in the current state are skipped (`Reference.played`). So any random program, and any
part of it that Hypothesis tries while it shrinks, is valid.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from . import program as actions
from .program import Action, Backward, BlockKind, Epoch, OptimizerSpec, Program, TooEarly, ZeroGrad
from .replica import OPERATIONS, Optimizer, Replica, Values

# ── One DistributedOptimizer on all ranks, in one process, and what no script may do with it ─────────────────────────


class IllegalError(Exception):
    """A script may not do this action now. Raised before any change."""


def legal(condition: bool, why: str) -> None:
    """Raise IllegalError unless the condition holds."""
    if not condition:
        raise IllegalError(why)


@dataclass
class Wrapped:
    """One DistributedOptimizer on all ranks.

    Attributes:
        plain: plain optimizers by rank.
        members: ranks that reduce.
        hooked: parameters whose gradients are hooked.
        left: by rank, number of times that each gradient must still become ready.
        complete: all gradients are reduced, and `step()` was not called yet.
        seen: number of reductions of each parameter when this optimizer last used its gradient; negative if unknown,
            because a backward pass has failed.
        synchronized: `synchronize()` was called, and `step()` not yet.
        broken: a backward pass has failed since the last `zero_grad()`.
        replaced: a `.grad` was replaced before it was reduced.
        forgotten: gradients of a failed pass were dropped, and no pass has begun since.
    """

    spec: OptimizerSpec
    plain: list[Optimizer]
    members: tuple[int, ...]
    hooked: set[str] = field(default_factory=set)
    left: list[dict[str, int]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    synchronized: bool = False
    broken: bool = False
    replaced: bool = False
    forgotten: bool = False

    def begin(self) -> None:
        """Reset the counts of ready gradients."""
        self.left = [dict.fromkeys(self.hooked, self.spec.passes) for _ in self.plain]
        self.complete = self.replaced = False

    @property
    def reduced_on_some(self) -> bool:
        """Return whether some ranks have reduced all their gradients while gradients of further ranks are missing."""
        was_ready = [not any(self.left[rank].values()) for rank in self.members]
        return bool(self.hooked) and any(was_ready) and not self.complete

    def was_ready(self, name: str) -> bool:
        """Return whether a gradient was ready at least once on a member."""
        return any(self.left[rank].get(name, self.spec.passes) < self.spec.passes for rank in self.members)

    @property
    def pending(self) -> bool:
        """Return whether a gradient is ready."""
        return any(self.was_ready(name) for name in self.hooked)


# ── All ranks of a program in one process: their replicas and optimizers, and how gradients are added up ─────────────

Gradients = list[dict[str, torch.Tensor]]
"""Gradients that one backward pass computes, by rank."""


LARGE = 16.0
"""Bound of gradients that are sent as float16. They may cancel out, and are rounded to 2**-10 of their size before."""


class Lockstep:
    """State of all ranks, and the rules of their gradients.

    Attributes:
        n_ranks: world size.
        replicas: one replica per rank.
        names: names of all parameters.
        sparse: names of parameters with sparse gradients.
        optimizers: optimizers of the script.
        computed: by rank, gradients that are ready and not reduced yet.
        local: parameters that a backward pass has changed since they were last reduced.
        began: parameters with ready gradients in an iteration that has not ended.
        reduced: number of ended iterations with a reduction, by parameter.
        divided: parameters of optimizers that have shared parameters with other optimizers.
        joined: whether some ranks have no more data.
        overlaps: whether updates are deferred into the next forward pass.
    """

    def __init__(self, program: Program) -> None:
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
        self.overlaps = "overlap_forward" in dict(program.environment)
        self.optimizers: list[Wrapped] = []
        for spec in program.optimizers:
            self.optimizers.append(self.wrap(spec))

    # ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────

    def wrap(self, spec: OptimizerSpec) -> Wrapped:
        """Return a new optimizer, without adding it to `optimizers`."""
        self.share(spec, spec.parameters)
        members = spec.process_set or tuple(range(self.n_ranks))
        wrapped = Wrapped(spec, [replica.optimizer(spec) for replica in self.replicas], members)
        wrapped.seen = {name: self.reduced[name] for name in spec.parameters}
        self.attach(wrapped)
        return wrapped

    def share(self, spec: OptimizerSpec, names: Iterable[str]) -> None:
        """Assign parameters to an optimizer. Raise IllegalError if a shared parameter's options conflict."""
        for other in self.optimizers:
            shared = set(other.spec.parameters) & set(names)
            legal(not shared or other.spec.options == spec.options, "other options for a shared parameter")
        for other in self.optimizers:
            if set(other.spec.parameters) & set(names):
                self.divided |= {*other.spec.parameters, *spec.parameters}
        if set(spec.parameters) & self.divided:
            self.divided |= set(names)

    def attach(self, wrapped: Wrapped) -> None:
        """Register hooks on the parameters of an optimizer that require gradients."""
        wrapped.hooked = {name for name in wrapped.spec.parameters if self.wanted(name)}
        wrapped.begin()

    def wanted(self, name: str) -> bool:
        """Return whether a parameter requires a gradient."""
        return self.replicas[0].parameters[name].requires_grad

    def at(self, number: int) -> Wrapped:
        """Return an optimizer by number."""
        legal(number < len(self.optimizers), "no such optimizer")
        return self.optimizers[number]

    def is_idle(self, wrapped: Wrapped) -> bool:
        """Return whether no gradient of an optimizer is ready since its last step."""
        return not (wrapped.pending or wrapped.broken or self.local & set(wrapped.spec.parameters))

    def require_idle(self) -> None:
        """Raise IllegalError unless all optimizers are between two steps."""
        legal(all(self.is_idle(wrapped) and not wrapped.synchronized for wrapped in self.optimizers), "between steps")

    def is_defined(self, name: str) -> bool:
        """Return whether no reduction of a gradient is pending."""
        return all(
            wrapped.complete or self.is_idle(wrapped) for wrapped in self.optimizers if name in wrapped.spec.parameters
        )

    def is_complete(self, name: str, on: Sequence[int]) -> bool:
        """Return whether a gradient is ready for the last time in this iteration on all these ranks."""
        return not any(wrapped.broken for wrapped in self.optimizers) and all(
            rank in wrapped.members and wrapped.left[rank].get(name) == 0
            for wrapped in self.optimizers
            if name in wrapped.spec.parameters
            for rank in on or range(self.n_ranks)
        )

    @property
    def watched(self) -> set[str]:
        """Return the parameters of all optimizers."""
        return {name for wrapped in self.optimizers for name in wrapped.spec.parameters}

    @property
    def beside_sparse(self) -> set[str]:
        """Return the parameters of optimizers that also have sparse gradients, which are reduced separately."""
        specs = [wrapped.spec for wrapped in self.optimizers]
        return {name for spec in specs if self.sparse & set(spec.parameters) for name in spec.parameters}

    def has_all(self, wrapped: Wrapped) -> bool:
        """Return whether every parameter has a gradient on every rank."""
        return all(replica.parameters[name].grad is not None for replica in self.replicas for name in wrapped.hooked)

    def replicas_equal(self) -> bool:
        """Return whether all ranks have the same parameters and optimizer states."""
        first = self.replicas[0]
        same = all(
            torch.equal(param, replica.parameters[name])
            for replica in self.replicas
            for name, param in first.parameters.items()
        )
        states = [[_values(plain.state_dict()) for plain in wrapped.plain] for wrapped in self.optimizers]
        return same and all(state == every[0] for every in states for state in every)

    def update(self, wrapped: Wrapped, ranks: Iterable[int]) -> None:
        """Step the optimizer on some ranks. SparseAdam gets sparse gradients, even if they were sent dense."""
        for rank in ranks:
            if wrapped.spec.rule == "sparse_adam" and rank in wrapped.members and len(wrapped.members) > 1:
                for param in self.replicas[rank].select(wrapped.spec.parameters):
                    if param.grad is not None and not param.grad.is_sparse:
                        param.grad = param.grad.to_sparse(1)
            wrapped.plain[rank].step()

    def copy_state(self, wrapped: Wrapped, root: int) -> None:
        """Copy the state of rank `root` to all ranks."""
        state = wrapped.plain[root].state_dict()
        for rank, plain in enumerate(wrapped.plain):
            if rank != root:
                plain.load_state_dict(copy.deepcopy(state))

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        for replica in self.replicas:
            replica.blocks.zero_grad()

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def accumulate(self, gradients: Gradients) -> None:
        """Add gradients, and reduce those of optimizers whose gradients are all ready on all ranks."""
        for rank, mine in enumerate(gradients):
            for name, grad in list(mine.items()):
                param = self.replicas[rank].parameters[name]
                param.grad = like_parameter(grad.detach(), param) if param.grad is None else param.grad + grad
                self.replicas[rank].accumulated(name)
                if param.grad is None:
                    del mine[name]
        was_ready = {name for mine in gradients for name in mine} & self.watched
        self.local |= was_ready
        self.began |= was_ready
        for wrapped in self.optimizers:
            if any(wrapped.hooked & mine.keys() for mine in gradients):
                wrapped.synchronized = wrapped.forgotten = False
            for rank, mine in enumerate(gradients):
                for name in wrapped.hooked & mine.keys():
                    wrapped.left[rank][name] -= 1
                    if wrapped.left[rank][name] == 0 and rank in wrapped.members:
                        param = self.replicas[rank].parameters[name]
                        assert param.grad is not None
                        self.computed[rank][name] = param.grad.clone()
        active = [rank for rank, mine in enumerate(gradients) if mine]
        for wrapped in self.optimizers:
            if self._all_ready(wrapped, gradients, [rank for rank in wrapped.members if rank in active]):
                self.reduce(wrapped)
                wrapped.complete = True

    def _all_ready(self, wrapped: Wrapped, gradients: Gradients, active: Sequence[int]) -> bool:
        """Return whether all gradients are ready on all active ranks, the last one by this backward pass."""
        if not (wrapped.hooked and active and (self.joined or len(active) == len(wrapped.members))):
            return False
        return {name for name in wrapped.spec.parameters if self.wanted(name)} == wrapped.hooked and all(
            wrapped.hooked & gradients[rank].keys() and not any(wrapped.left[rank].values()) for rank in active
        )

    # ── reduction ────────────────────────────────────────────────────────────────────────────────────────────────

    def reduce(self, wrapped: Wrapped) -> None:
        """Average the gradients over all members."""
        for name in wrapped.spec.parameters:
            if self.wanted(name) and not (wrapped.was_ready(name) and name not in self.local):
                self._reduce_one(wrapped, name)

    def finish(self, wrapped: Wrapped) -> None:
        """End an iteration: reduce the remaining gradients, unless another optimizer has already done so."""
        names, wrapped.forgotten = wrapped.spec.parameters, False
        shared = {name for other in self.optimizers if other is not wrapped for name in other.spec.parameters}
        there = {name for name in names if name not in self.began and self.reduced[name] != wrapped.seen[name]}
        legal(not (there & self.divided) - shared, "the optimizer that has reduced it is closed")
        there &= shared
        legal(not (there and self.began & shared & set(names)), "it is undefined which gradients are reduced together")
        legal(all(wrapped.seen[name] >= 0 for name in shared.intersection(names) - self.began), "nor what has failed")
        for name in names:
            if name in there or not self.wanted(name):
                continue
            if not wrapped.complete and not (wrapped.was_ready(name) and name not in self.local):
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
        there = wrapped.was_ready(name) or any(name in self.computed[rank] for rank in params)
        if self._unused_as_none and not there and all(param.grad is None for param in params.values()):
            return
        given = [self.computed[rank].get(name, param.grad) for rank, param in params.items()]
        if wrapped.spec.fp16 and any(gradient is not None and _largest(gradient) > LARGE for gradient in given):
            raise ValueError("the sum of such gradients is not known in float16")  # the program ends before this action
        like = next(iter(params.values()))
        total = total_of(given, like, sparse=name in self.sparse and not wrapped.spec.sparse_as_dense)
        if wrapped.spec.op == "average":
            total = total / len(wrapped.members)
        total = rounded(total, like.dtype)
        for rank, param in params.items():
            computed = self.computed[rank].pop(name, None)
            if computed is None or param.grad is not None:  # otherwise it was set to None after it was ready
                param.grad = like_parameter(total, param)


def rounded(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a sum of gradients as it is applied. A sparse sum is coalesced."""
    return total.to(dtype).coalesce() if total.is_sparse else total.to(dtype)


def like_parameter(total: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient with the strides of its parameter."""
    return total.clone() if total.is_sparse else torch.empty_like(param).copy_(total)


def _values(state: object) -> object:
    """Return an optimizer's state as plain values."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _values(value) for key, value in state.items()}
    return [_values(value) for value in state] if isinstance(state, list | tuple) else state


def _largest(gradient: torch.Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(values.abs().max()) if values.numel() else 0.0


def total_of(given: Sequence[torch.Tensor | None], like: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    """Return the sum of gradients. Missing ones are zeros. The sum is sparse if no gradient is dense."""
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


# ── Gradients that are zeroed, after a step or instead of one, in one process ────────────────────────────────────────


def zero(world: Lockstep, action: ZeroGrad) -> None:
    """Apply `zero_grad()` of an optimizer or of the model. It also drops gradients of failed backward passes.

    Raises:
        IllegalError: a script may not do this now.
    """
    if action.optimizer is None:
        wrapped = [each for each in world.optimizers if each.broken]
        fine = [each for each in world.optimizers if not each.broken]
        legal(all(world.is_idle(each) and not each.synchronized for each in fine), "between steps")
    else:
        wrapped = [world.at(action.optimizer)]
    for each in wrapped:
        _require_zeroable(world, each, action)
    for each in wrapped:
        drop(world, each)
    if action.optimizer is None:
        for replica in world.replicas:
            replica.blocks.zero_grad(action.set_to_none)
    else:
        for plain in wrapped[0].plain:
            plain.zero_grad(action.set_to_none)


def _require_zeroable(world: Lockstep, wrapped: Wrapped, action: ZeroGrad) -> None:
    legal(not wrapped.pending or wrapped.broken or wrapped.complete, "zero_grad() between backward() and step()")
    legal(not wrapped.broken or action.set_to_none, "gradients from before the failure are undefined")


def drop(world: Lockstep, wrapped: Wrapped) -> None:
    """Drop the ready gradients of this iteration."""
    names = set(wrapped.spec.parameters)
    if wrapped.complete and names & world.began:  # otherwise another optimizer has ended this iteration
        world.finish(wrapped)
    elif wrapped.broken:
        wrapped.seen = dict.fromkeys(names, -1)
        world.began -= names
        for computed in world.computed:
            for name in names & computed.keys():
                del computed[name]
    world.local -= names
    wrapped.forgotten |= wrapped.broken
    wrapped.broken = wrapped.synchronized = False
    wrapped.begin()


# ── The backward pass of a program in one process: the gradients of all ranks, if a script may have it c ─────────────


def compute(lockstep: Lockstep, action: Backward, number: int, ranks: Sequence[int] | None = None) -> Gradients:
    """Return the gradients of batch `number` on each of `ranks`; None = all ranks.

    Raises:
        IllegalError: a gradient would be ready too often, or has no optimizer.
    """
    reentrant, penalised = action.checkpoint == "reentrant", action.penalty or action.slopes
    legal(not (reentrant and (action.inputs or penalised or action.retain)), "not with reentrant checkpoints")
    legal(not (reentrant and action.fails_at is not None), "parts of such a pass end separately")
    require_compilable(action, lockstep.replicas)
    legal(not (action.nested and penalised), "no second derivative")
    legal(not (action.again and (penalised or action.fails_at is not None)), "a loss has been made")
    unreduced = max(2, lockstep.n_ranks)  # on some ranks gradients stay as PyTorch has computed them
    apart = any(w.spec.rule.startswith("fused") and len(w.members) < unreduced for w in lockstep.optimizers)
    legal(not (penalised and apart), "PyTorch's own fused updates misread gradients of other strides")
    gradients: Gradients = [{} for _ in lockstep.replicas]
    for rank in range(lockstep.n_ranks) if ranks is None else ranks:
        replica = lockstep.replicas[rank]
        names = [name for name in action.inputs or lockstep.names if replica.parameters[name].requires_grad]
        legal(bool(names) or not action.inputs, "nothing to compute")
        try:
            loss = replica.loss(action, number, plain=True)
            found = (
                torch.autograd.grad(loss, replica.select(names), retain_graph=action.retain, allow_unused=True)
                if names
                else ()
            )
        except RuntimeError as err:
            raise IllegalError("PyTorch cannot compute it") from err
        gradients[rank] = {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}
    for wrapped in lockstep.optimizers:
        touched = any(wrapped.hooked & mine.keys() for mine in gradients)
        legal(not (touched and wrapped.broken), "a backward pass has failed")
        if touched and wrapped.forgotten:  # a rank without gradients cannot notice that the remaining ranks begin again
            legal(all(lockstep.watched & gradients[rank].keys() for rank in wrapped.members), "a pass on all ranks")
        legal(not (touched and wrapped.replaced), "some ranks would have reduced before")
        for rank in wrapped.members:
            for name in wrapped.hooked & gradients[rank].keys():
                legal(wrapped.left[rank][name] > 0, "more than backward_passes_per_step times")
    return gradients


def require_compilable(action: Backward, replicas: Sequence[Replica]) -> None:
    """Raise IllegalError if the pass is compiled and PyTorch cannot compile it."""
    special = action.penalty or action.slopes or action.retain or action.again or action.fails_at is not None
    legal(not (action.compiled and (special or action.nested or action.checkpoint == "reentrant")), "not compiled")
    hooked = any(replica.hooks_modules for replica in replicas)
    legal(not (action.compiled and hooked), "PyTorch compiles no hooks on modules")


# ── `step(closure)` in one process: the closure is called on all replicas, and its gradients are reduced ─────────────


def step_with(world: Lockstep, wrapped: Wrapped, closure: Backward, number: int) -> None:
    """Step an optimizer with a closure that zeroes gradients and runs the backward pass of batch `number`.

    Raises:
        IllegalError: a script may not do this now.
    """
    legal(world.is_idle(wrapped) and not wrapped.synchronized and wrapped.spec.passes == 1, "before a closure")
    legal(not world.divided & set(wrapped.spec.parameters), "it is undefined which gradients are reduced together")
    legal(not (closure.again or closure.retain) and closure.fails_at is None, "in a closure")
    lbfgs = wrapped.spec.rule.startswith("lbfgs")
    if lbfgs:
        legal(len(wrapped.members) == world.n_ranks and world.replicas_equal(), "LBFGS takes the same steps everywhere")
    gradients = compute(world, closure, number)
    others = {name for other in world.optimizers if other is not wrapped for name in other.spec.parameters}
    legal(not (lbfgs and others & gradients[0].keys()), "LBFGS calls the closure several times")
    legal(not (lbfgs and (closure.penalty or closure.slopes)), "the closure's loss is needed")
    if wrapped.spec.rule == "lbfgs_search":
        params = world.replicas[0].parameters.values()
        legal(all(param.dtype == torch.float64 for param in params), "a line search would be decided by rounding")
    if lbfgs:
        _lbfgs(world, wrapped, closure, number)
        return
    _call(world, wrapped, closure, number)
    world.update(wrapped, range(world.n_ranks))


def _call(world: Lockstep, wrapped: Wrapped, closure: Backward, number: int) -> None:
    for plain in wrapped.plain:
        plain.zero_grad()
    world.accumulate(compute(world, closure, number))
    world.finish(wrapped)
    wrapped.begin()


def _lbfgs(world: Lockstep, wrapped: Wrapped, closure: Backward, number: int) -> None:
    """Step LBFGS on the first replica with the mean loss, and copy the result to all replicas."""

    def follow() -> None:
        with torch.no_grad():
            for replica in world.replicas[1:]:
                for name, param in replica.parameters.items():
                    param.copy_(world.replicas[0].parameters[name])

    def joined() -> torch.Tensor:
        follow()
        _call(world, wrapped, closure, number)
        with torch.no_grad():
            losses = [float(replica.loss(closure, number, plain=True)) for replica in world.replicas]
        return torch.tensor(sum(losses) / len(losses), dtype=torch.float64)

    wrapped.plain[0].step(joined)  # type: ignore[arg-type]  # a tensor will do
    follow()
    state = wrapped.plain[0].state_dict()
    for plain in wrapped.plain[1:]:
        plain.load_state_dict(copy.deepcopy(state))


# ── Uneven data in one process: ranks that have no batch any more count as zeros in the average over all ─────────────

Stepped = Callable[[int, Sequence[int]], None]
"""Callback: these ranks have stepped the optimizer of this number."""


def play_epoch(world: Lockstep, action: Epoch, number: int, stepped: Stepped) -> None:
    """Train on batches from `number` on. Then all ranks get the state of the rank with the most batches.

    Raises:
        IllegalError: a script may not do this now.
    """
    world.require_idle()
    batches = action.batches
    legal(world.replicas_equal() or batches.count(max(batches)) == 1, "the last rank to join is undefined")
    legal(bool(action.order) and all(action.order), "one step per batch")
    used = {optimizer for step in action.order for optimizer in step}
    for optimizer in used:
        _require_joinable(world, optimizer)
    for batch in range(max(batches)):
        active = [rank for rank in range(world.n_ranks) if batch < batches[rank]]
        world.joined = len(active) < world.n_ranks
        try:
            _batch(world, action.order[batch % len(action.order)], number + batch, active, stepped)
        except IllegalError as err:
            raise RuntimeError("in the middle of an epoch") from err
        finally:
            world.joined = False
    last = batches.index(max(batches))
    for replica in world.replicas:
        replica.blocks.load_state_dict(world.replicas[last].blocks.state_dict())
    for optimizer in used:
        world.copy_state(world.at(optimizer), last)
    world.drop_gradients()


def _require_joinable(world: Lockstep, optimizer: int) -> None:
    wrapped = world.at(optimizer)
    wanted = {name for name in wrapped.spec.parameters if world.wanted(name)}
    legal(not wrapped.spec.rule.startswith("lbfgs"), "no closure")
    legal(wrapped.spec.passes == 1 and len(wrapped.members) == world.n_ranks, "join() is for all ranks")
    for other in world.optimizers:
        legal(other is wrapped or not set(other.spec.parameters) & wanted, "shared parameters")
    legal(bool(wanted) and wanted == wrapped.hooked, "frozen or unfrozen")


def _batch(world: Lockstep, optimizers: Sequence[int], number: int, active: Sequence[int], stepped: Stepped) -> None:
    """Train on one batch of the ranks that still have data."""
    for place in optimizers:
        wrapped = world.at(place)
        for plain in wrapped.plain:
            plain.zero_grad()
        inputs = tuple(name for name in wrapped.spec.parameters if world.wanted(name))
        world.accumulate(compute(world, Backward(inputs=inputs), number, active))
        world.finish(wrapped)
        world.update(wrapped, active)
        stepped(place, active)


# ── Gradients that are written in place before they are reduced: all ranks raise an error, and go on ─────────────────


def write_too_early(world: Lockstep, action: TooEarly, number: int) -> None:
    """Run a backward pass on batch `number`, write to gradients too early, expect an error, and zero gradients.

    Raises:
        IllegalError: a script may not do this now, or the write is not an error.
    """
    wrapped, drawn = world.at(action.optimizer), action.backward
    world.require_idle()
    legal(len(world.optimizers) == 1 and 1 < len(wrapped.members) == world.n_ranks, "all ranks must do the same")
    legal(wrapped.spec.passes == 1 and not wrapped.spec.rule.startswith("lbfgs"), "one pass, one step")
    legal(not (drawn.retain or drawn.again) and drawn.fails_at is None, "one pass")
    legal({name for name in wrapped.spec.parameters if world.wanted(name)} == wrapped.hooked, "unfrozen")
    gradients, dense = compute(world, drawn, number), wrapped.hooked - world.sparse
    writes = [
        bool(
            dense - mine.keys()
            and dense & set(action.parameters) & mine.keys()
            and (not action.on or rank in action.on)
        )
        for rank, mine in enumerate(gradients)
    ]
    legal(not set(action.parameters) & world.sparse, "a sparse gradient would be replaced by the reduced one")
    legal(any(writes), "no write would be too early")
    legal(all(writes) or not world.overlaps, "ranks learn of their peers' writes when they update")
    world.accumulate(gradients)
    wrapped.broken = True
    drop(world, wrapped)
    for plain in wrapped.plain:
        plain.zero_grad()


# ── The reference ────────────────────────────────────────────────────────────────────────────────────────────────────

Entry = tuple[int, str, Values]
"""Number of the action, description, and observed values."""

DIVERGED = 100.0
"""Size of weights above which rounding errors have grown beyond any tolerance."""


class Played:
    """Runs a program on replicas of all ranks. Base class of references, which have a method per action.

    Attributes:
        trace: by rank, the values that a script may observe.
        played: the program without skipped actions.
    """

    def __init__(self, program: Program, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._started: list[tuple[str, int]] = []
        self._saved = False
        self._pending_entries: list[tuple[int, str, Values]] = []
        self._number = 0
        self.trace: list[list[Entry]] = [[] for _ in replicas]
        self.played = replace(program, actions=tuple(self._play(program.actions)))

    def _play(self, drawn: Sequence[Action]) -> list[Action]:
        played, n_sound = list[Action](), 0
        for action in drawn:
            retained = [replica.retained for replica in self._replicas]
            self._pending_entries = []
            try:
                getattr(self, f"_{type(action).__name__.lower()}")(action)
            except IllegalError:
                for replica, loss in zip(self._replicas, retained, strict=True):
                    replica.retained = loss
                continue
            except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
                break  # PyTorch rejects the action, perhaps after a part of it
            for rank, label, values in self._pending_entries:
                self.trace[rank].append((self._number, label, values))
            self._number += 1
            played.append(action)
            if self._may_end():
                n_sound = self._number
        self.trace = [[entry for entry in trace if entry[0] < n_sound] for trace in self.trace]
        return played[:n_sound]

    def _may_end(self) -> bool:
        """Return whether the program may end here without a rank that waits for gradients of its peers."""
        return True

    def _observe(self, rank: int, label: str, values: Values) -> None:
        self._pending_entries.append((rank, label, values))

    def _observe_step(self, rank: int, number: int, names: Sequence[str]) -> None:
        weights = self._replicas[rank].values(names)
        if any(weight is not None and np.abs(weight).max(initial=0.0) > DIVERGED for weight in weights.values()):
            raise ValueError("what follows is rounding, grown with the weights")  # the program ends before this action
        self._observe(rank, f"optimizer {number}", weights)
        self._observe(rank, f"optimizer {number}", self._replicas[rank].gradients(names))

    def _recall(self, action: actions.Recall) -> None:
        for rank, replica in enumerate(self._replicas):
            self._observe(rank, "kept", replica.recall())

    def _outside(self, action: actions.Outside) -> None:
        for rank, replica in enumerate(self._replicas):
            self._observe(rank, f"read by {action.how}", replica.read(action.how))

    def _fork(self, action: actions.Fork) -> None:
        for rank in action.on or range(len(self._replicas)):
            replica = self._replicas[rank]
            if action.how == "trains":
                try:
                    replica.compute_aside(actions.Aside(forward=True), self._number)
                except RuntimeError as err:
                    raise IllegalError("PyTorch cannot compute it") from err
            self._observe(rank, f"child: {action.how}", replica.values(replica.parameters))

    def _hook(self, action: actions.Hook) -> None:
        for replica in self._replicas:
            replica.hook(action)

    def _unhook(self, action: actions.Unhook) -> None:
        for replica in self._replicas:
            replica.unhook(action.parameters)

    def _aside(self, action: actions.Aside) -> None:
        for rank in action.on or range(len(self._replicas)):
            self._observe(rank, "aside", self._replicas[rank].compute_aside(action, self._number * 100 + 50))

    def _nudge(self, action: actions.Nudge) -> None:
        for replica in self._replicas:
            replica.nudge()

    def _eager(self, action: actions.Eager) -> None:
        self._started.append((action.what, self._number))
        if not action.later:
            self._wait(actions.Wait())

    def _wait(self, action: actions.Wait) -> None:
        for what, number in self._started:
            for rank in range(len(self._replicas)):
                result = OPERATIONS[what].result(rank, len(self._replicas), number)
                self._observe(rank, f"eager {what}", {"result": result.numpy()})
        self._started = []


class Reference(Played):
    """Runs a program whose optimizers are DistributedOptimizers."""

    def __init__(self, program: Program) -> None:
        self._world = Lockstep(program)
        super().__init__(program, self._world.replicas)

    def _may_end(self) -> bool:
        return not any(wrapped.reduced_on_some for wrapped in self._world.optimizers)

    def _backward(self, action: Backward) -> None:
        gradients = compute(self._world, action, self._number * 100)
        if action.fails_at is None:
            self._world.accumulate(gradients)
            return
        watched = self._world.watched
        legal(
            all(name in watched for mine in gradients for name in mine),
            "no optimizer zeroes the gradient that the pass leaves",
        )
        for wrapped in self._world.optimizers:
            was_ready = {name for mine in gradients for name in mine if name in wrapped.spec.parameters}
            legal(was_ready <= wrapped.hooked, "an unfrozen parameter keeps the gradient of a failed pass")
            wrapped.broken |= bool(was_ready)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, action: actions.Step) -> None:
        wrapped = self._world.at(action.optimizer)
        legal(not wrapped.broken, "a backward pass has failed")
        if action.closure is not None:
            step_with(self._world, wrapped, action.closure, self._number * 100)
        else:
            legal(not wrapped.spec.rule.startswith("lbfgs"), "LBFGS wants a closure")
            if action.skip_synchronize:
                legal(wrapped.synchronized, "skip_synchronize() is for after synchronize()")
            else:
                legal(not wrapped.synchronized or self._world.has_all(wrapped), "None would become zeros")
                self._world.finish(wrapped)
            self._world.update(wrapped, range(self._world.n_ranks))
        self._stepped(action.optimizer, range(self._world.n_ranks))

    def _stepped(self, number: int, ranks: Sequence[int]) -> None:
        wrapped = self._world.at(number)
        wrapped.synchronized = False
        wrapped.begin()
        for rank in ranks:
            self._observe_step(rank, number, wrapped.spec.parameters)

    def _synchronize(self, action: actions.Synchronize) -> None:
        wrapped = self._world.at(action.optimizer)
        legal(not wrapped.broken and not wrapped.synchronized, "synchronize() once")
        self._world.finish(wrapped)
        wrapped.begin()
        wrapped.synchronized = True

    def _zerograd(self, action: actions.ZeroGrad) -> None:
        zero(self._world, action)

    # ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────

    def _edit(self, action: actions.Edit) -> None:
        for name in action.parameters:
            null, replaces = action.how == "null", action.how in ("null", "replace", "clone")
            owners = [wrapped for wrapped in self._world.optimizers if name in wrapped.spec.parameters]
            if not self._world.is_defined(name):
                legal(replaces and self._world.is_complete(name, action.on), "a reduction is in flight")
                apart = self._world.divided | self._world.beside_sparse
                legal(null or name not in apart, "the gradient may be reduced already")
                legal(null or not any(wrapped.reduced_on_some for wrapped in owners), "an error on all ranks")
            legal(null or name not in self._world.sparse, "sparse")
            for wrapped in owners:
                wrapped.replaced |= replaces and not null and not wrapped.complete
        for replica in self._world.replicas:
            replica.edit(action)

    def _tooearly(self, action: actions.TooEarly) -> None:
        write_too_early(self._world, action, self._number * 100)
        for rank in range(self._world.n_ranks):
            self._observe(rank, "too early", {"raised": np.array([1.0])})

    def _read(self, action: actions.Read) -> None:
        watched = self._world.watched
        legal(
            all(self._world.is_defined(name) and name in watched for name in action.parameters),
            "a reduction is in flight",
        )
        for rank, replica in enumerate(self._world.replicas):
            self._observe(rank, "read", replica.gradients(action.parameters))

    def _keep(self, action: actions.Keep) -> None:
        names = self._world.at(action.optimizer).spec.parameters
        legal(all(self._world.is_defined(name) for name in names), "a reduction is in flight")
        legal(not self._world.optimizers[action.optimizer].broken, "gradients from before the failure are undefined")
        grads = [replica.keeps(names, action.how) for replica in self._world.replicas]
        zero(self._world, ZeroGrad(optimizer=action.optimizer))
        for replica, kept in zip(self._world.replicas, grads, strict=True):
            replica.kept += kept

    # ── between steps ────────────────────────────────────────────────────────────────────────────────────────────

    def _requiregrad(self, action: actions.RequireGrad) -> None:
        self._world.require_idle()
        for replica in self._world.replicas:
            replica.require_grad(action)

    def _addgroup(self, action: actions.AddGroup) -> None:
        self._world.require_idle()
        wrapped = self._world.at(action.optimizer)
        legal(not wrapped.spec.rule.startswith("lbfgs"), "LBFGS takes one group")
        legal(
            not set(wrapped.spec.parameters) & set(action.parameters) and bool(action.parameters),
            "the optimizer has the parameter already",
        )
        self._world.share(wrapped.spec, action.parameters)
        for replica, plain in zip(self._world.replicas, wrapped.plain, strict=True):
            plain.add_param_group({"params": replica.select(action.parameters)})
        wrapped.spec = replace(wrapped.spec, parameters=(*wrapped.spec.parameters, *action.parameters))
        wrapped.seen |= {name: self._world.reduced[name] for name in action.parameters}
        self._world.attach(wrapped)
        self._saved = False

    def _rewrap(self, action: actions.Rewrap) -> None:
        self._world.require_idle()
        old = self._world.at(action.optimizer)
        spec = action.spec or old.spec
        legal(not action.keep_state or (action.spec is None and len(old.plain[0].param_groups) == 1), "its state")
        place = self._world.optimizers.index(old)
        rest = self._world.optimizers[:place] + self._world.optimizers[place + 1 :]
        kept, self._world.optimizers = self._world.optimizers, rest
        try:
            fresh = self._world.wrap(spec)
        finally:
            self._world.optimizers = kept
        if action.keep_state:
            for was, now in zip(old.plain, fresh.plain, strict=True):
                now.load_state_dict(copy.deepcopy(was.state_dict()))
        self._world.optimizers[place] = fresh
        self._saved = False

    def _passes(self, action: actions.Passes) -> None:
        self._world.require_idle()
        wrapped = self._world.at(action.optimizer)
        names = set(wrapped.spec.parameters)
        shared = any(other is not wrapped and names & set(other.spec.parameters) for other in self._world.optimizers)
        legal(not shared, "other options for a shared parameter")
        wrapped.spec = replace(wrapped.spec, passes=action.passes)
        wrapped.begin()

    def _save(self, action: actions.Save) -> None:
        self._world.require_idle()
        for rank, replica in enumerate(self._world.replicas):
            replica.save([wrapped.plain[rank] for wrapped in self._world.optimizers])
        self._saved = True

    def _load(self, action: actions.Load) -> None:
        self._world.require_idle()
        legal(self._saved, "nothing was saved")
        for rank, replica in enumerate(self._world.replicas):
            replica.load([wrapped.plain[rank] for wrapped in self._world.optimizers])

    def _convert(self, action: actions.Convert) -> None:
        self._world.require_idle()
        # PyTorch's fused optimizers are wrong if moments do not have their parameter's strides.
        fused = any("fused" in wrapped.spec.rule and wrapped.plain[0].state for wrapped in self._world.optimizers)
        legal(not (fused and action.to in ("channels_last", "contiguous", "strides", "flat")), "fused")
        for replica in self._world.replicas:
            replica.convert(action)
            replica.retained = None

    def _broadcast(self, action: actions.Broadcast) -> None:
        self._world.require_idle()
        root = self._world.replicas[action.root]
        if action.optimizer is None:
            for replica in self._world.replicas:
                replica.blocks.load_state_dict(root.blocks.state_dict())
        else:
            wrapped = self._world.at(action.optimizer)
            legal(not wrapped.spec.rule.startswith("lbfgs"), "LBFGS has the history of one rank's data")
            legal(all(plain.state for plain in wrapped.plain), "a fresh optimizer")
            self._world.copy_state(wrapped, action.root)
        self._world.drop_gradients()

    # ── uneven data ──────────────────────────────────────────────────────────────────────────────────────────────

    def _epoch(self, action: actions.Epoch) -> None:
        legal(not self._started, "eager operations are in flight")
        play_epoch(self._world, action, self._number * 100, self._stepped)
        for rank, replica in enumerate(self._world.replicas):
            self._observe(rank, "after join", replica.values(self._world.names))
