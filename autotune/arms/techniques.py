"""Search methods ("arms"): grid, population based training, Hyperband, scikit-optimize, and those of other packages.

The module also has the arms that try gradient compressors, and NCCL's algorithms and protocols.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import islice
from types import ModuleType
from typing import Any, cast

import msgspec
import numpy as np

from sirtaki.comm.plan import TransportKind, UnitClass, goes_through_sockets
from sirtaki.errors import ConfigError, TuningError, require

from ..knobs import KnobLattice, Knobs, KnobSpace, Lossy, NcclWays
from ..trial import Arm, Proposal, Trial, TrialStatus
from .bayesian import BayesianArm


def require_package(arm: str, package: str, distribution: str) -> None:
    """Check that a package that a search method (arm) needs is installed, without importing the package.

    Args:
        arm: name of the search method, for the error message.
        package: import name of the package.
        distribution: name for `pip install`.

    Raises:
        TuningError: the package is not installed.
    """
    if find_spec(package) is None:
        raise TuningError(
            f"the search technique {arm} needs the package {distribution}, which is not installed: run pip install "
            f"{distribution}, or do not select {arm}"
        )


@cache
def import_late(name: str) -> ModuleType:
    """Import a module in a separate thread, and return the module.

    A library may keep the exceptions of failed optional imports, and thus all stack frames of the importing thread. The
    training thread's frames would keep the user's model alive.
    """
    with ThreadPoolExecutor(max_workers=1) as stack:
        return stack.submit(import_module, name).result()


# ── grid ───


def radical_inverse(number: int, base: int) -> float:
    """Return the radical inverse of `number`: its digits in `base`, mirrored at the radix point.

    6 in base 2 (110) becomes 0.011 = 0.375.
    """
    result, scale = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        result += digit * scale
        scale /= base
    return result


def halton(lattice: KnobLattice) -> Iterator[Knobs]:
    """Yield every setting of the grid (lattice) once, in the order of the Halton sequence."""
    seen: set[Knobs] = set()
    for number in range(1, 8 * len(lattice)):
        knobs = lattice.snap(np.array([radical_inverse(number, base) for base in (2, 3, 5, 7)]))
        if knobs not in seen:
            seen.add(knobs)
            yield knobs
    yield from (knobs for knobs in lattice.points if knobs not in seen)


class GridArm:
    """Search method (arm) that proposes each setting of a coarse grid once, unless another arm's trial measured it."""

    name = "grid"

    def __init__(self, space: KnobSpace) -> None:
        self._grid = list(halton(KnobLattice(_coarse(space), steps_per_octave=1)))
        self._measured: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return the next `n` unmeasured settings of the grid, or fewer at the grid's end."""
        unmeasured = (knobs for knobs in self._grid if knobs not in self._measured)
        return [Proposal(arm=self.name, knobs=knobs) for knobs in islice(unmeasured, n)]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Mark the settings of the trials as measured."""
        self._measured.update(trial.knobs for trial in trials)


def _coarse(space: KnobSpace) -> KnobSpace:
    """Return the space of settings with only every second permitted number of streams and GPU threads.

    Its grid then has a few hundred settings.
    """
    return KnobSpace(
        routes=space.routes,
        unit_bytes=space.unit_bytes,
        streams=space.streams[:: 2 if len(space.streams) > 4 else 1],
        threads=space.threads[:: 2 if len(space.threads) > 4 else 1],
    )


_TRUNCATION = 0.25  # Parents are drawn from this fraction of the population, the best members.
_RESAMPLE = 0.15  # Probability that a knob of a new setting gets a random value.
_MOVE = 0.6  # Probability that a knob of a new setting moves by one or two steps.
_MAX_TRIES = 32  # Maximum number of settings that are drawn to find an unmeasured one.

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Individual:
    index: Index  # Index of the member's setting in the grid (`KnobLattice`).
    span_s: float


class PBTArm:
    """Search method (arm) by population based training: it proposes changed copies of the fastest settings.

    The population is a small number of settings from the grid `KnobLattice`. A setting that another arm proposed
    replaces the worst member if its trial was faster.

    Args:
        space: permitted settings.
        rng: random generator that draws the first members, parents and perturbations.
        population: number of members (settings).
    """

    name = "pbt"

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator, population: int = 6) -> None:
        self._lattice = KnobLattice(space)
        self._rng = rng
        self._size = max(2, min(population, len(self._lattice)))
        self._members: list[_Individual] = []
        self._measured: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return up to `n` settings: random ones until the population is full, later changed copies of good members.

        Return none if all settings have been measured.
        """
        proposals: list[Proposal] = []
        for _ in range(n):
            knobs = self._draw({proposal.knobs for proposal in proposals} | self._measured)
            if knobs is not None:
                proposals.append(Proposal(arm=self.name, knobs=knobs))
        return proposals

    def tell(self, trials: Sequence[Trial]) -> None:
        """Add the settings of this search method's trials, and of faster trials of other methods, to the population.

        Each one replaces the population's worst member.
        """
        for trial in trials:
            self._measured.add(trial.knobs)
            index = self._lattice.index_of(trial.knobs)
            if index is None:
                continue
            # A setting that was measured again replaces its earlier entry, because the latest trial of a setting
            # includes all measurements.
            self._members = [member for member in self._members if member.index != index]
            if len(self._members) == self._size and (trial.arm == self.name or trial.span_s < self._members[-1].span_s):
                del self._members[-1]
            if len(self._members) < self._size:
                self._members.append(_Individual(index=index, span_s=trial.span_s))
                self._members.sort(key=lambda member: member.span_s)

    def _draw(self, excluded: set[Knobs]) -> Knobs | None:
        for _ in range(_MAX_TRIES):
            knobs = self._lattice.at(
                self._random() if len(self._members) < self._size else self._explore(self._exploit())
            )
            if knobs not in excluded:
                return knobs
        return next((knobs for knobs in self._lattice.points if knobs not in excluded), None)

    def _exploit(self) -> Index:
        """Return a random one of the population's best settings. It becomes the parent of a new setting."""
        best = max(1, round(_TRUNCATION * self._size))
        return self._members[int(self._rng.integers(best))].index

    def _explore(self, parent: Index) -> Index:
        """Move some of the parent's knobs by one or two steps, and draw others at random (PBT: perturb, resample)."""
        return tuple(self._explore_axis(i, length) for i, length in zip(parent, self._lattice.shape, strict=True))

    def _explore_axis(self, i: int, length: int) -> int:
        draw = self._rng.random()
        if draw < _RESAMPLE:
            return int(self._rng.integers(length))
        if draw < _RESAMPLE + _MOVE:
            step = int(self._rng.choice([-2, -1, 1, 2]))
            return min(max(i + step, 0), length - 1)
        return i

    def _random(self) -> Index:
        return tuple(int(self._rng.integers(length)) for length in self._lattice.shape)


_AXES = ("unit_bytes", "streams", "threads", "route")
_REDUCTION_FACTOR = 2


class HyperbandArm:
    """Search method (arm) that proposes the settings of an Optuna study with a TPE sampler and a Hyperband pruner.

    Args:
        space: permitted settings.
        rng: random generator that draws the sampler's seed.
        max_iterations: number of measured iterations of a setting that Hyperband never prunes.

    Raises:
        TuningError: optuna is not installed.
    """

    name = "hyperband"

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator, max_iterations: int = 4) -> None:
        require_package(self.name, "optuna", "optuna")
        self._lattice = KnobLattice(space)
        self._max_iterations = max_iterations
        self._seed = int(rng.integers(2**31))
        self._optuna: Any = None  # The module optuna. The first `ask` imports it, and creates the study.
        self._study: Any = None
        self._distributions: dict[str, Any] = {}
        self._early_trials: list[Trial] = []  # Trials that `tell` received before the first `ask`.
        # {unfinished setting: its Optuna trial, and the number of iterations to measure next}.
        self._pending: dict[Knobs, tuple[Any, int]] = {}
        self._finished: set[Knobs] = set()  # Settings whose Optuna trial has ended.

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return up to `n` settings: first those that Hyperband has promoted to more iterations, then new settings."""
        if self._study is None:
            self._create_study()
            early_trials, self._early_trials = self._early_trials, []
            self.tell(early_trials)
        attempts = 0
        while len(self._pending) < n and attempts < 4 * n:
            attempts += 1
            trial = self._study.ask(self._distributions)
            knobs = self._lattice.at(tuple(int(trial.params[axis]) for axis in _AXES))
            if knobs in self._pending:  # The sampler can return a setting again before it gets the setting's result.
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                continue
            self._pending[knobs] = (trial, 1)
        return [
            Proposal(arm=self.name, knobs=knobs, iterations=iterations)
            for knobs, (_, iterations) in list(self._pending.items())[:n]
        ]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Report the trials to Optuna. A trial of another search method's setting is added as a finished one."""
        if self._study is None:
            self._early_trials += trials
            return
        for trial in trials:
            pending = self._pending.get(trial.knobs)
            if pending is None:
                self._add(trial)
                continue
            optuna_trial, wanted = pending
            if trial.iterations >= wanted or trial.status is not TrialStatus.COMPLETE:
                del self._pending[trial.knobs]
                self._finished.add(trial.knobs)
                self._report(trial, optuna_trial)

    def _report(self, trial: Trial, optuna_trial: Any) -> None:
        states = self._optuna.trial.TrialState
        if trial.status is TrialStatus.FAILED:
            self._study.tell(optuna_trial, state=states.FAIL)
            return
        optuna_trial.report(np.log(trial.span_s), step=trial.iterations)
        if trial.status is TrialStatus.PRUNED or optuna_trial.should_prune():
            self._study.tell(optuna_trial, state=states.PRUNED)
        elif trial.iterations >= self._max_iterations:
            self._study.tell(optuna_trial, np.log(trial.span_s))
        else:
            promoted = min(_REDUCTION_FACTOR * trial.iterations, self._max_iterations)
            self._pending[trial.knobs] = (optuna_trial, promoted)

    def _add(self, trial: Trial) -> None:
        """Add another search method's trial to the Optuna study, so that the sampler learns from the trial."""
        index = self._lattice.index_of(trial.knobs)
        if index is None or trial.status is TrialStatus.FAILED or trial.knobs in self._finished:
            return
        self._finished.add(trial.knobs)
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=dict(zip(_AXES, index, strict=True)),
                distributions=self._distributions,
                value=np.log(trial.span_s),
            )
        )

    def _create_study(self) -> None:
        optuna: Any = import_late("optuna")
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # Hide Optuna's log line about the new study.
        try:
            self._optuna = optuna
            self._study = optuna.create_study(
                # The name is constant, because the pruner assigns trials to brackets by a hash of it.
                study_name="sirtaki",
                sampler=optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=8),
                pruner=optuna.pruners.HyperbandPruner(
                    min_resource=1, max_resource=self._max_iterations, reduction_factor=_REDUCTION_FACTOR
                ),
            )
        finally:
            optuna.logging.set_verbosity(verbosity)
        distributions = optuna.distributions
        self._distributions = {
            axis: distributions.IntDistribution(0, length - 1)
            if axis != "route"
            else distributions.CategoricalDistribution(range(length))
            for axis, length in zip(_AXES, self._lattice.shape, strict=True)
        }


N_INITIAL = 8
"""Number of settings from a Sobol sequence that `ScikitOptimizeArm` proposes before it uses the Gaussian process."""

ATTEMPTS = 4
"""Maximum number of times that `ScikitOptimizeArm` asks its optimiser for an unmeasured setting before it gives up."""


class ScikitOptimizeArm:
    """Search method (arm) that proposes the settings of a `skopt.Optimizer`.

    The optimiser's dimensions are the logarithm of the unit (bucket) size, the number of streams, the number of GPU
    threads, and the route (transport and algorithm).

    Args:
        space: permitted settings.
        rng: random generator that draws the optimiser's seed.

    Raises:
        TuningError: scikit-optimize is not installed.
    """

    name = "scikit_optimize"

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator) -> None:
        require_package(self.name, "skopt", "scikit-optimize")
        self._space = space
        self._seed = int(rng.integers(2**31))
        self._optimizer: Any = None  # Created by the first `ask`, which imports skopt.
        self._new_trials: list[Trial] = []  # Trials not yet reported to the optimiser.
        self._worst_log_s: float | None = None  # Logarithm of the longest finite communication time.
        self._measured: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return one unmeasured setting, or none if the optimiser proposes only measured settings."""
        with warnings.catch_warnings():
            # Ignore skopt's warning that length scales are at their bounds: with few points, it is usual.
            warnings.simplefilter("ignore")
            optimizer = self._updated_optimizer()
            for _ in range(ATTEMPTS):
                point = optimizer.ask()
                knobs = self._at(point)
                if knobs not in self._measured:
                    return [Proposal(arm=self.name, knobs=knobs)]
                # The optimiser proposed a measured setting. Report a bad value for it, so that it is not proposed
                # again.
                optimizer.tell(point, self._bad_log_s)
        return []

    def tell(self, trials: Sequence[Trial]) -> None:
        """Record the trials of all search methods (arms), which the next `ask` reports to the optimiser.

        Trials with `cuts`, compressors or NCCL algorithms are not reported to the optimiser, because it has no
        dimension for them.
        """
        self._new_trials += [
            trial
            for trial in trials
            if trial.knobs.cuts is None and not (trial.knobs.lossy or trial.knobs.nccl) and trial.knobs in self._space
        ]
        self._measured |= {trial.knobs for trial in trials}

    def _updated_optimizer(self) -> Any:
        """Report new trials to the `skopt` optimiser, and return the optimiser. Create it at the first call."""
        if self._optimizer is None:
            skopt: Any = import_late("skopt")
            streams, threads, routes = map(len, self._choices())
            self._optimizer = skopt.Optimizer(
                [_axis(*self._space.unit_bytes_log2), _axis(0, streams - 1), _axis(0, threads - 1), [*range(routes)]],
                "GP",
                n_initial_points=N_INITIAL,
                initial_point_generator="sobol",
                random_state=self._seed,
            )
        trials, self._new_trials = self._new_trials, []
        finite = [math.log(trial.span_s) for trial in trials if math.isfinite(trial.span_s)]
        if finite:
            self._worst_log_s = max(finite) if self._worst_log_s is None else max(self._worst_log_s, *finite)
        if trials:
            values = [math.log(trial.span_s) if math.isfinite(trial.span_s) else self._bad_log_s for trial in trials]
            self._optimizer.tell([self._point(trial.knobs) for trial in trials], values)
        return self._optimizer

    @property
    def _bad_log_s(self) -> float:
        """Return the value to report for settings that the optimiser must not propose again: the worst one.

        It is the logarithm of the longest finite communication time, or of 1 s if there is none.
        """
        return 0.0 if self._worst_log_s is None else self._worst_log_s

    def _choices(self) -> tuple[Sequence[object], Sequence[object], Sequence[object]]:
        return self._space.streams, self._space.threads, self._space.routes

    def _at(self, point: Sequence[Any]) -> Knobs:
        log2_bytes, streams, threads, route = point
        return self._space.at(self._space.nearest_unit_bytes(2.0**log2_bytes), streams, threads, route)

    def _point(self, knobs: Knobs) -> list[Any]:
        values = (knobs.streams, knobs.threads, knobs.route)
        places = [choice.index(value) for choice, value in zip(self._choices(), values, strict=True)]
        low, high = self._space.unit_bytes_log2
        return [min(max(math.log2(knobs.unit_bytes), low), high), *places]


def _axis(low: float, high: float) -> Any:
    """Return skopt's search dimension for the numbers from `low` to `high`, which may be equal."""
    return (low, high) if low < high else [low]


class _VariantArm:
    """Base class of search methods (arms) that propose variants of measured settings.

    Subclasses define the variants.

    Args:
        space: permitted settings.
    """

    name: str

    def __init__(self, space: KnobSpace) -> None:
        self._space = space
        self._spans_s: dict[Knobs, float] = {}

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return up to `n` unmeasured variants of measured settings."""
        variants = dict.fromkeys(self._variants())
        unmeasured = (knobs for knobs in variants if knobs in self._space and knobs not in self._spans_s)
        return [Proposal(arm=self.name, knobs=knobs) for knobs in islice(unmeasured, n)]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Record the measured settings and their communication times."""
        self._spans_s |= {trial.knobs: trial.span_s for trial in trials}

    def _variants(self) -> Iterator[Knobs]:
        raise NotImplementedError


# ── compressors ───


class CompressorArm(_VariantArm):
    """Search method (arm) that adds gradient compression to the fastest measured setting.

    The arm proposes each compressor for all units (buckets), then other compressors for single classes of units. For a
    compressed setting, it also proposes units of twice and half the size, because compression changes the best size.

    Args:
        space: permitted settings, with at least one compressor.
    """

    name = "compressors"

    def _variants(self) -> Iterator[Knobs]:
        route = next((route for route in self._space.routes if goes_through_sockets(route)), None)
        if not self._spans_s or route is None:
            return
        lossless = [knobs for knobs in self._spans_s if not knobs.lossy and goes_through_sockets(knobs.route)]
        if lossless:
            yield from self._with_each_compressor(min(lossless, key=self._spans_s.__getitem__))
        best = min(self._spans_s, key=self._spans_s.__getitem__)
        if not goes_through_sockets(best.route):
            offered = self._space.streams_on(route)
            streams = max((count for count in offered if count <= best.streams), default=offered[0])
            best = best.but(transport=route[0], algorithm=route[1], streams=streams, cuts=None)
        if not best.lossy:
            yield from self._with_each_compressor(best)
            return
        for kind in self._space.classes:
            for name in ("", *self._space.lossy):
                others = {other.value: best.lossy.by(other) for other in UnitClass if other is not kind}
                if lossy := Lossy(**others, **{kind.value: name}):
                    yield best.but(lossy=lossy)
        for factor in (2.0, 0.5):
            yield self._with_units(best, factor * best.unit_bytes)

    def _with_each_compressor(self, knobs: Knobs) -> Iterator[Knobs]:
        for name in self._space.lossy:
            compressed = knobs.but(lossy=Lossy.all_by(name))
            # PowerSGD needs large units, because it compresses whole matrices better, and because each unit takes two
            # all-reduces.
            least = self._space.unit_bytes[1] / 4 if name.startswith("powersgd") else 0.0
            yield self._with_units(compressed, least) if knobs.unit_bytes < least else compressed

    def _with_units(self, knobs: Knobs, unit_bytes: float) -> Knobs:
        return knobs.but(unit_bytes=self._space.nearest_unit_bytes(unit_bytes), cuts=None)


# ── NCCL's own knobs ───

NEARLY = 1.05
"""A setting is varied by `NcclArm` if its communication time is at most this multiple of the shortest one.

It may be the fastest one in truth, because measurements are noisy.
"""


class NcclArm(_VariantArm):
    """Search method (arm) that adds an NCCL algorithm and protocol to the fastest measured setting.

    It sets them for one size class of units (buckets), small or large. In the fastest setting that has an NCCL
    algorithm, the arm varies the unit (bucket) size, the number of CTAs and the number of streams, one at a time, as
    AutoCCL does. It does not propose algorithms that NCCL has rejected.

    Args:
        space: permitted settings, with at least one NCCL algorithm.
    """

    name = "nccl"

    def _variants(self) -> Iterator[Knobs]:
        return filter(_affects_units, self._all_variants())

    def _all_variants(self) -> Iterator[Knobs]:
        spans_s = {knobs: span_s for knobs, span_s in self._spans_s.items() if knobs.transport is TransportKind.NCCL}
        ranked = sorted((knobs for knobs, span_s in spans_s.items() if math.isfinite(span_s)), key=spans_s.__getitem__)
        if not ranked:
            return
        best = ranked[0]
        best_set = next((knobs for knobs in ranked if knobs.nccl and spans_s[knobs] <= NEARLY * spans_s[best]), None)
        if best_set is best:
            yield from self._neighbours(best)
        rejected = [knobs.nccl for knobs, span_s in spans_s.items() if knobs.nccl and not math.isfinite(span_s)]
        for ways in self._space.nccl:
            if ways not in rejected:
                yield best.but(nccl=NcclWays(**{**(best.nccl or NcclWays()).by_class, **ways.by_class}))
        if best.nccl:
            for kind in best.nccl.by_class:
                yield best.but(nccl=msgspec.structs.replace(best.nccl, **{kind: None}))
        if best_set is not None:
            yield from self._neighbours(best_set)

    def _neighbours(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield variants of `knobs` with its NCCL algorithm, but another bucket size, or other streams or CTAs."""
        assert knobs.nccl
        way = knobs.nccl.by(knobs.unit_bytes)
        for factor in (0.5, 2.0) if way else ():
            size = self._space.nearest_unit_bytes(factor * knobs.unit_bytes)
            yield knobs.but(unit_bytes=size, cuts=None, nccl=NcclWays.of(size, way))
        yield from (knobs.but(streams=n, cuts=None) for n in self._space.streams_around(knobs.streams))
        yield from (knobs.but(threads=n) for n in self._space.threads)


def _affects_units(knobs: Knobs) -> bool:
    """Return whether each NCCL algorithm of a setting applies to at least one of its units (buckets).

    A setting has an NCCL algorithm for small units, for large units, or for both. Elements are assumed to have four
    bytes.
    """
    sizes = [knobs.unit_bytes]
    if knobs.cuts is not None:
        stops = [cut.stop for cut in knobs.cuts]
        sizes = [4 * (stop - start) for start, stop in zip([0, *stops], stops, strict=False)]
    return not knobs.nccl or set(knobs.nccl.by_class) <= set(map(NcclWays.size_class, sizes))


ENTRY_POINT_GROUP = "sirtaki.arms"

MakeArm = Callable[[KnobSpace, np.random.Generator], Arm]


OUR_ARMS: Mapping[str, MakeArm] = {
    "grid": lambda space, rng: GridArm(space),
    "pbt": lambda space, rng: PBTArm(space, rng=rng),
    "bayesian": lambda space, rng: BayesianArm(space, rng=rng),
    "hyperband": lambda space, rng: HyperbandArm(space, rng=rng),
}
"""Built-in search methods (arms) that are used by default: {name: function that creates the arm}."""

FURTHER_ARMS: Mapping[str, MakeArm] = {"scikit_optimize": lambda space, rng: ScikitOptimizeArm(space, rng=rng)}
"""Built-in search methods (arms) that are used only if the user names them: {name: function that creates the arm}."""


def third_party_arms() -> dict[str, Callable[[], MakeArm]]:
    """Return {name: loader} of the search methods (arms) that installed packages provide by entry points.

    Calling a loader imports the package, and returns a function that creates the arm.
    """
    ours = {*OUR_ARMS, *FURTHER_ARMS}
    return {point.name: point.load for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in ours}


ArmChoice = Arm | str | MakeArm
"""A user's choice of a search method (arm): the arm, its name, or a function of (space, rng) that creates it."""


def check_choices(choices: Sequence[ArmChoice]) -> None:
    """Check the type and name of each search method (arm) that a script has chosen.

    Raises:
        ConfigError: there is none, a name is unknown, or an element is neither an arm nor a name nor a function.
    """
    if not choices or isinstance(choices, str):
        raise ConfigError(f"arms= must be a list of at least one search technique (arm), found {choices!r}")
    known = [*OUR_ARMS, *FURTHER_ARMS, *third_party_arms()] if any(isinstance(one, str) for one in choices) else []
    for one in choices:
        if isinstance(one, str):
            if one not in known:
                raise ConfigError(f"arms= names the unknown search technique {one!r}; choose from {', '.join(known)}")
        elif not (callable(one) or all(hasattr(one, part) for part in ("name", "ask", "tell"))):
            raise ConfigError(
                "an element of arms= must be a search technique (an object with name, ask and tell), the name of one, "
                f"or a function of (space, rng) that creates one, found {one!r:.200}"
            )


def chosen_arms(choices: Sequence[ArmChoice], *, space: KnobSpace, rng: np.random.Generator) -> list[Arm]:
    """Create the search methods (arms) that a script has chosen.

    Args:
        choices: arms, names of arms, and functions of (space, rng) that create arms.
        space: permitted settings.
        rng: random generator from which one generator for each arm is spawned.

    Raises:
        TuningError: an arm cannot be created.
    """
    arms: list[Arm] = []
    for one, generator in zip(choices, rng.spawn(len(choices)), strict=True):
        if isinstance(one, str):
            arms.append(make_arm(one, space=space, rng=generator))
        elif callable(one) and (isinstance(one, type) or not hasattr(one, "ask")):
            arms.append(one(space, generator))
        else:
            arms.append(cast(Arm, one))
    return arms


def make_arm(name: str, *, space: KnobSpace, rng: np.random.Generator) -> Arm:
    """Create a search method (arm) by its name.

    Args:
        name: name of a built-in arm or of an installed package's arm.
        space: permitted settings.
        rng: random generator for the arm.

    Raises:
        TuningError: the name is unknown, or the arm cannot be created. The message says why.
    """
    ours = {**OUR_ARMS, **FURTHER_ARMS}
    if name in ours:
        return ours[name](space, rng)
    loaders = third_party_arms()
    if name not in loaders:
        raise TuningError(f"there is no search technique named {name!r}; choose one of {', '.join([*ours, *loaders])}")
    try:
        arm: object = loaders[name]()(space, rng)
    except Exception as err:  # Catch any error, because the code of other packages may raise any.
        raise TuningError(
            f"the plugin of the search technique {name!r} raised {err!r}; fix or uninstall the plugin"
        ) from err
    missing = [part for part in ("name", "ask", "tell") if not hasattr(arm, part)]
    if not missing and not isinstance(arm.name, str):  # type: ignore[attr-defined]
        missing = ["name of type str"]
    found = f"no {' and no '.join(missing)}"
    rule = "an object with the attributes name (a str), ask and tell"
    require(not missing, f"the plugin of the search technique {name!r}", rule, found, TuningError)
    return cast(Arm, arm)
