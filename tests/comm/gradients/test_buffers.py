"""Gradients are copied into and out of flat buffers, and changes by the user are detected."""

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from fakes.gradients import make_buffers, parameters

from sirtaki.comm.device import Device
from sirtaki.comm.gradients.buffers import FlatBuffers
from sirtaki.comm.gradients.edits import EditCheck
from sirtaki.comm.gradients.flags import FLAG_COUNT, Drift, FlagTraffic, RankFlags
from sirtaki.comm.gradients.ready import ReadyGradients

Params = list[torch.nn.Parameter]


def made(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Params, FlatBuffers, ReadyGradients]:
    params = parameters(*shapes, dtype=dtype)
    buffers = make_buffers(params)
    return params, buffers, ReadyGradients(buffers)


def come(arrivals: ReadyGradients, params: Params, *indices: int) -> None:
    """Mark gradients of this rank as ready."""
    for index in indices:
        gradient = params[index].grad
        assert gradient is not None
        arrivals.add(index, gradient, gradient._version)
    arrivals.own = len(arrivals.positions)


def flat(buffers: FlatBuffers) -> list[float]:
    values: list[float] = buffers.groups[0].buffer.tensor[:-2].tolist()
    return values


def test_every_dtype_has_a_buffer_in_the_expected_order_and_the_first_one_the_flags() -> None:
    params = [*parameters((3,)), *parameters((2,), dtype=torch.float64), *parameters((4,))]
    buffers = make_buffers(params)
    assert [(group.indices, group.buffer.tensor.dtype) for group in buffers.groups] == [
        ([0, 2], torch.float32),
        ([1], torch.float64),
    ]
    assert [layout.numel for layout in buffers.layouts] == [3 + 4 + 2, 2]
    assert make_buffers(params, [2, 1, 0]).layout_places == [(0, 1), (1, 0), (0, 0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_ready_since_the_last_call_are_copied_in_and_out_unchanged(dtype: torch.dtype) -> None:
    params, buffers, arrivals = made((2,), (1,), (0,), (2,), (), dtype=dtype)
    wanted = [param.grad.tolist() for param in params]  # type: ignore[union-attr]
    params[1].grad = None
    assert arrivals.present == [0, 2, 3, 4]
    params[1].grad = torch.tensor(wanted[1], dtype=dtype)
    come(arrivals, params, 3, 0, 4)
    assert [arrivals.copy_in() for _ in range(2)] == [3, 0]
    come(arrivals, params, 2, 1)
    assert arrivals.copy_in() == 2
    arrivals.assign_all()
    assert [param.grad.tolist() for param in params] == wanted  # type: ignore[union-attr]
    assert all(param.grad is buffers.view(index) for index, param in enumerate(params))


def test_a_view_with_swapped_memory_gets_the_reduced_gradient_and_is_not_used_again() -> None:
    params, buffers, _ = made((2,), (2,))
    for _ in range(2):
        fresh = torch.tensor([3.0, 4.0])
        params[0].grad, params[1].grad = fresh, fresh.clone()
        arrivals = ReadyGradients(buffers)
        come(arrivals, params, 0, 1)
        arrivals.copy_in()
        buffers.groups[0].buffer.tensor.mul_(2)
        arrivals.assign_all()
        assert [param.grad.tolist() for param in params] == [[6, 8], [6, 8]]  # type: ignore[union-attr]
        in_place = [param.grad.data_ptr() == buffers.addresses[index] for index, param in enumerate(params)]  # type: ignore[union-attr]
        params[0].grad.data = torch.zeros(2)
    assert in_place == [False, True], "in the iteration after the swap it is copied out"
    assert buffers.views[0].data_ptr() == buffers.addresses[0]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    "change",
    [lambda param: param.data.contiguous(memory_format=torch.channels_last), lambda param: param.data.double()],
)
def test_other_strides_or_another_dtype_make_the_buffers_outdated(
    change: Callable[[torch.Tensor], torch.Tensor], in_order: bool
) -> None:
    params, buffers, arrivals = made((2, 3, 4, 5), (3,))
    (param, other) = params
    param.grad = None
    param.data = change(param)
    assert [buffers.fits(0), buffers.fits(1)] == [False, True]
    param.grad = torch.empty_like(param).fill_(3.0)
    if in_order:
        assert arrivals.add_in_order(params)
        arrivals.own = 2
    else:
        come(arrivals, params, 1, 0)
    arrivals.copy_in()
    assert buffers.outdated
    assert other.grad is buffers.view(1)
    arrivals.assign_all()
    assert (param.grad.stride(), param.grad.dtype) == (param.stride(), param.dtype)
    assert bool((param.grad == 3.0).all())


def test_gradients_in_the_expected_order_are_appended_and_others_counted() -> None:
    params, _, arrivals = made((2,), (2,), (2,))
    assert not arrivals.add_in_order(params[1:])
    params[0].grad = None
    assert not arrivals.add_in_order(params)
    params[0].grad = torch.ones(2).to_sparse()
    assert not arrivals.add_in_order(params)
    assert arrivals.positions == []
    params[0].grad = torch.ones(2)
    assert arrivals.add_in_order(params[:1])
    assert arrivals.add_in_order(params[1:])
    assert not arrivals.add_in_order(params[2:])


@pytest.mark.parametrize("copied", [False, True])
def test_the_users_changes_of_ready_gradients_are_detected(copied: bool) -> None:
    params, buffers, arrivals = made((2, 3), (0,), (5,), (), (2, 2, 2))
    wanted = [param.grad.clone() for param in params]  # type: ignore[union-attr]
    params[2].grad.data = params[2].grad.data.clone()  # type: ignore[union-attr]
    come(arrivals, params, 3, 0, 4, 2, 1)
    if copied:
        arrivals.copy_in()
    assert (arrivals.written, arrivals.replaced) == ([], False)
    params[4].grad.mul_(2)  # type: ignore[union-attr]
    params[4].grad = None  # it was computed all the same, and does not come back
    assert (arrivals.written, arrivals.replaced) == ([], False)
    params[0].grad = torch.full((2, 3), -1.0)
    params[3].grad.add_(1)  # type: ignore[union-attr]
    assert (arrivals.written, arrivals.replaced) == ([3], True)
    arrivals.copy_in()
    assert arrivals.written == [3], "what was written before it was copied in is not forgotten"
    for index in (0, 1, 2):
        assert torch.equal(buffers.view(index), wanted[index])
    arrivals.assign_all()
    assert (arrivals.lost_replaced, arrivals.lost_written) == ([0], [3])
    assert params[0].grad is buffers.view(0)
    assert params[4].grad is None


def test_a_frozen_parameter_keeps_its_gradient_although_zeros_were_reduced() -> None:
    params, buffers, arrivals = made((2,), (2,), (2,))
    params[0].requires_grad_(requires_grad=False)  # with a gradient of its own
    params[1].grad = buffers.view(1)  # with one in the flat buffer
    params[1].grad.copy_(torch.tensor([7.0, 8.0]))
    params[1].requires_grad_(requires_grad=False)
    params[2].grad = None  # with none
    params[2].requires_grad_(requires_grad=False)
    for index in range(3):
        arrivals.fill_missing(index)
    arrivals.copy_in()
    assert flat(buffers) == [0] * 6
    buffers.groups[0].buffer.tensor.add_(5)
    arrivals.assign_all()
    assert [None if param.grad is None else param.grad.tolist() for param in params] == [[0, 1], [7, 8], None]


def test_where_the_place_does_not_fit_any_more_the_reduced_gradient_is_copied() -> None:
    params, buffers, arrivals = made((2, 2), (2,))
    come(arrivals, params, 0, 1)
    arrivals.copy_in()
    params[0].data = params[0].data.t()  # other strides now
    params[0].grad = torch.full((2, 2), -1.0)
    arrivals.assign_all()
    assert params[0].grad.stride() == params[0].stride()
    assert params[0].grad.tolist() == [[0, 1], [2, 3]]
    assert params[0].grad.data_ptr() != buffers.addresses[0]


def test_gradients_are_assigned_one_by_one_and_not_touched_afterwards() -> None:
    params, buffers, arrivals = made((2,), (2,), (1,))
    come(arrivals, params, 0, 1, 2)
    arrivals.copy_in()
    arrivals.assign([1])
    assert params[1].grad is not None
    params[1].grad.zero_()  # what is done to it now holds
    arrivals.assign([0, 1])
    params[2].grad = torch.ones(1)  # and this comes too early
    buffers.groups[0].buffer.tensor[0] = 7
    arrivals.assign_all()
    assert (arrivals.lost_replaced, arrivals.lost_written) == ([2], [])
    assert params[1].grad.tolist() == [0, 0]


# ── what ranks tell each other ───────────────────────────────────────────────────────────────────────────────────


def changed(*, replaced: bool = False, written: bool = False) -> ReadyGradients:
    """Return two parameters' ready gradients, of which the first one was changed too early."""
    params, _, found = made((2,), (3,))
    come(found, params, 0)
    found.lost_replaced, found.lost_written = [0] * replaced, [0] * written
    return found


@pytest.mark.parametrize(
    ("done", "said", "words"),
    [
        ({}, RankFlags(complete=True), ""),
        (
            {"written": True},
            RankFlags(written=True),
            "the gradient of a was written before it was reduced, which ends with",
        ),
        ({}, RankFlags(written=True, complete=True), "another rank has written a gradient"),
        ({"replaced": True}, RankFlags(replaced=True), ""),
        (
            {"replaced": True},
            RankFlags(replaced=True, complete=True),
            "the gradient of a was replaced before it was reduced",
        ),
        ({}, RankFlags(replaced=True, complete=True), "another rank has replaced a gradient"),
    ],
)
def test_changes_by_which_ranks_would_differ_are_a_problem(done: dict[str, bool], said: RankFlags, words: str) -> None:
    problem = EditCheck().problem(changed(**done), ["a", "b"], said)
    assert problem.startswith(words)
    assert bool(problem) == bool(words)
    assert not words or "because b had no gradient" in problem or "another rank" in problem
    assert not words or "optimizer.synchronize()" in problem


def test_a_replaced_gradient_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    edits = EditCheck()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            edits.problem(changed(replaced=True), ["a", "b"], RankFlags(replaced=True))
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "user code replaced the gradient of a during backward()"
    ]


def test_a_device_learns_of_peers_an_iteration_later_and_of_its_own_rank_at_once() -> None:
    edits = EditCheck()
    own = edits.problem(changed(written=True), ["a", "b"], RankFlags())
    assert edits.delayed_problem(own, RankFlags()) == own != ""
    assert edits.delayed_problem("", RankFlags(written=True)) == "", "this rank has said so"
    assert "iteration before" in edits.delayed_problem("", RankFlags(written=True))


ALL = [RankFlags(*map(bool, bits)) for bits in itertools.product((0, 1), repeat=FLAG_COUNT)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_flag_of_any_rank_is_known_after_the_sum(dtype: torch.dtype) -> None:
    buffer = torch.zeros(FLAG_COUNT, dtype=dtype)
    flags = FlagTraffic(Device(), buffer)
    for own, others in itertools.product(ALL, repeat=2):
        if not (own.not_slower or own.not_faster):
            continue  # nobody finds both
        flags.drift = own.drift
        flags.write(own)
        buffer += 7 * torch.tensor(others, dtype=dtype)  # of seven other ranks
        buffer /= 8  # an average
        heard = RankFlags(*(mine or theirs for mine, theirs in zip(own, others, strict=True)))
        assert flags.read() == heard
        if own.drift is not Drift.USUAL:
            agrees = RankFlags(not_slower=own.not_slower, not_faster=own.not_faster).drift
            differs = others.not_slower > own.not_slower or others.not_faster > own.not_faster
            assert heard.drift is (Drift.USUAL if differs else agrees)


def test_with_streams_flags_are_known_in_the_next_iteration() -> None:
    device = Device()
    device.streams = True
    buffer = torch.zeros(FLAG_COUNT)
    flags = FlagTraffic(device, buffer)
    flags.write(RankFlags(reprofile=True))
    assert flags.read() == RankFlags()
    buffer.zero_()
    assert flags.read().reprofile
    flags.write(RankFlags(written=True))
    flags.read()
    flags.forget()
    assert not flags.read().written
