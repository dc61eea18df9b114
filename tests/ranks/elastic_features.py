"""Operations, `join` and process sets on ranks that are lost, for test_generations.py: `… FOLDER {"play": NAME}`."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks.elastic_member import Worker, hash_of

import sirtaki.torch as hvd
from sirtaki import watch

MANY = 1 << 20

WAITS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda _: hvd.allreduce(torch.ones(3), name="one"),
    lambda _: hvd.barrier(),
    lambda _: hvd.join(),
    lambda _: hvd.allgather(torch.ones(MANY)),
    lambda _: hvd.broadcast(torch.ones(MANY), 0),
    lambda optimizer: optimizer.step(),
]
"""Calls in which all remaining ranks wait for the lost one."""


def waits() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < len(WAITS):
            step, state.step = state.step, state.step + 1
            state.commit()
            if there.number == step + 1:
                log("kill", step=step)
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                WAITS[step](optimizer)
            except hvd.HorovodInternalError as err:
                log("raised", step=step, message=str(err))
                raise
            log("returned", step=step)

    train(state)


def sets() -> None:
    first, outer = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[first])
    hvd.add_process_set(outer)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=first)
    state = hvd.elastic.TorchState(optimizer=optimizer, calls=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        inside = hvd.add_process_set([0]) if state.calls == 0 else None
        said: dict[str, Any] = {"size": hvd.size(), "rank": hvd.rank(), "inside": inside is not None}
        for name, there_ in (("first", first), ("outer", outer)):
            try:
                if there_.included() is not False:
                    said[name] = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=there_).item()
            except ValueError as err:
                said[name] = str(err)
        with torch.no_grad():
            weight.zero_()
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        log("train", **said, weight=weight.item())
        state.calls += 1
        state.commit()
        if there.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.calls == 1:
            hvd.barrier()

    train(state)


def beginning() -> None:
    """Lose a rank before the first communication. Train without `elastic.run`, too."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    if there.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    state = hvd.elastic.TorchState(optimizer=optimizer)
    hvd.elastic.run(lambda state: state.commit())(state)
    plain = hvd.DistributedOptimizer(torch.optim.SGD([other := torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    for _ in range(3):
        plain.zero_grad()
        (other * (hvd.rank() + 1)).sum().backward()
        plain.step()
    log("train", size=hvd.size(), weight=other.item())


def less_often() -> None:
    """Ranks are lost and added between two synchronisations, while a fragment is in flight."""
    torch.manual_seed(there.number)  # a new rank takes over its peers' state, independent of its own seed
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    diloco = hvd.DiLoCo(model, optimizer, sync_every=6, fragments=2, delay=2, blend=0.5)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, diloco=diloco, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        with diloco:
            while state.step < 24:
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
                model(torch.randn(8, 4, generator=generator)).square().mean().backward()
                optimizer.step()
                state.step += 1
                if there.number == 1 and state.step == 10:
                    os.kill(os.getpid(), signal.SIGKILL)
                log("step", step=state.step, size=hvd.size())
                state.commit()
                while state.step == 16 and hvd.size() < 3:  # until the new rank has joined
                    time.sleep(0.01)
                    state.commit()

    train(state)
    log(
        "hash",
        hash=hash_of(model),
        momentum=sum(s["momentum_buffer"].norm().item() for s in diloco.outer.state.values()),
    )


def compressed() -> None:
    """Lose a rank and add another one while gradients are compressed."""
    torch.manual_seed(there.number)
    model = torch.nn.Linear(60, 50)
    sgd = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), hvd.Compression.topk(0.1))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 60:
            optimizer.zero_grad()
            (model.weight - torch.arange(3000.0).view(50, 60) / 3000).square().sum().mul(0.5).backward()
            optimizer.step()
            state.step += 1
            if there.number == 1 and state.step == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            owed = optimizer.state_dict()["sirtaki_compression"]["owed"]["weight"]
            state.commit()
            log("step", step=state.step, size=hvd.size(), owed=owed.norm().item())
            while state.step == 16 and hvd.size() < 3:  # until the new rank has joined
                time.sleep(0.01)
                state.commit()

    train(state)
    off = (model.weight - torch.arange(3000.0).view(50, 60) / 3000).abs().max()
    log("hash", hash=hash_of(model), off=off.item())


class Told(watch.Watcher):
    """Writes the tuner's events on this rank to a file."""

    def trial(self, event: watch.TrialEnded) -> None:
        log("trial", size=hvd.size(), setting=event.setting)

    def decision(self, event: watch.Decision) -> None:
        log("decision", size=hvd.size(), setting=event.setting, retune=event.retune)


SIZES = [3, 2, 3, 4, 3]
"""World sizes of `tuned`: initially, after a rank was killed, after one was added, and so on; the last rank left."""


def tuned() -> None:
    """Change the number of ranks after each warm-up. The settings must be found again."""
    watch.add(Told())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 600), torch.nn.Linear(600, 60))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, stage=0, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.stage < len(SIZES):
            while hvd.size() != SIZES[state.stage]:
                time.sleep(0.01)
                state.commit()
            for _ in range(130):  # of which search and proof take at most 100
                optimizer.zero_grad()
                model(torch.ones(4, 100)).square().mean().backward()
                optimizer.step()
            log("stage", stage=state.stage, size=hvd.size(), hash=hash_of(model))
            state.stage += 1
            state.commit()
            if state.stage == len(SIZES):
                return
            if SIZES[state.stage] > hvd.size() and hvd.rank() == 0:
                there.add()
            elif state.stage == 1 and there.number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            elif state.stage == 4 and there.number == 4:
                there.leave()

    train(state)


PLAYS = {
    "tuned": tuned,
    "compressed": compressed,
    "waits": waits,
    "sets": sets,
    "beginning": beginning,
    "less_often": less_often,
}

if __name__ == "__main__":
    there = Worker(Path(sys.argv[1]))
    log = there.log
    play = PLAYS[json.loads(sys.argv[2])["play"]]
    if play is not sets:
        hvd.init()
    play()
    log("end")
