"""What this process may use of its machine, after affinity masks and cgroup limits, and of what kind the machine is.

`os.cpu_count()` tells of the host, while a container's share is what ranks divide. The module also says where other
machines reach this one, whose name often resolves to loopback or not at all, and keeps forked children from acting as
the rank that they were forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import fcntl
import itertools
import math
import mmap
import os
import signal
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from ipaddress import IPv4Interface
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from sirtaki.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_PRODUCT = Path("/sys/class/dmi/id/product_name")
_PROCESSORS = Path("/proc/cpuinfo")

Address = tuple[str, int]


def usable_cores() -> int:
    """Cores that this process may keep busy at the same time, at least 1."""
    allowed = len(allowed_processors())
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def allowed_processors() -> tuple[int, ...]:
    """The cores that this process may use, by their number on the host."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota() -> float | None:
    """The tightest cgroup CPU limit in cores; None if there is none."""
    limits = []
    for folder in _cgroup_folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")  # version 2
        quota = quota or _read(folder / "cpu.cfs_quota_us")  # version 1: -1 = no limit
        period = period or _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def processor_time_beside_s() -> float:
    """Processor time that this process has used on other threads than the one that asks, seconds."""
    return time.process_time() - time.thread_time()


def memory_limit_bytes() -> int | None:
    """The tightest cgroup memory limit in bytes; None if there is none."""
    limits = []
    for folder in _cgroup_folders("memory"):
        text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if text.isdecimal() and int(text) < 2**60:  # version 1 writes a number near 2^63 for "no limit"
            limits.append(int(text))
    return min(limits, default=None)


def host_kind() -> str:
    """What tells hosts of one kind from others: product (on clouds the instance type), processor, number of cores.

    A container that may use a part of the cores only is of another kind.
    """
    lines = (line.partition(":") for line in _read(_PROCESSORS).splitlines())
    processor = next((value for name, _, value in lines if name.strip() == "model name"), "")
    cores, quota = os.cpu_count() or 1, cpu_quota()
    share = f"{quota:.3g} of " if quota is not None and quota < cores else ""
    parts = (_read(_PRODUCT), processor, f"{share}{cores} cores")
    return ", ".join(words for part in parts if (words := " ".join(part.split())))


def is_alive(pid: int) -> bool:
    """Return whether a process of this host has not ended; a zombie, which its parent may never collect, has."""
    import psutil  # takes 7 to 12 ms, which the start of a rank does without

    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.Error:
        return psutil.LINUX and not Path("/proc/self").exists()  # where it is not mounted nothing can be known


def is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped, by SIGSTOP or a debugger."""
    import psutil  # as above

    try:
        return psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    except psutil.Error:
        return False


# ── forked children ───────────────────────────────────────────────────────────────────────────────────────────────────
#
# A child that a script forks (a data loader's worker, a checkpoint writer) inherits the rank's objects but none of its
# threads, and it is not a rank. The functions below make sure that in such a child the rank's exit handlers and
# finalizers do not run, locks are free although their holder does not exist, and shared memory is a private copy.
# Processes that execute a new program inherit none of these objects.

T = TypeVar("T")

_in_children: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
_keys = itertools.count()


def in_forked_children(owner: T, act: Callable[[T], object]) -> None:
    """Call `act(owner)` in each process that the script forks while `owner` lives.

    Args:
        owner: is not kept alive.
        act: must not wait for anything; it must not refer to `owner`.
    """
    key = next(_keys)
    _in_children[key] = weakref.ref(owner, lambda _: _in_children.pop(key, None)), act


def _act_in_child() -> None:
    while _exit_handlers:
        atexit.unregister(_exit_handlers.pop())
    if _in_children and (c10d := sys.modules.get("torch.distributed.distributed_c10d")) is not None:
        for group, (_, store) in list(c10d._world.pg_map.items()):  # the script's own
            _never_destroy(group)
            _never_destroy(store)
    for reference, act in list(_in_children.values()):
        if (owner := reference()) is not None:
            act(owner)


os.register_at_fork(after_in_child=_act_in_child)


def at_exit(act: Callable[[], object]) -> None:
    """Call `act` when this process ends, as `atexit` does; forked children do not call it."""
    atexit.register(act)
    _exit_handlers.append(act)


def forget_at_exit(act: Callable[[], object]) -> None:
    """Undo `at_exit`. Harmless if `act` is not registered."""
    atexit.unregister(act)
    with contextlib.suppress(ValueError):
        _exit_handlers.remove(act)


_exit_handlers: list[Callable[[], object]] = []


def finalize(owner: object, act: Callable[..., object], *arguments: Any) -> None:
    """Call `act(*arguments)` when `owner` is collected in this process; not in forked children, and not at the exit.

    Args:
        owner: is not kept alive, unless `act` or the arguments do so.
        act: may be called in any thread, in the middle of anything.
        arguments: of `act`.
    """
    own = os.getpid()

    def act_here() -> None:
        if os.getpid() == own:
            act(*arguments)

    weakref.finalize(owner, act_here).atexit = False


Lock = TypeVar("Lock")


def free_in_forked_children(lock: Lock) -> Lock:
    """Return `lock` (a lock, or a condition with its own lock), which is free in forked children whoever held it."""
    in_forked_children(lock, lambda lock: lock._at_fork_reinit())  # type: ignore[attr-defined]  # of each kind of lock
    return lock


def keep_in_forked_children(owner: T) -> T:
    """Return `owner` (a C++ object that has threads), which forked children never destroy.

    Its destructor would wait there for threads that the child does not have, or crash.
    """
    in_forked_children(owner, _never_destroy)
    return owner


def _never_destroy(owner: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


_PROT_READ_WRITE, _MAP_PRIVATE_FIXED = 1 | 2, 2 | 16


def private_in_forked_children(owner: object, address: int, length: int, descriptor: int | None) -> None:
    """Make a shared mapping of a file private in forked children, so that what they write there reaches no rank.

    The child's mapping is copied on write. Nothing is copied by the fork itself.

    Args:
        owner: lives as long as the mapping.
        address: of the mapping.
        length: of the mapping, in bytes.
        descriptor: of the file; a duplicate stays open as long as `owner` lives. None = children find zeros there.
    """
    kept, flags = -1, _MAP_PRIVATE_FIXED | mmap.MAP_ANONYMOUS
    if descriptor is not None:
        kept, flags = os.dup(descriptor), _MAP_PRIVATE_FIXED
        finalize(owner, os.close, kept)
    libc = ctypes.CDLL(None, use_errno=True)  # before the fork, after which no lock may be taken
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def map_privately(_: object) -> None:
        if libc.mmap(address, length, _PROT_READ_WRITE, flags, kept, 0) != address:
            os._exit(1)  # rather than write into the gradients of the job

    in_forked_children(owner, map_privately)


def signal_name(number: int) -> str:
    """The signal's name, such as `SIGTERM`."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def handle_signal(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
    """Installs a signal handler in this process; those that it forks have the default instead."""

    def forget(handler: Callable[[int, FrameType | None], None]) -> None:
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.SIG_DFL)

    signal.signal(number, handler)
    in_forked_children(handler, forget)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yields this process's cgroup and those above it, from `/proc/self/cgroup` (`id:controllers:path`)."""
    for line in _read(_OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS / controllers if controllers else _CGROUPS
        if not controllers or controller in controllers.split(","):
            folder = root / path.lstrip("/")
            # Inside a container the path may be the host's; the mount then shows the own cgroup as its root.
            yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(root))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# ── which host this is, and where other hosts reach it ────────────────────────────────────────────────────────────────

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
LOOPBACK = "127.0.0.1"


def host_identity() -> tuple[str, ...]:
    """Equal for processes of one host and network namespace, which reach each other over loopback."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not everywhere is there a /proc
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        found.append(os.readlink("/proc/self/ns/net"))
    return tuple(found)


def interface_networks() -> dict[str, IPv4Interface]:
    """IPv4 address, with its network, of every interface that has one, by name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answers = [fcntl.ioctl(probe.fileno(), what, request) for what in (SIOCGIFADDR, SIOCGIFNETMASK)]
            except OSError:
                continue  # this interface has no IPv4 address
            address, mask = (socket.inet_ntoa(answer[20:24]) for answer in answers)
            found[name] = IPv4Interface(f"{address}/{mask}")
    return found


def interface_addresses() -> dict[str, str]:
    """IPv4 address of every interface that has one, by name."""
    return {name: str(interface.ip) for name, interface in interface_networks().items()}


def own_addresses(interface: str | None) -> list[str]:
    """Addresses to offer to other hosts, the likeliest first.

    Raises:
        ConfigError: `interface` (one name, or several separated by commas) names none that has an address.
    """
    known = interface_addresses()
    if interface:
        names = interface.split(",")
        chosen = [known[name] for name in names if name in known]
        if not chosen:
            there = ", ".join(f"{name} ({address})" for name, address in known.items())
            raise ConfigError(f"no interface {interface} with an IPv4 address on this host; there are {there}")
        return chosen
    # Bridges of container engines come last: other hosts have the same ones.
    outside = [(name.startswith(("docker", "br-", "virbr")), address) for name, address in known.items()]
    return [address for _, address in sorted(outside, key=lambda item: item[0]) if not address.startswith("127.")]


def serve_store(host: str, port: int = 0, *, timeout: datetime.timedelta, multi_tenant: bool = False) -> TCPStore:
    """Open PyTorch's key-value store at this address only; it asks nobody for a secret.

    Args:
        host: where the job's other processes reach it; "0.0.0.0" = at all addresses. At a port that is given PyTorch
            listens at all of them, too, unless `host` is loopback.
        port: 0 = any that is free.
        timeout: of those who wait in it.
        multi_tenant: this process may open it again at that port, or has.

    Raises:
        OSError, RuntimeError: it cannot listen.
    """
    from torch._C._distributed_c10d import TCPStore

    listener = None
    if port == 0 or host in (LOOPBACK, "localhost"):
        try:
            listener = socket.create_server((host, port), backlog=512)
        except OSError:  # this process itself may listen there, for the script's own process groups
            if not (port and multi_tenant):
                raise
    if listener is None:
        return keep_in_forked_children(
            TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, multi_tenant=multi_tenant)
        )

    def serve(**options: bool) -> TCPStore:
        handle = os.dup(listener.fileno())  # the store's own from then on
        try:
            store = TCPStore(
                host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                multi_tenant=multi_tenant,
                master_listen_fd=handle,
                **options,
            )
        except NotImplementedError:
            os.close(handle)
            raise
        return keep_in_forked_children(store)

    with listener:
        try:
            return serve()
        except NotImplementedError:  # PyTorch 2.4's newer store opens its own sockets only
            return serve(use_libuv=False)


class ReservedPorts:
    """Consecutive TCP ports that the kernel gives to no other process while this object is open.

    A socket is bound to each port and does not listen. A server that sets SO_REUSEADDR, as Python's and PyTorch's do,
    may listen there by number. A bind to port 0, or a connection, never gets the port (Linux).

    Attributes:
        first: the lowest port.
    """

    def __init__(self, count: int = 1, *, host: str = LOOPBACK) -> None:
        """Reserve ports.

        Args:
            count: number of ports.
            host: local address; "" = all IPv4 addresses.

        Raises:
            OSError: there are none.
        """
        while True:
            self._sockets = [self._bound(host, 0)]
            self.first = int(self._sockets[0].getsockname()[1])
            try:
                self._sockets += [self._bound(host, self.first + number) for number in range(1, count)]
                return
            except (OSError, OverflowError):  # the next port is taken, or there is none
                self.close()

    @staticmethod
    def _bound(host: str, port: int) -> socket.socket:
        holder = socket.socket()
        try:
            holder.bind((host, port))
        except (OSError, OverflowError):
            holder.close()
            raise
        # After the bind, which must fail if the port belongs to another reservation.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder

    def close(self) -> None:
        """Give the ports back. Idempotent."""
        for holder in self._sockets:
            holder.close()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_address(text: str) -> Address:
    """Split `host:port`.

    Raises:
        ConfigError: it is something else.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is not the address of an aggregator; expected HOST:PORT, such as 10.0.0.5:9500")
    return host.strip("[]"), int(port)
