"""Meshes whose ranks all live in this process."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sirtaki.comm.control.mesh import Links, MeshCommunicator
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.errors import CommError


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


def among(size: int, act: Callable[[MeshCommunicator], Any]) -> list[Any]:
    """What `act` returns on each of so many ranks; where one raises, the waits of the others end."""
    links = connected(size)
    raised: list[BaseException] = []

    def guarded(comm: MeshCommunicator) -> Any:
        try:
            return act(comm)
        except BaseException as err:
            raised.append(err)
            for each in links:
                each.failures.report(CommError(f"rank {comm.rank} has raised {err!r}"))
            raise

    try:
        return on_all(links, guarded)
    except BaseException:
        raise raised[0] from None  # the others' are of its making
    finally:
        close(links)


def on_planes(size: int, act: Callable[[ControlPlane], Any], *, local_size: int | None = None) -> list[Any]:
    """What `act` returns with the control plane of each of so many ranks, on nodes of `local_size`."""

    def run(comm: MeshCommunicator) -> Any:
        control = ControlPlane(comm, local_size=local_size)
        result = act(control)
        control.close()
        return result

    return among(size, run)


def close(links: Sequence[Links]) -> None:
    """Of all ranks, which must happen at the same time."""
    threads = [threading.Thread(target=each.close) for each in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    """Returns once it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come true"
        time.sleep(0.002)
