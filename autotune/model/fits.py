"""Models from measurements: α, β and the concurrency curve from probes, LIBRA's g, p and q from overlap samples.

A module of its own because fitting is where measured data meets the models' forms: every fit gives its residual, and
refuses with the reason where the form does not describe the data, since a plan from a wrong model is worse than none.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from sirtaki.errors import TuningError

from .contention import GAMMA_4, ContentionModel, RateCurve
from .link import LinkModel, LinkProbe

MAX_RESIDUAL = 0.25


def fit_link(probes: Iterable[LinkProbe], *, max_residual: float = MAX_RESIDUAL) -> LinkModel:
    """α and G(n) of `t = α + n · bytes / G(n)` by least squares of the relative errors, none negative.

    Probes of one size and number of streams count by their median. G between measured numbers of streams is
    interpolated, beyond the largest it is constant.

    Raises:
        TuningError: there are fewer than two sizes on one stream, the times do not grow with the size, or the
            relative error (root mean square) exceeds `max_residual`.
    """
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for probe in probes:
        groups[probe.streams, probe.unit_bytes].append(probe.seconds)
    points = {key: median(seconds) for key, seconds in sorted(groups.items())}
    if len([1 for streams, _ in points if streams == 1]) < 2:
        raise TuningError("α and β need probes of at least two sizes on one stream")
    counts = sorted({streams for streams, _ in points})
    rows = np.zeros((len(points), 1 + len(counts)))
    for row, ((streams, unit_bytes), seconds) in zip(rows, points.items(), strict=True):
        row[0] = 1 / seconds
        row[1 + counts.index(streams)] = streams * unit_bytes / seconds
    scale = rows.max(axis=0)
    solution = nnls(rows / scale, np.ones(len(rows)))[0] / scale
    alpha_s, s_per_byte = float(solution[0]), solution[1:]
    if not s_per_byte.min() > 0:
        worst = counts[int(s_per_byte.argmin())]
        raise TuningError(f"probes on {worst} stream(s) do not take longer for more bytes: no throughput can be fitted")
    errors = rows @ solution - 1
    residual = root_mean_square(errors)
    if residual > max_residual:
        streams, unit_bytes = list(points)[int(np.abs(errors).argmax())]
        raise TuningError(
            f"the α-β model misses the probes by {residual:.0%} (at most {max_residual:.0%} is trusted), most at "
            f"{unit_bytes} bytes on {streams} stream(s): {points[streams, unit_bytes]:.3g} s measured"
        )
    throughput = np.interp(range(1, counts[-1] + 1), counts, 1 / s_per_byte)
    return LinkModel(alpha_s=alpha_s, throughput=tuple(throughput.tolist()), residual=residual)


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
    max_residual: float = MAX_RESIDUAL,
) -> ContentionModel:
    """LIBRA's g, p and q (eq. 5-6) by least squares of the relative errors.

    Raises:
        TuningError: samples of a kind are missing or of one thread count only, or the relative error (root mean
            square) of one of the three fits exceeds `max_residual`.
    """
    _check_samples("computation", compute)
    overlapped = [sample for sample in transmissions if sample.overlapped]
    alone = [sample for sample in transmissions if not sample.overlapped]
    alpha_1, alpha_2, compute_residual = _fit_compute_speed(compute)
    overlapped_curve, overlapped_residual = _fit_rate_curve("overlapped transmission", overlapped, alpha_s)
    alone_curve, alone_residual = _fit_rate_curve("transmission alone", alone, alpha_s)
    residuals = {"g": compute_residual, "p": overlapped_residual, "q": alone_residual}
    worst = max(residuals, key=lambda name: residuals[name])
    if residuals[worst] > max_residual:
        raise TuningError(
            f"LIBRA's {worst} misses the samples by {residuals[worst]:.0%}; at most {max_residual:.0%} is trusted"
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
    fit = least_squares(lambda x: rows @ x - 1, x0=[1.0, 1e-6], bounds=bounds, x_scale=[1.0, 1 / threads.max()])
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
            least_squares(errors, x0=[0.1, 0.9, log_gamma_3], bounds=([-3, 0, -12], [5, 0.999, 2]))
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
