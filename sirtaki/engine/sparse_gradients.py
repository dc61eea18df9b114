"""Sparse gradients of one optimizer: the rows of all ranks are added up, each parameter's by its `SparsePlan`.

They go past the flat buffers. Which parameters have them is not known before the first backward pass, and a rank whose
batch did not touch an embedding does not know it even then: until the ranks have agreed on it (`GradientReducer`), such
gradients travel dense.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.autotune.sparse import SparseSummary
from sirtaki.comm.control.failure import WAIT_SLICE_S
from sirtaki.comm.gradients.buffers import REMEDY, Reduction
from sirtaki.comm.gradients.iteration import Interrupted
from sirtaki.comm.sparse.worker import Rows, SparseWork
from sirtaki.comm.transports.contract import scale_

from .sparse_carrier import SparseCarrier

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    """One gradient on its way.

    Attributes:
        given: what came from this rank's backward pass, and its version; None if something was put in for it.
    """

    work: SparseWork
    given: tuple[torch.Tensor, int] | None


class SparseReductions:
    """The sparse gradients of one optimizer on one rank.

    Attributes:
        known: parameters of which all ranks know that their gradients are sparse, whether or not they are watched now.
        names: those that are watched.
        found: parameters of which this rank has seen it, and all ranks have not yet agreed.
    """

    def __init__(
        self,
        reduction: Reduction,
        carrier: SparseCarrier,
        known: Iterable[str],
        *,
        as_dense: bool,
        unused_as_none: bool,
    ) -> None:
        """`carrier`: adds up rows over the ranks that take part; closed by the caller."""
        self._carrier, self._as_dense, self._unused_as_none = carrier, as_dense, unused_as_none
        self._factor = reduction.prescale * reduction.postscale
        self.known, self.found, self.names = set(known), set[str](), set[str]()
        self._params: Mapping[str, torch.Tensor] = {}
        self._running: dict[str, _Running] = {}
        self._complete = self._warned = False

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        """Collective, between iterations: from now on, gradients of these parameters are reduced, by name."""
        self._params = params
        self.names = self.known & params.keys()
        self.found.clear()
        self._carrier.watch({name: param for name, param in params.items() if name in self.names})

    @property
    def pending(self) -> bool:
        """A sparse gradient of this iteration has come."""
        return bool(self._running)

    @property
    def missing(self) -> set[str]:
        """Parameters whose gradients are known to be sparse and have not come in this iteration."""
        return self.names - self._running.keys()

    @property
    def summaries(self) -> list[SparseSummary]:
        """How they travel, of those that are watched and whose way is decided; the same on all ranks."""
        return self._carrier.summaries

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

    def agree(self, control: ControlPlane, names: Sequence[str]) -> bool:
        """Collective: parameters whose gradient was sparse on any rank are known as such to all; True if there are any.

        Args:
            control: the ranks.
            names: of all parameters that are watched.
        """
        anywhere = control.total(np.array([float(name in self.found) for name in names])) > 0
        fresh = {name for name, sparse in zip(names, anywhere, strict=True) if sparse}
        self.make_sparse(fresh)
        self.known |= fresh
        return bool(fresh)

    def start(self, name: str, gradient: torch.Tensor, version: int) -> None:
        """The gradient of a parameter with sparse ones is complete, and leaves; `version`: when it came."""
        self._launch(name, gradient, (gradient, version))

    def _launch(self, name: str, gradient: torch.Tensor, given: tuple[torch.Tensor, int] | None) -> None:
        rows = gradient.detach()
        if not rows.is_sparse or rows.sparse_dim() != 1:
            rows = rows.to_dense().to_sparse(1)
        self._running[name] = _Running(self._carrier.start(name, rows), given)

    def put_in_missing(self, *, joined: bool) -> None:
        """Stands in for gradients that did not come: what is in `.grad` counts as it is, nothing counts as no rows."""
        if not self._complete:
            self._warn_of_lost_edits()
        for name in sorted(self.missing):
            param = self._params[name]
            gradient = param.grad if param.requires_grad and not joined else None
            self._launch(name, _no_rows(param) if gradient is None else gradient, None)

    def reduce(self, interrupted: Interrupted | None) -> bool:
        """Blocks until all that was started is in `.grad`, coalesced; False if it was interrupted.

        A `.grad` that came and was set to None since stays None.
        """
        if self._complete:
            return True
        for running in self._running.values():
            while not running.work.wait(WAIT_SLICE_S):
                self._carrier.check()
                if interrupted is not None and interrupted():
                    return False
        for name in sorted(self._running):
            self._hand_out(self._params[name], self._running[name])
        self._complete = True
        return True

    def _hand_out(self, param: torch.Tensor, running: _Running) -> None:
        rows = running.work.reduced.rows
        if running.given is not None:
            wanted = param.grad is not None
        else:
            unused = self._unused_as_none and param.grad is None and not len(rows)
            wanted = param.requires_grad and not unused
        if wanted:
            param.grad = _as_gradient(rows, param, self._factor)

    def _warn_of_lost_edits(self) -> None:
        """Of gradients that were replaced or written after they came, though they are not reduced yet."""
        for name, running in self._running.items():
            gradient = self._params[name].grad
            if running.given is None or gradient is None or self._warned:
                continue
            if gradient is not running.given[0] or gradient._version != running.given[1]:
                self._warned = True
                logger.warning(
                    "the sparse gradient of %s was changed before it was reduced, and the reduced one is used; %s",
                    name,
                    REMEDY,
                )

    def end_iteration(self) -> None:
        """Collective where a way of rows is decided: nothing has come of the next one."""
        self._carrier.end_iteration({name: running.work for name, running in self._running.items()})
        self._running.clear()
        self._complete = False


def _as_gradient(rows: Rows, param: torch.Tensor, factor: float) -> torch.Tensor:
    """The coalesced sparse gradient with these rows, times a factor."""
    scale_(rows.values, factor)
    values = rows.values.view(len(rows), *param.shape[1:])
    return torch.sparse_coo_tensor(
        rows.indices[None].to(param.device),
        values.to(param.device),
        param.shape,
        check_invariants=False,
        is_coalesced=True,
    )


def _no_rows(param: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of a parameter that was not used."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = param.new_empty((0, *param.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)
