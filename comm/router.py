"""All the ways by which units can travel in this job: which there can be, how many streams each has, opened when
needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.failure import WAIT_SLICE_S
from sirtaki.comm.control.mpi import mpi_of
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.nccl_streams.transport import CommunicatorPool, NcclHierarchicalTransport, NcclTransport, Opener
from sirtaki.comm.transports.contract import (
    Exchanger,
    FlatBuffer,
    Parcels,
    ReduceOp,
    StreamSpec,
    Transport,
    Work,
    descriptors_for_streams,
    held,
    streams_within,
)
from sirtaki.comm.transports.gloo import GlooTransport, WatchfulStore
from sirtaki.comm.transports.mpi import MpiTransport
from sirtaki.comm.transports.shared_memory import SharedMemoryTransport, share_memory
from sirtaki.comm.transports.staged import StagedTransport
from sirtaki.errors import CommError, PlanError, TransportError

from .device import HOST, Device
from .plan import Algorithm, CommPlan, Route, TransportKind

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane


class StreamLimits:
    """The same on all ranks.

    Attributes:
        opened: how many streams of each route are open.
    """

    def __init__(self, control: ControlPlane) -> None:
        """Collective, before any stream is open."""
        self._size = control.size
        self._descriptors = int(control.minimum(np.array([float(descriptors_for_streams())]))[0])
        self.opened: dict[Route, int] = {}
        self._refused: dict[Route, int] = {}  # so many are not tried, since that failed before

    def refuse(self, route: Route) -> None:
        """This route is not possible."""
        self._refused[route] = 1

    def is_possible(self, route: Route) -> bool:
        """Whether a stream of it may be opened, as far as is known."""
        return self._refused.get(route, 2) > 1

    def note_failure(self, route: Route, wanted: int) -> None:
        """So many could not be opened: half of what could not be added is refused from now on."""
        have = self.opened.get(route, 0)
        self._refused[route] = have + (wanted - have) // 2 + 1

    def limit(self, route: Route, transport: Transport) -> tuple[int, str]:
        """The largest number of streams of a route, and why there are not more."""
        name = route[0].value
        fit = streams_within(self._descriptors, transport.stream_cost, most=transport.max_streams)
        refused = self._refused.get(route)
        if refused is not None and refused <= fit:
            return max(1, refused - 1), f"more streams of {name} could not be opened"
        if fit < transport.max_streams:
            return fit, (
                f"each stream of {name} takes {transport.stream_cost.descriptors} descriptors on {self._size} "
                f"ranks, and {self._descriptors} can be used (see ulimit -n)"
            )
        return fit, f"{name} has at most {fit}"


MAX_COMMUNICATORS = 24
"""NCCL communicators that are open at once; those of one stream with several CTA counts are several."""

FLAT, TREE = Algorithm.FLAT, Algorithm.HIERARCHICAL


class TransportFactory:
    """Makes transports; opens no stream.

    Attributes:
        pool: NCCL's communicators; None where it carries nothing.
        shares_memory: the ranks of a node can share memory.
    """

    def __init__(self, control: ControlPlane, *, timeout_s: float, device: Device, nccl: Opener | None) -> None:
        """See `Router`."""
        self._control, self._timeout_s, self._device, self._nccl = control, timeout_s, device, nccl
        self.shares_memory = False
        self.pool = None
        if nccl is not None:
            self.pool = CommunicatorPool(
                nccl,
                limit=MAX_COMMUNICATORS,
                worst=lambda value: float(control.maximum(np.array([value]))[0]),
            )

    @property
    def routes(self) -> tuple[Route, ...]:
        """Those that exist here, the best guess first."""
        if self._nccl is not None:
            nodes = not self._control.one_node and self._control.is_homogeneous and self._control.local_size > 1
            return ((TransportKind.NCCL, FLAT), *([(TransportKind.NCCL, TREE)] if nodes else []))
        if self._device.streams:
            inner = dict.fromkeys(algorithm for _, algorithm in self._host_routes)
            return tuple((TransportKind.STAGED, algorithm) for algorithm in inner)
        return self._host_routes

    @property
    def _host_routes(self) -> tuple[Route, ...]:
        gloo, mpi = (TransportKind.GLOO, FLAT), (TransportKind.MPI, FLAT)
        if self._control.one_node:
            shared = ((TransportKind.SHARED_MEMORY, FLAT),) if self.shares_memory else ()
            routes = (*shared, mpi, gloo)
        elif self.shares_memory:
            routes = ((TransportKind.GLOO, TREE), gloo, mpi, (TransportKind.MPI, TREE))
        else:
            routes = (gloo, mpi)
        if self._control.backend is Backend.MPI:
            return routes
        return tuple(route for route in routes if route[0] is not TransportKind.MPI)

    def make(self, route: Route) -> Transport:
        """Collective.

        Raises:
            TransportError: on all ranks, if it cannot be made.
        """
        kind, algorithm = route
        if kind is TransportKind.NCCL:
            return self._make_nccl(algorithm)
        if kind is TransportKind.STAGED:
            inner = next(host_route for host_route in self._host_routes if host_route[1] is algorithm)
            return StagedTransport(self.make(inner), self._device, self._control.failures)
        if kind is TransportKind.SHARED_MEMORY:
            return SharedMemoryTransport(self._control)
        if algorithm is TREE:
            return SharedMemoryTransport(self._control, across=lambda: self._make_sockets(kind, across=True))
        return self._make_sockets(kind, across=False)

    def _make_sockets(self, kind: TransportKind, *, across: bool) -> Transport:
        """Gloo or MPI between all ranks, or across the nodes between those of one local rank."""
        control = self._control
        if kind is TransportKind.MPI:
            duplicate = control.duplicate_cross if across else control.duplicate
            return MpiTransport(lambda: mpi_of(duplicate()), control.agree_on_success)
        store, address = control.store()
        group = f"local{control.local_rank}" if across else "all"
        return GlooTransport(
            store=WatchfulStore(store, control.failures),
            prefix=lambda: f"{control.next_prefix()}/{group}",
            address=address,
            rank=control.cross_rank if across else control.rank,
            size=control.cross_size if across else control.size,
            timeout_s=self._timeout_s,
            agree=control.agree_on_success,
            failures=control.failures,
        )

    def _make_nccl(self, algorithm: Algorithm) -> Transport:
        assert self.pool is not None
        assert self._nccl is not None
        if algorithm is FLAT:
            return NcclTransport(self.pool, self._device, opener=self._nccl)
        return NcclHierarchicalTransport(
            self.pool,
            self._device,
            opener=self._nccl,
            local_size=self._control.local_size,
            local_rank=self._control.local_rank,
        )


logger = logging.getLogger(__name__)


class Router:
    """The transports of one user of communication; two users that may interleave need a router each."""

    def __init__(
        self, control: ControlPlane, *, timeout_s: float, device: Device = HOST, nccl: Opener | None = None
    ) -> None:
        """Collective: finds out what can carry units here; opens no stream.

        Args:
            control: the ranks.
            timeout_s: after this long a reduction that does not get on fails.
            device: where the gradients are.
            nccl: makes communicators between the ranks' devices; None = they go through the hosts' memory.
        """
        self._control, self._device = control, device
        self._transports: dict[Route, Transport] = {}  # those that exist, no stream of which need be open
        self._factory = TransportFactory(control, timeout_s=timeout_s, device=device, nccl=nccl)
        self._limits = StreamLimits(control)
        self._factory.shares_memory = nccl is None and max(control.local_sizes) > 1 and self._try_sharing()
        for route in self.routes:
            self._make_if_possible(route)

    def _try_sharing(self) -> bool:
        try:
            share_memory(self._control, 1)
        except TransportError as err:
            self._do_without_sharing(err)
            return False
        return True

    def _make_if_possible(self, route: Route) -> None:
        """Collective."""
        try:
            self._transports[route] = self._factory.make(route)
        except TransportError as err:
            self._limits.refuse(route)
            if self._control.rank == 0:
                logger.warning("%s %s cannot be used: %s", route[0].value, route[1].value, err)

    def _do_without_sharing(self, error: TransportError) -> None:
        if self._control.rank == 0:
            logger.warning("%s; MPI or Gloo carry gradients within the nodes, too", error)
        self._factory.shares_memory = False
        for route in [route for route in self._transports if route[0] is TransportKind.STAGED]:  # over shared memory
            self._transports.pop(route).close()
            self._limits.opened.pop(route, None)
            self._make_if_possible(route)

    @property
    def device(self) -> Device:
        """Where the gradients are."""
        return self._device

    @property
    def routes(self) -> tuple[Route, ...]:
        """What a plan may use here, the best guess first; routes that have turned out not to open are left out."""
        return tuple(route for route in self._factory.routes if self._limits.is_possible(route))

    def max_streams(self, routes: Sequence[Route] | None = None) -> int:
        """The largest number of streams that every one of these routes (all) offers.

        As many as a transport has, fit into this process's descriptors on all ranks, and were not refused before.
        """
        return min(self._limit(route)[0] for route in routes or self.routes)

    def why_not_more(self, routes: Sequence[Route]) -> str:
        """What holds the first of these routes down, and which ones offer more streams, in words."""
        limits = {route: self._limit(route) for route in routes}
        lowest, reason = limits[routes[0]]
        more = sorted({f"{limit} on {route[0].value}" for route, (limit, _) in limits.items() if limit > lowest})
        return f"{reason}{'; with SIRTAKI_TRANSPORT set there can be ' if more else ''}{' and '.join(more)}"

    def _limit(self, route: Route) -> tuple[int, str]:
        return self._limits.limit(route, self._transports[route])

    def threads(self) -> tuple[int, ...]:
        """Thread allowances that every route offers; empty where there are none."""
        offers = [self._transports[route].threads for route in self.routes]
        return tuple(count for count in offers[0] if all(count in offer for offer in offers))

    def allocate(self, numel: int, dtype: torch.dtype) -> FlatBuffer:
        """Collective: a zeroed buffer of the same size on every rank that all routes can reduce."""
        if not self._device.streams:
            return self._allocate_on_host(numel, dtype)
        mirror = None
        if self._factory.pool is None:
            mirror = self._allocate_on_host(numel, dtype)
            self._device.pin(mirror.tensor)
        return FlatBuffer(torch.zeros(numel, dtype=dtype, device=self._device.torch_device), mirror=mirror)

    def _allocate_on_host(self, numel: int, dtype: torch.dtype) -> FlatBuffer:
        if self._factory.shares_memory:
            try:
                regions = share_memory(self._control, numel * dtype.itemsize)
            except TransportError as err:
                self._do_without_sharing(err)
            else:
                peers = tuple(region.view(dtype) for region in regions)
                return FlatBuffer(peers[self._control.local_rank], peers)
        return FlatBuffer(torch.zeros(numel, dtype=dtype))

    def open_plan(self, plan: CommPlan) -> None:
        """Collective: opens the streams that the plan uses.

        Raises:
            PlanError: on all ranks, this job has no such route, or not as many streams.
            TransportError: on all ranks, they could not be opened. What was open before still is. From now on half of
                what could not be added is refused: a failure may take long.
        """
        for algorithm in sorted({unit.algorithm for unit in plan.units}, key=lambda kind: kind.value):
            route = (plan.transport, algorithm)  # in one order on all ranks: opening is collective
            if route not in self.routes:
                raise PlanError(
                    f"{plan.transport.value} with the {algorithm.value} algorithm is not possible here; "
                    f"possible: {', '.join(f'{kind.value} {how.value}' for kind, how in self.routes)}"
                )
            limit, reason = self._limit(route)
            if plan.streams > limit:
                raise PlanError(f"at most {limit} streams are possible, not {plan.streams}: {reason}")
            try:
                self._open(route, streams_of(plan, algorithm))
            except TransportError as err:
                self._limits.note_failure(route, plan.streams)
                raise TransportError(
                    f"{plan.streams} streams of {plan.transport.value} cannot be opened: {err}"
                ) from err

    def _open(self, route: Route, streams: Sequence[StreamSpec]) -> None:
        transport = self._transports[route]
        have, want = self._limits.opened.get(route, 0), 1 + max(stream.number for stream in streams)
        if want > have:
            # What all ranks can have at the same time they can open; a failure in the middle is slow and hard on Gloo.
            with held(transport.stream_cost * (want - have)) as problem:
                self._control.agree_on_success(problem)
        transport.open_streams(streams)
        self._limits.opened[route] = max(have, want)

    def keep_only(self, plans: Sequence[CommPlan]) -> None:
        """Collective, between iterations: closes what only other plans need, if it takes time or a GPU's memory."""
        self._control.agree_on_success("")  # nothing is in flight any more on any rank
        for (kind, algorithm), transport in self._transports.items():
            specs = [spec for plan in plans if plan.transport is kind for spec in streams_of(plan, algorithm)]
            wanted = 1 + max((spec.number for spec in specs), default=-1)
            if self._limits.opened.get((kind, algorithm), 0) > wanted and not isinstance(transport, NcclTransport):
                transport.keep(wanted)
                self._limits.opened[kind, algorithm] = wanted
        if self._factory.pool is not None:
            keys = [
                key
                for (_, algorithm), transport in self._transports.items()
                if isinstance(transport, NcclTransport)
                for plan in plans
                for key in transport.keys(streams_of(plan, algorithm))
            ]
            self._device.synchronise()  # what is closed must have nothing in flight
            self._factory.pool.keep_only(keys)

    def all_reduce(
        self,
        buffer: FlatBuffer,
        start: int,
        stop: int,
        *,
        route: Route,
        stream: int,
        threads: int | None = None,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
    ) -> Work:
        """Reduces a range over a route whose streams are open; see `Transport.all_reduce`."""
        return self._transports[route].all_reduce(
            buffer, start, stop, stream=StreamSpec(stream, threads), op=op, scale=scale
        )

    def exchange(
        self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, *, route: Route, stream: int
    ) -> Work:
        """Exchanges parcels over a flat route between hosts' memories whose streams are open; see `Exchanger`."""
        transport = cast(Exchanger, self._transports[route])  # as all of these are
        return transport.exchange(outgoing, parcels, incoming, stream=StreamSpec(stream))

    def all_reduce_plan(self, buffer: FlatBuffer, plan: CommPlan, *, scale: float = 1.0) -> list[Work]:
        """Adds up all units of a plan whose streams are open, all submitted at once; see `Transport.all_reduce`."""
        return [
            self.all_reduce(
                buffer,
                unit.start,
                unit.stop,
                route=(plan.transport, unit.algorithm),
                stream=unit.stream,
                threads=unit.threads,
                scale=scale,
            )
            for unit in plan.units
        ]

    def wait_for(self, works: Sequence[Work], *, interrupted: Callable[[], bool] | None = None) -> bool:
        """Waits for all of them, and looks now and then whether the job has failed.

        Args:
            works: in the order in which they were submitted.
            interrupted: asked now and then whether to stop waiting.

        Returns:
            False if it was interrupted.

        Raises:
            CommError: a reduction failed, or the job did.
        """
        try:
            for work in works:
                while not work.wait(WAIT_SLICE_S):
                    self._control.failures.check()
                    if interrupted and interrupted():
                        return False
        except CommError as err:
            # A rank that drops its optimizer and leaves closes its connections first.
            raise self._control.failures.cause_of(err) from None
        return True

    def check(self) -> None:
        """Raises what a transport has found out by itself; any thread may ask.

        Raises:
            CommError: naming what has failed.
        """
        if self._factory.pool is not None:
            self._factory.pool.check()

    def release(self) -> bool:
        """Ends threads and connections of this rank; what only all ranks together can close is left to `close`.

        Returns:
            False if a thread does not end, since it waits for other ranks.
        """
        ended = [transport.close() for transport in self._transports.values()]
        self._transports.clear()
        return all(ended)

    def close(self) -> None:
        """Collective: closes all transports; may be called twice."""
        self.release()
        if self._factory.pool is not None and self._control.failures.error is None:
            self._device.synchronise()  # what is closed must have nothing in flight
            self._factory.pool.close()


def streams_of(plan: CommPlan, algorithm: Algorithm) -> list[StreamSpec]:
    """What the plan's units of this algorithm travel on."""
    return list(
        dict.fromkeys(StreamSpec(unit.stream, unit.threads) for unit in plan.units if unit.algorithm is algorithm)
    )
