"""`DistributedOptimizer`: a wrapper of the user's optimizer that reduces gradients over all ranks."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from sirtaki.autotune.arms.techniques import ArmChoice
from sirtaki.autotune.sparse import SparseSummary
from sirtaki.comm.collectives.engine import GLOBAL, RankSet
from sirtaki.comm.collectives.operations import is_dtensor
from sirtaki.comm.device import refuse_capture
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.state import IterationState
from sirtaki.comm.modes import no_torch_function, without_subclasses
from sirtaki.engine import job
from sirtaki.engine.console import NO_LOG
from sirtaki.engine.reducing.gradient_hooks import ReducerOptions
from sirtaki.engine.reducing.sharing import CLOSED, OptimizerGradients, reducers_of
from sirtaki.engine.settings import Overlap
from sirtaki.engine.tuning.overlap import ForwardOverlap
from sirtaki.engine.tuning.pipeline_target import without_others
from sirtaki.engine.tuning.plans import key_of
from sirtaki.errors import CommError, ConfigError, NotInitializedError
from sirtaki.machine import finalize
from sirtaki.uncompiled import something_is_compiled

from .compression import Choice, Compression, Compressor, reduction_options
from .lasting_optimizers import Distributed, ReducedForScaler, derive, keep, require_attached, require_plain
from .mpi_ops import Adasum, Average, Max, Sum, allreduce, allreduce_async_, synchronize
from .overlap import (
    KNOWN,
    CheckedReads,
    LearnedReads,
    PartialStep,
    PutOffUpdates,
    Zeroing,
    custom_modules_hold,
    refusal,
    refusal_by_trial,
    wait_for_own,
)
from .process_sets import ProcessSet, global_process_set, require_opened

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GradientRecipe:
    """Arguments of one `DistributedOptimizer` call, from which its gradient reducers are built.

    An elastic job builds new reducers whenever the set of ranks changes.

    Attributes:
        named: names and parameters of the optimizer, including frozen parameters.
        passes: number of backward passes whose gradients are accumulated before a reduction.
        op: how gradients are combined over the ranks: Average or Sum.
        process_set: ranks whose gradients are reduced together.
        options: options of the reduction. They do not include the factor 1 / number of ranks of an average, because
            this number can change. The error-feedback residual (the compression error to add to the next gradients)
            stays when the set of ranks changes.
    """

    named: list[tuple[str, torch.Tensor]]
    passes: int
    op: int
    process_set: ProcessSet
    options: ReducerOptions

    @property
    def signature(self) -> str:
        """Return a string that identifies this optimizer by its parameters and options.

        It is equal on all ranks, so that an optimizer of one rank can be matched with the corresponding optimizer of
        another rank.
        """
        key = key_of([name for name, _ in self.named], [param for _, param in self.named])
        return f"{key}/{self.op}/{self.process_set.ranks if self.process_set is not global_process_set else 'all'}"

    def make(self, current: job.Job) -> OptimizerGradients | None:
        """Build the objects that reduce the gradients (reducers) over the ranks of the job.

        Collective over the process set.

        Returns:
            The reducers, or None if this rank is not in the process set or is its only rank.

        Raises:
            ConfigError: the process set is not open (its ranks are not connected).
            MismatchError: the models of ranks differ. Raised on all ranks.
        """
        members = self._members(current)
        if members is None:
            return None
        count = len(members.ranks)
        if count == 1:
            logger.info("%s", without_others(current.settings))
            return None
        reduction = self.options.reduction
        if self.op == Average:
            reduction = replace(reduction, postscale=reduction.postscale / count)
        options = replace(self.options, reduction=reduction)
        named = [(name, local_shard(param)) for name, param in self.named]
        return OptimizerGradients(current, members, named, passes=self.passes, options=options)

    def _members(self, current: job.Job) -> RankSet | None:
        """Return the ranks of the process set, with the connections for control messages between them. Collective.

        None if this rank is not a member.
        """
        if self.process_set is global_process_set:
            return current.rank_sets[GLOBAL]
        there = require_opened(self.process_set)
        return current.rank_sets.members(there.number) if there.engine is not None else None


RESIDUAL_KEY = "sirtaki_compression"
"""Key in a state dict for this rank's error-feedback residual: the compression error to add to the next gradients."""

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
    """Mixin that makes the user's optimizer average or sum gradients over ranks.

    `derive` creates a class from this mixin and the class of the user's optimizer.

    Attributes:
        _recipe: arguments of the `DistributedOptimizer` call, from which the reducers are built.
        _gradients: objects that reduce the gradients (reducers). None on a rank that trains alone or is outside the
            process set.
        _parameter_names: name of each parameter, for messages. Horovod has this attribute, so scripts may read it.
        _synchronized: whether `synchronize` was called since the last step.
        _should_synchronize: whether `step()` reduces the gradients. False within `skip_synchronize`.
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
        """Accumulate the gradients of `passes` backward passes before each reduction, from the next step on.

        Raises:
            ValueError: `passes` is not positive.
        """
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
        self._recipe.passes = passes
        if self._gradients is not None:
            self._gradients.set_passes(passes)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced over the ranks.

        Afterwards each `.grad` contains the reduced gradient.

        Collective.
        """
        self._require_open()
        if self._gradients is not None:
            self._gradients.finish()
            if isinstance(self, torch.optim.SparseAdam):
                self._make_sparse()
        self._synchronized = True

    @torch.no_grad()
    def _make_sparse(self) -> None:
        """Convert dense reduced gradients to sparse tensors, because SparseAdam rejects dense gradients."""
        for param in self._parameter_names:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()` inside the `with` block skip the reduction of gradients.

        Use it after a call of `synchronize()`.
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients over the ranks and update the parameters. Within `skip_synchronize`, only update.

        Collective.

        Args:
            closure: function that computes the loss and the gradients. The user's optimizer calls it. The gradients are
                reduced after each call.

        Returns:
            The result of the user's optimizer's `step`.

        Raises:
            NotInitializedError: the optimizer reduces no gradients any more, because `close` or `shutdown` was called.
        """
        self._require_open()
        if closure is not None and self._gradients is not None and self._should_synchronize:
            closure = self._synchronised(closure)
        elif self._should_synchronize and (self._reduced_for is None or self._must_reduce()):
            if self._synchronized:
                warnings.warn(UNSKIPPED, stacklevel=2)
            self.synchronize()
        self._reduced_for, self._synchronized = None, False
        # Set this attribute, because otherwise a learning rate scheduler that was created with the user's optimizer
        # warns.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # attribute of PyTorch's schedulers
        return super().step(closure)

    def _must_reduce(self) -> bool:
        """Return whether `step()` must reduce the gradients, because no `GradScaler` has done it.

        Collective if `GradScaler.update` was called since the scaler has reduced them. Other ranks may have computed
        new gradients then.
        """
        if self._gradients is None or self._reduced_for is None:
            return True
        if self._is_reduced:
            return self._begun
        gradients = [id(param.grad) for group in self.param_groups for param in group["params"]]
        new = self._begun or gradients != list(map(id, self._reduced_for.gradients))
        found = allreduce(
            torch.tensor([float(new)], dtype=torch.float32, device="cpu"), op=Max, process_set=self._recipe.process_set
        )
        return bool(found.item())

    def _reduce_for_scaler(self) -> bool:
        if self._should_synchronize:
            if not (self._is_reduced or self._synchronized) or self._begun:
                self.synchronize()
            self._synchronized = False
        return self._should_synchronize

    @property
    def _begun(self) -> bool:
        return self._gradients is not None and self._gradients.begun

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        decides_by_loss = isinstance(self, torch.optim.LBFGS)

        def synchronised() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            if not decides_by_loss:
                return loss
            # Average the loss over the ranks, so that LBFGS's line search makes the same decision on all ranks.
            if not isinstance(loss, torch.Tensor):
                loss = torch.tensor(loss, dtype=torch.float64, device="cpu")
            return allreduce(loss.detach(), process_set=self._recipe.process_set)

        return synchronised

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients.

        Collective if a reduction has begun that no `step()` has completed: the last backward pass raised an exception,
        or `step()` was omitted.

        Args:
            set_to_none: set `.grad` to None instead of to zeros.

        Raises:
            AssertionError: gradients are being reduced, and some were not ready when the backward pass ended.
        """
        if self._gradients is not None and not self._gradients.drop():
            raise AssertionError(RACE)
        self._reduced_for, self._synchronized = None, False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer, and reduce the gradients of its parameters from now on.

        Collective.
        """
        self._require_open()
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        added = [(f"group.{number}.{index}", param) for index, param in enumerate(self.param_groups[-1]["params"])]
        self._parameter_names |= {param: name for name, param in added}
        self._recipe.named = [*self._recipe.named, *added]
        if self._gradients is not None:
            self._gradients.extend([(name, local_shard(param)) for name, param in added])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer.

        With lossy compression, it includes this rank's error-feedback residual: the compression error to add to the
        next gradients.
        """
        state: dict[str, Any] = super().state_dict()
        reduction = self._recipe.options.reduction
        loses = reduction.compression is not None or reduction.feedback.residuals
        return state | {RESIDUAL_KEY: reduction.feedback.state_dict()} if loses else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the user's optimizer, and compression's error-feedback residual if there is one."""
        super().load_state_dict(state_dict)
        if RESIDUAL_KEY in state_dict:
            self._recipe.options.reduction.feedback.load_state_dict(state_dict[RESIDUAL_KEY])

    def close(self) -> None:
        """Stop reducing gradients for this optimizer, remove its hooks and free its buffers.

        May be called repeatedly. Not collective.

        Runs automatically when the last reference to the optimizer is dropped. If a parameter also belongs to another
        DistributedOptimizer, its gradient is still reduced for that optimizer.
        """
        self._closed = True
        if self._gradients is not None:
            self._gradients.close()

    def _require_open(self) -> None:
        refuse_capture("step() of a DistributedOptimizer")
        if self._closed:
            raise NotInitializedError(CLOSED.format(reason="by close()"))
        if self._detached:
            require_attached(self)

    def finish(self) -> None:
        """Wait until the updates of the last `step()` are applied to all parameters. Not collective.

        Without `overlap_forward`, `step()` applies the updates before it returns. With `overlap_forward=True`, call
        `finish()` before code outside Python and PyTorch's dispatcher reads parameters, for example a C++ extension.
        """


class _AdasumDistributed(Distributed):
    """Mixin that makes the user's optimizer combine the parameter updates of all ranks with Adasum.

    Attributes:
        _named: names and parameters of the optimizer.
        _parameter_names: name of each parameter. Horovod has this attribute, so scripts may read it.
        _compression: compression of the updates before they are sent.
        _serial: number of this optimizer, equal on all ranks. The names of its collectives contain it.
    """

    _named: Sequence[tuple[str, torch.Tensor]]
    _parameter_names: dict[torch.Tensor, str]
    _compression: type[Compressor]
    _serial: int

    @property
    def _signature(self) -> str:
        return f"adasum/{key_of([name for name, _ in self._named], [param for _, param in self._named])}"

    def _attach(self, current: job.Job) -> None:
        size = current.control.size
        if size & (size - 1):
            raise NotImplementedError(
                f"Adasum needs a number of ranks that is a power of two, not {size}; change the number of ranks, or "
                "use op=Average"
            )
        self._serial, self._detached = next(current.serials[GLOBAL]), ""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check that `passes` is positive, and otherwise ignore it: Adasum always accumulates until `step()`.

        Raises:
            ValueError: `passes` is not positive.
        """
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")

    def synchronize(self) -> None:
        """Do nothing, because Adasum reduces no gradients: `step()` combines the parameter updates of the ranks."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise an exception, because Adasum does not reduce gradients, so there is no reduction to skip.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer. Remove skip_synchronize()."
        )
        yield

    @torch.no_grad()
    def _reduce_for_scaler(self) -> bool:
        if self._is_reduced:
            return True
        # Add NaN to a gradient if any rank has an infinite gradient or NaN, so that all ranks skip the same steps.
        require_attached(self)
        grads = [param.grad for _, param in self._named if param.grad is not None]
        values = [grad._values() if grad.is_sparse else grad for grad in grads]
        zero = torch.zeros((), dtype=torch.float32, device=self._named[0][1].device)
        zero_or_nan = sum((each.mul(0).sum().float() for each in values), zero)
        everywhere = allreduce(zero_or_nan, name=f"adasum.{self._serial}.finite", op=Sum)
        for each in values[:1]:
            each.add_(everywhere.to(each))
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Compute this rank's parameter updates, combine them with those of all ranks by Adasum, and apply the result.

        Collective.
        """
        require_attached(self)
        params = [param for _, param in self._named if param.requires_grad]
        starts = [param.detach().clone() for param in params]
        loss = super().step(closure)
        with torch.no_grad():
            handles = []
            for number, (param, start) in enumerate(zip(params, starts, strict=True)):
                update, context = self._compression.compress(param - start)
                name = f"adasum.{self._serial}.{number}"
                handles.append((allreduce_async_(update, name=name, op=Adasum), context))
            for param, start, (handle, context) in zip(params, starts, handles, strict=True):
                param.copy_(start.add_(self._compression.decompress(synchronize(handle), context)))
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # attribute of PyTorch's schedulers
        return loss


def wrap_adasum(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]], *, compression: type[Compressor]
) -> Distributed:
    """Return an optimizer that combines parameter updates over ranks with Adasum.

    The class of the result derives from the class of `optimizer`.

    Args:
        optimizer: the optimizer to wrap.
        named: names and parameters of `optimizer`.
        compression: compression of the updates before they are sent.
    """
    distributed = derive(_AdasumDistributed, optimizer)
    distributed._named, distributed._compression = named, compression
    distributed._parameter_names = {param: name for name, param in named}
    return distributed


@functools.cache
def _reduce_before_unscaling() -> None:
    """Make `GradScaler` reduce the gradients of distributed optimizers before it unscales them. Called once.

    `GradScaler.unscale_`, and `step` without it, divide `.grad` by the scale and check it for infinite elements. If
    `step()` of the optimizer reduced the gradients only afterwards, unscaled gradients would be added to scaled ones,
    and each rank would decide by its own gradients whether to skip the step.
    """
    for name in ("unscale_", "step"):
        setattr(torch.amp.GradScaler, name, _after_reduction(getattr(torch.amp.GradScaler, name), ends=name == "step"))


def _after_reduction(method: Callable[..., Any], *, ends: bool) -> Callable[..., Any]:
    """Wrap a method of `GradScaler`, so that it reduces the gradients of a distributed optimizer first.

    Args:
        method: method of `GradScaler`, such as `unscale_`.
        ends: whether the method ends the optimizer's step, as `GradScaler.step` does.
    """

    @functools.wraps(method)
    def call(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        distributed = optimizer if isinstance(optimizer, Distributed) and self.is_enabled() else None
        if distributed is not None:
            if distributed._reduced_for is not None and distributed._reduced_for.scaler is not self:
                distributed._reduced_for = None
            if distributed._reduce_for_scaler():
                gradients = [param.grad for group in optimizer.param_groups for param in group["params"]]
                state = self._per_optimizer_states[id(optimizer)]
                distributed._reduced_for = ReducedForScaler(self, state, gradients)
        result = method(self, optimizer, *args, **kwargs)
        if distributed is not None and ends:
            # The scaler's step ends the iteration, even if it has skipped the optimizer's `step`.
            distributed._reduced_for = None
        return result

    return call


REFUSED = "overlap_forward cannot be used with this optimizer: {why}"
WAITED = (
    "the script reads gradients between backward() and step(), so each read waits: only gradients that are not read "
    "overlap with the next forward pass"
)
SYNCHRONIZED = (
    "synchronize() waits for all gradients, as clipping by the global norm requires: no gradient overlaps with the "
    "next forward pass"
)
TRIALS = 2
"""Number of steps in which an optimizer of an unknown class is tested on copies of its parameters.

The first step creates the optimizer's state, and the second one uses it.
"""

COMPILED = "torch.compile is in use, and its graphs read parameters without Python: step() waits for all gradients"


def _stop_watching(reference: weakref.ref[OverlappedOptimizer]) -> None:
    if (optimizer := reference()) is not None:
        optimizer._stop_watching()


class OverlappedOptimizer(AveragingOptimizer):
    """Mixin that defers updates: each parameter is updated in the next forward pass, right before it is first read.

    Attributes:
        _updates: object that stores the deferred updates. None on a rank that trains alone.
        _refuses: whether to raise an error if the optimizer does not allow deferred updates (`overlap_forward=True`).
            Otherwise updates are then not deferred.
        _refusal: reason why this optimizer does not allow deferred updates. Empty if it does. None until the first
            steps have tested it.
        _n_tried: number of steps that were tested on copies of the parameters.
        _partial: one step of the optimizer, which can be applied to some parameters at a time.
        _learning: recorder of the order in which a forward pass reads parameters. None except in the one iteration that
            records it.
        _knows_reads: whether the order of reads has been recorded.
        _modules_wait: whether modules whose class is not PyTorch's contain parameters. Then a forward pre-hook waits
            for the deferred updates of these parameters.
        _hooks: module hooks and dispatch modes, which the next step removes.
        _logged: messages that have been logged, to log each message once.
    """

    _updates: PutOffUpdates | None = None
    _refuses = False
    _refusal: str | None = None
    _n_tried = 0
    _partial: PartialStep | None = None
    _learning: LearnedReads | None = None
    _knows_reads = False
    _modules_wait = False
    _hooks: ExitStack
    _logged: set[str]

    def _begin_overlap(self, *, refuses: bool) -> None:
        """Initialise the attributes of this mixin. Called once, before `_attach`.

        Raises:
            ConfigError: the class of the optimizer does not allow deferred updates, and `refuses` is True.
        """
        self._refuses, self._hooks, self._logged = refuses, ExitStack(), set()
        finalize(self, self._hooks.close)
        if why := refusal(self, self._kind):
            self._refuse(why)

    @property
    def _kind(self) -> type[torch.optim.Optimizer]:
        return type(self._wrapped)

    def _refuse(self, why: str) -> None:
        self._refusal = why
        if self._refuses:
            raise ConfigError(REFUSED.format(why=why))
        logger.info(
            "training continues without forward overlap (communication during the next forward pass): %s",
            REFUSED.format(why=why),
        )

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.info("overlap_forward: %s", text)

    def _attach(self, current: job.Job) -> None:
        super()._attach(current)
        self._updates = None
        self.__dict__.pop("_knows_reads", None)
        if self._gradients is not None and not self._refusal:
            self._partial, this = PartialStep(self, self._kind), weakref.proxy(self)
            self._updates = PutOffUpdates(
                self._gradients,
                self._partial,
                allowed=lambda: bool(this._may_defer()),
                seen=lambda: this._log_once(WAITED),
                closed=partial(_stop_watching, weakref.ref(self)),
            )
            self._updates.use()

    def _detach(self, why: str) -> None:
        self._stop_watching()
        if self._updates is not None:
            self._updates.drop()
        super()._detach(why)

    # ── iterations that may be deferred ──────────────────────────────────────────────────────────────────────────

    @property
    def _overlap(self) -> ForwardOverlap | None:
        reducers = [] if self._gradients is None else self._gradients.reducers
        tuned = reducers[0].tuning if len(reducers) == 1 else None
        return None if tuned is None else tuned.overlap

    def _may_defer(self) -> bool:
        if not self._knows_reads or self._refusal != "" or isinstance(self, torch.optim.SparseAdam):
            return False  # SparseAdam requires sparse gradients, and only `synchronize` makes reduced gradients sparse.
        if something_is_compiled():
            self._log_once(COMPILED)
            return False
        hooks = (
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        return not (any(hooks) or scaled)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the reduced gradients. If the updates may be deferred, return at once.

        Collective.

        Raises:
            NotInitializedError: the optimizer reduces no gradients any more, because `close` or `shutdown` was called.
            ConfigError: `overlap_forward=True` with a closure, or with an optimizer whose update of one parameter
                depends on other parameters.
        """
        # Leave inference mode. A later deferred update could not write to optimizer states that are created in it.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.step(closure)
        self._stop_watching()
        if closure is not None and self._refuses:
            raise ConfigError(
                "overlap_forward cannot be used with optimizer.step(closure); call the closure before optimizer.step()"
            )
        self._require_open()
        updates = self._updates
        if updates is None or self._refusal:
            return super().step(closure)
        if updates.state is IterationState.DEFERRED:
            # The state is DEFERRED if there was no backward pass since the last step.
            updates.drain()
        plain = closure is None and self._should_synchronize and not self._synchronized and self._reduced_for is None
        if plain and updates.step():
            self._wrapped._opt_called = True  # type: ignore[attr-defined]  # attribute of PyTorch's schedulers
            self._watch_deferred()
            return None
        updates.withdraw()
        if self._refusal is None and plain:
            return self._first_step()
        result = super().step(closure)
        self._learn_reads()
        return result

    def _first_step(self) -> Any:  # The result is the loss that a closure returns, of any type.
        """Reduce the gradients and update the parameters.

        Test on copies whether updates of this optimizer can be deferred.

        Called in the first steps.
        """
        self.synchronize()
        if why := refusal_by_trial(self, self._kind):
            self._refuse(why)
        self._n_tried += 1
        if self._refusal is None and (self._n_tried == TRIALS or self._kind in KNOWN):
            self._refusal = ""
        with self.skip_synchronize():
            return super().step()

    def synchronize(self) -> None:
        """Wait until all gradients are reduced over the ranks. The next `step()` then defers no update. Collective."""
        self._stop_watching()
        if self._updates is not None:
            if self._updates.state is IterationState.LAUNCHED and self._should_synchronize:
                self._log_once(SYNCHRONIZED)
            self._updates.drain()
        super().synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients. The gradient of a parameter with a deferred update is zeroed after the update.

        Non-blocking.
        """
        updates = self._updates
        if updates is None or updates.state not in (IterationState.LAUNCHED, IterationState.DEFERRED):
            # `zero_grad` reads no parameter, so `_learning` must not record its call as a read.
            with nullcontext() if self._learning is None else without_subclasses():
                super().zero_grad(set_to_none)
        elif updates.state is IterationState.LAUNCHED:  # The state is LAUNCHED if the script has omitted `step()`.
            updates.withdraw()
            super().zero_grad(set_to_none)
        else:
            for group in self.__dict__["param_groups"]:
                for param in group["params"]:
                    if not updates.zero(param, Zeroing.NONE if set_to_none else Zeroing.ZEROS):
                        _zero(param, set_to_none)

    # ── reads of parameters ──────────────────────────────────────────────────────────────────────────────────────

    def _learn_reads(self) -> None:
        overlap = self._overlap
        if overlap is None or self._learning is not None or something_is_compiled():
            return
        # Record the order in which this iteration reads the parameters, if the tuner requests it. Also record it if the
        # tuner is ready and no order is known, because an earlier requested recording was not possible.
        if overlap.learning or (overlap.ready and not self._knows_reads):
            learning = LearnedReads(self._reduced_params())
            if learning.begin():
                self._learning = learning
                self._hooks.callback(learning.end)

    def _reduced_params(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are reduced over the ranks.

        Return an empty list if a gradient is sparse.
        """
        assert self._gradients is not None
        reducer = self._gradients.reducers[0]
        return [param for _, param in reducer.hooked] if reducer.all_dense else []

    def _watch_deferred(self) -> None:
        """Register the forward pre-hook that waits for deferred updates, if a module needs it.

        If `SIRTAKI_OVERLAP_FORWARD=check`, start to check that no parameter is read before its update.
        """
        if self._modules_wait:
            self._hooks.callback(register_module_forward_pre_hook(wait_for_own).remove)
        if job.current().settings.overlap_forward is Overlap.CHECK:
            names = {id(param): name for param, name in self._parameter_names.items()}
            checking = CheckedReads(self._reduced_params(), names)
            checking.begin()
            self._hooks.callback(checking.end)

    def _stop_watching(self) -> None:
        self._hooks.close()
        learning, self._learning = self._learning, None
        if learning is not None:
            self._use_reads(learning)

    def _use_reads(self, learning: LearnedReads) -> None:
        overlap, updates, params = self._overlap, self._updates, self._reduced_params()
        if overlap is None or updates is None:
            return
        number_of = {id(param): number for number, param in enumerate(params)}
        overlap.reads = [number_of[id(param)] for param in learning.order if id(param) in number_of]
        updates.uncovered = frozenset(learning.uncovered)
        self._modules_wait = custom_modules_hold(learning.modules, params)
        self._knows_reads = True
        if learning.uncovered:
            names = [name for param, name in self._parameter_names.items() if id(param) in learning.uncovered]
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self._log_once(f"{shown} are read without Python, so step() waits for them")

    # ── other reads and writes of deferred parameters ────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """Wait until the updates of the last `step()` are applied to all parameters. Not collective."""
        if self._updates is not None and self._updates.state is IterationState.DEFERRED:
            self._updates.drain()
            self._stop_watching()

    @property
    def state(self) -> Any:
        """Apply all deferred updates, then return the optimizer's state."""
        if self._partial is None or not self._partial.running:
            self.finish()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Apply all deferred updates, then set the number of backward passes before each reduction of gradients."""
        self.finish()
        super().set_backward_passes_per_step(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Apply all deferred updates, then add a parameter group. Collective."""
        self._stop_watching()
        self.finish()
        super().add_param_group(param_group)
        if self._updates is not None:
            self._updates.use()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Apply all deferred updates, then load the optimizer's state."""
        self.finish()
        super().load_state_dict(state_dict)

    def close(self) -> None:
        """Apply all deferred updates, or discard them if a rank is lost.

        Then stop reducing gradients for this optimizer.

        May be called repeatedly.
        """
        self._stop_watching()
        try:
            if self._updates is not None:
                self._updates.drain()
        except CommError:
            assert self._updates is not None
            self._updates.drop()
        super().close()


@torch.no_grad()
def _zero(param: torch.Tensor, set_to_none: bool) -> None:
    if param.grad is not None:
        if set_to_none:
            param.grad = None
        else:
            param.grad.detach_()
            param.grad.zero_()


NamedParameters = Iterable[tuple[str, torch.Tensor]]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: Choice = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    arms: Sequence[ArmChoice] | None = None,
    overlap_forward: bool | None = None,
) -> torch.optim.Optimizer:
    """Wrap an optimizer so that it reduces gradients over all ranks before each update. Collective.

    Args:
        optimizer: the optimizer to wrap. The result shares its parameter groups and state.
        named_parameters: names of the parameters for messages. They must be equal on all ranks.
        compression: compression of gradients on the network: a member of `Compression`, or an object with the methods
            of `sirtaki.comm.compress.Codec`.
        backward_passes_per_step: backward passes whose gradients are accumulated before they are reduced.
        op: Average or Sum of the gradients, or Adasum of the updates.
        gradient_predivide_factor: gradients are divided by this number before the sum, and multiplied by it after the
            sum. Allowed with Average only.
        num_groups: deprecated, use `groups`.
        groups: lists of parameters that are reduced together, or the number of equal groups to divide all parameters
            into. None lets the tuner decide.
        sparse_as_dense: reduce sparse gradients as dense tensors. The results stay dense, except for an optimizer that
            accepts sparse gradients only.
        process_set: ranks whose gradients are reduced together. Other ranks reduce nothing.
        arms: search methods (arms) of the tuner, which searches for the fastest setting of the communication. Each is
            an arm, the name of one, or a function of (`sirtaki.autotune.KnobSpace`, NumPy random generator) that
            creates one. Only these are used. None for the default ones.
        overlap_forward: let `step()` return at once, and update each parameter in the next forward pass before its
            first read. None uses the value of `SIRTAKI_OVERLAP_FORWARD`.

    Returns:
        An optimizer whose class derives from the class of `optimizer`.

    Raises:
        ValueError: an argument is invalid, or the optimizer is a distributed optimizer already. Raised on all ranks if
            a parameter belongs to another distributed optimizer with other options. Raised with
            `overlap_forward=True` if the update of one parameter depends on other parameters.
        NotImplementedError: Adasum with a process set, or with a number of ranks that is not a power of two.
        MismatchError: the models of ranks differ. Raised on all ranks.
    """
    require_plain(optimizer)
    _reduce_before_unscaling()
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {backward_passes_per_step}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            "gradient_predivide_factor not supported with op != Average; pass op=Average, or remove the factor"
        )
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer requires op=Average, op=Sum or op=Adasum, not {op!r}")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed; pass groups= instead",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    named = _named_parameters(optimizer, named_parameters)
    divided = _divide(groups, [param for _, param in named if param.requires_grad])
    divided = [list(map(local_shard, group)) for group in divided]
    current = job.current()
    overlaps = current.settings.overlap_forward is not Overlap.OFF if overlap_forward is None else overlap_forward
    if op == Adasum and overlap_forward:
        raise ConfigError(
            "overlap_forward cannot be used with op=Adasum, which combines updates, not gradients; remove one of "
            "the two arguments"
        )
    if op == Adasum and (current.control.size > 1 or current.elastic is not None):
        if process_set is not global_process_set:
            raise NotImplementedError(
                "Adasum does not support non-global process sets yet: it combines the updates of all ranks. Remove "
                "process_set=, or use op=Average."
            )
        if not isinstance(compression, type) or not issubclass(compression, Compressor):
            raise ConfigError(
                "op=Adasum supports only Compression.none, .fp16 and .bf16; other compressions are for gradients, not "
                "for updates"
            )
        no_log = NO_LOG if current.settings.trial_log else ""
        logger.info("Sirtaki does not tune the communication of an optimizer with op=Adasum%s", no_log)
        combining = wrap_adasum(optimizer, named, compression=compression)
        keep(combining, current)
        return combining
    predivide = gradient_predivide_factor
    reduction = Reduction(prescale=1.0 / predivide, postscale=predivide, **reduction_options(compression))
    options = ReducerOptions(
        reduction=reduction, sparse_as_dense=sparse_as_dense, groups=divided, arms=arms, overlaps=overlaps
    )
    recipe = GradientRecipe(named, backward_passes_per_step, op, process_set, options)
    distributed: AveragingOptimizer
    if overlaps:
        overlapped: OverlappedOptimizer = derive(OverlappedOptimizer, optimizer)
        overlapped._begin_overlap(refuses=bool(overlap_forward))
        distributed = overlapped
    else:
        distributed = derive(AveragingOptimizer, optimizer)
    distributed._begin(recipe)
    keep(distributed, current)
    return distributed


def _divide(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, params: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Return the lists of parameters that the argument `groups` of `DistributedOptimizer` describes.

    Raises:
        ValueError: `groups` is a negative number, or contains other objects than lists of distinct parameters.
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
        found = next(type(param).__name__ for param in members if not isinstance(param, torch.Tensor))
        raise ValueError(
            "groups must consist of torch.Tensor. Pass lists of the parameters whose gradients are reduced together, "
            f"found an object of type {found}."
        )
    if len({id(param) for param in members}) != len(members):
        raise ValueError("A parameter can only appear once in groups. Remove it from one of the lists in groups=.")
    return lists


def _named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> list[tuple[str, torch.Tensor]]:
    """Return every parameter of the optimizer with its name.

    Raises:
        ValueError: an item is no pair, a name occurs twice, or a parameter has no name.
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
            "All parameters of the optimizer must be passed, including frozen ones."
        )
    return [(name_of[id(param)], param) for param in params]


def sparse_gradients() -> list[SparseSummary]:
    """Return how each sparse gradient is reduced, for the parameters whose algorithm was chosen already.

    Not collective.

    Sirtaki chooses the algorithm after about 30 iterations, or after 8 if `SIRTAKI_SPARSE` sets it. With one rank, no
    algorithm is chosen.

    Returns:
        One summary for each parameter, equal on all ranks that train the parameter. Fields among others: `name`,
        `density` (fraction of the rows that at least one rank accesses in an iteration), `plan` (the algorithm),
        `n_bytes` (bytes that a rank receives in an iteration), `dense_bytes` and `horovod_bytes` (bytes that a rank
        would receive with a dense reduction and with Horovod's all-gather). The method `describe()` returns one line of
        text.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return [summary for reducer in reducers_of(job.current()) for summary in reducer.sparse.summaries]


# ── DTensor parameters (tensor parallelism): their local shards are reduced ──────────────────────────────────────────


class LocalShard(torch.Tensor):
    """Local shard of a DTensor parameter on this rank. It shares the memory of the DTensor.

    Reading or setting `.grad` reads or sets the local shard of the DTensor's gradient. Autograd can produce a gradient
    with other placements than the parameter, for example a partial sum. The hook of `on_leaf` redistributes such a
    gradient at once, because all ranks of the tensor-parallel dimension must redistribute it at the same point.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]
    _whole: weakref.ref[Any]  # The DTensor parameter. Its class is not imported here, because that takes time.
    _seen = (0, 0)  # Id and version counter of the DTensor's gradient when `grad` was last read or set.

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the local shard of the DTensor's gradient, or None if the DTensor has no gradient."""
        whole = self._whole()
        if whole is None or (gradient := whole.grad) is None:
            return None
        local: torch.Tensor = gradient._local_tensor
        before, self._seen = self._seen, (id(gradient), gradient._version)
        if before != self._seen and before[0] == id(gradient):
            # Increment the version counter of the local shard, because a write to the DTensor's gradient increments
            # only the counter of the DTensor.
            torch.autograd.graph.increment_version(local)
        return local

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (whole := self._whole()) is not None:
            whole.grad = None if value is None else type(whole)(value, whole._spec, requires_grad=False)
            self._seen = (id(whole.grad), 0 if whole.grad is None else whole.grad._version)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Return whether the DTensor requires a gradient now."""
        whole = self._whole()
        return whole is not None and bool(whole.requires_grad)

    def on_leaf(self, hook: Callable[[torch.Tensor], None]) -> tuple[Any, Callable[[Any], None]]:
        """Return the DTensor, and a gradient hook to register on it.

        The hook calls `hook` with this rank's shard of the gradient.
        """

        @torch.no_grad()
        # `whole` is a DTensor. Its class is not imported here, because that takes time.
        def on_gradient(whole: Any) -> None:
            if (gradient := whole.grad) is not None:
                if gradient.placements != whole.placements:
                    gradient = gradient.redistribute(placements=whole.placements)
                local = gradient._local_tensor
                if hasattr(local, "trigger_wait"):
                    # Wait for the shard, because an AsyncCollectiveTensor is still in communication.
                    local = local.trigger_wait()
                if local is not self.grad:
                    self.grad = local
            hook(self)

        return self._whole(), on_gradient


_shards = WeakTensorKeyDictionary()


# `param` is a parameter or a DTensor, whose class is not imported here, because that takes time.
def local_shard(param: Any) -> torch.Tensor:
    """Return the local shard of a DTensor parameter. Return any other parameter itself.

    There is one `LocalShard` for each DTensor.
    """
    if not is_dtensor(param):
        return param  # type: ignore[no-any-return]
    if param not in _shards:
        shard = torch.Tensor._make_subclass(LocalShard, param._local_tensor.detach(), param.requires_grad)
        shard._whole = weakref.ref(param)
        _shards[param] = shard
    found: torch.Tensor = _shards[param]
    return found
