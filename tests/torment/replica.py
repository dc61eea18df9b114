"""The part of a program that one rank computes without communication: model, batches, plain optimizers, edits."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from conformance.defaults import default_dtype
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from .program import Aside, Backward, BlockKind, Convert, Edit, Hook, OptimizerSpec, Program, RequireGrad

# ── The eager operations that a program makes in between: what a rank gives, how it is done, and what mu ─────────────

Handle = Callable[[], torch.Tensor]


def given(rank: int, number: int, rows: int = 4) -> torch.Tensor:
    """Return the input of a rank for eager operation `number`, `(rows, 3)`."""
    generator = torch.Generator().manual_seed(31 * number + rank + 1)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, slots=True)
class Operation:
    """One eager operation.

    Attributes:
        start: function (hvd, rank, number) that starts it and returns a function that waits for the result.
        result: function (rank, ranks, number) that returns the expected result.
    """

    start: Callable[[Any, int, int], Handle]
    result: Callable[[int, int, int], torch.Tensor]


def _all(ranks: int, number: int) -> torch.Tensor:
    return torch.stack([given(rank, number) for rank in range(ranks)])


def _handle(hvd: Any, handle: int) -> Handle:
    return lambda: hvd.synchronize(handle)


def _object(hvd: Any, rank: int, number: int) -> Handle:
    found = hvd.broadcast_object({"value": given(rank, number)}, root_rank=0)
    return lambda: found["value"]


OPERATIONS: dict[str, Operation] = {
    "allreduce": Operation(
        lambda hvd, rank, number: _handle(hvd, hvd.allreduce_async(given(rank, number))),
        lambda rank, ranks, number: _all(ranks, number).mean(0),
    ),
    "named": Operation(
        lambda hvd, rank, number: _handle(
            hvd, hvd.allreduce_async(given(rank, number), name=f"torment.{number}", op=hvd.Sum)
        ),
        lambda rank, ranks, number: _all(ranks, number).sum(0),
    ),
    "allgather": Operation(
        lambda hvd, rank, number: _handle(hvd, hvd.allgather_async(given(rank, number, rank + 1))),
        lambda rank, ranks, number: torch.cat([given(each, number, each + 1) for each in range(ranks)]),
    ),
    "broadcast": Operation(
        lambda hvd, rank, number: _handle(hvd, hvd.broadcast_async(given(rank, number), hvd.size() - 1)),
        lambda rank, ranks, number: given(ranks - 1, number),
    ),
    "reducescatter": Operation(
        lambda hvd, rank, number: _handle(hvd, hvd.reducescatter_async(given(rank, number, hvd.size()))),
        lambda rank, ranks, number: torch.stack([given(each, number, ranks) for each in range(ranks)]).mean(0)[
            rank : rank + 1
        ],
    ),
    "object": Operation(_object, lambda rank, ranks, number: given(0, number)),
}


# ── The replica ──────────────────────────────────────────────────────────────────────────────────────────────────────

WIDTH, ROWS, WORDS = 8, 2, 7
SCALE = 4.0
"""Loss scale of scripts that emulate mixed precision."""
WIDE = 560  # two weights of 560 * 8 * 8 bytes exceed the smallest unit

Optimizer = torch.optim.Optimizer


class Across(Optimizer):
    """Momentum with values of the whole group: the norm of all gradients, a trust ratio, and a step count.

    As in optimizers for large batches, a step of some parameters alone has other results.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch's overloads
        """Run one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = float(sum(float(grad.double().square().sum()) for grad in grads)) ** 0.5
        for group in self.param_groups:
            group["steps"] += 1
            size = float(sum(float(param.double().square().sum()) for param in group["params"])) ** 0.5
            rate = group["lr"] * (1.0 + size) / (2.0 + size) / group["steps"] ** 0.5
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.mul_(0.9).add_(param.grad, alpha=1.0 / (0.5 + norm))
                    param.add_(moment, alpha=-rate)
        return loss


Values = dict[str, np.ndarray | None]

RULES: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    # A large eps, so that values that are zero except for rounding stay small.
    "adam": lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-2),
    "fused_adam": lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-2, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-2, weight_decay=0.2, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-2, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.02, eps=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05, t0=2),
    "across": Across,
    "sparse_adam": lambda params: torch.optim.SparseAdam(params, lr=0.02, eps=1e-2),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=2),
    "lbfgs_search": lambda params: torch.optim.LBFGS(params, max_iter=3, history_size=2, line_search_fn="strong_wolfe"),
}
LOSSY: dict[str, Callable[[Any], Any]] = {
    "int8": lambda compression: compression.int8,
    "fp8": lambda compression: compression.fp8,
    "topk": lambda compression: compression.topk(0.1),
    "powersgd": lambda compression: compression.powersgd(2),
}
"""Lossy codecs of `hvd.Compression`. Ranks apply different values than the reference, but equal ones."""


class Failed(Exception):
    """Exception of a backward pass that is meant to fail."""


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Failed


def _slope_of(x: torch.Tensor) -> torch.Tensor:
    """Return a gradient that a backward pass within another one computes, of a leaf of its own."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        torch.tanh(leaf).square().sum().backward()
    assert leaf.grad is not None
    return 0.1 * leaf.grad


class _Nests(torch.autograd.Function):
    """The identity. Its backward pass runs another backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] + _slope_of(*ctx.saved_tensors)


def _nests_in_hook(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x = x.clone()
        kept = x.detach()
        x.register_hook(lambda gradient: gradient + _slope_of(kept))
    return x


def _fails_in_hook(x: torch.Tensor) -> torch.Tensor:
    """Register a hook whose backward pass raises an exception, which the hook catches."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        try:
            with torch.enable_grad():
                _Fails.apply(kept.clone().requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]  # torch's
        except Failed:
            return gradient + 0.1
        raise AssertionError("the inner pass has not failed")

    if x.requires_grad:
        x = x.clone()
        kept = x.detach()
        x.register_hook(hook)
    return x


NESTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "function": lambda x: _Nests.apply(x),  # type: ignore[no-untyped-call]  # torch's
    "hook": _nests_in_hook,
    "caught": _fails_in_hook,
}
"""Functions of an activation that start and end a backward pass within the loss's backward pass."""


class _Block(nn.Module):
    """One block: adds a term to its input of shape `(ROWS, WIDTH)`, given two words per row, `(ROWS, 2)`."""

    def __init__(self, kind: BlockKind) -> None:
        super().__init__()
        self.kind = kind
        match kind:
            case BlockKind.LINEAR | BlockKind.SINGLE:
                dtype = torch.float32 if kind is BlockKind.SINGLE else torch.float64
                self.weight = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH, dtype=dtype))
                self.bias = nn.Parameter(0.1 * torch.randn(WIDTH, dtype=dtype))
            case BlockKind.WIDE:
                self.up = nn.Linear(WIDTH, WIDE, bias=False, dtype=torch.float64)
                self.down = nn.Linear(WIDE, WIDTH, bias=False, dtype=torch.float64)
            case BlockKind.CONVOLUTION:
                self.conv = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
            case BlockKind.NORM:
                self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
            case BlockKind.TRANSPOSED:
                self.weight = nn.Parameter((0.4 * torch.randn(WIDTH, WIDTH, dtype=torch.float64)).t())
            case BlockKind.SMALL:
                self.gain = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
                self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
            case BlockKind.TIED:
                self.first = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
                self.second = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
                self.second.weight = self.first.weight
            case BlockKind.EMBEDDING | BlockKind.SPARSE:
                self.table = nn.Embedding(WORDS, WIDTH, sparse=kind is BlockKind.SPARSE, dtype=torch.float64)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case BlockKind.LINEAR | BlockKind.SINGLE:
                return x + torch.tanh(x.to(self.weight.dtype) @ self.weight + self.bias).to(x.dtype)
            case BlockKind.WIDE:
                return x + self.down(torch.tanh(self.up(x)))
            case BlockKind.CONVOLUTION:
                return x + torch.tanh(self.conv(x.reshape(-1, 2, 2, 2))).reshape(-1, WIDTH)
            case BlockKind.NORM:
                return self.norm(x)
            case BlockKind.TRANSPOSED:
                return x + 0.5 * functional.linear(x, self.weight)
            case BlockKind.SMALL:
                return x * self.gain + self.nothing.sum()
            case BlockKind.TIED:
                return x + torch.tanh(self.second(torch.tanh(self.first(x))))
            case BlockKind.EMBEDDING | BlockKind.SPARSE:
                return x + self.table(words).sum(1).to(x.dtype)


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Sequence[nn.Parameter]], None]:
    """Return a function that applies `p.grad = change(p.grad)` to each parameter."""

    def edit(params: Sequence[nn.Parameter]) -> None:
        for param in params:
            assert param.grad is not None
            param.grad = change(param.grad)

    return edit


def _in_place(change: Callable[[torch.Tensor], object]) -> Callable[[Sequence[nn.Parameter]], None]:
    def edit(params: Sequence[nn.Parameter]) -> None:
        with torch.no_grad():
            for param in params:
                assert param.grad is not None
                change(param.grad)

    return edit


def _null(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


EDITS: dict[str, Callable[[Sequence[nn.Parameter]], object]] = {
    "null": _null,
    "replace": _each(lambda grad: grad.clamp(-0.01, 0.01)),
    "clone": _each(torch.clone),
    "scale": _in_place(lambda grad: grad.mul_(0.5)),
    "clamp": _in_place(lambda grad: grad.clamp_(-0.02, 0.02)),
    "noise": _in_place(lambda grad: grad.add_(0.01)),
    "data": _in_place(lambda grad: grad.data.mul_(0.7)),
    "zero": _in_place(lambda grad: grad.zero_()),
    "clip_norm": lambda params: nn.utils.clip_grad_norm_(params, 0.05),
    "clip_norm_foreach": lambda params: nn.utils.clip_grad_norm_(params, 0.05, foreach=True),
    "clip_value": lambda params: nn.utils.clip_grad_value_(params, 0.02),
    "unscale": _in_place(lambda grad: grad.mul_(1 / SCALE)),
}
IN_PLACE = ("scale", "clamp", "noise", "zero", "clip_norm", "clip_norm_foreach", "clip_value")
"""Edits that write to a gradient in place."""


HOOK_EDITS = ("replace", "clone", "scale", "clamp", "data", "zero", "null")
"""Edits of one local gradient that hooks make."""

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "clamp": lambda gradient: gradient.clamp(-0.5, 0.5),
    "scale": lambda gradient: gradient * 0.5,
    "watch": lambda gradient: None,
    "zero": torch.zeros_like,
}
"""Changes of a gradient by hooks on tensors and modules."""


def _accumulated(how: str, param: torch.Tensor) -> None:
    if param.grad is not None:  # otherwise another hook has set it to None
        EDITS[how]([param])  # type: ignore[list-item]  # it is a parameter


def _tensor_hook(how: str, gradient: torch.Tensor) -> torch.Tensor | None:
    return CHANGES[how](gradient)


def _module_hook(how: str, _: nn.Module, gradients: Sequence[torch.Tensor | None], *outputs: object) -> Any:
    changed = tuple(CHANGES[how](each) if each is not None and each.is_floating_point() else each for each in gradients)
    return None if how == "watch" else changed


# ── Defaults and modes of the process ────────────────────────────────────────────────────────────────────────────────


class _CountsFunctions(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        self.count += 1
        return func(*args, **(kwargs or {}))


class _CountsOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: _device("meta"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic": _deterministic,
    "functions": _CountsFunctions,
    "operators": _CountsOperators,
}
DTYPES = {"bfloat16", "float64"}
"""Keys of `DEFAULTS` that are default dtypes."""
CALLS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
"""Modes that are active only while a script calls `step()`, `synchronize()` and eager operations."""


def entered(names: Iterable[str], modes: Mapping[str, Callable[[], AbstractContextManager[object]]]) -> ExitStack:
    """Enter the modes with the given names."""
    stack = ExitStack()
    for name in names:
        if name in modes:
            stack.enter_context(modes[name]())
    return stack


def _swap_data(model: nn.Module) -> object:
    for param in model.parameters():
        param.data = param.data.clone()
    return None


def _swap_strides(model: nn.Module) -> object:
    for param in model.parameters():
        if param.dim() == 2:
            param.data = param.data.t().contiguous().t()
    return None


def _make_flat(model: nn.Module) -> object:
    """Make all parameters of a dtype views of one buffer, as flattened optimizers do."""
    for dtype in {param.dtype for param in model.parameters()}:
        params = [param for param in model.parameters() if param.dtype == dtype]
        flat = torch.cat([param.detach().reshape(-1) for param in params])
        for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.data = part.view(param.shape)
    return None


KEEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda grad: grad,
    "detached": torch.Tensor.detach,
    "data": lambda grad: grad.data,
    "part": lambda grad: grad[:1] if grad.dim() else grad,
    "copy": torch.clone,
}
"""Ways in which a script keeps a gradient."""


def _averaged(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return averaged weights, as computed by weight averaging."""
    average = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        average[name].lerp_(param.data, 0.5)
    return average


def _written(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return dict(torch.load(file, map_location="cpu", weights_only=False).named_parameters())


READERS: dict[str, Callable[[nn.Module], Mapping[str, torch.Tensor]]] = {
    "state_dict": lambda model: dict(model.state_dict()),
    "deepcopy": lambda model: dict(copy.deepcopy(model).named_parameters()),
    "vector": lambda model: {"vector": nn.utils.parameters_to_vector(model.parameters())},
    "average": _averaged,
    "norm": lambda model: {"norms": torch.stack([param.double().norm() for param in model.parameters()])},
    "written": _written,
}
"""Reads of parameters outside of modules' forward passes."""


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "double": nn.Module.double,
    "float": nn.Module.float,
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "contiguous": lambda model: model.to(memory_format=torch.contiguous_format),
    "data": _swap_data,
    "strides": _swap_strides,
    "flat": _make_flat,
}


class Replica:
    """One rank's model in float64, initially equal on all ranks."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        with torch.random.fork_rng(), torch.device("cpu"):
            torch.manual_seed(1)
            self.blocks = nn.ModuleList(_Block(kind) for kind in program.blocks)
        self.parameters = dict(self.blocks.named_parameters())
        self._hooks: list[tuple[Hook, str, RemovableHandle]] = []  # hook, parameter, and handle
        for hook in program.hooks:
            self.hook(hook)
        for name in program.frozen:
            self.parameters[name].requires_grad_(False)
        self.retained: torch.Tensor | None = None
        self.kept: list[tuple[str, torch.Tensor]] = []
        self._saved: bytes | None = None
        self._compiled: dict[object, Callable[..., Any]] = {}
        self._last_compiled: Backward | None = None

    def select(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Return parameters by name."""
        return [self.parameters[name] for name in names]

    def optimizer(self, spec: OptimizerSpec) -> Optimizer:
        """Return a new plain optimizer."""
        return RULES[spec.rule](self.select(spec.parameters))

    # ── forward ──────────────────────────────────────────────────────────────────────────────────────────────────

    def loss(
        self, action: Backward, number: int, *, plain: bool = False, model: Callable[..., torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the loss of this rank's share of batch `number`.

        Args:
            action: the backward pass.
            number: number of the batch.
            plain: without checkpointing, compilation and failures.
            model: called instead of `output`.
        """
        if action.again:
            if self.retained is None:
                raise RuntimeError("no loss was retained")
            return self.retained
        first, words = self._batch(number)
        loss_of = self._loss_of
        if action.compiled == "loss" and not plain:
            loss_of = self._compile("loss", self._loss_of)
        loss = loss_of(action, first, words, plain, self._model_for(action, model, plain=plain))
        if action.penalty:
            (slope,) = torch.autograd.grad(loss, first, create_graph=True)
            loss = loss + slope.square().sum()
        if action.slopes:
            params = [param for name, param in self._dense(action.inputs) if param.requires_grad]
            slopes = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True) if params else ()
            loss = loss + sum(slope.square().sum().to(loss.dtype) for slope in slopes if slope is not None)
        loss = loss * action.scale
        self.retained = loss if action.retain else None
        return loss

    def backward(self, action: Backward, number: int, model: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """Run a forward and a backward pass on batch `number`, as a script does. Return the loss."""
        if action.compiled and action != self._last_compiled:
            # PyTorch (2.13) does not always recompile if only attributes of `action` differ.
            torch.compiler.reset()
            self._last_compiled = action
        inputs = [param for param in self.select(action.inputs) if param.requires_grad] or None
        if action.compiled != "step":
            loss = self.loss(action, number, model=model)
            loss.backward(retain_graph=action.retain, inputs=inputs)
            return loss

        def step(first: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            loss = self._loss_of(action, first, words, False, model) * action.scale
            loss.backward(inputs=inputs)
            return loss.detach()

        self.retained = None
        found: torch.Tensor = self._compile(("step", action), step)(*self._batch(number))
        return found

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(7919 * number + self.rank)
        dtype = next((param.dtype for param in self.parameters.values()), torch.float64)
        with torch.device("cpu"):
            first = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            return first, torch.randint(0, WORDS, (ROWS, 2), generator=generator)

    def _model_for(
        self, action: Backward, model: Callable[..., torch.Tensor] | None, *, plain: bool
    ) -> Callable[..., torch.Tensor] | None:
        if action.compiled == "model" and not plain:
            return self._compile("model", self.output if model is None else model)
        return model

    def _loss_of(
        self,
        action: Backward,
        first: torch.Tensor,
        words: torch.Tensor,
        plain: bool,
        model: Callable[..., torch.Tensor] | None,
    ) -> torch.Tensor:
        forward = self.output if model is None else model  # not `or`: a compiled model has no truth value
        return forward(action, first, words, plain=plain).square().mean()

    def output(self, action: Backward, first: torch.Tensor, words: torch.Tensor, *, plain: bool) -> torch.Tensor:
        """Return the output of the blocks for a batch."""
        left_out = action.skipped if self.rank in action.on or not action.on else ()
        x = first
        for place, block in enumerate(self.blocks):
            if place == action.fails_at and not plain:
                x = _Fails.apply(x)  # type: ignore[no-untyped-call]  # torch's
            if action.nested and place == len(self.blocks) // 2:
                x = NESTED[action.nested](x)
            if place in left_out:
                continue
            run = self._compile(place, block) if action.compiled == "blocks" and not plain else block
            if action.checkpoint and not plain:
                x = checkpoint(run, x, words, use_reentrant=action.checkpoint == "reentrant")
            else:
                x = run(x, words)
        return x

    def _compile(self, key: object, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._compiled:
            torch.compiler.reset()  # because PyTorch limits the number of recompilations
        if key not in self._compiled:
            self._compiled[key] = torch.compile(function, backend=self.program.backend)
        return self._compiled[key]

    def compiled_step(self, optimizer: Optimizer) -> None:
        """Call the compiled `step` of an optimizer."""
        self._compile(("optimizer", id(optimizer)), optimizer.step)()

    def forget_compiled_step(self, optimizer: Optimizer) -> None:
        """Release the compiled step of an optimizer that is replaced."""
        self._compiled.pop(("optimizer", id(optimizer)), None)

    # ── hooks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def hook(self, action: Hook) -> None:
        """Register a hook on parameters that require a gradient, or on their blocks."""
        if action.on and self.rank not in action.on:
            return
        hooked: set[str] = set()
        for name in action.parameters:
            param, block = self.parameters[name], name.split(".")[0]
            module = self.blocks[int(block)]
            if action.at.startswith("module"):
                if block in hooked:
                    continue
                change = partial(_module_hook, action.how)
                pre = action.at == "module_pre"
                handle = (module.register_full_backward_pre_hook if pre else module.register_full_backward_hook)(change)
                hooked.add(block)
            elif not param.requires_grad:
                continue
            elif action.at == "tensor":
                handle = param.register_hook(partial(_tensor_hook, action.how))
            else:
                handle = param.register_post_accumulate_grad_hook(partial(_accumulated, action.how))
            self._hooks.append((action, name, handle))

    def unhook(self, names: Iterable[str]) -> None:
        """Remove the hooks on these parameters, and on the blocks whose hook was registered for them."""
        gone = [each for each in self._hooks if each[1] in names]
        self._hooks = [each for each in self._hooks if each[1] not in names]
        for _, _, handle in gone:
            handle.remove()

    def accumulated(self, name: str) -> None:
        """Call the user's post-accumulate hooks of a parameter, where autograd does not."""
        for action, hooked, _ in self._hooks:
            if hooked == name and action.at == "accumulated":
                _accumulated(action.how, self.parameters[name])

    @property
    def hooks_modules(self) -> bool:
        """Return whether modules have hooks."""
        return any(action.at.startswith("module") for action, _, _ in self._hooks)

    def _dense(self, names: Sequence[str] = ()) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters, or those with the given names, that have dense gradients."""
        return [
            (name, self.parameters[name])
            for name in names or self.parameters
            if self.program.kind_of(name) is not BlockKind.SPARSE
        ]

    def compute_aside(self, action: Aside, number: int, model: Callable[..., torch.Tensor] | None = None) -> Values:
        """Return the loss of batch `number`, and its gradients by `torch.autograd.grad`. Nothing is accumulated."""
        retained = self.retained
        loss = self.loss(Backward(), number, model=model)
        self.retained = retained
        if action.forward:
            return {"loss": _array(loss)}
        wanted = [(name, param) for name, param in self._dense() if param.requires_grad]
        grads = torch.autograd.grad(loss, [param for _, param in wanted], allow_unused=True) if wanted else ()
        return {name: None if grad is None else _array(grad) for (name, _), grad in zip(wanted, grads, strict=True)}

    # ── what is done between passes ──────────────────────────────────────────────────────────────────────────────

    def edit(self, action: Edit) -> None:
        """Change gradients that are not None, if the action applies to this rank."""
        params = [param for param in self.select(action.parameters) if param.grad is not None]
        if params and (self.rank in action.on or not action.on):
            EDITS[action.how](params)

    def keeps(self, names: Sequence[str], how: str) -> list[tuple[str, torch.Tensor]]:
        """Keep dense gradients of parameters, and return them."""
        return [(name, KEEPS[how](param.grad)) for name, param in self._dense(names) if param.grad is not None]

    def recall(self) -> Values:
        """Return the kept gradients, which only the script may change."""
        return {f"{number}: {name}": _array(kept) for number, (name, kept) in enumerate(self.kept)}

    def read(self, how: str) -> Values:
        """Return parameters, read outside of their modules."""
        return {name: _array(value) for name, value in READERS[how](self.blocks).items()}

    def require_grad(self, action: RequireGrad) -> None:
        """Freeze or unfreeze parameters."""
        for param in self.select(action.parameters):
            param.requires_grad_(action.wanted)

    def convert(self, action: Convert) -> None:
        """Change dtype, memory format or storage of all parameters."""
        CONVERSIONS[action.to](self.blocks)

    def nudge(self) -> None:
        """Clamp all parameters in place."""
        with torch.no_grad():
            for param in self.parameters.values():
                param.clamp_(-0.35, 0.35)

    def save(self, optimizers: Sequence[Optimizer]) -> None:
        """Save the states of model and optimizers."""
        file = io.BytesIO()
        torch.save([self.blocks.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)], file)
        self._saved = file.getvalue()

    def load(self, optimizers: Sequence[Optimizer]) -> None:
        """Load the saved states."""
        assert self._saved is not None
        model, *states = torch.load(io.BytesIO(self._saved), map_location="cpu", weights_only=True)
        self.blocks.load_state_dict(model)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    # ── what is compared ─────────────────────────────────────────────────────────────────────────────────────────

    def values(self, names: Iterable[str]) -> Values:
        """Return parameters as float64 arrays."""
        return {name: _array(self.parameters[name]) for name in names}

    def gradients(self, names: Iterable[str]) -> Values:
        """Return gradients as dense float64 arrays; None for missing ones."""
        found: Mapping[str, torch.Tensor | None] = {name: self.parameters[name].grad for name in names}
        return {f"{name}.grad": None if grad is None else _array(grad) for name, grad in found.items()}


def _array(tensor: torch.Tensor) -> np.ndarray:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.to(torch.float64).clone(memory_format=torch.contiguous_format).numpy()
