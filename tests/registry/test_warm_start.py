from dataclasses import replace
from pathlib import Path

import pytest
from conformance.graphs import chain_graph
from conformance.store import KNOBS, make_entry
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel
from sirtaki.registry.entry import Entry, checked_knobs
from sirtaki.registry.graph import Graph
from sirtaki.registry.safe_store import open_store
from sirtaki.registry.store import Store
from sirtaki.registry.topology import Topology
from sirtaki.registry.warm_start import Job, Neighbour, Permitted, WarmStart, adapted, adapted_all, nearest, neighbours

UNIFORM = {**KNOBS, "cuts": None}
ROUTE = ("gloo", "flat")
LINK = LinkModel(alpha_s=1e-4, throughput=(1e9, 2e9, 3e9, 3.9e9, 4e9, 4e9, 4e9, 4e9))


def job_like(entry: Entry, *, model: Graph | None = None, ranks: int | None = None, **changes: object) -> Job:
    model = model or entry.model
    topology = entry.topology if ranks is None else Topology.from_ranks([f"host{rank // 2}" for rank in range(ranks)])
    key = replace(entry.key, model=model.fingerprint(), topology=topology.fingerprint(), world_size=topology.world_size)
    job = Job(key=key, model=model, topology=topology, layout=entry.layout, name="Net")
    return replace(job, **changes)  # type: ignore[arg-type]


def suited(entry: Entry, *, distance: float = 0.1, **changes: object) -> WarmStart:
    return adapted(Neighbour(entry=entry, distance=distance), job_like(entry, **changes))  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "r.db"))


def warm_starts(store: Store, job: Job) -> list[WarmStart]:
    return adapted_all(neighbours(store, job), job)


def test_an_empty_registry_gives_nothing(store: Store) -> None:
    assert warm_starts(store, job_like(make_entry())) == []


def test_a_jobs_own_entry_is_not_its_neighbour_and_takes_no_place(store: Store) -> None:
    own = make_entry()
    store.save_all([own, *(make_entry(ranks=ranks) for ranks in (5, 6, 7))])
    found = neighbours(store, job_like(own), k=3)
    assert len(found) == 3
    assert own.id not in {neighbour.entry.id for neighbour in found}


def test_a_jobs_own_entry_is_explained_as_such() -> None:
    start = suited(make_entry(), distance=0.0)
    assert start.knobs == KNOBS
    assert start.explanation == (
        "Net on 4 ranks on 2 hosts: starting from what an earlier job found, 2.00× faster than the default"
    )
    assert "cut short" in suited(make_entry(complete=False)).explanation


def test_a_similar_entry_is_explained(store: Store) -> None:
    store.save(make_entry(model=chain_graph([100] * 10)))
    (start,) = warm_starts(store, job_like(make_entry(), model=chain_graph([100] * 11), ranks=8))
    assert 0 < start.distance < 0.6
    assert start.explanation.startswith(
        f"Net on 8 ranks on 4 hosts: starting from what a similar job found, "
        f"Réseau on 4 ranks on 2 hosts, distance {start.distance:.2f} of 1"
    )


def test_strangers_are_no_help(store: Store) -> None:
    store.save(make_entry(model=chain_graph([1])))
    assert warm_starts(store, job_like(make_entry(), model=chain_graph(range(1, 40)))) == []


def test_nearer_entries_come_first_and_equal_knobs_once(store: Store) -> None:
    for ranks, streams in ((6, 4), (16, 2), (5, 4)):
        knobs = {**UNIFORM, "streams": streams}
        store.save(replace(make_entry(ranks=ranks), knobs=knobs, link=None))
    starts = warm_starts(store, job_like(make_entry()))
    assert [start.knobs["streams"] for start in starts] == [4, 2]
    assert starts[0].entry.key.world_size in (5, 6)
    assert starts[0].distance < starts[1].distance


def test_of_equally_similar_jobs_that_on_the_most_similar_link_comes_first(store: Store) -> None:
    """The key knows no measured link: other models of a cluster are looked through for theirs."""
    own = make_entry(model=chain_graph([100] * 10))
    for number, rate in enumerate((1e10, 1e7, 1e8, 1e9)):
        other = make_entry(model=chain_graph([100] * 9 + [101 + number]))
        store.save(replace(other, knobs=UNIFORM, link=LinkModel(alpha_s=1e-4, throughput=(rate,))))
    key = own.key
    # Distances that are known take no time, so that none is left out where the machine is busy.
    nearest(store, own.model, own.topology, dtype=key.dtype, device=key.device, budget_s=60.0)
    for here, order in ((1e7, [1e7, 1e8, 1e9]), (1e10, [1e10, 1e9, 1e8])):
        link = LinkModel(alpha_s=1e-4, throughput=(here,))
        found = neighbours(store, job_like(own, links={ROUTE: link}))
        assert [neighbour.entry.link.throughput[0] for neighbour in found if neighbour.entry.link] == order
        assert found[0].distance < found[1].distance < found[2].distance


def test_of_what_a_job_has_found_under_other_conditions_that_of_the_link_as_it_is_now_comes_first(store: Store) -> None:
    own = replace(make_entry(), knobs=UNIFORM, link=LINK)
    links = {"4×": replace(LINK, throughput=(2.5e8, 5e8)), "0.25×": replace(LINK, throughput=(4e9, 8e9))}
    for condition, link in links.items():
        store.save(replace(own, key=replace(own.key, condition=condition), link=link))
    for condition, link in links.items():
        nearest, other = neighbours(store, job_like(own, links={ROUTE: link}))
        assert nearest.entry.key.condition == condition
        assert nearest.distance == 0.0 < other.distance


def test_a_link_that_was_not_measured_takes_no_job_farther_away(store: Store) -> None:
    store.save(replace(make_entry(ranks=8), link=None))
    job = job_like(make_entry())
    known = replace(job, links={ROUTE: LINK})
    assert neighbours(store, job) == neighbours(store, known)


def test_the_same_link_under_more_ranks_is_no_other_link(store: Store) -> None:
    store.save(replace(make_entry(ranks=16), knobs=UNIFORM, link=LINK.rescaled(from_ranks=4, to_ranks=16)))
    job = job_like(make_entry())
    assert neighbours(store, replace(job, links={ROUTE: LINK})) == neighbours(store, job)


def test_cuts_carry_over_to_the_same_layout_only() -> None:
    entry = make_entry()
    assert suited(entry).knobs["cuts"] == KNOBS["cuts"]
    assert not suited(entry).lost_cuts
    for layout in ("", "other"):
        start = suited(replace(entry, link=None), layout=layout)
        assert start.knobs["cuts"] is None
        assert start.knobs["unit_bytes"] == SMALLEST_UNIT_BYTES
        assert start.lost_cuts
        assert "do not fit this layout" in start.explanation


def test_cuts_that_fit_the_layout_do_not_carry_over_to_a_very_different_link() -> None:
    entry = replace(make_entry(), link=LINK)
    start = suited(entry, links={ROUTE: replace(LINK, alpha_s=1e-2)})
    assert start.lost_cuts
    assert "do not fit this link" in start.explanation


def test_cuts_that_do_not_fit_leave_the_size_and_threads_of_the_unit_with_the_middle_byte() -> None:
    cuts = [[10, 0, None], [100_010, 1, None], [200_010, 2, 512], [1_000_010, 3, 1024]]  # 800 000 carry the most
    entry = replace(make_entry(), knobs={**KNOBS, "cuts": cuts}, link=None)
    start = suited(entry, layout="other", itemsize_bytes=2)
    assert start.knobs["unit_bytes"] == 1_600_000
    assert start.knobs["threads"] == 1024


def test_nothing_is_scaled_for_the_same_link() -> None:
    entry = replace(make_entry(), knobs=UNIFORM, link=LINK)
    start = suited(entry, links={ROUTE: replace(LINK, alpha_s=1.2e-4)})
    assert start.knobs == UNIFORM
    assert ";" not in start.explanation


def test_units_grow_with_the_root_of_what_one_latency_is_worth() -> None:
    entry = replace(make_entry(), knobs=UNIFORM, link=LINK)
    start = suited(entry, links={ROUTE: replace(LINK, alpha_s=4e-4)})
    assert start.knobs["unit_bytes"] == 2 * UNIFORM["unit_bytes"]
    assert "this link has its latency × 4 and its bandwidth × 1; units 2 times as large" in start.explanation


def test_units_grow_with_the_root_of_the_models_size() -> None:
    entry = replace(make_entry(model=chain_graph([100] * 10)), knobs=UNIFORM, link=LINK)
    start = suited(entry, model=chain_graph([400] * 10))
    assert start.knobs["unit_bytes"] == 2 * UNIFORM["unit_bytes"]


def test_without_a_measurement_the_ring_tells_what_more_ranks_cost() -> None:
    """A ring of 16 takes 5 times the steps of one of 4 and moves 1.25 times the bytes: 4 times the latency's worth."""
    entry = replace(make_entry(), knobs=UNIFORM, link=LINK)
    for link in (LINK, None):
        start = suited(replace(entry, link=link), ranks=16)
        assert start.knobs["unit_bytes"] == 2 * UNIFORM["unit_bytes"]
        assert "latency" not in start.explanation  # nobody has measured it here


def test_a_link_that_one_stream_fills_gets_one_stream() -> None:
    entry = replace(make_entry(), knobs=UNIFORM, link=LINK)
    flat = replace(LINK, throughput=(1e9, 1e9, 1e9))
    start = suited(entry, links={ROUTE: flat})
    assert start.knobs["streams"] == 1
    assert "streams 1 instead of 4" in start.explanation
    assert suited(entry, links={ROUTE: replace(LINK, throughput=(1e9,))}).knobs["streams"] == 4


def test_streams_that_start_up_for_longer_get_company() -> None:
    """A unit starts up for 20 times as long as it takes to send: many more streams than there keep the link busy."""
    entry = replace(make_entry(), knobs={**UNIFORM, "streams": 1}, link=LINK)
    slow = replace(LINK, alpha_s=20 * UNIFORM["unit_bytes"] / LINK.throughput[0])
    start = suited(entry, links={ROUTE: slow})
    assert 1 < start.knobs["streams"] <= len(LINK.throughput)


def test_only_what_is_permitted_is_proposed() -> None:
    entry = replace(make_entry(), knobs={**UNIFORM, "threads": 700, "streams": 7}, link=LINK)
    permitted = Permitted(
        routes=(("mpi", "flat"),), streams=(1, 2, 4, 8), unit_bytes=(1 << 16, 1 << 18), threads=(512, 1024)
    )
    start = suited(entry, permitted=permitted)
    wanted = {"transport": "mpi", "streams": 8, "unit_bytes": 1 << 18, "threads": 512}
    assert {name: start.knobs[name] for name in wanted} == wanted
    assert "over mpi flat, as gloo flat is left out here" in start.explanation
    assert suited(entry, permitted=replace(permitted, threads=(None,))).knobs["threads"] is None
    unthreaded = replace(entry, knobs=UNIFORM)
    assert suited(unthreaded, permitted=permitted).knobs["threads"] == 512


@given(
    st.floats(1e-9, 10),
    st.floats(1, 1e12),
    st.lists(st.floats(0.1, 30), min_size=1, max_size=24),
    st.integers(1, 4096),
)
def test_scaled_knobs_stay_in_range(latency_s: float, speed: float, gains: list[float], ranks: int) -> None:
    entry = replace(make_entry(), knobs=UNIFORM, link=LINK)
    link = LinkModel(alpha_s=latency_s, throughput=tuple(speed * gain for gain in gains))
    for changes in ({"links": {ROUTE: link}}, {"ranks": ranks}):
        knobs = suited(entry, **changes).knobs  # type: ignore[arg-type]
        assert SMALLEST_UNIT_BYTES <= knobs["unit_bytes"] <= LARGEST_UNIT_BYTES
        assert 1 <= knobs["streams"] <= 24


SPEEDS = st.floats(1e-12, 1e18)  # what an import may bring
LINKS = st.none() | st.builds(
    LinkModel,
    alpha_s=st.just(0.0) | SPEEDS,
    throughput=st.lists(st.floats(1e-9, 1e18), min_size=1, max_size=4).map(tuple),
    host_s=st.just(0.0) | SPEEDS,
)
CUTS = st.none() | st.lists(st.integers(1, 2**48), unique=True, max_size=4).map(
    lambda stops: [[stop, 0, None if stop % 2 else 512] for stop in sorted(stops)]
)


@given(LINKS, LINKS, CUTS, st.integers(1, 2**40), st.integers(1, 1024), st.sampled_from([1, 4, 60_000]))
def test_whatever_an_import_brings_can_be_adapted(
    there: LinkModel | None,
    here: LinkModel | None,
    cuts: list[list[int | None]] | None,
    unit_bytes: int,
    streams: int,
    ranks: int,
) -> None:
    knobs = checked_knobs("knobs", {**KNOBS, "unit_bytes": unit_bytes, "streams": streams, "cuts": cuts})
    entry = replace(make_entry(), knobs=knobs, link=there)
    permitted = Permitted(routes=(ROUTE,), streams=(1, 2, 4))
    job = job_like(entry, links={} if here is None else {ROUTE: here}, layout="other", permitted=permitted)
    entry = replace(entry, key=replace(entry.key, world_size=ranks))
    knobs = dict(adapted(Neighbour(entry=entry, distance=0.1), job).knobs)
    assert knobs == permitted.nearest(knobs)
    assert knobs["cuts"] is None
