from itertools import pairwise

import pytest
from fakes.played_jobs import made_job, plan_of, record
from fakes.replays import SIZES

from sirtaki.analysis.global_graph import play
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.timeline_plot import drawn_path

DURATIONS = (0.02, 0.01, 0.03, 0.02)


def test_the_path_goes_through_the_slow_rank_and_the_last_unit_without_a_hole() -> None:
    job = made_job(
        durations_s={0: DURATIONS, 1: tuple(2 * seconds for seconds in DURATIONS)},
        sizes=SIZES,
        plan=plan_of(SIZES, (4,)),
        seconds_per_byte=1e-6,
        iterations=2,
    )
    found = histories(record(job))
    paths = drawn_path(found, play(job_model(found)))
    assert list(paths) == [step.number for step in found.steps]
    for step in found.steps:
        legs = paths[step.number]
        assert legs[0].begin_s == pytest.approx(step.stretches[1][0].begin_s)
        assert legs[-1].end_s == pytest.approx(max(mine[-1].end_s for mine in step.stretches.values()))
        for before, after in pairwise(legs):
            assert after.begin_s == pytest.approx(before.end_s)
        backward = [leg for leg in legs if leg.lane == "training thread" and leg.end_s < step.barriers[0].begin_s]
        assert {leg.rank for leg in backward} <= {1}
        (unit,) = (leg for leg in legs if leg.lane == "gloo stream 0")
        assert (unit.begin_s, unit.end_s) == pytest.approx((step.barriers[0].begin_s, step.barriers[0].end_s))
        assert unit.rank == 1
