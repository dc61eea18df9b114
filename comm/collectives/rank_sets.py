"""Subsets of the ranks, each with an engine for eager operations of its own; set 0 is all ranks.

Making and ending a set is collective over *all* ranks, members or not, and all of them come to the same verdict about
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.watchdog import Watchdog
from sirtaki.errors import CommError, ConfigError, MismatchError

from .engine import EagerEngine
from .operations import OpenLanes

GLOBAL = 0
"""The number of the set of all ranks."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankSet:
    """One set.

    Attributes:
        number: its own, the same on all ranks.
        ranks: its members, ascending, by their rank among all.
        comm: over the members, for collective use by their main threads; None on other ranks.
        engine: for eager operations; None on other ranks.
        control: the control plane of the members; None on other ranks, and until `RankSets.members` was called.
    """

    number: int
    ranks: tuple[int, ...]
    comm: Communicator | None
    engine: EagerEngine | None
    control: ControlPlane | None = None


class RankSets:
    """All sets of one job by number. The methods that change them are collective over all ranks."""

    def __init__(self, control: ControlPlane, watchdog: Watchdog, open_lanes: OpenLanes | None = None) -> None:
        """Collective: opens set 0; keeps all, without owning them. `open_lanes` as for `EagerEngine`."""
        self._control, self._watchdog, self._open_lanes = control, watchdog, open_lanes
        self._sets: dict[int, RankSet] = {}
        self._last = 0
        self._open(GLOBAL, tuple(range(control.size)), control.comm)
        self._sets[GLOBAL].control = control

    def __getitem__(self, number: int) -> RankSet:
        return self._sets[number]

    def __contains__(self, number: object) -> bool:
        return number in self._sets

    def engines(self) -> list[tuple[int, EagerEngine]]:
        """The engines of the sets that this rank is in, with the sets' numbers."""
        return [(number, there.engine) for number, there in list(self._sets.items()) if there.engine is not None]

    def members(self, number: int) -> RankSet:
        """Collective over the set, of which this rank is a member: the set, with its control plane."""
        there = self._sets[number]
        if there.control is None:
            assert there.comm is not None
            there.control = self._control.of_subset(there.comm)
        return there

    def add(self, ranks: Sequence[int]) -> int:
        """Collective over all ranks: opens a set of some of them and gives its number.

        Raises:
            ConfigError: on all ranks, if on any of them the set is empty, names a rank that does not exist or one
                twice, or is there already.
            MismatchError: on all ranks, if they name different sets.
        """
        members = tuple(sorted(ranks))
        said = self._control.all_gather((members, self._problem(members)))
        if problems := [problem for _, problem in said if problem]:
            raise ConfigError(problems[0])
        if odd := [rank for rank, (others, _) in enumerate(said) if others != said[0][0]]:
            raise MismatchError(
                f"the ranks disagree about a process set: rank 0 names {list(said[0][0])}, "
                f"rank {odd[0]} names {list(said[odd[0]][0])}"
            )
        self._last += 1
        comm = None
        if self._control.rank in members:
            comm = self._control.comm.subset(members)
        self._open(self._last, members, comm)
        return self._last

    def _problem(self, members: tuple[int, ...]) -> str:
        size = self._control.size
        if not members or len(set(members)) < len(members) or not all(0 <= rank < size for rank in members):
            return f"a process set names some of the ranks 0 … {size - 1}, each once, not {list(members)}"
        for number, there in self._sets.items():
            if there.ranks == members:
                return f"A process set with ranks {list(members)} has been added already (id {number})"
        return ""

    def remove(self, number: int | None, before: Callable[[int], None] = lambda _: None) -> bool:
        """Collective over all ranks: ends a set; False if there is none of that number or it is set 0.

        Args:
            number: of the set.
            before: called with it just before it ends, on all ranks, to end what uses it.

        Raises:
            MismatchError: on all ranks, if they name different sets.
            CommError: on all ranks, if a member has operations under way.
        """
        there = self._sets.get(number) if number else None
        pending = len(there.engine.pending) if there is not None and there.engine is not None else 0
        said = self._control.all_gather((number, pending))
        if any(other != number for other, _ in said):
            raise MismatchError(f"the ranks remove different process sets: {[other for other, _ in said]}")
        if there is None:
            return False
        assert number is not None
        if busy := [rank for rank, (_, count) in enumerate(said) if count]:
            raise CommError(f"process set {number} has operations under way on rank {busy[0]}; synchronize() them")
        before(number)
        self._close(number)
        return True

    def _open(self, number: int, ranks: tuple[int, ...], comm: Communicator | None) -> None:
        engine = None
        if comm is not None:
            where = f" of process set {number} (ranks {', '.join(map(str, ranks))})" if number else ""
            failures = self._control.failures
            engine = EagerEngine(comm, failures, where=where, open_lanes=self._open_lanes, members=ranks)
            self._watchdog.watch(engine.pending.oldest_wait, engine.pending.describe)
        self._sets[number] = RankSet(number=number, ranks=ranks, comm=comm, engine=engine)

    def _close(self, number: int) -> None:
        there = self._sets.pop(number)
        if there.engine is None or there.comm is None:
            return
        self._watchdog.forget(there.engine.pending.oldest_wait, there.engine.pending.describe)
        if there.engine.close() and number:
            if there.control is not None:
                there.control.close()
            there.comm.free()

    def close(self) -> None:
        """Collective over all ranks: ends all sets."""
        for number in sorted(self._sets, reverse=True):
            self._close(number)
