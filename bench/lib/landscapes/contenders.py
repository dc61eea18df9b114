"""Contenders on a landscape: Sirtaki, its parts, and general optimisers without a model of gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from sirtaki.autotune.arms.planners import Planner, make_planners
from sirtaki.autotune.arms.techniques import OUR_ARMS, make_arm
from sirtaki.autotune.drift import RefinementSchedule
from sirtaki.autotune.knobs import KnobLattice, Knobs, KnobSpace
from sirtaki.autotune.meta.bandit import ITERATIONS_PER_TRIAL, AUCBandit, default_arms, window_for
from sirtaki.autotune.meta.session import Purpose, TuningSession
from sirtaki.autotune.trial import Arm

from .landscape import Landscape

CLOSE = 0.03
"""A setting counts as found if its regret is at most this fraction."""

HORIZONS = (1_000, 10_000, 100_000)
"""Lengths of jobs in training iterations, for which the time of the whole job is computed."""

ACCOUNTED = 10_000
"""Length in training iterations of the job whose excess time is attributed to parts of tuning."""

SEARCH, PROOF, KEPT = "trials", "proof", "setting kept"
MORE_TRIALS, MORE_PROOF = "refinement trials", "refinement proofs"
PARTS = (SEARCH, PROOF, KEPT, MORE_TRIALS, MORE_PROOF)
"""Parts of a job to which its excess time is attributed.

They are trials and final comparison of the warm-up, iterations with the chosen setting outside tuning, and trials and
final comparisons of refinements.
"""

SLOWER = 1.02
"""An iteration counts as slower than the default above this ratio of the two times."""

MEASURED = 2
"""Measured iterations of a general optimiser's trial. One discarded iteration precedes them."""


@dataclass(kw_only=True)
class Course:
    """One run of a contender on a landscape.

    Attributes:
        landscape: the job.
        noise: relative noise of a measurement.
        rng: generator of the noise.
        iterations: number of finished iterations.
        spent_s: true time of the finished iterations.
        default_s: true time of as many iterations with the untuned default.
        found_at: number of iterations after which the setting to keep is close to the best; infinite if never.
        slower: number of iterations that were slower than with the untuned default.
        spent_until: for each of `HORIZONS` that has passed, true time of so many iterations.
        excess_s: for each part of tuning, true time of its iterations minus their time with the best setting, among the
            first `ACCOUNTED` iterations.
    """

    landscape: Landscape
    noise: float
    rng: np.random.Generator
    iterations: int = 0
    spent_s: float = 0.0
    default_s: float = 0.0
    found_at: float = math.inf
    slower: int = 0
    spent_until: dict[int, float] = field(default_factory=dict)
    excess_s: dict[str, float] = field(default_factory=dict)

    def run(self, knobs: Knobs, *, discarded: int, measured: int, part: str = SEARCH) -> list[float]:
        """Run a setting for some iterations as a part of tuning. Return the spans of the measured ones in seconds."""
        spans_s = []
        for number in range(discarded + measured):
            span_s = self.landscape.span_s(knobs, self.iterations)
            default_s = self.landscape.span_s(self.landscape.default, self.iterations)
            self.spent_s += span_s
            self.default_s += default_s
            self.slower += span_s > SLOWER * default_s
            if self.iterations < ACCOUNTED:
                best_s = self.landscape.span_s(self.landscape.best, self.iterations)
                self.excess_s[part] = self.excess_s.get(part, 0.0) + span_s - best_s
            if number >= discarded:
                spans_s.append(self.landscape.measure_s(knobs, self.iterations, self.noise, self.rng))
            self.iterations += 1
            if self.iterations in HORIZONS:
                self.spent_until[self.iterations] = self.spent_s
        return spans_s

    def would_keep(self, knobs: Knobs) -> None:
        """Record the setting that the job would keep if the warm-up ended now."""
        if math.isinf(self.found_at) and self.landscape.regret(knobs) <= CLOSE:
            self.found_at = self.iterations

    def cumulative(self, kept: Knobs) -> dict[int, float]:
        """Return the time of whole jobs that keep a setting from now on, over their time with the best setting.

        The keys are `HORIZONS`.
        """
        spent_s = {horizon: self.spent_s + self._total_s(kept, self.iterations, horizon) for horizon in HORIZONS}
        spent_s |= self.spent_until
        return {horizon: spent_s[horizon] / self._total_s(self.landscape.best, 0, horizon) for horizon in HORIZONS}

    def excess(self, kept: Knobs) -> dict[str, float]:
        """Return the excess time of each part of tuning in a job of `ACCOUNTED` iterations that keeps a setting.

        The unit is the job's time with the best setting. The sum of all parts is the job's cumulative figure minus one.
        """
        best = self.landscape.best
        begin = min(self.iterations, ACCOUNTED)
        rest_s = self._total_s(kept, begin, ACCOUNTED) - self._total_s(best, begin, ACCOUNTED)
        excess_s = {**self.excess_s, KEPT: self.excess_s.get(KEPT, 0.0) + rest_s}
        return {part: seconds / self._total_s(best, 0, ACCOUNTED) for part, seconds in excess_s.items()}

    def _total_s(self, knobs: Knobs, begin: int, end: int) -> float:
        """Return the true time of the iterations from `begin` to before `end` with a setting, in seconds."""
        scape = self.landscape
        varies = max(scape.changes_at, 100)  # Compute single iterations until then, because the network may change.
        constant = max(begin, min(varies, end))
        varying_s = sum(scape.span_s(knobs, number) for number in range(begin, constant))
        return varying_s + scape.span_s(knobs, varies) * (end - constant)

    def outcome(self, kept: Knobs) -> dict[str, Any]:
        """Return the result of the run."""
        default_s = self.landscape.span_s(self.landscape.default)
        return {
            "regret": self.landscape.regret(kept),
            "over_default": self.landscape.span_s(kept) / default_s,
            "found_at": None if math.isinf(self.found_at) else self.found_at,
            "iterations": self.iterations,
            "cost": self.spent_s / self.default_s,
            "cumulative": self.cumulative(kept),
            "excess": self.excess(kept),
            "slower": self.slower,
            "kept": kept.describe(),
        }


Contender = Callable[[Landscape, int, float, int], dict[str, Any]]
"""Function that runs a contender. It maps (landscape, budget of iterations, noise, seed) to a result."""


# ── Sirtaki ──────────────────────────────────────────────────────────────────────────────────────────────────────────

MakeArm = Callable[[Landscape, KnobSpace, Sequence[Arm], int, int], Arm | None]


def in_session(
    landscape: Landscape,
    budget: int,
    noise: float,
    seed: int,
    *,
    make_arm: MakeArm,
    planners: bool,
    refine_until: int = 10_000,
) -> dict[str, Any]:
    """Run a warm-up session and its refinements, as in a job."""
    course = Course(landscape=landscape, noise=noise, rng=np.random.default_rng([seed, 2]))
    space, plans = landscape.space, list[Planner]()
    if planners:
        space, model = landscape.probed(noise, np.random.default_rng([seed, 3]))
        if model is not None:
            plans += make_planners(space=space, model=model, presumed=landscape.presumed)
    session = TuningSession(
        space=landscape.space,
        default=landscape.default,
        arm=make_arm(landscape, space, plans, budget, seed),
        rng=np.random.default_rng(seed),
        budget_iterations=budget,
        seeds=landscape.seeds,
    )
    first_plan, warm_up = None, dict[str, Any]()
    schedule, resumed_at, before = RefinementSchedule(refine_until), 0, landscape.default
    while True:
        while not session.done:
            now, finals = session.assignment, session.assignment.purpose is Purpose.FINALS
            if first_plan is None and any(planner.name == now.arm for planner in plans):
                first_plan = landscape.regret(now.knobs)
            part = (MORE_PROOF if finals else MORE_TRIALS) if warm_up else (PROOF if finals else SEARCH)
            spans_s = course.run(
                now.knobs, discarded=now.discarded_iterations, measured=now.measured_iterations, part=part
            )
            session.record(spans_s)
            course.would_keep(session.result.knobs)
        kept = session.result.knobs
        if warm_up:
            schedule.ended(course.iterations - resumed_at, improved=kept != before)
        else:
            warm_up = {"iterations": course.iterations, "cost": course.spent_s / course.default_s}
        if not _resumed(session, schedule, course):
            break
        resumed_at, before = course.iterations, kept
    outcome, claims = course.outcome(kept) | warm_up, session.result.gain is not None
    false_gain = claims and outcome["over_default"] >= 1.0
    refined = {"refined_until": course.iterations}
    return {**outcome, **refined, "first_plan": first_plan, "claims": claims, "false_gain": false_gain}


def _resumed(session: TuningSession, schedule: RefinementSchedule, course: Course) -> bool:
    """Run the job with the chosen setting until the session is resumed. Return False if it is not resumed any more."""
    while schedule.left > 0:
        course.run(session.result.knobs, discarded=0, measured=1, part=KEPT)
        if schedule.add():
            if session.resume(schedule.left):
                return True
            schedule.ended(0, improved=False)
    return False


def _ensemble(
    landscape: Landscape,
    space: KnobSpace,
    planners: Sequence[Arm],
    budget: int,
    seed: int,
    *,
    as_given: bool = True,
    equal_shares: bool = False,
) -> Arm:
    arm = default_arms(
        space=space,
        rng=np.random.default_rng(seed),
        budget_iterations=budget,
        names=list(OUR_ARMS),
        planners=planners,
        as_given=as_given,
        whole_space=landscape.space,
    )
    if equal_shares:
        window = window_for(budget // ITERATIONS_PER_TRIAL, len(arm.bandit.arms))
        arm.bandit = EqualShares(arm.bandit.arms, window=window)
    return arm


class EqualShares(AUCBandit):
    """A bandit without credit: it chooses the least used arm."""

    def auc(self, arm: str) -> float:
        """Return no credit."""
        return 0.0


def _alone(
    landscape: Landscape, space: KnobSpace, planners: Sequence[Arm], budget: int, seed: int, *, name: str
) -> Arm | None:
    for planner in planners:
        if planner.name == name:
            return planner
    if name not in OUR_ARMS:
        return None  # A planner cannot run without a model.
    return make_arm(name, space=space, rng=np.random.default_rng(seed))


# ── general optimisers ───────────────────────────────────────────────────────────────────────────────────────────────


class Searcher(Protocol):
    """Base class of general optimisers, which have no model of gradients."""

    def ask(self) -> Knobs:
        """Return the next setting to measure."""
        ...

    def tell(self, knobs: Knobs, span_s: float) -> None:
        """Record the time of a setting."""
        ...


def search(
    landscape: Landscape, budget: int, noise: float, seed: int, *, make: Callable[[Landscape, int], Searcher]
) -> dict[str, Any]:
    """Measure the default, then the optimiser's proposals. Keep the setting with the shortest mean span."""
    course = Course(landscape=landscape, noise=noise, rng=np.random.default_rng([seed, 2]))
    searcher = make(landscape, seed)
    seen: dict[Knobs, list[float]] = {}
    knobs = landscape.default
    while course.iterations + 1 + MEASURED <= budget:
        spans_s = course.run(knobs, discarded=1, measured=MEASURED)
        seen.setdefault(knobs, []).extend(spans_s)
        searcher.tell(knobs, float(np.mean(spans_s)))
        best = min(seen, key=lambda one: float(np.mean(seen[one])))
        course.would_keep(best)
        knobs = searcher.ask()
    return course.outcome(best)


class Random:
    """Random search."""

    def __init__(self, landscape: Landscape, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 5])
        self._points = KnobLattice(landscape.space).points

    def ask(self) -> Knobs:
        """Return a random point of the grid (lattice)."""
        return self._points[int(self._rng.integers(len(self._points)))]

    def tell(self, knobs: Knobs, span_s: float) -> None:
        """Ignore the time."""


def _knobs(space: KnobSpace, log2_bytes: float, streams: int, route: int) -> Knobs:
    transport, algorithm = space.routes[route]
    low, high = space.unit_bytes
    unit_bytes = min(max(round(2**log2_bytes), low), high)
    return Knobs(unit_bytes=unit_bytes, streams=space.streams[streams], transport=transport, algorithm=algorithm)


def _values(space: KnobSpace, knobs: Knobs) -> tuple[float, int, int]:
    route = space.routes.index(knobs.route)
    return math.log2(knobs.unit_bytes), space.streams.index(knobs.streams), route


class Optuna:
    """A sampler of optuna over size (log scale), streams and route."""

    def __init__(self, landscape: Landscape, seed: int, *, sampler: str) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space, self._optuna = landscape.space, optuna
        warnings.simplefilter("ignore")
        self._study = optuna.create_study(sampler=getattr(optuna.samplers, sampler)(seed=seed))
        self._space = space
        distributions = optuna.distributions
        self._distributions = {
            "log2_bytes": distributions.FloatDistribution(*space.unit_bytes_log2),
            "streams": distributions.IntDistribution(0, len(space.streams) - 1),
            "route": distributions.CategoricalDistribution(range(len(space.routes))),
        }
        self._trial: Any = None

    def ask(self) -> Knobs:
        """Return the sampler's next point."""
        self._trial = self._study.ask(self._distributions)
        params = self._trial.params
        return _knobs(self._space, params["log2_bytes"], params["streams"], params["route"])

    def tell(self, knobs: Knobs, span_s: float) -> None:
        """Report the logarithm of the time, which suits all samplers."""
        if self._trial is not None:
            self._study.tell(self._trial, math.log(span_s))
            return
        params = dict(zip(self._distributions, _values(self._space, knobs), strict=True))
        self._study.add_trial(
            self._optuna.trial.create_trial(params=params, distributions=self._distributions, value=math.log(span_s))
        )


class Skopt:
    """scikit-optimize's Gaussian process. With `size_only`, it varies only the unit size, on one stream."""

    def __init__(self, landscape: Landscape, seed: int, *, size_only: bool = False) -> None:
        import skopt

        space = self._space = landscape.space
        self._size_only, self._default = size_only, landscape.default
        dimensions: list[Any] = [space.unit_bytes_log2]
        if not size_only:
            dimensions += [(0, len(space.streams) - 1), list(range(len(space.routes)))]
        warnings.simplefilter("ignore")
        self._optimizer = skopt.Optimizer(
            dimensions, "GP", n_initial_points=5 if size_only else 8, acq_func="EI", random_state=seed
        )
        self._asked: list[Any] | None = None

    def ask(self) -> Knobs:
        """Return the point with the largest expected improvement."""
        self._asked = self._optimizer.ask()
        log2_bytes, streams, route = (*self._asked, 0, 0)[:3] if self._size_only else self._asked
        return _knobs(self._space, log2_bytes, int(streams), int(route))

    def tell(self, knobs: Knobs, span_s: float) -> None:
        """Report the logarithm of the time, as for optuna."""
        place = self._asked
        if place is None:
            log2_bytes, streams, route = _values(self._space, knobs)
            place = [log2_bytes] if self._size_only else [log2_bytes, streams, route]
        self._optimizer.tell(place, math.log(span_s))


SIRTAKI, WITHOUT_PLANNERS, AIACC = "sirtaki", "sirtaki without planners", "AIACC's four, as printed"
EQUAL_SHARES = "equal shares"

WITHOUT_REFINEMENT = "sirtaki without refinement"

SIRTAKIS: dict[str, Contender] = {
    SIRTAKI: partial(in_session, make_arm=_ensemble, planners=True),
    WITHOUT_REFINEMENT: partial(in_session, make_arm=_ensemble, planners=True, refine_until=0),
    WITHOUT_PLANNERS: partial(in_session, make_arm=_ensemble, planners=False),
}
OTHERS: dict[str, Contender] = {
    "random": partial(search, make=Random),
    "optuna TPE": partial(search, make=partial(Optuna, sampler="TPESampler")),
    "optuna GP": partial(search, make=partial(Optuna, sampler="GPSampler")),
    "scikit-optimize GP": partial(search, make=Skopt),
    "horovod-like": partial(search, make=partial(Skopt, size_only=True)),
}
ARMS: dict[str, Contender] = {
    EQUAL_SHARES: partial(in_session, make_arm=partial(_ensemble, equal_shares=True), planners=True),
    AIACC: partial(in_session, make_arm=partial(_ensemble, as_given=False), planners=False),
    **{name: partial(in_session, make_arm=partial(_alone, name=name), planners=False) for name in OUR_ARMS},
    **{
        name: partial(in_session, make_arm=partial(_alone, name=name), planners=True)
        for name in ("asc_wfbp_n", "libra", "dpro", "asc_wfbp", "mg_wfbp")
    },
}
CONTENDERS: dict[str, Contender] = {**SIRTAKIS, **OTHERS, **ARMS}
