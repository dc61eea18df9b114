"""The whole training step on one host: Sirtaki untuned and tuned against PyTorch DDP, alternating in one run.

    python -m bench.step [--quick] [--check] [--save] [--ranks 1 2 4] [--models resnet50 transformer conv]

The emulated model computes for 60 ms. Both live in the same processes, each with a copy of the model. A sample is a
block of steps: the slowest rank's time for it, by the number of steps. With one rank one contender synchronises
nothing. "ddp, attached" is DDP with `sirtaki.torch.ddp.attach(model)`, "ddp, backend sirtaki" is DDP over that backend.
Bars: untuned ≤ 1.00 of DDP's step at 2 and 4 ranks, tuned ≤ 0.80 at 4 ranks on the emulated model, attached ≤ 0.95, and
no more overhead than DDP at one rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.lib.contenders import Attached, Contender, Ddp, ModelMaker, Sirtaki, join_gloo
from bench.lib.harness import (
    Bar,
    Report,
    Spread,
    alternate,
    finish,
    give_result,
    main_or_rank,
    parser,
    ratios,
    run_ranks,
)
from bench.lib.models import emulated_resnet50, small_conv, transformer

EMULATED = "resnet50"
MODELS = (EMULATED, "transformer", "conv")
COMPUTE_S = 0.06
ATTACHED = "ddp, attached"
BACKEND = "ddp, backend sirtaki"


def make_model(name: str, *, rank: int, compute_s: float, scale: float, seed: int) -> ModelMaker:
    """A maker of the model of that name; each call makes an equal one."""
    if name == EMULATED:
        return lambda: emulated_resnet50(rank=rank, compute_s=compute_s, scale=scale)
    return {
        "transformer": lambda: transformer(rank=rank, seed=seed),
        "conv": lambda: small_conv(rank=rank, seed=seed),
    }[name]


def timed_block(contender: Contender, steps: int, *, barrier: Callable[[], None]) -> Callable[[], float]:
    """Collective: a function that runs a block of steps and returns this rank's seconds a step.

    One step goes before, unmeasured: while the others ran, caches were lost and idle connections fell back to a small
    congestion window.
    """

    def block() -> float:
        contender.step()
        barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            contender.step()
        return (time.perf_counter() - begin_s) / steps

    return block


def slowest(samples: Mapping[str, list[float]], comm: Any) -> dict[str, list[float]]:
    """Collective: each sample on the rank where it took longest."""
    gathered = comm.allgather(dict(samples))
    return {name: [max(ranks) for ranks in zip(*(one[name] for one in gathered), strict=True)] for name in samples}


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does: builds the contenders, lets them alternate, gives the result."""
    from mpi4py import MPI

    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    hvd.init()
    join_gloo(comm)
    model = make_model(
        options["model"],
        rank=comm.rank,
        compute_s=options["compute_s"],
        scale=options["scale"],
        seed=options["seed"],
    )
    tuned = Sirtaki(model, tune=True)
    attached = Attached(model)
    alone: dict[str, Contender] = {"alone": Contender(model)} if comm.size == 1 else {}
    contenders: dict[str, Contender] = {
        **alone,
        "ddp": Ddp(model),
        ATTACHED: attached,
        BACKEND: Ddp(model, backend="sirtaki"),
        "untuned": Sirtaki(model, tune=False),
        "tuned": tuned,
    }
    for contender in contenders.values():
        for _ in range(3):  # DDP rebuilds its buckets after the first step, Sirtaki learns the order in two
            contender.step()
    begin_s = time.perf_counter()
    tuned.warm_up()
    warmup_s = time.perf_counter() - begin_s
    attached.warm_up()
    blocks = {
        name: timed_block(contender, options["steps"], barrier=comm.Barrier) for name, contender in contenders.items()
    }
    samples = slowest(alternate(blocks, options["rounds"], seed=options["seed"]), comm)
    if options["model"] == EMULATED:
        for contender in contenders.values():
            contender.check_average((comm.size + 1) / 2)
    if comm.rank == 0:
        give_result(
            {
                "samples": samples,
                "warmup_steps": {"tuned": tuned.warmup_steps, ATTACHED: attached.warmup_steps},
                "warmup_s": warmup_s,
                "setups": {name: contender.describe() for name, contender in contenders.items()},
            }
        )
    comm.Barrier()
    hvd.shutdown()


def measure(report: Report, model: str, ranks: int, options: Mapping[str, Any]) -> None:
    """Adds the rows and bars of one model on so many ranks."""
    result = run_ranks("bench.step", ranks, {**options, "model": model})
    samples = result["samples"]
    for name, times_s in samples.items():
        report.rows.append(
            {
                "model": model,
                "ranks": ranks,
                "contender": name,
                "step_s": Spread.of(times_s),
                "ratio_to_ddp": ratios(times_s, samples["ddp"]),
                "setup": result["setups"][name],
                "warmup_steps": result["warmup_steps"].get(name),
                "samples_s": times_s,
            }
        )
    limits = {"untuned": 1.0, "tuned": 0.8 if ranks == 4 and model == EMULATED else 1.0}
    limits[ATTACHED] = 1.02 if ranks == 1 else 0.95
    for name, limit in limits.items():
        ratio = ratios(samples[name], samples["ddp"]).median
        report.bars.append(Bar(claim=f"{model}, {ranks} ranks: {name} step / DDP's", value=ratio, limit=limit))


def main() -> int:
    """Runs every model on every number of ranks."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    flags.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    flags.add_argument("--rounds", type=int, help="blocks a contender")
    flags.add_argument("--steps", type=int, help="steps a block")
    flags.add_argument("--scale", type=float, default=1.0, help="of the emulated model's gradients")
    flags.add_argument("--compute-s", type=float, default=COMPUTE_S, help="of the emulated model")
    args = flags.parse_args()
    args.rounds = args.rounds or (5 if args.quick else 11)
    args.steps = args.steps or (3 if args.quick else 5)
    if args.quick:
        args.models = args.models[:1] if args.models == list(MODELS) else args.models
    report = Report(name="step")
    if args.scale != 1.0:
        report.notes.append(f"the emulated model's gradients are scaled by {args.scale:g}")
    options = {key: getattr(args, key) for key in ("rounds", "steps", "scale", "compute_s", "seed")}
    for model in args.models:
        for ranks in args.ranks:
            measure(report, model, ranks, options)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
