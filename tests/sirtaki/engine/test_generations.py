"""A rank learns of the next generation from its agent, or from the ranks that MPI has left."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fakes.meshes import at_once, until

from sirtaki.comm.control import members as members_of_mesh
from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.members import Member, Membership
from sirtaki.comm.plan import TransportKind
from sirtaki.engine import generations
from sirtaki.engine.generations import (
    AgentClient,
    Generations,
    SurvivingMembership,
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
    Patience,
)
from sirtaki.engine.settings import Settings
from sirtaki.errors import CommError, ConfigError, LaunchError, PeerLostError

# ── generations ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Source:
    """Answers `join` with what it is given: generations of one, or errors."""

    def __init__(self, *answers: bool | CommError) -> None:
        self.answers, self.asked = list(answers), list[tuple[int, bool]]()
        self.n_finished = 0

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        self.asked.append((after, has_state))
        answer = self.answers.pop(0)
        if isinstance(answer, CommError):
            raise answer
        members = (Member(node="here", has_state=not answer),)
        return Generation(rank=0, membership=Membership(generation=after + 1, members=members, name="job", secret=""))

    def change(self) -> Change:
        return Change.ADDED

    def on_loss(self, report: Callable[[str], object]) -> None:
        self.report = report

    def finished(self) -> None:
        self.n_finished += 1


def test_a_rank_reports_its_host_and_addresses() -> None:
    membership = Source(True, False)
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
    met, really = list[int](), Generation.connect

    def connect(generation: Generation, **how: Any) -> object:
        met.append(1)
        if len(met) < 3:
            raise PeerLostError("a member has ended")
        return really(generation, **how)

    monkeypatch.setattr(Generation, "connect", connect)
    elastic = Generations(Source(True, True, True))
    elastic.join_next(Settings()).free()
    assert elastic.number == 3


def test_where_there_is_no_next_generation_it_is_no_failure_of_communication() -> None:
    with pytest.raises(LaunchError, match=r"after generation 0.*too few hosts"):
        Generations(Source(CommError("too few hosts"))).join_next(Settings())


def test_a_dismissed_rank_has_not_finished_the_job() -> None:
    membership = Source(Dismissed("its host is drained"))
    elastic = Generations(membership)
    with pytest.raises(Dismissed):
        elastic.join_next(Settings())
    elastic.finished()
    assert membership.n_finished == 0


def test_a_registered_object_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "of_process", None)
    try:
        register(lambda: None)
        assert generations.of_this_process(Settings()) is None
        register(lambda: Source(True))
        assert generations.of_this_process(Settings()) is generations.of_this_process(Settings()) is not None
    finally:
        register(None)


# ── membership ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Agent:
    """The agent's end of the connection."""

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

    def begin(self, asked: Join, *, number: int = 1, rank: int = 0, members: tuple[Member, ...] = ()) -> None:
        membership = Membership(generation=number, members=members or (asked.member,), name="job", secret="secret")
        self.channel.send(Formed(rank=rank, membership=membership))


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
    close_places(found[0])
    return found[0]


def test_a_rank_sends_its_state_and_receives_the_members(ends: tuple[AgentClient, Agent]) -> None:
    client, agent = ends
    thread, found = join(client, after=3, has_state=True)
    asked = agent.hear()
    assert asked.member.has_state
    (place,) = asked.member.addresses
    assert place[0] == "127.0.0.1"
    other = Member(host=("elsewhere",), node="b", slot=2, has_state=True, addresses=(("10.0.0.1", 5),))
    members = other, replace(asked.member, node="a", has_state=False)
    agent.begin(asked, number=4, rank=1, members=members)
    thread.join()
    (generation,) = found
    membership = generation.membership
    assert (generation.rank, membership.generation, membership.members) == (1, 4, members)
    assert membership.mesh_name.startswith("job/4/")
    assert membership.secret == "secret"
    assert "secret" not in repr(generation)
    (listener,) = generation.listeners
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
def test_a_rank_learns_of_a_dead_member_and_fails_operations_that_wait_for_it(
    ends: tuple[AgentClient, Agent], when: str
) -> None:
    client, agent = ends
    generation = joined(client, agent)
    in_vain, told = generation.why_in_vain, list[str]()
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


def test_a_rank_that_computes_for_long_reports_it_once(
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


def test_a_dismissed_rank_is_notified(ends: tuple[AgentClient, Agent]) -> None:
    client, agent = ends
    thread, found = join(client)
    agent.hear()
    agent.channel.send(Dismissal())
    thread.join()
    assert isinstance(found[0], Dismissed)


def test_waiting_for_an_agent_ends_when_it_exits_or_at_the_time_limit(ends: tuple[AgentClient, Agent]) -> None:
    client, agent = ends
    with pytest.raises(CommError, match="in time"):
        client.join(after=0, has_state=False, timeout_s=0.1)
    agent.channel.close()
    with pytest.raises(CommError, match=r"agent .* has exited \("):
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


def test_a_process_that_inherited_only_the_variable_gets_an_error() -> None:
    with pytest.raises(ConfigError, match="names a socket that this process does not have"):
        open_agent(interface=None, environ={AGENT: "9999,one"})


def test_ranks_meet_only_if_they_have_the_same_membership() -> None:
    def name(*ports: int) -> str:
        members = tuple(Member(host=("h",), addresses=(("127.0.0.1", port),)) for port in ports)
        return Membership(generation=4, members=members, name="job", secret="").mesh_name

    assert name(1, 2) == name(1, 2)
    assert len({name(1, 2), name(2, 1), name(1, 3), name(1)}) == 4


# ── surviving membership ──────────────────────────────────────────────────────────────────────────────────────────────


UNDER_ULFM = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_mpi_ft_enable": "1"}


class World:
    """Messages between threads, each of which acts as a rank."""

    def __init__(self, size: int) -> None:
        self.barrier, self.told = threading.Barrier(size), dict[int, Any]()
        self.ranks = [Rank(self, origin) for origin in range(size)]


class Rank:
    """One rank's `Survivors`."""

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
    for listener in generation.listeners:
        listener.close()


def test_survivors_of_one_host_meet_at_loopback_alone() -> None:
    def act(rank: Rank) -> tuple[int, int, int]:
        generation = SurvivingMembership(rank, interface=None).join(  # type: ignore[arg-type]
            after=0, has_state=False, timeout_s=10.0
        )
        members = generation.membership.members
        assert {host for each in members for host, _ in each.addresses} == {"127.0.0.1"}
        assert not any(member.has_state for member in members)
        ranks = generation.connect(timeout_s=10.0, heartbeat_s=None)
        place = ranks.rank, ranks.size, generation.membership.generation
        ranks.free()
        return place

    world = World(3)
    assert at_once(act, world.ranks) == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert [rank.n_shrunk for rank in world.ranks] == [0, 0, 0]


def test_ranks_with_the_jobs_state_are_first_and_the_next_number_exceeds_all_members() -> None:
    world = World(3)
    told = at_once(
        lambda rank: join_left(rank, after=4 if rank.origin == 1 else 3, has_state=rank.origin > 0), world.ranks
    )
    assert {generation.membership.generation for generation in told} == {5}
    assert [generation.rank for generation in told] == [2, 0, 1]
    members = told[0].membership.members
    assert [(member.slot, member.has_state) for member in members] == [(1, True), (2, True), (0, False)]
    assert len({generation.membership.mesh_name for generation in told}) == 1
    assert [rank.n_shrunk for rank in world.ranks] == [1, 1, 1]
    for generation in told:
        close_places(generation)


def test_survivors_of_several_hosts_listen_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_of_mesh, "host_identity", lambda: (str(threading.get_ident()),))
    for generation in at_once(lambda rank: join_left(rank, after=0), World(2).ranks):
        assert [len(each.addresses) for each in generation.membership.members] == [2, 2]  # interface="lo", too
        close_places(generation)


def test_ranks_of_a_host_stay_neighbours() -> None:
    def order(*with_state: int) -> list[int]:
        hosts = ("a",), ("b",), ("a",), ("b",)
        told = [Member(host=host, number=n, has_state=n in with_state) for n, host in enumerate(hosts)]
        return [each.number for each in rank_order(told)]

    assert order(0, 1, 2, 3) == [0, 2, 1, 3]
    assert order(2, 3) == [2, 0, 3, 1]
    assert order(3) == [3, 1, 0, 2]


def test_a_loss_while_they_meet_begins_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[socket.socket]()
    really = members_of_mesh.open_listeners

    def open_listeners(interface: str | None, *, loopback_only: bool) -> tuple[socket.socket, ...]:
        opened.extend(places := really(interface, loopback_only=loopback_only))
        return places

    monkeypatch.setattr(members_of_mesh, "open_listeners", open_listeners)
    (rank,) = World(1).ranks
    lost = PeerLostError("a rank was lost while survivors met")
    rank.errors = [lost, None, lost]  # before it listens, and when it does
    generation = join_left(rank, after=0)
    assert (generation.membership.generation, rank.n_shrunk, len(opened)) == (1, 2, 2)
    kept = generation.listeners
    assert [sock for sock in opened if sock.fileno() >= 0] == list(kept)
    close_places(generation)


def test_a_loss_is_a_change_and_no_rank_waits_for_the_lost_one() -> None:
    (rank,) = World(1).ranks
    membership = SurvivingMembership(rank, interface="lo")  # type: ignore[arg-type]
    assert membership.change() == Change(0)
    generation = membership.join(after=0, has_state=False, timeout_s=10.0)
    assert generation.why_in_vain() == ""
    rank.is_lost = True
    assert membership.change() is Change.REMOVED
    assert "is lost" in generation.why_in_vain()
    close_places(generation)


def test_mpi_is_asked_only_where_mpiexec_lets_ranks_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "Survivors", lambda: World(1).ranks[0])
    assert open_survivors(Settings(), {}) is None
    assert open_survivors(Settings(), {"OMPI_COMM_WORLD_SIZE": "2"}) is None
    assert open_survivors(Settings(control=Backend.MPI), UNDER_ULFM) is None
    assert open_survivors(Settings(transport=TransportKind.MPI), UNDER_ULFM) is None
    assert open_survivors(Settings(), UNDER_ULFM) is not None
