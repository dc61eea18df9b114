"""Paired comparison: decide whether one setting is faster than another.

The caller measures both settings in alternating order (ABBA). A slower network or a busy machine then slows both
members of a pair, so that the ratio within a pair is what counts. The test is Wilcoxon's signed-rank test on the
logarithms of these ratios: a measurement counts by its rank and never by its size, so that no single outlier decides.

The comparison is judged at one or two numbers of pairs that are fixed in advance (group-sequential, Pocock). A test
after every pair would call chance results proved. Giving up early proves nothing, so it is possible at any pair from
the third one on (`GUESS_PAIRS`).

[Note: error rate] A setting that is as fast as the baseline is called faster in at most 3 % of all comparisons, both
looks together. `python -m bench.paired` shows this rate, and the power, for four kinds of noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sirtaki.errors import TuningError
from sirtaki.measures import Gain

FEWEST_PAIRS = 6
"""Pairs of the first look. Five pairs prove nothing: even five gains in a row happen by chance in 1 of 32 cases."""

FEWEST_PAIRS_KNOWN = 4
"""Pairs of the first look at a candidate that an earlier job has proved faster."""

ONLY_LOOK, FIRST_LOOK, LAST_LOOK = 0.02, 0.0158, 0.0105
"""One-sided error rates: of the only look, and of the first and the last of two.

The probability that six gains in a row happen by chance is 1 / 64 = 0.0156. The rates leave a margin below 3 % because
adjacent measurements of the same setting (ABBA) are correlated if a neighbour slows the host down in spells.
"""

GUESS_PAIRS, GUESS_RATE = 3, 0.125
"""Pairs and one-sided error rate of a guess that the candidate gains too little, which ends a comparison.

Three pairs suffice if the candidate is slower in each.
"""

UNSTEADY = 3.0
"""Standard errors by which the baseline must drift during the comparison to raise a doubt."""

SHARED_NOISE = 0.4
USUAL_NOISE, TIMES_NOISE = 0.15, 3.0
"""Limits on the noise of one measurement. Noise above `SHARED_NOISE` always raises a doubt. Noise above `USUAL_NOISE`
raises one if it is also more than `TIMES_NOISE` times `noise_before`."""

_Sent = TypeVar("_Sent")
_Received = TypeVar("_Received")


class Verdict(Enum):
    """Result of a comparison."""

    OPEN = "more pairs are needed"
    FASTER = "the candidate is proved faster"
    NOT_PROVED = "no gain is proved"
    SLOWER = "the candidate is clearly slower"
    FAILED = "one of the two settings could not be run"


@cache
def _tail(n_pairs: int) -> npt.NDArray[np.float64]:
    """Return P(T ≤ t), `(n (n + 1) / 2 + 1,)`, of the signed-rank statistic T if nothing differs. Exact."""
    ways = np.ones(1)
    for rank in range(1, n_pairs + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))  # without and with this rank among the positive ones
    return np.cumsum(ways) / 2.0**n_pairs


@cache
def _indices(n_pairs: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the indices i and j of all Walsh averages."""
    first, second = np.triu_indices(n_pairs)
    return first, second


def interval(leads: Sequence[float], rate: float) -> tuple[float, float, float]:
    """Return the Hodges–Lehmann estimate of the leads' centre, and the interval that the signed-rank test leaves.

    The estimate is the median of all Walsh averages (lead i + lead j) / 2, i ≤ j. The interval runs from the k-th
    smallest to the k-th largest of them, where k is the largest number with P(T ≤ k - 1) ≤ `rate` (Hollander, sections
    3.2 and 3.3). The test of no gain rejects at this rate exactly if the interval lies above 0.

    Args:
        leads: one number a pair.
        rate: probability that the centre lies below the interval; above it likewise.

    Returns:
        The estimate, the lower and the upper end. If there are too few pairs for this rate, the interval holds all
        Walsh averages, and the probability is 2 to the power of minus the number of pairs.
    """
    values = np.array(leads)
    first, second = _indices(len(values))
    walsh = np.sort((values[first] + values[second]) / 2.0)
    k = max(1, int(np.searchsorted(_tail(len(values)), rate, side="right")))
    return float(np.median(walsh)), float(walsh[k - 1]), float(walsh[-k])


def pairs_wanted(lead: float, noise: float, *, most: int) -> int:
    """Return how many pairs will probably prove a lead.

    Args:
        lead: logarithm of the expected ratio of times.
        noise: standard deviation of one measurement, as a share.
        most: largest result; the smallest one is `FEWEST_PAIRS`.
    """
    # Against normal noise a signed-rank test needs π / 3 times as many pairs as a test of the mean.
    half = statistics.NormalDist().inv_cdf(1.0 - FIRST_LOOK) * math.sqrt(2.0 * math.pi / 3.0) * noise
    return min(max(math.ceil((1.5 * half / lead) ** 2), FEWEST_PAIRS), most) if lead > 0.0 else most


@dataclass(slots=True, kw_only=True)
class PairedComparison:
    """Times of a baseline and of a candidate, pair by pair.

    Attributes:
        looks: numbers of pairs at which the comparison is judged; one or two, ascending, at least `fewest`.
        noise_before: standard deviation of one measurement before the comparison, as a share; None = not known.
        least_gain: share that the candidate must gain to be worth a change; 0 = any.
        earlier: gain of the same candidate over the same baseline that an earlier job has proved. It is pooled.
        baseline, candidate: logarithms of seconds, `(n_pairs,)`; infinite if the setting could not be run.

    Raises:
        TuningError: the looks are not one or two ascending numbers, or the first one is too small.
    """

    looks: tuple[int, ...]
    noise_before: float | None = None
    least_gain: float = 0.0
    earlier: Gain | None = None
    baseline: list[float] = field(default_factory=list)
    candidate: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        ascending = len(self.looks) in (1, 2) and self.looks[0] < (*self.looks, math.inf)[1]
        if not ascending or self.looks[0] < self.fewest:
            raise TuningError(
                f"a comparison must be judged at one or two ascending numbers of pairs from {self.fewest} on, "
                f"not at {self.looks}"
            )

    @classmethod
    def of(
        cls, baseline_s: Sequence[float], candidate_s: Sequence[float], *, looks: tuple[int, ...] = ()
    ) -> PairedComparison:
        """Compare finished measurements. With fewer than `FEWEST_PAIRS` pairs nothing is proved.

        Args:
            baseline_s: seconds of the baseline, one a pair.
            candidate_s: seconds of the candidate in the same pairs.
            looks: see the attribute; by default the comparison is judged once, with all pairs.
        """
        pairs = cls(looks=looks or (max(FEWEST_PAIRS, len(baseline_s)),))
        for one, other in zip(baseline_s, candidate_s, strict=True):
            pairs.add(one, other)
        return pairs

    def add(self, baseline_s: float, candidate_s: float) -> None:
        """Add a pair. A setting whose time is not a positive finite number counts as one that could not be run."""
        for log_s, seconds in ((self.baseline, baseline_s), (self.candidate, candidate_s)):
            log_s.append(math.log(seconds) if 0.0 < seconds < math.inf else math.inf)

    def run(
        self,
        measure_baseline: Callable[[], Generator[_Sent, _Received, float]],
        measure_candidate: Callable[[], Generator[_Sent, _Received, float]],
        *,
        candidate_first: bool = False,
    ) -> Generator[_Sent, _Received, Verdict]:
        """Measure both settings in alternating order until there is a verdict.

        Args:
            measure_baseline: makes a generator that returns the seconds of one measurement of the baseline.
            measure_candidate: the same for the candidate.
            candidate_first: measure the candidate first in the first pair.
        """
        while (verdict := self.verdict) is Verdict.OPEN:
            times_s = [math.inf, math.inf]
            for place in (1, 0) if candidate_first else (0, 1):
                times_s[place] = yield from (measure_candidate if place else measure_baseline)()
                if not 0.0 < times_s[place] < math.inf:
                    break
            self.add(*times_s)
            candidate_first = not candidate_first
        return verdict

    @property
    def fewest(self) -> int:
        """Pairs that a verdict of FASTER needs."""
        return FEWEST_PAIRS if self.earlier is None or not self.earlier.proved else FEWEST_PAIRS_KNOWN

    @property
    def n_pairs(self) -> int:
        """Number of pairs."""
        return len(self.candidate)

    @property
    def leads(self) -> list[float]:
        """Logarithm of baseline time over candidate time, `(n_pairs,)`."""
        return [before - after for before, after in zip(self.baseline, self.candidate, strict=True)]

    @property
    def failed(self) -> bool:
        """One of the two settings could not be run."""
        return math.inf in self.baseline or math.inf in self.candidate

    @property
    def noise(self) -> float:
        """Standard deviation of one measurement, as a share, estimated from the median deviation of the leads."""
        middle = statistics.median(self.leads)
        return statistics.median(abs(lead - middle) for lead in self.leads) / 0.6745 / math.sqrt(2.0)

    @property
    def gain(self) -> Gain:
        """Gain of the candidate over the baseline: Hodges–Lehmann estimate with the interval of the test.

        The interval holds the true gain with a probability of at least 96 % from `FEWEST_PAIRS` pairs on.
        """
        rate = ONLY_LOOK if len(self.looks) == 1 else FIRST_LOOK if self.n_pairs <= self.looks[0] else LAST_LOOK
        times, low, high = map(math.exp, interval(self.leads, rate))
        return Gain(times=times, low=low, high=high)

    @property
    def pooled(self) -> Gain:
        """The gain, pooled with the earlier job's."""
        return self.gain if self.earlier is None else self.gain.pooled(self.earlier)

    @property
    def drift(self) -> float:
        """Logarithm of the baseline's later times over its earlier times; 0 unless the change is clear."""
        half = len(self.baseline) // 2
        if half < 2:
            return 0.0
        early, late = self.baseline[:half], self.baseline[-half:]
        noise = max(self.noise_before or 0.0, statistics.stdev(early), statistics.stdev(late))
        drift = statistics.fmean(late) - statistics.fmean(early)
        return drift if abs(drift) > UNSTEADY * noise * math.sqrt(2.0 / half) else 0.0

    @property
    def doubt(self) -> str:
        """Reason why the measurements prove nothing although they seem to; empty if there is none."""
        limit = SHARED_NOISE
        if self.noise_before is not None:
            limit = min(limit, max(USUAL_NOISE, TIMES_NOISE * self.noise_before))
        if self.noise > limit:
            return f"measurements scatter by {100 * self.noise:.0f} %: others seem to use the host or the network"
        if self.drift and abs(self.drift) > math.log(self.gain.low):
            changed = f"{math.exp(abs(self.drift)):.2f}× {'slower' if self.drift > 0.0 else 'faster'}"
            return f"the default itself became {changed} while it was compared"
        return ""

    @property
    def proved(self) -> bool:
        """The candidate gains enough, more than chance explains, and there is no doubt."""
        if self.n_pairs < self.fewest:
            return False
        return self.gain.times > 1.0 + self.least_gain and self.pooled.proved and not self.doubt

    @property
    def verdict(self) -> Verdict:
        """Result with the pairs measured until now. FASTER is possible only at a look, or after the last look."""
        n, last = self.n_pairs, self.looks[-1]
        if self.failed:
            return Verdict.FAILED
        if (n in self.looks or n > last) and self.proved:
            return Verdict.FASTER
        if n < last and self._guessed_high > 1.0 + self.least_gain:
            return Verdict.OPEN
        return Verdict.SLOWER if self.gain.high < 1.0 else Verdict.NOT_PROVED

    @property
    def _guessed_high(self) -> float:
        """Upper end of the interval for guesses."""
        return math.inf if self.n_pairs < GUESS_PAIRS else math.exp(interval(self.leads, GUESS_RATE)[2])
