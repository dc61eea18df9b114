"""Checks of the contract that every registry store must meet, for every database."""

import copy
import logging
import math
import sqlite3
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conformance.graphs import chain_graph
from msgspec import structs
from rank_jobs import cases

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.autotune.sharded import ShardKnobs
from sirtaki.autotune.trial import Trial, TrialStatus
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.errors import RegistryError
from sirtaki.measures import LinkModel
from sirtaki.registry.cluster import Topology
from sirtaki.registry.graph import WIDTH, ModelGraph, signature
from sirtaki.registry.schema import (
    JobRecord,
    Provenance,
    RowsKey,
    RowsRecord,
    ShardsKey,
    ShardsRecord,
    Skew,
    StoredSetting,
    make_key,
)
from sirtaki.registry.store import Store

KNOBS = Knobs(
    unit_bytes=1 << 20,
    streams=4,
    transport=TransportKind.GLOO,
    cuts=(Cut(stop=10), Cut(stop=25, stream=3, threads=512)),
)
TRIAL = Trial(arm="grid", knobs=KNOBS, iterations=2, span_s=math.inf, status=TrialStatus.FAILED)


def run_sql(path: Path, *statements: str) -> list[Any]:
    """Run SQL statements, and return the rows of the last one."""
    connection = sqlite3.connect(path)
    for statement in statements:
        found = connection.execute(statement).fetchall()
    connection.commit()
    connection.close()
    return found


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def places_in(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON document."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in items for place in places_in(value, (*path, key)))]


def changed_in(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of the document with another value at the path."""
    if not path:
        return value
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


def make_entry(
    *,
    model: ModelGraph | None = None,
    ranks: int = 4,
    best_span_s: float = 0.5,
    default_span_s: float = 1.0,
    n_trials: int = 20,
    complete: bool = True,
    created_s: float = 1.7e9,
    streams: int = 4,
) -> JobRecord:
    """Return an entry with every field filled."""
    model = model or chain_graph([100, 20, 3])
    topology = Topology.from_ranks([f"host{rank // 2}" for rank in range(ranks)])
    return JobRecord(
        key=make_key(
            model,
            topology,
            dtype="float32",
            device="cpu",
            versions={"sirtaki": "0.1"},
            gradients="cd" * 16,
            fixed={"transport": "gloo"},
        ),
        model=model,
        topology=topology,
        knobs=KNOBS.but(streams=streams),
        best_span_s=best_span_s,
        default_span_s=default_span_s,
        noise_s=0.01,
        n_trials=n_trials,
        arm="grid",
        complete=complete,
        layout="ab" * 16,
        trials=(TRIAL,),
        link=LinkModel(alpha_s=1e-4, throughput=(1e8, 1.9e8)),
        provenance=Provenance(
            created_s=created_s, model_name="Réseau", host_kinds=("", "c5"), versions={"torch": "2.13"}
        ),
    )


def finds_what_was_saved(store: Store) -> None:
    entry = make_entry()
    assert store.get(JobRecord, entry.key) is None
    assert store.put(entry)
    assert store.get(JobRecord, entry.key) == entry
    assert store.find(JobRecord, entry.id[:6]) == entry
    assert list(store.all(JobRecord)) == [entry]


def keeps_keys_apart(store: Store) -> None:
    entry = make_entry()
    store.put(entry)
    for key in (
        structs.replace(entry.key, world_size=8),
        structs.replace(entry.key, dtype="float16"),
        structs.replace(entry.key, device="cuda"),
        structs.replace(entry.key, versions={"sirtaki": "0.2"}),
        structs.replace(entry.key, gradients="ab"),
        structs.replace(entry.key, fixed={"streams": "4"}),
        make_entry(ranks=6).key,
        make_entry(model=chain_graph([100, 20, 4])).key,
    ):
        assert store.get(JobRecord, key) is None


def a_worse_entry_does_not_replace_a_better_one(store: Store) -> None:
    better, worse = make_entry(best_span_s=0.5), make_entry(best_span_s=0.8, created_s=1.7e9 + 1, streams=8)
    assert store.put(better)
    assert not store.put(worse)
    assert store.get(JobRecord, better.key) == better


def what_a_job_has_disproved_gives_way_to_a_worse_one(store: Store) -> None:
    claimed, found = make_entry(best_span_s=0.2), make_entry(best_span_s=0.9, created_s=1.7e9 + 1, streams=8)
    assert store.put(claimed)
    # Meanwhile another job has stored another setting.
    assert not store.put(found, disproved=make_entry(best_span_s=0.3))
    assert store.put(found, disproved=claimed)
    assert store.get(JobRecord, claimed.key) == found


def lists_newest_first(store: Store) -> None:
    for number in range(3):
        store.put(make_entry(model=chain_graph([number + 1]), created_s=1.7e9 + number))
    summaries = store.summaries()
    assert [summary.created_s for summary in summaries] == [1.7e9 + 2, 1.7e9 + 1, 1.7e9]
    assert summaries[0].model_name == "Réseau"
    assert summaries[0].complete is True


def an_ambiguous_or_unknown_id_is_refused(store: Store) -> None:
    for number in range(17):  # two of them have the same first 16 digits
        store.put(make_entry(model=chain_graph([number + 1])))
    ids = sorted(summary.id for summary in store.summaries())
    shared = next(a[0] for a, b in pairwise(ids) if a[0] == b[0])
    for prefix, message in (
        (shared, "several"),
        ("zz", "but matches none"),
        ("%", "but matches none"),
        ("", "several"),
    ):
        with pytest.raises(RegistryError, match=message):
            store.find(JobRecord, prefix)
        with pytest.raises(RegistryError, match=message):
            store.forget(prefix)
    assert len(store.summaries()) == 17


def forgetting_removes_what_only_that_entry_used(store: Store) -> None:
    kept, gone = make_entry(), make_entry(model=chain_graph([7, 7]), ranks=6)
    store.put(kept)
    store.put(gone)
    store.save_distances(kept.key.model, {gone.key.model: 0.5})
    assert store.forget(gone.id) == gone.id
    assert store.get(JobRecord, kept.key) == kept
    assert store.signatures()[0] == [kept.key.model]
    found = store.models([kept.key.model, gone.key.model])
    assert {name: graph.labels for name, graph in found.items()} == {kept.key.model: kept.model.labels}
    assert store.shapes() == {kept.key.topology: kept.topology.shape()}
    assert store.distances(kept.key.model) == {}


def prunes_by_age_and_by_count(store: Store) -> None:
    now_s = round(time.time())
    for number in range(6):
        store.put(make_entry(model=chain_graph([number + 1]), created_s=now_s + number))
    store.put(make_entry(model=chain_graph([99]), created_s=1.0))
    assert store.prune(older_than_s=3600.0) == 1
    assert store.prune(keep=4) == 2
    assert [summary.created_s for summary in store.summaries()] == [now_s + number for number in (5, 4, 3, 2)]
    assert store.prune(keep=0) == 4
    assert store.summaries() == []
    assert store.signatures()[1].shape == (0, WIDTH)


def keeps_signatures_beside_graphs(store: Store) -> None:
    entry = make_entry()
    store.put(entry)
    names, signatures = store.signatures()
    assert names == [entry.key.model]
    assert (signatures[0] == signature(entry.model)).all()


def keeps_distances_in_both_directions(store: Store) -> None:
    first, second = make_entry(), make_entry(model=chain_graph([1]))
    store.save_distances(first.key.model, {second.key.model: 0.25})
    store.save_distances(second.key.model, {first.key.model: 0.5})
    assert store.distances(first.key.model) == {second.key.model: 0.5}
    assert store.distances(second.key.model) == {first.key.model: 0.5}


def refuses_what_it_could_not_read_again(store: Store) -> None:
    entry = make_entry()
    with pytest.raises(RegistryError, match="streams"):
        store.put(structs.replace(entry, knobs=KNOBS.but(streams=5000)))
    assert store.summaries() == []


def make_way(*, ranks: int = 4, created_s: float = 1.7e9) -> RowsRecord:
    """Return a record of a sparse algorithm with every field filled."""
    key = RowsKey(
        topology="ab" * 32,
        ranks=ranks,
        n_rows=1000,
        row_bytes=64,
        dtype="float32",
        versions={"sirtaki": "0.1"},
        fixed={"streams": "2"},
    )
    return RowsRecord(
        key=key,
        name="table.weight",
        skew=Skew(touched=200.0, union=150.0, curve=((1, 0.1), (30, 0.7), (400, 1.0))),
        path=SparsePath.HOT_COLD,
        cold=SparsePath.OWNER,
        block_rows=1,
        n_hot=30,
        span_s=0.01,
        created_s=created_s,
    )


def make_shard_way(*, ranks: int = 4, created_s: float = 1.7e9) -> ShardsRecord:
    """Return a record of a sharded training's setting with every field filled."""
    key = ShardsKey(
        topology="ab" * 32,
        ranks=ranks,
        model="cd" * 16,
        transport="gloo",
        versions={"sirtaki": "0.1"},
        fixed={"streams": "2"},
    )
    return ShardsRecord(
        key=key,
        memory_bytes=2**20,
        modules=9,
        setting=ShardKnobs(streams=2, ahead=3, kept=(0, 1, 2, 3, 4), near=(5, 7), joined=(2,)),
        gain=0.25,
        created_s=created_s,
    )


def with_setting(record: ShardsRecord, *, created_s: float, **changes: Any) -> ShardsRecord:
    return structs.replace(record, setting=replace(record.setting, **changes), created_s=created_s)


def keeps_settings_of_sharded_training_beside_ways_of_rows(store: Store) -> None:
    way, ways = make_way(), [make_shard_way(), make_shard_way(ranks=8, created_s=1.71e9)]
    assert store.put_all([way, *ways]) == 3
    more = structs.replace(ways[0], memory_bytes=2**30, created_s=1.69e9)
    assert store.put(more)
    assert list(store.all(ShardsRecord, ways[0].key)) == [ways[0], more]
    assert list(store.all(ShardsRecord)) == [ways[1], ways[0], more]
    assert list(store.all(RowsRecord)) == [way]
    assert store.put(newer := with_setting(ways[0], kept=(), created_s=1.72e9))
    assert not store.put(ways[0])
    assert store.find(StoredSetting, ways[0].id[:12]) == newer
    for wrong in ((0,), (9,), (3, 3), (3, 2)):
        with pytest.raises(RegistryError, match="joined must be"):
            store.put(with_setting(ways[0], joined=wrong, created_s=1.73e9))
    for wrong in ((9,), (3, 3), (7,)):
        with pytest.raises(RegistryError, match="kept and near must be"):
            store.put(with_setting(ways[0], kept=wrong, created_s=1.73e9))
    assert store.forget(more.id) == more.id
    assert store.prune(keep=1) == 1
    assert (list(store.all(ShardsRecord)), list(store.all(RowsRecord))) == ([newer], [way])


def saves_all_entries_and_ways_or_none(store: Store) -> None:
    with pytest.raises(RegistryError, match="n_hot"):
        store.put_all([make_entry(), make_way(), structs.replace(make_way(ranks=8), n_hot=0)])
    assert store.summaries() == []
    assert list(store.all(RowsRecord)) == []


def finds_and_forgets_ways_of_rows_by_their_id(store: Store) -> None:
    entry, way = make_entry(), make_way()
    store.put_all([entry, way])
    assert store.find(StoredSetting, way.id[:12]) == way
    assert store.find(StoredSetting, entry.id[:12]) == entry
    with pytest.raises(RegistryError, match="but matches none"):
        store.find(JobRecord, way.id)
    for look in (partial(store.find, StoredSetting), store.forget):
        with pytest.raises(RegistryError, match=r"must match one stored tuning result \(entry or way of rows"):
            look("zz")
        with pytest.raises(RegistryError, match="several"):
            look("")
    assert store.forget(way.id[:12]) == way.id
    assert list(store.all(RowsRecord)) == []
    assert store.find(JobRecord, entry.id) == entry


CHECKS = cases(globals(), "store")
