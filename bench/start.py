"""Start of many ranks of one host: from the first call to the end of the second step, compared with DDP over Gloo.

    python -m bench.start [--quick] [--check] [--save] [--ranks 16 64]

All ranks of a job are forked from one process that has imported PyTorch and Sirtaki, because the import of PyTorch
takes most of the time of such a start and is the same for both. They have torchrun's environment. The time runs from
the moment when all ranks are ready until the slowest rank has ended its second step: `init_process_group("gloo")` and
DDP, or `hvd.init()` and `DistributedOptimizer`, untuned and tuned without a registry. The model has three layers (0.3 M
parameters). Jobs alternate. Processor time is that of all ranks.

Bars: at 16 ranks at most 1.5 times DDP's; the ratio does not grow from 16 to 64 ranks.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it
import torch.distributed as dist
from torch import nn

import sirtaki.torch as hvd
from bench.lib.harness import Report, Spread, alternate, finish, parser, ratios
from bench.lib.ranks import RANK_ENV
from sirtaki.machine import ReservedPorts

KINDS = ("ddp", "untuned", "tuned")
RATIO_LIMIT = 1.5
STEPS = 2


def train(kind: str) -> None:
    """Join the other ranks and train for `STEPS` steps. Collective."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(256, 448), nn.ReLU(), nn.Linear(448, 448), nn.ReLU(), nn.Linear(448, 10))
    batch, labels = torch.randn(8, 256), torch.randint(10, (8,))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if kind == "ddp":
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    else:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()


def on_rank(kind: str, folder: Path, rank: int, ranks: int) -> None:
    """Wait until all ranks are ready, train, and write the times of this rank to a file."""
    torch.set_num_threads(1)
    (folder / f"ready.{rank}").touch()
    while not (folder / "begin").exists():
        time.sleep(0.005)
    begin_s = time.perf_counter()
    train(kind)
    end_s = time.perf_counter()
    (folder / f"done.{rank}").write_text(f"{begin_s} {end_s} {time.process_time()}")
    while not (folder / "end").exists():
        time.sleep(0.05)


def host_store(port: int, ranks: int, folder: Path) -> None:
    """Run the store that torchrun's agent has, until the job ends."""
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=True, wait_for_workers=False)
    (folder / "store").touch()
    while not (folder / "end").exists():
        time.sleep(0.05)
    del store


def run_job(kind: str, ranks: int) -> dict[str, float]:
    """Fork the ranks of a job, and return the seconds until the slowest has ended, and processor seconds of all."""
    with tempfile.TemporaryDirectory(prefix="sirtaki-bench-") as name, ReservedPorts() as port:
        folder, children = Path(name), []
        os.environ.update(
            RANK_ENV,
            SIRTAKI_TUNE=str(int(kind == "tuned")),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port.first),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RUN_ID=name.rpartition("-")[2],
            TORCHELASTIC_RESTART_COUNT="0",
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
        )
        for rank in range(-1, ranks):
            if child := os.fork():
                children.append(child)
                continue
            status = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
                if rank < 0:
                    host_store(port.first, ranks, folder)
                else:
                    on_rank(kind, folder, rank, ranks)
                status = 0
            except BaseException:  # a forked process must not run its parent's code
                sys.excepthook(*sys.exc_info())
            os._exit(status)
        try:
            wait_for_files(folder, ["store", *(f"ready.{rank}" for rank in range(ranks))])
            (folder / "begin").touch()
            times = wait_for_files(folder, [f"done.{rank}" for rank in range(ranks)])
        finally:
            (folder / "end").touch()
            for child in children:
                os.waitpid(child, 0)
    begins_s, ends_s, used_s = zip(*(map(float, text.split()) for text in times), strict=True)
    return {"start_s": max(ends_s) - min(begins_s), "processor_s": sum(used_s)}


def wait_for_files(folder: Path, names: list[str], timeout_s: float = 200.0) -> list[str]:
    """Return the contents of the files, once all of them exist and are complete."""
    deadline_s = time.monotonic() + timeout_s
    while missing := [name for name in names if not (folder / name).exists()]:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{len(missing)} ranks did not write {missing[0]} within {timeout_s:g} s")
        time.sleep(0.01)
    time.sleep(0.05)
    return [(folder / name).read_text() for name in names]


def main() -> int:
    """Run jobs of all kinds alternately, for each number of ranks."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    flags.add_argument("--rounds", type=int, help="jobs of each kind")
    args = flags.parse_args()
    args.rounds = args.rounds or (3 if args.quick else 5)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report, medians = Report(name="start"), dict[tuple[str, int], float]()
    for ranks in args.ranks:
        measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}

        def job(kind: str, ranks: int = ranks, measured: Any = measured) -> float:
            measured[kind].append(run_job(kind, ranks))
            return float(measured[kind][-1]["start_s"])

        samples = alternate({kind: lambda kind=kind: job(kind) for kind in KINDS}, args.rounds, seed=args.seed)
        for kind in KINDS:
            ratio = ratios(samples[kind], samples["ddp"])
            medians[kind, ranks] = ratio.median
            used = Spread.of([one["processor_s"] for one in measured[kind]])
            row = {"ranks": ranks, "job": kind, "start_s": Spread.of(samples[kind]), "processor_s": used}
            report.rows.append({**row, "÷ DDP's": ratio})
            if kind != "ddp" and ranks == 16:
                report.bar(f"16 ranks, {kind}: start ÷ DDP's", ratio.median, RATIO_LIMIT)
    if {16, 64} <= {*args.ranks}:
        for kind in KINDS[1:]:
            growth = medians[kind, 64] / medians[kind, 16]
            report.bar(f"{kind}: ratio at 64 ranks ÷ ratio at 16", growth, 1.0)
    report.notes.append(f"start = the first call of {STEPS} steps until the slowest rank has ended them")
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
