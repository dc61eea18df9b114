"""Which host this is, and where other hosts reach it: its name often resolves to loopback, or not at all."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from ipaddress import IPv4Interface
from pathlib import Path
from typing import TYPE_CHECKING

from sirtaki.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

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
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, multi_tenant=multi_tenant)

    def serve(**options: bool) -> TCPStore:
        handle = os.dup(listener.fileno())  # the store's own from then on
        try:
            return TCPStore(
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

    with listener:
        try:
            return serve()
        except NotImplementedError:  # PyTorch 2.4's newer store opens its own sockets only
            return serve(use_libuv=False)
