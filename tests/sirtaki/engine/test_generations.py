"""How a rank learns of the next generation: from its agent, or from the ranks that MPI has left."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fakes.meshes import at_once, until

from sirtaki.comm.control import mesh_rendezvous
from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.mesh_rendezvous import Attendee, Meeting, meet
from sirtaki.comm.plan import TransportKind
from sirtaki.engine import generations
from sirtaki.engine.generations import (
    AgentClient,
    Generations,
    SurvivingMembership,
    name_of,
    open_agent,
    open_survivors,
    rank_order,
    register,
)
from sirtaki.engine.json_channel import JsonChannel
from sirtaki.engine.launchers import AGENT
from sirtaki.engine.membership import (
    Change,
    Changed,
    Dismissal,
    Dismissed,
    Formed,
    FromRank,
    Generation,
    Join,
    Member,
    Patience,
    Proof,
)
from sirtaki.engine.settings import Settings
from sirtaki.errors import CommError, ConfigError, LaunchError, PeerLostError

# ── generations ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Membership:
    """Answers `join` with what it is given: generations of one, or errors."""

    def __init__(self, *answers: bool | CommError) -> None:
        self.answers, self.asked = list(answers), list[tuple[int, bool]]()
        self.n_finished = 0

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        self.asked.append((after, has_state))
        answer = self.answers.pop(0)
        if isinstance(answer, CommError):
            raise answer
        member = Member(host="here", slot=0, is_new=answer)
        return Generation(number=after + 1, members=(member,), meeting=Meeting(rank=0, size=1))

    def change(self) -> Change:
        return Change.ADDED

    def on_loss(self, report: Callable[[str], object]) -> None:
        self.report = report

    def finished(self) -> None:
        self.n_finished += 1


def test_a_rank_says_where_it_comes_from() -> None:
    membership = Membership(True, False)
    elastic = Generations(membership)
    assert not elastic.in_step
    elastic.join_next(Settings()).free()
    assert (elastic.number, elastic.in_step) == (1, True)
    elastic.has_state = True
    elastic.join_next(Settings()).free()
    assert (elastic.number, elastic.in_step) == (2, True)
    assert membership.asked == [(0, False), (1, True)]
    assert elastic.change() is Change.ADDED
    elastic.finished()
    assert membership.n_finished == 1


def test_a_generation_that_loses_a_member_before_all_have_met_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met, really = list[int](), generations.meet

    def meet(meeting: Meeting, **how: object) -> object:
        met.append(1)
        if len(met) < 3:
            raise PeerLostError("a member has ended")
        return really(meeting, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(generations, "meet", meet)
    elastic = Generations(Membership(True, True, True))
    elastic.join_next(Settings()).free()
    assert elastic.number == 3


def test_where_there_is_no_next_generation_it_is_no_failure_of_communication() -> None:
    with pytest.raises(LaunchError, match=r"no generation after 0.*too few hosts"):
        Generations(Membership(CommError("too few hosts"))).join_next(Settings())


def test_who_is_dismissed_has_not_finished_the_job() -> None:
    membership = Membership(Dismissed("its host is drained"))
    elastic = Generations(membership)
    with pytest.raises(Dismissed):
        elastic.join_next(Settings())
    elastic.finished()
    assert membership.n_finished == 0


def test_who_is_registered_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "of_process", None)
    try:
        register(lambda: None)
        assert generations.of_this_process(Settings()) is None
        register(lambda: Membership(True))
        assert generations.of_this_process(Settings()) is generations.of_this_process(Settings()) is not None
    finally:
        register(None)


# ── membership ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Agent:
    """The other end."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel: JsonChannel[FromRank] = JsonChannel(sock, FromRank)

    def hear(self) -> Join:
        deadline_s = time.monotonic() + 30.0
        while time.monotonic() < deadline_s:
            if messages := self.channel.receive():
                (message,) = messages
                return message
            time.sleep(0.001)
        pytest.fail("nothing comes")

    def begin(self, asked: Join, **changes: Any) -> None:
        values = {"number": 1, "rank": 0, "proof": Proof(job="job", secret="secret"), "attendees": (asked.attendee,)}
        members = {"members": (Member(host="a", slot=0, is_new=True),)}
        self.channel.send(Formed(**{**values, **members, **changes}))


@pytest.fixture
def ends() -> Iterator[tuple[AgentClient, Agent]]:
    own, other = socket.socketpair()
    client, agent = AgentClient(own, interface=None, one_host=True), Agent(other)
    yield client, agent
    agent.channel.close()


def join(client: AgentClient, **values: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(client.join(**{"after": 0, "has_state": False, "timeout_s": 30.0} | values))
        except CommError as err:
            found.append(err)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, found


def joined(client: AgentClient, agent: Agent, **changes: Any) -> Generation:
    thread, found = join(client)
    agent.begin(agent.hear(), **changes)
    thread.join()
    for listener in found[0].meeting.appointment.listeners:
        listener.close()
    return found[0]


def test_a_rank_says_what_it_has_and_hears_who_the_members_are(ends: tuple[AgentClient, Agent]) -> None:
    client, agent = ends
    thread, found = join(client, after=3, has_state=True)
    asked = agent.hear()
    assert asked.has_state
    (place,) = asked.attendee.places
    assert place[0] == "127.0.0.1"
    members = Member(host="b", slot=2, is_new=False), Member(host="a", slot=0, is_new=True)
    other = Attendee(host=("elsewhere",), places=(("10.0.0.1", 5),))
    agent.begin(asked, number=4, rank=1, members=members, attendees=(other, asked.attendee))
    thread.join()
    (generation,) = found
    assert (generation.number, generation.members) == (4, members)
    meeting = generation.meeting
    assert (meeting.rank, meeting.size) == (1, 2)
    assert meeting.name.startswith("job/4/")
    assert meeting.appointment.attendees[0] == other
    assert "secret" not in repr(generation)
    (listener,) = meeting.appointment.listeners
    assert listener.getsockname() == place
    listener.close()


def test_changes_add_up_until_the_next_generation(ends: tuple[AgentClient, Agent]) -> None:
    client, agent = ends
    joined(client, agent)
    assert client.change() == Change(0)
    for change in (Change.ADDED, Change.REMOVED):
        agent.channel.send(Changed(change))
    until(lambda: client.change() == Change.ADDED | Change.REMOVED)
    joined(client, agent, number=2)
    assert client.change() == Change(0)


@pytest.mark.parametrize("when", ["while it meets the others", "before it asks", "while it trains"])
def test_a_rank_hears_of_a_member_that_has_died_and_fails_what_waits_for_it(
    ends: tuple[AgentClient, Agent], when: str
) -> None:
    client, agent = ends
    generation = joined(client, agent)
    in_vain, told = generation.meeting.appointment.in_vain, list[str]()
    assert in_vain() == ""
    if when == "while it trains":
        client.on_loss(told.append)
    agent.channel.send(Changed(Change.REMOVED))
    agent.channel.send(Changed(Change.REMOVED, "host b is lost"))
    agent.channel.send(Changed(Change.REMOVED, "host c is lost"))
    until(lambda: in_vain() == "host b is lost")
    if when == "before it asks":
        client.on_loss(told.append)
    if when != "while it meets the others":
        until(lambda: told == ["host b is lost"])
    assert client.change() == Change.REMOVED
    joined(client, agent, number=2)
    agent.channel.send(Changed(Change.REMOVED, "host d is lost"))
    until(lambda: in_vain() == "host d is lost")
    assert "host d is lost" not in told  # it concerns another generation, for which nobody has asked


def test_a_rank_that_has_computed_for_long_says_so_once(
    ends: tuple[AgentClient, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, agent = ends
    joined(client, agent)
    now_s = time.monotonic()
    for at_s in (9.0, 49.0, 59.0, 99.0, 150.0):
        monkeypatch.setattr(generations.time, "monotonic", lambda at_s=at_s: now_s + at_s)
        client.change()
    monkeypatch.undo()
    assert [round(message.seconds) for message in agent.channel.receive() if isinstance(message, Patience)] == [40, 51]


def test_a_rank_that_is_dismissed_is_told(ends: tuple[AgentClient, Agent]) -> None:
    client, agent = ends
    thread, found = join(client)
    agent.hear()
    agent.channel.send(Dismissal())
    thread.join()
    assert isinstance(found[0], Dismissed)


def test_nobody_waits_for_an_agent_that_is_gone_nor_for_ever(ends: tuple[AgentClient, Agent]) -> None:
    client, agent = ends
    with pytest.raises(CommError, match="in time"):
        client.join(after=0, has_state=False, timeout_s=0.1)
    agent.channel.close()
    with pytest.raises(CommError, match="agent of this host has exited"):
        client.join(after=0, has_state=False, timeout_s=30.0)
    assert client.change() == Change(0)
    client.finished()


def test_the_socket_is_found_in_the_environment_and_not_passed_on() -> None:
    own, other = socket.socketpair()
    own.set_inheritable(True)
    descriptor = own.detach()
    client = open_agent(interface=None, environ={AGENT: f"{descriptor},many"})
    assert client is not None
    assert not os.get_inheritable(descriptor)
    other.close()
    assert open_agent(interface=None, environ={}) is None


def test_a_process_that_has_inherited_the_variable_only_is_told_so() -> None:
    with pytest.raises(ConfigError, match="Was it started by a rank"):
        open_agent(interface=None, environ={AGENT: "9999,one"})


def test_ranks_meet_under_one_name_only_if_they_were_told_the_same() -> None:
    def name(*ports: int) -> str:
        attendees = tuple(Attendee(host=("h",), places=(("127.0.0.1", port),)) for port in ports)
        proof = Proof(job="job", secret="")
        return name_of(Formed(number=4, rank=0, members=(), attendees=attendees, proof=proof))

    assert name(1, 2) == name(1, 2)
    assert len({name(1, 2), name(2, 1), name(1, 3), name(1)}) == 4


# ── surviving membership ──────────────────────────────────────────────────────────────────────────────────────────────


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
        self.errors = list[CommError | None]()  # of the next exchanges

    def lost(self) -> bool:
        return self.is_lost

    def leave(self, exit_code: int) -> None: ...

    def shrink(self, timeout_s: float) -> None:
        self.n_shrunk += 1

    def exchange(self, value: Any) -> list[Any]:
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.world.told[self.origin] = value
        self.world.barrier.wait(10.0)
        told = [self.world.told[origin] for origin in sorted(self.world.told)]
        self.world.barrier.wait(10.0)
        return told


def join_left(rank: Rank, *, after: int, has_state: bool = True) -> Generation:
    return SurvivingMembership(rank, interface="lo").join(  # type: ignore[arg-type]
        after=after, has_state=has_state, timeout_s=10.0
    )


def close_places(generation: Generation) -> None:
    assert generation.meeting.appointment is not None
    for listener in generation.meeting.appointment.listeners:
        listener.close()


def test_survivors_of_one_host_meet_at_loopback_alone() -> None:
    def act(rank: Rank) -> tuple[int, int, int]:
        generation = SurvivingMembership(rank, interface=None).join(  # type: ignore[arg-type]
            after=0, has_state=False, timeout_s=10.0
        )
        assert generation.meeting.appointment is not None
        assert {host for each in generation.meeting.appointment.attendees for host, _ in each.places} == {"127.0.0.1"}
        assert all(member.is_new for member in generation.members)
        ranks = meet(generation.meeting, interface="lo", secret=None, timeout_s=10.0, heartbeat_s=None)
        place = ranks.rank, ranks.size, generation.number
        ranks.free()
        return place

    world = World(3)
    assert at_once(act, world.ranks) == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert [rank.n_shrunk for rank in world.ranks] == [0, 0, 0]


def test_who_holds_the_jobs_state_comes_first_and_the_number_is_past_everybodys() -> None:
    world = World(3)
    told = at_once(
        lambda rank: join_left(rank, after=4 if rank.origin == 1 else 3, has_state=rank.origin > 0), world.ranks
    )
    assert {generation.number for generation in told} == {5}
    assert [generation.meeting.rank for generation in told] == [2, 0, 1]
    assert [(member.slot, member.is_new) for member in told[0].members] == [(1, False), (2, False), (0, True)]
    assert len({generation.meeting.name for generation in told}) == 1
    assert [rank.n_shrunk for rank in world.ranks] == [1, 1, 1]
    for generation in told:
        close_places(generation)


def test_survivors_of_several_hosts_listen_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_rendezvous, "host_identity", lambda: (str(threading.get_ident()),))
    for generation in at_once(lambda rank: join_left(rank, after=0), World(2).ranks):
        assert [len(each.places) for each in generation.meeting.appointment.attendees] == [2, 2]  # interface="lo", too
        close_places(generation)


def test_ranks_of_a_host_stay_neighbours() -> None:
    world = World(4)
    at_once(lambda rank: close_places(join_left(rank, after=1)), world.ranks)
    hosts = [("a",), ("b",), ("a",), ("b",)]
    told = [
        replace(each, introduction=replace(each.introduction, attendee=replace(each.attendee, host=host)))
        for each, host in zip((world.told[origin] for origin in range(4)), hosts, strict=True)
    ]
    assert [each.origin for each in rank_order(told)] == [0, 2, 1, 3]
    told = [replace(each, has_state=each.origin in (2, 3)) for each in told]
    assert [each.origin for each in rank_order(told)] == [2, 0, 3, 1]
    told = [replace(each, has_state=each.origin == 3) for each in told]
    assert [each.origin for each in rank_order(told)] == [3, 1, 0, 2]


def test_a_loss_while_they_meet_begins_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[socket.socket]()
    really = mesh_rendezvous.open_places

    def open_places(interface: str | None, *, loopback_only: bool) -> tuple[socket.socket, ...]:
        opened.extend(places := really(interface, loopback_only=loopback_only))
        return places

    monkeypatch.setattr(mesh_rendezvous, "open_places", open_places)
    (rank,) = World(1).ranks
    lost = PeerLostError("a rank was lost while survivors met")
    rank.errors = [lost, None, lost]  # before it listens, and when it does
    generation = join_left(rank, after=0)
    assert (generation.number, rank.n_shrunk, len(opened)) == (1, 2, 2)
    assert generation.meeting.appointment is not None
    kept = generation.meeting.appointment.listeners
    assert [sock for sock in opened if sock.fileno() >= 0] == list(kept)
    close_places(generation)


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
    monkeypatch.setattr(generations, "Survivors", lambda: World(1).ranks[0])
    assert open_survivors(Settings(), {}) is None
    assert open_survivors(Settings(), {"OMPI_COMM_WORLD_SIZE": "2"}) is None
    assert open_survivors(Settings(control=Backend.MPI), UNDER_ULFM) is None
    assert open_survivors(Settings(transport=TransportKind.MPI), UNDER_ULFM) is None
    assert open_survivors(Settings(), UNDER_ULFM) is not None
