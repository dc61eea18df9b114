"""The registry as a job uses it: what it recalls and keeps, and that no failure of it ends training."""

import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from conformance.graphs import chain_graph
from conformance.store import make_entry, make_shard_way, make_way, run_sql, warnings_of
from msgspec import structs

from sirtaki.engine.settings import REGISTRY_OFF
from sirtaki.engine.tuning.memory import SettingsMemory
from sirtaki.registry import rows
from sirtaki.registry.opening import default_path, open_store
from sirtaki.registry.schema import EntryKey, JobRecord, RowsRecord, ShardsRecord, StoredSetting
from sirtaki.registry.store import set_aside


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


def found(memory: SettingsMemory, key: EntryKey) -> JobRecord | None:
    return memory.read(lambda store: store.get(JobRecord, key), None)


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (make_entry(), None),
        (make_way(created_s=time.time()), ("table.weight", make_way().skew)),
        (make_shard_way(created_s=time.time()), 2**20),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_later_job_recalls_an_earlier_ones_record_unless_it_is_rejected(
    record: StoredSetting, wanted: object, path: Path
) -> None:
    for memory in (SettingsMemory(str(path)), SettingsMemory(REGISTRY_OFF)):
        assert memory.recall(type(record), record.key, wanted, lambda one: one) is None
    assert not SettingsMemory(REGISTRY_OFF).keep(record)
    assert SettingsMemory(str(path)).keep(record)
    later = SettingsMemory(str(path))
    assert later.recall(type(record), record.key, wanted, lambda one: one) == record
    assert later.recall(type(record), record.key, wanted, lambda one: None) is None


def test_the_setting_of_a_job_with_as_much_memory_or_the_least_above_is_recalled(path: Path) -> None:
    memory, made = SettingsMemory(str(path)), make_shard_way(created_s=time.time())
    for memory_bytes in (2**30, 2**20, 2**25):
        assert memory.keep(structs.replace(made, memory_bytes=memory_bytes))

    def recalled(wanted: int) -> int | None:
        return memory.recall(ShardsRecord, made.key, wanted, lambda one: one.memory_bytes)

    assert [recalled(wanted) for wanted in (0, 2**20, 2**20 + 1, 2**31)] == [2**20, 2**20, 2**25, None]
    assert (
        memory.recall(ShardsRecord, made.key, 0, lambda one: one.memory_bytes if one.memory_bytes > 2**25 else None)
        == 2**30
    )


def test_an_error_while_a_record_is_used_is_one_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = SettingsMemory(str(path))
    memory.keep(make_way(created_s=time.time()))
    for _ in range(2):
        assert memory.recall(RowsRecord, make_way().key, ("table.weight", make_way().skew), lambda _: 1 // 0) is None
        assert memory.guard(lambda: 1 // 0, 7) == 7
    (warning,) = warnings_of(caplog)
    assert "training goes on without the registry: ZeroDivisionError" in warning


def test_a_sound_store_is_used_without_a_word(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory, entry = SettingsMemory(str(path)), make_entry()
    assert found(memory, entry.key) is None
    assert memory.keep(entry)
    assert found(memory, entry.key) == entry
    assert warnings_of(caplog) == []


def test_the_entry_of_a_job_is_read_without_sqlalchemy(path: Path) -> None:
    entry = make_entry()
    assert SettingsMemory(str(path)).entry(entry.key) is None
    store = open_store(str(path))
    store.put(entry)
    store.close()
    code = (
        "import json, sys; from sirtaki.engine.tuning.memory import SettingsMemory; "
        "from sirtaki.registry.schema import JobRecord; memory = SettingsMemory(sys.argv[1]); "
        "entry, missing = map(JobRecord.from_json, json.loads(sys.argv[2])); "
        "print(memory.entry(entry.key) == entry, memory.entry(missing.key), memory.name == sys.argv[1], "
        "{'sqlalchemy', 'networkx'} & {*sys.modules})"
    )
    records = json.dumps([entry.to_json(), make_entry(ranks=32).to_json()])
    argv = [sys.executable, "-c", code, str(path), records]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "None", "True", "set()"]


def test_the_entry_of_a_job_is_read_from_a_url_and_from_an_unwritable_or_a_locked_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rows, "_BUSY_READER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(rows, "_BUSY_TIMEOUT_S", 0.05)
    entry = make_entry()
    assert SettingsMemory(str(path)).keep(entry)
    assert SettingsMemory(f"sqlite:///{path}").entry(entry.key) == entry
    run_sql(path, "PRAGMA journal_mode = DELETE")
    with closing(sqlite3.connect(path)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        assert SettingsMemory(str(path)).entry(entry.key) is None
        lock.rollback()
    (warning,) = warnings_of(caplog)
    assert "locked" in warning
    assert SettingsMemory(str(path)).entry(entry.key) == entry


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE entries SET body = '{'",
        "UPDATE entries SET best_span_s = 1, body = replace(body, '\"arm\"', '\"arms\"')",
        "UPDATE models SET body = x'00'",
        "DELETE FROM models",
    ],
)
def test_a_damaged_entry_is_none(path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    memory = SettingsMemory(str(path))
    assert memory.keep(make_entry())
    run_sql(path, damage)
    assert memory.entry(make_entry().key) is None
    assert warnings_of(caplog) == []


def test_an_entry_is_looked_up_in_a_damaged_file_and_in_that_of_a_later_release(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(b"garbage" * 500)
    assert SettingsMemory(str(path)).entry(make_entry().key) is None
    assert Path(f"{path}.broken-1").exists()
    assert SettingsMemory(str(path)).keep(make_entry())
    run_sql(path, "UPDATE sirtaki_schema SET version = 99")
    assert SettingsMemory(str(path)).entry(make_entry().key) is None
    _, warning = warnings_of(caplog)
    assert "version 99" in warning


def test_where_there_is_no_registry_yet_reading_makes_none_and_loads_nothing(path: Path) -> None:
    code = (
        "import sys; from sirtaki.registry.opening import load_ahead; load_ahead(sys.argv[1]); "
        "from sirtaki.engine.tuning.memory import SettingsMemory; memory = SettingsMemory(sys.argv[1]); "
        "print(memory.read(lambda store: store.summaries(), 'nothing'), 'sqlalchemy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path / "r.db")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["nothing", "False"]
    assert not path.exists()


def test_a_registry_that_another_job_has_made_meanwhile_is_read(path: Path) -> None:
    memory, entry = SettingsMemory(str(path)), make_entry()
    assert found(memory, entry.key) is None
    open_store(str(path)).put(entry)
    assert found(memory, entry.key) == entry


def test_a_garbage_file_is_quarantined_and_a_new_registry_begins(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, garbage in enumerate([b"first" * 500, b"second" * 500], start=1):
        path.write_bytes(garbage)
        memory = SettingsMemory(str(path))
        assert memory.keep(make_entry())
        assert found(memory, make_entry().key) == make_entry()
        assert Path(f"{path}.broken-{number}").read_bytes() == garbage
        assert len(warnings_of(caplog)) == number


def overwritten(start: int, stop: int, filler: bytes) -> Callable[[bytearray], bytearray]:
    def damage(raw: bytearray) -> bytearray:
        begin, end = start * 4096, min(len(raw), stop * 4096)
        raw[begin:end] = (filler * (end - begin))[: end - begin]
        return raw

    return damage


DAMAGE: dict[str, Callable[[bytearray], bytearray]] = {
    "later pages are zeros": overwritten(8, 10_000, b"\0"),
    "later pages are garbage": overwritten(8, 10_000, b"garbage "),
    "pages in the middle are garbage": overwritten(12, 40, b"\xff\x07"),
    "the second half is missing": lambda raw: raw[: len(raw) // 2],
}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_behind_the_first_pages_is_noticed_and_the_file_is_quarantined(
    name: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = open_store(str(path))
    written.put_all([make_entry(model=chain_graph([number + 1] * 20)) for number in range(60)])
    written.put(make_entry())
    written.close()
    run_sql(path, "PRAGMA journal_mode = DELETE")
    path.write_bytes(DAMAGE[name](bytearray(path.read_bytes())))
    before = path.read_bytes()
    memory = SettingsMemory(str(path))
    assert memory.attempt(lambda opened: opened.signatures()[0], []) == []
    memory.attempt(lambda opened: opened.find(JobRecord, "0"), None)
    for number in range(60):
        found(memory, make_entry(model=chain_graph([number + 1] * 20)).key)
    assert memory.keep(make_entry())
    assert found(memory, make_entry().key) == make_entry()
    assert Path(f"{path}.broken-1").read_bytes()[100:] == before[100:]  # opening it changes the header
    (warning,) = warnings_of(caplog)
    assert "registry.db.broken-1" in warning


def test_an_unwritable_place_is_one_warning_and_an_empty_store(caplog: pytest.LogCaptureFixture) -> None:
    memory = SettingsMemory("/dev/null/r.db")
    assert found(memory, make_entry().key) is None
    assert not memory.keep(make_entry())
    (warning,) = warnings_of(caplog)
    assert "training goes on" in warning
    assert "SIRTAKI_REGISTRY" in warning


def test_a_locked_file_is_one_warning_and_is_not_waited_for_again(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_BUSY_TIMEOUT_S", 0.05)
    entry, better = make_entry(), make_entry(best_span_s=0.1)
    memory = SettingsMemory(str(path))
    assert memory.keep(entry)
    lock = sqlite3.connect(path)
    lock.execute("BEGIN EXCLUSIVE")
    assert not memory.keep(better)
    lock.rollback()
    lock.close()
    assert not memory.keep(better)
    (warning,) = warnings_of(caplog)
    assert "locked" in warning
    again = SettingsMemory(str(path))
    assert found(again, entry.key) == entry
    assert again.keep(better)


def test_a_table_torn_out_in_the_middle_is_one_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_store(str(path)).close()
    memory = SettingsMemory(str(path))
    run_sql(path, "DROP TABLE entries")
    for _ in range(3):
        assert found(memory, make_entry().key) is None
        assert not memory.keep(make_entry())
    assert len(warnings_of(caplog)) == 1


def test_an_unreachable_server_gives_way_to_the_local_registry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = SettingsMemory("postgresql+psycopg://user:secret@127.0.0.1:1/db")
    assert memory.keep(make_entry())
    assert open_store(str(default_path())).get(JobRecord, make_entry().key) == make_entry()
    (warning,) = warnings_of(caplog)
    assert "secret" not in warning
    assert "sirtaki registry export" in warning


def test_of_many_simultaneous_jobs_one_quarantines_it_and_the_new_one_stays(path: Path) -> None:
    path.write_bytes(b"garbage" * 999)
    meeting = threading.Barrier(6)

    def job(_: int) -> None:
        meeting.wait()
        SettingsMemory(str(path)).keep(make_entry())

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(job, range(6)))
    assert [other.name for other in path.parent.glob("*.broken-*")] == ["registry.db.broken-1"]
    assert open_store(str(path)).get(JobRecord, make_entry().key) == make_entry()
    set_aside(path)  # what another job has replaced stays
    assert open_store(str(path)).get(JobRecord, make_entry().key) == make_entry()
