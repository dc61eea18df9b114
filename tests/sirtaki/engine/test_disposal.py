"""Collected objects are closed in order, in another thread, also if one cannot be closed."""

import logging
import threading

import pytest

from sirtaki.engine.job import Disposal


def test_everything_is_closed_in_order_by_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    disposal, closed, threads = Disposal(), list[int](), set[int]()

    def close(number: int) -> None:
        closed.append(number)
        threads.add(threading.get_ident())
        if number == 1:
            raise RuntimeError("not this one")

    disposal.start()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            disposal.put(lambda number=number: close(number))  # type: ignore[misc]
        disposal.drain()
    assert closed == [0, 1, 2]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert "stopped Sirtaki from removing all its hooks and buffers" in caplog.text
    disposal.put(lambda: close(3))
    disposal.stop()
    assert closed == [0, 1, 2, 3]


def test_draining_and_stopping_an_unused_disposal_does_not_block() -> None:
    disposal = Disposal()
    disposal.drain()
    disposal.stop()
