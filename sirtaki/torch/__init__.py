"""Horovod's PyTorch API over `comm`, `autotune` and `registry`: `import sirtaki.torch as hvd`."""

# ruff: noqa: F403  # `mpi_ops` has them

from . import elastic, mpi_ops, optim
from .basics import start_timeline, stop_timeline
from .compile_backend import early_gradients
from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .local_sgd import DiLoCo, LocalSGD
from .mpi_ops import *
from .optimizer import DistributedOptimizer, sparse_gradients
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "LocalSGD",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "early_gradients",
    "elastic",
    "mpi_ops",
    "optim",
    "sparse_gradients",
    "start_timeline",
    "stop_timeline",
]
__all__ += mpi_ops.__all__
