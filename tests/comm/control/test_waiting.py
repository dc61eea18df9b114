"""Wait loops: conditions, works in flight, ranks that leave together."""

import threading
import time
from collections.abc import Callable

import pytest

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.waiting import (
    NEVER,
    WAIT_SLICE_S,
    Deadline,
    Poll,
    cause_of,
    leave_together,
    retry,
    unless_failed,
    wait_for,
    wait_for_work,
)
from sirtaki.errors import CommError, MismatchError, PeerLostError, StallError, TransportError
from tests.fakes.meshes import among

# ── conditions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def at_the(number: int) -> tuple[Callable[[], bool], list[float]]:
    """Return a condition that holds at its n-th evaluation, and the times of all evaluations."""
    times_s = list[float]()

    def condition() -> bool:
        times_s.append(time.monotonic())
        return len(times_s) >= number

    return condition, times_s


@pytest.mark.parametrize("poll", Poll)
def test_a_wait_ends_once_the_condition_holds(poll: Poll) -> None:
    begin_s = time.monotonic()
    assert wait_for(lambda: time.monotonic() > begin_s + 0.03, poll=poll)
    condition, times_s = at_the(4)
    assert wait_for(condition, Deadline.after(60.0), poll, failures=FailureBoard())
    assert len(times_s) == 4


@pytest.mark.parametrize("poll", Poll)
def test_a_failure_ends_a_wait_that_would_never_end(poll: Poll) -> None:
    board = FailureBoard()
    threading.Timer(0.03, board.report, [StallError("rank 3 did not come")]).start()
    with pytest.raises(StallError, match="rank 3 did not come"):
        wait_for(lambda: False, poll=poll, failures=board)


@pytest.mark.parametrize("poll", Poll)
def test_a_wait_ends_at_its_deadline_after_a_last_evaluation(poll: Poll) -> None:
    condition, times_s = at_the(10**9)
    deadline = Deadline.after(0.03)
    assert not wait_for(condition, deadline, poll, failures=FailureBoard())
    assert deadline.passed
    assert times_s[-1] >= deadline.at_s
    assert wait_for(lambda: True, deadline, poll)  # what is there by then counts


def test_a_slow_wait_sleeps_longer_the_second_time() -> None:
    condition, times_s = at_the(3)
    assert wait_for(condition, poll=Poll.SLOW)
    assert times_s[1] - times_s[0] >= 0.05
    assert times_s[2] - times_s[1] >= 0.1


def test_a_deadline_returns_the_remaining_time() -> None:
    assert NEVER.left_s == Deadline.after(None).left_s == float("inf")
    assert not NEVER.passed
    assert 9.0 < Deadline.after(10.0).left_s <= 10.0
    assert Deadline.after(-1.0).passed
    assert Deadline.after(-1.0).left_s == 0.0


def test_an_action_is_tried_again_after_its_own_error_only() -> None:
    tries = list[int]()

    def act(least: int) -> int:
        tries.append(1)
        if len(tries) < least:
            raise ConnectionError(f"attempt {len(tries)}")
        return len(tries)

    assert retry(lambda: act(3), OSError, Deadline.after(60.0), Poll.SLICES) == 3
    with pytest.raises(ConnectionError, match="attempt"):
        retry(lambda: act(10**9), OSError, Deadline.after(0.05), Poll.SLICES)
    tries.clear()
    with pytest.raises(ConnectionError, match="attempt 1"):
        retry(lambda: act(2), KeyError, Deadline.after(60.0), Poll.SLICES)
    board = FailureBoard()
    threading.Timer(0.03, board.report, [PeerLostError("rank 1 has ended")]).start()
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        retry(lambda: act(10**9), OSError, NEVER, Poll.SLICES, failures=board)


# ── works ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Late:
    """Done at the n-th wait."""

    def __init__(self, waits: int, error: CommError | None = None) -> None:
        self.left, self._error = waits, error

    def wait(self, timeout_s: float, /) -> bool:
        self.left -= 1
        if self.left <= 0 and self._error is not None:
            raise self._error
        return self.left <= 0


def test_works_are_waited_for_in_order_until_the_wait_is_interrupted() -> None:
    works, event = [Late(1), Late(3), Late(2)], threading.Event()
    threading.Timer(0.05, event.set).start()
    assert wait_for_work([*works, event], failures=FailureBoard())
    assert [work.left for work in works] == [0, 0, 0]
    answers = iter([False, True])
    works = [Late(9), Late(1)]
    assert not wait_for_work(works, failures=FailureBoard(), interrupted=lambda: next(answers))
    assert [work.left for work in works] == [7, 1]


def test_a_failed_job_ends_the_wait_for_a_work_unless_that_is_about_to_end() -> None:
    board = FailureBoard()
    board.report(PeerLostError("rank 1 has ended"))
    for late_s in (0.0, 0.5):
        with pytest.raises(PeerLostError, match="rank 1 has ended"):
            wait_for_work([Late(9)], failures=board, late_s=late_s)
    assert wait_for_work([Late(2)], failures=board, late_s=0.5)
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        wait_for_work([Late(2)], failures=board)


def test_a_broken_connection_is_blamed_on_the_rank_that_has_left_unless_the_caller_wants_its_own_error() -> None:
    board, broken = FailureBoard(), CommError("connection closed")
    with pytest.raises(MismatchError, match="shapes"):
        wait_for_work([Late(1, MismatchError("shapes"))], failures=board, blame_s=None)
    assert not board.connection_broken
    with pytest.raises(CommError, match="connection closed"):
        wait_for_work([Late(1, broken)], failures=board, blame_s=0.01)
    assert board.connection_broken
    threading.Timer(2 * WAIT_SLICE_S, board.report, [PeerLostError("rank 1 has ended")]).start()
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        wait_for_work([Late(1, broken)], failures=board)


# ── ranks that leave, failures that become known ──────────────────────────────────────────────────────────────────────


def test_ranks_leave_together_or_learn_that_one_stays() -> None:
    def act(comm: Communicator) -> None:
        everybody, most, lost = comm.duplicate(), comm.duplicate(), comm.duplicate()
        if comm.rank != 1:
            assert not leave_together(most, 0.05)
        assert leave_together(everybody, 30.0)
        comm.failures.report(StallError("rank 3 did not come"))
        if comm.rank != 1:
            with pytest.raises(StallError, match="rank 3 did not come"):
                leave_together(lost, 30.0)

    among(3, act)


def test_after_a_broken_connection_the_failure_that_led_to_it_is_waited_for() -> None:
    failures = FailureBoard()
    assert not failures.connection_broken
    threading.Timer(0.1, failures.report, [PeerLostError("rank 1 has ended its script")]).start()
    assert "rank 1" in str(cause_of(TransportError("connection reset"), failures))
    assert failures.connection_broken


def test_without_a_culprit_the_broken_connection_is_reported() -> None:
    error = TransportError("connection reset")
    assert cause_of(error, FailureBoard(), within_s=0.05) is error


def test_it_returns_the_result_and_raises_the_error_of_the_function() -> None:
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


def test_a_resource_opened_after_the_failure_is_returned_to_the_caller() -> None:
    board, undone = FailureBoard(), list[int]()
    board.report(PeerLostError("rank 1 has ended"))
    assert unless_failed(lambda: 3, failures=board, undo=undone.append) == 3
    assert undone == []
