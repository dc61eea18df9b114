"""Elastic jobs of real processes: ranks, agents, driver and hosts are lost and added."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

AGENTS = ("--agent-command", "{command}")


def places(generation: list[dict]) -> list[tuple[str, int]]:
    return [(host, slot) for host, slot, _ in generation[0]["members"]]


def test_survivors_of_a_killed_rank_continue_at_once_and_it_is_replaced(start: Callable, tmp_path: Path) -> None:
    job = start("-np", 3, "--min-np", 2, "--output-filename", tmp_path / "output")
    first = job.of_size(3)
    assert places(first) == [("localhost", slot) for slot in range(3)]
    killed_s = time.time()
    os.kill(first[1]["pid"], signal.SIGKILL)
    job.until(lambda: job.generation(2))
    assert max(record["at_s"] for record in job.generation(2)) - killed_s < 2.0
    assert [record["pid"] for record in job.generation(2)] == [first[0]["pid"], first[2]["pid"]]
    third = job.of_size(3)
    assert [record["pid"] for record in third][:2] == [first[0]["pid"], first[2]["pid"]]
    assert [new for _, _, new in third[0]["members"]] == [False, False, True]
    assert len({record["steps"] for record in third}) == 1
    assert third[0]["steps"] >= job.generation(2)[0]["steps"] > 0
    assert job.stop() == 0
    assert "rank 1 (host localhost, slot 1) was killed by SIGKILL; replaced in place, 2 continue" in job.said
    lines = (job.folder / "out").read_text().splitlines()
    assert sorted(line.split("]")[0] for line in lines) == ["[0", "[1", "[2"]
    assert "finished after" in (tmp_path / "output" / "localhost.1" / "stdout").read_text()


@pytest.mark.integration
def test_hosts_follow_discovery_and_invalid_output_changes_nothing(start: Callable, tmp_path: Path) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "hosts.sh"
    hosts.write_text("a:1\n\nb\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    job = start("--min-np", 2, "--max-np", 3, "--slots-per-host", 1, "--host-discovery-script", script, *AGENTS)
    first = job.of_size(2)
    assert places(first) == [("a", 0), ("b", 0)]
    hosts.write_text("a:1\nb\nc:4\n")
    second = job.of_size(3)
    assert places(second) == [("a", 0), ("b", 0), ("c", 0)]
    hosts.write_text("a:1\nb\nc:many\n")
    job.until(
        lambda: any(
            "the invalid line 'c:many'; each line must be a host, as name or name:slots" in line for line in job.said
        )
    )
    hosts.write_text("c:4\n")
    job.until(lambda: (now := job.generation()) and places(now)[0][0] == "c" and len(now) == 3)
    last = job.generation()
    assert last[0]["pid"] == second[2]["pid"]
    assert last[0]["steps"] > second[0]["steps"]
    assert {record["pid"] for record in job.records if record["is_"] == "dismissed"} == {
        record["pid"] for record in first
    }
    assert job.stop() == 0
    assert [line for line in job.said if line.startswith("host ") and "script" not in line] == [
        "host c with 4 slots is new",
        "host a was removed; host b was removed",
    ]


@pytest.mark.slow
def test_the_ranks_of_a_killed_agent_end_with_all_that_they_have_started(start: Callable) -> None:
    job = start("-H", "a:1,b:2", "--min-np", 1, "--blacklist-cooldown-range", 1, 2, *AGENTS)
    (job.folder / "with_child").touch()
    before = job.of_size(3)
    assert places(before) == [("a", 0), ("b", 0), ("b", 1)]
    gone = {record["pid"] for record in before[1:]}
    os.kill(job.agents()["b"], signal.SIGKILL)
    job.until(lambda: not gone & set(job.processes()))
    job.until(lambda: len([line for line in job.processes().values() if line.startswith("sleep")]) in (1, 3))
    job.until(lambda: (now := job.generation()) and now[0]["number"] > 1)
    after = job.of_size(3)
    assert after[0]["pid"] == before[0]["pid"]
    assert job.stop() == 0
    assert any(
        line.startswith("host b is lost (its agent has exited) with ranks 1, 2; host b is excluded")
        for line in job.said
    )
    assert "host b is used again" in job.said


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_no_process_remains_of_a_job_whose_driver_is_killed(start: Callable, number: signal.Signals) -> None:
    job = start("-H", "a:1,b:1", "--min-np", 1, *AGENTS)
    job.of_size(2)
    for pid in job.processes():  # nor does what proves who belongs to the job stand where others can read it
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert b"secret" not in shown.lower()
    os.kill(job.process.pid, number)
    assert job.wait() == (-9 if number is signal.SIGKILL else 143)
    job.until(lambda: not job.processes(), timeout_s=6.0)


@pytest.mark.slow
def test_nothing_is_left_where_driver_and_agents_are_killed(start: Callable) -> None:
    job = start("-H", "a:1,b:1", "--min-np", 1, *AGENTS)
    (job.folder / "with_child").touch()
    job.of_size(2)
    for pid in (*job.agents().values(), job.process.pid):
        os.kill(pid, signal.SIGKILL)
    job.until(lambda: not job.processes(), timeout_s=6.0)
    job.wait()


@pytest.mark.integration
def test_an_agent_replaces_a_driver_that_is_killed(start: Callable) -> None:
    job = start("-H", "a:1,b:1,c:1", "--min-np", 2, "--on-driver-loss", "go-on", *AGENTS)
    first = job.of_size(3)
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.wait() == -9
    logs = [job.folder / f"sirtaki-{host}.log" for host in "abc"]
    job.until(lambda: any("takes over 3 ranks on" in log.read_text() for log in logs if log.exists()))
    assert [record["pid"] for record in job.generation()] == [record["pid"] for record in first]
    os.kill(first[1]["pid"], signal.SIGKILL)
    job.until(lambda: len(job.generation(3)) == 3)
    last = job.generation(3)
    assert {first[0]["pid"], first[2]["pid"]} < {record["pid"] for record in last}
    assert last[0]["steps"] > 0
    (job.folder / "stop").touch()
    job.until(lambda: not job.processes())
    assert "finished after" in "".join(log.read_text() for log in logs)


def test_a_script_that_fails_everywhere_fails_once_with_its_reason(start: Callable) -> None:
    job = start("-np", 2, "--min-np", 1, command=[sys.executable, "-c", "raise ValueError('a bad batch')"])
    assert job.wait() == 1
    assert job.said[-1].startswith("no rank was able to join the job; the first")
    assert "ValueError: a bad batch" in job.said[-1]
    assert job.err.count("Traceback") == 1


def test_programs_that_join_nothing_end_well(start: Callable) -> None:
    command = ["sh", "-c", "echo $GREETING $HOROVOD_HOSTNAME"]
    job = start("--as-horovod", "-np", 2, "--min-np", 2, "-x", "GREETING=hello", command=command)
    assert job.wait() == 0
    assert "use --host-discovery-script FILE, or --on-failure replace-rank" in job.err
    assert sorted((job.folder / "out").read_text().splitlines()) == [
        "[localhost:0] hello localhost",
        "[localhost:1] hello localhost",
    ]


@pytest.mark.slow
def test_the_user_can_end_a_job_whose_driver_was_lost(start: Callable) -> None:
    job = start("-H", "a:1,b:1", "--min-np", 1, "--on-driver-loss", "go-on", *AGENTS)
    job.of_size(2)
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()
    job.until(lambda: any("elastic.driver" in line for line in job.processes().values()))
    (successor,) = [pid for pid, line in job.processes().items() if "elastic.driver" in line]
    job.until(lambda: any("takes over" in log.read_text() for log in job.folder.glob("*.log")))
    os.kill(successor, signal.SIGTERM)
    job.until(lambda: not job.processes())


@pytest.mark.slow
def test_a_hanging_rank_is_evicted_and_rejected_when_it_returns(start: Callable) -> None:
    job = start("-np", 3, "--min-np", 2)
    first = job.of_size(3)
    os.kill(first[1]["pid"], signal.SIGSTOP)
    job.until(lambda: len(job.generation(2)) == 2, timeout_s=60.0)
    assert any("did not leave its generation within 30 s and was killed" in line for line in job.said)
    assert first[1]["pid"] not in job.processes()
    job.of_size(3)
    assert job.stop() == 0


@pytest.mark.slow
def test_a_hanging_host_is_dropped_and_ends_its_ranks_when_it_returns(start: Callable) -> None:
    job = start("-H", "a:1,b:1,c:1", "--min-np", 1, "--blacklist-cooldown-range", 600, 600, *AGENTS)
    first = job.of_size(3)
    agent, rank = job.agents()["b"], first[1]["pid"]
    for pid in (rank, agent):
        os.kill(pid, signal.SIGSTOP)
    job.until(lambda: any(line.startswith("host b is lost (it has been silent for 10 s)") for line in job.said))
    job.of_size(2)
    for pid in (agent, rank):
        os.kill(pid, signal.SIGCONT)
    job.until(lambda: rank not in job.processes())
    assert places(job.generation()) == [("a", 0), ("c", 0)]
    assert job.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hanging_host_ends_its_ranks_when_it_returns_to_a_successor_of_its_driver(
    start: Callable,
) -> None:
    words = ("--min-np", 1, "--blacklist-cooldown-range", 600, 600, "--on-driver-loss", "go-on")
    job = start("-H", "a:1,b:1,c:1", *words, *AGENTS)
    first = job.of_size(3)
    os.kill(job.process.pid, signal.SIGKILL)
    job.until(lambda: any("takes over 3 ranks" in log.read_text() for log in job.folder.glob("*.log")))
    gone = job.agents()["c"], first[2]["pid"]
    for pid in gone:
        os.kill(pid, signal.SIGSTOP)
    job.until(lambda: len(job.generation()) == 2, timeout_s=60.0)
    for pid in gone:
        os.kill(pid, signal.SIGCONT)
    job.until(lambda: not {*gone} & {*job.processes()}, timeout_s=200.0)
    assert len(job.generation()) == 2
    (job.folder / "stop").touch()
    job.until(lambda: not job.processes(), timeout_s=30.0)


@pytest.mark.slow
def test_ranks_that_wait_for_a_vanished_host_are_notified_by_the_driver(
    start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRTAKI_TEST_HEARTBEAT_S", "60")
    job = start("-H", "a:1,b:1,c:1", "--min-np", 2, "--blacklist-cooldown-range", 600, 600, *AGENTS)
    first = job.of_size(3)
    gone = job.agents()["b"], first[1]["pid"]
    stopped_s = time.time()
    for pid in gone:
        os.kill(pid, signal.SIGSTOP)
    job.until(lambda: job.generation(2), timeout_s=60.0)
    assert max(record["at_s"] for record in job.generation(2)) - stopped_s < 11.0
    assert any("host b is lost" in record["text"] for record in job.records if record["is_"] == "failure")
    for pid in gone:
        os.kill(pid, signal.SIGCONT)
    job.until(lambda: not {*gone} & {*job.processes()})
    assert job.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_driver_that_another_one_has_taken_the_place_of_ends_alone(start: Callable) -> None:
    job = start("-H", "a:1,b:1", "--min-np", 1, "--on-driver-loss", "go-on", *AGENTS)
    job.of_size(2)
    os.kill(job.process.pid, signal.SIGSTOP)
    job.until(lambda: any("takes over 2 ranks" in log.read_text() for log in job.folder.glob("*.log")), timeout_s=90.0)
    time.sleep(3.0)
    os.kill(job.process.pid, signal.SIGCONT)
    assert job.wait() == 1
    time.sleep(3.0)
    assert len(job.generation(1)) == 2
    assert {record["pid"] for record in job.generation(1)} < set(job.processes())
    assert len(job.agents()) == 2
    (job.folder / "stop").touch()
    job.until(lambda: not job.processes())
    assert [record for record in job.records if record["is_"] == "failure"] == []


# ── a script as written for Horovod ──────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import os, time
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())

@hvd.elastic.run
def train(state):
    print(f"begins at {state.batch} as {hvd.rank()} of {hvd.size()}, process {os.getpid()}", flush=True)
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
        state.batch += 1
        if state.batch % 10 == 0:
            state.stops = bool(hvd.broadcast_object(os.path.exists("stop")))
            state.commit()
            if state.stops:
                break
    print(f"ends with {sum(p.double().sum().item() for p in model.parameters())!r}", flush=True)

train(hvd.elastic.TorchState(model, optimizer, batch=0, stops=False))
"""


def begun(job, size: int) -> list[tuple[int, int, int]]:
    """At which step, as which rank, which process: the newest beginnings of a generation of so many."""
    text = (job.folder / "out").read_text()
    found = re.findall(rf"begins at (\d+) as (\d+) of {size}, process (\d+)", text)
    return [(int(step), int(rank), int(pid)) for step, rank, pid in found]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_unchanged_script_survives_kills_and_changing_hosts(start: Callable, tmp_path: Path) -> None:
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_text(SCRIPT)
    hosts.write_text("a:1\nb:1\n")
    job = start(
        "--as-horovod", "--on-failure", "replace-rank", "--min-np", 1, "--host-discovery-script", f"cat {hosts}",
        "--agent-command", "{command}", command=[sys.executable, str(script)],
    )  # fmt: skip
    job.until(lambda: len(begun(job, 2)) == 2, timeout_s=60.0)
    hosts.write_text("a:1\nb:1\nc:1\n")
    job.until(lambda: len(begun(job, 3)) == 3, timeout_s=60.0)
    third = sorted(begun(job, 3), key=lambda entry: entry[1])
    assert third[0][0] > 0
    os.kill(third[0][2], signal.SIGKILL)
    job.until(lambda: len(begun(job, 2)) == 4, timeout_s=60.0)
    assert {pid for _, _, pid in begun(job, 2)[2:]} == {pid for _, _, pid in third[1:]}
    assert begun(job, 2)[-1][0] >= third[0][0]
    job.until(lambda: len(begun(job, 3)) == 6, timeout_s=60.0)
    hosts.write_text("b:1\nc:1\n")
    job.until(lambda: len(begun(job, 2)) == 6, timeout_s=60.0)
    (job.folder / "stop").touch()
    job.process.wait(60.0)
    assert job.process.returncode == 0
    sums = re.findall(r"ends with (\S+)", (job.folder / "out").read_text())
    assert len(sums) == 2
    assert len(set(sums)) == 1
