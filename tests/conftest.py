"""Starting a program on several ranks from a test."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

# Continuous integration tests changes, not luck; everywhere else each run looks elsewhere.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

TESTS = Path(__file__).parent

RunRanks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def mpiexec() -> list[str]:
    """The launcher with the options that let root start more ranks than there are cores."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("there is no mpiexec beside this Python nor on PATH")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        return [found]
    return [found, "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]


@pytest.fixture
def run_ranks(mpiexec: list[str], tmp_path: Path) -> RunRanks:
    """`run_ranks(program, ranks, *args, env=None, timeout_s=60, check=True)` → the finished job, output as text.

    `program` is a file of tests/ranks, or a path. The job must end with exit code 0 unless `check` is false; after
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
        command = [*mpiexec, "-np", str(ranks), sys.executable, str(TESTS / "ranks" / program), *map(str, args)]
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # there may be more ranks than cores
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            **(env or {}),
        }
        job = subprocess.Popen(
            command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            out, err = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            out, err = _end(job)
            pytest.fail(
                f"{program} on {ranks} ranks did not end within {timeout_s:.0f} s\n{out[-4000:]}\n{err[-8000:]}"
            )
        if check and job.returncode != 0:
            pytest.fail(f"{program} on {ranks} ranks ended with {job.returncode}\n{out[-4000:]}\n{err[-8000:]}")
        return subprocess.CompletedProcess(command, job.returncode, out, err)

    return run


def _end(job: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a whole job: mpiexec ends its ranks if it is asked nicely, which may be in groups of their own."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        return job.communicate(timeout=10.0)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        return job.communicate()
