"""Proposals from earlier jobs: the nearest entries, and the adaptation of their settings."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from conformance.graphs import chain_graph
from conformance.store import KNOBS, make_entry
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sirtaki.autotune.knobs import Cut, KnobSpace, Lossy, NcclWays
from sirtaki.comm.plan import Algorithm, NcclWay, TransportKind
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel
from sirtaki.registry import warm_start
from sirtaki.registry.cluster import LinkClass, Topology
from sirtaki.registry.graph import (
    EDGE_COST,
    NODE_COST,
    ModelGraph,
    OperationLabel,
    distance,
    fingerprint,
    node_cost,
    normalised,
)
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import JobRecord, local_time
from sirtaki.registry.store import Store
from sirtaki.registry.warm_start import (
    MODEL_WEIGHT,
    TOPOLOGY_WEIGHT,
    JobDescription,
    Match,
    Neighbour,
    WarmStart,
    adapted,
    adapted_all,
    bounded,
    nearest,
    neighbours,
    scaled_streams,
    topology_distance,
    with_uniform_units,
)

FOREVER_S = 1e9


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "r.db"))


def find(store: Store, model: ModelGraph, topology: Topology, **options: object) -> list[Match]:
    defaults = {"dtype": "float32", "device": "cpu", "k": 5, "budget_s": FOREVER_S}
    return nearest(store, model, topology, **{**defaults, **options})  # type: ignore[arg-type]


def hosts(ranks: int, per_host: int = 2) -> Topology:
    return Topology.from_ranks([f"host{rank // per_host}" for rank in range(ranks)])


@pytest.mark.lengthy
def test_pruned_look_ups_find_the_same_entries_as_exhaustive_ones(store: Store) -> None:
    """Pruning, stretches and batches must not lose anything."""
    rng = np.random.default_rng(3)
    entries = [
        make_entry(
            model=chain_graph([int(rng.choice([10, 20, 40])) for _ in range(rng.integers(3, 30))]),
            ranks=int(rng.choice([2, 4, 8, 12])),
        )
        for _ in range(120)
    ]
    store.put_all(entries)
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


def test_another_device_is_never_near_and_another_dtype_a_little_less(store: Store) -> None:
    entry = make_entry()
    store.put(entry)
    assert find(store, entry.model, entry.topology, device="cuda") == []
    (match,) = find(store, entry.model, entry.topology, dtype="float16")
    assert 0 < match.distance < 0.1


def test_of_equal_entries_the_complete_one_is_first(store: Store) -> None:
    for ranks, complete in ((2, False), (6, True)):  # one host fewer, one host more
        store.put(make_entry(ranks=ranks, complete=complete))
    model = make_entry().model
    found = find(store, model, hosts(4), max_distance=1.0)
    assert len(found) == 2
    store.put(make_entry(ranks=4, complete=False))
    assert find(store, model, hosts(4))[0].distance == 0.0


def test_when_time_is_up_the_best_so_far_is_returned(store: Store) -> None:
    store.put_all([make_entry(model=chain_graph([10] * length)) for length in range(5, 80)])
    ticks = iter(range(1000))
    found = find(store, chain_graph([10] * 40), hosts(4), k=50, max_distance=1.0, budget_s=3, clock=lambda: next(ticks))
    assert 0 < len(found) < 50
    assert found[0].distance == 0.0


def test_entries_of_the_model_itself_are_found_however_little_time_there_is(store: Store) -> None:
    model = chain_graph([10] * 4)
    store.put_all([make_entry(model=model, ranks=ranks) for ranks in range(2, 30, 2)])
    ticks = count()  # an hour passes between any two looks at the clock
    found = find(store, model, hosts(4), k=50, max_distance=1.0, budget_s=0.0, clock=lambda: 3600.0 * next(ticks))
    assert len(found) == 14


def test_computed_distances_are_kept_and_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_all([make_entry(model=chain_graph([10] * length)) for length in (18, 19, 21)])
    model = chain_graph([10] * 20)
    first = find(store, model, hosts(4))
    assert len(store.distances(fingerprint(model))) == 3

    def fail(*graphs: ModelGraph) -> float:
        raise AssertionError("computed again")

    monkeypatch.setattr(warm_start, "distance", fail)
    assert find(store, model, hosts(4)) == first


def test_a_read_only_store_is_searched_too(tmp_path: Path) -> None:
    path = str(tmp_path / "r.db")
    open_store(path).put(make_entry(model=chain_graph([10] * 18)))
    assert len(find(open_store(path, read_only=True), chain_graph([10] * 20), hosts(4))) == 1


CLUSTERS = st.builds(
    lambda hosts, link: structs.replace(Topology.from_ranks(hosts), network_link=link),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=9),
    st.sampled_from([LinkClass(), LinkClass(bandwidth_log2=30)]),
)


def host_graph(topology: Topology) -> "nx.Graph[int]":
    """Return a graph with one node per host, all connected to the network's node."""
    shape = topology.shape()
    hosts = [
        OperationLabel(kind="host", detail=detail, size=ranks)
        for detail, ranks, count in shape.hosts
        for _ in range(count)
    ]
    made = nx.Graph()
    for index, node in enumerate([*hosts, OperationLabel(kind="network")]):
        made.add_node(index, label=node)
    made.add_edges_from((index, len(hosts), {"label": shape.network}) for index in range(len(hosts)))
    return made


@given(CLUSTERS, CLUSTERS)
def test_cluster_distance_is_about_the_edit_distance_of_the_host_graphs(first: Topology, second: Topology) -> None:
    graphs = host_graph(first), host_graph(second)
    found = topology_distance(first.shape(), second.shape())
    assert found == topology_distance(second.shape(), first.shape())
    assert 0.0 <= found <= 1.0
    assert (found == 0.0) == (first.fingerprint() == second.fingerprint())
    cost = nx.graph_edit_distance(
        *graphs,
        node_subst_cost=lambda a, b: node_cost(a["label"], b["label"]),
        node_del_cost=lambda _: NODE_COST,
        node_ins_cost=lambda _: NODE_COST,
        edge_subst_cost=lambda a, b: 0.0 if a == b else EDGE_COST,
        edge_del_cost=lambda _: EDGE_COST,
        edge_ins_cost=lambda _: EDGE_COST,
    )
    mass = sum(NODE_COST * len(graph) + EDGE_COST * graph.size() for graph in graphs)
    exact = normalised(cost, mass)
    assert exact - 1e-9 <= found <= exact + 0.05  # large hosts are paired first, which is not always the cheapest


def test_cluster_distance_grows_with_the_difference_of_measured_links() -> None:
    """1, 10 and 100 Gbit/s between like hosts, up to what a relabelled edge costs."""
    base = hosts(8)
    far = [topology_distance(base.shape(), base.shape(), link_octaves=octaves) for octaves in (0, 3, 7, 8, 20)]
    labelled = structs.replace(base, network_link=LinkClass(bandwidth_log2=30))
    assert far[0] == 0.0 < far[1] < far[2] < far[3] == far[4] == topology_distance(base.shape(), labelled.shape())


# ── what is found, adapted to the job ──

UNIFORM = KNOBS.but(cuts=None)
ROUTE = KNOBS.route
MPI, NCCL = ((kind, Algorithm.FLAT) for kind in (TransportKind.MPI, TransportKind.NCCL))
LINK = LinkModel(alpha_s=1e-4, throughput=(1e9, 2e9, 3e9, 3.9e9, 4e9, 4e9, 4e9, 4e9))


def job_like(
    entry: JobRecord, *, model: ModelGraph | None = None, ranks: int | None = None, **changes: object
) -> JobDescription:
    model = model or entry.model
    topology = entry.topology if ranks is None else Topology.from_ranks([f"host{rank // 2}" for rank in range(ranks)])
    key = structs.replace(
        entry.key, model=fingerprint(model), topology=topology.fingerprint(), world_size=topology.world_size
    )
    job = JobDescription(key=key, model=model, topology=topology, layout=entry.layout, name="Net")
    return replace(job, **changes)  # type: ignore[arg-type]


def suited(entry: JobRecord, *, distance: float = 0.1, **changes: object) -> WarmStart:
    return adapted(Neighbour(record=entry, distance=distance), job_like(entry, **changes))  # type: ignore[arg-type]


def warm_starts(store: Store, job: JobDescription) -> list[WarmStart]:
    return adapted_all(neighbours(store, job), job)


def test_a_jobs_own_entry_is_not_its_neighbour_and_takes_no_place(store: Store) -> None:
    own = make_entry()
    store.put_all([own, *(make_entry(ranks=ranks) for ranks in (5, 6, 7))])
    found = neighbours(store, job_like(own), k=3)
    assert len(found) == 3
    assert own.id not in {neighbour.record.id for neighbour in found}


def test_a_jobs_own_entry_is_explained_as_such() -> None:
    entry = make_entry()
    start = suited(entry, distance=0.0)
    assert start.knobs == KNOBS
    assert start.explanation == (
        f"Net on 4 ranks on 2 hosts: starting from an earlier job's setting (entry {entry.id[:8]}, stored "
        f"{local_time(entry.created_s)}), 2.00× faster (not proved) than the default"
    )
    assert "ended early" in suited(make_entry(complete=False)).explanation


def test_a_similar_entry_is_explained(store: Store) -> None:
    store.put(make_entry(model=chain_graph([100] * 10)))
    (start,) = warm_starts(store, job_like(make_entry(), model=chain_graph([100] * 11), ranks=8))
    assert 0 < start.distance < 0.6
    assert start.explanation.startswith(
        f"Net on 8 ranks on 4 hosts: starting from a similar job's setting "
        f"(Réseau on 4 ranks on 2 hosts, distance {start.distance:.2f} of 1"
    )


def test_strangers_are_no_help(store: Store) -> None:
    store.put(make_entry(model=chain_graph([1])))
    assert warm_starts(store, job_like(make_entry(), model=chain_graph(range(1, 40)))) == []


def test_nearer_entries_are_first_and_equal_knobs_occur_once(store: Store) -> None:
    for ranks, streams in ((6, 4), (16, 2), (5, 4)):
        knobs = UNIFORM.but(streams=streams)
        store.put(structs.replace(make_entry(ranks=ranks), knobs=knobs, link=None))
    starts = warm_starts(store, job_like(make_entry()))
    assert [start.knobs.streams for start in starts] == [4, 2]
    assert starts[0].record.key.world_size in (5, 6)
    assert starts[0].distance < starts[1].distance


def test_of_equally_similar_jobs_the_one_on_the_most_similar_link_is_first(store: Store) -> None:
    """The key does not contain the measured link, so entries of other models on the cluster are searched for it."""
    own = make_entry(model=chain_graph([100] * 10))
    for number, rate in enumerate((1e10, 1e7, 1e8, 1e9)):
        other = make_entry(model=chain_graph([100] * 9 + [101 + number]))
        store.put(structs.replace(other, knobs=UNIFORM, link=LinkModel(alpha_s=1e-4, throughput=(rate,))))
    key = own.key
    # Distances that are known take no time, so that none is left out where the machine is busy.
    nearest(store, own.model, own.topology, dtype=key.dtype, device=key.device, budget_s=60.0)
    for here, order in ((1e7, [1e7, 1e8, 1e9]), (1e10, [1e10, 1e9, 1e8])):
        link = LinkModel(alpha_s=1e-4, throughput=(here,))
        found = neighbours(store, job_like(own, links={ROUTE: link}))
        assert [neighbour.record.link.throughput[0] for neighbour in found if neighbour.record.link] == order
        assert found[0].distance < found[1].distance < found[2].distance


def test_of_a_jobs_settings_under_other_conditions_the_one_of_the_current_link_is_first(store: Store) -> None:
    own = structs.replace(make_entry(), knobs=UNIFORM, link=LINK)
    links = {"4×": replace(LINK, throughput=(2.5e8, 5e8)), "0.25×": replace(LINK, throughput=(4e9, 8e9))}
    for condition, link in links.items():
        store.put(structs.replace(own, key=structs.replace(own.key, condition=condition), link=link))
    for condition, link in links.items():
        nearest, other = neighbours(store, job_like(own, links={ROUTE: link}))
        assert nearest.record.key.condition == condition
        assert nearest.distance == 0.0 < other.distance


def test_a_link_that_was_not_measured_takes_no_job_farther_away(store: Store) -> None:
    store.put(structs.replace(make_entry(ranks=8), link=None))
    job = job_like(make_entry())
    known = replace(job, links={ROUTE: LINK})
    assert neighbours(store, job) == neighbours(store, known)


def test_the_same_link_under_more_ranks_is_no_other_link(store: Store) -> None:
    store.put(structs.replace(make_entry(ranks=16), knobs=UNIFORM, link=LINK.rescaled(from_ranks=4, to_ranks=16)))
    job = job_like(make_entry())
    assert neighbours(store, replace(job, links={ROUTE: LINK})) == neighbours(store, job)


def test_cuts_are_adopted_for_the_same_layout_only() -> None:
    entry = make_entry()
    assert suited(entry).knobs.cuts == KNOBS.cuts
    assert not suited(entry).lost_cuts
    for layout in ("", "other"):
        start = suited(structs.replace(entry, link=None), layout=layout)
        assert start.knobs.cuts is None
        assert start.knobs.unit_bytes == SMALLEST_UNIT_BYTES
        assert start.lost_cuts
        assert "do not fit this layout" in start.explanation


def test_cuts_that_fit_the_layout_are_not_adopted_for_a_very_different_link() -> None:
    entry = structs.replace(make_entry(), link=LINK)
    start = suited(entry, links={ROUTE: replace(LINK, alpha_s=1e-2)})
    assert start.lost_cuts
    assert "do not fit this link" in start.explanation


def test_nothing_is_scaled_for_the_same_link() -> None:
    entry = structs.replace(make_entry(), knobs=UNIFORM, link=LINK)
    start = suited(entry, links={ROUTE: replace(LINK, alpha_s=1.2e-4)})
    assert start.knobs == UNIFORM
    assert ";" not in start.explanation


def test_units_grow_with_the_root_of_the_latency_bandwidth_product() -> None:
    entry = structs.replace(make_entry(), knobs=UNIFORM, link=LINK)
    start = suited(entry, links={ROUTE: replace(LINK, alpha_s=4e-4)})
    assert start.knobs.unit_bytes == 2 * UNIFORM.unit_bytes
    assert "this link has its latency × 4 and its bandwidth × 1; units 2 times as large" in start.explanation


def test_a_much_slower_link_is_reported_without_powers_of_ten() -> None:
    entry = structs.replace(make_entry(), knobs=UNIFORM, link=LINK)
    assert "its latency × 120 and" in suited(entry, links={ROUTE: replace(LINK, alpha_s=1.2e-2)}).explanation


def test_units_grow_with_the_root_of_the_models_size() -> None:
    entry = structs.replace(make_entry(model=chain_graph([100] * 10)), knobs=UNIFORM, link=LINK)
    start = suited(entry, model=chain_graph([400] * 10))
    assert start.knobs.unit_bytes == 2 * UNIFORM.unit_bytes


def test_without_a_measurement_the_cost_of_more_ranks_follows_from_the_ring() -> None:
    """A ring of 16 takes 5 times the steps of one of 4 and moves 1.25 times the bytes: 4 times the latency's worth."""
    entry = structs.replace(make_entry(), knobs=UNIFORM, link=LINK)
    for link in (LINK, None):
        start = suited(structs.replace(entry, link=link), ranks=16)
        assert start.knobs.unit_bytes == 2 * UNIFORM.unit_bytes
        assert "latency" not in start.explanation  # nobody has measured it here


def test_only_permitted_settings_are_proposed() -> None:
    entry = structs.replace(make_entry(), knobs=UNIFORM.but(threads=700, streams=7), link=LINK)
    permitted = KnobSpace(
        routes=((TransportKind.MPI, Algorithm.FLAT),),
        streams=(1, 2, 4, 8),
        unit_bytes=(1 << 16, 1 << 18),
        threads=(512, 1024),
    )
    start = suited(entry, space=permitted)
    assert start.knobs == UNIFORM.but(transport=TransportKind.MPI, streams=8, unit_bytes=1 << 18, threads=512)
    assert "over mpi flat, because this job does not allow gloo flat" in start.explanation
    assert suited(entry, space=replace(permitted, threads=(None,))).knobs.threads is None
    unthreaded = structs.replace(entry, knobs=UNIFORM)
    assert suited(unthreaded, space=permitted).knobs.threads == 512


def test_codecs_are_adopted_only_by_jobs_that_allow_them() -> None:
    entry = structs.replace(make_entry(), knobs=UNIFORM.but(lossy=Lossy(large="int8")))
    allowing = replace(PERMITTED, lossy=("fp16", "int8"))
    assert suited(entry, space=allowing).knobs == entry.knobs
    for permitted in (PERMITTED, replace(allowing, routes=((TransportKind.SHARED_MEMORY, Algorithm.FLAT),))):
        start = suited(entry, space=permitted)
        assert not start.knobs.lossy
        assert "without int8, which this job does not allow" in start.explanation


def test_nccl_settings_are_adopted_where_nccl_accepts_the_same() -> None:
    over_nccl = UNIFORM.but(transport=TransportKind.NCCL, nccl=NcclWays(large=NcclWay.RING_SIMPLE))
    entry = structs.replace(make_entry(), knobs=over_nccl)
    allowing = replace(
        PERMITTED, routes=(NCCL,), nccl=(NcclWays(small=NcclWay.RING_LL), NcclWays(large=NcclWay.RING_SIMPLE))
    )
    assert suited(entry, space=allowing).knobs == over_nccl
    for permitted in (PERMITTED, replace(allowing, nccl=(NcclWays(small=NcclWay.RING_SIMPLE),))):
        start = suited(entry, space=permitted)
        assert not start.knobs.nccl
        assert "with NCCL's own choice of algorithm" in start.explanation


@given(
    st.floats(1e-9, 10),
    st.floats(1, 1e12),
    st.lists(st.floats(0.1, 30), min_size=1, max_size=24),
    st.integers(1, 4096),
)
def test_scaled_knobs_stay_in_range(latency_s: float, speed: float, gains: list[float], ranks: int) -> None:
    entry = structs.replace(make_entry(), knobs=UNIFORM, link=LINK)
    link = LinkModel(alpha_s=latency_s, throughput=tuple(speed * gain for gain in gains))
    for changes in ({"links": {ROUTE: link}}, {"ranks": ranks}):
        knobs = suited(entry, **changes).knobs  # type: ignore[arg-type]
        assert SMALLEST_UNIT_BYTES <= knobs.unit_bytes <= LARGEST_UNIT_BYTES
        assert 1 <= knobs.streams <= 24


SPEEDS = st.floats(1e-12, 1e18)  # what an import may bring
LINKS = st.none() | st.builds(
    LinkModel,
    alpha_s=st.just(0.0) | SPEEDS,
    throughput=st.lists(st.floats(1e-9, 1e18), min_size=1, max_size=4).map(tuple),
    host_s=st.just(0.0) | SPEEDS,
)
CUTS = st.none() | st.lists(st.integers(1, 2**48), unique=True, max_size=4).map(
    lambda stops: tuple(Cut(stop=stop, threads=None if stop % 2 else 512) for stop in sorted(stops))
)


@given(LINKS, LINKS, CUTS, st.integers(1, 2**40), st.integers(1, 1024), st.sampled_from([1, 4, 60_000]))
def test_every_imported_entry_can_be_adapted(
    there: LinkModel | None,
    here: LinkModel | None,
    cuts: tuple[Cut, ...] | None,
    unit_bytes: int,
    streams: int,
    ranks: int,
) -> None:
    knobs = KNOBS.but(unit_bytes=unit_bytes, streams=streams, cuts=cuts)
    entry = structs.replace(make_entry(), knobs=knobs, link=there)
    permitted = KnobSpace(routes=(ROUTE,), streams=(1, 2, 4))
    job = job_like(entry, links={} if here is None else {ROUTE: here}, layout="other", space=permitted)
    entry = structs.replace(entry, key=structs.replace(entry.key, world_size=ranks))
    knobs = adapted(Neighbour(record=entry, distance=0.1), job).knobs
    assert knobs == permitted.nearest(knobs)
    assert knobs.cuts is None


# ── the arithmetic: unit sizes go with √(M·α/β), streams with what keeps a link busy ──

MIB = 1 << 20
PLAIN = KNOBS.but(unit_bytes=MIB, cuts=None)
PERMITTED = KnobSpace(routes=(ROUTE,), streams=(1, 2, 4, 8), unit_bytes=(MIB, 64 * MIB))


def link(*rates: float, alpha_s: float = 1e-3, host_s: float = 0.0) -> LinkModel:
    return LinkModel(alpha_s=alpha_s, throughput=rates, host_s=host_s)


@pytest.mark.parametrize(("wanted", "found"), [(1, 1), (3, 4), (5, 4), (6, 8), (100, 8)])
def test_streams_are_moved_to_the_nearest_by_ratio(wanted: int, found: int) -> None:
    assert PERMITTED.nearest(PLAIN.but(streams=wanted)).streams == found  # 3 is nearer to 4 than to 2: 1.33 < 1.5


@pytest.mark.parametrize(
    ("threads", "wanted", "found"),
    [
        ((None,), 512, None),
        ((None,), None, None),
        ((512, 1024), None, 512),
        ((512, 1024), 700, 512),
        ((512, 1024), 900, 1024),
        ((None, 512, 1024), None, None),
        ((None, 512, 1024), 4096, 1024),
    ],
)
def test_threads_are_moved_to_the_nearest_permitted_number(
    threads: tuple[int | None, ...], wanted: int | None, found: int | None
) -> None:
    permitted = KnobSpace(routes=(NCCL,), streams=(1,), threads=threads)
    assert permitted.nearest(PLAIN.but(threads=wanted)).threads == found


@pytest.mark.parametrize(
    ("sizes", "middle"),
    [([10], 10), ([10, 30], 30), ([30, 10], 30), ([1, 1, 1, 3], 1), ([1, 1, 1, 4], 4), ([5, 5, 5, 5], 5)],
)
def test_cuts_become_units_like_the_one_in_which_the_middle_byte_travels(sizes: list[int], middle: int) -> None:
    stops = [sum(sizes[: number + 1]) * 1000 for number in range(len(sizes))]
    cuts = tuple(Cut(stop=stop) for stop in stops)
    found = with_uniform_units(PLAIN.but(cuts=cuts), 64)
    assert found == PLAIN.but(unit_bytes=bounded(middle * 1000 * 64))


def test_the_number_of_streams_keeps_the_link_busy() -> None:
    # There the second stream adds nothing, so one has to move, and 1 ms at 1e8 bytes/s is a tenth of a 1-MiB unit.
    there, here = link(1e8, 1e8), link(1e8, 2e8, 3e8, 4e8, 4e8, 4e8, 4e8, 4e8)
    wanted_there, wanted_here = 1 + 1e5 / MIB, 4 + 4e5 / MIB
    found = scaled_streams(PLAIN.but(streams=2), there, here, unit_bytes=MIB)
    assert found == round(2 * wanted_here / wanted_there) == 8
    assert scaled_streams(PLAIN.but(streams=8), here, there, unit_bytes=MIB) == 2
    assert scaled_streams(PLAIN.but(streams=1), here, there, unit_bytes=MIB) == 1  # never none


def test_smaller_units_need_more_streams_while_others_start_up() -> None:
    here = link(1e8, 2e8, 2e8, 2e8, 2e8, 2e8, alpha_s=10e-3)
    wanted = [2 + 10e-3 * 2e8 / unit_bytes for unit_bytes in (MIB, MIB // 2)]
    found = scaled_streams(PLAIN.but(streams=3), here, here, unit_bytes=MIB // 2)
    assert found == round(3 * wanted[1] / wanted[0]) == 4


def test_at_most_the_measured_number_of_streams_is_proposed_and_existing_ones_are_kept() -> None:
    there, here = link(1e8, 1e8), link(1e8, 2e8, 3e8)
    assert scaled_streams(PLAIN.but(streams=2), there, here, unit_bytes=MIB) == 3
    assert scaled_streams(PLAIN.but(streams=6), there, here, unit_bytes=MIB) == 6
