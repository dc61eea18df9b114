import os
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance.graphs import chain_graph
from conformance.store import CHECKS, make_entry, make_way

from sirtaki.errors import RegistryError
from sirtaki.registry import sql_store as schema
from sirtaki.registry import sql_store as sqlite_file
from sirtaki.registry.safe_store import default_path, open_store
from sirtaki.registry.store import CorruptStoreError, Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "registry.db"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sqlite_file_is_a_store(check: Callable[[Store], None], path: Path) -> None:
    store = open_store(str(path))
    check(store)
    store.close()


@pytest.mark.postgresql
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_postgresql_is_a_store(check: Callable[[Store], None], postgresql_url: str) -> None:
    store = open_store(postgresql_url)
    check(store)
    store.close()


@pytest.mark.postgresql
def test_two_deployments_share_a_server(postgresql_url: str) -> None:
    ours, theirs = open_store(postgresql_url), open_store(postgresql_url)
    entry = make_entry()
    assert ours.save(entry)
    assert theirs.lookup(entry.key) == entry
    assert not theirs.save(make_entry(best_span_s=0.9, created_s=1.7e9 + 1, streams=8))
    assert theirs.save(make_entry(best_span_s=0.3, created_s=1.7e9 + 1))
    found = ours.lookup(entry.key)
    assert found is not None
    assert found.best_span_s == 0.3


def test_the_default_file_lies_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "sirtaki" / "registry.db"
    open_store().close()
    assert default_path().is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "sirtaki" / "registry.db"


def test_a_sqlite_url_is_the_file_it_names(path: Path) -> None:
    entry = make_entry()
    path.parent.mkdir()
    open_store(f"sqlite:///{path}").save(entry)
    assert open_store(str(path)).lookup(entry.key) == entry


def test_entries_outlive_the_store(path: Path) -> None:
    entry = make_entry()
    store = open_store(str(path))
    store.save(entry)
    store.close()
    assert open_store(str(path)).lookup(entry.key) == entry


def test_a_read_only_store_reads_and_refuses_to_write(path: Path) -> None:
    entry = make_entry()
    open_store(str(path)).save(entry)
    store = open_store(str(path), read_only=True)
    assert store.lookup(entry.key) == entry
    for write in (
        lambda: store.save(entry),
        lambda: store.save_row_way(make_way()),
        lambda: store.forget(entry.id),
        lambda: store.prune(keep=0),
    ):
        with pytest.raises(RegistryError, match="cannot be written"):
            write()
    store.save_distances(entry.key.model, {"other": 0.5})  # a cache: nothing is lost
    assert store.distances(entry.key.model) == {}


def test_a_file_that_may_not_be_written_is_read(tmp_path: Path) -> None:
    """As another user, in a process of its own: root may write anything."""
    script = textwrap.dedent("""
        import os, sys
        from conformance.store import make_entry
        from sirtaki.errors import RegistryError
        from sirtaki.registry.safe_store import open_store
        import sirtaki.registry.sql_store, torch
        if os.getuid() == 0:
            os.setuid(65534)
        entry = make_entry()
        store = open_store(sys.argv[1])
        assert store.lookup(entry.key) == entry
        try:
            store.save(entry)
        except RegistryError as err:
            assert "cannot be written" in str(err), err
        else:
            raise AssertionError("written")
        try:
            open_store(os.path.join(os.path.dirname(sys.argv[1]), "new.db"))
        except RegistryError as err:
            assert "SIRTAKI_REGISTRY" in str(err), err
        else:
            raise AssertionError("created")
    """)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry.db"
        store = open_store(str(path))
        store.save(make_entry())
        store.close()
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True)
        Path(folder).chmod(0o755)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://", "not a URL|cannot be used"),
        ("sqlite://", "in memory"),
        ("oracle+nothere://host/db", "cannot be used|driver"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/db", "SIRTAKI_REGISTRY"),
        ("/dev/null/registry.db", "SIRTAKI_REGISTRY"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_a_remedy(url: str, message: str) -> None:
    with pytest.raises(RegistryError, match=message) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_reading_what_is_not_there_creates_nothing(path: Path) -> None:
    with pytest.raises(RegistryError):
        open_store(str(path), read_only=True)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"garbage" * 999, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_garbage_file_is_named_and_left_alone(content: bytes, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(CorruptStoreError, match=r"registry\.db"):
        open_store(str(path))
    assert path.read_bytes() == content


def test_an_older_schema_is_brought_up_to_date(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = make_entry()
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        open_store(str(path)).save(entry)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT version FROM sirtaki_schema").fetchall() == [(1,)]
        assert "distances" not in {row[0] for row in connection.execute("SELECT name FROM sqlite_schema")}
    connection.close()
    store = open_store(str(path))
    assert store.lookup(entry.key) == entry
    store.save_distances("a", {"b": 0.5})
    assert store.distances("b") == {"a": 0.5}


def test_schema_2_gets_ways_of_rows_and_where_it_may_not_be_written_has_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, way = make_entry(), make_way()
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        open_store(str(path)).save(entry)
    store = open_store(str(path), read_only=True)
    assert store.row_ways() == store.row_ways(way.key) == []
    assert store.find(entry.id) == entry
    store = open_store(str(path))
    assert store.save_row_way(way)
    assert store.row_ways(way.key) == [way]
    assert store.lookup(entry.key) == entry


def test_a_newer_schema_is_refused_with_the_remedy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(str(path)).close()
    monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
    for read_only in (False, True):
        with pytest.raises(RegistryError, match="upgrade"):
            open_store(str(path), read_only=read_only)


def test_a_damaged_row_is_left_out_of_the_whole_and_replaced_when_saved(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(path))
    damaged, sound = make_entry(), make_entry(model=chain_graph([5]))
    store.save(damaged)
    store.save(sound)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE entries SET body = '{\"key\": 1' WHERE id = ?", [damaged.id])
    connection.commit()
    connection.close()
    assert store.lookup(damaged.key) is None
    assert list(store.entries()) == [sound]
    assert "left out" in caplog.text
    assert store.save(damaged)
    assert store.lookup(damaged.key) == damaged


def test_signatures_of_another_version_are_made_anew(path: Path) -> None:
    store = open_store(str(path))
    store.save(make_entry())
    before = store.signatures()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE signatures SET version = 0, body = x'00'")
    connection.commit()
    connection.close()
    after = store.signatures()
    assert before[0] == after[0]
    assert (before[1] == after[1]).all()


def test_a_network_file_system_gets_a_rollback_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def journal() -> str:
        connection = sqlite3.connect(path)
        mode: str = connection.execute("PRAGMA journal_mode").fetchone()[0]
        connection.close()
        return mode

    open_store(str(path)).save(make_entry())
    assert journal() == "wal"
    monkeypatch.setattr(sqlite_file, "_is_on_network", lambda path: True)
    store = open_store(str(path))
    assert store.lookup(make_entry().key) == make_entry()
    assert journal() == "delete"


def test_opening_the_stores_module_loads_no_sqlalchemy() -> None:
    script = "import sys, sirtaki.registry.store; assert 'sqlalchemy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
