"""Models of links and of contention, fitted to measurements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import scipy
from numpy.typing import NDArray

from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel

GAMMA_4 = 0.6  # LIBRA, below eq. (6): an empirical value, not fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Bytes per second as a function of the threads r, with diminishing returns (LIBRA eq. 6).

    The bytes are gradient bytes: the ring's factor 2 (N − 1) / N in ĉ is part of the rate.
    """

    gamma_1: float
    gamma_2: float
    gamma_3: float

    def __post_init__(self) -> None:
        if self.gamma_1 <= 0 or not 0 <= self.gamma_2 <= self.gamma_1 or self.gamma_3 < 0:
            raise TuningError(f"a rate curve needs γ1 > 0, 0 ≤ γ2 ≤ γ1 and γ3 ≥ 0, not {self}")

    def bytes_per_s(self, threads: int) -> float:
        """The denominator of eq. (6)."""
        return self.gamma_1 - self.gamma_2 * math.exp(-self.gamma_3 * threads**GAMMA_4)

    def seconds(self, unit_bytes: float, threads: int) -> float:
        """p(c, r) or q(c, r), eq. (6)."""
        return unit_bytes / self.bytes_per_s(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionModel:
    """Communication with r threads beside computation.

    Attributes:
        alpha_1: eq. (5), the share of compute speed left as r → 0.
        alpha_2: eq. (5), the share lost with each thread.
        overlapped: p, the transmission rate beside computation.
        alone: q, the transmission rate with nothing beside it.
        default_threads: r of a unit that names none.
        residual: relative error (root mean square) of the fit it came from; 0.0 for a description.
    """

    alpha_1: float
    alpha_2: float
    overlapped: RateCurve
    alone: RateCurve
    default_threads: int = 512
    residual: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha_1 <= 1.2 or self.alpha_2 < 0:
            raise TuningError(f"contention needs 0 < α1 ≤ 1.2 and α2 ≥ 0, not {self.alpha_1} and {self.alpha_2}")

    def compute_speed(self, threads: float) -> float:
        """Share b / g(b, r) of the undisturbed speed, eq. (5), never below a twentieth.

        The straight line of eq. (5) would reach zero, which no GPU scheduler does.
        """
        return max(self.alpha_1 - self.alpha_2 * threads, 0.05)

    def rescaled(self, *, from_ranks: int, to_ranks: int) -> ContentionModel:
        """The same GPUs in a ring of another size: ĉ ∝ (N − 1) / N (eq. 4); the computation does not notice."""
        if min(from_ranks, to_ranks) < 2:
            raise TuningError(f"a ring has at least two ranks: cannot go from {from_ranks} to {to_ranks}")
        volume = (to_ranks - 1) / (from_ranks - 1) * from_ranks / to_ranks
        overlapped, alone = (
            RateCurve(gamma_1=curve.gamma_1 / volume, gamma_2=curve.gamma_2 / volume, gamma_3=curve.gamma_3)
            for curve in (self.overlapped, self.alone)
        )
        return replace(self, overlapped=overlapped, alone=alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """Equal all-reduces, as many on each of `streams` streams, all submitted at once.

    Several in a row show the pace that an iteration's units keep; a single one profits from whatever credit an idle
    link grants (shapers and clouds let short bursts pass).

    Attributes:
        unit_bytes: size of each.
        streams: that work side by side.
        seconds: from the start until the last was done.
        rounds: all-reduces on each stream.
        busy: processors that each rank has kept busy meanwhile; None = not measured.
    """

    unit_bytes: int
    streams: int
    seconds: float
    rounds: int = 1
    busy: float | None = None

    def __post_init__(self) -> None:
        positive = min(self.unit_bytes, self.streams, self.rounds) >= 1
        if not (positive and math.isfinite(self.seconds) and self.seconds > 0):
            raise TuningError(f"a probe needs positive bytes, streams, rounds and seconds, not {self}")

    @property
    def round_s(self) -> float:
        """Seconds that one all-reduce on each stream took."""
        return self.seconds / self.rounds


MAX_RESIDUAL = 0.25
LEAST_BUSY = 0.02


def fit_link(probes: Sequence[LinkProbe]) -> LinkModel:
    """α, G(n) and processor time o of `t = α + n · max(o, bytes / G(n))` by least squares of the relative errors.

    t is the time of a round; no parameter is negative. Probes of one shape count by their median. Between two measured
    numbers of streams each stream carries what it does with fewer, until they carry together what they do with more: so
    flows behave that each have a cap, on a link that some of them fill. Beyond the largest number G is constant.

    Raises:
        TuningError: there are fewer than two sizes on one stream, the times do not grow with the size, or the
            relative error (root mean square) exceeds `MAX_RESIDUAL`.
    """
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for probe in probes:
        groups[probe.streams, probe.unit_bytes].append(probe.round_s)
    rounds = [_Round(*shape, seconds=median(seconds)) for shape, seconds in sorted(groups.items())]
    if len([1 for one in rounds if one.streams == 1]) < 2:
        raise TuningError("α and β need probes of at least two sizes on one stream")
    fits = [_fit_rounds(rounds, on_host) for on_host in _possibly_on_host(rounds)]
    fit = min(fits, key=lambda fit: round(fit.residual, 6))  # of equals the one with the fewest rounds on the host
    if not min(fit.s_per_byte.values()) > 0:
        worst_count = min(fit.s_per_byte, key=lambda streams: fit.s_per_byte[streams])
        raise TuningError(
            f"probes on {worst_count} stream(s) do not take longer for more bytes: no throughput can be fitted"
        )
    if fit.residual > MAX_RESIDUAL:
        worst = max(rounds, key=lambda one: abs(fit.error(one)))
        raise TuningError(
            f"the α-β model misses the probes by {fit.residual:.0%} (at most {MAX_RESIDUAL:.0%} is trusted), most at "
            f"{worst.unit_bytes} bytes on {worst.streams} stream(s): {worst.seconds:.3g} s measured"
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
    """Bytes a second of so many streams, by what some numbers of them were measured to carry, ascending."""
    if count in rates:
        return rates[count]
    fewer, more = max(each for each in rates if each < count), min(each for each in rates if each > count)
    if rates[more] < rates[fewer]:
        return rates[fewer] + (rates[more] - rates[fewer]) * (count - fewer) / (more - fewer)
    return min(rates[fewer] * count / fewer, rates[more])


def _busy(probes: Sequence[LinkProbe]) -> float:
    """While one all-reduce of the largest size that was probed is under way; 1 where it was not measured."""
    largest = max(probe.unit_bytes for probe in probes)
    known = [probe.busy for probe in probes if probe.busy is not None and probe.unit_bytes == largest]
    return min(1.0, max(LEAST_BUSY, median(known))) if known else 1.0


@dataclass(frozen=True, slots=True)
class _Round:
    """One all-reduce on each stream, as probed."""

    streams: int
    unit_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundsFit:
    """Parameters of `t = α + n · max(o, bytes · s[n])`, and how far off they are."""

    alpha_s: float
    host_s: float
    s_per_byte: dict[int, float]  # by number of streams, ascending
    residual: float = 0.0

    def error(self, one: _Round) -> float:
        per_unit_s = max(self.host_s, one.unit_bytes * self.s_per_byte[one.streams])
        return (self.alpha_s + one.streams * per_unit_s) / one.seconds - 1


def _possibly_on_host(rounds: Sequence[_Round]) -> Iterator[frozenset[_Round]]:
    """Sets of rounds that may have waited for the processor instead of the link, the empty one first.

    Where the processor is what is short, units that would be shorter on the link are, too; so the sets grow in the
    order of that time. The largest unit on each number of streams is the link's: else nothing would tell its rate. On
    one stream alone the processor's time cannot be told from α.
    """
    largest = {one.streams: one for one in rounds}  # ascending, so the last one stays
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
    """The fit if these rounds wait for the processor and all others for the link."""
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
    """The x ≥ 0 that minimises ‖rows · x − targets‖, `(n_columns,)`.

    Lawson & Hanson, Solving Least Squares Problems, algorithm 23.10: what SciPy's `nnls` does, without the third of a
    second that importing `scipy.optimize` would cost the first steps of a job.
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
            # As far as the first of them allows, which is zero from then on.
            share = np.min(solution[below] / (solution[below] - free[below]))
            solution = solution + share * (free - solution)
            positive &= solution > 1e-15
        solution = free
    return solution


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSample:
    """Computation beside communication (LIBRA, above eq. 5).

    Attributes:
        alone_s: the computation's time without communication (b).
        seconds: its time beside communication (g).
        threads: of the communication (r).
    """

    alone_s: float
    seconds: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransmissionSample:
    """One all-reduce on one stream (LIBRA, above eq. 6).

    Attributes:
        unit_bytes: its size (c).
        seconds: its time with the start-up.
        threads: r.
        overlapped: whether computation ran beside it all the time (p) or not at all (q).
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
    """LIBRA's g, p and q (eq. 5-6) by least squares of the relative errors.

    Raises:
        TuningError: samples of a kind are missing or of one thread count only, or the relative error (root mean
            square) of one of the three fits exceeds `MAX_RESIDUAL`.
    """
    _check_samples("computation", compute)
    overlapped = [sample for sample in transmissions if sample.overlapped]
    alone = [sample for sample in transmissions if not sample.overlapped]
    alpha_1, alpha_2, compute_residual = _fit_compute_speed(compute)
    overlapped_curve, overlapped_residual = _fit_rate_curve("overlapped transmission", overlapped, alpha_s)
    alone_curve, alone_residual = _fit_rate_curve("transmission alone", alone, alpha_s)
    residuals = {"g": compute_residual, "p": overlapped_residual, "q": alone_residual}
    worst = max(residuals, key=lambda name: residuals[name])
    if residuals[worst] > MAX_RESIDUAL:
        raise TuningError(
            f"LIBRA's {worst} misses the samples by {residuals[worst]:.0%}; at most {MAX_RESIDUAL:.0%} is trusted"
        )
    return ContentionModel(
        alpha_1=alpha_1,
        alpha_2=alpha_2,
        overlapped=overlapped_curve,
        alone=alone_curve,
        default_threads=default_threads,
        residual=residuals[worst],
    )


def _check_samples(kind: str, samples: Sequence[ComputeSample] | Sequence[TransmissionSample]) -> None:
    if len({sample.threads for sample in samples}) < 2:
        raise TuningError(f"contention needs samples of {kind} with at least two thread counts")
    if not all(math.isfinite(sample.seconds) and sample.seconds > 0 for sample in samples):
        raise TuningError(f"samples of {kind} must take a positive time")


def _fit_compute_speed(samples: Sequence[ComputeSample]) -> tuple[float, float, float]:
    """α1, α2 and the residual of `b / g = α1 − α2 · r` (eq. 5)."""
    speeds = np.array([sample.alone_s / sample.seconds for sample in samples])
    threads = np.array([float(sample.threads) for sample in samples])
    rows = np.column_stack([1 / speeds, -threads / speeds])
    bounds = ([1e-3, 0.0], [1.2, math.inf])
    fit = scipy.optimize.least_squares(
        lambda x: rows @ x - 1, x0=[1.0, 1e-6], bounds=bounds, x_scale=[1.0, 1 / threads.max()]
    )
    return float(fit.x[0]), float(fit.x[1]), root_mean_square(fit.fun)


def _fit_rate_curve(kind: str, samples: Sequence[TransmissionSample], alpha_s: float) -> tuple[RateCurve, float]:
    """γ1 to γ3 and the residual of eq. (6); γ2 as its share of γ1, which keeps the rate positive."""
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
            for log_gamma_3 in (-6.0, -4.0, -2.5)  # the curve's bend is not convex: begin on both sides of it
        ),
        key=lambda fit: float(fit.cost),
    )
    gamma_1 = fastest * math.exp(best.x[0])
    curve = RateCurve(gamma_1=gamma_1, gamma_2=gamma_1 * float(best.x[1]), gamma_3=math.exp(best.x[2]))
    return curve, root_mean_square(best.fun)


def root_mean_square(errors: NDArray[np.float64]) -> float:
    """The residual that all fits report."""
    return float(np.sqrt(np.mean(errors**2)))
