"""Fixtures that start programs on several ranks."""

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from rank_jobs import Launcher, Play, RankJobs, end, environment, following, found_mpiexec

from sirtaki.machine import ReservedPorts

# Continuous integration tests the change with fixed examples. All further runs draw new ones.
settings.register_profile("ci", derandomize=True)
settings.register_profile("quick", max_examples=10)
if os.environ.get("CI"):
    settings.load_profile("ci")

# PyTorch's store resolves the name of each address that connects. A lost answer of the name server would take 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

STARTS_RANKS = {"mpiexec", "launch", "start"}
"""Fixtures of tests that start ranks by mpiexec or `sirtakirun`."""

RunRanks = Callable[..., subprocess.CompletedProcess[str]]

PATIENCE = 2.0
"""Factor on the time limits of jobs, in comparison with an idle machine."""

WHOLE_JOBS_UNTIL = "SIRTAKI_TEST_JOBS_UNTIL"
"""Environment variable: seconds since the epoch after which tests marked integration are skipped."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip whole jobs late in a run, so that a slow machine has time for the remaining tests."""
    until_s = float(os.environ.get(WHOLE_JOBS_UNTIL, "inf"))
    if item.get_closest_marker("integration") is not None and time.time() > until_s:
        pytest.skip(f"{WHOLE_JOBS_UNTIL} is over: this machine is too slow for all whole jobs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Exclude tests that start ranks from `make quick`. Run tests of further programs last."""
    items.sort(key=lambda item: "integrations" in item.path.parts)
    for item in items:
        if STARTS_RANKS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(autouse=True)
def _log_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Sirtaki's log reach the root logger, although `init()` in an earlier test may have disabled propagation."""
    monkeypatch.setattr(logging.getLogger("sirtaki"), "propagate", True)


@pytest.fixture
def reserve() -> Iterator[Callable[..., int]]:
    """Return `reserve(count=1, host="127.0.0.1")`. It returns the first of consecutive free ports, and keeps them."""
    with ExitStack() as held:
        yield lambda *args, **options: held.enter_context(ReservedPorts(*args, **options)).first


@pytest.fixture(scope="session")
def mpiexec() -> list[str]:
    """Return the launcher's command, with options that let root start more ranks than cores."""
    found = found_mpiexec()
    if found is None:
        pytest.skip("there is no mpiexec beside this Python nor on PATH")
    return found


@pytest.fixture(scope="session")
def launcher(mpiexec: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Return a launcher of programs on several ranks."""
    launcher = Launcher(mpiexec, tmp_path_factory.mktemp("ranks"))
    yield launcher
    launcher.close()


@pytest.fixture
def run_ranks(launcher: Launcher, tmp_path: Path) -> RunRanks:
    """Return `run_ranks(program, ranks, *args, env=None, timeout_s=60, check=True)`, which returns the finished job.

    `program` is a file of tests/ranks, or a path. The job must end with exit code 0 unless `check` is false. After
    `timeout_s` all its processes are killed and the test fails.
    """

    def run(
        program: str | Path,
        ranks: int,
        *args: object,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        timeout_s *= PATIENCE
        environ = environment(tmp_path / "cache", env or {})
        job = launcher.start(program, ranks, args, env=environ, stderr=subprocess.PIPE)
        try:
            out, err = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end(job)
            out, err = job.communicate()
            pytest.fail(
                f"{program} on {ranks} ranks did not end within {timeout_s:.0f} s\n{out[-4000:]}\n{err[-8000:]}"
            )
        if check and job.returncode != 0:
            pytest.fail(f"{program} on {ranks} ranks ended with {job.returncode}\n{out[-4000:]}\n{err[-8000:]}")
        return subprocess.CompletedProcess(job.args, job.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def rank_jobs(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankJobs]:
    """Return the running job whose cases are single tests."""
    jobs = RankJobs(launcher, tmp_path_factory)
    yield jobs
    jobs.close()


@pytest.fixture
def play(request: pytest.FixtureRequest, rank_jobs: RankJobs) -> Play:
    """Return `play(rank_case)`, which passes when all ranks have passed the case."""
    return lambda case: rank_jobs.play(case, following(request, case))


@pytest.fixture
def log_of(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes records as a trial log."""

    def write(*records: dict[str, Any]) -> Path:
        path = tmp_path / "trials.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write
