"""One DistributedOptimizer on all ranks, in one process, and what no script may do with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .program import OptimizerSpec
from .replica import Optimizer


class IllegalError(Exception):
    """No script may do this now. Raised before anything has changed."""


def legal(condition: bool, why: str) -> None:
    """Raises IllegalError unless it is."""
    if not condition:
        raise IllegalError(why)


@dataclass
class Wrapped:
    """One DistributedOptimizer on all ranks.

    Attributes:
        plain: by rank.
        members: ranks that reduce.
        hooked: parameters whose gradients are watched.
        left: by rank, how often each of these must still come.
        complete: all are reduced, and the step has not been made.
        seen: of each parameter, how often it had been reduced when this optimizer last used the result; negative if
            that is unknown, because a backward pass has failed.
        synchronized: `synchronize()` was called, and the step has not been made.
        broken: a backward pass has failed since the last `zero_grad()`.
        replaced: some `.grad` was replaced before it was reduced.
    """

    spec: OptimizerSpec
    plain: list[Optimizer]
    members: tuple[int, ...]
    hooked: set[str] = field(default_factory=set)
    left: list[dict[str, int]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    synchronized: bool = False
    broken: bool = False
    replaced: bool = False

    def begin(self) -> None:
        """Nothing has come yet."""
        self.left = [dict.fromkeys(self.hooked, self.spec.passes) for _ in self.plain]
        self.complete = self.replaced = False

    @property
    def reduced_on_some(self) -> bool:
        """Ranks to which all their gradients have come have reduced them, others have not."""
        came = [not any(self.left[rank].values()) for rank in self.members]
        return bool(self.hooked) and any(came) and not self.complete

    def came(self, name: str) -> bool:
        """On some rank, at least once."""
        return any(left.get(name, self.spec.passes) < self.spec.passes for left in self.left)

    @property
    def pending(self) -> bool:
        """Something has come."""
        return any(self.came(name) for name in self.hooked)
