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
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from . import program as actions
from .backward import compute
from .closures import step_with
from .eager import OPERATIONS
from .epoch import play_epoch
from .features import ALL, Feature
from .lockstep import Lockstep
from .program import Action, Backward, Program
from .replica import Values
from .too_early import write_too_early
from .wrapped import IllegalError, legal
from .zeroing import zero

Entry = tuple[int, str, Values]
"""(number of the action, what was looked at, the values)."""

DIVERGED = 100.0
"""Weights of this size have grown over few steps, and rounding with them, beyond any tolerance."""


class Reference:
    """Plays a program on all ranks.

    Attributes:
        trace: by rank, what a script may look at.
        played: the program without what was not legitimate.
    """

    def __init__(self, program: Program, features: frozenset[Feature] = ALL) -> None:
        """Plays it; what needs a feature that is not among `features` is not legitimate either."""
        self._world = Lockstep(program, features)
        self._started: list[tuple[str, int]] = []
        self._saved = False
        self._pending_entries: list[tuple[int, str, Values]] = []
        self._number = 0
        self.trace: list[list[Entry]] = [[] for _ in self._world.replicas]
        self.played = replace(program, actions=tuple(self._play(program.actions)))

    def _play(self, drawn: Sequence[Action]) -> list[Action]:
        played, n_sound = list[Action](), 0
        for action in drawn:
            retained = [replica.retained for replica in self._world.replicas]
            self._pending_entries = []
            try:
                getattr(self, f"_{type(action).__name__.lower()}")(action)
            except IllegalError:
                for replica, loss in zip(self._world.replicas, retained, strict=True):
                    replica.retained = loss
                continue
            except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
                break  # PyTorch itself refuses it, and has perhaps done a part
            for rank, label, values in self._pending_entries:
                self.trace[rank].append((self._number, label, values))
            self._number += 1
            played.append(action)
            if not any(wrapped.reduced_on_some for wrapped in self._world.optimizers):
                n_sound = self._number
        # Not where some ranks wait in their backward pass for others that come no more.
        self.trace = [[entry for entry in trace if entry[0] < n_sound] for trace in self.trace]
        return played[:n_sound]

    def _look(self, rank: int, label: str, values: Values) -> None:
        self._pending_entries.append((rank, label, values))

    def _backward(self, action: Backward) -> None:
        gradients = compute(self._world, action, self._number * 100)
        if len(self._world.optimizers) > 1 and any(mine.keys() != gradients[0].keys() for mine in gradients):
            self._world.needs(Feature.UNEVEN)
        if action.fails_at is None:
            self._world.accumulate(gradients)
            return
        watched = self._world.watched
        legal(all(name in watched for mine in gradients for name in mine), "nobody zeroes what it leaves there")
        for wrapped in self._world.optimizers:
            if any(wrapped.hooked & set(mine) for mine in gradients):
                wrapped.broken = True

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
            replica = self._world.replicas[rank]
            weights = replica.values(wrapped.spec.parameters)
            if any(weight is not None and np.abs(weight).max(initial=0.0) > DIVERGED for weight in weights.values()):
                raise ValueError("what follows is rounding, grown with the weights")  # the program ends before
            self._look(rank, f"optimizer {number}", weights)
            self._look(rank, f"optimizer {number}", replica.gradients(wrapped.spec.parameters))

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
                legal(replaces and self._world.has_come(name, action.on), "it is on its way")
                apart = self._world.divided | self._world.beside_sparse
                legal(null or name not in apart, "perhaps it is reduced")
                legal(null or not any(wrapped.reduced_on_some for wrapped in owners), "an error on all ranks")
                self._world.needs(Feature.NULLED_EARLY if null else Feature.REPLACED_EARLY)
            elif any(wrapped.complete for wrapped in owners):
                self._world.needs(Feature.NULLED if null else Feature.EDITED)
            elif any(wrapped.synchronized for wrapped in owners):
                self._world.needs(Feature.EDITED_SYNCHRONIZED)
            legal(null or name not in self._world.sparse, "sparse")
            for wrapped in owners:
                wrapped.replaced |= replaces and not null and not wrapped.complete
        for replica in self._world.replicas:
            replica.edit(action)

    def _tooearly(self, action: actions.TooEarly) -> None:
        write_too_early(self._world, action, self._number * 100)
        for rank in range(self._world.n_ranks):
            self._look(rank, "too early", {"raised": np.array([1.0])})

    def _read(self, action: actions.Read) -> None:
        watched = self._world.watched
        legal(all(self._world.is_defined(name) and name in watched for name in action.parameters), "it is on its way")
        if any(wrapped.complete for wrapped in self._world.optimizers):
            self._world.needs(Feature.READ)
        for rank, replica in enumerate(self._world.replicas):
            self._look(rank, "read", replica.gradients(action.parameters))

    # ── between steps ────────────────────────────────────────────────────────────────────────────────────────────

    def _requiregrad(self, action: actions.RequireGrad) -> None:
        self._world.require_idle()
        for replica in self._world.replicas:
            replica.require_grad(action)

    def _addgroup(self, action: actions.AddGroup) -> None:
        self._world.require_idle()
        wrapped = self._world.at(action.optimizer)
        legal(not wrapped.spec.rule.startswith("lbfgs"), "LBFGS takes one group")
        legal(not set(wrapped.spec.parameters) & set(action.parameters) and bool(action.parameters), "has it already")
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
        # PyTorch's own fused optimizers go wrong where moments have not their parameter's strides.
        fused = any("fused" in wrapped.spec.rule and wrapped.plain[0].state for wrapped in self._world.optimizers)
        legal(not (fused and action.to in ("channels_last", "contiguous", "strides")), "fused")
        for replica in self._world.replicas:
            replica.convert(action)
            replica.retained = None

    def _nudge(self, action: actions.Nudge) -> None:
        for replica in self._world.replicas:
            replica.nudge()

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

    # ── eager operations ─────────────────────────────────────────────────────────────────────────────────────────

    def _eager(self, action: actions.Eager) -> None:
        if not all(self._world.is_idle(wrapped) for wrapped in self._world.optimizers):
            self._world.needs(Feature.EAGER_EARLY)
        if any(left != wrapped.left[0] for wrapped in self._world.optimizers for left in wrapped.left):
            self._world.needs(Feature.UNEVEN)
        self._started.append((action.what, self._number))
        if not action.later:
            self._wait(actions.Wait())

    def _wait(self, action: actions.Wait) -> None:
        for what, number in self._started:
            for rank in range(self._world.n_ranks):
                result = OPERATIONS[what].result(rank, self._world.n_ranks, number)
                self._look(rank, f"eager {what}", {"result": result.numpy()})
        self._started = []

    # ── uneven data ──────────────────────────────────────────────────────────────────────────────────────────────

    def _epoch(self, action: actions.Epoch) -> None:
        legal(not self._started, "eager operations are under way")
        play_epoch(self._world, action, self._number * 100, self._stepped)
        for rank, replica in enumerate(self._world.replicas):
            self._look(rank, "after join", replica.values(self._world.names))
