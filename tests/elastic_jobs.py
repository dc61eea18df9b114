"""Jobs whose ranks come and go, for tests: started, tormented, and judged by what each rank has said that it did.

The judge knows nothing of the faults: it reads the logs of `ranks/elastic_member.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fakes.told_membership import SOCKET, WORKER, Keeper
from rank_jobs import UNTUNED, Launcher, environment
from ranks import elastic_member

Line = dict[str, Any]


class ElasticJob:
    """One job; `with` ends it.

    Attributes:
        keeper: who is in it.
        replaces: for each worker that is lost, another one is started.
    """

    def __init__(
        self,
        launcher: Launcher,
        folder: Path,
        *,
        ranks: int,
        env: Mapping[str, str] | None = None,
        program: str = "elastic_member.py",
        **plan: Any,
    ) -> None:
        """Starts nothing; `plan` is that of the program."""
        self._launcher, self._folder, self._plan, self._program = launcher, folder, plan, program
        self._env = environment(folder / "cache", {**UNTUNED, **(env or {})})
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._ranks = ranks
        self.replaces = False
        self._replaced = 0
        self.keeper = Keeper(folder / "keeper")

    def __enter__(self) -> ElasticJob:
        self.keeper.least = self._ranks
        for _ in range(self._ranks):
            self.add()
        return self

    def __exit__(self, *_: object) -> None:
        for worker, process in self._processes.items():
            if process.poll() is None:
                self.kill(worker)
                process.kill()
            process.wait()
        self.keeper.close()

    def add(self) -> int:
        """Starts another worker; returns its number."""
        worker = len(self._processes)
        more = {SOCKET: str(self.keeper.address), WORKER: str(worker), "RANK": str(worker)}
        with open(self._folder / f"{worker}.out", "w", encoding="utf-8") as output:
            self._processes[worker] = subprocess.Popen(
                self._launcher.command_of_one(self._program, [self._folder / f"{worker}.log", json.dumps(self._plan)]),
                env={**self._env, **more},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return worker

    def kill(self, worker: int) -> float:
        """By SIGKILL; returns `time.monotonic()`."""
        now_s = time.monotonic()
        if (pid := self.keeper.pid(worker)) is not None:
            os.kill(pid, signal.SIGKILL)
        return now_s

    def attend(self) -> None:
        """Does what workers have asked for, and replaces those that are lost."""
        if self.keeper.generations:
            self.keeper.least = 1
        while self.keeper.told:
            _, worker, message = self.keeper.told.pop(0)
            if message["kind"] == "add":
                self.add()
            elif message["kind"] == "dismiss":
                self.keeper.dismiss(worker)
        while self.replaces and len(self.keeper.lost) > self._replaced:
            self._replaced += 1
            self.add()

    def wait_for(self, ranks: int, timeout_s: float = 60.0) -> bool:
        """True, once so many ranks are in the present generation."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.keeper.present()) < ranks:
            self.attend()
            assert time.monotonic() < deadline_s, self.output()
            time.sleep(0.01)
        return True

    @property
    def running(self) -> list[int]:
        """Workers that have not ended."""
        return [worker for worker, process in self._processes.items() if process.poll() is None]

    def run(self, timeout_s: float = 40.0) -> Judge:
        """Until all workers have ended."""
        deadline_s = time.monotonic() + timeout_s
        while self.running:
            self.attend()
            if time.monotonic() > deadline_s:
                raise AssertionError(f"workers {self.running} have not ended\n{self.output()}")
            time.sleep(0.01)
        return self.judge()

    def judge(self) -> Judge:
        """Of what has been logged."""
        return Judge(
            logs={worker: read(self._folder / f"{worker}.log") for worker in self._processes},
            codes={worker: process.returncode for worker, process in self._processes.items()},
            plan=elastic_member.Plan(**(self._plan if self._program == "elastic_member.py" else {})),
            output=self.output(),
        )

    def output(self) -> str:
        """Of all workers, their last lines."""
        return "\n".join(
            f"── worker {worker}\n{(self._folder / f'{worker}.out').read_text()[-3000:]}" for worker in self._processes
        )


def read(path: Path) -> list[Line]:
    """A log; the last line of who was killed may be a part."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


class Judge:
    """What must hold whatever has happened.

    Attributes:
        logs: by worker.
        codes: exit codes by worker.
        output: of all workers.
        iterations: of the whole job.
    """

    def __init__(
        self, *, logs: dict[int, list[Line]], codes: dict[int, int | None], plan: elastic_member.Plan, output: str
    ) -> None:
        self.logs, self.codes, self._plan, self.output = logs, codes, plan, output
        self.iterations = plan.iterations

    def lines(self, what: str) -> list[Line]:
        """Of all workers, in order of time."""
        found = [
            {**line, "worker": worker} for worker, log in self.logs.items() for line in log if line["what"] == what
        ]
        return sorted(found, key=lambda line: line["s"])

    def effective(self) -> list[list[Line]]:
        """By iteration, those lines that were not undone, by rank."""
        by_number: defaultdict[int, list[Line]] = defaultdict(list)
        for line in self.lines("iteration"):
            by_number[line["number"]].append(line)
        history = []
        for number in range(self.iterations):
            generation = max(line["generation"] for line in by_number[number])
            # In one generation an iteration may be repeated after an interrupt; the last one counts.
            last = {line["rank"]: line for line in by_number[number] if line["generation"] == generation}
            lines = [last[rank] for rank in sorted(last)]
            assert len(lines) == lines[0]["size"], f"iteration {number}: {lines}\n{self.output}"
            history.append(lines)
        return history

    def check(self, *, ended: int, killed: int = 0, dismissed: int = 0) -> None:
        """Everything.

        Args:
            ended: workers that have come to the end of their scripts.
            killed: those that were killed.
            dismissed: those that were not wanted any more.
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
        """Equal on all ranks, and none that has returned is lost."""
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
        """Each of an epoch once, but for those that fill up the last batches of a deal."""
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
        """The bits are those of one process that plays all ranks, with the same members in each iteration."""
        model = elastic_member.make_model(self._plan.width)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        generation = 0
        for number, lines in enumerate(history):
            if self._plan.inside and lines[0]["generation"] != generation:  # which makes the optimizer anew
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
