"""On the host all has happened when its call returns; on a GPU the order is that of streams and events."""

import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from fakes.cuda import FakeCuda

from sirtaki.comm.device import HOST, POOL_STREAMS, CudaDevice, Device, copy_


def test_launched_operations_are_done_also_beside_and_on_other_streams() -> None:
    device, done = Device(), list[int]()
    device.launch(done.append, 1)
    with device.beside():
        device.launch(done.append, 2)
        with device.beside(), device.on(device.make_stream()):  # one in the other
            device.launch(done.append, 3)
        assert done == [1, 2, 3]
    device.synchronise()
    assert done == [1, 2, 3]


def test_events_of_the_host_are_in_the_past() -> None:
    device = Device()
    begin = device.record_event()
    time.sleep(0.002)
    end = device.record_event()
    assert device.elapsed_s(begin, end) == pytest.approx(end - begin)
    assert device.elapsed_s(begin, end) >= 0.002
    assert device.elapsed_s(end, begin) < 0.0
    assert device.is_reached(end)
    before_s = time.perf_counter()
    device.wait_for(end + 100.0)  # never waits
    device.order_after(end + 100.0)
    assert time.perf_counter() - before_s < 10.0


def test_a_copy_converts_and_keeps_the_target() -> None:
    target, source = torch.zeros(2, 3, dtype=torch.float64).t(), torch.arange(6.0).reshape(3, 2)
    where = target.data_ptr()
    HOST.launch(copy_, target, source)
    assert torch.equal(target, source.double())
    assert target.data_ptr() == where


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as made:
        yield made


def test_packing_follows_launched_operations_and_is_unordered_with_later_ones(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    flat, gradient = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    with device.beside():
        device.launch(copy_, flat, gradient)
    assert not cuda.races
    gradient.add_(1.0)
    assert len(cuda.races) == 1


def test_another_stream_is_ordered_by_events_alone(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    value, own = torch.zeros(4, device="cuda"), device.make_stream()
    written = device.record_event()
    with device.on(own):
        device.order_after(written)
        value.add_(1.0)
        added = device.record_event()
    device.order_after(added)
    value.add_(1.0)
    assert not cuda.races
    with device.on(own):
        value.add_(1.0)
    assert len(cuda.races) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_memory_is_kept_until_it_has_been_read(kept: bool, cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    flat, gradient = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    device.notice_stream()
    with device.beside():
        device.launch(copy_, flat, gradient)
        if kept:
            device.keep([gradient])
    del gradient
    torch.ones(4, device="cuda")  # where the gradient was
    device.release()
    assert bool(cuda.races) is not kept


def test_kept_tensors_are_freed_once_they_have_been_read(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    gradients = [torch.ones(4, device="cuda") for _ in range(2)]
    alive = [weakref.ref(gradient) for gradient in gradients]
    device.keep(gradients[:1])
    device.keep(gradients[1:])
    gradients.clear()
    device.keep([])
    assert all(one() is not None for one in alive)
    device.synchronise()
    device.keep([])
    assert all(one() is None for one in alive)


def test_copies_of_tensors_that_packing_overwrites_run_on_the_users_stream(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    flat = torch.zeros(4, device="cuda")
    with device.beside():
        with device.before_packing():
            saved = flat.clone()
        flat.fill_(1.0)
    saved.add_(1.0)  # at once, where the user is
    assert not cuda.races
    with device.before_packing():  # where nothing is packed
        saved.add_(1.0)
    assert not cuda.races


def test_only_timed_events_measure_seconds(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    begin = device.record_event(timed=True)
    torch.ones(4, device="cuda").add_(1.0)
    end = device.record_event(timed=True)
    assert not device.is_reached(end)
    device.wait_for(end)
    assert device.is_reached(end)
    assert device.elapsed_s(begin, end) > 0.0
    with pytest.raises(AssertionError, match="has no time"):
        device.elapsed_s(device.record_event(), end)


def test_memory_is_page_locked_as_long_as_its_tensor_lives(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    device.pin(torch.empty(0))
    tensor = torch.zeros(6, dtype=torch.float64)
    assert not tensor.is_pinned()
    device.pin(tensor)
    assert tensor.is_pinned()
    there = torch.zeros(6, dtype=torch.float64, device="cuda")
    cuda.steady = True
    device.launch(copy_, there, tensor)
    assert not cuda.blocking
    del tensor
    assert len(cuda.races) == 1  # it was unlocked while the copy may read it
    device.launch(copy_, there, torch.zeros(6, dtype=torch.float64))
    assert len(cuda.blocking) == 1


def test_streams_are_reused_only_if_no_other_is_left(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    own = {device.make_stream().cuda_stream for _ in range(POOL_STREAMS - 1)}
    assert len(own) == POOL_STREAMS - 1
    assert device.make_stream().cuda_stream in own | {100}  # there are no more
