"""Hooks on parameters: they count backward passes, and pass on each gradient that is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .gradient_groups import Arrive, GradientGroups
from .nan_check import NanCheck

TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


Ready = Callable[[int, torch.Tensor, int], None]
"""`Synchroniser.ready`."""


@dataclass(frozen=True, slots=True)
class Dense:
    """What is done with a dense gradient that is complete."""

    ready: Ready
    index: int

    def __call__(self, gradient: torch.Tensor, version: int) -> None:
        """See `Arrive`."""
        self.ready(self.index, gradient, version)


class Owner(Protocol):
    """Whoever reduces these gradients; it owns the hooks, which know it by a weak reference.

    Attributes:
        too_often: says that more gradients of a parameter have come than passes are added up.
    """

    too_often: str

    def begin_backward(self) -> GradientHooks | None:
        """The first gradient of a backward pass has come; returns the hooks that count from now on."""
        ...

    def as_it_travels(self, number: int) -> torch.Tensor:
        """The sparse gradient of this parameter has come; returns what is reduced in its place."""
        ...


class GradientHooks:
    """The hooks on some parameters.

    Attributes:
        in_backward: a backward pass is under way, and one of these gradients has come.
        passes_left: for each parameter, the backward passes until its gradient is complete.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        arrive: Sequence[Arrive],
        groups: Sequence[Sequence[torch.Tensor]],
        *,
        passes: int | Sequence[int],
        owner: Owner,
        nan_check: NanCheck | None,
    ) -> None:
        """Installs them.

        Args:
            params: all that want a gradient.
            arrive: for each parameter, what is done with its gradient once it is complete; all `Dense` ones are of one
                synchroniser, which the hooks call without a detour.
            groups: parameters whose gradients wait for each other.
            passes: backward passes whose gradients are added up, of all parameters or of each.
            owner: see above.
            nan_check: looks at each complete gradient; None = nobody does.
        """
        self._arrive, self._owner, self._nan_check = list(arrive), weakref.ref(owner), nan_check
        self._ready = next((there.ready for there in arrive if isinstance(there, Dense)), None)
        self._groups = GradientGroups(groups, params)
        self._groups.hold(self._arrive)
        self.begin(passes)
        self._params, self._hooks = list(params), [self._make(number) for number in range(len(params))]
        self._handles: list[torch.utils.hooks.RemovableHandle] = [
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's
            for param, hook in zip(params, self._hooks, strict=True)
        ]

    def begin(self, passes: int | Sequence[int]) -> None:
        """An iteration begins: nothing has come."""
        self._passes = [passes] * len(self._arrive) if isinstance(passes, int) else list(passes)
        self.passes_left = list(self._passes)
        self.in_backward = False
        self._groups.begin()

    @property
    def counted(self) -> list[torch.Tensor]:
        """Parameters whose gradients have come in this iteration, of some backward pass."""
        each = zip(self._params, self._passes, self.passes_left, strict=True)
        return [param for param, passes, left in each if left != passes]

    def arrive(self, number: int) -> None:
        """For gradients that autograd does not bring: that of a parameter has come, and is in its `.grad`."""
        self._hooks[number](self._params[number])

    def release(self) -> None:
        """Gradients leave that wait for members of their group that will not come."""
        self._groups.release()

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _make(self, number: int) -> Callable[[torch.Tensor], None]:
        # Garbage collection does not see what such a hook holds, so it holds nothing.
        this, arrive = weakref.ref(self), self._arrive[number]
        index = arrive.index if isinstance(arrive, Dense) else -1

        def hook(param: torch.Tensor) -> None:
            """The hot path: this, and what it calls at its end, is what a gradient costs."""
            self = this()
            if self is None:
                return
            if not self.in_backward and not self._begin_backward(param):
                return
            if self.passes_left[number] != 1:
                self._count(number)
                return
            self.passes_left[number] = 0
            gradient = param.grad
            assert gradient is not None
            if self._nan_check is not None:
                self._nan_check.look(number, gradient)
            if gradient.is_sparse:
                gradient = self._as_it_travels(number)
            if index >= 0:
                self._ready(index, gradient, gradient._version)  # type: ignore[misc]  # it is there
            else:
                self._arrive[number](gradient, gradient._version)

        return hook

    def _begin_backward(self, param: torch.Tensor) -> bool:
        """False if other hooks have taken the place of these, and care for this gradient."""
        owner = self._owner()
        current = None if owner is None else owner.begin_backward()
        if current is None:
            return False
        current.in_backward = True
        if current is self:
            return True
        for own, hook in zip(current._params, current._hooks, strict=True):
            if own is param:
                hook(param)
        return False

    def _count(self, number: int) -> None:
        if self.passes_left[number] < 1:
            owner = self._owner()
            raise AssertionError(TOO_OFTEN if owner is None else owner.too_often)
        self.passes_left[number] -= 1

    def _as_it_travels(self, number: int) -> torch.Tensor:
        owner = self._owner()
        assert owner is not None  # which owns this
        return owner.as_it_travels(number)
