"""The sliding-window AUC bandit over search algorithms (AIACC, section VI; OpenTuner)."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, islice, zip_longest
from typing import Any, TypeVar

import numpy as np

from sirtaki.errors import TuningError, in_a_line

from ..arms.planners import Planner
from ..arms.techniques import OUR_ARMS, CompressorArm, NcclArm, make_arm, third_party_arms
from ..knobs import Knobs, KnobSpace
from ..trial import Arm, Proposal, Trial


def window_for(budget_trials: int, n_arms: int) -> int:
    """A window that slides within the budget, and has room for every arm."""
    return max(n_arms, budget_trials // 2, 1)


EXPLORATION = 0.2
"""C of the AUC formula, as AIACC has it."""


class AUCBandit:
    """Scores arms by what they found lately and by how little they were tried.

    Args:
        arms: names, all different.
        window: uses that are remembered, of all arms together.

    Raises:
        TuningError: names repeat, there are none, or the window is empty.
    """

    def __init__(self, arms: Sequence[str], *, window: int) -> None:
        if not arms or len(set(arms)) != len(arms):
            raise TuningError(f"a bandit needs arms with different names, not {list(arms)}")
        if window < 1:
            raise TuningError(f"the window must hold at least one use, not {window}")
        self.arms = tuple(arms)
        self._uses: deque[tuple[str, bool]] = deque(maxlen=window)

    def push(self, arm: str, *, was_best: bool) -> None:
        """One use of an arm; the oldest use leaves a full window."""
        self._uses.append((arm, was_best))

    def uses(self, arm: str) -> int:
        """H_t: the arm's uses in the window."""
        return sum(used == arm for used, _ in self._uses)

    def auc(self, arm: str) -> float:
        """AUC_t: under a curve that goes up with each new best, from 0 (never) to 1 (always); 0 outside the window."""
        heights = list(accumulate(won for used, won in self._uses if used == arm))
        return 2.0 * sum(heights) / (len(heights) * (len(heights) + 1)) if heights else 0.0

    def score(self, arm: str) -> float:
        """Credit plus exploration; infinite for an arm without a use in the window."""
        uses = self.uses(arm)
        if uses == 0:
            return math.inf
        return self.auc(arm) + EXPLORATION * math.sqrt(2.0 * math.log2(len(self._uses)) / uses)

    def ranking(self, rng: np.random.Generator, *, as_given: bool = False) -> list[str]:
        """All arms, the highest score first; `rng` orders equal ones, unless those without a use come `as_given`."""
        lots = dict(zip(self.arms, rng.permutation(len(self.arms)).tolist(), strict=True))
        if as_given:
            lots |= {arm: place for place, arm in enumerate(self.arms) if self.uses(arm) == 0}
        return sorted(self.arms, key=lambda arm: (-self.score(arm), lots[arm]))


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SCREENED = 8  # proposals of an arm among which the surrogate chooses
LEAST_PROMISE = 0.001  # share of the span that a trial must be expected to save


class BanditArm:
    """Asks its arms in the order of their scores and tells every trial to all of them.

    An arm with nothing to propose is passed over and its turn is not counted. Credit goes to the arm that
    `Trial.arm` names; trials of others (the default, the registry's) teach the arms and earn nobody anything. An
    arm that raises or answers nonsense is left out from then on: a fault in a search technique must not stop a training
    job.

    Args:
        arms: with different names.
        rng: breaks ties between equal scores.
        window: uses that the bandit remembers (see `window_for`).
        as_given: untried arms have their turns in the order given, the most promising first; else by lot, as printed.
        doubted: whether what the arms' space was narrowed by has turned out to be wrong.
        wider: makes arms that see the whole space, which then take over from those of their names.
        where: says where training is, for the log of an arm's fault.
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
        self._told: list[Trial] = []
        self._asked: set[str] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """One proposal of each of the best-scored arms in turn, `n` in all, fewer if all arms run dry."""
        ranking = self.bandit.ranking(self._rng, as_given=self._as_given)
        if n == 1:
            return next((good[:1] for name in ranking if (good := self._screened(self._ask_arm(name, SCREENED)))), [])
        rounds = zip_longest(*(self._ask_arm(name, n) for name in ranking))
        return [proposal for turn in rounds for proposal in turn if proposal is not None][:n]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Credits the arms that asked, then lets all arms learn."""
        for trial in trials:
            if trial.arm in self.bandit.arms:
                self.bandit.push(trial.arm, was_best=trial.was_best)
        self._told += trials
        for name in list(self._arms):
            self._try(name, lambda arm: arm.tell(trials), None)
        if self._wider is not None and self._doubted is not None and self._doubted():
            self._widen(self._wider())
            self._wider = None

    def _widen(self, arms: Sequence[Arm]) -> None:
        """Puts arms in the place of those of their names; they learn what these have learnt."""
        for arm in arms:
            if arm.name in self._arms:
                self._arms[arm.name] = arm
                self._try(arm.name, lambda arm: arm.tell(self._told), None)

    def expected_improvement(self) -> float | None:
        """The largest that any arm still expects; None if no arm can say, or as long as one has not had its turn."""
        if not self._asked.issuperset(self._arms):
            return None
        expected = [
            self._try(name, lambda arm: _number(opinion(arm, "expected_improvement")), None)
            for name in list(self._arms)
        ]
        return max((value for value in expected if value is not None), default=None)

    def expected_span_s(self, knobs: Knobs) -> float | None:
        """What the first arm with an opinion believes."""
        beliefs = (
            self._try(name, lambda arm: _number(opinion(arm, "expected_span_s", knobs)), None)
            for name in list(self._arms)
        )
        return next((belief for belief in beliefs if belief is not None), None)

    @property
    def credits(self) -> dict[str, float]:
        """Every arm's current AUC."""
        return {name: self.bandit.auc(name) for name in self.bandit.arms}

    def _screened(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Those that the first arm with an opinion gives a chance, the best first; as they came where none has one."""
        knobs = [proposal.knobs for proposal in proposals]
        opinions = (self._try(name, lambda arm: opinion(arm, "promise", knobs), None) for name in list(self._arms))
        promised = next((opinion for opinion in opinions if opinion is not None), None) if proposals else None
        if promised is None:
            return proposals
        chances = sorted(zip(promised, range(len(proposals)), strict=True), key=lambda pair: (-pair[0], pair[1]))
        return [proposals[place] for chance, place in chances if chance >= LEAST_PROMISE]

    def _ask_arm(self, name: str, n: int) -> Sequence[Proposal]:
        self._asked.add(name)
        return self._try(name, lambda arm: _proposals(arm.ask(n), n, name), ())

    def _try(self, name: str, call: Callable[[Arm], _T], otherwise: _T) -> _T:
        """What the arm answers, or `otherwise` if it has failed, now or before."""
        if name not in self._arms:
            return otherwise
        try:
            return call(self._arms[name])
        except Exception as err:
            words = "the search technique %r failed and is left out from now on, after %d trials: %s"
            logger.warning(words, name, len(self._told), in_a_line(err, self._where()))
            logger.debug("where it failed", exc_info=True)
            del self._arms[name]
            return otherwise


def _proposals(answer: Sequence[Proposal], n: int, name: str) -> list[Proposal]:
    """An arm's answer, if it is what it should be.

    Raises:
        TuningError: it is something else.
    """
    proposals = list(islice(answer, n))
    for proposal in proposals:
        if not (isinstance(proposal, Proposal) and isinstance(proposal.knobs, Knobs)):
            raise TuningError(f"an arm proposes knobs, not {proposal!r:.200}")
        if proposal.iterations is not None and not (type(proposal.iterations) is int and proposal.iterations >= 1):
            raise TuningError(f"a proposal asks for a whole number of iterations, not {proposal.iterations!r:.80}")
    return [proposal if proposal.arm == name else replace(proposal, arm=name) for proposal in proposals]


def opinion(source: object, of: str, *arguments: object) -> Any:  # Any: each optional method has its own answer
    """Return the answer of an optional method of an arm or a space; None without that method."""
    method = getattr(source, of, None)
    return None if method is None else method(*arguments)


def _number(answer: float | None) -> float | None:
    """What an arm expects, if it is what it should be.

    Raises:
        TuningError: it is something else.
    """
    if answer is not None and not (isinstance(answer, int | float) and not math.isnan(answer)):
        raise TuningError(f"an arm expects a number or None, not {answer!r:.80}")
    return answer


ITERATIONS_PER_TRIAL = 3  # a discarded and two measured ones


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
    """The bandit over the named search techniques, the given planners, and what tries compressors and NCCL's own knobs
    where there are any.

    A technique that cannot be built, or whose name is taken, is left out with a warning, unless the caller named it.

    Args:
        space: what techniques choose from.
        rng: split among the arms, so that one arm's draws do not depend on another's.
        budget_iterations: of the warm-up; the bandit's window scales with it.
        names: search techniques; None = all of ours and all that installed packages bring.
        planners: arms that are there already, with names of their own; the best first.
        as_given: planners have the first turns as given, then the techniques; else by lot, as printed.
        whole_space: what techniques choose from once trials have spoken against the planners' model, by whose word
            `space` is narrower; None = `space`.
        where: see `BanditArm`.

    Raises:
        TuningError: a named technique is unknown or cannot be built, or no arm is left.
    """
    wanted = [*OUR_ARMS, *third_party_arms()] if names is None else list(names)
    ties, *generators = rng.spawn(1 + len(wanted))

    def techniques(space: KnobSpace) -> list[Arm]:
        arms: list[Arm] = []
        for name, generator in zip(wanted, generators, strict=True):
            try:
                arm = make_arm(name, space=space, rng=generator)
                if any(arm.name == other.name for other in (*planners, *arms)):
                    raise TuningError(f"there are two search techniques called {arm.name!r}")
            except Exception as err:
                if names is not None:
                    raise
                logger.warning("%s; it is left out", err)
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
