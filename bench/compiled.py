"""What a compiled model loses as its gradients come all at once, and what compiling it in parts brings.

    python -m bench.compiled [--quick] [--check] [--save] [--cases capped fast one-host]

Takes 20 minutes, much of it compiling by Inductor; with --quick 6, by aot_eager. All contenders train a GPT of 5.3 M
parameters, in the same processes, and take turns: Sirtaki with the model as it is, compiled as a whole, compiled with
`hvd.early_gradients()`, in so many parts as `sirtaki optimize` advises on a recording of the whole one, and DDP with
the model compiled, which PyTorch splits at DDP's buckets. Where nothing is to be gained, four parts show what cuts
cost. Sirtaki runs its untuned default; the whole one was tuned for a while before, so that
links are known.

"capped" are four emulated nodes (`bench.lib.cluster`: link 400 Mbit/s, a flow gets 100), on which blocks also sleep
where a GPU would compute, as four ranks that compute leave two cores no time to send; "fast" are two whose links carry
20 Gbit/s, so that communication is next to nothing, "one-host" two ranks of this host.

Bars: on capped links early ÷ whole ≤ 0.90, and as advised, too; elsewhere early and as advised ÷ whole ≤ 1.02.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.lib.cluster import LabShape, NetLab, why_unavailable
from bench.lib.contenders import Contender, Ddp, ModelMaker, Sirtaki, join_gloo
from bench.lib.harness import Bar, Report, Spread, alternate, finish, parser, ratios
from bench.lib.models import gpt
from bench.lib.ranks import give_result, main_or_rank, rank_argv, rank_env, run_ranks, slowest, take_result, timed_block
from sirtaki.analysis.global_graph import recorded
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.plan_search import optimize
from sirtaki.analysis.recording import read_folder as read
from sirtaki.analysis.what_if import Baseline

MBIT = 1_000_000
CASES = {
    "capped": LabShape(nodes=4, link_bits_per_s=400 * MBIT, flow_bits_per_s=100 * MBIT),
    "fast": LabShape(nodes=2, link_bits_per_s=20_000 * MBIT, flow_bits_per_s=20_000 * MBIT),
    "one-host": None,
}
SEQUENCES = {"capped": 1, "fast": 4, "one-host": 4}
ELSEWHERE_S = {"capped": 0.06, "fast": 0.0, "one-host": 0.0}
"""Of a block's forward pass: where more ranks than processors compute, nothing is left for what travels meanwhile."""

RECORDED = 3
JOB_TIMEOUT_S = 900.0

EAGER, WHOLE, EARLY, ADVISED, IN_FOUR = "as it is", "whole", "early", "as advised", "in four parts"
DDP_BUCKET_MB = [("ddp", 25.0), ("ddp, 4 MB buckets", 4.0)]


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


class CompiledSirtaki(Sirtaki):
    """Sirtaki with the model compiled by a backend."""

    def __init__(self, make_model: ModelMaker, *, backend: Any, tune: bool = False) -> None:
        """Collective."""
        super().__init__(make_model, tune=tune)
        self.forward = torch.compile(self.model, backend=backend, dynamic=False)


class CompiledDdp(Ddp):
    """DDP, compiled as its documentation says."""

    def __init__(self, make_model: ModelMaker, *, bucket_mb: float, backend: str) -> None:
        """Collective."""
        super().__init__(make_model, bucket_mb=bucket_mb)
        self.forward = torch.compile(self.forward, backend=backend, dynamic=False)


def compiled_once(make_model: ModelMaker, backend: Any, comm: Any) -> None:
    """Collective: compiles on the first rank, and then on the others, which find most of it in Inductor's cache."""
    for turn in (True, False):
        if turn == (comm.rank == 0):
            model, batch = make_model()
            torch.compile(model, backend=backend, dynamic=False)(batch).backward()
        everybody = comm.Ibarrier()
        while not everybody.Test():  # waiting in MPI would take a processor from who compiles
            time.sleep(0.02)


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does; the first one gives the result."""
    from mpi4py import MPI
    from torch._dynamo.backends.distributed import DDPOptimizer

    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    hvd.init()
    join_gloo(comm, address=options["master"])

    def model() -> tuple[nn.Module, torch.Tensor]:
        return gpt(rank=comm.rank, sequences=options["sequences"], elsewhere_s=options["elsewhere_s"])

    inner = options["backend"]
    early = hvd.early_gradients(inner)
    compiled_once(model, inner, comm)
    whole = CompiledSirtaki(model, backend=inner, tune=True)  # the first one: its steps are those of a recording
    contenders: dict[str, Contender] = {WHOLE: whole}
    whole.warm_up()
    sync: Any = whole.sync
    sync._apply(sync._default)
    whole.step()
    whole.record(options["folder"], iterations=RECORDED)
    comm.Barrier()
    advice = comm.bcast(searched(Path(options["folder"])).best.plan.part_bytes if comm.rank == 0 else None)
    contenders[EAGER] = Sirtaki(model, tune=False)
    backends = {EARLY: early}
    if advice:
        backends[ADVISED] = hvd.early_gradients(inner, part_bytes=advice)
    if not options["ddp"]:  # where `early` may be the whole model: what cuts cost that bring nothing
        n_bytes = 4 * sum(parameter.numel() for parameter in whole.model.parameters())
        backends[IN_FOUR] = hvd.early_gradients(inner, part_bytes=n_bytes // 4)
    for name, backend in backends.items():
        compiled_once(model, backend, comm)
        contenders[name] = CompiledSirtaki(model, backend=backend)
    for name, bucket_mb in options["ddp"]:
        size = int(bucket_mb * 1024**2)
        first = min(size, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
        compiled_once(model, DDPOptimizer(size, torch._dynamo.lookup_backend(inner), first).compile_fn, comm)
        contenders[name] = CompiledDdp(model, bucket_mb=bucket_mb, backend=inner)
    for contender in contenders.values():
        for _ in range(3):  # DDP rebuilds its buckets after the first step, Sirtaki learns the order in two
            contender.step()
    turns = {name: timed_block(one, options["steps"], barrier=comm.Barrier) for name, one in contenders.items()}
    samples = slowest(alternate(turns, options["rounds"], seed=options["seed"]), comm)
    if comm.rank == 0:
        give_result({"samples": samples, "advice": advice, "setups": {n: c.describe() for n, c in contenders.items()}})
    comm.Barrier()
    hvd.shutdown()


def searched(folder: Path) -> Any:
    """What `sirtaki optimize` makes of a recording."""
    recording = read(folder)
    found = histories(recording)
    return optimize(Baseline.of(job_model(found), recorded(found)), settings=recording.job.settings)


# ── judgement ────────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(report: Report, case: str, result: Mapping[str, Any]) -> None:
    """Adds rows and bars of what the ranks have measured."""
    samples = dict(result["samples"])
    samples.setdefault(ADVISED, samples[WHOLE])  # it was advised to leave it whole
    for name, times_s in samples.items():
        report.rows.append(
            {
                "case": case,
                "contender": name,
                "step_s": Spread.of(times_s),
                "ratio_to_whole": ratios(times_s, samples[WHOLE]),
                "setup": result["setups"].get(name, "the same as whole"),
                "samples_s": times_s,
            }
        )
    limit = 0.90 if case == "capped" else 1.02
    report.bars += [
        Bar(claim=f"{case}: {name} ÷ whole", value=ratios(samples[name], samples[WHOLE]).median, limit=limit)
        for name in (EARLY, ADVISED)
    ]
    advice = result["advice"]
    report.notes.append(
        f"{case}: " + (f"advised to cut at {advice / 1e6:.2f} MB" if advice else "advised to leave it whole")
    )


def run(report: Report, case: str, args: Any) -> None:
    """One job."""
    shape = CASES[case]
    with tempfile.TemporaryDirectory() as directory:
        options = {
            "folder": str(Path(directory) / "recorded"),
            "sequences": SEQUENCES[case],
            "elsewhere_s": ELSEWHERE_S[case],
            "rounds": 3 if args.quick else 6,
            "steps": 1 if args.quick else 2,
            "seed": args.seed,
            "backend": "aot_eager" if args.quick else "inductor",
            "ddp": DDP_BUCKET_MB[: 1 if args.quick else 2] if case == "capped" else [],
        }
        env = {"SIRTAKI_WARMUP_ITERATIONS": "10", "TORCHINDUCTOR_COMPILE_THREADS": "1", **rank_env()}
        if shape is None:
            result = run_ranks(
                "bench.compiled", 2, {**options, "master": "127.0.0.1"}, env=env, timeout_s=JOB_TIMEOUT_S
            )
        else:
            with NetLab(shape) as lab:
                argv = rank_argv("bench.compiled", {**options, "master": lab.address(0)})
                result = take_result(lab.run_ranks(argv, env=env, timeout_s=JOB_TIMEOUT_S))
        judge(report, case, result)


def main() -> int:
    """Runs every case."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    args = flags.parse_args()
    report = Report(name="compiled" if {*args.cases} == {*CASES} else "_".join(["compiled", *args.cases]))
    for case in args.cases:
        if CASES[case] is not None and (reason := why_unavailable()) is not None:
            report.notes.append(f"{case}: no emulated cluster here, {reason}")
            continue
        run(report, case, args)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
