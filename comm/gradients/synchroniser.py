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
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.comm.router import Router
from sirtaki.errors import PlanError

from ..plan import CommPlan, GradientLayout
from .buffers import Arrivals, HasGrad, LostEdits, Pace, Reduction, Said
from .iteration import (
    CurrentIteration,
    InFlight,
    Interrupted,
    Iteration,
    IterationReport,
    IterationTrace,
    ReadinessNegotiation,
    issuing_of,
    report,
)
from .schedule import IterationPace, OrderProfiling, PlannedBuffers, ScheduledUnit, agree_on_order

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)


class Synchroniser:
    """Keeps the gradients of one set of parameters equal on all ranks.

    Constructing, `finish` and `set_plans` are collective; `ready` may be called in any order and not at all for some
    parameters, whose current gradient, or zeros, is reduced then.

    Attributes:
        iteration: iterations finished so far.
        current: the iteration that has not ended.
        in_flight: what the device may still be busy with.
        pace: what all ranks find of reductions, as they have said with `say_pace` by the iteration before the last.
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
        self._device = router.device
        self._negotiation = (
            None if self._device.streams else ReadinessNegotiation(control.duplicate(), control.failures)
        )
        self._device.users += 1
        self._several_devices = len({param.device for param in params}) > 1
        self.iteration = 0
        self.pace = Pace.USUAL
        self.in_flight = InFlight(self._device)
        self._order, self._edits = OrderProfiling(), LostEdits(self._names)
        self._make_buffers = partial(
            PlannedBuffers,
            params=self._params,
            names=self._names,
            router=router,
            reduction=reduction,
            default_plan=default_plan,
            unused_as_none=unused_as_none,
        )
        self._planned = self._make_buffers(range(len(self._params))[::-1], before=None)
        self._begin_iteration()

    # ── layouts and plans ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """The current layouts, one a dtype; the first has one element more, the control flags."""
        return self._planned.buffers.layouts

    @property
    def plans(self) -> tuple[CommPlan, ...]:
        """By which units are sent now, one a layout."""
        return self._planned.plans

    def overtake(self, pace: IterationPace) -> None:
        """Between iterations, the same on all ranks, until plans change: what forward needs first leaves first."""
        self._planned.overtake(pace)
        self._begin_iteration()

    def overtaken(self, plans: Sequence[CommPlan], pace: IterationPace) -> tuple[list[ScheduledUnit], list[float]]:
        """See `PlannedBuffers.overtaken`; nothing changes."""
        return self._planned.overtaken(plans, pace)

    @property
    def n_params(self) -> int:
        """How many parameters it has."""
        return len(self._params)

    def in_layout_order(self, values: Sequence[float]) -> list[float]:
        """Values by parameter index, as reports give them, in the order of the first layout, the flags left out."""
        return [values[index] for index in self._planned.buffers.groups[0].indices]

    def set_plans(self, plans: Sequence[CommPlan]) -> None:
        """Collective, between iterations: sends units by these plans from now on, one a layout.

        Raises:
            PlanError: a plan does not fit its layout, or has a route or streams that this job does not have.
            MismatchError: on all ranks, if the ranks' plans differ.
        """
        if self.pending:
            raise PlanError("plans change between iterations only, and gradients of this one are in already")
        self._control.require_equal(" ".join(plan.fingerprint() for plan in plans), "the plan")
        self._planned.install(plans)
        self._begin_iteration()

    # ── one iteration ────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_iteration(self) -> None:
        """Ready for the next backward pass."""
        planned = self._planned
        planned.schedule.begin()
        planned.flags.write(Said(reprofile=self._order.asks, complete=True))
        self._arrivals = Arrivals(self._params, planned.buffers)
        self._iteration = Iteration(
            self._arrivals,
            router=self._router,
            reduction=self._reduction,
            trace=IterationTrace.wanted(self._device, self, planned.buffers),
            ready_events=[None] * len(self._params) if self._order.active else [],
        )
        self._issuing = issuing_of(
            self._iteration,
            planned,
            self._negotiation,
            profiling=self._order.active,
            several_devices=self._several_devices,
        )
        self.current = CurrentIteration(self._iteration, self._issuing, planned, self._order, self._edits)

    @property
    def profiling(self) -> bool:
        """The order of the gradients is profiled in this iteration; the same on all ranks."""
        return self._order.active

    def profile_again(self) -> None:
        """Asks for the order to be profiled again in one of the next iterations."""
        self._order.requested = True

    def say_pace(self, pace: Pace) -> None:
        """Between iterations: what this rank finds of reductions; told along with the gradients until it changes."""
        flags = self._planned.flags
        if pace is not flags.pace:
            flags.pace = pace
            self._begin_iteration()

    @property
    def pending(self) -> bool:
        """Some gradient of this iteration is ready and `finish` has not been called."""
        return bool(self._arrivals.indices)

    @property
    def problem(self) -> str:
        """What makes the gradients of this iteration undefined; empty until they are reduced, and if all is well."""
        return self._edits.problem

    def missing_names(self) -> list[str]:
        """Parameters whose gradients have not come in this iteration."""
        arrived = set(self._arrivals.indices)
        return [name for index, name in enumerate(self._names) if index not in arrived]

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """The gradient of parameter `index`, its `.grad`, is complete, and had this version when it came. Once each."""
        self._issuing.ready(index, gradient, version)

    def detach(self) -> None:
        """Every `.grad` is the user's alone from now on."""
        self._planned.buffers.detach()

    @property
    def complete(self) -> bool:
        """All gradients of this iteration are reduced."""
        return self._iteration.complete

    @property
    def can_reduce(self) -> bool:
        """Every gradient of this iteration has come, so that nothing need be known of what the script does next."""
        return self.current.can_reduce

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
        return self.current.reduce(interrupted)

    @property
    def can_put_off(self) -> bool:
        """The units of this iteration may be waited for one by one, once they have left."""
        trace = self._iteration.trace
        recorded = trace is not None and trace.recorder is not None
        return not (self._order.active or self._planned.usage.wanted or recorded)

    def contribute_zeros(self) -> None:
        """On a rank that has joined: gives zeros to an iteration that others have begun; waits for nobody."""
        if not self._arrivals.indices:
            self._iteration.joined = True
            self._planned.flags.pace = Pace.USUAL  # without data it knows nothing of that
            for param in self._params:
                param.grad = None
        self.current.flush()

    def flush(self) -> None:
        """Sends what has not left; waits for nobody. For callers outside: if it `can_reduce`."""
        self.current.flush()

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
        iteration, order = self._iteration, self._order
        if not iteration.complete:
            self.current.reduce(None)
        if self._device.streams:
            self.in_flight.units = list(zip(self._planned.schedule.units, iteration.works, strict=True))
        measured = report(
            iteration,
            self.in_flight,
            number=self.iteration,
            profiling=order.active,
            profiled=order.ends_with(self.iteration),
        )
        self._end_iteration(profiled=measured.profiled)
        return measured

    def _end_iteration(self, *, profiled: bool) -> None:
        """Collective: what the next iteration will be."""
        flags, order = self._planned.flags, self._order
        before = flags.before()
        if self._device.streams:
            self._edits.hear_late(before)
        flags.read_back()
        self.pace = Pace.USUAL
        if profiled:
            self._end_profiling()
        elif not order.active:
            order.watch(self.iteration, self._arrivals.own_indices, self._planned.buffers)
            self.pace = before.pace
            if before.reprofile:
                logger.info("gradients come in another order, or in another form, than they did: profiling them again")
                order.begin(self.iteration + 1)
                flags.forget()
                self.pace = Pace.USUAL  # what it is compared with was in another order
        self._begin_iteration()
        self.iteration += 1

    def _end_profiling(self) -> None:
        """Collective: buffers in the agreed order, new ones if the order or a parameter has changed."""
        buffers = self._planned.buffers
        order = agree_on_order(self._arrivals.indices, self._control, counts=not self._iteration.joined)
        outdated = bool(self._control.maximum(np.array([float(buffers.outdated)]))[0])
        self._order.end(self.iteration)
        if order != buffers.order or outdated:
            self._planned = self._make_buffers(order, before=self._planned)

    def close(self) -> bool:
        """Ends the negotiation thread; gradients keep their values. Once. False if its communicator stays in use."""
        self._device.users -= 1
        del self._make_buffers  # the default plan leads back to whom it belongs
        return self._negotiation is None or self._negotiation.close()
