"""Horovod's PyTorch API over `comm`, `autotune` and `registry`: `import sirtaki.torch as hvd`."""

# ruff: noqa: F403, F405  # `mpi_ops` defines the names

from sirtaki.comm.nccl_streams.transport import ask_for_launch_order

from . import elastic, mpi_ops, optim
from .basics import start_timeline, stop_timeline
from .compile_backend import early_gradients
from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .local_sgd import DiLoCo, LocalSGD
from .mpi_ops import *
from .optimizer import DistributedOptimizer, sparse_gradients
from .sync_batch_norm import SyncBatchNorm

ask_for_launch_order()  # Set the variable at import, because NCCL reads it once, at the script's first collective.

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "early_gradients",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "optim",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "sparse_gradients",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
