"""Rows of an entry: kept once, found by the beginning of an id, and read only if they are sound."""

import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from conformance.graphs import chain_graph
from conformance.store import make_entry, make_way
from sqlalchemy import Connection, create_engine, text

from sirtaki.errors import RegistryError
from sirtaki.registry import sql_store as sql_rows
from sirtaki.registry.sql_store import (
    compressed,
    delete_orphans,
    entries,
    expanded,
    find,
    load,
    migrate,
    parsed,
    row_ways,
    save_row,
    save_way,
)


@pytest.fixture
def connection() -> Iterator[Connection]:
    with create_engine("sqlite://").connect() as there:
        migrate(there)
        yield there


def count(connection: Connection, table: str) -> int:
    number: int = connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
    return number


def test_an_entry_comes_back_as_it_was_and_its_graphs_are_kept_once(connection: Connection) -> None:
    one, other = make_entry(), make_entry(ranks=6)
    assert save_row(connection, one, None)
    assert save_row(connection, other, None)
    assert sorted(load(connection, [one.id, other.id]), key=lambda entry: entry.id) == sorted(
        [one, other], key=lambda entry: entry.id
    )
    assert [count(connection, table) for table in ("entries", "models", "signatures", "topologies")] == [2, 1, 1, 2]
    assert list(load(connection, [])) == []
    assert list(load(connection, ["nobody"])) == []


def test_what_is_there_stays_unless_the_new_one_is_better_or_it_was_disproved(connection: Connection) -> None:
    good, worse = make_entry(best_span_s=0.5), make_entry(best_span_s=0.9, streams=8)
    better = make_entry(best_span_s=0.3, created_s=1.7e9 + 1)
    assert save_row(connection, good, None)
    assert not save_row(connection, worse, None)
    assert list(load(connection, [good.id])) == [good]
    assert not save_row(connection, worse, better)  # another one was disproved
    assert save_row(connection, worse, good)
    assert list(load(connection, [good.id])) == [worse]
    assert save_row(connection, better, None)
    assert list(load(connection, [good.id])) == [better]
    assert count(connection, "entries") == 1


@pytest.mark.parametrize("table", ["models", "topologies", "entries"])
def test_what_is_damaged_is_replaced_with_a_word_about_it(
    table: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    entry = make_entry()
    save_row(connection, entry, None)
    connection.execute(text(f"UPDATE {table} SET body = 'x'"))
    with pytest.raises(RegistryError, match="is damaged"):
        list(load(connection, [entry.id]))
    with caplog.at_level(logging.WARNING):
        assert save_row(connection, make_entry(best_span_s=0.9), None)  # worse, but whole
    assert f"entry {entry.id} cannot be read and is replaced" in caplog.text
    (found,) = load(connection, [entry.id])
    assert found.best_span_s == 0.9


def test_a_graph_that_others_use_is_not_written_again(connection: Connection) -> None:
    save_row(connection, make_entry(), None)
    connection.execute(text("UPDATE models SET body = x'00'"))
    save_row(connection, make_entry(ranks=6), None)
    assert connection.execute(text("SELECT body FROM models")).scalar_one() == b"\x00"


def test_an_entry_under_the_id_of_another_job_is_not_believed(connection: Connection) -> None:
    save_row(connection, make_entry(), None)
    connection.execute(text("UPDATE entries SET id = 'stolen'"))
    with pytest.raises(RegistryError, match="it is of another job"):
        list(load(connection, ["stolen"]))


def test_an_id_is_found_by_its_beginning_if_that_is_one_entrys(connection: Connection) -> None:
    for name in ("abc", "abd", "a%x"):
        save_row(connection, make_entry(), None)
        connection.execute(text("UPDATE entries SET id = :name WHERE length(id) > 3"), {"name": name})
    assert find(connection, "abc") == (entries, "abc")
    assert find(connection, "a%") == (entries, "a%x")  # no pattern
    for prefix, words in (("ab", "several ids begin"), ("z", "no entry has"), ("", "several")):
        with pytest.raises(RegistryError, match=words):
            find(connection, prefix)
    connection.execute(text("DELETE FROM entries WHERE id != 'abc'"))
    with pytest.raises(RegistryError, match="several ids begin with ''"):
        find(connection, "")


def test_an_id_may_be_that_of_an_entry_or_a_way_of_rows(connection: Connection) -> None:
    for table in ("entries", "row_ways"):
        save = save_row(connection, make_entry(), None) if table == "entries" else save_way(connection, make_way())
        assert save
        connection.execute(text(f"UPDATE {table} SET id = :name"), {"name": f"ab {table}"})
    both = (entries, row_ways)
    assert find(connection, "ab r", tables=both) == (row_ways, "ab row_ways")
    assert find(connection, "ab") == (entries, "ab entries")
    with pytest.raises(RegistryError, match="several ids begin"):
        find(connection, "ab", tables=both)
    with pytest.raises(RegistryError, match=r"no entry or way of rows has .* and `sirtaki registry rows`"):
        find(connection, "z", tables=both)


def test_what_no_entry_uses_goes_and_distances_with_it(connection: Connection) -> None:
    kept, gone = make_entry(), make_entry(model=chain_graph([7]), ranks=6)
    for entry in (kept, gone):
        save_row(connection, entry, None)
    for low, high in ((kept.key.model, gone.key.model), (gone.key.model, kept.key.model), (kept.key.model,) * 2):
        connection.execute(text("INSERT INTO distances VALUES (:a, :b, 0.5)"), {"a": low, "b": high})
    connection.execute(text("PRAGMA foreign_keys = ON"))
    connection.execute(text("DELETE FROM entries WHERE id = :id"), {"id": gone.id})
    delete_orphans(connection)
    assert [count(connection, table) for table in ("entries", "models", "topologies", "distances")] == [1, 1, 1, 1]
    assert list(load(connection, [kept.id])) == [kept]


def test_a_body_is_smaller_and_comes_back() -> None:
    data = {"nodes": [["Add", "", 3]] * 500}
    assert len(compressed(data)) < 200
    assert expanded(compressed(data)) == data


def test_what_cannot_be_expanded_or_parsed_is_said_to_be_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    for body in (b"garbage", "text", None):
        with pytest.raises(RegistryError, match="a stored graph is damaged"):
            expanded(body)  # type: ignore[arg-type]
    for broken in ("{", b"\xff", None, "[" * 100_000):
        with pytest.raises(RegistryError, match="a stored entry is damaged"):
            parsed(broken)  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match="a stored entry is damaged"):
        expanded(zlib.compress(b"{"))
    monkeypatch.setattr(sql_rows, "_MAX_GRAPH_BYTES", 1000)
    assert expanded(zlib.compress(json.dumps("x" * 998).encode())) == "x" * 998
    with pytest.raises(RegistryError, match="more than 1000 bytes"):
        expanded(zlib.compress(b"0" * 100_000))


def test_a_row_says_in_columns_what_lists_show(connection: Connection) -> None:
    entry = make_entry(n_trials=33)
    save_row(connection, replace(entry, arm="libra"), None)
    row = connection.execute(text("SELECT * FROM entries")).mappings().one()
    assert (row["id"], row["arm"], row["n_trials"], row["world_size"]) == (entry.id, "libra", 33, 4)
    assert (row["created_s"], row["model_name"]) == (1.7e9, "Réseau")
