"""Waiting, and being told that waiting is of no use."""

import itertools
import threading

import pytest

from sirtaki.comm.control.failure import FailureBoard, poll_until, unless_failed
from sirtaki.errors import PeerLostError, StallError, TransportError


def test_a_wait_ends_when_its_test_is_true() -> None:
    answers = itertools.chain([False] * 5, itertools.repeat(True))
    poll_until(lambda: next(answers), failures=FailureBoard())


def test_a_wait_that_outlasts_the_spinning_sleeps_and_goes_on() -> None:
    count = itertools.count()
    poll_until(lambda: next(count) > 2000, failures=FailureBoard())


def test_a_failure_ends_a_wait_that_would_never_end() -> None:
    board = FailureBoard()
    board.report(StallError("rank 3 did not come"))
    with pytest.raises(StallError, match="rank 3 did not come"):
        poll_until(lambda: False, failures=board)


def test_the_first_failure_is_kept() -> None:
    board = FailureBoard()
    board.check()
    board.report(PeerLostError("first"))
    board.report(StallError("second"))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="first"):
            board.check()


def test_after_a_broken_connection_the_failure_that_led_to_it_is_waited_for() -> None:
    failures = FailureBoard()
    threading.Timer(0.1, failures.report, [PeerLostError("rank 1 has ended its script")]).start()
    assert "rank 1" in str(failures.cause_of(TransportError("connection reset")))
    assert failures.suspicious


def test_where_nobody_is_to_blame_the_broken_connection_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirtaki.comm.control.failure.BLAME_S", 0.05)
    error = TransportError("connection reset")
    assert FailureBoard().cause_of(error) is error


# ── what blocks and hears of no failure ──────────────────────────────────────────────────────────────────────────


def test_it_gives_what_it_gives_and_raises_what_it_raises() -> None:
    undone = list[int]()
    assert unless_failed(lambda: 3, failures=FailureBoard(), undo=undone.append) == 3

    def fail() -> int:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        unless_failed(fail, failures=FailureBoard(), undo=undone.append)
    assert undone == []


def test_it_is_left_when_the_job_fails_and_undone_when_it_ends() -> None:
    board, gate, undone = FailureBoard(), threading.Event(), threading.Event()

    def act() -> int:
        gate.wait(10.0)
        return 3

    threading.Timer(0.05, board.report, [PeerLostError("rank 1 has ended")]).start()
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        unless_failed(act, failures=board, undo=lambda result: undone.set() if result == 3 else None)
    assert not undone.is_set()
    gate.set()
    assert undone.wait(5.0)


def test_what_has_been_opened_before_the_failure_is_the_callers() -> None:
    board, undone = FailureBoard(), list[int]()
    board.report(PeerLostError("rank 1 has ended"))
    assert unless_failed(lambda: 3, failures=board, undo=undone.append) == 3
    assert undone == []
