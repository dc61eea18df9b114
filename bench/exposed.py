"""Communication that a step on one host cannot hide: its time, less that of the same step with nothing synchronised.

    python -m bench.exposed [--quick] [--check] [--save] [--ranks 4] [--megabytes 16 28 33]

Four ranks train the emulated ResNet-50, cut to so many megabytes of gradients, with 60 ms of computation; all
contenders live in the same processes and take turns. "mpi" is one `MPI_Allreduce` after the backward pass, "fused over
mpi" goes through MPI on one stream beside the backward pass: as Horovod does, what comes in each cycle together.

Bar: Sirtaki tuned exposes ≤ 0.75 of what the best of DDP and the two over MPI expose.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from bench.lib.contenders import Contender, Ddp, MpiByHand, Sirtaki, join_gloo
from bench.lib.harness import Bar, Report, Spread, alternate, finish, give_result, main_or_rank, parser, run_ranks
from bench.lib.horovod import CYCLE_S
from bench.lib.models import emulated_resnet50
from bench.lib.workloads import workload
from bench.step import slowest, timed_block
from sirtaki.comm.plan import TransportKind

COMPUTE_S = 0.06
ALONE, DDP, MPI_BY_HAND, FUSED, UNTUNED, TUNED = "alone", "ddp", "mpi", "fused over mpi", "untuned", "tuned"


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does: builds the contenders, lets them alternate, gives the result."""
    from mpi4py import MPI

    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    hvd.init()
    join_gloo(comm)

    def model() -> Any:
        return emulated_resnet50(rank=comm.rank, compute_s=COMPUTE_S, scale=options["scale"])

    tuned = Sirtaki(model, tune=True)
    contenders: dict[str, Contender] = {
        ALONE: Contender(model),
        DDP: Ddp(model),
        MPI_BY_HAND: MpiByHand(model, comm.Dup()),
        FUSED: Sirtaki(model, tune=False, transport=TransportKind.MPI, streams=1, unit_bytes=options["cycle_bytes"]),
        UNTUNED: Sirtaki(model, tune=False),
        TUNED: tuned,
    }
    for contender in contenders.values():
        for _ in range(3):
            contender.step()
    tuned.warm_up()
    blocks = {
        name: timed_block(contender, options["steps"], barrier=comm.Barrier) for name, contender in contenders.items()
    }
    samples = slowest(alternate(blocks, options["rounds"], seed=options["seed"]), comm)
    for name, contender in contenders.items():
        contender.check_average(comm.rank + 1 if name == ALONE else (comm.size + 1) / 2)
    if comm.rank == 0:
        give_result(
            {"samples": samples, "setups": {name: contender.describe() for name, contender in contenders.items()}}
        )
    comm.Barrier()
    torch.distributed.destroy_process_group()
    hvd.shutdown()


def measure(report: Report, megabytes: float, ranks: int, options: Mapping[str, Any]) -> None:
    """Adds the rows and the bar of gradients of that size."""
    total_bytes = round(1e6 * megabytes)
    scale = total_bytes / workload("resnet50").layout.total_bytes
    cycle_bytes = round(total_bytes * CYCLE_S / (2 / 3 * COMPUTE_S))
    result = run_ranks("bench.exposed", ranks, {**options, "scale": scale, "cycle_bytes": cycle_bytes})
    samples = result["samples"]
    exposed = {
        name: Spread.of([step_s - alone_s for step_s, alone_s in zip(times_s, samples[ALONE], strict=True)])
        for name, times_s in samples.items()
    }
    for name, times_s in samples.items():
        report.rows.append(
            {
                "megabytes": megabytes,
                "ranks": ranks,
                "contender": name,
                "step_s": Spread.of(times_s),
                "exposed_s": None if name == ALONE else exposed[name],
                "setup": result["setups"][name],
                "samples_s": times_s,
            }
        )
    others = min(exposed[name].median for name in (DDP, MPI_BY_HAND, FUSED))
    report.bars.append(
        Bar(
            claim=f"{megabytes:g} MB, {ranks} ranks: tuned exposes / the best of DDP and MPI",
            value=exposed[TUNED].median / others,
            limit=0.75,
        )
    )


def main() -> int:
    """Runs every size."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--ranks", type=int, default=4)
    flags.add_argument("--megabytes", type=float, nargs="+", default=[16.0, 28.0, 33.0])
    flags.add_argument("--rounds", type=int, help="blocks a contender")
    flags.add_argument("--steps", type=int, default=10, help="steps a block")
    args = flags.parse_args()
    report = Report(name="exposed")
    options = {"rounds": args.rounds or (5 if args.quick else 15), "steps": args.steps, "seed": args.seed}
    for megabytes in args.megabytes:
        measure(report, megabytes, args.ranks, options)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
