"""Choose and open the routes of a job. A route is a transport and an algorithm, which together reduce units (buckets).

`Router` states which routes are possible, and how many streams (connections or CUDA streams) each offers. It opens
streams, and launches all-reduces on them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.mpi import mpi_of
from sirtaki.comm.control.plane import ControlPlane, gather
from sirtaki.comm.control.waiting import wait_for_work
from sirtaki.comm.nccl_streams.transport import CommunicatorPool, NcclHierarchicalTransport, NcclTransport, Opener
from sirtaki.comm.transports.contract import (
    TUNED_CONNECTIONS,
    FlatBuffer,
    Parcels,
    ReduceOp,
    StreamSpec,
    Transport,
    Work,
    descriptors_for_streams,
    reserved,
    streams_within,
)
from sirtaki.comm.transports.gloo import DirectTransport, GlooTransport
from sirtaki.comm.transports.mpi import MpiTransport
from sirtaki.comm.transports.shared_memory import SharedMemoryTransport, share_memory
from sirtaki.comm.transports.staged import StagedTransport
from sirtaki.errors import PlanError, TransportError

from .device import HOST, Device
from .plan import Algorithm, CommPlan, NcclWay, Route, TransportKind

logger = logging.getLogger(__name__)

MAX_COMMUNICATORS = 24
"""Largest number of open NCCL communicators. A CUDA stream may have several: one for each number of CTAs (thread
blocks), and each NCCL algorithm and protocol, that plans use on it."""

DIRECT_LATENCY_S = 2e-3
"""Smallest latency in seconds between nodes at which `DirectTransport` (each rank sends to all) replaces Gloo's ring.

The value was measured on four emulated nodes (400 Mbit/s, 100 Mbit/s per TCP connection). With `DirectTransport`, units
(buckets) of 16 KiB to 1 MiB take 0.2 to 0.5 of the ring's time at any latency. A buffer of 8 MiB takes 1.04 to 1.09 of
the ring's time at latencies up to 2 ms, and the same time at 5 ms.
"""

FLAT, TREE = Algorithm.FLAT, Algorithm.HIERARCHICAL


class Router:
    """The transports of one user, such as a gradient pipeline, and the choice between them.

    Users whose operations may be launched in a different order on each rank need separate routers. A route is a
    transport and an algorithm (flat or hierarchical).

    Attributes:
        device: device of the gradients.
        transports: possible transports by route. They need not have open streams (connections or CUDA streams).
        compresses: True if a codec compresses gradients. `routes` then omit hierarchical routes, whose sums within
            nodes cannot be compressed. `nccl_ways` are empty, because NCCL has no tree algorithm for all-gathers.
    """

    compresses = False

    def __init__(
        self,
        control: ControlPlane,
        *,
        timeout_s: float,
        device: Device = HOST,
        nccl: Opener | None = None,
        direct: bool | None = None,
    ) -> None:
        """Find the possible routes (transport and algorithm) without opening connections for gradients. Collective.

        Args:
            control: control plane of the ranks (small messages between them).
            timeout_s: seconds after which an all-reduce without progress fails.
            device: device of the gradients.
            nccl: opens NCCL communicators. None = gradients on GPUs are reduced in host memory.
            direct: True to use `DirectTransport` instead of Gloo's ring. None = use it if the latency between nodes is
                above `DIRECT_LATENCY_S`.
        """
        self._control, self.device, self._timeout_s, self._nccl = control, device, timeout_s, nccl
        self._descriptors = int(control.minimum(np.array([float(descriptors_for_streams())]))[0])
        self._direct = direct
        self._pool = None
        if nccl is not None:
            self._pool = CommunicatorPool(
                nccl,
                limit=MAX_COMMUNICATORS,
                worst=lambda value: float(control.maximum(np.array([value]))[0]),
                number=control.broadcast(secrets.randbits(62)),
            )
        self.transports: dict[Route, Transport] = {}
        self._opened: dict[Route, int] = {}  # Number of open streams of each route, equal on all ranks.
        # Smallest number of streams that is no longer offered, by route. Opening that many has failed.
        self._refused: dict[Route, int] = {}
        self._shares_memory = nccl is None and max(control.local_sizes) > 1
        if self._shares_memory:
            try:
                share_memory(control, 1)
            except TransportError as err:
                self._disable_shared_memory(err)
        for route in self._possible():
            self._create_if_possible(route)

    # ── routes ────────────────────────────────────────────────────────────────────────────────────────────

    def _possible(self) -> tuple[Route, ...]:
        """Return the possible routes (transport and algorithm) of this job, the supposedly fastest one first."""
        control = self._control
        if self._nccl is not None:
            nodes = not control.one_node and control.is_homogeneous and control.local_size > 1
            return ((TransportKind.NCCL, FLAT), *([(TransportKind.NCCL, TREE)] if nodes else []))
        if self.device.streams:
            algorithms = dict.fromkeys(algorithm for _, algorithm in self._host_routes())
            return tuple((TransportKind.STAGED, algorithm) for algorithm in algorithms)
        return self._host_routes()

    def _host_routes(self) -> tuple[Route, ...]:
        gloo, mpi = (TransportKind.GLOO, FLAT), (TransportKind.MPI, FLAT)
        routes: tuple[Route, ...] = (gloo, mpi)
        if self._control.one_node:
            routes = (*([(TransportKind.SHARED_MEMORY, FLAT)] if self._shares_memory else []), mpi, gloo)
        elif self._shares_memory:
            routes = ((TransportKind.GLOO, TREE), gloo, mpi, (TransportKind.MPI, TREE))
        with_mpi = self._control.backend is Backend.MPI
        return tuple(route for route in routes if with_mpi or route[0] is not TransportKind.MPI)

    def _create_if_possible(self, route: Route) -> None:
        try:
            self.transports[route] = self._create(route)
        except TransportError as err:
            self._refused[route] = 1
            if self._control.rank == 0:
                logger.warning(
                    "the transport %s with the %s algorithm cannot be used: %s; Sirtaki chooses among the remaining "
                    "transports: %s",
                    route[0].value,
                    route[1].value,
                    err,
                    ", ".join(f"{kind.value} {algorithm.value}" for kind, algorithm in self.routes) or "none",
                )

    def _create(self, route: Route) -> Transport:
        """Create the transport of a route (transport kind and algorithm) without opening its connections. Collective.

        Raises:
            TransportError: on all ranks, if any rank cannot create the transport.
        """
        control, (kind, algorithm) = self._control, route
        if kind is TransportKind.NCCL:
            assert self._pool is not None
            assert self._nccl is not None
            if algorithm is FLAT:
                return NcclTransport(self._pool, self.device, opener=self._nccl)
            return NcclHierarchicalTransport(
                self._pool,
                self.device,
                opener=self._nccl,
                local_size=control.local_size,
                local_rank=control.local_rank,
            )
        if kind is TransportKind.STAGED:
            inner = next(host_route for host_route in self._host_routes() if host_route[1] is algorithm)
            return StagedTransport(self._create(inner), self.device, control.failures)
        if kind is TransportKind.SHARED_MEMORY:
            return SharedMemoryTransport(control)
        if algorithm is TREE:
            return SharedMemoryTransport(control, across=lambda: self._create_socket_transport(kind, across=True))
        return self._create_socket_transport(kind, across=False)

    def _create_socket_transport(self, kind: TransportKind, *, across: bool) -> Transport:
        """Create a Gloo or MPI transport between all ranks or, with `across`, between ranks with equal local rank."""
        control = self._control
        if kind is TransportKind.MPI:
            return MpiTransport(lambda: mpi_of(control.duplicate(cross=across)), control.agree_on_success)
        comm = control.cross if across else control.comm
        address = control.address()
        long_latency = comm.size > 2 and control.round_trip_s >= 2 * DIRECT_LATENCY_S
        return (DirectTransport if (long_latency if self._direct is None else self._direct) else GlooTransport)(
            gather=partial(gather, comm=comm),
            address=address,
            rank=comm.rank,
            size=comm.size,
            timeout_s=self._timeout_s,
            agree=control.agree_on_success,
            failures=control.failures,
        )

    def _disable_shared_memory(self, error: TransportError) -> None:
        if self._control.rank == 0:
            logger.warning(
                "Sirtaki sends gradients between ranks of one node over MPI or Gloo, because shared memory failed: %s; "
                "training continues, but may be slower until you remove this cause and restart",
                error,
            )
        self._shares_memory = False
        for route in [
            route for route in self.transports if route[0] is TransportKind.STAGED
        ]:  # Recreate the routes that may use shared memory, without it.
            self.transports.pop(route).close()
            self._opened.pop(route, None)
            self._create_if_possible(route)

    @property
    def routes(self) -> tuple[Route, ...]:
        """Routes (transport and algorithm) that a plan may use, the supposedly fastest one first.

        Routes that could not be opened before are omitted.
        """
        return tuple(
            route
            for route in self._possible()
            if self._refused.get(route, 2) > 1 and not (self.compresses and route[1] is TREE)
        )

    def max_streams(self, routes: Sequence[Route] | None = None, *, fixed: bool = False) -> int:
        """Return the largest number of streams (connections or CUDA streams) that every one of `routes` offers.

        The kind of transport, the free file descriptors and earlier failures to open streams limit the number. So does
        the number of ranks, because each stream connects all of them.

        Args:
            routes: transports and algorithms. None = all that a plan may use.
            fixed: True if the user chooses the number. The number of ranks does not limit it then.
        """
        limits = {route: self._limit(route)[0] for route in routes or self.routes}
        return min(most if fixed else max(1, min(most, self._affordable(route))) for route, most in limits.items())

    def _affordable(self, route: Route) -> int:
        """Return the largest number of streams of a route that the tuner may open.

        Together, these streams have at most `TUNED_CONNECTIONS` connections to other ranks, or half as many if all
        ranks are on one node. 0 = one stream alone has more.
        """
        cost, most = self.transports[route].stream_cost, TUNED_CONNECTIONS // (1 + self._control.one_node)
        return most // cost.connections if cost.connections else most

    @property
    def affordable_routes(self) -> tuple[Route, ...]:
        """Routes that the tuner may try besides the default route.

        A stream of such a route does not need too many connections.
        """
        return tuple(route for route in self.routes if self._affordable(route) > 0)

    def why_not_more(self, routes: Sequence[Route]) -> str:
        """Describe what limits the number of streams of `routes[0]`, and which other routes offer more streams."""
        limits = {route: self._limit(route) for route in routes}
        lowest, reason = limits[routes[0]]
        more = sorted({f"{limit} on {route[0].value}" for route, (limit, _) in limits.items() if limit > lowest})
        return f"{reason}{'; with SIRTAKI_TRANSPORT set there can be ' if more else ''}{' and '.join(more)}"

    def _limit(self, route: Route) -> tuple[int, str]:
        """Return the largest number of streams (parallel connections) of a route, and the reason, as text."""
        transport, name = self.transports[route], route[0].value
        fit = streams_within(self._descriptors, transport.stream_cost, most=transport.max_streams)
        refused = self._refused.get(route)
        if refused is not None and refused <= fit:
            return max(1, refused - 1), f"more streams of {name} could not be opened"
        if fit < transport.max_streams:
            return fit, (
                f"each stream of {name} takes {transport.stream_cost.descriptors} file descriptors on "
                f"{self._control.size} ranks, and {self._descriptors} can be used (see ulimit -n)"
            )
        return fit, f"{name} supports at most {fit} streams"

    def threads(self) -> tuple[int, ...]:
        """Return the numbers of GPU threads per unit (bucket) that every route offers. Empty = there is no choice."""
        offers = [self.transports[route].threads for route in self.routes]
        return tuple(count for count in offers[0] if all(count in offer for offer in offers))

    @property
    def nccl_ways(self) -> tuple[NcclWay, ...]:
        """Return the combinations of NCCL algorithm and protocol that a plan may use. Empty without NCCL."""
        return () if self._nccl is None or self.compresses else self._nccl.ways

    def allocate(self, numel: int, dtype: torch.dtype) -> FlatBuffer:
        """Allocate a zeroed flat buffer of `numel` elements on each rank. All transports can reduce it. Collective."""
        if not self.device.streams:
            return self._allocate_on_host(numel, dtype)
        mirror = self._allocate_on_host(numel, dtype) if self._pool is None else None
        return FlatBuffer(torch.zeros(numel, dtype=dtype, device=self.device.torch_device), mirror=mirror)

    def _allocate_on_host(self, numel: int, dtype: torch.dtype) -> FlatBuffer:
        if self._shares_memory:
            try:
                regions = share_memory(self._control, numel * dtype.itemsize)
            except TransportError as err:
                self._disable_shared_memory(err)
            else:
                peers = tuple(region.view(dtype) for region in regions)
                self.device.pin(peers[self._control.local_rank])
                return FlatBuffer(peers[self._control.local_rank], peers)
        return FlatBuffer(self.device.pinned(numel, dtype))

    # ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────

    def open_plan(self, plan: CommPlan) -> None:
        """Open the streams (connections or CUDA streams) that the units of `plan` use. Collective.

        Raises:
            PlanError: on all ranks, if the plan's transport and algorithm are not possible, or offer fewer streams.
            TransportError: on all ranks, if the streams could not be opened. Streams that were open before the call
                stay open. Later calls may request only half of the missing streams, because another failure may take
                long.
        """
        # Open the streams of each algorithm in an order that is the same on all ranks, because opening is collective.
        for algorithm in sorted({unit.algorithm for unit in plan.units}, key=lambda kind: kind.value):
            self._open((plan.transport, algorithm), streams_of(plan, algorithm), planned=plan.streams)

    def open_streams(self, route: Route, count: int, *, threads: int | None = None) -> None:
        """Open the streams (connections or CUDA streams) 0 to `count` - 1 of a route. Collective.

        Raises:
            PlanError: on all ranks, if the route is not possible, or offers fewer streams.
            TransportError: on all ranks, if the streams could not be opened. Streams that were open before the call
                stay open.
        """
        self._open(route, [StreamSpec(number, threads) for number in range(count)], planned=count)

    def _open(self, route: Route, streams: Sequence[StreamSpec], *, planned: int) -> None:
        if route not in self.routes:
            raise PlanError(
                f"the transport {route[0].value} with the {route[1].value} algorithm is not possible in this job; "
                "possible transports and algorithms: "
                f"{', '.join(f'{kind.value} {how.value}' for kind, how in self.routes)}"
            )
        limit, reason = self._limit(route)
        if planned > limit:
            raise PlanError(
                f"the number of streams (parallel connections) must be at most {limit}, found {planned}; reason: "
                f"{reason}"
            )
        transport = self.transports[route]
        have, want = self._opened.get(route, 0), 1 + max(stream.number for stream in streams)
        try:
            if want > have:
                # First check that all ranks can have the file descriptors and threads, because a failure in
                # `open_streams` takes long, and can make Gloo unusable.
                with reserved(transport.stream_cost * (want - have)) as problem:
                    self._control.agree_on_success(problem)
            transport.open_streams(streams)
        except TransportError as err:
            self._refused[route] = have + (planned - have) // 2 + 1
            raise TransportError(
                f"Sirtaki cannot open {planned} streams (parallel connections) of transport {route[0].value}: {err}; "
                "a smaller SIRTAKI_STREAMS may succeed"
            ) from err
        self._opened[route] = max(have, want)

    def keep_only(self, plans: Sequence[CommPlan]) -> None:
        """Close the connections that `plans` do not use, if idle ones cost CPU time or GPU memory. Collective.

        No operation may be in flight on this rank.
        """
        # Wait for all ranks, so that no rank has an operation in flight when streams are closed.
        self._control.agree_on_success("")
        for (kind, algorithm), transport in self.transports.items():
            specs = [spec for plan in plans if plan.transport is kind for spec in streams_of(plan, algorithm)]
            wanted = 1 + max((spec.number for spec in specs), default=-1)
            if self._opened.get((kind, algorithm), 0) > wanted and not isinstance(transport, NcclTransport):
                transport.keep(wanted)
                self._opened[kind, algorithm] = wanted
        if self._pool is not None:
            keys = [
                key
                for (_, algorithm), transport in self.transports.items()
                if isinstance(transport, NcclTransport)
                for plan in plans
                for key in transport.keys(streams_of(plan, algorithm))
            ]
            self.wait_for_device()
            self._pool.keep_only(keys)

    # ── units ───────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, act: Callable[[], None], *, route: Route, stream: int) -> None:
        """Make a stream call `act` before it reduces units (buckets) that are submitted later.

        If the stream has a thread, queue the call for this thread, without waiting. Else call `act` now.

        Args:
            act: function to call. Must not raise.
            route: transport and algorithm of the stream.
            stream: number of an open stream (connection or CUDA stream).
        """
        if not self.transports[route].prepare(act, stream=StreamSpec(stream)):
            act()

    def all_reduce(
        self,
        buffer: FlatBuffer,
        start: int,
        stop: int,
        *,
        route: Route,
        stream: int,
        threads: int | None = None,
        nccl: NcclWay | None = None,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
    ) -> Work:
        """Launch the all-reduce of elements `[start, stop)` of `buffer`, in place. Collective, non-blocking.

        `route` (transport and algorithm) and `stream` (its number) state where it runs. The stream must be open.
        """
        return self.transports[route].all_reduce(
            buffer, start, stop, stream=StreamSpec(stream, threads, nccl), op=op, scale=scale
        )

    def exchange(
        self,
        outgoing: FlatBuffer,
        parcels: Parcels,
        incoming: torch.Tensor,
        *,
        route: Route,
        stream: int,
        threads: int | None = None,
        nccl: NcclWay | None = None,
    ) -> Work:
        """Launch an all-to-all of parcels (messages between two ranks). Collective, non-blocking.

        `route` must have the flat algorithm. `Transport.exchange` describes the other arguments.
        """
        return self.transports[route].exchange(outgoing, parcels, incoming, stream=StreamSpec(stream, threads, nccl))

    def all_reduce_plan(self, buffer: FlatBuffer, plan: CommPlan, *, scale: float = 1.0) -> list[Work]:
        """Launch the all-reduces of all units (buckets) of `plan`, whose streams are open. Collective, non-blocking."""
        return [
            self.all_reduce(
                buffer,
                unit.start,
                unit.stop,
                route=(plan.transport, unit.algorithm),
                stream=unit.stream,
                threads=unit.threads,
                nccl=unit.nccl,
                scale=scale,
            )
            for unit in plan.units
        ]

    def wait_for(self, works: Sequence[Work], *, interrupted: Callable[[], bool] | None = None) -> bool:
        """Wait for all works (all-reduces and all-to-alls in flight). Return False if the wait was interrupted.

        If a rank ends during the wait, the raised error names the rank: when a connection breaks, the wait asks the
        control plane for the reason.

        Args:
            works: operations in flight, in the order of their launch.
            interrupted: returns True to end the wait.
        """
        return wait_for_work(works, failures=self._control.failures, interrupted=interrupted)

    def check(self) -> None:
        """Raise an error if an NCCL communicator has an asynchronous error. Thread-safe, non-blocking.

        Raises:
            CommError: an NCCL communicator has failed.
        """
        if self._pool is not None:
            self._pool.check()

    def release(self) -> bool:
        """End the threads and connections of this rank, but not NCCL communicators, whose end is collective.

        Returns:
            False if a thread still waits for a peer.
        """
        closed = [transport.close() for transport in self.transports.values()]
        self.transports.clear()
        return all(closed)

    def wait_for_device(self) -> None:
        """Block until the GPU has done all queued work, so that no NCCL operation of this rank is in flight.

        Raises:
            CommError: the job has failed. The communicators may have been aborted.
        """
        with self._control.failures.raising():
            self.device.synchronise()

    def close(self) -> None:
        """Close all transports and NCCL communicators. Collective. May be called twice.

        Raises:
            CommError: the job has failed during the call.
        """
        self.release()
        if self._pool is not None and self._control.failures.error is None:
            self.wait_for_device()
            self._pool.close()


def streams_of(plan: CommPlan, algorithm: Algorithm) -> list[StreamSpec]:
    """Return the streams (connections or CUDA streams) of the units of `plan` with this algorithm, each once."""
    return list(
        dict.fromkeys(
            StreamSpec(unit.stream, unit.threads, unit.nccl) for unit in plan.units if unit.algorithm is algorithm
        )
    )
