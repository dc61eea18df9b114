"""`sirtaki plan`: predict how a job would scale on other clusters, from the profile in its log of trials.

A job that Sirtaki tunes writes its profile to the log SIRTAKI_TRIAL_LOG: when each gradient was ready, and the cost of
all-reduces on each route (transport and algorithm), as measured by test transfers. If trials of settings in training
steps contradict this cost, it is fitted to the trials, because test transfers run on an idle network.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median

from markupsafe import Markup

from sirtaki.analysis.html import COLORS, DEFAULT_COLOR, dots, heading, page, paragraph, plot
from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace, format_bytes
from sirtaki.autotune.model.planning import Cluster, PlanningModel, fitted_to_trials
from sirtaki.autotune.scaling import DEFAULT, ScalingRow, scaling_table
from sirtaki.autotune.trial import Trial
from sirtaki.engine.tuning.trial_log import TrialLog, read_log
from sirtaki.errors import ConfigError
from sirtaki.measures import LinkModel

from .output import add_formats, print_table, printed, write_file

BYTES_PER_GBIT = 1e9 / 8
MAX_STREAMS = 24


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki plan` to the parser."""
    parser.add_argument("log", type=Path, metavar="LOG", help="what a tuned job wrote to SIRTAKI_TRIAL_LOG")
    parser.add_argument("--ranks", type=_counts, default=(2, 8, 64, 256), metavar="N,N", help="default: 2,8,64,256")
    parser.add_argument("--link-gbit", type=float, metavar="G", help="rate of each rank's link")
    parser.add_argument("--flow-gbit", type=float, metavar="G", help="what one flow gets of it (default: all)")
    parser.add_argument("--hop-us", type=float, default=20.0, metavar="US", help="latency of a hop (default: 20)")
    parser.add_argument("--measured-ranks", type=int, metavar="N", help="ranks of LOG's job; without --link-gbit")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the expected scaling as one HTML page")
    add_formats(parser)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as err:
        raise ArgumentTypeError(
            f"the value of this option must be a list of numbers of ranks, such as 2,8,64, found {text!r}"
        ) from err
    if counts[0] < 2:
        raise ArgumentTypeError(
            f"each number of ranks in the value of this option must be at least 2, found {counts[0]}"
        )
    return counts


def main(options: Namespace) -> int:
    """Print the predicted iteration time for each number of ranks, with the default settings and with the plan of each
    planner (algorithm that computes a communication plan). Plot it if requested.

    Raises:
        ConfigError: the log contains no profile, options that describe the cluster are missing, or the page with the
            plot cannot be written.
    """
    log = read_log(options.log)
    if log.model is None:
        raise ConfigError(
            f"the trial log (tuning record) {options.log} contains no profile (when each gradient became ready, and "
            "how long all-reduces took); perhaps its job used a stored setting and measured nothing: run the job again "
            "with SIRTAKI_REGISTRY=off"
        )
    model = fitted_to_trials(log.model, list(_trials(log)))
    route = next(iter(model.links))
    untuned = Knobs(unit_bytes=4 * MIB, streams=4, transport=route[0]) if log.default is None else log.default.knobs
    rows = scaling_table(
        layout=model.layout,
        profile=model.profile,
        link_at=_link(options, model),
        ranks=options.ranks,
        space=KnobSpace(routes=(route,), streams=tuple(range(1, MAX_STREAMS + 1))),
        default=untuned.but(transport=route[0], algorithm=route[1]),
        # Predict the slowdown of computation by communication only for the measured network link, because it is unknown
        # for a link that options describe.
        contention=model.contention_on(route) if options.link_gbit is None else None,
        contention_ranks=options.measured_ranks,
    )
    if options.plot is not None:
        write_file(options.plot, render(rows, model), "the plot")
    if printed(options, [row.to_json() for row in rows]):
        return 0
    print_table(
        ("ranks", "plan by", "units", "streams", "iteration", "efficiency"),
        (
            (str(row.ranks), row.planner, str(row.units), str(row.knobs.streams), f"{1e3 * row.iteration_s:.4g} ms",
             f"{100 * row.efficiency:.0f} %")
            for row in rows
        ),
    )  # fmt: skip
    if options.plot is not None:
        print(f"wrote {options.plot}")
    return 0


def _trials(log: TrialLog) -> Iterator[Trial]:
    """Yield one trial for each setting in the log, with the median of all its measured communication times."""
    spans_s: dict[Knobs, list[float]] = {}
    for measured in log.measurements:
        if measured.succeeded:
            spans_s.setdefault(measured.knobs, []).append(measured.span_s)
    for knobs, times_s in spans_s.items():
        yield Trial(arm="", knobs=knobs, iterations=len(times_s), span_s=median(times_s))


def _link(options: Namespace, model: PlanningModel) -> Callable[[int], LinkModel]:
    """Return a function that maps a number of ranks to the latency and bandwidth of a ring all-reduce. The network is
    the one that options describe, or else the measured one.
    """
    if options.link_gbit is not None:
        rate = options.link_gbit * BYTES_PER_GBIT
        flow = rate if options.flow_gbit is None else options.flow_gbit * BYTES_PER_GBIT
        cluster = Cluster(
            name="described", ranks=2, hop_s=options.hop_us * 1e-6, link_bytes_per_s=rate, flow_bytes_per_s=flow
        )
        return lambda ranks: replace(cluster, ranks=ranks).link(max_streams=MAX_STREAMS)
    if options.measured_ranks is None:
        raise ConfigError(
            "the network's bandwidth is unknown; pass it with --link-gbit, or pass --measured-ranks (number of ranks "
            "of the job that wrote the trial log) to derive it from that job's measurements"
        )
    measured = next(iter(model.links.values()))
    return lambda ranks: measured.rescaled(from_ranks=options.measured_ranks, to_ranks=ranks)


def render(rows: Sequence[ScalingRow], model: PlanningModel) -> str:
    """Return an HTML page that plots predicted iteration time and efficiency over the number of ranks, with a line for
    each planner (algorithm that computes a communication plan).
    """
    planners = sorted(dict.fromkeys(row.planner for row in rows), key=lambda planner: planner != DEFAULT)
    colors = dict(zip(planners, cycle((DEFAULT_COLOR, *COLORS)), strict=False))
    alone_ms = 1e3 * (model.profile.forward_s + model.profile.compute_s)
    return page(
        "Expected scaling",
        [
            paragraph(
                f"{len(model.layout.sizes)} gradients, {format_bytes(model.layout.total_bytes)}; an iteration takes "
                f"{alone_ms:.4g} ms without communication."
            ),
            heading("Iteration time"),
            _plot(rows, colors, lambda row: 1e3 * row.iteration_s, y="ms"),
            heading("Efficiency: throughput of a rank as part of what it would be alone"),
            _plot(rows, colors, lambda row: 100 * row.efficiency, y="%"),
        ],
    )


def _plot(
    rows: Sequence[ScalingRow], colors: Mapping[str, str], value: Callable[[ScalingRow], float], *, y: str
) -> Markup:
    traces = []
    for planner, color in colors.items():
        points = [
            (row.ranks, value(row), f"{row.ranks} ranks, {planner}: {value(row):.4g} {y}, {row.knobs.describe()}")
            for row in rows
            if row.planner == planner
        ]
        dash = "dash" if planner == DEFAULT else "solid"
        traces.append(dots(planner, points, color, mode="lines+markers", line={"dash": dash}))
    counts = sorted({row.ranks for row in rows})
    return plot(traces, x="ranks (log)", y=y, xaxis={"type": "log", "tickvals": counts}, yaxis={"rangemode": "tozero"})
