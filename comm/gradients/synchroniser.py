"""Reduces gradients over all ranks while the backward pass still computes others.

In *order-profiling* iterations the ranks negotiate which gradients are ready (`issuing.NegotiatedIssuing`), because
the order is not known. From then on iterations are *scheduled*: gradients lie in the flat buffers in the agreed order,
and units leave in that order as soon as their gradients are in, straight from the hook, without a control message.

A fixed order costs time if gradients begin to come in another one. Each rank watches that (`order`), and asks with a
control flag that travels along with the gradients (`control_flags`); if anyone asks, all ranks profile the order again
in the next iteration, and rebuild their buffers.

An iteration goes so: `ready` for each gradient, `reduce` at the end of a backward pass if every gradient has come,
and `finish`, which reduces in any case and closes the iteration.
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
from sirtaki.errors import PlanError

from . import lost_edits
from .arrivals import Arrivals
from .buffers import GradientBuffers, HasGrad, Reduction
from .control_flags import FLAG_COUNT, REPROFILE, WRITTEN, ControlFlags, UsageFlags
from .in_flight import InFlight, IterationEvents
from .issuing import Issuing, NegotiatedIssuing, ScheduledIssuing, StreamIssuing
from .iteration import Interrupted, Iteration
from .iteration_trace import IterationTrace
from .negotiation import ReadinessNegotiation
from .order import OrderWatch, agree_on_order
from .schedule import Schedule, schedule

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

PROFILING_ITERATIONS = 2
"""The first iteration runs with cold caches; its order is kept only if the second one cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """What one iteration measured on this rank.

    Attributes:
        span_s: from the first ready gradient to the last reduced one; on a device with streams, of the iteration
            before, except in order-profiling iterations.
        backward_s: from the first ready gradient to the end of the backward pass, of the same iteration.
        ready_s: when each gradient became ready after the first, by parameter index, `(n_gradients,)`; only
            order-profiling iterations record it.
        profiled: the order was profiled in this iteration: layouts may be new, and plans the default again.
    """

    span_s: float
    backward_s: float
    ready_s: tuple[float, ...] = ()
    profiled: bool = False


class Synchroniser:
    """Keeps the gradients of one set of parameters equal on all ranks.

    Constructing, `finish` and `set_plans` are collective; `ready` may be called in any order and not at all for some
    parameters, whose current gradient, or zeros, is reduced then.

    Attributes:
        iteration: iterations finished so far.
        profile_again: this rank wants the order to be profiled again; True until that begins.
        problem: what was done to gradients that makes this iteration's undefined, in words; empty until they are
            reduced, and if all is well.
        in_flight: what the device may still be busy with.
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
        unused_as_none: bool = False,
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
        """
        self._params, self._names = list(params), list(names)
        self._control, self._router, self._reduction = control, router, reduction
        self._default_plan = default_plan
        self._device = router.device
        self._n_flags = FLAG_COUNT + (len(self._params) if unused_as_none else 0)
        self._negotiation = (
            None if self._device.streams else ReadinessNegotiation(control.duplicate(), control.failures)
        )
        self._device.users += 1
        self.iteration = 0
        self.in_flight = InFlight(self._device)
        self._profiling, self._profiled_from = True, 0
        self._order_watch = OrderWatch()
        self._wants_reprofile = False
        self.profile_again = self._warned_of_replacement = self._told_of_writing = False
        self.problem = ""
        # Autograd computes the gradients of each device in a thread of its own.
        self._one_at_a_time = threading.Lock() if len({param.device for param in params}) > 1 else None
        self._build_buffers(list(range(len(self._params)))[::-1], None)

    # ── layouts and plans ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """The current layouts, one a dtype; the first has one element more, the control flags."""
        return self._buffers.layouts

    def in_layout_order(self, values: Sequence[float]) -> list[float]:
        """Values by parameter index, as reports give them, in the order of the first layout, the flags left out."""
        return [values[index] for index in self._buffers.groups[0].indices]

    def _build_buffers(self, order: list[int], before: GradientBuffers | None) -> None:
        """Collective: new flat buffers in the given order of parameters; gradients that are there move along."""
        self._device.synchronise()  # nothing may use the old ones any more
        self._buffers = GradientBuffers(
            order,
            self._params,
            self._names,
            reduction=self._reduction,
            router=self._router,
            n_flags=self._n_flags,
        )
        if before is not None:
            self._buffers.take_over(before)
        flags = self._buffers.flags
        self._flags = ControlFlags(self._device, flags[:FLAG_COUNT])
        self._usage = UsageFlags(self._device, flags[FLAG_COUNT:])
        self._install([self._default_plan(layout) for layout in self._buffers.layouts])

    def set_plans(self, plans: Sequence[CommPlan]) -> None:
        """Collective, between iterations: sends units by these plans from now on, one a layout.

        Raises:
            PlanError: a plan does not fit its layout, or has a route or streams that this job does not have.
            MismatchError: on all ranks, if the ranks' plans differ.
        """
        if self.pending:
            raise PlanError("plans change between iterations only, and gradients of this one are in already")
        self._control.require_equal(" ".join(plan.fingerprint() for plan in plans), "the plan")
        self._install(plans)

    def _install(self, plans: Sequence[CommPlan]) -> None:
        groups = self._buffers.groups
        if len(plans) != len(groups):
            raise PlanError(f"{len(plans)} plans for {len(groups)} layouts")
        for group, plan in zip(groups, plans, strict=True):
            if plan.numel != group.layout.numel:
                raise PlanError(f"a plan of {plan.numel} elements for a layout of {group.layout.numel}")
            self._router.open_plan(plan)
        units = schedule(groups, plans, self._buffers.position)
        # What tells of usage is known at the end only, so the units that carry it never leave before.
        first, flags_start = groups[0], groups[0].layout.offsets[-2]
        self._schedule = Schedule(
            units,
            len(self._params),
            held=lambda unit: self._usage.wanted and unit.group is first and unit.stop > flags_start,
        )
        self._plans = tuple(plans)
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        """Ready for the next backward pass."""
        self._schedule.begin()
        self._flags.write(reprofile=self._wants_reprofile)
        wanted = timeline.active()
        self._arrivals = Arrivals(self._params, self._buffers)
        self._current = Iteration(
            self._arrivals,
            router=self._router,
            reduction=self._reduction,
            trace=None if wanted is None else IterationTrace(wanted, self._device),
            ready_events=[None] * len(self._params) if self._profiling else [],
        )
        self._issuing = self._strategy()
        self._joined = self._flushed = self._complete = False
        self._backward_ended: Event | None = None
        self._reduced: Event | None = None

    def _strategy(self) -> Issuing:
        if self._device.streams:
            return StreamIssuing(self._current, self._schedule, self._device, profiling=self._profiling)
        if self._profiling and self._negotiation is not None:
            return NegotiatedIssuing(
                self._current,
                self._negotiation,
                self._buffers,
                self._plans,
                flags_need_flush=self._usage.wanted,
            )
        return ScheduledIssuing(self._current, self._schedule)

    # ── one iteration ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def profiling(self) -> bool:
        """The order of the gradients is profiled in this iteration; the same on all ranks."""
        return self._profiling

    @property
    def pending(self) -> bool:
        """Some gradient of this iteration is ready and `finish` has not been called."""
        return bool(self._arrivals.indices)

    def detach(self) -> None:
        """Every `.grad` is the user's alone from now on."""
        self._buffers.detach()

    def missing_names(self) -> list[str]:
        """Parameters whose gradients have not come in this iteration."""
        arrived = set(self._arrivals.indices)
        return [name for index, name in enumerate(self._names) if index not in arrived]

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """The gradient of parameter `index`, its `.grad`, is complete, and had this version when it came. Once each."""
        if self._one_at_a_time is None:
            self._issuing.ready(index, gradient, version)
        else:
            with self._one_at_a_time:
                self._issuing.ready(index, gradient, version)

    @property
    def complete(self) -> bool:
        """All gradients of this iteration are reduced."""
        return self._complete

    @property
    def can_reduce(self) -> bool:
        """Every gradient of this iteration has come, so that nothing need be known of what the script does next."""
        if self._complete or len(self._arrivals.indices) < len(self._params):
            return False
        # All ranks issue the optimizers of one GPU in the order of their steps.
        return not (isinstance(self._issuing, StreamIssuing) and self._issuing.deferred and self._device.users > 1)

    def reduce(self, interrupted: Interrupted) -> bool:
        """At the end of a backward pass, if it `can_reduce`: blocks until all gradients are reduced, as DDP does.

        Then everything that is done to gradients before the update is done to the reduced ones.

        Args:
            interrupted: asked now and then whether this rank is needed elsewhere; `finish` goes on waiting then.

        Returns:
            Every `.grad` holds the reduced gradient.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        return self._reduce(interrupted)

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that others have begun; waits for nobody."""
        self._join()
        self.flush()

    def _join(self) -> None:
        if not self._arrivals.indices:
            self._joined = True
            for param in self._params:
                param.grad = None

    def flush(self) -> None:
        """Sends what has not left; waits for nobody. For callers outside: if it `can_reduce`."""
        if self._flushed:
            return
        self._flushed, self.problem = True, ""
        self._backward_ended = self._device.record_event()
        self._put_in_missing()
        if self._current.first_ready is None:
            self._current.first_ready = self._backward_ended
        self._issuing.flush()

    def _reduce(self, interrupted: Interrupted | None) -> bool:
        """Sends what has not left and waits for all of it; False if it was interrupted, and is to be called again."""
        self.flush()
        if not self._issuing.wait(interrupted):
            return False
        self._complete = True
        self._device.release()
        self._reduced = self._device.record_event()
        self._hand_out()
        return True

    def _put_in_missing(self) -> None:
        arrivals = self._arrivals
        arrivals.own = len(arrivals.indices)
        if self._usage.wanted:
            self._usage.write([] if self._joined else arrivals.indices)
        if arrivals.own < len(self._params):
            if arrivals.written:  # all ranks must hear of it; the flags have not left, since some gradient has not come
                self._flags.write(reprofile=self._wants_reprofile, written=True)
            arrived = set(arrivals.indices)
            for index in range(len(self._params)):
                if index not in arrived:
                    arrivals.put_in(index)

    def _hand_out(self) -> None:
        arrivals = self._arrivals
        unused: list[int] = []
        if self._usage.wanted:
            unused = [index for index, somewhere in enumerate(self._usage.used()) if not somewhere]
        done = arrivals.hand_out(unused)
        if done.written:
            self.problem = lost_edits.written(self._names[done.written[0]], self._missing_from_backward())
        elif not self._device.streams and self._flags.is_set_now(WRITTEN):
            self.problem = lost_edits.WRITTEN_ELSEWHERE
        if done.replaced and not self._warned_of_replacement:
            self._warned_of_replacement = True
            logger.warning(
                "the gradient of %s was replaced before it was reduced, and the reduced one is used; %s",
                self._names[done.replaced[0]],
                lost_edits.REMEDY,
            )

    def _missing_from_backward(self) -> str:
        """The first parameter of which no gradient came from this rank's backward pass; empty if there is none."""
        own = set(self._arrivals.own_indices)
        return next((name for index, name in enumerate(self._names) if index not in own), "")

    def finish(self, *, joined: bool = False) -> IterationReport:
        """Collective: blocks until every gradient is reduced, and ends the iteration.

        Args:
            joined: this rank has no data any more and takes part with zeros, for the others' sake.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        self._control.failures.raise_if_failed()
        if joined:
            self._join()
        if not self._complete:
            self._reduce(None)
        if self._device.streams:
            self.in_flight.units = list(zip(self._schedule.units, self._current.works, strict=True))
        return self._report()

    def _report(self) -> IterationReport:
        """Collective: closes the books on this iteration."""
        device, iteration = self._device, self._current
        assert iteration.first_ready is not None
        events = IterationEvents(self.iteration, iteration.first_ready, self._backward_ended, self._reduced)
        self.in_flight.add(events)
        measured = self.in_flight.before if device.streams and not self._profiling else events
        # The host is never more than one iteration ahead.
        device.wait_for(measured.reduced if iteration.trace is None else events.reduced)
        if iteration.trace is not None:
            iteration.trace.write(
                iteration=self.iteration,
                profiling=self._profiling,
                first_ready=events.first_ready,
                backward_ended=events.backward_ended,
                reduced=events.reduced,
            )
        ready_s = tuple(
            0.0 if event is None else max(0.0, device.elapsed_s(events.first_ready, event))
            for event in iteration.ready_events
        )
        reprofile = self._flags.is_set(REPROFILE)
        if self._device.streams and self._flags.is_set(WRITTEN) and not self._told_of_writing and not self.problem:
            self.problem = lost_edits.WRITTEN_ELSEWHERE_BEFORE
        self._told_of_writing = bool(self.problem)
        self._flags.forget()
        self._flags.read_back()
        profiled = self._end_iteration(reprofile=reprofile)
        return IterationReport(
            span_s=device.elapsed_s(measured.first_ready, measured.reduced),
            backward_s=max(0.0, device.elapsed_s(measured.first_ready, measured.backward_ended)),  # may be none at all
            ready_s=ready_s,
            profiled=profiled,
        )

    def _end_iteration(self, *, reprofile: bool) -> bool:
        """Collective: what the next iteration will be. True if the order has just been profiled."""
        profiled = self._profiling and self.iteration + 1 - self._profiled_from >= PROFILING_ITERATIONS
        if profiled:
            self._end_profiling()
        elif not self._profiling:
            self._watch()
            if reprofile:
                logger.info("gradients come in another order, or in another form, than they did: profiling them again")
                self._profiling, self._profiled_from = True, self.iteration + 1
                self._order_watch.profiling_begins(self.iteration + 1)
                self._wants_reprofile = self.profile_again = False
                self._flags.forget()
        if not profiled:
            self._begin_iteration()
        self.iteration += 1
        return profiled

    def _watch(self) -> None:
        buffers, arrivals = self._buffers, self._arrivals
        own = arrivals.own_indices
        if own == buffers.order:
            self._order_watch.as_expected()
            late = False
        else:
            late = self._order_watch.wants_reprofile(self.iteration, own, buffers.position)
        self._wants_reprofile = late or buffers.outdated or self.profile_again

    def _end_profiling(self) -> None:
        """Collective: buffers in the agreed order, new ones if the order or a parameter has changed."""
        order = agree_on_order(self._arrivals.indices, self._control, counts=not self._joined)
        outdated = bool(self._control.maximum(np.array([float(self._buffers.outdated)]))[0])
        self._profiling = False
        self._order_watch.profiled(self.iteration)
        if order != self._buffers.order or outdated:
            self._build_buffers(order, self._buffers)
        else:
            self._begin_iteration()

    def close(self) -> bool:
        """Ends the negotiation thread; gradients keep their values. Once. False if its communicator stays in use."""
        self._device.users -= 1
        del self._default_plan  # which leads back to whom it belongs
        return self._negotiation is None or self._negotiation.close()
