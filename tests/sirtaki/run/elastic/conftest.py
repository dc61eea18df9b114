"""Real jobs whose ranks come and go, on this machine; hosts are emulated by several agents."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sirtaki.machine import process_fields

MEMBER = Path(__file__).parents[3] / "elastic_member.py"
SOON_S = 20.0
_MARK = "SIRTAKI_TEST_JOB"


class Job:
    """A job that has been started, and what its ranks have noted."""

    def __init__(
        self,
        folder: Path,
        options: list[str],
        command: list[str],
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
    ) -> None:
        self.folder = folder
        environ = {**os.environ, _MARK: str(folder), "OMP_NUM_THREADS": "1"}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = popen(
                [sys.executable, "-m", "sirtaki.run", *options, *command],
                env=environ,
                stdout=out,
                stderr=err,
                cwd=folder,
            )

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def said(self) -> list[str]:
        """By the launcher."""
        mark = "sirtakirun: "
        return [line.removeprefix(mark) for line in self.err.splitlines() if line.startswith(mark)]

    @property
    def records(self) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("*.jsonl"):
            with suppress(ValueError):  # it is just being written
                found += [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(found, key=lambda record: record["at_s"])

    def generation(self, number: int | None = None) -> list[dict[str, Any]]:
        """What its members have noted, by rank, once all have; of the newest one without a number."""
        begun = [record for record in self.records if record["is_"] == "generation"]
        number = number or max([record["number"] for record in begun], default=0)
        found = sorted((record for record in begun if record["number"] == number), key=lambda record: record["rank"])
        return found if found and len(found) == found[0]["size"] else []

    def of_size(self, size: int) -> list[dict[str, Any]]:
        """Waits until the newest generation has so many members, all of which have begun."""
        self.until(lambda: len(self.generation()) == size)
        return self.generation()

    def until(self, condition: Callable[[], object], *, timeout_s: float = SOON_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                pytest.fail(f"it does not come true\n{self.err}\n{self.records[-10:]}")
            time.sleep(0.02)

    def stop(self) -> int:
        """Lets the ranks finish; the launcher's exit code."""
        (self.folder / "stop").touch()
        return self.wait()

    def wait(self, timeout_s: float = SOON_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job does not end\n{self.err}")

    def processes(self) -> dict[int, str]:
        """All that the job has started and that is there, by number its command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{_MARK}={self.folder}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        found.pop(self.process.pid, None)
        return found

    def agents(self) -> dict[str, int]:
        """Process of each agent, by the hosts of its ranks."""
        ranks = {record["pid"]: record["members"][record["rank"]][0] for record in self.generation()}
        parents = {}
        for pid, host in ranks.items():
            with suppress(OSError):
                parents[host] = int(process_fields(pid)[1])
        return parents


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`start(*options)` → a job of elastic members; afterwards nothing of it may be left."""
    jobs: list[Job] = []

    def begin(*options: object, command: list[str] | None = None, **more: Any) -> Job:
        words = command or [sys.executable, str(MEMBER), str(tmp_path)]
        jobs.append(Job(tmp_path, [*map(str, options)], words, **more))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(SOON_S)
        try:
            job.until(lambda job=job: not job.processes(), timeout_s=5.0)
        finally:
            for pid in job.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
