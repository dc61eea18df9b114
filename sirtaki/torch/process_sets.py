"""Process sets, handles of asynchronous operations, and reduction operators."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sirtaki.comm.collectives.engine import EagerEngine, EagerWork
from sirtaki.comm.collectives.operations import ADASUM, Kind, Signature
from sirtaki.comm.collectives.rank_sets import GLOBAL, RankSet
from sirtaki.comm.control.mpi import load_mpi, mpi_of
from sirtaki.engine import job
from sirtaki.errors import ConfigError, NotInitializedError

if TYPE_CHECKING:
    from mpi4py import MPI


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


Deliver = Callable[[list[torch.Tensor]], Any]
"""Makes of an operation's results what the user gets (Any: a tensor, a list of them, a pair, or nothing)."""


@dataclass(slots=True, eq=False)
class _Pending:
    engine: EagerEngine
    work: EagerWork
    deliver: Deliver


_pending: dict[int, _Pending] = {}
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What every operation is called with.

    Attributes:
        name: the user's, None = the next of the unnamed ones.
        grouped: several tensors that travel together.
        wake: False = the calling thread synchronises next.
    """

    kind: Kind
    name: str | None
    process_set: ProcessSet
    grouped: bool = False
    wake: bool = True

    def start(self, tensors: Sequence[torch.Tensor], deliver: Deliver, **rest: Any) -> int:
        """Submits this rank's side; `rest` are further fields of `Signature` (hence Any). Returns a handle."""
        engine = engine_of(self.process_set)
        signature = Signature.of(tensors, name=self._full_name(engine), kind=self.kind, once=self.name is None, **rest)
        work = engine.submit(signature, tensors, wake=self.wake)
        handle = next(_numbers)
        _pending[handle] = _Pending(engine, work, deliver)
        return handle

    def refuse(self, error: Exception) -> NoReturn:
        """Raises `error`, after telling the other ranks, which get an error instead of waiting for this one."""
        engine = engine_of(self.process_set)
        engine.submit(
            Signature(name=self._full_name(engine), once=self.name is None, kind=self.kind, problem=str(error)), []
        )
        raise error

    def require_strided(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuses what is no dense tensor.

        Raises:
            ValueError: one of them is none.
        """
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                self.refuse(ValueError(f"a torch.Tensor is wanted, not {type(tensor).__name__}"))
            if tensor.layout is not torch.strided or tensor.is_quantized:
                self.refuse(
                    ValueError(
                        f"a dense tensor is wanted, not {tensor.layout}; see sparse_allreduce_async() for sparse"
                    )
                )

    def _full_name(self, engine: EagerEngine) -> str:
        prefix = ("grouped_" if self.grouped else "") + self.kind.value.lower()
        return engine.pending.next_name(prefix) if self.name is None else f"{prefix}.{self.name}"


def forget_all() -> None:
    """No handle is known any more: the ranks that they were of have parted."""
    _pending.clear()


def poll(handle: int) -> bool:
    """True if `synchronize(handle)` would not block."""
    pending = _pending.get(handle)
    return pending is None or pending.work.is_done()


def synchronize(handle: int) -> Any:
    """Blocks until the operation is done; its result (of in-place forms: the tensor), None for an unknown handle.

    Raises:
        HorovodInternalError: the operation failed, or ranks disagreed about it.
    """
    pending = _pending.pop(handle, None)
    if pending is None:
        return None
    pending.engine.finish(pending.work)
    return pending.deliver(pending.work.results)


def synchronize_all(handles: Sequence[int]) -> list[Any]:
    """The results of several operations; all have ended when this returns or raises the first error."""
    results, errors = [], []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except Exception as err:
            errors.append(err)
    if errors:
        raise errors[0]
    return results


# ── what to make of results ──────────────────────────────────────────────────────────────────────────────────────


def first(results: list[torch.Tensor]) -> torch.Tensor:
    """The new tensor."""
    return results[0]


def everything(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The new tensors of a group."""
    return results


def into(tensors: Sequence[torch.Tensor]) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The given tensors, overwritten."""

    def deliver(results: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            for tensor, result in zip(tensors, results, strict=True):
                tensor.copy_(result)
        return list(tensors)

    return deliver


def into_one(tensor: torch.Tensor) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """The given tensor, overwritten."""
    deliver = into([tensor])
    return lambda results: deliver(results)[0]


Average, Sum, Adasum, Min, Max, Product = range(6)

OP_NAMES = {Average: "sum", Sum: "sum", Adasum: ADASUM, Min: "min", Max: "max", Product: "product"}

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)

DTYPES = {
    Average: (*_INTEGERS, *_FLOATS, *_COMPLEX),
    Sum: (*_INTEGERS, *_FLOATS, *_COMPLEX),
    Adasum: _FLOATS,
    Min: (*_INTEGERS, *_FLOATS, torch.bool),
    Max: (*_INTEGERS, *_FLOATS, torch.bool),
    Product: (*_INTEGERS, *_FLOATS, *_COMPLEX, torch.bool),
}


def reduction(op: int | None, average: bool | None) -> int:
    """The operation that `op=` and the deprecated `average=` mean together.

    Raises:
        ValueError: both are given.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed", DeprecationWarning, stacklevel=3
        )
        return Average if average else Sum
    return Average if op is None else op


def unfit(op: int, tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> Exception | None:
    """Why these tensors cannot be reduced so over these ranks, as the error to raise; None if they can."""
    if op not in OP_NAMES:
        return ValueError(f"op= takes Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    for tensor in tensors:
        if tensor.dtype not in DTYPES[op]:
            names = ", ".join(str(dtype) for dtype in DTYPES[op])
            return ValueError(f"{tensor.dtype} cannot be reduced with this op; it takes {names}")
    if op == Adasum:
        count = len(members(process_set))
        if process_set is not global_process_set:
            return NotImplementedError("Adasum works on all ranks only, not on a process set")
        if count & (count - 1):
            return NotImplementedError(f"Adasum wants a number of ranks that is a power of two, not {count}")
    return None
