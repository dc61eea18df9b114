"""Multi-armed bandit that chooses which search method (arm) proposes the next setting to measure.

Arms are scored as in AIACC (section VI) and OpenTuner: by the area under the curve (AUC) of new best settings, over a
sliding window of recent uses.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, islice, zip_longest
from typing import Any, TypeVar

import numpy as np

from sirtaki.errors import TuningError, in_a_line, require
from sirtaki.measures import counted

from ..arms.planners import Planner
from ..arms.techniques import OUR_ARMS, CompressorArm, NcclArm, make_arm, third_party_arms
from ..knobs import Knobs, KnobSpace
from ..trial import Arm, Proposal, Trial


def window_for(budget_trials: int, n_arms: int) -> int:
    """Return how many recent trials the bandit uses to score search methods (arms).

    This is half of the planned trials, and at least the number of arms.
    """
    return max(n_arms, budget_trials // 2, 1)


EXPLORATION = 0.2
"""Weight of the exploration term in an arm's score, which favours arms that were rarely used.

It is AIACC's C, with AIACC's value.
"""


class AUCBandit:
    """Multi-armed bandit that scores search methods (arms), so that the most promising one proposes the next setting.

    A score is the sum of two terms: the credit, which is large if the arm's recent proposals were often the fastest so
    far, and the exploration term, which is large if the arm was rarely used.

    Args:
        arms: names of the arms, without duplicates.
        window: number of most recent uses, of all arms together, from which scores are computed.

    Raises:
        TuningError: `arms` is empty or has duplicates, or `window` is below 1.
    """

    def __init__(self, arms: Sequence[str], *, window: int) -> None:
        require(arms and len(set(arms)) == len(arms), "arms", "at least one name, and no name twice", arms, TuningError)
        require(window >= 1, "window", "at least 1", window, TuningError)
        self.arms = tuple(arms)
        self._uses: deque[tuple[str, bool]] = deque(maxlen=window)

    def push(self, arm: str, *, was_best: bool) -> None:
        """Add a use of a search method (arm) to the window of recent uses. A full window drops its oldest use.

        Args:
            arm: name of the arm.
            was_best: whether the proposed setting was faster than all settings measured before, by more than the noise.
        """
        self._uses.append((arm, was_best))

    def uses(self, arm: str) -> int:
        """Return how often the search method (arm) was used in the window of recent uses (AIACC's H_t)."""
        return sum(used == arm for used, _ in self._uses)

    def auc(self, arm: str) -> float:
        """Return a search method's (arm's) credit: how often its recent proposals were the fastest so far (AUC_t).

        It is the area under a curve over the arm's recent uses, which rises by one with each new fastest setting. The
        area is normalised: 1 if each use gave a new fastest setting, 0 if none did or if the arm was not used recently.
        """
        heights = list(accumulate(was_best for used, was_best in self._uses if used == arm))
        return 2.0 * sum(heights) / (len(heights) * (len(heights) + 1)) if heights else 0.0

    def score(self, arm: str) -> float:
        """Return the score of a search method (arm): its credit plus the exploration term for rarely used arms.

        The score is infinite for an arm without a use in the window of recent uses.
        """
        uses = self.uses(arm)
        if uses == 0:
            return math.inf
        return self.auc(arm) + EXPLORATION * math.sqrt(2.0 * math.log2(len(self._uses)) / uses)

    def ranking(self, rng: np.random.Generator, *, as_given: bool = False) -> list[str]:
        """Return the names of all search methods (arms) in descending order of their scores.

        Args:
            rng: random generator that orders arms with equal scores.
            as_given: whether arms without a recent use are in the order of the attribute `arms`. Otherwise their order
                is random.
        """
        tie_breaks = dict(zip(self.arms, rng.permutation(len(self.arms)).tolist(), strict=True))
        if as_given:
            tie_breaks |= {arm: place for place, arm in enumerate(self.arms) if self.uses(arm) == 0}
        return sorted(self.arms, key=lambda arm: (-self.score(arm), tie_breaks[arm]))


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SCREENED = 8
"""Number of settings that `BanditArm` asks of an arm in order to run one: that with the largest predicted gain."""

MOST_PROPOSALS = 100
"""Maximum number of settings that `BanditArm` reads from an arm's `ask`, which may return an endless generator."""

LEAST_PROMISE = 0.001
"""Minimum expected gain of a proposed setting, as a fraction of the communication time.

Settings with less are not run.
"""


class BanditArm:
    """Search method (arm) that combines several others: a bandit chooses the one that proposes the next setting.

    Arms are asked in the order of their scores. An arm without proposals is skipped. That does not count as a use. The
    result of each trial is sent to all arms, and the arm named by `Trial.arm` gets the credit. Trials of the default
    and of stored settings give no credit. An arm that raises or returns an invalid answer is removed, because an error
    in a search method must not end a training job.

    Proposals that were not run are kept, also those beyond the requested number. They are used, the oldest first, when
    their arm has no new proposal.

    Args:
        arms: arms with distinct names, the most promising first.
        rng: random generator that orders arms with equal scores.
        window: number of recent uses of arms from which scores are computed.
        as_given: whether unused arms are asked in the order of `arms`. Otherwise their order is random, as in AIACC.
        doubted: function that returns whether trials have contradicted the performance model. Initially, arms search
            only the settings that this model favours.
        wider: function that creates arms over the whole space. Once `doubted` returns True, they replace the arms of
            the same names.
        where: function that returns the position in training, for the log line about a failed arm.
    """

    name = "bandit"

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        rng: np.random.Generator,
        window: int,
        as_given: bool = False,
        doubted: Callable[[], bool] | None = None,
        wider: Callable[[], Sequence[Arm]] | None = None,
        where: Callable[[], str] = str,
    ) -> None:
        self.bandit = AUCBandit([arm.name for arm in arms], window=window)
        self._arms = {arm.name: arm for arm in arms}
        self._rng = rng
        self._as_given = as_given
        self._doubted, self._wider, self._where = doubted, wider, where
        self._trials: list[Trial] = []
        self._asked: set[str] = set()
        self._unrun: dict[str, dict[Knobs, Proposal]] = {name: {} for name in self._arms}
        self._measured: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return up to `n` proposed settings.

        For `n` = 1, it is a proposal of the search method (arm) with the highest score that has one. For more, the
        result has one proposal of each arm by descending score, then a second one of each arm, and so on.
        """
        ranking = self.bandit.ranking(self._rng, as_given=self._as_given)
        if n == 1:
            return next((good[:1] for name in ranking if (good := self._screen(self._ask_arm(name, SCREENED)))), [])
        rounds = zip_longest(*(self._ask_arm(name, n) for name in ranking))
        return [proposal for one_each in rounds for proposal in one_each if proposal is not None][:n]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Credit the search methods (arms) that proposed the trials' settings, then send the trials to all arms.

        If trials have contradicted the performance model that narrowed the space, replace the arms by arms that search
        the whole space.
        """
        for trial in trials:
            if trial.arm in self.bandit.arms:
                self.bandit.push(trial.arm, was_best=trial.was_best)
        self._trials += trials
        self._measured.update(trial.knobs for trial in trials)
        for name in list(self._arms):
            self._try(name, lambda arm: arm.tell(trials), None)
        if self._wider is not None and self._doubted is not None and self._doubted():
            self._widen(self._wider())
            self._wider = None

    def _widen(self, arms: Sequence[Arm]) -> None:
        """Replace search methods (arms) by new ones with the same names, and send the new ones all earlier trials."""
        for arm in arms:
            if arm.name in self._arms:
                self._arms[arm.name] = arm
                self._try(arm.name, lambda arm: arm.tell(self._trials), None)

    def expected_improvement(self) -> float | None:
        """Return the largest improvement that any search method (arm) expects, as a fraction of the communication time.

        None if no arm has an estimate, or if an arm has not been asked for proposals yet.
        """
        if not self._asked.issuperset(self._arms):
            return None
        expected = [
            self._try(name, lambda arm: _number(opinion(arm, "expected_improvement")), None)
            for name in list(self._arms)
        ]
        return max((value for value in expected if value is not None), default=None)

    def expected_span_s(self, knobs: Knobs) -> float | None:
        """Return the communication time that the first search method (arm) with an estimate expects of a setting.

        None if no arm has an estimate.
        """
        estimates = (
            self._try(name, lambda arm: _number(opinion(arm, "expected_span_s", knobs)), None)
            for name in list(self._arms)
        )
        return next((estimate for estimate in estimates if estimate is not None), None)

    def promise(self, candidates: Sequence[Knobs]) -> list[float] | None:
        """Return the gain that the first search method (arm) with an estimate expects of each setting.

        The gain is a fraction of the communication time. None if no arm has an estimate.
        """
        estimates = (
            self._try(name, lambda arm: opinion(arm, "promise", candidates), None) for name in list(self._arms)
        )
        return next((estimate for estimate in estimates if estimate is not None), None)

    @property
    def credits(self) -> dict[str, float]:
        """Return {name of the search method: how often its recent proposals were the fastest so far, from 0 to 1}."""
        return {name: self.bandit.auc(name) for name in self.bandit.arms}

    def _screen(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Sort proposed settings by their expected gain, the largest first, and drop those below `LEAST_PROMISE`.

        The gain is estimated by the first search method (arm) that can do so. If none can, the proposals are returned
        unchanged.
        """
        promises = self.promise([proposal.knobs for proposal in proposals]) if proposals else None
        if promises is None:
            return proposals
        ordered = sorted(zip(promises, range(len(proposals)), strict=True), key=lambda pair: (-pair[0], pair[1]))
        return [proposals[place] for promise, place in ordered if promise >= LEAST_PROMISE]

    def _ask_arm(self, name: str, n: int) -> Sequence[Proposal]:
        self._asked.add(name)
        new: list[Proposal] = self._try(name, lambda arm: _proposals(arm.ask(n), name), [])
        if name not in self._arms:
            return []
        unrun = self._unrun[name]
        unrun.update({proposal.knobs: proposal for proposal in new if proposal.knobs not in unrun})
        return (new or [one for one in unrun.values() if one.knobs not in self._measured])[:n]

    def _try(self, name: str, call: Callable[[Arm], _T], otherwise: _T) -> _T:
        """Call a function of the search method (arm) with this name, and return the function's result.

        If the call raises, log a warning, return `otherwise`, and never call this arm again.
        """
        if name not in self._arms:
            return otherwise
        try:
            return call(self._arms[name])
        except Exception as err:
            words = "the search technique %r failed after %s and is not used any more: %s"
            logger.warning(words, name, counted(len(self._trials), "trial"), in_a_line(err, self._where()))
            logger.debug("the search technique %r raised an error; the traceback follows", name, exc_info=True)
            del self._arms[name]
            return otherwise


def _proposals(answer: Sequence[Proposal], name: str) -> list[Proposal]:
    """Check the settings that a search method (arm) has proposed, and set the arm's name in each proposal.

    Raises:
        TuningError: one of the proposals is not valid.
    """
    proposals = list(islice(answer, MOST_PROPOSALS))
    for proposal in proposals:
        valid = isinstance(proposal, Proposal) and isinstance(proposal.knobs, Knobs)
        require(valid, f"ask() of the search technique {name!r}", "Proposals of Knobs", proposal, TuningError)
        found = proposal.iterations
        valid = found is None or (type(found) is int and found >= 1)
        require(valid, f"Proposal.iterations of technique {name!r}", "a positive int or None", found, TuningError)
    return [proposal if proposal.arm == name else replace(proposal, arm=name) for proposal in proposals]


def opinion(
    source: object, of: str, *arguments: object
) -> Any:  # The result is Any, because each optional method has its own type of result.
    """Call the optional method `of` of a search method (arm) or of a space, and return its result.

    Return None if there is no such method.
    """
    method = getattr(source, of, None)
    return None if method is None else method(*arguments)


def _number(answer: float | None) -> float | None:
    """Check that the estimate of a search method (arm) is a number or None, and return it.

    Raises:
        TuningError: the estimate is not a number or None.
    """
    valid = answer is None or (isinstance(answer, int | float) and not math.isnan(answer))
    require(valid, "expected_improvement() or expected_span_s()", "a number or None", answer, TuningError)
    return answer


ITERATIONS_PER_TRIAL = 3
"""Usual length of a trial in training iterations: one that is discarded, then two that are measured."""


def default_arms(
    *,
    space: KnobSpace,
    rng: np.random.Generator,
    budget_iterations: int = 100,
    names: Sequence[str] | None = None,
    planners: Sequence[Arm] = (),
    as_given: bool = True,
    whole_space: KnobSpace | None = None,
    where: Callable[[], str] = str,
) -> BanditArm:
    """Create the search methods (arms) of a tuning session, combined by a bandit that chooses which one proposes next.

    They are planners, which compute settings from a performance model, search techniques, and (if permitted) arms that
    try compressors and NCCL's algorithms. If `names` is None, a technique that cannot be created or whose name is in
    use is skipped with a warning.

    Args:
        space: permitted settings of the search techniques.
        rng: random generator from which one generator for each arm is spawned, so that arms draw independently.
        budget_iterations: number of training iterations of the search. The number of recent trials by which the bandit
            scores the arms is proportional to it.
        names: names of the search techniques; None = all built-in techniques and those of installed packages.
        planners: planners that the caller has created, the best first. Their names must differ from those of the
            techniques.
        as_given: whether planners are asked first, then the techniques. If not, the order is random, as in AIACC.
        whole_space: permitted settings of the techniques once trials have contradicted the planners' model, which
            narrowed `space`. None = `space`.
        where: function that returns the position in training, for the log line about a failed arm.

    Raises:
        TuningError: a technique in `names` is unknown or cannot be created, or there is no arm at all.
    """
    wanted = [*OUR_ARMS, *third_party_arms()] if names is None else list(names)
    ties, *generators = rng.spawn(1 + len(wanted))

    def techniques(space: KnobSpace) -> list[Arm]:
        arms: list[Arm] = []
        for name, generator in zip(wanted, generators, strict=True):
            try:
                arm = make_arm(name, space=space, rng=generator)
                if any(arm.name == other.name for other in (*planners, *arms)):
                    raise TuningError(f"two search techniques have the name {arm.name!r}; rename or remove one of them")
            except Exception as err:
                if names is not None:
                    raise
                logger.warning("Sirtaki does not use the search technique %r for tuning: %s", name, err)
            else:
                arms.append(arm)
        return arms

    compressors = [CompressorArm(whole_space or space)] if space.lossy else []
    nccl = [NcclArm(whole_space or space)] if space.nccl else []
    arms = [*planners, *compressors, *nccl, *techniques(space)]
    return BanditArm(
        arms,
        rng=ties,
        window=window_for(budget_iterations // ITERATIONS_PER_TRIAL, len(arms)),
        as_given=as_given,
        doubted=lambda: any(isinstance(arm, Planner) and arm.doubted for arm in planners),
        wider=None if whole_space is None or whole_space == space else lambda: techniques(whole_space),
        where=where,
    )
