"""Reduce the sparse gradients of one optimizer: sum the rows of all ranks, by an algorithm (`SparsePlan`) per
parameter.

The fastest algorithm for a parameter is chosen from the rows that have gradients in the first iterations, from timed
collectives (probes), and from results of earlier jobs (the registry). Once all ranks agree which parameters have sparse
gradients, these gradients are no longer copied to the flat buffers of dense gradients.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

import sirtaki
from sirtaki.autotune.sparse import (
    LEARNING_ITERATIONS,
    CollectiveCosts,
    SparseSummary,
    TouchCounts,
    VolumeModel,
    curve_points,
    summarise,
)
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import wait_for_work
from sirtaki.comm.device import HOST, CudaDevice, cuda_device
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.edits import REMEDY
from sirtaki.comm.gradients.negotiation import Interrupted
from sirtaki.comm.nccl_streams.transport import find_nccl
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse.on_gpu import GPU_PATHS, GpuRows, GpuWork
from sirtaki.comm.sparse.plan import COLD_PATHS, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import RowFormat, SparseLanes, SparseWork, SparseWorker, coalesced
from sirtaki.comm.transports.contract import scale_
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.errors import ConfigError
from sirtaki.registry.schema import RowsKey, RowsRecord, Skew

from .rows_target import RowsTarget
from .tuning.cache import cluster_fingerprint
from .tuning.controller import TuningController
from .tuning.memory import SettingsMemory
from .tuning.plans import DEFAULT_STREAMS, fixed_knobs
from .tuning.trial_log import TrialLogWriter

logger = logging.getLogger(__name__)


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PAIR_BYTES = 256 * 1024
"""Size of the large timed collectives: bytes that each rank sends to each peer in the timed all-to-all exchange.

The large timed all-reduce has `PAIR_BYTES` times the number of ranks.
"""

SMALL_BYTES = 64
OTHER_STREAMS = (8, 2, 1)
"""Alternative numbers of streams (parallel connections), in the order in which collectives are timed with them.

Collectives are first timed with the current number.
"""

REPEATS = 3
BUDGET_S = 1.0
"""Time limit of `measure` in seconds. After this time, no further number of streams (parallel connections) is timed."""

ADDED_ROWS, ADDED_WIDTH = 8192, 64
CLEARLY = 0.9
"""Another number of streams (parallel connections) replaces the current one only if collectives take less than this
fraction of the time with the current one.
"""


class Times(NamedTuple):
    """Durations of the same collective with little and with much data, from which the bandwidth is computed."""

    small_s: float
    large_s: float

    def rate(self, n_bytes: float) -> float:
        """Return the bandwidth in bytes per second. The duration of the small collective, as latency, is subtracted.

        Args:
            n_bytes: size of the large collective in bytes.
        """
        return n_bytes / max(self.large_s - self.small_s, 1e-7)


def measure(control: ControlPlane, lanes: SparseLanes, *, streams: int | None) -> CollectiveCosts:
    """Time collectives over `lanes`, and make `lanes` use the fastest number of streams (parallel connections).
    Collective.

    No reduction may be in progress over `lanes`.

    Args:
        control: control plane of the job.
        lanes: connections that carry sparse gradients.
        streams: number of streams (parallel connections) that the user has fixed. None if the fastest number may be
            chosen.
    """

    def timed(act: Callable[[int], None]) -> Times:
        def once(size: int) -> float:
            control.barrier()
            begin_s = time.perf_counter()
            act(size)
            return time.perf_counter() - begin_s

        act(PAIR_BYTES)  # not timed, because the first call touches new memory, and TCP's congestion windows still grow
        times = [min(once(size) for _ in range(REPEATS)) for size in (SMALL_BYTES, PAIR_BYTES)]
        return Times(*control.maximum(np.array(times)).tolist())

    def exchange(size: int) -> None:
        lanes.exchange(
            [torch.zeros(size, dtype=torch.uint8, device="cpu")] * lanes.size, [[size] * lanes.size] * lanes.size
        )

    total = torch.zeros(ADDED_ROWS, ADDED_WIDTH, dtype=torch.float32, device="cpu")
    places = torch.arange(ADDED_ROWS, device="cpu")

    def add(_: int) -> None:
        torch.zeros_like(total).index_add_(0, torch.unique(places, return_inverse=True)[1], total)

    def reduce(size: int) -> None:
        lanes.all_reduce_(torch.zeros(size * lanes.size // 4, dtype=torch.float32, device="cpu"))

    begin_s = time.perf_counter()
    exchanges: dict[int, Times] = {}
    reductions: dict[int, Times] = {}
    in_use = (lanes.exchange_streams, lanes.reduce_streams)
    for count in dict.fromkeys([streams] if streams else [*in_use, *OTHER_STREAMS]):
        count = min(count, lanes.open_streams(count))
        if count in exchanges:
            continue
        lanes.exchange_streams = lanes.reduce_streams = count
        exchanges[count] = timed(exchange)
        reductions[count] = timed(reduce)
        late = float(control.maximum(np.array([time.perf_counter() - begin_s]))[0]) > BUDGET_S
        if late and all(usual in exchanges for usual in in_use):
            break
    lanes.exchange_streams = fastest(exchanges, usual=in_use[0])
    lanes.reduce_streams = fastest(reductions, usual=in_use[1])
    one, other = exchanges[lanes.exchange_streams], reductions[lanes.reduce_streams]
    return CollectiveCosts(
        exchange_s=one.small_s,
        exchange_bytes_per_s=one.rate(PAIR_BYTES * (lanes.size - 1)),
        reduce_s=other.small_s,
        reduce_bytes_per_s=other.rate(PAIR_BYTES * lanes.size),
        add_bytes_per_s=total.numel() * total.itemsize / timed(add).small_s,
    )


def fastest(times: Mapping[int, Times], *, usual: int) -> int:
    """Return the number of streams (parallel connections) with the shortest time.

    Return the current number, `usual`, unless the shortest time is clearly shorter, because single times are noisy.
    """
    best = min(times, key=lambda count: times[count].large_s)
    return usual if usual in times and times[best].large_s >= CLEARLY * times[usual].large_s else best


# ── the registry ─────────────────────────────────────────────────────────────────────────────────────────────────────

OF_ROWS = ("streams", "transport")
"""Names of the settings of dense gradients whose values, if the user has fixed them, also apply to sparse gradients."""


def skew_of(counts: TouchCounts) -> Skew:
    """Return how unevenly the counted accesses are distributed over the rows of a parameter.

    Raises:
        RegistryError: no access to a row was counted.
    """
    return Skew(touched=counts.touched, union=counts.union, curve=curve_points(counts))


def plan_of(record: RowsRecord, counts: TouchCounts) -> SparsePlan:
    """Return a reduction algorithm for the counted rows: the one of an earlier job's result (`record`), with its number
    of frequent rows.
    """
    is_hot = record.path is SparsePath.HOT_COLD
    return SparsePlan(
        path=record.path,
        hot_rows=tuple(np.sort(counts.ranked()[: record.n_hot]).tolist()) if is_hot else (),
        cold=record.cold if is_hot else COLD_PATHS[0],
        block_rows=record.block_rows if record.path is SparsePath.BLOCKS else 1,
    )


# ── reduction ────────────────────────────────────────────────────────────────────────────────────────────────────────

HOST_KINDS = (TransportKind.SHARED_MEMORY, TransportKind.GLOO, TransportKind.MPI)


class _Running(NamedTuple):
    """A sparse gradient that is being reduced.

    Attributes:
        work: handle to wait for the reduction in progress. On a GPU, the reduction may not be launched yet.
        gradient: local gradient, as computed by autograd.
        version: PyTorch's version counter of `gradient` when it became ready, to detect later changes. None if
            `gradient` replaces a missing one.
    """

    work: SparseWork | GpuWork
    gradient: torch.Tensor
    version: int | None


class SparseReductions:
    """Reduces the sparse gradients of one optimizer over several ranks.

    Each parameter's algorithm (`SparsePlan`) is equal on all ranks, because it is computed from values that all ranks
    have. It changes only between iterations.

    On a GPU, NCCL reduces the gradients (`GpuRows`), by the algorithm in whose messages ranks receive fewer bytes. If
    NCCL cannot be used, or the user has fixed an algorithm that runs on the host only, rows are copied to the host.

    Attributes:
        place: device of the parameters.
        device: GPU on which NCCL reduces the gradients; `HOST` if they are reduced on the host.
        gpu: object that reduces the gradients over NCCL; None if they are reduced on the host.
    """

    def __init__(
        self,
        control: ControlPlane,
        settings: Settings,
        reduction: Reduction,
        place: torch.device,
        *,
        prefix: str = "",
    ) -> None:
        """Open the connections (lanes) for sparse gradients. Collective.

        Args:
            control: control plane (channel for all messages except gradients) of the participating ranks.
            settings: settings of the job, which may fix the transport and the number of streams.
            reduction: factors by which gradients are multiplied before and after they are summed.
            place: device of the parameters.
            prefix: prefix of the names of sparse reductions in profiles and traces.
        """
        self._control, self._settings = control, settings
        self._factor = reduction.prescale * reduction.postscale
        self._memory = SettingsMemory(settings.registry if control.rank == 0 else REGISTRY_OFF)
        self._topology = ""
        self._controller = TuningController(control)
        self._params: Mapping[str, torch.Tensor] = {}
        self._targets: dict[str, RowsTarget] = {}
        self._order: list[str] = []
        self._iterations = 0
        self._running: dict[str, _Running] = {}
        self._earlier: dict[str, GpuWork] = {}  # reductions of the previous iteration, which a GPU may still execute
        self._complete = self._warned = self._closed = False
        self._fixed: SparsePath | None
        self._tries: bool
        self._streams: int | None  # number of parallel connections that the user has fixed; None if the tuner chooses
        self._fixed, self._tries, transport, self._streams = control.broadcast(
            (settings.sparse, settings.tunes, settings.transport, settings.streams)
        )
        self.place, self.device, timeout_s = place, HOST, settings.transport_timeout_s
        is_cuda = place.type == "cuda"
        gpu = cuda_device(torch.cuda.current_device() if place.index is None else place.index) if is_cuda else HOST
        self._enter_thread = gpu.enter_thread
        opener = None
        if self._may_use_nccl(transport):
            assert isinstance(gpu, CudaDevice)
            forced = transport is TransportKind.NCCL
            opener = find_nccl(control, gpu, forced=forced, timeout_s=timeout_s, user="rows of sparse gradients")
        kind = transport if transport in HOST_KINDS else None
        if kind is TransportKind.SHARED_MEMORY and not control.one_node:
            kind = None  # None = choose any transport, because shared memory does not connect different nodes
        streams = 1 if opener is not None else self._streams or DEFAULT_STREAMS
        lanes = SparseLanes(control, timeout_s=timeout_s, kind=kind, streams=streams)
        self._log = TrialLogWriter(settings.trial_log if self._tries and control.rank == 0 else None)
        self._worker = SparseWorker(lanes, control.failures, prefix=prefix)
        self.gpu: GpuRows | None = None
        if opener is not None:
            self.device = gpu
            self.gpu = GpuRows(control, gpu, opener, self._worker, timeout_s=timeout_s)

    def _may_use_nccl(self, transport: TransportKind | None) -> bool:
        """Return whether the user's settings let NCCL reduce the gradients, and these are on GPUs. Collective."""
        if not self._control.minimum(np.array([float(self.place.type == "cuda")]))[0]:
            return False
        if self._fixed in (None, *GPU_PATHS):
            return transport is not TransportKind.STAGED
        if self._control.rank == 0:
            logger.warning(
                "SIRTAKI_SPARSE=%s sums the rows of sparse gradients on the host, for which the host waits for the GPU "
                "in each step; auto, gather and dense use NCCL",
                self._fixed.value,
            )
        return False

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters whose sparse gradients this object reduces, by name. Call on all ranks, between
        iterations.
        """
        # Reversed, because gradients usually become ready in reverse order.
        self._params, self._order = params, list(params)[::-1]
        for name, param in params.items():
            form = RowFormat(param.shape[0], param[:1].numel(), param.dtype)
            if name not in self._targets or self._targets[name].form != form:
                if name in self._targets:
                    self._controller.abandon(self._targets[name])
                tries = self._tries and self.gpu is None
                if tries:
                    self._memory.load_ahead()
                self._targets[name] = RowsTarget(name, form, self._control, fixed=self._fixed, tries=tries)
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        if self.gpu is None:
            self._worker.begin(self._order)
        else:
            self.gpu.begin(self._order, factor=self._factor)

    @property
    def targets(self) -> dict[str, RowsTarget]:
        """Return, for each parameter name, the object that chooses its algorithm, in the order in which reductions are
        launched.
        """
        return {name: self._targets[name] for name in self._order}

    @property
    def plans(self) -> dict[str, SparsePlan]:
        """Return, for each parameter name, the algorithm (plan) that reduces its gradient in the next iteration."""
        return {name: target.plan for name, target in self.targets.items()}

    @property
    def summaries(self) -> list[SparseSummary]:
        """Return a summary of the algorithm chosen for each parameter, in the order in which reductions are launched.
        Equal on all ranks.
        """
        return [summary for name in self._order if (summary := self._targets[name].summary) is not None]

    # ── an iteration ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> bool:
        """Return whether a sparse gradient of this iteration is being reduced."""
        return bool(self._running)

    @property
    def missing(self) -> set[str]:
        """Return the names of the parameters whose sparse gradients have not become ready yet in this iteration."""
        return self._params.keys() - self._running.keys()

    def start(self, name: str, gradient: torch.Tensor, version: int | None) -> None:
        """Start to reduce the complete gradient of parameter `name`.

        Args:
            name: name of the parameter.
            gradient: local gradient of the parameter, sparse or dense.
            version: PyTorch's version counter of `gradient` when it became ready, to detect later changes. None if
                `gradient` replaces a missing one.

        Raises:
            ConfigError: NCCL reduces the gradients, and the parameter was moved to another device.
        """
        given, one = gradient.detach(), self._targets[name]
        if not given.is_sparse or given.sparse_dim() != 1:
            given = given.to_dense().to_sparse(1)
        # Update the dtype, because the dtype of the parameter may have changed.
        form = replace(one.form, dtype=given.dtype)
        counts = one.counts.n < LEARNING_ITERATIONS
        if self.gpu is not None:
            if (place := self._params[name].device) != self.device.torch_device:
                # Raise before `submit`. After it, the other ranks would wait on their GPUs for this rank.
                raise ConfigError(
                    f"parameter {name} with sparse gradients is on device {place}, but device "
                    f"{self.device.torch_device} was expected; move the model before you call DistributedOptimizer()"
                )
            work = GpuWork(name, given, form, self._fixed, measures=counts)
            self._running[name] = _Running(work, gradient, version)
            self.gpu.submit(work, given._nnz())
            return
        if counts:
            one.looked_up += given._nnz()
        on_host = SparseWork(name, coalesced(given.cpu()), form, one.plan)
        self._worker.submit(on_host)
        self._running[name] = _Running(on_host, gradient, version)

    def fill_missing(self, *, joined: bool) -> None:
        """Start to reduce the gradients that have not become ready. This rank contributes the present `.grad`, or no
        rows if that is None.

        Args:
            joined: True if this rank has called `join()`, and so contributes no rows instead of `.grad`.
        """
        if joined:
            self._enter_thread()
        if not self._complete:
            self._warn_of_lost_edits()
        for name in sorted(self.missing):
            param = self._params[name]
            gradient = param.grad if param.requires_grad and not joined else None
            if gradient is None:
                no_rows = torch.empty((1, 0), dtype=torch.int64, device=param.device)
                values = param.new_empty((0, *param.shape[1:]))
                gradient = torch.sparse_coo_tensor(
                    no_rows, values, param.shape, device=param.device, check_invariants=False
                )
            self.start(name, gradient, None)

    def _warn_of_lost_edits(self) -> None:
        """Warn once if user code replaced or modified a gradient while it was being reduced."""
        for name, running in self._running.items():
            gradient = self._params[name].grad
            if running.version is None or gradient is None or self._warned:
                continue
            if gradient is not running.gradient or gradient._version != running.version:
                self._warned = True
                logger.warning(
                    "user code changed the sparse gradient of %s while Sirtaki was reducing it, and the change is "
                    "lost; remedy: %s",
                    name,
                    REMEDY,
                )

    @property
    def must_wait_for_step(self) -> bool:
        """Return whether gradients must be reduced in `step()`, because several optimizers use the GPU.

        All ranks need the same launch order for a GPU.
        """
        return self.gpu is not None and self.device.users > 1

    def launch(self, interrupted: Interrupted | None) -> bool:
        """On a GPU, launch the reductions of this iteration, whose gradients must all have been started. Collective.

        All dense gradients of the iteration must be launched. Call before the host waits for the GPU, or for a message
        that another rank sends after it has waited for its GPU.

        Returns:
            False if `interrupted` ended the wait for the other ranks.
        """
        return self.gpu is None or self.gpu.launch(interrupted)

    def launch_soon(self) -> None:
        """Like `launch`, but do not wait for the other ranks. Called on a rank without more data (`join()`)."""
        if self.gpu is not None:
            self.gpu.launch_soon()

    def reduce(self, interrupted: Interrupted | None) -> bool:
        """Wait until all gradients of this iteration are reduced, and assign them to `.grad`.

        On the host, they are coalesced. On a GPU, the current CUDA stream waits instead of the thread, and the last
        rows may be zeros for an index that is there already.

        A `.grad` that user code has set to None during the reduction stays None.

        Returns:
            True if all reduced gradients were assigned. False if `interrupted` ended the wait.
        """
        if self._complete:
            return True
        if not self.launch(interrupted):
            return False
        works = [running.work for running in self._running.values()]
        if not wait_for_work(works, failures=self._control.failures, interrupted=interrupted, blame_s=None):
            return False
        for name in sorted(self._running):
            param, running = self._params[name], self._running[name]
            rows = running.work.rows if isinstance(running.work, GpuWork) else running.work.reduced.rows
            if running.version is not None:
                wanted = param.grad is not None
            else:
                unused = self._settings.unused_as_none and param.grad is None and not len(rows)
                wanted = param.requires_grad and not unused
            if wanted:
                if self.gpu is None:
                    scale_(rows.values, self._factor)
                param.grad = torch.sparse_coo_tensor(
                    rows.indices[None].to(param.device),
                    rows.values.view(len(rows), *param.shape[1:]).to(param.device),
                    param.shape,
                    device=param.device,
                    check_invariants=False,
                    is_coalesced=self.gpu is None,
                )
        self._complete = True
        return True

    # ── between iterations ───────────────────────────────────────────────────────────────────────────────────────

    def end_iteration(self) -> None:
        """Record the iteration, and choose algorithms (plans) for parameters whose row accesses were counted often
        enough.

        Collective in iterations that choose algorithms.

        Call after `reduce`, before the first gradient of the next iteration.
        """
        running, self._running, self._complete = self._running, {}, False
        if not running:
            return
        self._iterations += 1
        before, watched = self.plans, self.targets
        if self.gpu is not None:
            self._end_on_gpu(
                self.gpu, {name: one.work for name, one in running.items() if isinstance(one.work, GpuWork)}
            )
            return
        for name, one in watched.items():
            work = running[name].work
            assert isinstance(work, SparseWork)
            one.count_iteration(work)
        tried = [one for one in watched.values() if self._controller.tries(one)]
        self._controller.iteration_ended()
        for one in tried:
            if one.kept and not one.checks:
                self._remember(one)
        if learned := [one for one in watched.values() if one.has_learned]:
            self._choose(learned)
        self._summarise(watched)
        self._worker.lanes.grow()
        changed = [one for name, one in watched.items() if one.plan != before[name]]
        if any(not self._controller.tries(one) for one in changed):
            fingerprints = " ".join(plan.fingerprint() for plan in self.plans.values())
            self._control.require_equal(fingerprints, "the algorithm of sparse gradients")
        self._begin_iteration()

    def _end_on_gpu(self, gpu: GpuRows, works: dict[str, GpuWork]) -> None:
        """Record the previous iteration, so that the host is at most one iteration ahead of the GPU.

        Collective in iterations in which ranks exchange the numbers of accessed rows.
        """
        earlier, self._earlier = self._earlier, works
        seen = gpu.accesses(list(earlier.values()))
        for work, (touched, union) in zip(earlier.values(), seen, strict=True):
            if work.measures and (one := self._targets.get(work.name)) is not None and work.path is not None:
                one.apply(SparsePlan(path=work.path))
                one.count_totals(touched, union, looked_up=work.looked_up)
        for work in works.values():
            del work.rows  # `.grad` owns them now
        self._summarise(self.targets)
        self._begin_iteration()

    def _choose(self, learned: Sequence[RowsTarget]) -> None:
        """Choose the first algorithm (plan) of each parameter: an earlier job's, otherwise the one predicted to be
        fastest. Collective.
        """
        recalled = self._recalled({one.name: (one.form, one.learned) for one in learned if one.may_recall})
        tried = [one for one in learned if one.name in recalled and one.recall_plan(recalled[one.name])]
        if unknown := [one for one in learned if one.name not in recalled]:
            pace = measure(self._control, self._worker.lanes, streams=self._streams)
            for one in unknown:
                if one.choose(VolumeModel(one.form, self._control.size, one.learned, pace)):
                    tried.append(one)
                    continue
                self._remember(one)
                if self._control.rank == 0:
                    logger.info(
                        "sparse gradients of %s are reduced by the algorithm %s, which is predicted to be the fastest",
                        one.name,
                        one.plan.describe(),
                    )
        self._controller.begin(*tried, recalls=False)

    def _recalled(self, learned: Mapping[str, tuple[RowFormat, TouchCounts]]) -> dict[str, SparsePlan]:
        """Return the stored algorithms (plans) for sparse gradients, by parameter name. Collective.

        A parameter gets the algorithm of an earlier job's parameter if both have the same form, and if their rows are
        accessed with similar skew (a few rows in most iterations, most rows rarely).
        """
        if not learned:
            return {}
        if not self._topology:
            self._topology = cluster_fingerprint(self._control, self._settings)

        def find(name: str, form: RowFormat, counts: TouchCounts) -> SparsePlan | None:
            def accept(record: RowsRecord) -> SparsePlan:
                plan = plan_of(record, counts)
                what = "accesses to %s are skewed like those to %s in an earlier job, which used %s (%s, registry %s)"
                logger.info(what, name, record.name, plan.describe(), record.reference, self._memory.name)
                return plan

            return self._memory.recall(RowsRecord, self._key(form), (name, skew_of(counts)), accept)

        nothing: dict[str, SparsePlan | None] = {}
        found = nothing
        if self._control.rank == 0:
            found = self._memory.guard(lambda: {name: find(name, *one) for name, one in learned.items()}, nothing)
        return {name: plan for name, plan in self._control.broadcast(found).items() if plan is not None}

    def _remember(self, target: RowsTarget) -> None:
        """Store the algorithm (plan) that tuning has kept for the parameter of `target`, for later jobs. Does nothing
        on ranks other than 0.
        """
        decision = target.decision
        learned, plan = decision.learned, decision.plan
        if not self._topology or learned is None:
            return

        def keep() -> str:
            record = RowsRecord(
                key=self._key(target.form),
                name=target.name,
                skew=skew_of(learned),
                path=plan.path,
                cold=plan.cold,
                block_rows=plan.block_rows,
                n_hot=len(plan.hot_rows),
                span_s=min((seconds for seconds in decision.measured_s if 0.0 < seconds < math.inf), default=0.0),
                created_s=time.time(),
            )
            return self._memory.keep(record)

        self._memory.guard(keep, "")

    def _key(self, form: RowFormat) -> RowsKey:
        return RowsKey(
            topology=self._topology,
            ranks=self._control.size,
            n_rows=form.n_rows,
            row_bytes=form.row_bytes,
            dtype=str(form.dtype).removeprefix("torch."),
            versions={"sirtaki": sirtaki.__version__},
            fixed={name: value for name, value in fixed_knobs(self._settings).items() if name in OF_ROWS},
        )

    def _summarise(self, watched: Mapping[str, RowsTarget]) -> None:
        """Log newly chosen algorithms (plans). Collective in iterations in which ranks exchange the numbers of accessed
        rows.
        """
        if due := [one for one in watched.values() if one.mean is None and one.counts.n == LEARNING_ITERATIONS]:
            totals = self._control.total(np.array([float(one.looked_up) for one in due])).tolist()
            for one, total in zip(due, totals, strict=True):
                one.mean = total / (LEARNING_ITERATIONS * self._control.size)
        for name, one in watched.items():
            if one.mean is not None and one.kept and not one.summarised:
                one.summarised = True
                one.summary = summarise(
                    one.decision, one.form, name=name, ranks=self._control.size, looked_up=one.mean, counts=one.counts
                )
                self._log.sparse(one.summary, iteration=self._iterations)

    def close(self) -> None:
        """End the threads that exchange sparse gradients. Not collective. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._log.close()
        self._worker.close()
        if self.gpu is not None:
            self.gpu.close()
