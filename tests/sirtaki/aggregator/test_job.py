"""Who belongs to a session, and which steps it sums."""

import numpy as np

from sirtaki.aggregator.server import Entry, Job
from sirtaki.aggregator.wire import Registration, Summation

REGISTRATION = Registration(
    job=b"j" * 16, entry=1, ranks=2, summation=Summation.FLOAT32, packets=3, floats=4, registers=4, width=1
)


def entry(number: int, step: int = 0, port: int = 1) -> Entry:
    return Entry(number, ("127.0.0.1", port), step)


def opened(*steps: int) -> Job:
    job = Job(REGISTRATION, 0.0)
    for rank, step in enumerate(steps):
        job.enter(rank, entry(rank + 1, step))
    return job


def complete(job: Job, step: int) -> None:
    registers = job.registers(step)
    assert registers is not None
    seqs = np.arange(3)
    assert registers.takes(seqs, 12)
    for rank in range(2):
        registers.add(rank, seqs, np.ones((3, 4), np.float32))


def test_it_opens_once_all_ranks_have_come() -> None:
    job = Job(REGISTRATION, 0.0)
    assert not job.enter(0, entry(1))
    assert not job.enter(0, entry(1))
    assert not job.is_open
    assert not job.enter(1, entry(2, port=5))
    assert job.is_open
    assert job.is_at(1, ("127.0.0.1", 5))
    assert not job.is_at(1, ("127.0.0.1", 6))
    assert not job.is_at(7, ("127.0.0.1", 5))


def test_a_rank_that_says_so_once_more_changes_nothing_and_one_that_comes_anew_ends_the_session() -> None:
    job = opened(0, 0)
    session = job.session
    assert not job.enter(1, entry(2))
    assert job.session == session
    assert job.is_open
    assert job.enter(1, entry(3))
    assert job.session != session
    assert not job.is_open
    assert list(job.entries) == [1]


def test_two_steps_are_held_and_the_third_replaces_the_first_once_the_second_is_complete() -> None:
    job = opened(4, 5)
    assert job.first_step == 4
    assert job.registers(3) is None
    assert job.registers(6) is None
    complete(job, 4)
    assert job.registers(6) is None
    complete(job, 5)
    registers = job.registers(6)
    assert registers is not None
    assert registers.step == 6
    assert job.registers(4) is None
    assert job.registers(7) is None
    assert job.registers(5) is not None


def test_ranks_that_are_further_apart_than_they_can_be_do_not_train_together() -> None:
    assert not opened(4, 5).is_torn
    assert opened(4, 6).is_torn


def test_a_session_that_begins_anew_forgets_what_was_in_the_registers() -> None:
    job = opened(0, 0)
    complete(job, 0)
    for rank in range(2):
        job.enter(rank, entry(10 + rank))
    registers = job.registers(0)
    assert registers is not None
    assert not registers.is_complete
