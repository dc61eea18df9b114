"""`step(closure)` in one process: the closure is called on all replicas, and its gradients are reduced each time."""

from __future__ import annotations

import copy

import torch

from .backward import compute
from .lockstep import Lockstep
from .program import Backward
from .wrapped import Wrapped, legal


def step_with(world: Lockstep, wrapped: Wrapped, closure: Backward, number: int) -> None:
    """Steps this optimizer with a closure that zeroes gradients and makes the backward pass of batch `number`.

    Raises:
        IllegalError: no script may do that now.
    """
    legal(world.is_idle(wrapped) and not wrapped.synchronized and wrapped.spec.passes == 1, "before a closure")
    legal(not world.divided & set(wrapped.spec.parameters), "what is reduced together is not said")
    legal(not (closure.again or closure.retain) and closure.fails_at is None, "in a closure")
    lbfgs = wrapped.spec.rule.startswith("lbfgs")
    if lbfgs:
        legal(len(wrapped.members) == world.n_ranks and world.replicas_equal(), "LBFGS takes the same steps everywhere")
    gradients = compute(world, closure, number)
    others = {name for other in world.optimizers if other is not wrapped for name in other.spec.parameters}
    legal(not (lbfgs and others & gradients[0].keys()), "LBFGS calls the closure several times")
    legal(not (lbfgs and closure.penalty), "the loss is wanted, too")
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
    """The first replica's optimizer sees the mean loss, and the others follow it."""

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
