"""A simulated operating system for many ranks in one process: clock, threads, TCP, epoll, and a key-value store.

The product's code runs unchanged: `installed` replaces `time`, `threading`, `socket` and so on in the modules of
`sirtaki.comm.control`. Each thread is a greenlet that runs until it blocks. Time passes while all threads block, and by
a fixed cost of each call, which the threads of a process pay one after the other. So a process that receives many
messages needs time, and connections wait in the queue of its listener.

Counters hold what each process uses. Processor time is real: seconds in which the process's code ran.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

from greenlet import getcurrent, greenlet
from simulation.network import Simulator

Address = tuple[str, int]

LOOPBACK = "127.0.0.1"
CALL_S = 10e-6
"""Processor time of a call of the system, with the code around it."""

STORE_S = 10e-6
"""Time that the key-value store needs for a request."""

ON_HOST_S, BETWEEN_HOSTS_S = 20e-6, 50e-6
"""Delay of a message, one way."""

SEND_BUFFER_BYTES = 2 * 1024**2
MAX_BACKLOG = 4096
"""Longest queue of a listener, as Linux' `net.core.somaxconn`."""

POLL_S, LONGEST_NAP_S = 0.0205, 0.25
"""Sleeps of up to `POLL_S` are pauses between two polls. In a process to which nothing happens, they become longer."""


@dataclass(slots=True)
class Usage:
    """What a process has used. Differences of two values are what it has used in between."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    connects: int = 0
    accepts: int = 0
    store_requests: int = 0
    store_bytes: int = 0
    log_lines: int = 0
    cpu_s: float = 0.0

    def copy(self) -> Usage:
        return Usage(*(getattr(self, each.name) for each in fields(self)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


class Process:
    """A process of a host.

    Attributes:
        busy_s: simulated time until which its threads have used its processor.
        log: its log lines.
    """

    def __init__(self, system: System, number: int, host: str) -> None:
        self.system, self.number, self.host = system, number, host
        self.busy_s, self.activity = 0.0, 0
        self.alive = True
        self.usage, self.log = Usage(), list[str]()
        self.naps: list[Thread] = []
        self.sockets: dict[int, Socket | Listener] = {}

    def charge(self) -> float:
        """Use the processor for one call. Return the time at its end."""
        self.busy_s = max(self.busy_s, self.system.sim.now_s) + CALL_S
        return self.busy_s

    def poke(self) -> None:
        """Let the threads that poll look again soon, because something has happened."""
        self.activity += 1
        naps, self.naps = self.naps, []
        for thread in naps:
            self.system.wake(thread, thread.nap_s / 2)

    def kill(self, *, silently: bool = False) -> None:
        """End the process, as by SIGKILL. With `silently`, its host is lost, so that peers are not notified."""
        self.alive = False
        for each in list(self.sockets.values()):
            if not silently:
                each.close()
            elif isinstance(each, Listener):
                self.system.listeners.pop(each.address, None)


class Thread:
    """A thread of a process. It has the methods of `threading.Thread` that the product uses."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] = lambda: None,
        name: str = "",
        args: Sequence[Any] = (),
        daemon: bool = True,
        *,
        process: Process | None = None,
    ) -> None:
        self.process = process or the().current.process
        self.name, self._target, self._args = name, target, args
        self.ended, self.started, self.token = False, False, 0
        self.nap_s = self.idle_s = 0.0
        self.seen = -1
        self._joining: list[Thread] = []
        self.greenlet = greenlet(self._run, parent=self.process.system.hub)
        self.process.system.threads.append(self)

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self.ended = True
            for each in self._joining:
                self.process.system.wake(each)
            self.process.poke()

    def start(self) -> None:
        self.started = True
        self.process.system.wake(self)

    def is_alive(self) -> bool:
        return self.started and not self.ended

    def join(self, timeout: float | None = None) -> None:
        system = self.process.system
        self._joining.append(system.current)
        system.block(lambda: self.ended, timeout)


class Event:
    """A `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for each in self._waiting:
            the().wake(each)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiting.append(the().current)
            the().block(lambda: self._set, timeout)
            self._waiting.remove(the().current)
        return self._set


class Socket:
    """One end of a TCP connection, or an eventfd (without a peer)."""

    __slots__ = (
        "_bytes",
        "_fd",
        "_timeout_s",
        "address",
        "ended",
        "epolls",
        "peer",
        "peer_address",
        "process",
        "waiter",
    )

    def __init__(
        self, process: Process, address: Address = (LOOPBACK, 0), peer_address: Address = (LOOPBACK, 0)
    ) -> None:
        self.process, self.address, self.peer_address = process, address, peer_address
        self.peer: Socket | None = None
        self._fd = process.system.descriptor()
        self._timeout_s: float | None = None
        self._bytes = b""
        self.ended = False
        self.epolls: tuple[tuple[Epoll, int], ...] = ()
        self.waiter: Thread | None = None
        process.sockets[self._fd] = self

    def ready(self) -> int:
        """Return the events that epoll reports."""
        return (select.EPOLLIN if self._bytes or self.ended else 0) | (select.EPOLLRDHUP if self.ended else 0)

    def changed(self) -> None:
        """Wake the threads that wait for this socket."""
        if self.waiter is not None:
            self.process.system.wake(self.waiter)
        for epoll, mask in self.epolls:
            if mask & self.ready():
                epoll.add_ready(self._fd, self)
        if self.process.naps or self.process.activity == 0:
            self.process.poke()
        else:
            self.process.activity += 1

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, data: bytes) -> None:
        if self._fd >= 0:
            self._bytes = self._bytes + data if self._bytes else data
            self.process.usage.received += 1
            self.process.usage.received_bytes += len(data)
            self.changed()

    def end(self) -> None:
        if self._fd >= 0 and not self.ended:
            self.ended = True
            self.changed()

    # ── see socket.socket ────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._fd

    def getsockname(self) -> Address:
        return self.address

    def getpeername(self) -> Address:
        return self.peer_address

    def setblocking(self, blocking: bool) -> None:
        self._timeout_s = None if blocking else 0.0

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def setsockopt(self, *arguments: int) -> None:
        pass

    def sendmsg(self, parts: Sequence[Any], *_: Any) -> int:
        return self.send(b"".join(parts))

    def sendall(self, data: bytes) -> None:
        self.send(data)

    def send(self, data: bytes) -> int:
        there, here = self.peer, self.process
        if self._fd < 0 or there is None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        at_s = here.charge()
        if len(there._bytes) > SEND_BUFFER_BYTES:
            raise BlockingIOError
        here.usage.sent += 1
        here.usage.sent_bytes += len(data)
        system = here.system
        system.sim.later(at_s - system.sim.now_s + delay_s(here, there.process), partial(there.arrive, data))
        return len(data)

    def recv(self, length: int) -> bytes:
        self.process.charge()
        if not self._bytes and not self.ended and self._timeout_s != 0.0:
            self.waiter = self.process.system.current
            self.process.system.block(lambda: bool(self._bytes) or self.ended, self._timeout_s)
            self.waiter = None
            if not self._bytes and not self.ended:
                raise TimeoutError("timed out")
        if not self._bytes and not self.ended:
            raise BlockingIOError
        data, self._bytes = self._bytes[:length], self._bytes[length:]
        return data

    def recv_into(self, view: memoryview) -> int:
        data = self.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def shutdown(self, how: int) -> None:
        """Send the end of the stream after the last message."""
        there, self.peer = self.peer, None
        if there is not None:
            system = self.process.system
            after_s = max(0.0, self.process.busy_s - system.sim.now_s)
            system.sim.later(after_s + delay_s(self.process, there.process), there.end)

    def close(self) -> None:
        if self._fd >= 0:
            self.shutdown(socket.SHUT_WR)
            for epoll, _ in self.epolls:
                epoll.forget(self._fd)
            del self.process.sockets[self._fd]
            self._fd, self.epolls, self._bytes = -1, (), b""


class Listener(Socket):
    """A listening socket."""

    __slots__ = ("_backlog", "queue")

    def __init__(self, process: Process, address: Address, backlog: int) -> None:
        super().__init__(process, address)
        self._backlog = min(backlog, MAX_BACKLOG)
        self.queue: deque[Socket] = deque()
        process.system.listeners[address] = self

    def ready(self) -> int:
        return select.EPOLLIN if self.queue else 0

    def offer(self, peer: Socket) -> bool:
        """Queue a connection. Return False if the queue is full."""
        if len(self.queue) > self._backlog:
            return False
        own = Socket(self.process, self.address, peer.address)
        own.peer, peer.peer = peer, own
        self.queue.append(own)
        self.process.system.longest_queue = max(self.process.system.longest_queue, len(self.queue))
        self.changed()
        return True

    def accept(self) -> tuple[Socket, Address]:
        self.process.charge()
        if not self.queue and self._timeout_s != 0.0:
            self.waiter = self.process.system.current
            self.process.system.block(lambda: bool(self.queue) or self._timeout_s == 0.0, None)
            self.waiter = None
        if not self.queue:
            raise BlockingIOError
        self.process.usage.accepts += 1
        accepted = self.queue.popleft()
        return accepted, accepted.peer_address

    def shutdown(self, how: int) -> None:
        if self.waiter is not None:
            self._timeout_s = 0.0
            self.process.system.wake(self.waiter)

    def close(self) -> None:
        self.process.system.listeners.pop(self.address, None)
        while self.queue:
            self.queue.popleft().close()
        super().close()


def delay_s(one: Process, other: Process) -> float:
    return ON_HOST_S if one.host == other.host else BETWEEN_HOSTS_S


class Epoll:
    """A `select.epoll`, level-triggered."""

    def __init__(self) -> None:
        self._process = the().current.process
        self._masks: dict[int, tuple[Socket, int]] = {}
        self._ready: dict[int, Socket] = {}
        self._waiter: Thread | None = None

    def register(self, what: int | Socket, mask: int) -> None:
        found = self._process.sockets[what] if isinstance(what, int) else what
        self._masks[found.fileno()] = found, mask
        found.epolls = (*found.epolls, (self, mask))
        if found.ready() & mask:
            self.add_ready(found.fileno(), found)

    def unregister(self, what: int | Socket) -> None:
        descriptor = what if isinstance(what, int) else what.fileno()
        if descriptor not in self._masks:
            raise FileNotFoundError
        found, _ = self._masks[descriptor]
        found.epolls = tuple(each for each in found.epolls if each[0] is not self)
        self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        self._masks.pop(descriptor, None)
        self._ready.pop(descriptor, None)

    def add_ready(self, descriptor: int, found: Socket) -> None:
        self._ready[descriptor] = found
        if self._waiter is not None:
            self._process.system.wake(self._waiter)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self._process.charge()
        if not (found := self._events()) and timeout != 0:
            self._waiter = self._process.system.current
            self._process.system.block(lambda: bool(self._events()), timeout)
            self._waiter = None
            found = self._events()
        return found

    def _events(self) -> list[tuple[int, int]]:
        found = []
        for descriptor, each in list(self._ready.items()):
            if events := each.ready() & self._masks[descriptor][1]:
                found.append((descriptor, events))
            else:
                del self._ready[descriptor]
        return found

    def close(self) -> None:
        for descriptor in list(self._masks):
            self.unregister(descriptor)


class Selector:
    """A `selectors.DefaultSelector` for readable sockets."""

    def __init__(self) -> None:
        self._epoll = Epoll()
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, what: Socket, events: int, data: Any = None) -> None:
        self._keys[what.fileno()] = selectors.SelectorKey(what, what.fileno(), events, data)  # type: ignore[arg-type]
        self._epoll.register(what, select.EPOLLIN)

    def unregister(self, what: Socket) -> None:
        del self._keys[what.fileno()]
        self._epoll.unregister(what)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return [(self._keys[descriptor], selectors.EVENT_READ) for descriptor, _ in self._epoll.poll(timeout)]

    def close(self) -> None:
        self._epoll.close()


class Store:
    """A process's client of the key-value store, with the methods of PyTorch's `Store` that the product uses."""

    def __init__(self, system: System, process: Process) -> None:
        self._system, self._process = system, process

    def _request(self, size_bytes: int) -> None:
        usage, system = self._process.usage, self._system
        usage.store_requests += 1
        usage.store_bytes += size_bytes
        arrives_s = self._process.charge() + BETWEEN_HOSTS_S
        system.store_busy_s = max(system.store_busy_s, arrives_s) + STORE_S
        system.pause(system.store_busy_s + BETWEEN_HOSTS_S - system.now_s())

    def set(self, key: str, value: str) -> None:
        self._request(len(value))
        self._system.stored[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._request(len(self._system.stored[key]))
        return self._system.stored[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [self._system.stored[key] for key in keys]
        self._request(sum(map(len, found)))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        self._request(0)
        return all(key in self._system.stored for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._request(8)
        self._system.added[key] = self._system.added.get(key, 0) + amount
        return self._system.added[key]


@dataclass
class System:
    """The simulated system: its clock, hosts and processes."""

    seed: int = 0
    processes: list[Process] = field(default_factory=list)
    listeners: dict[Address, Listener] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    store_busy_s: float = 0.0
    dropped: int = 0
    """Attempts to connect that met a full queue."""
    longest_queue: int = 0
    """Largest number of connections that waited to be accepted."""

    def __post_init__(self) -> None:
        self.sim = Simulator(self.seed)
        self.hub = getcurrent()
        self.threads: list[Thread] = []
        self._current: Thread | None = None
        self._numbers = 100

    @property
    def current(self) -> Thread:
        assert self._current is not None, "only threads of simulated processes may block"
        return self._current

    def descriptor(self) -> int:
        """Return an unused number, for a descriptor or a port."""
        self._numbers += 1
        return self._numbers

    def process(self, host: str) -> Process:
        self.processes.append(Process(self, len(self.processes), host))
        return self.processes[-1]

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Run all processes until a condition holds."""
        end_s = self.sim.now_s + limit_s
        while not until():
            assert self.sim.now_s < end_s, f"not within {limit_s} s of simulated time"
            assert self.sim.step(), "all threads wait for ever"

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self) -> None:
        """End all threads."""
        for thread in self.threads:
            self._current = thread
            while thread.greenlet and not thread.greenlet.dead:
                thread.greenlet.throw()

    def wake(self, thread: Thread, after_s: float = 0.0) -> None:
        self.sim.later(after_s, partial(self._resume, thread, thread.token))

    def _resume(self, thread: Thread, token: int) -> None:
        process = thread.process
        if thread.token != token or not process.alive:
            return
        if (busy_s := process.busy_s - self.sim.now_s) > 1e-9:
            self.sim.later(busy_s, partial(self._resume, thread, token))
            return
        thread.token += 1
        self._current, begin_s = thread, time.thread_time()
        thread.greenlet.switch()
        process.usage.cpu_s += time.thread_time() - begin_s
        self._current = None

    def block(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        """Block the running thread until another one wakes it and the condition holds, or the time is up."""
        end_s = None if timeout_s is None else self.now_s() + timeout_s
        while not condition():
            if end_s is not None:
                if self.now_s() >= end_s - 1e-9:
                    return
                self.wake(self.current, end_s - self.sim.now_s)
            self.hub.switch()

    def pause(self, seconds: float) -> None:
        """Block the running thread for a time."""
        self.block(lambda: False, seconds)

    # ── see time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def now_s(self) -> float:
        return self.sim.now_s if self._current is None else max(self.sim.now_s, self._current.process.busy_s)

    def sleep(self, seconds: float) -> None:
        thread, process = self.current, self.current.process
        if seconds > POLL_S:
            self.pause(seconds)
            return
        if thread.seen != process.activity:
            thread.seen, thread.idle_s = process.activity, 0.0
        thread.nap_s = seconds
        nap_s = max(seconds, min(LONGEST_NAP_S, 0.1 * thread.idle_s))
        thread.idle_s += nap_s
        process.naps.append(thread)
        self.wake(thread, self.now_s() - self.sim.now_s + nap_s)
        self.hub.switch()
        if thread in process.naps:
            process.naps.remove(thread)

    # ── see socket and os ────────────────────────────────────────────────────────────────────────────────────────

    def create_server(self, address: Address, *, backlog: int = 128) -> Listener:
        return Listener(self.current.process, (address[0], address[1] or self.descriptor()), backlog)

    def create_connection(self, address: Address, timeout: float | None = None) -> Socket:
        """Connect to a listener. An attempt at a full queue is lost, and repeated after 1 s, 2 s and so on."""
        process, again_s = self.current.process, 1.0
        process.charge()
        process.usage.connects += 1
        end_s = self.now_s() + (timeout or 1e9)
        while True:
            self.pause(2 * (ON_HOST_S if address[0] == LOOPBACK else BETWEEN_HOSTS_S))
            listener = self.listeners.get(address)
            if listener is None:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            own = Socket(process, (process.host, self.descriptor()), address)
            if listener.offer(own):
                own.settimeout(timeout)
                return own
            own.close()
            self.dropped += 1
            if self.now_s() + again_s > end_s:
                self.pause(end_s - self.now_s())
                raise TimeoutError("timed out")
            self.pause(again_s)
            again_s *= 2

    def eventfd(self, *_: int) -> int:
        return Socket(self.current.process).fileno()

    def eventfd_write(self, descriptor: int, _: int) -> None:
        self.current.process.sockets[descriptor].arrive(b"1")

    def close(self, descriptor: int) -> None:
        self.current.process.sockets[descriptor].close()


_system: System | None = None


def the() -> System:
    """Return the installed system."""
    assert _system is not None
    return _system


class _Log(logging.Handler):
    """Adds log lines to the process whose thread runs."""

    def emit(self, record: logging.LogRecord) -> None:
        process = the().current.process
        process.usage.log_lines += 1
        process.log.append(record.getMessage())


class _Overlay:
    """A module of the standard library, some of whose names are replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def installed(system: System, package: str = "sirtaki.comm.control.") -> Iterator[System]:
    """Run the modules of a package on a simulated system."""
    global _system
    unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    overlays = (
        _Overlay(time, monotonic=system.now_s, perf_counter=system.now_s, time=system.now_s, sleep=system.sleep),
        _Overlay(threading, Thread=Thread, Event=Event),
        _Overlay(socket, create_server=system.create_server, create_connection=system.create_connection),
        _Overlay(select, epoll=Epoll),
        _Overlay(selectors, DefaultSelector=Selector),
        _Overlay(
            os,
            eventfd=system.eventfd,
            eventfd_write=system.eventfd_write,
            close=system.close,
            sched_yield=lambda: system.pause(0.0),
        ),
        _Overlay(resource, getrlimit=lambda which: unlimited),
    )
    machine = {
        "host_identity": lambda: (system.current.process.host,),
        "own_addresses": lambda interface: [system.current.process.host],
        "allowed_processors": lambda: tuple(range(64)),
        # In a simulated time without calls, a spinning thread would never end.
        "ALONE_S": 0.0,
        "SPIN_S": 0.0,
    }
    log, logger = _Log(logging.INFO), logging.getLogger("sirtaki")
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(package):
                replaced = {
                    o._module.__name__: o for o in overlays if vars(module).get(o._module.__name__) is o._module
                }
                replaced |= {key: value for key, value in machine.items() if key in vars(module)}
                stack.enter_context(mock.patch.multiple(module, **replaced)) if replaced else None
        level = logger.level
        logger.addHandler(log)
        logger.setLevel(logging.INFO)
        stack.callback(logger.setLevel, level)
        stack.callback(logger.removeHandler, log)
        _system = system
        try:
            yield system
        finally:
            system.end()
            _system = None
