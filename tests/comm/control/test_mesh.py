"""A mesh: its algorithms, what it sends over its connections, its contexts, and what it notices when a rank is gone."""

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fakes.meshes import close, connected, on_all, until

from sirtaki.comm.control import mesh
from sirtaki.comm.control.communicator import Op
from sirtaki.comm.control.mesh import (
    BEATS,
    COPIED_BYTES,
    MAX_PAYLOAD_BYTES,
    Connection,
    FrameKind,
    Header,
    Inbox,
    Links,
    MeshCommunicator,
    Sending,
    encode,
)
from sirtaki.comm.control.waiting import wait_for
from sirtaki.errors import CommError, MismatchError, PeerFaultError, PeerLostError

# ── collectives ───────────────────────────────────────────────────────────────────────────────────────────────────────


SIZES = [1, 2, 3, 4, 5, 7, 8, 11, 16, 33]


class Network:
    """Ranks in lockstep: what is sent in a round arrives in the next one."""

    def __init__(self, size: int) -> None:
        self.size, self.round = size, 0
        self.queues: dict[tuple[int, int], deque[tuple[int, np.ndarray]]] = {}

    def run(self, steps: Callable[["Exchange"], Iterator[None]]) -> int:
        """Plays all ranks; the number of rounds."""
        under_way = [steps(Exchange(self, rank)) for rank in range(self.size)]
        while under_way:
            under_way = [each for each in under_way if next(each, True) is None]
            self.round += 1
            assert self.round < 1000
        assert not any(self.queues.values()), "something was sent that nobody received"
        return self.round - 1


class Exchange:
    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, network.size

    def send(self, array: np.ndarray, rank: int) -> Sending:
        queue = self.network.queues.setdefault((self.rank, rank), deque())
        queue.append((self.network.round, array.copy()))
        sending = Sending()
        sending.done = True
        return sending

    def receive(self, array: np.ndarray, rank: int) -> Iterator[None]:
        queue = self.network.queues.setdefault((rank, self.rank), deque())
        while not queue or queue[0][0] == self.network.round:
            yield
        array[...] = queue.popleft()[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", list(Op))
def test_short_reductions_take_log2_rounds(size: int, op: Op) -> None:
    arrays = [np.random.default_rng(rank).integers(1, 3, 5) for rank in range(size)]
    expected = mesh.UFUNCS[op].reduce(arrays)
    rounds = Network(size).run(lambda exchange: mesh.all_reduce(exchange, arrays[exchange.rank], op))
    assert rounds <= math.ceil(math.log2(size))
    assert all(np.array_equal(array, expected) for array in arrays)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 1, 30, 40_000])
def test_sums_of_any_length_have_the_same_bits_everywhere(size: int, length: int) -> None:
    arrays = [np.random.default_rng(rank).standard_normal(length) for rank in range(size)]
    total = np.sum(arrays, axis=0)
    Network(size).run(lambda exchange: mesh.all_reduce(exchange, arrays[exchange.rank], Op.SUM))
    assert len({array.tobytes() for array in arrays}) == 1
    np.testing.assert_allclose(arrays[0], total, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_gathering_and_broadcasts_take_log2_rounds(size: int) -> None:
    counts = [(3 * rank) % 5 for rank in range(size)]
    expected = np.repeat(np.arange(size), counts)
    wholes = [np.where(expected == rank, rank, -1) for rank in range(size)]
    network = Network(size)
    assert network.run(lambda exchange: mesh.gather(exchange, wholes[exchange.rank], counts)) <= math.ceil(
        math.log2(size)
    )
    assert all(np.array_equal(whole, expected) for whole in wholes)
    for root in range(size):
        arrays = [np.full(4, rank) for rank in range(size)]
        steps = lambda exchange, a=arrays, r=root: mesh.broadcast(exchange, a[exchange.rank], r)  # noqa: E731
        assert Network(size).run(steps) <= math.ceil(math.log2(size))
        assert all((array == root).all() for array in arrays)


# ── communicator ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def links() -> Iterator[list[Links]]:
    links = connected(3)
    yield links
    close(links)
    assert not any(each.failures.error for each in links)


def test_contexts_have_one_number_on_all_ranks_and_no_other_has_it(links: list[Links]) -> None:
    worlds = [MeshCommunicator(each) for each in links]
    first = [world.duplicate() for world in worlds]
    second = [world.duplicate() for world in worlds]
    inner = [comm.duplicate() for comm in first]
    numbers = [[comm._context for comm in each] for each in zip(worlds, first, second, inner, strict=True)]
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0])) == 4


def test_a_subset_needs_no_other_ranks(links: list[Links]) -> None:
    worlds = [MeshCommunicator(each) for each in links]
    for _ in range(3):
        worlds[0].subset([0, 1])  # which rank 2 knows nothing of
        worlds[1].subset([0, 1])
    assert len({worlds[rank].subset([2, 0])._context for rank in (0, 2)}) == 1
    assert len({world.duplicate()._context for world in worlds}) == 1
    assert worlds[0].subset([0, 1])._context != worlds[0].subset([1, 0])._context


def test_early_messages_are_kept_and_late_ones_dropped(links: list[Links]) -> None:
    worlds = [MeshCommunicator(each) for each in links]
    ahead = worlds[0].duplicate()
    test = ahead.broadcast(np.arange(3.0), 0)
    assert test()
    until(lambda: worlds[1].collect() is None and len(links[1]._mailboxes) == 2)  # the world's, and that one's
    behind, received = worlds[1].duplicate(), np.zeros(3)
    wait_for(behind.broadcast(received, 0), failures=behind.failures)
    assert received.tolist() == [0.0, 1.0, 2.0]
    behind.free()
    ahead.post(1, 7, b"too late")
    worlds[0].post(1, 7, b"in time")
    until(lambda: worlds[1].collect() == (0, 7, b"in time"))
    assert len(links[1]._mailboxes) == 1


def test_an_abandoned_operation_does_not_disturb_others(links: list[Links]) -> None:
    def act(comm: MeshCommunicator) -> list[float]:
        abandoned, used = comm.duplicate(), comm.duplicate()
        if comm.rank:
            assert not abandoned.all_reduce(np.ones(2), Op.SUM)()
        array = np.full(2, float(comm.rank))
        wait_for(used.all_reduce(array, Op.SUM), failures=comm.failures)
        return array.tolist()

    assert on_all(links, act) == [[3.0, 3.0]] * 3


# ── connection ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Collected:
    """A receiver that keeps everything."""

    def __init__(self) -> None:
        self.inbound = memoryview(bytearray(65536))
        self.frames: list[tuple[int, bytes]] = []

    def place(self, source: int, header: Header) -> memoryview:
        return memoryview(bytearray(header.length))

    def deliver(self, source: int, header: Header, payload: memoryview) -> None:
        self.frames.append((header.sequence, bytes(payload)))


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    connections = Connection(one, 1, silence_s=5.0), Connection(other, 0)
    yield connections
    for connection in connections:
        connection.close()


def frame(sequence: int, payload: bytes) -> list[memoryview]:
    return [memoryview(encode(FrameKind.DATA, sequence=sequence, length=len(payload))), memoryview(payload)]


def test_frames_of_all_lengths_arrive_in_order(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    lengths = [0, 1, 40, 65_511, 65_512, 65_513, 200_000, 0, MAX_PAYLOAD_BYTES, 3] * 3
    sent = [(number, bytes([number]) * length) for number, length in enumerate(lengths)]
    sendings = [sender.send(frame(number, payload)) for number, payload in sent]
    assert sender.backlogged
    assert not sendings[-2].done  # long, and nobody reads
    received = Collected()
    while len(received.frames) < len(sent):
        reader.read(received)
        sender.flush()
    assert received.frames == sent
    assert all(sending.done for sending in sendings)
    assert not sender.backlogged


def test_a_header_may_be_split_at_any_position_of_a_read(
    ends: tuple[Connection, Connection],
) -> None:
    sender, reader = ends
    stream = b"".join(bytes(part) for number in range(700) for part in frame(number, bytes([number % 256]) * 41))
    received, cut = Collected(), 600 * len(stream) // 700 + 10
    sender.send([memoryview(stream[:cut])])
    while len(received.frames) < 600:
        reader.read(received)
    sender.send([memoryview(stream[cut:])])
    while len(received.frames) < 700:
        reader.read(received)
    assert received.frames == [(number, bytes([number % 256]) * 41) for number in range(700)]


def test_short_messages_do_not_need_their_memory_after_the_send(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    while not sender.backlogged:
        sender.send(frame(0, bytes(MAX_PAYLOAD_BYTES)))
    mine = bytearray(b"x" * 100)
    header = memoryview(encode(FrameKind.DATA, sequence=1, length=len(mine)))
    assert len(mine) < COPIED_BYTES
    assert sender.send([header, memoryview(mine)]).done
    mine[:] = b"y" * 100
    received = Collected()
    while not received.frames or received.frames[-1][0] != 1:
        reader.read(received)
        sender.flush()
    assert received.frames[-1] == (1, b"x" * 100)


def test_an_invalid_frame_is_an_error(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    sender.send([memoryview(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n")])
    with pytest.raises(CommError, match="another rank sent an invalid message"):
        for _ in iter(lambda: reader.read(Collected()), "until it raises"):
            pass


def test_sending_to_a_closed_peer_raises_nothing(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    reader.close()
    sendings = [sender.send(frame(0, bytes(MAX_PAYLOAD_BYTES))) for _ in range(5)]
    sender.flush()
    assert all(sending.done for sending in sendings)


# ── links ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def die(links: Links) -> None:
    """Act like a killed process: close the sockets, and stop."""
    links._closing = True
    for connection in links._connections.values():
        with contextlib.suppress(OSError):  # where the other end has closed it already
            connection._socket.shutdown(socket.SHUT_RDWR)


def test_leaving_together_is_no_failure_and_leaves_nothing() -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    links = connected(4)
    on_all(links, lambda comm: wait_for(comm.barrier(), failures=comm.failures))
    begin_s = time.monotonic()
    close(links)
    assert time.monotonic() - begin_s < 4.0  # nobody waits for a leave that has been taken
    assert [each.failures.error for each in links] == [None] * 4
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_all_ranks_learn_at_once_of_an_exit_without_polling() -> None:
    links = connected(4)
    begin_s = time.monotonic()
    die(links[2])
    others = [each for each in links if each.rank != 2]
    until(lambda: all(each.failures.error for each in others))
    assert time.monotonic() - begin_s < 1.0
    assert all("rank 2 has ended" in str(each.failures.error) for each in others)
    assert all(isinstance(each.failures.error, PeerLostError) for each in others)
    close(links)


def test_a_rank_that_aborts_sends_the_reason() -> None:
    links = connected(3)
    links[1].abort("rank 1 raised ValueError: boom")
    die(links[1])
    until(lambda: all(links[rank].failures.error for rank in (0, 2)))
    assert {str(links[rank].failures.error) for rank in (0, 2)} == {"rank 1 raised ValueError: boom"}
    close(links)


@pytest.mark.parametrize("fault", [False, True])
def test_all_ranks_learn_at_once_and_without_polling_why_a_rank_aborts(fault: bool) -> None:
    links = connected(3)
    begin_s = time.monotonic()
    links[1].abort("rank 1: a broken transport", fault=fault)  # its process lives, and keeps its sockets
    until(lambda: all(links[rank].failures.error for rank in (0, 2)))
    assert time.monotonic() - begin_s < 1.0
    for rank in (0, 2):
        assert type(links[rank].failures.error) is (PeerFaultError if fault else PeerLostError)
        assert str(links[rank].failures.error) == "rank 1: a broken transport"
    close(links)


@pytest.mark.lengthy
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
def test_a_rank_that_dies_during_an_operation_ends_it_on_all_others(begin: object) -> None:
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
                wait_for(operation(comm), failures=comm.failures)

    on_all(links, act)
    close(links)


@pytest.mark.lengthy
def test_a_silent_rank_is_named_and_a_short_silence_forgiven() -> None:
    links = connected(3, heartbeat_s=1.2)
    time.sleep(1.5)
    assert not any(each.failures.error for each in links)
    with links[1].read_lock:  # as if stopped: it neither reads nor beats
        time.sleep(0.5)
        assert not any(each.failures.error for each in links)
        until(lambda: all(links[rank].failures.error for rank in (0, 2)), timeout_s=5.0)
    assert all("rank 1 has sent nothing for 1 s" in str(links[rank].failures.error) for rank in (0, 2))
    close(links)


@pytest.mark.lengthy
@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_still_connects_to_others_is_not_silent_before_its_time_limit(comes: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        own = Links(0, {1: listener.accept()[0]}, heartbeat_s=0.3, first_s=30.0 if comes else 1.0)
    if comes:
        time.sleep(0.9)
        assert own.failures.error is None
        late = Links(1, {0: theirs}, heartbeat_s=0.3)
        time.sleep(0.6)
        assert own.failures.error is None
        with late.read_lock:  # from its first message on, the heartbeat counts
            until(lambda: own.failures.error is not None, timeout_s=5.0)
        assert "SIRTAKI_HEARTBEAT_S" in str(own.failures.error)
        close([own, late])
    else:
        until(lambda: own.failures.error is not None, timeout_s=5.0)
        assert "rank 1 has sent nothing for 1 s" in str(own.failures.error)
        assert "SIRTAKI_START_TIMEOUT_S" in str(own.failures.error)
        theirs.close()
        close([own])


def test_silences_that_are_forgiven_do_not_add_up() -> None:
    links = connected(2, heartbeat_s=30.0)
    for _ in range(3):
        links[0]._connections[1].last_read_s -= 100.0
        for _ in range(BEATS - 1):
            links[0]._exchange_heartbeat()
        links[0]._connections[1].last_read_s = time.monotonic()
        links[0]._exchange_heartbeat()
    assert links[0].failures.error is None
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


# ── mailbox ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def arrive(inbox: Inbox, sequence: int, data: bytes) -> None:
    header = Header(FrameKind.DATA, 0, sequence, 5, len(data))
    payload = inbox.place(header)
    payload[:] = data
    inbox.deliver(header, payload)


@pytest.mark.parametrize(("sequence", "data"), [(8, b"ab"), (7, b"too long")])
def test_ranks_at_different_operations_are_found_out(sequence: int, data: bytes) -> None:
    inbox = Inbox()
    arrive(inbox, sequence, data)
    with pytest.raises(MismatchError):
        next(inbox.receive(memoryview(bytearray(2)), 7), None)
    other = Inbox()
    other.post_receive(memoryview(bytearray(2)), 7)
    with pytest.raises(MismatchError):
        arrive(other, sequence, data)
