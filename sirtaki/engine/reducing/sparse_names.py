"""Which gradients are sparse, as all ranks know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from sirtaki.autotune.sparse import SparseSummary
from sirtaki.comm.control.plane import ControlPlane

from ..sparse_gradients import SparseReductions


class KnownSparse:
    """The parameters whose gradients are sparse, as all ranks know. The gradients of the others are sent dense.

    No rank knows before the first backward pass. A rank whose batch did not access an embedding does not know even
    after it.

    Attributes:
        known: names of all parameters that are known to have sparse gradients, watched or not.
        names: the watched ones among them.
        found: names of parameters whose gradient was sparse on this rank, before the ranks have agreed.
        rows: reduces sparse gradients; None as long as no parameter is known.
    """

    def __init__(
        self,
        control: ControlPlane,
        open_rows: Callable[[], SparseReductions],
        *,
        known: Iterable[str] = (),
        as_dense: bool = False,
    ) -> None:
        """Starts nothing.

        Args:
            control: control plane of the participating ranks.
            open_rows: makes `rows`; collective.
            known: names that all ranks know.
            as_dense: sparse gradients are made dense.
        """
        self._control, self._open_rows, self._as_dense = control, open_rows, as_dense
        self.known, self.found, self.names = set(known), set[str](), set[str]()
        self.rows: SparseReductions | None = None
        self._params: Mapping[str, torch.Tensor] = {}

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        """Replace the watched parameters, given by name. Collective, between iterations."""
        self._params = params
        self.names = self.known & params.keys()
        self.found.clear()
        if self.names and self.rows is None:
            self.rows = self._open_rows()
        if self.rows is not None:
            self.rows.watch({name: param for name, param in params.items() if name in self.names})

    def looks_new(self, name: str) -> bool:
        """Return whether other ranks do not know yet that the gradient of this parameter is sparse."""
        return not self._as_dense and name not in self.names

    def as_it_travels(self, name: str) -> torch.Tensor:
        """Return a sparse gradient, made dense in `.grad`, too, unless all ranks expect a sparse one."""
        param = self._params[name]
        assert param.grad is not None
        if name in self.names:
            return param.grad
        if self.looks_new(name):
            self.found.add(name)
        param.grad = param.grad.to_dense()
        return param.grad

    def make_sparse(self, names: Iterable[str]) -> None:
        """Make the dense gradients of these parameters sparse again, as the backward pass has made them."""
        for name in names:
            param = self._params[name]
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)

    def agree(self) -> bool:
        """Make known to all ranks whose gradient was sparse on any rank. Return whether there are any. Collective."""
        names = list(self._params)
        anywhere = self._control.total(np.array([float(name in self.found) for name in names])) > 0
        fresh = {name for name, sparse in zip(names, anywhere, strict=True) if sparse}
        self.make_sparse(fresh)
        self.known |= fresh
        return bool(fresh)

    @property
    def summaries(self) -> list[SparseSummary]:
        """Summaries of the sparse gradients whose algorithm is chosen; see `SparseReductions`."""
        return [] if self.rows is None else self.rows.summaries

    def close(self) -> None:
        """End all threads. Not collective. Idempotent."""
        if self.rows is not None:
            self.rows.close()
