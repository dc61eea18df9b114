import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from sirtaki.errors import RegistryError
from sirtaki.fields import checked
from sirtaki.registry.cluster import LinkClass, RankLocation, Topology

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


def on_devices(hosts: Sequence[str], devices: Sequence[str], numbers: Sequence[int | None]) -> Topology:
    """Ranks of hosts of one kind, each on the device of that number."""
    found = Topology.from_ranks(hosts, devices=devices, host_kinds=dict.fromkeys(hosts, "x"))
    places = (
        RankLocation(place.host, place.device, number) for place, number in zip(found.places, numbers, strict=True)
    )
    return replace(found, places=tuple(places))


@given(HOSTS, st.data())
def test_json_is_restored_as_the_same_topology(hosts: list[str], data: st.DataObject) -> None:
    devices = data.draw(st.lists(st.sampled_from(["cpu", "H100"]), min_size=len(hosts), max_size=len(hosts)))
    numbers = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=len(hosts), max_size=len(hosts)))
    link = LinkClass.of(bandwidth_bytes_per_s=1.25e9, latency_s=5e-5)
    topology = replace(on_devices(hosts, devices, numbers), network_link=link)
    assert checked(Topology, json.loads(json.dumps(to_builtins(topology)))) == topology


@given(HOSTS, st.permutations("abcd"), st.randoms())
def test_the_fingerprint_ignores_names_and_order(hosts: list[str], names: list[str], random: Any) -> None:
    renamed = [names["abcd".index(host)] + ".example" for host in hosts]
    random.shuffle(renamed)
    assert Topology.from_ranks(renamed).fingerprint() == Topology.from_ranks(hosts).fingerprint()


BASE = on_devices("aabb", ["H100"] * 4, [0, 1, 0, 1])


@pytest.mark.parametrize(
    "other",
    [
        on_devices("aaab", ["H100"] * 4, [0, 1, 2, 0]),
        replace(BASE, host_kinds=("x", "y")),
        replace(BASE, network_link=LinkClass(bandwidth_log2=30)),
        replace(BASE, local_link=LinkClass(latency_log2=10)),
        replace(BASE, places=(BASE.places[0], *BASE.places[:3])),
        on_devices("aabb", ["H100"] * 4, [0, 0, 0, 1]),
        on_devices("aabb", ["A100"] * 4, [0, 1, 0, 1]),
    ],
    ids=["grouping", "host kind", "bandwidth", "latency", "more ranks a host", "shared device", "device"],
)
def test_the_fingerprint_changes_with_every_relevant_property(other: Topology) -> None:
    assert other.fingerprint() != BASE.fingerprint()


def test_a_few_words_describe_the_numbers_of_ranks_and_hosts() -> None:
    assert BASE.describe() == "4 ranks on 2 hosts"
    assert Topology.from_ranks(["a"]).describe() == "1 rank on 1 host"


def test_measurements_that_differ_little_fall_into_one_class() -> None:
    assert LinkClass.of(bandwidth_bytes_per_s=1.00e9) == LinkClass.of(bandwidth_bytes_per_s=1.05e9)
    assert LinkClass.of(bandwidth_bytes_per_s=1.00e9) != LinkClass.of(bandwidth_bytes_per_s=4.00e9)
    assert LinkClass.of() == LinkClass()
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RegistryError):
            LinkClass.of(bandwidth_bytes_per_s=speed)


def test_the_distance_of_links_counts_doublings_of_what_both_have_measured() -> None:
    slow, fast = (LinkClass.of(bandwidth_bytes_per_s=rate, latency_s=1e-5) for rate in (1.25e8, 1.25e10))
    assert slow.octaves_from(fast) == fast.octaves_from(slow) in (6, 7)
    assert slow.octaves_from(LinkClass.of(bandwidth_bytes_per_s=1.25e8, latency_s=4e-5)) == 2
    assert slow.octaves_from(LinkClass()) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"places": []}, "1 to"),
        ({"places": [[0, "cpu", None], [2, "cpu", None]]}, "each with a rank"),
        ({"places": [[0, "cpu"]]}, r"topology.places\[0\]"),
        ({"places": [[True, "cpu", None]]}, r"topology.places\[0\]\[0\]"),
        ({"places": [[0, "cpu", -1]]}, r"topology.places\[0\]\[2\]"),
        ({"host_kinds": [1]}, "host_kinds"),
        ({"local_link": [1e9, None]}, "local_link"),
        ({"network_link": None}, "network_link"),
        ({"host_kinds": ["\u202e"]}, r"topology.host_kinds\[0\]: expected printable text"),
        ({"extra": 1}, "unknown field extra"),
    ],
)
def test_json_that_is_no_topology_is_rejected_with_the_part_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        checked(Topology, {**to_builtins(Topology.from_ranks(["a"])), **change}, at="topology")
