"""Scripts that answer, fail, hang, cannot be run and print nonsense."""

import time
from pathlib import Path

import pytest

from sirtaki.errors import LaunchError
from sirtaki.run.elastic.driver import Discovery, ask_script


def script(folder: Path, text: str, *, mode: int = 0o755) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return str(path)


def test_hosts_with_and_without_slots(tmp_path: Path) -> None:
    text = "echo node1:4; echo; echo '  node2  '; echo '# none'; echo node3.x-y:1 '# spot'"
    assert ask_script(script(tmp_path, text), 2) == {"node1": 4, "node2": 2, "node3.x-y": 1}


def test_no_host_is_an_answer(tmp_path: Path) -> None:
    assert ask_script(script(tmp_path, "true"), 1) == {}


def test_a_command_with_arguments_is_run_by_a_shell() -> None:
    assert ask_script("printf 'a:%s\\n' 3", 1) == {"a": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo >&2 the cloud is closed; exit 4", "exit code 4: the cloud is closed"),
        ("echo 'Error: no permission'", "'Error: no permission', which is no host"),
        ("echo node1:many", "'node1:many', which is no host"),
        ("echo node1,node2", "'node1,node2', which is no host"),
    ],
)
def test_what_is_no_answer_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        ask_script(script(tmp_path, text), 1)


def test_a_file_that_cannot_be_executed_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="make it executable"):
        ask_script(script(tmp_path, "echo a", mode=0o644), 1)


def test_a_script_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    with pytest.raises(LaunchError, match=r"has not ended within 0\.5 s"):
        ask_script(script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60"), 1, limit_s=0.5)
    assert time.monotonic() - begin_s < 10.0
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 5.0
    while Path(f"/proc/{pid}").exists() and "sleep" in Path(f"/proc/{pid}/cmdline").read_text(errors="ignore"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_answers_come_in_order_and_what_stays_is_told_once() -> None:
    answers = [{"a": 1}, {"a": 1}, LaunchError("closed"), LaunchError("closed"), {"a": 1}]
    woken = []

    def ask() -> dict[str, int]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, LaunchError):
            raise answer
        return answer

    discovery = Discovery(ask, on_answer=lambda: woken.append(1), interval_s=0.001)
    deadline_s = time.monotonic() + 5.0
    while len(woken) < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    time.sleep(0.05)
    discovery.close()
    found = [discovery.take() for _ in range(4)]
    assert found[0] == {"a": 1}
    assert str(found[1]) == "closed"
    assert found[2:] == [{"a": 1}, None]
