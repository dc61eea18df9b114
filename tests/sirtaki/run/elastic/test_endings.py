"""When a job has ended, and with what."""

import random
from typing import Any

from sirtaki.run.elastic.job_members import Action, End, HostPool, JobMembers, Policy, RankEnd

KILLED = RankEnd(exit_code=137)
RAISED = RankEnd(exit_code=3, reason="ValueError: x")
WELL = RankEnd(exit_code=0)


def job(**policy: Any) -> JobMembers:
    """One host whose two slots are to be used."""
    values = Policy(**{"start_ranks": 2, "min_ranks": 1, "timeout_s": 10.0} | policy)
    members = JobMembers(values, HostPool(values, random.Random(0)))
    members.found({"a": 2}, 0.0)
    return members


def begun(**policy: Any) -> JobMembers:
    """A job whose first generation has two members."""
    members = job(**policy)
    members.agent_up("a", 0.0)
    for worker in (1, 2):
        members.joined(worker, has_state=False, now_s=0.0)
    return members


def end_in(actions: list[Action]) -> End | None:
    return next((action for action in actions if isinstance(action, End)), None)


def test_the_first_failure_gives_the_exit_code() -> None:
    members = begun()
    assert end_in(members.ended(1, RAISED, 1.0)) is None
    end = end_in(members.ended(2, KILLED, 2.0))
    assert end is not None
    assert end.exit_code == 3
    assert "rank 0 (host a, slot 0): it failed (ValueError: x)" in end.text


def test_failures_of_generations_before_are_forgotten() -> None:
    members = begun()
    members.ended(1, RAISED, 1.0)
    members.joined(3, has_state=False, now_s=2.0)
    members.joined(2, has_state=False, now_s=2.0)
    assert members.member_list.generation == 2
    members.ended(2, KILLED, 3.0)
    end = end_in(members.ended(3, KILLED, 3.0))
    assert end is not None
    assert end.exit_code == 137


def test_success_waits_for_those_who_have_not_reported() -> None:
    members = begun()
    assert end_in(members.ended(1, WELL, 1.0)) is None
    assert end_in(members.joined(2, has_state=False, now_s=1.0)) == End(exit_code=0)


def test_hosts_that_cannot_be_reached_end_a_job_that_has_none_left() -> None:
    members = job()
    members.found({"a": 2, "b": 2}, 0.0)
    assert end_in(members.agent_lost("a", "ssh", 0.0)) is None
    end = end_in(members.agent_lost("b", "ssh", 0.0))
    assert end == End(exit_code=1, text="host b is lost (ssh); no host is left")


def test_waiting_has_an_end_which_running_puts_off() -> None:
    members = begun(min_ranks=2)
    assert end_in(members.tick(99.0)) is None
    assert end_in(members.ended(2, KILLED, 100.0)) is None
    assert end_in(members.joined(1, has_state=False, now_s=101.0)) is None
    assert end_in(members.tick(110.9)) is None
    end = end_in(members.tick(111.5))
    assert end is not None
    assert "1 of at least 2 ranks came within 10 s" in end.text
