"""Modules are seen by hooks, and autograd's nodes are known to be theirs."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from sirtaki.analysis.step_tensors import ModuleCalls, model_is_compiled


@pytest.fixture
def calls() -> Iterator[ModuleCalls]:
    watching = ModuleCalls()
    yield watching
    watching.stop()


def test_calls_are_nested_and_named(calls: ModuleCalls) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    model(torch.ones(3, 4))
    found, of_calls = calls.modules()
    assert [one.name for one in found] == ["", "0", "1", "1.0", "1.1"]
    assert {one.root for one in found} == {0}
    assert of_calls == [0, 1, 2, 3, 4]
    assert [call.parent for call in calls.calls] == [-1, 0, 0, 2, 2]
    assert calls.at((calls.calls[3].begin_s + calls.calls[3].end_s) / 2) == 3
    assert calls.at(calls.calls[4].end_s + 1) == -1
    assert calls.at(calls.calls[0].begin_s - 1) == -1


def test_two_models_are_two_and_a_module_that_is_called_twice_is_one(calls: ModuleCalls) -> None:
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.ReLU()
    second(first(first(torch.ones(1, 4))))
    found, of_calls = calls.modules()
    assert [(one.name, one.root) for one in found] == [("", 0), ("0", 0), ("", 2)]
    assert of_calls == [0, 1, 0, 1, 2]


def test_a_node_belongs_to_the_innermost_module_that_made_it(calls: ModuleCalls) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = model(torch.ones(3, 4)).square()
    assert calls.of_node(found.grad_fn._sequence_nr()) == -1
    tanh = found.grad_fn.next_functions[0][0]
    assert (tanh.name(), calls.of_node(tanh._sequence_nr())) == ("TanhBackward0", 2)
    linear = tanh.next_functions[0][0]
    assert (linear.name(), calls.of_node(linear._sequence_nr())) == ("AddmmBackward0", 1)
    assert calls.of_node(-1) == calls.of_node(1 << 63) == -1


def test_inputs_and_outputs_are_known_if_they_are_asked_for(calls: ModuleCalls) -> None:
    model, batch = nn.Linear(4, 2), torch.ones(3, 4)
    model(batch)
    calls.with_tensors = True
    found = model(input=batch)
    without, with_tensors = calls.calls
    assert (without.inputs, without.batch) == ((), 0)
    assert with_tensors.inputs == (("cpu", batch.data_ptr()),)
    assert with_tensors.outputs == (("cpu", found.data_ptr()),)
    assert with_tensors.batch == 3


def test_a_module_that_fails_has_ended_and_other_threads_are_left_alone(calls: ModuleCalls) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    other = threading.Thread(target=lambda: model(torch.ones(3, 4)))
    other.start()
    other.join()
    model(torch.ones(3, 4))
    assert [call.parent for call in calls.calls] == [-1, 0, -1, 2]


def test_nothing_is_seen_any_more_once_it_has_stopped() -> None:
    watching = ModuleCalls()
    watching.stop()
    nn.ReLU()(torch.ones(1))
    assert watching.calls == []


@pytest.mark.slow
def test_it_is_known_whether_something_was_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert not model_is_compiled()
    torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1))
    assert model_is_compiled()
    torch._dynamo.utils.counters.clear()
