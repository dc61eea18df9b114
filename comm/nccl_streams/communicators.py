"""A pool of communicators: one for each stream and number of CTAs that plans ask for, opened by all ranks together.

NCCL fixes CTAs when a communicator is made, and communicators take memory on the GPU: what is open, what is closed for
it, and in which order, must be the same on all ranks, and needs no GPU to be tested.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.errors import CommError, PlanError

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.1
"""Of the GPU's memory, what communicators may take together; a plan that needs more is refused."""


class Scope(Enum):
    """Which ranks a communicator joins."""

    ALL = "all"
    NODE = "node"  # those of this rank's node
    ACROSS = "across"  # those with this rank's local rank, one a node


@dataclass(frozen=True, slots=True)
class CommunicatorKey:
    """What makes two communicators differ.

    Attributes:
        stream: on which its operations run.
        ctas: thread blocks of each of its operations; None = NCCL decides.
        scope: the ranks.
    """

    stream: int
    ctas: int | None = None
    scope: Scope = Scope.ALL

    def __str__(self) -> str:
        ctas = "" if self.ctas is None else f" with {self.ctas} CTAs"
        scope = "" if self.scope is Scope.ALL else f" ({self.scope.value})"
        return f"stream {self.stream}{ctas}{scope}"


class GroupWork(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """The current stream waits for it, not the caller."""
        ...

    def is_completed(self) -> bool:
        """Whether it is done; never waits."""
        ...


class Group(Protocol):
    """One communicator with a stream of its own. Operations wait for the current stream, and then run on theirs."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        """Reduces in place."""
        ...

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> GroupWork | None:
        """Adds up in place, times `scale`; None, and nothing happens, if that cannot be done in one."""
        ...

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        """Reduces `tensor`, `(ranks * share.numel(),)`, of which this rank gets its share."""
        ...

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> GroupWork:
        """Puts all ranks' shares one after the other into `tensor`, `(ranks * share.numel(),)`."""
        ...

    def error(self) -> str:
        """What has gone wrong by itself, in words; empty while all is well. Any thread may ask."""
        ...

    def close(self) -> None:
        """Collective, with nothing in flight: frees it."""
        ...


class Opener(Protocol):
    """Makes communicators, and knows what may be made.

    Attributes:
        max_streams: that may run at the same time.
        threads: GPU threads that a unit may be allowed.
    """

    max_streams: int
    threads: tuple[int, ...]

    def open(self, key: CommunicatorKey) -> Group:
        """Collective over the scope's ranks, and all ranks do it at the same time.

        Raises:
            CommError: the ranks cannot connect.
        """
        ...

    def memory_bytes(self) -> tuple[int, int]:
        """The device's memory: (free, all)."""
        ...


class CommunicatorPool:
    """The communicators that are open; those that were needed longest ago are closed for others.

    Attributes:
        limit: so many may be open.
    """

    def __init__(self, opener: Opener, *, limit: int, worst: Callable[[float], float]) -> None:
        """Opens nothing.

        Args:
            opener: makes communicators.
            limit: so many may be open.
            worst: collective: the largest of the ranks' values.
        """
        self._opener, self.limit, self._worst = opener, limit, worst
        self._open: OrderedDict[CommunicatorKey, Group] = OrderedDict()  # longest unused first
        self._per_stream: Counter[tuple[int, Scope]] = Counter()
        self._taken_share = 0.0  # of the memory, by all that are open, on the rank where it is most

    def __getitem__(self, key: CommunicatorKey) -> Group:
        return self._open[key]

    def __len__(self) -> int:
        return len(self._open)

    def keys(self) -> tuple[CommunicatorKey, ...]:
        """What is open, longest unused first."""
        return tuple(self._open)

    def count(self, stream: int, scope: Scope) -> int:
        """Of how many numbers of CTAs communicators are open for this stream."""
        return self._per_stream[stream, scope]

    def require(self, keys: Sequence[CommunicatorKey]) -> None:
        """Collective, with nothing in flight: opens those of `keys` that are not open, in their order.

        Raises:
            PlanError: on all ranks: so many cannot be open at once, or they would take too much memory.
            CommError: the ranks cannot connect.
        """
        wanted = list(dict.fromkeys(keys))
        if len(wanted) > self.limit:
            raise PlanError(f"the plan needs {len(wanted)} communicators; at most {self.limit} are kept open")
        for key in wanted:
            if key in self._open:
                self._open.move_to_end(key)
        for key in wanted:
            if key not in self._open:
                self._make_room(wanted, key)
                self._open[key] = self._make(key)
                self._per_stream[key.stream, key.scope] += 1

    def _make(self, key: CommunicatorKey) -> Group:
        free_before, total = self._opener.memory_bytes()
        group = self._opener.open(key)
        taken = (free_before - self._opener.memory_bytes()[0]) / total
        self._taken_share += max(0.0, self._worst(taken))
        logger.debug("NCCL %s is open; %d in all, %.1f %% of memory", key, len(self._open) + 1, 100 * self._taken_share)
        return group

    def _make_room(self, wanted: Sequence[CommunicatorKey], key: CommunicatorKey) -> None:
        while len(self._open) >= self.limit or (self._open and self._expected_share() > MEMORY_SHARE):
            unused = next((other for other in self._open if other not in wanted), None)
            if unused is None:
                raise PlanError(
                    f"the communicators of this plan would take {self._expected_share():.0%} of the GPU's memory "
                    f"with {key}; at most {MEMORY_SHARE:.0%} is used for them"
                )
            self._close(unused)

    def _expected_share(self) -> float:
        """Of memory, once one more like those that are open is open, too."""
        return self._taken_share * (len(self._open) + 1) / len(self._open)

    def _close(self, key: CommunicatorKey) -> None:
        self._taken_share -= self._taken_share / len(self._open)
        self._open.pop(key).close()
        self._per_stream[key.stream, key.scope] -= 1
        logger.debug("NCCL %s is closed", key)

    def keep_only(self, keys: Iterable[CommunicatorKey]) -> None:
        """Collective, with nothing in flight: closes all others."""
        kept = set(keys)
        for key in [key for key in self._open if key not in kept]:
            self._close(key)

    def check(self) -> None:
        """Raises what has gone wrong by itself in any of them; any thread may ask.

        Raises:
            CommError: naming the communicator.
        """
        for key, group in list(self._open.items()):
            if error := group.error():
                raise CommError(f"NCCL failed on {key}: {error}")

    def close(self) -> None:
        """Closes all of them."""
        self.keep_only(())
