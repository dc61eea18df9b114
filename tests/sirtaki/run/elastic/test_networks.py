"""Jobs over hosts with separate networks that are cut, slow, or lossy."""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.lib.cluster import CUT, WHOLE, LabError, LabShape, NetLab, why_unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_unavailable() is not None, reason=f"no emulated cluster: {why_unavailable()}"),
]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NetLab]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    try:
        with NetLab(LabShape(nodes=3)) as lab:
            yield lab
    except LabError as err:
        pytest.skip(f"no emulated cluster: {err}")


@pytest.fixture
def job(lab: NetLab, start: Callable) -> Callable:
    """`job(*options)` → a job with a rank on each of three nodes, of which the first has the driver."""

    def begin(*options: object):
        hosts = ",".join(f"{lab.hostname(node)}:1" for node in range(3))
        # A session of its own: no signal of the driver's reaches another machine.
        command = f"{lab.agent} {{host}} setsid --wait {{command}}"
        agents = ("--network-interface", "eth0", "--agent-command", command)
        popen = functools.partial(_popen, lab)
        found = start("-np", 3, "-H", hosts, "--min-np", 1, *agents, *options, popen=popen)
        found.of_size(3)
        return found

    return begin


def _popen(lab: NetLab, words: list[str], *, cwd: Path, **options: object):
    del cwd  # that of this process
    return lab.popen(0, words, **options)


def hosts_of(generation: list[dict]) -> list[str]:
    return [host for host, _, _ in generation[0]["members"]]


@pytest.mark.parametrize("cut", [{"into": CUT, "out_of": CUT}, {"into": CUT}, {"out_of": CUT}], ids=str)
def test_a_disconnected_host_is_dropped_and_rejected_when_it_returns(
    lab: NetLab, job: Callable, cut: dict[str, str]
) -> None:
    running = job("--blacklist-cooldown-range", 600, 600)
    before = len(running.processes())
    lab.hurt(2, **cut)
    running.until(
        lambda: hosts_of(running.generation() or running.generation(1)) == ["sirtaki-n0", "sirtaki-n1"],
        timeout_s=60.0,
    )
    assert any(line.startswith("host sirtaki-n2 is lost") for line in running.said)
    steps = running.generation()[0]["steps"]
    lab.hurt(2, **dict.fromkeys(cut, WHOLE))
    running.until(lambda: len(running.processes()) < before - 1, timeout_s=90.0)  # the agent there, and its rank
    assert hosts_of(running.generation()) == ["sirtaki-n0", "sirtaki-n1"]
    assert steps > 0
    assert running.stop() == 0


def test_most_hosts_continue_without_the_driver_that_is_cut_off_with_one(
    lab: NetLab, job: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRTAKI_TEST_TIMEOUT_S", "300")  # agents wait a minute for a silent driver
    running = job("--on-driver-loss", "go-on")
    lab.hurt(0, into=CUT, out_of=CUT)
    assert running.wait(timeout_s=40.0) == 1
    assert "too many ranks cannot be reached, and may continue without this side" in running.said[-1]
    logs = [running.folder / f"sirtaki-{lab.hostname(node)}.log" for node in (1, 2)]
    running.until(lambda: any("takes over 2 ranks" in log.read_text() for log in logs if log.exists()), timeout_s=150.0)
    running.until(
        lambda: (
            running.generation()
            and running.generation()[0]["number"] > 1
            and sorted(hosts_of(running.generation())) == ["sirtaki-n1", "sirtaki-n2"]
        ),
        timeout_s=60.0,
    )
    assert running.generation()[0]["steps"] > 0
    (running.folder / "stop").touch()
    running.until(lambda: not running.processes(), timeout_s=60.0)


def test_a_slow_network_that_loses_packets_is_no_reason_to_leave_anybody_out(
    lab: NetLab, job: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRTAKI_TEST_HEARTBEAT_S", "30")
    running = job()
    try:
        for node in range(3):
            lab.hurt(node, into="netem delay 200ms loss 5% limit 100000")
    except LabError as err:
        running.stop()
        pytest.skip(f"this kernel has no netem: {err}")
    time.sleep(40.0)
    assert [line for line in running.said if "lost" in line or "killed" in line] == []
    assert len(running.generation()) == 3
    assert running.generation()[0]["number"] == 1
    for node in range(3):
        lab.hurt(node, into=WHOLE)
    assert running.stop() == 0
