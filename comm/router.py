"""All the ways by which units can travel in this job, opened when a plan first needs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from sirtaki.errors import CommError, PlanError, TransportError

from .control.failure import WAIT_SLICE_S
from .device import HOST, Device
from .nccl_streams.communicators import Opener
from .nccl_streams.nccl import NcclTransport
from .plan import Algorithm, CommPlan, Route, TransportKind
from .stream_limits import StreamLimits
from .transport_factory import TransportFactory
from .transports.contract import Exchanger, FlatBuffer, ReduceOp, StreamSpec, Transport, Work
from .transports.node_memory import share_memory
from .transports.parcels import Parcels
from .transports.resources import held

if TYPE_CHECKING:
    from .control.plane import ControlPlane

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
