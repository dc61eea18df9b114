"""The updates of one optimizer that are put off: each is made when somebody needs its parameter.

From the end of the backward pass its parameters are held (`awaited`). Whoever looks at one before `step()` waits for
its gradient, which is what a backward pass that waits would have given him; whoever looks at it after that waits for
its gradient and has it updated, with all parameters that have come along in the same units. What nobody has looked at
is updated when the next backward pass begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch

from sirtaki.engine.gradient_reducer import GradientReducer
from sirtaki.engine.hooked_parameters import HookedParameters

from . import awaited
from .partial_step import PartialStep


class Stage(Enum):
    """Where an iteration is."""

    IDLE = "nothing is put off"
    LEFT = "backward has returned, gradients are under way"
    STEPPED = "step has returned, updates are to be made"


class Zeroing(Enum):
    """What `zero_grad` has asked for while updates were put off."""

    NONE = "set to None"
    ZEROS = "zeros"


class Gradients(Protocol):
    """Of the optimizer; see `OptimizerGradients`."""

    @property
    def reducers(self) -> list[GradientReducer]:
        """See there."""
        ...

    def finish(self) -> None:
        """See there."""
        ...


class PutOffUpdates:
    """Of one optimizer; it is the keeper of its reducer's late ends.

    Attributes:
        stage: see there.
        uncovered: parameters, by id, that something reads past Python: these are waited for in `step()`.
    """

    def __init__(
        self,
        gradients: Gradients,
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
        self._lock = threading.RLock()
        self.stage, self.uncovered = Stage.IDLE, frozenset[int]()
        self._hooked: HookedParameters | None = None
        self._params: list[torch.Tensor] = []
        self._number_of: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._gradient_of: dict[int, torch.Tensor | None] = {}
        self._zeroing: dict[int, Zeroing] = {}

    def use(self) -> None:
        """The optimizer's reducers are as they are now; called again when they change."""
        if len(self._gradients.reducers) == 1:
            self._gradients.reducers[0].late.use(self)

    # ── the backward pass ────────────────────────────────────────────────────────────────────────────────────────

    def _possible(self) -> bool:
        reducers = self._gradients.reducers
        return len(reducers) == 1 and reducers[0].late.possible and self._allowed() and self._know_parameters()

    def _know_parameters(self) -> bool:
        """Takes up the reducer's parameters, which may have changed; False if one of them cannot be held."""
        hooked = self._gradients.reducers[0].hooked
        if hooked is not self._hooked and hooked is not None:
            self._hooked, self._params = hooked, [param for _, param in hooked.named]
            self._number_of = {id(param): number for number, param in enumerate(self._params)}
        return self.stage is not Stage.IDLE or all(map(awaited.can_be_held, self._params))

    def keep(self) -> bool:
        """See `Keeper`."""
        with self._lock:
            if self.stage is not Stage.IDLE or not self._possible():
                return False
            self._hold()
            self.stage = Stage.LEFT
            return True

    def _hold(self) -> None:
        self._waiting = set(range(len(self._params)))
        awaited.hold(self._params, self)

    def withdraw(self) -> None:
        """Before `step()`: nothing is put off, and gradients are as after a backward pass that has waited for them."""
        with self._lock:
            if self.stage is Stage.LEFT:
                self._let_go_all()
                self._gradients.reducers[0].late.reduce()

    def _let_go_all(self) -> None:
        self.stage = Stage.IDLE
        for number in self._waiting:
            awaited.let_go(self._params[number])
        self._waiting.clear()

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Has the updates of this step put off; False, and nothing is done, if they cannot be."""
        with self._lock:
            if not self._possible():
                self.withdraw()
                return False
            self._gradients.reducers[0].late.begin()
            if self.stage is Stage.IDLE:  # some gradients did not come in the backward pass
                self._hold()
            self.stage = Stage.STEPPED
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
                if id(param) in self.uncovered:
                    self.arrive(param)
            return True

    def zero(self, param: torch.Tensor, zeroing: Zeroing) -> bool:
        """Between steps: zeroes a gradient once its update is made; False, and nothing is done, if it is made."""
        with self._lock:
            number = self._number_of.get(id(param), -1)
            if self.stage is not Stage.STEPPED or number not in self._waiting:
                return False
            self._zeroing[number] = zeroing
            return True

    # ── what is waited for ───────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, tensor: torch.Tensor) -> None:
        """See `Awaiter`."""
        with self._lock:
            number = self._number_of.get(id(tensor), -1)
            if number not in self._waiting:
                awaited.let_go(tensor)
                return
            if self.stage is Stage.LEFT:
                self._seen()
            late = self._gradients.reducers[0].late
            arrived = [other for other in late.wait_for(number) if other in self._waiting]
            if not arrived:
                self._let_go_all()  # this rank is needed elsewhere
                return
            params = [self._params[number] for number in arrived]
            self._waiting.difference_update(arrived)
            for param in params:
                awaited.let_go(param)
            if self.stage is Stage.STEPPED:
                self._update(arrived, params)
            else:
                late.hand_out(arrived)

    def _update(self, arrived: Sequence[int], params: Sequence[torch.Tensor]) -> None:
        came = {number: param.grad for number, param in zip(arrived, params, strict=True) if param.grad is not None}
        for number, param in zip(arrived, params, strict=True):
            param.grad = self._gradient_of.pop(number)
        self._gradients.reducers[0].late.hand_out(arrived)
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
        """See `Keeper`: what was put off is done, and the iteration has ended; before `step()`, withdraws."""
        with self._lock:
            self.withdraw()
            if self.stage is not Stage.STEPPED:
                return
            for number in sorted(self._waiting):
                if number in self._waiting:
                    self.arrive(self._params[number])
            self.stage = Stage.IDLE
            self._gradients.finish()

    def close(self) -> None:
        """See `Keeper`."""
        self._closed()

    def drop(self) -> None:
        """The ranks are gone: parameters stay what they are."""
        with self._lock:
            self._let_go_all()
            self._gradient_of.clear()
            self._zeroing.clear()
