"""Measurements that predict steps with other settings: the computation of one step, and the network's speed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from sirtaki.autotune.sharded import ShardLink
from sirtaki.comm.shards import ShardLanes
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.errors import TransportError

from .buckets import JointTransfers
from .private import FsdpGroup

MOST_LATENCY = 0.5
"""The largest share of a measured gather that counts as latency. More is a disturbance."""

MESSAGES = 16
"""Number of small gathers that are launched at once to measure the cost of one message."""

LEAST_PROBE_BYTES, PROBE_BYTES, SMALL_BYTES = 1 << 20, 4 << 20, 4 << 10
"""Bytes of the whole tensor that a probe gathers: at least, at most, and to measure latency."""


class StepTrace:
    """Computation times of one step: when the training thread used modules, without the time it waited.

    Attributes:
        begun_s: when the step began.
    """

    def __init__(self, transfers: JointTransfers) -> None:
        self._transfers, self.begun_s = transfers, time.perf_counter()
        self._computed_s = self.begun_s - transfers.waited_s
        self._forward: dict[FsdpGroup, float] = {}
        self._backward: dict[FsdpGroup, float] = {}
        self._now: FsdpGroup | None = None  # used in the forward pass

    def used(self, group: FsdpGroup | None) -> None:
        """Record that the forward pass begins to use `group`. None if the forward pass has ended."""
        self._add(self._forward, self._now)
        self._now = group

    def scattered(self, group: FsdpGroup) -> None:
        """Record that the backward pass has computed the gradients of `group`."""
        self._add(self._backward, group)

    def end(self, order: Sequence[FsdpGroup]) -> NDArray[np.float64]:
        """End the trace.

        Args:
            order: groups in the order of use.

        Returns:
            Seconds of computation, `(2 groups + 1,)`: forward, backward, the rest. Infinite for modules that were used
            twice, or not at all.
        """
        forward_s = [self._forward.get(group, math.inf) for group in order]
        backward_s = [self._backward.get(group, 0.0) for group in order]
        return np.maximum([*forward_s, *backward_s, self._elapsed_s()], 0.0)

    def _add(self, spans_s: dict[FsdpGroup, float], group: FsdpGroup | None) -> None:
        span_s = self._elapsed_s()
        if group is not None:
            spans_s[group] = math.inf if group in spans_s else span_s

    def _elapsed_s(self) -> float:
        before_s, self._computed_s = self._computed_s, time.perf_counter() - self._transfers.waited_s
        return self._computed_s - before_s


def measure_link(
    lanes: ShardLanes, streams: Sequence[int], *, now: int, whole_bytes: int, seconds: float, near: ShardLanes | None
) -> ShardLink | None:
    """Measure how long gathers and scatters take. Collective, with nothing in flight.

    Args:
        lanes: lanes to measure.
        streams: numbers of connections that may be used.
        now: the number of connections in use, before and afterwards.
        whole_bytes: bytes of the largest tensor that is gathered.
        seconds: the approximate time that may be spent.
        near: lanes within a node, if there are any.

    Returns:
        The measured link. None if the times are too short to be measured.
    """
    begun_s, control = time.perf_counter(), lanes.control
    whole_bytes = min(max(whole_bytes, LEAST_PROBE_BYTES), PROBE_BYTES)

    def tensor(size: int, n_bytes: int) -> torch.Tensor:
        return torch.zeros(size, -(-n_bytes // (4 * size)), dtype=torch.float32, device="cpu")

    def took_s(lanes: ShardLanes, n_bytes: int, *, scatters: bool = False) -> float:
        whole = tensor(lanes.control.size, n_bytes)
        part, spans_s = whole[0].clone(), []
        for _ in range(2):
            lanes.control.barrier()
            start_s = time.perf_counter()
            if scatters:
                lanes.scatter(whole, part, op=ReduceOp.SUM, scale=1.0).wait()
            else:
                lanes.gather(list(whole), part).wait()
            spans_s.append(time.perf_counter() - start_s)
        return float(lanes.control.maximum(np.array([min(spans_s)]))[0])

    gather_s, scatter_s = (took_s(lanes, whole_bytes, scatters=scatters) for scatters in (False, True))
    near_s = math.inf if near is None else took_s(near, whole_bytes)
    if not min(gather_s, scatter_s, near_s) > 0.0:
        return None
    latency_s = min(took_s(lanes, SMALL_BYTES), MOST_LATENCY * gather_s)
    small = tensor(control.size, SMALL_BYTES)
    control.barrier()
    start_s = time.perf_counter()
    for work in [lanes.gather(list(small), small[0].clone()) for _ in range(MESSAGES)]:
        work.wait()
    message_s = float(control.maximum(np.array([time.perf_counter() - start_s]))[0]) / MESSAGES
    rates = {now: whole_bytes / (gather_s - latency_s)}
    for count in sorted(streams, key=lambda count: abs(math.log(count / now))):
        if control.maximum(np.array([time.perf_counter() - begun_s - seconds]))[0] > 0.0:
            break
        if count != now:
            with suppress(TransportError):  # on all ranks; the connections in use stay open
                lanes.use(count)
                span_s = took_s(lanes, whole_bytes)
                rates[count] = whole_bytes / (span_s - min(latency_s, MOST_LATENCY * span_s))
    lanes.use(now)
    return ShardLink(
        latency_s=latency_s,
        gathered=rates,
        scatter_times=scatter_s / gather_s,
        message_s=message_s,
        **({} if near is None else {"near_bytes_per_s": whole_bytes / near_s}),
    )
