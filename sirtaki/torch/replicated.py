"""Reduce the gradients of models wrapped in PyTorch's FSDP2-based `replicate()` with Sirtaki's reducer for DDP.

from torch.distributed._composable.replicate_with_fsdp import replicate

for block in model.blocks: replicate(block)
replicate(model)
sirtaki.torch.fsdp.attach(model)

Such a model keeps a whole copy of each parameter (`sharded_param`), and computes with another one (`unsharded_param`).
FSDP averages the gradients of a module in one all-reduce at the end of the module's backward pass, and waits for it.

After `attach`, a hook takes each gradient away from FSDP once autograd has computed it, so FSDP finds none to reduce.
The reducer for DDP models all-reduces it and tunes its settings. The reducer sees a stand-in tensor for each parameter,
which has no memory of its own and has the dtype of the reduction. At the end of the backward pass, the parameter's
`.grad` is the reduced gradient.

FSDP keeps the gradients of passes without synchronisation (`set_requires_gradient_sync(False)`). The next synchronised
pass adds them to its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sirtaki.comm.collectives.engine import GLOBAL
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine.reducing import distributed_autograd
from sirtaki.engine.reducing.gradient_hooks import ReducerOptions
from sirtaki.engine.reducing.hooks import register_last
from sirtaki.errors import ConfigError

from .compression import Choice, reduction_options
from .ddp import DdpGradients, job_over

_Group = Any  # FSDP's parameter group, of a private module of PyTorch


def is_replicated(group: _Group) -> bool:
    """Return whether each rank has all of the parameters, so that their gradients are all-reduced and nothing else."""
    mesh = group.mesh_info
    return hasattr(mesh, "replicate_process_group") and getattr(mesh, "shard_mesh_size", 1) == 1


def attach(model: nn.Module, groups: Sequence[_Group], compression: Choice) -> ReplicatedGradients | None:
    """Have Sirtaki reduce the gradients of these parameter groups, tuned. Collective.

    Args:
        model: the module whose forward pass is called.
        groups: parameter groups of `replicate()` in the model.
        compression: how gradients travel.

    Returns:
        What reduces them. None if there is one rank only.

    Raises:
        ConfigError: the groups are not replicated over all ranks, or have hooks that Sirtaki would pass by.
        MismatchError: on all ranks, if their models differ.
    """
    process_group = groups[0].mesh_info.replicate_process_group
    if any(group.mesh_info.replicate_process_group is not process_group for group in groups):
        raise ConfigError("attach() takes replicated modules that are all on one mesh")
    if any(getattr(group, "_all_reduce_hook", None) is not None for group in groups):
        raise ConfigError("attach() takes the place of set_all_reduce_hook(): leave that out")
    if (current := job_over(process_group)) is None:
        return None
    names = {id(param): name for name, param in model.named_parameters()}
    replicas = [
        Replica(names.get(id(each.sharded_param), f"{number}.{place}"), group, each)
        for number, group in enumerate(groups)
        for place, each in enumerate(_materialised(group))
        if each.sharded_param.requires_grad
    ]
    reduction = Reduction(postscale=1.0 / current.size, **reduction_options(compression))
    options = ReducerOptions(reduction=reduction, unused_as_none=True)
    named = [(replica.name, replica.stand_in) for replica in replicas]
    gradients = ReplicatedGradients(current, current.rank_sets[GLOBAL], named, passes=1, options=options)
    gradients.follow(groups, replicas)
    left_uncompiled: Callable[[Any], Any] = torch.compiler.disable
    model.register_forward_pre_hook(left_uncompiled(gradients.before_forward))
    model.register_forward_hook(left_uncompiled(gradients.after_forward))
    return gradients


def _materialised(group: _Group) -> Sequence[Any]:  # Any: FSDP's parameters, of a private module
    """Return the parameters of a group, once FSDP has made those that it computes with. They stay the same objects."""
    try:
        group.lazy_init()
        group.unshard()
        group.wait_for_unshard()
        group.reshard()
    except RuntimeError as err:
        raise ConfigError(f"attach() must be called once the parameters are initialised: {err}") from err
    found: Sequence[Any] = group.fsdp_params
    return found


@dataclass(eq=False)
class Replica:
    """One replicated parameter.

    Attributes:
        name: its name in the model.
        group: its parameter group.
        param: FSDP's record of it, with `sharded_param`, which the optimizer has, and `unsharded_param`.
        held: gradients of passes that were not to be all-reduced (`set_requires_all_reduce(False)`).
    """

    name: str
    group: _Group
    param: Any  # of a private module of PyTorch
    held: torch.Tensor | None = None

    def __post_init__(self) -> None:
        unsharded = self.param.unsharded_param
        shape, device = self.param.sharded_size, self.group.device
        dtype = self.param.reduce_dtype or unsharded.dtype
        # The reducer sees this tensor in place of the parameter. It never reads the values.
        self.stand_in = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()

    @property
    def syncs(self) -> bool:
        """Whether the present pass is to be synchronised, as the user has told FSDP."""
        return bool(self.group.reduce_grads and self.group.all_reduce_grads)

    @property
    def _is_shared(self) -> bool:
        """Whether the reduced gradient is the parameter's as it is, without a copy."""
        local = self.param.sharded_param._local_tensor
        return bool(local.dtype is self.stand_in.dtype and local.device == self.stand_in.device)

    def begin(self) -> None:
        """Start from the gradient that the parameter has. Take what FSDP has kept for this pass."""
        gradient = self.param.sharded_param.grad
        self.stand_in.grad = gradient._local_tensor if gradient is not None and self._is_shared else None
        if self.syncs:
            self.take()

    def take(self) -> None:
        """Take the gradient that autograd has computed away from FSDP, and add it to the stand-in's."""
        if (gradient := self._computed()) is None:
            return
        factor = self.group.gradient_divide_factor
        if factor is not None:
            gradient = gradient * (self.group.mesh_info.replicate_mesh_size / factor)
        if self.held is not None:
            gradient, self.held = self.held.add_(gradient), None
        if self.stand_in.grad is None:
            self.stand_in.grad = gradient
        else:
            self.stand_in.grad += gradient

    def hold(self) -> None:
        """Keep the gradient of a pass that is not to be all-reduced."""
        if (gradient := self._computed()) is not None:
            self.held = gradient if self.held is None else self.held.add_(gradient)

    def _computed(self) -> torch.Tensor | None:
        param = self.param
        gradient: torch.Tensor
        param.accumulate_unsharded_grad_if_needed()
        if param.unsharded_accumulated_grad is not None:
            gradient = param.unsharded_accumulated_grad_data
            param.unsharded_accumulated_grad = None
        elif param.unsharded_param.grad is not None:
            gradient = param.unsharded_grad_data
            param.unsharded_param.grad = None
        else:
            return None
        return gradient.detach().to(self.stand_in.dtype)

    def give(self) -> None:
        """Make the reduced gradient the parameter's, and run the hooks that the user has on the parameter."""
        reduced, sharded = self.stand_in.grad, self.param.sharded_param
        if reduced is None:  # no rank has a gradient
            return
        if self._is_shared:
            if sharded.grad is None or sharded.grad._local_tensor is not reduced:
                sharded.grad = self.param.to_sharded_dtensor(reduced)
        else:
            self.stand_in.grad = None
            local = reduced.to(sharded._local_tensor, copy=True)
            if sharded.grad is None:
                sharded.grad = self.param.to_sharded_dtensor(local)
            else:
                sharded.grad._local_tensor += local
        for hook in list((getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(sharded)


class ReplicatedGradients(DdpGradients):
    """Keeps the gradients of a replicated model equal on all ranks: an iteration is a backward pass that is due."""

    undefined_are_zeros = False  # as FSDP has it
    nodes_are_kept = False
    _replicas: Sequence[Replica] = ()
    _groups: Sequence[_Group] = ()
    _mark_ready: Callable[[torch.Tensor], None]

    def _make_hook(self) -> Callable[[torch.Tensor], None]:
        """Store the reducer's hook. `_come_from` calls it, because autograd never sees the stand-ins."""
        self._mark_ready = super()._make_hook()
        return self._mark_ready

    def follow(self, groups: Sequence[_Group], replicas: Sequence[Replica]) -> None:
        """Hook the parameters that FSDP computes with. Called once."""
        self._groups, self._replicas = groups, replicas
        this = weakref.ref(self)

        def make(replica: Replica) -> Callable[[torch.Tensor], None]:
            def hook(_: torch.Tensor) -> None:
                if (gradients := this()) is not None and not gradients.closed:
                    gradients._come_from(replica)

            return hook

        self._followed = [
            register_last(replica.name, replica.param.unsharded_param, make(replica), nodes_are_kept=False)
            for replica in replicas
        ]

    def before_forward(self, *_: object) -> None:
        """A forward hook: the next backward pass is due, if gradients are recorded and to be synchronised."""
        if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():  # activations are computed again
            return
        distributed_autograd.refuse_sharded()
        for group in self._groups:
            if getattr(group, "reduce_scatter_unused_params", False):
                group.reduce_scatter_unused_params = False  # which would have FSDP reduce what Sirtaki has taken
        if any(group.reduce_grads and group.all_reduce_grads for group in self._groups):
            self.prepare()

    def after_forward(self, _module: object, _inputs: object, output: object) -> None:
        """A forward hook: have the backward pass noticed that begins at `output`."""
        if torch._C._current_graph_task_id() == -1:
            self.watch(output)

    def _come_from(self, replica: Replica) -> None:
        """A gradient has been computed."""
        if replica.syncs and self._due:
            self._begin()
            replica.take()
            self._mark_ready(replica.stand_in)
        elif replica.group.reduce_grads and not replica.group.all_reduce_grads:
            replica.hold()

    def _begin(self) -> None:
        if not self._begun:
            for replica in self._replicas:
                replica.begin()
        super()._begin()

    def end_backward(self) -> None:
        """The pass that was due is over: each parameter has its reduced gradient."""
        super().end_backward()
        for replica in self._replicas:
            replica.give()

    def fail(self) -> None:
        """Clean up after a backward pass that has raised. Move earlier gradients out of the reducer's buffers."""
        super().fail()
        for replica in self._replicas:
            gradient = replica.param.sharded_param.grad
            if gradient is not None and replica.stand_in.grad is not None and replica._is_shared:
                replica.param.sharded_param.grad = replica.param.to_sharded_dtensor(replica.stand_in.grad)
