"""What carries the large tensors of one process group: streams between its ranks.

They are opened when the first tensor comes, as a group that only tells small things needs none. A thread does that, and
drives what nobody waits for, so that submitting never waits for other ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import torch

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import WAIT_SLICE_S, fresh, poll_until
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import Algorithm, CommPlan, Route, TransportKind, Unit
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import raise_descriptor_limit
from sirtaki.comm.units import TensorReduction, UnitPipeline
from sirtaki.engine.tuning.plans import default_knobs, knob_space
from sirtaki.errors import CommError
from sirtaki.settings import Settings

logger = logging.getLogger(__name__)

MIB = 1024 * 1024

TYPICAL_BYTES = 25 * MIB
"""Units are as large as would be best for a tensor of this size, as DDP's buckets have it."""

SLOT_BYTES = 2 * MIB
SLOTS = 4
"""The window in shared memory. Small slots stay in the processor's cache between the ranks that read and write them."""

LEAVE_S = 5.0
"""How long ranks that destroy a group wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What is there once the lanes are open."""

    router: Router
    pipeline: UnitPipeline


class GroupLanes:
    """The lanes of one process group; every rank submits the same tensors in the same order."""

    def __init__(self, ranks: Communicator, *, settings: Settings, timeout_s: float) -> None:
        """Opens nothing.

        Args:
            ranks: of the group; ends with the lanes.
            settings: of this process.
            timeout_s: how long streams wait for the others.
        """
        self._ranks, self._settings, self._timeout_s = ranks, settings, timeout_s
        self._opened: _Opened | None = None
        self._error: CommError | None = None
        self._backlog: deque[TensorReduction] = deque()  # of what came before they were open
        self._lock = threading.Lock()
        self._business = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, reduction: TensorReduction, *, awaited: bool) -> None:
        """Starts it; never blocks on other ranks.

        Args:
            reduction: of one tensor.
            awaited: `finish` follows at once, so that no other thread need be woken.

        Raises:
            CommError: the group has failed.
        """
        with self._lock:
            if self._error is not None:
                raise fresh(self._error)
            if self._opened is None:
                self._backlog.append(reduction)
                self._start()
                return
            self._opened.pipeline.submit(reduction)
        if not awaited:
            self._business.set()

    def drive(self) -> None:
        """From now on what has been submitted gets on though nobody waits for it."""
        self._business.set()

    def finish(self, reduction: TensorReduction, timeout_s: float | None = None) -> bool:
        """Blocks until it is done; False if the time is up.

        Raises:
            CommError: it has failed.
        """
        while self._opened is None and not reduction.is_done():
            slice_s = WAIT_SLICE_S if timeout_s is None else min(timeout_s, WAIT_SLICE_S)
            reduction.wait(slice_s)
            if timeout_s is not None and (timeout_s := timeout_s - slice_s) <= 0:
                return False
        if self._opened is not None:
            return self._opened.pipeline.finish(reduction, timeout_s)
        reduction.check()
        return True

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sirtaki-group", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            opened = self._open()
        except Exception as err:  # whatever it is, those who wait must hear of it
            self._fail(err if isinstance(err, CommError) else CommError(f"no streams for this process group: {err}"))
            return
        with self._lock:
            self._opened = opened
            with suppress(CommError):  # which those hear of who wait
                while self._backlog:
                    opened.pipeline.submit(self._backlog.popleft())
        opened.pipeline.drain()
        while not self._closing:
            self._business.wait()
            self._business.clear()
            opened.pipeline.drain()

    def _open(self) -> _Opened:
        """Collective."""
        settings, ranks = self._settings, self._ranks
        raise_descriptor_limit()
        # Nodes that are pretended, to try hierarchies, may not fit into this group.
        pretended = settings.local_size if ranks.size % (settings.local_size or 1) == 0 else None
        control = ControlPlane(ranks, local_size=pretended, interface=settings.gloo_interface)
        router = Router(control, timeout_s=self._timeout_s)
        slots = router.allocate(SLOTS * SLOT_BYTES, torch.uint8)
        space = knob_space(router, settings, TYPICAL_BYTES)
        knobs = default_knobs(space, total_bytes=TYPICAL_BYTES, one_node=control.one_node)
        route = knobs.transport, knobs.algorithm
        router.open_plan(_one_unit_each(route, knobs.streams))
        if ranks.rank == 0:
            how, streams = f"{route[0].value} {route[1].value}", "stream" if knobs.streams == 1 else "streams"
            logger.info("a process group of %d ranks: %s, %d %s", ranks.size, how, knobs.streams, streams)
        through_slots = TransportKind.SHARED_MEMORY in route or Algorithm.HIERARCHICAL in route
        pipeline = UnitPipeline(
            router,
            control.failures,
            route=route,
            streams=knobs.streams,
            unit_bytes=SLOT_BYTES if through_slots else knobs.unit_bytes,
            slots=slots if through_slots else None,
        )
        return _Opened(router=router, pipeline=pipeline)

    def _fail(self, error: CommError) -> None:
        with self._lock:
            self._error = error
            failed, self._backlog = self._backlog, deque()
        for reduction in failed:
            reduction.finish(error)

    def close(self) -> None:
        """Collective in so far as ranks take leave of each other, for some seconds at most; what is under way fails.

        Ranks that wait for this one after that are told that it has left.
        """
        if self._closing:
            return
        self._closing = True
        destroyed = CommError("this process group has been destroyed")
        self._fail(destroyed)
        self._business.set()
        if (opened := self._opened) is not None:
            opened.pipeline.fail(destroyed)
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        self._take_leave()
        self._ranks.free()
        if opened is not None:
            opened.router.release()

    def _take_leave(self) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        with suppress(CommError):  # then all know already that the group has failed
            test = self._ranks.duplicate().barrier()
            poll_until(lambda: test() or time.monotonic() > deadline_s, failures=self._ranks.failures)
            if not test():
                self._ranks.abort(f"rank {self._ranks.rank} has destroyed the process group, and others use it")


def _one_unit_each(route: Route, streams: int) -> CommPlan:
    units = tuple(Unit(start=n, stop=n + 1, stream=n, algorithm=route[1]) for n in range(streams))
    return CommPlan(numel=streams, units=units, streams=streams, transport=route[0])
