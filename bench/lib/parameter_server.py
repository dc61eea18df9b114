"""A plain parameter server, re-told: every rank sends all of its values over TCP, and gets all of the sums back.

Nothing begins before all of a rank's values have come, and nothing is sent back before all ranks' have.
"""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import numpy.typing as npt

_SIZE = struct.Struct("<I")


def serve(listener: socket.socket, ranks: int) -> None:
    """Until a rank leaves: sums of the ranks that connect, a thread for each."""
    peers = [listener.accept()[0] for _ in range(ranks)]
    values: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * ranks
    total = np.zeros(0, np.float32)
    barrier = threading.Barrier(ranks)

    def serve_rank(number: int, peer: socket.socket) -> None:
        nonlocal total
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                (size,) = _SIZE.unpack(_exactly(peer, bytearray(_SIZE.size)))
                if len(values[number]) != size:
                    values[number] = np.zeros(size, np.float32)
                _exactly(peer, values[number])
                if barrier.wait() == 0:
                    total = np.add.reduce(values)
                barrier.wait()
                peer.sendall(total.data)
                barrier.wait()  # the sums may be replaced
        except (ConnectionError, threading.BrokenBarrierError):
            barrier.abort()
            peer.close()

    threads = [threading.Thread(target=serve_rank, args=each) for each in enumerate(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class ParameterServerRank:
    """A rank's side."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._peer = socket.create_connection(address)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def sum(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Collective: the sum over ranks, in the shape of `values`."""
        total = np.empty_like(values)
        self._peer.sendall(_SIZE.pack(values.size))
        self._peer.sendall(np.ascontiguousarray(values).data.cast("B"))
        _exactly(self._peer, total)
        return total

    def close(self) -> None:
        """Leaves."""
        self._peer.close()


def _exactly(peer: socket.socket, into: bytearray | npt.NDArray[np.float32]) -> bytearray | npt.NDArray[np.float32]:
    """Fills a buffer.

    Raises:
        ConnectionError: the peer is gone.
    """
    view = memoryview(into).cast("B")
    while view.nbytes:
        got = peer.recv_into(view)
        if not got:
            raise ConnectionError("the peer is gone")
        view = view[got:]
    return into
