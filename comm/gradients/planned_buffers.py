"""The flat buffers with the plans by which their units leave, and the flags at their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import CommPlan
from sirtaki.comm.router import Router
from sirtaki.errors import PlanError

from .buffers import GradientBuffers, HasGrad, Reduction
from .control_flags import FLAG_COUNT, ControlFlags, UsageFlags
from .overtaking import IterationPace, coming_s, overtaking
from .schedule import Schedule, ScheduledUnit, schedule


class PlannedBuffers:
    """Flat buffers in one order of the parameters, ready to be reduced.

    Attributes:
        buffers: where gradients lie.
        flags: what ranks tell each other along with them.
        usage: which gradients were computed at all, if anybody asks.
        plans: the current ones, one a layout.
        schedule: their units, in the order in which they leave.
    """

    plans: tuple[CommPlan, ...]
    schedule: Schedule

    def __init__(
        self,
        order: Sequence[int],
        params: Sequence[HasGrad],
        names: Sequence[str],
        *,
        router: Router,
        reduction: Reduction,
        default_plan: Callable[[GradientLayout], CommPlan],
        unused_as_none: bool,
        before: PlannedBuffers | None,
    ) -> None:
        """Collective.

        Args:
            order: of the parameters in the buffers, the same on all ranks.
            params: their gradients are reduced.
            names: of the parameters.
            router: allocates, and opens the plans' streams.
            reduction: tells in which dtype gradients travel.
            default_plan: the plan of a new layout; the same on all ranks.
            unused_as_none: there is a flag for each parameter that tells whether its gradient was computed.
            before: the buffers that these replace; gradients that lie there move along.
        """
        self._router, self._n_params = router, len(params)
        router.device.synchronise()  # nothing may use the old ones any more
        self.buffers = GradientBuffers(
            order,
            params,
            names,
            reduction=reduction,
            router=router,
            n_flags=FLAG_COUNT + (len(params) if unused_as_none else 0),
        )
        if before is not None:
            self.buffers.take_over(before.buffers)
        elements = self.buffers.flags
        self.flags = ControlFlags(router.device, elements[:FLAG_COUNT])
        self.usage = UsageFlags(router.device, elements[FLAG_COUNT:])
        self.install([default_plan(layout) for layout in self.buffers.layouts])

    def install(self, plans: Sequence[CommPlan]) -> None:
        """Collective, between iterations: units leave by these plans from now on.

        Raises:
            PlanError: a plan does not fit its layout, or has a route or streams that this job does not have.
            TransportError: on all ranks, streams could not be opened.
        """
        groups = self.buffers.groups
        if len(plans) != len(groups):
            raise PlanError(f"{len(plans)} plans for {len(groups)} layouts")
        for group, plan in zip(groups, plans, strict=True):
            if plan.numel != group.layout.numel:
                raise PlanError(f"a plan of {plan.numel} elements for a layout of {group.layout.numel}")
            self._router.open_plan(plan)
        # What tells of usage is known at the end only; other flags when the last gradient has come, and so their unit.
        self._schedule(schedule(groups, plans, self.buffers.position), flags_wait=self.usage.wanted)
        self.plans = tuple(plans)

    def overtake(self, pace: IterationPace) -> None:
        """Between iterations, the same on all ranks: see `Synchroniser.overtake`."""
        units, _ = self.overtaken(self.plans, pace)
        # NCCL's communicators of one device share one order; all others are on their own.
        self._schedule(units, flags_wait=True, one_order=self._router.device.streams)

    def overtaken(self, plans: Sequence[CommPlan], pace: IterationPace) -> tuple[list[ScheduledUnit], list[float]]:
        """Units as they would leave by these plans; and when each has what it waits for, after the first gradient."""
        usual = schedule(self.buffers.groups, plans, self.buffers.position)
        units = overtaking(usual, pace, held=self._has_flags)
        return units, coming_s(units, pace, held=self._has_flags)

    def _schedule(self, units: Sequence[ScheduledUnit], *, flags_wait: bool, one_order: bool = True) -> None:
        """Units leave in this order; those with flags, and those behind them, not before all is known that they say."""
        self.schedule = Schedule(
            units,
            self._n_params,
            held=lambda unit: flags_wait and self._has_flags(unit),
            one_order=one_order,
        )

    def _has_flags(self, unit: ScheduledUnit) -> bool:
        first = self.buffers.groups[0]
        return unit.group is first and unit.stop > first.layout.offsets[-2]
