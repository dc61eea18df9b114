from itertools import count
from pathlib import Path

import numpy as np
import pytest
from conformance.graphs import chain_graph
from conformance.store import make_entry
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.registry.graph import Graph, Node, distance, mass, normalised, upper_bound
from sirtaki.registry.safe_store import open_store
from sirtaki.registry.store import Store
from sirtaki.registry.topology import LinkClass, Topology
from sirtaki.registry.warm_start import MODEL_WEIGHT, TOPOLOGY_WEIGHT, Match, nearest, topology_distance

FOREVER_S = 1e9


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "r.db"))


def find(store: Store, model: Graph, topology: Topology, **options: object) -> list[Match]:
    defaults = {"dtype": "float32", "device": "cpu", "k": 5, "budget_s": FOREVER_S}
    return nearest(store, model, topology, **{**defaults, **options})  # type: ignore[arg-type]


def hosts(ranks: int, per_host: int = 2) -> Topology:
    return Topology.from_ranks([f"host{rank // per_host}" for rank in range(ranks)])


def test_an_empty_store_has_nothing_near(store: Store) -> None:
    assert find(store, chain_graph([1]), hosts(2)) == []


def test_it_finds_what_comparing_with_every_entry_finds(store: Store) -> None:
    """Pruning, stretches and batches must not lose anything."""
    rng = np.random.default_rng(3)
    entries = [
        make_entry(
            model=chain_graph([int(rng.choice([10, 20, 40])) for _ in range(rng.integers(3, 30))]),
            ranks=int(rng.choice([2, 4, 8, 12])),
        )
        for _ in range(120)
    ]
    store.save_all(entries)
    for _ in range(5):
        model = chain_graph([int(rng.choice([10, 20, 40])) for _ in range(rng.integers(3, 30))])
        topology = hosts(int(rng.choice([2, 4, 6])))
        all_distances = sorted(
            MODEL_WEIGHT * distance(model, entry.model)
            + TOPOLOGY_WEIGHT * topology_distance(topology.shape(), entry.topology.shape())
            for entry in {entry.id: entry for entry in entries}.values()
        )
        for k in (1, 7):
            found = find(store, model, topology, k=k, max_distance=1.0)
            assert [match.distance for match in found] == pytest.approx(all_distances[:k])


def test_the_same_job_is_no_way_off_and_parts_are_told_apart(store: Store) -> None:
    entry = make_entry(model=chain_graph([10] * 20), ranks=4)
    store.save(entry)
    (same,) = find(store, entry.model, entry.topology)
    assert (same.id, same.distance) == (entry.id, 0.0)
    (grown,) = find(store, entry.model, hosts(8))
    assert grown.model_distance == 0.0
    assert grown.distance == pytest.approx(TOPOLOGY_WEIGHT * grown.topology_distance)
    (deeper,) = find(store, chain_graph([10] * 22), entry.topology)
    assert deeper.topology_distance == 0.0
    assert deeper.distance == pytest.approx(MODEL_WEIGHT * deeper.model_distance)


def test_another_device_is_never_near_and_another_dtype_a_little_less(store: Store) -> None:
    entry = make_entry()
    store.save(entry)
    assert find(store, entry.model, entry.topology, device="cuda") == []
    (match,) = find(store, entry.model, entry.topology, dtype="float16")
    assert 0 < match.distance < 0.1


def test_entries_beyond_the_distance_are_left_out(store: Store) -> None:
    store.save(make_entry(model=chain_graph([10] * 20)))
    assert find(store, chain_graph([99] * 5), hosts(4), max_distance=0.2) == []


def test_of_equals_the_complete_one_comes_first(store: Store) -> None:
    for ranks, complete in ((2, False), (6, True)):  # one host fewer, one host more
        store.save(make_entry(ranks=ranks, complete=complete))
    model = make_entry().model
    found = find(store, model, hosts(4), max_distance=1.0)
    assert len(found) == 2
    store.save(make_entry(ranks=4, complete=False))
    assert find(store, model, hosts(4))[0].distance == 0.0


def test_when_time_is_up_the_best_so_far_is_returned(store: Store) -> None:
    store.save_all([make_entry(model=chain_graph([10] * length)) for length in range(5, 80)])
    ticks = iter(range(1000))
    found = find(store, chain_graph([10] * 40), hosts(4), k=50, max_distance=1.0, budget_s=3, clock=lambda: next(ticks))
    assert 0 < len(found) < 50
    assert found[0].distance == 0.0


def test_entries_of_the_model_itself_are_found_however_little_time_there_is(store: Store) -> None:
    model = chain_graph([10] * 4)
    store.save_all([make_entry(model=model, ranks=ranks) for ranks in range(2, 30, 2)])
    ticks = count()  # an hour passes between any two looks at the clock
    found = find(store, model, hosts(4), k=50, max_distance=1.0, budget_s=0.0, clock=lambda: 3600.0 * next(ticks))
    assert len(found) == 14


def test_computed_distances_are_kept_and_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from sirtaki.registry import warm_start as similarity

    store.save_all([make_entry(model=chain_graph([10] * length)) for length in (18, 19, 21)])
    model = chain_graph([10] * 20)
    first = find(store, model, hosts(4))
    assert len(store.distances(model.fingerprint())) == 3

    def fail(*graphs: Graph) -> float:
        raise AssertionError("computed again")

    monkeypatch.setattr(similarity, "distance", fail)
    assert find(store, model, hosts(4)) == first


def test_a_read_only_store_is_searched_too(tmp_path: Path) -> None:
    path = str(tmp_path / "r.db")
    open_store(path).save(make_entry(model=chain_graph([10] * 18)))
    assert len(find(open_store(path, read_only=True), chain_graph([10] * 20), hosts(4))) == 1


CLUSTERS = st.builds(
    Topology.from_ranks,
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12),
    network_link=st.sampled_from([LinkClass(), LinkClass(bandwidth_log2=30)]),
)


def host_graph(topology: Topology) -> Graph:
    """A node a host, all joined to the network's one node."""
    shape = topology.shape()
    hosts = [Node(kind="host", detail=detail, size=ranks) for detail, ranks, count in shape.hosts for _ in range(count)]
    return Graph(
        nodes=(*hosts, Node(kind="network")),
        edges=tuple((index, len(hosts), shape.network) for index in range(len(hosts))),
        directed=False,
    )


@given(CLUSTERS, CLUSTERS)
def test_cluster_distance_is_an_edit_distance_of_the_host_graphs(first: Topology, second: Topology) -> None:
    graphs = host_graph(first), host_graph(second)
    found = topology_distance(first.shape(), second.shape())
    assert found == topology_distance(second.shape(), first.shape())
    assert 0.0 <= found <= 1.0
    assert (found == 0.0) == (first.fingerprint() == second.fingerprint())
    general = normalised(upper_bound(*graphs), mass(graphs[0]) + mass(graphs[1]))
    assert found <= general + 0.05 or found == pytest.approx(general)


def test_cluster_distance_grows_with_the_difference_of_measured_links() -> None:
    """1, 10 and 100 Gbit/s between like hosts, up to what a relabelled edge costs."""
    base = hosts(8)
    far = [topology_distance(base.shape(), base.shape(), link_octaves=octaves) for octaves in (0, 3, 7, 8, 20)]
    labelled = Topology(places=base.places, host_kinds=base.host_kinds, network_link=LinkClass(bandwidth_log2=30))
    assert far[0] == 0.0 < far[1] < far[2] < far[3] == far[4] == topology_distance(base.shape(), labelled.shape())


def test_cluster_distance_grows_with_the_difference_in_size() -> None:
    base = hosts(8).shape()
    near, far = hosts(10).shape(), hosts(64).shape()
    assert 0 < topology_distance(base, near) < topology_distance(base, far) < 1
    assert topology_distance(hosts(8, 4).shape(), hosts(8, 2).shape()) > 0
