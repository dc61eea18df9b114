"""Reduces gradients over all ranks while the backward pass still computes others.

A module of its own because it is the hot path: what runs here for each gradient is all that Python costs. It knows
parameters only as things that have a `.grad`.

*Learning* iterations negotiate which gradients are ready (`negotiation`), because the order is not known. From then
on iterations are *scheduled*: the flat buffers are laid out in the agreed order, and units are issued in that order
as soon as their gradients are in, straight from the hook, without a control message.

A fixed order costs time if gradients begin to come in another one. Each rank therefore votes, with elements at the
end of the first flat buffer that are reduced along with the gradients: if anyone asks for it all ranks learn anew in
the next iteration. In the same way a rank says that it has data of its own, so that those without (see `finish`) know
when they are all alone. Votes are read an iteration later, so that no device is waited for.

On a device with streams (`device`) a call only starts things. There learning iterations do not negotiate: everything
is issued at the end, in one order, because NCCL needs the same order on all ranks over all its communicators; for the
same reason hooks issue nothing where several synchronisers share a device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.comm import timeline
from sirtaki.comm.device import Event
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import CommPlan
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import Work
from sirtaki.comm.transports.scaling import scale_
from sirtaki.errors import PlanError

from .buffers import GradientGroup, HasGrad, Reduction, ScheduledUnit, group_by_dtype, schedule
from .control_flags import FLAG_COUNT, HAS_DATA, REPROFILE, ControlFlags
from .in_flight import InFlight, IterationEvents
from .iteration_trace import IssuedUnit, IterationTrace
from .negotiation import ReadinessNegotiation

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

LEARNING_ITERATIONS = 2
"""The first iteration runs with cold caches; its order is kept only if the second one cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """What one iteration measured on this rank.

    Attributes:
        span_s: from the first ready gradient to the last reduced one; on a device with streams, of the iteration
            before, except in learning iterations.
        backward_s: from the first ready gradient to the end of the backward pass, of the same iteration.
        ready_s: when each gradient became ready after the first, by parameter index, `(n_gradients,)`; only
            learning iterations record it.
        learned: the order was learned (again) in this iteration: layouts may be new, and plans the default again.
        alive: some rank has taken part with data of its own.
    """

    span_s: float
    backward_s: float
    ready_s: tuple[float, ...] = ()
    learned: bool = False
    alive: bool = True


class Synchroniser:
    """Keeps the gradients of one set of parameters equal on all ranks.

    Call `ready(i)` when the gradient of parameter `i` is complete and `finish()` when the backward pass has ended;
    after `finish` every `.grad` holds the reduced gradient. Constructing, `finish` and `set_plans` are collective;
    `ready` may be called in any order and not at all for some parameters, whose present gradient, or zeros, is
    reduced then.
    """

    def __init__(
        self,
        params: Sequence[HasGrad],
        names: Sequence[str],
        *,
        control: ControlPlane,
        router: Router,
        reduction: Reduction,
        default_plan: Callable[[GradientLayout], CommPlan],
    ) -> None:
        """Collective.

        Args:
            params: parameters of which gradients are expected, in the same order on all ranks.
            names: for messages, one a parameter.
            control: the ranks.
            router: carries the units; closed by the caller.
            reduction: what is done to every gradient.
            default_plan: the plan of a new layout; the same on all ranks.
        """
        self._params, self._names = list(params), list(names)
        self._control, self._router, self._reduction = control, router, reduction
        self._default_plan = default_plan
        self._device = router.device
        self._negotiation = (
            None if self._device.streams else ReadinessNegotiation(control.duplicate(), control.failures)
        )
        self._device.users += 1
        self.iteration = 0
        self._learn_from = 0  # iteration in which the present learning began
        self._learning = True
        self._ready: Callable[[int], None] = self._ready_learning
        # Autograd computes the gradients of each device in a thread of its own.
        self._one_at_a_time = threading.Lock() if len({param.device for param in params}) > 1 else None
        self._groups: list[GradientGroup] = []
        self._disorder, self._wants_to_relearn = 0, False
        self._joined = False
        self._next_vote = 0
        self._in_flight = InFlight(self._device)
        self._build_buffers(list(range(len(self._params)))[::-1])

    # ── layouts and plans ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """The present layouts, one a dtype; the first has more elements, the votes."""
        return tuple(group.layout for group in self._groups)

    def in_layout_order(self, values: Sequence[float]) -> list[float]:
        """Values by parameter index, as reports give them, in the order of the first layout, the votes left out."""
        return [values[index] for index in self._groups[0].indices]

    def _build_buffers(self, order: list[int]) -> None:
        """Collective: new flat buffers in the given order of parameters; gradients that are there move along."""
        self._device.synchronise()  # nothing may use the old ones any more
        kept = {index: view for group in self._groups for index, view in zip(group.indices, group.views, strict=True)}
        self._groups = group_by_dtype(order, self._params, self._names, reduction=self._reduction, router=self._router)
        self._views = [torch.empty(0)] * len(self._params)
        for group in self._groups:
            for index, view in zip(group.indices, group.views, strict=True):
                if self._params[index].grad is kept.get(index, view):
                    self._device.launch(view.copy_, kept[index])
                    self._params[index].grad = view
                self._views[index] = view
        self._position = {index: position for position, index in enumerate(order)}
        self._order = order
        # Gradients of another dtype or device than their flat buffer's travel as copies.
        self._adopts = [
            param.dtype == view.dtype and param.device == view.device
            for param, view in zip(self._params, self._views, strict=True)
        ]
        self._flags = ControlFlags(self._device, self._groups[0].buffer.tensor[-FLAG_COUNT:])
        self._install([self._default_plan(group.layout) for group in self._groups])

    def set_plans(self, plans: Sequence[CommPlan]) -> None:
        """Collective, between iterations: sends units by these plans from now on, one a layout.

        Raises:
            PlanError: a plan does not fit its layout, or has a route or streams that this job does not have.
            MismatchError: on all ranks, if the ranks' plans differ.
        """
        if self._arrived:
            raise PlanError("plans change between iterations only, and gradients of this one are in already")
        self._control.require_equal(" ".join(plan.fingerprint() for plan in plans), "the plan")
        self._install(plans)

    def _install(self, plans: Sequence[CommPlan]) -> None:
        if len(plans) != len(self._groups):
            raise PlanError(f"{len(plans)} plans for {len(self._groups)} layouts")
        for group, plan in zip(self._groups, plans, strict=True):
            if plan.numel != group.layout.numel:
                raise PlanError(f"a plan of {plan.numel} elements for a layout of {group.layout.numel}")
            self._router.open_plan(plan)
        self._units = schedule(self._groups, plans, self._position)
        units_of: list[list[int]] = [[] for _ in self._params]
        for serial, unit in enumerate(self._units):
            for index in unit.members:
                units_of[index].append(serial)
        self._units_of = [tuple(serials) for serials in units_of]
        self._plans = tuple(plans)
        self._reset()

    def _reset(self) -> None:
        """Ready for the next backward pass."""
        # The last entry is never zero: `ready` need not ask whether there is a next unit.
        self._missing = [*(len(unit.members) for unit in self._units), 1]
        self._flags.write(relearn=self._wants_to_relearn, alive=True)
        self._next_unit = 0
        self._arrived: list[int] = []
        self._ready_events: list[Event] = [None] * len(self._params) if self._learning else []
        self._copied = 0
        self._works: list[Work] = []
        self._first_ready: Event = None
        wanted = timeline.active()
        self._trace = None if wanted is None else IterationTrace(wanted, self._device)
        if not self._device.streams:
            self._ready = self._ready_learning if self._learning else self._ready_scheduled
        elif self._learning or self._device.users > 1:
            self._ready = self._ready_deferred
        else:
            self._ready = self._ready_on_streams

    # ── the hot path ─────────────────────────────────────────────────────────────────────────────────────────────

    def ready(self, index: int) -> None:
        """The gradient of parameter `index` is complete. At most once an iteration."""
        if self._one_at_a_time is None:
            self._ready(index)
        else:
            with self._one_at_a_time:
                self._ready(index)

    def _ready_scheduled(self, index: int) -> None:
        arrived = self._arrived
        if not arrived:
            self._first_ready = self._device.record_event()
        arrived.append(index)
        missing = self._missing
        for unit in self._units_of[index]:
            missing[unit] -= 1
        if not missing[self._next_unit]:
            self._issue_complete_units()

    def _ready_on_streams(self, index: int) -> None:
        if not self._arrived and self._device.users > 1:  # another one has come since the last iteration
            self._ready = self._ready_deferred
            self._ready_deferred(index)
            return
        self._device.notice_stream()
        self._ready_scheduled(index)

    def _ready_deferred(self, index: int) -> None:
        """Leaves the issuing to `finish`."""
        self._device.notice_stream()
        if not self._arrived:
            self._first_ready = self._device.record_event()
        if self._learning:
            self._ready_events[index] = self._device.record_event()
        self._arrived.append(index)

    def _issue_complete_units(self) -> None:
        with self._device.beside():
            self._copy_arrived()
            missing, units = self._missing, self._units
            number = self._next_unit
            while number < len(units) and not missing[number]:
                self._issue(units[number])
                number += 1
            self._next_unit = number

    def _copy_arrived(self) -> None:
        """Copies the gradients that came since the last time into the flat buffers, all at once."""
        fresh = self._arrived[self._copied :]
        self._copied = len(self._arrived)
        params, views, targets, sources = self._params, self._views, [], []
        for index in fresh:
            gradient, view = params[index].grad, views[index]
            if gradient is not view and gradient is not None:
                targets.append(view)
                sources.append(gradient)
        begin = None if self._trace is None else self._device.record_event()
        if targets:
            with torch.no_grad():  # gradients made with create_graph=True have a graph, the reduced ones have none
                self._device.launch(torch._foreach_copy_, targets, sources)
            self._device.keep(sources)
        adopts = self._adopts
        for index in fresh:
            if adopts[index]:
                params[index].grad = views[index]
        if self._trace is not None and fresh:
            self._trace.copied(begin, len(fresh))

    def _issue(self, unit: ScheduledUnit) -> None:
        reduction, tensor = self._reduction, unit.group.buffer.tensor
        if reduction.prescale != 1.0:
            self._device.launch(scale_, tensor[unit.start : unit.stop], reduction.prescale)
        issued = None if self._trace is None else self._device.record_event()
        work = self._router.all_reduce(
            unit.group.buffer,
            unit.start,
            unit.stop,
            route=unit.route,
            stream=unit.stream,
            threads=unit.threads,
            op=reduction.op,
            scale=reduction.postscale,
        )
        self._works.append(work)
        if self._trace is not None:
            self._trace.units.append(
                IssuedUnit(
                    layout=unit.group.layout,
                    start=unit.start,
                    stop=unit.stop,
                    stream=unit.stream,
                    transport=unit.route[0],
                    work=work,
                    issued=issued,
                )
            )

    # ── learning iterations ──────────────────────────────────────────────────────────────────────────────────────

    def _ready_learning(self, index: int) -> None:
        if not self._arrived:
            self._begin_negotiation()
        self._arrived.append(index)
        self._ready_events[index] = self._device.record_event()
        self._copy_arrived()
        # Bits are kept in layout order, so that agreed neighbours are neighbours in the flat buffer.
        assert self._negotiation is not None
        self._negotiation.set_ready(self._position[index])

    def _begin_negotiation(self) -> None:
        self._first_ready = self._device.record_event()
        self._round_robin = 0
        sizes = np.array(
            [self._params[index].numel() * self._views[index].element_size() for index in self._order], dtype=np.int64
        )
        granularity = max(1, self._unit_bytes())
        assert self._negotiation is not None
        self._negotiation.begin(sizes, granularity_bytes=granularity, on_agreed=self._issue_agreed)

    def _unit_bytes(self) -> int:
        """The largest unit of the present plans: what is worth sending at once."""
        return max(
            (
                unit.numel * plan_layout.itemsize_bytes
                for plan, plan_layout in zip(self._plans, self.layouts, strict=True)
                for unit in plan.units
            ),
            default=1,
        )

    def _issue_agreed(self, positions: list[int]) -> None:
        """In the negotiation's thread: reduces gradients that are ready everywhere, neighbours together."""
        agreed = {self._order[position] for position in positions}
        for group, plan in zip(self._groups, self._plans, strict=True):
            offsets, limit = group.layout.offsets, max(1, self._unit_bytes() // group.layout.itemsize_bytes)
            runs: list[tuple[int, int]] = []
            for position, index in enumerate(group.indices):
                start, stop = offsets[position], offsets[position + 1]
                if index not in agreed or start == stop:
                    continue
                if runs and runs[-1][1] == start and stop - runs[-1][0] <= limit:
                    runs[-1] = (runs[-1][0], stop)
                else:
                    runs.append((start, stop))
            route = (plan.transport, plan.units[0].algorithm) if plan.units else None
            for start, stop in runs:
                assert route is not None
                for low in range(start, stop, limit):
                    stream = self._round_robin % plan.streams
                    self._round_robin += 1
                    self._issue(ScheduledUnit(group, low, min(low + limit, stop), stream, route))

    def _finish_learning(self) -> list[int] | None:
        """Collective: the agreed order once enough iterations have been watched, else None."""
        if self.iteration + 1 - self._learn_from < LEARNING_ITERATIONS:
            return None
        positions = np.empty(len(self._params))
        positions[self._arrived] = np.arange(len(self._params))
        mean = self._control.total(positions) / self._control.size
        return [int(index) for index in np.argsort(mean, kind="stable")]

    # ── the end of an iteration ──────────────────────────────────────────────────────────────────────────────────

    @property
    def learning(self) -> bool:
        """The present iteration is a learning one; the same on all ranks."""
        return self._learning

    @property
    def pending(self) -> bool:
        """Some gradient of this iteration is ready and `finish` has not been called."""
        return bool(self._arrived)

    def missing_names(self) -> list[str]:
        """Parameters whose gradients have not come in this iteration."""
        arrived = set(self._arrived)
        return [name for index, name in enumerate(self._names) if index not in arrived]

    @torch.no_grad()
    def finish(self, *, joined: bool = False) -> IterationReport:
        """Collective: the backward pass has ended; blocks until every gradient is reduced.

        Args:
            joined: this rank has no data any more and takes part with zeros, for the others' sake.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        self._control.failures.check()
        called = self._device.record_event()
        self._joined = joined and not self._arrived
        if self._joined:
            self._flags.write(relearn=self._wants_to_relearn, alive=False)
            for param in self._params:
                param.grad = None
        if not self._arrived:
            self._first_ready = called
            if self._learning and self._negotiation is not None:
                self._begin_negotiation()
        n_arrived = len(self._arrived)
        self._complete_missing()
        if self._learning and self._negotiation is not None:
            self._negotiation.finish()
        else:
            self._missing = [0] * len(self._units) + [1]
            self._issue_complete_units()
        self._router.wait_for(self._works)
        self._device.release()
        self._copy_back()
        if self._device.streams:
            self._in_flight.units = list(zip(self._units, self._works, strict=True))
        return self._report(
            IterationEvents(self.iteration, self._first_ready, called, self._device.record_event()), n_arrived
        )

    def _report(self, events: IterationEvents, n_arrived: int) -> IterationReport:
        """Collective: closes the books on this iteration."""
        device = self._device
        self._in_flight.add(events)
        measured = self._in_flight.before if device.streams and not self._learning else events
        # The host is never more than one iteration ahead.
        device.wait_for(measured.reduced if self._trace is None else events.reduced)
        if self._trace is not None:
            self._trace.write(
                iteration=self.iteration,
                learning=self._learning,
                first_ready=events.first_ready,
                backward_ended=events.backward_ended,
                reduced=events.reduced,
            )
        ready_s = (
            tuple(
                0.0 if event is None else max(0.0, device.elapsed_s(events.first_ready, event))
                for event in self._ready_events
            )
            if self._learning
            else ()
        )
        relearn = self._flags.is_set(REPROFILE)
        self._flags.forget()
        if not self._learning:  # in which negotiation may have issued the gradients alone
            self._flags.read_back()
        report = IterationReport(
            span_s=device.elapsed_s(measured.first_ready, measured.reduced),
            backward_s=max(0.0, device.elapsed_s(measured.first_ready, measured.backward_ended)),  # may be none at all
            ready_s=ready_s,
            alive=self._is_anyone_alive(),
            learned=self._end_iteration(n_arrived, relearn=relearn),
        )
        self.iteration += 1
        return report

    def _is_anyone_alive(self) -> bool:
        """Collective: some rank has data of its own."""
        if self._learning:
            return bool(self._control.total(np.array([0.0 if self._joined else 1.0]))[0] > 0.0)
        return not self._joined or self._flags.is_set(HAS_DATA)

    @property
    def in_flight(self) -> InFlight:
        """What the device may still be busy with."""
        return self._in_flight

    def _complete_missing(self) -> None:
        """Gradients that did not come: those there are count as they are, the others as zeros, as in Horovod."""
        if len(self._arrived) < len(self._params):
            arrived = set(self._arrived)
            for index, param in enumerate(self._params):
                if index not in arrived:
                    if param.grad is None:
                        self._device.launch(self._views[index].zero_)
                        if not self._adopts[index]:
                            param.grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
                    self._arrived.append(index)
        self._copy_arrived()

    def _copy_back(self) -> None:
        """Gradients that travelled as copies go back to where they came from."""
        if not all(self._adopts):
            pairs = [
                (param.grad, view)
                for param, view, adopts in zip(self._params, self._views, self._adopts, strict=True)
                if not adopts and param.grad is not None
            ]
            self._device.launch(torch._foreach_copy_, [grad for grad, _ in pairs], [view for _, view in pairs])

    # ── changes of order ─────────────────────────────────────────────────────────────────────────────────────────

    def _watch_order(self, n_arrived: int) -> None:
        """Asks for a new order if gradients came far from where they were expected, three times in a row."""
        arrived = self._arrived[:n_arrived]
        limit = max(8, len(self._order) // 8)
        late = max((place - self._position[index] for place, index in enumerate(arrived)), default=0)
        self._disorder = self._disorder + 1 if late > limit else 0
        self._wants_to_relearn = self._disorder >= 3 and self.iteration >= self._next_vote

    def _end_iteration(self, n_arrived: int, *, relearn: bool) -> bool:
        """Collective: what the next iteration will be. True if the order has just been learned."""
        if self._learning:
            order = self._finish_learning()
            if order is None:
                self._reset()
                return False
            self._learning = False
            self._reset()
            if order != self._order:
                self._build_buffers(order)
            # Each new learning doubles the time to the next one: an order that never settles is not chased.
            self._next_vote = self.iteration + 2 * (self.iteration - self._learn_from + 50)
            return True
        if self._arrived == self._order:
            self._disorder, self._wants_to_relearn = 0, False
        else:
            self._watch_order(n_arrived)
        if relearn:
            logger.info("gradients come in another order than they did; learning it anew")
            self._learning, self._learn_from = True, self.iteration + 1
            self._disorder, self._wants_to_relearn = 0, False
            self._flags.forget()
        self._reset()
        return False

    def close(self) -> None:
        """Ends the negotiation thread; gradients keep their values. Once."""
        self._device.users -= 1
        if self._negotiation is not None:
            self._negotiation.close()
