"""Handles: each is waited for once, by whoever holds it, and a rank that cannot take part lets no other wait."""

import pytest
import torch
from fakes.jobs import on_jobs
from fakes.meshes import until

from sirtaki.comm.collectives.operations import Kind
from sirtaki.errors import MismatchError
from sirtaki.torch import process_sets as handles
from sirtaki.torch.process_sets import (
    Call,
    engine_of,
    everything,
    first,
    global_process_set,
    into,
    into_one,
    poll,
    synchronize,
    synchronize_all,
)

SIZE = 2


def call(name: str | None = "x", *, grouped: bool = False) -> Call:
    return Call(kind=Kind.ALLREDUCE, name=name, process_set=global_process_set, grouped=grouped)


def test_a_handle_gives_what_is_made_of_the_results_once() -> None:
    def act(rank: int) -> None:
        handle = call().start([torch.ones(2)], lambda results: results[0].tolist(), op="sum")
        assert synchronize(handle) == [2.0, 2.0]
        assert synchronize(handle) is None
        assert synchronize(-1) is None

    on_jobs(SIZE, act)


def test_what_can_be_had_without_a_wait_can_be_asked() -> None:
    def act(rank: int) -> None:
        assert poll(-1)
        if rank == 0:
            handle = call().start([torch.ones(1)], first, op="sum")
            assert not poll(handle)
            call("go").start([torch.ones(1)], first, op="sum")
        else:
            synchronize(call("go").start([torch.ones(1)], first, op="sum"))
            handle = call().start([torch.ones(1)], first, op="sum")
        until(lambda: poll(handle))
        assert synchronize(handle).item() == 2.0
        assert poll(handle)

    on_jobs(SIZE, act)


@pytest.mark.parametrize(
    ("name", "grouped", "full"),
    [("x", False, "allreduce.x"), ("x", True, "grouped_allreduce.x"), (None, False, "allreduce.noname.1")],
)
def test_names_tell_the_kind_and_unnamed_ones_are_counted(name: str | None, grouped: bool, full: str) -> None:
    def act(rank: int) -> None:
        made = call(name, grouped=grouped)
        if rank == 0:
            handle = made.start([torch.ones(1)], first, op="sum")
            assert full in engine_of(global_process_set).pending
            call("go").start([torch.ones(1)], first, op="sum")
        else:
            synchronize(call("go").start([torch.ones(1)], first, op="sum"))
            handle = made.start([torch.ones(1)], first, op="sum")
        synchronize(handle)

    on_jobs(SIZE, act)


def test_results_can_be_new_or_go_into_what_was_given() -> None:
    results = [torch.ones(2), torch.zeros(3)]
    assert first(results) is results[0]
    assert everything(results) is results
    targets = [torch.full((2,), 5.0, requires_grad=True), torch.full((3,), 5.0)]
    found = into(targets)(results)
    assert found[0] is targets[0]
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [0.0] * 3]
    assert targets[0].requires_grad
    one = torch.zeros(2)
    assert into_one(one)([torch.ones(2)]) is one
    assert one.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="argument 2"):
        into(targets)(results[:1])


def test_of_several_all_end_before_the_first_error_is_raised() -> None:
    def act(rank: int) -> None:
        fine = torch.zeros(1)
        started = [
            call("a").start([torch.ones(1 + rank)], first, op="sum"),  # shapes differ
            call("b").start([torch.ones(1)], into_one(fine), op="sum"),
            call("c").start([torch.ones(1)], first, op="sum" if rank else "max"),
        ]
        with pytest.raises(MismatchError, match="tensor shapes"):
            synchronize_all(started)
        assert fine.item() == SIZE
        assert not set(started) & handles._pending.keys()
        assert synchronize_all([]) == []

    on_jobs(SIZE, act)


def test_a_rank_that_refuses_tells_the_others_why() -> None:
    def act(rank: int) -> None:
        if rank == 0:
            with pytest.raises(KeyError, match="no such thing"):
                call().refuse(KeyError("no such thing"))
        else:
            with pytest.raises(MismatchError, match="Rank 0 cannot take part in ALLREDUCE: 'no such thing'"):
                synchronize(call().start([torch.ones(1)], first, op="sum"))

    on_jobs(SIZE, act)


def test_what_is_no_dense_tensor_is_refused_on_all() -> None:
    bad = {"list": [1.0], "sparse": torch.eye(2).to_sparse()}

    def act(rank: int) -> None:
        for number, (what, tensor) in enumerate(bad.items()):
            with pytest.raises(ValueError, match="wanted, not") as caught:
                call(f"x{number}").require_strided([torch.ones(1), tensor])  # type: ignore[list-item]
            assert ("list" if what == "list" else "sparse_allreduce_async") in str(caught.value)
        call("fine").require_strided([torch.ones(2, 2).t(), torch.empty(0)])

    on_jobs(SIZE, act)
