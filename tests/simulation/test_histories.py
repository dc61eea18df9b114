"""The recovery protocol in simulated time: histories in which ranks, agents, drivers, hosts and the network fail."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from simulation import histories, ranks
from simulation.faults import Fault, Kind, Plan, drawn, smallest
from simulation.histories import explain, many, play
from simulation.judge import History, wrongs

from sirtaki.run.elastic.job_members import Policy


def check(seeds: range) -> int:
    """Run histories and return how many jobs ended. For a violation, fail with the smallest plan that has one."""
    verdicts = [play(drawn(seed)) for seed in seeds]
    for verdict in verdicts:
        if verdict.wrongs:
            pytest.fail(explain(verdict.plan))
    return sum(verdict.ended for verdict in verdicts)


@pytest.mark.lengthy
@pytest.mark.parametrize("block", range(2))
def test_random_histories_keep_commits_and_reach_a_stable_state(block: int) -> None:
    assert check(range(20 * block, 20 * block + 20)) < 18  # some jobs must still train


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(30))
def test_thousands_of_histories(block: int) -> None:
    check(range(1_000_000 + 100 * block, 1_000_000 + 100 * block + 100))


LASTS_S = {
    Kind.FREEZE_RANK: 40.0, Kind.FREEZE_AGENT: 40.0, Kind.FREEZE_DRIVER: 80.0, Kind.PARTITION: 80.0,
    Kind.ONE_WAY: 80.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", Kind)
def test_a_single_fault_of_any_kind_ends_no_job_of_three_hosts(kind: Kind) -> None:
    fault = Fault(at_s=20.0, kind=kind, draw=0.4, seconds=LASTS_S.get(kind, 0.0))
    plan = Plan(seed=3, slots=(1, 1, 1), min_ranks=1, discovers=kind is Kind.HOSTS, calm_s=30.0, faults=(fault,))
    verdict = play(plan)
    assert not verdict.wrongs, explain(plan)
    assert not verdict.ended, str(verdict.history)


def test_a_history_is_the_same_whenever_it_is_played() -> None:
    plan = drawn(26)
    assert Plan.decode(plan.encode()) == plan
    first, again = play(plan), play(Plan.decode(plan.encode()))
    assert str(first.history) == str(again.history)
    assert len(first.history.notes) > 50
    assert many([26]) == []


def test_faults_that_are_not_needed_are_left_out() -> None:
    plan = drawn(7)
    assert len(plan.faults) > 1
    needed = plan.faults[1]
    small = smallest(plan, lambda fewer: needed in fewer.faults)
    assert small.faults == (needed,)


def history(*notes: tuple[str, int, dict]) -> History:
    result = History()
    for what, who, more in notes:
        result.note(what, who, **more)
    return result


MET = {"number": 2, "members": (1, 2), "rank": 0}


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([("met", 1, MET), ("met", 2, {**MET, "rank": 1})], ""),
        ([("met", 1, MET), ("met", 2, {**MET, "members": (2, 3)})], "has members (1, 2) and (2, 3)"),
        ([("met", 1, {**MET, "rank": 1})], "is not rank 1"),
        ([("met", 1, MET), ("met", 1, {**MET, "number": 3})], "is in generations 2 and 3"),
        ([("met", 1, MET), ("left", 1, {}), ("met", 1, MET)], "generation 2 after 2"),
        (
            [("step", 1, {"parent": 0, "value": 5}), ("commit", 1, {"value": 5}), ("train", 2, {"value": 0})],
            "without a commit that had returned",
        ),
        (
            [
                ("step", 1, {"parent": 0, "value": 5}), ("step", 2, {"parent": 0, "value": 6}),
                ("commit", 1, {"value": 5}), ("commit", 2, {"value": 6}),
            ],
            "does not stem from all before it",
        ),
        (
            [("step", 1, {"parent": 0, "value": 5}), ("commit", 1, {"value": 5}), ("commit", 2, {"value": 5})],
            "",
        ),
    ],
)  # fmt: skip
def test_the_judge_detects_violations(notes: list, expected: str) -> None:
    assert expected in "; ".join(wrongs(history(*notes)))
    assert bool(expected) == bool(wrongs(history(*notes)))


def found_wrong(plans: Iterator[Plan]) -> bool:
    return any(play(plan).wrongs for plan in plans)


def cut(kind: Kind, seconds: float, **more: Any) -> Iterator[Plan]:
    """Yield jobs of three hosts with one network fault at a random time."""
    for seed in range(200):
        rng = random.Random(seed)
        fault = Fault(at_s=rng.uniform(8.0, 30.0), kind=kind, draw=rng.random(), seconds=seconds)
        yield Plan(seed=seed, slots=(1, 1, 1), min_ranks=1, calm_s=30.0, faults=(fault,), **more)


@pytest.mark.slow
def test_without_a_quorum_both_sides_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "Policy", lambda **values: Policy(**{**values, "has_successors": False}))
    assert found_wrong(cut(Kind.PARTITION, 100.0))


@pytest.mark.slow
def test_without_its_second_round_a_commit_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.Mesh, "barrier", lambda mesh: iter(()))
    assert found_wrong(cut(Kind.ONE_WAY, 40.0, goes_on=False, step_s=(0.05, 0.1)))
