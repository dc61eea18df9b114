"""Edges between operators: of a real step, held against autograd's own graph, and of traces made by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sirtaki.analysis.operators import Reader, TensorWatch, readers, with_edges
from sirtaki.analysis.recording import Operator
from sirtaki.autotune.model.replayer import Phase

FLOAT = 4


def tensor(number: int, storage: int, *, elements: int = 8, itemsize: int = FLOAT) -> list[Any]:
    return [number, storage, 0, elements, itemsize, "cpu"]


def node(
    number: int,
    name: str,
    *,
    inside: int = 1,
    reads: tuple[Any, ...] = (),
    makes: tuple[Any, ...] = (),
    schema: str = "",
    scope: int = 0,
    thread: int = 1,
) -> dict[str, Any]:
    attributes = {"scope": scope, "tid": thread, "op_schema": schema}
    return {
        "id": number,
        "name": name,
        "ctrl_deps": inside,
        "inputs": {"values": list(reads)},
        "outputs": {"values": list(makes)},
        "attrs": [{"name": key, "value": value} for key, value in attributes.items()],
    }


def autograd_edges(loss: torch.Tensor) -> set[tuple[str, str]]:
    """By name, (who gives a gradient, who gets it)."""
    found, left = set(), [loss.grad_fn]
    while left:
        one = left.pop()
        if one is not None:
            found |= {(one.name(), other.name()) for other, _ in one.next_functions if other is not None}
            left += [other for other, _ in one.next_functions]
    return {(giver, getter.removeprefix("torch::autograd::")) for giver, getter in found}


def test_a_real_step_has_the_edges_that_autograd_knows_and_those_of_its_forward_pass() -> None:
    first, second, batch = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.randn(3, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, foreach=False)
    watch = TensorWatch()
    hidden = first(batch)
    loss = second(torch.relu(hidden) * torch.sigmoid(hidden)).sum()
    expected = autograd_edges(loss)
    loss.backward()
    optimizer.step()
    watch.stop()
    found = watch.readers()
    edges = [(found[maker].name, one.name) for one in found for maker in one.after]
    assert expected <= set(edges)
    assert {("aten::linear", "aten::relu"), ("aten::linear", "aten::sigmoid"), ("aten::relu", "aten::mul")} <= {*edges}
    assert ("aten::relu", "aten::sigmoid") not in edges
    assert all(maker < place for place, one in enumerate(found) for maker in one.after)
    updates = [one for one in found if one.name == "aten::add_"][-4:]
    gradients = [{maker for maker in one.after if found[maker].name == "AccumulateGrad"} for one in updates]
    assert Counter(map(len, gradients)) == {1: 4}
    assert len(set.union(*gradients)) == 4


def test_what_an_operator_calls_reads_and_makes_for_it() -> None:
    nodes = [
        node(2, "aten::ones", makes=(tensor(20, 21),)),
        node(3, "aten::linear", reads=(tensor(20, 21),)),
        node(4, "aten::mm", inside=3, makes=(tensor(30, 31),)),
        node(5, "torch::autograd::AccumulateGrad"),
        node(6, "aten::add", inside=5, reads=([tensor(30, 31)], 1.0)),
    ]
    assert readers(nodes) == (
        Reader("aten::ones", ()),
        Reader("aten::linear", (0,)),
        Reader("AccumulateGrad", (1,)),
    )


def test_writing_in_place_and_views_are_seen_through_the_storage() -> None:
    write = "aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)"
    nodes = [
        node(2, "aten::ones", makes=(tensor(20, 21),)),
        node(3, "aten::view", reads=(tensor(20, 21),), makes=(tensor(22, 21),)),
        node(4, "aten::add_", reads=(tensor(22, 21), 1.0), makes=(tensor(22, 21),), schema=write),
        node(5, "aten::sum", reads=(tensor(20, 21),)),
    ]
    assert [one.after for one in readers(nodes)] == [(), (0,), (0, 1), (0, 2)]


def test_a_number_that_is_given_again_to_something_else_is_no_edge() -> None:
    nodes = [
        node(2, "aten::ones", makes=(tensor(20, 21),)),
        node(3, "aten::mul_", reads=(tensor(50, 51), tensor(20, 21, elements=1, itemsize=8))),
        node(4, "aten::zeros", makes=(tensor(20, 21),)),
        node(5, "aten::sum", reads=(tensor(20, 21),)),
    ]
    assert [one.after for one in readers(nodes)] == [(), (), (), (2,)]


def test_annotations_and_other_threads_are_no_operators() -> None:
    nodes = [
        node(2, "mine", scope=7),
        node(3, "aten::ones", inside=2, makes=(tensor(20, 21),)),
        node(4, "aten::sum", inside=2, reads=(tensor(20, 21),)),
        node(5, "aten::sin", thread=2),
    ]
    assert readers(nodes) == (Reader("aten::ones", ()), Reader("aten::sum", (0,)))


def operator(name: str, begin_s: float, *, lane: int = 0) -> Operator:
    return Operator(name=name, lane=lane, begin_s=begin_s, end_s=begin_s + 1, phase=Phase.FORWARD)


def test_the_first_part_of_a_cut_operator_reads_and_its_last_one_is_read() -> None:
    pieces = [
        (0, operator("a", 0.0)),
        (3, operator("elsewhere", 0.5, lane=1)),
        (1, operator("b", 1.0)),
        (1, operator("b", 2.0)),
        (2, operator("c", 3.0)),
    ]
    found = (Reader("a", ()), Reader("b", (0,)), Reader("c", (0, 1)))
    assert [one.after for one in with_edges(pieces, found)] == [(), (), (0,), (), (0, 3)]
    assert with_edges(pieces, ()) == tuple(one for _, one in pieces)


def test_what_another_step_does_otherwise_reads_nothing() -> None:
    pieces = [(place, operator(name, place)) for place, name in enumerate(("a", "new", "c", "d"))]
    found = (Reader("a", ()), Reader("gone", (0,)), Reader("c", (0, 1)), Reader("d", (2,)))
    assert [one.after for one in with_edges(pieces, found)] == [(), (), (0,), (2,)]


def test_a_trace_that_cannot_be_read_tells_nothing_but_why(caplog: pytest.LogCaptureFixture) -> None:
    watch = TensorWatch()
    watch.stop()
    with open(watch._path, "w") as file:
        file.write("{")
    assert watch.readers() == ()
    assert "cannot be told" in caplog.text
