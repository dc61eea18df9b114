import math

import pytest

from sirtaki.autotune.model.planning import Cluster
from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel


def test_two_way_links_have_the_papers_parameters():
    link = LinkModel(alpha_s=1.4e-3, throughput=(1 / 1.7e-9, 2 / (1.5 * 1.7e-9)))  # b = 1.7e-9 s, γ = 1.5
    assert link.beta_s_per_byte == pytest.approx(1.7e-9)
    assert link.gamma == pytest.approx(1.5)
    assert link.together_s(1e6, streams=1) == pytest.approx(1.4e-3 + 1.7e-3)
    assert link.total_bytes_per_s(5) == link.total_bytes_per_s(2)


def test_units_that_are_together_wait_for_the_link_or_for_the_processor():
    link = LinkModel(alpha_s=1e-3, throughput=(1e9, 2e9), host_s=2e-3)
    assert link.together_s(8e6, streams=2) == pytest.approx(1e-3 + 2 * 8e6 / 2e9)
    assert link.together_s(1e6, streams=2) == pytest.approx(1e-3 + 2 * 2e-3)
    assert link.startup_s == pytest.approx(3e-3)


def test_a_ring_of_another_size_follows_eq_4_as_a_described_cluster_does():
    def ring(ranks):
        return Cluster(name="", ranks=ranks, hop_s=2e-5, link_bytes_per_s=1e9, flow_bytes_per_s=3e8).link()

    rescaled = ring(8).rescaled(from_ranks=8, to_ranks=64)
    assert rescaled.alpha_s == pytest.approx(ring(64).alpha_s)
    assert rescaled.throughput == pytest.approx(ring(64).throughput)


def test_a_model_differs_only_beyond_its_own_residual():
    link = LinkModel(alpha_s=1e-3, throughput=(1e8, 2e8), residual=0.05)
    nearly = LinkModel(alpha_s=1.03e-3, throughput=(1e8, 1.97e8))
    assert not link.differs_from(nearly)
    assert link.differs_from(LinkModel(alpha_s=1e-3, throughput=(1e8, 1.5e8)))
    assert link.differs_from(LinkModel(alpha_s=2e-3, throughput=(1e8, 2e8)))
    assert link.differs_from(LinkModel(alpha_s=1e-3, throughput=(1e8, 2e8), host_s=1e-3))


@pytest.mark.parametrize(
    "fields",
    [
        {"alpha_s": -1.0, "throughput": (1.0,)},
        {"alpha_s": math.nan, "throughput": (1.0,)},
        {"alpha_s": 1.0, "throughput": (1.0,), "host_s": -1.0},
        {"alpha_s": 1.0, "throughput": ()},
        {"alpha_s": 1.0, "throughput": (1.0, 0.0)},
        {"alpha_s": 1.0, "throughput": (math.inf,)},
    ],
)
def test_links_that_cannot_be_are_refused(fields):
    with pytest.raises(TuningError):
        LinkModel(**fields)


@pytest.mark.parametrize("changes", [{"ranks": 1}, {"flow_bytes_per_s": 2e9}, {"hop_s": -1.0}, {"crowding": 1.0}])
def test_clusters_that_cannot_be_are_refused(changes):
    fields = {"name": "", "ranks": 8, "hop_s": 1e-5, "link_bytes_per_s": 1e9, "flow_bytes_per_s": 5e8}
    with pytest.raises(TuningError):
        Cluster(**{**fields, **changes})


def test_a_ring_of_one_rank_has_no_correction():
    with pytest.raises(TuningError, match="at least 2"):
        LinkModel(alpha_s=1.0, throughput=(1.0,)).rescaled(from_ranks=1, to_ranks=4)


def test_json_keeps_the_link():
    link = LinkModel(alpha_s=1e-3, throughput=(1e8, 2e8), host_s=1e-4, residual=0.05)
    assert LinkModel.from_json(link.to_json()) == link


def test_a_link_that_was_saved_without_a_processor_time_is_read():
    saved = LinkModel(alpha_s=1e-3, throughput=(1e8,)).to_json()
    del saved["host_s"]
    assert LinkModel.from_json(saved).host_s == 0.0
