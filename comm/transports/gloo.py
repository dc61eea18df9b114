"""Transports over Gloo. Each stream is a separate process group, with its own TCP connection between any two ranks.

Several TCP connections are faster than one, because clouds limit the rate of each connection. The process groups are
created directly, without `torch.distributed.init_process_group`, so the user's default process group is not affected.
Gloo's threads run without the GIL: launching the all-reduce of a unit (bucket) takes some microseconds, and Gloo runs
no Python code until the caller waits for the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import itertools
import os
import pickle
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed import ReduceOp as TorchOp

from sirtaki.comm import recorder
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.waiting import WAIT_SLICE_S
from sirtaki.comm.device import Event
from sirtaki.errors import CommError
from sirtaki.machine import free_in_forked_children, keep_in_forked_children

from ..plan import TransportKind
from .contract import (
    SHARE,
    Agree,
    FlatBuffer,
    Opened,
    Parcels,
    ReduceOp,
    StreamCost,
    StreamSpec,
    StreamTransport,
    ThreadWork,
    Work,
    Worker,
    join_workers,
    open_together,
    scale_,
)
from .shared_memory import reduce_share

GIVE_UP_S = 5.0
"""Seconds for which a rank still waits for its threads that open process groups, after a rank has failed. The wait is
limited, because PyTorch 2.4's Gloo may wait forever for a peer that has given up."""


class GroupOpening:
    """Opens several Gloo process groups at the same time, and exchanges the addresses of all of them at once.

    Gloo stores a key with the addresses of each rank, and waits for the keys of all ranks. Each process group is opened
    in a thread of its own. Once every thread waits for a key or has ended, the calling thread all-gathers the new keys
    of all groups. So opening many groups takes as many messages as opening one, and needs no separate key-value store.
    """

    def __init__(self, gather: Callable[[Any], list[Any]], failures: FailureBoard) -> None:
        """Prepare to open process groups.

        Args:
            gather: returns the values of all ranks of the process groups, by rank. Collective.
            failures: failure board of the job. A failure of the job ends all waits.
        """
        self._gather, self._failures = gather, failures
        self._changed = threading.Condition()
        self._keys, self._new = dict[str, bytes](), dict[str, bytes]()
        self._rounds = self._waiting = 0
        self._problem, self._give_up_s = "", 0.0

    def open(self, creators: Sequence[Callable[[Store], ProcessGroupGloo]]) -> list[ProcessGroupGloo]:
        """Open a process group by each of `creators`, functions that get the store for their group. Collective.

        All ranks take part until all groups are opened or have failed, so no rank waits for a rank that has failed.

        Raises:
            RuntimeError: a group could not be opened on this rank.
            CommError: the job has failed.
        """
        outcomes = [Future[ProcessGroupGloo]() for _ in creators]
        stores = [_OpeningStore(self, f"{number}/") for number in range(len(creators))]
        for create, store, outcome in zip(creators, stores, outcomes, strict=True):
            try:
                threading.Thread(
                    target=self._run, args=(partial(create, store), outcome), name="sirtaki-opening", daemon=True
                ).start()
            except RuntimeError as err:
                outcome.set_exception(err)
        try:
            while not self._exchange(outcomes):
                pass
        except BaseException as err:
            for outcome in outcomes:
                outcome.cancel()
            self._deliver({}, str(err) or "interrupted")
            raise
        ended = [outcome for outcome in outcomes if not outcome.cancelled()]
        errors = [error for outcome in ended if (error := outcome.exception()) is not None]
        if errors or self._problem:
            for outcome in ended:
                if outcome.exception() is None:
                    _abort(outcome.result())
            raise RuntimeError(str(errors[0]) if errors else self._problem) from (errors[0] if errors else None)
        _stores_in_use.extend(stores)
        self._keys.clear()  # Free the addresses of ranks. Gloo does not read them once it is connected.
        return [outcome.result() for outcome in outcomes]

    def _run(self, create: Callable[[], ProcessGroupGloo], outcome: Future[ProcessGroupGloo]) -> None:
        """Open one process group, in a thread of its own. Close the group if the caller no longer waits for it."""
        error, group = None, None
        try:
            group = keep_in_forked_children(create())
        except BaseException as raised:
            error = raised
        with self._changed:
            if not outcome.set_running_or_notify_cancel():
                if group is not None:
                    _abort(group)
            elif group is None:
                outcome.set_exception(error)
            else:
                outcome.set_result(group)
            self._changed.notify_all()

    def _exchange(self, outcomes: Sequence[Future[ProcessGroupGloo]]) -> bool:
        """Wait until each opening thread waits for a key or has ended, then all-gather the keys that these threads have
        set.

        Return whether the threads of all ranks have ended.
        """
        while True:
            self._failures.check()
            with self._changed:
                running = sum(not outcome.done() for outcome in outcomes)
                if running == self._waiting:
                    break
                if self._problem and time.monotonic() > self._give_up_s:
                    for outcome in outcomes:
                        # If the thread still opens the process group later, it closes the group itself.
                        outcome.cancel()
                    continue
                self._changed.wait(WAIT_SLICE_S)
        errors = [each.exception() for each in outcomes if each.done() and not each.cancelled()]
        problem = next((str(error) for error in errors if error is not None), "")
        new, self._new = self._new, {}
        packed: list[tuple[bool, str, bytes]] = self._gather(
            (not running, problem, zlib.compress(pickle.dumps(new), 1))
        )
        received: dict[str, bytes] = {}
        for _, _, keys in packed:
            received |= pickle.loads(zlib.decompress(keys))
        all_done = all(done for done, _, _ in packed)
        failed = next((f"rank {rank} failed: {text}" for rank, (_, text, _) in enumerate(packed) if text), "")
        if not (received or all_done or failed):
            failed = "Gloo waits for a key that no rank sets"
        self._deliver(received, failed)
        return all_done

    def _deliver(self, keys: Mapping[str, bytes], problem: str) -> None:
        """Wake the threads that wait for keys. They continue with `keys`, or raise an error if there is a `problem`."""
        with self._changed:
            self._keys.update(keys)
            if problem and not self._problem:
                self._problem, self._give_up_s = problem, time.monotonic() + GIVE_UP_S
            self._rounds, self._waiting = self._rounds + 1, 0
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Store a key of this rank. Thread-safe."""
        with self._changed:
            self._keys[key] = self._new[key] = value

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value. Thread-safe.

        Raises:
            RuntimeError: a rank cannot open its process group, or the job has failed.
        """
        with self._changed:
            while key not in self._keys:
                if self._problem:
                    raise RuntimeError(self._problem)
                self._waiting, rounds = self._waiting + 1, self._rounds
                self._changed.notify_all()
                while self._rounds == rounds:
                    self._changed.wait()
            return self._keys[key]


class _OpeningStore(Store):
    """Key-value store of one process group that a `GroupOpening` opens."""

    def __init__(self, opening: GroupOpening, prefix: str) -> None:
        super().__init__()
        self._opening, self._prefix = opening, prefix

    def set(self, key: str, value: str | bytes) -> None:
        self._opening.set(self._prefix + key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._opening.get(self._prefix + key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


_stores_in_use: list[Store] = []
"""Stores of all process groups. They must not be freed, because a process group may call its store later, but keeps no
reference to the Python object."""


MAX_STREAMS = 24
RENDEZVOUS_TIMEOUT_S = 60.0
"""Timeout for connecting the ranks by one process group. It may be short, because all ranks begin at the same time."""

UNUSED_TAG = (1 << 31) - 1
"""Message tag that `GlooTransport.send_receive` never uses."""

END_S = 1.0
"""Seconds for which `GlooTransport.close` waits for its threads. Threads that have not ended by then keep running."""

OWN_DESCRIPTORS = 5
"""Number of file descriptors that a Gloo process group uses besides one connection per peer: those of its listening
socket and of its I/O thread."""

OTHER_DESCRIPTORS = 100
"""Typical number of file descriptors that a training process has open besides those for communication."""


def most_ranks(streams: int, *, descriptor_limit: int) -> int:
    """Return the largest number of ranks of a job in which each rank can open `streams` Gloo process groups."""
    return max(1, int(SHARE * (descriptor_limit - OTHER_DESCRIPTORS)) // streams - OWN_DESCRIPTORS)


TORCH_OPS = {
    ReduceOp.SUM: TorchOp.SUM,
    ReduceOp.MIN: TorchOp.MIN,
    ReduceOp.MAX: TorchOp.MAX,
    ReduceOp.PRODUCT: TorchOp.PRODUCT,
}


class _GlooUnitWork(Work):
    """An all-reduce or all-to-all in flight. The first `wait` after its completion multiplies the result by `scale`."""

    def __init__(self, work: torch.distributed.Work, result: torch.Tensor, scale: float, what: str) -> None:
        self._work, self._result, self._scale, self._what = work, result, scale, what
        self._done = False
        self.done_s = 0.0

    def record_end(self) -> None:
        """Make Gloo call a function that sets `done_s` when the all-reduce ends."""

        def set_time(_: torch.futures.Future[list[torch.Tensor]]) -> None:
            self.done_s = time.perf_counter()

        self._work.get_future().add_done_callback(set_time)

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def times(self) -> tuple[Event | None, Event | None]:
        return None, self.done_s or None

    def wait(self, timeout_s: float) -> bool:
        if self._done:
            return True
        if not self._work.is_completed():
            # Ignore the error, because `wait` also raises if its timeout expires while the reduction continues.
            with contextlib.suppress(RuntimeError):
                self._work.wait(datetime.timedelta(seconds=timeout_s))
            if not self._work.is_completed():
                return False
        try:
            self._work.wait()  # `wait` raises if the reduction has failed.
        except RuntimeError as err:
            raise CommError(
                f"the Gloo operation {self._what} failed; most likely a rank has ended or its network is down (look "
                f"at the logs of all ranks): {err}"
            ) from err
        scale_(self._result, self._scale)
        self._done = True
        return True


def _abort(group: ProcessGroupGloo) -> None:
    # PyTorch before 2.7 has no `abort`. There, a group ends when its last reference is dropped.
    if hasattr(group, "abort"):
        group.abort()


_open_lock = free_in_forked_children(threading.Lock())
# Groups that are not freed before the process exits, because freeing a group may block.
_kept_until_exit: list[list[ProcessGroupGloo]] = []
_SO_ATTACH_FILTER, _RETURN = 26, 0x06  # Constants of the Linux headers asm/socket.h and linux/bpf_common.h.


def _listening_sockets() -> set[int]:
    """Return the file descriptors of listening sockets of this process. Empty on systems without /proc/self/fd."""
    found = set[int]()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as there:
                    if there.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(int(name))
    return found


def _open_and_list(open_: Callable[[], Opened], sockets: int) -> tuple[Opened, set[int]]:
    """Call `open_`, and return its result and the file descriptors of the listening sockets that it has opened.

    The returned set is empty if not exactly `sockets` new listening sockets are found, because another thread may then
    have opened one of them.
    """
    with _open_lock:
        before = _listening_sockets()
        made = open_()
        found = _listening_sockets() - before
    return made, found if len(found) == sockets else set()


def _open_device(address: str) -> object:
    try:
        return ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    except TypeError:  # PyTorch before 2.8 has no `lazy_init`, and always connects at once.
        return ProcessGroupGloo.create_device(hostname=address)


def _reject_connections(listeners: set[int]) -> None:
    """Make Linux drop all packets to the listening sockets of Gloo, so that no more clients can connect.

    Gloo would keep a file descriptor open for each unknown client, such as a port scanner.
    """
    # Packet filter for a socket that keeps 0 bytes of each packet.
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    for listener in listeners:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listener)) as there:
            there.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def open_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Open a Gloo process group that rejects further connections once its ranks are connected. Collective.

    In all other respects, the group equals one that PyTorch opens. The arguments are those of `ProcessGroupGloo`.

    Raises:
        RuntimeError: the ranks cannot connect, or an interface in `GLOO_SOCKET_IFNAME` does not exist.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices, listeners = _open_and_list(
        lambda: (
            [ProcessGroupGloo.create_device(interface=name) for name in names]
            or [ProcessGroupGloo.create_default_device()]
        ),
        sockets=len(names) or 1,
    )
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
    options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
    group = keep_in_forked_children(ProcessGroupGloo(store, rank, size, options))
    # If TORCH_GLOO_LAZY_INIT is 1, the ranks connect only at the first operation, so connections must not be rejected
    # now.
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "0":
        _reject_connections(listeners)
    return group


class GlooTransport(StreamTransport[ProcessGroupGloo]):
    """Transport over Gloo. Each stream is a process group with one thread, which keeps its units (buckets) in order."""

    kind = TransportKind.GLOO
    max_streams = MAX_STREAMS

    def __init__(
        self,
        *,
        gather: Callable[[Any], list[Any]],
        address: str,
        rank: int,
        size: int,
        timeout_s: float,
        agree: Agree,
        failures: FailureBoard,
    ) -> None:
        """Create the transport. `open_streams` connects the ranks.

        Args:
            gather: returns the values of all participating ranks, by rank. Collective.
            address: address at which other ranks can reach this host.
            rank: rank of this process among the participating ranks.
            size: number of participating ranks.
            timeout_s: seconds after which an all-reduce without progress fails.
            agree: collective function that gets this rank's error message ("" = none), and raises on all participating
                ranks if any of them has passed an error message.
            failures: record of the job's failure. Once it contains a failure, opening streams raises an error.
        """
        super().__init__()
        self._gather, self._address = gather, address
        self._rank, self._size, self._agree, self._failures = rank, size, agree, failures
        self._messages: set[object] = set()  # Contains one entry for each pending call of `send_receive`.
        self.stream_cost = StreamCost(descriptors=size + OWN_DESCRIPTORS, threads=2, connections=size - 1)
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def _open(self, numbers: range) -> list[ProcessGroupGloo]:
        """Open streams, each a process group, at the same time."""
        if not numbers:
            return []
        what = f"Gloo stream{'s' * (len(numbers) > 1)} {numbers[0]}{f' to {numbers[-1]}' * (len(numbers) > 1)}"
        # Create one Gloo device per stream, because each Gloo device has an I/O thread.
        devices = open_together(
            what,
            lambda: [_open_and_list(lambda: _open_device(self._address), sockets=1) for _ in numbers],
            agree=self._agree,
        )
        creators = [partial(self._create, device) for device, _ in devices]
        groups = open_together(
            what,
            lambda: GroupOpening(self._gather, self._failures).open(creators),
            agree=self._agree,
            close=lambda groups: list(map(_abort, groups)),
        )
        for (_, listeners), group in zip(devices, groups, strict=True):
            # All ranks are connected, so a further client can only be a stranger, such as a port scanner.
            _reject_connections(listeners)
            group._set_default_timeout(self._timeout)
        return groups

    def _create(self, device: object, store: Store) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
        options._threads = 1
        options._timeout = datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        options._devices = [device]
        return ProcessGroupGloo(store, self._rank, self._size, options)

    def _start(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        unit = buffer.tensor[start:stop]
        work = self.streams[stream.number].allreduce([unit], TORCH_OPS[op])  # type: ignore[attr-defined]  # not in stub
        unit_work = _GlooUnitWork(
            work, unit, scale, f"the all-reduce of elements [{start}, {stop}) on stream {stream.number}"
        )
        if recorder.times_wanted():
            unit_work.record_end()
        return unit_work

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        """Launch an all-to-all. All pairs of ranks send at the same time, each pair over its own TCP connection."""
        sent, received = parcels.sent_by(self._rank), parcels.received_by(self._rank)
        given = outgoing.tensor[: sent[-1][1]]
        if parcels.shared:
            # Repeat the parcel, because Gloo requires one contiguous parcel per receiver.
            given = given.repeat(self._size)
        work = self.streams[stream.number].alltoall_base(  # type: ignore[attr-defined]  # torch's stub lacks it
            incoming, given, received, [stop - start for start, stop in sent]
        )
        return _GlooUnitWork(work, incoming, 1.0, f"an all-to-all on stream {stream.number}")

    def send_receive(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], *, stream: int, tag: int
    ) -> Callable[[], None]:
        """Launch a send of `sent[r]` to each peer r, and a receive of `received[r]` from r. Collective, non-blocking.

        The messages are sent from and received into the given tensors, without copies. All messages of a call have the
        tag `tag`. Messages of different calls are not ordered and do not wait for each other.

        Returns:
            Function that blocks until all messages are sent and received. It raises CommError if one has failed.
        """
        group = self.streams[stream]
        peers = [(self._rank + step) % self._size for step in range(1, self._size)]
        works = [group.recv([received[rank]], rank, tag) for rank in reversed(peers)]  # type: ignore[attr-defined]
        works += [group.send([sent[rank]], rank, tag) for rank in peers]  # type: ignore[attr-defined]

        in_flight = object()
        self._messages.add(in_flight)

        def finish() -> None:
            try:
                for work in works:
                    work.wait(self._timeout)
            except RuntimeError as err:
                raise CommError(
                    f"Gloo failed to send or receive a message on stream (parallel connection) {stream}; most likely a "
                    f"rank has ended (look at the logs of all ranks): {err}"
                ) from err
            finally:
                self._messages.discard(in_flight)

        return finish

    def keep(self, streams: int) -> None:
        """Close all but the first `streams` streams (process groups), because idle streams use CPU time.

        The I/O thread of a Gloo process group wakes up 100 times a second.
        """
        self._close_after(streams)

    def _fail_messages(self, group: ProcessGroupGloo) -> None:
        """Make all pending waits for messages of `send_receive` on `group` fail. `abort` would not end them.

        The waits must end now, because a thread that returns from such a wait at interpreter exit kills the process. To
        end them, this method waits 1 ms for a message that no rank sends. When its wait times out, Gloo fails all other
        waits of the group.
        """
        with contextlib.suppress(RuntimeError):
            peer = (self._rank + 1) % self._size
            target = torch.empty(1, dtype=torch.float32, device="cpu")
            group.recv([target], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))  # type: ignore[attr-defined]

    def _close_streams(self, streams: list[ProcessGroupGloo]) -> bool:
        """Abort the process groups of `streams`, and wait up to `END_S` for their threads.

        The last reference to each process group is dropped in a helper thread, because dropping it may block: an
        all-reduce that starts to wait while its connection is being closed blocks until its timeout.
        """
        if self._messages:  # Messages of `send_receive` are pending here only if the job has failed.
            for stream in streams:
                self._fail_messages(stream)
        boxes: list[list[ProcessGroupGloo]] = []
        while streams:
            boxes.append([streams.pop()])
            # Pass the list element without a local variable, which would be another reference to the group.
            _abort(boxes[-1][0])
        enders = [threading.Thread(target=box.clear, name="sirtaki-gloo-end", daemon=True) for box in boxes]
        for ender in enders:
            try:
                ender.start()
            except RuntimeError:  # Since Python 3.12, no thread can start at interpreter exit.
                _kept_until_exit.extend(boxes)
                return True
        deadline_s = time.monotonic() + END_S
        for ender in enders:
            ender.join(max(0.0, deadline_s - time.monotonic()))
        return True


ONE_HOP_BYTES = 16 << 10
"""Largest size in bytes of a unit (bucket) that each rank sends whole to all peers, so that every rank reduces the
whole unit. Larger units are cut into one part per rank, and each rank reduces one part."""

MOST_SENDING = 3
"""Largest number of units (buckets) of one stream (set of connections) whose summands are sent at the same time."""


class _Path:
    """Direct all-reduce of the units (buckets) of one stream (set of connections), in two threads.

    One thread exchanges the ranks' summands of a unit, while the other thread exchanges the sums of earlier units.
    """

    def __init__(self, transport: GlooTransport, number: int, rank: int, size: int) -> None:
        """Start the threads.

        Raises:
            RuntimeError: a thread cannot be started.
        """
        self._transport, self._number, self._rank, self._size = transport, number, rank, size
        # Numbers of units (buckets) that were submitted, and that the first of the two threads has begun.
        self._submitted = self._begun = 0
        self._sending: deque[tuple[ThreadWork, str, Callable[[], Callable[[], None]]]] = deque()
        self._scratch: list[torch.Tensor] = []
        self._summands, self._sums = (Worker(f"sirtaki-direct-{number}-{what}") for what in ("in", "out"))

    def all_reduce(self, unit: torch.Tensor, op: ReduceOp, scale: float, what: str) -> Work:
        """Launch the all-reduce of a unit (bucket) of at least one element, in place. Non-blocking."""
        work = ThreadWork()
        self._submitted += 1
        self._summands.put(partial(self._begin, work, unit, op, scale, f"Gloo failed in {what}"))
        return work

    def _begin(self, work: ThreadWork, unit: torch.Tensor, op: ReduceOp, scale: float, failed: str) -> None:
        """Send the parts of a unit (bucket) to the ranks that reduce them. Reduce this rank's parts of earlier units.

        Runs in the thread that exchanges summands.
        """
        self._begun += 1
        work.begun_s = time.perf_counter()
        work.attempt(lambda: self._sending.append((work, failed, self._send(unit, op, scale))), failed)
        while self._sending and (len(self._sending) == MOST_SENDING or self._begun == self._submitted):
            earlier, failed, add_up = self._sending.popleft()
            earlier.attempt(lambda: self._sums.put(partial(earlier.run, add_up(), failed)), failed)  # noqa: B023 - called at once

    def _send(self, unit: torch.Tensor, op: ReduceOp, scale: float) -> Callable[[], Callable[[], None]]:
        """Send each part of a unit (bucket) to the rank that reduces the part.

        Returns:
            Function that waits for the summands of this rank's part, reduces them and sends the sum to the peers. The
            function returns a second function, which waits for the sums of the other parts.
        """
        rank, size, numel = self._rank, self._size, unit.numel()
        tag = 2 * self._begun % (UNUSED_TAG - 1)  # Message tag of summands. Sums have the tag `tag + 1`.
        in_one_hop = numel * unit.itemsize <= ONE_HOP_BYTES or numel < size
        bounds = [numel * part // size for part in range(size + 1)]
        parts = [unit] * size if in_one_hop else [unit[low:high] for low, high in itertools.pairwise(bounds)]
        own = parts[rank]
        needed = (size - 1) * own.numel() * own.itemsize
        memory = self._scratch.pop() if self._scratch else torch.empty(0, dtype=torch.uint8, device="cpu")
        if memory.numel() < needed:
            memory = torch.empty(needed, dtype=torch.uint8, device="cpu")
        received = list(memory[:needed].view(unit.dtype).view(size - 1, own.numel()))
        summands = [*received[:rank], own, *received[rank:]]
        wait_for_summands = self._transport.send_receive(parts, summands, stream=self._number, tag=tag)

        def add_up() -> Callable[[], None]:
            wait_for_summands()
            reduce_share(summands, 0, own.numel(), op=op, scale=scale, outputs=[own])
            self._scratch.append(memory)
            if in_one_hop:
                return lambda: None
            return self._transport.send_receive([own] * size, parts, stream=self._number, tag=tag + 1)

        return add_up

    def end(self) -> bool:
        """End the two threads of this stream. Return False if a thread still waits for a peer."""
        return join_workers([self._summands, self._sums], within_s=END_S)


class DirectTransport(GlooTransport):
    """Transport over Gloo with a direct all-reduce, which takes fewer message latencies than Gloo's ring.

    Each rank r receives part r of a unit (bucket) from all ranks, reduces the part, and sends the result to all ranks.
    On P ranks, this takes 2 message latencies, and 1 for small units, whereas a ring takes 2(P-1). Except for small
    units, a rank sends as many bytes as with a ring, but over P-1 connections at the same time. The results are bitwise
    equal on all ranks.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._paths: list[_Path] = []
        self.stream_cost += StreamCost(threads=2)

    def _open(self, numbers: range) -> list[ProcessGroupGloo]:
        def start() -> list[_Path]:
            return [_Path(self, number, self._rank, self._size) for number in numbers]

        def end(paths: list[_Path]) -> None:
            for path in paths:
                path.end()

        paths = open_together("threads of Gloo streams", start, agree=self._agree, close=end)
        try:
            groups = super()._open(numbers)
        except CommError:
            end(paths)
            raise
        self._paths += paths
        return groups

    def _start(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        unit = buffer.tensor[start:stop]
        what = f"the all-reduce of elements [{start}, {stop}) on stream {stream.number}"
        return self._paths[stream.number].all_reduce(unit, op, scale, what)

    def _close_streams(self, streams: list[ProcessGroupGloo]) -> bool:
        paths = self._paths[len(self.streams) :]
        del self._paths[len(self.streams) :]
        return super()._close_streams(streams) and [path.end() for path in paths].count(False) == 0
