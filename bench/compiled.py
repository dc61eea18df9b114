"""The cost of a compiled model whose gradients are all ready at once, and the gain of compiling it in parts.

    python -m bench.compiled [--quick] [--check] [--save] [--cases capped fast one-host]

Takes 20 minutes, much of it compilation by Inductor. With --quick, it takes 6 minutes, with aot_eager as compiler. All
contenders train a GPT of 5.3 M parameters in the same processes and alternate. Sirtaki runs the uncompiled model, the
model compiled as a whole, the model compiled with `hvd.early_gradients()`, and the model in the number of parts that
`sirtaki optimize` recommends for a recording of the whole model. DDP runs the compiled model, which PyTorch splits at
DDP's buckets. On links where parts gain nothing, four parts show the cost of cuts. A short warm-up of the whole model
probes the links first. All measured steps of Sirtaki use the untuned default.

"capped": four emulated nodes (`bench.lib.cluster`: link 400 Mbit/s, at most 100 per flow). Blocks sleep instead of
computing, because four computing ranks would leave two cores no time to send. "fast": two nodes with links of 20
Gbit/s, so that communication is negligible. "one-host": two ranks on this host.

Bars: on capped links early ÷ whole ≤ 0.90, and as recommended, too; elsewhere early and as recommended ÷ whole ≤ 1.02.
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

from bench.lib.cluster import MBIT, NETWORKS, LabShape, why_unavailable
from bench.lib.contenders import Contender, Ddp, ModelMaker, Sirtaki
from bench.lib.harness import Report, finish, parser, ratio
from bench.lib.models import gpt
from bench.lib.ranks import in_turns, run_ranks, start
from bench.optimize import searched

CASES: dict[str, LabShape | int] = {
    "capped": NETWORKS["capped"],
    "fast": LabShape(nodes=2, link_bits_per_s=20_000 * MBIT, flow_bits_per_s=20_000 * MBIT),
    "one-host": 2,
}
SEQUENCES = {"capped": 1, "fast": 4, "one-host": 4}
ELSEWHERE_S = {"capped": 0.06, "fast": 0.0, "one-host": 0.0}
"""Seconds that a block sleeps in its forward pass, so that four ranks on two cores still have time to communicate."""

RECORDED = 3
JOB_TIMEOUT_S = 900.0

EAGER, WHOLE, EARLY, ADVISED, IN_FOUR = "as it is", "whole", "early", "as advised", "in four parts"
DDP_BUCKET_MB = [("ddp", 25.0), ("ddp, 4 MB buckets", 4.0)]


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


class CompiledSirtaki(Sirtaki):
    """Sirtaki with the model compiled by a backend."""

    def __init__(self, make_model: ModelMaker, *, backend: Any, tune: bool = False) -> None:
        """Wrap the optimizer and compile the model. Collective."""
        super().__init__(make_model, tune=tune)
        self.forward = torch.compile(self.model, backend=backend, dynamic=False)


class CompiledDdp(Ddp):
    """DDP whose wrapped model is compiled, as PyTorch's documentation recommends."""

    def __init__(self, make_model: ModelMaker, *, bucket_mb: float, backend: str) -> None:
        """Wrap the model and compile it. Collective."""
        super().__init__(make_model, bucket_mb=bucket_mb)
        self.forward = torch.compile(self.forward, backend=backend, dynamic=False)


def compiled_once(make_model: ModelMaker, backend: Any, comm: Any) -> None:
    """Compile on rank 0, then on the remaining ranks, which reuse Inductor's cache. Collective."""
    for turn in (True, False):
        if turn == (comm.rank == 0):
            model, batch = make_model()
            torch.compile(model, backend=backend, dynamic=False)(batch).backward()
        barrier = comm.Ibarrier()
        while not barrier.Test():  # Sleep between polls: a wait in MPI spins on a core that rank 0 needs to compile.
            time.sleep(0.02)


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: record, create the contenders, and time their steps alternately. Collective."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    import sirtaki.torch as hvd

    def model() -> tuple[nn.Module, torch.Tensor]:
        return gpt(rank=comm.rank, sequences=options["sequences"], elsewhere_s=options["elsewhere_s"])

    inner = options["backend"]
    early = hvd.early_gradients(inner)
    compiled_once(model, inner, comm)
    # Record the first optimizer, because a recording follows the steps of a process's first optimizer.
    whole = CompiledSirtaki(model, backend=inner, tune=True)
    contenders: dict[str, Contender] = {WHOLE: whole}
    whole.warm_up()
    whole.sync.apply(whole.sync.default)
    whole.step()
    whole.record(options["folder"], iterations=RECORDED)
    comm.Barrier()
    advice = comm.bcast(searched(Path(options["folder"])).best.plan.part_bytes if comm.rank == 0 else None)
    contenders[EAGER] = Sirtaki(model, tune=False)
    backends = {EARLY: early}
    if advice:
        backends[ADVISED] = hvd.early_gradients(inner, part_bytes=advice)
    if not options["ddp"]:  # Use four parts, to show the cost of cuts where `early` may keep the model whole.
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
        for _ in range(3):  # DDP rebuilds its buckets after the first step. Sirtaki learns the order in two steps.
            contender.step()
    steps = {name: one.step for name, one in contenders.items()}
    samples = in_turns(steps, comm, rounds=options["rounds"], block=options["steps"], seed=options["seed"])
    return {"samples": samples, "advice": advice, "setups": {n: c.describe() for n, c in contenders.items()}}


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(report: Report, case: str, result: Mapping[str, Any]) -> None:
    """Add rows and bars from the ranks' measurements."""
    samples = dict(result["samples"])
    samples.setdefault(ADVISED, samples[WHOLE])  # `sirtaki optimize` recommended the whole model.
    setups = {ADVISED: "whole", **result["setups"]}
    report.compare(samples, WHOLE, ratio="ratio_to_whole", where={"case": case}, setup=setups)
    for name in (EARLY, ADVISED):
        report.bar(f"{case}: {name} ÷ whole", ratio(samples, name, WHOLE), 0.90 if case == "capped" else 1.02)
    advice = result["advice"]
    report.notes.append(
        f"{case}: " + (f"recommended: cut at {advice / 1e6:.2f} MB" if advice else "recommended: leave it whole")
    )


def run(report: Report, case: str, args: Any) -> None:
    """Run one job."""
    env = {"SIRTAKI_WARMUP_ITERATIONS": "10", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
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
        judge(report, case, run_ranks("bench.compiled", CASES[case], options, env=env, timeout_s=JOB_TIMEOUT_S))


def main() -> int:
    """Run every case."""
    flags = parser(__doc__)
    flags.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    args = flags.parse_args()
    report = Report(name="compiled" if {*args.cases} == {*CASES} else "_".join(["compiled", *args.cases]))
    for case in args.cases:
        if isinstance(CASES[case], LabShape) and (reason := why_unavailable()) is not None:
            report.notes.append(f"{case}: no emulated cluster here, {reason}")
            continue
        run(report, case, args)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, gloo=True))
