"""Planners: search methods (arms) that propose the optimum of an analytical model of the job's communication.

They implement MG-WFBP, ASC-WFBP, LIBRA, LIBRA-M and dPRO.

Each section of this file is named after a paper. Equation, listing and theorem numbers in a section are the paper's.

MG-WFBP (Shi et al., INFOCOM 2019; ASC-WFBP eq. (3)-(6)) merges a gradient into the next one if waiting for the next one
costs less than the start-up time of another message. It uses one stream and sends one message at a time. `MgWfbp` keeps
the paper's rule as printed. The rule is optimal for two gradients only: if the start-up is long compared with the gaps
between gradients, a chain of short waits ends in a single message without overlap. `merge_optimally` therefore computes
the exact optimum of the paper's model, and our N-way planner uses it.

ASC-WFBP decides for each gradient whether to send it, to merge it, or to send it concurrently with the message before.
`AscWfbp` is the paper's two-way rule (eq. 21-40, listing 1), `AscWfbpN` our generalisation to the measured concurrency
curve G(n). Where the printed listing contradicts the paper's text, the code follows the text:

- Line 8 of listing 1 adds τ_b[l] and t_b[l − 1]. Eq. (21) means the time at which layer l − 1 is ready.
- Line 12 adds t_b to τ_c. Eq. (17) and (29) add it to τ_b.
- A penalty counts only while the other message is active, as eq. (13) presupposes.
- After merging, "layer l + 1" means the message before the current one.

The paper claims that its choice is optimal (theorem 1). Under the paper's own model, it is not, as
docs/explanation/planners.md shows.

LIBRA and LIBRA-M choose the sizes of units (buckets) and numbers of GPU threads by dynamic programming. Their
contention model tells how much computation and communication slow each other down.

dPRO follows the critical path of the simulated iteration, and fuses and partitions the tensors on it. Tensor fusion and
tensor partition (theorem 2) apply here. Operator fusion (theorem 1) does not, because Sirtaki cannot fuse a training
script's computation. Search speed-ups (section 5.3):

- Coarsened view: gradients of one operation, which are ready at nearly the same time, start as one tensor.
- Partial replay: t_sync(s, k) replays only the messages of one tensor, once for each size.
- Symmetry: a decision for a pair of tensors applies to all pairs of the same sizes on the path, as in repeated blocks.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from statistics import median

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.errors import TuningError, require
from sirtaki.measures import SMALLEST_UNIT_BYTES, LinkModel

from ..knobs import Cut, Knobs, KnobSpace
from ..model.planning import Forecast, PlanningModel
from ..model.simulator import SimulatedIteration, Simulator
from ..trial import Proposal, Trial

logger = logging.getLogger(__name__)

LEAST_PREDICTED_GAIN = 0.005
"""Minimum predicted gain of a planner's setting over the best measured setting, as a fraction of communication time."""


class Planner(ABC):
    """Search method (arm) that computes plans from a model of the job's communication instead of trying settings.

    A plan divides the gradients into units (buckets). A planner proposes one plan for each route (transport and
    algorithm), the fastest in the simulator first. It proposes nothing if the user has set the unit size, because a
    plan would override it.

    Attributes:
        space: permitted settings.
        forecast: the model's predicted communication times and their measured accuracy, shared by all planners. None =
            predictions are not checked.
    """

    name: str

    def __init__(self, *, space: KnobSpace, model: PlanningModel, forecast: Forecast | None = None) -> None:
        """Create a planner that computes plans with `model`.

        The planner proposes nothing while trials contradict `forecast`.
        """
        self.space, self.forecast, self._model = space, forecast, model
        self._pending: list[Proposal] | None = None  # Plans that have not been proposed yet; None = not computed yet.

    @property
    def doubted(self) -> bool:
        """Return whether trials have contradicted the communication times that the planner's model predicts."""
        return self.forecast is not None and not self.forecast.believed

    @abstractmethod
    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """Divide the gradients into units (buckets), for one route (transport and algorithm).

        Raises:
            TuningError: the planner cannot compute units from this model.
        """

    def update_model(self, model: PlanningModel) -> None:
        """Replace the model from which plans are computed.

        New plans are computed only if the models differ by more than their measurement error.
        """
        if self.forecast is not None:
            self.forecast.update_model(model)
        if model.differs_from(self._model):
            self._model = model
            self._pending = None

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return up to `n` plans that have not been proposed yet, the fastest in the simulator first.

        There is one plan for each route (transport and algorithm).
        """
        if self.doubted:
            return []
        if self._pending is None:
            self._pending = self._plan()
        if self.forecast is not None:
            gain = LEAST_PREDICTED_GAIN
            self._pending = [one for one in self._pending if self.forecast.promises(one.knobs, gain=gain)]
        asked, self._pending = self._pending[:n], self._pending[n:]
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        """Compare the trials with predictions, and drop plans that another search method's trial has measured."""
        if self.forecast is not None:
            self.forecast.tell(trials)
        if self._pending:
            tried = {trial.knobs for trial in trials}
            self._pending = [proposal for proposal in self._pending if proposal.knobs not in tried]

    def _plan(self) -> list[Proposal]:
        model = self._model
        if model.layout.numel == 0 or self.space.unit_bytes[0] == self.space.unit_bytes[1]:
            return []
        plans: list[tuple[float, Proposal]] = []
        for route in (route for route in self.space.routes if route in model.links):
            try:
                knobs = self._knobs(model.layout, route, self.cuts(model, route))
            except TuningError as err:
                logger.info(
                    "the search method %s proposes no setting for the transport %s: %s; tuning continues with the "
                    "remaining search methods",
                    self.name,
                    route[0].value,
                    err,
                )
                continue
            span_s = model.simulator(route).run_knobs(knobs).span_s
            reason = f"{len(knobs.cuts or ())} units, {span_s * 1e3:.3g} ms predicted"
            plans.append((span_s, Proposal(arm=self.name, knobs=knobs, reason=reason)))
        return [proposal for _, proposal in sorted(plans, key=lambda plan: plan[0])]

    def allocations(self, model: PlanningModel, route: Route) -> tuple[int | None, ...]:
        """Return the numbers of GPU threads that a plan may choose for an all-reduce (LIBRA's R).

        Without a contention model (how much communication slows computation down), return `(None,)`: NCCL chooses. With
        a contention model, None is left out, because the model treats it as `default_threads` and could not choose
        between the two.
        """
        counts = tuple(threads for threads in self.space.threads if threads is not None)
        return counts if counts and model.contention_on(route) is not None else (None,)

    def _knobs(self, layout: GradientLayout, route: Route, cuts: tuple[Cut, ...]) -> Knobs:
        used = 1 + max(cut.stream for cut in cuts)
        permitted = self.space.streams_on(route)
        streams = next((n for n in permitted if n >= used), None)
        if streams is None:
            raise TuningError(
                f"the communication plan needs {used} streams (parallel connections), but the transport or "
                f"SIRTAKI_STREAMS permits only {permitted[-1]}; Sirtaki does not try this plan"
            )
        starts = [0, *(cut.stop for cut in cuts)]
        typical = median(cut.stop - start for start, cut in zip(starts, cuts, strict=False)) * layout.itemsize_bytes
        low, high = self.space.unit_bytes
        return Knobs(
            unit_bytes=min(max(int(typical), low), high),
            streams=streams,
            transport=route[0],
            algorithm=route[1],
            threads=self.space.threads[0],
            cuts=cuts,
        )


def sizes_bytes(layout: GradientLayout) -> list[int]:
    """Return the size of each gradient in bytes, in the order of the flat gradient buffer, `(n_gradients,)`."""
    return [size * layout.itemsize_bytes for size in layout.sizes]


def cuts_for_groups(
    layout: GradientLayout,
    group_ends: Sequence[int],
    *,
    streams: int,
    slices: int | Sequence[int] = 1,
    threads: Sequence[int | None] | None = None,
) -> tuple[Cut, ...]:
    """Divide groups of consecutive gradients into units (buckets), and assign the units to streams round-robin.

    Streams are parallel connections on CPUs, and CUDA streams on GPUs.

    Args:
        layout: the gradients in the order of the flat gradient buffer.
        group_ends: index after the last gradient of each group, ascending. The last entry is the number of gradients.
        streams: number of streams.
        slices: number of equal units per group: one number for all groups, or `(n_groups,)`. It is reduced if a unit
            would be smaller than `SMALLEST_UNIT_BYTES`.
        threads: number of GPU threads that reduce each group's units, `(n_groups,)`; None = the default.
    """
    cuts: list[Cut] = []
    start = 0
    for index, end in enumerate(group_ends):
        stop = layout.offsets[end]
        wanted = slices if isinstance(slices, int) else slices[index]
        count = max(1, min(wanted, (stop - start) * layout.itemsize_bytes // SMALLEST_UNIT_BYTES))
        # Skip a group whose gradients have no elements: it has no units.
        for part in range(count if stop > start else 0):
            cut_stop = start + (stop - start) * (part + 1) // count
            cuts.append(
                Cut(stop=cut_stop, stream=len(cuts) % streams, threads=None if threads is None else threads[index])
            )
        start = stop
    return tuple(cuts)


# ── MG-WFBP ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def merge_gradients(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], *, alpha_s: float, beta_s_per_byte: float
) -> list[int]:
    """Merge gradients into groups by MG-WFBP's rule.

    The gradients are in the order of the backward pass: the paper's layer l is followed by l − 1.

    Args:
        ready_s: time at which each gradient and all gradients before it are ready, `(n_gradients,)`, ascending.
        sizes_bytes: size of each gradient, `(n_gradients,)`.
        alpha_s: start-up time of a message (the paper's a).
        beta_s_per_byte: transmission time of a byte (the paper's b).

    Returns:
        The index after the last gradient of each group.
    """
    ends: list[int] = []
    free_s = 0.0  # Time at which the message of the previous group ends.
    group_bytes = 0
    for i in range(len(ready_s)):
        group_bytes += sizes_bytes[i]
        start_s = max(ready_s[i], free_s)  # Start of the current group's message (the paper's τ_c).
        last = i == len(ready_s) - 1
        # Merge the gradient into the current group, by eq. (5) of MG-WFBP.
        if not last and (ready_s[i + 1] < start_s + alpha_s or group_bytes == 0):
            continue
        ends.append(i + 1)
        free_s = start_s + alpha_s + beta_s_per_byte * group_bytes  # End of the group's message, eq. (3).
        group_bytes = 0
    return ends


def merge_optimally(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], *, alpha_s: float, beta_s_per_byte: float
) -> list[int]:
    """Merge gradients into groups so that the last message ends as early as possible in MG-WFBP's model.

    The result is exact, and takes O(n) for n gradients. Each group is sent as one message, one message at a time. Let
    S_i be the total bytes of the first i gradients, f(i) the earliest time at which these can be sent, a the start-up
    time and b the time of a byte: `f(i) = min over j < i of max(ready_i, f(j)) + a + b · (S_i − S_j)`. Among all j with
    f(j) ≤ ready_i, the largest is best. Among the other j, the one with the smallest f(j) − b · S_j is best. It is the
    head of a monotone queue.

    Args:
        ready_s: time at which each gradient and all gradients before it are ready, `(n_gradients,)`, ascending.
        sizes_bytes: size of each gradient, `(n_gradients,)`.
        alpha_s: start-up time of a message.
        beta_s_per_byte: transmission time of a byte.

    Returns:
        The index after the last gradient of each group.
    """
    # For each i: f(i), b · S_i, and the j that minimises f(i), as in the docstring.
    end_s, before_s, chosen = [0.0], [0.0], [0]
    queue: deque[int] = deque()
    idle = 0  # The largest j with f(j) ≤ ready_i: after the first j gradients, the link waits for gradient i.
    for i, (needed_s, size) in enumerate(zip(ready_s, sizes_bytes, strict=True), start=1):
        before_s.append(before_s[-1] + beta_s_per_byte * size)
        while queue and end_s[queue[-1]] - before_s[queue[-1]] >= end_s[i - 1] - before_s[i - 1]:
            queue.pop()
        queue.append(i - 1)
        while idle + 1 < i and end_s[idle + 1] <= needed_s:
            idle += 1
        while queue and queue[0] <= idle:
            queue.popleft()
        best, start_s = idle, needed_s - before_s[idle]
        if queue and end_s[queue[0]] - before_s[queue[0]] < start_s:
            best, start_s = queue[0], end_s[queue[0]] - before_s[queue[0]]
        chosen.append(best)
        end_s.append(start_s + alpha_s + before_s[i])
    ends: list[int] = []
    i = len(ready_s)
    while i > 0:
        ends.append(i)
        i = chosen[i]
    return ends[::-1]


class MgWfbp(Planner):
    """Planner that merges gradients into messages by the rule of the MG-WFBP paper, and sends them on one stream."""

    name = "mg_wfbp"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """Return one unit (bucket) for each group of gradients that MG-WFBP's rule merges."""
        layout, link = model.layout, model.links[route]
        ends = merge_gradients(
            model.profile.issuable_s,
            sizes_bytes(layout),
            alpha_s=link.startup_s,
            beta_s_per_byte=link.beta_s_per_byte,
        )
        return cuts_for_groups(layout, ends, streams=1)


# ── ASC-WFBP ──────────────────────────────────────────────────────────────────────────────────────────────────────────

VISIBLE_STARTUP = (1.0, 0.5, 0.25, 0.125)
"""Assumed fractions of a message's start-up time that delay communication. The rest overlaps with transmissions on
other streams. `AscWfbpN` computes a plan with each fraction, and the simulator chooses.
"""


class LayerType(Enum):
    """Type of a gradient: how its message is sent (definitions 1 to 3 of the ASC-WFBP paper)."""

    NORMAL = "l_n"  # Separate: the gradient's message ends before the next gradient is ready.
    MERGED = "l_m"  # Merged: the gradient is sent in one message with the next gradient.
    SIMULTANEOUS = "l_s"  # Concurrent: the gradient's message overlaps with the next message.


def layer_types(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], *, alpha_s: float, beta_s_per_byte: float, gamma: float
) -> list[LayerType]:
    """Determine each gradient's type (how it is sent) by listing 1 of ASC-WFBP, in the order of the backward pass.

    The listing computes the times of all messages for each layer (CALCCOMMTIME), which takes O(n²) for n gradients.
    This function takes O(n): a decision depends only on the current and the previous message, so the loop stores only
    their times and sizes.

    Args:
        ready_s: time at which each gradient and all gradients before it are ready (τ_b + t_b), `(n_gradients,)`,
            ascending.
        sizes_bytes: size of each gradient, `(n_gradients,)`.
        alpha_s: start-up time of a message (the paper's a).
        beta_s_per_byte: transmission time of a byte (the paper's b).
        gamma: slow-down of each of two concurrent messages (the paper's γ).
    """
    types: list[LayerType] = []
    message_bytes = 0
    before_s, before_bytes = 0.0, 0  # Start (the paper's τ_c) and size of the previous message.
    for i in range(len(ready_s) - 1):
        message_bytes += sizes_bytes[i]
        start_s, next_ready_s = ready_s[i], ready_s[i + 1]
        alone_s = alpha_s + beta_s_per_byte * message_bytes
        before_alone_s = alpha_s + beta_s_per_byte * before_bytes
        overlap = max(0.0, 1 - (start_s - before_s) / before_alone_s) if before_bytes else 0.0
        # Slow-down of the other message, eq. (13) of ASC-WFBP.
        penalty_s = (gamma - 1) * beta_s_per_byte * before_bytes * overlap
        q1 = start_s + alone_s <= next_ready_s  # True if the message ends before the next gradient is ready, eq. (21).
        q2 = next_ready_s < start_s + alpha_s  # True if the next gradient is ready during the start-up, eq. (24).
        # The same with the slow-down: eq. (27), with terms of eq. (17) and (29).
        q3 = start_s + alone_s + penalty_s < next_ready_s
        if message_bytes == 0 or (not q1 and q2 and not q3):
            types.append(LayerType.MERGED)  # Merge, by eq. (38) of ASC-WFBP.
            continue
        # Do not merge, by eq. (37) and (39) of ASC-WFBP.
        types.append(LayerType.NORMAL if q1 else LayerType.SIMULTANEOUS)
        before_s, before_bytes, message_bytes = start_s, message_bytes, 0
    types.append(LayerType.SIMULTANEOUS)  # The last gradient has no next gradient (listing 1, line 18).
    return types


def two_way_cuts(layout: GradientLayout, ready_s: Sequence[float], link: LinkModel) -> tuple[Cut, ...]:
    """Return the units (buckets) of the ASC-WFBP paper's listing 1, sent alternately on two streams."""
    types = layer_types(
        ready_s,
        sizes_bytes(layout),
        alpha_s=link.startup_s,
        beta_s_per_byte=link.beta_s_per_byte,
        gamma=link.gamma,
    )
    ends = [i + 1 for i, layer_type in enumerate(types) if layer_type is not LayerType.MERGED]
    return cuts_for_groups(layout, ends, streams=2)


class AscWfbp(Planner):
    """Planner that divides gradients into messages on two streams by the rule of the ASC-WFBP paper (listing 1)."""

    name = "asc_wfbp"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """Return the messages of ASC-WFBP's listing 1 as units (buckets) on two streams."""
        return two_way_cuts(model.layout, model.profile.issuable_s, model.links[route])


class AscWfbpN(Planner):
    """Planner that generalises ASC-WFBP from two to n streams. It chooses units (buckets) and streams.

    G(n) is the measured throughput of n concurrent messages. n streams are divided into n / s sets of s streams. A
    group of merged gradients is cut into s slices that are sent concurrently on one set, so that the group has one
    start-up time. Groups are assigned to the sets round-robin, so that the start-up of one group overlaps with the
    transmission of another. The merging rule treats all sets together as one link of rate G(n) with a partly hidden
    start-up time. The simulator chooses n, s and the exposed fraction of the start-up time. The plans of MG-WFBP and of
    the two-way rule are candidates, too. If there is a model of how computation and communication slow each other down,
    the best candidate is simulated with each permitted number of GPU threads. All units of the plan have the same
    number of threads.
    """

    name = "asc_wfbp_n"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """Return the candidate with the shortest simulated communication time.

        If several candidates are equally fast, return the one with the fewest units (buckets).
        """
        simulator = model.simulator(route)

        def cost(cuts: tuple[Cut, ...]) -> tuple[float, int]:
            return round(simulator.run_cuts(cuts).span_s, 6), len(cuts)

        best = min(dict.fromkeys(self._candidates(model, route)), key=cost)
        allocations = self.allocations(model, route)
        return min((tuple(structs.replace(cut, threads=r) for cut in best) for r in allocations), key=cost)

    def _candidates(self, model: PlanningModel, route: Route) -> Iterator[tuple[Cut, ...]]:
        layout, ready_s, link = model.layout, model.profile.issuable_s, model.links[route]
        permitted, sizes = self.space.streams_on(route), sizes_bytes(layout)
        merged = merge_gradients(ready_s, sizes, alpha_s=link.startup_s, beta_s_per_byte=link.beta_s_per_byte)
        yield cuts_for_groups(layout, merged, streams=1)
        if permitted[-1] >= 2:
            yield two_way_cuts(layout, ready_s, link)
        for streams in permitted:
            beta_s_per_byte = 1 / link.total_bytes_per_s(streams)
            for visible in VISIBLE_STARTUP if streams > 1 else (1.0,):
                alpha_s = visible * link.startup_s
                ends = merge_optimally(ready_s, sizes, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)
                for slices in (s for s in range(1, streams + 1) if streams % s == 0):
                    yield cuts_for_groups(layout, ends, streams=streams, slices=slices)


# ── LIBRA ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageModel:
    """Costs of overlapping all-reduces with computation, for each of J numbers of GPU threads of an all-reduce.

    Attributes:
        alpha_s: start-up time of an all-reduce (LIBRA's a).
        overlapped_J: bytes all-reduced per second during computation (LIBRA's c / p), `(J,)`.
        alone_J: bytes all-reduced per second without computation (LIBRA's c / q), `(J,)`.
        speed_J: speed of computation during communication (LIBRA's b / g), as a fraction of the speed without
            communication, at most 1, `(J,)`.
    """

    alpha_s: float
    overlapped_J: Floats
    alone_J: Floats
    speed_J: Floats

    def overlapped_s(self, bytes_: Floats) -> Floats:
        """Return the time of an all-reduce during computation (LIBRA's p + a, eq. 8).

        The shape is `(…, J)`: one row per size, one column per number of GPU threads. The time of the size 0 is 0.
        """
        return self._seconds(bytes_, self.overlapped_J)

    def alone_s(self, bytes_: Floats) -> Floats:
        """Return the time of an all-reduce without computation (LIBRA's q + a).

        The shape is `(…, J)`: one row per size, one column per number of GPU threads. The time of the size 0 is 0.
        """
        return self._seconds(bytes_, self.alone_J)

    def _seconds(self, bytes_: Floats, rates_J: Floats) -> Floats:
        sizes = np.asarray(bytes_, dtype=np.float64)[..., None]
        return np.where(sizes > 0, self.alpha_s + sizes / rates_J, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraPlan:
    """Groups of layers that are all-reduced together, and the number of GPU threads of each group.

    Attributes:
        ends: index after the last layer of each group, `(n_groups,)`.
        choices: index of each group's number of threads in `StageModel`, `(n_groups,)`.
        discrete_s: upper bound of the time of the backward pass with its communication (LIBRA's T(K, L, Z)). It is
            computed for a backward pass in equal chunks of time, with communication that starts only between chunks.
    """

    ends: tuple[int, ...]
    choices: tuple[int, ...]
    discrete_s: float


def fuse_and_allocate(
    compute_s: Sequence[float],
    sizes_bytes: Sequence[int],
    model: StageModel,
    *,
    chunks: int = 150,
    earlier: Sequence[Ints] | None = None,
) -> LibraPlan:
    """Choose groups of layers and their numbers of GPU threads together (LIBRA, listing 1, eq. 21-23).

    The paper limits the number of groups to K = 10. This implementation has no limit, so that its result is at least as
    good.

    Args:
        compute_s: computation time of each layer in the order of the backward pass, `(L,)`.
        sizes_bytes: size of each layer's gradients, `(L,)`.
        model: costs of overlapping communication with computation.
        chunks: number of time steps of the computation (Z). With K groups, the relative error of the result is at most
            (K − 1) / Z (theorem 2).
        earlier: for each layer l, the layers at which a group that ends at l may start, `(L + 1,)`. None = all earlier
            layers.

    Raises:
        TuningError: there are no layers, or `compute_s` and `sizes_bytes` differ in length.
    """
    n_layers = len(sizes_bytes)
    found = len(compute_s), n_layers
    require(found[0] == n_layers >= 1, "compute_s and sizes_bytes", "one value per layer", found, TuningError)
    # Without computation, nothing overlaps. One message with the fastest number of threads is best.
    if sum(compute_s) <= 0:
        alone_J = model.alone_s(np.array(float(sum(sizes_bytes))))
        return LibraPlan(ends=(n_layers,), choices=(int(alone_J.argmin()),), discrete_s=float(alone_J.min()))
    if earlier is None:
        earlier = [np.arange(layer) for layer in range(n_layers + 1)]
    return _Programme(compute_s, sizes_bytes, model, chunks=chunks, earlier=earlier).best()


def allocate(
    compute_s: Sequence[float], sizes_bytes: Sequence[int], ends: Sequence[int], model: StageModel, *, chunks: int = 150
) -> LibraPlan:
    """Choose the number of GPU threads that all-reduce each of the given groups of layers (LIBRA-M, eq. 16-19).

    With K groups and Z chunks, the relative error of the result is at most (K − 1) / Z (theorem 1).

    Args:
        compute_s: computation time of each layer in the order of the backward pass, `(L,)`.
        sizes_bytes: size of each layer's gradients, `(L,)`.
        ends: index after the last layer of each group, `(n_groups,)`.
        model: costs of overlapping communication with computation.
        chunks: number of time steps (chunks) into which the computation is divided (Z).
    """
    bounds = [0, *ends]
    group_compute_s = [sum(compute_s[begin:end]) for begin, end in zip(bounds, ends, strict=False)]
    group_bytes = [sum(sizes_bytes[begin:end]) for begin, end in zip(bounds, ends, strict=False)]
    earlier = [np.array([max(0, group - 1)]) for group in range(len(bounds))]
    plan = fuse_and_allocate(group_compute_s, group_bytes, model, chunks=chunks, earlier=earlier)
    return replace(plan, ends=tuple(ends))


def coarsen(compute_s: Sequence[float], sizes_bytes: Sequence[int], *, limit: int = 160) -> list[int]:
    """Combine consecutive layers into about `limit` runs of equal weight, and return the index after each run.

    A layer's weight is the mean of its fraction of the computation time and its fraction of the bytes. Large or slow
    layers remain separate. Many small layers become one run, because no plan would send them separately.
    """
    n_layers = len(sizes_bytes)
    if n_layers <= limit:
        return list(range(1, n_layers + 1))
    shares = np.zeros(n_layers)
    for values in (np.asarray(compute_s, dtype=np.float64), np.asarray(sizes_bytes, dtype=np.float64)):
        if values.sum() > 0:
            shares += values / values.sum() / 2
    bins = np.floor(np.cumsum(shares) * limit * (1 - 1e-12)).astype(int)
    return [*(np.flatnonzero(np.diff(bins)) + 1).tolist(), n_layers]


class _Programme:
    """Dynamic programme of LIBRA's listing 1, which divides layers into groups.

    The constructor fills its table; `best` reads the result.
    """

    def __init__(
        self,
        compute_s: Sequence[float],
        sizes_bytes: Sequence[int],
        model: StageModel,
        *,
        chunks: int,
        earlier: Sequence[Ints],
    ) -> None:
        self.model, self.earlier, self.Z = model, earlier, chunks
        self.n_layers = len(sizes_bytes)
        ready = np.concatenate([[0.0], np.cumsum(compute_s)])
        self.w = float(ready[-1]) / chunks
        # The first chunk that starts after each layer: ⌈n(l) / w⌉ in the paper.
        self.first_chunk = np.minimum(np.ceil(ready / self.w - 1e-9).astype(np.int64), chunks)
        self.sent = np.concatenate([[0.0], np.cumsum(np.asarray(sizes_bytes, dtype=np.float64))])
        # Column z < Z is the delay of computation by communication at chunk z (LIBRA's U). Column Z is infinite: it is
        # the index of impossible starts, which must never be chosen. `end_s` has the times at the end of the
        # computation.
        self.beyond = np.full((self.n_layers + 1, chunks + 1), np.inf)
        self.beyond[0, :chunks] = 0.0
        self.end_s = np.full(self.n_layers + 1, np.inf)
        self.end_s[0] = ready[-1]
        for layer in range(1, self.n_layers + 1):
            need, price = self._stages(layer)
            z = np.arange(self.first_chunk[layer], chunks)
            start = z - need[..., None]  # Chunk at which the group's communication starts, with axes (before, J, z).
            start = np.where(start >= self.first_chunk[layer], start, chunks)
            reached = self.beyond[earlier[layer][:, None, None], start] + price[..., None]
            if z.size:
                self.beyond[layer, z[0] : chunks] = reached.reshape(-1, z.size).min(axis=0)
            self.end_s[layer] = (self._starts_s(layer) + self._last_stages(layer).min(axis=2)).min()

    def best(self) -> LibraPlan:
        """Return the groups of layers with which the backward pass ends first.

        The table is read backwards, from the last group.
        """
        ends: list[int] = []
        choices: list[int] = []
        layer, z = self.n_layers, self.Z
        while layer > 0:
            ends.append(layer)
            before = self.earlier[layer]
            if z == self.Z:
                times = self._starts_s(layer)[..., None] + self._last_stages(layer)
                i, z_index, choice = np.unravel_index(int(times.argmin()), times.shape)
                z = int(self.first_chunk[layer]) + int(z_index)
            else:
                need, price = self._stages(layer)
                start = np.where(z - need >= self.first_chunk[layer], z - need, self.Z)
                times = self.beyond[before[:, None], start] + price
                i, choice = np.unravel_index(int(times.argmin()), times.shape)
                z = int(start[i, choice])
            layer = int(before[i])
            choices.append(int(choice))
        return LibraPlan(
            ends=tuple(ends[::-1]), choices=tuple(choices[::-1]), discrete_s=float(self.end_s[self.n_layers])
        )

    def _stages(self, layer: int) -> tuple[Ints, Floats]:
        """Return how much computation hides each group's communication, and by how much the communication delays it.

        The first is in chunks (time steps), the second in seconds. The groups are those that end at `layer`. Both
        results have the shape `(before, J)`: one row for each layer after which the group may start, one column for
        each number of GPU threads.
        """
        overlapped_s = self.model.overlapped_s(self.sent[layer] - self.sent[self.earlier[layer]])
        need = np.ceil(overlapped_s * self.model.speed_J / self.w - 1e-9).astype(np.int64)
        return need, overlapped_s * (1 - self.model.speed_J)

    def _last_stages(self, layer: int) -> Floats:
        """Return the time from the start of the last group's all-reduce to the end of all work (h, LIBRA eq. 18-19).

        The shape is `(before, starts, J)`: the layers after which the last group may start, the chunks of computation
        at which its all-reduce may start (from `first_chunk` to Z), and the numbers of GPU threads.
        """
        sizes = self.sent[layer] - self.sent[self.earlier[layer]]
        overlapped_s = self.model.overlapped_s(sizes)[:, None, :]
        alone_s = self.model.alone_s(sizes)[:, None, :]
        left_s = (self.Z - np.arange(self.first_chunk[layer], self.Z + 1))[None, :, None] * self.w
        slowed_s = left_s / self.model.speed_J
        with np.errstate(divide="ignore", invalid="ignore"):
            unsent = np.where(overlapped_s > 0, 1 - slowed_s / overlapped_s, 0.0)
        hidden = overlapped_s <= slowed_s
        return np.where(hidden, left_s + overlapped_s * (1 - self.model.speed_J), slowed_s + alone_s * unsent)

    def _starts_s(self, layer: int) -> Floats:
        """Return the earliest times at which the all-reduce of a group that ends at `layer` may start.

        The shape is `(before, starts)`: the layers after which the group may start, and the chunks of computation.
        """
        before, first = self.earlier[layer], self.first_chunk[layer]
        inner_s = self.beyond[before, first : self.Z] + np.arange(first, self.Z) * self.w
        return np.concatenate([inner_s, self.end_s[before, None]], axis=1)


SATURATED = 0.98
"""Fraction of a link's maximum throughput above which further streams are not worth the GPU threads that they use."""


class Libra(Planner):
    """Planner that chooses groups of gradients and their numbers of GPU threads together (LIBRA, listing 1)."""

    name = "libra"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """Return the units (buckets) of the faster of two plans in the simulator.

        One plan uses the fewest permitted streams. The other plan uses as many streams as saturate the link.
        """
        link, simulator = model.links[route], model.simulator(route)
        candidates = [
            self._cuts_on(model, route, streams)
            for streams in dict.fromkeys((self.space.streams[0], self._saturating_streams(link, route)))
        ]
        return min(candidates, key=lambda cuts: simulator.run_cuts(cuts).span_s)

    def _cuts_on(self, model: PlanningModel, route: Route, streams: int) -> tuple[Cut, ...]:
        allocations = self.allocations(model, route)
        ends, choices = self._plan_groups(model, route, stage_model(model, route, allocations, streams=streams))
        threads = [allocations[choice] for choice in choices]
        return cuts_for_groups(model.layout, ends, streams=streams, slices=streams, threads=threads)

    def _plan_groups(
        self, model: PlanningModel, route: Route, stages: StageModel
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Divide the gradients into groups.

        Return the index after each group's last gradient, and each group's index into the numbers of threads.
        """
        compute_s, sizes = model.profile.durations_s, sizes_bytes(model.layout)
        runs = coarsen(compute_s, sizes)
        bounds = list(zip([0, *runs], runs, strict=False))
        plan = fuse_and_allocate(
            [math.fsum(compute_s[begin:end]) for begin, end in bounds],
            [sum(sizes[begin:end]) for begin, end in bounds],
            stages,
        )
        return [runs[end - 1] for end in plan.ends], plan.choices

    def _saturating_streams(self, link: LinkModel, route: Route) -> int:
        permitted = self.space.streams_on(route)
        best = max(link.total_bytes_per_s(streams) for streams in permitted)
        return next(n for n in permitted if link.total_bytes_per_s(n) >= SATURATED * best)


class LibraM(Libra):
    """Planner that chooses the numbers of GPU threads for MG-WFBP's groups of gradients (LIBRA-M, eq. 16-19)."""

    name = "libra_m"

    def _plan_groups(
        self, model: PlanningModel, route: Route, stages: StageModel
    ) -> tuple[Sequence[int], Sequence[int]]:
        compute_s, sizes = model.profile.durations_s, sizes_bytes(model.layout)
        groups = merge_gradients(
            model.profile.issuable_s,
            sizes,
            alpha_s=stages.alpha_s,
            beta_s_per_byte=1 / float(stages.alone_J.max()),
        )
        # More groups need more chunks, because the relative error is at most (groups - 1) / chunks (theorem 1). The
        # number of chunks is limited, because the table's size is chunks times groups.
        chunks = max(150, min(20 * len(groups), 2_000_000 // len(groups)))
        plan = allocate(compute_s, sizes, groups, stages, chunks=chunks)
        return plan.ends, plan.choices


def stage_model(model: PlanningModel, route: Route, allocations: Sequence[int | None], *, streams: int) -> StageModel:
    """Return the costs of overlapping communication with computation on a route (transport and algorithm).

    Each group of gradients is divided over `streams` concurrent streams.
    """
    link, contention = model.links[route], model.contention_on(route)
    gain = link.total_bytes_per_s(streams) / link.throughput[0]
    if contention is None:
        rate = np.array([gain * link.throughput[0]])
        return StageModel(alpha_s=link.startup_s, overlapped_J=rate, alone_J=rate, speed_J=np.ones(1))
    threads = [allocation or contention.default_threads for allocation in allocations]
    return StageModel(
        alpha_s=link.startup_s,
        overlapped_J=np.array([gain * contention.overlapped.bytes_per_s(r) for r in threads]),
        alone_J=np.array([gain * contention.alone.bytes_per_s(r) for r in threads]),
        speed_J=np.array([min(1.0, contention.compute_speed(streams * r)) for r in threads]),
    )


# ── dPRO ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

MAX_REPLAYS = 100
"""Maximum number of schedules that dPRO's search simulates for each number of streams.

The search is limited by the number of simulations, not by its time, so that its result does not depend on the host's
speed.
"""


class Dpro(Planner):
    """Planner that fuses and divides gradients on the critical path of a simulated iteration (dPRO)."""

    name = "dpro"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """Search once for each permitted number of streams, and return the units (buckets) of the fastest schedule."""
        simulator = model.simulator(route)
        best = min(
            (CriticalPathSearch(simulator, streams=streams).run() for streams in self.space.streams_on(route)),
            key=lambda schedule: (round(schedule.timeline.span_s, 6), len(schedule.cuts)),
        )
        return best.cuts


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One way to fuse gradients into tensors and to divide these into messages, with its simulated iteration (dPRO).

    A "tensor" is a group of fused gradients.

    Attributes:
        simulator: simulator of the job's training iteration.
        ends: index after the last gradient of each tensor, `(n_tensors,)`. There is no entry for empty tensors.
        partitions: number of messages (k) into which each tensor is divided, `(n_tensors,)`.
        streams: number of streams that send the messages.
    """

    simulator: Simulator
    ends: tuple[int, ...]
    partitions: tuple[int, ...]
    streams: int

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Return the messages into which the fused gradients are divided, as units (buckets)."""
        return cuts_for_groups(self.simulator.layout, self.ends, streams=self.streams, slices=self.partitions)

    @cached_property
    def timeline(self) -> SimulatedIteration:
        """Simulate an iteration with this schedule once, and return its times."""
        return self.simulator.run_cuts(self.cuts)

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Return the size of each tensor (group of fused gradients) in bytes, `(n_tensors,)`."""
        layout = self.simulator.layout
        stops = [layout.offsets[end] * layout.itemsize_bytes for end in self.ends]
        return tuple(stop - start for start, stop in zip([0, *stops], stops, strict=False))

    @cached_property
    def tensor_stop_s(self) -> tuple[float, ...]:
        """Return when the last message of each tensor (group of fused gradients) has been reduced (dPRO's q^e).

        The shape is `(n_tensors,)`. Times are in seconds after the start of the simulated backward pass.
        """
        stops: list[float] = []
        offsets, tensor = self.simulator.layout.offsets, 0
        for cut, stop_s in zip(self.cuts, self.timeline.stop_s, strict=True):
            if cut.stop > offsets[self.ends[tensor]]:
                tensor += 1
            if tensor == len(stops):
                stops.append(stop_s)
            stops[tensor] = max(stops[tensor], stop_s)
        return tuple(stops)

    def ready_s(self, tensor: int) -> float:
        """Return when the last gradient of a tensor (group of fused gradients) has been computed (dPRO's p^e)."""
        return self.simulator.issuable_s[self.ends[tensor] - 1]

    def critical_tensors(self) -> range:
        """Return the tensors n for which the communication of both n and n − 1 is on the critical path (dPRO).

        A tensor is a group of fused gradients. The path is followed back from the tensor reduced last. A tensor is on
        the path if its reduction had not ended when the next tensor was ready. Before the first such tensor, the
        critical path is computation.
        """
        stops = self.tensor_stop_s
        last = max(range(len(stops)), key=lambda tensor: stops[tensor])
        first = last
        while first > 0 and stops[first - 1] > self.ready_s(first):
            first -= 1
        return range(first + 1, last + 1)


class CriticalPathSearch:
    """dPRO's search (listing 1) for the fastest schedule on one number of streams."""

    def __init__(self, simulator: Simulator, *, streams: int) -> None:
        self.simulator = simulator
        self.streams = streams
        self._best_partition: dict[int, tuple[float, int]] = {}
        self._replays = 0

    def run(self) -> Schedule:
        """Fuse tensors on the critical path while that shortens the simulated communication time.

        These are lines 4 to 27 of dPRO's listing 1. Return the fastest schedule that was found.
        """
        best = self._replayed(coarsened_ends(self.simulator))
        while self._replays < MAX_REPLAYS:
            ends = self._fused(best)
            if len(ends) == len(best.ends):
                break
            found = self._replayed(ends)
            if found.timeline.span_s >= best.timeline.span_s:
                found = self._first_fusion_that_helps(best)
                if found is best:
                    break
            best = found
        return best

    def sync_s(self, tensor_bytes: int) -> float:
        """Return the time to all-reduce a tensor of this size, divided into the best number of messages.

        In dPRO, this is t_sync(s, k*[s]).
        """
        return self._partition(tensor_bytes)[0]

    def _partition(self, tensor_bytes: int) -> tuple[float, int]:
        """Return the shortest time to all-reduce a tensor, and the number of messages that achieves this time.

        This is dPRO's grid search OPTPARTNUM. dPRO simulates the tensor's messages. Here the time (t_sync) has a closed
        form, because all messages of a tensor start together on separate streams.
        """
        if tensor_bytes not in self._best_partition:
            most = min(self.streams, max(1, tensor_bytes // SMALLEST_UNIT_BYTES))
            together_s = self.simulator.link.together_s
            self._best_partition[tensor_bytes] = min(
                (together_s(tensor_bytes / k, streams=k), k) for k in range(1, most + 1)
            )
        return self._best_partition[tensor_bytes]

    def _replayed(self, ends: Sequence[int]) -> Schedule:
        """Simulate the schedule whose tensors end at the gradients `ends`, each tensor in its best number of messages.

        The call counts as one of at most `MAX_REPLAYS` simulations.
        """
        self._replays += 1
        offsets, itemsize = self.simulator.layout.offsets, self.simulator.layout.itemsize_bytes
        sizes = [(offsets[end] - offsets[begin]) * itemsize for begin, end in zip([0, *ends], ends, strict=False)]
        return Schedule(
            simulator=self.simulator,
            ends=tuple(ends),
            partitions=tuple(self._partition(size)[1] for size in sizes),
            streams=self.streams,
        )

    def _worth_fusing(self, ends_s: float, ready_s: float, before_bytes: int, own_bytes: int) -> bool:
        """Return whether dPRO's theorem 2 predicts a gain from fusing a tensor with the tensor before it."""
        return ends_s > ready_s + self.sync_s(before_bytes + own_bytes) - self.sync_s(own_bytes)

    def _fused(self, schedule: Schedule) -> list[int]:
        """Fuse tensors along the critical path, and return the index after the last gradient of each resulting tensor.

        These are lines 17 to 25 of dPRO's listing 1. After a fusion, the next tensor is compared with the fused tensor,
        whose end time is new.
        """
        dropped: set[int] = set()
        symmetric: set[tuple[int, int]] = set()
        sizes = schedule.tensor_bytes
        path = schedule.critical_tensors()
        if not path:
            return list(schedule.ends)
        before_bytes, before_end_s = sizes[path[0] - 1], schedule.tensor_stop_s[path[0] - 1]
        begin_s = before_end_s - self.sync_s(before_bytes)
        for tensor in path:
            ready_s, pair = schedule.ready_s(tensor), (before_bytes, sizes[tensor])
            if pair in symmetric or self._worth_fusing(before_end_s, ready_s, *pair):
                symmetric.add(pair)
                dropped.add(tensor - 1)
                begin_s = max(begin_s, ready_s)
                before_bytes += sizes[tensor]
                before_end_s = begin_s + self.sync_s(before_bytes)
            else:
                begin_s = max(before_end_s, ready_s)
                before_bytes = sizes[tensor]
                before_end_s = begin_s + self.sync_s(before_bytes)
        return [end for tensor, end in enumerate(schedule.ends) if tensor not in dropped]

    def _first_fusion_that_helps(self, schedule: Schedule) -> Schedule:
        """Return the schedule after the first fusion of two tensors that shortens the simulated communication time.

        Return `schedule` if there is none. Called if all fusions of `_fused` together make the simulated time longer.
        That happens because dPRO's theorem 2 assumes that messages are sent one after the other, while messages on
        several streams overlap.
        """
        for tensor in schedule.critical_tensors():
            before_end_s, ready_s = schedule.tensor_stop_s[tensor - 1], schedule.ready_s(tensor)
            sizes = schedule.tensor_bytes
            if not self._worth_fusing(before_end_s, ready_s, sizes[tensor - 1], sizes[tensor]):
                continue
            if self._replays >= MAX_REPLAYS:
                break
            found = self._replayed([*schedule.ends[: tensor - 1], *schedule.ends[tensor:]])
            if found.timeline.span_s < schedule.timeline.span_s:
                return found
        return schedule


def coarsened_ends(simulator: Simulator) -> list[int]:
    """Fuse gradients that are ready at nearly the same time into tensors (dPRO's coarsened view).

    Return the index after the last gradient of each tensor. A gradient belongs to a tensor if it is ready less than one
    start-up time after the tensor's first gradient. The tolerance is needed because autograd hooks run one after the
    other, even for gradients of the same operation. Empty gradients are added to a neighbouring tensor.
    """
    layout, issuable_s = simulator.layout, simulator.issuable_s
    ends: list[int] = []
    for end in range(1, len(layout.sizes) + 1):
        last = end == len(layout.sizes)
        after_s = 0.0 if last else issuable_s[end] - issuable_s[ends[-1] if ends else 0]
        together = not last and (after_s == 0.0 or after_s < simulator.link.startup_s)
        empty = layout.offsets[end] == (layout.offsets[ends[-1]] if ends else 0)
        if not together and not empty:
            ends.append(end)
    if ends and ends[-1] != len(layout.sizes):
        ends[-1] = len(layout.sizes)
    return ends


OUR_PLANNERS: tuple[type[Planner], ...] = (AscWfbpN, Libra, Dpro, AscWfbp, MgWfbp, LibraM)


def make_planners(*, space: KnobSpace, model: PlanningModel, presumed: bool = True) -> list[Planner]:
    """Create one planner of each kind, the kind with the best results on simulated clusters first.

    docs/decisions/0020 has these results. The planner `LibraM` is created only if several numbers of GPU threads are
    permitted, because its plan is otherwise that of MG-WFBP.

    Args:
        space: permitted settings.
        model: model of the job and its links.
        presumed: whether planners trust the model before there are trials. If not, they propose nothing until the model
            has ranked at least five trials correctly.
    """
    forecast = Forecast(model, presumed=presumed)
    kinds = OUR_PLANNERS if len(space.threads) > 1 else [kind for kind in OUR_PLANNERS if kind is not LibraM]
    return [kind(space=space, model=model, forecast=forecast) for kind in kinds]
