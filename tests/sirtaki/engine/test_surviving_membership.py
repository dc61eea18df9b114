"""Generations of ranks that mpiexec has started: all that are left meet again, those with the job's state first."""

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.mesh_rendezvous import meet
from sirtaki.comm.plan import TransportKind
from sirtaki.engine import generations as surviving_membership
from sirtaki.engine.generations import SurvivingMembership, in_order, open_survivors
from sirtaki.engine.membership import Change, Generation
from sirtaki.errors import CommError, PeerLostError
from sirtaki.settings import Settings

UNDER_ULFM = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_mpi_ft_enable": "1"}


class World:
    """Where threads exchange words, each as one rank."""

    def __init__(self, size: int) -> None:
        self.barrier, self.told = threading.Barrier(size), dict[int, Any]()
        self.ranks = [Rank(self, origin) for origin in range(size)]


class Rank:
    """As `Survivors`."""

    def __init__(self, world: World, origin: int) -> None:
        self.world, self.origin = world, origin
        self.is_lost, self.n_shrunk = False, 0
        self.errors = list[CommError]()

    def lost(self) -> bool:
        return self.is_lost

    def leave(self, exit_code: int) -> None: ...

    def shrink(self, timeout_s: float) -> None:
        self.n_shrunk += 1

    def exchange(self, value: Any) -> list[Any]:
        if self.errors:
            raise self.errors.pop()
        self.world.told[self.origin] = value
        self.world.barrier.wait(10.0)
        told = [self.world.told[origin] for origin in sorted(self.world.told)]
        self.world.barrier.wait(10.0)
        return told


def on_all(world: World, act: Callable[[Rank], Any]) -> list[Any]:
    results: list[Any] = [None] * len(world.ranks)

    def run(rank: Rank) -> None:
        results[rank.origin] = act(rank)

    threads = [threading.Thread(target=run, args=[rank]) for rank in world.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return results


def join(rank: Rank, *, after: int, has_state: bool = True) -> Generation:
    return SurvivingMembership(rank, interface="lo").join(  # type: ignore[arg-type]
        after=after, has_state=has_state, timeout_s=10.0
    )


def close_places(generation: Generation) -> None:
    assert generation.meeting.appointment is not None
    for listener in generation.meeting.appointment.listeners:
        listener.close()


def test_all_meet_where_they_have_been_told() -> None:
    def act(rank: Rank) -> tuple[int, int, int]:
        generation = join(rank, after=0, has_state=False)
        assert all(member.is_new for member in generation.members)
        ranks = meet(generation.meeting, interface="lo", secret=None, timeout_s=10.0, heartbeat_s=None)
        place = ranks.rank, ranks.size, generation.number
        ranks.free()
        return place

    world = World(3)
    assert on_all(world, act) == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert [rank.n_shrunk for rank in world.ranks] == [0, 0, 0]


def test_who_holds_the_jobs_state_comes_first_and_the_number_is_past_everybodys() -> None:
    world = World(3)
    told = on_all(world, lambda rank: join(rank, after=4 if rank.origin == 1 else 3, has_state=rank.origin > 0))
    assert {generation.number for generation in told} == {5}
    assert [generation.meeting.rank for generation in told] == [2, 0, 1]
    assert [(member.slot, member.is_new) for member in told[0].members] == [(1, False), (2, False), (0, True)]
    assert len({generation.meeting.name for generation in told}) == 1
    assert [rank.n_shrunk for rank in world.ranks] == [1, 1, 1]
    for generation in told:
        close_places(generation)


def test_ranks_of_a_host_stay_neighbours() -> None:
    world = World(4)
    on_all(world, lambda rank: close_places(join(rank, after=1)))
    hosts = [("a",), ("b",), ("a",), ("b",)]
    told = [
        replace(world.told[origin], attendee=replace(world.told[origin].attendee, host=hosts[origin]))
        for origin in range(4)
    ]
    assert [each.origin for each in in_order(told)] == [0, 2, 1, 3]
    told = [replace(each, has_state=each.origin in (2, 3)) for each in told]
    assert [each.origin for each in in_order(told)] == [2, 0, 3, 1]
    told = [replace(each, has_state=each.origin == 3) for each in told]
    assert [each.origin for each in in_order(told)] == [3, 1, 0, 2]


def test_a_loss_while_they_meet_begins_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[socket.socket]()
    really = surviving_membership.open_places

    def open_places(interface: str | None) -> tuple[socket.socket, ...]:
        opened.extend(places := really(interface))
        return places

    monkeypatch.setattr(surviving_membership, "open_places", open_places)
    (rank,) = World(1).ranks
    rank.errors = [PeerLostError("a rank was lost while survivors met")]
    generation = join(rank, after=0)
    assert (generation.number, rank.n_shrunk) == (1, 1)
    assert generation.meeting.appointment is not None
    kept = generation.meeting.appointment.listeners
    assert [sock for sock in opened if sock.fileno() >= 0] == list(kept)
    close_places(generation)


def test_an_error_of_the_library_is_the_end() -> None:
    (rank,) = World(1).ranks
    rank.errors = [CommError("MPI cannot go on")]
    with pytest.raises(CommError, match="cannot go on"):
        join(rank, after=0)


def test_a_loss_is_a_change_and_nobody_waits_for_the_lost() -> None:
    (rank,) = World(1).ranks
    membership = SurvivingMembership(rank, interface="lo")  # type: ignore[arg-type]
    assert membership.change() == Change(0)
    generation = membership.join(after=0, has_state=False, timeout_s=10.0)
    assert generation.meeting.appointment is not None
    assert generation.meeting.appointment.in_vain() == ""
    rank.is_lost = True
    assert membership.change() is Change.REMOVED
    assert "is lost" in generation.meeting.appointment.in_vain()
    close_places(generation)


def test_mpi_is_asked_only_where_mpiexec_lets_ranks_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surviving_membership, "Survivors", lambda: World(1).ranks[0])
    told = list[object]()
    monkeypatch.setattr(surviving_membership.process_end, "leave_by", told.append)
    assert open_survivors(Settings(), {}) is None
    assert open_survivors(Settings(), {"OMPI_COMM_WORLD_SIZE": "2"}) is None
    assert open_survivors(Settings(control=Backend.MPI), UNDER_ULFM) is None
    assert open_survivors(Settings(transport=TransportKind.MPI), UNDER_ULFM) is None
    assert told == []
    assert open_survivors(Settings(), UNDER_ULFM) is not None
    assert len(told) == 1
