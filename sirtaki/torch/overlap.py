"""Deferred updates: apply the update of each parameter right before the parameter is read.

A parameter is *held* from the backward pass until its update is applied. Holding it replaces its class by a subclass
that intercepts `__torch_function__`. The first operation on a held parameter waits for the reduced gradient, applies
the update, and restores the class.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from sirtaki.comm.collectives.operations import is_dtensor
from sirtaki.comm.device import count_storage_users
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.gradients.state import IterationState
from sirtaki.comm.modes import script_is_in_inference_mode
from sirtaki.engine.reducing.checks import Named
from sirtaki.engine.reducing.gradient_hooks import GradientHooks
from sirtaki.engine.reducing.sharing import OptimizerGradients
from sirtaki.errors import StaleReadError
from sirtaki.machine import free_in_forked_children


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[Any], object]:
    """Return the `step` method of an optimizer class without PyTorch's step hooks.

    Sirtaki divides one step into several calls of the returned method, each for some of the parameters. The hooks must
    run only once per step.
    """
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]  # set by functools.wraps


@contextlib.contextmanager
def step_context(device: torch.device) -> Iterator[None]:
    """Disable autocast, inference mode, dispatch modes and functorch transforms for the updates in the `with` block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        # An interpreter on the stack means that the calling code runs inside a transform of `torch.func`.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        yield


class PartialStep:
    """One step of an optimizer that is applied to a few parameters at a time.

    Holds a weak reference to the optimizer.

    Attributes:
        running: whether `update` is running now.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        """Prepare partial steps of `optimizer`, which call the `step` method of the class `kind`."""
        self._reference, self._step = weakref.ref(optimizer), bare_step(kind)
        self._options: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}
        self.running = False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer, which the caller must have kept alive."""
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def begin(self) -> None:
        """Begin a step of the optimizer.

        Copy the options in `param_groups`, so that later changes do not affect the updates of this step.
        """
        self._options, self._group_of = [], {}
        for number, group in enumerate(self.optimizer.param_groups):
            self._group_of |= {id(param): number for param in group["params"]}
            self._options.append({name: _copy(value) for name, value in group.items() if name != "params"})

    def others(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters of the optimizer that are not in `params`."""
        without = {id(param) for param in params}
        every = (param for group in self.optimizer.param_groups for param in group["params"])
        return [param for param in every if id(param) not in without]

    def update(self, params: Iterable[torch.Tensor]) -> None:
        """Apply the current step of the optimizer to `params`, except to those without `.grad`.

        Call it once for each parameter and step.
        """
        members: dict[int, list[torch.Tensor]] = {}
        for param in params:
            if param.grad is not None and (number := self._group_of.get(id(param))) is not None:
                members.setdefault(number, []).append(param)
        if not members:
            return
        groups = [{**self._options[number], "params": members[number]} for number in sorted(members)]
        device = groups[0]["params"][0].device
        optimizer = self.optimizer
        whole = optimizer.param_groups
        self.running = True
        try:
            with step_context(device):
                optimizer.param_groups = groups
                self._step(optimizer)
        finally:
            optimizer.param_groups = whole
            self.running = False


def _copy(value: Any) -> Any:  # `value` is an option of an optimizer, of any type.
    return value.clone() if isinstance(value, torch.Tensor) else value


KNOWN = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizer classes of PyTorch that update each parameter independently of the others.

For any other class, `refusal_by_trial` tests this property on copies of the parameters.
"""

SCALES = (1.0, 1e4, 1e-4)
"""Factors that multiply the gradients when an optimizer is tested on copies.

Some operations, such as clipping by a norm, have an effect for large gradients only.
"""


def refusal(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Return the reason why the class or the options of an optimizer do not allow deferred updates (`overlap_forward`).

    Return an empty string if they allow it.

    Args:
        optimizer: the distributed optimizer.
        kind: class of the wrapped optimizer.
    """
    if issubclass(kind, torch.optim.LBFGS):
        return f"{kind.__name__} reads all parameters at once"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind.__name__}(differentiable=True) keeps a graph of its step"
    if any(is_dtensor(param) for group in optimizer.param_groups for param in group["params"]):
        return "some of its parameters are DTensors"
    return ""


def refusal_by_trial(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Test on two copies whether an optimizer updates each parameter independently of the others.

    One copy updates all parameters at once, the other copy one by one in reverse order. Afterwards the parameters,
    states, options and attributes of both copies must be bitwise equal. Called after all gradients were reduced.

    Returns:
        The reason why the optimizer does not allow deferred updates (`overlap_forward`). An empty string if it does.
    """
    if kind in KNOWN:
        return ""
    device = optimizer.param_groups[0]["params"][0].device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            rng = torch.get_rng_state()
            for scale in SCALES:
                whole, parts = _copy_of(optimizer, kind, scale), _copy_of(optimizer, kind, scale)
                with step_context(device):
                    bare_step(kind)(whole)
                partial = PartialStep(parts, kind)
                partial.begin()
                for param in reversed(partial.others([])):
                    partial.update([param])
                if not torch.equal(rng, torch.get_rng_state()):
                    return f"{kind.__name__} draws random numbers"
                if different := _difference(_shared_state(whole), _shared_state(parts)):
                    return f"{kind.__name__}.step() changes {different}, which does not belong to one parameter"
                if _difference(_results(whole), _results(parts)):
                    return f"{kind.__name__} uses other parameters to update a parameter"
    except Exception as err:
        # Treat every error as a refusal. An unknown optimizer may raise any error, and the copies may not fit into
        # memory.
        return f"{kind.__name__} failed in a trial step with some of its parameters ({type(err).__name__}: {err})"
    return ""


def _copy_of(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], scale: float
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer, without its distributed wrapper, over copies of its parameters.

    The copied gradients are multiplied by `scale`.
    """
    copies: dict[int, Any] = {}  # Memo of `deepcopy`, which replaces references to a parameter by its copy.
    for group in optimizer.param_groups:
        for param in group["params"]:
            copies[id(param)] = twin = torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            twin.grad = None if param.grad is None else param.grad.detach() * scale
    copied = object.__new__(kind)
    for name, value in vars(getattr(optimizer, "_wrapped", optimizer)).items():
        if name.endswith("_hooks"):
            copied.__dict__[name] = OrderedDict()
        # Do not copy an attribute `step`, with which a scheduler may have replaced the method.
        elif name not in ("state", "param_groups", "step"):
            try:
                copied.__dict__[name] = copy.deepcopy(value, copies)
            except Exception:  # Share an attribute that cannot be copied, because updates do not depend on it.
                copied.__dict__[name] = value
    copied.param_groups = copy.deepcopy(optimizer.param_groups, copies)
    copied.state = defaultdict(dict, copy.deepcopy(dict(optimizer.state), copies))
    return copied


def _results(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the value and the optimizer state of each parameter. The key is the parameter's index."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {str(number): (param.detach(), optimizer.state.get(param, {})) for number, param in enumerate(params)}


def _shared_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the part of the optimizer's state that belongs to no single parameter. The keys describe the entries.

    The entries are the optimizer's attributes, the options of parameter groups, and entries of `state` whose key is no
    parameter.
    """
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    shared = {f"its attribute {name}": value for name, value in own.items()}
    shared |= {f"its state {key}": value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        shared |= {f"its option {name} (of group {number})": value for name, value in options.items()}
    return shared


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the first key whose values differ or that one dict lacks. Empty string if the dicts are equal."""
    return next(
        (
            name
            for name in {**one, **other}
            if name not in one or name not in other or not _equal(one[name], other[name])
        ),
        "",
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    try:
        return bool(one == other)
    except Exception:  # Values that cannot be compared count as different.
        return False


class Awaiter(Protocol):
    """Owner of held tensors, whose updates are deferred.

    Each operation on a held tensor first calls the tensor's owner.
    """

    def on_read(self, tensor: torch.Tensor) -> None:
        """Wait until the held tensor has its final value, and stop holding it.

        Called before an operation reads the tensor.
        """
        ...

    def drain(self) -> None:
        """Wait until all tensors that this owner holds have their final values, and stop holding them."""
        ...


_awaiters: dict[int, Awaiter] = {}

_FREE = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "is_cuda", "is_cpu")
) | {torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim}
"""Functions that read no elements of a tensor, so that they need not wait for the tensor's deferred update."""


class _Awaited:
    """Mixin for the classes of held tensors, whose updates are deferred.

    Every operation on a held tensor first waits for the tensor's update.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # The arguments have PyTorch's signature of `__torch_function__`.
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = list(_tensors((args, kwargs)))
        for tensor in found:
            wait_for(tensor)
        if not found:  # No held tensor is found if it is inside a container that `_tensors` does not search.
            wait_for_all()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        tensor = cast(torch.Tensor, self)
        wait_for(tensor)
        return copy.deepcopy(tensor, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        tensor = cast(torch.Tensor, self)
        wait_for(tensor)
        return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # untyped in PyTorch


class _AwaitedParameter(_Awaited, nn.Parameter):
    pass


class _AwaitedTensor(_Awaited, torch.Tensor):
    pass


_HELD: dict[type, type] = {nn.Parameter: _AwaitedParameter, torch.Tensor: _AwaitedTensor}
_PLAIN: dict[type, type] = {held: plain for plain, held in _HELD.items()}


def can_be_held(tensor: torch.Tensor) -> bool:
    """Return whether `hold` supports the class of the tensor, and nothing else holds the tensor."""
    return type(tensor) in _HELD


def is_held(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is held: operations on it first wait for its deferred update."""
    return type(tensor) in _PLAIN


def hold(tensors: Iterable[torch.Tensor], awaiter: Awaiter) -> None:
    """Hold tensors: each operation on one of them first calls `awaiter`, which waits for the tensor's deferred update.

    A reference keeps `awaiter` alive until all tensors are released.
    """
    for tensor in tensors:
        _awaiters[id(tensor)] = awaiter
        tensor.__class__ = _HELD[type(tensor)]


def release(tensor: torch.Tensor) -> None:
    """Stop holding a tensor: restore its class, so that operations on it no longer wait for its update.

    Ignore a tensor that is not held.
    """
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        del _awaiters[id(tensor)]


def wait_for(tensor: torch.Tensor) -> None:
    """Wait until the deferred update of a tensor is applied. Return at once if the tensor has no deferred update."""
    awaiter = _awaiters.get(id(tensor))
    if awaiter is not None:
        awaiter.on_read(tensor)


def wait_for_all() -> None:
    """Wait until all deferred updates of this process are applied. Not collective."""
    for awaiter in dict.fromkeys(_awaiters.values()):
        awaiter.drain()


def _tensors(found: object) -> Iterator[torch.Tensor]:
    if isinstance(found, _Awaited):
        yield cast(torch.Tensor, found)
    elif isinstance(found, list | tuple | set | frozenset):
        for item in found:
            yield from _tensors(item)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))


class HeldReads(TorchDispatchMode):
    """Dispatch mode that reports each operation that uses the memory of a held tensor, also through a view or an alias.

    A tensor is held while its update is deferred.
    """

    def __init__(self, params: Sequence[torch.Tensor], found: Callable[[torch.Tensor, Any], None]) -> None:
        """Prepare to report operations on `params`: for each, call `found` with the parameter and the operation."""
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in PyTorch
        self._found = found
        self._waiting: torch.utils.hooks.RemovableHandle | None = None
        with torch._C.DisableTorchFunctionSubclass():
            self._by_memory = {param.untyped_storage()._cdata: param for param in params}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `found` for each argument that is a held parameter (its update is deferred), then run the operation.

        PyTorch calls this method for each operation.
        """
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                param = self._by_memory.get(_memory(tensor))
                if param is not None and is_held(param):
                    self._found(param, func)
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            _count_writes(func, args)
        return result

    def begin(self) -> bool:
        """Enter this dispatch mode, so that it reports the operations of the calling thread on held tensors.

        Returns:
            Whether the mode was entered. False if the script is in inference mode or in another `TorchDispatchMode`.
        """
        if script_is_in_inference_mode():
            return False
        if any(not isinstance(mode, HeldReads) for mode in _get_current_dispatch_mode_stack()):
            return False
        self.__enter__()  # type: ignore[no-untyped-call]  # untyped in PyTorch
        return True

    def end(self) -> None:
        """Stop reporting operations, and leave the dispatch mode. Does nothing if it was left already.

        The script may have entered other dispatch modes meanwhile, and may still be inside them. While the script is in
        inference mode, this mode stays on PyTorch's stack of modes. A forward pre-hook removes it when a module is
        called later.
        """
        self._by_memory.clear()
        if not script_is_in_inference_mode():
            self._leave()
        elif self._waiting is None and self._is_entered():
            self._waiting = register_module_forward_pre_hook(lambda *_: self.end())

    def _is_entered(self) -> bool:
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def _leave(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None
        if not self._is_entered():
            return
        above = list[Any]()
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_pop_mode())
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # untyped in PyTorch
        for mode in reversed(above):
            _push_mode(mode)


def _count_writes(func: Any, args: tuple[Any, ...]) -> None:
    """Increment the version counters of the tensors that an operation writes to, if they are in a list argument.

    PyTorch does not increment these counters below a dispatch mode. An example is `clip_grad_norm_`, which writes to
    lists of tensors.
    """
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, list | tuple):
            for tensor in value:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return int(tensor.untyped_storage()._cdata)
        # Sparse tensors and tensors of functorch transforms have no version to increment.
        except (NotImplementedError, RuntimeError):
            return 0


class LearnedReads:
    """Recorder of the order in which one iteration reads the optimizer's parameters for the first time.

    Attributes:
        order: parameters in the order of their first reads.
        uncovered: ids of parameters that an operation read without a call of `__torch_function__`. Such a read would
            not wait for a deferred update.
        modules: modules whose forward was called during the recording.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """Prepare to record reads of `params`.

        The parameters must have no deferred updates, and their gradients must not be in communication.
        """
        self._params = params
        self._mode = HeldReads(params, self._on_uncovered_read)
        self.order: list[torch.Tensor] = []
        self.uncovered: set[int] = set()
        self.modules: list[nn.Module] = []
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def begin(self) -> bool:
        """Start to record reads of the parameters.

        Returns:
            Whether the recording has started. False if a parameter cannot be held or another dispatch mode is active.
        """
        if not all(map(can_be_held, self._params)) or not self._mode.begin():
            return False
        hold(self._params, self)
        self._handle = register_module_forward_pre_hook(self._on_module_call)
        return True

    def end(self) -> None:
        """Stop recording reads: restore the classes of all parameters, so that reads are no longer intercepted."""
        self._mode.end()
        self.drain()
        if self._handle is not None:
            self._handle.remove()

    def on_read(self, tensor: torch.Tensor) -> None:
        """Record the first read of a parameter.

        Restore the parameter's class, so that later reads are not intercepted.
        """
        release(tensor)
        self.order.append(tensor)

    def drain(self) -> None:
        """Restore the classes of all parameters without recording a read, so that reads are no longer intercepted."""
        for param in self._params:
            release(param)

    def _on_uncovered_read(self, param: torch.Tensor, _: object) -> None:
        self.uncovered.add(id(param))
        self.on_read(param)

    def _on_module_call(self, module: nn.Module, _: object) -> None:
        if not any(module is known for known in self.modules):
            self.modules.append(module)


class CheckedReads:
    """Detector of reads of a parameter before its deferred update is applied (`SIRTAKI_OVERLAP_FORWARD=check`).

    Raises `StaleReadError` in the operation that reads a parameter too early.
    """

    def __init__(self, params: Sequence[torch.Tensor], names: dict[int, str]) -> None:
        """Prepare to check reads of `params`. `names` maps the id of each parameter to its name in the error."""
        self._names = names
        self._mode = HeldReads(params, self._raise)
        self._inside: list[str] = []
        self._handles = contextlib.ExitStack()

    def begin(self) -> None:
        """Start to check reads of parameters. Do nothing if inference mode or another dispatch mode is active."""
        if self._mode.begin():
            for handle in (
                register_module_forward_pre_hook(lambda module, _: self._inside.append(type(module).__name__)),
                register_module_forward_hook(self._on_module_return, always_call=True),
            ):
                self._handles.callback(handle.remove)

    def end(self) -> None:
        """Stop checking reads of parameters."""
        self._mode.end()
        self._handles.close()
        self._inside.clear()

    def _on_module_return(self, *_: object) -> None:
        if self._inside:
            self._inside.pop()

    def _raise(self, param: torch.Tensor, operation: Any) -> None:
        where = f"in {self._inside[-1]}" if self._inside else "outside of all modules"
        raise StaleReadError(
            f"the operation {operation} reads the parameter {self._names.get(id(param), 'unnamed')} ({where}) before "
            "its deferred update (overlap_forward) is applied; call optimizer.finish() before this read"
        )


def wait_for_own(module: nn.Module, _: object) -> None:
    """Wait for the deferred updates of a module's parameters, if the module's class is not PyTorch's.

    Global forward pre-hook.

    PyTorch's modules read parameters through functions that wait for the deferred update. Other modules may give a
    parameter to a C++ extension, which does not wait.
    """
    if not type(module).__module__.startswith("torch."):
        for param in _own(module):
            wait_for(param)


def custom_modules_hold(modules: Sequence[nn.Module], params: Sequence[torch.Tensor]) -> bool:
    """Return whether one of the parameters belongs directly to a module or submodule whose class is not PyTorch's."""
    wanted = {id(param) for param in params}
    every = dict.fromkeys(part for module in modules for part in module.modules())
    others = [part for part in every if not type(part).__module__.startswith("torch.")]
    return any(id(param) in wanted for part in others for param in _own(part))


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module contains directly or in a ParameterList or ParameterDict."""
    lists = [part for part in module._modules.values() if isinstance(part, nn.ParameterList | nn.ParameterDict)]
    return [param for part in (module, *lists) for param in part._parameters.values() if param is not None]


def _n_references(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's storage.

    If this PyTorch version cannot count references, return 1 if the storage is larger than the tensor, else 0.
    """
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        return count_storage_users(storage._cdata) if count_storage_users else int(storage.nbytes() > tensor.nbytes)


_ALONE = _n_references(torch.empty(1, dtype=torch.float32, device="cpu"))


def _has_alias(param: torch.Tensor) -> bool:
    """Return whether another tensor shares a parameter's storage.

    A read of that tensor would not wait for the parameter's deferred update.

    Examples: parameters in one flat buffer, a reference to `p.data` or to a `state_dict()`, or a retained autograd
    graph that has saved the parameter.
    """
    return _n_references(param) > _ALONE


def _pipeline(hooks: GradientHooks) -> GradientPipeline:
    assert hooks.pipeline is not None, "only what the pipeline reduces is put off"
    return hooks.pipeline


class Zeroing(Enum):
    """Effect of a `zero_grad` call on a gradient whose parameter has a deferred update.

    The gradient is zeroed only after the update.
    """

    NONE = "set to None"
    ZEROS = "zeros"


class PutOffUpdates:
    """Deferred updates of one optimizer. Each update is applied when the next operation reads the parameter.

    Until then the parameter is *held*: operations on it first call this object. Implements `ForwardGate`, the interface
    that the reducer calls. Updates are deferred only while the optimizer has exactly one reducer (`GradientHooks`).

    Attributes:
        uncovered: ids of parameters that the script reads without a call of `__torch_function__`. Such a read would not
            wait, so `step()` applies their updates at once.
    """

    def __init__(
        self,
        gradients: OptimizerGradients,
        partial: PartialStep,
        *,
        allowed: Callable[[], bool],
        seen: Callable[[], None],
        closed: Callable[[], None],
    ) -> None:
        """Store the arguments. No update is deferred before `use` is called.

        Args:
            gradients: reducers of the optimizer's gradients.
            partial: one step of the optimizer, which can be applied to some parameters at a time.
            allowed: function that returns whether the optimizer and the script permit deferred updates in this
                iteration.
            seen: function to call when the script reads a parameter or gradient between backward and `step()`. The read
                waits for the gradient.
            closed: function to call when the reducer will defer no further update.
        """
        self._gradients, self._partial, self._allowed, self._seen = gradients, partial, allowed, seen
        self._closed = closed
        self._lock = free_in_forked_children(threading.RLock())
        self.uncovered = frozenset[int]()
        self._hooked: list[Named] = []
        self._params: list[torch.Tensor] = []
        self._number_of: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._gradient_of: dict[int, torch.Tensor | None] = {}
        self._zeroing: dict[int, Zeroing] = {}
        # Strong reference to the optimizer while updates are deferred, because the script may drop its own last
        # reference.
        self._keeps: torch.optim.Optimizer | None = None

    def use(self) -> None:
        """Register this object as the forward gate of the optimizer's reducer, so that the reducer calls `keep` and
        `drain`.

        Called again whenever the optimizer gets new reducers.
        """
        if (reducer := self._reducer) is not None:
            reducer.gate = weakref.ref(self)

    @property
    def _reducer(self) -> GradientHooks | None:
        reducers = self._gradients.reducers
        return reducers[0] if len(reducers) == 1 else None

    @property
    def state(self) -> IterationState:
        """Return the state of the iteration of the optimizer's reducer.

        COLLECTING (some gradients are not ready) if the optimizer has no reducer or several.
        """
        return IterationState.COLLECTING if (reducer := self._reducer) is None else reducer.state

    # ── the backward pass ────────────────────────────────────────────────────────────────────────────────────────

    def _can_defer(self, reducer: GradientHooks) -> bool:
        """Return whether the updates of this iteration may be deferred.

        Refresh the list of parameters whose gradients are reduced.
        """
        if not (reducer.can_defer and self._allowed()):
            return False
        if reducer.hooked is not self._hooked:
            self._hooked, self._params = reducer.hooked, [param for _, param in reducer.hooked]
            self._number_of = {id(param): number for number, param in enumerate(self._params)}
        return reducer.state is IterationState.LAUNCHED or all(map(can_be_held, self._params))

    def keep(self) -> bool:
        """Hold all parameters (make their reads wait) if their updates may be deferred.

        Called when the backward pass ends.

        Returns:
            Whether the parameters are held. If not, the caller must wait for the reduction of all gradients.
        """
        with self._lock:
            if (reducer := self._reducer) is None or not self._can_defer(reducer):
                return False
            self._hold()
            return True

    def _hold(self) -> None:
        self._waiting, self._keeps = set(range(len(self._params))), self._partial.optimizer
        hold(self._params, self)

    def withdraw(self) -> None:
        """Wait for the reduction of all gradients, and stop holding the parameters, so that no update is deferred.

        Does nothing after `step()`.
        """
        with self._lock:
            if (reducer := self._reducer) is not None and reducer.state is IterationState.LAUNCHED:
                self._release_all()
                reducer.reduce()
                self._keeps = None

    def _release_all(self) -> None:
        for number in self._waiting:
            release(self._params[number])
        self._waiting.clear()

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Defer the updates of this optimizer step.

        Returns:
            Whether the updates are deferred. If not, the caller must reduce the gradients and update all parameters.
        """
        with self._lock:
            reducer = self._reducer
            if reducer is None or not self._can_defer(reducer):
                self.withdraw()
                return False
            if reducer.state is not IterationState.LAUNCHED and _pipeline(reducer).written:
                return False  # Defer nothing. The caller's `step()` then reports that a gradient was modified in place.
            kept = reducer.state is IterationState.LAUNCHED
            reducer.defer()
            if not kept:
                # The parameters are not held yet if some gradients were not ready when the backward pass ended.
                self._hold()
            waiting = [self._params[number] for number in self._waiting]
            with torch._C.DisableTorchFunctionSubclass():
                for number in self._waiting:
                    param = self._params[number]
                    # Set `.grad` to None, so that another backward pass through a retained graph does not add to a
                    # gradient that is being reduced.
                    self._gradient_of[number], param.grad = param.grad, None
                    torch.autograd.graph.increment_version(param)
            self._partial.begin()
            self._partial.update(self._partial.others(waiting))
            for param in waiting:
                if id(param) in self.uncovered or _has_alias(param):
                    self.on_read(param)
            return True

    def zero(self, param: torch.Tensor, zeroing: Zeroing) -> bool:
        """Zero the gradient of `param` later, after the parameter's deferred update.

        Returns:
            Whether the parameter has a deferred update. If not, this call has no effect.
        """
        with self._lock:
            number = self._number_of.get(id(param), -1)
            if number not in self._waiting:
                return False
            self._zeroing[number] = zeroing
            return True

    # ── reads of held parameters ─────────────────────────────────────────────────────────────────────────────────

    def on_read(self, tensor: torch.Tensor) -> None:
        """Wait for the gradient of a held parameter, and apply its update if `step()` was called.

        Then no longer hold it.
        """
        with self._lock:
            number, reducer = self._number_of.get(id(tensor), -1), self._reducer
            if number not in self._waiting or reducer is None:
                release(tensor)
                return
            if reducer.state is IterationState.LAUNCHED:
                self._seen()
            arrived = [other for other in reducer.wait_for(number) if other in self._waiting]
            # If the wait returns no gradient, it ended early, because other ranks wait for this rank in another
            # collective. Then stop holding all parameters. The iteration collects gradients again.
            if not arrived:
                self._release_all()
                self._keeps = None
                return
            params = [self._params[number] for number in arrived]
            self._waiting.difference_update(arrived)
            for param in params:
                release(param)
            if reducer.state is IterationState.LAUNCHED:
                _pipeline(reducer).assign_gradients(arrived)
            else:
                self._update(reducer, arrived, params)

    def _update(self, reducer: GradientHooks, arrived: Sequence[int], params: Sequence[torch.Tensor]) -> None:
        # Gradients of a newer backward pass through an old graph. They must be added to `.grad` after the update.
        newer = {number: param.grad for number, param in zip(arrived, params, strict=True) if param.grad is not None}
        for number, param in zip(arrived, params, strict=True):
            param.grad = self._gradient_of.pop(number)
        _pipeline(reducer).assign_gradients(arrived)
        self._partial.update(params)
        for number, param in zip(arrived, params, strict=True):
            zeroing = self._zeroing.pop(number, None)
            if zeroing is Zeroing.NONE:
                param.grad = None
            elif zeroing is Zeroing.ZEROS and param.grad is not None:
                param.grad = torch.zeros_like(param.grad)
            if (gradient := newer.get(number)) is not None:
                param.grad = gradient if param.grad is None else param.grad + gradient

    def drain(self) -> None:
        """Apply all deferred updates and end the iteration.

        If `step()` was not called yet, only wait for all gradients.
        """
        with self._lock:
            self.withdraw()
            if self.state is not IterationState.DEFERRED:
                return
            for number in sorted(self._waiting):
                if number in self._waiting:
                    self.on_read(self._params[number])
            self._gradients.finish()
            self._keeps = None

    def close(self) -> None:
        """Tell the optimizer that no further update will be deferred. Called by the reducer when it is closed."""
        self._closed()

    def drop(self) -> None:
        """Discard all deferred updates, because another rank is lost. The parameters keep their present values."""
        with self._lock:
            self._release_all()
            self._gradient_of.clear()
            self._zeroing.clear()
            self._keeps = None
