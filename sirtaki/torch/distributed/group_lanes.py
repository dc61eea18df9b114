"""What carries the large tensors of one process group: streams between its ranks.

They are opened when the first tensor comes, as a group that only tells small things needs none. A thread does that, and
drives what nobody waits for, so that submitting never waits for other ranks. Gathers have streams and a thread of
their own, which are opened in the same way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import torch

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import WAIT_SLICE_S, fresh, poll_until
from sirtaki.comm.shards import ShardLanes, ShardWork
from sirtaki.comm.units import TensorOperation, TensorReduction, UnitPipeline
from sirtaki.engine.lanes import control_of, open_lanes, open_shards
from sirtaki.errors import CommError, PeerFaultError, PeerLostError
from sirtaki.settings import Settings

LEAVE_S = 5.0
"""How long ranks that destroy a group wait for each other."""


PIECE_BYTES = 2 << 20
"""Of a shard, at most: gathers go in such pieces, as ranks of one host have two slots of that size each."""

AT_ONCE = 4
"""So many gathers are under way before the first of them is waited for."""


class TensorGather(TensorOperation):
    """The tensors of all ranks on their way to each.

    Attributes:
        rows: get those of each rank, 1-d and contiguous.
        shard: this rank's, 1-d and contiguous; left alone until it is done. It may be its row.
    """

    def __init__(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, then: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(then)
        self.rows, self.shard = rows, shard
        self._works: list[ShardWork] = []

    def start(self, lanes: ShardLanes) -> None:
        """Collective: in pieces, of which earlier ones may be awaited."""
        step = PIECE_BYTES // self.shard.itemsize
        for low in range(0, self.shard.numel(), step):
            piece = slice(low, low + step)
            self._works.append(lanes.gather([row[piece] for row in self.rows], self.shard[piece]))

    def complete(self) -> None:
        """Waits for all pieces, and says that they are there."""
        for work in self._works:
            work.wait()
        self.finish()


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
        self._gathering = ranks.duplicate()
        self._shards: ShardLanes | None = None
        self._gathers: queue.SimpleQueue[TensorGather | None] = queue.SimpleQueue()
        self._gatherer: threading.Thread | None = None
        ranks.failures.listen(self._tell_of_fault)

    @property
    def fault(self) -> CommError | None:
        """What has gone wrong in the communication of any rank, which ends the group.

        That a rank has ended is none: what others do without it goes on.
        """
        error = self._ranks.failures.error
        return None if isinstance(error, PeerLostError) and not isinstance(error, PeerFaultError) else error

    def gather(self, gather: TensorGather) -> None:
        """Starts it; never blocks on other ranks.

        Raises:
            CommError: the group has failed.
        """
        with self._lock:
            if self._error is not None:
                raise fresh(self._error)
            gather.ended.add_done_callback(self._report)
            self._gathers.put(gather)
            if self._gatherer is None:
                self._gatherer = threading.Thread(target=self._run_gathers, name="sirtaki-group-gathers", daemon=True)
                self._gatherer.start()

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
            reduction.ended.add_done_callback(self._report)
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

    def finish(self, operation: TensorOperation, timeout_s: float | None = None) -> bool:
        """Blocks until it is done; False if the time is up.

        Raises:
            CommError: it has failed.
        """
        while not operation.ended.done():
            if self._pipeline is not None and isinstance(operation, TensorReduction):
                return self._pipeline.finish(operation, timeout_s)
            slice_s = WAIT_SLICE_S if timeout_s is None else min(timeout_s, WAIT_SLICE_S)
            operation.wait(slice_s)
            if timeout_s is not None and (timeout_s := timeout_s - slice_s) <= 0:
                return False
        operation.check()
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

    def _run_gathers(self) -> None:
        under_way: deque[TensorGather] = deque()
        try:
            lanes = self._shards = open_shards(
                control_of(self._gathering, self._settings), settings=self._settings, timeout_s=self._timeout_s
            )
            lanes.reserve(shard_bytes=PIECE_BYTES)
            while True:
                if under_way and (len(under_way) == AT_ONCE or self._gathers.empty()):
                    under_way[0].complete()
                    under_way.popleft()
                elif (gather := self._gathers.get()) is not None:
                    under_way.append(gather)
                    gather.start(lanes)
                else:
                    return
        except Exception as err:  # whatever it is, those who wait must hear of it
            error = err if isinstance(err, CommError) else CommError(f"this process group cannot gather: {err!r}")
            self._fail(error)
            for gather in under_way:
                gather.finish(error)

    def _report(self, ended: Future[None]) -> None:
        """What an operation has failed with has failed for the whole group; how it ends when that is closed is none."""
        if isinstance(error := ended.exception(), CommError) and not self._closing:
            self._ranks.failures.report(error)

    def _tell_of_fault(self) -> None:
        """The others wait for what this rank will not do any more: they hear of it at once, from whatever thread."""
        error = self._ranks.failures.error
        if not self._closing and not isinstance(error, PeerLostError):
            self._ranks.abort(f"rank {self._ranks.rank}: {error}", fault=True)

    def _fail(self, error: CommError) -> None:
        with self._lock:
            self._error = self._error or error
            failed: list[TensorOperation] = list(self._backlog)
            self._backlog.clear()
            while not self._gathers.empty():
                if (gather := self._gathers.get()) is not None:
                    failed.append(gather)
        for operation in failed:
            operation.finish(error)

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
        self._gathers.put(None)
        self._take_leave()
        self._ranks.failures.report(destroyed)  # which ends waits for what another rank has not begun
        for thread in (self._thread, self._gatherer):
            if thread is not None:
                thread.join(LEAVE_S)
        self._ranks.free()
        if pipeline is not None:
            pipeline.close(together=False)
        if self._shards is not None:
            self._shards.close()

    def _take_leave(self) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        with suppress(CommError):  # then all know already that the group has failed
            test = self._ranks.duplicate().barrier()
            poll_until(lambda: test() or time.monotonic() > deadline_s, failures=self._ranks.failures)
            if not test():
                self._ranks.abort(f"rank {self._ranks.rank} has destroyed the process group, and others use it")
