"""The picture in the README: one warm-up, every trial a dot, drawn from the log that the job wrote.

    python -m bench.tuning_picture [--log trials.jsonl] [-o docs/pictures/tuning.svg]

Without --log it runs the job, which takes three minutes and root: four emulated nodes (`bench.lib.cluster`), each with
a link of 400 Mbit/s of which one flow gets 40, train the emulated ResNet-50 at a quarter of its size.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping
from html import escape
from itertools import count, cycle
from pathlib import Path
from typing import Any

from bench.lib.cluster import MBIT, LabShape
from bench.lib.contenders import Sirtaki
from bench.lib.models import emulated_resnet50
from bench.lib.ranks import run_ranks, start
from sirtaki.analysis.svg import COLORS, DEFAULT_COLOR, Plot
from sirtaki.autotune.meta.session import DEFAULT_ARM
from sirtaki.engine.tuning.trial_log import TrialLog, read_log
from sirtaki.measures import faster

SHAPE = LabShape(nodes=4, link_bits_per_s=400 * MBIT, flow_bits_per_s=40 * MBIT)
SCALE = 0.25
COMPUTE_S = 0.15
JOB_TIMEOUT_S = 600.0

BEST_COLOR = "#c00000"
PLOT_WIDTH, WIDTH, HEIGHT = 690, 860, 330
LEGEND_LEFT, LEGEND_TOP, LEGEND_STEP = 706, 40, 19
STYLE = """<style>
svg { font: 12px system-ui, sans-serif; fill: #444; } .grid { stroke: #e4e4e4; } .axis { stroke: #666; }
@media (prefers-color-scheme: dark) { svg { fill: #c8ccd0; } .grid { stroke: #3a3f46; } .axis { stroke: #999; } }
</style>"""


def on_rank(comm: Any, options: Mapping[str, Any]) -> None:
    """What each rank does: trains until the warm-up is over."""
    scaled = {"compute_s": COMPUTE_S * SCALE, "scale": SCALE}
    Sirtaki(lambda: emulated_resnet50(rank=comm.rank, **scaled), tune=True).warm_up()


def draw(log: TrialLog) -> str:
    """The log's trials as an SVG of its own: dots coloured by technique, the untuned default, the best so far."""
    measured = [trial for trial in log.measurements if trial.succeeded]
    arms = dict.fromkeys(trial.arm for trial in measured if trial.arm != DEFAULT_ARM)
    colors = {DEFAULT_ARM: DEFAULT_COLOR, **dict(zip(arms, cycle(COLORS), strict=False))}
    last = measured[-1].iteration
    times_s = [trial.span_s for trial in measured]
    low, high = _log_ms(min(times_s)) - 0.08, _log_ms(max(times_s)) + 0.05
    plot = Plot(
        x=(0, last),
        y=(low, high),
        x_label="training iteration",
        y_label="communication time, ms",
        height=HEIGHT,
        width=PLOT_WIDTH,
    )
    default_s, kept_s = log.outcome.default_span_s or measured[0].span_s, log.outcome.span_s
    plot.line([(0, _log_ms(default_s)), (last, _log_ms(default_s))], color=DEFAULT_COLOR, dashed=True)
    best_s = measured[0].span_s
    steps = [(0.0, _log_ms(best_s))]
    for trial in measured:
        if trial.was_best:
            best_s = min(best_s, trial.span_s)
            steps.append((trial.iteration, _log_ms(best_s)))
    plot.line(_as_steps(steps, last), color=BEST_COLOR)
    for trial in measured:
        title = f"{1e3 * trial.span_s:.0f} ms: {trial.arm}, {trial.knobs.describe()}"
        plot.dot(trial.iteration, _log_ms(trial.span_s), color=colors[trial.arm], title=title, large=trial.was_best)
    ticks_ms = [m * 10.0**e for e in range(5) for m in (1, 1.5, 2, 3, 5, 7) if low <= math.log10(m * 10.0**e) <= high]
    svg = plot.render(
        y_ticks=[(math.log10(tick), f"{tick:g}") for tick in ticks_ms],
        x_ticks=[(tick, f"{tick}") for tick in range(0, last + 1, 5)],
    )
    names = {**colors, f"best ({faster(default_s, kept_s)})": BEST_COLOR}
    key = [
        f'<rect x="{LEGEND_LEFT}" y="{y - 9}" width="10" height="10" rx="2" fill="{color}"/>'
        f'<text x="{LEGEND_LEFT + 16}" y="{y}">{escape("untuned default" if name == DEFAULT_ARM else name)}</text>'
        for y, (name, color) in zip(count(LEGEND_TOP, LEGEND_STEP), names.items())
    ]
    opening, rest = svg.split("\n", 1)
    opening = opening.replace(f"0 0 {PLOT_WIDTH} ", f"0 0 {WIDTH} ")
    return "\n".join([opening, STYLE, *key, rest, ""])


def _as_steps(points: list[tuple[float, float]], last: float) -> list[tuple[float, float]]:
    """Each value is kept until the next one."""
    ends = [*(x for x, _ in points[1:]), last]
    return [corner for (x, y), end in zip(points, ends, strict=True) for corner in ((x, y), (end, y))]


def _log_ms(seconds: float) -> float:
    return math.log10(1e3 * seconds)


def main() -> int:
    """Runs the job unless a log is given, and draws."""
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--log", type=Path, help="of an earlier job; default: run one")
    flags.add_argument("-o", "--output", type=Path, default=Path("docs/pictures/tuning.svg"), metavar="FILE")
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "trials.jsonl"
        if args.log is None:
            run_ranks("bench.tuning_picture", SHAPE, {}, env={"SIRTAKI_TRIAL_LOG": str(log)}, timeout_s=JOB_TIMEOUT_S)
        args.output.write_text(draw(read_log(log)), encoding="utf-8")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
