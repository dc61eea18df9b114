"""The training step with communication hidden behind the next forward pass, too: off, on, and PyTorch DDP.

    python -m bench.overlap [--quick] [--check] [--save] [--cases capped equal] [--networks resnet50 vgg16 bert_base]

Four emulated nodes (`bench.lib.cluster`), one rank each, train a model whose layers sleep where a GPU would compute and
read their parameters before that: 150 ms of computation, a third of it forward, over a network's gradients, scaled so
that communication takes about as long. All contenders live in the same processes and take turns; a sample is a block of
steps, which ends when all updates are made. DDP runs as it comes, and as a well-informed user sets it up (several
connections, smaller buckets). "off" and "on" are Sirtaki tuned, with the same warm-up.

The bound is `max(all computation, 2(P-1)/P * gradient bytes / payload rate)`. Bar: on ≤ 1.01 of off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.lib.cluster import NetLab, why_unavailable
from bench.lib.contenders import Contender, Ddp, Sirtaki, join_gloo
from bench.lib.harness import (
    Bar,
    Report,
    Spread,
    alternate,
    finish,
    give_result,
    main_or_rank,
    parser,
    rank_argv,
    rank_env,
    ratios,
    take_result,
)
from bench.lib.models import LayeredModel
from bench.lib.workloads import workload
from bench.netlab import CASES, payload_bytes_per_s
from bench.step import slowest
from sirtaki.engine.tuning.overlap import PREPARING

COMPUTE_S = 0.15
DDP, BY_HAND, OFF, ON = "ddp", "ddp by hand", "off", "on"
MEGABYTES = {"capped": 6.1, "equal": 2.6}
"""Of gradients: communication takes about as long as all computation."""
NETWORKS = ("resnet50", "vgg16", "bert_base")
JOB_TIMEOUT_S = 560.0


def timed_block(contender: Contender, steps: int, *, barrier: Callable[[], None]) -> Callable[[], float]:
    """Collective: a function that runs a block of steps, after two that do not count, and gives seconds a step."""

    def block() -> float:
        for _ in range(2):
            contender.step()
        barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            contender.step()
        if isinstance(contender, Sirtaki):
            contender.optimizer.finish()  # type: ignore[attr-defined]  # a DistributedOptimizer's
        return (time.perf_counter() - begin_s) / steps

    return block


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does: measures the link, builds the contenders, lets them alternate, gives the result."""
    from mpi4py import MPI

    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    payload = payload_bytes_per_s(comm)
    hvd.init()
    join_gloo(comm, address=options["master"])
    whole = workload(options["network"])
    scale = 1e6 * options["megabytes"] / whole.layout.total_bytes
    work, bucket_mb = whole.scaled(scale), 25 * scale

    def model() -> Any:
        made = LayeredModel(work, compute_s=options["compute_s"], gradient_value=comm.rank + 1.0)
        return made, torch.zeros(1, requires_grad=True)

    off, on = Sirtaki(model, tune=True), Sirtaki(model, tune=True, overlap_forward=True)
    contenders: dict[str, Contender] = {
        DDP: Ddp(model, bucket_mb=bucket_mb),
        BY_HAND: Ddp(model, bucket_mb=bucket_mb / 3, interfaces=",".join(["eth0"] * options["connections"])),
        OFF: off,
        ON: on,
    }
    for contender in contenders.values():
        for _ in range(2):
            contender.step()
    for tuned in (off, on):
        tuned.warm_up()
        assert tuned._sync is not None
        overlap = tuned._sync.overlap
        for _ in range(PREPARING + 1):
            tuned.step()
        while overlap.trying:
            tuned.step()
    turns = {
        name: timed_block(contender, options["steps"], barrier=comm.Barrier) for name, contender in contenders.items()
    }
    samples = slowest(alternate(turns, options["rounds"], seed=options["seed"]), comm)
    for contender in contenders.values():
        contender.check_average((comm.size + 1) / 2)
    if comm.rank == 0:
        give_result(
            {
                "samples": samples,
                "payload_bytes_per_s": payload,
                "gradient_bytes": 4 * sum(parameter.numel() for parameter in on.model.parameters()),
                "setups": {name: contender.describe() for name, contender in contenders.items()},
            }
        )
    comm.Barrier()
    hvd.shutdown()


def measure(report: Report, case: str, options: dict[str, Any], *, warmup_iterations: int) -> None:
    """Builds the cluster of that case, and adds its rows and bars."""
    shape, network = CASES[case], options["network"]
    env = {"SIRTAKI_WARMUP_ITERATIONS": str(warmup_iterations), "SIRTAKI_REGISTRY": "off", **rank_env()}
    with NetLab(shape) as lab:
        connections = 1 if shape.flow_bits_per_s == shape.link_bits_per_s else 4
        options = {**options, "master": lab.address(0), "connections": connections}
        result = take_result(
            lab.run_ranks(rank_argv("bench.overlap", options), env=env, timeout_s=JOB_TIMEOUT_S),
        )
    samples = result["samples"]
    traffic = 2 * (shape.nodes - 1) / shape.nodes * result["gradient_bytes"]
    communication_s = traffic / result["payload_bytes_per_s"]
    bound_s = max(options["compute_s"], communication_s)
    for name, times_s in samples.items():
        report.rows.append(
            {
                "case": case,
                "network": network,
                "contender": name,
                "step_s": Spread.of(times_s),
                "ratio_to_ddp": ratios(times_s, samples[DDP]),
                "of_bound": Spread.of([sample / bound_s for sample in times_s]),
                "setup": result["setups"][name],
                "samples_s": times_s,
            }
        )
    report.notes.append(
        f"{case}, {network}: {result['gradient_bytes'] / 1e6:.1f} MB of gradients; link "
        f"{shape.link_bits_per_s / 1e6:g} Mbit/s, flow {shape.flow_bits_per_s / 1e6:g} Mbit/s; computation "
        f"{options['compute_s'] * 1e3:.0f} ms, communication {communication_s * 1e3:.0f} ms at the link's payload rate"
    )
    against_off = ratios(samples[ON], samples[OFF]).median
    report.bars.append(Bar(claim=f"{case}, {network}: on / off", value=against_off, limit=1.01))


def main() -> int:
    """Runs every case."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    flags.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    flags.add_argument("--megabytes", type=float, help="of gradients; default: communication as long as computation")
    flags.add_argument("--rounds", type=int, help="blocks a contender")
    flags.add_argument("--steps", type=int, default=20, help="steps a block")
    flags.add_argument("--warmup-iterations", type=int, default=40, help="the tuner's budget; its own default is 100")
    args = flags.parse_args()
    if (reason := why_unavailable()) is not None:
        print(f"the emulated cluster cannot run here: {reason}", file=sys.stderr)
        return 2
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
    sys.exit(main_or_rank(main, on_rank))
