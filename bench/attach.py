"""The cost of attaching a DDP model: one changed line and zero changed lines against plain DDP.

    python -m bench.attach [--quick] [--save] [--cases host capped] [--ranks 2] [--rounds 6]

Jobs of three kinds alternate: plain DDP, DDP with `sirtaki.torch.ddp.attach(model)`, and the plain script with
`SIRTAKI_ATTACH=auto`. Each trains a network, untuned (`SIRTAKI_TUNE=0`), so that the last two run the same setting. The
benchmark measures on rank 0 the time from the start of the script to the end of `import torch`, to the end of the first
and of the second step, and the median of the later steps.

Case "host": ranks on one host, gradients of 27 MB. Case "capped": four emulated nodes with one rank each (link 400
Mbit/s, a flow gets 100), gradients of 7.4 MB; needs root.

It also measures `import torch` in processes without the variable, and how much of it Sirtaki's entry point takes.
PyTorch's own search for entry points is not counted, because it also happens without Sirtaki.

Bars: later steps with zero changed lines take at most 1.05 times those with one line; `import torch` with the entry
point takes at most 1.01 times as long as without (upper end of the paired interval of processor time).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from statistics import median

from bench.lib.cluster import NETWORKS, NetLab, need_cluster
from bench.lib.harness import Report, Spread, alternate, finish, parser
from sirtaki.autotune.paired import PairedComparison
from sirtaki.torch_backend import NAME

KINDS = ("plain", "one line", "zero lines")
STEP_LIMIT, IMPORT_LIMIT = 1.05, 1.01
WIDTHS = {"host": 1024, "capped": 512}
"""Size of the trained network, by case."""

STEPS = {"first_step_s": "first step", "second_step_s": "second step", "step_s": "later steps"}
"""{measured time that is compared between jobs: its name in tables}"""

JOB_TIMEOUT_S = 600.0

SCRIPT = textwrap.dedent(
    """
    import time
    marks = [time.time()]
    import json, os, torch, torch.distributed as dist
    from torch import nn
    marks.append(time.time())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wide, wider = 2 * int(os.environ["WIDTH"]), 3 * int(os.environ["WIDTH"])
    model = nn.Sequential(nn.Linear(256, wide), nn.ReLU(), nn.Linear(wide, wider), nn.ReLU(), nn.Linear(wider, 10))
    model = nn.parallel.DistributedDataParallel(model)
    if os.environ["KIND"] == "one line":
        import sirtaki.torch.ddp; sirtaki.torch.ddp.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, 256)
    for _ in range(2 + int(os.environ["STEPS"])):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        marks.append(time.time())
    if dist.get_rank() == 0:
        print(json.dumps(marks))
    dist.destroy_process_group()
    """
)

IMPORT = """
import importlib.metadata, sys, time

find, spent_s = importlib.metadata.entry_points, 0.0

def timed(act):
    def call(*arguments):
        global spent_s
        start = time.process_time()
        result = act(*arguments)
        spent_s += time.process_time() - start
        return result
    return call

class Timed:
    def __init__(self, entry):
        self.name, self.load = entry.name, timed(lambda: timed(entry.load()))

importlib.metadata.entry_points = lambda **what: [Timed(each) for each in find(**what) if each.name == sys.argv[1]]
start = time.process_time()
import torch
print(time.process_time() - start, spent_s)
"""


def train(kind: str, where: int | NetLab, steps: int) -> dict[str, float]:
    """Run one job, and return the seconds of its parts.

    Args:
        kind: one of `KINDS`.
        where: number of ranks on this host, or an emulated cluster with one rank per node.
        steps: number of measured steps.
    """
    environ = {"KIND": kind, "STEPS": str(steps), "SIRTAKI_TUNE": "0", "SIRTAKI_REGISTRY": "off"}
    environ |= {"SIRTAKI_ATTACH": "auto" if kind == "zero lines" else "1", "OMP_NUM_THREADS": "1"}
    environ["WIDTH"] = str(WIDTHS["capped" if isinstance(where, NetLab) else "host"])
    began_s = time.time()
    output = train_on_nodes(where, environ) if isinstance(where, NetLab) else train_here(where, environ)
    ended_s = time.time()
    marks = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    steps_s = [after - before for before, after in pairwise(marks[3:])]
    return {
        "import_s": marks[1] - marks[0],
        "first_step_s": marks[2] - marks[1],
        "second_step_s": marks[3] - marks[2],
        "step_s": median(steps_s),
        "job_s": ended_s - began_s,
    }


def train_here(ranks: int, environ: Mapping[str, str]) -> str:
    """Run the script with `torchrun` on this host, and return its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--no-python", sys.executable, "-c", SCRIPT]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True).stdout


def train_on_nodes(lab: NetLab, environ: Mapping[str, str]) -> str:
    """Run the script with one rank on each emulated node, and return the output of rank 0."""
    size = lab.shape.nodes
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    jobs = [
        lab.popen(
            rank,
            [sys.executable, "-c", SCRIPT],
            env={**environ, **world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    for rank, job in reversed(list(enumerate(jobs))):
        output, errors = job.communicate(timeout=JOB_TIMEOUT_S)
        if job.returncode != 0:
            raise RuntimeError(f"rank {rank} ended with status {job.returncode}: {errors[-2000:]}")
    return str(output)


def import_seconds() -> tuple[float, float]:
    """Return the processor seconds of `import torch` in a new process, and those of Sirtaki's entry point in it."""
    environ = {name: value for name, value in os.environ.items() if name != "SIRTAKI_ATTACH"}
    command = [sys.executable, "-c", IMPORT, NAME]
    found = subprocess.run(command, env=environ, capture_output=True, check=True, text=True).stdout
    total_s, own_s = map(float, found.split())
    return total_s, own_s


def measure(report: Report, case: str, where: int | NetLab, *, rounds: int, steps: int, seed: int) -> None:
    """Run jobs of all kinds alternately, and add one case's times, paired ratios and bar."""
    measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}

    def job(kind: str) -> float:
        measured[kind].append(train(kind, where, steps))
        return measured[kind][-1]["step_s"]

    steps_s = alternate({kind: partial(job, kind) for kind in KINDS}, rounds, seed=seed)
    for kind, jobs in measured.items():
        parts = {part: Spread.of([each[part] for each in jobs]) for part in jobs[0]}
        report.rows.append({"case": case, "job": kind, **parts})
    for part, what in STEPS.items():
        for name, peer in (("zero lines", "one line"), ("one line", "plain"), ("zero lines", "plain")):
            of_name, of_peer = ([each[part] for each in measured[kind]] for kind in (name, peer))
            gain = PairedComparison.of(of_peer, of_name).gain
            shown = {"ratio": 1 / gain.times, "from": 1 / gain.high, "to": 1 / gain.low}
            report.rows.append({"case": case, "paired": f"{what}, {name} ÷ {peer}", **shown})
    claim = f"{case}: later steps, zero lines ÷ one line"
    report.bar_of_pairs(claim, steps_s, "zero lines", "one line", STEP_LIMIT)


def measure_imports(report: Report, *, rounds: int) -> None:
    """Measure `import torch` with and without the time of the entry point, and add the times and the bar."""
    measured = [import_seconds() for _ in range(rounds)]
    total_s, own_s = ([sample[part] for sample in measured] for part in (0, 1))
    without_s = [total - own for total, own in measured]
    assert min(own_s) > 0.0, "PyTorch has not called the entry point"
    for name, samples in {"`import torch`": total_s, "Sirtaki's entry point in it": own_s}.items():
        report.rows.append({"process": name, "processor_s": Spread.of(samples)})
    gain = PairedComparison.of(without_s, total_s).gain
    report.bar("`import torch`, with ÷ without the entry point, upper end of the interval", 1 / gain.low, IMPORT_LIMIT)


def main() -> int:
    """Run jobs of all kinds, and imports, alternately."""
    flags = parser(__doc__)
    flags.add_argument("--cases", nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    flags.add_argument("--ranks", type=int, default=2, help="ranks on one host")
    flags.add_argument("--rounds", type=int, help="jobs of each kind")
    args = flags.parse_args()
    args.rounds = args.rounds or (6 if args.quick else 12)
    repeats = {"rounds": args.rounds, "steps": 20 if args.quick else 60, "seed": args.seed}
    if "capped" in args.cases:
        need_cluster()
    report = Report(name="attach")
    report.notes.append(
        "untuned jobs over Gloo; medians and quartiles; paired ratios with the interval of the signed-rank test"
    )
    if "host" in args.cases:
        measure(report, "host", args.ranks, **repeats)
        measure_imports(report, rounds=3 * args.rounds)
    if "capped" in args.cases:
        with NetLab(NETWORKS["capped"]) as lab:
            measure(report, "capped", lab, **repeats)
        report.notes.append(f"capped: {NETWORKS['capped'].nodes} emulated nodes, {NETWORKS['capped'].describe()}")
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
