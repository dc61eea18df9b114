"""A damaged file is put aside whole, once, and a sound one never."""

import sqlite3
import threading
import time
from pathlib import Path

import pytest

from sirtaki.errors import RegistryError
from sirtaki.registry import sql_store as broken_file
from sirtaki.registry.sql_store import is_damaged, set_aside


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


def sound(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE kept (x)")
    connection.commit()
    connection.close()


def test_a_damaged_file_goes_with_what_another_job_has_written_beside_it(path: Path) -> None:
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
    found = sqlite3.connect(aside)
    assert found.execute("SELECT x FROM late").fetchall() == [(7,)]
    found.close()


def test_the_next_damaged_one_does_not_replace_the_first(path: Path) -> None:
    for number in (1, 2):
        path.write_text(f"garbage {number}" * 99)
        assert set_aside(path) == Path(f"{path}.broken-{number}")
    assert Path(f"{path}.broken-1").read_text().startswith("garbage 1")


def test_what_another_job_has_replaced_stays(path: Path) -> None:
    sound(path)
    before = path.read_bytes()
    aside = set_aside(path)
    assert path.read_bytes() == before
    assert not aside.exists()
    path.unlink()
    set_aside(path)  # gone, and not yet made anew
    assert not path.exists()


def test_of_many_jobs_at_once_one_puts_it_aside_and_the_new_one_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(path: Path) -> bool:
        found = is_damaged(path)
        time.sleep(0.01)
        return found

    monkeypatch.setattr(broken_file, "is_damaged", slowly)
    path.write_bytes(b"garbage" * 999)
    meeting = threading.Barrier(6)

    def job() -> None:
        meeting.wait()
        set_aside(path)
        try:
            with path.open("xb"):
                pass
        except FileExistsError:
            return
        path.unlink()
        sound(path)

    threads = [threading.Thread(target=job) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.name for other in path.parent.glob("*.broken-*")] == ["registry.db.broken-1"]
    assert path.read_bytes().startswith(b"SQLite format 3")


def test_where_it_cannot_be_renamed_the_user_is_asked_to(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"nowhere/registry.db cannot be put aside: .*; move it away by hand"):
        set_aside(tmp_path / "nowhere" / "registry.db")
