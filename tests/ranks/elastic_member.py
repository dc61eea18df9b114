"""A training script for ranks that are lost and added. It logs its events, and runs faults at given points.

Started by test_generations.py: `elastic_member.py FOLDER PLAN`, where PLAN is JSON (see `Plan`). A line of a log in
FOLDER is an event of a process: `{"what": …, "s": time.monotonic(), …}`.
"""

import gc
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import sirtaki.torch as hvd
from sirtaki.engine import generations, job
from sirtaki.engine.membership import Membership


@dataclass
class Plan:
    """Duration of the training, and faults.

    Attributes:
        iterations: iterations of the whole job.
        until_told: end the job when there is a file `end` beside the log.
        commit_every: iterations between commits.
        samples: samples per epoch.
        batch: samples per rank and iteration.
        pause_s: pause in each iteration.
        inside: whether the function that is repeated creates the optimizer.
        width: width of the model's layers.
        counts: whether to log the resources of the process, which takes a while.
        faults: `[worker, iteration, phase, action]`: once, at this phase of this iteration.
    """

    iterations: int = 12
    until_told: bool = False
    commit_every: int = 2
    samples: int = 64
    batch: int = 2
    pause_s: float = 0.0
    inside: bool = False
    width: int = 16
    counts: bool = True
    passes: int = 1
    faults: list[tuple[int, int, str, str]] = field(default_factory=list)


HOSTS = "SIRTAKI_TEST_HOSTS"
"""Environment variable: the file in which `elastic_jobs.ElasticJob` lists the hosts of its job, one per worker."""


class Worker:
    """Process of a worker in an `ElasticJob`.

    Attributes:
        number: number of the worker's host. A replacement gets the next free number.
        membership: the membership that its agent maintains.
        log: log of events.
    """

    def __init__(self, folder: Path) -> None:
        self.number = int(os.environ["HOROVOD_HOSTNAME"].removeprefix("w"))
        while not self._is_free(folder / f"{self.number}.log"):
            self.number += 1
        self.log = Log(folder / f"{self.number}.log")
        client = generations.open_agent(interface=None)
        assert client is not None
        self.membership = client
        generations.register(lambda: client)

    def _is_free(self, path: Path) -> bool:
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def change_hosts(self, change: Callable[[list[str]], list[str]]) -> None:
        """Change the lines of the hosts file, and wait until the job has noticed."""
        hosts = Path(os.environ[HOSTS])
        hosts.with_suffix(".new").write_text("".join(f"{line}\n" for line in change(hosts.read_text().splitlines())))
        hosts.with_suffix(".new").rename(hosts)
        while not self.membership.change():
            time.sleep(0.01)

    def add(self) -> None:
        """Start another rank."""
        self.change_hosts(lambda lines: [*lines, f"w{len(lines)}:1"])

    def leave(self) -> None:
        """Dismiss this rank."""
        self.change_hosts(lambda lines: [line for line in lines if line != f"w{self.number}:1"])


class Log:
    """Lines in a file that survive the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what: str, **more: Any) -> None:
        os.write(self._file, json.dumps({"what": what, "s": time.monotonic(), **more}).encode() + b"\n")


def hash_of(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def make_model(width: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))


def data(indices: list[int]) -> torch.Tensor:
    """Return the data of samples, `(n, 8)`."""
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in indices]
    return torch.stack(rows)


def loss_of(model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
    return (model(data(indices)) - 1.0).square().mean()


def taken_of_the_process() -> dict[str, int]:
    """Return the numbers of descriptors, threads, mappings, and resident pages."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "pages": int(Path("/proc/self/statm").read_text().split()[1]),
    }


class Touchy:
    """A value of the state that runs a fault when it is copied or pickled."""

    def __init__(self, act: Callable[[str], None]) -> None:
        self.act = act

    def __deepcopy__(self, memo: object) -> "Touchy":
        self.act("saving")
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.act("syncing")
        return _make_touchy, ()


def _make_touchy() -> Touchy:
    return Touchy(faults.strike)


class Faults:
    def __init__(self, worker: int, plan: Plan, log: Log) -> None:
        self.worker, self.log, self.iteration = worker, log, 0
        self._due = [fault for fault in plan.faults if fault[0] == worker]

    def strike(self, phase: str) -> None:
        for fault in list(self._due):
            if fault[1] <= self.iteration and fault[2] == phase:
                self._due.remove(fault)
                self.log("fault", phase=phase, action=fault[3])
                getattr(self, fault[3])()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """Stop this process for a second."""
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(1.0)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)

    def add(self) -> None:
        worker.add()

    def leave(self) -> None:
        worker.leave()

    def fail(self) -> None:
        raise ValueError("the script's own")

    def exit(self) -> None:
        sys.exit(3)

    def raise_(self) -> None:
        raise hvd.HorovodInternalError("as if communication had failed")


def watch(there: Membership, faults: Faults) -> None:
    """Log the end of each generation and the begin of the next one, and run faults at these points."""
    answered, opened, gave_up = there.join, job.Job.__init__, job.Job.give_up

    def give_up(self: job.Job, reason: str) -> None:
        faults.log("noticed", reason=reason)
        gave_up(self, reason)

    def join(**how: Any) -> Any:
        faults.log("left")
        generation = answered(**how)
        faults.log("joined", generation=generation.membership.generation)
        faults.strike("joined")
        return generation

    def open_job(self: job.Job, *how: Any) -> None:
        faults.log("met")
        faults.strike("met")
        opened(self, *how)
        faults.log("open")

    there.join = join  # type: ignore[method-assign]
    job.Job.__init__, job.Job.give_up = open_job, give_up  # type: ignore[method-assign]


def main() -> None:
    plan = Plan(**json.loads(sys.argv[2]))
    end = Path(sys.argv[1]) / "end"
    faults.log("start")
    hvd.init()
    model = make_model(plan.width)

    def make_optimizer() -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return hvd.DistributedOptimizer(sgd, model.named_parameters(), backward_passes_per_step=plan.passes)

    made = None if plan.inside else make_optimizer()
    sampler = hvd.elastic.ElasticSampler(range(plan.samples), seed=5)
    more = {} if made is None else {"optimizer": made}
    state = hvd.elastic.TorchState(
        model=model, sampler=sampler, iteration=0, epoch=0, touchy=Touchy(faults.strike), **more
    )
    state.register_reset_callbacks([lambda: faults.strike("callback")])
    model[2].weight.register_post_accumulate_grad_hook(lambda _: faults.strike("backward"))

    def iterate(optimizer: torch.optim.Optimizer) -> None:
        faults.iteration = state.iteration
        optimizer.zero_grad()
        if len(sampler) == 0 or state.batch_of(sampler) == []:
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.first = 0
        indices = state.batch_of(sampler)
        faults.strike("forward")
        for number in range(plan.passes):
            loss_of(model, indices[number :: plan.passes]).backward()
        faults.strike("before_step")
        optimizer.step()
        faults.strike("step")
        sampler.record_indices(indices)
        state.first += plan.batch
        faults.log(
            "iteration",
            number=state.iteration,
            epoch=state.epoch,
            indices=indices,
            generation=job.current().elastic.number,  # type: ignore[union-attr]
            rank=hvd.rank(),
            size=hvd.size(),
            hash=hash_of(model),
            draw=random.random(),
        )
        state.iteration += 1
        if plan.pause_s:
            time.sleep(plan.pause_s)

    @hvd.elastic.run
    def train(state: Any) -> None:
        faults.log(
            "train",
            iteration=state.iteration,
            size=hvd.size(),
            rank=int(os.environ["HOROVOD_RANK"]),
            hash=hash_of(model),
            **(taken_of_the_process() if plan.counts else {}),
        )
        state.first = 0
        optimizer = made or make_optimizer()
        optimizer.register_step_pre_hook(lambda *_: faults.strike("in_step"))
        while state.iteration < plan.iterations:
            iterate(optimizer)
            if plan.until_told and hvd.allreduce(torch.tensor(float(end.exists())), op=hvd.Max, name="end") > 0:
                break
            if state.iteration % plan.commit_every == 0:
                faults.strike("commit")
                state.commit()
                faults.log("commit", iteration=state.iteration, hash=hash_of(model))

    state.batch_of = lambda sampler: list(sampler)[state.first : state.first + plan.batch]
    state.first = 0
    train(state)
    faults.log("end", iteration=state.iteration, hash=hash_of(model))


def play(there: Membership, number: int, log: Log) -> None:
    """Train as the command line specifies."""
    global faults
    faults = Faults(number, Plan(**json.loads(sys.argv[2])), log)
    watch(there, faults)
    main()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if HOSTS in os.environ:
        worker = Worker(folder)
        play(worker.membership, worker.number, worker.log)
    else:  # in a job with several slots per host, processes number the workers
        client = generations.open_agent(interface=None)
        assert client is not None
        generations.register(lambda: client)
        play(client, os.getpid(), Log(folder / f"{os.getpid()}.log"))
