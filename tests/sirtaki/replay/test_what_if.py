"""Answers to questions, where it is known what would be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fakes.played_jobs import made_job, plan_of
from fakes.replays import LINK, SIZES, on_one_host, over_a_link, times

from sirtaki.analysis.job_model import JobModel
from sirtaki.analysis.what_if import (
    PAYLOAD,
    link_rate,
    wire_bytes_per_byte,
    with_faster_loader,
    with_less_traffic,
    with_link,
    with_ranks,
    without_stragglers,
)
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel

DURATIONS = (0.02, 0.01, 0.03, 0.02)


def job_on(link: LinkModel, *, ranks: int = 2, streams: int = 2, slow: float = 1.0, data_s: float = 0.0) -> JobModel:
    return made_job(
        durations_s={
            rank: tuple(seconds * (slow if rank == 1 else 1.0) for seconds in DURATIONS) for rank in range(ranks)
        },
        sizes=SIZES,
        plan=plan_of(SIZES, (1, 2, 4), streams=streams),
        link=link,
        data_s={0: data_s} if data_s else None,
    )


def test_the_rate_of_the_link_is_what_probes_found_at_most() -> None:
    assert link_rate(over_a_link()) == pytest.approx(2e5)
    assert link_rate(on_one_host()) is None


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_link_that_one_unit_fills_scales(factor: float) -> None:
    link = LinkModel(alpha_s=0.001, throughput=(1e5, 1e5))
    other = replace(link, throughput=(1e5 * factor, 1e5 * factor))
    asked = with_link(job_on(link), 1e5 * factor / PAYLOAD * wire_bytes_per_byte(2))
    assert times(asked).iteration_s == pytest.approx(times(job_on(other)).iteration_s)


def test_a_faster_link_helps_flows_only_side_by_side() -> None:
    link = LinkModel(alpha_s=0.001, throughput=(1e5, 1.2e5))
    faster = with_link(job_on(link), 4e5 / PAYLOAD * wire_bytes_per_byte(2))
    expected = LinkModel(alpha_s=0.001, throughput=(1e5, 2e5, 3e5, 4e5))
    assert times(faster).iteration_s == pytest.approx(times(job_on(expected)).iteration_s)
    alone = job_on(link, streams=1)
    unchanged = with_link(alone, 4e5 / PAYLOAD * wire_bytes_per_byte(2))
    assert times(unchanged).iteration_s == pytest.approx(times(alone).iteration_s)


def test_there_is_no_link_on_one_host() -> None:
    with pytest.raises(ReplayError, match="all ranks are on one host"):
        with_link(on_one_host(), 1e9)
    with pytest.raises(ReplayError, match="must be positive"):
        with_link(over_a_link(), 0.0)


def test_more_ranks_on_more_hosts_reduce_in_a_larger_ring() -> None:
    asked = with_ranks(job_on(LINK), 4)
    expected = job_on(LINK.rescaled(from_ranks=2, to_ranks=4), ranks=4)
    assert times(asked).iteration_s == pytest.approx(times(expected).iteration_s, rel=1e-6)
    assert len(set(asked.hosts.values())) == 4
    assert len(asked.processors) == 4


def test_more_ranks_on_one_host_share_its_processors() -> None:
    asked = with_ranks(on_one_host(ranks=2, capacity=2.0), 4)
    assert asked.hosts == {0: 0, 1: 0, 2: 0, 3: 0}
    assert asked.processors[0].ranks == (0, 1, 2, 3)
    assert times(asked).forward_s == pytest.approx(2 * times(on_one_host(ranks=2)).forward_s)


def test_nodes_emulated_on_one_machine_share_it_still() -> None:
    job = over_a_link()
    machine = replace(job.processors[0], ranks=(0, 1), capacity=2.0)
    asked = with_ranks(replace(job, processors=(machine,)), 4)
    assert asked.processors[0].ranks == (0, 1, 2, 3)
    assert len(set(asked.hosts.values())) == 4


def test_one_rank_has_no_ring() -> None:
    with pytest.raises(ReplayError, match="two is the least"):
        with_ranks(over_a_link(), 1)


def test_without_its_straggler_a_job_is_one_that_has_none() -> None:
    slow, even = job_on(LINK, ranks=3, slow=3.0), job_on(LINK, ranks=3)
    assert times(slow).iteration_s > 1.3 * times(even).iteration_s
    assert times(without_stragglers(slow)).iteration_s == pytest.approx(times(even).iteration_s)


def test_data_that_comes_at_once_is_not_waited_for() -> None:
    slow, none = job_on(LINK, data_s=0.3), job_on(LINK)
    assert times(with_faster_loader(slow, math.inf)).iteration_s == pytest.approx(times(none).iteration_s)
    assert times(with_faster_loader(slow, 3.0)).iteration_s == pytest.approx(
        times(job_on(LINK, data_s=0.1)).iteration_s
    )
    with pytest.raises(ReplayError, match="0 times as fast"):
        with_faster_loader(slow, 0)


def test_half_the_bytes_take_half_the_link() -> None:
    link = LinkModel(alpha_s=0.001, throughput=(1e5, 1e5))
    fast = LinkModel(alpha_s=0.001, throughput=(2e5, 2e5))
    assert times(with_less_traffic(job_on(link), 0.5)).iteration_s == pytest.approx(times(job_on(fast)).iteration_s)
    with pytest.raises(ReplayError, match="0 times the bytes"):
        with_less_traffic(on_one_host(), 0)
