"""The choices that drawn programs are made of. What `maybe` refuses is what Hypothesis shrinks to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

from .features import Feature

T = TypeVar("T")


class Choices:
    """Choices for one program of `n_ranks` ranks that uses some of `features`."""

    def __init__(self, draw: st.DrawFn, n_ranks: int, features: frozenset[Feature]) -> None:
        self.draw, self.n_ranks, self.features = draw, n_ranks, features

    def maybe(self, percent: int, *features: Feature) -> bool:
        """True in so many per cent of cases, if all features are on."""
        return self.features.issuperset(features) and self.draw(st.integers(0, 99)) >= 100 - percent

    def one(self, choices: Sequence[T]) -> T:
        """One of them."""
        return self.draw(st.sampled_from(choices))

    def some(self, choices: Sequence[T], least: int = 1) -> tuple[T, ...]:
        """Several of them, in order."""
        if len(choices) <= least:
            return tuple(choices)
        chosen = self.draw(st.lists(st.sampled_from(range(len(choices))), min_size=least, max_size=4, unique=True))
        return tuple(choices[place] for place in sorted(chosen))

    def ranks(self) -> tuple[int, ...]:
        """Some of the ranks."""
        return self.some(range(self.n_ranks))
