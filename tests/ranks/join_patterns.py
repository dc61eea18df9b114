"""Ranks with different numbers of batches step random optimizers in random patterns, and join. Started by test_join.py.

Each step is compared with training in one process, in which a rank without data contributes zeros.
"""

import copy
import random
import sys
import time
from dataclasses import dataclass

import torch
from conformance.training import assert_same_parameters, batch
from torch import nn

import sirtaki.torch as hvd

LONGEST = 8
EPOCHS = 8
TOLERANCE = 1e-11


class Words(nn.Module):
    """An embedding with sparse gradients, which a batch may not touch, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        words = (rows[:, 0].abs() * 1e3).long() % 12
        return self.head(self.embedding(words[: int(words[0]) % 4]).sum(0) + 1.0)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def frozen() -> nn.Module:
    return dense().requires_grad_(False)


@dataclass
class Player:
    """An optimizer, and an equal one in one process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    alone: nn.Module
    reference: torch.optim.Optimizer
    process_set: hvd.ProcessSet
    ranks: list[int]
    average: bool
    passes: int
    manner: str

    @property
    def frozen(self) -> bool:
        return not any(param.requires_grad for param in self.model.parameters())


def loss(model: nn.Module, rank: int, what: int) -> torch.Tensor:
    return model(batch(rank, what, 6, 5)).square().mean()


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def make_player(rng: random.Random, sets: list[hvd.ProcessSet]) -> Player:
    everybody = hvd.global_process_set
    torch.manual_seed(rng.randrange(1000))
    model = rng.choice([dense, dense, dense, Words, Words, frozen])().double()
    process_set = rng.choice([everybody, everybody, *sets])
    average, passes = rng.random() < 0.7, rng.choice([1, 1, 1, 2])
    manners = ["plain", "closure", "synchronize"] if isinstance(model, Words) else ["closure", "synchronize", "halved"]
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        plain(model),
        op=hvd.Average if average else hvd.Sum,
        backward_passes_per_step=passes,
        process_set=process_set,
    )
    return Player(
        model=model,
        optimizer=optimizer,
        alone=alone,
        reference=plain(alone),
        process_set=process_set,
        ranks=list(process_set.ranks or range(hvd.size())),
        average=average,
        passes=passes,
        manner="plain" if passes > 1 else rng.choice(manners),
    )


def backward(model: nn.Module, what: int) -> torch.Tensor:
    value = loss(model, hvd.rank(), what)
    if value.requires_grad:
        value.backward()
    return value


def halve(player: Player, model: nn.Module) -> None:
    """Halve the reduced gradients after the backward pass."""
    if player.manner == "halved":
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


def train(player: Player, what: int) -> None:
    """Run one step on this rank."""
    optimizer = player.optimizer
    if player.manner == "closure":
        optimizer.step(lambda: backward(player.model, what))
    else:
        for number in range(player.passes):
            backward(player.model, what + number)
        halve(player, player.model)
        if player.manner == "synchronize":
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    optimizer.zero_grad()


def train_alone(player: Player, what: int, present: list[int]) -> None:
    """Run the same step of all ranks in one process."""
    player.reference.zero_grad()
    for number in range(player.passes):
        total = torch.stack([loss(player.alone, rank, what + number) for rank in present]).sum()
        if total.requires_grad:
            (total / (len(player.ranks) if player.average else 1)).backward()
    halve(player, player.alone)
    player.reference.step()


def draw_pattern(rng: random.Random, players: int) -> list[list[int]]:
    """Draw the optimizers that are stepped in each batch."""
    if rng.random() < 0.4:
        cycle = [[rng.randrange(players)] for _ in range(rng.randint(1, 4))]  # for example D G D D
        return (cycle * LONGEST)[:LONGEST]
    return [[rng.randrange(players) for _ in range(rng.randint(0, 3))] for _ in range(LONGEST)]


def run_epoch(rng: random.Random, players: list[Player], epoch: int) -> None:
    counts = [rng.randint(0, LONGEST) for _ in range(hvd.size())]
    if rng.random() < 0.15:
        counts = [counts[0]] * hvd.size()
    pattern = draw_pattern(rng, len(players))
    talks, leaves_some, slow = rng.random() < 0.3, rng.random() < 0.2, rng.randrange(hvd.size())
    mine, rank = counts[hvd.rank()], hvd.rank()
    when = f"in epoch {epoch}: {counts} batches, {pattern}"
    for index in range(max(counts)):
        if index < mine and rank == slow:
            time.sleep(0.002)
        if talks and index < mine:
            present = hvd.allreduce(torch.ones(()), op=hvd.Sum, name="present")
            assert present == sum(count > index for count in counts), when
        for place, number in enumerate(pattern[index]):
            player, what = players[number], 10_000 * epoch + 100 * index + 10 * place
            present = [each for each in player.ranks if counts[each] > index]
            if rank in player.ranks and present:
                if index < mine:
                    train(player, what)
                train_alone(player, what, present)
                if index < mine:
                    assert_same_parameters(player.model, player.alone, TOLERANCE, when)
    for player in players:
        if leaves_some and player.passes > 1 and rank in player.ranks:
            backward(player.model, 7)  # without gradients of the optimizer
    last = hvd.join()
    assert hvd.allgather(torch.tensor([last])).eq(last).all(), when
    everybodys = [len(player.ranks) == hvd.size() and not player.frozen for player in players]
    stepped = [sum(everybodys[number] for step in pattern[:count] for number in step) for count in counts]
    if max(stepped):
        assert stepped[last] == max(stepped), f"rank {last} joined last {when}"
    for player in players:
        if rank in player.ranks:
            root = max(player.ranks, key=lambda each: counts[each])
            with torch.no_grad():
                for name, param in player.model.named_parameters():
                    param.copy_(hvd.broadcast(param, root, name=name, process_set=player.process_set))
            player.optimizer.zero_grad()
            assert_same_parameters(player.model, player.alone, TOLERANCE, f"after the join {when}")


def main(seed: int, programs: int, seconds: float) -> None:
    hvd.init()
    size, begin_s = hvd.size(), time.monotonic()
    sets = [hvd.ProcessSet(ranks) for ranks in ([0, size - 1], [1, size - 1], [0, 1, size - 1]) if size > len(ranks)]
    for each in sets:
        hvd.add_process_set(each)
    done = 0
    while done < programs and hvd.broadcast(torch.tensor(time.monotonic() - begin_s), 0) < seconds:
        rng = random.Random(1000 * seed + done)
        players = [make_player(rng, sets) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 3]))]
        for epoch in range(EPOCHS):
            run_epoch(rng, players, epoch) if players else hvd.join()
        done += 1
    print(f"rank {hvd.rank()}: {done} programs, {done * EPOCHS} joins", flush=True)
    hvd.shutdown()


main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
