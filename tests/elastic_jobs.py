"""Elastic jobs for tests: start them, apply faults, and check the logs of their ranks.

The checks do not know the faults. They read the logs of `ranks/elastic_member.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rank_jobs import UNTUNED, Launcher, environment
from ranks import elastic_member

Line = dict[str, Any]


MARK = "SIRTAKI_TEST_JOB"
SOON_S = 40.0


class LaunchedJob:
    """A job of `sirtakirun` in a folder. Its processes are found by an environment variable."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[object],
        env: Mapping[str, str],
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
    ) -> None:
        """Start the job. `words` are arguments of `sirtakirun`."""
        self.folder = folder
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = popen(
                [sys.executable, "-m", "sirtaki.run", *map(str, words)],
                env={**env, MARK: str(folder)},
                stdout=out,
                stderr=err,
                cwd=folder,
            )

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def said(self) -> list[str]:
        """Return the launcher's output lines."""
        mark = "sirtakirun: "
        return [line.removeprefix(mark) for line in self.err.splitlines() if line.startswith(mark)]

    def output(self) -> str:
        """Return the last lines of the ranks and of the launcher."""
        return (self.folder / "out").read_text()[-8000:] + self.err[-8000:]

    def until(self, condition: Callable[[], object], *, timeout_s: float = SOON_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"it does not come true\n{self.output()}")
            time.sleep(0.02)

    def wait(self, timeout_s: float = SOON_S) -> int:
        """Wait until the launcher has ended. Return its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end\n{self.output()}") from None

    def processes(self) -> dict[int, str]:
        """Return the processes that the job has started and that are alive: command line by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.folder}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        found.pop(self.process.pid, None)
        return found

    def end(self) -> None:
        """Kill remaining processes. Raise AssertionError if a process has outlived its launcher."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(SOON_S)
        try:
            self.until(lambda: not self.processes(), timeout_s=5.0)
        finally:
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class ElasticJob(LaunchedJob):
    """A job with one host per worker. A context manager that starts and ends it."""

    def __init__(
        self,
        launcher: Launcher,
        folder: Path,
        *,
        ranks: int,
        env: Mapping[str, str] | None = None,
        program: str = "elastic_member.py",
        replaces: bool = False,
        **plan: Any,
    ) -> None:
        """Prepare the job. `plan`: of the program. `replaces`: whether a lost worker is replaced."""
        self.folder, self._plan = folder, elastic_member.Plan(**(plan if program == "elastic_member.py" else {}))
        hosts = folder / "hosts"
        hosts.write_text("".join(f"w{number}:1\n" for number in range(ranks)))
        on_failure = "replace-rank" if replaces else "drop-host"
        options = ["-np", ranks, "--min-np", 1, "--host-discovery-script", f"cat {hosts}", "--on-failure", on_failure]
        command = launcher.command_of_one(program, [folder, json.dumps(plan)])
        self._words = [*options, "--agent-command", "{command}", *command]
        self._env = {**environment(folder / "cache", {**UNTUNED, **(env or {})}), elastic_member.HOSTS: str(hosts)}

    def __enter__(self) -> ElasticJob:
        super().__init__(self.folder, self._words, self._env)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, timeout_s: float = 40.0) -> Judge:
        """Wait until the job has ended successfully. Return the checks of its logs."""
        assert self.wait(timeout_s) == 0, self.output()
        logs = {int(path.stem): read(path) for path in self.folder.glob("*.log") if path.stem.isdecimal()}
        # A worker has ended well if the last line of its log is the end or the leave of a generation.
        codes = {worker: 0 if log and log[-1]["what"] in ("end", "left") else -9 for worker, log in logs.items()}
        return Judge(logs=logs, codes=dict(sorted(codes.items())), plan=self._plan, output=self.output())


def read(path: Path) -> list[Line]:
    """Return the lines of a log, without an incomplete last line of a killed process."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


class Judge:
    """Checks that hold after any faults.

    Attributes:
        logs: log lines by worker.
        codes: exit codes by worker.
        output: output of all workers.
        iterations: iterations of the whole job.
    """

    def __init__(
        self, *, logs: dict[int, list[Line]], codes: dict[int, int | None], plan: elastic_member.Plan, output: str
    ) -> None:
        self.logs, self.codes, self._plan, self.output = logs, codes, plan, output
        self.iterations = plan.iterations

    def lines(self, what: str) -> list[Line]:
        """Return lines of all workers, in order of time."""
        found = [
            {**line, "worker": worker} for worker, log in self.logs.items() for line in log if line["what"] == what
        ]
        return sorted(found, key=lambda line: line["s"])

    def effective(self) -> list[list[Line]]:
        """Return, by iteration and rank, the lines that were not undone."""
        by_number: defaultdict[int, list[Line]] = defaultdict(list)
        for line in self.lines("iteration"):
            by_number[line["number"]].append(line)
        history = []
        for number in range(self.iterations):
            generation = max(line["generation"] for line in by_number[number])
            # Within a generation, an iteration may be repeated after an interrupt. The last one counts.
            last = {line["rank"]: line for line in by_number[number] if line["generation"] == generation}
            lines = [last[rank] for rank in sorted(last)]
            assert len(lines) == lines[0]["size"], f"iteration {number}: {lines}\n{self.output}"
            history.append(lines)
        return history

    def check(self, *, ended: int, killed: int = 0, dismissed: int = 0) -> None:
        """Run all checks.

        Args:
            ended: number of workers that reached the end of the script.
            killed: number of killed workers.
            dismissed: number of dismissed workers.
        """
        counts = Counter(self.codes.values())
        assert counts == Counter({0: ended + dismissed, -9: killed}), f"{self.codes}\n{self.output}"
        ends = self.lines("end")
        assert len(ends) == ended, self.output
        assert len({(line["iteration"], line["hash"]) for line in ends}) == 1
        self._check_commits()
        history = self.effective()
        self._check_samples(history)
        self._check_reference(history)

    def _check_commits(self) -> None:
        """Check that commits are equal on all ranks, and that no returned commit is lost."""
        by_iteration: defaultdict[int, set[str]] = defaultdict(set)
        for line in self.lines("commit"):
            by_iteration[line["iteration"]].add(line["hash"])
        assert all(len(hashes) == 1 for hashes in by_iteration.values()), by_iteration
        returned = 0
        for line in sorted([*self.lines("commit"), *self.lines("train")], key=lambda line: line["s"]):
            if line["what"] == "commit":
                returned = max(returned, line["iteration"])
            else:
                assert line["iteration"] >= returned, f"{line} after commit {returned}\n{self.output}"

    def _check_samples(self, history: list[list[Line]]) -> None:
        """Check that each sample of an epoch is used once, except those that fill up the last batches of a deal."""
        epochs: defaultdict[int, list[list[Line]]] = defaultdict(list)
        for lines in history:
            epochs[lines[0]["epoch"]].append(lines)
        for epoch, iterations in epochs.items():
            seen = Counter(index for lines in iterations for line in lines for index in line["indices"])
            deals = len({lines[0]["generation"] for lines in iterations})
            most = deals * max(lines[0]["size"] for lines in iterations)
            assert seen.total() - len(seen) < most, f"epoch {epoch} repeats {seen.total() - len(seen)} samples"
            if epoch < max(epochs):
                assert set(seen) == set(range(self._plan.samples)), f"epoch {epoch} leaves samples out"

    def _check_reference(self, history: list[list[Line]]) -> None:
        """Check that parameters are bit-identical to one process that simulates the members of each iteration."""
        model = elastic_member.make_model(self._plan.width)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        generation = 0
        for number, lines in enumerate(history):
            # The optimizer is created again in each generation.
            if self._plan.inside and lines[0]["generation"] != generation:
                generation = lines[0]["generation"]
                sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            totals: list[torch.Tensor] = []
            for line in lines:
                sgd.zero_grad()
                for part in range(self._plan.passes):
                    elastic_member.loss_of(model, line["indices"][part :: self._plan.passes]).backward()
                gradients = [parameter.grad for parameter in model.parameters()]
                totals = [
                    gradient.clone() if not totals else totals[index].add_(gradient)
                    for index, gradient in enumerate(gradients)
                ]
            for parameter, total in zip(model.parameters(), totals, strict=True):
                parameter.grad = total.mul_(1.0 / len(lines)) if len(lines) > 1 else total
            sgd.step()
            hashes = {line["hash"] for line in lines}
            assert hashes == {elastic_member.hash_of(model)}, f"iteration {number} differs from the reference"
