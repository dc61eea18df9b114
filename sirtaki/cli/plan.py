"""`sirtaki plan`: predict how a job would scale on other clusters, from the profile in its log of trials.

A job that Sirtaki tunes writes its profile to the log SIRTAKI_TRIAL_LOG. The profile contains the time at which each
gradient was ready, and the cost of all-reduces on each route (transport and algorithm). Test transfers on an idle
network measure this cost. If trials of settings in training steps contradict it, it is fitted to the trials.
"""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median

from markupsafe import Markup

from sirtaki.analysis.html import COLORS, DEFAULT_COLOR, dots, heading, page, paragraph, plot
from sirtaki.analysis.what_if import MAX_HANDLING_RATIO, MAX_INTERVAL_RATIO, PAYLOAD, handling_ratio
from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace, format_bytes
from sirtaki.autotune.model.planning import Cluster, PlanningModel, fitted_to_trials
from sirtaki.autotune.scaling import DEFAULT, ModelAccuracy, ScalingRow, scaling_table
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import Algorithm, Route, TransportKind
from sirtaki.engine.tuning.plans import DEFAULT_STREAMS
from sirtaki.engine.tuning.trial_log import TrialLog, read_log
from sirtaki.errors import ConfigError, ReplayError
from sirtaki.measures import LinkModel, counted, in_ms, milliseconds

from .output import add_formats, print_table, printed, write_file

BYTES_PER_GBIT = 1e9 / 8
MAX_STREAMS = 24


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki plan` to the parser."""
    parser.add_argument(
        "log", type=Path, metavar="LOG", help="trial log of a tuned job (the file in SIRTAKI_TRIAL_LOG)"
    )
    parser.add_argument(
        "--ranks", type=_counts, default=(2, 8, 64, 256), metavar="N,N", help="numbers of ranks to predict (2,8,64,256)"
    )
    parser.add_argument(
        "--link-gbit",
        type=float,
        metavar="G",
        help="rate of each rank's link in Gbit/s (default: as measured in LOG's job)",
    )
    parser.add_argument(
        "--flow-gbit", type=float, metavar="G", help="rate of one TCP connection in Gbit/s (default: the whole link)"
    )
    parser.add_argument(
        "--hop-us",
        type=float,
        metavar="US",
        help="latency in one direction, in µs (default: that of --measured-hop-us)",
    )
    parser.add_argument(
        "--measured-hop-us",
        type=float,
        default=20.0,
        metavar="US",
        help="latency in one direction in LOG's job, in µs (20)",
    )
    parser.add_argument(
        "--measured-ranks", type=int, metavar="N", help="number of ranks of LOG's job, if LOG does not contain it"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the expected scaling as one HTML page")
    add_formats(parser)


def _counts(text: str) -> tuple[int, ...]:
    with suppress(ValueError):
        counts = tuple(sorted({int(part) for part in text.split(",")}))
        if counts[0] >= 2:
            return counts
    raise ArgumentTypeError(f"the value of this option must be numbers of ranks, such as 2,8,64, found {text!r}")


def main(options: Namespace) -> int:
    """Print the predicted iteration time for each number of ranks, with the default settings and with the plan of each
    planner (algorithm that computes a communication plan), with intervals and assumptions. Plot it if requested.

    Raises:
        ConfigError: the log contains no times of gradients and all-reduces, options that describe the cluster are
            missing, or the page with the plot cannot be written.
        ReplayError: the log cannot show how the job would run there.
    """
    log = read_log(options.log)
    if log.model is None:
        raise ConfigError(
            f"the trial log {options.log} contains no times of gradients and all-reduces, because its job used a "
            "stored setting, or because the measurements of its network contradict each other; run the job again with "
            "SIRTAKI_REGISTRY=off, on hosts that do nothing else"
        )
    usual, model = log.outcome.usual, log.model
    if usual is not None:
        # Scale the profile from the first iterations to the usual times of later iterations.
        model = replace(model, profile=replace(usual.at_this_pace(model.profile), forward_s=usual.between_s))
    trials = [trial for trial in _trials(log) if _is_predictable(trial.knobs, model, model.links)]
    model = fitted_to_trials(model, trials)
    kept = log.outcome.knobs
    route = kept.route if kept.route in model.links else next(iter(model.links))
    before = _ranks_of(options, model)
    link_at = _link(options, model, route, before)
    accuracy = ModelAccuracy.of(model, [trial for trial in trials if trial.knobs.route == route])
    if (reason := _refusal(options, model, accuracy)) is not None:
        raise ReplayError(f"{CANNOT_SAY.format(options.log)} {reason}")
    assert accuracy is not None
    untuned = Knobs(unit_bytes=4 * MIB, streams=4, transport=route[0]) if log.default is None else log.default.knobs
    is_kept = kept.route == route and kept != untuned and not (kept.lossy or kept.nccl)
    if model.host is not None:  # Settings that suit one host may not suit several hosts.
        route, is_kept = (TransportKind.GLOO, Algorithm.FLAT), False
        untuned = untuned.but(streams=max(untuned.streams, DEFAULT_STREAMS))
    table = scaling_table(
        layout=model.layout,
        profile=model.profile,
        link_at=link_at,
        ranks=options.ranks,
        space=KnobSpace(routes=(route,), streams=tuple(range(1, MAX_STREAMS + 1))),
        default=untuned.but(transport=route[0], algorithm=route[1]),
        kept=kept if is_kept else None,
        # The slow-down of computation by communication was measured for the job's network. It is unknown for a link
        # that options describe.
        contention=model.contention_on(route) if options.link_gbit is None else None,
        contention_ranks=before,
    )
    rows = [row for row in table if _is_predictable(row.knobs, model, {route: link_at(row.ranks)})]
    if not rows:
        raise ReplayError(f"{CANNOT_SAY.format(options.log)} {SMALL_UNITS}; larger units have a prediction")
    answers = [(row, *_interval(row, accuracy, model, from_ranks=before or min(row.ranks, 2))) for row in rows]
    words = list(_assumptions(options, log, model, accuracy))
    if len(rows) < len(table):
        words.append(f"Not predicted: {counted(len(table) - len(rows), 'plan')}, because {SMALL_UNITS}.")
    if options.plot is not None:
        write_file(options.plot, render(rows, model, words), "the plot")
    found = [
        {**row.to_json(), "low_s": low_s, "high_s": high_s, "told": high_s <= MAX_INTERVAL_RATIO * low_s}
        for row, low_s, high_s in answers
    ]
    if printed(options, found):
        return 0
    print_table(
        ("ranks", "plan by", "units", "streams", "iteration", "from … to, ms", "efficiency"),
        (
            (str(row["ranks"]), row["planner"], str(row["units"]), str(row["knobs"]["streams"]),
             in_ms(row["iteration_s"]) if row["told"] else "",
             f"{milliseconds(row['low_s'])} to {milliseconds(row['high_s'])}",
             f"{100 * row['efficiency']:.0f} %" if row["told"] else "")
            for row in found
        ),
    )  # fmt: skip
    print()
    print("\n".join(words))
    if options.plot is not None:
        print(f"wrote {options.plot}")
    return 0


CANNOT_SAY = "the trial log {} does not suffice to predict this job:"
SMALL_UNITS = "units (buckets) this small take processor time from computation, which the model does not contain"


def _is_predictable(knobs: Knobs, model: PlanningModel, links: Mapping[Route, LinkModel]) -> bool:
    """Return whether the link limits a setting, and not the processor time of its units (buckets)."""
    if model.host is not None:
        return True
    share = handling_ratio([knobs.to_plan(model.layout)], [model.layout], links)
    return share is not None and share <= MAX_HANDLING_RATIO


MAX_ERROR = math.log(1.5)
"""Largest error of the model, on a logarithmic scale, with which predictions are printed.

Nine in ten of the job's own settings have at most this error.
"""


def _ranks_of(options: Namespace, model: PlanningModel) -> int | None:
    """Return the number of ranks of the job that wrote the log; None = unknown."""
    if options.measured_ranks is not None:
        return int(options.measured_ranks)
    return model.ranks if model.host is None else model.host.ranks


def _refusal(options: Namespace, model: PlanningModel, accuracy: ModelAccuracy | None) -> str | None:
    """Return why the log cannot show how the job would run on the described cluster, with a remedy.

    None if the log can show it.
    """
    host = model.host
    again = "write a log with one rank on each of two or more hosts"
    if host is not None and options.link_gbit is None:
        return (
            f"its {host.ranks} ranks were on one host, so that no network was measured; pass the rate of the network "
            f"with --link-gbit, or {again}"
        )
    if host is not None and host.ranks * host.threads > host.processors:
        return (
            f"its {host.ranks} ranks with {host.threads} thread(s) each shared {host.processors:g} processors of one "
            f"host, so that it is unknown how fast a rank computes on a host of its own; {again}, or with fewer "
            "threads (OMP_NUM_THREADS)"
        )
    if accuracy is None:
        return (
            "it has no measured setting with units (buckets) that take longer on the link than on a processor, on the "
            "route (transport and algorithm) of its network measurements, so that the error of predictions is unknown; "
            f"{again}"
        )
    if accuracy.most > MAX_ERROR:
        return (
            f"the model of this job is too inaccurate: for nine in ten of the {accuracy.settings} setting(s) that the "
            f"job tried, the predicted step differs from the measured one by up to {_percent(accuracy.most)}; {again} "
            "that do nothing else"
        )
    return None


def _interval(
    row: ScalingRow, accuracy: ModelAccuracy, model: PlanningModel, *, from_ranks: int
) -> tuple[float, float]:
    """Return the interval of a predicted iteration time, in seconds. Its lower end is at least the computation time of
    the job.
    """
    width = accuracy.half_width(from_ranks=from_ranks, to_ranks=row.ranks, is_measured=model.host is None)
    alone_s = model.profile.forward_s + model.profile.compute_s
    low_s = max(row.iteration_s * math.exp(-width), min(alone_s, row.iteration_s))
    return low_s, row.iteration_s * math.exp(width)


def _assumptions(options: Namespace, log: TrialLog, model: PlanningModel, accuracy: ModelAccuracy) -> Iterator[str]:
    """Yield sentences on the measured error of the model for this job, and on what the predictions assume."""
    kept, usual = log.outcome, log.outcome.usual
    found = (
        "" if usual is None else f" The job's own step took {in_ms(usual.step_s(kept.span_s))} with the kept setting"
    )
    own_s = model.expected_s(kept.knobs)
    if usual is not None and own_s is not None:
        found += f"; the model predicts {in_ms(usual.between_s + own_s)}"
    yield (
        f"Measured error: for the {accuracy.settings} setting(s) that this job tried, predicted steps differ from "
        f"measured ones by {_percent(accuracy.median)} in the median, and by up to {_percent(accuracy.most)} in nine "
        f"of ten.{found}{'.' if found else ''}"
    )
    unknown = " (the log does not have it, so 2 are assumed: pass --measured-ranks)"
    yield (
        "The interval contains half as much again as the median of this error, at least 12 %, and 10 % for each factor "
        f"of 2.7 from the job's number of ranks{unknown if _ranks_of(options, model) is None else ''}"
        f"{'' if model.host is None else ', and 10 % because the job used no network'}. Predictions were compared with "
        "measurements on two to four emulated nodes with links of 50 to 300 Mbit/s. Elsewhere the true error may be "
        "larger."
    )
    alone = (
        "" if usual is not None else " The log has no times of whole steps: data loading and updates may be missing."
    )
    yield (
        "Assumed: each rank has a link of its own, and computes as fast as in this job; ranks form a ring; no rank is "
        f"slower than the others; 95 % of a link's rate are payload.{alone}"
    )


def _percent(error: float) -> str:
    """Format an error on a logarithmic scale, such as `12 %`."""
    return f"{100 * math.expm1(error):.0f} %"


def _trials(log: TrialLog) -> Iterator[Trial]:
    """Yield one trial for each setting in the log, with the median of all its measured communication times."""
    spans_s: dict[Knobs, list[float]] = {}
    for measured in log.measurements:
        if measured.succeeded:
            spans_s.setdefault(measured.knobs, []).append(measured.span_s)
    for knobs, times_s in spans_s.items():
        yield Trial(arm="", knobs=knobs, iterations=len(times_s), span_s=median(times_s))


def _link(options: Namespace, model: PlanningModel, route: Route, before: int | None) -> Callable[[int], LinkModel]:
    """Return a function that maps a number of ranks to the latency and bandwidth of a ring all-reduce.

    The rates are those that options describe, or else the measured ones. An all-reduce's start-up and processor time
    are measured ones, scaled from `before` ranks, because most of them is software. They are left out if `before` is
    unknown. A latency that options describe replaces the measured network's.
    """
    measured = model.link_between_hosts(route)
    if options.link_gbit is None:
        if before is None:
            raise ConfigError(
                "the network's bandwidth is unknown; pass it with --link-gbit, or pass --measured-ranks N, the number "
                "of ranks of the job that wrote the trial log"
            )
        return lambda ranks: model.links[route].rescaled(from_ranks=before, to_ranks=ranks)
    rate = PAYLOAD * options.link_gbit * BYTES_PER_GBIT
    flow = rate if options.flow_gbit is None else PAYLOAD * options.flow_gbit * BYTES_PER_GBIT
    measured_hop_s = 1e-6 * options.measured_hop_us
    hop_s = measured_hop_s if options.hop_us is None else 1e-6 * options.hop_us
    cluster = Cluster(
        name="described", ranks=2, hop_s=hop_s, link_bytes_per_s=rate, flow_bytes_per_s=flow, crowding=0.0
    )

    def link_at(ranks: int) -> LinkModel:
        link = replace(cluster, ranks=ranks).link(max_streams=MAX_STREAMS)
        if measured is None or before is None:
            return link
        own = measured.rescaled(from_ranks=before, to_ranks=ranks)
        longer_s = 2 * (ranks - 1) * (hop_s - measured_hop_s)
        return replace(link, alpha_s=max(link.alpha_s, own.alpha_s + longer_s), host_s=own.host_s)

    return link_at


def render(rows: Sequence[ScalingRow], model: PlanningModel, assumptions: Sequence[str]) -> str:
    """Return an HTML page that plots predicted iteration time and efficiency over the number of ranks, with a line for
    each planner (algorithm that computes a communication plan), and states the assumptions.
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
            heading("How far this can be trusted"),
            *map(paragraph, assumptions),
        ],
    )


BESIDE = 1.04
"""Horizontal distance of two planners' points for the same number of ranks, as a factor, so that no point hides
another.
"""


def _plot(
    rows: Sequence[ScalingRow], colors: Mapping[str, str], value: Callable[[ScalingRow], float], *, y: str
) -> Markup:
    """Return a plot of values over the number of ranks. For a single number of ranks, return bars."""
    counts = sorted({row.ranks for row in rows})

    def words(row: ScalingRow) -> str:
        return f"{row.ranks} ranks, {row.planner}: {value(row):.4g} {y}, {row.knobs.describe()}"

    if len(counts) == 1:
        bars = {
            "type": "bar",
            "orientation": "h",
            "name": f"{counts[0]} ranks",
            "x": [value(row) for row in rows],
            "y": [row.planner for row in rows],
            "text": [f"{value(row):.4g} {y}" for row in rows],
            "marker": {"color": [colors[row.planner] for row in rows]},
            "hovertext": [words(row) for row in rows],
        }
        height = 110 + 28 * len(rows)
        return plot([bars], x=y, height=height, yaxis={"type": "category", "autorange": "reversed", "dtick": 1})
    traces = []
    for place, (planner, color) in enumerate(colors.items()):
        factor = BESIDE ** (place - (len(colors) - 1) / 2)
        points = [(row.ranks * factor, value(row), words(row)) for row in rows if row.planner == planner]
        dash = "dash" if planner == DEFAULT else "solid"
        traces.append(dots(planner, points, color, mode="lines+markers", line={"dash": dash}))
    return plot(traces, x="ranks (log)", y=y, xaxis={"type": "log", "tickvals": counts}, yaxis={"rangemode": "tozero"})
