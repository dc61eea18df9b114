"""What an agent does about what it hears; its actions write down what they are told."""

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from sirtaki.run.elastic.agent_rules import DRIVER_SILENT_S, KILL_GRACE_S, LEAVE_GRACE_S, AgentRules, end_grace_s
from sirtaki.run.elastic.job_members import RankEnd

FORM = {
    "do": "generation",
    "number": 3,
    "workers": [7, 9],
    "members": [],
    "attendees": [],
    "has_state": True,
    "left_out": {},
}


class AgentActions:
    def __init__(self) -> None:
        self.done: list[Any] = []
        self.to_driver: list[Any] = []
        self.to_ranks: list[Any] = []

    def start_rank(self, worker: int, slot: int) -> None:
        if slot == 13:
            raise OSError("no such program")

    def ask_to_end(self, worker: int) -> None:
        self.done.append(("ask to end", worker))

    def kill(self, worker: int) -> None:
        self.done.append(("kill", worker))

    def tell_rank(self, worker: int, message: Mapping[str, Any]) -> None:
        self.to_ranks.append((worker, message))

    def tell_driver(self, message: Mapping[str, Any]) -> None:
        self.to_driver.append(message)


@pytest.fixture
def actions() -> AgentActions:
    return AgentActions()


@pytest.fixture
def rules(actions: AgentActions) -> AgentRules:
    """Of an agent with one rank."""
    rules = AgentRules(actions, host="a", now_s=0.0)
    rules.hear_driver({"do": "start", "worker": 7, "slot": 1}, 0.0)
    return rules


def test_a_driver_that_knows_nothing_is_told_how_far_all_are(actions: AgentActions, rules: AgentRules) -> None:
    rules.hear_rank(7, {"ask": "join", "has_state": True, "attendee": {"places": []}})
    rules.hear_driver({**FORM, "older": [[5, 7]]}, 1.0)
    assert actions.to_ranks[-1][1]["rank"] == 0
    assert actions.to_driver[-1] == {"is": "told", "number": 3}
    rules.meet_driver([("a", 1)], 2.0)
    report = actions.to_driver[-1]
    assert report["ranks"] == [[7, 1, "member", 3, 0, True, {"places": []}]]
    assert report["generation"] == {
        "number": 3,
        "workers": [7, 9],
        "older": [[5, 7]],
        "has_state": True,
        "left_out": {},
    }
    rules.hear_driver({"do": "settle", "number": 2, "older": []}, 3.0)  # of one that has passed
    rules.hear_driver({"do": "settle", "number": 3, "older": []}, 3.0)
    rules.meet_driver([], 4.0)
    assert actions.to_driver[-1]["generation"]["older"] == []


def test_nobody_asks_for_an_answer_where_no_driver_follows(actions: AgentActions, rules: AgentRules) -> None:
    rules.hear_driver({**FORM, "older": None}, 1.0)
    assert actions.to_driver == []


def test_a_rank_is_asked_to_end_before_it_is_killed(actions: AgentActions, rules: AgentRules) -> None:
    rules.hear_driver({"do": "kill", "worker": 7, "at_once": False}, 1.0)
    rules.tick(1.0 + KILL_GRACE_S - 0.1)
    assert actions.done == [("ask to end", 7)]
    rules.tick(1.0 + KILL_GRACE_S)
    assert actions.done[-1] == ("kill", 7)
    rules.rank_ended(7, RankEnd(exit_code=137))
    assert actions.to_driver[-1] == {"is": "ended", "worker": 7, "exit_code": 137, "reason": ""}


def test_a_rank_that_cannot_be_started_has_ended(actions: AgentActions, rules: AgentRules) -> None:
    rules.hear_driver({"do": "start", "worker": 8, "slot": 13}, 0.0)
    assert actions.to_driver[-1]["exit_code"] == 127
    assert list(rules.ranks) == [7]


def test_a_silent_driver_is_given_up_but_not_by_who_was_stopped_itself(rules: AgentRules) -> None:
    for now_s in range(1, int(DRIVER_SILENT_S) + 1):
        assert rules.tick(float(now_s))
    assert not rules.tick(DRIVER_SILENT_S + 0.5)
    assert rules.tick(1000.0)


def test_at_its_end_it_ends_its_ranks(actions: AgentActions, rules: AgentRules) -> None:
    rules.hear_driver({"do": "end"}, 1.0)
    assert rules.ends
    assert actions.done == [("ask to end", 7)]


def test_who_trains_may_take_its_time_to_write_and_who_waits_for_others_may_not(
    actions: AgentActions, rules: AgentRules
) -> None:
    rules.hear_driver({**FORM, "older": None}, 1.0)
    rules.hear_driver({"do": "start", "worker": 8, "slot": 2}, 1.0)
    rules.hear_driver({"do": "end", "grace_s": LEAVE_GRACE_S}, 1.0)
    del actions.done[:]
    rules.tick(1.0 + KILL_GRACE_S)
    assert actions.done == [("kill", 8)]  # which has not begun to train
    rules.hear_rank(7, {"ask": "join", "has_state": True, "attendee": {}})
    assert actions.done[1:] == [("kill", 7)]


def test_ranks_that_write_checkpoints_have_time_for_it_when_the_job_is_told_to_go() -> None:
    writes = {"SIRTAKI_CHECKPOINT_DIR": "/shared"}
    assert end_grace_s(signal.SIGTERM, writes) == LEAVE_GRACE_S
    assert end_grace_s(signal.SIGINT, writes) == KILL_GRACE_S
    assert end_grace_s(signal.SIGTERM, {}) == KILL_GRACE_S
    assert end_grace_s(None, writes) == KILL_GRACE_S


def test_every_driver_hears_how_long_a_rank_computes(actions: AgentActions, rules: AgentRules) -> None:
    rules.hear_rank(7, {"ask": "patience", "seconds": 40.0})
    assert actions.to_driver == [{"is": "patient", "worker": 7, "seconds": 40.0}]
    rules.meet_driver([], 1.0)
    assert actions.to_driver[-1] == {"is": "patient", "worker": 7, "seconds": 40.0}
