"""Sparse gradients: agreed on by all, added up row by row, and what the user did to them meanwhile."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine.sparse_gradients import SparseCarrier, SparseReductions
from sirtaki.settings import REGISTRY_OFF, Settings

SIZE = 2
ROWS, WIDTH = 4, 2


def rows(*indices: int, value: float = 1.0) -> torch.Tensor:
    """A sparse gradient with ones in these rows."""
    places = torch.tensor([list(indices)], dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(
        places, torch.full((len(indices), WIDTH), value), (ROWS, WIDTH), check_invariants=True
    )


class Rank:
    """One rank's sparse reductions of parameters `a` and `b`."""

    def __init__(
        self, control: ControlPlane, carrier: SparseCarrier, known: Iterable[str], options: dict[str, Any]
    ) -> None:
        self.control, self.rank = control, control.rank
        self.params = {name: torch.nn.Parameter(torch.zeros(ROWS, WIDTH)) for name in "ab"}
        self.sparse = SparseReductions(
            options.pop("reduction", Reduction()),
            carrier,
            known,
            **{"as_dense": False, "unused_as_none": False, **options},
        )
        self.sparse.watch(self.params)

    def give(self, name: str, gradient: torch.Tensor) -> None:
        """It comes from the backward pass, and leaves."""
        self.params[name].grad = gradient
        self.sparse.start(name, gradient, gradient._version)

    def finish(self, *, joined: bool = False) -> None:
        self.sparse.put_in_missing(joined=joined)
        assert self.sparse.reduce(None)
        self.sparse.end_iteration()

    def first_of_each_row(self, name: str) -> list[float] | None:
        gradient = self.params[name].grad
        if gradient is None:
            return None
        assert gradient.is_sparse
        assert gradient.is_coalesced()
        values: list[float] = gradient.to_dense()[:, 0].tolist()
        return values


def on_ranks(act: Callable[[Rank], Any], known: Iterable[str] = "ab", **options: Any) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        carrier = SparseCarrier(control, Settings(registry=REGISTRY_OFF))
        try:
            return act(Rank(control, carrier, known, dict(options)))
        finally:
            carrier.close()
            control.reclaim()

    return on_planes(SIZE, run)


def zero_rows(rank: Rank) -> None:
    """Nothing comes."""


def comes(rank: Rank) -> None:
    assert rank.sparse.missing == {"a", "b"}
    rank.give("a", rows(0, 1) if rank.rank else rows(1, 3, 3))
    rank.give("b", rows())
    assert rank.sparse.pending
    assert rank.sparse.missing == set()


def comes_on_one_rank(rank: Rank) -> None:
    if rank.rank:
        rank.give("a", rows(0))


def is_of_an_earlier_pass(rank: Rank) -> None:
    comes_on_one_rank(rank)
    if not rank.rank:
        rank.params["b"].grad = rows(2)


def is_dense_on_one_rank(rank: Rank) -> None:
    rank.give("a", torch.ones(ROWS, WIDTH) if rank.rank else rows(1))


@pytest.mark.parametrize(
    ("act", "a", "b", "options"),
    [
        (comes, [1.0, 2.0, 0.0, 2.0], [0.0] * 4, {}),
        (comes, [0.75, 1.5, 0.0, 1.5], [0.0] * 4, {"reduction": Reduction(prescale=3.0, postscale=0.25)}),
        (zero_rows, [0.0] * 4, [0.0] * 4, {}),
        (comes_on_one_rank, [1.0, 0.0, 0.0, 0.0], [0.0] * 4, {}),
        (comes_on_one_rank, [1.0, 0.0, 0.0, 0.0], None, {"unused_as_none": True}),
        (is_of_an_earlier_pass, [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], {}),
        (is_dense_on_one_rank, [1.0, 2.0, 1.0, 1.0], [0.0] * 4, {}),
    ],
)
def test_rows_of_all_ranks_add_up_whatever_comes_where(
    act: Callable[[Rank], None], a: list[float], b: list[float] | None, options: dict[str, Any]
) -> None:
    def play(rank: Rank) -> None:
        for _ in range(2):
            for param in rank.params.values():
                param.grad = None
            act(rank)
            rank.finish()
            assert (rank.first_of_each_row("a"), rank.first_of_each_row("b")) == (a, b)
            assert not rank.sparse.pending

    on_ranks(play, **options)


def test_what_the_user_set_to_none_stays_so_and_what_is_reduced_is_handed_out_once() -> None:
    def act(rank: Rank) -> None:
        for name in "ab":
            rank.give(name, rows(rank.rank))
        if rank.rank:
            rank.params["a"].grad = None
        assert rank.sparse.reduce(None)
        rank.params["b"].grad = mine = rows(3)
        rank.finish()
        assert rank.first_of_each_row("a") == (None if rank.rank else [1.0, 1.0, 0.0, 0.0])
        assert rank.params["b"].grad is mine

    on_ranks(act)


def test_a_joined_rank_and_a_frozen_parameter_give_nothing() -> None:
    def act(rank: Rank) -> None:
        for name in "ab":
            rank.params[name].grad = rows(rank.rank)
        rank.params["b"].requires_grad_(requires_grad=False)
        rank.finish(joined=rank.rank == 1)
        assert rank.first_of_each_row("a") == [1.0, 0.0, 0.0, 0.0]
        assert rank.first_of_each_row("b") == [float(rank.rank == row) for row in range(ROWS)]  # left alone

    on_ranks(act)


@pytest.mark.parametrize("edit", ["write", "replace", None])
def test_changes_before_the_reduction_are_lost_and_told_once(
    edit: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    def act(rank: Rank) -> None:
        for _ in range(2):
            gradient = rows(0).coalesce()
            rank.give("a", gradient)
            if edit == "write":
                gradient.mul_(9.0)
            elif edit == "replace":
                rank.params["a"].grad = rows(2)
            rank.finish()
            assert rank.first_of_each_row("a") == [2.0, 0.0, 0.0, 0.0]

    with caplog.at_level(logging.WARNING):
        on_ranks(act, known="a")
    told = [
        message
        for message in caplog.messages
        if "the sparse gradient of a was changed before it was reduced" in message
    ]
    assert len(told) == (SIZE if edit else 0)  # once a rank


def test_what_is_found_sparse_travels_dense_until_all_have_agreed() -> None:
    def act(rank: Rank) -> None:
        for name in "ab":
            rank.params[name].grad = torch.ones(ROWS, WIDTH)
        if rank.rank == 1:
            rank.params["b"].grad = rows(1)
            dense = rank.sparse.as_it_travels("b")
            assert not dense.is_sparse
            assert rank.params["b"].grad is dense
            assert rank.sparse.found == {"b"}
        assert rank.sparse.looks_new("b")
        assert rank.sparse.agree(rank.control, ["a", "b"])
        assert rank.sparse.known == {"b"}
        assert rank.params["b"].grad is not None
        assert rank.params["b"].grad.is_sparse
        assert not rank.params["a"].grad.is_sparse  # type: ignore[union-attr]
        rank.sparse.watch(rank.params)
        assert rank.sparse.names == {"b"}
        assert rank.sparse.found == set()
        assert not rank.sparse.looks_new("b")
        assert rank.sparse.as_it_travels("b") is rank.params["b"].grad
        assert not rank.sparse.agree(rank.control, ["a", "b"])

    on_ranks(act, known="")


def test_where_sparse_ones_are_made_dense_nothing_is_found() -> None:
    def act(rank: Rank) -> None:
        rank.params["a"].grad = rows(1)
        assert not rank.sparse.looks_new("a")
        assert not rank.sparse.as_it_travels("a").is_sparse
        assert not rank.sparse.agree(rank.control, ["a", "b"])
        assert rank.sparse.known == set()

    on_ranks(act, known="", as_dense=True)


def test_a_wait_may_be_interrupted_and_goes_on_and_what_is_on_its_way_cannot_be_written() -> None:
    def act(rank: Rank) -> None:
        rank.sparse.watch({"b": rank.params["b"]})
        assert (rank.sparse.names, rank.sparse.known, rank.sparse.missing) == ({"b"}, {"a", "b"}, {"b"})
        if rank.rank == 0:
            gradient = rows(0).coalesce()
            rank.give("b", gradient)
            gradient.values().mul_(9.0)
            assert not rank.sparse.reduce(lambda: True)
        rank.control.barrier()
        if rank.rank == 1:
            rank.give("b", rows(1))
        rank.finish()
        assert rank.first_of_each_row("b") == [1.0, 1.0, 0.0, 0.0]

    on_ranks(act)
