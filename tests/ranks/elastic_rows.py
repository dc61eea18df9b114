"""Train embeddings with sparse gradients while ranks are lost and added: `… FOLDER PLAN`, PLAN as JSON, see `Plan`.

Started by test_elastic_rows.py, which repeats the training in one process, given the members in each iteration.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks.elastic_member import Worker, hash_of
from torch import nn

import sirtaki.torch as hvd
from sirtaki.engine import job, sparse_gradients
from sirtaki.engine.reducing.sharing import reducers_of

ROWS, WIDTH, LOOKED_UP = 60, 4, 12
NTH = 3
"""Iteration of a stage in which events happen."""


@dataclass
class Plan:
    """Duration of the training, and events.

    Attributes:
        iterations: iterations of the whole job.
        events: `[generation, worker, stage, phase, action]`: once, at this stage of the choice of algorithms.
        with_set: whether ranks 0 and 1, as a process set, train another model, too.
    """

    iterations: int
    events: list[tuple[int, int, str, str, str]]
    with_set: bool = False


def looked_up(rank: int, iteration: int, salt: int) -> torch.Tensor:
    """Return the looked-up rows: low ones more often, some several times, and sometimes none."""
    generator = torch.Generator().manual_seed(1000 * iteration + 10 * rank + salt)
    count = 0 if (iteration + rank + salt) % 5 == 4 else LOOKED_UP
    return (torch.rand(count, generator=generator) ** 3 * ROWS).long()


class Model(nn.Module):
    """Two embeddings and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.to(torch.float64)

    def loss(self, rank: int, iteration: int) -> torch.Tensor:
        """Return the loss of a rank in an iteration."""
        total = torch.ones(WIDTH, dtype=self.head.weight.dtype)
        for salt, table in enumerate(self.tables):
            rows = looked_up(rank, iteration, salt)
            if len(rows):
                total = total + table(rows).mean(0)
        return (self.head(total) - 1.0).square().mean()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the rows' optimizer, which updates only rows with gradients, and the optimizer of the dense layer."""
        rows = torch.optim.SparseAdam(list(self.tables.parameters()), lr=0.02, eps=1e-2)
        return [rows, torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)]


class Events:
    """Events of this worker."""

    def __init__(self, worker: int, events: Iterable[Sequence[Any]]) -> None:
        self._due = [list(event) for event in events if event[1] == worker]
        self._seen: Counter[tuple[int, str]] = Counter()

    def count(self) -> None:
        """Count an iteration of the current stage."""
        self._seen[generation_now(), stage()] += 1

    def strike(self, phase: str) -> None:
        """Run the events that are due in a phase."""
        now = generation_now(), stage()
        for event in list(self._due):
            generation, _, wanted, when, action = event
            if (generation, wanted, when) == (*now, phase) and (self._seen[now] >= NTH):
                self._due.remove(event)
                log("event", generation=generation, stage=wanted, phase=phase, action=action)
                {"kill": self._kill, "add": there.add}[action]()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def generation_now() -> int:
    elastic = job.current().elastic
    assert elastic is not None
    return elastic.number


def reductions() -> list[sparse_gradients.SparseReductions]:
    """Return the sparse reductions of this rank's optimizers."""
    found = [reducer.sparse.rows for reducer in reducers_of(job.current())]
    return [rows for rows in found if rows is not None and rows.targets]


def stage() -> str:
    """Return the stage of the choice of the first parameter's algorithm."""
    targets = (target for sparse in reductions() for target in sparse.targets.values())
    return next(("learn" if one.learning else "keep" if one.kept else "try" for one in targets), "")


def ways() -> list[str]:
    """Return the algorithms of all parameters."""
    return [plan.path.value for sparse in reductions() for plan in sparse.plans.values()]


def weights_of(model: nn.Module) -> list[list[float]]:
    return [param.flatten().tolist() for param in model.parameters()]


def main() -> None:
    model, inner = Model(), Model()
    outer = [hvd.DistributedOptimizer(optimizer) for optimizer in model.optimizers()]
    made = inner.optimizers() if plan.with_set else []
    inside = [hvd.DistributedOptimizer(optimizer, process_set=members) for optimizer in made]
    named = {f"optimizer{number}": optimizer for number, optimizer in enumerate([*outer, *inside])}
    state = hvd.elastic.TorchState(model=model, inner=inner, iteration=0, **named)
    probe = sparse_gradients.measure

    def measure(*how: Any, **more: Any) -> Any:
        events.strike("probe")
        return probe(*how, **more)

    sparse_gradients.measure = measure
    model.tables[0].weight.register_post_accumulate_grad_hook(lambda _: events.strike("backward"))

    def step(net: Model, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        net.loss(hvd.rank(), state.iteration).backward()
        for optimizer in optimizers:
            optimizer.step()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.iteration < plan.iterations:
            events.count()
            events.strike("before")
            step(model, outer)
            if inside and members.included():
                step(inner, inside)
            log(
                "iteration",
                number=state.iteration,
                generation=generation_now(),
                rank=hvd.rank(),
                size=hvd.size(),
                hash=hash_of(model),
                inner_hash=hash_of(inner),
                weights=weights_of(model),
                inner=weights_of(inner),
                stage=stage(),
                ways=ways(),
            )
            state.iteration += 1
            if state.iteration % 2 == 0:
                state.commit()

    train(state)
    log("end", iteration=state.iteration)
    hvd.shutdown()


if __name__ == "__main__":
    plan = Plan(**json.loads(sys.argv[2]))
    there = Worker(Path(sys.argv[1]))
    log = there.log
    events = Events(there.number, plan.events)
    members = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[members] if plan.with_set else [])
    main()
