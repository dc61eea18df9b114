"""Ways of rows in an SQL store."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Connection, create_engine, update

from sirtaki.errors import RegistryError
from sirtaki.registry import sql_store as sql_row_ways
from sirtaki.registry.entry import RowsKey, RowWay, Skew
from sirtaki.registry.graph import canonical_json
from sirtaki.registry.sql_store import load_way, load_ways, migrate, row_ways, save_way

WAY = RowWay(
    key=RowsKey(topology="a", ranks=2, n_rows=10, row_bytes=4, dtype="float32"),
    name="table",
    skew=Skew(touched=4.0, union=3.0, curve=((1, 0.5), (2, 1.0))),
    path="gather",
    cold="gather",
    block_rows=1,
    n_hot=0,
    span_s=0.1,
    created_s=1.7e9,
)
OTHER = replace(WAY, key=replace(WAY.key, ranks=3), created_s=1.75e9)


@pytest.fixture
def connection() -> Iterator[Connection]:
    with create_engine("sqlite://").connect() as there:
        migrate(there)
        yield there


def test_ways_of_a_key_are_found_and_all_newest_first(connection: Connection) -> None:
    for way in (WAY, OTHER):
        save_way(connection, way)
    assert load_ways(connection, WAY.key) == [WAY]
    assert load_ways(connection, None) == [OTHER, WAY]


def test_the_newer_of_two_stays(connection: Connection) -> None:
    assert save_way(connection, WAY)
    assert save_way(connection, newer := replace(WAY, path="owner", created_s=1.71e9))
    assert not save_way(connection, WAY)
    assert not save_way(connection, newer)
    assert load_ways(connection, None) == [newer]


@pytest.mark.parametrize("body", ["{", canonical_json(WAY.to_json())], ids=["no JSON", "of other rows"])
def test_a_damaged_one_hides_no_others_and_gives_way(
    connection: Connection, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    for way in (WAY, OTHER):
        save_way(connection, way)
    connection.execute(update(row_ways).where(row_ways.c.id == OTHER.id).values(body=body))
    assert load_ways(connection, None) == [WAY]
    assert f"way of rows {OTHER.id} in the registry is left out" in caplog.text
    with pytest.raises(RegistryError, match=r"is damaged \(.*\): forget it"):
        load_way(connection, OTHER.id)
    assert save_way(connection, OTHER)
    assert load_ways(connection, None) == [OTHER, WAY]


def test_what_cannot_be_read_again_is_not_written(connection: Connection) -> None:
    with pytest.raises(RegistryError, match="path"):
        save_way(connection, replace(WAY, path="by air"))
    assert load_ways(connection, None) == []


def test_of_one_key_the_newest_are_looked_at_and_in_all_none_is_missing(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_row_ways, "MOST_WAYS", 2)
    ways = [replace(WAY, name=str(number), created_s=1.7e9 - number) for number in range(3)]
    for way in ways:
        save_way(connection, way)
    assert load_ways(connection, WAY.key) == ways[:2]
    assert load_ways(connection, None) == ways
