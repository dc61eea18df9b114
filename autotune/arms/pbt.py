"""Population-based training's search: a few settings of which the worst copies one of the best and changes a little.

After Jaderberg et al., Population Based Training of Neural Networks (2017), one of AIACC's four techniques. What a
member is there, a network being trained with its hyper-parameters, is here a setting alone: all members train the same
network, so *exploit* copies knobs and no weights, and a member that is not among the worst has nothing to go on with.
So it is always the worst member's turn: it takes over the knobs of one of the best (truncation selection), which are
perturbed or, now and then, drawn anew (explore), and it stays where it has got to, good or bad, until it is the worst
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..knobs import KnobLattice, Knobs, KnobSpace
from ..trial import Proposal, Trial

_TRUNCATION = 0.25  # share of the population that is copied
_RESAMPLE = 0.15  # chance that an axis is drawn anew
_MOVE = 0.6  # chance that an axis moves otherwise
_MAX_TRIES = 32  # perturbations until one is new

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    index: Index  # on the lattice
    span_s: float


class PBTArm:
    """A small population on the lattice; other arms' trials immigrate where they are better than the worst member.

    Args:
        space: what may be chosen.
        rng: first members, choice of whom to copy, perturbations.
        population: number of members.
    """

    def __init__(self, space: KnobSpace, *, rng: np.random.Generator, population: int = 6, name: str = "pbt") -> None:
        self.name = name
        self._lattice = KnobLattice(space)
        self._rng = rng
        self._size = max(2, min(population, len(self._lattice)))
        self._members: list[_Member] = []
        self._known: set[Knobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Up to `n` places for the worst member to go to, or random first ones; empty once everything was measured."""
        proposals: list[Proposal] = []
        for _ in range(n):
            place = self._place({proposal.knobs for proposal in proposals} | self._known)
            if place is not None:
                proposals.append(Proposal(arm=self.name, knobs=place))
        return proposals

    def tell(self, trials: Sequence[Trial]) -> None:
        """The worst member moves to what this arm has asked for, and to what others have found if that is better."""
        for trial in trials:
            self._known.add(trial.knobs)
            index = self._lattice.index_of(trial.knobs)
            if index is None:
                continue
            # A setting measured again replaces its own entry: the latest trial holds all measurements.
            self._members = [member for member in self._members if member.index != index]
            if len(self._members) == self._size and (trial.arm == self.name or trial.span_s < self._members[-1].span_s):
                del self._members[-1]
            if len(self._members) < self._size:
                self._members.append(_Member(index=index, span_s=trial.span_s))
                self._members.sort(key=lambda member: member.span_s)

    def _place(self, taken: set[Knobs]) -> Knobs | None:
        for _ in range(_MAX_TRIES):
            knobs = self._lattice.at(
                self._random() if len(self._members) < self._size else self._explore(self._exploit())
            )
            if knobs not in taken:
                return knobs
        return next((knobs for knobs in self._lattice.points if knobs not in taken), None)

    def _exploit(self) -> Index:
        """The knobs of one of the best members."""
        best = max(1, round(_TRUNCATION * self._size))
        return self._members[int(self._rng.integers(best))].index

    def _explore(self, parent: Index) -> Index:
        """Moves axes by a step or two, or draws them anew (the paper's perturb and resample)."""
        return tuple(self._explore_axis(i, length) for i, length in zip(parent, self._lattice.shape, strict=True))

    def _explore_axis(self, i: int, length: int) -> int:
        draw = self._rng.random()
        if draw < _RESAMPLE:
            return int(self._rng.integers(length))
        if draw < _RESAMPLE + _MOVE:
            step = int(self._rng.choice([-2, -1, 1, 2]))
            return min(max(i + step, 0), length - 1)
        return i

    def _random(self) -> Index:
        return tuple(int(self._rng.integers(length)) for length in self._lattice.shape)
