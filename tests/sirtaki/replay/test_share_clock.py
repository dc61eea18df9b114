"""What a job got done on a shared server, from who used it when."""

from __future__ import annotations

import pytest

from sirtaki.analysis.job_model import ShareClock
from sirtaki.autotune.model.replayer import Server


def test_the_clock_runs_at_each_jobs_share() -> None:
    clock = ShareClock(Server(name="processors", totals=(1.0, 2.0)), [(0.0, 10.0, 1), (2.0, 6.0, 1), (4.0, 5.0, 2)])
    assert clock.between(0.0, 2.0) == 2.0
    assert clock.between(2.0, 4.0) == 2.0  # two jobs, two processors
    assert clock.between(4.0, 5.0) == 0.5  # four
    assert clock.between(0.0, 12.0) == pytest.approx(11.5)


def test_a_use_without_length_counts_for_nothing() -> None:
    clock = ShareClock(Server(name="link", totals=(1.0,)), [(3.0, 3.0, 1), (5.0, 4.0, 1), (0.0, 10.0, 1)])
    assert clock.between(1.0, 9.0) == 8.0
    assert clock.between(9.0, 1.0) == 0.0
