"""NCCL through torch: one `ProcessGroupNCCL` object a communicator, built directly, and what the ranks agree about it.

Built directly, so the user's own default process group is left alone; each object has a communicator and a CUDA stream
of its own. This is the only module that needs a GPU to run; everything around it takes a `Group` from anywhere.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _make_nccl_premul_sum

from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.comm.transports.gloo import TORCH_OPS
from sirtaki.errors import CommError

from .communicators import CommunicatorKey, Group, GroupWork, Opener, Scope
from .cuda_device import CudaDevice
from .support import ALLOWANCES, NcclVersions

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NO_HANDLING = "0"
"""torch says that a communicator has failed and leaves the rest to us, who can name the ranks; by default it ends the
process. It must not abort the communicator either: what waits for it on the GPU would go on with wrong gradients."""

PREMULTIPLIED = (torch.float16, torch.float32, torch.float64)
"""dtypes that NCCL's pre-multiplied sum takes through every version of torch."""


class NcclGroup:
    """One communicator; see `Group`."""

    def __init__(self, group: Any) -> None:  # Any: ProcessGroupNCCL, which a torch without CUDA lacks
        """Takes over a `ProcessGroupNCCL`."""
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        """See `Group`."""
        return self._work(self._group.allreduce([tensor], TORCH_OPS[op]))

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> GroupWork | None:
        """See `Group`: an average, or NCCL's pre-multiplied sum."""
        if not tensor.is_floating_point():
            return None
        if math.isclose(scale * self._group.size(), 1.0):
            return self._work(self._group.allreduce([tensor], dist.ReduceOp.AVG))
        if tensor.dtype not in PREMULTIPLIED:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = _make_nccl_premul_sum(scale)
        return self._work(self._group.allreduce([tensor], options))

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        """See `Group`."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = TORCH_OPS[op]  # type: ignore[assignment]  # the stub knows one of the two classes
        return self._work(self._group._reduce_scatter_base(share, tensor, options))

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> GroupWork:
        """See `Group`."""
        return self._work(self._group._allgather_base(tensor, share))

    @staticmethod
    def _work(work: Any) -> GroupWork:  # Any: torch's Work
        started: GroupWork = work
        return started

    def error(self) -> str:
        """See `Group`."""
        if not hasattr(self._group, "get_error"):  # torch < 2.7
            return ""
        found = self._group.get_error()
        return "" if found.name == "SUCCESS" else str(found.name).lower().replace("_", " ")

    def close(self) -> None:
        """See `Group`."""
        ways = ("shutdown", "abort", "_shutdown")  # of newer and older versions of torch; 2.4 has the last one only
        next(getattr(self._group, name) for name in ways if hasattr(self._group, name))()


class NcclOpener:
    """Makes communicators over the ranks of a control plane, all on one GPU of this process; see `Opener`."""

    def __init__(self, control: ControlPlane, device: CudaDevice, *, max_streams: int, timeout_s: float) -> None:
        """Opens nothing.

        Args:
            control: the ranks.
            device: of this process.
            max_streams: that may run at the same time.
            timeout_s: after this long an operation that does not get on fails.
        """
        self._control, self._device = control, device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.max_streams = max_streams
        self.threads = ALLOWANCES

    def open(self, key: CommunicatorKey) -> Group:
        """Collective: see `Opener`. The communicator has done its first operation when this returns."""
        control = self._control
        rank, size, name = {
            Scope.ALL: (control.rank, control.size, "all"),
            Scope.NODE: (control.local_rank, control.local_size, f"node{control.node_ranks[0]}"),
            Scope.ACROSS: (control.cross_rank, control.cross_size, f"across{control.local_rank}"),
        }[key.scope]
        store, _ = control.store()
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout
        if key.ctas is not None:
            options.config.min_ctas = options.config.max_ctas = key.ctas
        # A field of newer versions; the environment variable that init() sets does the same for all communicators.
        if hasattr(options.config, "launch_order_implicit"):
            options.config.launch_order_implicit = 1
        try:
            with torch.cuda.device(self._device.torch_device), _torch_leaves_errors_to_us():
                prefix = PrefixStore(f"{control.next_prefix()}/{name}", store)
                group: Any = dist.ProcessGroupNCCL(prefix, rank, size, options)  # Any: the stub lacks its methods
                first = torch.zeros(1, device=self._device.torch_device)
                group.allreduce([first]).wait()  # makes the connections
                self._device.synchronise()
        except RuntimeError as err:
            raise CommError(f"rank {control.rank} could not open NCCL {key}: {err}") from err
        return NcclGroup(group)

    def memory_bytes(self) -> tuple[int, int]:
        """See `Opener`."""
        free, total = torch.cuda.mem_get_info(self._device.torch_device)
        return free, total


@contextlib.contextmanager
def _torch_leaves_errors_to_us() -> Iterator[None]:
    """For the process groups that are built inside; the user's own ones keep what they had."""
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = NO_HANDLING
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = before


def find_nccl(control: ControlPlane, device: CudaDevice, *, forced: bool, timeout_s: float) -> Opener | None:
    """Collective: what makes NCCL communicators between these ranks' GPUs; None, and a line in the log, if they can't.

    Args:
        control: the ranks.
        device: the GPU of this rank.
        forced: the user has asked for NCCL: ranks that share a GPU do not count against it.
        timeout_s: after this long an operation that does not get on fails.
    """
    mine = _identity(device, control.hosts[control.rank]) if dist.is_nccl_available() else ""
    gpus: list[str] = control.all_gather(mine)
    if "" in gpus:
        _say_why_not("this rank's torch has no NCCL" if not mine else "a rank's torch has no NCCL")
        return None
    if len(set(gpus)) < len(gpus) and not forced:
        shared = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        ranks = [str(rank) for rank, gpu in enumerate(gpus) if gpu == shared]
        _say_why_not(f"ranks {' and '.join(ranks)} share one GPU, which NCCL refuses")
        return None
    versions = NcclVersions.here()
    reasons = [reason for reason in control.all_gather(versions.why_one_stream) if reason]
    if reasons:
        logger.info("one NCCL stream only: %s", reasons[0])
    max_streams = 1 if reasons else versions.max_streams
    return NcclOpener(control, device, max_streams=max_streams, timeout_s=timeout_s)


def _say_why_not(reason: str) -> None:
    logger.warning("gradients travel from GPU to GPU through host memory: %s", reason)


def _identity(device: CudaDevice, host: int) -> str:
    """Of the GPU on that host, equal on two ranks exactly if they share it."""
    found: Any = torch.cuda.get_device_properties(device.torch_device)  # Any: fields depend on torch's version
    for name in ("uuid", "pci_bus_id"):
        if hasattr(found, name):
            return f"{host} {getattr(found, name)}"
    return f"{host} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.torch_device}"
