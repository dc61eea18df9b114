"""What planners know of a job, and what they predict."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from statistics import median
from typing import Any

import msgspec
import numpy as np
import scipy
from numpy.typing import NDArray

from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, Route, TransportKind
from sirtaki.errors import PlanError, TuningError
from sirtaki.measures import LinkModel, ring_bytes

from ..knobs import Knobs, KnobSpace
from ..trial import Trial, TrialStatus
from .fits import MAX_RESIDUAL, ContentionModel, RateCurve, root_mean_square
from .replayer import SharedHost
from .simulator import Profile, Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningModel:
    """The planners' view of one flat buffer.

    Attributes:
        layout: gradients in the order in which they become ready.
        profile: when they do.
        links: cost of the routes that have been measured; at least one.
        contention: LIBRA's model as probes have shown it, or None where computation and communication do not slow each
            other down, or nobody has probed it.
        learnt: of routes on which training has shown it (`with_contention_learnt`); there it takes the place of
            `contention`.
        host: that all ranks share, where they communicate on the processors that compute; else None.

    Raises:
        TuningError: profile and layout are of different models, or no route has a link.
    """

    layout: GradientLayout
    profile: Profile
    links: Mapping[Route, LinkModel]
    contention: ContentionModel | None = None
    learnt: Mapping[Route, ContentionModel] = field(default_factory=dict)
    host: SharedHost | None = None

    def __post_init__(self) -> None:
        self.profile.check_fits(self.layout)
        if not self.links:
            raise TuningError("a planning model needs the link of at least one route")

    def simulator(self, route: Route) -> Simulator:
        """The iteration on that route."""
        return Simulator(
            layout=self.layout,
            profile=self.profile,
            link=self.links[route],
            contention=self.contention_on(route),
            host=self.host,
        )

    def contention_on(self, route: Route) -> ContentionModel | None:
        """As training has shown it on that route, else as probes have."""
        return self.learnt.get(route, self.contention)

    def expected_s(self, knobs: Knobs) -> float | None:
        """Span by simulation; None on a route that nobody has probed, and of compressed units and those whose way NCCL
        was told, whose cost no probe has shown.

        Raises:
            PlanError: the cuts are another layout's.
        """
        known = knobs.route in self.links and not (knobs.lossy or knobs.nccl)
        return self.simulator(knobs.route).run_knobs(knobs).span_s if known else None

    def link_between_hosts(self, route: Route) -> LinkModel | None:
        """The link of that route; None if it was not measured, or if units take processors that compute, too."""
        return None if self.host is not None else self.links.get(route)

    @property
    def bound_s(self) -> float:
        """What no plan's span falls below: the backward pass from its first gradient on, or all bytes at full rate.

        The rate is the best that any route has shown with any number of streams; it counts gradient bytes, so the
        2 (P − 1) / P of a ring is in it.
        """
        fastest = max(max(link.throughput) for link in self.links.values())
        compute_s = max(self.profile.ready_s) - min(self.profile.ready_s)
        return max(compute_s, self.layout.total_bytes / fastest)

    def differs_from(self, other: PlanningModel) -> bool:
        """Return whether plans should be made anew: another layout or route, or a parameter moved beyond its error.

        Ready times count as moved if one of them moved by more than a tenth of the backward pass.
        """
        if self.layout != other.layout or set(self.links) != set(other.links):
            return True
        if any(link.differs_from(other.links[route]) for route, link in self.links.items()):
            return True
        if (self.contention, self.learnt, self.host) != (other.contention, other.learnt, other.host):
            return True
        tolerance_s = 0.1 * max(self.profile.compute_s, other.profile.compute_s)
        pairs = zip(self.profile.ready_s, other.profile.ready_s, strict=True)
        return any(abs(mine - theirs) > tolerance_s for mine, theirs in pairs)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict, to be saved for "what if" questions and reports; `from_json` is its inverse."""
        return {
            "layout": asdict(self.layout),
            "profile": asdict(self.profile),
            "links": [
                {
                    "transport": route[0].value,
                    "algorithm": route[1].value,
                    "link": asdict(link),
                    "learnt": asdict(self.learnt[route]) if route in self.learnt else None,
                }
                for route, link in self.links.items()
            ],
            "contention": None if self.contention is None else asdict(self.contention),
            "host": None if self.host is None else asdict(self.host),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanningModel:
        """The model that `to_json` described.

        Raises:
            TuningError: a field is missing or has a value that is invalid.
        """
        try:
            routes = [(TransportKind(entry["transport"]), Algorithm(entry["algorithm"])) for entry in data["links"]]
            learnt = [msgspec.convert(entry.get("learnt"), ContentionModel | None) for entry in data["links"]]
            return cls(
                layout=msgspec.convert(data["layout"], GradientLayout),
                profile=msgspec.convert(data["profile"], Profile),
                links={
                    route: LinkModel.from_json(entry["link"])
                    for route, entry in zip(routes, data["links"], strict=True)
                },
                learnt={route: one for route, one in zip(routes, learnt, strict=True) if one is not None},
                contention=msgspec.convert(data.get("contention"), ContentionModel | None),
                host=msgspec.convert(data.get("host"), SharedHost | None),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise TuningError(f"this is not a saved planning model: {err!r}") from err


BENEFIT_OF_THE_DOUBT = 0.05
"""Weight of the belief before any trial: as much as one pair that differs by 5 %."""

LARGEST_WEIGHT = 0.5
"""Of a pair; how much slower something hopeless is says no more than that it is."""

BELIEVED = 0.4
"""Agreement from which on a model is believed: 70 % of what pairs weigh are in its order."""

LEAST_RANKED, RANKED = 5, 0.7
"""Settings that must have run before a model is believed that is not presumed to be right, and Spearman's rank
correlation of their predicted and measured times from which on it is."""

MOST_COMPARED = 24


class Forecast:
    """A model's predictions, and what became of them.

    Attributes:
        model: predicts; what has been measured stays when it is replaced.
        presumed: it is believed before trials have run, until they speak against it; else from when on it has ranked
            them right.
    """

    def __init__(self, model: PlanningModel, *, presumed: bool = True) -> None:
        self._model, self._presumed = model, presumed
        self._measured_s: dict[Knobs, float] = {}
        self._predicted_s: dict[Knobs, float | None] = {}
        self._agreement: float | None = None

    def update_model(self, model: PlanningModel) -> None:
        """Takes over a model that knows better."""
        if model is not self._model:
            self._model, self._predicted_s, self._agreement = model, {}, None

    def tell(self, trials: Sequence[Trial]) -> None:
        """Takes measured spans in; more than once does no harm."""
        for trial in trials:
            if math.isfinite(trial.span_s) and self._measured_s.get(trial.knobs) != trial.span_s:
                self._measured_s[trial.knobs] = trial.span_s
                self._agreement = None

    def predicted_s(self, knobs: Knobs) -> float | None:
        """As `PlanningModel.expected_s`; None also of cuts that are another layout's."""
        if knobs not in self._predicted_s:
            try:
                self._predicted_s[knobs] = self._model.expected_s(knobs)
            except PlanError:
                self._predicted_s[knobs] = None
        return self._predicted_s[knobs]

    @property
    def agreement(self) -> float:
        """From -1, all pairs in the other order, to 1; the weighted kin of Kendall's rank correlation."""
        if self._agreement is None:
            pairs = self._pairs()[-MOST_COMPARED:]
            right = weight = BENEFIT_OF_THE_DOUBT
            for (first_s, predicted_s), (second_s, other_predicted_s) in combinations(pairs, 2):
                differ = min(abs(math.log(first_s / second_s)), LARGEST_WEIGHT)
                as_predicted = (first_s - second_s) * (predicted_s - other_predicted_s) > 0.0
                weight += differ
                right += differ if as_predicted else -differ
            self._agreement = right / weight
        return self._agreement

    @property
    def believed(self) -> bool:
        """Return whether trials have borne the model out so far."""
        if self._presumed:
            return self.agreement >= BELIEVED
        pairs = self._pairs()
        return len(pairs) >= LEAST_RANKED and _rank_correlation(pairs) >= RANKED

    def promises(self, knobs: Knobs, *, gain: float) -> bool:
        """Return whether a setting should beat the best by this share, if the model has the same error for both."""
        predicted_s, pairs = self.predicted_s(knobs), self._pairs()
        if predicted_s is None or not pairs:
            return True
        _, best_predicted_s = min(pairs)
        return predicted_s < (1.0 - gain) * best_predicted_s

    def _pairs(self) -> list[tuple[float, float]]:
        both = ((measured_s, self.predicted_s(knobs)) for knobs, measured_s in self._measured_s.items())
        return [(measured_s, predicted_s) for measured_s, predicted_s in both if predicted_s is not None]


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, equal values at their mean rank; 0 where all are equal. Loading `scipy.stats` for it takes 0.7 s."""
    first, second = (
        np.searchsorted(np.sort(column), column) + np.searchsorted(np.sort(column), column, side="right")
        for column in np.array(pairs).T
    )
    first, second = first - first.mean(), second - second.mean()
    size = math.sqrt((first @ first) * (second @ second))
    return float(first @ second) / size if size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks in a ring over equal links.

    Attributes:
        name: for tables.
        ranks: members of the ring.
        hop_s: latency of one hop (LIBRA's α in eq. 4).
        link_bytes_per_s: what a rank's link carries each way.
        flow_bytes_per_s: what a single flow, hence one stream, can carry of that.
        crowding: share of the throughput lost with each stream beyond those that fill the link.

    Raises:
        TuningError: a number that is invalid.
    """

    name: str
    ranks: int
    hop_s: float
    link_bytes_per_s: float
    flow_bytes_per_s: float
    crowding: float = 0.01

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise TuningError(f"a cluster has at least two ranks, not {self.ranks}")
        if self.hop_s < 0 or not 0 < self.flow_bytes_per_s <= self.link_bytes_per_s:
            raise TuningError(
                f"a cluster needs hop_s ≥ 0 and 0 < flow ≤ link rate, not {self.hop_s} s, "
                f"{self.flow_bytes_per_s} and {self.link_bytes_per_s} bytes/s"
            )
        if not 0 <= self.crowding < 1:
            raise TuningError(f"crowding is a share from 0 up to 1, not {self.crowding}")

    def link(self, *, max_streams: int = 24) -> LinkModel:
        """Ring all-reduce: a = 2 (N − 1) α, and 2 (N − 1) / N bytes on the wire for each gradient byte (LIBRA eq. 4).

        n flows carry n times one flow until they fill the link; each further one loses `crowding` of it.
        """
        wire_bytes_per_byte = ring_bytes(1.0, self.ranks)
        filling = self.link_bytes_per_s / self.flow_bytes_per_s
        throughput = [
            min(n * self.flow_bytes_per_s, self.link_bytes_per_s)
            * (1 - self.crowding) ** max(0.0, n - filling)
            / wire_bytes_per_byte
            for n in range(1, max_streams + 1)
        ]
        return LinkModel(alpha_s=2 * (self.ranks - 1) * self.hop_s, throughput=tuple(throughput))


logger = logging.getLogger(__name__)

FEWEST_TRIALS = 5  # of a route
OFF = 0.1  # the share by which predictions may miss
MAX_PLANS = 12  # the plans with the fewest units count, which keeps a calibration to a quarter of a second
KEPT_BACK = 0.03
"""A factor of e costs the fit as much as a trial that is missed by this share: what no trial shows stays as it was."""

_SEARCH: Any = {"diff_step": 0.02, "loss": "soft_l1", "f_scale": 0.1, "max_nfev": 12}
"""How least squares are searched for, with so many simulations of all trials in one fit."""


def calibrate_link(
    link: LinkModel,
    *,
    layout: GradientLayout,
    profile: Profile,
    trials: Sequence[Trial],
    contention: ContentionModel | None = None,
) -> LinkModel:
    """`link` corrected so that the simulator meets measured trials: data that the warm-up collects anyway.

    Factors are fitted on α, on G(1) and on the far end of G, with the factors on G between the two interpolated, and
    on the processor's time where the link has one.

    Raises:
        TuningError: fewer than four trials ran, or the corrected model still misses them by more than
            `fits.MAX_RESIDUAL`.
    """
    plans, spans_s = _measured(layout, trials)
    corrected = _link_correction(link)

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        simulator = Simulator(layout=layout, profile=profile, link=corrected(logs), contention=contention)
        missed = np.array([simulator.run(plan).span_s for plan in plans]) / spans_s - 1
        return np.concatenate([missed, KEPT_BACK * logs])

    fit = scipy.optimize.least_squares(
        errors,
        x0=np.zeros(3 + (link.host_s > 0.0)),
        bounds=(-3, 3),
        **_SEARCH,
    )
    residual = root_mean_square(fit.fun[: len(plans)])
    if residual > MAX_RESIDUAL:
        raise TuningError(f"the simulator misses the trials by {residual:.0%}; at most {MAX_RESIDUAL:.0%} is trusted")
    best = corrected(fit.x)
    return replace(best, residual=residual)


def fitted_to_trials(model: PlanningModel, trials: Sequence[Trial]) -> PlanningModel:
    """The model with what trials tell more of than probes fitted to them (LIBRA's algorithm 2).

    First contention, where the job has probed or learnt it, then each link. Either stays as it is
    where half of its trials are met within `OFF`, fewer than `FEWEST_TRIALS` ran, or none fits.
    """
    for route in model.links:
        ran = [trial for trial in trials if trial.knobs.route == route]
        ran = [trial for trial in ran if trial.status is not TrialStatus.FAILED and math.isfinite(trial.span_s)]
        for fitted in (_with_contention_fitted, _with_link_fitted):
            missed = _missed(model, route, ran) if len(ran) >= FEWEST_TRIALS else 0.0
            if missed <= OFF:
                break
            try:
                other = fitted(model, route, ran)
            except TuningError as err:
                logger.debug("%s: %s", route[0].value, err)
                continue
            if _missed(other, route, ran) < missed:
                model = other
    return model


def _with_contention_fitted(model: PlanningModel, route: Route, trials: Sequence[Trial]) -> PlanningModel:
    if model.contention_on(route) is None:
        raise TuningError("spans alone do not tell contention from a slow link, and nobody has probed it")
    return with_contention_learnt(model, route, [Observation(knobs=each.knobs, span_s=each.span_s) for each in trials])


def _with_link_fitted(model: PlanningModel, route: Route, trials: Sequence[Trial]) -> PlanningModel:
    link = calibrate_link(
        model.links[route],
        layout=model.layout,
        profile=model.profile,
        trials=trials,
        contention=model.contention_on(route),
    )
    return replace(model, links={**model.links, route: link})


def _missed(model: PlanningModel, route: Route, trials: Sequence[Trial]) -> float:
    """By how much the median of the predictions misses the trials, as a logarithm."""
    simulator = model.simulator(route)
    return median([abs(math.log(simulator.run_knobs(trial.knobs).span_s / trial.span_s)) for trial in trials])


def _link_correction(link: LinkModel) -> Callable[[NDArray[np.float64]], LinkModel]:
    far = np.linspace(0, 1, len(link.throughput)) if len(link.throughput) > 1 else np.zeros(1)
    alpha_s = max(link.alpha_s, 1e-9)  # a factor cannot correct zero

    def corrected(logs: NDArray[np.float64]) -> LinkModel:
        factors = np.exp(logs[1] * (1 - far) + logs[2] * far)
        throughput = tuple((np.array(link.throughput) * factors).tolist())
        host_s = link.host_s * math.exp(logs[3]) if len(logs) > 3 else link.host_s
        return replace(link, alpha_s=alpha_s * math.exp(logs[0]), throughput=throughput, host_s=host_s)

    return corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an iteration of training took with a setting.

    Attributes:
        knobs: the setting.
        span_s: from the first ready gradient to the last reduced one.
        backward_s: from the first ready gradient to the end of the backward pass; not a number = nobody has seen.
    """

    knobs: Knobs
    span_s: float
    backward_s: float = math.nan


LEAST_MISS = 0.02  # by which the best of simulators misses: what is nearer says nothing
SURE = 0.99  # that what was measured cannot be noise around the model as it was
MOST_SLOWED = 0.95  # of the computation's speed, by the most threads that were seen
_NO_EFFECT = RateCurve(gamma_1=1.0, gamma_2=0.0, gamma_3=0.0)


def with_contention_learnt(model: PlanningModel, route: Route, seen: Sequence[Observation]) -> PlanningModel:
    """The model with the contention that training itself has met on a route (LIBRA, algorithm 2, line 3).

    Two numbers are fitted, with the simulator as the model, each beginning with what probes have shown: by how much a
    thread slows the computation down (α2), and by how much the computation slows an all-reduce down (p over q). Where
    nobody has probed contention, as on the processors of hosts, an all-reduce counts as one thread on each stream. A
    third number is how long the backward pass takes undisturbed; of observations that do not tell of backward passes,
    the factor by which probes have missed the rates takes its place.

    Raises:
        TuningError: there are fewer than three settings, the fit misses them by more than `MAX_RESIDUAL`, or noise
            alone would explain by how much it is better than the model as it was.
    """
    times_s: dict[Knobs, list[tuple[float, float]]] = {}
    for one in seen:
        if one.knobs.route == route and math.isfinite(one.span_s):
            times_s.setdefault(one.knobs, []).append((one.span_s, one.backward_s))
    if len(times_s) < 3:
        raise TuningError(f"contention can be learnt from three settings or more, not from {len(times_s)}")
    times_s = {knobs: times_s[knobs] for knobs in sorted(times_s, key=lambda knobs: knobs.unit_bytes)[-MAX_PLANS:]}
    plans = [knobs.to_plan(model.layout) for knobs in times_s]
    measured = np.log(np.maximum([np.median(each, axis=0) for each in times_s.values()], 1e-9))  # (n_settings, 2)
    paces = bool(np.isfinite(measured).all())
    rate = model.links[route].throughput[0]
    base = model.contention_on(route) or ContentionModel(
        alpha_1=1.0,
        alpha_2=0.0,
        overlapped=replace(_NO_EFFECT, gamma_1=rate),
        alone=replace(_NO_EFFECT, gamma_1=rate),
        default_threads=1,
    )
    threads = max(plan.streams * max(unit.threads or base.default_threads for unit in plan.units) for plan in plans)

    def corrected(x: NDArray[np.float64]) -> PlanningModel:
        beside, factor = math.exp(x[1]), 1.0 if paces else math.exp(x[2])
        contention = replace(
            base,
            alpha_2=base.alpha_2 + float(x[0]) / threads,
            overlapped=_faster(base.overlapped, beside * factor),
            alone=_faster(base.alone, factor),
        )
        pace = math.exp(x[2]) if paces else 1.0
        return replace(model, profile=model.profile.times(pace), learnt={**model.learnt, route: contention})

    def missed(x: NDArray[np.float64]) -> NDArray[np.float64]:
        told = [corrected(x).simulator(route).run(plan) for plan in plans]
        both = np.log(np.maximum([(one.span_s, one.compute_end_s - one.first_ready_s) for one in told], 1e-9))
        return np.asarray(((both - measured) if paces else (both - measured)[:, :1]).ravel())

    def fitted(x: NDArray[np.float64], free: Sequence[int]) -> NDArray[np.float64]:
        def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
            x[free] = values
            return np.concatenate([missed(x), KEPT_BACK * x[:2]])

        fit = scipy.optimize.least_squares(
            errors,
            x0=np.clip(start[free], low[free], high[free]),
            bounds=(low[free], high[free]),
            **_SEARCH,
        )
        x[free] = fit.x
        return x

    slowed = base.alpha_2 * threads
    reach = math.log(base.alone.gamma_1 / base.overlapped.gamma_1)
    low = np.array([-slowed - 1e-9, -1.5, -1.0])
    high = np.array([max(MOST_SLOWED - slowed, 0.0) + 1e-9, max(reach, 0.0) + 1e-9, 0.1 if paces else 1.0])
    start = np.array([0.05, -0.05, -0.05 if paces else 0.0])
    as_it_was, learnt = fitted(np.zeros(3), [2] if paces else []), fitted(np.zeros(3), [0, 1, 2])
    before, after = missed(as_it_was), missed(learnt)
    if (residual := root_mean_square(after)) > MAX_RESIDUAL:
        raise TuningError(f"contention misses the iterations by {residual:.0%}; at most {MAX_RESIDUAL:.0%} is trusted")
    # Of F's distribution with 2 degrees of freedom and so many; what a simulator never meets counts as noise.
    left = len(after) - 3
    explained = float((before**2).sum() - (after**2).sum()) / (float((after**2).sum()) + len(after) * LEAST_MISS**2)
    if left < 1 or explained <= (1.0 - SURE) ** (-2.0 / left) - 1.0:
        raise TuningError(f"contention is not clear from {len(plans)} settings")
    found = corrected(learnt)
    return replace(found, learnt={**found.learnt, route: replace(found.learnt[route], residual=residual)})


def _faster(curve: RateCurve, factor: float) -> RateCurve:
    return replace(curve, gamma_1=factor * curve.gamma_1, gamma_2=factor * curve.gamma_2)


DRAWS = 3
"""Settings that a warm-up draws to learn contention from; with the default they are four."""

DRAWN_STREAMS, DRAWN_UNITS = 2, 4
"""Factors by which a drawn setting may be off the default's streams, and its threads and units."""

DRAWN_SLOWER = 1.1
"""Of the default's time, what a drawn setting is expected to take at most."""


ROUNDS = 3
"""In which each allowance is drawn once, with units of another size, as long as there are too few draws."""


class ContentionLearner:
    """Learns contention while training runs (LIBRA, algorithm 2): from the default and settings near it, at random.

    Attributes:
        draws: settings on the default's route that should run first, with other streams, threads and units; none that
            the model expects to be clearly slower, and none where it knows nothing of that route, or where ranks
            communicate on the processors that compute, of which `SharedHost` knows as much as training shows.
    """

    def __init__(self, model: PlanningModel, *, space: KnobSpace, default: Knobs, rng: np.random.Generator) -> None:
        self._default, self._seen = default, list[Observation]()
        self.draws: tuple[Knobs, ...] = ()
        known = model.contention_on(default.route) is not None or space.threads[1:] == ()
        if known and model.host is None and default.route in model.links and model.layout.numel:
            self.draws = tuple(_drawn(model, space, default, rng))

    def learn(self, model: PlanningModel, seen: Sequence[Observation]) -> PlanningModel | None:
        """The model with what iterations of a setting, and those before, say of contention.

        Args:
            model: as planners have it.
            seen: of one setting; the default runs first.

        Returns:
            None until that is known: after the default where the model misses it by no more than `OFF`, so that draws
            would teach nothing, else once every draw has run. The model as it was where nothing is learnt.
        """
        self._seen += seen
        ran = {one.knobs for one in self._seen}
        if not self.draws or (ran == {self._default} and self._is_met_by(model)):
            return model
        if not ran.issuperset(self.draws):
            return None
        try:
            return with_contention_learnt(model, self._default.route, self._seen)
        except TuningError as err:
            logger.debug("contention stays as it was: %s", err)
            return model

    def _is_met_by(self, model: PlanningModel) -> bool:
        """While only the default has run."""
        told_s = model.simulator(self._default.route).run_knobs(self._default).span_s
        return abs(math.log(told_s / median(one.span_s for one in self._seen))) <= OFF


def _drawn(model: PlanningModel, space: KnobSpace, default: Knobs, rng: np.random.Generator) -> Iterator[Knobs]:
    """Settings near the default, each with an allowance (streams and threads) of its own as far as there are any."""
    simulator, (low, high) = model.simulator(default.route), space.unit_bytes
    at_most_s = DRAWN_SLOWER * simulator.run_knobs(default).span_s
    near = [n for n in space.streams_on(default.route) if 1 / DRAWN_STREAMS <= n / default.streams <= DRAWN_STREAMS]
    allowances = [(streams, threads) for streams in near for threads in space.threads]
    allowances.sort(key=lambda allowance: allowance == (default.streams, default.threads))  # which comes last
    if not allowances:
        return
    others = len(allowances) - 1
    plans, count = {default.to_plan(model.layout)}, 0
    for place in [*(place for _ in range(ROUNDS) for place in rng.permutation(others).tolist()), *[others] * ROUNDS]:
        streams, threads = allowances[place]
        octaves = math.log2(DRAWN_UNITS) * float(rng.uniform(-1.0, 1.0))
        unit_bytes = min(max(round(default.unit_bytes * 2.0**octaves), low), high)
        knobs = default.but(unit_bytes=unit_bytes, streams=streams, threads=threads)
        plan = knobs.to_plan(model.layout)
        if plan not in plans and simulator.run_knobs(knobs).span_s <= at_most_s:
            plans.add(plan)
            yield knobs
            count += 1
            if count == DRAWS:
                return


def _measured(layout: GradientLayout, trials: Sequence[Trial]) -> tuple[list[CommPlan], NDArray[np.float64]]:
    """Plans and spans of the trials with the fewest units, of those that ran."""
    usable = [t for t in trials if t.status is not TrialStatus.FAILED and math.isfinite(t.span_s) and t.span_s > 0]
    pairs = sorted(((t.knobs.to_plan(layout), t.span_s) for t in usable), key=lambda pair: len(pair[0].units))
    if len(pairs) < 4:
        raise TuningError(f"a calibration needs four trials or more that ran, not {len(pairs)}")
    pairs = pairs[:MAX_PLANS]
    return [plan for plan, _ in pairs], np.array([span_s for _, span_s in pairs])
