"""PyTorch's reduce operations in terms of what lanes and Gloo can do: PyTorch's averages and scaled sums are sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp as TorchOp

from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.comm.transports.gloo import TORCH_OPS

LANE_OPS = {theirs: ours for ours, theirs in TORCH_OPS.items()}

LANE_DTYPES = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)
"""Those that Gloo adds up, too; a bool is left to Gloo, for which it is a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceRecipe:
    """How tensors of different ranks are combined.

    Attributes:
        op: PyTorch's, without averages and scaled sums.
        factor: what this rank's tensor is multiplied by before that; None = nothing.
        divisor: what the result is divided by; 1 = nothing. Integers are rounded towards zero, as NCCL does.
    """

    op: TorchOp.RedOpType
    factor: float | torch.Tensor | None = None
    divisor: int = 1

    @classmethod
    def of(cls, op: TorchOp | TorchOp.RedOpType, size: int) -> ReduceRecipe:
        """That of an operation over `size` ranks."""
        whole: Any = TorchOp(op) if isinstance(op, TorchOp.RedOpType) else op  # Any: the stub lacks what pickles it
        kind, factor = whole.__getstate__()
        if kind == TorchOp.AVG:
            return cls(op=TorchOp.SUM, divisor=size)
        return cls(op=TorchOp.SUM if kind == TorchOp.PREMUL_SUM else kind, factor=factor)

    @property
    def lane_op(self) -> ReduceOp | None:
        """What lanes do; None if they can't."""
        return LANE_OPS.get(self.op)

    def prepare_(self, tensor: torch.Tensor) -> None:
        """In place, before others see it."""
        if self.factor is not None:
            tensor.mul_(self.factor)

    def divide_(self, tensor: torch.Tensor) -> None:
        """In place, at the end."""
        if self.divisor == 1:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(self.divisor)
        else:
            tensor.div_(self.divisor, rounding_mode="trunc")
