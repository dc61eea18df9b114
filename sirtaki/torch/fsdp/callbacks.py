"""Callbacks through which FSDP all-gathers and reduce-scatters, and hooks on the modules of a sharded model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp as TorchOp
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.shards import JointGather, ShardLanes, ShardWork
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.machine import finalize

from .buckets import JointTransfers
from .model import ShardedModel
from .private import FsdpGroup, is_default, wrap_forward


# `modules` is an iterable of FSDPModules, a class that some versions of PyTorch lack.
def install(sharded: ShardedModel, model: nn.Module, modules: Iterable[Any]) -> None:
    """Let FSDP call Sirtaki for its all-gathers and reduce-scatters, and register hooks on the modules of `model`.

    Not collective. `ShardedModel.detach` undoes it.

    Args:
        sharded: Sirtaki's state of the model, which the callbacks and hooks call.
        model: the sharded model.
        modules: modules of `model` that FSDP shards.
    """
    carries, undo = sharded.connections.carries, sharded.installed.callback
    for group in sharded.groups:
        group.set_owner(sharded)
        undo(group.clear_owner)
        if not group.has_custom_collectives:
            undo(group.observe(partial(sharded.record_gather, group), partial(sharded.record_scatter, group)))
            continue
        gather, scatter = group.collectives
        undo(group.module.set_custom_all_gather, gather)
        undo(group.module.set_custom_reduce_scatter, scatter)
        group.module.set_custom_all_gather(AllGatherCallback(sharded, group, None if carries else gather))
        group.module.set_custom_reduce_scatter(ReduceScatterCallback(sharded, group, None if carries else scatter))
    group_of = {id(group.module): group for group in sharded.groups}
    for module in modules:
        if module is not model:
            use = partial(sharded.use, group_of.get(id(module)))
            undo(module.register_forward_pre_hook(use, prepend=True).remove)
    begin_forward = partial(sharded.begin_forward, group_of.get(id(model)))
    undo(model.register_forward_pre_hook(begin_forward, prepend=True).remove)
    undo(model.register_forward_hook(sharded.end_forward, always_call=True).remove)
    if any(module is model for module in modules):
        undo(wrap_forward(model, begin_forward, sharded.end_forward))
    reference = weakref.ref(sharded)

    def before_update(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if (found := reference()) is not None:
            found.before_update(optimizer)

    remove = register_optimizer_step_pre_hook(before_update).remove
    finalize(model, remove)
    undo(remove)


class GatherWork(dist.Work):
    """`Work` object of an all-gather in flight.

    FSDP waits for it before it uses the module whose parameters are gathered.
    """

    def __init__(
        self, transfers: JointTransfers, work: ShardWork | JointGather, *then: Callable[[], None] | None
    ) -> None:
        super().__init__()
        self._transfers, self._work, self._then = transfers, work, then

    def wait(self, timeout: object = None) -> bool:
        """Block until the gather has ended. `timeout` is ignored, because FSDP sets none."""
        self._transfers.wait_for(self._work)
        then, self._then = self._then, ()
        for act in then:
            if act is not None:
                act()
        return True

    def is_completed(self) -> bool:
        """Return whether the gather has ended."""
        return self._work.is_done()


class AllGatherCallback:
    """Callback that FSDP calls to all-gather one parameter group.

    The callback starts the all-gather. In a backward pass, it returns the parameters that were kept since the forward
    pass, if the setting in use keeps them.

    Attributes:
        carrier: collective of PyTorch or of the user that gathers the shards. None if Sirtaki gathers them.
        can_keep: whether gathered parameters may be kept, because only this callback uses their memory.
    """

    def __init__(self, model: ShardedModel, group: FsdpGroup, carrier: Any) -> None:
        self._model, self._group, self.carrier = model, group, carrier
        self.can_keep = carrier is None or is_default(carrier)
        # Parameters kept since the forward pass. The next call returns them without a gather.
        self._kept: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the gathered parameters. Called by FSDP before each gather."""
        (numel,), model = size, self._model
        self._kept = kept = model.take_kept(self._group)
        if kept is not None and kept.numel() == numel:
            return kept
        if self.carrier is not None:
            return cast(torch.Tensor, self.carrier.allocate(size, dtype=dtype, device=device))
        lanes = model.lanes(self._group.gather_process_group)
        joint = model.transfers.bucket_of_gather(self._group) is not None
        if lanes is None or kept is not None or model.keeper_of(self._group) or joint:
            return torch.empty(numel, dtype=dtype, device=device)
        # Launch the gathers collected so far, before memory for another gather is taken.
        model.transfers.launch_gathers()
        return lanes.gather_memory(numel, dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """All-gather the parameters. FSDP calls this, and waits for the returned work when it uses the parameters.

        `async_op` is ignored: the gather is always asynchronous.
        """
        model, kept, self._kept = self._model, self._kept, None
        model.record_gather(self._group)
        if kept is not None and kept.numel() == output_tensor.numel():
            return None
        keeper = model.keeper_of(self._group)
        if keeper is True:
            model.keep(self._group, output_tensor)
        lanes = model.lanes(group)
        # If the process group was created after `attach`, let PyTorch gather, because Sirtaki has no connections for
        # it.
        if self.carrier is not None or lanes is None:
            gather = self.carrier or dist.all_gather_into_tensor
            work: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        if kept is not None and model.near is not None:
            rows = output_tensor.chunk(model.near.control.size)
            return GatherWork(model.transfers, model.near.gather(rows, kept, label=self._group.number))
        keep = partial(self._keep_part, keeper.control, output_tensor) if isinstance(keeper, ShardLanes) else None
        rows = output_tensor.chunk(group.size())
        transfer, unpack = model.transfers.gather(self._group, lanes, rows, input_tensor)
        return GatherWork(model.transfers, transfer, unpack, keep)

    def _keep_part(self, control: ControlPlane, whole: torch.Tensor) -> None:
        self._model.keep(self._group, whole.chunk(control.size)[control.rank].clone())


class ReduceScatterCallback:
    """Callback that FSDP calls to reduce-scatter the gradients of one parameter group.

    Attributes:
        carrier: collective of PyTorch or of the user that scatters the gradients. None if Sirtaki scatters them.
    """

    def __init__(self, model: ShardedModel, group: FsdpGroup, carrier: Any) -> None:
        self._model, self._group, self.carrier = model, group, carrier
        self._whole: torch.Tensor | None = None  # Memory of the whole gradient, until FSDP allocates the shard.

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for gradients. FSDP calls this for the whole gradient, then for the shard of this rank."""
        if self.carrier is not None:
            return cast(torch.Tensor, self.carrier.allocate(size, dtype=dtype, device=device))
        (numel,), transfers = size, self._model.transfers
        if self._group in transfers.buckets:
            return torch.empty(numel, dtype=dtype, device=device)
        transfers.launch_scatters()  # Launch the scatters collected so far, before memory for another scatter is taken.
        transfers.make_room()
        lanes, whole, self._whole = self._model.lanes(self._group.shard_process_group), self._whole, None
        if lanes is None or (whole is not None and (whole.dtype, whole.numel()) == (dtype, numel * lanes.control.size)):
            return torch.empty(numel, dtype=dtype, device=device)
        self._whole = lanes.scatter_memory(numel, dtype)
        return self._whole

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce-scatter the gradients. Called by FSDP.

        Wait for the result only if FSDP or a user's hook reads the result before the backward pass ends.
        """
        model, lanes = self._model, self._model.lanes(group)
        recipe = None if lanes is None else _recipe(op, group.size())
        model.record_scatter(self._group)
        if lanes is None or recipe is None:
            group, scatter = model.pytorch.scatter_group(group), self.carrier or dist.reduce_scatter_tensor
            work: dist.Work | None = scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            return work
        waits = (
            recipe[1] == 1.0  # If the factor is 1, FSDP itself divides the sum, and so reads the result.
            or self._group in model.transfers.hooked
            or self._group.has_gradient_hooks
            or self._group.reads_scatter_result(output_tensor.dtype)
        )
        model.transfers.scatter(self._group, lanes, input_tensor, output_tensor, recipe, waits=waits)
        return None


# `op` is Any, because its type is private to PyTorch.
def _recipe(op: Any, size: int) -> tuple[ReduceOp, float] | None:
    """Return the operator of a reduction, and the factor that multiplies its result.

    None if lanes (Sirtaki's connections) do not support `op`.
    """
    whole: Any = TorchOp(op) if isinstance(op, TorchOp.RedOpType) else op
    kind, factor = whole.__getstate__()
    if kind == TorchOp.AVG:
        return ReduceOp.SUM, 1.0 / size
    if kind == TorchOp.PREMUL_SUM:
        return ReduceOp.SUM, float(factor)
    return (ReduceOp.SUM, 1.0) if kind == TorchOp.SUM else None
