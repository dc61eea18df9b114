"""Reduces gradients over all ranks while the backward pass still computes others: the way of a gradient.

An iteration goes so: `come` for gradients that come in the expected order, `ready` for any other, `reduce` at the end
of a backward pass if every gradient has come, and `finish`, which reduces in any case and closes the iteration. Between
them a gradient goes through these hands:

    come, ready ─▶ _send: the last gradient that a unit waits for has come, and it is the unit's turn: gradients are
                   copied into the flat buffers, the unit goes over its stream
    flush ─▶ what did not come is put in, and what has not left leaves
    reduce ─▶ all units are awaited, and every `.grad` becomes a view of the flat buffer
    finish ─▶ the iteration is measured, the ranks' flags are read, and the next one begins

*Scheduled* iterations do that: gradients lie in the flat buffers in the agreed order, and units leave in that order,
straight from the hook, without a control message. Which units leave after how many gradients is known before
(`LaunchSchedule.course`), so that hooks need look at those counts only; from the first gradient that does not come in
order, each is counted for its units. In *order-profiling* iterations the order is not known: on the host the ranks
negotiate which gradients are ready (`ReadinessNegotiation`), and neighbours in the flat buffer that all have leave
together; on a device with streams everything leaves at the end of the backward pass.

A fixed order costs time if gradients begin to come in another one. Each rank watches that (`OrderProfiling`), and asks
with a control flag that travels along with the gradients (`FlagTraffic`); if anyone asks, all ranks profile the order
again in the next iteration, and rebuild their buffers.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.router import Router
from sirtaki.errors import CommError, PlanError
from sirtaki.machine import free_in_forked_children

from .. import recorder, timeline
from ..compress import CompressedUnits
from ..control.failure import caused
from ..control.waiting import WAIT_SLICE_S
from ..device import Device, Event, copy_
from ..plan import CommPlan, GradientLayout
from ..transports.contract import Work, scale_
from .buffers import FlatBuffers, Reduction
from .edits import EditCheck
from .flags import FLAG_COUNT, Drift, FlagTraffic, RankFlags
from .negotiation import Interrupted, ReadinessNegotiation
from .ready import LARGE_ELEMENTS, DeferredCopies, ReadyGradients
from .schedule import (
    IterationPace,
    LaunchSchedule,
    OrderProfiling,
    ScheduledUnit,
    agree_on_order,
    coming_s,
    reorder_units,
    schedule,
)
from .trace import InFlight, IterationEvents, IterationReport, IterationTrace

logger = logging.getLogger(__name__)

NOTHING = RankFlags()

NAMED_GRADIENTS = 6
"""Of a unit in which something has failed: of more only the first and the last are named."""

EVERY = range(sys.maxsize)
"""Of counts: all."""


@dataclass(slots=True)
class Iteration:
    """How far this rank is in one iteration.

    Attributes:
        in_order: gradients have come as expected so far, and nobody wants to know more of each.
        step: of the schedule's course, how far it has been gone, while that is so.
        missing: for each unit, what it waits for still, after that.
        ready_events: when each gradient came, by parameter; only while the order is profiled.
        deferred: nothing leaves before `flush`.
        trace: collects what a timeline or a recorder wants to know; None = nobody does.
        left: the numbers of the units that have left, in the order in which they did; none while ranks negotiate.
        works, units: what is under way, in the order in which it left.
        first_ready: when the first gradient came; None until then.
        backward_ended: when all gradients had come, or were put in; None until then.
        reduced: when all of them were reduced; None until then.
        said: by all ranks, on the host.
        joined: this rank has no data any more and takes part with zeros.
        flushed: all units have left, or the negotiation knows that all may.
        one_by_one: units were waited for one by one.
    """

    in_order: bool
    ready_events: list[Event | None]
    deferred: bool
    trace: IterationTrace | None
    step: int = 0
    missing: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    units: list[ScheduledUnit] = field(default_factory=list)
    first_ready: Event | None = None
    backward_ended: Event | None = None
    reduced: Event | None = None
    said: RankFlags = NOTHING
    joined: bool = False
    flushed: bool = False
    one_by_one: bool = False


def _is_reduced(work: Work) -> bool:
    """False also where it has failed; never waits."""
    try:
        return work.is_done() and work.wait(WAIT_SLICE_S)
    except CommError:
        return False


class GradientPipeline:
    """Keeps the gradients of one set of parameters equal on all ranks.

    Constructing, `finish` and `set_plans` are collective; `ready` may be called in any order and not at all for some
    parameters, whose current gradient, or zeros, is reduced then.

    Attributes:
        iteration: iterations finished so far.
        plans: by which units are sent now, one a layout.
        n_params: how many parameters it has.
        profiling: the order of the gradients is profiled in this iteration; the same on all ranks.
        complete: all gradients of this iteration are reduced.
        problem: what makes the gradients of this iteration undefined; empty until they are reduced, and if all is well.
        in_flight: what the device may still be busy with.
        compressed: carries units in fewer bytes; None = all travel as they are.
        pace: what all ranks have said of reductions with `say_pace`, by the last iteration; with streams, by the one
            before it.
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
        """Collective.

        Args:
            params: parameters of which gradients are expected, in the same order on all ranks.
            names: for messages, one a parameter.
            control: the ranks.
            router: carries the units; closed by the caller.
            reduction: what is done to every gradient.
            default_plan: the plan of a new layout; the same on all ranks.
            unused_as_none: gradients that no rank has computed are None afterwards, not zeros.
            lossy: plans may compress units, if `reduction` does not.
            rank: by which messages name this one; None = its rank among those of `control`.
        """
        self._rank = control.rank if rank is None else rank
        self._params, self._names, self.n_params = list(params), list(names), len(params)
        self._control, self._router, self._reduction = control, router, reduction
        self._default_plan, self._unused_as_none = default_plan, unused_as_none
        self._device = router.device
        self._device.users += 1
        self.compressed: CompressedUnits | None = None
        if (lossy or reduction.compression is not None) and not router.device.streams:
            self.compressed = CompressedUnits(
                router, reduction.compression, reduction.feedback, rank=control.rank, size=control.size
            )
        self._negotiation = (
            None if self._device.streams else ReadinessNegotiation(control.duplicate(), control.failures)
        )
        self._one_at_a_time = free_in_forked_children(threading.Lock())
        self.iteration = 0
        self.problem = ""
        self._all_used = False  # this rank has a gradient of every parameter in this iteration
        self.pace = Drift.USUAL
        self.in_flight = InFlight(self._device)
        self._order, self._edits = OrderProfiling(), EditCheck()
        self._buffers = self._make_buffers(range(self.n_params)[::-1])
        self._begin_iteration()

    # ── layouts and plans ────────────────────────────────────────────────────────────────────────────────────────

    def _make_buffers(self, order: Sequence[int]) -> FlatBuffers:
        """Collective: flat buffers in this order of the parameters, which leave by the default plans."""
        self._device.synchronise()  # nothing may use the old ones any more
        buffers = FlatBuffers(
            order,
            self._params,
            self._names,
            reduction=self._reduction,
            router=self._router,
            n_flags=FLAG_COUNT + (self.n_params if self._unused_as_none else 0),
        )
        self._flags = FlagTraffic(self._device, buffers.flags[:FLAG_COUNT])
        # Where gradients may be None: one a parameter, by position, which is above zero if any rank has its gradient.
        self._usage = buffers.flags[FLAG_COUNT:]
        self._install([self._default_plan(layout) for layout in buffers.layouts], buffers)
        return buffers

    def _install(self, plans: Sequence[CommPlan], buffers: FlatBuffers) -> None:
        """Collective: opens the plans' streams; units leave by them from now on, in the order of their last gradients.

        Raises:
            PlanError: a plan does not fit its layout, or has a route or streams that this job does not have.
            TransportError: on all ranks, streams could not be opened.
        """
        if len(plans) != len(buffers.groups):
            raise PlanError(f"{len(plans)} plans for {len(buffers.groups)} layouts")
        for group, plan in zip(buffers.groups, plans, strict=True):
            if plan.numel != group.layout.numel:
                raise PlanError(f"a plan of {plan.numel} elements for a layout of {group.layout.numel}")
            self._router.open_plan(plan)
        # What tells of usage is known at the end only; other flags when the last gradient has come, and so their unit.
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
        """The current layouts, one a dtype; the first has one element more, the control flags."""
        return self._buffers.layouts

    def set_plans(self, plans: Sequence[CommPlan]) -> None:
        """Collective, between iterations: sends units by these plans from now on, one a layout.

        Raises:
            PlanError: a plan does not fit its layout, or has a route or streams that this job does not have.
            MismatchError: on all ranks, if the ranks' plans differ.
        """
        if self.pending:
            raise PlanError("plans change between iterations only, and gradients of this one are in already")
        self._control.require_equal(" ".join(plan.fingerprint() for plan in plans), "the plan")
        self._install(plans, self._buffers)
        self._begin_iteration()

    def overtake(self, pace: IterationPace) -> None:
        """Between iterations, the same on all ranks, until plans change: what forward needs first leaves first."""
        units, _ = self.overtaken(self.plans, pace)
        # NCCL's communicators of one device share one order; all others are on their own.
        order, one_order = self._buffers.order, self._device.streams
        self._schedule = LaunchSchedule(units, order, held=self._has_flags, one_order=one_order)
        self._begin_iteration()

    def overtaken(self, plans: Sequence[CommPlan], pace: IterationPace) -> tuple[list[ScheduledUnit], list[float]]:
        """Units as they would leave by these plans; and when each has what it waits for, after the first gradient."""
        usual = schedule(self._buffers.groups, plans, self._buffers.position)
        units = reorder_units(usual, pace, held=self._has_flags)
        return units, coming_s(units, pace, held=self._has_flags)

    def _has_flags(self, unit: ScheduledUnit) -> bool:
        return self._buffers.has_flags(unit.group, unit.stop)

    def in_layout_order(self, values: Sequence[float]) -> list[float]:
        """Values by parameter index, as reports give them, in the order of the first layout, the flags left out."""
        return [values[index] for index in self._buffers.groups[0].indices]

    # ── what is asked of it between and in iterations ────────────────────────────────────────────────────────────

    def profile_again(self) -> None:
        """Asks for the order to be profiled again in one of the next iterations."""
        self._order.requested = True

    def say_pace(self, pace: Drift) -> None:
        """Between iterations: what this rank finds of reductions; told along with the gradients until it changes."""
        if pace is not self._flags.pace:
            self._flags.pace = pace
            self._begin_iteration()

    @property
    def pending(self) -> bool:
        """Some gradient of this iteration is ready and `finish` has not been called."""
        return bool(self._arrivals.positions)

    @property
    def missing(self) -> list[int]:
        """Parameters whose gradients have not come in this iteration, by index."""
        if len(self._arrivals.positions) == self.n_params:
            return []
        order, arrived = self._buffers.order, set(self._arrivals.positions)
        return sorted(order[position] for position in range(self.n_params) if position not in arrived)

    def missing_names(self) -> list[str]:
        """The same by name."""
        return [self._names[index] for index in self.missing]

    @property
    def can_put_off(self) -> bool:
        """The units of this iteration may be waited for one by one, once they have left."""
        recorded = self._now.trace is not None and self._now.trace.recorded is not None
        return not (self.profiling or self._unused_as_none or recorded or self._buffers.lent)

    @property
    def written(self) -> bool:
        """This rank has written gradients in place before they are reduced: this iteration ends in an error."""
        return bool(self._arrivals.written)

    def detach(self) -> None:
        """Every `.grad` is the user's alone from now on."""
        self.catch_up()
        self._buffers.detach()

    # ── the way of a gradient ────────────────────────────────────────────────────────────────────────────────────

    @property
    def device(self) -> Device:
        """The device of the gradients."""
        return self._device

    def _begin_iteration(self) -> None:
        """Ready for the next backward pass."""
        device, self.profiling = self._device, self._order.active
        if self._reduction.feedback.loaded and self.compressed is None and not device.streams:
            # Of a job that compressed: its debts are paid, though this one does not compress.
            self.compressed = CompressedUnits(
                self._router, None, self._reduction.feedback, rank=self._control.rank, size=self._control.size
            )
            self.compressed.lay_out(self._buffers.groups, self.plans)
        self._flags.write(RankFlags(reprofile=self._order.asks, complete=True))
        traced = timeline.current is not None or recorder.current is not None
        in_order = not (self.profiling or traced)
        on_threads = in_order and self.compressed is None and not device.streams
        self._arrivals = ReadyGradients(self._buffers, beside=on_threads)
        self._now = Iteration(
            in_order=in_order,
            ready_events=[None] * self.n_params if self.profiling else [],
            deferred=device.streams and self.profiling,
            trace=IterationTrace(device, self, self._buffers) if traced else None,
        )
        self._negotiates = self.profiling and not device.streams
        self.complete = False

    def begin_pass(self) -> Container[int]:
        """The first gradient of this iteration, or of another backward pass, comes: how many more must be told at once.

        After so many a unit may leave, if they come in the expected order; all where each must be told.
        """
        now, came = self._now, len(self._arrivals.positions)
        if self._device.streams and self._device.users > 1:
            now.in_order = False  # all ranks launch the pipelines of one GPU in the order of their steps: see `ready`
        if not now.in_order or came == self.n_params:
            return EVERY
        if now.first_ready is None:
            now.first_ready = self._device.record_event(timed=True)
        return frozenset(stop - came for stop in self._schedule.stops) if came else self._schedule.stops

    def come(self, params: Sequence[torch.Tensor]) -> bool:
        """Gradients of these parameters are complete: sends the units that they complete.

        Returns:
            False, and nothing is done: they have not come in the expected order, or each must be told by `ready`.
        """
        now, before = self._now, len(self._arrivals.positions)
        if not now.in_order or not self._arrivals.add_in_order(params):
            return False
        came, course, leaving = len(self._arrivals.positions), self._schedule.course, list[int]()
        while now.step < len(course) and course[now.step][0] <= came:
            leaving += course[now.step][1]
            now.step += 1
        if leaving:
            self._send(leaving, since=before)
        return True

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """The gradient of parameter `index`, its `.grad`, is complete, and had this version when it came. Once each."""
        with self._one_at_a_time:
            now, arrived, device = self._now, self._arrivals, self._device
            if now.in_order or not arrived.positions:
                now.in_order = False
                now.missing = self._schedule.missing([self._buffers.order[place] for place in arrived.positions])
            device.notice_stream()
            if now.trace is not None and now.trace.recorded is not None:
                now.trace.ready.append((index, device.record_event(timed=True)))
            if not arrived.positions:
                # Where several use a device, all ranks issue them in the order of their steps.
                now.deferred = device.streams and (self.profiling or device.users > 1)
                now.first_ready = device.record_event(timed=True)
                if self._negotiates:
                    self._begin_negotiation()
            if self.profiling:
                now.ready_events[index] = device.record_event(timed=True)
            position = self._buffers.position[index]
            arrived.add(position, gradient, version)
            if self._negotiates:
                assert self._negotiation is not None
                self._copy_in()
                # Bits are kept in layout order, so that agreed neighbours are neighbours in the flat buffer.
                self._negotiation.set_ready(position)
            elif not now.deferred and (leaving := self._schedule.count(index, now.missing)):
                self._send(leaving)

    def _send(self, numbers: Sequence[int], *, since: int | None = None) -> None:
        """Copies the gradients that have come into the flat buffers, and submits units, whose gradients are among them.

        On a device with streams this happens beside the backward pass. `since`: see `ReadyGradients.copy_in`.
        """
        with self._device.beside():
            self._copy_in(since)
            self._now.left += numbers
            for number in numbers:
                self._submit(self._now, self._schedule.units[number])

    def _copy_in(self, since: int | None = None) -> None:
        trace = self._now.trace
        begin = None if trace is None else self._device.record_event(timed=True)
        count = self._arrivals.copy_in(since)
        if trace is not None and count:
            trace.copies.append((begin, self._device.record_event(timed=True), count))

    def _prepare(self, copies: DeferredCopies, unit: ScheduledUnit) -> None:
        """Has copied what a unit waits for, and scaled, beside this thread if the unit's stream has one."""
        needed, last, layout = copies.count, unit.due[0], unit.group.layout
        if last in copies.cut:
            start = layout.offsets[unit.group.indices.index(self._buffers.order[last])]
            needed = min(needed, copies.cut[last] - (start - unit.stop) // LARGE_ELEMENTS)

        def act() -> None:
            try:
                copies.copy(needed)
                self._prescale(unit)
            except Exception as err:  # whatever it is, those who wait must hear of it
                self._control.failures.report(self._with_place(err, unit))

        self._router.prepare(act, route=unit.route, stream=unit.stream)

    def _prescale(self, unit: ScheduledUnit) -> None:
        if (factor := self._reduction.prescale) != 1.0:
            self._device.launch(scale_, unit.group.buffer.tensor[unit.start : unit.stop], factor)

    def _submit(self, now: Iteration, unit: ScheduledUnit) -> None:
        reduction, buffer = self._reduction, unit.group.buffer
        copies = self._arrivals.copies
        if copies is not None and copies.copied < copies.count:
            self._prepare(copies, unit)
        else:
            self._prescale(unit)
        issued = None if now.trace is None else self._device.record_event(timed=True)
        carrier = self._router if self.compressed is None or self.profiling else self.compressed
        try:
            work = carrier.all_reduce(
                buffer,
                unit.start,
                unit.stop,
                route=unit.route,
                stream=unit.stream,
                threads=unit.threads,
                nccl=unit.nccl,
                op=reduction.op,
                scale=reduction.postscale,
            )
        except Exception as err:
            error = self._with_place(err, unit)
            raise error from error.__cause__
        now.works.append(work)
        now.units.append(unit)
        if now.trace is not None:
            now.trace.units.append((unit, work, issued))

    @property
    def can_reduce(self) -> bool:
        """Every gradient of this iteration has come, so that nothing need be known of what the script does next."""
        if self.complete or len(self._arrivals.positions) < self.n_params:
            return False
        # All ranks issue the optimizers of one GPU in the order of their steps.
        return not (self._now.deferred and self._device.users > 1)

    def catch_up(self) -> None:
        """Copies here what other threads have yet to copy, before the script may look at `.grad`, or write its source.

        For callers: where a backward pass ends, or has raised, and nobody waits for what has come.
        """
        if self._arrivals.copies is not None:
            self._arrivals.copies.copy(self._arrivals.copies.count)

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that others have begun; waits for nobody."""
        if not self._arrivals.positions:
            self._now.joined = True
            self._flags.pace = Drift.USUAL  # without data it knows nothing of that
            for param in self._params:
                param.grad = None
        self.flush()

    def flush(self) -> None:
        """Puts in what did not come, and sends what has not left; waits for nobody. For callers: if it `can_reduce`."""
        now, arrived = self._now, self._arrivals
        if now.flushed:
            return
        now.flushed, self.problem = True, ""
        now.backward_ended = self._device.record_event(timed=True)
        arrived.own = len(arrived.positions)
        if self._unused_as_none:
            self._write_usage()
        if not self.can_reduce:  # before `step()`, so that the flags have not left
            self._flags.write(
                RankFlags(written=bool(arrived.written), replaced=arrived.replaced, reprofile=self._order.asks)
            )
        if now.first_ready is None:
            now.first_ready = now.backward_ended
            if self._negotiates:
                self._begin_negotiation()
        if arrived.own < self.n_params:
            came = set(arrived.positions)
            for position in range(self.n_params):
                if position not in came:
                    arrived.put_in(position)
        if self._negotiates:
            assert self._negotiation is not None
            self._copy_in()
            self._negotiation.end()
        elif len(now.left) < len(self._schedule.units) or arrived.own < self.n_params:
            left = set(now.left)
            self._send([number for number in range(len(self._schedule.units)) if number not in left])

    def reduce(self, interrupted: Interrupted | None) -> bool:
        """At the end of a backward pass, if it `can_reduce`: blocks until all gradients are reduced, as DDP does.

        Then everything that is done to gradients before the update is done to the reduced ones.

        Args:
            interrupted: asked now and then whether this rank is needed elsewhere; it or `finish` is to be called again
                then, and goes on waiting.

        Returns:
            Every `.grad` holds the reduced gradient.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        self.flush()
        now, device = self._now, self._device
        if self._negotiates:
            assert self._negotiation is not None
            try:
                if not self._negotiation.wait(interrupted):
                    return False
            except CommError as err:
                error = self._with_place(err)
                raise error from error.__cause__
        if not self._wait_for(now.works, now.units, interrupted):
            self.catch_up()
            return False
        self.complete = True
        if device.streams:
            device.release()
        now.reduced = self._last_done() if now.one_by_one else device.record_event(timed=True)
        self._arrivals.hand_out(self._read_unused())
        if not device.streams:
            now.said = self._flags.read()
        self.problem = self._edits.look(self._arrivals, self._buffers.names, now.said)
        return True

    def _write_usage(self) -> None:
        """Set this rank's usage flags: 1 for each parameter with a gradient."""
        arrived = self._arrivals
        present: Sequence[int] = ()
        if not self._now.joined:
            present = arrived.positions if arrived.own == self.n_params else arrived.present
        self._all_used = len(present) == self.n_params
        if self._all_used:
            self._device.launch(self._usage.fill_, 1)
            return
        usage = self._device.pinned(self.n_params, self._usage.dtype)
        usage[list(present)] = 1
        self._device.launch(copy_, self._usage, usage)

    def _read_unused(self) -> Sequence[int]:
        """Return the positions of parameters of which no rank has a gradient.

        On a device with streams this blocks where this rank lacks gradients, as DDP does with unused parameters. It
        does not block where this rank has all gradients, since none is unused then.
        """
        if not self._unused_as_none or self._all_used:
            return ()
        usage = self._usage
        if self._device.streams:
            usage = self._device.pinned(self.n_params, self._usage.dtype)
            self._device.launch(copy_, usage, self._usage)
            self._device.wait_for(self._device.record_event())
        unused: list[int] = (usage <= 0).nonzero()[:, 0].tolist()
        return unused

    def _wait_for(self, works: Sequence[Work], units: Sequence[ScheduledUnit], interrupted: Interrupted | None) -> bool:
        """As `Router.wait_for`; an error says in which unit of which iteration this rank was."""
        try:
            return self._router.wait_for(works, interrupted=interrupted)
        except CommError as err:
            unit = next((unit for unit, work in zip(units, works, strict=True) if not _is_reduced(work)), None)
            error = self._with_place(err, unit)
            raise error from error.__cause__

    def where(self) -> str:
        """Where this rank is, for messages about faults that are of no unit: in which iteration of which gradients."""
        names = self._names
        which = f"{names[0]} … {names[-1]} ({len(names)})" if len(names) > 1 else "".join(names)
        return f"{self._place}, gradients of {which or 'nothing'}"

    @property
    def _place(self) -> str:
        return f"rank {self._rank}, iteration {self.iteration}"

    def _with_place(self, error: Exception, unit: ScheduledUnit | None = None) -> CommError:
        """The same error, which says where this rank was: in which iteration, and at which unit of which gradients."""
        place = self._place
        if isinstance(error, CommError) and place in str(error):
            return error
        if unit is not None:
            units, names = self._schedule.units, [self._names[index] for index in unit.members]
            which = f"unit {units.index(unit) + 1} of {len(units)}" if unit in units else "a unit"
            few = 0 < len(names) <= NAMED_GRADIENTS
            what = ", ".join(names) if few else unit.group.layout.describe(unit.start, unit.stop)
            place += f", {which} ({what}) on stream {unit.stream}"
        if isinstance(error, CommError):
            return caused(type(error)(f"{error} ({place})"), error.__cause__)
        carrier = "communication" if unit is None else unit.route[0].value
        return caused(CommError(f"{carrier} failed: {error!r} ({place})"), error)

    def _last_done(self) -> Event:
        """When the last unit was reduced, which nobody may have waited for then."""
        moments = [self._now.backward_ended, *(work.times()[1] for work in self._now.works)]
        known = [moment for moment in moments if moment is not None]
        if self._device.streams or len(known) < len(moments):
            return self._device.record_event(timed=True)
        return max(known)

    def wait_for(self, index: int, interrupted: Interrupted | None) -> list[int]:
        """Once all units have left: blocks until the units of one gradient are reduced.

        Returns:
            All parameters that have elements in these units only; none if it was interrupted.

        Raises:
            CommError: as `reduce`.
        """
        now = self._now
        now.one_by_one = True
        places = [now.left.index(number) for number in self._schedule.units_of[index]]
        works, units = [now.works[place] for place in places], [now.units[place] for place in places]
        return self._schedule.together(index) if self._wait_for(works, units, interrupted) else []

    def hand_out_some(self, indices: Sequence[int]) -> None:
        """Hands out gradients that `wait_for` has returned, before all are reduced."""
        self._arrivals.hand_out_some([self._buffers.position[index] for index in indices])

    # ── its end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, *, joined: bool = False) -> IterationReport:
        """Collective: blocks until every gradient is reduced, and ends the iteration.

        Args:
            joined: this rank has no data any more and takes part with zeros, for the others' sake.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        self._control.failures.raise_if_failed()
        if joined:
            self.contribute_zeros()
        if not self.complete:
            self.reduce(None)
        profiled = self.profiling and self._order.ends_with(self.iteration)
        report = self._measure(profiled=profiled)
        said = self._now.said
        if self._device.streams:
            said = self._flags.read()
            self.problem = self._edits.hear_late(self.problem, said)
        self.pace = Drift.USUAL
        if profiled:
            self._end_profiling()
        elif not self.profiling:
            self._order.watch(self.iteration, self._arrivals.positions[: self._arrivals.own], self._buffers)
            self.pace = said.pace
            if said.reprofile:
                logger.info("gradients come in another order, or in another form, than they did: profiling them again")
                self._order.begin(self.iteration + 1)
                self._flags.forget()
                self.pace = Drift.USUAL  # what it is compared with was in another order
        self._begin_iteration()
        self.iteration += 1
        return report

    def _measure(self, *, profiled: bool) -> IterationReport:
        """What the iteration measured; waits for the device, for the iteration before at most unless it is recorded."""
        now, device = self._now, self._device
        events = measured = IterationEvents(self.iteration, now.first_ready, now.backward_ended, now.reduced)
        if device.streams:
            self.in_flight.units = list(zip(self._schedule.units, now.works, strict=True))
            before = self.in_flight.add(events)
            measured = events if self.profiling else before
            # The host is never more than one iteration ahead.
            device.wait_for(measured.reduced if now.trace is None else events.reduced)
        if now.trace is not None:
            now.trace.write(events, profiling=self.profiling)

        def after_first_s(event: Event | None) -> float:
            return 0.0 if event is None else max(0.0, device.elapsed_s(events.first_ready, event))

        return IterationReport(
            span_s=device.elapsed_s(measured.first_ready, measured.reduced),
            backward_s=max(0.0, device.elapsed_s(measured.first_ready, measured.backward_ended)),  # may be none at all
            ready_s=tuple(map(after_first_s, now.ready_events)),
            profiled=profiled,
        )

    def _end_profiling(self) -> None:
        """Collective: buffers in the agreed order, new ones if the order or a parameter has changed."""
        before = self._buffers
        arrived = [before.order[position] for position in self._arrivals.positions]
        order = agree_on_order(arrived, self._control, counts=not self._now.joined)
        outdated = bool(self._control.maximum(np.array([float(before.outdated)]))[0])
        if order != before.order or outdated:
            self._buffers = self._make_buffers(order)
            self._buffers.take_over(before)

    # ── while the order is profiled on the host ──────────────────────────────────────────────────────────────────

    def _begin_negotiation(self) -> None:
        """The ranks begin to agree on what is ready: neighbours leave together that are worth a unit of the plans."""
        buffers, negotiation = self._buffers, self._negotiation
        assert negotiation is not None
        groups = list(zip(buffers.groups, self.plans, strict=True))
        unit_bytes = [unit.numel * group.layout.itemsize_bytes for group, plan in groups for unit in plan.units]
        sizes_bytes = [view.numel() * view.element_size() for view in buffers.views]
        if self._unused_as_none:  # a bit of their own for the flags, which is set with the others at the end
            sizes_bytes.append(0)
        # Of the streams that a plan may use only those are open that its units do use; units take them in turn.
        lanes = [
            sorted({unit.stream for unit in plan.units if unit.algorithm is plan.units[0].algorithm})
            for plan in self.plans
        ]
        turn, to_agree = 0, len(sizes_bytes)
        largest_bytes = max([1, *unit_bytes])

        def issue_agreed(now: Iteration, positions: list[int]) -> None:
            """In the negotiation's thread: reduces gradients that are ready everywhere, the flags last."""
            nonlocal turn, to_agree
            agreed = {buffers.order[position] for position in positions if position < len(buffers.order)}
            for (group, plan), streams in zip(groups, lanes, strict=True):
                offsets, limit = group.layout.offsets, max(1, largest_bytes // group.layout.itemsize_bytes)
                runs: list[tuple[int, int]] = []
                for position, index in enumerate(group.indices):
                    start, stop = offsets[position], offsets[position + 1]
                    if index not in agreed:
                        continue
                    if runs and runs[-1][1] == start and stop - runs[-1][0] <= limit:
                        runs[-1] = (runs[-1][0], stop)
                    else:
                        runs.append((start, stop))
                for start, stop in runs:
                    for low in range(start, stop, limit):
                        route, stream = (plan.transport, plan.units[0].algorithm), streams[turn % len(streams)]
                        turn += 1
                        self._submit(now, ScheduledUnit(group, low, min(low + limit, stop), stream, route))
            to_agree -= len(positions)
            if not to_agree:
                (first, plan), first_unit = groups[0], self.plans[0].units[0]
                start, stop = first.layout.offsets[-2:]
                route = (plan.transport, first_unit.algorithm)
                self._submit(now, ScheduledUnit(first, start, stop, first_unit.stream, route))

        negotiation.begin(
            np.array(sizes_bytes, dtype=np.int64),
            granularity_bytes=largest_bytes,
            on_agreed=partial(issue_agreed, self._now),
        )

    def close(self) -> bool:
        """Ends the threads; gradients keep their values. Once. False if a thread stays, and uses its communicator."""
        self._device.users -= 1
        del self._default_plan  # it leads back to whom it belongs
        ended = self.compressed is None or self.compressed.close()
        return (self._negotiation is None or self._negotiation.close()) and ended
