"""What agents say becomes events of the rules, and what the rules want becomes messages."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from sirtaki.run.elastic.agent_crew import Heard, Lost
from sirtaki.run.elastic.driver import Direction
from sirtaki.run.elastic.job_members import HostPool, JobMembers, Policy

POLICY = Policy(start_ranks=2, min_ranks=1, has_successors=True)


class Crew:
    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.sent: list[tuple[str, Mapping[str, Any]]] = []
        self.fails = ""

    def start(self, host: str) -> None:
        if host == self.fails:
            raise OSError("no such program")
        self.hosts.append(host)

    def stop(self, host: str) -> None:
        self.hosts.remove(host)

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        self.sent.append((host, message))

    def send_to(self, hosts: Iterable[str], message: Mapping[str, Any]) -> None:
        for host in hosts:
            self.send(host, message)

    def tell_each_other(self) -> None:
        pass

    def to(self, host: str, do: str) -> list[Mapping[str, Any]]:
        return [message for there, message in self.sent if there == host and message["do"] == do]


@pytest.fixture
def crew() -> Crew:
    return Crew()


@pytest.fixture
def direction(crew: Crew) -> Direction:
    return Direction(JobMembers(POLICY, HostPool(POLICY, random.Random(0))), crew, lambda text: None)


def hear(direction: Direction, host: str, **message: Any) -> None:
    direction.answer([Heard(host=host, message={"is": message.pop("what"), **message})], 1.0)


def begin(direction: Direction) -> None:
    """A job of a rank on a, one on b, and an agent on c."""
    direction.found({"a": 1, "b": 1}, 0.0)
    for number, host in enumerate("ab", start=1):
        hear(direction, host, what="up")
        hear(direction, host, what="joined", worker=number, has_state=False, attendee={"places": [[host, number]]})


def test_all_agents_hear_of_a_generation_and_older_ones_count_until_they_know_it(
    crew: Crew, direction: Direction
) -> None:
    crew.hosts.append("c")
    begin(direction)
    (told,) = crew.to("b", "generation")
    assert (told["workers"], told["older"]) == ((1, 2), [])
    assert told["attendees"] == [{"places": [["a", 1]]}, {"places": [["b", 2]]}]
    assert crew.to("c", "generation") == [told]
    for number, host in enumerate("ab", start=1):
        hear(direction, host, what="joined", worker=number, has_state=True, attendee={"places": []})
    assert crew.to("a", "generation")[-1]["older"] == [[1, 2]]
    hear(direction, "a", what="told", number=2)
    assert crew.to("c", "settle") == [{"do": "settle", "number": 2, "older": []}]


def test_what_a_host_says_of_a_rank_that_is_not_its_own_does_not_count(crew: Crew, direction: Direction) -> None:
    begin(direction)
    hear(direction, "b", what="ended", worker=1, exit_code=0, reason="")
    assert 1 in direction.members.member_list.workers
    direction.answer([Lost(host="b", why="it is silent")], 2.0)
    hear(direction, "b", what="ended", worker=2, exit_code=0, reason="")
    assert direction.end is None


def test_a_host_whose_agent_cannot_be_started_is_lost(crew: Crew, direction: Direction) -> None:
    crew.fails = "a"
    direction.found({"a": 1}, 0.0)
    assert direction.end is not None
    assert "no such program" in direction.end.text


def test_who_takes_over_believes_the_newest_generation_and_needs_enough_of_it(crew: Crew, direction: Direction) -> None:
    crew.hosts[:] = ["a", "b"]
    ranks = {"a": [[1, 0, "member", 5, 0, True, {}]], "b": [[2, 0, "waiting", 4, 0, True, {}]]}
    generations = {
        "a": {"number": 5, "workers": [1, 2], "older": [[1, 3, 4]], "has_state": True, "left_out": {"z": [2, None]}},
        "b": {"number": 4, "workers": [1, 3, 4], "older": [], "has_state": True, "left_out": {}},
    }
    reports = {host: {"ranks": ranks[host], "generation": generations[host]} for host in "ab"}
    assert not direction.take_over(reports, 0.0)  # 3 and 4 may go on, as they know of no other generation
    reports["a"] = {"ranks": ranks["a"], "generation": {**generations["a"], "older": []}}
    fresh = Direction(JobMembers(POLICY, HostPool(POLICY, random.Random(0))), crew, lambda text: None)
    assert fresh.take_over(reports, 0.0)
    assert fresh.members.member_list.generation == 5
    fresh.found({"a": 1, "b": 1, "z": 1}, 0.0)
    assert "z" not in crew.hosts  # as the lost driver had left it out


def test_what_comes_at_once_is_decided_once(crew: Crew, direction: Direction) -> None:
    begin(direction)
    joined = {"has_state": True, "attendee": {"places": []}}
    events = [Heard(host=host, message={"is": "joined", "worker": n, **joined}) for n, host in enumerate("ab", start=1)]
    before = len(crew.sent)
    direction.answer(events, 2.0)
    assert [message["do"] for _, message in crew.sent[before:]] == ["generation", "generation"]


def test_the_rules_hear_how_long_a_rank_computes(direction: Direction) -> None:
    begin(direction)
    hear(direction, "a", what="patient", worker=1, seconds=40.0)
    hear(direction, "a", what="joined", worker=1, has_state=True, attendee={"places": []})
    direction.tick(70.0)
    assert direction.members.member_list.workers[2].verdict == ""
    direction.tick(90.0)
    assert "within 80 s" in direction.members.member_list.workers[2].verdict
