"""Gradients that are zeroed, after a step or instead of one, in one process."""

from __future__ import annotations

from .features import Feature
from .lockstep import Lockstep
from .program import ZeroGrad
from .wrapped import Wrapped, legal


def zero(world: Lockstep, action: ZeroGrad) -> None:
    """`zero_grad()` of an optimizer, or of the model, which also forgets what failed backward passes have left.

    Raises:
        IllegalError: no script may do that now.
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
    legal(not wrapped.broken or action.set_to_none, "what came before the failure is unknown")
    if wrapped.complete:
        world.needs(Feature.LEFT_OUT)


def drop(world: Lockstep, wrapped: Wrapped) -> None:
    """What has come of this iteration does not count, or is left unused."""
    names = set(wrapped.spec.parameters)
    if wrapped.complete and names & world.began:  # else another optimizer has ended this iteration
        world.finish(wrapped)
    elif wrapped.broken:
        wrapped.seen = dict.fromkeys(names, -1)
        world.began -= names
        for computed in world.computed:
            for name in names & computed.keys():
                del computed[name]
    world.local -= names
    wrapped.broken = wrapped.synchronized = False
    wrapped.begin()
