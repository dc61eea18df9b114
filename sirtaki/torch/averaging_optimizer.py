"""An optimizer that has its gradients averaged over ranks before it updates anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sirtaki.engine import job
from sirtaki.engine.optimizer_gradients import CLOSED, OptimizerGradients
from sirtaki.errors import NotInitializedError

from .derived_class import Distributed, plain_copy
from .gradient_recipe import GradientRecipe
from .lasting_optimizers import require_attached
from .mpi_ops import allreduce

UNSKIPPED = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
RACE = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


class AveragingOptimizer(Distributed):
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

    def finish(self) -> None:
        """Blocks until all parameters are what the last `step()` makes of them; not collective.

        They are when it returns, but with `overlap_forward=True`: needed then before parameters are read by what
        neither Python nor PyTorch's dispatcher sees.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's, which stays the same as this one: a scheduler may hold it."""
        super().load_state_dict(state_dict)
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_copy(self, type(self._wrapped))
