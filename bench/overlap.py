"""Training steps whose communication is also hidden behind the next forward pass: off, on, and PyTorch DDP.

    python -m bench.overlap [--quick] [--check] [--save] [--cases capped equal] [--networks resnet50 vgg16 bert_base]

Four emulated nodes (`bench.lib.cluster`), one rank each, train a model whose layers read their parameter and then sleep
instead of computing. A step has 150 ms of computation, a third of it in the forward pass. The gradients are those of a
real network, scaled so that communication takes about as long as computation. All contenders are in the same processes
and alternate.
A sample is a block of steps and ends after the last update. DDP runs with its defaults, and with a well-informed user's
settings (several connections, smaller buckets). "off" and "on" are Sirtaki, tuned by the same warm-up.

The bound is `max(all computation, 2(P-1)/P * gradient bytes / payload rate)`. Bars: on ≤ 1.01 of off; off ≤ 1.1 of the
shortest step that waits for all gradients before the update; on ≤ 1.15 of the shortest step that does not wait. BERT's
shortest step is longer than the bound, because no gradient can be sent during the computation of its decoder, whose
weight is the embedding's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from bench.lib.cluster import NETWORKS as CASES
from bench.lib.cluster import need_cluster
from bench.lib.contenders import Contender, Ddp, Sirtaki
from bench.lib.harness import Report, Spread, finish, parser, ratio
from bench.lib.models import LayeredModel
from bench.lib.ranks import in_turns, payload_bytes_per_s, run_ranks, start
from bench.lib.workloads import workload
from sirtaki.engine.tuning.overlap import PREPARING

COMPUTE_S = 0.15
DDP, BY_HAND, OFF, ON = "ddp", "ddp by hand", "off", "on"
MEGABYTES = {"capped": 6.1, "equal": 2.6}
"""Megabytes of gradients whose communication takes about as long as all computation, by network."""

NETWORKS = ("resnet50", "vgg16", "bert_base")
JOB_TIMEOUT_S = 560.0


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: measure the link, create the contenders, and time their steps alternately. Collective."""
    payload = payload_bytes_per_s(comm)
    whole = workload(options["network"])
    scale = 1e6 * options["megabytes"] / whole.layout.total_bytes
    work, bucket_mb = whole.scaled(scale), 25 * scale

    def model() -> Any:
        made = LayeredModel(work, compute_s=options["compute_s"], gradient_value=comm.rank + 1.0)
        return made, torch.zeros(1, requires_grad=True)

    ours = {OFF: Sirtaki(model, tune=True), ON: Sirtaki(model, tune=True, overlap_forward=True)}
    contenders: dict[str, Contender] = {
        DDP: Ddp(model, bucket_mb=bucket_mb),
        BY_HAND: Ddp(model, bucket_mb=bucket_mb / 3, interfaces=",".join(["eth0"] * options["connections"])),
        **ours,
    }
    for contender in contenders.values():
        for _ in range(2):
            contender.step()
    for tuned in ours.values():
        tuned.warm_up()
        for _ in range(PREPARING + 1):
            tuned.step()
        while tuned.sync.overlap is not None and tuned.sync.overlap.trying:
            tuned.step()
    samples = in_turns(
        {name: contender.step for name, contender in contenders.items()},
        comm,
        rounds=options["rounds"],
        block=options["steps"],
        before=2,
        ends={name: tuned.finish for name, tuned in ours.items()},
        seed=options["seed"],
    )
    for contender in contenders.values():
        contender.check_average((comm.size + 1) / 2)
    return {
        "samples": samples,
        "payload_bytes_per_s": payload,
        "gradient_bytes": 4 * sum(parameter.numel() for parameter in ours[ON].model.parameters()),
        "setups": {name: contender.describe() for name, contender in contenders.items()},
    }


def measure(report: Report, case: str, options: dict[str, Any], *, warmup_iterations: int) -> None:
    """Run one case and network, and add its rows and bars."""
    shape, network = CASES[case], options["network"]
    env = {"SIRTAKI_WARMUP_ITERATIONS": str(warmup_iterations)}
    options = {**options, "connections": 4 if shape.caps_flows else 1}
    result = run_ranks("bench.overlap", shape, options, env=env, timeout_s=JOB_TIMEOUT_S)
    samples = result["samples"]
    traffic = 2 * (shape.nodes - 1) / shape.nodes * result["gradient_bytes"]
    communication_s = traffic / result["payload_bytes_per_s"]
    bound_s = max(options["compute_s"], communication_s)
    report.compare(
        samples,
        DDP,
        where={"case": case, "network": network},
        bound_s=bound_s,
        setup=result["setups"],
    )
    floor_s, overlapped_s = (
        workload(network).shortest_step_s(
            compute_s=options["compute_s"], communication_s=communication_s, overlaps_forward=overlaps
        )
        for overlaps in (False, True)
    )
    report.notes.append(
        f"{case}, {network}: {result['gradient_bytes'] / 1e6:.1f} MB of gradients; {shape.describe()}; computation "
        f"{options['compute_s'] * 1e3:.0f} ms, communication {communication_s * 1e3:.0f} ms at the link's payload "
        f"rate; a step that waits for all gradients takes {floor_s * 1e3:.0f} ms or more, one that does not "
        f"{overlapped_s * 1e3:.0f}"
    )
    off_s, on_s = (Spread.of(samples[name]).median for name in (OFF, ON))
    report.bar(f"{case}, {network}: off / the shortest step that waits for all gradients", off_s / floor_s, 1.1)
    report.bar(f"{case}, {network}: on / the shortest step that does not", on_s / overlapped_s, 1.15)
    report.bar(f"{case}, {network}: on / off", ratio(samples, ON, OFF), 1.01)


def main() -> int:
    """Run every case."""
    flags = parser(__doc__)
    flags.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    flags.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    flags.add_argument(
        "--megabytes", type=float, help="megabytes of gradients (default: communication takes as long as computation)"
    )
    flags.add_argument("--rounds", type=int, help="blocks of steps per contender")
    flags.add_argument("--steps", type=int, default=20, help="steps per block")
    flags.add_argument("--warmup-iterations", type=int, default=40, help="tuning budget in steps (Sirtaki: 100)")
    args = flags.parse_args()
    need_cluster()
    args.rounds = args.rounds or (3 if args.quick else 7)
    report = Report(name="overlap")
    for case in args.cases:
        for network in args.networks:
            options = {
                "network": network,
                "megabytes": args.megabytes or MEGABYTES[case],
                "compute_s": COMPUTE_S,
                "rounds": args.rounds,
                "steps": args.steps,
                "seed": args.seed,
            }
            measure(report, case, options, warmup_iterations=args.warmup_iterations)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, gloo=True))
