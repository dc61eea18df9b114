"""State of a model under `fully_shard` whose shards Sirtaki sends, or whose collectives Sirtaki tunes.

FSDP all-gathers the parameters of each module before their use (gather), and reduce-scatters the gradients afterwards
(scatter). `ShardedModel` decides how far ahead FSDP gathers, which modules keep their parameters for the backward pass,
and which modules' shards are coalesced.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from sirtaki.autotune.sharded import ShardKnobs
from sirtaki.comm.shards import ShardLanes
from sirtaki.engine.autograd import in_backward, when_backward_ends
from sirtaki.engine.reducing import distributed_autograd
from sirtaki.engine.settings import Settings
from sirtaki.errors import TransportError

from .buckets import Bucket, JointTransfers, Packing, StepTrace
from .connections import PytorchCollectives, ShardConnections, describe_pytorch
from .private import FsdpGroup, ranks_of

logger = logging.getLogger(__name__)

AS_PYTORCH = ShardKnobs(streams=1, ahead=0, behind=1)
"""Setting of all-gathers and reduce-scatters with which FSDP behaves as without Sirtaki."""


class StepObserver(Protocol):
    """Interface of the tuner of a sharded model. The tuner is called after each training step."""

    def end_step(self) -> None:
        """Record that a training step has ended. Collective.

        Called while no all-gather or reduce-scatter is in flight.
        """
        ...

    def give_up(self, why: str) -> None:
        """Stop tuning, because the times of training steps cannot be compared any more. Log the reason `why`.

        Collective. Called while no all-gather or reduce-scatter is in flight.
        """
        ...


class ShardedModel:
    """State of one sharded model: its parameter groups, its connections, and the setting of its all-gathers (gathers)
    and reduce-scatters (scatters).

    A *lane* is a set of Sirtaki's connections between ranks.

    Attributes:
        groups: parameter groups of FSDP, in the order of `model.modules()`.
        order: parameter groups in the order in which the forward pass uses them, recorded in the first forward pass
            with gradients. Empty if forward passes use modules in different orders.
        connections: connections between the ranks of the model.
        pytorch: settings of PyTorch's collectives, which Sirtaki can tune.
        transfers: launcher of gathers and scatters.
        given: codecs that the user has chosen for gathers and scatters.
        node_ranks: number of ranks per node, if each rank of a node can keep a part of the gathered parameters for the
            node. Otherwise 0.
        near: lanes (connections) within a node, over which its ranks gather the parts of the parameters that they keep
            for the node. None if they keep no parts.
        knobs: the setting of gathers and scatters in use.
        trace: recorder of computation times in the current step. None if this step is not recorded.
        sets_prefetch: whether Sirtaki sets which modules FSDP prefetches, because the user has not. Determined when
            `order` is recorded.
        tuner: tuner of the setting, which is called at the end of each training step.
        installed: functions that remove Sirtaki's callbacks and hooks from the model.
    """

    tuner: StepObserver

    def __init__(
        self, groups: Sequence[FsdpGroup], connections: ShardConnections, given: Packing, settings: Settings
    ) -> None:
        """Create the state of a model. Collective.

        Args:
            groups: parameter groups of FSDP, in the order of `model.modules()`.
            connections: connections between the ranks of the model.
            given: codecs that the user has chosen for gathers and scatters.
            settings: values of Sirtaki's environment variables.
        """
        self.groups, self.connections, self.given = groups, connections, given
        self.pytorch = PytorchCollectives(groups, connections.control)
        self.transfers, self.knobs = JointTransfers(given), AS_PYTORCH
        self.order: Sequence[FsdpGroup] = ()
        self._order_known = False  # Whether `order`, the order in which the forward pass uses the groups, was recorded.
        self._places: dict[FsdpGroup, int] = {}
        self.sets_prefetch = False
        self.trace: StepTrace | None = None
        self._used: list[FsdpGroup] = []  # Parameter groups that this forward pass has used.
        # Whether the whole model's forward pass runs, and whether gradients are enabled in it.
        self._in_forward = self._with_gradients = False
        self._prefetched: list[FsdpGroup] = []  # Parameter groups that this forward pass has gathered, used or not.
        self._scattered = False  # Whether gradients have been scattered since the last call of the model.
        # Parameters kept for the backward pass, by group: all of them, or this rank's part.
        self._kept: dict[FsdpGroup, torch.Tensor] = {}
        self.installed = ExitStack()
        self.near: ShardLanes | None = None
        self.node_ranks = self._count_node_ranks()
        if self.node_ranks:
            (lanes,) = connections.lanes.values()
            if lanes.control.broadcast(settings.tunes and settings.fsdp_memory > 0):
                largest = max(gathered for gathered, _ in (group.n_bytes for group in groups))
                self.near = lanes.within_node(shard_bytes=-(-largest // self.node_ranks))

    def detach(self) -> None:
        """Let FSDP communicate itself again, with its own settings. Collective, between two training steps."""
        self.transfers.wait()
        self._drop_prefetched()
        self._kept.clear()
        if self.connections.lanes_of_all is None:
            self.pytorch.apply(self.knobs, AS_PYTORCH)
            self.pytorch.release_unused(AS_PYTORCH)
        self.apply(AS_PYTORCH)
        self.installed.close()
        self.connections.leave()

    def _count_node_ranks(self) -> int:
        mesh = self.groups[0].mesh
        lanes = self.lanes(self.groups[0].shard_process_group)
        one_mesh = all(group.mesh == mesh for group in self.groups) and mesh.ndim == 1
        if not one_mesh or lanes is None or len(self.connections.lanes) > 1:
            return 0
        if lanes.peers == lanes.control.size - 1 or lanes.control.size < dist.get_world_size():
            return 0
        return lanes.control.local_size

    def lanes(self, process_group: dist.ProcessGroup) -> ShardLanes | None:
        """Return Sirtaki's connections between the ranks of a process group. None if PyTorch sends the shards."""
        return self.connections.lanes.get(ranks_of(process_group))

    def describe(self) -> str:
        """Describe how the shards are sent and the setting in use, for log messages."""
        return f"{self.carriers}, {self.knobs.describe()}"

    @property
    def carriers(self) -> str:
        """Describe how the shards are sent, for log messages: by Sirtaki, or by which backends of PyTorch."""
        if self.connections.carries:
            return " and ".join(sorted({lanes.kind.value for lanes in self.connections.lanes.values()}))
        return describe_pytorch(self.groups)

    @property
    def whole_bytes(self) -> tuple[int, ...]:
        """Return the size in bytes of each module's parameters after an all-gather, in the order of use."""
        return tuple(group.n_bytes[0] for group in self.order)

    @property
    def joinable(self) -> tuple[int, ...]:
        """Return the indices of the modules whose shards can be coalesced with those of the module before.

        The indices count modules in the order in which the forward pass uses them.
        """
        if not self.connections.carries or not self.sets_prefetch:
            return ()
        layouts = [group.layout for group in self.order]
        return tuple(place for place in range(1, len(layouts)) if layouts[place - 1] == layouts[place])

    @property
    def dropped(self) -> tuple[int, ...]:
        """Return the indices of the modules whose parameters FSDP gathers again for the backward pass.

        The indices count modules in the order in which the forward pass uses them.
        """
        return tuple(place for place, group in enumerate(self.order) if self._can_keep(group))

    def _can_keep(self, group: FsdpGroup) -> bool:
        """Return whether the parameters of `group` can be kept from the forward pass until the backward pass.

        This requires that FSDP gathers them again for the backward pass, into memory that only Sirtaki's callback uses.
        """
        # Use `getattr`, because the user may have replaced Sirtaki's callback by one without `can_keep`.
        return group.gathered_again and getattr(group.collectives[0], "can_keep", False)

    # ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, knobs: ShardKnobs) -> None:
        """Use the setting `knobs` for gathers and scatters from the next training step on.

        Collective, between two steps.

        If the number of connections in the setting cannot be opened, the connections in use stay.
        """
        if (lanes := self.connections.lanes_of_all) is None:
            self.pytorch.apply(self.knobs, knobs)
        elif knobs.streams != self.knobs.streams:
            try:
                lanes.use(knobs.streams)
            except TransportError as err:  # All ranks raise this error together. The connections in use stay open.
                logger.debug(
                    "Sirtaki cannot open %d streams (parallel connections), so the open ones stay in use: %s",
                    knobs.streams,
                    err,
                )
        if lanes is not None and knobs.joined:
            # Find the groups with gradient hooks on any rank, because buckets must be equal on all ranks.
            hooked = lanes.control.maximum(np.array([float(group.has_gradient_hooks) for group in self.groups]))
            self.transfers.hooked = {group for group, one in zip(self.groups, hooked, strict=True) if one}
        self.apply(knobs)

    def apply(self, knobs: ShardKnobs) -> None:
        """Use the setting `knobs` from the next forward pass on, without opening connections. Not collective."""
        self.knobs, self.transfers.most_scatters = knobs, knobs.scattering
        gathers, scatters = knobs.codecs
        self.transfers.packing = self.given[0] or gathers, self.given[1] or scatters
        self.transfers.buckets = {}
        order, buckets = self.order, knobs.buckets(len(self.order))
        for number, bucket in enumerate(buckets):
            first, last = bucket[0], bucket[-1]
            ahead = order[first + 1 : buckets[min(number + knobs.ahead, len(buckets) - 1)][-1] + 1]
            behind = order[buckets[max(0, number - knobs.behind)][0] : last][::-1]
            if len(bucket) == 1 and knobs.behind == 1 and not knobs.joined:
                behind = ()  # Set no prefetch, because FSDP prefetches one module in the backward pass by default.
            for place in bucket if self.sets_prefetch else ():
                order[place].set_prefetch(ahead if place == first else (), behind if place == last else ())
            if len(bucket) > 1:
                again = [place for place in bucket if place in self.dropped and place not in (*knobs.kept, *knobs.near)]
                one = Bucket(order[first], order[last], order[min(again, default=first)])
                self.transfers.buckets.update({order[place]: one for place in bucket})

    # ── forward passes ───────────────────────────────────────────────────────────────────────────────────────────

    def begin_forward(self, group: FsdpGroup | None, *_: object) -> None:
        """Begin a forward pass of the whole model. If the last training step had a backward pass, end it.

        Forward pre-hook.

        Args:
            group: parameter group of the model's own parameters. None if all parameters belong to its blocks.
        """
        if in_backward():
            return
        distributed_autograd.refuse_sharded()
        self.transfers.wait()  # Wait for scatters, because those of a failed backward pass may still be in flight.
        self._drop_prefetched()
        self._kept.clear()
        self._in_forward = True
        self._with_gradients, self._used = torch.is_grad_enabled(), []
        if self._scattered and self._with_gradients:  # An evaluation without gradients does not end the step.
            self._scattered = False
            if self.order:
                self.tuner.end_step()
        self.use(group)

    def end_forward(self, module: nn.Module, args: object, output: object) -> None:
        """End a forward pass of the whole model. Forward hook. `output` is None if the forward pass has failed."""
        if in_backward():
            return
        self._in_forward = False
        self._drop_prefetched()
        if self.trace is not None and torch.is_grad_enabled():
            self.trace.used(None)
        if output is not None and self._with_gradients:
            self._compare_order(self._used)

    def use(self, group: FsdpGroup | None, *_: object) -> None:
        """Record that a forward pass begins to use the parameters of `group`.

        Forward pre-hook of the group's module.
        """
        if in_backward():  # Activation checkpointing recomputes the module, which is no new use.
            return
        if not self._in_forward:
            self._drop_prefetched()
        elif group is not None:
            self._used.append(group)
            if self.trace is not None and torch.is_grad_enabled():
                self.trace.used(group)

    def _compare_order(self, used: list[FsdpGroup]) -> None:
        """Record the order in which the first forward pass uses modules.

        If a later pass has another order, stop tuning.
        """
        if not used or (self._order_known and self.order in ((), used)):
            return
        why = "modules are used in another order than before"
        if not self._order_known:
            self._order_known, why = True, "modules are used more than once in a forward pass"
            if len(set(used)) == len(used):
                self.order = used
                self._places = {group: place for place, group in enumerate(used)}
                self.sets_prefetch = not any(group.has_user_prefetch for group in self.groups)
                self.apply(self.knobs)
                return
        self.order, self._places, self.transfers.buckets = (), {}, {}
        for group in self.groups if self.sets_prefetch else ():
            group.set_prefetch((), ())
        self.tuner.give_up(why)

    def record_gather(self, group: FsdpGroup) -> None:
        """Record that FSDP has requested the all-gather of `group`, to use its parameters now or to prefetch them."""
        if group.phase == "FORWARD":
            self._prefetched.append(group)

    def record_scatter(self, group: FsdpGroup) -> None:
        """Record that FSDP has requested the reduce-scatter of the gradients of `group`."""
        self._scattered = True
        if self.trace is not None:
            self.trace.scattered(group)

    def _drop_prefetched(self) -> None:
        """Discard parameters that a forward pass has gathered and not used, because the next step changes them."""
        prefetched, self._prefetched = self._prefetched, []
        for group in prefetched:
            if group.drop_gather():
                self._kept.pop(group, None)

    # ── parameters that are kept for the backward pass ───────────────────────────────────────────────────────────
    #
    # FSDP reshards all parameters after the forward pass, and calls the all-gather callback again in the backward pass.
    # For kept parameters, the callback returns the kept tensor, and no data is sent.

    def keeper_of(self, group: FsdpGroup) -> ShardLanes | bool:
        """Return where the parameters of `group` are kept from the forward pass until the backward pass.

        Returns:
            False if the parameters are not kept. True if this rank keeps all of them. The lanes (connections) within
            the node if each rank of the node keeps a part.
        """
        if not (self._in_forward and self._with_gradients) or in_backward():
            return False
        place = self._places.get(group)
        if place is None or not self._can_keep(group):
            return False
        if place in self.knobs.near and self.near is not None:
            return self.near
        return place in self.knobs.kept

    def keep(self, group: FsdpGroup, values: torch.Tensor) -> None:
        """Keep all-gathered parameters until the next backward pass, so that they need not be gathered again.

        Args:
            group: parameter group of the parameters.
            values: all parameters of the group, or the part that this rank keeps for its node.
        """
        self._kept[group] = values

    def take_kept(self, group: FsdpGroup) -> torch.Tensor | None:
        """Return the kept parameters of `group`, and drop this object's reference to them.

        None if they are not kept, or outside a backward pass.
        """
        if not self._kept or not in_backward():
            return None
        when_backward_ends(self._kept.clear)  # Discard kept parameters that this backward pass does not use.
        return self._kept.pop(group, None)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Discard kept parameters that `optimizer` will update. Wait for reduce-scatters of a failed backward pass.

        Raises:
            CommError: a reduce-scatter failed.
        """
        left = self.transfers.has_scatters and not in_backward()
        if not left and not self._kept:
            return
        updated = {id(param) for each in optimizer.param_groups for param in each["params"]}
        if any(group.param_ids & updated for group in self._kept):
            self._kept.clear()
        if left and any(group.param_ids & updated for group in self.groups):
            self.transfers.wait()
