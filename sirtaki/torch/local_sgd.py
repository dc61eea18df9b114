"""Synchronise less often: each rank trains its own model for some steps, then the ranks combine their models.

`LocalSGD` averages parameters (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019). `DiLoCo` averages
the changes of parameters, and uses the average as the gradient of a second, outer optimizer (Douillard et al., "DiLoCo:
Distributed Low-Communication Training of Language Models", 2023). Parts of a model, its *fragments*, are sent in turn,
while training continues (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025):

    step    1    2    3    4    5    6    7    8    9   ...        sync_every=8, fragments=2, delay=2
    sent                   A                   B
    merged                           A                   B

Each fragment is averaged once in `sync_every` optimizer steps.

All ranks follow the same schedule without extra messages. Each rank counts its own steps, and appends some values
(`_Tail`) to the parameters that it sends: whether the rank has trained, whether it has reached the end of the training
loop, and rank 0's tuning results.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sirtaki.comm.collectives.operations import is_dtensor
from sirtaki.comm.modes import outside_changes
from sirtaki.engine import job
from sirtaki.engine.reducing.checks import checksums, require_same_model
from sirtaki.engine.reducing.sharing import reducers_of
from sirtaki.errors import CommError, ConfigError, require

from .collectives import Sum, grouped_allreduce_async, poll, synchronize
from .functions import load_optimizer_state
from .lasting_optimizers import Distributed
from .process_sets import ProcessSet, engine_of, global_process_set, require_opened

logger = logging.getLogger(__name__)

TUNED_FRAGMENTS = 4
"""Default number of fragments (parts of the model that are averaged in turn) if `sync_every` is tuned."""

FIRST_INTERVAL = 4
"""Optimizer steps between sending two fragments (parts of the model), if `sync_every` is tuned and no communication
time has been measured yet.
"""

SHORTEST, LONGEST = 8, 500
"""Minimum and maximum of a tuned `sync_every`, in optimizer steps. The experiments of the DiLoCo papers end at 500."""

MARGIN = 1.25
"""Safety factor of the tuned delay, the number of steps for which training continues while a fragment (part of the
model) is averaged. The delay covers the longest communication time of a fragment, times this factor.
"""

SHORTER = 0.6
"""The tuned delay is shortened only if the new delay is less than this fraction of the current one.

Otherwise every measurement would change the delay, the number of steps between sending a part of the model and merging
its average.
"""


class _Tail(NamedTuple):
    """Values that each rank appends to the fragment (part of the model) that it sends.

    The all-reduce sums them over ranks.

    Attributes:
        weight: 1 from a rank that has trained since it last sent this fragment. 0 from other ranks.
        leaving: 1 from a rank that waits in `synchronize`, because it has finished its training loop. 0 from other
            ranks.
        interval: new number of steps between sending two fragments. Rank 0 sends the number, other ranks send 0. All
            send 0 if the number does not change.
        delay: new number of steps between sending and merging a fragment. Rank 0 sends it, other ranks send 0.
    """

    weight: float = 0.0
    leaving: float = 0.0
    interval: float = 0.0
    delay: float = 0.0


@dataclass(slots=True, eq=False)
class _Fragment:
    """Fragment: a part of the model, whose parameters and buffers are averaged together.

    Attributes:
        names: names of the parameters in `params`.
        params: trained parameters of this fragment.
        buffers: floating-point buffers of this fragment.
        origins: copies of `params` as of the last synchronisation of the ranks, which DiLoCo's outer optimizer updates.
            Empty for LocalSGD.
        steps: optimizer steps of this rank since it last sent the fragment.
    """

    names: list[str] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    origins: list[torch.Tensor] = field(default_factory=list)
    steps: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """The all-reduce of a fragment (part of the model) that has been sent and whose average is not merged yet.

    Attributes:
        fragment: the fragment that was sent.
        handle: handle of the all-reduce.
        sent: flat tensors of the values that this rank sent, in float32 and float64.
        steps: the fragment's `steps` when it was sent, to restore them if the fragment must be sent again.
        sent_s: time at which the fragment was sent, as a value of `time.perf_counter()`.
        travel_s: communication time in seconds. None until this rank has seen that the all-reduce has ended.
    """

    fragment: _Fragment
    handle: int
    sent: list[torch.Tensor]
    steps: int
    sent_s: float
    travel_s: float | None = None


class LocalSGD:
    """Context manager around the training loop: each rank trains on its own, and ranks regularly average models.

        with hvd.LocalSGD(model, optimizer, sync_every=8):
            for batch in data:
                optimizer.zero_grad()
                loss(model(batch)).backward()
                optimizer.step()

    Use a plain optimizer, not a DistributedOptimizer. `LocalSGD` counts the optimizer's `step()` calls. Persistent
    floating-point buffers, such as batch norm's statistics, are averaged too. Half-precision parameters are averaged in
    float32.

    Ranks may have different numbers of batches. The model is averaged in parts (fragments). A rank that has not trained
    since it last sent a fragment does not count in the average of this fragment. A rank at the end of the `with` block
    takes part in averages until all ranks have reached the end. Afterwards the models of all ranks are equal.

    `state_dict()` contains this rank's step counts since the last averages. In an elastic job, pass the `LocalSGD`
    object to `hvd.elastic.TorchState` by keyword.

    Attributes:
        sync_every: optimizer steps between two averages of a parameter. May change if it is tuned.
        delay: optimizer steps between sending a fragment (part of the model) and merging its average. May change if it
            is tuned.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int | None = 8,
        *,
        fragments: int | Sequence[nn.Module] | None = None,
        delay: int | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Check the arguments and divide the model into fragments (parts that are averaged in turn). Not collective.

        Training is unchanged until the `with` block begins.

        Args:
            model: a plain module, equal on all ranks.
            optimizer: optimizer of parameters of `model`. Parameters that it does not update are not averaged.
            sync_every: optimizer steps between two averages of a parameter. None for the smallest number with which
                communication takes no longer than the training during it. Rank 0 measures this number, and adapts it
                when the network changes.
            fragments: number of parts of about equal size into which the model is divided, or a list of modules, each
                of which is a part. The parts are sent in turn. None for 1, or 4 if `sync_every` is None.
            delay: optimizer steps for which training continues while a part is averaged. Merging the average keeps the
                updates that the rank makes meanwhile. At most `sync_every / fragments`. With 0, `step()` waits for the
                average. Tuned if `sync_every` is None.
            process_set: ranks whose models are averaged.

        Raises:
            ConfigError: an argument is invalid, or DDP or a DistributedOptimizer averages the gradients already.
        """
        name = type(self).__name__
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"hvd.{name} requires a plain model, not DistributedDataParallel, which averages gradients every step; "
                "pass its .module"
            )
        recipe = getattr(optimizer, "_recipe", None)
        if isinstance(optimizer, Distributed) and (recipe is None or recipe.process_set is global_process_set):
            raise ConfigError(
                f"hvd.{name} requires a plain optimizer, not a DistributedOptimizer, which averages gradients every "
                "step; pass the optimizer that was wrapped"
            )
        self._model, self._optimizer, self._process_set = model, optimizer, process_set
        self._optimized = [id(param) for param in _params_of(optimizer)]
        count = (1 if sync_every else TUNED_FRAGMENTS) if fragments is None else fragments
        self._fragments = _divided(model, optimizer, count)
        self._tunes = sync_every is None
        n = len(self._fragments)
        if sync_every is None:
            if delay is not None:
                raise ConfigError(
                    "delay= cannot be used with sync_every=None, because Sirtaki then tunes both; pass a number as "
                    "sync_every=, or remove delay="
                )
            self._interval = self.delay = FIRST_INTERVAL
        else:
            valid = sync_every > 0 and sync_every % n == 0
            require(valid, "sync_every", f"a positive multiple of the {n} fragments of the model", sync_every)
            self._interval, self.delay = sync_every // n, delay or 0
            most = self._interval
            require(0 <= self.delay <= most, "delay", f"0 to {most} (sync_every / number of fragments)", self.delay)
        # Index of the fragment (part of the model) to send next, and optimizer steps since a fragment was last sent.
        self._turn = self._steps = 0
        self._begun = False  # Whether ranks have trained separately, so that their parameters may differ.
        self._flight: _Flight | None = None
        self._name = ""  # Prefix of the names of this object's collectives.
        self._hook: Any = None  # Handle of the optimizer's post-step hook inside the block. It has no type in PyTorch.
        # Measurements of rank 0, from which it tunes the interval between fragments: duration of each training step
        # without the time spent in this class, end of the last step, and communication time of each fragment.
        self._step_s: deque[float] = deque(maxlen=16)
        self._left_s: float | None = None
        self._travel_s: deque[float] = deque(maxlen=len(self._fragments))
        self._n_timed, self._next = 0, _Tail()

    @property
    def sync_every(self) -> int:
        """Return the number of optimizer steps between two averages of a parameter. May change if it is tuned."""
        return self._interval * len(self._fragments)

    # ── the block ────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        """Check that the models of all ranks are equal, and begin to count the optimizer's steps. Collective.

        Raises:
            ConfigError: the ranks begin with different parameter values, or a DistributedOptimizer averages the
                gradients.
            MismatchError: the models differ in their parameters' names, shapes or dtypes. Raised on all ranks.
        """
        if self._hook is not None:
            raise ConfigError(
                f"this hvd.{type(self).__name__} object is in use; its `with` block must end before the object is "
                "used again"
            )
        self._drop()
        engine_of(self._process_set)  # Raise an error if this rank is not in the process set.
        current, number = job.current(), require_opened(self._process_set).number
        members = current.rank_sets.members(number)
        named = [each for fragment in self._fragments for each in zip(fragment.names, fragment.params, strict=True)]
        ids = {id(param) for _, param in named}
        for reducer in reducers_of(current):
            shared = sorted(set(reducer.ranks) & set(members.ranks))
            if len(shared) > 1 and any(id(param) in ids for _, param in reducer.named):
                raise ConfigError(
                    f"a DistributedOptimizer averages the model's gradients over ranks {shared} at every step, so "
                    f"hvd.{type(self).__name__} has no effect; close() or remove the DistributedOptimizer"
                )
        assert members.control is not None
        require_same_model(members.control, named)
        equal = self._equal_on_all_ranks()
        received: list[list[float] | None] = members.control.all_gather(checksums(equal).tolist() if equal else None)
        if differing := [rank for rank, there in enumerate(received) if there is not None and there != received[0]]:
            raise ConfigError(
                f"hvd.{type(self).__name__} cannot begin, because ranks 0 and {differing[0]} begin with different "
                "parameters; call hvd.broadcast_parameters(model.state_dict(), root_rank=0) first"
            )
        self._name = f"local_sgd.{next(current.serials[number])}"
        self._left_s = None
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Call `synchronize` unless the block raised an exception. Stop counting the optimizer's steps. Collective."""
        try:
            if kind is None:
                self.synchronize()
        finally:
            self._hook.remove()
            self._hook = None

    def synchronize(self) -> None:
        """Average the whole model over the ranks now, without waiting for `sync_every` steps.

        Collective, inside the `with` block.

        Afterwards the parameters of all ranks are equal. Ranks may call this after different numbers of steps. A rank
        that waits here takes part in the averages of the ranks that still train.

        Raises:
            HorovodInternalError: a rank is lost.
        """
        self._require_inside()
        if self._flight is not None:
            self._merge()
        size = engine_of(self._process_set).size
        together = 0
        while together < size:
            last = self._turn
            self._send(leaving=True)
            together = round(self._merge().leaving)
        while self._turn != last:
            self._send(leaving=True)
            self._merge()
        self._settle()
        self._steps = 0

    def _require_inside(self) -> None:
        if self._hook is None:
            name = type(self).__name__
            raise ConfigError(
                f"synchronize() of hvd.{name} must be called inside its `with` block; put "
                f"`with hvd.{name}(model, optimizer):` around the training loop"
            )

    @outside_changes
    @torch.no_grad()
    # PyTorch passes the optimizer and the arguments of `step()`, which are not used.
    def _after_step(self, *_: Any) -> None:
        """Count a step of the optimizer.

        If it is time, merge the average of the fragment that was sent, and send the next one.

        A fragment is a part of the model. PyTorch calls this hook after `optimizer.step()`.
        """
        if self._left_s is not None:
            self._step_s.append(time.perf_counter() - self._left_s)
        self._begun = True
        self._steps += 1
        for fragment in self._fragments:
            fragment.steps += 1
        if self._flight is not None:
            if self._flight.travel_s is None and poll(self._flight.handle):
                self._flight.travel_s = time.perf_counter() - self._flight.sent_s
            if self._steps >= self.delay:
                self._merge()
        if self._steps >= self._interval:
            self._send()
            if self.delay == 0:
                self._merge()
        self._left_s = time.perf_counter()

    # ── sending and merging of fragments ─────────────────────────────────────────────────────────────────────────

    @outside_changes
    @torch.no_grad()
    def _send(self, *, leaving: bool = False) -> None:
        """Launch the all-reduce of the next fragment (part of the model). Non-blocking.

        Args:
            leaving: whether this rank waits in `synchronize`. The other ranks learn this from the sum of the values
                that the ranks append to the fragment.

        Raises:
            ConfigError: the parameters of the model or the optimizer have changed since `__init__`.
        """
        if [id(param) for param in _params_of(self._optimizer)] != self._optimized or not (
            {id(param) for fragment in self._fragments for param in fragment.params}
            <= {id(param) for param in self._model.parameters()}
        ):
            raise ConfigError(
                "the parameters of the model or the optimizer have changed since "
                f"hvd.{type(self).__name__} was created; end its `with` block before the change, and create a new "
                "object after the change"
            )
        fragment = self._fragments[self._turn]
        weight = float(fragment.steps > 0)
        tuned, self._next = self._next, _Tail()
        tail = _Tail(weight, float(leaving), tuned.interval, tuned.delay)
        sent = _flat(self._outgoing(fragment), tail)
        outgoing = sent if weight else [torch.zeros_like(flat) for flat in sent]
        outgoing[0][-len(tail) :] = sent[0][-len(tail) :]
        handle = grouped_allreduce_async(
            outgoing, name=f"{self._name}.{self._turn}", op=Sum, process_set=self._process_set
        )
        self._flight = _Flight(fragment, handle, sent, fragment.steps, time.perf_counter())
        fragment.steps = self._steps = 0

    @outside_changes
    @torch.no_grad()
    def _merge(self) -> _Tail:
        """Wait for the all-reduce of the fragment (part of the model) that was sent, and merge the average.

        Returns:
            The sum over ranks of the values that each rank has appended to the fragment.
        """
        flight = self._flight
        assert flight is not None
        results: list[torch.Tensor] = synchronize(flight.handle)
        travel_s = time.perf_counter() - flight.sent_s if flight.travel_s is None else flight.travel_s
        self._flight, self._turn = None, (self._turn + 1) % len(self._fragments)
        tail = _Tail(*results[0][-len(_Tail()) :].tolist())
        if tail.weight:
            like = [*flight.fragment.params, *flight.fragment.buffers]
            averages = _parts([flat.div_(tail.weight) for flat in results], like)
            self._take(flight.fragment, averages, _parts(flight.sent, like))
        if tail.interval:
            self._interval, self.delay = round(tail.interval), round(tail.delay)
        if self._tunes and not tail.leaving and engine_of(self._process_set).rank == 0:
            self._tune(travel_s)
        return tail

    def _equal_on_all_ranks(self) -> list[torch.Tensor]:
        """Return the tensors that must be equal on all ranks when a `with` block begins.

        Before the first block, these are the parameters. After ranks have trained separately, the list is empty.
        """
        return [] if self._begun else [param for fragment in self._fragments for param in fragment.params]

    def _outgoing(self, fragment: _Fragment) -> list[torch.Tensor]:
        """Return the parameters and buffers of a fragment (part of the model), which the all-reduce must average."""
        return [_wire(tensor) for tensor in (*fragment.params, *fragment.buffers)]

    def _take(self, fragment: _Fragment, averages: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        """Write averages to the parameters and buffers of a fragment (part of the model).

        Add the changes that this rank has made since it sent the fragment.

        Args:
            fragment: the fragment whose tensors are written.
            averages: averages over ranks, in the order of the fragment's parameters and buffers.
            sent: values that this rank sent, in the same order. The changes are relative to these values.
        """
        for tensor, average, before in zip((*fragment.params, *fragment.buffers), averages, sent, strict=True):
            _write(tensor, average.add_(_wire(tensor) - before))

    def _settle(self) -> None:
        """Make the parameters of all ranks equal. Called by `synchronize` after it has merged all fragments.

        Does nothing for LocalSGD, because the merged averages are equal on all ranks already.
        """

    # ── tuning of the interval ───────────────────────────────────────────────────────────────────────────────────

    def _tune(self, travel_s: float) -> None:
        """Choose the interval between sending two fragments (parts of the model) from their communication time.

        Rank 0 only.

        Rank 0 appends the chosen interval to the next fragment, so that all ranks learn it.

        Args:
            travel_s: communication time of the last fragment in seconds.
        """
        if not self._step_s:
            return
        step_s, count = max(median(self._step_s), 1e-6), len(self._fragments)
        self._travel_s.append(travel_s)
        self._n_timed += 1
        if self._n_timed <= 2 * count:  # Ignore the times of the first fragments, which include opening connections.
            return
        needed = max(self._travel_s) / step_s
        delay = min(max(1, math.ceil(MARGIN * needed)), LONGEST // count)
        if SHORTER * self.delay <= delay <= self.delay:
            return
        interval = max(delay, math.ceil(SHORTEST / count))
        self._next = _Tail(interval=interval, delay=delay)
        logger.info(
            "hvd.%s averages the model in %d parts, one part every %d steps, so the whole model every %d steps; "
            "averaging one part takes up to %.3g ms (%.1f training steps)%s",
            type(self).__name__,
            count,
            interval,
            interval * count,
            1e3 * step_s * needed,
            needed,
            "" if MARGIN * needed <= delay else ", which is too long to overlap with training",
        )

    # ── state dict ───────────────────────────────────────────────────────────────────────────────────────────────

    def _drop(self) -> None:
        """Discard the all-reduce of the fragment (part of the model) that was sent, without merging its result.

        The next step sends the fragment again.

        Called when a `with` block begins or a state is loaded, because an exception may have ended the last block
        early.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.fragment.steps += flight.steps
            self._steps = self._interval  # Make the next step send the fragment again.
            with suppress(CommError):
                synchronize(flight.handle)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step counts, and the index of the fragment (part of the model) to send next.

        Not collective.

        A fragment whose all-reduce has not been merged yet is sent again after the state has been loaded.
        """
        flying = self._flight
        steps = [
            there.steps + (flying.steps if flying and flying.fragment is there else 0) for there in self._fragments
        ]
        return {
            "begun": self._begun,
            "turn": self._turn,
            "steps": self._interval if flying else self._steps,
            "steps_of": steps,
            "interval": self._interval,
            "delay": self.delay,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` has returned for the same fragments (parts of the model).

        Discard the all-reduce that is running now.

        Raises:
            ConfigError: the state belongs to another model or to other fragments.
        """
        if len(state["steps_of"]) != len(self._fragments):
            raise ConfigError(
                f"the state to load has {len(state['steps_of'])} fragments (parts of the model), but this "
                f"hvd.{type(self).__name__} has {len(self._fragments)}; pass the fragments= of the saved state"
            )
        self._drop()
        self._begun, self._turn, self._steps = state["begun"], state["turn"], state["steps"]
        for fragment, steps in zip(self._fragments, state["steps_of"], strict=True):
            fragment.steps = steps
        if self._tunes:
            self._interval, self.delay = state["interval"], state["delay"]


class DiLoCo(LocalSGD):
    """Variant of `LocalSGD` in which the ranks average their changes of the parameters.

    The average is the gradient of an outer optimizer, which updates the parameters.

        with hvd.DiLoCo(model, torch.optim.AdamW(model.parameters(), 1e-3), sync_every=32):
            …  # the training loop

    Each rank also keeps the parameters of the last synchronisation, in float32 or float64, and the outer optimizer's
    state. `state_dict()` contains both.

    Attributes:
        outer: the outer optimizer, which updates the parameters of the last synchronisation. Learning rate schedulers
            may change it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int | None = 16,
        *,
        outer: torch.optim.Optimizer | None = None,
        fragments: int | Sequence[nn.Module] | None = None,
        delay: int | None = None,
        blend: float = 0.0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Check the arguments and create the outer optimizer. Not collective.

        Args:
            model: a plain module, equal on all ranks.
            optimizer: inner optimizer, which updates parameters of `model` in each step. AdamW in the paper.
            sync_every: optimizer steps between two averages of a parameter. None to tune it: the smallest number with
                which communication takes no longer than the training during it.
            outer: outer optimizer, created over the same parameters as `optimizer`. It is changed to update this
                object's copies of the parameters instead. None for SGD with the paper's learning rate of 0.7 and a
                Nesterov momentum of 0.7, because the paper's momentum of 0.9 needs hundreds of outer steps.
            fragments: number of parts into which the model is divided, or a list of modules, each of which is a part.
                None for 1, or 4 if `sync_every` is None.
            delay: optimizer steps for which training continues while a part of the model is averaged. At most
                `sync_every / fragments`. Tuned if `sync_every` is None.
            blend: weight of a rank's own parameters when an average is merged, from 0 to below 1. This is the alpha of
                Streaming DiLoCo, which uses 0.5. With 0, the rank loses the updates that it has made during the delay.
            process_set: ranks whose models are averaged.

        Raises:
            ConfigError: an argument is invalid, or DDP or a DistributedOptimizer averages the gradients already.
        """
        super().__init__(model, optimizer, sync_every, fragments=fragments, delay=delay, process_set=process_set)
        require(0.0 <= blend < 1.0, "blend", "at least 0 and less than 1", blend)
        self._blend = blend
        for fragment in self._fragments:
            fragment.origins = [_wire(param).clone() for param in fragment.params]
        self._origins = [origin for fragment in self._fragments for origin in fragment.origins]
        if outer is None:
            self.outer: torch.optim.Optimizer = torch.optim.SGD(self._origins, lr=0.7, momentum=0.7, nesterov=True)
        else:
            self.outer = outer
            self._hand_over(outer)

    def _hand_over(self, outer: torch.optim.Optimizer) -> None:
        """Make the outer optimizer update this object's copies of the parameters, instead of the model's parameters.

        Args:
            outer: the user's outer optimizer, changed in place.
        """
        if not isinstance(outer, torch.optim.Optimizer):
            raise ConfigError(
                f"outer= of hvd.DiLoCo must be a torch.optim.Optimizer of the model's parameters, not {outer!r:.200}"
            )
        params = [param for fragment in self._fragments for param in fragment.params]
        kept = {id(param): origin for param, origin in zip(params, self._origins, strict=True)}
        if {id(param) for param in _params_of(outer)} != kept.keys():
            raise ConfigError(
                "optimizer= and outer= of hvd.DiLoCo must optimize the same tensors; create both optimizers from the "
                "same model.parameters()"
            )
        for group in outer.param_groups:
            group["params"] = [kept[id(param)] for param in group["params"]]
        for param in list(outer.state):
            outer.state[kept[id(param)]] = outer.state.pop(param)

    def _equal_on_all_ranks(self) -> list[torch.Tensor]:
        if not self._begun:
            for fragment in self._fragments:
                # Copy the parameters again, because the model may have been broadcast since `__init__`.
                for param, origin in zip(fragment.params, fragment.origins, strict=True):
                    origin.copy_(_wire(param))
        return self._origins

    def _outgoing(self, fragment: _Fragment) -> list[torch.Tensor]:
        moved = [origin - _wire(param) for param, origin in zip(fragment.params, fragment.origins, strict=True)]
        return [*moved, *map(_wire, fragment.buffers)]

    def _take(self, fragment: _Fragment, averages: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        count = len(fragment.params)
        for origin, average in zip(fragment.origins, averages[:count], strict=True):
            origin.grad = average
        self.outer.step()
        for param, origin in zip(fragment.params, fragment.origins, strict=True):
            origin.grad = None
            _write(param, origin.lerp(_wire(param), self._blend) if self._blend else origin)
        super()._take(_Fragment(buffers=fragment.buffers), averages[count:], sent[count:])

    @outside_changes
    @torch.no_grad()
    def _settle(self) -> None:
        for fragment in self._fragments:
            # With `blend`, each rank has kept a part of its own parameters. Overwrite them with equal values.
            for param, origin in zip(fragment.params, fragment.origins, strict=True):
                _write(param, origin)

    def state_dict(self) -> dict[str, Any]:
        """Return step counts, the parameters of the last synchronisation, and the outer optimizer's state."""
        return {**super().state_dict(), "origins": self._origins, "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load step counts, the parameters of the last synchronisation, and the outer optimizer's state.

        Discard an all-reduce that is running now.

        Raises:
            ConfigError: the state belongs to another model or to other fragments.
        """
        shapes = [origin.shape for origin in self._origins]
        if [origin.shape for origin in state["origins"]] != shapes:
            raise ConfigError(
                "the state to load was saved by an hvd.DiLoCo with another model or other fragments= (parts of the "
                "model); create this hvd.DiLoCo with the same model and fragments="
            )
        super().load_state_dict(state)
        with torch.no_grad():
            for origin, loaded in zip(self._origins, state["origins"], strict=True):
                origin.copy_(loaded)
        load_optimizer_state(self.outer, state["outer"])


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _divided(
    model: nn.Module, optimizer: torch.optim.Optimizer, fragments: int | Sequence[nn.Module]
) -> list[_Fragment]:
    """Divide trained parameters and floating-point buffers into fragments (parts of the model), in the model's
    order.

    Raises:
        ConfigError: a parameter is a DTensor, the optimizer has parameters that the model lacks, or `fragments` is
            invalid.
    """
    trained = {id(param) for param in _params_of(optimizer)}
    items: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, module in model.named_modules():
        own = [(name, param) for name, param in module._parameters.items() if id(param) in trained]
        own += [
            (name, there) for name, there in module._buffers.items() if name not in module._non_persistent_buffers_set
        ]
        for name, tensor in own:
            if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
                items.setdefault(id(tensor), (f"{prefix}.{name}".lstrip("."), tensor))
    if whole := [name for name, tensor in items.values() if is_dtensor(tensor)]:
        raise ConfigError(
            "hvd.LocalSGD and hvd.DiLoCo do not support DTensors (sharded over ranks) such as the parameter "
            f"{whole[0]}; use hvd.DistributedOptimizer"
        )
    if left_out := len(trained - items.keys()):
        raise ConfigError(
            f"the optimizer has {left_out} parameters that the model does not have; pass the model that this optimizer "
            "trains"
        )
    place: dict[int, int] = {}
    if isinstance(fragments, int):
        require(fragments > 0, "fragments", "a positive number of parts of the model, or a list of modules", fragments)
        sizes = [tensor.numel() * tensor.itemsize for _, tensor in items.values()]
        for key, size, end in zip(items, sizes, accumulate(sizes), strict=True):
            place[key] = fragments * (2 * end - size) // (2 * sum(sizes) + 1)
        divided = [_Fragment() for _ in range(fragments)]
    else:
        divided = [_Fragment() for _ in fragments]
        for number, module in enumerate(fragments):
            place |= {
                id(there): number for there in (*module.parameters(), *module.buffers()) if id(there) not in place
            }
        if outside := [name for key, (name, _) in items.items() if key not in place]:
            raise ConfigError(
                "the modules in fragments= must cover the model, but its parameter or buffer "
                f"{outside[0]} is in none of them"
            )
    for key, (name, tensor) in items.items():
        fragment = divided[place[key]]
        if key in trained:
            fragment.names.append(name)
            fragment.params.append(tensor)
        else:
            fragment.buffers.append(tensor)
    return divided


# ── conversion of tensors ─────────────────────────────────────────────────────────────────────────────────────────────


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a parameter or buffer to the tensor that is sent, which is real and float32 or float64.

    May return a view.
    """
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.double() if real.dtype is torch.float64 else real.float()


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a received real float32 or float64 tensor to a parameter or buffer of any dtype."""
    (torch.view_as_real(tensor) if tensor.is_complex() else tensor).copy_(value)


def _flat(values: Sequence[torch.Tensor], tail: _Tail) -> list[torch.Tensor]:
    """Concatenate the values of a fragment and its `tail` to 1-d tensors, to send them.

    The first tensor has the float32 values and the tail, the second one has the float64 values, if there are any.
    """
    device = values[0].device if values else "cpu"
    singles = [value.reshape(-1).to(device) for value in values if value.dtype is torch.float32]
    doubles = [value.reshape(-1).to(device) for value in values if value.dtype is torch.float64]
    last = torch.tensor(tail, dtype=torch.float32, device=device)
    return [torch.cat([*singles, last]), *([torch.cat(doubles)] if doubles else [])]


def _parts(flats: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split the 1-d tensors that `_flat` has concatenated into tensors with the shapes and devices of `like`."""
    parts, starts = list[torch.Tensor](), [0, 0]
    for tensor in like:
        shape = torch.view_as_real(tensor).shape if tensor.is_complex() else tensor.shape
        number = int(tensor.dtype in (torch.float64, torch.complex128))
        start, starts[number] = starts[number], starts[number] + shape.numel()
        parts.append(flats[number][start : starts[number]].view(shape).to(tensor.device))
    return parts
