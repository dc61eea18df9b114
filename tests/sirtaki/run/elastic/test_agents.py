"""Agents: how a driver starts, hears and loses them, and how they find a driver."""

import collections
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from sirtaki.comm.control.handshake import listen
from sirtaki.engine.membership import Finished, Proof
from sirtaki.errors import CommError, ConfigError
from sirtaki.run.elastic import agent, driver
from sirtaki.run.elastic.agent import (
    LEAVE_GRACE_S,
    AgentConfig,
    AgentRules,
    ElasticJob,
    Succession,
    end_grace_s,
    reach_driver,
)
from sirtaki.run.elastic.driver import AgentCrew, StartedAgent, agent_words, is_child, new_endpoint
from sirtaki.run.elastic.job_members import (
    KILL_GRACE_S,
    AgentMessage,
    EndAll,
    FormGeneration,
    KillRank,
    Lost,
    Policy,
    RankEnd,
    RankEnded,
    RegisterAgent,
    StartRank,
)
from sirtaki.run.host_check import PROBLEM, Need

PROOF = Proof(job="job", secret="hidden")
LATE_S = 20.0


def until(true: Callable[[], object]) -> Any:
    deadline_s = time.monotonic() + LATE_S
    while not (found := true()):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return found


@pytest.mark.parametrize(
    ("number", "environ", "grace_s"),
    [
        (signal.SIGTERM, {"SIRTAKI_CHECKPOINT_DIR": "/shared"}, LEAVE_GRACE_S),
        (signal.SIGINT, {"SIRTAKI_CHECKPOINT_DIR": "/shared"}, KILL_GRACE_S),
        (signal.SIGTERM, {}, KILL_GRACE_S),
        (None, {"SIRTAKI_CHECKPOINT_DIR": "/shared"}, KILL_GRACE_S),
    ],
)
def test_at_the_end_a_training_rank_has_time_for_a_checkpoint_and_a_waiting_one_has_not(
    number: int | None, environ: dict[str, str], grace_s: float
) -> None:
    actions = mock.Mock()
    rules = AgentRules(actions, host="a", proof=PROOF, now_s=0.0)
    for worker in (7, 8):
        rules.driver_message(StartRank(worker=worker, slot=worker), 0.0)
    rules.driver_message(FormGeneration(number=3, workers=(7,)), 1.0)
    rules.driver_message(EndAll(end_grace_s(number, environ)), 1.0)
    assert actions.ask_to_end.mock_calls == [mock.call(7), mock.call(8)]
    killed = dict.fromkeys((7, 8), 0.0)
    for now_s in range(1, 60):
        rules.tick(float(now_s))
        for worker in killed:
            if mock.call(worker) in actions.kill.mock_calls and not killed[worker]:
                killed[worker] = now_s - 1.0
    assert killed == {7: grace_s, 8: KILL_GRACE_S}


# ── a real agent, told by the test what a driver would tell it ───────────────────────────────────────────────────────


POLICY = Policy(start_ranks=1, min_ranks=1)


def job_of(*command: str, **more: Any) -> ElasticJob:
    return ElasticJob(command=command, one_host=True, **{"policy": POLICY, "agent_start_s": 20.0, **more})


def crew_of(job: ElasticJob) -> AgentCrew:
    return AgentCrew(job, new_endpoint(job.addresses), lambda name, lines: collections.deque(lines, 0), os.environ)


def events(crew: AgentCrew, count: int) -> list[AgentMessage | Lost]:
    found: list[AgentMessage | Lost] = []
    until(lambda: found.extend(crew.poll(0.05)) or len(found) >= count)
    return found


@pytest.fixture
def crew() -> Iterator[AgentCrew]:
    crew = crew_of(job_of(sys.executable, "-c", "import time; time.sleep(60)"))
    crew.start("localhost")
    (up,) = events(crew, 1)
    assert isinstance(up, AgentMessage)
    assert isinstance(up.message, RegisterAgent)
    yield crew
    crew.close()


@pytest.mark.lengthy
@pytest.mark.parametrize(("at_once", "exit_code"), [(True, 137), (False, 143)])
def test_it_ends_a_rank_on_request(crew: AgentCrew, at_once: bool, exit_code: int) -> None:
    crew.send_to(["localhost"], StartRank(worker=5, slot=0))
    crew.send_to(["localhost"], KillRank(worker=5, at_once=at_once))
    assert events(crew, 1) == [AgentMessage("localhost", RankEnded(worker=5, end=RankEnd(exit_code=exit_code)))]


def test_its_end_is_that_of_its_ranks(crew: AgentCrew) -> None:
    crew.send_to(["localhost"], StartRank(worker=5, slot=0))
    crew.send_to(["localhost"], EndAll())
    ended, lost = events(crew, 2)
    assert isinstance(ended, AgentMessage)
    assert lost == Lost("localhost", "its agent has exited")
    assert crew.hosts == []


@pytest.mark.parametrize("has_successors", [False, True])
def test_an_agent_that_may_have_another_driver_by_now_is_not_killed_by_the_one_that_has_lost_it(
    has_successors: bool,
) -> None:
    code = """
import json, socket, sys, time
from sirtaki.engine.membership import Proof
from sirtaki.run.elastic.agent import reach_driver
told = json.loads(sys.stdin.readline())
reach_driver([tuple(place) for place in told["places"]], proof=Proof(**told["proof"]), number=1).close()
time.sleep(60)
"""
    policy = Policy(start_ranks=1, min_ranks=1, has_successors=has_successors)
    crew = crew_of(job_of("x", agent_command=program(code), policy=policy))
    crew.start("a")
    assert events(crew, 1) == [Lost("a", "its agent has exited")]
    process = crew._leaving[0]._process  # type: ignore[attr-defined]
    crew.send_to(["a"], EndAll())
    with mock.patch.object(driver, "end_grace_s", return_value=-2.0):
        crew.close()
    assert (process.poll() is None) is has_successors
    process.kill()
    process.wait()


@pytest.mark.lengthy
def test_an_abandoned_agent_finds_no_driver_in_the_one_that_continues_without_it(crew: AgentCrew) -> None:
    (known,) = crew.agents.values()
    assert [*crew.lose(known, time.monotonic())] == [Lost("localhost", "its agent has exited")]
    with ThreadPoolExecutor() as pool:
        places = crew._board.places  # type: ignore[attr-defined]
        found = pool.submit(reach_driver, places, proof=crew._proof, number=known.number, timeout_s=0.5)  # type: ignore[attr-defined]
        until(lambda: [*crew.poll(0.05)] or found.done())
    with pytest.raises(CommError, match="cannot reach the driver"):
        found.result()


def test_an_agent_that_gets_an_unexpected_message_ends(crew: AgentCrew) -> None:
    crew.send_to(["localhost"], Finished())  # type: ignore[arg-type]  # which is a rank's
    assert isinstance(events(crew, 1)[0], Lost)


def program(code: str) -> str:
    """Return an agent command that runs a program of the test instead."""
    return shlex.join([sys.executable, "-c", code]) + " {command}"


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit(255)", "ended with exit code 255"),
        ("import time; time.sleep(3.0)", "its agent has not answered within 0.5 s"),
        ("no such program", "No such file or directory: 'no'"),
        (f"import sys; print({PROBLEM!r} + 'no script', file=sys.stderr); raise SystemExit(1)", "no script"),
    ],
)
def test_a_missing_agent_is_given_up_with_the_reason(code: str, why: str) -> None:
    start_s = 0.5 if "sleep" in code else 20.0
    command = f"{code} {{command}}" if code == "no such program" else program(code)
    crew = crew_of(job_of("x", agent_command=command, agent_start_s=start_s))
    crew.start("a")
    (lost,) = events(crew, 1)
    assert isinstance(lost, Lost)
    assert lost.why.endswith(why)
    crew.close()


def test_a_host_without_requirements_of_ranks_reports_it_before_parsing_the_rest() -> None:
    need = Need(folder="/", script="", interfaces=(), versions={"Sirtaki": "0.0"})
    line = msgspec.json.encode({"need": need, "of another version": 1}) + b"\n"
    shown: list[bytes] = []
    started = started_agent([sys.executable, "-m", "sirtaki.run.elastic.agent"], shown, line)
    until(started.why_ended)
    assert "Sirtaki" in started.why_ended()
    started.wait(LATE_S)
    assert shown == []


def started_agent(words: list[str], shown: list[bytes], line: bytes = b"told\n") -> StartedAgent:
    return StartedAgent("a", 1, words, os.environ, line, lambda name, lines: shown.extend(lines))


def test_the_reason_of_a_failed_ssh_is_kept_and_its_other_output_is_shown(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\nprintf 'Welcome\\nssh: connect to host a port 22: Connection refused\\n' >&2; exit 255\n"
    )
    ssh.chmod(0o755)
    shown: list[bytes] = []
    started = started_agent([str(ssh)], shown)
    started.wait(LATE_S)
    assert shown == [b"Welcome\n"]
    assert started.why_ended() == (
        "ssh: connect to host a port 22: Connection refused: start sshd there, or set its port with --ssh-port"
    )


@pytest.mark.lengthy
def test_a_command_that_does_not_end_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(input(), flush=True); time.sleep(60)"
    )
    shown: list[bytes] = []
    started = started_agent([sys.executable, "-c", code], shown)
    until(lambda: shown == [b"told\n"])
    begin_s = time.monotonic()
    started.wait(0.1)
    assert time.monotonic() - begin_s < 10.0
    assert started.why_ended().endswith("ended with exit code -9")


# ── the command lines that start agents ──────────────────────────────────────────────────────────────────────────────

WORDS = [sys.executable, "-P", "-m", "sirtaki.run.elastic.agent"]


def test_on_this_machine_it_is_a_child() -> None:
    assert is_child(job_of(), "localhost")
    assert agent_words(job_of(), "localhost", {"PYTHONPATH": "x"}) == WORDS


def test_elsewhere_ssh_starts_it_without_asking_for_a_password() -> None:
    words = agent_words(job_of(ssh=("-p", "2222")), "node1", {"PYTHONPATH": "/my code"})
    assert words[0] == "ssh"
    assert words[-4:-1] == ["-p", "2222", "node1"]
    assert "BatchMode=yes" in words
    assert words[-1] == f"exec env 'PYTHONPATH=/my code' {' '.join(WORDS)}"


def test_within_a_slurm_allocation_srun_does() -> None:
    job = job_of(slurm_hosts=frozenset({"node1"}))
    words = agent_words(job, "node1", {})
    assert words[0] == "srun"
    assert "--nodelist=node1" in words
    assert words[-len(WORDS) :] == WORDS
    assert "--cpu-bind=none" not in words  # which is a warning where nothing binds
    assert "--cpu-bind=none" in agent_words(job, "node1", {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1"})
    assert agent_words(job, "node2", {})[0] == "ssh"


def test_a_given_command_gets_host_and_command_at_their_places() -> None:
    job = job_of(agent_command="kubectl exec -i pod-{host} -- {command}")
    assert agent_words(job, "localhost", {}) == ["kubectl", "exec", "-i", "pod-localhost", "--", *WORDS]
    assert not is_child(job, "localhost")
    quoted = job_of(agent_command="sh -c 'cd / && {command}'")
    assert agent_words(quoted, "a", {})[-1] == f"cd / && {' '.join(WORDS)}"
    with pytest.raises(ConfigError, match=r"must contain \{command\}"):
        agent_words(job_of(agent_command="kubectl exec {host}"), "a", {})


# ── how agents and drivers find each other ───────────────────────────────────────────────────────────────────────────


def test_each_job_has_a_secret_of_its_own_which_is_not_shown() -> None:
    first, second = new_endpoint(["127.0.0.1"]), new_endpoint(["127.0.0.1"])
    assert first.proof.secret != second.proof.secret
    assert first.proof.job != second.proof.job
    assert first.proof.secret not in repr(first)
    for listener in (*first.listeners, *second.listeners):
        os.close(listener)


def test_a_missing_driver_is_searched_for_a_limited_time() -> None:
    (listener,) = listen(["127.0.0.1"])
    place = listener.getsockname()[:2]
    listener.close()
    begin_s = time.monotonic()
    with pytest.raises(CommError, match=r"cannot reach the driver \(launcher process\) at 127"):
        reach_driver([place], proof=PROOF, number=1, timeout_s=0.3)
    assert time.monotonic() - begin_s < 5.0


@pytest.mark.integration
def test_an_agent_whose_driver_continues_without_it_starts_no_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need(folder="/", script="", interfaces=(), versions={})
    config = AgentConfig(need=need, host="a", number=1, places=(), proof=PROOF, environ={}, job=job_of())
    succession = Succession(config)
    monkeypatch.setattr(agent, "CONNECT_S", 0.3)
    assert succession.find_driver([]) is None  # it was told of nobody
    with mock.patch("subprocess.Popen") as start:
        start.return_value.poll.return_value = None
        for _ in range(2):
            assert succession.find_driver([(1, succession.places)]) is None
        start.assert_called_once()
    succession.close()
