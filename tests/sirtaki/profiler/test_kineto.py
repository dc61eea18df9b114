"""torch.profiler is switched on and off, and its times are ours."""

import threading
import time

import pytest
import torch

from sirtaki.analysis.operators import Kineto
from sirtaki.errors import RecordingError


def test_operators_have_times_of_our_clock() -> None:
    kineto = Kineto()
    before_s = time.perf_counter()
    torch.ones(300, 300).matmul(torch.ones(300, 300))
    after_s = time.perf_counter()
    kineto.mark()
    seen = kineto.stop()
    product = next(event for event in seen.events if event.name == "aten::matmul")
    assert before_s - seen.clock.error_s <= product.begin_s < product.end_s <= after_s + seen.clock.error_s
    assert seen.clock.error_s < 1e-3
    assert product.thread == seen.thread
    assert not product.on_device
    assert not any(event.name == "sirtaki.mark" for event in seen.events)


def test_annotations_are_no_operators_and_passes_are_joined_by_numbers() -> None:
    weight = torch.ones(4, requires_grad=True)
    kineto = Kineto()
    with torch.profiler.record_function("mine"):
        (weight * 2).sum().backward()
    events = {event.name: event for event in sorted(kineto.stop().events, key=lambda event: -event.begin_s)}
    assert events["mine"].annotation
    assert not events["aten::mul"].annotation
    assert events["aten::mul"].sequence == events["autograd::engine::evaluate_function: MulBackward0"].sequence >= 0


def test_a_script_that_uses_it_keeps_it() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RecordingError, match="in use by the script"),
    ):
        Kineto()
    Kineto().stop()


def test_another_thread_knows_that_it_is_not_its_own() -> None:
    kineto, seen = Kineto(), []
    asking = threading.Thread(target=lambda: seen.append(kineto.here))
    asking.start()
    asking.join()
    assert seen == [False]
    assert kineto.here
    kineto.stop()


def test_memory_is_told_in_its_order_with_who_asked_for_it() -> None:
    weight = torch.ones(1000, requires_grad=True)
    kineto = Kineto()
    before_s = time.perf_counter()
    (weight * 2).sum().backward()
    weight.grad = None
    seen = kineto.stop()
    assert all(one.device == "cpu" and one.at_s >= before_s - seen.clock.error_s for one in seen.memory)
    assert [one.at_s for one in seen.memory] == sorted(one.at_s for one in seen.memory)
    large = [(one.n_bytes, one.operator) for one in seen.memory if abs(one.n_bytes) == 4000]
    assert large[0] == (4000, "aten::mul")
    assert sum(n_bytes for n_bytes, _ in large) == 0
    assert not any(event.name == "[memory]" for event in seen.events)


def test_what_operators_read_is_watched_until_the_next_mark() -> None:
    kineto = Kineto(edges=True)
    torch.ones(4).sum()
    kineto.mark()
    torch.ones(4).prod()
    assert [(one.name, one.after) for one in kineto.stop().readers] == [("aten::ones", ()), ("aten::sum", (0,))]
