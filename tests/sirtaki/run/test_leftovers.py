"""Files and processes of a job are told from everybody else's, and removed without a word if they are gone."""

import mmap
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sirtaki.run import leftovers
from sirtaki.run.leftovers import (
    makes_way_for_mpiexec,
    mapped_segments,
    remove_segments,
    remove_session_folder,
    session_members,
)


def test_only_the_mpi_librarys_files_that_a_process_has_mapped_are_its_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_SEGMENTS", tmp_path)
    mapped = []
    for name in ("sm_segment.host.0", "vader_segment.x", "mpich_shm_ab c", "somebody_elses", "sm_segment.not_mapped"):
        path = tmp_path / name
        path.write_bytes(b"\0" * 4096)
        if "not_mapped" not in name:
            with path.open("r+b") as file:
                mapped.append(mmap.mmap(file.fileno(), 4096))
    found = {path.name for path in mapped_segments("self")}
    assert found == {"sm_segment.host.0", "vader_segment.x", "mpich_shm_ab c"}
    assert mapped_segments(os.getpid()) == mapped_segments("self")
    for memory in mapped:
        memory.close()
    assert mapped_segments("self") == set()


def test_segments_in_another_folder_are_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "sm_segment.mine"
    path.write_bytes(b"\0" * 4096)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert path not in mapped_segments("self")


def test_a_process_that_is_gone_has_none() -> None:
    assert mapped_segments(2**22 + 1) == set()


def test_what_is_gone_already_is_removed_without_a_word(tmp_path: Path) -> None:
    there, gone = tmp_path / "there", tmp_path / "gone"
    there.touch()
    remove_segments({there, gone, tmp_path / "no" / "such"})
    assert list(tmp_path.iterdir()) == []
    remove_segments(set())


def test_an_mpiexecs_folder_goes_with_all_that_is_in_it_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for pid in (12, 123):
        (tmp_path / f"ompi.{pid}" / "deep").mkdir(parents=True)
        (tmp_path / f"ompi.{pid}" / "deep" / "file").touch()
    remove_session_folder(12)
    remove_session_folder(12)
    assert [path.name for path in tmp_path.iterdir()] == ["ompi.123"]


def test_what_would_keep_an_mpiexec_of_the_same_number_from_starting_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    makes_way_for_mpiexec()()  # where there is no folder
    own, other = (tmp_path / f"ompi.{pid}" for pid in (os.getpid(), 12))
    here = f"pmix.{socket.gethostname()}.tool"
    for path in (own / here, own / f"{here}.7", own / "pmix.elsewhere.tool", other / here):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    makes_way_for_mpiexec()()
    assert sorted(tmp_path.rglob("pmix.*")) == sorted([own / "pmix.elsewhere.tool", other / here])


def test_processes_are_found_by_their_session() -> None:
    own = os.getsid(0)
    other = subprocess.Popen(
        [sys.executable, "-S", "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert session_members({other.pid}) == [other.pid]
        assert os.getpid() in session_members({own})
        assert other.pid not in session_members({own})
        assert {os.getpid(), other.pid} <= set(session_members({own, other.pid}))
    finally:
        other.communicate()
    assert session_members({other.pid}) == []
    assert session_members(set()) == []


def test_a_process_that_has_ended_and_is_not_buried_is_no_member() -> None:
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True)
    try:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        assert os.getsid(dead.pid) == dead.pid  # it is still there
        assert session_members({dead.pid}) == []
    finally:
        dead.wait()
