"""Sparse gradients of one optimizer: their indices and values are gathered from all ranks and added up.

A module of its own because sparse gradients go past the flat buffers. Which parameters have them is not known before
the first backward pass, and a rank whose batch did not touch an embedding does not know it even then: the ranks agree
in an order-profiling iteration (`GradientReducer`), in which such gradients are held back here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from sirtaki.comm.collectives.engine import EagerEngine
from sirtaki.comm.collectives.sparse import start_sparse_sum
from sirtaki.comm.gradients.buffers import Reduction


class SparseReductions:
    """The sparse gradients of one optimizer on one rank.

    Attributes:
        names: parameters of which all ranks know that their gradients are sparse.
    """

    def __init__(self, prefix: str, reduction: Reduction, engine: EagerEngine) -> None:
        """`prefix` of the operations' names; `engine`: of the ranks that take part."""
        self._prefix, self._engine = prefix, engine
        self._factor = reduction.prescale * reduction.postscale
        self.names: set[str] = set()
        self._held: dict[str, torch.Tensor] = {}
        self._running: dict[str, Callable[[], torch.Tensor]] = {}

    @property
    def pending(self) -> bool:
        """A sparse gradient of this iteration has come."""
        return bool(self._held or self._running)

    @property
    def missing(self) -> set[str]:
        """Parameters whose gradients are known to be sparse and have not come in this iteration."""
        return self.names - self._running.keys()

    def start(self, name: str, gradient: torch.Tensor) -> None:
        """A sparse gradient is complete: it is sent, or held back if not all ranks expect it yet."""
        if name in self.names:
            self._launch(name, gradient)
        else:
            self._held[name] = gradient

    def hold_back(self, params: Mapping[str, torch.Tensor]) -> set[str]:
        """Takes held gradients away from their parameters; returns the names of these."""
        for name in self._held:
            params[name].grad = None
        return set(self._held)

    def _launch(self, name: str, gradient: torch.Tensor) -> None:
        rows = gradient.detach()
        if not rows.is_sparse or rows.sparse_dim() != 1:
            rows = rows.to_dense().to_sparse(1)
        self._running[name] = start_sparse_sum(self._engine, rows, f"{self._prefix}.{name}", by_all=True)

    def finish(self, params: Mapping[str, torch.Tensor], agreed_now: Iterable[str]) -> None:
        """Collective: blocks until all sparse gradients are reduced and in `.grad`, coalesced.

        Args:
            params: by name.
            agreed_now: names that were not known to all when this iteration began. What came dense of these has been
                reduced with the others, and is added.
        """
        fresh = set(agreed_now)
        for name in sorted(self.names - self._running.keys()):
            gradient = self._held.get(name) if name in fresh else params[name].grad
            self._launch(name, _no_rows(params[name]) if gradient is None else gradient)
        for name in sorted(self._running):
            total = (self._running[name]() * self._factor).coalesce()
            param = params[name]
            dense = param.grad if name in fresh else None
            param.grad = dense + total if dense is not None and bool(dense.any()) else total
        self._running.clear()
        self._held.clear()


def _no_rows(param: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of a parameter that was not used."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = param.new_empty((0, *param.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)
