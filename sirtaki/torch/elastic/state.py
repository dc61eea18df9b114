"""State that is committed, restored and synchronised."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sirtaki.engine import job
from sirtaki.engine.membership import Change

from ..exceptions import HostsUpdatedInterrupt
from ..functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    broadcast_state,
)
from ..local_sgd import LocalSGD
from . import checkpoints
from .checkpoints import Checkpoints, RandomState
from .sampler import ElasticSampler, Mark

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


SYNC_ROOT = 0
"""Whose state all ranks take: where ranks come and go, rank 0 is one that has been there."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Which commits a rank holds.

    Attributes:
        written: number of its newest one; -1 = none.
        completed: the newest one that it knows all ranks to hold.
    """

    written: int = -1
    completed: int = -1


class _Report(NamedTuple):
    """What a rank tells the others at a commit.

    Attributes:
        change: the value of a `Change` that it has heard of.
        leaves: it is about to end.
        due: it is to have a checkpoint written.
        news: what its state has to tell (Any: whatever pickles).
    """

    change: int
    leaves: bool
    due: bool
    news: Any


class _KeepsNoCommits:
    """What `elastic.run` asks of a state, beside what Horovod's scripts define."""

    def _news(self) -> Any:
        """What the other ranks are to hear when they look for changes (Any: whatever pickles)."""

    def _complete(self, news: Sequence[Any]) -> None:
        """All ranks hold what was saved last.

        Args:
            news: of all ranks.
        """

    def _keep(self, kept: Checkpoints, *, at_once: bool) -> None:
        """Collective: all ranks hold what was saved last, and it is to be written to disk.

        Args:
            kept: does that.
            at_once: if a rank is about to end; returns when it is on disk.
        """

    def _standing(self) -> Standing:
        """Which commits this rank holds."""
        return Standing()

    def _go_back(self, number: int) -> None:
        """Goes back to that commit, or stays at the newest one if it is not held."""

    def _count_from(self, number: int) -> None:
        """What is saved next has that number."""


class State(_KeepsNoCommits, ABC):
    """Something that can be saved in memory, restored, and made equal on all ranks."""

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        """Keeps nothing.

        Args:
            bcast_object: shares rank 0's object (Any: whatever pickles); None = `hvd.broadcast_object`.
            get_rank: accepted for Horovod's sake.
        """
        self._bcast_object = bcast_object or (lambda value: broadcast_object(value, SYNC_ROOT))
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call before training is repeated, for example to adapt the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Training is about to be repeated."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, and looks whether hosts have changed.

        Collective where ranks come and go or checkpoints are written: when it returns, or raises
        `HostsUpdatedInterrupt`, all ranks hold what was saved. Elsewhere each rank saves by itself.

        Raises:
            HostsUpdatedInterrupt: on all ranks, hosts have come or gone.
            HorovodInternalError: a rank is lost.
            SystemExit: this rank was sent SIGTERM, and what was saved is on disk.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises if hosts have come or gone, and has a checkpoint written if one is due.

        Collective where ranks come and go or checkpoints are written; nothing elsewhere.

        Raises:
            HostsUpdatedInterrupt: on all ranks.
            HorovodInternalError: a rank is lost.
            SystemExit: this rank was sent SIGTERM, and what was saved is on disk.
        """
        current, kept = job.current(), checkpoints.of_this_process()
        if current.elastic is None and kept is None:
            return
        change = Change(0) if current.elastic is None else current.elastic.change()
        leaves = kept is not None and kept.leaving
        due = kept is not None and kept.due and current.rank == SYNC_ROOT
        reports = [_Report(*each) for each in current.control.all_gather((change.value, leaves, due, self._news()))]
        self._complete([each.news for each in reports])
        if current.elastic is not None:
            current.control.barrier()  # who returns knows that all have heard: what it alone knew would be lost with it
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
        """Called by `on_reset`; for sub-classes."""

    @abstractmethod
    def save(self) -> None:
        """Keeps the current state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Goes back to what was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Collective: takes over rank 0's state, and saves it."""


class ObjectState(State):
    """Plain picklable values, kept as attributes."""

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None, **values: Any
    ) -> None:
        """Keeps the values, and saves them.

        Args:
            bcast_object: see `State`.
            get_rank: see `State`.
            values: by name; they become attributes.
        """
        super().__init__(bcast_object, get_rank)
        self._names = list(values)
        for name, value in values.items():
            setattr(self, name, value)
        self._commits = Commits()
        self.save()

    def _tree(self) -> dict[str, Any]:
        """What is saved; copied by the caller."""
        return {"values": {name: getattr(self, name) for name in self._names}}

    def save(self) -> None:
        """Keeps a copy of the values in memory, beside the copy before it."""
        self._commits.write(self._tree())

    def restore(self) -> None:
        """Goes back to the values of the newest whole copy."""
        self._put_back(self._commits.newest)

    def _put_back(self, commit: Commit) -> None:
        for name, value in commit.tree["values"].items():
            setattr(self, name, copied(value))

    def sync(self) -> None:
        """Collective: takes over rank 0's values, and keeps a copy of them."""
        for name, value in self._bcast_object(copy.deepcopy(self._tree()["values"])).items():
            setattr(self, name, value)
        self.save()

    def _complete(self, news: Sequence[Any]) -> None:
        self._commits.completed = self._commits.newest.number

    def _checkpoint(self) -> dict[str, Any]:
        """What of the newest commit goes to disk; copied by the caller."""
        return {"values": self._commits.newest.tree["values"]}

    def _load(self, tree: Mapping[str, Any]) -> None:
        """Takes over what was written to a checkpoint."""
        if tree["values"].keys() != set(self._names):
            raise ValueError(f"it has the values {sorted(tree['values'])}, the state has {sorted(self._names)}")
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

    def _standing(self) -> Standing:
        return Standing(written=self._commits.newest.number, completed=self._commits.completed)

    def _go_back(self, number: int) -> None:
        self._commits.drop_after(number)
        commit = self._commits.newest
        self._put_back(commit)
        if commit.random is not None:
            commit.random.put_back()

    def _count_from(self, number: int) -> None:
        self._commits.count_from(number)


class TorchState(ObjectState):
    """A model and an optimizer, and anything else by keyword: further models, optimizers,
    samplers, a `LocalSGD`, plain values.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        """Keeps what is given as attributes, and saves it.

        Args:
            model: broadcast by its `state_dict()`, as all modules are.
            optimizer: as all optimizers, too.
            kwargs: modules, optimizers, `ElasticSampler`s, `LocalSGD`s, and anything that pickles.
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
        samplers = {name: sampler.state_dict() for name, sampler in self._samplers.items()}
        return {**super()._checkpoint(), "states": self._commits.newest.tree["states"], "samplers": samplers}

    def _load(self, tree: Mapping[str, Any]) -> None:
        states = {**tree["states"], **tree["samplers"]}
        if states.keys() != self._stateful.keys():
            raise ValueError(f"it has {sorted(states)}, the state has {sorted(self._stateful)}")
        super()._load(tree)
        for name, value in self._stateful.items():
            value.load_state_dict(states[name])

    @property
    def _samplers(self) -> dict[str, ElasticSampler]:
        return {name: value for name, value in self._stateful.items() if isinstance(value, ElasticSampler)}

    def _marks(self) -> dict[str, Mark]:
        return {name: sampler.mark() for name, sampler in self._samplers.items()}

    def _tree(self) -> dict[str, Any]:
        states = {
            name: value.state_dict() for name, value in self._stateful.items() if not isinstance(value, ElasticSampler)
        }
        return {**super()._tree(), "states": states, "marks": self._marks()}

    def _put_back(self, commit: Commit) -> None:
        for name, state in commit.tree["states"].items():
            # Parameters are written in place; an optimizer keeps the tensors that it is given.
            value = self._stateful[name]
            value.load_state_dict(state if isinstance(value, torch.nn.Module) else copied(state))
        for name, mark in commit.tree["marks"].items():
            self._stateful[name].rewind(mark)
        super()._put_back(commit)

    def reset(self) -> None:
        """Deals out anew what the samplers have left."""
        for sampler in self._samplers.values():
            sampler.reset()

    def sync(self) -> None:
        """Collective: take over rank 0's state; what the ranks' samplers have processed is put together."""
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

    def _news(self) -> dict[str, tuple[int, list[int]]]:
        return {name: sampler.news() for name, sampler in self._samplers.items()}

    def _complete(self, news: Sequence[Any]) -> None:
        for name, sampler in self._samplers.items():
            sampler.hear([each[name] for each in news if each is not None and name in each])
        self._commits.newest.tree["marks"] = self._marks()
        super()._complete(news)


_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler, LocalSGD)
