"""Every error of a database becomes one in words that say what to do."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.exc import ArgumentError, DatabaseError, IntegrityError, OperationalError

from sirtaki.errors import RegistryError
from sirtaki.registry.sql_store import translated
from sirtaki.registry.store import CorruptStoreError

FILE = Path("/somewhere/registry.db")


def told(error: Exception, path: Path | None = FILE) -> RegistryError:
    def fail() -> None:
        with translated("registry.db", path):
            raise error

    with pytest.raises(RegistryError) as caught:
        fail()
    assert caught.value.__cause__ is error
    return caught.value


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'psycopg'"), "registry.db needs a driver that is not installed: No module"),
        (
            OperationalError("INSERT", {}, sqlite3.OperationalError("database is locked")),
            "the registry registry.db cannot be used (database is locked): another process holds it",
        ),
        (
            OperationalError("SELECT", {}, sqlite3.OperationalError("unable to open\n  database file")),
            "cannot be used (unable to open database file): check that it exists and may be read and written, or name "
            "another one in SIRTAKI_REGISTRY",
        ),
        (
            IntegrityError("INSERT", {}, sqlite3.IntegrityError("UNIQUE constraint failed:\nentries.id")),
            "the registry registry.db refused a statement (UNIQUE constraint failed: entries.id)",
        ),
        (ArgumentError("no such dialect"), "cannot be used (no such dialect): name another one in SIRTAKI_REGISTRY"),
        (PermissionError(13, "Permission denied"), "cannot be used ([Errno 13] Permission denied): name another one"),
    ],
)
def test_what_went_wrong_is_told_in_one_line_with_what_to_do(error: Exception, words: str) -> None:
    found = told(error)
    assert words in str(found)
    assert "\n" not in str(found)
    assert type(found) is RegistryError


def test_a_damaged_file_is_told_from_a_statement_that_was_refused() -> None:
    error = DatabaseError("SELECT", {}, sqlite3.DatabaseError("file is not a database"))
    found = told(error)
    assert isinstance(found, CorruptStoreError)
    assert found.path == FILE
    assert "registry.db is not a registry or is damaged (file is not a database)" in str(found)
    assert type(told(error, path=None)) is RegistryError  # a server has no file to put aside
    refused = DatabaseError("SELECT", {}, sqlite3.DataError("too large"))
    assert type(told(refused)) is RegistryError


def test_what_is_no_databases_error_passes() -> None:
    def fail(error: Exception) -> None:
        with translated("registry.db", FILE):
            raise error

    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
    mine = RegistryError("no entry has an id that begins with 'x'")
    with pytest.raises(RegistryError) as caught:
        fail(mine)
    assert caught.value is mine
    with translated("registry.db", FILE):
        pass
