"""For scripts that train with PyTorch's DistributedDataParallel: one line has its gradients reduced by Sirtaki, tuned.

model = DistributedDataParallel(model)
sirtaki.torch.ddp.attach(model)

DDP asks its reducer to prepare for each backward pass that is to be synchronised, and for none within `no_sync()`. A
reducer that is never asked does nothing; so another stands in its place, hears when, and has Sirtaki's hooks on the
parameters do the work. A backward pass that is due is an iteration, and ends it.

Ranks whose pass uses no parameter take part, too, so a pass is noticed where it begins, at what the model has returned.
`torch.autograd.grad` passes by there as well and adds to no `.grad` (a penalty on gradients, forces from energies, a
norm for the log): the backward pass that is due comes after it. They are told apart by a leaf of the graph, which
autograd visits in a backward pass only.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from sirtaki.autotune.trial import Arm
from sirtaki.comm.collectives.engine import GLOBAL
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.modes import outside_modes
from sirtaki.engine import job
from sirtaki.engine.autograd import accumulates
from sirtaki.engine.reducing import distributed_autograd
from sirtaki.engine.reducing.checks import Named
from sirtaki.engine.reducing.gradient_hooks import GradientHooks, ReducerOptions
from sirtaki.engine.tuning.pipeline_target import without_others
from sirtaki.errors import ConfigError, GradientError, NotInitializedError

from .basics import record_if_wanted
from .compression import Choice, Compression, reduction_options
from .ddp_logging import AttachedLogger, PassLog

logger = logging.getLogger(__name__)


def attach(model: nn.Module, *, arms: Sequence[Arm] | None = None, compression: Choice = Compression.none) -> None:
    """Collective, before the first backward pass: from now on Sirtaki averages the gradients of `model`.

    Whatever has started the ranks, and whatever carries their process group: Sirtaki connects them once more, if it has
    not been initialised. The rest of DDP stays as it is: its buckets and options, `no_sync()`, `join()`, unused
    parameters, buffers.

    Args:
        model: DistributedDataParallel, or a module that `torch.distributed._composable.replicate` makes one; its
            process group has all ranks; on one device.
        arms: search techniques to tune with, instead of the usual ones.
        compression: how gradients travel, as `DistributedOptimizer` takes it.

    Raises:
        ConfigError: the model's process group has not all ranks in it, or Sirtaki has been initialised with other
            ones, or with ranks that come and go; or the model has been attached already, or has a communication hook
            or another option of DDP's that reduces its gradients in another way, as its mixed precision.
        MismatchError: on all ranks, if their models differ.
    """
    model = _behind_composable(model)
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"attach() takes a DistributedDataParallel model, not a {type(model).__name__}")
    _require_reducer_alone(model)
    if (current := job_over(model.process_group)) is None:
        return
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    reduction = Reduction(postscale=1.0 / current.size, **reduction_options(compression))
    options = ReducerOptions(reduction=reduction, unused_as_none=True, arms=arms)
    install(model, DdpGradients(current, current.rank_sets[GLOBAL], named, passes=1, options=options))


def install(model: DistributedDataParallel, gradients: DdpGradients) -> None:
    """Let `gradients` reduce the model's gradients in place of DDP's reducer. Not collective."""
    if model.static_graph:
        gradients.count_arrivals()
    at_rest = IdleReducer(
        model.reducer, gradients, static=model.static_graph, finds_unused=model.find_unused_parameters
    )
    model.find_unused_parameters = False  # those are found when the pass ends
    model.reducer = at_rest  # type: ignore[assignment]
    model.logger = AttachedLogger(model.logger, gradients.log)
    if isinstance(model.module, nn.ParameterList):  # replicate(), whose hooks call these methods, and not the model
        model._post_forward = _Watched(model._post_forward, at_rest)  # type: ignore[method-assign]
    else:
        model.register_forward_hook(OutputHook(at_rest))


def job_over(group: dist.ProcessGroup) -> job.Job | None:
    """Return the job of the ranks of a process group, which has begun then. None if there is one rank only. Collective.

    Raises:
        ConfigError: the group has not all ranks in it, or Sirtaki has been initialised with other ones.
    """
    if dist.get_world_size(group) != dist.get_world_size():
        raise ConfigError("attach() takes a model whose process group has all ranks in it")
    if not job.is_initialized():
        job.init(beside=group)
        record_if_wanted()
    current = job.current()
    if current.elastic is not None:
        raise ConfigError(
            "attach() needs ranks that stay, as DDP does; where they come and go, DistributedOptimizer goes"
        )
    here, there = (current.rank, current.size), (dist.get_rank(group), dist.get_world_size(group))
    if here != there:
        raise ConfigError(
            f"hvd.init() has made this process rank {here[0]} of {here[1]}, and its process group rank {there[0]} of "
            f"{there[1]}: leave hvd.init() out, attach() does it"
        )
    if current.size == 1:
        logger.info("%s", without_others(current.settings))
        return None
    return current


@outside_modes
def _behind_composable(model: nn.Module) -> nn.Module:
    """Return the DDP model that works behind a module of `replicate()`. Other modules are returned as they are."""
    if isinstance(model, DistributedDataParallel) or not isinstance(model, nn.Module):
        return model
    from torch.distributed._composable.replicate import _ReplicateState, replicate  # with FSDP2, which takes long

    state = replicate.state(model)
    if not isinstance(state, _ReplicateState):
        return model
    if not state.has_initialized:  # else the first forward pass would make it
        state.lazy_init()
    return state._ddp


class _Watched:
    """DDP's method that is called with what the model returns; afterwards the backward pass from there is noticed."""

    def __init__(self, method: Callable[[Any], Any], at_rest: IdleReducer) -> None:  # Any: outputs of a model
        self._method, self._at_rest = method, at_rest

    def __call__(self, output: Any) -> Any:  # Any: as above
        output = self._method(output)
        if not torch.compiler.is_compiling():
            self._at_rest.watch(output)
        return output


def _require_reducer_alone(model: DistributedDataParallel) -> None:
    """Nothing has taken the place of DDP's reducer, or changes what it does."""
    if isinstance(model.reducer, IdleReducer):
        raise ConfigError("this model has been attached already")
    known = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if getattr(model, "_comm_hooks", ()) or "comm_hook" in known:  # the former does not list built-in ones
        raise ConfigError("the model has a communication hook: attach() takes its place, leave register_comm_hook out")
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError('attach() does not go with torch._dynamo.config.optimize_ddp = "python_reducer"')
    if getattr(model, "_delay_all_reduce_params", ()):
        raise ConfigError("attach() does not go with DDP(delay_all_reduce_named_params=...), which it makes needless")
    if model.mixed_precision is not None:
        raise ConfigError("DDP(mixed_precision=...) does not go with attach(); torch.autocast does")


TOO_OFTEN = (
    "a parameter has got a gradient twice in one backward pass, as reentrant checkpoints that share it give it: "
    "DistributedDataParallel(static_graph=True) counts them, checkpoint(use_reentrant=False) avoids it"
)

UNNOTICED = (
    "the gradient of {name} was computed, but not reduced: torch.distributed.autograd keeps it in a context, and the "
    "model was called outside of that context; call it within `with dist_autograd.context() as context:`, too"
)

STATIC = "DistributedDataParallel(static_graph=True) does not go with torch.distributed.autograd where it is attached"

JOINED = "DistributedDataParallel.join() does not go with torch.distributed.autograd where it is attached"

CLOSED = (
    "the gradients of this model are not reduced any more: that ended {reason}; wrap it once more, "
    "DistributedDataParallel(model.module), and attach that"
)


class DdpGradients(GradientHooks):
    """Keeps the gradients of one DDP model equal on some of the ranks: an iteration is a backward pass that is due."""

    undefined_are_zeros = True  # as DDP has it
    nodes_are_kept = True  # by DDP's reducer
    may_begin_apart = False  # DDP's constructor has sent rank 0's; what no_sync() passes do to them, as SAM's, is meant

    _due = _begun = False
    _unseen = 0  # forward passes that are to be synchronised, of which no output is known
    _graphs: Collection[ForwardGraphToken] = ()  # of the others; only those are here whose backward pass may still come
    _arrivals: GradientCounter | None = None
    _active_ranks: torch.distributed.Work | None = None
    _watched: Sequence[Named] = ()  # parameters whose gradients are noticed in distributed autograd, too

    @cached_property
    def log(self) -> PassLog:
        """What DDP logs of the model's steps."""
        return PassLog()

    @property
    def too_often(self) -> str:
        """What is wrong where a gradient comes twice in one backward pass."""
        return TOO_OFTEN

    def count_arrivals(self) -> None:
        """The graph stays: a parameter may get gradients several times in a pass, as often as in the first one."""
        self._arrivals = GradientCounter([param for _, param in self.named])

    def prepare(self) -> None:
        """The next backward pass is to be synchronised; DDP's forward says so.

        Raises:
            NotInitializedError: nobody reduces gradients any more.
            CommError: the job has failed.
        """
        if self.closed:
            raise NotInitializedError(CLOSED.format(reason=self.closed))
        self._control.failures.raise_if_failed()
        self.log.now.outputs_ns = time.time_ns()
        if self._watched is not self.hooked and distributed_autograd.is_possible():
            self._watch_nodes()
        self._due = True
        self._unseen += 1
        if self._arrivals is not None:
            self._arrivals.begin()

    @property
    def due(self) -> bool:
        """The next backward pass is to be synchronised."""
        return self._due

    def leave(self) -> None:
        """Leave the next backward pass to DDP's own reducer."""
        self.drain()
        self._forget()

    def _watch_nodes(self) -> None:
        """Have a backward pass refused that leads to parameters whose own hooks are not called."""
        self._watched, this = self.hooked, weakref.ref(self)
        for number, (_, param) in enumerate(self.hooked):
            node = get_gradient_edge(param).node
            handle = node.register_hook(partial(_refuse_unnoticed, this, number))
            self._hooks.callback(_remove, handle, node)  # which keeps the node; PyTorch frees it otherwise

    def require_noticed(self, number: int) -> None:
        """Call for a hooked parameter where its gradient was computed, after its own hook.

        Raises:
            GradientError: that hook was not called, and the pass is to be synchronised.
        """
        name, param = self.hooked[number]
        if not self._due or not param.requires_grad:
            return
        seen = self._arrivals.has(number) if self._arrivals is not None else _contains(self._come, param)
        if not seen:
            problem = UNNOTICED.format(name=name)
            logger.error("%s", problem)  # PyTorch's engine turns the exception into "Error on Node 0: python_error"
            raise GradientError(problem)

    def watch(self, output: object) -> None:
        """Has the backward pass noticed that begins at what the model returns.

        The first gradient may come in a pass within that one (reentrant checkpoints), whose end is not its end, or on
        some ranks not at all. Where what it was to go through is gone, and another pass follows that is not to be
        synchronised, it does not come any more.
        """
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not self._due or not outputs:
            return
        graph = ForwardGraphToken()
        if self._unseen:
            self._unseen -= 1
            self._graphs = weakref.WeakSet([*self._graphs, graph])
        elif not self._begun and not self._graphs:
            self._forget()  # a gradient for the log, say, maybe on this rank alone; this forward is of `no_sync()`
            return
        for tensor in outputs:
            hook = partial(self._pass_by, _nearest_leaf(tensor), graph)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _pass_by(self, leaf: Node | None, _graph: ForwardGraphToken, _: torch.Tensor) -> None:
        if self._due and not self._begun and (leaf is None or accumulates(leaf)):
            self._begin()

    def divide_by(self, active_ranks: torch.distributed.Work | None) -> None:
        """Gradients of the next pass are divided by the number of ranks that have not joined, which that all-reduce
        finds, not by that of all ranks; None = as usual.
        """
        self._active_ranks = active_ranks

    def take_part(self) -> None:
        """Collective: what a backward pass of the other ranks is on one that has joined; its gradients stay."""
        params = [param for _, param in self.named]
        own = [param.grad for param in params]
        for param in params:
            param.grad = None
        self.finish(joined=True)
        for param, gradient in zip(params, own, strict=True):
            param.grad = gradient

    def begin_backward(self) -> bool:
        """Returns False if this pass is not to be synchronised: its gradients are only added up, or counted."""
        if not self._due:
            return False
        self._begin()
        return self._arrivals is None and bool(self.named)

    def _begin(self) -> None:
        if not self._begun:
            self.log.now.backward_ns = time.time_ns()
            self._begun = super().begin_backward()

    def end_backward(self) -> None:
        """The pass that was due is over, and with it the iteration."""
        self.log.now.computed_ns = time.time_ns()
        counts = []
        if self._arrivals is not None:
            counts, self._arrivals = self._arrivals.end(), None
            self._come += [param for (_, param), count in zip(self.hooked, counts, strict=True) if count]
            self._looked = 0
        self._forget()
        super().end_backward()
        self.finish()
        self.log.end()
        if counts:
            self.set_passes([max(1, count) for count in counts])
        if self._active_ranks is not None:
            self._active_ranks.wait()
            share = len(self.ranks) / float(self._active_ranks.result()[0])
            torch._foreach_mul_([param.grad for _, param in self.named if param.grad is not None], share)

    def fail_backward(self) -> None:
        """Gives up the pass that was due, which has raised."""
        self._forget()
        super().fail_backward()

    def _forget(self) -> None:
        self._due = self._begun = False
        self._unseen, self._graphs = 0, ()


def _refuse_unnoticed(
    this: weakref.ref[DdpGradients], number: int, _outputs: object, computed: tuple[torch.Tensor | None, ...]
) -> None:
    """A hook of a parameter's AccumulateGrad node."""
    if computed[0] is not None and (gradients := this()) is not None:
        gradients.require_noticed(number)


def _remove(handle: RemovableHandle, _node: Node) -> None:
    handle.remove()


def _contains(tensors: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Return whether the tensor is in the list, most likely as its last one."""
    return any(each is tensor for each in reversed(tensors))


class ForwardGraphToken:
    """Lives as long as what a forward pass has left for its backward pass."""


class GradientCounter:
    """Counts how often a gradient of each parameter comes in a backward pass."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """Begins to count."""
        self._params = params
        self.begin()
        self._handles = [
            param.register_post_accumulate_grad_hook(partial(self._count, number))  # type: ignore[no-untyped-call]
            for number, param in enumerate(params)
        ]

    def begin(self) -> None:
        """Sets all counts to 0."""
        self._counts = [0] * len(self._params)

    def end(self) -> list[int]:
        """Stops counting, and returns how often each gradient has come."""
        for handle in self._handles:
            handle.remove()
        return self._counts

    def has(self, number: int) -> bool:
        """Return whether the gradient of that parameter has come in this pass."""
        return self._counts[number] > 0

    def _count(self, number: int, _: torch.Tensor) -> None:
        self._counts[number] += 1


class IdleReducer:
    """What a DDP model holds in place of its reducer, which answers questions, and reduces in distributed autograd.

    Its methods are those by which DDP's Python code has gradients reduced (torch/nn/parallel/distributed.py).

    torch.distributed.autograd accumulates gradients in a context instead of `.grad`. DDP's own reducer reads and writes
    them there, so it reduces the gradients of every forward pass within such a context.
    """

    def __init__(self, reducer: Any, gradients: DdpGradients, *, static: bool, finds_unused: bool) -> None:
        """Starts nothing.

        Args:
            reducer: DDP's (Any: it is a class of C++ without types).
            gradients: what reduces in its place.
            static: DDP's option `static_graph`.
            finds_unused: DDP's option `find_unused_parameters`.
        """
        self._reducer, self._gradients, self._static, self._finds_unused = reducer, gradients, static, finds_unused

    def __getattr__(self, name: str) -> Any:  # Any: as the reducer has it
        if name.startswith("_pybind11_"):  # by which C++ would find the reducer in here, and give it a hook
            raise AttributeError(name)
        return getattr(self._reducer, name)

    def __repr__(self) -> str:
        # What PyTorch says where it is given this, to register a communication hook, and cannot take it.
        return (
            "<reducer at rest, since Sirtaki reduces the model's gradients: no communication hook goes with it; one "
            "that is registered before the first backward pass leaves them to DDP, and so does SIRTAKI_ATTACH=0>"
        )

    def prepare_for_backward(self, _: object) -> None:
        """Before each backward pass that is to be synchronised.

        Raises:
            ConfigError: the forward pass is in distributed autograd, which does not go with the model's options.
        """
        self._gradients.prepare()
        if distributed_autograd.current_context() is not None:
            if self._static:
                raise ConfigError(STATIC)
            if not self._finds_unused:
                self._gradients.leave()
                self._reducer.prepare_for_backward([])

    def watch(self, output: object) -> None:
        """Has the backward pass noticed that begins at what the model returns."""
        if self._finds_unused and distributed_autograd.current_context() is not None:
            if self._gradients.due:
                self._gradients.leave()
                self._reducer.prepare_for_backward(list(_tensors(output)))
        else:
            self._gradients.watch(output)

    def _rebuild_buckets(self) -> bool:
        return distributed_autograd.current_context() is not None and bool(self._reducer._rebuild_buckets())

    def _push_all_rebuilt_params(self) -> None:
        pass

    def _delay_all_reduce(self) -> None:
        pass

    def _set_forward_pass_work_handle(self, work: torch.distributed.Work, by_all: bool) -> None:
        """In `join()`, before each forward: `work` adds up who has not joined."""
        if distributed_autograd.current_context() is not None:
            raise ConfigError(JOINED)
        self._gradients.divide_by(None if by_all else work)

    def _get_zeros_like_grad_buckets(self) -> list[object]:
        """In `join()`, on a rank that has joined: for the other ranks' backward pass; no bucket is left to reduce."""
        self._gradients.take_part()
        return []


class OutputHook:
    """A forward hook of a DDP model. In a copy of the model, whose reducer is PyTorch's own, it does nothing."""

    def __init__(self, at_rest: IdleReducer | None = None) -> None:
        """Args: `at_rest` is the model's; None = PyTorch's own reducer is at work."""
        self._at_rest = at_rest

    def __call__(self, _module: object, _inputs: object, output: object) -> None:
        """Has the backward pass noticed that begins at `output`; PyTorch calls this."""
        if self._at_rest is not None and not torch.compiler.is_compiling():
            self._at_rest.watch(output)

    def __reduce__(self) -> tuple[type[OutputHook], tuple[()]]:
        return OutputHook, ()


def _tensors(found: object) -> Iterator[torch.Tensor]:
    """Yields the tensors nested in containers."""
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
    """What adds up the gradient of some tensor that this one was computed from; None if there is none such.

    A reference to it leads back to that tensor, but not to this one, which may hold it.
    """
    found, seen = deque([] if tensor.grad_fn is None else [tensor.grad_fn]), set[Node]()
    while found:
        node = found.popleft()
        if hasattr(node, "variable"):
            return node
        seen.add(node)
        found += [there for there, _ in node.next_functions if there is not None and there not in seen]
    return None
