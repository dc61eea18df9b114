"""Host resources and identity: usable cores and memory, addresses and ports, exit handlers, and forked children.

Cores and memory include affinity masks and cgroup limits, because `os.cpu_count()` describes the host and not the
container. Addresses come from the network interfaces, because a host name often resolves to loopback or not at all.
Forked children must not act as the rank that they were forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import errno
import fcntl
import itertools
import math
import mmap
import os
import resource
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
    """Return the number of cores that this process may keep busy at the same time, at least 1."""
    allowed = len(allowed_processors())
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def allowed_processors() -> tuple[int, ...]:
    """Return the host's ids of the cores that this process may use, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota() -> float | None:
    """Return the smallest cgroup CPU limit in cores; None if there is none."""
    limits = []
    for folder in _cgroup_folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")  # Read the CPU limit of cgroup version 2.
        # Otherwise, read the CPU limit of cgroup version 1, where -1 means no limit.
        quota = quota or _read(folder / "cpu.cfs_quota_us")
        period = period or _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def processor_time_beside_s() -> float:
    """Return the processor time, in seconds, that all threads of this process but the calling one have used."""
    return time.process_time() - time.thread_time()


def memory_limit_bytes() -> int | None:
    """Return the smallest cgroup memory limit in bytes; None if there is none."""
    limits = []
    for folder in _cgroup_folders("memory"):
        text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if text.isdecimal() and int(text) < 2**60:
            # Ignore the huge number near 2^63 that cgroup version 1 writes for "no limit".
            limits.append(int(text))
    return min(limits, default=None)


def thread_limits() -> str:
    """Return the limits of threads and processes of this process, with their values, in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    found = [] if soft == resource.RLIM_INFINITY else [f"ulimit -u {soft}"]
    found += [
        f"pids.max {most} ({_read(folder / 'pids.current')} in use)"
        for folder in _cgroup_folders("pids")
        if (most := _read(folder / "pids.max")).isdecimal()
    ]
    return ", ".join(found) or f"kernel.threads-max {_read(Path('/proc/sys/kernel/threads-max'))}"


def memory_limits() -> str:
    """Return the limits of this process's memory, with their values, in words. "" = none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    found = [] if soft == resource.RLIM_INFINITY else [f"ulimit -v {soft // 1024} kB"]
    if (limit := memory_limit_bytes()) is not None:
        found.append(f"{limit / 2**30:.3g} GiB of the container")
    return ", ".join(found)


_OUT_OF_MEMORY = "allocate memory", "failed to map segment", "unable to mmap"
"""Parts of error messages of PyTorch and of the dynamic linker that report a lack of memory."""


def explained(error: BaseException) -> str:
    """Return an error's text. If threads, processes or memory are exhausted, add the limits and the remedy."""
    text, number, limit = str(error), getattr(error, "errno", None), ""
    if "; the limit of " in text:
        return text  # An earlier call of `explained` has already added the limits of this process to the error's text.
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(part in text for part in _OUT_OF_MEMORY):
        limit = f"the limit of memory is {memory_limits() or 'that of this host'}"
    elif number == errno.EAGAIN or "new thread" in text or "temporarily unavailable" in text:
        # Name the limits of threads and of memory. Python raises the same error for a thread if either is exhausted.
        memory = memory_limits()
        limit = f"the limit of threads is {thread_limits()}{memory and f'; that of memory is {memory}'}"
    return f"{text or 'out of memory'}; {limit}: raise it, or start fewer ranks on this host" if limit else text


def host_kind() -> str:
    """Describe the kind of this host: product (on clouds the instance type), processor, number of cores.

    The text is equal on all hosts of one kind. A container with a CPU quota below the host's number of cores counts as
    another kind of host.
    """
    lines = (line.partition(":") for line in _read(_PROCESSORS).splitlines())
    processor = next((value for name, _, value in lines if name.strip() == "model name"), "")
    cores, quota = os.cpu_count() or 1, cpu_quota()
    share = f"{quota:.3g} of " if quota is not None and quota < cores else ""
    parts = (_read(_PRODUCT), processor, f"{share}{cores} cores")
    return ", ".join(words for part in parts if (words := " ".join(part.split())))


def is_alive(pid: int) -> bool:
    """Return whether a process of this host is running. A zombie does not count, because it may stay forever."""
    import psutil  # Import late, because it takes 7 to 12 ms, and a rank can start without it.

    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.Error:
        return psutil.LINUX and not Path("/proc/self").exists()  # Without /proc, assume that the process is running.


def is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped, by SIGSTOP or by a debugger."""
    import psutil  # Import late, because it takes 7 to 12 ms, and a rank can start without it.

    try:
        return psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    except psutil.Error:
        return False


# ── forked children ───────────────────────────────────────────────────────────────────────────────────────────────────
# A child that a script forks (a data loader's worker, a checkpoint writer) is not a rank, but inherits the rank's
# objects. It inherits none of the rank's threads. In such a child, the functions below disable the rank's exit handlers
# and finalizers, release locks (a thread that held one does not exist there), and make shared memory a private copy. A
# process that executes a new program inherits none of these objects.

T = TypeVar("T")

_in_children: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
_keys = itertools.count()


def in_forked_children(owner: T, act: Callable[[T], object]) -> None:
    """Call `act(owner)` in each process that the script forks while `owner` exists.

    Args:
        owner: the argument of `act`, held by a weak reference.
        act: function that must not block and must not hold a reference to `owner`.
    """
    key = next(_keys)
    _in_children[key] = weakref.ref(owner, lambda _: _in_children.pop(key, None)), act


def _act_in_child() -> None:
    while _exit_handlers:
        atexit.unregister(_exit_handlers.pop())
    if _in_children and (c10d := sys.modules.get("torch.distributed.distributed_c10d")) is not None:
        for group, (_, store) in list(c10d._world.pg_map.items()):
            # Keep the process groups that the script has created from being destroyed in the child.
            _never_destroy(group)
            _never_destroy(store)
    for reference, act in list(_in_children.values()):
        if (owner := reference()) is not None:
            act(owner)


os.register_at_fork(after_in_child=_act_in_child)


def at_exit(act: Callable[[], object]) -> None:
    """Register `act` as an `atexit` handler that forked children do not call."""
    atexit.register(act)
    _exit_handlers.append(act)


def forget_at_exit(act: Callable[[], object]) -> None:
    """Unregister `act`, which `at_exit` has registered. Do nothing if it is not registered."""
    atexit.unregister(act)
    with contextlib.suppress(ValueError):
        _exit_handlers.remove(act)


_exit_handlers: list[Callable[[], object]] = []


def finalize(owner: object, act: Callable[..., object], *arguments: Any) -> None:
    """Call `act(*arguments)` when `owner` is garbage-collected, but not in forked children or at interpreter exit.

    Args:
        owner: the observed object, held by a weak reference. `act` and `arguments` must not refer to it.
        act: function that must be callable in any thread at any time, because the garbage collector calls it.
        arguments: arguments of `act`.
    """
    own = os.getpid()

    def act_here() -> None:
        if os.getpid() == own:
            act(*arguments)

    weakref.finalize(owner, act_here).atexit = False


Lock = TypeVar("Lock")


def free_in_forked_children(lock: Lock) -> Lock:
    """Make `lock` free in forked children, even if a thread held it at the fork.

    Return `lock`, a lock or condition variable.
    """
    in_forked_children(lock, lambda lock: lock._at_fork_reinit())  # type: ignore[attr-defined]  # all lock types have it
    return lock


def keep_in_forked_children(owner: T) -> T:
    """Keep forked children from destroying `owner`, a C++ object that has threads, and return it.

    In a child, its destructor would crash, or wait for threads that do not exist there.
    """
    in_forked_children(owner, _never_destroy)
    return owner


def _never_destroy(owner: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


_PROT_READ_WRITE, _MAP_PRIVATE_FIXED = 1 | 2, 2 | 16


def private_in_forked_children(owner: object, address: int, length: int, descriptor: int | None) -> None:
    """Make a shared memory mapping private (copy-on-write) in forked children, so that their writes reach no rank.

    The fork itself copies no pages.

    Args:
        owner: object whose lifetime is that of the mapping.
        address: start of the mapping.
        length: size of the mapping in bytes.
        descriptor: file descriptor of the mapped file. The function duplicates it. If None, children read zeros.
    """
    duplicate, flags = -1, _MAP_PRIVATE_FIXED | mmap.MAP_ANONYMOUS
    if descriptor is not None:
        duplicate, flags = os.dup(descriptor), _MAP_PRIVATE_FIXED
        finalize(owner, os.close, duplicate)
    # Load the library before the fork, because a forked child must not take locks.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def map_privately(_: object) -> None:
        if libc.mmap(address, length, _PROT_READ_WRITE, flags, duplicate, 0) != address:
            os._exit(1)  # End the child, because otherwise it could write into the job's gradients.

    in_forked_children(owner, map_privately)


def signal_name(number: int) -> str:
    """Return a signal's name, such as `SIGTERM`."""
    try:
        return signal.Signals(number).name
    except ValueError:  # A real-time signal has no name.
        return f"signal {number}"


def handle_signal(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
    """Install a signal handler in this process. Forked children get the default handler instead."""

    def forget(handler: Callable[[int, FrameType | None], None]) -> None:
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.SIG_DFL)

    signal.signal(number, handler)
    in_forked_children(handler, forget)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents, from `/proc/self/cgroup` (`id:controllers:path`)."""
    for line in _read(_OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS / controllers if controllers else _CGROUPS
        if not controllers or controller in controllers.split(","):
            folder = root / path.lstrip("/")
            # In a container, /proc may show the cgroup's path on the host. The cgroup is then mounted at the root, the
            # last parent.
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
    """Return an id that is equal for processes that share a host and a network namespace, and thus the loopback."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # On some systems, /proc is missing.
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        found.append(os.readlink("/proc/self/ns/net"))
    return tuple(found)


def interface_networks() -> dict[str, IPv4Interface]:
    """Return {interface name: IPv4 address and network} of all interfaces that have an IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answers = [fcntl.ioctl(probe.fileno(), what, request) for what in (SIOCGIFADDR, SIOCGIFNETMASK)]
            except OSError:
                continue  # The interface has no IPv4 address.
            address, mask = (socket.inet_ntoa(answer[20:24]) for answer in answers)
            found[name] = IPv4Interface(f"{address}/{mask}")
    return found


def interface_addresses() -> dict[str, str]:
    """Return {interface name: IPv4 address} of all interfaces that have an IPv4 address."""
    return {name: str(interface.ip) for name, interface in interface_networks().items()}


def own_addresses(interface: str | None) -> list[str]:
    """Return the IPv4 addresses of this host at which other hosts may reach it, the likeliest address first.

    Args:
        interface: interface names to use, separated by commas. None = all interfaces but loopback.

    Raises:
        ConfigError: none of the interfaces in `interface` has an IPv4 address.
    """
    known = interface_addresses()
    if interface:
        names = interface.split(",")
        chosen = [known[name] for name in names if name in known]
        if not chosen:
            there = ", ".join(f"{name} ({address})" for name, address in known.items())
            raise ConfigError(
                f"this host has no network interface {interface} with an IPv4 address; set "
                f"--network-interfaces or SIRTAKI_GLOO_IFACE to one of: {there}"
            )
        return chosen
    # Addresses of container bridges come last, because other hosts have bridges with equal addresses.
    outside = [(name.startswith(("docker", "br-", "virbr")), address) for name, address in known.items()]
    return [address for _, address in sorted(outside, key=lambda item: item[0]) if not address.startswith("127.")]


def serve_store(host: str, port: int = 0, *, timeout: datetime.timedelta, multi_tenant: bool = False) -> TCPStore:
    """Open a `TCPStore` server that listens at one address only. The store has no authentication.

    Args:
        host: address at which the job's other processes reach the store. "0.0.0.0" = all addresses. With a fixed port,
            PyTorch listens at all addresses unless `host` is loopback.
        port: TCP port; 0 = any free one.
        timeout: limit of the store's blocking operations.
        multi_tenant: whether several stores of this process may share the port.

    Raises:
        OSError, RuntimeError: the address or port is not available.
    """
    from torch._C._distributed_c10d import TCPStore

    listener = None
    if port == 0 or host in (LOOPBACK, "localhost"):
        try:
            listener = socket.create_server((host, port), backlog=512)
        except OSError:  # The port may be in use by a process group that the script has opened in this process.
            if not (port and multi_tenant):
                raise
    if listener is None:
        return keep_in_forked_children(
            TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, multi_tenant=multi_tenant)
        )

    def serve(**options: bool) -> TCPStore:
        handle = os.dup(listener.fileno())  # Pass a duplicate of the descriptor, because the store closes it.
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
        except NotImplementedError:  # In PyTorch 2.4, the libuv store cannot use an open socket.
            return serve(use_libuv=False)


class ReservedPorts:
    """Consecutive TCP ports that are reserved for this process's servers while the object is open.

    A socket is bound to each port, but does not listen. Servers that set SO_REUSEADDR, as Python's and PyTorch's do,
    can listen on a reserved port. Other programs do not get the port by chance: on Linux, the kernel assigns it neither
    to a bind to port 0 nor to an outgoing connection.

    Attributes:
        first: the lowest port.
    """

    def __init__(self, count: int = 1, *, host: str = LOOPBACK) -> None:
        """Reserve ports.

        Args:
            count: number of ports.
            host: local address on which to reserve the ports. "" = all IPv4 addresses.

        Raises:
            OSError: there are not enough free ports.
        """
        while True:
            self._sockets = [self._bound(host, 0)]
            self.first = int(self._sockets[0].getsockname()[1])
            try:
                self._sockets += [self._bound(host, self.first + number) for number in range(1, count)]
                return
            except (OSError, OverflowError):  # One of the following ports is in use, or above 65535.
                self.close()

    @staticmethod
    def _bound(host: str, port: int) -> socket.socket:
        holder = socket.socket()
        try:
            holder.bind((host, port))
        except (OSError, OverflowError):
            holder.close()
            raise
        # SO_REUSEADDR is set after the bind, because the bind must fail if another process has reserved the port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder

    def close(self) -> None:
        """Release the ports. Idempotent."""
        for holder in self._sockets:
            holder.close()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_address(text: str) -> Address:
    """Split `host:port`, the address of an aggregator (a server that sums gradients), into host and port.

    Raises:
        ConfigError: the text is not an address with a port from 1 to 65535.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(
            "the address of an aggregator (server that sums gradients) must be HOST:PORT, such as 10.0.0.5:9500, "
            f"found {text!r}"
        )
    return host.strip("[]"), int(port)
