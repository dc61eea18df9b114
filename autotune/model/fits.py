"""Fits of two models to measurements: the network's latency and bandwidth, and LIBRA's contention model.

The contention model tells how much computation and communication slow each other down.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import scipy
from numpy.typing import NDArray

from sirtaki.errors import TuningError, require
from sirtaki.measures import LinkModel, counted, ring_ratios

GAMMA_4 = 0.6  # An empirical constant of LIBRA (below eq. 6). It is not fitted.


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Transmission rate of all-reduces as a function of the number of GPU threads, with diminishing returns.

    The attributes are the parameters of LIBRA's eq. (6). The rate counts gradient bytes, so that it includes the factor
    2 (N − 1) / N of a ring of N ranks.

    Raises:
        TuningError: γ1 > 0, 0 ≤ γ2 ≤ γ1 and γ3 ≥ 0 does not hold.
    """

    gamma_1: float
    gamma_2: float
    gamma_3: float

    def __post_init__(self) -> None:
        require(
            self.gamma_1 > 0 and 0 <= self.gamma_2 <= self.gamma_1 and self.gamma_3 >= 0,
            "RateCurve",
            "gamma_1 > 0, 0 <= gamma_2 <= gamma_1 and gamma_3 >= 0",
            self,
            TuningError,
        )

    def bytes_per_s(self, threads: int) -> float:
        """Return the transmission rate with this number of GPU threads, in gradient bytes per second (LIBRA eq. 6)."""
        return self.gamma_1 - self.gamma_2 * math.exp(-self.gamma_3 * threads**GAMMA_4)

    def seconds(self, unit_bytes: float, threads: int) -> float:
        """Return the transmission time of a unit (bucket) with this number of GPU threads (LIBRA eq. 6)."""
        return unit_bytes / self.bytes_per_s(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionModel:
    """LIBRA's contention model: how much computation and communication with r GPU threads slow each other down.

    Attributes:
        alpha_1: fraction of the compute speed that remains during communication with few threads (LIBRA eq. 5).
        alpha_2: fraction of the compute speed lost for each communication thread (LIBRA eq. 5).
        overlapped: transmission rate during computation (LIBRA's p).
        alone: transmission rate without computation (LIBRA's q).
        default_threads: number of GPU threads of units (buckets) for which the plan has no number.
        residual: relative error (root mean square) of the fit; 0.0 for a model that was not fitted.

    Raises:
        TuningError: 0 < α1 ≤ 1.2 and α2 ≥ 0 does not hold.
    """

    alpha_1: float
    alpha_2: float
    overlapped: RateCurve
    alone: RateCurve
    default_threads: int = 512
    residual: float = 0.0

    def __post_init__(self) -> None:
        valid = 0 < self.alpha_1 <= 1.2 and self.alpha_2 >= 0
        require(valid, "ContentionModel", "0 < alpha_1 <= 1.2 and alpha_2 >= 0", self, TuningError)

    def compute_speed(self, threads: float) -> float:
        """Return the compute speed during communication, as a fraction of the undisturbed speed (LIBRA eq. 5).

        The result is at least 0.05, because LIBRA's linear function would reach zero, and the speed of a real GPU never
        does.
        """
        return max(self.alpha_1 - self.alpha_2 * threads, 0.05)

    def rescaled(self, *, from_ranks: int, to_ranks: int) -> ContentionModel:
        """Return the model for a ring with another number of the same GPUs.

        In a ring of N ranks, transmission times are proportional to (N − 1) / N (LIBRA eq. 4). The compute speed does
        not change.

        Raises:
            TuningError: one of the rings has fewer than two ranks.
        """
        _, volume = ring_ratios(from_ranks, to_ranks)
        overlapped, alone = (
            RateCurve(gamma_1=curve.gamma_1 / volume, gamma_2=curve.gamma_2 / volume, gamma_3=curve.gamma_3)
            for curve in (self.overlapped, self.alone)
        )
        return replace(self, overlapped=overlapped, alone=alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """Measured time of equal, concurrent all-reduces on several streams, from which the network's cost model is fitted.

    Attributes:
        unit_bytes: size of each all-reduced tensor.
        streams: number of concurrent streams.
        seconds: time from the launch to the end of the last all-reduce.
        rounds: number of successive all-reduces on each stream. Several are needed to measure the sustained rate,
            because traffic shapers let short bursts pass at a higher rate.
        busy: number of processors that each rank kept busy during the measurement; None = not measured.

    Raises:
        TuningError: an attribute is not positive.
    """

    unit_bytes: int
    streams: int
    seconds: float
    rounds: int = 1
    busy: float | None = None

    def __post_init__(self) -> None:
        positive = min(self.unit_bytes, self.streams, self.rounds) >= 1
        valid = positive and math.isfinite(self.seconds) and self.seconds > 0
        require(valid, "LinkProbe", "positive, finite numbers", self, TuningError)

    @property
    def round_s(self) -> float:
        """Return the mean time in which each stream completes one all-reduce (a round)."""
        return self.seconds / self.rounds


MAX_RESIDUAL = 0.25
"""Maximum relative error (root mean square) of a fitted model. Models with a larger error are not used."""

LEAST_BUSY = 0.02
"""Lower limit of `LinkModel.busy`, the number of processors that each rank keeps busy during an all-reduce."""


def check_residual(model: str, residual: float) -> None:
    """Reject a fitted model whose predicted times differ too much from the measured times.

    Raises:
        TuningError: the relative error (root mean square) exceeds `MAX_RESIDUAL`.
    """
    if residual > MAX_RESIDUAL:
        raise TuningError(
            f"Sirtaki does not use {model}, because its predicted times differ from the measured times by "
            f"{residual:.0%} (limit {MAX_RESIDUAL:.0%})"
        )


def fit_link(probes: Sequence[LinkProbe]) -> LinkModel:
    """Fit the network's latency and bandwidth model to measured all-reduces (probes).

    The fit minimises the squares of relative errors, with non-negative parameters.

    The time of one all-reduce on each of n streams is modelled as `t = α + n · max(o, bytes / G(n))`. α is the start-up
    time, o the processor time of an all-reduce and G(n) the link's rate. Probes of equal size and number of streams are
    replaced by their median. Between two measured numbers of streams, each stream has its rate at the smaller number,
    and the total is at most the rate at the larger number. A link behaves so if each flow has a rate limit and several
    flows saturate it.

    Raises:
        TuningError: there are fewer than two sizes on one stream, times do not increase with the size, or the relative
            error (root mean square) exceeds `MAX_RESIDUAL`.
    """
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for probe in probes:
        groups[probe.streams, probe.unit_bytes].append(probe.round_s)
    rounds = [_Round(*shape, seconds=median(seconds)) for shape, seconds in sorted(groups.items())]
    n_sizes = sum(one.streams == 1 for one in rounds)
    found = counted(n_sizes, "size")
    require(n_sizes >= 2, "probes", "all-reduces of at least 2 sizes on one stream", found, TuningError)
    fits = [_fit_rounds(rounds, on_host) for on_host in _possibly_on_host(rounds)]
    # Of equally good fits, choose the first one, which is the simplest.
    fit = min(fits, key=lambda fit: round(fit.residual, 6))
    if not min(fit.s_per_byte.values()) > 0:
        worst_count = min(fit.s_per_byte, key=lambda streams: fit.s_per_byte[streams])
        raise TuningError(
            f"on {counted(worst_count, 'stream')}, larger all-reduces did not take longer than smaller ones, so the "
            "network bandwidth cannot be calculated; measure larger tensors"
        )
    worst = max(rounds, key=lambda one: abs(fit.error(one)))
    check_residual(
        f"the model of network latency and bandwidth (worst: {worst.seconds:.3g} s for {worst.unit_bytes} bytes on "
        f"{counted(worst.streams, 'stream')})",
        fit.residual,
    )
    rates = {count: 1 / slope for count, slope in fit.s_per_byte.items()}
    return LinkModel(
        alpha_s=fit.alpha_s,
        throughput=tuple(_between(rates, count) for count in range(1, max(rates) + 1)),
        host_s=fit.host_s,
        residual=fit.residual,
        busy=_busy([probe for probe in probes if probe.streams == 1]),
    )


def _between(rates: Mapping[int, float], count: int) -> float:
    """Return the total transmission rate of `count` streams, interpolated between the measured numbers of streams."""
    if count in rates:
        return rates[count]
    fewer, more = max(each for each in rates if each < count), min(each for each in rates if each > count)
    if rates[more] < rates[fewer]:
        return rates[fewer] + (rates[more] - rates[fewer]) * (count - fewer) / (more - fewer)
    return min(rates[fewer] * count / fewer, rates[more])


def _busy(probes: Sequence[LinkProbe]) -> float:
    """Return the number of processors that a rank keeps busy during an all-reduce of the largest probed size.

    Return 1 if probes did not measure it.
    """
    largest = max(probe.unit_bytes for probe in probes)
    measured = [probe.busy for probe in probes if probe.busy is not None and probe.unit_bytes == largest]
    return min(1.0, max(LEAST_BUSY, median(measured))) if measured else 1.0


@dataclass(frozen=True, slots=True)
class _Round:
    """Median time in which each of several concurrent streams completes one all-reduce.

    Attributes:
        streams: number of concurrent streams.
        unit_bytes: size of each all-reduced tensor.
        seconds: median time from the launch to the end of all streams' all-reduces.
    """

    streams: int
    unit_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundsFit:
    """Fitted parameters of `t = α + n · max(o, bytes · s[n])`, and their relative error.

    t is the time in which each of n streams completes one all-reduce, o the processor time of an all-reduce, and s[n]
    the time of a byte on the link.
    """

    alpha_s: float
    host_s: float
    s_per_byte: dict[int, float]  # {number of streams: time of a byte}, ascending
    residual: float = 0.0

    def error(self, one: _Round) -> float:
        per_unit_s = max(self.host_s, one.unit_bytes * self.s_per_byte[one.streams])
        return (self.alpha_s + one.streams * per_unit_s) / one.seconds - 1


def _possibly_on_host(rounds: Sequence[_Round]) -> Iterator[frozenset[_Round]]:
    """Yield sets of all-reduce measurements that the processor may limit instead of the link, the empty set first.

    If the processor limits a measurement, it also limits all measurements that need less time on the link. So each set
    has the measurements with the shortest link times. A set never contains the largest size of a number of streams,
    which is needed to fit the link's rate. A set with only one stream is skipped, because it cannot distinguish
    processor time from start-up time.
    """
    largest = {one.streams: one for one in rounds}  # Keep the last size, which is the largest.
    on_link_s = {
        one: one.unit_bytes * largest[one.streams].seconds / largest[one.streams].unit_bytes / one.streams
        for one in rounds
    }
    smaller = sorted((one for one in rounds if one is not largest[one.streams]), key=lambda one: on_link_s[one])
    yield frozenset()
    for count in range(1, len(smaller) + 1):
        if any(one.streams > 1 for one in smaller[:count]):
            yield frozenset(smaller[:count])


def _fit_rounds(rounds: Sequence[_Round], on_host: frozenset[_Round]) -> _RoundsFit:
    """Fit a link's latency and bandwidth to measured all-reduces.

    The processor is assumed to limit the measurements in `on_host`, and the link all others.
    """
    counts = sorted({one.streams for one in rounds})
    rows = np.zeros((len(rounds), 2 + len(counts)))
    for row, one in zip(rows, rounds, strict=True):
        row[0] = 1 / one.seconds
        if one in on_host:
            row[1] = one.streams / one.seconds
        else:
            row[2 + counts.index(one.streams)] = one.streams * one.unit_bytes / one.seconds
    scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
    solution = (nonnegative_least_squares(rows / scale, np.ones(len(rows))) / scale).tolist()
    fit = _RoundsFit(alpha_s=solution[0], host_s=solution[1], s_per_byte=dict(zip(counts, solution[2:], strict=True)))
    return replace(fit, residual=root_mean_square(np.array([fit.error(one) for one in rounds])))


def nonnegative_least_squares(rows: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the x ≥ 0 with the smallest ‖rows · x − targets‖, `(n_columns,)`.

    This is algorithm 23.10 of Lawson & Hanson, Solving Least Squares Problems, as in SciPy's `nnls`. SciPy's function
    is not used, because importing `scipy.optimize` takes a third of a second during the first steps of a job.
    """
    solution = np.zeros(rows.shape[1])
    positive = np.zeros(rows.shape[1], dtype=bool)
    for _ in range(3 * rows.shape[1]):
        pull = np.where(positive, 0.0, rows.T @ (targets - rows @ solution))
        if pull.max() <= 1e-12 * np.abs(targets).sum():
            break
        positive[pull.argmax()] = True
        while True:
            free = np.zeros_like(solution)
            free[positive] = np.linalg.lstsq(rows[:, positive], targets, rcond=None)[0]
            below = positive & (free <= 0)
            if not below.any():
                break
            # Move `solution` towards `free` until the first component becomes zero.
            share = np.min(solution[below] / (solution[below] - free[below]))
            solution = solution + share * (free - solution)
            positive &= solution > 1e-15
        solution = free
    return solution


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSample:
    """Measured slow-down of computation by communication (LIBRA, above eq. 5).

    Attributes:
        alone_s: time of the computation without communication (LIBRA's b).
        seconds: time of the same computation during communication (LIBRA's g).
        threads: number of GPU threads that communicated (LIBRA's r).
    """

    alone_s: float
    seconds: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransmissionSample:
    """Measurement of one all-reduce on one stream (LIBRA, above eq. 6).

    Attributes:
        unit_bytes: size of the all-reduced tensor (LIBRA's c).
        seconds: time of the all-reduce, including the start-up time.
        threads: number of GPU threads that ran the all-reduce (LIBRA's r).
        overlapped: True if computation ran during the whole all-reduce (LIBRA's p), False if there was none (q).
    """

    unit_bytes: int
    seconds: float
    threads: int
    overlapped: bool


def fit_contention(
    compute: Sequence[ComputeSample],
    transmissions: Sequence[TransmissionSample],
    *,
    alpha_s: float,
    default_threads: int = 512,
) -> ContentionModel:
    """Fit LIBRA's contention model: how computation and communication slow each other down.

    Its three functions g, p and q (eq. 5-6) are fitted by least squares of relative errors.

    Args:
        compute: measurements of computation during communication.
        transmissions: measurements of all-reduces, with and without computation.
        alpha_s: start-up time of an all-reduce.
        default_threads: number of GPU threads of units (buckets) for which the plan has no number.

    Raises:
        TuningError: for one of the three functions, there are no measurements, all of them have the same number of GPU
            threads, or the relative error (root mean square) of the fit exceeds `MAX_RESIDUAL`.
    """
    _check_samples("computation", compute)
    overlapped = [sample for sample in transmissions if sample.overlapped]
    alone = [sample for sample in transmissions if not sample.overlapped]
    alpha_1, alpha_2, compute_residual = _fit_compute_speed(compute)
    overlapped_curve, overlapped_residual = _fit_rate_curve("transmission during computation", overlapped, alpha_s)
    alone_curve, alone_residual = _fit_rate_curve("transmission alone", alone, alpha_s)
    residuals = {
        "computation during communication (g)": compute_residual,
        "transmission during computation (p)": overlapped_residual,
        "transmission alone (q)": alone_residual,
    }
    worst = max(residuals, key=lambda name: residuals[name])
    check_residual(f"the model of the speed of {worst}", residuals[worst])
    return ContentionModel(
        alpha_1=alpha_1,
        alpha_2=alpha_2,
        overlapped=overlapped_curve,
        alone=alone_curve,
        default_threads=default_threads,
        residual=residuals[worst],
    )


def _check_samples(kind: str, samples: Sequence[ComputeSample] | Sequence[TransmissionSample]) -> None:
    n_counts = len({sample.threads for sample in samples})
    require(n_counts >= 2, f"samples of {kind}", "at least 2 different numbers of GPU threads", n_counts, TuningError)
    invalid = [sample.seconds for sample in samples if not (math.isfinite(sample.seconds) and sample.seconds > 0)]
    require(not invalid, f"a measured time of {kind}", "a positive, finite number of seconds", invalid[:1], TuningError)


def _fit_compute_speed(samples: Sequence[ComputeSample]) -> tuple[float, float, float]:
    """Fit how much communication slows down computation, `b / g = α1 − α2 · r` (LIBRA eq. 5).

    b / g is the duration of the computation alone, divided by its duration beside communication. r is the number of GPU
    threads that communicate. Return α1, α2 and the fit's relative error.
    """
    speeds = np.array([sample.alone_s / sample.seconds for sample in samples])
    threads = np.array([float(sample.threads) for sample in samples])
    rows = np.column_stack([1 / speeds, -threads / speeds])
    bounds = ([1e-3, 0.0], [1.2, math.inf])
    fit = scipy.optimize.least_squares(
        lambda x: rows @ x - 1, x0=[1.0, 1e-6], bounds=bounds, x_scale=[1.0, 1 / threads.max()]
    )
    return float(fit.x[0]), float(fit.x[1]), root_mean_square(fit.fun)


def _fit_rate_curve(kind: str, samples: Sequence[TransmissionSample], alpha_s: float) -> tuple[RateCurve, float]:
    """Fit the transmission rate as a function of GPU threads (LIBRA eq. 6). Return the curve and its relative error.

    The fitted parameters are γ1, γ2 / γ1 and γ3. Limiting γ2 / γ1 keeps the rate positive.
    """
    _check_samples(kind, samples)
    sizes = np.array([float(sample.unit_bytes) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    powers = np.array([float(sample.threads) for sample in samples]) ** GAMMA_4
    fastest = float((sizes / seconds).max())

    def errors(x: NDArray[np.float64]) -> NDArray[np.float64]:
        rates = fastest * math.exp(x[0]) * (1 - x[1] * np.exp(-math.exp(x[2]) * powers))
        return np.asarray((alpha_s + sizes / np.maximum(rates, 1e-12 * fastest)) / seconds - 1)

    best = min(
        (
            scipy.optimize.least_squares(errors, x0=[0.1, 0.9, log_gamma_3], bounds=([-3, 0, -12], [5, 0.999, 2]))
            for log_gamma_3 in (-6.0, -4.0, -2.5)  # Try several starting points, because the error is not convex in γ3.
        ),
        key=lambda fit: float(fit.cost),
    )
    gamma_1 = fastest * math.exp(best.x[0])
    curve = RateCurve(gamma_1=gamma_1, gamma_2=gamma_1 * float(best.x[1]), gamma_3=math.exp(best.x[2]))
    return curve, root_mean_square(best.fun)


def root_mean_square(errors: NDArray[np.float64]) -> float:
    """Return the root mean square of a fitted model's relative errors, which is its `residual`."""
    return float(np.sqrt(np.mean(errors**2)))
