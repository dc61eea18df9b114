"""What one iteration measured."""

from __future__ import annotations

from dataclasses import dataclass

from .in_flight import InFlight, IterationEvents
from .iteration import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """What one iteration measured on this rank.

    Attributes:
        span_s: from the first ready gradient to the last reduced one; on a device with streams, of the iteration
            before, except in order-profiling iterations.
        backward_s: from the first ready gradient to the end of the backward pass, of the same iteration.
        ready_s: when each gradient became ready after the first, by parameter index, `(n_gradients,)`; only
            order-profiling iterations record it.
        profiled: the order was profiled in this iteration: layouts may be new, and plans the default again.
    """

    span_s: float
    backward_s: float
    ready_s: tuple[float, ...] = ()
    profiled: bool = False


def report(
    iteration: Iteration, in_flight: InFlight, *, number: int, profiling: bool, profiled: bool
) -> IterationReport:
    """Of an iteration whose gradients are reduced, on the host; waits for the device, for the iteration before at most.

    Args:
        iteration: what has come and left in it.
        in_flight: takes it up.
        number: its own.
        profiling: the order was profiled in it.
        profiled: and is known now.
    """
    device = iteration.device
    assert iteration.first_ready is not None
    events = IterationEvents(number, iteration.first_ready, iteration.backward_ended, iteration.reduced)
    before = in_flight.add(events)
    measured = before if device.streams and not profiling else events
    # The host is never more than one iteration ahead.
    device.wait_for(measured.reduced if iteration.trace is None else events.reduced)
    if iteration.trace is not None:
        iteration.trace.write(events, profiling=profiling)
    return IterationReport(
        span_s=device.elapsed_s(measured.first_ready, measured.reduced),
        backward_s=max(0.0, device.elapsed_s(measured.first_ready, measured.backward_ended)),  # may be none at all
        ready_s=tuple(
            0.0 if event is None else max(0.0, device.elapsed_s(events.first_ready, event))
            for event in iteration.ready_events
        ),
        profiled=profiled,
    )
