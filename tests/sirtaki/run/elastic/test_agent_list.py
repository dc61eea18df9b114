"""Who may come, who is given up and why; time is what the test says."""

import json
from typing import Any

from sirtaki.run.elastic.agent_crew import AGENT_SILENT_S, REMEMBERED_S, AgentList, AgentRecord, Heard, Lost


class Channel:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.closed = False

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def send_encoded(self, text: bytes) -> None:
        self.sent.append(json.loads(text[4:]))

    def close(self) -> None:
        self.closed = True


Record = AgentRecord[Channel]


def agent_list(*, expected: tuple[int, ...] = ()) -> AgentList[Record]:
    return AgentList(
        expected=expected, numbers=4, start_s=60.0, tells=True, sent=lambda agent: None, released=lambda agent: None,
        now_s=0.0,
    )  # fmt: skip


def come(agents: AgentList[Record], host: str) -> Record:
    agent = Record(host, agents.next_number(), program="/usr/bin/ssh", now_s=0.0)
    agents.started(agent)
    assert agents.awaited(agent.number) is agent
    agent.channel = Channel()
    assert agents.awaited(agent.number) is None
    agents.hear(agent, {"is": "up", "host": host, "places": [[host, agent.number]]}, 0.0)
    return agent


def test_numbers_go_on_and_beats_are_answered() -> None:
    agents = agent_list()
    agent = come(agents, "a")
    assert agent.number == 5
    assert agents.hear(agent, {"is": "beat"}, 1.0) is None
    assert agent.channel is not None
    assert agent.channel.sent == [{"do": "beat"}]
    assert agents.hear(agent, {"is": "ended"}, 2.0) == Heard(host="a", message={"is": "ended"})


def test_who_is_silent_is_given_up_and_the_others_remember_it_for_a_while() -> None:
    agents = agent_list()
    silent, other = come(agents, "a"), come(agents, "b")
    for now_s in range(1, 11):
        agents.hear(other, {"is": "beat"}, float(now_s))
        assert list(agents.tick(float(now_s))) == []
    assert list(agents.tick(AGENT_SILENT_S + 0.1)) == [Lost(host="a", why="it has been silent for 10 s")]
    assert list(agents.agents) == ["b"]
    assert silent.channel is not None
    assert silent.channel.closed
    assert {"do": "end"} not in silent.channel.sent  # it may be that side which goes on
    assert other.channel is not None
    agents.tell_each_other()
    assert other.channel.sent[-1]["agents"] == [[6, [["b", 6]]], [5, [["a", 5]]]]
    other.heard_s = 10.0 + REMEMBERED_S
    list(agents.tick(11.0 + REMEMBERED_S))
    agents.tell_each_other()
    assert other.channel.sent[-1]["agents"] == [[6, [["b", 6]]]]


def test_a_driver_that_was_stopped_itself_blames_nobody() -> None:
    agents = agent_list()
    come(agents, "a")
    assert list(agents.tick(1000.0)) == []
    assert list(agents.tick(1004.0)) == []


def test_one_that_another_driver_has_started_says_where_it_is() -> None:
    agents = agent_list(expected=(2,))
    agent = Record("", 2, program="its starter", now_s=0.0)
    agent.channel = Channel()
    assert agents.hear(agent, {"is": "joined"}, 0.0) is None
    assert agents.hear(agent, {"is": "up", "host": "c", "places": []}, 0.0) is not None
    assert agents.expected == set()
    assert agents.agents == {"c": agent}
    assert agents.adopts
    given_up = Record("", 9, program="its starter", now_s=0.0)  # by the lost driver
    agents.hear(given_up, {"is": "up", "host": "d", "places": []}, 0.0)
    assert agents.next_number() == 10
    agents.close_adoption()
    assert not agents.adopts


def test_who_does_not_come_is_given_up() -> None:
    agents = agent_list()
    agents.started(Record("a", 5, program="/usr/bin/ssh", now_s=0.0))
    assert [lost.why for lost in agents.tick(61.0)] == ["its agent has not answered within 60 s"]
