"""Which transports there can be in this job, and how each is made."""

from __future__ import annotations

import numpy as np

from .control.communicator import Backend
from .control.mpi import mpi_of
from .control.plane import ControlPlane
from .device import Device
from .nccl_streams.communicators import CommunicatorPool, Opener
from .nccl_streams.nccl import NcclHierarchicalTransport, NcclTransport
from .nccl_streams.staged import StagedTransport
from .plan import Algorithm, Route, TransportKind
from .transports.contract import Transport
from .transports.gloo import GlooTransport
from .transports.mpi import MpiTransport
from .transports.shared_memory import SharedMemoryTransport
from .transports.watchful_store import WatchfulStore

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
