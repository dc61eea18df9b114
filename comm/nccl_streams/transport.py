"""NCCL: units over several communicators at once, and what this machine's NCCL can do.

Each communicator is a `ProcessGroupNCCL` object of torch's, with a CUDA stream of its own. These objects are built
directly, so the user's own default process group is left alone.

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
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _make_nccl_premul_sum

from sirtaki.comm import recorder
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import CudaDevice, Device, Event
from sirtaki.comm.plan import NcclWay, TransportKind
from sirtaki.comm.transports.contract import (
    FlatBuffer,
    ReduceOp,
    StreamCost,
    StreamSpec,
    Transport,
    Work,
    scale_,
)
from sirtaki.comm.transports.gloo import TORCH_OPS
from sirtaki.errors import CommError, PlanError, TransportError

# ── units over several NCCL communicators at once, each on a CUDA stream of its own ───────────────────────────────────
#
# A stream has a communicator for each number of CTAs, and each algorithm and protocol, that plans ask for, since NCCL
# fixes these when a communicator is made. They are one stream all the same: a unit waits for the one before it on its
# stream, whichever communicator carried that (LIBRA's stages follow one another). A pool opens and closes communicators
# in one order on all ranks, as they take memory on the GPU.
#
# Nothing here waits: a unit is put on its communicator's stream after what was packed so far, and whoever waits for it
# makes *its stream* wait. NCCL needs the same order of operations on all ranks, over all communicators of a GPU, and
# one thread at a time that puts them there; the synchroniser keeps the order, a lock the rest. All of it runs in tests
# without a GPU.

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.1
"""Of the GPU's memory, what communicators may take together; a plan that needs more is refused."""


THREADS_PER_CTA = 512
"""NCCL's block size on current GPUs (`NCCL_NTHREADS`, which is one for the whole process)."""

MAX_CTAS = 32

ALLOWANCES = tuple(THREADS_PER_CTA * ctas for ctas in (1, 2, 4, 8, 16))
"""GPU threads that a unit may be allowed: each another number of CTAs, since fewer than a block's are a block, too."""


def ctas_for(threads: int | None) -> int | None:
    """CTAs (thread blocks) of a communicator that may use so many GPU threads (LIBRA's r); None = NCCL decides."""
    if threads is None:
        return None
    return min(MAX_CTAS, max(1, threads // THREADS_PER_CTA))


class Scope(Enum):
    """Which ranks a communicator joins."""

    ALL = "all"
    NODE = "node"  # those of this rank's node
    ACROSS = "across"  # those with this rank's local rank, one a node


@dataclass(frozen=True, slots=True)
class CommunicatorKey:
    """What makes two communicators differ.

    Attributes:
        stream: on which its operations run.
        ctas: thread blocks of each of its operations, which NCCL calls channels, too; None = NCCL decides.
        scope: the ranks.
        way: algorithm and protocol of its all-reduces; None = NCCL decides.
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


class GroupWork(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """The current stream waits for it, not the caller."""

    def is_completed(self) -> bool:
        """Whether it is done; never waits."""


class Group(Protocol):
    """One communicator with a stream of its own. Operations wait for the current stream, and then run on theirs."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        """Reduces in place."""

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> GroupWork | None:
        """Adds up in place, times `scale`; None, and nothing happens, if that cannot be done in one."""

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        """Reduces `tensor`, `(ranks * share.numel(),)`, of which this rank gets its share."""

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> GroupWork:
        """Puts all ranks' shares one after the other into `tensor`, `(ranks * share.numel(),)`."""

    def error(self) -> str:
        """What has gone wrong by itself, in words; empty while all is well. Any thread may ask."""

    def close(self) -> None:
        """Collective, with nothing in flight: frees it."""


class Opener(Protocol):
    """Makes communicators, and knows what may be made.

    Attributes:
        max_streams: that may run at the same time.
        threads: GPU threads that a unit may be allowed.
        ways: that NCCL may be told to reduce units in.
    """

    max_streams: int
    threads: tuple[int, ...]
    ways: tuple[NcclWay, ...]

    def open(self, key: CommunicatorKey) -> Group:
        """Collective over the scope's ranks, and all ranks do it at the same time.

        Raises:
            PlanError: on all ranks, NCCL will not have that way here.
            CommError: the ranks cannot connect.
        """

    def memory_bytes(self) -> tuple[int, int]:
        """The device's memory: (free, all)."""


class CommunicatorPool:
    """The communicators that are open; those that were needed longest ago are closed for others.

    Attributes:
        limit: so many may be open.
        open: by key, longest unused first.
    """

    def __init__(self, opener: Opener, *, limit: int, worst: Callable[[float], float]) -> None:
        """Opens nothing.

        Args:
            opener: makes communicators.
            limit: so many may be open.
            worst: collective: the largest of the ranks' values.
        """
        self.opener, self.limit, self._worst = opener, limit, worst
        self.open: OrderedDict[CommunicatorKey, Group] = OrderedDict()
        self._per_stream: Counter[tuple[int, Scope]] = Counter()
        self._taken_share = 0.0  # of the memory, by all that are open, on the rank where it is most

    def count(self, stream: int, scope: Scope) -> int:
        """How many communicators are open for this stream, which differ in CTAs or way."""
        return self._per_stream[stream, scope]

    def require(self, keys: Sequence[CommunicatorKey]) -> None:
        """Collective, with nothing in flight: opens those of `keys` that are not open, in their order.

        Raises:
            PlanError: on all ranks: so many cannot be open at once, they would take too much memory, or NCCL will not
                have a way that one is to reduce in.
            CommError: the ranks cannot connect.
        """
        wanted = list(dict.fromkeys(keys))
        if len(wanted) > self.limit:
            raise PlanError(f"the plan needs {len(wanted)} communicators; at most {self.limit} are kept open")
        for key in wanted:
            if key in self.open:
                self.open.move_to_end(key)
        for key in wanted:
            if key not in self.open:
                self._make_room(wanted, key)
                self.open[key] = self._make(key)
                self._per_stream[key.stream, key.scope] += 1

    def _make(self, key: CommunicatorKey) -> Group:
        free_before, total = self.opener.memory_bytes()
        group = self.opener.open(key)
        taken = (free_before - self.opener.memory_bytes()[0]) / total
        self._taken_share += max(0.0, self._worst(taken))
        logger.debug("NCCL %s is open; %d in all, %.1f %% of memory", key, len(self.open) + 1, 100 * self._taken_share)
        return group

    def _make_room(self, wanted: Sequence[CommunicatorKey], key: CommunicatorKey) -> None:
        while len(self.open) >= self.limit or (self.open and self._expected_share() > MEMORY_SHARE):
            unused = next((other for other in self.open if other not in wanted), None)
            if unused is None:
                raise PlanError(
                    f"the communicators of this plan would take {self._expected_share():.0%} of the GPU's memory "
                    f"with {key}; at most {MEMORY_SHARE:.0%} is used for them"
                )
            self._close(unused)

    def _expected_share(self) -> float:
        """Of memory, once one more like those that are open is open, too."""
        return self._taken_share * (len(self.open) + 1) / len(self.open)

    def _close(self, key: CommunicatorKey) -> None:
        self._taken_share -= self._taken_share / len(self.open)
        self.open.pop(key).close()
        self._per_stream[key.stream, key.scope] -= 1
        logger.debug("NCCL %s is closed", key)

    def keep_only(self, keys: Iterable[CommunicatorKey]) -> None:
        """Collective, with nothing in flight: closes all others."""
        kept = set(keys)
        for key in [key for key in self.open if key not in kept]:
            self._close(key)

    def check(self) -> None:
        """Raises what has gone wrong by itself in any of them; any thread may ask.

        Raises:
            CommError: naming the communicator.
        """
        for key, group in list(self.open.items()):
            if error := group.error():
                raise CommError(f"NCCL failed on {key}: {error}")

    def close(self) -> None:
        """Closes all of them."""
        self.keep_only(())


ISSUING = threading.Lock()
"""One thread at a time gives work to NCCL, whichever communicators it uses."""


class NcclWork(Work):
    """A unit on its way; the current stream waits for it, not the thread.

    Attributes:
        done_event: when it is reduced; None unless `note_end` was called.
    """

    def __init__(self, work: GroupWork, device: Device, unit: torch.Tensor, scale: float, what: str) -> None:
        """Args: `scale` is what the unit has still to be multiplied by."""
        self._work, self._device, self._unit, self._scale, self._what = work, device, unit, scale, what
        self._waited_for = False
        self.done_event: Event | None = None

    def note_end(self, stream: Any) -> None:
        """Has a stream that is used for nothing else wait for the unit, and notes the moment."""
        with self._device.on(stream):
            self._work.wait()
            self.done_event = self._device.record_event()

    def is_done(self) -> bool:
        """Whether the stream has got past the unit."""
        return self._work.is_completed()

    def times(self) -> tuple[Event | None, Event | None]:
        """The end, where it was noted; NCCL says no beginning."""
        return None, self.done_event

    def wait(self, timeout_s: float) -> bool:
        """Has the current stream wait, and returns True at once."""
        if not self._waited_for:
            try:
                self._work.wait()
            except RuntimeError as err:
                raise CommError(f"NCCL failed in {self._what}: {err}") from err
            self._device.launch(scale_, self._unit, self._scale)
            self._waited_for = True
        return True


class _Chain:
    """Operations of several communicators one after the other on a stream that leads from one to the next."""

    def __init__(self, device: Device, end: Event, last: GroupWork) -> None:
        self._device, self._end, self._last = device, end, last

    def wait(self) -> None:
        self._device.order_after(self._end)

    def is_completed(self) -> bool:
        return self._last.is_completed() and self._device.is_reached(self._end)


class NcclTransport(Transport):
    """The flat algorithm: each unit is one all-reduce on the communicator of its stream, CTAs and way."""

    kind = TransportKind.NCCL
    scopes: tuple[Scope, ...] = (Scope.ALL,)

    def __init__(self, pool: CommunicatorPool, device: Device, *, opener: Opener) -> None:
        """Starts nothing.

        Args:
            pool: the communicators; other algorithms share it, and whoever owns it closes it.
            device: where the buffers are.
            opener: knows how many streams and which thread allowances there may be.
        """
        self._pool, self._device = pool, device
        self.max_streams = min(opener.max_streams, pool.limit // len(self.scopes))
        self.threads = opener.threads
        self.stream_cost = StreamCost()  # NCCL's own; the pool looks after the device's memory
        self._leads: dict[int, Any] = {}

    def keys(self, streams: Sequence[StreamSpec]) -> list[CommunicatorKey]:
        """The communicators that these streams need."""
        return list(dict.fromkeys(_key(stream, scope) for stream in streams for scope in self.scopes))

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Collective: opens the communicators of these streams."""
        keys = self.keys(streams)
        if not set(keys) <= self._pool.open.keys():
            self._device.synchronise()  # what is closed for the new ones must have nothing in flight
        self._pool.require(keys)

    def _carry(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Issues it behind what is on the current stream by now."""
        unit = buffer.tensor[start:stop]
        with ISSUING:
            work, left = self._issue_in_turn(unit, stream, op, scale)
        unit_work = NcclWork(work, self._device, unit, left, f"elements [{start}, {stop}) on stream {stream.number}")
        if recorder.times_wanted():
            unit_work.note_end(self._lead(stream.number))
        return unit_work

    def _lead(self, number: int) -> Any:  # Any: a stream of the device
        """A stream of the device for this stream that is not NCCL's."""
        if number not in self._leads:
            self._leads[number] = self._device.make_stream()
        return self._leads[number]

    def _issue_in_turn(
        self, unit: torch.Tensor, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> tuple[GroupWork, float]:
        """As `_issue`, behind the stream's last unit, which another communicator may have carried."""
        if self._pool.count(stream.number, Scope.ALL) == 1:
            return self._issue(unit, stream, op, scale)
        packed = self._device.record_event()
        with self._device.on(self._lead(stream.number)):
            self._device.order_after(packed)
            work, left = self._issue(unit, stream, op, scale)
            work.wait()
        return work, left

    def _group(self, stream: StreamSpec, scope: Scope) -> Group:
        return self._pool.open[_key(stream, scope)]

    def _issue(self, unit: torch.Tensor, stream: StreamSpec, op: ReduceOp, scale: float) -> tuple[GroupWork, float]:
        """Returns the work and the factor that has still to be applied."""
        return _all_reduce(self._group(stream, Scope.ALL), unit, op, scale)

    def close(self) -> bool:
        """Closes nothing: the pool is its owner's."""
        return True


def _key(stream: StreamSpec, scope: Scope) -> CommunicatorKey:
    """Within a node parts are scattered and gathered, for which NCCL has no trees: there it decides for itself."""
    way = None if scope is Scope.NODE else stream.nccl
    return CommunicatorKey(stream.number, ctas_for(stream.threads), scope, way)


def _all_reduce(group: Group, unit: torch.Tensor, op: ReduceOp, scale: float) -> tuple[GroupWork, float]:
    if op is ReduceOp.SUM and scale != 1.0:
        work = group.all_reduce_scaled(unit, scale)
        if work is not None:
            return work, 1.0
    return group.all_reduce(unit, op), scale


class NcclHierarchicalTransport(NcclTransport):
    """The hierarchical algorithm: reduce-scatter inside the node, all-reduce across nodes, all-gather inside.

    Each rank carries its share of a unit across nodes, so all network interfaces of a node work. Elements that are
    too few for a share go the flat way.
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
        """Starts nothing. Args: as `NcclTransport`, and this rank's place in its node; all nodes are of one size."""
        super().__init__(pool, device, opener=opener)
        self._local_size, self._local_rank = local_size, local_rank

    def _issue(self, unit: torch.Tensor, stream: StreamSpec, op: ReduceOp, scale: float) -> tuple[GroupWork, float]:
        share_numel = unit.numel() // self._local_size
        whole, rest = unit[: share_numel * self._local_size], unit[share_numel * self._local_size :]
        packed = self._device.record_event()
        works: list[GroupWork] = []
        left = scale
        with self._device.on(self._lead(stream.number)):
            self._device.order_after(packed)
            if rest.numel():
                work, rest_left = _all_reduce(self._group(stream, Scope.ALL), rest, op, scale)
                works.append(work)
                work.wait()
                if rest_left != 1.0:
                    self._device.launch(scale_, rest, rest_left)
            if share_numel:
                share = whole[self._local_rank * share_numel : (self._local_rank + 1) * share_numel]
                node = self._group(stream, Scope.NODE)
                works.append(node.reduce_scatter(share, whole, op))
                works[-1].wait()
                work, left = _all_reduce(self._group(stream, Scope.ACROSS), share, op, scale)
                works.append(work)
                work.wait()
                if left != 1.0:
                    self._device.launch(scale_, share, left)
                works.append(node.all_gather(whole, share))
                works[-1].wait()
            end = self._device.record_event()
        return _Chain(self._device, end, works[-1]), 1.0


# ── NCCL through torch ────────────────────────────────────────────────────────────────────────────────────────────────

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
    """One communicator by PyTorch's `ProcessGroupNCCL`."""

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
    """Makes communicators over the ranks of a control plane, all on one GPU of this process."""

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
        """Collective over the scope's ranks. The communicator has done its first operation when this returns."""
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
                first = torch.zeros(1, dtype=torch.float32, device=self._device.torch_device)
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
        """The device's memory as CUDA tells it: (free, all)."""
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
