"""Where process groups find each other: PyTorch's TCPStore, which rank 0 serves and the others connect to."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sirtaki.errors import CommError, ConfigError, SirtakiError, TransportError

from .addresses import LOOPBACK, own_addresses, reach
from .failure import FailureBoard, unless_failed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

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
