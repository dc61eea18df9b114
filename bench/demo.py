"""Demonstrate Sirtaki in under three minutes: one training job four times, on this host and on four emulated nodes.

    make demo        (or: python -m bench.demo)

The job trains a small network on scikit-learn's digits. It runs with PyTorch DDP, with Sirtaki untuned, with Sirtaki
tuning during the training, and with the tuned setting from the registry. Then DDP, Sirtaki untuned and Sirtaki tuned
alternate in the same processes, and a paired comparison shows which differences are proved. The emulated nodes
(`bench.lib.cluster`) are network namespaces. Their links carry 400 Mbit/s and a single connection 40, because clouds
cap connections, too. On a machine without network namespaces the demonstration prints the reason and skips the nodes.
It keeps only the HTML reports.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.lib.cluster import LabError, LabShape, NetLab, why_unavailable
from bench.lib.harness import REPOSITORY, difference
from bench.lib.ranks import in_turns, run_ranks, start
from sirtaki.cli.report import write_report

SHAPE = LabShape(nodes=4, link_bits_per_s=400_000_000, flow_bits_per_s=40_000_000)
DDP, UNTUNED, TUNED, REMEMBERED = "PyTorch DDP", "Sirtaki, untuned", "Sirtaki, tuned", "Sirtaki, remembered"
TURNS = "turns"
REPORTS = REPOSITORY / "build" / "demo"
JOB_TIMEOUT_S = 150.0
MOST_STEPS = 200
ROUNDS = 8
"""Number of pairs in the paired comparison."""

say = Console(highlight=False, soft_wrap=True).print


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One place where the job runs.

    Attributes:
        name: name of the report's file.
        title: title of the table.
        width: width of the net's layers.
        warmup_iterations: the tuner's budget.
        steps: timed steps of each job, after tuning.
        block: steps of one turn of the paired comparison.
    """

    name: str
    title: str
    width: int
    warmup_iterations: int
    steps: int
    block: int


HOST = Scene(name="one-host", title="2 ranks on this host", width=1536, warmup_iterations=60, steps=20, block=5)
NODES = Scene(
    name="four-nodes",
    title="4 emulated nodes, links of 400 Mbit/s, one connection gets 40",
    width=1024,
    warmup_iterations=40,
    steps=3,
    block=1,
)


def digits(comm: Any, width: int) -> tuple[Any, Any, Any]:
    """Return the model, and this rank's images and labels."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    found = load_digits()
    shard = slice(comm.rank, None, comm.size)
    return model, torch.tensor(found.data[shard], dtype=torch.float32) / 16, torch.tensor(found.target[shard])


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: train and time the last steps, or time all contenders alternately. Collective."""
    import torch
    from torch import nn

    import sirtaki.torch as hvd
    from bench.lib.contenders import Contender, Ddp, Sirtaki, join_gloo

    model, images, labels = digits(comm, options["width"])
    if "block" in options:
        hvd.init()
        join_gloo(comm, address=options["master"])
        make_model = lambda: (copy.deepcopy(model), images[:32])  # noqa: E731 - short
        contenders: dict[str, Contender] = {
            DDP: Ddp(make_model),
            UNTUNED: Sirtaki(make_model, tune=False),
            TUNED: Sirtaki(make_model, tune=True),
        }
        contenders[TUNED].warm_up(MOST_STEPS)
        steps = {name: contender.step for name, contender in contenders.items()}
        return in_turns(steps, comm, rounds=ROUNDS, block=options["block"])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if options["ddp"]:
        join_gloo(comm, address=options["master"])
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step(number: int) -> tuple[float, float]:
        begin_s = time.perf_counter()
        chosen = torch.arange(32 * number, 32 * number + 32) % len(labels)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        return time.perf_counter() - begin_s, loss.item()

    settled = 0
    tuned = None if options["ddp"] else optimizer._gradients.reducers[0].tuning
    while settled < 3 or (tuned is not None and tuned.tuning and settled < MOST_STEPS):
        step(settled)
        settled += 1
    times_s, losses = zip(*(step(settled + number) for number in range(options["steps"])), strict=True)
    return {
        "step_s": max(comm.allgather(median(times_s))),
        "loss": losses[-1],
        "settled": settled,
        "setting": "25 MB buckets" if tuned is None else tuned.knobs.describe(),
    }


def run_scene(scene: Scene, where: int | NetLab) -> dict[str, Any]:
    """Run the job four times, then all contenders alternately, and write the report of the tuned job.

    Returns:
        The results of each job, and under `TURNS` the step times of the alternating contenders.

    Raises:
        RuntimeError: a job failed.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sirtaki-demo-") as folder:
        registry = {"SIRTAKI_REGISTRY": str(Path(folder) / "registry.db")}
        log = Path(folder) / "trials.jsonl"
        environments: dict[str, dict[str, str]] = {
            DDP: {},
            UNTUNED: {"SIRTAKI_TUNE": "0"},
            TUNED: {**registry, "SIRTAKI_TRIAL_LOG": str(log)},
            REMEMBERED: registry,
        }
        for name, given in environments.items():
            options = {"ddp": name == DDP, "width": scene.width, "steps": scene.steps}
            env = {"SIRTAKI_WARMUP_ITERATIONS": str(scene.warmup_iterations), **given}
            results[name] = result = run_ranks("bench.demo", where, options, env=env, timeout_s=JOB_TIMEOUT_S)
            say(f"  {name}: {_time(result['step_s'])} a step with {result['setting']}")
        env = {"SIRTAKI_WARMUP_ITERATIONS": str(scene.warmup_iterations), **registry}
        say("  alternating: DDP, Sirtaki untuned, Sirtaki tuned")
        turns = {"width": scene.width, "block": scene.block}
        results[TURNS] = run_ranks("bench.demo", where, turns, env=env, timeout_s=JOB_TIMEOUT_S)
        REPORTS.mkdir(parents=True, exist_ok=True)
        write_report(log, REPORTS / f"{scene.name}.html")
    return results


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def show(scene: Scene, results: Mapping[str, Any]) -> None:
    """Print the table of one scene, and the path of its report."""
    table = Table(title=scene.title, title_justify="left")
    for heading, justify in (("", "left"), ("step", "right"), ("than DDP", "right"), ("settled after", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]  # rich wants literals
    turns = results[TURNS]
    for name in (DDP, UNTUNED, TUNED, REMEMBERED):
        settled = f"{results[name]['settled']} steps" if name in (TUNED, REMEMBERED) else ""
        if name not in turns:  # it runs the tuned setting, so it is not timed again
            table.add_row(name, "", "", settled)
            continue
        gain = "" if name == DDP else difference(turns, name, DDP)
        table.add_row(name, _time(median(turns[name])), gain, settled)
    say()
    say(table)
    say(f"Step: median of {ROUNDS} alternating blocks in the same processes. A difference is shown if pairs prove it.")
    say(f"Tuning report: {os.path.relpath(REPORTS / f'{scene.name}.html')}")


def run_nodes() -> tuple[dict[str, Any] | None, str]:
    """Return the results of the emulated cluster, or None and the reason. Without root, use a user namespace."""
    prefix: list[str] = []
    if shutil.which("setpriv") is None:
        return None, "not installed: setpriv (package util-linux)"
    if os.geteuid() != 0:
        prefix = ["unshare", "--user", "--map-root-user", "--kill-child", "--fork"]
        if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
            return None, "network namespaces need root, or user namespaces, which this system does not permit"
    with tempfile.TemporaryDirectory(prefix="sirtaki-demo-") as folder:
        found = Path(folder) / "found.json"
        # The kernel kills the child process, and with it all namespaces, as soon as this process ends.
        command = ["setpriv", "--pdeathsig", "KILL", *prefix, sys.executable, "-m", "bench.demo", "--nodes", str(found)]
        subprocess.run(command, cwd=REPOSITORY, check=False)
        outcome = json.loads(found.read_text()) if found.exists() else {"problem": "its process ended early"}
    return outcome.get("results"), outcome.get("problem", "")


def main() -> int:
    """Run both scenes, or, in a separate process, the scene of the emulated nodes."""
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--nodes", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = flags.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that the namespaces are removed
    if args.nodes is not None:
        outcome: dict[str, Any]
        try:
            reason = why_unavailable()
            if reason is not None:
                outcome = {"problem": reason}
            else:
                with NetLab(SHAPE) as lab:
                    outcome = {"results": run_scene(NODES, lab)}
        except (LabError, OSError, RuntimeError) as err:
            outcome = {"problem": str(err).strip().splitlines()[0]}
        except KeyboardInterrupt:
            return 130
        args.nodes.write_text(json.dumps(outcome))
        return 0
    try:
        say(f"One host: train a network with layers of width {HOST.width} on 2 ranks, four times.")
        on_host = run_scene(HOST, 2)
        say(f"\nFour nodes, emulated by network namespaces: the same training with layers of width {NODES.width}.")
        on_nodes, problem = run_nodes()
    except KeyboardInterrupt:
        say("interrupted; all processes and namespaces are removed")
        return 130
    except RuntimeError as err:
        say(f"the demonstration failed: {err}")
        return 1
    show(HOST, on_host)
    if on_nodes is not None:
        show(NODES, on_nodes)
    else:
        say(f"\nSkipped: the emulated nodes, on which tuning gains most: {problem}.")
    say("Not shown: GPUs and real networks.")
    return 0


if __name__ == "__main__":
    sys.exit(start(main, on_rank, init=False))
