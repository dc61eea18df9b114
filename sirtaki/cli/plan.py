"""`sirtaki plan`: what if there were 64 nodes at 25 Gbit/s? Planners and simulator on a job's saved profile."""

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace
from sirtaki.autotune.model.cluster import Cluster
from sirtaki.autotune.model.link import LinkModel
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.scaling import ScalingRow, scaling_table
from sirtaki.errors import ConfigError

from .trial_log import read_log

BYTES_PER_GBIT = 1e9 / 8
MAX_STREAMS = 24


def configure(parser: ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("log", type=Path, metavar="LOG", help="what a tuned job wrote to SIRTAKI_TRIAL_LOG")
    parser.add_argument("--ranks", type=_counts, default=(2, 8, 64, 256), metavar="N,N", help="default: 2,8,64,256")
    parser.add_argument("--link-gbit", type=float, metavar="G", help="rate of each rank's link")
    parser.add_argument("--flow-gbit", type=float, metavar="G", help="what one flow gets of it (default: all)")
    parser.add_argument("--hop-us", type=float, default=20.0, metavar="US", help="latency of a hop (default: 20)")
    parser.add_argument("--measured-ranks", type=int, metavar="N", help="ranks of LOG's job; without --link-gbit")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as err:
        raise ArgumentTypeError(f"{text!r} is no list of numbers such as 2,8,64") from err
    if counts[0] < 2:
        raise ArgumentTypeError("there must be at least two ranks")
    return counts


def main(options: Namespace) -> int:
    """Prints the expected iteration time of the untuned setting and of the best plan on each number of ranks.

    Raises:
        ConfigError: the log holds no profile, or the cluster is not described well enough.
    """
    model = read_log(options.log).model
    if model is None:
        raise ConfigError(f"{options.log} holds no profile; planners did not take part in that job")
    route = next(iter(model.links))
    space = KnobSpace(routes=(route,), streams=tuple(range(1, MAX_STREAMS + 1)))
    rows = scaling_table(
        layout=model.layout,
        profile=model.profile,
        link_at=_link(options, model),
        ranks=options.ranks,
        space=space,
        default=Knobs(unit_bytes=4 * MIB, streams=4, transport=route[0], algorithm=route[1]),
    )
    if options.json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        Console().print(_table(rows))
    return 0


def _link(options: Namespace, model: PlanningModel) -> Callable[[int], LinkModel]:
    """The link of a ring of that many ranks: described by the options, or the measured one carried over."""
    if options.link_gbit is not None:
        rate = options.link_gbit * BYTES_PER_GBIT
        flow = rate if options.flow_gbit is None else options.flow_gbit * BYTES_PER_GBIT
        cluster = Cluster(
            name="described", ranks=2, hop_s=options.hop_us * 1e-6, link_bytes_per_s=rate, flow_bytes_per_s=flow
        )
        return lambda ranks: replace(cluster, ranks=ranks).link(max_streams=MAX_STREAMS)
    if options.measured_ranks is None:
        raise ConfigError("describe the cluster by --link-gbit, or say by --measured-ranks how many LOG's job had")
    measured = next(iter(model.links.values()))
    return lambda ranks: measured.rescaled(from_ranks=options.measured_ranks, to_ranks=ranks)


def _table(rows: list[ScalingRow]) -> Table:
    table = Table("ranks", "plan by", "units", "streams", "iteration", "efficiency", box=None)
    for row in rows:
        table.add_row(
            str(row.ranks),
            row.planner,
            str(row.units),
            str(row.knobs.streams),
            f"{1e3 * row.iteration_s:.4g} ms",
            f"{100 * row.efficiency:.0f} %",
        )
    return table
