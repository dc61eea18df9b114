"""The backward pass of a program in one process: the gradients of all ranks, if a script may have it computed now."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .lockstep import Gradients, Lockstep
from .program import Backward
from .wrapped import IllegalError, legal


def compute(lockstep: Lockstep, action: Backward, number: int, ranks: Sequence[int] | None = None) -> Gradients:
    """The gradients of batch `number` on each of `ranks`, None = all of them.

    Raises:
        IllegalError: a gradient would come too often, or has nowhere to go.
    """
    reentrant = action.checkpoint == "reentrant"
    legal(not (reentrant and (action.inputs or action.penalty or action.retain)), "not with reentrant checkpoints")
    legal(not (reentrant and action.fails_at is not None), "the parts of such a pass end by themselves")
    legal(not (action.compiled and (action.penalty or action.checkpoint == "reentrant")), "not compiled")
    legal(not (action.again and (action.penalty or action.fails_at is not None)), "a loss has been made")
    unreduced = max(2, lockstep.n_ranks)  # on some rank gradients stay as PyTorch has computed them
    apart = any(w.spec.rule.startswith("fused") and len(w.members) < unreduced for w in lockstep.optimizers)
    legal(not (action.penalty and apart), "PyTorch's own fused updates misread gradients of other strides")
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
        legal(not (touched and wrapped.replaced), "where all has come then, it would have been too early")
        for rank in wrapped.members:
            for name in wrapped.hooked & gradients[rank].keys():
                legal(wrapped.left[rank][name] > 0, "more than backward_passes_per_step times")
    return gradients
