"""A described cluster is a ring over equal links (LIBRA eq. 4)."""

from dataclasses import replace

import pytest

from sirtaki.autotune.model.planning import Cluster
from sirtaki.errors import TuningError

CLUSTER = Cluster(name="four", ranks=4, hop_s=1e-3, link_bytes_per_s=1e9, flow_bytes_per_s=4e8, crowding=0.1)


def test_an_all_reduce_goes_round_twice_less_one_hop_each_time() -> None:
    assert CLUSTER.link().alpha_s == pytest.approx(6e-3)
    assert replace(CLUSTER, ranks=2).link().alpha_s == pytest.approx(2e-3)


def test_flows_add_up_until_the_link_is_full_and_crowd_each_other_then() -> None:
    wire = 2 * 3 / 4
    rates = CLUSTER.link(max_streams=5).throughput
    full = 1e9 / wire  # at two and a half flows
    expected = [4e8 / wire, 8e8 / wire, *(full * 0.9 ** (n - 2.5) for n in (3, 4, 5))]
    assert rates == pytest.approx(expected)
    assert len(CLUSTER.link().throughput) == 24


def test_where_one_flow_fills_the_link_more_only_crowd() -> None:
    rates = replace(CLUSTER, flow_bytes_per_s=1e9, crowding=0.0).link(max_streams=3).throughput
    assert rates == pytest.approx([1e9 / 1.5] * 3)


def test_no_all_reduce_is_faster_than_the_link() -> None:
    assert CLUSTER.bound_s(10**9) == pytest.approx(1.5)
    link = CLUSTER.link()
    assert all(link.together_s(10**9 / n, streams=n) >= CLUSTER.bound_s(10**9) for n in range(1, 25))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 1}, "at least two ranks, not 1"),
        ({"hop_s": -1e-9}, "hop_s ≥ 0"),
        ({"flow_bytes_per_s": 0.0}, "0 < flow ≤ link rate"),
        ({"flow_bytes_per_s": 1.1e9}, "0 < flow ≤ link rate"),
        ({"crowding": 1.0}, "a share from 0 up to 1"),
        ({"crowding": -0.1}, "a share from 0 up to 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, float], words: str) -> None:
    with pytest.raises(TuningError, match=words):
        replace(CLUSTER, **change)
