"""What a device is still busy with, as the watchdog asks it."""

from types import SimpleNamespace
from typing import Any

from sirtaki.comm.gradients.iteration import InFlight, IterationEvents


class Device:
    """Reaches events up to `now`."""

    now = 0.0

    def is_reached(self, event: float) -> bool:
        return event <= self.now


def made() -> tuple[Device, InFlight]:
    device = Device()
    in_flight = InFlight(device)  # type: ignore[arg-type]
    for number in range(3):
        in_flight.add(IterationEvents(number, 10.0 * number, 10.0 * number + 2, 10.0 * number + 5))
    return device, in_flight


def test_only_a_reduction_after_the_end_of_its_backward_pass_can_stall() -> None:
    device, in_flight = made()
    device.now = 11.0  # in the second backward pass
    assert in_flight.stalled() is None
    device.now = 13.0
    first = in_flight.stalled()
    assert first is not None
    assert first[0] == 1
    assert in_flight.stalled() == first  # since the first time that it was seen
    device.now = 16.0
    assert in_flight.stalled() is None
    device.now = 23.0
    second = in_flight.stalled()
    assert second is not None
    assert second[0] == 2
    device.now = 25.0
    assert in_flight.stalled() is None


def test_a_device_is_busy_until_the_last_iteration_is_reduced() -> None:
    device, in_flight = made()
    device.now = 24.0
    assert in_flight.busy
    device.now = 25.0
    assert not in_flight.busy
    assert not InFlight(device).busy  # type: ignore[arg-type]


def test_the_first_unit_that_is_not_reduced_is_named() -> None:
    _, in_flight = made()
    assert in_flight.unreduced_unit() == ""

    def unit(stream: int) -> Any:
        layout = SimpleNamespace(describe=lambda start, stop: f"elements {start} to {stop}")
        return SimpleNamespace(group=SimpleNamespace(layout=layout), start=stream, stop=9, stream=stream)

    works: list[Any] = [SimpleNamespace(is_done=lambda done=done: done) for done in (True, False, False)]
    in_flight.units = list(zip([unit(0), unit(1), unit(2)], works, strict=True))
    assert in_flight.unreduced_unit() == "unit 2 of 3 (elements 1 to 9) on stream 1"
