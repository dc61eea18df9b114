"""NCCL through torch: what this machine's NCCL can do, and one `ProcessGroupNCCL` object a communicator.

The objects are built directly, so the user's own default process group is left alone; each has a communicator and a
CUDA stream of its own.

Before NCCL 2.26 all operations of all communicators of a device had to be put into one order by the caller. Since then
`NCCL_LAUNCH_ORDER_IMPLICIT=1` makes NCCL keep the order in which the host has issued them; with CUDA 12.3 or newer
(driver and runtime) they overlap even so. Without that several streams can deadlock, so there is one.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _make_nccl_premul_sum

from sirtaki.comm.device import CudaDevice
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.comm.transports.gloo import TORCH_OPS
from sirtaki.errors import CommError, PlanError, TransportError

from ..plan import NcclWay
from .transport import ALLOWANCES, CommunicatorKey, Group, GroupWork, Opener, Scope

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
ORDERED_NCCL = (2, 26)
OVERLAPPING_CUDA = (12, 3)

MAX_STREAMS = 24
"""As AIACC used at most; how many of them fit into the GPU's memory, `CommunicatorPool` sees when a plan is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclVersions:
    """The versions that decide.

    Attributes:
        nccl: as (major, minor, patch).
        cuda_runtime: that torch was built for, as (major, minor).
        cuda_driver: the newest CUDA that the driver supports, as (major, minor).
        launch_order: the value of `NCCL_LAUNCH_ORDER_IMPLICIT`, "" if it is not set.
    """

    nccl: tuple[int, ...]
    cuda_runtime: tuple[int, int]
    cuda_driver: tuple[int, int]
    launch_order: str

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> NcclVersions:
        """This process's; needs a GPU."""
        driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # the stub lacks it
        major, minor = (int(part) for part in str(torch.version.cuda).split(".")[:2])
        return cls(
            nccl=tuple(torch.cuda.nccl.version()),  # type: ignore[no-untyped-call]  # torch's
            cuda_runtime=(major, minor),
            cuda_driver=(driver // 1000, driver % 1000 // 10),
            launch_order=environ.get(LAUNCH_ORDER, ""),
        )

    @property
    def max_streams(self) -> int:
        """How many communicators may run at the same time."""
        return 1 if self.why_one_stream else MAX_STREAMS

    @property
    def why_one_stream(self) -> str:
        """What forbids several, in words; empty if nothing does."""
        if self.nccl[:2] < ORDERED_NCCL:
            return f"NCCL {_dotted(self.nccl)} cannot order several communicators; {_dotted(ORDERED_NCCL)} can"
        if self.launch_order != "1":
            return f"{LAUNCH_ORDER} is {self.launch_order or 'not set'}, and it must be 1 before NCCL starts"
        for name, version in (("runtime", self.cuda_runtime), ("driver", self.cuda_driver)):
            if version < OVERLAPPING_CUDA:
                return f"CUDA's {name} is {_dotted(version)}; communicators overlap from {_dotted(OVERLAPPING_CUDA)} on"
        return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def ask_for_launch_order() -> None:
    """Has NCCL keep the host's order, unless the user has said otherwise; before the first communicator of all."""
    os.environ.setdefault(LAUNCH_ORDER, "1")


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
        """Puts an all-reduce on its stream."""
        return self._work(self._group.allreduce([tensor], TORCH_OPS[op]))

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> GroupWork | None:
        """A sum with a scale as an average, or by NCCL's pre-multiplied sum; None where neither will do."""
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
        """Puts the reduction of this rank's share on its stream."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = TORCH_OPS[op]  # type: ignore[assignment]  # the stub knows one of the two classes
        return self._work(self._group._reduce_scatter_base(share, tensor, options))

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> GroupWork:
        """Puts the gathering of all shares on its stream."""
        return self._work(self._group._allgather_base(tensor, share))

    @staticmethod
    def _work(work: Any) -> GroupWork:  # Any: torch's Work
        started: GroupWork = work
        return started

    def error(self) -> str:
        """What NCCL says has failed, empty if nothing."""
        if not hasattr(self._group, "get_error"):  # torch < 2.7
            return ""
        found = self._group.get_error()
        return "" if found.name == "SUCCESS" else str(found.name).lower().replace("_", " ")

    def close(self) -> None:
        """Ends the communicator, by what this version of torch has for it."""
        ways = ("shutdown", "abort", "_shutdown")  # of newer and older versions of torch; 2.4 has the last one only
        next(getattr(self._group, name) for name in ways if hasattr(self._group, name))()


class NcclOpener:
    """Makes communicators over the ranks of a control plane, all on one GPU of this process; see `Opener`."""

    def __init__(
        self,
        control: ControlPlane,
        device: CudaDevice,
        *,
        max_streams: int,
        timeout_s: float,
        ways: tuple[NcclWay, ...] = (),
    ) -> None:
        """Opens nothing.

        Args:
            control: the ranks.
            device: of this process.
            max_streams: that may run at the same time.
            timeout_s: after this long an operation that does not get on fails.
            ways: that NCCL may be told to reduce in.
        """
        self._control, self._device = control, device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.max_streams = max_streams
        self.threads = ALLOWANCES
        self.ways = ways

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
        group: Any = None  # Any: the stub lacks its methods
        refusal = ""
        try:
            # Torch leaves errors to us, and NCCL reads the rest when a communicator is made, which is by its first use.
            with torch.cuda.device(self._device.torch_device), environment({ERROR_HANDLING: NO_HANDLING} | told(key)):
                prefix = PrefixStore(f"{control.next_prefix()}/{name}", store)
                group = dist.ProcessGroupNCCL(prefix, rank, size, options)
                first = torch.zeros(1, device=self._device.torch_device)
                group.allreduce([first]).wait()  # makes the connections
                self._device.synchronise()
        except RuntimeError as err:
            if key.way is None:
                raise CommError(f"rank {control.rank} could not open NCCL {key}: {err}") from err
            refusal = str(err)
        if key.way is not None:
            try:
                control.agree_on_success(refusal)  # NCCL looks at the topology of all ranks, and decides alike on each
            except TransportError as err:
                if group is not None:
                    with contextlib.suppress(RuntimeError):
                        NcclGroup(group).close()
                raise PlanError(f"NCCL cannot open {key} here: {err}") from err
        return NcclGroup(group)

    def memory_bytes(self) -> tuple[int, int]:
        """See `Opener`."""
        free, total = torch.cuda.mem_get_info(self._device.torch_device)
        return free, total


ALGORITHM, PROTOCOL = "NCCL_ALGO", "NCCL_PROTO"
THE_USERS = (ALGORITHM, PROTOCOL, "NCCL_TUNER_PLUGIN")
"""Where one of these is set the user has decided how NCCL reduces, or has left it to a plugin of NCCL's."""


def told(key: CommunicatorKey) -> dict[str, str]:
    """What the environment tells NCCL of a communicator's way: torch has no field for it in its options."""
    return {} if key.way is None else {ALGORITHM: key.way.algorithm, PROTOCOL: key.way.protocol}


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for the process groups that are built inside; the user's own ones keep what they had."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def ways_left(control: ControlPlane, environ: Mapping[str, str] = os.environ) -> tuple[NcclWay, ...]:
    """Collective: the ways that NCCL may be told to reduce in; none where a rank's user has decided that already."""
    decided: list[str] = control.all_gather(next((name for name in THE_USERS if environ.get(name)), ""))
    theirs = next(filter(None, decided), "")
    if theirs and control.rank == 0:
        logger.info("NCCL's algorithm and protocol are not tuned: %s is set", theirs)
    return () if theirs else tuple(NcclWay)


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
    ways = ways_left(control)
    return NcclOpener(control, device, max_streams=max_streams, timeout_s=timeout_s, ways=ways)


def _say_why_not(reason: str) -> None:
    logger.warning("gradients travel from GPU to GPU through host memory: %s", reason)


def _identity(device: CudaDevice, host: int) -> str:
    """Of the GPU on that host, equal on two ranks exactly if they share it."""
    found: Any = torch.cuda.get_device_properties(device.torch_device)  # Any: fields depend on torch's version
    for name in ("uuid", "pci_bus_id"):
        if hasattr(found, name):
            return f"{host} {getattr(found, name)}"
    return f"{host} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.torch_device}"
