"""What `sirtaki translate` writes into scripts: data divided among ranks, values of all of them, output of one."""

from .data import DistributedSampler, divided, share, whole
from .output import on_root
from .values import agreed, average, total

__all__ = ["DistributedSampler", "agreed", "average", "divided", "on_root", "share", "total", "whole"]
