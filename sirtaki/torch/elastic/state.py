"""State that is committed, restored and synchronised, and `elastic.run`, which repeats training from it."""

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
from sirtaki.errors import CommError, ConfigError, MismatchError

from .. import lasting_optimizers, process_sets
from ..basics import init_again, let_go
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
from .sampler import ElasticSampler, Mark, News

logger = logging.getLogger(__name__)

WRITING = -1
"""The number of a copy that is not whole."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """Of Python's, NumPy's and PyTorch's global generators (Any: as those give it)."""

    python: Any
    numpy: Any
    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """As the generators are."""
        device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), device)

    def plain(self) -> dict[str, Any]:
        """The same in types that are unpickled without running code."""
        kind, keys, *rest = self.numpy
        return {
            "python": self.python,
            "numpy": (kind, np.asarray(keys).tolist(), *rest),
            "host": self.host,
            "device": self.device,
        }

    def put_back(self) -> None:
        """The generators go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)


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


_checkpoints: Checkpoints | None = None


def checkpoints_of_this_process() -> Checkpoints | None:
    """Those of the job; None if it has no folder for them."""
    global _checkpoints
    settings = job.current().settings
    if settings.checkpoint_dir is None:
        return None
    if _checkpoints is None:
        _checkpoints = Checkpoints(CheckpointFolder(Path(settings.checkpoint_dir)), every_s=settings.checkpoint_s)
        _checkpoints.listen()
    return _checkpoints


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


class HostsUpdatedInterrupt(Exception):
    """Hosts have come or gone; raised on all ranks at once, where ranks come and go.

    Attributes:
        skip_sync: the state need not be synchronised before training goes on.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


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
        current, kept = job.current(), checkpoints_of_this_process()
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
        tree = self._commits.newest.tree
        samplers = {name: mark.state_dict() for name, mark in tree["marks"].items()}
        return {**super()._checkpoint(), "states": tree["states"], "samplers": samplers}

    def _load(self, tree: Mapping[str, Any]) -> None:
        states = {**tree["states"], **tree["samplers"]}
        if states.keys() != self._stateful.keys():
            raise ValueError(f"it has {sorted(states)}, the state has {sorted(self._stateful)}")
        super()._load(tree)
        for name, value in self._stateful.items():
            _load_state(value, states[name])

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
            _load_state(value, state if isinstance(value, torch.nn.Module) else copied(state))
        for name, mark in commit.tree["marks"].items():
            self._stateful[name].rewind(mark)
        super()._put_back(commit)

    def reset(self) -> None:
        """Deal out anew what the samplers have left."""
        for sampler in self._samplers.values():
            sampler.restart()

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

    def _news(self) -> dict[str, News]:
        marks = self._commits.newest.tree["marks"]
        return {name: sampler.news(marks[name]) for name, sampler in self._samplers.items() if name in marks}

    def _complete(self, news: Sequence[Any]) -> None:
        marks = self._commits.newest.tree["marks"]
        for name, sampler in self._samplers.items():
            if name in marks:
                told = [each[name] for each in news if each is not None and name in each]
                marks[name] = sampler.hear(marks[name], told)
        super()._complete(news)


def _load_state(value: Any, state: Any) -> None:  # Any: one of _STATEFUL, and its state_dict()
    """Load a `state_dict()` into a model, an optimizer, a sampler or a `LocalSGD`."""
    if isinstance(value, torch.optim.Optimizer):
        load_optimizer_state(value, state)
    else:
        value.load_state_dict(state)


_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler, LocalSGD)


# ── training that is repeated when ranks have come or gone ────────────────────────────────────────────────────────────

_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What one rank brings.

    Attributes:
        has_state: it holds the job's state, of a generation before.
        restored: it has gone back to a commit.
        standing: which commits it holds.
        wants_sync: it does not know that all ranks have the same state.
        process_sets: by their ranks, those that are to be open.
        optimizers: by name, those that are to be attached.
    """

    has_state: bool
    restored: bool
    standing: Standing
    wants_sync: bool
    process_sets: tuple[tuple[int, ...], ...]
    optimizers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What follows for one rank from what all have brought.

    Attributes:
        back_to: number of the commit to go back to; None = it stays where it is.
        count_from: number of the next commit.
        out_of_step: the state is to be synchronised.
    """

    back_to: int | None
    count_from: int
    out_of_step: bool


def agreed(everybody: Sequence[Brought], mine: Brought) -> Settlement:
    """From where all go on.

    Args:
        everybody: what each has brought, by rank; all ranks have the same.
        mine: this rank's.
    """
    holders = [each for each in everybody if each.has_state]
    goes_back = mine.has_state and any(each.restored for each in holders)
    return Settlement(
        # Of two commits the one that has returned on some rank is held by all; the newer one may not be.
        back_to=max(each.standing.completed for each in holders) if goes_back else None,
        count_from=1 + max(each.standing.written for each in everybody),
        out_of_step=any(each.wants_sync for each in everybody) or len(holders) < len(everybody),
    )


def settle(state: State, *, restored: bool, wants_sync: bool) -> bool:
    """Collective: attaches what all ranks have, and goes back to the newest commit that all hold.

    Args:
        state: that of the script.
        restored: see `Brought`.
        wants_sync: see `Brought`.

    Returns:
        The state is to be synchronised.

    Raises:
        HorovodInternalError: a rank is lost.
    """
    current = job.current()
    elastic = current.elastic
    assert elastic is not None
    sets, optimizers = process_sets.lasting(), lasting_optimizers.detached()
    mine = Brought(
        has_state=elastic.has_state,
        restored=restored,
        standing=state._standing(),
        wants_sync=wants_sync,
        process_sets=tuple(sets),
        optimizers=tuple(optimizers),
    )
    everybody: list[Brought] = current.control.all_gather(mine)
    process_sets.open_again([sets[ranks] for ranks in _common([each.process_sets for each in everybody])])
    lasting_optimizers.attach(current, optimizers, _common([each.optimizers for each in everybody]))
    current.settled = True
    settlement = agreed(everybody, mine)
    if settlement.back_to is not None:
        if not restored:
            state.restore()
        state._go_back(settlement.back_to)
    state._count_from(settlement.count_from)
    return settlement.out_of_step


def share(state: State) -> None:
    """Collective: all ranks have rank 0's state, and know that all have.

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
    """Collective: goes on from the newest checkpoint that some host sees, if no rank has a state of this job.

    Args:
        state: takes it over.
        has_state: this rank has one.

    Raises:
        ConfigError: on all ranks, it is of another script, or names classes that this one lacks.
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
    mine = found is not None and job.current().rank == holder
    tree, problem = broadcast_object(_loaded(found) if mine and found is not None else None, holder)
    if problem:
        raise ConfigError(problem)
    try:
        state._load(tree)
    except Exception as err:
        raise ConfigError(
            f"the checkpoint in {kept.folder.path} does not fit this script ({err}): is it another one's? Give "
            "each job a SIRTAKI_CHECKPOINT_DIR of its own, or remove what lies there to begin anew"
        ) from err
    generators = tree.get(checkpoints.GENERATORS, [])
    if len(generators) == job.current().size and generators[job.current().rank] is not None:
        RandomState(**generators[job.current().rank]).put_back()
    state._count_from(newest + 1)
    if job.current().rank == 0:
        logger.info("going on from the checkpoint of commit %d in %s", newest, kept.folder.path)


def _loaded(checkpoint: Checkpoint) -> tuple[Tree | None, str]:
    """What was written, or why that cannot be loaded and what to do; for all ranks, of which one reads."""
    if checkpoint.version > checkpoints.VERSION:
        return None, (
            f"the checkpoint {checkpoint.path} has format {checkpoint.version}, and this release reads formats up to "
            f"{checkpoints.VERSION}: go on with the release that wrote it, or name another SIRTAKI_CHECKPOINT_DIR"
        )
    try:
        return checkpoint.load(), ""
    except Exception as err:  # whatever unpickling somebody's classes raises
        return None, (
            f"the checkpoint {checkpoint.path} cannot be loaded ({type(err).__name__}: {err}). Its file is whole, so "
            "the script has changed since it was written: bring back what is missing, or move the checkpoint away to "
            "begin with the one before it"
        )


def _common(lists: Sequence[Sequence[_Name]]) -> list[_Name]:
    """What stands in all of them, in the order of the first."""
    everywhere = reduce(set.intersection, map(set, lists))
    return [each for each in lists[0] if each in everywhere]


Training = Callable[..., Any]  # of the state and whatever else the script gives


def run(func: Training) -> Training:
    """Decorates `func(state, …)`: the state is synchronised before each call, and restored before a repeated one.

    Where ranks come and go, `func` is called again by all that are there when a rank is lost (from the last commit) and
    when hosts have come or gone (from where it is); new ranks take the state of those that were there.

    Where ranks stay, it is called again after a disagreement between ranks, which all of them survive; other failures
    of communication mean that a rank is lost, and end the job.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """Like `run`, with a function that is called before each repetition."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        train = functools.partial(func, state, *args, **kwargs)
        repeat = _on_ranks_that_stay if job.current().elastic is None else _on_ranks_that_come_and_go
        return repeat(train, state, reset)

    return wrapper


def _on_ranks_that_stay(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    skip_sync = False
    if isinstance(state, ObjectState):
        resume(state, has_state=False)
    while True:
        if not skip_sync:
            state.sync()
        try:
            return train()
        except MismatchError as err:
            logger.warning("%s; going back to the last commit", err)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        reset()
        state.on_reset()


def _on_ranks_that_come_and_go(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    repeated, restored, wants_sync = False, False, True
    while True:
        try:
            if not job.is_initialized():
                init_again()
            out_of_step = settle(state, restored=restored, wants_sync=wants_sync)
            if repeated:
                settled_in = job.current()
                reset()
                if job.current() is not settled_in:  # which it has ended, and begun another
                    out_of_step = settle(state, restored=False, wants_sync=out_of_step)
                state.on_reset()
            if out_of_step:
                share(state)
            restored = False
            return _call(train)
        except HostsUpdatedInterrupt as interrupt:
            logger.info("hosts have come or gone")
            wants_sync = not interrupt.skip_sync
            _part(together=True)
        except CommError as err:
            logger.info("%s; going back to the last commit", err)
            if job.is_initialized():
                job.current().give_up(f"rank {job.current().rank} has given up: {err}")
            state.restore()
            restored = wants_sync = True
            _part(reason=str(err))
        repeated = True


def _call(train: Callable[[], Any]) -> Any:
    current = job.current()
    current.training = True
    try:
        return train()
    finally:
        current.training = False


def _part(*, together: bool = False, reason: str = "") -> None:
    """Ends this rank's generation, see `job.leave`; what the script holds of it belongs to no ranks until the next."""
    job.leave(together=together, reason=reason)
    let_go()
