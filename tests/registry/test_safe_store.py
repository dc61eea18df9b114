import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance.graphs import chain_graph
from conformance.store import make_entry

from sirtaki.registry import sql_store as sqlite_file
from sirtaki.registry.safe_store import SafeStore, default_path, open_store


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_sound_store_is_used_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, entry = SafeStore(str(tmp_path / "r.db")), make_entry()
    assert store.is_open
    assert store.lookup(entry.key) is None
    assert store.save(entry)
    assert store.lookup(entry.key) == entry
    store.close()
    store.close()
    assert store.lookup(entry.key) is None
    assert warnings_of(caplog) == []


def test_garbage_is_put_aside_and_a_new_registry_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.db"
    for number, garbage in enumerate([b"first" * 500, b"second" * 500], start=1):
        path.write_bytes(garbage)
        store = SafeStore(str(path))
        assert store.save(make_entry())
        assert store.lookup(make_entry().key) == make_entry()
        assert (tmp_path / f"r.db.broken-{number}").read_bytes() == garbage
        assert len(warnings_of(caplog)) == number
        store.close()


def damaged_registry(path: Path, damage: Callable[[bytearray], bytes | bytearray]) -> None:
    store = open_store(str(path))
    store.save_all([make_entry(model=chain_graph([number + 1] * 20)) for number in range(60)])
    store.save(make_entry())
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    path.write_bytes(damage(bytearray(path.read_bytes())))


def overwritten(start: int, stop: int, filler: bytes) -> Callable[[bytearray], bytearray]:
    def damage(raw: bytearray) -> bytearray:
        begin, end = start * 4096, min(len(raw), stop * 4096)
        raw[begin:end] = (filler * (end - begin))[: end - begin]
        return raw

    return damage


DAMAGE = {
    "later pages are zeros": overwritten(8, 10_000, b"\0"),
    "later pages are garbage": overwritten(8, 10_000, b"garbage "),
    "pages in the middle are garbage": overwritten(12, 40, b"\xff\x07"),
    "the second half is missing": lambda raw: raw[: len(raw) // 2],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_behind_the_first_pages_is_noticed_and_the_file_is_put_aside(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.db"
    damaged_registry(path, DAMAGE[name])
    before = path.read_bytes()
    store = SafeStore(str(path))
    assert store.attempt(lambda opened: opened.signatures()[0], []) == []
    store.attempt(lambda opened: opened.get("0"), None)
    for number in range(60):
        store.lookup(make_entry(model=chain_graph([number + 1] * 20)).key)
    assert store.save(make_entry())
    assert store.lookup(make_entry().key) == make_entry()
    store.close()
    assert (tmp_path / "r.db.broken-1").read_bytes()[100:] == before[100:]  # opening it changes the header
    (warning,) = warnings_of(caplog)
    assert "r.db.broken-1" in warning


def test_a_graph_whose_bytes_have_changed_is_no_entry_and_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.db"
    open_store(str(path)).save(make_entry())
    connection = sqlite3.connect(path)
    for table in ("models", "topologies", "signatures"):
        connection.execute(f"UPDATE {table} SET body = x'00ff00ff'")
    connection.commit()
    connection.close()
    store = SafeStore(str(path))
    assert store.lookup(make_entry().key) is None
    assert store.save(make_entry(best_span_s=0.9))
    assert len(warnings_of(caplog)) == 1
    assert store.lookup(make_entry().key) == make_entry(best_span_s=0.9)
    assert len(store.attempt(lambda opened: opened.signatures()[0], [])) == 1


def test_a_new_registry_is_not_put_aside_in_place_of_the_damaged_one(tmp_path: Path) -> None:
    from sirtaki.registry.sql_store import set_aside

    path = tmp_path / "r.db"
    open_store(str(path)).save(make_entry())
    set_aside(path)  # another job has replaced the damaged file meanwhile
    assert open_store(str(path)).lookup(make_entry().key) == make_entry()


def test_an_unwritable_place_is_one_warning_and_an_empty_store(caplog: pytest.LogCaptureFixture) -> None:
    store = SafeStore("/dev/null/r.db")
    assert not store.is_open
    assert store.lookup(make_entry().key) is None
    assert not store.save(make_entry())
    (warning,) = warnings_of(caplog)
    assert "training goes on" in warning
    assert "SIRTAKI_REGISTRY" in warning


def test_a_locked_file_is_one_warning_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "_BUSY_TIMEOUT_S", 0.05)
    path, entry = tmp_path / "r.db", make_entry()
    store = SafeStore(str(path))
    assert store.save(entry)
    lock = sqlite3.connect(path)
    lock.execute("BEGIN EXCLUSIVE")
    assert not store.save(make_entry(best_span_s=0.1))
    assert not SafeStore(str(path)).save(make_entry(best_span_s=0.1))
    assert "locked" in warnings_of(caplog)[0]
    assert store.lookup(entry.key) == entry  # readers are not locked out
    lock.rollback()
    lock.close()
    assert store.save(make_entry(best_span_s=0.1))


def test_a_table_torn_out_in_the_middle_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.db"
    store = SafeStore(str(path))
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE entries")
    connection.close()
    for _ in range(3):
        assert store.lookup(make_entry().key) is None
        assert not store.save(make_entry())
    assert len(warnings_of(caplog)) == 1


def test_an_unreachable_server_gives_way_to_the_local_registry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = SafeStore("postgresql+psycopg://user:secret@127.0.0.1:1/db")
    assert store.save(make_entry())
    assert open_store(str(default_path())).lookup(make_entry().key) == make_entry()
    (warning,) = warnings_of(caplog)
    assert "secret" not in warning
    assert "sirtaki registry export" in warning
