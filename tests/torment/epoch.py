"""Uneven data in one process: ranks that have no batch any more count as zeros in the average over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .backward import compute
from .lockstep import Lockstep
from .program import Backward, Epoch
from .wrapped import IllegalError, legal

Stepped = Callable[[int, Sequence[int]], None]
"""Notes that these ranks have stepped the optimizer of this number."""


def play_epoch(world: Lockstep, action: Epoch, number: int, stepped: Stepped) -> None:
    """Trains on batches `number`, `number + 1` and so on; then all ranks are as the one that had the most.

    Raises:
        IllegalError: no script may do that now.
    """
    world.require_idle()
    batches = action.batches
    legal(world.replicas_equal() or batches.count(max(batches)) == 1, "nobody knows who is last")
    legal(bool(action.order) and all(action.order), "a step a batch")
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
    legal(bool(wanted) and wanted == wrapped.hooked, "frozen or thawed")


def _batch(world: Lockstep, optimizers: Sequence[int], number: int, active: Sequence[int], stepped: Stepped) -> None:
    """One batch of the ranks that still have one."""
    for place in optimizers:
        wrapped = world.at(place)
        for plain in wrapped.plain:
            plain.zero_grad()
        inputs = tuple(name for name in wrapped.spec.parameters if world.wanted(name))
        world.accumulate(compute(world, Backward(inputs=inputs), number, active))
        world.finish(wrapped)
        world.update(wrapped, active)
        stepped(place, active)
