"""Gradients of parameters that have no hook yet are the same on all ranks all the same."""

from typing import Any

import pytest
import torch
from fakes.engines import on_engines

from sirtaki.comm.collectives.engine import EagerEngine
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine.reducing.parameters import reduce_thawed

SIZE = 3


def reduced(gradients_of: Any, *, unused_as_none: bool = False, reduction: Reduction | None = None) -> list[Any]:
    """`.grad` on each rank afterwards; rank r had those of `gradients_of(r)`."""

    def act(control: ControlPlane, engine: EagerEngine) -> list[torch.Tensor | None]:
        params = []
        for gradient in gradients_of(control.rank):
            params.append(torch.nn.Parameter(torch.zeros(2, 2)))
            params[-1].grad = gradient
        before = [param.grad for param in params]
        reduce_thawed(
            params,
            prefix="optimizer.0.thawed",
            reduction=reduction or Reduction(),
            engine=engine,
            unused_as_none=unused_as_none,
        )
        for param, gradient in zip(params, before, strict=True):
            if gradient is not None and not gradient.is_sparse:
                assert param.grad is gradient  # in its place
        return [param.grad for param in params]

    return on_engines(SIZE, act)


def test_gradients_are_added_up_in_their_places() -> None:
    for one, other in reduced(lambda rank: [torch.full((2, 2), 1.0 + rank), torch.eye(2)]):
        assert torch.equal(one, torch.full((2, 2), 6.0))
        assert torch.equal(other, SIZE * torch.eye(2))


def test_what_the_optimizer_wants_done_to_gradients_is_done() -> None:
    for (one,) in reduced(lambda rank: [torch.ones(2, 2)], reduction=Reduction(prescale=2.0, postscale=0.25)):
        assert torch.equal(one, torch.full((2, 2), 1.5))


def test_a_rank_that_has_not_computed_one_contributes_zeros_and_gets_it() -> None:
    for one, nobodys in reduced(lambda rank: [torch.ones(2, 2) if rank == 1 else None, None]):
        assert torch.equal(one, torch.ones(2, 2))
        assert torch.equal(nobodys, torch.zeros(2, 2))


def test_what_no_rank_has_computed_stays_none_if_that_is_asked_for() -> None:
    for one, nobodys in reduced(lambda rank: [torch.ones(2, 2) if rank == 1 else None, None], unused_as_none=True):
        assert torch.equal(one, torch.ones(2, 2))
        assert nobodys is None


@pytest.mark.parametrize("sparse_on", [{0}, {0, 1, 2}])
def test_sparse_ones_are_dense_afterwards(sparse_on: set[int]) -> None:
    for (one,) in reduced(lambda rank: [torch.eye(2).to_sparse(1) if rank in sparse_on else torch.eye(2)]):
        assert not one.is_sparse
        assert torch.equal(one, SIZE * torch.eye(2))


def test_no_parameters_need_no_rank() -> None:
    assert reduced(lambda rank: []) == [[]] * SIZE


def test_a_gradient_with_a_graph_is_reduced_without_one() -> None:
    def with_graph(rank: int) -> list[torch.Tensor]:
        leaf = torch.ones(2, 2, requires_grad=True)
        return [leaf * 2]

    for (one,) in reduced(with_graph):
        assert torch.equal(one.detach(), torch.full((2, 2), 2.0 * SIZE))
