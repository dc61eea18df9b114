"""Gradients on a GPU: every access is ordered, no memory is reused too early, and the host never waits for the GPU."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.stream_order import ITERATIONS, WARM_UP, Training
from fakes.cuda import RELEASES, FakeCuda, Stream

from sirtaki.comm import device as product
from sirtaki.comm.control.members import alone
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import cuda_device
from sirtaki.comm.gradients.pipeline import EVERY
from sirtaki.comm.nccl_streams import transport
from sirtaki.comm.nccl_streams.transport import find_nccl
from sirtaki.comm.plan import TransportKind


@pytest.fixture(autouse=True)
def launch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@contextmanager
def training(cuda: FakeCuda, **options: Any) -> Iterator[Training]:
    with cuda:
        found = Training(cuda, **options)
        try:
            yield found
        finally:
            found.close()


Streams = Callable[[Training], tuple[Callable[[int], Stream], Stream]]


def all_default(cuda: FakeCuda) -> tuple[Callable[[int], Stream], Stream]:
    return lambda index: cuda.current_stream(), cuda.current_stream()


def all_on_another(cuda: FakeCuda) -> tuple[Callable[[int], Stream], Stream]:
    own = cuda.make_stream()
    return lambda index: own, own


def step_on_the_default(cuda: FakeCuda) -> tuple[Callable[[int], Stream], Stream]:
    own = cuda.make_stream()
    return lambda index: own, cuda.current_stream()


def default_then_another(cuda: FakeCuda) -> tuple[Callable[[int], Stream], Stream]:
    own, default = cuda.make_stream(), cuda.current_stream()
    return lambda index: default if index >= 3 else own, default


def another_then_default(cuda: FakeCuda) -> tuple[Callable[[int], Stream], Stream]:
    own, default = cuda.make_stream(), cuda.current_stream()
    return lambda index: own if index >= 3 else default, default


def step_elsewhere(cuda: FakeCuda) -> tuple[Callable[[int], Stream], Stream]:
    default = cuda.current_stream()
    return lambda index: default, cuda.make_stream()


def two_mixed(cuda: FakeCuda) -> tuple[Callable[[int], Stream], Stream]:
    own = [cuda.make_stream(), cuda.make_stream()]
    return lambda index: own[index % 2], cuda.current_stream()


SCENARIOS = [
    all_default,
    all_on_another,
    step_on_the_default,
    default_then_another,
    another_then_default,
    step_elsewhere,
    two_mixed,
]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kind", [TransportKind.NCCL, TransportKind.STAGED])
@pytest.mark.parametrize("streams", SCENARIOS)
def test_all_is_ordered_and_the_host_never_waits(streams: Any, kind: TransportKind, in_order: bool) -> None:
    cuda = FakeCuda()
    with training(cuda, kind=kind) as job:
        job.run(*streams(cuda), in_order=in_order)
        assert job.params[2][0, 0].item() == ITERATIONS * 3.0 * 0.5
    cuda.check()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_release_and_dtype_is_ordered(release: str, dtype: torch.dtype) -> None:
    cuda = FakeCuda(release=release)
    with training(cuda, dtype=dtype) as job:
        job.run(*two_mixed(cuda))
        assert job.params[2][0, 0].item() == ITERATIONS * 3.0 * 0.5
    cuda.check()


@pytest.mark.parametrize("kind", [TransportKind.NCCL, TransportKind.STAGED])
def test_gradients_that_may_be_none_do_not_make_the_host_wait_where_this_rank_has_them_all(
    kind: TransportKind,
) -> None:
    cuda = FakeCuda()
    with training(cuda, kind=kind, unused_as_none=True) as job:
        job.run(*all_default(cuda))
        assert job.params[2][0, 0].item() == ITERATIONS * 3.0 * 0.5
    cuda.check()


def test_a_gradient_that_no_rank_has_is_none_and_the_host_waits_for_that_alone() -> None:
    cuda = FakeCuda()
    with training(cuda, unused_as_none=True) as job:
        job.run(*all_default(cuda), absent=(2,))
        assert job.params[2].grad is None
        assert job.params[3].grad is not None
        assert not job.params[2].any().item()
    assert len(cuda.blocking) == 1
    assert "Event.synchronize" in cuda.blocking[0]
    cuda.blocking.clear()
    cuda.check()


def test_a_missing_gradient_is_zero_and_nothing_waits() -> None:
    cuda = FakeCuda()
    with training(cuda) as job:
        job.run(*two_mixed(cuda), absent=(0, 4))
        assert job.params[4].grad is not None
        assert not job.params[4].grad.any().item()
    cuda.check()


@pytest.mark.parametrize("streams", SCENARIOS)
def test_a_gradient_that_the_user_keeps_keeps_its_value(streams: Any) -> None:
    cuda = FakeCuda()
    with training(cuda) as job:
        stream_of, step_on = streams(cuda)
        kept: list[torch.Tensor] = []
        for number in range(ITERATIONS):
            cuda.steady = number >= WARM_UP
            job.iteration(stream_of, step_on, values=float(number))
            for wanted, tensor in kept:
                read = tensor + 0.0  # on the user's stream
                cuda.steady = False
                assert read.eq(wanted).all().item()
                cuda.steady = number >= WARM_UP
            first, second = job.params[0].grad, job.params[1].grad
            assert first is not None
            assert second is not None
            kept = [
                (0.5 * (1 + number), first),
                (0.5 * (2 + number), second.detach()),
                (0.5 * (2 + number), second[3:5]),
            ]
            del first, second
        cuda.steady = False
        kept.clear()
    cuda.check()


def test_gradients_in_the_expected_order_need_not_be_counted_one_by_one() -> None:
    cuda = FakeCuda()
    with training(cuda) as job:
        for _ in range(WARM_UP):
            job.iteration(*all_default(cuda))
        assert job.sync.begin_pass() is not EVERY
    cuda.check()


def test_each_stream_number_has_a_cuda_stream_of_its_own() -> None:
    cuda = FakeCuda()
    with training(cuda, streams=16) as job:
        job.run(*all_default(cuda))
        own = {stream for _, what, stream in cuda.nccl.launches[-50:]}
        assert len(own) > 4
        for _ in range(10):
            for _ in range(product.POOL_STREAMS - 1):
                cuda.make_stream(priority=-1)  # the user's, from the same pool: it would be the same one's turn again
            stream = job.device.make_stream().cuda_stream
            assert stream not in own
            own.add(stream)
    cuda.check()


def test_buffers_are_aligned_for_all_sizes() -> None:
    cuda = FakeCuda()
    with training(cuda) as job:
        job.run(*all_default(cuda))
        layout = job.sync.layouts[0]
        assert {offset * layout.itemsize_bytes % 256 for offset in layout.offsets[:-1]} == {0}
        assert {unit.start * layout.itemsize_bytes % 256 for unit in job.sync.plans[0].units} == {0}
    cuda.check()


def test_a_graph_may_be_replayed_after_a_pass_that_does_not_compute_all_gradients() -> None:
    """The replay writes to memory that a unit's gradients are copied from, and that no allocator protects."""
    cuda = FakeCuda()
    with training(cuda) as job:
        memory = [torch.zeros_like(param) for param in job.params]
        for number in range(ITERATIONS):
            cuda.steady = number >= WARM_UP
            for index in reversed(range(1, len(memory))):
                memory[index].fill_(2.0)
                job.params[index].grad = memory[index].detach()
                job.sync.ready(index, job.params[index].grad, 0)
            job.sync.run_copies()  # the end of the pass
            for place in memory[1:]:
                place.fill_(9.0)
            job.sync.finish()
            cuda.next_iteration()
        cuda.steady = False
        assert job.params[2].grad.eq(2.0 * 0.5).all()  # of a unit that was launched in the pass
    cuda.check()


def test_helper_threads_use_the_gpu_of_their_rank_and_leave_a_graph_capture_valid() -> None:
    cuda = FakeCuda(index=1)
    with training(cuda, kind=TransportKind.STAGED) as job:
        cuda.capturing = threading.current_thread()
        job.run(*two_mixed(cuda))
        in_flight = job.sync.in_flight
        asked: list[Callable[[], object]] = [in_flight.stalled, in_flight.unreduced_unit, lambda: in_flight.busy]
        threads = [threading.Thread(target=ask) for ask in asked]  # as the watchdog's
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cuda.capturing = None
    cuda.check()
    assert cuda.contexts == {1}


def test_memory_that_cannot_be_page_locked_is_logged_and_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda = FakeCuda()
    cuda.register_status = 712
    with training(cuda) as job:
        job.device.pin(torch.zeros(100, device="cpu"))
        job.run(*all_default(cuda))
    assert "CUDA cannot page-lock host memory (error 712)" in caplog.text
    cuda.check()


def test_an_nccl_that_cannot_start_is_logged_once_and_gradients_are_staged(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda()
    cuda.refuse_nccl = "unhandled system error"
    with cuda:
        control = ControlPlane(alone())
        assert find_nccl(control, cuda_device(0), forced=False, timeout_s=5.0) is None
        control.close()
    assert caplog.messages == [
        "Sirtaki sends gradients through host memory instead of over NCCL, because NCCL could not be started "
        "(rank 0: unhandled system error)"
    ]


@pytest.mark.parametrize("late", [False, True])
def test_several_communicators_run_only_where_nccl_orders_them(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `attach`, where DDP may have used NCCL before Sirtaki is imported."""
    monkeypatch.delenv(transport.LAUNCH_ORDER)
    monkeypatch.setattr(transport, "_set_too_late", False)
    monkeypatch.setattr(dist, "is_initialized", lambda: late)
    cuda = FakeCuda()
    cuda.initialized = late
    if late:
        cuda.nccl.parameters = dict(os.environ)
    with cuda:
        transport.ask_for_launch_order()
        control = ControlPlane(alone())
        opener = find_nccl(control, cuda_device(0), forced=False, timeout_s=5.0)
        assert opener is not None
        assert (opener.max_streams == 1) == late
        control.close()
    cuda.check()
