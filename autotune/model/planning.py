"""What planners know of a job, and what they predict."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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

from ..knobs import Knobs
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
        contention: LIBRA's model, or None where computation and communication do not slow each other down, or
            nobody has measured it.
        host: that all ranks share, where they communicate on the processors that compute; else None.

    Raises:
        TuningError: profile and layout are of different models, or no route has a link.
    """

    layout: GradientLayout
    profile: Profile
    links: Mapping[Route, LinkModel]
    contention: ContentionModel | None = None
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
            contention=self.contention,
            host=self.host,
        )

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
        """Whether plans should be made anew: another layout or route, or a parameter moved beyond its error.

        Ready times count as moved if one of them moved by more than a tenth of the backward pass.
        """
        if self.layout != other.layout or set(self.links) != set(other.links):
            return True
        if any(link.differs_from(other.links[route]) for route, link in self.links.items()):
            return True
        if (self.contention, self.host) != (other.contention, other.host):
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
                {"transport": transport.value, "algorithm": algorithm.value, "link": asdict(link)}
                for (transport, algorithm), link in self.links.items()
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
            return cls(
                layout=msgspec.convert(data["layout"], GradientLayout),
                profile=msgspec.convert(data["profile"], Profile),
                links={
                    (TransportKind(entry["transport"]), Algorithm(entry["algorithm"])): LinkModel.from_json(
                        entry["link"]
                    )
                    for entry in data["links"]
                },
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

DOUBT = 0.3
"""Weight of trials that a model must outweigh that is not presumed to be right: three pairs that differ by a tenth."""

MOST_COMPARED = 24


class Forecast:
    """A model's predictions, and what became of them.

    Attributes:
        model: predicts; what has been measured stays when it is replaced.
        presumed: it is believed before trials have run.
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
            right, weight = (BENEFIT_OF_THE_DOUBT, BENEFIT_OF_THE_DOUBT) if self._presumed else (0.0, DOUBT)
            for (first_s, predicted_s), (second_s, other_predicted_s) in combinations(pairs, 2):
                differ = min(abs(math.log(first_s / second_s)), LARGEST_WEIGHT)
                as_predicted = (first_s - second_s) * (predicted_s - other_predicted_s) > 0.0
                weight += differ
                right += differ if as_predicted else -differ
            self._agreement = right / weight
        return self._agreement

    @property
    def believed(self) -> bool:
        """Whether trials have borne the model out so far."""
        return self.agreement >= BELIEVED

    def promises(self, knobs: Knobs, *, gain: float) -> bool:
        """Whether a setting should beat the best by that share, if the model is as far off there as for the best."""
        predicted_s, pairs = self.predicted_s(knobs), self._pairs()
        if predicted_s is None or not pairs:
            return True
        _, best_predicted_s = min(pairs)
        return predicted_s < (1.0 - gain) * best_predicted_s

    def _pairs(self) -> list[tuple[float, float]]:
        both = ((measured_s, self.predicted_s(knobs)) for knobs, measured_s in self._measured_s.items())
        return [(measured_s, predicted_s) for measured_s, predicted_s in both if predicted_s is not None]


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

_MAX_EVALUATIONS = 12  # of the simulator, for all trials, in one fit of a link


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
    plans, spans_s = _measured(layout, trials, at_least=4)
    corrected = _link_correction(link)

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        simulator = Simulator(layout=layout, profile=profile, link=corrected(logs), contention=contention)
        missed = np.array([simulator.run(plan).span_s for plan in plans]) / spans_s - 1
        return np.concatenate([missed, KEPT_BACK * logs])

    fit = scipy.optimize.least_squares(
        errors,
        x0=np.zeros(3 + (link.host_s > 0.0)),
        bounds=(-3, 3),
        diff_step=0.02,
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=_MAX_EVALUATIONS,
    )
    residual = root_mean_square(fit.fun[: len(plans)])
    if residual > MAX_RESIDUAL:
        raise TuningError(f"the simulator misses the trials by {residual:.0%}; at most {MAX_RESIDUAL:.0%} is trusted")
    best = corrected(fit.x)
    return replace(best, residual=residual)


def fitted_to_trials(model: PlanningModel, trials: Sequence[Trial]) -> PlanningModel:
    """The model with what trials tell more of than probes fitted to them (LIBRA's algorithm 2).

    First contention, where the job has probed it and thread counts were tried, then each link. Either stays as it is
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
    if model.contention is None:
        raise TuningError("nobody has probed contention")
    contention = calibrate_contention(
        model.links[route],
        layout=model.layout,
        profile=model.profile,
        trials=trials,
        default_threads=model.contention.default_threads,
    )
    return replace(model, contention=contention)


def _with_link_fitted(model: PlanningModel, route: Route, trials: Sequence[Trial]) -> PlanningModel:
    link = calibrate_link(
        model.links[route], layout=model.layout, profile=model.profile, trials=trials, contention=model.contention
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


def calibrate_contention(
    link: LinkModel,
    *,
    layout: GradientLayout,
    profile: Profile,
    trials: Sequence[Trial],
    default_threads: int = 512,
) -> ContentionModel:
    """LIBRA's g, p and q (eq. 5-6) from trials with different thread counts, without timing any overlap by itself.

    Five numbers are fitted, with the simulator as the model: α2; γ1, γ2 / γ1 and γ3 of p; and the factor by which
    q is faster. α1 is 1: without threads there is no contention. Spans tell these apart only as far as they matter to
    spans, so the curves may be off where no trial went.

    Raises:
        TuningError: fewer than six trials ran, there are fewer than three thread counts among them, or the
            fitted model misses them by more than `MAX_RESIDUAL`.
    """
    plans, spans_s = _measured(layout, trials, at_least=6)
    counts = {unit.threads or default_threads for plan in plans for unit in plan.units}
    if len(counts) < 3:
        raise TuningError(f"contention can be fitted to three thread counts or more, not to {sorted(counts)}")
    rate, most = link.throughput[0], max(counts)

    def model(x: NDArray[np.float64], residual: float = 0.0) -> ContentionModel:
        gamma_1 = rate * math.exp(x[1])
        overlapped = RateCurve(gamma_1=gamma_1, gamma_2=gamma_1 * float(x[2]), gamma_3=math.exp(x[3]))
        faster = math.exp(x[4])
        alone = RateCurve(
            gamma_1=overlapped.gamma_1 * faster, gamma_2=overlapped.gamma_2 * faster, gamma_3=overlapped.gamma_3
        )
        return ContentionModel(
            alpha_1=1.0,
            alpha_2=float(x[0]) / most,
            overlapped=overlapped,
            alone=alone,
            default_threads=default_threads,
            residual=residual,
        )

    def errors(x: NDArray[np.float64]) -> NDArray[np.float64]:
        simulator = Simulator(layout=layout, profile=profile, link=link, contention=model(x))
        return np.asarray(np.array([simulator.run(plan).span_s for plan in plans]) / spans_s - 1)

    best = min(
        (
            scipy.optimize.least_squares(
                errors,
                x0=[0.2, 0.0, 0.7, log_gamma_3, 0.05],
                bounds=([0, -2, 0, -8, 0], [0.95, 2, 0.999, 0, 0.7]),
                diff_step=0.02,
                max_nfev=15,
            )
            for log_gamma_3 in (-4.5, -2.5)
        ),
        key=lambda fit: float(fit.cost),
    )
    residual = root_mean_square(best.fun)
    if residual > MAX_RESIDUAL:
        raise TuningError(f"contention misses the trials by {residual:.0%}; at most {MAX_RESIDUAL:.0%} is trusted")
    return model(best.x, residual)


def _measured(
    layout: GradientLayout, trials: Sequence[Trial], *, at_least: int
) -> tuple[list[CommPlan], NDArray[np.float64]]:
    """Plans and spans of the trials with the fewest units, of those that ran."""
    usable = [t for t in trials if t.status is not TrialStatus.FAILED and math.isfinite(t.span_s) and t.span_s > 0]
    pairs = sorted(((t.knobs.to_plan(layout), t.span_s) for t in usable), key=lambda pair: len(pair[0].units))
    if len(pairs) < at_least:
        raise TuningError(f"a calibration needs {at_least} trials or more that ran, not {len(pairs)}")
    pairs = pairs[:MAX_PLANS]
    return [plan for plan, _ in pairs], np.array([span_s for _, span_s in pairs])
