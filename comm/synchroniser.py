"""Reduces gradients over all ranks while the backward pass still computes others.

A module of its own because it is the hot path: what runs here for each gradient is all that Python costs. It knows
parameters only as things that have a `.grad`.

*Learning* iterations negotiate which gradients are ready (`negotiation`), because the order is not known. From then
on iterations are *scheduled*: the flat buffers are laid out in the agreed order, and units are issued in that order
as soon as their gradients are in, straight from the hook, without a control message.

A fixed order costs time if gradients begin to come in another one. Each rank therefore votes, with elements at the
end of the first flat buffer that are reduced along with the gradients: if anyone asks for it all ranks learn anew in
the next iteration. In the same way a rank says that it has data of its own, so that those without (see `finish`) know
when they are all alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from sirtaki.errors import PlanError

from . import timeline
from .fabric import Fabric, Route
from .iteration_trace import IssuedUnit, IterationTrace
from .layout import GradientLayout
from .negotiation import ReadinessNegotiation
from .plan import CommPlan
from .scaling import scale_
from .transport import FlatBuffer, ReduceOp, Work

if TYPE_CHECKING:
    from .control import ControlPlane

logger = logging.getLogger(__name__)

LEARNING_ITERATIONS = 2
"""The first iteration runs with cold caches; its order is kept only if the second one cannot be had."""

VOTES = 2
RELEARN, ALIVE = range(VOTES)
"""What the elements at the end of the first flat buffer ask for, or say."""

WAIT_SLICE_S = 1.0
"""How often a wait for other ranks looks whether the job has failed."""


class HasGrad(Protocol):
    """What is needed of a parameter."""

    grad: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def numel(self) -> int:
        """Elements."""
        ...


def dense_strides(param: HasGrad) -> tuple[int, ...]:
    """The strides of a parameter's gradient: the parameter's own, without holes."""
    return torch.empty_like(param, device="meta").stride()  # type: ignore[arg-type]  # a tensor in truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What happens to every gradient: `postscale * op over ranks of (prescale * gradient)`.

    Attributes:
        wire_dtype: the type in which gradients of each dtype travel; those not named travel as they are.
    """

    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    wire_dtype: tuple[tuple[torch.dtype, torch.dtype], ...] = ()

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype on the wire of gradients of `dtype`."""
        return dict(self.wire_dtype).get(dtype, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """What one iteration measured on this rank.

    Attributes:
        span_s: from the first ready gradient to the last reduced one.
        backward_s: from the first ready gradient to the call of `finish`.
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


class _Group:
    """The gradients of one dtype: their flat buffer, and a view of it for each."""

    def __init__(
        self, indices: list[int], params: Sequence[HasGrad], layout: GradientLayout, buffer: FlatBuffer
    ) -> None:
        self.indices, self.layout, self.buffer = indices, layout, buffer
        # A gradient has its parameter's strides (torch's layout contract, on which fused optimizers rely).
        self.views = [
            buffer.tensor.as_strided(params[index].shape, dense_strides(params[index]), offset)
            for index, offset in zip(indices, layout.offsets, strict=False)
        ]


@dataclass(slots=True, eq=False)
class _ScheduledUnit:
    """One unit with all that issuing it takes.

    Attributes:
        members: parameters with elements in it.
        due: where it stands among the units of all groups: (position of its last gradient, group, number in plan).
    """

    group: _Group
    start: int
    stop: int
    stream: int
    route: Route
    members: tuple[int, ...] = ()
    due: tuple[int, int, int] = (0, 0, 0)


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
        fabric: Fabric,
        reduction: Reduction,
        default_plan: Callable[[GradientLayout], CommPlan],
    ) -> None:
        """Collective.

        Args:
            params: parameters of which gradients are expected, in the same order on all ranks.
            names: for messages, one a parameter.
            control: the ranks.
            fabric: carries the units; closed by the caller.
            reduction: what is done to every gradient.
            default_plan: the plan of a new layout; the same on all ranks.
        """
        self._params, self._names = list(params), list(names)
        self._control, self._fabric, self._reduction = control, fabric, reduction
        self._default_plan = default_plan
        self._negotiation = ReadinessNegotiation(control.duplicate(), control.failures)
        self.iteration = 0
        self._learn_from = 0  # iteration in which the present learning began
        self._learning = True
        self._ready: Callable[[int], None] = self._ready_learning
        self._groups: list[_Group] = []
        self._disorder, self._ballot = 0, 0.0
        self._joined = False
        self._next_vote = 0
        self._lay_out(list(range(len(self._params)))[::-1])

    # ── layouts and plans ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """The present layouts, one a dtype; the first has more elements, the votes."""
        return tuple(group.layout for group in self._groups)

    def in_layout_order(self, values: Sequence[float]) -> list[float]:
        """Values by parameter index, as reports give them, in the order of the first layout, the votes left out."""
        return [values[index] for index in self._groups[0].indices]

    def _lay_out(self, order: list[int]) -> None:
        """Collective: new flat buffers in the given order of parameters; gradients that are there move along."""
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for index in order:
            dtype = self._params[index].dtype
            by_dtype.setdefault((self._reduction.travels_as(dtype), dtype), []).append(index)
        kept = {index: view for group in self._groups for index, view in zip(group.indices, group.views, strict=True)}
        self._groups = []
        for (wire, _), indices in by_dtype.items():
            votes = () if self._groups else (VOTES,)
            layout = GradientLayout(
                sizes=(*(self._params[index].numel() for index in indices), *votes),
                itemsize_bytes=wire.itemsize,
                dtype=str(wire).removeprefix("torch."),
                names=(*(self._names[index] for index in indices), *("sirtaki.votes" for _ in votes)),
            )
            group = _Group(indices, self._params, layout, self._fabric.allocate(layout.numel, wire))
            for index, view in zip(indices, group.views, strict=True):
                if self._params[index].grad is kept.get(index, view):
                    view.copy_(kept[index])
                    self._params[index].grad = view
            self._groups.append(group)
        self._position = {index: position for position, index in enumerate(order)}
        self._order = order
        self._views = [torch.empty(0)] * len(self._params)
        for group in self._groups:
            for index, view in zip(group.indices, group.views, strict=True):
                self._views[index] = view
        # Gradients of another dtype or device than their flat buffer's travel as copies.
        self._adopts = [
            param.dtype == view.dtype and param.device == view.device
            for param, view in zip(self._params, self._views, strict=True)
        ]
        self._votes = self._groups[0].buffer.tensor[-VOTES:]
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
        units: list[_ScheduledUnit] = []
        for number, (group, plan) in enumerate(zip(self._groups, plans, strict=True)):
            if plan.numel != group.layout.numel:
                raise PlanError(f"a plan of {plan.numel} elements for a layout of {group.layout.numel}")
            self._fabric.open_plan(plan)
            units += self._expand(number, group, plan)
        # Units of several groups are merged by the moment in which their last gradient is expected.
        self._units = sorted(units, key=lambda unit: unit.due)
        units_of: list[list[int]] = [[] for _ in self._params]
        for serial, unit in enumerate(self._units):
            for index in unit.members:
                units_of[index].append(serial)
        self._units_of = [tuple(serials) for serials in units_of]
        self._plans = tuple(plans)
        self._reset()

    def _expand(self, number: int, group: _Group, plan: CommPlan) -> list[_ScheduledUnit]:
        """The units of one group's plan."""
        offsets, units, first = group.layout.offsets, [], 0
        for serial, unit in enumerate(plan.units):
            while offsets[first + 1] <= unit.start:
                first += 1
            position, members = first, []
            while position < len(group.indices) and offsets[position] < unit.stop:
                if offsets[position + 1] > offsets[position]:
                    members.append(group.indices[position])
                position += 1
            last = max((self._position[index] for index in members), default=len(self._params))
            units.append(
                _ScheduledUnit(
                    group,
                    unit.start,
                    unit.stop,
                    unit.stream,
                    (plan.transport, unit.algorithm),
                    members=tuple(members),
                    due=(last, number, serial),
                )
            )
        return units

    def _reset(self) -> None:
        """Ready for the next backward pass."""
        # The last entry is never zero: `ready` need not ask whether there is a next unit.
        self._missing = [*(len(unit.members) for unit in self._units), 1]
        self._votes[RELEARN], self._votes[ALIVE] = self._ballot, 1.0
        self._next_unit = 0
        self._arrived: list[int] = []
        self._copied = 0
        self._works: list[Work] = []
        self._first_ready_s = 0.0
        wanted = timeline.active()
        self._trace = None if wanted is None else IterationTrace(wanted)

    # ── the hot path ─────────────────────────────────────────────────────────────────────────────────────────────

    def ready(self, index: int) -> None:
        """The gradient of parameter `index` is complete. At most once an iteration."""
        self._ready(index)

    def _ready_scheduled(self, index: int) -> None:
        arrived = self._arrived
        if not arrived:
            self._first_ready_s = time.perf_counter()
        arrived.append(index)
        missing = self._missing
        for unit in self._units_of[index]:
            missing[unit] -= 1
        if not missing[self._next_unit]:
            self._issue_complete_units()

    def _issue_complete_units(self) -> None:
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
        begin_s = 0.0 if self._trace is None else time.perf_counter()
        if targets:
            with torch.no_grad():  # gradients made with create_graph=True have a graph, the reduced ones have none
                torch._foreach_copy_(targets, sources)
        adopts = self._adopts
        for index in fresh:
            if adopts[index]:
                params[index].grad = views[index]
        if self._trace is not None and fresh:
            self._trace.copied(begin_s, len(fresh))

    def _issue(self, unit: _ScheduledUnit) -> None:
        reduction, tensor = self._reduction, unit.group.buffer.tensor
        if reduction.prescale != 1.0:
            scale_(tensor[unit.start : unit.stop], reduction.prescale)
        issued_s = 0.0 if self._trace is None else time.perf_counter()
        work = self._fabric.all_reduce(
            unit.group.buffer,
            unit.start,
            unit.stop,
            route=unit.route,
            stream=unit.stream,
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
                    issued_s=issued_s,
                )
            )

    # ── learning iterations ──────────────────────────────────────────────────────────────────────────────────────

    def _ready_learning(self, index: int) -> None:
        if not self._arrived:
            self._begin_learning()
        self._arrived.append(index)
        self._ready_times_s[index] = time.perf_counter() - self._first_ready_s
        self._copy_arrived()
        # Bits are kept in layout order, so that agreed neighbours are neighbours in the flat buffer.
        self._negotiation.mark(self._position[index])

    def _begin_learning(self) -> None:
        self._first_ready_s = time.perf_counter()
        self._ready_times_s = [0.0] * len(self._params)
        self._round_robin = 0
        sizes = np.array(
            [self._params[index].numel() * self._views[index].element_size() for index in self._order], dtype=np.int64
        )
        granularity = max(1, self._unit_bytes())
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
                    self._issue(_ScheduledUnit(group, low, min(low + limit, stop), stream, route))

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
        finish_called_s = time.perf_counter()
        self._joined = joined and not self._arrived
        if self._joined:
            self._votes[ALIVE] = 0.0
            for param in self._params:
                param.grad = None
        if not self._arrived:
            self._first_ready_s = finish_called_s
            if self._learning:
                self._begin_learning()
        n_arrived = len(self._arrived)
        self._complete_missing()
        if self._learning:
            self._negotiation.finish()
        else:
            self._missing = [0] * len(self._units) + [1]
            self._issue_complete_units()
        for work in self._works:
            while not work.wait(WAIT_SLICE_S):
                self._control.failures.check()
        end_s = time.perf_counter()
        self._hand_back()
        if self._trace is not None:
            self._trace.write(
                iteration=self.iteration,
                learning=self._learning,
                first_ready_s=self._first_ready_s,
                finish_called_s=finish_called_s,
            )
        report = IterationReport(
            span_s=end_s - self._first_ready_s,
            backward_s=max(0.0, finish_called_s - self._first_ready_s),  # without gradients there was none
            ready_s=tuple(self._ready_times_s) if self._learning else (),
            alive=self._is_anyone_alive(),
            learned=self._turn_over(n_arrived),
        )
        self.iteration += 1
        return report

    def _is_anyone_alive(self) -> bool:
        """Collective: some rank has data of its own. Learning iterations reduce no votes."""
        if self._learning:
            return bool(self._control.total(np.array([0.0 if self._joined else 1.0]))[0] > 0.0)
        return float(self._votes[ALIVE]) > 0.0

    def _complete_missing(self) -> None:
        """Gradients that did not come: those there are count as they are, the others as zeros, as in Horovod."""
        if len(self._arrived) < len(self._params):
            arrived = set(self._arrived)
            for index, param in enumerate(self._params):
                if index not in arrived:
                    if param.grad is None:
                        self._views[index].zero_()
                        if not self._adopts[index]:
                            param.grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
                    self._arrived.append(index)
        self._copy_arrived()

    def _hand_back(self) -> None:
        """Gradients that travelled as copies go back to where they came from."""
        if not all(self._adopts):
            pairs = [
                (param.grad, view)
                for param, view, adopts in zip(self._params, self._views, self._adopts, strict=True)
                if not adopts and param.grad is not None
            ]
            torch._foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])

    # ── changes of order ─────────────────────────────────────────────────────────────────────────────────────────

    def _watch_order(self, n_arrived: int) -> None:
        """Asks for a new order if gradients came far from where they were expected, three times in a row."""
        arrived = self._arrived[:n_arrived]
        limit = max(8, len(self._order) // 8)
        late = max((place - self._position[index] for place, index in enumerate(arrived)), default=0)
        self._disorder = self._disorder + 1 if late > limit else 0
        self._ballot = 1.0 if self._disorder >= 3 and self.iteration >= self._next_vote else 0.0

    def _turn_over(self, n_arrived: int) -> bool:
        """Collective: what the next iteration will be. True if the order has just been learned."""
        if self._learning:
            order = self._finish_learning()
            self._reset()
            if order is None:
                return False
            self._learning, self._ready = False, self._ready_scheduled
            if order != self._order:
                self._lay_out(order)
            # Each new learning doubles the time to the next one: an order that never settles is not chased.
            self._next_vote = self.iteration + 2 * (self.iteration - self._learn_from + 50)
            return True
        relearn = float(self._votes[RELEARN]) > 0.0
        if self._arrived == self._order:
            self._disorder = 0
        else:
            self._watch_order(n_arrived)
        self._reset()
        if relearn:
            logger.info("gradients come in another order than they did; learning it anew")
            self._learning, self._ready, self._learn_from = True, self._ready_learning, self.iteration + 1
            self._disorder, self._ballot = 0, 0.0
        return False

    def close(self) -> None:
        """Ends the negotiation thread; gradients keep their values."""
        self._negotiation.close()
