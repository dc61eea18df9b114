"""One server and jobs that come and go."""

from __future__ import annotations

import math

import pytest

from sirtaki.replay.fair_share import FairShare
from sirtaki.replay.graph import Server


def test_jobs_end_when_the_shared_clock_says_so() -> None:
    share = FairShare(Server(name="link", totals=(1.0, 1.0)))
    assert share.next_s == math.inf
    share.begin(1.0, 7, 2.0, 1)
    assert share.next_s == 3.0
    share.begin(2.0, 8, 0.25, 1)  # both at half the speed
    assert share.next_s == 2.5
    assert share.take_ended(2.5) == [8]
    assert share.next_s == pytest.approx(3.25)
    assert share.take_ended(3.25) == [7]
    assert share.next_s == math.inf


def test_nothing_ends_too_early_and_equals_end_together() -> None:
    share = FairShare(Server(name="processors", totals=(1.0, 2.0)))
    for job in range(4):
        share.begin(0.0, job, 1.0, 1)
    assert share.take_ended(1.9) == []
    assert sorted(share.take_ended(2.0)) == [0, 1, 2, 3]


def test_rounding_late_in_a_job_holds_nothing_up() -> None:
    share = FairShare(Server(name="processors", totals=(1.0,)))
    now_s = 1e6 + 1 / 3
    share.begin(now_s, 1, 0.1, 3)
    assert share.take_ended(share.next_s) == [1]
