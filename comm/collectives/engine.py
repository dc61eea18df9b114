"""Eager collectives, which each rank may submit in its own order. Ranks agree by name, then run them in one order.

Ranks agree in *rounds*. In a round, each rank sends one small message: a digest of all its pending operations, and one
bit for each operation name used before (as in § V-A of the AIACC paper). A rank takes part in rounds only while it has
pending operations. If all digests are equal, which is the common case, all pending operations run. Otherwise the
operations whose bits are set on all ranks run. If bits cannot express a rank's state (a new name, a tensor of another
shape or dtype, a call of `join()`), the ranks exchange descriptions of all pending operations. In this exchange, all
ranks find the operations whose shapes, dtypes or other properties differ between ranks.

With few ranks, the messages are all-gathered, and also contain the tensors of small operations, which then need no
further communication. With many ranks, the messages are all-reduced (AND).

The thread that waits for a result runs the rounds itself, so that no thread must be woken. If no thread waits, the
engine's own thread runs them. It sleeps while no operation is pending.

Operations on GPUs run over NCCL if, on all ranks, the training thread runs the round, and has launched the same units
(buckets) of gradients (`on_gpu` gives the reason). Otherwise they run in host memory. The engine's thread lets them
wait for `DEFERRED_S`, because the training thread usually waits for them soon.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from sirtaki.comm import recorder, timeline
from sirtaki.comm.collectives.operations import (
    ALIGNED_BYTES,
    DIGEST_BYTES,
    CollectiveKind,
    OpenLanes,
    PendingReport,
    Progress,
    Ranks,
    RoundMessage,
    Signature,
    Slot,
    batches,
    mismatch,
    perform,
    result_of,
    zeros_for,
)
from sirtaki.comm.control.communicator import Communicator, Op
from sirtaki.comm.control.failure import FailureBoard, caused
from sirtaki.comm.control.plane import ControlPlane, gather
from sirtaki.comm.control.waiting import WAIT_SLICE_S, start_thread, wait_for, wait_for_work
from sirtaki.comm.control.watchdog import PendingWait, Watchdog
from sirtaki.comm.device import Event, cuda_device, nccl_owners
from sirtaki.comm.modes import outside_modes
from sirtaki.comm.recorder import TracedOperation
from sirtaki.comm.transports.contract import ThreadWork
from sirtaki.errors import CommError, ConfigError, MismatchError
from sirtaki.machine import free_in_forked_children

if TYPE_CHECKING:
    from sirtaki.comm.collectives.on_gpu import NcclRanks

OpenNccl = Callable[[Ranks, int, str], "NcclRanks | None"]
"""Function that opens an NCCL communicator for eager operations. Collective. None = NCCL cannot be used.

Arguments are the ranks, the index of this rank's GPU, and a text that names the process set ("" = all ranks).
"""


class EagerWork(ThreadWork):
    """An eager operation (a collective on the user's tensors) in flight.

    Attributes:
        deferred_until_s: `time.monotonic()` before which the engine's thread does not run the operation.
        written: CUDA event recorded after the kernels that write the tensors, on the stream of the submitting thread.
            None = no tensor is on a GPU.
        device_index: index of the GPU of the tensors.
        computed: CUDA event recorded after the kernels that write the results. None = no wait is needed.
    """

    def __init__(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.signature, self.tensors = signature, tensors
        self.submitted_s = time.monotonic()
        self.results: list[torch.Tensor] = []
        self.deferred_until_s = 0.0
        self.written: torch.cuda.Event | None = None
        self.computed: Event | None = None
        on_gpu = None if signature.device == "cpu" else next((tensor for tensor in tensors if tensor.is_cuda), None)
        if on_gpu is not None:
            device = on_gpu.device
            self.device_index = device.index
            self.written = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self.written.record(torch.cuda.current_stream(device))

    def is_computed(self) -> bool:
        """Return whether the operation has ended, with or without an error, on the GPU, too. Non-blocking."""
        return self.is_done() and (self.computed is None or bool(self.computed.query()))

    def order_results(self) -> None:
        """Make the current CUDA stream wait for the results, and keep their memory while it uses them. Non-blocking."""
        for result in self.results if self.written is not None else ():
            if result.is_cuda:
                stream = torch.cuda.current_stream(result.device)
                if self.computed is not None:
                    stream.wait_event(self.computed)
                result.record_stream(stream)


def trace_operations(signatures: Sequence[Signature], works: Sequence[EagerWork | None], begin_s: float) -> None:
    """Report operations that ran together to the timeline file and to the recording of the job, if these are open.

    Args:
        signatures: descriptions (name, kind, shapes, …) of all these operations.
        works: this rank's operations. None for an operation that this rank did not submit, because it has called
            `join()`.
        begin_s: `time.perf_counter()` when the ranks agreed to run the operations.
    """
    trace, recording = timeline.current, recorder.current
    if trace is None and recording is None:
        return
    end_s = time.perf_counter()
    # Difference between `time.monotonic`, the clock of submission times, and `time.perf_counter`.
    ages_s = time.monotonic() - end_s
    if trace is not None:
        names = ", ".join(signature.name for signature in signatures)
        trace.span("eager", signatures[0].kind.value, begin_s, end_s, names=names)
    for signature, work in zip(signatures, works, strict=True):
        kind, submitted_s = signature.kind.value, begin_s if work is None else work.submitted_s - ages_s
        if trace is not None:
            trace.span("eager", signature.name, begin_s, end_s)
            if work is not None:
                trace.overlapping(f"NEGOTIATE_{kind}", submitted_s, begin_s, operation=signature.name)
        if recording is not None and work is not None:
            recording.operation(
                TracedOperation(
                    name=signature.name,
                    kind=kind,
                    submitted_s=submitted_s,
                    agreed_s=begin_s,
                    done_s=end_s,
                    n_bytes=work.signature.size_bytes,
                )
            )


logger = logging.getLogger(__name__)

CAPACITY = 1024
"""Largest number of operation names that have a bit in the messages by which ranks agree on operations to run."""


class NameSlots:
    """Operation names that have a bit in the messages of a round, in order of last use. Equal on all ranks.

    In a round, ranks agree on the operations to run. For each name, this object stores the number of its bit, and the
    signature (kind, shapes, dtypes, …) of the last operation with this name.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        # Maps a name to (number of its bit, signature of the last operation with this name).
        self._slots: OrderedDict[str, tuple[int, Signature]] = OrderedDict()
        self._free = list(range(capacity))

    def bit(self, work: EagerWork) -> int | None:
        """Return the number of the bit of an operation's name.

        None if the name has no bit, or if the operation's signature (kind, shapes, dtypes, …) has changed.
        """
        slot = self._slots.get(work.signature.name)
        return slot[0] if slot is not None and slot[1].digest == work.signature.digest else None

    def chosen(self, bits: int) -> dict[str, Signature]:
        """Return the operation names whose bits are set in `bits`, with the signatures of their last operations."""
        return {name: signature for name, (bit, signature) in self._slots.items() if bits >> bit & 1}

    def by_all(self) -> int:
        """Return a bit mask of the operations that a rank submits even after it has called `join()`."""
        return sum(1 << bit for bit, signature in self._slots.values() if signature.by_all)

    def remember(self, signature: Signature) -> None:
        """Assign a bit to an operation's name, or, if it has a bit, replace the signature stored for it.

        Names that are used only once get no bit.
        """
        name = signature.name
        if (slot := self._slots.get(name)) is not None:
            if slot[1] is not signature:
                self._slots[name] = slot[0], signature
        elif not signature.once:
            if not self._free:
                self.forget(next(iter(self._slots)))
            self._slots[name] = heapq.heappop(self._free), signature

    def touch(self, name: str) -> None:
        """Mark an operation name as the most recently used one, so that its bit is reused last."""
        if name in self._slots:
            self._slots.move_to_end(name)

    def forget(self, name: str) -> None:
        """Remove an operation name, so that another name can get its bit in the negotiated bit vector."""
        if (slot := self._slots.pop(name, None)) is not None:
            heapq.heappush(self._free, slot[0])


class Pending:
    """Eager operations that this rank has submitted and that are not complete. Thread-safe.

    Attributes:
        where: text that names the process set in messages to the user. "" = all ranks.
        last_progress_s: `time.monotonic()` when an operation last completed or this rank joined.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.last_progress_s = time.monotonic()
        self._lock = free_in_forked_children(threading.Lock())
        self._changed = threading.Condition(self._lock)
        self._works: dict[str, EagerWork] = {}
        # Maps a name to the errors with which the next operations of this name fail.
        self._rejected: dict[str, deque[str]] = {}
        self._join: ThreadWork | None = None
        self._progress: Progress = ()
        self._unnamed = 0
        self._closing = False

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, name: object) -> bool:
        return name in self._works

    def next_name(self, prefix: str) -> str:
        """Return a name for an unnamed operation. Equal on ranks that submit unnamed operations in the same order."""
        with self._lock:
            self._unnamed += 1
            return f"{prefix}.noname.{self._unnamed}"

    def add(self, work: EagerWork, *, wake: bool) -> None:
        """Register an operation, or fail it at once if the ranks have rejected the operation with this name before.

        Args:
            work: the operation.
            wake: True to wake the engine's thread, which runs operations that no other thread waits for.

        Raises:
            ValueError: an operation of this name is in flight on this rank.
            CommError: this rank is shutting down.
        """
        name = work.signature.name
        with self._lock:
            if self._closing:
                raise CommError(
                    f"Sirtaki rejects operation {name!r}, because its process set (group of ranks) is being closed; "
                    "submit operations before shutdown() or remove_process_set()"
                )
            if name in self._works:
                raise ValueError(
                    f"Requested to {work.signature.kind.value.lower()} a tensor with the same name as another tensor "
                    f"that is currently being processed: {name!r}; pass another name=, or call synchronize() on the "
                    "first operation"
                )
            if (problems := self._rejected.get(name)) is not None:
                work.finish(MismatchError(problems.popleft()))
                if not problems:
                    del self._rejected[name]
                return
            self._works[name] = work
            if wake:
                self._changed.notify()

    def join(self, progress: Progress) -> ThreadWork:
        """Declare that this rank has no more data. The returned work completes when all ranks have called `join()`.

        `progress` is the position in training that this rank has reached.
        """
        with self._changed:
            self._join, self._progress = ThreadWork(), progress
            self.last_progress_s = time.monotonic()
            self._changed.notify()
            return self._join

    def oldest_wait(self) -> PendingWait | None:
        """Describe for the watchdog what this rank waits for: its oldest pending operation, or the end of `join()`.

        Returns:
            None if this rank waits for neither.
        """
        works = [work for work in list(self._works.values()) if not work.signature.problem]
        if works:
            oldest = min(works, key=lambda work: work.submitted_s)
            return PendingWait(what=f"operation {oldest.signature.name!r}{self.where}", since_s=oldest.submitted_s)
        if self._join is not None:
            return PendingWait(what=f"join(){self.where}", since_s=self.last_progress_s)
        return None

    def describe(self) -> str:
        """Return a text with the names of pending operations, which the watchdog shows if a rank waits too long."""
        names = list(self._works)
        return f"has submitted {', '.join(names[:5])}{' …' if len(names) > 5 else ''}{self.where}" if names else ""

    # ── for the thread that runs rounds ──────────────────────────────────────────────────────────────────────────

    def _has_work(self) -> bool:
        return bool(self._works) or self._join is not None or self._closing

    def wait_until_pending(self) -> None:
        """Block until this rank has called `join()`, shuts down, or has a pending operation that may run now.

        The engine's thread may run an operation once its `deferred_until_s` has passed.
        """
        with self._changed:
            while True:
                self._changed.wait_for(self._has_work)
                if self._join is not None or self._closing:
                    return
                wait_s = min(work.deferred_until_s for work in self._works.values()) - time.monotonic()
                if wait_s <= 0:
                    return
                self._changed.wait(wait_s)

    def wake_if_pending(self) -> None:
        """Wake the engine's thread if an operation is pending."""
        if self._works:
            with self._lock:
                self._changed.notify()

    def snapshot(self, pause_s: float = 0.0) -> tuple[dict[str, EagerWork], PendingReport] | None:
        """Wait until an operation is submitted, for at most `pause_s` seconds. Return the pending operations.

        Returns:
            The operations by name, and the report of this rank's state to the other ranks. None if no operation is
            pending, and this rank neither has called `join()` nor shuts down.
        """
        with self._lock:
            if pause_s:
                self._changed.wait(pause_s)
            if not self._has_work():
                return None
            joined = None if self._join is None else self._progress
            return self._works.copy(), PendingReport(joined=joined, closing=self._closing, unnamed=self._unnamed)

    def remove(self, works: Sequence[EagerWork]) -> None:
        """Remove completed operations from the pending ones."""
        with self._lock:
            for work in works:
                self._works.pop(work.signature.name, None)

    def reject(self, name: str, problem: str) -> None:
        """Fail the operation `name` with the error text `problem`, because ranks disagree about the operation.

        If the operation is not pending, it fails when this rank submits it.
        """
        with self._lock:
            # Look up the operation again, because it may have been submitted since `snapshot` was called.
            work = self._works.pop(name, None)
            if work is None and self._join is None and not self._closing:
                self._rejected.setdefault(name, deque()).append(problem)
        if work is not None:
            work.finish(MismatchError(problem))

    def end_join(self, unnamed: int) -> None:
        """Complete this rank's `join()`. Called once all ranks have called `join()`.

        `unnamed` is the largest number of unnamed operations that any rank has submitted.
        """
        with self._lock:
            # Set the number of unnamed operations to that of the other ranks, so that the next unnamed operation gets
            # the same name on all ranks. Ranks that called `join()` early have submitted fewer.
            self._unnamed = unnamed
            self._rejected.clear()
            join, self._join = self._join, None
        if join is not None:
            join.finish()

    def fail(self, error: CommError) -> None:
        """Fail all pending operations and a pending `join()` with `error`."""
        with self._lock:
            for work in (*self._works.values(), *([self._join] if self._join else [])):
                work.finish(error)
            self._works.clear()

    def close(self) -> None:
        """Start the shutdown: fail pending operations, except those with an invalid argument (`Signature.problem`).

        Operations with an invalid argument stay pending until the ranks exchange their last messages, so that the error
        is raised on all ranks.
        """
        with self._changed:
            self._closing = True
            for name, work in list(self._works.items()):
                if not work.signature.problem:
                    work.finish(CommError(f"Sirtaki was shut down while operation {name!r} was pending"))
                    del self._works[name]
            self._changed.notify_all()


_DIGEST_BITS = 8 * DIGEST_BYTES
_ALL_ONES = (1 << _DIGEST_BITS) - 1
_HEAD_BYTES = 2 * DIGEST_BYTES + CAPACITY // 8 + ALIGNED_BYTES
_LAUNCH_BITS = 4 * ALIGNED_BYTES - 1
"""Number of bits of the digest of launched gradient units (buckets) that ranks compare. Only ranks with equal digests
may launch an eager operation over NCCL.
"""

GATHERED_RANKS = 32
"""Largest number of ranks at which the messages of a round (an agreement on operations to run) are all-gathered and
contain small tensors. With more ranks, the messages are all-reduced, and contain no tensors.
"""


class Rounds:
    """Runs rounds, one at a time. In a round, ranks agree on eager operations and run them.

    The attributes are equal on all ranks.

    Attributes:
        last_joined: rank that called `join()` last. -1 = none so far.
        completed: number of operations performed or rejected so far.
        ended: True once all ranks are shutting down.
        nccl: the ranks and their NCCL communicator. None = it is not open.
        open_nccl: opens the NCCL communicator. None = it has been called, or operations on GPUs use host memory.
    """

    def __init__(
        self,
        comm: Communicator,
        failures: FailureBoard,
        pending: Pending,
        open_lanes: OpenLanes | None = None,
        members: Sequence[int] | None = None,
        open_nccl: OpenNccl | None = None,
    ) -> None:
        """Open two duplicates of `comm`. Collective over `comm`.

        Args:
            comm: participating ranks.
            failures: failure board, through which threads report and read the job's failure.
            pending: operations that this rank has submitted.
            open_lanes: opens the streams (parallel connections) for large all-reduces. None = these use `comm`.
            members: for each rank of `comm`, its rank in the job, for messages to the user. None = the same numbers.
            open_nccl: opens the NCCL communicator. None = operations on GPUs use host memory.
        """
        self._messages, self._data, self._failures = comm.duplicate(), comm.duplicate(), failures
        self._ranks, self._size = Ranks(self._data, failures, open_lanes), comm.size
        self._pending, self._members = pending, members or range(comm.size)
        self.nccl: NcclRanks | None = None
        self.open_nccl = open_nccl
        self._logged = False  # True once the log contains the reason why operations on GPUs run in host memory.
        self.last_joined = -1
        self.completed = 0
        self.ended = False
        self._names = NameSlots()
        self._joined: dict[int, int] = {}  # Maps a rank that has called `join()` to its number of unnamed operations.
        # True once the other ranks know from an exchange that this rank has called `join()`.
        self._join_announced = False
        self._message = RoundMessage(self._size, _HEAD_BYTES) if self._size <= GATHERED_RANKS else None

    def run(self, works: Mapping[str, EagerWork], own: PendingReport, *, in_program_order: bool = False) -> bool:
        """Run one round, in which the ranks agree on operations and run them. Collective.

        Returns True if an operation or a `join()` was completed, or an operation was rejected.

        Args:
            works: pending operations of this rank, by name.
            own: state of this rank. It is sent only if the ranks exchange descriptions of all operations.
            in_program_order: True if the training thread waits for this round, so that it launches no gradients
                meanwhile. NCCL is used only then.
        """
        digest = self._digest(works.values(), own)
        ordered = [works[name] for name in sorted(works)] if digest else []
        carried = None
        if ordered and self._message is not None:
            carried = self._message.load([(work.signature, work.tensors) for work in ordered])
        progress = self._progress(works) if in_program_order and own.joined is None else 0
        all_equal, bits = self._agree(digest, self._bits(works, own) | progress)
        may_launch = progress != 0 and bits & progress == progress
        if all_equal:
            for work in ordered:
                self._names.remember(work.signature)
            if carried is not None:
                for work, slots in zip(ordered, carried, strict=True):
                    self._complete([work.signature], [work], slots)
                return True
            ready = {work.signature.name: work.signature for work in ordered}
        elif bits & 1:
            ready = self._names.chosen(bits >> 1)
        else:
            ready = self._exchange(works, own)
        for together in batches(ready):
            self._complete(
                [ready[name] for name in together], [works.get(name) for name in together], may_launch=may_launch
            )
        return self._end_join(own) or bool(ready)

    # ── the message of a round ───────────────────────────────────────────────────────────────────────────────────

    def _digest(self, works: Iterable[EagerWork], own: PendingReport) -> int:
        """Return the digest of all pending operations of this rank.

        Returns 0, which never counts as equal, if this rank has called `join()`, shuts down or has an invalid
        operation.
        """
        if own.joined is not None or own.closing:
            return 0
        digest = 0
        for work in works:
            if work.signature.problem:
                return 0
            digest += work.signature.digest
        return digest & _ALL_ONES

    def _bits(self, works: Mapping[str, EagerWork], own: PendingReport) -> int:
        """Return the bits that this rank sends in a round.

        The lowest bit is set if the other bits fully describe this rank's state. Each other bit stands for an operation
        name, and is set if this rank is ready to run that operation.
        """
        bits, known = 0, not own.closing
        for work in works.values():
            if (bit := self._names.bit(work)) is None:
                known = False
            else:
                bits |= 2 << bit
            # Make the ranks exchange descriptions of their operations while a rank is in `join()`, because operations
            # that need the data of that rank must fail.
            if self._joined and own.joined is None and work.signature.needs_data:
                known = False
        if own.joined is not None:
            bits |= (2 << CAPACITY) - 2 & ~(self._names.by_all() << 1)
            known = known and self._join_announced
        return bits | known

    def _progress(self, works: Mapping[str, EagerWork]) -> int:
        """Return bits with a digest of the launched gradient units, and its complement. 0 = NCCL is not wanted.

        The AND over all ranks leaves these bits unchanged only if all ranks have launched equally many units of each
        gradient pipeline.
        """
        if (self.nccl or self.open_nccl) is None or all(work.signature.device != "cuda" for work in works.values()):
            return 0
        all_bits = (1 << _LAUNCH_BITS) - 1
        counts = sorted((owner.number, owner.launched) for owner in nccl_owners() if owner.launched)
        digest = hash(tuple(counts)) & all_bits
        return (digest << _LAUNCH_BITS | digest ^ all_bits) << CAPACITY + 1

    def _agree(self, digest: int, bits: int) -> tuple[bool, int]:
        """Exchange the messages of a round, in which ranks agree on operations to run. Collective.

        A message contains the digest and its bitwise complement. The AND over all ranks leaves both unchanged only if
        all ranks sent equal digests.

        Returns:
            True if all ranks sent this digest (0 never counts as equal), and the bits that are set on all ranks.
        """
        number = bits << 2 * _DIGEST_BITS | (digest ^ _ALL_ONES if digest else 0) << _DIGEST_BITS | digest
        head = number.to_bytes(_HEAD_BYTES, "little")
        if self._message is not None:
            own, gathered = self._message.own, self._message.gathered
            self._message.head[:] = head
            wait_for(self._messages.all_gather(own, gathered), failures=self._failures)
            heads = gathered[:, :_HEAD_BYTES]
            if digest and heads.tobytes() == head * self._size:
                return True, bits
            found = np.bitwise_and.reduce(heads, axis=0)
        else:
            found = np.frombuffer(bytearray(head), dtype=np.uint8)
            wait_for(self._messages.all_reduce(found, Op.AND), failures=self._failures)
        common = int.from_bytes(found.tobytes(), "little")
        same = (1 << 2 * _DIGEST_BITS) - 1
        return bool(digest) and common & same == number & same, common >> 2 * _DIGEST_BITS

    def _exchange(self, works: Mapping[str, EagerWork], own: PendingReport) -> dict[str, Signature]:
        """Gather descriptions of the pending operations of all ranks. Reject operations about which ranks disagree.

        Collective. Returns the operations that all ranks can run, by name.
        """
        self._join_announced = own.joined is not None
        signatures = [work.signature for work in works.values()]
        gathered: list[PendingReport] = gather(msgspec.structs.replace(own, signatures=signatures), comm=self._messages)
        self.ended = all(presence.closing for presence in gathered)
        presences = dict(zip(self._members, gathered, strict=True))
        newly_joined = [
            (presence.joined, rank)
            for rank, presence in presences.items()
            if presence.joined is not None and rank not in self._joined
        ]
        if newly_joined:
            self._joined |= {rank: presences[rank].unnamed for _, rank in newly_joined}
            self.last_joined = max(newly_joined)[1]
        by_name: dict[str, dict[int, Signature]] = {}
        for rank, presence in presences.items():
            for signature in presence.signatures:
                by_name.setdefault(signature.name, {})[rank] = signature
        ready = {}
        for name, by_rank in sorted(by_name.items()):
            some = next(iter(by_rank.values()))
            problem = mismatch(by_rank)
            if problem is None and self._joined and some.needs_data:
                problem = f"{some.kind.value.capitalize()} is not supported with Join at this time."
            if problem is not None:
                self.completed += 1
                self._names.forget(name)
                # All ranks reject the operation: each has compared the signatures (shapes, dtypes) of all ranks, and
                # found the same problem.
                self._pending.reject(name, problem)
                continue
            self._names.remember(some)
            absent = 0 if some.by_all else len(self._joined.keys() - by_rank.keys())
            if len(by_rank) == self._size - absent:
                ready[name] = some
        return ready

    # ── agreed operations ────────────────────────────────────────────────────────────────────────────────────────

    def _complete(
        self,
        signatures: list[Signature],
        works: Sequence[EagerWork | None],
        carried: Sequence[Slot] | None = None,
        *,
        may_launch: bool = False,
    ) -> None:
        """Perform operations that the ranks have agreed to run. Collective, unless the messages contain the tensors.

        Args:
            signatures: signatures of the operations.
            works: this rank's operations. None for an operation that this rank did not submit, because it has called
                `join()`.
            carried: places of a single operation's tensors in the messages by which the ranks have agreed. None =
                these messages contain no tensors.
            may_launch: whether NCCL operations may be launched, equal on all ranks.
        """
        begin_s = time.perf_counter()
        own_works = [work for work in works if work is not None]
        error: CommError | None = None
        nccl = self._nccl_for(signatures[0], own_works, may_launch=may_launch)
        try:
            for signature, work in zip(signatures, works, strict=True):
                self._names.touch(signature.name)
                if nccl is None and work is not None and work.written is not None:
                    gpu = cuda_device(work.device_index)
                    gpu.enter_thread()
                    gpu.order_after(work.written)
            if carried is not None:
                own_works[0].results = result_of(signatures[0], own_works[0].tensors, carried)
            elif nccl is not None:
                launched, computed = nccl.launch(
                    [(work.signature, work.tensors) for work in own_works],
                    [work.written for work in own_works],
                    self._pending.where,
                )
                for work, result in zip(own_works, launched, strict=True):
                    work.results, work.computed = result, computed
            else:
                batch = [
                    (signature, zeros_for(signature)) if work is None else (work.signature, work.tensors)
                    for signature, work in zip(signatures, works, strict=True)
                ]
                for work, result in zip(works, perform(batch, self._ranks), strict=True):
                    if work is not None:
                        work.results = result
        except CommError as err:
            error = err
        except Exception as err:
            if nccl is not None:
                raise  # Fail the whole job on an error of NCCL, because the GPUs of other ranks may wait for this rank.
            names = ", ".join(repr(signature.name) for signature in signatures)
            error = CommError(f"{signatures[0].kind.value.lower()} {names} failed: {err!r}")
        trace_operations(signatures, works, begin_s)
        self.completed += len(signatures)
        self._pending.remove(own_works)
        for work in own_works:
            work.finish(error)

    def _nccl_for(self, signature: Signature, works: Sequence[EagerWork], *, may_launch: bool) -> NcclRanks | None:
        """Return the ranks with an NCCL communicator that can run an operation. None = run it through host memory.

        The first call with `may_launch` opens the communicator, and is collective.
        """
        if signature.device != "cuda":
            return None
        if not may_launch:
            if not self._logged and self._ranks.rank == 0 and (self.nccl or self.open_nccl) is not None:
                self._logged = True
                logger.info(
                    "operation %r%s runs through host memory, because not all ranks wait for its result, in the thread "
                    "that called hvd.init(), after the same gradients; other operations on GPUs may run over NCCL",
                    signature.name,
                    self._pending.where,
                )
            return None
        if self.open_nccl is not None:
            open_nccl, self.open_nccl = self.open_nccl, None
            self.nccl = open_nccl(self._ranks, works[0].device_index, self._pending.where)
        return self.nccl if self.nccl is not None and self.nccl.can_perform(signature) else None

    def _end_join(self, own: PendingReport) -> bool:
        """Complete this rank's `join()` if all ranks have called it. Return whether it was completed.

        All ranks learn in the same round that the last rank has called `join()`. So it completes on all at once.
        """
        if own.joined is None or len(self._joined) < self._size:
            return False
        unnamed = max(self._joined.values())
        self._joined.clear()
        self._join_announced = False
        self._pending.end_join(unnamed)
        return True

    def close(self, *, together: bool = True) -> None:
        """Close the NCCL communicator, and the streams (parallel connections) for large all-reduces.

        If `together`, the call is collective, and also frees the two duplicates of the control plane's communicator.
        """
        if self.nccl is not None:
            self.nccl.close(together=together)
        if self._ranks.lanes is not None:
            self._ranks.lanes.close(together=together)
        if together:
            self._messages.free()
            self._data.free()


LONGEST_PAUSE_S = 2e-3
"""Longest pause in seconds between two rounds if a round completes no operation, because ranks have submitted different
operations."""

SHORTEST_PAUSE_S = 50e-6

DEFERRED_S = 0.1
"""Longest delay in seconds of an asynchronous operation on a GPU. If the training thread calls `finish` within this
time, the operation can run over NCCL. Otherwise the engine's thread runs it in host memory.
"""


class EagerEngine:
    """Runs eager operations (collectives on the user's tensors) over one set of ranks.

    Attributes:
        pending: operations that this rank has submitted and that are not complete.
        rounds: object that runs the rounds, in which the ranks agree on operations to run.
        known: cached descriptions of earlier operations, by a key that the submitting code chooses.
        awaited: name of the operation that a thread of this rank waits for, and `time.monotonic()` when the wait began.
            None if no thread waits.
    """

    def __init__(
        self,
        comm: Communicator,
        failures: FailureBoard,
        *,
        where: str = "",
        open_lanes: OpenLanes | None = None,
        members: Sequence[int] | None = None,
        open_nccl: OpenNccl | None = None,
        in_backward: Callable[[], bool] = bool,
    ) -> None:
        """Start the engine's thread. The calling thread is the training thread. Collective over `comm`.

        The engine opens two duplicates of `comm`.

        Args:
            comm: participating ranks.
            failures: failure board, through which threads report and read the job's failure.
            where: text that names the process set in messages to the user. "" = all ranks.
            open_lanes: opens the streams (parallel connections) for large all-reduces. None = these use `comm`.
            members: for each rank of `comm`, its rank in the job, for messages to the user. None = the same numbers.
            open_nccl: opens the NCCL communicator. None = operations on GPUs use host memory.
            in_backward: returns whether the calling thread runs a backward pass.
        """
        self.pending = Pending(where)
        self.rounds = Rounds(comm, failures, self.pending, open_lanes, members, open_nccl)
        self._failures, self._in_backward = failures, in_backward
        self.rank, self.size = comm.rank, comm.size
        self._number = comm.rank if members is None else members[comm.rank]
        self.known: dict[Hashable, Signature] = {}
        self.awaited: tuple[str, float] | None = None
        # Held by the thread that runs a round (in which ranks agree on operations and run them).
        self._round_lock = free_in_forked_children(threading.Lock())
        self._pause_s = 0.0
        self._training_thread = threading.current_thread()
        self._thread = threading.Thread(target=self._run, name="sirtaki-eager", daemon=True)
        start_thread(self._thread)

    # ── for submitting threads ───────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, signature: Signature, tensors: Sequence[torch.Tensor], *, wake: bool = True, may_defer: bool = False
    ) -> EagerWork:
        """Start an operation. Thread-safe, non-blocking.

        Args:
            signature: description of the operation.
            tensors: inputs, which the caller must not change until completion.
            wake: True to wake the engine's thread, which runs the operation. False if the caller calls `finish` next,
                which runs it in the calling thread.
            may_defer: True if the training thread will probably call `finish`, so that the operation can run over NCCL.

        Raises:
            ValueError: an operation of this name is in flight on this rank.
            CommError: the job has failed.
        """
        self._failures.check()
        work = EagerWork(signature, tensors)
        if may_defer and signature.device == "cuda" and (self.rounds.nccl or self.rounds.open_nccl) is not None:
            work.deferred_until_s = work.submitted_s + DEFERRED_S
        self.pending.add(work, wake=wake)
        return work

    def finish(self, work: ThreadWork, interrupted: Callable[[], bool] | None = None) -> bool:
        """Wait for an operation of this engine. If it runs on a GPU, the current CUDA stream waits, not the host.

        Meanwhile, this thread runs the rounds (in which ranks agree on operations and run them), unless another thread
        does so already. That saves two thread switches.

        Args:
            work: operation to wait for.
            interrupted: called regularly; ends the wait if it returns True. With `interrupted`, this thread runs no
                rounds, because a round blocks until all ranks take part.

        Returns:
            True once the work is done, False if the wait was interrupted.

        Raises:
            CommError: the operation or the job has failed.
        """
        if interrupted is not None:
            ended = wait_for_work([work], failures=self._failures, interrupted=interrupted, blame_s=None)
            if ended and isinstance(work, EagerWork):
                work.order_results()
            return ended
        if isinstance(work, EagerWork):
            self.awaited = work.signature.name, time.monotonic()
        # In these two threads, this operation may be launched over NCCL, because all ranks launch it at the same place
        # among their gradients: these are launched by the training thread, or by an autograd thread while the training
        # thread waits for the backward pass.
        current = threading.current_thread()
        in_program_order = current is self._training_thread or self._in_backward()
        try:
            while not work.is_done():
                if self._round_lock.acquire(blocking=False):
                    try:
                        self._step(in_program_order=in_program_order)
                    finally:
                        self._round_lock.release()
                else:
                    work.wait(WAIT_SLICE_S)
                # Raise only if the operation is incomplete. A complete one succeeds, even if the job has failed since.
                if not work.is_done():
                    self._failures.check()
        finally:
            self.awaited = None
        self.pending.wake_if_pending()
        ended = work.wait(0.0)
        if isinstance(work, EagerWork):
            work.order_results()
        return ended

    def poll(self, work: EagerWork) -> bool:
        """Return whether an operation has ended, on the GPU, too. Non-blocking.

        If the operation was deferred and has not begun, the engine's thread runs it now, without waiting for the
        training thread to call `finish`.
        """
        if work.deferred_until_s and not work.is_done():
            work.deferred_until_s = 0.0
            self.pending.wake_if_pending()
        return work.is_computed()

    def oldest_wait(self) -> PendingWait | None:
        """Describe for the watchdog what this rank, or its GPU, waits for. None if neither waits.

        Raises:
            CommError: the NCCL communicator has failed.
        """
        if (nccl := self.rounds.nccl) is None:
            return self.pending.oldest_wait()
        nccl.check()
        return self.pending.oldest_wait() or nccl.stalled()

    def join(self, progress: Progress) -> ThreadWork:
        """Contribute zeros to the other ranks' all-reduces, until all ranks have called `join()`.

        `progress` is the position in training that this rank has reached. Returns the work to wait for.
        """
        self._failures.check()
        return self.pending.join(progress)

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        """Run rounds, in which ranks agree on operations and run them, in the engine's thread."""
        while not self.rounds.ended and self._failures.error is None:
            self.pending.wait_until_pending()
            with self._round_lock:
                try:
                    self._step()
                except CommError:
                    return  # End the engine's thread. `_step` has already reported the error to all waiting threads.

    @outside_modes
    def _step(self, *, in_program_order: bool = False) -> None:
        """Run one round, in which ranks agree on operations and run them. The caller holds `_round_lock`.

        All ranks that have pending operations take part. `in_program_order`: the training thread calls this.
        """
        snapshot = self.pending.snapshot(self._pause_s)
        if snapshot is None or self.rounds.ended:
            return
        if (trace := timeline.current) is not None and trace.mark_cycles:
            trace.instant("eager", "CYCLE_START", time.perf_counter())
        try:
            made_progress = self.rounds.run(*snapshot, in_program_order=in_program_order)
        except BaseException as err:
            # Fail the job on any exception, even a KeyboardInterrupt, because ranks cannot resume an interrupted round.
            what = f"eager operations failed on rank {self._number} ({', '.join(snapshot[0]):.200})"
            error = err if isinstance(err, CommError) else caused(CommError(f"{what}: {err!r}"), err)
            self._failures.report(error)
            self.pending.fail(error)
            if isinstance(err, Exception):
                raise error from error.__cause__
            raise
        if made_progress:
            self._pause_s, self.pending.last_progress_s = 0.0, time.monotonic()
        else:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or SHORTEST_PAUSE_S)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the engine's thread after a last round with all ranks. Pending operations fail. Collective.

        Blocks until the thread has stopped, because MPI_Finalize must not be called while the thread is in MPI.

        Args:
            timeout_s: seconds that the thread may take to stop if the job has failed.

        Returns:
            False if the job failed before all ranks called `close`. The communicators stay open in that case.
        """
        self.pending.close()
        while self._thread.is_alive() and self._failures.error is None:
            self._thread.join(0.1)
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive() and self.rounds.ended
        self.rounds.close(together=ended)
        return ended


class SparseSum:
    """Sum of sparse COO tensors over the engine's ranks, in flight."""

    def __init__(self, engine: EagerEngine, tensor: torch.Tensor, name: str | None, *, by_all: bool = False) -> None:
        """Start two all-gathers: of the indices and of the values. Collective.

        Args:
            engine: engine of the participating ranks.
            tensor: COO tensor. Shape and dtype are equal on all ranks, the number of entries may differ.
            name: name by which ranks find the same operation. None = ranks match unnamed operations by their order.
            by_all: True if ranks that are in `join()` submit this sum, too. If False, the sum fails while a rank is in
                `join()`.
        """
        coalesced = tensor.coalesce()
        parts = {"indices": coalesced.indices().t().contiguous(), "values": coalesced.values()}
        self._engine, self._size = engine, tensor.size()
        self._works = []
        for part, entries in parts.items():
            full = engine.pending.next_name("allgather") if name is None else f"allgather.{name}.{part}"
            signature = Signature.of(
                [entries], name=full, kind=CollectiveKind.ALLGATHER, once=name is None, by_all=by_all
            )
            self._works.append(engine.submit(signature, [entries]))

    def wait(self, interrupted: Callable[[], bool] | None) -> bool:
        """Wait for both all-gathers. Return False if `interrupted`, which is called regularly, returned True.

        Raises:
            CommError: an operation or the job has failed.
        """
        return all(self._engine.finish(work, interrupted) for work in self._works)

    def result(self) -> torch.Tensor:
        """Wait for both all-gathers, and return the sum as an uncoalesced COO tensor."""
        self.wait(None)
        (indices,), (values,) = (work.results for work in self._works)
        return torch.sparse_coo_tensor(indices.t(), values, self._size, device=values.device, check_invariants=False)


# ── process sets: subsets of the ranks, each with its own engine; set 0 is all ranks ──────────────────────────────────
# All ranks must take part in adding or removing a process set, also ranks outside the set. The call succeeds or raises
# on all ranks alike.

GLOBAL = 0
"""Id of the process set that contains all ranks."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankSet:
    """A process set: a subset of the ranks that runs its own collectives.

    Attributes:
        number: id of the set, equal on all ranks.
        ranks: ranks in the set, in ascending order.
        comm: communicator of these ranks, for their main threads. None on ranks outside the set.
        engine: engine that runs the eager operations of these ranks. None on ranks outside the set.
        control: control plane of these ranks. None on ranks outside the set, and before `RankSets.members` opens it.
    """

    number: int
    ranks: tuple[int, ...]
    comm: Communicator | None
    engine: EagerEngine | None
    control: ControlPlane | None = None


class RankSets:
    """All process sets (subsets of the ranks) of a job, by id. `add` and `remove` are collective over all ranks."""

    def __init__(
        self,
        control: ControlPlane,
        watchdog: Watchdog,
        make_engine: Callable[..., EagerEngine] = EagerEngine,
    ) -> None:
        """Open set 0, which contains all ranks. The caller closes `control` and `watchdog`. Collective.

        Args:
            control: control plane of all ranks.
            watchdog: object that reports operations that wait too long.
            make_engine: creates the engine of a set: `EagerEngine`, possibly with further arguments.
        """
        self._control, self._watchdog, self._make_engine = control, watchdog, make_engine
        self._sets: dict[int, RankSet] = {}
        self._last = 0
        self._open(GLOBAL, tuple(range(control.size)), control.comm)
        self._sets[GLOBAL].control = control

    def __getitem__(self, number: int) -> RankSet:
        return self._sets[number]

    def __contains__(self, number: object) -> bool:
        return number in self._sets

    def engines(self) -> list[tuple[int, EagerEngine]]:
        """Return (id of the set, engine of its eager operations) for each process set that contains this rank."""
        return [(number, each.engine) for number, each in list(self._sets.items()) if each.engine is not None]

    def members(self, number: int) -> RankSet:
        """Return the process set with id `number`, with its control plane. Collective over the ranks of the set.

        The first call opens the control plane.
        """
        rank_set = self._sets[number]
        if rank_set.control is None:
            assert rank_set.comm is not None
            rank_set.control = self._control.of_subset(rank_set.comm)
        return rank_set

    def add(self, ranks: Sequence[int]) -> int:
        """Open a process set that contains `ranks`. Return its id. Collective over all ranks.

        Raises:
            ConfigError: on some rank `ranks` is empty, contains unknown or repeated ranks, or is a set already. Raised
                on all ranks.
            MismatchError: different ranks pass different `ranks`. Raised on all ranks.
        """
        members = tuple(sorted(ranks))
        gathered = self._control.all_gather((members, self._problem(members)))
        if problems := [problem for _, problem in gathered if problem]:
            raise ConfigError(problems[0])
        if different := [rank for rank, (others, _) in enumerate(gathered) if others != gathered[0][0]]:
            raise MismatchError(
                f"the ranks disagree about a process set (group of ranks): rank 0 passed ranks {list(gathered[0][0])}, "
                f"rank {different[0]} passed ranks {list(gathered[different[0]][0])}; all ranks must pass the same list"
            )
        self._last += 1
        comm = None
        if self._control.rank in members:
            comm = self._control.comm.subset(members)
        self._open(self._last, members, comm)
        return self._last

    def _problem(self, members: tuple[int, ...]) -> str:
        size = self._control.size
        if not members or len(set(members)) < len(members) or not all(0 <= rank < size for rank in members):
            return f"a process set must name at least one of the ranks 0 … {size - 1}, each once, not {list(members)}"
        for number, rank_set in self._sets.items():
            if rank_set.ranks == members:
                return f"A process set with ranks {list(members)} has been added already (id {number})"
        return ""

    def remove(self, number: int | None, before: Callable[[int], None] = lambda _: None) -> bool:
        """Remove a process set. Return False if it does not exist or is set 0. Collective over all ranks.

        Args:
            number: id of the set.
            before: called with the id on all ranks before the set is closed, to close components that use the set.

        Raises:
            MismatchError: different ranks pass different ids. Raised on all ranks.
            CommError: a rank of the set has operations in flight. Raised on all ranks.
        """
        rank_set = self._sets.get(number) if number else None
        pending = len(rank_set.engine.pending) if rank_set is not None and rank_set.engine is not None else 0
        gathered = self._control.all_gather((number, pending))
        if any(other != number for other, _ in gathered):
            raise MismatchError(
                "all ranks must remove the same process set (group of ranks), but ranks 0, 1, … passed the ids "
                f"{[other for other, _ in gathered]}"
            )
        if rank_set is None:
            return False
        assert number is not None
        if busy := [rank for rank, (_, count) in enumerate(gathered) if count]:
            raise CommError(
                f"cannot remove process set (group of ranks) {number}, because operations on rank {busy[0]} have not "
                "ended; call synchronize() on them first"
            )
        before(number)
        self._close(number)
        return True

    def _open(self, number: int, ranks: tuple[int, ...], comm: Communicator | None) -> None:
        engine = None
        if comm is not None:
            where = f" of process set {number} (ranks {', '.join(map(str, ranks))})" if number else ""
            engine = self._make_engine(comm, self._control.failures, where=where, members=ranks)
            self._watchdog.watch(engine.oldest_wait, engine.pending.describe)
        self._sets[number] = RankSet(number=number, ranks=ranks, comm=comm, engine=engine)

    def _close(self, number: int) -> None:
        rank_set = self._sets.pop(number)
        if rank_set.engine is None or rank_set.comm is None:
            return
        self._watchdog.unwatch(rank_set.engine.oldest_wait, rank_set.engine.pending.describe)
        if rank_set.engine.close() and number:
            if rank_set.control is not None:
                rank_set.control.close()
            rank_set.comm.free()

    def close(self) -> None:
        """Close all process sets. Collective over all ranks."""
        for number in sorted(self._sets, reverse=True):
            self._close(number)
