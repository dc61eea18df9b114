"""Gloo: each stream is a process group of its own, hence TCP connections of its own between every two ranks.

One connection is one flow, and clouds cap a flow; more groups are more flows. The groups are built directly, so the
user's own default process group is left alone. Gloo's threads work outside the GIL: submitting costs some microseconds
and nothing else of Python runs until the wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import itertools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import ReduceOp as TorchOp

from sirtaki.comm import recorder
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.waiting import Deadline, Poll, unless_failed, wait_for
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
    ended,
    open_together,
    scale_,
)
from .shared_memory import reduce_share

LOOK_S = 2e-3
LONGEST_WAIT_S = 60.0
"""Where whoever waits names no limit."""


class WatchfulStore(Store):
    """What Gloo asks of a store while its ranks find each other, over another store. Whoever uses it keeps it alive."""

    def __init__(self, store: Store, failures: FailureBoard) -> None:
        """Waits as long as `failures` are none."""
        super().__init__()
        self._store, self._failures = store, failures

    def set(self, key: str, value: str) -> None:
        """As `Store.set`."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """As `Store.get`.

        Raises:
            CommError: the job has failed.
        """
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """As `Store.add`."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """As `Store.check`."""
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As `Store.wait`.

        Raises:
            CommError: the job has failed, or the time is up.
        """
        limit_s = LONGEST_WAIT_S if timeout is None else timeout.total_seconds()
        wanted = list(keys)
        if not wait_for(
            lambda: self._store.check(wanted), Deadline.after(limit_s), Poll.SLICES, failures=self._failures
        ):
            raise CommError(f"no rank has told {', '.join(keys)} within {limit_s:.0f} s")


MAX_STREAMS = 24
RENDEZVOUS_TIMEOUT_S = 60.0
"""How long the connections of one stream may take to be made; all ranks begin at the same time."""

NO_TRADE = (1 << 31) - 1
"""A tag under which nothing is sent."""

END_S = 1.0
"""How long the threads of closed streams may take to end, before they are left to themselves."""

OWN_DESCRIPTORS = 5
"""Of one stream: its listening socket, and those of its I/O thread; beside one connection to every other rank."""

OTHER_DESCRIPTORS = 100
"""What a training process has open besides, about."""


def most_ranks(streams: int, *, descriptor_limit: int) -> int:
    """How many ranks a job may have so that each can open so many streams."""
    return max(1, int(SHARE * (descriptor_limit - OTHER_DESCRIPTORS)) // streams - OWN_DESCRIPTORS)


TORCH_OPS = {
    ReduceOp.SUM: TorchOp.SUM,
    ReduceOp.MIN: TorchOp.MIN,
    ReduceOp.MAX: TorchOp.MAX,
    ReduceOp.PRODUCT: TorchOp.PRODUCT,
}


class _GlooUnitWork(Work):
    """A unit under way; the scale is applied by whoever waits, once."""

    def __init__(self, work: torch.distributed.Work, result: torch.Tensor, scale: float, what: str) -> None:
        self._work, self._result, self._scale, self._what = work, result, scale, what
        self._done = False
        self.done_s = 0.0

    def note_end(self) -> None:
        """Notes when the unit is reduced, in `done_s`."""
        self._work.get_future().add_done_callback(self._note)

    def _note(self, _: torch.futures.Future[list[torch.Tensor]]) -> None:
        self.done_s = time.perf_counter()

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def times(self) -> tuple[Event | None, Event | None]:
        return None, self.done_s or None

    def wait(self, timeout_s: float) -> bool:
        if self._done:
            return True
        if not self._work.is_completed():
            # It raises where it fails and where the time is up, after which the reduction goes on, or has just ended.
            with contextlib.suppress(RuntimeError):
                self._work.wait(datetime.timedelta(seconds=timeout_s))
            if not self._work.is_completed():
                return False
        try:
            self._work.wait()  # raises what went wrong
        except RuntimeError as err:
            raise CommError(
                f"Gloo failed in {self._what}, most likely because a rank has ended or its network is down: {err}"
            ) from err
        scale_(self._result, self._scale)
        self._done = True
        return True


def _abort(group: ProcessGroupGloo) -> None:
    if hasattr(group, "abort"):  # torch < 2.7 has none: there a group ends when nobody holds it
        group.abort()


_opening = free_in_forked_children(threading.Lock())
_left_to_the_process: list[list[ProcessGroupGloo]] = []  # whoever drops the last reference to a group waits for it
_SO_ATTACH_FILTER, _RETURN = 26, 0x06  # of asm/socket.h and linux/bpf_common.h


def _listening() -> set[int]:
    """Descriptors at which this process listens; none where the system does not list them."""
    found = set[int]()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as there:
                    if there.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(int(name))
    return found


def _opened(open_: Callable[[], Opened], sockets: int) -> tuple[Opened, set[int]]:
    """What it opens, and the descriptors at which that listens; none where it is not sure which they are."""
    with _opening:
        before = _listening()
        made = open_()
        found = _listening() - before
    return made, found if len(found) == sockets else set()


def _open_device(address: str) -> object:
    try:
        return ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    except TypeError:  # torch < 2.8 connects at once
        return ProcessGroupGloo.create_device(hostname=address)


def _admit_nobody(listeners: set[int]) -> None:
    """Drops whatever comes to sockets that listen: Gloo keeps a descriptor for whoever connects, and never looks."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))  # keep 0 bytes of each packet
    for listener in listeners:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listener)) as there:
            there.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def open_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Open a group of Gloo's as PyTorch does, which admits no stranger once its ranks are connected. Collective.

    The arguments are `ProcessGroupGloo`'s.

    Raises:
        RuntimeError: the ranks do not find each other, or there is no such interface as `GLOO_SOCKET_IFNAME` lists.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices, listeners = _opened(
        lambda: (
            [ProcessGroupGloo.create_device(interface=name) for name in names]
            or [ProcessGroupGloo.create_default_device()]
        ),
        sockets=len(names) or 1,
    )
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
    options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
    group = keep_in_forked_children(ProcessGroupGloo(store, rank, size, options))
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "0":  # else ranks connect when they first have to
        _admit_nobody(listeners)
    return group


class GlooTransport(StreamTransport[ProcessGroupGloo]):
    """Streams over Gloo process groups, each with one worker thread, which keeps it in order."""

    kind = TransportKind.GLOO
    max_streams = MAX_STREAMS

    def __init__(
        self,
        *,
        store: Store,
        prefix: Callable[[], str],
        address: str,
        rank: int,
        size: int,
        timeout_s: float,
        agree: Agree,
        failures: FailureBoard,
    ) -> None:
        """Starts nothing; connections are made by `open_streams`.

        Args:
            store: where the ranks find each other.
            prefix: gives a fresh key prefix at each call, the same on all ranks.
            address: of this host, as the other ranks reach it.
            rank: of this process among those that take part.
            size: how many take part.
            timeout_s: after this long a reduction that does not get on fails.
            agree: of all ranks that open streams at the same time.
            failures: of the job.
        """
        super().__init__()
        self._store, self._prefix, self._address = store, prefix, address
        self._rank, self._size, self._agree, self._failures = rank, size, agree, failures
        self._trades: set[object] = set()  # under way
        self.stream_cost = StreamCost(descriptors=size + OWN_DESCRIPTORS, threads=2)
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def _open(self, number: int) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
        options._threads = 1
        options._timeout = datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        store = PrefixStore(self._prefix(), self._store)
        what = f"Gloo stream {number}"
        # A device of its own gives each stream its own I/O thread.
        device, listeners = open_together(
            what, lambda: _opened(lambda: _open_device(self._address), sockets=1), agree=self._agree
        )
        options._devices = [device]
        group = open_together(
            what,
            lambda: unless_failed(
                lambda: keep_in_forked_children(ProcessGroupGloo(store, self._rank, self._size, options)),
                failures=self._failures,
                undo=_abort,
            ),
            agree=self._agree,
            close=_abort,
        )
        _admit_nobody(listeners)  # all ranks are connected
        group._set_default_timeout(self._timeout)
        return group

    def _carry(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Hands the range to Gloo, which reduces it in threads of its own."""
        unit = buffer.tensor[start:stop]
        work = self.streams[stream.number].allreduce([unit], TORCH_OPS[op])  # type: ignore[attr-defined]  # as above
        unit_work = _GlooUnitWork(work, unit, scale, f"elements [{start}, {stop}) on stream {stream.number}")
        if recorder.times_wanted():
            unit_work.note_end()
        return unit_work

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        """Has each pair of ranks use its own connection of the stream, all at the same time."""
        sent, received = parcels.sent_by(self._rank), parcels.received_by(self._rank)
        given = outgoing.tensor[: sent[-1][1]]
        if parcels.shared:
            given = given.repeat(self._size)  # Gloo takes parcels that lie one behind the other only
        work = self.streams[stream.number].alltoall_base(  # type: ignore[attr-defined]  # torch's stub lacks it
            incoming, given, received, [stop - start for start, stop in sent]
        )
        return _GlooUnitWork(work, incoming, 1.0, f"an exchange on stream {stream.number}")

    def trade(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], *, stream: int, tag: int
    ) -> Callable[[], None]:
        """Sends `sent[r]` to each other rank r and fills `received[r]` from it, from and to where they lie.

        Which message is which says the tag alone: unlike units, trades have no order and do not wait for each other.

        Returns:
            Blocks until all have been sent and received; raises CommError if that fails.
        """
        group = self.streams[stream]
        others = [(self._rank + step) % self._size for step in range(1, self._size)]
        works = [group.recv([received[rank]], rank, tag) for rank in reversed(others)]  # type: ignore[attr-defined]
        works += [group.send([sent[rank]], rank, tag) for rank in others]  # type: ignore[attr-defined]

        trade = object()
        self._trades.add(trade)

        def finish() -> None:
            try:
                for work in works:
                    work.wait(self._timeout)
            except RuntimeError as err:
                raise CommError(f"Gloo failed on stream {stream}, most likely as a rank has ended: {err}") from err
            finally:
                self._trades.discard(trade)

        return finish

    def keep(self, streams: int) -> None:
        """Closes all others: the I/O thread of an idle one wakes up a hundred times a second."""
        self._end_behind(streams)

    def _end_trades(self, group: ProcessGroupGloo) -> None:
        """Has all that is waited for there fail, as Gloo does when the time of one is up: `abort` leaves trades alone.

        A thread that comes back from such a wait while the interpreter ends would end the process by a signal.
        """
        with contextlib.suppress(RuntimeError):
            other = (self._rank + 1) % self._size
            nothing = torch.empty(1, dtype=torch.float32, device="cpu")
            group.recv([nothing], other, NO_TRADE).wait(timedelta(milliseconds=1))  # type: ignore[attr-defined]

    def _end(self, streams: list[ProcessGroupGloo]) -> bool:
        """Ends groups, and waits for the end of their threads, but not long.

        A reduction that begins to wait on a connection while that is closed waits until its time is up, and whoever
        drops the last reference to its group waits for it.
        """
        if self._trades:  # of a job that has failed
            for stream in streams:
                self._end_trades(stream)
        boxes: list[list[ProcessGroupGloo]] = []
        while streams:
            boxes.append([streams.pop()])
            _abort(boxes[-1][0])  # a name for one would keep it
        enders = [threading.Thread(target=box.clear, name="sirtaki-gloo-end", daemon=True) for box in boxes]
        for ender in enders:
            try:
                ender.start()
            except RuntimeError:  # since Python 3.12 no thread starts while the interpreter ends
                _left_to_the_process.extend(boxes)
                return True
        deadline_s = time.monotonic() + END_S
        for ender in enders:
            ender.join(max(0.0, deadline_s - time.monotonic()))
        return True


ONE_HOP_BYTES = 16 << 10
"""Up to here each rank sends all of a unit to every other rank, which saves the way back of what was added up."""

AHEAD = 3
"""Units of one stream whose summands are under way at the same time."""


class _Path:
    """What reduces the units of one stream, in two threads.

    While one unit's sums are on their way back to all ranks, the summands of the next ones are under way already.
    """

    def __init__(self, transport: GlooTransport, number: int, rank: int, size: int) -> None:
        """Starts the threads.

        Raises:
            RuntimeError: one cannot be started.
        """
        self._transport, self._number, self._rank, self._size = transport, number, rank, size
        self._given = self._begun = 0  # units, counted by whoever gives them and by the thread that begins them
        self._coming: deque[tuple[ThreadWork, str, Callable[[], Callable[[], None]]]] = deque()
        self._scratch: list[torch.Tensor] = []
        self._summands, self._sums = (Worker(f"sirtaki-direct-{number}-{what}") for what in ("in", "out"))

    def all_reduce(self, unit: torch.Tensor, op: ReduceOp, scale: float, what: str) -> Work:
        """Has the unit, which is not empty, reduced in place."""
        work = ThreadWork()
        self._given += 1
        self._summands.put(partial(self._begin, work, unit, op, scale, f"Gloo failed in {what}"))
        return work

    def _begin(self, work: ThreadWork, unit: torch.Tensor, op: ReduceOp, scale: float, failed: str) -> None:
        """Sends a unit's parts to those that add them up, and goes on with units that were begun before."""
        self._begun += 1
        work.begun_s = time.perf_counter()
        work.attempt(lambda: self._coming.append((work, failed, self._send(unit, op, scale))), failed)
        while self._coming and (len(self._coming) == AHEAD or self._begun == self._given):
            earlier, failed, add_up = self._coming.popleft()
            earlier.attempt(lambda: self._sums.put(partial(earlier.run, add_up(), failed)), failed)  # noqa: B023 - at once

    def _send(self, unit: torch.Tensor, op: ReduceOp, scale: float) -> Callable[[], Callable[[], None]]:
        """Sends a unit's parts to the ranks that add them up.

        Returns:
            Waits for the summands of this rank's part, adds them up, and returns what waits for the sums of the other
            parts, of which there are none where every rank adds up all.
        """
        rank, size, numel = self._rank, self._size, unit.numel()
        tag = 2 * self._begun % (NO_TRADE - 1)  # and the next one, for the way back
        in_one_hop = numel * unit.itemsize <= ONE_HOP_BYTES or numel < size
        bounds = [numel * part // size for part in range(size + 1)]
        parts = [unit] * size if in_one_hop else [unit[low:high] for low, high in itertools.pairwise(bounds)]
        mine = parts[rank]
        needed = (size - 1) * mine.numel() * mine.itemsize
        memory = self._scratch.pop() if self._scratch else torch.empty(0, dtype=torch.uint8, device="cpu")
        if memory.numel() < needed:
            memory = torch.empty(needed, dtype=torch.uint8, device="cpu")
        others = list(memory[:needed].view(unit.dtype).view(size - 1, mine.numel()))
        summands = [*others[:rank], mine, *others[rank:]]
        came = self._transport.trade(parts, summands, stream=self._number, tag=tag)

        def add_up() -> Callable[[], None]:
            came()
            reduce_share(summands, 0, mine.numel(), op=op, scale=scale, outputs=[mine])
            self._scratch.append(memory)
            if in_one_hop:
                return lambda: None
            return self._transport.trade([mine] * size, parts, stream=self._number, tag=tag + 1)

        return add_up

    def end(self) -> bool:
        """Ends the threads; False if one still waits for other ranks."""
        return ended([self._summands, self._sums], within_s=END_S)


class DirectTransport(GlooTransport):
    """Streams over Gloo connections on which each rank adds up one part of a unit, which all ranks send to it straight.

    Gloo's own all-reduce goes round a ring: of P ranks, a unit is 2(P-1) times on its way, here twice, small ones once.
    As many bytes are sent, but over P-1 connections at the same time. All ranks get the same bits.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._paths: list[_Path] = []
        self.stream_cost += StreamCost(threads=2)

    def _open(self, number: int) -> ProcessGroupGloo:
        path = open_together(
            f"Gloo stream {number}", lambda: _Path(self, number, self._rank, self._size), agree=self._agree
        )
        try:
            group = super()._open(number)
        except CommError:
            path.end()
            raise
        self._paths.append(path)
        return group

    def _carry(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Has the stream's own threads reduce the range."""
        unit = buffer.tensor[start:stop]
        what = f"elements [{start}, {stop}) on stream {stream.number}"
        return self._paths[stream.number].all_reduce(unit, op, scale, what)

    def _end(self, streams: list[ProcessGroupGloo]) -> bool:
        paths = self._paths[len(self.streams) :]
        del self._paths[len(self.streams) :]
        return super()._end(streams) and [path.end() for path in paths].count(False) == 0
