"""Train while ranks re-tune as often as possible, once after a simulated link became slower, or to refine the setting.

    retuning.py restless SEED ITERATIONS    ranks observe drift at random
    retuning.py slower ITERATIONS           the link is slower from iteration 80 on; ends after the re-tuning
    retuning.py refined ITERATIONS          more streams are faster, by emulated times

With SIRTAKI_TEST_STREAMS, tensors are on a fake device with streams.

Each iteration's gradients are compared with those of one process that has the batches of all ranks. Started by
test_drift.py.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fakes import restless
from fakes.backward import Raises
from fakes.streams import FakeDevice, FakeOpener

import sirtaki.torch as hvd
from sirtaki.autotune import drift
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.router import Router
from sirtaki.engine.tuning import pipeline_target
from sirtaki.engine.tuning import plans as contention_probe

WIDTH, ROWS = 64, 4
SLOWER_FROM = 80  # after the search, its proof, and the iterations that are the reference of the drift
STREAMS = os.environ.pop("SIRTAKI_TEST_STREAMS", "")

began: list[int] = []  # iterations after which a re-tuning began
restless.count(began)


class AnyKnobs:
    """An arm that proposes random settings."""

    name = "any"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        transports = [TransportKind.NCCL] if STREAMS else [TransportKind.SHARED_MEMORY, TransportKind.GLOO]
        knobs = Knobs(
            unit_bytes=int(2 ** self._rng.uniform(16, 20)),
            streams=int(self._rng.integers(1, 5)),
            transport=transports[int(self._rng.integers(len(transports)))],
        )
        return [Proposal(arm=self.name, knobs=knobs)]

    def tell(self, trials: Sequence[Trial]) -> None:
        pass


def network() -> torch.nn.Sequential:
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(6)]
    return torch.nn.Sequential(*layers).double()


class Training:
    """A model on all ranks, and a copy on this rank that trains on all ranks' batches."""

    def __init__(self, parts: list[tuple[int, int]], arm_seed: int | None = None) -> None:
        torch.manual_seed(0)
        self.model, self.alone = network(), network()
        self.alone.load_state_dict(self.model.state_dict())
        self.optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(self.model[first:last].parameters(), lr=0.05),
                named_parameters=self.model[first:last].named_parameters(),
                op=hvd.Sum,
                arms=None if arm_seed is None else [AnyKnobs(arm_seed)],
            )
            for first, last in parts
        ]
        self.number = 0

    def step(self, ranks: list[int], *, fails: bool = False) -> None:
        """Run an iteration in which the given ranks have data. With `fails`, the first backward pass raises."""
        self.number += 1
        batches = {rank: self._batch(rank) for rank in ranks}
        mine = batches[hvd.rank()]
        self.model.zero_grad()
        if fails:
            try:
                self.model[3:](Raises.apply(self.model[:3](mine))).square().mean().backward()
            except ValueError:
                self.model.zero_grad()
        self.model(mine).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.synchronize()
        if STREAMS:
            device.synchronise()
        self.alone.zero_grad()
        for batch in batches.values():
            self.alone(batch).square().mean().backward()
        for ours, theirs in zip(self.model.parameters(), self.alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-14)
        for optimizer in self.optimizers:
            with optimizer.skip_synchronize():
                optimizer.step()
        with torch.no_grad():
            for theirs in self.alone.parameters():
                theirs -= 0.05 * theirs.grad

    def _batch(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    def join(self) -> None:
        """Let ranks without data take part until all have joined. Afterwards all ranks have the same model."""
        hvd.join()
        self.number = hvd.broadcast_object(self.number, root_rank=0)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.alone.load_state_dict(self.model.state_dict())


def play(seed: int, iterations: int) -> None:
    rng = np.random.default_rng(seed)  # the same on all ranks
    training = Training([[(0, 6)], [(0, 4), (4, 6)]][seed % 2], None if seed % 5 == 0 else seed)
    everybody = list(range(hvd.size()))
    done = 0
    while done < iterations:
        for _ in range(int(rng.integers(5, 30))):
            training.step(everybody, fails=rng.random() < 0.1)
            done += 1
        if rng.random() < 0.7:  # the last ranks run out of data one by one; rank 0 has the most
            left = sorted((int(count) for count in rng.integers(0, 12, hvd.size())), reverse=True)
            for number in range(left[hvd.rank()]):
                training.step([rank for rank in everybody if left[rank] > number])
            training.join()


def get_slower() -> None:
    """Delay every unit from some iteration on."""
    state = {"pause_s": 0.03}
    wait_for = Router.wait_for

    def slow(self: Router, works: list[object], **options: object) -> bool:
        time.sleep(state["pause_s"] if works else 0.0)
        return wait_for(self, works, **options)  # type: ignore[arg-type]

    Router.wait_for = slow  # type: ignore[method-assign]
    training = Training([(0, 6)])
    for number in range(int(sys.argv[2])):
        if number == SLOWER_FROM:
            state["pause_s"] *= 6
        training.step(list(range(hvd.size())))
        if began and training.number > began[0] + 40:  # a re-tuning takes at most 31 iterations
            break


def get_refined() -> None:
    """Train with an emulated link that is the faster, the more streams are used, up to four."""
    finish, used = GradientPipeline.finish, list[int]()

    def timed(self: GradientPipeline, **options: Any) -> IterationReport:
        streams = max(plan.streams for plan in self.plans)
        used.append(streams)
        return replace(finish(self, **options), span_s=1e-2 / min(streams, 4))

    GradientPipeline.finish = timed  # type: ignore[method-assign]
    training = Training([(0, 6)], arm_seed=0)
    for _ in range(int(sys.argv[2])):
        training.step(list(range(hvd.size())))
    changed = sum(one != other for one, other in itertools.pairwise(used[60:]))
    print(f"streams {used[-1]}, changes {changed}", flush=True)


def said() -> Iterator[str]:
    yield f"re-tunes {len(began)} at {began[:6]}"
    yield f"on all ranks alike: {len({tuple(each) for each in hvd.allgather_object(began)}) == 1}"


if STREAMS:
    device = FakeDevice(seed=7)
    # Small sizes, because there is no GPU to fill.
    contention_probe.MATRIX, contention_probe.UNIT_BYTES = 64, (1 << 14, 1 << 16)
    pipeline_target.open_router = lambda control, settings, params: Router(
        control, timeout_s=30.0, device=device, nccl=FakeOpener(control, device)
    )
hvd.init()
if sys.argv[1] == "refined":
    get_refined()
elif sys.argv[1] == "restless":
    restless.begin(hvd.rank())
    play(int(sys.argv[2]), int(sys.argv[3]))
else:
    drift.REFERENCE, drift.COOL_DOWN = 12, 1000
    get_slower()
for line in said():
    print(line, flush=True)
hvd.shutdown()
