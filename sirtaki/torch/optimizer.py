"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks while they are computed."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sirtaki.autotune.arms.base import Arm
from sirtaki.comm.synchroniser import Reduction
from sirtaki.comm.watchdog import Wait
from sirtaki.errors import ConfigError

from . import runtime
from .compression import Compression, Compressor, NoneCompressor, _CastCompressor
from .mpi_ops import Adasum, Average, Sum, allreduce
from .tuning import TunedSynchroniser

NamedParameters = Iterable[tuple[str, torch.Tensor]]


class _Distributed(torch.optim.Optimizer):
    """What is mixed into the class of the wrapped optimizer."""

    _sync: TunedSynchroniser | None
    _passes_left: list[int]
    _passes_per_step: int
    _synchronized: bool
    _should_synchronize: bool
    _waiting_since_s: float | None

    def _begin(
        self,
        named: list[tuple[str, torch.Tensor]],
        *,
        reduction: Reduction,
        backward_passes_per_step: int,
        sparse_as_dense: bool,
        arms: Sequence[Arm] | None,
    ) -> None:
        """Collective: takes over the gradients of these parameters."""
        self._passes_per_step = backward_passes_per_step
        self._passes_left = [backward_passes_per_step] * len(named)
        self._synchronized, self._should_synchronize = False, True
        self._waiting_since_s, self._sync = None, None
        current = runtime.current()
        if current.control.size == 1 or not named:
            return
        names = [name for name, _ in named]
        shapes = repr([(name, tuple(param.shape), str(param.dtype)) for name, param in named])
        current.control.require_equal(
            f"{len(named)} parameters with fingerprint {hashlib.sha256(shapes.encode()).hexdigest()[:12]}", "the model"
        )
        self._sync = TunedSynchroniser(current, [param for _, param in named], names, reduction=reduction, arms=arms)
        for index, (_, param) in enumerate(named):
            hook = self._make_hook(index, self._sync, sparse_as_dense)
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's
        current.watchdog.watch(self._present_wait, self._progress)
        current.closers.append(self._close)

    def _make_hook(self, index: int, sync: TunedSynchroniser, sparse_as_dense: bool) -> Callable[[torch.Tensor], None]:
        ready = sync.ready

        def hook(param: torch.Tensor) -> None:
            passes_left = self._passes_left  # replaced by each synchronize()
            left = passes_left[index]
            if left == 1:
                passes_left[index] = 0
                if sparse_as_dense and param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()
                ready(index)
            elif left > 1:
                passes_left[index] = left - 1
            else:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally."
                )

        return hook

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, gradients are reduced after `passes` backward passes."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._passes_per_step = passes
        self._passes_left = [passes] * len(self._passes_left)

    def synchronize(self) -> None:
        """Collective: blocks until all gradients are reduced; afterwards `.grad` holds the result."""
        if self._sync is not None:
            self._waiting_since_s = time.monotonic()
            try:
                self._sync.finish()
            finally:
                self._waiting_since_s = None
        self._passes_left = [self._passes_per_step] * len(self._passes_left)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step()` inside does not synchronise, because `synchronize()` has been called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # Any: as torch
        """Collective: synchronises (unless skipped) and updates the parameters.

        With a closure, gradients are synchronised after each call of it.
        """
        if closure is not None and self._sync is not None and self._should_synchronize:
            closure = self._synchronised(closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        decides_by_loss = isinstance(self, torch.optim.LBFGS)

        def synchronised() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            # A line search must take the same decisions on all ranks, so they must see the same loss.
            return allreduce(loss.detach()) if decides_by_loss else loss

        return synchronised

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's.

        Raises:
            AssertionError: gradients are being reduced.
        """
        if self._sync is not None and self._sync.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def _present_wait(self) -> Wait | None:
        since_s, sync = self._waiting_since_s, self._sync
        if since_s is None or sync is None:
            return None
        return Wait(what=f"the gradients of iteration {sync.iteration}", since_s=since_s)

    def _progress(self) -> str:
        """For the other ranks' watchdogs: how far this rank is."""
        if self._sync is None:
            return ""
        missing = self._sync.missing_names()
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return f"is in iteration {self._sync.iteration}" + (f", has not computed {shown}" if missing else "")

    def _close(self) -> None:
        if self._sync is not None:
            runtime_now = self._sync.runtime
            runtime_now.watchdog.forget(self._present_wait, self._progress)
            self._sync.close()
            self._sync = None


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    arms: Sequence[Arm] | None = None,
) -> torch.optim.Optimizer:
    """Collective: an optimizer of a class derived from `optimizer`'s that reduces gradients over all ranks.

    Args:
        optimizer: the optimizer to wrap; its parameter groups and state are shared.
        named_parameters: names for messages; the same on all ranks.
        compression: how gradients travel.
        backward_passes_per_step: backward passes whose gradients are added up before they are reduced.
        op: Average or Sum.
        gradient_predivide_factor: divides before the sum and multiplies after it, with Average only.
        sparse_as_dense: sparse gradients are made dense.
        arms: search techniques to tune with, instead of the usual ones.

    Raises:
        ValueError: an argument cannot be meant.
        MismatchError: on all ranks, if their models differ.
    """
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op == Adasum:
        raise NotImplementedError("op=Adasum is not there yet; use Average or Sum")
    if op not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer takes op=Average or op=Sum, not {op!r}")
    named = _named_parameters(optimizer, named_parameters)
    count = runtime.current().control.size
    reduction = Reduction(
        prescale=1.0 / gradient_predivide_factor,
        postscale=gradient_predivide_factor / count if op == Average else 1.0,
        wire_dtype=_wire_dtypes(compression, {param.dtype for _, param in named}),
    )
    base = type(optimizer)
    distributed: _Distributed = object.__new__(type(base.__name__, (_Distributed, base), {}))
    # A learning rate scheduler patches `step` of the instance that it was given; ours must not be hidden by it.
    distributed.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed._begin(
        named,
        reduction=reduction,
        backward_passes_per_step=backward_passes_per_step,
        sparse_as_dense=sparse_as_dense,
        arms=arms,
    )
    return distributed


def _named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> list[tuple[str, torch.Tensor]]:
    """Every parameter of the optimizer that wants a gradient, with a name.

    Raises:
        ValueError: as Horovod: no pairs, a name twice, a parameter without a name.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    given = [] if named_parameters is None else list(named_parameters)
    if not all(isinstance(item, tuple) for item in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in given]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    if not given:
        given = [(f"parameter.{number}", param) for number, param in enumerate(params)]
    name_of = {id(param): name for name, param in given}
    unnamed = [param for param in params if id(param) not in name_of]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {len(unnamed)} model parameters were not named. "
            "Python list of all parameters must be passed, including frozen ones."
        )
    return [(name_of[id(param)], param) for param in params if param.requires_grad]


def _wire_dtypes(
    compression: type[Compressor], dtypes: set[torch.dtype]
) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    if issubclass(compression, NoneCompressor):
        return ()
    if not issubclass(compression, _CastCompressor):
        raise ConfigError(f"compression= takes Compression.none, .fp16 or .bf16, not {compression!r}")
    return tuple((dtype, compression.wire) for dtype in sorted(dtypes, key=str) if dtype.is_floating_point)
