"""A socket that loses packets: of what comes in, each one with the same probability."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np

from sirtaki.aggregator.wire import Bytes, Wire
from sirtaki.host_port import Address


class LossyWire(Wire):
    """Loses packets after the kernel has delivered them, one by one, also of those that come many at a time."""

    def __init__(self, sock: socket.socket, *, loss: float, seed: int) -> None:
        super().__init__(sock)
        self._loss, self._random = loss, np.random.default_rng(seed)
        self.lost = 0

    @classmethod
    def towards(cls, address: Address, *, loss: float, seed: int) -> LossyWire:
        """Speaks with one address."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.connect(address)
        return cls(sock, loss=loss, seed=seed)

    @classmethod
    def listening(cls, address: Address, *, loss: float, seed: int) -> LossyWire:
        """Listens at an address."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(address)
        return cls(sock, loss=loss, seed=seed)

    def batches(self, most: int = 64) -> Iterator[tuple[Bytes, Address]]:
        """As of any wire, without what is lost."""
        for rows, address in super().batches(most):
            kept = self._random.random(len(rows)) >= self._loss
            self.lost += len(rows) - int(kept.sum())
            if kept.all():
                yield rows, address
            elif kept.any():
                yield np.ascontiguousarray(rows[kept]), address
