"""Which host this is, where other hosts reach it, and the key-value store that rank 0 serves there.

A host's name often resolves to loopback, or not at all, in containers and clouds. Process groups over TCP find each
other through PyTorch's TCPStore.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface
from pathlib import Path
from typing import TYPE_CHECKING

from sirtaki.errors import CommError, ConfigError, SirtakiError, TransportError

from .failure import FailureBoard, unless_failed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 3.0


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


def reach(candidates: Sequence[str], port: int) -> tuple[str, str]:
    """The first candidate that answers at `port`, and the address of this host as that one sees it.

    Raises:
        CommError: none answers.
    """
    tried = []
    for candidate in candidates:
        try:
            with socket.create_connection((candidate, port), timeout=CONNECT_TIMEOUT_S) as connection:
                return candidate, connection.getsockname()[0]
        except OSError as err:
            tried.append(f"{candidate}:{port} ({err})")
    raise CommError(
        f"rank 0 cannot be reached at {', '.join(tried) or 'any address'}; "
        "name the interface that joins the hosts in SIRTAKI_GLOO_IFACE"
    )


LIMIT_S = 300.0
"""How long a store is waited for, at its opening and for each answer."""

ATTEMPT_S, AGAIN_S = 1.0, 0.05
"""How long one attempt to connect goes on, which hears of no failure, and when the next one follows."""


Offer = tuple[list[str], int]
"""Addresses of a host, any of which may be reached, and a port."""


@dataclass(slots=True)
class Rendezvous:
    """Opened once for a control plane and all its scopes.

    Attributes:
        store: None as long as it is not open.
        own_address: of this host, at which the others reach it.
        prefixes: how many groups have met here.
    """

    store: TCPStore | None = None
    own_address: str = LOOPBACK
    prefixes: int = 0

    def serve(self, *, one_host: bool, interface: str | None) -> Offer | SirtakiError:
        """Opens it in this process.

        Args:
            one_host: no other host needs it.
            interface: name of the network interface to offer to others; None = any.

        Returns:
            What the other ranks need to know, or why there is no store.
        """
        try:
            self.store = _serve()
            addresses = [LOOPBACK] if one_host else own_addresses(interface)
        except ConfigError as err:
            return err
        except (OSError, RuntimeError) as err:
            return TransportError(f"rank 0 cannot open a store: {err}")
        self.own_address = addresses[0] if addresses else LOOPBACK
        return addresses, self.store.port

    def connect(self, offer: Offer, *, failures: FailureBoard) -> str:
        """Connects to that of another process; returns why it cannot, empty if it can."""
        addresses, port = offer
        try:
            server, self.own_address = reach(addresses, port)
            self.store = connect_to_store(server, port, failures=failures)
        except (CommError, OSError, RuntimeError) as err:
            return str(err)
        return ""


def _serve() -> TCPStore:
    """At a free port of all addresses."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=LIMIT_S))


def connect_to_store(host: str, port: int, *, failures: FailureBoard) -> TCPStore:
    """Another process's store. It may end while this one connects, for which PyTorch would wait until the time is up.

    Raises:
        RuntimeError: it cannot be reached.
        CommError: the job has failed.
    """
    from torch._C._distributed_c10d import TCPStore

    def connect() -> TCPStore:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            try:
                store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=ATTEMPT_S))
            except RuntimeError:
                failures.raise_if_failed()
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(AGAIN_S)
            else:
                store.set_timeout(datetime.timedelta(seconds=LIMIT_S))
                return store

    # An attempt also waits for a store that accepts it and never answers, as that of a stopped process, without limit.
    return unless_failed(connect, failures=failures, undo=lambda _: None)
