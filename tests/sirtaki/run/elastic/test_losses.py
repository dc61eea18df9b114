"""What is told of a lost process or host, and whether the host is left out."""

import random
from typing import Any

import pytest

from sirtaki.run.elastic.job_members import (
    Action,
    HostPool,
    JobMembers,
    OnFailure,
    Policy,
    RankEnd,
    Say,
    StartRank,
)

KILLED = RankEnd(exit_code=137)
RAISED = RankEnd(exit_code=3, reason="ValueError: a bad batch")


def begun(**policy: Any) -> JobMembers:
    """Two hosts of one slot; a process on each is a member of the first generation."""
    values = Policy(start_ranks=2, min_ranks=1, **policy)
    members = JobMembers(values, HostPool(values, random.Random(0)))
    members.found({"a": 1, "b": 1}, 0.0)
    for worker, host in enumerate(("a", "b"), 1):
        members.agent_up(host, 0.0)
        members.joined(worker, has_state=False, now_s=0.0)
    assert members.member_list.generation == 1
    return members


def told(actions: list[Action]) -> str:
    """The first line for the user."""
    return next(action.text for action in actions if isinstance(action, Say))


def test_a_process_that_is_killed_is_replaced_in_place() -> None:
    members = begun()
    text = told(members.ended(1, KILLED, 1.0))
    assert text.endswith("; replaced in place, 1 goes on")
    assert "rank 0 (host a, slot 0)" in text
    assert set(members.pool.usable) == {"a", "b"}


def test_nobody_is_replaced_where_nobody_may_start() -> None:
    members = begun()
    members.finished(2, 1.0)
    assert "replaced" not in told(members.ended(1, KILLED, 1.0))


def test_a_host_may_be_dropped_at_once() -> None:
    members = begun(on_failure=OnFailure.DROP_HOST)
    assert "; host a is left out" in told(members.ended(1, KILLED, 1.0))
    assert set(members.pool.usable) == {"b"}


def test_a_host_whose_processes_fail_again_and_again_is_left_out() -> None:
    members, worker, text = begun(), 1, ""
    for _ in range(10):
        actions = members.ended(worker, RAISED, 1.0)
        text = told(actions)
        if "left out" in text:
            break
        assert "ValueError: a bad batch" in text
        (worker,) = (action.worker for action in actions if isinstance(action, StartRank))
    assert "host a is left out" in text
    assert set(members.pool.usable) == {"b"}


@pytest.mark.parametrize(("wanted", "expected"), [(True, "host a is left out"), (False, "go")])
def test_a_host_that_is_gone_is_told_with_its_ranks(wanted: bool, expected: str) -> None:
    members = begun()
    if not wanted:
        members.pool.find({"b": 1})
    text = told(members.agent_lost("a", "its connection is closed", 1.0))
    assert text.startswith("host a is lost (its connection is closed) with rank 0")
    assert expected in text
    assert ("left out" in text) is wanted
    assert text.endswith(", 1 goes on")
