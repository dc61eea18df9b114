"""Eager operations on the tensors of a GPU, over one NCCL communicator, on one CUDA stream.

NCCL requires that all ranks launch the operations of all communicators of a GPU in the same order. The training thread
launches gradients. So an eager operation is launched over NCCL only if the training thread of each rank waits for a
result, and if all ranks have launched the same units (buckets) of the same gradient pipelines (`Rounds` agrees on
both). A rank that reduces gradients with other ranks than these is in another pipeline. All other operations use host
memory, which needs no order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch

from sirtaki.comm.collectives.operations import Batch, Ranks, Signature, Tensors, bytes_of, perform, resolved
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.watchdog import PendingWait
from sirtaki.comm.device import Device, Event, add_nccl_owner
from sirtaki.comm.nccl_streams.transport import LAUNCH_LOCK, Group
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.errors import CommError
from sirtaki.machine import free_in_forked_children

MAX_IN_FLIGHT = 4096
"""Largest number of launched operations that are stored, to report to the watchdog for which one the GPU waits."""


class NcclRanks(Ranks):
    """Participating ranks whose tensors are on GPUs, and their NCCL communicator (`is_open` until it is freed).

    Methods that move tensors launch NCCL operations on the current CUDA stream. Sizes are exchanged in host memory.
    """

    number = launched = 0  # no gradient pipeline uses the communicator

    def __init__(self, host: Ranks, group: Group, device: Device, control: ControlPlane) -> None:
        """Take ownership of `group`, the NCCL communicator of these ranks, and of its control plane `control`."""
        super().__init__(host.comm, host.failures)
        self._group, self._device, self._control = group, device, control
        self._stream = device.make_stream()
        self._in_flight: deque[tuple[str, Sequence[Event], Event]] = deque(maxlen=MAX_IN_FLIGHT)
        self._stalled: tuple[Event, float] | None = None
        self._closing, self.is_open = free_in_forked_children(threading.Lock()), True
        add_nccl_owner(self)

    @staticmethod
    def can_perform(signature: Signature) -> bool:
        """Return whether NCCL can run the operation on GPU tensors. It has no product of complex numbers."""
        return signature.device == "cuda" and not (
            signature.op == ReduceOp.PRODUCT.value and any(dtype.startswith("complex") for dtype in signature.dtypes)
        )

    def launch(self, batch: Batch, written: Sequence[Event], where: str) -> tuple[list[Tensors], Event]:
        """Launch operations after the events `written`. Collective. Does not wait for the GPU.

        Args:
            batch: operations to launch together.
            written: CUDA events behind the kernels that write the inputs.
            where: text that names the process set in messages to the user. "" = all ranks.

        Returns:
            The results of each operation, and the CUDA event behind the kernels that write them.
        """
        device = self._device
        device.enter_thread()
        with device.on(self._stream):
            for event in written:
                device.order_after(event)
            results = perform(batch, self)
            for _, tensors in batch:
                for tensor in tensors:
                    if tensor.is_cuda:  # the caller may free the tensor before the GPU reads it
                        tensor.record_stream(self._stream)
            end = device.record_event()
        while self._in_flight and device.is_reached(self._in_flight[0][-1]):
            self._in_flight.popleft()
        self._in_flight.append((f"operation {batch[0][0].name!r}{where}", written, end))
        return results, end

    def check(self) -> None:
        """Raise an error if the NCCL communicator has an asynchronous error. Thread-safe.

        Raises:
            CommError: the communicator has failed.
        """
        if error := self._group.error():
            raise CommError(
                f"the NCCL communicator of eager operations failed: {error}; set NCCL_DEBUG=INFO and run again for "
                "details"
            )

    def stalled(self) -> PendingWait | None:
        """Return the oldest operation in flight if its inputs are ready, so it waits for other ranks. Thread-safe."""
        self._device.enter_thread()
        reached = self._device.is_reached
        late = next((one for one in list(self._in_flight) if not reached(one[-1])), None)
        if late is None or not all(map(reached, late[1])):
            self._stalled = None
            return None
        if self._stalled is None or self._stalled[0] is not late[-1]:
            self._stalled = late[-1], time.monotonic()
        return PendingWait(what=late[0], since_s=self._stalled[1])

    def wait_for_device(self) -> None:
        """Block until the GPU has done all queued work.

        Raises:
            CommError: the job has failed.
        """
        with self.failures.raising():
            self._device.synchronise()

    def abort(self) -> int:
        """End pending operations, and free the NCCL communicator. Not collective. Thread-safe.

        Returns:
            1 if the communicator was open, otherwise 0.
        """
        with self._closing:
            if not self.is_open:
                return 0
            self.is_open = False
        with suppress(RuntimeError):  # the communicator may have failed already
            self._group.abort()
        return 1

    def close(self, *, together: bool) -> None:
        """Free the NCCL communicator if all ranks call this `together`. Otherwise, a GPU may still use it."""
        if not together:
            return
        try:
            self.wait_for_device()
        except CommError:  # the job has failed
            self.abort()
        with self._closing:
            was_open, self.is_open = self.is_open, False
        if was_open:
            self._group.close()
        self._control.close()

    # ── for `perform`, on the current CUDA stream ────────────────────────────────────────────────────────────────

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor with the values of `tensor`, on the GPU of the communicator."""
        tensor = resolved(tensor)
        return (tensor.to(self._device.torch_device) if tensor.is_cuda else tensor).contiguous()

    def deliver(self, tensors: Sequence[torch.Tensor], results: Tensors) -> Tensors:
        """Return the results on the devices of the input `tensors`. Does not wait for the GPU."""
        return [result.to(tensor.device) for tensor, result in zip(tensors, results, strict=True)]

    def all_reduce_(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce a contiguous tensor in place. Collective."""
        if tensor.numel():
            sent = _reducible(tensor)
            with LAUNCH_LOCK:
                self._group.all_reduce(sent, ReduceOp(op))
            if tensor.dtype is torch.int16:
                tensor.copy_(sent)

    def broadcast_(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite a contiguous tensor with that of the rank `root`. Collective."""
        if tensor.numel():
            with LAUNCH_LOCK:
                self._group.broadcast(bytes_of(tensor), root)

    def all_gather(self, tensor: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> None:
        """Write the tensors of all ranks to `gathered`, in rank order. `counts` are bytes by rank. Collective.

        NCCL has no all-gather of different sizes, so each rank broadcasts its tensor.
        """
        whole, own = bytes_of(gathered), bytes_of(tensor)
        if not whole.numel():
            return
        if len(set(counts)) == 1:
            aligned = own if own.data_ptr() % 16 == 0 else own.clone()  # unaligned buffers are slow in NCCL
            with LAUNCH_LOCK:
                self._group.all_gather(whole, aligned)
            return
        parts = torch.split(whole, list(counts))
        parts[self.rank].copy_(own)
        for root, part in enumerate(parts):
            self.broadcast_(part, root)

    def all_to_all(
        self, tensor: torch.Tensor, received: torch.Tensor, to: Sequence[int], source: Sequence[int]
    ) -> None:
        """Send `to[rank]` bytes of `tensor` to each rank, and receive `source[rank]` bytes from it. Collective."""
        with LAUNCH_LOCK:
            self._group.all_to_all(bytes_of(received), bytes_of(tensor)[: sum(to)], list(source), list(to))

    def exchange(self, vector: torch.Tensor, partner: int) -> torch.Tensor:
        """Send a contiguous vector to `partner`, and return the partner's vector. Collective."""
        theirs = torch.empty_like(vector)
        counts = [vector.numel() * vector.itemsize if rank == partner else 0 for rank in range(self.size)]
        self.all_to_all(vector, theirs, counts, counts)
        return theirs

    def reduce_scatter(self, tensor: torch.Tensor, part: torch.Tensor, counts: Sequence[int], op: str) -> None:
        """Reduce a contiguous 1-d tensor, and write this rank's elements to `part`. Collective.

        NCCL's parts have equal sizes, so smaller parts are padded with zeros. `counts` are elements by rank.
        """
        if not tensor.numel():
            return
        whole = tensor
        if min(counts) < max(counts):
            whole = tensor.new_zeros(self.size, max(counts))
            for row, piece in zip(whole, torch.split(tensor, list(counts)), strict=True):
                row[: piece.numel()].copy_(piece)
        share = tensor.new_empty(max(counts))
        received = _reducible(share)
        with LAUNCH_LOCK:
            self._group.reduce_scatter(received.view(-1), _reducible(whole).view(-1), ReduceOp(op))
        part.copy_((received if tensor.dtype is torch.int16 else share)[: part.numel()])


def _reducible(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor in a dtype that NCCL can reduce. For 16-bit integers, return a copy."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return tensor.int() if tensor.dtype is torch.int16 else tensor
