"""`DistributedOptimizer`: a user's optimizer whose gradients are reduced over all ranks."""

from __future__ import annotations

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

from sirtaki.autotune.sparse import SparseSummary
from sirtaki.autotune.trial import Arm
from sirtaki.comm.collectives.engine import GLOBAL, RankSet
from sirtaki.comm.collectives.operations import is_dtensor
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
from .lasting_optimizers import Distributed, derive, keep, require_attached, require_plain
from .mpi_ops import Adasum, Average, Sum, allreduce, allreduce_async_, synchronize
from .overlap import (
    KNOWN,
    CheckedReads,
    LearnedReads,
    PartialStep,
    PutOffUpdates,
    Zeroing,
    hold_their_own,
    refusal,
    refusal_by_trial,
    wait_for_own,
)
from .process_sets import ProcessSet, global_process_set, require_opened

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GradientRecipe:
    """What the user has asked for; from it each generation of a job makes what its ranks need.

    Attributes:
        named: all parameters of the optimizer with their names, frozen ones too.
        passes: backward passes whose gradients are added up.
        op: Average or Sum.
        process_set: the ranks that train together.
        options: how gradients are added up; an average divides by the ranks that there are then. What compression owes
            is the same in all generations.
    """

    named: list[tuple[str, torch.Tensor]]
    passes: int
    op: int
    process_set: ProcessSet
    options: ReducerOptions

    @property
    def signature(self) -> str:
        """Equal on two ranks if their optimizers may belong together."""
        key = key_of([name for name, _ in self.named], [param for _, param in self.named])
        return f"{key}/{self.op}/{self.process_set.ranks if self.process_set is not global_process_set else 'all'}"

    def make(self, current: job.Job) -> OptimizerGradients | None:
        """Collective over the process set: None where there is nobody to be equal to.

        Raises:
            ConfigError: the process set is not open.
            MismatchError: on all ranks, if their models differ.
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
        """Collective over the set: its members, with their control plane; None on other ranks."""
        if self.process_set is global_process_set:
            return current.rank_sets[GLOBAL]
        there = require_opened(self.process_set)
        return current.rank_sets.members(there.number) if there.engine is not None else None


OWED = "sirtaki_compression"
"""In an optimizer's state: what its rank owes, see `Feedback`."""

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
            if not isinstance(loss, torch.Tensor):
                loss = torch.tensor(loss, dtype=torch.float64, device="cpu")
            return allreduce(loss.detach(), process_set=self._recipe.process_set)

        return synchronised

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's. Collective after a backward pass that raised, and where `step()` was left out.

        Raises:
            AssertionError: gradients are being reduced, since some did not come in the backward pass.
        """
        if self._gradients is not None and not self._gradients.drop():
            raise AssertionError(RACE)
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
            self._gradients.extend([(name, local_shard(param)) for name, param in added])

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's; where gradients lose something on their way, with what this rank owes."""
        state: dict[str, Any] = super().state_dict()
        reduction = self._recipe.options.reduction
        loses = reduction.compression is not None or reduction.feedback.residuals
        return state | {OWED: reduction.feedback.state_dict()} if loses else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; takes over what is owed, too, if the state says it."""
        super().load_state_dict(state_dict)
        if OWED in state_dict:
            self._recipe.options.reduction.feedback.load_state_dict(state_dict[OWED])

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
        if self._detached:
            require_attached(self)

    def finish(self) -> None:
        """Blocks until all parameters are what the last `step()` makes of them; not collective.

        They are when it returns, but with `overlap_forward=True`: needed then before parameters are read by what
        neither Python nor PyTorch's dispatcher sees.
        """


class _AdasumDistributed(Distributed):
    """What is mixed into the class of the wrapped optimizer."""

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
            raise NotImplementedError(f"Adasum needs a number of ranks that is a power of two, not {size}")
        self._serial, self._detached = next(current.serials[GLOBAL]), ""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up on this rank until `step()`, however many backward passes there are.

        Raises:
            ValueError: `passes` is not positive.
        """
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")

    def synchronize(self) -> None:
        """Does nothing: updates are combined, and those are made by `step()`."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not possible.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # Any: as torch
        """Collective: each rank makes its own update; the parameters move by their combination."""
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
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # torch's, set by its schedulers
        return loss


def wrap_adasum(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]], *, compression: type[Compressor]
) -> Distributed:
    """An optimizer of a class derived from `optimizer`'s that combines updates, once it is attached to ranks.

    Args:
        optimizer: the optimizer to wrap.
        named: all its parameters.
        compression: how updates travel.
    """
    distributed = derive(_AdasumDistributed, optimizer)
    distributed._named, distributed._compression = named, compression
    distributed._parameter_names = {param: name for name, param in named}
    return distributed


REFUSED = "overlap_forward does not go with this optimizer: {why}"
WAITED = (
    "gradients are looked at between backward() and step(), and are waited for there: only what nobody has looked at "
    "comes during the next forward pass"
)
SYNCHRONIZED = (
    "synchronize() waits for all gradients, as clipping by their global norm must: nothing of them comes during the "
    "next forward pass"
)
TRIALS = 2
"""In so many steps copies are tried: the first makes states, another uses them."""

COMPILED = "torch.compile is used, whose graphs read parameters past Python: step() waits for all gradients"


def _stop_watching(reference: weakref.ref[OverlappedOptimizer]) -> None:
    if (optimizer := reference()) is not None:  # else it watches no more
        optimizer._stop_watching()


class OverlappedOptimizer(AveragingOptimizer):
    """What is mixed into the class of the wrapped optimizer in the place of `AveragingOptimizer`.

    Attributes:
        _updates: those that are put off; None where there is nobody to wait for.
        _refuses: a script that cannot have what it has asked for is told by an error; else it trains without.
        _refusal: why nothing is put off; empty if it may be, None = not known before the first steps.
        _n_tried: steps that were tried on copies.
        _partial: updates some of the parameters.
        _learning: watches who reads parameters, in one iteration; None = not in this one.
        _knows_reads: that iteration has been.
        _modules_wait: modules of the script's own hold parameters, and wait for them.
        _hooks: what watches until the next step: learning, checking, modules that wait.
        _told: what the log has been told.
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
    _told: set[str]

    def _begin_overlap(self, *, refuses: bool) -> None:
        """Before it is attached.

        Raises:
            ConfigError: this optimizer cannot have it, and the script has asked for it by an argument.
        """
        self._refuses, self._hooks, self._told = refuses, ExitStack(), set()
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
        logger.info("%s; it trains without", REFUSED.format(why=why))

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
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
                allowed=lambda: bool(this._may_put_off()),
                seen=lambda: this._tell_once(WAITED),
                closed=partial(_stop_watching, weakref.ref(self)),
            )
            self._updates.use()

    def _detach(self, why: str) -> None:
        self._stop_watching()
        if self._updates is not None:
            self._updates.drop()
        super()._detach(why)

    # ── what iterations may be put off ───────────────────────────────────────────────────────────────────────────

    @property
    def _overlap(self) -> ForwardOverlap | None:
        reducers = [] if self._gradients is None else self._gradients.reducers
        tuned = reducers[0].tuning if len(reducers) == 1 else None
        return None if tuned is None else tuned.overlap

    def _may_put_off(self) -> bool:
        if not self._knows_reads or self._refusal != "" or isinstance(self, torch.optim.SparseAdam):
            return False  # SparseAdam takes sparse gradients, and reduced ones are dense until `synchronize`
        if something_is_compiled():
            self._tell_once(COMPILED)
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # Any: as torch
        """Collective: as `AveragingOptimizer.step`, but returns at once where updates can be put off.

        Raises:
            NotInitializedError: `close` or `shutdown` was called.
            ConfigError: a closure is given, or the optimizer turns out not to update each parameter by itself.
        """
        if torch.is_inference_mode_enabled():  # or deferred updates could not write to the states of this step
            with torch.inference_mode(False), torch.no_grad():
                return self.step(closure)
        self._stop_watching()
        if closure is not None and self._refuses:
            raise ConfigError("overlap_forward does not go with step(closure): call the closure before step()")
        self._require_open()
        updates = self._updates
        if updates is None or self._refusal:
            return super().step(closure)
        if updates.state is IterationState.DEFERRED:  # no backward pass since
            updates.settle()
        plain = closure is None and self._should_synchronize and not self._synchronized
        if plain and updates.step():
            self._wrapped._opt_called = True  # type: ignore[attr-defined]  # torch's, set by its schedulers
            self._watch_put_off()
            return None
        updates.withdraw()
        if self._refusal is None and plain:
            return self._first_step()
        result = super().step(closure)
        self._learn_reads()
        return result

    def _first_step(self) -> Any:  # Any: as torch
        """Gradients are there once they are reduced; copies of the optimizer tell what kind it is."""
        self.synchronize()
        if why := refusal_by_trial(self, self._kind):
            self._refuse(why)
        self._n_tried += 1
        if self._refusal is None and (self._n_tried == TRIALS or self._kind in KNOWN):
            self._refusal = ""
        with self.skip_synchronize():
            return super().step()

    def synchronize(self) -> None:
        """As `AveragingOptimizer.synchronize`; nothing of this iteration is put off."""
        self._stop_watching()
        if self._updates is not None:
            if self._updates.state is IterationState.LAUNCHED and self._should_synchronize:
                self._tell_once(SYNCHRONIZED)
            self._updates.settle()
        super().synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `AveragingOptimizer.zero_grad`; does not wait for updates that are put off."""
        updates = self._updates
        if updates is None or updates.state not in (IterationState.LAUNCHED, IterationState.DEFERRED):
            with nullcontext() if self._learning is None else without_subclasses():
                super().zero_grad(set_to_none)  # which reads no parameter
        elif updates.state is IterationState.LAUNCHED:  # its step was left out
            updates.withdraw()
            super().zero_grad(set_to_none)
        else:
            for group in self.__dict__["param_groups"]:
                for param in group["params"]:
                    if not updates.zero(param, Zeroing.NONE if set_to_none else Zeroing.ZEROS):
                        _zero(param, set_to_none)

    # ── who reads parameters ─────────────────────────────────────────────────────────────────────────────────────

    def _learn_reads(self) -> None:
        overlap = self._overlap
        if overlap is None or self._learning is not None or something_is_compiled():
            return
        if overlap.learning or (overlap.ready and not self._knows_reads):  # late, if it could not be in its time
            learning = LearnedReads(self._reduced_params())
            if learning.begin():
                self._learning = learning
                self._hooks.callback(learning.end)

    def _reduced_params(self) -> list[torch.Tensor]:
        """All that are updated with dense gradients; none if there are sparse ones, too."""
        assert self._gradients is not None
        reducer = self._gradients.reducers[0]
        return [param for _, param in reducer.hooked] if reducer.all_dense else []

    def _watch_put_off(self) -> None:
        """An iteration has just been put off: modules of the script's own wait, and reads are checked if wanted."""
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
        self._modules_wait = hold_their_own(learning.modules, params)
        self._knows_reads = True
        if learning.uncovered:
            names = [name for param, name in self._parameter_names.items() if id(param) in learning.uncovered]
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self._tell_once(f"{shown} are read past Python, so that step() waits for them")

    # ── everything else that reads or writes what is put off ─────────────────────────────────────────────────────

    def finish(self) -> None:
        """Blocks until all parameters are what the last `step()` makes of them; not collective."""
        if self._updates is not None and self._updates.state is IterationState.DEFERRED:
            self._updates.settle()
            self._stop_watching()

    @property
    def state(self) -> Any:  # Any: as torch
        """The optimizer's, once no update is put off any more."""
        if self._partial is None or not self._partial.running:
            self.finish()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As `AveragingOptimizer.set_backward_passes_per_step`."""
        self.finish()
        super().set_backward_passes_per_step(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `AveragingOptimizer.add_param_group`."""
        self._stop_watching()
        self.finish()
        super().add_param_group(param_group)
        if self._updates is not None:
            self._updates.use()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `AveragingOptimizer.load_state_dict`."""
        self.finish()
        super().load_state_dict(state_dict)

    def close(self) -> None:
        """As `AveragingOptimizer.close`; what is put off is done first, unless the ranks are gone."""
        self._stop_watching()
        try:
            if self._updates is not None:
                self._updates.settle()
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
    arms: Sequence[Arm] | None = None,
    overlap_forward: bool | None = None,
) -> torch.optim.Optimizer:
    """Collective: an optimizer of a class derived from `optimizer`'s that reduces gradients over all ranks.

    Args:
        optimizer: the optimizer to wrap; its parameter groups and state are shared.
        named_parameters: names for messages; the same on all ranks.
        compression: how gradients travel: one of `Compression`'s, or an object that packs numbers into bytes, with the
            methods of `sirtaki.comm.compress.Codec`.
        backward_passes_per_step: backward passes whose gradients are added up before they are reduced.
        op: Average or Sum of the gradients, or Adasum of the updates.
        gradient_predivide_factor: divides before the sum and multiplies after it, with Average only.
        num_groups: deprecated, use `groups`.
        groups: parameters that are reduced together, or into how many even groups to divide all; None = as tuned.
        sparse_as_dense: sparse gradients travel dense, and stay so unless the optimizer takes sparse ones only.
        process_set: the ranks that train together; on others nothing is reduced.
        arms: search techniques to tune with, instead of the usual ones.
        overlap_forward: `step()` returns at once, and parameters are updated in the next forward pass, each before it
            is read; None = as `SIRTAKI_OVERLAP_FORWARD` says.

    Raises:
        ValueError: an argument is invalid, the optimizer is a distributed one already, or (on all ranks) one of its
            parameters belongs to another distributed optimizer with other options, or (with `overlap_forward=True`) it
            does not update each parameter by itself.
        NotImplementedError: Adasum of some of the ranks, or of a number that is no power of two.
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
    divided = [list(map(local_shard, group)) for group in divided]
    current = job.current()
    overlaps = current.settings.overlap_forward is not Overlap.OFF if overlap_forward is None else overlap_forward
    if op == Adasum and overlap_forward:
        raise ConfigError("overlap_forward does not go with op=Adasum, which combines updates, not gradients")
    if op == Adasum and (current.control.size > 1 or current.elastic is not None):
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if not isinstance(compression, type) or not issubclass(compression, Compressor):
            raise ConfigError("op=Adasum takes Compression.none, .fp16 or .bf16: it combines updates, not gradients")
        logger.info("Adasum is not tuned%s", NO_LOG if current.settings.trial_log else "")
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


def sparse_gradients() -> list[SparseSummary]:
    """Which way sparse gradients go, of each parameter for which it is decided; not collective.

    It is decided after some thirty iterations, or eight where `SIRTAKI_SPARSE` fixes the way; on one rank never.

    Returns:
        Of each parameter its `name`, `density` (which part of its rows any rank touches in an iteration), `plan`,
        `n_bytes` that a rank receives in an iteration, `dense_bytes` and `horovod_bytes` to compare it with, and more;
        `describe()` says it in words. The same on all ranks that train the parameter.

    Raises:
        NotInitializedError: there is no job.
    """
    return [summary for reducer in reducers_of(job.current()) for summary in reducer.sparse.summaries]


# ── parameters that are DTensors, as tensor parallelism makes them: their local shards are reduced ───────────────────


class LocalShard(torch.Tensor):
    """This rank's shard of a DTensor, of the same memory; `.grad` is the shard of the DTensor's gradient, both ways.

    A gradient that comes with other placements than its parameter's (a sum that the ranks of the tensor-parallel
    dimension have not added up yet) is given these as it comes, so that all those ranks do it at the same point.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]
    _whole: weakref.ref[Any]  # a DTensor, whose class need not be imported
    _seen = (0, 0)  # the DTensor's gradient, and its version, when it was last read or set

    @property
    def grad(self) -> torch.Tensor | None:
        """None if the DTensor has none."""
        whole = self._whole()
        if whole is None or (gradient := whole.grad) is None:
            return None
        local: torch.Tensor = gradient._local_tensor
        before, self._seen = self._seen, (id(gradient), gradient._version)
        if before != self._seen and before[0] == id(gradient):
            torch.autograd.graph.increment_version(local)  # what writes to a DTensor counts there only
        return local

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (whole := self._whole()) is not None:
            whole.grad = None if value is None else type(whole)(value, whole._spec, requires_grad=False)
            self._seen = (id(whole.grad), 0 if whole.grad is None else whole.grad._version)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As the DTensor, which may be frozen and thawed."""
        whole = self._whole()
        return whole is not None and bool(whole.requires_grad)

    def on_leaf(self, hook: Callable[[torch.Tensor], None]) -> tuple[Any, Callable[[Any], None]]:
        """Return the DTensor, and the hook that it gets, so that `hook` is called with the shard."""

        @torch.no_grad()
        def come(whole: Any) -> None:  # Any: see `_whole`
            if (gradient := whole.grad) is not None:
                if gradient.placements != whole.placements:
                    gradient = gradient.redistribute(placements=whole.placements)
                local = gradient._local_tensor
                if hasattr(local, "trigger_wait"):  # an AsyncCollectiveTensor
                    local = local.trigger_wait()
                if local is not self.grad:
                    self.grad = local
            hook(self)

        return self._whole(), come


_shards = WeakTensorKeyDictionary()


def local_shard(param: Any) -> torch.Tensor:  # Any: a parameter, which may be a DTensor
    """A parameter, or the one `LocalShard` of it if it is a DTensor."""
    if not is_dtensor(param):
        return param  # type: ignore[no-any-return]
    if param not in _shards:
        shard = torch.Tensor._make_subclass(LocalShard, param._local_tensor.detach(), param.requires_grad)
        shard._whole = weakref.ref(param)
        _shards[param] = shard
    found: torch.Tensor = _shards[param]
    return found
