"""Which arm gets the next trial: a sliding-window bandit with area-under-the-curve credit (AIACC § VI).

An arm's score is `AUC_t + C·sqrt(2·log2|H| / H_t)`: H the sliding window of the latest uses of all arms, H_t this
arm's uses in it. AUC_t is the area under a curve that goes up where a use found a new best and stays flat where it
did not, as a share of that under a curve that always goes up. An early win lifts the rest of the curve, so it counts
more: with n uses, oldest i = 1, `AUC_t = 2/(n(n+1)) · Σ (n + 1 - i)·V_i`. OpenTuner, which AIACC follows otherwise,
weighs a win by i, so that late ones count more; measurement prefers neither (docs/decisions/0106). What is long ago
is forgotten by the window. The area is kept up to date in O(1); the tests hold it against the drawn curve.

It is pure: it sees pairs of (arm, was it a new best) and nothing else.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from sirtaki.errors import TuningError


class Opening(Enum):
    """Who goes first among the arms that have no use in the window."""

    RANDOM = "random"  # the formula as printed: equal scores, so a matter of luck
    AS_GIVEN = "as_given"  # in the order of the arms: the most promising first (docs/decisions/0012)


@dataclass(slots=True)
class _Uses:
    """One arm's uses in the window."""

    count: int = 0  # n
    wins: int = 0  # Σ V_i, the height of the curve
    area: int = 0  # under it

    def push(self, won: bool) -> None:
        self.count += 1
        self.wins += won
        self.area += self.wins

    def evict_oldest(self, won: bool) -> None:
        self.area -= won * self.count  # it had lifted the curve at its own place and at all later ones
        self.count -= 1
        self.wins -= won


def window_for(budget_trials: int, n_arms: int) -> int:
    """A window that slides within the budget, and has room for every arm."""
    return max(n_arms, budget_trials // 2, 1)


class AUCBandit:
    """Scores arms by what they found lately and by how little they were tried.

    Args:
        arms: names, all different.
        window: uses that are remembered, of all arms together.
        exploration: C; AIACC uses 0.2.

    Raises:
        TuningError: names repeat, there are none, or the window is empty.
    """

    def __init__(self, arms: Sequence[str], *, window: int, exploration: float = 0.2) -> None:
        if not arms or len(set(arms)) != len(arms):
            raise TuningError(f"a bandit needs arms with different names, not {list(arms)}")
        if window < 1:
            raise TuningError(f"the window must hold at least one use, not {window}")
        self.window = window
        self.exploration = exploration
        self._history: deque[tuple[str, bool]] = deque()
        self._uses = {arm: _Uses() for arm in arms}

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms' names, in the order given."""
        return tuple(self._uses)

    def push(self, arm: str, *, was_best: bool) -> None:
        """One use of an arm; the oldest use leaves a full window."""
        if len(self._history) == self.window:
            oldest, won = self._history.popleft()
            self._uses[oldest].evict_oldest(won)
        self._history.append((arm, was_best))
        self._uses[arm].push(was_best)

    def uses(self, arm: str) -> int:
        """H_t: the arm's uses in the window."""
        return self._uses[arm].count

    def auc(self, arm: str) -> float:
        """AUC_t, from 0 (never a new best) to 1 (always); 0 for an arm outside the window."""
        uses = self._uses[arm]
        return 2.0 * uses.area / (uses.count * (uses.count + 1)) if uses.count else 0.0

    def score(self, arm: str) -> float:
        """Credit plus exploration; infinite for an arm without a use in the window."""
        uses = self._uses[arm].count
        if uses == 0:
            return math.inf
        return self.auc(arm) + self.exploration * math.sqrt(2.0 * math.log2(len(self._history)) / uses)

    def ranking(self, rng: np.random.Generator, *, opening: Opening = Opening.RANDOM) -> list[str]:
        """All arms, the highest score first; `rng` orders equal ones, `opening` those without a use."""
        lots = dict(zip(self._uses, rng.permutation(len(self._uses)).tolist(), strict=True))
        if opening is Opening.AS_GIVEN:
            lots.update({arm: place for place, arm in enumerate(self._uses) if self.uses(arm) == 0})
        return sorted(self._uses, key=lambda arm: (-self.score(arm), lots[arm]))
