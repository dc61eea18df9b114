"""Where the planners' simulator and the replayer can both answer they say the same."""

from __future__ import annotations

import pytest
from fakes.played_jobs import made_job, plan_of
from fakes.replays import SIZES, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.model.profile import Profile
from sirtaki.autotune.model.simulator import Simulator
from sirtaki.link_model import LinkModel

rates = st.floats(1e4, 1e6)
seconds = st.floats(0.0, 0.05)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.001, 0.05), min_size=4, max_size=4),
    st.sampled_from([(4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)]),
    st.integers(1, 3),
    st.tuples(rates, rates, rates),
    seconds,
    seconds,
)
def test_one_rank_like_all_others(
    durations_s: list[float],
    cuts: tuple[int, ...],
    streams: int,
    throughput: tuple[float, ...],
    alpha_s: float,
    host_s: float,
) -> None:
    link = LinkModel(alpha_s=alpha_s, throughput=throughput, host_s=host_s)
    plan = plan_of(SIZES, cuts, streams=streams)
    job = made_job(
        durations_s={0: durations_s, 1: durations_s}, sizes=SIZES, plan=plan, link=link, copy_s=0.0, update_s=0.0
    )
    profile = Profile.from_durations(durations_s, forward_s=0.02)
    simulated = Simulator(layout=job.buffers[0].layout, profile=profile, link=link).run(plan)
    assert times(job).iteration_s == pytest.approx(simulated.iteration_s)
