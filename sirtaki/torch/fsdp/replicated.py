"""Reduce the gradients of models wrapped in PyTorch's FSDP2-based `replicate()` with Sirtaki's reducer for DDP.

from torch.distributed._composable.replicate_with_fsdp import replicate

for block in model.blocks: replicate(block)
replicate(model)
sirtaki.torch.fsdp.attach(model)

Such a model has two whole copies of each parameter on every rank: one for the optimizer (`sharded_param`), and one that
modules compute with (`unsharded_param`). FSDP averages the gradients of a module in one all-reduce at the end of the
module's backward pass, and waits for it.

After `attach`, a hook removes each gradient from FSDP once autograd has computed it, so that FSDP finds none to reduce.
Sirtaki's reducer for DDP models then all-reduces the gradient, with settings that it tunes. Instead of each parameter,
the reducer gets a stand-in tensor without memory, which has the parameter's shape and the dtype of the reduction. At
the end of the backward pass, the reduced gradient becomes the parameter's `.grad`.

In backward passes without synchronisation (`set_requires_gradient_sync(False)`), FSDP accumulates the gradients. The
next synchronised backward pass adds them to its own gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import Store

from sirtaki.comm.collectives.engine import GLOBAL
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine.autograd import in_backward
from sirtaki.engine.reducing import distributed_autograd
from sirtaki.engine.reducing.gradient_hooks import ReducerOptions
from sirtaki.engine.reducing.hooks import register_last
from sirtaki.errors import ConfigError
from sirtaki.torch.compression import Choice, reduction_options
from sirtaki.torch.ddp import DdpGradients, job_over, require_all_ranks

from .private import FsdpGroup, ReplicatedParam


def require_attachable(groups: Sequence[FsdpGroup]) -> None:
    """Check everything about parameter groups under `replicate()` that may prevent attaching their model.

    Raises:
        ConfigError: the groups are not replicated over all ranks, or have all-reduce hooks, which Sirtaki cannot call.
    """
    process_group = groups[0].replicate_process_group
    if any(group.replicate_process_group is not process_group for group in groups):
        raise ConfigError(
            "fsdp.attach() requires that all modules under replicate() are on one DeviceMesh, but this model uses "
            "several meshes"
        )
    if any(group.has_all_reduce_hook for group in groups):
        raise ConfigError(
            "fsdp.attach() cannot be used with set_all_reduce_hook() under replicate(), because Sirtaki reduces the "
            "gradients itself; remove the hook"
        )
    require_all_ranks(process_group)


def connect(
    model: nn.Module, groups: Sequence[FsdpGroup], compression: Choice, store: Store | None = None
) -> ReplicatedGradients | None:
    """Create the reducer of the gradients of FSDP's parameter groups under `replicate()`. Collective.

    The reducer does nothing before its method `install`.

    Args:
        model: the whole model.
        groups: all parameter groups of the model that are under `replicate()`.
        compression: compression of gradients during communication.
        store: key-value store by which the ranks exchange addresses. None to use the process group.

    Returns:
        The reducer. None if there is only one rank.

    Raises:
        ConfigError: the ranks are not those of `hvd.init()`, or the job is elastic.
        MismatchError: the models of ranks differ. Raised on all ranks.
    """
    if (current := job_over(groups[0].replicate_process_group, store)) is None:
        return None
    names = {id(param): name for name, param in model.named_parameters()}
    replicas = {
        names.get(id(each.param), f"{number}.{place} of replicate()"): each
        for number, group in enumerate(groups)
        for place, each in enumerate(group.replicated_params())
        if each.param.requires_grad
    }
    reduction = Reduction(postscale=1.0 / current.size, **reduction_options(compression))
    options = ReducerOptions(reduction=reduction, unused_as_none=True)
    named = [(name, each.stand_in) for name, each in replicas.items()]
    gradients = ReplicatedGradients(current, current.rank_sets[GLOBAL], named, passes=1, options=options)
    gradients.follow(groups, replicas)
    return gradients


class ReplicatedGradients(DdpGradients):
    """Object that reduces the gradients of a model under PyTorch's FSDP2-based `replicate()`.

    A backward pass is *due* if its gradients must be all-reduced. A due backward pass is one iteration.
    """

    undefined_are_zeros = False  # Ignore undefined gradients, like FSDP.
    nodes_are_kept = False
    _replicas: Mapping[str, ReplicatedParam] = MappingProxyType({})
    _groups: Sequence[FsdpGroup] = ()
    _followed: Sequence[Callable[[], None]] = ()
    _mark_ready: Callable[[torch.Tensor], None]

    def _make_hook(self) -> Callable[[torch.Tensor], None]:
        """Return the reducer's gradient hook. Also store the hook, so that `_take_from` calls it.

        Autograd never calls the hook, because the reducer's stand-in tensors are not part of autograd's graph.
        """
        self._mark_ready = super()._make_hook()
        return self._mark_ready

    def follow(self, groups: Sequence[FsdpGroup], replicas: Mapping[str, ReplicatedParam]) -> None:
        """Set the parameters whose gradients `install` will take from FSDP. Called once.

        Args:
            groups: parameter groups under `replicate()`.
            replicas: parameters of these groups, by name.
        """
        self._groups, self._replicas = groups, replicas

    def install(self, model: nn.Module) -> None:
        """Register hooks that take each computed gradient from FSDP, and hooks on the model. Not collective."""
        this = weakref.ref(self)

        def hook(replica: ReplicatedParam, _: torch.Tensor) -> None:
            if (gradients := this()) is not None and not gradients.closed:
                gradients._take_from(replica)

        followed = [
            register_last(name, each.computed, partial(hook, each), nodes_are_kept=False)
            for name, each in self._replicas.items()
        ]
        left_uncompiled: Callable[[Any], Any] = torch.compiler.disable
        followed.append(model.register_forward_pre_hook(left_uncompiled(self.before_forward)).remove)
        followed.append(model.register_forward_hook(left_uncompiled(self.after_forward)).remove)
        self._followed = followed

    def detach(self) -> None:
        """Let FSDP all-reduce the gradients again. Collective, between two training steps."""
        self.close("when fsdp.detach() was called")
        for remove in self._followed:
            remove()
        for group in self._groups:
            group.clear_owner()
            group.reduce_unused_again()

    def before_forward(self, *_: object) -> None:
        """Mark the next backward pass as due, if FSDP would all-reduce its gradients. Forward pre-hook.

        The gradients of a due backward pass must be reduced.
        """
        # Ignore forward passes within a backward pass: activation checkpointing recomputes a pass that was recorded
        # before.
        if in_backward() or not torch.is_grad_enabled():
            return
        distributed_autograd.refuse_sharded()
        for group in self._groups:
            group.ignore_unused()
        if any(group.all_reduces for group in self._groups):
            self.prepare()

    def after_forward(self, _module: object, _inputs: object, output: object) -> None:
        """Register hooks on `output`, to detect the beginning of a backward pass whose gradients must be all-reduced.

        Forward hook.
        """
        if not in_backward():
            self.watch(output)

    def _take_from(self, replica: ReplicatedParam) -> None:
        """Remove the computed gradient of a parameter from FSDP.

        If this pass must be all-reduced, mark the gradient as ready.
        """
        if replica.group.all_reduces and self._due:
            self._begin()
            replica.take()
            self._mark_ready(replica.stand_in)
        elif replica.group.reduces and not replica.group.all_reduces:
            replica.hold()

    def _begin(self) -> None:
        if not self._begun:
            for replica in self._replicas.values():
                replica.begin()
        super()._begin()

    def end_backward(self) -> None:
        """Finish a backward pass: wait for the reduction of gradients, and store the reduced gradients in `.grad`.

        Collective.
        """
        super().end_backward()
        for replica in self._replicas.values():
            replica.give()

    def fail(self) -> None:
        """Clean up after a backward pass raised an exception. Restore the gradients of earlier passes in `.grad`."""
        super().fail()
        for replica in self._replicas.values():
            replica.rescue()
