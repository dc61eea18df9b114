"""Training over a network that caps single flows: Sirtaki against PyTorch DDP, as it comes and tuned by hand.

    python -m bench.netlab [--quick] [--check] [--save] [--scale F] [--cases capped equal]

Takes 12 minutes, 3 with --quick.

Four emulated nodes (`bench.lib.cluster`), one rank each, train the emulated ResNet-50 with 150 ms of compute. All
contenders live in the same processes and take turns. DDP runs as it comes, and as a well-informed user sets it up:
`GLOO_SOCKET_IFNAME` listing the interface four and eight times, with buckets of 25 and 8 MB. The bound is
`max(compute, 2(P-1)/P * gradient bytes / payload rate)` with the payload rate of the same links under many parallel
flows. Scaled down, gradients, buckets and compute shrink alike, so that the number of buckets stays.

"ddp, attached" is DDP as it comes with `sirtaki.torch.ddp.attach(model)`, "ddp, backend sirtaki" over that backend.

Bars: tuned ≤ 0.30 of DDP as it comes, ≤ 0.85 of the best DDP tuned by hand, within 10 % of the bound, attached ≤ 0.35
of DDP as it comes; where link and flow have the same rate, tuned ≤ 1.00 and attached ≤ 1.02 of DDP.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from bench.lib.cluster import LabShape, NetLab, why_unavailable
from bench.lib.contenders import Attached, Contender, Ddp, Sirtaki, join_gloo
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
from bench.lib.models import emulated_resnet50
from bench.step import ATTACHED, BACKEND, slowest, timed_block

__all__ = ["CASES", "LabShape", "NetLab", "payload_bytes_per_s"]

MBIT = 1_000_000
CASES = {
    "capped": LabShape(nodes=4, link_bits_per_s=400 * MBIT, flow_bits_per_s=100 * MBIT),
    "equal": LabShape(nodes=4, link_bits_per_s=200 * MBIT, flow_bits_per_s=200 * MBIT),
}
COMPUTE_S = 0.15
FLOWS = 16
JOB_TIMEOUT_S = 3600.0
AS_IT_COMES = "ddp"
BY_HAND = {f"ddp, {devices} × {bucket_mb} MB": (devices, bucket_mb) for devices in (4, 8) for bucket_mb in (25, 8)}


def payload_bytes_per_s(comm: Any, *, flows: int = FLOWS, duration_s: float = 2.0) -> float:
    """Collective: what a link carries besides headers, on the slowest rank.

    Every rank sends to the next one over many connections, as a ring all-reduce does, and counts what it receives
    after a quarter of the time.
    """
    listener = socket.create_server(("0.0.0.0", 0), backlog=flows)
    addresses = comm.allgather((socket.gethostbyname(socket.gethostname()), listener.getsockname()[1]))
    senders = [socket.create_connection(addresses[(comm.rank + 1) % comm.size]) for _ in range(flows)]
    receivers = [listener.accept()[0] for _ in range(flows)]
    for one in (*senders, *receivers):
        one.setblocking(False)
    chunk, received = bytes(1 << 16), 0
    comm.Barrier()
    begin_s = time.perf_counter()
    counting_from_s, counting_from = begin_s, 0
    while (now_s := time.perf_counter()) < begin_s + duration_s:
        if counting_from_s == begin_s and now_s > begin_s + duration_s / 4:
            counting_from_s, counting_from = now_s, received
        readable, writable, _ = select.select(receivers, senders, [], 0.1)
        for one in readable:
            received += len(one.recv(1 << 18))
        for one in writable:
            with contextlib.suppress(BlockingIOError):
                one.send(chunk)
    rate = (received - counting_from) / (now_s - counting_from_s)
    comm.Barrier()
    for one in (listener, *senders, *receivers):
        one.close()
    return float(min(comm.allgather(rate)))


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does: measures the link, builds the contenders, lets them alternate, gives the result."""
    from mpi4py import MPI

    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    payload = payload_bytes_per_s(comm)
    hvd.init()
    join_gloo(comm, address=options["master"])
    scale, compute_s = options["scale"], options["compute_s"]

    def model() -> Any:
        return emulated_resnet50(rank=comm.rank, compute_s=compute_s, scale=scale)

    tuned = Sirtaki(model, tune=True)
    attached = Attached(model, bucket_mb=25 * scale)
    contenders: dict[str, Contender] = {
        AS_IT_COMES: Ddp(model, bucket_mb=25 * scale),
        ATTACHED: attached,
        BACKEND: Ddp(model, bucket_mb=25 * scale, backend="sirtaki"),
        "untuned": Sirtaki(model, tune=False),
        "tuned": tuned,
    }
    if options["by_hand"]:
        for name, (devices, bucket_mb) in BY_HAND.items():
            contenders[name] = Ddp(model, bucket_mb=bucket_mb * scale, interfaces=",".join(["eth0"] * devices))
    for contender in contenders.values():
        # DDP rebuilds its buckets after the first step, Sirtaki learns the order in two.
        for _ in range(2 if isinstance(contender, Sirtaki) else 1):
            contender.step()
    begin_s = time.perf_counter()
    tuned.warm_up()
    warmup_s = time.perf_counter() - begin_s
    attached.warm_up()

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
                "gradient_bytes": 4 * sum(parameter.numel() for parameter in tuned.model.parameters()),
                "warmup_steps": {"tuned": tuned.warmup_steps, ATTACHED: attached.warmup_steps},
                "warmup_s": warmup_s,
                "setups": {name: contender.describe() for name, contender in contenders.items()},
            }
        )
    comm.Barrier()
    hvd.shutdown()


def measure(report: Report, case: str, options: dict[str, Any], *, warmup_iterations: int) -> None:
    """Builds the cluster of that case, and adds its rows and bars."""
    shape = CASES[case]
    env = {"SIRTAKI_WARMUP_ITERATIONS": str(warmup_iterations), **rank_env()}
    with NetLab(shape) as lab:
        options = {**options, "master": lab.address(0), "by_hand": case == "capped"}
        output = lab.run_ranks(rank_argv("bench.netlab", options), env=env, timeout_s=JOB_TIMEOUT_S)
    result = take_result(output)
    samples = result["samples"]
    traffic = 2 * (shape.nodes - 1) / shape.nodes * result["gradient_bytes"]
    bound_s = max(options["compute_s"], traffic / result["payload_bytes_per_s"])
    for name, times_s in samples.items():
        report.rows.append(
            {
                "case": case,
                "contender": name,
                "step_s": Spread.of(times_s),
                "ratio_to_ddp": ratios(times_s, samples[AS_IT_COMES]),
                "of_bound": Spread.of([sample / bound_s for sample in times_s]),
                "setup": result["setups"][name],
                "warmup_steps": result["warmup_steps"].get(name),
                "samples_s": times_s,
            }
        )
    report.notes.append(
        f"{case}: gradients, buckets and compute × {options['scale']:g}; link {shape.link_bits_per_s / 1e6:g} Mbit/s, "
        f"flow {shape.flow_bits_per_s / 1e6:g} Mbit/s, payload {result['payload_bytes_per_s'] / 1e6:.1f} MB/s; "
        f"gradients {result['gradient_bytes'] / 1e6:.1f} MB, bound {bound_s * 1e3:.0f} ms; "
        f"warm-up {result['warmup_s']:.0f} s"
    )
    if case == "equal":
        for name, limit in (("tuned", 1.0), (ATTACHED, 1.02)):
            report.bars.append(Bar(claim=f"equal rates: {name} step / DDP's", value=_ratio(samples, name), limit=limit))
        return
    best = min(BY_HAND, key=lambda name: Spread.of(samples[name]).median)
    report.bars += [
        Bar(claim="tuned step / DDP's as it comes", value=_ratio(samples, "tuned"), limit=0.30),
        Bar(claim=f"{ATTACHED}, step / DDP's as it comes", value=_ratio(samples, ATTACHED), limit=0.35),
        Bar(
            claim=f"tuned step / the best DDP tuned by hand ({best})", value=_ratio(samples, "tuned", best), limit=0.85
        ),
        Bar(claim="tuned step / bound", value=Spread.of(samples["tuned"]).median / bound_s, limit=1.10),
    ]


def _ratio(samples: Mapping[str, list[float]], name: str, peer: str = AS_IT_COMES) -> float:
    return ratios(samples[name], samples[peer]).median


def main() -> int:
    """Runs every case."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--cases", nargs="+", choices=list(CASES), help="default: all; capped only with --quick")
    flags.add_argument("--scale", type=float, help="of gradients, buckets and compute; default 1, equal 0.25")
    flags.add_argument("--rounds", type=int, help="blocks a contender")
    flags.add_argument("--steps", type=int, default=1, help="steps a block, after one that does not count")
    flags.add_argument("--warmup-iterations", type=int, default=40, help="the tuner's budget; its own default is 100")
    args = flags.parse_args()
    if (reason := why_unavailable()) is not None:
        print(f"the emulated cluster cannot run here: {reason}", file=sys.stderr)
        return 2
    args.cases = args.cases or (["capped"] if args.quick else list(CASES))
    args.rounds = args.rounds or (2 if args.quick else 3)
    report = Report(name="netlab")
    for case in args.cases:
        scale = args.scale or (0.25 if args.quick or case == "equal" else 1.0)
        options = {"scale": scale, "compute_s": COMPUTE_S * scale, "rounds": args.rounds, "steps": args.steps}
        measure(report, case, {**options, "seed": args.seed}, warmup_iterations=args.warmup_iterations)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
