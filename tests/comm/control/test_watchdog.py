"""Watchdogs of three ranks, in threads, name awaited ranks, end endless waits, and survive errors."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.meshes import close, connected, until

from sirtaki.comm.control import watchdog
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.comm.control.mpi import load_mpi, world
from sirtaki.comm.control.watchdog import LEAVE_GRACE_S, MAX_FAILURES, MessageBoard, PendingWait, Watchdog
from sirtaki.errors import CommError, PeerLostError, StallError


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """Return a watchdog that was not started, of the only rank."""
    monkeypatch.setattr(watchdog, "TICK_S", 0.001)
    return Watchdog(MessageBoard(world(load_mpi().COMM_SELF)), FailureBoard(), warning_s=60.0, shutdown=lambda: None)


def looks(dog: Watchdog, look: Callable[[], None], seconds: float) -> None:
    dog.watch(lambda: look(), lambda: "")
    dog._thread.start()
    time.sleep(seconds)
    dog.close()


@pytest.mark.lengthy
def test_an_unexpected_error_does_not_end_the_watch(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def look() -> None:
        calls.append(None)
        if len(calls) % 2:
            raise KeyError("unexpected")

    with caplog.at_level(logging.WARNING, logger="sirtaki"):
        looks(dog, look, 0.5)
    assert len(calls) > 2 * MAX_FAILURES
    assert "KeyError" in caplog.text


@pytest.mark.lengthy
def test_a_watchdog_that_always_fails_logs_that_it_gives_up(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def look() -> None:
        calls.append(None)
        raise KeyError("unexpected")

    with caplog.at_level(logging.WARNING, logger="sirtaki"):
        looks(dog, look, 0.5)
    assert len(calls) == MAX_FAILURES
    assert f"rank 0 no longer checks whether ranks hang, because the check failed {MAX_FAILURES} times" in caplog.text


@pytest.mark.parametrize("folder", ["sirtaki", "torch", "project"])
def test_a_users_line_is_named_also_in_a_folder_called_like_a_package(
    dog: Watchdog, tmp_path: Path, folder: str
) -> None:
    code = compile("def step(look):\n    return look()\n", str(tmp_path / folder / "train.py"), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["step"](dog.describe) == "runs train.py:2 in step"


# ── Three ranks ──────────────────────────────────────────────────────────────────────────────────────────────────

WHAT = "the gradients of iteration 4"


class Pack:
    """The watchdogs of three ranks; what each waits for, and how far it is, can be set."""

    def __init__(self, *, warning_s: float = 60.0, shutdown_s: float | None = None) -> None:
        self._links, self.shutdown_s = connected(3), shutdown_s
        self.couriers = [MessageBoard(MeshCommunicator(links)) for links in self._links]
        self.waits: list[PendingWait | CommError | None] = [None] * 3
        self.progress = [""] * 3
        self.boards = [FailureBoard() for _ in range(3)]
        self.dogs = [
            Watchdog(courier, board, warning_s=warning_s, shutdown=lambda: self.shutdown_s)
            for courier, board in zip(self.couriers, self.boards, strict=True)
        ]
        self.watched = [(self._wait(rank), self._progress(rank)) for rank in range(3)]
        for dog, (wait, progress) in zip(self.dogs, self.watched, strict=True):
            dog.watch(wait, progress)

    def _wait(self, rank: int) -> Callable[[], PendingWait | None]:
        def wait() -> PendingWait | None:
            now = self.waits[rank]
            if isinstance(now, CommError):
                raise now
            return now

        return wait

    def _progress(self, rank: int) -> Callable[[], str]:
        return lambda: self.progress[rank]

    def close(self) -> None:
        for dog in self.dogs:
            dog.close()
        close(self._links)


Packs = Callable[..., Pack]


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Packs]:
    monkeypatch.setattr(watchdog, "TICK_S", 0.005)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.6)
    made: list[Pack] = []

    def make(**options: Any) -> Pack:
        made.append(Pack(**options))
        return made[-1]

    yield make
    for pack in made:
        pack.close()


def since(seconds: float, what: str = WHAT) -> PendingWait:
    return PendingWait(what=what, since_s=time.monotonic() - seconds)


def test_a_long_wait_is_one_warning_that_names_missing_ranks_and_their_positions(
    packs: Packs, caplog: pytest.LogCaptureFixture
) -> None:
    pack = packs(warning_s=2.0)
    pack.progress = ["", "", "is in iteration 3"]
    pack.waits[1] = since(0.0)
    with caplog.at_level(logging.WARNING, logger="sirtaki"):
        pack.waits[0] = since(1.0)
        time.sleep(0.1)
        assert not caplog.records
        pack.waits[0] = since(7.2)
        until(lambda: bool(caplog.records))
        time.sleep(0.2)
        assert len(caplog.records) == 1
        pack.waits[0] = since(8.2, "something else")
        until(lambda: len(caplog.records) == 2)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"rank 0 has waited 7 s for {WHAT}; missing: rank 2 runs ")
    assert first.endswith("; is in iteration 3")
    assert "rank 1" not in first
    assert f"missing: rank 1 waits for {WHAT}" in second
    assert all(board.error is None for board in pack.boards)


def test_a_wait_beyond_the_limit_ends_the_job_on_all_ranks(packs: Packs) -> None:
    pack = packs(warning_s=1.0, shutdown_s=5.0)
    pack.waits[1] = since(4.0)
    time.sleep(0.1)
    assert all(board.error is None for board in pack.boards)
    pack.waits[1] = since(6.0)
    until(lambda: all(board.error is not None for board in pack.boards))
    assert {type(board.error) for board in pack.boards} == {StallError}
    assert all(f"rank 1 has waited 6 s for {WHAT}" in str(board.error) for board in pack.boards)


def test_the_limit_may_change_while_a_rank_waits(packs: Packs) -> None:
    pack = packs(shutdown_s=60.0)
    pack.waits[0] = since(10.0)
    time.sleep(0.1)
    assert pack.boards[0].error is None
    pack.shutdown_s = 5.0
    until(lambda: isinstance(pack.boards[0].error, StallError))


@pytest.mark.lengthy
def test_silent_ranks_and_ranks_that_have_ended_are_distinguished(
    packs: Packs, caplog: pytest.LogCaptureFixture
) -> None:
    pack = packs(warning_s=1.0)
    pack.dogs[1].close()  # as if its process were stopped
    assert not pack.dogs[2].leave(0.01)
    with caplog.at_level(logging.WARNING, logger="sirtaki"):
        begin_s = time.monotonic()
        pack.waits[0] = since(2.0)
        until(lambda: bool(caplog.records))
    assert watchdog.ANSWER_S <= time.monotonic() - begin_s < watchdog.ANSWER_S + 3.0
    said = caplog.records[0].getMessage()
    assert "missing: rank 1 does not answer: it has exited or is stopped" in said
    assert "missing: rank 2 has ended its script" in said


@pytest.mark.lengthy
@pytest.mark.parametrize("broken", [False, True])
def test_waiting_for_a_rank_that_has_left_ends_after_a_while_or_at_once_where_a_connection_broke(
    packs: Packs, broken: bool
) -> None:
    pack = packs(shutdown_s=120.0 if broken else 1.0)
    assert not pack.dogs[2].leave(0.01)
    until(lambda: 2 in pack.dogs[0]._ended_ranks)
    pack.boards[0].connection_broken = broken
    begin_s = time.monotonic()
    pack.waits[0] = since(0.0)
    until(lambda: all(board.error is not None for board in pack.boards))
    took_s = time.monotonic() - begin_s
    assert took_s < 0.45 if broken else 0.4 < took_s < LEAVE_GRACE_S / 2
    assert {type(board.error) for board in pack.boards} == {PeerLostError}
    assert f"rank 0 waits for {WHAT}, but rank 2 has ended its script" in str(pack.boards[1].error)


def test_leaving_ends_when_all_have_left_and_may_be_tried_again(packs: Packs) -> None:
    pack = packs()
    assert not pack.dogs[0].leave(0.05)
    assert not pack.dogs[1].leave(0.05)
    begin_s = time.monotonic()
    assert pack.dogs[2].leave(10.0)
    assert all(dog.leave(10.0) for dog in pack.dogs[:2])
    assert time.monotonic() - begin_s < 5.0


def test_leaving_waits_for_no_rank_once_the_job_has_failed(packs: Packs) -> None:
    pack = packs()
    pack.waits[1] = PeerLostError("rank 2 is lost")
    until(lambda: all(board.error is not None for board in pack.boards))
    assert [str(board.error) for board in pack.boards] == ["rank 2 is lost"] * 3
    begin_s = time.monotonic()
    assert not pack.dogs[0].leave(10.0)
    assert time.monotonic() - begin_s < 5.0


def test_forgotten_operations_are_neither_awaited_nor_reported(packs: Packs) -> None:
    pack = packs(shutdown_s=1.0)
    pack.progress[0] = "is in iteration 3"
    assert pack.dogs[0].progress() == ["is in iteration 3"]
    pack.dogs[0].unwatch(*pack.watched[0])
    pack.waits[0] = since(5.0)
    time.sleep(0.1)
    assert pack.boards[0].error is None
    assert pack.dogs[0].progress() == []
