"""Observation of a job: watchers, totals, TensorBoard, Prometheus, and `sirtaki top`'s socket."""

import contextlib
import importlib.util
import logging
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sirtaki.engine import job
from sirtaki.errors import ConfigError
from sirtaki.watch import Decision, GenerationBegun, IterationEnded, TensorBoard, TrialEnded, Watcher, watchers
from sirtaki.watch.prometheus import CONNECTIONS, MetricsServer
from sirtaki.watch.watchers import RECENT, JobBeacon, Totals, run_folder, running_jobs

TOGETHER = GenerationBegun(number=2, rank=0, size=4)
DECISION = Decision(
    iteration=9, arm="grid", setting="gloo", knobs={}, default_s=0.6, best_s=0.2, n_trials=3, retune=False
)


def iteration(number: int, step_s: float) -> IterationEnded:
    return IterationEnded(number=number, step_s=step_s, communication_s=0.1, exposed_s=0.05, n_bytes=100, tuning=False)


EVENT = iteration(3, 0.1)


class Seen(Watcher):
    def __init__(self) -> None:
        self.events: list[object] = []

    def iteration(self, event: IterationEnded) -> None:
        self.events.append(event)

    def generation(self, event: GenerationBegun) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.events.append("closed")


class Failing(Watcher):
    def iteration(self, event: IterationEnded) -> None:
        raise RuntimeError("no")


@pytest.fixture(autouse=True)
def _nobody_watches() -> None:
    watchers.end(for_good=True)


def test_a_late_watcher_learns_that_the_ranks_are_connected() -> None:
    watchers.begin(TOGETHER)
    seen = Seen()
    watchers.add(seen)
    watchers.add(gone := Seen())
    for _ in range(2):
        watchers.remove(gone)
    watchers.notify(lambda watcher: watcher.iteration(EVENT))
    watchers.end(for_good=False)
    assert gone.events == [TOGETHER]
    assert seen.events == [TOGETHER, EVENT]
    watchers.end(for_good=True)
    assert seen.events == [TOGETHER, EVENT, "closed"]
    assert watchers.watching == []


def test_a_watcher_that_raises_is_removed_and_the_others_are_notified(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    watchers.add(Failing())
    watchers.add(seen)
    with caplog.at_level(logging.WARNING):
        watchers.notify(lambda watcher: watcher.iteration(EVENT), iteration=3)
        watchers.notify(lambda watcher: watcher.iteration(EVENT), iteration=4)
    assert seen.events == [EVENT, EVENT]
    (said,) = caplog.records
    assert (
        "the watcher Failing (object with callbacks for a job's events) raised an error in iteration 3; Sirtaki "
        "removed this watcher, and training continues: RuntimeError: no (test_watch.py:" in said.message
    )
    assert said.exc_info is None


def test_iterations_are_added_up_and_the_last_ones_averaged() -> None:
    totals = Totals()
    assert totals.recent_means() == {}
    totals.iteration(iteration(1, math.nan))
    for number in range(RECENT):
        totals.iteration(iteration(number, 0.2))
    assert totals.iterations == RECENT + 1
    assert totals.n_bytes == 100 * (RECENT + 1)
    assert totals.step_s == pytest.approx(0.2 * RECENT)
    assert totals.recent_means() == pytest.approx({"step_s": 0.2, "communication_s": 0.1, "exposed_s": 0.05})


def test_a_decision_reports_its_gain() -> None:
    totals = Totals()
    assert math.isnan(totals.gain)
    totals.decision(DECISION)
    assert (totals.setting, totals.decisions) == ("gloo", 1)
    assert totals.gain == pytest.approx(3.0)


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))


def test_values_are_written_at_their_iteration() -> None:
    writer = Writer()
    board = TensorBoard(writer=writer, every=2)
    board.iteration(iteration(1, 0.1))
    board.iteration(iteration(2, math.nan))
    board.trial(TrialEnded(iteration=5, arm="a", setting="s", knobs={}, communication_s=math.inf, best_s=0.3))
    board.decision(DECISION)
    board.generation(TOGETHER)
    board.close()
    assert writer.scalars == [
        ("sirtaki/communication_s", 0.1, 2),
        ("sirtaki/exposed_s", 0.05, 2),
        ("sirtaki/trial/best_s", 0.3, 5),
        ("sirtaki/decision/communication_s", 0.2, 9),
        ("sirtaki/ranks", 4, 2),
    ]
    assert writer.texts == [("sirtaki/setting", "gloo (proposed by grid)", 9)]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="TensorBoard is here")
def test_a_missing_package_is_reported_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoard()


def some() -> Totals:
    totals = Totals()
    totals.iteration(iteration(1, 0.5))
    return totals


def test_a_port_answers_with_each_metric_until_it_is_closed() -> None:
    server = MetricsServer(some(), host="127.0.0.1", port=0, rank=1, size=4)
    address = f"http://127.0.0.1:{server.port}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            families = list(text_string_to_metric_families(answer.read().decode()))
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)
    assert all(sample.labels == {"rank": "1"} for family in families for sample in family.samples)
    assert {sample.name: (family.type, sample.value) for family in families for sample in family.samples} == {
        "sirtaki_iterations_total": ("counter", 1),
        "sirtaki_step_seconds_total": ("counter", 0.5),
        "sirtaki_communication_seconds_total": ("counter", 0.1),
        "sirtaki_exposed_seconds_total": ("counter", 0.05),
        "sirtaki_exposed_share": ("gauge", 0.1),
        "sirtaki_gradient_bytes_total": ("counter", 100),
        "sirtaki_trials_total": ("counter", 0),
        "sirtaki_decisions_total": ("counter", 0),
        "sirtaki_generation": ("gauge", 0),
        "sirtaki_ranks": ("gauge", 4),
    }


def test_serving_metrics_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRTAKI_METRICS_PORT", "9400")
    monkeypatch.setattr(sys, "path", [])  # nothing can be imported that has not been yet
    monkeypatch.delitem(sys.modules, "prometheus_client", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'sirtaki\[prometheus\]'"):
        job.init()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_data_loaders_worker_does_not_keep_the_port() -> None:
    server = MetricsServer(some(), host="127.0.0.1", port=0, rank=0, size=1)
    (until, ends), (begun, begins) = os.pipe(), os.pipe()
    worker = os.fork()
    if not worker:
        os.close(ends)
        os.write(begins, b".")
        os.read(until, 1)
        os._exit(0)
    try:
        os.read(begun, 1)  # before it runs, it holds what was open
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert answer.status == 200
        server.close()
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10)
        MetricsServer(some(), host="127.0.0.1", port=server.port, rank=0, size=1).close()
    finally:
        os.close(ends)
        os.waitpid(worker, 0)
        for end in (until, begun, begins):
            os.close(end)


def test_a_port_is_opened_without_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: str) -> str:
        raise AssertionError

    monkeypatch.setattr(socket, "getfqdn", asked)
    MetricsServer(some(), host="127.0.0.1", port=0, rank=0, size=1).close()


@pytest.mark.lengthy
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_strangers_at_the_port_cost_neither_threads_nor_descriptors(
    count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    server = MetricsServer(some(), host="127.0.0.1", port=0, rank=0, size=1)
    rng = random.Random(count)
    held = []
    try:
        for number in range(count):
            stranger = socket.create_connection(("127.0.0.1", server.port), timeout=10.0)
            with contextlib.suppress(OSError):
                stranger.sendall([b"", rng.randbytes(500), b"GET /metr", b"POST / HTTP/1.1\r\n" * 40][number % 4])
            held.append(stranger)
            if len(held) > 60:
                held.pop(0).close()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert answer.status == 200
        assert threading.active_count() <= before[1] + 1 + 2 * CONNECTIONS
    finally:
        for stranger in held:
            stranger.close()
        server.close()
    deadline_s = time.monotonic() + 10.0
    while (len(os.listdir("/proc/self/fd")), threading.active_count()) > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert capfd.readouterr().err == ""


def test_a_job_reports_its_state_until_it_ends(tmp_path: Path) -> None:
    presence = JobBeacon(lambda: {"iteration": 7}, folder=tmp_path)
    assert list(running_jobs(tmp_path)) == [{"iteration": 7}]
    assert list(running_jobs(tmp_path)) == [{"iteration": 7}]
    presence.close()
    presence.close()
    assert list(running_jobs(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "strange").touch()
    job = (
        "import os, pathlib, sys; from sirtaki.watch.watchers import JobBeacon\n"
        "presence = JobBeacon(lambda: {}, folder=pathlib.Path(sys.argv[1])); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", job, tmp_path], check=True)
    assert len(list(tmp_path.iterdir())) == 2
    assert list(running_jobs(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_not_alive_because_its_data_loader_is(tmp_path: Path) -> None:
    job = (
        "import os, pathlib, sys; from sirtaki.watch.watchers import JobBeacon\n"
        "presence = JobBeacon(lambda: {}, folder=pathlib.Path(sys.argv[1]))\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "print('.', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-W", "ignore", "-c", job, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as begun:
        assert begun.stdout is not None
        assert begun.stdout.readline()
        assert begun.wait() == 0
        assert len(list(tmp_path.iterdir())) == 1
        assert list(running_jobs(tmp_path)) == []
        assert list(tmp_path.iterdir()) == []


def test_a_job_that_does_not_answer_is_left_out_and_asked_again(tmp_path: Path) -> None:
    answers = iter([None, {"iteration": 1}])

    def answer() -> dict[str, int]:
        if (said := next(answers)) is None:
            raise RuntimeError("just beginning")
        return said

    presence = JobBeacon(answer, folder=tmp_path)
    try:
        assert list(running_jobs(tmp_path)) == []
        assert list(running_jobs(tmp_path)) == [{"iteration": 1}]
    finally:
        presence.close()


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_folder() == tmp_path / "sirtaki"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert run_folder().name == f"sirtaki-{os.getuid()}"
    assert list(running_jobs(tmp_path / "none")) == []
