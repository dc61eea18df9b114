"""Training with sparse gradients: each sparse algorithm, the chosen one, DDP, and Horovod's rule, in one run.

    python -m bench.sparse [--quick] [--check] [--save] [--networks host capped] [--shapes click factorisation language]
        [--zipf 0.975 1.024 1.2] [--rounds 7]

Takes about an hour, 4 minutes with --quick. The cluster needs root.

Four ranks run on one host, or on four emulated nodes (link 400 Mbit/s, at most 100 per flow). Look-ups follow Zipf's
law with the exponent `--zipf`, over row numbers in random order. A step is forward, backward, synchronisation and SGD
of embeddings and a small dense layer. All contenders are in the same processes and alternate. "horovod's rule" gathers
the indices and the values of all ranks by two eager all-gathers, without coalescing, as Horovod does. "auto" learns
access frequencies and tries algorithms before it is measured. Each contender's gradients are compared with DDP's.

Bars, on the capped network: auto ≤ 1.02 of the fastest single algorithm and ≤ 0.50 of DDP's step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.lib.cluster import NETWORKS, why_unavailable
from bench.lib.harness import Report, Spread, finish, parser, ratio
from bench.lib.ranks import in_turns, run_ranks, start
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.engine import job
from sirtaki.engine.reducing.sharing import reducers_of

RANKS = 4
SHAPES: Mapping[str, tuple[tuple[tuple[int, int], ...], int]] = {
    "click": (((150_000, 16), (60_000, 16), (20_000, 16), (2_000, 16)), 4096),
    "factorisation": (((140_000, 32), (27_000, 32)), 8192),
    "language": (((200_000, 64),), 8192),
}
"""Rows and width of each embedding, and number of look-ups per rank, step and embedding."""

ZIPF = (0.975, 1.024, 1.2)
POOL = 16
"""Number of batches; steps cycle through them."""

MOST_WARMUP_STEPS = 80
DDP, HOROVOD, AUTO = "ddp", "horovod's rule", "auto"
LEARNING_RATE = 1e-3


class EmbeddingNet(nn.Module):
    """Embeddings whose rows feed a small dense layer."""

    def __init__(self, tables: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width, sparse=True) for rows, width in tables)
        self.head = nn.Sequential(nn.Linear(sum(width for _, width in tables), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, looked_up: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output for `looked_up`: `(n,)` rows of each table."""
        found = [table(rows) for table, rows in zip(self.tables, looked_up, strict=True)]
        result: torch.Tensor = self.head(torch.cat(found, 1)).square().mean()
        return result


class Batches:
    """Batches of look-ups of one rank, drawn in advance."""

    def __init__(self, tables: Sequence[tuple[int, int]], n: int, exponent: float, rank: int) -> None:
        numbers = np.random.default_rng(7)
        drawn = np.random.default_rng(1000 + rank)
        self._pool: list[list[torch.Tensor]] = [[] for _ in range(POOL)]
        for rows, _ in tables:
            edges = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
            order = numbers.permutation(rows)
            for batch in self._pool:
                places = np.searchsorted(edges, drawn.random(n) * edges[-1])
                batch.append(torch.from_numpy(order[np.minimum(places, rows - 1)]))

    def __getitem__(self, step: int) -> list[torch.Tensor]:
        return self._pool[step % POOL]


class SparseContender:
    """A model trained by SGD. Subclasses reduce the gradients."""

    def __init__(self, tables: Sequence[tuple[int, int]], batches: Batches) -> None:
        torch.manual_seed(0)
        self.model = EmbeddingNet(tables)
        self.forward: nn.Module = self.model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.batches, self.steps = batches, 0

    def backward(self, step: int) -> None:
        """Compute and synchronise the gradients of a batch. Collective."""
        self.optimizer.zero_grad()
        self.forward(self.batches[step]).backward()

    def step(self) -> None:
        """Run one training step. Collective."""
        self.backward(self.steps)
        self.optimizer.step()
        self.steps += 1

    def sums(self) -> list[float]:
        """Return one weighted sum per embedding of the first batch's gradient. Collective."""
        self.backward(0)
        weights = [table.weight.grad.coalesce() for table in self.model.tables]
        found = [
            float((grad.values().double().sum(1) * torch.cos(grad.indices()[0].double())).sum()) for grad in weights
        ]
        self.optimizer.zero_grad()
        return found


class SparseDdp(SparseContender):
    """PyTorch's DDP over Gloo."""

    def __init__(self, tables: Sequence[tuple[int, int]], batches: Batches) -> None:
        super().__init__(tables, batches)
        self.forward = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class HorovodsRule(SparseContender):
    """Two all-gathers of the backward pass's result for each embedding; dense layers by grouped all-reduces."""

    def backward(self, step: int) -> None:
        """Compute and synchronise the gradients of a batch. Collective."""
        import sirtaki.torch as hvd

        super().backward(step)
        under_way = []
        for number, table in enumerate(self.model.tables):
            gradient = table.weight.grad
            indices = hvd.allgather_async(gradient._indices()[0].contiguous(), name=f"rule.{number}.indices")
            values = hvd.allgather_async(gradient._values().contiguous(), name=f"rule.{number}.values")
            under_way.append((table.weight, indices, values))
        dense = [param.grad for param in self.model.head.parameters()]
        group = hvd.grouped_allreduce_async(dense, name="rule.dense")
        for weight, indices, values in under_way:
            weight.grad = torch.sparse_coo_tensor(
                hvd.synchronize(indices)[None],
                hvd.synchronize(values) / hvd.size(),
                weight.shape,
                check_invariants=False,
            )
        for gradient, mean in zip(dense, hvd.synchronize(group), strict=True):
            gradient.copy_(mean)


class SparseSirtaki(SparseContender):
    """A distributed optimizer that reduces sparse rows by one algorithm, or by the chosen one if `path` is None."""

    def __init__(self, tables: Sequence[tuple[int, int]], batches: Batches, path: SparsePath | None) -> None:
        super().__init__(tables, batches)
        import sirtaki.torch as hvd

        here = job.current()
        given, here.settings = here.settings, replace(here.settings, sparse=path)
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, self.model.named_parameters())
        here.settings = given
        self._reducer = reducers_of(here)[-1]

    def backward(self, step: int) -> None:
        """Compute and synchronise the gradients of a batch. Collective."""
        super().backward(step)
        self.optimizer.synchronize()

    def step(self) -> None:
        """Run one training step. Collective."""
        self.optimizer.zero_grad()
        self.forward(self.batches[self.steps]).backward()
        self.optimizer.step()
        self.steps += 1

    def warm_up(self) -> None:
        """Train until all algorithms are chosen and tuning has ended. Collective."""
        for _ in range(MOST_WARMUP_STEPS):
            self.step()
            rows = self._reducer.sparse.rows
            targets = () if rows is None else rows.targets.values()
            tuned = self._reducer.tuning
            chosen = all(target.kept for target in targets) and len(targets) > 0
            if chosen and (tuned is None or not tuned.tuning):
                break

    def describe(self) -> str:
        """Return the plans of all embeddings in words."""
        return "; ".join(plan.describe() for plan in self._reducer.sparse.plans.values())


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: create the contenders, and time their steps alternately. Collective."""
    tables, n = SHAPES[options["shape"]]
    batches = Batches(tables, n, options["zipf"], comm.rank)
    contenders: dict[str, SparseContender] = {DDP: SparseDdp(tables, batches), HOROVOD: HorovodsRule(tables, batches)}
    contenders |= {path.value: SparseSirtaki(tables, batches, path) for path in SparsePath}
    contenders[AUTO] = SparseSirtaki(tables, batches, None)
    for contender in contenders.values():
        if isinstance(contender, SparseSirtaki):
            contender.warm_up()
            contender.optimizer.zero_grad()
    reference = None
    for name, contender in contenders.items():
        with torch.no_grad():
            pairs = zip(contender.model.parameters(), contenders[DDP].model.parameters(), strict=True)
            for param, of_ddp in pairs:
                param.copy_(of_ddp)
        sums = contender.sums()
        reference = reference or sums
        if not np.allclose(sums, reference, rtol=1e-3, atol=1e-7):
            raise RuntimeError(f"the gradients of {name} differ from those of {DDP}: {sums}, expected {reference}")
    steps = {name: contender.step for name, contender in contenders.items()}
    samples = in_turns(steps, comm, rounds=options["rounds"], block=options["steps"], seed=options["seed"])
    return {
        "samples": samples,
        "ways": {name: each.describe() for name, each in contenders.items() if isinstance(each, SparseSirtaki)},
    }


def measure(report: Report, network: str, options: dict[str, Any]) -> None:
    """Run one shape and exponent on one network, and add its rows and bars."""
    where = RANKS if network == "host" else NETWORKS[network]
    env = {"SIRTAKI_WARMUP_ITERATIONS": "5"}
    result = run_ranks("bench.sparse", where, options, env=env, timeout_s=1200.0)
    samples, shape, zipf = result["samples"], options["shape"], options["zipf"]
    ways = {name: _shortened(way) for name, way in result["ways"].items()}
    report.compare(samples, DDP, where={"network": network, "shape": shape, "zipf": zipf}, way=ways)
    best = min((path.value for path in SparsePath), key=lambda name: Spread.of(samples[name]).median)
    if network != "host":  # On one host, two measurements of the same algorithm differ by 9 %.
        for peer, limit, words in ((best, 1.02, ", the best"), (DDP, 0.50, "")):
            claim = f"{network}, {shape}, Zipf {zipf}: auto / {peer}{words}"
            report.bar(claim, ratio(samples, AUTO, peer), limit)


def _shortened(way: str) -> str:
    parts = way.split("; ")
    return way if len(set(parts)) > 1 else parts[0]


def main() -> int:
    """Run every case."""
    flags = parser(__doc__)
    flags.add_argument("--networks", nargs="+", choices=["host", "capped"])
    flags.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    flags.add_argument("--zipf", type=float, nargs="+")
    flags.add_argument("--rounds", type=int)
    flags.add_argument("--steps", type=int, default=2, help="measured steps per block (%(default)s)")
    args = flags.parse_args()
    args.networks = args.networks or ["host", "capped"]
    args.shapes = args.shapes or (["language"] if args.quick else list(SHAPES))
    args.zipf = args.zipf or ([1.024] if args.quick else list(ZIPF))
    args.rounds = args.rounds or (3 if args.quick else 7)
    if "capped" in args.networks and (reason := why_unavailable()) is not None:
        print(f"skipping the emulated cluster: {reason}", file=sys.stderr)
        args.networks = [network for network in args.networks if network != "capped"]
    one_case = (
        [args.networks[0], *args.shapes[:1]] if len(args.networks) == len(args.shapes) == 1 else args.networks[:1]
    )
    report = Report(name="_".join(["sparse", *(one_case if len(args.networks) == 1 else ())]))
    each = partial(dict, rounds=args.rounds, steps=args.steps, seed=args.seed)
    for network in args.networks:
        for shape in args.shapes:
            for zipf in args.zipf:
                measure(report, network, each(shape=shape, zipf=zipf))
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, gloo=True))
