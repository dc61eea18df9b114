"""Inputs of a driver: options, answers of discovery scripts, and the state of a lost driver."""

import io
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest

from sirtaki.engine.membership import Proof
from sirtaki.errors import ConfigError, LaunchError
from sirtaki.run.elastic import driver
from sirtaki.run.elastic.agent import DriverEndpoint, ElasticJob, Inheritance
from sirtaki.run.elastic.driver import Discovery, ask_script, policy_of
from sirtaki.run.elastic.job_members import OnFailure, Policy
from sirtaki.run.options import is_elastic, parse


def script(folder: Path, text: str, *, mode: int = 0o755) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return str(path)


def test_valid_answers_are_parsed(tmp_path: Path) -> None:
    text = "echo node1:4; echo; echo '  node2  '; echo '# none'; echo node3.x-y:1 '# spot'"
    assert ask_script(script(tmp_path, text), 2) == {"node1": 4, "node2": 2, "node3.x-y": 1}
    assert ask_script(script(tmp_path, "true"), 1) == {}
    assert ask_script("printf 'a:%s\\n' 3", 1) == {"a": 3}  # a command with arguments, which a shell runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo >&2 the cloud is closed; exit 4", "exit code 4: the cloud is closed"),
        (
            "echo 'Error: no permission'",
            "invalid line 'Error: no permission'; each line must be a host, as name or name:slots",
        ),
        ("echo node1:many", "invalid line 'node1:many'; each line must be a host, as name or name:slots"),
        ("echo node1,node2", "invalid line 'node1,node2'; each line must be a host, as name or name:slots"),
        ("echo node1:9999999999", "invalid line 'node1:9999999999'; each line must be a host, as name or name:slots"),
        (
            "yes node1",
            r"printed more than \d+ bytes; it must print only one host per line, as name or name:slots, and then exit",
        ),
        ("seq 1 20000", "must print at most 10000 hosts"),
    ],
)
def test_an_invalid_answer_is_reported_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = script(tmp_path, text)
    with pytest.raises(LaunchError, match=message) as error:
        ask_script(path, 1)
    assert str(error.value).startswith(f"the host discovery script {path!r} ")


def test_a_file_that_is_not_executable_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="make it executable"):
        ask_script(script(tmp_path, "echo a", mode=0o644), 1)


@pytest.mark.lengthy
def test_a_hanging_script_is_killed_with_its_children(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    with pytest.raises(LaunchError, match=r"script '.*' did not exit within 0\.5 s; it must print"):
        ask_script(script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60"), 1, limit_s=0.5)
    assert time.monotonic() - begin_s < 10.0
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 5.0
    while Path(f"/proc/{pid}").exists() and "sleep" in Path(f"/proc/{pid}/cmdline").read_text(errors="ignore"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_answers_keep_their_order_and_an_unchanged_one_is_reported_once() -> None:
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
    assert list(map(str, discovery.take())) == ["{'a': 1}", "closed", "{'a': 1}"]


COMMAND = ["python", "train.py"]


def policy(*words: str, slots: int = 4) -> Policy:
    return policy_of(parse([*words, *COMMAND]), {"a": slots}, timeout_s=600.0)


def test_defaults() -> None:
    found = policy("-np", "3", "--min-np", "2")
    assert (found.start_ranks, found.min_ranks, found.max_ranks) == (3, 2, None)
    assert (found.on_failure, found.cooldown_s, found.reset_limit) == (OnFailure.REPLACE_RANK, (30.0, 600.0), None)
    assert policy("--min-np", "2").start_ranks == 2
    assert policy("-np", "2", "--max-np", "4").min_ranks == 2


def test_under_horovods_name_a_failure_drops_the_host_for_good_as_there() -> None:
    found = policy("--min-np", "2", "--as-horovod")
    assert (found.on_failure, found.cooldown_s) == (OnFailure.DROP_HOST, None)
    words = ("--min-np", "2", "--as-horovod", "--on-failure", "replace-rank", "--blacklist-cooldown-range", "5", "50")
    found = policy(*words)
    assert (found.on_failure, found.cooldown_s) == (OnFailure.REPLACE_RANK, (5.0, 50.0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-np", "1", "--min-np", "2"), "number of ranks: expected --min-np <= -np <= --max-np"),
        (("--min-np", "3", "--max-np", "2"), "number of ranks: expected --min-np <= -np <= --max-np"),
        (("--min-np", "5"), r"--min-np 5 requires more ranks than the hosts have slots \(4\)"),
        (("-np", "5", "--min-np", "2"), r"option -np 5 requires more ranks than the hosts have slots \(4\)"),
        (("--min-np", "1", "--blacklist-cooldown-range", "9", "3"), r"does not exceed the second, found \(9.*, 3.*\)"),
        (("--min-np", "1", "--reset-limit", "-1"), "--reset-limit: expected at least 0, found -1"),
    ],
)
def test_contradictory_options_are_rejected(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(*words)


def test_jobs_with_a_fixed_number_of_ranks_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_elastic(parse(["-np", "2", *COMMAND]))
    assert is_elastic(parse(["--host-discovery-script", "./hosts.sh", *COMMAND]))
    with pytest.raises(SystemExit):
        parse(["-np", "2", "--reset-limit", "3", *COMMAND])
    assert "--reset-limit requires an elastic job; add --min-np" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--host-discovery-script", "x", "-H", "a:1", *COMMAND])


# ── a driver in the place of one that is lost ────────────────────────────────────────────────────────────────────────


def test_a_drivers_job_reaches_its_successor_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = Policy(
        start_ranks=2, min_ranks=1, max_ranks=4, on_failure=OnFailure.DROP_HOST, cooldown_s=(1.0, 2.0),
        has_successors=True,
    )  # fmt: skip
    job = ElasticJob(
        command=("python", "x.py"), policy=held, script="x.py", carried={"A": "b"}, interface="eth0",
        agent_command="do {command}", slurm_hosts=frozenset({"n1"}), ssh=("-p", "22"), agent_start_s=9.0,
        discovery="/hosts.sh", slots=2, hosts={"a": 1}, timestamps=True, folder=str(tmp_path),
    )  # fmt: skip
    endpoint = DriverEndpoint(proof=Proof(job="j", secret="s"), listeners=(7,), agents=(2, 3), numbers=7)
    told = Inheritance(job=job, environ={"A": "b"}, endpoint=endpoint)
    drive = mock.Mock(return_value=5)
    monkeypatch.setattr(driver, "drive", drive)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(told))))
    assert driver.inherit() == 5
    assert drive.call_args.args == (job, endpoint, {**os.environ, "A": "b"}, None)
