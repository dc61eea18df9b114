"""Gathers and scatters of a sharded model, coalesced in buckets, and the computation times of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sirtaki.comm.compress import Codec
from sirtaki.comm.shards import JointGather, JointScatter, ShardLanes, ShardWork
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.engine.autograd import in_backward, when_backward_ends

from .private import FsdpGroup

Packing = tuple[Codec | None, Codec | None]
"""Codecs of gathers and of scatters. None sends shards without compression."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Adjacent modules whose shards are coalesced into one transfer.

    Attributes:
        first: first module in the order of use. Its gradients are scattered last.
        last: last module in the order of use. Its parameters are gathered last in the forward pass.
        again: module whose parameters are gathered last for the backward pass.
    """

    first: FsdpGroup
    last: FsdpGroup
    again: FsdpGroup


class JointTransfers:
    """Gathers and scatters of one model. The transfers of a bucket are collected and launched as one.

    Attributes:
        buckets: bucket of each coalesced group.
        hooked: groups that have gradient hooks of the user on at least one rank.
        packing: codecs of gathers and scatters.
        most_scatters: limit of scatters in flight.
        waited_s: seconds that the training thread has waited for transfers so far.
    """

    def __init__(self, packing: Packing) -> None:
        self.buckets: dict[FsdpGroup, Bucket] = {}
        self.hooked: set[FsdpGroup] = set()
        self.packing, self.most_scatters, self.waited_s = packing, 1, 0.0
        self._in_flight: list[ShardWork | JointScatter] = []
        self._gathering: tuple[object, JointGather] | None = None  # not launched, or the last one launched
        self._scattering: tuple[object, JointScatter] | None = None  # not launched

    @property
    def has_scatters(self) -> bool:
        """Return whether scatters are in flight or collected."""
        return bool(self._in_flight) or self._scattering is not None

    def bucket_of_gather(self, group: FsdpGroup) -> Bucket | None:
        """Return the bucket of FSDP's next gather of `group`.

        None for a gather requested by the user (`unshard`). It must be launched at once, because ranks may wait for it
        at different points.
        """
        return self.buckets.get(group) if group.phase in ("FORWARD", "PRE_BACKWARD") else None

    def gather(
        self, group: FsdpGroup, lanes: ShardLanes, rows: Sequence[torch.Tensor], shard: torch.Tensor
    ) -> tuple[ShardWork | JointGather, Callable[[], None] | None]:
        """Gather the parameters of `group`. Collective, non-blocking.

        FSDP requests the modules of a bucket one after the other. The bucket is launched with its last module, or
        earlier if FSDP waits for one of its modules.

        Returns:
            The work, and a function to call when it has ended.
        """
        bucket, (codec, _) = self.bucket_of_gather(group), self.packing
        kind = bucket, lanes, shard.dtype
        if self._gathering is not None and (self._gathering[1].sent or self._gathering[0] != kind):
            self.launch_gathers()
        if bucket is None:
            return lanes.gather(rows, shard, codec=codec, label=group.number), None
        if self._gathering is None:
            self._gathering = kind, JointGather(lanes, shard.dtype, codec=codec)
        _, joint = self._gathering
        unpack = joint.add(rows, shard, label=group.number)
        if group is (bucket.again if in_backward() else bucket.last):
            self.launch_gathers()
        return joint, unpack

    def launch_gathers(self) -> None:
        """Launch the bucket whose gathers have been collected, if there is one. Collective, non-blocking."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering[1].send()

    def scatter(
        self,
        group: FsdpGroup,
        lanes: ShardLanes,
        whole: torch.Tensor,
        part: torch.Tensor,
        recipe: tuple[ReduceOp, float],
        *,
        waits: bool,
    ) -> None:
        """Scatter the gradients of `group`, in the backward pass. Collective.

        Args:
            group: the parameter group.
            lanes: lanes between the ranks of the group.
            whole: gradients of this rank, in the layout of `ShardLanes.scatter`.
            part: memory for this rank's shard of the result.
            recipe: reduction, and factor of the result.
            waits: wait for the result before returning, instead of at the end of the backward pass.
        """
        bucket, (_, codec), (op, scale) = self.buckets.get(group), self.packing, recipe
        kind = bucket, lanes, whole.dtype, recipe
        if self._scattering is not None and (waits or self._scattering[0] != kind):
            self.launch_scatters()
        if not waits:
            when_backward_ends(self.wait)
        if bucket is None or waits:
            work = lanes.scatter(whole, part, op=op, scale=scale, codec=codec, label=group.number)
            if waits:
                self.wait_for(work)
            else:
                self._in_flight.append(work)
            return
        if self._scattering is None:
            self._scattering = kind, JointScatter(lanes, whole.dtype, op=op, scale=scale, codec=codec)
        self._scattering[1].add(whole, part, label=group.number)
        if group is bucket.first:
            self.launch_scatters()

    def launch_scatters(self) -> None:
        """Launch the bucket whose scatters have been collected, if there is one. Collective."""
        scattering, self._scattering = self._scattering, None
        if scattering is not None:
            self.make_room()
            scattering[1].send()
            self._in_flight.append(scattering[1])

    def make_room(self) -> None:
        """Wait for scatters in flight until one more may be launched.

        Raises:
            CommError: one of them failed.
        """
        self._wait(left=self.most_scatters - 1)

    def wait(self) -> None:
        """Launch the scatters that have been collected. Wait for all scatters.

        Raises:
            CommError: one of them failed.
        """
        self.launch_scatters()
        self._wait(left=0)

    def _wait(self, *, left: int) -> None:
        ended = max(0, len(self._in_flight) - left)
        works, self._in_flight = self._in_flight[:ended], self._in_flight[ended:]
        for work in works:
            self.wait_for(work)

    def wait_for(self, work: ShardWork | JointGather | JointScatter) -> None:
        """Wait for one transfer.

        Raises:
            CommError: the transfer failed.
        """
        begun_s = time.perf_counter()
        work.wait()
        self.waited_s += time.perf_counter() - begun_s


class StepTrace:
    """Computation times of one step, per module, without waits of the training thread for transfers.

    Attributes:
        begun_s: begin of the step (`time.perf_counter`).
    """

    def __init__(self, transfers: JointTransfers) -> None:
        self._transfers, self.begun_s = transfers, time.perf_counter()
        self._computed_s = self.begun_s - transfers.waited_s
        self._forward: dict[FsdpGroup, float] = {}
        self._backward: dict[FsdpGroup, float] = {}
        self._now: FsdpGroup | None = None  # used in the forward pass

    def used(self, group: FsdpGroup | None) -> None:
        """Record that the forward pass begins to use `group`. None ends the forward pass."""
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
            Seconds of computation, `(2 groups + 1,)`: forward pass per group, backward pass per group, rest. Infinite
            for modules that were used twice or not at all.
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
