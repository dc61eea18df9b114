"""`sirtaki doctor --network`: measure the network between the hosts of several ranks, and say whether several parallel
connections (streams) would shorten a training step.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from sirtaki.comm.flows import RAMP_S, FlowRing, FlowSample
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError
from sirtaki.measures import in_ms, ring_bytes

from .output import positive, print_table, printed, whole

FLOWS = (1, 2, 4, 8, 16)
"""Numbers of concurrent connections that are measured."""

ROUNDS, DURATION_S = 7, 0.3
"""Number of rounds of measurements, and seconds of each measurement.

A round measures each number of connections once, so that a short disturbance does not affect one number only.
"""

ENOUGH_ROUNDS = 7
"""Intervals of at least this many rounds leave out the lowest and the highest value.

With seven rounds, the interval of the other five values contains the true median in 87 % of all cases.
"""

CLEAR_GAIN = 1.1
"""Several connections are said to help if they have at least this multiple of the rate of one connection.

The lower end of the multiple's interval counts.
"""

SIMILAR = 0.97
"""Fraction of the highest measured rate that counts as equally fast.

The command recommends the smallest number of connections that reaches it.
"""

MOST_BUSY = 0.9
"""A thread of this program may limit the rate if it uses more than this fraction of a processor."""

NOTABLE_LOSS = 0.001
"""The output mentions retransmissions if a single connection sends more than this fraction of TCP segments again.

Only a single connection is judged, because several connections that compete for a full link always lose some segments.
"""

UNEVEN = 0.8
"""The output names a link if its rate is below this fraction of the median rate of all links."""


def configure(parser: ArgumentParser) -> None:
    """Add the options of the measurement to the parser of `sirtaki doctor`."""
    parser.add_argument(
        "--network",
        action="store_true",
        help="measure the network between the hosts of two or more ranks, and the gain of several streams",
    )
    parser.add_argument("--model-mb", type=positive, metavar="MB", help="with --network: megabytes of gradients (100)")
    parser.add_argument(
        "--compute-ms",
        type=positive,
        metavar="MS",
        help="with --network: time of a training step on one rank alone, in ms, to predict the gain of a step",
    )
    parser.add_argument(
        "--rounds", type=whole(1), metavar="N", help=f"with --network: number of measurements ({ROUNDS})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Median of several rounds, with an interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Return the range of the values of all rounds. With `ENOUGH_ROUNDS` values, the extremes are left out."""
        inner = sorted(values)[1:-1] if len(values) >= ENOUGH_ROUNDS else values
        return cls(median=median(values), low=min(inner), high=max(inner))

    def text(self, factor: float = 1.0) -> str:
        """Format the values, each multiplied by `factor`, with three digits, such as `98.2 (97.1–99.4)`."""
        middle, low, high = (
            f"{value:.0f}" if value >= 100 else f"{value:.3g}"
            for value in (factor * self.median, factor * self.low, factor * self.high)
        )
        return middle if low == high else f"{middle} ({low}–{high})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRates:
    """Measurements of one number of concurrent connections, on the slowest link.

    Attributes:
        flows: number of connections from each host to the next.
        bytes_per_s: payload per second that all connections of a link carry together.
        times: rate divided by the rate of one connection in the same round.
        retransmitted: fraction of segments that were sent again; None = unknown.
        round_trip_s: round trip while the connections send; None = unknown.
        all_reduce_s: time of a ring all-reduce of the model's gradients at this rate.
    """

    flows: int
    bytes_per_s: Range
    times: Range
    retransmitted: float | None
    round_trip_s: float | None
    all_reduce_s: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkReport:
    """Result of the measurement.

    Attributes:
        hosts: names of the hosts, in the order of the ring.
        ranks: number of ranks.
        model_bytes: bytes of gradients for which `FlowRates.all_reduce_s` holds.
        rates: measurements, by ascending number of connections.
        round_trip_s: longest round trip of an idle connection between neighbours.
        busy: largest fraction of a processor that a thread of this program used.
        uneven: sentence about a link that is much slower than the others. "" = there is none.
    """

    hosts: tuple[str, ...]
    ranks: int
    model_bytes: float
    rates: tuple[FlowRates, ...]
    round_trip_s: float
    busy: float
    uneven: str

    @property
    def best(self) -> FlowRates:
        """Return the fewest connections that reach about the highest rate."""
        most = max(one.bytes_per_s.median for one in self.rates)
        return next(one for one in self.rates if one.bytes_per_s.median >= SIMILAR * most)

    @property
    def helps(self) -> bool | None:
        """Return whether several streams (parallel connections) would help; None = it is not clear, or there is no
        network.
        """
        if len(self.hosts) < 2:
            return None
        if self.best.times.low > CLEAR_GAIN:
            return True
        return False if max(one.times.median for one in self.rates) < CLEAR_GAIN else None

    def step_gain(self, compute_s: float) -> tuple[float, float]:
        """Return the smallest and the largest fraction of a step that the best number of connections may save.

        The saving depends on how much communication the backward pass hides. If the first gradient is ready after s
        seconds, the step takes max(compute, s + communication). All s from 0 to the whole computation are considered.
        """
        gains = []
        for one_s, best_s in (
            (self.rates[0].all_reduce_s.low, self.best.all_reduce_s.high),
            (self.rates[0].all_reduce_s.high, self.best.all_reduce_s.low),
        ):
            # The saving is largest if, with the best number of connections, communication and computation end at the
            # same time.
            turn_s = min(compute_s, max(0.0, compute_s - best_s))
            gains += [
                1 - max(compute_s, first_s + best_s) / max(compute_s, first_s + one_s)
                for first_s in (0.0, turn_s, compute_s)
            ]
        return max(0.0, min(gains)), max(0.0, *gains)

    def verdict(self, compute_s: float | None) -> list[str]:
        """Return sentences that say whether several streams would help, by how much, and what is uncertain."""
        if len(self.hosts) < 2:
            return [
                f"All {self.ranks} ranks are on one host, {self.hosts[0]}. There, Sirtaki sends gradients through "
                "shared memory, not through the loopback that was measured here, so several streams hardly matter. To "
                "measure a network, start ranks on two hosts."
            ]
        one, best = self.rates[0], self.best
        megabytes, found = f"{self.model_bytes / 1e6:g} MB", list[str]()
        if self.helps:
            found.append(
                f"Several streams would help: {best.flows} connections carry {best.times.text()} times as much as "
                f"one. Sirtaki uses several by itself; PyTorch's DDP over Gloo uses one."
            )
            saved = f"{in_ms(one.all_reduce_s.median - best.all_reduce_s.median)}"
            found.append(
                f"For a model with {megabytes} of gradients on {self.ranks} ranks, an all-reduce takes about "
                f"{in_ms(one.all_reduce_s.median)} over one connection and {in_ms(best.all_reduce_s.median)} over "
                f"{best.flows}. A training step gets shorter by at most {saved}, and by less if the backward pass "
                "hides communication."
            )
        elif self.helps is None:
            found.append(
                f"It is not clear whether several streams would help: {best.flows} connections carry "
                f"{best.times.text()} times as much as one. Repeat the measurement on idle hosts, with --rounds 15."
            )
        else:
            found.append(
                "Several streams would not help: one connection already carries as much as several. An all-reduce of "
                f"{megabytes} on {self.ranks} ranks takes about {in_ms(one.all_reduce_s.median)} with any number. If "
                "that is longer than the backward pass, send fewer bytes (compression, backward_passes_per_step)."
            )
        if compute_s is not None and self.helps is not False:
            low, high = self.step_gain(compute_s)
            found.append(
                f"If a step computes for {in_ms(compute_s)}, it gets between {100 * low:.0f} and {100 * high:.0f} % "
                "shorter, depending on how much communication the backward pass hides."
            )
        if (lost := one.retransmitted or 0.0) > NOTABLE_LOSS:
            found.append(
                f"One connection sent {100 * lost:.2g} % of its segments again, because they were lost or late. Its "
                "rate falls with each loss; find out where the network drops segments."
            )
        if self.busy > MOST_BUSY:
            found.append(
                "A thread of this program used a whole processor, so the processor may have limited these rates, not "
                "the network; the network may be faster."
            )
        if self.uneven:
            found.append(self.uneven)
        found.append(
            "Uncertain: the measurement sees TCP between hosts that do nothing else. Computation, other jobs, and "
            "limits that a cloud applies only after a burst can lower each rate. RDMA, InfiniBand and NVLink are not "
            "measured."
        )
        return found


def main(options: Namespace) -> int:
    """Measure the network between the hosts of all ranks. Print the result on rank 0. Collective.

    Raises:
        ConfigError: there is only one rank.
        TransportError: a host cannot be reached.
    """
    # Imported only here, because `sirtaki doctor` must also run without PyTorch.
    from sirtaki.engine.lanes import control_of
    from sirtaki.engine.ranks import open_ranks

    settings = Settings.from_environ()
    ranks = open_ranks(settings)
    if ranks.size == 1:
        ranks.free()
        raise ConfigError(
            "--network measures between at least two ranks, but this is one process alone; start it on two hosts: "
            "`sirtakirun -np 2 -H HOST1,HOST2 sirtaki doctor --network`, or on each host with "
            "`torchrun --nnodes 2 … -m sirtaki.cli doctor --network`"
        )
    control = control_of(ranks, settings)
    senders = sorted(set(control.hosts))
    one_host = len(senders) == 1
    rounds = options.rounds or ROUNDS
    if control.rank == 0:
        where = "the loopback of one host" if one_host else f"the network between {len(senders)} hosts"
        seconds = rounds * len(FLOWS) * (RAMP_S + DURATION_S)
        print(f"measuring {where} for about {seconds:.0f} s", file=sys.stderr, flush=True)
    try:
        ring = FlowRing(
            rank=control.rank,
            senders=list(range(control.size)) if one_host else senders,
            all_gather=control.all_gather,
            interface=settings.gloo_interface,
            loopback=one_host,
        )
        try:
            samples = [{flows: ring.measure(flows, duration_s=DURATION_S) for flows in FLOWS} for _ in range(rounds)]
        finally:
            ring.close()
        report = summarise(
            samples,
            hosts=[control.host_names[rank] for rank in senders],
            ranks=control.size,
            round_trip_s=max(ring.round_trip_s),
            model_bytes=1e6 * (options.model_mb or 100.0),
        )
        if control.rank == 0:
            _print(options, report)
    finally:
        control.close()
        ranks.free()
    return 0


def summarise(
    rounds: Sequence[dict[int, list[FlowSample]]],
    *,
    hosts: Sequence[str],
    ranks: int,
    round_trip_s: float,
    model_bytes: float,
) -> NetworkReport:
    """Summarise the measurements of all rounds in a report of the network.

    Args:
        rounds: for each round and number of connections, one sample for each receiving host.
        hosts: names of the hosts, in the order of the samples. One name if all ranks are on one host.
        ranks: number of ranks.
        round_trip_s: longest round trip of an idle connection.
        model_bytes: bytes of gradients of a step.
    """
    rates, counts = [], list(rounds[0])
    slowest = [{flows: min(one.bytes_per_s for one in found[flows]) for flows in counts} for found in rounds]
    # A ring all-reduce has 2 (ranks - 1) steps. In each step, a rank waits half a round trip for its neighbour's
    # message.
    startup_s = 2 * (ranks - 1) * round_trip_s / 2
    for flows in counts:
        samples = [one for found in rounds for one in found[flows]]
        segments = sum(one.segments or 0 for one in samples)
        again = sum(one.retransmitted or 0 for one in samples)
        loaded_s = [one.round_trip_s for one in samples if one.round_trip_s is not None]
        bytes_per_s = [max(1.0, each[flows]) for each in slowest]
        rates.append(
            FlowRates(
                flows=flows,
                bytes_per_s=Range.of(bytes_per_s),
                times=Range.of([each[flows] / max(1.0, each[counts[0]]) for each in slowest]),
                retransmitted=again / segments if segments else None,
                round_trip_s=median(loaded_s) if loaded_s else None,
                all_reduce_s=Range.of([startup_s + ring_bytes(model_bytes, ranks) / rate for rate in bytes_per_s]),
            )
        )
    uneven = ""
    if len(hosts) > 2:
        links = [median(found[counts[-1]][place].bytes_per_s for found in rounds) for place in range(len(hosts))]
        place = links.index(min(links))
        if links[place] < UNEVEN * median(links):
            uneven = (
                f"The link from {hosts[place - 1]} to {hosts[place]} is the slowest: it carries "
                f"{links[place] / median(links):.0%} of the median link. All ranks wait for it.".replace("%", " %")
            )
    return NetworkReport(
        hosts=tuple(hosts),
        ranks=ranks,
        model_bytes=model_bytes,
        rates=tuple(rates),
        round_trip_s=round_trip_s,
        busy=max(one.busy for found in rounds for each in found.values() for one in each),
        uneven=uneven,
    )


def _print(options: Namespace, report: NetworkReport) -> None:
    compute_s = None if options.compute_ms is None else options.compute_ms / 1e3
    verdict = report.verdict(compute_s)
    data: dict[str, Any] = {**asdict(report), "streams_help": report.helps, "best_flows": report.best.flows}
    if compute_s is not None:
        data["step_gain"] = report.step_gain(compute_s)
    if printed(options, {**data, "verdict": verdict}, [asdict(one) for one in report.rates]):
        return
    print(f"{report.ranks} ranks on {len(report.hosts)} host(s): {', '.join(report.hosts)}")
    print(f"round trip of an idle connection: {in_ms(report.round_trip_s)}\n")
    unit, factor = ("Gbit/s", 8e-9) if report.best.bytes_per_s.median > 1e9 / 8 else ("Mbit/s", 8e-6)
    print_table(
        ("connections", unit, "× one", "sent again", "round trip", "all-reduce"),
        (
            (
                str(one.flows),
                one.bytes_per_s.text(factor),
                one.times.text(),
                "unknown" if one.retransmitted is None else f"{100 * one.retransmitted:.2g} %",
                "unknown" if one.round_trip_s is None else in_ms(one.round_trip_s),
                in_ms(one.all_reduce_s.median),
            )
            for one in report.rates
        ),
    )
    print(
        f"\nThe figures are medians of {options.rounds or ROUNDS} measurements on the slowest link, with an interval. "
        f"The last column is the time of an all-reduce of {report.model_bytes / 1e6:g} MB of gradients."
    )
    for sentence in verdict:
        print(f"\n{sentence}")
