"""Paired comparison: decide whether one setting is faster than another.

The caller measures both settings in alternating order (ABBA). A slower network or a busy machine slows both
measurements of a pair, so the test uses the ratio within each pair. The test is Wilcoxon's signed-rank test on the
logarithms of these ratios. Only the rank of a ratio counts, not its size, so a single outlier cannot decide the result.

The test is applied at one or two numbers of pairs ("looks") that are fixed in advance (group-sequential test, Pocock).
A test after every pair would too often accept a chance result. A comparison may end without a proof after any pair from
the third one on (`GUESS_PAIRS`), because an early end without a proof accepts nothing.

[Note: error rate] A setting that is as fast as the baseline is called faster in at most 3 % of all comparisons, both
looks together. `python -m bench.paired` measures this rate, and the power, for four kinds of noise.
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

from sirtaki.errors import TuningError, require
from sirtaki.measures import Gain

FEWEST_PAIRS = 6
"""Minimum number of measured pairs (baseline, candidate) at which the test for a gain is applied.

Five pairs prove nothing: if both settings are equally fast, the candidate wins five times in a row in 1 of 32 cases.
"""

FEWEST_PAIRS_KNOWN = 4
"""Minimum number of measured pairs for a candidate that was proved faster in an earlier job."""

ONLY_LOOK, FIRST_LOOK, LAST_LOOK = 0.02, 0.0158, 0.0105
"""One-sided error rates of the signed-rank test.

`ONLY_LOOK` is the rate if the test is applied once. `FIRST_LOOK` and `LAST_LOOK` are the rates if it is applied twice.
The probability that six gains in a row happen by chance is 1 / 64 = 0.0156. The rates leave a margin below 3 % because
successive measurements are correlated if another job slows the host down for a while.
"""

GUESS_PAIRS, GUESS_RATE = 3, 0.125
"""Conditions for ending a comparison early because the candidate gains too little over the baseline.

They are the minimum number of measured pairs, and the one-sided error rate of the test.

Three pairs suffice if the candidate is slower in each of them.
"""

UNSTEADY = 3.0
"""Drift: change of the baseline's time during a comparison. It is significant from this many standard errors on."""

SHARED_NOISE = 0.4
USUAL_NOISE, TIMES_NOISE = 0.15, 3.0
"""Limits of the relative noise of one measurement, above which the result of a paired comparison is not trusted.

Noise above `SHARED_NOISE` is never trusted. Noise above `USUAL_NOISE` is not trusted if it also exceeds `TIMES_NOISE`
times the noise before the comparison (`PairedComparison.noise_before`).
"""

_Sent = TypeVar("_Sent")
_Received = TypeVar("_Received")


class Verdict(Enum):
    """Result of a paired comparison of a candidate setting with a baseline setting."""

    OPEN = "more pairs are needed"
    FASTER = "the candidate is proved faster"
    NOT_PROVED = "no gain is proved"
    SLOWER = "the candidate is clearly slower"
    FAILED = "one of the two settings could not be applied"


@cache
def _tail(n_pairs: int) -> npt.NDArray[np.float64]:
    """Return the exact P(T ≤ t) of Wilcoxon's signed-rank statistic T if both settings are equally fast.

    The shape is `(n (n + 1) / 2 + 1,)` for n pairs of measurements: one entry for each t from 0 on.
    """
    n_sign_patterns = np.ones(1)  # Entry t is the number of sign patterns with T = t.
    for rank in range(1, n_pairs + 1):  # Add the pair with this rank, with a negative or a positive sign.
        n_sign_patterns = np.pad(n_sign_patterns, (0, rank)) + np.pad(n_sign_patterns, (rank, 0))
    return np.cumsum(n_sign_patterns) / 2.0**n_pairs


@cache
def _indices(n_pairs: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the indices i and j, i ≤ j, of the two values in each Walsh average (value i + value j) / 2."""
    first, second = np.triu_indices(n_pairs)
    return first, second


def interval(leads: Sequence[float], rate: float) -> tuple[float, float, float]:
    """Return the Hodges–Lehmann estimate of a candidate's lead over a baseline, and its confidence interval.

    The interval is that of Wilcoxon's signed-rank test. The estimate is the median of all Walsh averages (lead i + lead
    j) / 2, i ≤ j. The interval is from the k-th smallest to the k-th largest Walsh average, where k is the largest
    number with P(T ≤ k - 1) ≤ `rate` (Hollander, sections 3.2 and 3.3). The test rejects "no gain" at this rate if and
    only if the interval is above 0.

    Args:
        leads: logarithm of (baseline time / candidate time) for each pair.
        rate: probability that the true centre is below the interval, and equally that it is above.

    Returns:
        The estimate, the lower and the upper limit. With too few pairs for this rate, the interval is the range of all
        Walsh averages, and the probability is 2^(-number of pairs) instead of `rate`.
    """
    values = np.array(leads)
    first, second = _indices(len(values))
    walsh = np.sort((values[first] + values[second]) / 2.0)
    k = max(1, int(np.searchsorted(_tail(len(values)), rate, side="right")))
    return float(np.median(walsh)), float(walsh[k - 1]), float(walsh[-k])


def pairs_wanted(lead: float, noise: float, *, most: int) -> int:
    """Estimate how many measured pairs will prove a candidate faster, from `FEWEST_PAIRS` to `most`.

    Args:
        lead: expected logarithm of (baseline time / candidate time).
        noise: relative standard deviation of one measurement.
        most: maximum number of pairs.
    """
    # With normal noise, a signed-rank test needs π / 3 times as many pairs as a test of the mean.
    half = statistics.NormalDist().inv_cdf(1.0 - FIRST_LOOK) * math.sqrt(2.0 * math.pi / 3.0) * noise
    return min(max(math.ceil((1.5 * half / lead) ** 2), FEWEST_PAIRS), most) if lead > 0.0 else most


@dataclass(slots=True, kw_only=True)
class PairedComparison:
    """Paired measurements of a baseline setting and a candidate setting, and the test whether the candidate is faster.

    Attributes:
        looks: numbers of pairs at which the test is applied: one or two numbers, ascending, at least `fewest`.
        noise_before: relative standard deviation of one measurement before the comparison; None = unknown.
        least_gain: minimum relative gain for which the candidate counts as faster; 0 = any gain.
        earlier: gain of this candidate over this baseline in an earlier job, which is pooled with the measured gain.
        baseline, candidate: measured times of both settings as logarithms of seconds, `(n_pairs,)`; infinite if the
            setting could not be applied.

    Raises:
        TuningError: `looks` are not one or two ascending numbers, or the first one is below `fewest`.
    """

    looks: tuple[int, ...]
    noise_before: float | None = None
    least_gain: float = 0.0
    earlier: Gain | None = None
    baseline: list[float] = field(default_factory=list)
    candidate: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        ascending = len(self.looks) in (1, 2) and self.looks[0] < (*self.looks, math.inf)[1]
        rule = f"one or two ascending numbers of at least {self.fewest}"
        require(ascending and self.looks[0] >= self.fewest, "looks", rule, self.looks, TuningError)

    @classmethod
    def of(
        cls, baseline_s: Sequence[float], candidate_s: Sequence[float], *, looks: tuple[int, ...] = ()
    ) -> PairedComparison:
        """Create a comparison of two settings from finished measurements.

        Fewer than `FEWEST_PAIRS` pairs prove nothing.

        Args:
            baseline_s: measured times of the baseline in seconds, `(n_pairs,)`.
            candidate_s: measured times of the candidate in seconds, `(n_pairs,)`.
            looks: numbers of pairs at which the test is applied. By default it is applied once, to all pairs.
        """
        pairs = cls(looks=looks or (max(FEWEST_PAIRS, len(baseline_s)),))
        for one, other in zip(baseline_s, candidate_s, strict=True):
            pairs.add(one, other)
        return pairs

    def add(self, baseline_s: float, candidate_s: float) -> None:
        """Add a pair of measured times, one of the baseline setting and one of the candidate setting.

        A time that is not a positive finite number means that the setting could not be applied.
        """
        for log_s, seconds in ((self.baseline, baseline_s), (self.candidate, candidate_s)):
            log_s.append(math.log(seconds) if 0.0 < seconds < math.inf else math.inf)

    def run(
        self,
        measure_baseline: Callable[[], Generator[_Sent, _Received, float]],
        measure_candidate: Callable[[], Generator[_Sent, _Received, float]],
        *,
        candidate_first: bool = False,
    ) -> Generator[_Sent, _Received, Verdict]:
        """Measure the baseline and the candidate setting in alternating order until the comparison has a result.

        Args:
            measure_baseline: generator function that measures the baseline once, and returns the seconds.
            measure_candidate: generator function that measures the candidate once, and returns the seconds.
            candidate_first: whether the candidate is measured first in the first pair.

        Returns:
            The verdict, as the generator's return value.
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
        """Return the minimum number of measured pairs that can prove the candidate faster than the baseline."""
        return FEWEST_PAIRS if self.earlier is None or not self.earlier.proved else FEWEST_PAIRS_KNOWN

    @property
    def n_pairs(self) -> int:
        """Return the number of measured pairs of one baseline time and one candidate time."""
        return len(self.candidate)

    @property
    def leads(self) -> list[float]:
        """Return the candidate's lead in each pair: log(baseline time / candidate time), `(n_pairs,)`."""
        return [before - after for before, after in zip(self.baseline, self.candidate, strict=True)]

    @property
    def failed(self) -> bool:
        """Return whether the baseline or the candidate setting could not be applied."""
        return math.inf in self.baseline or math.inf in self.candidate

    @property
    def noise(self) -> float:
        """Return the relative standard deviation of one measured time.

        It is estimated from the median deviation of the candidate's lead in each pair.
        """
        middle = statistics.median(self.leads)
        return statistics.median(abs(lead - middle) for lead in self.leads) / 0.6745 / math.sqrt(2.0)

    @property
    def gain(self) -> Gain:
        """Return the gain of the candidate over the baseline: Hodges–Lehmann estimate with confidence interval.

        From `FEWEST_PAIRS` pairs on, the interval contains the true gain with a probability of at least 96 %.
        """
        rate = ONLY_LOOK if len(self.looks) == 1 else FIRST_LOOK if self.n_pairs <= self.looks[0] else LAST_LOOK
        times, low, high = map(math.exp, interval(self.leads, rate))
        return Gain(times=times, low=low, high=high)

    @property
    def pooled(self) -> Gain:
        """Return the candidate's gain over the baseline, from this job's and the earlier job's (`earlier`) pairs."""
        return self.gain if self.earlier is None else self.gain.pooled(self.earlier)

    @property
    def drift(self) -> float:
        """Return how the baseline's time changed during the comparison: log(later times / earlier times).

        It is 0 unless the change is significant.
        """
        half = len(self.baseline) // 2
        if half < 2:
            return 0.0
        early, late = self.baseline[:half], self.baseline[-half:]
        noise = max(self.noise_before or 0.0, statistics.stdev(early), statistics.stdev(late))
        drift = statistics.fmean(late) - statistics.fmean(early)
        return drift if abs(drift) > UNSTEADY * noise * math.sqrt(2.0 / half) else 0.0

    @property
    def doubt(self) -> str:
        """Return the reason why the measurements cannot be trusted, in words; empty if they can be trusted."""
        limit = SHARED_NOISE
        if self.noise_before is not None:
            limit = min(limit, max(USUAL_NOISE, TIMES_NOISE * self.noise_before))
        if self.noise > limit:
            return f"measurements vary by {100 * self.noise:.0f} %: other jobs seem to use the host or the network"
        if self.drift and abs(self.drift) > math.log(self.gain.low):
            changed = f"{math.exp(abs(self.drift)):.2f}× {'slower' if self.drift > 0.0 else 'faster'}"
            return f"the default itself became {changed} during the comparison"
        return ""

    @property
    def proved(self) -> bool:
        """Return whether the candidate is proved faster than the baseline.

        Its gain must be large enough and statistically significant, and the measurements must be trusted (`doubt` is
        empty).
        """
        if self.n_pairs < self.fewest:
            return False
        return self.gain.times > 1.0 + self.least_gain and self.pooled.proved and not self.doubt

    @property
    def verdict(self) -> Verdict:
        """Return the comparison's result from the pairs measured so far.

        FASTER is possible only where the test is applied: at the numbers of pairs in `looks`, and from the largest one
        on.
        """
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
        """Return the upper end of the confidence interval of the candidate's gain, with the error rate `GUESS_RATE`.

        It is infinite if fewer than `GUESS_PAIRS` pairs (baseline, candidate) have been measured.
        """
        return math.inf if self.n_pairs < GUESS_PAIRS else math.exp(interval(self.leads, GUESS_RATE)[2])
