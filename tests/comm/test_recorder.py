"""Who records is told, and nobody else."""

import pytest

from sirtaki.comm import recorder, timeline


class Ends:
    """A recorder that counts how often it is ended."""

    def __init__(self) -> None:
        self.ended = 0

    def iteration(self, traced: recorder.TracedIteration) -> None: ...

    def operation(self, traced: recorder.TracedOperation) -> None: ...

    def end(self) -> None:
        self.ended += 1


@pytest.fixture(autouse=True)
def _nobody() -> None:
    recorder.stop()


def test_nobody_records_until_somebody_does() -> None:
    mine = Ends()
    assert recorder.current is None
    assert not recorder.times_wanted()
    recorder.start(mine)
    assert recorder.current is mine
    assert recorder.times_wanted()
    recorder.stop()
    assert recorder.current is None
    assert mine.ended == 0


def test_the_end_of_the_job_ends_a_recording_once() -> None:
    mine = Ends()
    recorder.start(mine)
    recorder.end()
    recorder.end()
    assert mine.ended == 1
    assert recorder.current is None


def test_a_timeline_wants_times_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "current", object())
    assert recorder.times_wanted()
