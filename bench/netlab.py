"""Training over a network that caps single flows: Sirtaki compared with PyTorch DDP, with defaults and tuned by hand.

    python -m bench.netlab [--quick] [--check] [--save] [--scale F] [--cases capped equal delayed]

Takes 12 minutes, 3 with --quick.

Four emulated nodes (`bench.lib.cluster`), one rank each, train the emulated ResNet-50 with 150 ms of compute. All
contenders are in the same processes and alternate. DDP runs with its defaults, and with a well-informed user's
settings: `GLOO_SOCKET_IFNAME` lists the interface four and eight times, with buckets of 25 and 8 MB. The bound is
`max(compute, 2(P-1)/P * gradient bytes / payload rate)` with the payload rate of the same links under many parallel
flows. With a scale, gradients, buckets and compute shrink by the same factor, so that the number of buckets is the
same.

"ddp, attached" is DDP's defaults with `sirtaki.torch.ddp.attach(model)`, "ddp, backend sirtaki" is DDP over that
backend, attached automatically.

Bars: tuned ≤ 0.30 of DDP's defaults, ≤ 0.85 of the best DDP tuned by hand, within 10 % of the bound; attached and
over the backend ≤ 0.30 of DDP's defaults; if link and flow have the same rate, tuned ≤ 1.00 of DDP, and these
≤ 1.02.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.lib.cluster import NETWORKS, need_cluster
from bench.lib.contenders import Attached, Contender, Ddp, Sirtaki
from bench.lib.harness import Report, Spread, finish, parser, ratio
from bench.lib.models import emulated_resnet50
from bench.lib.ranks import in_turns, payload_bytes_per_s, run_ranks, start
from bench.step import ATTACHED, BACKEND

CASES = {**NETWORKS, "delayed": replace(NETWORKS["capped"], delay_s=5e-3)}
COMPUTE_S = 0.15
JOB_TIMEOUT_S = 3600.0
AS_IT_COMES = "ddp"
BY_HAND = {f"ddp, {devices} × {bucket_mb} MB": (devices, bucket_mb) for devices in (4, 8) for bucket_mb in (25, 8)}


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: measure the link, create the contenders, and time their steps alternately. Collective."""
    payload = payload_bytes_per_s(comm)
    scale = options["scale"]

    def model() -> Any:
        return emulated_resnet50(rank=comm.rank, compute_s=options["compute_s"], scale=scale)

    contenders: dict[str, Contender] = {
        AS_IT_COMES: Ddp(model, bucket_mb=25 * scale),
        ATTACHED: Attached(model, bucket_mb=25 * scale),
        BACKEND: Ddp(model, bucket_mb=25 * scale, backend="sirtaki"),
        "untuned": Sirtaki(model, tune=False),
        "tuned": Sirtaki(model, tune=True),
    }
    for name, (devices, bucket_mb) in BY_HAND.items() if options["by_hand"] else ():
        contenders[name] = Ddp(model, bucket_mb=bucket_mb * scale, interfaces=",".join(["eth0"] * devices))
    for contender in contenders.values():
        # DDP rebuilds its buckets after the first step. Sirtaki learns the order in two steps.
        for _ in range(2 if isinstance(contender, Sirtaki) else 1):
            contender.step()
    begin_s = time.perf_counter()
    contenders["tuned"].warm_up()
    warmup_s = time.perf_counter() - begin_s
    for name in (ATTACHED, BACKEND):
        contenders[name].warm_up()
    steps = {name: contender.step for name, contender in contenders.items()}
    samples = in_turns(steps, comm, rounds=options["rounds"], block=options["steps"], seed=options["seed"])
    for contender in contenders.values():
        contender.check_average((comm.size + 1) / 2)
    return {
        "samples": samples,
        "payload_bytes_per_s": payload,
        "gradient_bytes": 4 * sum(parameter.numel() for parameter in contenders["tuned"].model.parameters()),
        "warmup_steps": {name: contenders[name].warmup_steps for name in ("tuned", ATTACHED, BACKEND)},
        "warmup_s": warmup_s,
        "setups": {name: contender.describe() for name, contender in contenders.items()},
    }


def measure(report: Report, case: str, options: dict[str, Any], *, warmup_iterations: int) -> None:
    """Run one case and add its rows and bars."""
    shape = CASES[case]
    env = {"SIRTAKI_WARMUP_ITERATIONS": str(warmup_iterations)}
    result = run_ranks(
        "bench.netlab", shape, {**options, "by_hand": shape.caps_flows}, env=env, timeout_s=JOB_TIMEOUT_S
    )
    samples, payload = result["samples"], result["payload_bytes_per_s"]
    traffic = 2 * (shape.nodes - 1) / shape.nodes * result["gradient_bytes"]
    bound_s = max(options["compute_s"], traffic / payload)
    report.compare(
        samples,
        AS_IT_COMES,
        where={"case": case},
        bound_s=bound_s,
        setup=result["setups"],
        warmup_steps=result["warmup_steps"],
    )
    report.notes.append(
        f"{case}: gradients, buckets and compute × {options['scale']:g}; {shape.describe()}, payload "
        f"{payload / 1e6:.1f} MB/s; gradients {result['gradient_bytes'] / 1e6:.1f} MB, bound {bound_s * 1e3:.0f} ms; "
        f"warm-up {result['warmup_s']:.0f} s"
    )
    if not shape.caps_flows:
        for name, limit in (("tuned", 1.0), (ATTACHED, 1.02), (BACKEND, 1.02)):
            report.bar(f"equal rates: {name} step / DDP's", ratio(samples, name, AS_IT_COMES), limit)
        return
    best = min(BY_HAND, key=lambda name: Spread.of(samples[name]).median)
    report.bar("tuned step / DDP's as it comes", ratio(samples, "tuned", AS_IT_COMES), 0.30)
    for name in (ATTACHED, BACKEND):
        report.bar(f"{name}, step / DDP's as it comes", ratio(samples, name, AS_IT_COMES), 0.30)
    report.bar(f"tuned step / the best DDP tuned by hand ({best})", ratio(samples, "tuned", best), 0.85)
    report.bar("tuned step / bound", Spread.of(samples["tuned"]).median / bound_s, 1.30 if shape.delay_s else 1.10)


def main() -> int:
    """Run every case."""
    flags = parser(__doc__)
    flags.add_argument("--cases", nargs="+", choices=list(CASES), help="default: all; capped only with --quick")
    flags.add_argument("--scale", type=float, help="scale of gradients, buckets and compute (1; equal: 0.25)")
    flags.add_argument("--rounds", type=int, help="blocks of steps per contender")
    flags.add_argument("--steps", type=int, default=1, help="measured steps per block")
    flags.add_argument("--warmup-iterations", type=int, default=40, help="tuning budget in steps (Sirtaki: 100)")
    args = flags.parse_args()
    need_cluster()
    args.cases = args.cases or (["capped"] if args.quick else list(CASES))
    args.rounds = args.rounds or (2 if args.quick else 3)
    report = Report(name="netlab")
    for case in args.cases:
        scale = args.scale or (0.25 if args.quick or case != "capped" else 1.0)
        options = {"scale": scale, "compute_s": COMPUTE_S * scale, "rounds": args.rounds, "steps": args.steps}
        measure(report, case, {**options, "seed": args.seed}, warmup_iterations=args.warmup_iterations)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, gloo=True))
