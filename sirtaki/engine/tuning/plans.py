"""Communication settings (knobs) that a job may run: their range, the untuned default, plan files, and the network
measurements (probes) from which planners compute settings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from sirtaki.errors import ConfigError, PlanError, TransportError, TuningError, require
from sirtaki.machine import allowed_processors, cpu_quota, processor_time_beside_s
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, Gain, LinkModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Tuning result for one set of parameters of an elastic job. The job uses it again after a restart.

    Attributes:
        knobs: communication setting that ran last. If the warm-up was cut short, its best setting.
        settled: True if the warm-up was complete.
        place: for each rank, the lowest rank on its host. Times measured with another placement are not comparable.
        trials: trials of the last search. Set on rank 0 only.
        gain: proved gain of `knobs` over the default; None = no such gain. Set on rank 0 only.
    """

    knobs: Knobs
    settled: bool
    place: tuple[int, ...]
    trials: tuple[Trial, ...] = ()
    gain: Gain | None = None


@dataclass(slots=True)
class CarriedTuning:
    """Tuning results of an elastic job from before its restarts.

    Every rank keeps them, because any rank may become rank 0 after the next restart.

    Attributes:
        going_on: True if the job will restart with other ranks, so that an unfinished warm-up must store its trials
            here.
    """

    going_on: bool = False
    _known: dict[str, dict[tuple[int, ...], Carried]] = field(default_factory=dict)

    def leave(self, key: str, carried: Carried) -> None:
        """Store a tuning result for the parameters that `key` identifies.

        Replace an older result with the same placement of ranks on hosts.
        """
        at = self._known.setdefault(key, {})
        at.pop(carried.place, None)
        at[carried.place] = carried

    def of(self, key: str) -> list[Carried]:
        """Return the stored results for the parameters that `key` identifies.

        There is one for each placement of ranks on hosts, the newest first.
        """
        return list(self._known.get(key, {}).values())[::-1]


def key_of(names: Sequence[str], params: Sequence[torch.Tensor]) -> str:
    """Return a hash of the parameters' names, shapes and dtypes. It is equal on all ranks and after each restart."""
    text = ";".join(f"{name}{tuple(param.shape)}{param.dtype}" for name, param in zip(names, params, strict=True))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


DEFAULT_UNITS = 16
DEFAULT_UNIT_BYTES = (512 * KIB, 4 * MIB)
DEFAULT_UNIT_BYTES_NCCL = (4 * MIB, 32 * MIB)
"""Default number of units (buckets) per iteration, and minimum and maximum size of a unit.

There must be enough units to overlap with the backward pass, but each unit has a start-up cost. With NCCL the limits
are near DDP's bucket of 25 MiB, because connections of GPUs transfer more bytes in the time of one start-up.
"""

DEFAULT_STREAMS_ONE_NODE = 1
DEFAULT_STREAMS = 4
"""Default number of streams (parallel connections) between nodes.

Some networks limit the bandwidth of one connection. Four connections use the whole bandwidth of most networks, at
little cost."""

STREAM_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
MOST_UNITS = 4096
"""Maximum number of units (buckets) in a plan. The start-up costs of more units would exceed their gain.

A model with very many gradients may have more units: one for each gradient and stream.
"""


def knob_space(router: Router, settings: Settings, total_bytes: int) -> KnobSpace:
    """Return the range of settings for tuning: those that the transports support and the user's settings allow.

    Raises:
        ConfigError: the user has fixed a value that this job does not support.
    """
    routes = tuple(
        (kind, algorithm)
        for kind, algorithm in router.routes
        if settings.transport in (None, kind) and settings.algorithm in (None, algorithm)
    )
    if not routes:
        possible = ", ".join(f"{kind.value} {algorithm.value}" for kind, algorithm in router.routes)
        raise ConfigError(
            "this job does not have the transport and algorithm that SIRTAKI_TRANSPORT and SIRTAKI_ALGORITHM "
            f"demand; possible: {possible}"
        )
    # Limit every route to the number of streams that the default route supports, because more choices cost trials.
    limits = {route: router.max_streams([route], fixed=settings.streams is not None) for route in routes}
    limit = limits[routes[0]]
    if settings.streams is not None:
        if settings.streams > limit:
            raise ConfigError(
                f"SIRTAKI_STREAMS={settings.streams} must be at most {limit} in this job: {router.why_not_more(routes)}"
            )
        routes = tuple(route for route in routes if limits[route] >= settings.streams)
    # If only one stream is possible, communicators must not run at the same time. Then tune neither the number of GPU
    # threads nor NCCL's algorithm, because each value needs its own communicator.
    allowances = router.threads() if limit > 1 else ()
    largest = min(LARGEST_UNIT_BYTES, max(SMALLEST_UNIT_BYTES, 1 << (total_bytes - 1).bit_length()))
    return KnobSpace(
        routes=routes,
        threads=(None, *allowances),
        unit_bytes=(settings.unit_bytes,) * 2 if settings.unit_bytes else (SMALLEST_UNIT_BYTES, largest),
        streams=(settings.streams,) if settings.streams else tuple(n for n in STREAM_COUNTS if n <= limit),
        most_streams=tuple((route, limits[route]) for route in routes if limits[route] < limit),
        nccl=for_each_class(router.nccl_ways) if limit > 1 else (),
    )


def why_fewer_streams(router: Router, route: Route, *, ranks: int) -> str:
    """Return a log text: why the tuner tries fewer streams of `route` than the transport supports. "" if not fewer."""
    transport = router.transports[route]
    tried, most = router.max_streams([route]), router.max_streams([route], fixed=True)
    if tried == transport.max_streams:
        return ""
    reason = router.why_not_more([route])
    if tried < most:
        cost = transport.stream_cost
        reason = (
            f"on {ranks} ranks each stream takes {cost.descriptors} file descriptors and {cost.threads} threads of "
            f"each rank; SIRTAKI_STREAMS permits up to {most}"
        )
    which = f"{tried} streams (parallel connections)" if tried > 1 else "1 stream (connection)"
    return f"the tuner tries at most {which} of {route[0].value}, because {reason}"


def for_each_class(ways: Sequence[NcclWay]) -> tuple[NcclWays, ...]:
    """Return, for small and for large units (buckets), one setting for each algorithm that NCCL may be told to use."""
    return tuple(NcclWays.of(sizes[0], way) for sizes in WAY_BYTES for way in ways)


def default_knobs(space: KnobSpace, *, total_bytes: int, one_node: bool) -> Knobs:
    """Return the untuned default: the setting in `space` that is usually fast."""
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
    """Return one plan for each flat buffer: how it is cut into units (buckets), and how these are sent.

    If the setting has explicit cuts, they apply to the first buffer. The others are cut into equal units.
    """
    return [(knobs if number == 0 else knobs.but(cuts=None)).to_plan(layout) for number, layout in enumerate(layouts)]


def checked_plans(knobs: Knobs, layouts: Sequence[GradientLayout]) -> list[CommPlan]:
    """Return the plans of `knobs`, a setting that a search method or the registry has proposed, after validation.

    Raises:
        PlanError: explicit cuts do not fit the flat buffer, or there are too many units (buckets).
    """
    most = max(MOST_UNITS, STREAM_COUNTS[-1] * len(layouts[0].sizes))
    n_buckets = len(knobs.cuts or ())
    require(n_buckets <= most, "number of buckets of the communication plan", f"at most {most}", n_buckets, PlanError)
    return plans_for(knobs, layouts)


def traffic(knobs: Knobs, layouts: Sequence[GradientLayout]) -> Hashable:
    """Return a key that is equal for settings with equal traffic, so that only one of these settings is measured.

    Traffic is equal if the same units (buckets) are sent in the same order on the same number of streams.

    Raises:
        PlanError: `knobs` do not fit the layouts.
    """
    return tuple(plan.on_fewest_streams() for plan in checked_plans(knobs, layouts))


def fixed_knobs(settings: Settings, lossy: Sequence[str] = ()) -> dict[str, str]:
    """Return the communication settings that the user has fixed, by name, with their values as text.

    `lossy` are the compressors that the user allows.
    """
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
    """Content of the user's plan file (`SIRTAKI_PLAN`): a setting, and a description of the job that it fits.

    Attributes:
        source: path of the plan file.
        knobs: communication setting to run.
        ranks: number of ranks of the job that the plan was made for.
        sizes: for each flat buffer, the number of elements of each gradient, in the order in which gradients became
            ready. Control flags count as a gradient.
        part_bytes: bytes of gradients after which the graph of a compiled model is split (`hvd.early_gradients`). 0 =
            the graph is not split. None = the plan does not concern compiled models.
    """

    source: str
    knobs: Knobs
    ranks: int
    sizes: tuple[tuple[int, ...], ...]
    part_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content of the plan file, including the units (buckets) of the first flat buffer.

        Raises:
            PlanError: the setting does not fit the sizes of the gradients.
        """
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        del values["source"]
        whole = self.knobs.to_plan(GradientLayout(sizes=self.sizes[0])).to_json()
        return {"format": FORMAT, "version": FORMAT_VERSION, **values, **whole}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str) -> GivenPlan:
        """Parse the content of a plan file, which `to_json` has returned.

        Raises:
            ConfigError: `data` is not a plan, or has a version that this release does not read.
        """
        found = (data.get("format"), data.get("version")) if isinstance(data, Mapping) else type(data).__name__
        try:
            require(found == (FORMAT, FORMAT_VERSION), "(format, version)", (FORMAT, FORMAT_VERSION), found)
            return msgspec.convert({**data, "source": source}, cls)
        except (msgspec.ValidationError, ConfigError, PlanError, RecursionError) as err:
            raise ConfigError(
                f"the communication plan {source} is invalid ({err}); write it again with `sirtaki optimize`"
            ) from err

    @classmethod
    def read(cls, path: str | Path) -> GivenPlan:
        """Read the plan file `path`, or `plan.json` if `path` is a folder.

        Raises:
            ConfigError: the file cannot be read, or is not a plan.
        """
        path = Path(path)
        try:
            path = path / PLAN_FILE if path.is_dir() else path
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as err:
            raise ConfigError(
                f"the communication plan {path} cannot be read ({err}); write one with `sirtaki optimize`"
            ) from err
        return cls.from_json(data, source=str(path))

    def misfit(self, layouts: Sequence[GradientLayout], ranks: int, space: KnobSpace) -> str:
        """Return one sentence on why a job with these layouts cannot run this plan. Return "" if it can."""
        if self.ranks != ranks:
            return f"the plan {self.source} is for {self.ranks} ranks, but this job has {ranks}"
        planned = sorted(sorted(sizes) for sizes in self.sizes)
        if planned != sorted(sorted(layout.sizes) for layout in layouts):
            theirs = [layout.sizes for layout in layouts]
            return (
                f"the plan {self.source} is for other gradients: {_described(self.sizes)}, but this model has "
                f"{_described(theirs)}"
            )
        if self.knobs not in space:
            return (
                f"the plan {self.source} has the setting {self.knobs.describe()}, whose transport, algorithm, bucket "
                "size, number of parallel streams, NCCL options or compressor is not available in this job"
            )
        try:
            checked_plans(self.knobs, layouts)
        except PlanError as err:
            return f"the plan {self.source} does not fit: {err}"
        return ""

    def accepted(
        self, layouts: Sequence[GradientLayout], control: ControlPlane, space: KnobSpace, *, must_run: bool
    ) -> Knobs | None:
        """Return the plan's setting (knobs) if this job can run it, otherwise None. Rank 0 logs whether it is used.

        Every rank returns the same value without communication, because the arguments are equal on all ranks.

        Args:
            layouts: gradient layouts, equal on all ranks.
            control: control plane of the job.
            space: settings that this job may run.
            must_run: True to raise an error if the plan does not fit, instead of returning None.

        Raises:
            ConfigError: the plan does not fit, and `must_run` is True. Raised on all ranks.
        """
        why_not = self.misfit(layouts, control.size, space)
        if why_not and must_run:
            raise ConfigError(f"SIRTAKI_PLAN: {why_not}")
        if control.rank == 0:
            if why_not:
                logger.warning(
                    "the communication plan in SIRTAKI_PLAN does not fit this job, and Sirtaki ignores it (%s); to "
                    "make a plan for this job, run `sirtaki optimize`",
                    why_not,
                )
            else:
                logger.info(
                    "the plan %s of SIRTAKI_PLAN fits this job and will run: %s",
                    self.source,
                    self.knobs.describe(),
                )
        return None if why_not else self.knobs


def _described(sizes: Sequence[Sequence[int]]) -> str:
    # Do not count the control flags, which `sizes` contains as if they were a gradient.
    return f"{sum(map(len, sizes)) - 1} of {sum(map(sum, sizes))} elements in all"


def part_bytes_of(path: str | None) -> int | None:
    """Return the field `part_bytes` of the plan file at `path`: bytes of gradients in each part of a compiled graph.

    Return None if there is no plan or if it cannot be read. The optimizer reports an unreadable plan later.
    """
    if path is None:
        return None
    try:
        return GivenPlan.read(path).part_bytes
    except ConfigError:
        return None


def given_to_all(control: ControlPlane, path: str | None, *, ranks_stay: bool = True) -> GivenPlan | None:
    """Read the user's plan file on rank 0 and broadcast its content. Collective.

    Args:
        control: control plane of the job.
        path: plan file, or a folder that contains `plan.json`. Only the value on rank 0 is used.
        ranks_stay: True if the job is not elastic. In an elastic job, rank 0 may move to a host without the plan file,
            so an unreadable plan must not end the job.

    Returns:
        The plan. None if `path` is None, or if rank 0 of an elastic job cannot read the plan.

    Raises:
        ConfigError: rank 0 cannot read the plan, and `ranks_stay` is True. Raised on all ranks.
    """
    plan_or_error: GivenPlan | str | None = None
    if control.rank == 0 and path is not None:
        try:
            plan_or_error = GivenPlan.read(path)
        except ConfigError as err:
            plan_or_error = str(err)
    plan_or_error = control.broadcast(plan_or_error)
    if not isinstance(plan_or_error, str):
        return plan_or_error
    if ranks_stay:
        raise ConfigError(f"SIRTAKI_PLAN: {plan_or_error}")
    if control.rank == 0:
        logger.warning("the communication plan in SIRTAKI_PLAN is invalid, and Sirtaki ignores it: %s", plan_or_error)
    return None


def still_possible(space: KnobSpace, router: Router) -> KnobSpace:
    """Return `space` without the routes (transports and algorithms) and stream counts that could not be opened.

    The result is equal on all ranks.

    Raises:
        TransportError: no route is left.
    """
    supported = {route: router.max_streams([route], fixed=True) for route in space.routes if route in router.routes}
    routes = tuple(route for route, most in supported.items() if most >= space.streams[0])
    if not routes:
        raise TransportError(
            "no transport for gradients can be opened; see the warnings above, run `sirtaki doctor`, and check "
            "SIRTAKI_TRANSPORT, SIRTAKI_ALGORITHM and SIRTAKI_STREAMS"
        )
    tried = dict(space.most_streams)
    limits = {route: min(supported[route], tried.get(route, space.streams[-1])) for route in routes}
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
    """Open the streams (connections) of the untuned default. Collective.

    If they cannot be opened, choose another default without the failed routes, and open its streams.

    Args:
        space: settings that may be tuned.
        control: control plane of the job.
        router: router that opens the streams.
        choose: returns the untuned default within a given space.

    Returns:
        Two items. The first is `space` without the routes that failed to open, and without routes that need too many
        connections for this number of ranks. The second is the default setting, whose streams are open.

    Raises:
        TransportError: no route can be opened. Raised on all ranks.
    """
    problem = ""
    while True:
        default = choose(space)
        try:
            router.open_streams(default.route, default.streams, threads=default.threads)
        except TransportError as err:
            problem = problem or str(err)
            try:
                space = still_possible(space, router)
            except TransportError as none_left:
                raise TransportError(f"{problem}; {none_left}") from None
            continue
        if problem and control.rank == 0:
            logger.warning(
                "connections for the default setting cannot be opened (%s); Sirtaki reduces gradients with the setting "
                "%s instead",
                problem,
                default.describe(),
            )
        tried = tuple(route for route in space.routes if route in (default.route, *router.affordable_routes))
        return replace(space, routes=tried), default


STREAM_BYTES = MIB
"""Bytes that each stream all-reduces in one pass of a probe (network measurement), if the time budget allows it."""

PASSES = 2
"""Number of passes of a probe (network measurement) that are timed as one. An untimed pass runs before them."""

SMALL_BYTES, LEAST_LARGE_BYTES = 64 * KIB, 128 * KIB
"""Largest all-reduce, in bytes, of a small probe (network measurement), and smallest all-reduce of a large probe.

The start-up time α of an all-reduce is fitted from the times of both."""

SOUNDING_BYTES = (4 * KIB, SMALL_BYTES)
"""Sizes in bytes of two single all-reduces. Their times predict the durations of probes (network measurements)."""

GOES_ON = 0.5
"""Exponent of the expected growth of bandwidth when streams are added, relative to the measured growth so far.

With 0.5, a bandwidth that has grown linearly is expected to grow with the square root of the number of streams."""

LEAST_SHARE = 0.25
"""Minimum fraction of an all-reduce's time that counts as transmission. The rest may be start-up time."""

OTHERS = 3
"""Number of optional probes (network measurements) for which each probe must leave time in the time budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSize:
    """Size of one probe: a measurement of all-reduces on a route (transport and algorithm).

    Attributes:
        unit_bytes: size of each all-reduce.
        rounds: number of all-reduces on each stream in one pass of the probe.
    """

    unit_bytes: int
    rounds: int


class ProbeBudget:
    """Time budget for the probes (measurements) of one route (transport and algorithm).

    The duration of a probe is predicted from the times of earlier ones.
    """

    def __init__(self, soundings_s: tuple[float, float]) -> None:
        """Create the budget from `soundings_s`: the seconds of one all-reduce of each size in `SOUNDING_BYTES`."""
        self._alpha_s, sounded_s = soundings_s
        self._sounded = self._rate(SOUNDING_BYTES[1], sounded_s)
        self._probed: dict[int, float] = {}  # For each number of streams, the measured bytes per second.

    def learn(self, *, streams: int, unit_bytes: int, round_s: float) -> None:
        """Record the measured duration `round_s` of one round: one all-reduce of `unit_bytes` on each stream."""
        rate = self._rate(streams * unit_bytes, round_s)
        self._probed[streams] = max(rate, self._probed.get(streams, 0.0))

    def _rate(self, size_bytes: int, seconds: float) -> float:
        # Assume a minimum transmission time, because a start-up time as long as the whole all-reduce is an outlier.
        return size_bytes / max(seconds - self._alpha_s, LEAST_SHARE * seconds)

    def expected_s(self, size: ProbeSize, *, streams: int) -> float:
        """Return the expected duration of a probe (measurement of all-reduces), in seconds.

        Assumes that bandwidth grows more slowly with the number of streams than it did in earlier probes (`GOES_ON`).
        """
        probed = [(count, rate) for count, rate in self._probed.items() if count <= streams]
        count, rate = max(probed, default=(1, self._sounded))
        one = self._probed.get(1, rate)
        if count > 1 and streams > count and rate > one:
            rate *= (streams / count) ** (GOES_ON * min(1.0, math.log(rate / one) / math.log(count)))
        return (1 + PASSES) * size.rounds * (self._alpha_s + streams * size.unit_bytes / rate)

    def size(self, unit_bytes: int, streams: int, *, left_s: float, needed_more: int) -> ProbeSize | None:
        """Return the size of the largest probe (measurement of all-reduces) that fits into the time budget.

        Args:
            unit_bytes: maximum size of one all-reduce.
            streams: number of concurrent streams.
            left_s: remaining time budget in seconds. May be negative.
            needed_more: number of required probes that remain, including this one. 0 if this probe is optional.

        Returns:
            The probe's size. A required probe that does not fit gets the smallest size. None if an optional probe does
            not fit.
        """
        share_s = left_s / (needed_more + OTHERS)
        sizes = list(_sizes(unit_bytes))
        for size in sizes:
            if self.expected_s(size, streams=streams) <= share_s:
                return size
        return sizes[-1] if needed_more or self.expected_s(sizes[-1], streams=streams) <= left_s else None


def _sizes(unit_bytes: int) -> Iterable[ProbeSize]:
    """Yield sizes of probes (measurements of all-reduces), the largest first.

    At first, the number of all-reduces on each stream is halved, and their size stays. Once the number is 1, the size
    is halved.
    """
    least = min(unit_bytes, LEAST_LARGE_BYTES)
    stream_bytes = STREAM_BYTES
    while stream_bytes >= least:
        unit = min(unit_bytes, stream_bytes)
        yield ProbeSize(unit_bytes=unit, rounds=stream_bytes // unit)
        stream_bytes //= 2


UNIT_BYTES = (2 * MIB, 16 * MIB)
MATRIX = 2048
COMPUTE_STEPS = 16
"""Number of matrix products that are computed during measured all-reduces. They take milliseconds on a current GPU."""

MOST_REDUCTIONS = 64

REPETITIONS = 3
CLEAR = 3.0
"""The number of GPU threads of an all-reduce (thread allowance) is tuned if its effect is at least this multiple of the
spread of repeated measurements.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadProbe:
    """Times measured with one thread allowance (the GPU threads that an all-reduce may use).

    Each time is that of the slowest rank, and is measured `REPETITIONS` times.

    Attributes:
        threads: maximum number of GPU threads of each all-reduce. None = NCCL chooses.
        unit_bytes: size of each all-reduce.
        alone_s: times of an all-reduce without computation, `(REPETITIONS,)`.
        beside_s: times of an all-reduce during computation, `(REPETITIONS,)`.
        compute_s: times of the computation during all-reduces, `(REPETITIONS,)`.
        undisturbed_s: times of the computation without all-reduces, `(REPETITIONS,)`.
    """

    threads: int | None
    unit_bytes: int
    alone_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    undisturbed_s: tuple[float, ...]


@outside_modes  # Hide the matrix products of the measurement from a TorchDispatchMode of the user.
def probe_threads(control: ControlPlane, router: Router, route: Route) -> list[ThreadProbe]:
    """Time all-reduces with each possible number of GPU threads, and with NCCL's own choice, on one stream. Collective.

    Matrix products of constant size run at the same time. They stand for the training step, because the tuner must
    decide before the first trial whether the number of threads matters. `ContentionLearner` later corrects the times
    for the real step.
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
            worst = control.maximum(np.array(rounds))  # Times of the slowest rank, `(REPETITIONS, 4)`.
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
    """Measure one repetition of a `ThreadProbe` on this rank. Collective.

    Returns:
        Seconds of an all-reduce without computation, of an all-reduce during computation, of the computation during
        all-reduces, and of the computation without all-reduces.
    """
    device = router.device
    device.synchronise()
    begin = device.record_event(timed=True)
    router.wait_for(router.all_reduce_plan(buffer, plan, scale=0.0))
    reduced = device.record_event(timed=True)
    _compute(device, matrix, product)
    computed = device.record_event(timed=True)
    device.synchronise()
    alone_s, undisturbed_s = device.elapsed_s(begin, reduced), device.elapsed_s(reduced, computed)
    # Launch so many consecutive all-reduces that they last as long as the computation on every rank.
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
        device.launch(partial(torch.mm, matrix, matrix, out=product))


def threads_matter(probes: Sequence[ThreadProbe]) -> bool:
    """Return whether the number of GPU threads of an all-reduce clearly changes its time, or that of the computation.

    For each size, the medians with different numbers of threads are compared with the spread of repetitions with the
    same number.
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
    """Fit LIBRA's model of contention (slowdown of computation and communication by each other) to measured times.

    The parameters are LIBRA's g, p and q. Log a line and return None if the fit fails.

    Args:
        probes: times with NCCL's own choice of GPU threads, and with at least two other numbers of threads.
        alpha_s: start-up time of an all-reduce on the same route.
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
        logger.info(
            "the slowdown of computation by communication cannot be measured (%s); the tuner's predictions assume "
            "no slowdown in this job",
            err,
        )
        return None


def _most_like_none(probes: Sequence[ThreadProbe]) -> int:
    """Return the number of GPU threads with which all measured times are most similar to those of NCCL's own choice."""
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
"""Sizes of the all-reduces with which NCCL's algorithms are timed: for small, and for large units (buckets)."""

PROMISING_WAY = 0.95
"""The tuner tries an NCCL algorithm if its all-reduce takes less than this fraction of the time with NCCL's own choice.

The comparison is made at each measured size, for small and for large units (buckets).
"""

WayTimes = Mapping[tuple[NcclWay | None, int], float]
"""Seconds of an all-reduce on an idle network, by NCCL algorithm and bytes. The key None is NCCL's own choice.

Combinations that NCCL rejected are missing.
"""


def promising_ways(ways: Sequence[NcclWays], seconds: WayTimes) -> tuple[NcclWays, ...]:
    """Return the settings that force NCCL to use an algorithm which was clearly faster than NCCL's own choice.

    The comparison is made at the measured sizes. The fastest comes first.
    """
    of_decided: dict[NcclWays, float] = {}
    for one in ways:
        for sizes in WAY_BYTES:
            way = one.by(sizes[0])
            if way is not None:
                probed = [size for size in sizes if (way, size) in seconds and (None, size) in seconds]
                of_decided[one] = min((seconds[way, size] / seconds[None, size] for size in probed), default=math.inf)
    return tuple(sorted((one for one in of_decided if of_decided[one] < PROMISING_WAY), key=of_decided.__getitem__))


def probe_ways(control: ControlPlane, router: Router, route: Route, *, largest_bytes: int) -> WayTimes:
    """Time all-reduces on `route` with NCCL's own choice and with each algorithm that can be forced. Collective.

    Each algorithm needs its own communicator, which may take long to connect. Algorithms are skipped after
    `MOST_PROBING_S`.

    Args:
        control: control plane of the job.
        router: router that runs the all-reduces.
        route: transport, and flat or hierarchical algorithm.
        largest_bytes: maximum size of an all-reduce.
    """
    all_sizes = [size for sizes in WAY_BYTES for size in sizes if size <= largest_bytes]
    buffer = router.allocate(max(all_sizes, default=0) // 4, torch.float32)
    seconds: dict[tuple[NcclWay | None, int], float] = {}
    begin_s = time.perf_counter()
    # Time NCCL's own choice first and last, because the first measurement meets an idle network and is slower.
    for way in (None, *router.nccl_ways, None):
        for size in all_sizes:
            plan = _one_unit(route, size, None, way)
            try:
                router.open_plan(plan)
            except PlanError as err:  # This error is raised on all ranks, so all of them skip the same measurement.
                logger.info("the tuner does not measure an NCCL algorithm that cannot run: %s", err)
                break
            own_s = [_probe_s(control, router, plan, buffer, is_first=repeat == 0)[0] for repeat in range(MOST_REPEATS)]
            taken_s = min(control.maximum(np.array(own_s)).tolist()) / PASSES
            seconds[way, size] = min(taken_s, seconds.get((way, size), math.inf))
        if control.maximum(np.array([time.perf_counter() - begin_s]))[0] > MOST_PROBING_S:
            break
    return seconds


SHORT_S = 0.02
MOST_REPEATS = 3
"""A probe (network measurement) is repeated until its runs have taken `SHORT_S` in all, but at most `MOST_REPEATS`
times, because short measurements are noisy.
"""

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
"""Shapes of probes (network measurements), most important first: maximum bytes of an all-reduce, number of streams."""

NEEDED_FIRST, NEEDED, ENOUGH = 3, 2, 3
"""Numbers of shapes of probes (network measurements): required on the first route (transport and algorithm), required
on each later route, and maximum on each later route.
"""

TOO_SLOW = 3
"""A route (transport and algorithm) is not tried if its bandwidth, times this factor, is below the best route's."""


def probe_routes(
    control: ControlPlane, router: Router, routes: Sequence[Route], *, max_streams: int, budget_s: float
) -> dict[Route, list[LinkProbe]]:
    """Time a few all-reduces on each route (transport and algorithm), for about `budget_s` in all. Collective.

    In slow networks, all-reduces are smaller, and only required measurements may exceed the budget. On one host, a
    route that is slower than `TOO_SLOW` allows gets only the required measurements, because more streams do not make it
    faster: they share processors, not network connections.

    Args:
        control: control plane of the job.
        router: router that runs the all-reduces.
        routes: routes to measure, most important first. The first route is measured with more shapes.
        max_streams: maximum number of streams to open.
        budget_s: time budget in seconds, including the opening of connections. The minimum over all ranks applies.
    """
    # Use the longest elapsed time and the smallest budget of all ranks, so that all ranks measure the same shapes.
    budget_s = float(control.minimum(np.array([budget_s]))[0])
    buffer = router.allocate(max_streams * STREAM_BYTES // 4, torch.float32)
    found: dict[Route, list[LinkProbe]] = {route: [] for route in routes}
    needed_after = NEEDED_FIRST + NEEDED * (len(routes) - 1)
    fastest = 0.0  # Measured bytes per second of the fastest route so far.
    begin_s = time.perf_counter()
    for route in routes:
        shapes, needed = (SHAPES, NEEDED_FIRST) if route == routes[0] else (SHAPES[:ENOUGH], NEEDED)
        try:
            soundings_s = tuple(_sounding_s(control, router, route, buffer, size) for size in SOUNDING_BYTES)
        except (PlanError, TransportError) as err:
            # All ranks raise this error together, so all of them skip the route.
            logger.info(
                "latency and bandwidth of all-reduces by the transport %s and the algorithm %s cannot be measured; "
                "tuning continues without these numbers: %s",
                *(part.value for part in route),
                err,
            )
            needed_after -= needed
            continue
        measured_s = [*soundings_s, time.perf_counter() - begin_s]
        small_s, large_s, spent_s = control.maximum(np.array(measured_s)).tolist()
        budget = ProbeBudget((small_s, large_s))
        seen: set[tuple[int, int]] = set()
        carried = 0.0  # Measured bytes per second of this route so far.
        most = min(max_streams, router.max_streams([route]))
        for number, (unit_bytes, streams) in enumerate(shapes):
            if number >= needed and control.one_node and TOO_SLOW * carried < fastest:
                break
            needed_more = needed_after - number if number < needed else 0
            size = budget.size(unit_bytes, streams, left_s=budget_s - spent_s, needed_more=needed_more)
            # Skip the shape if it has more streams than the route allows, does not fit into the budget, or was reduced
            # to a size that has been measured already.
            if streams > most or size is None or (size.unit_bytes, streams) in seen:
                continue
            plan = _probe_plan(route, size, streams)
            try:
                router.open_plan(plan)
            except (PlanError, TransportError) as err:
                # All ranks raise this error together, so all of them end the measurement of the route.
                logger.info(
                    "all-reduces on %d streams (parallel connections) cannot be measured; tuning continues without "
                    "this measurement: %s",
                    streams,
                    err,
                )
                continue
            seen.add((size.unit_bytes, streams))
            probed_s = 0.0
            for repeat in range(MOST_REPEATS):
                own_s, own_busy = _probe_s(control, router, plan, buffer, is_first=repeat == 0)
                measured = [own_s, time.perf_counter() - begin_s, own_busy]
                seconds, spent_s, busy = control.maximum(np.array(measured)).tolist()
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
    """Return `space` without settings that were very slow in network measurements (probes), because trials cost time.

    Routes (transports and algorithms) slower than `TOO_SLOW` allows are removed, and numbers of streams with less than
    half the best bandwidth of the default's route. The default itself is never removed.
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
    """Return the measured bytes per second by number of streams, from the fastest of repeated measurements."""
    rates: dict[int, float] = {}
    for probe in probes:
        rate = probe.streams * probe.unit_bytes / probe.round_s
        rates[probe.streams] = max(rate, rates.get(probe.streams, 0.0))
    return rates


def _probe_plan(route: Route, size: ProbeSize, streams: int) -> CommPlan:
    """Return a plan with `size.rounds` units (all-reduces) on each stream, assigned round-robin."""
    transport, algorithm = route
    numel = size.unit_bytes // 4
    units = tuple(
        Unit(start=number * numel, stop=(number + 1) * numel, stream=number % streams, algorithm=algorithm)
        for number in range(streams * size.rounds)
    )
    return CommPlan(numel=len(units) * numel, units=units, streams=streams, transport=transport)


def _sounding_s(control: ControlPlane, router: Router, route: Route, buffer: FlatBuffer, unit_bytes: int) -> float:
    """Return the approximate seconds of one all-reduce of `unit_bytes` over open connections, on this rank. Collective.

    Raises:
        PlanError, TransportError: the route cannot be opened. Raised on all ranks.
    """
    plan = _probe_plan(route, ProbeSize(unit_bytes=unit_bytes, rounds=1), 1)
    router.open_plan(plan)
    seconds, _ = _probe_s(control, router, plan, buffer, is_first=True)
    return seconds / PASSES


def _probe_s(
    control: ControlPlane, router: Router, plan: CommPlan, buffer: FlatBuffer, *, is_first: bool
) -> tuple[float, float]:
    """Time `PASSES` consecutive passes of a plan. Return seconds and processors in use on this rank. Collective.

    If `is_first`, an untimed pass runs first. It opens connections, touches memory, grows congestion windows, and uses
    up the burst that traffic shapers grant to an idle connection. The timed passes follow without a barrier, because a
    pause would make the connection idle again.
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
    """Run all all-reduces (units) of `plan`, repeated `times` times, and wait until all are finished. Collective."""
    router.wait_for([work for _ in range(times) for work in router.all_reduce_plan(buffer, plan, scale=0.0)])


def fitted_links(probes: Mapping[Route, Sequence[LinkProbe]]) -> dict[Route, LinkModel]:
    """Return a model of latency and bandwidth for each route (transport and algorithm), fitted to measured times.

    Routes whose times fit no model are logged and left out.
    """
    # Import late, because the module imports scipy, which only rank 0 needs.
    from sirtaki.autotune.model.fits import fit_link

    links: dict[Route, LinkModel] = {}
    unfit: list[str] = []
    for route, measured in probes.items():
        name = f"{route[0].value} {route[1].value}"
        try:
            links[route] = link = fit_link(measured)
        except TuningError as err:
            unfit.append(name)
            logger.debug(
                "latency and bandwidth of %s cannot be calculated from the measured all-reduce times: %s",
                name,
                err,
            )
            continue
        curve = " ".join(f"{rate / 1e6:.4g}" for rate in link.throughput)
        logger.debug(
            "measured for all-reduces by the transport %s: latency %.3g ms, CPU time per all-reduce %.3g ms, bandwidth "
            "on 1, 2, … parallel streams %s MB/s",
            name,
            1e3 * link.alpha_s,
            1e3 * link.host_s,
            curve,
        )
    if unfit:
        logger.info(
            "latency and bandwidth of %s (transport and algorithm) cannot be calculated from the measured "
            "all-reduce times, which is usual on one host; tuning continues without these numbers",
            ", ".join(unfit),
        )
    return links


PROBE_S, SPANS, MOST_PROBING_S = 0.2, 3, 5.0
"""Time budget for measuring the network before a search: `PROBE_S` seconds plus `SPANS` times the communication time of
an iteration, at most `MOST_PROBING_S` seconds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of measuring the network before the first setting is tried.

    Attributes:
        space: settings that may be tried.
        promising: `space` without settings that are very slow by these measurements. The tuner uses it as long as
            trials confirm the planners' cost model.
        links: measurements of each route (transport and algorithm). Empty if planners are not used.
        threads: measurements with several numbers of GPU threads. Empty if the number makes no difference.
        host: processors that the ranks of this host share, for the planners' cost model.
        ranks: number of ranks of the job.
    """

    space: KnobSpace
    promising: KnobSpace
    links: Mapping[Route, Sequence[LinkProbe]] = field(default_factory=dict)
    threads: Sequence[ThreadProbe] = ()
    host: SharedHost | None = None
    ranks: int | None = None

    def with_routes(self, routes: Sequence[Route], *, promising: Sequence[Route]) -> Measured:
        """Return a copy in which all `routes` (transports and algorithms) may be tried.

        While trials confirm the planners' cost model, only those in `promising` are tried, because a route that was
        slow on an idle network costs too much time.
        """
        narrow = replace(self.promising, routes=tuple(route for route in routes if route in promising))
        return replace(self, space=replace(self.space, routes=tuple(routes)), promising=narrow)

    def model(
        self, layout: GradientLayout, ready_s: Sequence[float], backward_s: float, between_s: float
    ) -> PlanningModel | None:
        """Return the cost model with which planners predict times. None if no route's times fit one.

        Args:
            layout: gradients in the order in which they become ready.
            ready_s: time at which each gradient became ready, `(n_gradients,)`, in the order of `layout`, in seconds.
            backward_s: time at which the backward pass ended, on the same clock.
            between_s: seconds from the last reduced gradient of a step to the first ready gradient of the next step.
                NaN if unknown.
        """
        links = fitted_links(self.links)
        if not links or not all(map(math.isfinite, ready_s)):
            return None
        forward_s = max(0.0, between_s) if math.isfinite(between_s) else 0.0
        profile = Profile(ready_s=tuple(ready_s), compute_s=max(backward_s, *ready_s), forward_s=forward_s)
        alpha_s = next(iter(links.values())).alpha_s
        contention = contention_model(self.threads, alpha_s=alpha_s) if self.threads else None
        return PlanningModel(
            layout=layout, profile=profile, links=links, contention=contention, host=self.host, ranks=self.ranks
        )


def without_planners(space: KnobSpace) -> Measured:
    """Return a result without network measurements, for jobs without planners.

    The space leaves the algorithm and the number of GPU threads to NCCL, because without measurements it is unknown
    whether other choices are faster.
    """
    space = replace(space, threads=space.threads[:1], nccl=())
    return Measured(space=space, promising=space)


def measure(control: ControlPlane, router: Router, space: KnobSpace, *, default: Knobs, span_s: float) -> Measured:
    """Measure latency and bandwidth of the routes (transports and algorithms) in `space`. Collective.

    Args:
        control: control plane of the job.
        router: router that runs the measured all-reduces.
        space: settings that may be tried.
        default: untuned default. It is never removed from the space.
        span_s: communication time of an iteration, in seconds. The time budget of the measurements grows with it.
    """
    budget_s = min(PROBE_S + SPANS * span_s, MOST_PROBING_S)
    try:
        links = probe_routes(control, router, space.routes, max_streams=space.streams[-1], budget_s=budget_s)
        space = still_possible(space, router)
        threads = probe_threads(control, router, space.routes[0]) if len(space.threads) > 1 else []
        if space.nccl:
            largest_bytes = space.unit_bytes[1]
            # Do not time NCCL's algorithms on one node, because connections are not the bottleneck there.
            seconds = (
                {} if control.one_node else probe_ways(control, router, space.routes[0], largest_bytes=largest_bytes)
            )
            space = replace(space, nccl=promising_ways(space.nccl, seconds))
    except (PlanError, TransportError, TuningError) as err:
        # All ranks raise this error together, because plans and times are equal.
        logger.warning(
            "latency and bandwidth of the network could not be measured; tuning continues with fewer search "
            "methods: %s",
            err,
        )
        return without_planners(space)
    if not threads or not threads_matter(threads):
        threads, space = [], replace(space, threads=space.threads[:1])
    return Measured(
        space=space,
        promising=narrowed(space, links, default=default),
        links=links,
        threads=threads,
        host=_shared_host(control) if control.one_node and not router.device.streams else None,
        ranks=control.size,
    )


def _shared_host(control: ControlPlane) -> SharedHost:
    """Return the processors that the ranks of this host share. Collective."""
    by_rank: list[tuple[tuple[int, ...], float | None, int]] = control.all_gather(
        (allowed_processors(), cpu_quota(), torch.get_num_threads())
    )
    processors = float(len({number for allowed, _, _ in by_rank for number in allowed}))
    quotas = [processors if quota is None else quota for _, quota, _ in by_rank]
    return SharedHost(
        ranks=control.size, processors=min(processors, *quotas), threads=min(threads for _, _, threads in by_rank)
    )
