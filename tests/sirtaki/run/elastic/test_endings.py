"""When a job has ended, and with what."""

import pytest

from sirtaki.run.elastic.actions import End
from sirtaki.run.elastic.endings import Endings
from sirtaki.run.elastic.policy import Policy
from sirtaki.run.elastic.roll import Roll
from sirtaki.run.elastic.workers import Phase, RankEnd

KILLED = RankEnd(exit_code=137)


@pytest.fixture
def endings() -> Endings:
    return Endings(Policy(start_ranks=2, min_ranks=1, timeout_s=10.0))


def begun(ranks: int = 2) -> Roll:
    roll = Roll()
    roll.begin([roll.add("a", slot, 0.0) for slot in range(ranks)], 0.0)
    return roll


def reached(endings: Endings, roll: Roll) -> End | None:
    return endings.reached(roll, agents={"a": True}, slots=4)


def test_the_first_failure_gives_the_exit_code(endings: Endings) -> None:
    roll = begun()
    endings.fail("rank 1", RankEnd(exit_code=3, reason="ValueError: x"))
    del roll.workers[2]
    assert reached(endings, roll) is None
    endings.fail("rank 0", KILLED)
    del roll.workers[1]
    end = reached(endings, roll)
    assert end is not None
    assert end.exit_code == 3
    assert "rank 1: it failed (ValueError: x)" in end.text


def test_failures_of_generations_before_are_forgotten(endings: Endings) -> None:
    endings.fail("rank 1", RankEnd(exit_code=3))
    endings.begin()
    endings.fail("rank 0", KILLED)
    assert endings.without_state().exit_code == 137


def test_success_waits_for_those_who_have_not_reported(endings: Endings) -> None:
    roll = begun()
    roll.has_succeeded = True
    del roll.workers[1]
    assert reached(endings, roll) is None
    roll.workers[2].enter(Phase.WAITING, 1.0)
    assert reached(endings, roll) == End(exit_code=0)


def test_hosts_that_cannot_be_reached_end_a_job_that_has_none_left(endings: Endings) -> None:
    endings.host_problem = "host a is lost (ssh)"
    assert endings.reached(Roll(), agents={"b": False}, slots=4) is None
    assert endings.reached(Roll(), agents={}, slots=4) is None
    end = endings.reached(Roll(), agents={}, slots=0)
    assert end == End(exit_code=1, text="host a is lost (ssh); no host is left")


def test_waiting_has_an_end_which_running_puts_off(endings: Endings) -> None:
    roll = begun()
    assert endings.in_vain(roll, 100.0) is None
    for worker in roll.workers.values():
        worker.enter(Phase.WAITING, 100.0)
    assert endings.in_vain(roll, 101.0) is None
    assert endings.in_vain(roll, 110.9) is None
    end = endings.in_vain(roll, 111.5)
    assert end is not None
    assert "2 of at least 1 ranks came within 10 s" in end.text
