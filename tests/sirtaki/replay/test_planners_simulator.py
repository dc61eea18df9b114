"""Where the planners' simulator and the replayer can both answer they say the same."""

from __future__ import annotations

import pytest
from fakes.played_jobs import made_job, plan_of
from fakes.replays import SIZES, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.model.replayer import SharedHost
from sirtaki.autotune.model.simulator import Profile, Simulator
from sirtaki.measures import LinkModel

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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.001, 0.05), min_size=4, max_size=4),
    st.sampled_from([(4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)]),
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from((1.0, 2.0, 64.0)),
    st.floats(0.1, 1.0),
)
def test_ranks_that_share_a_host(
    durations_s: list[float], cuts: tuple[int, ...], streams: int, ranks: int, capacity: float, busy: float
) -> None:
    plan, s_per_byte = plan_of(SIZES, cuts, streams=streams), 2e-6
    host = SharedHost(ranks=ranks, processors=capacity)
    job = made_job(
        durations_s=dict.fromkeys(range(ranks), durations_s),
        sizes=SIZES,
        plan=plan,
        seconds_per_byte=s_per_byte,
        capacity=capacity,
        busy=busy,
        forward_s=dict.fromkeys(range(ranks), 0.0),
        copy_s=0.0,
        update_s=0.0,
    )
    # The profile and the probe were taken where all ranks were at work.
    measured_s = [seconds / host.server.share(ranks) for seconds in durations_s]
    alone = host.server.share(max(1.0, ranks * busy)) / s_per_byte
    link = LinkModel(alpha_s=0.0, throughput=tuple(n * alone for n in (1, 2, 3)), busy=busy)
    simulated = Simulator(
        layout=job.buffers[0].layout, profile=Profile.from_durations(measured_s), link=link, host=host
    ).run(plan)
    assert times(job).iteration_s == pytest.approx(simulated.iteration_s)
