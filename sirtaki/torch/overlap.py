"""Parameters whose update is put off until they are read."""

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
    """`kind.step` without the hooks that PyTorch calls around it, once for each call."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]  # functools'


@contextlib.contextmanager
def as_at_step(device: torch.device) -> Iterator[None]:
    """Inside, a step is what it is in a script's training loop, wherever this is called: in autocast, in evaluation."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch._C._functorch.peek_interpreter_stack() is not None:  # within torch.func's transforms
            stack.enter_context(temporarily_clear_interpreter_stack())
        yield


class PartialStep:
    """The step that an optimizer's script has asked for last; it does not keep the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        """`kind`: the class whose `step` updates parameters."""
        self._reference, self._step = weakref.ref(optimizer), bare_step(kind)
        self._options: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}
        self.running = False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose step this is."""
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def begin(self) -> None:
        """Begins a step: what its groups say now holds for all its updates, whatever is written there later."""
        self._options, self._group_of = [], {}
        for number, group in enumerate(self.optimizer.param_groups):
            self._group_of |= {id(param): number for param in group["params"]}
            self._options.append({name: _copy(value) for name, value in group.items() if name != "params"})

    def others(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The optimizer's parameters without these."""
        without = {id(param) for param in params}
        every = (param for group in self.optimizer.param_groups for param in group["params"])
        return [param for param in every if id(param) not in without]

    def update(self, params: Iterable[torch.Tensor]) -> None:
        """Updates these parameters, once each, by what is in their `.grad`."""
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
            with as_at_step(device):
                optimizer.param_groups = groups
                self._step(optimizer)
        finally:
            optimizer.param_groups = whole
            self.running = False


def _copy(value: Any) -> Any:  # Any: an optimizer's options may be anything
    return value.clone() if isinstance(value, torch.Tensor) else value


KNOWN = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
    if hasattr(torch.optim, name)
)
"""PyTorch's own that update each parameter by itself; all others are tried."""

SCALES = (1.0, 1e4, 1e-4)
"""By these gradients are multiplied for a trial: what clips by a norm, or trusts a ratio, does so only sometimes."""


def refusal(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why `overlap_forward` does not go with this optimizer, as far as its class says; empty if it may.

    Args:
        optimizer: with the groups and options.
        kind: its class.
    """
    if issubclass(kind, torch.optim.LBFGS):
        return f"{kind.__name__} looks at all parameters at once"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind.__name__}(differentiable=True) keeps a graph of its step"
    if any(is_dtensor(param) for group in optimizer.param_groups for param in group["params"]):
        return "some of its parameters are DTensors"
    return ""


def refusal_by_trial(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """As `refusal`, of an optimizer of unknown class: steps copies of it, so gradients must be there.

    One copy is stepped as a whole, and one as `PartialStep` does it, parameter by parameter, the last first. All
    values, states, options and attributes must be equal to the bit.
    """
    if kind in KNOWN:
        return ""
    device = optimizer.param_groups[0]["params"][0].device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            rng = torch.get_rng_state()
            for scale in SCALES:
                whole, parts = _copy_of(optimizer, kind, scale), _copy_of(optimizer, kind, scale)
                with as_at_step(device):
                    bare_step(kind)(whole)
                partial = PartialStep(parts, kind)
                partial.begin()
                for param in reversed(partial.others([])):
                    partial.update([param])
                if not torch.equal(rng, torch.get_rng_state()):
                    return f"{kind.__name__} draws random numbers"
                if different := _difference(_notes(whole), _notes(parts)):
                    return f"{kind.__name__}.step() changes {different}, which is not of one parameter"
                if _difference(_results(whole), _results(parts)):
                    return f"{kind.__name__} updates a parameter by what belongs to others, too"
    except Exception as err:  # whatever an unknown optimizer does with copies, or memory that they do not find
        return f"{kind.__name__} cannot be tried with a few parameters ({type(err).__name__}: {err})"
    return ""


def _copy_of(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], scale: float
) -> torch.optim.Optimizer:
    """A plain one of copies of all parameters, whose gradients are multiplied by `scale`."""
    copies: dict[int, Any] = {}  # as `deepcopy` wants them: wherever a parameter is referred to, there is its copy
    for group in optimizer.param_groups:
        for param in group["params"]:
            copies[id(param)] = twin = torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            twin.grad = None if param.grad is None else param.grad.detach() * scale
    copied = object.__new__(kind)
    for name, value in vars(getattr(optimizer, "_wrapped", optimizer)).items():
        if name.endswith("_hooks"):
            copied.__dict__[name] = OrderedDict()
        elif name not in ("state", "param_groups", "step"):  # whose `step` a scheduler may have patched
            try:
                copied.__dict__[name] = copy.deepcopy(value, copies)
            except Exception:  # what cannot be copied is not what an update depends on
                copied.__dict__[name] = value
    copied.param_groups = copy.deepcopy(optimizer.param_groups, copies)
    copied.state = defaultdict(dict, copy.deepcopy(dict(optimizer.state), copies))
    return copied


def _results(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer has made of each parameter, and keeps of it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {str(number): (param.detach(), optimizer.state.get(param, {})) for number, param in enumerate(params)}


def _notes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer keeps besides."""
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    notes = {f"its attribute {name}": value for name, value in own.items()}
    notes |= {f"its state {key}": value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        notes |= {f"its option {name} (of group {number})": value for name, value in options.items()}
    return notes


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The name of the first of these values that differs or is there once only; empty if there is none such."""
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
    except Exception:  # what cannot be compared is not known to be equal
        return False


class Awaiter(Protocol):
    """Waits for the tensors that it holds."""

    def arrive(self, tensor: torch.Tensor) -> None:
        """Blocks until anybody may use the tensor, and lets go of it."""
        ...

    def settle(self) -> None:
        """Blocks until anybody may use any of its tensors, and lets go of them."""
        ...


_awaiters: dict[int, Awaiter] = {}

_FREE = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "is_cuda", "is_cpu")
) | {torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim}
"""What may be asked at any time: it says nothing of values."""


class _Awaited:
    """Mixed into the class of tensors that are waited for."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: as torch
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
        if not found:  # in a container that is not known here
            settle_all()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        tensor = cast(torch.Tensor, self)
        wait_for(tensor)
        return copy.deepcopy(tensor, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        tensor = cast(torch.Tensor, self)
        wait_for(tensor)
        return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's


class _AwaitedParameter(_Awaited, nn.Parameter):
    pass


class _AwaitedTensor(_Awaited, torch.Tensor):
    pass


_HELD: dict[type, type] = {nn.Parameter: _AwaitedParameter, torch.Tensor: _AwaitedTensor}
_PLAIN: dict[type, type] = {held: plain for plain, held in _HELD.items()}


def can_be_held(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is of a class that `hold` knows, and is not held already."""
    return type(tensor) in _HELD


def is_held(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is held: using it waits."""
    return type(tensor) in _PLAIN


def hold(tensors: Iterable[torch.Tensor], awaiter: Awaiter) -> None:
    """Makes whoever uses one of the tensors wait, by `awaiter`, which is kept alive until they are let go."""
    for tensor in tensors:
        _awaiters[id(tensor)] = awaiter
        tensor.__class__ = _HELD[type(tensor)]


def let_go(tensor: torch.Tensor) -> None:
    """Makes the tensor plain again, for which nobody waits. Harmless if it is."""
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        del _awaiters[id(tensor)]


def wait_for(tensor: torch.Tensor) -> None:
    """Blocks until anybody may use the tensor."""
    awaiter = _awaiters.get(id(tensor))
    if awaiter is not None:
        awaiter.arrive(tensor)


def settle_all() -> None:
    """Blocks until nothing is waited for any more; not collective."""
    for awaiter in dict.fromkeys(_awaiters.values()):
        awaiter.settle()


def _tensors(found: object) -> Iterator[torch.Tensor]:
    if isinstance(found, _Awaited):
        yield cast(torch.Tensor, found)
    elif isinstance(found, list | tuple | set | frozenset):
        for item in found:
            yield from _tensors(item)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))


class HeldReads(TorchDispatchMode):
    """Reports each operation that reads a tensor while it is held, or another that shares its memory."""

    def __init__(self, params: Sequence[torch.Tensor], found: Callable[[torch.Tensor, Any], None]) -> None:
        """`found` is called with the tensor that is held, and the operation."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._found = found
        self._waiting: torch.utils.hooks.RemovableHandle | None = None
        with torch._C.DisableTorchFunctionSubclass():
            self._by_memory = {param.untyped_storage()._cdata: param for param in params}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """PyTorch's call."""
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
        """Report the operations of this thread from now on.

        Returns:
            False, with nothing reported, if the script is in inference mode or in another `TorchDispatchMode`.
        """
        if script_is_in_inference_mode():
            return False
        if any(not isinstance(mode, HeldReads) for mode in _get_current_dispatch_mode_stack()):
            return False
        self.__enter__()  # type: ignore[no-untyped-call]  # torch's
        return True

    def end(self) -> None:
        """Report nothing more. May be called inside modes that the script has entered since, and several times.

        While the script is in inference mode, the ended mode stays on PyTorch's stack. A module that is called later
        removes it.
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
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        for mode in reversed(above):
            _push_mode(mode)


def _count_writes(func: Any, args: tuple[Any, ...]) -> None:
    """Below a mode PyTorch does not count writes to lists of tensors, as `clip_grad_norm_` makes them."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, list | tuple):
            for tensor in value:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, or a transform's
            return 0


class LearnedReads:
    """One iteration in which all parameters of an optimizer are watched.

    Attributes:
        order: parameters in the order in which they were first read.
        uncovered: those that were read past Python, by id.
        modules: outermost modules that were called.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """`params`: plain ones, of which nothing is under way."""
        self._params = params
        self._mode = HeldReads(params, self._past_python)
        self.order: list[torch.Tensor] = []
        self.uncovered: set[int] = set()
        self.modules: list[nn.Module] = []
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def begin(self) -> bool:
        """Watches from now on; False if it cannot."""
        if not all(map(can_be_held, self._params)) or not self._mode.begin():
            return False
        hold(self._params, self)
        self._handle = register_module_forward_pre_hook(self._called)
        return True

    def end(self) -> None:
        """Watches no more."""
        self._mode.end()
        self.settle()
        if self._handle is not None:
            self._handle.remove()

    def arrive(self, tensor: torch.Tensor) -> None:
        """Notes that the tensor was read, and lets go of it."""
        let_go(tensor)
        self.order.append(tensor)

    def settle(self) -> None:
        """Lets go of all parameters, without noting them as read."""
        for param in self._params:
            let_go(param)

    def _past_python(self, param: torch.Tensor, _: object) -> None:
        self.uncovered.add(id(param))
        self.arrive(param)

    def _called(self, module: nn.Module, _: object) -> None:
        if not any(module is known for known in self.modules):
            self.modules.append(module)


class CheckedReads:
    """Raises where a parameter is read that is not what it will be (`SIRTAKI_OVERLAP_FORWARD=check`)."""

    def __init__(self, params: Sequence[torch.Tensor], names: dict[int, str]) -> None:
        """`names`: of the parameters, by id."""
        self._names = names
        self._mode = HeldReads(params, self._raise)
        self._inside: list[str] = []
        self._handles = contextlib.ExitStack()

    def begin(self) -> None:
        """Checks from now on."""
        if self._mode.begin():
            for handle in (
                register_module_forward_pre_hook(lambda module, _: self._inside.append(type(module).__name__)),
                register_module_forward_hook(self._left, always_call=True),
            ):
                self._handles.callback(handle.remove)

    def end(self) -> None:
        """Checks no more."""
        self._mode.end()
        self._handles.close()
        self._inside.clear()

    def _left(self, *_: object) -> None:
        if self._inside:
            self._inside.pop()

    def _raise(self, param: torch.Tensor, operation: Any) -> None:
        where = f"in {self._inside[-1]}" if self._inside else "outside of all modules"
        raise StaleReadError(
            f"{operation} reads {self._names.get(id(param), 'a parameter')} {where} before its update is made, past "
            "what Python can see: call optimizer.finish() before that"
        )


def wait_for_own(module: nn.Module, _: object) -> None:
    """A forward pre-hook of all modules: those that are not PyTorch's wait for the parameters that they hold.

    What is in PyTorch reads parameters by functions that wait; others may give theirs to an extension.
    """
    if not type(module).__module__.startswith("torch."):
        for param in _own(module):
            wait_for(param)


def hold_their_own(modules: Sequence[nn.Module], params: Sequence[torch.Tensor]) -> bool:
    """Return whether one of these modules, or one in them, is not PyTorch's and holds some of these parameters."""
    wanted = {id(param) for param in params}
    every = dict.fromkeys(part for module in modules for part in module.modules())
    others = [part for part in every if not type(part).__module__.startswith("torch.")]
    return any(id(param) in wanted for part in others for param in _own(part))


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that the module itself holds, also in lists."""
    lists = [part for part in module._modules.values() if isinstance(part, nn.ParameterList | nn.ParameterDict)]
    return [param for part in (module, *lists) for param in part._parameters.values() if param is not None]


def _n_references(tensor: torch.Tensor) -> int:
    """How many tensors have its memory; where PyTorch does not say, whether it is a part of more memory."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        return count_storage_users(storage._cdata) if count_storage_users else int(storage.nbytes() > tensor.nbytes)


_ALONE = _n_references(torch.empty(1, dtype=torch.float32, device="cpu"))


def _has_alias(param: torch.Tensor) -> bool:
    """Another tensor has this memory, or the memory around it, whose reader nobody sees.

    So it is where parameters lie in one flat buffer, or are slices of each other, where `p.data` or a `state_dict()` is
    kept, and where a graph is retained that has saved the value.
    """
    return _n_references(param) > _ALONE


def _pipeline(hooks: GradientHooks) -> GradientPipeline:
    assert hooks.pipeline is not None, "only what the pipeline reduces is put off"
    return hooks.pipeline


class Zeroing(Enum):
    """What `zero_grad` has asked for while updates were put off."""

    NONE = "set to None"
    ZEROS = "zeros"


class PutOffUpdates:
    """The updates of one optimizer that are put off; the forward gate of its reducer, while it uses one alone.

    Attributes:
        uncovered: parameters, by id, that something reads past Python: these are waited for in `step()`.
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
        """Nothing is put off before `use` is called.

        Args:
            gradients: of the optimizer.
            partial: updates some of its parameters.
            allowed: whether this iteration may be put off, as far as the script is concerned.
            seen: called when gradients are looked at, and so waited for, between backward and step.
            closed: called when nothing is put off any more by these ranks.
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
        self._keeps: torch.optim.Optimizer | None = None  # while something is put off: its script may drop it

    def use(self) -> None:
        """The optimizer's reducers are as they are now; called again when they change."""
        if (reducer := self._reducer) is not None:
            reducer.gate = weakref.ref(self)

    @property
    def _reducer(self) -> GradientHooks | None:
        reducers = self._gradients.reducers
        return reducers[0] if len(reducers) == 1 else None

    @property
    def state(self) -> IterationState:
        """State of the iteration; COLLECTING while the optimizer uses several `GradientHooks`."""
        return IterationState.COLLECTING if (reducer := self._reducer) is None else reducer.state

    # ── the backward pass ────────────────────────────────────────────────────────────────────────────────────────

    def _can(self, reducer: GradientHooks) -> bool:
        """Return whether this iteration may be put off; takes up the reducer's parameters, which may have changed."""
        if not (reducer.can_defer and self._allowed()):
            return False
        if reducer.hooked is not self._hooked:
            self._hooked, self._params = reducer.hooked, [param for _, param in reducer.hooked]
            self._number_of = {id(param): number for number, param in enumerate(self._params)}
        return reducer.state is IterationState.LAUNCHED or all(map(can_be_held, self._params))

    def keep(self) -> bool:
        """Holds all parameters, if it can; see `ForwardGate`."""
        with self._lock:
            if (reducer := self._reducer) is None or not self._can(reducer):
                return False
            self._hold()
            return True

    def _hold(self) -> None:
        self._waiting, self._keeps = set(range(len(self._params))), self._partial.optimizer
        hold(self._params, self)

    def withdraw(self) -> None:
        """Before `step()`: nothing is put off, and gradients are as after a backward pass that has waited for them."""
        with self._lock:
            if (reducer := self._reducer) is not None and reducer.state is IterationState.LAUNCHED:
                self._let_go_all()
                reducer.reduce()
                self._keeps = None

    def _let_go_all(self) -> None:
        for number in self._waiting:
            let_go(self._params[number])
        self._waiting.clear()

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Has the updates of this step put off; False, and nothing is done, if they cannot be."""
        with self._lock:
            reducer = self._reducer
            if reducer is None or not self._can(reducer):
                self.withdraw()
                return False
            if reducer.state is not IterationState.LAUNCHED and _pipeline(reducer).written:  # `step()` must raise that
                return False
            kept = reducer.state is IterationState.LAUNCHED
            reducer.defer()
            if not kept:  # some gradients did not come in the backward pass
                self._hold()
            waiting = [self._params[number] for number in self._waiting]
            with torch._C.DisableTorchFunctionSubclass():
                for number in self._waiting:
                    param = self._params[number]
                    # A backward pass through an old graph must not add to what is being reduced.
                    self._gradient_of[number], param.grad = param.grad, None
                    torch.autograd.graph.increment_version(param)
            self._partial.begin()
            self._partial.update(self._partial.others(waiting))
            for param in waiting:
                if id(param) in self.uncovered or _has_alias(param):
                    self.arrive(param)
            return True

    def zero(self, param: torch.Tensor, zeroing: Zeroing) -> bool:
        """Between steps: zeroes a gradient once its update is made; False, and nothing is done, if it is made."""
        with self._lock:
            number = self._number_of.get(id(param), -1)
            if number not in self._waiting:
                return False
            self._zeroing[number] = zeroing
            return True

    # ── what is waited for ───────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, tensor: torch.Tensor) -> None:
        """Blocks until anybody may use the tensor, and lets go of it."""
        with self._lock:
            number, reducer = self._number_of.get(id(tensor), -1), self._reducer
            if number not in self._waiting or reducer is None:
                let_go(tensor)
                return
            if reducer.state is IterationState.LAUNCHED:
                self._seen()
            arrived = [other for other in reducer.wait_for(number) if other in self._waiting]
            if not arrived:  # this rank is needed elsewhere
                self._let_go_all()
                self._keeps = None
                return
            params = [self._params[number] for number in arrived]
            self._waiting.difference_update(arrived)
            for param in params:
                let_go(param)
            if reducer.state is IterationState.LAUNCHED:
                _pipeline(reducer).assign_gradients(arrived)
            else:
                self._update(reducer, arrived, params)

    def _update(self, reducer: GradientHooks, arrived: Sequence[int], params: Sequence[torch.Tensor]) -> None:
        came = {number: param.grad for number, param in zip(arrived, params, strict=True) if param.grad is not None}
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
            if (gradient := came.get(number)) is not None:
                param.grad = gradient if param.grad is None else param.grad + gradient

    def settle(self) -> None:
        """Blocks until what was put off is done, and the iteration has ended; before `step()`, withdraws."""
        with self._lock:
            self.withdraw()
            if self.state is not IterationState.DEFERRED:
                return
            for number in sorted(self._waiting):
                if number in self._waiting:
                    self.arrive(self._params[number])
            self._gradients.finish()
            self._keeps = None

    def close(self) -> None:
        """Nothing will be put off any more; see `ForwardGate`."""
        self._closed()

    def drop(self) -> None:
        """The ranks are gone: parameters stay what they are."""
        with self._lock:
            self._let_go_all()
            self._gradient_of.clear()
            self._zeroing.clear()
            self._keeps = None
