"""Committed copies of a state: two, so that the one before is whole while the other is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .random_state import RandomState

WRITING = -1
"""The number of a copy that is not whole."""


@dataclass(slots=True, eq=False)
class Commit:
    """One copy.

    Attributes:
        number: counts up, the same on all ranks for what they commit together.
        tree: of dictionaries and lists (Any: whatever can be copied), with tensors that the next but one reuses.
        random: of this rank.
    """

    number: int = WRITING
    tree: dict[str, Any] = field(default_factory=dict)
    random: RandomState | None = None


class Commits:
    """The two newest commits of this rank.

    Attributes:
        completed: number of the newest commit that is known to be held by all ranks.
    """

    def __init__(self, random_state: Callable[[], RandomState | None] = RandomState.now) -> None:
        """There is none.

        Args:
            random_state: that is kept with each; None = none.
        """
        self._random_state = random_state
        self._copies = (Commit(), Commit())
        self._next = 0
        self.completed = WRITING

    @property
    def newest(self) -> Commit:
        """The newest whole copy."""
        return max(self._copies, key=lambda each: each.number)

    def write(self, tree: Mapping[str, Any]) -> Commit:
        """Copies `tree` over the older of the two; the newer one stays as it is."""
        spare = min(self._copies, key=lambda each: each.number)
        spare.number = WRITING
        with torch.no_grad():
            spare.tree = {key: copied(value, spare.tree.get(key)) for key, value in tree.items()}
        spare.random = self._random_state()
        spare.number, self._next = self._next, self._next + 1
        return spare

    def drop_after(self, number: int) -> None:
        """Commits after that one do not count, if it is here."""
        if any(each.number == number for each in self._copies):
            for each in self._copies:
                if each.number > number:
                    each.number = WRITING

    def count_from(self, number: int) -> None:
        """The next one has that number, as on all other ranks."""
        self._next = number


def copied(value: Any, place: Any = None) -> Any:
    """A copy of a tree; its tensors lie in those of `place` where they fit."""
    if isinstance(value, torch.Tensor):
        if _fits(value, place):
            place.copy_(value)
            return place
        return value.detach().clone()
    if isinstance(value, dict):
        before = place if isinstance(place, dict) else {}
        new = copy.copy(value)  # of its own type, with what that has besides
        for key, child in value.items():
            new[key] = copied(child, before.get(key))
        return new
    if type(value) in (list, tuple):
        places = place if isinstance(place, list | tuple) and len(place) == len(value) else [None] * len(value)
        return type(value)(copied(child, there) for child, there in zip(value, places, strict=True))
    return copy.deepcopy(value)


def _fits(value: torch.Tensor, place: Any) -> bool:
    return (
        isinstance(place, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and place.shape == value.shape
        and place.stride() == value.stride()
        and place.dtype is value.dtype
        and place.device == value.device
    )
