"""Meshes whose ranks all live in this process."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sirtaki.comm.control.mesh.communicator import MeshCommunicator
from sirtaki.comm.control.mesh.links import Links


def connected(size: int, *, heartbeat_s: float | None = None) -> list[Links]:
    """The links of all ranks."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for low in range(size):
            for high in range(low + 1, size):
                sockets[high][low] = socket.create_connection(listener.getsockname())
                sockets[low][high] = listener.accept()[0]
    return [Links(rank, own, heartbeat_s=heartbeat_s) for rank, own in enumerate(sockets)]


def on_all(links: Sequence[Links], act: Callable[[MeshCommunicator], Any]) -> list[Any]:
    """What `act` returns on each rank, each in a thread of its own; raises what one of them raises."""
    results: list[Any] = [None] * len(links)

    def run(number: int) -> None:
        try:
            results[number] = act(MeshCommunicator(links[number]))
        except BaseException as err:
            results[number] = err

    threads = [threading.Thread(target=run, args=[number]) for number in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def close(links: Sequence[Links]) -> None:
    """Of all ranks, which must happen at the same time."""
    threads = [threading.Thread(target=each.close) for each in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def until(condition: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Returns once it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come true"
        time.sleep(0.002)
