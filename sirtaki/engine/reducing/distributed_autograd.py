"""Detect gradients of `torch.distributed.autograd`, which are kept in its context and not in `.grad`.

Distributed autograd calls hooks on AccumulateGrad nodes, which DDP uses, but not the post-accumulate-grad hooks of
parameters, which `DistributedOptimizer` uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import rpc

from sirtaki.errors import ConfigError, GradientError

from .checks import Named

KEPT = (
    "torch.distributed.autograd has computed the gradient of {name} and keeps it in its context, where "
    "DistributedOptimizer does not reduce it: copy gradients from dist_autograd.get_gradients(context) to .grad before "
    "step(), or wrap the model in DistributedDataParallel"
)

SHARDED = (
    "fully_shard() and replicate() do not average gradients that torch.distributed.autograd computes: call the model "
    "outside of dist_autograd.context(), or wrap it in DistributedDataParallel"
)


def is_possible() -> bool:
    """Return whether this process uses RPC. Without RPC, there is no distributed autograd."""
    return rpc.is_available() and bool(rpc._is_current_rpc_agent_set())  # type: ignore[attr-defined]


def current_context() -> int | None:
    """Return the id of this thread's distributed autograd context; None if there is none."""
    if not is_possible():
        return None
    try:
        return int(torch._C._distributed_autograd._current_context()._context_id())
    except RuntimeError:
        return None


def refuse_sharded() -> None:
    """Reject a forward pass of an FSDP2 model inside a distributed autograd context of this thread. Non-blocking.

    Raises:
        ConfigError: this thread has a distributed autograd context.
    """
    if current_context() is not None:
        raise ConfigError(SHARDED)


def require_gradients_outside(named: Sequence[Named]) -> None:
    """Reject gradients that are in this thread's distributed autograd context, but not in `.grad`.

    Raises:
        GradientError: there is such a gradient.
    """
    if (context := current_context()) is None:
        return
    kept = torch._C._distributed_autograd.get_gradients(context)
    for name, param in named:
        if param.grad is None and param in kept:
            raise GradientError(KEPT.format(name=name))
