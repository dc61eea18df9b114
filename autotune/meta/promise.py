"""What an earlier job says of the setting that it has left, and whether this job's first iterations bear it out.

How much faster than the untuned default a setting is depends on the link and hardly on how busy the machine is; how
long both take depends on either. So a gain that differs counts at once, times only where they differ by more.
"""

import math
from dataclasses import dataclass

from .ledger import Setting

OTHER_GAIN = 1.25  # how many times as large or as small a gain may be on the same link
CONFIDENCE = 2.0  # standard errors by which it must be more than that
USUAL_MEASUREMENTS = 4  # that the earlier job's times rest on


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What that job measured.

    Attributes:
        exact_s: span with the setting.
        default_s: span with the untuned default.
        noise: standard deviation of one measured span, as a share of it.
        other_times: how many times as much or as little time both may take on the same link.
    """

    exact_s: float
    default_s: float
    noise: float = 0.0
    other_times: float = 1.5

    def broken_by(self, exact: Setting, default: Setting, *, noise: float) -> bool:
        """Whether the link is clearly another one than it was.

        Args:
            exact: what was measured of the setting here.
            default: of the default; the same object where that is the setting.
            noise: of one measured span here, as a share.
        """
        exact_ratio, default_ratio = exact.span_s / self.exact_s, default.span_s / self.default_s
        if not all(0.0 < ratio < math.inf for ratio in (exact_ratio, default_ratio)):
            return False
        of_exact, of_default = (
            math.hypot(self._error, noise / math.sqrt(len(one.spans_s))) for one in (exact, default)
        )
        times = [math.log(exact_ratio), math.log(default_ratio)]
        error = max(of_exact, of_default)
        least = min(abs(time) for time in times) if times[0] * times[1] > 0.0 else 0.0
        if least - CONFIDENCE * error > math.log(self.other_times):
            return True
        gained = abs(times[0] - times[1]) if exact is not default else 0.0
        return gained - CONFIDENCE * math.hypot(of_exact, of_default) > math.log(OTHER_GAIN)

    @property
    def _error(self) -> float:
        return self.noise / math.sqrt(USUAL_MEASUREMENTS)
