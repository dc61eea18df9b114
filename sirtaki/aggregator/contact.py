"""One aggregator as a rank knows it: its wire, whether all ranks have come there, and when it was last heard of."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

from sirtaki.errors import AggregatorError, ConfigError
from sirtaki.host_port import Address

from .packets import Kind, Registration, Welcome, packet
from .wire import Wire

REGISTER_EVERY_S = 0.05


class Contact:
    """An address, and what is known of who listens there."""

    def __init__(self, address: Address, connect: Callable[[Address], Wire]) -> None:
        self.address = address
        self._connect = connect
        self._wire: Wire | None = None
        self.session = 0
        self.window = 1
        self.entry = 0
        self.heard_s = self._asked_s = 0.0

    @property
    def wire(self) -> Wire:
        """Opened when it is needed.

        Raises:
            AggregatorError: there is no such host.
        """
        if self._wire is None:
            try:
                self._wire = self._connect(self.address)
            except ConfigError as err:
                raise AggregatorError(str(err)) from err
        return self._wire

    @property
    def name(self) -> str:
        """`host:port`."""
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def is_open(self) -> bool:
        """All ranks have come there, and sums are made."""
        return self.session != 0

    def enter(self, now_s: float) -> None:
        """Comes anew: whatever was said there before does not count any more."""
        self.session, self.entry = 0, secrets.randbits(63) | 1
        self.heard_s, self._asked_s = now_s, 0.0
        self.wire.refused = False

    def register(self, registration: Registration, rank: int, step: int, now_s: float) -> None:
        """Says who is there, from time to time, until it is welcome."""
        if now_s - self._asked_s >= REGISTER_EVERY_S:
            self._asked_s = now_s
            self.wire.send(packet(Kind.REGISTER, rank=rank, step=step, body=registration.encoded()))

    def ping(self, rank: int, now_s: float, every_s: float) -> None:
        """Asks for a sign of life where there was none for so long."""
        if now_s - max(self.heard_s, self._asked_s) >= every_s:
            self._asked_s = now_s
            self.wire.send(packet(Kind.PING, rank=rank, session=self.session))

    def open(self, welcome: Welcome) -> None:
        """Sums are made from now on."""
        self.session, self.window = welcome.session, welcome.window

    def leave(self, rank: int) -> None:
        """Nothing more is needed; said three times, as nobody answers."""
        with contextlib.suppress(OSError):  # of a wire that has failed
            for _ in range(3 if self.is_open else 0):
                self.wire.send(packet(Kind.BYE, rank=rank, session=self.session))

    def close(self) -> None:
        """Ends the wire."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
