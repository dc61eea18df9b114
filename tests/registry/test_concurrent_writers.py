"""Many jobs at once on one registry, and jobs that are killed while they write.

The writers are forked by one fresh interpreter, so that 32 of them start at the same moment.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from conformance.store import make_entry

from sirtaki.registry.entry import Entry
from sirtaki.registry.safe_store import open_store

N_ENTRIES = 8


def numbered_entry(writer: int, number: int) -> Entry:
    """An entry of its own key; graph and topology are shared by all."""
    entry = make_entry()
    return replace(entry, key=replace(entry.key, versions=(("n", str(number)), ("writer", str(writer)))))


def fork_writer(path: str, writer: int, n_entries: int) -> tuple[int, int]:
    """A process that saves its entries and the common one, and acknowledges each own one by a byte; pid and pipe."""
    reader, sender = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sender)
        return pid, reader
    status = 1
    try:
        store = open_store(path)
        for number in range(n_entries):
            common = make_entry(best_span_s=0.5 / (1 + writer + number), streams=4 + writer + number)
            store.save(replace(common, noise_s=0.0))
            store.save(numbered_entry(writer, number))
            os.write(sender, b".")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def check_file(path: str) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def write_at_once(path: str, n_writers: int) -> None:
    """None of what many processes write is lost; the common key holds the best of all."""
    children = [fork_writer(path, writer, N_ENTRIES) for writer in range(n_writers)]
    for pid, _ in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store = open_store(path)
    assert len(store.summaries()) == n_writers * N_ENTRIES + 1
    for writer in range(n_writers):
        assert store.lookup(numbered_entry(writer, N_ENTRIES - 1).key) == numbered_entry(writer, N_ENTRIES - 1)
    common = store.lookup(make_entry().key)
    assert common is not None
    assert common.best_span_s == 0.5 / (n_writers + N_ENTRIES - 1)
    if "://" not in path:
        check_file(path)


def kill_while_writing(path: str) -> None:
    """Whatever was acknowledged is there, all that is there is whole, and the store goes on."""
    rng = random.Random(20)
    for round_number in range(5):
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
                assert store.lookup(entry.key) == entry
        assert len(list(store.entries())) == len(store.summaries())
        store.prune(keep=0)


def run_here(*arguments: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, *arguments], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("n_writers", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_nothing_is_lost_when_many_processes_write_at_once(n_writers: int, tmp_path: Path) -> None:
    run_here("write_at_once", str(tmp_path / "r.db"), str(n_writers))


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
