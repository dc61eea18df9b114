"""Tuned gradient reduction for models of PyTorch's DistributedDataParallel.

    model = DistributedDataParallel(model)
    sirtaki.torch.ddp.attach(model)

DDP calls `prepare_for_backward` of its reducer in each forward pass whose backward pass must be synchronised, but not
within `no_sync()`. If it is never called, the reducer does nothing. `attach` replaces DDP's reducer by an
`IdleReducer`, which forwards the call to `DdpGradients`. The hooks of `DdpGradients` on the parameters reduce the
gradients.

A backward pass is *due* if its gradients must be reduced: DDP has called `prepare_for_backward`, and the pass has not
ended yet. A due backward pass is one iteration.

A rank takes part in an iteration even if its backward pass uses no parameter. Therefore hooks on the outputs of the
model detect where a backward pass begins. `torch.autograd.grad` calls these hooks too, for example for a gradient
penalty, forces from energies or a logged norm, but it accumulates into no `.grad`. The due backward pass follows later.
The hook distinguishes the two by an AccumulateGrad node of the graph: only `backward()` executes it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Reducer, Store
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from sirtaki.autotune.arms.techniques import ArmChoice
from sirtaki.comm.collectives.engine import GLOBAL
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.modes import outside_modes
from sirtaki.engine import job
from sirtaki.engine.autograd import accumulates
from sirtaki.engine.ranks import settings_beside
from sirtaki.engine.reducing import distributed_autograd
from sirtaki.engine.reducing.checks import Named
from sirtaki.engine.reducing.gradient_hooks import GradientHooks, ReducerOptions
from sirtaki.engine.tuning.pipeline_target import without_others
from sirtaki.errors import ConfigError, GradientError, NotInitializedError

from .basics import record_if_wanted
from .compression import Choice, Compression, reduction_options
from .ddp_logging import AttachedLogger, PassLog

logger = logging.getLogger(__name__)


def attach(
    model: nn.Module, *, arms: Sequence[ArmChoice] | None = None, compression: Choice = Compression.none
) -> None:
    """Let Sirtaki average the gradients of a DDP model from now on. Collective, before the first backward pass.

    This works with every launcher and with every backend of the model's process group, because Sirtaki sends gradients
    over its own connections between the ranks. It opens them unless `hvd.init()` has done so. Other features of DDP
    stay unchanged: options, `no_sync()`, `join()`, unused parameters, buffers.

    Args:
        model: a DistributedDataParallel model, or a module to which `torch.distributed._composable.replicate` was
            applied. Its process group must contain all ranks, and its parameters must be on one device.
        arms: search methods (arms) of the tuner, which searches for the fastest setting of the communication. Each is
            an arm, the name of one, or a function of (`sirtaki.autotune.KnobSpace`, NumPy random generator) that
            creates one. Only these are used. None for the default ones.
        compression: compression of gradients during communication, one of `hvd.Compression` or a codec.

    Raises:
        ConfigError: the model's process group lacks ranks, Sirtaki was initialised with other ranks or for an elastic
            job, the model is attached already, or DDP reduces the model's gradients by a communication hook, in mixed
            precision or by delayed all-reduces.
        MismatchError: the models of ranks differ. Raised on all ranks.
    """
    model = _behind_composable(model)
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"ddp.attach() requires a DistributedDataParallel model, not a {type(model).__name__}; wrap the model first"
        )
    require_attachable(model)
    gradients = connect(model, arms=arms, compression=compression)
    if gradients is not None:
        install(model, gradients)


def detach(model: nn.Module) -> bool:
    """Let DDP reduce the gradients of a model again. Call it on all ranks, between two training steps.

    Accumulated gradients in `.grad` stay. A later `attach()` is possible.

    Args:
        model: a DistributedDataParallel model, or a module to which `torch.distributed._composable.replicate` was
            applied.

    Returns:
        False if the model is not attached, so that DDP itself reduces the gradients already. In either case, only an
        explicit call of `attach` attaches the model from now on.
    """
    model = _behind_composable(model)
    if isinstance(model, DistributedDataParallel):
        kept_by_ddp.add(model)
    # `idle` is None for a module that is not a DDP model, because it has no reducer.
    idle = getattr(model, "reducer", None)
    if not isinstance(idle, IdleReducer):
        return False
    idle.detach()
    return True


kept_by_ddp: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""DDP models for which `detach` was called, so that they are not attached without a call of `attach`."""


def is_attached(model: DistributedDataParallel) -> bool:
    """Return whether Sirtaki reduces the gradients of a DDP model."""
    return isinstance(model.reducer, IdleReducer)


def require_attachable(model: DistributedDataParallel) -> None:
    """Check everything about a DDP model that may prevent attaching it, and that this rank can find out alone.

    Raises:
        ConfigError: the model cannot be attached, see `attach`.
    """
    _require_reducer_alone(model)
    require_all_ranks(model.process_group)
    if job.is_initialized():
        _require_fixed_ranks(job.current())
    else:
        settings_beside(model.process_group)


def connect(
    model: DistributedDataParallel,
    *,
    arms: Sequence[ArmChoice] | None = None,
    compression: Choice = Compression.none,
    wanted: Collection[int] | None = None,
    store: Store | None = None,
) -> DdpGradients | None:
    """Create the object that reduces the gradients of a DDP model. Initialise Sirtaki if necessary. Collective.

    The object does nothing before `install`. Its `close` undoes this function.

    Args:
        model: the DDP model, which `require_attachable` accepts.
        arms: see `attach`.
        compression: see `attach`.
        wanted: ids of the parameters that required gradients when DDP wrapped the model. DDP reduces exactly these
            gradients. None if no parameter was frozen or unfrozen since.
        store: key-value store by which the ranks exchange addresses. None to use the model's process group.

    Returns:
        The object, or None if there is only one rank.

    Raises:
        ConfigError: the model cannot be attached.
        CommError: the ranks cannot connect.
        MismatchError: the models of ranks differ. Raised on all ranks.
    """
    if (current := job_over(model.process_group, store)) is None:
        return None
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    reduction = Reduction(postscale=1.0 / current.size, **reduction_options(compression))
    options = ReducerOptions(reduction=reduction, unused_as_none=True, arms=arms)
    with _requiring_gradients(model.module, wanted):
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
        return DdpGradients(current, current.rank_sets[GLOBAL], named, passes=1, options=options)


@contextmanager
def _requiring_gradients(module: nn.Module, wanted: Collection[int] | None) -> Iterator[None]:
    """Let exactly the parameters with the ids `wanted` require gradients while the `with` block runs.

    If `wanted` is None, change nothing.
    """
    frozen = [(param, param.requires_grad) for param in module.parameters()]
    try:
        if wanted is not None:
            for param, _ in frozen:
                param.requires_grad_(id(param) in wanted)
        yield
    finally:
        for param, requires_grad in frozen:
            param.requires_grad_(requires_grad)


def install(model: DistributedDataParallel, gradients: DdpGradients) -> None:
    """Replace the reducer of a DDP model, so that `gradients` reduces the model's gradients. Not collective."""
    _detach_before_hooks()
    if model.static_graph:
        gradients.count_gradients()
    IdleReducer(model, gradients).install(model)


@functools.cache
def _detach_before_hooks() -> None:
    """Let DDP's methods that register a communication hook detach the model first. Called once."""
    for name in ("register_comm_hook", "_register_builtin_comm_hook"):
        setattr(DistributedDataParallel, name, _after_detach(getattr(DistributedDataParallel, name)))


def _after_detach(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of DDP, so that an attached model is detached before the method runs."""

    @functools.wraps(method)
    def call(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if hasattr(self, "reducer") and is_attached(self):
            # DDP's constructor may call this method before the model has a reducer.
            detach(self)
            if dist.get_rank() == 0:
                logger.info(
                    "the script registers a communication hook on the model %s, so from now on DDP reduces its "
                    "gradients",
                    type(self.module).__name__,
                )
        method(self, *args, **kwargs)

    return call


def job_over(group: dist.ProcessGroup, store: Store | None = None) -> job.Job | None:
    """Return the job that connects the ranks of a process group. Initialise Sirtaki if necessary. Collective.

    Args:
        group: the process group, which `require_all_ranks` accepts.
        store: key-value store by which the ranks exchange addresses. None to use the process group.

    Returns:
        The job, or None if there is only one rank.

    Raises:
        ConfigError: the group lacks ranks, or Sirtaki was initialised with other ranks or for an elastic job.
    """
    if not job.is_initialized():
        job.init(beside=group, store=store)
        record_if_wanted()
    current = job.current()
    _require_fixed_ranks(current)
    here, there = (current.rank, current.size), (dist.get_rank(group), dist.get_world_size(group))
    if here != there:
        raise ConfigError(
            f"this process is rank {here[0]} of {here[1]} in hvd.init(), but rank {there[0]} of {there[1]} in its "
            "model's process group; remove the call of hvd.init(), because attach() initialises Sirtaki"
        )
    if current.size == 1:
        logger.info("%s", without_others(current.settings))
        return None
    return current


def require_all_ranks(group: dist.ProcessGroup) -> None:
    """Raise ConfigError if a process group lacks ranks."""
    if dist.get_world_size(group) != dist.get_world_size():
        raise ConfigError(
            f"attach() requires a model whose process group contains all {dist.get_world_size()} ranks, but the "
            f"process group of this model contains {dist.get_world_size(group)}"
        )


def _require_fixed_ranks(current: job.Job) -> None:
    if current.elastic is not None:
        raise ConfigError(
            "attach() requires a fixed set of ranks, like DDP, but this job is elastic; use hvd.DistributedOptimizer"
        )


@outside_modes
def _behind_composable(model: nn.Module) -> nn.Module:
    """Return the DDP model that PyTorch's `replicate()` has created for a module. Return other modules unchanged."""
    if isinstance(model, DistributedDataParallel) or not isinstance(model, nn.Module):
        return model
    # Import this module here, because it imports FSDP2, which is slow.
    from torch.distributed._composable.replicate import _ReplicateState, replicate

    state = replicate.state(model)
    if not isinstance(state, _ReplicateState):
        return model
    if not state.has_initialized:  # Make `replicate()` create the DDP model now, and not in the first forward pass.
        state.lazy_init()
    return state._ddp


class _Watched:
    """Wrapper of DDP's `_post_forward` that hooks the model's outputs, to detect where a backward pass begins."""

    def __init__(self, method: Callable[[Any], Any], idle: IdleReducer) -> None:
        self._method, self._idle = method, idle

    def __call__(self, output: Any) -> Any:
        output = self._method(output)
        if not torch.compiler.is_compiling():
            self._idle.watch(output)
        return output


def _require_reducer_alone(model: DistributedDataParallel) -> None:
    """Reject a DDP model whose gradients are reduced by anything else than DDP's default reducer."""
    if is_attached(model):
        raise ConfigError(
            'this model has been attached already, by ddp.attach() or by the process group "sirtaki"; remove this call'
        )
    if model.mixed_precision is not None:
        # Check mixed precision before communication hooks, because it adds such a hook, and the message should name the
        # cause.
        raise ConfigError("ddp.attach() cannot be used with DDP(mixed_precision=...); use torch.autocast instead")
    known = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if getattr(model, "_comm_hooks", ()) or "comm_hook" in known:  # `_comm_hooks` does not list hooks written in C++.
        raise ConfigError(
            "the DDP model has a communication hook, but Sirtaki reduces gradients itself; remove register_comm_hook"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            'ddp.attach() cannot be used with torch._dynamo.config.optimize_ddp = "python_reducer"; remove this setting'
        )
    if getattr(model, "_delay_all_reduce_params", ()):
        raise ConfigError(
            "ddp.attach() cannot be used with DDP(delay_all_reduce_named_params=...); remove this argument"
        )


TOO_OFTEN = (
    "a parameter has received two gradients in one backward pass, e.g. from reentrant checkpoints that share the "
    "parameter: use checkpoint(use_reentrant=False) or DistributedDataParallel(static_graph=True)"
)

UNNOTICED = (
    "the gradient of {name} was computed, but not reduced: torch.distributed.autograd keeps it in a context, and the "
    "model was called outside of that context; call the model within `with dist_autograd.context() as context:`, too"
)

STATIC = (
    "an attached model with DistributedDataParallel(static_graph=True) cannot be used with torch.distributed.autograd"
)

STATIC_TOO_LATE = (
    "set_static_graph() should be called before training loop starts and after DistributedDataParallel is constructed"
)

JOINED = "DistributedDataParallel.join() of an attached model cannot be used with torch.distributed.autograd"

CLOSED = (
    "the gradients of this model are not reduced any more: the reduction ended {reason}; wrap the model again, "
    "DistributedDataParallel(model.module), and attach the new model"
)


class DdpGradients(GradientHooks):
    """Object that reduces the gradients of one DDP model, instead of DDP's reducer.

    A backward pass is *due* if its gradients must be reduced, which is not the case within `no_sync()`. A due backward
    pass is one iteration.

    Attributes:
        _due: whether the next or current backward pass is due.
        _begun: whether the due backward pass has begun.
        _unwatched: number of forward passes whose backward pass is due, and on whose outputs `watch` has not registered
            hooks yet.
        _graphs: tokens of the forward passes whose backward pass is due and whose autograd graph still exists.
        _counter: counter of the gradients of each parameter in the first backward pass of a static graph. None later
            and for other graphs.
        _active_ranks: all-reduce that counts the ranks that have not called DDP's `join()`. None outside `join()`.
        _node_hooked: parameters whose AccumulateGrad nodes have hooks, which find gradients of distributed autograd
            that would not be reduced.
    """

    undefined_are_zeros = True  # Treat undefined gradients as zeros, like DDP.
    nodes_are_kept = True  # DDP's reducer keeps the AccumulateGrad nodes alive.
    # Do not compare the parameters of ranks at the start. DDP's constructor has broadcast them, and a script may later
    # change them on purpose, for example with SAM within `no_sync()`.
    may_begin_apart = False

    _due = _begun = False
    _unwatched = 0
    _graphs: Collection[ForwardGraphToken] = ()
    _counter: GradientCounter | None = None
    _active_ranks: torch.distributed.Work | None = None
    _node_hooked: Sequence[Named] = ()

    @cached_property
    def log(self) -> PassLog:
        """Return the recorder of the times of the model's forward and backward passes, for DDP's logging data."""
        return PassLog()

    @property
    def too_often(self) -> str:
        """Return the error message for a parameter that receives two gradients in one backward pass."""
        return TOO_OFTEN

    def count_gradients(self) -> None:
        """Count the gradients of each parameter in the next backward pass.

        If the graph is static, each parameter receives the same number of gradients in later passes.
        """
        self._counter = GradientCounter([param for _, param in self.named])

    def prepare(self) -> None:
        """Mark the next backward pass as one whose gradients must be reduced (due). Called in a forward pass of DDP.

        Raises:
            NotInitializedError: Sirtaki no longer reduces this model's gradients, for example after `hvd.shutdown()`.
            CommError: the job has failed.
        """
        if self.closed:
            raise NotInitializedError(CLOSED.format(reason=self.closed))
        self._control.failures.raise_if_failed()
        self.log.now.outputs_ns = time.time_ns()
        if self._node_hooked is not self.hooked and distributed_autograd.is_possible():
            self._watch_nodes()
        self._due = True
        self._unwatched += 1
        if self._counter is not None:
            self._counter.begin()

    @property
    def due(self) -> bool:
        """Return whether the gradients of the next or current backward pass must be reduced."""
        return self._due

    def leave(self) -> None:
        """Do not reduce the gradients of the next backward pass, because DDP's own reducer will reduce them."""
        self.drain()
        self._forget()

    def _watch_nodes(self) -> None:
        """Register a hook on the AccumulateGrad node of each parameter, to find gradients that would not be reduced.

        The hook raises an exception if a backward pass of distributed autograd computes a gradient without calling the
        parameter's own hooks, which reduce gradients.
        """
        self._node_hooked, this = self.hooked, weakref.ref(self)
        for number, (_, param) in enumerate(self.hooked):
            node = get_gradient_edge(param).node
            handle = node.register_hook(partial(_refuse_unnoticed, this, number))
            # Pass `node` to the callback, to keep the AccumulateGrad node alive.
            self._hooks.callback(_remove, handle, node)

    def require_noticed(self, number: int) -> None:
        """Check that the hook that reduces a parameter's gradient was called.

        Called after the gradient was computed.

        Args:
            number: index of the parameter in the list `hooked`.

        Raises:
            GradientError: the hook was not called, although the gradients of this backward pass must be reduced (it is
                due).
        """
        name, param = self.hooked[number]
        if not self._due or not param.requires_grad:
            return
        seen = self._counter.has(number) if self._counter is not None else _contains(self._ready, param)
        if not seen:
            problem = UNNOTICED.format(name=name)
            # Log the error, because PyTorch replaces its message by "Error on Node 0: python_error".
            logger.error("%s", problem)
            raise GradientError(problem)

    def watch(self, output: object) -> None:
        """Register hooks on the model's outputs, to detect where a due backward pass begins.

        A due pass is one whose gradients must be reduced.

        The first gradient of a parameter does not show where the pass begins. This gradient may be computed in a nested
        backward pass (reentrant checkpoints), which ends before the due pass ends. On some ranks, the pass may compute
        no gradient at all.

        A due pass whose autograd graph has been freed can no longer run. If a forward pass within `no_sync()` follows
        then, stop expecting the due pass.
        """
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not self._due or not outputs:
            return
        graph = ForwardGraphToken()
        if self._unwatched:
            self._unwatched -= 1
            self._graphs = weakref.WeakSet([*self._graphs, graph])
        elif not self._begun and not self._graphs:
            # Forget the due pass: this forward pass is within `no_sync()`, and the due pass can no longer run.
            self._forget()
            return
        for tensor in outputs:
            hook = partial(self._on_output_gradient, _nearest_leaf(tensor), graph)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, leaf: Node | None, _graph: ForwardGraphToken, _: torch.Tensor) -> None:
        if self._due and not self._begun and (leaf is None or accumulates(leaf)):
            self._begin()

    def divide_by(self, active_ranks: torch.distributed.Work | None) -> None:
        """Divide the gradients of the next backward pass by the number of ranks that have not called DDP's `join()`.

        Args:
            active_ranks: all-reduce that computes this number. None to divide by the number of all ranks.
        """
        self._active_ranks = active_ranks

    def take_part(self) -> None:
        """Contribute zeros to the reduction of the other ranks' gradients. Leave `.grad` unchanged on this rank.

        Collective. Called on a rank that has called DDP's `join()`, because it has no more data.
        """
        params = [param for _, param in self.named]
        own = [param.grad for param in params]
        for param in params:
            param.grad = None
        self.finish(joined=True)
        for param, gradient in zip(params, own, strict=True):
            param.grad = gradient

    def begin_backward(self) -> bool:
        """Begin a backward pass whose gradients must be reduced (a due pass).

        Returns:
            Whether each gradient may be reduced as soon as it is computed. False within `no_sync()`, or if this pass
            only counts the gradients of each parameter.
        """
        if not self._due:
            return False
        self._begin()
        return self._counter is None and bool(self.named)

    def _begin(self) -> None:
        if not self._begun:
            self.log.now.backward_ns = time.time_ns()
            self._begun = super().begin_backward()

    def end_backward(self) -> None:
        """Finish a backward pass whose gradients must be reduced (a due pass): wait for the reduction. Collective."""
        self.log.now.computed_ns = time.time_ns()
        counts = []
        if self._counter is not None:
            counts, self._counter = self._counter.end(), None
            self._ready += [param for (_, param), count in zip(self.hooked, counts, strict=True) if count]
            self._n_processed = 0
        self._forget()
        super().end_backward()
        self.finish()
        self.log.end()
        if counts:
            self.set_passes([max(1, count) for count in counts])
        if self._active_ranks is not None:
            self._active_ranks.wait()
            share = len(self.ranks) / float(self._active_ranks.get_future().value()[0])
            torch._foreach_mul_([param.grad for _, param in self.named if param.grad is not None], share)

    def fail_backward(self) -> None:
        """Give up the reduction of the gradients of this backward pass, because the pass raised an exception."""
        self._forget()
        super().fail_backward()

    def _forget(self) -> None:
        self._due = self._begun = False
        self._unwatched, self._graphs = 0, ()


def _refuse_unnoticed(
    this: weakref.ref[DdpGradients], number: int, _outputs: object, computed: tuple[torch.Tensor | None, ...]
) -> None:
    """Check that the parameter's own hook, which reduces gradients, was called with the gradient.

    Hook that PyTorch calls after an AccumulateGrad node has run.

    Args:
        this: weak reference to the object that reduces the gradients, because the node may exist longer than the
            object.
        number: index of the parameter in the object's list `hooked`.
        computed: tuple of the gradient, which is None if it is undefined.
    """
    if computed[0] is not None and (gradients := this()) is not None:
        gradients.require_noticed(number)


def _remove(handle: RemovableHandle, _node: Node) -> None:
    handle.remove()


def _contains(tensors: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is in `tensors`.

    The search begins at the end, because the last item is the most likely one.
    """
    return any(each is tensor for each in reversed(tensors))


class ForwardGraphToken:
    """Object that exists as long as the autograd graph of a forward pass, because only the graph refers to it."""


class GradientCounter:
    """Counter of the gradients that each parameter receives in a backward pass."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """Register hooks on the parameters, which count the gradients that each parameter receives."""
        self._params = params
        self.begin()
        self._handles = [
            param.register_post_accumulate_grad_hook(partial(self._count, number))  # type: ignore[no-untyped-call]
            for number, param in enumerate(params)
        ]

    def begin(self) -> None:
        """Set the counts of gradients of all parameters to 0."""
        self._counts = [0] * len(self._params)

    def end(self) -> list[int]:
        """Remove the hooks. Return the number of gradients of each parameter since `begin`."""
        for handle in self._handles:
            handle.remove()
        return self._counts

    def has(self, number: int) -> bool:
        """Return whether parameter `number` has received a gradient since `begin`."""
        return self._counts[number] > 0

    def _count(self, number: int, _: torch.Tensor) -> None:
        self._counts[number] += 1


class IdleReducer:
    """Replacement of the reducer in a DDP model whose gradients Sirtaki reduces.

    It reduces nothing: `DdpGradients` does.

    This class defines the methods by which DDP's Python code launches reductions (torch/nn/parallel/distributed.py).

    `install` frees DDP's own reducer, because its buckets need as much memory as all gradients. `detach` creates it
    again. Other calls create it early and are forwarded to it.

    torch.distributed.autograd accumulates gradients in a context instead of `.grad`. Sirtaki does not support that, but
    DDP's own reducer does. Therefore DDP's reducer reduces the gradients if a forward pass runs within such a context.
    """

    def __init__(self, model: DistributedDataParallel, gradients: DdpGradients) -> None:
        """Prepare to replace the reducer of a DDP model. `install` replaces it.

        Args:
            model: the DDP model.
            gradients: object that reduces the model's gradients instead of DDP's reducer.
        """
        self._gradients, self._model = gradients, weakref.ref(model)
        self._static, self._finds_unused = model.static_graph, model.find_unused_parameters
        self._wanted = {id(param) for _, param in gradients.named}  # Ids of the parameters that DDP reduces.
        self._trained = False  # Whether the model has run a forward pass in training.
        self._own: tuple[Any, Any] | None = None  # DDP's own reducer and its logger (C++ objects), if they exist.
        # AccumulateGrad nodes of the parameters. DDP's reducer kept them alive, with the hooks on them.
        self._nodes: list[Node] = []
        self._handle: RemovableHandle | None = None

    def install(self, model: DistributedDataParallel) -> None:
        """Replace the reducer and the logger of the DDP model, and register hooks on it. `detach` undoes this.

        First wait for the model's GPU, because DDP's buckets are freed, and CUDA streams may still use them.
        """
        # Leave inference mode, in which the script may call `attach`. A parameter has no AccumulateGrad node there.
        with self._as_wrapped(model), torch.inference_mode(mode=False), torch.enable_grad():
            self._nodes = [get_gradient_edge(param).node for _, param in self._gradients.named]
        for device in {param.device for _, param in self._gradients.named if param.is_cuda}:
            torch.cuda.synchronize(device)
        model.logger = AttachedLogger(model.logger, self._gradients.log)
        # No other call shows whether DDP's reducer has seen a forward pass. The state that it changes is freed with the
        # reducer.
        try:
            model.reducer._set_static_graph()
        except RuntimeError:
            self._trained = True
        model.reducer = self  # type: ignore[assignment]
        model.find_unused_parameters = False  # Sirtaki itself finds unused parameters at the end of the backward pass.
        # Wrap `_post_forward` of a DDP model that `replicate()` has made over a ParameterList. PyTorch calls this
        # method of such a model, but never its forward hooks.
        if isinstance(model.module, nn.ParameterList):
            model._post_forward = _Watched(model._post_forward, self)  # type: ignore[method-assign]
        else:
            self._handle = model.register_forward_hook(OutputHook(self))

    def detach(self) -> None:
        """Let DDP's own reducer reduce the model's gradients again."""
        self._gradients.drain()
        self._gradients.close("when ddp.detach() was called")
        if self._handle is not None:
            self._handle.remove()
        if (model := self._model()) is not None:
            model.__dict__.pop("_post_forward", None)
            model.find_unused_parameters = self._finds_unused
            model.reducer, model.logger = self._own or self._make_own(model)
        self._own = None
        self._nodes.clear()

    # The result is Any, because DDP's reducer and logger are C++ classes without type declarations.
    def _make_own(self, model: DistributedDataParallel) -> tuple[Any, Any]:
        """Return a new reducer and its logger, as DDP's constructor creates them. Not collective."""
        kind: Any = model  # mypy does not know these private methods, which DDP also calls in `__setstate__`.
        before = kind.reducer, kind.logger, kind.find_unused_parameters
        kind.find_unused_parameters = self._finds_unused
        try:
            with self._as_wrapped(model):
                parameters, has_sparse_gradients = kind._build_params_for_reducer()
                names = kind._build_debug_param_to_name_mapping(parameters)
                kind._ddp_init_helper(parameters, has_sparse_gradients, names, model.static_graph)
            if model.static_graph:  # With a static graph, the new reducer counts gradients in its first pass.
                kind.reducer._set_static_graph()
                kind.logger._set_static_graph()
                kind._static_graph_delay_allreduce_enqueued = False
            return kind.reducer, kind.logger
        finally:
            kind.reducer, kind.logger, kind.find_unused_parameters = before

    def _as_wrapped(self, model: DistributedDataParallel) -> AbstractContextManager[None]:
        """Restore, while the `with` block runs, the `requires_grad` that parameters had when DDP wrapped the model."""
        return _requiring_gradients(model.module, self._wanted)

    @property
    def _reducer(self) -> Any:  # The result is Any, because DDP's reducer is a C++ class without type declarations.
        """Return DDP's own reducer. Create it if it does not exist."""
        if self._own is None:
            model = self._model()
            assert model is not None
            self._own = self._make_own(model)
        return self._own[0]

    # The result is Any, because an attribute of DDP's C++ reducer may have any type.
    def __getattr__(self, name: str) -> Any:
        # Do not forward pybind11's private names. Otherwise PyTorch's C++ code would register hooks on DDP's reducer.
        if name.startswith("_pybind11_") or not hasattr(Reducer, name):
            raise AttributeError(name)
        return getattr(self._reducer, name)

    def __repr__(self) -> str:
        # PyTorch's C++ code shows this text in an error message if a script passes this object to it as a reducer.
        return (
            "<idle reducer, because Sirtaki reduces the model's gradients; to let DDP reduce them, call "
            "sirtaki.torch.ddp.detach(model), or set SIRTAKI_ATTACH=0>"
        )

    def prepare_for_forward(self) -> None:
        """Record that the model trains. DDP's own reducer also measures times here."""
        self._trained = True

    def prepare_for_backward(self, _: object) -> None:
        """Mark the next backward pass as one whose gradients must be reduced (due). Called by DDP in a forward pass.

        Raises:
            ConfigError: the forward pass runs in a context of torch.distributed.autograd, and the model has
                `static_graph=True`.
        """
        self._gradients.prepare()
        if distributed_autograd.current_context() is not None:
            if self._static:
                raise ConfigError(STATIC)
            if not self._finds_unused:
                self._gradients.leave()
                self._reducer.prepare_for_backward([])

    def watch(self, output: object) -> None:
        """Register hooks on the model's outputs, to detect the beginning of a pass whose gradients must be reduced."""
        if self._finds_unused and distributed_autograd.current_context() is not None:
            if self._gradients.due:
                self._gradients.leave()
                self._reducer.prepare_for_backward(list(_tensors(output)))
        else:
            self._gradients.watch(output)

    def _rebuild_buckets(self) -> bool:
        if self._own is None or distributed_autograd.current_context() is None:
            return False
        return bool(self._reducer._rebuild_buckets())

    def _set_static_graph(self) -> None:
        """Treat the graph as static. Called by DDP's `_set_static_graph()`.

        Raises:
            RuntimeError: the model has already run a forward pass in training. DDP's own reducer raises the same.
        """
        if self._trained:
            model = self._model()
            assert model is not None
            assert model.logger is not None
            model.logger.set_error_and_log(STATIC_TOO_LATE)
            raise RuntimeError(STATIC_TOO_LATE)
        self._static = True
        self._gradients.count_gradients()
        if self._own is not None:
            self._own[0]._set_static_graph()

    def _push_all_rebuilt_params(self) -> None:
        pass

    def _delay_all_reduce(self) -> None:
        pass

    def _set_forward_pass_work_handle(self, work: torch.distributed.Work, by_all: bool) -> None:
        """Divide the next gradients by the number of ranks that have not called DDP's `join()`.

        Called by DDP within `join()`.

        Args:
            work: all-reduce that computes this number.
            by_all: whether to divide by the number of all ranks instead.

        Raises:
            ConfigError: the forward pass runs in a context of torch.distributed.autograd.
        """
        if distributed_autograd.current_context() is not None:
            raise ConfigError(JOINED)
        self._gradients.divide_by(None if by_all else work)

    def _get_zeros_like_grad_buckets(self) -> list[object]:
        """Contribute zeros to the reduction of the other ranks' gradients.

        Called by DDP on a rank that has called `join()`.

        Returns:
            An empty list, so that DDP reduces nothing itself.
        """
        self._gradients.take_part()
        return []


class OutputHook:
    """Forward hook of a DDP model whose gradients Sirtaki reduces. It detects where a backward pass begins.

    In a copy of the model, the hook does nothing, because PyTorch's own reducer reduces the copy's gradients.
    """

    def __init__(self, idle: IdleReducer | None = None) -> None:
        """Store `idle`, the replacement of the model's reducer. In a copy of the model, `idle` is None."""
        self._idle = idle

    def __call__(self, _module: object, _inputs: object, output: object) -> None:
        """Register hooks on `output`, to detect the beginning of a backward pass whose gradients must be reduced.

        Called by PyTorch after a forward pass.
        """
        if self._idle is not None and not torch.compiler.is_compiling():
            self._idle.watch(output)

    def __reduce__(self) -> tuple[type[OutputHook], tuple[()]]:
        return OutputHook, ()


def _tensors(found: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in the output of a model, also those inside nested containers and dataclasses."""
    inside: Iterable[object] = ()
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        inside = found.values()
    elif isinstance(found, list | tuple):
        inside = found
    elif dataclasses.is_dataclass(found):
        inside = vars(found).values()
    for item in inside:
        yield from _tensors(item)


def _nearest_leaf(tensor: torch.Tensor) -> Node | None:
    """Return the AccumulateGrad node of the leaf tensor nearest to `tensor` in the autograd graph.

    None if there is no leaf.

    A hook on `tensor` can refer to this node without a reference cycle, because the node refers only to the leaf.
    """
    found, seen = deque([] if tensor.grad_fn is None else [tensor.grad_fn]), set[Node]()
    while found:
        node = found.popleft()
        if hasattr(node, "variable"):
            return node
        seen.add(node)
        found += [there for there, _ in node.next_functions if there is not None and there not in seen]
    return None
