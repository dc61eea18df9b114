"""A warm-up session without ranks: made-up times, and a log of all assignments."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from sirtaki.autotune.arms.techniques import GridArm
from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace
from sirtaki.autotune.meta.session import Assignment, Purpose, Remembered, SessionResult, TuningSession
from sirtaki.autotune.trial import Arm, Proposal, Trial
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.measures import Gain

SPACE = KnobSpace(
    routes=((TransportKind.GLOO, Algorithm.FLAT),), unit_bytes=(MIB, 64 * MIB), streams=(1, 2, 3, 4, 6, 8)
)
DEFAULT = Knobs(unit_bytes=32 * MIB, streams=1, transport=TransportKind.GLOO)
BEST = Knobs(unit_bytes=4 * MIB, streams=4, transport=TransportKind.GLOO)
OUTSIDE = Knobs(unit_bytes=4 * MIB, streams=4, transport=TransportKind.MPI)


def landscape(knobs: Knobs) -> float:
    """Return the communication time of a setting in seconds: shortest at BEST, and 2.3 times as long at DEFAULT."""
    return 0.1 * (1.0 + 0.1 * math.log2(knobs.unit_bytes / (4 * MIB)) ** 2 + 0.1 * math.log2(knobs.streams / 4) ** 2)


class Job:
    """Runs a session to its end, or for some records, like the training loop, and logs all assignments."""

    def __init__(
        self,
        session: TuningSession,
        *,
        span_of: Callable[[Knobs], float] = landscape,
        noise: float = 0.0,
        seed: int = 0,
        search_with: Arm | None = None,
    ) -> None:
        self.session = session
        self._search_with = search_with or ListArm()
        self.assignments: list[Assignment] = []
        self.span_of = span_of
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def run(self, records: int = 10_000) -> "Job":
        for _ in range(records):
            if self.session.done:
                break
            now = self.session.assignment
            if now.purpose is Purpose.SEARCH:
                self.session.begin_search(self._search_with, space=SPACE)
                continue
            self.assignments.append(now)
            noise = np.exp(self._noise * self._rng.standard_normal(now.measured_iterations))
            self.session.record([self.span_of(now.knobs) * factor for factor in noise.tolist()])
        return self

    @property
    def result(self) -> SessionResult:
        return self.session.result

    @property
    def iterations(self) -> int:
        return sum(now.discarded_iterations + now.measured_iterations for now in self.assignments)

    def run_for(self, purpose: Purpose) -> list[Knobs]:
        return [now.knobs for now in self.assignments if now.purpose is purpose]


class ListArm:
    """An arm that proposes given knobs in turn, independent of results, and records the results."""

    name = "list"

    def __init__(self, *proposals: Knobs | Proposal) -> None:
        self._left = [p if isinstance(p, Proposal) else Proposal(arm=self.name, knobs=p) for p in proposals]
        self.told: list[Trial] = []
        self.asked = 0

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        self.asked += 1
        now, self._left = self._left[:n], self._left[n:]
        return now

    def tell(self, trials: Sequence[Trial]) -> None:
        self.told.extend(trials)


class Believer(ListArm):
    """An arm whose surrogate predicts that one setting is the fastest."""

    def __init__(self, favourite: Knobs, *proposals: Knobs) -> None:
        super().__init__(*proposals)
        self._favourite = favourite

    def expected_span_s(self, knobs: Knobs) -> float | None:
        return 0.01 if knobs == self._favourite else 1.0


class Sure(ListArm):
    """An arm that predicts a fixed remaining improvement."""

    def __init__(self, expected: float, *proposals: Knobs) -> None:
        super().__init__(*proposals)
        self._expected = expected

    def expected_improvement(self) -> float | None:
        return self._expected


def session(arm: Arm | None = None, **options: object) -> TuningSession:
    arguments = {
        "space": SPACE,
        "default": DEFAULT,
        "arm": arm or GridArm(SPACE),
        "rng": np.random.default_rng(0),
        "refine": False,
    }
    return TuningSession(**{**arguments, **options})  # type: ignore[arg-type]


def remembered(knobs: Knobs, *, times: float = 1.0, proved: bool = True) -> Remembered:
    """Return the setting of an earlier job whose times were `times` as long as those of `landscape`."""
    best_s, default_s = times * landscape(knobs), times * landscape(DEFAULT)
    ratio = default_s / best_s
    gain = Gain(times=ratio, low=0.99 * ratio, high=1.01 * ratio) if proved and ratio > 1.0 else None
    return Remembered(knobs=knobs, best_s=best_s, default_s=default_s, gain=gain)


def streams(count: int) -> Knobs:
    return DEFAULT.but(streams=count)
