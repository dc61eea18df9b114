"""An optimizer whose `step()` returns at once: updates are made in the next forward pass, each before it is needed."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer as torch_optimizer

from sirtaki.engine import job
from sirtaki.engine.forward_overlap import ForwardOverlap
from sirtaki.errors import CommError, ConfigError
from sirtaki.settings import Overlap

from .averaging_optimizer import AveragingOptimizer
from .overlap.partial_step import PartialStep
from .overlap.per_parameter import refusal, refusal_by_trial
from .overlap.put_off_updates import PutOffUpdates, Stage, Zeroing
from .overlap.reads import CheckedReads, LearnedReads, hold_their_own, wait_for_own

logger = logging.getLogger(__name__)

REFUSED = "overlap_forward does not go with this optimizer: {why}"
WAITED = (
    "gradients are looked at between backward() and step(), and are waited for there: only what nobody has looked at "
    "comes during the next forward pass"
)
SYNCHRONIZED = (
    "synchronize() waits for all gradients, as clipping by their global norm must: nothing of them comes during the "
    "next forward pass"
)
COMPILED = "torch.compile is used, whose graphs read parameters past Python: step() waits for all gradients"


class OverlappedOptimizer(AveragingOptimizer):
    """What is mixed into the class of the wrapped optimizer in the place of `AveragingOptimizer`.

    Attributes:
        _updates: those that are put off; None where there is nobody to wait for.
        _refuses: a script that cannot have what it has asked for is told by an error; else it trains without.
        _refusal: why nothing is put off; empty if it may be, None = not known before the first step.
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
        weakref.finalize(self, self._hooks.close)
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
            self._partial = PartialStep(self, self._kind)
            self._updates = PutOffUpdates(
                self._gradients,
                self._partial,
                allowed=self._may_put_off,
                seen=lambda: self._tell_once(WAITED),
                closed=self._stop_watching,
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
        tuned = reducers[0].tuned if len(reducers) == 1 else None
        return None if tuned is None else tuned.overlap

    def _may_put_off(self) -> bool:
        if not self._knows_reads or self._refusal != "":
            return False
        if _something_is_compiled():
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
        self._stop_watching()
        if closure is not None and self._refuses:
            raise ConfigError("overlap_forward does not go with step(closure): call the closure before step()")
        self._require_open()
        updates = self._updates
        if updates is None or self._refusal:
            return super().step(closure)
        if updates.stage is Stage.STEPPED:  # no backward pass since
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
        """Gradients are there once they are reduced, and tell what kind of optimizer it is."""
        self.synchronize()
        self._refusal = ""
        if why := refusal_by_trial(self, self._kind):
            self._refuse(why)
        with self.skip_synchronize():
            return super().step()

    def synchronize(self) -> None:
        """As `AveragingOptimizer.synchronize`; nothing of this iteration is put off."""
        self._stop_watching()
        if self._updates is not None:
            if self._updates.stage is Stage.LEFT and self._should_synchronize:
                self._tell_once(SYNCHRONIZED)
            self._updates.settle()
        super().synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `AveragingOptimizer.zero_grad`; does not wait for updates that are put off."""
        updates = self._updates
        if updates is None or updates.stage is Stage.IDLE:
            with nullcontext() if self._learning is None else torch._C.DisableTorchFunctionSubclass():
                super().zero_grad(set_to_none)  # which reads no parameter
        elif updates.stage is Stage.LEFT:  # its step was left out
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
        if overlap is None or self._learning is not None or _something_is_compiled():
            return
        if overlap.learning or (overlap.ready and not self._knows_reads):  # late, if it could not be in its time
            learning = LearnedReads(self._reduced_params())
            if learning.begin():
                self._learning = learning
                self._hooks.callback(learning.end)

    def _reduced_params(self) -> list[torch.Tensor]:
        """All that are updated with dense gradients; none if there are sparse ones, too."""
        assert self._gradients is not None
        hooked = self._gradients.reducers[0].hooked
        return [] if hooked is None or not hooked.reductions.all_dense else [param for _, param in hooked.named]

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
        if self._updates is not None and self._updates.stage is Stage.STEPPED:
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


def _something_is_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


@torch.no_grad()
def _zero(param: torch.Tensor, set_to_none: bool) -> None:
    if param.grad is not None:
        if set_to_none:
            param.grad = None
        else:
            param.grad.detach_()
            param.grad.zero_()
