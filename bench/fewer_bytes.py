"""A training step with compressed gradients, beside PyTorch's own hooks of the same kind, and DiLoCo's.

    python -m bench.fewer_bytes [--quick] [--check] [--save] [--cases capped equal]

Four emulated nodes (`bench.lib.cluster`), one rank each, train six layers of 512 × 512, 6.3 MB of gradients, whose
computation takes next to no time: what is measured is communication. PyTorch's DDP runs plain, with
`quantization_pertensor_hook` (made to work over Gloo, see `_Gathered`) and with `powerSGD_hook`; Sirtaki tuned, with
int8 and with PowerSGD of the same rank. All live in the same processes and take turns. Afterwards DiLoCo (H = 32, four
fragments) trains the same model, with a pause of 20 ms in each step for its computation, in turns with the same loop
without any communication.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from bench.lib.cluster import NETWORKS as CASES
from bench.lib.cluster import NetLab, why_unavailable
from bench.lib.contenders import Contender, Ddp, Sirtaki, join_gloo
from bench.lib.harness import Bar, Report, Spread, alternate, finish, parser, ratios
from bench.lib.models import mlp
from bench.lib.ranks import give_result, main_or_rank, rank_argv, rank_env, slowest, take_result

RANK, EVERY, PAUSE_S = 4, 32, 0.02
DDP, DDP_INT8, DDP_POWERSGD = "ddp", "ddp, quantization_pertensor_hook", f"ddp, powerSGD_hook({RANK})"
PLAIN, INT8, POWERSGD = "sirtaki", "sirtaki, int8", f"sirtaki, powersgd({RANK})"
ALONE, DILOCO = "nothing synchronised", f"diloco, H = {EVERY}"
JOB_TIMEOUT_S = 280.0


def block(step: Callable[[], None], steps: int, *, barrier: Callable[[], None]) -> Callable[[], float]:
    """Collective: a function that runs so many steps, after one that does not count, and gives seconds a step."""

    def timed() -> float:
        step()
        barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - begin_s) / steps

    return timed


class _Gathered:
    """Gives `quantization_hooks` what it expects of a gather: NCCL's futures hold a list of lists, Gloo's a list."""

    group, get_rank = dist.group, staticmethod(dist.get_rank)

    @staticmethod
    def all_gather(*args: Any, **options: Any) -> _Gathered:
        made = _Gathered()
        made._work = dist.all_gather(*args, **options)
        return made

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda future: [future.value()])


def hooked(model: Callable[[], Any], kind: str) -> Ddp:
    """Collective: DDP with PyTorch's hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks

    made = Ddp(model)
    assert isinstance(made.forward, nn.parallel.DistributedDataParallel)
    group = made.forward.process_group
    if kind == DDP_INT8:
        quantization_hooks.dist = _Gathered  # type: ignore[assignment]
        made.forward.register_comm_hook(group, quantization_hooks.quantization_pertensor_hook)  # type: ignore[no-untyped-call]
    elif kind == DDP_POWERSGD:
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=2)  # type: ignore[no-untyped-call]
        made.forward.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # type: ignore[no-untyped-call]
    return made


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does: builds the contenders, lets them alternate, gives the times."""
    from mpi4py import MPI

    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    hvd.init()
    join_gloo(comm, address=options["master"])

    def model() -> Any:
        return mlp([512] * 7, rank=comm.rank, batch=8)

    ours = {
        PLAIN: Sirtaki(model, tune=True),
        INT8: Sirtaki(model, tune=True, compression=hvd.Compression.int8),
        POWERSGD: Sirtaki(model, tune=True, compression=hvd.Compression.powersgd(RANK)),
    }
    contenders: dict[str, Contender] = {kind: hooked(model, kind) for kind in (DDP, DDP_INT8, DDP_POWERSGD)}
    for contender in (*contenders.values(), *ours.values()):
        for _ in range(3):
            contender.step()
    for tuned in ours.values():
        tuned.warm_up()
    contenders |= ours
    turns = {name: block(each.step, options["steps"], barrier=comm.Barrier) for name, each in contenders.items()}
    samples = slowest(alternate(turns, options["rounds"], seed=options["seed"]), comm)

    alone, less = Contender(model), Contender(model)

    def paused(contender: Contender) -> Callable[[], None]:
        def step() -> None:
            time.sleep(PAUSE_S)
            contender.step()

        return step

    with hvd.DiLoCo(less.model, less.optimizer, sync_every=EVERY, fragments=4, delay=EVERY // 4):
        turns = {
            name: block(paused(each), EVERY, barrier=comm.Barrier) for name, each in ((ALONE, alone), (DILOCO, less))
        }
        samples |= slowest(alternate(turns, options["rounds"], seed=options["seed"]), comm)
    if comm.rank == 0:
        give_result({"samples": samples, "setups": {name: each.describe() for name, each in contenders.items()}})
    comm.Barrier()
    hvd.shutdown()


def measure(report: Report, case: str, options: dict[str, Any], *, warmup_iterations: int) -> None:
    """Builds the cluster of that case, and adds its rows and bars."""
    shape = CASES[case]
    env = {"SIRTAKI_WARMUP_ITERATIONS": str(warmup_iterations), "SIRTAKI_REGISTRY": "off", **rank_env()}
    with NetLab(shape) as lab:
        argv = rank_argv("bench.fewer_bytes", {**options, "master": lab.address(0)})
        result = take_result(lab.run_ranks(argv, env=env, timeout_s=JOB_TIMEOUT_S))
    samples = result["samples"]
    for name, times_s in samples.items():
        report.rows.append(
            {
                "case": case,
                "contender": name,
                "step_s": Spread.of(times_s),
                "ratio": ratios(times_s, samples[ALONE if name in (ALONE, DILOCO) else DDP]),
                "setup": result["setups"].get(name, ""),
                "samples_s": times_s,
            }
        )
    bars = [(INT8, DDP_INT8, 0.40), (POWERSGD, DDP_POWERSGD, 0.60)]
    if case == "equal":
        bars = [(INT8, DDP, 0.45), (POWERSGD, DDP, 0.30)]
    for ours, theirs, limit in (*bars, (DILOCO, ALONE, 1.05)):
        value = ratios(samples[ours], samples[theirs]).median
        report.bars.append(Bar(claim=f"{case}: {ours} / {theirs}", value=value, limit=limit))


def main() -> int:
    """Runs every case."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    flags.add_argument("--rounds", type=int, help="blocks a contender")
    flags.add_argument("--steps", type=int, default=5, help="steps a block")
    flags.add_argument("--warmup-iterations", type=int, default=30, help="the tuner's budget; its own default is 100")
    args = flags.parse_args()
    if (reason := why_unavailable()) is not None:
        print(f"the emulated cluster cannot run here: {reason}", file=sys.stderr)
        return 2
    args.rounds = args.rounds or (2 if args.quick else 5)
    report = Report(name="fewer_bytes")
    for case in args.cases:
        options = {"rounds": args.rounds, "steps": args.steps, "seed": args.seed}
        measure(report, case, options, warmup_iterations=args.warmup_iterations)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
