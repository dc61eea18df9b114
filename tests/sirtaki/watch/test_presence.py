import os
import socket
from pathlib import Path

import pytest

from sirtaki.watch.presence import Presence, look, run_folder, started


def test_a_job_says_of_itself_what_it_is_until_it_ends(tmp_path: Path) -> None:
    presence = Presence(lambda: {"iteration": 7}, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}.{started(os.getpid())}"]
    assert list(look(tmp_path)) == [{"iteration": 7}]
    assert list(look(tmp_path)) == [{"iteration": 7}]
    presence.close()
    presence.close()
    assert list(look(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_what_dead_processes_have_left_is_removed(tmp_path: Path) -> None:
    for name in ("999999999.5", f"{os.getpid()}.1", "strange"):
        (tmp_path / name).touch()
    assert list(look(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_one_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / f"{os.getpid()}.{started(os.getpid())}"))
        assert list(look(tmp_path)) == []


def test_a_job_that_cannot_tell_is_left_out_and_asked_again(tmp_path: Path) -> None:
    answers = iter([None, {"iteration": 1}])

    def answer() -> dict[str, int]:
        if (said := next(answers)) is None:
            raise RuntimeError("just beginning")
        return said

    presence = Presence(answer, folder=tmp_path)
    try:
        assert list(look(tmp_path)) == []
        assert list(look(tmp_path)) == [{"iteration": 1}]
    finally:
        presence.close()


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_folder() == tmp_path / "sirtaki"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert run_folder().name == f"sirtaki-{os.getuid()}"
    assert list(look(tmp_path / "none")) == []
