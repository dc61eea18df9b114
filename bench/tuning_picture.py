"""Draw the README's picture of a warm-up from a job's trial log: one dot per trial.

    python -m bench.tuning_picture [--log trials.jsonl] [-o docs/pictures/tuning.svg]

Without --log, run the job first. It takes three minutes and needs root: four emulated nodes (`bench.lib.cluster`, link
400 Mbit/s, at most 40 per flow) train the emulated ResNet-50 at a quarter of its size.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from bench.lib.cluster import MBIT, LabShape
from bench.lib.contenders import Sirtaki
from bench.lib.models import emulated_resnet50
from bench.lib.ranks import run_ranks, start
from sirtaki.analysis.html import COLORS, DEFAULT_COLOR
from sirtaki.autotune.meta.session import DEFAULT_ARM
from sirtaki.engine.tuning.trial_log import TrialLog, read_log
from sirtaki.measures import faster

SHAPE = LabShape(nodes=4, link_bits_per_s=400 * MBIT, flow_bits_per_s=40 * MBIT)
SCALE = 0.25
COMPUTE_S = 0.15
JOB_TIMEOUT_S = 600.0

BEST_COLOR, INK = "#c00000", "#888888"


def on_rank(comm: Any, options: Mapping[str, Any]) -> None:
    """Run one rank: train until the warm-up has ended. Collective."""
    scaled = {"compute_s": COMPUTE_S * SCALE, "scale": SCALE}
    Sirtaki(lambda: emulated_resnet50(rank=comm.rank, **scaled), tune=True).warm_up()


def draw(log: TrialLog, path: Path) -> None:
    """Draw a log's trials as dots coloured by technique, with the untuned default and the best time at each step."""
    import matplotlib
    from matplotlib.figure import Figure

    measured = [trial for trial in log.measurements if trial.succeeded]
    arms = dict.fromkeys(trial.arm for trial in measured if trial.arm != DEFAULT_ARM)
    colors = {DEFAULT_ARM: DEFAULT_COLOR, **dict(zip(arms, cycle(COLORS), strict=False))}
    default_s, last = log.outcome.default_span_s or measured[0].span_s, measured[-1].iteration
    best = [measured[0], *(trial for trial in measured if trial.was_best)]
    best_ms = list(accumulate((1e3 * trial.span_s for trial in best), min))
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "tuning", "font.family": "sans-serif"}
    with matplotlib.rc_context({**ink, **fixed, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.6, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.axhline(1e3 * default_s, color=DEFAULT_COLOR, linestyle="--")
        label = f"best ({faster(default_s, log.outcome.span_s)})"
        steps = [0, *(trial.iteration for trial in best[1:]), last]
        axes.step(steps, [*best_ms, best_ms[-1]], where="post", color=BEST_COLOR, label=label)
        for arm, color in colors.items():
            of_arm = [trial for trial in measured if trial.arm == arm]
            sizes = [60 if trial.was_best else 24 for trial in of_arm]
            times_ms = [1e3 * trial.span_s for trial in of_arm]
            name = "untuned default" if arm == DEFAULT_ARM else arm
            axes.scatter([trial.iteration for trial in of_arm], times_ms, sizes, color=color, label=name, zorder=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set(xlabel="training iteration", ylabel="communication time, ms")
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> int:
    """Run the job unless a log is given, and draw the picture."""
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--log", type=Path, help="trial log of an earlier job (default: run a job)")
    flags.add_argument("-o", "--output", type=Path, default=Path("docs/pictures/tuning.svg"), metavar="FILE")
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "trials.jsonl"
        if args.log is None:
            run_ranks("bench.tuning_picture", SHAPE, {}, env={"SIRTAKI_TRIAL_LOG": str(log)}, timeout_s=JOB_TIMEOUT_S)
        draw(read_log(log), args.output)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
