"""What an iteration measured: its own times on the host, those of the one before on a device with streams."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sirtaki.comm.gradients.iteration import InFlight, IterationReport, report


@dataclass
class Clock:
    """A device whose moments are given."""

    streams: bool
    waited_for: list[float] = field(default_factory=list)

    def wait_for(self, event: float) -> None:
        self.waited_for.append(event)

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin


def iteration(device: Clock, begin: float, *ready: float | None) -> Any:
    """Gradients come from `begin` on, the backward pass takes 2 s, and 3 s later all is reduced."""
    return SimpleNamespace(
        device=device,
        first_ready=begin,
        backward_ended=begin + 2.0,
        reduced=begin + 5.0 + begin,
        ready_events=list(ready),
        trace=None,
    )


def reports(device: Clock, *, profiling: bool = False) -> list[IterationReport]:
    in_flight = InFlight(device)  # type: ignore[arg-type]
    return [
        report(iteration(device, float(begin)), in_flight, number=number, profiling=profiling, profiled=False)
        for number, begin in enumerate((10, 20))
    ]


def test_on_the_host_an_iteration_tells_of_itself() -> None:
    told = reports(Clock(streams=False))
    assert [one.span_s for one in told] == [15.0, 25.0]


def test_with_streams_it_tells_of_the_one_before_and_waits_for_no_other() -> None:
    device = Clock(streams=True)
    assert [one.span_s for one in reports(device)] == [15.0, 15.0]
    assert device.waited_for == [25.0, 25.0]


def test_while_the_order_is_profiled_it_waits_for_itself_with_streams_too() -> None:
    device = Clock(streams=True)
    assert [one.span_s for one in reports(device, profiling=True)] == [15.0, 25.0]
    assert device.waited_for == [25.0, 45.0]


def test_ready_times_count_from_the_first_gradient_and_what_did_not_come_from_the_backward_pass_was_there_at_once() -> (
    None
):
    device = Clock(streams=False)
    told = report(
        iteration(device, 10.0, 10.5, None, 10.0),
        InFlight(device),  # type: ignore[arg-type]
        number=0,
        profiling=True,
        profiled=True,
    )
    assert told.ready_s == pytest.approx((0.5, 0.0, 0.0))
    assert told.backward_s == pytest.approx(2.0)
    assert told.profiled
