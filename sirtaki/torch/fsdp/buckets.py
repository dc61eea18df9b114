"""All-gathers and reduce-scatters of a sharded model, coalesced in buckets, and computation times of a step."""

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
"""Codec that compresses all-gathers of parameters, and codec that compresses reduce-scatters of gradients.

None for no compression.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Successive modules whose shards are coalesced into one all-gather and one reduce-scatter.

    Attributes:
        first: first module of the bucket in the order of use. In the backward pass, its gradients are scattered last.
        last: last module of the bucket in the order of use. In the forward pass, its parameters are gathered last.
        again: module of the bucket whose parameters are gathered last when they are gathered again for the backward
            pass.
    """

    first: FsdpGroup
    last: FsdpGroup
    again: FsdpGroup


class JointTransfers:
    """Launcher of a model's all-gathers (gathers) and reduce-scatters (scatters).

    The gathers of one bucket are collected and launched as one. So are its scatters.

    Attributes:
        buckets: bucket of each of FSDP's parameter groups that is coalesced with others.
        hooked: parameter groups for which the user has registered gradient hooks on at least one rank.
        packing: codecs that compress gathers and scatters.
        most_scatters: maximum number of scatters in flight.
        waited_s: seconds for which the training thread has waited for gathers and scatters so far.
    """

    def __init__(self, packing: Packing) -> None:
        self.buckets: dict[FsdpGroup, Bucket] = {}
        self.hooked: set[FsdpGroup] = set()
        self.packing, self.most_scatters, self.waited_s = packing, 1, 0.0
        self._in_flight: list[ShardWork | JointScatter] = []
        self._gathering: tuple[object, JointGather] | None = (
            None  # Bucket whose gathers are being collected, or were launched last.
        )
        self._scattering: tuple[object, JointScatter] | None = None  # Bucket whose scatters are being collected.

    @property
    def has_scatters(self) -> bool:
        """Return whether a reduce-scatter is in flight, or is collected until the rest of its bucket follows."""
        return bool(self._in_flight) or self._scattering is not None

    def bucket_of_gather(self, group: FsdpGroup) -> Bucket | None:
        """Return the bucket of the all-gather of `group` that FSDP requests now.

        None if the all-gather must be launched at once, because the user has requested it (`unshard`): ranks may wait
        for such a gather at different points.
        """
        return self.buckets.get(group) if group.phase in ("FORWARD", "PRE_BACKWARD") else None

    def gather(
        self, group: FsdpGroup, lanes: ShardLanes, rows: Sequence[torch.Tensor], shard: torch.Tensor
    ) -> tuple[ShardWork | JointGather, Callable[[], None] | None]:
        """All-gather the parameters of `group`. If other modules are in its bucket, first collect their gathers.

        Collective, non-blocking.

        FSDP requests the modules of a bucket one after the other. One gather for the whole bucket is launched when FSDP
        requests the last module, or earlier if FSDP waits for one of the modules.

        Returns:
            The gather to wait for, and a function to call when the gather has ended. The function is None if there is
            nothing to do.
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
        """Launch the all-gathers that have been collected for a bucket, if there are any. Collective, non-blocking."""
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
        """Reduce-scatter the gradients of `group`.

        If the group shares a bucket with other modules, only add it to the bucket, which is later reduce-scattered as a
        whole. Collective.

        Args:
            group: parameter group whose gradients the backward pass has computed.
            lanes: connections between the ranks of the group.
            whole: gradients of this rank, in the layout of `ShardLanes.scatter`.
            part: memory for this rank's shard of the reduced gradients.
            recipe: operator of the reduction, and a factor that multiplies its result.
            waits: whether to wait for the result before returning, instead of at the end of the backward pass.
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
        """Launch the reduce-scatters that have been collected for a bucket, if there are any. Collective."""
        scattering, self._scattering = self._scattering, None
        if scattering is not None:
            self.make_room()
            scattering[1].send()
            self._in_flight.append(scattering[1])

    def make_room(self) -> None:
        """Wait for reduce-scatters in flight until one more may be launched.

        Raises:
            CommError: one of the scatters failed.
        """
        self._wait(left=self.most_scatters - 1)

    def wait(self) -> None:
        """Launch the reduce-scatters that have been collected for a bucket.

        Then wait for all reduce-scatters in flight.

        Raises:
            CommError: one of the scatters failed.
        """
        self.launch_scatters()
        self._wait(left=0)

    def _wait(self, *, left: int) -> None:
        ended = max(0, len(self._in_flight) - left)
        works, self._in_flight = self._in_flight[:ended], self._in_flight[ended:]
        for work in works:
            self.wait_for(work)

    def wait_for(self, work: ShardWork | JointGather | JointScatter) -> None:
        """Block until one gather or scatter has ended, and add the time to `waited_s`.

        Raises:
            CommError: the gather or scatter failed.
        """
        begun_s = time.perf_counter()
        work.wait()
        self.waited_s += time.perf_counter() - begun_s


class StepTrace:
    """Recorder of the computation time of each module in one training step, without waits for communication.

    Attributes:
        begun_s: time at which the step began (`time.perf_counter`).
    """

    def __init__(self, transfers: JointTransfers) -> None:
        self._transfers, self.begun_s = transfers, time.perf_counter()
        self._computed_s = self.begun_s - transfers.waited_s
        self._forward: dict[FsdpGroup, float] = {}
        self._backward: dict[FsdpGroup, float] = {}
        self._now: FsdpGroup | None = None  # Parameter group that the forward pass is using now.

    def used(self, group: FsdpGroup | None) -> None:
        """Record that the forward pass begins to use the parameters of `group`. With None, record its end."""
        self._add(self._forward, self._now)
        self._now = group

    def scattered(self, group: FsdpGroup) -> None:
        """Record that the backward pass has computed the gradients of `group`, and scatters them."""
        self._add(self._backward, group)

    def end(self, order: Sequence[FsdpGroup]) -> NDArray[np.float64]:
        """Stop recording and return the computation times of the step.

        Args:
            order: all parameter groups, in the order of use.

        Returns:
            Computation times in seconds, `(2 groups + 1,)`: the forward pass of each group, the backward pass of each
            group, and the rest of the step. Infinite for groups that were used twice or not at all.
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
