"""Gradients go into flat buffers and come out of them, and what users do to them meanwhile is seen."""

import pytest
import torch
from fakes.gradients import make_buffers, parameters

from sirtaki.comm.gradients.buffers import Arrivals, Interference

SHAPES = ((2, 3), (0,), (5,), (), (2, 2, 2))


def all_arrive(params: list[torch.nn.Parameter], arrivals: Arrivals) -> None:
    for index, param in enumerate(params):
        assert param.grad is not None
        arrivals.add(index, param.grad, param.grad._version)
    arrivals.own = len(params)
    arrivals.copy_in()


@pytest.mark.parametrize("order", [None, [4, 2, 0, 1, 3]])
def test_gradients_lie_one_behind_the_other_in_the_expected_order(order: list[int] | None) -> None:
    params = parameters(*SHAPES)
    wanted = torch.cat([params[index].grad.flatten() for index in order or range(5)])  # type: ignore[union-attr]
    buffers = make_buffers(params, order)
    all_arrive(params, Arrivals(params, buffers))
    (group,) = buffers.groups
    assert torch.equal(group.buffer.tensor[:-2], wanted)
    assert buffers.flags.numel() == 2


def test_every_dtype_has_a_buffer_and_the_first_one_the_flags() -> None:
    params = [*parameters((3,)), *parameters((2,), dtype=torch.float64), *parameters((4,))]
    buffers = make_buffers(params)
    assert [(group.indices, group.buffer.tensor.dtype) for group in buffers.groups] == [
        ([0, 2], torch.float32),
        ([1], torch.float64),
    ]
    assert [layout.numel for layout in buffers.layouts] == [3 + 4 + 2, 2]


def test_after_the_reduction_every_gradient_is_a_view_of_the_flat_buffer() -> None:
    params = parameters(*SHAPES)
    buffers = make_buffers(params)
    arrivals = Arrivals(params, buffers)
    all_arrive(params, arrivals)
    buffers.groups[0].buffer.tensor.mul_(0.5)
    interference = arrivals.hand_out()
    assert (interference.replaced, interference.written) == ((), ())
    for index, param in enumerate(params):
        assert param.grad is buffers.views[index]
        assert torch.equal(param.grad, 0.5 * parameters(*SHAPES)[index].grad)  # type: ignore[operator]


def test_a_view_whose_memory_was_swapped_gets_the_reduced_gradient_and_is_not_used_again() -> None:
    params = parameters((2,), (2,))
    buffers = make_buffers(params)
    for _ in range(2):
        fresh = torch.tensor([3.0, 4.0])
        params[0].grad, params[1].grad = fresh, fresh.clone()
        arrivals = Arrivals(params, buffers)
        all_arrive(params, arrivals)
        buffers.groups[0].buffer.tensor.mul_(2)
        arrivals.hand_out()
        assert [param.grad.tolist() for param in params] == [[6, 8], [6, 8]]  # type: ignore[union-attr]
        in_place = [param.grad.data_ptr() == buffers.addresses[index] for index, param in enumerate(params)]  # type: ignore[union-attr]
        params[0].grad.data = torch.zeros(2)
    assert in_place == [False, True], "in the iteration after the swap it is copied out"
    assert buffers.views[0].data_ptr() == buffers.addresses[0]


def test_gradients_may_come_in_another_order_each_time() -> None:
    params = parameters((2,), (3,), (4,))
    buffers = make_buffers(params)
    for order in ([0, 1, 2], [0, 2, 1], [0, 1, 2]):
        values = [torch.randn(param.shape) for param in params]
        for param, value in zip(params, values, strict=True):
            param.grad = value.clone()
        arrivals = Arrivals(params, buffers)
        for index in order:
            arrivals.add(index, params[index].grad, 0)  # type: ignore[arg-type]
        arrivals.own = 3
        arrivals.copy_in()
        assert arrivals.hand_out() == Interference((), ())
        for param, value in zip(params, values, strict=True):
            assert torch.equal(param.grad, value)  # type: ignore[arg-type]


def test_other_strides_or_another_dtype_make_the_buffers_outdated() -> None:
    for change in (
        lambda param: param.data.contiguous(memory_format=torch.channels_last),
        lambda param: param.data.double(),
    ):
        (param,) = parameters((2, 3, 4, 5))
        buffers = make_buffers([param])
        assert buffers.fits(0)
        param.grad = None
        param.data = change(param)
        assert not buffers.fits(0)
        param.grad = torch.empty_like(param).fill_(3.0)
        arrivals = Arrivals([param], buffers)
        all_arrive([param], arrivals)
        assert buffers.outdated
        arrivals.hand_out()
        assert param.grad is not None
        assert param.grad.stride() == param.stride()
        assert param.grad.dtype is param.dtype
        assert bool((param.grad == 3.0).all())


def test_gradients_out_of_order_or_of_several_kinds_are_copied_one_by_one() -> None:
    params = parameters(*SHAPES)
    buffers = make_buffers(params)
    arrivals = Arrivals(params, buffers)
    wanted = [param.grad.clone() for param in params]  # type: ignore[union-attr]
    params[2].grad.data = params[2].grad.data.clone()  # type: ignore[union-attr]
    for index in (3, 0, 4, 2, 1):
        gradient = params[index].grad
        assert gradient is not None
        arrivals.add(index, gradient, gradient._version)
    params[0].grad = torch.full((2, 3), -1.0)  # replaced
    params[4].grad = None
    params[1].grad.add_(1)  # type: ignore[union-attr]  # written
    arrivals.own = len(params)
    arrivals.copy_in()
    wanted[1] += 1
    for index, value in enumerate(wanted):
        assert torch.equal(buffers.view(index), value)
    assert [params[index].grad is buffers.view(index) for index in range(5)] == [False, True, True, True, False]
    done = arrivals.hand_out()
    assert done.replaced == (0,)
    assert done.written == (1,)
    assert params[0].grad is buffers.view(0)
    assert params[4].grad is None


def test_a_parameter_of_another_type_now_keeps_its_gradient_and_asks_for_new_buffers() -> None:
    params = parameters((2, 2), (3,))
    buffers = make_buffers(params)
    params[1].data = params[1].data.double()
    params[1].grad = torch.ones(3, dtype=torch.float64)
    arrivals = Arrivals(params, buffers)
    all_arrive(params, arrivals)
    assert buffers.outdated
    assert params[0].grad is buffers.view(0)
    buffers.view(1).fill_(7)
    arrivals.hand_out()
    assert params[1].grad.dtype is torch.float64
    assert params[1].grad.tolist() == [7, 7, 7]


def test_the_place_of_a_gradient_is_told_by_layout() -> None:
    params = [*parameters((3,)), *parameters((2,), dtype=torch.float64), *parameters((4,))]
    assert make_buffers(params, [2, 1, 0]).layout_places == [(0, 1), (1, 0), (0, 0)]
