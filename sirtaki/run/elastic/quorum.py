"""Which side goes on where the network has come apart and each side may have a driver: one at most.

A side may go on where it has more than half of a generation's members, or half of them and the first. A driver ends as
soon as those that it cannot reach could; one that takes over must be able to. Until enough agents know of a generation,
others may still believe in the one before: both count, as in joint consensus (Ongaro and Ousterhout 2014, section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class _Ballot:
    """A generation that somebody may believe to be the newest.

    Attributes:
        members: by rank.
        dead: of them, for certain.
        unreachable: of them, dead or not.
        informed: those whose agents know of a newer one.
    """

    number: int
    members: Sequence[int]
    dead: set[int] = field(default_factory=set)
    unreachable: set[int] = field(default_factory=set)
    informed: set[int] = field(default_factory=set)

    def is_decided_by(self, workers: Set[int]) -> bool:
        """Whether these members of it would go on without the others."""
        twice = 2 * len(workers)
        return twice > len(self.members) or (twice == len(self.members) and self.members[0] in workers)

    def is_decided_without(self, *workers: Collection[int]) -> bool:
        """Whether the members that are left would."""
        return self.is_decided_by(set(self.members).difference(self.dead, *workers))


class Quorum:
    """Of one driver."""

    def __init__(self) -> None:
        """Before the first generation there is nothing to decide."""
        self._ballots: list[_Ballot] = []

    @property
    def older(self) -> list[list[int]]:
        """Members of those generations before the newest that somebody may still believe in."""
        return [list(ballot.members) for ballot in self._ballots[:-1]]

    @property
    def is_lost(self) -> bool:
        """Those that cannot be reached may go on."""
        return any(ballot.is_decided_by(ballot.unreachable - ballot.dead) for ballot in self._ballots)

    def permits(self, candidates: Collection[int]) -> bool:
        """Whether a generation of these may begin: whoever is left out could not go on."""
        return not any(ballot.is_decided_without(candidates) for ballot in self._ballots)

    def begin(self, number: int, members: Sequence[int]) -> None:
        """A generation begins."""
        self._ballots.append(_Ballot(number=number, members=members))

    def take_over(self, lists: Sequence[Sequence[int]], number: int, present: Collection[int]) -> None:
        """Goes on where another driver has been lost.

        Args:
            lists: `older` of that driver, and the members of its newest generation.
            number: of that.
            present: workers that can be reached.
        """
        for members in lists:
            self._ballots.append(_Ballot(number=number, members=members, unreachable=set(members).difference(present)))

    def lose(self, workers: Collection[int]) -> None:
        """They cannot be reached any more."""
        for ballot in self._ballots:
            ballot.unreachable.update(set(workers).intersection(ballot.members))

    def died(self, worker: int) -> None:
        """It has ended for certain."""
        for ballot in self._ballots:
            if worker in ballot.members:
                ballot.dead.add(worker)

    def inform(self, number: int, is_there: Callable[[int], bool]) -> None:
        """The agent of a host knows of that generation; the function says which workers are or were there."""
        for ballot in self._ballots:
            if ballot.number < number:
                ballot.informed.update(filter(is_there, ballot.members))

    def settle(self) -> bool:
        """Forgets generations that nobody could go on with any more; whether there were any."""
        older = [ballot for ballot in self._ballots[:-1] if ballot.is_decided_without(ballot.informed)]
        has_settled = len(older) < len(self._ballots) - 1
        if has_settled:
            self._ballots = [*older, self._ballots[-1]]
        return has_settled
