"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks while they are computed."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sirtaki.autotune.arms.base import Arm
from sirtaki.engine import job
from sirtaki.engine.optimizer_gradients import CLOSED, OptimizerGradients
from sirtaki.engine.warmup import NO_LOG
from sirtaki.errors import ConfigError, NotInitializedError

from .adasum_optimizer import wrap_adasum
from .compression import Compression, Compressor, NoneCompressor, _CastCompressor
from .derived_class import Distributed, derive, plain_copy, require_plain
from .gradient_recipe import GradientRecipe
from .lasting_optimizers import keep, require_attached
from .mpi_ops import Adasum, Average, Sum, allreduce
from .process_sets import ProcessSet, global_process_set

logger = logging.getLogger(__name__)

NamedParameters = Iterable[tuple[str, torch.Tensor]]

UNSKIPPED = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
RACE = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


class _Distributed(Distributed):
    """What is mixed into the class of the wrapped optimizer.

    Attributes:
        _recipe: what the user has asked for.
        _gradients: keeps the gradients equal; None where there is nobody to be equal to.
        _parameter_names: of each parameter, the name in messages; scripts written for Horovod read it.
    """

    _recipe: GradientRecipe
    _gradients: OptimizerGradients | None
    _parameter_names: dict[torch.Tensor, str]
    _synchronized: bool
    _should_synchronize: bool

    def _begin(self, recipe: GradientRecipe) -> None:
        self._recipe, self._gradients = recipe, None
        self._parameter_names = {param: name for name, param in recipe.named}
        self._synchronized, self._should_synchronize = False, True

    @property
    def _signature(self) -> str:
        return self._recipe.signature

    def _attach(self, current: job.Job) -> None:
        self._gradients = self._recipe.make(current)
        self._detached = ""

    def _detach(self, why: str) -> None:
        super()._detach(why)
        self._gradients, self._synchronized = None, False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, gradients are reduced after `passes` backward passes.

        Raises:
            ValueError: `passes` is not positive.
        """
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._recipe.passes = passes
        if self._gradients is not None:
            self._gradients.set_passes(passes)

    def synchronize(self) -> None:
        """Collective: blocks until all gradients are reduced; afterwards `.grad` holds the result."""
        self._require_open()
        if self._gradients is not None:
            self._gradients.finish()
            if isinstance(self, torch.optim.SparseAdam):
                self._make_sparse()
        self._synchronized = True

    @torch.no_grad()
    def _make_sparse(self) -> None:
        """For an optimizer that takes sparse gradients only: those that travelled dense."""
        for param in self._parameter_names:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)

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

        Raises:
            NotInitializedError: `close` or `shutdown` was called.
        """
        self._require_open()
        if closure is not None and self._gradients is not None and self._should_synchronize:
            closure = self._synchronised(closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(UNSKIPPED, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        # A scheduler that was made for the wrapped optimizer looks there whether a step was made.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # torch's, set by its schedulers
        return super().step(closure)

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        decides_by_loss = isinstance(self, torch.optim.LBFGS)

        def synchronised() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            if not decides_by_loss:
                return loss
            # A line search must take the same decisions on all ranks, so they must see the same loss.
            return allreduce(torch.as_tensor(loss).detach(), process_set=self._recipe.process_set)

        return synchronised

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's. Collective after a backward pass that raised, and where `step()` was left out.

        Raises:
            AssertionError: gradients are being reduced, since some did not come in the backward pass.
        """
        if self._gradients is not None:
            if self._gradients.failed:
                self._gradients.drop_failed()
            elif self._gradients.complete:
                self._gradients.finish()  # its step was left out
            elif self._gradients.pending:
                raise AssertionError(RACE)
            self._gradients.drop_accumulated()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective: as the wrapped optimizer's; the new parameters' gradients are reduced, too."""
        self._require_open()
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        added = [(f"group.{number}.{index}", param) for index, param in enumerate(self.param_groups[-1]["params"])]
        self._parameter_names |= {param: name for name, param in added}
        self._recipe.named = [*self._recipe.named, *added]
        if self._gradients is not None:
            self._gradients.extend(added)

    def close(self) -> None:
        """Ends this optimizer: its gradients are not reduced any more, and what that took is released. Idempotent.

        Happens by itself when the last reference to the optimizer is dropped. Not collective; parameters that another
        DistributedOptimizer has, too, go on being reduced for that one.
        """
        self._closed = True
        if self._gradients is not None:
            self._gradients.close()

    def _require_open(self) -> None:
        if self._closed:
            raise NotInitializedError(CLOSED.format(reason="by close()"))
        require_attached(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's, which stays the same as this one: a scheduler may hold it."""
        super().load_state_dict(state_dict)
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_copy(self, type(self._wrapped))


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    arms: Sequence[Arm] | None = None,
) -> torch.optim.Optimizer:
    """Collective: an optimizer of a class derived from `optimizer`'s that reduces gradients over all ranks.

    Args:
        optimizer: the optimizer to wrap; its parameter groups and state are shared.
        named_parameters: names for messages; the same on all ranks.
        compression: how gradients travel.
        backward_passes_per_step: backward passes whose gradients are added up before they are reduced.
        op: Average or Sum of the gradients, or Adasum of the updates.
        gradient_predivide_factor: divides before the sum and multiplies after it, with Average only.
        num_groups: deprecated, use `groups`.
        groups: parameters that are reduced together, or into how many even groups to divide all; None = as tuned.
        sparse_as_dense: sparse gradients travel dense, and stay so unless the optimizer takes sparse ones only.
        process_set: the ranks that train together; on others nothing is reduced.
        arms: search techniques to tune with, instead of the usual ones.

    Raises:
        ValueError: an argument is invalid, the optimizer is a distributed one already, or (on all ranks) one of its
            parameters belongs to another distributed optimizer with other options.
        MismatchError: on all ranks, if their models differ.
    """
    require_plain(optimizer)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer takes op=Average, op=Sum or op=Adasum, not {op!r}")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    named = _named_parameters(optimizer, named_parameters)
    divided = _divide(groups, [param for _, param in named if param.requires_grad])
    current = job.current()
    if op == Adasum and (current.control.size > 1 or current.elastic is not None):
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        logger.info("Adasum is not tuned%s", NO_LOG if current.settings.trial_log else "")
        combining = wrap_adasum(optimizer, named, compression=compression)
        keep(combining, current)
        return combining
    recipe = GradientRecipe(
        named=named,
        wire_dtype=_wire_dtypes(compression),
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=divided,
        arms=arms,
        process_set=process_set,
    )
    distributed: _Distributed = derive(_Distributed, optimizer)
    distributed._begin(recipe)
    keep(distributed, current)
    return distributed


def _divide(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, params: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """The groups that `groups=` means.

    Raises:
        ValueError: neither a number that is not negative nor lists of parameters.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and groups > 0:
        count = min(groups, len(params))
        bounds = [len(params) * number // count for number in range(count + 1)] if count else [0]
        return [params[start:stop] for start, stop in itertools.pairwise(bounds)]
    if isinstance(groups, int | str) or not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    lists = [list(group) for group in groups]
    members = [param for group in lists for param in group]
    if not all(isinstance(param, torch.Tensor) for param in members):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(param) for param in members}) != len(members):
        raise ValueError("A parameter can only appear once in groups.")
    return lists


def _named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> list[tuple[str, torch.Tensor]]:
    """Every parameter of the optimizer with a name.

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
    return [(name_of[id(param)], param) for param in params]


def _wire_dtypes(compression: type[Compressor]) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    if issubclass(compression, NoneCompressor):
        return ()
    if not issubclass(compression, _CastCompressor):
        raise ConfigError(f"compression= takes Compression.none, .fp16 or .bf16, not {compression!r}")
    # Of all parameters that there are or may be, so that optimizers of one compression agree on those that they share.
    return tuple((dtype, compression.wire) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64))
