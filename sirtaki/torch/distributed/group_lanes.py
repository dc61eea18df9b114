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

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import WAIT_SLICE_S, fresh, poll_until
from sirtaki.comm.units import TensorReduction, UnitPipeline
from sirtaki.engine.lanes import open_lanes
from sirtaki.errors import CommError
from sirtaki.settings import Settings

logger = logging.getLogger(__name__)

LEAVE_S = 5.0
"""How long ranks that destroy a group wait for each other."""


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
        self._pipeline: UnitPipeline | None = None
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
            if self._pipeline is None:
                self._backlog.append(reduction)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="sirtaki-group", daemon=True)
                    self._thread.start()
                return
            self._pipeline.submit(reduction)
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
        while self._pipeline is None and not reduction.ended.done():
            slice_s = WAIT_SLICE_S if timeout_s is None else min(timeout_s, WAIT_SLICE_S)
            reduction.wait(slice_s)
            if timeout_s is not None and (timeout_s := timeout_s - slice_s) <= 0:
                return False
        if self._pipeline is not None:
            return self._pipeline.finish(reduction, timeout_s)
        reduction.check()
        return True

    def _run(self) -> None:
        try:
            pipeline = open_lanes(self._ranks, settings=self._settings, timeout_s=self._timeout_s)
        except Exception as err:  # whatever it is, those who wait must hear of it
            self._fail(err if isinstance(err, CommError) else CommError(f"no streams for this process group: {err}"))
            return
        with self._lock:
            self._pipeline = pipeline
            with suppress(CommError):  # which those hear of who wait
                while self._backlog:
                    pipeline.submit(self._backlog.popleft())
        pipeline.drain()
        while not self._closing:
            self._business.wait()
            self._business.clear()
            pipeline.drain()

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
        if (pipeline := self._pipeline) is not None:
            pipeline.fail(destroyed)
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        self._take_leave()
        self._ranks.free()
        if pipeline is not None:
            pipeline.close(together=False)

    def _take_leave(self) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        with suppress(CommError):  # then all know already that the group has failed
            test = self._ranks.duplicate().barrier()
            poll_until(lambda: test() or time.monotonic() > deadline_s, failures=self._ranks.failures)
            if not test():
                self._ranks.abort(f"rank {self._ranks.rank} has destroyed the process group, and others use it")
