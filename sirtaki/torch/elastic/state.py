"""State that can be committed, restored and synchronised, and `elastic.run`, which restarts training from it.

A *commit* is a copy of the training state in this rank's memory. A *generation* of an elastic job is the time between
two changes of the set of ranks. When a generation ends, the connections between the ranks are closed. The ranks of the
next generation connect, agree on the state from which to continue, and call the training function again.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from sirtaki.engine import job
from sirtaki.engine.membership import Change
from sirtaki.errors import CommError, ConfigError, MismatchError, ResourceLimitError

from .. import lasting_optimizers, process_sets
from ..basics import detach_all, init_again
from ..functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    broadcast_state,
    load_optimizer_state,
)
from ..local_sgd import LocalSGD
from . import checkpoints
from .checkpoints import Checkpoint, CheckpointFolder, Checkpoints, Tree
from .sampler import ElasticSampler, EpochPosition, SamplerUpdate

logger = logging.getLogger(__name__)

WRITING = -1
"""Number that a commit (copy of the training state) has while it is being written, so that it counts as incomplete."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of the global random generators of Python, NumPy and PyTorch."""

    python: Any
    numpy: Any
    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """Return the current state of the random generators of Python, NumPy and PyTorch."""
        device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), device)

    def plain(self) -> dict[str, Any]:
        """Return the state of the random generators as types that can be unpickled without running code."""
        kind, keys, *rest = self.numpy
        return {
            "python": self.python,
            "numpy": (kind, np.asarray(keys).tolist(), *rest),
            "host": self.host,
            "device": self.device,
        }

    def put_back(self) -> None:
        """Set the random generators of Python, NumPy and PyTorch to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)


@dataclass(slots=True, eq=False)
class Commit:
    """A copy of the training state in memory.

    Attributes:
        number: number of the commit, which increases with each commit. Equal on all ranks for the same point of the
            training.
        tree: the copied state, as nested dictionaries and lists (any values that can be copied). The second commit
            after this one overwrites its tensors.
        random: state of this rank's random generators.
    """

    number: int = WRITING
    tree: dict[str, Any] = field(default_factory=dict)
    random: RandomState | None = None


class Commits:
    """The two newest commits (copies of the training state in memory) of this rank.

    Attributes:
        completed: number of the newest commit of which this rank knows that all ranks have written it.
    """

    def __init__(self, random_state: Callable[[], RandomState | None] = RandomState.now) -> None:
        """Create an object without commits (copies of the training state).

        Args:
            random_state: function that returns the state of the random generators, which each commit stores. May return
                None.
        """
        self._random_state = random_state
        self._copies = (Commit(), Commit())
        self._next = 0
        self.completed = WRITING

    @property
    def newest(self) -> Commit:
        """Return the newest complete commit (copy of the training state)."""
        return max(self._copies, key=lambda each: each.number)

    def write(self, tree: Mapping[str, Any]) -> Commit:
        """Write a new commit (copy of the training state) that contains a copy of `tree`.

        It replaces the older of two commits.
        """
        spare = min(self._copies, key=lambda each: each.number)
        spare.number = WRITING
        with torch.no_grad():
            spare.tree = {key: copied(value, spare.tree.get(key)) for key, value in tree.items()}
        spare.random = self._random_state()
        spare.number, self._next = self._next, self._next + 1
        return spare

    def drop_after(self, number: int) -> None:
        """Discard commits (copies of the training state) with larger numbers than `number`.

        Does nothing if this rank does not have commit `number`.
        """
        if any(each.number == number for each in self._copies):
            for each in self._copies:
                if each.number > number:
                    each.number = WRITING

    def count_from(self, number: int) -> None:
        """Let the next commit (copy of the training state) have the number `number`, which is equal on all ranks."""
        self._next = number


def copied(value: Any, place: Any = None) -> Any:
    """Return a copy of a value. Dictionaries and lists in it are copied, too, with their values.

    Args:
        value: value to copy (any value that can be copied).
        place: an earlier copy whose tensors may be overwritten. A tensor is copied into the corresponding tensor of
            `place` if their shapes and dtypes match.
    """
    if isinstance(value, torch.Tensor):
        if _fits(value, place):
            place.copy_(value)
            return place
        return value.detach().clone()
    if isinstance(value, dict):
        before = place if isinstance(place, dict) else {}
        new = copy.copy(value)  # Copy the dictionary itself, to keep its type and attributes.
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


_checkpoints: Checkpoints | None = None


def checkpoints_of_this_process() -> Checkpoints | None:
    """Return this process's writer of checkpoints. None if the job has no checkpoint folder."""
    global _checkpoints
    settings = job.current().settings
    if settings.checkpoint_dir is None:
        return None
    if _checkpoints is None:
        _checkpoints = Checkpoints(CheckpointFolder(Path(settings.checkpoint_dir)), every_s=settings.checkpoint_s)
        _checkpoints.listen()
    return _checkpoints


SYNC_ROOT = 0
"""Rank whose state all ranks copy. In an elastic job, rank 0 is never a new rank, so it has the training state."""


@dataclass(frozen=True, slots=True)
class HeldCommits:
    """Numbers of the commits (copies of the training state) that a rank has in memory.

    Attributes:
        written: number of the rank's newest commit. -1 if it has none.
        completed: number of the newest commit of which the rank knows that all ranks have written it. -1 if it knows of
            none.
    """

    written: int = -1
    completed: int = -1


class HostsUpdatedInterrupt(Exception):
    """Exception that interrupts training because hosts were added or removed. Raised on all ranks at the same point.

    Attributes:
        skip_sync: whether training may continue without copying rank 0's state to all ranks.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class _CommitReport(NamedTuple):
    """Report that each rank sends to all ranks at a commit (when ranks save their training state in memory).

    Attributes:
        change: change of the job's hosts of which the launcher has informed this rank, as the value of a `Change`.
        leaves: whether this rank will exit after this commit.
        due: whether this rank requests to write a checkpoint to disk.
        news: further data of the rank's state object, for example processed samples (any picklable object).
    """

    change: int
    leaves: bool
    due: bool
    news: Any


class _KeepsNoCommits:
    """Private methods of a state object that `elastic.run` calls, besides Horovod's public methods.

    These default methods are for states that do not support commits (copies of the training state in memory).
    """

    def _news(self) -> Any:
        """Return data to send to the other ranks when the ranks check whether hosts were added or removed.

        The data may be any picklable object.
        """

    def _complete(self, news: Sequence[Any]) -> None:
        """Record that all ranks have written the last commit (copy of the training state).

        Args:
            news: results of `_news` of all ranks, in rank order.
        """

    def _keep(self, kept: Checkpoints, *, at_once: bool) -> None:
        """Write the last commit (copy of the training state) to disk as a checkpoint. Collective.

        All ranks must have written this commit.

        Args:
            kept: writer of checkpoints.
            at_once: whether to wait until the checkpoint is on disk, because a rank will exit.
        """

    def _standing(self) -> HeldCommits:
        """Return the numbers of the commits (copies of the training state) that this rank has in memory."""
        return HeldCommits()

    def _go_back(self, number: int) -> None:
        """Restore the training state of commit `number`.

        If this rank does not have commit `number`, restore the training state of its newest commit.
        """

    def _count_from(self, number: int) -> None:
        """Let the next commit (copy of the training state) have the number `number`."""


class State(_KeepsNoCommits, ABC):
    """Training state that can be saved in memory, restored, and synchronised between ranks."""

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        """Create a state that contains no values yet.

        Args:
            bcast_object: function that returns rank 0's object on all ranks (any picklable object). None for
                `hvd.broadcast_object`.
            get_rank: ignored, for compatibility with Horovod.
        """
        self._bcast_object = bcast_object or (lambda value: broadcast_object(value, SYNC_ROOT))
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions that are called before training restarts, for example to adapt the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the registered callbacks, to adapt to the new ranks. Called before training restarts."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory, and check whether hosts were added or removed.

        Collective in elastic jobs and in jobs that write checkpoints: when it returns or raises
        `HostsUpdatedInterrupt`, all ranks have saved the state. In other jobs, each rank saves its state on its own.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed. Raised on all ranks.
            HorovodInternalError: a rank is lost.
            SystemExit: this rank received SIGTERM, and the saved state is on disk.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise an exception if hosts were added or removed. Write a checkpoint to disk if the next one is due.

        Collective in elastic jobs and in jobs that write checkpoints. Does nothing in other jobs.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed. Raised on all ranks.
            HorovodInternalError: a rank is lost.
            SystemExit: this rank received SIGTERM, and the saved state is on disk.
        """
        current, kept = job.current(), checkpoints_of_this_process()
        if current.elastic is None and kept is None:
            return
        standing = self._standing()
        if standing.written > standing.completed:
            # Wait, because GPUs may still compute the values of the commit from gradients of other ranks.
            current.wait_for_gpus()
        change = Change(0) if current.elastic is None else current.elastic.change()
        leaves = kept is not None and kept.leaving
        due = kept is not None and kept.due and current.rank == SYNC_ROOT
        reports = [
            _CommitReport(*each) for each in current.control.all_gather((change.value, leaves, due, self._news()))
        ]
        self._complete([each.news for each in reports])
        if current.elastic is not None:
            if any(each.change for each in reports):
                current.wait_for_gpus()  # Wait for the GPUs, because the ranks close their communicators next.
            # Wait until all ranks have received all reports. Otherwise the report of a rank that exits now could be
            # lost.
            current.control.barrier()
        if kept is not None:
            at_once = any(each.leaves for each in reports)
            if at_once or any(each.due for each in reports):
                self._keep(kept, at_once=at_once)
            if leaves:
                raise SystemExit(checkpoints.TERMINATED)
        changes = Change(0)
        for each in reports:
            changes |= Change(each.change)
        if changes:
            raise HostsUpdatedInterrupt(skip_sync=changes == Change.REMOVED)

    def reset(self) -> None:
        """Adapt the state to the new set of ranks. Called before training restarts.

        Subclasses may override this method.
        """

    @abstractmethod
    def save(self) -> None:
        """Save a copy of the current state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Set the state to the copy that `save` has stored last."""

    @abstractmethod
    def sync(self) -> None:
        """Copy rank 0's state to all ranks, and save it in memory. Collective."""


class ObjectState(State):
    """Training state that consists of picklable values, which are attributes of this object."""

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None, **values: Any
    ) -> None:
        """Set the values as attributes of this object, and save a copy of them in memory.

        Args:
            bcast_object: function that returns rank 0's object on all ranks. None for `hvd.broadcast_object`.
            get_rank: ignored, for compatibility with Horovod.
            values: values of the state, by attribute name.
        """
        super().__init__(bcast_object, get_rank)
        self._names = list(values)
        for name, value in values.items():
            setattr(self, name, value)
        self._commits = Commits()
        self.save()

    def _tree(self) -> dict[str, Any]:
        """Return the values of the state, which the caller copies to save them."""
        return {"values": {name: getattr(self, name) for name in self._names}}

    def save(self) -> None:
        """Save a copy of the values in memory, as a new commit. The previous commit stays in memory."""
        self._commits.write(self._tree())

    def restore(self) -> None:
        """Set the values to those of the newest complete commit (copy of the training state)."""
        self._put_back(self._commits.newest)

    def _put_back(self, commit: Commit) -> None:
        for name, value in commit.tree["values"].items():
            setattr(self, name, copied(value))

    def sync(self) -> None:
        """Copy rank 0's values to all ranks, and save them in memory. Collective."""
        for name, value in self._bcast_object(copy.deepcopy(self._tree()["values"])).items():
            setattr(self, name, value)
        self.save()

    def _complete(self, news: Sequence[Any]) -> None:
        self._commits.completed = self._commits.newest.number

    def _checkpoint(self) -> dict[str, Any]:
        """Return the part of the newest commit (copy of the training state) to write to disk. The caller copies it."""
        return {"values": self._commits.newest.tree["values"]}

    def _load(self, tree: Mapping[str, Any]) -> None:
        """Set the state to the content of a checkpoint.

        Args:
            tree: content of the checkpoint (any picklable values).
        """
        if tree["values"].keys() != set(self._names):
            raise ValueError(
                f"the State object of the script must have values with the names {sorted(tree['values'])}, as the "
                f"checkpoint does, but has values with the names {sorted(self._names)}"
            )
        for name, value in tree["values"].items():
            setattr(self, name, value)

    def _keep(self, kept: Checkpoints, *, at_once: bool) -> None:
        newest = self._commits.newest
        generators = job.current().control.all_gather(None if newest.random is None else newest.random.plain())
        if job.current().rank == SYNC_ROOT:
            if at_once:
                kept.wait()
            kept.write(newest.number, {**copied(self._checkpoint()), checkpoints.GENERATORS: generators})
            if at_once:
                kept.wait()
        if at_once:
            job.current().control.barrier()

    def _standing(self) -> HeldCommits:
        return HeldCommits(written=self._commits.newest.number, completed=self._commits.completed)

    def _go_back(self, number: int) -> None:
        self._commits.drop_after(number)
        commit = self._commits.newest
        self._put_back(commit)
        if commit.random is not None:
            commit.random.put_back()

    def _count_from(self, number: int) -> None:
        self._commits.count_from(number)


class TorchState(ObjectState):
    """Training state that consists of a model, an optimizer, and further objects that are passed by keyword.

    These may be modules, optimizers, samplers, `LocalSGD`s and plain values.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        """Set the arguments as attributes of this object, and save a copy of their state in memory.

        Args:
            model: module whose `state_dict()` is part of the state.
            optimizer: optimizer whose `state_dict()` is part of the state.
            kwargs: further modules, optimizers, `ElasticSampler`s, `LocalSGD`s and picklable values, by attribute name.
        """
        given = {"model": model, "optimizer": optimizer, **kwargs}
        stateful = {name: value for name, value in given.items() if isinstance(value, _STATEFUL)}
        self._stateful: dict[str, Any] = {}
        for name, value in stateful.items():
            setattr(self, name, value)
        self._stateful = stateful
        super().__init__(**{name: value for name, value in given.items() if name in kwargs and name not in stateful})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in getattr(self, "_stateful", {}):
            self._stateful[name] = value
        super().__setattr__(name, value)

    def _checkpoint(self) -> dict[str, Any]:
        tree = self._commits.newest.tree
        samplers = {name: mark.state_dict() for name, mark in tree["marks"].items()}
        return {**super()._checkpoint(), "states": tree["states"], "samplers": samplers}

    def _load(self, tree: Mapping[str, Any]) -> None:
        states = {**tree["states"], **tree["samplers"]}
        if states.keys() != self._stateful.keys():
            raise ValueError(
                "the TorchState of the script must have objects (model, optimizer, ...) with the names "
                f"{sorted(states)}, as the checkpoint does, but has {sorted(self._stateful)}"
            )
        super()._load(tree)
        for name, value in self._stateful.items():
            _load_state(value, states[name])

    @property
    def _samplers(self) -> dict[str, ElasticSampler]:
        return {name: value for name, value in self._stateful.items() if isinstance(value, ElasticSampler)}

    def _marks(self) -> dict[str, EpochPosition]:
        return {name: sampler.mark() for name, sampler in self._samplers.items()}

    def _tree(self) -> dict[str, Any]:
        states = {
            name: value.state_dict() for name, value in self._stateful.items() if not isinstance(value, ElasticSampler)
        }
        return {**super()._tree(), "states": states, "marks": self._marks()}

    def _put_back(self, commit: Commit) -> None:
        for name, state in commit.tree["states"].items():
            # Copy the state before an optimizer loads it, because an optimizer uses the loaded tensors themselves,
            # unlike a module.
            value = self._stateful[name]
            _load_state(value, state if isinstance(value, torch.nn.Module) else copied(state))
        for name, mark in commit.tree["marks"].items():
            self._stateful[name].rewind(mark)
        super()._put_back(commit)

    def reset(self) -> None:
        """Distribute the unprocessed samples of all samplers over the new ranks. Called before training restarts."""
        for sampler in self._samplers.values():
            sampler.restart()

    def sync(self) -> None:
        """Copy rank 0's state to all ranks. Let each sampler record the samples that all ranks have processed.

        Collective.
        """
        for name, value in self._stateful.items():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), SYNC_ROOT)
            elif isinstance(value, ElasticSampler):
                states = allgather_object(value.state_dict())
                epoch = states[SYNC_ROOT]["epoch"]
                known = (state["processed_indices"] for state in states if state["epoch"] == epoch)
                value.load_state_dict({"epoch": epoch, "processed_indices": set().union(*known)})
            elif isinstance(value, LocalSGD):
                value.load_state_dict(broadcast_state(value.state_dict(), SYNC_ROOT, f"elastic.{name}"))
            elif not isinstance(value, torch.optim.LBFGS):
                broadcast_optimizer_state(value, SYNC_ROOT)
        super().sync()

    def _news(self) -> dict[str, SamplerUpdate]:
        marks = self._commits.newest.tree["marks"]
        return {name: sampler.unsent(marks[name]) for name, sampler in self._samplers.items() if name in marks}

    def _complete(self, news: Sequence[Any]) -> None:
        marks = self._commits.newest.tree["marks"]
        for name, sampler in self._samplers.items():
            if name in marks:
                updates = [each[name] for each in news if each is not None and name in each]
                marks[name] = sampler.merge(marks[name], updates)
        super()._complete(news)


def _load_state(value: Any, state: Any) -> None:  # `value` is an object of one of the classes in `_STATEFUL`.
    """Load a `state_dict()` into a model, an optimizer, a sampler or a `LocalSGD`."""
    if isinstance(value, torch.optim.Optimizer):
        load_optimizer_state(value, state)
    else:
        value.load_state_dict(state)


_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler, LocalSGD)


# ── training that restarts when ranks were added or removed ───────────────────────────────────────────────────────────

_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Status of one rank before training restarts, which the rank sends to all ranks.

    Attributes:
        has_state: whether the rank has the job's training state, because it took part in an earlier generation.
        restored: whether the rank has restored a commit (copy of the training state), because communication failed.
        standing: numbers of the commits that the rank has in memory.
        wants_sync: whether rank 0's state must be copied to all ranks, because this rank does not know if they have
            equal states.
        process_sets: ranks of each process set that the rank must open again.
        optimizers: names of the distributed optimizers whose gradients must be reduced over the new ranks.
    """

    has_state: bool
    restored: bool
    standing: HeldCommits
    wants_sync: bool
    process_sets: tuple[tuple[int, ...], ...]
    optimizers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Decision about the training state from which one rank continues after a failure or a change of ranks.

    Attributes:
        back_to: number of the commit (copy of the training state) to restore. None to keep the current state.
        count_from: number of the next commit.
        out_of_step: whether the ranks' states differ, so that rank 0's state must be copied to all ranks.
    """

    back_to: int | None
    count_from: int
    out_of_step: bool


def plan_recovery(statuses: Sequence[RankStatus], own: RankStatus) -> Recovery:
    """Decide from which training state the ranks continue.

    Not collective: ranks decide the same from equal arguments.

    Args:
        statuses: status of all ranks, in rank order.
        own: status of this rank.
    """
    holders = [each for each in statuses if each.has_state]
    goes_back = own.has_state and any(each.restored for each in holders)
    return Recovery(
        # Go back to the newest commit that at least one rank knows to be complete, that is, written by all ranks. Some
        # ranks may lack a newer commit.
        back_to=max(each.standing.completed for each in holders) if goes_back else None,
        count_from=1 + max(each.standing.written for each in statuses),
        out_of_step=any(each.wants_sync for each in statuses) or len(holders) < len(statuses),
    )


def synchronise_generation(state: State, *, restored: bool, wants_sync: bool) -> bool:
    """Prepare a new set of ranks for training: let process sets and optimizers use these ranks. Collective.

    Only process sets and optimizers that all ranks have are prepared. If a rank has restored a commit (copy of the
    training state), all ranks restore the newest commit that all of them have.

    Args:
        state: state object of the script.
        restored: whether this rank has restored a commit, because communication failed.
        wants_sync: whether this rank does not know if all ranks have the same state.

    Returns:
        Whether rank 0's state must be copied to all ranks.

    Raises:
        HorovodInternalError: a rank is lost.
    """
    current = job.current()
    elastic = current.elastic
    assert elastic is not None
    sets, optimizers = process_sets.lasting(), lasting_optimizers.detached()
    own = RankStatus(
        has_state=elastic.has_state,
        restored=restored,
        standing=state._standing(),
        wants_sync=wants_sync,
        process_sets=tuple(sets),
        optimizers=tuple(optimizers),
    )
    statuses: list[RankStatus] = current.control.all_gather(own)
    process_sets.open_again([sets[ranks] for ranks in _common([each.process_sets for each in statuses])])
    lasting_optimizers.attach(current, optimizers, _common([each.optimizers for each in statuses]))
    current.settled = True
    recovery = plan_recovery(statuses, own)
    if recovery.back_to is not None:
        if not restored:
            state.restore()
        state._go_back(recovery.back_to)
    state._count_from(recovery.count_from)
    return recovery.out_of_step


def copy_root_state(state: State) -> None:
    """Copy rank 0's training state to all ranks, and record that all ranks have saved this state. Collective.

    Raises:
        HorovodInternalError: a rank is lost.
    """
    current = job.current()
    assert current.elastic is not None
    if isinstance(state, ObjectState):
        resume(state, has_state=current.elastic.has_state)
    state.sync()
    current.control.barrier()
    state._complete([])
    current.elastic.has_state = True


def resume(state: ObjectState, *, has_state: bool) -> None:
    """Load the newest checkpoint that any host can read, if no rank has a training state of this job. Collective.

    Args:
        state: state object that loads the checkpoint.
        has_state: whether this rank has the job's training state already.

    Raises:
        ConfigError: the checkpoint belongs to another script, or names missing classes. Raised on all ranks.
    """
    kept = checkpoints_of_this_process()
    if kept is None:
        return
    looks = not has_state and job.current().control.local_rank == 0
    found: Checkpoint | None = kept.folder.newest() if looks else None
    found_by = allgather_object((has_state, -1 if found is None else found.number))
    newest = max(number for _, number in found_by)
    if newest < 0 or any(there for there, _ in found_by):
        return
    holder = found_by.index((False, newest))
    reads = found is not None and job.current().rank == holder
    tree, problem = broadcast_object(_loaded(found) if reads and found is not None else None, holder)
    if problem:
        raise ConfigError(problem)
    try:
        state._load(tree)
    except Exception as err:
        raise ConfigError(
            f"the checkpoint in {kept.folder.path} does not match this script: {err}. Set a separate "
            "SIRTAKI_CHECKPOINT_DIR for each job, or remove the checkpoints to start from the beginning"
        ) from err
    generators = tree.get(checkpoints.GENERATORS, [])
    if len(generators) == job.current().size and generators[job.current().rank] is not None:
        RandomState(**generators[job.current().rank]).put_back()
    state._count_from(newest + 1)
    if job.current().rank == 0:
        logger.info(
            "the job is continuing from the checkpoint of state.commit() number %d in the folder %s",
            newest,
            kept.folder.path,
        )


def _loaded(checkpoint: Checkpoint) -> tuple[Tree | None, str]:
    """Return the content of a checkpoint and an empty text.

    If loading fails, return None and an error message with a remedy.

    Called on one rank, which then sends the result to all ranks.
    """
    if checkpoint.version > checkpoints.VERSION:
        return None, (
            f"the checkpoint {checkpoint.path} has format {checkpoint.version}, but this release reads formats up to "
            f"{checkpoints.VERSION}: use the release that wrote it, or set another SIRTAKI_CHECKPOINT_DIR"
        )
    try:
        return checkpoint.load(), ""
    except Exception as err:
        # Return every error as a message. Unpickling runs code of the user's classes, which may raise any error.
        return None, (
            f"the checkpoint {checkpoint.path} cannot be loaded ({type(err).__name__}: {err}). Its file is "
            "complete, so the script has changed since it was written: restore what is missing, or move the checkpoint "
            "away to use the one before it"
        )


def _common(lists: Sequence[Sequence[_Name]]) -> list[_Name]:
    """Return the items that are in all lists, in the order of the first list."""
    everywhere = reduce(set.intersection, map(set, lists))
    return [each for each in lists[0] if each in everywhere]


Training = Callable[..., Any]  # Training function of the script. It is called with the state and further arguments.


def run(func: Training) -> Training:
    """Decorate the training function `func(state, …)`: training restarts after a failure or a change of ranks.

    If the states of the ranks may differ, rank 0's state is copied to all ranks before `func` is called.

    In an elastic job, all ranks call `func` again after a rank was lost, and continue from the last commit. They also
    call it again after hosts were added or removed, and continue from the current state. New ranks copy the state of
    existing ranks.

    In other jobs, `func` is called again after ranks have called different collectives (`MismatchError`), because no
    rank is lost then. Other communication errors mean that a rank is lost, and end the job.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """Decorate a training function like `run`. In addition, call `reset` before each repeated call of the function."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        train = functools.partial(func, state, *args, **kwargs)
        repeat = _run_fixed if job.current().elastic is None else _run_elastic
        return repeat(train, state, reset)

    return wrapper


def _run_fixed(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    skip_sync = False
    if isinstance(state, ObjectState):
        resume(state, has_state=False)
    while True:
        if not skip_sync:
            state.sync()
        try:
            return train()
        except MismatchError as err:
            logger.warning(
                "the ranks called different collectives or passed different arguments; Sirtaki restores the state of "
                "the last state.commit(): %s",
                err,
            )
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        reset()
        state.on_reset()


def _run_elastic(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    repeated, restored, wants_sync = False, False, True
    while True:
        try:
            if not job.is_initialized():
                init_again()
            out_of_step = synchronise_generation(state, restored=restored, wants_sync=wants_sync)
            if repeated:
                settled_job = job.current()
                reset()
                if job.current() is not settled_job:
                    # The job differs if `reset` has connected this rank to a new set of ranks.
                    out_of_step = synchronise_generation(state, restored=False, wants_sync=out_of_step)
                state.on_reset()
            if out_of_step:
                copy_root_state(state)
            restored = False
            return _call(train)
        except HostsUpdatedInterrupt as interrupt:
            logger.info("hosts were added or removed, so the elastic job connects its new set of ranks")
            wants_sync = not interrupt.skip_sync
            _leave_generation(together=True)
        except ResourceLimitError:
            raise
        except CommError as err:
            logger.info(
                "communication between ranks failed; Sirtaki restores the state of the last state.commit(): %s", err
            )
            if job.is_initialized():
                job.current().give_up(f"rank {job.current().rank} leaves the current set of ranks: {err}")
                job.current().stop_gpus()
            state.restore()
            restored = wants_sync = True
            _leave_generation(reason=str(err))
        repeated = True


def _call(train: Callable[[], Any]) -> Any:
    current = job.current()
    current.training = True
    try:
        return train()
    finally:
        current.training = False


def _leave_generation(*, together: bool = False, reason: str = "") -> None:
    """Disconnect this rank from the current ranks of an elastic job.

    Process sets and optimizers no longer use these ranks.

    Args:
        together: whether all ranks call this function at the same point, which is possible only if no rank is lost.
        reason: if `together` is False, the reason that error messages on the other ranks give.
    """
    job.leave(together=together, reason=reason)
    detach_all()
