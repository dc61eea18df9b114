"""Hooks on parameters: they count backward passes, hold groups together, and pass on each gradient that is complete."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

Arrive = Callable[[torch.Tensor, int], None]
"""What is done with a gradient that is complete, and its version when it came."""


class GradientGroups:
    """Groups of parameters, by their index among all of one optimizer."""

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], params: Sequence[torch.Tensor]) -> None:
        """`params` are those whose gradients are watched; others of the groups do not count."""
        index_of = {id(param): index for index, param in enumerate(params)}
        self._groups = [[index_of[id(param)] for param in group if id(param) in index_of] for group in groups]
        self.begin()

    def begin(self) -> None:
        """An iteration begins: nobody waits."""
        self._waiting: list[list[Callable[[], None]]] = [[] for _ in self._groups]

    def hold(self, arrive: list[Arrive]) -> None:
        """Makes members of a group arrive with the last of them; `arrive` by index, changed in place."""
        for place, group in enumerate(self._groups):
            for index in group:
                arrive[index] = partial(self._arrive, place, arrive[index])

    def _arrive(self, place: int, leave: Arrive, gradient: torch.Tensor, version: int) -> None:
        waiting = self._waiting[place]
        waiting.append(partial(leave, gradient, version))
        if len(waiting) == len(self._groups[place]):
            for each in waiting:
                each()

    def release(self) -> None:
        """Those leave that wait for members that will not come."""
        for waiting, group in zip(self._waiting, self._groups, strict=True):
            if len(waiting) < len(group):
                for each in waiting:
                    each()


logger = logging.getLogger(__name__)

SHOWN = 5


class NanCheck:
    """Watches the gradients of one optimizer on one rank."""

    def __init__(self, control: ControlPlane) -> None:
        """`control`: the ranks that take part."""
        self._control = control
        self.names: list[str] = []
        self._found: list[str] = []
        self._iteration = 0
        self._was_clean = True

    def look(self, number: int, gradient: torch.Tensor) -> None:
        """Looks at one gradient that is complete on this rank and not reduced yet."""
        values = gradient._values() if gradient.is_sparse else gradient
        if bool(values.sum().isfinite()) or bool((finite := values.isfinite()).all()):
            return
        nans, others = int(values.isnan().sum()), int((~finite).sum())
        parts = [f"{nans} NaN" if nans else "", f"{others - nans} infinite" if others > nans else ""]
        self._found.append(f"{self.names[number]} ({' and '.join(filter(None, parts))} of {values.numel()} elements)")

    def finish(self, passes_left: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Collective: all gradients of this iteration are in; says on the first rank what was found on which.

        An iteration that comes after another bad one is passed over: its parameters are already spoiled.

        Args:
            passes_left: 0 for gradients that have been looked at, `(n_parameters,)`.
            gradients: of all parameters.
        """
        for number, (left, gradient) in enumerate(zip(passes_left, gradients, strict=True)):
            if left and gradient is not None:
                self.look(number, gradient)
        found = self._control.all_gather(self._found)
        if any(found) and self._was_clean and self._control.rank == 0:
            lines = [
                f"  rank {rank}: {', '.join(names[:SHOWN])}"
                + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
                for rank, names in enumerate(found)
                if names
            ]
            logger.error(
                "gradients that are not finite came first in iteration %d, before they were reduced:\n%s",
                self._iteration,
                "\n".join(lines),
            )
        self._was_clean = not any(found)
        self._found.clear()
        self._iteration += 1


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
