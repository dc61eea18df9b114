"""What has been measured, setting by setting, and when one setting is better than another beyond the noise."""

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

from ..knobs import Knobs
from ..trial import Trial, TrialStatus

CLEAR = 2.0  # standard errors between two settings that are told apart
PRIOR_NOISE = 0.05  # what a network's spans usually scatter, until this one's has been seen
_PRIOR_WEIGHT = 3  # in repeated measurements
_OUTLIER = 2.5  # standard deviations from which on a difference counts as no larger


@dataclass(slots=True, kw_only=True)
class Setting:
    """One setting's measurements.

    Attributes:
        knobs: the setting.
        arm: who proposed it first.
        spans_s: all its measured spans, `(n_measured,)`; infinite where it could not be run.
    """

    knobs: Knobs
    arm: str
    spans_s: list[float] = field(default_factory=list)

    @property
    def span_s(self) -> float:
        """Median of the means of all pairs of measured spans; infinite if there are none or one failed.

        This (Hodges and Lehmann's estimate) takes outliers like the median, and needs a third fewer measurements.
        """
        if not self.spans_s or self.failed:
            return math.inf
        return statistics.median((a + b) / 2 for a, b in combinations_with_replacement(self.spans_s, 2))

    @property
    def spread_s(self) -> float:
        """Median absolute deviation of the measured spans; 0 for a single one."""
        centre = self.span_s
        return 0.0 if math.isinf(centre) else statistics.median(abs(span - centre) for span in self.spans_s)

    @property
    def failed(self) -> bool:
        """It could not be run."""
        return any(math.isinf(span) for span in self.spans_s)

    def as_trial(self, *, arm: str, knobs: Knobs, status: TrialStatus, was_best: bool) -> Trial:
        """All measurements of the setting as one trial."""
        return Trial(
            arm=arm,
            knobs=knobs,
            iterations=len(self.spans_s),
            span_s=self.span_s,
            noise_s=self.spread_s,
            status=TrialStatus.FAILED if self.failed else status,
            was_best=was_best,
        )


class Ledger:
    """All settings measured so far, and the noise of one measurement.

    Args:
        identity: knobs with equal identity are one setting (say, because they expand to the same plan).
    """

    def __init__(self, *, identity: Callable[[Knobs], Hashable]) -> None:
        self._identity = identity
        self._settings: dict[Hashable, Setting] = {}
        self._differences: list[float] = []

    def __len__(self) -> int:
        return len(self._settings)

    def __getitem__(self, knobs: Knobs) -> Setting:
        return self._settings[self._identity(knobs)]

    def find(self, knobs: Knobs) -> Setting | None:
        """The setting that these knobs stand for, if it has been measured."""
        return self._settings.get(self._identity(knobs))

    def add(self, knobs: Knobs, *, arm: str, spans_s: Sequence[float], repeats: bool = True) -> Setting:
        """Enters measured spans.

        Args:
            knobs: what ran.
            arm: who proposed them; kept if the setting is new.
            spans_s: measured spans, `(n,)`; one that is not a positive number counts as failed.
            repeats: the spans are measurements of their own, from which the noise can be learnt.
        """
        setting = self._settings.setdefault(self._identity(knobs), Setting(knobs=knobs, arm=arm))
        for span in spans_s:
            valid = span if math.isfinite(span) and span > 0.0 else math.inf
            if repeats and setting.spans_s and math.isfinite(valid) and not setting.failed:
                self._differences.append(abs(math.log(valid / setting.spans_s[-1])))
            setting.spans_s.append(valid)
        return setting

    def ranked(self) -> list[Setting]:
        """All settings that ran, the fastest first."""
        return sorted(
            (setting for setting in self._settings.values() if not setting.failed), key=lambda setting: setting.span_s
        )

    @property
    def noise(self) -> float:
        """Standard deviation of one measured span, as a share of it.

        From the differences between successive measurements of the same setting, of which outliers are cut to size;
        mixed with `PRIOR_NOISE` while there are few.
        """
        n = len(self._differences)
        # Of normal deviates the median size is 0.6745 standard deviations.
        longest = _OUTLIER * statistics.median(self._differences) / 0.6745 if n else 0.0
        squares = sum(min(difference, longest) ** 2 / 2.0 for difference in self._differences)
        return math.sqrt((_PRIOR_WEIGHT * PRIOR_NOISE**2 + squares) / (_PRIOR_WEIGHT + n))

    def at_stake(self, first: Setting, second: Setting) -> float:
        """Share of the span that is lost on average by taking `first` for the faster one, as it seems to be."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0
        error, lead = self._error(first, second), math.log(second.span_s / first.span_s)
        luck = statistics.NormalDist()
        return error * luck.pdf(lead / error) - lead * luck.cdf(-lead / error)

    def _error(self, first: Setting, second: Setting) -> float:
        """Standard error of the difference between two settings' logarithms."""
        return self.noise * math.sqrt(1.0 / len(first.spans_s) + 1.0 / len(second.spans_s))

    def lead(self, first: Setting, second: Setting) -> float:
        """By how many standard errors `first` is faster than `second`; negative if it is slower."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0 if first.span_s == second.span_s else math.copysign(math.inf, second.span_s - first.span_s)
        return math.log(second.span_s / first.span_s) / self._error(first, second)
