"""What has come, what was put in for the rest, and what the user did to either before it was reduced."""

import pytest
import torch
from fakes.gradients import make_buffers, parameters

from sirtaki.comm.gradients.buffers import WRITTEN, Arrivals, GradientBuffers, Interference


def made(*shapes: tuple[int, ...]) -> tuple[list[torch.nn.Parameter], GradientBuffers, Arrivals]:
    params = parameters(*shapes)
    buffers = make_buffers(params)
    return params, buffers, Arrivals(params, buffers)


def add(arrivals: Arrivals, params: list[torch.nn.Parameter], *indices: int) -> None:
    """These gradients of this rank's come now."""
    for index in indices:
        gradient = params[index].grad
        assert gradient is not None
        arrivals.add(index, gradient, gradient._version)
    arrivals.own = len(arrivals.indices)


def flat(buffers: GradientBuffers) -> list[float]:
    values: list[float] = buffers.groups[0].buffer.tensor[:-2].tolist()
    return values


def test_only_what_has_come_since_the_last_time_is_copied_in() -> None:
    params, buffers, arrivals = made((2,), (1,), (2,))
    assert arrivals.copy_in() == 0
    add(arrivals, params, 2, 0)
    assert arrivals.copy_in() == 2
    assert flat(buffers) == [0, 1, 99, 200, 201]
    buffers.groups[0].buffer.tensor.fill_(-1)  # as if it were being reduced
    assert arrivals.copy_in() == 0
    add(arrivals, params, 1)
    assert arrivals.copy_in() == 1
    assert flat(buffers) == [-1, -1, 100, -1, -1]
    assert arrivals.indices == [2, 0, 1]


def test_what_was_put_in_is_not_this_ranks_own() -> None:
    params, _, arrivals = made((2,), (2,), (2,))
    add(arrivals, params, 1)
    arrivals.put_in(0)
    arrivals.put_in(2)
    assert arrivals.own_indices == [1]
    assert arrivals.indices == [1, 0, 2]


def test_a_gradient_that_is_there_is_put_in_as_it_is_and_handed_out_reduced() -> None:
    params, buffers, arrivals = made((2,))
    arrivals.put_in(0)
    arrivals.copy_in()
    assert flat(buffers) == [0, 1]
    buffers.groups[0].buffer.tensor.mul_(3)
    assert arrivals.hand_out() == Interference((), ())
    assert params[0].grad is buffers.view(0)
    assert params[0].grad.tolist() == [0, 3]


def test_zeros_stand_in_for_a_gradient_that_did_not_come_and_become_the_reduced_one() -> None:
    params, buffers, arrivals = made((2,), (3,))
    params[1].grad = None
    add(arrivals, params, 0)
    arrivals.put_in(1)
    arrivals.copy_in()
    assert flat(buffers) == [0, 1, 0, 0, 0]
    buffers.groups[0].buffer.tensor.add_(5)
    assert arrivals.hand_out() == Interference((), ())
    assert [param.grad.tolist() for param in params] == [[5, 6], [5, 5, 5]]  # type: ignore[union-attr]


def test_what_no_rank_has_computed_keeps_none_if_told_so() -> None:
    params, _, arrivals = made((2,), (2,))
    params[0].grad = params[1].grad = None
    arrivals.put_in(0)
    arrivals.put_in(1)
    arrivals.copy_in()
    arrivals.hand_out(unused=[1])
    assert params[0].grad is not None
    assert params[1].grad is None


def test_a_gradient_from_before_that_has_not_come_again_is_present() -> None:
    params, _, arrivals = made((2,), (2,), (2,))
    params[1].grad = None
    assert arrivals.present == [0, 2]
    add(arrivals, params, 2)
    assert arrivals.present == [0, 2]


def test_a_frozen_parameter_keeps_what_it_has_though_zeros_were_reduced_for_it() -> None:
    params, buffers, arrivals = made((2,), (2,), (2,))
    params[0].requires_grad_(requires_grad=False)  # with a gradient of its own
    params[1].grad = buffers.view(1)  # with one in the flat buffer
    params[1].grad.copy_(torch.tensor([7.0, 8.0]))
    params[1].requires_grad_(requires_grad=False)
    params[2].grad = None  # with none
    params[2].requires_grad_(requires_grad=False)
    for index in range(3):
        arrivals.put_in(index)
    arrivals.copy_in()
    assert flat(buffers) == [0] * 6
    buffers.groups[0].buffer.tensor.add_(5)
    arrivals.hand_out()
    assert params[0].grad is not None
    assert params[1].grad is not None
    assert params[0].grad.tolist() == [0, 1]
    assert params[1].grad.tolist() == [7, 8]
    assert params[2].grad is None


@pytest.mark.parametrize("copied", [False, True])
def test_a_gradient_written_in_place_before_it_is_reduced_is_named(copied: bool) -> None:
    params, _, arrivals = made((2,), (2,), (2,))
    add(arrivals, params, 2, 0, 1)
    if copied:
        arrivals.copy_in()
    assert arrivals.written == []
    params[0].grad.mul_(2)  # type: ignore[union-attr]
    params[2].grad.mul_(2)  # type: ignore[union-attr]
    params[2].grad = None  # what was written is not there any more
    assert arrivals.written == [0]


def test_what_was_written_before_it_was_copied_in_is_not_forgotten() -> None:
    params, _, arrivals = made((2,), (2,))
    add(arrivals, params, 0, 1)
    params[1].grad.mul_(2)  # type: ignore[union-attr]
    arrivals.copy_in()
    assert arrivals.versions[1] == WRITTEN
    assert arrivals.written == [1]
    assert arrivals.hand_out() == Interference(replaced=(), written=(1,))


@pytest.mark.parametrize("copied", [False, True])
def test_another_tensor_in_grad_is_a_replacement_and_none_is_not(copied: bool) -> None:
    params, _, arrivals = made((2,), (2,))
    add(arrivals, params, 0, 1)
    if copied:
        arrivals.copy_in()
    assert not arrivals.replaced
    params[0].grad = None
    assert not arrivals.replaced
    params[1].grad = torch.ones(2)
    assert arrivals.replaced


def test_a_gradient_that_the_user_dropped_was_computed_all_the_same_and_does_not_come_back() -> None:
    params, buffers, arrivals = made((2,), (2,))
    add(arrivals, params, 0, 1)
    params[1].grad = None
    arrivals.copy_in()
    assert flat(buffers) == [0, 1, 100, 101]
    assert arrivals.hand_out() == Interference((), ())
    assert params[1].grad is None


def test_a_replacement_gives_way_to_what_was_reduced_and_what_was_written_is_told() -> None:
    params, buffers, arrivals = made((2,), (2,), (2,))
    add(arrivals, params, 0, 1, 2)
    arrivals.copy_in()
    params[1].grad = torch.ones(2)
    params[2].grad.mul_(2)  # type: ignore[union-attr]
    assert arrivals.hand_out() == Interference(replaced=(1,), written=(2,))
    assert params[1].grad is buffers.view(1)
    assert params[1].grad.tolist() == [100, 101]


def test_where_the_place_does_not_fit_any_more_the_reduced_gradient_is_copied() -> None:
    params, buffers, arrivals = made((2, 2), (2,))
    add(arrivals, params, 0, 1)
    arrivals.copy_in()
    params[0].data = params[0].data.t()  # other strides now
    params[0].grad = torch.full((2, 2), -1.0)
    arrivals.hand_out()
    assert params[0].grad.stride() == params[0].stride()
    assert params[0].grad.tolist() == [[0, 1], [2, 3]]
    assert params[0].grad.data_ptr() != buffers.addresses[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_any_dtype_comes_out_as_it_went_in(dtype: torch.dtype) -> None:
    params = parameters((3,), (0,), (), dtype=dtype)
    wanted = [param.grad.tolist() for param in params]  # type: ignore[union-attr]
    buffers = make_buffers(params)
    arrivals = Arrivals(params, buffers)
    add(arrivals, params, 1, 2, 0)
    assert arrivals.copy_in() == 3
    assert arrivals.hand_out() == Interference((), ())
    assert [param.grad.tolist() for param in params] == wanted  # type: ignore[union-attr]
    assert all(param.grad is buffers.view(index) for index, param in enumerate(params))


def test_where_nothing_has_come_there_is_nothing_to_hand_out() -> None:
    params, _, arrivals = made((2,))
    assert arrivals.hand_out() == Interference((), ())
    assert params[0].grad.tolist() == [0, 1]  # type: ignore[union-attr]


def test_gradients_are_handed_out_one_by_one_and_left_alone_after_that() -> None:
    params, buffers, arrivals = made((2,), (2,), (1,))
    add(arrivals, params, 0, 1, 2)
    arrivals.copy_in()
    assert arrivals.hand_out_some([1]) == Interference((), ())
    assert params[1].grad is not None
    params[1].grad.zero_()  # what is done to it now holds
    params[2].grad = torch.ones(1)  # and this comes too early
    buffers.groups[0].buffer.tensor[0] = 7
    assert arrivals.hand_out() == Interference(replaced=(2,), written=())
    assert params[1].grad.tolist() == [0, 0]
    assert arrivals.hand_out_some([0]) == Interference((), ())
