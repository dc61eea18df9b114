"""A SQLite file that many jobs write at once, whatever lies below it."""

import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError

from sirtaki.registry import sql_store as sqlite_file
from sirtaki.registry.sql_store import is_damaged, sqlite_engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a folder with #, ? and é" / "registry.db"
    made.parent.mkdir()
    return made


def make(path: Path) -> None:
    engine = sqlite_engine(path, read_only=False)
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(text("CREATE TABLE kept (x INTEGER)"))
        connection.execute(text("INSERT INTO kept VALUES (0)"))


def pragma(path: Path, name: str) -> object:
    with sqlite_engine(path, read_only=False).connect() as connection:
        return connection.execute(text(f"PRAGMA {name}")).scalar_one()


def test_a_file_with_any_name_is_created_unless_it_is_to_be_read(path: Path) -> None:
    with pytest.raises(OperationalError), sqlite_engine(path, read_only=True).connect():
        pass
    assert not path.exists()
    make(path)
    assert path.is_file()
    with sqlite_engine(path, read_only=True).connect() as connection:
        assert connection.execute(text("SELECT x FROM kept")).scalar_one() == 0
        with pytest.raises(OperationalError, match="readonly"):
            connection.execute(text("INSERT INTO kept VALUES (1)"))


@pytest.mark.parametrize(("on_network", "journal", "synchronous"), [(False, "wal", 1), (True, "delete", 2)])
def test_the_journal_fits_the_file_system_and_can_be_changed(
    on_network: bool, journal: str, synchronous: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (not on_network, on_network):
        monkeypatch.setattr(sqlite_file, "_is_on_network", lambda path, now=now: now)
        pragma(path, "user_version")
    assert pragma(path, "journal_mode") == journal
    assert pragma(path, "synchronous") == synchronous
    assert pragma(path, "foreign_keys") == 1


def test_references_are_held(path: Path) -> None:
    engine = sqlite_engine(path, read_only=False)
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(text("CREATE TABLE a (x INTEGER PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE b (x INTEGER REFERENCES a (x))"))
        with pytest.raises(IntegrityError):
            connection.execute(text("INSERT INTO b VALUES (7)"))


def test_writers_that_read_first_do_not_lose_each_others_changes(path: Path) -> None:
    make(path)
    meeting = threading.Barrier(4)

    def add(times: int) -> None:
        engine = sqlite_engine(path, read_only=False)
        meeting.wait()
        for _ in range(times):
            with engine.connect().execution_options(writes=True) as connection, connection.begin():
                now = connection.execute(text("SELECT x FROM kept")).scalar_one()
                connection.execute(text("UPDATE kept SET x = :x"), {"x": now + 1})

    threads = [threading.Thread(target=add, args=[5]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sqlite_engine(path, read_only=True).connect() as connection:
        assert connection.execute(text("SELECT x FROM kept")).scalar_one() == 20


def test_a_transaction_that_fails_leaves_nothing(path: Path) -> None:
    make(path)

    def fail() -> None:
        engine = sqlite_engine(path, read_only=False)
        with engine.connect().execution_options(writes=True) as connection, connection.begin():
            connection.execute(text("CREATE TABLE half (x INTEGER)"))
            connection.execute(text("UPDATE kept SET x = 9"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with sqlite_engine(path, read_only=True).connect() as connection:
        assert connection.execute(text("SELECT x FROM kept")).scalar_one() == 0
        assert connection.execute(text("SELECT count(*) FROM sqlite_schema")).scalar_one() == 1


def test_readers_see_what_was_there_while_somebody_writes(path: Path) -> None:
    make(path)
    writing = sqlite_engine(path, read_only=False).connect().execution_options(writes=True)
    with writing, writing.begin():
        writing.execute(text("UPDATE kept SET x = 1"))
        with sqlite_engine(path, read_only=False).connect() as reading:
            assert reading.execute(text("SELECT x FROM kept")).scalar_one() == 0


def test_damage_is_told_from_what_is_not_there_and_what_is_in_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "_is_on_network", lambda path: True)  # a writer keeps readers out there
    monkeypatch.setattr(sqlite_file, "_BUSY_TIMEOUT_S", 0.05)
    assert not is_damaged(path)
    assert not path.exists()
    make(path)
    assert not is_damaged(path)
    holds = sqlite3.connect(path, isolation_level=None)
    holds.execute("BEGIN EXCLUSIVE")
    assert not is_damaged(path)
    holds.close()


@pytest.mark.parametrize("content", [b"garbage" * 99, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_garbage_is_damage(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    assert is_damaged(path)
    assert path.read_bytes() == content


def test_damage_far_inside_the_file_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "_is_on_network", lambda path: True)  # one file
    engine = sqlite_engine(path, read_only=False)
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(text("CREATE TABLE kept (x TEXT)"))
        connection.execute(text("INSERT INTO kept VALUES (:x)"), [{"x": "y" * 900} for _ in range(100)])
    content = bytearray(path.read_bytes())
    content[12 * 4096 : 13 * 4096] = b"\xff" * 4096
    path.write_bytes(content)
    assert is_damaged(path)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("/home/me", True), ("/home/me/data/x", False), ("/homes", False), ("/data", False), ("/home", True)],
)
def test_the_innermost_mount_says_what_lies_below_a_file(
    folder: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = "server:/home /home nfs4 rw 0 0\n/dev/a / ext4 rw 0 0\n/dev/b /home/me/data xfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self: mounts)
    monkeypatch.setattr(sqlite_file.os.path, "realpath", str)
    assert sqlite_file._is_on_network(Path(folder) / "registry.db") == expected


def test_where_nobody_knows_the_mounts_the_disk_is_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_proc(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", no_proc)
    assert not sqlite_file._is_on_network(tmp_path / "registry.db")
    monkeypatch.setattr(Path, "read_text", lambda self: "")
    assert not sqlite_file._is_on_network(tmp_path / "registry.db")
