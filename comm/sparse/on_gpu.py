"""Sum the rows of sparse gradients of a GPU over ranks, over NCCL, without making the host wait for the GPU.

Only the GPU knows how many different rows a gradient has. The host knows the number of looked-up rows, which is an
upper limit. So the ranks exchange these numbers in host memory, and all messages have the size of the largest one:

    hook ─▶ submit ─▶ numbers of looked-up rows, over the worker's connections ─▶ launch, on one CUDA stream:
            sum duplicates, all-gather or all-reduce, sum over ranks

NCCL requires one order of launches on all ranks. So `launch` must follow the dense gradients of the iteration, and
precede those of the next one. It must also precede every wait of the host for this GPU, and every message of the host
after which another rank waits for its GPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from sirtaki.comm.control.failure import caused
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import wait_for_work
from sirtaki.comm.control.watchdog import PendingWait
from sirtaki.comm.device import Device, Event, copy_
from sirtaki.comm.nccl_streams.transport import Opener
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.router import Router
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.comm.sparse.worker import CountsWork, RowFormat, Rows, SparseWorker, wide
from sirtaki.comm.transports.contract import FlatBuffer, Parcels, StreamSpec, Work, scale_
from sirtaki.errors import CommError
from sirtaki.machine import free_in_forked_children
from sirtaki.measures import ring_bytes

ROUTE = (TransportKind.NCCL, Algorithm.FLAT)

GPU_PATHS = (SparsePath.GATHER, SparsePath.DENSE)
"""Algorithms that run on a GPU. The host would have to wait for the GPU to learn the sizes of the others' messages."""

PADDING = -1
"""Row index of the unused rows at the end of a message. Their values are zero."""

COUNTS = "counts"


class GpuWork(Work):
    """Sum over ranks of one parameter's sparse gradient on a GPU.

    Attributes:
        name: name of the parameter.
        gradient: sparse gradient of this rank. None once its sum was launched.
        form: number, size and dtype of the parameter's rows.
        path: algorithm. None = `GpuRows.launch` chooses the one in whose messages ranks receive fewer bytes.
        measures: True if the numbers of rows must be counted on the GPU, for `accesses`.
        rows: the sum, once launched. Its last rows may be zeros for an index that is there already, because the host
            does not know the number of different rows.
        looked_up: number of rows of all ranks, including duplicates; until the launch, of this rank.
    """

    rows: Rows

    def __init__(
        self, name: str, gradient: torch.Tensor, form: RowFormat, path: SparsePath | None, *, measures: bool
    ) -> None:
        """Create the work. `GpuRows.launch` launches it."""
        self.name, self.form, self.path, self.measures = name, form, path, measures
        self.gradient: torch.Tensor | None = gradient
        self.looked_up = 0
        self._end: Event | None = None
        self._numbers: torch.Tensor | None = None

    def wait(self, timeout_s: float) -> bool:
        """Make the current CUDA stream wait for the sum, and let it use the rows. Does not block the thread."""
        if self._end is not None:
            self._device.order_after(self._end)
            self._device.record_use(self.rows.indices, self.rows.values)
        return True

    def launch(self, router: Router, counts: Sequence[int], factor: float) -> Event | None:
        """Launch the sum over ranks, times `factor`, after the work on the current CUDA stream. Collective.

        Args:
            router: sends bytes over NCCL.
            counts: number of rows in each rank's gradient, including duplicates, by rank.
            factor: multiplies the sums.

        Returns:
            Event behind the sum. None if no rank has rows.
        """
        given, form, device, self._device = self.gradient, self.form, router.device, router.device
        self.gradient = None
        assert given is not None
        size, self.looked_up = len(counts), sum(counts)
        capacity, bound = min(max(counts), form.n_rows), min(self.looked_up, form.n_rows)
        if self.path is None:
            gathered_bytes = (size - 1) * form.parcel_bytes(capacity)
            dense = ring_bytes(form.n_rows * form.flagged_bytes, size) < gathered_bytes
            self.path = SparsePath.DENSE if dense else SparsePath.GATHER
        if not bound:
            empty = torch.empty(0, dtype=torch.int64, device=device.torch_device)
            self.rows = Rows(empty, torch.empty(0, form.width, dtype=form.dtype, device=device.torch_device))
            return None

        @torch.no_grad()
        def act() -> None:
            indices, values = given._indices()[0], given._values()
            device.record_use(indices, values)
            values = values.flatten(1) if values.dim() > 1 else values[:, None]
            if self.path is SparsePath.DENSE:
                self.rows, numbers = _dense(indices, values, form, bound, router)
            else:
                self.rows, numbers = _gather(
                    _compact(indices, values, capacity, device.torch_device), form, bound, size, router
                )
            device.launch(scale_, self.rows.values, factor)
            if self.measures:
                self._numbers = device.pinned(len(numbers), torch.int64)
                device.launch(copy_, self._numbers, torch.stack(list(numbers)))
            self._end = device.record_event()

        router.transports[ROUTE].run(act, stream=StreamSpec(0))
        return self._end

    def accesses(self) -> tuple[int, int]:
        """Wait for the GPU, and return the sum over ranks of the numbers of different rows, and their union's size."""
        if self._end is not None:
            self._device.wait_for(self._end)
        touched, union = (0, 0) if self._numbers is None else self._numbers.tolist()
        return touched, union


class GpuRows:
    """Sums the sparse gradients of a GPU over ranks: those of an iteration together, when all are there."""

    def __init__(
        self, control: ControlPlane, device: Device, opener: Opener, worker: SparseWorker, *, timeout_s: float
    ) -> None:
        """Open an NCCL communicator. Collective.

        Args:
            control: control plane of the participating ranks.
            device: GPU of this process.
            opener: opens NCCL communicators between these GPUs.
            worker: exchanges numbers of rows in host memory. The caller closes it.
            timeout_s: seconds after which an operation without progress fails.
        """
        self._control, self.device, self._worker = control.scope(), device, worker
        self._router = Router(self._control, timeout_s=timeout_s, device=device, nccl=opener)
        self._router.open_streams(ROUTE, 1)
        self._lock = free_in_forked_children(threading.Lock())
        # Events before and after the sums that the GPU may still execute. One element per iteration and parameter.
        self._in_flight: deque[tuple[Event, Event]] = deque()
        self._stalled: tuple[Event, float] | None = None
        self.begin([], factor=1.0)

    def begin(self, order: Sequence[str], *, factor: float) -> None:
        """Begin an iteration that sums the gradients of the parameters `order`, times `factor`. Not collective."""
        self._order, self._factor, self._works = list(order), factor, dict[str, GpuWork]()
        self._counts: CountsWork | None = None
        self._by_rank: list[list[int]] | None = None
        self._soon = self._launched = False
        self._worker.begin([COUNTS])

    def submit(self, work: GpuWork, n_rows: int) -> None:
        """Add a gradient with `n_rows` rows. After the last one, send the numbers of rows. Non-blocking."""
        self._works[work.name] = work
        work.looked_up = n_rows
        if len(self._works) == len(self._order):
            counts = [self._works[name].looked_up for name in self._order]
            self._counts = CountsWork(COUNTS, counts, self._counted)
            self._worker.submit(self._counts)

    def _counted(self, by_rank: list[list[int]]) -> None:
        """Store the ranks' numbers of rows. Called by the worker's thread."""
        with self._lock:
            self._by_rank = by_rank
            if self._soon:
                self._launch_all(own=False)

    def launch(self, interrupted: Callable[[], bool] | None) -> bool:
        """Launch all sums of the iteration, once every rank has submitted its gradients. Collective.

        All dense gradients of the iteration must be launched. Block until the other ranks have sent their numbers of
        rows, but not for the GPU.

        Returns:
            False if `interrupted` ended the wait.

        Raises:
            CommError: the sums could not be launched, or the job has failed.
        """
        assert self._counts is not None
        if not wait_for_work([self._counts], failures=self._control.failures, interrupted=interrupted, blame_s=None):
            return False
        with self._lock:
            self._launch_all(own=True)
        return True

    def launch_soon(self) -> None:
        """Launch all sums of the iteration as soon as every rank has submitted its gradients. Non-blocking.

        For a rank in `join()`, which launches no other NCCL operations then.
        """
        with self._lock:
            self._soon = True
            if self._by_rank is not None:
                self._launch_all(own=False)

    def _launch_all(self, *, own: bool) -> None:
        """Launch the sums. `own` = the gradients may be written by CUDA streams that autograd has used."""
        failures = self._control.failures
        failures.raise_if_failed()
        if self._launched:
            return
        self._launched = True
        assert self._by_rank is not None
        try:
            self.device.enter_thread()
            while self._in_flight and self.device.is_reached(self._in_flight[0][1]):
                self._in_flight.popleft()
            with self.device.beside() if own else nullcontext():
                computed = self.device.record_event()
                for counts, name in zip(zip(*self._by_rank, strict=True), self._order, strict=True):
                    end = self._works[name].launch(self._router, counts, self._factor)
                    if end is not None:
                        self._in_flight.append((computed, end))
        except Exception as err:
            # Report any error, because the GPUs of other ranks wait for the sums that this rank has not launched.
            failed = err
            if not isinstance(failed, CommError):
                failed = caused(CommError(f"failed to launch the sums of sparse gradients on the GPU: {err!r}"), err)
            failures.report(failed)
            raise failed from failed.__cause__

    def check(self) -> None:
        """Raise an error if the NCCL communicator has an asynchronous error. Thread-safe, non-blocking."""
        self._router.check()

    def stalled(self) -> PendingWait | None:
        """Return the oldest sum in flight if the GPU has computed the gradients, so it waits for other ranks.

        Thread-safe.
        """
        self.device.enter_thread()
        reached = self.device.is_reached
        late = next((one for one in list(self._in_flight) if not reached(one[1])), None)
        if late is None or not reached(late[0]):
            self._stalled = None
            return None
        if self._stalled is None or self._stalled[0] is not late[1]:
            self._stalled = late[1], time.monotonic()
        return PendingWait(what="the rows of sparse gradients", since_s=self._stalled[1])

    def wait_for_device(self) -> None:
        """Block until the GPU has done all queued work.

        Raises:
            CommError: the job has failed. All gradients and parameters of the last iterations are undefined.
        """
        self._router.wait_for_device()

    def accesses(self, works: Sequence[GpuWork]) -> list[tuple[int, int]]:
        """Wait until the GPU has summed the rows of an earlier iteration, and return `GpuWork.accesses` of each.

        Raises:
            CommError: the job has failed.
        """
        with self._control.failures.raising():
            return [work.accesses() for work in works]

    def close(self) -> None:
        """End this rank's use of the communicator. Not collective. The worker must be closed before."""
        self._router.release()
        self._control.release(self._router.close)


def _distinct(indices: torch.Tensor, capacity: int, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the different values of `indices`, ascending, and the position of each index among them.

    The first result has `capacity` elements. Those that are not needed are `PADDING`.
    """
    ordered, order = indices.sort(stable=True)
    begins = torch.ones_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    rank = begins.cumsum(0).sub_(1)
    position = torch.empty_like(order).scatter_(0, order, rank)
    present = torch.full((capacity,), PADDING, dtype=torch.int64, device=place)
    return present.scatter_(0, rank, ordered), position


def _compact(indices: torch.Tensor, values: torch.Tensor, capacity: int, place: torch.device) -> Rows:
    """Sum rows with equal indices, in the dtype of `wide`, and pad the rows to `capacity`."""
    present, position = _distinct(indices, capacity, place)
    total = torch.zeros(capacity, values.shape[1], dtype=wide(values.dtype), device=place)
    total.index_add_(0, position, values.to(total.dtype))
    return Rows(present, total.to(values.dtype))


def _gather(
    rows: Rows, form: RowFormat, bound: int, size: int, router: Router
) -> tuple[Rows, tuple[torch.Tensor, torch.Tensor]]:
    """All-gather padded rows, and sum them in the order of ranks, so that the sums are equal on all ranks. Collective.

    Returns:
        `bound` rows, the last ones zeros for the last index, and the numbers of rows (see `GpuWork.accesses`).
    """
    n, parcel, place = len(rows), form.pack(rows), router.device.torch_device
    incoming = parcel.new_empty(size * parcel.numel())
    work = router.exchange(FlatBuffer(parcel), Parcels.to_all([parcel.numel()] * size), incoming, route=ROUTE, stream=0)
    router.wait_for([work])
    parts = [form.unpack(part, n) for part in incoming.view(size, -1)]
    indices = torch.cat([part.indices for part in parts])
    is_row = indices >= 0
    # Padding gets the largest index, so that it is after all rows.
    present, position = _distinct(torch.where(is_row, indices, form.n_rows), bound + 1, place)
    total = torch.zeros(bound + 1, form.width, dtype=wide(form.dtype), device=place)
    for part, positions in zip(parts, torch.split(position, n), strict=True):
        total.index_add_(0, positions, part.values.to(total.dtype))
    is_present = (present >= 0) & (present < form.n_rows)
    last = torch.where(is_present, present, PADDING).amax()
    summed = Rows(torch.where(is_present, present, last)[:bound], total[:bound].to(form.dtype))
    return summed, (is_row.sum(), is_present.sum())


def _dense(
    indices: torch.Tensor, values: torch.Tensor, form: RowFormat, bound: int, router: Router
) -> tuple[Rows, tuple[torch.Tensor, torch.Tensor]]:
    """Sum all rows of the parameter by one all-reduce, with zeros for missing rows. Collective.

    Returns:
        `bound` rows, the last ones zeros for the last index, and the numbers of rows (see `GpuWork.accesses`).
    """
    n, width, place = form.n_rows, form.width, router.device.torch_device
    buffer = torch.zeros(n * (width + 1), dtype=form.dtype, device=place)
    summed, touched = buffer[: n * width].view(n, width), buffer[n * width :]
    if wide(form.dtype) is form.dtype:
        summed.index_add_(0, indices, values)
    else:
        total = torch.zeros(n, width, dtype=wide(form.dtype), device=place)
        summed.copy_(total.index_add_(0, indices, values.to(total.dtype)))
        del total  # free the memory before the all-reduce
    touched.index_fill_(0, indices, 1)
    flat = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    router.wait_for([router.all_reduce(FlatBuffer(flat), 0, flat.numel(), route=ROUTE, stream=0)])
    times = touched.real if touched.is_complex() else touched
    is_present = (times > 0).to(torch.uint8)
    order = is_present.sort(descending=True, stable=True).indices[:bound]
    union = is_present.sum()
    last = order.index_select(0, (union - 1).view(1))
    places = torch.where(torch.arange(len(order), device=place) < union, order, last)
    return Rows(places, summed.index_select(0, order)), (times.double().sum().long(), union)
