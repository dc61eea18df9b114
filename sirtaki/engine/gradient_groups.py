"""Parameters that are reduced together (`groups=`): their gradients wait for each other, so that they leave as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

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
