"""Daydream's rule, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.played_jobs import record
from fakes.replays import over_a_link

from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.what_if import bandwidth, daydream
from sirtaki.errors import ReplayError


def test_tensors_follow_each_other_at_bytes_by_bandwidth() -> None:
    found = histories(record(over_a_link(cuts=(4,), streams=1)))
    job = job_model(found)
    assert bandwidth(job) == pytest.approx(2e5)
    times = daydream(found, job)
    # Ready 20, 30, 60 and 80 ms into the pass; 20, 60, 40 and 10 ms each: the last is through at 150 ms.
    assert times.forward_s == pytest.approx(0.02)
    assert times.backward_s == pytest.approx(0.15)
    assert times.iteration_s == pytest.approx(0.02 + 0.15 + 0.01)


def test_without_units_there_is_no_bandwidth() -> None:
    found = histories(record(over_a_link()))
    job = replace(job_model(found), link=None)
    bare = replace(job, iterations=tuple(replace(each, operations=()) for each in job.iterations))
    with pytest.raises(ReplayError, match="no units were recorded"):
        daydream(found, bare)
