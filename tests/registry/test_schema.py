"""A schema of any age is brought up to date, all of it or nothing; one of the future is refused."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, create_engine, inspect, select, text

from sirtaki.errors import RegistryError
from sirtaki.registry import sql_store as schema
from sirtaki.registry.sql_store import MIGRATIONS, check_version, metadata, migrate, version_of


@pytest.fixture
def connection() -> Iterator[Connection]:
    with create_engine("sqlite://").connect() as there:
        yield there


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def test_an_empty_database_gets_every_table_and_a_second_time_changes_nothing(connection: Connection) -> None:
    assert version_of(connection) == 0
    migrate(connection)
    assert version_of(connection) == len(MIGRATIONS)
    assert tables(connection) == set(metadata.tables)
    connection.execute(text("INSERT INTO models VALUES ('a', x'00')"))
    migrate(connection)
    assert connection.execute(select(schema.models.c.fingerprint)).scalar_one() == "a"
    assert connection.execute(text("SELECT count(*) FROM sirtaki_schema")).scalar_one() == 1


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_what_is_missing_is_added_to_an_older_one(
    version: int, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", MIGRATIONS[:version])
        migrate(connection)
    assert version_of(connection) == version
    assert tables(connection) < set(metadata.tables)
    connection.execute(text("INSERT INTO models VALUES ('a', x'00')"))
    migrate(connection)
    assert version_of(connection) == len(MIGRATIONS)
    assert tables(connection) == set(metadata.tables)
    assert connection.execute(select(schema.models.c.fingerprint)).scalar_one() == "a"


def test_migrations_run_in_order_and_each_once(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    more = [lambda connection, number=number: ran.append(number) for number in range(3)]
    migrate(connection)
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, *more[:2]))
    migrate(connection)
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, *more))
    migrate(connection)
    assert ran == [0, 1, 2]
    assert version_of(connection) == len(MIGRATIONS) + 3


def test_a_migration_that_fails_leaves_the_old_version(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(connection: Connection) -> None:
        raise ZeroDivisionError

    migrate(connection)
    connection.commit()
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, fails))
    with pytest.raises(ZeroDivisionError):
        migrate(connection)
    connection.rollback()
    assert version_of(connection) == len(MIGRATIONS)


def test_a_schema_of_the_future_is_refused_and_left_alone(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(connection)
    check_version(len(MIGRATIONS))
    monkeypatch.setattr(schema, "MIGRATIONS", MIGRATIONS[:1])
    refused = rf"has schema {len(MIGRATIONS)}, this release knows up to 1: upgrade .* SIRTAKI_REGISTRY"
    with pytest.raises(RegistryError, match=refused):
        migrate(connection)
    assert version_of(connection) == len(MIGRATIONS)


def test_a_models_signature_goes_with_it(connection: Connection) -> None:
    connection.execute(text("PRAGMA foreign_keys = ON"))
    migrate(connection)
    connection.execute(text("INSERT INTO models VALUES ('a', x'00')"))
    connection.execute(text("INSERT INTO signatures VALUES ('a', 1, x'00')"))
    connection.execute(text("DELETE FROM models"))
    assert connection.execute(text("SELECT count(*) FROM signatures")).scalar_one() == 0
