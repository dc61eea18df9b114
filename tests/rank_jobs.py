"""Jobs that run programs of tests/ranks, and the cases of a program as single tests.

A program that ends with `CASES = cases(globals())` and `conformance.training.main(CASES)` is launched once for all of
its cases. Its ranks print each case that they have passed, and each case is a test:

    test_edited_gradients_train_as_in_one_process = played_on_ranks("gradient_edits", Job(2), slow(Job(3)))

`pytest -k "set_to_none and 2-ranks"` launches only this case.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import IO, Any

import preloaded
import pytest
from _pytest.mark.structures import ParameterSet

TESTS = Path(__file__).parent

Play = Callable[["RankCase"], None]

CASE_TIMEOUT_S = 100.0

CONTROL = "SIRTAKI_TEST_CONTROL"
"""Environment variable of a job or of the whole run of pytest. `mesh` starts ranks without MPI."""

OVER_MESH = {CONTROL: "mesh"}

ONLY_OVER_MPI = pytest.mark.skipif(os.environ.get(CONTROL) == "mesh", reason="what it tries goes over MPI")

UNTUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0"}
"""Settings of jobs without tuning and registry."""


def environment(cache: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every rank."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # because there may be more ranks than cores
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "XDG_CACHE_HOME": str(cache),
        **more,
    }


def found_mpiexec() -> list[str] | None:
    """Return the launcher's command, with options for root and for more ranks than cores; None if there is none."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        return [found]
    return [found, "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]


class Launcher:
    """Starts programs on several ranks, which are forked from processes that have imported PyTorch."""

    def __init__(self, mpiexec: Sequence[str], folder: Path) -> None:
        self._mpiexec, self._folder = mpiexec, folder
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        program: str | Path,
        ranks: int,
        args: Sequence[object],
        *,
        env: Mapping[str, str],
        stderr: int | IO[str],
        options: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start a job. `program` is a file of tests/ranks, or a path; `options` are mpiexec's."""
        each = self.command_of_one(program, args)
        # A fresh folder, because a killed mpiexec with the same process id would block the start.
        session = tempfile.mkdtemp(dir=self._folder)
        over_mesh = env.get(CONTROL) == "mesh"
        starter = [sys.executable, TESTS / "plain_ranks.py"] if over_mesh else [*self._mpiexec, *options, "-np"]
        return subprocess.Popen(
            [*map(str, starter), str(ranks), *each],
            env={**env, "PRTE_MCA_prte_local_tmpdir_base": session},
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )

    def command_of_one(self, program: str | Path, args: Sequence[object]) -> list[str]:
        """Return the command that starts one process of a program."""
        self._preload()
        each = [sys.executable, TESTS / "preloaded.py", self._folder, TESTS / "ranks" / program, *args]
        return list(map(str, each))

    def _preload(self) -> None:
        """Start the servers and wait for them, also if an earlier test was interrupted while it started them."""
        addresses = [self._folder / str(number) for number in range(preloaded.SERVERS)]
        for seed, address in enumerate(addresses[len(self._servers) :], len(self._servers)):
            self._servers.append(
                subprocess.Popen(
                    [sys.executable, TESTS / "preloaded.py", address],
                    env={**environment(self._folder, {}), "PYTHONHASHSEED": str(seed)},
                    stdin=subprocess.PIPE,
                )
            )
        while not all(address.exists() for address in addresses):
            assert all(server.poll() is None for server in self._servers), "PyTorch cannot be loaded"
            time.sleep(0.05)

    def close(self) -> None:
        """End the servers."""
        for server in self._servers:
            assert server.stdin is not None
            server.stdin.close()
            server.wait(10.0)


def end(job: subprocess.Popen[str]) -> None:
    """End a whole job. mpiexec ends its ranks on SIGTERM; ranks may be in process groups of their own."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGTERM)
        try:
            job.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@dataclass(frozen=True)
class Job:
    """A job that runs the cases of a program."""

    ranks: int
    label: str = ""
    env: Mapping[str, str] = field(default_factory=dict, hash=False)


def cases(module: Mapping[str, Any], *parameters: str) -> list[Callable[..., None]]:
    """Return the functions of a module that are cases, except those that an earlier call has returned.

    Cases are public and return nothing. They have the given parameters, and others only with defaults.
    """
    listed = [each for value in module.values() if isinstance(value, list) for each in value if callable(each)]

    def is_case(value: Any) -> bool:
        if not isinstance(value, FunctionType) or value.__module__ != module["__name__"]:
            return False
        signature = inspect.signature(value)
        needed = tuple(name for name, each in signature.parameters.items() if each.default is each.empty)
        return needed == parameters and signature.return_annotation in (None, "None") and value.__name__[0] != "_"

    return [value for value in module.values() if is_case(value) and value not in listed]


def slow(job: Job) -> ParameterSet:
    """Run a job only in `make test-slow`."""
    return pytest.param(job, marks=pytest.mark.slow)


def integration(job: Job, *, but: str = "") -> ParameterSet:
    """Run a job only in `make test-integrations`, except for cases with `but` in their name."""
    return pytest.param(job, marks=pytest.mark.integration(but=but))


@dataclass(frozen=True)
class RankCase:
    """One case of a program on one job."""

    program: str
    name: str
    job: Job


def on_ranks(program: str, *jobs: Job | ParameterSet, only: str = "", cases: str = "CASES") -> pytest.MarkDecorator:
    """Parametrize a test with every case whose name contains `only`, on every job. Ids are case, ranks and label."""
    listed = getattr(importlib.import_module(f"ranks.{program}"), cases)
    names = [case.__name__ for case in listed if only in case.__name__]
    assert names, f"{program} has no case with {only!r} in its name"
    marked = [(job.values[0], [*job.marks]) if isinstance(job, ParameterSet) else (job, []) for job in jobs]
    return pytest.mark.parametrize(
        "rank_case",
        [
            pytest.param(
                RankCase(program, name, job),
                marks=[mark for mark in marks if not (but := mark.kwargs.get("but")) or but not in name],
                id="-".join(filter(None, (name, f"{job.ranks} ranks", job.label))).replace(" ", "-"),
            )
            for job, marks in marked
            for name in names
        ],
    )


def played_on_ranks(
    program: str, *jobs: Job | ParameterSet, only: str = "", cases: str = "CASES"
) -> Callable[[Play, RankCase], None]:
    """Return a test that runs cases on jobs and checks nothing else; see `on_ranks`."""

    @on_ranks(program, *jobs, only=only, cases=cases)
    def test(play: Play, rank_case: RankCase) -> None:
        play(rank_case)

    return test


class RankJob:
    """A launched program, and the cases that all its ranks have passed."""

    def __init__(self, launcher: Launcher, job: Job, program: str, names: Sequence[str], cache: Path) -> None:
        self._ranks, self._names = job.ranks, tuple(names)
        self._passed: dict[str, int] = {}
        self._out: list[str] = []
        self._news = threading.Condition()
        self._errors = cache / "stderr"
        with self._errors.open("w") as errors:
            self._job = launcher.start(
                f"{program}.py", job.ranks, names, env=environment(cache, job.env), stderr=errors
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._job.stdout is not None
        for line in self._job.stdout:
            with self._news:
                word, _, name = line.strip().partition(" ")
                if word == "passed":
                    self._passed[name] = self._passed.get(name, 0) + 1
                else:
                    self._out.append(line)
                self._news.notify_all()
        self._job.wait()
        with self._news:
            self._news.notify_all()

    def wait_for(self, name: str) -> None:
        """Wait until all ranks have passed a case. After the last case, wait for the end of the job."""
        deadline_s = time.monotonic() + CASE_TIMEOUT_S

        def has_passed() -> bool:
            return self._passed.get(name, 0) == self._ranks

        with self._news:
            self._news.wait_for(lambda: has_passed() or not self._reader.is_alive(), deadline_s - time.monotonic())
            if has_passed() and name != self._names[-1]:
                return
        if has_passed():
            self._reader.join(deadline_s - time.monotonic())
        if self._reader.is_alive() or self._job.poll() != 0 or not has_passed():
            late, code = self._reader.is_alive(), self._job.poll()
            self.close()
            pytest.fail(
                f"{name} on {self._ranks} ranks "
                + (f"did not end within {CASE_TIMEOUT_S:.0f} s" if late else f"ended with {code}")
                + f"\n{''.join(self._out)[-4000:]}\n{self._errors.read_text()[-8000:]}",
                pytrace=False,
            )

    def close(self) -> None:
        """End the job if it has not ended."""
        end(self._job)
        self._reader.join(10.0)
        assert self._job.stdout is not None
        self._job.stdout.close()


class RankJobs:
    """The launched program whose cases are awaited. One at a time."""

    def __init__(self, launcher: Launcher, caches: pytest.TempPathFactory) -> None:
        self._launcher, self._caches = launcher, caches
        self._group: tuple[str, Job] | None = None
        self._job: RankJob | None = None

    def play(self, case: RankCase, names: Sequence[str]) -> None:
        """Run a case. `names`: cases from this one on that run in the same launch."""
        if self._job is None or self._group != (case.program, case.job):
            self.close()
            self._group = (case.program, case.job)
            self._job = RankJob(self._launcher, case.job, case.program, names, self._caches.mktemp("cache"))
        try:
            self._job.wait_for(case.name)
        except BaseException:  # launch the remaining cases again
            self.close()
            raise
        if names[-1] == case.name:
            self.close()

    def close(self) -> None:
        """End the current job."""
        if self._job is not None:
            self._job.close()
        self._job = self._group = None


def following(request: pytest.FixtureRequest, case: RankCase) -> list[str]:
    """Return the names of this case and of later selected ones of the same program and job."""
    chosen = [
        item.callspec.params["rank_case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "rank_case" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    same = [each.name for each in chosen if (each.program, each.job) == (case.program, case.job)]
    return same[same.index(case.name) :]
