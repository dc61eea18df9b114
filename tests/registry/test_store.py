"""A store on SQLite and PostgreSQL: conformance, old schemas, damage, read-only files, many writers, killed writers.

This file is also a program: writers are forked by one fresh interpreter, so that 32 of them start at the same moment.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance.graphs import chain_graph
from conformance.store import CHECKS, make_entry, make_shard_way, make_way, run_sql, warnings_of
from msgspec import structs
from sqlalchemy.exc import ArgumentError, DatabaseError, IntegrityError, OperationalError

from sirtaki.errors import CorruptStoreError, RegistryError
from sirtaki.registry import rows
from sirtaki.registry import store as store_module
from sirtaki.registry.graph import canonical_json
from sirtaki.registry.opening import default_path, open_store
from sirtaki.registry.schema import JobRecord, RowsRecord, ShardsRecord, StoredSetting
from sirtaki.registry.store import SCHEMAS, Store, is_damaged, set_aside


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a folder with #, ? and é" / "registry.db"
    made.parent.mkdir()
    return made


@pytest.fixture
def store(path: Path) -> Store:
    return open_store(str(path))


# ── any database ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.lengthy
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sqlite_file_is_a_store(check: Callable[[Store], None], store: Store) -> None:
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
    assert ours.put(entry)
    assert theirs.get(JobRecord, entry.key) == entry
    assert not theirs.put(make_entry(best_span_s=0.9, created_s=1.7e9 + 1, streams=8))
    assert theirs.put(make_entry(best_span_s=0.3, created_s=1.7e9 + 1))
    assert getattr(ours.get(JobRecord, entry.key), "best_span_s", None) == 0.3


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://", "is invalid|cannot use"),
        ("sqlite://", "in memory"),
        ("oracle+nothere://host/db", "cannot use|driver"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/db", "SIRTAKI_REGISTRY"),
        ("/dev/null/registry.db", "SIRTAKI_REGISTRY"),
    ],
)
def test_a_file_that_cannot_be_opened_is_rejected_with_a_remedy(url: str, message: str) -> None:
    with pytest.raises(RegistryError, match=message) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_a_missing_driver_of_postgresql_is_reported_with_the_extra_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(RegistryError, match=r"not installed \(.*psycopg.*\); run: pip install 'sirtaki\[postgresql\]'"):
        open_store("postgresql+psycopg://user:secret@127.0.0.1:1/db")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'psycopg'"), "needs a database driver that is not installed (No module"),
        (
            OperationalError("INSERT", {}, sqlite3.OperationalError("database is locked")),
            "(database is locked); wait until no other process locks it",
        ),
        (
            OperationalError("SELECT", {}, sqlite3.OperationalError("unable to open\n  database file")),
            "(unable to open database file); check that it may be read and written, or set SIRTAKI_REGISTRY",
        ),
        (
            IntegrityError("INSERT", {}, sqlite3.IntegrityError("UNIQUE constraint failed:\nentries.id")),
            "(UNIQUE constraint failed: entries.id)",
        ),
        (
            DatabaseError("SELECT", {}, sqlite3.DataError("too large")),
            "(too large)",
        ),
        (ArgumentError("no such dialect"), "(no such dialect); check"),
        (PermissionError(13, "Permission denied"), "([Errno 13] Permission denied); check"),
    ],
)
def test_an_error_is_reported_in_one_line_with_a_remedy(
    error: Exception, words: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(store._engine, "connect", fail)
    with pytest.raises(RegistryError) as caught:
        store.summaries()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is RegistryError


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_default_file_is_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_store().close()
    assert default_path() == tmp_path / "sirtaki" / "registry.db"
    assert default_path().is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "sirtaki" / "registry.db"


def test_entries_outlive_the_store_and_a_sqlite_url_is_the_file_it_names(tmp_path: Path) -> None:
    entry, path = make_entry(), tmp_path / "registry.db"
    store = open_store(f"sqlite:///{path}")
    store.put(entry)
    store.close()
    assert open_store(str(path)).get(JobRecord, entry.key) == entry


def test_a_read_only_store_reads_and_refuses_to_write(path: Path) -> None:
    with pytest.raises(RegistryError):
        open_store(str(path), read_only=True)
    assert not path.exists()
    entry = make_entry()
    open_store(str(path)).put(entry)
    store = open_store(str(path), read_only=True)
    assert store.get(JobRecord, entry.key) == entry
    for write in (
        lambda: store.put(entry),
        lambda: store.put(make_way()),
        lambda: store.forget(entry.id),
        lambda: store.prune(keep=0),
    ):
        with pytest.raises(RegistryError, match="cannot be written"):
            write()
    store.save_distances(entry.key.model, {"other": 0.5})  # a cache: nothing is lost
    assert store.distances(entry.key.model) == {}


@pytest.mark.lengthy
def test_a_file_that_may_not_be_written_is_read() -> None:
    """Runs as another user in a separate process, because root may write everything."""
    script = textwrap.dedent("""
        import os, sys
        from conformance.store import make_entry
        from sirtaki.errors import RegistryError
        from sirtaki.registry.opening import open_store
        from sirtaki.registry.schema import JobRecord
        import sirtaki.registry.store, torch
        if os.getuid() == 0:
            os.setuid(65534)
        entry = make_entry()
        store = open_store(sys.argv[1])
        assert store.get(JobRecord, entry.key) == entry
        try:
            store.put(entry)
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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry.db"
        store = open_store(str(path))
        store.put(make_entry())
        store.close()
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True)
        Path(folder).chmod(0o755)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", range(1, len(SCHEMAS)))
def test_an_older_schema_is_read_and_brought_up_to_date(
    version: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, way = make_entry(), make_way()
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "SCHEMAS", SCHEMAS[:version])
        open_store(str(path)).put(entry)
    assert run_sql(path, "SELECT version FROM sirtaki_schema") == [(version,)]
    store = open_store(str(path), read_only=True)
    assert [*store.all(RowsRecord), *store.all(RowsRecord, way.key), *store.all(ShardsRecord)] == []
    assert store.find(StoredSetting, entry.id) == entry
    for _ in range(2):
        store = open_store(str(path))
        assert run_sql(path, "SELECT version FROM sirtaki_schema") == [(len(SCHEMAS),)]
    store.save_distances("a", {"b": 0.5})
    assert store.distances("b") == {"a": 0.5}
    assert store.put_all([way, make_shard_way()]) == 2
    assert list(store.all(RowsRecord, way.key)) == [way]
    assert list(store.all(ShardsRecord)) == [make_shard_way()]
    assert store.get(JobRecord, entry.key) == entry


def test_a_newer_schema_is_refused_with_the_remedy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(str(path)).close()
    monkeypatch.setattr(store_module, "SCHEMAS", SCHEMAS[:1])
    for read_only in (False, True):
        with pytest.raises(RegistryError, match=r"has version 4, .* supports versions up to 1: upgrade .* SIRTAKI_REG"):
            open_store(str(path), read_only=read_only)
    assert run_sql(path, "SELECT version FROM sirtaki_schema") == [(len(SCHEMAS),)]


@pytest.mark.parametrize(("on_network", "journal", "synchronous"), [(False, "wal", 1), (True, "delete", 2)])
def test_the_journal_fits_the_file_system_and_can_be_changed(
    on_network: bool, journal: str, synchronous: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (not on_network, on_network):
        monkeypatch.setattr(store_module, "_is_on_network", lambda _, now=now: now)
        store = open_store(str(path))
        store.put(make_entry())
    assert run_sql(path, "PRAGMA journal_mode") == [(journal,)]
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == synchronous
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
    assert store.get(JobRecord, make_entry().key) == make_entry()


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/home/me", True),
        ("/home/me/data/x", False),
        ("/homes", False),
        ("/data", False),
        ("/home", True),
        ("/my share/x", True),
    ],
)
def test_the_innermost_mount_determines_the_file_system(
    folder: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = "server:/home /home nfs4 rw 0 0\n/dev/a / ext4 rw 0 0\n/dev/b /home/me/data xfs rw 0 0\n"
    mounts += "/dev/c /my\\040share ext4 rw 0 0\nserver:/share /my\\040share nfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda _: mounts)
    monkeypatch.setattr(os.path, "realpath", str)
    assert store_module._is_on_network(Path(folder) / "registry.db") == expected


@pytest.mark.parametrize("mounts", [None, ""])
def test_with_unknown_mounts_the_disk_counts_as_local(
    mounts: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(self: Path) -> str:
        if mounts is None:
            raise FileNotFoundError(self)
        return mounts

    monkeypatch.setattr(Path, "read_text", read)
    assert not store_module._is_on_network(tmp_path / "registry.db")


# ── rows that are damaged ────────────────────────────────────────────────────────────────────────────────────────────


def test_graphs_are_stored_once_and_removed_with_the_last_entry(store: Store, path: Path) -> None:
    one, other = make_entry(), make_entry(ranks=6)
    store.put_all([one, other])

    def counts() -> list[int]:
        tables = "entries", "models", "signatures", "topologies"
        return [run_sql(path, f"SELECT count(*) FROM {table}")[0][0] for table in tables]

    assert counts() == [2, 1, 1, 2]
    store.forget(one.id)
    assert counts() == [1, 1, 1, 1]
    store.forget(other.id)
    assert counts() == [0, 0, 0, 0]


DAMAGES = {
    "a body that is no JSON": "UPDATE entries SET body = '{\"key\": 1'",
    "a body that is no text": "UPDATE entries SET body = x'ff00'",
    "a model": "UPDATE models SET body = x'00ff'",
    "a model that is another's": f"UPDATE models SET body = x'{zlib.compress(b'[]').hex()}'",
    "a cluster": "UPDATE topologies SET body = 'x'",
}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_hides_no_other_and_is_replaced(
    name: str, store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, sound = make_entry(), make_entry(model=chain_graph([5]), ranks=6)
    store.put(damaged)
    run_sql(path, DAMAGES[name])
    store.put(sound)
    assert store.get(JobRecord, damaged.key) is None
    assert list(store.all(JobRecord)) == [sound]
    assert warnings_of(caplog)[0].startswith(f"Sirtaki skips a damaged record of the registry (entry {damaged.id}): ")
    assert {summary.id for summary in store.summaries()} == {damaged.id, sound.id}
    with pytest.raises(RegistryError, match="is damaged"):
        store.find(JobRecord, damaged.id)
    worse = make_entry(best_span_s=0.9)
    assert store.put(worse)
    assert f"replaces a damaged result in the registry of tuning results (entry {damaged.id})" in caplog.text
    assert store.get(JobRecord, damaged.key) == worse


def test_lists_show_the_readable_part_of_damaged_entries(store: Store, path: Path) -> None:
    entry = structs.replace(make_entry(n_trials=33), arm="libra")
    store.put(entry)
    (summary,) = store.summaries()
    assert (summary.id, summary.arm, summary.n_trials, summary.world_size) == (entry.id, "libra", 33, 4)
    assert (summary.hosts, summary.fixed) == ("2 × unknown kind", (("transport", "gloo"),))
    run_sql(path, "UPDATE topologies SET shape = '[]'", "UPDATE entries SET body = ''")
    (summary,) = store.summaries()
    assert (summary.hosts, summary.fixed, summary.condition, summary.model_name) == ("?", (), "", "Réseau")
    assert store.shapes() == {}
    run_sql(path, "PRAGMA foreign_keys = OFF", "DELETE FROM topologies")
    with pytest.raises(RegistryError, match="model graph or cluster topology is missing"):
        store.find(JobRecord, entry.id)


def test_an_entry_under_the_id_of_another_job_is_not_believed_and_ids_are_no_patterns(store: Store, path: Path) -> None:
    store.put(make_entry())
    run_sql(path, "UPDATE entries SET id = 'a%x'")
    with pytest.raises(RegistryError, match=r"id: expected .* the hash of the field key, found a%x"):
        store.find(JobRecord, "a%")
    with pytest.raises(RegistryError, match=r"the id 'b%' must match one stored tuning result \(entry"):
        store.find(JobRecord, "b%")


def test_signatures_that_are_damaged_or_of_another_version_are_made_anew(store: Store, path: Path) -> None:
    store.put_all([make_entry(model=chain_graph([size])) for size in (1, 2, 3)])
    before = dict(zip(*store.signatures(), strict=True))
    names = list(before)
    run_sql(path, f"UPDATE signatures SET version = 0, body = x'00' WHERE fingerprint = '{names[0]}'")
    run_sql(path, f"UPDATE signatures SET body = x'00' WHERE fingerprint = '{names[1]}'")
    after = dict(zip(*store.signatures(), strict=True))
    assert {name: mark.tolist() for name, mark in after.items()} == {n: m.tolist() for n, m in before.items()}
    run_sql(path, "UPDATE distances SET distance = 7.0")


def test_a_graph_that_would_fill_the_memory_is_refused(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(make_entry())
    run_sql(path, f"UPDATE models SET body = x'{zlib.compress(b'0' * 100_000).hex()}'")
    monkeypatch.setattr(rows, "_MAX_GRAPH_BYTES", 1000)
    with pytest.raises(RegistryError, match="at most 1000 bytes, found more"):
        store.find(JobRecord, make_entry().id)
    assert store.models([make_entry().key.model]) == {}


@pytest.mark.parametrize("body", ["{", canonical_json(make_way().to_json())], ids=["no JSON", "of other rows"])
def test_a_damaged_record_hides_no_others_and_is_replaced(
    body: str, store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    way, other = make_way(), make_way(ranks=8, created_s=1.75e9)
    store.put_all([way, other])
    run_sql(path, f"UPDATE row_ways SET body = '{body}' WHERE id = '{other.id}'")
    assert list(store.all(RowsRecord)) == [way]
    assert f"skips a damaged record of the registry (way of rows {other.id})" in caplog.text
    with pytest.raises(RegistryError, match=rf"is damaged \(.*\); remove .* with `sirtaki registry forget {other.id}`"):
        store.find(StoredSetting, other.id)
    assert store.put(other)
    assert list(store.all(RowsRecord)) == [other, way]


def test_of_one_key_the_newest_records_are_read_and_in_total_none_is_missing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_PER_KEY", 2)
    ways = [structs.replace(make_way(created_s=1.7e9 - number), name=str(number)) for number in range(3)]
    store.put_all(ways)
    assert list(store.all(RowsRecord, ways[0].key)) == ways[:2]
    assert list(store.all(RowsRecord)) == ways


# ── files that are damaged ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", [b"garbage" * 999, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_garbage_file_is_named_and_left_alone(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    assert is_damaged(path)
    with pytest.raises(CorruptStoreError, match=r"registry\.db is not a registry of tuning results") as caught:
        open_store(str(path))
    assert caught.value.path == path
    assert path.read_bytes() == content


def test_damage_is_distinguished_from_missing_and_busy_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BUSY_TIMEOUT_S", 0.05)
    assert not is_damaged(path)
    assert not path.exists()
    run_sql(path, "CREATE TABLE kept (x)")
    assert not is_damaged(path)
    holds = sqlite3.connect(path, isolation_level=None)
    holds.execute("BEGIN EXCLUSIVE")
    assert not is_damaged(path)
    holds.close()


def test_a_damaged_file_is_moved_with_the_files_beside_it(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE kept (x)")
    other.executemany("INSERT INTO kept VALUES (?)", [("y" * 900,)] * 100)
    other.commit()
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("CREATE TABLE late (x)")
    other.execute("INSERT INTO late VALUES (7)")
    other.commit()
    content = bytearray(path.read_bytes())
    content[12 * 4096 : 13 * 4096] = b"\xff" * 4096
    path.write_bytes(content)
    aside = set_aside(path)
    assert aside == Path(f"{path}.broken-1")
    assert not any(Path(f"{path}{suffix}").exists() for suffix in ("", "-wal", "-shm"))
    other.close()
    assert run_sql(aside, "SELECT x FROM late") == [(7,)]


def test_where_it_cannot_be_renamed_the_user_is_asked_to(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"nowhere/registry.db of .* cannot be renamed \(.*\); move it"):
        set_aside(tmp_path / "nowhere" / "registry.db")


# ── many writers ─────────────────────────────────────────────────────────────────────────────────────────────────────

N_ENTRIES = 8


def numbered_entry(writer: int, number: int) -> JobRecord:
    """Return an entry with its own key. All entries share graph and topology."""
    entry = make_entry()
    return structs.replace(entry, key=structs.replace(entry.key, versions={"n": str(number), "writer": str(writer)}))


def fork_writer(path: str, writer: int, n_entries: int) -> tuple[int, int]:
    """Fork a process that saves entries and acknowledges its own ones by a byte each. Return process id and pipe."""
    reader, sender = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sender)
        return pid, reader
    status = 1
    try:
        store = open_store(path)
        for number in range(n_entries):
            better = 1 + (writer + number) % 90  # times as fast: more than 100 is refused
            common = make_entry(best_span_s=0.5 / better, streams=4 + better)
            store.put(structs.replace(common, noise_s=0.0))
            store.put(numbered_entry(writer, number))
            os.write(sender, b".")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def check_file(path: str) -> None:
    assert run_sql(Path(path), "PRAGMA integrity_check") == [("ok",)]
    assert run_sql(Path(path), "PRAGMA foreign_key_check") == []


def write_at_once(path: str, n_writers: int) -> None:
    """None of what many processes write is lost; the common key holds the best of all."""
    children = [fork_writer(path, writer, N_ENTRIES) for writer in range(n_writers)]
    for pid, _ in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store = open_store(path)
    assert len(store.summaries()) == n_writers * N_ENTRIES + 1
    for writer in range(n_writers):
        assert store.get(JobRecord, numbered_entry(writer, N_ENTRIES - 1).key) == numbered_entry(writer, N_ENTRIES - 1)
    common = store.get(JobRecord, make_entry().key)
    assert common is not None
    assert common.best_span_s == 0.5 / (n_writers + N_ENTRIES - 1)
    if "://" not in path:
        check_file(path)


def kill_while_writing(path: str) -> None:
    """Kill writers, and check that every acknowledged entry is stored, all entries are valid, and the store works."""
    rng = random.Random(20)
    for round_number in range(2):
        children = [fork_writer(path, 100 * round_number + writer, 1000) for writer in range(4)]
        acknowledged = []
        for pid, reader in children:
            n_before = rng.randrange(1, 6)
            got = b""
            while len(got) < n_before:
                got += os.read(reader, n_before - len(got))
            os.kill(pid, signal.SIGKILL)  # at whatever it is doing: most of its time it writes
            os.waitpid(pid, 0)
            while more := os.read(reader, 4096):
                got += more
            acknowledged.append(len(got))
        check_file(path)
        store = open_store(path)
        for writer, count in enumerate(acknowledged):
            for number in range(count):
                entry = numbered_entry(100 * round_number + writer, number)
                assert store.get(JobRecord, entry.key) == entry
        assert len(list(store.all(JobRecord))) == len(store.summaries())
        store.prune(keep=0)


def run_here(*arguments: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, *arguments], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


@pytest.mark.lengthy
@pytest.mark.parametrize("n_writers", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_nothing_is_lost_when_many_processes_write_at_once(n_writers: int, tmp_path: Path) -> None:
    run_here("write_at_once", str(tmp_path / "r.db"), str(n_writers))


@pytest.mark.lengthy
def test_nothing_is_lost_or_half_written_when_writers_are_killed(tmp_path: Path) -> None:
    run_here("kill_while_writing", str(tmp_path / "r.db"))


@pytest.mark.slow
@pytest.mark.postgresql
def test_nothing_is_lost_when_32_processes_write_to_a_server(postgresql_url: str) -> None:
    run_here("write_at_once", postgresql_url, "32")


if __name__ == "__main__":
    if sys.argv[1] == "write_at_once":
        write_at_once(sys.argv[2], int(sys.argv[3]))
    else:
        kill_while_writing(sys.argv[2])


@pytest.mark.lengthy
def test_a_process_that_forks_while_a_lookup_is_prepared_can_import_the_same_in_the_child(path: Path) -> None:
    path.touch()
    code = (
        "import os, signal, sys; from sirtaki.registry.opening import load_ahead; load_ahead(sys.argv[1]); "
        "child = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "signal.alarm(20); import sqlalchemy.orm; os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=True)
