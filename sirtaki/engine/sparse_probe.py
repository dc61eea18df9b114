"""Measures what exchanges and all-reduces of rows cost between these ranks, and on how many streams they go fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.autotune.sparse.volume import HotPace, Pace
from sirtaki.comm.sparse.lanes import SparseLanes

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

KIB = 1024
PAIR_BYTES = 256 * KIB
"""What goes from each rank to each other in a large exchange; a large all-reduce carries as much for all of them."""

SMALL_BYTES = 64
OTHER_STREAMS = (8, 2, 1)
"""Tried after those in use, which the budget always covers."""

REPEATS = 3
BUDGET_S = 1.0
"""After so long no more streams are tried."""

ADDED_ROWS, ADDED_WIDTH = 8192, 64
CLEARLY = 0.9
"""Another number of streams is used only where it takes at most so much of the time."""


@dataclass(frozen=True, slots=True)
class _Times:
    small_s: float
    large_s: float

    def rate(self, n_bytes: float) -> float:
        """Bytes a second beyond the start."""
        return n_bytes / max(self.large_s - self.small_s, 1e-7)


def measure(control: ControlPlane, lanes: SparseLanes, *, streams: int | None) -> Pace:
    """Collective, with nothing under way: probes, and has the lanes use the numbers of streams that were fastest.

    Args:
        control: the ranks.
        lanes: between them.
        streams: the only number that may be used; None = any.
    """
    begin_s = time.perf_counter()
    exchanges: dict[int, _Times] = {}
    reductions: dict[int, _Times] = {}
    in_use = (lanes.exchange_streams, lanes.reduce_streams)
    for count in dict.fromkeys([streams] if streams else [*in_use, *OTHER_STREAMS]):
        count = min(count, lanes.open_streams(count))
        if count in exchanges:
            continue
        lanes.exchange_streams = lanes.reduce_streams = count
        exchanges[count] = _measure(control, lambda size: _exchange(lanes, size))
        reductions[count] = _measure(control, lambda size: _all_reduce(lanes, size))
        late = float(control.maximum(np.array([time.perf_counter() - begin_s]))[0]) > BUDGET_S
        if late and all(usual in exchanges for usual in in_use):
            break
    lanes.exchange_streams = _fastest(exchanges, usual=in_use[0])
    lanes.reduce_streams = _fastest(reductions, usual=in_use[1])
    exchange, reduction = exchanges[lanes.exchange_streams], reductions[lanes.reduce_streams]
    return Pace(
        exchange_s=exchange.small_s,
        exchange_bytes_per_s=exchange.rate(PAIR_BYTES * (lanes.size - 1)),
        reduce_s=reduction.small_s,
        reduce_bytes_per_s=reduction.rate(PAIR_BYTES * lanes.size),
        add_bytes_per_s=_adding(control),
        aggregator=_aggregating(control, lanes),
    )


def _aggregating(control: ControlPlane, lanes: SparseLanes) -> HotPace | None:
    """Collective: None where there is no aggregator, or where it is lost meanwhile."""
    hot = lanes.hot_sums
    if hot is None or not hot.is_open:
        return None
    times = _measure(control, lambda size: lanes.sum_hot_(torch.zeros(size * lanes.size // 4)))
    return HotPace(start_s=times.small_s, bytes_per_s=times.rate(PAIR_BYTES * lanes.size)) if hot.is_open else None


def _fastest(times: dict[int, _Times], *, usual: int) -> int:
    """The usual number of streams unless another is clearly faster: one probe in a noisy moment proves little."""
    best = min(times, key=lambda count: times[count].large_s)
    if usual in times and times[best].large_s >= CLEARLY * times[usual].large_s:
        return usual
    return best


def _measure(control: ControlPlane, act: Callable[[int], None]) -> _Times:
    """Collective: of the slowest rank, each at its best."""
    act(PAIR_BYTES)  # memory that is touched for the first time, and windows that open
    times = [min(_timed(control, act, size) for _ in range(REPEATS)) for size in (SMALL_BYTES, PAIR_BYTES)]
    small_s, large_s = control.maximum(np.array(times)).tolist()
    return _Times(small_s, large_s)


def _timed(control: ControlPlane, act: Callable[[int], None], size: int) -> float:
    control.barrier()
    begin_s = time.perf_counter()
    act(size)
    return time.perf_counter() - begin_s


def _exchange(lanes: SparseLanes, size: int) -> None:
    parcels = [torch.zeros(size, dtype=torch.uint8) for _ in range(lanes.size)]
    lanes.exchange(parcels, [[size] * lanes.size] * lanes.size)


def _all_reduce(lanes: SparseLanes, size: int) -> None:
    lanes.all_reduce_(torch.zeros(size * lanes.size // 4))


def _adding(control: ControlPlane) -> float:
    """Collective: bytes of rows that a rank adds up in a second, while the others do so, too."""
    total = torch.zeros(ADDED_ROWS, ADDED_WIDTH)
    places = torch.arange(ADDED_ROWS)

    def tries() -> Iterator[float]:
        for _ in range(REPEATS):
            begin_s = time.perf_counter()
            torch.zeros_like(total).index_add_(0, torch.unique(places, return_inverse=True)[1], total)
            yield time.perf_counter() - begin_s

    slowest_s = float(control.maximum(np.array([min(tries())]))[0])
    return total.numel() * total.itemsize / slowest_s
