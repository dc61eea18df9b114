"""Adds up sparse gradients in a thread of its own, in one order on all ranks, beside the rest of the backward pass."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sirtaki.comm import recorder, timeline
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.transports.mpi import ThreadWork
from sirtaki.errors import CommError

from .lanes import Closed, SparseLanes
from .paths import Reduced, reduce_rows
from .plan import SparsePlan
from .rows import RowFormat, Rows

END_S = 2.0
"""How long the thread may take to end."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseTask:
    """The rows of one parameter on this rank, and how they are to be added up."""

    name: str
    rows: Rows
    form: RowFormat
    plan: SparsePlan


class SparseWork(ThreadWork):
    """The sum of one parameter's rows, under way.

    Attributes:
        submitted_s: when the rows came, as of `time.perf_counter`.
        reduced: the sum, once it is done.
    """

    reduced: Reduced

    def __init__(self) -> None:
        super().__init__()
        self.submitted_s = time.perf_counter()

    @property
    def span_s(self) -> float:
        """How long it took from when its turn came; after the end."""
        return self.done_s - self.begun_s


class SparseWorker:
    """Performs the reductions of each iteration in an order that is fixed before it begins.

    What comes early waits for what is before it in the order: no rank tells another what it has.
    """

    def __init__(self, lanes: SparseLanes, failures: FailureBoard, *, prefix: str = "") -> None:
        """Starts the thread; the lanes are its own until `close`. `prefix`: of operations' names in recordings."""
        self._lanes, self._failures, self._prefix = lanes, failures, prefix
        self._lock = threading.Lock()
        self._order: list[str] = []
        self._next = 0
        self._early: dict[str, tuple[SparseTask, SparseWork]] = {}
        self._tasks: queue.SimpleQueue[tuple[SparseTask, SparseWork] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sirtaki-sparse", daemon=True)
        self._thread.start()

    def begin(self, order: Sequence[str]) -> None:
        """Between iterations: these are reduced in the next one, in this order, the same on all ranks."""
        with self._lock:
            self._order, self._next = list(order), 0
            self._early.clear()

    def submit(self, task: SparseTask) -> SparseWork:
        """Any thread: starts a reduction once all before it in the order are there; never waits."""
        work = SparseWork()
        with self._lock:
            self._early[task.name] = task, work
            while self._next < len(self._order) and self._order[self._next] in self._early:
                self._tasks.put(self._early.pop(self._order[self._next]))
                self._next += 1
        return work

    def _run(self) -> None:
        failed: CommError | None = None
        while (given := self._tasks.get()) is not None:
            task, work = given
            if failed is not None:  # streams are out of step
                work.finish(failed)
                continue
            work.begun_s = time.perf_counter()
            try:
                work.reduced = reduce_rows(task.plan, task.rows, task.form, self._lanes)
            except Closed:
                return
            except Exception as err:  # whatever it is, those who wait must hear of it, and the other ranks, too
                failed = (
                    err if isinstance(err, CommError) else CommError(f"rows of {task.name} are not added up: {err!r}")
                )
                if failed is not err:
                    self._failures.report(failed)
                work.finish(failed)
            else:
                self._tell(task, work)
                work.finish()

    def _tell(self, task: SparseTask, work: SparseWork) -> None:
        """Tells the timeline and the recorder, if there are any, of a reduction that has just ended."""
        done_s, name = time.perf_counter(), f"{self._prefix}{task.name}"
        if (trace := timeline.active()) is not None:
            trace.span(f"sparse {self._prefix}".strip(" ."), name, work.begun_s, done_s, path=task.plan.path.value)
        if (recording := recorder.active()) is not None:
            recording.operation(
                recorder.TracedOperation(
                    name=name,
                    kind="SPARSE",
                    submitted_s=work.submitted_s,
                    agreed_s=work.begun_s,
                    done_s=done_s,
                    n_bytes=task.form.parcel_bytes(len(task.rows)),
                )
            )

    def close(self) -> None:
        """Ends the thread, whatever it waits for. Not collective, once."""
        self._lanes.stop()
        self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)
        if not self._thread.is_alive():
            self._lanes.close()
