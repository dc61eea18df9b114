"""What a job may run: its knob space, the untuned default, plans from outside, and what probes of links rule out."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace, NcclWays
from sirtaki.autotune.model.fits import ComputeSample, ContentionModel, LinkProbe, TransmissionSample, fit_contention
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.replayer import SharedHost
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Trial
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import Device
from sirtaki.comm.modes import outside_modes
from sirtaki.comm.plan import CommPlan, GradientLayout, NcclWay, Route, TransportKind, Unit
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import FlatBuffer
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError, PlanError, TransportError, TuningError
from sirtaki.machine import allowed_processors, cpu_quota, processor_time_beside_s
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a generation's tuning has found for one set of parameters.

    Attributes:
        knobs: what ran last, or was best until then.
        settled: the warm-up had come to its end.
        place: of each rank the first one on its host; what was measured in another place does not compare.
        trials: of a warm-up that was cut short; on the rank that decided only.
    """

    knobs: Knobs
    settled: bool
    place: tuple[int, ...]
    trials: tuple[Trial, ...] = ()


@dataclass(slots=True)
class CarriedTuning:
    """What tuning has found until now, on every rank: any of them may be the one that decides in the next generation.

    Attributes:
        going_on: another generation follows, so that what an unfinished warm-up has found belongs here.
    """

    going_on: bool = False
    _known: dict[str, dict[tuple[int, ...], Carried]] = field(default_factory=dict)

    def leave(self, key: str, carried: Carried) -> None:
        """Keeps what a generation has found for these parameters (`key_of`), instead of what its place had before."""
        at = self._known.setdefault(key, {})
        at.pop(carried.place, None)
        at[carried.place] = carried

    def of(self, key: str) -> list[Carried]:
        """What generations have left for these parameters, one a place, the last one first."""
        return list(self._known.get(key, {}).values())[::-1]


def key_of(names: Sequence[str], params: Sequence[torch.Tensor]) -> str:
    """The same for the same parameters, in every generation and on every rank."""
    said = ";".join(f"{name}{tuple(param.shape)}{param.dtype}" for name, param in zip(names, params, strict=True))
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


DEFAULT_UNITS = 16
DEFAULT_UNIT_BYTES = (512 * KIB, 4 * MIB)
DEFAULT_UNIT_BYTES_NCCL = (4 * MIB, 32 * MIB)
"""Untuned, a model is sent in about so many units of a size between these: enough to overlap, few to start up.

Between GPUs, which are faster against the start-up, they are about as large as DDP's buckets of 25 MiB.
"""

DEFAULT_STREAMS_ONE_NODE = 1
DEFAULT_STREAMS = 4
"""Between nodes one flow may be capped; four fill most links and cost little on those that one fills."""

STREAM_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
MOST_UNITS = 4096
"""Of one plan, if it has not more gradients than that: more would start up for longer than they could gain."""


def knob_space(router: Router, settings: Settings, total_bytes: int) -> KnobSpace:
    """What may be tuned here: what the router can do, less what the user has fixed.

    Raises:
        ConfigError: the user has fixed something that this job cannot do.
    """
    routes = tuple(
        (kind, algorithm)
        for kind, algorithm in router.routes
        if settings.transport in (None, kind) and settings.algorithm in (None, algorithm)
    )
    if not routes:
        possible = ", ".join(f"{kind.value} {algorithm.value}" for kind, algorithm in router.routes)
        raise ConfigError(f"the transport and algorithm asked for are not possible here; possible: {possible}")
    # No route is offered more streams than the best guess takes: a longer list costs trials.
    limits = {route: router.max_streams([route]) for route in routes}
    limit = limits[routes[0]]
    if settings.streams is not None:
        if settings.streams > limit:
            raise ConfigError(
                f"SIRTAKI_STREAMS={settings.streams} is more than the {limit} possible here: "
                f"{router.why_not_more(routes)}"
            )
        routes = tuple(route for route in routes if limits[route] >= settings.streams)
    # Each allowance, and each way of NCCL's, takes a communicator of its own, and where there is one stream only
    # communicators must not overlap.
    allowances = router.threads() if limit > 1 else ()
    largest = min(LARGEST_UNIT_BYTES, max(SMALLEST_UNIT_BYTES, 1 << (total_bytes - 1).bit_length()))
    return KnobSpace(
        routes=routes,
        threads=(None, *allowances),
        unit_bytes=(settings.unit_bytes,) * 2 if settings.unit_bytes else (SMALLEST_UNIT_BYTES, largest),
        streams=(settings.streams,) if settings.streams else tuple(n for n in STREAM_COUNTS if n <= limit),
        most_streams=tuple((route, limits[route]) for route in routes if limits[route] < limit),
        nccl=for_each_class(router.nccl_ways()) if limit > 1 else (),
    )


def for_each_class(ways: Sequence[NcclWay]) -> tuple[NcclWays, ...]:
    """Each way, for units of each size class."""
    return tuple(NcclWays.of(sizes[0], way) for sizes in WAY_BYTES for way in ways)


def default_knobs(space: KnobSpace, *, total_bytes: int, one_node: bool) -> Knobs:
    """What runs untuned: the best guess that lies in the space."""
    low, high = space.unit_bytes
    transport, algorithm = space.routes[0]
    smallest, largest = DEFAULT_UNIT_BYTES_NCCL if transport is TransportKind.NCCL else DEFAULT_UNIT_BYTES
    wanted = 1 << max(0, total_bytes // DEFAULT_UNITS - 1).bit_length()
    unit_bytes = min(max(wanted, smallest), largest)
    streams = DEFAULT_STREAMS_ONE_NODE if one_node else DEFAULT_STREAMS
    return Knobs(
        unit_bytes=min(max(unit_bytes, low), high),
        streams=max((n for n in space.streams_on(space.routes[0]) if n <= streams), default=space.streams[0]),
        transport=transport,
        algorithm=algorithm,
        threads=space.threads[0],
    )


def plans_for(knobs: Knobs, layouts: Sequence[GradientLayout]) -> list[CommPlan]:
    """One plan a layout; explicit cuts belong to the first, the others are cut uniformly."""
    return [(knobs if number == 0 else knobs.but(cuts=None)).to_plan(layout) for number, layout in enumerate(layouts)]


def checked_plans(knobs: Knobs, layouts: Sequence[GradientLayout]) -> list[CommPlan]:
    """The plans of knobs that come from elsewhere: from the registry, or from an arm.

    Raises:
        PlanError: explicit cuts do not fit the layout, or there are absurdly many.
    """
    most = max(MOST_UNITS, STREAM_COUNTS[-1] * len(layouts[0].sizes))
    if len(knobs.cuts or ()) > most:
        raise PlanError(f"{len(knobs.cuts or ())} units are more than the {most} that are possible here")
    return plans_for(knobs, layouts)


def traffic(knobs: Knobs, layouts: Sequence[GradientLayout]) -> Hashable:
    """Equal where the same units travel in the same order on as many streams.

    Raises:
        PlanError: see `checked_plans`.
    """
    return tuple(plan.on_fewest_streams().fingerprint() for plan in checked_plans(knobs, layouts))


def fixed_knobs(settings: Settings, lossy: Sequence[str] = ()) -> dict[str, str]:
    """The knobs that the user has fixed, and their values in words; `lossy` are compressors that may be used."""
    fixed = {
        "unit_bytes": settings.unit_bytes,
        "streams": settings.streams,
        "transport": settings.transport.value if settings.transport else None,
        "algorithm": settings.algorithm.value if settings.algorithm else None,
        "lossy": ",".join(lossy) or None,
    }
    return {name: str(value) for name, value in fixed.items() if value is not None}


PLAN_FILE = "plan.json"
FORMAT, FORMAT_VERSION = "sirtaki-plan", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPlan:
    """What to run, and for whom.

    Attributes:
        source: where it was read.
        knobs: what to run.
        ranks: of the job that it is for.
        sizes: elements of the gradients of each flat buffer, control flags among them, in the order in which they came.
        part_bytes: of gradients, at which a compiled graph is cut (`hvd.early_gradients`); 0 = it stays whole, None =
            nothing is known of compiled graphs.
    """

    source: str
    knobs: Knobs
    ranks: int
    sizes: tuple[tuple[int, ...], ...]
    part_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """What the file holds; the first buffer's plan is spelled out.

        Raises:
            PlanError: the knobs do not fit the sizes.
        """
        told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        del told["source"]
        whole = self.knobs.to_plan(GradientLayout(sizes=self.sizes[0])).to_json()
        return {"format": FORMAT, "version": FORMAT_VERSION, **told, **whole}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str) -> GivenPlan:
        """What `to_json` described.

        Raises:
            ConfigError: it is of another version, or no plan of this kind.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ConfigError(f"{source} is no plan that `sirtaki optimize` has written")
        if data.get("version") != FORMAT_VERSION:
            raise ConfigError(
                f"{source} is a plan of version {data.get('version')}, and this Sirtaki reads version "
                f"{FORMAT_VERSION}: have `sirtaki optimize` write it again"
            )
        try:
            return msgspec.convert({**data, "source": source}, cls)
        except (msgspec.ValidationError, PlanError, RecursionError) as err:
            raise ConfigError(f"{source} is no whole plan: {err!r}") from err

    @classmethod
    def read(cls, path: str | Path) -> GivenPlan:
        """A file's, or that of a folder that holds a `plan.json`.

        Raises:
            ConfigError: it cannot be read, or holds no such plan.
        """
        path = Path(path)
        try:
            path = path / PLAN_FILE if path.is_dir() else path
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as err:
            raise ConfigError(f"the plan {path} cannot be read: {err.strerror or err}") from err
        except ValueError as err:
            raise ConfigError(f"{path} is no plan: it is not JSON ({err})") from err
        return cls.from_json(data, source=str(path))

    def misfit(self, layouts: Sequence[GradientLayout], ranks: int, space: KnobSpace) -> str:
        """Why a job cannot run it, in one sentence; empty if it can."""
        if self.ranks != ranks:
            return f"the plan {self.source} is for {self.ranks} ranks, and here are {ranks}"
        mine = sorted(sorted(sizes) for sizes in self.sizes)
        if mine != sorted(sorted(layout.sizes) for layout in layouts):
            theirs = [layout.sizes for layout in layouts]
            return (
                f"the plan {self.source} is for other gradients: {_described(self.sizes)}, and here are "
                f"{_described(theirs)}"
            )
        if self.knobs not in space:
            return (
                f"the plan {self.source} is not possible here, or not with what settings fix: {self.knobs.describe()}"
            )
        try:
            checked_plans(self.knobs, layouts)
        except PlanError as err:
            return f"the plan {self.source} does not fit: {err}"
        return ""

    def accepted(
        self, layouts: Sequence[GradientLayout], control: ControlPlane, space: KnobSpace, *, must_run: bool
    ) -> Knobs | None:
        """What to run of it in a job; None = nothing. The same on all ranks, without asking them; rank 0 tells.

        Args:
            layouts: that all ranks have agreed on.
            control: the ranks.
            space: what may be chosen.
            must_run: nothing else is to run.

        Raises:
            ConfigError: on all ranks; it does not fit and must.
        """
        why_not = self.misfit(layouts, control.size, space)
        if why_not and must_run:
            raise ConfigError(f"SIRTAKI_PLAN: {why_not}")
        if control.rank == 0:
            if why_not:
                logger.warning("%s; it is left alone", why_not)
            else:
                logger.info("the plan %s will run: %s", self.source, self.knobs.describe())
        return None if why_not else self.knobs


def _described(sizes: Sequence[Sequence[int]]) -> str:
    """Control flags are elements, but no gradient."""
    return f"{sum(map(len, sizes)) - 1} of {sum(map(sum, sizes))} elements in all"


def part_bytes_of(path: str | None) -> int | None:
    """What the plan there says of compiled graphs; None also where it cannot be read, which optimizers will tell."""
    if path is None:
        return None
    try:
        return GivenPlan.read(path).part_bytes
    except ConfigError:
        return None


def given_to_all(control: ControlPlane, path: str | None, *, ranks_stay: bool = True) -> GivenPlan | None:
    """Collective: what rank 0 was told to run, on every rank; None = nothing.

    Where ranks come and go another host may be rank 0's later, on which there is no such file: that ends no job.

    Raises:
        ConfigError: on all ranks, with the same words; it cannot be read, and ranks stay.
    """
    told: GivenPlan | str | None = None
    if control.rank == 0 and path is not None:
        try:
            told = GivenPlan.read(path)
        except ConfigError as err:
            told = str(err)
    told = control.broadcast(told)
    if not isinstance(told, str):
        return told
    if ranks_stay:
        raise ConfigError(f"SIRTAKI_PLAN: {told}")
    if control.rank == 0:
        logger.warning("SIRTAKI_PLAN: %s; it is left alone", told)
    return None


def still_possible(space: KnobSpace, router: Router) -> KnobSpace:
    """The space without the routes and numbers of streams that have turned out not to open; the same on all ranks.

    Raises:
        TransportError: nothing is left.
    """
    routes = tuple(
        route for route in space.routes if route in router.routes and router.max_streams([route]) >= space.streams[0]
    )
    if not routes:
        raise TransportError(
            "nothing that may carry gradients here can be opened: see the warnings above, `sirtaki doctor`, and what "
            "SIRTAKI_TRANSPORT, SIRTAKI_ALGORITHM and SIRTAKI_STREAMS allow"
        )
    limits = {route: router.max_streams([route]) for route in routes}
    limit = limits[routes[0]]
    return replace(
        space,
        routes=routes,
        streams=tuple(n for n in space.streams if n <= limit),
        most_streams=tuple((route, most) for route, most in limits.items() if most < limit),
    )


def open_default(
    space: KnobSpace, control: ControlPlane, router: Router, choose: Callable[[KnobSpace], Knobs]
) -> tuple[KnobSpace, Knobs]:
    """Collective: opens the streams of what runs untuned, or of the next best.

    Args:
        space: what may be tuned.
        control: the ranks.
        router: opens the streams.
        choose: the best guess in a space.

    Returns:
        What of the space is possible, and the default in it.

    Raises:
        TransportError: on all ranks, nothing can be opened.
    """
    problem = ""
    while True:
        default = choose(space)
        try:
            router.open_streams(default.route, default.streams, threads=default.threads)
        except TransportError as err:
            problem = problem or str(err)
            space = still_possible(space, router)
            continue
        if problem and control.rank == 0:
            logger.warning("%s; gradients are reduced with %s instead", problem, default.describe())
        return space, default


STREAM_BYTES = MIB
"""What each stream carries in one pass of a probe where there is time."""

PASSES = 2
"""That are timed as one, after one that is not."""

SMALL_BYTES, LEAST_LARGE_BYTES = 64 * KIB, 128 * KIB
"""What a small unit is, and no larger one is made smaller than the second: α shows in the difference."""

SOUNDING_BYTES = (4 * KIB, SMALL_BYTES)
"""Of single all-reduces that tell what probes will take."""

GOES_ON = 0.5
"""Where twice the streams have carried twice as much, four times are expected to carry so much more, as an exponent."""

LEAST_SHARE = 0.25
"""Of an all-reduce's time, what counts as transmission at least."""

OTHERS = 3
"""So many probes that need not be are to have their share of the time, too, if one could carry less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSize:
    """What one probe carries.

    Attributes:
        unit_bytes: of each all-reduce.
        rounds: all-reduces on each stream, in one pass.
    """

    unit_bytes: int
    rounds: int


class ProbeBudget:
    """Of one route's probes and what they have shown so far."""

    def __init__(self, soundings_s: tuple[float, float]) -> None:
        """Args: `soundings_s` are times of one all-reduce of `SOUNDING_BYTES` each, on one stream."""
        self._alpha_s, sounded_s = soundings_s
        self._sounded = self._rate(SOUNDING_BYTES[1], sounded_s)
        self._probed: dict[int, float] = {}  # bytes a second by number of streams

    def learn(self, *, streams: int, unit_bytes: int, round_s: float) -> None:
        """A probe has run."""
        rate = self._rate(streams * unit_bytes, round_s)
        self._probed[streams] = max(rate, self._probed.get(streams, 0.0))

    def _rate(self, size_bytes: int, seconds: float) -> float:
        """Bytes a second; a start-up time that is as long as the whole was a hiccup."""
        return size_bytes / max(seconds - self._alpha_s, LEAST_SHARE * seconds)

    def expected_s(self, size: ProbeSize, *, streams: int) -> float:
        """What a probe takes: more streams carry more together half as much as those have that were seen."""
        probed = [(count, rate) for count, rate in self._probed.items() if count <= streams]
        count, rate = max(probed, default=(1, self._sounded))
        one = self._probed.get(1, rate)
        if count > 1 and streams > count and rate > one:
            rate *= (streams / count) ** (GOES_ON * min(1.0, math.log(rate / one) / math.log(count)))
        return (1 + PASSES) * size.rounds * (self._alpha_s + streams * size.unit_bytes / rate)

    def size(self, unit_bytes: int, streams: int, *, left_s: float, needed_more: int) -> ProbeSize | None:
        """The largest probe of a shape that there is time for.

        Args:
            unit_bytes: of a unit where there is time.
            streams: that work side by side.
            left_s: until the budget ends; may be negative.
            needed_more: probes that must be taken, this one included; if it is one of them, the smallest is the least.
                0 = this one need not be.

        Returns:
            None: there is no time.
        """
        share_s = left_s / (needed_more + OTHERS)
        sizes = list(_sizes(unit_bytes))
        for size in sizes:
            if self.expected_s(size, streams=streams) <= share_s:
                return size
        return sizes[-1] if needed_more or self.expected_s(sizes[-1], streams=streams) <= left_s else None


def _sizes(unit_bytes: int) -> Iterable[ProbeSize]:
    """A probe's sizes, the largest first: fewer rounds, then smaller units."""
    least = min(unit_bytes, LEAST_LARGE_BYTES)
    stream_bytes = STREAM_BYTES
    while stream_bytes >= least:
        unit = min(unit_bytes, stream_bytes)
        yield ProbeSize(unit_bytes=unit, rounds=stream_bytes // unit)
        stream_bytes //= 2


UNIT_BYTES = (2 * MIB, 16 * MIB)
MATRIX = 2048
COMPUTE_STEPS = 16
"""Matrix products that are computed beside the all-reduces: some milliseconds on a current GPU."""

MOST_REDUCTIONS = 64

REPETITIONS = 3
CLEAR = 3.0
"""Threads are offered where their effect is so many times what repeated measurements differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadProbe:
    """One allowance, measured `REPETITIONS` times; each time the slowest rank's.

    Attributes:
        threads: of each all-reduce; None = as many as NCCL takes by itself.
        unit_bytes: of each all-reduce.
        alone_s: an all-reduce with nothing beside it, `(REPETITIONS,)`.
        beside_s: an all-reduce beside computation, `(REPETITIONS,)`.
        compute_s: the computation beside all-reduces, `(REPETITIONS,)`.
        undisturbed_s: the computation with nothing beside it, `(REPETITIONS,)`.
    """

    threads: int | None
    unit_bytes: int
    alone_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    undisturbed_s: tuple[float, ...]


@outside_modes  # a counter of operations is not to see the product of matrices
def probe_threads(control: ControlPlane, router: Router, route: Route) -> list[ThreadProbe]:
    """Collective: measures no allowance and every one that the router offers, on one stream of `route`.

    Beside a fixed computation, since it must be known before the first trial whether allowances make a difference and
    so are worth being tuned; how much they slow the training's own computation down is learnt later, from these numbers
    on (`ContentionLearner`).
    """
    device = router.device
    buffer = router.allocate(max(UNIT_BYTES) // 4, torch.float32)
    matrix = torch.zeros(MATRIX, MATRIX, dtype=torch.float32, device=device.torch_device)
    product = torch.empty_like(matrix)
    probes = []
    for threads in (None, *router.threads()):
        for unit_bytes in UNIT_BYTES:
            plan = _one_unit(route, unit_bytes, threads)
            router.open_plan(plan)
            rounds = [_round(control, router, plan, buffer, matrix, product) for _ in range(REPETITIONS + 1)][1:]
            worst = control.maximum(np.array(rounds))  # (REPETITIONS, 4)
            alone_s, beside_s, compute_s, undisturbed_s = map(tuple, worst.T.tolist())
            probes.append(
                ThreadProbe(
                    threads=threads,
                    unit_bytes=unit_bytes,
                    alone_s=alone_s,
                    beside_s=beside_s,
                    compute_s=compute_s,
                    undisturbed_s=undisturbed_s,
                )
            )
    return probes


def _one_unit(route: Route, unit_bytes: int, threads: int | None, way: NcclWay | None = None) -> CommPlan:
    unit = Unit(start=0, stop=unit_bytes // 4, threads=threads, algorithm=route[1], nccl=way)
    return CommPlan(numel=unit.stop, units=(unit,), streams=1, transport=route[0])


def _round(
    control: ControlPlane,
    router: Router,
    plan: CommPlan,
    buffer: FlatBuffer,
    matrix: torch.Tensor,
    product: torch.Tensor,
) -> tuple[float, float, float, float]:
    """Collective: seconds of an all-reduce alone, beside computation, of the computation beside it, and of it alone."""
    device = router.device
    device.synchronise()
    begin = device.record_event(timed=True)
    router.wait_for(router.all_reduce_plan(buffer, plan, scale=0.0))
    reduced = device.record_event(timed=True)
    _compute(device, matrix, product)
    computed = device.record_event(timed=True)
    device.synchronise()
    alone_s, undisturbed_s = device.elapsed_s(begin, reduced), device.elapsed_s(reduced, computed)
    # As many all-reduces as fill the computation's time on every rank, one behind the other beside it.
    wanted = control.maximum(np.array([undisturbed_s / max(alone_s, 1e-6)]))[0]
    count = min(MOST_REDUCTIONS, max(1, round(float(wanted))))
    beside = device.make_stream()
    begin = device.record_event(timed=True)
    works = [work for _ in range(count) for work in router.all_reduce_plan(buffer, plan, scale=0.0)]
    with device.on(beside):
        router.wait_for(works)
        reduced = device.record_event(timed=True)
    _compute(device, matrix, product)
    computed = device.record_event(timed=True)
    device.synchronise()
    return alone_s, device.elapsed_s(begin, reduced) / count, device.elapsed_s(begin, computed), undisturbed_s


def _compute(device: Device, matrix: torch.Tensor, product: torch.Tensor) -> None:
    for _ in range(COMPUTE_STEPS):
        device.launch(_multiply, matrix, product)


def _multiply(matrix: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(matrix, matrix, out=product)


def threads_matter(probes: Sequence[ThreadProbe]) -> bool:
    """Return whether the allowance changes the time of all-reduces or of the computation by clearly more than noise.

    Medians by allowance are compared with the spread of repetitions of one allowance, unit size by unit size.
    """
    for unit_bytes in UNIT_BYTES:
        for quantity in ("beside_s", "compute_s"):
            rows = np.array([getattr(probe, quantity) for probe in probes if probe.unit_bytes == unit_bytes])
            if len(rows) < 2:
                return False
            noise = float(np.median(np.ptp(rows, axis=1)))
            if float(np.ptp(np.median(rows, axis=1))) > CLEAR * noise:
                return True
    return False


def contention_model(probes: Sequence[ThreadProbe], *, alpha_s: float) -> ContentionModel | None:
    """LIBRA's g, p and q from the probes; None, and a line in the log, where they do not fit.

    Args:
        probes: of none and of at least two allowances.
        alpha_s: the start-up time of an all-reduce on the same route.
    """
    counted = [(probe.threads, probe) for probe in probes if probe.threads is not None]
    compute = [
        ComputeSample(alone_s=alone_s, seconds=seconds, threads=threads)
        for threads, probe in counted
        for alone_s, seconds in zip(probe.undisturbed_s, probe.compute_s, strict=True)
    ]
    transmissions = [
        TransmissionSample(unit_bytes=probe.unit_bytes, seconds=seconds, threads=threads, overlapped=overlapped)
        for threads, probe in counted
        for overlapped, column in ((True, probe.beside_s), (False, probe.alone_s))
        for seconds in column
    ]
    try:
        return fit_contention(compute, transmissions, alpha_s=alpha_s, default_threads=_most_like_none(probes))
    except TuningError as err:
        logger.info("no model of contention: %s", err)
        return None


def _most_like_none(probes: Sequence[ThreadProbe]) -> int:
    """The allowance whose times are nearest to those without one, as ratios."""
    log_s = {
        (probe.threads, probe.unit_bytes): np.log(np.median([probe.alone_s, probe.beside_s, probe.compute_s], axis=1))
        for probe in probes
    }
    off = {
        threads: sum(float(np.abs(log_s[threads, size] - log_s[None, size]).sum()) for size in UNIT_BYTES)
        for threads, _ in log_s
        if threads is not None
    }
    return min(off, key=lambda threads: off[threads])


WAY_BYTES = ((64 * KIB, 512 * KIB), (4 * MIB, 16 * MIB))
"""Of the units with which ways of NCCL's are probed, by size class."""

PROMISING_WAY = 0.95
"""Of the time of what NCCL decides: a way that takes longer alone, at each size of a class, is not worth a trial."""

WayTimes = Mapping[tuple[NcclWay | None, int], float]
"""Seconds of an all-reduce on the idle network by way and bytes; what NCCL has refused is missing."""


def promising_ways(ways: Sequence[NcclWays], seconds: WayTimes) -> tuple[NcclWays, ...]:
    """Those that were clearly faster at some size of their class than what NCCL decides, the fastest first."""
    of_decided: dict[NcclWays, float] = {}
    for one in ways:
        for sizes in WAY_BYTES:
            way = one.by(sizes[0])
            if way is not None:
                probed = [size for size in sizes if (way, size) in seconds and (None, size) in seconds]
                of_decided[one] = min((seconds[way, size] / seconds[None, size] for size in probed), default=math.inf)
    return tuple(sorted((one for one in of_decided if of_decided[one] < PROMISING_WAY), key=of_decided.__getitem__))


def probe_ways(control: ControlPlane, router: Router, route: Route, *, largest_bytes: int) -> WayTimes:
    """Collective: times all-reduces as NCCL decides and in each way that it may be told, one at a time on `route`.

    Units are no larger than `largest_bytes`. Each way takes a communicator of its own, which may take long to connect:
    those for which there is no time are left out.
    """
    all_sizes = [size for sizes in WAY_BYTES for size in sizes if size <= largest_bytes]
    buffer = router.allocate(max(all_sizes, default=0) // 4, torch.float32)
    seconds: dict[tuple[NcclWay | None, int], float] = {}
    begin_s = time.perf_counter()
    for way in (None, *router.nccl_ways(), None):  # what comes first meets a network that has slept
        for size in all_sizes:
            plan = _one_unit(route, size, None, way)
            try:
                router.open_plan(plan)
            except PlanError as err:  # on all ranks alike
                logger.info("not probed: %s", err)
                break
            own_s = [_probe_s(control, router, plan, buffer, is_first=repeat == 0)[0] for repeat in range(MOST_REPEATS)]
            taken_s = min(control.maximum(np.array(own_s)).tolist()) / PASSES
            seconds[way, size] = min(taken_s, seconds.get((way, size), math.inf))
        if control.maximum(np.array([time.perf_counter() - begin_s]))[0] > MOST_PROBING_S:
            break
    return seconds


SHORT_S = 0.02
MOST_REPEATS = 3
"""A probe is repeated until it has taken so long or been taken so often: hiccups outlast short ones."""

SHAPES = (
    (64 * KIB, 1),
    (MIB, 1),
    (MIB, 4),
    (MIB, 16),
    (64 * KIB, 4),
    (MIB, 8),
    (64 * KIB, 8),
    (MIB, 2),
    (256 * KIB, 1),
)
"""Bytes of a unit where there is time, and streams; what a small budget should know comes first."""

NEEDED_FIRST, NEEDED, ENOUGH = 3, 2, 3
"""So many shapes are measured on the first route and on every other, and on the others at most so many."""

TOO_SLOW = 3
"""A route that carries less than this part of what the fastest one does is hopeless."""


def probe_routes(
    control: ControlPlane, router: Router, routes: Sequence[Route], *, max_streams: int, budget_s: float
) -> dict[Route, list[LinkProbe]]:
    """Collective: times a few all-reduces on each route, the first ones first, for about `budget_s` in all.

    Where the link is slow, probes carry less (`ProbeBudget`), and only the needed shapes may exceed the budget. On one
    host a route that these have shown to be hopeless is measured no further: streams share its processors, not links.

    Args:
        control: the ranks.
        router: carries the units.
        routes: to measure, the most important first: where there is time, it is measured in more ways than the others.
        max_streams: no more are opened.
        budget_s: by the clock, opening of connections included. The smallest of all ranks' counts.
    """
    # Every rank must go through the same shapes: neither its own budget nor its own clock may decide.
    budget_s = float(control.minimum(np.array([budget_s]))[0])
    buffer = router.allocate(max_streams * STREAM_BYTES // 4, torch.float32)
    found: dict[Route, list[LinkProbe]] = {route: [] for route in routes}
    needed_after = NEEDED_FIRST + NEEDED * (len(routes) - 1)
    fastest = 0.0  # bytes a second
    begin_s = time.perf_counter()
    for route in routes:
        shapes, needed = (SHAPES, NEEDED_FIRST) if route == routes[0] else (SHAPES[:ENOUGH], NEEDED)
        try:
            soundings_s = tuple(_sounding_s(control, router, route, buffer, size) for size in SOUNDING_BYTES)
        except (PlanError, TransportError) as err:  # on all ranks alike
            logger.info("not probed: %s", err)
            needed_after -= needed
            continue
        mine_s = [*soundings_s, time.perf_counter() - begin_s]
        small_s, large_s, spent_s = control.maximum(np.array(mine_s)).tolist()
        budget = ProbeBudget((small_s, large_s))
        seen: set[tuple[int, int]] = set()
        carried = 0.0  # bytes a second
        most = min(max_streams, router.max_streams([route]))
        for number, (unit_bytes, streams) in enumerate(shapes):
            if number >= needed and control.one_node and TOO_SLOW * carried < fastest:
                break
            needed_more = needed_after - number if number < needed else 0
            size = budget.size(unit_bytes, streams, left_s=budget_s - spent_s, needed_more=needed_more)
            # What is not known to be slow would have to be tried.
            if streams > most or size is None or (size.unit_bytes, streams) in seen:
                continue
            plan = _probe_plan(route, size, streams)
            try:
                router.open_plan(plan)
            except (PlanError, TransportError) as err:  # on all ranks alike
                logger.info("not probed: %s", err)
                continue
            seen.add((size.unit_bytes, streams))
            probed_s = 0.0
            for repeat in range(MOST_REPEATS):
                own_s, own_busy = _probe_s(control, router, plan, buffer, is_first=repeat == 0)
                mine = [own_s, time.perf_counter() - begin_s, own_busy]
                seconds, spent_s, busy = control.maximum(np.array(mine)).tolist()
                probe = LinkProbe(
                    unit_bytes=size.unit_bytes,
                    streams=streams,
                    seconds=seconds,
                    rounds=PASSES * size.rounds,
                    busy=busy,
                )
                found[route].append(probe)
                budget.learn(streams=streams, unit_bytes=size.unit_bytes, round_s=probe.round_s)
                if size.unit_bytes > SMALL_BYTES:
                    carried = max(carried, streams * size.unit_bytes / probe.round_s)
                probed_s += seconds
                if probed_s > SHORT_S or spent_s > budget_s:
                    break
        fastest = max(fastest, carried)
        needed_after -= needed
    return found


def narrowed(space: KnobSpace, probes: Mapping[Route, Sequence[LinkProbe]], *, default: Knobs) -> KnobSpace:
    """The space without what probes have shown to be hopeless: a trial of it would cost many times a good one.

    Hopeless routes (`TOO_SLOW`), and numbers of streams that carry less than half of what the default's route carries
    at best, are left out; the default stays.
    """
    rates = {
        route: _rates([probe for probe in measured if probe.unit_bytes > SMALL_BYTES])
        for route, measured in probes.items()
    }
    best = {route: max(by_streams.values()) for route, by_streams in rates.items() if by_streams}
    if not best:
        return space
    default_route = default.route
    routes = tuple(
        route
        for route in space.routes
        if route == default_route or TOO_SLOW * best.get(route, math.inf) >= max(best.values())
    )
    curve = rates.get(default_route, {})
    streams = tuple(
        n for n in space.streams if n == default.streams or 2 * curve.get(n, math.inf) >= best.get(default_route, 0.0)
    )
    return replace(space, routes=routes, streams=streams)


def _rates(probes: Sequence[LinkProbe]) -> dict[int, float]:
    """Bytes a second by number of streams, of the faster of repeated probes."""
    rates: dict[int, float] = {}
    for probe in probes:
        rate = probe.streams * probe.unit_bytes / probe.round_s
        rates[probe.streams] = max(rate, rates.get(probe.streams, 0.0))
    return rates


def _probe_plan(route: Route, size: ProbeSize, streams: int) -> CommPlan:
    """So many rounds on each stream, in units that take the streams in turn."""
    transport, algorithm = route
    numel = size.unit_bytes // 4
    units = tuple(
        Unit(start=number * numel, stop=(number + 1) * numel, stream=number % streams, algorithm=algorithm)
        for number in range(streams * size.rounds)
    )
    return CommPlan(numel=len(units) * numel, units=units, streams=streams, transport=transport)


def _sounding_s(control: ControlPlane, router: Router, route: Route, buffer: FlatBuffer, unit_bytes: int) -> float:
    """Collective: seconds that one all-reduce takes, roughly, on this rank; the second one, on open connections.

    Raises:
        PlanError | TransportError: on all ranks, the route cannot be opened.
    """
    plan = _probe_plan(route, ProbeSize(unit_bytes=unit_bytes, rounds=1), 1)
    router.open_plan(plan)
    seconds, _ = _probe_s(control, router, plan, buffer, is_first=True)
    return seconds / PASSES


def _probe_s(
    control: ControlPlane, router: Router, plan: CommPlan, buffer: FlatBuffer, *, is_first: bool
) -> tuple[float, float]:
    """Collective: seconds that the plan's units take `PASSES` times in a row, and processors that they keep busy.

    Both are this rank's.

    At first a pass goes before that opens connections, touches memory, lets congestion windows grow, and uses up what
    shapers grant a link that was idle; so the timed ones follow without a pause, not even that of a barrier.
    """
    control.barrier()
    if is_first:
        _pass(router, plan, buffer, times=1)
    device = router.device
    used_s = processor_time_beside_s()
    begin = device.record_event(timed=True)
    _pass(router, plan, buffer, times=PASSES)
    end = device.record_event(timed=True)
    device.wait_for(end)
    seconds = device.elapsed_s(begin, end)
    return seconds, (processor_time_beside_s() - used_s) / seconds


def _pass(router: Router, plan: CommPlan, buffer: FlatBuffer, *, times: int) -> None:
    """Collective: submits all units so many times, then waits for all of them."""
    router.wait_for([work for _ in range(times) for work in router.all_reduce_plan(buffer, plan, scale=0.0)])


def fitted_links(probes: Mapping[Route, Sequence[LinkProbe]]) -> dict[Route, LinkModel]:
    """What all-reduces cost on each route; those that follow no simple rule are left out, which the log says."""
    from sirtaki.autotune.model.fits import fit_link  # imports scipy, which only a rank that plans should wait for

    links: dict[Route, LinkModel] = {}
    unfit: list[str] = []
    for route, measured in probes.items():
        name = f"{route[0].value} {route[1].value}"
        try:
            links[route] = link = fit_link(measured)
        except TuningError as err:
            unfit.append(name)
            logger.debug("%s: %s", name, err)
            continue
        curve = " ".join(f"{rate / 1e6:.4g}" for rate in link.throughput)
        logger.debug("%s: α = %.3g ms, o = %.3g ms, G = %s MB/s", name, 1e3 * link.alpha_s, 1e3 * link.host_s, curve)
    if unfit:
        logger.info(
            "no plans for %s, whose times fit no model, as is usual on one host; search techniques try it all the same",
            ", ".join(unfit),
        )
    return links


PROBE_S, SPANS, MOST_PROBING_S = 0.2, 3, 5.0
"""What probing may take, besides so many times the time that synchronising takes, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found.

    Attributes:
        space: what may be chosen.
        promising: the space without what probes have shown to be hopeless, as long as probes are believed.
        links: probes of each route; none where planners do not take part.
        threads: what thread allowances do; empty where they make no difference.
        host: see `PlanningModel`.
    """

    space: KnobSpace
    promising: KnobSpace
    links: Mapping[Route, Sequence[LinkProbe]] = field(default_factory=dict)
    threads: Sequence[ThreadProbe] = ()
    host: SharedHost | None = None

    def with_routes(self, routes: Sequence[Route], *, promising: Sequence[Route]) -> Measured:
        """The same, if these may be chosen, whether or not they were probed, and only some of them promise something.

        What was slow on an idle network costs too much to be tried again while probes are believed.
        """
        narrow = replace(self.promising, routes=tuple(route for route in routes if route in promising))
        return replace(self, space=replace(self.space, routes=tuple(routes)), promising=narrow)

    def model(
        self, layout: GradientLayout, ready_s: Sequence[float], backward_s: float, between_s: float
    ) -> PlanningModel | None:
        """The planners' model; None where no route could be fitted, which the log says.

        Args:
            layout: gradients in the order in which they become ready.
            ready_s: when each did, `(n_gradients,)`, in the layout's order.
            backward_s: when the backward pass ended.
            between_s: from the last reduced gradient to the first ready one; not a number = unknown.
        """
        links = fitted_links(self.links)
        if not links or not all(map(math.isfinite, ready_s)):
            return None
        forward_s = max(0.0, between_s) if math.isfinite(between_s) else 0.0
        profile = Profile(ready_s=tuple(ready_s), compute_s=max(backward_s, *ready_s), forward_s=forward_s)
        alpha_s = next(iter(links.values())).alpha_s
        contention = contention_model(self.threads, alpha_s=alpha_s) if self.threads else None
        return PlanningModel(layout=layout, profile=profile, links=links, contention=contention, host=self.host)


def without_planners(space: KnobSpace) -> Measured:
    """Nothing is measured; nobody tunes threads, or tells NCCL how to reduce, without knowing what that does."""
    space = replace(space, threads=space.threads[:1], nccl=())
    return Measured(space=space, promising=space)


def measure(control: ControlPlane, router: Router, space: KnobSpace, *, default: Knobs, span_s: float) -> Measured:
    """Collective: probes the routes of a space.

    Args:
        control: the ranks.
        router: carries the probes.
        space: what may be chosen as far as is known.
        default: what runs untuned, which stays in the space.
        span_s: what synchronising takes, by which probing may take longer.
    """
    budget_s = min(PROBE_S + SPANS * span_s, MOST_PROBING_S)
    try:
        links = probe_routes(control, router, space.routes, max_streams=space.streams[-1], budget_s=budget_s)
        space = still_possible(space, router)
        threads = probe_threads(control, router, space.routes[0]) if len(space.threads) > 1 else []
        if space.nccl:
            largest_bytes = space.unit_bytes[1]
            # On one node NCCL decides right by its own model, and links are no bottleneck.
            seconds = (
                {} if control.one_node else probe_ways(control, router, space.routes[0], largest_bytes=largest_bytes)
            )
            space = replace(space, nccl=promising_ways(space.nccl, seconds))
    except (PlanError, TransportError, TuningError) as err:  # on all ranks alike: plans and times are agreed
        logger.warning("tuning goes on without planners, as the network could not be probed: %s", err)
        return without_planners(space)
    if not threads or not threads_matter(threads):
        threads, space = [], replace(space, threads=space.threads[:1])
    return Measured(
        space=space,
        promising=narrowed(space, links, default=default),
        links=links,
        threads=threads,
        host=_shared_host(control) if control.one_node and not router.device.streams else None,
    )


def _shared_host(control: ControlPlane) -> SharedHost:
    """Collective: what all ranks may use together."""
    told: list[tuple[tuple[int, ...], float | None, int]] = control.all_gather(
        (allowed_processors(), cpu_quota(), torch.get_num_threads())
    )
    processors = float(len({number for allowed, _, _ in told for number in allowed}))
    quotas = [processors if quota is None else quota for _, quota, _ in told]
    return SharedHost(
        ranks=control.size, processors=min(processors, *quotas), threads=min(threads for _, _, threads in told)
    )
