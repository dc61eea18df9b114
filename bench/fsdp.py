"""Sharded training: PyTorch's FSDP2 over Gloo with its defaults, tuned by hand, and with `sirtaki.torch.fsdp.attach`.

    python -m bench.fsdp [--quick] [--check] [--save] [--cases capped equal capped-asleep host] [--expected]

The model is a transformer of 8.43 M parameters: eight blocks and a root. Cases (rates in Mbit/s):

- "capped", "equal": four emulated nodes of one rank each (`bench.lib.cluster`), link 400 and flow 100, or both 200.
- "…-asleep": the same, and each step sleeps 150 ms, because a GPU would leave the processor free.
- "nodes", "nodes-slow": two nodes of two ranks each, link and flow 200 or 100. The contender "one level" sends shards
  as if each rank were a node.
- "small": as "equal", with 32 blocks of 51 KB and a root of 1 MB.
- "host": four ranks on this host.

All contenders are in the same processes and alternate. A sample is a block of steps on the slowest rank. "by hand"
prefetches two blocks in forward and backward, reduces in a separate group, and lists the interface four times. "by
hand, kept" also does not reshard after forward.

`--expected` measures a dozen settings, compares them with predictions from one traced step, and compares the settings
that the tuner keeps (without and with additional memory) with the fastest one.

The bound is `max(computation, gathers and scatters at the link's payload rate)`: three times (P-1)/P of all parameters.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from bench.lib.cluster import NETWORKS, LabShape, need_cluster
from bench.lib.contenders import environment
from bench.lib.harness import Report, Spread, finish, parser, ratio
from bench.lib.ranks import in_turns, payload_bytes_per_s, run_ranks, start
from sirtaki.autotune.sharded import ShardKnobs, ShardSpace
from sirtaki.torch import fsdp
from sirtaki.torch.fsdp.buckets import StepTrace
from sirtaki.torch.fsdp.target import measure_step

WIDTH, BLOCKS, TOKENS, LENGTH = 256, 8, 8192, 64
SMALL = {"small": (32, 32)}
"""Width and number of blocks, for cases whose model is not `WIDTH` × `BLOCKS`."""

GLOO, BY_HAND, KEPT, UNTUNED, TUNED = "gloo", "by hand", "by hand, kept", "untuned", "tuned"
LOSSY, ONE_LEVEL, KEEPING = "tuned, SIRTAKI_LOSSY=int8", "untuned, one level", "tuned, SIRTAKI_FSDP_MEMORY=1GiB"
NEAR = "tuned, SIRTAKI_FSDP_MEMORY=15MiB"
CASES: dict[str, tuple[LabShape | None, float]] = {
    "capped": (NETWORKS["capped"], 0.0),
    "equal": (NETWORKS["equal"], 0.0),
    "capped-asleep": (NETWORKS["capped"], 0.15),
    "equal-asleep": (NETWORKS["equal"], 0.15),
    "nodes": (replace(NETWORKS["equal"], nodes=2), 0.0),
    "nodes-slow": (LabShape(nodes=2, link_bits_per_s=10**8, flow_bits_per_s=10**8), 0.0),
    "small": (NETWORKS["equal"], 0.0),
    "host": (None, 0.0),
}
SIRTAKIS = {
    UNTUNED: {"SIRTAKI_TUNE": "0"},
    ONE_LEVEL: {"SIRTAKI_TUNE": "0", "SIRTAKI_TRANSPORT": "gloo"},
    TUNED: {},
    KEEPING: {"SIRTAKI_FSDP_MEMORY": "1GiB"},
    NEAR: {"SIRTAKI_FSDP_MEMORY": "15MiB"},
    LOSSY: {"SIRTAKI_LOSSY": "int8"},
}
"""Environment variables with which each contender of Sirtaki is attached."""

SEARCHING = (TUNED, KEEPING, NEAR, LOSSY)

RANKS_PER_NODE = {"nodes": 2, "nodes-slow": 2}
LIMITS = {"capped": 0.22, "equal": 0.80, "host": 0.60}
"""Bars: maximum ratio of the tuned step to Gloo's step, by case."""

OF_BOUND = {"capped": 1.15, "capped-asleep": 1.15, "equal-asleep": 1.15}
HOST_RANKS = 4
PROOF = 25
"""Number of steps by which a search may exceed its budget to prove a difference."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class SleepingBlock(nn.TransformerEncoderLayer):
    """A transformer block that sleeps in its forward pass, and twice as long in its backward pass."""

    def __init__(self, sleep_s: float, width: int) -> None:
        super().__init__(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.sleep_s = sleep_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Map `(batch, length, width)` to the same shape."""
        hidden: torch.Tensor = super().forward(inputs)
        if self.sleep_s:
            hidden = _Sleep.apply(hidden, self.sleep_s)  # type: ignore[no-untyped-call]
        return hidden


class Transformer(nn.Module):
    """A language model with tied embeddings."""

    def __init__(self, compute_s: float, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(SleepingBlock(compute_s / 3 / blocks, width) for _ in range(blocks))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of `(batch, length)` words."""
        hidden = self.tokens(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        scores = hidden @ self.tokens.weight.T
        return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


class ShardedTraining:
    """A sharded model with its optimizer and batch."""

    def __init__(self, name: str, *, compute_s: float, connections: int, of: tuple[int, int]) -> None:
        """Shard the model, and attach it if `name` is a contender of Sirtaki. Collective."""
        by_hand = name in (BY_HAND, KEPT)
        torch.manual_seed(1)
        self.model = Transformer(compute_s, *of)
        given = os.environ.get("GLOO_SOCKET_IFNAME")
        interfaces = ",".join(["eth0"] * connections) if by_hand and connections > 1 else given
        with environment("GLOO_SOCKET_IFNAME", interfaces):
            self._shard(prefetch=by_hand, keep=name == KEPT)
        if name in SIRTAKIS:
            with ExitStack() as set_by:
                for variable, value in SIRTAKIS[name].items():
                    set_by.enter_context(environment(variable, value))
                fsdp.attach(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.words = torch.randint(TOKENS, (1, 48), generator=torch.Generator().manual_seed(dist.get_rank()))

    def _shard(self, *, prefetch: bool, keep: bool) -> None:
        self.group = dist.new_group()
        mesh = DeviceMesh.from_group(self.group, "cpu")
        blocks: list[Any] = list(self.model.blocks)
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        fully_shard(self.model, mesh=mesh)
        if prefetch:
            for n, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[n + 1 : n + 3])
                block.set_modules_to_backward_prefetch(blocks[max(0, n - 2) : n][::-1])
            assert isinstance(self.model, FSDPModule)
            with suppress(AttributeError):  # For torch < 2.13.
                self.model.set_separate_reduce_scatter_group(True)

    def step(self) -> float:
        """Run one training step and return its loss."""
        self.optimizer.zero_grad()
        loss = self.model(self.words)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def expected(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: time a dozen settings, predict them, and search for the best. Collective."""
    found = {name: kept_by_tuner(name, options) for name in (TUNED, KEEPING)}
    trained = warmed_up(UNTUNED, options)
    trained.step()
    attached = fsdp.attached(trained.model)
    assert attached is not None
    lanes, default = attached.lanes(trained.group), attached.knobs
    assert lanes is not None
    attached.trace = StepTrace(attached.transfers)
    trained.step()
    sizes = attached.whole_bytes
    all_kept = replace(default, kept=attached.dropped)
    settings = [
        default,
        *(replace(default, streams=streams) for streams in (1, 2, 8)),
        *(replace(default, ahead=ahead) for ahead in (0, 1, 4)),
        replace(default, behind=2),
        replace(default, scattering=2),
        replace(default, kept=attached.dropped[-4:]),
        all_kept,
        replace(all_kept, scattering=2, ahead=4),
    ]
    settings = list(dict.fromkeys([*settings, *found.values()]))
    step = measure_step(attached, lanes, sorted({each.streams for each in settings}))
    assert step is not None
    space = ShardSpace(modules=len(sizes), streams=(default.streams,), whole_bytes=sizes, dropped=attached.dropped)

    def runs(knobs: ShardKnobs) -> Callable[[], float]:
        def run() -> float:
            attached.run(knobs)
            return trained.step()

        return run

    samples = in_turns({each.describe(): runs(each) for each in settings}, comm, rounds=options["rounds"])
    return {
        "samples": samples,
        "expected_s": {each.describe(): step.expected_s(space, each) for each in settings},
        "extra_bytes": {each.describe(): space.extra_bytes(each) for each in settings},
        "found": {name: each.describe() for name, each in found.items()},
    }


def kept_by_tuner(name: str, options: Mapping[str, Any]) -> ShardKnobs:
    """Run a search and return the setting that it keeps. Collective."""
    attached = fsdp.attached(warmed_up(name, options).model)
    assert attached is not None
    return attached.knobs


def warmed_up(name: str, options: Mapping[str, Any]) -> ShardedTraining:
    """Return a contender after its search, or after two steps if it does not search. Collective."""
    os.environ["SIRTAKI_WARMUP_ITERATIONS"] = str(options["warmup"])
    os.environ["SIRTAKI_REFINE_UNTIL"] = "0"  # Search to the end: the measured steps must all have the search's result.
    width, blocks = options["of"]
    trained = ShardedTraining(
        name, compute_s=options["compute_s"], connections=options["connections"], of=(width, blocks)
    )
    for _ in range(options["warmup"] + PROOF if name in SEARCHING else 2):
        trained.step()
    return trained


def measure_expected(report: Report, case: str, result: Mapping[str, Any]) -> None:
    """Add a row per setting, and bars for the accuracy of predictions and for the tuner's choice."""
    measured_s = {name: Spread.of(times_s).median for name, times_s in result["samples"].items()}
    names, expected_s = list(measured_s), result["expected_s"]
    of_default = {name: [each[name] / each[names[0]] for each in (expected_s, measured_s)] for name in names}
    columns = {"expected_s": expected_s, "expected_to_default": {name: each[0] for name, each in of_default.items()}}
    report.compare(
        result["samples"], names[0], ratio="ratio_to_default", who="setting", where={"case": case}, **columns
    )
    errors = [abs(each[0] / each[1] - 1.0) for each in of_default.values()]
    report.bar(f"{case}: ratio to the default, mean error", sum(errors) / len(errors), 0.08)
    report.bar(f"{case}: ratio to the default, worst error", max(errors), 0.15)
    report.bar(f"{case}: a step of the default, error", abs(expected_s[names[0]] / measured_s[names[0]] - 1.0), 0.08)
    best = min(expected_s, key=expected_s.__getitem__)
    report.bar(
        f"{case}: what was expected to be fastest / the fastest", measured_s[best] / min(measured_s.values()), 1.03
    )
    extra_bytes = result["extra_bytes"]
    for name, found in result["found"].items():
        swept_s = min(measured_s[each] for each in names if name == KEEPING or extra_bytes[each] <= 0)
        report.bar(f"{case}: {name} ({found}) / the fastest that memory allows", measured_s[found] / swept_s, 1.03)


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: measure the link, create the contenders, and time their steps alternately. Collective."""
    if options["expected"]:
        return expected(comm, options)
    payload = payload_bytes_per_s(comm) if options["emulated"] else None
    contenders = {name: warmed_up(name, options) for name in options["contenders"]}
    steps = {name: contender.step for name, contender in contenders.items()}
    samples = in_turns(steps, comm, rounds=options["rounds"], block=options["steps"])
    return {
        "samples": samples,
        "payload_bytes_per_s": payload,
        "parameter_bytes": 4 * sum(p.numel() for p in contenders[options["contenders"][0]].model.parameters()),
        "losses": {name: each.step() for name, each in contenders.items() if name not in SEARCHING},
        "setups": {name: fsdp.describe(each.model) for name, each in contenders.items()},
    }


def measure(report: Report, case: str, options: dict[str, Any]) -> None:
    """Run one case and add its rows and bars."""
    shape, compute_s = CASES[case]
    connections = 4 if shape is not None and shape.caps_flows else 1
    of_nodes = (ONE_LEVEL, NEAR)
    contenders = [name for name in options["contenders"] if name not in of_nodes or case in RANKS_PER_NODE]
    given = {
        **options,
        "contenders": contenders,
        "compute_s": compute_s,
        "of": SMALL.get(case, (WIDTH, BLOCKS)),
        "connections": connections,
        "emulated": shape is not None,
    }
    ranks_per_node = RANKS_PER_NODE.get(case, 1)
    result = run_ranks("bench.fsdp", shape or HOST_RANKS, given, ranks_per_node=ranks_per_node)
    if options["expected"]:
        measure_expected(report, case, result)
        return
    samples, bound_s = result["samples"], None
    if shape is not None and ranks_per_node == 1:
        traffic = 3 * (shape.nodes - 1) / shape.nodes * result["parameter_bytes"]
        bound_s = max(compute_s, traffic / result["payload_bytes_per_s"])
        report.notes.append(
            f"{case}: {traffic / 1e6:.1f} MB a rank and step, {bound_s:.3f} s at the link's payload rate; computation "
            f"{compute_s * 1e3:.0f} ms asleep"
        )
    report.compare(samples, GLOO, ratio="ratio_to_gloo", where={"case": case}, bound_s=bound_s, setup=result["setups"])
    if UNTUNED in samples:
        report.bar(f"{case}: untuned / Gloo", ratio(samples, UNTUNED, GLOO), 1.02)
    if TUNED in samples:
        if case in LIMITS:
            report.bar(f"{case}: tuned / Gloo", ratio(samples, TUNED, GLOO), LIMITS[case])
        if bound_s and case in OF_BOUND:
            report.bar(f"{case}: tuned / bound", Spread.of(samples[TUNED]).median / bound_s, OF_BOUND[case])
        for name in (BY_HAND, KEPT):
            if name in samples:
                report.bar(f"{case}: tuned / {name}", ratio(samples, TUNED, name), 0.90)

    if case in SMALL and {TUNED, UNTUNED} <= samples.keys():
        report.bar(f"{case}: tuned / untuned", ratio(samples, TUNED, UNTUNED), 0.75)
    if KEEPING in samples and case == "capped":
        report.bar(f"{case}: {KEEPING} / Gloo", ratio(samples, KEEPING, GLOO), 0.16)
    if {UNTUNED, ONE_LEVEL} <= samples.keys():
        report.bar(f"{case}: untuned / {ONE_LEVEL}", ratio(samples, UNTUNED, ONE_LEVEL), 0.70)
    if {TUNED, NEAR} <= samples.keys():
        report.bar(f"{case}: {NEAR} / tuned", ratio(samples, NEAR, TUNED), 0.90)
    if {TUNED, LOSSY} <= samples.keys():
        report.bar(f"{case}: {LOSSY} / tuned", ratio(samples, LOSSY, TUNED), 1.02)


def main() -> int:
    """Run every case."""
    flags = parser(__doc__)
    flags.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    flags.add_argument("--contenders", nargs="+", default=[GLOO, BY_HAND, KEPT, *SIRTAKIS])
    flags.add_argument("--expected", action="store_true", help="compare a dozen settings with their predictions")
    flags.add_argument("--rounds", type=int, help="blocks of steps per contender")
    flags.add_argument("--steps", type=int, help="steps per block")
    flags.add_argument("--warmup", type=int, default=60, help="steps of the search (%(default)s)")
    args = flags.parse_args()
    if args.cases != ["host"]:
        need_cluster()
    name = "_".join(
        ["fsdp", *(["expected"] if args.expected else []), *(args.cases if args.cases != list(CASES) else [])]
    )
    report = Report(name=name.replace("-", "_"))
    for case in args.cases:
        options = {
            "contenders": [
                GLOO,
                *(name for name in args.contenders if name != GLOO),
            ],  # The reference is present in any case.
            "expected": args.expected,
            "rounds": args.rounds or (2 if args.quick else 3),
            "steps": args.steps or (10 if case == "host" else 1),
            "warmup": args.warmup,
        }
        measure(report, case, options)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, init=False, gloo=True))
