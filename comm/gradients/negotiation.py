"""Negotiation between ranks about which gradients are ready on all of them, while the launch order is unknown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sirtaki.errors import CommError
from sirtaki.machine import free_in_forked_children

from .. import timeline
from ..control.communicator import Backend, Communicator, Op, Test
from ..control.failure import FailureBoard, caused
from ..control.waiting import start_thread, wait_for, wait_for_work

Bits = npt.NDArray[np.bool_]

Interrupted = Callable[[], bool]
"""Function that returns whether to stop waiting. Called repeatedly while a thread waits."""

_given_up: list[Test] = []
"""Unfinished all-reduces that other ranks have not started. They are kept, because MPI still uses their arrays."""


def agree(
    bits: Bits, *, comm: Communicator, failures: FailureBoard, closing: Callable[[], bool] = lambda: False
) -> Bits | None:
    """Return which of the bits are set on every rank, `(n,)`; None if `closing` has ended the wait. Collective."""
    packed = np.packbits(bits)
    test = comm.all_reduce(packed, Op.AND)
    wait_for(lambda: test() or closing(), failures=failures)
    if not test():
        if comm.backend is Backend.MPI:
            _given_up.append(test)
        return None
    return np.unpackbits(packed, count=bits.size).view(np.bool_)


class ReadinessNegotiation:
    """Thread that determines during a backward pass which gradients are ready on all ranks.

    Used on the CPU, while the order in which gradients become ready is measured. The ranks repeatedly all-reduce one
    bit for each gradient (a round). A rank joins a round once `granularity_bytes` of its gradients have become ready
    since the last round, or once its backward pass has ended. All ranks get the same results, so all stop after the
    round in which every gradient is agreed: known to be ready on all ranks.
    """

    def __init__(self, comm: Communicator, failures: FailureBoard) -> None:
        """Store the communicator. The thread starts with the first backward pass."""
        self._comm, self._failures = comm, failures
        self._wake = free_in_forked_children(threading.Condition())
        self._thread: threading.Thread | None = None
        self._bits: Bits = np.zeros(0, dtype=np.bool_)
        self._sizes_bytes: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._granularity_bytes = 0
        self._fresh_bytes = 0
        self._ended = False
        self._closing = self._left_open = False
        self._on_agreed: Callable[[list[int]], None] | None = None
        self._done = threading.Event()

    def begin(
        self, sizes_bytes: npt.NDArray[np.int64], *, granularity_bytes: int, on_agreed: Callable[[list[int]], None]
    ) -> None:
        """Begin the negotiation of one backward pass. Non-blocking.

        Args:
            sizes_bytes: size of each gradient, `(n_gradients,)`.
            granularity_bytes: bytes of newly ready gradients after which this rank joins a round (an all-reduce of the
                ready bits).
            on_agreed: called by the thread with the indices of gradients that are now known to be ready on all ranks,
                ascending.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sirtaki-negotiation", daemon=True)
            start_thread(self._thread)
        self._done.clear()
        with self._wake:
            self._sizes_bytes, self._granularity_bytes = sizes_bytes, granularity_bytes
            self._bits = np.zeros(sizes_bytes.size, dtype=np.bool_)
            self._fresh_bytes, self._ended, self._on_agreed = 0, False, on_agreed

    def set_ready(self, index: int) -> None:
        """Mark gradient `index` of this rank as ready, once it is in the flat buffer. Thread-safe, non-blocking."""
        with self._wake:
            self._bits[index] = True
            self._fresh_bytes += int(self._sizes_bytes[index])
            # Treat the last gradient as the end of the pass, and do not wait for `end`: the training thread may call
            # `step()` of another optimizer, and wait in it, before it calls `end`.
            self._ended = bool(self._bits.all())
            if self._worth_a_round():
                self._wake.notify()

    def end(self) -> None:
        """Mark all gradients of this rank as ready, because its backward pass has ended. Non-blocking."""
        with self._wake:
            self._bits[:] = True
            self._ended = True
            self._wake.notify()

    def wait(self, interrupted: Callable[[], bool] | None = None) -> bool:
        """Block until every gradient is known to be ready on all ranks. Return False if `interrupted` ends the wait.

        Raises:
            CommError: the job has failed.
        """
        if not wait_for_work([self._done], failures=self._failures, interrupted=interrupted):
            return False
        self._failures.check()
        return True

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(
                        lambda: self._closing or (self._on_agreed is not None and self._worth_a_round())
                    )
                if self._closing:
                    return
                self._negotiate()
                self._done.set()
        except CommError as err:
            self._failures.report(err)
        except Exception as err:  # report any error, because the training thread waits for the result
            self._failures.report(caused(CommError(f"the negotiation of gradients failed: {err!r}"), err))
        finally:
            self._done.set()

    def _worth_a_round(self) -> bool:
        return self._ended or self._fresh_bytes >= self._granularity_bytes

    def _negotiate(self) -> None:
        """Repeat the all-reduce of ready bits until all gradients of this pass are known to be ready on all ranks."""
        on_agreed = self._on_agreed
        assert on_agreed is not None
        agreed = np.zeros(self._bits.size, dtype=np.bool_)
        while not agreed.all():
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._worth_a_round())
                if self._closing:
                    return
                bits = self._bits.copy()
                self._fresh_bytes = 0
            begin_s = time.perf_counter()
            result = agree(bits, comm=self._comm, failures=self._failures, closing=lambda: self._closing)
            if result is None:
                self._left_open = True
                return
            if (trace := timeline.current) is not None:
                newly = int((result & ~agreed).sum())
                trace.span("negotiation", "round", begin_s, time.perf_counter(), marked=int(bits.sum()), agreed=newly)
            if fresh := np.flatnonzero(result & ~agreed).tolist():
                on_agreed(fresh)
            agreed |= result
        self._on_agreed = None

    def close(self) -> bool:
        """End the thread. Return False if an all-reduce that other ranks did not join still uses the communicator."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout=2.0)
        return not (self._thread.is_alive() or self._left_open)
