"""Reduce gradients over all ranks while the backward pass still computes others.

Gradients lie in flat buffers, which are cut into units (buckets); a plan defines how. In one iteration, `GradientHooks`
calls `ready_in_order` for gradients that become ready in the expected order, `ready` for all others, `reduce` at the
end of a backward pass if every gradient is ready, and `finish`, which reduces in any case:

    ready_in_order, ready ─▶ _launch: the last gradient of a unit is ready, and all units before it are launched:
                             gradients are copied into the flat buffers, and the unit is sent over its stream
    flush ─▶ missing gradients are filled in, and the remaining units are launched
    reduce ─▶ the training thread waits for all units, and every `.grad` becomes a view of the flat buffer
    finish ─▶ the iteration is measured, the ranks' flags are read, and the next iteration begins

`LaunchMode` defines when units are launched. Once the order of the gradients is known, the flat buffers have that
order, and the hooks launch units in it without control messages: `LaunchSchedule.launch_steps` lists the numbers of
ready gradients after which units are launched. After the first gradient in another order, gradients are counted one by
one. While the order is profiled on the host, the ranks negotiate which gradients are ready (`ReadinessNegotiation`),
and launch agreed gradients that are adjacent in the flat buffer together. While it is profiled on a GPU, all units are
launched at the end of the backward pass.

If gradients later become ready in another order, units are launched late. Each rank watches the order
(`OrderProfiling`) and requests a new profile with a control flag that is reduced with the gradients (`FlagTraffic`). If
any rank requests one, all ranks profile the order in the next iterations, and rebuild their buffers.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Container, Sequence

import numpy as np
import torch

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.router import Router
from sirtaki.errors import CommError, PlanError, require
from sirtaki.machine import free_in_forked_children

from .. import recorder, timeline
from ..compress import CompressedUnits
from ..device import Event, copy_
from ..plan import CommPlan, GradientLayout
from .buffers import FlatBuffers, Reduction
from .edits import EditCheck
from .flags import FLAG_COUNT, Drift, FlagTraffic, RankFlags
from .launched import LaunchedUnits
from .negotiation import Interrupted, ReadinessNegotiation
from .ready import ReadyGradients
from .schedule import (
    AgreedUnits,
    IterationPace,
    LaunchSchedule,
    OrderProfiling,
    ScheduledUnit,
    agree_on_order,
    complete_s,
    reorder_units,
    schedule,
)
from .state import IterationState, LaunchMode
from .trace import InFlight, IterationEvents, IterationReport, IterationTrace

logger = logging.getLogger(__name__)

NO_FLAGS = RankFlags()

EVERY = range(sys.maxsize)
"""Result of `GradientPipeline.begin_pass`: the caller must report each gradient when it is ready."""


class GradientPipeline:
    """Reduction of the gradients of one set of parameters over all ranks.

    The constructor, `finish` and `use` are collective. Gradients may be marked as ready in any order. If a parameter's
    gradient is not marked, its current `.grad` is reduced, or zeros if that is None.

    Attributes:
        iteration: number of finished iterations.
        state: state of the current iteration: COLLECTING, LAUNCHED or REDUCED.
        mode: rule for launching the units (buckets) of the current iteration.
        plans: current plans (how flat buffers are cut into units and sent), one for each flat buffer.
        names: names of the parameters.
        n_params: number of parameters.
        device: device of the gradients.
        profiling: True if the order in which gradients become ready is measured in this iteration; the same on all
            ranks.
        problem: why the reduced gradients of this iteration are undefined; empty if they are right or not reduced yet.
        in_flight: the last iterations, which the device may still execute.
        compressed: object that sends compressed units; None = no unit is compressed.
        drift: trend of the communication time that all ranks have reported with `vote_drift` in the last iteration; on
            a GPU, in the iteration before that.
    """

    plans: tuple[CommPlan, ...]

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        control: ControlPlane,
        router: Router,
        reduction: Reduction,
        default_plan: Callable[[GradientLayout], CommPlan],
        unused_as_none: bool = False,
        lossy: bool = False,
        rank: int | None = None,
    ) -> None:
        """Open the flat buffers. Collective.

        Args:
            params: parameters whose gradients are reduced, in the same order on all ranks.
            names: names of the parameters, for messages.
            control: control plane of the participating ranks.
            router: object that sends units (buckets) over the transports. The caller closes it.
            reduction: operation, scaling and compression of every gradient.
            default_plan: returns the first plan for a flat buffer of a given layout; the same on all ranks.
            unused_as_none: set `.grad` to None, not zeros, where no rank has computed a gradient.
            lossy: True if plans may compress units that `reduction` does not compress.
            rank: rank in messages; None = the rank in `control`.
        """
        self._rank = control.rank if rank is None else rank
        self._params, self.names, self.n_params = list(params), list(names), len(params)
        self._control, self._router, self._reduction = control, router, reduction
        self._default_plan, self._unused_as_none = default_plan, unused_as_none
        self.device = router.device
        self.compressed: CompressedUnits | None = None
        if lossy or reduction.compression is not None:
            self.compressed = CompressedUnits(
                router, reduction.compression, reduction.feedback, rank=control.rank, size=control.size
            )
        self.device.users += 1
        self._negotiation = None if self.device.streams else ReadinessNegotiation(control.duplicate(), control.failures)
        self._one_at_a_time = free_in_forked_children(threading.Lock())
        self.iteration = 0
        self.problem = ""
        self._all_used = False  # becomes True if this rank has a gradient of every parameter in this iteration
        self.drift = Drift.USUAL
        self.in_flight = InFlight(self.device)
        self._order, self._edits = OrderProfiling(), EditCheck()
        self._buffers = self._make_buffers(range(self.n_params)[::-1])
        self._begin_iteration()

    # ── layouts and plans ────────────────────────────────────────────────────────────────────────────────────────

    def _make_buffers(self, order: Sequence[int]) -> FlatBuffers:
        """Make flat buffers for this order of the parameters, and cut them into units (buckets) by default plans.

        Collective.
        """
        self.wait_for_device()  # because work on the device may still use the old buffers
        buffers = FlatBuffers(
            order,
            self._params,
            self.names,
            reduction=self._reduction,
            router=self._router,
            n_flags=FLAG_COUNT + (self.n_params if self._unused_as_none else 0),
        )
        self._ready = ReadyGradients(buffers)
        self._flags = FlagTraffic(self.device, buffers.flags[:FLAG_COUNT])
        # Usage flags, one for each position. After the reduction, a flag is above zero if any rank has the gradient.
        self._usage = buffers.flags[FLAG_COUNT:]
        self._install([self._default_plan(layout) for layout in buffers.layouts], buffers)
        return buffers

    def _install(self, plans: Sequence[CommPlan], buffers: FlatBuffers) -> None:
        """Open the streams (connections) of the plans, and schedule the units (buckets) of these plans. Collective.

        Raises:
            PlanError: a plan does not fit its flat buffer, or has a route or streams that this job does not have.
            TransportError: streams could not be opened. Raised on all ranks.
        """
        n_buffers = len(buffers.groups)
        require(len(plans) == n_buffers, "plans", f"{n_buffers} plans, one for each flat buffer", len(plans), PlanError)
        for group, plan in zip(buffers.groups, plans, strict=True):
            if plan.numel != group.layout.numel:
                raise PlanError(
                    f"the communication plan is for {plan.numel} gradient elements, but this model has "
                    f"{group.layout.numel}; make a plan for this model with `sirtaki optimize`"
                )
            self._router.open_plan(plan)
        # Launch units (buckets) with usage flags only after the backward pass, because a gradient may be missing
        # before its end. The other control flags are already final when the last gradient is ready.
        self._schedule = LaunchSchedule(
            schedule(buffers.groups, plans, buffers.position),
            buffers.order,
            held=lambda unit: self._unused_as_none and buffers.has_flags(unit.group, unit.stop),
        )
        self.plans = tuple(plans)
        if self.compressed is not None:
            self.compressed.lay_out(buffers.groups, plans)

    @property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """Current layouts (sizes and names of the gradients in a flat buffer), one for each dtype.

        The first layout has one more entry, the control flags (messages between ranks, reduced with the gradients).
        """
        return self._buffers.layouts

    def use(self, plans: Sequence[CommPlan]) -> None:
        """Cut the flat buffers into units (buckets) by these plans from the next iteration on. Collective.

        Call between iterations, with one plan for each flat buffer.

        Raises:
            PlanError: a plan does not fit its flat buffer, or has a route or streams that this job does not have.
            MismatchError: the ranks' plans differ. Raised on all ranks.
        """
        if self.pending:
            raise PlanError(
                "the communication plan cannot change while gradients are computed; change the plan after step()"
            )
        self._control.require_equal(" ".join(plan.fingerprint() for plan in plans), "the plan")
        self._install(plans, self._buffers)
        self._begin_iteration()

    def reorder_units(self, pace: IterationPace) -> None:
        """Launch units (buckets) in the order in which the next forward pass reads parameters, until plans change.

        Call between iterations, with the same `pace` (expected times of an iteration) on all ranks.
        """
        units, _ = self.reordered_units(self.plans, pace)
        # On a GPU, launch all buckets in one order on all ranks, because NCCL's communicators of a device require it.
        # The streams of other transports are independent.
        order, one_order = self._buffers.order, self.device.streams
        self._schedule = LaunchSchedule(units, order, held=self._has_flags, one_order=one_order)
        self._begin_iteration()

    def reordered_units(
        self, plans: Sequence[CommPlan], pace: IterationPace
    ) -> tuple[list[ScheduledUnit], list[float]]:
        """Return the units (buckets) of `plans` in the order in which the next forward pass reads their parameters.

        Also return the seconds from the first ready gradient until all gradients of each unit are ready.
        """
        usual = schedule(self._buffers.groups, plans, self._buffers.position)
        units = reorder_units(usual, pace, held=self._has_flags)
        return units, complete_s(units, pace, held=self._has_flags)

    def _has_flags(self, unit: ScheduledUnit) -> bool:
        return self._buffers.has_flags(unit.group, unit.stop)

    def in_layout_order(self, values: Sequence[float]) -> list[float]:
        """Reorder values of parameters: from the order of parameter indices to that of the gradients in the first flat
        buffer.
        """
        return [values[index] for index in self._buffers.groups[0].indices]

    # ── between iterations, and state ────────────────────────────────────────────────────────────────────────────

    def profile_again(self) -> None:
        """Ask all ranks to measure the order of ready gradients again. They begin a few iterations later."""
        self._order.requested = True

    def vote_drift(self, drift: Drift) -> None:
        """Report `drift`, this rank's trend of the communication time, to all ranks in each later iteration.

        The trend is sent in control flags, which are reduced with the gradients. Call between iterations.
        """
        if drift is not self._flags.drift:
            self._flags.drift = drift
            self._begin_iteration()

    @property
    def pending(self) -> bool:
        """True if a gradient of this iteration is ready, and `finish` has not been called."""
        return bool(self._ready.positions)

    @property
    def missing(self) -> list[int]:
        """Indices of the parameters whose gradients are not ready in this iteration."""
        if len(self._ready.positions) == self.n_params:
            return []
        order, ready = self._buffers.order, set(self._ready.positions)
        return sorted(order[position] for position in range(self.n_params) if position not in ready)

    @property
    def can_reduce(self) -> bool:
        """True if `reduce` may be called before `finish`: every gradient is ready, and they are not reduced yet."""
        if self.state is IterationState.REDUCED or len(self._ready.positions) < self.n_params:
            return False
        # If several optimizers use the GPU, launch buckets in `step()`, because all ranks need the same launch order.
        return not (self.mode is LaunchMode.AT_END and self.device.users > 1)

    @property
    def can_defer(self) -> bool:
        """True if `wait_for_one` may be used in this iteration, once all units (buckets) are launched."""
        recorded = self._trace is not None and self._trace.recorded is not None
        return not (self.profiling or self._unused_as_none or recorded or self._buffers.lent)

    @property
    def written(self) -> bool:
        """True if user code on this rank has written to a ready gradient, so that the reduced gradient is undefined."""
        return bool(self._ready.written)

    def detach(self) -> None:
        """Replace every `.grad` that is a view of a flat buffer by a copy, which later reductions do not change."""
        self.run_copies()
        self._buffers.detach()

    def run_copies(self) -> None:
        """Run the copies that transport threads have not run yet, so that user code may read and write `.grad`.

        On a GPU, the CUDA streams that have written gradients wait for the copies instead. Thus a CUDA graph may write
        to the memory of the copied gradients when it is replayed.

        Call when a backward pass has ended or raised and the training thread does not wait for the reduction.
        """
        copies = self._ready.copies
        if copies.copied < copies.count:
            copies.copy(copies.count)
        if self.device.streams:
            self.device.release(forget=False)  # False: gradients of incomplete units are still to be copied

    # ── the backward pass ────────────────────────────────────────────────────────────────────────────────────────

    def _begin_iteration(self) -> None:
        """Prepare the next iteration."""
        device, self.profiling = self.device, self._order.active
        if self._reduction.feedback.loaded and self.compressed is None:
            # Open the object that sends compressed buckets also if only an earlier job has compressed gradients, as
            # its residuals of error feedback (what compression left out) are not sent yet.
            self.compressed = CompressedUnits(
                self._router, None, self._reduction.feedback, rank=self._control.rank, size=self._control.size
            )
            self.compressed.lay_out(self._buffers.groups, self.plans)
        self._flags.write(RankFlags(reprofile=self._order.asks, complete=True))
        self._trace: IterationTrace | None = None
        if timeline.current is not None or recorder.current is not None:
            self._trace = IterationTrace(device, self, self._buffers)
        if self.profiling:
            self.mode = LaunchMode.AT_END if device.streams else LaunchMode.NEGOTIATED
        elif self._trace is None:
            self.mode = LaunchMode.IN_ORDER
        else:
            self.mode, self._counts = LaunchMode.COUNTED, self._schedule.pending_counts()
        defers = self.mode is LaunchMode.IN_ORDER and self.compressed is None and not device.streams
        self._ready.begin(defers=defers)
        self.state = IterationState.COLLECTING
        self._step = 0  # index of the next entry of `LaunchSchedule.launch_steps`, while the mode is IN_ORDER
        self._launched = LaunchedUnits(
            router=self._router,
            compressed=None if self.profiling else self.compressed,
            reduction=self._reduction,
            failures=self._control.failures,
            ready=self._ready,
            planned=self._schedule.units,
            names=self.names,
            place=f"rank {self._rank}, iteration {self.iteration}",
            trace=self._trace,
        )
        self._first_ready: Event = None
        self._backward_ended: Event = None
        self._reduced: Event = None
        self._ready_events: list[Event | None] = [None] * self.n_params if self.profiling else []
        self._all_flags = NO_FLAGS  # control flags of all ranks in this iteration; on a GPU they are read later
        self._joined = self._one_by_one = False

    def _begin_collecting(self) -> None:
        """Choose the launch mode, and record the time. Called for the first ready gradient of an iteration."""
        self._first_ready = self.device.record_event(timed=True)
        if self.device.streams and self.device.users > 1:
            self.mode = LaunchMode.AT_END  # launch in `step()`, because all ranks need one launch order for a GPU
        elif self.mode is LaunchMode.NEGOTIATED:
            self._begin_negotiation()

    def begin_pass(self) -> Container[int]:
        """Begin a backward pass. Call when its first gradient is ready.

        Returns:
            Counts of ready gradients of this pass. When the caller reaches one of the counts, it must call
            `ready_in_order`, because all gradients of a unit (bucket) are ready then. `EVERY` = the caller must report
            each gradient when it is ready.
        """
        n_ready = len(self._ready.positions)
        if self._first_ready is None:
            self._begin_collecting()
        if self.mode is not LaunchMode.IN_ORDER or n_ready == self.n_params:
            return EVERY
        points = self._schedule.launch_points
        return frozenset(point - n_ready for point in points) if n_ready else points

    def ready_in_order(self, params: Sequence[torch.Tensor]) -> bool:
        """Mark the gradients of these parameters as ready, and launch the units (buckets) that they complete.

        Returns:
            False if other gradients were expected, or if the mode is not IN_ORDER. Then nothing is done, and the
            caller must call `ready` for each gradient.
        """
        before = len(self._ready.positions)
        if self.mode is not LaunchMode.IN_ORDER or not self._ready.add_in_order(params):
            return False
        n_ready, steps, numbers = before + len(params), self._schedule.launch_steps, list[int]()
        while self._step < len(steps) and steps[self._step][0] <= n_ready:
            numbers += steps[self._step][1]
            self._step += 1
        if numbers:
            self._launch(numbers, since=before)
        return True

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """Mark one gradient as ready, and launch the units (buckets) that it completes. Thread-safe.

        Call at most once for each parameter in an iteration.

        Args:
            index: index of the parameter.
            gradient: `.grad` of the parameter.
            version: version counter of `gradient` when it became ready.
        """
        with self._one_at_a_time:
            ready, device = self._ready, self.device
            device.notice_stream()
            if self._first_ready is None:
                self._begin_collecting()
            if self.mode is LaunchMode.IN_ORDER:
                self.mode = LaunchMode.COUNTED
                self._counts = self._schedule.pending_counts([self._buffers.order[place] for place in ready.positions])
            if self._trace is not None and self._trace.recorded is not None:
                self._trace.ready.append((index, device.record_event(timed=True)))
            if self.profiling:
                self._ready_events[index] = device.record_event(timed=True)
            position = self._buffers.position[index]
            ready.add(position, gradient, version)
            if self.mode is LaunchMode.NEGOTIATED:
                assert self._negotiation is not None
                self._launch(())
                # Negotiate positions, not parameter indices, so that gradients that become ready on all ranks together
                # are often adjacent in the flat buffer and form one unit (bucket).
                self._negotiation.set_ready(position)
            elif self.mode is LaunchMode.COUNTED and (numbers := self._schedule.count(index, self._counts)):
                self._launch(numbers)

    def _launch(self, numbers: Sequence[int], *, since: int | None = None) -> None:
        """Copy all ready gradients into the flat buffers, then launch the units (buckets) with these numbers.

        On a GPU, the copies run on another CUDA stream than the backward pass. `since` is that of
        `ReadyGradients.copy_in`.
        """
        with self.device.beside():
            begin = None if self._trace is None else self.device.record_event(timed=True)
            n_copied = self._ready.copy_in(since)
            if self._trace is not None and n_copied:
                self._trace.copies.append((begin, self.device.record_event(timed=True), n_copied))
            for number in numbers:
                self._launched.launch(self._schedule.units[number])

    def contribute_zeros(self) -> None:
        """Launch all units (buckets), with zeros if this rank has no gradients. Non-blocking.

        Called on a rank that has no more data (`join()`), so that other ranks can reduce their gradients.
        """
        if not self._ready.positions:
            self._joined = True
            self._flags.drift = Drift.USUAL  # report no trend, because a rank without data measures no times
            for param in self._params:
                param.grad = None
        self.flush()

    def flush(self) -> None:
        """Fill in gradients that this rank has not computed, and launch the remaining units (buckets). Non-blocking."""
        if self.state is not IterationState.COLLECTING:
            return
        ready, self.problem = self._ready, ""
        self._backward_ended = self.device.record_event(timed=True)
        ready.own = len(ready.positions)
        if self._unused_as_none:
            self._write_usage()
        if not self.can_reduce:  # correct the control flags: gradients are missing, so their bucket is not launched yet
            self._flags.write(
                RankFlags(written=bool(ready.written), replaced=ready.replaced, reprofile=self._order.asks)
            )
        self.state = IterationState.LAUNCHED
        if self._first_ready is None:
            self._begin_collecting()
        if ready.own < self.n_params:
            own = set(ready.positions)
            for position in range(self.n_params):
                if position not in own:
                    ready.fill_missing(position)
        if self.mode is LaunchMode.NEGOTIATED:
            assert self._negotiation is not None
            self._launch(())
            self._negotiation.end()
        elif len(self._launched.units) < len(self._schedule.units) or ready.own < self.n_params:
            launched, units = set(map(id, self._launched.units)), self._schedule.units
            self._launch([number for number, unit in enumerate(units) if id(unit) not in launched])
        if self.device.streams:
            self.device.release()

    def reduce(self, interrupted: Interrupted | None) -> bool:
        """Launch the remaining units (buckets), block until all gradients are reduced, then assign them to `.grad`.

        Called at the end of backward if every gradient is ready, so that user code sees reduced gradients after
        `backward()`, as with DDP.

        Args:
            interrupted: returns True if the training thread must stop waiting because another collective operation
                needs this rank. Call this method or `finish` again afterwards.

        Returns:
            True if every `.grad` holds the reduced gradient; False if interrupted.

        Raises:
            CommError: a reduction or the job has failed. The gradients are undefined.
        """
        self.flush()
        device = self.device
        if self.mode is LaunchMode.NEGOTIATED:
            assert self._negotiation is not None
            try:
                if not self._negotiation.wait(interrupted):
                    return False
            except CommError as err:
                error = self._launched.with_place(err)
                raise error from error.__cause__
        if not self._launched.wait(interrupted):
            self.run_copies()
            return False
        self.state = IterationState.REDUCED
        self._reduced = (
            self._launched.last_done(self._backward_ended) if self._one_by_one else device.record_event(timed=True)
        )
        self._ready.assign_all(self._read_unused() if self._unused_as_none else ())
        if not device.streams:
            self._all_flags = self._flags.read()
        self.problem = self._edits.problem(self._ready, self._buffers.names, self._all_flags)
        return True

    def _write_usage(self) -> None:
        """Write this rank's usage flags into the flat buffer: 1 for each parameter with a gradient, 0 for others."""
        ready = self._ready
        present: Sequence[int] = ()
        if not self._joined:
            present = ready.positions if ready.own == self.n_params else ready.present
        self._all_used = len(present) == self.n_params
        if self._all_used:
            self.device.launch(self._usage.fill_, 1)
            return
        usage = self.device.pinned(self.n_params, self._usage.dtype)
        usage[list(present)] = 1
        self.device.launch(copy_, self._usage, usage)

    def _read_unused(self) -> Sequence[int]:
        """Return the positions of parameters for which no rank has a gradient.

        On a GPU, block until the usage flags (which parameters have a gradient on any rank) are reduced, as DDP does
        with unused parameters. Do not block if this rank has all gradients, because then no parameter is unused.
        """
        if self._all_used:
            return ()
        usage = self._usage
        if self.device.streams:
            usage = self.device.pinned(self.n_params, self._usage.dtype)
            self.device.launch(copy_, usage, self._usage)
            self.wait_for_device(self.device.record_event())
        unused: list[int] = (usage <= 0).nonzero()[:, 0].tolist()
        return unused

    def wait_for_device(self, event: Event | None = None) -> None:
        """Block until the device has done all work before `event`. None = all work that is queued on the device.

        Raises:
            CommError: the job has failed. All gradients and parameters of the last iterations are undefined.
        """
        with self._control.failures.raising():
            if event is None:
                self.device.synchronise()
            else:
                self.device.wait_for(event)

    def stalled(self) -> tuple[int, float] | None:
        """Return the iteration whose reduction the GPU waits for. See `InFlight.stalled`. Thread-safe."""
        return self.in_flight.stalled()

    def where(self) -> str:
        """Describe rank, iteration and gradients, for messages about all gradients of this pipeline."""
        names = self.names
        which = f"{names[0]} … {names[-1]} ({len(names)})" if len(names) > 1 else "".join(names)
        return f"rank {self._rank}, iteration {self.iteration}, gradients of {which or 'nothing'}"

    def wait_for_one(self, index: int, interrupted: Interrupted | None) -> list[int]:
        """Block until the units (buckets) with elements of one gradient are reduced. All units must be launched.

        Args:
            index: index of the parameter.
            interrupted: returns True if the training thread must stop waiting because another collective operation
                needs this rank.

        Returns:
            Indices of all parameters whose gradients are reduced together with this one; none if interrupted.

        Raises:
            CommError: a reduction or the job has failed. The gradients are undefined.
        """
        self._one_by_one = True
        units = [self._schedule.units[number] for number in self._schedule.units_of[index]]
        return self._schedule.reduced_with(index) if self._launched.wait(interrupted, units) else []

    def assign_gradients(self, indices: Sequence[int]) -> None:
        """Set `.grad` to the reduced gradient, for each of the parameter `indices` that `wait_for_one` has returned."""
        self._ready.assign([self._buffers.position[index] for index in indices])

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    def finish(self, *, joined: bool = False) -> IterationReport:
        """Block until every gradient is reduced, and end the iteration. Collective.

        Args:
            joined: True if this rank has no more data and contributes zeros.

        Raises:
            CommError: a reduction or the job has failed. The gradients are undefined.
        """
        self._control.failures.raise_if_failed()
        if joined:
            self.contribute_zeros()
        if self.state is not IterationState.REDUCED:
            self.reduce(None)
        profiled = self.profiling and self._order.ends_with(self.iteration)
        report = self._measure(profiled=profiled)
        all_flags = self._all_flags
        if self.device.streams:
            all_flags = self._flags.read()
            self.problem = self._edits.delayed_problem(self.problem, all_flags)
        self.drift = Drift.USUAL
        if profiled:
            self._end_profiling()
        elif not self.profiling:
            self._order.watch(self.iteration, self._ready.positions[: self._ready.own], self._buffers)
            self.drift = all_flags.drift
            if all_flags.reprofile:
                logger.info(
                    "gradients changed in order, dtype, strides or sparsity; Sirtaki records the new order and "
                    "rebuilds its buffers"
                )
                self._order.begin(self.iteration + 1)
                self._flags.forget()
                self.drift = Drift.USUAL  # ignore the reported trend, which belongs to the old order
        self.iteration += 1
        self._begin_iteration()
        return report

    def _measure(self, *, profiled: bool) -> IterationReport:
        """Return the times of the iteration; on a GPU, wait for the previous iteration, and return its times instead.

        While the order of gradients is profiled, wait for this iteration on a GPU, too, and return its times.
        """
        device, trace = self.device, self._trace
        events = measured = IterationEvents(self.iteration, self._first_ready, self._backward_ended, self._reduced)
        if device.streams:
            self.in_flight.units = list(zip(self._launched.units, self._launched.works, strict=True))
            before = self.in_flight.add(events)
            measured = events if self.profiling else before
            # Wait for the measured iteration, so that the host is never more than one iteration ahead of the device.
            self.wait_for_device(measured.reduced if trace is None else events.reduced)
        if trace is not None:
            trace.write(events, profiling=self.profiling)

        def after_first_s(event: Event | None) -> float:
            return 0.0 if event is None else max(0.0, device.elapsed_s(events.first_ready, event))

        return IterationReport(
            span_s=device.elapsed_s(measured.first_ready, measured.reduced),
            # Replace a negative time by zero. It is negative if there was no backward pass.
            backward_s=max(0.0, device.elapsed_s(measured.first_ready, measured.backward_ended)),
            ready_s=tuple(map(after_first_s, self._ready_events)),
            profiled=profiled,
        )

    def _end_profiling(self) -> None:
        """Agree on the order of ready gradients. Make new flat buffers if necessary. Collective.

        They are necessary if the order has changed, or a gradient no longer fits its place in them.
        """
        before = self._buffers
        ready_order = [before.order[position] for position in self._ready.positions]
        order = agree_on_order(ready_order, self._control, counts=not self._joined)
        outdated = bool(self._control.maximum(np.array([float(before.outdated)]))[0])
        if order != before.order or outdated:
            self._buffers = self._make_buffers(order)
            self._buffers.move_from(before)

    def _begin_negotiation(self) -> None:
        """Begin a backward pass in which a thread launches each gradient once it is known to be ready on all ranks."""
        assert self._negotiation is not None
        units, launched = AgreedUnits(self._buffers, self.plans, flags_apart=self._unused_as_none), self._launched

        def launch_agreed(positions: list[int]) -> None:
            """Launch gradients that are ready on all ranks. Called by the negotiation's thread."""
            for unit in units.of(positions):
                launched.launch(unit)

        self._negotiation.begin(units.sizes_bytes, granularity_bytes=units.largest_bytes, on_agreed=launch_agreed)

    def close(self) -> bool:
        """End the threads. `.grad` keeps its value. Called once.

        Returns:
            False if a thread has not ended and still uses its communicator.
        """
        self.device.users -= 1
        del self._default_plan  # breaks a reference cycle with the owner
        ended = self.compressed is None or self.compressed.close()
        return (self._negotiation is None or self._negotiation.close()) and ended
