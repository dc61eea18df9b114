"""Search techniques by name: grid, population based, Hyperband, scikit-optimize's, those of installed packages; and
what tries compressors and NCCL's own knobs.
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
from sirtaki.errors import TuningError

from ..knobs import KnobLattice, Knobs, KnobSpace, Lossy, NcclWays
from ..trial import Arm, Proposal, Trial, TrialStatus
from .bayesian import BayesianArm


def require(arm: str, package: str, distribution: str) -> None:
    """Says at once what would be missing later.

    Raises:
        TuningError: the package is not installed.
    """
    if find_spec(package) is None:
        raise TuningError(f"the {arm} arm needs {distribution}: pip install {distribution}, or leave the arm out")


@cache
def import_late(name: str) -> ModuleType:
    """The module. What it imports may keep the errors of imports that failed, and with these the frames that led to
    them: so it is imported on a stack of its own, and not on the user's with his model in it.
    """
    with ThreadPoolExecutor(max_workers=1) as stack:
        return stack.submit(import_module, name).result()


# ── grid ───


def radical_inverse(number: int, base: int) -> float:
    """The digits of `number` in `base` mirrored at the point: 6 in base 2 (110) is 0.011 = 0.375."""
    result, scale = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        result += digit * scale
        scale /= base
    return result


def halton(lattice: KnobLattice) -> Iterator[Knobs]:
    """Every point of the lattice once, in the order in which the Halton sequence meets them."""
    seen: set[Knobs] = set()
    for number in range(1, 8 * len(lattice)):
        knobs = lattice.snap(np.array([radical_inverse(number, base) for base in (2, 3, 5, 7)]))
        if knobs not in seen:
            seen.add(knobs)
            yield knobs
    yield from (knobs for knobs in lattice.points if knobs not in seen)


class GridArm:
    """Walks a coarse grid once; leaves out what has been measured already, whoever asked for it."""

    name = "grid"

    def __init__(self, space: KnobSpace) -> None:
        self._left = list(halton(KnobLattice(_coarse(space), steps_per_octave=1)))
        self._known: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """The next `n` points of the grid; empty at its end."""
        fresh = (knobs for knobs in self._left if knobs not in self._known)
        return [Proposal(arm=self.name, knobs=knobs) for knobs, _ in zip(fresh, range(n), strict=False)]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Strikes the measured points from the grid."""
        self._known.update(trial.knobs for trial in trials)


def _coarse(space: KnobSpace) -> KnobSpace:
    """Every other stream count and thread allowance, so that the grid has some hundred points at most."""
    return KnobSpace(
        routes=space.routes,
        unit_bytes=space.unit_bytes,
        streams=space.streams[:: 2 if len(space.streams) > 4 else 1],
        threads=space.threads[:: 2 if len(space.threads) > 4 else 1],
    )


_TRUNCATION = 0.25  # share of the population that is copied
_RESAMPLE = 0.15  # chance that an axis is drawn anew
_MOVE = 0.6  # chance that an axis moves otherwise
_MAX_TRIES = 32  # perturbations until one is new

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Individual:
    index: Index  # on the lattice
    span_s: float


class PBTArm:
    """A small population on the lattice; other arms' trials immigrate where they are better than the worst member.

    Args:
        space: what may be chosen.
        rng: first members, choice of whom to copy, perturbations.
        population: number of members.
    """

    name = "pbt"

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator, population: int = 6) -> None:
        self._lattice = KnobLattice(space)
        self._rng = rng
        self._size = max(2, min(population, len(self._lattice)))
        self._members: list[_Individual] = []
        self._known: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Up to `n` places for the worst member to go to, or random first ones; empty once everything was measured."""
        proposals: list[Proposal] = []
        for _ in range(n):
            place = self._place({proposal.knobs for proposal in proposals} | self._known)
            if place is not None:
                proposals.append(Proposal(arm=self.name, knobs=place))
        return proposals

    def tell(self, trials: Sequence[Trial]) -> None:
        """The worst member moves to what this arm has asked for, and to what others have found if that is better."""
        for trial in trials:
            self._known.add(trial.knobs)
            index = self._lattice.index_of(trial.knobs)
            if index is None:
                continue
            # A setting measured again replaces its own entry: the latest trial holds all measurements.
            self._members = [member for member in self._members if member.index != index]
            if len(self._members) == self._size and (trial.arm == self.name or trial.span_s < self._members[-1].span_s):
                del self._members[-1]
            if len(self._members) < self._size:
                self._members.append(_Individual(index=index, span_s=trial.span_s))
                self._members.sort(key=lambda member: member.span_s)

    def _place(self, taken: set[Knobs]) -> Knobs | None:
        for _ in range(_MAX_TRIES):
            knobs = self._lattice.at(
                self._random() if len(self._members) < self._size else self._explore(self._exploit())
            )
            if knobs not in taken:
                return knobs
        return next((knobs for knobs in self._lattice.points if knobs not in taken), None)

    def _exploit(self) -> Index:
        """The knobs of one of the best members."""
        best = max(1, round(_TRUNCATION * self._size))
        return self._members[int(self._rng.integers(best))].index

    def _explore(self, parent: Index) -> Index:
        """Moves axes by a step or two, or draws them anew (the paper's perturb and resample)."""
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
    """An optuna study behind the arms' interface.

    Args:
        space: what may be chosen.
        rng: seeds the sampler.
        max_iterations: measured iterations of a setting that survives to the end.

    Raises:
        TuningError: optuna is not installed.
    """

    name = "hyperband"

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator, max_iterations: int = 4) -> None:
        require(self.name, "optuna", "optuna")
        self._lattice = KnobLattice(space)
        self._max_iterations = max_iterations
        self._seed = int(rng.integers(2**31))
        self._optuna: Any = None  # and what follows, until the arm is asked
        self._study: Any = None
        self._distributions: dict[str, Any] = {}
        self._told_early: list[Trial] = []
        # Settings that are under way: their optuna trial and the iterations they shall have next.
        self._pending: dict[Knobs, tuple[Any, int]] = {}
        self._finished: set[Knobs] = set()  # what the sampler has learnt from already

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Settings that were promoted and wait for more iterations, then new ones."""
        if self._study is None:
            self._create_study()
            told, self._told_early = self._told_early, []
            self.tell(told)
        attempts = 0
        while len(self._pending) < n and attempts < 4 * n:
            attempts += 1
            trial = self._study.ask(self._distributions)
            knobs = self._lattice.at(tuple(int(trial.params[axis]) for axis in _AXES))
            if knobs in self._pending:  # drawn twice before anything was told
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                continue
            self._pending[knobs] = (trial, 1)
        return [
            Proposal(arm=self.name, knobs=knobs, iterations=iterations)
            for knobs, (_, iterations) in list(self._pending.items())[:n]
        ]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Reports to the settings' optuna trials; settings of other arms become finished optuna trials."""
        if self._study is None:
            self._told_early += trials
            return
        for trial in trials:
            under_way = self._pending.get(trial.knobs)
            if under_way is None:
                self._add(trial)
                continue
            optuna_trial, wanted = under_way
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
        """What another arm has had measured teaches the sampler."""
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
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # creating a study is news to nobody
        try:
            self._optuna = optuna
            self._study = optuna.create_study(
                study_name="sirtaki",  # the pruner's brackets depend on it
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
"""Points of a Sobol sequence before the process is asked."""

ATTEMPTS = 4
"""To get a setting that has not been measured."""


class ScikitOptimizeArm:
    """A `skopt.Optimizer` over the logarithm of the unit size, streams, threads and route.

    Args:
        space: what may be chosen.
        rng: seeds it.

    Raises:
        TuningError: scikit-optimize is not installed.
    """

    name = "scikit_optimize"

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator) -> None:
        require(self.name, "skopt", "scikit-optimize")
        self._space = space
        self._seed = int(rng.integers(2**31))
        self._optimizer: Any = None  # of a library that is loaded late
        self._untold: list[Trial] = []
        self._worst_log_s: float | None = None  # of what has run
        self._known: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """One setting that nobody has measured; none if the optimiser knows none."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # length scales at their bounds are usual with ten points
            optimizer = self._told()
            for _ in range(ATTEMPTS):
                point = optimizer.ask()
                knobs = self._at(point)
                if knobs not in self._known:
                    return [Proposal(arm=self.name, knobs=knobs)]
                optimizer.tell(point, self._hopeless)  # else it would ask for the same again
        return []

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learns from the trials of all arms; plans with explicit cuts have no place in its space."""
        self._untold += [
            trial
            for trial in trials
            if trial.knobs.cuts is None and not (trial.knobs.lossy or trial.knobs.nccl) and trial.knobs in self._space
        ]
        self._known |= {trial.knobs for trial in trials}

    def _told(self) -> Any:
        """The optimiser, which knows all that was told."""
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
        told, self._untold = self._untold, []
        ran = [math.log(trial.span_s) for trial in told if math.isfinite(trial.span_s)]
        if ran:
            self._worst_log_s = max(ran) if self._worst_log_s is None else max(self._worst_log_s, *ran)
        if told:
            values = [math.log(trial.span_s) if math.isfinite(trial.span_s) else self._hopeless for trial in told]
            self._optimizer.tell([self._point(trial.knobs) for trial in told], values)
        return self._optimizer

    @property
    def _hopeless(self) -> float:
        """What is not to be asked for again is as bad as the worst that ran; a second, if nothing has."""
        return 0.0 if self._worst_log_s is None else self._worst_log_s

    def _choices(self) -> tuple[Sequence[object], Sequence[object], Sequence[object]]:
        return self._space.streams, self._space.threads, self._space.routes

    def _at(self, point: Sequence[Any]) -> Knobs:
        log2_bytes, streams, threads, route = point
        low, high = self._space.unit_bytes
        unit_bytes = min(max(self._space.whole_unit_bytes(2.0**log2_bytes), low), high)
        return self._space.at(unit_bytes, streams, threads, route)

    def _point(self, knobs: Knobs) -> list[Any]:
        values = (knobs.streams, knobs.threads, knobs.route)
        places = [choice.index(value) for choice, value in zip(self._choices(), values, strict=True)]
        low, high = self._space.unit_bytes_log2
        return [min(max(math.log2(knobs.unit_bytes), low), high), *places]


def _axis(low: float, high: float) -> Any:
    """Numbers between, or the only one that there is."""
    return (low, high) if low < high else [low]


# ── compressors ───


class CompressorArm:
    """Compresses the fastest setting until then: all units by each compressor, then classes of units by others.

    What it proposes of a compressed setting besides are units twice and half as large: compressed, they take less.

    Args:
        space: what may be chosen; it allows some compressor.
    """

    name = "compressors"

    def __init__(self, space: KnobSpace) -> None:
        self._space = space
        self._route = next((route for route in space.routes if goes_through_sockets(route)), None)
        self._ran: dict[Knobs, float] = {}

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Up to `n` settings that nobody has tried."""
        if not self._ran or self._route is None:
            return []
        fresh = (knobs for knobs in dict.fromkeys(self._variants()) if knobs in self._space and knobs not in self._ran)
        return [Proposal(arm=self.name, knobs=knobs) for knobs in islice(fresh, n)]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Notes what ran, and how fast."""
        self._ran |= {trial.knobs: trial.span_s for trial in trials}

    def _variants(self) -> Iterator[Knobs]:
        lossless = [knobs for knobs in self._ran if not knobs.lossy and goes_through_sockets(knobs.route)]
        if lossless:
            yield from self._all_alike(min(lossless, key=self._ran.__getitem__))
        best = min(self._ran, key=self._ran.__getitem__)
        if not goes_through_sockets(best.route) and self._route is not None:
            transport, algorithm = self._route
            offered = self._space.streams_on(self._route)
            streams = max((count for count in offered if count <= best.streams), default=offered[0])
            best = best.but(transport=transport, algorithm=algorithm, streams=streams, cuts=None)
        if not best.lossy:
            yield from self._all_alike(best)
            return
        for kind in self._space.classes:
            for name in ("", *self._space.lossy):
                others = {other.value: best.lossy.by(other) for other in UnitClass if other is not kind}
                if lossy := Lossy(**others, **{kind.value: name}):
                    yield best.but(lossy=lossy)
        for factor in (2.0, 0.5):
            yield self._with_units(best, factor * best.unit_bytes)

    def _all_alike(self, knobs: Knobs) -> Iterator[Knobs]:
        for name in self._space.lossy:
            compressed = knobs.but(lossy=Lossy.all_by(name))
            # Whole matrices compress more, and a unit takes two rounds however little is left of it.
            least = self._space.unit_bytes[1] / 4 if name.startswith("powersgd") else 0.0
            yield self._with_units(compressed, least) if knobs.unit_bytes < least else compressed

    def _with_units(self, knobs: Knobs, unit_bytes: float) -> Knobs:
        low, high = self._space.unit_bytes
        return knobs.but(unit_bytes=min(max(self._space.whole_unit_bytes(unit_bytes), low), high), cuts=None)


# ── NCCL's own knobs ───

NEARLY = 1.05
"""Times the fastest span: a setting that takes no longer is worth being varied, too; noise may have hidden its lead."""


class NcclArm:
    """Tells NCCL, for the fastest setting until then, by which algorithm and protocol it reduces units of one size
    class. From the fastest setting with such a way it goes on to larger and smaller units, other numbers of CTAs and of
    streams, one thing at a time as AutoCCL does. A way that NCCL has refused is not asked for again.

    Args:
        space: what may be chosen; it allows some way.
    """

    name = "nccl"

    def __init__(self, space: KnobSpace) -> None:
        self._space = space
        self._ran: dict[Knobs, float] = {}

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Up to `n` settings that nobody has tried."""
        fresh = (
            knobs
            for knobs in dict.fromkeys(self._variants())
            if knobs in self._space and knobs not in self._ran and _tells_some_unit(knobs)
        )
        return [Proposal(arm=self.name, knobs=knobs) for knobs in islice(fresh, n)]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Notes what ran, and how fast."""
        self._ran |= {trial.knobs: trial.span_s for trial in trials}

    def _variants(self) -> Iterator[Knobs]:
        over_nccl = [knobs for knobs in self._ran if knobs.transport is TransportKind.NCCL]
        ran = sorted((knobs for knobs in over_nccl if math.isfinite(self._ran[knobs])), key=self._ran.__getitem__)
        if not ran:
            return
        best = ran[0]
        told = next((knobs for knobs in ran if knobs.nccl and self._ran[knobs] <= NEARLY * self._ran[best]), None)
        if told is best:
            yield from self._beside(best)
        refused = [knobs.nccl for knobs in over_nccl if knobs.nccl and not math.isfinite(self._ran[knobs])]
        for ways in self._space.nccl:
            if ways not in refused:
                yield best.but(nccl=NcclWays(**{**(best.nccl or NcclWays()).by_class, **ways.by_class}))
        if best.nccl:
            for kind in best.nccl.by_class:
                yield best.but(nccl=msgspec.structs.replace(best.nccl, **{kind: None}))
        if told is not None:
            yield from self._beside(told)

    def _beside(self, knobs: Knobs) -> Iterator[Knobs]:
        """The same way with other units, which may be of the other class, streams and numbers of CTAs."""
        low, high = self._space.unit_bytes
        assert knobs.nccl
        way = knobs.nccl.by(knobs.unit_bytes)
        for factor in (0.5, 2.0) if way else ():
            size = min(max(self._space.whole_unit_bytes(factor * knobs.unit_bytes), low), high)
            yield knobs.but(unit_bytes=size, cuts=None, nccl=NcclWays.of(size, way))
        yield from (knobs.but(streams=n, cuts=None) for n in self._space.streams_around(knobs.streams))
        yield from (knobs.but(threads=n) for n in self._space.threads)


def _tells_some_unit(knobs: Knobs) -> bool:
    """Each of its ways is some unit's, as far as sizes are known: most elements are of four bytes."""
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
"""Those that tune where nobody has chosen others."""

FURTHER_ARMS: Mapping[str, MakeArm] = {"scikit_optimize": lambda space, rng: ScikitOptimizeArm(space, rng=rng)}
"""For whoever names them."""


def third_party_arms() -> dict[str, Callable[[], MakeArm]]:
    """Names and loaders of the arms that installed packages bring; nothing of theirs is imported yet."""
    ours = {*OUR_ARMS, *FURTHER_ARMS}
    return {point.name: point.load for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in ours}


def make_arm(name: str, *, space: KnobSpace, rng: np.random.Generator) -> Arm:
    """Builds one arm.

    Raises:
        TuningError: there is no arm of that name, or it cannot be built; the message says why.
    """
    ours = {**OUR_ARMS, **FURTHER_ARMS}
    if name in ours:
        return ours[name](space, rng)
    loaders = third_party_arms()
    if name not in loaders:
        raise TuningError(f"there is no search technique {name!r}; there are {', '.join([*ours, *loaders])}")
    try:
        arm: object = loaders[name]()(space, rng)
    except Exception as err:  # somebody else's code may raise anything
        raise TuningError(f"the search technique {name!r} could not be built: {err!r}") from err
    missing = [part for part in ("name", "ask", "tell") if not hasattr(arm, part)]
    if not missing and not isinstance(arm.name, str):  # type: ignore[attr-defined]
        missing = ["name that is a text"]
    if missing:
        raise TuningError(f"the search technique {name!r} is no arm: it has no {', '.join(missing)}")
    return cast(Arm, arm)
