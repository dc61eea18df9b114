"""What a rank hears from its agent, who is played by the test."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sirtaki.comm.control.mesh_rendezvous import Attendee
from sirtaki.engine import membership
from sirtaki.engine.membership import (
    AgentClient,
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
    name_of,
    open_agent,
)
from sirtaki.errors import CommError, ConfigError
from sirtaki.json_channel import JsonChannel
from sirtaki.launchers import AGENT


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
    client.close()
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
    assert client.change() == Change.ADDED | Change.REMOVED
    joined(client, agent, number=2)
    assert client.change() == Change(0)


def test_a_rank_that_meets_the_others_hears_of_one_that_has_died(ends: tuple[AgentClient, Agent]) -> None:
    client, agent = ends
    generation = joined(client, agent)
    assert generation.meeting.appointment.in_vain() == ""
    agent.channel.send(Changed(Change.REMOVED, "rank 1 was killed"))
    assert generation.meeting.appointment.in_vain() == "rank 1 was killed"
    assert client.change() == Change.REMOVED


def test_a_rank_that_has_computed_for_long_says_so_once(
    ends: tuple[AgentClient, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, agent = ends
    joined(client, agent)
    now_s = time.monotonic()
    for at_s in (9.0, 49.0, 59.0, 99.0, 150.0):
        monkeypatch.setattr(membership.time, "monotonic", lambda at_s=at_s: now_s + at_s)
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
    with pytest.raises(CommError, match="agent of this host is gone"):
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
    client.close()
    other.close()
    assert open_agent(interface=None, environ={}) is None


def test_a_process_that_has_inherited_the_variable_only_is_told_so() -> None:
    with pytest.raises(ConfigError, match="is it one that a rank has started"):
        open_agent(interface=None, environ={AGENT: "9999,one"})


def test_ranks_meet_under_one_name_only_if_they_were_told_the_same() -> None:
    def name(*ports: int) -> str:
        attendees = tuple(Attendee(host=("h",), places=(("127.0.0.1", port),)) for port in ports)
        proof = Proof(job="job", secret="")
        return name_of(Formed(number=4, rank=0, members=(), attendees=attendees, proof=proof))

    assert name(1, 2) == name(1, 2)
    assert len({name(1, 2), name(2, 1), name(1, 3), name(1)}) == 4
