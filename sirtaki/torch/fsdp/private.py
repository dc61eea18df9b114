"""Private names of PyTorch's FSDP2 (`fully_shard`, `replicate`). Sirtaki's other modules use none of them.

`FsdpGroup` wraps FSDP's parameter group, and `ReplicatedParam` wraps FSDP's data of one parameter. Other modules of
Sirtaki get no objects of FSDP's internal classes, only modules, tensors, process groups and the user's collectives.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sirtaki.errors import ConfigError

logger = logging.getLogger(__name__)

CHECKED_WITH = ("2.9", "2.13")
"""PyTorch versions with which the tests of Sirtaki have run."""

Ranks = tuple[int, ...]

USED = {
    "FSDPModule": "set_modules_to_forward_prefetch set_modules_to_backward_prefetch _get_fsdp_state",
    "FSDPState": "_fsdp_param_group _pre_forward _post_forward _states_to_forward_prefetch "
    "_states_to_backward_prefetch",
    "FSDPParamGroup": "fsdp_params modules device mesh_info post_forward_mesh_info mp_policy comm_ctx reduce_grads "
    "all_reduce_grads lazy_init unshard post_backward wait_for_unshard reshard _training_state _orig_dtype "
    "_all_gather_process_group _all_gather_result _wait_all_gather_streams_on_event _reshard_after_forward "
    "_use_post_forward_mesh",
    "FSDPParam": "sharded_param sharded_size padded_sharded_param_size reduce_dtype unsharded_param "
    "unsharded_grad_data unsharded_accumulated_grad unsharded_accumulated_grad_data "
    "accumulate_unsharded_grad_if_needed to_sharded_dtensor",
}
"""Attributes that `attach` requires, of each of FSDP's classes.

Some PyTorch versions lack `comm_ctx.reduce_scatter_max_input_buffers`, `mesh_info.reduce_scatter_process_group` or
`reduce_scatter_unused_params`. These are optional, so they are not listed here.
"""

CUSTOM = {
    "FSDPModule": "set_custom_all_gather set_custom_reduce_scatter",
    "FSDPParamGroup": "gradient_divide_factor _all_reduce_hook _all_gather_comm _reduce_scatter_comm",
}
"""Attributes that `attach` requires if Sirtaki sends the shards or the gradients. PyTorch has them from 2.9 on."""

_OWNER = "_sirtaki_attached"
"""Name of an attribute that Sirtaki adds to FSDP's parameter group. It contains the group's owner: the Sirtaki object
that does the group's communication."""


# The result is a list of FSDPModules, a class that some versions of PyTorch lack.
def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules of `model` that FSDP shards or replicates, in the order of `model.modules()`.

    Raises:
        ConfigError: this PyTorch lacks an attribute of FSDPModule that Sirtaki uses.
    """
    FSDPModule: Any = getattr(importlib.import_module("torch.distributed.fsdp"), "FSDPModule", None)
    _require("FSDPModule", FSDPModule)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def find_groups(modules: Iterable[Any]) -> list[FsdpGroup]:
    """Return FSDP's parameter groups in the modules. A group that several modules share is returned once.

    Raises:
        ConfigError: this PyTorch lacks a private attribute that Sirtaki uses, a module has several groups, or a group
            has an owner already, because `attach` was called before.
    """
    found = dict[int, FsdpGroup]()
    for module in modules:
        groups = _groups_of(module)
        if len(groups) > 1:
            raise ConfigError(
                "fsdp.attach() requires that all parameters of a module are on one DeviceMesh, but the parameters of a "
                f"{type(module).__name__} are on several meshes"
            )
        for group in groups:
            if id(group) not in found:
                if hasattr(group, _OWNER):
                    raise ConfigError("this model has been attached already; call fsdp.attach() once per model")
                found[id(group)] = FsdpGroup(module, group, len(found))
    return list(found.values())


def owners_of(model: nn.Module) -> Iterator[object]:
    """Yield the owners of the parameter groups in `model`.

    An owner is the Sirtaki object that handles the communication of a group. Groups without an owner are skipped.
    """
    for module in model.modules():
        if (state := getattr(module, "_get_fsdp_state", lambda: None)()) is not None:
            yield from (getattr(group, _OWNER, None) for group in _groups_in(state))


def wrap_forward(module: Any, before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Call `before` and `after` around each forward pass that PyTorch runs without module hooks.

    Such a pass is a call of a method that the user has registered with `register_fsdp_forward_method`. Ordinary forward
    passes do not change, because they call FSDP's module hooks, which were registered before.

    Args:
        module: an FSDPModule.
        before: function to call with the module and its arguments, before FSDP's hook.
        after: function to call with the module, its arguments and its output, after FSDP's hook.

    Returns:
        A function that undoes this.
    """
    state = module._get_fsdp_state()
    pre_forward, post_forward = state._pre_forward, state._post_forward

    def wrapped_pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        before(module, args)
        return pre_forward(module, args, kwargs)

    def wrapped_post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        output = post_forward(module, args, output)
        after(module, args, output)
        return output

    state._pre_forward, state._post_forward = wrapped_pre_forward, wrapped_post_forward

    def undo() -> None:
        state._pre_forward, state._post_forward = pre_forward, post_forward

    return undo


def ranks_of_model(model: nn.Module) -> Ranks:
    """Return the global ranks over which the modules of `model` are sharded or replicated, in ascending order."""
    groups = [group for module in sharded_modules(model) for group in _groups_of(module)]
    return tuple(sorted({rank for group in groups for rank in group.mesh_info.mesh.mesh.flatten().tolist()}))


def when_reduced(model: Any, call: Callable[[], None]) -> None:
    """Call `call` once, at the end of the model's first backward pass in which FSDP reduces all gradients.

    Called when FSDP has waited for all its collectives of the pass.

    Args:
        model: root module of FSDP, whose first forward pass has begun.
        call: function without arguments.
    """
    states = list(model._get_fsdp_state()._state_ctx.all_states)
    end_pass = "_root_post_backward_final_callback"

    def wrap(state: Any) -> Callable[[], None]:
        original: Callable[[], None] = getattr(state, end_pass)

        def end() -> None:
            original()
            groups = [group for state in states for group in _groups_in(state)]
            # Wait for a pass in which FSDP reduces all gradients. In other passes, ranks may be at different steps, or
            # reduce-scatters may be in flight.
            reduced = all(group.reduce_grads and group.all_reduce_grads for group in groups)
            if reduced and states[0]._state_ctx.is_last_backward:
                for each in states:
                    vars(each).pop(end_pass, None)
                call()

        return end

    for state in states:
        # Wrap all states, because FSDP queues the callback of the state whose backward pass begins first.
        setattr(state, end_pass, wrap(state))


class FsdpGroup:
    """A parameter group of FSDP2: its parameters are gathered together, and their gradients are reduced together.

    Attributes:
        module: first FSDPModule whose parameters are in the group.
        modules: all FSDPModules whose parameters are in the group.
        number: index of the group in the model, equal on all ranks.
        device: device of the parameters.
        shards: number of ranks over which the parameters are sharded.
        shard_process_group: process group over which parameters are sharded. None under `replicate()`.
        replicate_process_group: process group over which gradients are all-reduced. None without an all-reduce.
        replicated: True if each rank has all parameters and gradients are all-reduced.
    """

    def __init__(self, module: Any, group: Any, number: int) -> None:
        _require("FSDPParamGroup", group)
        for each in group.fsdp_params[:1]:
            _require("FSDPParam", each)
        self.module, self._group, self.number = module, group, number
        self.modules: tuple[nn.Module, ...] = group.modules
        self.device: torch.device = group.device
        info = group.mesh_info
        self.mesh, self.shards = info.mesh, getattr(info, "shard_mesh_size", 1)
        self.shard_process_group: Any = getattr(info, "shard_process_group", None)
        self.replicate_process_group: Any = getattr(info, "replicate_process_group", None)
        self.replicated = self.replicate_process_group is not None and self.shards == 1
        self._reduced_unused = False

    def set_owner(self, owner: object) -> None:
        """Store the owner of this parameter group: the Sirtaki object that handles the group's communication."""
        setattr(self._group, _OWNER, owner)

    def clear_owner(self) -> None:
        """Remove the owner, so that the group can be attached again."""
        delattr(self._group, _OWNER)

    def require_custom_collectives(self) -> None:
        """Check whether collectives of Sirtaki's own can replace those of FSDP.

        Raises:
            ConfigError: this PyTorch is too old.
        """
        _require("FSDPModule", self.module, CUSTOM)
        _require("FSDPParamGroup", self._group, CUSTOM)

    # ── process groups ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def all_process_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups over which the parameters are sharded, before and after the forward pass.

        They differ if the user has set `reshard_after_forward` to a number of ranks.
        """
        meshes = (self._group.mesh_info, self._group.post_forward_mesh_info)
        return [mesh.shard_process_group for mesh in meshes if hasattr(mesh, "shard_process_group")]

    @property
    def gather_process_group(self) -> Any:
        """Return the process group over which FSDP all-gathers the parameters next."""
        return self._group._all_gather_process_group

    @property
    def has_own_scatter_group(self) -> bool:
        """Return whether the user has given reduce-scatters a process group of their own."""
        return getattr(self._group.mesh_info, "reduce_scatter_process_group", None) is not None

    @property
    def most_scatter_buffers(self) -> int:
        """Return FSDP's maximum number of reduce-scatters in flight. 0 if this PyTorch has no such limit."""
        return int(getattr(self._group.comm_ctx, "reduce_scatter_max_input_buffers", 0))

    def set_most_scatter_buffers(self, n: int) -> None:
        """Set FSDP's maximum number of reduce-scatters in flight to `n`, for all parameter groups of the model."""
        self._group.comm_ctx.reduce_scatter_max_input_buffers = n

    # ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def param_ids(self) -> set[int]:
        """Return the ids of the sharded parameters, which the optimizer updates."""
        return {id(each.sharded_param) for each in self._group.fsdp_params}

    @property
    def description(self) -> list[tuple[Any, ...]]:
        """Return the shapes, dtypes and `requires_grad` of the group's parameters, which must be equal on all ranks."""
        return [
            (tuple(each.sharded_param.shape), str(each.sharded_param.dtype), each.sharded_param.requires_grad)
            for each in self._group.fsdp_params
        ]

    @property
    def n_bytes(self) -> tuple[int, int]:
        """Return the size in bytes of the all-gathered parameters, and of the gradients before a reduce-scatter."""
        policy, gathered, scattered = self._group.mp_policy, 0, 0
        for each in self._group.fsdp_params:
            numel = each.padded_sharded_param_size.numel() * self.shards
            dtype = policy.param_dtype or each.sharded_param.dtype
            gathered += numel * dtype.itemsize
            scattered += numel * (policy.reduce_dtype or dtype).itemsize
        return gathered, scattered

    @property
    def layout(self) -> tuple[object, ...]:
        """Return the ranks and dtypes of this group's all-gathers and reduce-scatters.

        Two groups can be coalesced only if these are equal.
        """
        policy = self._group.mp_policy
        dtypes = {policy.param_dtype or each.sharded_param.dtype for each in self._group.fsdp_params}
        return ranks_of(self.shard_process_group), self._group._use_post_forward_mesh, dtypes, policy.reduce_dtype

    @property
    def has_gradient_hooks(self) -> bool:
        """Return whether the user has registered post-accumulate-grad hooks on a parameter of the group."""
        return any(getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) for each in self._group.fsdp_params)

    # ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def phase(self) -> str:
        """Return FSDP's training state of this group: "FORWARD", "PRE_BACKWARD", "POST_BACKWARD" or "IDLE"."""
        return str(self._group._training_state.name)

    @property
    def gathered_again(self) -> bool:
        """Return whether FSDP gathers the parameters again for the backward pass, over the same ranks.

        FSDP does so if it reshards the parameters after the forward pass.
        """
        return bool(self._group._reshard_after_forward and not self._group._use_post_forward_mesh)

    def drop_gather(self) -> bool:
        """Discard prefetched parameters that were not used. First wait for their all-gather.

        Returns:
            Whether there were prefetched parameters.
        """
        if (result := self._group._all_gather_result) is None:
            return False
        self._group._all_gather_result = None
        if result.all_gather_work is not None:
            result.all_gather_work.wait()
        # Let the next all-gather wait for the event that marks the end of this one, because both may use the same
        # memory.
        self._group._wait_all_gather_streams_on_event(result.all_gather_event)
        return True

    def reads_scatter_result(self, dtype: torch.dtype) -> bool:
        """Return whether FSDP reads the result of a reduce-scatter before the backward pass ends.

        FSDP reads the result to cast, all-reduce or accumulate gradients. Otherwise FSDP only sets `.grad` to the
        result.
        """
        group, gradients = self._group, (each.sharded_param.grad for each in self._group.fsdp_params)
        return (
            dtype != group._orig_dtype
            or self.has_all_reduce_hook
            or self.replicate_process_group is not None
            or any(grad is not None and grad.to_local().numel() for grad in gradients)
        )

    # ── collectives and prefetching ──────────────────────────────────────────────────────────────────────────────

    @property
    def collectives(self) -> tuple[Any, Any]:
        """Return the two callables with which FSDP all-gathers parameters and reduce-scatters gradients.

        None for both in a PyTorch that has no such callables.
        """
        names = ("_all_gather_comm", "_reduce_scatter_comm") if self.has_custom_collectives else ()
        return tuple(getattr(self._group, name) for name in names) or (None, None)

    @property
    def has_custom_collectives(self) -> bool:
        """Return whether this PyTorch lets other collectives replace those of FSDP."""
        return hasattr(self.module, "set_custom_all_gather")

    def observe(self, gathered: Callable[[], None], scattered: Callable[[], None]) -> Callable[[], None]:
        """Call `gathered` after FSDP has launched an all-gather of this group, `scattered` after a reduce-scatter.

        Used if this PyTorch has no custom collectives.

        Returns:
            A function that undoes this.
        """
        group = self._group
        unshard, post_backward = group.unshard, group.post_backward

        def observed_unshard(async_op: bool = False) -> None:
            before = group._all_gather_result
            unshard(async_op)
            if group._all_gather_result is not before:
                gathered()

        def observed_post_backward(*unused: Any) -> None:
            post_backward(*unused)
            if group.reduce_grads:
                scattered()

        group.unshard, group.post_backward = observed_unshard, observed_post_backward

        def undo() -> None:
            del group.unshard, group.post_backward

        return undo

    @property
    def has_user_prefetch(self) -> bool:
        """Return whether the user has set which modules FSDP prefetches when it uses this group's module."""
        state = self.module._get_fsdp_state()
        return bool(state._states_to_forward_prefetch or state._states_to_backward_prefetch)

    def set_prefetch(self, forward: Iterable[FsdpGroup], backward: Iterable[FsdpGroup]) -> None:
        """Set the groups that FSDP prefetches when it uses this one, in the forward and in the backward pass."""
        self.module.set_modules_to_forward_prefetch([other.module for other in forward])
        self.module.set_modules_to_backward_prefetch([other.module for other in backward])

    # ── replicate() ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_all_reduce_hook(self) -> bool:
        """Return whether the user has registered an all-reduce hook (`set_all_reduce_hook`)."""
        return self._group._all_reduce_hook is not None

    @property
    def reduces(self) -> bool:
        """Return whether FSDP would reduce the gradients of this backward pass (`set_requires_gradient_sync`)."""
        return bool(self._group.reduce_grads)

    @property
    def all_reduces(self) -> bool:
        """Return whether FSDP would all-reduce the gradients of this backward pass (`set_requires_all_reduce`)."""
        return bool(self._group.reduce_grads and self._group.all_reduce_grads)

    def ignore_unused(self) -> None:
        """Stop FSDP from reducing zeros for missing gradients.

        Sirtaki takes all gradients from FSDP and reduces them itself, so for FSDP, all gradients are missing.
        """
        if getattr(self._group, "reduce_scatter_unused_params", False):
            self._group.reduce_scatter_unused_params = False
            self._reduced_unused = True

    def reduce_unused_again(self) -> None:
        """Undo `ignore_unused`."""
        if self._reduced_unused:
            self._group.reduce_scatter_unused_params = True

    def replicated_params(self) -> list[ReplicatedParam]:
        """Return all parameters of the group.

        First let FSDP create the copies of the parameters that modules compute with.

        FSDP creates these copies once, and reuses them in all training steps.

        Raises:
            ConfigError: the parameters are on the meta device.
        """
        try:
            self._group.lazy_init()
            self._group.unshard()
            self._group.wait_for_unshard()
            self._group.reshard()
        except RuntimeError as err:
            raise ConfigError(
                "fsdp.attach() was called before the parameters were initialised, so FSDP cannot all-gather them "
                f"({err}); move the model off the meta device and initialise it first"
            ) from err
        return [ReplicatedParam(self, self._group, each) for each in self._group.fsdp_params]


class ReplicatedParam:
    """One parameter under PyTorch's `replicate()`, and its gradient while Sirtaki reduces it.

    FSDP has two copies of the parameter: one for the optimizer, and one that modules compute with.

    Attributes:
        group: parameter group that contains the parameter.
        param: copy of the parameter that the optimizer updates, a DTensor.
        computed: copy of the parameter that modules compute with. Autograd computes its gradient.
        stand_in: tensor that Sirtaki's reducer gets in place of the parameter, for its shape, its dtype and its
            `.grad`. It has no memory of its own.
    """

    def __init__(self, owner: FsdpGroup, group: Any, record: Any) -> None:
        self.group, self._group, self._record = owner, group, record
        self.param, self.computed = record.sharded_param, record.unsharded_param
        # Gradient that was accumulated over backward passes without an all-reduce.
        self._held: torch.Tensor | None = None
        dtype = record.reduce_dtype or self.computed.dtype
        self.stand_in = torch.zeros((), dtype=dtype, device=owner.device).expand(record.sharded_size).requires_grad_()

    @property
    def _local(self) -> torch.Tensor | None:
        """Return this rank's tensor of the gradient that the optimizer reads. None if there is no gradient."""
        gradient = self._record.sharded_param.grad
        return None if gradient is None else gradient._local_tensor

    @property
    def _is_shared(self) -> bool:
        """Return whether the reduced gradient can become the optimizer's gradient without a copy."""
        local = self._record.sharded_param._local_tensor
        return bool(local.dtype is self.stand_in.dtype and local.device == self.stand_in.device)

    def begin(self) -> None:
        """Begin a backward pass. Start the gradient to reduce with the gradients that earlier passes have accumulated.

        The accumulated gradients are in the parameter's `.grad` or in FSDP.
        """
        self.stand_in.grad = self._local if self._is_shared else None
        if self.group.all_reduces:
            self.take()

    def take(self) -> None:
        """Remove the computed gradient from FSDP, and add it to the gradient to reduce (`stand_in.grad`)."""
        if (gradient := self._take_computed()) is None:
            return
        if (factor := self._group.gradient_divide_factor) is not None:
            gradient = gradient * (self._group.mesh_info.replicate_mesh_size / factor)
        if self._held is not None:
            gradient, self._held = self._held.add_(gradient), None
        if self.stand_in.grad is None:
            self.stand_in.grad = gradient
        else:
            self.stand_in.grad += gradient

    def hold(self) -> None:
        """Remove the computed gradient from FSDP.

        Accumulate it here until a backward pass in which gradients are all-reduced.
        """
        if (gradient := self._take_computed()) is not None:
            self._held = gradient if self._held is None else self._held.add_(gradient)

    def _take_computed(self) -> torch.Tensor | None:
        record = self._record
        record.accumulate_unsharded_grad_if_needed()
        if record.unsharded_accumulated_grad is not None:
            gradient: torch.Tensor = record.unsharded_accumulated_grad_data
            record.unsharded_accumulated_grad = None
        elif record.unsharded_param.grad is not None:
            gradient = record.unsharded_grad_data
            record.unsharded_param.grad = None
        else:
            return None
        return gradient.detach().to(self.stand_in.dtype)

    def give(self) -> None:
        """Store the reduced gradient in the parameter's `.grad`, and run the user's hooks on the parameter."""
        reduced, local, sharded = self.stand_in.grad, self._local, self._record.sharded_param
        if reduced is None:  # `reduced` is None if no rank has computed a gradient.
            return
        if not self._is_shared:
            self.stand_in.grad = None
            reduced = reduced.to(sharded._local_tensor, copy=True)
        if local is None or self._is_shared:
            if local is not reduced:
                sharded.grad = self._record.to_sharded_dtensor(reduced)
        else:
            local += reduced
        for hook in list((getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(sharded)

    def rescue(self) -> None:
        """Restore the gradient of earlier backward passes in `.grad`, after a backward pass raised an exception.

        Until then, this gradient is stored in the reducer's buffer.
        """
        if self._local is not None and self.stand_in.grad is not None and self._is_shared:
            self._record.sharded_param.grad = self._record.to_sharded_dtensor(self.stand_in.grad)


def collective_name(collective: Any) -> str:
    """Return the class name of a collective of FSDP2 (all-gather or reduce-scatter).

    For a callback of Sirtaki, return the name of the collective that it wraps (its `carrier`).
    """
    return type(getattr(collective, "carrier", collective)).__name__


def is_default(collective: Any) -> bool:
    """Return whether a callable that all-gathers or reduce-scatters is PyTorch's default, and not the user's own."""
    return collective is None or collective_name(collective) in ("DefaultAllGather", "DefaultReduceScatter")


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """Return the global ranks of the members of a process group, in the group's order."""
    return tuple(dist.get_process_group_ranks(group))


def _groups_of(module: Any) -> Sequence[Any]:
    state = module._get_fsdp_state()
    _require("FSDPState", state)
    return _groups_in(state)


def _groups_in(state: Any) -> Sequence[Any]:
    """Return the parameter groups of FSDP's state of a module. Before PyTorch 2.12, a state has at most one."""
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        return [] if group is None else [group]
    return groups


def _require(kind: str, found: Any, used: Mapping[str, str] = USED) -> None:
    """Raise an exception if an object or class of FSDP lacks an attribute that Sirtaki uses."""
    # Skip attributes that FSDP sets later, in the first forward pass.
    later = getattr(type(found), "__annotations__", ())
    for name in used[kind].split():
        if name not in later and inspect.getattr_static(found, name, _OWNER) is _OWNER:
            raise ConfigError(
                f"sirtaki.torch.fsdp needs the attribute {kind}.{name} of PyTorch's FSDP2, which PyTorch "
                f"{torch.__version__} lacks; use PyTorch {', '.join(CHECKED_WITH)}, or replace fsdp.attach() by "
                'init_process_group("sirtaki"), which supports all versions'
            )


@functools.cache
def log_unchecked_version() -> None:
    """Log, once and on rank 0, that Sirtaki was not tested with this version of PyTorch."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in CHECKED_WITH and dist.get_rank() == 0:
        logger.info(
            "sirtaki.torch.fsdp was not tested with PyTorch %s, only with %s; training continues",
            version,
            ", ".join(CHECKED_WITH),
        )
