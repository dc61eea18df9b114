"""`sirtaki top`: the jobs that run on this machine now, live."""

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sirtaki.measures import faster
from sirtaki.watch.presence import Answer, look

COLUMNS = ("job", "rank", "running for", "iteration", "step", "communication", "exposed", "setting")


def configure(parser: ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--once", action="store_true", help="show them once, and end")
    parser.add_argument("--json", action="store_true", help="the same, for machines")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two looks (default: 2)")


def main(options: Namespace) -> int:
    """Shows them until it is interrupted, or once."""
    if options.json:
        print(json.dumps(list(look()), indent=1))
        return 0
    if options.once:
        Console().print(table(list(look())))
        return 0
    try:
        with Live(table(list(look())), auto_refresh=False) as live:
            while True:
                time.sleep(options.every)
                live.update(table(list(look())), refresh=True)
    except KeyboardInterrupt:
        return 0


def table(jobs: Sequence[Answer]) -> Table:
    """A row a job; times are those of the last iterations, which are known from the second look on."""
    shown = Table(*COLUMNS, box=None, caption=None if jobs else "no job of yours runs on this machine")
    for job in jobs:
        shown.add_row(*row(job))
    return shown


def row(job: Answer) -> list[str]:
    """One row."""
    generation = f", generation {job['generation']}" if job["generation"] else ""
    step_s = job.get("step_s")
    exposed_s = job.get("exposed_s")
    told = faster(job.get("gain") or 1.0, 1.0)
    gain = f", {told}" if told != "as fast" else ""
    return [
        f"{job['script']} ({job['pid']})",
        f"{job['rank']} of {job['ranks']}{generation}",
        duration(time.time() - job["began_s"]),
        str(job["iteration"]),
        milliseconds(job, "step_s"),
        milliseconds(job, "communication_s"),
        f"{100 * exposed_s / step_s:.0f} %" if step_s and exposed_s is not None else "",
        f"{'tuning: ' if job['tuning'] else ''}{job['setting']}{gain}",
    ]


def milliseconds(job: Mapping[str, float], name: str) -> str:
    """A time, if it is known."""
    return f"{1e3 * job[name]:.3g} ms" if name in job else ""


def duration(seconds: float) -> str:
    """`1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
