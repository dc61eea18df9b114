"""Process sets: groups of ranks that communicate among themselves."""

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
    """A group of ranks that run collectives among themselves.

    The set can be used once `init(process_sets=…)` or `add_process_set` has opened it, that is, connected its ranks.

    Attributes:
        process_set_id: id of the set: 0 for the set of all ranks, positive for other sets, None until the set is
            opened.
        ranks: ranks of the members in the job, in ascending order. None if the set was created from a communicator and
            is not opened yet.
        mpi_comm: mpi4py communicator from which the set was created. None if it was created from ranks.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: MPI.Comm | None = None

    def __init__(self, ranks_or_comm: Sequence[int] | MPI.Comm) -> None:
        """Store the members of the set. Not collective. The set cannot be used until `add_process_set` opens it.

        Args:
            ranks_or_comm: ranks of the members, or an mpi4py communicator of the members.
        """
        if isinstance(ranks_or_comm, Sequence):
            self.ranks = sorted(int(rank) for rank in ranks_or_comm)
        else:
            self.mpi_comm = ranks_or_comm

    def _opened(self) -> RankSet | None:
        """Return the engine's object for this process set, with its connections. None if the set is not open."""
        if self.process_set_id is None or not job.is_initialized():
            return None
        sets = job.current().rank_sets
        if self.process_set_id not in sets:
            return None
        there = sets[self.process_set_id]
        return there if list(there.ranks) == self.ranks else None

    def size(self) -> int | None:
        """Return the number of members. None if the set is not open (its ranks are not connected)."""
        there = self._opened()
        return None if there is None else len(there.ranks)

    def rank(self) -> int | None:
        """Return the rank of this process within the set.

        None if this process is not a member, or if the set is not open.
        """
        there = self._opened()
        return None if there is None or there.engine is None else there.engine.rank

    def included(self) -> bool | None:
        """Return whether this process is a member. None if the set is not open (its ranks are not connected)."""
        there = self._opened()
        return None if there is None else there.engine is not None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    """Process set of all ranks of the current job."""

    process_set_id = GLOBAL

    def __init__(self) -> None:
        """Create the set of all ranks. It is open whenever Sirtaki is initialised."""

    def _opened(self) -> RankSet | None:
        if not job.is_initialized():
            return None
        there = job.current().rank_sets[GLOBAL]
        self.ranks = list(there.ranks)
        return there


UNSETTLED = (
    "this rank has joined a running job whose other ranks are in hvd.elastic.run: communicate only inside "
    "hvd.elastic.run; it synchronises the state, so no broadcast is needed before"
)

global_process_set: ProcessSet = _GlobalProcessSet()
"""Process set of all ranks of the job, the default of every operation."""


def engine_of(process_set: ProcessSet) -> EagerEngine:
    """Return the engine, the object that runs the collectives of a process set.

    Raises:
        NotInitializedError: `init()` has not been called.
        ConfigError: the set is not open (its ranks are not connected), or this rank is not one of its members.
    """
    current = job.current()
    if not current.settled:
        raise NotInitializedError(UNSETTLED)
    if process_set is global_process_set:
        return current.engine
    rank = current.control.rank
    there = require_opened(process_set)
    if there.engine is None:
        raise ConfigError(
            f"rank {rank} is not in the process set of ranks {list(there.ranks)}; only ranks in the process set may "
            "use it"
        )
    return there.engine


def require_opened(process_set: ProcessSet) -> RankSet:
    """Return the connected ranks of an open process set (the engine's object).

    Raises:
        NotInitializedError: `init()` has not been called.
        ConfigError: the set is not open.
    """
    size = job.current().control.size
    if (there := process_set._opened()) is not None:
        return there
    if process_set in _lasting and process_set.ranks and process_set.ranks[-1] >= size:
        raise ConfigError(
            f"the process set of ranks {process_set.ranks} cannot be used, because the job has only {size} ranks; "
            "wait until the job has all ranks of the set"
        )
    raise ConfigError(
        f"the process set {process_set} has not been initialized; pass it to init() or add_process_set() first"
    )


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Open a process set: connect its ranks. Return the set.

    Collective over all ranks of the job, including ranks outside of the set. All ranks must pass equal sets.

    Raises:
        ValueError: the set contains ranks that the job does not have, or is open already. Raised on all ranks.
        HorovodInternalError: ranks pass different sets. Raised on all ranks.
    """
    current = job.current()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if current.elastic is not None and not current.training and process_set not in _lasting:
        _lasting.append(process_set)
        if not current.settled:
            return process_set  # Do not open the set yet. `elastic.run` opens it once this rank is a member of the job.
    process_set.process_set_id = current.rank_sets.add(_wanted(process_set))
    process_set.ranks = list(current.rank_sets[process_set.process_set_id].ranks)
    return process_set


def _wanted(process_set: ProcessSet) -> list[int]:
    if process_set.mpi_comm is None:
        assert process_set.ranks is not None
        return process_set.ranks
    # Let the members send the set's ranks to all other ranks, because only members know which ranks the MPI
    # communicator contains.
    control = job.current().control
    MPI = load_mpi()
    own: list[int] = []
    if process_set.mpi_comm != MPI.COMM_NULL:
        group = process_set.mpi_comm.group
        own = [
            int(rank) for rank in MPI.Group.Translate_ranks(group, list(range(group.size)), mpi_of(control.comm).group)
        ]
    named: list[list[int]] = [ranks for ranks in control.all_gather(own) if ranks]
    if len({tuple(ranks) for ranks in named}) != 1:
        raise ConfigError(
            "the ranks passed different MPI communicators for one ProcessSet; members of the set must pass the same "
            "communicator, and ranks outside the set MPI.COMM_NULL"
        )
    return named[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a process set: disconnect its ranks. Collective over all ranks of the job.

    Optimizers that use the set are closed: their next `step()` raises an exception.

    Returns:
        True if the set was closed, False if it was not open or is the set of all ranks.

    Raises:
        HorovodInternalError: ranks pass different sets, or a member has operations in flight. Raised on all ranks.
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
    """Open (connect the ranks of) the process sets that were passed to `init`. Collective over all ranks.

    Raises:
        ValueError: a set is passed twice, or the argument has an invalid type.
    """
    if process_sets is None or process_sets == "dynamic":
        # Horovod's value "dynamic" has no effect, because sets can always be added.
        return
    if isinstance(process_sets, str) or not all(isinstance(there, ProcessSet) for there in process_sets):
        raise ConfigError(
            f"process_sets= of init() must be a list of ProcessSet objects or 'dynamic', not {process_sets!r}"
        )
    for process_set in process_sets:
        if process_set is not global_process_set:
            _open_static(process_set)


def _open_static(process_set: ProcessSet) -> None:
    """Open (connect the ranks of) a process set that was passed to `init`. Collective over all ranks.

    In an elastic job, a set can contain ranks that the job does not have now. Such a set is not opened. Its use
    raises an exception.
    """
    current = job.current()
    if current.elastic is None:
        add_process_set(process_set)
        return
    if process_set not in _lasting:
        _lasting.append(process_set)
    if process_set.ranks is not None:
        open_again([process_set])


# ── elastic jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────


_lasting: list[ProcessSet] = []
"""Process sets to open again whenever the set of ranks of an elastic job changes: the sets passed to `init()`, and the
sets added outside of the function that `elastic.run` repeats.
"""


def end_generation() -> None:
    """Mark all process sets as closed, because the set of ranks of an elastic job changes. Not collective."""
    for process_set in _lasting:
        process_set.process_set_id = None


def lasting() -> dict[tuple[int, ...], ProcessSet]:
    """Return the process sets to open again after the set of ranks of an elastic job has changed.

    The key of each set is the tuple of its ranks.
    """
    return {tuple(there.ranks): there for there in _lasting if there.ranks is not None and there._opened() is None}


def open_again(process_sets: Sequence[ProcessSet]) -> None:
    """Open process sets again after the ranks of an elastic job have changed.

    Skip sets that contain ranks which do not exist now.

    Collective over all ranks, which must pass the sets in the same order.
    """
    current = job.current()
    all_ranks = list(range(current.control.size))
    for process_set in process_sets:
        assert process_set.ranks is not None
        if process_set.ranks == all_ranks:
            process_set.process_set_id = GLOBAL
        elif process_set.ranks[-1] < len(all_ranks):
            process_set.process_set_id = current.rank_sets.add(process_set.ranks)
