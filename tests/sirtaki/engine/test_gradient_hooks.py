"""Hooks count backward passes, and pass complete gradients on."""

import gc
import weakref
from functools import partial

import pytest
import torch

from sirtaki.engine.reducing.hooks import Dense, GradientHooks


class Recorder:
    """An owner that writes down what it hears."""

    too_often = "more than backward_passes_per_step"

    def __init__(self) -> None:
        self.begun = 0
        self.hooks: GradientHooks | None = None
        self.arrived: list[tuple[int, int]] = []
        self.sparse: list[int] = []

    def begin_backward(self) -> GradientHooks | None:
        self.begun += 1
        return self.hooks

    def as_it_travels(self, number: int) -> torch.Tensor:
        self.sparse.append(number)
        return torch.zeros(1)

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        self.arrived.append((index, version))

    def arrive(self, number: int, gradient: torch.Tensor, version: int) -> None:
        self.arrived.append((100 + number, version))


def hooked(
    recorder: Recorder,
    params: list[torch.nn.Parameter],
    *,
    groups: list[list[torch.Tensor]] | None = None,
    passes: int = 1,
) -> GradientHooks:
    arrive = [
        Dense(recorder.ready, 10 * number) if number != 1 else partial(recorder.arrive, number)
        for number in range(len(params))
    ]
    recorder.hooks = GradientHooks(params, arrive, groups or [], passes=passes, owner=recorder, nan_check=None)
    return recorder.hooks


@pytest.fixture
def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]


def backward(params: list[torch.nn.Parameter]) -> None:
    sum((param.sum() for param in params), torch.zeros(())).backward()


def test_each_gradient_arrives_once_complete_and_where_it_belongs(params: list[torch.nn.Parameter]) -> None:
    recorder = Recorder()
    hooks = hooked(recorder, params)
    backward(params)
    assert sorted(index for index, _ in recorder.arrived) == [0, 20, 101]
    assert recorder.begun == 1
    assert hooks.in_backward
    assert hooks.passes_left == [0, 0, 0]
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        backward(params)


def test_gradients_of_several_passes_arrive_with_the_last(params: list[torch.nn.Parameter]) -> None:
    recorder = Recorder()
    hooks = hooked(recorder, params, passes=3)
    for left in (2, 1):
        backward(params)
        assert not recorder.arrived
        assert hooks.passes_left == [left] * 3
    backward(params)
    assert len(recorder.arrived) == 3
    assert all(version == param.grad._version for (_, version), param in zip(recorder.arrived, params, strict=True))  # type: ignore[union-attr]
    hooks.begin(1)
    backward(params)
    assert len(recorder.arrived) == 6


def test_gradients_of_each_parameter_may_come_another_number_of_times(params: list[torch.nn.Parameter]) -> None:
    recorder = Recorder()
    hooks = hooked(recorder, params)
    hooks.begin([1, 2, 1])
    backward(params)
    assert sorted(index for index, _ in recorder.arrived) == [0, 20]
    assert hooks.counted == params
    backward(params[1:2])
    assert [index for index, _ in recorder.arrived[2:]] == [101]


def test_a_group_arrives_with_its_last_member_or_when_it_is_released(params: list[torch.nn.Parameter]) -> None:
    recorder = Recorder()
    hooks = hooked(recorder, params, groups=[[params[0], params[2]]])
    backward(params[:2])
    assert [index for index, _ in recorder.arrived] == [101]
    backward(params[2:])
    assert [index for index, _ in recorder.arrived[1:]] == [0, 20]
    hooks.begin(1)
    backward(params[:1])
    hooks.release()
    assert [index for index, _ in recorder.arrived[3:]] == [0]


def test_a_sparse_gradient_travels_as_the_owner_says() -> None:
    recorder, table = Recorder(), torch.nn.Embedding(5, 2, sparse=True)
    keep = hooked(recorder, [table.weight])
    table(torch.tensor([1, 3])).sum().backward()
    assert recorder.sparse == [0]
    assert recorder.arrived == [(0, 0)]
    keep.remove()


def test_hooks_that_are_replaced_in_the_first_gradients_hook_pass_it_on(params: list[torch.nn.Parameter]) -> None:
    """What a failed pass has left is ended there, which may change what is watched."""

    class Replacing(Recorder):
        def begin_backward(self) -> GradientHooks | None:
            if not self.begun and self.hooks is not None:
                self.hooks.remove()
                hooked(self, params[::-1])
            return super().begin_backward()

    recorder = Replacing()
    hooked(recorder, params).passes_left[:] = [0, 1, 0]  # of a pass before
    backward(params)
    assert sorted(index for index, _ in recorder.arrived) == [0, 20, 101]
    assert recorder.hooks is not None
    assert recorder.hooks.passes_left == [0, 0, 0]


def test_hooks_end_with_their_owner_and_keep_nothing_alive(params: list[torch.nn.Parameter]) -> None:
    recorder = Recorder()
    hooks = hooked(recorder, params)
    gone = weakref.ref(hooks)
    gc.disable()
    try:
        recorder.hooks = None
        del hooks
        assert gone() is None, "reference counting suffices"
    finally:
        gc.enable()
    backward(params)
    backward(params)
    assert not recorder.arrived
    removed = hooked(recorder, params)
    removed.remove()
    backward(params)
    assert not recorder.arrived
