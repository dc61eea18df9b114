"""The control plane: places of ranks, agreements, messages, and the end of waits."""

import datetime
import itertools
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RunRanks
from fakes.meshes import among, at_once, on_planes, until
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import OVER_MESH
from torch.torch_version import TorchVersion

from sirtaki.comm.control import plane
from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import WAIT_CALLBACK_PERIOD_S, FailureBoard
from sirtaki.comm.control.plane import ClockOffset, ControlPlane, compare_clocks, connect_to_store, estimate_offset
from sirtaki.comm.control.waiting import wait_for
from sirtaki.comm.control.watchdog import MessageBoard, Tag
from sirtaki.errors import ConfigError, MismatchError, PeerLostError, StallError, TransportError
from sirtaki.machine import interface_addresses, own_addresses, serve_store

# ── plane ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ranks", "local_size"),
    [(1, "all"), (3, "all"), (4, 2), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((2, "all"), (4, 1)))],
)
def test_ranks_agree_and_have_their_places(run_ranks: RunRanks, ranks: int, local_size: str | int) -> None:
    output = run_ranks("control.py", ranks, local_size).stdout
    assert sorted(output.split("\n")[:-1]) == [f"ok {rank}" for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "local_size"), [(4, 2), pytest.param(1, "all", marks=pytest.mark.slow)])
def test_ranks_agree_over_a_mesh(run_ranks: RunRanks, ranks: int, local_size: str | int) -> None:
    output = run_ranks("control.py", ranks, local_size, env=OVER_MESH).stdout
    assert sorted(output.split("\n")[:-1]) == [f"ok {rank}" for rank in range(ranks)]


def test_values_of_any_length_are_gathered_and_broadcast() -> None:
    def act(control: ControlPlane) -> None:
        for length in range(300):  # short ones travel in one message
            values = [b"x" * length, None, "y" * (length // 2)]
            assert control.all_gather(values[control.rank]) == values, length
            assert control.broadcast(values[control.rank], length % 3) == values[length % 3]

    on_planes(3, act)


def test_a_disagreement_is_reported_on_all_ranks() -> None:
    def act(control: ControlPlane) -> None:
        control.agree_on_success("")
        with pytest.raises(TransportError) as told:
            control.agree_on_success("waited" if control.rank else "no descriptors")
        assert str(told.value) == "rank 0: no descriptors; rank 1: waited; rank 2: waited; and 2 more"
        with pytest.raises(TransportError) as told:
            control.agree_on_success("full" if control.rank > 1 else "")
        assert str(told.value) == "rank 2: full; rank 3: full; rank 4: full"
        with pytest.raises(MismatchError, match=r"about size, .*: rank 0 has 3; ranks that differ: rank 4 has 4$"):
            control.require_equal(3 + control.rank // 4, "size")

    on_planes(5, act)


# ── clocks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


DELAYS = st.floats(min_value=0.0, max_value=0.01)


@given(
    offset_s=st.floats(min_value=-1000.0, max_value=1000.0),
    delays=st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=20),
)
def test_the_offset_is_wrong_by_half_the_quickest_round_trip_at_most(
    offset_s: float, delays: list[tuple[float, float]]
) -> None:
    answers = [
        (number, number + there + offset_s, number + there + back) for number, (there, back) in enumerate(delays)
    ]
    quickest = min(there + back for there, back in delays)
    assert (
        abs(estimate_offset(answers).offset_s - offset_s) <= quickest + 1e-9
    )  # half for the way, half for "no difference"


def test_every_rank_estimates_the_offset_of_its_clock_and_its_error() -> None:
    def find(control):
        ahead_s = 10.0 * control.rank
        return compare_clocks(control, now_s=lambda: time.perf_counter() + ahead_s)

    first, *others = on_planes(3, find)
    assert first == ClockOffset(0.0, 0.0)
    for rank, found in enumerate(others, 1):
        assert 0.0 < found.round_trip_s < 1.0
        assert abs(found.offset_s + 10.0 * rank) <= found.round_trip_s


# ── courier ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def meet(comm: Communicator) -> None:
    wait_for(comm.barrier(), failures=comm.failures)


def test_messages_of_other_kinds_are_kept_until_they_are_requested() -> None:
    def act(comm: Communicator) -> None:
        courier = MessageBoard(comm.duplicate())
        if comm.rank == 0:
            courier.send(1, Tag.WHERE)
            courier.send(1, Tag.LOST, "rank 2")
            courier.send(1, Tag.WHERE, 5)
            courier.send(1, Tag.LEAVING)
        else:
            until(lambda: bool(courier.receive(Tag.LEAVING)))  # the last one
            assert courier.receive(Tag.LOST) == [(0, "rank 2")]
            assert courier.receive(Tag.WHERE) == [(0, None), (0, 5)]
            assert courier.receive(Tag.WHERE) == []
        meet(comm)

    among(2, act)


def test_several_threads_lose_no_message_between_them() -> None:
    each, threads_a_rank = 50, 3

    def act(comm: Communicator) -> None:
        courier, found, lock = MessageBoard(comm.duplicate()), list[tuple[int, object]](), threading.Lock()

        def work(thread: int) -> None:
            for number in range(each):
                courier.send(1 - comm.rank, Tag.BLOCKED, (thread, number))
                some = courier.receive(Tag.BLOCKED)
                with lock:
                    found.extend(some)

        at_once(work, range(threads_a_rank))
        until(lambda: found.extend(courier.receive(Tag.BLOCKED)) or len(found) == each * threads_a_rank)  # type: ignore[func-returns-value]
        assert sorted(message for _, message in found) == [(t, n) for t in range(threads_a_rank) for n in range(each)]  # type: ignore[type-var]
        meet(comm)

    among(2, act)


# ── failure ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_failure_is_kept() -> None:
    board = FailureBoard()
    board.check()
    board.report(PeerLostError("first"))
    board.report(StallError("second"))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="first"):
            board.check()


def test_listeners_get_only_the_first_failure() -> None:
    board, heard = FailureBoard(), list[str]()
    for name in ("one", "other"):
        board.listen(lambda name=name: heard.append(f"{name}: {board.error}"))  # type: ignore[misc]
    board.report(PeerLostError("first"))
    board.report(StallError("second"))
    assert heard == ["one: first", "other: first"]


def test_a_waiting_rank_serves_its_peers_now_and_then_until_the_job_fails() -> None:
    board, calls_s = FailureBoard(), list[float]()
    board.set_wait_callback(lambda: calls_s.append(time.monotonic()))
    end_s = time.monotonic() + 0.1
    wait_for(lambda: time.monotonic() > end_s, failures=board)
    assert 3 <= len(calls_s) <= 0.1 / WAIT_CALLBACK_PERIOD_S + 1
    assert all(later - earlier > 0.9 * WAIT_CALLBACK_PERIOD_S for earlier, later in itertools.pairwise(calls_s))
    board.set_wait_callback(None)
    time.sleep(2 * WAIT_CALLBACK_PERIOD_S)
    board.check()
    board.set_wait_callback(lambda: calls_s.append(0.0))
    board.report(StallError("rank 3 did not come"))
    board.run_wait_callback()
    assert 0.0 not in calls_s


# ── addresses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_loopback_is_recognised_and_not_offered() -> None:
    assert interface_addresses()["lo"] == "127.0.0.1"
    assert not [address for address in own_addresses(None) if address.startswith("127.")]


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="lo"):
        own_addresses("eth99")


# ── rendezvous ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_store_opens_once_and_peers_read_its_values() -> None:
    def act(control: ControlPlane) -> None:
        store, address = control.store(), control.address()
        assert address == "127.0.0.1"
        if control.rank == 0:
            store.set("where", "here")
        control.barrier()
        assert store.get("where") == b"here"
        assert control.scope().store() is store
        control.barrier()

    on_planes(3, act)


def test_a_missing_interface_is_reported_on_all_ranks() -> None:
    def act(control: ControlPlane) -> None:
        control.hosts, control._interface = [0, 1], "nowhere0"
        with pytest.raises(ConfigError, match="nowhere0"):
            control.store()

    on_planes(2, act)


def test_the_store_of_one_host_is_reached_from_there_alone() -> None:
    def act(control: ControlPlane) -> None:
        store = control.store()
        if control.rank == 0:
            with socket.create_connection(("127.0.0.1", store.port), timeout=5.0):
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", store.port), timeout=5.0)
        control.barrier()

    on_planes(2, act)


STORE = datetime.timedelta(seconds=5)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
def test_a_store_is_opened_twice_at_one_port_by_one_process_and_only_by_that(host: str) -> None:
    first = serve_store(host, 0, timeout=STORE, multi_tenant=True)
    second = serve_store(host, first.port, timeout=STORE, multi_tenant=True)
    first.set("where", "here")
    assert second.get("where") == b"here"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(RuntimeError, match=r"(?i)in use"):
        serve_store(host, other.getsockname()[1], timeout=STORE, multi_tenant=True)


def test_a_rank_that_does_not_reach_the_store_is_named_on_all(
    monkeypatch: pytest.MonkeyPatch, reserve: Callable[..., int]
) -> None:
    port, reach = reserve(), plane.reach
    monkeypatch.setattr(plane, "reach", lambda candidates, _: reach(candidates, port))

    def act(control: ControlPlane) -> None:
        with pytest.raises(TransportError, match=f"rank 1: rank 0 cannot be reached at 127.0.0.1:{port}"):
            control.store()

    on_planes(2, act)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.6", reason="this PyTorch takes who is silent for a store")
def test_connecting_to_a_rank_that_has_exited_is_an_error() -> None:
    failures = FailureBoard()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a process that is dying: it accepts, and never answers
        threading.Timer(0.1, failures.report, [PeerLostError("rank 0 has ended")]).start()
        begin_s = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 0 has ended"):
            connect_to_store("127.0.0.1", silent.getsockname()[1], failures=failures)
    assert time.monotonic() - begin_s < 5.0


@pytest.mark.lengthy
def test_a_rank_that_finds_no_peers_gets_an_error_in_time(
    monkeypatch: pytest.MonkeyPatch, reserve: Callable[..., int]
) -> None:
    monkeypatch.setattr(plane, "LIMIT_S", 0.1)
    with pytest.raises(RuntimeError):
        connect_to_store("127.0.0.1", reserve(), failures=FailureBoard())


def test_a_thousand_ranks_are_described_without_comparing_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank loops over all pairs of ranks: with 4 096 ranks, that took seconds."""
    size, compared = 4096, 0

    class Host(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    monkeypatch.setattr(
        ControlPlane,
        "all_gather",
        lambda self, value: [(f"host{rank // 8}", (0, Host(f"host{rank // 8}"))) for rank in range(size)],
    )
    comm: Any = SimpleNamespace(rank=9, size=size, backend=None, failures=FailureBoard(), same_host=lambda: 0)
    comm.duplicate, comm.subset = lambda: comm, tuple
    control = ControlPlane(comm)
    assert control.hosts[:10] == [0] * 8 + [8] * 2
    assert control.host_names[9] == "host1"
    assert (control.local_rank, control.local_size, control.node_ranks) == (1, 8, list(range(8, 16)))
    assert (control.cross_rank, control.cross_size) == (1, size // 8)
    assert set(control.local_sizes) == {8}
    assert control.in_order
    assert compared <= 2 * size
