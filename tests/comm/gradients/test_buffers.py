"""Gradients go into flat buffers and come out of them, and what users do to them meanwhile is seen."""

import itertools
import logging
from collections.abc import Sequence

import pytest
import torch
from fakes.gradients import make_buffers, parameters

from sirtaki.comm.device import Device
from sirtaki.comm.gradients.buffers import (
    FLAG_COUNT,
    WRITTEN,
    Arrivals,
    ControlFlags,
    GradientBuffers,
    LostEdits,
    Pace,
    Said,
)

SHAPES = ((2, 3), (0,), (5,), (), (2, 2, 2))


def lost(arrivals: Arrivals, unused: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """Hands out; the parameters whose gradients were replaced, and written, too early."""
    arrivals.hand_out(unused)
    return arrivals.lost_replaced, arrivals.lost_written


def all_arrive(params: list[torch.nn.Parameter], arrivals: Arrivals) -> None:
    for index, param in enumerate(params):
        assert param.grad is not None
        arrivals.add(arrivals._buffers.position[index], param.grad, param.grad._version)
    arrivals.own = len(params)
    arrivals.copy_in()


@pytest.mark.parametrize("order", [None, [4, 2, 0, 1, 3]])
def test_gradients_lie_one_behind_the_other_in_the_expected_order(order: list[int] | None) -> None:
    params = parameters(*SHAPES)
    wanted = torch.cat([params[index].grad.flatten() for index in order or range(5)])  # type: ignore[union-attr]
    buffers = make_buffers(params, order)
    all_arrive(params, Arrivals(buffers))
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


def test_a_view_whose_memory_was_swapped_gets_the_reduced_gradient_and_is_not_used_again() -> None:
    params = parameters((2,), (2,))
    buffers = make_buffers(params)
    for _ in range(2):
        fresh = torch.tensor([3.0, 4.0])
        params[0].grad, params[1].grad = fresh, fresh.clone()
        arrivals = Arrivals(buffers)
        all_arrive(params, arrivals)
        buffers.groups[0].buffer.tensor.mul_(2)
        arrivals.hand_out()
        assert [param.grad.tolist() for param in params] == [[6, 8], [6, 8]]  # type: ignore[union-attr]
        in_place = [param.grad.data_ptr() == buffers.addresses[index] for index, param in enumerate(params)]  # type: ignore[union-attr]
        params[0].grad.data = torch.zeros(2)
    assert in_place == [False, True], "in the iteration after the swap it is copied out"
    assert buffers.views[0].data_ptr() == buffers.addresses[0]


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
        arrivals = Arrivals(buffers)
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
    arrivals = Arrivals(buffers)
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
    assert lost(arrivals) == ([0], [1])
    assert params[0].grad is buffers.view(0)
    assert params[4].grad is None


def test_a_parameter_of_another_type_now_keeps_its_gradient_and_asks_for_new_buffers() -> None:
    params = parameters((2, 2), (3,))
    buffers = make_buffers(params)
    params[1].data = params[1].data.double()
    params[1].grad = torch.ones(3, dtype=torch.float64)
    arrivals = Arrivals(buffers)
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


def made(*shapes: tuple[int, ...]) -> tuple[list[torch.nn.Parameter], GradientBuffers, Arrivals]:
    params = parameters(*shapes)
    buffers = make_buffers(params)
    return params, buffers, Arrivals(buffers)


def add(arrivals: Arrivals, params: list[torch.nn.Parameter], *indices: int) -> None:
    """These gradients of this rank's come now."""
    for index in indices:
        gradient = params[index].grad
        assert gradient is not None
        arrivals.add(index, gradient, gradient._version)
    arrivals.own = len(arrivals.positions)


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
    assert arrivals.positions == [2, 0, 1]


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
    assert lost(arrivals) == ([], [1])


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
    assert lost(arrivals) == ([], [])
    assert params[1].grad is None


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
    arrivals = Arrivals(buffers)
    add(arrivals, params, 1, 2, 0)
    assert arrivals.copy_in() == 3
    assert lost(arrivals) == ([], [])
    assert [param.grad.tolist() for param in params] == wanted  # type: ignore[union-attr]
    assert all(param.grad is buffers.view(index) for index, param in enumerate(params))


def test_gradients_are_handed_out_one_by_one_and_left_alone_after_that() -> None:
    params, buffers, arrivals = made((2,), (2,), (1,))
    add(arrivals, params, 0, 1, 2)
    arrivals.copy_in()
    arrivals.hand_out_some([1])
    assert arrivals.lost_written == []
    assert params[1].grad is not None
    params[1].grad.zero_()  # what is done to it now holds
    params[2].grad = torch.ones(1)  # and this comes too early
    buffers.groups[0].buffer.tensor[0] = 7
    assert lost(arrivals) == ([2], [])
    assert params[1].grad.tolist() == [0, 0]
    arrivals.hand_out_some([0])
    assert arrivals.lost_replaced == [2]


def of_two(own: int, *, replaced: bool = False, written: bool = False) -> Arrivals:
    """Of two parameters, of which the first ones' gradients have come, and the first one's was changed too early."""
    params, _, found = made((2,), (3,))
    add(found, params, *range(own))
    found.lost_replaced, found.lost_written = [0] * replaced, [0] * written
    return found


@pytest.mark.parametrize(
    ("done", "said", "words"),
    [
        ({}, Said(complete=True), ""),
        ({"written": True}, Said(written=True), "the gradient of a was written before it was reduced, which ends with"),
        ({}, Said(written=True, complete=True), "another rank has written a gradient"),
        ({"replaced": True}, Said(replaced=True), ""),
        (
            {"replaced": True},
            Said(replaced=True, complete=True),
            "the gradient of a was replaced before it was reduced",
        ),
        ({}, Said(replaced=True, complete=True), "another rank has replaced a gradient"),
    ],
)
def test_what_ranks_would_differ_by_is_a_problem(done: dict[str, bool], said: Said, words: str) -> None:
    problem = LostEdits().look(of_two(1, **done), ["a", "b"], said)
    assert problem.startswith(words)
    assert bool(problem) == bool(words)
    assert not words or "because b had no gradient" in problem or "another rank" in problem
    assert not words or "optimizer.synchronize()" in problem


def test_a_replaced_gradient_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    edits = LostEdits()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            edits.look(of_two(1, replaced=True), ["a", "b"], Said(replaced=True))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "the gradient of a was replaced before it was reduced"
    ]


def test_a_device_hears_of_others_an_iteration_later_and_of_itself_at_once() -> None:
    edits = LostEdits()
    own = edits.look(of_two(1, written=True), ["a", "b"], Said())
    assert edits.hear_late(own, Said()) == own != ""
    assert edits.hear_late("", Said(written=True)) == "", "this rank has said so"
    assert "iteration before" in edits.hear_late("", Said(written=True))


ALL = [Said(*map(bool, bits)) for bits in itertools.product((0, 1), repeat=FLAG_COUNT)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_any_rank_says_is_heard_after_the_sum(dtype: torch.dtype) -> None:
    buffer = torch.zeros(FLAG_COUNT, dtype=dtype)
    flags = ControlFlags(Device(), buffer)
    for own, others in itertools.product(ALL, repeat=2):
        if not (own.not_slower or own.not_faster):
            continue  # nobody finds both
        flags.pace = own.pace
        flags.write(own)
        buffer += 7 * torch.tensor(others, dtype=dtype)  # of seven other ranks
        buffer /= 8  # an average
        heard = Said(*(mine or theirs for mine, theirs in zip(own, others, strict=True)))
        assert flags.read() == heard


def test_with_streams_what_is_said_is_heard_in_the_next_iteration() -> None:
    device = Device()
    device.streams = True
    buffer = torch.zeros(FLAG_COUNT)
    flags = ControlFlags(device, buffer)
    flags.write(Said(reprofile=True))
    assert flags.read() == Said()
    buffer.zero_()
    assert flags.read().reprofile
    flags.write(Said(written=True))
    flags.read()
    flags.forget()
    assert not flags.read().written


@pytest.mark.parametrize(
    ("ranks", "agreed"),
    [
        ([Pace.SLOWER, Pace.SLOWER], Pace.SLOWER),
        ([Pace.FASTER, Pace.FASTER], Pace.FASTER),
        ([Pace.USUAL, Pace.USUAL], Pace.USUAL),
        ([Pace.SLOWER, Pace.USUAL], Pace.USUAL),
        ([Pace.FASTER, Pace.USUAL], Pace.USUAL),
        ([Pace.SLOWER, Pace.FASTER], Pace.USUAL),
    ],
)
def test_communication_has_changed_only_if_all_ranks_say_so(ranks: list[Pace], agreed: Pace) -> None:
    heard = Said(
        not_slower=any(pace is not Pace.SLOWER for pace in ranks),
        not_faster=any(pace is not Pace.FASTER for pace in ranks),
    )
    assert heard.pace is agreed
    assert Said().pace is Pace.USUAL, "nothing was read"
