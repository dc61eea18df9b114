"""The order of ranks, and how the end of one is told."""

import random

import pytest

from sirtaki.run.elastic.job_members import RankEnd, Worker, ranked


def worker(number: int, host: str, slot: int = 0, rank: int | None = None, *, generation: int = 1) -> Worker:
    has_state = rank is not None
    return Worker(
        number=number, host=host, slot=slot, rank=rank, has_state=has_state, generation=generation if has_state else 0
    )


def order(*workers: Worker) -> list[int]:
    mixed = list(workers)
    random.Random(0).shuffle(mixed)
    return [each.number for each in ranked(mixed, ["a", "b", "c"])]


def test_new_ranks_follow_hosts_and_slots() -> None:
    assert order(worker(1, "b"), worker(2, "a", 1), worker(3, "a", 0), worker(4, "c")) == [3, 2, 1, 4]


def test_old_ranks_keep_their_order_and_new_ones_come_after_those_of_their_host() -> None:
    assert order(worker(1, "b", rank=0), worker(2, "a", rank=1), worker(3, "b", 1), worker(4, "c")) == [1, 3, 2, 4]


def test_who_has_no_state_does_not_come_first_though_it_was_a_member() -> None:
    without = worker(1, "a", 0)
    without.rank, without.generation = 0, 1
    assert order(without, worker(2, "a", 1, rank=1), worker(3, "b", rank=2)) == [2, 1, 3]


def test_who_was_in_the_newest_generation_comes_before_who_was_not() -> None:
    assert order(worker(1, "a", rank=0, generation=3), worker(2, "b", rank=1, generation=4)) == [2, 1]


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (RankEnd(exit_code=137), "was killed by SIGKILL"),
        (RankEnd(exit_code=128 + 99), "was killed by signal 99"),
        (RankEnd(exit_code=3), "failed (exit code 3)"),
        (RankEnd(exit_code=1, reason="ValueError: x"), "failed (ValueError: x)"),
        (RankEnd(exit_code=0), "ended"),
    ],
)
def test_ends_in_words(end: RankEnd, text: str) -> None:
    assert end.text == text


def test_a_worker_is_called_by_rank_host_and_slot() -> None:
    assert worker(1, "a", 2, rank=5).label == "rank 5 (host a, slot 2)"
    assert worker(1, "a", 2).label == "a new rank (host a, slot 2)"
