"""Choose and open the routes of a job. A route is the transport and algorithm that reduce a unit (bucket).

The router states which routes are possible and how many streams each offers, opens streams, and launches all-reduces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.mpi import mpi_of
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import wait_for_work
from sirtaki.comm.nccl_streams.transport import CommunicatorPool, NcclHierarchicalTransport, NcclTransport, Opener
from sirtaki.comm.transports.contract import (
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
from sirtaki.comm.transports.gloo import DirectTransport, GlooTransport, WatchfulStore
from sirtaki.comm.transports.mpi import MpiTransport
from sirtaki.comm.transports.shared_memory import SharedMemoryTransport, share_memory
from sirtaki.comm.transports.staged import StagedTransport
from sirtaki.errors import PlanError, TransportError

from .device import HOST, Device
from .plan import Algorithm, CommPlan, NcclWay, Route, TransportKind

logger = logging.getLogger(__name__)

MAX_COMMUNICATORS = 24
"""Largest number of open NCCL communicators. A stream has one communicator for each number of CTAs that plans use."""

DIRECT_LATENCY_S = 2e-3
"""Latency between nodes from which on `DirectTransport` replaces Gloo's ring. Measured on four emulated nodes (400
Mbit/s, 100 Mbit/s per flow). With `DirectTransport`, units (buckets) of 16 KiB to 1 MiB take 0.2 to 0.5 of the ring's
time at any latency. A buffer of 8 MiB takes 1.04 to 1.09 of the ring's time at latencies up to 2 ms, and the same time
at 5 ms."""

FLAT, TREE = Algorithm.FLAT, Algorithm.HIERARCHICAL


class Router:
    """Transports of one user, such as a gradient pipeline. Users whose operations may interleave need separate routers.

    Attributes:
        device: device of the gradients.
        transports: possible transports by route. They need not have open streams.
        between_nodes: True if `routes` must omit hierarchical routes, whose sums within nodes cannot be compressed.
    """

    between_nodes = False

    def __init__(
        self,
        control: ControlPlane,
        *,
        timeout_s: float,
        device: Device = HOST,
        nccl: Opener | None = None,
        direct: bool | None = None,
    ) -> None:
        """Find the possible routes without opening a stream. Collective.

        Args:
            control: control plane of the ranks.
            timeout_s: timeout of a reduction that makes no progress.
            device: device of the gradients.
            nccl: opens NCCL communicators. None = gradients on GPUs are reduced in host memory.
            direct: use `DirectTransport` instead of Gloo's ring. None = use it if latency is above `DIRECT_LATENCY_S`.
        """
        self._control, self.device, self._timeout_s, self._nccl = control, device, timeout_s, nccl
        self._descriptors = int(control.minimum(np.array([float(descriptors_for_streams())]))[0])
        self._direct = direct
        self._pool = None
        if nccl is not None:
            self._pool = CommunicatorPool(
                nccl, limit=MAX_COMMUNICATORS, worst=lambda value: float(control.maximum(np.array([value]))[0])
            )
        self.transports: dict[Route, Transport] = {}
        self._opened: dict[Route, int] = {}  # numbers of open streams, equal on all ranks
        self._refused: dict[Route, int] = {}  # smallest number of streams that is not tried again after a failure
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
        """Return the routes that are possible in this job. The first one is expected to be the fastest."""
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
                others = " or ".join(f"{kind.value} {algorithm.value}" for kind, algorithm in self.routes)
                instead = f"using {others} instead" if others else "there is no other transport"
                logger.warning("%s %s cannot be used: %s; %s", route[0].value, route[1].value, err, instead)

    def _create(self, route: Route) -> Transport:
        """Create the transport of a route without opening a stream. Collective.

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
        store, address = control.store()
        group, rank, size = (
            (f"local{control.local_rank}", control.cross_rank, control.cross_size)
            if across
            else ("all", control.rank, control.size)
        )
        long_latency = size > 2 and control.round_trip_s >= 2 * DIRECT_LATENCY_S
        return (DirectTransport if (long_latency if self._direct is None else self._direct) else GlooTransport)(
            store=WatchfulStore(store, control.failures),
            prefix=lambda: f"{control.next_prefix()}/{group}",
            address=address,
            rank=rank,
            size=size,
            timeout_s=self._timeout_s,
            agree=control.agree_on_success,
            failures=control.failures,
        )

    def _disable_shared_memory(self, error: TransportError) -> None:
        if self._control.rank == 0:
            logger.warning("%s; gradients within nodes are sent over MPI or Gloo, too", error)
        self._shares_memory = False
        for route in [
            route for route in self.transports if route[0] is TransportKind.STAGED
        ]:  # these routes may use shared memory
            self.transports.pop(route).close()
            self._opened.pop(route, None)
            self._create_if_possible(route)

    @property
    def routes(self) -> tuple[Route, ...]:
        """Routes that a plan may use, except those that failed to open. The first is expected to be the fastest."""
        return tuple(
            route
            for route in self._possible()
            if self._refused.get(route, 2) > 1 and not (self.between_nodes and route[1] is TREE)
        )

    def max_streams(self, routes: Sequence[Route] | None = None) -> int:
        """Return the largest number of streams that each of `routes` offers. None = all routes of the job.

        The transport, the file descriptors of each rank and earlier failures to open streams limit the number.
        """
        return min(self._limit(route)[0] for route in routes or self.routes)

    def why_not_more(self, routes: Sequence[Route]) -> str:
        """Return a text that says what limits the streams of `routes[0]`, and which of `routes` offer more."""
        limits = {route: self._limit(route) for route in routes}
        lowest, reason = limits[routes[0]]
        more = sorted({f"{limit} on {route[0].value}" for route, (limit, _) in limits.items() if limit > lowest})
        return f"{reason}{'; with SIRTAKI_TRANSPORT set there can be ' if more else ''}{' and '.join(more)}"

    def _limit(self, route: Route) -> tuple[int, str]:
        """Return the largest number of streams of a route, and a text that says what limits the number."""
        transport, name = self.transports[route], route[0].value
        fit = streams_within(self._descriptors, transport.stream_cost, most=transport.max_streams)
        refused = self._refused.get(route)
        if refused is not None and refused <= fit:
            return max(1, refused - 1), f"more streams of {name} could not be opened"
        if fit < transport.max_streams:
            return fit, (
                f"each stream of {name} takes {transport.stream_cost.descriptors} descriptors on "
                f"{self._control.size} ranks, and {self._descriptors} can be used (see ulimit -n)"
            )
        return fit, f"{name} has at most {fit}"

    def threads(self) -> tuple[int, ...]:
        """Return the numbers of GPU threads per unit (bucket) that all routes offer. Empty = there is no choice."""
        offers = [self.transports[route].threads for route in self.routes]
        return tuple(count for count in offers[0] if all(count in offer for offer in offers))

    def nccl_ways(self) -> tuple[NcclWay, ...]:
        """Return the combinations of NCCL algorithm and protocol that a plan may use. Empty without NCCL."""
        return () if self._nccl is None else self._nccl.ways

    def allocate(self, numel: int, dtype: torch.dtype) -> FlatBuffer:
        """Allocate a zeroed flat buffer of `numel` elements on each rank. All routes can reduce it. Collective."""
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
        """Open the streams that the plan uses. Collective.

        Raises:
            PlanError: on all ranks, if the job has no such route, or the route has fewer streams.
            TransportError: on all ranks, if the streams could not be opened. Earlier streams stay open. The router then
                offers only half of the missing streams, because another failure to open streams may take long.
        """
        # All ranks must open the algorithms in the same order, because opening is collective.
        for algorithm in sorted({unit.algorithm for unit in plan.units}, key=lambda kind: kind.value):
            self._open((plan.transport, algorithm), streams_of(plan, algorithm), planned=plan.streams)

    def open_streams(self, route: Route, count: int, *, threads: int | None = None) -> None:
        """Open the streams 0 to `count` - 1 of a route. Collective. Raises the same errors as `open_plan`."""
        self._open(route, [StreamSpec(number, threads) for number in range(count)], planned=count)

    def _open(self, route: Route, streams: Sequence[StreamSpec], *, planned: int) -> None:
        if route not in self.routes:
            raise PlanError(
                f"{route[0].value} with the {route[1].value} algorithm is not possible here; "
                f"possible: {', '.join(f'{kind.value} {how.value}' for kind, how in self.routes)}"
            )
        limit, reason = self._limit(route)
        if planned > limit:
            raise PlanError(f"at most {limit} streams are possible, not {planned}: {reason}")
        transport = self.transports[route]
        have, want = self._opened.get(route, 0), 1 + max(stream.number for stream in streams)
        try:
            if want > have:
                # First check descriptors and threads on all ranks, because a failure in `open_streams` takes long and
                # can make Gloo unusable.
                with reserved(transport.stream_cost * (want - have)) as problem:
                    self._control.agree_on_success(problem)
            transport.open_streams(streams)
        except TransportError as err:
            self._refused[route] = have + (planned - have) // 2 + 1
            raise TransportError(f"{planned} streams of {route[0].value} cannot be opened: {err}") from err
        self._opened[route] = max(have, want)

    def keep_only(self, plans: Sequence[CommPlan]) -> None:
        """Close streams that `plans` do not use, if idle ones cost CPU time or GPU memory. Collective.

        No operation may be in flight on this rank.
        """
        self._control.agree_on_success("")  # once all ranks are here, no operation is in flight
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
            self.device.synchronise()  # a communicator may be closed only with no operation in flight
            self._pool.keep_only(keys)

    # ── units ───────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, act: Callable[[], None], *, route: Route, stream: int) -> None:
        """Call `act` before units (buckets) submitted to the stream later: in the thread of the stream, if it has one.

        Args:
            act: function to call. Must not raise.
            route: route of the stream.
            stream: number of an open stream.
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
        """Launch the all-reduce of a range on an open stream, like `Transport.all_reduce`. Collective, non-blocking."""
        return self.transports[route].all_reduce(
            buffer, start, stop, stream=StreamSpec(stream, threads, nccl), op=op, scale=scale
        )

    def exchange(
        self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, *, route: Route, stream: int
    ) -> Work:
        """Launch an all-to-all in host memory on a flat route, like `Transport.exchange`. Collective, non-blocking."""
        return self.transports[route].exchange(outgoing, parcels, incoming, stream=StreamSpec(stream))

    def all_reduce_plan(self, buffer: FlatBuffer, plan: CommPlan, *, scale: float = 1.0) -> list[Work]:
        """Launch the all-reduces of all units (buckets) of `plan` on its open streams. Collective, non-blocking."""
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
        """Wait for all works, like `wait_for_work`.

        The error names the rank that has ended, even if this rank's connection to that rank broke first. A rank that
        exits closes the connections of its router before its control plane.
        """
        return wait_for_work(works, failures=self._control.failures, interrupted=interrupted)

    def check(self) -> None:
        """Check the NCCL communicators for asynchronous errors. Thread-safe, non-blocking.

        Raises:
            CommError: a communicator has failed.
        """
        if self._pool is not None:
            self._pool.check()

    def release(self) -> bool:
        """End the threads and connections of this rank. NCCL communicators stay open: closing them is collective.

        Returns:
            False if a thread still waits for a peer.
        """
        closed = [transport.close() for transport in self.transports.values()]
        self.transports.clear()
        return all(closed)

    def close(self) -> None:
        """Close all transports and communicators. Collective. May be called twice."""
        self.release()
        if self._pool is not None and self._control.failures.error is None:
            self.device.synchronise()  # a communicator may be closed only with no operation in flight
            self._pool.close()


def streams_of(plan: CommPlan, algorithm: Algorithm) -> list[StreamSpec]:
    """Return the streams that the units (buckets) of `plan` with this algorithm use, each once."""
    return list(
        dict.fromkeys(
            StreamSpec(unit.stream, unit.threads, unit.nccl) for unit in plan.units if unit.algorithm is algorithm
        )
    )
