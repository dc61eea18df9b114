"""A real agent, told by the test what a driver would tell it."""

import os
import sys
import time
from collections.abc import Iterator

import pytest

from sirtaki.run.elastic.agent_crew import AgentCrew, AgentStart, ElasticJob, Heard, Lost, new_endpoint

RANK = "import sys, time; time.sleep(float(sys.argv[1]))"


class Told:
    """A crew of one agent, on this host."""

    def __init__(self, seconds: float) -> None:
        job = ElasticJob(
            command=(sys.executable, "-c", RANK, str(seconds)), environ=os.environ, carried={}, interface=None,
            one_host=True, agents=AgentStart(),
        )  # fmt: skip
        self.crew = AgentCrew(job, new_endpoint(job), lambda name, stream: stream.close())
        self.crew.start("localhost")
        assert self.next()["is"] == "up"

    def next(self) -> dict:
        deadline_s = time.monotonic() + 20.0
        while time.monotonic() < deadline_s:
            for event in self.crew.look(0.05):
                assert isinstance(event, Heard), event
                return dict(event.message)
        pytest.fail("nothing comes")

    def tell(self, **message: object) -> None:
        self.crew.send("localhost", message)


@pytest.fixture
def long() -> Iterator[Told]:
    told = Told(60.0)
    yield told
    told.crew.close()


def test_it_starts_a_rank_and_says_how_it_ends() -> None:
    told = Told(0.0)
    told.tell(do="start", worker=5, slot=0)
    assert told.next() == {"is": "ended", "worker": 5, "exit_code": 0, "reason": ""}
    told.crew.close()


def test_it_kills_a_rank(long: Told) -> None:
    long.tell(do="start", worker=5, slot=0)
    long.tell(do="kill", worker=5, at_once=True)
    assert long.next() == {"is": "ended", "worker": 5, "exit_code": 137, "reason": ""}


def test_what_it_does_not_understand_or_know_changes_nothing(long: Told) -> None:
    for message in ({"do": "dance"}, {"do": "kill", "worker": 9, "at_once": True}, {"do": "start"}, {"is": 1}):
        long.tell(**message)
    long.tell(do="dismiss", worker=9)
    long.tell(do="start", worker=5, slot=0)
    long.tell(do="kill", worker=5, at_once=False)
    assert long.next()["exit_code"] == 143


def test_its_end_is_that_of_its_ranks(long: Told) -> None:
    long.tell(do="start", worker=5, slot=0)
    long.tell(do="end")
    assert long.next()["worker"] == 5
    lost: list[Heard | Lost] = []
    deadline_s = time.monotonic() + 20.0
    while not any(isinstance(event, Lost) for event in lost):
        assert time.monotonic() < deadline_s
        lost += long.crew.look(0.05)
