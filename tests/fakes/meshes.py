"""Meshes whose ranks are all in this process."""

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sirtaki.comm.control.mesh import Links, MeshCommunicator
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.errors import CommError


def connected(size: int, *, heartbeat_s: float | None = None) -> list[Links]:
    """Return the links of all ranks of a connected mesh."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for low in range(size):
            for high in range(low + 1, size):
                sockets[high][low] = socket.create_connection(listener.getsockname())
                sockets[low][high] = listener.accept()[0]
    return [Links(rank, own, heartbeat_s=heartbeat_s) for rank, own in enumerate(sockets)]


def at_once(act: Callable[..., Any], *of_each: Iterable[Any]) -> list[Any]:
    """Call `act` in one thread per tuple of arguments. Return the results, or raise one exception at the end."""
    arguments = list(zip(*of_each, strict=True))
    with ThreadPoolExecutor(len(arguments) or 1) as threads:
        ended = [threads.submit(act, *each) for each in arguments]
    return [each.result() for each in ended]


def on_all(links: Sequence[Links], act: Callable[[MeshCommunicator], Any]) -> list[Any]:
    """Call `act` on each rank in its own thread. Return the results by rank, or raise an exception of a rank."""
    return at_once(lambda own: act(MeshCommunicator(own)), links)


def among(size: int, act: Callable[[MeshCommunicator], Any]) -> list[Any]:
    """Connect `size` ranks and call `act` on each. Return the results. An exception on a rank ends all waits."""
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
        raise raised[0] from None  # the remaining exceptions are consequences of the first
    finally:
        close(links)


def on_planes(size: int, act: Callable[[ControlPlane], Any], *, local_size: int | None = None) -> list[Any]:
    """Call `act` with the control plane of each rank, on nodes of `local_size` ranks. Return the results by rank."""

    def run(comm: MeshCommunicator) -> Any:
        control = ControlPlane(comm, local_size=local_size)
        result = act(control)
        control.close()
        return result

    return among(size, run)


def close(links: Sequence[Links]) -> None:
    """Close the links of all ranks at the same time, because closing waits for the peers."""
    at_once(Links.close, links)


def until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    """Wait until the condition is true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come true"
        time.sleep(0.002)
