"""Model that predicts a job's communication time with any setting, and corrections of the model by measured trials."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from statistics import median
from typing import Any

import msgspec
import numpy as np
import scipy
from numpy.typing import NDArray

from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, Route, TransportKind
from sirtaki.errors import PlanError, TuningError, require
from sirtaki.measures import LinkModel, ring_bytes

from ..knobs import Knobs
from ..trial import Trial, TrialStatus
from .fits import ContentionModel, RateCurve, check_residual, root_mean_square
from .replayer import SharedHost
from .simulator import Profile, Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningModel:
    """Model of a job's communication, from which planners divide the gradients into units (buckets).

    Attributes:
        layout: gradients in the order in which they become ready.
        profile: times at which gradients become ready.
        links: latency and bandwidth model of each measured route (transport and algorithm), at least one.
        contention: LIBRA's model of how computation and communication slow each other down, measured by probes before
            training; None = no slow-down, or not measured.
        learnt: {route: LIBRA's model fitted to training iterations}. It has precedence over `contention`.
        host: the single host of all ranks, if communication uses the processors that compute; otherwise None.
        ranks: number of ranks of the job. None if a log of an older release does not have it.

    Raises:
        TuningError: `profile` and `layout` do not match, or `links` is empty.
    """

    layout: GradientLayout
    profile: Profile
    links: Mapping[Route, LinkModel]
    contention: ContentionModel | None = None
    learnt: Mapping[Route, ContentionModel] = field(default_factory=dict)
    host: SharedHost | None = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        self.profile.check_fits(self.layout)
        require(self.links, "links", "latency and bandwidth of at least one transport", "none", TuningError)

    def simulator(self, route: Route) -> Simulator:
        """Create a simulator of the job's training iteration on a route (transport and algorithm)."""
        return Simulator(
            layout=self.layout,
            profile=self.profile,
            link=self.links[route],
            contention=self.contention_on(route),
            host=self.host,
        )

    def contention_on(self, route: Route) -> ContentionModel | None:
        """Return the route's contention model (how much computation and communication slow each other down).

        A route is a pair of transport and algorithm. A model fitted to training iterations has precedence over the
        model measured by probes.
        """
        return self.learnt.get(route, self.contention)

    def expected_s(self, knobs: Knobs) -> float | None:
        """Predict the communication time of an iteration with these knobs, by simulation.

        Returns:
            Seconds. None if the knobs' route (transport and algorithm) was not measured, or if they set compressors or
            NCCL algorithms, because probes do not measure the costs of compressors and NCCL algorithms.

        Raises:
            PlanError: the knobs' cuts do not fit the layout.
        """
        is_measured = knobs.route in self.links and not (knobs.lossy or knobs.nccl)
        return self.simulator(knobs.route).run_knobs(knobs).span_s if is_measured else None

    def link_between_hosts(self, route: Route) -> LinkModel | None:
        """Return the latency and bandwidth model of a route (transport and algorithm) between hosts.

        None if the route was not measured, or if all ranks are on one host and communicate on its processors.
        """
        return None if self.host is not None else self.links.get(route)

    @property
    def bound_s(self) -> float:
        """Return a lower bound of the communication time of an iteration with any setting, in seconds.

        It is the larger of two times: the backward pass from its first gradient on, and the transmission of all bytes
        at the highest rate of any route (transport and algorithm) and number of streams. The rate counts gradient
        bytes, so that it includes the factor 2 (P − 1) / P of a ring of P ranks.
        """
        fastest = max(max(link.throughput) for link in self.links.values())
        compute_s = max(self.profile.ready_s) - min(self.profile.ready_s)
        return max(compute_s, self.layout.total_bytes / fastest)

    def differs_from(self, other: PlanningModel) -> bool:
        """Return whether two models differ so much that planners must compute their plans again.

        They must if the gradients, routes, contention models or hosts differ, if a link's latency or bandwidth differs
        by more than its measurement error, or if a gradient's ready time differs by more than a tenth of the backward
        pass.
        """
        if self.layout != other.layout or set(self.links) != set(other.links):
            return True
        if any(link.differs_from(other.links[route]) for route, link in self.links.items()):
            return True
        if (self.contention, self.learnt, self.host) != (other.contention, other.learnt, other.host):
            return True
        tolerance_s = 0.1 * max(self.profile.compute_s, other.profile.compute_s)
        pairs = zip(self.profile.ready_s, other.profile.ready_s, strict=True)
        return any(abs(one - another) > tolerance_s for one, another in pairs)

    def to_json(self) -> dict[str, Any]:
        """Return the model as a JSON-serialisable dict, for predictions and reports. `from_json` is the inverse."""
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
            "ranks": self.ranks,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanningModel:
        """Create a model from the dict that `PlanningModel.to_json` returns.

        Raises:
            TuningError: a field is missing or invalid.
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
                ranks=msgspec.convert(data.get("ranks"), int | None),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise TuningError(f"the stored measurements of gradients and all-reduces are damaged: {err!r}") from err


BENEFIT_OF_THE_DOUBT = 0.05
"""Weight of the initial trust in a model of communication times, before there are trials (`Forecast.agreement`).

It counts as one pair of settings that differ by 5 % in time, and whose order the model predicts correctly.
"""

LARGEST_WEIGHT = 0.5
"""Maximum weight of a pair of settings in `Forecast.agreement`, as a relative difference of their measured times.

The limit prevents that pairs with one very slow setting outweigh all other pairs.
"""

BELIEVED = 0.4
"""Minimum `Forecast.agreement` of a trusted model.

At this value, the model predicts which setting is faster for pairs with 70 % of all pairs' total weight.
"""

LEAST_RANKED, RANKED = 5, 0.7
"""Conditions for trusting a model that is not trusted initially: number of measured settings, and rank correlation.

Both are minima. The correlation (Spearman's) is that of predicted and measured times.
"""

MOST_COMPARED = 24
"""Number of measured settings, the most recent ones, that `Forecast.agreement` compares with each other."""


class Forecast:
    """Communication times that a model predicts, and their agreement with measured trials.

    Args:
        model: model of the job's communication. `update_model` replaces it, and keeps the measurements.
        presumed: whether the model is trusted until trials contradict it. If not, it is trusted only after it has
            predicted the order of trials correctly.
    """

    def __init__(self, model: PlanningModel, *, presumed: bool = True) -> None:
        self._model, self._presumed = model, presumed
        self._measured_s: dict[Knobs, float] = {}
        self._predicted_s: dict[Knobs, float | None] = {}
        self._agreement: float | None = None

    def update_model(self, model: PlanningModel) -> None:
        """Replace the model of the job's communication.

        Measured trials are kept, and compared with the new model's predictions.
        """
        if model is not self._model:
            self._model, self._predicted_s, self._agreement = model, {}, None

    def tell(self, trials: Sequence[Trial]) -> None:
        """Add the communication times that trials have measured. Adding a trial twice has no further effect."""
        for trial in trials:
            if math.isfinite(trial.span_s) and self._measured_s.get(trial.knobs) != trial.span_s:
                self._measured_s[trial.knobs] = trial.span_s
                self._agreement = None

    def predicted_s(self, knobs: Knobs) -> float | None:
        """Return the predicted communication time of an iteration with these knobs, in seconds.

        None if the model has no prediction for the knobs, or if the knobs' cuts do not fit the layout.
        """
        if knobs not in self._predicted_s:
            try:
                self._predicted_s[knobs] = self._model.expected_s(knobs)
            except PlanError:
                self._predicted_s[knobs] = None
        return self._predicted_s[knobs]

    @property
    def agreement(self) -> float:
        """Return how well predicted times order the measured settings, from -1 (all pairs in reverse order) to 1.

        It is Kendall's rank correlation, with each pair of settings weighted by the difference of their measured
        communication times.
        """
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
        """Return whether the model is trusted: its predictions agree well enough with all trials."""
        if self._presumed:
            return self.agreement >= BELIEVED
        pairs = self._pairs()
        return len(pairs) >= LEAST_RANKED and _rank_correlation(pairs) >= RANKED

    def promises(self, knobs: Knobs, *, gain: float) -> bool:
        """Return whether a setting is predicted to beat the best measured setting by the fraction `gain`.

        Both times are predictions, because the model's error is probably similar for both settings. Return True without
        a prediction for the setting, or without a measured setting.
        """
        predicted_s, pairs = self.predicted_s(knobs), self._pairs()
        if predicted_s is None or not pairs:
            return True
        _, best_predicted_s = min(pairs)
        return predicted_s < (1.0 - gain) * best_predicted_s

    def _pairs(self) -> list[tuple[float, float]]:
        both = ((measured_s, self.predicted_s(knobs)) for knobs, measured_s in self._measured_s.items())
        return [(measured_s, predicted_s) for measured_s, predicted_s in both if predicted_s is not None]


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation of pairs of values; 0 if all values are equal.

    Equal values have their mean rank. `scipy.stats` is not used, because importing it takes 0.7 s.
    """
    first, second = (
        np.searchsorted(np.sort(column), column) + np.searchsorted(np.sort(column), column, side="right")
        for column in np.array(pairs).T
    )
    first, second = first - first.mean(), second - second.mean()
    size = math.sqrt((first @ first) * (second @ second))
    return float(first @ second) / size if size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Cluster that is described by the user instead of measured: a ring of ranks with equal links.

    Attributes:
        name: name of the cluster in tables.
        ranks: number of ranks in the ring, at least two.
        hop_s: latency between two neighbours of the ring (LIBRA's α in eq. 4).
        link_bytes_per_s: rate of a rank's link in each direction.
        flow_bytes_per_s: maximum rate of a single flow, that is of one stream.
        crowding: fraction of the throughput that is lost with each stream beyond the number that saturates the link.

    Raises:
        TuningError: an attribute is out of range.
    """

    name: str
    ranks: int
    hop_s: float
    link_bytes_per_s: float
    flow_bytes_per_s: float
    crowding: float = 0.01

    def __post_init__(self) -> None:
        require(
            self.ranks >= 2
            and self.hop_s >= 0
            and 0 < self.flow_bytes_per_s <= self.link_bytes_per_s
            and 0 <= self.crowding < 1,
            f"cluster {self.name!r}",
            "ranks >= 2, hop_s >= 0, 0 < flow_bytes_per_s <= link_bytes_per_s and 0 <= crowding < 1",
            self,
            TuningError,
        )

    def link(self, *, max_streams: int = 24) -> LinkModel:
        """Return the latency and bandwidth model of a ring all-reduce on the cluster (LIBRA eq. 4).

        With N ranks, the start-up time is 2 (N − 1) α, and each gradient byte needs 2 (N − 1) / N bytes on the wire.
        n flows have n times the rate of one flow until they saturate the link. Each further flow reduces the total rate
        by `crowding`.
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

FEWEST_TRIALS = 5
"""Minimum number of trials on a route (transport and algorithm) for correcting the route's model by these trials."""

TOLERANCE = 0.1
"""Relative error of predicted communication times up to which a model is not corrected by trials."""

MAX_PLANS = 12
"""Maximum number of trials by which a latency and bandwidth model is corrected. The fit then takes at most 0.25 s.

If there are more trials, those whose settings have the fewest units (buckets) are used.
"""

REGULARISATION = 0.03
"""Penalty for changing a parameter of a model that is fitted to trials (regularisation).

A change by a factor of e counts as much as a relative error of this size in one predicted communication time. Without a
penalty, parameters that the trials do not determine would get arbitrary values.
"""

_SEARCH: Any = {"diff_step": 0.02, "loss": "soft_l1", "f_scale": 0.1, "max_nfev": 12}
"""Arguments of `scipy.optimize.least_squares` in all fits of this module.

`max_nfev` is small, because each evaluation of the error simulates all trials.
"""


def calibrate_link(
    link: LinkModel,
    *,
    layout: GradientLayout,
    profile: Profile,
    trials: Sequence[Trial],
    contention: ContentionModel | None = None,
) -> LinkModel:
    """Correct a model of latency and bandwidth so that simulated times match those of measured trials.

    Correction factors are fitted for the start-up time of a message, for its processor time (if not zero), and for the
    throughput of one stream and of the largest number of streams. In between, they are interpolated.

    Args:
        link: the latency and bandwidth model to correct.
        layout: the job's gradients.
        profile: the job's compute times.
        trials: measured trials of settings on one route (transport and algorithm).
        contention: model of how computation and communication slow each other down; None = they do not.

    Raises:
        TuningError: fewer than four trials succeeded, or the relative error of the corrected model's predictions
            exceeds `fits.MAX_RESIDUAL`.
    """
    plans, spans_s = _measured(layout, trials)
    corrected = _link_correction(link)

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        simulator = Simulator(layout=layout, profile=profile, link=corrected(logs), contention=contention)
        missed = np.array([simulator.run(plan).span_s for plan in plans]) / spans_s - 1
        return np.concatenate([missed, REGULARISATION * logs])

    fit = scipy.optimize.least_squares(
        errors,
        x0=np.zeros(3 + (link.host_s > 0.0)),
        bounds=(-3, 3),
        **_SEARCH,
    )
    residual = root_mean_square(fit.fun[: len(plans)])
    check_residual("the corrected model of network latency and bandwidth", residual)
    best = corrected(fit.x)
    return replace(best, residual=residual)


def fitted_to_trials(model: PlanningModel, trials: Sequence[Trial]) -> PlanningModel:
    """Return a model of a job's communication, corrected by the times of measured trials (LIBRA's algorithm 2).

    On each route (transport and algorithm), first the contention model (how much computation and communication slow
    each other down) is fitted, if the job has one, then the link's latency and bandwidth. A route's model stays
    unchanged if the median error of its predictions is at most `TOLERANCE`, if fewer than `FEWEST_TRIALS` trials
    succeeded, or if the fit does not reduce the error.
    """
    for route in model.links:
        usable = [trial for trial in trials if trial.knobs.route == route]
        usable = [trial for trial in usable if trial.status is not TrialStatus.FAILED and math.isfinite(trial.span_s)]
        for fit in (_with_contention_fitted, _with_link_fitted):
            error = _median_error(model, route, usable) if len(usable) >= FEWEST_TRIALS else 0.0
            if error <= TOLERANCE:
                break
            try:
                fitted = fit(model, route, usable)
            except TuningError as err:
                logger.debug(
                    "Sirtaki keeps its model of network latency and bandwidth for the transport %s, because the "
                    "tuning trials did not give a better one: %s",
                    route[0].value,
                    err,
                )
                continue
            if _median_error(fitted, route, usable) < error:
                model = fitted
    return model


def _with_link_fitted(model: PlanningModel, route: Route, trials: Sequence[Trial]) -> PlanningModel:
    link = calibrate_link(
        model.links[route],
        layout=model.layout,
        profile=model.profile,
        trials=trials,
        contention=model.contention_on(route),
    )
    return replace(model, links={**model.links, route: link})


def _median_error(model: PlanningModel, route: Route, trials: Sequence[Trial]) -> float:
    """Return the median error of predicted communication times, as the absolute logarithm of predicted / measured."""
    simulator = model.simulator(route)
    return median([abs(math.log(simulator.run_knobs(trial.knobs).span_s / trial.span_s)) for trial in trials])


def _link_correction(link: LinkModel) -> Callable[[NDArray[np.float64]], LinkModel]:
    position = np.linspace(0, 1, len(link.throughput)) if len(link.throughput) > 1 else np.zeros(1)
    alpha_s = max(link.alpha_s, 1e-9)  # Use at least 1 ns, because a correction factor cannot change zero.

    def corrected(logs: NDArray[np.float64]) -> LinkModel:
        factors = np.exp(logs[1] * (1 - position) + logs[2] * position)
        throughput = tuple((np.array(link.throughput) * factors).tolist())
        host_s = link.host_s * math.exp(logs[3]) if len(logs) > 3 else link.host_s
        return replace(link, alpha_s=alpha_s * math.exp(logs[0]), throughput=throughput, host_s=host_s)

    return corrected


# Constants of the fit of the contention model: how much computation and communication slow each other down.
LEAST_ERROR = 0.02  # Assumed minimum relative error of the simulator's times.
CONFIDENCE = 0.99  # Required confidence that the fitted model is better than the unchanged model.
MOST_SLOWED = 0.95  # Communication with the most GPU threads slows computation by at most this fraction.


def _with_contention_fitted(model: PlanningModel, route: Route, trials: Sequence[Trial]) -> PlanningModel:
    """Fit the mutual slowdown of computation and communication ("contention") to the trials of a tuning session.

    This is line 3 of LIBRA's algorithm 2. Three parameters are fitted with the simulator, starting from the results of
    the measurements before training:

    - the slow-down of computation by each communication thread (α2),
    - the slow-down of an all-reduce by computation (p / q),
    - a common factor of the transmission rates with and without computation (p and q).

    Args:
        model: model of the job's communication to correct.
        route: the route (transport and algorithm) whose contention is fitted.
        trials: trials of several settings. Failed ones and those on other routes are ignored.

    Returns:
        A copy of the model with the fitted contention.

    Raises:
        TuningError: the model has no contention, fewer than three settings were measured, the relative error of the
            fitted model's times exceeds `MAX_RESIDUAL`, or their improvement over the unchanged model's times may be
            noise.
    """
    base = model.contention_on(route)
    if base is None:
        raise TuningError(
            "this job has no measurement of how much communication slows down computation, and communication times "
            "alone do not show it"
        )
    times_s: dict[Knobs, list[float]] = {}
    for trial in trials:
        if trial.knobs.route == route and math.isfinite(trial.span_s):
            times_s.setdefault(trial.knobs, []).append(trial.span_s)
    require(len(times_s) >= 3, "trials", "measured times of at least 3 settings", len(times_s), TuningError)
    times_s = {knobs: times_s[knobs] for knobs in sorted(times_s, key=lambda knobs: knobs.unit_bytes)[-MAX_PLANS:]}
    plans = [knobs.to_plan(model.layout) for knobs in times_s]
    measured = np.log(np.maximum([median(each) for each in times_s.values()], 1e-9))  # Shape: `(n_settings,)`.
    threads = max(plan.streams * max(unit.threads or base.default_threads for unit in plan.units) for plan in plans)

    def corrected(x: NDArray[np.float64]) -> PlanningModel:
        overlap_factor, rate_factor = math.exp(x[1]), math.exp(x[2])
        contention = replace(
            base,
            alpha_2=base.alpha_2 + float(x[0]) / threads,
            overlapped=_scaled(base.overlapped, overlap_factor * rate_factor),
            alone=_scaled(base.alone, rate_factor),
        )
        return replace(model, learnt={**model.learnt, route: contention})

    def errors_of(x: NDArray[np.float64]) -> NDArray[np.float64]:
        simulated_s = [corrected(x).simulator(route).run(plan).span_s for plan in plans]
        return np.asarray(np.log(np.maximum(simulated_s, 1e-9)) - measured)

    def errors(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([errors_of(x), REGULARISATION * x[:2]])

    slowed = base.alpha_2 * threads
    reach = math.log(base.alone.gamma_1 / base.overlapped.gamma_1)
    low = np.array([-slowed - 1e-9, -1.5, -1.0])
    high = np.array([max(MOST_SLOWED - slowed, 0.0) + 1e-9, max(reach, 0.0) + 1e-9, 1.0])
    start = np.array([0.05, -0.05, 0.0])
    learnt = scipy.optimize.least_squares(errors, x0=np.clip(start, low, high), bounds=(low, high), **_SEARCH).x
    before, after = errors_of(np.zeros(3)), errors_of(learnt)
    residual = root_mean_square(after)
    check_residual("the model of how computation and communication slow each other down", residual)
    # Reject the fit if its improvement over the unchanged model may be noise, by an F-test with 2 and `freedom` degrees
    # of freedom. The simulator's assumed minimum error counts as noise.
    freedom = len(after) - 3
    explained = float((before**2).sum() - (after**2).sum()) / (float((after**2).sum()) + len(after) * LEAST_ERROR**2)
    if freedom < 1 or explained <= (1.0 - CONFIDENCE) ** (-2.0 / freedom) - 1.0:
        raise TuningError(
            f"the measured times of {len(plans)} settings agree with the estimate of how much communication slows down "
            "computation, so the estimate stays"
        )
    found = corrected(learnt)
    return replace(found, learnt={**found.learnt, route: replace(found.learnt[route], residual=residual)})


def _scaled(curve: RateCurve, factor: float) -> RateCurve:
    return replace(curve, gamma_1=factor * curve.gamma_1, gamma_2=factor * curve.gamma_2)


def _measured(layout: GradientLayout, trials: Sequence[Trial]) -> tuple[list[CommPlan], NDArray[np.float64]]:
    """Return plans and communication times of successful trials, at most `MOST_TRIALS`, the fewest units (buckets)
    first.

    Raises:
        TuningError: fewer than four trials succeeded.
    """
    usable = [t for t in trials if t.status is not TrialStatus.FAILED and math.isfinite(t.span_s) and t.span_s > 0]
    pairs = sorted(((t.knobs.to_plan(layout), t.span_s) for t in usable), key=lambda pair: len(pair[0].units))
    require(len(pairs) >= 4, "trials", "at least 4 successful tuning trials", len(pairs), TuningError)
    pairs = pairs[:MAX_PLANS]
    return [plan for plan, _ in pairs], np.array([span_s for _, span_s in pairs])
