import logging

import pytest

from sirtaki.watch import GenerationBegun, IterationEnded, Watcher, watchers

EVENT = IterationEnded(number=3, step_s=0.1, communication_s=0.02, exposed_s=0.01, n_bytes=8, tuning=False)
TOGETHER = GenerationBegun(number=0, rank=0, size=2)


class Seen(Watcher):
    def __init__(self) -> None:
        self.events: list[object] = []

    def iteration(self, event: IterationEnded) -> None:
        self.events.append(event)

    def generation(self, event: GenerationBegun) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.events.append("closed")


class Failing(Watcher):
    def iteration(self, event: IterationEnded) -> None:
        raise RuntimeError("no")


@pytest.fixture(autouse=True)
def _nobody_watches() -> None:
    watchers.end(for_good=True)


def test_a_watcher_is_told_until_it_is_removed() -> None:
    seen = Seen()
    watchers.add(seen)
    watchers.tell_all(lambda watcher: watcher.iteration(EVENT))
    watchers.remove(seen)
    watchers.remove(seen)
    watchers.tell_all(lambda watcher: watcher.iteration(EVENT))
    assert seen.events == [EVENT]


def test_who_comes_later_hears_that_the_ranks_are_together() -> None:
    watchers.begin(TOGETHER)
    seen = Seen()
    watchers.add(seen)
    watchers.end(for_good=False)
    assert seen.events == [TOGETHER]
    watchers.end(for_good=True)
    assert seen.events == [TOGETHER, "closed"]
    assert watchers.watching == []


def test_one_that_raises_is_removed_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    watchers.add(Failing())
    watchers.add(seen)
    with caplog.at_level(logging.WARNING):
        watchers.tell_all(lambda watcher: watcher.iteration(EVENT))
        watchers.tell_all(lambda watcher: watcher.iteration(EVENT))
    assert seen.events == [EVENT, EVENT]
    assert caplog.text.count("Failing has failed and watches no more") == 1
