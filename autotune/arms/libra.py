"""LIBRA and LIBRA-M: unit sizes and thread allowances by dynamic programming over a contention model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirtaki.comm.plan import Route
from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel

from ..knobs import Cut
from ..model.planning import PlanningModel
from .mg_wfbp import merge_gradients
from .planner import Planner, cuts_for_groups

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageModel:
    """What overlapping costs with each of J thread allocations.

    Attributes:
        alpha_s: start-up of an all-reduce (a).
        overlapped_J: bytes per second beside computation (c / p).
        alone_J: bytes per second with nothing beside it (c / q).
        speed_J: compute speed left beside communication (b / g), at most 1.
    """

    alpha_s: float
    overlapped_J: Floats
    alone_J: Floats
    speed_J: Floats

    def __post_init__(self) -> None:
        arrays = (self.overlapped_J, self.alone_J, self.speed_J)
        if len({len(array) for array in arrays}) != 1 or not all((array > 0).all() for array in arrays):
            raise TuningError("a stage model needs positive rates and speeds for each thread allocation")
        if (self.speed_J > 1).any():
            raise TuningError(f"computation does not get faster beside communication: {self.speed_J.max()}")

    def overlapped_s(self, bytes_: Floats) -> Floats:
        """Time p + a of each size for each allocation, `(…, J)`; nothing to send takes no time (eq. 8)."""
        return self._seconds(bytes_, self.overlapped_J)

    def alone_s(self, bytes_: Floats) -> Floats:
        """Time q + a of each size for each allocation, `(…, J)`."""
        return self._seconds(bytes_, self.alone_J)

    def _seconds(self, bytes_: Floats, rates_J: Floats) -> Floats:
        sizes = np.asarray(bytes_, dtype=np.float64)[..., None]
        return np.where(sizes > 0, self.alpha_s + sizes / rates_J, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraPlan:
    """Groups and their threads.

    Attributes:
        ends: index behind the last layer of each group, `(n_groups,)`.
        choices: index of each group's thread allocation, `(n_groups,)`.
        discrete_s: backward time with starts at chunk edges only: T(K, L, Z), never below what is reached.
    """

    ends: tuple[int, ...]
    choices: tuple[int, ...]
    discrete_s: float


def backward_s(
    compute_s: Sequence[float],
    sizes_bytes: Sequence[int],
    ends: Sequence[int],
    choices: Sequence[int],
    model: StageModel,
) -> float:
    """The backward time of a plan by eq. (7)-(15), with starts wherever they fall.

    Args:
        compute_s: computation of each layer in the order of the backward pass, `(L,)`.
        sizes_bytes: `(L,)`.
        ends: of each group, `(n_groups,)`.
        choices: thread allocation of each group, `(n_groups,)`.
        model: what overlapping costs.
    """
    ready = np.concatenate([[0.0], np.cumsum(compute_s)])
    sent = np.concatenate([[0.0], np.cumsum(sizes_bytes)])
    bounds = [0, *ends]
    total_s = float(ready[bounds[1]])  # stage 0: the computation of the first group
    left_s = float(ready[-1] - ready[bounds[1]])  # s_b
    for i, choice in enumerate(choices):
        size = np.array(sent[bounds[i + 1]] - sent[bounds[i]])
        overlapped_s = float(model.overlapped_s(size)[choice])
        alone_s = float(model.alone_s(size)[choice])
        slowed_s = left_s / float(model.speed_J[choice])  # g(s_b, r)
        both_s = min(overlapped_s, slowed_s)  # eq. (8)
        residual_compute_s = left_s * (1 - both_s / slowed_s) if left_s > 0 else 0.0  # eq. (9), (11), (14)
        residual_communication_s = alone_s * (1 - both_s / overlapped_s) if size > 0 else 0.0  # eq. (10), (11)
        after_next_s = float(ready[-1] - ready[bounds[min(i + 2, len(bounds) - 1)]])
        waiting_s = max(0.0, residual_compute_s - after_next_s)  # eq. (13)
        total_s += both_s + waiting_s + residual_communication_s
        left_s = residual_compute_s - waiting_s  # eq. (15)
    return total_s


def fuse_and_allocate(
    compute_s: Sequence[float],
    sizes_bytes: Sequence[int],
    model: StageModel,
    *,
    chunks: int = 150,
    max_groups: int | None = None,
) -> LibraPlan:
    """LIBRA: groups and threads together (listing 1, eq. 21-23).

    Without a limit on the groups (eq. 21) the result is at least as good as with one, and here it is cheaper, which
    it is not for the printed listing: the paper's K = 10 is an option, no default.

    Args:
        compute_s: computation of each layer in the order of the backward pass, `(L,)`.
        sizes_bytes: `(L,)`.
        model: what overlapping costs.
        chunks: Z; the result is within (K − 1) / Z of the optimum of K groups (theorem 2).
        max_groups: K.
    """
    earlier = [np.arange(layer) for layer in range(len(sizes_bytes) + 1)]
    return _solve(compute_s, sizes_bytes, model, chunks=chunks, max_groups=max_groups, earlier=earlier)


def allocate(
    compute_s: Sequence[float], sizes_bytes: Sequence[int], ends: Sequence[int], model: StageModel, *, chunks: int = 150
) -> LibraPlan:
    """LIBRA-M: threads for given groups (eq. 16-19), within (K − 1) / Z of the optimum (theorem 1)."""
    bounds = [0, *ends]
    group_compute_s = [sum(compute_s[begin:end]) for begin, end in zip(bounds, ends, strict=False)]
    group_bytes = [sum(sizes_bytes[begin:end]) for begin, end in zip(bounds, ends, strict=False)]
    earlier = [np.array([max(0, group - 1)]) for group in range(len(bounds))]
    plan = _solve(group_compute_s, group_bytes, model, chunks=chunks, max_groups=None, earlier=earlier)
    return LibraPlan(ends=tuple(ends), choices=plan.choices, discrete_s=plan.discrete_s)


def coarsen(compute_s: Sequence[float], sizes_bytes: Sequence[int], *, limit: int = 160) -> list[int]:
    """Ends of at most about `limit` runs of layers, cut where computation and bytes have both advanced by a share.

    A big or slow layer stays alone; a thousand small ones close to each other become one, which no plan would send
    one by one anyway.
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


def _solve(
    compute_s: Sequence[float],
    sizes_bytes: Sequence[int],
    model: StageModel,
    *,
    chunks: int,
    max_groups: int | None,
    earlier: Sequence[Ints],
) -> LibraPlan:
    if not len(sizes_bytes) or len(compute_s) != len(sizes_bytes):
        raise TuningError(f"LIBRA needs at least one layer: {len(compute_s)} times, {len(sizes_bytes)} sizes")
    if sum(compute_s) <= 0:  # nothing to overlap with: one message with the fastest allocation
        alone_J = model.alone_s(np.array(float(sum(sizes_bytes))))
        return LibraPlan(ends=(len(sizes_bytes),), choices=(int(alone_J.argmin()),), discrete_s=float(alone_J.min()))
    programme = _Programme(compute_s, sizes_bytes, model, chunks=chunks, max_groups=max_groups, earlier=earlier)
    programme.fill()
    return programme.best()


class _Programme:
    """The table of listing 1. Rows count groups (one row for any number where they are not limited)."""

    def __init__(
        self,
        compute_s: Sequence[float],
        sizes_bytes: Sequence[int],
        model: StageModel,
        *,
        chunks: int,
        max_groups: int | None,
        earlier: Sequence[Ints],
    ) -> None:
        self.model = model
        self.earlier = earlier
        self.Z = chunks
        self.n_layers = len(sizes_bytes)
        ready = np.concatenate([[0.0], np.cumsum(compute_s)])
        self.w = float(ready[-1]) / chunks
        self.first_chunk = np.minimum(np.ceil(ready / self.w - 1e-9).astype(np.int64), chunks)  # ⌈n(l) / w⌉
        self.sent = np.concatenate([[0.0], np.cumsum(np.asarray(sizes_bytes, dtype=np.float64))])
        self.step = 0 if max_groups is None else 1  # rows from a state to the one it came from
        rows = 1 if max_groups is None else max_groups + 1
        self.source = slice(0, rows - self.step)
        self.target = slice(self.step, rows)
        # U for z < Z; column Z is a sentinel that no stage can start from. T at z = Z is apart.
        self.beyond = np.full((rows, self.n_layers + 1, chunks + 1), np.inf)
        self.beyond[0, 0, :chunks] = 0.0
        self.end_s = np.full((rows, self.n_layers + 1), np.inf)
        self.end_s[0, 0] = ready[-1]

    def fill(self) -> None:
        for layer in range(1, self.n_layers + 1):
            before = self.earlier[layer]
            need, price = self._stages(layer)
            z = np.arange(self.first_chunk[layer], self.Z)
            start = z - need[..., None]  # (before, J, z)
            start = np.where(start >= self.first_chunk[layer], start, self.Z)
            flat = before[:, None, None] * (self.Z + 1) + start
            rows = self.beyond[self.source]
            reached = np.take(rows.reshape(len(rows), -1), flat, axis=1) + price[..., None]
            if z.size:
                self.beyond[self.target, layer, z[0] : self.Z] = reached.reshape(len(rows), -1, z.size).min(axis=1)
            last = self._last_stages(layer).min(axis=2)  # (before, z and Z)
            self.end_s[self.target, layer] = (self._starts_s(layer) + last).reshape(len(rows), -1).min(axis=1)

    def best(self) -> LibraPlan:
        row = int(self.end_s[:, self.n_layers].argmin())
        ends: list[int] = []
        choices: list[int] = []
        layer, z = self.n_layers, self.Z
        while layer > 0:
            ends.append(layer)
            before = self.earlier[layer]
            row -= self.step
            if z == self.Z:
                times = self._starts_s(layer)[row][..., None] + self._last_stages(layer)
                i, z_index, choice = np.unravel_index(int(times.argmin()), times.shape)
                z = int(self.first_chunk[layer]) + int(z_index)
            else:
                need, price = self._stages(layer)
                start = np.where(z - need >= self.first_chunk[layer], z - need, self.Z)
                times = self.beyond[row, before[:, None], start] + price
                i, choice = np.unravel_index(int(times.argmin()), times.shape)
                z = int(start[i, choice])
            layer = int(before[i])
            choices.append(int(choice))
        return LibraPlan(
            ends=tuple(ends[::-1]),
            choices=tuple(choices[::-1]),
            discrete_s=float(self.end_s[:, self.n_layers].min()),
        )

    def _stages(self, layer: int) -> tuple[Ints, Floats]:
        """Chunks that hide the communication of each group ending at `layer`, and its price: `(before, J)` each."""
        overlapped_s = self.model.overlapped_s(self.sent[layer] - self.sent[self.earlier[layer]])
        need = np.ceil(overlapped_s * self.model.speed_J / self.w - 1e-9).astype(np.int64)
        return need, overlapped_s * (1 - self.model.speed_J)

    def _last_stages(self, layer: int) -> Floats:
        """Stage times h of stages that end the pass, `(before, starts from first_chunk to Z, J)`, eq. (18)-(19)."""
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
        """T of every state from which a stage of groups ending at `layer` may start, `(rows, before, starts)`."""
        z = np.arange(self.first_chunk[layer], self.Z)
        rows = self.beyond[self.source][:, self.earlier[layer]]
        inner_s = rows[:, :, self.first_chunk[layer] : self.Z] + z * self.w
        outer_s = self.end_s[self.source][:, self.earlier[layer], None]
        return np.concatenate([inner_s, outer_s], axis=2)


SATURATED = 0.98  # share of the largest throughput at which more streams are not worth their threads


class Libra(Planner):
    """Thread allocation and tensor fusion together (listing 1)."""

    name = "libra"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """The programme's groups, each unit with its threads, for one stream or for enough to fill the link."""
        link, simulator = model.links[route], model.simulator(route)
        candidates = [
            self._cuts_on(model, link, streams)
            for streams in dict.fromkeys((self.space.streams[0], self._enough(link, route)))
        ]
        return min(candidates, key=lambda cuts: simulator.run_cuts(cuts).span_s)

    def _cuts_on(self, model: PlanningModel, link: LinkModel, streams: int) -> tuple[Cut, ...]:
        allocations = self.allocations(model)
        ends, choices = self._plan_groups(model, link, stage_model(model, link, allocations, streams=streams))
        threads = [allocations[choice] for choice in choices]
        return cuts_for_groups(model.layout, ends, streams=streams, slices=streams, threads=threads)

    def _plan_groups(
        self, model: PlanningModel, link: LinkModel, stages: StageModel
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Ends and thread allocations of the groups."""
        compute_s, sizes_bytes = _layers(model)
        runs = coarsen(compute_s, sizes_bytes)
        bounds = list(zip([0, *runs], runs, strict=False))
        plan = fuse_and_allocate(
            [math.fsum(compute_s[begin:end]) for begin, end in bounds],
            [sum(sizes_bytes[begin:end]) for begin, end in bounds],
            stages,
        )
        return [runs[end - 1] for end in plan.ends], plan.choices

    def _enough(self, link: LinkModel, route: Route) -> int:
        permitted = self.space.streams_on(route)
        best = max(link.total_bytes_per_s(streams) for streams in permitted)
        return next(n for n in permitted if link.total_bytes_per_s(n) >= SATURATED * best)


class LibraM(Libra):
    """Thread allocation for MG-WFBP's groups (eq. 16-19)."""

    name = "libra_m"

    def _plan_groups(
        self, model: PlanningModel, link: LinkModel, stages: StageModel
    ) -> tuple[Sequence[int], Sequence[int]]:
        compute_s, sizes_bytes = _layers(model)
        groups = merge_gradients(
            model.profile.issuable_s,
            sizes_bytes,
            alpha_s=stages.alpha_s,
            beta_s_per_byte=1 / float(stages.alone_J.max()),
        )
        # Theorem 1 allows an error of (K − 1) / Z, and MG-WFBP may leave many groups: Z grows with K while it is cheap.
        chunks = max(150, min(20 * len(groups), 2_000_000 // len(groups)))
        plan = allocate(compute_s, sizes_bytes, groups, stages, chunks=chunks)
        return plan.ends, plan.choices


def stage_model(
    model: PlanningModel, link: LinkModel, allocations: Sequence[int | None], *, streams: int
) -> StageModel:
    """What overlapping costs for each allocation when a group fills `streams` streams side by side."""
    gain = link.total_bytes_per_s(streams) / link.throughput[0]
    contention = model.contention
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


def _layers(model: PlanningModel) -> tuple[Sequence[float], list[int]]:
    layout = model.layout
    return model.profile.durations_s, [size * layout.itemsize_bytes for size in layout.sizes]
