"""Process sets: some of the ranks, which communicate among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sirtaki.comm.collectives.engine import GLOBAL, EagerEngine, RankSet
from sirtaki.comm.control.mpi import load_mpi, mpi_of
from sirtaki.engine import job
from sirtaki.errors import ConfigError, NotInitializedError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the ranks; usable once `init(process_sets=…)` or `add_process_set` has opened it.

    Attributes:
        process_set_id: 0 for all ranks, above that for others, None until it is opened.
        ranks: its members by their rank among all, ascending; made of a communicator, None until it is opened.
        mpi_comm: the mpi4py communicator that it was made of, or None.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: MPI.Comm | None = None

    def __init__(self, ranks_or_comm: Sequence[int] | MPI.Comm) -> None:
        """Opens nothing.

        Args:
            ranks_or_comm: its members, or an mpi4py communicator of them.
        """
        if isinstance(ranks_or_comm, Sequence):
            self.ranks = sorted(int(rank) for rank in ranks_or_comm)
        else:
            self.mpi_comm = ranks_or_comm

    def _opened(self) -> RankSet | None:
        """The set as it is open now, None if it is not."""
        if self.process_set_id is None or not job.is_initialized():
            return None
        sets = job.current().rank_sets
        if self.process_set_id not in sets:
            return None
        there = sets[self.process_set_id]
        return there if list(there.ranks) == self.ranks else None

    def size(self) -> int | None:
        """Number of members, None if the set is not open."""
        there = self._opened()
        return None if there is None else len(there.ranks)

    def rank(self) -> int | None:
        """This process among the members, None if it is none of them or the set is not open."""
        there = self._opened()
        return None if there is None or there.engine is None else there.engine.rank

    def included(self) -> bool | None:
        """Whether this process is a member, None if the set is not open."""
        there = self._opened()
        return None if there is None else there.engine is not None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    """All ranks, whoever they are in this run of Sirtaki."""

    process_set_id = GLOBAL

    def __init__(self) -> None:
        """Open whenever Sirtaki is."""

    def _opened(self) -> RankSet | None:
        if not job.is_initialized():
            return None
        there = job.current().rank_sets[GLOBAL]
        self.ranks = list(there.ranks)
        return there


UNSETTLED = (
    "this rank has come to a job under way, whose other ranks are in hvd.elastic.run: communicate inside of it only; "
    "state that is committed there needs no broadcast before"
)

global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks; the default of every operation."""


def engine_of(process_set: ProcessSet) -> EagerEngine:
    """What performs this set's operations.

    Raises:
        NotInitializedError: `init()` has not been called.
        ConfigError: the set is not open, or this rank is not in it.
    """
    current = job.current()
    if not current.settled:
        raise NotInitializedError(UNSETTLED)
    if process_set is global_process_set:
        return current.engine
    rank = current.control.rank
    there = require_opened(process_set)
    if there.engine is None:
        raise ConfigError(f"rank {rank} is not in the process set of ranks {list(there.ranks)}")
    return there.engine


def require_opened(process_set: ProcessSet) -> RankSet:
    """An open set.

    Raises:
        NotInitializedError: `init()` has not been called.
        ConfigError: the set is not open.
    """
    size = job.current().control.size
    if (there := process_set._opened()) is not None:
        return there
    if process_set in _lasting and process_set.ranks and process_set.ranks[-1] >= size:
        raise ConfigError(f"the process set of ranks {process_set.ranks} does not fit the {size} ranks that there are")
    raise ConfigError(f"{process_set} has not been initialized: pass it to init() or add_process_set() first")


def members(process_set: ProcessSet) -> tuple[int, ...]:
    """The ranks of an open set, by their rank among all.

    Raises:
        ConfigError: the set is not open.
    """
    return require_opened(process_set).ranks


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Collective over all ranks: opens a process set, which every rank names alike, members or not.

    Raises:
        ValueError: on all ranks; it names ranks that do not exist, or it is open already.
        HorovodInternalError: on all ranks; they name different sets.
    """
    current = job.current()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if current.elastic is not None and not current.training and process_set not in _lasting:
        _lasting.append(process_set)
        if not current.settled:
            return process_set  # opened once this rank meets the others
    process_set.process_set_id = current.rank_sets.add(_wanted(process_set))
    process_set.ranks = list(current.rank_sets[process_set.process_set_id].ranks)
    return process_set


def _wanted(process_set: ProcessSet) -> list[int]:
    if process_set.mpi_comm is None:
        assert process_set.ranks is not None
        return process_set.ranks
    # A communicator names its members on its own members only.
    control = job.current().control
    MPI = load_mpi()
    mine: list[int] = []
    if process_set.mpi_comm != MPI.COMM_NULL:
        group = process_set.mpi_comm.group
        mine = [
            int(rank) for rank in MPI.Group.Translate_ranks(group, list(range(group.size)), mpi_of(control.comm).group)
        ]
    named: list[list[int]] = [ranks for ranks in control.all_gather(mine) if ranks]
    if len({tuple(ranks) for ranks in named}) != 1:
        raise ConfigError("a process set's communicator must be one and the same on its members, COMM_NULL elsewhere")
    return named[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Collective over all ranks: ends a process set; False if it is not open or the global one.

    Optimizers of the set are closed: their next `step()` raises.

    Raises:
        HorovodInternalError: on all ranks; they name different sets, or a member has operations under way.
    """
    current = job.current()
    if process_set is global_process_set:
        return False
    opened = process_set._opened() is not None
    removed = current.rank_sets.remove(process_set.process_set_id if opened else None, current.close_participants)
    if removed:
        process_set.process_set_id = None
        if process_set in _lasting:
            _lasting.remove(process_set)
    return removed


def open_static(process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Collective over all ranks: opens the sets that `init` was given.

    Raises:
        ValueError: one of them is there twice, or the argument is none of those that `init` takes.
    """
    if process_sets is None or process_sets == "dynamic":  # sets can be added at any time, asked for or not
        return
    if isinstance(process_sets, str) or not all(isinstance(there, ProcessSet) for there in process_sets):
        raise ConfigError(f"process_sets= takes a list of ProcessSet or 'dynamic', not {process_sets!r}")
    for process_set in process_sets:
        if process_set is not global_process_set:
            _open_static(process_set)


def _open_static(process_set: ProcessSet) -> None:
    """Collective. Where ranks come and go a set may have more of them another time; its use tells that it does not fit.

    In a job under way, `init()` is called by all ranks of each generation, so that it is opened right now.
    """
    current = job.current()
    if current.elastic is None:
        add_process_set(process_set)
        return
    if process_set not in _lasting:
        _lasting.append(process_set)
    if process_set.ranks is not None:
        open_again([process_set])


# ── where ranks come and go ──────────────────────────────────────────────────────────────────────────────────────


_lasting: list[ProcessSet] = []
"""Those of `init()`, and those that were added outside of the function that `elastic.run` repeats."""


def end_generation() -> None:
    """Not collective: no set is open any more."""
    for process_set in _lasting:
        process_set.process_set_id = None


def lasting() -> dict[tuple[int, ...], ProcessSet]:
    """Sets to be opened again that are not open, by their ranks."""
    return {tuple(there.ranks): there for there in _lasting if there.ranks is not None and there._opened() is None}


def open_again(process_sets: Sequence[ProcessSet]) -> None:
    """Collective over all ranks, in one order: opens those that fit; all ranks that there are may be one of them."""
    current = job.current()
    everybody = list(range(current.control.size))
    for process_set in process_sets:
        assert process_set.ranks is not None
        if process_set.ranks == everybody:
            process_set.process_set_id = GLOBAL
        elif process_set.ranks[-1] < len(everybody):
            process_set.process_set_id = current.rank_sets.add(process_set.ranks)
