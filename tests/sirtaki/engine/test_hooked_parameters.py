"""Parameters with hooks: which are reduced, what has begun, and what is left behind when they change."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.engine.reducing import parameters
from sirtaki.engine.reducing.parameters import HookedParameters


class Reductions:
    """Notes what it is asked."""

    def __init__(self, named: Any, sparse: Any, make_tuned: Any) -> None:
        self.named, self.log = list(named), list[Any]()
        self.arrive = [lambda gradient, version, name=name: self.log.append(name) for name, _ in named]
        self.complete = self.pending = self.found_sparse = self.closed = False

    def note_sparse(self, passes_left: list[int]) -> None:
        self.log.append(("sparse", list(passes_left)))

    def finish(self, control: Any, *, joined: bool) -> bool:
        self.log.append(("finish", joined))
        return self.found_sparse

    def close(self) -> None:
        self.closed = True


class Owner:
    """Whoever reduces them."""

    hooks: Any = None

    def begin_backward(self) -> Any:
        return self.hooks

    def as_it_travels(self, number: int) -> torch.Tensor:
        raise AssertionError


class Made:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        frozen: str = "",
        passes: int = 1,
        nan_check: Any = None,
        groups: Any = (),
        params: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.made: list[Reductions] = []
        self.compared: list[list[str]] = []
        self.looked: list[list[str]] = []
        self.thawed: list[torch.Tensor] = []

        def make(*args: Any) -> Reductions:
            self.made.append(Reductions(*args))
            return self.made[-1]

        monkeypatch.setattr(parameters, "Reductions", make)
        monkeypatch.setattr(
            parameters,
            "require_same_model",
            lambda control, named: self.compared.append([name for name, _ in named]),
        )
        self.params = params or {name: torch.nn.Parameter(torch.ones(2)) for name in "abc"}
        for name in frozen:
            self.params[name].requires_grad_(requires_grad=False)
        self.start_check = SimpleNamespace(
            done=False, look=lambda control, named: self.looked.append([name for name, _ in named])
        )
        self.resources: Any = SimpleNamespace(
            control=None,
            sparse=None,
            make_tuned=None,
            nan_check=nan_check,
            options=SimpleNamespace(groups=groups),
            start_check=self.start_check,
            reduce_thawed=self.thawed.extend,
        )
        self.owner = Owner()
        self.hooked = HookedParameters(list(self.params.items()), self.resources, passes=passes, owner=self.owner)
        self.owner.hooks = self.hooked.hooks

    @property
    def reductions(self) -> Any:
        return self.made[-1]

    def backward(self, *names: str) -> None:
        sum((self.params[name] * 2.0).sum() for name in names).backward()  # type: ignore[union-attr]
        self.hooked.hooks.in_backward = False


def test_parameters_that_want_a_gradient_are_reduced_and_compared_and_frozen_ones_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made(monkeypatch, frozen="b")
    assert [name for name, _ in made.hooked.all] == ["a", "b", "c"]
    assert [name for name, _ in made.hooked.named] == ["a", "c"]
    assert made.compared == [["a", "c"]]
    made.backward("a", "c")
    assert sorted(made.reductions.log) == ["a", "c"]


def test_gradients_have_begun_when_one_has_come_is_pending_or_a_parameter_was_thawed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made(monkeypatch, passes=2, frozen="b")
    assert not made.hooked.begun
    made.backward("a")
    assert made.hooked.begun
    made.hooked.begin(2)
    assert not made.hooked.begun
    made.reductions.pending = True
    assert made.hooked.begun
    made.reductions.pending = False
    made.params["b"].requires_grad_()
    assert made.hooked.begun
    assert made.hooked.thawed == [made.params["b"]]


def test_where_all_are_frozen_there_is_nothing_until_one_is_thawed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, frozen="abc")
    assert made.hooked.empty
    made.params["a"].requires_grad_()
    assert not made.hooked.empty


def test_an_iteration_that_begins_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    made.reductions.complete = True
    made.hooked.begin(3)
    assert not made.reductions.complete
    assert made.hooked.hooks.passes_left == [3, 3, 3]


@pytest.mark.parametrize(("sparse", "thaws", "anew"), [(False, False, False), (True, False, True), (False, True, True)])
def test_hooks_are_made_anew_where_gradients_were_sparse_or_a_parameter_was_thawed(
    sparse: bool, thaws: bool, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch, frozen="b")
    made.backward("a", "c")
    made.reductions.found_sparse = sparse
    if thaws:
        made.params["b"].requires_grad_()
    assert made.hooked.finish(joined=False) == anew
    assert made.params["a"].grad is not None
    assert made.reductions.log[-1] == ("finish", False)
    assert made.thawed == ([made.params["b"]] if thaws else [])
    assert made.looked == [["a", "b", "c"] if thaws else ["a", "c"]]
    made.start_check.done = True
    made.hooked.finish(joined=False)
    assert len(made.looked) == 1


def test_what_has_not_come_is_told_and_members_of_a_group_leave_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    params: dict[str, torch.Tensor] = {name: torch.nn.Parameter(torch.ones(2)) for name in "abc"}
    made = Made(monkeypatch, groups=[[params["a"], params["b"]]], params=params)
    made.backward("a")
    assert made.reductions.log == []
    made.hooked.finish(joined=False)
    assert made.reductions.log == ["a", ("sparse", [0, 1, 1]), ("finish", False)]
    full = Made(monkeypatch)
    full.backward("a", "b", "c")
    full.hooked.finish(joined=False)
    assert [entry for entry in full.reductions.log if entry[0] == "sparse"] == []


def test_a_joined_rank_keeps_none_of_the_others_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, frozen="c")
    for param in made.params.values():
        param.grad = torch.ones(2)
    made.hooked.finish(joined=True)
    assert [param.grad is None for param in made.params.values()] == [True, True, False]


def test_a_check_for_nans_knows_the_names_and_sees_what_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    check = SimpleNamespace(
        names=[], look=lambda *what: None, finish=lambda left, grads: seen.append((left, len(grads)))
    )
    made = Made(monkeypatch, nan_check=check, frozen="a")
    assert check.names == ["b", "c"]
    made.backward("b")
    made.hooked.finish(joined=False)
    assert seen == [([0, 1], 2)]


def test_gradients_of_some_passes_can_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, passes=2)
    made.params["b"].grad = torch.ones(2)  # the user's
    made.backward("a")
    made.hooked.drop_accumulated()
    assert made.params["a"].grad is None
    assert made.params["b"].grad is not None


def test_closed_hooks_see_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    made.hooked.close()
    made.backward("a")
    assert made.reductions.log == []
    assert made.reductions.closed


def test_what_is_no_leaf_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Reductions] = []
    leaf = torch.nn.Parameter(torch.ones(2))

    class Noting(Made):
        def __init__(self) -> None:
            try:
                super().__init__(monkeypatch, params={"a": leaf, "b": leaf * 2})
            finally:
                made.extend(self.made)

    with pytest.raises(RuntimeError, match="leaf"):
        Noting()
    assert [each.closed for each in made] == [True]
