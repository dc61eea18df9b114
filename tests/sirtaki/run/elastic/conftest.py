"""Real elastic jobs on this machine. Several agents emulate hosts."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from elastic_jobs import LaunchedJob

MEMBER = Path(__file__).parents[3] / "elastic_member.py"


class Job(LaunchedJob):
    """A job that has been started, and what its ranks have noted."""

    @property
    def records(self) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("*.jsonl"):
            with suppress(ValueError):  # it is just being written
                found += [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(found, key=lambda record: record["at_s"])

    def generation(self, number: int | None = None) -> list[dict[str, Any]]:
        """Return the members' records by rank, once all exist; of the newest generation by default."""
        begun = [record for record in self.records if record["is_"] == "generation"]
        number = number or max([record["number"] for record in begun], default=0)
        found = sorted((record for record in begun if record["number"] == number), key=lambda record: record["rank"])
        return found if found and len(found) == found[0]["size"] else []

    def of_size(self, size: int) -> list[dict[str, Any]]:
        """Wait until the newest generation has `size` members that have all begun."""
        self.until(lambda: len(self.generation()) == size)
        return self.generation()

    def stop(self) -> int:
        """Lets the ranks finish; the launcher's exit code."""
        (self.folder / "stop").touch()
        return self.wait()

    def agents(self) -> dict[str, int]:
        """Process of each agent, by the hosts of its ranks."""
        ranks = {record["pid"]: record["members"][record["rank"]][0] for record in self.generation()}
        parents = {}
        for pid, host in ranks.items():
            with suppress(psutil.Error):
                parents[host] = psutil.Process(pid).ppid()
        return parents


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`start(*options)` → a job of elastic members; afterwards nothing of it may be left."""
    jobs: list[Job] = []

    def begin(*options: object, command: list[str] | None = None, **more: Any) -> Job:
        words = command or [sys.executable, str(MEMBER), str(tmp_path)]
        jobs.append(Job(tmp_path, [*options, *words], {**os.environ, "OMP_NUM_THREADS": "1"}, **more))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()
