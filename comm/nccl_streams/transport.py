"""Transport over NCCL, with several communicators at the same time if the NCCL version permits it.

Each communicator is a `ProcessGroupNCCL` of PyTorch. It is created directly, without
`torch.distributed.init_process_group`, so the user's default process group is not affected.

Operations of several communicators on one GPU can deadlock, unless all ranks run them in the same order. From NCCL 2.26
on, the environment variable `NCCL_LAUNCH_ORDER_IMPLICIT=1` makes NCCL run operations in the order in which the host
launches them. With CUDA 12.3 or newer (driver and runtime), operations of different communicators still overlap. If
NCCL or CUDA is older, or the variable is not 1, only one stream is used.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    _make_nccl_premul_sum,
)

from sirtaki.comm import recorder
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import CudaDevice, Device, Event, add_nccl_owner, driver_version
from sirtaki.comm.plan import NcclWay, TransportKind
from sirtaki.comm.transports.contract import (
    FlatBuffer,
    Parcels,
    ReduceOp,
    StreamCost,
    StreamSpec,
    Transport,
    Work,
    scale_,
)
from sirtaki.comm.transports.gloo import TORCH_OPS
from sirtaki.errors import CommError, PlanError, TransportError
from sirtaki.machine import free_in_forked_children, keep_in_forked_children

# ── the transport ─────────────────────────────────────────────────────────────────────────────────────────────────────
#
# The number of CTAs (thread blocks), the algorithm and the protocol of a communicator cannot change after NCCL has
# created it. A stream number therefore has one communicator for each combination of the three that plans use. Units
# (buckets) with the same stream number still run one after another, on one CUDA stream, whichever communicator reduces
# them (LIBRA's stages are sequential). Communicators take GPU memory, so `CommunicatorPool` closes unused ones. It
# opens and closes communicators in the same order on all ranks.
#
# Launching a unit and waiting for it do not block the host. `_start` launches the unit on the CUDA stream of its stream
# number, after the copies of gradients into the flat buffer. `NcclWork.wait` makes the caller's current CUDA stream
# wait. Only opening communicators blocks the host.
#
# NCCL requires that all ranks launch the operations of all communicators of a GPU in the same order, and from one
# thread at a time. The gradient pipeline keeps this order, and `LAUNCH_LOCK` admits one thread.

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.1
"""Largest fraction of GPU memory that NCCL communicators may use. `CommunicatorPool` refuses communication plans that
need more."""

FREE_SHARE = 0.5
"""Largest fraction of the GPU's free memory that one more NCCL communicator may use. The limit keeps the job from
running out of memory."""


THREADS_PER_CTA = 512
"""Number of GPU threads of one CTA (thread block) of NCCL on current GPUs, the default of `NCCL_NTHREADS`."""

MAX_CTAS = 32

SHARE_ALIGNMENT_BYTES = 16
"""Alignment in bytes of each rank's part of a unit (bucket) in the hierarchical algorithm. NCCL's kernels load and
store 16 bytes at once only at aligned addresses."""

ALLOWANCES = tuple(THREADS_PER_CTA * ctas for ctas in (1, 2, 4, 8, 16))
"""Possible numbers of GPU threads that reduce one unit (bucket): those of 1, 2, 4, 8 or 16 CTAs (thread blocks)."""


def ctas_for(threads: int | None) -> int | None:
    """Return the number of CTAs (thread blocks) that have `threads` GPU threads in all. None = NCCL decides.

    In the LIBRA paper, `threads` is called r.
    """
    if threads is None:
        return None
    return min(MAX_CTAS, max(1, threads // THREADS_PER_CTA))


class Scope(Enum):
    """Set of ranks that a communicator connects."""

    ALL = "all"
    NODE = "node"  # Connects all ranks of this rank's node.
    ACROSS = "across"  # Connects the ranks with the same local rank as this rank, one per node.


@dataclass(frozen=True, slots=True)
class CommunicatorKey:
    """Key of an NCCL communicator in `CommunicatorPool`.

    Attributes:
        stream: number of the CUDA stream on which the communicator's operations run.
        ctas: number of CTAs (thread blocks, NCCL's channels) per operation. None = NCCL decides.
        scope: set of ranks that the communicator connects.
        way: NCCL algorithm and protocol of the communicator's all-reduces. None = NCCL decides.
    """

    stream: int
    ctas: int | None = None
    scope: Scope = Scope.ALL
    way: NcclWay | None = None

    def __str__(self) -> str:
        ctas = "" if self.ctas is None else f" with {self.ctas} CTAs"
        way = "" if self.way is None else f" by {self.way.value}"
        scope = "" if self.scope is Scope.ALL else f" ({self.scope.value})"
        return f"stream {self.stream}{ctas}{way}{scope}"


class Group(Protocol):
    """One NCCL communicator. Its operations are collective, and are launched on the current CUDA stream."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Launch an all-reduce of `tensor`, in place."""

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> bool:
        """Launch one NCCL call that sums `tensor` over ranks, in place, and multiplies the sum by `scale`.

        Return False, without a launch, if NCCL has no such call for this dtype and scale.
        """

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Launch a reduce-scatter of `tensor`, `(ranks * share.numel(),)`. `share` receives this rank's part."""

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> None:
        """Launch an all-gather: write `share` of each rank, by rank, to `tensor`, `(ranks * share.numel(),)`."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Launch a broadcast of the `tensor` of rank `root`, in place."""

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, source: list[int], to: list[int]) -> None:
        """Launch an all-to-all of 1-d tensors: `to` are elements for each rank, `source` elements from each rank."""

    def rank(self) -> int:
        """Return the rank of this process in the communicator."""

    def error(self) -> str:
        """Return the asynchronous error of the NCCL communicator, "" if there is none. Thread-safe."""

    def memory_bytes(self) -> int:
        """Return the GPU memory of the communicator in bytes, as NCCL reports it. 0 = unknown."""

    def close(self) -> None:
        """Free the communicator. Collective. No operation may be in flight."""

    def abort(self) -> None:
        """End pending operations, and free the communicator. Not collective. Thread-safe."""


class Opener(Protocol):
    """Factory of NCCL communicators.

    Attributes:
        max_streams: number of CUDA streams whose operations may run at the same time.
        threads: possible numbers of GPU threads for one unit (bucket).
        ways: combinations of NCCL algorithm and protocol that a communicator may have.
    """

    max_streams: int
    threads: tuple[int, ...]
    ways: tuple[NcclWay, ...]

    def open(self, key: CommunicatorKey) -> Group:
        """Open the NCCL communicator that `key` describes. Collective over all ranks of the job.

        With `Scope.NODE` or `Scope.ACROSS`, several communicators are opened, and each rank joins one of them.

        Raises:
            PlanError: on all ranks, if NCCL rejects `key.way`.
            CommError: the ranks cannot connect.
        """

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total memory of the GPU, in bytes."""


class CommunicatorPool:
    """A set of open NCCL communicators, of limited number and GPU memory.

    To open a new one above the limits, the pool first closes the least recently used ones.

    Attributes:
        limit: largest number of open communicators.
        number: id of the gradient pipeline that uses the pool, different for each pipeline and equal on its ranks.
        launched: number of units (buckets) launched.
        open: open communicators by key, least recently used first.
        cuda_streams: CUDA streams by stream number. The flat and the hierarchical all-reduce share them.
    """

    def __init__(self, opener: Opener, *, limit: int, worst: Callable[[float], float], number: int = 0) -> None:
        """Create an empty pool. `require` opens communicators.

        Args:
            opener: opens communicators.
            limit: largest number of open communicators.
            worst: returns the largest of the values that all ranks pass. Collective.
            number: id of the gradient pipeline that uses the pool.
        """
        self.opener, self.limit, self._worst = opener, limit, worst
        self.number, self.launched = number, 0
        self.open: OrderedDict[CommunicatorKey, Group] = OrderedDict()
        self.cuda_streams: dict[int, Any] = {}
        # Fraction of GPU memory that the open communicators use: for each, the largest fraction on any rank, summed.
        self._taken_share = 0.0
        self._aborting = free_in_forked_children(threading.Lock())
        add_nccl_owner(self)

    def require(self, keys: Sequence[CommunicatorKey]) -> None:
        """Open those communicators of `keys` that are not open, in the order of `keys`. Collective.

        If the pool would exceed its limits, it first closes the least recently used communicators. No operation may be
        in flight.

        Raises:
            PlanError: on all ranks, if `keys` are more communicators than the pool may hold, if these need too much GPU
                memory, or if NCCL rejects a combination of algorithm and protocol.
            CommError: the ranks cannot connect.
        """
        wanted = list(dict.fromkeys(keys))
        if len(wanted) > self.limit:
            raise PlanError(
                f"a setting (number of streams and NCCL options) needs {len(wanted)} NCCL communicators; at most "
                f"{self.limit} may be open. The tuner skips this setting; if you chose it, set a smaller "
                "SIRTAKI_STREAMS"
            )
        for key in wanted:
            if key in self.open:
                self.open.move_to_end(key)
        for key in wanted:
            if key not in self.open:
                self._make_room(wanted, key)
                self.open[key] = self._open(key)

    def _open(self, key: CommunicatorKey) -> Group:
        free_before, total = self.opener.memory_bytes()
        group = self.opener.open(key)
        taken = max(free_before - self.opener.memory_bytes()[0], group.memory_bytes()) / total
        self._taken_share += max(0.0, self._worst(taken))
        logger.debug(
            "opened the NCCL communicator of %s; %d communicators are open and use %.1f %% of the GPU's memory",
            key,
            len(self.open) + 1,
            100 * self._taken_share,
        )
        return group

    def _make_room(self, wanted: Sequence[CommunicatorKey], key: CommunicatorKey) -> None:
        while len(self.open) >= self.limit or (self.open and self._lacks_memory()):
            unused = next((each for each in self.open if each not in wanted), None)
            if unused is None:
                raise PlanError(
                    f"Sirtaki cannot open the NCCL communicator of {key}: all NCCL communicators would use "
                    f"{self._expected_share():.0%} of the GPU's memory; {self._free_share():.0%} are free, and at most "
                    f"{MEMORY_SHARE:.0%} are permitted. Use fewer streams (SIRTAKI_STREAMS)"
                )
            self._close(unused)

    def _lacks_memory(self) -> bool:
        """Return whether GPU memory is too short for one more communicator of average size. Collective."""
        mean_share = self._taken_share / len(self.open)
        return self._expected_share() > MEMORY_SHARE or mean_share > FREE_SHARE * self._free_share()

    def _expected_share(self) -> float:
        """Return the fraction of GPU memory that the open communicators and one more of average size use together."""
        return self._taken_share * (len(self.open) + 1) / len(self.open)

    def _free_share(self) -> float:
        """Return the free fraction of GPU memory on the rank with the least free memory. Collective."""
        free, total = self.opener.memory_bytes()
        return 1.0 - self._worst(1.0 - free / total)

    def _close(self, key: CommunicatorKey) -> None:
        self._taken_share -= self._taken_share / len(self.open)
        self.open.pop(key).close()
        logger.debug("closed the NCCL communicator of %s; %d communicators stay open", key, len(self.open))

    def keep_only(self, keys: Iterable[CommunicatorKey]) -> None:
        """Close all NCCL communicators except those of `keys`. Collective. No operation may be in flight."""
        kept = set(keys)
        for key in [key for key in self.open if key not in kept]:
            self._close(key)

    @property
    def is_open(self) -> bool:
        """Return whether a communicator is open. Thread-safe."""
        return bool(self.open)

    def check(self) -> None:
        """Raise an error if an open communicator has an asynchronous NCCL error. Thread-safe.

        Raises:
            CommError: a communicator has failed. The message names the communicator.
        """
        for key, group in list(self.open.items()):
            if error := group.error():
                raise CommError(
                    f"the NCCL communicator of {key} failed: {error}; set NCCL_DEBUG=INFO and run again for details"
                )

    def close(self) -> None:
        """Close all NCCL communicators of the pool. Collective. No operation may be in flight."""
        self.keep_only(())

    def abort(self) -> int:
        """End pending operations of all NCCL communicators, and free them. Not collective. Thread-safe.

        Buffers of ended operations have undefined values.

        Returns:
            The number of aborted communicators.
        """
        with self._aborting:
            groups = list(self.open.values())
            self.open.clear()
            # Abort all at the same time, because aborting one may wait until an operation of another one has ended.
            with ThreadPoolExecutor(max(1, len(groups)), thread_name_prefix="sirtaki-abort") as threads:
                deque(threads.map(_abort, groups), maxlen=0)
            return len(groups)


def _abort(group: Group) -> None:
    # Ignore an error of the abort, because the communicator is aborted only after a failure.
    with contextlib.suppress(RuntimeError):
        group.abort()


LAUNCH_LOCK = free_in_forked_children(threading.Lock())
"""Lock that a thread holds while it launches NCCL operations, because NCCL permits one launching thread at a time."""


class NcclWork(Work):
    """The all-reduce of a unit (bucket) on a CUDA stream. `wait` blocks the current CUDA stream, and not the thread."""

    def __init__(self, device: Device, begin: Event | None, end: Event) -> None:
        """Create the work from the CUDA events that were recorded before and after the all-reduce.

        Args:
            device: GPU that runs the all-reduce.
            begin: event before the all-reduce. None = the all-reduce is not timed.
            end: event after the all-reduce. It must have a time if `begin` is not None.
        """
        self._device, self._begin, self._end = device, begin, end

    def is_done(self) -> bool:
        """Return whether the GPU has finished the all-reduce of the unit (bucket)."""
        return self._device.is_reached(self._end)

    def times(self) -> tuple[Event | None, Event | None]:
        """Return the timed CUDA events recorded before and after the all-reduce. Both are None if it is not timed."""
        return self._begin, None if self._begin is None else self._end

    def wait(self, timeout_s: float) -> bool:
        """Make the current CUDA stream wait for the end of the all-reduce. Return True without blocking the thread."""
        self._device.order_after(self._end)
        return True


class NcclTransport(Transport):
    """Transport over NCCL that reduces each unit (bucket) by one all-reduce over all ranks (the flat algorithm)."""

    kind = TransportKind.NCCL
    scopes: tuple[Scope, ...] = (Scope.ALL,)

    def __init__(self, pool: CommunicatorPool, device: Device, *, opener: Opener) -> None:
        """Create the transport. `open_streams` opens communicators.

        Args:
            pool: open communicators, shared with the transport of the hierarchical algorithm. The owner of the pool
                closes it.
            device: GPU that holds the buffers.
            opener: opens communicators. Its `max_streams` and `threads` limit those of this transport.
        """
        self._pool, self._device = pool, device
        self.max_streams = min(opener.max_streams, pool.limit // len(self.scopes))
        self.threads = opener.threads
        # The transport uses no descriptors or threads per stream. Its GPU memory is limited by the pool.
        self.stream_cost = StreamCost()

    def keys(self, streams: Sequence[StreamSpec]) -> list[CommunicatorKey]:
        """Return the keys of the NCCL communicators that units (buckets) on `streams` need."""
        return list(dict.fromkeys(_key(stream, scope) for stream in streams for scope in self.scopes))

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Open the NCCL communicators that units (buckets) on `streams` need. Collective.

        No operation may be in flight.
        """
        keys = self.keys(streams)
        if not set(keys) <= self._pool.open.keys():
            # Wait for the GPU, because no operation may be in flight when the pool closes a communicator.
            self._device.synchronise()
        self._pool.require(keys)

    def run(self, act: Callable[[], None], *, stream: StreamSpec) -> Work:
        """Call `act`, which launches operations, with the CUDA stream of `stream.number` as current stream.

        Non-blocking.

        The operations run after the work that is queued on the caller's current CUDA stream. Units (buckets) with the
        same stream number run one after another, even if different communicators reduce them.
        """
        device, timed = self._device, recorder.times_wanted()
        packed = device.record_event()
        with device.on(self._cuda_stream(stream.number)):
            device.order_after(packed)
            begin = device.record_event(timed=True) if timed else None
            act()
            return NcclWork(device, begin, device.record_event(timed=timed))

    def _start(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Launch the all-reduce of elements `[start, stop)` of `buffer`, a unit (bucket)."""
        unit = buffer.tensor[start:stop]
        what = f"all-reduce of elements [{start}, {stop})"
        return self._run_nccl(lambda: self._launch(unit, stream, op, scale), stream, what)

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        """Launch an all-to-all, or an all-gather if all ranks send one parcel of the same size to all ranks."""
        lengths = parcels.lengths

        def launch() -> None:
            group = self._group(stream, Scope.ALL)
            if parcels.shared and (lengths == lengths[0, 0]).all():
                group.all_gather(incoming, outgoing.tensor)
                return
            rank = group.rank()
            sent = outgoing.tensor.repeat(len(lengths)) if parcels.shared else outgoing.tensor
            group.all_to_all(incoming, sent, parcels.received_by(rank), lengths[rank].tolist())

        return self._run_nccl(launch, stream, "exchange of compressed numbers")

    def _run_nccl(self, launch: Callable[[], None], stream: StreamSpec, what: str) -> Work:
        """Call `launch`, which launches NCCL operations, on the CUDA stream of `stream.number`."""

        def guarded() -> None:
            try:
                with LAUNCH_LOCK:
                    self._pool.launched += 1
                    launch()
            except (RuntimeError, KeyError) as err:
                # A KeyError means that another thread has aborted the communicator.
                raise CommError(
                    f"NCCL could not launch the {what} on stream {stream.number}: {err}; set NCCL_DEBUG=INFO and run "
                    "again for details"
                ) from err

        return self.run(guarded, stream=stream)

    def _cuda_stream(self, number: int) -> Any:  # Return type Any, because the class of streams depends on the device.
        streams = self._pool.cuda_streams
        if number not in streams:
            streams[number] = self._device.make_stream()
        return streams[number]

    def _group(self, stream: StreamSpec, scope: Scope) -> Group:
        return self._pool.open[_key(stream, scope)]

    def _launch(self, unit: torch.Tensor, stream: StreamSpec, op: ReduceOp, scale: float) -> None:
        """Launch the all-reduce of a unit (bucket) on the current CUDA stream."""
        self._all_reduce(self._group(stream, Scope.ALL), unit, op, scale)

    def _all_reduce(self, group: Group, unit: torch.Tensor, op: ReduceOp, scale: float) -> None:
        if op is ReduceOp.SUM and scale != 1.0 and group.all_reduce_scaled(unit, scale):
            return
        group.all_reduce(unit, op)
        self._device.launch(scale_, unit, scale)

    def close(self) -> bool:
        """Do nothing and return True, because the owner of the pool closes the communicators."""
        return True


def _key(stream: StreamSpec, scope: Scope) -> CommunicatorKey:
    """Return the key of the communicator that a stream uses between the ranks of `scope`.

    For `Scope.NODE`, the key leaves NCCL's algorithm and protocol to NCCL. The operations within a node are
    reduce-scatter and all-gather, for which NCCL has no tree algorithm.
    """
    way = None if scope is Scope.NODE else stream.nccl
    return CommunicatorKey(stream.number, ctas_for(stream.threads), scope, way)


class NcclHierarchicalTransport(NcclTransport):
    """Transport over NCCL that reduces each unit (bucket) within nodes first, then between nodes.

    The steps are a reduce-scatter within the node, an all-reduce between nodes, and an all-gather within the node. Each
    rank of a node reduces an equal part of a unit between nodes, so that all network interfaces of the node are used.
    The last elements of a unit, too few to give each rank an aligned part, are reduced over all ranks at once.
    """

    scopes = (Scope.ALL, Scope.NODE, Scope.ACROSS)

    def __init__(
        self,
        pool: CommunicatorPool,
        device: Device,
        *,
        opener: Opener,
        local_size: int,
        local_rank: int,
    ) -> None:
        """Create the transport. `open_streams` opens communicators.

        Args:
            pool: open communicators, shared with the transport of the flat algorithm. The owner of the pool closes it.
            device: GPU that holds the buffers.
            opener: opens communicators. Its `max_streams` and `threads` limit those of this transport.
            local_size: number of ranks per node, equal on all nodes.
            local_rank: number of this rank within its node.
        """
        super().__init__(pool, device, opener=opener)
        self._local_size, self._local_rank = local_size, local_rank

    def _launch(self, unit: torch.Tensor, stream: StreamSpec, op: ReduceOp, scale: float) -> None:
        # Split the unit (bucket) into `whole`, a multiple of `piece` elements, and `rest`, fewer than `piece` elements.
        # So the parts of `whole` have equal size, and start at addresses that NCCL's vectorised kernels require.
        piece = self._local_size * max(1, SHARE_ALIGNMENT_BYTES // unit.element_size())
        split = unit.numel() // piece * piece
        whole, rest = unit[:split], unit[split:]
        if rest.numel():
            self._all_reduce(self._group(stream, Scope.ALL), rest, op, scale)
        if split:
            share = whole.view(self._local_size, -1)[self._local_rank]
            node = self._group(stream, Scope.NODE)
            node.reduce_scatter(share, whole, op)
            self._all_reduce(self._group(stream, Scope.ACROSS), share, op, scale)
            node.all_gather(whole, share)


# ── NCCL through torch ────────────────────────────────────────────────────────────────────────────────────────────────

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
ORDERED_NCCL = (2, 26)
OVERLAPPING_CUDA = (12, 3)

MAX_STREAMS = 24
"""Largest number of CUDA streams for all-reduces: the largest one in the experiments of the AIACC paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclVersions:
    """Versions and settings of this process that decide whether several NCCL communicators may run at the same time.

    Attributes:
        nccl: version of NCCL, as (major, minor, patch).
        cuda_runtime: version of CUDA for which torch was built, as (major, minor).
        cuda_driver: newest version of CUDA that the GPU's driver supports, as (major, minor). (0, 0) = unknown.
        launch_order: value of the environment variable `NCCL_LAUNCH_ORDER_IMPLICIT`. Empty = not set. `TOO_LATE` = NCCL
            may have read the variable before Sirtaki set it.
    """

    nccl: tuple[int, ...]
    cuda_runtime: tuple[int, int]
    cuda_driver: tuple[int, int]
    launch_order: str

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> NcclVersions:
        """Return the versions of NCCL and CUDA, and the launch-order setting, of this process. Requires a GPU."""
        major, minor = (int(part) for part in str(torch.version.cuda).split(".")[:2])
        return cls(
            nccl=tuple(torch.cuda.nccl.version()),  # type: ignore[no-untyped-call]  # torch's
            cuda_runtime=(major, minor),
            cuda_driver=driver_version(),
            launch_order=TOO_LATE if _set_too_late else environ.get(LAUNCH_ORDER, ""),
        )

    @property
    def max_streams(self) -> int:
        """Number of NCCL communicators whose operations may run at the same time."""
        return 1 if self.why_one_stream else MAX_STREAMS

    @property
    def why_one_stream(self) -> str:
        """Reason why only one CUDA stream can be used for all-reduces, for the log. Empty = several can be used."""
        if self.nccl[:2] < ORDERED_NCCL:
            return f"NCCL {_dotted(self.nccl)} cannot order several communicators; {_dotted(ORDERED_NCCL)} can"
        if self.launch_order == TOO_LATE:
            return (
                f"CUDA and process groups were in use before sirtaki.torch was imported, so NCCL may have started "
                f"without {LAUNCH_ORDER}=1: import sirtaki.torch first, or set the variable"
            )
        if self.launch_order != "1":
            return f"{LAUNCH_ORDER} is {self.launch_order or 'not set'}, and it must be 1 before NCCL starts"
        for name, version in (("runtime", self.cuda_runtime), ("driver", self.cuda_driver)):
            if version == (0, 0):
                return f"the version of CUDA's {name} is not known"
            if version < OVERLAPPING_CUDA:
                return f"CUDA's {name} is {_dotted(version)}; communicators overlap from {_dotted(OVERLAPPING_CUDA)} on"
        return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


TOO_LATE = "set too late"
"""Value of `NcclVersions.launch_order` if NCCL may have read `NCCL_LAUNCH_ORDER_IMPLICIT` before Sirtaki set it."""

_set_too_late = False


def ask_for_launch_order() -> None:
    """Set `NCCL_LAUNCH_ORDER_IMPLICIT=1`, unless the user has set it. Called when `sirtaki.torch` is imported.

    NCCL reads this environment variable once, at its first launch. If CUDA and process groups are already in use, NCCL
    may have read it before this call. `NcclVersions.here` then reports `TOO_LATE`.
    """
    global _set_too_late
    if LAUNCH_ORDER not in os.environ:
        _set_too_late = torch.cuda.is_initialized() and dist.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        os.environ[LAUNCH_ORDER] = "1"


ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NO_HANDLING = "0"
"""Value of `TORCH_NCCL_ASYNC_ERROR_HANDLING` with which PyTorch only reports the failure of an NCCL communicator. By
default, PyTorch would end the process before Sirtaki can name the failed ranks. With the value 2, PyTorch would abort
the communicator, and CUDA streams that wait for it would continue with wrong gradients."""

PREMULTIPLIED = (torch.float16, torch.float32, torch.float64)
"""dtypes for which each supported version of torch offers NCCL's pre-multiplied sum (scale and sum in one call)."""


class NcclGroup:
    """One NCCL communicator, implemented by a `ProcessGroupNCCL` of PyTorch.

    From torch 2.8 on, a collective with `asyncOp = False` runs on the current CUDA stream and returns None. Older
    versions run each collective on a CUDA stream of the group, after the kernels queued on the current stream, and
    return a `Work`. `Work.wait` makes the current stream wait for the collective. In both cases, later kernels on the
    current stream see the result.
    """

    # The group is Any, because a torch without CUDA has no class `ProcessGroupNCCL`.
    def __init__(self, group: Any) -> None:
        """Wrap a `ProcessGroupNCCL`. `close` and `abort` shut it down."""
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Launch an all-reduce of `tensor`, in place, on the current CUDA stream."""
        self._reduce(tensor, TORCH_OPS[op])

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> bool:
        """Launch a sum of `tensor` over ranks, times `scale`, in place, on the current CUDA stream.

        NCCL computes it as an average or as a pre-multiplied sum. Return False, without a launch, if NCCL can
        compute neither for this dtype and scale.
        """
        if not tensor.is_floating_point():
            return False
        if math.isclose(scale * self._group.size(), 1.0):
            self._reduce(tensor, dist.ReduceOp.AVG)
            return True
        if tensor.dtype not in PREMULTIPLIED:
            return False
        self._reduce(tensor, _make_nccl_premul_sum(scale))
        return True

    # `op` is Any, because torch accepts both a RedOpType and a ReduceOp.
    def _reduce(self, tensor: torch.Tensor, op: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._order(self._group.allreduce([tensor], _on_current_stream(options)))

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Launch a reduce-scatter of `tensor` into `share` on the current CUDA stream."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = TORCH_OPS[op]  # type: ignore[assignment]  # torch's stub rejects RedOpType
        self._order(self._group._reduce_scatter_base(share, tensor, _on_current_stream(options)))

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> None:
        """Launch an all-gather of `share` into `tensor` on the current CUDA stream."""
        self._order(self._group._allgather_base(tensor, share, _on_current_stream(AllgatherOptions())))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Launch a broadcast of the `tensor` of rank `root` on the current CUDA stream."""
        options = BroadcastOptions()
        options.rootRank = root
        self._order(self._group.broadcast([tensor], _on_current_stream(options)))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, source: list[int], to: list[int]) -> None:
        """Launch an all-to-all of parts of `sent` and `received` on the current CUDA stream."""
        self._order(self._group.alltoall_base(received, sent, source, to, _on_current_stream(AllToAllOptions())))

    def rank(self) -> int:
        """Return the rank of this process in the communicator."""
        return int(self._group.rank())

    @staticmethod
    # `work` is Any, because it is a `Work` of torch before 2.8, and None from torch 2.8 on.
    def _order(work: Any) -> None:
        if work is not None:
            work.wait()

    def error(self) -> str:
        """Return the asynchronous error of the NCCL communicator, "" if there is none. Thread-safe."""
        if not hasattr(self._group, "get_error"):
            # Before PyTorch 2.7, a process group cannot report its error.
            return ""
        found = self._group.get_error()
        return "" if found.name == "SUCCESS" else str(found.name).lower().replace("_", " ")

    def memory_bytes(self) -> int:
        """Return the GPU memory of the communicator in bytes. 0 before PyTorch 2.12 and NCCL 2.29.7."""
        try:
            return int(self._group.memory_stats()["total"])
        except (AttributeError, RuntimeError):
            return 0

    def close(self) -> None:
        """Free the NCCL communicator. Collective. No operation may be in flight."""
        # In PyTorch 2.4, the method for closing a process group is called `_shutdown`.
        self._end("shutdown", "abort", "_shutdown")

    def abort(self) -> None:
        """Make pending operations fail, and free the NCCL communicator. Not collective. Thread-safe."""
        self._end("abort", "shutdown", "_shutdown")

    def _end(self, *methods: str) -> None:
        next(getattr(self._group, name) for name in methods if hasattr(self._group, name))()


def _on_current_stream(options: Any) -> Any:  # `options` is Any, because their class depends on the collective.
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


FIRST = CommunicatorKey(0)

START_POLL_S, ABORT_S = 0.02, 10.0


class _Opening:
    """One attempt to open an NCCL communicator.

    Attributes:
        prefix: prefix of this attempt's keys in the store.
        store: key-value store through which the ranks of the communicator exchange the id of the NCCL communicator.
        group: the communicator. None until PyTorch has created the process group.
        problem: reason why the attempt has failed. Empty = it has not failed.
    """

    def __init__(
        self, control: ControlPlane, device: CudaDevice, key: CommunicatorKey, *, timeout: datetime.timedelta
    ) -> None:
        """Choose the prefix of this attempt's keys in the store, without opening the communicator.

        Collective over the ranks of `key.scope`.
        """
        self._key, self._device, self._timeout = key, device, timeout
        self._rank, self._size, name = {
            Scope.ALL: (control.rank, control.size, "all"),
            Scope.NODE: (control.local_rank, control.local_size, f"node{control.node_ranks[0]}"),
            Scope.ACROSS: (control.cross_rank, control.cross_size, f"across{control.local_rank}"),
        }[key.scope]
        self.store = control.store()
        self.prefix = f"{control.next_prefix()}/{name}"
        self.group: NcclGroup | None = None
        self.problem = ""

    def run(self) -> None:
        """Open the NCCL communicator, and run its first operation, which connects the ranks.

        Raises:
            RuntimeError: NCCL failed.
        """
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout
        if self._key.ctas is not None:
            options.config.min_ctas = options.config.max_ctas = self._key.ctas
        # Set environment variables during the creation of the process group, in which PyTorch reads ERROR_HANDLING, and
        # during the first operation, in which NCCL creates the communicator and reads its variables.
        with (
            torch.cuda.device(self._device.torch_device),
            environment({ERROR_HANDLING: NO_HANDLING} | nccl_variables(self._key)),
        ):
            prefix = PrefixStore(self.prefix, self.store)
            made = dist.ProcessGroupNCCL(prefix, self._rank, self._size, options)
            self.group = NcclGroup(keep_in_forked_children(made))
            first = torch.zeros(1, dtype=torch.float32, device=self._device.torch_device)
            self.group.all_reduce(first, ReduceOp.SUM)
            self._device.synchronise()

    def attempt(self) -> None:
        """Open the communicator by `run`, and store the error message in `problem` if it raises.

        Called in a helper thread.
        """
        try:
            self._device.enter_thread()
            self.run()
        except Exception as err:  # Catch every error of the helper thread, so that the training thread can report it.
            self.problem = self.problem or str(err)

    def abort(self) -> None:
        """Make the attempt fail if it is pending, or free the communicator that the attempt has opened."""
        if self.group is not None:
            _abort(self.group)


class NcclOpener:
    """Opens NCCL communicators between the ranks of a control plane. Each rank uses one GPU."""

    def __init__(
        self,
        control: ControlPlane,
        device: CudaDevice,
        *,
        max_streams: int,
        timeout_s: float,
        ways: tuple[NcclWay, ...] = (),
    ) -> None:
        """Create the opener. `open` and `open_first` open communicators.

        Args:
            control: control plane of the ranks (small messages between them).
            device: GPU of this process.
            max_streams: number of CUDA streams whose operations may run at the same time.
            timeout_s: seconds after which an NCCL operation without progress fails.
            ways: combinations of NCCL algorithm and protocol that a communicator may have.
        """
        self._control, self._device = control, device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.max_streams = max_streams
        self.threads = ALLOWANCES
        self.ways = ways
        self._first: NcclGroup | None = None

    def open(self, key: CommunicatorKey) -> Group:
        """Open the NCCL communicator that `key` describes, and run its first operation. Collective.

        If `open_first` has opened this communicator before, return it.
        """
        if key == FIRST and self._first is not None:
            first, self._first = self._first, None
            return first
        opening = _Opening(self._control, self._device, key, timeout=self._timeout)
        try:
            opening.run()
        except RuntimeError as err:
            if key.way is None:
                raise CommError(
                    f"rank {self._control.rank} could not open the NCCL communicator of {key}: {err}; set "
                    "NCCL_DEBUG=INFO and run again for details"
                ) from err
            opening.problem = str(err)
        if key.way is not None:
            try:
                # Let all ranks agree on the result. No rank hangs before this line, because NCCL accepts or rejects an
                # algorithm and protocol by the topology, equally on each rank.
                self._control.agree_on_success(opening.problem)
            except TransportError as err:
                opening.abort()
                raise PlanError(
                    f'NCCL cannot open a communicator with the algorithm and protocol of "{key}", so Sirtaki rejects '
                    f"the setting that needs this communicator; error: {err}"
                ) from err
        assert opening.group is not None
        return opening.group

    def open_first(self) -> str:
        """Open the NCCL communicator of stream 0 as a test of NCCL. `open` returns it later. Collective.

        A rank whose attempt fails writes the reason to the key-value store. Its peers poll the store and abort their
        attempts, because NCCL would wait for the failed rank. With PyTorch 2.4, which cannot clone a store, the peers
        abort their attempts only after the timeout.

        Returns:
            Reason why NCCL cannot be used between these ranks, equal on all ranks. Empty = NCCL can be used.

        Raises:
            CommError: an attempt could not be aborted.
        """
        control, opening = self._control, _Opening(self._control, self._device, FIRST, timeout=self._timeout)
        failed, within_s = f"{opening.prefix}/failed", self._timeout.total_seconds()
        # Poll the store over a second connection, because the attempt may block the first one. With PyTorch 2.4, which
        # cannot clone a store, do not poll.
        watched = opening.store.clone() if hasattr(opening.store, "clone") else None
        thread = threading.Thread(target=opening.attempt, name="sirtaki-nccl-start", daemon=True)
        thread.start()
        deadline_s = time.monotonic() + within_s
        while thread.is_alive():
            thread.join(START_POLL_S)
            if time.monotonic() > deadline_s:
                opening.problem = f"NCCL has not answered within {within_s:.0f} s"
            elif watched is not None and watched.check([failed]):
                opening.problem = "another rank failed"
            if opening.problem:
                opening.abort()
                thread.join(ABORT_S)
                if thread.is_alive():
                    raise CommError(
                        f"rank {control.rank} could neither start NCCL ({opening.problem}) nor abort the attempt; kill "
                        "this process if it hangs, and run with NCCL_DEBUG=INFO for details, or with "
                        "SIRTAKI_TRANSPORT=staged to avoid NCCL"
                    )
        if opening.problem:
            (watched or opening.store).set(failed, opening.problem)
        try:
            control.agree_on_success(opening.problem)
        except TransportError as err:
            opening.abort()
            return str(err)
        self._first = opening.group
        return ""

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total memory of the GPU, in bytes."""
        free, total = torch.cuda.mem_get_info(self._device.torch_device)
        return free, total


ALGORITHM, PROTOCOL = "NCCL_ALGO", "NCCL_PROTO"
USER_VARIABLES = (ALGORITHM, PROTOCOL, "NCCL_TUNER_PLUGIN")
"""Environment variables by which the user, or a tuner plugin of NCCL, chooses NCCL's algorithm and protocol. If one of
them is set, Sirtaki does not tune the two."""


def nccl_variables(key: CommunicatorKey) -> dict[str, str]:
    """Return the environment variables that make NCCL use the algorithm and protocol of `key`.

    `ProcessGroupNCCL` has no options for them.
    """
    return {} if key.way is None else {ALGORITHM: key.way.algorithm, PROTOCOL: key.way.protocol}


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the body of the `with` statement, then restore their earlier values."""
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


def tunable_ways(control: ControlPlane, environ: Mapping[str, str] = os.environ) -> tuple[NcclWay, ...]:
    """Return the combinations of NCCL algorithm and protocol to tune. Collective.

    Return none if one of `USER_VARIABLES` is set on any rank, because the user has then chosen algorithm and protocol.
    """
    decided: list[str] = control.all_gather(next((name for name in USER_VARIABLES if environ.get(name)), ""))
    chosen = next(filter(None, decided), "")
    if chosen and control.rank == 0:
        logger.info(
            "Sirtaki does not tune NCCL's algorithm and protocol, because the environment variable %s is set", chosen
        )
    return () if chosen else tuple(NcclWay)


GRADIENTS = "gradients"
"""Name of the operations of gradient pipelines, for the log."""


def find_nccl(
    control: ControlPlane, device: CudaDevice, *, forced: bool, timeout_s: float, user: str = GRADIENTS
) -> Opener | None:
    """Return an object that opens NCCL communicators between the GPUs of these ranks. Collective.

    If NCCL cannot be used, log the reason and return None.

    Args:
        control: control plane of the ranks (small messages between them).
        device: GPU of this rank.
        forced: True if the user has asked for NCCL. NCCL is then tried even if ranks share a GPU.
        timeout_s: seconds after which an NCCL operation without progress fails.
        user: name of the operations that will use NCCL, for the log. If it is not `GRADIENTS`, return None where two
            communicators cannot run at the same time, because gradients already use one.
    """
    own = _identity(device, control.hosts[control.rank]) if dist.is_nccl_available() else ""
    gpus: list[str] = control.all_gather(own)
    if "" in gpus:
        _log_reason(control, user, f"PyTorch has no NCCL on rank {gpus.index('')}")
        return None
    if len(set(gpus)) < len(gpus) and not forced:
        shared = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        ranks = [str(rank) for rank, gpu in enumerate(gpus) if gpu == shared]
        _log_reason(control, user, f"ranks {' and '.join(ranks)} share one GPU, which NCCL refuses")
        return None
    versions = NcclVersions.here()
    reasons = [reason for reason in control.all_gather(versions.why_one_stream) if reason]
    max_streams = 1 if reasons else versions.max_streams
    if user != GRADIENTS and reasons:
        _log_reason(control, user, reasons[0])
        return None
    ways = tunable_ways(control) if user == GRADIENTS else ()
    opener = NcclOpener(control, device, max_streams=max_streams, timeout_s=timeout_s, ways=ways)
    if problem := opener.open_first():  # Typical problems of NCCL are a MIG slice, an old driver or a small /dev/shm.
        _log_reason(control, user, f"NCCL could not be started ({problem})")
        return None
    if reasons:
        logger.info("Sirtaki runs NCCL all-reduces one at a time, on one communicator, because %s", reasons[0])
    return opener


def _log_reason(control: ControlPlane, user: str, reason: str) -> None:
    if control.rank == 0:
        logger.warning("Sirtaki sends %s through host memory instead of over NCCL, because %s", user, reason)


def _identity(device: CudaDevice, host: int) -> str:
    """Return an id of the GPU. Two ranks share a GPU if and only if their ids are equal."""
    # Typed as Any, because the fields of the GPU's properties depend on the version of PyTorch.
    found: Any = torch.cuda.get_device_properties(device.torch_device)
    for name in ("uuid", "pci_bus_id"):
        if hasattr(found, name):
            return f"{host} {getattr(found, name)}"
    return f"{host} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.torch_device}"
