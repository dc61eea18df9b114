"""What is read out of the lines that killed jobs have left."""

import json
from pathlib import Path

import pytest

from bench.lib.elastic.history import Diaries, Event, faults, joins_s, recovered_at_s


def event(kind: str, at_s: float, *, pid: int = 1, step: int = 0, size: int = 3, digest: str = "") -> Event:
    return Event(pid=pid, kind=kind, at_s=at_s, step=step, size=size, digest=digest)


def steps(pid: int, *times_and_sizes: tuple[float, int]) -> list[Event]:
    return [event("step", at_s, pid=pid, step=n, size=size) for n, (at_s, size) in enumerate(times_and_sizes)]


def test_lines_are_read_as_they_come_and_a_cut_one_when_it_is_whole(tmp_path: Path) -> None:
    diaries = Diaries(tmp_path)
    assert diaries.read() == {}
    line = json.dumps({"event": "commit", "at_s": 1.5, "step": 5, "size": 2, "hash": "ab"}) + "\n"
    file = tmp_path / "17.jsonl"
    file.write_text(line + line[:9])
    assert diaries.read() == {17: [event("commit", 1.5, pid=17, step=5, size=2, digest="ab")]}
    file.write_text(line + line)
    assert len(diaries.read()[17]) == 2
    assert len(diaries.read()[17]) == 2


def test_recovery_ends_when_the_last_survivor_has_made_a_step_among_fewer() -> None:
    events = {1: steps(1, (1.0, 3), (2.1, 3), (2.5, 2)), 2: steps(2, (1.0, 3), (2.8, 2), (2.9, 2))}
    assert recovered_at_s(events, killed_s=2.0, size=3, last_step=1) == 2.8


def test_an_iteration_that_ends_among_all_is_no_recovery() -> None:
    events = {1: steps(1, (1.0, 3), (2.1, 3)), 2: steps(2, (2.5, 2))}
    assert recovered_at_s(events, killed_s=2.0, size=3, last_step=0) is None


def test_a_step_that_the_dead_cannot_have_been_in_is_recovery_though_somebody_new_is() -> None:
    own = steps(1, (1.0, 3), (2.1, 3), (9.0, 3))  # 0, with the one that is killed; 1, that it may have been in; 2
    assert recovered_at_s({1: own[:2]}, killed_s=2.0, size=3, last_step=0) is None
    assert recovered_at_s({1: own}, killed_s=2.0, size=3, last_step=0) == 9.0


def test_whose_last_step_counts_is_read_from_its_diary(tmp_path: Path) -> None:
    for pid, count in ((17, 2), (18, 4)):
        lines = [json.dumps({"event": "step", "at_s": 2.0 + n, "step": n, "size": 3}) for n in range(count)]
        (tmp_path / f"{pid}.jsonl").write_text("\n".join(lines) + "\n")
    assert Diaries(tmp_path).recovered_at_s({18}, {17}, killed_s=3.5, size=3) == 5.0


def test_a_join_costs_what_the_slowest_waited() -> None:
    events = {1: steps(1, (1.0, 2), (1.5, 3), (1.6, 3)), 2: steps(2, (1.0, 2), (1.75, 3), (1.8, 2))}
    assert joins_s(events) == [0.75]


def test_equal_commits_and_a_return_to_the_last_one_are_right() -> None:
    events = {
        1: [event("commit", 1.0, step=5, digest="a"), event("resume", 2.0, step=5)],
        2: [event("commit", 1.1, step=5, digest="a"), event("commit", 3.0, step=10, digest="b")],
    }
    assert faults(events) == []


@pytest.mark.parametrize(
    ("later", "word"),
    [
        (event("resume", 2.0, pid=2, step=4), "resumes at step 4 after the commit of step 5"),
        (event("commit", 2.0, pid=2, step=5, digest="b"), "2 different sets of parameters were committed at step 5"),
    ],
)
def test_a_lost_and_an_unequal_commit_are_found(later: Event, word: str) -> None:
    found = faults({1: [event("commit", 1.0, step=5, digest="a")], 2: [later]})
    assert len(found) == 1
    assert word in found[0]
