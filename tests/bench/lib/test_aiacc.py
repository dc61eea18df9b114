"""AIACC's cloud: what its figures are predicted from."""

import pytest

from bench.lib.aiacc import DDP_BYTES, cluster, ddp_buckets, scaling
from bench.lib.workloads import workload


def test_four_streams_fill_a_link_of_which_one_gets_three_tenths() -> None:
    rates = cluster(32).link().throughput
    assert rates[0] / rates[3] == pytest.approx(0.3, rel=0.02)


def test_a_hop_of_the_ring_takes_longer_the_more_of_them_leave_a_node() -> None:
    assert cluster(16).hop_s == cluster(256).hop_s  # one in eight
    assert cluster(256).link().alpha_s > 10 * cluster(16).link().alpha_s


def test_buckets_of_whole_gradients_hold_all_of_them_and_end_when_they_are_full() -> None:
    network = workload("resnet50")
    ends = ddp_buckets(network)
    offsets = network.layout.offsets
    sizes = [4 * (offsets[end] - offsets[begin]) for begin, end in zip([1, *ends], ends[1:], strict=False)]
    assert ends[-1] == len(network.layout.sizes)
    assert all(size >= DDP_BYTES for size in sizes[1:-1])


def test_several_streams_scale_better_than_one_and_worse_on_more_nodes() -> None:
    few, many = scaling("resnet50", 16), scaling("resnet50", 256)
    for found in (few, many):
        assert found.efficiency["Horovod"] < found.efficiency["AIACC"] <= 1
        assert found.efficiency["DDP"] < found.efficiency["AIACC"]
    assert all(many.efficiency[method] < few.efficiency[method] for method in few.efficiency)
    assert many.streams > few.streams >= 3
