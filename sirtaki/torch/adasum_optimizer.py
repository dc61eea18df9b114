"""`DistributedOptimizer(op=Adasum)`: combines the ranks' updates instead of their gradients.

Each rank lets the wrapped optimizer make its update from its own gradients, and the differences that it made are
combined by Adasum (Maleki et al., MLSys 2021): where two updates are orthogonal they are added, where they are parallel
they are averaged, so the learning rate need not be scaled with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sirtaki.comm.collectives.rank_sets import GLOBAL
from sirtaki.engine import job
from sirtaki.engine.carried_tuning import key_of

from .compression import Compressor
from .derived_class import Distributed, derive, plain_copy
from .lasting_optimizers import require_attached
from .mpi_ops import Adasum, allreduce_async_, synchronize


class _AdasumDistributed(Distributed):
    """What is mixed into the class of the wrapped optimizer."""

    _named: Sequence[tuple[str, torch.Tensor]]
    _parameter_names: dict[torch.Tensor, str]
    _compression: type[Compressor]
    _serial: int

    @property
    def _signature(self) -> str:
        return f"adasum/{key_of([name for name, _ in self._named], [param for _, param in self._named])}"

    def _attach(self, current: job.Job) -> None:
        size = current.control.size
        if size & (size - 1):
            raise NotImplementedError(f"Adasum needs a number of ranks that is a power of two, not {size}")
        self._serial, self._detached = next(current.serials[GLOBAL]), ""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up on this rank until `step()`, however many backward passes there are.

        Raises:
            ValueError: `passes` is not positive.
        """
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")

    def synchronize(self) -> None:
        """Does nothing: updates are combined, and those are made by `step()`."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not possible.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # Any: as torch
        """Collective: each rank makes its own update; the parameters move by their combination."""
        require_attached(self)
        params = [param for _, param in self._named if param.requires_grad]
        starts = [param.detach().clone() for param in params]
        loss = super().step(closure)
        with torch.no_grad():
            handles = []
            for number, (param, start) in enumerate(zip(params, starts, strict=True)):
                update, context = self._compression.compress(param - start)
                name = f"adasum.{self._serial}.{number}"
                handles.append((allreduce_async_(update, name=name, op=Adasum), context))
            for param, start, (handle, context) in zip(params, starts, handles, strict=True):
                param.copy_(start.add_(self._compression.decompress(synchronize(handle), context)))
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # torch's, set by its schedulers
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's, which stays the same as this one: a scheduler may hold it."""
        super().load_state_dict(state_dict)
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_copy(self, type(self._wrapped))


def wrap_adasum(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]], *, compression: type[Compressor]
) -> Distributed:
    """An optimizer of a class derived from `optimizer`'s that combines updates, once it is attached to ranks.

    Args:
        optimizer: the optimizer to wrap.
        named: all its parameters.
        compression: how updates travel.
    """
    distributed = derive(_AdasumDistributed, optimizer)
    distributed._named, distributed._compression = named, compression
    distributed._parameter_names = {param: name for name, param in named}
    return distributed
