"""Means over ranks and iterations."""

from __future__ import annotations

import pytest
from fakes.played_jobs import record
from fakes.replays import over_a_link, played

from sirtaki.analysis.global_graph import recorded, replayed
from sirtaki.analysis.job_model import histories
from sirtaki.autotune.model.replayer import Phase


def test_waiting_belongs_to_the_phase_in_which_it_is_done() -> None:
    found = replayed(played(over_a_link(cuts=(4,), iterations=1)))
    # 80 ms of gradients, 1 ms to copy, 2 ms to start, 260 ms on the link
    assert found.backward_s == pytest.approx(0.343)
    assert found.forward_s == pytest.approx(0.02)
    assert found.phases_s[Phase.UPDATE] == pytest.approx(0.01)
    assert found.iteration_s == pytest.approx(sum(found.phases_s.values()))


def test_a_recording_says_the_same_of_itself() -> None:
    job = over_a_link(iterations=3)
    was, now = recorded(histories(record(job))), replayed(played(job))
    assert was.iteration_s == pytest.approx(now.iteration_s)
    assert was.forward_s == pytest.approx(now.forward_s)
    assert (was.iterations, was.spread_s) == (3, pytest.approx(0.0, abs=1e-9))
