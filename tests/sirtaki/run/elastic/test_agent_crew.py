"""Agents that start, come, speak, fall silent and do not come at all; their commands are small programs here."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sirtaki.run.elastic import agent_crew
from sirtaki.run.elastic.agent_crew import AgentCrew, AgentStart, ElasticJob, Heard, Lost, new_endpoint

AGENT = """
import json, socket, sys, time
from sirtaki.run.elastic.succession import agents_key, reach_driver
told = json.loads(sys.stdin.readline())
key = agents_key(told["secret"], told["job"])
channel = reach_driver([tuple(place) for place in told["places"]], key=key, number=told["number"])
channel.send({"is": "up", "host": told["host"], "places": []})
BODY
"""


@pytest.fixture
def crew_of() -> Iterator[Callable[..., AgentCrew]]:
    crews = []

    def make(body: str, *, code: str = AGENT, start_s: float = 20.0) -> AgentCrew:
        text = code.replace("BODY", body)
        job = ElasticJob(
            command=("x",), environ=os.environ, carried={}, interface=None, one_host=True,
            agents=_Program(text), agent_start_s=start_s,
        )  # fmt: skip
        crews.append(AgentCrew(job, new_endpoint(job), lambda name, stream: stream.close()))
        return crews[-1]

    yield make
    for crew in crews:
        crew.close()


class _Program(AgentStart):
    """Starts a program of the test's."""

    def __init__(self, text: str) -> None:
        super().__init__()
        object.__setattr__(self, "template", text)

    def words(self, host: str, environ: Any = None) -> list[str]:
        return [sys.executable, "-c", self.template]


def events(crew: AgentCrew, count: int, timeout_s: float = 20.0) -> list[Heard | Lost]:
    found: list[Heard | Lost] = []
    deadline_s = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline_s, found
        found += crew.look(0.05)
    return found


def test_an_agent_comes_speaks_and_goes(crew_of: Callable[..., AgentCrew]) -> None:
    crew = crew_of('channel.send({"is": "finished", "worker": 1})')
    crew.start("a")
    up, said, lost = events(crew, 3)
    assert isinstance(up, Heard)
    assert (up.host, up.message["is"]) == ("a", "up")
    assert said == Heard(host="a", message={"is": "finished", "worker": 1})
    assert lost == Lost(host="a", why="its agent is gone")
    assert crew.hosts == []


@pytest.mark.slow
def test_an_agent_that_falls_silent_is_given_up(
    crew_of: Callable[..., AgentCrew], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_crew, "AGENT_SILENT_S", 0.5)
    crew = crew_of("time.sleep(3.0)")
    crew.start("a")
    _, lost = events(crew, 2)
    assert lost == Lost(host="a", why="it has been silent for 0.5 s")


def test_a_command_that_ends_before_its_agent_has_come_says_its_exit_code(crew_of: Callable[..., AgentCrew]) -> None:
    crew = crew_of("", code="raise SystemExit(255)")
    crew.start("a")
    (lost,) = events(crew, 1)
    assert isinstance(lost, Lost)
    assert lost.why.endswith("ended with exit code 255")


def test_an_agent_that_does_not_come_is_given_up(crew_of: Callable[..., AgentCrew]) -> None:
    crew = crew_of("", code="import time; time.sleep(3.0)", start_s=0.3)
    crew.start("a")
    (lost,) = events(crew, 1)
    assert lost == Lost(host="a", why="its agent has not answered within 0.3 s")
