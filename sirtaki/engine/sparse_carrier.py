"""Which algorithm carries a job's sparse gradients: probes, frequent rows, the aggregator, and reports."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

import sirtaki
from sirtaki.aggregator import AggregatorClient, HeatLayout, Patience
from sirtaki.aggregator.client import AggregatedRows, Agreement
from sirtaki.aggregator.wire import Wire
from sirtaki.autotune.sparse import (
    LEARNING_ITERATIONS,
    HotPace,
    Pace,
    Seen,
    Shape,
    SparseChoice,
    SparseSummary,
    Stage,
    TouchCounts,
    VolumeModel,
    curve_points,
    learns_hot_rows,
    summarise,
)
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse.lanes import SparseLanes
from sirtaki.comm.sparse.plan import COLD_PATHS, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import Reduced, RowFormat, SparseTask, SparseWork, SparseWorker, coalesced
from sirtaki.errors import AggregatorError, ConfigError, PlanError, TransportError
from sirtaki.host_port import parse_address
from sirtaki.registry.entry import RowsKey, RowWay, Skew, nearest_way
from sirtaki.registry.safe_store import SafeStore
from sirtaki.registry.topology import Topology
from sirtaki.settings import REGISTRY_OFF

from .tuning.cache import Hardware, hosts_by_rank
from .tuning.plans import DEFAULT_STREAMS, fixed_knobs
from .tuning.trial_log import TrialLogWriter

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.settings import Settings


logger = logging.getLogger(__name__)

VARIABLE = "SIRTAKI_AGGREGATOR"

STEP_FLOATS = 1 << 19
"""Values that are summed at once; what is larger goes in several turns. Registers and buffers are as large."""


class HotRowAggregator:
    """A rank's side: see `HotSums`. Of one thread at a time, the same calls on all ranks.

    float32 tensors only are summed: an aggregator adds nothing else.
    """

    def __init__(
        self, control: ControlPlane, addresses: Sequence[str], *, stall_s: float, check: Callable[[], None]
    ) -> None:
        """Collective: see `joined`."""
        self._scope = control.scope()
        self._is_root = control.rank == 0
        self._addresses = ",".join(addresses)
        agreement = Agreement(self._scope.duplicate(), check=check)
        client = AggregatorClient(
            addresses,
            job=control.broadcast(secrets.token_hex(16)),
            rank=control.rank,
            ranks=control.size,
            layout=HeatLayout(rows=STEP_FLOATS, width=1),
            patience=Patience(stall_s=stall_s),
            check=agreement.check,
        )
        self._rows = AggregatedRows(client, agreement)
        self._closed = False

    @classmethod
    def joined(
        cls,
        control: ControlPlane,
        addresses: tuple[str, ...] | None,
        *,
        used: bool,
        stall_s: float,
        check: Callable[[], None],
    ) -> HotRowAggregator | None:
        """Collective: on all ranks once each of them has got a first sum, else None on all, of which rank 0 warns.

        Args:
            control: the ranks.
            addresses: what the variable names on this rank; rank 0's hold for all.
            used: hot rows may be sent there at all, the same on all ranks.
            stall_s: how long a rank waits for others that are late.
            check: called while this rank waits; what it raises ends the wait.
        """
        named = control.all_gather(addresses)
        is_root, common = control.rank == 0, named[0]
        odd = [f"rank {rank} has {_shown(other)}" for rank, other in enumerate(named) if other != common]
        if odd and is_root:
            logger.warning(
                "%s differs between ranks; rank 0's holds for all, %s: %s", VARIABLE, _shown(common), ", ".join(odd[:3])
            )
        if common is None:
            return None
        if not used:
            if is_root:
                logger.warning(
                    "%s has no effect: "
                    "it sums hot rows, which there are with SIRTAKI_SPARSE=hot_cold, or auto where jobs are tuned",
                    VARIABLE,
                )
            return None
        try:
            control.agree_on_success(_unknown_host(common))
            return cls._with_a_first_sum(control, common, stall_s=stall_s, check=check)
        except (TransportError, AggregatorError) as err:
            if is_root:
                logger.warning("%s=%s is not used, ranks sum all rows themselves: %s", VARIABLE, ",".join(common), err)
            return None

    @classmethod
    def _with_a_first_sum(
        cls, control: ControlPlane, addresses: Sequence[str], *, stall_s: float, check: Callable[[], None]
    ) -> HotRowAggregator:
        joined = cls(control, addresses, stall_s=stall_s, check=check)
        try:
            joined._rows.sum_rows(torch.ones(1, 1))
        except BaseException:  # the job may be lost, too
            joined.close()
            raise
        if joined._is_root:
            logger.info("hot rows of sparse gradients may be summed by the aggregator at %s", ",".join(addresses))
        return joined

    @property
    def is_open(self) -> bool:
        """See `HotSums`."""
        return self._rows.is_open

    def sum(self, values: torch.Tensor) -> torch.Tensor | None:
        """See `HotSums`; rank 0 warns when it is lost."""
        if values.dtype is not torch.float32 or not self.is_open:
            return None
        try:
            parts = [self._rows.sum_rows(part[:, None]) for part in torch.split(values, STEP_FLOATS)]
        except AggregatorError as err:
            if self._is_root:
                logger.warning(
                    "the aggregator at %s is lost, ranks sum all rows themselves from this step on: %s",
                    self._addresses,
                    err,
                )
            return None
        return torch.cat(parts)[:, 0]

    def close(self) -> None:
        """See `HotSums`; again is harmless."""
        if not self._closed:
            self._closed = True
            self._rows.close()
            self._scope.release(lambda: None)


def _shown(addresses: tuple[str, ...] | None) -> str:
    return "nothing" if addresses is None else ",".join(addresses)


def _unknown_host(addresses: Sequence[str]) -> str:
    """What is wrong with one of these on this host; empty = nothing. Whether anybody listens there is not asked."""
    with contextlib.ExitStack() as wires:
        try:
            for address in addresses:
                wires.callback(Wire.connected(parse_address(address)).close)
        except ConfigError as err:
            return str(err)
    return ""


KIB = 1024
PAIR_BYTES = 256 * KIB
"""What goes from each rank to each other in a large exchange; a large all-reduce carries as much for all of them."""

SMALL_BYTES = 64
OTHER_STREAMS = (8, 2, 1)
"""Tried after those in use, which the budget always covers."""

REPEATS = 3
BUDGET_S = 1.0
"""After so long no more streams are tried."""

ADDED_ROWS, ADDED_WIDTH = 8192, 64
CLEARLY = 0.9
"""Another number of streams is used only where it takes at most so much of the time."""


@dataclass(frozen=True, slots=True)
class _Times:
    small_s: float
    large_s: float

    def rate(self, n_bytes: float) -> float:
        """Bytes a second beyond the start."""
        return n_bytes / max(self.large_s - self.small_s, 1e-7)


def measure(control: ControlPlane, lanes: SparseLanes, *, streams: int | None) -> Pace:
    """Collective, with nothing under way: probes, and has the lanes use the numbers of streams that were fastest.

    Args:
        control: the ranks.
        lanes: between them.
        streams: the only number that may be used; None = any.
    """
    begin_s = time.perf_counter()
    exchanges: dict[int, _Times] = {}
    reductions: dict[int, _Times] = {}
    in_use = (lanes.exchange_streams, lanes.reduce_streams)
    for count in dict.fromkeys([streams] if streams else [*in_use, *OTHER_STREAMS]):
        count = min(count, lanes.open_streams(count))
        if count in exchanges:
            continue
        lanes.exchange_streams = lanes.reduce_streams = count
        exchanges[count] = _measure(control, lambda size: _exchange(lanes, size))
        reductions[count] = _measure(control, lambda size: _all_reduce(lanes, size))
        late = float(control.maximum(np.array([time.perf_counter() - begin_s]))[0]) > BUDGET_S
        if late and all(usual in exchanges for usual in in_use):
            break
    lanes.exchange_streams = _fastest(exchanges, usual=in_use[0])
    lanes.reduce_streams = _fastest(reductions, usual=in_use[1])
    exchange, reduction = exchanges[lanes.exchange_streams], reductions[lanes.reduce_streams]
    return Pace(
        exchange_s=exchange.small_s,
        exchange_bytes_per_s=exchange.rate(PAIR_BYTES * (lanes.size - 1)),
        reduce_s=reduction.small_s,
        reduce_bytes_per_s=reduction.rate(PAIR_BYTES * lanes.size),
        add_bytes_per_s=_adding(control),
        aggregator=_aggregating(control, lanes),
    )


def _aggregating(control: ControlPlane, lanes: SparseLanes) -> HotPace | None:
    """Collective: None where there is no aggregator, or where it is lost meanwhile."""
    hot = lanes.hot_sums
    if hot is None or not hot.is_open:
        return None
    times = _measure(control, lambda size: lanes.sum_hot_(torch.zeros(size * lanes.size // 4)))
    return HotPace(start_s=times.small_s, bytes_per_s=times.rate(PAIR_BYTES * lanes.size)) if hot.is_open else None


def _fastest(times: dict[int, _Times], *, usual: int) -> int:
    """The usual number of streams unless another is clearly faster: one probe in a noisy moment proves little."""
    best = min(times, key=lambda count: times[count].large_s)
    if usual in times and times[best].large_s >= CLEARLY * times[usual].large_s:
        return usual
    return best


def _measure(control: ControlPlane, act: Callable[[int], None]) -> _Times:
    """Collective: of the slowest rank, each at its best."""
    act(PAIR_BYTES)  # memory that is touched for the first time, and windows that open
    times = [min(_timed(control, act, size) for _ in range(REPEATS)) for size in (SMALL_BYTES, PAIR_BYTES)]
    small_s, large_s = control.maximum(np.array(times)).tolist()
    return _Times(small_s, large_s)


def _timed(control: ControlPlane, act: Callable[[int], None], size: int) -> float:
    control.barrier()
    begin_s = time.perf_counter()
    act(size)
    return time.perf_counter() - begin_s


def _exchange(lanes: SparseLanes, size: int) -> None:
    parcels = [torch.zeros(size, dtype=torch.uint8) for _ in range(lanes.size)]
    lanes.exchange(parcels, [[size] * lanes.size] * lanes.size)


def _all_reduce(lanes: SparseLanes, size: int) -> None:
    lanes.all_reduce_(torch.zeros(size * lanes.size // 4))


def _adding(control: ControlPlane) -> float:
    """Collective: bytes of rows that a rank adds up in a second, while the others do so, too."""
    total = torch.zeros(ADDED_ROWS, ADDED_WIDTH)
    places = torch.arange(ADDED_ROWS)

    def tries() -> Iterator[float]:
        for _ in range(REPEATS):
            begin_s = time.perf_counter()
            torch.zeros_like(total).index_add_(0, torch.unique(places, return_inverse=True)[1], total)
            yield time.perf_counter() - begin_s

    slowest_s = float(control.maximum(np.array([min(tries())]))[0])
    return total.numel() * total.itemsize / slowest_s


OF_ROWS = ("streams", "transport")
"""Knobs that hold for rows, too, where the user has fixed them."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a job knows of one parameter before it has tried anything.

    Attributes:
        form: of its rows.
        counts: who touches which.
    """

    form: RowFormat
    counts: TouchCounts


class SparseMemory:
    """Of the sparse gradients of one reducer."""

    def __init__(self, control: ControlPlane, settings: Settings) -> None:
        """Asks nobody."""
        self._control, self._settings = control, settings
        self._topology, self._aggregator = "", False
        self._store: SafeStore | None = None

    def recall(self, learned: Mapping[str, Learned], *, aggregator: bool = False) -> dict[str, SparsePlan]:
        """Collective: the plans that were kept where rows were touched like these, by name; the same on all ranks.

        `aggregator`: one is there that sums hot rows of float32.
        """
        if not learned:
            return {}
        self._aggregator = aggregator
        if not self._topology:
            self._topology = self._look_around()
        found = {name: self._find(name, one) for name, one in learned.items()} if self._control.rank == 0 else {}
        plans: dict[str, SparsePlan | None] = self._control.broadcast(found)
        return {name: plan for name, plan in plans.items() if plan is not None}

    def _look_around(self) -> str:
        """Collective: the fingerprint of the ranks' places."""
        hosts = hosts_by_rank(self._control, self._settings)
        kinds = self._control.all_gather(Hardware.here(torch.device("cpu")))
        return Topology.from_ranks(
            hosts,
            devices=[kind.device for kind in kinds],
            host_kinds={name: kind.host for name, kind in zip(hosts, kinds, strict=True)},
        ).fingerprint()

    def _find(self, name: str, learned: Learned) -> SparsePlan | None:
        if self._settings.registry == REGISTRY_OFF:
            return None
        try:
            key, skew = self._key(learned.form), skew_of(learned.counts)
            nothing: list[RowWay] = []
            found = self._opened().attempt(lambda store: store.row_ways(key), nothing)
            way = nearest_way(found, skew, name=name)
            plan = None if way is None else plan_of(way, learned.counts)
        except Exception:  # whatever others have stored, training goes on
            logger.warning("what earlier jobs have found of rows of %s is left alone", name, exc_info=True)
            return None
        if way is not None and plan is not None:
            logger.info(
                "rows of %s are touched like those of %s in an earlier job, which went by %s",
                name,
                way.name,
                plan.describe(),
            )
        return plan

    def keep(self, name: str, form: RowFormat, choice: SparseChoice) -> None:
        """Not collective: the way that is kept is remembered, by rank 0; nothing before the first `recall`."""
        learned = choice.learned
        off = not self._topology or self._settings.registry == REGISTRY_OFF
        if self._control.rank != 0 or off or learned is None:
            return
        plan = choice.plan
        try:
            way = RowWay(
                key=self._key(form),
                name=name,
                skew=skew_of(learned),
                path=plan.path.value,
                cold=plan.cold.value,
                block_rows=plan.block_rows,
                n_hot=len(plan.hot_rows),
                aggregated=plan.aggregated,
                span_s=min(choice.measured_s, default=0.0),
                created_s=time.time(),
            )
            self._opened().attempt(lambda store: store.save_row_way(way), False)
        except Exception:  # as above
            logger.warning("the way of rows of %s is not remembered", name, exc_info=True)

    def _key(self, form: RowFormat) -> RowsKey:
        return RowsKey(
            topology=self._topology,
            ranks=self._control.size,
            n_rows=form.n_rows,
            row_bytes=form.row_bytes,
            dtype=str(form.dtype).removeprefix("torch."),
            aggregator=self._aggregator and form.dtype is torch.float32,
            versions={"sirtaki": sirtaki.__version__},
            fixed={name: value for name, value in fixed_knobs(self._settings).items() if name in OF_ROWS},
        )

    def _opened(self) -> SafeStore:
        if self._store is None:  # once: a server that cannot be reached takes seconds each time
            self._store = SafeStore(self._settings.registry)
        return self._store

    def close(self) -> None:
        """Lets go of the registry. Idempotent."""
        if self._store is not None:
            self._store.close()
            self._store = None


def skew_of(counts: TouchCounts) -> Skew:
    """How skewed touches are that were counted.

    Raises:
        RegistryError: there are none.
    """
    return Skew(touched=counts.touched, union=counts.union, curve=curve_points(counts))


def plan_of(way: RowWay, counts: TouchCounts) -> SparsePlan | None:
    """A remembered way for these rows, with as many hot ones as then; None where it is none that is known here."""
    try:
        path, cold = SparsePath(way.path), SparsePath(way.cold)
        hot = counts.ranked()[: way.n_hot] if path is SparsePath.HOT_COLD else np.zeros(0, dtype=np.int64)
        return SparsePlan(
            path=path,
            hot_rows=tuple(np.sort(hot).tolist()),
            aggregated=way.aggregated,
            cold=cold if path is SparsePath.HOT_COLD else COLD_PATHS[0],
            block_rows=way.block_rows if path is SparsePath.BLOCKS else 1,
        )
    except (ValueError, PlanError) as err:
        logger.info("the way %s of %s in the registry cannot be taken here: %s", way.path, way.name, err)
        return None


def shape_of(form: RowFormat) -> Shape:
    """A format of rows as the tuner knows it."""
    return Shape(
        n_rows=form.n_rows,
        row_bytes=form.row_bytes,
        item_bytes=form.dtype.itemsize,
        index_bytes=form.index_dtype.itemsize,
    )


@dataclass(slots=True)
class _Tally:
    """What one parameter's first iterations have shown, or those since rows were touched otherwise.

    Attributes:
        looked_up: rows in this rank's gradients, all iterations together.
        counts: how many rows were touched.
        n: iterations in which any were.
        mean: `looked_up` in an iteration, mean over the ranks; None until they have said it.
        told: which way is taken then.
    """

    looked_up: int = 0
    counts: TouchCounts = field(default_factory=TouchCounts)
    n: int = 0
    mean: float | None = None
    told: bool = False


class SparseTelling:
    """Of the sparse gradients of one reducer.

    Attributes:
        summaries: by name; of those whose way is decided, the same on all ranks.
    """

    def __init__(self, control: ControlPlane, *, trial_log: str | None) -> None:
        """`trial_log`: where rank 0 writes; None = nowhere."""
        self._control = control
        self._log = TrialLogWriter(trial_log if control.rank == 0 else None)
        self._tallies: dict[str, _Tally] = {}
        self._iterations = 0
        self.summaries: dict[str, SparseSummary] = {}

    def begin(self, name: str) -> None:
        """Nothing is known of this parameter."""
        self._tallies[name] = _Tally()
        self.summaries.pop(name, None)

    def tell_again(self, name: str) -> None:
        """Its way is another one, though nothing else has changed: it is told once more."""
        self._tallies[name].told = False

    def look_up(self, name: str, n: int) -> None:
        """This rank's gradient has `n` rows, the same one several times."""
        tally = self._tallies[name]
        if tally.n < LEARNING_ITERATIONS:
            tally.looked_up += n

    def note(self, name: str, seen: Seen, choice: SparseChoice) -> None:
        """An iteration is over, and the choice knows of it."""
        tally = self._tallies[name]
        if tally.told and choice.stage is Stage.LEARN:
            tally = self._tallies[name] = _Tally()
        elif tally.n < LEARNING_ITERATIONS and seen.n_touched:
            tally.counts.note_totals(seen.n_touched, seen.n_touched / self._control.size, seen.union)
            tally.n += 1

    def end_iteration(self, choices: Mapping[str, SparseChoice], forms: Mapping[str, RowFormat]) -> None:
        """Collective once a parameter's first iterations are over, which all ranks see alike."""
        self._iterations += 1
        tallies = {name: self._tallies[name] for name in choices}
        if due := [tally for tally in tallies.values() if tally.mean is None and tally.n == LEARNING_ITERATIONS]:
            self._agree(due)
        for name, tally in tallies.items():
            choice = choices[name]
            if tally.mean is not None and choice.stage is Stage.KEEP and not tally.told:
                tally.told = True
                self.summaries[name] = summary = summarise(
                    choice,
                    shape_of(forms[name]),
                    name=name,
                    width=forms[name].width,
                    ranks=self._control.size,
                    looked_up=tally.mean,
                    counts=tally.counts,
                )
                self._log.sparse(summary, iteration=self._iterations)

    def _agree(self, tallies: Iterable[_Tally]) -> None:
        """Collective."""
        due = list(tallies)
        totals = self._control.total(np.array([float(tally.looked_up) for tally in due])).tolist()
        for tally, total in zip(due, totals, strict=True):
            tally.mean = total / (LEARNING_ITERATIONS * self._control.size)

    def close(self) -> None:
        """Closes the log."""
        self._log.close()


HOST_KINDS = (TransportKind.SHARED_MEMORY, TransportKind.GLOO, TransportKind.MPI)


@dataclass(frozen=True, slots=True, eq=False)
class _Means:
    """What there is once rows have to travel: opened and closed together.

    Attributes:
        lanes: between the ranks.
        streams: the only number of them that may be used; None = any.
        worker: the thread that uses them.
        telling: of how rows travel.
    """

    lanes: SparseLanes
    streams: int | None
    worker: SparseWorker
    telling: SparseTelling

    def close(self) -> None:
        """Not collective, once: ends all threads."""
        self.worker.close()
        self.telling.close()


class SparseCarrier:
    """Adds up sparse gradients over the ranks; opened once there are any.

    Attributes:
        plans: of the next iteration, by name.
    """

    def __init__(self, control: ControlPlane, settings: Settings, *, prefix: str = "") -> None:
        """Starts nothing; `prefix`: of operations' names in recordings."""
        self._control, self._settings, self._prefix = control, settings, prefix
        self._means: _Means | None = None
        self._memory = SparseMemory(control, settings)
        self._closed = False
        self._order: list[str] = []
        self._forms: dict[str, RowFormat] = {}
        self._choices: dict[str, SparseChoice] = {}
        self._spans_s: dict[str, list[float]] = {}
        self._fixed: SparsePath | None = None
        self._tries = False

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        """Collective, between iterations: rows of these parameters come from now on, of all in each iteration."""
        if params and self._means is None and self._control.size > 1:
            self._means = self._open()
        # The backward pass brings them about the other way round.
        self._order = list(params)[::-1]
        for name, param in params.items():
            form = RowFormat(param.shape[0], param[:1].numel(), param.dtype)
            if self._forms.get(name) != form:
                self._forms[name] = form
                self._choices[name] = SparseChoice(fixed=self._fixed, tries=self._tries)
                self._spans_s[name] = []
                if self._means is not None:
                    self._means.telling.begin(name)
        if self._means is not None:
            self._means.worker.begin(self._order)

    def _open(self) -> _Means:
        settings = self._settings
        self._fixed, self._tries, kind, streams = self._control.broadcast(
            (
                settings.sparse,
                settings.tune and settings.warmup_iterations > 0,
                settings.transport if settings.transport in HOST_KINDS else None,
                settings.streams,
            )
        )
        if kind is TransportKind.SHARED_MEMORY and not self._control.one_node:
            kind = None  # which is for within the nodes
        lanes = SparseLanes(
            self._control, timeout_s=settings.transport_timeout_s, kind=kind, streams=streams or DEFAULT_STREAMS
        )
        with contextlib.ExitStack() as unless_joined:
            unless_joined.callback(lanes.close)
            lanes.hot_sums = HotRowAggregator.joined(
                self._control,
                settings.aggregator,
                used=learns_hot_rows(self._fixed, tries=self._tries),
                stall_s=settings.transport_timeout_s,
                check=lanes.check,
            )
            unless_joined.pop_all()
        return _Means(
            lanes,
            streams,
            SparseWorker(lanes, self._control.failures, prefix=self._prefix),
            SparseTelling(self._control, trial_log=settings.trial_log if self._tries else None),
        )

    @property
    def plans(self) -> dict[str, SparsePlan]:
        """See above."""
        return {name: self._choices[name].plan for name in self._order}

    @property
    def summaries(self) -> list[SparseSummary]:
        """How the gradients travel whose way is decided, in the order in which they leave; the same on all ranks."""
        told = {} if self._means is None else self._means.telling.summaries
        return [told[name] for name in self._order if name in told]

    def start(self, name: str, gradient: torch.Tensor) -> SparseWork:
        """The rows of a parameter on this rank are complete: a sparse COO tensor, which may be written afterwards."""
        rows, means = coalesced(gradient.cpu()), self._means
        if means is None:
            work = SparseWork()
            work.reduced = Reduced(rows, len(rows))
            work.finish()
            return work
        means.telling.look_up(name, gradient._nnz())
        form = replace(self._forms[name], dtype=rows.values.dtype)  # which may have changed since
        return means.worker.submit(SparseTask(name, rows, form, self._choices[name].plan))

    def check(self) -> None:
        """Raises the failure of the job, if there is one, and does what this rank owes to others while it waits."""
        self._control.failures.check()

    # ── between iterations ───────────────────────────────────────────────────────────────────────────────────────

    def end_iteration(self, works: Mapping[str, SparseWork]) -> None:
        """Collective where something is decided: all reductions of an iteration are done."""
        if (means := self._means) is None or not works:
            return
        before = self.plans
        for name in self._order:
            self._note(means, name, works[name])
        self._notice_a_lost_aggregator(means)
        self._decide(means)
        means.telling.end_iteration({name: self._choices[name] for name in self._order}, self._forms)
        means.lanes.grow()
        after = self.plans
        if changed := [name for name in self._order if after[name] != before[name]]:
            stages = [self._choices[name].stage for name in changed]
            if any(stage is not Stage.TRY for stage in stages):
                fingerprints = " ".join(after[name].fingerprint() for name in self._order)
                self._control.require_equal(fingerprints, "the way of sparse gradients")
        means.worker.begin(self._order)

    def _note(self, means: _Means, name: str, work: SparseWork) -> None:
        choice, reduced = self._choices[name], work.reduced
        if choice.stage is Stage.TRY:
            self._spans_s[name].append(work.span_s)
        learns = choice.stage is Stage.LEARN
        seen = Seen(
            reduced.n_touched,
            reduced.n_hot,
            len(reduced.rows),
            [indices.numpy() for indices in reduced.by_rank] if learns else (),
        )
        choice.note(seen)
        means.telling.note(name, seen, choice)

    def _notice_a_lost_aggregator(self, means: _Means) -> None:
        """It is lost for all ranks in the same iteration, or for none."""
        lanes = means.lanes
        if lanes.hot_sums is not None and not lanes.hot_sums.is_open:
            lanes.hot_sums.close()
            lanes.hot_sums = None
            for name, choice in self._choices.items():
                before = choice.plan
                choice.lose_aggregator()
                if choice.stage is Stage.KEEP and choice.plan != before:
                    means.telling.tell_again(name)

    def _decide(self, means: _Means) -> None:
        """Collective if some parameter has learned or tried enough, which all ranks see alike."""
        choices = [(name, self._choices[name]) for name in self._order]
        if tried := [(name, choice) for name, choice in choices if choice.has_tried]:
            self._settle(tried)
        if learned := {name: choice for name, choice in choices if choice.has_learned}:
            for name in learned:
                self._spans_s[name] = []
            asked = {name: choice for name, choice in learned.items() if choice.may_recall}
            recalled = self._memory.recall(
                {name: Learned(self._forms[name], choice.counts) for name, choice in asked.items()},
                aggregator=means.lanes.hot_sums is not None,
            )
            for name, plan in recalled.items():
                learned.pop(name).recall(plan)
            self._choose(means, learned)

    def _choose(self, means: _Means, learned: Mapping[str, SparseChoice]) -> None:
        """Collective where there are any: what each way would take follows from probes."""
        if learned:
            pace = measure(self._control, means.lanes, streams=means.streams)
            for name, choice in learned.items():
                choice.choose(partial(self._model, self._forms[name], pace))
                if choice.stage is Stage.KEEP:
                    self._memory.keep(name, self._forms[name], choice)
                    if self._control.rank == 0:
                        logger.info("sparse gradients of %s go by %s", name, choice.plan.describe())

    def _model(self, form: RowFormat, pace: Pace, counts: TouchCounts) -> VolumeModel:
        if form.dtype is not torch.float32:
            pace = replace(pace, aggregator=None)  # which adds nothing else
        return VolumeModel(shape_of(form), self._control.size, counts, pace)

    def _settle(self, tried: Sequence[tuple[str, SparseChoice]]) -> None:
        """Collective: the rank that comes last to a reduction has not waited for others, so the least time counts."""
        mine = np.array([span_s for name, _ in tried for span_s in self._spans_s[name]])
        least = self._control.minimum(mine).tolist()
        for name, choice in tried:
            count = len(self._spans_s[name])
            checked = choice.checks
            choice.settle(least[:count])
            least = least[count:]
            if choice.stage is Stage.KEEP and not checked:
                self._memory.keep(name, self._forms[name], choice)
            if self._control.rank == 0:
                self._say(name, choice)

    @staticmethod
    def _say(name: str, choice: SparseChoice) -> None:
        if choice.stage is not Stage.KEEP:
            logger.info("gathering rows of %s is clearly faster than %s", name, choice.candidates[0].describe())
            return
        others = ", ".join(plan.describe() for plan in choice.candidates if plan != choice.plan)
        logger.info("sparse gradients of %s go by %s; tried: %s", name, choice.plan.describe(), others)

    def close(self) -> None:
        """Not collective: ends all threads. Idempotent."""
        if not self._closed:
            self._closed = True
            self._memory.close()
            if self._means is not None:
                self._means.close()
