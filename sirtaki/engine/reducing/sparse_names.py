"""The set of parameters with sparse gradients, on which all ranks have agreed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from sirtaki.autotune.sparse import SparseSummary
from sirtaki.comm.control.plane import ControlPlane

from ..sparse_gradients import SparseReductions


class KnownSparse:
    """Set of parameters with sparse gradients, on which all ranks have agreed. All other gradients are sent dense.

    Sparsity is discovered at run time: no rank detects it before the first backward pass, and a rank whose batch does
    not index an embedding does not detect it then either. So the ranks exchange what they found (`agree`) before any
    rank sends a gradient as sparse.

    Attributes:
        known: names of all parameters that all ranks treat as sparse, also of those that are not watched any more.
        names: names in `known` of the parameters that are watched now (given to the last `watch`).
        found: names of parameters whose gradient was sparse on this rank since the last `watch`.
        rows: object that reduces sparse gradients; None while no watched parameter has been sparse.
    """

    def __init__(
        self,
        control: ControlPlane,
        open_rows: Callable[[torch.device], SparseReductions],
        *,
        known: Iterable[str] = (),
        as_dense: bool = False,
    ) -> None:
        """Begin without parameters, which `watch` sets.

        Args:
            control: control plane of the participating ranks.
            open_rows: returns a new object that reduces sparse gradients of parameters on a device. Collective.
            known: names of parameters that all ranks treat as sparse.
            as_dense: True to convert all sparse gradients to dense ones before they are sent.
        """
        self._control, self._open_rows, self._as_dense = control, open_rows, as_dense
        self.known, self.found, self.names = set(known), set[str](), set[str]()
        self.rows: SparseReductions | None = None
        self._params: Mapping[str, torch.Tensor] = {}

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        """Replace the parameters whose gradients may be sparse, given by name. Collective. Call between iterations."""
        self._params = params
        self.names = self.known & params.keys()
        self.found.clear()
        sparse = {name: param for name, param in params.items() if name in self.names}
        places = {param.device for param in sparse.values()}
        place = (
            places.pop() if len(places) == 1 else torch.device("cpu")
        )  # rows of several devices are sent by the host
        if sparse and self.rows is not None:
            # All ranks reopen the object if any rank's parameters were moved, because opening it is collective.
            moved = self._control.maximum(np.array([float(self.rows.place != place)]))[0] > 0
            if moved:
                self.rows.close()
                self.rows = None
                self._control.reclaim()
        if sparse and self.rows is None:
            self.rows = self._open_rows(place)
        if self.rows is not None:
            self.rows.watch(sparse)

    def is_unagreed(self, name: str) -> bool:
        """Return whether the ranks must agree on this parameter before its gradient can be sent as sparse."""
        return not self._as_dense and name not in self.names

    def to_wire_format(self, name: str) -> torch.Tensor:
        """Return a sparse gradient as it is sent: sparse if the parameter is in `names`, otherwise dense.

        If the gradient is sent dense, `.grad` is replaced by the dense gradient.
        """
        param = self._params[name]
        assert param.grad is not None
        if name in self.names:
            return param.grad
        if self.is_unagreed(name):
            self.found.add(name)
        param.grad = param.grad.to_dense()
        return param.grad

    def make_sparse(self, names: Iterable[str]) -> None:
        """Convert the dense `.grad` of these parameters back to the sparse form in which autograd computed it."""
        for name in names:
            param = self._params[name]
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)

    def agree(self) -> bool:
        """Treat as sparse, on all ranks, every parameter whose gradient was sparse on any rank. Collective.

        Return whether any parameter was not treated as sparse before.
        """
        names = list(self._params)
        anywhere = self._control.total(np.array([float(name in self.found) for name in names])) > 0
        fresh = {name for name, sparse in zip(names, anywhere, strict=True) if sparse}
        self.make_sparse(fresh)
        self.known |= fresh
        return bool(fresh)

    @property
    def summaries(self) -> list[SparseSummary]:
        """Summaries of the all-reduce algorithms that were chosen for the sparse gradients."""
        return [] if self.rows is None else self.rows.summaries

    def close(self) -> None:
        """End the threads that reduce sparse gradients. Not collective. Idempotent."""
        if self.rows is not None:
            self.rows.close()
