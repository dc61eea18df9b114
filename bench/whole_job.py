"""The time of all steps of a real job on a capped network: warm-up, proof and refinements included.

    python -m bench.whole_job [--quick] [--save] [--steps 3000] [-o docs/pictures/whole-job.svg]

Needs root: four emulated nodes (`bench.lib.cluster`, link 400 Mbit/s, at most 40 per connection) train a network of
three layers of width 704 (2.2 MB of gradients). Three jobs run one after another: untuned (100 steps, for comparison),
tuned without refinements (`SIRTAKI_REFINE_UNTIL=0`), and tuned with refinements. The benchmark reports the mean step
time of each 100 steps, and the time of the whole job divided by as many steps of the untuned job. Jobs do not
alternate, because their steps depend on the time since the job began.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.lib.cluster import MBIT, LabShape
from bench.lib.harness import Report, finish, parser
from bench.lib.ranks import run_ranks, start

SHAPE = LabShape(nodes=4, link_bits_per_s=400 * MBIT, flow_bits_per_s=40 * MBIT)
WIDTH, BLOCK = 704, 100
JOBS: Mapping[str, Mapping[str, str]] = {
    "untuned": {"SIRTAKI_TUNE": "0"},
    "without refinements": {"SIRTAKI_REFINE_UNTIL": "0"},
    "with refinements": {},
}
JOB_TIMEOUT_S = 1500.0


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: train, and return the seconds of each step on rank 0, and the last setting. Collective."""
    import torch
    from torch import nn

    import sirtaki.torch as hvd

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    images = torch.randn(32, 64)
    steps_s = list[float]()
    for _ in range(options["steps"]):
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        steps_s.append(time.perf_counter() - begin_s)
    gradients = optimizer._gradients  # type: ignore[attr-defined]  # a DistributedOptimizer's
    return {"steps_s": steps_s, "setting": gradients.reducers[0].tuning.knobs.describe()}


def draw(blocks: Mapping[str, Sequence[float]], untuned_s: float, path: Path) -> None:
    """Draw the mean step time of each block of steps."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "whole job", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8.6, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.axhline(1e3 * untuned_s, color="#888888", linestyle="--", label="untuned")
        for name, means_s in blocks.items():
            axes.plot([BLOCK * (number + 1) for number in range(len(means_s))], [1e3 * s for s in means_s], label=name)
        axes.set(xlabel="training step", ylabel=f"mean of {BLOCK} steps, ms", ylim=(0, None))
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Run the jobs, and draw the picture."""
    flags = parser(__doc__)
    flags.add_argument("--steps", type=int, help="steps of each tuned job")
    flags.add_argument("-o", "--output", type=Path, metavar="FILE", help="picture to write")
    args = flags.parse_args()
    args.steps = args.steps or (400 if args.quick else 3000)
    report, found = Report(name="whole_job"), dict[str, Any]()
    for name, env in JOBS.items():
        steps = {"steps": BLOCK if name == "untuned" else args.steps}
        found[name] = run_ranks(
            "bench.whole_job", SHAPE, steps, env={"SIRTAKI_REGISTRY": "off", **env}, timeout_s=JOB_TIMEOUT_S
        )
    untuned_s = median(found["untuned"]["steps_s"])
    blocks = {
        name: [mean(job["steps_s"][begin : begin + BLOCK]) for begin in range(0, args.steps, BLOCK)]
        for name, job in found.items()
        if name != "untuned"
    }
    for name, job in found.items():
        steps_s = job["steps_s"]
        report.rows.append(
            {
                "job": name,
                "steps": len(steps_s),
                "step_s": median(steps_s[-BLOCK:]),
                "whole_job_s": sum(steps_s),
                "whole ÷ untuned": sum(steps_s) / (untuned_s * len(steps_s)),
                "setting": job["setting"],
            }
        )
    for begin in range(0, args.steps, BLOCK):
        shown = {f"{name}_s": means[begin // BLOCK] for name, means in blocks.items()}
        report.rows.append({"steps until": begin + BLOCK, **shown})
    if args.output is not None:
        draw(blocks, untuned_s, args.output)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
