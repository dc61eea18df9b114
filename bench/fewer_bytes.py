"""A training step with compressed gradients, compared with PyTorch's own compression hooks, and with DiLoCo.

    python -m bench.fewer_bytes [--quick] [--check] [--save] [--cases capped equal] [--diloco]

Four emulated nodes (`bench.lib.cluster`), one rank each, train six layers of 512 × 512 (6.3 MB of gradients) with
almost no computation, so the benchmark measures communication. PyTorch's DDP runs plain, with
`quantization_pertensor_hook` (adapted to Gloo, see `_Gathered`) and with `powerSGD_hook`. Sirtaki runs tuned, with
int8, with PowerSGD of the same rank, and with the codec that it chooses under `SIRTAKI_LOSSY=int8,powersgd:4`. All
contenders are in the same processes and alternate. Afterwards DiLoCo (H = 32, four fragments) trains the same model and
alternates with the same loop without communication. Each step of both sleeps 20 ms instead of computing. `--diloco`
runs only this part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import distributed as dist
from torch import nn

from bench.lib.cluster import NETWORKS as CASES
from bench.lib.cluster import need_cluster
from bench.lib.contenders import Contender, Ddp, Sirtaki
from bench.lib.harness import Report, finish, parser, ratio
from bench.lib.models import mlp
from bench.lib.ranks import in_turns, run_ranks, start

RANK, EVERY, PAUSE_S = 4, 32, 0.02
DDP, DDP_INT8, DDP_POWERSGD = "ddp", "ddp, quantization_pertensor_hook", f"ddp, powerSGD_hook({RANK})"
PLAIN, INT8, POWERSGD = "sirtaki", "sirtaki, int8", f"sirtaki, powersgd({RANK})"
LOSSY = "sirtaki, what SIRTAKI_LOSSY keeps"
ALONE, DILOCO = "nothing synchronised", f"diloco, H = {EVERY}"
JOB_TIMEOUT_S = 560.0


class _Gathered:
    """Stand-in for `torch.distributed` in `quantization_hooks`.

    The hooks expect NCCL's futures, which hold a list of lists of tensors. Gloo's futures hold a list of tensors.
    """

    group, get_rank = dist.group, staticmethod(dist.get_rank)

    @staticmethod
    def all_gather(*args: Any, **options: Any) -> _Gathered:
        made = _Gathered()
        made._work = dist.all_gather(*args, **options)
        return made

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda future: [future.value()])


def hooked(model: Callable[[], Any], kind: str) -> Ddp:
    """Return DDP with PyTorch's communication hook of that kind. Collective."""
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


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: create the contenders, and time their steps alternately. Collective."""
    import sirtaki.torch as hvd

    def model() -> Any:
        return mlp([512] * 7, rank=comm.rank, batch=8)

    given = {key: options[key] for key in ("rounds", "seed")}
    samples, setups = ({}, {}) if options["diloco"] else _compressed(comm, model, given, options["steps"])
    alone, less = Contender(model), Contender(model)

    def paused(contender: Contender) -> Callable[[], None]:
        def step() -> None:
            time.sleep(PAUSE_S)
            contender.step()

        return step

    with hvd.DiLoCo(less.model, less.optimizer, sync_every=EVERY, fragments=4, delay=EVERY // 4):
        samples |= in_turns({ALONE: paused(alone), DILOCO: paused(less)}, comm, block=EVERY, **given)
    return {"samples": samples, "setups": setups}


def _compressed(
    comm: Any, model: Callable[[], Any], given: Mapping[str, Any], block: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time contenders that synchronise in every step. Return times and settings by contender. Collective."""
    import sirtaki.torch as hvd

    contenders: dict[str, Contender] = {
        **{kind: hooked(model, kind) for kind in (DDP, DDP_INT8, DDP_POWERSGD)},
        PLAIN: Sirtaki(model, tune=True),
        INT8: Sirtaki(model, tune=True, compression=hvd.Compression.int8),
        POWERSGD: Sirtaki(model, tune=True, compression=hvd.Compression.powersgd(RANK)),
        LOSSY: Sirtaki(model, tune=True, lossy=("int8", f"powersgd:{RANK}")),
    }
    for contender in contenders.values():
        for _ in range(3):
            contender.step()
    for contender in contenders.values():
        contender.warm_up()
    steps = {name: contender.step for name, contender in contenders.items()}
    setups = {name: each.describe() for name, each in contenders.items()}
    return in_turns(steps, comm, block=block, **given), setups


def measure(report: Report, case: str, options: dict[str, Any], *, warmup_iterations: int) -> None:
    """Run one case and add its rows and bars."""
    env = {"SIRTAKI_WARMUP_ITERATIONS": str(warmup_iterations)}
    result = run_ranks("bench.fewer_bytes", CASES[case], options, env=env, timeout_s=JOB_TIMEOUT_S)
    samples = result["samples"]
    report.compare(
        samples,
        lambda name: ALONE if name in (ALONE, DILOCO) else DDP,
        ratio="ratio",
        where={"case": case},
        setup=result["setups"],
    )
    bars = [(INT8, DDP_INT8, 0.40), (POWERSGD, DDP_POWERSGD, 0.60)]
    if case == "equal":
        bars = [(INT8, DDP, 0.45), (POWERSGD, DDP, 0.30)]
    for ours, theirs, limit in (*bars, (LOSSY, PLAIN, 1.02), (DILOCO, ALONE, 1.05)):
        if ours not in samples:
            continue
        report.bar(f"{case}: {ours} / {theirs}", ratio(samples, ours, theirs), limit)


def main() -> int:
    """Run every case."""
    flags = parser(__doc__)
    flags.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    flags.add_argument("--diloco", action="store_true", help="run only DiLoCo; the report is fewer_bytes_diloco")
    flags.add_argument("--rounds", type=int, help="blocks of steps per contender")
    flags.add_argument("--steps", type=int, default=5, help="steps per block")
    flags.add_argument("--warmup-iterations", type=int, default=60, help="tuning budget in steps (Sirtaki: 100)")
    args = flags.parse_args()
    need_cluster()
    args.rounds = args.rounds or (2 if args.quick else 5)
    report = Report(name="fewer_bytes_diloco" if args.diloco else "fewer_bytes")
    for case in args.cases:
        options = {"rounds": args.rounds, "steps": args.steps, "seed": args.seed, "diloco": args.diloco}
        measure(report, case, options, warmup_iterations=args.warmup_iterations)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, gloo=True))
