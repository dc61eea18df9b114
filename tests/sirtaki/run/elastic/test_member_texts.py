"""What the user is told, in words."""

import pytest

from sirtaki.run.elastic.job_members import Phase, Worker, announcement, count, difference, ordinal, with_ranks


def worker(number: int, host: str, rank: int | None = None, phase: Phase = Phase.MEMBER) -> Worker:
    return Worker(number=number, host=host, slot=0, rank=rank, phase=phase)


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd")]
)
def test_ordinals(number: int, text: str) -> None:
    assert ordinal(number) == text


def test_one_is_no_plural() -> None:
    assert (count(1, "rank"), count(2, "rank")) == ("1 rank", "2 ranks")


def test_what_discovery_has_changed() -> None:
    text = difference({"a": 1, "b": 2, "c": 1}, {"a": 1, "b": 3, "d": 1})
    assert text == "host d with 1 slot is new; host c is gone; host b has 3 slots instead of 2"
    assert difference({"a": 1}, {"a": 1}) == ""


def test_a_generation_says_where_its_ranks_are_and_how_many_are_new() -> None:
    members = [worker(1, "a"), worker(2, "a"), worker(3, "b")]
    assert announcement(4, members, {3}) == "generation 4: 3 ranks (2 on a, 1 on b), 1 of them new"
    assert announcement(1, members[2:], {3}) == "generation 1: 1 rank (1 on b)"


def test_ranks_that_are_gone_with_a_host() -> None:
    assert with_ranks([worker(1, "a", 0), worker(2, "a", 2), worker(3, "a")]) == " with ranks 0, 2"
    assert with_ranks([worker(1, "a", 4), worker(2, "a", 5, Phase.DISMISSED)]) == " with rank 4"
    assert with_ranks([]) == ""
