"""`sirtaki top`: show the Sirtaki jobs that are running on this machine, with their step times, live."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sirtaki.measures import faster, in_ms
from sirtaki.watch.watchers import Answer, running_jobs

from .output import add_formats, positive, printed, rich_table

COLUMNS = ("job", "rank", "running\nfor", "iteration", "step", "commu-\nnication", "exposed", "setting")


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki top` to the parser."""
    parser.add_argument("--once", action="store_true", help="print the table once, and exit")
    parser.add_argument("--every", type=positive, default=2.0, metavar="S", help="refresh interval in seconds (2)")
    add_formats(parser)


def main(options: Namespace) -> int:
    """Show a table of the running jobs, and update it until Ctrl-C. With `--once`, `--json` or `--csv`, print it only
    once.
    """
    if options.json or options.csv:
        printed(options, list(running_jobs()))
    elif options.once:
        Console().print(table(list(running_jobs())))
    else:
        try:
            with Live(table(list(running_jobs())), auto_refresh=False) as live:
                while True:
                    time.sleep(options.every)
                    live.update(table(list(running_jobs())), refresh=True)
        except KeyboardInterrupt:
            pass
    return 0


def table(jobs: Sequence[Answer]) -> Table | str:
    """Return a table with one row per running job, or a sentence if there is none.

    Times are means over the time since the previous table. The first table therefore has no times.
    """
    return rich_table(COLUMNS, map(row, jobs)) if jobs else "No Sirtaki job of this user is running on this machine."


def row(job: Answer) -> list[str]:
    """Return the table row of one running job. The cells of unknown values are empty."""
    generation = f", generation {job['generation']}" if job["generation"] else ""
    step_s, exposed_s = job.get("step_s"), job.get("exposed_s")
    gain_text = faster(job.get("gain") or 1.0, 1.0)
    gain = f", {gain_text}" if gain_text != "as fast" else ""
    minutes, seconds = divmod(int(time.time() - job["began_s"]), 60)
    return [
        f"{job['script']} ({job['pid']})",
        f"{job['rank']} of {job['ranks']}{generation}",
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}",
        str(job["iteration"]),
        *(in_ms(job[name]) if name in job else "" for name in ("step_s", "communication_s")),
        f"{100 * exposed_s / step_s:.0f} %" if step_s and exposed_s is not None else "",
        f"{'tuning: ' if job['tuning'] else ''}{job['setting']}{gain}",
    ]
