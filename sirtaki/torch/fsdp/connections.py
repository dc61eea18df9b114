"""Connections between the ranks of a sharded model.

Either Sirtaki sends the shards over its own connections, called *lanes*. Or PyTorch's collectives send them, and
Sirtaki only tunes the settings of these collectives.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sirtaki.autotune.sharded import MOST_SCATTERING, ShardKnobs
from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import leave_together
from sirtaki.comm.device import HOST, Device, cuda_device
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.shards import ShardLanes
from sirtaki.engine.c10d import backend_name, group_beside, may_add_groups_alone
from sirtaki.engine.console import NO_LOG, tuning_off
from sirtaki.engine.lanes import control_of, open_shards, untuned_streams
from sirtaki.engine.ranks import open_beside, settings_beside
from sirtaki.engine.settings import NEVER_S, Settings
from sirtaki.engine.tuning.report import tuning_ahead
from sirtaki.errors import CommError, MismatchError
from sirtaki.machine import at_exit, forget_at_exit
from sirtaki.measures import counted

from .buckets import Packing
from .private import FsdpGroup, Ranks, collective_name, is_default, ranks_of

logger = logging.getLogger(__name__)

LEAVE_S = 5.0
"""Maximum time in seconds for which a rank that has deleted a model waits for the other ranks to delete it too."""


class ShardConnections:
    """Connections between the ranks of each process group of a model. Holds no reference to the model's modules.

    Attributes:
        carries: True if Sirtaki sends the shards, False if PyTorch does.
        lanes: Sirtaki's connections, by the ranks that they connect. Empty if PyTorch sends the shards.
        control: connections for control messages between the ranks of the largest process group, if this contains the
            ranks of all other process groups. None if there is no such process group, or if all process groups have one
            rank.
        device: device whose clock times the training steps: the CUDA GPU of the parameters, otherwise the host.
        discarded_steps: number of steps after a change of the setting that are not measured. On a GPU, a step's time is
            known one step later.
        lanes_of_all: Sirtaki's connections between the ranks of the largest process group. None if PyTorch sends the
            shards.
        searching: whether the tuner still searches for the fastest setting. Used on the rank that decides about
            settings.
    """

    searching = False

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[FsdpGroup],
        packing: Packing,
        *,
        carries: bool,
        store: Store | None = None,
    ) -> None:
        """Open the connections between the ranks of each process group. Collective.

        Args:
            settings: values of Sirtaki's environment variables.
            groups: FSDP's parameter groups in the model.
            packing: codecs that compress all-gathers of parameters and reduce-scatters of gradients.
            carries: True if Sirtaki sends the shards, False if PyTorch does.
            store: key-value store by which the ranks exchange addresses. None to use the process groups.

        Raises:
            MismatchError: the models or the arguments of ranks differ. Raised on all ranks.
            TransportError: a connection cannot be opened. Raised on all ranks.
        """
        self._settings, self.carries = settings, carries
        self.device: Device = HOST
        for device in {group.device for group in groups if group.device.type == "cuda"}:
            self.device = cuda_device(torch.cuda.current_device() if device.index is None else device.index)
        self.discarded_steps = 2 if self.device.streams else 1
        self.lanes: dict[Ranks, ShardLanes] = {}
        self._controls: dict[Ranks, ControlPlane] = {}
        # Communicators for control messages, each with a duplicate for `close`.
        self._meshes: list[tuple[Communicator, Communicator]] = []
        try:
            for group in groups:
                for process_group in group.all_process_groups:
                    self._open(process_group, groups, packing, store)
        except BaseException as err:
            for mesh, farewell in self._meshes:
                if not isinstance(err, MismatchError):
                    # Report no MismatchError to the other ranks, because they raise it, too.
                    mesh.abort(f"rank {mesh.rank} could not connect for a sharded model: {err}")
                farewell.free()
                mesh.free()
            raise
        ranks = max(self._controls, key=len, default=())
        self.control, self.lanes_of_all = self._controls.get(ranks), self.lanes.get(ranks)
        if not all(set(other) <= set(ranks) for other in self._controls):
            self.control = None
            if dist.get_rank() == 0:
                logger.info(
                    "Sirtaki does not tune this sharded model, because no module is sharded over all of the model's "
                    "ranks; to have it tuned, shard at least one module (e.g. the root) over all of them"
                )
        if not self._controls and dist.get_rank() == 0:
            no_log = NO_LOG if settings.trial_log else ""
            logger.info(
                "each module is sharded over a group of only one rank, so nothing is sent and there is nothing to "
                "tune%s",
                no_log,
            )
        at_exit(self.close)

    def _open(
        self, process_group: dist.ProcessGroup, groups: Sequence[FsdpGroup], packing: Packing, store: Store | None
    ) -> None:
        ranks, settings = ranks_of(process_group), self._settings
        only_resharded = all(ranks_of(group.shard_process_group) != ranks for group in groups)
        if len(ranks) == 1 or ranks in self._controls or (only_resharded and not self.carries):
            return
        own_store = None if store is None else PrefixStore(f"{ranks}/", store)
        mesh = open_beside(settings, process_group, own_store)
        self._meshes.append((mesh, mesh.duplicate()))
        control = control_of(mesh, settings)
        control.require_equal(str([group.description for group in groups]), "the sharded model")
        control.require_equal(str((packing, self.carries)), "how shards are packed, and what carries them")
        self._controls[ranks] = control
        if self.carries:
            limits = settings_beside(process_group)
            lanes = self.lanes[ranks] = open_shards(
                control, settings=settings, timeout=lambda: limits.missing_ranks_limit_s or NEVER_S
            )
            gathered, scattered = (max(sizes) for sizes in zip(*(group.n_bytes for group in groups), strict=True))
            lanes.reserve(shard_bytes=-(-gathered // len(ranks)), whole_bytes=0 if only_resharded else scattered)
            how, streams = "shared memory", untuned_streams(lanes, settings)
            if lanes.peers < len(ranks) - 1:
                how = f"shared memory within nodes, {streams} connections from each rank to every other node"
            elif lanes.kind is not TransportKind.SHARED_MEMORY:
                how = f"{streams} connections to each other rank"
        else:
            how = describe_pytorch(groups)
        if control.rank == 0 and not only_resharded:
            discarded = self.discarded_steps
            then = tuning_ahead(settings, discarded_iterations=discarded) if settings.tunes else tuning_off(settings)
            logger.info(
                "the shards of %s are exchanged between %d ranks through %s; %s%s",
                counted(len(groups), "module"),
                len(ranks),
                how,
                then,
                NO_LOG if settings.trial_log else "",
            )

    def leave(self) -> None:
        """Start a thread that closes the connections once all ranks have called `leave`.

        Called when the model is deleted.

        Non-blocking.
        """
        forget_at_exit(self.close)
        if self._controls:  # The list is empty if `close` was called before, at process exit.
            threading.Thread(target=self.close, name="sirtaki-leave").start()

    def close(self) -> None:
        """Wait up to `LEAVE_S` for the other ranks to delete the model, then close the connections."""
        lanes, self.lanes, controls, self._controls = self.lanes, {}, self._controls, {}
        if self.searching:
            self.searching = False
            logger.info(
                "tuning of the sharded model was cut short, because the job ended, or the model was deleted or "
                "detached; no result is stored, and the next job tunes from the beginning"
            )
        for (mesh, farewell), ranks in zip(self._meshes, controls, strict=False):
            with suppress(CommError):  # Ignore the error. The connections have failed before, and all ranks know why.
                if not leave_together(farewell, LEAVE_S):
                    mesh.abort(f"rank {mesh.rank} has exited, or has deleted a sharded model that other ranks use")
            farewell.free()
            mesh.free()
            if ranks in lanes:
                lanes[ranks].close()


class PytorchCollectives:
    """Settings of PyTorch's own collectives under FSDP, which Sirtaki tunes.

    These are the maximum number of reduce-scatters in flight, and whether reduce-scatters have a communicator of their
    own.
    """

    def __init__(self, groups: Sequence[FsdpGroup], control: ControlPlane | None) -> None:
        self._groups, self._control = groups, control
        # Process groups that were created only for reduce-scatters, by their ranks.
        self._made: dict[Ranks, dist.ProcessGroup] = {}
        # Maps the process group of all-gathers to that of reduce-scatters. Empty if both use the same process group.
        self._own: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def choices(self) -> tuple[tuple[int, ...], int]:
        """Return the numbers of communicators, and the largest number of reduce-scatters in flight, to try.

        If the user has set one of these values, the tuner tries only the user's value. Log what this PyTorch or this
        job does not support.

        Rank 0 only.
        """
        groups = self._groups
        if not all(group.has_custom_collectives for group in groups):
            logger.info(
                "Sirtaki tunes only how far ahead the parameters of this sharded model are gathered, because "
                "PyTorch %s has no set_custom_all_gather()",
                torch.__version__,
            )
            return (1,), 1
        if not all(is_default(group.collectives[1]) for group in groups):
            return (1,), 1
        fixed = any(group.has_own_scatter_group for group in groups)
        if not fixed and not may_add_groups_alone() and any(1 < each.shards < dist.get_world_size() for each in groups):
            fixed = True
            logger.info(
                "Sirtaki does not try a separate communicator for the reduce-scatters of this sharded model, because "
                "with init_process_group(device_id=...) all ranks must create a communicator together"
            )
        buffers = {group.most_scatter_buffers for group in groups}
        if 0 in buffers:
            logger.info(
                "Sirtaki does not try several reduce-scatters in flight for this sharded model, because PyTorch %s has "
                "no set_reduce_scatter_max_input_buffers()",
                torch.__version__,
            )
        return (1,) if fixed else (1, 2), MOST_SCATTERING if buffers == {1} else 1

    def scatter_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the process group to use for a reduce-scatter that FSDP requests over `group`."""
        return self._own.get(group, group)

    def apply(self, now: ShardKnobs, knobs: ShardKnobs) -> None:
        """Change the settings of PyTorch's collectives from `now` to `knobs`.

        Collective, between two training steps.
        """
        if knobs.scattering != now.scattering:
            for group in self._groups:
                group.set_most_scatter_buffers(knobs.scattering)
        if knobs.streams == now.streams:
            return
        self._own = {}
        if knobs.streams == 1:
            return
        sharded = {group: ranks_of(group.shard_process_group) for group in self._groups if group.shards > 1}
        if not self._made:
            token = "" if self._control is None else str(self._control.broadcast(uuid.uuid4().hex))
            try:
                for group, ranks in sharded.items():
                    if ranks not in self._made:
                        self._made[ranks] = group_beside(group.shard_process_group, group.device, token)
            except (AttributeError, TypeError) as err:
                # All ranks raise this error together, because they use the same PyTorch.
                logger.log(
                    logging.INFO if dist.get_rank() == 0 else logging.DEBUG,
                    "Sirtaki cannot create a separate process group for reduce-scatters, so they share the process "
                    "group of the all-gathers: %s",
                    err,
                )
                return
        self._own = {group.shard_process_group: self._made[ranks] for group, ranks in sharded.items()}

    def release_unused(self, knobs: ShardKnobs) -> None:
        """Destroy the process groups that were created for reduce-scatters, if the setting `knobs` does not use
        them. First wait until the reduce-scatters in flight have ended.

        On CPUs, keep the process groups. They take a few sockets only, and Gloo's threads may still use them.

        Collective.
        """
        devices = {group.device for group in self._groups if group.device.type != "cpu"}
        if knobs.streams == 1 and self._made and devices:
            for device in devices:
                torch.get_device_module(device).synchronize(device)
            for made in self._made.values():
                dist.destroy_process_group(made)
            self._made = {}


def describe_pytorch(groups: Sequence[FsdpGroup]) -> str:
    """Name the PyTorch backends and the user's collectives that send the shards, for log messages."""
    backends = " and ".join(sorted({backend_name(group.shard_process_group, group.device) for group in groups}))
    own = {collective_name(each) for group in groups for each in group.collectives if not is_default(each)}
    return ", ".join([f"PyTorch's {backends}", *sorted(own)])
