"""What an executor is told, checked before anything starts."""

import pytest

from sirtaki.errors import ConfigError
from sirtaki.ray.settings import Demand, RaySettings, Shape, elastic_policy, interface_names
from sirtaki.run.elastic.job_members import OnFailure


def test_a_bundle_asks_for_what_is_wanted_only() -> None:
    assert Demand(cpus=2).bundle() == {"CPU": 2}
    assert Demand(cpus=0.5, gpus=1).bundle(3) == {"CPU": 1.5, "GPU": 3}


def test_a_node_holds_as_many_ranks_as_its_scarcest_resource_allows() -> None:
    both = Demand(cpus=2, gpus=1)
    assert [both.fitting(there) for there in ({"CPU": 9, "GPU": 2}, {"CPU": 5, "GPU": 8}, {"CPU": 9})] == [2, 2, 0]


def test_hosts_get_one_bundle_each_and_free_ranks_too() -> None:
    assert Shape(ranks=3).bundles == [{"CPU": 1}] * 3
    hosts = Shape(ranks=2, hosts=3, demand=Demand(cpus=1, gpus=1))
    assert (hosts.size, hosts.bundles) == (6, [{"CPU": 2, "GPU": 2}] * 3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RaySettings(timeout_s=0), "must be positive"),
        (lambda: Demand(cpus=0), "0 CPUs and 0 GPUs"),
        (lambda: Shape(ranks=0), "0 ranks"),
        (lambda: elastic_policy(None, 0, None), "min_workers=0"),
        (lambda: elastic_policy(4, 2, 3), "num_workers=4, max_workers=3"),
        (lambda: elastic_policy(2, 2, 3, cooldown_s=(5.0, 1.0)), "shorter"),
    ],
)
def test_nonsense_is_refused(make: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()  # type: ignore[operator]


def test_an_elastic_job_begins_with_the_least_unless_told_otherwise() -> None:
    policy = elastic_policy(None, 2, None, reset_limit=3)
    assert (policy.start_ranks, policy.min_ranks, policy.max_ranks, policy.reset_limit) == (2, 2, None, 3)
    assert (policy.on_failure, policy.cooldown_s) == (OnFailure.REPLACE_RANK, (30.0, 600.0))


def test_interfaces_are_one_word() -> None:
    assert [interface_names(nics) for nics in (None, "eth0", {"eth1", "eth0"})] == ["", "eth0", "eth0,eth1"]
