"""Whoever is gone or silent is named to all; nothing is left behind, and leaving in order is no failure."""

import contextlib
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
from fakes.meshes import close, connected, on_all, until

from sirtaki.comm.control.communicator import Op
from sirtaki.comm.control.failure import poll_until
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.comm.control.mesh_links import Links
from sirtaki.errors import PeerLostError


def die(links: Links) -> None:
    """As a killed process does: its sockets are closed, and it does nothing more."""
    links._closing = True
    for connection in links._connections.values():
        connection._socket.shutdown(socket.SHUT_RDWR)


def test_leaving_together_is_no_failure_and_leaves_nothing() -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    links = connected(4)
    on_all(links, lambda comm: poll_until(comm.barrier(), failures=comm.failures))
    close(links)
    assert [each.failures.error for each in links] == [None] * 4
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_all_learn_at_once_who_is_gone_without_looking() -> None:
    links = connected(4)
    begin_s = time.monotonic()
    die(links[2])
    others = [each for each in links if each.rank != 2]
    until(lambda: all(each.failures.error for each in others))
    assert time.monotonic() - begin_s < 1.0
    assert all("rank 2 has ended" in str(each.failures.error) for each in others)
    assert all(isinstance(each.failures.error, PeerLostError) for each in others)
    close(links)


def test_a_rank_that_ends_says_why() -> None:
    links = connected(3)
    links[1].abort("rank 1 raised ValueError: boom")
    die(links[1])
    until(lambda: all(links[rank].failures.error for rank in (0, 2)))
    assert {str(links[rank].failures.error) for rank in (0, 2)} == {"rank 1 raised ValueError: boom"}
    close(links)


@pytest.mark.parametrize(
    "begin",
    [
        lambda comm: comm.barrier(),
        lambda comm: comm.all_reduce(np.ones(3), Op.SUM),
        lambda comm: comm.all_reduce(np.ones(300_000), Op.SUM),
        lambda comm: comm.all_reduce(np.ones(3), Op.MINIMUM),
        lambda comm: comm.broadcast(np.ones(3_000_000), 2),
        lambda comm: comm.all_gather(np.ones(200_000), np.empty((4, 200_000))),
        lambda comm: comm.all_to_all(np.ones(400_000), np.empty(400_000)),
        lambda comm: comm.reduce_scatter(np.ones(400_000), np.empty(100_000), [100_000] * 4, Op.SUM),
        lambda comm: comm.receive(np.ones(3), 2),
    ],
)
def test_a_rank_that_dies_in_the_middle_ends_the_operation_on_all_others(begin: object) -> None:
    links = connected(4)

    def act(comm: MeshCommunicator) -> None:
        if comm.rank == 2:
            with contextlib.suppress(ValueError):  # that rank 2 receives of itself
                begin(comm)
            time.sleep(0.05)
            die(links[2])
            return
        with pytest.raises(PeerLostError, match="rank 2"):  # noqa: PT012
            for operation in (begin, MeshCommunicator.barrier):  # the first may have got all that it needs
                poll_until(operation(comm), failures=comm.failures)

    on_all(links, act)
    close(links)


def test_a_silent_rank_is_named_and_a_short_silence_forgiven() -> None:
    links = connected(3, heartbeat_s=1.2)
    time.sleep(1.5)
    assert not any(each.failures.error for each in links)
    with links[1].reading:  # as if stopped: it neither reads nor beats
        time.sleep(0.5)
        assert not any(each.failures.error for each in links)
        until(lambda: all(links[rank].failures.error for rank in (0, 2)), timeout_s=5.0)
    assert all("rank 1 has sent nothing for 1 s" in str(links[rank].failures.error) for rank in (0, 2))
    close(links)


def test_an_idle_mesh_sends_next_to_nothing() -> None:
    links = connected(4, heartbeat_s=30.0)
    sent: list[int] = []
    for each in links:
        for connection in each._connections.values():
            write = connection._write
            connection._write = lambda parts, w=write: sent.append(sum(map(len, parts))) or w(parts)
        each._beat()
    assert sent == [24] * 4  # one heartbeat to one other rank, whatever their number
    close(links)


def test_a_forked_process_does_not_keep_its_parents_connections_open() -> None:
    links = connected(2)
    child = os.fork()
    if child == 0:
        time.sleep(60.0)
        os._exit(0)
    try:
        links[1]._closing = True
        for connection in links[1]._connections.values():
            connection.close()  # this process's descriptor only: what the child held would keep the connection open
        until(lambda: links[0].failures.error is not None, timeout_s=3.0)
        assert "rank 1 has ended" in str(links[0].failures.error)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
