"""On the host everything has happened when its call returns."""

import time

import pytest
import torch

from sirtaki.comm.device import HOST, HostDevice, copy_


def test_what_is_launched_has_been_done_also_beside_and_on_other_streams() -> None:
    device, done = HostDevice(), list[int]()
    device.launch(done.append, 1)
    with device.beside():
        device.launch(done.append, 2)
        with device.beside(), device.on(device.make_stream()):  # one in the other
            device.launch(done.append, 3)
        assert done == [1, 2, 3]
    device.synchronise()
    assert done == [1, 2, 3]


def test_an_error_in_what_is_launched_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        HOST.launch(lambda: 1 // 0)


def test_events_are_moments_that_are_over() -> None:
    device = HostDevice()
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


def test_users_of_one_device_are_not_those_of_another() -> None:
    one, other = HostDevice(), HostDevice()
    one.users += 1
    assert (one.users, other.users) == (1, 0)
    assert not one.streams
    assert one.torch_device == torch.device("cpu")


def test_nothing_is_kept_on_the_host() -> None:
    device = HostDevice()
    tensor = torch.zeros(3)
    device.pin(tensor)
    device.keep([tensor])
    device.notice_stream()
    device.release()
    assert not tensor.is_pinned()


def test_a_copy_converts_and_keeps_the_target() -> None:
    target, source = torch.zeros(2, 3, dtype=torch.float64).t(), torch.arange(6.0).reshape(3, 2)
    where = target.data_ptr()
    HOST.launch(copy_, target, source)
    assert torch.equal(target, source.double())
    assert target.data_ptr() == where
