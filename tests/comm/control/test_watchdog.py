"""The watchdog outlives errors in what it looks at, says so when it does not, and names the user's own line."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sirtaki.comm.control import watchdog
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.mpi import load_mpi, world
from sirtaki.comm.control.watchdog import MOST_FAILURES, Courier, Watchdog


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """One that nobody has started: there is one rank only."""
    monkeypatch.setattr(watchdog, "TICK_S", 0.001)
    return Watchdog(Courier(world(load_mpi().COMM_SELF)), FailureBoard(), warning_s=60.0, shutdown_s=None)


def looks(dog: Watchdog, look: Callable[[], None], seconds: float) -> None:
    dog.watch(lambda: look(), lambda: "")
    dog._thread.start()
    time.sleep(seconds)
    dog.close()


def test_an_unexpected_error_does_not_end_the_watch(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def look() -> None:
        calls.append(None)
        if len(calls) % 2:
            raise KeyError("unexpected")

    with caplog.at_level(logging.WARNING, logger="sirtaki"):
        looks(dog, look, 0.5)
    assert len(calls) > 2 * MOST_FAILURES
    assert "KeyError" in caplog.text


def test_a_watchdog_that_always_fails_says_that_it_gives_up(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def look() -> None:
        calls.append(None)
        raise KeyError("unexpected")

    with caplog.at_level(logging.WARNING, logger="sirtaki"):
        looks(dog, look, 0.5)
    assert len(calls) == MOST_FAILURES
    assert "rank 0 does not watch for stalls any more" in caplog.text


@pytest.mark.parametrize("folder", ["sirtaki", "torch", "project"])
def test_a_users_line_is_named_also_in_a_folder_called_like_a_package(
    dog: Watchdog, tmp_path: Path, folder: str
) -> None:
    code = compile("def step(look):\n    return look()\n", str(tmp_path / folder / "train.py"), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["step"](dog.describe) == "runs train.py:2 in step"
