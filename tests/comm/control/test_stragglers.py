"""A rank that is slower than others is named while the job runs, once, and again when it is no longer slow."""

import logging
import time

import pytest
from fakes.meshes import close, connected, until

from sirtaki.comm.control import stragglers
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.comm.control.stragglers import StragglerWatch
from sirtaki.comm.control.watchdog import MessageBoard


class Clock:
    def __init__(self) -> None:
        self.now_s = 1.0

    def monotonic(self) -> float:
        return self.now_s


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_slow_rank_is_named_once_and_again_when_it_is_fast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(stragglers, "time", clock)
    links = connected(4)
    watches = [StragglerWatch(MessageBoard(MeshCommunicator(own)), [f"host{n}" for n in range(4)]) for own in links]

    def train(seconds: float, own_s: dict[int, float], *, counts: bool = True) -> None:
        """Let all ranks train: an iteration takes as long as the slowest rank needs."""
        slowest_s, end_s = max(own_s.values()), clock.now_s + seconds
        while clock.now_s < end_s:
            clock.now_s += slowest_s
            for rank, watch in enumerate(watches):
                watch.iteration_ended(slowest_s - own_s[rank], counts=counts)
            for watch in watches[::-1]:
                watch.check()
        deadline_s = time.monotonic() + 0.3  # because messages travel in real time
        while time.monotonic() < deadline_s:
            watches[0].check()

    usual = dict.fromkeys(range(4), 0.1) | {1: 0.13}
    slow = usual | {2: 1.1}
    with caplog.at_level(logging.WARNING, logger="sirtaki"):
        train(30.0, slow, counts=False)
        train(30.0, usual)
        assert messages(caplog) == []
        train(30.0, slow)
        until(lambda: len(caplog.records) == 1 or watches[0].check() is not None)
        assert messages(caplog)[0].startswith("rank 2 on host host2 has been slow for ")
        assert "takes 1.1 s, 11.0 times the median rank's 0.1 s" in messages(caplog)[0]
        assert watches[0].describe() == "rank 2 on host2 is slow"
        train(30.0, slow)
        assert len(caplog.records) == 1
        train(30.0, usual)
        assert len(caplog.records) == 2
        assert messages(caplog)[1].startswith("rank 2 on host host2 is no longer slow, after ")
        assert watches[0].describe() == ""
    close(links)
