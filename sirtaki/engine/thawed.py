"""Gradients of parameters that were frozen when their optimizer was made, in the iteration in which they are thawed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sirtaki.comm.collectives.engine import EagerEngine
from sirtaki.comm.collectives.requests import Kind, Signature
from sirtaki.comm.gradients.buffers import Reduction


@torch.no_grad()
def reduce_thawed(
    params: Sequence[torch.Tensor], *, prefix: str, reduction: Reduction, engine: EagerEngine, unused_as_none: bool
) -> None:
    """Collective: reduces gradients of parameters that have no hook yet; afterwards they are dense.

    Args:
        params: the same on all ranks.
        prefix: of the operations' names.
        reduction: what is done to every gradient.
        engine: of the ranks that take part.
        unused_as_none: what no rank has computed stays None.
    """
    computed = torch.tensor([float(param.grad is not None) for param in params])
    anywhere = _sum(engine, computed, f"{prefix}.computed") if unused_as_none else torch.ones_like(computed)
    for number, (param, wanted) in enumerate(zip(params, anywhere.tolist(), strict=True)):
        if not wanted:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        elif param.grad.is_sparse:
            param.grad = param.grad.to_dense()
        param.grad.copy_(_sum(engine, param.grad, f"{prefix}.{number}", reduction))


def _sum(engine: EagerEngine, tensor: torch.Tensor, name: str, reduction: Reduction | None = None) -> torch.Tensor:
    reduction = reduction or Reduction()
    signature = Signature.of(
        [tensor],
        name=name,
        kind=Kind.ALLREDUCE,
        op=reduction.op.value,
        factors=(reduction.prescale, reduction.postscale),
        by_all=True,
    )
    work = engine.submit(signature, [tensor])
    engine.finish(work)
    return work.results[0]
