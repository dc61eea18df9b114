"""What a program must give: one process plays all ranks in lockstep, in float64, by the documented rules.

A DistributedOptimizer is a plain optimizer here whose gradients are averaged over all replicas, which is training on
the joined batch:

* if every gradient of an optimizer comes in one backward pass on every rank (the last of `passes`), it is reduced when
  `backward()` returns, and whatever is done to it then holds;
* otherwise it is reduced by `synchronize()` or `step()`, from what was computed: a replaced `.grad` is overwritten;
* a `.grad` that was set to None after it came stays None on that rank, and counts for the others all the same;
* a gradient that did not come counts as it is, or as zeros; frozen parameters are left alone, thawed ones join;
* a parameter of two optimizers is reduced once;
* ranks that have joined count as zeros in the average over all.

Actions that no script may do in the state that the program is in are left out (`Reference.played`), so that whatever
was drawn, or is left of it while Hypothesis shrinks it, is a legitimate program.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from .eager import OPERATIONS
from .features import DRAWN, Feature
from .program import (
    Action,
    AddGroup,
    Backward,
    Broadcast,
    Convert,
    Eager,
    Edit,
    Epoch,
    Kind,
    Load,
    Nudge,
    OptimizerSpec,
    Passes,
    Program,
    Read,
    RequireGrad,
    Rewrap,
    Save,
    Step,
    Synchronize,
    Wait,
    ZeroGrad,
)
from .replica import Optimizer, Replica, Values

Entry = tuple[int, str, Values]
"""(number of the action, what was looked at, the values)."""

Gradients = list[dict[str, torch.Tensor]]
"""By rank, what one backward pass computes."""


class IllegalError(Exception):
    """No script may do this now. Raised before anything has changed."""


def _legal(condition: bool, why: str) -> None:
    if not condition:
        raise IllegalError(why)


@dataclass
class Wrapped:
    """One DistributedOptimizer on all ranks.

    Attributes:
        plain: by rank.
        members: ranks that reduce.
        hooked: parameters whose gradients are watched.
        left: by rank, how often each of these must still come.
        complete: all are reduced, and the step has not been made.
        synchronized: `synchronize()` was called, and the step has not been made.
        broken: a backward pass has failed since the last `zero_grad()`.
    """

    spec: OptimizerSpec
    plain: list[Optimizer]
    members: tuple[int, ...]
    hooked: set[str] = field(default_factory=set)
    left: list[dict[str, int]] = field(default_factory=list)
    complete: bool = False
    synchronized: bool = False
    broken: bool = False

    def begin(self) -> None:
        """Nothing has come yet."""
        self.left = [dict.fromkeys(self.hooked, self.spec.passes) for _ in self.plain]
        self.complete = False

    def came(self, name: str) -> bool:
        """On some rank, at least once."""
        return any(left.get(name, self.spec.passes) < self.spec.passes for left in self.left)

    @property
    def pending(self) -> bool:
        """Something has come."""
        return any(self.came(name) for name in self.hooked)


class Reference:
    """Plays a program on all ranks.

    Attributes:
        trace: by rank, what a script may look at.
        played: the program without what was not legitimate.
    """

    def __init__(self, program: Program, features: frozenset[Feature] = DRAWN) -> None:
        """Plays it; what needs a feature that is not among `features` is not legitimate either."""
        self._features = features
        self._ranks = program.ranks
        self._replicas = [Replica(program, rank) for rank in range(program.ranks)]
        self._names = program.parameters
        self._sparse = {name for name in self._names if program.kind_of(name) is Kind.SPARSE}
        self._computed: Gradients = [{} for _ in self._replicas]  # came, and not reduced yet
        self._local: set[str] = set()  # changed by a backward pass since it was last reduced
        self._started: list[tuple[str, int]] = []
        self._saved = False
        self._pending_entries: list[tuple[int, str, Values]] = []
        self._number = 0
        self.trace: list[list[Entry]] = [[] for _ in self._replicas]
        self._optimizers: list[Wrapped] = []
        for spec in program.optimizers:
            self._optimizers.append(self._wrap(spec))
        actions = list(self._play(program.actions))
        self.played = replace(program, actions=tuple(actions))

    def _play(self, actions: Sequence[Action]) -> Iterable[Action]:
        for action in actions:
            retained = [replica.retained for replica in self._replicas]
            self._pending_entries = []
            try:
                getattr(self, f"_{type(action).__name__.lower()}")(action)
            except IllegalError:
                for replica, loss in zip(self._replicas, retained, strict=True):
                    replica.retained = loss
                continue
            except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
                return  # PyTorch itself refuses it, and has perhaps done a part
            for rank, label, values in self._pending_entries:
                self.trace[rank].append((self._number, label, values))
            self._number += 1
            yield action

    def _look(self, rank: int, label: str, values: Values) -> None:
        self._pending_entries.append((rank, label, values))

    # ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────

    def _wrap(self, spec: OptimizerSpec) -> Wrapped:
        for other in self._optimizers:
            shared = set(other.spec.parameters) & set(spec.parameters)
            _legal(not shared or other.spec.options == spec.options, "other options for a shared parameter")
        members = spec.process_set or tuple(range(self._ranks))
        wrapped = Wrapped(spec, [replica.optimizer(spec) for replica in self._replicas], members)
        self._attach(wrapped)
        return wrapped

    def _attach(self, wrapped: Wrapped) -> None:
        wrapped.hooked = {name for name in wrapped.spec.parameters if self._wanted(name)}
        wrapped.begin()

    def _wanted(self, name: str) -> bool:
        return self._replicas[0].parameters[name].requires_grad

    def _idle(self, wrapped: Wrapped) -> bool:
        return not (wrapped.pending or wrapped.broken or self._local & set(wrapped.spec.parameters))

    def _all_idle(self) -> None:
        _legal(all(self._idle(wrapped) and not wrapped.synchronized for wrapped in self._optimizers), "between steps")

    def _defined(self, name: str) -> bool:
        """The gradient is not on its way."""
        return all(
            wrapped.complete or self._idle(wrapped) for wrapped in self._optimizers if name in wrapped.spec.parameters
        )

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _backward(self, action: Backward) -> None:
        gradients = self._compute(action, self._number * 100)
        if len(self._optimizers) > 1 and any(mine.keys() != gradients[0].keys() for mine in gradients):
            self._needs(Feature.UNEVEN)
        if action.fails_at is None:
            self._accumulate(gradients)
            return
        for wrapped in self._optimizers:
            if any(wrapped.hooked & set(mine) for mine in gradients):
                wrapped.broken = True

    def _compute(self, action: Backward, number: int, ranks: Sequence[int] | None = None) -> Gradients:
        """The gradients on each of `ranks`.

        Raises:
            IllegalError: a gradient would come too often, or has nowhere to go.
        """
        reentrant = action.checkpoint == "reentrant"
        _legal(not (reentrant and (action.inputs or action.penalty or action.retain)), "not with reentrant checkpoints")
        _legal(not (action.compiled and (action.penalty or action.checkpoint == "reentrant")), "not compiled")
        _legal(not (action.again and (action.penalty or action.fails_at is not None)), "a loss has been made")
        gradients: Gradients = [{} for _ in self._replicas]
        for rank in range(self._ranks) if ranks is None else ranks:
            replica = self._replicas[rank]
            names = [name for name in action.inputs or self._names if replica.parameters[name].requires_grad]
            _legal(bool(names) or not action.inputs, "nothing to compute")
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
        for wrapped in self._optimizers:
            touched = any(wrapped.hooked & mine.keys() for mine in gradients)
            _legal(not (touched and wrapped.broken), "a backward pass has failed")
            for rank in wrapped.members:
                for name in wrapped.hooked & gradients[rank].keys():
                    _legal(wrapped.left[rank][name] > 0, "more than backward_passes_per_step times")
        return gradients

    def _accumulate(self, gradients: Gradients) -> None:
        """Adds gradients up, and reduces those of optimizers that have all of theirs on all ranks now."""
        for rank, mine in enumerate(gradients):
            for name, grad in mine.items():
                param = self._replicas[rank].parameters[name]
                param.grad = grad.detach().clone() if param.grad is None else param.grad + grad
        watched = {name for wrapped in self._optimizers for name in wrapped.spec.parameters}
        self._local |= {name for mine in gradients for name in mine} & watched
        for wrapped in self._optimizers:
            if any(wrapped.hooked & mine.keys() for mine in gradients):
                wrapped.synchronized = False
            for rank, mine in enumerate(gradients):
                for name in wrapped.hooked & mine.keys():
                    wrapped.left[rank][name] -= 1
                    if wrapped.left[rank][name] == 0 and rank in wrapped.members:
                        grad = self._replicas[rank].parameters[name].grad
                        assert grad is not None
                        self._computed[rank][name] = grad.clone()
        active = [rank for rank, mine in enumerate(gradients) if mine]
        for wrapped in self._optimizers:
            if self._all_came(wrapped, gradients, [rank for rank in wrapped.members if rank in active]):
                self._reduce(wrapped)
                wrapped.complete = True

    def _all_came(self, wrapped: Wrapped, gradients: Gradients, active: Sequence[int]) -> bool:
        """In this backward pass, the last of those that count, on all ranks that have data."""
        if not (wrapped.hooked and active and (self._joined or len(active) == len(wrapped.members))):
            return False
        return {name for name in wrapped.spec.parameters if self._wanted(name)} == wrapped.hooked and all(
            wrapped.hooked <= gradients[rank].keys() and not any(wrapped.left[rank].values()) for rank in active
        )

    _joined = False  # some ranks have no data any more

    # ── reduction ────────────────────────────────────────────────────────────────────────────────────────────────

    def _reduce(self, wrapped: Wrapped) -> None:
        """Makes the gradients equal on all members."""
        if not wrapped.complete:
            for name in wrapped.spec.parameters:
                came = wrapped.came(name)
                if self._wanted(name) and not (came and name not in self._local):
                    self._reduce_one(wrapped, name)
        if any(self._wanted(name) and name not in wrapped.hooked for name in wrapped.spec.parameters):
            self._attach(wrapped)

    def _reduce_one(self, wrapped: Wrapped, name: str) -> None:
        self._local.discard(name)
        if len(wrapped.members) == 1:
            self._computed[wrapped.members[0]].pop(name, None)
            return
        params = {rank: self._replicas[rank].parameters[name] for rank in wrapped.members}
        given = [self._computed[rank].get(name, param.grad) for rank, param in params.items()]
        like = params[wrapped.members[0]]
        if name in self._sparse and not wrapped.spec.sparse_as_dense and all(g is None or g.is_sparse for g in given):
            total = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64),
                like.new_empty((0, *like.shape[1:])),
                like.shape,
                check_invariants=False,
            )
        else:
            total = torch.zeros(like.shape, dtype=torch.float64)
        for grad in given:
            if grad is not None:
                total = total + grad if total.is_sparse or not grad.is_sparse else total + grad.to_dense()
        if wrapped.spec.op == "average":
            total = total / len(wrapped.members)
        total = total.to(like.dtype)
        total = total.coalesce() if total.is_sparse else total
        for rank, param in params.items():
            computed = self._computed[rank].pop(name, None)
            if computed is None or param.grad is not None:  # else it was set to None after it came
                param.grad = torch.empty_like(param).copy_(total) if not total.is_sparse else total.clone()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, action: Step) -> None:
        wrapped = self._at(action.optimizer)
        _legal(not wrapped.broken, "a backward pass has failed")
        if action.closure is not None:
            self._step_with(wrapped, action.closure)
        else:
            _legal(not wrapped.spec.rule.startswith("lbfgs"), "LBFGS wants a closure")
            if action.skip_synchronize:
                _legal(wrapped.synchronized, "skip_synchronize() is for after synchronize()")
            else:
                _legal(not wrapped.synchronized or self._has_all(wrapped), "None would become zeros")
                self._reduce(wrapped)
            for plain in wrapped.plain:
                plain.step()
        self._stepped(action.optimizer, range(self._ranks))

    def _stepped(self, number: int, ranks: Iterable[int]) -> None:
        wrapped = self._at(number)
        wrapped.synchronized = False
        wrapped.begin()
        for rank in ranks:
            replica = self._replicas[rank]
            self._look(rank, f"optimizer {number}", replica.values(wrapped.spec.parameters))
            self._look(rank, f"optimizer {number}", replica.gradients(wrapped.spec.parameters))

    def _has_all(self, wrapped: Wrapped) -> bool:
        return all(replica.parameters[name].grad is not None for replica in self._replicas for name in wrapped.hooked)

    def _step_with(self, wrapped: Wrapped, closure: Backward) -> None:
        _legal(self._idle(wrapped) and not wrapped.synchronized and wrapped.spec.passes == 1, "before a closure")
        _legal(not (closure.again or closure.retain) and closure.fails_at is None, "in a closure")
        lbfgs = wrapped.spec.rule.startswith("lbfgs")
        if lbfgs:
            _legal(len(wrapped.members) == self._ranks and self._equal(), "LBFGS takes the same steps everywhere")
        number = self._number * 100
        gradients = self._compute(closure, number)
        others = {name for other in self._optimizers if other is not wrapped for name in other.spec.parameters}
        _legal(not (lbfgs and others & gradients[0].keys()), "LBFGS calls the closure several times")

        def backward() -> float:
            for plain in wrapped.plain:
                plain.zero_grad()
            self._accumulate(self._compute(closure, number))
            self._reduce(wrapped)
            wrapped.begin()
            with torch.no_grad():
                losses = (
                    [float(replica.loss(closure, number, plain=True)) for replica in self._replicas]
                    if (lbfgs and not closure.penalty)
                    else [0.0]
                )
            return sum(losses) / len(losses)

        if not lbfgs:
            backward()
            for plain in wrapped.plain:
                plain.step()
            return
        _legal(not closure.penalty, "the loss is wanted, too")

        def follow() -> None:
            for replica in self._replicas[1:]:
                with torch.no_grad():
                    for name, param in replica.parameters.items():
                        param.copy_(self._replicas[0].parameters[name])

        def joined() -> torch.Tensor:
            follow()
            return torch.tensor(backward(), dtype=torch.float64)

        wrapped.plain[0].step(joined)  # type: ignore[arg-type]  # a tensor will do
        follow()
        state = wrapped.plain[0].state_dict()
        for plain in wrapped.plain[1:]:
            plain.load_state_dict(copy.deepcopy(state))

    def _equal(self) -> bool:
        first = self._replicas[0]
        return all(
            torch.equal(param, replica.parameters[name])
            for replica in self._replicas
            for name, param in first.parameters.items()
        )

    def _synchronize(self, action: Synchronize) -> None:
        wrapped = self._at(action.optimizer)
        _legal(not wrapped.broken and not wrapped.synchronized, "synchronize() once")
        self._reduce(wrapped)
        wrapped.begin()
        wrapped.synchronized = True

    def _zerograd(self, action: ZeroGrad) -> None:
        if action.optimizer is None:
            self._all_idle()
            for replica in self._replicas:
                replica.blocks.zero_grad(action.set_to_none)
            return
        wrapped = self._at(action.optimizer)
        _legal(not wrapped.pending or wrapped.broken, "zero_grad() between backward() and step()")
        _legal(not wrapped.broken or action.set_to_none, "what came before the failure is unknown")
        for rank, plain in enumerate(wrapped.plain):
            plain.zero_grad(action.set_to_none)
            for name in wrapped.spec.parameters:
                if wrapped.broken:
                    self._computed[rank].pop(name, None)
        self._local -= set(wrapped.spec.parameters)
        wrapped.broken = wrapped.synchronized = False
        wrapped.begin()

    # ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────

    def _edit(self, action: Edit) -> None:
        for name in action.parameters:
            null, replaces = action.how == "null", action.how in ("null", "replace", "clone")
            owners = [wrapped for wrapped in self._optimizers if name in wrapped.spec.parameters]
            if not self._defined(name):
                _legal(replaces and self._has_come(name, action.on), "it is on its way")
                self._needs(Feature.NULLED_EARLY if null else Feature.REPLACED_EARLY)
            elif any(wrapped.complete for wrapped in owners):
                self._needs(Feature.NULLED if null else Feature.EDITED)
            elif any(wrapped.synchronized for wrapped in owners):
                self._needs(Feature.EDITED_SYNCHRONIZED)
            _legal(null or name not in self._sparse, "sparse")
        for replica in self._replicas:
            replica.edit(action)

    def _needs(self, feature: Feature) -> None:
        _legal(feature in self._features, f"{feature.value}: not yet")

    def _has_come(self, name: str, on: Sequence[int]) -> bool:
        """Completely, on all these ranks; so that nothing is to come."""
        return not any(wrapped.broken for wrapped in self._optimizers) and all(
            rank in wrapped.members and wrapped.left[rank].get(name) == 0
            for wrapped in self._optimizers
            if name in wrapped.spec.parameters
            for rank in on or range(self._ranks)
        )

    def _read(self, action: Read) -> None:
        watched = {name for wrapped in self._optimizers for name in wrapped.spec.parameters}
        _legal(all(self._defined(name) and name in watched for name in action.parameters), "it is on its way")
        if any(wrapped.complete for wrapped in self._optimizers):
            self._needs(Feature.READ)
        for rank, replica in enumerate(self._replicas):
            self._look(rank, "read", replica.gradients(action.parameters))

    # ── between steps ────────────────────────────────────────────────────────────────────────────────────────────

    def _requiregrad(self, action: RequireGrad) -> None:
        self._all_idle()
        for replica in self._replicas:
            replica.require_grad(action)

    def _addgroup(self, action: AddGroup) -> None:
        self._all_idle()
        wrapped = self._at(action.optimizer)
        _legal(not wrapped.spec.rule.startswith("lbfgs"), "LBFGS takes one group")
        _legal(not set(wrapped.spec.parameters) & set(action.parameters) and bool(action.parameters), "has it already")
        for other in self._optimizers:
            shared = set(other.spec.parameters) & set(action.parameters)
            _legal(not shared or other.spec.options == wrapped.spec.options, "other options for a shared parameter")
        for replica, plain in zip(self._replicas, wrapped.plain, strict=True):
            plain.add_param_group({"params": replica.select(action.parameters)})
        wrapped.spec = replace(wrapped.spec, parameters=(*wrapped.spec.parameters, *action.parameters))
        self._attach(wrapped)
        self._saved = False

    def _rewrap(self, action: Rewrap) -> None:
        self._all_idle()
        old = self._at(action.optimizer)
        spec = action.spec or old.spec
        _legal(not action.keep_state or (action.spec is None and len(old.plain[0].param_groups) == 1), "its state")
        place = self._optimizers.index(old)
        rest = self._optimizers[:place] + self._optimizers[place + 1 :]
        kept, self._optimizers = self._optimizers, rest
        try:
            fresh = self._wrap(spec)
        finally:
            self._optimizers = kept
        if action.keep_state:
            for was, now in zip(old.plain, fresh.plain, strict=True):
                now.load_state_dict(copy.deepcopy(was.state_dict()))
        self._optimizers[place] = fresh
        self._saved = False

    def _passes(self, action: Passes) -> None:
        self._all_idle()
        wrapped = self._at(action.optimizer)
        names = set(wrapped.spec.parameters)
        shared = any(other is not wrapped and names & set(other.spec.parameters) for other in self._optimizers)
        _legal(not shared, "other options for a shared parameter")
        wrapped.spec = replace(wrapped.spec, passes=action.passes)
        wrapped.begin()

    def _save(self, action: Save) -> None:
        self._all_idle()
        for rank, replica in enumerate(self._replicas):
            replica.save([wrapped.plain[rank] for wrapped in self._optimizers])
        self._saved = True

    def _load(self, action: Load) -> None:
        self._all_idle()
        _legal(self._saved, "nothing was saved")
        for rank, replica in enumerate(self._replicas):
            replica.load([wrapped.plain[rank] for wrapped in self._optimizers])

    def _convert(self, action: Convert) -> None:
        self._all_idle()
        # PyTorch's own fused optimizers go wrong where moments have not their parameter's strides.
        fused = any("fused" in wrapped.spec.rule and wrapped.plain[0].state for wrapped in self._optimizers)
        _legal(not (fused and action.to in ("channels_last", "contiguous", "strides")), "fused")
        for replica in self._replicas:
            replica.convert(action)
            replica.retained = None

    def _nudge(self, action: Nudge) -> None:
        for replica in self._replicas:
            replica.nudge()

    def _broadcast(self, action: Broadcast) -> None:
        self._all_idle()
        root = self._replicas[action.root]
        if action.optimizer is None:
            for replica in self._replicas:
                replica.blocks.load_state_dict(root.blocks.state_dict())
        else:
            wrapped = self._at(action.optimizer)
            _legal(not wrapped.spec.rule.startswith("lbfgs"), "LBFGS has the history of one rank's data")
            _legal(all(plain.state for plain in wrapped.plain), "a fresh optimizer")
            self._copy_state(wrapped, action.root)
        self._drop_gradients()

    def _copy_state(self, wrapped: Wrapped, root: int) -> None:
        state = wrapped.plain[root].state_dict()
        for rank, plain in enumerate(wrapped.plain):
            if rank != root:
                plain.load_state_dict(copy.deepcopy(state))

    def _drop_gradients(self) -> None:
        for replica in self._replicas:
            replica.blocks.zero_grad()

    # ── eager operations ─────────────────────────────────────────────────────────────────────────────────────────

    def _eager(self, action: Eager) -> None:
        if not all(self._idle(wrapped) for wrapped in self._optimizers):
            self._needs(Feature.EAGER_EARLY)
        if any(left != wrapped.left[0] for wrapped in self._optimizers for left in wrapped.left):
            self._needs(Feature.UNEVEN)
        self._started.append((action.what, self._number))
        if not action.later:
            self._wait(Wait())

    def _wait(self, action: Wait) -> None:
        for what, number in self._started:
            for rank in range(self._ranks):
                result = OPERATIONS[what].result(rank, self._ranks, number)
                self._look(rank, f"eager {what}", {"result": result.numpy()})
        self._started = []

    # ── uneven data ──────────────────────────────────────────────────────────────────────────────────────────────

    def _epoch(self, action: Epoch) -> None:
        self._all_idle()
        _legal(bool(self._equal()) or action.batches.count(max(action.batches)) == 1, "nobody knows who is last")
        used = {number for step in action.order for number in step}
        for number in used:
            wrapped = self._at(number)
            wanted = {name for name in wrapped.spec.parameters if self._wanted(name)}
            _legal(not wrapped.spec.rule.startswith("lbfgs"), "no closure")
            _legal(wrapped.spec.passes == 1 and len(wrapped.members) == self._ranks, "join() is for all ranks")
            for other in self._optimizers:
                _legal(other is wrapped or not set(other.spec.parameters) & wanted, "shared parameters")
            _legal(bool(wanted) and wanted == wrapped.hooked, "frozen or thawed")
        _legal(bool(action.order) and all(action.order) and not self._started, "a step a batch")
        for batch in range(max(action.batches)):
            active = [rank for rank in range(self._ranks) if batch < action.batches[rank]]
            self._joined = len(active) < self._ranks
            try:
                self._batch(action.order[batch % len(action.order)], self._number * 100 + batch, active)
            except IllegalError as err:
                raise RuntimeError("in the middle of an epoch") from err
            finally:
                self._joined = False
        last = action.batches.index(max(action.batches))
        for replica in self._replicas:
            replica.blocks.load_state_dict(self._replicas[last].blocks.state_dict())
        for number in used:
            self._copy_state(self._at(number), last)
        self._drop_gradients()
        for rank, replica in enumerate(self._replicas):
            self._look(rank, "after join", replica.values(self._names))

    def _batch(self, optimizers: Sequence[int], number: int, active: Sequence[int]) -> None:
        """One batch of the ranks that still have one."""
        for place in optimizers:
            wrapped = self._at(place)
            for plain in wrapped.plain:
                plain.zero_grad()
            inputs = tuple(name for name in wrapped.spec.parameters if self._wanted(name))
            self._accumulate(self._compute(Backward(inputs=inputs), number, active))
            self._reduce(wrapped)
            for rank in active:
                wrapped.plain[rank].step()
            self._stepped(place, active)

    def _at(self, number: int) -> Wrapped:
        _legal(number < len(self._optimizers), "no such optimizer")
        return self._optimizers[number]
