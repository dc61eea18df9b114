"""On the host all has happened when its call returns; a GPU is asked in order (what it does: test_gpu.py)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.comm import device as device_module
from sirtaki.comm.device import HIGH_PRIORITY, HOST, CudaDevice, Device, copy_


def test_what_is_launched_has_been_done_also_beside_and_on_other_streams() -> None:
    device, done = Device(), list[int]()
    device.launch(done.append, 1)
    with device.beside():
        device.launch(done.append, 2)
        with device.beside(), device.on(device.make_stream()):  # one in the other
            device.launch(done.append, 3)
        assert done == [1, 2, 3]
    device.synchronise()
    assert done == [1, 2, 3]


def test_events_are_moments_that_are_over() -> None:
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


class Stream:
    def __init__(self, cuda: "Cuda", name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "Stream") -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "Event") -> None:
        self.cuda.log.append(f"{self.name} waits for event {event.number}")


class Event:
    def __init__(self, cuda: "Cuda") -> None:
        self.cuda, self.reached, self.at_ms = cuda, False, 0.0
        cuda.events.append(self)
        self.number = len(cuda.events)

    def record(self, stream: Stream) -> None:
        self.cuda.log.append(f"event {self.number} on {stream.name}")

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for event {self.number}")

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


class Cuda:
    """`torch.cuda` and what else is used of torch, as notes."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[Event] = []
        self.made: list[Any] = []
        self.raw, self.status = 1, 0
        self.registered: list[tuple[int, int]] = []
        self._inside = [Stream(self, "default")]

    def namespace(self) -> Any:
        runtime = SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: (self.registered.append((address, size)), self.status)[1],
            cudaHostUnregister=lambda address: self.log.append("unregistered"),
        )
        cuda = SimpleNamespace(
            Stream=self.make,
            Event=lambda enable_timing: Event(self),
            ExternalStream=lambda raw, device: Stream(self, f"raw {raw}"),
            stream=self.on,
            current_stream=lambda device: self._inside[-1],
            synchronize=lambda device: self.log.append(f"host waits for {device}"),
            cudart=lambda: runtime,
        )
        return SimpleNamespace(
            cuda=cuda, device=torch.device, _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: self.raw)
        )

    def make(self, device: Any, priority: int) -> Stream:
        self.made.append((str(device), priority))
        return Stream(self, f"own {len(self.made)}")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._inside.append(stream)
        yield
        self._inside.pop()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(device_module, "torch", made.namespace())
    return made


def test_packing_runs_on_a_stream_of_high_priority_behind_what_was_launched(cuda: Cuda) -> None:
    device = CudaDevice(2)
    assert cuda.made == [("cuda:2", HIGH_PRIORITY)]
    with device.beside():
        device.launch(cuda.log.append, "packed")
        device.record_event()
    device.record_event()
    assert cuda.log == ["own 1 waits for default", "packed", "event 1 on own 1", "event 2 on default"]


def test_what_runs_on_another_stream_has_no_order_to_the_current_one(cuda: Cuda) -> None:
    device = CudaDevice(0)
    own = device.make_stream()
    with device.on(own):
        device.order_after(Event(cuda))
    device.order_after(cuda.events[0])
    assert cuda.log == ["own 2 waits for event 1", "default waits for event 1"]


def test_packing_waits_for_streams_that_gradients_were_on_before_and_they_for_it_at_the_end(cuda: Cuda) -> None:
    device = CudaDevice(0)
    for raw in (1, 1, 2, 2, 1):
        cuda.raw = raw
        device.notice_stream()
    assert cuda.log == ["own 1 waits for raw 1", "own 1 waits for raw 2"]
    cuda.log.clear()
    device.release()
    assert sorted(cuda.log) == ["raw 1 waits for own 1", "raw 2 waits for own 1"]
    cuda.log.clear()
    device.release()
    assert cuda.log == ["raw 1 waits for own 1"]  # the latest one, which need not be noticed again


def test_memory_is_kept_until_it_has_been_read(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(0)
    tensors = [torch.zeros(1) for _ in range(3)]
    for tensor in tensors:
        device.keep([tensor])
    assert len(device._stash) == 3
    cuda.events[1].reached = True
    device.keep([])
    assert len(device._stash) == 4  # the first one is still read
    cuda.events[0].reached = True
    device.keep([])
    assert [event.number for event, _ in device._stash] == [3, 4, 5]
    device.release()
    assert len(device._stash) == 0
    monkeypatch.setattr(Event, "query", lambda event: True)
    device.keep(tensors)  # over before it is looked at
    assert len(device._stash) == 1


def test_moments_are_asked_of_the_gpu_and_told_in_seconds(cuda: Cuda) -> None:
    device = CudaDevice(1)
    begin, end = device.record_event(), device.record_event()
    end.at_ms = 250.0
    assert device.elapsed_s(begin, end) == 0.25
    assert not device.is_reached(end)
    end.reached = True
    assert device.is_reached(end)
    device.wait_for(end)
    device.synchronise()
    assert cuda.log[2:] == ["host waits for event 2", "host waits for cuda:1"]


def test_memory_is_page_locked_as_long_as_its_tensor_lives(cuda: Cuda) -> None:
    device = CudaDevice(0)
    device.pin(torch.empty(0))
    assert cuda.registered == []
    tensor = torch.zeros(6, dtype=torch.float64)
    device.pin(tensor)
    assert cuda.registered == [(tensor.data_ptr(), 48)]
    assert cuda.log == []
    del tensor
    assert cuda.log == ["unregistered"]


def test_memory_that_cannot_be_page_locked_is_told_and_not_unlocked(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.status = 712
    tensor = torch.zeros(1)
    CudaDevice(0).pin(tensor)
    assert "CUDA cannot page-lock their memory (712)" in caplog.text
    del tensor
    assert cuda.log == []
