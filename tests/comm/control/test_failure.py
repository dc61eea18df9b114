"""Waiting, and being told that waiting is of no use."""

import itertools

import pytest

from sirtaki.comm.control.failure import FailureBoard, poll_until
from sirtaki.errors import PeerLostError, StallError


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
