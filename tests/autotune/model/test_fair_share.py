"""One server and jobs that come and go."""

from __future__ import annotations

import math

import pytest

from sirtaki.autotune.model.replayer import FairShare, Server


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


def test_load_slows_all_jobs_down_as_long_as_it_is_there() -> None:
    share = FairShare(Server(name="processors", totals=(1.0,), speed=lambda load: 1.0 - load))
    share.begin(0.0, 1, 2.0, 1)
    share.load(1.0, 0.5)
    assert share.next_s == 3.0
    share.load(2.0, -0.5)
    assert share.take_ended(2.5) == [1]


def test_relief_shortens_what_is_left_of_some_jobs() -> None:
    share = FairShare(Server(name="link", totals=(1.0, 2.0)))
    share.begin(0.0, 1, 2.0, 1)
    share.begin(0.0, 2, 3.0, 1)
    share.relieve(1.0, {2: 0.25})
    assert share.next_s == 1.5
    assert share.take_ended(1.5) == [2]
    assert share.take_ended(2.0) == [1]


def test_parts_of_jobs_leave_nothing_behind() -> None:
    share = FairShare(Server(name="processors", totals=(1.0, 2.0)))
    for turn in range(100):
        for job in range(7):
            share.begin(float(turn), job, 0.1, 0.1 * (job + 1))
        share.take_ended(share.next_s)
    share.begin(200.0, 1, 1.0, 0.3)
    assert share.next_s == 201.0


def test_rounding_late_in_a_job_holds_nothing_up() -> None:
    share = FairShare(Server(name="processors", totals=(1.0,)))
    now_s = 1e6 + 1 / 3
    share.begin(now_s, 1, 0.1, 3)
    assert share.take_ended(share.next_s) == [1]
