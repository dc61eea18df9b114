"""Dense and sparse gradients of one set of parameters as one iteration: which go where, and when all are reduced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from sirtaki.engine.reducing.hooks import Dense
from sirtaki.engine.reducing.parameters import Reductions
from sirtaki.engine.reducing.same_model import Named


class Sync:
    """A synchroniser that does what it is told to, and notes what it was asked."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.pending = self.complete = self.can_reduce = self.profiling = False
        self.missing: list[str] = []
        self.came: list[int] = []
        self.problem, self.reduces = "", True

    def missing_names(self) -> list[str]:
        return self.missing

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        self.came.append(index)

    def reduce(self, interrupted: Callable[[], bool]) -> bool:
        self.log.append("dense")
        return self.reduces

    def profile_again(self) -> None:
        self.log.append("profile again")

    def flush(self) -> None:
        self.log.append("flush")

    def detach(self) -> None:
        self.log.append("detach")

    def contribute_zeros(self) -> None:
        self.log.append("zeros")


class Tuned:
    def __init__(self, named: Sequence[Named], log: list[str]) -> None:
        self.named, self.log = named, log
        self.synchroniser = Sync(log)

    def finish(self, *, joined: bool) -> None:
        self.log.append(f"finish {joined}")

    def close(self) -> None:
        self.log.append("close")


class Sparse:
    """Sparse reductions of which the names are known."""

    def __init__(self, known: set[str], log: list[str]) -> None:
        self.names, self.log = known, log
        self.pending, self.missing, self.found, self.new = False, set[str](), {"found"}, set[str]()
        self.agrees = self.is_reduced = True
        self.started: list[str] = []

    def watch(self, params: Mapping[str, torch.Tensor]) -> None:
        self.watched = list(params)

    def start(self, name: str, gradient: torch.Tensor, version: int) -> None:
        self.started.append(name)

    def looks_new(self, name: str) -> bool:
        return name in self.new

    def as_it_travels(self, name: str) -> torch.Tensor:
        self.log.append(f"as it travels {name}")
        return torch.zeros(0)

    def put_in_missing(self, *, joined: bool) -> None:
        self.log.append(f"put in {joined}")

    def reduce(self, interrupted: Any) -> bool:
        self.log.append("sparse")
        return self.is_reduced

    def make_sparse(self, names: set[str]) -> None:
        self.log.append(f"make sparse {sorted(names)}")

    def agree(self, control: Any, names: Sequence[str]) -> bool:
        self.log.append(f"agree {names}")
        return self.agrees

    def end_iteration(self) -> None:
        self.log.append("end")


class Made:
    def __init__(self, names: str = "abcd", sparse: str = "c") -> None:
        self.log: list[str] = []
        self.named: list[Named] = [(name, torch.nn.Parameter(torch.zeros(2))) for name in names]
        self.sparse = Sparse(set(sparse), self.log)
        self.reductions = Reductions(self.named, self.sparse, lambda named: Tuned(named, self.log))  # type: ignore[arg-type, return-value]

    @property
    def sync(self) -> Sync:
        tuned: Any = self.reductions.tuned
        return tuned.synchroniser  # type: ignore[no-any-return]

    def come(self, number: int) -> None:
        self.reductions.arrive[number](torch.zeros(2), 0)


def test_gradients_go_to_the_synchroniser_or_by_themselves() -> None:
    made = Made()
    tuned: Any = made.reductions.tuned
    assert [name for name, _ in tuned.named] == ["a", "b", "d"]
    assert made.sparse.watched == ["a", "b", "c", "d"]
    assert [isinstance(there, Dense) for there in made.reductions.arrive] == [True, True, False, True]
    for number in (3, 2, 0):
        made.come(number)
    assert made.sync.came == [2, 0]
    assert made.sparse.started == ["c"]


def test_where_all_are_sparse_there_is_no_synchroniser() -> None:
    made = Made("ab", "ab")
    assert made.reductions.tuned is None
    assert not made.reductions.pending
    assert made.reductions.problem == ""
    made.reductions.flush()
    made.reductions.detach()
    made.reductions.close()
    assert made.log == []


def test_either_kind_may_be_pending_or_missing() -> None:
    made = Made()
    assert not made.reductions.pending
    assert not made.reductions.missing
    made.sync.pending, made.sync.missing = True, ["a"]
    assert made.reductions.pending
    assert made.reductions.missing
    made.sync.pending, made.sync.missing = False, []
    made.sparse.pending, made.sparse.missing = True, {"c"}
    assert made.reductions.pending
    assert made.reductions.missing


def test_a_gradient_that_turns_out_to_be_sparse_has_the_order_profiled_again_so_that_ranks_agree() -> None:
    made = Made()
    made.reductions.as_it_travels(0)
    assert made.log == ["as it travels a"]
    made.sparse.new = {"a"}
    made.reductions.as_it_travels(0)
    made.sync.profiling = True
    made.reductions.as_it_travels(0)
    assert made.log[1:] == ["profile again", "as it travels a", "as it travels a"]


def test_sparse_gradients_that_have_not_come_travel_as_if_they_had() -> None:
    made = Made("abcd", "")
    sparse = torch.eye(2).to_sparse(1)
    for number, (_, param) in enumerate(made.named):
        param.data = torch.zeros(2, 2)
        param.grad = torch.zeros(2, 2) if number == 1 else sparse.clone()
    made.named[2][1].requires_grad_(requires_grad=False)
    made.reductions.note_sparse([1, 1, 1, 0])
    assert made.log == ["as it travels a"]


@pytest.mark.parametrize("sync_complete", [False, True])
def test_sparse_ones_are_reduced_behind_dense_ones_once_all_have_come(sync_complete: bool) -> None:
    made = Made()
    assert not made.reductions.can_reduce
    made.sparse.pending = True
    assert not made.reductions.can_reduce
    if sync_complete:
        made.sync.complete = True  # in an earlier pass
    else:
        made.sync.can_reduce = True
    assert made.reductions.can_reduce
    made.reductions.reduce(lambda: False)
    assert made.log == (["sparse"] if sync_complete else ["dense", "sparse"])
    assert made.reductions.complete
    made.sync.can_reduce, made.sync.complete = False, True
    assert not made.reductions.can_reduce  # it is done


def test_sparse_ones_that_are_missing_keep_the_iteration_open() -> None:
    made = Made()
    made.sync.can_reduce, made.sparse.missing = True, {"c"}
    made.reductions.reduce(lambda: False)
    assert made.log == ["dense"]
    assert not made.reductions.complete
    made.sync.can_reduce, made.sync.complete, made.sparse.pending = False, True, True
    assert not made.reductions.can_reduce
    made.sparse.missing = set()
    assert made.reductions.can_reduce


def test_an_interrupted_reduction_is_not_complete() -> None:
    made = Made()
    made.sync.can_reduce, made.sync.reduces = True, False
    made.reductions.reduce(lambda: True)
    assert made.log == ["dense"]
    assert not made.reductions.complete
    made.sync.reduces, made.sparse.is_reduced = True, False
    made.reductions.reduce(lambda: True)
    assert not made.reductions.complete


def test_while_the_order_is_profiled_what_is_found_to_be_sparse_is_made_so_again() -> None:
    made = Made()
    made.sync.can_reduce = made.sync.profiling = True
    made.reductions.reduce(lambda: False)
    assert made.log == ["dense", "sparse", "make sparse ['found']"]


def test_what_is_complete_on_this_rank_can_be_sent_without_a_wait() -> None:
    made = Made()
    made.reductions.flush()
    made.sync.can_reduce = True
    made.reductions.flush()
    assert made.log == ["flush"]


def test_zeros_are_given_for_both_kinds() -> None:
    made = Made()
    made.reductions.contribute_zeros()
    assert made.log == ["put in True", "zeros"]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("profiling", [False, True])
@pytest.mark.parametrize("agrees", [False, True])
def test_the_end_of_an_iteration_waits_for_all_and_agrees_on_news_only_where_the_order_is_profiled(
    joined: bool, profiling: bool, agrees: bool
) -> None:
    made = Made()
    made.sync.profiling, made.sparse.agrees = profiling, agrees
    assert made.reductions.finish(None, joined=joined) == (profiling and agrees)  # type: ignore[arg-type]
    asked = ["agree ['a', 'b', 'c', 'd']"] if profiling else []
    assert made.log == [f"put in {joined}", f"finish {joined}", "sparse", *asked, "end"]


def test_what_is_complete_is_not_put_in_again() -> None:
    made = Made()
    made.reductions.complete = True
    made.reductions.finish(None, joined=False)  # type: ignore[arg-type]
    assert made.log == ["finish False", "sparse", "end"]


def test_problems_and_the_end_are_the_synchronisers() -> None:
    made = Made()
    made.sync.problem = "the gradient of a was written"
    assert made.reductions.problem == "the gradient of a was written"
    made.reductions.detach()
    made.reductions.close()
    assert made.log == ["detach", "close"]


def test_gradients_are_waited_for_one_by_one_only_where_all_are_dense() -> None:
    made = Made("ab", "")
    tuned: Any = made.reductions.tuned
    tuned.can_put_off = True
    made.sparse.found = set()
    assert made.reductions.can_put_off
    made.sparse.found = {"a"}  # of which the other ranks must hear
    assert not made.reductions.can_put_off
    made.sparse.found = set()
    tuned.can_put_off = False
    assert not made.reductions.can_put_off
    made.reductions.put_off()
    assert made.log == ["flush"]
    some = Made("abc", "c")
    assert not some.reductions.all_dense
    assert not some.reductions.can_put_off
    assert not Made("ab", "ab").reductions.can_put_off
