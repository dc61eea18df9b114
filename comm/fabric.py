"""All the ways by which units can travel in this job, opened when a plan first needs them.

A module of its own because it is the one place that knows which routes exist here: a pair of transport and algorithm.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sirtaki.errors import CommError, PlanError

from .gloo_lanes import GlooLanes
from .mpi_lanes import MpiLanes
from .node_memory import share_memory
from .plan import Algorithm, CommPlan, TransportKind
from .shared_memory import SharedMemory
from .transport import FlatBuffer, ReduceOp, Transport, Work

if TYPE_CHECKING:
    from .control import ControlPlane

logger = logging.getLogger(__name__)

Route = tuple[TransportKind, Algorithm]


class Fabric:
    """The transports of one user of communication; two users that may interleave need a fabric each."""

    def __init__(self, control: ControlPlane, *, timeout_s: float) -> None:
        """Collective: finds out whether the ranks of a node can share memory."""
        self._control, self._timeout_s = control, timeout_s
        self._transports: dict[Route, Transport] = {}
        self._shares_memory = max(control.local_sizes) > 1 and self._try_sharing()

    def _try_sharing(self) -> bool:
        try:
            share_memory(self._control, 1)
        except CommError as err:
            logger.warning("%s; sockets are used within the nodes, too", err)
            return False
        return True

    @property
    def routes(self) -> tuple[Route, ...]:
        """What a plan may use here, the best guess first."""
        flat, tree = Algorithm.FLAT, Algorithm.HIERARCHICAL
        gloo, mpi = (TransportKind.GLOO, flat), (TransportKind.MPI, flat)
        if self._control.one_node:
            shared = ((TransportKind.SHARED_MEMORY, flat),) if self._shares_memory else ()
            return (*shared, mpi, gloo)
        if self._shares_memory:
            return ((TransportKind.GLOO, tree), gloo, mpi, (TransportKind.MPI, tree))
        return (gloo, mpi)

    def max_streams(self) -> int:
        """The largest number of streams that every route offers."""
        return min(self._transport(route).max_streams for route in self.routes)

    def allocate(self, numel: int, dtype: torch.dtype) -> FlatBuffer:
        """Collective: a zeroed buffer of the same size on every rank that all routes can reduce."""
        if not self._shares_memory:
            return FlatBuffer(torch.zeros(numel, dtype=dtype))
        regions = share_memory(self._control, numel * dtype.itemsize)
        peers = tuple(region.view(dtype) for region in regions)
        return FlatBuffer(peers[self._control.local_rank], peers)

    def open_plan(self, plan: CommPlan) -> None:
        """Collective: opens the streams that the plan uses.

        Raises:
            PlanError: this job has no such route, or not as many streams.
        """
        for algorithm in sorted({unit.algorithm for unit in plan.units}, key=lambda kind: kind.value):
            route = (plan.transport, algorithm)  # in one order on all ranks: opening is collective
            if route not in self.routes:
                raise PlanError(
                    f"{plan.transport.value} with the {algorithm.value} algorithm is not possible here; "
                    f"possible: {', '.join(f'{kind.value} {how.value}' for kind, how in self.routes)}"
                )
            transport = self._transport(route)
            if plan.streams > transport.max_streams:
                raise PlanError(
                    f"{plan.transport.value} has at most {transport.max_streams} streams, not {plan.streams}"
                )
            transport.open_streams(plan.streams)

    def _transport(self, route: Route) -> Transport:
        if route not in self._transports:
            self._transports[route] = self._make(route)
        return self._transports[route]

    def _make(self, route: Route) -> Transport:
        kind, algorithm = route
        control, hierarchical = self._control, algorithm is Algorithm.HIERARCHICAL
        if kind is TransportKind.SHARED_MEMORY:
            return SharedMemory(control)
        lanes: Transport
        if kind is TransportKind.GLOO:
            store, address = control.store()
            group = f"local{control.local_rank}" if hierarchical else "all"
            lanes = GlooLanes(
                store=store,
                prefix=lambda: f"{control.next_prefix()}/{group}",
                address=address,
                rank=control.cross_rank if hierarchical else control.rank,
                size=control.cross_size if hierarchical else control.size,
                timeout_s=self._timeout_s,
            )
        else:
            lanes = MpiLanes(control.duplicate_cross if hierarchical else control.duplicate)
        return SharedMemory(control, across=lanes) if hierarchical else lanes

    def all_reduce(
        self,
        buffer: FlatBuffer,
        start: int,
        stop: int,
        *,
        route: Route,
        stream: int,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
    ) -> Work:
        """Reduces a range over a route whose streams are open; see `Transport.all_reduce`."""
        return self._transports[route].all_reduce(buffer, start, stop, stream=stream, op=op, scale=scale)

    def close(self) -> None:
        """Closes all transports; may be called twice."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
