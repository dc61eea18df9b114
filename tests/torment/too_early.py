"""Gradients that are written in place before they are reduced: all ranks raise an error, and go on."""

from __future__ import annotations

from .backward import compute
from .features import Feature
from .lockstep import Lockstep
from .program import TooEarly
from .wrapped import legal
from .zeroing import drop


def write_too_early(world: Lockstep, action: TooEarly, number: int) -> None:
    """A backward pass on batch `number`, a write before its gradients are reduced, an error, and zeroed gradients.

    Raises:
        IllegalError: no script may do that now, or it is no error.
    """
    wrapped, drawn = world.at(action.optimizer), action.backward
    world.needs(Feature.TOO_EARLY)
    world.require_idle()
    legal(len(world.optimizers) == 1 and 1 < len(wrapped.members) == world.n_ranks, "all ranks must do the same")
    legal(wrapped.spec.passes == 1 and not wrapped.spec.rule.startswith("lbfgs"), "one pass, one step")
    legal(not (drawn.retain or drawn.again) and drawn.fails_at is None, "one pass")
    legal({name for name in wrapped.spec.parameters if world.wanted(name)} == wrapped.hooked, "thawed")
    gradients, dense = compute(world, drawn, number), wrapped.hooked - world.sparse
    ranks = action.on or range(world.n_ranks)
    legal(not set(action.parameters) & world.sparse, "what is sparse gives way to what is reduced")
    legal(
        any(
            dense - gradients[rank].keys() and dense & set(action.parameters) & gradients[rank].keys() for rank in ranks
        ),
        "nothing is written too early",
    )
    world.accumulate(gradients)
    wrapped.broken = True
    drop(world, wrapped)
    for plain in wrapped.plain:
        plain.zero_grad()
