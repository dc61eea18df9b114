import pytest

from bench.lib.networks import NETWORKS
from bench.lib.workloads import FABRICS, RANKS, cluster, clusters, workload


@pytest.mark.parametrize("name", NETWORKS)
def test_ready_times_ascend_to_the_end_of_the_backward_pass(name):
    profile = workload(name).profile(backward_s=0.25)
    assert list(profile.ready_s) == sorted(profile.ready_s)
    assert profile.compute_s == pytest.approx(0.25)


def test_the_backward_pass_begins_with_the_last_layer():
    layout = workload("vgg16").layout
    assert layout.names[:2] == ("classifier.6.bias", "classifier.6.weight")
    assert layout.sizes[-1] == 64 * 3 * 9


def test_resnet_152_takes_as_long_as_the_asc_wfbp_paper_measured():
    assert workload("resnet152").backward_s == pytest.approx(0.182, rel=0.1)


def test_scaling_down_keeps_the_gradients_and_their_order():
    whole, part = workload("bert_base"), workload("bert_base").scaled(0.01)
    assert part.layout.names == whole.layout.names
    assert part.layout.numel == pytest.approx(whole.layout.numel * 0.01, rel=0.01)
    assert min(part.layout.sizes) >= 1


def test_every_fabric_comes_in_every_size():
    assert len({description.name for description in clusters()}) == len(FABRICS) * len(RANKS)


def test_three_flows_fill_a_link_capped_at_a_third():
    link = cluster("10 Gbit/s TCP", 8).link()
    assert link.total_bytes_per_s(2) == pytest.approx(2 * link.total_bytes_per_s(1))
    assert link.total_bytes_per_s(3) == pytest.approx(10e9 / 8 / (2 * 7 / 8))
    assert link.total_bytes_per_s(4) < link.total_bytes_per_s(3)
