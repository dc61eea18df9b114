"""Which gradients are sparse, as all ranks know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from sirtaki.autotune.sparse import SparseSummary
from sirtaki.comm.control.plane import ControlPlane

from ..sparse_gradients import SparseReductions


class KnownSparse:
    """Which gradients of one reducer are sparse, as far as all ranks know it: the others travel dense.

    Nobody knows it before the first backward pass, and a rank whose batch did not touch an embedding does not know it
    even then.

    Attributes:
        known: parameters of which all ranks know it, whether or not they are watched now.
        names: those that are watched.
        found: parameters of which this rank has seen it, and all ranks have not yet agreed.
        rows: what reduces sparse gradients; None as long as none is known.
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
            control: the ranks that take part.
            open_rows: collective; makes `rows`.
            known: see above.
            as_dense: sparse gradients are made dense.
        """
        self._control, self._open_rows, self._as_dense = control, open_rows, as_dense
        self.known, self.found, self.names = set(known), set[str](), set[str]()
        self.rows: SparseReductions | None = None
        self._params: Mapping[str, torch.Tensor] = {}

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        """Collective, between iterations: from now on, these parameters get gradients, by name."""
        self._params = params
        self.names = self.known & params.keys()
        self.found.clear()
        if self.names and self.rows is None:
            self.rows = self._open_rows()
        if self.rows is not None:
            self.rows.watch({name: param for name, param in params.items() if name in self.names})

    def looks_new(self, name: str) -> bool:
        """Whether it would be news to other ranks that the gradient of this parameter is sparse."""
        return not self._as_dense and name not in self.names

    def as_it_travels(self, name: str) -> torch.Tensor:
        """The sparse gradient of a parameter, made dense, in `.grad`, too, unless all ranks expect a sparse one."""
        param = self._params[name]
        assert param.grad is not None
        if name in self.names:
            return param.grad
        if self.looks_new(name):
            self.found.add(name)
        param.grad = param.grad.to_dense()
        return param.grad

    def make_sparse(self, names: Iterable[str]) -> None:
        """Gradients of these parameters that have travelled dense are what the backward pass made them."""
        for name in names:
            param = self._params[name]
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)

    def agree(self) -> bool:
        """Collective: parameters whose gradient was sparse on any rank are known as such to all; True if any were."""
        names = list(self._params)
        anywhere = self._control.total(np.array([float(name in self.found) for name in names])) > 0
        fresh = {name for name, sparse in zip(names, anywhere, strict=True) if sparse}
        self.make_sparse(fresh)
        self.known |= fresh
        return bool(fresh)

    @property
    def summaries(self) -> list[SparseSummary]:
        """How the gradients travel whose way is decided; see `SparseReductions`."""
        return [] if self.rows is None else self.rows.summaries

    def close(self) -> None:
        """Not collective: ends all threads. Idempotent."""
        if self.rows is not None:
            self.rows.close()
