"""Tuning of a sharded model: a search for the fastest setting of its collectives during the first steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

import sirtaki
from sirtaki.autotune.meta.session import TuningSession
from sirtaki.autotune.shard_search import ShardArm, shard_session
from sirtaki.autotune.sharded import (
    MOST_SCATTERING,
    SHARDED_FILE,
    STREAMS,
    RecordedStep,
    ShardedStep,
    ShardKnobs,
    ShardLink,
    ShardSpace,
    packed_share,
)
from sirtaki.comm.compress import codec_of
from sirtaki.comm.device import Event
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.shards import Loss, ShardLanes
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.engine.console import TuningProgress
from sirtaki.engine.lanes import untuned_streams
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.engine.tuning.cache import cluster_fingerprint
from sirtaki.engine.tuning.controller import TuningController
from sirtaki.engine.tuning.memory import SettingsMemory
from sirtaki.engine.tuning.plans import fixed_knobs
from sirtaki.engine.tuning.report import WHOLE_STEPS, describe_progress, describe_steps
from sirtaki.engine.tuning.target import TunableTarget
from sirtaki.errors import TransportError
from sirtaki.registry.graph import canonical_json, digest
from sirtaki.registry.schema import ShardsKey, ShardsRecord

from .buckets import StepTrace
from .model import AS_PYTORCH, ShardedModel

logger = logging.getLogger(__name__)

UNTUNED = ShardKnobs(streams=1, ahead=2, behind=1)
"""Setting of all-gathers and reduce-scatters before the search.

FSDP prefetches two modules in the forward pass, so that one all-gather is in flight while FSDP copies out another. This
takes no more memory than the backward pass, in which FSDP prefetches one module.
"""

COMMUNICATOR_BYTES = 256 << 20
"""Assumed GPU memory in bytes of one additional NCCL communicator, which the tuner may create.

NCCL's usual buffers are not counted.
"""

PROBES_SHARE = 2.0
"""Approximate time for measuring the network, as a multiple of a training step's time."""

MOST_LATENCY = 0.5
"""Maximum fraction of an all-gather's measured time that counts as latency.

A larger value is taken for a disturbance.
"""

MESSAGES = 16
"""Number of small all-gathers that are launched at once to measure the cost of one message."""

LEAST_PROBE_BYTES, PROBE_BYTES, SMALL_BYTES = 1 << 20, 4 << 20, 4 << 10
"""Sizes in bytes of all-gathered tensors that measure the network.

The bandwidth is measured with at least the first and at most the second size, the latency with the third.
"""

WORTH_MEMORY = 0.05
"""Smallest fraction of a step's bytes that a larger memory budget must save, so that the log recommends it."""

MEASURED_STEPS = 10
"""Number of steps after the search in which the compression error is measured."""


class ShardTarget(TunableTarget[ShardKnobs]):
    """Adapter between the tuner and a sharded model.

    The tuner minimises the time of a training step over the model's ranks.

    The fastest setting is stored in the registry (a store of settings of earlier jobs), and the next job tries it
    first.
    """

    slowest = True

    def __init__(self, model: ShardedModel, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._control, self._lanes = model.connections.control, model.connections.lanes_of_all
        self._shares_memory = self._lanes is not None and self._lanes.kind is TransportKind.SHARED_MEMORY
        self._controller = None if self._control is None or not settings.tunes else TuningController(self._control)
        # Key under which the setting of this model is stored for later jobs. None on other ranks than 0, and if nothing
        # is stored.
        self._key: ShardsKey | None = None
        self._memory = SettingsMemory(settings.registry)
        if self._controller is not None and self._control is not None and self._control.rank == 0:
            self._memory.load_ahead()
        self._space: ShardSpace | None = None  # Settings that the search may try, on rank 0.
        self._step: ShardedStep | None = None
        self._begun: Event = None  # Begin of the training step in progress.
        self._spans: list[tuple[Event, Event]] = []  # Begin and end of each training step that was not measured yet.
        self._is_first = False  # Whether the training step in progress is the first one with its setting.
        self._topology: str | None = None  # Description of the network's topology. None until the search has begun.
        self._on_accelerator = any(group.device.type != "cpu" for group in model.groups)
        # Number of further steps in which the compression error must be measured.
        self._steps_to_measure = 0
        self._steps = 0
        # Number of steps after which no refinement begins. None = no limit.
        self._freeze_after: int | None = None
        # Setting that the last search has chosen.
        self._kept: ShardKnobs | None = None
        model.apply(AS_PYTORCH if self._lanes is None else _untuned(self._lanes, len(model.groups), settings))
        self.default = model.knobs

    def end_step(self) -> None:
        """Measure the time of the training step that has ended. Change the setting if the search requires it.

        Collective. Called while no all-gather or reduce-scatter is in flight.
        """
        control, controller, model, lanes = self._control, self._controller, self._model, self._lanes
        if lanes is not None and lanes.losses is not None:
            self._measure_loss(lanes, lanes.losses)
        if controller is None or control is None:
            return
        self._steps += 1
        if self._kept is not None and not controller.searching:
            if self._freeze_after is not None and self._steps >= self._freeze_after:
                self._controller = None
            elif controller.refine(self):
                self._begun = self._record()
            return
        ended = self._record()
        if self._topology is None:
            traced = lanes if not self._shares_memory else None
            if traced is not None and model.trace is None:
                # Record the next step, to predict step times with other settings.
                model.trace = StepTrace(model.transfers)
                return
            remembers = self._settings.registry != REGISTRY_OFF
            self._topology = cluster_fingerprint(control, self._settings) if remembers else ""
            self.refine_until, self._freeze_after = control.broadcast(
                (self._settings.refine_until, self._settings.freeze_after)
            )
            self._step = None if traced is None else measure_step(model, traced, self._choices()[0])
            model.connections.searching, self.default = control.rank == 0, model.knobs
            controller.begin(self)
        else:
            if not self._is_first:
                self._spans.append((self._begun, ended))
            self._is_first = False
            controller.iteration_ended()
        self._begun = self._record()

    def recall(self) -> TuningSession[ShardKnobs] | None:
        """Return a tuning session that checks the setting that an earlier job has stored. None if none is stored.

        Rank 0 only.
        """
        self._space = self._make_space()
        first = None if self._key is None else self._recall(self._key, self._space, self.default)
        return None if first is None else self._session(self._space, first)

    def search(self, session: TuningSession[ShardKnobs] | None) -> TuningSession[ShardKnobs]:
        """Begin a search for the fastest setting. Rank 0 only.

        Args:
            session: session that has checked the setting of an earlier job. None without such a setting.

        Returns:
            The tuning session of the search.
        """
        space = self._space or self._make_space()
        if session is None:
            return self._session(space)
        session.begin_search(ShardArm(space, self.default, self._step), space=space)
        return session

    def _session(self, space: ShardSpace, first: ShardKnobs | None = None) -> TuningSession[ShardKnobs]:
        budget = self._settings.warmup_iterations
        discarded = self._model.connections.discarded_steps
        return shard_session(
            space, self.default, budget=budget, first=first, step=self._step, discarded_iterations=discarded
        )

    def refine(self, session: TuningSession[ShardKnobs], iterations_left: int) -> bool:
        """Resume a session that has ended, to try more settings. Return False if that would not pay. Rank 0 only.

        Args:
            session: session of the last search.
            iterations_left: number of training steps that would profit from a faster setting.
        """
        assert self._space is not None
        # Pass a constructor of a search method, because a session that only checked an earlier job's setting has none.
        return session.resume(iterations_left, partial(ShardArm, self._space, self.default, self._step))

    def apply(self, knobs: ShardKnobs) -> None:
        """Use the setting `knobs` of all-gathers and reduce-scatters from the next step on. Collective."""
        if knobs != self._model.knobs:
            self._spans, self._is_first = [], True
        self._model.run(knobs)

    def measured_s(self) -> float:
        """Return the time in seconds of the last training step that the device has finished.

        NaN if the device has finished no step since the last call. The first step with a new setting does not count. A
        GPU may be several steps behind the host, because the host does not wait for it.
        """
        device = self._model.connections.device
        ended = [span for span in self._spans if device.is_reached(span[1])]
        self._spans = self._spans[len(ended) :]
        return device.elapsed_s(*ended[-1]) if ended else math.nan

    def progress(self, session: TuningSession[ShardKnobs]) -> TuningProgress:
        """Return the progress of the search for the fastest setting, for the log. Rank 0 only."""
        return describe_progress(session, WHOLE_STEPS)

    def keep(self) -> None:
        """End the search for the fastest setting, or a refinement, and keep the setting in use. Collective."""
        knobs, lanes = self._model.knobs, self._lanes
        changed, self._kept, self._spans = knobs != self._kept, knobs, []
        self._model.connections.searching = False
        self._model.pytorch.release_unused(knobs)
        if changed and lanes is not None and (knobs.gathers or knobs.scatters):
            self._steps_to_measure, lanes.losses = MEASURED_STEPS, (Loss(), Loss())

    def report(self, session: TuningSession[ShardKnobs]) -> None:
        """Store the result of the search in the registry (the store of settings of earlier jobs), and log it.

        Do nothing after a refinement that found no faster setting.

        Rank 0 only.
        """
        result, stored = session.result, ""
        before, self.stays = self.stays, result.knobs
        if session.resumed and result.knobs == before:
            return
        # Store the result, even over that of an earlier job. Do not store a doubtful result, so that the next job
        # searches again.
        if self._key is not None and result.n_trials > 1 and not result.doubt:
            record = ShardsRecord(
                key=self._key,
                memory_bytes=self._settings.fsdp_memory,
                modules=len(self._model.order),
                setting=result.knobs,
                gain=0.0 if result.gain is None else 1.0 - 1.0 / result.gain.times,
                created_s=time.time(),
            )
            stored = self._memory.keep(record)
        words = describe_steps(result, self._model.describe())
        changed = "changed to a faster setting: " if session.resumed else ""
        logger.info("%s%s", changed, f"{words}; {stored}" if stored else words)
        if self._space is None or self._shares_memory or session.resumed:
            return
        if advice := memory_advice(self._model, self._space, self._on_accelerator):
            logger.info("%s", advice)

    def give_up(self, why: str) -> None:
        """End tuning. If a search or a refinement runs, end it, and log the reason `why`.

        In this case, use the result of the last search again, or the default setting if no search has ended.

        Collective. Called while no all-gather or reduce-scatter is in flight.
        """
        if self._lanes is not None:
            self._lanes.losses = None
        controller, self._controller = self._controller, None
        if controller is None or self._control is None or (self._kept is not None and not controller.searching):
            return
        name, stays = ("default setting", self.default) if self._kept is None else ("setting tuned before", self._kept)
        self._model.trace, self._model.connections.searching = None, False
        self._model.run(stays)
        self._model.pytorch.release_unused(stays)
        if self._control.rank == 0:
            logger.info("tuning of the sharded model stopped early, and Sirtaki keeps the %s: %s", name, why)

    def _record(self) -> Event:
        """Record the time of the device, at which a step begins or ends. Does not block the host for a CUDA GPU.

        For other accelerators, wait until they have executed all kernels that were launched.
        """
        device = self._model.connections.device
        for each in () if device.streams else {group.device for group in self._model.groups}:
            torch.get_device_module(each).synchronize(each)
        return device.record_event(timed=True)

    def _measure_loss(self, lanes: ShardLanes, losses: tuple[Loss, Loss]) -> None:
        """Count a step in which the error of lossy compression is measured.

        After the last such step, log the error on rank 0.

        Collective.
        """
        self._steps_to_measure -= 1
        if self._steps_to_measure:
            return
        lanes.losses = None
        kinds = ("parameters", self._model.knobs.gathers), ("gradients", self._model.knobs.scatters)
        found = []
        for loss, (what, name) in zip(losses, kinds, strict=True):
            total = Loss(*lanes.control.total(np.array(astuple(loss))).tolist())
            if name:
                found.append(f"{what} by {name} ({total.describe()})")
        if lanes.control.rank == 0:
            logger.info(
                "Sirtaki compresses the shards of parameters and gradients before it sends them, because "
                "SIRTAKI_LOSSY is set; compressed bytes and relative error, measured on all ranks in %d steps: %s",
                MEASURED_STEPS,
                ", ".join(found),
            )

    def _choices(self) -> tuple[tuple[int, ...], int, int]:
        """Return what the search may try: numbers of connections, the maximum number of reduce-scatters in flight, and
        the memory in bytes for gathered parameters that stay between forward and backward pass.
        """
        lanes, memory_bytes = self._lanes, self._settings.fsdp_memory
        if lanes is not None:
            streams, scattering = tuple(n for n in STREAMS if n <= lanes.most_streams), MOST_SCATTERING
        else:
            streams, scattering = self._model.pytorch.choices()
            if self._on_accelerator and len(streams) > 1:
                streams = streams if memory_bytes >= COMMUNICATOR_BYTES else ()
                memory_bytes -= COMMUNICATOR_BYTES if streams else 0
        if self._settings.streams is not None:
            streams = ()
        return tuple(sorted({self._model.knobs.streams, *streams})), scattering, memory_bytes

    def _make_space(self) -> ShardSpace:
        """Return the settings that the search may try, and set the key under which the result is stored.

        Rank 0 only.
        """
        model, settings, default = self._model, self._settings, self.default
        lossy = self._allowed_compressors()
        streams, scattering, memory_bytes = self._choices()
        space = ShardSpace(
            modules=len(model.order),
            streams=streams,
            whole_bytes=model.whole_bytes,
            dropped=model.dropped,
            memory_bytes=memory_bytes,
            node_ranks=0 if model.near is None else model.node_ranks,
            lossy=lossy,
            scattering=scattering,
            joinable=model.joinable,
            gathered_ahead=None if model.sets_prefetch else (default.ahead, default.behind),
        )
        if self._topology and self._control is not None:
            sizes = [[group.description, group.n_bytes] for group in model.order]
            fixed = fixed_knobs(settings, lossy)
            self._key = ShardsKey(
                topology=self._topology,
                ranks=self._control.size,
                model=digest("sharded model", canonical_json(sizes))[:32],
                transport=model.carriers if self._lanes is None else self._lanes.kind.value,
                versions={"sirtaki": sirtaki.__version__, "torch": str(torch.__version__)},
                fixed={name: value for name, value in fixed.items() if name in ("streams", "lossy")},
            )
        if self._step is not None:
            logger.debug("traced %s", self._step)
            if settings.profile is not None:
                recorded = RecordedStep(step=self._step, space=space, setting=default)
                _write_step(recorded, Path(settings.profile.folder))
        return space

    def _allowed_compressors(self) -> tuple[str, ...]:
        """Return the names of the compressors that SIRTAKI_LOSSY allows and that support this model's shards."""
        names, why = self._settings.lossy, ""
        if any(self._model.given):
            why = "fsdp.attach() was called with gathers= or scatters="
        elif self._lanes is None:
            why = "PyTorch sends the shards, uncompressed"
        elif self._shares_memory:
            why = "all ranks share memory, so nothing is sent"
        if why and names:
            logger.info(
                "Sirtaki does not try the compressors in SIRTAKI_LOSSY on this model's sharded parameters and "
                "gradients, because %s",
                why,
            )
        return () if why else tuple(name for name in names if codec_of(name) is not None)

    def _recall(self, key: ShardsKey, space: ShardSpace, default: ShardKnobs) -> ShardKnobs | None:
        """Return the setting that an earlier job has stored. None if there is none that this job may try.

        If several settings are stored, choose the one with the smallest memory budget that is not below this job's
        budget.
        """

        def accept(record: ShardsRecord) -> ShardsRecord | None:
            return record if record.setting in space else None

        found = self._memory.recall(ShardsRecord, key, space.memory_bytes, accept)
        if found is None:
            return None
        knobs = found.setting
        what = "the default, because no setting was proved to be faster" if knobs == default else knobs.describe()
        logger.info(
            "Sirtaki found a setting for this sharded model in the registry of tuning results %s (%s): %s",
            self._memory.name,
            found.reference,
            what,
        )
        return knobs


def _untuned(lanes: ShardLanes, modules: int, settings: Settings) -> ShardKnobs:
    return replace(UNTUNED, streams=untuned_streams(lanes, settings), ahead=min(UNTUNED.ahead, max(1, modules - 1)))


def measure_step(model: ShardedModel, lanes: ShardLanes, streams: Sequence[int]) -> ShardedStep | None:
    """Measure the network after a step whose computation times were recorded, and end the recording. Collective.

    Args:
        model: a model with a `trace`, the recorder of computation times.
        lanes: connections that send the model's shards.
        streams: numbers of parallel connections to measure.

    Returns:
        The measured step, from which step times with other settings are predicted. None if a prediction is impossible.
    """
    trace, model.trace = model.trace, None
    assert trace is not None
    spans_s = lanes.control.maximum(trace.end(model.order))
    if not np.isfinite(spans_s).all():
        return None
    seconds = PROBES_SHARE * (time.perf_counter() - trace.begun_s)
    largest, now = max(model.whole_bytes), model.knobs.streams
    link = measure_link(lanes, streams, now=now, whole_bytes=largest, seconds=seconds, near=model.near)
    if link is None:
        return None
    forward_s, backward_s = (tuple(each) for each in spans_s[:-1].reshape(2, -1).tolist())
    gathers, scatters = (packed_share(codec) for codec in model.given)
    sizes = zip(model.order, backward_s, strict=True)
    return ShardedStep(
        forward_s=forward_s,
        backward_s=backward_s,
        rest_s=float(spans_s[-1]),
        gathered_bytes=tuple(int(gathers * whole) for whole in model.whole_bytes),
        scattered_bytes=tuple(int(scatters * group.n_bytes[1]) if span_s else 0 for group, span_s in sizes),
        link=link,
    )


def measure_link(
    lanes: ShardLanes, streams: Sequence[int], *, now: int, whole_bytes: int, seconds: float, near: ShardLanes | None
) -> ShardLink | None:
    """Measure latency and bandwidth of all-gathers and reduce-scatters.

    Collective. Called while none of them is in flight.

    Args:
        lanes: connections between all ranks of the model.
        streams: numbers of parallel connections to measure.
        now: number of parallel connections in use, which is restored afterwards.
        whole_bytes: size in bytes of the model's largest all-gathered tensor.
        seconds: approximate time limit of the measurement.
        near: connections within a node. None if they are not measured.

    Returns:
        The measured latency and bandwidth. None if the times are too short to measure.
    """
    begun_s, control = time.perf_counter(), lanes.control
    whole_bytes = min(max(whole_bytes, LEAST_PROBE_BYTES), PROBE_BYTES)

    def tensor(size: int, n_bytes: int) -> torch.Tensor:
        return torch.zeros(size, -(-n_bytes // (4 * size)), dtype=torch.float32, device="cpu")

    def took_s(lanes: ShardLanes, n_bytes: int, *, scatters: bool = False) -> float:
        whole = tensor(lanes.control.size, n_bytes)
        part, spans_s = whole[0].clone(), []
        for _ in range(2):
            lanes.control.barrier()
            start_s = time.perf_counter()
            if scatters:
                lanes.scatter(whole, part, op=ReduceOp.SUM, scale=1.0).wait()
            else:
                lanes.gather(list(whole), part).wait()
            spans_s.append(time.perf_counter() - start_s)
        return float(lanes.control.maximum(np.array([min(spans_s)]))[0])

    gather_s, scatter_s = (took_s(lanes, whole_bytes, scatters=scatters) for scatters in (False, True))
    near_s = math.inf if near is None else took_s(near, whole_bytes)
    if not min(gather_s, scatter_s, near_s) > 0.0:
        return None
    latency_s = min(took_s(lanes, SMALL_BYTES), MOST_LATENCY * gather_s)
    small = tensor(control.size, SMALL_BYTES)
    control.barrier()
    start_s = time.perf_counter()
    for work in [lanes.gather(list(small), small[0].clone()) for _ in range(MESSAGES)]:
        work.wait()
    message_s = float(control.maximum(np.array([time.perf_counter() - start_s]))[0]) / MESSAGES
    rates = {now: whole_bytes / (gather_s - latency_s)}
    for count in sorted(streams, key=lambda count: abs(math.log(count / now))):
        if control.maximum(np.array([time.perf_counter() - begun_s - seconds]))[0] > 0.0:
            break
        if count != now:
            with suppress(TransportError):  # All ranks raise this error together. The connections in use stay open.
                lanes.use(count)
                span_s = took_s(lanes, whole_bytes)
                rates[count] = whole_bytes / (span_s - min(latency_s, MOST_LATENCY * span_s))
    lanes.use(now)
    return ShardLink(
        latency_s=latency_s,
        gathered=rates,
        scatter_times=scatter_s / gather_s,
        message_s=message_s,
        **({} if near is None else {"near_bytes_per_s": whole_bytes / near_s}),
    )


def memory_advice(model: ShardedModel, space: ShardSpace, on_accelerator: bool) -> str:
    """Describe how many bytes a step would save with a larger memory budget for kept parameters.

    Return an empty string if it would save few bytes.
    """
    left = tuple(place for place in space.dropped if place not in (*model.knobs.kept, *model.knobs.near))
    who, knobs = "modules kept their", replace(model.knobs, kept=space.dropped, near=())
    if model.node_ranks:
        space = replace(space, node_ranks=model.node_ranks)
        who, knobs = "each node kept all", replace(model.knobs, near=tuple(sorted((*model.knobs.near, *left))))
    needed = space.extra_bytes(knobs)
    if needed <= space.memory_bytes:
        return ""
    # With a larger budget, the tuner may also create one more communicator.
    needed += COMMUNICATOR_BYTES if on_accelerator else 0
    dropped = sum(space.whole_bytes[place] for place in left)
    scattered = sum(group.n_bytes[1] for group in model.order)
    less = dropped / max(1, sum(space.whole_bytes) + dropped + scattered)
    if less < WORTH_MEMORY:
        return ""
    return (
        f"if {who} parameters until the backward pass, a step would send {100 * less:.0f} % less: set "
        f"SIRTAKI_FSDP_MEMORY={math.ceil(needed / 2**20)}MiB to let the tuner try this"
    )


def _write_step(recorded: RecordedStep, folder: Path) -> None:
    """Write the recorded step to `folder`, where `sirtaki optimize` reads it.

    If it cannot be written, log a warning.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SHARDED_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=1))
    except OSError as err:
        logger.warning(
            "the trace of one training step, for `sirtaki optimize`, cannot be written to %s: %s", folder, err
        )
