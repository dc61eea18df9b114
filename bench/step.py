"""The whole training step on one host: Sirtaki untuned and tuned, compared with PyTorch DDP, alternating in one run.

    python -m bench.step [--quick] [--check] [--save] [--ranks 1 2 4] [--models resnet50 transformer conv large equal]

Emulated models compute for 60 ms. "resnet50" has ResNet-50's gradients. "large" has VGG-16's gradients at a twentieth
of their size: 26 MB, of which one tensor has 20. "equal" has sixteen gradients of 1 MiB. All contenders are in the same
processes, each with a copy of the model. A sample is the slowest rank's time for a block of steps, divided by the
number of steps. "alone" synchronises nothing. The additional time of a contender is its exposed communication. "mpi" is
Horovod's method for large gradients. "ddp, attached" is DDP with `sirtaki.torch.ddp.attach(model)`. "ddp, backend
sirtaki" is DDP over that backend, attached automatically.

Bars: untuned ≤ 1.00 of DDP's step at 2 and 4 ranks, tuned ≤ 0.80 at 4 ranks on "resnet50", attached ≤ 0.95, no more
overhead than DDP at one rank, and no more exposed communication than the better of DDP and "mpi", for "large" and
"equal" at 2 and 4 ranks. A bar below 1.00 must be proved by a paired comparison, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from bench.lib.contenders import Attached, Contender, Ddp, ModelMaker, OverMpi, Sirtaki
from bench.lib.harness import Report, finish, parser
from bench.lib.models import emulated, emulated_resnet50, small_conv, transformer
from bench.lib.ranks import in_turns, run_ranks, start
from bench.lib.workloads import workload
from sirtaki.comm.plan import GradientLayout

BESIDE_MPI = ("large", "equal")
EMULATED = ("resnet50", *BESIDE_MPI)
MODELS = ("resnet50", "transformer", "conv", *BESIDE_MPI)
COMPUTE_S = 0.06
ATTACHED = "ddp, attached"
BACKEND = "ddp, backend sirtaki"


def make_model(name: str, *, rank: int, compute_s: float, scale: float, seed: int) -> ModelMaker:
    """Return a function that creates the model of that name; each call creates an equal one."""
    if name == "resnet50":
        return lambda: emulated_resnet50(rank=rank, compute_s=compute_s, scale=scale)
    vgg = workload("vgg16").scaled(0.05 * scale)
    equal = replace(vgg, layout=GradientLayout(sizes=(round((1 << 18) * scale),) * 16), compute_shares=(1 / 16,) * 16)
    return {
        "large": lambda: emulated(vgg, rank=rank, compute_s=compute_s),
        "equal": lambda: emulated(equal, rank=rank, compute_s=compute_s),
        "transformer": lambda: transformer(rank=rank, seed=seed),
        "conv": lambda: small_conv(rank=rank, seed=seed),
    }[name]


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: create the contenders, and time their steps alternately. Collective."""
    given = {key: options[key] for key in ("compute_s", "scale", "seed")}
    model = make_model(options["model"], rank=comm.rank, **given)
    contenders: dict[str, Contender] = {
        "alone": Contender(model),
        "ddp": Ddp(model),
        **({"mpi": OverMpi(model, comm)} if options["model"] in EMULATED else {}),
        ATTACHED: Attached(model),
        BACKEND: Ddp(model, backend="sirtaki"),
        "untuned": Sirtaki(model, tune=False),
        "tuned": Sirtaki(model, tune=True),
    }
    for contender in contenders.values():
        for _ in range(3):  # DDP rebuilds its buckets after the first step. Sirtaki learns the order in two steps.
            contender.step()
    for name in ("tuned", ATTACHED, BACKEND):
        contenders[name].warm_up()
    steps = {name: contender.step for name, contender in contenders.items()}
    samples = in_turns(steps, comm, rounds=options["rounds"], block=options["steps"], seed=options["seed"])
    if options["model"] in EMULATED:
        for name, contender in contenders.items():
            contender.check_average(comm.rank + 1 if name == "alone" else (comm.size + 1) / 2)
    return {
        "samples": samples,
        "warmup_steps": {name: contenders[name].warmup_steps for name in ("tuned", ATTACHED, BACKEND)},
        "setups": {name: contender.describe() for name, contender in contenders.items()},
    }


def measure(report: Report, model: str, ranks: int, options: Mapping[str, Any]) -> None:
    """Run one model on a number of ranks, and add its rows and bars."""
    result = run_ranks("bench.step", ranks, {**options, "model": model})
    samples, where = result["samples"], {"model": model, "ranks": ranks}
    report.compare(samples, "ddp", where=where, setup=result["setups"], warmup_steps=result["warmup_steps"])
    tuned_limit = 0.8 if ranks == 4 and model == "resnet50" else 1.0
    for name, limit in (("untuned", 1.0), ("tuned", tuned_limit), (ATTACHED, 1.02 if ranks == 1 else 0.95)):
        report.bar_of_pairs(f"{model}, {ranks} ranks: {name} step / DDP's", samples, name, "ddp", limit)
    if ranks > 1 and model in BESIDE_MPI:
        exposed_s = {name: median(times_s) - median(samples["alone"]) for name, times_s in samples.items()}
        better_s = min(exposed_s["ddp"], exposed_s["mpi"])
        claim = f"{model}, {ranks} ranks: attached exposes, of the better of DDP and MPI"
        report.bar(claim, exposed_s[ATTACHED] / better_s, 1.0)


def main() -> int:
    """Run every model on every number of ranks."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    flags.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    flags.add_argument("--rounds", type=int, help="blocks of steps per contender")
    flags.add_argument("--steps", type=int, help="steps per block")
    flags.add_argument("--scale", type=float, default=1.0, help="scale of the emulated model's gradients")
    flags.add_argument(
        "--compute-s", type=float, default=COMPUTE_S, help="seconds of computation of the emulated model (%(default)s)"
    )
    args = flags.parse_args()
    args.rounds = args.rounds or (6 if args.quick else 11)
    args.steps = args.steps or (3 if args.quick else 5)
    if args.quick:
        args.models = args.models[:1] if args.models == list(MODELS) else args.models
    report = Report(name="step_large" if set(args.models) <= set(BESIDE_MPI) else "step")
    if args.scale != 1.0:
        report.notes.append(f"the emulated model's gradients are scaled by {args.scale:g}")
    options = {key: getattr(args, key) for key in ("rounds", "steps", "scale", "compute_s", "seed")}
    for model in args.models:
        for ranks in args.ranks:
            measure(report, model, ranks, options)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, gloo=True))
