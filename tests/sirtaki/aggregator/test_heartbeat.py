"""Signs of life come until they are stopped, and not any more then."""

import queue
import threading

import pytest

from sirtaki.aggregator.client import Heartbeat


def test_it_beats_again_and_again_in_a_thread_of_its_own_until_it_is_stopped() -> None:
    beats: queue.Queue[str] = queue.Queue()
    heartbeat = Heartbeat(lambda: beats.put(threading.current_thread().name), every_s=0.001)
    for _ in range(3):
        assert beats.get(timeout=10.0) == "sirtaki-heartbeat"
    heartbeat.stop()
    while not beats.empty():
        beats.get()
    with pytest.raises(queue.Empty):
        beats.get(timeout=0.02)
    heartbeat.stop()


def test_what_waits_for_its_first_beat_ends_at_once() -> None:
    heartbeat = Heartbeat(lambda: pytest.fail("too early"), every_s=3600.0)
    heartbeat.stop()
    assert not heartbeat._thread.is_alive()
